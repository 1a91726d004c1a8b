"""Closed forms against quadrature and the paper's lemmas; sampled entropies against what is known of them."""

import math

import numpy as np
import pytest
import torch

from scaleinv import schedule
from scaleinv.analysis import expected_range_entropy, expected_ranges, fit, mean_negentropy, mean_weight, sample_logits
from scaleinv.analysis.ranges import entropy
from scaleinv.analysis.theory import ENTROPY_SLOPE, geometric_ranges
from scaleinv.analysis.verify import power_starts
from scaleinv.logits import ALiBi, LogN, Plain, ScaleInvariant


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("shift", [-4.0, 0.0, 1.5])
def test_moments_equal_gauss_hermite_quadrature(scale: float, shift: float) -> None:
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    weights = weights / math.sqrt(2 * math.pi)
    logits = scale * nodes + shift
    a, m = torch.tensor([scale], dtype=torch.float64), torch.tensor([shift], dtype=torch.float64)
    assert mean_weight(a, m).item() == pytest.approx((weights * np.exp(logits)).sum(), rel=1e-10)
    assert mean_negentropy(a, m).item() == pytest.approx((weights * logits * np.exp(logits)).sum(), rel=1e-9, abs=1e-12)


def test_ranges_are_sums_of_the_schedule() -> None:
    logits = ScaleInvariant(tau=3.0, alpha=1.2, beta=0.9)
    found = expected_ranges(logits, [(0, 1), (10, 100), (7, 5000)])
    for index, (start, stop) in enumerate([(0, 1), (10, 100), (7, 5000)]):
        t = torch.arange(start, stop)
        total, negentropy = (
            f(t, 3.0, 1.2, 0.9).sum() for f in (schedule.expected_weight, schedule.expected_negentropy)
        )
        torch.testing.assert_close(found.total[index], total, rtol=1e-10, atol=0)
        torch.testing.assert_close(found.negentropy[index], negentropy, rtol=1e-9, atol=0)


@pytest.mark.parametrize("delta", [2, 5, 10])
@pytest.mark.parametrize(("tau", "alpha", "beta"), [(10.0, schedule.HEIGHT, schedule.HEIGHT), (0.1, 1.0, 3.0)])
def test_lemmas_give_the_limits(delta: int, tau: float, alpha: float, beta: float) -> None:
    found = expected_ranges(ScaleInvariant(tau, alpha, beta), [(100_000, 100_000 * delta)])
    assert found.total.item() == pytest.approx(schedule.total_attention_limit(tau, alpha, delta), rel=1e-3)
    assert found.negentropy.item() == pytest.approx(schedule.negentropy_limit(tau, beta, delta), rel=1e-3)


def test_logn_takes_the_end_of_the_range_for_the_context() -> None:
    found = expected_ranges(LogN(heads=1, scale=0.4), [(100, 1000)])
    variance = (0.4 * math.log(1000)) ** 2
    assert found.total.item() == pytest.approx(900 * math.exp(variance / 2), rel=1e-5)
    assert found.annealed_entropy.item() == pytest.approx(math.log(900) - variance / 2, rel=1e-5)


def test_alibi_stays_in_logarithms() -> None:
    found = expected_ranges(ALiBi(8), [(2**16, 2**17)])
    assert found.total.item() == 0.0
    assert found.log_total.item() == pytest.approx(-0.5 * 2**16 + 0.5 - math.log(1 - math.exp(-0.5)), rel=1e-12)
    assert found.log_abs_negentropy.isfinite().all()


def test_expected_entropy_equals_brute_force() -> None:
    sampled = expected_range_entropy(ScaleInvariant(), [20, 200], 5, samples=2000)
    logits = sample_logits(ScaleInvariant(), 1000, 1000, torch.Generator().manual_seed(9))
    for index, start in enumerate((20, 200)):
        direct = entropy(logits[:, start : 5 * start])
        error = math.hypot(sampled.error[index], direct.std() / 1000**0.5)
        assert abs(sampled.mean[index] - direct.mean()) < 4 * error


def test_plain_entropy_is_the_annealed_one() -> None:
    """log n - 1/2 for large n, whichever the range."""
    starts = [2**k for k in range(10, 18)]
    found = expected_range_entropy(Plain(), starts, 4, samples=50).mean
    expected = [math.log(3 * start) - 0.5 for start in starts]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-3)


def test_frozen_entropy_is_poisson_dirichlet_s() -> None:
    """Far below the freezing point, the weights of independent Gaussian logits are Poisson–Dirichlet, and their
    expected entropy is ψ(1) - ψ(1 - x) with x = √(2 log n) / a. Corrections fall off as log log n / log n."""
    special = pytest.importorskip("scipy.special")
    n = 2**19
    spread = 1.5 * math.log(2 * n)
    x = math.sqrt(2 * math.log(n)) / spread
    expected = special.psi(1) - special.psi(1 - x)
    found = expected_range_entropy(LogN(heads=1, scale=1.5), [n], 2, samples=3000)
    assert found.mean.item() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("delta", [2, 10])
def test_scale_invariant_entropy_grows_as_the_root_of_log_t(delta: int) -> None:
    starts = power_starts(2**20, delta)
    found = expected_range_entropy(ScaleInvariant(), starts, delta, samples=500)
    root, straight = (fit(starts, found.mean.tolist(), axis) for axis in ("√log t", "log t"))
    assert root.r2 > straight.r2
    assert root.r2 > 0.98
    assert root.slope == pytest.approx(ENTROPY_SLOPE, rel=0.2)  # 1.13 in the limit


def test_the_seed_decides() -> None:
    first, second, other = (expected_range_entropy(Plain(), [16], 2, samples=10, seed=s).mean for s in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("starts", "delta", "message"), [([16], 1, "delta"), ([], 2, "starts"), ([0], 2, "starts")])
def test_errors_name_the_argument(starts: list[int], delta: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        geometric_ranges(starts, delta)
