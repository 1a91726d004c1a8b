"""The charts of a comparison: made from the files of a results folder, and drawn as PNG and SVG.

A `Chart` says what to show; `draw` shows it with matplotlib, and ``page.js`` in the browser, from the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleinv.eval.summary import (
    Measurement,
    Measurements,
    lengths_of,
    mapping,
    multiple,
    number,
    ordered_methods,
    parse_accuracy,
)
from scaleinv.files import read_json, read_lines, write_data
from scaleinv.lengths import label as length_label
from scaleinv.lengths import ordered as ordered_lengths
from scaleinv.lengths import tokens_label
from scaleinv.plots import needle, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS = "loss (nats per token)"
FOUND = "share of needles found"

OTHERS = ("#EE3377", "#009988", "#CC3311", "#33BBEE", "#BBBBBB")
"""For what `style` has no colour for: the rest of Paul Tol's "vibrant" scheme."""

MARKED = 40
"""Curves of more points than this have no markers."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A value, the interval it lies in, and what x is, in words."""

    x: float
    y: float
    low: float | None
    high: float | None
    label: str


@dataclasses.dataclass(frozen=True)
class Series:
    look: style.Look
    points: tuple[Point, ...]


@dataclasses.dataclass(frozen=True)
class Panel:
    title: str
    series: tuple[Series, ...]
    mark: float | None = None
    """Where on the x axis the training length is."""
    settled: float | None = None
    """Points before this x do not count for the range of the y axis."""


@dataclasses.dataclass(frozen=True)
class Chart:
    name: str
    title: str
    caption: str
    x_label: str
    y_label: str
    panels: tuple[Panel, ...]
    log_x: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    """Of the x axis; none for round numbers."""
    y_range: tuple[float, float] | None = None

    def save(self, figures: Path, tables: Path) -> list[Path]:
        """Write ``{name}.png`` and ``.svg`` to ``figures``, and the points as CSV and JSON to ``tables``."""
        points = [
            {"panel": panel.title, "series": series.look.label, **dataclasses.asdict(point)}
            for panel in self.panels
            for series in panel.series
            for point in series.points
        ]
        return [*style.save(draw(self), figures, self.name), *write_data(tables, f"{self.name}-points", points, self)]


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """Share of needles found by row, then depth (from and to, as fractions of the context), then length."""

    rows: dict[str, dict[tuple[float, float], dict[str, Measurement]]]
    lengths: tuple[str, ...]
    results: tuple[Mapping[str, Any], ...]
    """What the files hold."""

    def save(self, figures: Path) -> list[Path]:
        """Write ``needle-depth.png`` and ``.svg``, with the rows of the paper."""
        known = [result for result in self.results if result["row"] in style.METHODS]
        return needle.save_heatmaps(known, figures, "needle-depth") if known else []


def by_length(name: str, title: str, y_label: str, estimates: Measurements, train_length: int | None) -> Chart | None:
    """A curve for each row against the length of the context, from ``summary.json``."""
    keys = lengths_of(estimates, train_length)
    looks = _looks(estimates)
    named = {key: (multiple(key, train_length), length_label(key, train_length)) for key in keys}
    series = tuple(
        Series(looks[row], _points((*named[key], lengths[key]) for key in keys if key in lengths))
        for row, lengths in estimates.items()
    )
    unit = f"1× = {train_length:,} tokens" if train_length else "× the training length"
    return _filled(
        Chart(
            name,
            title,
            "Bars are standard errors." if y_label == LOSS else "Bars are 95 % Wilson intervals.",
            f"context length ({unit})",
            y_label,
            (Panel("", series, mark=1.0),),
            log_x=True,
            ticks=tuple((multiple(key, train_length), length_label(key)) for key in keys),
            y_range=(0.0, 1.0) if y_label == FOUND else None,
        )
    )


