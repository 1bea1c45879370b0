"""Random arguments for the ops of 0/1 Adam and of distributed Lion, on top of ``Problem``'s."""

from __future__ import annotations

from typing import Any

import torch
from op_arguments import arguments_of
from reference_ops import Problem

from fusedonebit.triton_kernels.local_step import LocalStep
from fusedonebit.triton_kernels.nouns import Coefficients

Way = tuple[bool, bool, bool, bool, bool]
WAYS: list[Way] = [
    (True, False, False, True, False),
    (True, True, False, True, False),
    (True, False, True, False, False),
    (True, True, True, False, False),
    (False, True, False, True, False),
    (False, True, False, False, False),
    (True, False, False, False, False),
    (True, False, False, True, True),
    (True, True, False, True, True),
]
"""Of calling ``local_step``: moves, last, decay_in_update, precondition, follows."""


def local_step_arguments(p: Problem, way: Way, inside: bool = False, hold: int = 0, begins: bool = False) -> Any:
    moves, last, decay_in_update, precondition, follows = way
    exp_avg = p.normal(p.layout.numel)
    anchor = torch.full((p.layout.numel,), torch.nan) if begins and moves else None
    return arguments_of(
        "local_step",
        *(p.params, p.grads, p.places, exp_avg, p.exp_avg_sq, p.compensated, p.worker_scale, p.coef),
        LocalStep(inside, precondition, moves, last, decay_in_update, follows),
        *(torch.tensor([hold], dtype=torch.int32), anchor, torch.zeros(1, dtype=torch.int32)),
    )


def rebuild_arguments(p: Problem, precondition: bool, inside: bool = False, of_rounds: bool = False) -> Any:
    """``of_rounds``: bits are sums of several steps, and every third tensor waits for a variance."""
    tensors = torch.arange(max(1, len(p.layout.sizes)))
    summed, mean_sq = (3.0 + tensors, (tensors % 3).double()) if of_rounds else (None, None)
    table = Coefficients.of(p.coef)
    return arguments_of(
        "rebuild_momentum",
        *(p.places, p.exp_avg_bits, p.exp_avg_scale, summed, mean_sq),
        *(p.exp_avg_sq if precondition else None, inside, table),
        *(torch.full((p.layout.numel,), torch.nan), torch.full((p.layout.n_blocks,), torch.nan)),
    )


def lion_arguments(p: Problem, step: int = 7, hold: int = 0) -> Any:
    exp_avg = p.normal(p.layout.numel)
    exp_avg[::3] = 0.0
    for g in p.grads:
        g[::3] *= 0.0
    return arguments_of(
        "lion_compress",
        *(p.grads, p.places, exp_avg, p.coef),
        *(torch.tensor(step), torch.tensor([hold], dtype=torch.int32)),
        *(p.bits, torch.full((len(p.bits), p.layout.scale_slots("block")[1]), torch.nan), len(p.bits) - 1),
        torch.zeros(1, dtype=torch.int32),
    )
