/* How a C kernel reaches its block, bits and the users' tensors, as block_io.py and user_tensors.py for Triton;
   formulas are generated from rules.py and bit_rules.py.

   A kernel works on blocks begin..end-1 of the flat index space, one after the other. A block's operands are
   arrays of at most MOST floats that stay in the first-level cache; every loop over them is one or a few lines
   of the eager op, and vectorises. Compiled without contraction, each operation rounds once, as there. */

#pragma once

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Compilers take half of the registers' width unless told: memory would not follow. These kernels compute. */
#if defined(__AVX512BW__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "generated.h"

/* A kernel: on programs begin..end-1, with the arguments of its Triton kernel. Hidden: libraries that are loaded may
   have functions of the same name, as libc has an `advance`. */
#define KERNEL(name) __attribute__((visibility("hidden"))) void name(int64_t begin, int64_t end, name##_ARGUMENTS)

#define MOST 1024 /* elements of the largest block */
#define LINE 16   /* elements of a cache line */
#define WHOLE 0xFFFF /* the bits of a line of which all counts */

#define EACH_LINE(i, n) for (int64_t i = 0; i < (n); i += LINE)
#define LANES _Pragma("omp simd") for (int j = 0; j < LINE; j++) /* independent; one or two vectors */

enum { FP32, BF16, FP16, MIXED, ALIGNED }; /* dtypes of users' tensors, and what is added where they are aligned */

enum { FULL, EMPTY }; /* rows of the table of live elements: all count, none does */

/* The block's place: its tensor's row of the coefficients, its address and dtype, the first element in it. */
struct place {
    const float *k;
    char *base;
    int64_t kind, start;
};

static struct place tensor_of(int64_t b, const int64_t *pointers, int64_t tensors, const float *coef,
                              const int32_t *block_tensor, const int32_t *block_start, int64_t stored, int64_t n)
{
    static const float none[COLUMNS];
    if (tensors == 0) { /* then the index space is one block of padding, and no table has a row for it */
        struct place nowhere = {none, NULL, FP32, 0};
        return nowhere;
    }
    int64_t t = block_tensor[b];
    int64_t kind = stored % ALIGNED == MIXED ? pointers[tensors + t] : stored % ALIGNED;
    struct place found = {coef + t * COLUMNS, (char *)(intptr_t)pointers[t], kind, block_start[b] * n};
    return found;
}

/* Asks for the line of the next block that lies where this block's line is: a block of floats is a page, where
   processors' own prefetching ends. One line at a time, between arithmetic: more wait for one another. */
#define PREFETCH(x, n) __builtin_prefetch((x) + (n))

/* A row of coefficients, to be kept in registers: stores of floats may change any other memory. */
#define KEEP(k, row) float k[COLUMNS]; memcpy(k, row, sizeof k)

/* ---------------------------------------------------------------- packed bits, LSB first */

/* The bits of a line. */
static inline int32_t word_of(const uint8_t *bits)
{
    uint16_t word;
    memcpy(&word, bits, 2);
    return word;
}

/* yes where a bit is set, no where not. */
static inline void choose(float *restrict x, const uint8_t *restrict bits, float yes, float no, int64_t n)
{
    EACH_LINE(i, n) {
        int32_t word = word_of(bits + i / 8);
        LANES x[i + j] = word >> j & 1 ? yes : no;
    }
}

/* bits = where set[i] is 1, else 0; eight bytes make one by a multiplication. */
static void store_set(uint8_t *restrict bits, const uint8_t *restrict set, int64_t n)
{
    for (int64_t i = 0; i < n / 8; i++) {
        uint64_t word;
        memcpy(&word, set + 8 * i, 8);
        bits[i] = word * 0x0102040810204080u >> 56;
    }
}

/* What bits stand for: scale and -scale, and 0 for zeros where ternary. */
static inline void scaled(float *restrict x, const uint8_t *restrict bits, int64_t plane, float scale, int64_t ternary,
                   int64_t n)
{
    choose(x, bits, scale, -scale, n);
    for (int64_t i = 0; ternary && i < n; i += LINE) {
        int32_t nonzero = word_of(bits + plane + i / 8);
        LANES x[i + j] = nonzero >> j & 1 ? x[i + j] : 0.0f;
    }
}

