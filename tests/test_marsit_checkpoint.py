"""Marsit resumes where it was, also within a round, and refuses what is another run's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from marsit_rounds import EACH, EACH_PLACE, MARSIT, kept, make, own_state, set_gradients, train
from observe import caught, change_header, fingerprint, parameters, through_a_file
from ranks import run_ranks, simulate

from fusedonebit import (
    DisagreementError,
    FusedOneBitWarning,
    MarsitAdam,
    MarsitSGD,
    Rounds,
)
from fusedonebit.comm import Transport
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.sharding import local

STEPS = 16


def resume(
    rank: int, transport: Transport | None, name: str, cut: int, dtype: torch.dtype, options: dict
) -> tuple[bool, ...]:
    """Trains straight through, with a NaN in steps 1 and 7, and again from what was saved after ``cut`` steps."""

    def take(optimizer: DistributedOptimizer, step: int) -> None:
        set_gradients(optimizer, rank, step)
        if step in (1, 7) and rank == 1:
            parameters(optimizer)[0].grad[0, 0] = float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedOneBitWarning)
            optimizer.step()

    straight, prints = MARSIT[name](make(dtype), 1e-2, weight_decay=0.1, process_group=transport, **options), []
    for step in range(STEPS):
        if step == cut:
            values = [p.detach().clone() for p in parameters(straight)]
            saved = through_a_file({"optimizer": straight.state_dict(), "params": values})
            phase = straight.phase
        take(straight, step)
        prints.append(fingerprint(parameters(straight)))

    resumed = MARSIT[name](make(dtype), 0.5, process_group=transport, **options)
    with torch.no_grad():
        for p, value in zip(parameters(resumed), saved["params"], strict=True):
            p.copy_(value)
    resumed.load_state_dict(saved["optimizer"])
    same_phase, again = resumed.phase == phase, []
    for step in range(cut, STEPS):
        take(resumed, step)
        again.append(fingerprint(parameters(resumed)))
    told = [{k: v for k, v in o.stats().items() if k != "bytes_total"} for o in (straight, resumed)]
    assert told[0]["skipped_steps"] == 2
    return again == prints[cut:], own_state(straight) == own_state(resumed), told[0] == told[1], same_phase


def resume_on_gloo(rank: int, world_size: int, *arguments: Any) -> tuple[bool, ...]:
    return resume(rank, None, *arguments)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("cut", [1, 3, 8])
@EACH_PLACE
@EACH
def test_resuming_continues_bit_for_bit(name, topology, world_size, cut):
    """Round 0 is one of full precision, round 1 is skipped."""
    options = {"topology": topology, "full_precision_every": 6}
    for result in simulate(resume, world_size, name, cut, torch.float32, options):
        assert result == (True, True, True, True)


@pytest.mark.long
@EACH
def test_resuming_in_processes_continues_bit_for_bit(name):
    """What is a rank's own is a row of a DTensor there."""
    for result in run_ranks(resume_on_gloo, 2, name, 8, torch.float32, {"full_precision_every": 6}):
        assert result == (True, True, True, True)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("cut", [3, 7, 8])
@pytest.mark.parametrize("options", [{}, {"master_weights": True}], ids=["plain", "masters"])
@EACH_PLACE
def test_resuming_within_a_round_continues_bit_for_bit(topology, world_size, options, cut):
    """After 8 steps one rank already has the NaN for which all will skip the round."""
    options = options | {"topology": topology, "full_precision_every": 2, "local_steps": 3}
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    for result in simulate(resume, world_size, "sgd", cut, dtype, options):
        assert result == (True, True, True, True)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("options", [{"max_grad_norm": 0.5}, {"momentum": 0.0}, {"stochastic_rounding": True}], ids=str)
def test_resuming_keeps_other_options(options):
    for result in simulate(resume, 2, "sgd", 5, torch.bfloat16, {"full_precision_every": 4} | options):
        assert result == (True, True, True, True)


