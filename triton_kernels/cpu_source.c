/* The correction op on the CPU: gather, un-rope, add the delta, rope, scatter; and the reading half of it alone. C11 and
 * POSIX threads, no other library.
 *
 * A task is one layer of a block of rows. Blocks are small, so that their fp32 rows stay in the cache between the
 * steps; tasks go layer by layer, so that a layer's factors do too. Matrix products use AVX512-BF16 where the compiler
 * may (bf16 pools), GCC's vector extension otherwise, which every GCC and Clang lowers to what the machine has.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define HAS_BF16_PRODUCTS 1
#else
#define HAS_BF16_PRODUCTS 0
#endif

enum { BLOCK = 16, PANEL = 32, TILE = 8 };
enum { BF16 = 0, FP32 = 1 };
enum { MOVE = 0, LOW_RANK = 1, AFFINE = 2 };

/* Rows that share one delta. Rotations are [rows][2][half], cosines then sines. Packed matrices are described at
 * `product`; their layers are `*_stride` elements apart. */
typedef struct {
    int64_t rows, kind, moved;
    const int64_t *source, *target;
    const float *leave, *arrive, *shift;
    /* LOW_RANK, K then V: left factors [L][*][rank], whose rows are numbered by `at`, and right ones packed, [rank][D]. */
    const int64_t *at;
    const void *left[2], *right[2];
    int64_t left_stride[2], right_stride[2], left_rank[2];
    /* AFFINE: project packed [2D][decays * rank], shift [L][decays * rank], fade [rows][decays + means], and
     * weight with bias below it packed, [rank + means][2D]. */
    const void *project, *weight;
    const float *shift_z, *fade;
    int64_t project_stride, weight_stride, rank, decays, means;
} group_t;

/* A pool: one buffer a layer of K and of V, [slots][heads][dim], and how its keys are roped. */
typedef struct {
    void *const *k, *const *v;
    int64_t layers, heads, dim, rotary, neox, dtype;
} shape_t;

typedef struct {
    shape_t shape;
    int64_t products;
    const group_t *groups;
    int64_t count, blocks, widest;
    atomic_llong next;
    atomic_int broken;
} job_t;

static inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint16_t to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static void load(const void *buffer, int64_t dtype, int64_t at, int64_t n, float *restrict out) {
    if (dtype == FP32) {
        memcpy(out, (const float *)buffer + at, (size_t)n * sizeof(float));
        return;
    }
    const uint16_t *in = (const uint16_t *)buffer + at;
    for (int64_t i = 0; i < n; ++i) out[i] = from_bf16(in[i]);
}

static void round_bf16(const float *restrict in, int64_t n, uint16_t *restrict out) {
    int64_t i = 0;
#if HAS_BF16_PRODUCTS
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(out + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(in + i)));
#endif
    for (; i < n; ++i) out[i] = to_bf16(in[i]);
}

/* Stores a row; returns 0 if every value is finite, NaN or not 0 otherwise. */
static float store(void *buffer, int64_t dtype, int64_t at, int64_t n, const float *restrict in) {
    float poison[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; ++j) poison[j] += in[i + j] * 0.0f;
    for (; i < n; ++i) poison[0] += in[i] * 0.0f;
    for (int j = 1; j < 16; ++j) poison[0] += poison[j];
    if (dtype == FP32)
        memcpy((float *)buffer + at, in, (size_t)n * sizeof(float));
    else
        round_bf16(in, n, (uint16_t *)buffer + at);
    return poison[0];
}

/* Multiplies each pair of every head by cos + i sin, in place. */
static void turn(const shape_t *shape, float *restrict x, const float *restrict rotation) {
    const int64_t half = shape->rotary / 2;
    const float *cosine = rotation, *sine = rotation + half;
    for (int64_t h = 0; h < shape->heads; ++h, x += shape->dim) {
        if (shape->neox) {
            float *restrict y = x + half;
            for (int64_t i = 0; i < half; ++i) {
                const float real = x[i], imaginary = y[i];
                x[i] = real * cosine[i] - imaginary * sine[i];
                y[i] = imaginary * cosine[i] + real * sine[i];
            }
        } else {
            for (int64_t i = 0; i < half; ++i) {
                const float real = x[2 * i], imaginary = x[2 * i + 1];
                x[2 * i] = real * cosine[i] - imaginary * sine[i];
                x[2 * i + 1] = imaginary * cosine[i] + real * sine[i];
            }
        }
    }
}

