/* Certified decoding on CPU: attention over a cache of which only the keys that matter are read in full.
 *
 * The cache is a list of pages of PAGE keys. Beside float32 keys and values a page holds an 8-bit copy of its keys, the
 * copy's error for each key, and a ball (centre, radius) that contains its values. A step
 *   1. bounds every logit from above by the 8-bit copy: integer dot products, 16 keys at a time;
 *   2. sorts the upper weights into bins and finds the threshold below which they sum to less than the tolerance;
 *   3. reads the keys and values above it: scores in double, weights in float;
 *   4. adds the rest as page centres, and bounds what that may have cost. A row over the tolerance reads more.
 * bounds.py has the same bound in plain words; `reference.py` is the plain twin.
 *
 * Plain C with the vector extensions of GCC and Clang. Only the integer dot product has forms of its own for AVX-512
 * VNNI and AVX2.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

#define LANES 16
#define PAGE 1024
#define MAX_DIM 1024       /* channels of a key: up to here an integer product is exact in float32 */
#define BINS 1024          /* of the upper weights, by the top bits of their floats: 8 for each power of two up to 1 */
#define AHEAD 6            /* rows fetched ahead of their use */
#define DENSE 0.5          /* where more of the keys would be read than this, all are: in order, they cost no more */
#define LONGEST_WAIT 64    /* steps for which a head that had to read everything is not bounded at all */
#define ATTEMPTS 3         /* by an estimate of the total weight; by the certain weight of what was read; everything */
#define SMALL (1 << 19)    /* products of a step up to which one thread is as good: on a busy machine others are late */

/* Rounding. U is float32's unit roundoff; the others are rounded up generously from the counts beside them. */
#define U 5.9604644775390625e-8
#define SCORE_SLACK 1e-6f   /* of a bounded logit, relative to |a S| + |m|: 16 U */
#define WIDTH_SLACK 1e-5    /* of an interval's own width */
#define WEIGHT_SLACK 1e-5   /* of a weight exp(x), x in [-87, 0]: 87 U for the argument, 1.5 U for the exponential */
#define SUM_SLACK 2e-5      /* of a sum of upper weights over a page, WEIGHT_SLACK included */
#define TINY 2e-38          /* more than exp(-87), the least upper weight */
#define FLUSHED 1e-36       /* more than the norm of channels that are 0 or not as the CPU treats subnormal numbers */
#define PART 0x1p-11f       /* unit of the weights read: the weighted values of a page stay below the largest float */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef double wide __attribute__((vector_size(64)));
typedef float half __attribute__((vector_size(32), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))

/* Mirrored field by field in certified/native.py, as are Append and Attend. */
typedef struct {
    float *key, *value;      /* [B, KV, PAGE, dim], [B, KV, PAGE, value_dim] */
    uint8_t *code;           /* [B, KV, PAGE / 16, dim up to 4, 16 keys, 4 channels]: 128 + k / step */
    float *step, *residual;  /* [B, KV, PAGE]: the copy's unit, and a bound on its error's norm */
    float *centre;           /* [B, KV, value_dim] */
    double *radius;          /* [B, KV]: every value lies within radius of the centre */
    double *longest;         /* [B, KV]: no key has a larger norm */
} Page;

typedef struct {
    int64_t batch, head, row; /* in elements; channels are contiguous */
} Strides;

typedef struct {
    int64_t batches, kv_heads, dim, value_dim, count, threads;
    Strides key_strides, value_strides;
    const Page *pages;
} Append;

typedef struct {
    int64_t batches, heads, kv_heads, queries, keys, dim, value_dim;
    int64_t window;             /* visible: 0 <= t < window */
    int64_t table_heads;        /* 1 or heads */
    int64_t table_length;       /* entries of a table row that stand for distances table_length - 1 … 0 */
    int64_t table_row;          /* stride between table rows: at least LANES more */
    int64_t holes;              /* whether a shift is -inf */
    int64_t threads;
    double tolerance, scale;
    const float *query;         /* [B, H, queries, dim]; the queries are the last of the positions 0 … keys - 1 */
    const double *query_gain;  /* [B, H, queries], or null for 1 */
    const float *gain, *shift;
    const uint8_t *visible;     /* [B, keys], or null for all */
    const Page *pages;
    int32_t *wait;              /* [B, H, 2]: steps still to go without bounds, and the last such number */
    float *out;                 /* [B, H, queries, value_dim] */
    double *mass, *error;       /* [B, H, queries] */
    double *read;
} Attend;

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec x) { *(loose *)p = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }
INLINE vec absolute(vec x) { return (vec)((uvec)x & 0x7fffffffu); }

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

/* exp for x <= 0, to 1.5 U (every float in [-87, 0] was tried); below -87 it stays exp(-87). */
INLINE vec exponential(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = larger(x, all(-87.0f));
    vec n = (x * 1.44269504088896341f + magic) - magic;
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uvec power = (((uvec)__builtin_convertvector(n, ivec)) + 127u) << 23;
    return p * (vec)power;
}

void scaleinv_exponential(const float *x, float *y, int64_t count) { /* for the tests; count is a multiple of LANES */
    for (int64_t i = 0; i < count; i += LANES) store(y + i, exponential(load(x + i)));
}

