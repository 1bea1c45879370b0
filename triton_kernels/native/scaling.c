/* Scales gradients before they count. */

#include "block_io.h"

enum { SUM_LANES = 128, SCALED = 1024, PIECE = 1024 };
enum { FOUND, NORM, EARLIER };
enum { FACTOR, MEAN_NORM, RANKS, OVERFLOWED };

/* Each lane in order, then neighbouring lanes, again and again. */
static double ordered_sum(const double *row, int64_t n)
{
    double lanes[SUM_LANES] = {0};
    for (int64_t i = 0; i < n; i++)
        lanes[i % SUM_LANES] += row[i];
    for (int half = SUM_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
    return lanes[0];
}

/* Whether all have come by the ticket, with `own` that come together; then it is 0 again. */
static int all_there(int32_t *ticket, int32_t own, int64_t all)
{
    if (__atomic_add_fetch(ticket, own, __ATOMIC_ACQ_REL) != all)
        return 0;
    *ticket = 0;
    return 1;
}

/* Adds up the pieces of which blocks begin..end-1 are the last to arrive; whether all pieces are there. */
static int add_pieces(int64_t begin, int64_t end, const double *squares, double *sums, int32_t *tickets,
                      int64_t blocks, int64_t pieces)
{
    int last = 0;
    for (int64_t p = begin / PIECE; p * PIECE < end; p++) {
        int64_t first = p * PIECE, behind = first + PIECE < blocks ? first + PIECE : blocks;
        int64_t own = (end < behind ? end : behind) - (begin > first ? begin : first);
        if (!all_there(tickets + 1 + p, own, behind - first))
            continue;
        sums[p] = ordered_sum(squares + first, behind - first);
        last |= all_there(tickets, 1, pieces);
    }
    return last;
}

KERNEL(gradient_squares)
{
    float x[MOST], bound = loss_scale ? largest * *loss_scale : largest;
    for (int64_t b = begin; b < end; b++) {
        struct place at = tensor_of(b, tensors_table, number, NULL, block_tensor, block_start, TENSORS, BLOCK_SIZE);
        load_user(x, at, live, live_row[b], BLOCK_SIZE);
        for (int64_t i = 0; i < BLOCK_SIZE; i++)
            x[i] = fabsf(x[i]) <= bound ? x[i] : 0.0f;
        squares[b] = norm_of(x, BLOCK_SIZE);
    }
    if (begin == end || !add_pieces(begin, end, squares, sums, tickets, blocks, pieces))
        return;
    *total = ordered_sum(sums, pieces);
    if (!told)
        return;
    told[FOUND] = found_inf && *found_inf > 0;
    told[NORM] = loss_scale ? sqrt(*total) / *loss_scale : sqrt(*total);
    if (earlier)
        told[EARLIER] = *earlier;
}

KERNEL(scale_coefficients)
{
    float scale = loss_scale ? *loss_scale : 1, factor = 1 / scale, mean = CLIPS ? told[NORM] / ranks : 0;
    if (CLIPS)
        factor *= clip_factor(mean, max_norm);
    for (int64_t p = begin; p < end; p++) {
        if (p == 0) {
            float found = told[FOUND];
            *hold = found > 0 ? OVERFLOW + (found < ranks ? LOCAL : 0) : 0;
            found += EARLIER_TOO ? told[EARLIER] : 0;
            outcome[FACTOR] = factor;
            outcome[MEAN_NORM] = mean;
            outcome[RANKS] = found;
            outcome[OVERFLOWED] = found > 0;
        }
        for (int64_t i = p * SCALED; i < numbers && i < (p + 1) * SCALED; i++) {
            int column = i % COLUMNS, weighs = (WEIGHS > 0 && column == ONE_MINUS_BETA1) ||
                                               (WEIGHS > 1 && column == ONE_MINUS_BETA2);
            scaled[i] = weighs ? coef[i] * factor : column == GRAD_LIMIT ? coef[i] * scale : coef[i];
        }
    }
}
