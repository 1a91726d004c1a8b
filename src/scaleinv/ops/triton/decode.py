"""Decoding: a few queries on a long cache. The keys are split among many programs, and their parts merged.

The queries of a GQA group share one tile, so each key is read once. a and m come from the tables as they are: reading
the cache takes far longer, and packing a table of 10^6 distances at every step would not pay.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from scaleinv.ops.triton.tiles import load_rows, weigh

MAX_QUERIES = 16


@triton.jit
def decode_kernel(
    query, key, value, query_gain, gain, shift, query_segment, key_segment, first_key, last_key,
    part_out, part_lse,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64, gain_stride: tl.int64, shift_stride: tl.int64,
    batches, heads, queries, keys, low, high, offset, min_distance, max_distance, factor, splits, chunk,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TABLE: tl.constexpr, SEGMENTS: tl.constexpr, QUERY_GAIN: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Output ``[splits, B, H, Nq, DV]`` and base-2 logsumexp ``[splits, B, H, Nq]`` of each part of the keys."""
    kv_heads = heads // GROUP
    row_blocks = tl.cdiv(GROUP * queries, BLOCK_M)
    split = tl.program_id(0) % splits
    block = (tl.program_id(0) // splits) % row_blocks
    batch = (tl.program_id(0) // splits) // row_blocks // kv_heads
    kv_head = (tl.program_id(0) // splits) // row_blocks % kv_heads

    member = block * BLOCK_M + tl.arange(0, BLOCK_M)  # row of the group: head by head, query by query
    in_rows = member < GROUP * queries
    head, row = kv_head * GROUP + member // queries, member % queries
    place = ((split.to(tl.int64) * batches + batch) * heads + head) * queries + row
    base = (batch.to(tl.int64) * heads + head) * queries + row
    column = tl.arange(0, BLOCK_D)
    pointers = query + batch * q_batch + (head * q_head + row * q_row)[:, None] + column[None, :]
    q = tl.load(pointers, mask=in_rows[:, None] & (column[None, :] < D), other=0.0)
    c = tl.load(query_gain + base, mask=in_rows, other=0.0) if QUERY_GAIN else None
    key += batch * k_batch + kv_head * k_head
    value += batch * v_batch + kv_head * v_head

    begin = low + split * chunk
    end = tl.minimum(begin + chunk, high)
    if SEGMENTS:
        at = batch.to(tl.int64) * queries + row
        segment = tl.load(query_segment + at, mask=in_rows, other=-2)
        key_segment += batch.to(tl.int64) * keys
        begin = tl.maximum(begin, tl.min(tl.load(first_key + at, mask=in_rows, other=2147483647)))
        end = tl.minimum(end, tl.max(tl.load(last_key + at, mask=in_rows, other=-1)) + 1)
    sums = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = columns < end
        if SEGMENTS:
            key_segments = tl.load(key_segment + columns, mask=inside, other=-1)
            if SEGMENTS == 2:
                inside = key_segments >= 0
        k = load_rows(key, start, inside, k_row, D, BLOCK_N, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
        if QUERY_GAIN:
            scores = scores * c[:, None]
        distance = offset + row[:, None] - columns[None, :]
        visible = (distance >= min_distance) & (distance <= max_distance) & (inside[None, :] & in_rows[:, None])
        if TABLE:
            index = tl.abs(distance)
            a = tl.load(gain + (head * gain_stride)[:, None] + index, mask=visible, other=0.0)
            m = tl.load(shift + (head * shift_stride)[:, None] + index, mask=visible, other=0.0)
            logits = tl.fma(scores, a * factor, m * 1.4426950408889634)
        else:
            logits = scores * factor
        if SEGMENTS:
            visible = visible & (segment[:, None] == key_segments[None, :])
        logits = tl.where(visible, logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        floor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(logits - floor[:, None])
        decay = tl.exp2(peak - floor)
        total = total * decay + tl.sum(weights, 1)
        v = load_rows(value, start, inside, v_row, DV, BLOCK_N, BLOCK_DV)
        sums = weigh(weights, v, sums * decay[:, None], WHOLE, PRECISION)
        peak = new_peak
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    across = tl.arange(0, BLOCK_DV)
    mask = in_rows[:, None] & (across[None, :] < DV)
    tl.store(part_out + (place * DV)[:, None] + across[None, :], sums, mask=mask)
    tl.store(part_lse + place, peak + tl.log2(total), mask=in_rows)


@triton.jit
def merge_kernel(
    part_out, part_lse, out, lse, rows, splits, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr
):
    """Merges the parts of one row: their outputs, weighted by ``exp(lse)``."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    across = tl.arange(0, BLOCK_DV)
    parts = tl.load(part_lse + split.to(tl.int64) * rows + row, mask=split < splits, other=float("-inf"))
    peak = tl.max(parts, 0)
    weights = tl.exp2(parts - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    mask = (split[:, None] < splits) & (across[None, :] < DV)
    pointers = part_out + (split.to(tl.int64)[:, None] * rows + row) * DV + across[None, :]
    sums = tl.sum(tl.load(pointers, mask=mask, other=0.0) * weights[:, None], 0)
    merged = sums / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * DV + across, merged.to(out.dtype.element_ty), mask=across < DV)
    tl.store(lse + row, (peak + tl.log2(total)) * 0.6931471805599453)