static int thread_number(void) {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static int team_size(void) {
#if defined(_OPENMP)
    return omp_get_num_threads();
#else
    return 1;
#endif
}

static void *room(int64_t bytes) { return aligned_alloc(64, ROUND_UP(MAX(bytes, 64), 64)); }

/* ---------------------------------------------------------------- appending */

static float up(double x) { return nextafterf((float)x, INFINITY); }

INLINE wide widen(const float *p) { return __builtin_convertvector(*(const half *)p, wide); }

INLINE double sum_wide(wide x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }

/* The norm of row - centre, or of row, rounded up. */
static double norm_from(const float *row, const float *centre, int64_t width) {
    wide squares = {0};
    int64_t k = 0;
    for (; k + 8 <= width; k += 8) {
        wide x = centre ? widen(row + k) - widen(centre + k) : widen(row + k);
        squares += x * x;
    }
    double sum = sum_wide(squares);
    for (; k < width; k++) {
        double x = centre ? (double)row[k] - centre[k] : row[k];
        sum += x * x;
    }
    return sqrt(sum) * (1 + 1e-9);
}

static int finite_row(const float *row, int64_t width) {
    float sum = 0; /* 0 unless one is infinite or NaN */
    for (int64_t k = 0; k < width; k++) sum += row[k] * 0.0f;
    return sum == 0;
}

INLINE float largest_channel(const float *row, int64_t width) {
    vec most = all(0);
    int64_t k = 0;
    for (; k + LANES <= width; k += LANES) most = larger(absolute(load(row + k)), most);
    float largest = max_lanes(most);
    for (; k < width; k++) largest = MAX(largest, fabsf(row[k]));
    return largest;
}

/* One key into the 8-bit copy: k ~ step * (code - 128), with the norm of what that leaves out. */
static void encode(const float *key, int64_t dim, uint8_t *code, float *step, float *residual) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float rounded[MAX_DIM], rest[MAX_DIM], largest = largest_channel(key, dim);
    uint8_t levels[MAX_DIM];
    float unit = largest > 1e-30f ? largest / 127 : 0, inverse = unit > 0 ? 127 / largest : 0;
    for (int64_t k = 0; k < dim; k++) rounded[k] = MAX(MIN((key[k] * inverse + magic) - magic, 127.0f), -127.0f);
    /* The product of 24 and 8 bits is exact in double; rounded to float32, the rest loses less than is added below. */
    for (int64_t k = 0; k < dim; k++) rest[k] = (float)(key[k] - (double)unit * rounded[k]);
    for (int64_t k = 0; k < dim; k++) levels[k] = (uint8_t)(128 + (int)rounded[k]);
    for (int64_t k = dim; k < ROUND_UP(dim, 4); k++) levels[k] = 128;
    for (int64_t k = 0; k < dim; k += 4) memcpy(code + k * LANES, levels + k, 4);
    *step = unit;
    *residual = up(norm_from(rest, 0, dim) * (1 + 1e-6) + FLUSHED);
}

/* A full page's centre becomes the mean of its values. */
static void close_page(const Page *page, int64_t pair, int64_t width) {
    const float *values = page->value + pair * PAGE * width;
    float *centre = page->centre + pair * width;
    memset(centre, 0, width * sizeof(float)); /* any centre is sound: float32 sums will do */
    for (int64_t j = 0; j < PAGE; j++)
        for (int64_t k = 0; k < width; k++) centre[k] += values[j * width + k] / PAGE;
    for (int64_t k = 0; k < width; k++) centre[k] = MAX(MIN(centre[k], FLT_MAX), -FLT_MAX);
    double radius = 0;
    for (int64_t j = 0; j < PAGE; j++) radius = MAX(radius, norm_from(values + j * width, centre, width));
    page->radius[pair] = radius;
}

INLINE int64_t first_channel(const Append *a, const Strides *strides, int64_t pair, int64_t j) {
    return pair / a->kv_heads * strides->batch + pair % a->kv_heads * strides->head + j * strides->row;
}

INLINE uint8_t *code_of(const Append *a, const Page *page, int64_t pair, int64_t slot) {
    return page->code + (pair * PAGE + slot / LANES * LANES) * ROUND_UP(a->dim, 4) + slot % LANES * 4;
}

static int finite_rows(const Append *a, const float *key, const float *value, int64_t pair, int64_t j) {
    return finite_row(key + first_channel(a, &a->key_strides, pair, j), a->dim) &&
           finite_row(value + first_channel(a, &a->value_strides, pair, j), a->value_dim);
}

static void append_row(const Append *a, const float *key, const float *value, int64_t pair, int64_t j) {
    const Page *page = a->pages + j / PAGE;
    int64_t slot = j % PAGE, row = pair * PAGE + slot;
    memcpy(page->key + row * a->dim, key, a->dim * sizeof(float));
    memcpy(page->value + row * a->value_dim, value, a->value_dim * sizeof(float));
    encode(key, a->dim, code_of(a, page, pair, slot), page->step + row, page->residual + row);
    page->radius[pair] = MAX(page->radius[pair], norm_from(value, 0, a->value_dim));
    page->longest[pair] = MAX(page->longest[pair], norm_from(key, 0, a->dim));
    if (slot == PAGE - 1) close_page(page, pair, a->value_dim);
}

