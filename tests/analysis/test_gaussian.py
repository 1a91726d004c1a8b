"""Gaussian logits: their moments, and fast samples against sampling every logit."""

import pytest
import torch

from scaleinv.analysis import estimate, sample_logits, sample_ranges, tail
from scaleinv.analysis.gaussian import Affine
from scaleinv.logits import ALiBi, DistanceTable, LogitTransform, LogN, Plain, ScaleInvariant, alibi_slopes
from scaleinv.schedule import coefficients

TRANSFORMS = {
    "plain": Plain(),
    "scale-invariant": ScaleInvariant(),
    "logn": LogN(heads=1, scale=0.4),
    "frozen": LogN(heads=1, scale=1.0),
    "alibi-1/256": ALiBi(1),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_logits_have_the_transform_s_mean_and_spread() -> None:
    sampled = sample_logits(ScaleInvariant(), 50, 20_000, seeded())
    scale, shift = coefficients(torch.arange(50))
    assert sampled.dtype == torch.float64
    assert ((sampled.mean(0) - shift).abs() < 5 * scale / 20_000**0.5).all()
    torch.testing.assert_close(sampled.std(0), scale, rtol=0.03, atol=0)


def test_logn_depends_on_the_context_length() -> None:
    affine = Affine.of(LogN(heads=2, scale=0.4), 64, head=1)
    for context in (1, 8, 64):
        scale, shift = affine.at(0, 4, context)
        expected = 0.4 * torch.tensor(float(context), dtype=torch.float64).log().expand(4)
        torch.testing.assert_close(scale, expected, rtol=1e-6, atol=0)
        assert (shift == 0).all()


def test_heads() -> None:
    alibi = ALiBi(4)
    for head in range(4):
        expected = -alibi_slopes(alibi.heads)[head] * torch.arange(8.0).double()
        torch.testing.assert_close(Affine.of(alibi, 8, head).shift, expected)
    mixed = DistanceTable(torch.ones(1, 8), torch.arange(16.0).reshape(2, 8))
    assert Affine.of(mixed, 8, 1).shift.tolist() == list(range(8, 16))
    assert Affine.of(mixed, 8, 1).scale.tolist() == [1.0] * 8


def test_the_caller_s_transform_stays_as_it_was() -> None:
    transform = ScaleInvariant()
    sample_ranges(transform, 5000, [(0, 5000)], 2, seeded())
    assert not transform._cache


@pytest.mark.parametrize("block", [250, 999, 10**6])
def test_blocks_do_not_change_the_distribution(block: int) -> None:
    scale, shift = Affine.of(ScaleInvariant(), 3000).at(0, 3000, 3000)
    found = estimate(tail.sample_every(scale, shift, 400, seeded(block), block).entropy)
    direct = estimate(tail.sample_every(scale, shift, 400, seeded(1)).entropy)
    assert abs(found.mean - direct.mean) < 4 * (found.error**2 + direct.error**2).sqrt()


def test_one_block_equals_direct_to_the_bit() -> None:
    scale, shift = Affine.of(ScaleInvariant(), 300).at(0, 300, 300)
    blocks = tail.sample_every(scale, shift, 8, seeded(), 300 * 8)
    logits = sample_logits(ScaleInvariant(), 300, 8, seeded())
    torch.testing.assert_close(blocks.total[:, 0], logits.exp().sum(-1))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_fast_samples_agree_with_every_logit(name: str) -> None:
    """Means within the errors, and equal spread: entropies, and shares of near and far."""
    transform: LogitTransform = TRANSFORMS[name]
    length, ranges = 12_000, [(0, 12_000), (2000, 12_000), (0, 2000)]
    fast = sample_ranges(transform, length, ranges, 4000, seeded(1))
    every = sample_ranges(transform, length, ranges, 500, seeded(2), every=True)
    for quantity in ("entropy", "share"):
        values = [s.entropy[:, :2] if quantity == "entropy" else s.share(0)[:, 2:] for s in (fast, every)]
        first, second = (estimate(value) for value in values)
        error = (first.error**2 + second.error**2).sqrt()
        assert ((first.mean - second.mean).abs() < 4 * error + 1e-3).all()
        torch.testing.assert_close(values[0].std(0), values[1].std(0), rtol=0.2, atol=1e-3)


def test_a_million_distances_take_little_memory() -> None:
    entropies = sample_ranges(ScaleInvariant(), 1 << 20, [(1 << 16, 1 << 20)], 20, seeded()).entropy
    assert entropies.shape == (20, 1)
    assert ((entropies > 0) & (entropies < 14)).all()


def test_the_same_seed_gives_the_same_samples() -> None:
    first, second, other = (
        sample_ranges(ScaleInvariant(), 20_000, [(10, 20_000)], 50, seeded(s)).entropy for s in (3, 3, 4)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_uneven_tables_are_sampled_in_full() -> None:
    """One distance outweighs all others, and hides between those that the threshold is estimated from."""
    shift = torch.zeros(1, 20_000)
    shift[0, 777] = 30.0
    entropies = sample_ranges(DistanceTable(torch.ones(1, 20_000), shift), 20_000, [(0, 20_000)], 20, seeded()).entropy
    assert (entropies < 1e-4).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Affine.of(ALiBi(4), 8, 4), "head must be in 0 … 3 for ALiBi, got 4"),
        (lambda: Affine.of(Plain(), 0), "length"),
        (lambda: sample_logits(Plain(), 8, 0, seeded()), "samples"),
        (lambda: sample_ranges(Plain(), 8, [(0, 9)], 2, seeded()), "length=8"),
        (lambda: sample_logits(DistanceTable(torch.ones(1, 4), torch.ones(1, 4)), 8, 2, seeded()), "DistanceTable"),
    ],
)
def test_errors_name_the_argument(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
