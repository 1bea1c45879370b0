/* Scales from partial sums, headers, and what is made of what all ranks have sent. */

#include "clock.h"
#include "headers.h"
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
static struct segment short_segment(int64_t j, struct Segments of, const double *partials, int64_t stride,
                                    int64_t ternary)
{
    struct segment s = {j, of.start[j], of.start[j + 1], 0, 0, ternary ? 0 : of.live[j]};
    for (int64_t b = s.begin; b < s.end; b++) {
        s.absolute += partials[b];
        s.squares += partials[SQUARE * stride + b];
        if (ternary)
            s.n += partials[NONZERO * stride + b];
    }
    return s;
}

/* Sums a piece of a segment, for program p of which the first such is groups; whether all of its pieces are there. */
static int add_piece(const int32_t *piece, int64_t p, struct Segments of, const double *partials, int64_t stride,
                     int64_t ternary)
{
    for (int row = 0; row < 2 + ternary; row++)
        of.sums[row * of.sums_stride + p] = ordered_sum(partials + row * stride, piece[1], piece[2]);
    return is_last(of.tickets + 1 + piece[3], piece[4]);
}

/* A long segment, from the sums of its pieces, the first of which program `first` has made. */
static struct segment long_segment(const int32_t *piece, int64_t first, struct Segments of, int64_t ternary)
{
    int64_t j = piece[0], last = first + piece[4];
    return (struct segment){
        j, of.start[j], of.start[j + 1], ordered_sum(of.sums + ABS * of.sums_stride, first, last),
        ordered_sum(of.sums + SQUARE * of.sums_stride, first, last),
        ternary ? ordered_sum(of.sums + NONZERO * of.sums_stride, first, last) : of.live[j]};
}

/* Makes and stores a segment's scale; the square of what it leaves goes where it is wanted. */
static float measure(struct segment s, struct Segments of, int64_t norm, double *error)
{
    float scale = of.measured[s.number] = scale_of(s.absolute, s.squares, s.n, norm);
    *error = residual_square(s.absolute, s.squares, scale, s.n);
    return scale;
}

/* The norm of what the scales leave. */
static float norm_left(struct Segments of, int64_t parts)
{
    double error = ordered_sum(of.sums + ERROR * of.sums_stride, 0, parts);
    return sqrt(error > 0 ? error : 0);
}

/* The step's number, counted up where it lies elsewhere. */
static int32_t counted_step(struct Header header)
{
    int32_t step = header.counter ? *header.counter + header.COUNTS : header.number;
    if (header.counter && header.COUNTS)
        *header.counter = step;
    return step;
}

KERNEL(finish)
{
    int64_t groups = (segments.singles + SUM_LANES - 1) / SUM_LANES;
    for (int64_t p = begin; p < end; p++) {
        if (p >= parts) {
            renew(p - parts, coefficients, WIDTH);
            continue;
        }
        if (!*hold && p < groups) {
            double error[SUM_LANES] = {0};
            for (int64_t l = 0; l < SUM_LANES && p * SUM_LANES + l < segments.singles; l++) {
                int64_t j = segments.single[p * SUM_LANES + l];
                struct segment s = short_segment(j, segments, partials, partials_stride, TERNARY);
                float scale = measure(s, segments, NORM, error + l);
                tell(j, s.begin, s.end, scale, segment, message_scales, message_scales_stride, blocks_per_message);
            }
            segments.sums[ERROR * segments.sums_stride + p] = tree_sum(error);
        } else if (!*hold && p < groups + segments.longs) {
            const int32_t *piece = segments.pieces + (p - groups) * OF_A_PIECE;
            if (add_piece(piece, p, segments, partials, partials_stride, TERNARY)) {
                int64_t first = groups + piece[3];
                struct segment s = long_segment(piece, first, segments, TERNARY);
                float scale = measure(s, segments, NORM, segments.sums + ERROR * segments.sums_stride + first);
                tell(s.number, s.begin, s.end, scale, segment, message_scales, message_scales_stride,
                     blocks_per_message);
            }
        }
        if (!is_last(segments.tickets, parts))
            continue;
        int32_t step = counted_step(header), flags = header.flags | *header.pending;
        *header.pending = 0;
        float signal = *hold ? 0 : norm_left(segments, parts);
        for (int64_t w = 0; w < messages; w++) {
            int32_t *message = words + w * words_stride;
            message[STEP] = step;
            message[DIGEST] = folded(*digest);
            message[TAG] = header.tag;
            message[FLAGS] = flags;
            if (!*hold)
                memcpy(message + SIGNAL, &signal, sizeof signal);
        }
    }
}

