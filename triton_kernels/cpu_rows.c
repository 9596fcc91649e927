/* Rows of the pool in the canonical (un-roped) frame, and what is learned from pairs of them: left factors of deltas. */
#include "cpu_common.h"

/* Rows of a pool, and what un-ropes them, [rows][2][rotary / 2]. */
typedef struct {
    const int64_t *slots;
    const float *leave;
} rows_t;

static void read_row(const shape_t *shape, const rows_t *from, int64_t layer, int64_t i, float *k, float *v) {
    const int64_t width = shape->heads * shape->dim;
    load(shape->k[layer], shape->dtype, from->slots[i] * width, width, k);
    load(shape->v[layer], shape->dtype, from->slots[i] * width, width, v);
    turn(shape, k, from->leave + i * shape->rotary);
}

typedef struct {
    shape_t shape;
    rows_t from;
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
            const int64_t at = (layer * job->rows + i) * width;
            read_row(shape, &job->from, layer, i, job->k + at, job->v + at);
        }
    }
}

/* Canonical K, and V, of `rows` slots: fp32 [layers][rows][heads * dim]. `leave`: [rows][2][rotary / 2], un-roping. */
void kvcmas_canonical(void *const *k, void *const *v, int64_t layers, int64_t heads, int64_t dim, int64_t rotary,
                      int64_t neox, int64_t dtype, const int64_t *slots, const float *leave, int64_t rows, float *out_k,
                      float *out_v, int64_t threads) {
    reading_t job = {{k, v, layers, heads, dim, rotary, neox, dtype}, {slots, leave}, rows, out_k, out_v, 0};
    launch(read_rows, &job, threads, layers * rows / (4 * READ_BLOCK));
}

typedef struct {
    shape_t shape;
    rows_t consumer, source;
    int64_t rows, products, rank, stride;
    const void *right[2];
    void *left[2];
    atomic_llong next;
    atomic_int broken;
} projection_t;

static void *project_rows(void *shared) {
    projection_t *job = shared;
    const shape_t *shape = &job->shape;
    const int64_t width = shape->heads * shape->dim, blocks = (job->rows + BLOCK - 1) / BLOCK;
    const int64_t even = (width + 1) / 2 * 2, columns = padded(job->rank), each = BLOCK * even;
    /* Two rows in the canonical frame, products [BLOCK][columns], and the deltas of K and of V as factors. */
    float *memory = calloc((size_t)(4 * width + BLOCK * columns + 2 * each), sizeof(float));
    if (!memory) {
        atomic_store(&job->broken, 2);
        return NULL;
    }
    float *to = memory, *from = to + 2 * width, *sums = from + 2 * width;
    char *factors = (char *)(sums + BLOCK * columns);
    for (;;) {
        const int64_t task = atomic_fetch_add(&job->next, 1);
        if (task >= shape->layers * blocks) break;
        const int64_t layer = task / blocks, first = task % blocks * BLOCK;
        const int64_t n = job->rows - first < BLOCK ? job->rows - first : BLOCK;
        for (int64_t i = 0; i < n; ++i) {
            read_row(shape, &job->consumer, layer, first + i, to, to + width);
            read_row(shape, &job->source, layer, first + i, from, from + width);
            for (int64_t j = 0; j < 2 * width; ++j) to[j] -= from[j];
            for (int part = 0; part < 2; ++part)
                put_factors(job->products, to + part * width, width, factors, part * each + i * even);
        }
        float poison = 0;
        for (int part = 0; part < 2; ++part) {
            memset(sums, 0, (size_t)(BLOCK * columns) * sizeof(float));
            product(job->products, shifted(job->products, factors, part * each), even,
                    shifted(job->products, job->right[part], layer * job->stride), width, sums, columns, job->rank);
            for (int64_t i = 0; i < n; ++i)
                poison += store(job->left[part], shape->dtype, (layer * job->rows + first + i) * job->rank, job->rank,
                                sums + i * columns);
        }
        if (poison != 0.0f) atomic_store(&job->broken, 1);
    }
    free(memory);
    return NULL;
}

/* Left factors of the delta between two sets of rows: (canonical consumer - canonical source) @ right^T, K's and V's
 * apart, [layers][rows][rank] in the pool's type. Right factors are packed, [D][rank] a layer, `stride` elements apart.
 * Returns as `kvcmas_correct` does. */
int kvcmas_project(void *const *k, void *const *v, int64_t layers, int64_t heads, int64_t dim, int64_t rotary,
                   int64_t neox, int64_t dtype, int64_t products, const int64_t *consumer_slots,
                   const float *consumer_leave, const int64_t *source_slots, const float *source_leave, int64_t rows,
                   const void *right_k, const void *right_v, int64_t stride, int64_t rank, void *left_k, void *left_v,
                   int64_t threads) {
    projection_t job = {{k, v, layers, heads, dim, rotary, neox, dtype},
                        {consumer_slots, consumer_leave},
                        {source_slots, source_leave},
                        rows,
                        products,
                        rank,
                        stride,
                        {right_k, right_v},
                        {left_k, left_v},
                        0,
                        0};
    launch(project_rows, &job, threads, layers * rows / (4 * BLOCK));
    return atomic_load(&job.broken);
}
