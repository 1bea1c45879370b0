"""A rank that can't save or load makes all raise, within seconds; none waits, and nothing changes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from checkpoint_runs import everything, make_network, train_network
from observe import fingerprint, named, train
from optimizers import by_name
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from fusedonebit import OneBitAdam, OneBitLamb, ZeroOneAdam, dcp
from fusedonebit.comm import SimulatedGroup
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.optim.policies import EveryStep

GROUP_TIMEOUT = 60.0
WITHIN = 25.0  # seconds, on a machine busy with all else; far below the group's timeout


class Sick:
    """A scheduler, or the like, that fails on rank 1 where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def state_dict(self) -> dict[str, int]:
        self._fail("state_dict")
        return {"step": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._fail("load_state_dict")

    def _fail(self, where: str) -> None:
        if self.where == where and dist.get_rank() == 1:
            raise AttributeError("nobody is at home")


class NotToBePickled:
    def __getstate__(self) -> None:
        raise LookupError("not to be pickled")


def full_disk(folder: Path) -> None:
    """Rank 1's file is ``/dev/full``, on which nobody can write, not even root."""
    folder.mkdir(exist_ok=True)
    os.symlink("/dev/full", folder / "__1_0.distcp")


def trained(rank: int) -> tuple[nn.Module, DistributedOptimizer]:
    model, optimizer = make_network()
    train_network(model, optimizer, rank, 4)
    return model, optimizer


def timed(call: Callable[[], object]) -> tuple[str, str, float]:
    start = time.monotonic()
    return *named(call), time.monotonic() - start


def check_told(results: list[tuple], text: str) -> None:
    print(f"{results[0][:2]}, after {max(waited for _, _, waited, *_ in results):.1f} s")
    for rank, (kind, message, waited, *_) in enumerate(results):
        assert kind, "nothing was raised"
        assert text in message
        assert rank == 1 or "rank 1" in message or "on rank 0" in message
        assert waited < WITHIN


def fail_to_save(rank: int, world_size: int, case: str, folder: str) -> tuple[str, str, float]:
    model, optimizer = trained(rank)
    more: dict[str, Any] = {"scheduler": Sick("state_dict")} if case == "its state" else {}
    if case == "its values":
        more = {"other": NotToBePickled() if rank else 3}
    if case == "the optimizer" and rank == 1:
        optimizer.state_dict = None  # type: ignore[assignment, method-assign]
    if case in ("full disk", "in the background") and rank == 0:
        full_disk(Path(folder))
    if case == "a file is in the way" and rank == 0:
        Path(folder).write_text("")
    dist.barrier()
    if case == "in the background":
        told = timed(lambda: dcp.async_save(model, optimizer, folder, **more).result())
    else:
        told = timed(lambda: dcp.save(model, optimizer, folder, **more))
    dist.barrier()
    assert not Path(folder, ".metadata").exists()
    dcp.save(model, optimizer, folder + "-again") if case != "the optimizer" else None
    return told


SAVING = {
    "full disk": "on rank 1: OSError: [Errno 28] No space left on device",
    "in the background": "on rank 1: OSError: [Errno 28] No space left on device",
    "a file is in the way": "on rank 0: FileExistsError",
    "its state": "nobody is at home",
    "its values": "LookupError: not to be pickled",
    "the optimizer": "'NoneType' object is not callable",
}


@pytest.mark.long(but=2)
@pytest.mark.parametrize(("case", "text"), SAVING.items())
def test_a_rank_that_can_not_save_makes_all_raise_and_say_why(tmp_path, case, text):
    check_told(run_ranks(fail_to_save, 2, case, str(tmp_path / "saved"), group_timeout=GROUP_TIMEOUT), text)


def fail_to_load(rank: int, world_size: int, case: str, folder: str) -> tuple[str, str, float, bool]:
    model, optimizer = trained(rank)
    dcp.save(model, optimizer, folder, scheduler={"step": 1}, other=1)
    dist.barrier()
    train_network(model, optimizer, rank, 2)
    before, prints, where = everything(optimizer), fingerprint(list(model.parameters())), folder
    if rank == 1 and case in ("a missing file", "one bit"):
        where = shutil.copytree(folder, folder + "-elsewhere")
        path = Path(where, "__1_0.distcp")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data) if case == "one bit" else path.unlink()
    dist.barrier()
    where = folder + "?" if rank == 1 and case == "another folder" else where
    if case == "a model of its own" and rank == 1:
        model = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 5), nn.Linear(5, 5))
    told = timed(lambda: dcp.load(model, optimizer, where, scheduler=Sick(case), other=0))
    dist.barrier()
    unchanged = everything(optimizer) == before
    if case != "a model of its own" or rank == 0:
        unchanged &= fingerprint(list(model.parameters())) == prints
    return *told, unchanged


