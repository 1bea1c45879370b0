"""Ways to walk over the ranks that were tried for ``server_reduce``; ``reduce.server_reduce`` has the last of them.

Each adds up in rank order, and so has the same bits. W must be a multiple of 8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedonebit.triton_kernels import block_io, reduce

bits_of, elements = block_io.bits_of.triton, block_io.elements.triton
add_four, load_four, load_four_scales = (
    function.triton for function in (reduce.add_four, reduce.load_four, reduce.load_four_scales)
)
moved, zeros_like = reduce.moved.triton, reduce.zeros_like.triton

TYPES = {
    "arrived_bits": "*u8",
    "arrived_bits_stride": "i32",
    "arrived_scales": "*fp32",
    "scales_stride": "i32",
    "compensated": "*fp32",
    "world_size": "i32",
    "per_worker": "fp32",
}
"""Of the arguments of ``walk``."""
WALKS = ("one by one", "unrolled by 8", "four in a word", "next four first", "eight under way")


@triton.jit
def one_by_one(arrived, arrived_stride, scales, scales_stride, world_size, per_worker, total, UNROLL: tl.constexpr):
    """A byte of one rank at a time: one load under way, one exchange through shared memory for each rank."""
    for _ in range(world_size // UNROLL):
        for _ in tl.static_range(UNROLL):
            scale = tl.load(scales) * per_worker
            total += tl.where(bits_of(tl.load(arrived)) != 0, scale, -scale)
            arrived += arrived_stride
            scales += scales_stride
    return total


@triton.jit
def four_in_a_word(arrived, arrived_stride, scales, scales_stride, world_size, per_worker, total):
    """Bytes of four ranks make one word: four loads under way, and one exchange for four ranks."""
    for _ in range(world_size // 4):
        four = load_four(arrived, arrived_stride, 0, False)
        of_four = load_four_scales(scales, scales_stride, per_worker)
        total = add_four(total, four, of_four, 0, False)
        arrived = moved(arrived, arrived_stride, 4)
        scales = moved(scales, scales_stride, 4)
    return total


@triton.jit
def next_four_first(arrived, arrived_stride, scales, scales_stride, world_size, per_worker, total):
    """As ``four_in_a_word``, but the next four are loaded before these are added up."""
    coming, _ = load_four(arrived, arrived_stride, 0, False)
    for at in range(0, world_size, 4):
        four = coming
        # Behind the last four come the last four again: no mask, no branch.
        arrived = tl.where(at + 4 < world_size, moved(arrived, arrived_stride, 4), arrived)
        coming, _ = load_four(arrived, arrived_stride, 0, False)
        of_four = load_four_scales(scales, scales_stride, per_worker)
        total = add_four(total, (four, four), of_four, 0, False)
        scales = moved(scales, scales_stride, 4)
    return total


@triton.jit
def eight_under_way(arrived, arrived_stride, scales, scales_stride, world_size, per_worker, total):
    """Bytes and scales of eight ranks are loaded before any is added, by the threads that have c: the kernel's."""
    for _ in range(world_size // 8):
        first = load_four(arrived, arrived_stride, 0, False)
        of_first = load_four_scales(scales, scales_stride, per_worker)
        arrived = moved(arrived, arrived_stride, 4)
        scales = moved(scales, scales_stride, 4)
        second = load_four(arrived, arrived_stride, 0, False)
        of_second = load_four_scales(scales, scales_stride, per_worker)
        arrived = moved(arrived, arrived_stride, 4)
        scales = moved(scales, scales_stride, 4)
        total = add_four(total, first, of_first, 3, False)
        total = add_four(total, second, of_second, 3, False)
    return total


@triton.jit
def walk(
    arrived_bits,  # uint8 [W, stride]
    arrived_bits_stride,  # bytes between its rows
    arrived_scales,  # float32 [W]
    scales_stride,  # elements between them
    compensated,  # float32 [n], the sum of s_w/W*sign_w is added
    world_size,  # W
    per_worker,  # 1 / W
    WALK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The walk alone, one of ``WALKS``. Grid: blocks."""
    b = tl.program_id(0).to(tl.int64)
    at = compensated + b * BLOCK + elements(BLOCK)
    arrived = arrived_bits + b * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    c = tl.load(at)
    total = tl.zeros([BLOCK // 8, 8], tl.float32)
    if WALK == 4:
        total = zeros_like(c)
    given = (arrived, arrived_bits_stride, arrived_scales, scales_stride, world_size, per_worker, total)
    if WALK == 0:
        total = one_by_one(*given, 1)
    elif WALK == 1:
        total = one_by_one(*given, 8)
    elif WALK == 2:
        total = four_in_a_word(*given)
    elif WALK == 3:
        total = next_four_first(*given)
    else:
        total = eight_under_way(*given)
    tl.store(at, c + total)
