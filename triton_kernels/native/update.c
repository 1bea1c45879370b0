/* What changes parameters: Adam's update, LAMB's, the apply of synchronised bits. Names, order and meaning of the
   arguments are those of the Triton kernels in update_kernels.py and lamb_kernels.py. */

#include "access.h"

/* x = decay*x - step_size*update, for the elements of a block that count; overwrites `update`. */
static void move(struct place at, float *restrict update, int64_t b, const float *rounding, const uint8_t *live,
                 int64_t row, int64_t n)
{
    float x[MOST];
    const float decay = at.k[DECAY], step = at.k[STEP_SIZE];
    load_user(x, at, live, row, n);
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] * decay - update[i] * step;
    store_user(at, x, b, rounding, live, row, n);
}

/* m and v of a block, in place, and the sum of v if asked. */
static void moments(float *restrict m, float *restrict v, const float *restrict grad, const float *k,
                    double *sum, const uint8_t *live, int64_t row, int64_t n)
{
    float g[MOST];
    memcpy(g, grad, n * sizeof *g);
    prefetch(grad + n, n * sizeof *g);
    only_live(g, live, row, n);
    for (int64_t i = 0; i < n; i++) {
        m[i] = m[i] * k[BETA1] + g[i] * k[ONE_MINUS_BETA1];
        v[i] = v[i] * k[BETA2] + g[i] * k[ONE_MINUS_BETA2] * g[i];
    }
    prefetch(m + n, n * sizeof *m);
    if (sum)
        *sum = sum_of(v, n);
    prefetch(v + n, n * sizeof *v);
}

void apply_momentum(int64_t begin, int64_t end, const int64_t *pointers, int64_t tensors, const uint8_t *exp_avg_bits,
                    int64_t exp_avg_stride, int64_t plane, const float *exp_avg_scale, const float *exp_avg_sq,
                    const float *coef, const int32_t *block_tensor, const int64_t *block_start, const uint8_t *live,
                    const int32_t *live_row, const int32_t *skip, const float *rounding, int64_t blocks_per_chunk,
                    int64_t DTYPE, int64_t ALIGNED, int64_t EPS_INSIDE, int64_t PRECONDITIONED, int64_t TERNARY,
                    int64_t ROUNDING, int64_t BLOCK)
{
    float update[MOST], d[MOST];
    for (int64_t b = begin; b < end; b++) {
        if (*skip || live_row[b] == EMPTY)
            continue;
        struct place at = tensor_of(b, pointers, tensors, coef, block_tensor, block_start, DTYPE);
        const uint8_t *packed = exp_avg_bits + bytes_at(b, blocks_per_chunk, exp_avg_stride, BLOCK);
        scaled(update, packed, plane, exp_avg_scale[b] / at.k[UNIT], TERNARY, BLOCK);
        if (!PRECONDITIONED) {
            denom(d, exp_avg_sq + b * BLOCK, at.k, EPS_INSIDE, BLOCK);
            for (int64_t i = 0; i < BLOCK; i++)
                update[i] /= d[i];
            prefetch(exp_avg_sq + (b + 1) * BLOCK, BLOCK * sizeof *exp_avg_sq);
        }
        move(at, update, b, ROUNDING ? rounding : NULL, live, live_row[b], BLOCK);
    }
}

void adam_update(int64_t begin, int64_t end, const int64_t *pointers, int64_t tensors, const float *grad,
                 float *exp_avg, float *exp_avg_sq, const float *coef, const int32_t *block_tensor,
                 const int64_t *block_start, const uint8_t *live, const int32_t *live_row, const int32_t *skip,
                 double *exp_avg_sq_sums, const float *rounding, int64_t DTYPE, int64_t ALIGNED, int64_t SUMS,
                 int64_t ROUNDING, int64_t BLOCK)
{
    float update[MOST], d[MOST];
    for (int64_t b = begin; b < end; b++) {
        if (*skip || live_row[b] == EMPTY)
            continue;
        struct place at = tensor_of(b, pointers, tensors, coef, block_tensor, block_start, DTYPE);
        float *m = exp_avg + b * BLOCK, *v = exp_avg_sq + b * BLOCK;
        moments(m, v, grad + b * BLOCK, at.k, SUMS ? exp_avg_sq_sums + b : NULL, live, live_row[b], BLOCK);
        denom(d, v, at.k, 0, BLOCK);
        for (int64_t i = 0; i < BLOCK; i++)
            update[i] = m[i] / d[i];
        move(at, update, b, ROUNDING ? rounding : NULL, live, live_row[b], BLOCK);
    }
}

