"""The forward kernel: one program for each block of queries of a head, over the blocks of keys that it sees."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from scaleinv.ops.triton.tiles import key_span, load_rows, plain_keys_end, power, store_rows, tile_logits, weigh


@triton.jit
def _attend(
    out, total, peak, q, c, segment, row_start, begin, end,
    key, value, table, key_segment, k_row, v_row, low, high, offset, min_distance, max_distance, factor,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TABLE: tl.constexpr, SEGMENTS: tl.constexpr, QUERY_GAIN: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr,
    GATHER: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Softmax, one block of keys after the other: the sums so far are relative to 2^peak."""
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = (columns >= low) & (columns < high)
        if SEGMENTS:
            key_segments = tl.load(key_segment + columns, mask=inside, other=-1)
            if SEGMENTS == 2:  # a hidden key may hold NaN: it is not even read
                inside = key_segments >= 0
        k = load_rows(key, start, inside, k_row, D, BLOCK_N, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
        if QUERY_GAIN:
            scores = scores * c[:, None]
        logits, _ = tile_logits(
            scores, tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :], row_start, start, table,
            high, offset, min_distance, max_distance, TABLE, MASKED, GATHER,
        )  # fmt: skip
        if SEGMENTS:
            logits = tl.where(segment[:, None] == key_segments[None, :], logits, float("-inf"))
        highest = tl.max(logits, 1)
        new_peak = tl.maximum(peak, highest if TABLE else highest * factor)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = power(logits, base[:, None], factor, TABLE)
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        v = load_rows(value, start, inside, v_row, DV, BLOCK_N, BLOCK_DV)
        out = weigh(weights, v, out * decay[:, None], WHOLE, PRECISION)
        peak = new_peak
    return out, total, peak


@triton.jit
def forward_kernel(
    query, key, value, query_gain, table, query_segment, key_segment, first_key, last_key, out, lse,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64, table_stride: tl.int64,
    heads, queries, keys, low, high, offset, min_distance, max_distance, factor,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TABLE: tl.constexpr, SEGMENTS: tl.constexpr, QUERY_GAIN: tl.constexpr, WHOLE: tl.constexpr, TAIL: tl.constexpr,
    GATHER: tl.constexpr, PRECISION: tl.constexpr, PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Output ``[B, H, Nq, DV]`` and logsumexp ``[B, H, Nq]``, both contiguous."""
    blocks = tl.cdiv(queries, BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks  # with a causal mask the last block has the most keys: it goes first
    batch, head = (tl.program_id(0) // blocks) // heads, (tl.program_id(0) // blocks) % heads
    row_base = (batch * heads + head).to(tl.int64) * queries
    query += batch * q_batch + head * q_head
    key += batch * k_batch + (head // GROUP) * k_head
    value += batch * v_batch + (head // GROUP) * v_head

    start = block * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    in_rows = rows < queries
    q = load_rows(query, start, in_rows, q_row, D, BLOCK_M, BLOCK_D)
    c = tl.load(query_gain + row_base + rows, mask=in_rows, other=0.0) if QUERY_GAIN else None
    if TABLE:
        table += head * table_stride + (keys - 1 + PAD)
    segment = None
    if SEGMENTS:
        segment = tl.load(query_segment + batch.to(tl.int64) * queries + rows, mask=in_rows, other=-2)
        key_segment += batch.to(tl.int64) * keys
        first_key += batch.to(tl.int64) * queries
        last_key += batch.to(tl.int64) * queries
    begin, end = key_span(
        start,
        rows,
        low,
        high,
        queries,
        offset,
        min_distance,
        max_distance,
        first_key,
        last_key,
        SEGMENTS,
        BLOCK_M,
        BLOCK_N,
    )
    sums = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    middle = end
    if TAIL:
        middle = plain_keys_end(begin, end, start, high, offset, min_distance, max_distance, TABLE, BLOCK_N)
    sums, total, peak = _attend(
        sums, total, peak, q, c, segment, start, begin, middle,
        key, value, table, key_segment, k_row, v_row, low, high, offset, min_distance, max_distance, factor,
        D, DV, BLOCK_D, BLOCK_DV, TABLE, SEGMENTS, QUERY_GAIN, WHOLE, False, GATHER, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if TAIL:
        sums, total, peak = _attend(
            sums, total, peak, q, c, segment, start, middle, end,
            key, value, table, key_segment, k_row, v_row, low, high, offset, min_distance, max_distance, factor,
            D, DV, BLOCK_D, BLOCK_DV, TABLE, SEGMENTS, QUERY_GAIN, WHOLE, True, GATHER, PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip

    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]  # a query that sees nothing: output 0, logsumexp -inf
    store_rows(out + (row_base + start) * DV, sums, 0, in_rows, DV, DV, BLOCK_M, BLOCK_DV)
    tl.store(lse + row_base + rows, (peak + tl.log2(total)) * 0.6931471805599453, mask=in_rows)
