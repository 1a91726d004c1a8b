"""Batches depend on the step alone and cover the data; windows are the same tokens at every length."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaleinv.data import TokenData, document_ids, load_corpus, open_shard, prepare, write_shard

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


def test_document_ids() -> None:
    tokens = torch.tensor([[9, 1, 9, 9, 2], [1, 1, 1, 1, 9]])
    ids = document_ids(tokens, end_of_text=9)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[1, 1, 2, 3, 3], [0, 0, 0, 0, 1]]


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "my_val_1"  # a name that looks like a validation shard's
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(f"Book {number}. " * 20)
    return folder


def test_text_corpus(books: Path, tmp_path: Path) -> None:
    corpus = load_corpus(str(books), cache=tmp_path / "cache", min_length=64)
    assert corpus.vocab_size == 257
    assert corpus.tokenizer.name == "bytes"
    stream = corpus.train.read(0, corpus.train.total)
    assert stream[0] == corpus.train.end_of_text == 256
    written = sum(len(path.read_bytes()) + 1 for path in books.iterdir())
    assert corpus.train.total + corpus.val.total == written
    assert f"{corpus.train.total:,} bytes tokens" in corpus.description
    assert len(corpus.sha256) == 64


def test_cache_is_used_again_until_a_file_changes(books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    first = load_corpus(str(books), cache=cache)

    def again(*_: object, **__: object) -> None:
        raise AssertionError("the text was tokenised again")

    with monkeypatch.context() as patch:
        patch.setattr("scaleinv.data.corpus.prepare", again)
        assert load_corpus(str(books), cache=cache).sha256 == first.sha256
        for change in ({"tokenizer": "bpe"}, {"val_fraction": 0.5}):
            with pytest.raises(AssertionError, match="again"):
                load_corpus(str(books), cache=cache, **change)  # type: ignore[arg-type]
    (books / "new.txt").write_text("A new book.")
    assert load_corpus(str(books), cache=cache).sha256 != first.sha256


def test_hash_depends_on_the_text_and_not_on_the_place(books: Path, tmp_path: Path) -> None:
    first = load_corpus(str(books), cache=tmp_path / "cache")
    shutil.copytree(books, tmp_path / "elsewhere")
    assert load_corpus(str(tmp_path / "elsewhere"), cache=tmp_path / "cache").sha256 == first.sha256
    assert load_corpus(f"{books}/*.txt", cache=tmp_path / "cache").sha256 == first.sha256


def test_interrupted_preparation_leaves_nothing(books: Path, tmp_path: Path) -> None:
    (books / "latin.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        load_corpus(str(books), cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def _load(books: str, cache: Path, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    results.put(load_corpus(books, tokenizer="bpe:300", cache=cache).sha256)  # type: ignore[attr-defined]


def test_two_processes_at_once(books: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results, cache = context.Barrier(2), context.Queue(), tmp_path / "cache"
    processes = [context.Process(target=_load, args=(str(books), cache, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert found[0] == found[1] == load_corpus(str(books), tokenizer="bpe:300", cache=cache).sha256
    assert len([path for path in cache.iterdir() if path.name != "scans"]) == 1


def test_validation_text_of_its_own(books: Path, tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text("Book to validate on. " * 30)
    corpus = load_corpus(str(books), str(tmp_path / "val.txt"), tokenizer="bpe:300", cache=tmp_path / "cache")
    text = corpus.tokenizer.decode(corpus.val.read(0, corpus.val.total))
    assert text == "<|endoftext|>" + "Book to validate on. " * 30
    assert corpus.tokenizer.decode(corpus.train.read(0, corpus.train.total)).count("<|endoftext|>") == 30


def test_one_document_is_cut_and_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A paragraph.\n\n" * 50)
    corpus = load_corpus(str(tmp_path / "a.txt"), cache=tmp_path / "cache")
    assert "one document, cut in two" in corpus.description
    assert corpus.train.total > 5 * corpus.val.total > 0


def test_split_too_short_for_one_window(books: Path, tmp_path: Path) -> None:
    total = load_corpus(str(books), cache=tmp_path / "cache").val.total
    load_corpus(str(books), cache=tmp_path / "cache", min_length=total - 1)
    message = (
        f"the validation split has {total:,} tokens, shorter than one window: length {total:,} needs {total + 1:,}"
    )
    with pytest.raises(ValueError, match=message):
        load_corpus(str(books), cache=tmp_path / "cache", min_length=total)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Shards of someone else: GPT-2 tokens, no tokenizer beside them."""
    folder = tmp_path / "fineweb"
    folder.mkdir()
    for number in range(3):
        write_shard(folder / f"fineweb_train_{number:06d}.bin", np.full(100, 50256 - number))
    return folder


