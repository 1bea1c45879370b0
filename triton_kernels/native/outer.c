/* Matrices: signs with a scale of each row and of each column, and their average. */

#include "codes.h"
#include "headers.h"
#include "sums.h"

enum { ROWS, COLUMNS_OF_IT, LINES = 32, OF_A_TILE = 3, OF_BLOCKS = LINES * SUM_LANES };

/* A matrix: where a row of scales has its rows' and its columns', and how many it has. */
struct matrix {
    int64_t rows_at, columns_at, rows, columns;
};

static struct matrix matrix_of(struct Outer outer, int64_t t)
{
    const int32_t *of = outer.table + t, stride = outer.table_stride;
    return (struct matrix){of[0], of[stride], of[stride] - of[0], of[2 * stride]};
}

/* The scales of a block's elements times `share`; 0 behind the end of its tensor. */
static void element_scales(float *restrict s, const float *restrict scales, struct Outer outer, int64_t t, int64_t b,
                           float share, int64_t n)
{
    struct matrix of = matrix_of(outer, t);
    int64_t row = outer.start[b] / of.columns, column = outer.start[b] - row * of.columns, i = 0;
    for (; i < n && row < of.rows; row++, column = 0) {
        const float *columns = scales + of.columns_at + column;
        float own = scales[of.rows_at + row];
        int64_t run = of.columns - column < n - i ? of.columns - column : n - i;
        for (int64_t j = 0; j < run; j++)
            s[i + j] = product(own, columns[j]) * share;
        i += run;
    }
    memset(s + i, 0, (n - i) * sizeof *s);
}

KERNEL(outer_compress)
{
    float kept[MOST], room[MOST], wide[MOST], s[MOST] = {0};
    struct Stored of_c = {compensated, compensated_kind, NULL};
    if (*hold)
        return;
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, grads_table, tensors, coef, block_tensor, block_start, GRADS, BLOCK_SIZE);
        const float *g = user_block(room, at, live, live_row[b], BLOCK_SIZE);
        const float *scales = outer.scales + b / blocks_per_chunk * outer.scales_stride;
        float *c = load_stored(of_c, 1, b, wide, BLOCK_SIZE);
        double absolute[LINE] = {0};
        if (!*skipped)
            element_scales(s, scales, outer, block_tensor[b], b, 1.0f, BLOCK_SIZE);
        KEEP(k, at.k);
        EACH_LINE(i, BLOCK_SIZE) {
            PREFETCH(c + i, BLOCK_SIZE);
            LANES kept[i + j] = *skipped ? c[i + j] : residual(c[i + j], s[i + j], 0);
            LANES c[i + j] = with_gradient(kept[i + j], g[i + j], k);
        }
        only_live(c, live, live_row[b], BLOCK_SIZE);
        int32_t dropped = 0;
        for (int64_t i = 0; i < BLOCK_SIZE; i++)
            dropped |= !finite(c[i]);
        if (dropped)
            __atomic_fetch_or(found, NONFINITE, __ATOMIC_RELAXED);
        for (int64_t i = 0; dropped && i < BLOCK_SIZE; i++)
            c[i] = finite(c[i]) ? c[i] : kept[i];
        if (c == wide)
            store_drawn(of_c, 1, b, c, *drawn, BLOCK_SIZE);
        EACH_LINE(i, BLOCK_SIZE)
            LANES absolute[j] += fabs((double)c[i + j]);
        partials[b] = sum_lanes(absolute);
        store_bits(bits + bytes_at(b, blocks_per_chunk, bits_stride, BLOCK_SIZE), 0, c, 0, BLOCK_SIZE);
    }
}

/* partials[begin..end-1] by OF_BLOCKS lanes, of which those that have nothing need no sums. */
static double sum_of_blocks(const double *partials, int64_t begin, int64_t end)
{
    double lanes[OF_BLOCKS] = {0};
    int64_t used = 1;
    while (used < end - begin && used < OF_BLOCKS)
        used *= 2;
    for (int64_t at = begin; at < end; at++)
        lanes[(at - begin) % OF_BLOCKS] += partials[at];
    return tree_of(lanes, used);
}

