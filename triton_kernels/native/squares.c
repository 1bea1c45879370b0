/* Shares squares of gradients, and renews a variance. */

#include "codes.h"

enum { TOTAL, ALIVE, PROJECTED, PEAK };

/* Gives a block random signs: those of 32 elements are a hashed word. */
static void sign(float *restrict x, uint64_t word, uint32_t seed, int64_t n)
{
    for (int64_t i = 0; i < n; i += 32) {
        uint32_t bits = mixed((uint32_t)(word + i / 32) ^ seed);
        for (int j = 0; j < 32; j++)
            x[i + j] = bits >> j & 1 ? negative(x[i + j]) : x[i + j];
    }
}

/* Writes the sums of so many neighbours of a block, which it overwrites. */
static void store_sums(float *restrict sums, float *restrict x, int64_t share, int64_t n)
{
    for (; share > 1; share /= 2) { /* neighbours' sums, again and again */
        n /= 2;
        for (int64_t i = 0; i < n; i++)
            x[i] = x[2 * i] + x[2 * i + 1];
    }
    for (int64_t i = 0; i < n; i++)
        sums[i] = x[i] + 0.0f; /* no -0.0 */
}

/* Writes the means of g^2 and of the squares' EMA, weighted by g^2: how large both are where there is a gradient. */
static void store_peaks(float *restrict peak, float *restrict met, const float *g, const float *squares, int64_t n)
{
    double weight = 0, of_peak = 0, of_met = 0;
    for (int64_t i = 0; i < n; i++) {
        double square = (double)g[i] * g[i];
        weight += square;
        of_peak += square * square;
        of_met += square * squares[i];
    }
    double by = weight > 0 ? weight : 1;
    *peak = of_peak / by <= FLT_MAX ? of_peak / by : FLT_MAX; /* also of what is no number */
    *met = of_met / by <= FLT_MAX ? of_met / by : FLT_MAX;
}

KERNEL(tell_squares)
{
    float x[MOST], room[MOST];
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, grads_table, tensors, NULL, block_tensor, block_start, GRADS, BLOCK_SIZE);
        int64_t chunk = b / blocks_per_chunk, own = b - chunk * blocks_per_chunk;
        const float *squares = load_stored(worker_sq, 0, b, room, BLOCK_SIZE);
        code_nearest(logs.numbers + chunk * logs.numbers_stride + own * BLOCK_SIZE,
                     logs.exponents + chunk * logs.exponents_stride + own, squares, 0, 0, BLOCK_SIZE);
        load_user(x, at, live, live_row[b], BLOCK_SIZE);
        for (int64_t i = 0; factor && i < BLOCK_SIZE; i++)
            x[i] *= *factor;
        float *peak = peaks + chunk * peaks_stride + own;
        store_peaks(peak, peak + blocks_per_chunk, x, squares, BLOCK_SIZE);
        uint64_t word = (uint64_t)(first_block + b) * (BLOCK_SIZE / 32);
        sign(x, word, block_seed(word >> 32, *updates), BLOCK_SIZE);
        store_sums(projections + chunk * projections_stride + place[b], x, share[b], BLOCK_SIZE);
    }
}

KERNEL(tell_level)
{
    float x[MOST];
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, grads_table, tensors, NULL, block_tensor, block_start, GRADS, BLOCK_SIZE);
        int64_t row = live_row[b];
        memcpy(x, exp_avg_sq + b * BLOCK_SIZE, BLOCK_SIZE * sizeof *x);
        only_live(x, live, row, BLOCK_SIZE);
        sums[b] = fmin(sum_of(x, BLOCK_SIZE), FLT_MAX);
        load_user(x, at, live, row, BLOCK_SIZE);
        for (int64_t i = 0; factor && i < BLOCK_SIZE; i++)
            x[i] *= *factor;
        uint64_t word = (uint64_t)b * (BLOCK_SIZE / 32);
        sign(x, word, block_seed(word >> 32, *updates), BLOCK_SIZE);
        store_sums(projections + place[b], x, share[b], BLOCK_SIZE);
    }
}

