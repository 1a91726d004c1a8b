"""What the kernels share: which keys a block of queries sees, loading rows, and logits from the packed table.

Shapes inside kernels: M queries, N keys, D head dimension. Logits are in base 2: ``L · log2(e)``.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

FAR: tl.constexpr = tl.constexpr(1 << 30)
"""A distance that nothing reaches, in 32 bits."""


@triton.jit
def load_rows(pointer, start, inside, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows ``start … start + ROWS - 1`` of a matrix, ``[ROWS, COLUMNS]``: 0 where not `inside`, or past WIDTH."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    pointers = pointer + start * stride + row[:, None] * tl.cast(stride, tl.int32) + column[None, :]
    mask = inside[:, None]
    if WIDTH < COLUMNS:
        mask = mask & (column[None, :] < WIDTH)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_rows(pointer, x, start, inside, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of `load_rows`; rounds to the pointer's dtype."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    pointers = pointer + start * stride + row[:, None] * tl.cast(stride, tl.int32) + column[None, :]
    mask = inside[:, None]
    if WIDTH < COLUMNS:
        mask = mask & (column[None, :] < WIDTH)
    tl.store(pointers, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def key_span(
    start, rows, low, high, queries, offset, min_distance, max_distance, first_key, last_key,
    SEGMENTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[begin, end): the keys that some query of the block sees; begin is a multiple of BLOCK_N."""
    begin = tl.maximum(low, offset + start - max_distance)
    end = tl.minimum(high, offset + tl.minimum(start + BLOCK_M, queries) - min_distance)
    if SEGMENTS:
        inside = rows < queries
        begin = tl.maximum(begin, tl.min(tl.load(first_key + rows, mask=inside, other=2147483647)))
        end = tl.minimum(end, tl.max(tl.load(last_key + rows, mask=inside, other=-1)) + 1)
    return begin // BLOCK_N * BLOCK_N, end


@triton.jit
def plain_keys_end(
    begin, end, start, high, offset, min_distance, max_distance, TABLE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Where, in ``[begin, end]``, the tiles start that need an explicit mask."""
    middle = high // BLOCK_N * BLOCK_N
    if not TABLE:  # the table hides distances by itself
        middle = tl.minimum(middle, tl.maximum(offset + start - min_distance + 1, 0) // BLOCK_N * BLOCK_N)
        middle = tl.where(max_distance < FAR, begin, middle)
    return tl.maximum(begin, tl.minimum(middle, end))


@triton.jit
def entry(pointer, GATHER: tl.constexpr):
    """a and m from pointers to packed entries."""
    if GATHER == "ptx":  # a tl.load would be pipelined through shared memory, which has no room for it
        a, m = tl.inline_asm_elementwise(
            "ld.global.nc.v2.f32 {$0, $1}, [$2];", "=f,=f,l", [pointer], (tl.float32, tl.float32), True, 1
        )
    else:
        both = tl.load(pointer)
        a = tl.cast(both & 0xFFFFFFFF, tl.uint32).to(tl.float32, bitcast=True)
        m = tl.cast(both >> 32, tl.uint32).to(tl.float32, bitcast=True)
    return a, m


@triton.jit
def tile_logits(
    scores, row, column, row_start, column_start, table, high, offset, min_distance, max_distance,
    TABLE: tl.constexpr, MASKED: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Logits of a tile and their slope a in the score: in base 2 with a table, else the scores themselves.

    row and column count from the tile's corner and broadcast against it; `table` points at the entry of distance 0.
    MASKED tiles check distances (without a table) and the last key.
    """
    a = scores  # without a table nobody reads it
    logits = scores
    if TABLE:
        a, shift = entry(table + ((row_start + row) - (column_start + column)), GATHER)
        logits = tl.fma(scores, a, shift)
    if MASKED:
        visible = column_start + column < high
        if not TABLE:
            distance = row_start - column_start + offset + row - column
            visible = visible & (distance >= min_distance) & (distance <= max_distance)
        logits = tl.where(visible, logits, float("-inf"))
    return logits, a


@triton.jit
def power(logits, base, factor, TABLE: tl.constexpr):
    """``2^(logits - base)``, where logits without a table still have to be multiplied by `factor`."""
    if TABLE:
        return tl.exp2(logits - base)
    else:
        return tl.exp2(tl.fma(logits, factor, -base))


@triton.jit
def weigh(weights, v, sums, WHOLE: tl.constexpr, PRECISION: tl.constexpr):
    """``sums + weights @ v``; with WHOLE the weights count in two parts, the second being what the first rounds off."""
    rounded = weights.to(v.dtype)
    sums = tl.dot(rounded, v, sums, input_precision=PRECISION)
    if WHOLE:
        sums = tl.dot((weights - rounded.to(tl.float32)).to(v.dtype), v, sums, input_precision=PRECISION)
    return sums
