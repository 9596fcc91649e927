/* What the CPU kernels share: rows of a pool, turning keys, small matrix products, threads.
 *
 * Matrix products use AVX512-BF16 where the compiler may (bf16 pools), GCC's vector extension otherwise, which every GCC
 * and Clang lowers to what the machine has.
 */
#pragma once

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

/* A pool: one buffer a layer of K and of V, [slots][heads][dim], and how its keys are roped. */
typedef struct {
    void *const *k, *const *v;
    int64_t layers, heads, dim, rotary, neox, dtype;
} shape_t;

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

static inline void load(const void *buffer, int64_t dtype, int64_t at, int64_t n, float *restrict out) {
    if (dtype == FP32) {
        memcpy(out, (const float *)buffer + at, (size_t)n * sizeof(float));
        return;
    }
    const uint16_t *in = (const uint16_t *)buffer + at;
    for (int64_t i = 0; i < n; ++i) out[i] = from_bf16(in[i]);
}

static inline void round_bf16(const float *restrict in, int64_t n, uint16_t *restrict out) {
    int64_t i = 0;
#if HAS_BF16_PRODUCTS
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(out + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(in + i)));
#endif
    for (; i < n; ++i) out[i] = to_bf16(in[i]);
}

/* Stores a row; returns 0 if every value is finite, NaN or not 0 otherwise. */
static inline float store(void *buffer, int64_t dtype, int64_t at, int64_t n, const float *restrict in) {
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
static inline void turn(const shape_t *shape, float *restrict x, const float *restrict rotation) {
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
static inline void tile_fp32(const float *a, int64_t lda, const float *b, int64_t depth, float *c, int64_t ldc) {
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
static inline void tile_bf16(const uint16_t *a, int64_t lda, const uint16_t *b, int64_t pairs, float *c, int64_t ldc) {
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
static inline void product(int64_t products, const void *a, int64_t lda, const void *b, int64_t depth, float *c, int64_t ldc,
                    int64_t columns) {
    const int64_t even = (depth + 1) / 2 * 2;
    (void)products;
    for (int64_t panel = 0; panel * PANEL < columns; ++panel)
        for (int64_t row = 0; row < BLOCK; row += TILE) {
            float *out = c + row * ldc + panel * PANEL;
#if HAS_BF16_PRODUCTS
            if (products == BF16) {
                tile_bf16((const uint16_t *)a + row * lda, lda, (const uint16_t *)b + panel * PANEL * even, even / 2,
                          out, ldc);
                continue;
            }
#endif
            tile_fp32((const float *)a + row * lda, lda, (const float *)b + panel * PANEL * even, even, out, ldc);
        }
}

static inline int64_t padded(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

static inline int64_t item(int64_t products) { return products == BF16 ? 2 : 4; }

static inline const void *shifted(int64_t products, const void *base, int64_t elements) {
    return (const char *)base + elements * item(products);
}

/* A row of factors for `product`, from fp32. */
static inline void put_factors(int64_t products, const float *in, int64_t n, void *out, int64_t at) {
    if (products == BF16)
        round_bf16(in, n, (uint16_t *)out + at);
    else
        memcpy((float *)out + at, in, (size_t)n * sizeof(float));
}

/* Runs `main` on this thread and up to `useful` others of `threads`. */
static inline void launch(void *(*main)(void *), void *job, int64_t threads, int64_t useful) {
    enum { MOST = 256 };
    pthread_t helpers[MOST];
    int64_t started = 0;
    while (started < threads - 1 && started < MOST && started < useful &&
           pthread_create(&helpers[started], NULL, main, job) == 0)
        ++started;
    main(job);
    for (int64_t i = 0; i < started; ++i) pthread_join(helpers[i], NULL);
}
