"""The optimizers beside ``fusedonebit.reference`` in float64, each in a run of its own from the same model.

Gradients depend on the model, so that nothing a step gets wrong is forgotten. Where a sign hung on rounding the runs
would part for good: these seeds have no such c. Every line of the reference, once it is changed, makes the runs part.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from observe import flat, observe, parameters, variances
from optimizers import by_name
from reference_runs import (
    ADAM,
    AS_PRINTED,
    ENDS,
    LAYERS,
    LAYOUT,
    LIVING,
    SHAPES,
    SHARES,
    SIZES,
    STEPS,
    WARMUP,
    WORKERS,
    Seen,
    follow_living,
    gradient,
    gradients,
    model,
)
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import MarsitSGD, OneBitAdam, OneBitLamb, ZeroOneAdam, reference
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.core import formats
from fusedonebit.optim.own_variance import EARLY, TOLD_EVERY, places
from fusedonebit.optim.policies import FixedRounds
from fusedonebit.triton_kernels.squares import random_signs

LIMIT = 5e-6


def gradient_in(name: str, x: Tensor, worker: int, t: int) -> Tensor:
    """The same; of "own" the first layer's nearly cancel out, and the last one's have no noise of the worker's own."""
    g = gradient(x, worker, t)
    if name == "own":
        g[LAYERS[0]] *= (-1) ** worker
        g[LAYERS[2]] = gradient(x, 0, t)[LAYERS[2]]
    return g


LAMB = {"betas": (0.9, 0.9), "beta3": 0.8, "eps": 1e-6, "c_min": 0.5, "c_max": 2.0}
LAMB |= {"r_min": 0.7, "r_max": 1.4, "r_threshold": 0.1}
LIVING_LAMB = {"betas": (0.9, 0.99), "beta3": 0.8, "eps": 1e-30, "c_min": 0.5, "c_max": 2.0}
OWN: dict[str, Any] = ADAM | {"weight_decay": 0.5, "scale_norm": "l2", "scale_scope": "global", "block_size": 128}
OWN_SHARES = places(LAYOUT)[0][list(LAYOUT.first_block[:-1])].tolist()
MARSIT = {"lr": 0.02, "global_ratio": 0.7, "full_precision_every": 5, "compensation_limit": None}
MAKE: dict[str, Callable[..., Any]] = {
    "adam, l1": by_name(OneBitAdam, lr=1e-2, bias_correction=False, **ADAM, **AS_PRINTED | {"scale_norm": "l1"}),
    "adam, l2": by_name(OneBitAdam, lr=1e-2, bias_correction=False, **ADAM, **AS_PRINTED),
    "living": by_name(OneBitAdam, lr=1e-2, bias_correction=False, variance="shared", **ADAM, **LIVING),
    "living lamb": by_name(OneBitLamb, lr=1e-2, bias_correction=False, variance="shared", **LIVING_LAMB, **LIVING),
    "lamb": by_name(OneBitLamb, lr=1e-2, variant="paper", eps_inside_sqrt=True, **LAMB, **AS_PRINTED),
    "own": by_name(ZeroOneAdam, lr=1e-2, sync_policy=FixedRounds(3), **OWN),
    "marsit": by_name(MarsitSGD, momentum=0.0, weight_decay=0.0, **MARSIT),
}


def look(optimizer: Any) -> dict[str, np.ndarray]:
    if isinstance(optimizer, ZeroOneAdam):
        params, states = parameters(optimizer), optimizer.state_dict()["state"]
        return {
            "x": flat(params),
            "m": flat([optimizer.momentum(p) for p in params]),
            "v": flat(variances(optimizer)),
            "rho": flat([states[i]["rho"] for i in range(len(params))]),
            "worker_error": flat([optimizer.worker_error(p) for p in params]),
            "server_error": flat([optimizer.algorithm.exchange.reducer.of_rank.server.numbers]),
        }
    if isinstance(optimizer, MarsitSGD):
        return {"x": flat(parameters(optimizer)), "c": flat([optimizer.compensation(p) for p in parameters(optimizer)])}
    return observe(optimizer)


