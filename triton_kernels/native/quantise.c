/* Gradients in 8, 4 or 1 bits, as quantise.py has them. */

#include "codes.h"
#include "headers.h"
#include "sums.h"

enum { BYTE = 8, NIBBLE = 4 };

static inline float scale_of_bits(uint16_t bits) { return float_of((uint32_t)bits << 16); }

/* The scale of a block. */
static uint16_t block_scale(const float *restrict x, double count, int64_t bits, int64_t n)
{
    if (bits == 1) {
        double sum[LINE] = {0};
        EACH_LINE(i, n)
            LANES sum[j] += fabsf(x[i + j]);
        return scale_bits(bits_of((float)(sum_lanes(sum) / (count > 1 ? count : 1))));
    }
    float most[LINE] = {0}, of_all = 0;
    EACH_LINE(i, n)
        LANES most[j] = fabsf(x[i + j]) > most[j] ? fabsf(x[i + j]) : most[j];
    for (int j = 0; j < LINE; j++)
        of_all = most[j] > of_all ? most[j] : of_all;
    return scale_bits(bits_of(of_all / (float)((1 << (bits - 1)) - 1)));
}

/* Levels of a block, and their codes; nearest where none are drawn. */
static void make_levels(float *restrict q, uint8_t *restrict codes, const float *restrict x, float s,
                        const uint32_t *restrict drawn, int64_t bits, int64_t n)
{
    uint8_t code[MOST];
    if (bits == 1) {
        for (int64_t i = 0; i < n; i++)
            q[i] = x[i] >= 0 ? 1.0f : -1.0f;
        store_bits(codes, 0, x, 0, n);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        float u = level(x[i], s, drawn ? shift_of(drawn[i]) : 0.0f);
        code[i] = linear_code(bits_of(u), (1 << bits) - 1);
        q[i] = u - ROUNDER;
    }
    if (bits == BYTE)
        memcpy(codes, code, n);
    for (int64_t i = 0; bits == NIBBLE && i < n / 2; i++)
        codes[i] = code[2 * i] | code[2 * i + 1] << NIBBLE;
}

/* What a row says of a block. */
static void load_levels(float *restrict x, struct Levels of, int64_t row, int64_t block, int64_t bits, int64_t n)
{
    const uint8_t *codes = of.codes + row * of.codes_stride + block * (n * bits / 8);
    float s = scale_of_bits(of.scales[row * of.scales_stride + block]);
    if (bits == 1)
        choose(x, codes, value(1.0f, s), value(-1.0f, s), n);
    for (int64_t i = 0; bits == BYTE && i < n; i++)
        x[i] = value((int8_t)codes[i], s);
    for (int64_t i = 0; bits == NIBBLE && i < n / 2; i++) {
        x[2 * i] = value((int8_t)(codes[i] << NIBBLE) >> NIBBLE, s);
        x[2 * i + 1] = value((int8_t)codes[i] >> NIBBLE, s);
    }
}

static int is_absent(struct Levels of, int64_t row, int64_t t)
{
    return of.absent[row * of.absent_stride + t / 8] >> t % 8 & 1;
}

static void draw(uint32_t *restrict drawn, int64_t b, int64_t seed, int64_t n)
{
    uint64_t first = (uint64_t)b * n;
    uint32_t words = block_seed(first >> 32, seed);
    for (int64_t i = 0; i < n; i++)
        drawn[i] = random_bits(first + i, words);
}

static int64_t live_count(const uint8_t *live, int64_t row, int64_t n)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += LINE)
        count += __builtin_popcount(live_word(live, row, i, n));
    return count;
}

/* e in the gradient's unit. */
static void carry(float *restrict e, struct Stored residual, const float *unit, int64_t b, int64_t n)
{
    float *from = load_stored(residual, 1, b, e, n);
    if (from != e)
        memcpy(e, from, n * sizeof *e);
    for (int64_t i = 0; unit && i < n; i++)
        e[i] *= *unit;
}