/* A step has driven the place of the next token out of the cache: fetch it for all heads at once. */
static void fetch_place(const Append *a, int64_t pair, int64_t j) {
    const Page *page = a->pages + j / PAGE;
    int64_t slot = j % PAGE, row = pair * PAGE + slot;
    const uint8_t *code = code_of(a, page, pair, slot);
    for (int64_t k = 0; k < a->dim; k += 4) __builtin_prefetch(code + k * LANES, 1);
    for (int64_t k = 0; k < a->dim; k += 16) __builtin_prefetch(page->key + row * a->dim + k, 1);
    for (int64_t k = 0; k < a->value_dim; k += 16) __builtin_prefetch(page->value + row * a->value_dim + k, 1);
    __builtin_prefetch(page->step + row, 1), __builtin_prefetch(page->residual + row, 1);
}

/* Keys and values for the positions from start on: 0 when done; 2, and nothing is changed, where one is not finite. */
int scaleinv_append(const Append *a, int64_t start, const float *key, const float *value) {
    int64_t first = start / PAGE, end = start + a->count, pages = (end + PAGE - 1) / PAGE - first;
    int64_t pairs = a->batches * a->kv_heads, finite = 1;
    if (a->count == 1) { /* without a word to OpenMP, which costs as much as the rest */
        for (int64_t pair = 0; pair < pairs; pair++) fetch_place(a, pair, start);
        for (int64_t pair = 0; pair < pairs; pair++) finite &= finite_rows(a, key, value, pair, 0);
        if (!finite) return 2;
        for (int64_t pair = 0; pair < pairs; pair++)
            append_row(a, key + first_channel(a, &a->key_strides, pair, 0),
                       value + first_channel(a, &a->value_strides, pair, 0), pair, start);
        return 0;
    }
#pragma omp parallel for num_threads(a->threads) schedule(static) reduction(&& : finite) if (a->count > 64)
    for (int64_t row = 0; row < pairs * a->count; row++)
        finite = finite && finite_rows(a, key, value, row / a->count, row % a->count);
    if (!finite) return 2;
#pragma omp parallel for num_threads(a->threads) schedule(dynamic, 1) if (a->count > 64)
    for (int64_t task = 0; task < pairs * pages; task++) {
        int64_t page = first + task % pages, pair = task / pages;
        for (int64_t j = MAX(start, page * PAGE); j < MIN(end, (page + 1) * PAGE); j++)
            append_row(a, key + first_channel(a, &a->key_strides, pair, j - start),
                       value + first_channel(a, &a->value_strides, pair, j - start), pair, j);
    }
    return 0;
}

/* ---------------------------------------------------------------- a step */

/* A query head at one position. */
typedef struct {
    int64_t low, high;        /* the keys at visible distances */
    const float *gain, *shift;  /* tables, to be read at the key's place */
    double factor;            /* scale * c: logit = a * factor * (q . k) + m */
    double *query, norm;      /* [dim] */
    /* bounds; 0 where all is read */
    int bounded;
    int8_t *coarse, *fine;    /* [dim up to 4]: query ~ unit * (128 * coarse + fine) */
    int32_t coarse_bias, fine_bias;
    float unit;               /* of the query's codes, times factor */
    float key_width, step_width; /* half-width = |a| * (key_width * residual + step_width * step) */
    double top, total;        /* largest upper logit; estimate of the sum of all weights exp(logit - top) */
    float least, threshold;   /* upper weights below `least` are not sorted; keys below the threshold are not read */
    int whole, pending;       /* all keys are read; the row is not done */
} Row;

/* What a page has to say to a row. */
typedef struct {
    double upper;             /* sum of the upper weights of keys that were not read, relative to the row's top */
    double width;             /* largest half-width of a logit's interval */
    float page_top, page_sum; /* largest upper logit, sum of exp(upper - page_top) */
    int skipped;              /* every key is below `least` */
    double most, sum;         /* of the keys read: largest logit, PART * sum of exp(logit - most) */
    double magnitude, gain;   /* largest |a S| + |m|, largest |a| */
    int64_t count;
} Part;

typedef struct {
    const Attend *c;
    int64_t rows, pages, width; /* rows of one key head; pages of the cache; width of a row of upper weights */
    Row *row;
    Part *part;               /* [rows of all, pages] */
    float *value;             /* [rows of all, pages, value_dim] */
    float *upper;             /* [rows of all, width] */
    double *bins;             /* [threads, rows of all, 2, BINS]: sums and counts */
    int64_t pending[ATTEMPTS]; /* rows that are not done after each */
    double *queries;          /* room for the rows' queries and their codes */
    int8_t *codes;
} Step;

/* The query in 16 bits, and how wide that makes the intervals. */
static void quantise_query(const Attend *c, Row *r, int64_t pair) {
    double largest = 0, norm = 0, rest = 0;
    for (int64_t k = 0; k < c->dim; k++) largest = MAX(largest, fabs(r->query[k])), norm += r->query[k] * r->query[k];
    double unit = largest / 16256, reach = 127 * sqrt((double)c->dim), factor = fabs(r->factor);
    r->coarse_bias = r->fine_bias = 0;
    for (int64_t k = 0; k < ROUND_UP(c->dim, 4); k++) {
        double x = k < c->dim ? r->query[k] : 0;
        int level = unit > 0 ? (int)rint(x / unit) : 0, coarse = (level + 64) >> 7;
        r->coarse[k] = (int8_t)coarse, r->fine[k] = (int8_t)(level - 128 * coarse);
        r->coarse_bias += 128 * r->coarse[k], r->fine_bias += 128 * r->fine[k];
        rest += (x - unit * level) * (x - unit * level);
    }
    r->unit = (float)(r->factor * unit);
    norm = sqrt(norm), rest = sqrt(rest) + 1e-15 * norm; /* of x - unit * level, in double */
    r->key_width = (float)(factor * (norm + FLUSHED) * (1 + WIDTH_SLACK));
    r->step_width = (float)(factor * (rest + FLUSHED) * reach * (1 + WIDTH_SLACK));
    /* Outside of these, float32 could under- or overflow on the way to a bound, or a gain below its range matter. */
    double longest = 0;
    for (int64_t n = 0; n * PAGE < r->high; n++) longest = MAX(longest, c->pages[n].longest[pair]);
    int safe = fabs(r->factor * unit) > 1e-25 && r->key_width < 1e25f && r->key_width * longest < 1e30;
    if (!safe && norm > 0) r->bounded = 0;
}

