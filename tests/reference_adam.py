"""1-bit Adam's Algorithm 1 (Tang et al., 2021), line by line, in float64 NumPy: a specification.

Plain vectors, no blocks, no padding, no deferred residual. ``n`` workers; server k serves the
elements ``served[k]`` of the fused vector, so that there are as many server scales as servers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
class Outcome:
    """What Algorithm 1 computes in one step; ``sent`` and ``averaged`` are before compression."""

    sent: list[Vector]
    worker_scale: list[float]
    worker_error: list[Vector]
    averaged: Vector
    server_scale: list[float]
    server_error: Vector
    m: Vector
    x: Vector


def sign(c: Vector) -> Vector:
    return np.where(c >= 0, 1.0, -1.0)


def scale(c: Vector, norm: str) -> float:
    l1, l2 = np.abs(c).sum() / c.size, np.linalg.norm(c) / np.sqrt(c.size)
    return {"l1": l1, "l2": l2, "contractive": min(l2, 1.9 * l1)}[norm]


def compress(c: Vector, norm: str) -> tuple[Vector, float]:
    """C_omega: one scale, and the signs."""
    s = scale(c, norm)
    return s * sign(c), s


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
    unit = 1 / denom if precondition else 1.0
    n = len(gradients)
    sent, worker_scale, worker_error, compressed = [], [], [], []
    for i in range(n):
        # m_t^(i) = beta_1 * m_{t-1} + (1 - beta_1) * g_t^(i)
        m_i = beta1 * state.m + (1 - beta1) * gradients[i]
        # hat m_t^(i) = C_omega[m_t^(i) + delta_{t-1}^(i)]
        c_i = unit * m_i + state.worker_error[i]
        hat_m_i, s_i = compress(c_i, norm)
        # delta_t^(i) = m_t^(i) + delta_{t-1}^(i) - hat m_t^(i), all in the unit that is compressed
        sent.append(c_i)
        worker_scale.append(s_i)
        compressed.append(hat_m_i)
        worker_error.append(c_i - hat_m_i)

    # bar m_t = C_omega[(1/n) * sum_i hat m_t^(i) + delta_{t-1}], by each server for its elements
    averaged = sum(compressed) / n + state.server_error
    bar_m, server_scale = np.empty_like(averaged), []
    for elements in served:
        bar_m[elements], s = compress(averaged[elements], norm)
        server_scale.append(s)
    # delta_t = (1/n) * sum_i hat m_t^(i) + delta_{t-1} - bar m_t
    server_error = averaged - bar_m

    # x_{t+1} = x_t - gamma * bar m_t / sqrt(v_{T_w}), with Adam's bias corrections, eps and decoupled decay
    m = bar_m / unit
    m_hat = m / (1 - beta1**step)
    x = state.x - lr * (m_hat / denom + weight_decay * state.x)
    return Outcome(sent, worker_scale, worker_error, averaged, server_scale, server_error, m, x)
