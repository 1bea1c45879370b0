"""Steps of 1-bit LAMB with what the optimizers add to ``fusedonebit.reference``, in float64.

That is: weight decay inside u, in both stages; layers whose norm or momentum is 0; coefficients that stay as they are
("LAMB + basic 1-bit", section 3.4). ``layers[l]`` is where layer l lies in the fused vector; what servers serve is as
in ``reference_adam``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from reference_adam import Exchange, Vector, exchange

from fusedonebit import reference


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
    moving = [layer for layer in layers if m[layer].any()]
    state = reference.LambState(torch.from_numpy(m), 1, moving)
    state.m = torch.from_numpy(m)
    reference.freeze(state)
    return np.array([float(state.scale[layer.start]) for layer in layers])


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


def update(state: State, m: Vector, layers: Sequence[slice], s: Settings, adaptive: bool) -> Update:
    """Lines 14 to 22, from the momentum m_t of all layers."""
    x, m_before, v_frozen, v, r, c_avg = (
        torch.from_numpy(a.copy()) for a in (state.x, state.m, state.v_frozen, state.v, state.r, state.c_avg)
    )
    paper = reference.LambState(x, 1, layers)
    paper.m, paper.v_frozen, paper.v, paper.r, paper.c_avg = m_before, v_frozen, v, r, c_avg
    paper.C = lambda c: c if c.ndim == 2 else torch.from_numpy(m)  # lines 6 to 13 are behind us
    bounds = {"r_min": s.r_min, "r_max": s.r_max, "r_threshold": s.r_threshold} if adaptive else FIXED
    reference.onebit_lamb(paper, x.new_zeros(1, len(x)), gamma=s.lr, beta1=s.beta1, beta2=s.beta2, eta=s.eps, **bounds)
    c = (paper.r * paper.c_avg).numpy()
    x = paper.x.numpy()
    for i, layer in enumerate(layers):
        x[layer] -= s.lr * c[i] * s.weight_decay * state.x[layer]
    v = paper.v.numpy() if adaptive else state.v
    return Update(x, v, paper.r.numpy(), c, count_clips(state, v, layers, s) if adaptive else Counter())


FIXED = {"r_min": 1.0, "r_max": 1.0, "r_threshold": 0.0}
"""With these c_t is c_avg."""


def count_clips(state: State, v: Vector, layers: Sequence[slice], s: Settings) -> Counter[str]:
    """How often lines 18 and 19 change something."""
    clipped: Counter[str] = Counter()
    for i, layer in enumerate(layers):
        largest = float(np.max(state.v_frozen[layer] / v[layer]))
        low, high = (1 - s.r_threshold) * state.r[i], (1 + s.r_threshold) * state.r[i]
        clip(clip(largest, low, high, clipped, "line 18"), s.r_min, s.r_max, clipped, "line 19")
    return clipped
