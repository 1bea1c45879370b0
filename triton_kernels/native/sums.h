/* Sums in one order, whatever computes them, and tickets. */

#include <stdint.h>

enum { SUM_LANES = 128 };

/* Neighbours, again and again, of a power of 2. */
static inline double tree_of(double *x, int64_t n)
{
    for (n /= 2; n; n /= 2)
        for (int64_t i = 0; i < n; i++)
            x[i] = x[2 * i] + x[2 * i + 1];
    return x[0];
}

static inline double tree_sum(double *lanes) { return tree_of(lanes, SUM_LANES); }

/* row[begin..end-1]: each lane in order, then the lanes. */
static inline double ordered_sum(const double *row, int64_t begin, int64_t end)
{
    double lanes[SUM_LANES] = {0};
    for (int64_t at = begin; at < end; at += SUM_LANES)
        for (int64_t l = 0; l < SUM_LANES && at + l < end; l++)
            lanes[l] += row[at + l];
    return tree_sum(lanes);
}

/* Whether all have come by the ticket, with `own` that come together; then it is 0 again. */
static inline int are_last(int32_t *ticket, int64_t own, int64_t all)
{
    if (__atomic_add_fetch(ticket, (int32_t)own, __ATOMIC_ACQ_REL) != all)
        return 0;
    *ticket = 0;
    return 1;
}

/* Whether all others have come by the ticket, which then is 0 again. */
static inline int is_last(int32_t *ticket, int64_t all)
{
    return are_last(ticket, 1, all);
}
