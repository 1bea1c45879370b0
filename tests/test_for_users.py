"""What somebody who had torch.optim.AdamW, or is careless, runs into."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
from optimizers import ADAM_AND_LAMB, EACH_ONEBIT, LAMBS, PAPER, UNGUARDED, construct
from ranks import simulate
from torch import Tensor
from torch.nn import Parameter

import fusedonebit
from fusedonebit import Numerics, OneBitAdam
from fusedonebit.comm import Transport


def parameters(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 5), (300,), (7,))]


def step(optimizer: torch.optim.Optimizer, params: list[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def test_a_warmup_checkpoint_goes_on_in_torchs_adamw():
    ours, theirs, again = parameters(), parameters(), parameters()
    optimizer = OneBitAdam(ours, 1e-2, freeze_step=100)
    adamw = torch.optim.AdamW(theirs, 1e-2)
    for i in range(5):
        step(optimizer, ours, i)
        step(adamw, theirs, i)
    resumed = torch.optim.AdamW(again, 1e-2)
    for a, b in zip(again, ours, strict=True):
        a.data.copy_(b)
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for i in range(5, 10):
        step(resumed, again, i)
        step(adamw, theirs, i)
    assert {int(s["step"]) for s in resumed.state.values()} == {10}
    for a, b in zip(again, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@EACH_ONEBIT
@pytest.mark.parametrize("plain", [False, True])
def test_looking_at_a_run_does_not_change_what_stats_say(name, plain):
    params = parameters()
    options = UNGUARDED if not plain else PAPER if name not in LAMBS else PAPER | {"momentum_scaling": False}
    if name == "onebit-lamb-living":  # it has a unit in any case
        options, plain = UNGUARDED | {"scale_norm": "l2" if plain else None}, False
    optimizer = construct(name, params, freeze_step=1, **options)
    for i in range(4):
        step(optimizer, params, i)
    keys = ("worker_error_norm", "server_error_norm", "compensated_norm")
    before = {key: optimizer.stats()[key] for key in keys}
    error = torch.cat([optimizer.worker_error(p).flatten() for p in params])
    optimizer.state_dict()
    assert {key: optimizer.stats()[key] for key in keys} == before
    assert before["worker_error_norm"] > 0
    if plain:  # stats tell norms in the unit in which momenta are compressed
        assert before["worker_error_norm"] == pytest.approx(float(error.norm()), rel=1e-5)


@EACH_ONEBIT
@pytest.mark.parametrize("held", [True, False])
def test_reading_state_does_not_change_what_stats_say(name, held):
    """Where a step leaves residuals as they are: all, if it is held back; else those of tensors without gradients."""
    told = []
    for looks in (False, True):
        params = parameters()
        optimizer = construct(name, params, freeze_step=1, **UNGUARDED)
        for i in range(4):
            step(optimizer, params, i)
        if looks:
            optimizer.state_dict()
        if held:
            optimizer.found_inf = torch.ones(())  # as a GradScaler does
            step(optimizer, params, 4)
        else:
            for p in params[1:]:
                p.grad = None
            optimizer.step()
        stats = optimizer.stats(layers=True)
        told.append([stats[key] for key in ("worker_error_norm", "server_error_norm", "compensated_norm", "layers")])
    assert 0 < told[0][0] < told[0][2]
    assert told[1] == told[0]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("given", ["tensor", "none", "number"])
def test_params_that_are_no_list_on_one_rank_raise_on_all(given):
    first, other = simulate(with_bad_params, 2, given)
    assert "params" in first
    assert "failed on rank 0" in other


def with_bad_params(rank: int, transport: Transport, given: str) -> str:
    bad = {"tensor": torch.ones(3), "none": None, "number": [{"params": 5}]}[given]
    with pytest.raises((TypeError, ValueError)) as error:
        OneBitAdam(bad if rank == 0 else parameters(), freeze_step=1, process_group=transport)
    return str(error.value)


def test_a_mask_on_one_rank_only_is_named():
    for text in simulate(with_own_mask, 2):
        assert "the mask of parameter 0 is none on rank 0 but checksum" in text


def with_own_mask(rank: int, transport: Transport) -> str:
    params = parameters()
    mask = {params[0]: torch.ones(3, 5, dtype=torch.bool)} if rank else None
    with pytest.raises(ValueError, match="ranks differ") as error:
        OneBitAdam(params, freeze_step=1, numerics=Numerics(mask=mask), process_group=transport)
    return str(error.value)


@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf")])
def test_a_tensor_lr_is_checked_too(lr):
    with pytest.raises(ValueError, match="lr must be a finite number >= 0, got"):
        OneBitAdam(parameters(), torch.tensor(lr), freeze_step=1)


def test_a_parameter_turned_in_place_is_noticed():
    p = Parameter(torch.randn(4, 4))
    optimizer = OneBitAdam([p], freeze_step=1)
    p.data = p.data.t()
    p.grad = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="parameter 0 was"):
        optimizer.step()


def test_warnings_point_at_the_users_line():
    params = parameters()
    optimizer = OneBitAdam(params, freeze_step=5)
    params[0].grad = torch.full((3, 5), torch.nan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert [w.category for w in caught] == [fusedonebit.FusedOneBitWarning]
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("onebit-adam", {"scale_norm": "l1"}, "written with scale_norm='contractive'"),
        ("onebit-lamb", {"variant": "deepspeed"}, "written with variant='paper'"),
    ],
)
def test_other_numerics_than_the_checkpoints_are_pointed_out(name, change, text):
    params = parameters()
    optimizer = construct(name, params, freeze_step=1)
    for i in range(3):
        step(optimizer, params, i)
    other = construct(name, parameters(), freeze_step=1, **change)
    with pytest.warns(fusedonebit.FusedOneBitWarning, match=text):
        other.load_state_dict(optimizer.state_dict())


@ADAM_AND_LAMB
def test_another_beta2s_freeze_rule_is_refused_before_any_change(name):
    params = parameters()
    optimizer = construct(name, params, betas=(0.9, 0.9), freeze_step="auto")
    step(optimizer, params, 0)
    other_params = parameters()
    other = construct(name, other_params, betas=(0.9, 0.99), freeze_step="auto")
    step(other, other_params, 1)
    before = other.momentum(other_params[1])
    with pytest.raises(ValueError, match="use the same betas"):
        other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.momentum(other_params[1]), before)
