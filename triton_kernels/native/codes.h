/* Numbers in a byte each, as codes.py has them, and what is stored in them, in bfloat16 or in float32. */

#pragma once

#include "block_io.h"

static inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

#define NEGATIVE 0x80000000u /* set in steps of numbers that are */

/* The steps of a number, rounded by random bits, with its sign. */
static inline uint32_t signed_steps(float x, uint32_t bits)
{
    uint32_t steps = drawn_steps(bits_of(x) & ~NEGATIVE, bits);
    return x < 0 ? steps | NEGATIVE : steps;
}

/* The largest number of steps in a block. */
static inline uint32_t largest(const uint32_t *steps, int64_t n)
{
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++)
        most = larger(most, steps[i] & ~NEGATIVE);
    return most;
}

/* Writes a block of numbers that were rounded to `steps`, below the exponent of the largest, `most`. */
static inline void store_codes(uint8_t *restrict codes, uint8_t *restrict exponent, uint32_t most,
                               const uint32_t *restrict steps, int is_signed, int nonzero, int64_t n)
{
    uint32_t top = exponent_above(most);
    *exponent = top;
    for (int64_t i = 0; i < n; i++) {
        uint32_t size = steps[i] & ~NEGATIVE;
        uint32_t code = below(size, top, is_signed ? SIGNED_LOGARITHMS : LOGARITHMS);
        code = nonzero ? nonzero_code(code, size) : code;
        codes[i] = is_signed ? signed_code(code, steps[i] >> 31) : code;
    }
}

static inline void load_codes(float *restrict x, const uint8_t *restrict codes, uint32_t exponent, int is_signed,
                              int64_t n)
{
    uint32_t u[MOST], most = is_signed ? SIGNED_LOGARITHMS : LOGARITHMS;
    for (int64_t i = 0; i < n; i++)
        u[i] = bits_above(codes[i] & most, exponent, most) | (uint32_t)(is_signed && codes[i] >= SIGN) << 31;
    memcpy(x, u, n * sizeof *x);
}

/* Writes a block of a moment as codes, rounded by random bits. */
static void store_moment(uint8_t *restrict codes, uint8_t *restrict exponent, const float *restrict x,
                         const uint32_t *restrict word, int is_signed, int64_t n)
{
    uint32_t steps[MOST];
    for (int64_t half = 0; half < 2; half++)
        for (int64_t i = 0, at = half * n / 2; i < n / 2; i++, at++)
            steps[at] = signed_steps(x[at], half_of(word[i], half));
    store_codes(codes, exponent, largest(steps, n), steps, is_signed, !is_signed, n);
}

/* To nearest. */
static void code_nearest(uint8_t *restrict codes, uint8_t *restrict exponent, const float *restrict x, int is_signed,
                         int nonzero, int64_t n)
{
    uint32_t steps[MOST];
    for (int64_t i = 0; i < n; i++)
        steps[i] = rounded_steps(bits_of(x[i]) & ~NEGATIVE) | (x[i] < 0 ? NEGATIVE : 0);
    store_codes(codes, exponent, largest(steps, n), steps, is_signed, nonzero, n);
}

/* The random words of a block's moments, for two halves. */
static void moment_words(uint32_t *restrict word, int64_t b, int64_t done, int64_t n)
{
    uint64_t first = (uint64_t)b * n;
    uint32_t seed = block_seed(first >> 32, done);
    for (int64_t i = 0; i < n / 2; i++)
        word[i] = moments_word(first + i, seed);
}

/* A field of a noun with its row of the noun's exponents. */
#define ROW_OF(noun, field, row) \
    row_of((noun).field, (noun).field##_kind, (noun).exponents, (noun).exponents_stride, row)
static inline struct Stored row_of(void *numbers, int64_t kind, uint8_t *exponents, int64_t stride, int64_t row)
{
    return (struct Stored){numbers, kind, exponents ? exponents + row * stride : NULL};
}

enum { FACTOR, USUAL, LEAST }; /* rows of factors */

/* Makes v of a block of mean squares, by a tensor's column of factors. */
static inline void renew_block(float *restrict v, const float *column, int64_t stride, int64_t n)
{
    const float factor = column[FACTOR * stride], usual = column[USUAL * stride], least = column[LEAST * stride];
    for (int64_t i = 0; i < n; i++)
        v[i] = renewed(v[i], factor, usual, least);
}

/* A divisor's variance. */
static inline struct Stored variance_in(struct Divisor of)
{
    return (struct Stored){of.numbers, of.numbers_kind, of.exponents};
}

/* Whether numbers lie in memory in float32. */
static inline int is_plainly(struct Stored of) { return of.numbers_kind == FP32 && !of.exponents; }

/* A block of what is stored, where it lies in float32, or widened in `room`. */
static float *load_stored(struct Stored of, int is_signed, int64_t b, float *restrict room, int64_t n)
{
    if (of.exponents) {
        load_codes(room, (const uint8_t *)of.numbers + b * n, of.exponents[b], is_signed, n);
        return room;
    }
    if (of.numbers_kind == FP32)
        return (float *)of.numbers + b * n;
    const uint16_t *from = (const uint16_t *)of.numbers + b * n;
    EACH_LINE(i, n) {
        PREFETCH(from + i, n);
        LANES room[i + j] = from_bf16(from[i + j]);
    }
    return room;
}

/* A block of a variance by which gradients are divided, where it lies in float32, or in `room`. */
static float *load_variance(struct Preconditioner of, int64_t t, int64_t b, float *restrict room, int64_t n)
{
    float *v = load_stored((struct Stored){of.numbers, of.numbers_kind, of.exponents}, 0, b, room, n);
    if (of.factors)
        renew_block(v, of.factors + t, of.factors_stride, n);
    return v;
}

/* Stores a block that was widened, rounded by bits that are drawn of the updates `done`; x becomes what is stored. */
static void store_drawn(struct Stored of, int is_signed, int64_t b, float *restrict x, int64_t done, int64_t n)
{
    uint32_t word[MOST / 2];
    moment_words(word, b, done, n);
    if (of.exponents) {
        store_moment((uint8_t *)of.numbers + b * n, of.exponents + b, x, word, is_signed, n);
        load_codes(x, (uint8_t *)of.numbers + b * n, of.exponents[b], is_signed, n);
        return;
    }
    uint16_t *restrict to = (uint16_t *)of.numbers + b * n;
    for (int64_t half = 0; half < 2; half++)
        for (int64_t i = 0, at = half * n / 2; i < n / 2; i++, at++) {
            to[at] = to_bf16(x[at], half_of(word[i], half));
            x[at] = from_bf16(to[at]);
        }
}

/* The same to nearest. */
static void store_nearest(struct Stored of, int is_signed, int64_t b, const float *restrict x, int64_t n)
{
    if (of.exponents) {
        code_nearest((uint8_t *)of.numbers + b * n, of.exponents + b, x, is_signed, !is_signed, n);
        return;
    }
    uint16_t *restrict to = (uint16_t *)of.numbers + b * n;
    for (int64_t i = 0; i < n; i++)
        to[i] = to_bf16(x[i], half(bits_of(x[i])));
}