def load_wrong(rank: int, world_size: int, case: str) -> tuple[type | None, str, bool]:
    saver = MarsitAdam(make(), rounds=Rounds(local_steps=3)) if case != "algorithm" else MarsitSGD(make())
    train(saver, rank, 4)
    saved = through_a_file(saver.state_dict())
    if case == "rank":
        local(saved["state"][0]["rank"]).fill_(1 - rank)
    elif case == "no rank":
        del saved["state"][0]["rank"]
    elif case in ("world_size", "within a round"):
        change_header(saved, lambda header: header.update(world_size=3, local=int(case == "within a round")))
    elif case == "one rank's":
        local(saved["state"][0]["rank"]).zero_()
    elif case == "moment" and rank == 1:
        change_header(saved, lambda header: header.update(updates=header["updates"] + 1))
    elif case == "torch":
        adamw = torch.optim.AdamW(make())
        for p in parameters(adamw):
            p.grad = torch.ones_like(p)
        adamw.step()
        saved = adamw.state_dict()
    optimizer = MarsitAdam(make(), rounds=Rounds(local_steps=3 if case != "local steps" else 1))
    before = optimizer.state_dict()
    outcome = caught(lambda: optimizer.load_state_dict(saved))
    still = fingerprint(kept(optimizer)) == fingerprint([local(s["compensation"]) for s in before["state"].values()])
    train(optimizer, rank, 3)
    return *outcome, still and optimizer.stats()["step"] == 3


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("rank", "the checkpoint's rank is 1, but here it is 0"),
        ("no rank", "state_dict lacks the key 'rank'"),
        (
            "world_size",
            "the checkpoint's world_size is 3, but here it is 2, and this is one rank's file; save and load",
        ),
        ("within a round", "it was written after 1 local steps of a round, whose parameters differ from rank to rank"),
        ("one rank's", "the checkpoint's rank is 0, but here it is 1"),
        ("algorithm", "the checkpoint must be of MarsitAdam, got MarsitSGD"),
        ("torch", "the checkpoint must be of MarsitAdam, got one of torch.optim"),
        ("moment", "the checkpoint's updates is 4 on rank 0 but 5 on rank 1"),
        ("local steps", "written after 1 local steps of a round, but local_steps is 1"),
    ],
)
def test_another_runs_checkpoint_is_refused_and_changes_nothing(case, text):
    results = run_ranks(load_wrong, 2, case, group_timeout=10)
    assert any(text in message for _, message, _ in results)
    for kind, _, still in results:
        assert issubclass(kind, ValueError)
        assert still
    if case == "one rank's":
        assert results[0][0] is DisagreementError
        assert text in results[0][1]


def test_sgd_without_momentum_saves_none_and_loads_what_had_some():
    def made(momentum: float) -> MarsitSGD:
        return MarsitSGD(make(), 1e-2, momentum=momentum)

    def names(optimizer: MarsitSGD) -> list[str]:
        return sorted(optimizer.state_dict()["state"][0])

    with_momentum, later_without, without = made(0.9), made(0.9), made(0.0)
    for optimizer in (with_momentum, without):
        train(optimizer, 0, 3)
    assert "momentum_buffer" in names(with_momentum)
    for group in (*with_momentum.param_groups, *later_without.param_groups):
        group["momentum"] = 0.0
    later_without.load_state_dict(without.state_dict())
    assert names(later_without) == names(without) == ["compensation", "rank", "step"]
    train(with_momentum, 0, 4, 3)
    assert names(with_momentum) == ["compensation", "rank", "step"]


def change_local_steps(rank: int, world_size: int) -> tuple[bool, list[str], list[str]]:
    one = MarsitSGD(make(), 1e-2, rounds=Rounds(full_precision_every=0))
    train(one, rank, 3)
    saved = through_a_file(one.state_dict())
    names = sorted(saved["state"][0])
    three = MarsitSGD(parameters(one), 1e-2, rounds=Rounds(full_precision_every=0, local_steps=3))
    three.load_state_dict(saved)
    train(three, rank, 6, 3)
    between = sorted(three.state_dict()["state"][0])
    return names == between, names, fingerprint(parameters(three))


def test_between_rounds_a_checkpoint_fits_any_local_steps():
    results = run_ranks(change_local_steps, 2)
    assert all(same for same, _, _ in results)
    assert results[0][1] == ["compensation", "momentum_buffer", "rank", "step"]
    assert results[0][2] == results[1][2]