def by_position(folder: Path, train_length: int | None) -> Chart | None:
    """Loss by position in the window, a panel for each length, from ``evaluations/<row>-seed<k>.json``."""
    losses: dict[str, dict[str, dict[Any, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for path in sorted(folder.glob("*.json")):
        data = mapping(read_json(path), str(path))
        for key, measured in mapping(data.get("lengths"), f"{path}: lengths").items():
            multiple(key, train_length, str(path))
            for interval in mapping(measured, f"{path}: {key}").get("positions") or []:
                if not isinstance(interval, list) or len(interval) != 3:
                    raise ValueError(f"{path}: {key}: positions must be [first, past the last, loss], got {interval!r}")
                named = dict(zip(("first", "past the last", "loss"), interval, strict=True))
                low, high, loss = (number(named, name, f"{path}: {key}: positions") for name in named)
                losses[key][_row(data, path)][low, high].append(loss)
    keys = ordered_lengths(losses, train_length)
    looks = _looks(row for rows in losses.values() for row in rows)
    panels = [
        Panel(
            f"windows of {length_label(key, train_length)}",
            tuple(Series(look, _positions(losses[key][row])) for row, look in looks.items() if row in losses[key]),
            mark=train_length,
            settled=8,  # the first tokens have nothing to go by
        )
        for key in keys
    ]
    last = max((high for rows in losses.values() for bins in rows.values() for _, high in bins), default=0)
    return _filled(
        Chart(
            "loss-by-position",
            "Loss by position in the window",
            "Mean over seeds. Beyond the training length, a model that copes stays flat.",
            "position in the window (tokens)",
            f"validation {LOSS}",
            tuple(panels),
            log_x=True,
            ticks=tuple((4.0**k, tokens_label(4**k)) for k in range(16) if 4**k <= last),
        )
    )


def training(folder: Path, train_length: int | None) -> Chart | None:
    """Training loss, and validation loss at each length, from ``curves/<model>-seed<k>.jsonl``."""
    losses: dict[str, dict[str, dict[Any, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for path in sorted(folder.glob("*.jsonl")):
        named = re.fullmatch(r"(.+?)(-tau[\d.e-]+)?-seed\d+", path.stem)
        if not named:
            raise ValueError(f"{path} must be named like rope-seed0.jsonl")
        if named[2]:  # of the sweep, which has a chart of its own
            continue
        for line in read_lines(path):
            step = number(line, "step", str(path))
            if "loss" in line:
                losses[""][named[1]][step].append(number(line, "loss", str(path)))
            for key in mapping(line.get("validation") or {}, f"{path}: validation"):
                multiple(key, train_length, str(path))
                losses[key][named[1]][step].append(number(line["validation"], key, f"{path}: validation"))
    last = max((step for models in losses.values() for steps in models.values() for step in steps), default=0)
    looks = _looks(model for models in losses.values() for model in models)
    panels = []
    for key in [*losses.keys() & {""}, *ordered_lengths(losses.keys() - {""}, train_length)]:
        series = tuple(
            Series(look, _steps(losses[key][model])) for model, look in looks.items() if model in losses[key]
        )
        title = f"validation at {length_label(key, train_length)}" if key else "training"
        panels.append(Panel(title, series, settled=last / 10))
    caption = "Mean over seeds. Rows that only act at inference have no curve: they use the model of another."
    return _filled(Chart("training", "Loss during training", caption, "step", LOSS, tuple(panels)))


def sweep_chart(sweep: Measurements, train_length: int | None) -> Chart | None:
    """Figure 5: a curve for each length against τ."""
    colors = (*style.RATIOS, *OTHERS)
    series = tuple(
        Series(
            style.Look(length_label(key, train_length), colors[i % len(colors)], "os^Dv"[i % 5]),
            _points((float(tau), f"τ = {tau}", lengths[key]) for tau, lengths in sweep.items() if key in lengths),
        )
        for i, key in enumerate(lengths_of(sweep, train_length))
    )
    ticks = tuple((float(tau), tau) for tau in sweep)
    caption = (
        "Scale-invariant + p-RoPE, a curve for each context length. The paper takes τ = 10. Bars are standard errors."
    )
    return _filled(
        Chart(
            "tau-sweep",
            "Loss by lengthscale τ",
            caption,
            "lengthscale τ (tokens)",
            f"validation {LOSS}",
            (Panel("", series),),
            log_x=True,
            ticks=ticks,
        )
    )


def needle_depths(folder: Path, train_length: int | None) -> HeatMap | None:
    """Accuracy by depth and length, from ``needle/<row>.json``."""
    rows: dict[str, Any] = {}
    results = {}
    for path in sorted(folder.glob("*.json")):
        data = mapping(read_json(path), str(path))
        depths = rows.setdefault(_row(data, path), defaultdict(dict))
        own = mapping(data.get("settings", {}), f"{path}: settings")
        results[_row(data, path)] = {**data, "settings": {"train_length": train_length, **own}}
        for key, measured in mapping(data.get("lengths"), f"{path}: lengths").items():
            where = f"{path}: {key}"
            multiple(key, train_length, str(path))
            number(mapping(measured, where), "length", where)
            parse_accuracy(measured, where)
            if not isinstance(measured.get("depths"), list):
                raise ValueError(f"{where}: depths must be a list, got {measured.get('depths')!r:.60}")
            for depth in measured["depths"]:
                ends = tuple(number(mapping(depth, where), end, where) for end in ("from", "to"))
                if not 0 <= ends[0] < ends[1] <= 1:
                    raise ValueError(f"{where}: from and to must be rising fractions of the context, got {ends}")
                depths[ends][key] = parse_accuracy(depth, where)
    kept = {row: dict(sorted(rows[row].items())) for row in ordered_methods(rows) if rows[row]}
    keys = ordered_lengths((key for row in kept.values() for at in row.values() for key in at), train_length)
    return HeatMap(kept, tuple(keys), tuple(results[row] for row in kept)) if kept else None


def draw(chart: Chart) -> Figure:
    """The chart with matplotlib, its legend at the right."""
    with style.applied():
        figure, axes = style.panels(len(chart.panels), width=5.2 if len(chart.panels) == 1 else 4.0)
        figure.set_figwidth(figure.get_figwidth() + 2.4)
        for axis, panel in zip(axes, chart.panels, strict=True):
            for series in panel.series:
                _draw_series(axis, series)
            if chart.log_x:
                axis.set_xscale("log")
            if panel.mark is not None:
                axis.axvline(panel.mark, color="#888888", linewidth=1, linestyle=":", label="training length")
            if chart.ticks:
                left, right = axis.get_xlim()  # ticks beyond the data would widen it
                axis.set_xticks([x for x, _ in chart.ticks], [label for _, label in chart.ticks])
                axis.set_xlim(left, right)
                axis.minorticks_off()
            _limit(axis, chart, panel)
            axis.set_xlabel(chart.x_label)
            axis.set_ylabel(chart.y_label)
            axis.set_title(panel.title or chart.title)
        handles = {
            label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=9)
    return figure


def _draw_series(axis: Axes, series: Series) -> None:
    look, points = series.look, series.points
    x, y = [point.x for point in points], [point.y for point in points]
    marker = look.marker if len(points) <= MARKED else ""
    axis.plot(
        x, y, marker=marker, color=look.color, ls=look.dashes, label=look.label, zorder=2 + (look.color == "#000000")
    )
    bars = [(point.x, point.low, point.high) for point in points if point.low is not None and point.high is not None]
    if bars:
        axis.vlines(*zip(*bars, strict=True), color=look.color, linewidth=1)


def _limit(axis: Axes, chart: Chart, panel: Panel) -> None:
    if chart.y_range:
        axis.set_ylim(chart.y_range[0] - 0.03, chart.y_range[1] + 0.03)
    elif panel.settled is not None:
        y = [p.y for series in panel.series for p in series.points if p.x >= panel.settled]
        if y:
            pad = 0.06 * (max(y) - min(y)) or 0.1
            axis.set_ylim(min(y) - pad, max(y) + pad)


def _filled(chart: Chart) -> Chart | None:
    """The chart without its empty curves and panels; None if nothing is left."""
    panels = [
        dataclasses.replace(panel, series=tuple(series for series in panel.series if series.points))
        for panel in chart.panels
    ]
    panels = [panel for panel in panels if panel.series]
    return dataclasses.replace(chart, panels=tuple(panels)) if panels else None


def _looks(rows: Iterable[str]) -> dict[str, style.Look]:
    """How each row is drawn, in the paper's order; unknown rows keep their names and get spare colours."""
    ordered = ordered_methods(rows)
    unknown = [row for row in ordered if row not in style.METHODS]
    spare = {row: style.Look(row, OTHERS[i % len(OTHERS)], "osv^D"[i % 5], "--") for i, row in enumerate(unknown)}
    return {row: style.METHODS.get(row) or spare[row] for row in ordered}


def _points(found: Iterable[tuple[float, str, Measurement]]) -> tuple[Point, ...]:
    """Points at x, with what x is in words; none where a run diverged."""
    return tuple(Point(x, e.value, e.low, e.high, words) for x, words, e in found if math.isfinite(e.value))


def _positions(bins: Mapping[tuple[float, float], Sequence[float]]) -> tuple[Point, ...]:
    """Each range of positions [low, high) at its geometric middle, counted from 1 so that the first has a logarithm."""
    means = ((low, high, sum(losses) / len(losses)) for (low, high), losses in sorted(bins.items()))
    return tuple(
        Point(math.sqrt((low + 1) * high), mean, None, None, _span("position", low, high - 1))
        for low, high, mean in means
        if math.isfinite(mean)
    )


def _steps(steps: Mapping[float, Sequence[float]], most: int = 150) -> tuple[Point, ...]:
    """Means over seeds; where there are more than ``most`` steps, also over consecutive ones."""
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


def _row(data: Mapping[str, Any], path: Path) -> str:
    if not isinstance(data.get("row"), str):
        raise ValueError(f"{path} must name its row, got {data.get('row')!r}")
    return data["row"]
