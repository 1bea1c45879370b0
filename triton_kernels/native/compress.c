/* Compression and exchange. */

#include "codes.h"
#include "headers.h"

KERNEL(flatten)
{
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, tensors_table, number, NULL, block_tensor, block_start, TENSORS, BLOCK_SIZE);
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

/* Sums of |c| and of c^2, as store_partials makes them, line by line. */
struct sums {
    double absolute[LINE], square[LINE];
};

static inline void add_line(struct sums *restrict sums, const float *restrict c)
{
    LANES {
        double wide = c[j];
        sums->absolute[j] += fabs(wide);
        sums->square[j] += wide * wide;
    }
}

/* Stores the sums of a block of which all counts; returns whether they are finite, as then is all of it. */
static int store_sums(double *partials, int64_t stride, int64_t b, const struct sums *sums)
{
    partials[b] = sum_lanes(sums->absolute);
    partials[stride + b] = sum_lanes(sums->square);
    return isfinite(partials[stride + b]);
}

/* c = g*(1 - beta1)*unit + kept; unit = 1/denominator where there is v. In one pass with the sums: what waits for
   memory and what for arithmetic overlap. */
static inline void compensate(float *restrict c, float *restrict kept, const float *restrict g,
                              const float *restrict v, const uint8_t *bits, int64_t plane, float scale,
                              const float *row, float s, struct sums *restrict sums, int64_t eps_inside,
                              int64_t ternary, int64_t n)
{
    KEEP(k, row);
    EACH_LINE(i, n) {
        float m[LINE];
        PREFETCH(c + i, n);
        PREFETCH(g + i, n);
        scaled(m, bits + i / 8, plane, scale, ternary, LINE);
        LANES kept[i + j] = carried(m[j], c[i + j], s, k, ternary);
        if (v) {
            PREFETCH(v + i, n);
            LANES c[i + j] = with_preconditioned(kept[i + j], g[i + j], v[i + j], k, eps_inside);
        } else {
            LANES c[i + j] = with_gradient(kept[i + j], g[i + j], k);
        }
        add_line(sums, c + i);
    }
}

/* An element that is not finite drops its gradient; returns whether there are any. */
static int drop_bad(float *restrict c, const float *restrict kept, int64_t n)
{
    int32_t dropped = 0;
    for (int64_t i = 0; i < n; i++)
        dropped |= !finite(c[i]);
    for (int64_t i = 0; dropped && i < n; i++)
        c[i] = finite(c[i]) ? c[i] : kept[i];
    return dropped;
}

static void follow_line_by_line(float *restrict own, const float *restrict g, const float *row, int64_t n)
{
    KEEP(k, row);
    EACH_LINE(i, n)
        LANES own[i + j] = followed(own[i + j], g[i + j], k);
}

/* The block of the worker's squares, one step on: where they lie, or widened in `room`; kept besides. */
static const float *follow(struct Stored squares, float *room, const float *g, const float *row, int64_t b,
                           const int64_t *drawn, int64_t n)
{
    float *own = load_stored(squares, 0, b, room, n), kept[MOST];
    follow_line_by_line(own, g, row, n);
    if (own == room) {
        memcpy(kept, own, n * sizeof *own);
        store_drawn(squares, 0, b, kept, *drawn, n);
    }
    return own;
}

/* Copies v, or what is the worker's own where there is none. */
static void fill_up(float *out, const float *v, const float *restrict own, int64_t n)
{
    EACH_LINE(i, n)
        LANES out[i + j] = shared_or_own(v[i + j], own[i + j]);
}

enum { OWN = 2 }; /* row of exponents: of a worker's own squares */

