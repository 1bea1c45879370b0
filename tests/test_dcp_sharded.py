"""Checkpoints of models that ``fully_shard`` has sharded, 1-bit between the replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from dcp_runs import conserved, differing, everything, network, train
from optimizers import by_name
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fusedonebit import Faults, OneBitAdam, OneBitLamb, dcp
from fusedonebit.core.optimizer import DistributedOptimizer

SHARDS = 2
KINDS = {"adam": by_name(OneBitAdam), "lamb": by_name(OneBitLamb)}


def make(name: str) -> tuple[Any, DistributedOptimizer]:
    replicas = dist.get_world_size() // SHARDS
    mesh = init_device_mesh("cpu", (replicas, SHARDS), mesh_dim_names=("replicate", "shard"))
    model = network()
    for layer in (*model, model):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh["shard"])
    options = {"lr": 3e-3, "freeze_step": 10, "guard": "off", "block_size": 128}
    return model, KINDS[name](model.parameters(), process_group=mesh["replicate"], **options)


def resume(rank: int, world_size: int, name: str, cut: int, folder: str) -> tuple[str, list[str], int]:
    model, optimizer = make(name)
    train(model, optimizer, range(cut))
    phase = optimizer.phase
    dcp.save(model, optimizer, folder)
    train(model, optimizer, range(cut, cut + 6))
    again, resumed = make(name)
    dcp.load(again, resumed, folder)
    train(again, resumed, range(cut, cut + 6))
    found = everything(again, resumed)
    return phase, differing(everything(model, optimizer), found), len(found)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("name", "cut"), [("adam", 18), ("adam", 6), ("lamb", 18)])
def test_on_the_same_grid_a_run_goes_on_bit_for_bit(tmp_path, name, cut):
    for phase, differ, count in run_ranks(resume, 4, name, cut, str(tmp_path / "saved")):
        assert phase == ("compression" if cut == 18 else "warmup")
        assert count > 20
        assert differ == []


def write(rank: int, world_size: int, name: str, folder: str) -> np.ndarray:
    model, optimizer = make(name)
    train(model, optimizer, range(18))
    dcp.save(model, optimizer, folder)
    return conserved(optimizer).numpy()


def pass_on(rank: int, world_size: int, name: str, folder: str, onward: str) -> np.ndarray:
    model, optimizer = make(name)
    dcp.load(model, optimizer, folder)
    dcp.save(model, optimizer, onward)
    kept = conserved(optimizer).numpy()
    train(model, optimizer, range(18, 22))
    return kept


@pytest.mark.long
@pytest.mark.parametrize("name", ["adam", pytest.param("lamb", marks=pytest.mark.full)])
def test_with_other_numbers_of_replicas_nothing_is_lost(tmp_path, name):
    folders = [str(tmp_path / str(i)) for i in range(3)]
    means = run_ranks(write, 4, name, folders[0])
    for i, replicas in enumerate((1, 2)):
        kept = run_ranks(pass_on, replicas * SHARDS, name, folders[i], folders[i + 1])
        lost = max(
            float(np.abs(k - means[r % SHARDS]).max() / np.abs(means[r % SHARDS]).max()) for r, k in enumerate(kept)
        )
        print(
            f"{name}, 2 shards, 2 -> {' -> '.join('12'[: i + 1])} replicas: of m + E + mean(e) lost {lost:.1e} (1e-6)"
        )
        assert lost <= 1e-6


def as_one_rank(rank: int, world_size: int, folder: str) -> str:
    model = network()
    optimizer = OneBitAdam(
        model.parameters(), freeze_step=10, faults=Faults(guard="off"), process_group=dist.new_group([rank])
    )
    try:
        dcp.load(model, optimizer, folder)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.long
def test_compressed_state_of_another_number_of_shards_is_refused(tmp_path):
    run_ranks(write, 4, "adam", str(tmp_path / "saved"))
    (message,) = run_ranks(as_one_rank, 1, str(tmp_path / "saved"))
    assert (
        "the checkpoint's shards is 2, but here it is 1; a checkpoint of the compression stage needs as many" in message
    )