typedef float vector_t __attribute__((vector_size(64), aligned(4)));

/* c [TILE][PANEL] += a [TILE][depth] @ b [depth][PANEL], fp32. */
static void tile_fp32(const float *a, int64_t lda, const float *b, int64_t depth, float *c, int64_t ldc) {
    enum { ROWS = 4 };
    for (int part = 0; part < TILE; part += ROWS) {
        vector_t sum[ROWS][2];
        for (int i = 0; i < ROWS; ++i)
            for (int j = 0; j < 2; ++j) sum[i][j] = *(const vector_t *)(c + (part + i) * ldc + 16 * j);
        for (int64_t p = 0; p < depth; ++p) {
            const vector_t low = *(const vector_t *)(b + p * PANEL), high = *(const vector_t *)(b + p * PANEL + 16);
            for (int i = 0; i < ROWS; ++i) {
                const float x = a[(part + i) * lda + p];
                sum[i][0] += x * low;
                sum[i][1] += x * high;
            }
        }
        for (int i = 0; i < ROWS; ++i)
            for (int j = 0; j < 2; ++j) *(vector_t *)(c + (part + i) * ldc + 16 * j) = sum[i][j];
    }
}

#if HAS_BF16_PRODUCTS
/* The same of bf16 factors, whose depth lies in pairs: a [TILE][2 pairs], b [pairs][PANEL][2]. */
static void tile_bf16(const uint16_t *a, int64_t lda, const uint16_t *b, int64_t pairs, float *c, int64_t ldc) {
    __m512 sum[TILE][2];
    for (int i = 0; i < TILE; ++i)
        for (int j = 0; j < 2; ++j) sum[i][j] = _mm512_loadu_ps(c + i * ldc + 16 * j);
    for (int64_t p = 0; p < pairs; ++p) {
        const __m512bh low = (__m512bh)_mm512_loadu_si512(b + p * 2 * PANEL);
        const __m512bh high = (__m512bh)_mm512_loadu_si512(b + p * 2 * PANEL + PANEL);
        for (int i = 0; i < TILE; ++i) {
            int32_t pair;
            memcpy(&pair, a + i * lda + 2 * p, 4);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], x, low);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], x, high);
        }
    }
    for (int i = 0; i < TILE; ++i)
        for (int j = 0; j < 2; ++j) _mm512_storeu_ps(c + i * ldc + 16 * j, sum[i][j]);
}
#endif

/* c [BLOCK][columns] += a [BLOCK][depth] @ b. `b` is packed in panels of PANEL columns, each [depth][PANEL], with the
 * rows interleaved in pairs for bf16; columns are padded to whole panels and the depth to an even number with zeros. */
static void product(const job_t *job, const void *a, int64_t lda, const void *b, int64_t depth, float *c, int64_t ldc,
                    int64_t columns) {
    const int64_t even = (depth + 1) / 2 * 2;
    (void)job;
    for (int64_t panel = 0; panel * PANEL < columns; ++panel)
        for (int64_t row = 0; row < BLOCK; row += TILE) {
            float *out = c + row * ldc + panel * PANEL;
#if HAS_BF16_PRODUCTS
            if (job->products == BF16) {
                tile_bf16((const uint16_t *)a + row * lda, lda, (const uint16_t *)b + panel * PANEL * even, even / 2,
                          out, ldc);
                continue;
            }
#endif
            tile_fp32((const float *)a + row * lda, lda, (const float *)b + panel * PANEL * even, even, out, ldc);
        }
}

