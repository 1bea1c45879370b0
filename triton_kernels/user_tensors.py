"""Reads and writes the users' tensors where they are, through a table of addresses, one per tensor.

Full blocks take a path without masks, whose loads are 128 bits wide; ``row`` is the block's in the table of active
masks, of which row 0 is all ones and row 1 all zeros (``tables``).
"""

from __future__ import annotations

from . import bit_rules
from . import block_io as io
from .jit import jit, tl

FP32, BF16, FP16 = 0, 1, 2  # how tensors of a list are stored: of several dtypes otherwise
ALIGNED = 4  # added where all addresses are multiples of 16 bytes


@jit()
def place_of(table, tensors, t, block_start, b, BLOCK_SIZE: tl.constexpr):
    """Find a block in the user's tensor ``t``: its address, a pointer to its dtype, its first element there."""
    return tl.load(table + t), table + tensors + t, tl.load(block_start + b).to(tl.int64) * BLOCK_SIZE


@jit()
def _load_as(place, i, mask, dtype: tl.constexpr, STORED: tl.constexpr):
    address, _, start = place
    pointer = address.to(tl.pointer_type(dtype)) + start
    if STORED >= ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if mask is None:
        return tl.load(pointer + i).to(tl.float32)
    else:
        return tl.load(pointer + i, mask=mask, other=0.0).to(tl.float32)


@jit()
def _load_any(place, i, mask, STORED: tl.constexpr):
    address, kinds, _ = place
    x = tl.zeros(i.shape, tl.float32)
    if address != 0:
        if STORED % ALIGNED == FP32:
            x = _load_as(place, i, mask, tl.float32, STORED)
        elif STORED % ALIGNED == BF16:
            x = _load_as(place, i, mask, tl.bfloat16, STORED)
        elif STORED % ALIGNED == FP16:
            x = _load_as(place, i, mask, tl.float16, STORED)
        else:
            kind = tl.load(kinds)
            if kind == FP32:
                x = _load_as(place, i, mask, tl.float32, STORED)
            elif kind == BF16:
                x = _load_as(place, i, mask, tl.bfloat16, STORED)
            else:
                x = _load_as(place, i, mask, tl.float16, STORED)
    return x


@jit()
def load(place, i, mask, row, STORED: tl.constexpr):
    """Load a block of the user's tensor as float32; zeros where nothing counts, or where it has no address."""
    x = tl.zeros(i.shape, tl.float32)
    if row == 0:
        x = _load_any(place, i, None, STORED)
    elif row != 1:
        x = _load_any(place, i, mask, STORED)
    return x


@jit()
def keep(place, b, i, kept, inside, inside_row, STORED: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Copy block ``b`` of the user's tensor, all but padding, to ``kept``; return it."""
    row = tl.load(inside_row + b)
    x = load(place, i, io.counting(inside, row, i, BLOCK_SIZE), row, STORED)
    tl.store(kept + b * BLOCK_SIZE + i, x)
    return x


@jit()
def _store_as(place, i, x, words, mask, dtype: tl.constexpr, STORED: tl.constexpr):
    address, _, start = place
    pointer = address.to(tl.pointer_type(dtype)) + start
    if STORED >= ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    tl.store(pointer + i, io.rounded(x, words, dtype), mask=mask)


@jit()
def _store_any(place, i, x, words, mask, STORED: tl.constexpr):
    _, kinds, _ = place
    if STORED % ALIGNED == FP32:
        _store_as(place, i, x, words, mask, tl.float32, STORED)
    elif STORED % ALIGNED == BF16:
        _store_as(place, i, x, words, mask, tl.bfloat16, STORED)
    elif STORED % ALIGNED == FP16:
        _store_as(place, i, x, words, mask, tl.float16, STORED)
    else:
        kind = tl.load(kinds)
        if kind == FP32:
            _store_as(place, i, x, words, mask, tl.float32, STORED)
        elif kind == BF16:
            _store_as(place, i, x, words, mask, tl.bfloat16, STORED)
        else:
            _store_as(place, i, x, words, mask, tl.float16, STORED)


@jit()
def store(place, i, x, words, mask, row, STORED: tl.constexpr):
    """Write float32 ``x`` where ``load`` reads, rounded to the tensor's dtype; see ``block_io.random_words``."""
    if row == 0:
        _store_any(place, i, x, words, None, STORED)
    elif row != 1:
        _store_any(place, i, x, words, mask, STORED)


@jit()
def load_master(place, b, i, correction, mask, row, STORED: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Load a block as ``load``; where there is a ``correction``, before bfloat16 tensors were rounded."""
    x = load(place, i, mask, row, STORED)
    if correction is None:
        return x
    else:
        low = tl.load(correction + b * BLOCK_SIZE + i).to(tl.int32)
        if correction.dtype.element_ty == tl.int8:
            low = low << 8
        u = bit_rules.restored(x.to(tl.uint32, bitcast=True), low.to(tl.uint32, bitcast=True))
        return u.to(tl.float32, bitcast=True)


@jit()
def _store_parted(place, at, i, x, words, correction, mask, STORED: tl.constexpr):
    """Write the nearest bfloat16, and what that loses."""
    address, _, start = place
    pointer = address.to(tl.pointer_type(tl.bfloat16)) + start
    if STORED >= ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    u = x.to(tl.uint32, bitcast=True)
    if correction.dtype.element_ty == tl.int8:
        u = bit_rules.with_24_bits(u, bit_rules.random_bits(words[0], words[1]))
    upper = bit_rules.nearest(u)
    low = tl.where(x == x, bit_rules.lost(u, upper), 0).to(tl.int32, bitcast=True)
    if correction.dtype.element_ty == tl.int8:
        low = low >> 8
    upper = tl.where(x == x, upper, 0x7FC0).to(tl.uint16)
    tl.store(pointer + i, upper.to(tl.bfloat16, bitcast=True), mask=mask)
    tl.store(correction + at + i, low.to(correction.dtype.element_ty), mask=mask)


@jit()
def _store_master(place, at, i, x, words, correction, mask, STORED: tl.constexpr):
    _, kinds, _ = place
    if STORED % ALIGNED == BF16:
        _store_parted(place, at, i, x, words, correction, mask, STORED)
    elif STORED % ALIGNED <= FP16:
        _store_any(place, i, x, words, mask, STORED)
    else:
        kind = tl.load(kinds)
        if kind == BF16:
            _store_parted(place, at, i, x, words, correction, mask, STORED)
        else:
            _store_any(place, i, x, words, mask, STORED)


@jit()
def store_master(place, b, i, x, words, correction, mask, row, STORED: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Write a block where ``load_master`` reads; an int8 ``correction`` is rounded by ``words``."""
    if correction is None:
        store(place, i, x, words, mask, row, STORED)
    elif row == 0:
        _store_master(place, b * BLOCK_SIZE, i, x, words, correction, None, STORED)
    elif row != 1:
        _store_master(place, b * BLOCK_SIZE, i, x, words, correction, mask, STORED)
