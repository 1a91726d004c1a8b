/* Attention with logits L = a(t) * S + m(t) on CPU, float32: the blocked algorithm with everything between its matrix
 * products fused into them.
 *
 * One 1-D table for each head holds a and m along the diagonals: entry x = key + (queries - 1 - query), so a row of
 * logits reads a contiguous piece of it. Masked diagonals hold a = 0, m = -inf. Keys and values are packed into panels
 * of NR columns, and every product runs through one register tile of MR x NR. Rows, keys and channels are padded to
 * whole tiles; tiles that no query sees are skipped.
 *
 * Plain C with the vector extensions of GCC and Clang; no dependency but OpenMP. Tested against ops/reference.py.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define VECTORS 2
#define MR 12
#elif defined(__AVX__)
#define LANES 8
#define VECTORS 2
#define MR 6
#else
#define LANES 4
#define VECTORS 4
#define MR 6
#endif
#define NR (LANES * VECTORS)
#define BLOCK_ROWS 96   /* queries in a block: a multiple of MR */
#define BLOCK_KEYS 288  /* keys in a block: a multiple of MR and NR */
#define CHUNK_KEYS 1024 /* keys in one task of a decoding step */
#define TABLE_PAD 512   /* masked entries at either end of a table: more than a block reaches past it */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef int32_t iloose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))

enum { FAILED = 1, NOT_TAME = 2 }; /* what the entry points return beside 0; after NOT_TAME the result is void */

typedef struct {
    const float *data;
    int64_t batch, head, row; /* strides in elements; channels are contiguous */
} Matrix;

/* Mirrored field by field in ops/native.py. */
typedef struct {
    int64_t batches, heads, kv_heads, queries, keys, dim, value_dim;
    int64_t offset;                /* position of query 0 */
    int64_t min_distance;          /* visible: min_distance <= position - key <= max_distance */
    int64_t max_distance;
    int64_t table_heads;           /* 1 or heads */
    int64_t threads;
    float scale;
    Matrix query, key, value;
    const float *gain;             /* [table_heads, queries + keys - 1] */
    const float *shift;
    const int32_t *query_segment;  /* [B, queries] and [B, keys]: a key is visible where equal; null for all */
    const int32_t *key_segment;    /* -1: masked */
    float *out, *lse;              /* [B, H, queries, value_dim], [B, H, queries] */
    /* backward only */
    Matrix grad_out;
    const float *delta;            /* [B, H, queries]: sum(grad_out * out) - grad_lse */
    int64_t chunks;                /* parts of the key range, each with its own grad_query, for parallelism */
    float *grad_query;             /* [chunks, B, H, queries up to MR, dim up to NR], zeroed */
    float *grad_key, *grad_value;  /* [B, KV, keys, dim], [B, KV, keys, value_dim], zeroed */
    float *grad_table;             /* [chunks, B, H, 2, queries + keys - 1], zeroed; null if not wanted */
} Call;

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec x) { *(loose *)p = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }

INLINE float sum_lanes(vec x) {
    float s = 0;
    for (int i = 0; i < LANES; i++) s += x[i];
    return s;
}

INLINE float max_lanes(vec x) {
    float s = x[0];
    for (int i = 1; i < LANES; i++) s = MAX(s, x[i]);
    return s;
}

/* exp to 2 ulp; exactly 0 below the normal range and at -inf; NaN stays NaN. */
INLINE vec exponential(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vec n = (x * 1.44269504088896341f + magic) - magic;
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uvec power = (((uvec)__builtin_convertvector(n, ivec)) + 127u) << 23;
    return (vec)(~(x < -87.33f) & (ivec)(p * (vec)power));
}

#define FOR_TILE(r, v)           \
    _Pragma("GCC unroll 12")     \
    for (int r = 0; r < MR; r++) \
        _Pragma("GCC unroll 4")  \
        for (int v = 0; v < VECTORS; v++)

/* out[MR, NR] = A[MR, depth] * panel[depth, NR], added to what is there if `add`; out's rows are `stride` apart, A's
 * element (r, k) is a[r * row + k * step]. Never inlined: what surrounds it would push its sums out of registers. */
static __attribute__((noinline)) void tile(float *out, int64_t stride, int add, const float *a, int64_t row,
                                           int64_t step, const float *panel, int64_t depth) {
    vec sum[MR][VECTORS] = {{{0}}};
    for (int64_t k = 0; k < depth; k++) {
        vec b[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) b[v] = load(panel + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < MR; r++) {
            vec x = all(a[r * row]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[r][v] += x * b[v];
        }
        a += step;
        panel += NR;
    }
    if (add)
        FOR_TILE(r, v) store(out + r * stride + v * LANES, load(out + r * stride + v * LANES) + sum[r][v]);
    else
        FOR_TILE(r, v) store(out + r * stride + v * LANES, sum[r][v]);
}

/* NaN, infinity, or so large that products overflow: such a number would spread to hidden pairs, for 0 * NaN is NaN. */
#define TAME 1e15f
#define WILD(x) (!((x) <= TAME && (x) >= -TAME))

INLINE void note_wild(const float *row, int64_t n, int *wild) {
    ivec found = {0};
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) found |= ~((load(row + k) <= TAME) & (load(row + k) >= -TAME));
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= found[i];
    for (; k < n; k++) any |= WILD(row[k]);
    if (any) {
#pragma omp atomic write
        *wild = 1;
    }
}