/* sums[key] = coarse and fine integer products of a block of 16 keys with a query, without the keys' offset of 128. */
INLINE void products(const uint8_t *code, const int8_t *coarse, const int8_t *fine, int64_t dim, ivec *high,
                     ivec *low) {
#if defined(__AVX512VNNI__)
    __m512i h0 = _mm512_setzero_si512(), l0 = h0, h1 = h0, l1 = h0;
    int64_t k = 0;
    for (; k + 8 <= dim; k += 8) {
        __m512i x0 = _mm512_loadu_si512(code + k * LANES), x1 = _mm512_loadu_si512(code + (k + 4) * LANES);
        int32_t a0, a1, b0, b1;
        memcpy(&a0, coarse + k, 4), memcpy(&a1, coarse + k + 4, 4);
        memcpy(&b0, fine + k, 4), memcpy(&b1, fine + k + 4, 4);
        h0 = _mm512_dpbusd_epi32(h0, x0, _mm512_set1_epi32(a0));
        l0 = _mm512_dpbusd_epi32(l0, x0, _mm512_set1_epi32(b0));
        h1 = _mm512_dpbusd_epi32(h1, x1, _mm512_set1_epi32(a1));
        l1 = _mm512_dpbusd_epi32(l1, x1, _mm512_set1_epi32(b1));
    }
    for (; k < dim; k += 4) {
        __m512i x0 = _mm512_loadu_si512(code + k * LANES);
        int32_t a0, b0;
        memcpy(&a0, coarse + k, 4), memcpy(&b0, fine + k, 4);
        h0 = _mm512_dpbusd_epi32(h0, x0, _mm512_set1_epi32(a0));
        l0 = _mm512_dpbusd_epi32(l0, x0, _mm512_set1_epi32(b0));
    }
    *high = (ivec)_mm512_add_epi32(h0, h1), *low = (ivec)_mm512_add_epi32(l0, l1);
#elif defined(__AVX2__)
    /* maddubs saturates at 2^15: signed keys, |key| * (sign of key * query), stay below it. */
    const __m256i offset = _mm256_set1_epi8((char)128), ones = _mm256_set1_epi16(1);
    for (int part = 0; part < 2; part++) {
        __m256i h = _mm256_setzero_si256(), l = h;
        for (int64_t k = 0; k < dim; k += 4) {
            int32_t a, b;
            memcpy(&a, coarse + k, 4), memcpy(&b, fine + k, 4);
            __m256i x = _mm256_loadu_si256((const __m256i *)(code + k * LANES + part * 32));
            x = _mm256_xor_si256(x, offset);
            __m256i size = _mm256_abs_epi8(x);
            __m256i p = _mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_set1_epi32(a), x));
            __m256i q = _mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_set1_epi32(b), x));
            h = _mm256_add_epi32(h, _mm256_madd_epi16(p, ones)), l = _mm256_add_epi32(l, _mm256_madd_epi16(q, ones));
        }
        memcpy((int32_t *)high + part * 8, &h, 32), memcpy((int32_t *)low + part * 8, &l, 32);
    }
#else
    int32_t h[LANES] = {0}, l[LANES] = {0};
    for (int64_t k = 0; k < dim; k += 4, code += 4 * LANES)
        for (int n = 0; n < LANES; n++)
            for (int i = 0; i < 4; i++) {
                int x = (int)code[n * 4 + i] - 128;
                h[n] += x * coarse[k + i], l[n] += x * fine[k + i];
            }
    memcpy(high, h, sizeof(h)), memcpy(low, l, sizeof(l));
#endif
}

#if defined(__AVX512VNNI__)
#define OFFSET 1 /* products() leaves the keys' offset in */
#else
#define OFFSET 0
#endif

/* The bin of a weight, and the least weight of a bin. */
INLINE int64_t bin_of(float weight) {
    uint32_t bits;
    memcpy(&bits, &weight, 4);
    return bits >> 20;
}

INLINE float weight_of(int64_t bin) {
    uint32_t bits = (uint32_t)bin << 20;
    float weight;
    memcpy(&weight, &bits, 4);
    return weight;
}

INLINE uint32_t bits_of(ivec mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
    uint32_t bits = 0;
    for (int n = 0; n < LANES; n++) bits |= (uint32_t)(mask[n] & 1) << n;
    return bits;
#endif
}

/* [from, to): whole blocks of 16 that cover what the row may see of page n; 0 if that is nothing. */
INLINE int page_keys(const Row *r, int64_t n, int64_t *from, int64_t *to) {
    *from = MAX(r->low / LANES * LANES, n * PAGE);
    *to = MIN(ROUND_UP(r->high, LANES), (n + 1) * PAGE);
    return *from < *to;
}

