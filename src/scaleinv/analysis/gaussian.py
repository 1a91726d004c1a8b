"""Logits of independent Gaussian scores, S ~ N(0, 1): one head of a logit transform at a context length."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from scaleinv.analysis import tail
from scaleinv.analysis.ranges import Range, RangeSums, check_ranges, combine, edges
from scaleinv.logits import LogitTransform


@dataclasses.dataclass(frozen=True)
class Affine:
    """One head of a transform, L = a_t (c S) + m_t, over distances 0 … T-1.

    c depends on how many keys the query sees, as in LogN: `at` takes that count as ``context``.
    """

    scale: Tensor
    """a_t, float64 ``[T]``."""
    shift: Tensor
    """m_t, float64 ``[T]``."""
    transform: LogitTransform
    head: int

    @classmethod
    def of(cls, logits: LogitTransform, length: int, head: int = 0) -> Affine:
        """Head ``head`` of ``logits`` over ``length`` distances."""
        heads = logits.heads or 1
        if not 0 <= head < heads:
            raise ValueError(f"head must be in 0 … {heads - 1} for {type(logits).__name__}, got {head}")
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        with torch.no_grad():  # from a copy: tables of a million distances should not stay in the caller's cache
            tables = copy.deepcopy(logits).tables(length, dtype=torch.float64, device=torch.device("cpu"))
        scale, shift = (table[min(head, table.shape[0] - 1)].clone() for table in tables)
        return cls(scale, shift, copy.deepcopy(logits).cpu(), head)

    def at(self, start: int, stop: int, context: int) -> tuple[Tensor, Tensor]:
        """Standard deviation and mean of the logits at distances start … stop-1, for a query that sees ``context``."""
        return self.factor(context) * self.scale[start:stop], self.shift[start:stop]

    def factor(self, context: int) -> float:
        """c for a query that sees ``context`` keys, the whole of its context."""
        with torch.no_grad():
            factors = self.transform.gain_of_queries(lambda: torch.tensor([[context]]), context)  # [1, H, 1]
        return 1.0 if factors is None else float(factors[0, min(self.head, factors.shape[1] - 1), 0])


def sample_logits(
    logits: LogitTransform, length: int, samples: int, generator: torch.Generator, head: int = 0
) -> Tensor:
    """Logits ``[samples, length]``, float64, over distances 0 … length-1 of a query that sees ``length`` keys.

    All of them are held at once; `sample_ranges` is for long contexts.
    """
    _check_samples(samples)
    scale, shift = Affine.of(logits, length, head).at(0, length, length)
    scores = torch.randn(samples, length, dtype=torch.float64, generator=generator)
    return scores.mul_(scale).add_(shift)


def sample_ranges(
    logits: LogitTransform,
    length: int,
    ranges: Iterable[Range],
    samples: int,
    generator: torch.Generator,
    head: int = 0,
    every: bool = False,
) -> RangeSums:
    """Sums ``[samples, R]`` over ranges of a query that sees ``length`` keys, in blocks that stay small.

    Args:
        every: draw every logit. By default long ranges are sampled through their largest logits (`analysis.tail`),
            much faster, with a bias in H far below the errors of thousands of samples.
    """
    _check_samples(samples)
    ranges = check_ranges(ranges)
    cuts = edges(ranges)
    if cuts[-1] > length:
        raise ValueError(f"ranges must end within length={length}, got one that ends at {cuts[-1]}")
    affine = Affine.of(logits, length, head)
    draw = tail.sample_every if every else tail.sample_sums
    segments = {
        start: draw(*affine.at(start, stop, length), samples, generator) for start, stop in itertools.pairwise(cuts)
    }
    return combine(segments, ranges)


def _check_samples(samples: int) -> None:
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
