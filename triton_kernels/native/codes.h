/* Numbers in a byte each, as codes.py has them. */

#include "block_io.h"

/* Writes a block of numbers that were rounded to `steps`, next to the octave of the largest. */
static inline void store_codes(uint8_t *restrict codes, uint8_t *restrict octave, const float *restrict x,
                               const uint32_t *restrict steps, int is_signed, int nonzero, int64_t n)
{
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++)
        most = steps[i] > most ? steps[i] : most;
    uint32_t top = octave_above(most);
    *octave = top;
    for (int64_t i = 0; i < n; i++) {
        uint32_t code = below(steps[i], top, is_signed ? SIGNED_LOGARITHMS : LOGARITHMS);
        code = nonzero ? nonzero_code(code, steps[i]) : code;
        codes[i] = is_signed ? signed_code(code, x[i] < 0) : code;
    }
}

static inline void load_codes(float *restrict x, const uint8_t *restrict codes, uint32_t octave, int is_signed, int64_t n)
{
    uint32_t u[MOST], most = is_signed ? SIGNED_LOGARITHMS : LOGARITHMS;
    for (int64_t i = 0; i < n; i++)
        u[i] = bits_above(codes[i] & most, octave, most) | (uint32_t)(is_signed && codes[i] >= SIGN) << 31;
    memcpy(x, u, n * sizeof *x);
}
