/* Distributed Lion's worker. Names, order and meaning of the arguments are those of the Triton kernel in
   lion_kernels.py. */

#include "access.h"

enum { NONFINITE = 1 };

static int finite(float x)
{
    return fabsf(x) <= FLT_MAX;
}

/* Where a coin is tossed the update becomes 1 or -1. */
static void toss(float *restrict c, int64_t b, const int64_t *step, int64_t n)
{
    uint64_t first = (uint64_t)b * n;
    uint32_t seed = mixed(mixed((uint32_t)(first >> 32) + 0x9E3779B9u) ^ (uint32_t)*step);
    for (int64_t i = 0; i < n; i++)
        if (c[i] == 0)
            c[i] = mixed(((uint32_t)first + (uint32_t)i) ^ seed) >> 16 & 1 ? 1.0f : -1.0f;
}

/* The new momentum and the update; where they are not finite m itself. Returns whether one that counts was not. */
static int blend(float *restrict new_m, float *restrict c, const float *restrict m, const float *restrict g,
                 const float *k, const uint8_t *live, int64_t row, int64_t n)
{
    const float beta1 = k[BETA1], rest1 = k[ONE_MINUS_BETA1], beta2 = k[BETA2], rest2 = k[ONE_MINUS_BETA2];
    int32_t good = 1, bad = 0;
    EACH_LINE(i, n)
        LANES {
            new_m[i + j] = m[i + j] * beta2 + g[i + j] * rest2;
            c[i + j] = m[i + j] * beta1 + g[i + j] * rest1;
        }
    for (int64_t i = 0; i < n; i++)
        good &= finite(new_m[i]) & finite(c[i]);
    for (int64_t i = 0; !good && i < n; i++)
        if (!finite(new_m[i]) || !finite(c[i])) {
            bad |= counts(live, row, i, n);
            new_m[i] = c[i] = m[i];
        }
    return bad;
}

void lion_compress(int64_t begin, int64_t end, const int64_t *pointers, int64_t tensors, float *exp_avg,
                   const float *coef, const int32_t *block_tensor, const int64_t *block_start, const uint8_t *live,
                   const int32_t *live_row, const int64_t *step, const int32_t *hold, uint8_t *bits,
                   int64_t bits_stride, int32_t *flags, int64_t blocks_per_chunk, int64_t DTYPE, int64_t ALIGNED,
                   int64_t BLOCK)
{
    float g[MOST], c[MOST], new_m[MOST];
    for (int64_t b = begin; b < end; b++) {
        uint8_t *packed = bits + bytes_at(b, blocks_per_chunk, bits_stride, BLOCK);
        if (live_row[b] == EMPTY) {
            memset(packed, 0xFF, BLOCK / 8);
            continue;
        }
        struct place at = tensor_of(b, pointers, tensors, coef, block_tensor, block_start, DTYPE);
        float *m = exp_avg + b * BLOCK;
        load_user(g, at, live, live_row[b], BLOCK);
        only_counted(g, at.k, BLOCK);
        if (blend(new_m, c, m, g, at.k, live, live_row[b], BLOCK) && !*hold)
            __atomic_fetch_or(flags, NONFINITE, __ATOMIC_RELAXED);
        toss(c, b, step, BLOCK);
        only_live(c, live, live_row[b], BLOCK);
        store_bits(packed, 0, c, 0, BLOCK);
        for (int64_t i = 0; !*hold && i < BLOCK; i++)
            m[i] = counts(live, live_row[b], i, BLOCK) ? new_m[i] : m[i];
    }
}
