/* 0/1 Adam: a step between two synchronisations, and what follows one. */

#include "clock.h"

/* A block's m, x and c after a gradient, where that is finite; says whether it was. */
static void own_step(float *restrict m, float *restrict x, float *restrict c, int32_t *restrict fine,
                     const float *restrict g, const float *restrict d, const float *row, const int32_t *restrict counts,
                     int64_t preconditioned, int64_t decay_in_update, int64_t n)
{
    KEEP(k, row);
    EACH_LINE(i, n)
        LANES {
            float now = momentum(m[i + j], counted(g[i + j], k), k), u = now / d[i + j];
            float added = preconditioned ? u : now;
            if (decay_in_update)
                added = with_decay(added, x[i + j], d[i + j], k);
            added = c[i + j] + added;
            fine[i + j] = finite(added) & finite(u);
            int32_t takes = fine[i + j] & counts[i + j];
            x[i + j] = takes ? moved(x[i + j], u, k) : x[i + j];
            m[i + j] = takes ? now : m[i + j];
            c[i + j] = takes ? added : c[i + j];
        }
}

/* The same of one that follows: d is made of v_t, which is now; where it does not count v_t is v again. */
static void own_step_and_squares(float *restrict m, float *restrict v, float *restrict x, float *restrict c,
                           int32_t *restrict fine, const float *restrict g, const float *restrict now,
                           const float *restrict d, const float *row, const int32_t *restrict counts, int64_t n)
{
    KEEP(k, row);
    EACH_LINE(i, n)
        LANES {
            float new = momentum(m[i + j], counted(g[i + j], k), k), u = quotient(new, d[i + j]);
            float summed = owed(c[i + j], u, k);
            fine[i + j] = finite(now[i + j]) & finite(summed) & finite(u);
            int32_t takes = fine[i + j] & counts[i + j];
            x[i + j] = takes ? moved(x[i + j], u, k) : x[i + j];
            m[i + j] = takes ? new : m[i + j];
            v[i + j] = takes ? now[i + j] : v[i + j];
            c[i + j] = takes ? summed : c[i + j];
        }
}

/* v_t, of which denominators are made. */
static void own_squares(float *restrict now, const float *restrict v, const float *restrict g, const float *row,
                        int64_t n)
{
    KEEP(k, row);
    EACH_LINE(i, n)
        LANES now[i + j] = variance(v[i + j], counted(g[i + j], k), k);
}

/* c += beta1*m, or beta1*m/d, where that is finite. */
static void add_kept(float *restrict c, int32_t *restrict fine, const float *restrict m, const float *restrict d,
                     const float *row, int64_t preconditioned, int64_t n)
{
    KEEP(k, row);
    EACH_LINE(i, n)
        LANES {
            float total = c[i + j] + (preconditioned ? m[i + j] / d[i + j] : m[i + j]) * k[BETA1];
            fine[i + j] &= finite(total);
            c[i + j] = finite(total) ? total : c[i + j];
        }
}

KERNEL(local_step)
{
    float m[MOST], x[MOST], d[MOST], g[MOST], now[MOST];
    int32_t fine[MOST], takes[MOST];
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, params_table, tensors, coef, block_tensor, block_start, PARAMS, BLOCK_SIZE);
        float *c = compensated + b * BLOCK_SIZE;
        int64_t row = live_row[b];
        float scale = worker_scale[b];
        worker_scale[b] = 0;
        if (anchor)
            load_user(anchor + b * BLOCK_SIZE, at, inside, inside_row[b], BLOCK_SIZE);
        if (row == EMPTY) {
            memset(c, 0, BLOCK_SIZE * sizeof *c);
            continue;
        }
        memcpy(m, exp_avg + b * BLOCK_SIZE, BLOCK_SIZE * sizeof *m);
        float *v = exp_avg_sq + b * BLOCK_SIZE;
        if (!step.FOLLOWS)
            denominators(d, v, at.k, step.EPS_INSIDE_SQRT, BLOCK_SIZE);
        for (int64_t i = 0; i < BLOCK_SIZE; i++) {
            fine[i] = 1;
            takes[i] = !*hold && is_live(live, row, i, BLOCK_SIZE);
        }
        EACH_LINE(i, BLOCK_SIZE)
            LANES c[i + j] = residual(c[i + j], scale, 0);
        if (step.MOVES) {
            struct place from = tensor_of(b, grads_table, tensors, coef, block_tensor, block_start, GRADS, BLOCK_SIZE);
            load_user(g, from, live, row, BLOCK_SIZE);
            if (!(step.FOLLOWS && step.LAST))
                load_user(x, at, live, row, BLOCK_SIZE);
            if (step.FOLLOWS) {
                own_squares(now, v, g, at.k, BLOCK_SIZE);
                denominators(d, now, at.k, step.EPS_INSIDE_SQRT, BLOCK_SIZE);
                own_step_and_squares(m, v, x, c, fine, g, now, d, at.k, takes, BLOCK_SIZE);
            } else
                own_step(m, x, c, fine, g, d, at.k, takes, step.PRECONDITION, step.DECAY_IN_UPDATE, BLOCK_SIZE);
            if (!(step.FOLLOWS && step.LAST))
                store_user(at, x, b, NULL, live, row, BLOCK_SIZE);
        }
        if (step.LAST && !step.FOLLOWS)
            add_kept(c, fine, m, d, at.k, step.PRECONDITION, BLOCK_SIZE);
        else if (step.MOVES)
            memcpy(exp_avg + b * BLOCK_SIZE, m, BLOCK_SIZE * sizeof *m);
        only_live(c, live, row, BLOCK_SIZE);
        int32_t bad = 0;
        for (int64_t i = 0; i < BLOCK_SIZE; i++)
            bad |= takes[i] & !fine[i];
        if (bad)
            __atomic_fetch_or(flags, NONFINITE, __ATOMIC_RELAXED);
    }
}

KERNEL(rebuild_momentum)
{
    float d[MOST];
    for (int64_t p = begin > blocks ? begin : blocks; p < end; p++)
        renew(p - blocks, coefficients, WIDTH);
    end = end < blocks ? end : blocks;
    for (int64_t b = begin; b < end; b++) {
        float *m = exp_avg + b * BLOCK_SIZE, scale = exp_avg_scale[b];
        int64_t t = block_tensor[b];
        sent[b] = scale;
        exp_avg_scale[b] = 0;
        if (live_row[b] == EMPTY) {
            memset(m, 0, BLOCK_SIZE * sizeof *m);
            continue;
        }
        if (summed)
            scale = scale / summed[t];
        if (awaited)
            scale = awaited[t] > 0 ? scale : 0;
        scaled(m, exp_avg_bits + bytes_at(b, blocks_per_chunk, exp_avg_bits_stride, BLOCK_SIZE), 0, scale, 0,
               BLOCK_SIZE);
        if (exp_avg_sq) {
            denominators(d, exp_avg_sq + b * BLOCK_SIZE, coefficients.table + t * COLUMNS, EPS_INSIDE_SQRT, BLOCK_SIZE);
            EACH_LINE(i, BLOCK_SIZE)
                LANES m[i + j] *= d[i + j];
        }
        only_live(m, live, live_row[b], BLOCK_SIZE);
    }
}
