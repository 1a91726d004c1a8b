"""Expectations over ranges of distances for Gaussian scores, for any logit transform.

Which quantity can be sampled, and which must be computed: a weight exp(L), L ~ N(m, a²), is log-normal, and its
relative variance is exp(a²) - 1. For scale-invariant logits at distance t that is about (t/τ)², so a sample mean of
exp(L) needs (t/τ)² samples for its first digit. Totals Z and negentropies Ñ are therefore computed in closed form:

    E[exp L]   = exp(m + a²/2)
    E[L exp L] = (m + a²) exp(m + a²/2)

The entropy H inside a range lies between 0 and log of its size, so it is sampled (`expected_range_entropy`).

Between them stands the annealed entropy, log E[Z] - E[Ñ]/E[Z]: closed form, and to leading order in log t what E[H]
is wherever it is positive (Derrida 1981, the random energy model). Scale-invariant logits keep it constant. That puts
them on the model's critical line, where the weights spread over a half-Gaussian of width a_t below the largest one,
so that H grows as a_t √(2/π), or `ENTROPY_SLOPE` · √(log t): a physicist's argument, ours, and not a proof.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scaleinv.analysis.gaussian import Affine
from scaleinv.analysis.ranges import Estimate, Range, check_ranges, estimate
from scaleinv.analysis.tail import sample_sums
from scaleinv.logits import LogitTransform

ENTROPY_SLOPE = 2 / math.sqrt(math.pi)
"""The expected limit, for scale-invariant logits, of E[H over [t, tΔ)] / √(log t): 1.13."""


@dataclasses.dataclass(frozen=True)
class RangeExpectation:
    """Closed forms of R ranges, float64 ``[R]``; in logarithms, as ALiBi's totals leave float64 quickly."""

    log_total: Tensor
    """log E[Z]."""
    mean_logit: Tensor
    """E[Ñ] / E[Z]."""

    @property
    def total(self) -> Tensor:
        """E[Z]."""
        return self.log_total.exp()

    @property
    def negentropy(self) -> Tensor:
        """E[Ñ]."""
        return self.mean_logit * self.total

    @property
    def log_abs_negentropy(self) -> Tensor:
        """log |E[Ñ]|."""
        return self.log_total + self.mean_logit.abs().log()

    @property
    def annealed_entropy(self) -> Tensor:
        """log E[Z] - E[Ñ]/E[Z], in nats; it may be negative."""
        return self.log_total - self.mean_logit


def mean_weight(scale: Tensor, shift: Tensor) -> Tensor:
    """E[exp L] for L ~ N(shift, scale²)."""
    return (shift + scale.square() / 2).exp()


def mean_negentropy(scale: Tensor, shift: Tensor) -> Tensor:
    """E[L exp L] for L ~ N(shift, scale²)."""
    return (shift + scale.square()) * mean_weight(scale, shift)


def expected_ranges(logits: LogitTransform, ranges: Sequence[Range], head: int = 0) -> RangeExpectation:
    """E[Z] and E[Ñ] over ``ranges``. A transform that depends on the context length, as LogN does, takes the end of
    the range for it: the query sees the range and what is nearer, and nothing beyond."""
    ranges = check_ranges(ranges)
    affine = Affine.of(logits, max(stop for _, stop in ranges), head)
    totals, means = [], []
    for start, stop in ranges:
        scale, shift = affine.at(start, stop, stop)
        log_weight = shift + scale.square() / 2
        totals.append(log_weight.logsumexp(0))
        means.append((log_weight - totals[-1]).exp() @ (shift + scale.square()))
    return RangeExpectation(torch.stack(totals), torch.stack(means))


def geometric_ranges(starts: Sequence[int], delta: int) -> list[Range]:
    """[t, t·delta) for each start t."""
    if delta < 2:
        raise ValueError(f"delta must be an integer of at least 2, got {delta}")
    if not starts or min(starts) < 1:
        raise ValueError(f"starts must hold distances of at least 1, got {list(starts)}")
    return [(start, start * delta) for start in starts]


def expected_range_entropy(
    logits: LogitTransform, starts: Sequence[int], delta: int, samples: int = 1000, seed: int = 0, head: int = 0
) -> Estimate:
    """E[H over [t, t·delta)] for each start t, from ``samples`` samples each: means and errors ``[len(starts)]``.

    As in `expected_ranges`, the context length is the end of the range. Ranges are sampled independently.
    """
    ranges = geometric_ranges(starts, delta)
    affine = Affine.of(logits, max(stop for _, stop in ranges), head)
    generator = torch.Generator().manual_seed(seed)
    sums = [sample_sums(*affine.at(start, stop, stop), samples, generator) for start, stop in ranges]
    return estimate(torch.cat([part.entropy for part in sums], 1))