@pytest.fixture(scope="module", autouse=True)
def exact_squares() -> Iterator[None]:
    """Those that a worker keeps of its own gradients in float32, as the specification has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_SQUARES", formats.Format(torch.float32))
        yield


@cache
def train(name: str) -> list[list[dict[str, np.ndarray]]]:
    """Of each worker what its optimizer has after each step."""

    def work(rank: int, transport: Transport) -> list[dict[str, np.ndarray]]:
        params = [Parameter(part.view(shape)) for part, shape in zip(model().split(SIZES), SHAPES, strict=True)]
        optimizer, seen = MAKE[name](params, process_group=transport), []
        for t in range(STEPS):
            g = gradient_in(name, torch.cat([p.detach().flatten() for p in params]), rank, t)
            for p, part in zip(params, g.split(SIZES), strict=True):
                p.grad = part.view(p.shape)
            optimizer.step()
            seen.append(look(optimizer))
        return seen

    return SimulatedGroup(WORKERS).run(work)


def seen_in(name: str, t: int) -> Seen:
    """Of step ``t``, by the reference's names."""
    ranks = [of_rank[t] for of_rank in train(name)]
    own = ["worker_error", "c"]  # "c" of Marsit: its compensation
    own += ["x", "m", "v"] if name == "own" else []
    for of_rank in ranks[1:] if "x" not in own else []:
        np.testing.assert_array_equal(of_rank["x"], ranks[0]["x"])
    seen = {key: torch.from_numpy(value).double() for key, value in ranks[0].items() if value.dtype == np.float32}
    seen |= {key: torch.stack([torch.from_numpy(r[key]).double() for r in ranks]) for key in own if key in seen}
    if "layer" in seen:
        seen["c"] = seen["layer"].view(-1, 3)[:, 2]
        seen["layer"] = seen["layer"].view(-1, 3)[:, :2].T
    if "server_error" in seen:
        seen["server_error"] = torch.cat([torch.from_numpy(r["server_error"]).double() for r in ranks])
    return seen


# ---------------------------------------------------------------- the reference


def follow_adam(paper: ModuleType, name: str) -> Iterator[Seen]:
    s = paper.State(model().double(), WORKERS)
    s.C, s.servers = partial(paper.compress, p=int(name[-1])), WORKERS
    beta1, beta2 = ADAM["betas"]
    for t in range(STEPS):
        g = gradients(s.x, t)
        if t < WARMUP:
            paper.adam(s, g, gamma=1e-2, beta1=beta1, beta2=beta2, eta=1e-8)
            yield {"x": s.x, "m": s.m, "v": s.v}
        else:
            paper.onebit_adam(s, g, gamma=1e-2, beta1=beta1, eta=1e-8)
            yield {"x": s.x, "m": s.m, "v": s.v, "worker_error": s.worker_error, "server_error": s.server_error}


def follow_lamb(paper: ModuleType, name: str) -> Iterator[Seen]:
    s = paper.LambState(model().double(), WORKERS, LAYERS)
    s.C, s.servers = partial(paper.compress, p=2), WORKERS
    options = {"gamma": 1e-2, "eta": LAMB["eps"], **dict(zip(("beta1", "beta2"), LAMB["betas"], strict=True))}
    for t in range(STEPS):
        g = gradients(s.x, t)
        if t < WARMUP:
            paper.lamb(s, g, **options, **{key: LAMB[key] for key in ("beta3", "c_min", "c_max")})
            yield {"x": s.x, "m": s.m, "v": s.v, "layer": torch.stack([s.c_avg, s.r])}
        else:
            if t == WARMUP:
                paper.freeze(s)
            paper.onebit_lamb(s, g, **options, **{key: LAMB[key] for key in ("r_min", "r_max", "r_threshold")})
            errors = {"worker_error": s.worker_error / s.scale, "server_error": s.server_error / s.scale}
            layer = torch.stack([s.c_avg, s.r])
            yield {"x": s.x, "m": s.m, "v": s.v_frozen, "exp_avg_sq_fresh": s.v, "layer": layer} | errors


