"""Whoever loads a checkpoint must load the same model on every rank: compared at the first step after it."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from observe import fingerprint, give_gradients, named, parameters, train
from optimizers import WAYS, by_name
from ranks import run_ranks, simulate
from runs_after_a_load import MAKE, make
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedonebit
from fusedonebit import Faults, OneBitAdam, OneBitLamb, ddp
from fusedonebit.comm import Transport

EACH = pytest.mark.parametrize("name", MAKE)
TOLD = "ranks differ: the checksum of parameter 1 (1.weight)'s values is"


def saved(rank: int, name: str, steps: int, **more: Any) -> tuple[dict, dict]:
    model, optimizer = make(name, **more)
    train(optimizer, rank, range(steps))
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def loaded(rank: int, name: str, steps: int, **more: Any) -> tuple[nn.Module, Any, dict]:
    """A model and its optimizer that have taken up a checkpoint, and the model's state in it."""
    model_state, state = saved(rank, name, steps, **more)
    model, optimizer = make(name, **more)
    optimizer.load_state_dict(state)
    model.load_state_dict(model_state)
    return model, optimizer, model_state


def spoil(model: nn.Module) -> None:
    """One element of the second tensor is another one now."""
    with torch.no_grad():
        model[1].weight[2, 3] += 0.5


def check(told: list[tuple[str, str, bool]], name: str = TOLD) -> None:
    for kind, text, still in told:
        assert kind == "DisagreementError", (kind, text)
        assert name in text
        assert "found at the first step after load_state_dict(), and no parameter was changed" in text
        assert still


@pytest.mark.long(but=2)
@EACH
@pytest.mark.parametrize("steps", [2, 6])
def test_one_differing_element_stops_all_and_names_the_tensor(name, steps):
    """Whether the model is loaded before the optimizer or after it; with the right model training goes on."""

    def run(rank: int, transport: Transport) -> list[Any]:
        model, optimizer, model_state = loaded(rank, name, steps, process_group=transport)
        if rank == 1:
            spoil(model)
        before = fingerprint(parameters(optimizer))
        give_gradients(optimizer, rank, steps)
        first = (*named(optimizer.step), fingerprint(parameters(optimizer)) == before)
        again = (*named(optimizer.step), fingerprint(parameters(optimizer)) == before)
        model.load_state_dict(model_state)
        train(optimizer, rank, range(steps, steps + 6))
        return [first, again, fingerprint(parameters(optimizer))]

    firsts, agains, ends = zip(*simulate(run, 2), strict=True)
    check(firsts)
    check(agains)
    assert ends[0] == ends[1]


@pytest.mark.long(but=2)
@pytest.mark.parametrize("name", ["onebit-adam", "lamb", "marsit-sgd", "lion"])
def test_it_costs_one_exchange_in_the_first_step_and_none_later(name):
    def run(rank: int, transport: Transport) -> list[int]:
        model_state, state = saved(rank, name, 6, process_group=transport)
        model, optimizer = make(name, process_group=transport)
        train(optimizer, rank, range(1))
        optimizer.load_state_dict(state)
        model.load_state_dict(model_state)
        sent = [transport.traffic.collectives_total]
        for step in range(6, 10):
            train(optimizer, rank, range(step, step + 1))
            sent.append(transport.traffic.collectives_total)
        _, other = make(name, process_group=transport)
        train(other, rank, range(6))
        for step in range(6, 10):
            sent.append(transport.traffic.collectives_total)
            train(other, rank, range(step, step + 1))
        sent.append(transport.traffic.collectives_total)
        assert fingerprint(parameters(other)) == fingerprint(parameters(optimizer))
        return sent

    sent = simulate(run, 2)[0]
    loaded, running = ([b - a for a, b in itertools.pairwise(part)] for part in (sent[:5], sent[5:]))
    assert loaded == [running[0] + 1, *running[1:]]


