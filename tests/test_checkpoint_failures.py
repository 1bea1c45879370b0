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
from checkpoint_folders import everything, make_network, train_network
from observe import fingerprint
from optimizers import by_name
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedonebit import CollectiveError, OneBitAdam, OneBitLamb, ZeroOneAdam, dcp
from fusedonebit.comm import SimulatedGroup
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.optim.policies import EveryStep

GROUP_TIMEOUT = 60.0
WITHIN = 25.0  # seconds, on a machine busy with all else; far below the group's timeout


class Sick:
    """A scheduler, or the like, that fails on rank 1."""

    def __init__(self, where: str) -> None:
        self.where = where

    def state_dict(self) -> dict[str, int]:
        return self._fail("state_dict")

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._fail("load_state_dict")

    def _fail(self, where: str) -> dict[str, int]:
        if self.where == where and dist.get_rank() == 1:
            raise AttributeError("nobody is at home")
        return {"step": 1}


class NotToBePickled:
    def __getstate__(self) -> None:
        raise LookupError("not to be pickled")


def full_disk(folder: Path) -> None:
    """Rank 1's file is ``/dev/full``, on which nobody can write, not even root."""
    folder.mkdir(exist_ok=True)
    os.symlink("/dev/full", folder / "__1_0.distcp")


def raised(call: Callable[[], object]) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def fail_to_save(rank: int, world_size: int, case: str, folder: str) -> tuple[str, str, float]:
    model, optimizer = make_network()
    train_network(model, optimizer, rank, 4)
    where, more = Path(folder), {}
    if case == "full disk" and rank == 0:
        full_disk(where)
    elif case == "a file is in the way" and rank == 0:
        where.write_text("")
    elif case == "its state":
        more = {"scheduler": Sick("state_dict")}
    elif case == "its values" and rank == 1:
        more = {"other": NotToBePickled()}
    elif case == "its values":
        more = {"other": 3}
    elif case == "the optimizer" and rank == 1:
        optimizer.state_dict = None  # type: ignore[assignment, method-assign]
    dist.barrier()
    if case == "in the background":
        if rank == 0:
            full_disk(where)
        dist.barrier()
        told = raised(lambda: dcp.async_save(model, optimizer, folder, **more).result())
    else:
        told = raised(lambda: dcp.save(model, optimizer, folder, **more))
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
    results = run_ranks(fail_to_save, 2, case, str(tmp_path / "saved"), group_timeout=GROUP_TIMEOUT)
    print(f"{case}: {results[0][:2]}, after {max(waited for *_, waited in results):.1f} s")
    for rank, (kind, message, waited) in enumerate(results):
        assert kind, "nothing was raised"
        assert text in message
        assert rank == 1 or "rank 1" in message or "on rank 0" in message
        assert waited < WITHIN


def fail_to_load(rank: int, world_size: int, case: str, folder: str) -> tuple[str, str, float, bool]:
    model, optimizer = make_network()
    train_network(model, optimizer, rank, 4)
    dcp.save(model, optimizer, folder, scheduler={"step": 1}, other=1)
    dist.barrier()
    train_network(model, optimizer, rank, 2)
    before, prints = everything(optimizer), fingerprint(list(model.parameters()))
    where = folder + "-elsewhere" if case in ("a missing file", "one bit", "another folder") and rank == 1 else folder
    if where != folder and case != "another folder":
        shutil.copytree(folder, where)
    if where != folder and case == "a missing file":
        Path(where, "__1_0.distcp").unlink()
    elif where != folder and case == "one bit":
        path = Path(where, "__1_0.distcp")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    dist.barrier()
    more: dict[str, Any] = {"scheduler": Sick(case), "other": 0}
    if case == "a model of its own" and rank == 1:
        model = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 5), nn.Linear(5, 5))
    kind, message, waited = raised(lambda: dcp.load(model, optimizer, where, **more))
    dist.barrier()
    unchanged = everything(optimizer) == before
    if case != "a model of its own" or rank == 0:
        unchanged &= fingerprint(list(model.parameters())) == prints
    return kind, message, waited, unchanged


LOADING = {
    "a missing file": "FileNotFoundError",
    "one bit": "__1_0.distcp is damaged: its checksum is",
    "another folder": "it does not exist",
    "state_dict": "nobody is at home",
    "load_state_dict": "nobody is at home",
    "a model of its own": "",
}


