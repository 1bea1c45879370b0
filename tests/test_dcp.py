"""Checkpoints through ``torch.distributed.checkpoint``, on as many ranks as wrote them and on others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from dcp_runs import FREEZE, batch, conserved, differing, everything, make, network, train
from observe import fingerprint, named
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from fusedonebit import Faults, OneBitAdam, dcp


def held_out(model: nn.Module) -> float:
    x, y = batch(-1)
    with torch.no_grad():
        return float((model(x.to(next(model.parameters()).dtype)) - y).square().mean())


# ---------------------------------------------------------------- the same number of ranks


def resume(rank: int, world_size: int, name: str, cut: int, dtype: torch.dtype, options: dict, folder: str) -> Any:
    model, optimizer = make(name, dtype, **options)
    train(model, optimizer, range(cut))
    phase, rewarms = optimizer.phase, optimizer.stats().get("rewarms", 0)
    dcp.save(model, optimizer, folder, step=cut)
    train(model, optimizer, range(cut, cut + 12))
    again, resumed = make(name, dtype, **options)
    assert dcp.load(again, resumed, folder, step=0) == {"step": cut}
    train(again, resumed, range(cut, cut + 12))
    return phase, rewarms, differing(everything(model, optimizer), everything(again, resumed))


FULL = pytest.mark.full
SHARDED: dict[str, Any] = {"shards": 2, "lr": 3e-3, "block_size": 128}
"""By ``fully_shard``, 1-bit between the replicas."""
MOMENTS: list[Any] = [
    ("adam", 6, torch.float32, {}, "warmup"),
    ("adam", 20, torch.float32, {}, "compression"),
    ("adam", 15, torch.float32, {"refuse_every": 2, "rewarm_steps": 10}, "warmup"),
    ("adam", 20, torch.bfloat16, {"ternary": True, "master_weights": True}, "compression"),
    ("adam", 9, torch.float32, {"freeze_step": "auto", "betas": (0.5, 0.5)}, "warmup"),
    ("lamb", 20, torch.float32, {}, "compression"),
    ("marsit", 20, torch.float32, {}, "one-bit"),
    ("marsit", 24, torch.float32, {"local_steps": 3}, "one-bit"),
    ("adam", 18, torch.float32, SHARDED, "compression"),
    ("adam", 6, torch.float32, SHARDED, "warmup"),
    ("lamb", 18, torch.float32, SHARDED, "compression"),
    pytest.param("adam", 20, torch.float32, {"precondition": False}, "compression", marks=FULL),
    pytest.param("lamb", 6, torch.float32, {}, "warmup", marks=FULL),
    pytest.param("lamb", 15, torch.float32, {"refuse_every": 2, "rewarm_steps": 10}, "warmup", marks=FULL),
    pytest.param("lamb", 20, torch.bfloat16, {"ternary": True, "master_weights": True}, "compression", marks=FULL),
    pytest.param("lamb", 20, torch.float32, {"adaptive": False}, "compression", marks=FULL),
    pytest.param("marsit", 20, torch.bfloat16, {"master_weights": True}, "one-bit", marks=FULL),
]


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("name", "cut", "dtype", "options", "phase"), MOMENTS, ids=str)
def test_on_as_many_ranks_a_run_goes_on_bit_for_bit(tmp_path, name, cut, dtype, options, phase):
    results = run_ranks(resume, 2 * options.get("shards", 1), name, cut, dtype, options, str(tmp_path / "saved"))
    print(f"{name} at step {cut}, {options}: {[len(found) for *_, found in results]} tensors differ 12 steps later")
    for was, rewarms, differ in results:
        assert was == phase
        assert rewarms == (1 if "refuse_every" in options else 0)
        assert differ == []


def save_asynchronously(rank: int, world_size: int, name: str, folder: str) -> list[str]:
    model, optimizer = make(name)
    train(model, optimizer, range(20))
    at_the_call = everything(model, optimizer)
    future = dcp.async_save(model, optimizer, folder)
    train(model, optimizer, range(20, 30))
    future.result()
    again, resumed = make(name)
    dcp.load(again, resumed, folder)
    assert differing(everything(model, optimizer), at_the_call)
    return differing(everything(again, resumed), at_the_call)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", ["adam", "lamb", "marsit"])
def test_an_asynchronous_save_has_the_state_of_the_call(tmp_path, name):
    assert run_ranks(save_asynchronously, 2, name, str(tmp_path / "saved")) == [[], []]


# ---------------------------------------------------------------- other numbers of ranks


LATE = 120
"""When the loss has settled, so that 1 % of it says something."""

GENTLY = {"adam": {"lr": 1e-3, "freeze_step": 40}, "lamb": {"lr": 1e-3, "freeze_step": 40}, "marsit": {"lr": 1e-3}}


def write(rank: int, world_size: int, name: str, folder: str) -> tuple[Tensor, float, float]:
    model, optimizer = make(name, **GENTLY[name])
    train(model, optimizer, range(LATE))
    dcp.save(model, optimizer, folder)
    before = held_out(model)
    train(model, optimizer, range(LATE, LATE + 20))
    after = held_out(model)
    again, reader = make(name, **GENTLY[name])
    dcp.load(again, reader, folder)
    return conserved(reader), before, after


def pass_on(rank: int, world_size: int, name: str, folder: str, onward: str) -> tuple[Tensor, list[str], float]:
    """Loads on this many ranks, saves it as it is, and goes on."""
    model, optimizer = make(name, **GENTLY[name])
    dcp.load(model, optimizer, folder)
    dcp.save(model, optimizer, onward)
    train(model, optimizer, range(LATE, LATE + 20))
    prints, loss = [fingerprint([p]) for p in model.parameters()], held_out(model)
    again, reader = make(name, **GENTLY[name])
    dcp.load(again, reader, folder)
    return conserved(reader), prints, loss


@pytest.mark.long(but=1)
@pytest.mark.parametrize("chain", [(4, 2, 4), pytest.param((4, 3, 1, 2), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("name", ["adam", "lamb", "marsit"])
def test_on_other_numbers_of_ranks_nothing_is_lost(tmp_path, name, chain):
    folders = [str(tmp_path / str(i)) for i in range(len(chain))]
    wrote = run_ranks(write, chain[0], name, folders[0])
    mean, before, after = wrote[0]
    for i, world_size in enumerate(chain[1:]):
        results = run_ranks(pass_on, world_size, name, folders[i], folders[i + 1])
        lost = float((results[0][0] - mean).abs().max() / mean.abs().max())
        losses = {loss for _, _, loss in results}
        print(
            f"{name} {chain[0]} -> {' -> '.join(map(str, chain[1 : i + 2]))} ranks: of m + E + mean(e) lost {lost:.1e} "
            f"(limit 1e-6); held-out loss {before:.4f}, 20 steps later {losses.pop():.5f}, uninterrupted {after:.5f}"
        )
        assert float(mean.abs().max()) > 0
        assert lost <= 1e-6
        assert all(prints == results[0][1] for _, prints, _ in results)
        assert results[0][2] == pytest.approx(after, rel=0.01)


def write_shards(rank: int, world_size: int, name: str, folder: str) -> np.ndarray:
    model, optimizer = make(name, **SHARDED)
    train(model, optimizer, range(18))
    dcp.save(model, optimizer, folder)
    return conserved(optimizer).numpy()


def pass_shards_on(rank: int, world_size: int, name: str, folder: str, onward: str) -> np.ndarray:
    model, optimizer = make(name, **SHARDED)
    dcp.load(model, optimizer, folder)
    dcp.save(model, optimizer, onward)
    kept = conserved(optimizer).numpy()
    train(model, optimizer, range(18, 22))
    return kept


@pytest.mark.long
@pytest.mark.parametrize("name", ["adam", pytest.param("lamb", marks=pytest.mark.full)])
def test_with_other_numbers_of_replicas_nothing_is_lost(tmp_path, name):
    folders = [str(tmp_path / str(i)) for i in range(3)]
    means = run_ranks(write_shards, 4, name, folders[0])
    for i, replicas in enumerate((1, 2)):
        kept = run_ranks(pass_shards_on, replicas * 2, name, folders[i], folders[i + 1])
        pairs = [(k, means[rank % 2]) for rank, k in enumerate(kept)]
        lost = max(float(np.abs(k - mean).max() / np.abs(mean).max()) for k, mean in pairs)
        print(f"{name}, 2 shards, to {replicas} replicas: of m + E + mean(e) lost {lost:.1e} (limit 1e-6)")
        assert lost <= 1e-6


def as_one_rank(rank: int, world_size: int, folder: str) -> str:
    model, optimizer = make("adam", process_group=dist.new_group([rank]))
    return named(lambda: dcp.load(model, optimizer, folder))[1]


@pytest.mark.long
def test_compressed_state_of_another_number_of_shards_is_refused(tmp_path):
    run_ranks(write_shards, 4, "adam", str(tmp_path / "saved"))
    (said,) = run_ranks(as_one_rank, 1, str(tmp_path / "saved"))
    assert "the checkpoint's shards is 2, but here it is 1; use as many, or the checkpoint of a warm-up" in said


# ---------------------------------------------------------------- frozen before the load


def save_at(rank: int, world_size: int, name: str, cut: int, folder: str) -> None:
    model, optimizer = make(name)
    train(model, optimizer, range(cut))
    dcp.save(model, optimizer, folder)


def freeze_and_load(rank: int, world_size: int, name: str, cut: int, folder: str) -> tuple[list[str], list[bool]]:
    """Returns what differs 6 steps later between a layer that was frozen before the load and one after it."""
    found = []
    for frozen_before in (True, False):
        model, optimizer = make(name)
        model[2].requires_grad_(not frozen_before)
        dcp.load(model, optimizer, folder)
        trains = [p.requires_grad for p in model.parameters()]
        model[2].requires_grad_(False)
        train(model, optimizer, range(cut, cut + 6))
        found.append((everything(model, optimizer), trains))
    (before, trains), (after, _) = found
    return differing(before, after), trains


@pytest.mark.long(but=1)
@pytest.mark.parametrize("cut", [20, 6])
@pytest.mark.parametrize("name", ["adam", "lamb", "marsit"])
def test_a_layer_may_be_frozen_before_a_load_on_any_ranks(tmp_path, name, cut):
    folder = str(tmp_path / "saved")
    run_ranks(save_at, 2, name, cut, folder)
    for world_size in (2, 3):
        loaded = run_ranks(freeze_and_load, world_size, name, cut, folder, group_timeout=20)
        assert loaded == [([], [True, True, False, False, True, True])] * world_size


def make_without_and_load(rank: int, world_size: int, name: str, folder: str) -> tuple[str, list[str]]:
    """Freezes a layer before the optimizer is made; returns the load's error, and what it has changed."""
    model, optimizer = make(name, frozen=True)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match="made without") as error:
        dcp.load(model, optimizer, folder)
    return str(error.value), differing(everything(model, optimizer), before)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", ["marsit", "adam", "lamb"])
