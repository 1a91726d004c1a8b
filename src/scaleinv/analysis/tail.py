"""Samples of Z, Ñ and H inside a long range of Gaussian logits, through its largest logits.

A few large logits decide the entropy of a range; the rest are so many that their sums hardly vary. So only the logits
above a threshold b, about `POINTS` of them, are sampled. Those below enter Z and Ñ by their expectation. What that
leaves out is the variance of the part below, of order 1/POINTS of Z², and the mean entropy feels it only to second
order; the tests compare it with sampling every logit. A short range is sampled in full.

Distance t has a logit above b with chance p_t. Hits from a Poisson process with rates λ_t = -log(1 - p_t), counted
once where a distance is hit twice, have exactly these chances.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.special import log_ndtr, ndtr, ndtri

from scaleinv.analysis.ranges import RangeAccumulator, RangeSums, stack_samples

POINTS = 256
"""Logits above the threshold, on average."""

_SHORT = 8 * POINTS
"""Ranges up to this many tokens are sampled in full."""

_NEGLIGIBLE = 40.0
"""A distance is left out where its logit, 8σ up, is this far below another distance's, 8σ down: e^-40 is nothing."""

_BLOCK = 1 << 18
"""Logits held at once: 2 MB of float64, which stays in the cache."""


def sample_sums(scale: Tensor, shift: Tensor, samples: int, generator: torch.Generator) -> RangeSums:
    """Sums ``[samples, 1]`` of the logits scale · S + shift, S ~ N(0, 1); scale and shift are float64 ``[T]``."""
    kept = shift + 8 * scale >= (shift - 8 * scale).max() - _NEGLIGIBLE
    scale, shift = scale[kept], shift[kept]
    if scale.numel() <= _SHORT or not bool((scale > 0).all()):
        return sample_every(scale, shift, samples, generator)
    threshold = _threshold(scale, shift)
    cut = (threshold - shift) / scale
    rates = -log_ndtr(cut)
    if not POINTS / 4 <= float(rates.sum()) <= POINTS * 4:  # very uneven tables: the estimate of b is off
        return sample_every(scale, shift, samples, generator)
    sums = _sample_above(scale, shift - threshold, cut, rates, samples, generator)
    return RangeSums(sums.peak + threshold, sums.log_sum, sums.mean)


def sample_every(
    scale: Tensor, shift: Tensor, samples: int, generator: torch.Generator, block: int = _BLOCK
) -> RangeSums:
    """`sample_sums` by drawing every logit, ``block`` of them at a time."""
    length, parts = scale.numel(), []
    rows = max(1, block // length)
    for first in range(0, samples, rows):
        sums = RangeAccumulator([(0, length)])
        for start in range(0, length, block):
            part = slice(start, start + block)
            shape = min(rows, samples - first), scale[part].numel()
            scores = torch.randn(shape, dtype=torch.float64, generator=generator)
            sums.add(scores.mul_(scale[part]).add_(shift[part]))
        parts.append(sums.result())
    return stack_samples(parts)


def _threshold(scale: Tensor, shift: Tensor) -> float:
    """The logit b that about `POINTS` exceed, by bisection on every k-th distance: it need not be exact."""
    step = max(1, scale.numel() // 1024)
    scale, shift = scale[::step], shift[::step]
    low, high = float((shift - 40 * scale).min()), float((shift + 40 * scale).max())
    for _ in range(60):
        middle = (low + high) / 2
        if float(-log_ndtr((middle - shift) / scale).sum()) * step > POINTS:
            low = middle
        else:
            high = middle
    return high


def _sample_above(
    scale: Tensor, shift: Tensor, cut: Tensor, rates: Tensor, samples: int, generator: torch.Generator
) -> RangeSums:
    """Sums where the logits above 0 are sampled and those below are averaged; ``shift`` is relative to b."""
    below_total, below_negentropy = _below(scale, shift, cut)
    above = ndtr(-cut)
    ends = rates.cumsum(0)
    everything = float(ends[-1])
    parts = []
    rows = max(1, _BLOCK // (2 * POINTS))
    for first in range(0, samples, rows):
        count = torch.full((min(rows, samples - first), 1), everything, dtype=torch.float64)
        hits = torch.poisson(count, generator=generator)
        width = max(1, int(hits.max()))
        places = torch.rand(len(hits), width, dtype=torch.float64, generator=generator) * everything
        places = torch.where(torch.arange(width) < hits, places, torch.inf).sort(-1).values
        index = torch.searchsorted(ends, places).clamp_max(len(ends) - 1)
        valid = torch.isfinite(places)
        valid[:, 1:] &= index[:, 1:] != index[:, :-1]
        levels = 1 - torch.rand(places.shape, dtype=torch.float64, generator=generator)  # in (0, 1]
        scores = -ndtri(levels * above[index])
        logits = torch.where(valid, scale[index] * scores + shift[index], -torch.inf)

        peak = logits.amax(-1, keepdim=True).clamp_min(0.0)
        relative = logits - peak
        weights = relative.exp()
        faded = (-peak).exp()
        total = weights.sum(-1, keepdim=True) + below_total * faded
        negentropy = (weights * relative.clamp_min(-1e4)).sum(-1, keepdim=True)
        negentropy = negentropy + (below_negentropy - below_total * peak) * faded
        parts.append(RangeSums(peak, total.log(), negentropy / total))
    return stack_samples(parts)


def _below(scale: Tensor, shift: Tensor, cut: Tensor) -> tuple[float, float]:
    """E[Σ exp L] and E[Σ L exp L] over the logits below 0: moments of cut-off log-normals."""
    z = cut - scale
    log_chance = log_ndtr(z)
    weights = (shift + scale.square() / 2 + log_chance).exp()
    hazard = (-z.square() / 2 - 0.5 * math.log(2 * math.pi) - log_chance).exp()
    return float(weights.sum()), float((weights * (shift + scale.square() - scale * hazard)).sum())
