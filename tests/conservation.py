"""Shares what tests of conservation and others set up."""

from __future__ import annotations

import numpy as np
import torch
from observe import flat, observe, parameters, served, variances, whole_server_error
from torch.nn import Parameter

from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.triton_kernels import Layer

WARMUP = 3

BETA2 = 0.99

SKIPPING = {"nan", "inf", "many nan", "broken", "too large"}

LOUD = {"loud": 1e12, "louder": 1.7e19, "too large": 1e25}
"""One element of the first tensor, beside whose size others are nothing; of 1e25 the square is infinite."""


def set_gradients(params: list[Parameter], rank: int, step: int, event: str) -> np.ndarray:
    """Sets this rank's gradients; returns what should count of them."""
    generator = torch.Generator().manual_seed(1 + rank + 10 * step)
    counted = []
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator) * 10.0 ** (i - 1) + 0.1
        if step < WARMUP + 2:
            g.view(-1)[1::11] = 0.0  # zeros for ternary compression, until these coordinates wake up
        keep = torch.ones(p.shape, dtype=torch.bool)
        if event in ("nan", "inf", "many nan"):
            keep.view(-1)[: 1 if event != "many nan" else None : 3] = i != 0
            g = torch.where(keep, g, float("-inf" if event == "inf" else "nan"))
        if event in ("zero", "large"):
            g *= 0.0 if event == "zero" else 1e6
        if event in LOUD and i == 0:
            g[7], keep[7] = LOUD[event], event != "too large"
        p.grad = None if event == "none" else g
        counted.append(torch.where(keep, g, 0.0) * (event not in ("none", "broken")))
    if event == "broken":
        params[-1].grad = params[-1].grad.to_sparse()
    return torch.cat([c.reshape(-1) for c in counted]).double().numpy()


def denominators(optimizer: DistributedOptimizer) -> np.ndarray:
    """What preconditioned momentum was divided by; of the frozen variance."""
    group = optimizer.param_groups[0]
    v = flat(variances(optimizer)).astype(float)
    corrected = optimizer.frame.options.shares_variance or not optimizer.frame.options.numerics.bias_correction
    correction = 1.0 if corrected else 1 - group["betas"][1] ** WARMUP
    return np.sqrt(v / correction) + group["eps"]


def unit(optimizer: DistributedOptimizer, layer: np.ndarray) -> np.ndarray:
    """What gradients count with besides, of each element: c of the step to come where LAMB's variance lives, else 1."""
    if not (layer.size and optimizer.frame.options.shares_variance):
        return np.ones(())
    return np.repeat(layer.reshape(-1, len(Layer))[:, Layer.COEFFICIENT], [p.numel() for p in parameters(optimizer)])


def look(optimizer: DistributedOptimizer) -> dict[str, np.ndarray]:
    """The state in units of the momentum, times c where residuals are in units of the step."""
    state = observe(optimizer)
    state["c"] = unit(optimizer, state["layer"])
    for key in ("m", "worker_error"):
        state[key] = state[key] * state["c"] if state[key].size else state[key]
    if optimizer.frame.options.numerics.precondition and optimizer.phase == "compression":
        state["server_error"] = state["server_error"] * denominators(optimizer)[served(optimizer)]
    return state


def imbalance(runs: list[dict], t: int, beta1: float) -> float:
    """How far the two sides of the equation are apart after step ``t``, relative to its largest terms."""
    parts = [run["served"] for run in runs]
    before, after = ([run["states"][k] for run in runs] for k in (t, t + 1))
    mean_before, mean_after = (np.mean([s["worker_error"].astype(float) for s in side], 0) for side in (before, after))
    gradients = [run["gradients"][t] * before[0]["c"] for run in runs]
    gradient = np.mean(gradients, 0)
    servers_before, servers_after = whole_server_error(before, parts), whole_server_error(after, parts)
    right = beta1 * before[0]["m"].astype(float) + (1 - beta1) * gradient + servers_before + mean_before
    left = after[0]["m"].astype(float) + servers_after + mean_after
    terms = [after[0]["m"], servers_before, servers_after, before[0]["m"]]
    terms += [s["worker_error"] for s in (*before, *after)] + gradients
    gap, size = np.abs(left - right), sum(np.abs(term.astype(float)) for term in terms)
    return float(np.divide(gap, size, out=np.where(gap > 0, np.inf, 0.0), where=size > 0).max())