/* `n` numbers from `at` on, where they lie in float32, or widened in `room`. */
static inline const float *line_of(const void *c, int64_t kind, int64_t at, int64_t n, float *room)
{
    if (kind == FP32)
        return (const float *)c + at;
    for (int64_t i = 0; i < n; i++)
        room[i] = from_bf16(((const uint16_t *)c)[at + i]);
    return room;
}

static double sum_of_row(const void *c, int64_t kind, int64_t at, int64_t columns)
{
    double lanes[SUM_LANES] = {0};
    float room[SUM_LANES];
    for (int64_t first = 0; first < columns; first += SUM_LANES) {
        int64_t n = columns - first < SUM_LANES ? columns - first : SUM_LANES;
        const float *x = line_of(c, kind, at + first, n, room);
        for (int64_t l = 0; l < n; l++)
            lanes[l] += fabs((double)x[l]);
    }
    return tree_sum(lanes);
}

/* Of `lines` neighbouring columns at once, lane by lane. */
static void sums_of_columns(double *restrict sums, const void *c, int64_t kind, int64_t at, struct matrix of,
                            int64_t lines)
{
    double lanes[SUM_LANES][LINES] = {0};
    float room[LINES];
    for (int64_t i = 0; i < of.rows; i++) {
        const float *x = line_of(c, kind, at + i * of.columns, lines, room);
        for (int64_t j = 0; j < lines; j++)
            lanes[i % SUM_LANES][j] += fabs((double)x[j]);
    }
    for (int n = SUM_LANES / 2; n; n /= 2)
        for (int l = 0; l < n; l++)
            for (int j = 0; j < LINES; j++)
                lanes[l][j] = lanes[2 * l][j] + lanes[2 * l + 1][j];
    memcpy(sums, lanes[0], LINES * sizeof *sums);
}

KERNEL(outer_scales)
{
    if (*hold)
        return;
    for (int64_t p = begin; p < end; p++) {
        const int32_t *tile = tiles + p * OF_A_TILE;
        int64_t t = tile[0], first = tile[2], from = first_block[t];
        struct matrix of = matrix_of(outer, t);
        int64_t at = from * BLOCK_SIZE;
        float *scales = outer.scales + from / blocks_per_chunk * outer.scales_stride;
        if (tile[1] == ROWS) {
            for (int64_t i = first; i < of.rows && i < first + LINES; i++)
                scales[of.rows_at + i] = sum_of_row(compensated, compensated_kind, at + i * of.columns, of.columns);
            continue;
        }
        double sums[LINES], total = sum_of_blocks(partials, from, first_block[t + 1]);
        int64_t lines = of.columns - first < LINES ? of.columns - first : LINES;
        sums_of_columns(sums, compensated, compensated_kind, at + first, of, lines);
        for (int64_t j = 0; j < lines; j++)
            scales[of.columns_at + first + j] = share(sums[j], total);
    }
}

KERNEL(outer_mean)
{
    float s[MOST], d[MOST];
    int32_t bad = answer(begin, arrived.words, arrived.words_stride, arrived.own_words, arrived.world_size, *hold,
                         flags, kept_words, words, header);
    if (bad)
        return;
    for (int64_t b = begin; b < end; b++) {
        float *m = momentum + b * BLOCK_SIZE, *x = direction + b * BLOCK_SIZE;
        memset(d, 0, sizeof d);
        for (int64_t w = 0; w < arrived.world_size; w++) { /* in rank order */
            const uint8_t *from = arrived.bits + w * arrived.bits_stride + b * (BLOCK_SIZE / 8);
            element_scales(s, outer.scales + w * outer.scales_stride, outer, block_tensor[b], b, per_worker,
                           BLOCK_SIZE);
            EACH_LINE(i, BLOCK_SIZE) {
                int32_t word = word_of(from + i / 8);
                LANES d[i + j] += word >> j & 1 ? s[i + j] : -s[i + j];
            }
        }
        EACH_LINE(i, BLOCK_SIZE) {
            LANES m[i + j] = weighted(m[i + j], d[i + j], beta, one_minus_beta);
            LANES x[i + j] = weighted(d[i + j], m[i + j], lead, one_minus_lead);
        }
        only_live(m, live, live_row[b], BLOCK_SIZE);
        only_live(x, live, live_row[b], BLOCK_SIZE);
    }
}
