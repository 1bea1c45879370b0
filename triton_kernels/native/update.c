/* What changes parameters: Adam's update, LAMB's, the apply of synchronised bits. */

#include "clock.h"
#include "moments.h"

#define EACH_MOVING_BLOCK(b) for (int64_t b = begin; b < end; b++) if (!*skip && live_row[b] != EMPTY)

/* Moves the elements of a block that count, with random bits of block `drawn`; where there is `squares` it becomes
   their sum, of where to. */
static void move(struct place at, const float *restrict update, int64_t b, int64_t drawn, const int64_t *rounding,
                 struct correction correction, const uint8_t *live, int64_t row, float *squares, int64_t n)
{
    float room[MOST], *x = is_plain(at, row) ? (float *)at.base + at.start : room;
    KEEP(k, at.k);
    if (x == room)
        load_user(x, at, live, row, n);
    if (x == room && correction.base)
        restore(x, correction, b, n);
    EACH_LINE(i, n) {
        PREFETCH(x + i, n);
        LANES x[i + j] = moved(x[i + j], update[i + j], k);
    }
    if (squares) {
        only_live(x, live, row, n); /* a plain block's are all */
        *squares = norm_of(x, n);
    }
    if (x == room)
        store_master(at, x, b, drawn, rounding, correction, live, row, n);
}

/* Moves a block by what bits stand for, over the denominators where there is v, in one pass. */
static inline void move_by_bits(float *restrict x, const uint8_t *restrict bits, int64_t plane, float scale,
                                const float *restrict v, const float *row, int64_t eps_inside, int64_t ternary,
                                int64_t n)
{
    KEEP(k, row);
    EACH_LINE(i, n) {
        float update[LINE];
        PREFETCH(x + i, n);
        scaled(update, bits + i / 8, plane, scale, ternary, LINE);
        if (v) {
            PREFETCH(v + i, n);
            LANES update[j] = preconditioned(update[j], v[i + j], k, eps_inside);
        }
        LANES x[i + j] = moved(x[i + j], update[j], k);
    }
}

/* m and v of a block, in place, and the sum of v if asked. */
static void follow(float *restrict m, float *restrict v, const float *restrict g, const float *coefficients,
                    double *sum, int64_t n)
{
    KEEP(k, coefficients);
    EACH_LINE(i, n) {
        PREFETCH(g + i, n);
        PREFETCH(m + i, n);
        LANES {
            m[i + j] = momentum(m[i + j], g[i + j], k);
            v[i + j] = variance(v[i + j], g[i + j], k);
        }
    }
    if (sum)
        *sum = sum_of(v, n);
}

/* Which elements of a block move: as the table says, or, where gradients do not count, a row of its own. */
struct moving {
    const uint8_t *live;
    int64_t row;
    uint8_t fine[3 * MOST / 8]; /* behind those of FULL and EMPTY */
};

/* `follow`, but for elements whose gradient does not count: these keep both, and do not move. */
static void moments_that_count(float *m, float *v, const float *g, const float *coefficients, double *sum,
                               int32_t *found, struct moving *moving, int64_t n)
{
    float m_before[MOST], v_before[MOST];
    int32_t bad = 0;
    KEEP(k, coefficients);
    for (int64_t i = 0; found && i < n; i++)
        bad |= !counts(g[i], k);
    if (!bad) {
        follow(m, v, g, coefficients, sum, n);
        return;
    }
    __atomic_fetch_or(found, PARTLY, __ATOMIC_RELAXED);
    memcpy(m_before, m, n * sizeof *m);
    memcpy(v_before, v, n * sizeof *v);
    follow(m, v, g, coefficients, NULL, n);
    uint8_t set[MOST];
    for (int64_t i = 0; i < n; i++) {
        int fine = counts(g[i], k);
        m[i] = fine ? m[i] : m_before[i];
        v[i] = fine ? v[i] : v_before[i];
        set[i] = fine && is_live(moving->live, moving->row, i, n);
    }
    if (sum)
        *sum = sum_of(v, n);
    store_set(moving->fine + 2 * (n / 8), set, n);
    moving->live = moving->fine;
    moving->row = 2;
}