/* Keys [from, to) with channels as rows: panels [NR keys][dim][NR]. Keys outside [0, count) or masked become 0. */
static void pack_transposed(float *panels, const float *rows, int64_t stride, int64_t dim, int64_t from, int64_t to,
                            int64_t count, const int32_t *segment) {
    for (int64_t start = from; start < to; start += NR, panels += dim * NR) {
        for (int64_t c = 0; c < NR; c++) {
            int64_t j = start + c;
            if (j < count && (!segment || segment[j] >= 0)) {
                const float *row = rows + j * stride;
                for (int64_t k = 0; k < dim; k++) panels[k * NR + c] = row[k];
            } else {
                for (int64_t k = 0; k < dim; k++) panels[k * NR + c] = 0;
            }
        }
    }
}

/* Rows [from, to) as they are: panels of NR channels, panel p at panels + p * length * NR, [length rows][NR]. */
static void pack_rows(float *panels, int64_t length, const float *rows, int64_t stride, int64_t dim, int64_t from,
                      int64_t to, int64_t count, const int32_t *segment, int *wild) {
    for (int64_t j = from; j < to; j++) {
        int visible = j < count && (!segment || segment[j] >= 0);
        const float *row = rows + j * stride;
        if (visible) note_wild(row, dim, wild);
        for (int64_t c = 0; c < dim; c += NR) {
            float *line = panels + (c / NR * length + (j - from)) * NR;
            int64_t width = MIN(NR, dim - c);
            if (visible && width == NR) {
                for (int v = 0; v < VECTORS; v++) store(line + v * LANES, load(row + c + v * LANES));
            } else {
                for (int64_t k = 0; k < NR; k++) line[k] = visible && k < width ? row[c + k] : 0;
            }
        }
    }
}

/* Rows [from, from + BLOCK_ROWS) one after the other, 0 past the end. */
static void copy_rows(float *block, const float *rows, int64_t stride, int64_t dim, int64_t from, int64_t count) {
    for (int64_t r = 0; r < BLOCK_ROWS; r++) {
        if (from + r < count)
            memcpy(block + r * dim, rows + (from + r) * stride, dim * sizeof(float));
        else
            memset(block + r * dim, 0, dim * sizeof(float));
    }
}

static float *scratch(int64_t floats) {
    return aligned_alloc(64, ROUND_UP((MAX(floats, 1)) * sizeof(float), 64));
}

/* The tables with the score's scale folded in and masked entries at both ends. */
typedef struct {
    int64_t length; /* of one head's padded table */
    float *gain, *shift;
} Tables;

static int make_tables(const Call *c, Tables *t) {
    int64_t diagonals = c->queries + c->keys - 1;
    t->length = diagonals + 2 * TABLE_PAD;
    t->gain = scratch(c->table_heads * t->length);
    t->shift = scratch(c->table_heads * t->length);
    if (!t->gain || !t->shift) return 1;
    for (int64_t h = 0; h < c->table_heads; h++) {
        float *gain = t->gain + h * t->length, *shift = t->shift + h * t->length;
        for (int64_t x = 0; x < t->length; x++) {
            int64_t own = x - TABLE_PAD;
            int inside = own >= 0 && own < diagonals;
            gain[x] = inside ? c->gain[h * diagonals + own] * c->scale : 0;
            shift[x] = inside ? c->shift[h * diagonals + own] : -INFINITY;
        }
    }
    return 0;
}

/* Where key 0 of a query's row lies in a padded table. */
INLINE int64_t table_start(const Call *c, const Tables *t, int64_t head, int64_t query) {
    return (c->table_heads == 1 ? 0 : head) * t->length + TABLE_PAD + c->queries - 1 - query;
}

/* Keys that some query of rows [first, last] sees, as [*low, *high) within [0, keys); [0, 0) if there are none. */
INLINE void visible_keys(const Call *c, int64_t first, int64_t last, int64_t *low, int64_t *high) {
    last = MIN(last, c->queries - 1);
    *low = MAX(0, c->offset + first - c->max_distance);
    *high = MIN(c->keys, c->offset + last - c->min_distance + 1);
    if (*high <= *low) *low = *high = 0;
}

/* Lowest and highest segment of a run, masked keys aside: two runs whose ranges are apart share no document. */
static void segment_range(const int32_t *segment, int64_t from, int64_t to, int32_t *low, int32_t *high) {
    *low = INT32_MAX;
    *high = -1;
    for (int64_t i = from; i < to; i++) {
        if (segment[i] < 0) continue;
        *low = MIN(*low, segment[i]);
        *high = MAX(*high, segment[i]);
    }
}

