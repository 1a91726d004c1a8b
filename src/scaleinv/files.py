"""Files: written whole or not at all, read with an error that names them.

Everything that the package writes goes through here, and every JSON file that it reads.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import logging
import math
import os
import re
import socket
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from scaleinv.version import VERSION

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""The file of `locked`."""


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path to write to: it replaces ``path`` when the body ends, and is deleted if the body fails.

    The temporary name ends like ``path``, for libraries that go by the suffix. Missing folders are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}.{path.name}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # on a full disk the error names no file, and the temporary name would tell nothing
        if error.errno is None or error.filename not in (None, str(temporary), temporary):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(*folders: str | Path) -> None:
    """Delete temporary files that a killed program left in folders. Only their writer may call this: see `locked`."""
    for folder in folders:
        for path in Path(folder).glob(".*"):
            if re.fullmatch(r"\.[0-9a-f]{32}\..+", path.name):
                path.unlink(missing_ok=True)


class FolderInUse(RuntimeError):
    """Another process writes to a folder."""


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Hold a folder as its only writer; FolderInUse if another process, or another part of this one, holds it.

    The lock ends with its process, however that ends. It also holds over a network if the file system supports `flock`
    there (NFS does). Where the system has no such locks, a warning says so and the body runs without one.
    """
    folder = Path(folder)
    path = folder / LOCK
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("a+"))
        while _take(file, folder) and not _is_still(file, path):  # the writer before us removed it after we opened it
            file = stack.enter_context(path.open("a+"))
        stack.callback(path.unlink, missing_ok=True)  # runs before the files are closed
        with contextlib.suppress(OSError):  # on a full disk the note is missing, but the lock holds
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def _is_still(file: IO[str], path: Path) -> bool:
    """Is the open file the one that the path names?"""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _take(file: IO[str], folder: Path) -> bool:
    """Lock an open file; False where the file system cannot."""
    try:
        if fcntl is None:
            raise OSError("this system has no flock")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).strip() or "another process"
        raise FolderInUse(f"{folder} is in use by {holder}: wait until it has ended, or end it") from None
    except OSError as error:
        logger.warning(
            "%s cannot be locked (%s): make sure that no other process writes to it", folder, error.strerror or error
        )
        return False


def write_atomically(path: str | Path, *parts: bytes | memoryview) -> None:
    """Write the parts to a file that appears under its name only when it is whole and on disk."""
    with replacing(path) as temporary, temporary.open("xb") as file:
        for part in parts:
            file.write(part)


def write_text(path: str | Path, text: str) -> None:
    """`write_atomically` for text, as UTF-8."""
    write_atomically(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """`write_atomically` for a JSON document. Infinities and NaN become null, because JSON has neither."""
    write_text(path, json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_csv(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """`write_atomically` for a table with a header; the first row has all columns."""
    rows = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_data(folder: str | Path, name: str, rows: Iterable[Mapping[str, Any]], content: Any) -> list[Path]:
    """Write ``{name}.csv`` from rows and ``{name}.json`` from a mapping or a dataclass; returns their paths.

    The JSON document also holds the name and the version of this package.
    """
    table, document = Path(folder) / f"{name}.csv", Path(folder) / f"{name}.json"
    write_csv(table, rows)
    write_json(document, {"name": name, "version": VERSION, **_plain(content)})
    return [table, document]


def read_json(path: str | Path, advice: str = "") -> Any:
    """The content of a JSON file.

    If the file is missing, unreadable or damaged, raises ValueError that names it and ends with ``advice``: what the
    user can do ("`scaleinv compare` writes it").
    """
    try:
        return json.loads(_text(path, advice))
    except UnreadableFile:
        raise
    except _NO_JSON as error:
        raise UnreadableFile(path, f"is not JSON: {error}", advice) from error


def read_object(path: str | Path, advice: str = "") -> dict[str, Any]:
    """`read_json` of a file that holds a JSON object."""
    value = read_json(path, advice)
    if not isinstance(value, dict):
        raise UnreadableFile(path, f"must hold a JSON object, got {value!r:.60}", advice)
    return value


def read_lines(path: str | Path, advice: str = "") -> list[dict[str, Any]]:
    """The objects of a JSON Lines file, one for each line.

    A last line without a newline, which a killed program left half written, is skipped. Any other damaged line raises
    ValueError that names the file and the line.
    """
    *lines, unfinished = _text(path, advice).split("\n")
    found = []
    for number, line in enumerate([*lines, unfinished], start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except _NO_JSON as error:
            if number > len(lines):
                break
            raise UnreadableFile(path, f"line {number} is not JSON: {error}", advice) from error
        if not isinstance(value, dict):
            raise UnreadableFile(path, f"line {number} must hold a JSON object, got {value!r:.60}", advice)
        found.append(value)
    return found


class UnreadableFile(ValueError):
    """A file that is missing or damaged: the message names it and says what to do."""

    def __init__(self, path: str | Path, problem: str, advice: str = "") -> None:
        super().__init__(f"{path} {problem}" + (f"; {advice}" if advice else ""))
        self.path = Path(path)


_NO_JSON = (ValueError, RecursionError)  # the latter where it is nested too deeply


def check_regular(path: str | Path, advice: str = "") -> None:
    """UnreadableFile unless a path is a regular file: a pipe would be waited for, and a device may never end."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise UnreadableFile(path, "is not a regular file", advice)
    except FileNotFoundError as error:
        raise UnreadableFile(path, "is missing", advice) from error
    except OSError as error:
        raise UnreadableFile(path, f"cannot be read ({error.strerror})", advice) from error


def _text(path: str | Path, advice: str) -> str:
    check_regular(path, advice)
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UnreadableFile(path, f"cannot be read ({error.strerror})", advice) from error
    except UnicodeDecodeError as error:
        raise UnreadableFile(path, f"is not UTF-8 (byte {error.start})", advice) from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
