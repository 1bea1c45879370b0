/* Counts a step, and makes the table of coefficients for the coming one. */

#include "clock.h"

KERNEL(advance)
{
    int64_t last = end * WIDTH < tensors ? end * WIDTH : tensors;
    if (flags && begin == 0)
        count(*flags, updates, number, replays, veto, bad);
    for (int64_t t = begin * WIDTH; t < last; t++) {
        int64_t counted = flags && !*flags && !(absent && absent[t]);
        const double *row = groups + group_of[t] * GROUP_COLUMNS;
        float *k = coef + t * COLUMNS;
        if (moved)
            add_up(moved, moved_stride, t, k, BEGINS);
        double done = steps[t] += counted, made = done + 1;
        if (entered) {
            made = (entered[t] += RENEWS ? counted : 0) + (RENEWS ? 1 : 0);
            made = made > 1 ? made : 1;
        }
        struct coefficients each = coefficients(lr ? lr[group_of[t]] : row[LR], row[WEIGHT_DECAY],
                                                power(row[CORRECTION1], done + 1), power(row[CORRECTION2], made));
        if (rho)
            each.x2 *= sqrt(rho[t]);
        double step_size = each.x0, share = row[ONE_MINUS_BETA1], eps = row[EPS];
        if (mean_sq) {
            step_size = seen(step_size, mean_sq[t]);
            share = seen(share, mean_sq[t]);
            eps = floored(eps, row[FLOOR], mean_sq[t], each.x2);
        }
        for (int64_t column = 0; column < COLUMNS; column++)
            k[column] = row[column];
        k[LR] = lr ? lr[group_of[t]] : row[LR];
        k[STEP_SIZE] = step_size;
        k[DECAY] = each.x1;
        k[RSQRT_BIAS2] = each.x2;
        k[UNBIAS1] = each.x3;
        k[ONE_MINUS_BETA1] = share;
        k[EPS] = eps;
        if (unit)
            k[UNIT] = unit[t];
    }
}
