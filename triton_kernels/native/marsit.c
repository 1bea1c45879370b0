/* Marsit's local update, its operator on packed bits, and who owns which bit. Names, order and meaning of the
   arguments are those of the Triton kernels in marsit_kernels.py. Packed bits are worked on as 32-bit words. */

#include "access.h"

enum { HEADER = 8, QUAD = 4 };

/* v is null for SGD, m is null without momentum. */
struct update {
    float *m, *v;
    float old_m[MOST], old_v[MOST], u[MOST];
};

/* New moments, in place, and the update. `x` is null where nothing decays. */
static void update(struct update *s, const float *restrict g, const float *restrict x, const float *k, int64_t n)
{
    const float beta1 = k[BETA1], rest1 = k[ONE_MINUS_BETA1], beta2 = k[BETA2], rest2 = k[ONE_MINUS_BETA2];
    const float step = k[STEP_SIZE], weight_decay = k[WEIGHT_DECAY], decay = k[LR] * k[WEIGHT_DECAY];
    float d[MOST], *m = s->m, *v = s->v, *u = s->u;
    EACH_LINE(i, n)
        LANES d[i + j] = g[i + j] * rest1;
    for (int64_t i = 0; x && !v && i < n; i += LINE)
        LANES d[i + j] = d[i + j] + x[i + j] * weight_decay;
    if (m) {
        memcpy(s->old_m, m, n * sizeof *d);
        EACH_LINE(i, n) {
            PREFETCH(m + i, n);
            LANES d[i + j] = m[i + j] = m[i + j] * beta1 + d[i + j];
        }
    }
    if (!v) {
        EACH_LINE(i, n)
            LANES u[i + j] = d[i + j] * step;
        return;
    }
    memcpy(s->old_v, v, n * sizeof *d);
    EACH_LINE(i, n)
        LANES v[i + j] = v[i + j] * beta2 + g[i + j] * rest2 * g[i + j];
    denom(u, v, k, 0, n);
    EACH_LINE(i, n) {
        LANES u[i + j] = d[i + j] / u[i + j] * step;
        if (x)
            LANES u[i + j] = u[i + j] + x[i + j] * decay;
    }
}

/* An element that is not finite has no update and keeps its moments; nor has any where held. Returns whether
   there was one. */
static int drop_bad(struct update *s, float *restrict c, const float *restrict kept, int64_t held, int64_t n)
{
    int32_t bad = 0;
    float *u = s->u;
    EACH_LINE(i, n)
        LANES c[i + j] = kept[i + j] + u[i + j];
    for (int64_t i = 0; i < n; i++)
        bad += !finite(c[i]);
    for (int64_t i = 0; s->v && i < n; i++)
        bad += !finite(s->v[i]);
    for (int64_t i = 0; (bad || held) && i < n; i++) {
        if (!held && finite(kept[i] + u[i]) && (!s->v || finite(s->v[i])))
            continue;
        u[i] = 0.0f;
        c[i] = kept[i] + u[i];
        if (s->m)
            s->m[i] = s->old_m[i];
        if (s->v)
            s->v[i] = s->old_v[i];
    }
    return bad && !held;
}

