"""1-bit LAMB's equation (2) and Algorithm 1 (Li et al., 2021), line by line, in float64 NumPy: a specification.

Plain vectors, no blocks, no padding, no deferred residual. ``n`` workers; server k serves the
elements ``served[k]`` of the fused vector. ``layers[l]`` is where layer l lies in it. Beyond the
paper: weight decay inside u, in both stages; eta, as in (2), in line 21 too; layers of norm 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from reference_adam import Vector, compress


@dataclass(frozen=True)
class Settings:
    """Named as in the paper; ``lr`` is gamma, ``eps`` is eta."""

    lr: float
    beta1: float
    beta2: float
    beta3: float
    eps: float
    weight_decay: float
    c_min: float
    c_max: float
    r_min: float
    r_max: float
    r_threshold: float


@dataclass
class WarmUp:
    """float64: [d] each, but c and c_avg, which have an element for each layer."""

    x: Vector
    m: Vector
    v: Vector
    c: Vector
    c_avg: Vector


@dataclass
class State:
    """What one compressed step starts from: float64 [d] each, but one r and one c_avg for each layer.

    The residuals are in the unit in which the momentum travels, m is not (section 4.3).
    """

    x: Vector
    m: Vector
    v_frozen: Vector
    v: Vector
    r: Vector
    c_avg: Vector
    worker_error: list[Vector]
    server_error: Vector


@dataclass
class Exchange:
    """What lines 6 to 13 compute; ``sent`` and ``averaged`` are before compression."""

    sent: list[Vector]
    worker_scale: list[float]
    worker_error: list[Vector]
    averaged: Vector
    server_scale: list[float]
    server_error: Vector
    m: Vector


@dataclass
class Update:
    """What lines 14 to 22 make of the momentum."""

    x: Vector
    v: Vector
    r: Vector
    c: Vector
    clipped: Counter[str]


@dataclass
class Outcome(Update, Exchange):
    """What Algorithm 1 computes in one step."""


def clip(value: float, low: float, high: float, clipped: Counter[str], name: str) -> float:
    """clip(x, a, b) := min{max{x, a}, b}; counts where it changes something."""
    clipped[f"{name} lower"] += bool(value < low)
    clipped[f"{name} upper"] += bool(value > high)
    return min(max(value, low), high)


def warmup_step(state: WarmUp, g: Vector, layers: Sequence[slice], s: Settings, clipped: Counter[str]) -> WarmUp:
    """One step of equation (2), on the averaged gradient."""
    m, v, x, c, c_avg = (np.empty_like(a) for a in (state.m, state.v, state.x, state.c, state.c_avg))
    for i, layer in enumerate(layers):
        # m_t = beta_1 * m_{t-1} + (1 - beta_1) * g_t
        m[layer] = s.beta1 * state.m[layer] + (1 - s.beta1) * g[layer]
        # v_t = beta_2 * v_{t-1} + (1 - beta_2) * (g_t)^2
        v[layer] = s.beta2 * state.v[layer] + (1 - s.beta2) * g[layer] ** 2
        # u_t = m_t / sqrt(v_t + eta), and the weight decay
        u = m[layer] / np.sqrt(v[layer] + s.eps) + s.weight_decay * state.x[layer]
        # c_t = clip(|x_{t-1}| / |u_t|, c_min, c_max), and 1 where a norm is zero
        x_norm, u_norm = np.linalg.norm(state.x[layer]), np.linalg.norm(u)
        c[i] = clip(x_norm / u_norm, s.c_min, s.c_max, clipped, "c") if x_norm > 0 and u_norm > 0 else 1.0
        # x_t = x_{t-1} - gamma * c_t * u_t
        x[layer] = state.x[layer] - s.lr * c[i] * u
        # Line 2: c_avg = beta_3 * c_avg + (1 - beta_3) * c_t
        c_avg[i] = s.beta3 * state.c_avg[i] + (1 - s.beta3) * c[i]
    return WarmUp(x, m, v, c, c_avg)


def momentum_scales(m: Vector, layers: Sequence[slice]) -> Vector:
    """Section 4.3, at the end of the warm-up: [layers]; a layer without momentum keeps 1."""
    size = np.array([np.linalg.norm(m[layer]) / np.sqrt(m[layer].size) for layer in layers])
    average = np.mean(size[size > 0])
    return np.array([average / s_l if s_l > 0 else 1.0 for s_l in size])


def compressed_step(
    state: State,
    gradients: list[Vector],
    served: list[Vector],
    layers: Sequence[slice],
    unit: Vector,
    s: Settings,
    *,
    norm: str,
    adaptive: bool = True,
) -> Outcome:
    """One round of the loop of lines 4 to 23; ``adaptive=False`` is "LAMB + basic 1-bit" (section 3.4).

    ``unit`` is what each element of the momentum is multiplied with before it is compressed.
    """
    exchanged = exchange(state.m, state.worker_error, state.server_error, gradients, served, unit, s.beta1, norm)
    updated = update(state, exchanged.m, layers, s, adaptive)
    return Outcome(**vars(exchanged), **vars(updated))


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
    """Lines 6 to 13, of elements that share one worker's scale."""
    n, before, server_before = len(gradients), worker_error, server_error
    sent, worker_scale, worker_error, compressed = [], [], [], []
    for i in range(n):
        # Line 6: m_t^(i) = beta_1 * m_{t-1}^(i) + (1 - beta_1) * g_t^(i)
        m_i = beta1 * m + (1 - beta1) * gradients[i]
        # Line 7: hat m_t^(i) = C_omega[m_t^(i) + delta_{t-1}^(i)]. Section 4.3: "we multiply each
        # layer's local momentum by its scale coefficient, then do the compressed communication".
        c_i = unit * m_i + before[i]
        hat_m_i, s_i = compress(c_i, norm)
        # delta_t^(i) = m_t^(i) + delta_{t-1}^(i) - hat m_t^(i)
        sent.append(c_i)
        worker_scale.append(s_i)
        compressed.append(hat_m_i)
        worker_error.append(c_i - hat_m_i)

    # Line 10: bar m_t = C_omega[(1/n) * sum_i hat m_t^(i) + bar delta_{t-1}], by each server for its elements
    averaged = sum(compressed) / n + server_before
    bar_m, server_scale = np.empty_like(averaged), []
    for elements in served:
        bar_m[elements], scale = compress(averaged[elements], norm)
        server_scale.append(scale)
    # bar delta_t = (1/n) * sum_i hat m_t^(i) + bar delta_{t-1} - bar m_t
    server_error = averaged - bar_m

    # Line 13: m_t = bar m_t. "then divide each layer's global momentum by the same scale coefficient"
    return Exchange(sent, worker_scale, worker_error, averaged, server_scale, server_error, bar_m / unit)


