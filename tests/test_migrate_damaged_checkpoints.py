"""``load_deepspeed`` on damaged checkpoints, and on what is none: one clear error on every rank, nothing changed."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from typing import Any

import deepspeed_runs as ds
import pytest
import torch
from ranks import run_ranks

from fusedonebit import OneBitAdam, OneBitLamb
from fusedonebit.deepspeed import load_deepspeed

SHAPE = ds.make()[0].shape
FREEZE = 5
LAMB = {"lamb_coeff_freeze": 0.5, "last_factor": 1.0, "scaling_coeff": 0.75}

pytestmark = pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")


def one(value: Any) -> torch.Tensor:
    """A moment of the first parameter with one such element."""
    moment = torch.ones(SHAPE)
    moment[1, 2] = value
    return moment


def state(key: str, value: Any) -> Callable[[dict], Any]:
    return lambda saved: saved["state"][0].update({key: value})


def group(key: str, value: Any) -> Callable[[dict], Any]:
    return lambda saved: saved["param_groups"][0].update({key: value})


def whole(key: str, value: Any) -> Callable[[dict], Any]:
    return lambda saved: saved | {key: value}


def inner(key: str, value: Any) -> Callable[[dict], Any]:
    return lambda saved: {"optimizer_state_dict": saved, key: value}


def engine(key: str, value: Any) -> Callable[[dict], Any]:
    return lambda saved: ds.engine(saved) | {key: value}


def without(key: str) -> Callable[[dict], Any]:
    def remove(saved: dict) -> None:
        for each in saved["state"].values():
            del each[key]

    return remove


NUMBERS = torch.ones(SHAPE)
DAMAGED: dict[str, tuple[Callable[[dict], Any], str]] = {
    "NaN in the momentum": (state("exp_avg", one(torch.nan)), "exp_avg of parameter 0 .* must be finite, but 1 of"),
    "Inf in the momentum": (state("exp_avg", one(torch.inf)), "exp_avg of parameter 0 .* must be finite, but 1 of"),
    "NaN in the variance": (state("exp_avg_sq", one(torch.nan)), "exp_avg_sq of parameter 0 .* finite and >= 0, but 1"),
    "negative variance": (state("exp_avg_sq", one(-1e-9)), "exp_avg_sq of parameter 0 .* finite and >= 0, but 1 of"),
    "beyond float32": (state("exp_avg", NUMBERS.double() * 1e300), "exp_avg of parameter 0 .* but 1280 of 1280"),
    "whole numbers": (state("exp_avg", NUMBERS.int()), "must be a dense tensor of .*, got torch.int"),
    "complex numbers": (state("exp_avg", NUMBERS + 1j), "must be a dense tensor of .*, got torch.complex"),
    "sparse": (state("exp_avg", NUMBERS.to_sparse()), "must be a dense tensor of .*, got .*sparse"),
    "without memory": (state("exp_avg", NUMBERS.to("meta")), "must be a dense tensor of .*, on meta"),
    "transposed": (state("exp_avg", NUMBERS.T), r"parameter 0 has shape \(32, 40\), this parameter \(40, 32\)"),
    "too long": (state("exp_avg_sq", torch.ones(1281)), "exp_avg_sq of parameter 0 has 1281 elements"),
    "too short": (state("exp_avg", torch.zeros(7)), "exp_avg of parameter 0 has 7 elements, these parameters 1280"),
    "no tensor": (state("exp_avg", 3), "exp_avg of parameter 0 in the checkpoint must be a tensor, got int"),
    "LAMB's": (state("lamb_coeff_freeze", 0.5), "is of DeepSpeed's OneBitLamb, which OneBitAdam can't go on from"),
    "ZeRO's": (lambda saved: ds.engine(None), "ZeRO and DeepSpeed's bf16 wrapper write it cut by rank"),
    "no variance": (without("exp_avg_sq"), "the checkpoint lacks the key 'exp_avg_sq'"),
    "no momentum": (without("exp_avg"), "a run before its first step"),
    "no step": (without("step"), "the checkpoint lacks the key 'step'"),
    "step in words": (state("step", "nine"), "step of parameter 0 in the checkpoint must be a number, got str"),
    "step of NaN": (state("step", float("nan")), "step of parameter 0 .* finite number >= 0, got nan"),
    "step below 0": (state("step", -5), "step of parameter 0 .* finite number >= 0, got -5"),
    "half a step": (state("step", 2.5), "step of parameter 0 .* must be a whole number, got 2.5"),
    "step beyond all": (state("step", 10**400), "step of parameter 0 .* finite number >= 0, got 1000"),
    "step of two": (state("step", torch.ones(2)), "step of parameter 0 .* must be a number, got Tensor"),
    "no states": (whole("state", {}), "a run before its first step"),
    "states in a list": (whole("state", [1, 2]), "state in the checkpoint must be a dict, got list"),
    "states of None": (whole("state", None), "state in the checkpoint must be a dict, got NoneType"),
    "state of an int": (whole("state", {0: 3, 1: 4}), "the state of parameter 0 .* must be a dict, got int"),
    "groups in a dict": (whole("param_groups", {}), "param_groups in the checkpoint must be a list, got dict"),
    "groups of None": (whole("param_groups", None), "param_groups in the checkpoint must be a list, got NoneType"),
    "two groups": (
        lambda saved: saved | {"param_groups": saved["param_groups"] * 2},
        "the checkpoint has 2 parameter groups, this optimizer 1",
    ),
    "group of an int": (whole("param_groups", [3]), "a group in the checkpoint must be a dict, got int"),
    "group without parameters": (whole("param_groups", [{"lr": 1.0}]), "the checkpoint lacks the key 'params'"),
    "too few parameters": (group("params", [0]), "the checkpoint's group 0 has 1 parameters, this optimizer's 2"),
    "params of an int": (group("params", 3), "params in the checkpoint must be a list, got int"),
    "params in lists": (group("params", [[0], [1]]), "params in the checkpoint must be a number, got list"),
    "a parameter twice": (group("params", [0, 0]), "exp_avg of parameter 1 has 1280 elements, these parameters 96"),
    "lr of NaN": (group("lr", float("nan")), "lr must be a finite number >= 0, got nan"),
    "betas of an int": (group("betas", 3), "betas must be two numbers"),
    "decay without end": (group("weight_decay", float("inf")), "weight_decay must be a finite number >= 0, got inf"),
    "optimizer of an int": (lambda saved: {"module": {}, "optimizer": 3}, "optimizer .* must be a dict, got int"),
    "no weights in a list": (inner("fp32_groups_flat", 3), "fp32_groups_flat .* must be a list, got int"),
    "too few groups of weights": (inner("fp32_groups", []), "has 1 parameter groups, but 0 groups of weights"),
    "too few weights": (inner("fp32_groups", [[NUMBERS]]), "group 0 has weights of 1 parameters"),
    "NaN in the weights": (
        inner("fp32_groups", [[one(torch.nan), torch.ones(96)]]),
        "weights of parameter 0 in the checkpoint must be finite, but 1 of 1280",
    ),
    "scale in words": (inner("cur_scale", "x"), "cur_scale in the checkpoint must be a number, got str"),
    "scale of NaN": (inner("cur_scale", float("nan")), "cur_scale .* must be a finite number >= 0, got nan"),
    "schedule of an int": (engine("lr_scheduler", 3), "lr_scheduler in the checkpoint must be a dict, got int"),
    "schedule in words": (
        engine("lr_scheduler", {"last_batch_iteration": "x"}),
        "last_batch_iteration in the checkpoint must be a number, got str",
    ),
    "freeze below 0": (
        engine("ds_config", {"optimizer": {"params": {"freeze_step": -7}}}),
        "freeze_step of ds_config in the checkpoint must be a finite number >= 0, got -7",
    ),
    "something else": (lambda saved: {"epoch": 3, "weights": 4}, "but its keys are epoch, weights"),
    "nothing": (lambda saved: {}, "must be of DeepSpeed's engine or optimizer"),
    "a model's weights": (lambda saved: {"layer.weight": NUMBERS}, "must be of DeepSpeed's engine or optimizer"),
    "other weights for the model": (engine("module", {"weight": NUMBERS}), "Error.s. in loading state_dict"),
    "no weights for the model": (engine("module", None), "module in the checkpoint must be a dict, got NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGED)
def test_damaged_checkpoint_is_one_error_and_changes_nothing(how):
    damage, says = DAMAGED[how]
    params = ds.make()
    saved = ds.by_hand(9, params, frozen=True)
    damaged = damage(saved)
    saved = saved if damaged is None else damaged
    model = torch.nn.ParameterList(params)
    optimizer = OneBitAdam(params, freeze_step=FREEZE)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["param_groups"]))
    with pytest.raises((TypeError, ValueError), match=says) as caught:
        load_deepspeed(optimizer, saved, model if "module" in saved else None)
    assert "\n" not in str(caught.value)
    assert optimizer.stats()["step"] == 0
    assert optimizer.state_dict()["param_groups"] == before[1]
    assert all(
        torch.equal(now, then) for now, then in zip(model.state_dict().values(), before[0].values(), strict=True)
    )


@pytest.mark.parametrize("value", ["x", float("nan"), -1.0, [1], None, torch.ones(3)], ids=str)
@pytest.mark.parametrize("key", ["lamb_coeff_freeze", "scaling_coeff"])
def test_damaged_coefficient_of_lamb_is_named(key, value):
    params = ds.make()
    saved = ds.by_hand(9, params, frozen=True, **LAMB)
    saved["state"][0][key] = value
    optimizer = OneBitLamb(params, freeze_step=FREEZE)
    with pytest.raises((TypeError, ValueError), match=f"{key} in the checkpoint must be a (finite )?number"):
        load_deepspeed(optimizer, saved)
    assert optimizer.stats()["step"] == 0


OTHERS: dict[str, tuple[Callable[[dict, int], Any], str]] = {
    **{how: (lambda saved, rank, how=how: DAMAGED[how][0](saved) if rank else None, DAMAGED[how][1])
       for how in ("NaN in the momentum", "negative variance", "lr of NaN", "states of None", "too short")},
    "other moments": (
        lambda saved, rank: saved["state"][1].update(exp_avg_sq=torch.full((96,), 1.0 + rank)),
        "exp_avg_sq of parameter 1 is .* on rank 0 but .* on rank 1; load, on every rank",
    ),
    "other weights": (lambda saved, rank: ds.fused(saved, [p + rank for p in ds.make()]), "the checksum of master of"),
}  # fmt: skip
"""What ranks read, where one of them reads something else."""


def loaded(rank: int, world_size: int, how: str) -> str:
    params = ds.make()
    saved = ds.by_hand(9, params, frozen=True)
    try:
        load_deepspeed(OneBitAdam(params, freeze_step=FREEZE), OTHERS[how][0](saved, rank) or saved)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


@pytest.mark.parametrize("how", OTHERS)
def test_what_one_rank_reads_alone_is_an_error_on_every_rank(how):
    said = run_ranks(loaded, 2, how)
    assert all(re.search(OTHERS[how][1], line) for line in said), said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "can't be read as plain tensors and values"),
        (b"\x00" * 1000, "can't be read as plain tensors and values"),
        (b"PK\x03\x04" + bytes(100), "can't be read as plain tensors and values"),
        (None, "must be a folder that DeepSpeed wrote, or a file of it"),
    ],
    ids=["empty", "zeros", "a cut archive", "a pipe"],
)
def test_file_that_is_no_checkpoint_is_named(content, says, tmp_path):
    path = tmp_path / "mp_rank_00_model_states.pt"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} {says}"):
        load_deepspeed(OneBitAdam(ds.make(), freeze_step=FREEZE), path)


@pytest.mark.parametrize("tag", ["../elsewhere", "/etc", "a/b", ".."])
def test_latest_that_names_no_folder_beside_it_is_not_followed(tag, tmp_path):
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(ValueError, match="latest must hold the name of a folder beside it"):
        load_deepspeed(OneBitAdam(ds.make(), freeze_step=FREEZE), tmp_path)