static int64_t padded(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

static int64_t item(const job_t *job) { return job->products == BF16 ? 2 : 4; }

static const void *shifted(const job_t *job, const void *base, int64_t elements) {
    return (const char *)base + elements * item(job);
}

/* A row of factors for `product`, from fp32. */
static void put_factors(const job_t *job, const float *in, int64_t n, void *out, int64_t at) {
    if (job->products == BF16)
        round_bf16(in, n, (uint16_t *)out + at);
    else
        memcpy((float *)out + at, in, (size_t)n * sizeof(float));
}

/* Scratch of one thread: rows [BLOCK][K, then V, padded], features and factors [BLOCK][widest]. */
typedef struct {
    float *rows, *features;
    void *factors;
    int64_t wide;
} scratch_t;

static void add_low_rank(const job_t *job, const group_t *g, int64_t layer, int64_t first, int64_t n, scratch_t *s) {
    const int64_t width = job->shape.heads * job->shape.dim;
    for (int part = 0; part < 2; ++part) {
        const int64_t rank = g->left_rank[part], bytes = rank * item(job);
        const void *left = shifted(job, g->left[part], layer * g->left_stride[part]);
        for (int64_t i = 0; i < n; ++i) {
            char *row = (char *)s->factors + i * job->widest * item(job);
            memcpy(row, shifted(job, left, g->at[first + i] * rank), (size_t)bytes);
            if (rank & 1) memset(row + bytes, 0, (size_t)item(job));
        }
        product(job, s->factors, job->widest, shifted(job, g->right[part], layer * g->right_stride[part]), rank,
                s->rows + part * width, s->wide, width);
    }
}

static void add_affine(const job_t *job, const group_t *g, int64_t layer, int64_t first, int64_t n, scratch_t *s) {
    const int64_t width = job->shape.heads * job->shape.dim, columns = g->decays * g->rank, wide = padded(columns);
    for (int64_t i = 0; i < n; ++i) put_factors(job, s->rows + i * s->wide, 2 * width, s->factors, i * job->widest);
    for (int64_t i = 0; i < BLOCK; ++i)
        memcpy(s->features + i * wide, g->shift_z + layer * columns, (size_t)columns * sizeof(float));
    product(job, s->factors, job->widest, shifted(job, g->project, layer * g->project_stride), 2 * width, s->features,
            wide, columns);
    for (int64_t i = 0; i < n; ++i) {
        float *z = s->features + i * wide;
        const float *fade = g->fade + (first + i) * (g->decays + g->means);
        for (int64_t p = 0; p < g->rank; ++p) {
            float h = 0;
            for (int64_t j = 0; j < g->decays; ++j) h += fade[j] * z[j * g->rank + p];
            z[p] = h;
        }
        put_factors(job, z, g->rank, s->factors, i * job->widest);
        put_factors(job, fade + g->decays, g->means, s->factors, i * job->widest + g->rank);
        if ((g->rank + g->means) & 1) {
            const float zero = 0;
            put_factors(job, &zero, 1, s->factors, i * job->widest + g->rank + g->means);
        }
    }
    product(job, s->factors, job->widest, shifted(job, g->weight, layer * g->weight_stride), g->rank + g->means,
            s->rows, s->wide, 2 * width);
}

static float block(const job_t *job, const group_t *g, int64_t layer, int64_t first, scratch_t *s) {
    const int64_t width = job->shape.heads * job->shape.dim, half = job->shape.rotary / 2;
    const int64_t n = g->rows - first < BLOCK ? g->rows - first : BLOCK;
    const int corrected = g->kind != MOVE && layer > 0;
    float poison = 0;
    for (int64_t i = 0; i < n; ++i) {
        float *row = s->rows + i * s->wide;
        load(job->shape.k[layer], job->shape.dtype, g->source[first + i] * width, width, row);
        load(job->shape.v[layer], job->shape.dtype, g->source[first + i] * width, width, row + width);
        if (corrected)
            turn(&job->shape, row, g->leave + (first + i) * 2 * half);
        else if (g->moved)
            turn(&job->shape, row, g->shift + (first + i) * 2 * half);
    }
    if (corrected && g->kind == LOW_RANK) add_low_rank(job, g, layer, first, n, s);
    if (corrected && g->kind == AFFINE) add_affine(job, g, layer, first, n, s);
    for (int64_t i = 0; i < n; ++i) {
        float *row = s->rows + i * s->wide;
        if (corrected) turn(&job->shape, row, g->arrive + (first + i) * 2 * half);
        poison += store(job->shape.k[layer], job->shape.dtype, g->target[first + i] * width, width, row);
        poison += store(job->shape.v[layer], job->shape.dtype, g->target[first + i] * width, width, row + width);
    }
    return poison;
}

static void *work(void *shared) {
    job_t *job = shared;
    const int64_t width = job->shape.heads * job->shape.dim;
    /* The V part is added to in whole panels too, which may reach beyond the row's end. */
    scratch_t s = {.wide = width + padded(width) + PANEL};
    const size_t rows = (size_t)(BLOCK * s.wide) * 4, each = (size_t)(BLOCK * job->widest) * 4;
    char *memory = calloc(1, rows + 2 * each + 64);
    if (!memory) {
        atomic_store(&job->broken, 2);
        return NULL;
    }
    s.rows = (float *)memory;
    s.features = (float *)(memory + rows);
    s.factors = memory + rows + each;
    for (;;) {
        int64_t task = atomic_fetch_add(&job->next, 1);
        if (task >= job->shape.layers * job->blocks) break;
        const int64_t layer = task / job->blocks;
        int64_t number = task % job->blocks;
        const group_t *g = job->groups;
        while (number >= (g->rows + BLOCK - 1) / BLOCK) {
            number -= (g->rows + BLOCK - 1) / BLOCK;
            ++g;
        }
        if (block(job, g, layer, number * BLOCK, &s) != 0.0f) atomic_store(&job->broken, 1);
    }
    free(memory);
    return NULL;
}

/* Runs `main` on this thread and up to `useful` others of `threads`. */
static void launch(void *(*main)(void *), void *job, int64_t threads, int64_t useful) {
    enum { MOST = 256 };
    pthread_t helpers[MOST];
    int64_t started = 0;
    while (started < threads - 1 && started < MOST && started < useful &&
           pthread_create(&helpers[started], NULL, main, job) == 0)
        ++started;
    main(job);
    for (int64_t i = 0; i < started; ++i) pthread_join(helpers[i], NULL);
}

/* Whether bf16 pools get bf16 products here: decides how the caller packs. */
int kvcmas_bf16_products(void) { return HAS_BF16_PRODUCTS; }

/* Runs all groups over all layers on up to `threads` threads. Returns 0, 1 if a written row holds NaN or Inf, or 2 if
 * memory ran out. `widest`: elements of the longest factor row, a multiple of 32 at least as long as 2D for AFFINE. */
int kvcmas_correct(void *const *k, void *const *v, int64_t layers, int64_t heads, int64_t dim, int64_t rotary,
                   int64_t neox, int64_t dtype, int64_t products, const group_t *groups, int64_t count, int64_t widest,
                   int64_t threads) {
    job_t job = {{k, v, layers, heads, dim, rotary, neox, dtype}, products, groups, count, 0, widest, 0, 0};
    for (int64_t i = 0; i < count; ++i) job.blocks += (groups[i].rows + BLOCK - 1) / BLOCK;
    launch(work, &job, threads, job.shape.layers * job.blocks / 4);
    return atomic_load(&job.broken);
}

typedef struct {
    shape_t shape;
    const int64_t *slots;
    const float *leave;
    int64_t rows;
    float *k, *v;
    atomic_llong next;
} reading_t;

enum { READ_BLOCK = 128 };

static void *read_rows(void *shared) {
    reading_t *job = shared;
    const shape_t *shape = &job->shape;
    const int64_t width = shape->heads * shape->dim, blocks = (job->rows + READ_BLOCK - 1) / READ_BLOCK;
    for (;;) {
        const int64_t task = atomic_fetch_add(&job->next, 1);
        if (task >= shape->layers * blocks) return NULL;
        const int64_t layer = task / blocks, first = task % blocks * READ_BLOCK;
        const int64_t stop = first + READ_BLOCK < job->rows ? first + READ_BLOCK : job->rows;
        for (int64_t i = first; i < stop; ++i) {
            float *k = job->k + (layer * job->rows + i) * width, *v = job->v + (layer * job->rows + i) * width;
            load(shape->k[layer], shape->dtype, job->slots[i] * width, width, k);
            load(shape->v[layer], shape->dtype, job->slots[i] * width, width, v);
            turn(shape, k, job->leave + i * shape->rotary);
        }
    }
}

/* Canonical K, and V, of `rows` slots: fp32 [layers][rows][heads * dim]. `leave`: [rows][2][rotary / 2], un-roping. */
void kvcmas_canonical(void *const *k, void *const *v, int64_t layers, int64_t heads, int64_t dim, int64_t rotary,
                      int64_t neox, int64_t dtype, const int64_t *slots, const float *leave, int64_t rows, float *out_k,
                      float *out_v, int64_t threads) {
    reading_t job = {{k, v, layers, heads, dim, rotary, neox, dtype}, slots, leave, rows, out_k, out_v, 0};
    launch(read_rows, &job, threads, layers * rows / (4 * READ_BLOCK));
}
