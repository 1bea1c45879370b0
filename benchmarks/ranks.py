"""Real gloo ranks in processes of one thread each; the step of all of them against AdamW's."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fusedonebit.apps.transformer import SIZES, ByteTransformer
from fusedonebit.triton_kernels import native

from . import deepspeed_peer
from .optimizers import AGAINST_ADAMW, FUSED, ONEBIT, THEIRS, Step, adamw, backends, check, note_deepspeed, parameters
from .registry import TIMES, Record, Report, case, times
from .step import NUMEL, TENSORS
from .timing import Call, on_host, samples_by_turns, summary

WORLD_SIZE = 2
LIMITS = {"OneBitAdam, native": 1.6, "OneBitLamb, native": 2.2, "OneBitAdam, plain": 8.0, "OneBitLamb, plain": 8.0}
"""Times AdamW(fused=True)."""
SMALLER = {1 << 20: 2.0, 100_000: 2.5}
"""The same of OneBitAdam, by parameters."""
THREADS, LIMIT_OF_THREADS = 2, 0.75
"""A rank's, and the share of the time of one thread that they may take."""
MANY, LIMIT_OF_EACH = 3000, 3.0
"""Tensors, and microseconds of each besides kernels."""


def on_ranks(function: Callable[..., Any], *arguments: Any, world_size: int = WORLD_SIZE) -> Any:
    """Calls ``function(*arguments)`` on every rank of a gloo group; returns what rank 0 returned, as JSON has it.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with a rank's traceback, if any fails.
    """
    print(f"{world_size} processes start; they print when all turns are done ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (world_size, folder, function, arguments), nprocs=world_size)
        return json.loads((Path(folder) / "result").read_text())


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: tuple) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    # They meet in a file, on the loopback interface: no port is open to others.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        result = function(*arguments)
        if rank == 0:
            (Path(folder) / "result").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads end a process with an error that ends while one of them still runs


def times_of_all(peers: Mapping[str, Call], rounds: int, warmup: int = 2) -> dict[str, Record]:
    """Calls the peers by turns on all ranks, which begin each call together; the slowest rank's time counts."""

    def together(call: Call) -> float:
        dist.barrier()
        return on_host(call)

    timed: dict[str, Record] = {}
    for name, samples in samples_by_turns(peers, together, rounds, warmup).items():
        slowest = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        timed[name] = times(summary(slowest.tolist()))
    return timed


def _params(numel: int, tensors: int = TENSORS) -> list[torch.Tensor]:
    torch.manual_seed(0)  # ranks start from the same values
    made = parameters(numel, tensors)
    for p in made:
        p.grad = p.grad + 0.1 * dist.get_rank() * torch.randn_like(p)  # type: ignore[operator]
    return made


def _steps(numel: int, rounds: int) -> dict[str, Record]:
    params = partial(_params, numel)
    peers: dict[str, Call] = {FUSED: adamw(params())}
    for backend in backends(torch.device("cpu")):
        peers |= {f"{name}, {backend}": Step(name, params(), backend) for name in ONEBIT}
    if deepspeed_peer.available():
        peers |= {label: deepspeed_peer.make(kind, params()).step for label, kind in THEIRS.items()}
        # Four collectives a tensor otherwise; OnebitLamb flattens by itself.
        peers["DeepSpeed OnebitAdam, one tensor"] = deepspeed_peer.make("OnebitAdam", params(1)).step
    return _checked(peers, rounds)


def _checked(peers: Mapping[str, Call], rounds: int) -> dict[str, Record]:
    timed = times_of_all(peers, rounds)
    for call in peers.values():
        check(call)
    return timed


def _of_adam(numel: int, rounds: int) -> dict[str, Record]:
    return _checked({FUSED: adamw(_params(numel)), ONEBIT[0]: Step(ONEBIT[0], _params(numel))}, rounds)


def _by_threads(numel: int, rounds: int) -> dict[str, Record]:
    """Time the same steps on one thread and on ``THREADS``, by turns."""

    def on(threads: int, step: Step) -> Call:
        def call() -> None:
            torch.set_num_threads(threads)
            step()

        return call

    step = Step(ONEBIT[0], _params(numel))
    timed = times_of_all({str(threads): on(threads, step) for threads in (1, THREADS)}, rounds)
    step.check()
    return timed


