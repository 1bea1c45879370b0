"""The Triton kernels of Marsit: the local update, the operator on packed bits, and who owns which bit. Never autotuned.

Packed bits are worked on as 32-bit words: one operation on a word is one on 32 elements. Lengths and
strides are counted in quads of 16 bytes, so that a compiler knows that a thread may take four words at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .access import (
    BETA1,
    BETA2,
    COLUMNS,
    GOLDEN,
    LARGEST,
    LR,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    STEP_SIZE,
    WEIGHT_DECAY,
    bits_of,
    bytes_of,
    counted,
    denom,
    elements,
    live_elements,
    load_user,
    mixed,
    negative,
    random_words,
    store_user,
)

NONFINITE = tl.constexpr(1)
HEADER = tl.constexpr(8)  # words
QUAD = tl.constexpr(4)


@triton.jit
def _counting(live, row, i, BLOCK: tl.constexpr):
    """Which elements of a block count; where all do, nothing is read."""
    mask = i >= 0
    if row != 0:
        mask = live_elements(live, row, BLOCK)
    return mask


@triton.jit
def _user_block(pointers, tensors, t, start, i, mask, row, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A block of the user's tensor ``t``, float32; zeros where it does not count."""
    x = tl.zeros(i.shape, tl.float32)
    if row == 0:
        x = load_user(tl.load(pointers + t), pointers + tensors + t, start, i, None, DTYPE, True, ALIGNED)
    elif row != 1:
        x = load_user(tl.load(pointers + t), pointers + tensors + t, start, i, mask, DTYPE, False, ALIGNED)
    return x


@triton.jit
def _store_block(
    pointers,
    tensors,
    t,
    start,
    i,
    x,
    words,
    mask,
    row,
    DTYPE: tl.constexpr,
    ROUNDING: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    base = tl.load(pointers + t)
    kinds = pointers + tensors + t
    if row == 0:
        store_user(base, kinds, start, i, x, words, None, DTYPE, ROUNDING, True, ALIGNED)
    elif row != 1:
        store_user(base, kinds, start, i, x, words, mask, DTYPE, ROUNDING, False, ALIGNED)


@triton.jit
def local_update(
    params,  # int64 [2, tensors]: address of each parameter and its dtype
    grads,  # int64 [2, tensors]: address of each gradient (0: zeros) and its dtype
    tensors,  # their number
    exp_avg,  # m, float32 [P], read and written where MOMENTUM
    exp_avg_sq,  # v, float32 [P], read and written where ADAM
    compensated,  # c, float32 [P], read and written
    scale,  # s, float32 [B]
    limit,  # float32 [B]
    bits,  # uint8 [W, stride], read, and written unless MOVES
    bits_stride,  # bytes between its rows
    coef,  # float32 [tensors, COLUMNS]
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B]
    factor,  # float32 [1]
    hold,  # int32 [1]
    flags,  # int32 [W], strided
    flags_stride,  # words between them
    first_block,  # the first block that is worked on
    blocks_per_chunk,  # B / W
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    GRAD_ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ADAM: tl.constexpr,
    DECAYS: tl.constexpr,
    MOVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """c = clip(c - s*sign(bits), limit) + u; bits = c >= 0; or x = x - u where MOVES.

    Grid: blocks of the chunks worked on. Bytes per element: the gradient, 8 for c, 8 for m, 8 for v
    where ADAM, 1/8 each way for bits; the parameter where DECAYS, twice where MOVES.
    """
    b = tl.program_id(0).to(tl.int64) + first_block
    i = elements(BLOCK)
    row = tl.load(live_row + b)
    mask = _counting(live, row, i, BLOCK)
    t = tl.load(block_tensor + b)
    start = tl.multiple_of(tl.load(block_start + b), 16)
    k = coef + t * COLUMNS
    chunk = b // blocks_per_chunk
    byte = bits + chunk * bits_stride + (b - chunk * blocks_per_chunk) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)

    s = tl.load(scale + b)
    most = tl.load(limit + b)
    kept = tl.load(compensated + b * BLOCK + i) - tl.where(bits_of(tl.load(byte)) != 0, s, negative(s))
    kept = tl.where(mask, tl.minimum(tl.maximum(kept, -most), most) + 0.0, 0.0)
    g = _user_block(grads, tensors, t, start, i, mask, row, GRAD_DTYPE, GRAD_ALIGNED)
    g = counted(g, k) * tl.load(factor)
    d = g * tl.load(k + ONE_MINUS_BETA1)
    x = g
    if DECAYS or MOVES:
        x = _user_block(params, tensors, t, start, i, mask, row, DTYPE, ALIGNED)
    if DECAYS and not ADAM:
        d = d + x * tl.load(k + WEIGHT_DECAY)
    m = d
    old_m = d
    if MOMENTUM:
        old_m = tl.load(exp_avg + b * BLOCK + i)
        m = old_m * tl.load(k + BETA1) + d
    v = d
    old_v = d
    u = m * tl.load(k + STEP_SIZE)
    if ADAM:
        old_v = tl.load(exp_avg_sq + b * BLOCK + i)
        v = old_v * tl.load(k + BETA2) + g * tl.load(k + ONE_MINUS_BETA2) * g
        u = tl.div_rn(m, denom(v, k, False)) * tl.load(k + STEP_SIZE)
        if DECAYS:
            u = u + x * (tl.load(k + LR) * tl.load(k + WEIGHT_DECAY))
    u = tl.where(mask, u, 0.0)
    finite = tl.abs(kept + u) <= LARGEST
    if ADAM:
        finite = finite & (tl.abs(v) <= LARGEST)
    held = tl.load(hold) != 0
    bad = tl.max(tl.max((~finite).to(tl.int32), axis=1), axis=0)
    if (bad != 0) & (not held):
        tl.atomic_or(flags + chunk * flags_stride, NONFINITE)
    counts = finite & (not held)
    u = tl.where(counts, u, 0.0)
    c = kept + u
    tl.store(compensated + b * BLOCK + i, c)
    if MOMENTUM:
        tl.store(exp_avg + b * BLOCK + i, tl.where(counts, m, old_m))
    if ADAM:
        tl.store(exp_avg_sq + b * BLOCK + i, tl.where(counts, v, old_v))
    if MOVES:
        _store_block(params, tensors, t, start, i, x - u, i, mask, row, DTYPE, False, ALIGNED)
    else:
        tl.store(byte, bytes_of(c >= 0))


