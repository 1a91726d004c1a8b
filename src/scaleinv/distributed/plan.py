"""Which blocks of keys a rank's queries see, and so what the ranks send to each other.

A block is one segment of queries and one segment of keys. In step s of a ring of R ranks, rank r computes with the keys
of rank r - s and sends its own to rank r + s. A segment that no query of the receiver sees is not sent, and a block
without a visible pair is not computed.
"""

from __future__ import annotations

import dataclasses

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

    def geometry(self, query: Segment, key: Segment) -> Geometry:
        """The relative positions of a block's queries and keys."""
        return Geometry.of(query.length, key.length, query.start - key.start, self.causal, self.window)

    def sees(self, query: Segment, key: Segment) -> bool:
        """Whether any query of one segment sees a key of the other."""
        low, high = self.geometry(query, key).key_range()
        return low < high and self._share(query, Segment(key.start + low, high - low))

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

    def _share(self, query: Segment, key: Segment) -> bool:
        """Whether some document has a query in one segment and a visible key in the other."""
        if self.document_ids is None and self.key_mask is None:
            return True
        reached, kept = slice(query.start, query.stop), slice(key.start, key.stop)
        if self.document_ids is None:
            assert self.key_mask is not None
            return bool(self.key_mask[:, kept].any())
        for row, documents in enumerate(self.document_ids):
            there = documents[kept] if self.key_mask is None else documents[kept][self.key_mask[row, kept]]
            if bool(torch.isin(documents[reached], there).any()):
                return True
        return False


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
