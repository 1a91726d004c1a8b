"""The charts of a comparison, from the files of a results folder.

`scaleinv.plots.chart` draws them.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleinv.analysis.paired import SeedLosses
from scaleinv.eval.loss import Evaluation
from scaleinv.eval.summary import (
    Measurement,
    Measurements,
    lengths_of,
    mapping,
    multiple,
    number,
    ordered_methods,
)
from scaleinv.files import read_lines
from scaleinv.lengths import label as length_label
from scaleinv.lengths import ordered as ordered_lengths
from scaleinv.lengths import tokens_label
from scaleinv.plots import style
from scaleinv.plots.chart import Chart, Panel, Point, Series, filled
from scaleinv.plots.units import Unit

FOUND = "share of needles found"

MAGNIFIED = 3
"""A second panel shows the lower half of all losses if that makes it at least this many times as tall."""

OTHERS = ("#EE3377", "#009988", "#BBBBBB")
"""Colours for methods that `style` does not know: the rest of Paul Tol's "vibrant" scheme."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """What a training run wrote about its steps."""

    model: str
    """The method that it was trained as."""
    seed: int
    lines: tuple[Mapping[str, Any], ...]

    def seconds(self, batch_tokens: int) -> float | None:
        """How long all steps took without validation; None if most steps do not say. (The first may not.)"""
        steps = [line for line in self.lines if "loss" in line]
        rates = [rate for line in steps if isinstance(rate := line.get("tokens_per_second"), (int, float)) and rate > 0]
        if len(rates) <= len(steps) / 2:
            return None
        return len(steps) * statistics.fmean(batch_tokens / rate for rate in rates)