def test_a_layer_that_the_optimizer_was_made_without_is_named(tmp_path, name):
    folder = str(tmp_path / "saved")
    run_ranks(save_at, 2, name, 20, folder)
    told = run_ranks(make_without_and_load, 2, name, folder, group_timeout=20)
    text = "has state of 2.weight, 2.bias, which the optimizer was made without"
    assert [(text in error, changed) for error, changed in told] == [(True, [])] * 2


# ---------------------------------------------------------------- AdamW's


def continue_adamw(rank: int, world_size: int, freeze_step: int, folder: str) -> tuple[str, int, float, list[str]]:
    model = network()
    ddp = nn.parallel.DistributedDataParallel(model)
    adamw = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    train(ddp, adamw, range(6))
    state = {"model": get_model_state_dict(ddp), "optimizer": get_optimizer_state_dict(ddp, adamw)}
    torch_dcp.save(state, checkpoint_id=folder)
    again, optimizer = make("adam", lr=0.5, freeze_step=freeze_step)
    dcp.load(again, optimizer, folder)
    assert optimizer.stats()["step"] == 6
    train(again, optimizer, range(6, 12))
    train(ddp, adamw, range(6, 12))
    pairs = zip(again.parameters(), model.parameters(), strict=True)
    off = max(float((p - q).abs().max() / q.abs().max()) for p, q in pairs)
    return optimizer.phase, optimizer.param_groups[0]["lr"], off, [fingerprint([p]) for p in again.parameters()]


