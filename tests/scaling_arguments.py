"""Arguments of ``gradient_squares`` and ``scale_coefficients``."""

from __future__ import annotations

from typing import Any

import torch

from fusedonebit.triton_kernels import Coef
from fusedonebit.triton_kernels.finish import PIECE

LARGEST, MAX_NORM = 1.8e19, 2.0
TOLD = ((None, None), (None, 0.0), (3.0, 1.0), (1024.0, 0.0, 2.0), (None, None, 1.0))
"""The loss scale, what a scaler has found, and what it has found earlier."""
TO_SCALE = ((0.0, 0.0), (0.0, 7.0), (1.0, 7.0), (3.0, 1e30), (0.0, torch.inf), (0.0, torch.nan), (1.0, 3.0, 2.0))
"""What ranks have told."""


def squares_arguments(p: Any, *told: float | None) -> tuple:
    """Return those that tell; without any ``told``, those that only add up."""
    squares = torch.full((p.layout.n_blocks,), torch.nan, dtype=torch.float64)
    pieces = -(-p.layout.n_blocks // PIECE)
    sums, tickets = torch.full((pieces,), torch.nan, dtype=torch.float64), torch.zeros(1 + pieces, dtype=torch.int32)
    scratch = (squares, sums, tickets, torch.full((), torch.nan, dtype=torch.float64))
    where = (p.grads, p.layout.sizes, p.layout.block_size, LARGEST)
    if not told:
        return (*where, None, *scratch, None, None, None)
    loss_scale, found_inf, *earlier = (None if x is None else torch.tensor(x) for x in told)
    earlier = earlier[0].reshape(1) if earlier else None
    result = torch.full((2 if earlier is None else 3,), torch.nan)
    return (*where, loss_scale, *scratch, found_inf, earlier, result)


def scaling_arguments(
    told: tuple[float, ...], loss_scale: float | None, clips: bool, weighs: int, tensors: int, world_size: int = 3
) -> tuple:
    coef = torch.randn(tensors, len(Coef), generator=torch.Generator().manual_seed(1))
    coef[:, Coef.GRAD_LIMIT] = LARGEST
    scale = None if loss_scale is None else torch.tensor(loss_scale)
    written = (torch.full((4,), torch.nan), torch.full((1,), -1, dtype=torch.int32))
    return (
        *(torch.tensor(told), world_size, scale, clips, MAX_NORM, weighs),
        *(*written, coef, torch.full_like(coef, torch.nan)),
    )
