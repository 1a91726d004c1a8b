"""Attention over ranges of distances: totals, entropies and shares, from logits.

For logits L over a range [start, stop), with weights exp(L):

    Z = Σ exp(L)            total
    Ñ = Σ L exp(L)          unnormalised negentropy
    H = log Z - Ñ/Z         entropy inside the range, 0 ≤ H ≤ log(stop - start)

Everything is kept relative to the largest logit of its range, so that H keeps its digits however large the logits
are. `RangeAccumulator` takes the logits block by block: a million distances need no more memory than one block.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

Range = tuple[int, int]
"""Distances start … stop-1, in tokens."""


@dataclasses.dataclass(frozen=True)
class RangeSums:
    """Z, Ñ and H of R ranges; every tensor is float64 ``[..., R]``. A range without any weight has entropy NaN."""

    peak: Tensor
    """The largest logit."""
    log_sum: Tensor
    """log Σ exp(L - peak)."""
    mean: Tensor
    """The average of L - peak under the normalised weights."""

    @property
    def log_total(self) -> Tensor:
        """log Z: use it if Z itself exceeds float64."""
        return self.peak + self.log_sum

    @property
    def total(self) -> Tensor:
        """Z."""
        return self.log_total.exp()

    @property
    def negentropy(self) -> Tensor:
        """Ñ."""
        return (self.peak + self.mean) * self.total

    @property
    def entropy(self) -> Tensor:
        """H in nats."""
        return self.log_sum - self.mean

    def share(self, whole: int) -> Tensor:
        """Z of each range over Z of range number ``whole``."""
        return (self.log_total - self.log_total[..., whole : whole + 1 or None]).exp()


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over samples and its standard error, tensors of equal shape."""

    mean: Tensor
    error: Tensor


def estimate(samples: Tensor) -> Estimate:
    """Mean and standard error over the first dimension, which must hold at least two samples."""
    if samples.dim() == 0 or samples.shape[0] < 2:
        raise ValueError(f"samples must hold at least 2 along its first dimension, got shape {tuple(samples.shape)}")
    return Estimate(samples.mean(0), samples.std(0) / samples.shape[0] ** 0.5)


class RangeAccumulator:
    """Sums over ``ranges`` of logits that arrive block by block, in order of distance.

    >>> sums = RangeAccumulator([(0, 4), (2, 6)])
    >>> sums.add(torch.zeros(3))
    >>> sums.add(torch.zeros(3))
    >>> sums.result().total.tolist()
    [4.0, 4.0]
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.ranges = check_ranges(ranges)
        self._edges = edges(self.ranges)
        self._parts: dict[int, list[RangeSums]] = {edge: [] for edge in self._edges[:-1]}
        self._position = 0

    def add(self, logits: Tensor) -> None:
        """Take the next ``logits [..., block]``; those outside every range are skipped."""
        start, stop = self._position, self._position + logits.shape[-1]
        self._position = stop
        for low, high in itertools.pairwise(self._edges):
            first, last = max(low, start), min(high, stop)
            if first < last:
                self._parts[low].append(_summarise(logits[..., first - start : last - start]))

    def result(self) -> RangeSums:
        """The sums of all ranges, in their order; raises ValueError until the blocks reach their ends."""
        if self._position < self._edges[-1]:
            raise ValueError(f"ranges reach to {self._edges[-1]}, but the logits end at {self._position}")
        return combine({edge: merge(parts) for edge, parts in self._parts.items() if parts}, self.ranges)


def range_sums(logits: Tensor, ranges: Iterable[Range]) -> RangeSums:
    """Z, Ñ and H of ``logits [..., T]`` over ranges of distances; masked logits are -inf.

    >>> range_sums(torch.zeros(6), [(0, 4), (4, 6)]).total.tolist()
    [4.0, 2.0]
    """
    sums = RangeAccumulator(ranges)
    sums.add(logits)
    return sums.result()


def entropy(logits: Tensor) -> Tensor:
    """Entropy ``[...]`` in nats of the whole distribution softmax(logits ``[..., T]``)."""
    return range_sums(logits, [(0, logits.shape[-1])]).entropy[..., 0]


def recent_share(logits: Tensor, count: int = 100) -> Tensor:
    """Share of attention ``[...]`` on the ``count`` most recent tokens, from logits ``[..., T]`` over distances."""
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    length = logits.shape[-1]
    return range_sums(logits, [(0, min(count, length)), (0, length)]).share(1)[..., 0]


def check_ranges(ranges: Iterable[Range]) -> list[Range]:
    """The ranges as a list; ValueError unless there is one, and each has 0 <= start < stop."""
    found = [(int(start), int(stop)) for start, stop in ranges]
    if not found:
        raise ValueError("ranges must hold at least one (start, stop)")
    for start, stop in found:
        if not 0 <= start < stop:
            raise ValueError(f"ranges must have 0 <= start < stop, got ({start}, {stop})")
    return found


def edges(ranges: Iterable[Range]) -> list[int]:
    """Where the ranges begin and end, in order: between two edges lies a segment that no range divides."""
    return sorted({edge for pair in ranges for edge in pair})


def combine(segments: Mapping[int, RangeSums], ranges: Sequence[Range]) -> RangeSums:
    """Sums ``[..., R]`` over ranges, from those ``[..., 1]`` of the segments between `edges`, by where each starts."""
    merged = [merge([part for edge, part in segments.items() if start <= edge < stop]) for start, stop in ranges]
    return _cat(merged, -1)


def merge(parts: Sequence[RangeSums]) -> RangeSums:
    """Sums ``[..., 1]`` over the union of disjoint parts ``[..., 1]``."""
    if len(parts) == 1:
        return parts[0]
    every = _cat(parts, -1)
    peak = torch.where(every.log_sum > -torch.inf, every.peak, -torch.inf).amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    offset = every.peak - peak
    weights = (offset + every.log_sum).exp()
    total = weights.sum(-1, keepdim=True)
    means = torch.where(weights > 0, every.mean + offset, 0.0)  # a part without weight has a mean of NaN
    return RangeSums(peak, total.log(), (weights * means).sum(-1, keepdim=True) / total)


def stack_samples(parts: Sequence[RangeSums]) -> RangeSums:
    """Sums of several batches of samples as one, along the first dimension."""
    return _cat(parts, 0)


def _cat(parts: Sequence[RangeSums], dim: int) -> RangeSums:
    return RangeSums(*(torch.cat([getattr(part, name) for part in parts], dim) for name in ("peak", "log_sum", "mean")))


def _summarise(logits: Tensor) -> RangeSums:
    logits = logits.to(torch.float64)
    peak = logits.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)  # all masked: no weight, but no NaN either
    relative = logits - peak
    weights = relative.exp()
    total = weights.sum(-1, keepdim=True)
    # 0 · -inf would be NaN. exp is 0 long before -1e4.
    mean = torch.linalg.vecdot(weights, relative.clamp_min_(-1e4))[..., None] / total
    return RangeSums(peak, total.log(), mean)
