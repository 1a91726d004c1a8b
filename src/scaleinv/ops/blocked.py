"""The blocked algorithm in plain torch: memory linear in N, any device, any dtype, forward and backward.

Queries are taken in blocks, last row first. In that order a block's tables of a and m are Hankel matrices: entry (row,
key) depends on row + key alone, so both are zero-copy views of the 1-D diagonal tables, and one `addcmul` applies them
together with the causal mask and the window. Its compiled twin is kernel.c.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scaleinv.ops import operator
from scaleinv.ops.call import Call, DiagonalCall
from scaleinv.ops.hidden import product, tame
from scaleinv.ops.masks import Geometry

BLOCK = 128
"""Queries in a block: the fastest of 64, 128, 256 on a CPU with 512 KiB of L2."""

MAX_SCORES = 1 << 25
"""Scores held at once: in longer contexts, fewer queries are taken at a time."""


def obstacle(call: Call) -> None:
    """Always None: it takes any device, any dtype, any mask."""
    return None


def forward(call: DiagonalCall) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Nq, Dv]`` and logsumexp ``[B, H, Nq]``, both in float32 at least.

    The caller rounds the output: the backward needs it unrounded, or the gradients of the tables lose digits.
    """
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    q, k, v = _prepared(call)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], -torch.inf)
    careful = not tame(q, k, v)
    for rows, keys in _blocks(call.geometry, q.shape[0] * heads):
        scores = _scores(_reversed(q, rows, kv_heads), k[:, :, keys])
        visible = _visible(call, rows, keys, scores) if careful else None
        logits = _logits(call, rows, keys, scores, visible)[0]
        total = torch.logsumexp(logits, dim=-1, keepdim=True)  # [B, KV, G, rows, 1]
        weights = _weights(logits, total, visible)
        lse[:, :, rows] = _restored(total).squeeze(-1)
        out[:, :, rows] = _restored(_times(weights, v[:, :, keys], visible))
    return out, lse


def backward(call: DiagonalCall, grad_out: Tensor, lse: Tensor, delta: Tensor, table_grads: bool) -> operator.Gradients:
    """See `scaleinv.ops.operator.block_backward`."""
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    q, k, v = _prepared(call)
    g = grad_out.to(q.dtype)
    grad_query, grad_key, grad_value = (x.new_zeros(x.shape) for x in (q, k, v))
    diagonals = q.new_zeros(2, heads, call.gain.shape[1] if table_grads else 0)
    careful = not tame(q, k, v, g, _finite(lse), delta)
    for rows, keys in _blocks(call.geometry, q.shape[0] * heads):
        block_q, block_g = _reversed(q, rows, kv_heads), _reversed(g, rows, kv_heads)
        scores = _scores(block_q, k[:, :, keys])
        visible = _visible(call, rows, keys, scores) if careful else None
        logits, gain = _logits(call, rows, keys, scores, visible)
        weights = _weights(logits, _reversed(lse[..., None], rows, kv_heads), visible)
        grad_value[:, :, keys] += _transposed_times(weights, block_g, visible)
        grad_logits = _scores(block_g, v[:, :, keys]).sub_(_reversed(delta[..., None], rows, kv_heads)).mul_(weights)
        if visible is not None:
            grad_logits.masked_fill_(~visible, 0)
        if table_grads:
            span = _span(call.geometry, rows, keys)
            diagonals[0, :, span] += _diagonal_sums(grad_logits * scores, heads)
            diagonals[1, :, span] += _diagonal_sums(grad_logits, heads)
        grad_scores = grad_logits.mul_(gain)
        grad_query[:, :, rows] = _restored(_times(grad_scores, k[:, :, keys], visible))
        grad_key[:, :, keys] += _transposed_times(grad_scores, block_q, visible)
    grad_query *= call.scale
    return operator.Gradients(
        grad_query,
        grad_key,
        grad_value,
        *operator.table_gradients(call, diagonals if table_grads else None),
    )


run = operator.engine("blocked-torch", forward, backward)


def _prepared(call: DiagonalCall) -> tuple[Tensor, Tensor, Tensor]:
    """query · scale, key and value in the dtype of the logits; what the mask hides is 0."""
    q, k, v = (x.to(call.compute_dtype) for x in (call.query, call.key, call.value))
    if call.key_mask is not None:
        hidden = ~call.key_mask[:, None, :, None]  # 0 x NaN is NaN: an empty cache slot must not be multiplied at all
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    return q * call.scale, k, v


