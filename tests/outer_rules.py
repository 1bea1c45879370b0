"""What may be in arguments of the ops on matrices with scales of rows and columns; see ``op_rules``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedonebit.triton_kernels.outer import Outer

ON_CHUNKS = ("outer_mean",)
"""Those that work on one rank's chunk."""


def columns_of(size: int, turn: int) -> int:
    """Return how many columns a matrix of so many elements has, 1 at least; which of those it may have takes turns."""
    divisors = [n for n in range(1, size + 1) if size % n == 0] or [5]
    return divisors[turn % len(divisors)]


def outer(m: Any) -> Outer:
    """Return scales of every tensor as a matrix, with slots between that are nobody's."""
    at, table = 1, []
    for size in m.p.layout.sizes:
        columns = columns_of(size, int(m.p.integers(0, 1 << 20, ())))
        table.append((at, at + size // columns, columns))
        at += size // columns + 3 + columns
    scales = m.p.normal(m.known["W"], at).abs()
    return Outer(scales, torch.tensor(table, dtype=torch.int32).T.contiguous(), Outer.starts(m.p.layout)[m.blocks])


def left(m: Any) -> Tensor:
    """Return what ``outer_compress`` leaves: 0 of what does not count, but for padding, which nobody must read."""
    c = torch.where(m.p.live_mask, m.p.compensated, torch.nan)
    for x in m.p.layout.cut(c):
        x.nan_to_num_(0.0)
    return c


def sums(m: Any) -> Tensor:
    """Return sums of blocks, other than those of c; of the first tensor 0, every other time."""
    sums = 100 * m.p.uniform(*m.shape)
    if m.p.uniform() < 0.5:
        sums[: m.p.layout.first_block[1]] = 0.0
    return sums


NOUNS: dict[str, Callable[[Any], Any]] = {"outer": outer}
RULES: dict[str, Callable[[Any], Any]] = {
    "outer_compress.found": lambda m: m.p.found,
    "outer_compress.partials": lambda m: torch.full(m.shape, torch.nan, dtype=torch.float64),
    "outer_scales.compensated": left,
    "outer_scales.partials": sums,
    "outer_scales.tiles": lambda m: Outer.tiles(m.p.layout.sizes, m.done["outer_table"][2].tolist()),
    "momentum": lambda m: m.p.normal(*m.shape),
    "outer_mean.arrived_words": lambda m: m.p.headers(m.known["W"], heard=m.heard)[0],
    "outer_mean.arrived_own_words": lambda m: m.done["arrived_words"][0].clone(),
}
NUMBERS: dict[str, float] = {"outer_mean.flags": -1, "outer_mean.beta": 0.95, "outer_mean.lead": 0.05}
CHOICES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("outer_compress.compensated", "outer_scales.compensated"), (..., torch.bfloat16)),
    "skipped": (0, 0, 1, 0, 6),
    "outer_mean.beta": (0.95, 1 / 3, 0.0),
    "outer_mean.lead": (0.05, 0.0, 1 / 3),
}
HEARD = (0, 1, 0, 0, (0,), 0, 34, 0, 0, (1,), 0, -64, 0, 2, 0)
UNSAID: dict[str, dict[str, tuple[Any, ...]]] = {
    "outer_mean": {"heard": HEARD, "world_size": (1, 2, 3, 7, 17)},
    "outer_scales": {"sizes": (None, None, None, (77 * 130, 300, 66 * 35), (35 * 270,))},
}
