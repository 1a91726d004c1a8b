"""Sums over ranges: closed forms, brute force, and streaming against direct."""

import math

import pytest
import torch

from scaleinv.analysis import RangeAccumulator, entropy, estimate, range_sums, recent_share


def brute_force(logits: list[float]) -> tuple[float, float, float]:
    weights = [math.exp(x) for x in logits]
    total = sum(weights)
    shares = [w / total for w in weights]
    return total, sum(w * x for w, x in zip(weights, logits, strict=True)), -sum(p * math.log(p) for p in shares)


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
@pytest.mark.parametrize("level", [-700.0, 0.0, 3.0, 1e8])
def test_uniform_logits_have_entropy_log_n(count: int, level: float) -> None:
    logits = torch.full((count,), level, dtype=torch.float64)
    torch.testing.assert_close(entropy(logits).item(), math.log(count), atol=1e-12, rtol=0)


@pytest.mark.parametrize("p", [0.5, 0.1, 1e-3, 1e-12])
def test_two_points(p: float) -> None:
    logits = torch.tensor([math.log(p), math.log1p(-p)], dtype=torch.float64)
    expected = -p * math.log(p) - (1 - p) * math.log1p(-p)
    torch.testing.assert_close(entropy(logits).item(), expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(recent_share(logits, 1).item(), p, rtol=1e-12, atol=0)


def test_sums_equal_brute_force() -> None:
    logits = torch.randn(3, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    ranges = [(0, 200), (5, 6), (10, 100), (40, 200), (0, 40)]
    sums = range_sums(logits, ranges)
    assert sums.total.shape == (3, 5)
    for row in range(3):
        for column, (start, stop) in enumerate(ranges):
            found = [q[row, column].item() for q in (sums.total, sums.negentropy, sums.entropy)]
            assert found == pytest.approx(brute_force(logits[row, start:stop].tolist()), rel=1e-10, abs=1e-12)
    torch.testing.assert_close(sums.share(0)[:, 3] + sums.share(0)[:, 4], torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(sums.share(-1)[:, 4], torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_blocks_equal_direct(block: int) -> None:
    logits = torch.randn(2, 333, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 5
    ranges = [(0, 333), (3, 300), (100, 101), (17, 200)]
    sums = RangeAccumulator(ranges)
    for part in logits.split(block, -1):
        sums.add(part)
    direct = range_sums(logits, ranges)
    for name in ("log_total", "negentropy", "entropy"):
        torch.testing.assert_close(getattr(sums.result(), name), getattr(direct, name), rtol=1e-11, atol=1e-11)


def test_shifts_and_extremes_keep_the_entropy() -> None:
    logits = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for shift in (-1e5, 1e5):
        torch.testing.assert_close(entropy(logits + shift), entropy(logits), rtol=0, atol=1e-9)
    assert entropy(torch.tensor([0.0, -1e300])).item() == 0.0


def test_masked_logits_weigh_nothing() -> None:
    logits = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf, -torch.inf])
    sums = range_sums(logits, [(0, 5), (0, 2), (3, 5)])
    assert sums.total.tolist() == pytest.approx([2, 1, 0])
    assert sums.entropy[:2].tolist() == pytest.approx([math.log(2), 0])
    assert math.isnan(sums.entropy[2])
    assert sums.share(0).tolist() == pytest.approx([1, 0.5, 0])


def test_nan_is_not_hidden() -> None:
    assert math.isnan(entropy(torch.tensor([0.0, math.nan, 1.0])))


def test_estimate() -> None:
    found = estimate(torch.tensor([[1.0, 2.0], [3.0, 2.0]], dtype=torch.float64))
    assert found.mean.tolist() == [2.0, 2.0]
    assert found.error.tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: range_sums(torch.zeros(4), []), "ranges"),
        (lambda: range_sums(torch.zeros(4), [(2, 2)]), r"ranges.*\(2, 2\)"),
        (lambda: range_sums(torch.zeros(4), [(-1, 2)]), "ranges"),
        (lambda: range_sums(torch.zeros(4), [(0, 5)]), "ranges reach to 5, but the logits end at 4"),
        (lambda: recent_share(torch.zeros(4), 0), "count"),
        (lambda: estimate(torch.zeros(1, 3)), "samples"),
    ],
)
def test_errors_name_the_argument(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
