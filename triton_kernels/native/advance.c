/* Counts a step, and makes the table of coefficients for the coming one. */

#include "clock.h"

/* Makes the row of tensor t after so many steps, of which `made` have entered its variance; rho is its level. */
static void make_row(struct Coefficients of, int64_t t, double done, double made, double rho)
{
    const double *row = of.groups + of.group_of[t] * GROUP_COLUMNS;
    float *k = of.table + t * COLUMNS;
    double rate = of.lr ? of.lr[of.group_of[t]] : row[LR];
    struct coefficients each =
        coefficients(rate, row[WEIGHT_DECAY], power(row[CORRECTION1], done + 1), power(row[CORRECTION2], made));
    each.x2 *= sqrt(rho);
    double step_size = each.x0, share = row[ONE_MINUS_BETA1], eps = row[EPS];
    if (of.mean_sq) {
        step_size = seen(step_size, of.mean_sq[t]);
        share = seen(share, of.mean_sq[t]);
        eps = floored(eps, row[FLOOR], of.mean_sq[t], each.x2);
    }
    for (int64_t column = 0; column < COLUMNS; column++)
        k[column] = row[column];
    k[LR] = rate;
    k[STEP_SIZE] = step_size;
    k[DECAY] = each.x1;
    k[RSQRT_BIAS2] = each.x2;
    k[UNBIAS1] = each.x3;
    k[ONE_MINUS_BETA1] = share;
    k[EPS] = eps;
}

KERNEL(advance)
{
    int64_t tensors = coefficients.tensors, last = end * WIDTH < tensors ? end * WIDTH : tensors;
    if (flags && begin == 0)
        count_step(*flags, count);
    for (int64_t t = begin * WIDTH; t < last; t++) {
        int64_t counted = flags && !*flags && !(count.absent && count.absent[t]);
        float *k = coefficients.table + t * COLUMNS;
        if (coefficients.moved)
            add_up(coefficients.moved, coefficients.moved_stride, t, k, BEGINS);
        double done = coefficients.steps[t] += counted, made = done + 1;
        if (entered) {
            made = (entered[t] += RENEWS ? counted : 0) + (RENEWS ? 1 : 0);
            made = made > 1 ? made : 1;
        }
        make_row(coefficients, t, done, made, rho ? rho[t] : 1);
        if (unit)
            k[UNIT] = unit[t];
    }
}
