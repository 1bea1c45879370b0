"""Scales gradients before they count: what a rank tells the others of its own, and coefficients of what all have told.

What ranks tell is added up between the two ops, float32 [2] or [3]: whether a GradScaler has found an inf, the norm,
and the infs found before, where there may have been any.
"""

from __future__ import annotations

from typing import Annotated

import torch

from . import block_io as io
from . import headers, rules
from . import user_tensors as users
from .eager import gather, square_sum, tiles
from .finish import PIECE, ordered_sum
from .jit import jit, tl
from .nouns import CoefTable, Counters, DoublePerBlock, Doubles, Flag, Floats, Sizes, Table, Tensors
from .op import op
from .rules import COLUMNS, GRAD_LIMIT, ONE_MINUS_BETA1, ONE_MINUS_BETA2

FOUND, NORM, EARLIER = 0, 1, 2  # of what is told
FACTOR, MEAN_NORM, RANKS, OVERFLOWED = 0, 1, 2, 3  # of what is made of it
OVERFLOW, LOCAL = headers.Flag.OVERFLOW, headers.Flag.LOCAL
SPAN = 1024  # coefficients that a program scales
SQUARES = 3  # of ``weighs``


@jit()
def _tell(total, loss_scale, found_inf, earlier, told):
    """Write what this rank tells, from its sum of squares."""
    norm = tl.sqrt(total)
    if loss_scale is not None:
        norm = norm / tl.load(loss_scale).to(tl.float64)
    found = 0.0
    if found_inf is not None:
        found = (tl.load(found_inf) > 0.0).to(tl.float32)
    tl.store(told + FOUND, found)
    tl.store(told + NORM, norm.to(tl.float32))
    if earlier is not None:
        tl.store(told + EARLIER, tl.load(earlier))


