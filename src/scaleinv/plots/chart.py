"""Charts: curves in panels. matplotlib draws them as PNG and SVG, ``page.js`` in the browser, both from one `Chart`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from scaleinv.files import write_data
from scaleinv.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKED = 40
"""Curves with more points than this have no markers."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A value, the interval it lies in, what x is in words, and the values that y is the mean of, if they are known."""

    x: float
    y: float
    low: float | None
    high: float | None
    label: str
    seeds: tuple[float, ...] = ()


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
    zoomed: bool = False
    """The y axis ends at the median of all points, so that the curves of the lower half can be told apart."""


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
    zooms: bool = False
    """On the page a button zooms in on the lower half of all panels."""

    def save(self, figures: Path, tables: Path) -> list[Path]:
        """Write ``{name}.png`` and ``.svg`` to ``figures``, and the points as CSV and JSON to ``tables``."""
        points = [
            {
                **{"panel": panel.title, "series": series.look.label, **dataclasses.asdict(point)},
                "seeds": " ".join(f"{value:.6g}" for value in point.seeds),
            }
            for panel in self.panels
            for series in panel.series
            for point in series.points
        ]
        return [*style.save(draw(self), figures, self.name), *write_data(tables, f"{self.name}-points", points, self)]


def filled(chart: Chart) -> Chart | None:
    """The chart without its empty curves and panels; None if nothing is left."""
    panels = [
        dataclasses.replace(panel, series=tuple(series for series in panel.series if series.points))
        for panel in chart.panels
    ]
    panels = [panel for panel in panels if panel.series]
    return dataclasses.replace(chart, panels=tuple(panels)) if panels else None


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
    dots = [(point.x, value) for point in points for value in point.seeds]
    if dots:
        axis.scatter(
            [x for x, _ in dots], [y for _, y in dots], s=4, color=look.color, alpha=0.6, linewidths=0, zorder=3
        )


def _limit(axis: Axes, chart: Chart, panel: Panel) -> None:
    if chart.y_range:
        axis.set_ylim(chart.y_range[0] - 0.03, chart.y_range[1] + 0.03)
    elif panel.settled is not None or panel.zoomed:
        settled = -math.inf if panel.settled is None else panel.settled
        points = [point for series in panel.series for point in series.points if point.x >= settled]
        if points:
            top = (statistics.median if panel.zoomed else max)(point.y for point in points)
            bottom = min(point.y if point.low is None else point.low for point in points)
            pad = 0.06 * (top - bottom) or 0.1
            axis.set_ylim(bottom - pad, top + pad)
