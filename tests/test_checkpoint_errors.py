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
from observe import change_header, fingerprint, observe, parameters, through_a_file
from optimizers import ADAM_AND_LAMB, EACH, construct
from ranks import run_ranks
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import MarsitSGD
from fusedonebit.checkpoint import KEY, forget_checksums, header_of
from fusedonebit.core.optimizer import DistributedOptimizer


def load_wrong(
    rank: int, world_size: int, name: str, make_wrong: str, files: list[dict], options: dict | None = None
) -> tuple[str, str, bool]:
    """Loads; returns the error's type and text, and whether everything is as before and training goes on."""
    optimizer = construct(name, make(), lr=1e-2, freeze_step=3, **options or {})
    for step in range(6):
        step_once(optimizer, rank, step)
    before, groups = observe(optimizer), described(optimizer)
    try:
        optimizer.load_state_dict(globals()[make_wrong](rank, copy.deepcopy(files)))
        outcome = ("", "")
    except Exception as error:
        outcome = (type(error).__name__, str(error))
    after = observe(optimizer)
    unchanged = all(np.array_equal(before[key], after[key]) for key in before)
    unchanged &= described(optimizer) == groups and optimizer.stats()["step"] == 5
    step_once(optimizer, rank, 6)
    return *outcome, unchanged and optimizer.stats()["step"] == 6


def described(optimizer: DistributedOptimizer) -> tuple[list[dict], dict]:
    """The groups, and the header without what agreeing on an error has sent."""
    saved = optimizer.state_dict()
    groups = [{key: value for key, value in group.items() if key != KEY} for group in saved["param_groups"]]
    return copy.deepcopy(groups), header_of(saved) | {"bytes_total": None}


def rank_0s_file(rank: int, files: list[dict]) -> dict:
    return files[0]


def fewer_parameters(rank: int, files: list[dict]) -> dict:
    files[rank]["param_groups"][0]["params"].pop()
    return files[rank]


