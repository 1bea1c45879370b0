"""Moves parameters along updates that were made elsewhere, such as by products of matrices. Never autotuned."""

from __future__ import annotations

from . import block_io as io
from . import user_tensors as users
from .eager import gather, move, tiles
from .jit import jit, tl
from .nouns import CoefTable, Correction, Counter, Flag, PerBlock, Places, Tensors
from .op import op
from .update import moved_kernel


@jit()
def move_along_kernel(
    params_table, directions_table, tensors, scale, coef, places, skip, rounding, correction,
    PARAMS: tl.constexpr, DIRECTIONS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks. Bytes per element: the update, x and its correction twice."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(places.live_row + b)
    if (tl.load(skip) == 0) & (row != 1):
        i = io.elements(BLOCK_SIZE)
        t, k = io.tensor_of(b, places.block_tensor, coef)
        mask = io.counting(places.live, row, i, BLOCK_SIZE)
        place = users.place_of(directions_table, tensors, t, places.block_start, b, BLOCK_SIZE)
        update = users.load(place, i, mask, row, DIRECTIONS) * tl.load(scale + b)
        place = users.place_of(params_table, tensors, t, places.block_start, b, BLOCK_SIZE)
        words = io.random_words(rounding, b, i, BLOCK_SIZE)
        moved_kernel(place, words, b, i, update, k, mask, row, None, correction, PARAMS, BLOCK_SIZE)


@op(move_along_kernel, writes=("params", "correction"))
def move_along(
    params: Tensors, directions: Tensors, places: Places, scale: PerBlock, coef: CoefTable, skip: Flag,
    rounding: Counter | None = None, correction: Correction | None = None,
) -> None:  # fmt: skip
    """Move parameters: x = (1 - lr*wd)*x - step_size * scale*u.

    Other arguments as for ``apply_momentum``.

    Args:
        directions: u, of any float dtype, dense, in the parameters' memory order; empty is zeros.
        scale: What those of each block are multiplied with.
    """
    if skip:
        return
    for tile in tiles(places.sizes, 1, places.block_size, skip.device):
        k = coef[places.block_tensor[tile.blocks]]
        update = gather(directions, tile, places.block_size) * scale[tile.blocks, None]
        move(params, tile, places, update, k, rounding, None, correction)