/* Does the block of keys share a document with the block of queries? */
static int segments_meet(const Call *c, int64_t b, int64_t q0, int64_t q1, int64_t k0, int64_t k1) {
    if (!c->query_segment) return 1;
    int32_t ql, qh, kl, kh;
    segment_range(c->query_segment + b * c->queries, q0, MIN(q1, c->queries), &ql, &qh);
    segment_range(c->key_segment + b * c->keys, k0, MIN(k1, c->keys), &kl, &kh);
    return ql <= kh && kl <= qh;
}

/* Does a tile of MR queries from `query` on and NR keys from `key` on hold pairs that their distance hides? */
INLINE int at_edge(const Call *c, int64_t query, int64_t key) {
    int64_t t = c->offset + query - key;
    return t - (NR - 1) < c->min_distance || t + (MR - 1) > c->max_distance;
}

/* Scores of query i and the NR keys from `key` on become logits, in place: a * s + m, -inf where the pair is hidden. At
 * an edge that is said aloud: the score of a hidden key may be NaN or infinite. */
INLINE void logits_row(const Call *c, const Tables *t, int64_t head, int64_t i, int64_t key, int edge, int32_t segment,
                       const int32_t *key_segment, float *row) {
    int64_t x = table_start(c, t, head, i) + key;
    for (int v = 0; v < NR; v += LANES) {
        vec shift = load(t->shift + x + v);
        vec logit = load(t->gain + x + v) * load(row + v) + shift;
        if (edge) logit = choose(shift == -INFINITY, shift, logit);
        if (key_segment) logit = choose(*(const iloose *)(key_segment + v) == segment, logit, all(-INFINITY));
        store(row + v, logit);
    }
    for (int64_t n = MAX(c->keys - key, 0); n < NR; n++) row[n] = -INFINITY; /* past the last key */
}

/* ---------------------------------------------------------------- forward */

typedef struct {
    float *query, *logits, *out; /* [BLOCK_ROWS, dim], [BLOCK_ROWS, BLOCK_KEYS], [BLOCK_ROWS, padded value dim] */
    int32_t *key_segment;        /* [BLOCK_KEYS], masked past the end */
} ForwardScratch;

/* One block of queries against the packed keys and values of its head. */
static void forward_block(const Call *c, const Tables *t, const ForwardScratch *s, int64_t b, int64_t h, int64_t q0,
                          const float *packed_key, const float *packed_value, int64_t base, int64_t packed_keys) {
    int64_t rows = MIN(BLOCK_ROWS, c->queries - q0), panels = (rows + MR - 1) / MR;
    int64_t value_dim = ROUND_UP(c->value_dim, NR);
    float maximum[BLOCK_ROWS], total[BLOCK_ROWS];
    copy_rows(s->query, c->query.data + b * c->query.batch + h * c->query.head, c->query.row, c->dim, q0, c->queries);
    memset(s->out, 0, BLOCK_ROWS * value_dim * sizeof(float));
    for (int r = 0; r < BLOCK_ROWS; r++) maximum[r] = -INFINITY, total[r] = 0;

    int64_t low, high;
    visible_keys(c, q0, q0 + rows - 1, &low, &high);
    for (int64_t k0 = low - low % NR; k0 < high; k0 += BLOCK_KEYS) {
        if (!segments_meet(c, b, q0, q0 + rows, k0, k0 + BLOCK_KEYS)) continue;
        if (c->key_segment)
            for (int64_t j = 0; j < BLOCK_KEYS; j++)
                s->key_segment[j] = k0 + j < c->keys ? c->key_segment[b * c->keys + k0 + j] : -1;
        /* columns of this block that each panel of rows sees, in whole tiles */
        int64_t from[BLOCK_ROWS / MR], to[BLOCK_ROWS / MR], first = BLOCK_KEYS, last = 0;
        for (int64_t p = 0; p < panels; p++) {
            int64_t l, u;
            visible_keys(c, q0 + p * MR, q0 + p * MR + MR - 1, &l, &u);
            from[p] = MAX(l - k0, 0) / NR * NR;
            to[p] = MIN(ROUND_UP(MAX(u - k0, 0), NR), BLOCK_KEYS);
            if (from[p] < to[p]) first = MIN(first, from[p]), last = MAX(last, to[p]);
        }
        for (int64_t j = first; j < last; j += NR) {
            const float *panel = packed_key + (k0 + j - base) / NR * NR * c->dim;
            for (int64_t p = 0; p < panels; p++) {
                if (j < from[p] || j >= to[p]) continue;
                float *target = s->logits + p * MR * BLOCK_KEYS + j;
                tile(target, BLOCK_KEYS, 0, s->query + p * MR * c->dim, c->dim, 1, panel, c->dim);
                const int32_t *segment = c->query_segment ? c->query_segment + b * c->queries : 0;
                int edge = at_edge(c, q0 + p * MR, k0 + j);
                for (int r = 0; r < MR; r++) {
                    int64_t i = q0 + p * MR + r;
                    logits_row(c, t, h, i, k0 + j, edge, segment ? segment[MIN(i, c->queries - 1)] : 0,
                               segment ? s->key_segment + j : 0, target + r * BLOCK_KEYS);
                }
            }
        }
        for (int64_t r = 0; r < panels * MR; r++) {
            float *row = s->logits + r * BLOCK_KEYS;
            int64_t begin = from[r / MR], end = to[r / MR];
            if (begin >= end) continue;
            vec best = all(maximum[r]), best2 = best;
            for (int64_t j = begin; j < end; j += NR)
                for (int v = 0; v < VECTORS; v += 2) {
                    best = larger(load(row + j + v * LANES), best);
                    best2 = larger(load(row + j + (v + 1) * LANES), best2);
                }
            float top = max_lanes(larger(best, best2));
            if (top == -INFINITY) top = 0; /* nothing seen yet: every weight below is exp(-inf) = 0 */
            vec sum = {0};
            for (int64_t j = begin; j < end; j += LANES) {
                vec weight = exponential(load(row + j) - top);
                store(row + j, weight);
                sum += weight;
            }
            if (top != maximum[r] && total[r] != 0) {
                float factor = expf(maximum[r] - top), *out = s->out + r * value_dim;
                total[r] *= factor;
                for (int64_t k = 0; k < value_dim; k += LANES) store(out + k, load(out + k) * factor);
            }
            total[r] += sum_lanes(sum);
            if (total[r] != 0) maximum[r] = top;
        }
        for (int64_t channel = 0; channel < value_dim; channel += NR) {
            const float *panel = packed_value + channel / NR * packed_keys * NR + (k0 - base) * NR;
            for (int64_t p = 0; p < panels; p++) {
                if (from[p] >= to[p]) continue;
                tile(s->out + p * MR * value_dim + channel, value_dim, 1, s->logits + p * MR * BLOCK_KEYS + from[p],
                     BLOCK_KEYS, 1, panel + from[p] * NR, to[p] - from[p]);
            }
        }
    }
    int64_t at = (b * c->heads + h) * c->queries + q0;
    for (int64_t r = 0; r < rows; r++) {
        float inverse = total[r] != 0 ? 1 / total[r] : 0;
        for (int64_t k = 0; k < c->value_dim; k++)
            c->out[(at + r) * c->value_dim + k] = s->out[r * value_dim + k] * inverse;
        c->lse[at + r] = total[r] != 0 ? maximum[r] + logf(total[r]) : -INFINITY;
    }
}