LOADING = {
    "a missing file": "FileNotFoundError",
    "one bit": "__1_0.distcp is damaged: its checksum is",
    "another folder": "must be the folder of a complete checkpoint, but it does not exist",
    "state_dict": "nobody is at home",
    "load_state_dict": "nobody is at home",
    "a model of its own": "",
}


@pytest.mark.long(but=2)
@pytest.mark.parametrize(("case", "text"), LOADING.items())
def test_a_rank_that_can_not_load_makes_all_raise_and_say_why(tmp_path, case, text):
    results = run_ranks(fail_to_load, 2, case, str(tmp_path / "saved"), group_timeout=GROUP_TIMEOUT)
    check_told(results, text)
    # In "load_state_dict" the model and the optimizer were loaded before.
    assert all(unchanged for *_, unchanged in results) or case == "load_state_dict"


@pytest.mark.parametrize(
    "state",
    [None, 3, {}, {"state": 1, "param_groups": 2}, {"state": {}, "param_groups": [None]}, {"param_groups": [{}]}],
    ids=repr,
)
def test_whatever_one_rank_loads_no_other_waits_for_it(state):
    def work(rank: int, transport: Any) -> tuple[str, str]:
        optimizer = OneBitAdam([nn.Parameter(torch.ones(300))], lr=1e-2, freeze_step=3, process_group=transport)
        train(optimizer, rank, range(1))
        return named(lambda: optimizer.load_state_dict(optimizer.state_dict() if rank == 0 else state))

    (kind, message), (other_kind, _) = SimulatedGroup(2, timeout=20.0).run(work)
    assert kind == "DisagreementError"
    assert "failed on rank 1" in message
    assert other_kind in ("TypeError", "ValueError")


# ---------------------------------------------------------------- torch's flattened states


def make_flat(name: str) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 5))
    if name == "zero-one":
        return model, ZeroOneAdam(model.parameters(), lr=1e-3, sync_policy=EveryStep())
    kind = {"adam": by_name(OneBitAdam), "lamb": by_name(OneBitLamb)}[name]
    return model, kind(model.parameters(), lr=1e-2, freeze_step=4, guard="off")


def through_flattened(rank: int, world_size: int, name: str, steps: int, folder: str) -> tuple[str, str, bool]:
    """What torch's own call, and that to make a template, raise; whether nothing was loaded then, or else all."""
    model, optimizer = make_flat(name)
    train_network(model, optimizer, rank, steps)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    torch_dcp.save({"optimizer": flat}, checkpoint_id=folder)
    again, resumed = make_flat(name)
    again.load_state_dict(model.state_dict())
    before = everything(resumed)
    _, by_template = named(lambda: dcp.template(again, resumed, folder))
    assert everything(resumed) == before
    kind, said = named(lambda: set_optimizer_state_dict(again, resumed, flat, options=options))
    if kind:
        return said, by_template, everything(resumed) == before
    for each, its in ((model, optimizer), (again, resumed)):
        train_network(each, its, rank, 6)
    return said, by_template, everything(optimizer) == everything(resumed)


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    ("name", "steps", "loads"),
    [("adam", 2, True), ("adam", 6, False), ("lamb", 2, False), ("lamb", 6, False), ("zero-one", 5, False)],
)
def test_flattened_state_is_loaded_whole_or_refused_on_all_ranks(tmp_path, name, steps, loads):
    for said, by_template, held in run_ranks(through_flattened, 2, name, steps, str(tmp_path), group_timeout=20.0):
        assert held
        assert loads or "torch's flatten_optimizer_state_dict=True drops what a new optimizer does not have" in said
        assert (said == "") is loads
        assert loads or "was saved with flatten_optimizer_state_dict=True" in by_template
