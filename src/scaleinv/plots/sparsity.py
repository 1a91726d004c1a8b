"""How much of the cache a model needs, by context length, layer and head. The numbers come from `scaleinv.analysis`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scaleinv.analysis.sparsity import Sparsity
from scaleinv.lengths import tokens_label
from scaleinv.plots import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_sparsity(data: Sparsity) -> Figure:
    """Left: shares of the keys against context length, means and the range of the heads. Right: each head, longest."""
    with style.applied():
        figure, (left, right) = style.panels(2)
        for quantity, color, label in (
            ("needed", "#0077BB", f"hold {1 - data.tolerance:.3g} of the attention"),
            ("read", "#000000", "read with a certificate"),
        ):
            heads = 100 * getattr(data, quantity).flatten(1)  # [lengths, layers · heads]
            if heads.isnan().all():
                continue
            left.plot(data.lengths, heads.nanmean(1).tolist(), "o-", color=color, label=label)
            low, high = (heads.nanquantile(part, dim=1).tolist() for part in (0.0, 1.0))
            left.fill_between(data.lengths, low, high, color=color, alpha=0.15, linewidth=0)
        left.set_xscale("log", base=2)
        left.set_yscale("log")
        left.set_xticks(data.lengths, [tokens_label(length) for length in data.lengths])
        left.minorticks_off()
        left.set_xlabel("context length N (tokens)")
        left.set_ylabel("share of the keys (%)")
        left.set_title(data.model)
        left.legend()
        shares = data.needed[-1] if data.read[-1].isnan().all() else data.read[-1]
        image = right.imshow((100 * shares).tolist(), aspect="auto", cmap="viridis", vmin=0)
        right.set_xticks(range(shares.shape[1]))
        right.set_yticks(range(shares.shape[0]), [str(layer) for layer in data.layers])
        right.grid(visible=False)
        right.set_xlabel("head")
        right.set_ylabel("layer")
        right.set_title(f"keys read at {tokens_label(data.lengths[-1])} tokens (%)")
        figure.colorbar(image, ax=right)
    return figure


def save_sparsity(data: Sparsity, folder: Path) -> list[Path]:
    """Draw and save ``sparsity`` as PNG and SVG."""
    return style.save(draw_sparsity(data), folder, "sparsity")