static void store_bits(uint8_t *restrict bits, int64_t plane, const float *restrict c, int64_t ternary, int64_t n)
{
    uint8_t set[MOST];
    for (int64_t i = 0; i < n; i++)
        set[i] = c[i] >= 0;
    store_set(bits, set, n);
    if (ternary) {
        for (int64_t i = 0; i < n; i++)
            set[i] = c[i] != 0;
        store_set(bits + plane, set, n);
    }
}

/* Where a block's bits lie: rows of a chunk each, `stride` bytes apart. */
static int64_t bytes_at(int64_t b, int64_t blocks_per_chunk, int64_t stride, int64_t n)
{
    int64_t chunk = b / blocks_per_chunk;
    return chunk * stride + (b - chunk * blocks_per_chunk) * (n / 8);
}

/* Adds 8-byte numbers. */
static inline void add_words(int64_t *total, const uint8_t *bytes, int64_t count)
{
    uint64_t sum = 0, each;
    for (int64_t i = 0; i < count; i++) {
        memcpy(&each, bytes + 8 * i, 8);
        sum += each;
    }
    __atomic_fetch_add(total, (int64_t)sum, __ATOMIC_RELAXED);
}

/* ---------------------------------------------------------------- which elements count */

/* x = 0 where an element does not count. */
static void only_live(float *restrict x, const uint8_t *restrict live, int64_t row, int64_t n)
{
    for (int64_t i = 0; row != FULL && i < n; i += LINE) {
        int32_t word = word_of(live + (row * n + i) / 8);
        LANES x[i + j] = word >> j & 1 ? x[i + j] : 0.0f;
    }
}

/* The bits of a line's elements that count. */
static inline int32_t live_word(const uint8_t *live, int64_t row, int64_t i, int64_t n)
{
    return row == FULL ? WHOLE : word_of(live + (row * n + i) / 8);
}

/* Elements of a block up to its last line in which any counts. */
static int64_t some_of(const uint8_t *live, int64_t row, int64_t n)
{
    int64_t some = n;
    while (some && !live_word(live, row, some - LINE, n))
        some -= LINE;
    return some;
}

static int is_live(const uint8_t *live, int64_t row, int64_t i, int64_t n)
{
    return row == FULL || (live[row * (n / 8) + i / 8] >> i % 8 & 1);
}

/* ---------------------------------------------------------------- users' tensors */

static float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static float from_bf16(uint16_t x)
{
    return float_of((uint32_t)x << 16);
}

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

/* To nearest even; `more` 16 random bits make it stochastic: what is cut off carries with its odds. */
static uint16_t to_bf16(float x, uint32_t more)
{
    return x == x ? bfloat16(bits_of(x), more) : 0x7FC0;
}

static float load_one(struct place at, int64_t i)
{
    switch (at.kind) {
    case FP32: return ((const float *)at.base)[at.start + i];
    case BF16: return from_bf16(((const uint16_t *)at.base)[at.start + i]);
    default: return ((const _Float16 *)at.base)[at.start + i];
    }
}

/* Elements i..i+m-1 of it, whole lines, of a block of n. */
static inline void load_run(float *restrict x, struct place at, int64_t i, int64_t m, int64_t n)
{
    const float *wide = (const float *)at.base + at.start + i;
    const uint16_t *narrow = (const uint16_t *)at.base + at.start + i;
    if (at.kind == FP32) {
        EACH_LINE(l, m) {
            PREFETCH(wide + l, n);
            LANES x[l + j] = wide[l + j];
        }
    } else if (at.kind == BF16) {
        EACH_LINE(l, m) {
            PREFETCH(narrow + l, n);
            LANES x[l + j] = from_bf16(narrow[l + j]);
        }
    } else {
        for (int64_t l = 0; l < m; l++)
            x[l] = ((const _Float16 *)narrow)[l];
    }
}