/* Upper logits of the 16 keys from j on; *width is raised to their largest half-width. */
INLINE vec upper_logits(const Attend *c, const Row *r, const Page *page, int64_t b, int64_t pair, int64_t j,
                        vec *width) {
    int64_t dim = ROUND_UP(c->dim, 4), slot = j % PAGE, at = pair * PAGE + slot;
    ivec high, low;
    products(page->code + at * dim, r->coarse, r->fine, dim, &high, &low);
    if (OFFSET) high -= r->coarse_bias, low -= r->fine_bias;
    vec product = __builtin_convertvector(high, vec) * 128.0f + __builtin_convertvector(low, vec); /* below 2^24 each */
    vec step = load(page->step + at), a = load(r->gain + j), m = load(r->shift + j);
    vec logit = product * step * r->unit * a;
    vec half_width = absolute(a) * (r->key_width * load(page->residual + at) + r->step_width * step + 1e-30f) +
                     SCORE_SLACK * (absolute(logit) + absolute(m));
    vec upper = logit + m + half_width;
    ivec hidden = m == -INFINITY;
    if (j < r->low || j + LANES > r->high || c->visible) {
        for (int n = 0; n < LANES; n++)
            if (j + n < r->low || j + n >= r->high || (c->visible && !c->visible[b * c->keys + j + n])) hidden[n] = -1;
    }
    *width = larger(choose(hidden, all(0), half_width), *width);
    return choose(hidden, all(-INFINITY), upper);
}

/* Pass 1: upper logits of one page, for all rows of its key head. */
static void bound_page(const Step *s, int64_t pair, int64_t n) {
    const Attend *c = s->c;
    int64_t b = pair / c->kv_heads;
    for (int64_t i = 0; i < s->rows; i++) {
        int64_t at = pair * s->rows + i, from, to;
        const Row *r = s->row + at;
        Part *part = s->part + at * s->pages + n;
        float *upper = s->upper + at * s->width;
        *part = (Part){.page_top = -INFINITY};
        if (!r->bounded || !page_keys(r, n, &from, &to)) continue;
        vec top = all(-INFINITY), width = all(0), sum = all(0);
        for (int64_t j = from; j < to; j += LANES) {
            vec x = upper_logits(c, r, c->pages + n, b, pair, j, &width);
            x = choose(x == x, x, all(INFINITY));
            store(upper + j, x);
            top = larger(x, top);
        }
        part->page_top = max_lanes(top), part->width = max_lanes(width);
        for (int64_t j = from; j < to; j += LANES) sum += exponential(load(upper + j) - part->page_top);
        part->page_sum = sum_lanes(sum);
    }
}

/* The row's largest upper logit and an estimate of its total weight; a row without finite bounds reads everything. */
static void survey(const Step *s, int64_t at) {
    Row *r = s->row + at;
    const Part *part = s->part + at * s->pages;
    float top = -INFINITY;
    for (int64_t n = 0; n < s->pages; n++) top = MAX(top, part[n].page_top);
    r->top = top, r->total = 0;
    for (int64_t n = 0; n < s->pages && fabsf(top) < 1e37f; n++)
        if (part[n].page_top > -INFINITY) r->total += part[n].page_sum * exp(part[n].page_top - r->top - part[n].width);
    if (!(r->total > 1e-30)) r->bounded = 0;
    r->least = weight_of(bin_of((float)MAX(0.25 * s->c->tolerance * r->total / (r->high - r->low), 2.4e-38)));
}

/* Pass 2: upper logits become upper weights, and those that matter are sorted into bins; bin 0 has all others. */
static void weigh_page(const Step *s, double *bins, int64_t pair, int64_t n) {
    for (int64_t i = 0; i < s->rows; i++) {
        int64_t at = pair * s->rows + i, from, to;
        const Row *r = s->row + at;
        Part *part = s->part + at * s->pages + n;
        if (!r->bounded || !page_keys(r, n, &from, &to)) continue;
        double *sums = bins + at * 2 * BINS, *counts = sums + BINS;
        part->skipped = part->page_top < r->top + logf(r->least) - 0.01;
        if (part->skipped) {
            part->upper = part->page_sum > 0 ? part->page_sum * exp(part->page_top - r->top) : 0;
            sums[0] += part->upper;
            continue;
        }
        float *upper = s->upper + at * s->width, top = (float)r->top;
        vec rest = all(0);
        for (int64_t j = from; j < to; j += LANES) {
            vec x = load(upper + j), weight = choose(x == -INFINITY, all(0), exponential(x - top));
            store(upper + j, weight);
            ivec small = weight < r->least;
            rest += choose(small, weight, all(0));
            for (uint32_t large = ~bits_of(small) & 0xffff; large; large &= large - 1) {
                float w = upper[j + __builtin_ctz(large)];
                sums[bin_of(w)] += w, counts[bin_of(w)] += 1;
            }
        }
        sums[0] += sum_lanes(rest);
    }
}

