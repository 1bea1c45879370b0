/* Compression and exchange. Names, order and meaning of the arguments are those of the Triton kernels of the same
   name in kernels.py; what they compute is specified by the twins. */

#include "access.h"

void flatten(int64_t begin, int64_t end, const int64_t *pointers, int64_t tensors, const int32_t *block_tensor,
             const int64_t *block_start, const int32_t *tail_row, const uint8_t *tails, float factor,
             const float *unscale, float most, float *out, float *marker, int64_t DTYPE, int64_t ALIGNED,
             int64_t SCALED, int64_t BLOCK)
{
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, pointers, tensors, NULL, block_tensor, block_start, DTYPE);
        float *x = out + b * BLOCK;
        int bad = 0;
        load_user(x, at, tails, tail_row[b], BLOCK);
        for (int64_t i = 0; i < BLOCK; i++)
            x[i] *= factor;
        for (int64_t i = 0; SCALED && i < BLOCK; i++)
            x[i] *= *unscale;
        for (int64_t i = 0; i < BLOCK; i++)
            bad |= !(fabsf(x[i]) <= most);
        if (bad)
            *marker = 1.0f; /* whoever stores, stores the same */
    }
}

void gradient_squares(int64_t begin, int64_t end, const int64_t *pointers, int64_t tensors,
                      const int32_t *block_tensor, const int64_t *block_start, const int32_t *tail_row,
                      const uint8_t *tails, const float *bound, double *squares, int64_t DTYPE, int64_t ALIGNED,
                      int64_t BLOCK)
{
    float x[MOST];
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, pointers, tensors, NULL, block_tensor, block_start, DTYPE);
        load_user(x, at, tails, tail_row[b], BLOCK);
        for (int64_t i = 0; i < BLOCK; i++)
            x[i] = fabsf(x[i]) <= *bound ? x[i] : 0.0f;
        squares[b] = norm_of(x, BLOCK);
    }
}

/* c = g*(1 - beta1)*unit + kept, kept = beta1*m + c - s*sign(c); unit = 1/d where there is d. */
static void compensate(float *restrict c, float *restrict kept, const float *restrict g, const float *restrict d,
                       const float *restrict m, const float *k, float s, int64_t ternary, int64_t n)
{
    const float beta1 = k[BETA1], rest = k[ONE_MINUS_BETA1], unit = k[UNIT];
    EACH_LINE(i, n) {
        PREFETCH(c + i, n);
        LANES kept[i + j] = m[i + j] * beta1 + residual(c[i + j], s, ternary);
        if (d)
            LANES c[i + j] = g[i + j] * rest / d[i + j] + kept[i + j];
        else
            LANES c[i + j] = g[i + j] * rest * unit + kept[i + j];
    }
}

/* An element that is not finite drops its gradient; returns how many there are. */
static int64_t drop_bad(float *restrict c, const float *restrict kept, int64_t n)
{
    int32_t dropped = 0;
    for (int64_t i = 0; i < n; i++)
        dropped += !(fabsf(c[i]) <= FLT_MAX);
    for (int64_t i = 0; dropped && i < n; i++)
        c[i] = fabsf(c[i]) <= FLT_MAX ? c[i] : kept[i];
    return dropped;
}

void momentum_compress(int64_t begin, int64_t end, const int64_t *pointers, int64_t tensors, float *compensated,
                       const float *worker_scale, const uint8_t *exp_avg_bits, int64_t exp_avg_stride,
                       const float *exp_avg_scale, const float *coef, const int32_t *block_tensor,
                       const int64_t *block_start, const void *exp_avg_sq, const uint8_t *live,
                       const int32_t *live_row, uint8_t *bits, int64_t bits_stride, int64_t plane, double *partials,
                       int64_t partials_stride, const int32_t *hold, int64_t blocks_per_chunk, int64_t DTYPE,
                       int64_t ALIGNED, int64_t VARIANCE, int64_t EPS_INSIDE, int64_t PRECONDITION, int64_t TERNARY,
                       int64_t BLOCK)
{
    float m[MOST], kept[MOST], g[MOST], d[MOST];
    if (*hold)
        return;
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, pointers, tensors, coef, block_tensor, block_start, DTYPE);
        float *c = compensated + b * BLOCK;
        scaled(m, exp_avg_bits + bytes_at(b, blocks_per_chunk, exp_avg_stride, BLOCK), plane, exp_avg_scale[b],
               TERNARY, BLOCK);
        load_user(g, at, live, live_row[b], BLOCK);
        only_counted(g, at.k, BLOCK);
        if (PRECONDITION)
            denom(d, variance_of(exp_avg_sq, VARIANCE, b, kept, BLOCK), at.k, EPS_INSIDE, BLOCK);
        compensate(c, kept, g, PRECONDITION ? d : NULL, m, at.k, worker_scale[b], TERNARY, BLOCK);
        only_live(c, live, live_row[b], BLOCK);
        int64_t dropped = drop_bad(c, kept, BLOCK);
        store_bits(bits + bytes_at(b, blocks_per_chunk, bits_stride, BLOCK), plane, c, TERNARY, BLOCK);
        store_partials(partials, partials_stride, b, c, dropped, TERNARY, BLOCK);
    }
}

void server_reduce(int64_t begin, int64_t end, const uint8_t *arrived_bits, int64_t arrived_stride, int64_t plane,
                   const float *arrived_scales, int64_t scales_stride, const int32_t *slot, const int32_t *skip,
                   float *compensated, const float *server_scale, const uint8_t *live, const int32_t *live_row,
                   uint8_t *bits, double *partials, int64_t partials_stride, double *agreement,
                   int64_t agreement_stride, const int32_t *hold, int64_t world_size, float per_worker,
                   int64_t TERNARY, int64_t KEEPS, int64_t BLOCK)
{
    float total[MOST], worker[MOST], own[MOST];
    if (*hold)
        return;
    for (int64_t b = begin; b < end; b++) {
        float *c = KEEPS ? compensated + b * BLOCK : own, s = KEEPS ? server_scale[b] : 0.0f;
        float most = 0.0f;
        if (!KEEPS)
            memset(own, 0, sizeof own);
        memset(total, 0, sizeof total);
        for (int64_t w = 0; w < (*skip ? 0 : world_size); w++) { /* in rank order */
            float scale = arrived_scales[w * scales_stride + slot[b]] * per_worker;
            scaled(worker, arrived_bits + w * arrived_stride + b * (BLOCK / 8), plane, scale, TERNARY, BLOCK);
            for (int64_t i = 0; i < BLOCK; i++)
                total[i] += worker[i];
            most += scale;
        }
        EACH_LINE(i, BLOCK) {
            PREFETCH(c + i, BLOCK);
            LANES c[i + j] = residual(c[i + j], s, TERNARY);
            if (!*skip)
                LANES c[i + j] += total[i + j];
        }
        only_live(c, live, live_row[b], BLOCK);
        only_live(total, live, live_row[b], BLOCK);
        store_bits(bits + b * (BLOCK / 8), plane, c, TERNARY, BLOCK);
        store_partials(partials, partials_stride, b, c, 0, TERNARY, BLOCK);
        agreement[b] = norm_of(total, BLOCK);
        agreement[agreement_stride + b] = (double)most * most;
    }
}