KERNEL(apply_momentum)
{
    float update[MOST], room[MOST];
    for (int64_t p = begin > blocks ? begin : blocks; p < end; p++)
        count_tensors(p - blocks, skip, count, steps, tensors, WIDTH);
    end = end < blocks ? end : blocks;
    for (int64_t b = begin; b < end; b++) {
        const uint8_t *packed = exp_avg.bits + bytes_at(b, blocks_per_chunk, exp_avg.bits_stride, BLOCK_SIZE);
        for (int64_t side = 0; digest && side < 1 + TERNARY; side++)
            add_words(digest + b / blocks_per_digest, packed + side * exp_avg.plane, BLOCK_SIZE / 64);
        if (*skip || live_row[b] == EMPTY)
            continue;
        struct place at = tensor_of(b, params_table, tensors, coef, block_tensor, block_start, PARAMS, BLOCK_SIZE);
        float scale = plain_scale(exp_avg.scale[b], at.k);
        const float *v = exp_avg_sq.numbers ? load_stored(variance_in(exp_avg_sq), 0, b, room, BLOCK_SIZE) : NULL;
        if (!is_plain(at, live_row[b])) {
            scaled(update, packed, exp_avg.plane, scale, TERNARY, BLOCK_SIZE);
            if (v)
                precondition(update, update, v, at.k, exp_avg_sq.EPS_INSIDE_SQRT, BLOCK_SIZE);
            struct correction of = {correction, correction_kind};
            move(at, update, b, b, rounding, of, live, live_row[b], x_squares ? x_squares + b : NULL, BLOCK_SIZE);
            continue;
        }
        float *x = (float *)at.base + at.start;
        if (!v) /* constants: each a loop of its own */
            move_by_bits(x, packed, exp_avg.plane, scale, NULL, at.k, 0, TERNARY, BLOCK_SIZE);
        else if (exp_avg_sq.EPS_INSIDE_SQRT)
            move_by_bits(x, packed, exp_avg.plane, scale, v, at.k, 1, TERNARY, BLOCK_SIZE);
        else
            move_by_bits(x, packed, exp_avg.plane, scale, v, at.k, 0, TERNARY, BLOCK_SIZE);
        if (x_squares)
            x_squares[b] = norm_of(x, BLOCK_SIZE);
    }
}

KERNEL(adam_update)
{
    float update[MOST], room[MOST], wide_x[MOST], wide_m[MOST], wide_v[MOST];
    if (found_before && begin == 0)
        *found_before = 0;
    struct Stored exp_avg = ROW_OF(moments, exp_avg, 0), exp_avg_sq = ROW_OF(moments, exp_avg_sq, 1);
    EACH_MOVING_BLOCK(b) {
        struct place at = tensor_of(b, params_table, tensors, coef, block_tensor, block_start, PARAMS, BLOCK_SIZE);
        struct place from = tensor_of(b, grads_table, tensors, coef, block_tensor, block_start, GRADS, BLOCK_SIZE);
        struct moving moving = {live, live_row[b]};
        int64_t drawn_at = first ? b + *first : b;
        const float *g = user_block(room, from, live, live_row[b], BLOCK_SIZE);
        float *m = is_plainly(exp_avg) ? (float *)exp_avg.numbers + b * BLOCK_SIZE : wide_m;
        float *v = is_plainly(exp_avg_sq) ? (float *)exp_avg_sq.numbers + b * BLOCK_SIZE : wide_v;
        struct correction of = {correction, correction_kind};
        if (found && !exp_avg_sq_sums && at.base && live_row[b] == FULL) {
            float *x = is_plain(at, live_row[b]) ? (float *)at.base + at.start : wide_x;
            int32_t bad;
            if (x == wide_x)
                load_user(x, at, live, live_row[b], BLOCK_SIZE);
            if (x == wide_x && correction)
                restore(x, of, b, BLOCK_SIZE);
            if (exp_avg.exponents)
                bad = move_and_code(x, exp_avg, exp_avg_sq, g, at.k, b, drawn_at, *moments.drawn, BLOCK_SIZE);
            else if (moments.drawn)
                bad = move_and_narrow(x, exp_avg, exp_avg_sq, g, at.k, b, drawn_at, *moments.drawn, BLOCK_SIZE);
            else
                bad = move_by_gradient(x, m, v, g, at.k, BLOCK_SIZE);
            if (x == wide_x)
                store_master(at, x, b, drawn_at, rounding, of, live, live_row[b], BLOCK_SIZE);
            if (bad)
                __atomic_fetch_or(found, PARTLY, __ATOMIC_RELAXED);
            continue;
        }
        load_stored(exp_avg, 1, b, wide_m, BLOCK_SIZE); /* where it is not in float32 */
        load_stored(exp_avg_sq, 0, b, wide_v, BLOCK_SIZE);
        moments_that_count(m, v, g, at.k, exp_avg_sq_sums ? exp_avg_sq_sums + b : NULL, found, &moving, BLOCK_SIZE);
        if (moments.drawn)
            narrow_moments(exp_avg, exp_avg_sq, m, v, b, drawn_at, *moments.drawn, BLOCK_SIZE);
        precondition(update, m, v, at.k, 0, BLOCK_SIZE);
        move(at, update, b, drawn_at, rounding, of, moving.live, moving.row, NULL, BLOCK_SIZE);
    }
}