int scaleinv_forward(const Call *c) {
    int64_t groups = c->heads / c->kv_heads, blocks = (c->queries + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t value_dim = ROUND_UP(c->value_dim, NR), low, high, failed = 0;
    int wild = 0;
    visible_keys(c, 0, c->queries - 1, &low, &high);
    int64_t base = low - low % NR, packed_keys = ROUND_UP(high - base, NR);
    /* So many key heads at once that every thread has work, and no more: packed copies stay small. */
    int64_t together = MAX(1, (4 * c->threads + groups * blocks - 1) / (groups * blocks));
    int64_t pairs = c->batches * c->kv_heads;
    together = MIN(together, pairs);
    Tables t = {0};
    float *packed_key = scratch(together * packed_keys * c->dim);
    float *packed_value = scratch(together * packed_keys * value_dim);
    failed = make_tables(c, &t) || !packed_key || !packed_value;
#pragma omp parallel num_threads(c->threads) if (!failed)
    {
        ForwardScratch s = {scratch(BLOCK_ROWS * c->dim), scratch(BLOCK_ROWS * BLOCK_KEYS),
                            scratch(BLOCK_ROWS * value_dim), (int32_t *)scratch(BLOCK_KEYS)};
        if (!s.query || !s.logits || !s.out || !s.key_segment) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        for (int64_t pair0 = 0; pair0 < pairs && !failed; pair0 += together) {
            int64_t here = MIN(together, pairs - pair0);
#pragma omp for schedule(static) collapse(2)
            for (int64_t n = 0; n < here; n++)
                for (int64_t k0 = base; k0 < base + packed_keys; k0 += BLOCK_KEYS) {
                    int64_t b = (pair0 + n) / c->kv_heads, kv = (pair0 + n) % c->kv_heads;
                    int64_t k1 = MIN(k0 + BLOCK_KEYS, base + packed_keys);
                    const int32_t *segment = c->key_segment ? c->key_segment + b * c->keys : 0;
                    pack_transposed(packed_key + (n * packed_keys + k0 - base) * c->dim,
                                    c->key.data + b * c->key.batch + kv * c->key.head, c->key.row, c->dim, k0, k1, high,
                                    segment);
                    pack_rows(packed_value + n * packed_keys * value_dim + (k0 - base) * NR, packed_keys,
                              c->value.data + b * c->value.batch + kv * c->value.head, c->value.row, c->value_dim, k0,
                              k1, high, segment, &wild);
                }
#pragma omp for schedule(dynamic, 1)
            for (int64_t task = 0; task < here * groups * blocks; task++) {
                int64_t block = blocks - 1 - task / (here * groups); /* causal: the longest first */
                int64_t n = task / groups % here, g = task % groups;
                int64_t b = (pair0 + n) / c->kv_heads, kv = (pair0 + n) % c->kv_heads;
                forward_block(c, &t, &s, b, kv * groups + g, block * BLOCK_ROWS,
                              packed_key + n * packed_keys * c->dim, packed_value + n * packed_keys * value_dim, base,
                              packed_keys);
            }
        }
        free(s.query), free(s.logits), free(s.out), free(s.key_segment);
    }
    free(packed_key), free(packed_value), free(t.gain), free(t.shift);
    return failed ? FAILED : wild ? NOT_TAME : 0;
}

/* ---------------------------------------------------------------- a decoding step: few queries, many keys */

/* Keys [k0, k1) for every query of one key head, straight from the cache: max, total and weighted values of each row. */
static void decode_chunk(const Call *c, const Tables *t, float *weights, int64_t b, int64_t kv, int64_t k0, int64_t k1,
                         float *partial, int64_t partial_stride) {
    int64_t groups = c->heads / c->kv_heads;
    const float *keys = c->key.data + b * c->key.batch + kv * c->key.head;
    const float *values = c->value.data + b * c->value.batch + kv * c->value.head;
    const int32_t *segment = c->key_segment ? c->key_segment + b * c->keys : 0;
    for (int64_t row = 0; row < groups * c->queries; row++, partial += partial_stride) {
        int64_t h = kv * groups + row / c->queries, i = row % c->queries, low, high;
        const float *query = c->query.data + b * c->query.batch + h * c->query.head + i * c->query.row;
        const float *gain = t->gain + table_start(c, t, h, i), *shift = t->shift + table_start(c, t, h, i);
        visible_keys(c, i, i, &low, &high);
        low = MAX(low, k0), high = MIN(high, k1);
        float *out = partial + 2, top = -INFINITY, total = 0;
        memset(out, 0, c->value_dim * sizeof(float));
        for (int64_t j = low; j < high; j++) {
            float x = -INFINITY;
            if (!segment || segment[j] == c->query_segment[b * c->queries + i]) {
                const float *key = keys + j * c->key.row;
                vec sum[4] = {{0}};
                int64_t k = 0;
                for (; k + 4 * LANES <= c->dim; k += 4 * LANES)
                    for (int v = 0; v < 4; v++) sum[v] += load(query + k + v * LANES) * load(key + k + v * LANES);
                for (; k + LANES <= c->dim; k += LANES) sum[0] += load(query + k) * load(key + k);
                float dot = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
                for (; k < c->dim; k++) dot += query[k] * key[k];
                x = gain[j] * dot + shift[j];
            }
            weights[j - k0] = x;
            if (x > top || x != x) top = x; /* a NaN stays: it must not be hidden */
        }
        if (top != -INFINITY) {
            for (int64_t j = high; j < ROUND_UP(high - k0, LANES) + k0; j++) weights[j - k0] = -INFINITY;
            for (int64_t j = (low - k0) / LANES * LANES; j < low - k0; j++) weights[j] = -INFINITY;
            vec sum = {0};
            for (int64_t j = (low - k0) / LANES * LANES; j < high - k0; j += LANES) {
                vec weight = exponential(load(weights + j) - top);
                store(weights + j, weight);
                sum += weight;
            }
            total = sum_lanes(sum);
            for (int64_t j = low; j < high; j += 4) {
                float w[4] = {0};
                const float *value[4];
                for (int64_t n = 0; n < 4; n++) {
                    int64_t at = MIN(j + n, high - 1);
                    w[n] = j + n < high ? weights[j + n - k0] : 0;
                    value[n] = values + (w[n] != 0 ? at : low) * c->value.row;
                }
                if (w[0] == 0 && w[1] == 0 && w[2] == 0 && w[3] == 0) continue;
                for (int n = 0; n < 4; n++)
                    if (w[n] == 0) value[n] = value[w[0] != 0 ? 0 : w[1] != 0 ? 1 : w[2] != 0 ? 2 : 3];
                int64_t k = 0;
                for (; k + LANES <= c->value_dim; k += LANES)
                    store(out + k, load(out + k) + w[0] * load(value[0] + k) + w[1] * load(value[1] + k) +
                                       w[2] * load(value[2] + k) + w[3] * load(value[3] + k));
                for (; k < c->value_dim; k++)
                    out[k] += w[0] * value[0][k] + w[1] * value[1][k] + w[2] * value[2][k] + w[3] * value[3][k];
            }
        }
        partial[0] = top, partial[1] = total;
    }
}

int scaleinv_decode(const Call *c) {
    int64_t rows = c->heads / c->kv_heads * c->queries, low, high, failed = 0;
    visible_keys(c, 0, c->queries - 1, &low, &high);
    int64_t chunks = (high - low + CHUNK_KEYS - 1) / CHUNK_KEYS, pairs = c->batches * c->kv_heads;
    int64_t width = c->value_dim + 2; /* max, total, weighted values */
    float *partial = scratch(pairs * chunks * rows * width);
    Tables t = {0};
    failed = make_tables(c, &t) || !partial;
#pragma omp parallel num_threads(c->threads) if (!failed)
    {
        float *weights = scratch(CHUNK_KEYS + 2 * LANES);
        if (!weights) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic, 1) collapse(2)
            for (int64_t pair = 0; pair < pairs; pair++)
                for (int64_t n = 0; n < chunks; n++)
                    decode_chunk(c, &t, weights, pair / c->kv_heads, pair % c->kv_heads, low + n * CHUNK_KEYS,
                                 MIN(low + (n + 1) * CHUNK_KEYS, high), partial + (pair * rows * chunks + n) * width,
                                 chunks * width);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < pairs * rows; row++) { /* rows lie as the output's: [B, H, queries] */
                const float *parts = partial + row * chunks * width;
                float top = -INFINITY, total = 0, *out = c->out + row * c->value_dim;
                for (int64_t n = 0; n < chunks; n++)
                    if (parts[n * width] > top || parts[n * width] != parts[n * width]) top = parts[n * width];
                memset(out, 0, c->value_dim * sizeof(float));
                for (int64_t n = 0; n < chunks && top != -INFINITY; n++) {
                    if (parts[n * width] == -INFINITY) continue;
                    float factor = expf(parts[n * width] - top);
                    total += factor * parts[n * width + 1];
                    for (int64_t k = 0; k < c->value_dim; k++) out[k] += factor * parts[n * width + 2 + k];
                }
                for (int64_t k = 0; k < c->value_dim && total != 0; k++) out[k] /= total;
                c->lse[row] = total != 0 ? top + logf(total) : -INFINITY;
            }
        }
        free(weights);
    }
    free(partial), free(t.gain), free(t.shift);
    return failed ? FAILED : 0;
}

