"""Functions of two variables on which compression shows its faults, minimised with the library's own ops.

``bowl``    x^2 + y^2 with coordinates of different magnitude (Fixing 1-bit Adam, figures 1 and 6)
``narrow``  a valley along which the signs of all gradients are blind (Karimireddy et al., 2019)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusedonebit import OneBitAdam
from fusedonebit.comm import CompressedAllReduce
from fusedonebit.triton_kernels import FlatLayout

from .contenders import PAPER, UNGUARDED

BOWL_WARM_UP, BOWL_STEPS, BOWL_LR = 100, 600, 1e-3
BOWL_START = (1.0, 1e-3)
BOWL: dict[str, dict[str, Any] | None] = {
    "Adam": None,
    "1-bit Adam, l2": {"numerics": PAPER, "faults": UNGUARDED},
    "1-bit Adam, eps inside the root": {"numerics": replace(PAPER, eps_inside_sqrt=True), "faults": UNGUARDED},
    "1-bit Adam, our defaults": {},
}
"""Minimisers of the bowl: options of ``OneBitAdam``, or None for Adam itself."""


def bowl(options: dict[str, Any] | None) -> list[float]:
    """Minimise x^2 + y^2 from coordinates a thousandfold apart; return its value before each step.

    In the warm-up Adam moves both by the same step, so that the larger one hardly changes and its
    variance stays a million times that of the other. One scale for both momenta then throws the
    smaller one far out (equation 1 and figure 6 of the Fixing paper).
    """
    at = nn.Parameter(torch.tensor(BOWL_START))
    freeze_step = BOWL_STEPS if options is None else BOWL_WARM_UP
    optimizer = OneBitAdam([at], BOWL_LR, weight_decay=0.0, freeze_step=freeze_step, **options or {})
    values = []
    for _ in range(BOWL_STEPS):
        optimizer.zero_grad()
        loss = at.square().sum()
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    return values


NARROW = 0.1
"""Slope along the valley, as a share of that across it."""


def narrow(error_feedback: bool, steps: int = 1000, lr: float = 0.01) -> list[float]:
    """Minimise 0.1 |x + y| + |x - y| from (1, 1) by compressed gradients; return its value before each step.

    Across the valley x = y the gradient is (1, -1) or (-1, 1), which outweighs what points along it:
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
    """Drop all residuals."""
    residuals: tuple[Tensor, ...] = (reduce.worker.compensated, reduce.server.compensated)
    for residual, scale in zip(residuals, (reduce.worker.scale, reduce.server.scale), strict=True):
        residual.zero_()
        scale.zero_()
