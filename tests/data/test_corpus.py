"""A corpus from text or shards: what is trained and validated on, and what cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from builders import write_books
from scaleinv.data import load_corpus, open_shard, prepare, write_shard


@pytest.fixture
def books(tmp_path: Path) -> Path:
    return write_books(tmp_path / "my_val_1", range(30), lines=3)  # a name that looks like a validation shard's


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
    fails(r"000001\.bin has token 50300 at 2, outside the vocabulary of 50257")
    bad.write_bytes(bad.read_bytes()[:-1])
    fails(r"000001\.bin is truncated.*; download it or make it again")
    bad.write_bytes(b"")
    fails(r"000001\.bin has 0 bytes, fewer than the header")


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
    with pytest.raises(ValueError, match=r"val_data .* must hold nothing of data, got .*000001\.bin in both"):
        load_corpus(str(shards), f"{shards}/*1.bin", cache=tmp_path / "cache")


@pytest.mark.parametrize("how", ["itself", "glob", "one file", "link", "copy"])
def test_no_text_is_trained_and_validated_on(books: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "link").symlink_to(books)
    shutil.copytree(books, tmp_path / "copy")
    val = {"itself": books, "glob": books / "*.txt", "one file": books / "007.txt"}.get(how, tmp_path / how)
    message = "must be another text than data" if how == "copy" else r"must hold nothing of data, got .*\.txt in both"
    with pytest.raises(ValueError, match=rf"val_data .* {message}"):
        load_corpus(str(books), str(val), cache=tmp_path / "cache")


def test_a_copy_of_a_shard_is_not_validated_on(shards: Path, tmp_path: Path) -> None:
    shutil.copy(shards / "fineweb_train_000001.bin", tmp_path / "other.bin")
    with pytest.raises(ValueError, match=r"val_data .*other\.bin' must be another text than data, got a copy"):
        load_corpus(str(shards), str(tmp_path / "other.bin"), cache=tmp_path / "cache")


def test_a_dataset_is_not_validated_on_itself() -> None:
    with pytest.raises(ValueError, match=r"val_data 'hf:a/b' must hold nothing of data, got hf:a/b:train:text in both"):
        load_corpus("hf:a/b:train", "hf:a/b")


def test_damaged_tokenizer_beside_shards_is_named(books: Path, tmp_path: Path) -> None:
    prepare(str(books), "bpe:300", tmp_path / "out", workers=1)
    for content, message in (
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ('{"name": 3}', "must have the name .* got 3"),
    ):
        (tmp_path / "out" / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=rf"{tmp_path}/out/tokenizer\.json {message}.*; make it again"):
            load_corpus(str(tmp_path / "out"), cache=tmp_path / "cache")


def test_other_arguments(books: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="val_fraction must lie between 0 and 1, got 0"):
        load_corpus(str(books), val_fraction=0, cache=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"cache .*must be a folder that can be written to"):
        load_corpus(str(books), cache=books / "000.txt")


def test_shards_of_a_cache_are_ordinary_shards(books: Path, tmp_path: Path) -> None:
    corpus = load_corpus(str(books), cache=tmp_path / "cache")
    assert [len(open_shard(path, 257)) for path in corpus.train.paths] == [corpus.train.total]