void lamb_update(int64_t begin, int64_t end, const int64_t *pointers, int64_t tensors, const float *grad,
                 float *exp_avg, float *exp_avg_sq, const float *coef, const int32_t *block_tensor,
                 const int64_t *block_start, const uint8_t *live, const int32_t *live_row, const int32_t *skip,
                 double *exp_avg_sq_sums, double *norms, int64_t norms_stride, int64_t DTYPE, int64_t ALIGNED,
                 int64_t EPS_INSIDE, int64_t SUMS, int64_t BLOCK)
{
    float x[MOST], u[MOST], d[MOST];
    for (int64_t b = begin; b < end; b++) {
        if (*skip || live_row[b] == EMPTY)
            continue;
        struct place at = tensor_of(b, pointers, tensors, coef, block_tensor, block_start, DTYPE);
        const float *k = at.k;
        float *m = exp_avg + b * BLOCK, *v = exp_avg_sq + b * BLOCK;
        moments(m, v, grad + b * BLOCK, k, SUMS ? exp_avg_sq_sums + b : NULL, live, live_row[b], BLOCK);
        load_user(x, at, live, live_row[b], BLOCK);
        denom(d, v, k, EPS_INSIDE, BLOCK);
        for (int64_t i = 0; i < BLOCK; i++)
            u[i] = m[i] * k[UNBIAS1] / d[i] + x[i] * k[WEIGHT_DECAY];
        only_live(u, live, live_row[b], BLOCK);
        norms[b] = norm_of(x, BLOCK);
        norms[norms_stride + b] = norm_of(u, BLOCK);
    }
}

void lamb_move(int64_t begin, int64_t end, const int64_t *pointers, int64_t tensors, const float *exp_avg,
               const float *exp_avg_sq, const float *coef, const int32_t *block_tensor, const int64_t *block_start,
               const uint8_t *live, const int32_t *live_row, const int32_t *skip, const float *rounding,
               int64_t DTYPE, int64_t ALIGNED, int64_t EPS_INSIDE, int64_t ROUNDING, int64_t BLOCK)
{
    float update[MOST], d[MOST];
    for (int64_t b = begin; b < end; b++) {
        if (*skip || live_row[b] == EMPTY)
            continue;
        struct place at = tensor_of(b, pointers, tensors, coef, block_tensor, block_start, DTYPE);
        denom(d, exp_avg_sq + b * BLOCK, at.k, EPS_INSIDE, BLOCK);
        prefetch(exp_avg_sq + (b + 1) * BLOCK, BLOCK * sizeof *exp_avg_sq);
        for (int64_t i = 0; i < BLOCK; i++)
            update[i] = exp_avg[b * BLOCK + i] / d[i];
        prefetch(exp_avg + (b + 1) * BLOCK, BLOCK * sizeof *exp_avg);
        move(at, update, b, ROUNDING ? rounding : NULL, live, live_row[b], BLOCK);
    }
}

/* Where BLEND: sums of (m/denom)^2 and of (m/denom + wd*x)^2. */
static void blend(struct place at, const float *restrict m, const float *restrict frozen, double *norms,
                  int64_t norms_stride, int64_t b, int64_t eps_inside, const uint8_t *live, int64_t row, int64_t n)
{
    float x[MOST], d[MOST], adam[MOST];
    load_user(x, at, live, row, n);
    denom(d, frozen, at.k, eps_inside, n);
    for (int64_t i = 0; i < n; i++)
        adam[i] = m[i] * at.k[UNBIAS1] / d[i];
    only_live(adam, live, row, n);
    norms[b] = norm_of(adam, n);
    for (int64_t i = 0; i < n; i++)
        adam[i] += x[i] * at.k[WEIGHT_DECAY];
    norms[norms_stride + b] = norm_of(adam, n);
}

