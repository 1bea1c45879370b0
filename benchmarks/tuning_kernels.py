"""Ways to write ``server_reduce`` that were tried; the kernel itself is ``kernels.server_reduce``.

Only the walk over the ranks differs, so each has the arguments and the meaning of the kernel's, and must have its
bits. Each adds up in rank order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fusedonebit.triton_kernels.access import (
    bits_of,
    elements,
    live_elements,
    residual,
    store_bits,
    store_norm,
    store_partials,
)


@triton.jit
def _finish(
    c, total, most, row, live, compensated, bits, partials, partials_stride, agreement, agreement_stride, b, BLOCK
):
    """What follows the walk, as in the kernel."""
    c = c + total
    i = elements(BLOCK)
    byte = tl.arange(0, BLOCK // 8)
    if row != 0:
        counted = live_elements(live, row, BLOCK)
        c = tl.where(counted, c, 0.0)
        total = tl.where(counted, total, 0.0)
    tl.store(compensated + b * BLOCK + i, c)
    store_bits(bits + b * (BLOCK // 8) + byte, 0, c, False)
    store_partials(partials, partials_stride, b, c, tl.zeros(i.shape, tl.int32), False)
    store_norm(agreement, b, total)
    widest = tl.cast(most, tl.float64)
    tl.store(agreement + agreement_stride + b, widest * widest)


@triton.jit
def one_by_one(
    arrived_bits,
    arrived_stride,
    arrived_scales,
    scales_stride,
    slot,
    compensated,
    server_scale,
    live,
    live_row,
    bits,
    partials,
    partials_stride,
    agreement,
    agreement_stride,
    world_size,
    per_worker,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A byte of one rank at a time: one load in flight, and one exchange through shared memory for each rank."""
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    byte = tl.arange(0, BLOCK // 8)
    row = tl.load(live_row + b)
    c = residual(tl.load(compensated + b * BLOCK + i), tl.load(server_scale + b), False)
    total = tl.zeros(i.shape, tl.float32)
    most = 0.0
    arrived = arrived_bits + b * (BLOCK // 8) + byte
    scales = arrived_scales + tl.load(slot + b)
    for _ in range(world_size):
        scale = tl.load(scales) * per_worker
        total += tl.where(bits_of(tl.load(arrived)) != 0, scale, -scale)
        most += scale
        arrived += arrived_stride
        scales += scales_stride
    _finish(
        c, total, most, row, live, compensated, bits, partials, partials_stride, agreement, agreement_stride, b, BLOCK
    )


@triton.jit
def unrolled(
    arrived_bits,
    arrived_stride,
    arrived_scales,
    scales_stride,
    slot,
    compensated,
    server_scale,
    live,
    live_row,
    bits,
    partials,
    partials_stride,
    agreement,
    agreement_stride,
    world_size,
    per_worker,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As ``one_by_one``, GROUP ranks in each turn of the loop. W must be a multiple of GROUP."""
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    byte = tl.arange(0, BLOCK // 8)
    row = tl.load(live_row + b)
    c = residual(tl.load(compensated + b * BLOCK + i), tl.load(server_scale + b), False)
    total = tl.zeros(i.shape, tl.float32)
    most = 0.0
    arrived = arrived_bits + b * (BLOCK // 8) + byte
    scales = arrived_scales + tl.load(slot + b)
    for _ in range(world_size // GROUP):
        for _ in tl.static_range(GROUP):
            scale = tl.load(scales) * per_worker
            total += tl.where(bits_of(tl.load(arrived)) != 0, scale, -scale)
            most += scale
            arrived += arrived_stride
            scales += scales_stride
    _finish(
        c, total, most, row, live, compensated, bits, partials, partials_stride, agreement, agreement_stride, b, BLOCK
    )


@triton.jit
def four_in_a_word(
    arrived_bits,
    arrived_stride,
    arrived_scales,
    scales_stride,
    slot,
    compensated,
    server_scale,
    live,
    live_row,
    bits,
    partials,
    partials_stride,
    agreement,
    agreement_stride,
    world_size,
    per_worker,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bytes of four ranks in one word: four loads in flight, and one exchange for four. GROUP / 4 words a turn."""
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    byte = tl.arange(0, BLOCK // 8)
    lane = tl.arange(0, 8)[None, :]
    row = tl.load(live_row + b)
    c = residual(tl.load(compensated + b * BLOCK + i), tl.load(server_scale + b), False)
    total = tl.zeros(i.shape, tl.float32)
    most = 0.0
    arrived = arrived_bits + b * (BLOCK // 8) + byte
    scales = arrived_scales + tl.load(slot + b)
    for _ in range(world_size // GROUP):
        for _ in tl.static_range(GROUP // 4):
            word = tl.zeros([BLOCK // 8], tl.int32)
            for place in tl.static_range(4):
                word |= tl.load(arrived).to(tl.int32) << (8 * place)
                arrived += arrived_stride
            for place in tl.static_range(4):
                scale = tl.load(scales) * per_worker
                total += tl.where(((word[:, None] >> (lane + 8 * place)) & 1) != 0, scale, -scale)
                most += scale
                scales += scales_stride
    _finish(
        c, total, most, row, live, compensated, bits, partials, partials_stride, agreement, agreement_stride, b, BLOCK
    )


@triton.jit
def loads_first(
    arrived_bits,
    arrived_stride,
    arrived_scales,
    scales_stride,
    slot,
    compensated,
    server_scale,
    live,
    live_row,
    bits,
    partials,
    partials_stride,
    agreement,
    agreement_stride,
    world_size,
    per_worker,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As ``four_in_a_word``, but the words of the next turn are loaded before those of this one are added up."""
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    byte = tl.arange(0, BLOCK // 8)
    lane = tl.arange(0, 8)[None, :]
    row = tl.load(live_row + b)
    c = residual(tl.load(compensated + b * BLOCK + i), tl.load(server_scale + b), False)
    total = tl.zeros(i.shape, tl.float32)
    most = 0.0
    arrived = arrived_bits + b * (BLOCK // 8) + byte
    scales = arrived_scales + tl.load(slot + b)
    coming = tl.zeros([BLOCK // 8], tl.int32)
    for place in tl.static_range(4):
        coming |= tl.load(arrived).to(tl.int32) << (8 * place)
        arrived += arrived_stride
    for at in range(0, world_size, 4):
        word = coming
        coming = tl.zeros([BLOCK // 8], tl.int32)
        more = at + 4 < world_size
        for place in tl.static_range(4):
            coming |= tl.load(arrived, mask=tl.zeros([BLOCK // 8], tl.int1) | more, other=0).to(tl.int32) << (8 * place)
            arrived += arrived_stride
        for place in tl.static_range(4):
            scale = tl.load(scales) * per_worker
            total += tl.where(((word[:, None] >> (lane + 8 * place)) & 1) != 0, scale, -scale)
            most += scale
            scales += scales_stride
    _finish(
        c, total, most, row, live, compensated, bits, partials, partials_stride, agreement, agreement_stride, b, BLOCK
    )
