"""Gradients of the tables a and m: sums of ``dL · S`` and ``dL`` along the diagonals of the logits.

One program for each diagonal of square tiles: they all hold the same distances, so tiles add up as they are, over the
batch too, and only the last sum is skewed. No atomics: two runs are bitwise equal. Launched only where tables learn.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from scaleinv.ops.triton.tiles import load_rows, tile_logits


@triton.jit
def _diagonals(x, pointer, SIZE: tl.constexpr):
    """Stores the sums over ``row - column = d``: at ``[0, d]`` for d >= 0 and at ``[1, SIZE + d]`` for d < 0."""
    row = tl.arange(0, SIZE)[:, None]
    distance = tl.arange(0, SIZE)[None, :]
    skewed = tl.gather(x, (row - distance) & (SIZE - 1), 1)  # [row, row - distance], wrapped around
    tl.store(pointer + tl.arange(0, SIZE), tl.sum(tl.where(row >= distance, skewed, 0.0), 0))
    tl.store(pointer + SIZE + tl.arange(0, SIZE), tl.sum(tl.where(row < distance, skewed, 0.0), 0))


@triton.jit
def table_kernel(
    query, key, value, query_gain, table, query_segment, key_segment, grad_out, lse2, delta, sums,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64, g_batch: tl.int64, g_head: tl.int64, g_row: tl.int64,
    table_stride: tl.int64, batches, heads, queries, keys, low, high, offset, min_distance, max_distance, factor,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SEGMENTS: tl.constexpr, QUERY_GAIN: tl.constexpr,
    GATHER: tl.constexpr, PRECISION: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Sums ``[H, diagonals, 2, 2, SIZE]``: for a and m, the distances from the tile's own on, and those before it."""
    row_tiles, key_tiles = tl.cdiv(queries, SIZE), tl.cdiv(keys, SIZE)
    diagonals = row_tiles + key_tiles - 1
    head = tl.program_id(0) // diagonals
    step = tl.program_id(0) % diagonals - (key_tiles - 1)  # query tile minus key tile
    inner = tl.arange(0, SIZE)
    table += head * table_stride + (keys - 1 + PAD)
    begin, end = tl.maximum(0, step), tl.minimum(row_tiles, key_tiles + step)
    distance = offset + step * SIZE
    end = tl.where((distance + SIZE <= min_distance) | (distance - SIZE >= max_distance), begin, end)
    with_scores = tl.zeros([SIZE, SIZE], tl.float32)
    alone = tl.zeros([SIZE, SIZE], tl.float32)
    for batch in range(batches):
        row_base = (batch * heads + head).to(tl.int64) * queries
        for tile in tl.range(begin, end):
            start, key_start = tile * SIZE, (tile - step) * SIZE
            rows, columns = start + inner, key_start + inner
            in_rows = rows < queries
            inside = (columns >= low) & (columns < high)
            if SEGMENTS:
                segment = tl.load(query_segment + batch * queries + rows, mask=in_rows, other=-2)
                key_segments = tl.load(key_segment + batch * keys + columns, mask=inside, other=-1)
                if SEGMENTS == 2:
                    inside = key_segments >= 0
            q = load_rows(query + batch * q_batch + head * q_head, start, in_rows, q_row, D, SIZE, BLOCK_D)
            k = load_rows(key + batch * k_batch + (head // GROUP) * k_head, key_start, inside, k_row, D, SIZE, BLOCK_D)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
            if QUERY_GAIN:
                scores = scores * tl.load(query_gain + row_base + rows, mask=in_rows, other=0.0)[:, None]
            logits, _ = tile_logits(
                scores, inner[:, None], inner[None, :], start, key_start, table,
                high, offset, min_distance, max_distance, True, True, GATHER,
            )  # fmt: skip
            if SEGMENTS:
                logits = tl.where(segment[:, None] == key_segments[None, :], logits, float("-inf"))
            total = tl.load(lse2 + row_base + rows, mask=in_rows, other=float("inf"))
            product = tl.load(delta + row_base + rows, mask=in_rows, other=0.0)
            g = load_rows(grad_out + batch * g_batch + head * g_head, start, in_rows, g_row, DV, SIZE, BLOCK_DV)
            v = load_rows(
                value + batch * v_batch + (head // GROUP) * v_head, key_start, inside, v_row, DV, SIZE, BLOCK_DV
            )
            grad_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            grad_logits = tl.exp2(logits - total[:, None]) * (grad_weights - product[:, None])
            with_scores += grad_logits * scores
            alone += grad_logits
    sums += tl.program_id(0).to(tl.int64) * (4 * SIZE)
    _diagonals(with_scores, sums, SIZE)
    _diagonals(alone, sums + 2 * SIZE, SIZE)
