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

static inline void count_step(int32_t seen, struct Count of)
{
    *of.updates += !seen;
    if (of.number)
        *of.number = (uint32_t)*of.number + 1;
    if (of.replays) {
        of.replays[0]++;
        of.replays[1] += seen != 0;
        of.replays[2] += (seen & of.veto) != 0;
        of.replays[3] += (seen & of.bad) != 0;
    }
}

/* Counts a step of width tensors; the first of programs, all else. */
static inline void count_tensors(int64_t p, const int32_t *flags, struct Count of, double *steps, int64_t tensors,
                                 int64_t width)
{
    for (int64_t t = p * width; !*flags && t < tensors && t < (p + 1) * width; t++)
        steps[t] += !(of.absent && of.absent[t]);
    if (p == 0)
        count_step(*flags, of);
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
