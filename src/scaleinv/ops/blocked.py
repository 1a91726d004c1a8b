"""The blocked algorithm in plain torch: memory linear in N, any device, any dtype, forward and backward.

Queries are taken in blocks, last row first. In that order a block's tables of a and m are Hankel matrices: entry (row,
key) depends on row + key alone, so both are zero-copy views of the 1-D diagonal tables, and one `addcmul` applies them
together with the causal mask and the window. Its compiled twin is kernel.c.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scaleinv.ops.masks import Geometry, query_documents

BLOCK = 128
"""Queries in a block: the fastest of 64, 128, 256 on a CPU with 512 KiB of L2."""

MAX_SCORES = 1 << 25
"""Scores held at once; longer contexts take fewer queries at a time."""


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table_scale: Tensor,
    table_shift: Tensor,
    document_ids: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    geometry: Geometry,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Nq, Dv]`` and logsumexp ``[B, H, Nq]``, both in float32 at least, from diagonal tables.

    The output is for the caller to round: the backward needs it whole, or the gradients of the tables lose digits.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(dtype) * scale, *_visible_only(key.to(dtype), value.to(dtype), key_mask)
    out = q.new_zeros(*query.shape[:3], value.shape[3])
    lse = q.new_full(query.shape[:3], -torch.inf)
    for rows, keys in _blocks(geometry, query.shape[0] * query.shape[1]):
        logits = _scores(_reversed(q, rows, key.shape[1]), k[:, :, keys])
        a, m = _tables(logits, table_scale, table_shift, geometry, rows, keys)
        logits = torch.addcmul(m, logits, a)
        _hide(logits, geometry, document_ids, key_mask, rows, keys)
        total = torch.logsumexp(logits, dim=-1, keepdim=True)  # [B, KV, G, rows, 1]
        weights = logits.sub_(_finite(total)).exp_()
        lse[:, :, rows] = _restored(total, query.shape[1]).squeeze(-1)
        out[:, :, rows] = _restored(_times(weights, v[:, :, keys]), query.shape[1])
    return out, lse


def backward(
    grad_out: Tensor,
    delta: Tensor,  # [B, H, Nq]: sum(grad_out * out) - grad_lse
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table_scale: Tensor,
    table_shift: Tensor,
    document_ids: Tensor | None,
    key_mask: Tensor | None,
    lse: Tensor,
    scale: float,
    geometry: Geometry,
    table_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and, where wanted (else empty), of the two tables, each ``[heads or 1, …]``."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    heads, kv_heads = query.shape[1], key.shape[1]
    q, k, v = query.to(dtype) * scale, *_visible_only(key.to(dtype), value.to(dtype), key_mask)
    g = grad_out.to(dtype)
    grad_query, grad_key, grad_value = (x.new_zeros(x.shape) for x in (q, k, v))
    diagonals = q.new_zeros(2, heads, table_scale.shape[1] if table_grads else 0)
    for rows, keys in _blocks(geometry, query.shape[0] * heads):
        block_q, block_g = _reversed(q, rows, kv_heads), _reversed(g, rows, kv_heads)
        scores = _scores(block_q, k[:, :, keys])
        a, m = _tables(scores, table_scale, table_shift, geometry, rows, keys)
        weights = torch.addcmul(m, scores, a)
        _hide(weights, geometry, document_ids, key_mask, rows, keys)
        weights.sub_(_finite(_reversed(lse[..., None], rows, kv_heads))).exp_()
        grad_value[:, :, keys] += _transposed_times(weights, block_g)
        grad_logits = _scores(block_g, v[:, :, keys]).sub_(_reversed(delta[..., None], rows, kv_heads)).mul_(weights)
        if table_grads:
            span = slice(geometry.queries - rows.stop + keys.start, geometry.queries - 1 - rows.start + keys.stop)
            diagonals[0, :, span] += _diagonal_sums(grad_logits * scores, heads)
            diagonals[1, :, span] += _diagonal_sums(grad_logits, heads)
        grad_scores = grad_logits.mul_(a)
        grad_query[:, :, rows] = _restored(_times(grad_scores, k[:, :, keys]), heads)
        grad_key[:, :, keys] += _transposed_times(grad_scores, block_q)
    grad_query *= scale
    grad_scale, grad_shift = table_scale.new_empty(0, 0), table_shift.new_empty(0, 0)
    if table_grads:
        if table_scale.shape[0] == 1:
            diagonals = diagonals.sum(dim=1, keepdim=True)
        hidden = table_shift == -torch.inf  # a hidden diagonal has no logits
        grad_scale, grad_shift = (x.masked_fill(hidden, 0).to(table_scale.dtype) for x in diagonals)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_scale, grad_shift


def _blocks(geometry: Geometry, heads: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the keys that it sees; a block that sees none is left out."""
    size = max(1, min(BLOCK, MAX_SCORES // max(1, heads * geometry.keys)))
    for start in range(0, geometry.queries, size):
        stop = min(start + size, geometry.queries)
        low = max(0, geometry.offset + start - geometry.farthest)
        high = min(geometry.keys, geometry.offset + stop - geometry.nearest)
        if low < high:
            yield slice(start, stop), slice(low, high)


def _visible_only(key: Tensor, value: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if key_mask is None:
        return key, value
    hidden = ~key_mask[:, None, :, None]  # 0 x NaN is NaN: an empty cache slot must not be multiplied at all
    return key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)


def _reversed(x: Tensor, rows: slice, kv_heads: int) -> Tensor:
    """A block of rows, last first, with query heads grouped by key head: ``[B, KV, G, rows, D]``."""
    return x[:, :, rows].flip(2).unflatten(1, (kv_heads, -1))


def _restored(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_reversed`: ``[B, H, rows, D]`` in order."""
    return x.flatten(1, 2).flip(2)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """``[B, KV, G, rows, keys]``; the group joins the rows, so that no key is copied."""
    return (query.flatten(2, 3) @ key.transpose(-1, -2)).unflatten(2, query.shape[2:4])


def _times(weights: Tensor, x: Tensor) -> Tensor:
    """weights ``[B, KV, G, rows, keys]`` times ``[B, KV, keys, D]``."""
    return (weights.flatten(2, 3) @ x).unflatten(2, weights.shape[2:4])


def _transposed_times(weights: Tensor, x: Tensor) -> Tensor:
    """weightsᵀ times ``[B, KV, G, rows, D]``, summed over the group: ``[B, KV, keys, D]``."""
    return weights.flatten(2, 3).transpose(-1, -2) @ x.flatten(2, 3)


def _tables(
    scores: Tensor, table_scale: Tensor, table_shift: Tensor, geometry: Geometry, rows: slice, keys: slice
) -> tuple[Tensor, Tensor]:
    """The block's a and m as Hankel views ``[KV or 1, G or 1, rows, keys]``."""
    start = geometry.queries - rows.stop + keys.start
    shape = (rows.stop - rows.start, keys.stop - keys.start)

    def view(table: Tensor) -> Tensor:
        heads, length = table.shape
        hankel = table.as_strided((heads, *shape), (length, 1, 1), table.storage_offset() + start)
        return hankel.unflatten(0, (scores.shape[1], scores.shape[2]) if heads > 1 else (1, 1))

    return view(table_scale), view(table_shift)


def _hide(
    logits: Tensor,
    geometry: Geometry,
    document_ids: Tensor | None,
    key_mask: Tensor | None,
    rows: slice,
    keys: slice,
) -> None:
    """-inf, in place, where documents differ or the key is masked."""
    if document_ids is not None:
        own = query_documents(document_ids, geometry.offset, geometry.queries)[:, rows].flip(1)
        other = own[:, :, None] != document_ids[:, None, keys]  # [B, rows, keys]
        logits.masked_fill_(other[:, None, None], -torch.inf)
    if key_mask is not None:
        logits.masked_fill_(~key_mask[:, None, None, None, keys], -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """A row that sees nothing has lse = -inf: subtract 0 there, and exp(-inf) leaves no weight."""
    return lse.masked_fill(lse == -torch.inf, 0)


def _diagonal_sums(x: Tensor, heads: int) -> Tensor:
    """Sums over row + key = const of ``[B, KV, G, rows, keys]``, over the batch too: ``[H, rows + keys - 1]``."""
    x = x.sum(0).flatten(0, 1)
    rows, keys = x.shape[1:]
    width = rows + keys - 1
    skewed = x.new_zeros(heads, rows, width)
    skewed.as_strided((heads, rows, keys), (rows * width, width + 1, 1)).copy_(x)
    return skewed.sum(1)
