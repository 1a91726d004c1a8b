"""The backward kernels: delta; gradients of keys and values, over the whole GQA group; gradients of queries.

Each program owns what it writes, so there are no atomics and two runs are bitwise equal. With L = a · (c · S) + m and
weights P = exp(L - lse): ``dL = P · (dO·V - delta)`` and ``dS = a · c · dL``.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from scaleinv.ops.triton.tiles import FAR, key_span, load_rows, plain_keys_end, power, store_rows, tile_logits


@triton.jit
def delta_kernel(
    out, grad_out, lse, grad_lse, delta, lse2, g_batch: tl.int64, g_head: tl.int64, g_row: tl.int64, heads, queries,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """``delta = Σ dO · O - dlse``; the logsumexp in base 2, +inf for a query that sees nothing: its weights are 0."""
    blocks = tl.cdiv(queries, BLOCK_M)
    start = tl.program_id(0) % blocks * BLOCK_M
    batch, head = (tl.program_id(0) // blocks) // heads, (tl.program_id(0) // blocks) % heads
    row_base = (batch * heads + head).to(tl.int64) * queries
    rows = start + tl.arange(0, BLOCK_M)
    inside = rows < queries
    o = load_rows(out + (row_base + start) * DV, 0, inside, DV, DV, BLOCK_M, BLOCK_DV).to(tl.float32)
    g = load_rows(grad_out + batch * g_batch + head * g_head, start, inside, g_row, DV, BLOCK_M, BLOCK_DV)
    total = tl.load(lse + row_base + rows, mask=inside, other=float("-inf"))
    blind = total == float("-inf")
    product = tl.sum(o * g.to(tl.float32), 1) - tl.load(grad_lse + row_base + rows, mask=inside, other=0.0)
    tl.store(delta + row_base + rows, tl.where(blind, 0.0, product), mask=inside)
    tl.store(lse2 + row_base + rows, tl.where(blind, float("inf"), total * 1.4426950408889634), mask=inside)


@triton.jit
def _keys_and_values(
    grad_key, grad_value, k, v, column_start, key_segments, begin, end,
    query, grad_out, query_gain, lse2, delta, table, query_segment, q_row, g_row,
    queries, high, offset, min_distance, max_distance, factor,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TABLE: tl.constexpr, SEGMENTS: tl.constexpr, QUERY_GAIN: tl.constexpr, MASKED: tl.constexpr,
    GATHER: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds what the queries ``begin … end - 1`` of one head give. Tiles are transposed: [N, M]."""
    for start in tl.range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        inside = rows < queries
        q = load_rows(query, start, inside, q_row, D, BLOCK_M, BLOCK_D)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if QUERY_GAIN:
            c = tl.load(query_gain + rows, mask=inside, other=0.0)
            scores = scores * c[None, :]
        logits, a = tile_logits(
            scores, tl.arange(0, BLOCK_M)[None, :], tl.arange(0, BLOCK_N)[:, None], start, column_start, table,
            high, offset, min_distance, max_distance, TABLE, MASKED, GATHER,
        )  # fmt: skip
        if SEGMENTS:
            segment = tl.load(query_segment + rows, mask=inside, other=-2)
            logits = tl.where(segment[None, :] == key_segments[:, None], logits, float("-inf"))
        total = tl.load(lse2 + rows, mask=inside, other=float("inf"))
        weights = power(logits, total[None, :], factor, TABLE)
        g = load_rows(grad_out, start, inside, g_row, DV, BLOCK_M, BLOCK_DV)
        grad_value = tl.dot(weights.to(g.dtype), g, grad_value, input_precision=PRECISION)
        grad_weights = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - tl.load(delta + rows, mask=inside, other=0.0)[None, :])
        if TABLE:
            grad_scores = grad_scores * a
        if QUERY_GAIN:
            grad_scores = grad_scores * c[None, :]
        grad_key = tl.dot(grad_scores.to(q.dtype), q, grad_key, input_precision=PRECISION)
    return grad_key, grad_value