/* ---------------------------------------------------------------- backward */

typedef struct {
    /* the whole head, packed as rows for the products with transposed weights */
    float *query_panels, *grad_out_panels;
    /* one block of keys */
    float *key_transposed, *value_transposed, *key_panels, *grad_key, *grad_value;
    int32_t *key_segment;
    /* one block of queries */
    float *query, *grad_out, *weights, *grad_scores, lse[BLOCK_ROWS], delta[BLOCK_ROWS];
} BackwardScratch;

/* Gradients of a tile's logits, summed along the diagonals: to the gain (times the score) and to the shift. */
static void add_diagonals(const Call *c, float *grad_table, const float *scores, const float *grads, int64_t query,
                          int64_t key) {
    int64_t diagonals = c->queries + c->keys - 1;
    for (int64_t r = 0; r < MR && query + r < c->queries; r++)
        for (int64_t n = 0; n < NR && key + n < c->keys; n++) {
            int64_t x = c->queries - 1 - (query + r) + key + n;
            grad_table[x] += grads[r * NR + n] * scores[r * NR + n] * c->scale;
            grad_table[diagonals + x] += grads[r * NR + n];
        }
}

/* Weights and gradients of the scores for a tile of MR queries x NR keys. */
static void backward_tile(const Call *c, const Tables *t, const BackwardScratch *s, int64_t b, int64_t h, int64_t q0,
                          int64_t k0, int64_t p, int64_t j, float *grad_table) {
    float scores[MR * NR], grads[MR * NR], logits[MR * NR];
    tile(scores, NR, 0, s->query + p * MR * c->dim, c->dim, 1, s->key_transposed + j * c->dim, c->dim);
    tile(grads, NR, 0, s->grad_out + p * MR * c->value_dim, c->value_dim, 1, s->value_transposed + j * c->value_dim,
         c->value_dim);
    memcpy(logits, scores, sizeof(scores));
    const int32_t *segment = c->query_segment ? c->query_segment + b * c->queries : 0;
    for (int r = 0; r < MR; r++) {
        int64_t row = p * MR + r, i = q0 + row, x = table_start(c, t, h, i) + k0 + j;
        logits_row(c, t, h, i, k0 + j, 0, segment ? segment[MIN(i, c->queries - 1)] : 0,
                   segment ? s->key_segment + j : 0, logits + r * NR);
        for (int v = 0; v < NR; v += LANES) {
            vec weight = exponential(load(logits + r * NR + v) - s->lse[row]);
            vec grad = weight * (load(grads + r * NR + v) - s->delta[row]);
            store(s->weights + row * BLOCK_KEYS + j + v, weight);
            store(s->grad_scores + row * BLOCK_KEYS + j + v, grad * load(t->gain + x + v));
            store(grads + r * NR + v, grad);
        }
    }
    if (grad_table) add_diagonals(c, grad_table, scores, grads, q0 + p * MR, k0 + j);
}

