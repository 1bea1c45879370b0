"""What keeps each rank's state beside another library's checkpoint: one file for each, or one error on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mistakes import net, train
from observe import named
from ranks import run_ranks
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from fusedonebit import OneBitAdam
from fusedonebit.integrations import of_each_rank


def make(steps: int = 0, rank: int = 0) -> tuple[Module, OneBitAdam]:
    model = net()
    optimizer = OneBitAdam(model.parameters(), freeze_step=2)
    train(model, optimizer, seed=rank, steps=steps)
    return model, optimizer


def resume(rank: int, world_size: int, folder: str, missing: str) -> Any:
    """What a rank is told that resumes where some files are missing; or whether it goes on as if it had not stopped."""
    model, optimizer = make(4, rank)
    of_each_rank.save(optimizer.frame.ranks, optimizer.state_dict, folder)
    before = [p.detach().clone() for p in model.parameters()]
    rank_0 = torch.load(Path(folder) / f"onebit-rank-0-of-{world_size}.pt", weights_only=True)
    torch.distributed.barrier()
    if rank == 0:
        for name in Path(folder).glob(missing):
            os.remove(name)
    torch.distributed.barrier()
    train(model, optimizer, seed=10 + rank)
    again, other = make()
    with torch.no_grad():
        for p, value in zip(again.parameters(), before, strict=True):
            p.copy_(value)
    told = named(lambda: (of_each_rank.hand_over(other, folder), other.load_state_dict(rank_0)))
    if told[0]:
        return ": ".join(told)
    train(again, other, seed=10 + rank)
    same = all(map(torch.equal, model.parameters(), again.parameters()))
    other.load_state_dict(other.state_dict())  # a later load takes what it is given
    return same and other.stats()["step"] == 6


def test_each_rank_takes_its_own_state_whatever_it_is_given(tmp_path: Path):
    assert run_ranks(resume, 2, str(tmp_path), "nothing") == [True, True]


def test_a_missing_file_is_one_error_on_every_rank(tmp_path: Path):
    first, second = run_ranks(resume, 2, str(tmp_path), "onebit-rank-1-*", timeout=60, group_timeout=20)
    path = tmp_path / "onebit-rank-1-of-2.pt"
    said = f"{path} is missing, but {tmp_path} has onebit-rank-0-of-2.pt: resume on as many ranks as have saved"
    assert second.startswith(f"FileNotFoundError: {said}")
    assert first.startswith(f"DisagreementError: failed on rank 1: {said}")


def test_without_files_state_of_another_rank_is_refused(tmp_path: Path):
    for told in run_ranks(resume, 2, str(tmp_path), "onebit-rank-*", timeout=60, group_timeout=20):
        assert "each rank must load the file that it saved itself" in told


def test_files_of_another_number_of_ranks_do_not_stay(tmp_path: Path):
    (tmp_path / "onebit-rank-3-of-4.pt").touch()
    _, optimizer = make()
    of_each_rank.save(optimizer.frame.ranks, optimizer.state_dict, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["onebit-rank-0-of-1.pt"]


def unwritable(rank: int, world_size: int, folder: str) -> str:
    _, optimizer = make()
    where = Path(folder) / ("file" if rank else "fine")
    return ": ".join(named(lambda: of_each_rank.save(optimizer.frame.ranks, optimizer.state_dict, where)))


def test_an_unwritable_file_is_one_error_on_every_rank(tmp_path: Path):
    (tmp_path / "file").touch()
    first, second = run_ranks(unwritable, 2, str(tmp_path), timeout=60, group_timeout=20)
    assert first.startswith("DisagreementError: failed on rank 1: ")
    assert second.startswith("FileExistsError: ")


def attached(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(net())
    optimizer = OneBitAdam(model.parameters())
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    assert of_each_rank.ours(wrapped) is optimizer
    for _ in range(2):  # a second training run finds it attached
        of_each_rank.attach_once(model, optimizer)
    assert optimizer.frame.under_ddp.attached
    with pytest.raises(TypeError, match="optimizer must be one of fusedonebit's, got SGD"):
        of_each_rank.ours(torch.optim.SGD(model.parameters(), 0.1))
    of_each_rank.refuse_clipping(optimizer.frame, "clip", 0, 0)
    with pytest.raises(ValueError, match=r"clip must be 0 with OneBitAdam, got 1.0: each rank .* max_grad_norm=1.0"):
        of_each_rank.refuse_clipping(optimizer.frame, "clip", 1.0, 0)


def test_an_attached_optimizer_stays_so_and_is_not_clipped():
    run_ranks(attached, 2)
