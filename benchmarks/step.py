"""The compression-stage step of one rank on a CPU, against torch's optimizers and DeepSpeed's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

from fusedonebit.triton_kernels import eager, jit, using
from fusedonebit.triton_kernels.op import OPS

from .optimizers import (
    AGAINST_ADAMW,
    FOREACH,
    FUSED,
    OURS,
    Step,
    adamw,
    all_by_turns,
    backends,
    lamb,
    makers,
    note_deepspeed,
    parameters,
)
from .registry import Report, Table, case
from .timing import Call, one_thread, time_by_turns
from .workload import Workload

NUMEL, TENSORS, WORLD_SIZE = 1 << 23, 64, 2


@case("step", "cpu")
def step(report: Report) -> None:
    """The compression-stage step of one rank of 2 against torch's AdamW and DeepSpeed's own, one thread."""
    numel = report.numel or NUMEL
    with one_thread():
        table = report.table(
            f"{numel:,} fp32 parameters in {TENSORS} tensors, one rank of {WORLD_SIZE}, messages copied in memory",
            AGAINST_ADAMW,
        )
        peers: dict[str, Call] = {FUSED: adamw(parameters(numel, TENSORS))}
        for name, make in ({"Lamb": lamb} | makers(report.device, WORLD_SIZE)).items():
            peers[name] = make(parameters(numel, TENSORS))
        all_by_turns(table, peers, report.rounds or 11)
    note_deepspeed(report)


@case("compiled", "cpu")
def compiled(report: Report) -> None:
    """``torch.compile(optimizer.step)`` against the same step without, world size 1, one thread."""
    numel = report.numel or NUMEL
    with one_thread():
        table = report.table(f"{numel:,} fp32 parameters in {TENSORS} tensors", COMPILED)
        for name in (FUSED, FOREACH):
            call = adamw(parameters(numel, TENSORS), name)
            _compare(table, name, call, torch.compile(call), report.rounds)
        call = lamb(parameters(numel, TENSORS))
        _compare(table, "Lamb", call, torch.compile(call, fullgraph=True), report.rounds)
        for name in OURS:
            for backend in backends(report.device):
                # One optimizer for both: two would lie in other memory, which makes more of a difference.
                add_compiled(
                    table, f"{name}, {backend}", Step(name, parameters(numel, TENSORS), backend), report.rounds
                )
        _eager(report)
    report.note("our ops are opaque to the compiler: a ratio of 1, but for noise")


Judged = Callable[[float], str | None]
COMPILED = {"optimizer": "<24", "eager ms": ">9.3f", "compiled ms": ">11.3f", "ratio": ">7.3f"}


def _unjudged(ratio: float) -> str | None:
    return None


def add_compiled(table: Table, name: str, ours: Step, rounds: int | None, judged: Judged = _unjudged) -> None:
    """Adds the row of one of our optimizers; ``judged`` says of the ratio whether it is within a limit."""
    _compare(table, name, ours, ours.compiled(), rounds, judged)
    ours.check()


TILE = 1 << 16
"""Elements: what eager works on at once."""


def _eager(report: Report) -> None:
    """The eager function itself as Inductor compiles it: in torch alone, since NumPy is not torch's to compile."""
    compress = Workload((TILE,), report.device).call("momentum_compress")
    columns = {"momentum_compress": "<24", "us": ">9.1f", "ns/element": ">11.2f", "s to compile": ">13.1f"}
    table = report.table(f"one tile of {TILE:,} elements, eager compiled and not", columns)

    def add(name: str, call: Call, seconds: float | None = None) -> None:
        us = 1e3 * time_by_turns({name: call}, rounds=report.rounds or 51)[name].median
        row = {"momentum_compress": name, "us": us, "ns/element": 1e3 * us / TILE}
        table.add(**row, **{"s to compile": seconds})

    for backend in backends(report.device):
        with using(backend):  # type: ignore[arg-type]
            add(backend, compress)
    in_torch = mock.patch.multiple(eager, numpy=None), mock.patch.multiple(jit, numpy=None)
    with in_torch[0], in_torch[1], torch._inductor.config.patch(force_disable_caches=True):
        fast = partial(torch.compile(OPS["momentum_compress"].eager), *compress.args)
        began = time.perf_counter()
        fast()
        add("torch.compile of eager", fast, time.perf_counter() - began)


def _compare(table: Table, name: str, eager: Call, fast: Call, rounds: int | None, judged: Judged = _unjudged) -> None:
    torch._dynamo.reset()  # a graph for each optimizer: torch stops at eight
    fast()  # compiles
    timed = time_by_turns({"eager": eager, "compiled": fast}, rounds=rounds or 11, warmup=2)
    medians = [timing.median for timing in timed.values()]
    ratio = medians[1] / medians[0]
    row = {"eager ms": medians[0], "compiled ms": medians[1], "ratio": ratio}
    table.add(optimizer=name, **row, limit=judged(ratio))
