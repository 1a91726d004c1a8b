"""Batches depend on the step alone and cover the data; windows are the same tokens at every length."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaleinv.data import TokenData, document_ids, write_shard
from scaleinv.distributed.layout import Split

TOTAL = 1000
Order = Literal["random", "sequential"]
ORDERS: tuple[Order, ...] = ("random", "sequential")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenData:
    """The numbers 0 … 999 in three uneven shards, so that a token is its own position."""
    folder = tmp_path_factory.mktemp("shards")
    paths = []
    for number, piece in enumerate(np.split(np.arange(TOTAL), [1, 400])):
        paths.append(folder / f"{number}.bin")
        write_shard(paths[-1], piece)
    return TokenData(paths, end_of_text=0)


@given(start=st.integers(0, TOTAL), count=st.integers(0, TOTAL))
def test_read_across_shards(data: TokenData, start: int, count: int) -> None:
    if start + count > TOTAL:
        with pytest.raises(ValueError, match="start and count must lie inside 1000 tokens"):
            data.read(start, count)
    else:
        assert data.read(start, count).tolist() == list(range(start, start + count))


@given(
    step=st.integers(0, 200),
    rows=st.integers(1, 3),
    world=st.integers(1, 4),
    length=st.sampled_from([1, 7, 64, 999]),
    order=st.sampled_from(ORDERS),
)
def test_batch_does_not_depend_on_the_world(
    data: TokenData, step: int, rows: int, world: int, length: int, order: Order
) -> None:
    batch = rows * world
    inputs, targets = data.batch(step, batch, length, order=order)
    assert inputs.shape == targets.shape == (batch, length)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, (inputs + 1) % TOTAL)  # one later; at the end the stream starts again
    parts = [data.batch(step, batch, length, rank=rank, world=world, order=order) for rank in range(world)]
    assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)


def test_batch_does_not_depend_on_the_shards(data: TokenData, tmp_path: Path) -> None:
    write_shard(tmp_path / "whole.bin", np.arange(TOTAL))
    whole = TokenData([tmp_path / "whole.bin"], end_of_text=0)
    for step in range(60):
        assert torch.equal(data.batch(step, 4, 10, seed=3)[0], whole.batch(step, 4, 10, seed=3)[0])


def test_sequential_batch_follows_the_stream(data: TokenData) -> None:
    inputs, _ = data.batch(step=3, batch=4, length=10, order="sequential")
    assert inputs[:, 0].tolist() == [120, 130, 140, 150]


def test_random_order_is_the_default_and_depends_on_seed_and_epoch(data: TokenData) -> None:
    """The windows of an epoch are the same in either order."""
    first, again, other, sequential = (
        data.batch(0, 99, 10, **options)[0]
        for options in ({}, {"order": "random"}, {"seed": 1}, {"order": "sequential"})
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, sequential)
    assert sorted(first.tolist()) == sorted(other.tolist()) == sequential.tolist()
    epochs = [data.batch(epoch, 99, 10)[0][:, 0] // 10 for epoch in range(2)]
    assert not torch.equal(*epochs)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("length", [1, 9, 37, 64, 999])
def test_an_epoch_has_every_token_at_most_once(data: TokenData, length: int, order: Order) -> None:
    windows = (TOTAL - 1) // length
    starts = []
    for epoch in range(3):
        inputs, _ = data.batch(step=epoch, batch=windows, length=length, order=order)
        seen = inputs.flatten().tolist()
        assert len(set(seen)) == len(seen) == windows * length > TOTAL - 1 - length
        starts.append(min(inputs[:, 0] % length).item())
    assert starts[0] == 0
    assert len(set(starts)) == (3 if length > 2 else 1)  # cut elsewhere each time


@pytest.mark.parametrize(
    "arguments",
    [
        {"step": -1},
        {"batch": 0},
        {"batch": 3, "world": 2},
        {"rank": 1},
        {"rank": -1, "world": 2},
        {"length": 0},
        {"length": TOTAL},
        {"order": "shuffled"},
    ],
    ids=str,
)
def test_batch_errors(data: TokenData, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} .*{next(iter(arguments.values()))}"):
        data.batch(**({"step": 0, "batch": 2, "length": 8} | arguments))


@pytest.mark.parametrize("length", [1, 10, 40, 160, 480])
def test_windows_are_the_same_tokens_at_every_length(data: TokenData, length: int) -> None:
    pairs = list(data.windows(length, limit=480))
    assert {tuple(inputs.shape) for inputs, _ in pairs} == {(length,)}
    assert torch.cat([inputs for inputs, _ in pairs]).tolist() == list(range(480))
    assert torch.cat([targets for _, targets in pairs]).tolist() == list(range(1, 481))


def test_windows_without_a_limit_and_errors(data: TokenData) -> None:
    assert len(list(data.windows(100))) == 9
    assert len(list(data.windows(999))) == 1
    for length, limit in ((100, 150), (100, 1000), (100, 0), (10, -10)):
        with pytest.raises(ValueError, match=f"limit must be a multiple of length {length} .*got {limit}"):
            data.windows(length, limit)
    with pytest.raises(ValueError, match="length must lie in 1 … 999"):
        data.windows(1000)


def test_more_shards_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaleinv.data.tokens._OPEN_SHARDS", 2)
    paths = [tmp_path / f"{number}.bin" for number in range(20)]
    for number, path in enumerate(paths):
        write_shard(path, np.array([number]))
    assert TokenData(paths, 0).read(0, 20).tolist() == list(range(20))


def test_no_shards() -> None:
    with pytest.raises(ValueError, match="paths must name at least one shard"):
        TokenData([], 0)


def test_document_ids() -> None:
    tokens = torch.tensor([[9, 1, 9, 9, 2], [1, 1, 1, 1, 9]])
    ids = document_ids(tokens, end_of_text=9)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[1, 1, 2, 3, 3], [0, 0, 0, 0, 1]]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_reads_its_part_of_each_sequence_alone(
    data: TokenData, monkeypatch: pytest.MonkeyPatch, ranks: int, layout: Literal["zigzag", "contiguous"]
) -> None:
    """Targets cross the borders: the last one of a run is the first token of another rank's."""
    length, rows, step = 60, 4, 7  # the second epoch, in which a window continues at the stream's beginning
    split = Split(length, ranks, layout)
    inputs, targets = data.batch(step, rows, length)
    reads: list[int] = []
    original = data.read
    monkeypatch.setattr(data, "read", lambda start, count: reads.append(count) or original(start, count))
    for rank in range(ranks):
        runs = [(segment.start, segment.length) for segment in split.segments(rank)]
        reads.clear()
        part = data.batch(step, rows, length, runs=runs)
        assert sum(reads) == rows * (split.part + len(runs))  # and the target after each run
        for whole, held in zip((inputs, targets), part, strict=True):
            assert torch.equal(held, split.take(whole, rank, dim=1))
