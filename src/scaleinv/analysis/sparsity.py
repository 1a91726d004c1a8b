"""How much of its cache each layer and head of a model needs: the sparsity that the theory predicts, measured.

At the last positions of each window: the fewest keys that hold all but ``tolerance`` of the attention, and how many
keys a `scaleinv.CertifiedCache` reads to certify that share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scaleinv.analysis.capture import Layer, blocks_of, capture, model_name, windows_of
from scaleinv.analysis.figures import Progress
from scaleinv.analysis.model import listed
from scaleinv.files import write_data
from scaleinv.ops.certified import CertifiedCache


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """Shares of the visible keys, means over queries and windows, float64 ``[lengths, layers, heads]``."""

    file: ClassVar[str] = "sparsity"
    model: str
    layers: tuple[int, ...]
    tolerance: float
    lengths: tuple[int, ...]
    needed: Tensor
    """The fewest keys that hold 1 - tolerance of the attention."""
    read: Tensor
    """What certified decoding reads; NaN where it cannot serve (soft caps, learned sinks)."""

    def save(self, folder: Path) -> list[Path]:
        """Write ``sparsity.csv``, one line per length, layer and head, and ``sparsity.json``."""
        return write_data(folder, self.file, self._rows(), listed(self))

    def _rows(self) -> Iterator[dict[str, Any]]:
        for n, length in enumerate(self.lengths):
            for row, layer in enumerate(self.layers):
                for head in range(self.needed.shape[2]):
                    shares = {"needed": listed(self.needed[n, row, head]), "read": listed(self.read[n, row, head])}
                    yield {"model": self.model, "length": length, "layer": layer, "head": head, **shares}


def sparsity(
    model: nn.Module,
    tokens: Tensor | Sequence[int],
    lengths: Sequence[int],
    *,
    tolerance: float = 1e-2,
    name: str | None = None,
    windows: int = 4,
    queries: int = 16,
    bos: int | None = None,
    progress: Progress | None = None,
) -> Sparsity:
    """Measure a model on real text; the arguments are those of `model_statistics`.

    Args:
        tolerance: the share of the attention that may be left out.
        queries: the last positions of each window.

    >>> from scaleinv.model import GPT, GPTConfig
    >>> model = GPT(GPTConfig(layers=1, width=32, heads=2, method="nope"))
    >>> sparsity(model, torch.arange(256) % 7, [128, 256]).needed.shape
    torch.Size([2, 1, 2])
    """
    name = name or model_name(model)
    found: list[dict[int, list[Tensor]]] = []
    for length in lengths:
        by_layer: dict[int, list[Tensor]] = {}

        def consume(layer: Layer, by_layer: dict[int, list[Tensor]] = by_layer) -> None:
            last = torch.arange(max(layer.length - queries, 0), layer.length)
            pair = torch.stack([needed_share(layer, last, tolerance), read_share(layer, last, tolerance)])
            by_layer.setdefault(layer.index, []).append(pair)

        texts = list(windows_of(tokens, length, windows, bos))
        for number, text in enumerate(texts, 1):
            if progress:
                progress(f"sparsity: {name}, {length:,} tokens, window {number} of {len(texts)}")
            capture(model, text, consume)
        found.append(by_layer)
    layers = tuple(sorted(found[0])) if found else ()
    if not layers:
        raise ValueError(f"model {name} has no layer with softmax attention")
    means = torch.stack([torch.stack([torch.stack(by[layer]).mean(0) for layer in layers], 1) for by in found], 1)
    return Sparsity(name, layers, tolerance, tuple(lengths), *means.cpu())


def needed_share(layer: Layer, positions: Tensor, tolerance: float) -> Tensor:
    """The fewest keys that hold 1 - tolerance of the attention, as a share of those seen: float64 ``[heads]``."""
    shares = []
    for block in blocks_of(positions, layer):
        weights = layer.logits(block).softmax(-1)  # [B, H, R, N]
        least = weights.sort(dim=-1).values.cumsum(-1) <= tolerance
        seen = (block + 1).clamp_max(layer.window or layer.length)
        hidden = layer.length - seen  # columns of weight 0, which are left out too
        kept = layer.length - least.sum(-1).clamp_min(hidden)
        shares.append((kept.double() / seen).transpose(1, 2).flatten(0, 1))
    return torch.cat(shares).mean(0)


def read_share(layer: Layer, positions: Tensor, tolerance: float) -> Tensor:
    """What certified decoding reads at the last positions: float64 ``[heads]``; NaN where it cannot serve."""
    if layer.softcap is not None or layer.sinks is not None:
        return torch.full((layer.heads,), torch.nan, dtype=torch.float64)
    cache = CertifiedCache(layer.transform, tolerance, window=layer.window, scale=layer.scale)
    key = layer.key.to(torch.promote_types(layer.key.dtype, torch.float32))
    cache.append(key, key[..., :1])  # the choice of keys does not depend on the values
    certificate = cache.attend(layer.query[:, :, positions].to(key.dtype))[1]
    return certificate.read.mean((0, 2))
