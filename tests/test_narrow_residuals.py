"""``Numerics(state="bf16")`` in the compression stage: residuals, momentum and variance in two bytes an element."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from backends import assert_equal_backends, problem
from optimizers import objects
from ranks import simulate
from reference_ops import Problem
from renewal_arguments import renew_arguments
from test_frozen_dtype import params, train, values
from torch import Tensor

from fusedonebit import Numerics, OneBitAdam, OneBitLamb, dcp, triton_kernels
from fusedonebit.comm import Transport
from fusedonebit.triton_kernels import settle

SIZES = (300, 0, 5, 2048, 129)
MASKS = {0: torch.arange(300) % 3 > 0, 4: torch.arange(129) < 128}
KINDS: dict[str, dict[str, Any]] = {
    "frozen": {"freeze_step": 4},
    "living": {"warmup": 4},
    "undivided": {"freeze_step": 4, "precondition": False},
    "ternary": {"freeze_step": 4, "ternary": True},
}
LATER = torch.tensor(2**33 + 5)
"""Updates done: a number that 32 bits do not hold."""


def narrow(kind: str, state: str = "bf16", **more: Any) -> OneBitAdam:
    return OneBitAdam(params(), 1e-3, **objects(state=state, guard="off", **KINDS[kind], **more))


# ---------------------------------------------------------------- ops


@pytest.mark.kernels
@pytest.mark.long(but=2)
@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("follows", [False, True])
def test_every_backend_compresses_from_and_to_bfloat16_alike(ternary, follows):
    def make() -> tuple:
        p = problem(SIZES, 2, 128, special=True, ternary=ternary, masks=MASKS)
        p.compensated = p.compensated.bfloat16()
        own = torch.where(p.table.mask(), p.exp_avg_sq, 0.0).bfloat16() if follows else None
        return *p.momentum_arguments(p.exp_avg_sq.bfloat16()), own, LATER

    assert_equal_backends("momentum_compress", make)


@pytest.mark.kernels
@pytest.mark.long(but=3)
@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("world_size", [1, 3, 9])
def test_every_backend_serves_from_and_to_bfloat16_alike(world_size, ternary):
    def make() -> tuple:
        p = problem(SIZES, world_size, 128, ternary=ternary, masks=MASKS)
        p.compensated = p.compensated.bfloat16()
        return *p.server_arguments("layer", world_size - 1), None, 0, None, 0, LATER

    assert_equal_backends("server_reduce", make)


@pytest.mark.kernels
@pytest.mark.parametrize("how", [{}, {"server": True, "writes": False}])
def test_every_backend_brings_bfloat16_to_another_unit_alike(how):
    def make() -> tuple:
        p = problem(SIZES, 2, 128, masks=MASKS)
        p.compensated = p.compensated.bfloat16()
        return renew_arguments(p, half=True, **how)

    assert_equal_backends("renew", make)


def compressed(p: Problem, start: Tensor, updates: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """c from ``start``, its bits and its sums."""
    p.compensated = start.clone()
    triton_kernels.momentum_compress(*p.momentum_arguments(p.exp_avg_sq), None, updates)
    return p.compensated, p.bits.clone(), p.partials.clone()


def test_what_is_kept_is_a_neighbour_of_what_float32_has_and_the_same_on_average():
    p = problem((3000,), 1, 1024)
    start, draws = p.compensated.bfloat16(), 400
    exact, _, _ = compressed(p, start.float(), None)
    total = torch.zeros_like(exact, dtype=torch.float64)
    for draw in range(draws):
        kept, _, _ = compressed(p, start, torch.tensor(draw))
        unit = exact.abs().double() * 2.0**-7  # an upper bound of what lies between two neighbours
        assert ((kept.double() - exact.double()).abs() <= unit).all()
        total += kept.double()
    off = ((total / draws - exact.double()) / unit)[exact != 0]
    print(f"mean {float(off.mean()):+.5f} of a unit, at most {5 * 0.5 / (draws * len(off)) ** 0.5:.5f}")
    assert off.abs().max() < 6 * 0.5 / draws**0.5
    assert abs(float(off.mean())) < 5 * 0.5 / (draws * len(off)) ** 0.5


def test_what_is_sent_and_what_is_kept_add_up_to_what_was_compressed():
    p = problem((3072,), 1, 1024)
    kept, bits, partials = compressed(p, p.compensated.bfloat16(), torch.tensor(7))
    assert kept.dtype is torch.bfloat16
    c = kept.double().view(-1, 1024)
    assert torch.equal(triton_kernels.unpack(bits).view_as(c) > 0, c >= 0)
    torch.testing.assert_close(partials, torch.stack([c.abs().sum(1), c.square().sum(1)]), rtol=1e-12, atol=0)
    scale, residual = torch.full((len(c),), 0.25), kept.clone()
    settle(residual, scale.clone(), False, p.table.bits, p.table.row)
    sent = 0.25 * torch.where(c >= 0, 1.0, -1.0)
    assert ((residual.double().view_as(c) + sent - c).abs() <= (c - sent).abs() * 2.0**-8).all()  # half a unit


# ---------------------------------------------------------------- the optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_half_the_bytes(kind):
    held = {}
    for state in ("fp32", "bf16"):
        optimizer = narrow(kind, state)
        train(optimizer, range(8))
        assert optimizer.phase == "compression"
        held[state] = optimizer.stats()["state_bytes"] / optimizer.layout.numel
    print(f"{kind}: {held['bf16']:.2f} bytes of state for each element, {held['fp32']:.2f} in float32")
    assert held["bf16"] <= held["fp32"] / 2 + 0.4  # bits, and what there is by block


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_float32_does(kind):
    wide, half = narrow(kind, "fp32"), narrow(kind)
    for optimizer in (wide, half):
        train(optimizer, range(60))
    a, b, start = (torch.cat([x.flatten() for x in each]) for each in (values(wide), values(half), params()))
    apart = float((a - b).norm() / (a - start.detach()).norm())
    print(f"{kind}: {apart:.3f} of the way apart")
    assert 0 < apart < 0.2


def on_ranks(rank: int, transport: Transport, options: dict[str, Any]) -> tuple[list[Tensor], float]:
    optimizer = OneBitAdam(params(), 1e-3, **objects(state="bf16", guard="off", **options), process_group=transport)
    train(optimizer, range(10), rank)
    assert optimizer.phase == "compression"
    assert optimizer.reducer.server_residual.dtype is torch.bfloat16
    return values(optimizer), optimizer.stats()["state_bytes"] / optimizer.layout.numel


@pytest.mark.parametrize("more", [{}, {"buckets": 2, "scale_scope": "layer"}], ids=["whole", "buckets"])
@pytest.mark.parametrize("kind", ["frozen", "living"])
def test_ranks_stay_bit_identical(kind, more):
    (first, held), (second, _) = simulate(on_ranks, 2, KINDS[kind] | more)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    print(f"{kind}: {held:.2f} bytes of state for each element on 2 ranks")


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_is_exact(kind):
    whole = narrow(kind)
    train(whole, range(8))
    saved = copy.deepcopy(whole.state_dict())
    weights = values(whole)
    train(whole, range(8, 14))
    again = narrow(kind)
    with torch.no_grad():
        for p, value in zip(again.param_groups[0]["params"], weights, strict=True):
            p.copy_(value)
    again.load_state_dict(saved)
    train(again, range(8, 14))
    assert all(torch.equal(a, b) for a, b in zip(values(whole), values(again), strict=True))


def test_a_checkpoint_for_any_number_of_ranks_keeps_it(tmp_path):
    torch.manual_seed(0)
    models = [torch.nn.Linear(33, 40) for _ in range(2)]
    first, second = (OneBitAdam(m.parameters(), 1e-3, freeze_step=3, numerics=Numerics(state="bf16")) for m in models)
    train(first, range(8))
    dcp.save(models[0], first, tmp_path / "saved")
    dcp.load(models[1], second, tmp_path / "saved")
    for optimizer in (first, second):
        train(optimizer, range(8, 12))
    assert all(torch.equal(a, b) for a, b in zip(values(first), values(second), strict=True))


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
def test_a_re_warm_up_goes_on_in_bfloat16():
    optimizer = narrow("frozen", rewarm_every=4, rewarm_steps=10)
    train(optimizer, range(9))
    assert (optimizer.phase, optimizer.stats()["rewarms"]) == ("warmup", 1)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.bfloat16}


def test_what_can_not_be_kept_so_is_refused():
    with pytest.raises(ValueError, match='state must be "fp32" or "bf16" with OneBitAdam, got "8bit"'):
        narrow("frozen", "8bit")
    with pytest.raises(ValueError, match="state must be 'fp32' with OneBitLamb, got 'bf16'"):
        OneBitLamb(params(), numerics=Numerics(state="bf16"))
