"""Hooks around ``state_dict`` and ``load_state_dict`` see and change what torch's would; others may keep entries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from observe import train
from optimizers import MAKE, group_of
from torch import Tensor, nn

from fusedonebit import DisagreementError, ZeroOneAdam
from fusedonebit.checkpoint import header_of
from fusedonebit.comm import SimulatedGroup

EACH = pytest.mark.parametrize("name", MAKE)
STAGES = pytest.mark.parametrize("steps", [1, 4], ids=["uncompressed", "bits"])
LARGEST = ("exp_avg_sq", "momentum_buffer", "worker_error", "exp_avg")
"""What an optimizer keeps of each element; each has one of them."""


def trained(name: str, steps: int, transport: Any = None, rank: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer: Any = MAKE[name](model.parameters(), lr=1e-3, process_group=transport)
    train(optimizer, rank, range(steps))
    return model, optimizer


def tensors(state_dict: dict) -> dict[str, Tensor]:
    found = {}
    for number, state in state_dict["state"].items():
        found |= {f"{number}.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    return found


def equal(one: dict, other: dict) -> bool:
    """Whether two state_dicts have the same tensors."""
    ours, theirs = tensors(one), tensors(other)
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.long(but=8)
@STAGES
@EACH
def test_hooks_of_loading_see_what_was_saved_and_may_change_it(name, steps):
    saved = copy.deepcopy(trained(name, steps)[1].state_dict())
    _, resumed = trained(name, 0)
    seen: list[Any] = []

    def rename(_: Any, given: dict) -> dict:
        return {"state": given["renamed"], "param_groups": given["param_groups"]}

    def slow_down(_: Any, given: dict) -> None:
        seen.append(copy.deepcopy(given))
        given["param_groups"] = copy.deepcopy(given["param_groups"])
        given["param_groups"][0]["lr"] = 0.25

    resumed.register_load_state_dict_pre_hook(slow_down)
    resumed.register_load_state_dict_pre_hook(rename, prepend=True)
    resumed.register_load_state_dict_post_hook(lambda o: seen.append(copy.deepcopy(o.state_dict())))
    resumed.load_state_dict({"renamed": saved["state"], "param_groups": saved["param_groups"]})
    before, after = seen
    assert equal(before, saved)
    assert header_of(before) == header_of(saved)
    assert resumed.param_groups[0]["lr"] == after["param_groups"][0]["lr"] == 0.25
    assert saved["param_groups"][0]["lr"] == 1e-3
    assert resumed.stats()["step"] == header_of(after)["updates"] == steps
    assert equal(after, saved)
    assert equal(resumed.state_dict(), saved)


@STAGES
@EACH
def test_a_saving_post_hook_sees_the_header_and_may_add_entries(name, steps):
    _, optimizer = trained(name, steps)

    def add(_: Any, saved: dict) -> None:
        assert header_of(saved)["updates"] == steps
        saved["epoch"] = 7

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "twice": saved["epoch"] * 2})
    saved = optimizer.state_dict()
    assert (saved["epoch"], saved["twice"]) == (7, 14)
    _, resumed = trained(name, 0)
    resumed.load_state_dict(copy.deepcopy(saved))
    assert resumed.stats()["step"] == steps


@STAGES
@EACH
def test_tensors_changed_by_hooks_are_saved_and_loaded_so(name, steps):
    _, optimizer = trained(name, steps)

    def halve(_: Any, saved: dict) -> None:
        for state in saved["state"].values():
            state.update({key: state[key] / 2 for key in LARGEST if key in state})

    plain = copy.deepcopy(optimizer.state_dict())
    optimizer.register_state_dict_post_hook(halve)
    halved = copy.deepcopy(optimizer.state_dict())
    assert not equal(plain, halved)
    _, resumed = trained(name, 0)
    resumed.register_load_state_dict_pre_hook(lambda _, given: given.update(copy.deepcopy(given)))
    resumed.register_load_state_dict_pre_hook(halve)
    resumed.load_state_dict(halved)
    halve(None, halved)
    assert equal(resumed.state_dict(), halved)


@EACH
def test_damage_is_found_before_hooks_can_hide_it(name):
    _, optimizer = trained(name, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    key = next(key for key in LARGEST if key in saved["state"][0])
    saved["state"][0][key].view(torch.uint8).flatten()[0] ^= 1
    _, resumed = trained(name, 0)
    resumed.register_load_state_dict_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match=f"{key} of parameter 0 in the checkpoint is damaged"):
        resumed.load_state_dict(saved)


@EACH
def test_a_pre_hook_of_saving_may_write_into_the_state(name):
    model, optimizer = trained(name, 4)
    p = model.weight
    optimizer.register_state_dict_pre_hook(lambda o: o.state.update(note=5))
    optimizer.register_state_dict_pre_hook(lambda o: o.state[p].update(average=torch.ones(2), depth=3))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["note"] == 5
    assert saved["state"][0]["depth"] == 3
    again, resumed = trained(name, 0)
    resumed.state["note"] = "of before"
    resumed.load_state_dict(saved)
    assert resumed.state["note"] == 5
    assert resumed.state[again.weight]["depth"] == 3
    assert torch.equal(resumed.state[again.weight]["average"], torch.ones(2))
    assert "depth" not in resumed.state[again.bias]


@EACH
def test_others_state_entries_outlive_the_freeze_and_new_groups(name):
    model, optimizer = trained(name, 0)
    optimizer.state["note"] = [1, 2]
    optimizer.state[model.weight]["depth"] = 3
    more = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group(group_of(name, [more]))
    train(optimizer, 0, range(4))
    assert optimizer.state["note"] == [1, 2]
    assert optimizer.state[model.weight]["depth"] == 3


@pytest.mark.long(but=5)
@pytest.mark.parametrize("when", ["before", "after"])
@EACH
def test_a_hook_that_raises_on_one_rank_is_an_error_on_all(name, when):
    def rank_program(rank: int, transport: Any) -> str:
        _, optimizer = trained(name, 4, transport, rank)
        saved = copy.deepcopy(optimizer.state_dict())
        _, resumed = trained(name, 0, transport)

        def fail(*_: Any) -> None:
            if rank == 1:
                raise LookupError("no such thing")

        if when == "before":
            resumed.register_load_state_dict_pre_hook(fail)
        else:
            resumed.register_load_state_dict_post_hook(fail)
        with pytest.raises(LookupError if rank == 1 else DisagreementError, match="no such thing") as caught:
            resumed.load_state_dict(saved)
        if when == "before":
            assert resumed.stats()["step"] == 0
        return str(caught.value)

    told = SimulatedGroup(2, timeout=20).run(rank_program)
    assert "failed on rank 1: no such thing" in told[0]


@pytest.mark.parametrize("make", [torch.optim.AdamW, MAKE["OneBitAdam"]], ids=["torch", "ours"])
def test_hooks_run_in_torchs_order_and_only_once(make):
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())
    train(optimizer, 0, range(3))
    calls: list[str] = []

    def noting(what: str) -> Callable[..., None]:
        return lambda *_: calls.append(what)

    for mark, prepend in (("last", False), ("first", True)):
        optimizer.register_state_dict_pre_hook(noting(f"saving {mark}"), prepend=prepend)
        optimizer.register_state_dict_post_hook(noting(f"saved {mark}"), prepend=prepend)
        optimizer.register_load_state_dict_pre_hook(noting(f"loading {mark}"), prepend=prepend)
        optimizer.register_load_state_dict_post_hook(noting(f"loaded {mark}"), prepend=prepend)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [f"{what} {m}" for what in ("saving", "saved", "loading", "loaded") for m in ("first", "last")]


def test_a_hook_sees_the_state_of_a_round_as_it_is_saved():
    _, optimizer = trained("ZeroOneAdam", 3)
    assert isinstance(optimizer, ZeroOneAdam)
    seen: list[Any] = []
    optimizer.register_state_dict_post_hook(lambda _, saved: seen.append(sorted(saved["state"][0])))
    saved = optimizer.state_dict()
    assert seen == [sorted(saved["state"][0])]
