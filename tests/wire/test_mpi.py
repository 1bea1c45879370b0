"""Ranks that ``mpirun`` starts, against gloo's: all methods, bit-identical compression stages, errors on all ranks."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi_ranks import end, run_mpi, start_mpi
from observe import caught, fingerprint, train
from optimizers import ADAM_AND_LAMB, objects
from ranks import RankError, run_ranks
from simulated_runs import train as train_exactly
from torch import Tensor

from fusedonebit import CollectiveError, DisagreementError, MarsitSGD, OneBitAdam
from fusedonebit.comm import SimulatedGroup, Transport, make_transport

CPU = torch.device("cpu")
SHAPES = ((7,), (33, 40), (5000,), (), (3, 5, 7))

needs_mpi = pytest.mark.needs_mpi
WORLDS = pytest.mark.parametrize("world_size", [2, 4])


def on_gloo(rank: int, world_size: int, module: str, name: str, *args: Any) -> Any:
    return getattr(importlib.import_module(module), name)(rank, make_transport(None, CPU), *args)


def on_both(function: Callable[..., Any], world_size: int, *args: Any) -> tuple[list[Any], list[Any]]:
    """What each rank of MPI, and of gloo, returns."""
    name = (function.__module__, function.__name__)
    return run_mpi(function, world_size, *args), run_ranks(on_gloo, world_size, *name, *args)


# ---------------------------------------------------------------- whole runs


def make_params() -> list[Tensor]:
    random = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]


@needs_mpi
@WORLDS
@ADAM_AND_LAMB
def test_runs_over_mpi_and_gloo_are_bit_identical(name, world_size):
    """Sums of the warm-up are exact: they are the same in any order."""
    by_mpi, by_gloo = on_both(train_exactly, world_size, name)
    for rank, (m, g) in enumerate(zip(by_mpi, by_gloo, strict=True)):
        assert m["traffic"] == g["traffic"]
        assert m["traffic"][0] == 2  # collectives of a compressed step
        assert fingerprint(m["params"] + m["worker_error"]) == fingerprint(g["params"] + g["worker_error"])
        assert fingerprint(m["params"]) == fingerprint(by_mpi[0]["params"])
        assert m["transport"].startswith("MPI by ")
        assert m["transport"].endswith(f"(rank {rank} of {world_size})")
    # The comparison has something to compare: ranks have residuals of their own.
    assert fingerprint(by_mpi[0]["worker_error"]) != fingerprint(by_mpi[1]["worker_error"])


def train_marsit(rank: int, transport: Transport, topology: str) -> list[Tensor]:
    params = make_params()
    options = {"topology": topology, "full_precision_every": 0, "process_group": transport}
    optimizer = MarsitSGD(params, lr=1e-2, momentum=0.9, **objects(**options))
    train(optimizer, rank, range(10))
    return [p.detach() for p in params]


@needs_mpi
@pytest.mark.parametrize("topology", ["ring", "torus", "owner"])
def test_marsit_hops_over_mpi_as_over_gloo(topology):
    by_mpi, by_gloo = on_both(train_marsit, 4, topology)
    assert len({fingerprint(params) for params in by_mpi + by_gloo}) == 1


# ---------------------------------------------------------------- every method

DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)


def move_everything(rank: int, transport: Transport) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """Each method on each dtype, and the traffic after each; lengths that no power of two divides."""
    world_size, moved, traffic = transport.world_size, {}, []
    random = torch.Generator().manual_seed(rank)

    def note(what: str, tensor: Tensor) -> None:
        moved[what] = tensor
        traffic.append((transport.traffic.bytes_total, transport.traffic.collectives_total))

    for dtype in DTYPES:
        for n in (1, 1001, 0):
            # Whole numbers: sums are the same in any order.
            rows = torch.randint(0, 60, (world_size, n), generator=random).to(dtype)
            received = torch.empty_like(rows)
            transport.all_to_all(received, rows)
            note(f"all_to_all {dtype} {n}", received)
            gathered = torch.empty_like(rows)
            transport.all_gather(gathered, rows[:1])
            note(f"all_gather {dtype} {n}", gathered)
            total = rows.clone()
            transport.all_reduce(total)
            note(f"all_reduce {dtype} {n}", total)
            first = rows.clone()
            transport.broadcast(first)
            note(f"broadcast {dtype} {n}", first)
            # Around the ring, to the right; the rank before this one may have more to send.
            before, after = (rank - 1) % world_size, (rank + 1) % world_size
            arrived = torch.empty(n + before, dtype=dtype)
            transport.exchange(arrived, before, torch.full((n + rank,), rank, dtype=dtype), after).wait()
            note(f"exchange {dtype} {n}", arrived)
    scalar = torch.tensor(float(rank))
    transport.all_reduce(scalar)
    note("all_reduce of a number", scalar)
    brain = torch.full((5,), rank + 0.5, dtype=torch.bfloat16)
    transport.broadcast(brain)
    note("broadcast of bfloat16", brain)
    return moved, traffic


@needs_mpi
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_method_moves_and_counts_as_gloo_and_simulated(world_size):
    by_mpi, by_gloo = on_both(move_everything, world_size)
    simulated = SimulatedGroup(world_size).run(move_everything)
    for mpi, *others in zip(by_mpi, by_gloo, simulated, strict=True):
        for moved, traffic in others:
            assert mpi[1] == traffic
            assert mpi[0].keys() == moved.keys()
            for what, tensor in moved.items():
                assert torch.equal(mpi[0][what], tensor), what


def in_pieces(rank: int, transport: Any) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    from fusedonebit.comm import mpi

    before, mpi.LARGEST = mpi.LARGEST, 13
    try:
        return move_everything(rank, transport)
    finally:
        mpi.LARGEST = before


def staged(rank: int, transport: Any) -> tuple[dict[str, Tensor], list[tuple[int, int]], list[int]]:
    """As for CUDA tensors, on pageable memory."""
    from fusedonebit.comm import mpi

    before, mpi.STAGED = mpi.STAGED, 500
    transport._is_staged = lambda tensor: True
    try:
        results = [move_everything(rank, transport) for _ in range(3)]
        buffers = {size: len(free) for size, free in transport._free.items()}
    finally:
        mpi.STAGED = before
        del transport._is_staged
        transport._free.clear()
    return *results[0], buffers


@needs_mpi
@pytest.mark.parametrize("how", [in_pieces, staged])
def test_messages_in_pieces_and_staging_buffers_arrive_alike(how):
    plain, other = run_mpi(move_everything, 3), run_mpi(how, 3)
    for (moved, _), (again, *rest) in zip(plain, other, strict=True):
        for what, tensor in moved.items():
            assert torch.equal(tensor, again[what]), what
        if how is staged:
            # One for each direction, used again in all three rounds; an all-reduce only holds a piece.
            assert max(rest[1].values()) == 2
            assert 3 * 1001 * 8 in rest[1]


def sum_of_noise(rank: int, transport: Transport) -> str:
    noise = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
    transport.all_reduce(noise)
    return fingerprint([noise])


@needs_mpi
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_sum_has_the_same_bits_on_all_ranks(world_size):
    assert len(set(run_mpi(sum_of_noise, world_size))) == 1


def reprs(rank: int, transport: Any) -> list[str]:
    from fusedonebit.comm.mpi import MPITransport

    p = torch.nn.Parameter(torch.ones(300))
    optimizer = OneBitAdam([p], freeze_step=5, process_group=transport)
    asked = [repr(MPITransport(transport.comm, cuda_aware=aware)) for aware in (False, True)]
    return [repr(transport), repr(optimizer), *asked]


@needs_mpi
def test_repr_names_the_library_its_version_and_cudas_way():
    for rank, (own, optimizer, staged_, aware) in enumerate(run_mpi(reprs, 2)):
        print(own)
        assert re.fullmatch(rf"MPI by \S.* v?\d+\.\S+, CUDA( staged|-aware) \(rank {rank} of 2\)", own)
        assert f"transport: {own}" in optimizer
        assert "CUDA staged" in staged_
        assert "CUDA-aware" in aware


# ---------------------------------------------------------------- errors


def built_differently(rank: int, transport: Transport) -> list[tuple[type | None, str]]:
    def build(**options: Any) -> Callable[[], object]:
        return lambda: OneBitAdam(make_params(), process_group=transport, **objects(**options))

    return [caught(build(freeze_step=5 + rank)), caught(build(freeze_step=5, betas=(2.0 if rank else 0.9, 0.99)))]


@needs_mpi
def test_differences_at_construction_are_told_on_every_rank():
    results = run_mpi(built_differently, 4)
    for rank, (differs, failed) in enumerate(results):
        assert differs[0] is DisagreementError
        assert "freeze_step is 5 on rank 0 but 6 on rank 1" in differs[1]
        assert failed[0] is (ValueError if rank else DisagreementError)
        assert rank or "failed on rank 1" in failed[1]


def misuse(rank: int, transport: Any) -> dict[str, tuple[type | None, str]]:
    from mpi4py import MPI

    from fusedonebit.comm.mpi import MPITransport

    one = MPI.COMM_SELF
    between = one.Create_intercomm(0, transport.comm, 1 - rank)
    x, rows = torch.zeros(2, 4), torch.zeros(3, 4)
    calls: dict[str, Callable[[], object]] = {
        "no communicator": lambda: MPITransport(3),
        "null": lambda: MPITransport(MPI.COMM_NULL),
        "intercommunicator": lambda: MPITransport(between),
        "strides": lambda: transport.all_reduce(x.t()),
        "rows": lambda: transport.all_to_all(rows, rows),
        "dtypes": lambda: transport.all_gather(x, x[:1].double()),
        "sum of bfloat16": lambda: transport.all_reduce(x.bfloat16()),
        "device": lambda: transport.broadcast(x.to("meta")),
        # A message longer than its receiver's memory, and a shorter one.
        "too long": lambda: transport.exchange(x[0, : 4 - rank], 1 - rank, x[0], 1 - rank).wait(),
        "too short": lambda: transport.exchange(x[0], 1 - rank, x[0, : 3 + rank], 1 - rank).wait(),
        "no such rank": lambda: transport.exchange(x[0], 7, x[0], 7),
    }
    told = {what: caught(call) for what, call in calls.items()}
    between.Free()
    x.fill_(1.0)
    transport.all_reduce(x)
    assert bool((x == 2.0).all()), "it can go on"
    return told


@needs_mpi
def test_misuse_is_named():
    first, second = run_mpi(misuse, 2)
    assert first["no communicator"] == (TypeError, "comm must be an mpi4py communicator or None, got int")
    assert first["null"] == (ValueError, "comm must contain this process, got COMM_NULL")
    assert first["intercommunicator"][0] is ValueError
    assert "got the Intercomm between two" in first["intercommunicator"][1]
    assert first["strides"][0] is ValueError
    assert "all_reduce must be given contiguous tensors, got shape (4, 2)" in first["strides"][1]
    assert first["rows"][0] is ValueError
    assert "all_to_all of 2 ranks must be given a row for each, got torch.float32 (3, 4)" in first["rows"][1]
    assert first["dtypes"][0] is ValueError
    assert first["sum of bfloat16"][0] is TypeError
    assert first["sum of bfloat16"][1].endswith("got torch.bfloat16")
    assert first["device"][0] is TypeError
    assert first["too long"][0] is None
    assert second["too short"][0] is CollectiveError
    assert "12 bytes arrived where 16 were expected" in second["too short"][1]
    assert "TRUNCATE" in second["too long"][1]
    for told in (first["no such rank"], second["no such rank"], second["too long"]):
        assert told[0] is CollectiveError
        assert told[1].startswith("exchange of rank ")
        assert "MPI_ERR_" in told[1]
        assert told[1].endswith("Restart all ranks from the last checkpoint.")


def test_without_mpi4py_or_a_library_the_way_out_is_named(monkeypatch):
    from fusedonebit.comm.mpi import MPITransport

    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match="MPITransport needs mpi4py: pip install mpi4py, and an MPI library"):
        MPITransport()

    class NoLibrary:
        def __getattr__(self, name: str) -> None:
            raise RuntimeError("cannot load MPI library")

    monkeypatch.setitem(sys.modules, "mpi4py", NoLibrary())
    with pytest.raises(ImportError, match="mpi4py finds no MPI library: for instance apt-get install openmpi-bin"):
        MPITransport()


def imported(rank: int, world_size: int) -> bool:
    importlib.import_module("fusedonebit.comm.mpi")
    return "mpi4py" in sys.modules


def test_nothing_imports_mpi4py_before_a_transport_is_made():
    assert run_ranks(imported, 2) == [False, False]


# ---------------------------------------------------------------- ranks that end

DYING = """
import os, sys, torch
from fusedonebit.comm.mpi import MPITransport
transport = MPITransport()
x = torch.ones(3)
transport.all_reduce(x)
if transport.rank == 1:
    {how}
