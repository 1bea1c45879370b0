/* Scales from partial sums, headers, and what is made of what all ranks have sent. */

#include "clock.h"
#include "sums.h"

enum { OF_A_PIECE = 5, ERROR = 3, UPDATE = 4, CLOSE_SPAN = 2048, ROUND_SPAN = 2048 };
enum { ABS, SQUARE, NONZERO };

/* A segment's scale, into all messages that have blocks of it. */
static void tell(int64_t j, int64_t begin, int64_t end, float s, const int32_t *segment, float *message_scales,
                 int64_t stride, int64_t blocks_per_message)
{
    for (int64_t chunk = begin / blocks_per_message; chunk <= (end - 1) / blocks_per_message; chunk++)
        message_scales[chunk * stride + j - segment[chunk * blocks_per_message]] = s;
}

struct segment {
    int64_t number, begin, end;
    double absolute, squares, n;
};

/* A short segment, from its blocks. */
static struct segment short_segment(int64_t j, const int32_t *start, const double *partials, int64_t stride,
                                    const double *count, int64_t ternary)
{
    struct segment s = {j, start[j], start[j + 1], 0, 0, ternary ? 0 : count[j]};
    for (int64_t b = s.begin; b < s.end; b++) {
        s.absolute += partials[b];
        s.squares += partials[SQUARE * stride + b];
        if (ternary)
            s.n += partials[NONZERO * stride + b];
    }
    return s;
}

/* Sums a piece of a segment, for program p of which the first such is groups; whether all of its pieces are there. */
static int add_piece(const int32_t *piece, int64_t p, const double *partials, int64_t partials_stride, double *sums,
                     int64_t sums_stride, int32_t *tickets, int64_t ternary)
{
    for (int row = 0; row < 2 + ternary; row++)
        sums[row * sums_stride + p] = ordered_sum(partials + row * partials_stride, piece[1], piece[2]);
    return is_last(tickets + 1 + piece[3], piece[4]);
}

/* A long segment, from the sums of its pieces, the first of which program `first` has made. */
static struct segment long_segment(const int32_t *piece, int64_t first, const int32_t *start, const double *sums,
                                   int64_t stride, const double *count, int64_t ternary)
{
    int64_t j = piece[0], last = first + piece[4];
    return (struct segment){
        j, start[j], start[j + 1], ordered_sum(sums + ABS * stride, first, last),
        ordered_sum(sums + SQUARE * stride, first, last),
        ternary ? ordered_sum(sums + NONZERO * stride, first, last) : count[j]};
}

/* The norm of what the scales leave. */
static float norm_left(const double *sums, int64_t stride, int64_t parts)
{
    double error = ordered_sum(sums + ERROR * stride, 0, parts);
    return sqrt(error > 0 ? error : 0);
}

KERNEL(finish)
{
    int64_t groups = (singles + SUM_LANES - 1) / SUM_LANES;
    for (int64_t p = begin; p < end; p++) {
        if (p >= parts) {
            renew(p - parts, group_rows, lr, group_of, tensors, steps, mean_sq, coef, moved, moved_stride, length,
                  WIDTH);
            continue;
        }
        if (!*hold && p < groups) {
            double error[SUM_LANES] = {0};
            for (int64_t l = 0; l < SUM_LANES && p * SUM_LANES + l < singles; l++) {
                struct segment s = short_segment(single[p * SUM_LANES + l], segment_start, partials, partials_stride,
                                                 count, TERNARY);
                scale[s.number] = scale_of(s.absolute, s.squares, s.n, NORM);
                error[l] = residual_square(s.absolute, s.squares, scale[s.number], s.n);
                tell(s.number, s.begin, s.end, scale[s.number], segment, message_scales, message_scales_stride,
                     blocks_per_message);
            }
            sums[ERROR * sums_stride + p] = tree_sum(error);
        } else if (!*hold && p < groups + longs) {
            const int32_t *piece = pieces + (p - groups) * OF_A_PIECE;
            if (add_piece(piece, p, partials, partials_stride, sums, sums_stride, tickets, TERNARY)) {
                int64_t first = groups + piece[3];
                struct segment s = long_segment(piece, first, segment_start, sums, sums_stride, count, TERNARY);
                scale[s.number] = scale_of(s.absolute, s.squares, s.n, NORM);
                sums[ERROR * sums_stride + first] = residual_square(s.absolute, s.squares, scale[s.number], s.n);
                tell(s.number, s.begin, s.end, scale[s.number], segment, message_scales, message_scales_stride,
                     blocks_per_message);
            }
        }
        if (!is_last(tickets, parts))
            continue;
        int32_t step = counter ? *counter + COUNTS : number, flags = told | *pending;
        *pending = 0;
        if (counter && COUNTS)
            *counter = step;
        float signal = *hold ? 0 : norm_left(sums, sums_stride, parts);
        for (int64_t w = 0; w < messages; w++) {
            int32_t *header = words + w * words_stride;
            header[STEP] = step;
            header[DIGEST] = folded(*digest);
            header[TAG] = tag;
            header[FLAGS] = flags;
            if (!*hold)
                memcpy(header + SIGNAL, &signal, sizeof signal);
        }
    }
}