@jit()
def gradient_squares_kernel(
    tensors_table, block_tensor, block_start, live_row, live, largest, loss_scale, squares, sums, tickets, total,
    found_inf, earlier, told, number, blocks, pieces,
    TENSORS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks. Bytes per element: the tensor's.

    The last of a piece to arrive adds up the piece, and the last of these all.
    """
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    row = tl.load(live_row + b)
    place = users.place_of(tensors_table, number, tl.load(block_tensor + b), block_start, b, BLOCK_SIZE)
    x = users.load(place, i, io.counting(live, row, i, BLOCK_SIZE), row, TENSORS)
    bound = largest
    if loss_scale is not None:
        bound = largest * tl.load(loss_scale)
    io.store_norm(squares, b, tl.where(tl.abs(x) <= bound, x, 0.0))
    piece = b // PIECE
    begin = piece * PIECE
    end = tl.minimum(begin + PIECE, blocks)
    if io.is_last(tickets + 1 + piece, end - begin):
        tl.store(sums + piece, io.ordered_sum(squares, begin, end))
        if io.is_last(tickets, pieces):
            of_all = io.ordered_sum(sums, 0, pieces)
            tl.store(total, of_all)
            if told is not None:
                _tell(of_all, loss_scale, found_inf, earlier, told)


@op(
    gradient_squares_kernel,
    writes=("squares", "sums", "tickets", "total", "told"),
    derive={
        "number": ("i32", lambda tensors: len(tensors)),
        "blocks": ("i32", lambda squares: len(squares)),
        "pieces": ("i32", lambda sums: len(sums)),
    },
)
def gradient_squares(
    tensors: Tensors, sizes: Sizes, block_size: int, largest: float, loss_scale: Annotated[Floats, ""] | None,
    squares: DoublePerBlock, sums: Annotated[Doubles, "pieces"], tickets: Annotated[Table, "1+pieces"],
    total: Annotated[Doubles, ""], found_inf: Annotated[Floats, ""] | None = None,
    earlier: Annotated[Floats, "1"] | None = None, told: Annotated[Floats, "2 | 3"] | None = None,
) -> None:  # fmt: skip
    """Sum the squares of a gradient, in float64: no sum overflows, and bad elements do not count; tell the norm.

    Args:
        tensors, sizes, block_size: As for ``flatten``.
        largest: Elements larger than that times ``loss_scale``, and NaN, are left out.
        loss_scale: What gradients were multiplied with; None: nothing.
        squares: Written: by block.
        sums: Of pieces of ``finish.PIECE`` blocks; scratch.
        tickets: 0; scratch.
        total: Written: of all blocks, each piece in ``finish``'s order, and then their sums.
        found_inf: Above 0 where a GradScaler has found an inf; or None.
        earlier: Told as it is; or None.
        told: Written: whether there is an inf, 1 or 0; the norm,
            divided by ``loss_scale``; and ``earlier``. None: nothing is.
    """
    bound = torch.full((1,), largest, dtype=torch.float32, device=squares.device)
    if loss_scale is not None:
        bound = bound * loss_scale
    squares.zero_()
    for tile in tiles(sizes, 1, block_size, squares.device):
        g = gather(tensors, tile, block_size)
        squares[tile.blocks] = square_sum(tl.where(g.abs() <= bound, g, 0.0))
    sums.copy_(ordered_sum(torch.nn.functional.pad(squares, (0, -len(squares) % PIECE)).view(-1, PIECE)))
    total.copy_(ordered_sum(sums))
    if told is None:
        return
    told[FOUND] = 0.0 if found_inf is None else found_inf > 0
    told[NORM] = total.sqrt() if loss_scale is None else total.sqrt() / loss_scale.double()
    if earlier is not None:
        told[EARLIER:] = earlier


@jit()
def scale_coefficients_kernel(
    told, ranks, loss_scale, max_norm, outcome, hold, coef, scaled, digest, numbers,
    CLIPS: tl.constexpr, WEIGHS: tl.constexpr, EARLIER_TOO: tl.constexpr,
):  # fmt: skip
    """Grid: ceil(coefficients / SPAN), or 1. Bytes: 8 for each coefficient."""
    p = tl.program_id(0).to(tl.int64)
    scale = 1.0
    factor = 1.0
    mean = 0.0
    if loss_scale is not None:
        scale = tl.load(loss_scale)
        factor = tl.div_rn(1.0, scale)
    if CLIPS:
        mean = tl.div_rn(tl.load(told + NORM), ranks)
        factor = factor * rules.clip_factor(mean, max_norm)
    if p == 0:
        found = tl.load(told + FOUND)
        tl.store(hold, tl.where(found > 0.0, OVERFLOW + tl.where(found < ranks, LOCAL, 0), 0))
        if EARLIER_TOO:
            found += tl.load(told + EARLIER)
        tl.store(outcome + FACTOR, factor)
        tl.store(outcome + MEAN_NORM, mean)
        tl.store(outcome + RANKS, found)
        tl.store(outcome + OVERFLOWED, tl.where(found > 0.0, 1.0, 0.0))
        if digest is not None:
            words = told.to(tl.pointer_type(tl.int32), bitcast=True)
            received = tl.load(words + FOUND).to(tl.int64) + tl.load(words + NORM)
            if EARLIER_TOO:
                received += tl.load(words + EARLIER)
            tl.store(digest, tl.load(digest) + received)
    i = p * SPAN + tl.arange(0, SPAN)
    column = i % COLUMNS
    weighs = (WEIGHS > 0) & (column == ONE_MINUS_BETA1) | (WEIGHS > 1) & (column == ONE_MINUS_BETA2)
    x = tl.load(coef + i, mask=i < numbers, other=0.0)
    if WEIGHS == SQUARES:
        x = tl.where(column == ONE_MINUS_BETA2, x * factor, x)
    x = tl.where(weighs, x * factor, tl.where(column == GRAD_LIMIT, x * scale, x))
    tl.store(scaled + i, x, mask=i < numbers)


@op(
    scale_coefficients_kernel,
    writes=("outcome", "hold", "scaled", "digest"),
    derive={
        "ranks": ("fp32", lambda world_size: float(world_size)),
        "numbers": ("i32", lambda coef: coef.numel()),
        "EARLIER_TOO": ("constexpr", lambda told: told.numel() > EARLIER),
        "programs": ("i32", lambda numbers: max(1, -(-numbers // SPAN))),
    },
)
def scale_coefficients(
    told: Annotated[Floats, "2 | 3"], world_size: int, loss_scale: Annotated[Floats, ""] | None, clips: bool,
    max_norm: float, weighs: int, outcome: Annotated[Floats, "4"], hold: Flag, coef: CoefTable, scaled: CoefTable,
    digest: Annotated[Counters, "_"] | None = None,
) -> None:  # fmt: skip
    """Decide what gradients are multiplied with, from what ranks have told, and multiply it into coefficients.

        factor = 1 / loss_scale * min(1, max_norm / (mean norm + 1e-6))

    Args:
        told: float32 [2] or [3], as ``gradient_squares`` writes it, summed over ranks.
        world_size: How many these are.
        loss_scale: What this rank's gradients were multiplied with; None: nothing.
        clips: Whether norms count.
        max_norm: What the mean of ranks' norms is brought down to.
        weighs: How many columns weigh gradients: 0, 1 (ONE_MINUS_BETA1), or 2 (ONE_MINUS_BETA2 as well); 3 where that
            weighs squares.
        outcome: Written: the factor; the mean norm, 0 if nobody clips; how many ranks have found an inf,
            now or earlier; and 1 where any has.
        hold: Written: OVERFLOW where any rank has found one now, and LOCAL where not all have.
        coef: float32 [tensors, columns of ``Coef``].
        scaled: The same, written: those columns times the factor, and GRAD_LIMIT times ``loss_scale``.
        digest: To the first of which the bits of ``told`` are added; None: to none.
    """
    found, norm = told[FOUND : FOUND + 1], told[NORM : NORM + 1]
    scale = torch.ones_like(found) if loss_scale is None else loss_scale.reshape(1)
    # By a number, torch divides on CUDA as by its reciprocal, which rounds twice.
    mean = norm / torch.full_like(norm, world_size) if clips else torch.zeros_like(norm)
    factor = scale.reciprocal()
    if clips:
        factor = factor * rules.clip_factor(mean, max_norm)
    local = (found > 0) & (found < world_size)
    hold.copy_((found > 0).int() * int(OVERFLOW) + local.int() * int(LOCAL))
    ranks = found + told[EARLIER:] if told.numel() > EARLIER else found
    outcome.copy_(torch.cat([factor, mean, ranks, (ranks > 0).float()]))
    scaled.copy_(coef)
    for column in (ONE_MINUS_BETA1, ONE_MINUS_BETA2, ONE_MINUS_BETA2)[:weighs]:
        scaled[:, column] *= factor
    scaled[:, GRAD_LIMIT] *= scale
    if digest is not None:
        digest[0] += told.view(torch.int32).sum()