@triton.jit
def key_value_kernel(
    query, key, value, query_gain, table, query_segment, key_segment, first_query, last_query,
    grad_out, lse2, delta, grad_key, grad_value,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64, g_batch: tl.int64, g_head: tl.int64, g_row: tl.int64,
    table_stride: tl.int64, heads, queries, keys, low, high, offset, min_distance, max_distance, factor, unit,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TABLE: tl.constexpr, SEGMENTS: tl.constexpr, QUERY_GAIN: tl.constexpr,
    GATHER: tl.constexpr, PRECISION: tl.constexpr, PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and their values, ``[B, KV, Nk, D]`` and ``[B, KV, Nk, DV]``, contiguous."""
    blocks = tl.cdiv(keys, BLOCK_N)
    kv_heads = heads // GROUP
    start = tl.program_id(0) % blocks * BLOCK_N
    batch, kv_head = (tl.program_id(0) // blocks) // kv_heads, (tl.program_id(0) // blocks) % kv_heads
    columns = start + tl.arange(0, BLOCK_N)
    inside = (columns >= low) & (columns < high)
    begin = tl.maximum(0, start + min_distance - offset)
    end = tl.minimum(queries, start + BLOCK_N + max_distance - offset)
    key_segments = None
    if SEGMENTS:
        key_base = batch.to(tl.int64) * keys
        key_segments = tl.load(key_segment + key_base + columns, mask=inside, other=-1)
        query_segment += batch.to(tl.int64) * queries
        begin = tl.maximum(begin, tl.min(tl.load(first_query + key_base + columns, mask=inside, other=2147483647)))
        end = tl.minimum(end, tl.max(tl.load(last_query + key_base + columns, mask=inside, other=-1)) + 1)
        if SEGMENTS == 2:
            inside = key_segments >= 0
    begin = begin // BLOCK_M * BLOCK_M
    k = load_rows(key + batch * k_batch + kv_head * k_head, start, inside, k_row, D, BLOCK_N, BLOCK_D)
    v = load_rows(value + batch * v_batch + kv_head * v_head, start, inside, v_row, DV, BLOCK_N, BLOCK_DV)
    middle = begin
    if not TABLE:  # from `middle` on, every query sees the whole block
        middle = tl.cdiv(tl.maximum(start + BLOCK_N - 1 + min_distance - offset, 0), BLOCK_M) * BLOCK_M
        middle = tl.where(max_distance < FAR, end, middle)
        middle = tl.maximum(begin, tl.minimum(middle, tl.cdiv(tl.maximum(end, 0), BLOCK_M) * BLOCK_M))
    sums_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    sums_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        row_base = (batch * heads + head).to(tl.int64) * queries
        head_query = query + batch * q_batch + head * q_head
        head_grad = grad_out + batch * g_batch + head * g_head
        head_scale = query_gain + row_base if QUERY_GAIN else None
        head_table = table + head * table_stride + (keys - 1 + PAD) if TABLE else None
        if not TABLE:
            sums_k, sums_v = _keys_and_values(
                sums_k, sums_v, k, v, start, key_segments, begin, tl.minimum(middle, end),
                head_query, head_grad, head_scale, lse2 + row_base, delta + row_base, head_table, query_segment,
                q_row, g_row, queries, high, offset, min_distance, max_distance, factor,
                D, DV, BLOCK_D, BLOCK_DV, TABLE, SEGMENTS, QUERY_GAIN, True, GATHER, PRECISION, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        sums_k, sums_v = _keys_and_values(
            sums_k, sums_v, k, v, start, key_segments, middle, end,
            head_query, head_grad, head_scale, lse2 + row_base, delta + row_base, head_table, query_segment,
            q_row, g_row, queries, high, offset, min_distance, max_distance, factor,
            D, DV, BLOCK_D, BLOCK_DV, TABLE, SEGMENTS, QUERY_GAIN, False, GATHER, PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    in_keys = columns < keys
    base = (batch * kv_heads + kv_head).to(tl.int64) * keys + start
    store_rows(grad_key + base * D, sums_k * unit, 0, in_keys, D, D, BLOCK_N, BLOCK_D)
    store_rows(grad_value + base * DV, sums_v, 0, in_keys, DV, DV, BLOCK_N, BLOCK_DV)


@triton.jit
def _queries(
    grad_query, grad_c, q, g, c, total, product, segment, row_start, begin, end,
    key, value, table, key_segment, k_row, v_row, low, high, offset, min_distance, max_distance, factor,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TABLE: tl.constexpr, SEGMENTS: tl.constexpr, QUERY_GAIN: tl.constexpr, MASKED: tl.constexpr,
    GATHER: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds what the keys ``begin … end - 1`` give, without c and the scale."""
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = (columns >= low) & (columns < high)
        if SEGMENTS:
            key_segments = tl.load(key_segment + columns, mask=inside, other=-1)
            if SEGMENTS == 2:
                inside = key_segments >= 0
        k = load_rows(key, start, inside, k_row, D, BLOCK_N, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
        unscaled = scores
        if QUERY_GAIN:
            scores = scores * c[:, None]
        logits, a = tile_logits(
            scores, tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :], row_start, start, table,
            high, offset, min_distance, max_distance, TABLE, MASKED, GATHER,
        )  # fmt: skip
        if SEGMENTS:
            logits = tl.where(segment[:, None] == key_segments[None, :], logits, float("-inf"))
        weights = power(logits, total[:, None], factor, TABLE)
        v = load_rows(value, start, inside, v_row, DV, BLOCK_N, BLOCK_DV)
        grad_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - product[:, None])
        if TABLE:
            grad_scores = grad_scores * a
        if QUERY_GAIN:
            grad_c += tl.sum(grad_scores * unscaled, 1)
        grad_query = tl.dot(grad_scores.to(k.dtype), k, grad_query, input_precision=PRECISION)
    return grad_query, grad_c