/* Stores e, given in the gradient's unit, where elements count, rounded by random bits. */
static void keep_left(struct Stored residual, float *restrict e, const float *unit, int64_t b, int64_t seed,
                      const uint8_t *live, int64_t row, int64_t n)
{
    uint32_t drawn[MOST], steps[MOST];
    for (int64_t i = 0; unit && i < n; i++)
        e[i] /= *unit;
    only_live(e, live, row, n);
    if (is_plainly(residual)) {
        memcpy((float *)residual.numbers + b * n, e, n * sizeof *e);
        return;
    }
    draw(drawn, b, seed, n);
    if (residual.exponents) {
        for (int64_t i = 0; i < n; i++)
            steps[i] = signed_steps(e[i], drawn[i]);
        store_codes((uint8_t *)residual.numbers + b * n, residual.exponents + b, largest(steps, n), steps, 1, 0, n);
        return;
    }
    uint16_t *restrict to = (uint16_t *)residual.numbers + b * n;
    for (int64_t i = 0; i < n; i++)
        to[i] = to_bf16(e[i], drawn[i]);
}

/* Quantises a block of x into a message, and keeps what that leaves; x becomes that. */
static void store_levels(struct Levels message, int64_t row, int64_t block, float *restrict x, struct Stored residual,
                         const float *unit, int64_t b, int64_t seed, const uint8_t *live, int64_t live_row,
                         int64_t bits, int64_t n)
{
    float q[MOST];
    uint32_t drawn[MOST];
    if (!residual.numbers)
        draw(drawn, b, seed, n);
    uint16_t of_block = block_scale(x, live_count(live, live_row, n), bits, n);
    float s = scale_of_bits(of_block);
    message.scales[row * message.scales_stride + block] = of_block;
    make_levels(q, message.codes + row * message.codes_stride + block * (n * bits / 8), x, s,
                residual.numbers ? NULL : drawn, bits, n);
    if (!residual.numbers)
        return;
    for (int64_t i = 0; i < n; i++)
        x[i] = left(x[i], q[i], s);
    keep_left(residual, x, unit, b, seed, live, live_row, n);
}

static void store_nothing(struct Levels message, int64_t row, int64_t block, int64_t bits, int64_t n)
{
    message.scales[row * message.scales_stride + block] = 0;
    memset(message.codes + row * message.codes_stride + block * (n * bits / 8), 0, n * bits / 8);
}

static void write_words(int32_t *words, struct Header header, int32_t digest, int32_t flags)
{
    words[STEP] = header.counter ? *header.counter : header.number;
    words[DIGEST] = digest;
    words[TAG] = header.tag;
    words[FLAGS] = flags;
    words[SIGNAL] = 0;
}

static void keep_words(int32_t *kept, struct Levels of, int64_t begin)
{
    for (int64_t w = 0; !begin && w < of.rows; w++)
        memcpy(kept + w * WORDS, of.words + w * of.words_stride, WORDS * sizeof *kept);
}

static int is_fine(const float *restrict g, float most, int64_t n)
{
    int32_t bad = 0;
    for (int64_t i = 0; i < n; i++)
        bad |= !(fabsf(g[i]) <= most);
    return !bad;
}

KERNEL(quantise)
{
    float x[MOST], e[MOST];
    for (int64_t b = begin; b < end; b++) {
        int64_t row = b / message.blocks, block = b % message.blocks;
        struct place at = tensor_of(b, tensors_table, number, NULL, block_tensor, block_start, TENSORS,
                                    BLOCK_SIZE);
        load_user(x, at, live, live_row[b], BLOCK_SIZE);
        int fine = is_fine(x, most, BLOCK_SIZE);
        if (!fine)
            __atomic_fetch_or(header.pending, NONFINITE, __ATOMIC_RELAXED);
        if (!fine || is_absent(message, 0, block_tensor[b])) {
            store_nothing(message, row, block, BITS, BLOCK_SIZE);
        } else {
            if (residual.numbers) {
                carry(e, residual, unit, b, BLOCK_SIZE);
                for (int64_t i = 0; i < BLOCK_SIZE; i++)
                    x[i] += e[i];
            }
            store_levels(message, row, block, x, residual, unit, b, seed, live, live_row[b], BITS, BLOCK_SIZE);
        }
    }
    if (begin < end && are_last(ticket, end - begin, blocks)) {
        int32_t flags = *header.pending | header.flags;
        *header.pending = 0;
        for (int64_t w = 0; w < message.rows; w++)
            write_words(message.words + w * message.words_stride, header, folded(*digest), flags);
        *digest = 0;
    }
}

