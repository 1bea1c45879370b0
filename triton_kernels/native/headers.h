/* Headers of messages, as headers.py has them. */

#pragma once

#include "block_io.h"

/* The halves of a sum, as a word. */
static inline int32_t folded(int64_t total) { return total ^ total >> 32; }

/* Flags of a step, of all ranks' headers compared with this rank's; a bit that is no flag is MISMATCH. */
static int32_t agreed_flags(const int32_t *words, int64_t stride, const int32_t *own, int64_t world_size)
{
    int32_t flags = 0;
    for (int64_t w = 0; w < world_size; w++, words += stride) {
        flags |= (words[FLAGS] & ((1 << KNOWN) - 1)) | (words[FLAGS] >> KNOWN ? MISMATCH : 0);
        for (int i = 0; i < CHECKED; i++)
            flags |= words[i] != own[i] ? MISMATCH : 0;
    }
    return flags;
}

/* Compares the headers that arrived, and with the first block writes what they say; returns the flags. */
static int32_t answer(int64_t begin, const int32_t *arrived, int64_t stride, const int32_t *own, int64_t world_size,
                      int32_t held, int32_t *flags, int32_t *kept_words, int32_t *words, struct Header header)
{
    int32_t found = agreed_flags(arrived, stride, own, world_size) | held;
    if (begin)
        return found;
    *flags = found;
    for (int64_t w = 0; w < world_size; w++)
        memcpy(kept_words + w * WORDS, arrived + w * stride, WORDS * sizeof *kept_words);
    if (words) {
        words[STEP] = header.counter ? *header.counter : header.number;
        words[DIGEST] = own[DIGEST];
        words[TAG] = header.tag;
        words[FLAGS] = found;
        words[SIGNAL] = 0;
    }
    return found;
}