/* The least threshold below which the upper weights sum to at most `allowed`. */
static void choose_threshold(const Step *s, int64_t at, double allowed) {
    const Attend *c = s->c;
    Row *r = s->row + at;
    int64_t stride = c->batches * c->heads * c->queries * 2 * BINS, bin = 0, team = team_size();
    double unread = 0, reads = 0;
    for (; bin < BINS; bin++) {
        const double *sums = s->bins + at * 2 * BINS + bin;
        for (int64_t t = 0; t < team; t++) unread += sums[t * stride];
        if (unread > allowed) break;
    }
    for (int64_t higher = MAX(bin, 1); higher < BINS; higher++)
        for (int64_t t = 0; t < team; t++) reads += s->bins[t * stride + at * 2 * BINS + BINS + higher];
    r->threshold = bin < BINS ? weight_of(bin) : 2;
    if (bin == 0 || reads > DENSE * (r->high - r->low)) r->whole = 1;
}

/* Places in the page of the keys that a row reads; what they leave behind goes into the part's upper weight. */
static int64_t select_keys(const Step *s, const Row *r, Part *part, int64_t at, int64_t b, int64_t n, int32_t *list) {
    const Attend *c = s->c;
    int64_t from, to, count = 0;
    if (!page_keys(r, n, &from, &to)) return 0;
    if (r->whole) {
        part->upper = 0;
        for (int64_t j = MAX(from, r->low); j < MIN(to, r->high); j++)
            if (!c->visible || c->visible[b * c->keys + j]) list[count++] = (int32_t)(j - n * PAGE);
        return count;
    }
    if (part->skipped) return 0;
    const float *upper = s->upper + at * s->width;
    vec rest = all(0);
    for (int64_t j = from; j < to; j += LANES) {
        vec weight = load(upper + j);
        ivec small = weight < r->threshold;
        rest += choose(small, weight, all(0));
        for (uint32_t large = ~bits_of(small) & 0xffff; large; large &= large - 1)
            list[count++] = (int32_t)(j - n * PAGE + __builtin_ctz(large));
    }
    part->upper = sum_lanes(rest);
    return count;
}