KERNEL(average_squares)
{
    float mean[MOST], own[MOST];
    for (int64_t b = begin; b < end; b++) {
        memset(mean, 0, sizeof mean);
        for (int64_t w = 0; w < world_size; w++) { /* in rank order */
            const uint8_t *codes = arrived.numbers + w * arrived.numbers_stride + b * BLOCK_SIZE;
            load_codes(own, codes, arrived.exponents[w * arrived.exponents_stride + b], 0, BLOCK_SIZE);
            for (int64_t i = 0; i < BLOCK_SIZE; i++)
                mean[i] += own[i] * per_worker;
        }
        code_nearest(mean_numbers + b * BLOCK_SIZE, mean_exponents + b, mean, 0, 0, BLOCK_SIZE);
        load_codes(own, mean_numbers + b * BLOCK_SIZE, mean_exponents[b], 0, BLOCK_SIZE);
        only_live(own, live, live_row[b], BLOCK_SIZE);
        int64_t alive = 0;
        for (int64_t i = 0; i < BLOCK_SIZE; i++)
            alive += own[i] > 0;
        double square = 0;
        for (int64_t i = 0; i < BLOCK_SIZE / share[b]; i++) {
            float projected = 0;
            for (int64_t w = 0; w < world_size; w++)
                projected += arrived_projections[w * arrived_projections_stride + place[b] + i];
            double wide = projected * per_worker;
            square += wide * wide;
        }
        sums[TOTAL * sums_stride + b] = fmin(sum_of(own, BLOCK_SIZE), FLT_MAX);
        sums[ALIVE * sums_stride + b] = alive;
        sums[PROJECTED * sums_stride + b] = square;
        for (int row = 0; row < 2; row++) {
            float peak = 0;
            for (int64_t w = 0; w < world_size; w++)
                peak += arrived_peaks[w * arrived_peaks_stride + row * blocks + b] * per_worker;
            sums[(PEAK + row) * sums_stride + b] = peak;
        }
    }
}

/* c, momentum included where there are bits, in the unit of the next v; its scales are zero then. */
static void change_unit(float *restrict c, const float *restrict m, float s, const float *v, const float *next,
                        const float *row, int64_t eps_inside, int64_t ternary, int64_t n)
{
    float old[MOST], new[MOST];
    KEEP(k, row);
    denominators(old, v, row, eps_inside, n);
    denominators(new, next, row, eps_inside, n);
    for (int64_t i = 0; i < n; i++) {
        float kept = m ? carried(m[i], c[i], s, k, ternary) : residual(c[i], s, ternary);
        c[i] = in_unit(kept, v[i], old[i], new[i]);
    }
}

KERNEL(renew)
{
    float next[MOST], m[MOST], room[MOST], wide_c[MOST];
    uint16_t half_next[MOST];
    uint8_t coded_next[MOST], exponent_next;
    struct Stored v_of = {exp_avg_sq.numbers, exp_avg_sq.numbers_kind, exp_avg_sq.exponents};
    struct Stored next_of = {v_of.exponents ? (void *)coded_next : half_next, BF16, v_of.exponents ? &exponent_next : NULL};
    for (int64_t b = begin; b < end; b++) {
        int64_t chunk = b / blocks_per_chunk, own = b - chunk * blocks_per_chunk, t = block_tensor[b];
        const uint8_t *codes = means.numbers + chunk * means.numbers_stride + own * BLOCK_SIZE;
        uint8_t exponent = means.exponents[chunk * means.exponents_stride + own];
        load_codes(next, codes, exponent, 0, BLOCK_SIZE);
        renew_block(next, factors + t, factors_stride, BLOCK_SIZE);
        const float *v = load_variance(exp_avg_sq, t, b, room, BLOCK_SIZE);
        only_live(next, live, live_row[b], BLOCK_SIZE);
        if (v == room && !exp_avg_sq.factors) {
            store_nearest(next_of, 0, 0, next, BLOCK_SIZE);
            load_stored(next_of, 0, 0, next, BLOCK_SIZE);
        }
        if (compensated.numbers) {
            float *c = load_stored(compensated, 1, b, wide_c, BLOCK_SIZE);
            const uint8_t *packed = exp_avg.bits + bytes_at(b, blocks_per_chunk, exp_avg.bits_stride, BLOCK_SIZE);
            if (exp_avg.bits)
                scaled(m, packed, exp_avg.plane, exp_avg.scale[b], TERNARY, BLOCK_SIZE);
            const float *row = coef + t * COLUMNS;
            change_unit(c, exp_avg.bits ? m : NULL, scale[b], v, next, row, exp_avg_sq.EPS_INSIDE_SQRT, TERNARY,
                        BLOCK_SIZE);
            only_live(c, live, live_row[b], BLOCK_SIZE);
            if (c == wide_c)
                store_nearest(compensated, 1, b, c, BLOCK_SIZE);
            settled[b] += scale[b];
            scale[b] = 0;
            if (exp_avg.bits)
                exp_avg.scale[b] = 0;
        }
        if (!WRITES)
            continue;
        if (v_of.exponents) {
            memcpy((uint8_t *)v_of.numbers + b * BLOCK_SIZE, exp_avg_sq.factors ? codes : coded_next, BLOCK_SIZE);
            v_of.exponents[b] = exp_avg_sq.factors ? exponent : exponent_next;
        } else if (v == room) {
            memcpy((uint16_t *)v_of.numbers + b * BLOCK_SIZE, half_next, BLOCK_SIZE * sizeof *half_next);
        } else {
            memcpy((float *)v_of.numbers + b * BLOCK_SIZE, next, BLOCK_SIZE * sizeof *next);
        }
    }
}
