"""Makes ops of a worker's vote from one rule, which says what an optimizer votes on and what becomes of its momentum.

``vote_op(name, rule)`` makes of an elementwise rule the op: eager, in Triton and in C, with its schema. The rule is
written as those of ``rules``, and may call them. The kernel is never autotuned: it updates in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from . import bit_rules, rules
from . import block_io as io
from . import user_tensors as users
from .eager import gather, live_mask, only_live, pack, random_bits, tiles
from .jit import Deferred, jit, tl
from .native.generate import instance
from .nouns import CoefTable, Counter, Derived, Flag, Floats, Packed, PerElement, Places, Tensors
from .op import op

RULE = rules.momentum  # each op binds its own
TIE_BREAKER = 0.5
"""The weight that one vote has more than the others: it decides ties, and nothing else."""


@jit()
def _weigh(b, step, weights, weights_stride, slots, rank, world_size):
    """Write weight b of all, of which there are no more than blocks."""
    if b < slots * world_size:
        breaks_ties = (tl.load(step) + rank) % world_size == 0
        tl.store(weights + b // slots * weights_stride + b % slots, tl.where(breaks_ties, 1.0 + TIE_BREAKER, 1.0))


@jit()
def vote_kernel(
    grads_table, tensors, exp_avg, coef, places, step, hold, bits, bits_stride, flags, weights, weights_stride, slots,
    rank, world_size, blocks_per_chunk,
    GRADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks. Bytes per element: the gradient, 8 for m, 1/8 for bits; a weight per block."""
    b = tl.program_id(0).to(tl.int64)
    if weights is not None:
        _weigh(b, step, weights, weights_stride, slots, rank, world_size)
    i = io.elements(BLOCK_SIZE)
    row = tl.load(places.live_row + b)
    if row == 1:
        # Computed where they are written, so that no register holds them meanwhile.
        at = io.bytes_at(bits, bits_stride, b, blocks_per_chunk, BLOCK_SIZE)
        tl.store(at, tl.full([BLOCK_SIZE // 8], 0xFF, tl.uint8))
    else:
        t, k = io.tensor_of(b, places.block_tensor, coef)
        place = users.place_of(grads_table, tensors, t, places.block_start, b, BLOCK_SIZE)
        mask = io.counting(places.live, row, i, BLOCK_SIZE)
        g = rules.counted(users.load(place, i, mask, row, GRADS), k)
        m = tl.load(exp_avg + b * BLOCK_SIZE + i)
        c, new = RULE(m, g, k)
        finite = rules.finite(new) & rules.finite(c)
        held = tl.load(hold) != 0
        tl.store(exp_avg + b * BLOCK_SIZE + i, tl.where(finite & mask & (not held), new, m))
        c = tl.where(finite, c, m)
        low, seed = io.random_words(step, b, i, BLOCK_SIZE)
        c = rules.untied(c, bit_rules.random_bits(low, seed))
        byte = io.bytes_at(bits, bits_stride, b, blocks_per_chunk, BLOCK_SIZE)
        tl.store(byte, io.bytes_of(tl.where(mask, c, 0.0) >= 0))
        bad = io.any_of(~finite & mask)
        if (bad != 0) & (not held):
            tl.atomic_or(flags, io.NONFINITE)


def vote_op(name: str, rule: Deferred) -> Callable[..., None]:
    """Declare the op ``name``, in which a worker votes by a rule: ``c, m = rule(m, g, k)``.

    Args:
        name: Of the op ``torch.ops.fusedonebit.<name>``.
        rule: Of the momentum, the gradient, and a row of the table of coefficients (``Coef``); returns what is voted
            on, whose sign is sent, and the new momentum.

    Raises:
        TypeError, NotImplementedError: for a rule of which C can't be printed.
    """

    def vote(
        grads: Tensors, places: Places, exp_avg: PerElement, coef: CoefTable, step: Counter, hold: Flag, bits: Packed,
        weights: Annotated[Floats, "W _"] | None, rank: int, flags: Flag,
    ) -> None:  # fmt: skip
        """Make a worker's vote, one bit each, and its momentum: of Lion Algorithm 1 (Liu et al., 2024).

            c, m = rule(m, g);  bits = c >= 0

        A bit has no zero: where c is 0 the sign is random, alike on all ranks, so that coordinates without
        a gradient do not drift. An element whose gradient exceeds GRAD_LIMIT, or whose new momentum is not finite,
        drops its gradient and sets the flag. Elements that do not count have bit 1, and keep their momentum.

        Other arguments as for ``apply_momentum``; ``grads`` as for ``momentum_compress``.

        Args:
            exp_avg: m, float32 [P], read and written.
            step: Updates done, int64 []; random signs are made of it and of the flat index (``bit_rules.random_bits``).
            hold: int32 [1]; where set m stays.
            bits: uint8 [W, P / 8W], written.
            weights: float32 [W, slots], written: what the vote weighs, 1, or TIE_BREAKER more in one step of W; None:
                it weighs what it is said to elsewhere.
            rank: This worker's, which says in which step.
            flags: int32 [1], ``NONFINITE`` is set where it happened.
        """
        if weights is not None:
            weights.copy_(1.0 + TIE_BREAKER * ((step + rank) % len(bits) == 0))
        moments = places.rows(exp_avg)
        for tile in tiles(places.sizes, len(bits), places.block_size, exp_avg.device, len(places.block_tensor)):
            k, m = coef[places.block_tensor[tile.blocks]], moments[tile.blocks]
            g = rules.counted(only_live(gather(grads, tile, places.block_size), places, tile), k)
            c, new = rule(m, g, k)
            mask, finite = live_mask(places, tile), rules.finite(new) & rules.finite(c)
            if not (hold or (finite if mask is None else finite | ~mask).all()):
                flags |= io.NONFINITE
            c = rules.untied(tl.where(finite, c, m), random_bits(step, tile, places.block_size))
            c = only_live(c, places, tile)
            pack(c.reshape(-1), bits[tile.chunk, tile.bytes])
            written = finite & (hold == 0) if mask is None else finite & (hold == 0) & mask
            moments[tile.blocks] = tl.where(written, new, m)

    vote.__name__ = name
    writes, in_c = ("exp_avg", "bits", "flags", "weights"), instance("vote.c", name, rule.function)
    derive: Derived = {
        "slots": ("i32", lambda weights: 0 if weights is None else weights.shape[1]),
        "world_size": ("i32", lambda bits: len(bits)),
    }
    return op(vote_kernel.bind(RULE=rule), writes=writes, derive=derive, in_c=in_c)(vote)
