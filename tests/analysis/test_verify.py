"""The verdicts on Definitions 3.1 – 3.4, for each transform and for some made to be on the edge."""

import dataclasses

import pytest
import torch

from scaleinv.analysis import verify
from scaleinv.logits import ALiBi, DistanceTable, LogitTransform, LogN, Plain, ScaleInvariant

LONGEST = 2**16


def table(criticality: float, length: int = LONGEST) -> DistanceTable:
    """E[exp L] = 1 / (1 + t/10) as Lemma 1 asks, with a spread a² = 1 + criticality · 2 log(1 + t/10)."""
    log = torch.log1p(torch.arange(length, dtype=torch.float64) / 10)
    variance = 1 + 2 * criticality * log
    return DistanceTable(variance.sqrt()[None], (-log - variance / 2)[None])


# Which of 3.1, 3.2, 3.3, 3.4 hold.
EXPECTED: dict[str, tuple[LogitTransform, str]] = {
    "plain": (Plain(), ""),
    "plain, colder": (DistanceTable(torch.full((1, LONGEST), 2.0), torch.zeros(1, LONGEST)), ""),
    "scale-invariant": (ScaleInvariant(), "3.1 3.2 3.3"),
    "scale-invariant, learnable": (ScaleInvariant(10.0, heads=2, learnable=True), "3.1 3.2 3.3"),
    "scale-invariant, tau 1": (ScaleInvariant(1.0), "3.1 3.2 3.3"),
    "scale-invariant, tau 20": (ScaleInvariant(20.0), "3.1 3.2 3.3"),
    "scale-invariant, alpha 1, beta 0.2": (ScaleInvariant(10.0, 1.0, 0.2), "3.1 3.2 3.3"),
    "scale-invariant, alpha 5, beta 9": (ScaleInvariant(10.0, 5.0, 9.0), "3.1 3.2 3.3"),
    "logn": (LogN(heads=1, scale=0.4), "3.3"),
    "logn, context": (LogN(heads=1, scale=0.4, counts="context"), "3.3"),
    "logn, frozen": (LogN(heads=1, scale=1.0), "3.3"),
    "alibi": (ALiBi(8), "3.3 3.4"),
    "half as critical: entropy as ½ log t": (table(0.5), "3.1"),
    "nearly critical: entropy as ⅕ log t": (table(0.8), "3.1"),
    "far beyond critical: bounded entropy": (table(6.0), "3.1 3.3 3.4"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_verdicts(name: str) -> None:
    transform, holding = EXPECTED[name]
    verdicts = verify(transform, longest=LONGEST, samples=1000)
    assert list(verdicts) == ["3.1", "3.2", "3.3", "3.4"]
    assert " ".join(key for key, verdict in verdicts.items() if verdict.holds) == holding
    assert all(verdict.evidence.confidence > 0.9 for verdict in verdicts.values())


@pytest.mark.slow
@pytest.mark.parametrize("tau", [0.01, 0.1, 100.0])
def test_extreme_lengthscales_at_full_reach(tau: float) -> None:
    verdicts = verify(ScaleInvariant(tau), samples=500)
    assert [verdict.holds for verdict in verdicts.values()] == [True, True, True, False]


def test_the_farthest_alibi_head() -> None:
    """Its slope is 1/256: it is plain at first, and bounded later."""
    verdicts = verify(ALiBi(8), head=7, longest=LONGEST, samples=200)
    assert [verdict.holds for verdict in verdicts.values()] == [False, False, True, True]


def test_evidence() -> None:
    verdicts = verify(ScaleInvariant(), longest=2**15, samples=100)
    total, weak = verdicts["3.1"], verdicts["3.3"]
    assert total.evidence.source == "closed form"
    assert "Θ(1) holds" in total.statement
    assert [curve.delta for curve in weak.evidence.curves] == [2, 5, 10]
    for curve in weak.evidence.curves:
        assert len(curve.starts) == len(curve.values) == len(curve.errors) >= 6
        assert curve.starts[-1] * curve.delta <= 2**15
        assert set(curve.fits) == {"log t", "√log t", "constant"}
        assert all(error > 0 for error in curve.errors)
    assert "o(log t) holds" in weak.statement
    assert dataclasses.asdict(weak)["evidence"]["curves"][0]["annealed"]


def test_the_seed_decides() -> None:
    first, second, other = (verify(ScaleInvariant(), longest=2**14, samples=50, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first["3.3"] != other["3.3"]
    assert first["3.1"] == other["3.1"]


@pytest.mark.parametrize(
    ("logits", "arguments", "message"),
    [
        (table(1.0, 8192), {"longest": 2**14}, "DistanceTable holds distances 0 … 8191"),
        (Plain(), {"longest": 1024}, "longest must be at least 5120"),
        (Plain(), {"deltas": (1, 2)}, "deltas"),
        (Plain(), {"samples": 1}, "samples"),
        (ALiBi(4), {"head": 4}, "head"),
    ],
)
def test_errors_name_the_argument(logits: LogitTransform, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(logits, **arguments)