/* Adds what all rows say of a block. */
static void sum_rows(float *restrict total, struct Levels arrived, int64_t block, float factor, int64_t bits, int64_t n)
{
    float x[MOST];
    memset(total, 0, n * sizeof *total);
    for (int64_t w = 0; w < arrived.rows; w++) {
        load_levels(x, arrived, w, block, bits, n);
        for (int64_t i = 0; i < n; i++)
            total[i] += x[i] * factor;
    }
}

KERNEL(requantise)
{
    float x[MOST], e[MOST];
    int32_t found = agreed_flags(arrived.words, arrived.words_stride, own_words, arrived.rows);
    keep_words(kept_words, arrived, begin);
    if (!begin) {
        *flags = found;
        write_words(message.words, header, own_words[DIGEST], found);
    }
    for (int64_t b = begin; b < end; b++) {
        int present = 0;
        for (int64_t w = 0; w < arrived.rows; w++)
            present |= !is_absent(arrived, w, block_tensor[b]);
        if (found || !present) {
            store_nothing(message, 0, b, BITS, BLOCK_SIZE);
            continue;
        }
        sum_rows(x, arrived, b, per_worker, BITS, BLOCK_SIZE);
        if (residual.numbers) {
            carry(e, residual, unit, b, BLOCK_SIZE);
            for (int64_t i = 0; i < BLOCK_SIZE; i++)
                x[i] += e[i];
        }
        only_live(x, live, live_row[b], BLOCK_SIZE);
        store_levels(message, 0, b, x, residual, unit, b, seed, live, live_row[b], BITS, BLOCK_SIZE);
    }
}

KERNEL(take_back)
{
    float g[MOST], e[MOST], x[MOST];
    if (!agreed_flags(arrived.words, arrived.words_stride, own_words, arrived.rows))
        return;
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, tensors_table, number, NULL, block_tensor, block_start, TENSORS,
                                    BLOCK_SIZE);
        load_user(g, at, live, live_row[b], BLOCK_SIZE);
        if (!is_fine(g, most, BLOCK_SIZE) || is_absent(sent, 0, block_tensor[b]))
            continue;
        int64_t row = b / sent.blocks, block = b % sent.blocks;
        float s = scale_of_bits(sent.scales[row * sent.scales_stride + block]);
        load_levels(x, sent, row, block, BITS, BLOCK_SIZE);
        carry(e, residual, unit, b, BLOCK_SIZE);
        for (int64_t i = 0; i < BLOCK_SIZE; i++)
            e[i] = told_apart(e[i] + x[i] - g[i], e[i], s, g[i], rounded);
        keep_left(residual, e, unit, b, seed, live, live_row[b], BLOCK_SIZE);
    }
}

KERNEL(dequantise)
{
    float x[MOST];
    int32_t found = agreed_flags(arrived.words, arrived.words_stride, own_words, arrived.rows);
    keep_words(kept_words, arrived, begin);
    if (!begin)
        *flags = found;
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, tensors_table, number, NULL, block_tensor, block_start, TENSORS,
                                    BLOCK_SIZE);
        if (SUMS) {
            sum_rows(x, arrived, b, factor, BITS, BLOCK_SIZE);
        } else {
            int64_t row = b / arrived.blocks, block = b % arrived.blocks, size = BLOCK_SIZE * BITS / 8;
            load_levels(x, arrived, row, block, BITS, BLOCK_SIZE);
            for (int64_t i = 0; i < BLOCK_SIZE; i++)
                x[i] *= factor;
            add_words(digest, arrived.codes + row * arrived.codes_stride + block * size, size / 8);
            __atomic_fetch_add(digest, (uint16_t)arrived.scales[row * arrived.scales_stride + block],
                               __ATOMIC_RELAXED);
        }
        for (int64_t i = 0; found && i < BLOCK_SIZE; i++)
            x[i] = NAN;
        store_user(at, x, b, NULL, live, live_row[b], BLOCK_SIZE);
    }
}