def _blocks(geometry: Geometry, heads: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the keys that it sees; blocks that see none are left out."""
    size = max(1, min(BLOCK, MAX_SCORES // max(1, heads * geometry.keys)))
    for start in range(0, geometry.queries, size):
        stop = min(start + size, geometry.queries)
        low = max(0, geometry.offset + start - geometry.max_distance)
        high = min(geometry.keys, geometry.offset + stop - geometry.min_distance)
        if low < high:
            yield slice(start, stop), slice(low, high)


def _reversed(x: Tensor, rows: slice, kv_heads: int) -> Tensor:
    """A block of rows, last first, with query heads grouped by key head: ``[B, KV, G, rows, D]``."""
    return x[:, :, rows].flip(2).unflatten(1, (kv_heads, -1))


def _restored(x: Tensor) -> Tensor:
    """The inverse of `_reversed`: ``[B, H, rows, D]`` in order."""
    return x.flatten(1, 2).flip(2)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """``[B, KV, G, rows, keys]``; the group joins the rows, so that no key is copied."""
    return (query.flatten(2, 3) @ key.transpose(-1, -2)).unflatten(2, query.shape[2:4])


def _times(weights: Tensor, x: Tensor, visible: Tensor | None) -> Tensor:
    """weights ``[B, KV, G, rows, keys]`` times ``[B, KV, keys, D]``."""
    return _product(weights.flatten(2, 3), x, visible).unflatten(2, weights.shape[2:4])


def _transposed_times(weights: Tensor, x: Tensor, visible: Tensor | None) -> Tensor:
    """weightsᵀ times ``[B, KV, G, rows, D]``, summed over the group: ``[B, KV, keys, D]``."""
    turned = None if visible is None else visible.flatten(2, 3).transpose(-1, -2)
    return _product(weights.flatten(2, 3).transpose(-1, -2), x.flatten(2, 3), turned)


def _product(weights: Tensor, x: Tensor, visible: Tensor | None) -> Tensor:
    return weights @ x if visible is None else product(weights, x, visible.reshape(weights.shape))


def _logits(
    call: DiagonalCall, rows: slice, keys: slice, scores: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The block's logits, -inf where hidden, and its gains; scores of hidden pairs become 0 if ``visible`` is given."""
    if visible is not None:
        scores.masked_fill_(~visible, 0)
    gain, shift = _tables(call, rows, keys)
    logits = torch.addcmul(shift, scores, gain)
    for hidden in _masks(call, rows, keys):
        logits.masked_fill_(hidden, -torch.inf)
    return logits, gain


def _weights(logits: Tensor, lse: Tensor, visible: Tensor | None) -> Tensor:
    """exp(logits - lse), in place; 0 where hidden, even if lse is NaN, when ``visible`` is given."""
    weights = logits.sub_(_finite(lse)).exp_()
    return weights if visible is None else weights.masked_fill_(~visible, 0)


def _visible(call: DiagonalCall, rows: slice, keys: slice, scores: Tensor) -> Tensor:
    """Which pairs of the block are visible, bool in the scores' shape."""
    visible = (_tables(call, rows, keys)[1] != -torch.inf).expand(scores.shape).clone()
    for hidden in _masks(call, rows, keys):
        visible &= ~hidden
    return visible


def _span(geometry: Geometry, rows: slice, keys: slice) -> slice:
    """The entries of the diagonal tables that a block reads."""
    return slice(geometry.queries - rows.stop + keys.start, geometry.queries - 1 - rows.start + keys.stop)


def _tables(call: DiagonalCall, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """The block's gain and shift as Hankel views ``[KV or 1, G or 1, rows, keys]``."""
    start = _span(call.geometry, rows, keys).start
    shape = (rows.stop - rows.start, keys.stop - keys.start)
    kv_heads = call.key.shape[1]

    def view(table: Tensor) -> Tensor:
        heads, length = table.shape
        hankel = table.as_strided((heads, *shape), (length, 1, 1), table.storage_offset() + start)
        return hankel.unflatten(0, (kv_heads, -1) if heads > 1 else (1, 1))

    return view(call.gain), view(call.shift)


def _masks(call: DiagonalCall, rows: slice, keys: slice) -> Iterator[Tensor]:
    """Pairs hidden for other reasons than their distance, True if hidden: ``[B, 1, 1, rows or 1, keys]``."""
    if call.document_ids is not None and call.query_documents is not None:
        own = call.query_documents[:, rows].flip(1)
        yield (own[:, :, None] != call.document_ids[:, None, keys])[:, None, None]
    if call.key_mask is not None:
        yield ~call.key_mask[:, None, None, None, keys]


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