KERNEL(add_values)
{
    float x[MOST];
    EACH_MOVING_BLOCK(b) {
        struct place at = tensor_of(b, params_table, tensors, NULL, block_tensor, block_start, PARAMS, BLOCK_SIZE);
        if (!REPLACES)
            load_user(x, at, live, live_row[b], BLOCK_SIZE);
        for (int64_t i = 0; i < BLOCK_SIZE; i++)
            x[i] = REPLACES ? values[b * BLOCK_SIZE + i] : x[i] - values[b * BLOCK_SIZE + i];
        store_user(at, x, b, rounding, live, live_row[b], BLOCK_SIZE);
    }
}

KERNEL(lamb_update)
{
    float x[MOST], u[MOST], room[MOST], wide_m[MOST], wide_v[MOST];
    if (found_before && begin == 0)
        *found_before = 0;
    struct Stored exp_avg = ROW_OF(moments, exp_avg, 0), exp_avg_sq = ROW_OF(moments, exp_avg_sq, 1);
    EACH_MOVING_BLOCK(b) {
        struct place at = tensor_of(b, params_table, tensors, coef, block_tensor, block_start, PARAMS, BLOCK_SIZE);
        struct place from = tensor_of(b, grads_table, tensors, coef, block_tensor, block_start, GRADS, BLOCK_SIZE);
        struct moving moving = {live, live_row[b]};
        float *m = load_stored(exp_avg, 1, b, wide_m, BLOCK_SIZE);
        float *v = load_stored(exp_avg_sq, 0, b, wide_v, BLOCK_SIZE);
        const float *g = user_block(room, from, live, live_row[b], BLOCK_SIZE);
        moments_that_count(m, v, g, at.k, exp_avg_sq_sums ? exp_avg_sq_sums + b : NULL, found, &moving, BLOCK_SIZE);
        if (moments.drawn) {
            store_drawn(exp_avg, 1, b, m, *moments.drawn, BLOCK_SIZE);
            store_drawn(exp_avg_sq, 0, b, v, *moments.drawn, BLOCK_SIZE);
        }
        load_user(x, at, live, live_row[b], BLOCK_SIZE);
        KEEP(k, at.k);
        EACH_LINE(i, BLOCK_SIZE) {
            if (EPS_INSIDE_SQRT)
                LANES u[i + j] = lamb(x[i + j], m[i + j], v[i + j], k, 1);
            else
                LANES u[i + j] = lamb(x[i + j], m[i + j], v[i + j], k, 0);
        }
        only_live(u, live, live_row[b], BLOCK_SIZE);
        norms[b] = norm_of(x, BLOCK_SIZE);
        norms[norms_stride + b] = norm_of(u, BLOCK_SIZE);
    }
}