void lamb_ratio(int64_t begin, int64_t end, const int64_t *pointers, int64_t tensors, const uint8_t *exp_avg_bits,
                int64_t exp_avg_stride, int64_t plane, const float *exp_avg_scale, uint8_t *last_bits,
                float *last_scale, const float *exp_avg_sq, float *fresh, const int32_t *started, const float *coef,
                const int32_t *block_tensor, const int64_t *block_start, const uint8_t *live,
                const int32_t *live_row, const int32_t *skip, float *largest, double *norms, int64_t norms_stride,
                int64_t blocks_per_chunk, int64_t DTYPE, int64_t ALIGNED, int64_t EPS_INSIDE,
                int64_t PRECONDITIONED, int64_t DEEPSPEED, int64_t BLEND, int64_t TERNARY, int64_t BLOCK)
{
    float m[MOST], last[MOST], d[MOST], ratio[MOST];
    for (int64_t b = begin; b < end && !*skip; b++) {
        struct place at = tensor_of(b, pointers, tensors, coef, block_tensor, block_start, DTYPE);
        const float *k = at.k, *frozen = exp_avg_sq + b * BLOCK;
        float *v = fresh + b * BLOCK, most = 0.0f;
        const uint8_t *now_at = exp_avg_bits + bytes_at(b, blocks_per_chunk, exp_avg_stride, BLOCK);
        /* Where ternary, the chunks before have a second plane each. */
        uint8_t *last_at = last_bits + b * (BLOCK / 8) + (TERNARY ? b / blocks_per_chunk * plane : 0);
        scaled(m, now_at, plane, exp_avg_scale[b] / k[UNIT], TERNARY, BLOCK);
        scaled(last, last_at, plane, last_scale[b] / k[UNIT], TERNARY, BLOCK);
        if (PRECONDITIONED) {
            denom(d, frozen, k, EPS_INSIDE, BLOCK);
            for (int64_t i = 0; i < BLOCK; i++) {
                m[i] *= d[i];
                last[i] *= d[i];
            }
        }
        for (int64_t i = 0; i < BLOCK; i++) {
            float before = *started ? last[i] : v[i], old = *started ? v[i] : frozen[i];
            float g = (m[i] - before * k[BETA1]) / k[ONE_MINUS_BETA1];
            v[i] = old * k[BETA2] + g * k[ONE_MINUS_BETA2] * g;
        }
        prefetch(v + BLOCK, BLOCK * sizeof *v);
        only_live(v, live, live_row[b], BLOCK);
        if (DEEPSPEED) {
            denom(ratio, frozen, k, EPS_INSIDE, BLOCK);
            denom(d, v, k, EPS_INSIDE, BLOCK);
        }
        for (int64_t i = 0; i < BLOCK; i++)
            ratio[i] = DEEPSPEED ? ratio[i] / d[i] : frozen[i] / v[i];
        only_live(ratio, live, live_row[b], BLOCK);
        prefetch(frozen + BLOCK, BLOCK * sizeof *frozen);
        for (int64_t i = 0; i < BLOCK; i++) /* 0/0 and inf/inf don't count */
            most = ratio[i] > most ? ratio[i] : most;
        largest[b] = most;
        memcpy(last_at, now_at, BLOCK / 8);
        if (TERNARY)
            memcpy(last_at + plane, now_at + plane, BLOCK / 8);
        last_scale[b] = exp_avg_scale[b];
        if (BLEND)
            blend(at, m, frozen, norms, norms_stride, b, EPS_INSIDE, live, live_row[b], BLOCK);
    }
}
