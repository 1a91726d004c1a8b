"""Needle in a haystack: heat-maps of accuracy, depth × length. The numbers come from `scaleinv.eval.needle`."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleinv.eval.needle_results import Result, pooled, read_results
from scaleinv.eval.summary import Measurement, multiple, ordered_methods, parse_accuracy
from scaleinv.lengths import ordered
from scaleinv.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Cividis reads the same with and without colour vision, and gets steadily lighter: dark is lost, light is found.
COLORS = "cividis"
MISSING = "#EEEEEE"
MARK = "#CC3311"
COLUMNS = 4


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """Share of needles found by method, then depth (from and to, as fractions of the context), then length."""

    methods: dict[str, dict[tuple[float, float], dict[str, Measurement]]]
    lengths: tuple[str, ...]
    results: tuple[Mapping[str, Any], ...]
    """What the files hold."""

    def save(self, figures: Path) -> list[Path]:
        """Write ``needle-depth.png`` and ``.svg``, with the methods that `style` knows."""
        known = [result for name, result in zip(self.methods, self.results, strict=True) if name in style.METHODS]
        return save_heatmaps(known, figures, "needle-depth") if known else []


def read_depths(folder: Path, train_length: int | None) -> HeatMap | None:
    """Accuracy by depth and length over all seeds, from ``needle/<method>-seed<n>.json``."""
    by_method: dict[str, list[Result]] = {}
    for result in read_results(folder):
        by_method.setdefault(result["row"], []).append(result)
    results = {name: pooled(found) for name, found in by_method.items()}
    found = {name: _depths(result, train_length) for name, result in results.items()}
    kept = {name: dict(sorted(found[name].items())) for name in ordered_methods(found) if found[name]}
    keys = ordered((key for depths in kept.values() for at in depths.values() for key in at), train_length)
    for result in results.values():
        result["settings"] = {"train_length": train_length, **result["settings"]}
    return HeatMap(kept, tuple(keys), tuple(results[name] for name in kept)) if kept else None


def _depths(result: Result, train_length: int | None) -> dict[Any, dict[str, Measurement]]:
    found: dict[Any, dict[str, Measurement]] = defaultdict(dict)
    for key, at in result["lengths"].items():
        multiple(key, train_length, result["row"])
        for depth in at["depths"]:
            found[depth["from"], depth["to"]][key] = parse_accuracy(depth, f"{result['row']}: {key}")
    return found


def draw_heatmaps(results: Sequence[Mapping[str, Any]]) -> Figure:
    """One panel per method: needles found (%) by their depth in the text and the length of the context.

    The top of a column is the accuracy over all depths. A frame marks the training length.

    Args:
        results: what `scaleinv.eval.needle.run_needle` gives for each method (its JSON files, read).
    """
    if not results:
        raise ValueError("results must hold at least one method, got none")
    columns = min(COLUMNS, len(results))
    lines = -(-len(results) // columns)
    widest = max(len(result["lengths"]) for result in results)
    with style.applied():
        from matplotlib.figure import Figure

        size = (columns * (1.3 + 0.75 * widest) + 0.9, lines * 4.3)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(lines, columns, squeeze=False)
        for index, axis in enumerate(grid.flat):
            if index < len(results):
                _panel(axis, results[index], first=index % columns == 0)
            else:
                axis.set_visible(False)
        bar = figure.colorbar(grid.flat[0].images[0], ax=grid, fraction=0.03, pad=0.02, label="needles found (%)")
        bar.outline.set_visible(False)
    return figure


def save_heatmaps(results: Sequence[Mapping[str, Any]], folder: Path, name: str = "needle") -> list[Path]:
    """Draw and save as ``{name}.png`` and ``{name}.svg``."""
    return style.save(draw_heatmaps(results), folder, name)


def _panel(axis: Axes, result: Mapping[str, Any], first: bool) -> None:
    lengths = sorted(result["lengths"].items(), key=lambda item: item[1]["length"])
    edges = sorted({(bin["from"], bin["to"]) for _, at in lengths for bin in at["depths"]})
    table = [[100 * at["accuracy"] for _, at in lengths]]
    for edge in edges:
        found = [{(bin["from"], bin["to"]): bin["accuracy"] for bin in at["depths"]}.get(edge) for _, at in lengths]
        table.append([float("nan") if share is None else 100 * share for share in found])
    from matplotlib import colormaps

    colors = colormaps[COLORS].with_extremes(bad=MISSING)
    axis.imshow(table, cmap=colors, vmin=0, vmax=100, aspect="auto", interpolation="nearest")
    for row, shares in enumerate(table):
        for column, share in enumerate(shares):
            if share == share:  # not NaN
                axis.text(
                    column,
                    row,
                    f"{share:.0f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    weight="bold" if row == 0 else "normal",
                    color="black" if share > 55 else "white",
                )
    axis.axhline(0.5, color="white", linewidth=4)
    axis.set_xticks(range(len(lengths)), [f"{label}\n{_tokens(at['length'])}" for label, at in lengths])
    axis.set_yticks(range(len(table)), ["all", *(f"{100 * low:.0f}–{100 * high:.0f}" for low, high in edges)])
    axis.grid(False)
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_xlabel("context length (tokens)")
    if first:
        axis.set_ylabel("depth of the needle in the text (%)")
    trained = result["settings"]["train_length"]
    for column, (_, at) in enumerate(lengths):
        if at["length"] == trained:
            _mark(axis, column, len(table))
    axis.set_title(style.look(result.get("method", result.get("row"))).label, pad=18)


def _mark(axis: Axes, column: int, rows: int) -> None:
    """A frame around the column of the training length."""
    from matplotlib.patches import Rectangle

    corner = (column - 0.5, -0.5)
    frame = Rectangle(corner, 1, rows, fill=False, edgecolor=MARK, linewidth=2, clip_on=False, zorder=3)
    axis.add_patch(frame)
    axis.text(column, -0.6, "training length", ha="center", va="bottom", fontsize=8, color=MARK)


def _tokens(count: int) -> str:
    return f"{count}" if count < 10_000 else f"{count / 1024:.0f}k"