def test_shards_validate_on_the_last(shards: Path, tmp_path: Path) -> None:
    corpus = load_corpus(f"{shards}/*.bin", cache=tmp_path / "cache")
    assert (corpus.train.total, corpus.val.total) == (200, 100)
    assert corpus.val.read(0, 1) == [50254]
    assert (corpus.tokenizer.name, corpus.vocab_size, corpus.train.end_of_text) == ("gpt2", 50257, 50256)
    assert "validation on fineweb_train_000002.bin" in corpus.description


def test_shards_with_validation_shards(shards: Path, tmp_path: Path) -> None:
    write_shard(shards / "fineweb_val_000000.bin", np.full(50, 7))
    for data, val_data in (
        (str(shards), None),
        (f"{shards}/*.bin", None),
        (f"{shards}/*_train_*.bin", f"{shards}/*_val_*.bin"),
        (",".join(f"{shards}/fineweb_train_{n:06d}.bin" for n in range(3)), f"{shards}/fineweb_val_000000.bin"),
    ):
        corpus = load_corpus(data, val_data, cache=tmp_path / "cache", vocab_size=50304)
        assert (corpus.train.total, corpus.val.total, corpus.vocab_size) == (300, 50, 50304)


def test_prepared_shards_bring_their_tokenizer(books: Path, tmp_path: Path) -> None:
    prepare(str(books), "bpe:300", tmp_path / "out", workers=1, val_fraction=0.1)
    corpus = load_corpus(str(tmp_path / "out"), cache=tmp_path / "cache")
    assert corpus.tokenizer.name == "bpe"
    same = load_corpus(str(books), tokenizer="bpe:300", cache=tmp_path / "cache")
    assert corpus.sha256 == same.sha256


def test_damaged_shards_are_named(shards: Path, tmp_path: Path) -> None:
    bad = shards / "fineweb_train_000001.bin"

    def fails(message: str, **arguments: object) -> None:
        with pytest.raises(ValueError, match=message):
            load_corpus(f"{shards}/*.bin", cache=tmp_path / "cache", **arguments)  # type: ignore[arg-type]

    fails("vocab_size must be at least 50257, the gpt2 tokenizer's, got 50000", vocab_size=50000)
    write_shard(bad, np.array([1, 2, 50300]))
    fails(r"000001\.bin: token 50300 at 2 is outside the vocabulary of 50257")
    bad.write_bytes(bad.read_bytes()[:-1])
    fails(r"000001\.bin: truncated")
    bad.write_bytes(b"")
    fails(r"000001\.bin: 0 bytes, shorter than the header")


def test_shard_specs_that_cannot_be(shards: Path, books: Path, tmp_path: Path) -> None:
    one = f"{shards}/fineweb_train_000000.bin"
    for data, message in (
        (one, "val_data must be given"),
        (f"{one},{shards}/missing.bin", r"missing\.bin' matches no file"),
        (f"{shards}/no*.bin", r"no\*\.bin' matches no file"),
        (f"{one},{books}", "must be token shards or text, not both"),
        (f"{one},stdlib", "must be token shards or text, not both"),
    ):
        with pytest.raises(ValueError, match=message):
            load_corpus(data, cache=tmp_path / "cache")


def test_no_shard_is_trained_and_validated_on(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"val_data .* must hold no shard of data, got .*000001\.bin"):
        load_corpus(str(shards), f"{shards}/*1.bin", cache=tmp_path / "cache")


def test_other_arguments(books: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="val_fraction must lie between 0 and 1, got 0"):
        load_corpus(str(books), val_fraction=0, cache=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"cache .*must be a folder that can be written to"):
        load_corpus(str(books), cache=books / "00.txt")
    with pytest.raises(ValueError, match="paths must name at least one shard"):
        TokenData([], 0)


def test_shards_of_a_cache_are_ordinary_shards(books: Path, tmp_path: Path) -> None:
    corpus = load_corpus(str(books), cache=tmp_path / "cache")
    assert [len(open_shard(path, 257)) for path in corpus.train.paths] == [corpus.train.total]