KERNEL(momentum_compress)
{
    float kept[MOST], room[MOST], wide[MOST], wide_squares[MOST], wide_c[MOST];
    if (*hold)
        return;
    struct Stored of_c = ROW_OF(compensated, numbers, 0);
    struct Stored squares = row_of(worker_sq, worker_sq_kind, compensated.exponents, compensated.exponents_stride, OWN);
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, grads_table, tensors, coef, block_tensor, block_start, GRADS, BLOCK_SIZE);
        float *c = load_stored(of_c, 1, b, wide_c, BLOCK_SIZE), s = compensated.scale[b], scale = exp_avg.scale[b];
        const uint8_t *packed = exp_avg.bits + bytes_at(b, blocks_per_chunk, exp_avg.bits_stride, BLOCK_SIZE);
        const float *g = user_block(room, at, live, live_row[b], BLOCK_SIZE);
        const float *v = exp_avg_sq.numbers ? load_variance(exp_avg_sq, block_tensor[b], b, wide, BLOCK_SIZE) : NULL;
        struct sums sums = {0};
        const float *own = NULL;
        int64_t some = some_of(live, live_row[b], BLOCK_SIZE);
        if (worker_sq)
            own = follow(squares, wide_squares, g, at.k, b, compensated.drawn, BLOCK_SIZE);
        if (own && v) {
            fill_up(wide, v, own, BLOCK_SIZE);
            v = wide;
        }
        if (!v) /* constants: each a loop of its own */
            compensate(c, kept, g, NULL, packed, exp_avg.plane, scale, at.k, s, &sums, 0, TERNARY, some);
        else if (exp_avg_sq.EPS_INSIDE_SQRT)
            compensate(c, kept, g, v, packed, exp_avg.plane, scale, at.k, s, &sums, 1, TERNARY, some);
        else
            compensate(c, kept, g, v, packed, exp_avg.plane, scale, at.k, s, &sums, 0, TERNARY, some);
        int narrow = c == wide_c;
        if (TERNARY || narrow || live_row[b] != FULL || !store_sums(partials, partials_stride, b, &sums)) {
            only_live(c, live, live_row[b], BLOCK_SIZE);
            if (drop_bad(c, kept, some))
                __atomic_fetch_or(found, NONFINITE, __ATOMIC_RELAXED);
            if (narrow)
                store_drawn(of_c, 1, b, c, *compensated.drawn, BLOCK_SIZE);
            store_partials(partials, partials_stride, b, c, TERNARY, some);
        }
        store_bits(bits + bytes_at(b, blocks_per_chunk, bits_stride, BLOCK_SIZE), exp_avg.plane, c, TERNARY,
                   BLOCK_SIZE);
    }
}

/* total += what bits stand for. */
static void add_scaled(float *restrict total, const uint8_t *restrict bits, int64_t plane, float scale,
                       int64_t ternary, int64_t n)
{
    if (ternary) {
        float x[MOST];
        scaled(x, bits, plane, scale, 1, n);
        EACH_LINE(i, n)
            LANES total[i + j] += x[i + j];
        return;
    }
    EACH_LINE(i, n) {
        int32_t word = word_of(bits + i / 8);
        LANES total[i + j] += word >> j & 1 ? scale : -scale;
    }
}

KERNEL(server_reduce)
{
    float total[MOST], own[MOST];
    int32_t found = answer(begin, arrived.words, arrived.words_stride, arrived.own_words, arrived.world_size, *hold,
                            flags, kept_words, words, header);
    if (*hold)
        return;
    struct Stored of_c = ROW_OF(compensated, numbers, 0);
    for (int64_t b = begin; b < end; b++) {
        float *c = compensated.numbers ? load_stored(of_c, 1, b, own, BLOCK_SIZE) : own;
        int narrow = compensated.numbers && c == own;
        float s = compensated.numbers ? compensated.scale[b] : 0.0f;
        if (!compensated.numbers)
            memset(own, 0, sizeof own);
        memset(total, 0, sizeof total);
        for (int64_t w = 0; w < (found ? 0 : arrived.world_size); w++) { /* in rank order */
            float scale = arrived.scales[w * arrived.scales_stride + arrived.slot[b]] * per_worker;
            const uint8_t *from = arrived.bits + w * arrived.bits_stride + b * (BLOCK_SIZE / 8);
            add_scaled(total, from, arrived.plane, scale, TERNARY, BLOCK_SIZE);
        }
        struct sums sums = {0};
        EACH_LINE(i, BLOCK_SIZE) {
            PREFETCH(c + i, BLOCK_SIZE);
            LANES c[i + j] = residual(c[i + j], s, TERNARY);
            if (!found)
                LANES c[i + j] += total[i + j];
            add_line(&sums, c + i);
        }
        if (TERNARY || narrow || live_row[b] != FULL) {
            only_live(c, live, live_row[b], BLOCK_SIZE);
            if (narrow)
                store_drawn(of_c, 1, b, c, *compensated.drawn, BLOCK_SIZE);
            store_partials(partials, partials_stride, b, c, TERNARY, BLOCK_SIZE);
        } else {
            store_sums(partials, partials_stride, b, &sums);
        }
        store_bits(bits + b * (BLOCK_SIZE / 8), arrived.plane, c, TERNARY, BLOCK_SIZE);
    }
}