KERNEL(lamb_move)
{
    float update[MOST], wide_m[MOST], wide_v[MOST];
    struct Stored exp_avg = ROW_OF(moments, exp_avg, 0), exp_avg_sq = ROW_OF(moments, exp_avg_sq, 1);
    EACH_MOVING_BLOCK(b) {
        struct place at = tensor_of(b, params_table, tensors, coef, block_tensor, block_start, PARAMS, BLOCK_SIZE);
        const float *m = load_stored(exp_avg, 1, b, wide_m, BLOCK_SIZE);
        const float *v = load_stored(exp_avg_sq, 0, b, wide_v, BLOCK_SIZE);
        precondition(update, m, v, at.k, EPS_INSIDE_SQRT, BLOCK_SIZE);
        struct correction none = {NULL, 0};
        move(at, update, b, b, rounding, none, live, live_row[b], NULL, BLOCK_SIZE);
    }
}

/* What r is blended by: sums of (m/denom)^2 and of (m/denom + wd*x)^2. */
static void blend(struct place at, const float *restrict m, const float *restrict frozen, double *norms,
                  int64_t norms_stride, int64_t b, int64_t eps_inside, const uint8_t *live, int64_t row, int64_t n)
{
    float x[MOST], adam[MOST];
    load_user(x, at, live, row, n);
    EACH_LINE(i, n)
        LANES adam[i + j] = unbiased(m[i + j], at.k);
    precondition(adam, adam, frozen, at.k, eps_inside, n);
    only_live(adam, live, row, n);
    norms[b] = norm_of(adam, n);
    EACH_LINE(i, n)
        LANES adam[i + j] = decaying(adam[i + j], x[i + j], at.k);
    norms[norms_stride + b] = norm_of(adam, n);
}

/* v and its largest ratio above 0, of a line of which `word` says what counts; 0/0 and inf/inf don't. */
static inline void ratio_line(float *restrict v, const float *restrict frozen, float *restrict m, float *restrict last,
                              float *restrict most, int32_t word, const float *restrict k, int started,
                              int64_t preconditioned, int64_t eps_inside, int64_t of_denominators)
{
    float ratio[LINE];
    if (preconditioned)
        LANES {
            float d = denominator(frozen[j], k, eps_inside);
            m[j] *= d;
            last[j] *= d;
        }
    if (started)
        LANES v[j] = variance(v[j], rebuilt_gradient(m[j], last[j], k), k);
    else
        LANES v[j] = variance(frozen[j], rebuilt_gradient(m[j], v[j], k), k);
    LANES v[j] = word >> j & 1 ? v[j] : 0.0f;
    if (of_denominators)
        LANES ratio[j] = denominator(frozen[j], k, eps_inside) / denominator(v[j], k, eps_inside);
    else
        LANES ratio[j] = frozen[j] / v[j];
    LANES ratio[j] = word >> j & 1 ? ratio[j] : 0.0f;
    LANES most[j] = ratio[j] > most[j] ? ratio[j] : most[j];
}

static float largest_of(const float *most)
{
    float found = 0;
    for (int j = 0; j < LINE; j++)
        found = most[j] > found ? most[j] : found;
    return found;
}

