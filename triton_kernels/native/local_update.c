/* Marsit's local update. */

#include "headers.h"

/* v is null for SGD, m is null without momentum. */
struct update {
    float *m, *v;
    float old_m[MOST], old_v[MOST], u[MOST];
};

/* New moments, in place, and the update. `x` is null where nothing decays. */
static void update(struct update *s, const float *restrict g, const float *restrict x, const float *k, int64_t n)
{
    float d[MOST], *m = s->m, *v = s->v, *u = s->u;
    EACH_LINE(i, n)
        LANES d[i + j] = g[i + j] * k[ONE_MINUS_BETA1];
    for (int64_t i = 0; x && !v && i < n; i += LINE)
        LANES d[i + j] = decaying(d[i + j], x[i + j], k);
    if (m) {
        memcpy(s->old_m, m, n * sizeof *d);
        EACH_LINE(i, n) {
            PREFETCH(m + i, n);
            LANES d[i + j] = m[i + j] = accumulated(m[i + j], d[i + j], k);
        }
    }
    if (!v) {
        EACH_LINE(i, n)
            LANES u[i + j] = step_of(d[i + j], k);
        return;
    }
    memcpy(s->old_v, v, n * sizeof *d);
    EACH_LINE(i, n)
        LANES v[i + j] = variance(v[i + j], g[i + j], k);
    EACH_LINE(i, n) {
        LANES u[i + j] = step_of(preconditioned(d[i + j], v[i + j], k, 0), k);
        if (x)
            LANES u[i + j] = decoupled(u[i + j], x[i + j], k);
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

KERNEL(local_update)
{
    float kept[MOST], g[MOST], x[MOST];
    struct update s;
    for (int64_t b = begin + first_block; b < end + first_block; b++) {
        int64_t row = live_row[b];
        struct place to = tensor_of(b, params_table, tensors, coef, block_tensor, block_start, PARAMS, BLOCK_SIZE);
        struct place from = tensor_of(b, grads_table, tensors, coef, block_tensor, block_start, GRADS, BLOCK_SIZE);
        uint8_t *packed = bits + bytes_at(b, blocks_per_chunk, bits_stride, BLOCK_SIZE);
        int32_t *own = header.words + b / blocks_per_chunk * header.words_stride;
        float *c = compensated.numbers + b * BLOCK_SIZE, most = compensated.limit[b];
        s.m = exp_avg ? exp_avg + b * BLOCK_SIZE : NULL;
        s.v = exp_avg_sq ? exp_avg_sq + b * BLOCK_SIZE : NULL;
        scaled(kept, packed, 0, compensated.scale[b], 0, BLOCK_SIZE);
        EACH_LINE(i, BLOCK_SIZE) {
            PREFETCH(c + i, BLOCK_SIZE);
            LANES kept[i + j] = compensation(c[i + j], kept[i + j], most);
        }
        compensated.scale[b] = 0;
        compensated.limit[b] = INFINITY;
        only_live(kept, live, row, BLOCK_SIZE);
        load_user(g, from, live, row, BLOCK_SIZE);
        EACH_LINE(i, BLOCK_SIZE)
            LANES g[i + j] = counted(g[i + j], to.k) * *step.factor;
        if (step.anchor)
            load_user(step.anchor + b * BLOCK_SIZE, to, inside, inside_row[b], BLOCK_SIZE);
        if (step.DECAYS || step.MOVES)
            load_user(x, to, live, row, BLOCK_SIZE);
        update(&s, g, step.DECAYS ? x : NULL, to.k, BLOCK_SIZE);
        only_live(s.u, live, row, BLOCK_SIZE);
        if (drop_bad(&s, c, kept, *hold, BLOCK_SIZE))
            __atomic_fetch_or(own + FLAGS, NONFINITE, __ATOMIC_RELAXED);
        if (!step.MOVES)
            store_bits(packed, 0, c, 0, BLOCK_SIZE);
        for (int64_t i = 0; step.share != 1 && i < BLOCK_SIZE; i++)
            c[i] *= step.share;
        if (!step.MOVES) {
            if (b % blocks_per_chunk)
                continue;
            own[STEP] = header.number;
            own[DIGEST] = folded(*header.digest);
            own[TAG] = header.tag;
            own[SIGNAL] = 0;
            __atomic_fetch_or(own + FLAGS, header.flags, __ATOMIC_RELAXED);
            continue;
        }
        for (int64_t i = 0; i < BLOCK_SIZE; i++)
            x[i] -= s.u[i];
        if (row != EMPTY)
            store_user(to, x, b, NULL, live, row, BLOCK_SIZE);
    }
}
