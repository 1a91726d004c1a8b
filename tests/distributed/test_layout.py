"""Every position lies on one rank, and a part knows its positions."""

import pytest
import torch

from scaleinv.distributed.layout import LAYOUTS, Split

SIZES = [(1, 1), (2, 2), (3, 3), (12, 3), (15, 5), (14, 2), (64, 4), (1000, 8), (7, 7), (6, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("length", "ranks"), SIZES)
def test_the_parts_cover_every_position_once(length: int, ranks: int, layout: str) -> None:
    split = Split(length, ranks, layout)
    positions = [split.positions(rank) for rank in range(ranks)]
    assert all(len(part) == length // ranks for part in positions)
    assert torch.equal(torch.cat(positions).sort().values, torch.arange(length))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("length", "ranks"), SIZES)
def test_join_undoes_take(length: int, ranks: int, layout: str) -> None:
    split = Split(length, ranks, layout)
    x = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(0))
    parts = [split.take(x, rank, dim=1) for rank in range(ranks)]
    assert torch.equal(split.join(parts, dim=1), x)
    for rank, part in enumerate(parts):
        assert torch.equal(part, x[:, split.positions(rank)])


def test_zigzag_mirrors_the_front_in_the_back() -> None:
    split = Split(12, 3, "zigzag")
    assert [split.positions(rank).tolist() for rank in range(3)] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_bad_splits_are_named() -> None:
    with pytest.raises(ValueError, match="10 tokens do not divide by 4"):
        Split(10, 4)
    with pytest.raises(ValueError, match="layout must be one of contiguous, zigzag, got 'spiral'"):
        Split(8, 2, "spiral")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks must be positive"):
        Split(8, 0)
