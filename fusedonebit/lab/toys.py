"""Functions of two variables on which compression shows its faults, minimised with the library's own ops.

``bowl``    x^2 + y^2 with coordinates of different magnitude (Fixing 1-bit Adam, figures 1 and 6)
``narrow``  a valley along which the signs of all gradients are blind (Karimireddy et al., 2019)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import OneBitAdam
from ..comm import CompressedAllReduce
from ..triton_kernels import FlatLayout
from .contenders import PAPER

BOWL_WARM_UP = 100
BOWL = {
    "Adam": None,
    "1-bit Adam, l2": {"scale_norm": "l2", **PAPER},
    "1-bit Adam, eps inside the root": {"scale_norm": "l2", "eps_inside_sqrt": True, **PAPER},
    "1-bit Adam, our defaults": {},
}
"""What minimises the bowl: numerics of ``OneBitAdam``, or None for Adam itself."""


def bowl(start: tuple[float, float], lr: float, steps: int, numerics: dict[str, object] | None) -> list[float]:
    """Minimises x^2 + y^2 and returns its value before each step."""
    at = nn.Parameter(torch.tensor(start))
    freeze_step = steps if numerics is None else BOWL_WARM_UP
    optimizer = OneBitAdam([at], lr, (0.9, 0.999), 1e-8, 0.0, freeze_step=freeze_step, **numerics or {})  # type: ignore[arg-type]
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = at.square().sum()
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    return values


NARROW = 0.1
"""Slope along the valley, as a share of that across it."""


def narrow(error_feedback: bool, steps: int = 500, lr: float = 0.02) -> list[float]:
    """Minimises 0.1 |x + y| + |x - y| from (1, 1) by compressed gradients; returns its value before each step.

    Across the valley x = y the gradient is (1, -1) or (-1, 1), which drowns what points along it:
    signs alone never move x + y. Error feedback delivers it.
    """
    at = torch.ones(2)
    at[0] += lr / 4  # never exactly in the valley
    reduce = CompressedAllReduce(FlatLayout((2,)), scale_norm="l1")
    values = []
    for _ in range(steps):
        values.append(float(NARROW * at.sum().abs() + (at[0] - at[1]).abs()))
        grad = NARROW * at.sum().sign() + (at[0] - at[1]).sign() * torch.tensor([1.0, -1.0])
        reduce([grad])
        at -= lr * reduce.result()[:2]
        if not error_feedback:
            forget(reduce)
    return values


def forget(reduce: CompressedAllReduce) -> None:
    """Drops all residuals."""
    residuals: tuple[Tensor, ...] = (reduce.worker.compensated, reduce.server.compensated)
    for residual, scale in zip(residuals, (reduce.worker.scale, reduce.server.scale), strict=True):
        residual.zero_()
        scale.zero_()