/* UNBIAS1 of a tensor in the step that is being taken: other programs of the launch are only writing it. */
static double unbias_of(struct Coefficients of, int64_t t)
{
    if (!of.groups)
        return of.table[t * COLUMNS + UNBIAS1];
    double beta = of.groups[of.group_of[t] * GROUP_COLUMNS + CORRECTION1];
    return (float)coefficients(0, 0, power(beta, of.steps[t] + 1), 0).x3;
}

/* Where scales of blocks go. */
struct blocks {
    float *scale, *worker_scale, *worker_settled;
};

/* Hands a segment's scale to its blocks, and adds to `width` lanes what they add to the update's norm. */
static void hand_out(struct segment s, float size, struct blocks to, struct Limit limit, struct Coefficients of,
                     double *lanes, int64_t width)
{
    for (int64_t b = s.begin; b < s.end; b++) {
        to.scale[b] = to.worker_scale[b] = size;
        to.worker_settled[b] = 0;
        if (limit.weight)
            lanes[(b - s.begin) % width] += update_square(size, unbias_of(of, limit.block_tensor[b]), limit.weight[b]);
    }
}

KERNEL(finish_alone)
{
    int64_t groups = (segments.singles + SUM_LANES - 1) / SUM_LANES;
    double *errors = segments.sums + ERROR * segments.sums_stride;
    double *updates = segments.sums + UPDATE * segments.sums_stride;
    struct blocks to = {scale, worker_scale, worker_settled};
    for (int64_t p = begin; p < end; p++) {
        if (p >= parts) {
            renew(p - parts, coefficients, WIDTH);
            continue;
        }
        if (!*hold && p < groups) {
            double error[SUM_LANES] = {0}, update[SUM_LANES] = {0};
            for (int64_t l = 0; l < SUM_LANES && p * SUM_LANES + l < segments.singles; l++) {
                struct segment s = short_segment(segments.single[p * SUM_LANES + l], segments, partials,
                                                 partials_stride, TERNARY);
                hand_out(s, measure(s, segments, NORM, error + l), to, limit, coefficients, update + l, 1);
            }
            errors[p] = tree_sum(error);
            updates[p] = tree_sum(update);
        } else if (!*hold && p < groups + segments.longs) {
            const int32_t *piece = segments.pieces + (p - groups) * OF_A_PIECE;
            if (add_piece(piece, p, segments, partials, partials_stride, TERNARY)) {
                double update[SUM_LANES] = {0};
                int64_t first = groups + piece[3];
                struct segment s = long_segment(piece, first, segments, TERNARY);
                hand_out(s, measure(s, segments, NORM, errors + first), to, limit, coefficients, update, SUM_LANES);
                updates[first] = tree_sum(update);
            }
        }
        if (!is_last(segments.tickets, parts))
            continue;
        int32_t own = header.flags | *header.pending, found = own | *hold;
        *header.pending = 0;
        words[STEP] = counted_step(header);
        if (!*hold) {
            found = own;
            if (limit.largest) {
                *limit.norm = own ? 0 : sqrt(ordered_sum(updates, 0, parts));
                found |= *limit.norm <= *limit.largest ? 0 : VETO;
            }
            if (found) {
                memset(scale, 0, blocks * sizeof *scale);
                memset(worker_scale, 0, blocks * sizeof *worker_scale);
            }
            float signal = norm_left(segments, parts);
            memcpy(words + SIGNAL, &signal, sizeof signal);
        }
        words[TAG] = header.tag;
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

/* What a block adds to the square of the update's norm. */
static double square_of(int64_t b, float scale, struct Limit limit)
{
    return update_square(scale, limit.coef[limit.block_tensor[b] * COLUMNS + UNBIAS1], limit.weight[b]);
}

/* Hands a side's scale to block b, or none. */
static void store_side(int64_t b, int kept, struct Side side)
{
    side.scale[b] = kept ? side.measured[side.segment[b]] : 0;
    side.settled[b] = 0;
}

KERNEL(receive)
{
    int32_t found = 0;
    double lanes[SUM_LANES];
    int64_t world_size = arrived.world_size, messages = arrived.parts * world_size;
    for (int64_t q = 0; q < arrived.parts; q++)
        found |= agreed_flags(arrived.words + q * world_size * arrived.words_stride, arrived.words_stride,
                              arrived.own_words + q * arrived.own_words_stride, world_size);
    for (int64_t p = begin; p < end; p++) {
        int64_t w = p / spans, j = p % spans, first = w * blocks_per_message, part = w / world_size;
        add_span(digest.running + part, arrived.summed + w * arrived.summed_stride, j * span, span, arrived.length);
        int averaged = arrived.words[w * arrived.words_stride + FLAGS] == 0;
        memset(lanes, 0, sizeof lanes);
        for (int64_t b = j * SUM_LANES; !*hold && b < blocks_per_message && b < (j + 1) * SUM_LANES; b++) {
            int64_t at = first + b, slot = worker.segment[at] - worker.segment[first];
            scale[at] = found ? 0 : arrived.scales[w * arrived.scales_stride + slot];
            if (limit.largest)
                lanes[b % SUM_LANES] = square_of(at, scale[at], limit);
            store_side(at, averaged, worker);
            if (w % world_size == rank)
                store_side(part * blocks_per_message + b, !found, server);
        }
        if (limit.largest && !*hold)
            squares[p] = tree_sum(lanes);
        if (is_last(ticket, programs)) {
            *flags = found;
            if (limit.largest && !*hold) {
                *limit.norm = sqrt(ordered_sum(squares, 0, programs));
                if (!(*limit.norm <= *limit.largest)) {
                    *flags |= VETO;
                    memset(scale, 0, messages * blocks_per_message * sizeof *scale);
                    memset(server.scale, 0, arrived.parts * blocks_per_message * sizeof *server.scale);
                }
            }
            for (int64_t q = 0; q < arrived.parts; q++)
                digest.sums[q] = __atomic_exchange_n(digest.running + q, 0, __ATOMIC_RELAXED) +
                                 (digest.updates ? *digest.updates : 0);
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
        for (int64_t b = p * CLOSE_SPAN; limit.largest && b < blocks && b < (p + 1) * CLOSE_SPAN; b++)
            lanes[(b - p * CLOSE_SPAN) % SUM_LANES] += square_of(b, scale[b], limit);
        if (limit.largest)
            squares[p] = tree_sum(lanes);
        if (!is_last(ticket, programs))
            continue;
        if (limit.largest) {
            *limit.norm = all_flags ? 0 : sqrt(ordered_sum(squares, 0, programs));
            all_flags |= *limit.norm <= *limit.largest ? 0 : VETO;
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
    int32_t found = agreed_flags(received.words, received.words_stride, received.own_words, received.world_size) | *hold;
    for (int64_t p = begin; p < end; p++) {
        add_span(digest.running, received.summed + p / spans * received.summed_stride, p % spans * ROUND_SPAN,
                 ROUND_SPAN, received.length);
        if (received.heads && p % spans == 0)
            add_span(digest.running, received.heads + p / spans * received.heads_stride, 0, received.head, received.head);
        for (int64_t b = p * blocks_per_program; b < blocks && b < (p + 1) * blocks_per_program; b++) {
            struct global_step goes = global_step(coef + block_tensor[b] * COLUMNS, steps, most);
            left.scale[b] = found ? 0 : goes.x0;
            left.taken[b] = SIGNS ? left.scale[b] : 0;
            left.limit[b] = found ? INFINITY : SIGNS ? goes.x1 : most;
        }
        if (!is_last(ticket, programs))
            continue;
        *digest.sums = __atomic_exchange_n(digest.running, 0, __ATOMIC_RELAXED) + (digest.updates ? *digest.updates : 0);
        *flags = found;
        for (int64_t w = 0; w < received.world_size; w++)
            received.words[w * received.words_stride + FLAGS] = 0;
        received.own_words[FLAGS] = 0;
    }
}
