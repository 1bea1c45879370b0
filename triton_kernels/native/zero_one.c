/* 0/1 Adam: a step between two synchronisations, and what follows one. Names, order and meaning of the arguments
   are those of the Triton kernels in zero_one_kernels.py. */

#include "access.h"

/* What a worker adds to c, and how it moves; both are of no use where `good` is 0. */
struct own_step {
    float m[MOST], u[MOST], added[MOST];
    int32_t good[MOST];
};

/* New momentum, update, and what c gets; `x` is null unless weight decay leaks into c. */
static void own_step(struct own_step *s, const float *restrict m, const float *restrict g, const float *restrict d,
                     const float *restrict x, const float *k, int64_t precondition, int64_t n)
{
    const float beta1 = k[BETA1], rest1 = k[ONE_MINUS_BETA1], decay = k[WEIGHT_DECAY];
    EACH_LINE(i, n)
        LANES s->m[i + j] = m[i + j] * beta1 + g[i + j] * rest1;
    EACH_LINE(i, n)
        LANES s->u[i + j] = s->m[i + j] / d[i + j];
    memcpy(s->added, precondition ? s->u : s->m, n * sizeof *d);
    for (int64_t i = 0; x && i < n; i += LINE)
        LANES s->added[i + j] = s->added[i + j] + x[i + j] * decay * d[i + j];
}

/* Which elements of a block are updated; returns whether one that counts is not finite. */
static int32_t choose_good(struct own_step *s, const float *restrict c, const uint8_t *live, int64_t row,
                           int64_t held, int64_t n)
{
    int32_t bad = 0;
    for (int64_t i = 0; i < n; i++)
        s->good[i] = finite(c[i] + s->added[i]) & finite(s->u[i]);
    for (int64_t i = 0; i < n; i++) {
        int32_t there = row == FULL || counts(live, row, i, n);
        bad |= there & !s->good[i];
        s->good[i] &= there & !held;
    }
    return bad;
}

/* c += x*beta1 where that is finite; returns whether one that counts is not. */
static int32_t add_momentum(float *restrict c, float *restrict x, float beta1, const uint8_t *live, int64_t row,
                            int64_t n)
{
    int32_t fit = 1, bad = 0;
    EACH_LINE(i, n)
        LANES x[i + j] = c[i + j] + x[i + j] * beta1;
    for (int64_t i = 0; i < n; i++)
        fit &= finite(x[i]);
    for (int64_t i = 0; !fit && i < n; i++)
        bad |= !finite(x[i]) && counts(live, row, i, n);
    EACH_LINE(i, n)
        LANES c[i + j] = finite(x[i + j]) ? x[i + j] : c[i + j];
    return bad;
}

void local_step(int64_t begin, int64_t end, const int64_t *params, const int64_t *grads, int64_t tensors,
                float *exp_avg, const float *exp_avg_sq, float *compensated, const float *worker_scale,
                const float *coef, const int32_t *block_tensor, const int64_t *block_start, const uint8_t *live,
                const int32_t *live_row, const int32_t *hold, int32_t *flags, int64_t DTYPE, int64_t ALIGNED,
                int64_t GRAD_DTYPE, int64_t GRAD_ALIGNED, int64_t EPS_INSIDE, int64_t PRECONDITION, int64_t MOVES,
                int64_t LAST, int64_t LEAKS, int64_t BLOCK)
{
    float d[MOST], g[MOST], x[MOST], m[MOST];
    struct own_step s;
    for (int64_t b = begin; b < end; b++) {
        int64_t row = live_row[b];
        int32_t bad = 0;
        float *c = compensated + b * BLOCK, scale = worker_scale[b];
        if (row == EMPTY) {
            memset(c, 0, BLOCK * sizeof *c);
            continue;
        }
        struct place to = tensor_of(b, params, tensors, coef, block_tensor, block_start, DTYPE);
        const float decay = to.k[DECAY], step = to.k[STEP_SIZE];
        memcpy(m, exp_avg + b * BLOCK, BLOCK * sizeof *m);
        denom(d, exp_avg_sq + b * BLOCK, to.k, EPS_INSIDE, BLOCK);
        EACH_LINE(i, BLOCK) {
            PREFETCH(c + i, BLOCK);
            LANES c[i + j] = residual(c[i + j], scale, 0);
        }
        if (MOVES) {
            struct place from = tensor_of(b, grads, tensors, coef, block_tensor, block_start, GRAD_DTYPE);
            load_user(g, from, live, row, BLOCK);
            only_counted(g, to.k, BLOCK);
            load_user(x, to, live, row, BLOCK);
            own_step(&s, m, g, d, LEAKS ? x : NULL, to.k, PRECONDITION, BLOCK);
            bad = choose_good(&s, c, live, row, *hold, BLOCK);
            EACH_LINE(i, BLOCK)
                LANES {
                    x[i + j] = s.good[i + j] ? x[i + j] * decay - s.u[i + j] * step : x[i + j];
                    m[i + j] = s.good[i + j] ? s.m[i + j] : m[i + j];
                    c[i + j] = s.good[i + j] ? c[i + j] + s.added[i + j] : c[i + j];
                }
            store_user(to, x, b, NULL, live, row, BLOCK);
        }
        if (LAST) {
            for (int64_t i = 0; PRECONDITION && i < BLOCK; i += LINE)
                LANES m[i + j] = m[i + j] / d[i + j];
            bad |= add_momentum(c, m, to.k[BETA1], live, row, BLOCK);
        } else if (MOVES) {
            memcpy(exp_avg + b * BLOCK, m, BLOCK * sizeof *m);
        }
        only_live(c, live, row, BLOCK);
        if (bad && !*hold)
            __atomic_fetch_or(flags, NONFINITE, __ATOMIC_RELAXED);
    }
}

void rebuild_momentum(int64_t begin, int64_t end, const uint8_t *exp_avg_bits, int64_t exp_avg_stride,
                      const float *exp_avg_scale, const float *exp_avg_sq, const float *coef,
                      const int32_t *block_tensor, const uint8_t *live, const int32_t *live_row, float *exp_avg,
                      int64_t blocks_per_chunk, int64_t EPS_INSIDE, int64_t PRECONDITION, int64_t BLOCK)
{
    float d[MOST];
    for (int64_t b = begin; b < end; b++) {
        float *m = exp_avg + b * BLOCK;
        if (live_row[b] == EMPTY) {
            memset(m, 0, BLOCK * sizeof *m);
            continue;
        }
        choose(m, exp_avg_bits + bytes_at(b, blocks_per_chunk, exp_avg_stride, BLOCK), exp_avg_scale[b],
               -exp_avg_scale[b], BLOCK);
        if (PRECONDITION) {
            denom(d, exp_avg_sq + b * BLOCK, coef + (int64_t)block_tensor[b] * COLUMNS, EPS_INSIDE, BLOCK);
            EACH_LINE(i, BLOCK)
                LANES m[i + j] = m[i + j] * d[i + j];
        }
        only_live(m, live, live_row[b], BLOCK);
    }
}
