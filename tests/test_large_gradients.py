"""Gradients whose squares float32 can't hold count as infinite; what is smaller is used, clipped or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from optimizers import by_name
from torch.nn import Parameter

from fusedonebit import Lamb, MarsitAdam, MarsitSGD, OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam, amp, policies
from fusedonebit.comm import SimulatedGroup

FREEZE, BAD, STEPS = 4, (2, 8), 12
VARIANCE = policies.DoublingVariance(scaler=100, until=FREEZE)
MAKE: dict[str, Callable[..., Any]] = {
    "onebit-adam": by_name(OneBitAdam, freeze_step=FREEZE, guard="off"),
    "onebit-adam, plain": by_name(OneBitAdam, freeze_step=FREEZE, guard="off", precondition=False),
    "onebit-lamb": by_name(OneBitLamb, freeze_step=FREEZE, guard="off"),
    "lamb": by_name(Lamb),
    "zero-one": by_name(ZeroOneAdam, variance_policy=VARIANCE, sync_policy=policies.EveryStep()),
    "zero-one, local steps": by_name(
        ZeroOneAdam, variance_policy=VARIANCE, sync_policy=policies.DoublingRounds(FREEZE, 1, 2)
    ),
    "marsit-sgd": by_name(MarsitSGD, full_precision_every=3),
    "marsit-sgd, local steps": by_name(MarsitSGD, local_steps=2),
    "marsit-adam": by_name(MarsitAdam),
    "lion": by_name(OneBitLion),
}
EVERY = pytest.mark.parametrize("name", MAKE)
QUIET = pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")


def parameters() -> list[Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=draw)) for shape in ((30, 11), (77,))]


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=draw) for shape in ((30, 11), (77,))]


def flat(tensors: Any) -> np.ndarray:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).numpy()


def residuals(optimizer: Any, params: list[Parameter]) -> np.ndarray:
    """What the optimizer owes the parameters, whatever it calls that."""
    told = getattr(optimizer, "worker_error", None) or getattr(optimizer, "compensation", None)
    return flat([told(p) for p in params]) if told is not None else np.zeros(1)


def train(rank: int, transport: Any, name: str, value: float, loss_scale: float = 1.0, **options: Any) -> tuple:
    """Trains with one element of one rank's gradient replaced twice, before and behind a freeze."""
    params = parameters()
    optimizer = MAKE[name](params, process_group=transport, **options)
    scaler = amp.GradScaler("cpu", loss_scale, growth_interval=1000, enabled=loss_scale != 1.0)
    for step in range(STEPS):
        for p, g in zip(params, gradients(rank, step), strict=True):
            p.grad = g
        if rank == 1 and step in BAD:
            params[0].grad[3, 4] = value
        for p in params:
            p.grad = scaler.scale(p.grad)
        scaler.step(optimizer)
        scaler.update()
    momenta = flat([optimizer.momentum(p) for p in params])
    return flat(params), momenta, residuals(optimizer, params), optimizer.stats()["skipped_steps"]


def run(name: str, value: float, **options: Any) -> list[tuple]:
    return SimulatedGroup(2).run(lambda rank, transport: train(rank, transport, name, value, **options))


@pytest.mark.long(but=1)
@QUIET
@EVERY
def test_an_element_whose_square_overflows_counts_as_infinite(name):
    for infinite, large in zip(run(name, float("inf")), run(name, 1e21), strict=True):
        assert infinite[-1] == large[-1] > 0
        for expected, found in zip(infinite[:-1], large[:-1], strict=True):
            assert np.isfinite(found).all()
            assert np.array_equal(expected, found)


@pytest.mark.long(but=4)
@QUIET
@EVERY
def test_smaller_ones_are_used(name):
    for found in run(name, 1.7e19):
        assert found[-1] == 0
        assert all(np.isfinite(part).all() for part in found[:-1])


@pytest.mark.long(but=1)
@QUIET
@pytest.mark.parametrize("name", ["onebit-adam", "lamb", "zero-one, local steps", "marsit-adam", "lion"])
@pytest.mark.parametrize("exponent", [20, -20])
def test_it_is_the_unscaled_gradient_that_counts(name, exponent):
    for value in (1.7e19, 1e21):
        plain, scaled = (run(name, value, loss_scale=scale) for scale in (1.0, 2.0**exponent))
        for expected, found in zip(plain, scaled, strict=True):
            assert found[-1] == expected[-1] == (0 if value < 1e20 else found[-1])
            for a, b in zip(expected[:-1], found[:-1], strict=True):
                assert np.array_equal(a, b)


