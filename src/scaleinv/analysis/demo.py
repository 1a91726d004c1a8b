"""A small table that shows the point: what happens to attention as the context grows, on Gaussian scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from scaleinv.analysis.figures import compared
from scaleinv.analysis.gaussian import sample_ranges
from scaleinv.analysis.ranges import Range


@dataclasses.dataclass(frozen=True)
class DemoRow:
    """One method at one context length: means over samples."""

    method: str
    length: int
    entropy: float
    """Of the whole distribution, in nats."""
    recent_share: float
    """Attention on the 100 most recent tokens, of 1."""
    shares: tuple[tuple[Range, float], ...]
    """Attention on each of `decades`; they sum to 1."""


def demo_table(
    lengths: Sequence[int] = (1024, 4096, 16_384, 65_536), samples: int = 300, seed: int = 0
) -> list[DemoRow]:
    """Plain, LogN and scale-invariant logits beside each other, by context length. Takes about two seconds."""
    rows = []
    for length in lengths:
        ranges = [(0, length), (0, min(100, length)), *decades(length)]
        for name, transform in compared().items():
            sums = sample_ranges(transform, length, ranges, samples, torch.Generator().manual_seed(seed))
            shares = sums.share(0).mean(0).tolist()
            entropy = float(sums.entropy[:, 0].mean())
            rows.append(DemoRow(name, length, entropy, shares[1], tuple(zip(ranges[2:], shares[2:], strict=True))))
    return rows


def decades(length: int) -> list[Range]:
    """[0, 10), [10, 100), … up to ``length``.

    >>> decades(500)
    [(0, 10), (10, 100), (100, 500)]
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    ranges, start, stop = [], 0, 10
    while start < length:
        ranges.append((start, min(stop, length)))
        start, stop = stop, stop * 10
    return ranges