def other_shape(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["exp_avg_sq"] = torch.zeros(40, 33)
    return files[rank]


def lacks_a_key(rank: int, files: list[dict]) -> dict:
    del files[rank]["state"][0]["worker_error"]
    return files[rank]


def swapped_residual_on_rank_1(rank: int, files: list[dict]) -> dict:
    if rank == 1:
        files[rank]["state"][0]["worker_error"] = files[rank]["state"][0]["server_error"]
    return files[rank]


def lacks_a_key_on_rank_1(rank: int, files: list[dict]) -> dict:
    return lacks_a_key(rank, files) if rank == 1 else files[rank]


def other_moment_on_rank_1(rank: int, files: list[dict]) -> dict:
    change_header(files[rank], lambda header: header.update(steps=header["steps"] + rank))
    return files[rank]


def other_variance_on_rank_1(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["exp_avg_sq"][3, 4] += rank * 1e-3
    forget_checksums(files[rank])
    return files[rank]


def other_format(rank: int, files: list[dict]) -> dict:
    change_header(files[rank], lambda header: header.update(format=99))
    return files[rank]


def as_version_1_wrote_it(rank: int, files: list[dict]) -> dict:
    del files[rank]["param_groups"][0]["fusedonebit"]
    return files[rank] | {"fusedonebit": {"format": 1, "phase": "compression"}}


def header_is_no_json(rank: int, files: list[dict]) -> dict:
    files[rank]["param_groups"][0]["fusedonebit"] = "{"
    return files[rank]


def bad_lr(rank: int, files: list[dict]) -> dict:
    files[rank]["param_groups"][0]["lr"] = -1.0
    return files[rank]


def lacks_bits(rank: int, files: list[dict]) -> dict:
    del files[rank]["state"][0]["exp_avg_bits"]
    return files[rank]


def short_bits(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["exp_avg_bits"] = files[rank]["state"][0]["exp_avg_bits"][:, :-1]
    return files[rank]


def not_a_checkpoint(rank: int, files: list[dict]) -> dict:
    return {"model": 1}


def own_file(rank: int, files: list[dict]) -> dict:
    return files[rank]


def lacks_the_fresh_variance(rank: int, files: list[dict]) -> dict:
    del files[rank]["state"][2]["exp_avg_sq_fresh"]
    return files[rank]


def other_fresh_variance_on_rank_1(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["exp_avg_sq_fresh"][3, 4] += rank * 1e-3
    forget_checksums(files[rank])
    return files[rank]


def short_last_bits(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["exp_avg_last_bits"] = files[rank]["state"][0]["exp_avg_last_bits"][:, :-1]
    return files[rank]


def long_last_scale_on_rank_1(rank: int, files: list[dict]) -> dict:
    scale = files[rank]["state"][0]["exp_avg_last_scale"]
    files[rank]["state"][0]["exp_avg_last_scale"] = torch.cat([scale, scale[:, : rank * 2]], dim=1)
    return files[rank]


def other_layers_on_rank_1(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["layer"][0] *= 1 + rank
    forget_checksums(files[rank])
    return files[rank]


def layers_of_another_model(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["layer"] = torch.ones(4)
    return files[rank]


def lacks_layers(rank: int, files: list[dict]) -> dict:
    del files[rank]["state"][0]["layer"]
    return files[rank]


def bad_r_max(rank: int, files: list[dict]) -> dict:
    files[rank]["param_groups"][0]["r_max"] = 0.25
    return files[rank]


FOR_ANY = {
    "rank_0s_file": ["rank is 0, but here it is 1; each rank must load the file that it saved itself"],
    "lacks_a_key_on_rank_1": ["state_dict lacks the key 'worker_error'"],
    "other_moment_on_rank_1": ["steps is 6 on rank 0 but 7 on rank 1", "of the same moment"],
    "other_variance_on_rank_1": ["checksum of exp_avg_sq of parameter 0", "of the same moment"],
}
FOR_ADAM = {
    "fewer_parameters": ["checkpoint of another model: its groups have [8] parameters", "[9]"],
    "other_shape": ["checkpoint of another model", "exp_avg_sq of parameter 0", "(33, 40), got (40, 33)"],
    "lacks_a_key": ["state_dict lacks the key 'worker_error'"],
    "swapped_residual_on_rank_1": ["worker_error in the checkpoint must have 4096 columns, got (2, 1, 2048)"],
    "lacks_bits": ["state_dict lacks the key 'exp_avg_bits'"],
    "short_bits": ["exp_avg_bits in the checkpoint must have 512 columns, got (1, 511)"],
    "other_format": ["checkpoint format must be 2, got 99"],
    "as_version_1_wrote_it": ["checkpoint format must be 2, got 1; use the version that wrote it"],
    "header_is_no_json": ["the checkpoint's header is damaged"],
    "bad_lr": ["lr must be a finite number >= 0, got -1.0 in group 0 of the checkpoint"],
    "not_a_checkpoint": ["state_dict lacks the key 'param_groups'; load the state_dict() of OneBitAdam"],
}
FOR_LAMB = {
    "lacks_the_fresh_variance": ["state_dict lacks the key 'exp_avg_sq_fresh'"],
    "other_fresh_variance_on_rank_1": ["checksum of exp_avg_sq_fresh of parameter 0", "of the same moment"],
    "short_last_bits": ["exp_avg_last_bits in the checkpoint must have 512 columns, got (1, 511)"],
    "long_last_scale_on_rank_1": ["exp_avg_last_scale in the checkpoint must have 32 columns, got (1, 34)"],
    "other_layers_on_rank_1": ["checksum of layer of parameter 0", "of the same moment"],
    "layers_of_another_model": ["layer of parameter 0 must have shape (3,), got (4,)"],
    "lacks_layers": ["state_dict lacks the key 'layer'"],
    "bad_r_max": ["r_min must be at most r_max, got 0.5 > 0.25 in group 0 of the checkpoint"],
}


@cache
def files_of(world_size: int, name: str) -> list[dict]:
    """What each rank has saved; ranks get copies of it."""
    return run_ranks(saved_state, world_size, name, torch.float32)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "make_wrong", "texts"),
    [("onebit-adam", *case) for case in (FOR_ANY | FOR_ADAM).items()]
    + [("onebit-lamb", *case) for case in (FOR_ANY | FOR_LAMB).items()],
)
def test_wrong_checkpoints_raise_on_all_ranks_and_change_nothing(name, make_wrong, texts):
    files = files_of(2, name)
    for kind, message, unchanged in run_ranks(load_wrong, 2, name, make_wrong, files, group_timeout=10):
        assert kind in ("ValueError", "DisagreementError")
        for text in texts:
            assert text in message
        assert unchanged


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
    files = files_of(2, saved_by)
    for kind, message, unchanged in run_ranks(load_wrong, 2, name, "own_file", files, group_timeout=10):
        assert kind in ("ValueError", "DisagreementError")
        assert text in message
        assert unchanged


@pytest.mark.long(but=1)
@ADAM_AND_LAMB
@pytest.mark.parametrize("option", ["precondition", "ternary"])
@pytest.mark.parametrize("value", [False, True])
def test_another_settings_checkpoint_raises_and_is_not_loaded(name, value, option):
    was, now = {option: not value}, {option: value}
    files = run_ranks(saved_state, 2, name, torch.float32, was)
    for kind, message, unchanged in run_ranks(load_wrong, 2, name, "own_file", files, now, group_timeout=10):
        assert kind == "ValueError"
        assert f"written with {option}={not value}, but here it is {value}" in message
        assert unchanged


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("was", "now"), [(2, 1), (2, 4), (4, 2)])
def test_one_ranks_file_of_another_world_size_says_so(was, now):
    files = files_of(was, "onebit-adam")
    for kind, message, unchanged in run_ranks(load_wrong, now, "onebit-adam", "rank_0s_file", files, group_timeout=10):
        assert kind in ("ValueError", "DisagreementError")
        assert f"world_size is {was}, but here it is {now}, and this is one rank's file" in message
        assert "through torch.distributed.checkpoint (fusedonebit.dcp), or resume with as many ranks" in message
        assert unchanged


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