INLINE double dot(const double *query, const float *key, int64_t dim) {
    wide sum[4] = {{0}};
    int64_t k = 0;
    for (; k + 32 <= dim; k += 32)
        for (int v = 0; v < 4; v++) sum[v] += *(const wide *)(query + k + v * 8) * widen(key + k + v * 8);
    double total = sum_wide((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; k < dim; k++) total += query[k] * key[k];
    return total;
}

INLINE void fetch(const float *row, int64_t width) {
    for (int64_t k = 0; k < width; k += 16) __builtin_prefetch(row + k);
}

/* out += the weighted values of the listed keys, four at a time, so that a sum is rounded count / 4 + 4 times. */
static void add_values(float *out, const float *values, int64_t width, const int32_t *list, const float *weights,
                       int64_t count) {
    for (int64_t i = 0; i < count; i += 4) {
        const float *v[4];
        float w[4];
        for (int n = 0; n < 4; n++) {
            v[n] = values + list[MIN(i + n, count - 1)] * width, w[n] = i + n < count ? weights[i + n] : 0;
        }
        int64_t k = 0;
        for (; k + LANES <= width; k += LANES)
            store(out + k, load(out + k) + ((w[0] * load(v[0] + k) + w[1] * load(v[1] + k)) +
                                            (w[2] * load(v[2] + k) + w[3] * load(v[3] + k))));
        for (; k < width; k++) out[k] += (w[0] * v[0][k] + w[1] * v[1][k]) + (w[2] * v[2][k] + w[3] * v[3][k]);
    }
}

typedef struct {
    int32_t list[PAGE];
    double logits[PAGE];
    float weights[PAGE + LANES];
} Scratch;

/* Pass 3: the keys and values of one page that each row of its key head reads. Weights are in units of PART. */
static void read_page(const Step *s, Scratch *x, int64_t pair, int64_t n) {
    const Attend *c = s->c;
    const Page *page = c->pages + n;
    const float *keys = page->key + pair * PAGE * c->dim, *values = page->value + pair * PAGE * c->value_dim;
    for (int64_t i = 0; i < s->rows; i++) {
        int64_t at = pair * s->rows + i;
        const Row *r = s->row + at;
        if (!r->pending) continue;
        Part *part = s->part + at * s->pages + n;
        int64_t count = select_keys(s, r, part, at, pair / c->kv_heads, n, x->list);
        part->count = count, part->most = -INFINITY, part->sum = part->magnitude = part->gain = 0;
        for (int64_t l = 0; l < MIN(AHEAD, count); l++) fetch(keys + x->list[l] * c->dim, c->dim);
        for (int64_t l = 0; l < count; l++) {
            int64_t j = n * PAGE + x->list[l];
            if (l + AHEAD < count) fetch(keys + x->list[l + AHEAD] * c->dim, c->dim);
            fetch(values + x->list[l] * c->value_dim, c->value_dim);
            double score = r->gain[j] * (r->factor * dot(r->query, keys + x->list[l] * c->dim, c->dim));
            x->logits[l] = score + r->shift[j];
            if (x->logits[l] == -INFINITY) continue;
            part->magnitude = MAX(part->magnitude, fabs(score) + fabs(r->shift[j]));
            part->gain = MAX(part->gain, fabs(r->gain[j]));
            part->most = MAX(part->most, x->logits[l]);
        }
        if (part->most == -INFINITY) continue;
        for (int64_t l = 0; l < count; l++) x->weights[l] = (float)MAX(x->logits[l] - part->most, -1e4);
        for (int64_t l = count; l < ROUND_UP(count, LANES); l++) x->weights[l] = -1e4f;
        for (int64_t l = 0; l < count; l += LANES) {
            vec y = load(x->weights + l);
            store(x->weights + l, choose(y < -79.0f, all(0), exponential(y) * PART)); /* no subnormal weights */
        }
        for (int64_t l = 0; l < count; l++) part->sum += x->weights[l];
        float *out = s->value + (at * s->pages + n) * c->value_dim;
        memset(out, 0, c->value_dim * sizeof(float));
        add_values(out, values, c->value_dim, x->list, x->weights, count);
    }
}

static int64_t visible_count(const Attend *c, const Row *r, int64_t b) {
    if (!c->visible && !c->holes) return r->high - r->low;
    int64_t count = 0;
    for (int64_t j = r->low; j < r->high; j++)
        count += (!c->visible || c->visible[b * c->keys + j]) && r->shift[j] > -INFINITY;
    return count;
}

/* What the unread keys of a page weigh, at most and at least, relative to exp(most) like the weights that were read. */
INLINE void unread_weight(const Row *r, const Part *part, double relative, double *upper, double *floor) {
    *upper = r->whole ? 0 : part->upper * relative * (1 + SUM_SLACK);
    *floor = MAX(0, *upper * (1 - 3 * SUM_SLACK) * exp(-2.00001 * part->width) - PAGE * TINY * relative);
}

/* Output and certificate of a row from its parts; 0 if it must read more. The inequalities are those of bounds.py. */
static int finish(const Step *s, int64_t at, double *sum) {
    const Attend *c = s->c;
    Row *r = s->row + at;
    const Part *part = s->part + at * s->pages;
    int64_t pair = at / s->rows, width = c->value_dim, count = 0, most_read = 0;
    double most = -INFINITY, total = 0, unread = 0, magnitude = 0, reach = 0, slip = 0;
    for (int64_t n = 0; n < s->pages; n++) {
        most = MAX(most, part[n].most), magnitude = MAX(magnitude, part[n].magnitude);
        count += part[n].count, most_read = MAX(most_read, part[n].count);
        double longest = c->pages[n].longest[pair];
        slip = MAX(slip, part[n].gain * (r->norm * longest * (c->dim + 8) * 2.3e-16 + (r->norm + longest) * FLUSHED) +
                             FLT_MIN * r->norm * longest);
    }
    memset(sum, 0, width * sizeof(double));
    memset(c->out + at * width, 0, width * sizeof(float));
    c->mass[at] = c->error[at] = 0, c->read[at] = 1;
    if (most == -INFINITY && r->whole) return 1; /* the query sees nothing */
    double relative = PART * exp(r->top - most); /* upper weights are relative to `top`, read ones to `most` */
    for (int64_t n = 0; n < s->pages; n++) {
        if (part[n].most > -INFINITY) {
            const float *value = s->value + (at * s->pages + n) * width;
            double factor = exp(part[n].most - most);
            total += factor * part[n].sum;
            for (int64_t k = 0; k < width; k++) sum[k] += factor * value[k];
        }
        if (!r->whole) unread += part[n].upper;
    }
    slip *= fabs(r->factor); /* of a score summed in double; subnormal channels and gains may count as 0 */
    double weight_error = expm1(2 * U * magnitude + slip) + WEIGHT_SLACK, sum_error = (most_read / 4 + 16) * U;
    double certain = total * (1 - weight_error); /* no more than the exact weight of what was read */
    unread = r->whole ? 0 : unread * relative * (1 + SUM_SLACK);
    double mass = unread > 0 ? unread / (certain + unread) : 0;
    if (!r->whole && !(certain > 0 && mass <= c->tolerance)) {
        r->total = certain > 0 ? certain / relative : 0;
        return 0;
    }
    /* What was not read enters as the centres of its pages, with the middle of what it may weigh. */
    double missing = 0, off = 0, seen = total;
    for (int64_t n = 0; n < s->pages; n++) {
        const float *centre = c->pages[n].centre + pair * width;
        double weight, floor;
        unread_weight(r, part + n, relative, &weight, &floor);
        if (part[n].count || weight > 0) reach = MAX(reach, norm_from(centre, 0, width) + c->pages[n].radius[pair]);
        if (!(weight > 0)) continue;
        double middle = (weight + floor) / 2;
        total += middle, certain += floor, missing += weight * c->pages[n].radius[pair];
        for (int64_t k = 0; k < width; k++) sum[k] += middle * centre[k];
    }
    float *out = c->out + at * width;
    for (int64_t k = 0; k < width; k++) out[k] = (float)MAX(MIN(sum[k] / total, FLT_MAX), -FLT_MAX);
    for (int64_t n = 0; n < s->pages && total > seen; n++) {
        double weight, floor;
        unread_weight(r, part + n, relative, &weight, &floor);
        if (!(weight > 0)) continue;
        off += (weight - floor) / 2 * norm_from(out, c->pages[n].centre + pair * width, width);
    }
    /* Weights off by e of theirs move the output by 2 e V; the sums' rounding is of `total`, the error's unit less. */
    double rounding = 2 * weight_error * reach + 3 * sum_error * reach * (total / certain);
    double error = (missing + off) / certain + rounding, most_possible = norm_from(out, 0, width) + reach;
    if (!(certain > 0 && error < most_possible)) error = most_possible;
    c->mass[at] = mass, c->error[at] = error + FLUSHED + count * sqrt((double)width) * 1e-34; /* subnormal products */
    c->read[at] = r->whole ? 1 : (double)count / visible_count(c, r, pair / c->kv_heads);
    return 1;
}

static void start_row(const Step *s, int64_t at) {
    const Attend *c = s->c;
    Row *r = s->row + at;
    int64_t dim = ROUND_UP(c->dim, 16), h = at / c->queries % c->heads, i = at % c->queries;
    int64_t position = c->keys - c->queries + i, table = (c->table_heads > 1 ? h : 0) * c->table_row;
    r->low = MAX(position + 1 - c->window, 0), r->high = position + 1;
    r->gain = c->gain + table + c->table_length - 1 - position;
    r->shift = c->shift + table + c->table_length - 1 - position;
    r->factor = c->scale * (c->query_gain ? c->query_gain[at] : 1);
    r->query = s->queries + at * dim;
    r->coarse = s->codes + at * 2 * dim, r->fine = r->coarse + dim;
    for (int64_t k = 0; k < c->dim; k++) r->query[k] = c->query[at * c->dim + k];
    r->norm = norm_from(c->query + at * c->dim, 0, c->dim);
    int32_t *wait = c->wait + at / c->queries * 2;
    r->bounded = c->tolerance > 0 && wait[0] == 0;
    if (r->bounded) quantise_query(c, r, at / s->rows);
    r->pending = 1;
}

/* A head that could not save anything is left alone for a while, each time for twice as long. */
static void learn(const Step *s, int64_t head) {
    const Attend *c = s->c;
    int32_t *wait = c->wait + head * 2;
    int whole = 1;
    for (int64_t i = 0; i < c->queries; i++) whole &= s->row[head * c->queries + i].whole;
    if (wait[0] > 0) wait[0]--;
    else if (whole && c->tolerance > 0) wait[0] = wait[1] = MIN(2 * wait[1] + 1, LONGEST_WAIT);
    else wait[1] = 0;
}

static void run(Step *s, Scratch *scratch, double *sum, int thread) {
    const Attend *c = s->c;
    int64_t pairs = c->batches * c->kv_heads, rows = pairs * s->rows;
#pragma omp for schedule(static)
    for (int64_t at = 0; at < rows; at++) start_row(s, at);
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t pair = 0; pair < pairs; pair++)
        for (int64_t n = 0; n < s->pages; n++) bound_page(s, pair, n);
#pragma omp for schedule(static)
    for (int64_t at = 0; at < rows; at++) survey(s, at);
    double *bins = s->bins + thread * rows * 2 * BINS;
    memset(bins, 0, rows * 2 * BINS * sizeof(double));
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t pair = 0; pair < pairs; pair++)
        for (int64_t n = 0; n < s->pages; n++) weigh_page(s, bins, pair, n);
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
#pragma omp for schedule(static)
        for (int64_t at = 0; at < rows; at++) {
            Row *r = s->row + at;
            if (!r->pending) continue;
            r->whole = !r->bounded || attempt == ATTEMPTS - 1;
            double share = attempt ? 0.9999 * c->tolerance / (1 - c->tolerance) : 0.98 * c->tolerance;
            if (!r->whole) choose_threshold(s, at, share * r->total);
        }
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t pair = 0; pair < pairs; pair++)
            for (int64_t n = 0; n < s->pages; n++) read_page(s, scratch, pair, n);