def read_curves(folder: Path) -> dict[Path, Curve]:
    """The curves of a results folder, ``<model>-seed<n>.jsonl``, by file, without those of the sweep of τ."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        named = re.fullmatch(r"(.+?)(-tau[\d.e-]+)?-seed(\d+)", path.stem)
        if not named:
            raise ValueError(f"{path} must be named like rope-seed0.jsonl")
        if not named[2]:
            found[path] = Curve(named[1], int(named[3]), tuple(read_lines(path)))
    return found


def loss_by_length(
    losses: Measurements, train_length: int | None, unit: Unit, seeds: SeedLosses | None = None
) -> Chart | None:
    """One curve per method against the length of the context, from ``summary.json``, with the losses of each seed.

    If some methods lie close together and others far off, a second panel shows the lower half.
    """
    chart = _by_length("loss-by-length", "Loss by context length", unit.loss, losses, train_length, seeds or {})
    dots = " Small dots are single seeds." if seeds else ""
    caption = f"Validation loss, mean over seeds; bars are standard errors.{dots}"
    if chart is None:
        return None
    (panel,) = chart.panels
    values = [point.y for series in panel.series for point in series.points]
    panels: tuple[Panel, ...] = (panel,)
    if max(values) - min(values) > MAGNIFIED * (statistics.median(values) - min(values)) > 0:
        close = dataclasses.replace(panel, title="the lower half, magnified", zoomed=True)
        panels = (dataclasses.replace(panel, title="all methods"), close)
    return dataclasses.replace(chart, caption=caption, panels=panels)


def needle_by_length(found: Measurements, train_length: int | None) -> Chart | None:
    """One curve per method against the length of the context, from ``summary.json``."""
    chart = _by_length("needle-by-length", "Needles found", FOUND, found, train_length, {})
    caption = "Bars are 95 % Wilson intervals."
    return chart and dataclasses.replace(chart, caption=caption, y_range=(0.0, 1.0))


def _by_length(
    name: str, title: str, y_label: str, found: Measurements, train_length: int | None, seeds: SeedLosses
) -> Chart | None:
    keys = lengths_of(found, train_length)
    looks = _looks(found)
    named = {key: (multiple(key, train_length), length_label(key, train_length)) for key in keys}

    def dots(method: str, key: str) -> tuple[float, ...]:
        values = [loss.mean for loss in seeds.get(method, {}).get(key, {}).values()]
        return tuple(value for value in values if math.isfinite(value)) if len(values) > 1 else ()

    series = tuple(
        Series(
            looks[method],
            _points((*named[key], by_length[key], dots(method, key)) for key in keys if key in by_length),
        )
        for method, by_length in found.items()
    )
    unit = f"1× = {train_length:,} tokens" if train_length else "× the training length"
    ticks = tuple((multiple(key, train_length), length_label(key)) for key in keys)
    panels = (Panel("", series, mark=1.0),)
    return filled(Chart(name, title, "", f"context length ({unit})", y_label, panels, log_x=True, ticks=ticks))


def by_position(evaluations: Iterable[Evaluation], train_length: int | None, unit: Unit) -> Chart | None:
    """Loss by position in the window, one panel per length, mean over seeds."""
    losses: dict[str, dict[str, dict[Any, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for evaluation in evaluations:
        for key, at in evaluation.lengths.items():
            multiple(key, train_length, f"evaluation of {evaluation.method}")
            for low, high, loss in at.positions:
                losses[key][evaluation.method][low, high].append(loss)
    keys = ordered_lengths(losses, train_length)
    looks = _looks(method for methods in losses.values() for method in methods)
    panels = [
        Panel(
            f"windows of {length_label(key, train_length)}",
            tuple(Series(look, _positions(losses[key][name])) for name, look in looks.items() if name in losses[key]),
            mark=train_length,
            settled=8,  # the first tokens have no context
        )
        for key in keys
    ]
    last = max((high for methods in losses.values() for bins in methods.values() for _, high in bins), default=0)
    return filled(
        Chart(
            "loss-by-position",
            "Loss by position in the window",
            "Mean over seeds. Beyond the training length, a model that copes stays flat.",
            "position in the window (tokens)",
            f"validation {unit.loss}",
            tuple(panels),
            log_x=True,
            zooms=True,
            ticks=tuple((4.0**k, tokens_label(4**k)) for k in range(16) if 4**k <= last),
        )
    )


def training(curves: Mapping[Path, Curve], settings: Mapping[str, Any], unit: Unit) -> Chart | None:
    """Training loss, and validation loss at each length, from `read_curves`.

    The caption says on which tokens, because a curve ends at a different value than the table.
    """
    train_length = settings.get("train_length")
    losses: dict[str, dict[str, dict[Any, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for path, curve in curves.items():
        for line in curve.lines:
            step = number(line, "step", str(path))
            if "loss" in line:
                losses[""][curve.model][step].append(number(line, "loss", str(path)))
            for key in mapping(line.get("validation") or {}, f"{path}: validation"):
                multiple(key, train_length, str(path))
                losses[key][curve.model][step].append(number(line["validation"], key, f"{path}: validation"))
    last = max((step for models in losses.values() for steps in models.values() for step in steps), default=0)
    looks = _looks(model for models in losses.values() for model in models)
    panels = []
    for key in [*losses.keys() & {""}, *ordered_lengths(losses.keys() - {""}, train_length)]:
        series = tuple(
            Series(look, _steps(losses[key][model])) for model, look in looks.items() if model in losses[key]
        )
        title = f"validation at {length_label(key, train_length)}" if key else "training"
        panels.append(Panel(title, series, settled=last / 10))
    caption = (
        "Mean over seeds. Methods that only act at inference have no curve: they use the model of another. "
        "The training panel shows the loss on each step's own batch."
    )
    if settings.get("distill"):
        caption += (
            " Stock learns from the text, and its loss is that of the text. The others learn from stock's predictions, "
            "and theirs is the divergence from them: the two cannot be compared."
        )
    if losses.keys() - {""}:
        caption += f" {_validated(settings)}"
    chart = Chart("training", "Loss during training", caption, "step", unit.loss, tuple(panels), zooms=True)
    return filled(chart)


def _validated(settings: Mapping[str, Any]) -> str:
    """Which tokens the validation panels and the table are measured on."""
    during, after = settings.get("training_validation_tokens"), settings.get("validation_tokens")
    first = f"the first {during:,}" if isinstance(during, int) else "the first few"
    rest = f"{after:,}" if isinstance(after, int) else "more"
    if during is not None and during == after:
        return f"The validation panels and the table both use {first} held-out tokens."
    return (
        f"The validation panels use {first} held-out tokens and the table {rest}: other text, "
        "so a curve ends at a different value than the table."
    )


def sweep_chart(sweep: Measurements, train_length: int | None, unit: Unit) -> Chart | None:
    """Figure 5: one curve per length against τ."""
    colors = (*style.RATIOS, *OTHERS)
    series = tuple(
        Series(
            style.Look(length_label(key, train_length), colors[i % len(colors)], "os^Dv"[i % 5]),
            _points((float(tau), f"τ = {tau}", by[key], ()) for tau, by in sweep.items() if key in by),
        )
        for i, key in enumerate(lengths_of(sweep, train_length))
    )
    ticks = tuple((float(tau), tau) for tau in sweep)
    caption = "Scale-invariant + p-RoPE, one curve per context length. The paper uses τ = 10. Bars are standard errors."
    return filled(
        Chart(
            "tau-sweep",
            "Loss by lengthscale τ",
            caption,
            "lengthscale τ (tokens)",
            f"validation {unit.loss}",
            (Panel("", series),),
            log_x=True,
            ticks=ticks,
            zooms=True,
        )
    )


def _looks(methods: Iterable[str]) -> dict[str, style.Look]:
    """How each method is drawn, in the paper's order; unknown ones keep their names and get spare colours."""
    ordered = ordered_methods(methods)
    unknown = [name for name in ordered if style.known(name) is None]
    spare = {name: style.Look(name, OTHERS[i % len(OTHERS)], "osv^D"[i % 5], "--") for i, name in enumerate(unknown)}
    return {name: style.known(name) or spare[name] for name in ordered}


