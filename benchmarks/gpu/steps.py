"""The whole step on a GPU: Adam and LAMB from 10M to 1.3B parameters, eager and captured, against fused AdamW."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedonebit import Numerics, Wire

from .. import deepspeed_peer
from ..audit_steps import STEPS
from ..kernels import audited, copy_speed
from ..loopback import Loopback
from ..optimizers import FUSED, LR, THEIRS, Step, deepspeed, extra_bytes, numel_of, of_shapes
from ..registry import Record, Report, Table, case
from ..shapes import Shape, bert_large, gpt
from ..timing import Call, host_time, synchronise, time_by_turns, until_idle
from .profiled import ADAMW_BYTES, Launched, kernel_bytes, launched, shortened

MODELS: dict[str, list[Shape]] = {
    "10M": gpt(6, 320, vocabulary=8192, context=512),
    "50M": gpt(8, 512),
    "340M": bert_large(),
    "1.3B": gpt(24, 2048, context=2048),
}
SMALLEST, DEEPSPEED_AT = "10M", "340M"
NEEDED = 48
"""Bytes per parameter: parameters, gradients, AdamW's moments, and at their peak ours of LAMB, twice its variance."""
WAYS = ("eager", "captured")
SHOWN = 12
"""Kernels of a step, the longest; the others are one row."""
ENOUGH = 40.0
"""Milliseconds of a sample, if a step is shorter."""


class Peer(NamedTuple):
    """One of ours, and how many ranks it is one of; ``variance`` is what holds the frozen one."""

    optimizer: str
    world_size: int
    variance: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """In tables."""
        return f"{self.optimizer}, W={self.world_size}" + ", bf16 variance" * (self.variance is torch.bfloat16)

    @property
    def audited(self) -> str:
        """Of ``STEPS``."""
        kind = {"OneBitAdam": "1-bit Adam, preconditioned", "OneBitLamb": "1-bit LAMB, plain"}[self.optimizer]
        return kind + ", bf16 variance" * (self.variance is torch.bfloat16)

    def step(self, params: Sequence[Tensor], way: str) -> Step:
        """Return its compressed step, which has been taken a few times."""
        options: dict[str, Any] = {"wire": Wire(capturable=True)} if way == "captured" else {}
        if self.variance is not torch.float32:
            options["numerics"] = Numerics(frozen_dtype=self.variance)
        if self.world_size > 1:
            options["process_group"] = Loopback(self.world_size)
        return Step(self.optimizer, params, steps=4, **options)


BF16 = torch.bfloat16
PEERS = (
    Peer("OneBitAdam", 8, BF16),
    Peer("OneBitAdam", 1, BF16),
    Peer("OneBitAdam", 8),
    Peer("OneBitAdam", 1),
    Peer("OneBitLamb", 8),
    Peer("OneBitLamb", 1),
)
GOALS = {
    ("340M", PEERS[0].name, "eager"): 0.90,
    ("340M", PEERS[1].name, "eager"): 0.85,
    ("10M", PEERS[0].name, "captured"): 1.2,
}
"""Times fused AdamW's whole step, the same way."""
COLUMNS = {
    "optimizer": "<34",
    "way": "<9",
    "ms": ">8.3f",
    "10-90 %": ">17",
    "AdamW ms": ">8.3f",
    "x AdamW": ">8.3f",
    "device ms": ">9.3f",
}
COLUMNS |= {"x AdamW, device": ">15.3f", "host ms": ">8.3f", "extra B/param": ">13.3f"}
JUDGED = {"what": "<76", "measured": ">9.3f", "limit": "<24"}
LAUNCHES = "Launches of a step, from a profile, and what the audit counts of bytes"
KERNELS = {"optimizer": "<34", "way": "<9", "kernel": "<44", "a step": ">7.1f", "us": ">9.1f", "B/param": ">8.2f"}
KERNELS |= {"GB/s": ">8.0f", "of a copy": ">9.3f"}