def _besides_kernels(tensors: int, rounds: int) -> dict[str, float]:
    """Time steps of tiny tensors, and in them the kernels in C; median milliseconds of both, of this rank."""
    kernels: list[float] = []
    start = native.Kernel.start

    def timed(self: native.Kernel, *arguments: Any) -> None:
        kernels[-1] += on_host(partial(start, self, *arguments))

    whole: list[float] = []
    with mock.patch.object(native.Kernel, "start", timed):
        kernels.append(0.0)
        step = Step(ONEBIT[0], _params(8 * tensors, tensors))
        for _ in range(rounds + 2):
            kernels.append(0.0)
            dist.barrier()
            whole.append(on_host(step))
    return {"ms": summary(whole[2:]).median, "kernels": summary(kernels[3:]).median}


@case("ranks", "cpu")
def ranks(report: Report) -> None:
    """The compression-stage step on 2 gloo ranks, messages and all, against AdamW on each; the slower rank counts."""
    numel, rounds = report.numel or NUMEL, report.rounds or 11
    timed = on_ranks(_steps, numel, rounds)
    columns = AGAINST_ADAMW | {"limit": "<14"}
    table = report.table(f"{numel:,} fp32 parameters in {TENSORS} tensors a rank, one thread each", columns)
    base = timed[FUSED]["ms"]
    for name, row in timed.items():
        ratio = row["ms"] / base
        table.add(optimizer=name, **row, **{"x AdamW(fused)": ratio}, limit=report.limit(ratio, LIMITS.get(name)))
    note_deepspeed(report)
    _add_fewer(report, rounds)
    _add_threads(report, numel, rounds)
    _add_many(report, rounds)


def _add_fewer(report: Report, rounds: int) -> None:
    limits: dict[int, float | None] = {report.numel: None} if report.numel else dict(SMALLER)
    found = {numel: on_ranks(_of_adam, numel, 4 * rounds) for numel in limits}
    table = report.table(f"{TENSORS} tensors", {"parameters": ">10,"} | AGAINST_ADAMW | {"limit": "<14"})
    for numel, timed in found.items():
        row, base = timed[ONEBIT[0]], timed[FUSED]["ms"]
        ratio = row["ms"] / base
        row |= {"x AdamW(fused)": ratio, "limit": report.limit(ratio, limits[numel])}
        table.add(parameters=numel, optimizer=ONEBIT[0], **row)


def _add_threads(report: Report, numel: int, rounds: int) -> None:
    timed = on_ranks(_by_threads, numel, rounds)
    columns = {"threads": ">7"} | TIMES | {"x one": ">7.2f", "limit": "<14"}
    table = report.table(f"{ONEBIT[0]}, {numel:,} parameters, by threads a rank", columns)
    for threads, row in timed.items():
        ratio = row["ms"] / timed["1"]["ms"]
        limit = report.limit(ratio, LIMIT_OF_THREADS) if threads == str(THREADS) else None
        table.add(threads=threads, **row, **{"x one": ratio}, limit=limit)


def _add_many(report: Report, rounds: int) -> None:
    found = on_ranks(_besides_kernels, MANY, 2 * rounds)
    each = 1e3 * (found["ms"] - found["kernels"]) / MANY
    columns = {"tensors": ">7,", "ms": ">9.2f", "of it C kernels": ">15.2f", "us a tensor": ">11.2f", "limit": "<14"}
    table = report.table(f"{ONEBIT[0]}, tensors of 8 elements, besides kernels", columns)
    row = {"ms": found["ms"], "of it C kernels": found["kernels"], "us a tensor": each}
    table.add(tensors=MANY, **row, limit=report.limit(each, LIMIT_OF_EACH))


SEQ_LEN, BATCH = 64, 16
"""Of the demo, as its command has them by default."""


def _demo(rounds: int) -> dict[str, Record]:
    torch.manual_seed(0)
    model = ByteTransformer(SIZES["small"], SEQ_LEN)
    own = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(256, (BATCH, SEQ_LEN + 1), generator=own)

    def backward() -> None:
        model.zero_grad()
        model(tokens).backward()

    backward()
    params, cpu = list(model.parameters()), torch.device("cpu")
    steps = {f"OneBitAdam, {name}": Step("OneBitAdam", params, name) for name in backends(cpu)}
    return times_of_all({"forward and backward": backward} | steps, rounds, warmup=5)


@case("demo", "cpu")
def demo(report: Report) -> None:
    """What the demo's training step spends on its model and, in the compression stage, on the optimizer, 2 ranks."""
    timed = on_ranks(_demo, report.rounds or 51)
    table = report.table(
        "the demo's model and batch", {"part": "<24", "ms": ">9.2f", "10-90 %": ">19", "share": ">7.1%"}
    )
    model = timed["forward and backward"]["ms"]
    for name, row in timed.items():
        share = None if row["ms"] == model else row["ms"] / (row["ms"] + model)
        table.add(part=name, **row, share=share)
    report.note("share: of a step that is forward and backward pass and this")
