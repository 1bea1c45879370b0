/* A worker's vote: the kernel of op NAME, whose arithmetic is RULE. */

#define TIE_BREAKER 0.5f

/* Few are tied: bits are drawn where they count. */
static void break_ties(float *restrict c, int64_t b, const int64_t *step, int64_t n)
{
    uint64_t first = (uint64_t)b * n;
    uint32_t seed = block_seed(first >> 32, *step);
    for (int64_t i = 0; i < n; i++)
        if (c[i] == 0)
            c[i] = untied(c[i], random_bits(first + i, seed));
}

/* The new momentum and the update; where they are not finite m itself. Returns whether one that counts was not. */
static int blend(float *restrict new_m, float *restrict c, const float *restrict m, const float *restrict g,
                 const float *k, const uint8_t *live, int64_t row, int64_t n)
{
    int32_t good = 1, bad = 0;
    EACH_LINE(i, n)
        LANES {
            struct RULE to = RULE(m[i + j], counted(g[i + j], k), k);
            c[i + j] = to.x0;
            new_m[i + j] = to.x1;
        }
    for (int64_t i = 0; i < n; i++)
        good &= finite(new_m[i]) & finite(c[i]);
    for (int64_t i = 0; !good && i < n; i++)
        if (!finite(new_m[i]) || !finite(c[i])) {
            bad |= is_live(live, row, i, n);
            new_m[i] = c[i] = m[i];
        }
    return bad;
}

KERNEL(NAME)
{
    float g[MOST], c[MOST], new_m[MOST];
    for (int64_t b = begin; b < end; b++) {
        if (weights && b < slots * world_size)
            weights[b / slots * weights_stride + b % slots] = (*step + rank) % world_size ? 1 : 1 + TIE_BREAKER;
        uint8_t *packed = bits + bytes_at(b, blocks_per_chunk, bits_stride, BLOCK_SIZE);
        if (live_row[b] == EMPTY) {
            memset(packed, 0xFF, BLOCK_SIZE / 8);
            continue;
        }
        struct place at = tensor_of(b, grads_table, tensors, coef, block_tensor, block_start, GRADS, BLOCK_SIZE);
        float *m = exp_avg + b * BLOCK_SIZE;
        load_user(g, at, live, live_row[b], BLOCK_SIZE);
        if (blend(new_m, c, m, g, at.k, live, live_row[b], BLOCK_SIZE) && !*hold)
            __atomic_fetch_or(flags, NONFINITE, __ATOMIC_RELAXED);
        break_ties(c, b, step, BLOCK_SIZE);
        only_live(c, live, live_row[b], BLOCK_SIZE);
        store_bits(packed, 0, c, 0, BLOCK_SIZE);
        for (int64_t i = 0; !*hold && i < BLOCK_SIZE; i++)
            m[i] = is_live(live, live_row[b], i, BLOCK_SIZE) ? new_m[i] : m[i];
    }
}