def _points(found: Iterable[tuple[float, str, Measurement, tuple[float, ...]]]) -> tuple[Point, ...]:
    """Points at x, with what x is in words and the values of single seeds; none where a run diverged."""
    return tuple(
        Point(x, at.value, at.low, at.high, words, seeds) for x, words, at, seeds in found if math.isfinite(at.value)
    )


def _positions(bins: Mapping[tuple[float, float], Sequence[float]]) -> tuple[Point, ...]:
    """Each range of positions [low, high) at its geometric middle, counted from 1 so that the first has a logarithm."""
    means = ((low, high, sum(losses) / len(losses)) for (low, high), losses in sorted(bins.items()))
    return tuple(
        Point(math.sqrt((low + 1) * high), mean, None, None, _span("position", low, high - 1))
        for low, high, mean in means
        if math.isfinite(mean)
    )


def _steps(steps: Mapping[float, Sequence[float]], most: int = 150) -> tuple[Point, ...]:
    """Means over seeds; if there are more than ``most`` steps, also over consecutive ones."""
    means = [(step, sum(losses) / len(losses)) for step, losses in sorted(steps.items())]
    means = [(step, mean) for step, mean in means if math.isfinite(mean)]
    size = math.ceil(len(means) / most) or 1
    points = []
    for block in (means[i : i + size] for i in range(0, len(means), size)):
        x, y = (sum(values) / len(block) for values in zip(*block, strict=True))
        points.append(Point(x, y, None, None, _span("step", block[0][0], block[-1][0])))
    return tuple(points)


def _span(name: str, first: float, last: float) -> str:
    return f"{name} {first:,.0f}" if first == last else f"{name}s {first:,.0f}–{last:,.0f}"
