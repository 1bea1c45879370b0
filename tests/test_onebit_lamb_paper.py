"""1-bit LAMB against equation (2) and Algorithm 1 in float64, each compressed step from the optimizer's own state.

See ``teacher_forced`` for why, and for what may differ. The warm-up compresses nothing, so that there
the two run on their own from zero.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import reference_lamb
import torch
from observe import flat, observe, parameters, per_tensor, served, whole_server_error
from optimizers import PAPER, objects
from ranks import simulate
from teacher_forced import LambDeviation

from fusedonebit import OneBitLamb
from fusedonebit.checkpoint import header_of
from fusedonebit.comm import Transport
from fusedonebit.core.sharding import local

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
WARM_UP, STEPS, GROWTH_FROM = 8, 50, 22
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


def gradient(rank: int, step: int, i: int) -> torch.Tensor:
    """Noise of each rank around a mean that drifts slowly, of the layer's own magnitude at that step."""
    shape, magnitude, _, growth = LAYERS[i]
    drift = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * i + step // 9))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(7 + 1000 * i + 31 * step + 100_003 * rank))
    return (drift + noise) * magnitude * growth ** max(0, step - WARM_UP - GROWTH_FROM)


def observe_lamb(optimizer: OneBitLamb) -> dict[str, np.ndarray]:
    """All of the state, m in its own unit and as it travelled; residuals in the unit in which it travels."""
    saved, params, seen = optimizer.state_dict(), parameters(optimizer), observe(optimizer)
    header, states = header_of(saved), per_tensor(optimizer, saved)
    state = {key: seen[key] for key in ("x", "m", "v", "worker_error")}
    state["layers"] = torch.stack([states[i]["layer"] for i in range(len(params))], dim=1).numpy()
    if optimizer.phase == "warmup":
        return state | {"fresh": state["v"], "server_error": np.zeros(0)}

    def unpacked(name: str) -> np.ndarray:
        """Bits and the scale of each block, as signed magnitudes."""
        found = []
        for i, p in enumerate(params):
            bits = np.unpackbits(states[i][f"{name}_bits"].numpy(), bitorder="little")[: p.numel()]
            scale = np.repeat(states[i][f"{name}_scale"].numpy(), header["block_size"])
            found.append(np.where(bits, 1, -1) * scale[: p.numel()])
        return np.concatenate(found)

    state["travelled"] = unpacked("exp_avg")
    if "exp_avg_sq_fresh" in states[0]:
        assert header["started"]
        state["fresh"] = flat([states[i]["exp_avg_sq_fresh"] for i in range(len(params))])
        # After a step the last momentum is this step's: the next step's m_{t-1}.
        np.testing.assert_array_equal(unpacked("exp_avg_last"), state["travelled"])
    else:
        state["fresh"] = state["v"]
    state["unit"] = flat([states[i]["unit"] for i in range(len(params))])
    # What users see is in units of the momentum, what is saved in those in which it travels.
    unit = np.repeat(state["unit"], [p.numel() for p in params])
    np.testing.assert_allclose(state["m"] * unit, state["travelled"], rtol=3e-7)
    saved_error = flat([states[i]["worker_error"] for i in range(len(params))])
    np.testing.assert_allclose(state["worker_error"] * unit, saved_error, rtol=3e-7)
    server_error = flat([states[i]["server_error"] for i in range(len(params))])
    return state | {"worker_error": saved_error, "server_error": server_error}


def record_steps(rank: int, transport: Transport, layers: int, steps: int, options: dict) -> dict:
    """Trains; returns all states, before the first step, the last of the warm-up and each after it, and gradients."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * magnitude) for shape, _, magnitude, _ in LAYERS[:layers]]
    optimizer = OneBitLamb(params, process_group=transport, **objects(freeze_step=WARM_UP, **options))
    states, gradients, start = [], [], flat(params)
    for step in range(WARM_UP + steps):
        for i, p in enumerate(params):
            p.grad = gradient(rank, step, i)
        gradients.append(flat([p.grad for p in params]))
        optimizer.step()
        if step >= WARM_UP - 1:
            states.append(observe_lamb(optimizer))
    assert optimizer.phase == "compression"
    return {"start": start, "states": states, "gradients": gradients, "served": served(optimizer)}


def whole_state(runs: list[dict], t: int) -> reference_lamb.State:
    """The state of all ranks before compressed step ``t`` as Algorithm 1 knows it."""
    here = [{k: a.astype(np.float64) for k, a in run["states"][t].items()} for run in runs]
    server_error = whole_server_error(here, [run["served"] for run in runs])
    c_avg, r, _ = here[0]["layers"]
    x, m, v, fresh = (here[0][k] for k in ("x", "m", "v", "fresh"))
    return reference_lamb.State(x, m, v, fresh, r, c_avg, [state["worker_error"] for state in here], server_error)


def check_compressed_steps(name: str, runs: list[dict], steps: int, options: dict) -> Counter[str]:
    """Returns how often each clip of Algorithm 1 changed something, and how often none did."""
    parts = [run["served"] for run in runs]
    first = whole_state(runs, 0)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(first.x.size))
    layers = WHERE[: len(first.r)]
    scales = reference_lamb.momentum_scales(first.m, layers)
    assert scales.max() > 1e6 * scales.min()
    unit = np.repeat(scales, SIZES[: len(layers)])
    deviation, clipped = LambDeviation(), Counter()
    for t in range(steps):
        before, after, seen = whole_state(runs, t), whole_state(runs, t + 1), runs[0]["states"][t + 1]
        gradients = [run["gradients"][WARM_UP + t].astype(np.float64) for run in runs]
        spec = reference_lamb.compressed_step(
            before,
            gradients,
            parts,
            layers,
            unit,
            settings(options),
            norm=options["scale_norm"],
            adaptive=options["adaptive"],
        )
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
    moves = np.abs(runs[0]["states"][-1]["x"] - runs[0]["states"][0]["x"])
    assert (moves > 0).all()
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
    runs = simulate(record_steps, 4, len(LAYERS), STEPS, options)
    clipped = check_warmup(norm, runs, options) + check_compressed_steps(norm, runs, STEPS, options)
    print(f"{norm}: clips: {dict(clipped)}")
    for bound in ("c", "line 18", "line 19"):
        assert clipped[f"{bound} lower"] > 0
        assert clipped[f"{bound} upper"] > 0
    assert clipped["neither"] > 0


def test_frozen_coefficients_are_section_3_4s_basic_one_bit():
    options = OPTIONS | {"adaptive": False, "r_max": 4.0}  # no ratio is formed: its defaults
    runs = simulate(record_steps, 2, 7, 10, options)
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