# ---------------------------------------------------------------- clipping


def clipped_momentum(rank: int, transport: Any, name: str, spoiled: float, at: int) -> tuple[np.ndarray, float]:
    """Momentum and residual after a step of gradients a million times larger, one element of which is ``spoiled``."""
    params = parameters()
    optimizer = MAKE[name](params, process_group=transport, max_grad_norm=1.0)
    for step in range(at + 1):
        for p, g in zip(params, gradients(rank, step), strict=True):
            p.grad = g * (1e6 if step == at else 1.0)
        if step == at and rank == 1:
            params[0].grad[3, 4] = spoiled
        optimizer.step()
    return flat([optimizer.momentum(p) for p in params]) + residuals(optimizer, params), optimizer.stats()["grad_norm"]


@pytest.mark.long(but=4)
@QUIET
@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), 1e25])
@pytest.mark.parametrize("name", ["onebit-adam, plain", "onebit-lamb", "zero-one", "marsit-sgd", "marsit-adam", "lion"])
def test_a_bad_element_does_not_let_the_others_pass_unclipped(name, spoiled):
    runs = SimulatedGroup(2).run(lambda r, t: clipped_momentum(r, t, name, spoiled, 8))
    without = [np.concatenate([g.reshape(-1).numpy() for g in gradients(rank, 8)]) * 1e6 for rank in range(2)]
    without[1][3 * 11 + 4] = 0.0
    expected = float(np.mean([np.linalg.norm(g.astype(float)) for g in without]))
    for kept, told in runs:
        assert told == pytest.approx(expected, rel=1e-6)
        assert np.abs(kept).max() < 10  # unclipped: about 1e5


@pytest.mark.long(but=6)
@QUIET
@pytest.mark.parametrize("at", [2, 8], ids=["warm-up", "compression"])
@pytest.mark.parametrize("name", MAKE)
def test_a_norm_beyond_float32s_squares_is_clipped(name, at):
    def run(rank, transport):
        params = parameters()
        optimizer = MAKE[name](params, process_group=transport, max_grad_norm=1.0)
        for step in range(at + 1):
            for p, g in zip(params, gradients(rank, step), strict=True):
                p.grad = g.sign() * 1.7e19 if step == at else g
            optimizer.step()
        norm = optimizer.stats()["grad_norm"]
        return flat([optimizer.momentum(p) for p in params]), residuals(optimizer, params), norm

    for momentum, residual, norm in SimulatedGroup(2).run(run):
        assert 1e19 < norm < 1e21
        assert np.abs(momentum).max() < 10
        assert np.abs(residual).max() < 10


@pytest.mark.long(but=1)
@QUIET
@pytest.mark.parametrize("scope", ["layer", "block"])
@pytest.mark.parametrize("loud", [1.7e19, 1e25])
def test_with_own_scales_a_loud_tensor_does_not_move_a_quiet_one(scope, loud):
    """Nor the momentum and residuals of it; where its gradient is too large, in a step that is skipped anyway."""

    def states(rank: int, transport: Any, largest: float) -> list[np.ndarray]:
        params = [Parameter(torch.ones(300)), Parameter(torch.ones(200))]
        optimizer = MAKE["onebit-adam"](params, process_group=transport, block_size=128, scale_scope=scope)
        seen = []
        for step in range(10):
            draw = torch.Generator().manual_seed(100 * rank + step)
            params[0].grad, params[1].grad = torch.randn(300, generator=draw), torch.randn(200, generator=draw) * 1e-3
            if step == 5:
                params[0].grad[7] = largest
                params[0].grad[8] = torch.nan if loud > 1e20 and rank == 1 else 1.0
            optimizer.step()
            if step >= FREEZE:
                first, layout = optimizer.state_dict()["state"][0]["server_error"].reshape(-1), optimizer.frame.layout
                line = torch.zeros(layout.numel)
                line[rank * len(first) : (rank + 1) * len(first)] = first
                quiet = params[1], optimizer.momentum(params[1]), optimizer.worker_error(params[1])
                seen.append(flat([*quiet, line[layout.offset(1) :][:200]]))
        return seen

    plain, beside = (SimulatedGroup(2).run(lambda r, t, largest=x: states(r, t, largest)) for x in (1.0, loud))
    assert np.array_equal(plain, beside)
