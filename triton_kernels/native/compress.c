/* Compression and exchange. */

#include "block_io.h"

KERNEL(flatten)
{
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, tensors_table, number, NULL, block_tensor, block_start, TENSORS);
        float *x = out + b * BLOCK_SIZE;
        int bad = 0;
        load_user(x, at, live, live_row[b], BLOCK_SIZE);
        for (int64_t i = 0; i < BLOCK_SIZE; i++)
            x[i] *= factor;
        for (int64_t i = 0; unscale && i < BLOCK_SIZE; i++)
            x[i] *= *unscale;
        for (int64_t i = 0; i < BLOCK_SIZE; i++)
            bad |= !(fabsf(x[i]) <= most);
        if (bad)
            out[tail] = 1.0f; /* whoever stores, stores the same */
    }
}

KERNEL(gradient_squares)
{
    float x[MOST];
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, tensors_table, number, NULL, block_tensor, block_start, TENSORS);
        load_user(x, at, live, live_row[b], BLOCK_SIZE);
        for (int64_t i = 0; i < BLOCK_SIZE; i++)
            x[i] = fabsf(x[i]) <= *bound ? x[i] : 0.0f;
        squares[b] = norm_of(x, BLOCK_SIZE);
    }
}

/* c = g*(1 - beta1)*unit + kept; unit = 1/denominator where there is v. */
static void compensate(float *restrict c, float *restrict kept, const float *restrict g, const float *v,
                       const float *restrict m, const float *row, float s, int64_t eps_inside, int64_t ternary, int64_t n)
{
    KEEP(k, row);
    EACH_LINE(i, n) {
        PREFETCH(c + i, n);
        LANES kept[i + j] = carried(m[i + j], c[i + j], s, k, ternary);
        if (!v) {
            LANES c[i + j] = with_gradient(kept[i + j], g[i + j], k);
            continue;
        }
        PREFETCH(v + i, n);
        if (eps_inside)
            LANES c[i + j] = with_preconditioned(kept[i + j], g[i + j], v[i + j], k, 1);
        else
            LANES c[i + j] = with_preconditioned(kept[i + j], g[i + j], v[i + j], k, 0);
    }
}

/* An element that is not finite drops its gradient; returns how many there are. */
static int64_t drop_bad(float *restrict c, const float *restrict kept, int64_t n)
{
    int32_t dropped = 0;
    for (int64_t i = 0; i < n; i++)
        dropped += !finite(c[i]);
    for (int64_t i = 0; dropped && i < n; i++)
        c[i] = finite(c[i]) ? c[i] : kept[i];
    return dropped;
}

KERNEL(momentum_compress)
{
    float m[MOST], kept[MOST], g[MOST], wide[MOST];
    if (*hold)
        return;
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, grads_table, tensors, coef, block_tensor, block_start, GRADS);
        float *c = compensated + b * BLOCK_SIZE;
        scaled(m, exp_avg_bits + bytes_at(b, blocks_per_chunk, exp_avg_bits_stride, BLOCK_SIZE), plane,
               exp_avg_scale[b], TERNARY, BLOCK_SIZE);
        load_user(g, at, live, live_row[b], BLOCK_SIZE);
        const float *v = exp_avg_sq ? variance_of(exp_avg_sq, exp_avg_sq_kind, b, wide, BLOCK_SIZE) : NULL;
        compensate(c, kept, g, v, m, at.k, worker_scale[b], EPS_INSIDE_SQRT, TERNARY, BLOCK_SIZE);
        only_live(c, live, live_row[b], BLOCK_SIZE);
        int64_t dropped = drop_bad(c, kept, BLOCK_SIZE);
        store_bits(bits + bytes_at(b, blocks_per_chunk, bits_stride, BLOCK_SIZE), plane, c, TERNARY, BLOCK_SIZE);
        store_partials(partials, partials_stride, b, c, dropped, TERNARY, BLOCK_SIZE);
    }
}

KERNEL(server_reduce)
{
    float total[MOST], worker[MOST], own[MOST];
    int32_t found = agreed_flags(arrived_words, arrived_words_stride, own_words, world_size) | *hold;
    if (begin == 0) {
        *flags = found;
        for (int64_t w = 0; w < world_size; w++)
            memcpy(kept_words + w * WORDS, arrived_words + w * arrived_words_stride, WORDS * sizeof *kept_words);
    }
    if (*hold)
        return;
    for (int64_t b = begin; b < end; b++) {
        float *c = compensated ? compensated + b * BLOCK_SIZE : own, s = compensated ? server_scale[b] : 0.0f;
        if (!compensated)
            memset(own, 0, sizeof own);
        memset(total, 0, sizeof total);
        for (int64_t w = 0; w < (found ? 0 : world_size); w++) { /* in rank order */
            float scale = arrived_scales[w * arrived_scales_stride + slot[b]] * per_worker;
            scaled(worker, arrived_bits + w * arrived_bits_stride + b * (BLOCK_SIZE / 8), plane, scale, TERNARY,
                   BLOCK_SIZE);
            for (int64_t i = 0; i < BLOCK_SIZE; i++)
                total[i] += worker[i];
        }
        EACH_LINE(i, BLOCK_SIZE) {
            PREFETCH(c + i, BLOCK_SIZE);
            LANES c[i + j] = residual(c[i + j], s, TERNARY);
            if (!found)
                LANES c[i + j] += total[i + j];
        }
        only_live(c, live, live_row[b], BLOCK_SIZE);
        store_bits(bits + b * (BLOCK_SIZE / 8), plane, c, TERNARY, BLOCK_SIZE);
        store_partials(partials, partials_stride, b, c, 0, TERNARY, BLOCK_SIZE);
    }
}