@pytest.mark.parametrize("freeze_step", [100, 0])
def test_a_checkpoint_of_adamw_is_a_warm_up_so_far(tmp_path, freeze_step):
    results = run_ranks(continue_adamw, 2, freeze_step, str(tmp_path / "saved"))
    print(f"freeze_step={freeze_step}: parameters 6 steps after AdamW's checkpoint off AdamW's by {results[0][2]:.1e}")
    for phase, lr, off, prints in results:
        assert phase == ("warmup" if freeze_step else "compression")
        assert lr == 1e-3
        assert off <= 1e-6 if freeze_step else 1e-5 < off < 0.1
        assert prints == results[0][3]


# ---------------------------------------------------------------- wrong ones


def load_wrong(rank: int, world_size: int, case: str, folder: str) -> tuple[str, str, list[str]]:
    """Saves what is wrong and loads it; returns the error and what has changed."""
    name, options = {"another optimizer": ("lamb", {}), "within a round": ("marsit", {"local_steps": 3})}.get(
        case, ("adam", {})
    )
    model, optimizer = make(name, **options)
    if case == "another model":
        model = nn.Sequential(nn.Linear(7, 34), nn.ReLU(), nn.Linear(34, 1))
        optimizer = OneBitAdam(model.parameters(), freeze_step=FREEZE, faults=Faults(guard="off"))
    train(model, optimizer, range(20))
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if case in ("no optimizer", "no model"):
        del state[case.removeprefix("no ")]
    elif case == "damaged header":
        state["optimizer"]["param_groups"][0]["fusedonebit"] = "{"
    if case != "no folder":
        torch_dcp.save(state, checkpoint_id=folder)
    dist.barrier()
    if rank == 0 and case == "torn":
        os.remove(Path(folder, ".metadata"))
    elif rank == 0 and case == "truncated":
        for file in Path(folder).glob("*.distcp"):
            os.truncate(file, file.stat().st_size // 3)
    dist.barrier()
    model, optimizer = make("marsit" if case == "within a round" else "adam")
    train(model, optimizer, range(13))
    before = everything(model, optimizer)
    where: Any = None if rank == 1 and case == "no path on one rank" else folder
    told = named(lambda: dcp.load(model, optimizer, where))
    changed = differing(before, everything(model, optimizer))
    train(model, optimizer, range(13, 16))
    return *told, changed


WRONG = {
    "another model": "construct the model and the optimizer as they were",
    "another optimizer": "the checkpoint's algorithm is OneBitLamb, but here it is OneBitAdam",
    "no optimizer": "prefix must be the name of an optimizer's state, got 'optimizer'; saved were ['model']",
    "no model": "can't be loaded, on rank 0: ",
    "no folder": "must be the folder of a complete checkpoint, but it does not exist",
    "torn": "must be the folder of a complete checkpoint, but it has no .metadata",
    "truncated": "can't be loaded, on rank",
    "damaged header": "the checkpoint's header is damaged",
    "no path on one rank": "checkpoint_id must be the path of a checkpoint's folder, got None",
    "within a round": "after 2 local steps of a round each rank has parameters of its own",
}


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("case", "text"), WRONG.items())
def test_wrong_checkpoints_raise_on_all_ranks_and_change_nothing(tmp_path, case, text):
    results = run_ranks(load_wrong, 2, case, str(tmp_path / "saved"), group_timeout=20)
    print(f"{case}: {results[0][0]}: {results[0][1]}")
    for kind, message, changed in results:
        assert kind in ("TypeError", "ValueError", "CheckpointError", "DisagreementError")
        assert text in message
        assert changed == []
