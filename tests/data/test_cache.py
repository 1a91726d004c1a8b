"""Text is tokenised once, and again where what is kept of it is damaged."""

from __future__ import annotations

import json
import logging
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from builders import write_books
from scaleinv.data import Corpus, load_corpus, open_shard, write_shard


@pytest.fixture
def books(tmp_path: Path) -> Path:
    return write_books(tmp_path / "my_val_1", range(30), lines=3)  # a name that looks like a validation shard's


def folders(cache: Path) -> list[Path]:
    """What the cache holds of texts."""
    return [path for path in cache.iterdir() if path.name != "scans"]


def test_cache_is_used_again_until_a_file_changes(books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    first = load_corpus(str(books), cache=cache)

    def again(*_: object, **__: object) -> None:
        raise AssertionError("the text was tokenised again")

    with monkeypatch.context() as patch:
        patch.setattr("scaleinv.data.cache.prepare", again)
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


def test_the_same_text_by_another_path_is_not_tokenised_again(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for spec in (str(books), books.name, f"./{books.name}/"):
        load_corpus(spec, cache=tmp_path / "cache")
    assert len(folders(tmp_path / "cache")) == 1


def test_interrupted_preparation_leaves_nothing(books: Path, tmp_path: Path) -> None:
    (books / "latin.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        load_corpus(str(books), cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def _load(books: str, cache: Path, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    results.put(load_corpus(books, tokenizer="bpe:300", cache=cache).sha256)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_two_processes_at_once(books: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results, cache = context.Barrier(2), context.Queue(), tmp_path / "cache"
    processes = [context.Process(target=_load, args=(str(books), cache, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(60)
    assert found[0] == found[1] == load_corpus(str(books), tokenizer="bpe:300", cache=cache).sha256
    assert len(folders(cache)) == 1


def edit(path: Path) -> None:
    """Other tokens in a shard of the same length."""
    tokens = open_shard(path).copy()
    tokens[len(tokens) // 2] ^= 1
    write_shard(path, tokens)


def change_meta(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "meta.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def train_shard(folder: Path) -> Path:
    return next(folder.glob("*_train_*.bin"))


def rewrite(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "shard missing": lambda folder: train_shard(folder).unlink(),
    "shard truncated": lambda folder: train_shard(folder).write_bytes(train_shard(folder).read_bytes()[:-1]),
    "shard empty": lambda folder: train_shard(folder).write_bytes(b""),
    "shard edited": lambda folder: edit(train_shard(folder)),
    "shard a folder": lambda folder: ((path := train_shard(folder)).unlink(), path.mkdir()),
    "shard too many": lambda folder: write_shard(folder / "x_train_000009.bin", np.arange(9)),
    "meta missing": lambda folder: (folder / "meta.json").unlink(),
    "meta half written": rewrite("meta.json", '{"sha256": {'),
    "meta a list": rewrite("meta.json", "[]"),
    "meta not UTF-8": lambda folder: (folder / "meta.json").write_bytes(b"\xff\xfe"),
    "meta without hashes": change_meta(sha256=None),
    "meta with other hashes": change_meta(sha256={"a.bin": 3}),
    "meta with a number for cut": change_meta(cut=3),
    "tokenizer missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "tokenizer broken": rewrite("tokenizer.json", "{"),
    "tokenizer another": rewrite("tokenizer.json", '{"name": "gpt2"}'),
    "tokenizer of another type": rewrite("tokenizer.json", '{"name": ["bpe"]}'),
    "tokenizer a folder": lambda folder: ((folder / "tokenizer.json").unlink(), (folder / "tokenizer.json").mkdir()),
    "merges missing": lambda folder: (folder / "bpe.json").unlink(),
    "merges broken": rewrite("bpe.json", "{}"),
    "all missing": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "a file instead": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_cache_heals_itself(
    books: Path, tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"

    def load() -> Corpus:
        return load_corpus(str(books), tokenizer="bpe:300", cache=cache)

    first = load()
    (folder,) = folders(cache)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    with caplog.at_level(logging.WARNING):
        healed = load()
    (line,) = caplog.messages
    assert line.startswith(str(folder))
    assert line.endswith(f" is damaged or missing: tokenising {books} again")
    assert healed.sha256 == first.sha256
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert folders(cache) == [folder]
    caplog.clear()
    assert load().sha256 == first.sha256
    assert not caplog.messages


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", '{"total": 3}', '{"total": "3", "highest": 1, "sha256": "a"}', '{"sha256": 3, "other": 1}'],
)
def test_a_damaged_memory_of_a_scan_is_made_again(books: Path, tmp_path: Path, content: str) -> None:
    first = load_corpus(str(books), cache=tmp_path / "cache")
    memories = list((tmp_path / "cache" / "scans").iterdir())
    before = [path.read_bytes() for path in memories]
    for path in memories:
        path.write_text(content)
    again = load_corpus(str(books), cache=tmp_path / "cache")
    assert (again.sha256, again.train.total) == (first.sha256, first.train.total)
    assert [path.read_bytes() for path in memories] == before
