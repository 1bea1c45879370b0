/* What changes parameters: Adam's update, LAMB's, the apply of synchronised bits. Names, order and meaning of the
   arguments are those of the Triton kernels in update_kernels.py and lamb_kernels.py. */

#include "access.h"

/* x = decay*x - step_size*update, for the elements of a block that count; overwrites `update`. */
static void move(struct place at, float *restrict update, int64_t b, const int64_t *rounding, const uint8_t *live,
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
    const float beta1 = k[BETA1], rest1 = k[ONE_MINUS_BETA1], beta2 = k[BETA2], rest2 = k[ONE_MINUS_BETA2];
    float g[MOST];
    memcpy(g, grad, n * sizeof *g);
    only_live(g, live, row, n);
    EACH_LINE(i, n) {
        PREFETCH(grad + i, n);
        PREFETCH(m + i, n);
        LANES {
            m[i + j] = m[i + j] * beta1 + g[i + j] * rest1;
            v[i + j] = v[i + j] * beta2 + g[i + j] * rest2 * g[i + j];
        }
    }
    if (sum)
        *sum = sum_of(v, n);
}

void apply_momentum(int64_t begin, int64_t end, const int64_t *pointers, int64_t tensors, const uint8_t *exp_avg_bits,
                    int64_t exp_avg_stride, int64_t plane, const float *exp_avg_scale, const void *exp_avg_sq,
                    const float *coef, const int32_t *block_tensor, const int64_t *block_start, const uint8_t *live,
                    const int32_t *live_row, const int32_t *skip, const int64_t *rounding, int64_t blocks_per_chunk,
                    int64_t DTYPE, int64_t ALIGNED, int64_t VARIANCE, int64_t EPS_INSIDE, int64_t PRECONDITIONED,
                    int64_t TERNARY, int64_t ROUNDING, int64_t BLOCK)
{
    float update[MOST], d[MOST], v[MOST];
    for (int64_t b = begin; b < end; b++) {
        if (*skip || live_row[b] == EMPTY)
            continue;
        struct place at = tensor_of(b, pointers, tensors, coef, block_tensor, block_start, DTYPE);
        const uint8_t *packed = exp_avg_bits + bytes_at(b, blocks_per_chunk, exp_avg_stride, BLOCK);
        scaled(update, packed, plane, exp_avg_scale[b] / at.k[UNIT], TERNARY, BLOCK);
        if (!PRECONDITIONED) {
            denom(d, variance_of(exp_avg_sq, VARIANCE, b, v, BLOCK), at.k, EPS_INSIDE, BLOCK);
            for (int64_t i = 0; i < BLOCK; i++)
                update[i] /= d[i];
        }
        move(at, update, b, ROUNDING ? rounding : NULL, live, live_row[b], BLOCK);
    }
}

void adam_update(int64_t begin, int64_t end, const int64_t *pointers, int64_t tensors, const float *grad,
                 float *exp_avg, float *exp_avg_sq, const float *coef, const int32_t *block_tensor,
                 const int64_t *block_start, const uint8_t *live, const int32_t *live_row, const int32_t *skip,
                 double *exp_avg_sq_sums, const int64_t *rounding, int64_t DTYPE, int64_t ALIGNED, int64_t SUMS,
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
               const uint8_t *live, const int32_t *live_row, const int32_t *skip, const int64_t *rounding,
               int64_t DTYPE, int64_t ALIGNED, int64_t EPS_INSIDE, int64_t ROUNDING, int64_t BLOCK)
{
    float update[MOST], d[MOST];
    for (int64_t b = begin; b < end; b++) {
        if (*skip || live_row[b] == EMPTY)
            continue;
        struct place at = tensor_of(b, pointers, tensors, coef, block_tensor, block_start, DTYPE);
        denom(d, exp_avg_sq + b * BLOCK, at.k, EPS_INSIDE, BLOCK);
        const float *m = exp_avg + b * BLOCK;
        EACH_LINE(i, BLOCK) {
            PREFETCH(m + i, BLOCK);
            LANES update[i + j] = m[i + j] / d[i + j];
        }
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

/* The largest element above 0; 0/0 and inf/inf don't count. */
static float largest_of(const float *x, int64_t n)
{
    float most[LINE] = {0}, found = 0;
    EACH_LINE(i, n)
        LANES most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
    for (int j = 0; j < LINE; j++)
        found = most[j] > found ? most[j] : found;
    return found;
}

/* v = beta2*old + (1 - beta2)*g^2 with g = (m - beta1*last)/(1 - beta1); v may be `last` or `old`. */
static void rebuild(float *v, const float *m, const float *last, const float *old, const float *k, int64_t n)
{
    const float beta1 = k[BETA1], rest1 = k[ONE_MINUS_BETA1], beta2 = k[BETA2], rest2 = k[ONE_MINUS_BETA2];
    EACH_LINE(i, n) {
        PREFETCH(v + i, n);
        LANES {
            float g = (m[i + j] - last[i + j] * beta1) / rest1;
            v[i + j] = old[i + j] * beta2 + g * rest2 * g;
        }
    }
}

void lamb_ratio(int64_t begin, int64_t end, const int64_t *pointers, int64_t tensors, const uint8_t *exp_avg_bits,
                int64_t exp_avg_stride, int64_t plane, const float *exp_avg_scale, uint8_t *last_bits,
                float *last_scale, const void *exp_avg_sq, float *fresh, const int32_t *started, const float *coef,
                const int32_t *block_tensor, const int64_t *block_start, const uint8_t *live,
                const int32_t *live_row, const int32_t *skip, float *largest, double *norms, int64_t norms_stride,
                int64_t blocks_per_chunk, int64_t DTYPE, int64_t ALIGNED, int64_t VARIANCE, int64_t EPS_INSIDE,
                int64_t PRECONDITIONED, int64_t DEEPSPEED, int64_t BLEND, int64_t TERNARY, int64_t BLOCK)
{
    float m[MOST], last[MOST], d[MOST], ratio[MOST], wide[MOST];
    for (int64_t b = begin; b < end && !*skip; b++) {
        struct place at = tensor_of(b, pointers, tensors, coef, block_tensor, block_start, DTYPE);
        const float *k = at.k, *frozen = variance_of(exp_avg_sq, VARIANCE, b, wide, BLOCK);
        float *v = fresh + b * BLOCK;
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
        rebuild(v, m, *started ? last : v, *started ? v : frozen, k, BLOCK);
        only_live(v, live, live_row[b], BLOCK);
        if (DEEPSPEED) {
            denom(ratio, frozen, k, EPS_INSIDE, BLOCK);
            denom(d, v, k, EPS_INSIDE, BLOCK);
        }
        EACH_LINE(i, BLOCK) {
            PREFETCH(frozen + i, BLOCK);
            if (DEEPSPEED)
                LANES ratio[i + j] /= d[i + j];
            else
                LANES ratio[i + j] = frozen[i + j] / v[i + j];
        }
        only_live(ratio, live, live_row[b], BLOCK);
        largest[b] = largest_of(ratio, BLOCK);
        memcpy(last_at, now_at, BLOCK / 8);
        if (TERNARY)
            memcpy(last_at + plane, now_at + plane, BLOCK / 8);
        last_scale[b] = exp_avg_scale[b];
        if (BLEND)
            blend(at, m, frozen, norms, norms_stride, b, EPS_INSIDE, live, live_row[b], BLOCK);
    }
}
