"""Packed documents and hidden keys as the kernels read them: small integers, and the span that each position sees.

The spans let the kernels skip blocks that nobody sees. Finding them takes one sort of integers (linear on a GPU) and a
few passes over the positions; nothing waits for the device.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from scaleinv.ops.masks import Geometry, query_documents

NEVER = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class Segments:
    """All int32. A query sees a key where their segments are equal (and the distance is visible)."""

    query: Tensor  # [B, Nq]
    key: Tensor  # [B, Nk], -1 for a hidden key
    first_key: Tensor  # [B, Nq]: the first and the last key of the query's segment
    last_key: Tensor  # [B, Nq]
    first_query: Tensor  # [B, Nk]: the first and the last query of the key's segment
    last_query: Tensor  # [B, Nk]
    hides_keys: bool


def segments(
    document_ids: Tensor | None, key_mask: Tensor | None, geometry: Geometry, query_ids: Tensor | None = None
) -> Segments | None:
    """Segments of a call; None where every query may see every key.

    Args:
        query_ids: documents of the queries ``[B, Nq]`` if their positions are not among the keys.
    """
    if document_ids is not None and query_ids is not None:
        queries, rank = _dense(torch.cat([query_ids, document_ids], 1)).split([geometry.queries, geometry.keys], dim=1)
    elif document_ids is not None:
        rank = _dense(document_ids)
        queries = query_documents(rank, geometry.offset, geometry.queries)
    elif key_mask is not None:
        rank = torch.zeros(key_mask.shape, dtype=torch.int64, device=key_mask.device)
        queries = rank.new_zeros(rank.shape[0], geometry.queries)
    else:
        return None
    documents = geometry.keys if query_ids is None else geometry.queries + geometry.keys
    first_key, last_key = _extent(rank, key_mask, documents)
    first_query, last_query = _extent(queries, None, documents)
    keys = rank if key_mask is None else rank.masked_fill(~key_mask, -1)
    return Segments(
        query=_small(queries),
        key=_small(keys),
        first_key=_small(first_key.gather(1, queries)),
        last_key=_small(last_key.gather(1, queries)),
        first_query=_small(first_query.gather(1, rank)),
        last_query=_small(last_query.gather(1, rank)),
        hides_keys=key_mask is not None,
    )


def _small(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()


def _dense(document_ids: Tensor) -> Tensor:
    """Document numbers 0, 1, … in place of any integers, for each row by itself."""
    ordered, order = document_ids.sort(dim=1, stable=True)
    rank = torch.zeros_like(order)
    rank[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
    return torch.empty_like(order).scatter_(1, order, rank)


def _extent(rank: Tensor, counted: Tensor | None, documents: int) -> tuple[Tensor, Tensor]:
    """First and last position of each document among those counted, ``[B, documents]``: NEVER and -1 for none."""
    position = torch.arange(rank.shape[1], device=rank.device).expand_as(rank)
    first = last = position
    if counted is not None:
        first, last = position.masked_fill(~counted, NEVER), position.masked_fill(~counted, -1)
    empty = rank.new_empty(rank.shape[0], documents)
    return (
        empty.new_full(empty.shape, NEVER).scatter_reduce_(1, rank, first, "amin"),
        empty.new_full(empty.shape, -1).scatter_reduce_(1, rank, last, "amax"),
    )