/* target[keys, width] += left[queries, keys]ᵀ · right[queries, width], over the rows that see each panel of keys. */
static void transposed_product(float *target, int64_t width, const float *left, const float *right, int64_t right_rows,
                               int64_t q0, int64_t panels, const int64_t *from, const int64_t *to, int64_t columns) {
    for (int64_t channel = 0; channel < width; channel += NR)
        for (int64_t j = 0; j < columns; j += MR) {
            int64_t begin = 0, end = panels;
            while (begin < end && (to[begin] <= j || from[begin] >= j + MR)) begin++;
            while (end > begin && (to[end - 1] <= j || from[end - 1] >= j + MR)) end--;
            if (begin == end) continue;
            float *corner = target + j * width + channel;
            tile(corner, width, 1, left + begin * MR * BLOCK_KEYS + j, 1, BLOCK_KEYS,
                 right + (channel / NR * right_rows + q0 + begin * MR) * NR, (end - begin) * MR);
        }
}

/* One block of queries against one block of keys: adds to grad_query and to the block's grad_key and grad_value. */
static void backward_block(const Call *c, const Tables *t, BackwardScratch *s, int64_t b, int64_t h, int64_t q0,
                           int64_t k0, int64_t keys, float *grad_query, float *grad_table) {
    int64_t rows = MIN(BLOCK_ROWS, c->queries - q0), panels = (rows + MR - 1) / MR, padded = ROUND_UP(c->queries, MR);
    int64_t dim = ROUND_UP(c->dim, NR), value_dim = ROUND_UP(c->value_dim, NR);
    int64_t at = (b * c->heads + h) * c->queries + q0, columns = ROUND_UP(keys, NR);
    copy_rows(s->query, c->query.data + b * c->query.batch + h * c->query.head, c->query.row, c->dim, q0, c->queries);
    copy_rows(s->grad_out, c->grad_out.data + b * c->grad_out.batch + h * c->grad_out.head, c->grad_out.row,
              c->value_dim, q0, c->queries);
    for (int64_t r = 0; r < BLOCK_ROWS; r++) {
        float lse = r < rows ? c->lse[at + r] : -INFINITY;
        s->lse[r] = lse == -INFINITY ? INFINITY : lse; /* a row that sees nothing has no weights */
        s->delta[r] = r < rows ? c->delta[at + r] : 0;
    }
    int64_t from[BLOCK_ROWS / MR], to[BLOCK_ROWS / MR];
    for (int64_t p = 0; p < panels; p++) {
        int64_t l, u;
        visible_keys(c, q0 + p * MR, q0 + p * MR + MR - 1, &l, &u);
        from[p] = MIN(MAX(l - k0, 0) / NR * NR, columns);
        to[p] = MAX(MIN(ROUND_UP(MAX(u - k0, 0), NR), columns), from[p]);
    }
    for (int64_t j = 0; j < columns; j += NR)
        for (int64_t p = 0; p < panels; p++) {
            if (j >= from[p] && j < to[p]) {
                backward_tile(c, t, s, b, h, q0, k0, p, j, grad_table);
            } else { /* the transposed products below read whole columns */
                for (int r = 0; r < MR; r++) {
                    memset(s->weights + (p * MR + r) * BLOCK_KEYS + j, 0, NR * sizeof(float));
                    memset(s->grad_scores + (p * MR + r) * BLOCK_KEYS + j, 0, NR * sizeof(float));
                }
            }
        }
    for (int64_t channel = 0; channel < dim; channel += NR)
        for (int64_t p = 0; p < panels; p++) {
            if (from[p] == to[p]) continue;
            tile(grad_query + (q0 + p * MR) * dim + channel, dim, 1, s->grad_scores + p * MR * BLOCK_KEYS + from[p],
                 BLOCK_KEYS, 1, s->key_panels + (channel / NR * BLOCK_KEYS + from[p]) * NR, to[p] - from[p]);
        }
    transposed_product(s->grad_value, value_dim, s->weights, s->grad_out_panels, padded, q0, panels, from, to, columns);
    transposed_product(s->grad_key, dim, s->grad_scores, s->query_panels, padded, q0, panels, from, to, columns);
}

