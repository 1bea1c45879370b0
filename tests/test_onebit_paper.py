"""1-bit Adam and 1-bit LAMB against Algorithm 1 in float64, each compressed step from the optimizer's own state.

See ``teacher_forced`` for why, and for what may differ. LAMB's warm-up, equation (2), compresses nothing, so that there
the two run on their own from zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference_adam
import reference_lamb
import torch
from observe import flat, observe, parameters, per_tensor, served, whole_server_error
from optimizers import PAPER, objects
from ranks import simulate
from teacher_forced import Deviation, LambDeviation

from fusedonebit import OneBitAdam, OneBitLamb
from fusedonebit.checkpoint import header_of
from fusedonebit.comm import Transport
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.sharding import local

Seen = dict[str, np.ndarray]


def noisy(shape: tuple[int, ...], rank: int, step: int, i: int) -> torch.Tensor:
    """Noise of each rank around a mean that drifts slowly."""
    drift = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * i + step // 9))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(7 + 1000 * i + 31 * step + 100_003 * rank))
    return drift + noise


def record_steps(
    rank: int,
    optimizer: DistributedOptimizer,
    warm_up: int,
    steps: int,
    gradient: Callable[[int, int, int], torch.Tensor],
    look: Callable[[Any], Seen],
) -> dict[str, Any]:
    """Trains; returns all states, the last of the warm-up and each after it, gradients, and where it began."""
    params, states, gradients = parameters(optimizer), [], []
    start = flat(params)
    for step in range(warm_up + steps):
        for i, p in enumerate(params):
            p.grad = gradient(rank, step, i)
        gradients.append(flat([p.grad for p in params]))
        optimizer.step()
        if step >= warm_up - 1:
            states.append(look(optimizer))
    assert optimizer.phase == "compression"
    return {"start": start, "states": states, "gradients": gradients, "served": served(optimizer)}


def unpacked(states: list[dict], name: str, sizes: list[int], block_size: int) -> np.ndarray:
    """Bits and the scale of each block, as signed magnitudes."""
    found = []
    for state, size in zip(states, sizes, strict=True):
        bits = np.unpackbits(state[f"{name}_bits"].numpy(), bitorder="little")[:size]
        found.append(np.where(bits, 1, -1) * np.repeat(state[f"{name}_scale"].numpy(), block_size)[:size])
    return np.concatenate(found)


def before_step(runs: list[dict], t: int) -> tuple[list[Seen], list[np.ndarray], np.ndarray]:
    """Of all ranks, in float64, before compressed step ``t``: states, workers' residuals, and the servers'."""
    here = [{k: a.astype(np.float64) for k, a in run["states"][t].items()} for run in runs]
    parts = [run["served"] for run in runs]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(here[0]["x"].size))
    return here, [state["worker_error"] for state in here], whole_server_error(here, parts)


def all_have_moved(runs: list[dict]) -> bool:
    return bool((runs[0]["states"][-1]["x"] != runs[0]["states"][0]["x"]).all())


SHAPES_AND_MAGNITUDES = [((40, 30), 1.0), ((777,), 1e-4), ((1,), 1e2), ((3, 5, 7), 1e3), ((1030,), 1e-2)]
SHAPES_AND_MAGNITUDES += [((129, 9), 10.0), ((2048,), 1e-6)]
FREEZE_STEP, STEPS, PRECONDITIONED_STEPS = 6, 50, 20
HYPER = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.5}


def denominators(v: np.ndarray) -> np.ndarray:
    return np.sqrt(v / (1 - HYPER["betas"][1] ** FREEZE_STEP)) + HYPER["eps"]


def observe_travelling(optimizer: OneBitAdam) -> Seen:
    """All of the state, residuals and the last momentum in the unit in which they travel."""
    saved, params, state = optimizer.state_dict(), parameters(optimizer), observe(optimizer)
    states = per_tensor(optimizer, saved)
    if optimizer.phase == "warmup":
        return state | {"travelled": state["m"]}
    sizes = [p.numel() for p in params]
    state["travelled"] = unpacked(states, "exp_avg", sizes, header_of(saved)["block_size"])
    in_travel = {key: flat([s[key] for s in states]) for key in ("worker_error", "server_error")}
    # What users see is in units of the momentum.
    denom = denominators(state["v"].astype(np.float64)) if optimizer.frame.options.numerics.precondition else 1.0
    np.testing.assert_allclose(state["m"], state["travelled"] * denom, rtol=5e-7)
    np.testing.assert_allclose(state["worker_error"], in_travel["worker_error"] * denom, rtol=5e-7)
    return state | in_travel


def record_adam(rank: int, transport: Transport, norm: str, precondition: bool, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * magnitude) for shape, magnitude in SHAPES_AND_MAGNITUDES]
    options = PAPER | {"scale_norm": norm, "precondition": precondition, "variance_floor": 0.01 * precondition}
    optimizer = OneBitAdam(params, process_group=transport, **objects(freeze_step=FREEZE_STEP, **HYPER, **options))

    def gradient(rank: int, step: int, i: int) -> torch.Tensor:
        shape, magnitude = SHAPES_AND_MAGNITUDES[i]
        return noisy(shape, rank, step, i) * magnitude

    return record_steps(rank, optimizer, FREEZE_STEP, steps, gradient, observe_travelling)


def adam_state(runs: list[dict], t: int) -> reference_adam.State:
    here, worker_error, server_error = before_step(runs, t)
    return reference_adam.State(here[0]["x"], here[0]["m"], here[0]["v"], worker_error, server_error)


def check_frozen(v: np.ndarray, frozen: np.ndarray, precondition: bool) -> None:
    """The warm-up's v, raised to 1/100 of its tensor's mean and where 1/denom is above 1000 times its median."""
    ends = np.cumsum([int(np.prod(shape)) for shape, _ in SHAPES_AND_MAGNITUDES])
    share = np.concatenate([np.full(part.size, 0.01 * part.mean()) for part in np.split(v, ends[:-1])])
    least = np.square(denominators(np.median(v)) / 1000 - HYPER["eps"]) * (1 - HYPER["betas"][1] ** FREEZE_STEP)
    expected = np.maximum(v, np.maximum(least, share)) if precondition else v
    for raised in (least > np.maximum(v, share), share > np.maximum(v, least)):
        assert raised.any(), "both must have something to do"
    np.testing.assert_array_equal(frozen[expected == v], v[expected == v])
    np.testing.assert_allclose(frozen, expected, rtol=1 / 64)  # the median is that of a histogram


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("norm", "precondition"), [("l1", False), ("l2", False), ("l1", True), ("contractive", True)])
def test_every_compressed_step_is_algorithm_1(norm, precondition):
    steps = PRECONDITIONED_STEPS if precondition else STEPS
    runs = simulate(record_adam, 4, norm, precondition, steps)
    parts, deviation = [run["served"] for run in runs], Deviation()
    beta1, beta2 = HYPER["betas"]
    hyper = {"beta1": beta1, "beta2": beta2} | {key: HYPER[key] for key in ("lr", "eps", "weight_decay")}
    for t in range(steps):
        before, after = adam_state(runs, t), adam_state(runs, t + 1)
        travelled = runs[0]["states"][t + 1]["travelled"].astype(np.float64)
        unit = 1 / denominators(after.v) if precondition else np.ones(after.v.size)
        if t == 0:
            check_frozen(before.v, after.v, precondition)
            before = replace(before, v=after.v)
        else:
            # As exact as it is known to the optimizer, which has it in the unit in which it travels.
            before = replace(before, m=runs[0]["states"][t]["travelled"].astype(np.float64) / unit)
        gradients = [run["gradients"][FREEZE_STEP + t].astype(np.float64) for run in runs]
        how = {"step": FREEZE_STEP + t + 1, "frozen_at": FREEZE_STEP, "norm": norm, "precondition": precondition}
        spec = reference_adam.compressed_step(before, gradients, parts, **hyper, **how)
        np.testing.assert_array_equal(before.v, after.v)
        terms = [unit * (np.abs(before.m) + np.abs(g)) for g in gradients]
        agreed = deviation.compare_exchange(before, after, terms, parts, spec, travelled)
        deviation.compare_parameters(before, after, spec, agreed)
    deviation.check(norm + ", preconditioned" * precondition)
    assert all_have_moved(runs)


# ---------------------------------------------------------------- 1-bit LAMB

# Shape, magnitude of the gradients, magnitude of the parameters, growth of the gradients per step
# from GROWTH_FROM on.
LAYERS = [
    ((40, 30), 1.0, 1.0, 1.12),
    ((777,), 1e-4, 1e-2, 0.9),
    ((1,), 1e2, 3.0, 1.0),
    ((3, 5, 7), 1e3, 1e2, 1.12),
    ((1030,), 1e-2, 0.0, 0.9),  # c = 1 in the first step, for the norm of x is zero
    ((129, 9), 10.0, 1e-3, 1.0),
    ((2048,), 1e-6, 50.0, 1.12),
    ((2,), 1e-5, 0.1, 0.9),
    ((17,), 30.0, 1.0, 1.0),
    ((31, 33), 0.1, 0.02, 0.9),
    ((5, 1), 1e-3, 1e3, 1.12),
    ((512,), 300.0, 0.5, 1.0),
]
SIZES = [int(np.prod(layer[0])) for layer in LAYERS]
ENDS = np.cumsum(SIZES)
WHERE = [slice(int(end) - n, int(end)) for end, n in zip(ENDS, SIZES, strict=True)]
WARM_UP, GROWTH_FROM = 8, 22
OPTIONS = {
    "lr": 1e-2,
    "betas": (0.9, 0.8),
    "beta3": 0.8,
    "eps": 1e-20,
    "weight_decay": 0.05,
    "c_min": 0.01,
    "c_max": 5.0,
    "r_min": 0.5,
    "r_max": 3.0,
    "r_threshold": 0.1,
    "eps_inside_sqrt": True,
} | PAPER
# r starts at 1. Only where that lies outside the bounds does the order of lines 18 and 19 make a
# difference: line 18 keeps r near 1, then line 19 sets the bound.
BOUNDS = {"l1": {"r_min": 1.5, "r_max": 4.0}, "l2": {}}


def settings(options: dict) -> reference_lamb.Settings:
    options = {k: v for k, v in options.items() if k not in {"adaptive", "eps_inside_sqrt", *PAPER}}
    beta1, beta2 = options.pop("betas")
    return reference_lamb.Settings(beta1=beta1, beta2=beta2, **options)


def observe_lamb(optimizer: OneBitLamb) -> Seen:
    """All of the state, m in its own unit and as it travelled; residuals in the unit in which it travels."""
    saved, params, seen = optimizer.state_dict(), parameters(optimizer), observe(optimizer)
    header, states = header_of(saved), per_tensor(optimizer, saved)
    state = {key: seen[key] for key in ("x", "m", "v", "worker_error")}
    state["layers"] = torch.stack([s["layer"] for s in states], dim=1).numpy()
    if optimizer.phase == "warmup":
        return state | {"fresh": state["v"], "server_error": np.zeros(0)}

    sizes = [p.numel() for p in params]
    state["travelled"] = unpacked(states, "exp_avg", sizes, header["block_size"])
    if "exp_avg_sq_fresh" in states[0]:
        assert header["started"]
        state["fresh"] = flat([s["exp_avg_sq_fresh"] for s in states])
        # After a step the last momentum is this step's: the next step's m_{t-1}.
        last = unpacked(states, "exp_avg_last", sizes, header["block_size"])
        np.testing.assert_array_equal(last, state["travelled"])
    else:
        state["fresh"] = state["v"]
    state["unit"] = flat([s["unit"] for s in states])
    # What users see is in units of the momentum, what is saved in those in which it travels.
    unit = np.repeat(state["unit"], sizes)
    np.testing.assert_allclose(state["m"] * unit, state["travelled"], rtol=3e-7)
    saved_error = flat([s["worker_error"] for s in states])
    np.testing.assert_allclose(state["worker_error"] * unit, saved_error, rtol=3e-7)
    return state | {"worker_error": saved_error, "server_error": flat([s["server_error"] for s in states])}


def record_lamb(rank: int, transport: Transport, layers: int, steps: int, options: dict) -> dict[str, Any]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * magnitude) for shape, _, magnitude, _ in LAYERS[:layers]]
    optimizer = OneBitLamb(params, process_group=transport, **objects(freeze_step=WARM_UP, **options))

    def gradient(rank: int, step: int, i: int) -> torch.Tensor:
        shape, magnitude, _, growth = LAYERS[i]
        return noisy(shape, rank, step, i) * magnitude * growth ** max(0, step - WARM_UP - GROWTH_FROM)

    return record_steps(rank, optimizer, WARM_UP, steps, gradient, observe_lamb)


def lamb_state(runs: list[dict], t: int) -> reference_lamb.State:
    here, worker_error, server_error = before_step(runs, t)
    c_avg, r, _ = here[0]["layers"]
    x, m, v, fresh = (here[0][k] for k in ("x", "m", "v", "fresh"))
    return reference_lamb.State(x, m, v, fresh, r, c_avg, worker_error, server_error)


def check_compressed_steps(name: str, runs: list[dict], steps: int, options: dict) -> Counter[str]:
    """Returns how often each clip of Algorithm 1 changed something, and how often none did."""
    parts = [run["served"] for run in runs]
    first = lamb_state(runs, 0)
    layers = WHERE[: len(first.r)]
    scales = reference_lamb.momentum_scales(first.m, layers)
    assert scales.max() > 1e6 * scales.min()
    unit = np.repeat(scales, SIZES[: len(layers)])
    deviation, clipped = LambDeviation(), Counter()
    for t in range(steps):
        before, after, seen = lamb_state(runs, t), lamb_state(runs, t + 1), runs[0]["states"][t + 1]
        gradients = [run["gradients"][WARM_UP + t].astype(np.float64) for run in runs]
        how = {"norm": options["scale_norm"], "adaptive": options["adaptive"]}
        spec = reference_lamb.compressed_step(before, gradients, parts, layers, unit, settings(options), **how)
        clipped.update(spec.clipped)
        largest = [np.max(before.v_frozen[layer] / spec.v[layer]) for layer in layers]
        clipped["neither"] += int((spec.r == largest).sum())
        np.testing.assert_array_equal(before.v_frozen, after.v_frozen)
        np.testing.assert_array_equal(before.c_avg, after.c_avg)
        np.testing.assert_allclose(seen["unit"], scales, rtol=1e-6)
        terms = [unit * (np.abs(before.m) + np.abs(g)) for g in gradients]
        agreed = deviation.compare_exchange(before, after, terms, parts, spec, seen["travelled"].astype(np.float64))
        whole = np.repeat([agreed[layer].all() for layer in layers], SIZES[: len(layers)])
        deviation.compare_parameters(before, after, spec, agreed & whole)
        deviation.compare_layers(layers, after, seen["layers"][2].astype(np.float64), spec, agreed)
    deviation.check(name)
    assert all_have_moved(runs)
    return clipped


def check_warmup(name: str, runs: list[dict], options: dict) -> Counter[str]:
    """The warm-up from zero, as one run; returns how often each clip of equation (2) changed something."""
    zeros, per_layer = np.zeros(ENDS[-1]), np.zeros(len(WHERE))
    state = reference_lamb.WarmUp(runs[0]["start"].astype(np.float64), zeros, zeros, per_layer, per_layer)
    # The same moments of the gradients' magnitudes: the terms to which rounding is relative, for the
    # averaged gradient may be much smaller than the ranks' own.
    terms, path, clipped = state, np.zeros_like(state.x), Counter()
    for t in range(WARM_UP):
        gradients = [run["gradients"][t].astype(np.float64) for run in runs]
        x = state.x
        state = reference_lamb.warmup_step(state, np.mean(gradients, 0), WHERE, settings(options), clipped)
        path += np.abs(state.x - x)
        terms = reference_lamb.warmup_step(terms, np.mean(np.abs(gradients), 0), WHERE, settings(options), Counter())
    seen = {k: a.astype(np.float64) for k, a in runs[0]["states"][0].items()}
    np.testing.assert_array_equal(seen["layers"][1], 1.0)
    off = {
        "momentum, of its terms": np.abs(seen["m"] - state.m) / terms.m,
        "variance, of its terms": np.abs(seen["v"] - state.v) / terms.v,
        "parameters, of |x| + |steps|": np.abs(seen["x"] - state.x) / (np.abs(runs[0]["start"]) + path),
        "coefficients c, relative": np.abs(seen["layers"][2] / state.c - 1),
        "coefficients c_avg, relative": np.abs(seen["layers"][0] / state.c_avg - 1),
    }
    for what, values in off.items():
        print(f"{name}: warm-up: {what}: {values.max():.1e} (limit 1e-5)")
    for what, values in off.items():
        assert values.max() <= 1e-5, what
    return clipped


@pytest.mark.long(but=1)
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_every_step_is_equation_2_then_algorithm_1(norm):
    options = OPTIONS | BOUNDS[norm] | {"scale_norm": norm, "adaptive": True}
    runs = simulate(record_lamb, 4, len(LAYERS), STEPS, options)
    clipped = check_warmup(norm, runs, options) + check_compressed_steps(norm, runs, STEPS, options)
    print(f"{norm}: clips: {dict(clipped)}")
    for bound in ("c", "line 18", "line 19"):
        assert clipped[f"{bound} lower"] > 0
        assert clipped[f"{bound} upper"] > 0
    assert clipped["neither"] > 0


def test_frozen_coefficients_are_section_3_4s_basic_one_bit():
    options = OPTIONS | {"adaptive": False, "r_max": 4.0}  # no ratio is formed: its defaults
    runs = simulate(record_lamb, 2, 7, 10, options)
    check_compressed_steps("frozen", runs, 10, options)
    for state in runs[0]["states"][1:]:
        c_avg, r, c = state["layers"]
        np.testing.assert_array_equal(c, c_avg)
        np.testing.assert_array_equal(r, 1.0)


SILENT = 2


def train_with_silent_layer(rank: int, transport: Transport, kind: str) -> dict:
    """Trains with a layer that has no momentum at the freeze ("absent": without the layer)."""
    torch.manual_seed(0)
    magnitudes = [1.0, 1e-3, 10.0, 1e4]
    params = [torch.nn.Parameter(torch.randn(60 + 7 * i)) for i in range(4)]
    trained = [p for i, p in enumerate(params) if (i, kind) != (SILENT, "absent")]
    options = PAPER | {"dead_coordinates": "keep" if kind == "keep" else "mean"}
    optimizer = OneBitLamb(
        trained, lr=1e-2, betas=(0.5, 0.9), process_group=transport, **objects(freeze_step=2, **options)
    )
    finite, m, x = True, [], []
    for step in range(12):
        for i, p in enumerate(params):
            p.grad = magnitudes[i] * torch.randn(p.shape, generator=torch.Generator().manual_seed(7 * step + i + rank))
        if step < 2:
            # No gradient leaves neither m nor v; 1, then -1/2 leaves m = 1/4 - 1/4 = 0, but v > 0.
            params[SILENT].grad.fill_((1.0, -0.5)[step] if kind == "cancelled" else 0.0)
        optimizer.step()
        if step == 1:
            m, x = [optimizer.momentum(p).numpy() for p in trained], [p.detach().clone() for p in params]
        seen = [*trained, *(f(p) for p in trained for f in (optimizer.momentum, optimizer.worker_error))]
        finite &= all(bool(torch.isfinite(t).all()) for t in seen)
    states = optimizer.state_dict()["state"]
    tensors = [local(t) for state in states.values() for t in state.values() if isinstance(t, torch.Tensor)]
    finite &= all(bool(torch.isfinite(t).all()) for t in tensors)
    moved = [bool((p != before).any()) for p, before in zip(params, x, strict=True)]
    return {"finite": finite, "unit": flat([state["unit"] for state in states.values()]), "m": m, "moved": moved}


@pytest.mark.long(but=1)
@pytest.mark.parametrize("kind", ["mean", "keep", "cancelled"])
def test_a_layer_without_momentum_takes_no_part_in_the_scaling(kind):
    run, without = (simulate(train_with_silent_layer, 2, which)[0] for which in (kind, "absent"))
    assert run["finite"]
    assert without["finite"]
    # Without any v > 0 it is left out of the compression stage, unless the user keeps it.
    assert run["moved"] == [True, True, kind != "mean", True]
    assert (run["m"][SILENT] == 0).all()
    # Nothing says how large its gradients are, but for a variance that is not zero.
    assert (run["unit"][SILENT] == 1.0) == (kind != "cancelled")
    assert 1e-4 < run["unit"][SILENT] < 1e7
    np.testing.assert_allclose(np.delete(run["unit"], SILENT), without["unit"], rtol=1e-7)
    ends = np.cumsum([m.size for m in run["m"]])
    layers = [slice(int(end) - m.size, int(end)) for end, m in zip(ends, run["m"], strict=True)]
    fused = np.concatenate(run["m"]).astype(np.float64)
    expected = reference_lamb.momentum_scales(fused, layers)
    np.testing.assert_allclose(np.delete(run["unit"], SILENT), np.delete(expected, SILENT), rtol=1e-6)
    assert run["unit"].max() > 1e6 * run["unit"].min()
