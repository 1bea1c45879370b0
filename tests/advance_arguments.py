"""Arguments of the op that ends a step."""

from __future__ import annotations

import math
from typing import Any

import torch
from op_arguments import arguments_of

from fusedonebit.triton_kernels import Coef, Group
from fusedonebit.triton_kernels.nouns import Coefficients, Count
from fusedonebit.triton_kernels.rules import GROUP_COLUMNS

BETAS = ((0.9, 0.999), (0.0, 0.95), (0.95, 0.99999))


def advance_arguments(
    tensors: int,
    *,
    flags: int | None = None,
    absent: bool = False,
    captured: bool = False,
    entered: bool = True,
    renews: bool = False,
    tables: bool = False,
    moved: bool = False,
    begins: bool = False,
    rho: bool = False,
) -> Any:
    """Counts of up to 2^17 updates; ``captured``: rates and counters on the device; ``tables``: LAMB's, 0/1 Adam's.

    ``moved``: what a round has gone before this step, whose table is random then. ``rho``: variances have levels.
    """
    generator = torch.Generator().manual_seed(tensors)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    groups = random(len(BETAS), GROUP_COLUMNS)
    groups[:, Group.CORRECTION1 : Group.CORRECTION2 + 1] = torch.tensor(BETAS, dtype=torch.float64)
    groups[0, Group.FLOOR] = 0.0
    groups[:, Coef.LR] = torch.tensor([1e-3, 0.3, 1e-7])
    steps = (random(tensors) * 2 ** (17 * random(tensors))).floor()
    made = steps.minimum((random(tensors) * 3000).floor()).where(random(tensors) < 0.7, math.inf)
    of_group = torch.randint(len(BETAS), (tensors,), generator=generator, dtype=torch.int32)
    nobody = (random(tensors) < 0.3).to(torch.uint8)
    counters = torch.tensor(2**31 - 1, dtype=torch.int32), torch.arange(4)
    rates = random(len(BETAS)).float() if captured else None
    unit = random(tensors).float() if tables else None
    mean_sq = random(tensors) - 0.2 if tables else None
    gone = random(2, tensors).float() if moved else None
    table = random(tensors, len(Coef)).float() if moved else torch.full((tensors, len(Coef)), math.nan)
    updates = None if flags is None else torch.tensor(5)
    return arguments_of(
        "advance",
        Coefficients(groups, rates, of_group, steps, mean_sq, table, gone),
        Count(nobody if absent else None, updates, *(counters if captured else (None, None)), veto=8, bad=3),
        None if flags is None else torch.tensor([flags], dtype=torch.int32),
        made if entered else None,
        renews,
        unit,
        begins,
        0.01 + random(tensors).float() if rho else None,
    )
