"""The compression stage against Algorithm 1 in float64, each step from the optimizer's own state.

Two runs part for good once one sign flips; from equal states they may differ only by rounding, and
in signs only where a number is zero to rounding.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference_adam
import torch
from observe import flat, observe, served, whole_server_error
from ranks import run_ranks

from fusedonebit import OneBitAdam

SHAPES_AND_MAGNITUDES = [
    ((40, 30), 1.0),
    ((777,), 1e-4),
    ((1,), 1e2),
    ((3, 5, 7), 1e3),
    ((1030,), 1e-2),
    ((129, 9), 10.0),
    ((2048,), 1e-6),
]
FREEZE_STEP, STEPS = 6, 50
HYPER = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.5}


def gradient(rank: int, step: int, i: int) -> torch.Tensor:
    """Noise of each rank around a mean that drifts slowly, of the tensor's own magnitude."""
    shape, magnitude = SHAPES_AND_MAGNITUDES[i]
    drift = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * i + step // 9))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(7 + 1000 * i + 31 * step + 100_003 * rank))
    return (drift + noise) * magnitude


def record_steps(rank: int, world_size: int, norm: str) -> dict:
    """Trains; returns all states, before the first compressed step and after each."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * magnitude) for shape, magnitude in SHAPES_AND_MAGNITUDES]
    optimizer = OneBitAdam(params, freeze_step=FREEZE_STEP, scale_norm=norm, **HYPER)
    states, gradients = [], []
    for step in range(FREEZE_STEP + STEPS):
        for i, p in enumerate(params):
            p.grad = gradient(rank, step, i)
        if step >= FREEZE_STEP:
            gradients.append(flat([p.grad for p in params]))
            if not states:
                states.append(observe(optimizer))
        optimizer.step()
        if step >= FREEZE_STEP:
            states.append(observe(optimizer))
    assert optimizer.phase == "compression"
    return {"states": states, "gradients": gradients, "served": served(optimizer)}


def whole_state(runs: list[dict], t: int) -> reference_adam.State:
    """The state of all ranks before compressed step ``t`` as Algorithm 1 knows it."""
    here = [{k: a.astype(np.float64) for k, a in run["states"][t].items()} for run in runs]
    server_error = whole_server_error(here, [run["served"] for run in runs])
    worker_error = [state["worker_error"] for state in here]
    return reference_adam.State(here[0]["x"], here[0]["m"], here[0]["v"], worker_error, server_error)


class Deviation:
    """The largest of each kind, over all steps."""

    def __init__(self) -> None:
        self.signs = self.differing = 0
        self.largest_differing = self.scale = self.error = self.parameter = 0.0

    def count_signs(self, reference: np.ndarray, ours: np.ndarray) -> np.ndarray:
        """Returns where the sign of ``ours`` is that of ``reference`` (before compression)."""
        equal = reference_adam.sign(reference) == reference_adam.sign(ours)
        self.signs += equal.size
        self.differing += int((~equal).sum())
        rms = np.sqrt(np.mean(reference**2))
        self.largest_differing = max(self.largest_differing, float((np.abs(reference[~equal]) / rms).max(initial=0)))
        return equal


def compare(
    deviation: Deviation,
    before: reference_adam.State,
    after: reference_adam.State,
    gradients: list[np.ndarray],
    parts: list[np.ndarray],
    spec: reference_adam.Outcome,
) -> None:
    agreed = np.ones(before.x.size, dtype=bool)
    for i, c in enumerate(spec.sent):
        # What the rank has sent is what it had less what it kept.
        sent, s = c - after.worker_error[i], spec.worker_scale[i]
        equal = deviation.count_signs(c, sent)
        agreed &= equal
        # Rounding is relative to the terms of the sum, of which the smallest tell the scale best.
        terms = np.abs(before.m) + np.abs(before.worker_error[i]) + np.abs(gradients[i]) + s
        deviation.scale = max(deviation.scale, abs(np.median(np.abs(sent)[terms <= np.median(terms)]) / s - 1))
        off = np.abs(after.worker_error[i] - spec.worker_error[i])[equal] / terms[equal]
        deviation.error = max(deviation.error, float(off.max()))
    equal = agreed & deviation.count_signs(spec.averaged, after.m)
    for elements, s in zip(parts, spec.server_scale, strict=True):
        magnitude = np.abs(after.m[elements])
        assert (magnitude == magnitude[0]).all()
        deviation.scale = max(deviation.scale, abs(magnitude[0] / s - 1))
        terms = np.abs(before.server_error[elements]) + np.mean(spec.worker_scale) + s
        off = np.abs(after.server_error - spec.server_error)[elements] / terms
        deviation.error = max(deviation.error, float(off[equal[elements]].max()))
    moved = np.abs(spec.x - before.x)
    off = np.abs(after.x - spec.x)[equal] / (np.abs(before.x) + moved)[equal]
    deviation.parameter = max(deviation.parameter, float(off.max()))


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_every_compressed_step_is_algorithm_1(norm):
    runs = run_ranks(record_steps, 4, norm)
    parts = [run["served"] for run in runs]
    d = runs[0]["states"][0]["x"].size
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(d))
    deviation = Deviation()
    for t in range(STEPS):
        before, after = whole_state(runs, t), whole_state(runs, t + 1)
        gradients = [run["gradients"][t].astype(np.float64) for run in runs]
        spec = reference_adam.compressed_step(
            before,
            gradients,
            parts,
            lr=HYPER["lr"],
            beta1=HYPER["betas"][0],
            beta2=HYPER["betas"][1],
            eps=HYPER["eps"],
            weight_decay=HYPER["weight_decay"],
            step=FREEZE_STEP + t + 1,
            frozen_at=FREEZE_STEP,
            norm=norm,
        )
        np.testing.assert_array_equal(before.v, after.v)
        compare(deviation, before, after, gradients, parts, spec)
    share = deviation.differing / deviation.signs
    print(f"{norm}: signs that differ: {share:.1e} of {deviation.signs} (limit 1e-5)")
    print(f"{norm}: largest |c| / rms among them: {deviation.largest_differing:.1e} (limit 1e-6)")
    print(f"{norm}: scales, relative: {deviation.scale:.1e} (limit 1e-6)")
    print(f"{norm}: residuals, of the sum's terms: {deviation.error:.1e} (limit 5e-7)")
    print(f"{norm}: parameters, of |x| + |step|: {deviation.parameter:.1e} (limit 1e-6)")
    assert share <= 1e-5
    assert deviation.largest_differing < 1e-6
    assert deviation.scale <= 1e-6
    assert deviation.error <= 5e-7
    assert deviation.parameter <= 1e-6
    moves = np.abs(runs[0]["states"][-1]["x"] - runs[0]["states"][0]["x"])
    assert (moves > 0).all()
