"""``frozen_dtype=torch.bfloat16``: the frozen variance in half the bytes: kernels, freeze, re-warm-up, checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from frozen_dtype_runs import params, train, values
from optimizers import ADAM_AND_LAMB, ONEBIT, UNGUARDED
from ranks import simulate
from torch import Tensor

from fusedonebit import dcp
from fusedonebit.comm import Transport
from fusedonebit.triton_kernels import Coef, update_sums

SIZES = (300, 0, 5, 2048, 129)
HALF: dict[str, Any] = {"frozen_dtype": torch.bfloat16}


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@ADAM_AND_LAMB
@pytest.mark.parametrize("precondition", [False, True])
def test_it_saves_two_bytes_and_only_rounds_denominators(name, precondition):
    options = UNGUARDED | {"freeze_step": 4, "precondition": precondition}
    wide, half = (ONEBIT[name](params(), 1e-3, **options, **more) for more in ({}, HALF))
    for optimizer in (wide, half):
        train(optimizer, range(5))
    saved = wide.stats()["state_bytes"] - half.stats()["state_bytes"]
    print(f"{name}: {saved / half.frame.layout.numel:.3f} bytes per element less")
    assert saved == 2 * half.frame.layout.numel
    v, rounded = (o.state_dict()["state"][0]["exp_avg_sq"] for o in (wide, half))
    assert rounded.dtype is torch.bfloat16
    assert torch.equal(rounded, v.bfloat16())
    assert "frozen_dtype: bfloat16" in repr(half)
    # One compressed update from equal signs: as far apart as the roots of the two variances.
    for a, b, start in zip(values(wide), values(half), params(), strict=True):
        torch.testing.assert_close(b - start, a - start, rtol=0.02, atol=2e-6)


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@ADAM_AND_LAMB
@pytest.mark.parametrize("precondition", [False, True])
def test_the_guard_reads_it_as_it_reads_float32(name, precondition):
    optimizer = ONEBIT[name](params(), 1e-3, freeze_step=4, precondition=precondition, **HALF)
    train(optimizer, range(8))
    assert optimizer.phase == "compression"
    places, coef = optimizer.frame.places, torch.rand(len(optimizer.frame.layout.sizes), len(Coef))
    v = optimizer.algorithm.moments.exp_avg_sq
    half, wide = (update_sums(places, None, each, False, coef) for each in (v, v.float()))
    assert torch.equal(half, wide)
    assert half.sum() > 0


def steps_on_ranks(rank: int, transport: Transport, name: str) -> tuple[list[Tensor], str]:
    optimizer = ONEBIT[name](params(), 1e-3, freeze_step=3, **UNGUARDED, **HALF, process_group=transport)
    train(optimizer, range(10), rank)
    return values(optimizer), optimizer.phase


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@ADAM_AND_LAMB
def test_ranks_stay_bit_identical(name):
    (first, phase), (second, _) = simulate(steps_on_ranks, 2, name)
    assert phase == "compression"
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@ADAM_AND_LAMB
def test_resuming_is_exact_through_both_kinds_of_checkpoints(name, tmp_path):
    def fresh() -> Any:
        return ONEBIT[name](params(), 1e-3, freeze_step=3, **UNGUARDED, **HALF)

    whole = fresh()
    train(whole, range(8))
    saved = copy.deepcopy(whole.state_dict())
    weights = values(whole)
    train(whole, range(8, 12))
    again = fresh()
    again.load_state_dict(saved)
    with torch.no_grad():
        for p, value in zip(again.param_groups[0]["params"], weights, strict=True):
            p.copy_(value)
    train(again, range(8, 12))
    assert all(torch.equal(a, b) for a, b in zip(values(whole), values(again), strict=True))


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb"])
def test_dcp_keeps_it(name, tmp_path):
    torch.manual_seed(0)
    models = [torch.nn.Linear(33, 40) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = (ONEBIT[name](m.parameters(), 1e-3, freeze_step=3, **UNGUARDED, **HALF) for m in models)
    train(first, range(8))
    dcp.save(models[0], first, tmp_path / "saved")
    dcp.load(models[1], second, tmp_path / "saved")
    assert second.state_dict()["state"][0]["exp_avg_sq"].dtype is torch.bfloat16
    for optimizer in (first, second):
        train(optimizer, range(8, 12))
    assert all(torch.equal(a, b) for a, b in zip(values(first), values(second), strict=True))


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
def test_a_re_warm_up_goes_on_in_float32():
    optimizer = ONEBIT["onebit-adam"](params(), 1e-3, freeze_step=3, refuse_every=4, rewarm_steps=10, **HALF)
    train(optimizer, range(9))
    assert (optimizer.phase, optimizer.stats()["rewarms"]) == ("warmup", 1)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg_sq"].dtype is torch.float32


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
def test_another_dtypes_checkpoint_is_refused_bad_dtypes_named():
    optimizer = ONEBIT["onebit-adam"](params(), 1e-3, freeze_step=3, **HALF)
    train(optimizer, range(5))
    other = ONEBIT["onebit-adam"](params(), 1e-3, freeze_step=3)
    with pytest.raises(ValueError, match=r"frozen_dtype='torch.bfloat16', but here it is 'torch.float32'"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"frozen_dtype must be torch.float32 or torch.bfloat16, got torch.float16"):
        ONEBIT["onebit-adam"](params(), freeze_step=3, frozen_dtype=torch.float16)