#pragma omp for schedule(dynamic, 1)
        for (int64_t at = 0; at < rows; at++) {
            if (!s->row[at].pending) continue;
            s->row[at].pending = !finish(s, at, sum);
            if (s->row[at].pending) {
#pragma omp atomic
                s->pending[attempt]++;
            }
        }
        if (!s->pending[attempt]) break;
    }
#pragma omp for schedule(static)
    for (int64_t head = 0; head < c->batches * c->heads; head++) learn(s, head);
}

int scaleinv_attend(const Attend *c) {
    int64_t rows = c->batches * c->heads * c->queries, pages = (c->keys + PAGE - 1) / PAGE, failed = 0;
    int64_t dim = ROUND_UP(c->dim, 16);
    Step s = {.c = c, .pages = pages, .rows = c->heads / c->kv_heads * c->queries, .width = pages * PAGE};
    s.row = room(rows * sizeof(Row)), s.part = room(rows * pages * sizeof(Part));
    s.value = room(rows * pages * c->value_dim * sizeof(float)), s.upper = room(rows * s.width * sizeof(float));
    s.bins = room(c->threads * rows * 2 * BINS * sizeof(double));
    s.queries = room(rows * dim * sizeof(double)), s.codes = room(rows * 2 * dim);
    failed = !s.row || !s.part || !s.value || !s.upper || !s.bins || !s.queries || !s.codes;
#pragma omp parallel num_threads(c->threads) if (!failed && rows * c->keys * c->dim > SMALL)
    {
        Scratch *scratch = room(sizeof(Scratch));
        double *sum = room(c->value_dim * sizeof(double));
        if (!scratch || !sum) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) run(&s, scratch, sum, thread_number());
        free(scratch), free(sum);
    }
    free(s.row), free(s.part), free(s.value), free(s.upper), free(s.bins), free(s.queries), free(s.codes);
    return (int)failed;
}

/* What this build is made of, for the caller to check: the keys of a page, and the bytes of the structures. */
void scaleinv_certified_build(int64_t *page, int64_t *append_bytes, int64_t *attend_bytes) {
    *page = PAGE, *append_bytes = (int64_t)sizeof(Append), *attend_bytes = (int64_t)sizeof(Attend);
}
