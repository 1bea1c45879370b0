/* Moves a block by its gradient in one pass, with moments of each kind, and writes back what was widened. */

#pragma once

#include "codes.h"

static int32_t any_of(const int32_t *lanes)
{
    int32_t any = 0;
    for (int j = 0; j < LINE; j++)
        any |= lanes[j];
    return any;
}

/* Moves a block by its gradient, in one pass; returns whether any of that does not count, and so stays. */
static int32_t move_by_gradient(float *restrict x, float *restrict m, float *restrict v, const float *restrict g,
                                const float *row, int64_t n)
{
    int32_t bad[LINE] = {0};
    KEEP(k, row);
    EACH_LINE(i, n) {
        PREFETCH(x + i, n);
        PREFETCH(m + i, n);
        PREFETCH(v + i, n);
        PREFETCH(g + i, n);
        LANES {
            float new_m = momentum(m[i + j], g[i + j], k), new_v = variance(v[i + j], g[i + j], k);
            float to = moved(x[i + j], preconditioned(new_m, new_v, k, 0), k);
            int32_t fine = counts(g[i + j], k);
            m[i + j] = fine ? new_m : m[i + j];
            v[i + j] = fine ? new_v : v[i + j];
            x[i + j] = fine ? to : x[i + j];
            bad[j] |= !fine;
        }
    }
    return any_of(bad);
}

/* Writes back moments that were widened, rounded by bits that are drawn for the elements of block `drawn`. */
static void narrow_moments(struct Stored exp_avg, struct Stored exp_avg_sq, const float *m, const float *v, int64_t b,
                           int64_t drawn, int64_t done, int64_t n)
{
    uint32_t word[MOST / 2];
    moment_words(word, drawn, done, n);
    if (exp_avg.exponents) {
        store_moment((uint8_t *)exp_avg.numbers + b * n, exp_avg.exponents + b, m, word, 1, n);
        store_moment((uint8_t *)exp_avg_sq.numbers + b * n, exp_avg_sq.exponents + b, v, word, 0, n);
        return;
    }
    uint16_t *to_m = (uint16_t *)exp_avg.numbers + b * n, *to_v = (uint16_t *)exp_avg_sq.numbers + b * n;
    for (int64_t half = 0; half < 2; half++)
        for (int64_t i = 0, at = half * n / 2; i < n / 2; i++, at++) {
            uint32_t bits = half_of(word[i], half);
            to_m[at] = to_bf16(m[at], bits);
            to_v[at] = to_bf16(v[at], bits);
        }
}

/* A line of `move_by_gradient` on moments in bfloat16. */
static inline void move_line(float *restrict x, uint16_t *restrict m, uint16_t *restrict v, const float *restrict g,
                             const uint32_t *restrict word, int64_t second, int32_t *restrict bad, const float *k)
{
    LANES {
        float new_m = momentum(from_bf16(m[j]), g[j], k), new_v = variance(from_bf16(v[j]), g[j], k);
        float to = moved(x[j], preconditioned(new_m, new_v, k, 0), k);
        uint32_t bits = half_of(word[j], second);
        int32_t fine = counts(g[j], k);
        x[j] = fine ? to : x[j];
        m[j] = fine ? bfloat16(bits_of(new_m), bits) : m[j];
        v[j] = fine ? bfloat16(bits_of(new_v), bits) : v[j];
        bad[j] |= !fine;
    }
}

/* `move_by_gradient` on moments in bfloat16, two lines half a block apart at a time. */
static int32_t move_and_narrow(float *restrict x, struct Stored exp_avg, struct Stored exp_avg_sq,
                               const float *restrict g, const float *row, int64_t b, int64_t drawn, int64_t done,
                               int64_t n)
{
    int32_t bad[LINE] = {0};
    uint16_t *m = (uint16_t *)exp_avg.numbers + b * n, *v = (uint16_t *)exp_avg_sq.numbers + b * n;
    uint64_t first = (uint64_t)drawn * n;
    uint32_t seed = block_seed(first >> 32, done), word[LINE];
    KEEP(k, row);
    EACH_LINE(i, n / 2) {
        LANES word[j] = moments_word(first + i + j, seed);
        for (int64_t second = 0, at = i; second < 2; second++, at += n / 2) {
            PREFETCH(x + at, n);
            PREFETCH(m + at, n);
            PREFETCH(v + at, n);
            PREFETCH(g + at, n);
            move_line(x + at, m + at, v + at, g + at, word, second, bad, k);
        }
    }
    return any_of(bad);
}

/* A line of `move_by_gradient` on moments in codes: m and v as they were, what becomes of them in steps. */
static inline void move_line_of_codes(float *restrict x, const float *restrict m, const float *restrict v,
                                      const float *restrict g, uint32_t *restrict steps_m, uint32_t *restrict steps_v,
                                      uint32_t *restrict most_m, uint32_t *restrict most_v,
                                      const uint32_t *restrict word, int64_t second, int32_t *restrict bad,
                                      const float *k)
{
    LANES {
        float new_m = momentum(m[j], g[j], k), new_v = variance(v[j], g[j], k);
        float to = moved(x[j], preconditioned(new_m, new_v, k, 0), k);
        uint32_t bits = half_of(word[j], second);
        int32_t fine = counts(g[j], k);
        x[j] = fine ? to : x[j];
        steps_m[j] = signed_steps(fine ? new_m : m[j], bits);
        steps_v[j] = signed_steps(fine ? new_v : v[j], bits);
        most_m[j] = larger(most_m[j], steps_m[j] & ~NEGATIVE);
        most_v[j] = larger(most_v[j], steps_v[j] & ~NEGATIVE);
        bad[j] |= !fine;
    }
}

/* `move_by_gradient` on moments in codes, two lines half a block apart at a time. */
static int32_t move_and_code(float *restrict x, struct Stored exp_avg, struct Stored exp_avg_sq,
                             const float *restrict g, const float *row, int64_t b, int64_t drawn, int64_t done,
                             int64_t n)
{
    uint8_t *codes_m = (uint8_t *)exp_avg.numbers + b * n, *codes_v = (uint8_t *)exp_avg_sq.numbers + b * n;
    uint8_t *exponent_m = exp_avg.exponents + b, *exponent_v = exp_avg_sq.exponents + b;
    float m[MOST], v[MOST];
    uint32_t steps_m[MOST], steps_v[MOST], most_m[LINE] = {0}, most_v[LINE] = {0}, word[LINE];
    int32_t bad[LINE] = {0};
    uint64_t first = (uint64_t)drawn * n;
    uint32_t seed = block_seed(first >> 32, done);
    KEEP(k, row);
    load_codes(m, codes_m, *exponent_m, 1, n);
    load_codes(v, codes_v, *exponent_v, 0, n);
    EACH_LINE(i, n / 2) {
        LANES word[j] = moments_word(first + i + j, seed);
        for (int64_t second = 0, at = i; second < 2; second++, at += n / 2) {
            PREFETCH(x + at, n);
            PREFETCH(g + at, n);
            move_line_of_codes(x + at, m + at, v + at, g + at, steps_m + at, steps_v + at, most_m, most_v, word,
                               second, bad, k);
        }
    }
    store_codes(codes_m, exponent_m, largest(most_m, LINE), steps_m, 1, 0, n);
    store_codes(codes_v, exponent_v, largest(most_v, LINE), steps_v, 0, 1, n);
    return any_of(bad);
}
