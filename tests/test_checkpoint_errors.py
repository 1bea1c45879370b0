"""A wrong checkpoint raises on every rank and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_runs import make, saved_state, step_once
from observe import change_header, fingerprint, named, observe, parameters, through_a_file
from optimizers import ADAM_AND_LAMB, EACH, construct
from ranks import run_ranks
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import MarsitSGD
from fusedonebit.checkpoint import KEY, forget_checksums, header_of
from fusedonebit.core.optimizer import DistributedOptimizer

Change = Callable[[int, list[dict]], dict]
"""What a rank loads, of the files that all have saved."""


def load_wrong(
    rank: int, world_size: int, name: str, which: str, files: list[dict], options: dict | None = None
) -> list[tuple[str, str]]:
    """Loads what is wrong; returns the errors' types and texts. All stays as before, and training goes on."""
    optimizer = construct(name, make(), lr=1e-2, freeze_step=3, **options or {})
    for step in range(6):
        step_once(optimizer, rank, step)
    before, groups, told = observe(optimizer), described(optimizer), []
    for text, change in WRONG[name] if which == "wrong" else [(which, {"own": OWN, "rank 0's": RANK_0S}[which])]:
        mine = change(rank, copy.deepcopy(files))
        told.append(named(lambda mine=mine: optimizer.load_state_dict(mine)))
        after = observe(optimizer)
        assert all(np.array_equal(before[key], after[key]) for key in before), text
        assert described(optimizer) == groups, text
        assert optimizer.stats()["step"] == 5, text
    step_once(optimizer, rank, 6)
    assert optimizer.stats()["step"] == 6
    return told


def described(optimizer: DistributedOptimizer) -> tuple[list[dict], dict]:
    """The groups, and the header without what agreeing on an error has sent."""
    saved = optimizer.state_dict()
    groups = [{key: value for key, value in group.items() if key != KEY} for group in saved["param_groups"]]
    return copy.deepcopy(groups), header_of(saved) | {"bytes_total": None}


def changed(change: Callable[[dict, int], Any], on: tuple[int, ...] = (0, 1)) -> Change:
    """The rank's own file, which ``change`` has changed on these ranks."""

    def made(rank: int, files: list[dict]) -> dict:
        if rank in on:
            change(files[rank], rank)
        return files[rank]

    return made


def state_of(file: dict) -> dict[str, Tensor]:
    return file["state"][0]


def lacks(key: str, tensor: int = 0, **on: Any) -> Change:
    return changed(lambda file, _: file["state"][tensor].pop(key), **on)


def header(change: Callable[[dict, int], object]) -> Change:
    return changed(lambda file, rank: change_header(file, lambda header: change(header, rank)))


def short(key: str) -> Change:
    return changed(lambda file, _: state_of(file).update({key: state_of(file)[key][:, :-1]}))


def off_on_rank_1(key: str, at: Any) -> Change:
    def change(file: dict, rank: int) -> None:
        state_of(file)[key][at] += rank * 1e-3
        forget_checksums(file)

    return changed(change)


def long_last_scale(file: dict, rank: int) -> None:
    scale = state_of(file)["exp_avg_last_scale"]
    state_of(file)["exp_avg_last_scale"] = torch.cat([scale, scale[:, : rank * 2]], dim=1)


def as_version_1_wrote_it(rank: int, files: list[dict]) -> dict:
    del files[rank]["param_groups"][0]["fusedonebit"]
    return files[rank] | {"fusedonebit": {"format": 1, "phase": "compression"}}