KERNEL(lamb_ratio)
{
    float m[MOST], wide[MOST];
    for (int64_t b = begin; b < end && !*skip; b++) {
        struct place at = tensor_of(b, params_table, tensors, coef, block_tensor, block_start, PARAMS, BLOCK_SIZE);
        KEEP(k, at.k);
        const float *frozen = load_stored(variance_in(exp_avg_sq), 0, b, wide, BLOCK_SIZE);
        const uint8_t *now_at = exp_avg.bits + bytes_at(b, blocks_per_chunk, exp_avg.bits_stride, BLOCK_SIZE);
        const int64_t plane = exp_avg.plane, inside = exp_avg_sq.EPS_INSIDE_SQRT;
        /* Where ternary, the chunks before have a second plane each. */
        uint8_t *last_at = last_bits + b * (BLOCK_SIZE / 8) + (TERNARY ? b / blocks_per_chunk * plane : 0);
        const uint8_t *counting = live_row[b] == FULL ? NULL : live + live_row[b] * (BLOCK_SIZE / 8);
        float *v = fresh + b * BLOCK_SIZE, now_scale = plain_scale(exp_avg.scale[b], k), most[LINE] = {0};
        float before = plain_scale(last_scale[b], k);
        EACH_LINE(i, BLOCK_SIZE) {
            float last[LINE];
            int32_t word = counting ? word_of(counting + i / 8) : -1;
            PREFETCH(v + i, BLOCK_SIZE);
            PREFETCH(frozen + i, BLOCK_SIZE);
            scaled(m + i, now_at + i / 8, plane, now_scale, TERNARY, LINE);
            scaled(last, last_at + i / 8, plane, before, TERNARY, LINE);
            if (inside)
                ratio_line(v + i, frozen + i, m + i, last, most, word, k, *started, PRECONDITIONED, 1, OF_DENOMINATORS);
            else
                ratio_line(v + i, frozen + i, m + i, last, most, word, k, *started, PRECONDITIONED, 0, OF_DENOMINATORS);
        }
        ratios.largest[b] = largest_of(most);
        memcpy(last_at, now_at, BLOCK_SIZE / 8);
        if (TERNARY)
            memcpy(last_at + plane, now_at + plane, BLOCK_SIZE / 8);
        last_scale[b] = exp_avg.scale[b];
        if (ratios.norms)
            blend(at, m, frozen, ratios.norms, ratios.norms_stride, b, inside, live, live_row[b], BLOCK_SIZE);
    }
}

/* The root of row[begin..end-1]'s sum. */
static double norm_of_layer(const double *row, int64_t begin, int64_t end)
{
    double sum = 0;
    for (int64_t b = begin; b < end; b++)
        sum += row[b];
    return sqrt(sum);
}

KERNEL(lamb_rescale)
{
    for (int64_t t = begin; t < end && !*skip; t++) {
        float *k = coef + t * COLUMNS, most = 0, last = layers[RATIO * tensors + t];
        int64_t first = layer_start[t], behind = layer_start[t + 1];
        for (int64_t b = first; b < behind; b++)
            most = fmaxf(most, largest[b]);
        double r = most;
        if (norms)
            r = blended(r, norm_of_layer(norms, first, behind), norm_of_layer(norms + norms_stride, first, behind));
        struct rescaled now = rescaled(limited(r, last, k, RANGE_FIRST), most, last, layers[AVERAGE * tensors + t]);
        struct layer_step step = layer_step(now.x1, k);
        layers[RATIO * tensors + t] = now.x0;
        layers[COEFFICIENT * tensors + t] = now.x1;
        k[STEP_SIZE] = step.x0;
        k[DECAY] = step.x1;
        if (t == 0)
            *started = 1;
    }
}

KERNEL(lamb_follow)
{
    for (int64_t t = begin; t < end && !*skip; t++) {
        float *k = coef + t * COLUMNS, *c = layers + COEFFICIENT * tensors + t;
        double x = 0, bits = 0;
        for (int64_t b = layer_start[t]; b < layer_start[t + 1]; b++) {
            x += x_squares[b];
            bits += (double)scale[b] * scale[b] * numel[b];
        }
        x = sqrt(x);
        double now = norm_without_noise(bits, k);
        update_squares[t] = followed_norm(update_squares[t], now, k);
        *c = decaying_coefficient(x, update_squares[t], k);
        struct following_step step = following_step(decaying_coefficient(x, now, k), *c, k);
        k[STEP_SIZE] = step.x0;
        k[DECAY] = step.x1;
        k[UNIT] = *c;
    }
}
