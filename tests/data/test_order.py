"""The order of windows: a bijection at every size, another for every seed and epoch, and without structure."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaleinv.data.order import _permuted, shuffled


def order(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return [shuffled(index, size, seed, epoch) for index in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 256, 257, 1000, 4097])
def test_every_window_comes_up_once(size: int) -> None:
    for seed in range(3):
        assert sorted(order(size, seed)) == list(range(size))


@given(
    size=st.one_of(st.sampled_from([10**6, 10**12]), st.integers(1, 2**64)),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 1000),
    data=st.data(),
)
def test_no_window_comes_up_twice_in_a_large_order(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    indices = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=20))
    places = {shuffled(index, size, seed, epoch) for index in indices}
    assert len(places) == len(indices)
    assert all(0 <= place < size for place in places)


@given(half=st.integers(1, 40), seed=st.integers(0, 9), data=st.data())
def test_each_round_can_be_undone(half: int, seed: int, data: st.DataObject) -> None:
    """A Feistel network is a bijection whatever its rounds compute: two places never meet."""
    first, second = (data.draw(st.integers(0, 4**half - 1)) for _ in range(2))
    images = [_permuted(place, half, seed, 0) for place in (first, second)]
    assert all(0 <= image < 4**half for image in images)
    assert (images[0] == images[1]) == (first == second)


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = [tuple(order(50, seed, epoch)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    assert order(50, seed=1, epoch=2) == order(50, seed=1, epoch=2)


@pytest.mark.parametrize("size", [3000, 4096, 5000])
@pytest.mark.parametrize("seed", [0, 1])
def test_an_order_has_no_trend(size: int, seed: int) -> None:
    """In a random order both correlations have mean about 0 and standard deviation 1 / √size: five of them bound it."""
    places = np.array(order(size, seed), dtype=float)
    bound = 5 / math.sqrt(size - 1)
    assert abs(np.corrcoef(np.arange(size), places)[0, 1]) < bound
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < bound
    neighbours = int((np.abs(np.diff(places)) == 1).sum())
    assert neighbours <= 12  # two are expected, as a Poisson number: 13 or more have probability 1e-6


@pytest.mark.parametrize("size", [3, 4, 7])
def test_pairs_are_uniform_over_seeds(size: int) -> None:
    """χ² of where the first two windows come from; its mean is the degrees of freedom f, its variance 2 f."""
    pairs, expected = size * (size - 1), 50
    counts = collections.Counter(tuple(order(size, seed)[:2]) for seed in range(pairs * expected))
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    statistic += (pairs - len(counts)) * expected
    assert statistic < pairs - 1 + 5 * math.sqrt(2 * (pairs - 1))


@pytest.mark.parametrize(("index", "size"), [(-1, 5), (5, 5), (0, 0)])
def test_index_outside(index: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"index must lie in 0 … size - 1, got index {index} and size {size}"):
        shuffled(index, size, seed=0, epoch=0)