static void add_rows(float *rows, const float *block, int64_t count, int64_t dim, int64_t padded) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t k = 0; k < dim; k++) rows[j * dim + k] += block[j * padded + k];
}

/* Keys [k0, k1) of one key head: all the query heads of its group, one after the other. */
static void backward_keys(const Call *c, const Tables *t, BackwardScratch *s, int64_t b, int64_t kv, int64_t chunk,
                          int64_t k0, int64_t k1, int64_t high, int *wild) {
    int64_t groups = c->heads / c->kv_heads, padded = ROUND_UP(c->queries, MR), diagonals = c->queries + c->keys - 1;
    int64_t dim = ROUND_UP(c->dim, NR), value_dim = ROUND_UP(c->value_dim, NR);
    const float *keys = c->key.data + b * c->key.batch + kv * c->key.head;
    const float *values = c->value.data + b * c->value.batch + kv * c->value.head;
    const int32_t *segment = c->key_segment ? c->key_segment + b * c->keys : 0;
    for (int64_t h = kv * groups; h < (kv + 1) * groups; h++) {
        int64_t slot = (chunk * c->batches + b) * c->heads + h;
        float *grad_query = c->grad_query + slot * padded * dim;
        float *grad_table = c->grad_table ? c->grad_table + slot * 2 * diagonals : 0;
        pack_rows(s->query_panels, padded, c->query.data + b * c->query.batch + h * c->query.head, c->query.row, c->dim,
                  0, padded, c->queries, 0, wild);
        pack_rows(s->grad_out_panels, padded, c->grad_out.data + b * c->grad_out.batch + h * c->grad_out.head,
                  c->grad_out.row, c->value_dim, 0, padded, c->queries, 0, wild);
        note_wild(c->delta + (b * c->heads + h) * c->queries, c->queries, wild);
        for (int64_t i = 0; i < c->queries; i++) {
            float lse = c->lse[(b * c->heads + h) * c->queries + i];
            if (lse != -INFINITY) note_wild(&lse, 1, wild);
        }
        for (int64_t start = k0; start < k1; start += BLOCK_KEYS) {
            int64_t stop = MIN(start + BLOCK_KEYS, k1), end = start + ROUND_UP(stop - start, NR);
            pack_transposed(s->key_transposed, keys, c->key.row, c->dim, start, end, high, segment);
            pack_transposed(s->value_transposed, values, c->value.row, c->value_dim, start, end, high, segment);
            pack_rows(s->key_panels, BLOCK_KEYS, keys, c->key.row, c->dim, start, end, high, segment, wild);
            for (int64_t j = start; j < MIN(end, high); j++)
                if (!segment || segment[j] >= 0) note_wild(values + j * c->value.row, c->value_dim, wild);
            memset(s->grad_key, 0, BLOCK_KEYS * dim * sizeof(float));
            memset(s->grad_value, 0, BLOCK_KEYS * value_dim * sizeof(float));
            for (int64_t j = 0; j < BLOCK_KEYS && segment; j++)
                s->key_segment[j] = start + j < c->keys ? segment[start + j] : -1;
            for (int64_t q0 = 0; q0 < c->queries; q0 += BLOCK_ROWS) {
                int64_t l, u;
                visible_keys(c, q0, q0 + BLOCK_ROWS - 1, &l, &u);
                if (l >= stop || u <= start || !segments_meet(c, b, q0, q0 + BLOCK_ROWS, start, stop)) continue;
                backward_block(c, t, s, b, h, q0, start, stop - start, grad_query, grad_table);
            }
            int64_t row = (b * c->kv_heads + kv) * c->keys + start;
            add_rows(c->grad_key + row * c->dim, s->grad_key, stop - start, c->dim, dim);
            add_rows(c->grad_value + row * c->value_dim, s->grad_value, stop - start, c->value_dim, value_dim);
        }
    }
}

