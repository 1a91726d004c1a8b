"""Token shards: the .bin format of llm.c and of the FineWeb shards of modded-nanogpt.

    256 int32   header: magic 20240520, version 1, count, zeros
    count uint16   tokens

Little-endian throughout. A shard is written whole or not at all, and read through a memory map.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scaleinv.files import UnreadableFile, read_object, write_atomically, write_json

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
MAX_COUNT = 2**31 - 1
"""The header holds the count as an int32."""

_ADVICE = "download it or make it again"
_CHUNK = 1 << 24  # tokens checked at a time: 32 MB


class Scan(NamedTuple):
    """What one pass over a shard's tokens finds."""

    total: int
    highest: int
    sha256: str

    def fits(self, total: int) -> bool:
        """Whether this can be a scan of so many tokens."""
        return (
            (type(self.total), type(self.highest), type(self.sha256)) == (int, int, str)
            and self.total == total
            and 0 <= self.highest <= 0xFFFF
            and re.fullmatch("[0-9a-f]{64}", self.sha256) is not None
        )


def write_shard(path: str | Path, tokens: np.ndarray) -> None:
    """Write ``tokens [n]``, integers in 0 … 65,535, as a shard; a crash leaves either the old file or the new one."""
    if tokens.ndim != 1 or not 0 < tokens.size <= MAX_COUNT or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens must be 1 to {MAX_COUNT} integers, got {tokens.dtype} of shape {tokens.shape}")
    if tokens.dtype != np.uint16 and not 0 <= tokens.min() <= tokens.max() <= 0xFFFF:
        raise ValueError(f"tokens must lie in 0 … 65535, got {tokens.min()} … {tokens.max()}")
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    write_atomically(path, header.tobytes(), np.ascontiguousarray(tokens, dtype="<u2").data)


def open_shard(path: str | Path, vocab_size: int | None = None) -> np.ndarray:
    """The tokens of a shard, uint16 ``[count]``, memory-mapped and read-only.

    Magic, version, count and file size are checked. ``vocab_size`` also checks every token, which reads the whole file.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe could wait forever
            raise UnreadableFile(path, "is not a regular file")
        with path.open("rb") as file:
            header = np.frombuffer(file.read(HEADER_BYTES), dtype=np.uint8)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UnreadableFile(path, f"cannot be read ({error.strerror})") from error
    if header.size < HEADER_BYTES:
        raise UnreadableFile(path, f"has {size} bytes, fewer than the header of {HEADER_BYTES}", _ADVICE)
    magic, version, count = (int(field) for field in header.view("<i4")[:3])
    if magic != MAGIC:
        raise UnreadableFile(path, f"is not a token shard: its magic number is {magic}, not {MAGIC}")
    if version != VERSION:
        raise UnreadableFile(path, f"has format version {version}, not {VERSION} (uint16 tokens)")
    if count < 1:
        raise UnreadableFile(path, f"has a header that says {count} tokens", _ADVICE)
    if size != HEADER_BYTES + 2 * count:
        wrong, whole = "truncated" if size < HEADER_BYTES + 2 * count else "too long", HEADER_BYTES + 2 * count
        raise UnreadableFile(path, f"is {wrong}: {size} bytes where {count} tokens make {whole}", _ADVICE)
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))
    if vocab_size is not None:
        for start, chunk in _chunks(tokens):
            bad = np.flatnonzero(chunk >= vocab_size)
            if bad.size:
                place, token = start + int(bad[0]), int(chunk[bad[0]])
                raise UnreadableFile(path, f"has token {token} at {place}, outside the vocabulary of {vocab_size}")
    return tokens


def scan_shard(path: str | Path, cache: Path | None = None) -> Scan:
    """Validate a shard and read it once: count, highest token, and sha256 of the tokens.

    The result is remembered in the folder ``cache`` as long as the file's size and time stay the same.
    """
    path = Path(path)
    tokens = open_shard(path)
    known = path.stat()
    key = hashlib.sha256(f"{path.resolve()}\0{known.st_size}\0{known.st_mtime_ns}".encode()).hexdigest()
    memory = cache / f"{key}.json" if cache is not None else None
    if memory is not None:
        # If what was remembered is missing or damaged, the shard is read once more.
        with contextlib.suppress(ValueError, TypeError):
            remembered = Scan(**read_object(memory))
            if remembered.fits(len(tokens)):
                return remembered
    digest, highest = hashlib.sha256(), 0
    for _, chunk in _chunks(tokens):
        digest.update(np.ascontiguousarray(chunk).data)
        highest = max(highest, int(chunk.max()))
    scan = Scan(len(tokens), highest, digest.hexdigest())
    if memory is not None:
        with contextlib.suppress(OSError):
            write_json(memory, scan._asdict())
    return scan


def _chunks(tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(tokens), _CHUNK):
        yield start, tokens[start : start + _CHUNK]