@triton.jit
def query_kernel(
    query, key, value, query_gain, table, query_segment, key_segment, first_key, last_key,
    grad_out, lse2, delta, grad_query, grad_query_gain,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64, g_batch: tl.int64, g_head: tl.int64, g_row: tl.int64,
    table_stride: tl.int64, heads, queries, keys, low, high, offset, min_distance, max_distance, factor, unit,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TABLE: tl.constexpr, SEGMENTS: tl.constexpr, QUERY_GAIN: tl.constexpr, TAIL: tl.constexpr,
    GATHER: tl.constexpr, PRECISION: tl.constexpr, PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries ``[B, H, Nq, D]`` and of their scale c ``[B, H, Nq]``, contiguous."""
    blocks = tl.cdiv(queries, BLOCK_M)
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    batch, head = (tl.program_id(0) // blocks) // heads, (tl.program_id(0) // blocks) % heads
    row_base = (batch * heads + head).to(tl.int64) * queries
    rows = start + tl.arange(0, BLOCK_M)
    in_rows = rows < queries
    q = load_rows(query + batch * q_batch + head * q_head, start, in_rows, q_row, D, BLOCK_M, BLOCK_D)
    g = load_rows(grad_out + batch * g_batch + head * g_head, start, in_rows, g_row, DV, BLOCK_M, BLOCK_DV)
    total = tl.load(lse2 + row_base + rows, mask=in_rows, other=float("inf"))
    product = tl.load(delta + row_base + rows, mask=in_rows, other=0.0)
    c = tl.load(query_gain + row_base + rows, mask=in_rows, other=0.0) if QUERY_GAIN else None
    key += batch * k_batch + (head // GROUP) * k_head
    value += batch * v_batch + (head // GROUP) * v_head
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
    middle = end
    if TAIL:
        middle = plain_keys_end(begin, end, start, high, offset, min_distance, max_distance, TABLE, BLOCK_N)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sums_c = tl.zeros([BLOCK_M], tl.float32)
    sums, sums_c = _queries(
        sums, sums_c, q, g, c, total, product, segment, start, begin, middle,
        key, value, table, key_segment, k_row, v_row, low, high, offset, min_distance, max_distance, factor,
        D, DV, BLOCK_D, BLOCK_DV, TABLE, SEGMENTS, QUERY_GAIN, False, GATHER, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if TAIL:
        sums, sums_c = _queries(
            sums, sums_c, q, g, c, total, product, segment, start, middle, end,
            key, value, table, key_segment, k_row, v_row, low, high, offset, min_distance, max_distance, factor,
            D, DV, BLOCK_D, BLOCK_DV, TABLE, SEGMENTS, QUERY_GAIN, True, GATHER, PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    sums = sums * unit
    if QUERY_GAIN:
        tl.store(grad_query_gain + row_base + rows, sums_c * unit, mask=in_rows)
        sums = sums * c[:, None]
    store_rows(grad_query + (row_base + start) * D, sums, 0, in_rows, D, D, BLOCK_M, BLOCK_D)