/* A block of a user's tensor; zeros where nothing counts, there is nothing, or it has no address. */
static void load_user(float *restrict x, struct place at, const uint8_t *restrict live, int64_t row, int64_t n)
{
    if (at.base && row == FULL) {
        load_run(x, at, 0, n, n);
        return;
    }
    EACH_LINE(i, n) {
        int32_t word = at.base ? live_word(live, row, i, n) : 0;
        if (word == WHOLE)
            load_run(x + i, at, i, LINE, n);
        else
            memset(x + i, 0, LINE * sizeof *x);
        for (; word != WHOLE && word; word &= word - 1)
            x[i + __builtin_ctz(word)] = load_one(at, i + __builtin_ctz(word));
    }
}

/* Whether a block lies as kernels work on it: all of it counts, in float32. */
static int is_plain(struct place at, int64_t row) { return at.base && row == FULL && at.kind == FP32; }

/* A block of a user's tensor: where it lies, or as load_user has it in `room`. */
static const float *user_block(float *restrict room, struct place at, const uint8_t *live, int64_t row, int64_t n)
{
    if (is_plain(at, row))
        return (const float *)at.base + at.start;
    load_user(room, at, live, row, n);
    return room;
}

/* Writes elements i..i+n-1 of it, which all count; `more` as for to_bf16. */
static inline void store_run(struct place at, int64_t i, const float *restrict x, const uint32_t *restrict more,
                             int64_t n)
{
    float *wide = (float *)at.base + at.start + i;
    uint16_t *narrow = (uint16_t *)at.base + at.start + i;
    if (at.kind == FP32)
        memcpy(wide, x, n * sizeof *x);
    for (int64_t j = 0; at.kind == BF16 && j < n; j++)
        narrow[j] = to_bf16(x[j], more[j]);
    for (int64_t j = 0; at.kind == FP16 && j < n; j++)
        ((_Float16 *)narrow)[j] = (_Float16)x[j];
}

/* What carries into the upper half of each element's bits: half a unit, to even; or 16 random bits. */
static void carries(uint32_t *restrict more, const float *restrict x, int64_t b, const int64_t *rounding, int64_t n)
{
    uint64_t first = (uint64_t)b * n;
    if (!rounding) {
        for (int64_t i = 0; i < n; i++)
            more[i] = half(bits_of(x[i]));
        return;
    }
    uint32_t seed = block_seed(first >> 32, *rounding);
    for (int64_t i = 0; i < n; i++)
        more[i] = random_bits(first + i, seed);
}

/* Writes where load_user reads, nowhere if that has no address, rounded to the tensor's dtype; `rounding` null:
   to nearest. */
static void store_user(struct place at, const float *restrict x, int64_t b, const int64_t *rounding,
                       const uint8_t *restrict live, int64_t row, int64_t n)
{
    uint32_t more[MOST];
    if (!at.base)
        return;
    if (at.kind == BF16)
        carries(more, x, b, rounding, n);
    if (row == FULL)
        store_run(at, 0, x, more, n);
    for (int64_t i = 0; row != FULL && i < n; i += LINE) {
        int32_t word = live_word(live, row, i, n), run = word == WHOLE ? LINE : 1;
        for (int64_t j = i; word; word >>= run, j += run)
            if (word & 1)
                store_run(at, j, x + j, more + j, run);
    }
}

/* What bfloat16 tensors lack of their masters, of each element, int16 or, in units of 256, int8; or null. */
struct correction {
    void *base;
    int64_t is_int16;
};

/* Adds to a block that load_user has read what was lost when it was rounded. */
static void restore(float *restrict x, struct correction of, int64_t b, int64_t n)
{
    const int8_t *eighths = (const int8_t *)of.base + b * n;
    const int16_t *whole = (const int16_t *)of.base + b * n;
    for (int64_t i = 0; of.is_int16 && i < n; i++)
        x[i] = float_of(restored(bits_of(x[i]), (uint32_t)(int32_t)whole[i]));
    for (int64_t i = 0; !of.is_int16 && i < n; i++)
        x[i] = float_of(restored(bits_of(x[i]), (uint32_t)(int32_t)eighths[i] << 8));
}

