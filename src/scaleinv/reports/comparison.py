"""The report of a comparison: one self-contained page, its figures for papers, and its tables.

The page is ``page.html`` of this package with ``page.css`` and ``page.js`` inside; nothing is fetched.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path

from scaleinv.analysis.paired import paired_differences, read_evaluations, seed_losses
from scaleinv.eval.loss import Evaluation
from scaleinv.eval.summary import SUMMARY, SWEEP, Summary, lengths_of, read_summary, read_sweep
from scaleinv.files import write_text
from scaleinv.lengths import label as length_label
from scaleinv.plots import compare, needle, paper, tables
from scaleinv.plots.chart import Chart
from scaleinv.plots.needle import HeatMap
from scaleinv.plots.tables import METHOD, Table, changes, method_label, signed, terminal_table
from scaleinv.plots.units import Unit
from scaleinv.reports import page
from scaleinv.reports.page import Section

__all__ = ["terminal_table", "write_report"]


@dataclasses.dataclass(frozen=True)
class Results:
    """What a results folder holds, as charts and tables by name; None for what is missing."""

    summary: Summary
    charts: dict[str, Chart | None]
    tables: dict[str, Table | None]
    heat: HeatMap | None


def write_report(folder: Path, *, base: str | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """Write ``report.html``, ``figures/`` and ``tables/`` to the results folder of a comparison; returns the page.

    Only ``summary.json`` must be there: parts that are missing are left out, and the page says which. A file that is
    there but malformed raises ValueError, with its name.

    Args:
        folder: what `scaleinv compare` wrote.
        base: the method that differences are taken to; default: scale-invariant p-RoPE, or an adaptation's stock model.
        progress: called with one line of text before each step.
    """
    folder = Path(folder)
    progress = progress or (lambda text: None)
    progress(f"reading {folder}")
    results = read_results(folder, base)
    for table in results.tables.values():
        if table:
            table.save(folder / "tables")
    if results.tables["differences"] is None:  # one of an earlier report would pass for this one's
        for path in (folder / "tables").glob("differences.*"):
            path.unlink()
    for chart in results.charts.values():
        if chart:
            progress(f"drawing {chart.name}")
            chart.save(folder / "figures", folder / "tables")
    if results.heat:
        progress("drawing needle-depth")
        results.heat.save(folder / "figures")
    summary = results.summary
    text = page.render(
        title(summary),
        headline(summary),
        _sections(results, page.analysis(folder / "analysis")),
        [chart for chart in results.charts.values() if chart],
    )
    path = folder / "report.html"
    write_text(path, text)
    progress(f"wrote {path}")
    return path


def read_results(folder: Path, base: str | None = None) -> Results:
    """Read and check the files of a comparison; differences are to ``base``."""
    summary = read_summary(folder / SUMMARY)
    if base is not None and base not in summary.loss:
        raise ValueError(f"base must be a method of {folder / SUMMARY} ({', '.join(summary.loss)}), got {base!r}")
    length, unit = summary.train_length, Unit.of(summary.settings)
    evaluations = _current(read_evaluations(folder / "evaluations"), summary)
    curves = compare.read_curves(folder / "curves")
    sweep = read_sweep(folder / SWEEP, length) if (folder / SWEEP).exists() else {}
    losses = seed_losses(evaluations)
    own = summary.settings.get("base")  # an adaptation is compared with the stock model
    base = base or (own if isinstance(own, str) else METHOD)
    charts = {
        "by length": compare.loss_by_length(summary.loss, length, unit, losses),
        "by position": compare.by_position(evaluations, length, unit),
        "training": compare.training(curves, summary.settings, unit),
        "needle": compare.needle_by_length(summary.needle, length),
        "sweep": compare.sweep_chart(sweep, length, unit),
    }
    found = {
        "loss": tables.loss_table(summary) if summary.loss else None,
        "differences": tables.difference_table(paired_differences(losses, base), length, unit, base),
        "bits": tables.bits_table(summary) if summary.loss else None,
        "models": tables.model_table(_parameters(summary), _seconds(curves, summary)),
        "needle": tables.needle_table(summary) if summary.needle else None,
        "sweep": tables.sweep_table(sweep, length, unit) if sweep else None,
    }
    return Results(summary, charts, found, needle.read_depths(folder / "needle", length))


def _current(evaluations: Iterable[Evaluation], summary: Summary) -> list[Evaluation]:
    """The evaluations that the summary is made of: earlier commands may have left other lengths and token counts."""
    tokens = summary.settings.get("validation_tokens") if "base" in summary.settings else None
    found = []
    for one in evaluations:
        asked = summary.loss.get(one.method, {})
        lengths = {label: at for label, at in one.lengths.items() if label in asked}
        if lengths and tokens in (None, one.tokens):
            found.append(dataclasses.replace(one, lengths=lengths))
    return found


def _parameters(summary: Summary) -> dict[str, int]:
    """By model, from ``settings.parameters``."""
    found = summary.settings.get("parameters")
    found = found if isinstance(found, Mapping) else {}
    return {name: count for name, count in found.items() if isinstance(count, int)}


def _seconds(curves: Mapping[Path, compare.Curve], summary: Summary) -> dict[str, list[float]]:
    """Training time by model, one number per seed that reports it."""
    found: dict[str, list[float]] = {}
    batch = summary.settings.get("batch_tokens")
    for curve in curves.values():
        seconds = curve.seconds(batch) if isinstance(batch, int) else None
        if seconds is not None:
            found.setdefault(curve.model, []).append(seconds)
    return found


def _sections(results: Results, analysis: str) -> list[Section]:
    """The sections of what there is, and at the end a note of what is missing."""
    summary, charts = results.summary, results.charts
    shown = {name: table for name, table in results.tables.items() if table}
    loss = needles = sweep = ""
    if "loss" in shown:
        beside = tables.paper_table("paper-loss", "Validation loss", paper.LOSS, summary.loss)
        loss = page.beside(shown["loss"], beside)
        if "differences" in shown:
            loss += page.table(shown["differences"])
        if "bits" in shown:
            loss += page.details("The same in bits per byte", page.table(shown["bits"], page.BEST))
    if "needle" in shown:
        beside = tables.paper_table("paper-needle", "Needle accuracy", paper.NEEDLE, summary.needle)
        needles = page.needle_note(summary.settings) + page.beside(shown["needle"], beside)
        needles += page.figure(charts["needle"])
    if results.heat:
        needles += page.heat(results.heat, summary.train_length)
    if "sweep" in shown:
        sweep = page.figure(charts["sweep"]) + page.table(shown["sweep"], page.BEST)
    models = page.table(shown["models"]) if "models" in shown else ""
    bodies = {
        ("loss", "Loss"): loss,
        ("length", "By length"): page.figure(charts["by length"]),
        ("position", "By position"): page.figure(charts["by position"]),
        ("training", "Training"): page.figure(charts["training"]) + models,
        ("needle", "Needle"): needles,
        ("sweep", "τ sweep"): sweep,
        ("analysis", "Analysis"): analysis,
    }
    sections = [Section(name, title, body) for (name, title), body in bodies.items() if body]
    missing = [title.lower() for (_, title), body in bodies.items() if not body]
    note = ""
    if missing:
        remedy = (
            " `scaleinv compare` makes evaluations/ and curves/." if {"by position", "training"} & {*missing} else ""
        )
        note = f"<p>This folder has nothing for: {escape(', '.join(missing))}.{remedy}</p>"
    return [*sections, Section("settings", "Settings", page.settings_table(summary.settings) + note)]


def headline(summary: Summary) -> str:
    """What the methods lose from the shortest length to the longest, and which is best there, in plain words."""
    keys = lengths_of(summary.loss, summary.train_length)
    if not keys:
        return "No losses were measured."
    sentences = []
    changed = sorted(changes(summary).items(), key=lambda item: item[1])
    if changed:
        few = changed if len(changed) <= 5 else [*changed[:2], changed[-1]]
        shown = [item for item in changed if item in few or item[0] == METHOD]
        parts = [f"{signed(change)} with {method_label(name)}" for name, change in shown]
        listed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
        rest = f" ({len(changed)} methods in the table)" if len(shown) < len(changed) else ""
        ends = " to ".join(length_label(key, summary.train_length) for key in (keys[0], keys[-1]))
        unit = "" if not keys[-1].endswith("x") else " tokens" if summary.train_length else " the training length"
        nats = Unit.of(summary.settings).nats
        sentences.append(f"From a context of {ends}{unit}, the loss in {nats} changes by {listed}{rest}.")
    last = [(x[keys[-1]].value, name) for name, x in summary.loss.items() if keys[-1] in x]
    ranked = sorted((value, name) for value, name in last if math.isfinite(value))
    if ranked:
        second = f"; next is {method_label(ranked[1][1])}, {ranked[1][0]:.3f}" if len(ranked) > 1 else ""
        best = f"{ranked[0][0]:.3f}, with {method_label(ranked[0][1])}{second}"
        sentences.append(f"The lowest loss at {length_label(keys[-1])} is {best}.")
    return " ".join(sentences) or "Every run diverged."


def title(summary: Summary) -> str:
    """How many methods, and over which lengths."""
    keys = lengths_of(summary.loss, summary.train_length)
    count = len(summary.loss)
    if len(keys) < 2 or count < 2:
        return "Scale-invariant attention, compared"
    unit = " the training length" if all(key.endswith("x") for key in (keys[0], keys[-1])) else ""
    return f"{count} kinds of attention at {length_label(keys[0])} to {length_label(keys[-1])}{unit}"
