"""``pytest benchmarks/micro``: each op from 10^4 to 10^9 elements against its peers.

Peers of a group: the Triton kernel, eager torch (as it is, and under torch.compile), and a
device copy of as many bytes as the kernel is audited to move. On a CPU eager torch alone, up to 10^6
elements. A round is one call and, on CUDA, a synchronisation; ``extra_info`` holds the device's own
time, by events.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.timing import Call, copy_of, time_by_turns
from benchmarks.workload import CALLS, OF_TWO_WORKERS, PRECONDITIONED, Workload
from fusedonebit.triton_kernels import eager, using
from fusedonebit.triton_kernels.op import OPS

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NUMEL = [10**n for n in range(4, 10 if CUDA else 7)]
PEERS = [*(["triton"] if CUDA else []), "eager", "eager, compiled", "copy"]
AUDITED = json.loads((Path(__file__).parents[1] / "limits.json").read_text())["sm_90"]
WORKING_SET = {"triton": 40, "eager": 60, "eager, compiled": 140, "copy": 40}  # bytes per element, generous
ONE_TILE = 1 << 40
CASES = [*CALLS, *(f"{op}, preconditioned" for op in PRECONDITIONED)]


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def bytes_per_element(case: str) -> float:
    return AUDITED[f"{case}, W=2" if case in OF_TWO_WORKERS else case]["bytes_per_element"]


def synchronised(call: Call) -> Call:
    def run() -> None:
        call()
        if CUDA:
            torch.cuda.synchronize()

    return run


def compiled(op: str, arguments: tuple) -> Call:
    """Eager under torch.compile; skips where no compiler can make it."""
    torch.compiler.reset()
    call = partial(torch.compile(OPS[op].eager), *OPS[op].signature.flat(*arguments))
    try:
        call()
    except Exception as error:
        pytest.skip(f"torch.compile failed: {type(error).__name__}: {str(error)[:200]}")
    return call


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("numel", NUMEL)
@pytest.mark.parametrize("case", CASES)
def test_op(benchmark, monkeypatch, case: str, numel: int, peer: str):
    if CUDA and WORKING_SET[peer] * numel > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"needs about {WORKING_SET[peer] * numel >> 30} GiB of free device memory")
    benchmark.group = f"{case}, {numel:,} elements"
    moved = bytes_per_element(case) * numel
    op, _, preconditioned = case.partition(", ")
    if peer == "copy":
        call = copy_of(moved, DEVICE)
    else:
        # The server serves half of the elements: `numel` elements, from each of two workers.
        sizes = (2 * numel if op == "server_reduce" else numel,)
        world_size = 2 if op in OF_TWO_WORKERS else 1
        call = Workload(sizes, DEVICE, world_size, preconditioned=bool(preconditioned)).call(op)
    if peer == "eager, compiled":
        monkeypatch.setitem(eager.TILE_NUMEL, DEVICE.type, ONE_TILE)
    with using("triton" if peer == "triton" else "plain"):
        if peer == "eager, compiled":
            call = compiled(op, call.args)
        timing = time_by_turns({peer: call}, DEVICE, rounds=10, warmup=2)[peer]
        benchmark.extra_info |= {"device_ms": timing.median, "GB_per_s": moved / timing.median / 1e6}
        benchmark.extra_info |= {"device": torch.cuda.get_device_name() if CUDA else "cpu", "peer": peer}
        benchmark.pedantic(synchronised(call), rounds=20, iterations=1, warmup_rounds=3)
