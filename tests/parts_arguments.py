"""Arguments of the op that closes a step in parts."""

from __future__ import annotations

from typing import Any

import torch
from backends import problem
from op_arguments import arguments_of as named

from fusedonebit.triton_kernels.parts import programs_of

SOME = (300, 0, 5, 2048, 129)


def arguments_of(found: tuple[int, ...], limit: float | None = None, sizes: tuple[int, ...] = SOME) -> Any:
    """``found`` of as many parts, which have a scale of the result for each of 3 chunks' blocks, and 2 of servers'."""
    p = problem(sizes, 3 * len(found), 128)
    blocks, each = p.layout.n_blocks, torch.tensor(found, dtype=torch.int32)
    scale, kept = p.normal(blocks).abs() + 0.1, p.normal(len(found), blocks // len(found) // 3).abs() + 0.1
    flags, ticket = (torch.tensor([n], dtype=torch.int32) for n in (-1, 0))
    squares = torch.full((programs_of(scale),), torch.nan, dtype=torch.float64)
    judged = p.limit(limit, p.coef), None if limit is None else squares
    return named("close_parts", each, scale, kept, flags, ticket, *judged)
