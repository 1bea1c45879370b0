"""What torch's optimizers take without a word, or with a warning, ours do too."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from optimizers import MAKE, group_of, objects
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import FusedOneBitWarning, OneBitAdam
from fusedonebit.comm import SimulatedGroup

EACH = pytest.mark.parametrize("name", MAKE)
DUPLICATE = "a parameter group with duplicate parameters"


def steps(optimizer: Any, params: list[Parameter], count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach().clone() for p in params]


# ---------------------------------------------------------------- nothing that trains


@EACH
def test_frozen_parameters_alone_are_taken_and_others_join_later(name):
    frozen, adapter = Parameter(torch.ones(4), requires_grad=False), Parameter(torch.ones(3))
    optimizer: Any = MAKE[name]([frozen], lr=1e-2)
    with pytest.warns(FusedOneBitWarning, match="no parameter of this .* requires gradients"):
        optimizer.step()
    for _ in range(4):
        assert optimizer.step(lambda: 7) == 7
    assert optimizer.stats()["step"] == 0
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.add_param_group(group_of(name, [adapter]))
    (moved,) = steps(optimizer, [adapter], 5)
    other = Parameter(torch.ones(3))
    (alone,) = steps(MAKE[name]([other], lr=1e-2), [other], 5)
    assert torch.equal(moved, alone)
    assert torch.equal(frozen, torch.ones(4))


@pytest.mark.filterwarnings("ignore:no parameter of this")
@EACH
def test_frozen_parameters_alone_leave_several_ranks_at_peace(name):
    def program(rank: int, transport: Any) -> Tensor:
        frozen, adapter = Parameter(torch.ones(4), requires_grad=False), Parameter(torch.ones(3))
        optimizer: Any = MAKE[name]([frozen], lr=1e-2, process_group=transport)
        for _ in range(2 + rank):  # nobody waits for anybody
            optimizer.step()
        optimizer.add_param_group(group_of(name, [adapter]))
        return steps(optimizer, [adapter], 4, seed=rank)[0]

    one, two = SimulatedGroup(2, timeout=20).run(program)
    assert torch.equal(one, two)


def test_unfreezing_the_only_parameter_is_not_overlooked():
    p = Parameter(torch.ones(4), requires_grad=False)
    optimizer = OneBitAdam([p], freeze_step=2)
    p.requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires gradients now but did not when the optimizer was made"):
        optimizer.step()


@EACH
def test_a_layer_frozen_in_training_stays_until_it_trains_again(name):
    """It is as if it had no gradient, in both stages; unfreezing needs no new optimizer."""
    runs = []
    for freezes in (True, False):
        layer, rest = Parameter(torch.ones(40)), Parameter(torch.ones(3))
        optimizer: Any = MAKE[name]([layer, rest], lr=1e-2)
        before = steps(optimizer, [layer, rest], 1)[0]
        layer.grad = None
        layer.requires_grad_(not freezes)
        assert torch.equal(steps(optimizer, [rest], 4, seed=1) and layer, before)
        layer.requires_grad_(True)
        after = steps(optimizer, [layer, rest], 3, seed=2)
        assert not torch.equal(after[0], before)
        runs.append(after)
    assert all(map(torch.equal, *runs))


# ---------------------------------------------------------------- hyper-parameters that are tensors


@EACH
def test_hyper_parameters_may_be_tensors(name):
    given = {"SGD" in name: {"momentum": 0.5}}.get(True, {"betas": (0.75, 0.875)}) | {"weight_decay": 0.25}
    as_tensors = {
        key: tuple(map(torch.tensor, value)) if isinstance(value, tuple) else torch.tensor(value)
        for key, value in given.items()
    }
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer: Any = MAKE[name]([q], lr=1e-2, **as_tensors)
    (expected,) = steps(MAKE[name]([p], lr=1e-2, **given), [p], 5)
    (moved,) = steps(optimizer, [q], 5)
    assert torch.equal(moved, expected)
    # As torch does, the group keeps the tensor, and what somebody fills it with counts.
    optimizer.param_groups[0]["weight_decay"].fill_(-1.0)
    with pytest.raises(ValueError, match=r"weight_decay must be a finite number >= 0, got -1\.0 in group 0"):
        steps(optimizer, [q], 4)  # 0/1 Adam says so at the end of the round


@pytest.mark.parametrize("betas", [torch.tensor([0.9, 0.99]), (torch.ones(2), 0.9), (0.9, torch.tensor(1.0))])
def test_tensors_that_are_no_hyper_parameters_are_refused(betas):
    with pytest.raises(ValueError, match=r"betas must be two numbers in \[0, 1\), got"):
        OneBitAdam([Parameter(torch.ones(3))], freeze_step=2, betas=betas)


@EACH
def test_a_parameter_given_twice_is_warned_of_and_moves_once(name):
    p, q, last = Parameter(torch.ones(3)), Parameter(torch.ones(3)), Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match=DUPLICATE):
        optimizer: Any = MAKE[name]([p, p, last], lr=1e-2)
    moved = steps(optimizer, [p, last], 5)
    other_last = Parameter(torch.ones(2))
    expected = steps(MAKE[name]([q, other_last], lr=1e-2), [q, other_last], 5)
    assert all(torch.equal(a, b) for a, b in zip(moved, expected, strict=True))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["params"] == [0, 0, 2]
    with pytest.warns(UserWarning, match=DUPLICATE):
        resumed: Any = MAKE[name]([q, q, other_last], lr=1e-2)
    resumed.load_state_dict(saved)
    assert resumed.stats()["step"] == 5
    with pytest.warns(UserWarning, match=DUPLICATE):
        MAKE[name]([last]).add_param_group(group_of(name, [q, q]))


# ---------------------------------------------------------------- masks


def masked(mask: Tensor | None, **options: Any) -> tuple[Parameter, OneBitAdam]:
    p = Parameter(torch.ones(4))
    return p, OneBitAdam([p], lr=1e-2, **objects(guard="off", mask={} if mask is None else {p: mask}, **options))


LEFT, RIGHT = torch.tensor([True, True, False, False]), torch.tensor([False, True, True, True])


@pytest.mark.parametrize(("before", "after"), [(LEFT, RIGHT), (None, LEFT), (LEFT, None)])
def test_another_mask_in_the_warm_up_is_taken_with_a_warning(before, after):
    p, optimizer = masked(before, freeze_step=5)
    steps(optimizer, [p], 3)
    saved = copy.deepcopy(optimizer.state_dict())
    p, optimizer = masked(after, freeze_step=5)
    with pytest.warns(FusedOneBitWarning, match="written with another mask for parameter 0: what is masked now loses"):
        optimizer.load_state_dict(saved)
    (moved,) = steps(optimizer, [p], 6)
    live = torch.ones(4, dtype=torch.bool) if after is None else after
    assert optimizer.phase == "compression"
    assert torch.equal(moved != 1, live)
    assert torch.equal(optimizer.worker_error(p) != 0, live)
    assert torch.isfinite(moved).all()


@pytest.mark.parametrize(("before", "after"), [(LEFT, RIGHT), (None, LEFT), (LEFT, None)])
def test_another_mask_once_compressed_is_refused_with_a_way_out(before, after):
    p, optimizer = masked(before, freeze_step=1)
    steps(optimizer, [p], 3)
    saved = copy.deepcopy(optimizer.state_dict())
    p, optimizer = masked(after, freeze_step=1)
    with pytest.raises(ValueError, match=r"another mask for parameter 0, .* the warm-up: .* warm_start="):
        optimizer.load_state_dict(saved)
    p = Parameter(torch.ones(4))
    mask = {} if after is None else {p: after}
    optimizer = OneBitAdam([p], 1e-2, **objects(guard="off", mask=mask, freeze_step=0, warm_start=saved))
    (moved,) = steps(optimizer, [p], 3)
    assert torch.equal(moved != 1, torch.ones(4, dtype=torch.bool) if after is None else after)


def test_the_same_mask_is_loaded_without_a_word():
    p, optimizer = masked(LEFT, freeze_step=5)
    steps(optimizer, [p], 2)
    saved = copy.deepcopy(optimizer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masked(LEFT, freeze_step=5)[1].load_state_dict(saved)
