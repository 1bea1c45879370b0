"""Between the users' tensors and the flat index space: flattening, packing of signs."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from . import block_io as io
from . import eager
from . import user_tensors as users
from .columns import LARGEST_GRADIENT
from .eager import gather, tiles
from .jit import jit, tl
from .nouns import AnyTensor, Bits, Derived, Floats, Sizes, Tensors
from .op import op

TAIL = 8
"""Words behind the flattened gradients, summed with them by the warm-up's all-reduce."""

_OF_WORDS: Derived = {
    "n": ("i32", lambda x: x.numel()),
    "x": ("", lambda x: x.contiguous()),
    "BLOCK_SIZE": ("constexpr", lambda: 1024),
    "programs": ("i32", lambda n: -(-n // 1024)),
}


@jit()
def pack_kernel(x, bits, n, BLOCK_SIZE: tl.constexpr):
    """Grid: ceil(n / BLOCK_SIZE). Bytes per element: x, and 1/8."""
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    start = b * BLOCK_SIZE
    byte = tl.arange(0, BLOCK_SIZE // 8)
    if start + BLOCK_SIZE <= n:
        value = tl.load(x + start + i)
        tl.store(bits + b * (BLOCK_SIZE // 8) + byte, io.bytes_of(value >= 0))
    else:
        value = tl.load(x + start + i, mask=start + i < n, other=0)
        tl.store(bits + b * (BLOCK_SIZE // 8) + byte, io.bytes_of(value >= 0), mask=start + byte * 8 < n)


@op(pack_kernel, writes=("bits",), derive=_OF_WORDS)
def _pack(x: Annotated[AnyTensor, "n"], bits: Annotated[Bits, "n/8"]) -> None:
    """Pack signs: bit i % 8 of byte i // 8 is ``x[i] >= 0`` (so +1 for -0.0; a NaN counts as -1)."""
    eager.pack(x, bits)


@jit()
def unpack_kernel(bits, x, n, BLOCK_SIZE: tl.constexpr):
    """Grid: ceil(n / BLOCK_SIZE). Bytes per element: 1/8, and x."""
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    start = b * BLOCK_SIZE
    byte = tl.arange(0, BLOCK_SIZE // 8)
    if start + BLOCK_SIZE <= n:
        sign = io.bits_of(tl.load(bits + b * (BLOCK_SIZE // 8) + byte)) * 2 - 1
        tl.store(x + start + i, sign.to(tl.float32).to(x.dtype.element_ty))
    else:
        sign = io.bits_of(tl.load(bits + b * (BLOCK_SIZE // 8) + byte, mask=start + byte * 8 < n, other=0)) * 2 - 1
        tl.store(x + start + i, sign.to(tl.float32).to(x.dtype.element_ty), mask=start + i < n)


@op(unpack_kernel, writes=("x",), derive=_OF_WORDS)
def _unpack(bits: Annotated[Bits, "n/8"], x: Annotated[AnyTensor, "n"]) -> None:
    """Write +1 where a bit is set and -1 where not: ``bits`` uint8 [n / 8], ``x`` any dtype [n]."""
    x.copy_(eager.signs(bits, 1).view(-1))


def pack(x: Tensor, bits: Tensor | None = None) -> Tensor:
    """Pack the signs of ``x`` (a float dtype, n elements, n a multiple of 8) to uint8 [n / 8], ``bits`` if given.

    Bit ``i % 8`` of byte ``i // 8``, least significant first, is 1 where ``x[i] >= 0``; so -0.0
    counts as +1, as 0.0 does, and a NaN as -1.

    Raises:
        ValueError: if the number of elements is not a multiple of 8.
    """
    if x.numel() % 8:
        raise ValueError(f"x must have a multiple of 8 elements, got {x.numel()}; pad it")
    if bits is None:
        bits = torch.empty(x.numel() // 8, dtype=torch.uint8, device=x.device)
    _pack(x.reshape(-1), bits)
    return bits


def unpack(bits: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undo ``pack``: +1 and -1 in ``dtype`` [8 n] from uint8 ``bits`` of n bytes."""
    signs = torch.empty(bits.numel() * 8, dtype=dtype, device=bits.device)
    _unpack(bits.reshape(-1), signs)
    return signs


@jit()
def flatten_kernel(
    tensors_table, block_tensor, block_start, live_row, live, factor, unscale, most, out, tail, number,
    TENSORS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks. Bytes per element: the tensor's, and 4."""
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    row = tl.load(live_row + b)
    place = users.place_of(tensors_table, number, tl.load(block_tensor + b), block_start, b, BLOCK_SIZE)
    x = users.load(place, i, io.counting(live, row, i, BLOCK_SIZE), row, TENSORS) * factor
    if unscale is not None:
        x = x * tl.load(unscale)
    tl.store(out + b * BLOCK_SIZE + i, x)
    bad = io.any_of(~(tl.abs(x) <= most))
    if bad != 0:
        tl.store(out + tail, 1.0)  # whoever stores, stores the same


@op(
    flatten_kernel,
    writes=("out",),
    derive={
        "number": ("i32", lambda tensors: len(tensors)),
        "tail": ("i64", lambda out: out.numel() - TAIL),
        "blocks": ("i32", lambda tail, block_size: tail // block_size),
        "most": ("fp32", lambda factor: LARGEST_GRADIENT * factor),
    },
)
def flatten(
    tensors: Tensors, sizes: Sizes, block_size: int, factor: float, unscale: Annotated[Floats, ""] | None,
    out: Annotated[Floats, "P+8"],
) -> None:  # fmt: skip
    """Copy tensors, times ``factor``, into the flat index space of ``block_size``; padding becomes zero.

    Args:
        tensors: Dense tensors of ``sizes`` elements, read in memory order; empty ones are zeros.
        factor: 1 / world_size; dividing before the sum cannot overflow.
        unscale: A second factor, of gradients of a scaled loss; or None.
        out: Written: the values, and ``TAIL`` words; 1 at P if any is not finite, or larger than ``factor``
            times ``LARGEST_GRADIENT``.
    """
    for tile in tiles(sizes, 1, block_size, out.device):
        values = gather(tensors, tile, block_size).mul_(factor).view(-1)
        if unscale is not None:
            values.mul_(unscale)
        if not (values.abs() <= LARGEST_GRADIENT * factor).all():
            out[-TAIL] = 1.0
        out[tile.start : tile.start + tile.numel] = values
    # Padding that only other ranks' chunks need, behind the last tensor's last block.
    out[tile.start + tile.numel : -TAIL] = 0.0
