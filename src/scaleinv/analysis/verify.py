"""Definitions 3.1 – 3.4 of the paper as checks, with their evidence.

All of them concern t → ∞; `verify` looks at ranges [t, tΔ) that end by ``longest``, on Gaussian scores. That is
evidence, not proof: a drift too slow to show by then goes unseen, and a lengthscale near ``longest`` looks like growth
(keep ``longest`` at 5,000 lengthscales or more). "Late" is the upper half of the starts t, in log t.

- 3.1 and 3.2, E[Z] and E[Ñ] = Θ(1): closed forms. The late slope of log |E| against log t must be within
  ±`POWER_TOLERANCE`. By t = 10⁵ even log log t has a slope of 0.035.
- 3.3, E[H] = o(log t): two witnesses must agree. Closed form: the annealed entropy, which is E[H] to leading order
  in log t, must not grow late by more than `SLOPE_TOLERANCE` per unit of log t. Sampled: √log t must describe E[H]
  better than log t does (likelihood ratio over all Δ), or E[H] must not grow late at all.
- 3.4, E[H] = Θ(1): sampled: the late slope of E[H] against log t must be within ±`SLOPE_TOLERANCE`. Closed form: the
  slope of the annealed entropy must have settled. Where it still falls, as LogN's does, H ends at 0 however flat it
  looks.

The context length, for a transform that depends on it, is the end of the range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, Literal

from scaleinv.analysis.growth import Fit, fit, log_likelihood_ratio
from scaleinv.analysis.theory import RangeExpectation, expected_range_entropy, expected_ranges, geometric_ranges
from scaleinv.logits import LogitTransform

POWER_TOLERANCE = 0.02
"""A quantity that grows or falls late as t^±0.02 or slower counts as Θ(1)."""

SLOPE_TOLERANCE = 0.05
"""An entropy that changes late by at most 0.05 nats per unit of log t counts as constant."""

ERROR_FLOOR = 0.01
"""Nats: √log t and log t are leading orders only, so deviations smaller than this do not tell them apart."""

FIRST_START = 16
"""The nearest range starts here; closer ones are all transient."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """A quantity over [t, t·delta) as t grows."""

    delta: int
    starts: list[int]
    values: list[float]
    errors: list[float]
    """Standard errors over samples; zeros for a closed form."""
    fits: dict[str, Fit]
    """The values against "log t", "√log t" and "constant", over all starts."""
    late: Fit
    """Over the upper half of the starts, against log t: of the values, or of their log |values| for 3.1 and 3.2."""


@dataclasses.dataclass(frozen=True)
class EntropyCurve(Curve):
    """E[H], with the closed form of the annealed entropy beside it."""

    annealed: list[float]
    annealed_slope: float
    """Late, against log t."""
    annealed_drift: float
    """How much that slope still changes between the two halves of the late part."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What a verdict rests on."""

    source: Literal["closed form", "sampled, with closed form"]
    curves: tuple[Curve, ...]
    """One for each Δ."""
    confidence: float
    """Chance that sampling noise did not decide the verdict. It says nothing of what happens beyond ``longest``."""
    reason: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a definition holds, as far as can be seen."""

    holds: bool
    statement: str
    evidence: Evidence


def verify(
    logits: LogitTransform,
    *,
    head: int = 0,
    deltas: Sequence[int] = (2, 5, 10),
    longest: int = 1 << 20,
    samples: int = 1000,
    seed: int = 0,
) -> dict[str, Verdict]:
    """Check Definitions 3.1 – 3.4 on Gaussian scores: a verdict for each of "3.1", "3.2", "3.3", "3.4".

    Args:
        logits: any transform. A `DistanceTable` needs a T of at least ``longest``.
        head: which head of it.
        deltas: the ratios Δ; a definition holds only if it holds for each of them.
        longest: where the farthest range ends, in tokens.
        samples: for the entropy, for each range.
        seed: of the samples: the same seed gives the same verdicts.

    >>> from scaleinv.logits import Plain
    >>> {name: verdict.holds for name, verdict in verify(Plain(), longest=2**13, samples=100).items()}
    {'3.1': False, '3.2': False, '3.3': False, '3.4': False}
    """
    if not deltas or min(deltas) < 2:
        raise ValueError(f"deltas must hold integers of at least 2, got {tuple(deltas)}")
    needed = 32 * FIRST_START * max(deltas)  # six starts
    if longest < needed:
        raise ValueError(f"longest must be at least {needed} to show growth for Δ = {max(deltas)}, got {longest}")
    if samples < 2:
        raise ValueError(f"samples must be at least 2, got {samples}")
    totals, negentropies, entropies = [], [], []
    for index, delta in enumerate(deltas):
        starts = power_starts(longest, delta)
        expected = expected_ranges(logits, geometric_ranges(starts, delta), head)
        totals.append(_closed_curve(delta, starts, expected.total.tolist(), expected.log_total.tolist()))
        negentropies.append(
            _closed_curve(delta, starts, expected.negentropy.tolist(), expected.log_abs_negentropy.tolist())
        )
        entropies.append(_entropy_curve(logits, delta, starts, expected, samples, seed + index, head))
    return {
        "3.1": _constant("E[Z over [t, tΔ)] = Θ(1)", totals),
        "3.2": _constant("E[Ñ over [t, tΔ)] = Θ(1)", negentropies),
        "3.3": _weak(entropies),
        "3.4": _strong(entropies),
    }


def power_starts(longest: int, delta: int, first: int = FIRST_START) -> list[int]:
    """Powers of two from ``first`` on, as long as t·delta does not pass ``longest``."""
    starts = [first]
    while 2 * starts[-1] * delta <= longest:
        starts.append(2 * starts[-1])
    return starts


def _closed_curve(delta: int, starts: list[int], values: list[float], logs: list[float]) -> Curve:
    half = len(starts) // 2
    return Curve(
        delta, starts, values, [0.0] * len(starts), _fits(starts, values), fit(starts[half:], logs[half:], "log t")
    )


def _entropy_curve(
    logits: LogitTransform,
    delta: int,
    starts: list[int],
    expected: RangeExpectation,
    samples: int,
    seed: int,
    head: int,
) -> EntropyCurve:
    sampled = expected_range_entropy(logits, starts, delta, samples, seed, head)
    values, errors = sampled.mean.tolist(), sampled.error.tolist()
    annealed = expected.annealed_entropy.tolist()
    half, last = len(starts) // 2, (3 * len(starts)) // 4
    early = _slope(starts[half : last + 1], annealed[half : last + 1])
    return EntropyCurve(
        delta,
        starts,
        values,
        errors,
        _fits(starts, values, errors),
        fit(starts[half:], values[half:], "log t", errors[half:]),
        annealed,
        _slope(starts[half:], annealed[half:]),
        _slope(starts[last:], annealed[last:]) - early,
    )


def _fits(starts: list[int], values: list[float], errors: list[float] | None = None) -> dict[str, Fit]:
    return {against: fit(starts, values, against, errors) for against in ("log t", "√log t", "constant")}


def _slope(starts: list[int], values: list[float]) -> float:
    return (values[-1] - values[0]) / math.log(starts[-1] / starts[0])


def _constant(claim: str, curves: list[Curve]) -> Verdict:
    def steady(curve: Curve) -> bool:
        late = curve.values[len(curve.values) // 2 :]
        return abs(curve.late.slope) <= POWER_TOLERANCE and min(late) * max(late) > 0

    holds = all(steady(curve) for curve in curves)
    powers = _listed(curves, lambda curve: _signed(curve.late.slope))
    reason = f"late in t it goes as t to the power of {powers}; Θ(1) is within ±{POWER_TOLERANCE}"
    return _verdict(claim, holds, Evidence("closed form", tuple(curves), 1.0, reason))


def _weak(curves: list[EntropyCurve]) -> Verdict:
    closed = all(curve.annealed_slope <= SLOPE_TOLERANCE for curve in curves)
    ratio = sum(_sqrt_over_log(curve) for curve in curves)
    slows = 1 / (1 + math.exp(-max(-700.0, min(700.0, ratio))))
    flat = min(_chance_below(curve.late, SLOPE_TOLERANCE) for curve in curves)
    slopes = _listed(curves, lambda curve: _signed(curve.annealed_slope))
    late = _listed(curves, lambda curve: f"{curve.late.slope:+.3f} ± {curve.late.error:.3f}")
    reason = (
        f"closed form: the annealed entropy changes by {slopes} per unit of log t late in t; "
        f"sampled: by {late}, and √log t fits {'better' if ratio > 0 else 'worse'} than log t "
        f"(log likelihood ratio {_signed(ratio)})"
    )
    return _decide("E[H over [t, tΔ)] = o(log t)", max(slows, flat) if closed else 0.0, curves, reason)


def _strong(curves: list[EntropyCurve]) -> Verdict:
    settled = all(abs(curve.annealed_drift) <= SLOPE_TOLERANCE for curve in curves)
    flat = min(
        max(0.0, _chance_below(curve.late, SLOPE_TOLERANCE) - _chance_below(curve.late, -SLOPE_TOLERANCE))
        for curve in curves
    )
    late = _listed(curves, lambda curve: f"{curve.late.slope:+.3f} ± {curve.late.error:.3f}")
    drifts = _listed(curves, lambda curve: _signed(curve.annealed_drift))
    reason = (
        f"sampled: it changes by {late} per unit of log t late in t, Θ(1) is within ±{SLOPE_TOLERANCE}; "
        f"closed form: the slope of the annealed entropy {'has settled' if settled else 'still drifts'} ({drifts})"
    )
    return _decide("E[H over [t, tΔ)] = Θ(1)", flat if settled else 0.0, curves, reason)


def _sqrt_over_log(curve: EntropyCurve) -> float:
    errors = [max(error, ERROR_FLOOR) for error in curve.errors]
    return log_likelihood_ratio(curve.fits["√log t"], curve.fits["log t"], curve.starts, curve.values, errors)


def _chance_below(late: Fit, bound: float) -> float:
    return NormalDist().cdf((bound - late.slope) / max(late.error, 1e-12))


def _decide(claim: str, chance: float, curves: Sequence[Curve], reason: str) -> Verdict:
    evidence = Evidence("sampled, with closed form", tuple(curves), max(chance, 1 - chance), reason)
    return _verdict(claim, chance > 0.5, evidence)


def _verdict(claim: str, holds: bool, evidence: Evidence) -> Verdict:
    return Verdict(holds, f"{claim} {'holds' if holds else 'does not hold'}: {evidence.reason}", evidence)


def _signed(value: float) -> str:
    return f"{value:+.3f}" if abs(value) < 100 else f"{value:+.3g}"


def _listed(curves: Sequence[Any], text: Callable[[Any], str]) -> str:
    return ", ".join(f"{text(curve)} (Δ = {curve.delta})" for curve in curves)