void local_update(int64_t begin, int64_t end, const int64_t *params, const int64_t *grads, int64_t tensors,
                  float *exp_avg, float *exp_avg_sq, float *compensated, const float *scale, const float *limit,
                  uint8_t *bits, int64_t bits_stride, const float *coef, const int32_t *block_tensor,
                  const int64_t *block_start, const uint8_t *live, const int32_t *live_row, const float *factor,
                  const int32_t *hold, int32_t *flags, int64_t flags_stride, int64_t first_block,
                  int64_t blocks_per_chunk, int64_t DTYPE, int64_t ALIGNED, int64_t GRAD_DTYPE, int64_t GRAD_ALIGNED,
                  int64_t MOMENTUM, int64_t ADAM, int64_t DECAYS, int64_t MOVES, int64_t BLOCK)
{
    float kept[MOST], g[MOST], x[MOST];
    struct update s;
    for (int64_t b = begin + first_block; b < end + first_block; b++) {
        int64_t row = live_row[b];
        struct place to = tensor_of(b, params, tensors, coef, block_tensor, block_start, DTYPE);
        struct place from = tensor_of(b, grads, tensors, coef, block_tensor, block_start, GRAD_DTYPE);
        uint8_t *packed = bits + bytes_at(b, blocks_per_chunk, bits_stride, BLOCK);
        float *c = compensated + b * BLOCK, most = limit[b];
        s.m = MOMENTUM ? exp_avg + b * BLOCK : NULL;
        s.v = ADAM ? exp_avg_sq + b * BLOCK : NULL;
        choose(kept, packed, scale[b], -scale[b], BLOCK);
        EACH_LINE(i, BLOCK) {
            PREFETCH(c + i, BLOCK);
            LANES {
                float e = c[i + j] - kept[i + j];
                e = e < -most ? -most : e; /* a NaN stays one */
                e = e > most ? most : e;
                kept[i + j] = e + 0.0f;
            }
        }
        only_live(kept, live, row, BLOCK);
        load_user(g, from, live, row, BLOCK);
        only_counted(g, to.k, BLOCK);
        for (int64_t i = 0; i < BLOCK; i++)
            g[i] *= *factor;
        if (DECAYS || MOVES)
            load_user(x, to, live, row, BLOCK);
        update(&s, g, DECAYS ? x : NULL, to.k, BLOCK);
        only_live(s.u, live, row, BLOCK);
        if (drop_bad(&s, c, kept, *hold, BLOCK))
            __atomic_fetch_or(flags + b / blocks_per_chunk * flags_stride, NONFINITE, __ATOMIC_RELAXED);
        if (!MOVES) {
            store_bits(packed, 0, c, 0, BLOCK);
            continue;
        }
        for (int64_t i = 0; i < BLOCK; i++)
            x[i] -= s.u[i];
        if (row != EMPTY)
            store_user(to, x, b, NULL, live, row, BLOCK);
    }
}

/* ---------------------------------------------------------------- Bernoulli words */

#define WORDS 512 /* drawn at a time */

/* 32 draws in each word, from the binary digits of the probability; word i is drawn for the place first + i. */
static void bernoulli(uint32_t *restrict drawn, int64_t threshold, int64_t first_digit, int64_t seed, uint32_t first,
                      int64_t n)
{
    uint32_t word = (uint32_t)seed + (uint32_t)first_digit * GOLDEN;
    memset(drawn, 0, n * sizeof *drawn);
    for (int64_t digit = first_digit; digit < 32; digit++) {
        word += GOLDEN;
        uint32_t hash = mixed(word), on = -(uint32_t)(threshold >> digit & 1);
        for (int64_t i = 0; i < n; i++) {
            uint32_t fair = mixed((first + (uint32_t)i) ^ hash);
            drawn[i] = (drawn[i] & (fair | on)) | (fair & on);
        }
    }
}

/* The words must be equal where checked; all others' flags and notes are united. */
static void merge_headers(int32_t *mine, const int32_t *theirs, int64_t checked, int64_t flags, int64_t mismatch)
{
    int32_t note = 0;
    for (int64_t w = 0; w < HEADER; w++)
        note |= (w < checked && mine[w] != theirs[w]) << w;
    for (int64_t w = 0; w < HEADER; w++) {
        int32_t united = mine[w] | theirs[w];
        if (w == flags)
            mine[w] = united | (note ? mismatch : 0);
        else if (w == HEADER - 1)
            mine[w] = united | note;
    }
}

