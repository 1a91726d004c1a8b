"""Tokens for training and validation: shards read as one stream, and cut into sequences.

The batch of a step depends only on the step and the seed, whatever the number of ranks and shards, so a resumed run
needs only its step.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from scaleinv.data.order import shuffled
from scaleinv.data.shards import open_shard, scan_shard

_EPOCH_SHIFT = 0.6180339887  # of a window; the golden ratio keeps the offsets of successive epochs apart
_OPEN_SHARDS = 16  # mapped at a time: FineWeb 100B has more shards than a process may have open files


class TokenData:
    """One split: shards read as one long stream of tokens.

    The constructor validates, reads and hashes every shard; with ``cache`` the result is remembered.

    Args:
        paths: the shards, in order.
        end_of_text: the id before each document.
        vocab_size: tokens must be below it, or ValueError is raised.
        cache: folder for what is known about the shards.
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
        self.hashes = [scan.sha256 for scan in scans]
        """sha256 of each shard's tokens."""
        self.sha256 = combined_hash(self.hashes)
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

    def batch(
        self,
        step: int,
        batch: int,
        length: int,
        *,
        rank: int = 0,
        world: int = 1,
        order: Literal["random", "sequential"] = "random",
        seed: int = 0,
        runs: Sequence[tuple[int, int]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, int64 ``[batch / world, length]``; targets are the inputs one token later.

        Each epoch cuts the stream into ``(total - 1) // length`` windows and reads each of them once. Its windows begin
        0.618 of a window later than those of the epoch before, and the last window may continue at the stream's
        beginning. Row s of step n is window ``n * batch + s``, counted through all epochs, and rank r takes rows from
        ``r * batch / world`` on.

        Args:
            order: "random" for a new order in every epoch, or "sequential" for the order of the stream.
            seed: of the random order.
            runs: (start, length) of the parts of each window to read, one after another; None for all of it. Ranks
                that share a sequence read only their own part.
        """
        if step < 0 or batch < 1 or not 0 <= rank < world or batch % world:
            raise ValueError(
                "step must not be negative, batch a positive multiple of world, and rank in 0 … world - 1, "
                f"got step {step}, batch {batch}, rank {rank}, world {world}"
            )
        if order not in ("random", "sequential"):
            raise ValueError(f"order must be 'random' or 'sequential', got {order!r}")
        self._check_length(length)
        rows = batch // world
        first = step * batch + rank * rows
        windows = (self.total - 1) // length
        runs = [(0, length)] if runs is None else runs
        pairs = []
        for row in range(rows):
            epoch, window = divmod(first + row, windows)
            if order == "random":
                window = shuffled(window, windows, seed, epoch)
            start = window * length + round(epoch * _EPOCH_SHIFT * length) % length
            pairs.append(self._window(start, runs))
        inputs, targets = (torch.stack(x) for x in zip(*pairs, strict=True))
        return inputs, targets

    def _window(self, start: int, runs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of runs of the window at ``start``; past its end the stream starts again."""
        parts = []
        for offset, count in runs:
            begin = (start + offset) % self.total
            head = min(count + 1, self.total - begin)
            text = np.concatenate([self.read(begin, head), self.read(0, count + 1 - head)])
            parts.append(_shifted(torch.from_numpy(text.astype(np.int64))))
        inputs, targets = (torch.cat(x) for x in zip(*parts, strict=True))
        return inputs, targets

    def windows(
        self, length: int, limit: int | None = None, runs: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of consecutive windows, int64 ``[length]`` each, for validation.

        Args:
            length: tokens in a window.
            limit: tokens in all windows, a multiple of ``length`` below ``total``; None for as many as fit. The same
                limit gives the same targets, tokens 1 … limit, at every length.
            runs: as in `batch`.
        """
        self._check_length(length)
        if limit is None:
            limit = (self.total - 1) // length * length
        if not 0 < limit < self.total or limit % length:
            raise ValueError(f"limit must be a multiple of length {length} and below {self.total}, got {limit}")
        wanted = [(0, length)] if runs is None else runs
        return (self._window(start, wanted) for start in range(0, limit, length))

    def _check_length(self, length: int) -> None:
        if not 1 <= length < self.total:
            raise ValueError(
                f"length must lie in 1 … {self.total - 1}, one less than the number of tokens, got {length}"
            )

    def __repr__(self) -> str:
        return f"TokenData({self.total:,} tokens in {len(self.paths)} shards)"


def document_ids(tokens: Tensor, end_of_text: int) -> Tensor:
    """Which document each token of ``tokens [B, N]`` belongs to, int32 ``[B, N]``, for packed document masks.

    Counts ``end_of_text``, which begins a document. 0 is the document whose beginning the window cut off.

    >>> document_ids(torch.tensor([[7, 9, 5, 5, 9, 6]]), end_of_text=9).tolist()
    [[0, 1, 1, 1, 2, 2]]
    """
    return (tokens == end_of_text).cumsum(-1, dtype=torch.int32)


def combined_hash(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _shifted(tokens: Tensor) -> tuple[Tensor, Tensor]:
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