struct of_update {
    const int32_t *block_tensor;
    const float *weight; /* or NULL */
    const double *groups;
    const int32_t *group_of;
    const double *steps;
    const float *coef;
};

/* UNBIAS1 of a tensor in the step that is being taken: other programs of the launch are only writing it. */
static double unbias_of(const struct of_update *u, int64_t t)
{
    if (!u->groups)
        return u->coef[t * COLUMNS + UNBIAS1];
    double beta = u->groups[u->group_of[t] * GROUP_COLUMNS + CORRECTION1];
    return (float)coefficients(0, 0, power(beta, u->steps[t] + 1), 0).x3;
}

/* Hands a segment's scale to its blocks, and adds to `width` lanes what they add to the update's norm. */
static void hand_out(struct segment s, float size, float *scale, float *worker_scale, float *worker_settled,
                     const struct of_update *u, double *lanes, int64_t width)
{
    for (int64_t b = s.begin; b < s.end; b++) {
        scale[b] = worker_scale[b] = size;
        worker_settled[b] = 0;
        if (u->weight)
            lanes[(b - s.begin) % width] += update_square(size, unbias_of(u, u->block_tensor[b]), u->weight[b]);
    }
}

KERNEL(finish_alone)
{
    int64_t groups = (singles + SUM_LANES - 1) / SUM_LANES;
    struct of_update of_update = {block_tensor, weight, group_rows, group_of, steps, coef};
    for (int64_t p = begin; p < end; p++) {
        if (p >= parts) {
            renew(p - parts, group_rows, lr, group_of, tensors, steps, mean_sq, coef, moved, moved_stride, length,
                  WIDTH);
            continue;
        }
        if (!*hold && p < groups) {
            double error[SUM_LANES] = {0}, update[SUM_LANES] = {0};
            for (int64_t l = 0; l < SUM_LANES && p * SUM_LANES + l < singles; l++) {
                struct segment s = short_segment(single[p * SUM_LANES + l], segment_start, partials, partials_stride,
                                                 count, TERNARY);
                measured[s.number] = scale_of(s.absolute, s.squares, s.n, NORM);
                error[l] = residual_square(s.absolute, s.squares, measured[s.number], s.n);
                hand_out(s, measured[s.number], scale, worker_scale, worker_settled, &of_update, update + l, 1);
            }
            sums[ERROR * sums_stride + p] = tree_sum(error);
            sums[UPDATE * sums_stride + p] = tree_sum(update);
        } else if (!*hold && p < groups + longs) {
            const int32_t *piece = pieces + (p - groups) * OF_A_PIECE;
            if (add_piece(piece, p, partials, partials_stride, sums, sums_stride, tickets, TERNARY)) {
                double update[SUM_LANES] = {0};
                int64_t first = groups + piece[3];
                struct segment s = long_segment(piece, first, segment_start, sums, sums_stride, count, TERNARY);
                measured[s.number] = scale_of(s.absolute, s.squares, s.n, NORM);
                sums[ERROR * sums_stride + first] = residual_square(s.absolute, s.squares, measured[s.number], s.n);
                hand_out(s, measured[s.number], scale, worker_scale, worker_settled, &of_update, update, SUM_LANES);
                sums[UPDATE * sums_stride + first] = tree_sum(update);
            }
        }
        if (!is_last(tickets, parts))
            continue;
        int32_t own = told | *pending, found = own | *hold;
        *pending = 0;
        words[STEP] = counter ? *counter + COUNTS : number;
        if (counter && COUNTS)
            *counter = words[STEP];
        if (!*hold) {
            found = own;
            if (limit) {
                *update_norm = own ? 0 : sqrt(ordered_sum(sums + UPDATE * sums_stride, 0, parts));
                found |= *update_norm <= *limit ? 0 : VETO;
            }
            if (found) {
                memset(scale, 0, blocks * sizeof *scale);
                memset(worker_scale, 0, blocks * sizeof *worker_scale);
            }
            float signal = norm_left(sums, sums_stride, parts);
            memcpy(words + SIGNAL, &signal, sizeof signal);
        }
        words[TAG] = tag;
        words[FLAGS] = own;
        *flags = found;
    }
}

/* Adds the 8-byte numbers row[begin..begin+span-1] of a row of length. */
static void add_span(int64_t *total, const uint8_t *row, int64_t begin, int64_t span, int64_t length)
{
    int64_t left = length - begin;
    add_words(total, row + 8 * begin, left < span ? left : span);
}

