/* Counts steps, and makes coefficients of their numbers. */

#include "block_io.h"

/* beta^t, 0 where t is as good as infinite. */
static inline double power(double x, double t)
{
    double y = 1;
    if (!(t < MOST_STEPS))
        return 0;
    for (uint32_t n = t; n; n >>= 1, x = x * x)
        y = squared(y, x, n);
    return y;
}

static inline void count(int32_t seen, int64_t *updates, int32_t *number, int64_t *replays, int64_t veto, int64_t bad)
{
    *updates += !seen;
    if (number)
        *number = (uint32_t)*number + 1;
    if (replays) {
        replays[0]++;
        replays[1] += seen != 0;
        replays[2] += (seen & veto) != 0;
        replays[3] += (seen & bad) != 0;
    }
}

/* Counts a step of width tensors; the first of programs, all else. */
static inline void count_tensors(int64_t p, const int32_t *flags, const uint8_t *absent, int64_t *updates,
                                 int32_t *number, int64_t *replays, int64_t veto, int64_t bad, double *steps,
                                 int64_t tensors, int64_t width)
{
    for (int64_t t = p * width; !*flags && t < tensors && t < (p + 1) * width; t++)
        steps[t] += !(absent && absent[t]);
    if (p == 0)
        count(*flags, updates, number, replays, veto, bad);
}

/* Adds a step of tensor t to those of a round. */
static inline void add_up(float *moved, int64_t stride, int64_t t, const float *k, int64_t begins)
{
    moved[t] = (begins ? 0.0f : moved[t]) + k[STEP_SIZE];
    moved[stride + t] = (begins ? 1.0f : moved[stride + t]) * k[DECAY];
}

/* Makes LR, STEP_SIZE, DECAY and UNBIAS1 of width tensors anew; where moved, for all steps of the round. */
static inline void renew(int64_t p, struct Coefficients of, int64_t width)
{
    for (int64_t t = p * width; t < of.tensors && t < (p + 1) * width; t++) {
        const double *row = of.groups + of.group_of[t] * GROUP_COLUMNS;
        float *k = of.table + t * COLUMNS;
        double rate = of.lr ? of.lr[of.group_of[t]] : row[LR];
        struct coefficients each = coefficients(rate, row[WEIGHT_DECAY], power(row[CORRECTION1], of.steps[t] + 1), 0);
        k[LR] = rate;
        k[STEP_SIZE] = of.mean_sq ? seen(each.x0, of.mean_sq[t]) : each.x0;
        k[DECAY] = each.x1;
        k[UNBIAS1] = each.x3;
        if (!of.moved)
            continue;
        add_up(of.moved, of.moved_stride, t, k, 0);
        k[STEP_SIZE] = of.moved[t] / (float)of.length;
        k[DECAY] = of.moved[of.moved_stride + t];
    }
}