int scaleinv_backward(const Call *c) {
    int64_t padded = ROUND_UP(c->queries, MR), dim = ROUND_UP(c->dim, NR), value_dim = ROUND_UP(c->value_dim, NR);
    int64_t pairs = c->batches * c->kv_heads, low, high, failed = 0;
    int wild = 0;
    visible_keys(c, 0, c->queries - 1, &low, &high);
    low -= low % NR;
    int64_t blocks = (high - low + BLOCK_KEYS - 1) / BLOCK_KEYS;
    Tables t = {0};
    failed = make_tables(c, &t);
#pragma omp parallel num_threads(c->threads) if (!failed)
    {
        BackwardScratch s = {
            .query_panels = scratch(padded * dim),
            .grad_out_panels = scratch(padded * value_dim),
            .key_transposed = scratch(BLOCK_KEYS * c->dim),
            .value_transposed = scratch(BLOCK_KEYS * c->value_dim),
            .key_panels = scratch(BLOCK_KEYS * dim),
            .grad_key = scratch(BLOCK_KEYS * dim),
            .grad_value = scratch(BLOCK_KEYS * value_dim),
            .key_segment = (int32_t *)scratch(BLOCK_KEYS),
            .query = scratch(BLOCK_ROWS * c->dim),
            .grad_out = scratch(BLOCK_ROWS * c->value_dim),
            .weights = scratch(BLOCK_ROWS * BLOCK_KEYS),
            .grad_scores = scratch(BLOCK_ROWS * BLOCK_KEYS),
        };
        float *all_scratch[] = {s.query_panels, s.grad_out_panels, s.key_transposed, s.value_transposed,
                                s.key_panels,   s.grad_key,        s.grad_value,     (float *)s.key_segment,
                                s.query,        s.grad_out,        s.weights,        s.grad_scores};
        for (int n = 0; n < 12; n++)
            if (!all_scratch[n]) {
#pragma omp atomic write
                failed = 1;
            }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t task = 0; task < pairs * c->chunks; task++) {
                int64_t pair = task % pairs, chunk = task / pairs;
                int64_t from = low + blocks * chunk / c->chunks * BLOCK_KEYS;
                int64_t to = MIN(low + blocks * (chunk + 1) / c->chunks * BLOCK_KEYS, high);
                if (from < to)
                    backward_keys(c, &t, &s, pair / c->kv_heads, pair % c->kv_heads, chunk, from, to, high, &wild);
            }
        }
        for (int n = 0; n < 12; n++) free(all_scratch[n]);
    }
    free(t.gain), free(t.shift);
    return failed ? FAILED : wild ? NOT_TAME : 0;
}

/* What this build is made of, for the caller to size its buffers and to check: MR, NR, the bytes of a Call. */
void scaleinv_build(int64_t *rows, int64_t *columns, int64_t *call_bytes) {
    *rows = MR, *columns = NR, *call_bytes = (int64_t)sizeof(Call);
}
