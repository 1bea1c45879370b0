"""No step indexes with a list of the host's: on a GPU that uploads the list, and waits until it is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import MAKE
from ranks import run_ranks
from tape import HostIndices, capturing
from torch.distributed.device_mesh import init_device_mesh

import fusedonebit
from fusedonebit.comm import SimulatedGroup

SHAPES = ((7,), (33, 40), (1024,))
HIERARCHICAL = ("OneBitAdam", "OneBitLamb", "MarsitSGD")

pytestmark = pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")


def steps(name: str, rank: int, **options: Any) -> int:
    """Eight steps under the mode, whatever they are: of the warm-up, local, or compressed."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = MAKE[name](params, lr=1e-2, **options)
    for step in range(8):
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + rank))
        with HostIndices():
            optimizer.step()
    return optimizer.stats()["step"]


@pytest.mark.parametrize("name", MAKE)
def test_no_step_indexes_with_a_list(name):
    assert SimulatedGroup(2).run(lambda rank, transport: steps(name, rank, process_group=transport)) == [8, 8]


def on_levels(rank: int, world_size: int) -> list[int]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("between", "inside"))
    return [steps(name, rank, hierarchy=mesh) for name in HIERARCHICAL]


def test_no_step_on_two_levels_indexes_with_a_list():
    assert run_ranks(on_levels, 2) == [[8] * len(HIERARCHICAL)] * 2


@pytest.mark.parametrize("index", [[0, 2], (slice(None), [0, 1]), (..., [0])], ids=str)
def test_the_tape_refuses_an_index_of_the_hosts(index):
    table, at = torch.zeros(3, 3), torch.tensor([0, 2])
    with capturing():
        assert table[at].shape == (2, 3)
        with pytest.raises(AssertionError, match="uploads a list"):
            table[index]
        with pytest.raises(AssertionError, match="uploads a list"):
            table[index] = 1.0


def test_the_optimizers_device_says_if_a_graph_is_captured(monkeypatch):
    """torch asks the current device, which stays 0 where the optimizer's is another."""
    current = [0]

    class On:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    asked = fusedonebit.triton_kernels.tables.capturing
    assert [asked(torch.device(d)) for d in ("cuda:0", "cuda:1", "cpu")] == [False, True, False]
    assert current == [0]