def update(state: State, m: Vector, layers: Sequence[slice], s: Settings, adaptive: bool) -> Update:
    """Lines 14 to 22, from the momentum m_t of all layers."""
    x, v, r, c = (a.copy() for a in (state.x, state.v, state.r, state.c_avg))
    clipped: Counter[str] = Counter()
    # Line 14: for the l-th layer do
    for i, layer in enumerate(layers):
        if adaptive:
            # Line 15: g_t = (m_t - beta_1 * m_{t-1}) / (1 - beta_1)
            g = (m[layer] - s.beta1 * state.m[layer]) / (1 - s.beta1)
            # Line 16: v_t = beta_2 * v_{t-1} + (1 - beta_2) * (g_t)^2
            v[layer] = s.beta2 * state.v[layer] + (1 - s.beta2) * g**2
            # Line 17: r_t = |v_{T_w} / v_t|_inf
            r[i] = np.max(np.abs(state.v_frozen[layer] / v[layer]))
            # Line 18: r_t = clip(r_t, (1 - r_threshold) * r_{t-1}, (1 + r_threshold) * r_{t-1})
            low, high = (1 - s.r_threshold) * state.r[i], (1 + s.r_threshold) * state.r[i]
            r[i] = clip(r[i], low, high, clipped, "line 18")
            # Line 19: r_t = clip(r_t, r_min, r_max)
            r[i] = clip(r[i], s.r_min, s.r_max, clipped, "line 19")
            # Line 20: c_t = r_t * c_avg
            c[i] = r[i] * state.c_avg[i]
        # Line 21: x_t = x_{t-1} - gamma * c_t * m_t / sqrt(v_{T_w}), with eta and the weight decay
        u = m[layer] / np.sqrt(state.v_frozen[layer] + s.eps) + s.weight_decay * state.x[layer]
        x[layer] = state.x[layer] - s.lr * c[i] * u
    return Update(x, v, r, c, clipped)
