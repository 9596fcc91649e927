/* The correction op on the CPU: gather, un-rope, add the delta, rope, scatter. C11 and POSIX threads, no other library.
 *
 * A task is one layer of a block of rows. Blocks are small, so that their fp32 rows stay in the cache between the
 * steps; tasks go layer by layer, so that a layer's factors do too.
 */
#include "cpu_common.h"

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

typedef struct {
    shape_t shape;
    int64_t products;
    const group_t *groups;
    int64_t count, blocks, widest;
    atomic_llong next;
    atomic_int broken;
} job_t;

/* Scratch of one thread: rows [BLOCK][K, then V, padded], features and factors [BLOCK][widest]. */
typedef struct {
    float *rows, *features;
    void *factors;
    int64_t wide;
} scratch_t;

static void add_low_rank(const job_t *job, const group_t *g, int64_t layer, int64_t first, int64_t n, scratch_t *s) {
    const int64_t width = job->shape.heads * job->shape.dim, products = job->products;
    for (int part = 0; part < 2; ++part) {
        const int64_t rank = g->left_rank[part], bytes = rank * item(products);
        const void *left = shifted(products, g->left[part], layer * g->left_stride[part]);
        for (int64_t i = 0; i < n; ++i) {
            char *row = (char *)s->factors + i * job->widest * item(products);
            memcpy(row, shifted(products, left, g->at[first + i] * rank), (size_t)bytes);
            if (rank & 1) memset(row + bytes, 0, (size_t)item(products));
        }
        product(products, s->factors, job->widest, shifted(products, g->right[part], layer * g->right_stride[part]), rank,
                s->rows + part * width, s->wide, width);
    }
}

static void add_affine(const job_t *job, const group_t *g, int64_t layer, int64_t first, int64_t n, scratch_t *s) {
    const int64_t width = job->shape.heads * job->shape.dim, columns = g->decays * g->rank, wide = padded(columns);
    const int64_t products = job->products;
    for (int64_t i = 0; i < n; ++i) put_factors(products, s->rows + i * s->wide, 2 * width, s->factors, i * job->widest);
    for (int64_t i = 0; i < BLOCK; ++i)
        memcpy(s->features + i * wide, g->shift_z + layer * columns, (size_t)columns * sizeof(float));
    product(products, s->factors, job->widest, shifted(products, g->project, layer * g->project_stride), 2 * width, s->features,
            wide, columns);
    for (int64_t i = 0; i < n; ++i) {
        float *z = s->features + i * wide;
        const float *fade = g->fade + (first + i) * (g->decays + g->means);
        for (int64_t p = 0; p < g->rank; ++p) {
            float h = 0;
            for (int64_t j = 0; j < g->decays; ++j) h += fade[j] * z[j * g->rank + p];
            z[p] = h;
        }
        put_factors(products, z, g->rank, s->factors, i * job->widest);
        put_factors(products, fade + g->decays, g->means, s->factors, i * job->widest + g->rank);
        if ((g->rank + g->means) & 1) {
            const float zero = 0;
            put_factors(products, &zero, 1, s->factors, i * job->widest + g->rank + g->means);
        }
    }
    product(products, s->factors, job->widest, shifted(products, g->weight, layer * g->weight_stride), g->rank + g->means,
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
