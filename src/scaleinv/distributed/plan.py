"""Which blocks of keys a rank's queries see, and so what the ranks send to each other.

A block is one segment of queries and one segment of keys. In step s of a ring of R ranks, rank r computes with the keys
of rank r - s and sends its own to rank r + s. A segment that no query of the receiver sees is not sent, and a block
without a visible pair is not computed.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from scaleinv.distributed.layout import Segment, Split
from scaleinv.ops.masks import Geometry


@dataclasses.dataclass(frozen=True)
class Plan:
    """The blocks of one call. All ranks make the same plan from the same arguments.

    Args:
        split: who holds which positions.
        causal, window: as in `scaleinv.attention`.
        document_ids: of the whole sequence, ``[B, N]``; None if there is only one document.
        key_mask: of the whole sequence, ``[B, N]``; None if every key is visible.
    """

    split: Split
    causal: bool
    window: int | None
    document_ids: Tensor | None = None
    key_mask: Tensor | None = None
    _seen: dict[tuple[Segment, Segment], bool] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def geometry(self, query: Segment, key: Segment) -> Geometry:
        """The relative positions of a block's queries and keys."""
        return Geometry.of(query.length, key.length, query.start - key.start, self.causal, self.window)

    def sees(self, query: Segment, key: Segment) -> bool:
        """Whether any query of one segment sees a key of the other."""
        if (query, key) not in self._seen:
            low, high = self.geometry(query, key).key_range()
            hidden = self.document_ids is not None or self.key_mask is not None
            self._seen[query, key] = low < high and (not hidden or self._share(query, key))
        return self._seen[query, key]

    def needed(self, rank: int, owner: int) -> tuple[Segment, ...]:
        """The segments of ``owner`` that the queries of ``rank`` see."""
        own = self.split.segments(rank)
        return tuple(key for key in self.split.segments(owner) if any(self.sees(query, key) for query in own))

    def pairs(self, rank: int) -> int:
        """How many (query, key) pairs a rank computes by position: its work. Documents and masks do not count."""
        total = 0
        for query in self.split.segments(rank):
            for owner in range(self.split.ranks):
                for key in self.split.segments(owner):
                    total += _visible_pairs(self.geometry(query, key))
        return total

    @functools.cached_property
    def _codes(self) -> tuple[Tensor, Tensor]:
        """Documents as numbers, other ones in every row, and which keys are visible: ``[B, N]``, on the CPU."""
        given = self.document_ids if self.key_mask is None else self.key_mask
        assert given is not None
        ids = torch.zeros(given.shape, dtype=torch.int64) if self.document_ids is None else self.document_ids.cpu()
        numbers = torch.unique(ids, return_inverse=True)[1]
        numbers = numbers + (numbers.max() + 1) * torch.arange(len(ids))[:, None] if ids.numel() else numbers
        visible = torch.ones(given.shape, dtype=torch.bool) if self.key_mask is None else self.key_mask.cpu()
        return numbers, visible

    def _share(self, query: Segment, key: Segment) -> bool:
        """Whether a query sees a key of its own document, at a visible distance and not masked."""
        documents, visible = self._codes
        own, there = documents[:, query.start : query.stop], documents[:, key.start : key.stop]
        mask = visible[:, key.start : key.stop]
        where = self.geometry(query, key)
        if where.visible(torch.tensor(where.offset - key.length + 1)) and bool(
            (own[:, 0] == there[:, -1])[mask[:, -1]].any()
        ):
            return True  # the first query and the last key: enough for most segments of a long document
        position = where.offset + torch.arange(query.length)
        low = (position - where.max_distance).clamp(0, key.length)
        high = (position - where.min_distance + 1).clamp(0, key.length)
        size = key.length + 1  # keys sorted by (document, place): those that a query sees are one run
        places = (there * size + torch.arange(key.length))[mask].sort().values
        first, past = (torch.searchsorted(places, (own * size + end).contiguous()) for end in (low, high))
        return bool((first < past).any())


def _visible_pairs(geometry: Geometry) -> int:
    """Pairs at a visible distance, in closed form: distance t occurs on a diagonal of the block."""
    low, high = max(geometry.first, geometry.min_distance), min(geometry.last, geometry.max_distance)
    if low > high:
        return 0
    return _diagonals(geometry, high) - _diagonals(geometry, low - 1)


def _diagonals(geometry: Geometry, distance: int) -> int:
    """Pairs at distances up to ``distance``: the sum of min(growing, shorter side, shrinking) over the diagonals."""
    count = distance - geometry.first + 1  # diagonals from the corner on
    short, long = sorted((geometry.queries, geometry.keys))
    whole = geometry.queries * geometry.keys
    if count <= short:
        return count * (count + 1) // 2
    if count <= long:
        return short * (short + 1) // 2 + (count - short) * short
    left = short + long - 1 - count
    return whole - left * (left + 1) // 2