/* Does as store_user, whose random bits are those of block `drawn`, and keeps what rounding to bfloat16 loses. */
static void store_master(struct place at, const float *restrict x, int64_t b, int64_t drawn, const int64_t *rounding,
                         struct correction of, const uint8_t *restrict live, int64_t row, int64_t n)
{
    uint32_t u[MOST];
    if (!of.base || !at.base || at.kind != BF16) {
        store_user(at, x, drawn, rounding, live, row, n);
        return;
    }
    uint64_t first = (uint64_t)drawn * n;
    uint32_t seed = of.is_int16 ? 0 : block_seed(first >> 32, *rounding);
    for (int64_t i = 0; of.is_int16 && i < n; i++)
        u[i] = x[i] == x[i] ? bits_of(x[i]) : 0x7FC00000;
    for (int64_t i = 0; !of.is_int16 && i < n; i++)
        u[i] = x[i] == x[i] ? with_24_bits(bits_of(x[i]), random_bits(first + i, seed)) : 0x7FC00000;
    uint16_t *to = (uint16_t *)at.base + at.start;
    int8_t *eighths = (int8_t *)of.base + b * n;
    int16_t *whole = (int16_t *)of.base + b * n;
    if (row == FULL) {
        for (int64_t i = 0; i < n; i++)
            to[i] = nearest(u[i]);
        for (int64_t i = 0; of.is_int16 && i < n; i++)
            whole[i] = lost(u[i], nearest(u[i]));
        for (int64_t i = 0; !of.is_int16 && i < n; i++)
            eighths[i] = lost(u[i], nearest(u[i])) >> 8;
        return;
    }
    for (int64_t i = 0; i < n; i++)
        if (is_live(live, row, i, n)) {
            to[i] = nearest(u[i]);
            if (of.is_int16)
                whole[i] = lost(u[i], nearest(u[i]));
            else
                eighths[i] = lost(u[i], nearest(u[i])) >> 8;
        }
}

/* ---------------------------------------------------------------- arithmetic */

static void denominators(float *restrict d, const float *restrict v, const float *row, int64_t eps_inside, int64_t n)
{
    KEEP(k, row);
    EACH_LINE(i, n) {
        PREFETCH(v + i, n);
        if (eps_inside)
            LANES d[i + j] = denominator(v[i + j], k, 1);
        else
            LANES d[i + j] = denominator(v[i + j], k, 0);
    }
}

/* u = m / denominator; u may be m. */
static void precondition(float *u, const float *m, const float *v, const float *row, int64_t eps_inside, int64_t n)
{
    KEEP(k, row);
    EACH_LINE(i, n) {
        PREFETCH(m + i, n);
        PREFETCH(v + i, n);
        if (eps_inside)
            LANES u[i + j] = preconditioned(m[i + j], v[i + j], k, 1);
        else
            LANES u[i + j] = preconditioned(m[i + j], v[i + j], k, 0);
    }
}

/* Sums in float64 run in lanes, so that they vectorise without reassociation. */
static double sum_lanes(const double *lanes)
{
    double total = 0;
    for (int j = 0; j < LINE; j++)
        total += lanes[j];
    return total;
}

static double norm_of(const float *restrict x, int64_t n)
{
    double square[LINE] = {0};
    EACH_LINE(i, n)
        LANES square[j] += (double)x[i + j] * x[i + j];
    return sum_lanes(square);
}

static double sum_of(const float *restrict x, int64_t n)
{
    double sum[LINE] = {0};
    EACH_LINE(i, n)
        LANES sum[j] += x[i + j];
    return sum_lanes(sum);
}

/* Sums of |c| and c^2 over a block and, where ternary, how many elements are not zero. */
static void store_partials(double *partials, int64_t stride, int64_t b, const float *restrict c, int64_t ternary,
                           int64_t n)
{
    double absolute[LINE] = {0}, square[LINE] = {0};
    int64_t nonzero = 0;
    EACH_LINE(i, n)
        LANES {
            double wide = c[i + j];
            absolute[j] += fabs(wide);
            square[j] += wide * wide;
        }
    partials[b] = sum_lanes(absolute);
    partials[stride + b] = sum_lanes(square);
    if (ternary) {
        for (int64_t i = 0; i < n; i++)
            nonzero += c[i] != 0;
        partials[2 * stride + b] = nonzero;
    }
}