KERNEL(receive)
{
    int32_t found = 0;
    double lanes[SUM_LANES];
    for (int64_t q = 0; q < parts; q++)
        found |= agreed_flags(words + q * world_size * words_stride, words_stride, own_words + q * own_words_stride,
                              world_size);
    for (int64_t p = begin; p < end; p++) {
        int64_t w = p / spans, j = p % spans, first = w * blocks_per_message, part = w / world_size;
        add_span(total + part, summed + w * summed_stride, j * span, span, length);
        int averaged = words[w * words_stride + FLAGS] == 0;
        memset(lanes, 0, sizeof lanes);
        for (int64_t b = j * SUM_LANES; !*hold && b < blocks_per_message && b < (j + 1) * SUM_LANES; b++) {
            int64_t at = first + b, slot = segment[at] - segment[first];
            scale[at] = found ? 0 : message_scales[w * message_scales_stride + slot];
            if (limit)
                lanes[b % SUM_LANES] =
                    update_square(scale[at], coef[block_tensor[at] * COLUMNS + UNBIAS1], weight[at]);
            worker_scale[at] = averaged ? worker_measured[segment[at]] : 0;
            worker_settled[at] = 0;
            if (w % world_size == rank) {
                int64_t served = part * blocks_per_message + b;
                server_scale[served] = found ? 0 : server_measured[server_segment[served]];
                server_settled[served] = 0;
            }
        }
        if (limit && !*hold)
            squares[p] = tree_sum(lanes);
        if (is_last(ticket, programs)) {
            *flags = found;
            if (limit && !*hold) {
                *norm = sqrt(ordered_sum(squares, 0, programs));
                if (!(*norm <= *limit)) {
                    *flags |= VETO;
                    memset(scale, 0, parts * world_size * blocks_per_message * sizeof *scale);
                    memset(server_scale, 0, parts * blocks_per_message * sizeof *server_scale);
                }
            }
            for (int64_t q = 0; q < parts; q++)
                digest[q] = __atomic_exchange_n(total + q, 0, __ATOMIC_RELAXED) + (updates ? *updates : 0);
        }
    }
}

KERNEL(close_parts)
{
    double lanes[SUM_LANES];
    int32_t all_flags = 0;
    if (begin == end) /* the others' last one changes flags */
        return;
    for (int64_t q = 0; q < parts; q++)
        all_flags |= found[q];
    for (int64_t p = begin; p < end; p++) {
        memset(lanes, 0, sizeof lanes);
        for (int64_t b = p * CLOSE_SPAN; limit && b < blocks && b < (p + 1) * CLOSE_SPAN; b++)
            lanes[(b - p * CLOSE_SPAN) % SUM_LANES] +=
                update_square(scale[b], coef[block_tensor[b] * COLUMNS + UNBIAS1], weight[b]);
        if (limit)
            squares[p] = tree_sum(lanes);
        if (!is_last(ticket, programs))
            continue;
        if (limit) {
            *norm = all_flags ? 0 : sqrt(ordered_sum(squares, 0, programs));
            all_flags |= *norm <= *limit ? 0 : VETO;
        }
        for (int64_t q = 0; all_flags && q < parts; q++) {
            if (!found[q]) {
                memset(scale + q * (blocks / parts), 0, blocks / parts * sizeof *scale);
                memset(kept + q * (kept_blocks / parts), 0, kept_blocks / parts * sizeof *kept);
            }
            found[q] |= all_flags;
        }
        *flags = all_flags;
    }
}

KERNEL(close_round)
{
    if (begin == end) /* the others' last one changes headers */
        return;
    int32_t found = agreed_flags(words, words_stride, own_words, world_size) | *hold;
    for (int64_t p = begin; p < end; p++) {
        add_span(total, summed + p / spans * summed_stride, p % spans * ROUND_SPAN, ROUND_SPAN, length);
        if (heads && p % spans == 0)
            add_span(total, heads + p / spans * heads_stride, 0, head, head);
        for (int64_t b = p * blocks_per_program; b < blocks && b < (p + 1) * blocks_per_program; b++) {
            struct global_step goes = global_step(coef + block_tensor[b] * COLUMNS, steps, most);
            scale[b] = found ? 0 : goes.x0;
            taken[b] = SIGNS ? scale[b] : 0;
            limit[b] = found ? INFINITY : SIGNS ? goes.x1 : most;
        }
        if (!is_last(ticket, programs))
            continue;
        *digest = __atomic_exchange_n(total, 0, __ATOMIC_RELAXED) + (updates ? *updates : 0);
        *flags = found;
        for (int64_t w = 0; w < world_size; w++)
            words[w * words_stride + FLAGS] = 0;
        own_words[FLAGS] = 0;
    }
}
