"""The compression-stage step of one rank, against torch's optimizers and DeepSpeed's own."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch

from fusedonebit.triton_kernels import eager, jit, using
from fusedonebit.triton_kernels.op import OPS

from .optimizers import (
    AGAINST_ADAMW,
    FOREACH,
    FUSED,
    ONEBIT,
    OURS,
    Step,
    adamw,
    against_adamw,
    all_by_turns,
    backends,
    lamb,
    makers,
    note_deepspeed,
    of_shapes,
    parameters,
)
from .registry import Record, Report, Table, case
from .timing import Call, one_thread, time_by_turns
from .workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


# ---------------------------------------------------------------- by the number of parameters


ON_CPU = [round(10 ** (half / 2)) for half in range(10, 16)]
ON_CUDA = [round(10 ** (half / 2)) for half in range(10, 19)]
METHODS = {
    FUSED: ("adamw", 0.0),
    "AdamW(foreach=True)": ("adamw", 0.5),
    "OneBitAdam": ("onebit-adam", 0.0),
    "OneBitLamb": ("onebit-lamb", 0.0),
    "DeepSpeed OnebitAdam": ("onebit-adam", 0.5),
    "DeepSpeed OnebitLamb": ("onebit-lamb", 0.5),
}
"""Of a line: its method's name, and how much lighter it is."""
DASHES = {"plain": ":", "native": "-", "triton": "-"}
End = tuple[tuple[float, float], str, str]
"""Of a line: where, its name and its colour."""


def draw(record: Record, path: Path) -> None:
    """Milliseconds by parameters, one line for each optimizer; its name stands at the line's end."""
    from fusedonebit.apps.pictures import lighter, method_colour, plt, save

    rows = [row for row in record["tables"][0]["rows"] if row.get("ms")]
    about = record["about"]
    figure, axis = plt.subplots(figsize=(8.5, 5), layout="constrained")
    ends: list[End] = []
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        points = sorted((row["parameters"], row["ms"]) for row in rows if row["optimizer"] == name)
        kind, _, backend = name.partition(", ")
        style = "--" if kind.startswith("DeepSpeed") else DASHES.get(backend, "-")
        method, share = METHODS[kind]
        colour = lighter(method_colour(method), share)
        axis.loglog(*zip(*points, strict=True), style, color=colour, marker="o", ms=3.5)
        ends.append((points[-1], name, colour))
    _label(axis, ends)
    cpu = about["device"].endswith("CPU")
    where = f"{about['device']}, one thread, load {about['load']:.0f} on {about['cpu_cores']} cores"
    axis.set_xlabel("parameters (float32)")
    axis.set_ylabel("ms per step")
    axis.set_title(
        f"Compression-stage step of one rank of {WORLD_SIZE}, {where if cpu else about['device']}",
        fontsize=10,
        loc="left",
    )
    axis.grid(which="major", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if about["dry_run"]:
        axis.text(0.5, 0.5, "dry run: no result", transform=axis.transAxes, ha="center", fontsize=24, alpha=0.4)
    save(figure, path, dpi=130)
    print(path)


def _label(axis: Axes, ends: list[End]) -> None:
    """Names at the lines' ends, moved up, and from the top down again, where they would overlap."""
    bottom, top = (math.log10(y) for y in axis.get_ylim())
    gap = 0.045 * (top - bottom)
    ends = sorted(ends, key=lambda end: end[0][1])
    places = [math.log10(y) for (_, y), *_ in ends]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    places[-1] = min(places[-1], top - 0.5 * gap)
    for i in reversed(range(len(places) - 1)):
        places[i] = min(places[i], places[i + 1] - gap)
    for ((x, _), name, colour), place in zip(ends, places, strict=True):
        axis.annotate(name, (x, 10**place), (8, 0), textcoords="offset points", va="center", fontsize=8, color=colour)


def _rounds(numel: int) -> int:
    """More where they cost nothing."""
    return min(51, max(5, 50_000_000 // numel))


@case("step-time", "both", draw)
def step_time(report: Report) -> None:
    """Step time against parameters, 10^5 to 10^7.5 (on a GPU to 10^9), each by turns with fused AdamW."""
    cuda = report.device.type == "cuda"
    points = [report.numel] if report.numel else ON_CUDA if cuda else ON_CPU
    columns = {"parameters": ">13,"} | AGAINST_ADAMW
    with contextlib.nullcontext() if cuda else one_thread():
        title = f"{TENSORS} tensors, fp32, one rank of {WORLD_SIZE}, messages copied on the device"
        table = report.table(title, columns)
        for numel in points:
            params = of_shapes([(max(1, numel // TENSORS),)] * TENSORS, report.device)
            base: list[float] = []

            def add(row: Record, numel: int = numel, base: list[float] = base) -> None:
                table.add(parameters=numel, **row)
                base += [row["adamw_ms"]] if "adamw_ms" in row else []

            against_adamw(params, makers(report.device, WORLD_SIZE, ONEBIT), report.rounds or _rounds(numel), add)
            # It took turns with every peer.
            median = statistics.median(base) if base else None
            table.add(parameters=numel, optimizer=FUSED, ms=median, **{"x AdamW(fused)": 1.0})
    note_deepspeed(report)
