/* Scales gradients before they count. */

#include "block_io.h"
#include "sums.h"

enum { SCALED = 1024, PIECE = 1024, SQUARES = 3 };
enum { FOUND, NORM, EARLIER };
enum { FACTOR, MEAN_NORM, RANKS, OVERFLOWED };

/* Adds up the pieces of which blocks begin..end-1 are the last to arrive; whether all pieces are there. */
static int add_pieces(int64_t begin, int64_t end, const double *squares, double *sums, int32_t *tickets,
                      int64_t blocks, int64_t pieces)
{
    int last = 0;
    for (int64_t p = begin / PIECE; p * PIECE < end; p++) {
        int64_t first = p * PIECE, behind = first + PIECE < blocks ? first + PIECE : blocks;
        int64_t own = (end < behind ? end : behind) - (begin > first ? begin : first);
        if (!are_last(tickets + 1 + p, own, behind - first))
            continue;
        sums[p] = ordered_sum(squares, first, behind);
        last |= is_last(tickets, pieces);
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
    *total = ordered_sum(sums, 0, pieces);
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
            for (int i = 0; digest && i < 2 + EARLIER_TOO; i++) {
                int32_t word;
                memcpy(&word, told + i, sizeof word);
                *digest += word;
            }
        }
        for (int64_t i = p * SCALED; i < numbers && i < (p + 1) * SCALED; i++) {
            int column = i % COLUMNS, weighs = (WEIGHS > 0 && column == ONE_MINUS_BETA1) ||
                                               (WEIGHS > 1 && column == ONE_MINUS_BETA2);
            float x = WEIGHS == SQUARES && column == ONE_MINUS_BETA2 ? coef[i] * factor : coef[i];
            scaled[i] = weighs ? x * factor : column == GRAD_LIMIT ? x * scale : x;
        }
    }
}