def follow_living_lamb(paper: ModuleType, name: str) -> Iterator[Seen]:
    s = paper.LivingLambState(model().double(), WORKERS, LAYERS)
    s.C, s.servers = partial(paper.compress, p=2), WORKERS
    (beta1, beta2), last, eta = LIVING_LAMB["betas"], WARMUP, LIVING_LAMB["eps"]
    options = {"gamma": 1e-2, "beta1": beta1, "beta2": beta2, "eta": eta}
    options |= {key: LIVING_LAMB[key] for key in ("beta3", "c_min", "c_max")}
    for t in range(STEPS):
        g = gradients(s.x, t)
        if t < WARMUP:
            paper.lamb(s, g, **options)
            yield {"x": s.x, "m": s.m, "v": s.v}
            continue
        if t == WARMUP:
            c_range = LIVING_LAMB["c_min"], LIVING_LAMB["c_max"]
            paper.live_lamb(s, math.inf, beta2=beta2, eta=eta, floor=0.05, c_range=c_range)
        paper.living_lamb(s, g, **options)
        done, since = t + 1 - WARMUP, t + 1 - last
        if since >= max(1, done // 8):
            r = random_signs(torch.tensor(t), 0, (1, ENDS[-1]))[0].double()
            paper.renew(s, g, r, since, SHARES, beta2=beta2, eta=eta, floor=0.05, block=128)
            last = t + 1
        unit = (s.v.sqrt() + eta) / torch.cat([s.c[k].expand(size) for k, size in enumerate(SIZES)])
        errors = {"worker_error": s.worker_error * unit, "server_error": s.server_error}
        yield {"x": s.x, "m": s.m * unit, "v": s.v, "c": s.c, "update_squares": s.u2} | errors


def follow_marsit(paper: ModuleType, name: str) -> Iterator[Seen]:
    """With the optimizer's own draws: where workers differ, the sign is the one that it has drawn."""
    x, c, before = model().double(), torch.zeros(WORKERS, ENDS[-1]).double(), model().double()
    for t in range(STEPS):
        after = seen_in(name, t)["x"]
        u = (after > before).double().expand(WORKERS, -1)  # 0 where the drawn sign is +1
        g, before = gradients(x, t), after
        x, c = paper.marsit_sgd(x, c, g, u, t=t, K=5, eta_l=0.02, eta_s=0.7 * 0.02)
        yield {"x": x, "c": c}


def follow_own(paper: ModuleType, name: str) -> Iterator[Seen]:
    s = paper.OwnState(model().double(), WORKERS, LAYERS)
    s.C, s.servers = partial(paper.compress, p=2), WORKERS
    beta1, beta2 = OWN["betas"]
    for t in range(STEPS):
        g = torch.stack([gradient_in(name, x.float(), worker, t) for worker, x in enumerate(s.x_i)]).double()
        paper.own_adam(s, g, gamma=1e-2, decay=OWN["weight_decay"], beta1=beta1, beta2=beta2, eta=1e-8)
        if t % 3 == 2:
            paper.synchronise(s)
            if t - 2 < EARLY or (t + 1) // TOLD_EVERY > (t - 2) // TOLD_EVERY:
                r = random_signs(torch.tensor(t), 0, (1, ENDS[-1]))[0].double()
                paper.follow(s, g, r, OWN_SHARES, beta2=beta2)
        errors = {"worker_error": s.worker_error, "server_error": s.server_error}
        yield {"x": s.x_i, "m": s.m, "v": s.v, "rho": s.rho.clone()} | errors


FOLLOW = {"own": follow_own, "adam, l1": follow_adam, "adam, l2": follow_adam, "living": follow_living}
FOLLOW |= {"living lamb": follow_living_lamb, "lamb": follow_lamb, "marsit": follow_marsit}


def deviations(paper: ModuleType, name: str) -> dict[str, float]:
    """The largest of each kind in all steps, relative to the largest element (or momentum) of its layer."""
    worst: dict[str, float] = {}
    for t, told in enumerate(FOLLOW[name](paper, name)):
        seen = seen_in(name, t)
        for key, value in told.items():
            size = told["m"] if key.endswith("_error") else value
            for where in [...] if value.shape[-1] == len(LAYERS) else [(..., layer) for layer in LAYERS]:
                off = float((seen[key][where] - value[where]).abs().max().nan_to_num(torch.inf))
                largest = max(float(value[where].abs().max()), float(size[where].abs().max()))
                worst[key] = max(worst.get(key, 0.0), off / max(largest, 1e-30))
    return worst


@pytest.mark.parametrize("name", FOLLOW)
def test_the_optimizer_is_the_paper_in_every_step_of_a_run(name):
    worst = deviations(reference, name)
    for key, value in worst.items():
        print(f"{name}: {key}: {value:.1e} (limit {LIMIT})")
    assert max(worst.values()) <= LIMIT


def mutant(function: str, old: str, new: str) -> ModuleType:
    """The reference with one line of one function changed."""
    text, body = inspect.getsource(reference), inspect.getsource(getattr(reference, function))
    assert body.count(old) == 1, f"{old!r} is not once in {function}"
    module = ModuleType("mutant")
    exec(compile(text.replace(body, body.replace(old, new)), "mutant", "exec"), module.__dict__)
    return module


EXCHANGE = [
    ("line 6", "exchange", "beta1 * m + (1 - beta1) * g", "beta1 * m + g"),
    ("line 7, sign", "exchange", "m_i + s.worker_error)", "m_i - s.worker_error)"),
    ("line 7, error", "exchange", "m_i + s.worker_error - m_hat", "m_i - m_hat"),
    ("line 10, average", "exchange", "m_hat.mean(0)", "m_hat.sum(0)"),
    ("line 10, sign", "exchange", "+ s.server_error", "- s.server_error"),
    ("line 10, error", "exchange", "average - m_bar", "m_bar - average"),
    ("servers", "exchange", "tensor_split(s.servers)", "tensor_split(1)"),
    ("C_omega, sign", "compress", "torch.where(c >= 0, 1.0, -1.0)", "torch.where(c >= 0, -1.0, 1.0)"),
    ("C_omega, scale", "compress", "norm(c, p, -1", "norm(c, 3 - p, -1"),
]
PROJECTED = [
    ("signs", "projected", "(r * g)[:, l]", "g[:, l]"),
    ("the workers' mean", "projected", "sum(2).mean(0)", "sum(2)[0]"),
    ("its squares", "projected", "of_layer.square().sum()", "of_layer.abs().sum()"),
]
MUTANTS = {
    "adam, l2": [
        *EXCHANGE,
        ("line 2, mean", "adam", "g.mean(0)", "g.sum(0)"),
        ("line 2, m", "adam", "(1 - beta1) * g", "(1 - beta2) * g"),
        ("line 2, v", "adam", "g**2", "g.abs()"),
        ("line 2, x", "adam", "s.x - gamma", "s.x + gamma"),
        ("line 13", "onebit_adam", "s.v.sqrt()", "s.v"),
        ("line 13, sign", "onebit_adam", "s.x - gamma", "s.x + gamma"),
    ],
    "living": [
        *EXCHANGE,
        ("a worker's own", "living_adam", "g**2", "g.mean(0) ** 2"),
        ("the update", "living_adam", "g / (s.v.sqrt() + eta)", "g / s.v.sqrt().mean()"),
        ("from the warm-up's", "live", "s.s[:] = s.v", "s.s[:] = s.v.mean()"),
        ("at its level", "live", "s.v[l].sum()", "s.v[l].mean()"),
        ("in its unit", "live", "s.m / (s.v", "s.m / (s.level.mean() + s.v"),
        ("not below a share", "floored", "floor * mean", "0.0"),
        *PROJECTED,
        ("the level's memory", "renew", "b = beta2**since", "b = beta2"),
        ("the mean's shape", "renew", "logarithm(s.s).mean(0)", "logarithm(s.s)[0]"),
        ("its level", "renew", "s.level[k] / s.weight / mean[l].sum()", "s.level[k] / s.level[k]"),
        ("the next unit", "renew", "(s.v.sqrt() + eta) / (v.sqrt() + eta)", "1.0"),
        ("of the momentum", "renew", "unit * s.m,", "s.m,"),
        ("of workers' errors", "renew", "unit * s.worker_error", "s.worker_error"),
        ("of servers' errors", "renew", "unit * s.server_error", "s.server_error"),
        ("eight steps", "logarithm", "(16 * mantissa + 0.5).floor() / 16", "mantissa"),
    ],
    "living lamb": [
        *EXCHANGE,
        ("in units of the step", "live_lamb", "s.c[k] * s.m[l]", "s.m[l]"),
        ("from the last norm", "live_lamb", "norm(s.x[l]) / s.c[k]) ** 2", "norm(s.x[l])) ** 2"),
        ("where c is clipped", "live_lamb", "norm(u[l]) if s.c[k] in c_range else ", ""),
        ("a worker's own", "living_lamb", "g**2", "g.mean(0) ** 2"),
        ("times c", "living_lamb", "c * g /", "g /"),
        ("c of each layer", "living_lamb", "s.c[k].expand", "s.c[0].expand"),
        ("without noise", "living_lamb", "share * norm", "norm"),
        ("in its unit", "living_lamb", "norm(s.m[l]) / s.c[k]", "norm(s.m[l])"),
        ("held back", "living_lamb", "(most / s.c[k]).clip(max=1)", "1"),
        ("not pushed", "living_lamb", ".clip(max=1)", ""),
        ("sign", "living_lamb", "s.x[l] - gamma", "s.x[l] + gamma"),
        ("its average", "living_lamb", "beta3 * s.u2[k] + (1 - beta3) * u**2", "u**2"),
        ("at least", "living_lamb", "s.u2[k].sqrt()).clip(c_min, c_max)", "s.u2[k].sqrt()).clip(0, c_max)"),
        ("at most", "living_lamb", "s.u2[k].sqrt()).clip(c_min, c_max)", "s.u2[k].sqrt()).clip(c_min)"),
    ],
    "own": [
        *(change for change in EXCHANGE if change[0] != "line 6"),
        *PROJECTED,
        ("a worker's own m", "own_adam", "(1 - beta1) * g", "(1 - beta1) * g.mean(0)"),
        ("m", "own_adam", "beta1 * s.m +", "beta2 * s.m +"),
        ("a worker's own v", "own_adam", "g**2", "g.mean(0) ** 2"),
        ("v", "own_adam", "beta2 * s.v +", "beta1 * s.v +"),
        ("rho of each layer", "own_adam", "s.rho[k]", "s.rho[0]"),
        ("correction of m", "own_adam", "(1 - beta1**s.t)", "1"),
        ("correction of v", "own_adam", "(1 - beta2**s.t)", "1"),
        ("at its level", "own_adam", "rho * s.v /", "s.v /"),
        ("x", "own_adam", "s.x_i - gamma * u", "s.x_i + gamma * u"),
        ("decay", "own_adam", "(1 - gamma * decay) * s.x_i", "s.x_i"),
        ("is owed", "own_adam", "s.worker_error + gamma * u", "s.worker_error + u"),
        ("and decays", "own_adam", "(1 - gamma * decay) * s.worker_error", "s.worker_error"),
        ("decay of a round", "own_adam", "(1 - gamma * decay) * s.left", "s.left"),
        ("from where all were", "synchronise", "s.left * s.x -", "s.left * s.x_i[0] -"),
        ("sign", "synchronise", "s.x - exchange", "s.x + exchange"),
        ("the next round", "synchronise", "s.x_i, s.left = s.x.repeat(len(s.x_i), 1), 1.0", "s.left = 1.0"),
        ("its decay", "synchronise", ", s.left = s.x.repeat(len(s.x_i), 1), 1.0", " = s.x.repeat(len(s.x_i), 1)"),
        ("the level's memory", "follow", "(s.t - s.last)", "1"),
        ("since when", "follow", "b, s.last = beta2 ** (s.t - s.last), s.t", "b = beta2 ** (s.t - s.last)"),
        ("its weights", "follow", "s.level / s.weight", "s.level"),
        ("the mean of v", "follow", "s.v[:, l].mean(0)", "s.v[0, l]"),
        ("its correction", "follow", "(1 - beta2**s.t)", "1"),
        ("at least", "follow", "clip(1 / len(g), 1)", "clip(0, 1)"),
        ("at most", "follow", "clip(1 / len(g), 1)", "clip(1 / len(g))"),
    ],
    "lamb": [
        *EXCHANGE,
        ("line 1", "LambState", "x.new_ones(len(layers))", "x.new_zeros(len(layers))"),
        ("line 2, m", "lamb", "beta1 * s.m[l] + (1 - beta1) * g[l]", "beta1 * s.m[l] + g[l]"),
        ("line 2, v", "lamb", "g[l] ** 2", "g[l]"),
        ("line 2, u", "lamb", "(s.v[l] + eta).sqrt()", "(s.v[l].sqrt() + eta)"),
        ("line 2, c", "lamb", "norm(s.x[l]) / norm(u)", "norm(u) / norm(s.x[l])"),
        ("line 2, c_min", "lamb", "clip(c_min, c_max)", "clip(0, c_max)"),
        ("line 2, c_max", "lamb", "clip(c_min, c_max)", "clip(c_min)"),
        ("line 2, x", "lamb", "gamma * s.c[k] * u", "gamma * u"),
        ("line 2, c_avg", "lamb", "beta3 * s.c_avg[k] + (1 - beta3) * s.c[k]", "s.c[k]"),
        ("line 3", "freeze", "s.v.clone()", "s.v"),
        ("section 4.3", "freeze", "size.mean() / size[k]", "1.0"),
        ("section 4.3, back", "onebit_lamb", "/ s.scale ", " "),
        ("line 15", "onebit_lamb", "s.m[l] - beta1 * m_before[l]", "s.m[l]"),
        ("line 15, m_{t-1}", "onebit_lamb", "m_before[l]", "s.m[l]"),
        ("line 16", "onebit_lamb", "g_l**2", "g_l"),
        ("line 17", "onebit_lamb", "s.v_frozen[l] / s.v[l]", "s.v[l] / s.v_frozen[l]"),
        ("line 17, norm", "onebit_lamb", "inf)", "2)"),
        ("line 18, lower", "onebit_lamb", "(1 - r_threshold) * s.r[k]", "0 * s.r[k]"),
        ("line 18, upper", "onebit_lamb", "(1 + r_threshold) * s.r[k]", "9 * s.r[k]"),
        ("line 19, lower", "onebit_lamb", "clip(r_min, r_max)", "clip(0, r_max)"),
        ("line 19, upper", "onebit_lamb", "clip(r_min, r_max)", "clip(r_min)"),
        ("line 20", "onebit_lamb", "s.r[k] * s.c_avg[k]", "s.c_avg[k]"),
        ("line 21", "onebit_lamb", "s.v_frozen[l] + eta", "s.v[l] + eta"),
        ("line 21, sign", "onebit_lamb", "s.x[l] - gamma", "s.x[l] + gamma"),
    ],
    "marsit": [
        ("line 1", "marsit", "g + c", "g"),
        ("line 3", "marsit", "t % K", "(t + 1) % K"),
        ("line 5", "marsit", "g[m, part] >= 0", "g[m, part] < 0"),
        ("line 5, first", "marsit", "g[start, part] >= 0", "g[start, part] < 0"),
        ("line 6", "marsit", "v = merge(", "merge("),
        ("line 7", "marsit", "(start + i) % W", "start"),
        ("line 9", "marsit", "eta_s * torch.cat", "torch.cat"),
        ("line 10", "marsit", "c = g - g_t", "c = g_t - g"),
        ("line 11", "marsit", "g.mean(0)", "g.sum(0)"),
        ("line 12", "marsit", "torch.zeros_like(g)", "g - g_t"),
        ("equation (2), and", "merge", "(v & v_star) |", ""),
        ("equation (2), or", "merge", "(v & v_star)", "(v | v_star)"),
        ("equation (2), xor", "merge", "(v ^ v_star)", "v_star"),
        ("equation (2), transient", "merge", "& transient", ""),
        ("Algorithm 2, line 5", "marsit_sgd", "eta_l * g", "g"),
        ("Algorithm 2, line 6", "marsit_sgd", "x - g_t", "x + g_t"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change"),
    [pytest.param(name, change[1:], id=f"{name}: {change[0]}") for name, found in MUTANTS.items() for change in found],
)
def test_each_line_that_is_changed_is_noticed(name, change):
    assert not max(deviations(mutant(*change), name).values()) <= 100 * LIMIT


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_each_worker_decides_as_often_in_each_part_of_the_ring(workers):
    """Equation (2): the expected sign is the mean of all workers' signs."""
    some = torch.randn(workers, 60, generator=torch.Generator().manual_seed(1)).sign().double()
    each = some.repeat(1, workers * 2000)
    u = torch.rand(each.shape, generator=torch.Generator().manual_seed(2)).double()

    def deviation(paper: ModuleType) -> float:
        """In standard errors, the largest of a part and a combination of signs."""
        g_t, _ = paper.marsit(each, torch.zeros_like(each), u, t=1, K=2, eta_s=1.0)
        off = g_t.view(workers, 2000, 60).mean(1) - some.mean(0)
        return float((off / ((1 - some.mean(0) ** 2) / 2000).sqrt().clip(1e-30)).abs().max())

    assert deviation(reference) <= 4.0
    if workers > 2:
        assert deviation(mutant("merge", "1 / m, (m - 1) / m", "1 / 2, 1 / 2")) > 8.0
