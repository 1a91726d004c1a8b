"""Tokens for training and validation: shards read as one stream, and cut into sequences.

`load_corpus` makes a `Corpus` of two `TokenData` from any text or shards.

The batch of a step is a function of the step alone, whatever the number of ranks, so that a resumed run needs nothing
but its step.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scaleinv.data.corpora import find_files, fingerprint, split_spec
from scaleinv.data.prepare import prepare
from scaleinv.data.shards import open_shard, scan_shard
from scaleinv.data.tokenizers import Tokenizer, get_tokenizer, identity
from scaleinv.machine import cache_folder

_EPOCH_SHIFT = 0.6180339887  # of a window; the golden ratio keeps the offsets of successive epochs apart
_FORMAT = 1  # of the cache; a change of what prepare writes makes it 2
_OPEN_SHARDS = 16  # mapped at a time: FineWeb 100B has more shards than a process may have open files


class TokenData:
    """One split: shards read as one long stream of tokens.

    Every shard is validated, read once and hashed when this is made; with ``cache`` that is remembered.

    Args:
        paths: the shards, in order.
        end_of_text: the id before each document.
        vocab_size: a token of this or more raises ValueError.
        cache: folder for what is known of the shards.
    """

    def __init__(
        self, paths: Sequence[Path], end_of_text: int, *, vocab_size: int | None = None, cache: Path | None = None
    ) -> None:
        if not paths:
            raise ValueError("paths must name at least one shard, got none")
        self.paths = [Path(path) for path in paths]
        self.end_of_text = end_of_text
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            scans = list(pool.map(lambda path: scan_shard(path, cache), self.paths))
        for path, scan in zip(self.paths, scans, strict=True):
            if vocab_size is not None and scan.highest >= vocab_size:
                open_shard(path, vocab_size)  # raises, and says where
        self._starts = [0, *itertools.accumulate(scan.total for scan in scans)]
        self.total = self._starts[-1]
        """Tokens in all shards."""
        self.sha256 = _combined(scan.sha256 for scan in scans)
        """sha256 over the sha256 of each shard's tokens."""
        self._open = lru_cache(maxsize=_OPEN_SHARDS)(open_shard)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start … start + count - 1, uint16, across the borders of shards."""
        if start < 0 or count < 0 or start + count > self.total:
            raise ValueError(f"start and count must lie inside {self.total} tokens, got {start} and {count}")
        out = np.empty(count, dtype=np.uint16)
        filled = 0
        shard = bisect.bisect_right(self._starts, start) - 1
        while filled < count:
            offset = start + filled - self._starts[shard]
            piece = self._open(self.paths[shard])[offset : offset + count - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
        return out

    def batch(self, step: int, batch: int, length: int, *, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, int64 ``[batch / world, length]``; targets are the inputs one token later.

        Sequence s of step n is number ``n * batch + s`` of one fixed order, and rank r takes rows ``r * batch / world``
        onwards. The order cuts the stream into ``(total - 1) // length`` windows, then starts again: each epoch's
        windows begin 0.618 of a window later than the last one's, and the last may run on into the stream's beginning.
        """
        if step < 0 or batch < 1 or not 0 <= rank < world or batch % world:
            raise ValueError(
                "step must not be negative, batch a positive multiple of world, and rank in 0 … world - 1, "
                f"got step {step}, batch {batch}, rank {rank}, world {world}"
            )
        self._check_length(length)
        rows = batch // world
        first = step * batch + rank * rows
        out = np.empty((rows, length + 1), dtype=np.int64)
        for row in range(rows):
            epoch, window = divmod(first + row, (self.total - 1) // length)
            start = window * length + round(epoch * _EPOCH_SHIFT * length) % length
            head = min(length + 1, self.total - start)
            out[row, :head] = self.read(start, head)
            out[row, head:] = self.read(0, length + 1 - head)
        return _shifted(torch.from_numpy(out))

    def windows(self, length: int, limit: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of consecutive windows, int64 ``[length]`` each, for validation.

        Args:
            length: tokens in a window.
            limit: tokens in all windows, a multiple of ``length`` below ``total``; None for as many as fit. With the
                same limit the targets are tokens 1 … limit at every length.
        """
        self._check_length(length)
        if limit is None:
            limit = (self.total - 1) // length * length
        if not 0 < limit < self.total or limit % length:
            raise ValueError(f"limit must be a multiple of length {length} and below {self.total}, got {limit}")
        return (
            _shifted(torch.from_numpy(self.read(start, length + 1).astype(np.int64)))
            for start in range(0, limit, length)
        )

    def _check_length(self, length: int) -> None:
        if not 1 <= length < self.total:
            raise ValueError(
                f"length must lie in 1 … {self.total - 1}, one less than the tokens there are, got {length}"
            )

    def __repr__(self) -> str:
        return f"TokenData({self.total:,} tokens in {len(self.paths)} shards)"


@dataclass
class Corpus:
    """Training and validation tokens, and what they mean."""

    train: TokenData
    val: TokenData
    tokenizer: Tokenizer
    vocab_size: int
    """Ids that may occur: the tokenizer's, or what `load_corpus` was told."""
    sha256: str
    description: str


def load_corpus(
    data: str,
    val_data: str | None = None,
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    val_fraction: float = 0.1,
    cache: Path | None = None,
    min_length: int = 0,
) -> Corpus:
    """Training and validation tokens from text or shards.

    Text is tokenised once, into a folder of ``cache`` that is used again while the files' names, sizes and times stay
    the same; a Hugging Face dataset is kept for good. Several processes may do so at once.

    Args:
        data: a corpus of text (see `scaleinv.data.corpora`); or shards: a glob, a folder or a comma-separated list.
        val_data: the same for validation. Without it text is split by whole documents (see `scaleinv.data.prepare`),
            and of shards those called ``…_val_<number>.bin`` are held out, or else the last.
        tokenizer: see `get_tokenizer`. None means bytes for text; for shards the tokenizer saved beside them, or else
            GPT-2's, as in llm.c.
        vocab_size: ids that the model has, at least the tokenizer's; None for the tokenizer's.
        val_fraction: share of the documents held out, where there is no ``val_data``.
        cache: folder; ``data`` in `scaleinv.machine.cache_folder` unless given.
        min_length: the longest window wanted; a split of fewer than ``min_length + 1`` tokens raises ValueError.
    """
    cache = cache_folder() / "data" if cache is None else Path(cache)
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction must lie between 0 and 1, got {val_fraction}")
    shards = _shard_paths(data)
    if shards is None:
        folder = _prepared(data, tokenizer or "bytes", 0.0 if val_data else val_fraction, cache)
        made = sorted(folder.glob("*.bin"))
        train, val = [path for path in made if not _is_val(path)], [path for path in made if _is_val(path)]
        tokenizer = str(folder)
        cut = json.loads((folder / "meta.json").read_text())["cut"]
        note = "one document, cut in two for validation" if cut else ""
    else:
        train, val = (shards, []) if val_data else _held_out(data, shards)
        tokenizer = tokenizer or _tokenizer_beside(train[0])
        note = f"validation on {', '.join(path.name for path in val)}" if val else ""
    if val_data:
        val = _shard_paths(val_data) or sorted(_prepared(val_data, tokenizer, 0.0, cache).glob("*.bin"))
        note = f"validation on {val_data}"
        for path in {path.resolve() for path in train} & {path.resolve() for path in val}:
            raise ValueError(f"val_data {val_data!r} must hold no shard of data, got {path}")
    meaning = get_tokenizer(tokenizer)
    vocabulary = meaning.vocab_size if vocab_size is None else vocab_size
    if vocabulary < meaning.vocab_size:
        raise ValueError(
            f"vocab_size must be at least {meaning.vocab_size}, the {meaning.name} tokenizer's, got {vocabulary}"
        )
    splits = [
        TokenData(paths, meaning.end_of_text, vocab_size=vocabulary, cache=cache / "scans") for paths in (train, val)
    ]
    for name, source, split in zip(("train", "validation"), (data, val_data or data), splits, strict=True):
        if split.total < min_length + 1:
            raise ValueError(
                f"data {source!r}: the {name} split has {split.total:,} tokens, shorter than one window: "
                f"length {min_length:,} needs {min_length + 1:,}"
            )
    counts = f"{splits[0].total:,} {meaning.name} tokens to train on, {splits[1].total:,} to validate"
    return Corpus(
        train=splits[0],
        val=splits[1],
        tokenizer=meaning,
        vocab_size=vocabulary,
        sha256=_combined(split.sha256 for split in splits),
        description=f"{data}: {counts}" + (f"; {note}" if note else ""),
    )


def document_ids(tokens: Tensor, end_of_text: int) -> Tensor:
    """Which document each token of ``tokens [B, N]`` belongs to, int32 ``[B, N]``, for packed document masks.

    Counts ``end_of_text``, which begins a document; 0 is what was cut off by the start of the row.

    >>> document_ids(torch.tensor([[7, 9, 5, 5, 9, 6]]), end_of_text=9).tolist()
    [[0, 1, 1, 1, 2, 2]]
    """
    return (tokens == end_of_text).cumsum(-1, dtype=torch.int32)


def _shard_paths(spec: str) -> list[Path] | None:
    """The shards that a spec names, in its order; None where it names text."""
    shards: list[Path] = []
    text: list[str] = []
    for part in split_spec(spec):
        found = find_files(part)
        if not found and part.endswith(".bin"):
            raise ValueError(f"data {part!r} matches no file")
        if len(found) == 1 and found[0].is_dir():
            found = sorted(found[0].glob("*.bin"))
        bins = [path for path in found if path.suffix == ".bin"]
        shards += bins
        if not bins or len(bins) < len(found):
            text.append(part)
    if shards and text:
        raise ValueError(f"data {spec!r} must be token shards or text, not both; {text[0]!r} has no or not only shards")
    return list(dict.fromkeys(shards)) or None


def _is_val(path: Path) -> bool:
    return re.fullmatch(r".*_val_\d+", path.stem) is not None


def _held_out(data: str, shards: list[Path]) -> tuple[list[Path], list[Path]]:
    """Shards to train on and to validate on: those called so, or else the last."""
    val = [path for path in shards if _is_val(path)] or shards[-1:]
    train = [path for path in shards if path not in val]
    if not train:
        raise ValueError(f"data {data!r}: val_data must be given, for here is nothing but {val[0].name}")
    return train, val


def _tokenizer_beside(shard: Path) -> str:
    return str(shard.parent) if (shard.parent / "tokenizer.json").exists() else "gpt2"


def _prepared(text: str, tokenizer: str, val_fraction: float, cache: Path) -> Path:
    """The folder of ``cache`` with the shards of a text, made if it is not there."""
    key = json.dumps([_FORMAT, text, fingerprint(text), identity(tokenizer), val_fraction])
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
    if folder.is_dir():
        return folder
    temporary = cache / f".making-{uuid.uuid4().hex}"
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"cache {cache} must be a folder that can be written to ({error.strerror})") from error
    try:
        prepare(text, tokenizer, temporary, workers=1, val_fraction=val_fraction)
        try:
            os.rename(temporary, folder)
        except OSError:  # another process was first, and made the same
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _combined(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _shifted(tokens: Tensor) -> tuple[Tensor, Tensor]:
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