@pytest.mark.long(but=2)
@pytest.mark.parametrize(("case", "text"), LOADING.items())
def test_a_rank_that_can_not_load_makes_all_raise_and_say_why(tmp_path, case, text):
    results = run_ranks(fail_to_load, 2, case, str(tmp_path / "saved"), group_timeout=GROUP_TIMEOUT)
    print(f"{case}: {results[0][:2]}, after {max(waited for *_, waited, _ in results):.1f} s")
    for rank, (kind, message, waited, unchanged) in enumerate(results):
        assert kind, "nothing was raised"
        assert text in message
        assert rank == 1 or "rank 1" in message or "on rank 0" in message
        assert waited < WITHIN
        assert unchanged or case == "load_state_dict"  # the model and the optimizer were loaded before


@pytest.mark.parametrize(
    "state",
    [None, 3, {}, {"state": 1, "param_groups": 2}, {"state": {}, "param_groups": [None]}, {"param_groups": [{}]}],
    ids=repr,
)
def test_whatever_one_rank_loads_no_other_waits_for_it(state):
    def work(rank: int, transport: Any) -> tuple[str, str]:
        p = nn.Parameter(torch.ones(300))
        optimizer = OneBitAdam([p], lr=1e-2, freeze_step=3, process_group=transport)
        p.grad = torch.full_like(p, 1.0 + rank)
        optimizer.step()
        return raised(lambda: optimizer.load_state_dict(optimizer.state_dict() if rank == 0 else state))[:2]

    (kind, message), (other_kind, _) = SimulatedGroup(2, timeout=20.0).run(work)
    assert kind == "DisagreementError"
    assert "failed on rank 1" in message
    assert other_kind in ("TypeError", "ValueError")


# ---------------------------------------------------------------- who has died


def die_while_saving(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    """One that dies closes its connections; here rank 1 closes its own, and goes on to tell what it has raised."""
    model, optimizer = make_network()
    train_network(model, optimizer, rank, 4)
    dist.barrier()
    if rank == 1:
        # Fails where it would send what it has planned to rank 0, and sends nothing.
        raise_ = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("Connection reset by peer"))  # noqa: E731
        dist.gather_object = raise_
    try:
        dcp.save(model, optimizer, folder)
    except CollectiveError as error:
        return type(error).__name__, str(error)
    finally:
        dist.gather_object = dist.distributed_c10d.gather_object
    return "", ""


def test_a_failed_collective_while_saving_is_a_collective_error(tmp_path):
    kind, message = run_ranks(die_while_saving, 2, str(tmp_path / "saved"), group_timeout=5.0)[1]
    assert kind == "CollectiveError"
    assert "dcp: saved of rank 1 of 2 failed" in message


# ---------------------------------------------------------------- torch's flattened states


def make_flat(name: str) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 5))
    if name == "zero-one":
        return model, ZeroOneAdam(model.parameters(), lr=1e-3, sync_policy=EveryStep())
    kind = {"adam": by_name(OneBitAdam), "lamb": by_name(OneBitLamb)}[name]
    return model, kind(model.parameters(), lr=1e-2, freeze_step=4, guard="off")


def through_flattened(rank: int, world_size: int, name: str, steps: int) -> tuple[str, str, bool]:
    model, optimizer = make_flat(name)
    train_network(model, optimizer, rank, steps)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    again, resumed = make_flat(name)
    again.load_state_dict(model.state_dict())
    before = everything(resumed)
    kind, message, _ = raised(lambda: set_optimizer_state_dict(again, resumed, flat, options=options))
    if kind:
        return kind, message, everything(resumed) == before
    for each, its in ((model, optimizer), (again, resumed)):
        train_network(each, its, rank, 6)
    return kind, message, everything(optimizer) == everything(resumed)


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    ("name", "steps", "loads"),
    [("adam", 2, True), ("adam", 6, False), ("lamb", 2, False), ("lamb", 6, False), ("zero-one", 5, False)],
)
def test_flattened_state_is_loaded_whole_or_refused_on_all_ranks(name, steps, loads):
    for kind, message, held in run_ranks(through_flattened, 2, name, steps, group_timeout=20.0):
        assert held
        assert (kind == "") is loads
        if not loads:
            assert "torch's flatten_optimizer_state_dict=True drops what a new optimizer does not have" in message