void merge_signs(int64_t begin, int64_t end, uint32_t *bits, int64_t bits_stride, const uint32_t *arrived_bits,
                 int64_t arrived_stride, int64_t quads, int64_t programs, int64_t threshold, int64_t first_digit,
                 int64_t seed, int32_t *words, int64_t words_stride, const int32_t *arrived_words,
                 int64_t arrived_words_stride, int64_t checked, int64_t flags, int64_t mismatch, int64_t BLOCK)
{
    uint32_t keep[WORDS];
    for (int64_t p = begin; p < end; p++) {
        int64_t row = p / programs, at = (p - row * programs) * BLOCK;
        int64_t n = quads * QUAD - at < BLOCK ? quads * QUAD - at : BLOCK;
        uint32_t *own = bits + row * bits_stride * QUAD + at;
        const uint32_t *arrived = arrived_bits + row * arrived_stride * QUAD + at;
        bernoulli(keep, threshold, first_digit, seed, (uint32_t)(row * quads * QUAD + at), n);
        for (int64_t i = 0; i < n; i++)
            own[i] = arrived[i] ^ ((arrived[i] ^ own[i]) & keep[i]);
        if (at == 0)
            merge_headers(words + row * words_stride, arrived_words + row * arrived_words_stride, checked, flags,
                          mismatch);
    }
}

void pick_owned(int64_t begin, int64_t end, const uint32_t *bits, int64_t bits_stride, int64_t quads, int64_t rank,
                int64_t world_size, int64_t seed, const int64_t *thresholds, uint32_t *owners, uint32_t *picked,
                int64_t BLOCK)
{
    uint32_t left[WORDS], taken[WORDS];
    for (int64_t p = begin; p < end; p++) {
        int64_t at = p * BLOCK, n = quads * QUAD - at < BLOCK ? quads * QUAD - at : BLOCK;
        memset(left, 0xFF, sizeof left);
        memset(picked + at, 0, n * sizeof *picked);
        for (int64_t shift = 0; shift < world_size; shift++) {
            int64_t chunk = (rank - shift + world_size) % world_size;
            const uint32_t *own = bits + chunk * bits_stride * QUAD + at;
            uint32_t *plane = owners + shift * quads * QUAD + at;
            int64_t shifted = mixed((uint32_t)(seed + shift)) & 0x7FFFFFFF;
            if (shift + 1 < world_size)
                bernoulli(taken, thresholds[shift], 0, shifted, (uint32_t)at, n);
            else
                memset(taken, 0xFF, sizeof taken);
            for (int64_t i = 0; i < n; i++) {
                plane[i] = taken[i] & left[i];
                left[i] ^= plane[i];
                picked[at + i] |= own[i] & plane[i];
            }
        }
    }
}

void place_owned(int64_t begin, int64_t end, const uint32_t *gathered, int64_t gathered_stride,
                 const uint32_t *owners, int64_t quads, int64_t world_size, uint32_t *bits, int64_t bits_stride,
                 int64_t BLOCK)
{
    for (int64_t p = begin; p < end; p++) {
        int64_t part = p / world_size, chunk = p - part * world_size, at = part * BLOCK;
        int64_t n = quads * QUAD - at < BLOCK ? quads * QUAD - at : BLOCK;
        uint32_t *result = bits + chunk * bits_stride * QUAD + at;
        memset(result, 0, n * sizeof *result);
        for (int64_t shift = 0; shift < world_size; shift++) {
            const uint32_t *plane = owners + shift * quads * QUAD + at;
            const uint32_t *theirs = gathered + (chunk + shift) % world_size * gathered_stride * QUAD + at;
            for (int64_t i = 0; i < n; i++)
                result[i] |= theirs[i] & plane[i];
        }
    }
}

void add_values(int64_t begin, int64_t end, const int64_t *params, int64_t tensors, const float *values,
                const int32_t *block_tensor, const int64_t *block_start, const uint8_t *live,
                const int32_t *live_row, const int32_t *skip, const int64_t *rounding, int64_t DTYPE, int64_t ALIGNED,
                int64_t REPLACES, int64_t ROUNDING, int64_t BLOCK)
{
    float x[MOST];
    for (int64_t b = begin; b < end; b++) {
        if (*skip || live_row[b] == EMPTY)
            continue;
        struct place at = tensor_of(b, params, tensors, NULL, block_tensor, block_start, DTYPE);
        if (!REPLACES)
            load_user(x, at, live, live_row[b], BLOCK);
        for (int64_t i = 0; i < BLOCK; i++)
            x[i] = REPLACES ? values[b * BLOCK + i] : x[i] - values[b * BLOCK + i];
        store_user(at, x, b, ROUNDING ? rounding : NULL, live, live_row[b], BLOCK);
    }
}
