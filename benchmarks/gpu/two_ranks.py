"""Two real ranks, of a GPU each over NCCL (on a CPU over gloo): their data differ, and their parameters must not.

After a check that fails, two fresh ranks go on with the next: one that hangs or has crashed takes no other along.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..registry import Report, case
from .smoke import CAPTURABLE, COLUMNS, OPTIMIZERS, STEPS, Run, replays_equal_steps

RANKS = 2
BYTES = 48 * 1024 + 16
PATIENCE, AFTER_A_FAILURE, COLLECTIVE = 100.0, 5.0, 30.0
"""Seconds for an answer of a rank, for the other's where one has failed, and for one collective."""
Check = Callable[[int, torch.device], str]


class Answer(NamedTuple):
    """What became of a check on one rank: ``error`` is a kind of it, or "" where it passed."""

    error: str
    told: str


# ---------------------------------------------------------------- checks, which each rank makes


def _bytes_of(rank: int, device: torch.device) -> Tensor:
    """What a rank sends, a row to each, as all ranks know."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(256, (RANKS, BYTES), generator=generator, dtype=torch.uint8).to(device)


def exchanges_bytes(rank: int, device: torch.device) -> str:
    """Each rank's row for each other, as the compressed all-reduce sends packed bits."""
    received = torch.zeros(RANKS, BYTES, dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, _bytes_of(rank, device))
    return _equal(received, torch.stack([_bytes_of(w, device)[rank] for w in range(RANKS)]))


def gathers_bytes(rank: int, device: torch.device) -> str:
    """All of each rank's bytes on both."""
    received = torch.zeros(RANKS * RANKS, BYTES, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(received, _bytes_of(rank, device))
    return _equal(received, torch.cat([_bytes_of(w, device) for w in range(RANKS)]))


def _equal(received: Tensor, expected: Tensor) -> str:
    if not torch.equal(received, expected):
        raise AssertionError(f"{int((received != expected).sum())} of {expected.numel()} bytes are others")
    return f"{expected.numel()} bytes"


def agrees(name: str, rank: int, device: torch.device) -> str:
    """Warm-up, freeze and compression on gradients of its own: the other rank's parameters bit by bit."""
    run = Run(name, device, rank, process_group=None)
    before = torch.cat([p.detach().flatten() for p in run.params])
    found, stats = _trained(run)
    if stats["skipped_steps"]:
        raise AssertionError(f"{stats['skipped_steps']} steps were skipped")
    if torch.equal(found, before) or not found.isfinite().all():
        raise AssertionError("parameters stand still, or are not finite")
    ranks = torch.empty(RANKS, found.numel(), device=device)
    dist.all_gather_into_tensor(ranks, found[None])
    unequal = int((ranks[0].view(torch.int32) != ranks[1].view(torch.int32)).sum())
    if unequal:
        raise AssertionError(f"{unequal} of {found.numel()} elements differ between the ranks")
    return f"{found.numel()} elements, {stats['phase']}"


def _trained(run: Run) -> tuple[Tensor, dict[str, Any]]:
    """Take steps to the end of a round, within which 0/1 Adam's ranks are apart."""
    last = STEPS
    params = run.train(0, last)
    while (stats := run.optimizer.stats()).get("local_steps"):
        params = run.train(last, last + 1)
        last += 1
    return torch.cat([p.flatten() for p in params]), stats


def replays(name: str, rank: int, device: torch.device) -> str:
    """Two graphs that hold the collectives: the bits of steps without graphs."""
    return replays_equal_steps(name, device, rank=rank, process_group=None)


def checks() -> dict[str, Check]:
    """All that are made, those first that others rest on."""
    found: dict[str, Check] = {"uint8 all_to_all_single": exchanges_bytes, "uint8 all-gather": gathers_bytes}
    found |= {f"{name}: same bits on both ranks": partial(agrees, name) for name in OPTIMIZERS}
    return found | {f"{name}: graphs with collectives": partial(replays, name) for name in CAPTURABLE}


def answer(check: Check, rank: int, device: torch.device) -> Answer:
    """Make a check."""
    try:
        return Answer("", check(rank, device))
    except Exception as error:
        traceback.print_exc()
        return Answer(type(error).__name__, str(error).strip().split("\n")[0][:200])


# ---------------------------------------------------------------- ranks, and who asks them


def _serve(rank: int, kind: str, store: str, names: Sequence[str], pipe: Connection) -> None:
    """Be a rank: answer each check, then wait to be ended, so that nobody waits for what a torn group still holds."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=COLLECTIVE),
    )  # fmt: skip
    made = checks()
    for name in names:
        print(f"rank {rank}: {name}", flush=True)
        pipe.send(answer(made[name], rank, device))
    pipe.poll(None)


def _together(kind: str, names: Sequence[str]) -> Iterator[list[Answer]]:
    """Yield both ranks' answers to each check, up to the first that fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # imported once for all ranks, which few cores feel
    ranks: list[tuple[ForkServerProcess, Connection]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(RANKS):
                here, there = context.Pipe()
                given = (rank, kind, os.path.join(folder, "store"), names, there)
                ranks.append((context.Process(target=_serve, args=given, daemon=True), here))
                ranks[-1][0].start()
                there.close()
            for _ in names:
                answers = _answers(ranks)
                yield answers
                if any(each.error for each in answers):
                    return
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join(1.0)
                pipe.close()


def _answers(ranks: Sequence[tuple[ForkServerProcess, Connection]]) -> list[Answer]:
    found: dict[Any, Answer] = {}
    patience = PATIENCE
    while len(found) < RANKS:
        ready = wait([pipe for _, pipe in ranks if pipe not in found], patience)
        if not ready:
            break
        for process, pipe in ranks:
            if pipe in ready:
                found[pipe] = _received(process, pipe)
                patience = AFTER_A_FAILURE if found[pipe].error else patience
    return [found.get(pipe, Answer("no answer", f"after {patience:g} s")) for _, pipe in ranks]


def _received(process: ForkServerProcess, pipe: Connection) -> Answer:
    try:
        return Answer(*pipe.recv())
    except (EOFError, ConnectionError):
        process.join(1.0)
        return Answer("ended", f"with exit status {process.exitcode}")


@case("two-ranks", "cuda")
def two_ranks(report: Report) -> None:
    """Every optimizer on two GPUs over NCCL: data differ, parameters have the same bits, graphs hold collectives."""
    kind = report.device.type
    if kind == "cuda" and torch.cuda.device_count() < RANKS:
        raise RuntimeError("one GPU: no two ranks")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    table = report.table(f"two ranks over {'NCCL' if kind == 'cuda' else 'gloo'}", COLUMNS)
    left = list(checks())
    while left:
        began = time.perf_counter()
        for answers in _together(kind, tuple(left)):
            name, bad = left.pop(0), [(w, each) for w, each in enumerate(answers) if each.error]
            result = "FAILED: " + ", ".join(f"{each.error} on rank {w}" for w, each in bad) if bad else "passed"
            told = bad[0][1].told if bad else answers[0].told
            table.add(check=name, result=result, told=told, s=time.perf_counter() - began)
            began = time.perf_counter()
    failed = sum(row["result"] != "passed" for row in table.rows)
    if failed:
        raise AssertionError(f"{failed} of {len(table.rows)} checks failed")
