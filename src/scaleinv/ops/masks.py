"""Who sees whom: distances, packed documents and hidden keys, in the forms that the backends need."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from scaleinv.logits import LogitTransform

FAR = 1 << 60
"""A distance larger than any that occurs."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Where queries and keys stand, and which distances ``t = position - key`` are visible.

    Query i stands at ``offset + i``, key j at j; j is visible where ``min_distance <= t <= max_distance``.
    """

    queries: int
    keys: int
    offset: int
    min_distance: int
    max_distance: int

    @staticmethod
    def of(queries: int, keys: int, offset: int, causal: bool, window: int | None) -> Geometry:
        max_distance = FAR if window is None else min(window - 1, FAR)
        return Geometry(queries, keys, offset, 0 if causal else -max_distance, max_distance)

    @property
    def last(self) -> int:
        """The largest distance, visible or not."""
        return self.offset + self.queries - 1

    @property
    def first(self) -> int:
        """The smallest distance: negative where a key comes after a query."""
        return self.offset - self.keys + 1

    def table_range(self) -> tuple[int, int]:
        """[start, stop): the visible \\|t\\|, which is what tables must hold; [0, 1) where nothing is visible."""
        low, high = max(self.first, self.min_distance), min(self.last, self.max_distance)
        if low > high:
            return 0, 1
        return max(low, -high, 0), max(high, -low) + 1

    @property
    def hides(self) -> bool:
        """Whether any pair is hidden by its distance."""
        return self.first < self.min_distance or self.last > self.max_distance

    def key_range(self) -> tuple[int, int]:
        """[low, high): the keys that some query sees."""
        high = min(self.keys, self.last - self.min_distance + 1)
        low = max(0, min(self.offset - self.max_distance, high))
        return low, max(low, high)

    def sliced(self, low: int, high: int) -> Geometry:
        """The geometry when only keys [low, high) are kept."""
        return dataclasses.replace(self, keys=high - low, offset=self.offset - low)

    def distances(self, device: torch.device) -> Tensor:
        """t for every pair, ``[Nq, Nk]``."""
        positions = self.offset + torch.arange(self.queries, device=device)
        return positions[:, None] - torch.arange(self.keys, device=device)

    def visible(self, distance: Tensor) -> Tensor:
        """Which distances are visible."""
        return (distance >= self.min_distance) & (distance <= self.max_distance)

    def diagonal_tables(
        self, logits: LogitTransform, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """a and m along the diagonals, ``[heads or 1, Nq + Nk - 1]`` each: entry x holds distance ``last - x``.

        Row i of the logits reads entries ``Nq - 1 - i + key``: contiguous in the key. Hidden diagonals hold a = 0 and
        m = -inf, so the tables are the causal mask and the window too.
        """
        start, stop = self.table_range()
        gain, shift = torch.broadcast_tensors(*distance_tables(logits, self, dtype, device))
        if 0 <= self.first <= self.last and not self.hides:  # a decoding step: every diagonal occurs once
            return gain.flip(1).contiguous(), shift.flip(1).contiguous()
        distance = self.last - torch.arange(max(self.queries + self.keys - 1, 0), device=device)
        index = (distance.abs() - start).clamp(0, stop - start - 1)
        gain, shift = gain.index_select(1, index), shift.index_select(1, index)
        if self.hides:
            hidden = ~self.visible(distance)
            gain, shift = gain.masked_fill(hidden, 0.0), shift.masked_fill(hidden, -torch.inf)
        return gain, shift


def distance_tables(
    logits: LogitTransform, geometry: Geometry, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """a and m at the distances of ``geometry.table_range()``; ValueError unless the transform keeps to its shapes.

    A kernel reads these by address, so a transform of a user's own must not be trusted.
    """
    start, stop = geometry.table_range()
    gain, shift = logits.table_range(start, stop, dtype=dtype, device=device)
    for name, table in (("gain", gain), ("shift", shift)):
        fits = table.dim() == 2 and table.shape[1] == stop - start
        if not fits or (table.shape[0] != 1 and table.shape[0] != logits.heads):
            raise ValueError(
                f"logits ({type(logits).__name__}, heads={logits.heads}) must give a {name} of shape [heads or 1, "
                f"{stop - start}] for distances {start} … {stop - 1}, got {list(table.shape)}"
            )
    return gain, shift


def query_documents(document_ids: Tensor, offset: int, queries: int) -> Tensor:
    """The queries' part of ``document_ids [B, Nk]``: ``[B, Nq]``."""
    return document_ids[:, offset : offset + queries]


def pair_mask(geometry: Geometry, document_ids: Tensor | None, key_mask: Tensor | None, device: torch.device) -> Tensor:
    """What each query sees, bool ``[B or 1, 1, Nq, Nk]``: the plain form, quadratic in memory."""
    mask = geometry.visible(geometry.distances(device))[None]
    if document_ids is not None:
        own = query_documents(document_ids, geometry.offset, geometry.queries)
        mask = mask & (own[:, :, None] == document_ids[:, None, :])
    if key_mask is not None:
        mask = mask & key_mask[:, None, :]
    return mask[:, None]


def visible_counts(
    geometry: Geometry, document_ids: Tensor | None, key_mask: Tensor | None, device: torch.device
) -> Tensor:
    """How many keys each query sees, int64 ``[B or 1, Nq]``, in O(N log N)."""
    keys = geometry.keys
    position = geometry.offset + torch.arange(geometry.queries, device=device)
    low = (position - geometry.max_distance).clamp(0, keys)[None]  # keys [low, high) lie at visible distances
    high = (position - geometry.min_distance + 1).clamp(0, keys)[None]
    if document_ids is None and key_mask is None:
        return (high - low).clamp_min(0)
    if document_ids is None:
        assert key_mask is not None
        until = F.pad(key_mask.to(torch.int64).cumsum(1), (1, 0))  # visible keys before each place
        rows = until.shape[0]
        count = until.gather(1, high.expand(rows, -1)) - until.gather(1, low.expand(rows, -1))
        return count.clamp_min(0)
    # Keys sorted by (document, place): those of one document in [low, high) are one run, found by bisection.
    document_ids = document_ids.to(torch.int64)  # torch cannot gather every integer type
    order = document_ids.argsort(dim=1, stable=True)
    documents = document_ids.gather(1, order)
    rank = torch.cat([torch.zeros_like(documents[:, :1], dtype=torch.int64), documents.diff(dim=1).ne(0).cumsum(1)], 1)
    place = torch.empty_like(rank).scatter_(1, order, rank)  # dense document number of each key
    own = query_documents(place, geometry.offset, geometry.queries)
    codes = rank * (keys + 1) + order
    seen = torch.ones_like(order) if key_mask is None else key_mask.to(torch.int64).gather(1, order)
    until = F.pad(seen.cumsum(1), (1, 0))
    start = torch.searchsorted(codes, (own * (keys + 1) + low).contiguous())
    stop = torch.searchsorted(codes, (own * (keys + 1) + high).contiguous())
    return (until.gather(1, stop) - until.gather(1, start)).clamp_min(0)
