"""What the twins are made of, as ``access`` is for the kernels: signs, residuals, denominators, masks, rounding.

Blocks are rows: a tile is float32 [blocks, block_size], what a table holds per block is [blocks, 1].
Each line is one float32 rounding, in the order in which the kernels round, without contraction.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

try:
    import numpy
except ImportError:  # torch does not need it, and then nor do the twins
    numpy = None  # type: ignore[assignment]

from .coefficients import Coef
from .live import FULL_ROW
from .tiles import Tile, gather, scatter

ABS, SQUARE, DROPPED, NONZERO = 0, 1, 2, 3  # rows of the partial sums; the last only where ternary

WORD = 0xFFFFFFFF  # the 32 bits of a random word

GOLDEN = 0x9E3779B9  # makes the hash of nothing something: it maps 0 to 0

Words = TypeVar("Words", int, Tensor)


def signs(bits: Tensor, rows: int) -> Tensor:
    """+1.0 and -1.0, float32 [rows, 8 * bytes / rows], from packed bits."""
    table = _sign_table(bits.device)
    if numpy is not None and bits.device.type == "cpu":  # in half the time, as bytes are its indices
        return torch.from_numpy(table.numpy().take(bits.reshape(-1).numpy(), 0)).view(rows, -1)
    return table.index_select(0, bits.reshape(-1).int()).view(rows, -1)


@cache
def _sign_table(device: torch.device) -> Tensor:
    # Row b holds the eight signs of byte b, LSB first.
    byte = torch.arange(256, device=device)[:, None]
    return ((byte >> torch.arange(8, device=device)) & 1).float().mul_(2).sub_(1)


def scaled(bits: Tensor, scale: Tensor) -> Tensor:
    """What bits stand for, float32 [blocks, block_size]: scale and -scale, and 0 for zeros where ternary.

    Args:
        bits: uint8 [bytes], or [2, bytes] where ternary; see ``twins``.
        scale: float32 [blocks].
    """
    ternary = bits.dim() == 2
    values = signs(bits[0] if ternary else bits, len(scale)).mul_(scale[:, None])
    return torch.where(signs(bits[1], len(scale)) > 0, values, 0.0) if ternary else values


def residual(c: Tensor, scale: Tensor, ternary: bool) -> Tensor:
    """c - s*sign(c) for c float32 [blocks, block_size]; sign(0) is 0 where ternary, else 1."""
    sign = torch.ge(c, 0, out=torch.empty_like(c)).mul_(2).sub_(1)
    # What it multiplies is 1, -1 or 0: one rounding, that of the difference.
    return torch.addcmul(c, torch.where(c == 0, 0.0, sign) if ternary else sign, scale[:, None], value=-1)


def column(k: Tensor, which: Coef) -> Tensor:
    """A coefficient of each block, [blocks, 1], from rows ``k`` of the table."""
    return k[:, which, None]


def counted(g: Tensor, k: Tensor) -> Tensor:
    """A gradient, NaN where it is too large to count: nothing that is made of it is finite then."""
    return torch.where(g.abs() <= column(k, Coef.GRAD_LIMIT), g, torch.nan)


def denom(v: Tensor, k: Tensor, eps_inside_sqrt: bool) -> Tensor:
    """sqrt(v)/sqrt(1 - beta2^t) + eps, or eps inside the root; ``v``, of any dtype, is left as it is."""
    v = v.float()
    root, eps = column(k, Coef.RSQRT_BIAS2), column(k, Coef.EPS)
    if eps_inside_sqrt:
        return _sqrt(v.mul(root).mul_(root).add_(eps))
    return _sqrt(v).mul_(root).add_(eps)


def _sqrt(v: Tensor) -> Tensor:
    """The root, correctly rounded; torch.sqrt is up to one unit off on CPUs (MKL's vector library)."""
    if numpy is None or v.device.type != "cpu":
        return newton_sqrt(v)
    with numpy.errstate(invalid="ignore"):
        return torch.from_numpy(numpy.sqrt(v.numpy()))  # the processor's own instruction


def newton_sqrt(v: Tensor) -> Tensor:
    """The same bits in torch alone: a Newton step in float64."""
    guess = v.sqrt().double().clamp_(1e-300, 1e300)
    return v.double().div_(guess).add_(guess).mul_(0.5).float()


def live_mask(live: Tensor, live_row: Tensor, tile: Tile) -> Tensor | None:
    """Which elements of a tile count, bool [blocks, block_size]; None where all do."""
    rows = live_row[tile.blocks]
    if bool((rows == FULL_ROW).all()):
        return None
    return signs(live[rows.long()], len(rows)) > 0


def only_live(values: Tensor, live: Tensor, live_row: Tensor, tile: Tile) -> Tensor:
    """The values, zero where an element does not count."""
    mask = live_mask(live, live_row, tile)
    return values if mask is None else torch.where(mask, values, 0.0)


def move(
    params: Sequence[Tensor],
    tile: Tile,
    block_size: int,
    update: Tensor,
    k: Tensor,
    live: Tensor,
    live_row: Tensor,
    rounding: Tensor | None,
) -> None:
    """x = decay*x - step_size*update for the live elements of a tile; overwrites ``update``."""
    x = gather(params, tile, block_size)
    moved = x * column(k, Coef.DECAY)
    moved.sub_(update.mul_(column(k, Coef.STEP_SIZE)))
    mask = live_mask(live, live_row, tile)
    moved = moved if mask is None else torch.where(mask, moved, x)
    if rounding is not None:
        round_bfloat16(moved, params, tile, rounding)
    scatter(moved, params, tile)


def mixed(word: Words) -> Words:
    """A hash that permutes 32-bit words: an int, or a tensor of int64 in [0, 2^32).

    The two rounds of shift and multiplication of C. Wellons' hash-prospector, with the constants that
    TheIronBorn found, the second without its top bit: below 2^31, so that no product leaves 63 bits.
    """
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & WORD
    word = ((word ^ (word >> 15)) * 0x735A2D97) & WORD
    return word ^ (word >> 15)


def random_bits(rounding: Tensor, tile: Tile, block_size: int) -> Tensor:
    """16 bits for each element of a tile, int32 [blocks, block_size].

    A function of the number of updates and of the element's place in the flat index space, nothing
    else: all ranks draw the same, and so does a run that goes on from a checkpoint.
    """
    index = torch.arange(tile.start, tile.start + tile.numel, device=rounding.device).view(-1, block_size)
    seed = mixed(mixed((index[:, :1] >> 32) + GOLDEN) ^ (rounding & WORD))
    return (mixed((index & WORD) ^ seed) >> 16).int()


def stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds float32 ``x`` to one of its two neighbours in bfloat16, up in magnitude with the odds of its remainder.

    What bfloat16 can represent stays as it is, infinities and NaN too. Above the largest finite
    bfloat16 the upper neighbour is infinity, as it is for rounding to nearest from half-way on.

    Args:
        bits: int32 of x's shape, uniform in [0, 2^16): added below the bits that are kept, they carry.
    """
    kept = (x.view(torch.int32) + bits) & -65536
    return torch.where(x.isnan(), x, kept.view(torch.float32))


def round_bfloat16(values: Tensor, params: Sequence[Tensor], tile: Tile, rounding: Tensor) -> None:
    """Rounds in place what bfloat16 tensors get of a tile's values, float32 [blocks, block_size]."""
    spans = [span for span in tile.spans if params[span.tensor].dtype is torch.bfloat16]
    if not spans:
        return
    flat, bits = values.view(-1), random_bits(rounding, tile, values.shape[1]).view(-1)
    for span in spans:
        own = slice(span.flat - tile.start, span.flat - tile.start + span.stop - span.start)
        flat[own] = stochastic(flat[own], bits[own])


_held = threading.local()  # simulated ranks are threads


def _widened(x: Tensor) -> Tensor:
    """x in float64, to be overwritten; on a CPU in memory that is used again: fresh pages cost more than sums."""
    if x.device.type != "cpu":
        return x.double()
    room: Tensor | None = getattr(_held, "room", None)
    if room is None or room.numel() < x.numel():
        room = _held.room = torch.empty(x.numel(), dtype=torch.float64)
    return room[: x.numel()].view(x.shape).copy_(x)


def square_sum(x: Tensor) -> Tensor:
    """Of each row of x float32 [rows, n] the sum of squares, float64 [rows]."""
    wide = _widened(x)
    return wide.mul_(wide).sum(1)


def write_partials(c: Tensor, partials: Tensor) -> bool:
    """Writes a tile's sums of |c| and c^2; returns whether they are finite, as c then is.

    Where ``partials`` has a fourth row, it is the number of elements that are not zero.
    """
    wide = _widened(c).abs_()
    partials[ABS] = wide.sum(1)
    partials[SQUARE] = wide.mul_(wide).sum(1)
    partials[DROPPED] = 0.0
    if len(partials) > NONZERO:
        partials[NONZERO] = (c != 0).sum(1).double()
    return bool(torch.isfinite(partials[SQUARE]).all())