OWN, RANK_0S = changed(lambda *_: None), lambda rank, files: files[0]
FOR_ANY: list[tuple[str, Change]] = [
    ("rank is 0, but here it is 1; each rank must load the file that it saved", RANK_0S),
    ("state_dict lacks the key 'worker_error'", lacks("worker_error", on=(1,))),
    (
        "steps is 6 on rank 0 but 7 on rank 1 ... of the same moment",
        header(lambda h, rank: h.update(steps=h["steps"] + rank)),
    ),
    ("checksum of exp_avg_sq of parameter 0 ... of the same moment", off_on_rank_1("exp_avg_sq", (3, 4))),
]
FOR_ADAM: list[tuple[str, Change]] = [
    (
        "checkpoint of another model: its groups have [8] parameters ... [9]",
        changed(lambda file, _: file["param_groups"][0]["params"].pop()),
    ),
    (
        "checkpoint of another model ... exp_avg_sq of parameter 0 ... (33, 40), got (40, 33)",
        changed(lambda file, _: state_of(file).update(exp_avg_sq=torch.zeros(40, 33))),
    ),
    ("state_dict lacks the key 'worker_error'", lacks("worker_error")),
    (
        "worker_error in the checkpoint must have 4096 columns, got (2, 1, 2048)",
        changed(lambda file, _: state_of(file).update(worker_error=state_of(file)["server_error"]), on=(1,)),
    ),
    ("state_dict lacks the key 'exp_avg_bits'", lacks("exp_avg_bits")),
    ("exp_avg_bits in the checkpoint must have 512 columns, got (1, 511)", short("exp_avg_bits")),
    ("checkpoint format must be 2, got 99", header(lambda h, _: h.update(format=99))),
    ("checkpoint format must be 2, got 1; use the version that wrote it", as_version_1_wrote_it),
    ("the checkpoint's header is damaged", changed(lambda file, _: file["param_groups"][0].update(fusedonebit="{"))),
    (
        "lr must be a finite number >= 0, got -1.0 in group 0 of the checkpoint",
        changed(lambda file, _: file["param_groups"][0].update(lr=-1.0)),
    ),
    ("state_dict lacks the key 'param_groups'; load the state_dict() of OneBitAdam", lambda rank, files: {"model": 1}),
]
FOR_LAMB: list[tuple[str, Change]] = [
    ("state_dict lacks the key 'exp_avg_sq_fresh'", lacks("exp_avg_sq_fresh", 2)),
    ("checksum of exp_avg_sq_fresh of parameter 0 ... of the same moment", off_on_rank_1("exp_avg_sq_fresh", (3, 4))),
    ("exp_avg_last_bits in the checkpoint must have 512 columns, got (1, 511)", short("exp_avg_last_bits")),
    ("exp_avg_last_scale in the checkpoint must have 32 columns, got (1, 34)", changed(long_last_scale)),
    ("checksum of layer of parameter 0 ... of the same moment", off_on_rank_1("layer", 0)),
    (
        "layer of parameter 0 must have shape (3,), got (4,)",
        changed(lambda file, _: state_of(file).update(layer=torch.ones(4))),
    ),
    ("state_dict lacks the key 'layer'", lacks("layer")),
    (
        "r_min must be at most r_max, got 0.5 > 0.25 in group 0 of the checkpoint",
        changed(lambda file, _: file["param_groups"][0].update(r_max=0.25)),
    ),
]
WRONG = {"onebit-adam": FOR_ANY + FOR_ADAM, "onebit-lamb": FOR_ANY + FOR_LAMB}


@cache
def files_of(world_size: int, name: str) -> list[dict]:
    """What each rank has saved; ranks get copies of it."""
    return run_ranks(saved_state, world_size, name, torch.float32)