def captured(call: Call, device: torch.device) -> Call:
    """The step as one CUDA graph; a call replays it."""
    synchronise(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class _Size:
    """The peers at one size, one after the other: two of them at a time would not fit."""

    def __init__(self, report: Report, name: str, shapes: Sequence[Shape]) -> None:
        self.report, self.name, self.device = report, name, report.device
        self.numel, self.rounds = numel_of(shapes), report.rounds or 9
        self.params = of_shapes(shapes, self.device)
        self.copy = copy_speed(self.numel, self.device, 5)
        told = f"{name}: {self.numel:,} fp32 parameters in {len(shapes)} tensors; a copy moves {self.copy:,.0f} GB/s"
        self.table = report.table(f"{told}; ms: host and device, steps in a row", COLUMNS)
        # A fused step counts on the device anyway.
        base = torch.optim.AdamW(self.params, lr=LR, fused=True, capturable=self.device.type == "cuda").step
        base()
        self.base: dict[str, Call] = {"eager": base}
        if self.device.type == "cuda":
            self.base["captured"] = captured(base, self.device)

    def add(self, name: str, way: str, call: Call, calls: int, **more: Any) -> Record:
        """Measure a peer by turns with AdamW, steps in a row and alone on the device."""
        peers = {FUSED: self.base[way], "peer": call}
        wall = time_by_turns(peers, self.device, self.rounds, 1, until_idle(self.device, calls))
        alone = time_by_turns(peers, self.device, self.rounds, 1)
        row: Record = {
            "optimizer": name,
            "way": way,
            "ms": wall["peer"].median,
            "10-90 %": f"{wall['peer'].low:.3f} to {wall['peer'].high:.3f}",
            "x AdamW": wall["peer"].median / wall[FUSED].median,
            "device ms": alone["peer"].median,
            "x AdamW, device": alone["peer"].median / alone[FUSED].median,
            "host ms": host_time(call, self.device, 5),
            "AdamW ms": wall[FUSED].median,
        }
        return self.table.add(**row, **more)

    def count(self, name: str, way: str, call: Call, moved: Mapping[str, float]) -> None:
        """Add what a step launches: a row of all, and one of each kernel."""
        found = launched(call, self.device)
        table = self._table(LAUNCHES, KERNELS)
        every = Launched("all", sum(each.count for each in found), sum(each.us for each in found))
        for each in (every, *shortened(found, SHOWN)):
            table.add(**self._kernel(name, way, each, moved))

    def _table(self, title: str, columns: Mapping[str, str]) -> Table:
        """Return the table of this title; begin it if it is not there."""
        tables = self.report.tables
        return next((t for t in tables if t.title.endswith(title)), None) or self.report.table(title, columns)

    def _kernel(self, name: str, way: str, each: Launched, moved: Mapping[str, float]) -> Record:
        per_param = sum(moved.values()) if each.name == "all" else each.bytes_of(moved)
        speed = per_param * self.numel / each.us / 1e3 if per_param and each.us else None
        row: Record = {"optimizer": name, "way": way, "kernel": each.name, "a step": each.count, "us": each.us}
        return row | {"B/param": per_param or None, "GB/s": speed, "of a copy": speed / self.copy if speed else None}

    def calls(self) -> int:
        """Steps in a row that take long enough to be timed."""
        self.base["eager"]()
        once = time_by_turns({FUSED: self.base["eager"]}, self.device, 3, 1, until_idle(self.device, 3))[FUSED].median
        return max(2, min(20, round(ENOUGH / once)))

    def _made(self, peer: Peer, way: str) -> tuple[Step, Call, int]:
        """Return a peer, what takes its step, and the bytes that were allocated before."""
        before = 0
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # the last one's graph has had memory of its own
            before = torch.cuda.memory_allocated()
        step = peer.step(self.params, way)
        return step, captured(step, self.device) if way == "captured" else step, before

    def measure(self, peer: Peer, way: str, calls: int) -> None:
        """Add a row of one of ours, and what is wanted of it."""
        step, call, before = self._made(peer, way)
        more: Record = {}
        if self.device.type == "cuda" and way == "eager":
            more["extra B/param"] = extra_bytes(step, before) / self.numel
        row = self.add(peer.name, way, call, calls, **more)
        step.check()
        goal = GOALS.get((self.name, peer.name, way))
        if goal is not None:
            what = f"{peer.name}, {way}, {self.name}: whole step, x AdamW(fused)"
            limit = self.report.limit(row["x AdamW"], at_most=goal)
            self._table("Goals", JUDGED).add(what=what, measured=row["x AdamW"], limit=limit)

    def profile(self, peer: Peer, way: str) -> None:
        """Count the launches of one of ours."""
        _, call, _ = self._made(peer, way)
        self.count(peer.name, way, call, kernel_bytes(audited(), STEPS[peer.audited], peer.world_size))

    def theirs(self) -> None:
        """Add DeepSpeed's own steps."""
        for name, kind in THEIRS.items():
            self.add(name, "eager", deepspeed(kind, 8)(self.params), 2)


def _attempts(size: _Size) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """All times, then all counts: who has profiled once may be slower for ever."""
    calls = size.calls()
    for peer in PEERS:
        for way in size.base:
            yield peer.name, way, partial(size.measure, peer, way, calls)
    if size.name == DEEPSPEED_AT and deepspeed_peer.available():
        yield "DeepSpeed", "eager", size.theirs
    for way, call in size.base.items():
        yield FUSED, way, partial(size.count, FUSED, way, call, {"multi_tensor_apply_kernel FusedAdam": ADAMW_BYTES})
    for peer in PEERS:
        for way in size.base:
            yield peer.name, way, partial(size.profile, peer, way)


def shapes_of(name: str, report: Report) -> Sequence[Shape]:
    """Return a model's shapes; those of so many parameters as the report wants, if it does."""
    return MODELS[name] if report.numel is None else [(report.numel // 2,), (report.numel // 4,), (7,)]


def steps(name: str, report: Report) -> None:
    """Measure all peers at a size; one that fails ends none behind it."""
    shapes = shapes_of(name, report)
    needed = NEEDED * numel_of(shapes)
    if report.device.type == "cuda" and (free := torch.cuda.mem_get_info()[0]) < needed:
        report.note(f"skipped: needs {needed >> 30} GiB of free device memory, there are {free >> 30}")
        return
    size, failed = _Size(report, name, shapes), 0
    for peer, way, measure in _attempts(size):
        try:
            measure()
        except Exception as error:  # out of memory among them
            traceback.print_exc()
            size.table.add(optimizer=peer, way=way, **{"10-90 %": f"FAILED: {type(error).__name__}"})
            failed += 1
    if report.device.type != "cuda":
        report.note("graphs are captured on CUDA only")
    if failed:
        raise AssertionError(f"{failed} measurements failed")


def warm(peer: Peer, report: Report) -> None:
    """Take a peer's steps once each way, so that its kernels are in Triton's cache, and say how long that took."""
    table = report.table(f"{peer.name}: steps that compile", {"way": "<9", "s": ">6.1f"})
    params = of_shapes(shapes_of(SMALLEST, report), report.device)
    for way in WAYS if report.device.type == "cuda" else WAYS[:1]:
        began = time.perf_counter()
        step = peer.step(params, way)
        (captured(step, report.device) if way == "captured" else step)()
        synchronise(report.device)
        step.check()
        table.add(way=way, s=time.perf_counter() - began)


for _name in MODELS:
    _about = f"The whole step at {_name} parameters, eager and in a CUDA graph, W = 8 and 1, against fused AdamW."
    case(f"steps-{_name}", "cuda", about=_about)(partial(steps, _name))
for _i, _peer in enumerate(PEERS):
    case(f"warm-{_i}", "cuda", about=f"Compiles the kernels of {_peer.name}.")(partial(warm, _peer))
