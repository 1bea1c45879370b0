"""Arguments of the op that closes a step in parts."""

from __future__ import annotations

import torch
from backends import problem
from torch import Tensor

from fusedonebit.triton_kernels.parts import programs_of

SOME = (300, 0, 5, 2048, 129)


def arguments_of(found: tuple[int, ...], limit: float | None = None, sizes: tuple[int, ...] = SOME) -> tuple:
    """``found`` of as many parts, which have a scale of the result for each of 3 chunks' blocks, and 2 of servers'."""
    p = problem(sizes, 3 * len(found), 128)
    blocks, each = p.layout.n_blocks, torch.tensor(found, dtype=torch.int32)
    judged: tuple[Tensor | None, ...] = (None,) * 6
    if limit is not None:
        numbers = (torch.tensor(limit, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64))
        squares = torch.full((programs_of(p.exp_avg_scale),), torch.nan, dtype=torch.float64)
        judged = (p.coef, p.block_tensor, p.normal(blocks).abs(), *numbers, squares)
    scale, kept = p.normal(blocks).abs() + 0.1, p.normal(len(found), blocks // len(found) // 3).abs() + 0.1
    flags, ticket = (torch.tensor([n], dtype=torch.int32) for n in (-1, 0))
    return each, scale, kept, flags, ticket, *judged