@triton.jit
def bernoulli(threshold, first_digit, seed, place):
    """32 draws in each word, uint32 as ``place``: the twin's, from the binary digits of the probability."""
    drawn = tl.zeros(place.shape, tl.uint32)
    word = seed.to(tl.uint32) + (tl.zeros([], tl.uint32) + first_digit) * GOLDEN
    for digit in range(first_digit, 32):
        word += GOLDEN
        fair = mixed(place ^ mixed(word))
        # All ones where the digit is: then or, else and.
        on = 0 - (((threshold >> digit) & 1) != 0).to(tl.uint32)
        drawn = (drawn & (fair | on)) | (fair & on)
    return drawn


@triton.jit
def _shift_seed(seed, shift):
    return (mixed((seed + shift).to(tl.uint32)) & 0x7FFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["threshold", "first_digit", "seed"])
def merge_signs(
    bits,  # v*, uint32 [n, 4 quads], overwritten by the result
    bits_stride,  # quads between its rows
    arrived_bits,  # v, uint32 [n, 4 quads]
    arrived_stride,  # quads between its rows
    quads,  # of a row
    programs,  # for each row
    threshold,  # round(2^32 / j), int64
    first_digit,  # that of its last digit that is not zero
    seed,  # 31 bits
    words,  # int32 [n, 8], read and written
    words_stride,  # words between its rows
    arrived_words,  # int32 [n, 8]
    arrived_words_stride,  # words between its rows
    checked,  # the first so many words must be equal
    flags,  # index of the word of flags
    mismatch,  # the flag that is set where they are not
    BLOCK: tl.constexpr,
):
    """bits = v* where it is kept, else v. Grid: n * programs. Bytes per element: 3/8."""
    p = tl.program_id(0).to(tl.int64)
    row = p // programs
    part = p - row * programs
    i = part * BLOCK + tl.arange(0, BLOCK)
    inside = i < quads * QUAD
    at = row * bits_stride * QUAD
    arrived_at = row * arrived_stride * QUAD
    own = tl.load(bits + at + i, mask=inside, other=0)
    arrived = tl.load(arrived_bits + arrived_at + i, mask=inside, other=0)
    keep = bernoulli(threshold, first_digit, seed, (row * quads * QUAD + i).to(tl.uint32))
    # The own bit where it is kept: the same as (v AND v*) OR ((v XOR v*) AND b) with the twin's b.
    tl.store(bits + at + i, arrived ^ ((arrived ^ own) & keep), mask=inside)
    if part == 0:
        w = tl.arange(0, HEADER)
        header = words + row * words_stride + w
        mine = tl.load(header)
        theirs = tl.load(arrived_words + row * arrived_words_stride + w)
        note = tl.sum(((mine != theirs) & (w < checked)).to(tl.int32) << w, axis=0)
        united = mine | theirs
        united = tl.where(w == flags, united | tl.where(note != 0, mismatch, 0), united | note)
        tl.store(header, tl.where((w == flags) | (w == HEADER - 1), united, mine))


