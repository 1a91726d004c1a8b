"""Text to token shards: split by whole documents, tokenise (in parallel), shuffle, write.

A document goes to validation when the hash of its text says so, whatever other documents there are: copies of a text
are on one side, and adding files moves no document across. (Only where a split would be empty it is given the document
nearest to it.) Inside a split documents are ordered by hash, so that the stream mixes topics, and ``end_of_text`` comes
before each.

One pass over the text spools tokens to disk, a second writes the shards in order: memory holds an index of the
documents and one shard, not the corpus.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scaleinv.data.documents import Document, documents, short_name
from scaleinv.data.shards import MAX_COUNT, scan_shard, write_shard
from scaleinv.data.tokenizers import Tokenizer, check_tokenizer, get_tokenizer, identity, load_tokenizer
from scaleinv.files import write_json

META = "meta.json"
"""What the shards of a folder hold."""

_CHUNK = 1 << 20  # characters sent to a worker together


class Placed(NamedTuple):
    """A document and its place in [0, 1]: below val_fraction it is for validation."""

    document: Document
    place: float
    order: bytes


class Entry(NamedTuple):
    """Where a document's tokens lie in the spool."""

    place: float
    order: bytes
    start: int
    size: int


def prepare(
    text: str,
    tokenizer: str,
    out: str | Path,
    *,
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    progress: Callable[[str], None] | None = None,
    val_fraction: float = 0.01,
) -> list[Path]:
    """Tokenise a corpus into shards: ``{name}_val_000000.bin``, ``{name}_train_000001.bin`` … in the folder ``out``.

    The tokenizer is saved beside them, and meta.json, written last, says what they hold. The bytes do not depend on
    ``workers``. Everything stays in ``out/.partial`` until all is done, so a killed run leaves no shard.

    Args:
        text: a corpus, see `scaleinv.data.documents`.
        tokenizer: see `get_tokenizer`; a BPE trains on the training documents alone.
        out: folder to write to; it must hold no shards yet.
        shard_tokens: tokens in each shard except the last of its split.
        workers: processes that tokenise; None for one per core. They are spawned, so a script that uses more than one
            needs ``if __name__ == "__main__":``.
        progress: called with a line of text about once a second.
        val_fraction: share of the documents that goes to validation; 0 for none. Both splits get at least one
            document, and a single document is cut in two at a paragraph.

    Returns:
        The shards, validation first.
    """
    out = Path(out)
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction must lie in [0, 1), got {val_fraction}")
    if not 1 <= shard_tokens <= MAX_COUNT:
        raise ValueError(f"shard_tokens must lie in 1 … {MAX_COUNT}, got {shard_tokens}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be positive, got {workers}")
    check_tokenizer(tokenizer)
    documents(text)  # raises before anything is written if a file or a package is missing
    partial = out / ".partial"
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"out {out} must be a folder that can be written to ({error.strerror})") from error
    try:
        existing = sorted(out.glob("*.bin"))
        if existing:
            raise ValueError(
                f"out must hold no shards yet, {out} has {existing[0].name}; remove them or choose another"
            )
        names = _build(text, tokenizer, partial, shard_tokens, workers or os.cpu_count() or 1, progress, val_fraction)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == META):  # last
            os.replace(path, out / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if is_new and not any(out.iterdir()):  # it failed: leave no empty folder behind
            out.rmdir()
    return [out / name for name in names]


def _build(
    text: str,
    tokenizer_spec: str,
    folder: Path,
    shard_tokens: int,
    workers: int,
    progress: Callable[[str], None] | None,
    val_fraction: float,
) -> list[str]:
    """Fill a folder with shards, tokenizer and meta.json; returns the names of the shards."""
    throttled = _Throttled(progress)

    def training_texts() -> Iterator[str]:
        train = (item.document.text for item in placed(text, val_fraction) if item.place >= val_fraction)
        first = next(train, None)
        if first is None:  # all are below val_fraction: `split_documents` will choose
            return (document.text for document in documents(text))
        return itertools.chain([first], train)

    throttled.now(f"tokenizer {tokenizer_spec}")
    tokenizer = get_tokenizer(tokenizer_spec, training_texts)
    tokenizer.save(folder)
    spool = folder / "spool"
    index: list[Entry] = []
    end_of_text = np.uint16(tokenizer.end_of_text).tobytes()
    with spool.open("wb") as file:
        start = 0
        for item, ids in _encoded(placed(text, val_fraction), tokenizer, folder, workers):
            file.write(end_of_text)
            file.write(ids.tobytes())
            index.append(Entry(item.place, item.order, start, 1 + len(ids)))
            start += 1 + len(ids)
            throttled.maybe(f"tokenised {len(index):,} documents, {start:,} tokens")
    splits = split_documents(index, val_fraction)
    tokens = np.memmap(spool, dtype=np.uint16, mode="r")
    names: list[str] = []
    for split, entries in splits.items():
        for shard in _shards(tokens, entries, shard_tokens):
            names.append(f"{short_name(text)}_{split}_{len(names):06d}.bin")
            write_shard(folder / names[-1], shard)
            throttled.maybe(f"wrote {names[-1]}, {len(shard):,} tokens")
    del tokens
    spool.unlink()
    meta = {
        "text": text,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": identity(str(folder)),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "val_fraction": val_fraction,
        "documents": {split: len(entries) for split, entries in splits.items()},
        "tokens": {split: sum(entry.size for entry in entries) for split, entries in splits.items()},
        "cut": {entry.place for entry in index} == {0.0, 1.0},
        "sha256": {name: scan_shard(folder / name).sha256 for name in names},
    }
    write_json(folder / META, meta)
    summary = f"{len(names)} shards, {start:,} tokens of {len(index):,} documents, {tokenizer.vocab_size:,} ids"
    throttled.now(summary)
    return names


def placed(text: str, val_fraction: float) -> Iterator[Placed]:
    """The documents with their places; a single one is cut in two if there must be a validation split."""
    stream = documents(text)
    first = next(stream)  # there is one: an empty corpus raises
    second = next(stream, None)
    if second is None and val_fraction > 0:
        train, val = _cut(first, val_fraction)
        yield Placed(val, 0.0, b"")
        yield Placed(train, 1.0, b"")
        return
    yield from map(_place, itertools.chain([first], [] if second is None else [second], stream))


def _place(document: Document) -> Placed:
    digest = hashlib.sha256(document.text.encode("utf-8")).digest()
    # The order includes the name, so that copies of a text do not follow one another.
    order = hashlib.sha256(digest + document.name.encode("utf-8")).digest()
    return Placed(document, (int.from_bytes(digest[:6], "big") + 0.5) / 2**48, order)


def _cut(document: Document, val_fraction: float) -> tuple[Document, Document]:
    """Cut a document at the paragraph, line or word that ends nearest before the last ``val_fraction`` of it."""
    name, text = document
    if len(text) < 2:
        raise ValueError(f"data: {name} is the only document, and too short to cut a validation split from")
    wanted = min(max(round(len(text) * (1 - val_fraction)), 1), len(text) - 1)
    for border in ("\n\n", "\n", " "):
        place = text.rfind(border, 0, wanted)
        if place > 0:
            wanted = place + len(border)
            break
    return Document(f"{name} (start)", text[:wanted]), Document(f"{name} (end)", text[wanted:])


def split_documents(index: list[Entry], val_fraction: float) -> dict[str, list[Entry]]:
    """Documents of each split, in order."""
    if val_fraction == 0:
        return {"train": sorted(index, key=lambda entry: entry.order)}
    ranked = sorted(index, key=lambda entry: (entry.place, entry.order))
    held_out = sum(entry.place < val_fraction for entry in ranked)
    held_out = min(max(held_out, 1), len(ranked) - 1)  # neither split is empty
    sides = {"val": ranked[:held_out], "train": ranked[held_out:]}
    return {split: sorted(entries, key=lambda entry: entry.order) for split, entries in sides.items()}


def _shards(tokens: np.ndarray, entries: list[Entry], shard_tokens: int) -> Iterator[np.ndarray]:
    """The entries' tokens in order, cut every ``shard_tokens``."""
    left = sum(entry.size for entry in entries)
    shard, filled = np.empty(min(shard_tokens, left), dtype=np.uint16), 0
    for _, _, start, count in entries:
        while count:
            taken = min(count, len(shard) - filled)
            shard[filled : filled + taken] = tokens[start : start + taken]
            start, count, filled, left = start + taken, count - taken, filled + taken, left - taken
            if filled == len(shard):
                yield shard
                shard, filled = np.empty(min(shard_tokens, left), dtype=np.uint16), 0


def _encoded(
    placed: Iterator[Placed], tokenizer: Tokenizer, folder: Path, workers: int
) -> Iterator[tuple[Placed, np.ndarray]]:
    """Each document with its ids, in the order of the input."""
    if workers == 1:
        yield from ((item, tokenizer.encode(item.document.text)) for item in placed)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(folder,)) as pool:
        pending: deque[tuple[list[Placed], Future[list[np.ndarray]]]] = deque()
        for items in _chunks(placed):
            pending.append((items, pool.submit(_encode_all, [item.document.text for item in items])))
            if len(pending) > 4 * workers:  # hold only as much text as keeps the workers busy
                items, future = pending.popleft()
                yield from zip(items, future.result(), strict=True)
        for items, future in pending:
            yield from zip(items, future.result(), strict=True)


def _chunks(placed: Iterator[Placed]) -> Iterator[list[Placed]]:
    chunk, size = [], 0
    for item in placed:
        chunk.append(item)
        size += len(item.document.text)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


_worker_tokenizer: Tokenizer
"""The tokenizer of a worker process, set once by `_start_worker`."""


def _start_worker(folder: Path) -> None:
    global _worker_tokenizer
    _worker_tokenizer = load_tokenizer(folder)


def _encode_all(texts: list[str]) -> list[np.ndarray]:
    return [_worker_tokenizer.encode(text) for text in texts]


class _Throttled:
    """Progress, at most one line per second."""

    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self.progress, self.last = progress, time.monotonic()

    def maybe(self, line: str) -> None:
        if time.monotonic() - self.last >= 1:
            self.now(line)

    def now(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)
        self.last = time.monotonic()
