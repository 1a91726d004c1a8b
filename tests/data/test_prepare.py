"""Text to shards: the same bytes whatever the workers, whole documents on one side, and never half a result."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from builders import write_books
from scaleinv.data import ByteTokenizer, load_tokenizer, open_shard, prepare

MODULE = importlib.import_module("scaleinv.data.prepare")  # in the package the name is the function's


def texts(paths: list[Path]) -> list[str]:
    """The documents in some byte shards, in order."""
    tokens = np.concatenate([open_shard(path) for path in paths])
    return ByteTokenizer().decode(tokens).split("<|endoftext|>")[1:]


def val_and_train(paths: list[Path]) -> tuple[list[str], list[str]]:
    return texts([path for path in paths if "_val_" in path.name]), texts([p for p in paths if "_train_" in p.name])


@pytest.fixture
def books(tmp_path: Path) -> Path:
    return write_books(tmp_path / "books", range(60), lines=2)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_workers_do_not_change_a_byte(
    books: Path, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "_CHUNK", 500)  # many chunks, more than may be pending
    outs = []
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        prepare(str(books), tokenizer, out, workers=workers, shard_tokens=3000, val_fraction=0.1)
        outs.append({path.name: path.read_bytes() for path in sorted(out.iterdir())})
    assert outs[0] == outs[1]
    assert {"meta.json", "tokenizer.json", "books_val_000000.bin", "books_train_000001.bin"} <= set(outs[0])


def test_every_document_once_and_shuffled(books: Path, tmp_path: Path) -> None:
    paths = prepare(str(books), "bytes", tmp_path / "out", workers=1, shard_tokens=2000, val_fraction=0.2)
    val, train = val_and_train(paths)
    written = [path.read_text() for path in sorted(books.iterdir())]
    assert sorted(val + train) == sorted(written)
    assert 3 <= len(val) <= 25
    assert train != sorted(train, key=written.index)
    sizes = [len(open_shard(path)) for path in paths if "_train_" in path.name]
    assert len(sizes) > 2
    assert set(sizes[:-1]) == {2000}


def test_split_is_stable_when_documents_are_added_or_renamed(tmp_path: Path) -> None:
    books = write_books(tmp_path / "books", range(40), lines=2)
    few = val_and_train(prepare(str(books), "bytes", tmp_path / "few", workers=1, val_fraction=0.2))
    write_books(books, range(40, 80), lines=2)
    (books / "000.txt").rename(books / "renamed.txt")
    many = val_and_train(prepare(str(books), "bytes", tmp_path / "many", workers=1, val_fraction=0.2))
    assert set(few[0]) < set(many[0])
    assert set(few[1]) < set(many[1])


def test_copies_of_a_text_are_on_one_side(tmp_path: Path) -> None:
    books = write_books(tmp_path / "books", range(30), lines=2)
    for path in list(books.iterdir()):
        (books / f"copy{path.name}").write_text(path.read_text())
    val, train = val_and_train(prepare(str(books), "bytes", tmp_path / "out", workers=1, val_fraction=0.3))
    assert not set(val) & set(train)


@pytest.mark.parametrize("val_fraction", [0.0001, 0.9999])
def test_two_documents_give_two_splits(tmp_path: Path, val_fraction: float) -> None:
    books = write_books(tmp_path / "books", range(2), lines=2)
    val, train = val_and_train(prepare(str(books), "bytes", tmp_path / "out", workers=1, val_fraction=val_fraction))
    assert len(val) == len(train) == 1


def test_one_document_is_cut_at_a_paragraph(tmp_path: Path) -> None:
    text = "\n\n".join(f"Paragraph {n}." for n in range(100))
    (tmp_path / "a.txt").write_text(text)
    out = tmp_path / "out"
    val, train = val_and_train(prepare(str(tmp_path / "a.txt"), "bytes", out, workers=1, val_fraction=0.25))
    assert train[0] + val[0] == text
    assert val[0].startswith("Paragraph 7")
    assert json.loads((out / "meta.json").read_text())["cut"] is True


def test_no_validation(books: Path, tmp_path: Path) -> None:
    paths = prepare(str(books), "bytes", tmp_path / "out", workers=1, val_fraction=0)
    assert [path.name for path in paths] == ["books_train_000000.bin"]
    assert len(texts(paths)) == 60


def test_bpe_learns_from_training_documents_alone(tmp_path: Path) -> None:
    books = write_books(tmp_path / "books", range(40), lines=2)
    val, _ = val_and_train(prepare(str(books), "bytes", tmp_path / "bytes", workers=1, val_fraction=0.2))
    prepare(str(books), "bpe:2000", tmp_path / "with", workers=1, val_fraction=0.2)
    for path in books.iterdir():
        if path.read_text() in val:
            path.unlink()
    prepare(str(books), "bpe:2000", tmp_path / "without", workers=1, val_fraction=0)
    assert (tmp_path / "with" / "bpe.json").read_bytes() == (tmp_path / "without" / "bpe.json").read_bytes()


def test_bpe_learns_something_when_every_document_falls_to_validation(tmp_path: Path) -> None:
    books = write_books(tmp_path / "books", range(2), lines=2)
    prepare(str(books), "bpe:300", tmp_path / "out", workers=1, val_fraction=0.9999)
    assert load_tokenizer(tmp_path / "out").vocab_size > 257


def test_meta_and_progress(books: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    out = tmp_path / "out"
    paths = prepare(str(books), "bpe:300", out, workers=1, progress=lines.append)
    meta = json.loads((out / "meta.json").read_text())
    assert sum(meta["documents"].values()) == 60
    assert sum(meta["tokens"].values()) == sum(len(open_shard(path)) for path in paths)
    assert set(meta["sha256"]) == {path.name for path in paths}
    assert meta["vocab_size"] == load_tokenizer(out).vocab_size
    assert "60 documents" in lines[-1]


def test_errors(books: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ({"text": str(tmp_path / "none")}, "none': no such file"),
        ({"val_fraction": 1.0}, "val_fraction must lie in .*got 1.0"),
        ({"shard_tokens": 0}, "shard_tokens must lie in 1 .*got 0"),
        ({"workers": 0}, "workers must be positive, got 0"),
        ({"tokenizer": "words"}, "tokenizer must be .*got 'words'"),
        ({"out": books / "000.txt"}, r"out .*000\.txt must be a folder that can be written to"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(**{"text": str(books), "tokenizer": "bytes", "out": tmp_path / "out", "workers": 1} | arguments)
    assert not list((tmp_path / "out").glob("*"))  # nothing is left of a failure
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty\.txt' holds no text"):
        prepare(str(tmp_path / "empty.txt"), "bytes", tmp_path / "out", workers=1)
    (tmp_path / "short.txt").write_text("x")
    with pytest.raises(ValueError, match=r"short\.txt is the only document, and too short to cut"):
        prepare(str(tmp_path / "short.txt"), "bytes", tmp_path / "out", workers=1)


@pytest.mark.parametrize(
    ("text", "tokenizer", "package"),
    [("", "bpe", "tokenizers"), ("", "gpt2", "tiktoken"), ("hf:owner/name", "bytes", "datasets")],
)
def test_missing_package_is_found_before_anything_is_written(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, tokenizer: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RuntimeError, match=f"needs the package {package}: pip install"):
        prepare(text or str(books), tokenizer, tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def test_a_failure_leaves_no_folder_of_its_own(books: Path, tmp_path: Path) -> None:
    (books / "latin.txt").write_bytes(b"\xff")
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):
        with pytest.raises(ValueError, match="is not UTF-8"):
            prepare(str(books), "bytes", tmp_path / name, workers=1)
    assert not (tmp_path / "new").exists()
    assert not list((tmp_path / "mine").iterdir())


def test_a_second_run_does_not_mix_with_the_first(books: Path, tmp_path: Path) -> None:
    prepare(str(books), "bytes", tmp_path / "out", workers=1)
    with pytest.raises(ValueError, match=r"out must hold no shards yet, .*books_train_000001\.bin"):
        prepare(str(books), "bytes", tmp_path / "out", workers=1)


@pytest.mark.slow
def test_killed_run_leaves_no_shard_and_can_be_repeated(books: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"""
        import importlib, time
        module = importlib.import_module("scaleinv.data.prepare")
        whole = module.write_shard
        def slow(path, tokens):
            whole(path, tokens)
            print("wrote", flush=True)
            time.sleep(60)
        module.write_shard = slow
        module.prepare({str(books)!r}, "bytes", {str(out)!r}, workers=1, val_fraction=0.2)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"wrote\n"
        process.send_signal(signal.SIGKILL)
    assert not list(out.glob("*.bin"))
    val, train = val_and_train(prepare(str(books), "bytes", out, workers=1, val_fraction=0.2))
    assert len(val) + len(train) == 60
    assert not (out / ".partial").exists()
