"""Inside a model: figure 1 (bottom), attention by range, and QQ-plots. The numbers come from `scaleinv.analysis`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaleinv.analysis.model import ModelStatistics
from scaleinv.analysis.scores import ScoreStatistics
from scaleinv.lengths import tokens_label
from scaleinv.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

OTHERS = ("#EE7733", "#0077BB", "#117733", "#882255", "#999933")
"""Colours for models that are not a method of the paper."""

COLUMNS = 6
"""Layers in a row of a QQ figure."""


def draw_models(models: Sequence[ModelStatistics]) -> Figure:
    """Figure 1, bottom: as its top, in trained models. Lines are means over all heads, bands hold 80 % of the heads.

    Names that are methods of the paper have their colours.
    """
    if not models:
        raise ValueError("models must hold at least one model's statistics")
    ratio, recent = models[0].ratio, models[0].recent
    quantities = (
        ("entropy", "Whole context", "entropy (nats)"),
        ("far_entropy", f"Inside the farthest range [N/{ratio}, N)", "entropy (nats)"),
        ("recent_share", f"The {recent} most recent tokens", "share of attention"),
    )
    looks = _looks([model.model for model in models])
    with style.applied():
        figure, axes = style.panels(3)
        for axis, (quantity, title, unit) in zip(axes, quantities, strict=True):
            for model, look in zip(models, looks, strict=True):
                x = [entry.length for entry in model.lengths]
                heads = [getattr(entry, quantity).flatten() for entry in model.lengths]
                low, high = ([values.nanquantile(part).item() for values in heads] for part in (0.1, 0.9))
                y = [values.nanmean().item() for values in heads]
                axis.plot(x, y, look.marker, color=look.color, ls=look.dashes, label=look.label)
                axis.fill_between(x, low, high, color=look.color, alpha=0.15, linewidth=0)
            axis.set_xscale("log", base=2)
            _length_ticks(axis, sorted({entry.length for model in models for entry in model.lengths}))
            axis.set_xlabel("context length N (tokens)")
            axis.set_ylabel(unit)
            axis.set_title(title)
            axis.set_ylim(0, 1.02 if quantity == "recent_share" else None)
        axes[0].legend()
    return figure


def draw_ranges(data: ModelStatistics) -> Figure:
    """Attention on each range of distances: against the context length, and by layer at the longest one."""
    longest = max(data.lengths, key=lambda entry: entry.length)
    label = _looks([data.model])[0].label
    with style.applied():
        figure, (left, right) = style.panels(2, width=4.6, height=3.8)
        shares = [entry.range_share.mean((0, 1)) for entry in data.lengths]
        _bars(left, shares, [tokens_label(entry.length) for entry in data.lengths])
        left.set_xlabel("context length N (tokens)")
        left.set_title(f"{label}: mean over all heads")
        _bars(right, list(longest.range_share.mean(1)), [str(layer) for layer in data.layers])
        right.set_xlabel("layer")
        right.set_title(f"By layer, N = {longest.length:,}")
        handles, names = left.get_legend_handles_labels()
        for position, (start, stop) in enumerate(longest.ranges):
            last = position == len(longest.ranges) - 1
            names[position] = (
                "the token itself" if stop == 1 else f"{start:,} …" if last else f"{start:,} – {stop - 1:,}"
            )
        figure.legend(handles, names, loc="outside right center", title="tokens ago", alignment="left", reverse=True)
    return figure


def draw_qq(data: ScoreStatistics, rotary: bool = True) -> Figure:
    """Figures 9 – 14: the quantiles of each head's scores against a Gaussian's, one panel per layer.

    On the dashed diagonal scores are Gaussian with mean 0 and variance 1; other straight lines are other Gaussians.
    """
    scores = data.rotary if rotary else data.without_rotary
    if scores is None:
        raise ValueError(f"rotary=False is not available: {data.model} does not show its scores without the rotary")
    columns = min(COLUMNS, len(data.layers))
    rows = math.ceil(len(data.layers) / columns)
    with style.applied():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(max(2.1 * columns, 5.2) + 0.4, 2.3 * rows + 0.7), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for row, axis in enumerate(grid.flat):
            if row >= len(data.layers):
                axis.set_visible(False)
                continue
            _qq_panel(axis, data.normal, scores.quantiles[row])
            axis.tick_params(labelbottom=row + columns >= len(data.layers))  # the last of each column
            variance = scores.variance[row]
            axis.set_title(f"layer {data.layers[row]}, variance {_span(variance)}", fontsize=8)
        kind = "with" if rotary else "without"
        figure.suptitle(f"{_looks([data.model])[0].label}: scores {kind} the rotary, one line per head", fontsize=10)
        figure.supxlabel("quantiles of a Gaussian", fontsize=10)
        figure.supylabel("quantiles of the scores", fontsize=10)
    return figure


def save_models(models: Sequence[ModelStatistics], folder: Path) -> list[Path]:
    """Draw and save figure 1, bottom, as ``figure1-model`` PNG and SVG."""
    return style.save(draw_models(models), folder, "figure1-model")


def save_ranges(data: ModelStatistics, folder: Path) -> list[Path]:
    """Draw and save ``ranges`` as PNG and SVG."""
    return style.save(draw_ranges(data), folder, "ranges")


def save_qq(data: ScoreStatistics, folder: Path) -> list[Path]:
    """Draw and save ``qq-rotary`` and, where there are such scores, ``qq-no-rotary``, as PNG and SVG."""
    paths = style.save(draw_qq(data), folder, "qq-rotary")
    if data.without_rotary is not None:
        paths += style.save(draw_qq(data, rotary=False), folder, "qq-no-rotary")
    return paths


def _bars(axis: Axes, shares: Sequence[Tensor], names: Sequence[str]) -> None:
    """Stacked bars, near ranges dark and at the bottom."""
    from matplotlib import colormaps

    most = max(len(part) for part in shares)
    bottom = [0.0] * len(shares)
    for position in range(most):
        heights = [part[position].item() if position < len(part) else 0.0 for part in shares]
        color = colormaps["viridis"](position / max(most - 1, 1))
        axis.bar(
            range(len(shares)),
            heights,
            0.75,
            bottom,
            color=color,
            edgecolor="white",
            linewidth=0.4,
            label=str(position),
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    step = math.ceil(len(names) / 12)
    axis.set_xticks(range(0, len(names), step), names[::step])
    axis.grid(False, axis="x")
    axis.set_ylim(0, 1)
    axis.set_ylabel("share of attention")


def _qq_panel(axis: Axes, normal: Sequence[float], quantiles: Tensor) -> None:
    for head in quantiles:
        axis.plot(normal, head.tolist(), color="#0077BB", linewidth=1, alpha=max(0.25, min(0.8, 4 / len(quantiles))))
    axis.plot(normal, normal, color="#000000", linestyle="--", linewidth=1)


def _looks(names: Sequence[str]) -> list[style.Look]:
    """One look per model; an unknown model gets its own colour."""
    known = {**style.TRANSFORMS, **style.METHODS}
    others = [name for name in dict.fromkeys(names) if name not in known]
    for position, name in enumerate(others):
        known[name] = style.Look(name, OTHERS[position % len(OTHERS)], "os^Dv"[position % 5])
    return [known[name] for name in names]


def _length_ticks(axis: Axes, lengths: Sequence[int]) -> None:
    shown = lengths[:: math.ceil(len(lengths) / 6)]
    axis.set_xticks(shown, [tokens_label(length) for length in shown])
    axis.minorticks_off()


def _span(values: Tensor) -> str:
    low, high = values.min().item(), values.max().item()
    return f"{low:.2g}" if f"{low:.2g}" == f"{high:.2g}" else f"{low:.2g} – {high:.2g}"
