"""Figures 1 (top), 2 and 6: Gaussian scores. The numbers come from `scaleinv.analysis.figures`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from scaleinv.analysis.figures import ContextFigure, GrowthFigure
from scaleinv.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_context(data: ContextFigure) -> Figure:
    """Figure 1, top: entropy, entropy inside the farthest range, and share of the most recent tokens, against N.

    Bands are two standard errors.
    """
    panels = (
        ("entropy", "Whole context", "entropy (nats)"),
        ("range_entropy", f"Inside the farthest range [N/{data.ratio}, N)", "entropy (nats)"),
        ("recent_share", f"The {data.recent} most recent tokens", "share of attention"),
    )
    with style.applied():
        figure, axes = style.panels(3)
        for axis, (quantity, title, unit) in zip(axes, panels, strict=True):
            for method in dict.fromkeys(point.method for point in data.points):
                points = [point for point in data.points if point.method == method]
                look = style.look(method)
                x = [point.length for point in points]
                y = [getattr(point, quantity) for point in points]
                band = [2 * getattr(point, f"{quantity}_error") for point in points]
                low, high = ([v + sign * e for v, e in zip(y, band, strict=True)] for sign in (-1, 1))
                # Plain and LogN share a curve in the last panel, at recent/N exactly: open markers let both be seen.
                axis.plot(x, y, look.marker, color=look.color, ls=look.dashes, markerfacecolor="none", label=look.label)
                axis.fill_between(x, low, high, color=look.color, alpha=0.2, linewidth=0)
            axis.set_xscale("log", base=2)
            _token_ticks(axis, max(point.length for point in data.points))
            axis.set_xlabel("context length N (tokens)")
            axis.set_ylabel(unit)
            axis.set_title(title)
            axis.set_ylim(bottom=0)
        axes[0].legend()
    return figure


def draw_growth(data: GrowthFigure) -> Figure:
    """Figures 2 and 6: expected entropy inside [t, tΔ) against log t and against √log t, with linear fits.

    Bars are two standard errors.
    """
    with style.applied():
        figure, axes = style.panels(2, width=4.8, height=3.8)
        for axis, root in zip(axes, (False, True), strict=True):
            for curve, color in zip(data.curves, style.RATIOS, strict=False):
                line = curve.sqrt_fit if root else curve.log_fit
                logs = [math.log(start) for start in curve.starts]
                x = [math.sqrt(u) for u in logs] if root else logs
                axis.errorbar(
                    x,
                    curve.entropy,
                    [2 * error for error in curve.error],
                    color=color,
                    fmt="o",
                    elinewidth=1,
                    label=f"Δ = {curve.delta}: slope {line.slope:.2f}, R² {_r2(line.r2)}",
                )
                ends = curve.starts[0], curve.starts[-1]
                axis.plot([x[0], x[-1]], [line(t) for t in ends], color=color, linestyle="--", linewidth=1)
            axis.set_xlabel(f"{'√log t' if root else 'log t'}, t in tokens")
            axis.locator_params("x", nbins=6)
            axis.set_ylabel("expected entropy in [t, tΔ) (nats)")
            axis.set_title(f"{style.look(data.method).label}: linear in {'√log t' if root else 'log t'}?")
            axis.set_ylim(bottom=0)
            axis.legend(fontsize=9, handletextpad=0.2, reverse=True)  # in the order of the curves
    return figure


def save_context(data: ContextFigure, folder: Path) -> list[Path]:
    """Draw and save figure 1, top, as PNG and SVG."""
    return style.save(draw_context(data), folder, data.name)


def save_growth(data: GrowthFigure, folder: Path) -> list[Path]:
    """Draw and save figure 2 or 6 as PNG and SVG."""
    return style.save(draw_growth(data), folder, data.name)


def _token_ticks(axis: Axes, longest: int) -> None:
    ticks = [2**k for k in range(8, longest.bit_length(), 4)]
    axis.set_xticks(ticks, [f"{t}" if t < 1024 else f"{t // 1024}k" if t < 2**20 else f"{t // 2**20}M" for t in ticks])


def _r2(value: float) -> str:
    return "> 0.9999" if value > 0.9999 else f"= {value:.4f}"