@triton.jit(do_not_specialize=["rank", "seed"])
def pick_owned(
    bits,  # uint32 [W, 4 quads]
    bits_stride,  # quads between its rows
    quads,  # of a row
    rank,
    world_size,
    seed,  # 31 bits
    thresholds,  # int64 [W], round(2^32 / (W - shift)), 0 behind the last but one
    owners,  # uint32 [W, 4 quads], dense, written
    picked,  # uint32 [4 quads], written
    BLOCK: tl.constexpr,
):
    """owners[r] = where the shift is r; picked = the own bits there.

    Grid: ceil(4 quads / BLOCK). Bytes per element: 1/4.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < quads * QUAD
    place = i.to(tl.uint32)
    left = tl.full([BLOCK], 0xFFFFFFFF, tl.uint32)
    chosen = tl.zeros([BLOCK], tl.uint32)
    plane = owners + i
    for shift in range(world_size):
        taken = left
        if shift + 1 < world_size:
            taken = left & bernoulli(tl.load(thresholds + shift), 0, _shift_seed(seed, shift), place)
        left ^= taken
        tl.store(plane, taken, mask=inside)
        plane += quads * QUAD
        chunk = (rank - shift + world_size) % world_size
        chosen |= tl.load(bits + chunk.to(tl.int64) * bits_stride * QUAD + i, mask=inside, other=0) & taken
    tl.store(picked + i, chosen, mask=inside)


@triton.jit
def place_owned(
    gathered,  # uint32 [W, 4 quads]
    gathered_stride,  # quads between its rows
    owners,  # uint32 [W, 4 quads], dense
    quads,  # of a row
    world_size,
    bits,  # uint32 [W, 4 quads], written
    bits_stride,  # quads between its rows
    BLOCK: tl.constexpr,
):
    """bits[k] = OR over r of gathered[k + r] AND owners[r]. Grid: programs * W.

    Bytes per element: W/4 + 1/8, of which all but 3/8 come from a cache: the W programs that read the
    same words are neighbours.
    """
    p = tl.program_id(0).to(tl.int64)
    part = p // world_size
    chunk = p - part * world_size
    i = part * BLOCK + tl.arange(0, BLOCK)
    inside = i < quads * QUAD
    result = tl.zeros([BLOCK], tl.uint32)
    plane = owners + i
    for shift in range(world_size):
        owner = chunk + shift
        owner = tl.where(owner < world_size, owner, owner - world_size)
        theirs = tl.load(gathered + owner * gathered_stride * QUAD + i, mask=inside, other=0)
        result |= theirs & tl.load(plane, mask=inside, other=0)
        plane += quads * QUAD
    tl.store(bits + chunk * bits_stride * QUAD + i, result, mask=inside)


@triton.jit
def add_values(
    params,  # int64 [2, tensors]: address of each parameter and its dtype
    tensors,  # their number
    values,  # float32 [>= P]
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B]
    skip,  # int32 [1]
    rounding,  # int64 [], updates done, read where ROUNDING
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    REPLACES: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x = x - values, or x = values where REPLACES. Grid: B. Bytes per element: 4, and the parameter twice (once)."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(live_row + b)
    if (tl.load(skip) == 0) & (row != 1):
        i = elements(BLOCK)
        mask = _counting(live, row, i, BLOCK)
        t = tl.load(block_tensor + b)
        start = tl.multiple_of(tl.load(block_start + b), 16)
        new = tl.load(values + b * BLOCK + i)
        if not REPLACES:
            new = _user_block(params, tensors, t, start, i, mask, row, DTYPE, ALIGNED) - new
        words = i
        if ROUNDING:
            words = random_words(rounding, b, i, BLOCK)
        _store_block(params, tensors, t, start, i, new, words, mask, row, DTYPE, ROUNDING, ALIGNED)