def test_a_group_added_before_that_step_keeps_the_comparison():
    def run(rank: int, transport: Transport) -> tuple[str, str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        optimizer = fusedonebit.AdamW(list(model[0].named_parameters()), process_group=transport)
        train(optimizer, rank, range(3))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.add_param_group({"params": list(model[1].named_parameters())})
        if rank == 1:
            with torch.no_grad():
                model[0].weight[2, 3] += 0.5
        give_gradients(optimizer, rank, 3)
        return named(optimizer.step)

    for kind, text in simulate(run, 2):
        assert kind == "DisagreementError"
        assert "checksum of parameter 0 (weight)'s values is" in text


def test_a_gradscalers_overflow_in_that_step_does_not_lose_it():
    def run(rank: int, transport: Transport) -> tuple[str, str, bool]:
        model, optimizer, _ = loaded(rank, "onebit-adam", 6, process_group=transport)
        if rank == 1:
            spoil(model)
        before = fingerprint(parameters(optimizer))
        scaler = fusedonebit.amp.GradScaler("cpu")
        told = []
        for step in (6, 7):
            give_gradients(optimizer, rank, step)
            parameters(optimizer)[0].grad[0, 0] = float("inf") if step == 6 else 1.0
            scaler.scale(torch.ones(()))
            told.append(named(lambda: scaler.step(optimizer)))
        assert {kind for kind, _ in told} == {"DisagreementError"}
        return *told[-1], fingerprint(parameters(optimizer)) == before

    check(simulate(run, 2))


def test_in_the_midst_of_a_round_parameters_are_each_ranks_own():
    """What all had when it began is part of the checkpoint, and compared when that is loaded."""

    def run(rank: int, transport: Transport) -> list[str]:
        _, optimizer, _ = loaded(rank, "marsit-adam", 5, process_group=transport)
        ends = []
        for step in range(5, 8):
            train(optimizer, rank, range(step, step + 1))
            ends.append(fingerprint(parameters(optimizer)))
        return ends

    ours, theirs = simulate(run, 2)
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [True, False, True]


def under_ddp(rank: int, world_size: int, steps: int) -> tuple[str, str, bool]:
    """The bucket hook comes before the step."""
    model_state, state = saved(rank, "onebit-adam", steps)
    net, optimizer = make("onebit-adam")
    model = DistributedDataParallel(net)
    ddp.attach(model, optimizer)
    optimizer.load_state_dict(state)
    net.load_state_dict(model_state)
    if rank == 1:
        spoil(net)
    before = fingerprint(parameters(optimizer))

    def step() -> None:
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()

    return *named(step), fingerprint(parameters(optimizer)) == before


@pytest.mark.parametrize("steps", [1, 4])
def test_where_ddp_averages_it_is_found_as_well(steps):
    check(run_ranks(under_ddp, 2, steps))


def in_shards(rank: int, world_size: int) -> tuple[str, str, bool]:
    from sharded import Bag, make_mesh
    from torch.distributed.fsdp import fully_shard

    def new() -> tuple[nn.Module, OneBitAdam]:
        mesh = make_mesh()
        model = Bag([torch.ones(8, 3), torch.ones(6)])
        fully_shard(model, mesh=mesh["shard"])
        return model, OneBitAdam(
            model.parameters(), freeze_step=2, process_group=mesh["replicate"], faults=Faults(guard="off")
        )

    def step(model: nn.Module, optimizer: OneBitAdam, number: int) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p) * (1 + rank // 2 + number)
        optimizer.step()

    model, optimizer = new()
    for number in range(4):
        step(model, optimizer, number)
    model_state, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    model, optimizer = new()
    optimizer.load_state_dict(state)
    model.load_state_dict(model_state)
    if rank == 3:
        with torch.no_grad():
            list(model.parameters())[1].to_local()[1] += 1
    before: list[Tensor] = [p.to_local().clone() for p in model.parameters()]
    told = named(lambda: step(model, optimizer, 4))
    return *told, all(map(torch.equal, before, [p.to_local() for p in model.parameters()]))


@pytest.mark.long
def test_of_sharded_parameters_all_shards_are_told():
    ranks = run_ranks(in_shards, 4)
    for kind, text, still in ranks:
        assert kind == "DisagreementError"
        assert "the checksum of parameter 1's values is" in text
        assert still


def test_one_process_alone_compares_nothing():
    model, optimizer = make("onebit-adam")
    train(optimizer, 0, range(3))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    spoil(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, 0, range(3, 5))


# Those two make their gradients' buffer in a step.
HELD = {name: make for name, make in WAYS.items() if name not in ("Lamb", "OneBitMuon")}
HELD |= {f"{kind.__name__}, guarded": by_name(kind, freeze_step=2) for kind in (OneBitAdam, OneBitLamb)}
HELD |= {"OneBitAdam, masters": by_name(OneBitAdam, freeze_step=2, guard="off", master_weights=True)}


@pytest.mark.filterwarnings("ignore:after so few updates")
@pytest.mark.parametrize("name", HELD)
def test_a_loaded_optimizer_holds_as_many_bytes_as_the_saved_one(name):
    torch.manual_seed(0)
    saved, loaded = (HELD[name]([torch.nn.Parameter(torch.randn(30, 20))]) for _ in range(2))
    train(saved, 0, range(6))
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    if "living" in name:  # v is loaded in floats, and takes a byte when it was renewed
        for optimizer in (saved, loaded):
            train(optimizer, 0, range(6, 8))
    assert loaded.stats()["state_bytes"] == saved.stats()["state_bytes"]
