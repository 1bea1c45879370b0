"""Simulated ranks, threads of one process, against real gloo ranks."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from optimizers import ADAM_AND_LAMB
from ranks import run_ranks
from simulated_runs import train
from torch import Tensor

from fusedonebit.comm import CollectiveError, SimulatedGroup, Transport, make_transport


def train_on_gloo(rank: int, world_size: int, name: str) -> dict[str, object]:
    return train(rank, None, name)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.long(but=1)
@ADAM_AND_LAMB
@pytest.mark.parametrize("world_size", [2, 4])
def test_simulated_ranks_compute_the_same_bits_as_gloo_ranks(name, world_size):
    real = run_ranks(train_on_gloo, world_size, name)
    simulated = SimulatedGroup(world_size).run(lambda rank, transport: train(rank, transport, name))
    for rank, (r, s) in enumerate(zip(real, simulated, strict=True)):
        assert equal(r["params"], s["params"])
        assert equal(r["worker_error"], s["worker_error"])
        assert equal(s["params"], simulated[0]["params"])
        assert r["traffic"] == s["traffic"]
        assert s["transport"] == f"simulated (rank {rank} of {world_size})"
    assert not equal(simulated[0]["worker_error"], simulated[1]["worker_error"])


def test_a_transport_is_taken_as_it_is():
    transport = SimulatedGroup(3).transport(1)
    assert isinstance(transport, Transport)
    assert make_transport(transport, torch.device("cpu")) is transport


def test_the_first_error_ends_all_ranks_and_is_raised():
    seen: dict[int, BaseException] = {}

    def each(rank: int, transport: Transport) -> None:
        if rank == 2:
            raise KeyError("mine")
        try:
            transport.all_reduce(torch.ones(1))
        except CollectiveError as error:
            seen[rank] = error
            raise

    began = time.monotonic()
    group = SimulatedGroup(4)
    with pytest.raises(KeyError, match="mine"):
        group.run(each)
    assert time.monotonic() - began < 20
    assert sorted(seen) == [0, 1, 3]
    assert all("another rank has left" in str(error) for error in seen.values())
    assert group.run(lambda rank, transport: rank) == [0, 1, 2, 3]


def test_a_rank_that_stops_early_or_calls_otherwise_hangs_nobody():
    def early(rank: int, transport: Transport) -> None:
        for _ in range(2 - rank):
            transport.all_reduce(torch.ones(1))

    with pytest.raises(CollectiveError, match="another rank has left"):
        SimulatedGroup(2).run(early)

    def other(rank: int, transport: Transport) -> None:
        x = torch.ones(2, 1)
        if rank:
            transport.all_reduce(x)
        else:
            transport.all_gather(x, x)

    with pytest.raises(CollectiveError, match=r"all_gather of torch.float32 \(2, 1\), all_reduce of torch.float32"):
        SimulatedGroup(2).run(other)


def test_a_rank_that_hangs_is_given_up():
    done = threading.Event()

    def each(rank: int, transport: Transport) -> None:
        if rank:
            done.wait(20)
        else:
            try:
                transport.all_reduce(torch.ones(1))
            finally:
                done.set()

    with pytest.raises(CollectiveError, match=r"within 0\.2 s"):
        SimulatedGroup(2, timeout=0.2).run(each)