def check(told: list[tuple[str, str]], text: str) -> None:
    """Whether each rank was told all parts of the text."""
    for kind, message in told:
        assert kind in ("ValueError", "DisagreementError")
        assert all(part in message for part in text.split(" ... ")), (text, message)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_checkpoints_raise_on_all_ranks_and_change_nothing(name):
    results = run_ranks(load_wrong, 2, name, "wrong", files_of(2, name), group_timeout=10)
    for (text, _), *told in zip(WRONG[name], *results, strict=True):
        check(told, text)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("saved_by", "name", "text"),
    [
        ("onebit-lamb", "lamb", "the checkpoint's algorithm is OneBitLamb, but here it is Lamb"),
        ("onebit-lamb", "onebit-adam", "the checkpoint's algorithm is OneBitLamb, but here it is OneBitAdam"),
        ("onebit-adam", "onebit-lamb", "the checkpoint's algorithm is OneBitAdam, but here it is OneBitLamb"),
        ("onebit-lamb-frozen", "onebit-lamb", "layerwise='frozen', but here it is 'adaptive'"),
    ],
)
def test_another_algorithms_checkpoint_raises_and_is_not_loaded(saved_by, name, text):
    results = run_ranks(load_wrong, 2, name, "own", files_of(2, saved_by), group_timeout=10)
    check([told for (told,) in results], text)


@pytest.mark.long(but=1)
@ADAM_AND_LAMB
@pytest.mark.parametrize("option", ["precondition", "ternary"])
@pytest.mark.parametrize("value", [False, True])
def test_another_settings_checkpoint_raises_and_is_not_loaded(name, value, option):
    was, now = {option: not value}, {option: value}
    files = run_ranks(saved_state, 2, name, torch.float32, was)
    results = run_ranks(load_wrong, 2, name, "own", files, now, group_timeout=10)
    check([told for (told,) in results], f"written with {option}={not value}, but here it is {value}")


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("was", "now"), [(2, 1), (2, 4), (4, 2)])
def test_one_ranks_file_of_another_world_size_says_so(was, now):
    files = files_of(was, "onebit-adam")
    results = run_ranks(load_wrong, now, "onebit-adam", "rank 0's", files, group_timeout=10)
    way_out = "through torch.distributed.checkpoint (fusedonebit.dcp), or resume with as many ranks"
    text = f"world_size is {was}, but here it is {now}, and this is one rank's file ... {way_out}"
    check([told for (told,) in results], text)


def warmup_at_another_world_size(rank: int, world_size: int, name: str, saved: dict) -> tuple[str, Tensor, list]:
    optimizer = construct(name, make(), freeze_step=100)
    optimizer.load_state_dict(saved)
    assert optimizer.stats()["step"] == 2
    layers = observe(optimizer)["layer"].tolist()
    step_once(optimizer, 7, 5)
    return fingerprint(parameters(optimizer)), optimizer.state[parameters(optimizer)[0]]["exp_avg"].clone(), layers


@pytest.mark.long(but=2)
@EACH
def test_a_checkpoint_of_the_warmup_loads_at_any_world_size(name):
    optimizer = construct(name, make(), freeze_step=100)
    for step in range(2):
        step_once(optimizer, 0, step)
    saved, layers = through_a_file(optimizer.state_dict()), observe(optimizer)["layer"].tolist()
    results = [run_ranks(warmup_at_another_world_size, world_size, name, saved)[0] for world_size in (1, 2)]
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert layers == results[0][2] == results[1][2]
    assert bool(layers) == ("lamb" in name)


@pytest.mark.parametrize("name", ["onebit-adam", "lamb"])
@pytest.mark.parametrize("steps", [0, 2])
def test_checkpoints_that_cannot_be_gone_on_from_are_told_apart(name, steps):
    def stepped(make: Callable[[list[Parameter]], Any]) -> dict:
        params = [Parameter(torch.ones(4))]
        saver = make(params)
        for _ in range(steps):
            params[0].grad = torch.ones(4)
            saver.step()
        return saver.state_dict()

    of_marsit = stepped(lambda params: MarsitSGD(params, lr=0.1))
    of_torch = stepped(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    optimizer = construct(name, [Parameter(torch.ones(4))], freeze_step=5)
    with pytest.raises(ValueError, match="MarsitSGD"):
        optimizer.load_state_dict(of_marsit)
    with pytest.raises(ValueError, match=r"or torch.optim.AdamW, but group 0 has no betas, only .*momentum"):
        optimizer.load_state_dict(of_torch)
    assert optimizer.param_groups[0]["lr"] != 0.1
