"""One step of 1-bit Adam's compression stage with what the optimizers add to ``fusedonebit.reference``, in float64.

That is: Adam's bias corrections, decoupled weight decay, preconditioning, scales that are contractive. Plain
vectors, no blocks, no padding, no deferred residual. Server k serves the elements ``served[k]`` of the fused vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fusedonebit import reference

Vector = np.ndarray


@dataclass
class State:
    """What one compressed step starts from: float64 [d] each; residuals in the unit in which momentum travels."""

    x: Vector
    m: Vector
    v: Vector
    worker_error: list[Vector]
    server_error: Vector


@dataclass
class Exchange:
    """What the exchange of the momentum computes; ``sent`` and ``averaged`` are before compression."""

    sent: list[Vector]
    worker_scale: list[float]
    worker_error: list[Vector]
    averaged: Vector
    server_scale: list[float]
    server_error: Vector
    m: Vector


@dataclass
class Outcome(Exchange):
    """What one step computes."""

    x: Vector


def sign(c: Vector) -> Vector:
    return np.where(c >= 0, 1.0, -1.0)


def contractive(c: Tensor) -> Tensor:
    l1, l2 = 1.9 * reference.compress(c, 1), reference.compress(c, 2)
    return torch.where(l1.abs() < l2.abs(), l1, l2)


COMPRESS: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": partial(reference.compress, p=1),
    "l2": partial(reference.compress, p=2),
    "contractive": contractive,
}


def exchange(
    m: Vector,
    worker_error: list[Vector],
    server_error: Vector,
    gradients: list[Vector],
    served: list[Vector],
    unit: Vector,
    beta1: float,
    norm: str,
) -> Exchange:
    """Lines 6 to 13, of elements that share one worker's scale.

    ``unit`` is what each element of the momentum is multiplied with before it is compressed.
    """
    np.testing.assert_array_equal(np.concatenate(served), np.arange(m.size))
    calls: list[tuple[Tensor, Tensor]] = []

    def compress(c: Tensor) -> Tensor:
        calls.append((c, COMPRESS[norm](c)))
        return calls[-1][1]

    s = reference.State(torch.from_numpy(m), len(gradients))
    s.C, s.servers = compress, [int(part[0]) for part in served[1:]]
    s.worker_error, s.server_error = torch.from_numpy(np.stack(worker_error)), torch.from_numpy(server_error)
    m_bar = reference.exchange(s, torch.from_numpy(unit * m), torch.from_numpy(unit * np.stack(gradients)), beta1)
    (sent, m_hat), *servers = calls
    return Exchange(
        list(sent.numpy()),
        m_hat[:, 0].abs().tolist(),
        list(s.worker_error.numpy()),
        torch.cat([averaged for averaged, _ in servers]).numpy(),
        [float(part[0].abs()) for _, part in servers],
        s.server_error.numpy(),
        m_bar.numpy() / unit,
    )


def compressed_step(
    state: State,
    gradients: list[Vector],
    served: list[Vector],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    frozen_at: int,
    norm: str,
    precondition: bool = False,
) -> Outcome:
    """One step of the compression stage; ``step`` counts this update, from 1.

    With ``precondition``, what is compressed is the update m/denom instead of m.
    """
    denom = np.sqrt(state.v / (1 - beta2**frozen_at)) + eps
    unit = 1 / denom if precondition else np.ones_like(denom)
    exchanged = exchange(state.m, state.worker_error, state.server_error, gradients, served, unit, beta1, norm)
    m_hat = exchanged.m / (1 - beta1**step)
    return Outcome(**vars(exchanged), x=state.x - lr * (m_hat / denom + weight_decay * state.x))