transport.all_reduce(x)
print("went on")
"""


@needs_mpi
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "raise KeyError('mine')"], ids=["killed", "raises"])
def test_a_rank_that_ends_ends_the_job(how):
    began = time.monotonic()
    process = start_mpi(2, ["-c", DYING.format(how=how)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, errors = process.communicate(timeout=30)
    finally:
        end(process)
    print(f"{how}: the job ended after {time.monotonic() - began:.1f} s with status {process.returncode} (limit 30 s)")
    assert process.returncode not in (0, None)
    assert "went on" not in out
    assert "raise" not in how or "KeyError: 'mine'" in errors


def stand_still(rank: int, transport: Transport) -> None:
    if rank:
        signal.pause()


@needs_mpi
@pytest.mark.full
def test_the_example_runs_and_learns():
    root = Path(__file__).parents[2]
    (command,) = re.findall(r"^mpirun -n 2 python (.*)$", (root / "examples" / "mpi.py").read_text(), re.MULTILINE)
    process = start_mpi(2, [str(root / command)], stdout=subprocess.PIPE)
    try:
        out, _ = process.communicate(timeout=120)
    finally:
        end(process)
    assert process.returncode == 0
    first, *_, last = (float(loss) for loss in re.findall(r"loss (\d+\.\d+)", out))
    print(f"examples/mpi.py: loss {first} -> {last}")
    assert last < first / 3


@needs_mpi
def test_the_harness_ends_ranks_that_hang():
    with pytest.raises(RankError, match="rank 1 of 2 did not finish within 1 s"):
        run_mpi(stand_still, 2, timeout=1)
