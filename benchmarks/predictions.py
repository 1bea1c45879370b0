"""What every kernel and whole steps take on five GPUs, from counts and the chips' public figures alone.

``python -m benchmarks.predictions`` prints the tables, ``--update`` writes ``docs/tables/predictions.md`` and
``results/predictions.json``. Instructions are as they were counted before; ``--count`` counts them anew, for which it
compiles every kernel for each NVIDIA chip. No GPU is needed. What an H100 has measured stands beside the predictions.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from .audit_kernels import BLOCK, PER_LAYER, audited, kernel_of
from .audit_steps import STEPS
from .chips import ATTAINABLE, CHIPS, H100, LAUNCH, Chip, Variant, chain_of
from .gpu.steps import MODELS, PEERS, Peer
from .kernels import FULL, KERNELS
from .optimizers import numel_of
from .pages import RESULTS, TABLES, keep, markdown, read, write_tables

RECORD, MEASURED = RESULTS / "predictions.json", RESULTS / "h100" / "speed.json"
SIZES = ("340M", "10M")
PAGE = TABLES / "predictions.md"
GOAL = 0.1
"""Median deviation of what is measured."""
Rows = list[dict[str, Any]]
Table = Iterator[Sequence[Any]]
WALKED = 1024 * 1024
"""Elements whose blocks a layer's program reads at once."""
WALKS = {"lamb_rescale": 1, "lamb_coefficient": 2, "lamb_follow": 1}
"""Loads for each of these, one after the other."""
SMALL = 3
"""Launches of a captured step that move a few numbers: a copy from the host, one on the device, a fill."""

Counted = Mapping[str, Mapping[str, Variant]]
"""Of each target each kernel."""
Times = dict[str, float]


# ---------------------------------------------------------------- the model


def microseconds(chip: Chip, kernel: str, elements: float, largest: int, counted: Counted) -> Times:
    """Return what one launch of a kernel waits for; it takes ``begin`` and the largest of the others.

    Args:
        largest: Elements of the largest tensor.
    """
    op, cycle = kernel.partition(",")[0], 1e6 / chip.clock
    chain = chain_of(kernel) + WALKS.get(op, 0) * (-(-largest // WALKED) - 1)
    found = {"memory": _moving(chip, audited()[kernel] * elements), "begin": chain * chip.latency * cycle}
    variant = counted.get(chip.target or "", {}).get(kernel)
    if variant is None:
        return found
    each = elements / 1024 / chip.multiprocessors * cycle
    cycles = variant.limits(chip)
    return found | {name: each * cycles[name] for name in ("issue", "units", "latency")}


def _moving(chip: Chip, nbytes: float) -> float:
    return 1e6 * nbytes / (ATTAINABLE * chip.bandwidth)


def total(times: Times) -> float:
    """Return microseconds of a launch."""
    return times["begin"] + max(us for name, us in times.items() if name != "begin")


def _per_element(chip: Chip, kernel: str, counted: Counted) -> float | None:
    variant = counted.get(chip.target or "", {}).get(kernel)
    return variant.per_element if variant else None


# ---------------------------------------------------------------- kernels and steps


def kernel_rows(counted: Counted) -> Iterator[dict[str, Any]]:
    """Each kernel on each chip, of a single tensor; the server's by itself on its share of the elements."""
    for kernel in KERNELS:
        elements = FULL // kernel.world_size
        for chip in CHIPS:
            times = microseconds(chip, kernel.name, elements, FULL, counted)
            yield {
                "chip": chip.name,
                "kernel": kernel.name,
                "elements": elements,
                "bytes": audited()[kernel.name] * elements,
                "instructions": _per_element(chip, kernel.name, counted),
                "launches": 1,
                "us": total(times),
                "held by": max(times, key=times.__getitem__),
            }


def launches_of(peer: Peer) -> list[tuple[str, int]]:
    """Return the kernels of a step, each with the ranks that share its elements."""
    step, world_size = STEPS[peer.audited], peer.world_size
    if world_size == 1:  # no server, whose messages would be taken up
        own = (name for name in step.kernels if not name.startswith("receive"))
        return [("finish_alone" if name == "finish" else name, 1) for name in own]
    served = (name if name in audited() else f"{name}, W={world_size}" for name in step.served)
    return [*((name, 1) for name in step.kernels), *((name, world_size) for name in served)]


def copies_of(world_size: int) -> tuple[float, ...]:
    """Bytes per parameter of the copies that stand for all-to-all and all-gather on one GPU (``loopback``)."""
    return () if world_size == 1 else (0.25, 0.125 * (1 + 1 / world_size))


def step_rows(counted: Counted) -> Iterator[dict[str, Any]]:
    """Each step of each size on each chip, as one CUDA graph."""
    for size in SIZES:
        for peer in PEERS:
            for chip in CHIPS:
                yield step_row(chip, peer, size, counted)


def step_row(chip: Chip, peer: Peer, size: str, counted: Counted) -> dict[str, Any]:
    """Add up a step's launches."""
    numel, largest = numel_of(MODELS[size]), max(numel_of([shape]) for shape in MODELS[size])
    kernels, copies = launches_of(peer), copies_of(peer.world_size)
    of_op: Times = {}
    for name, ranks in kernels:
        op = name.partition(",")[0]
        of_op[op] = of_op.get(op, 0.0) + total(microseconds(chip, name, numel / ranks, largest, counted))
    load = 1e6 * chip.latency / chip.clock
    others = sum(load + _moving(chip, each * numel) for each in copies) + SMALL * load
    launches = len(kernels) + len(copies) + SMALL
    return {
        "chip": chip.name,
        "step": peer.name,
        "size": size,
        "bytes": (sum(audited()[name] / ranks for name, ranks in kernels) + sum(copies)) * numel,
        "instructions": _instructions(chip, kernels, counted),
        "launches": launches,
        "us": sum(of_op.values()) + others + launches * 1e6 * LAUNCH,
        "kernels": of_op,
    }


def _instructions(chip: Chip, kernels: list[tuple[str, int]], counted: Counted) -> float | None:
    """Per parameter, of those kernels that could be counted."""
    each = [(_per_element(chip, name, counted), ranks) for name, ranks in kernels]
    return sum((found or 0.0) / ranks for found, ranks in each) if chip.target else None


def record_of(counted: Counted) -> dict[str, Any]:
    """Return what was counted, and all rows that follow."""
    found = {target: {name: asdict(each) for name, each in of.items()} for target, of in counted.items()}
    return {"counted": found, "kernels": list(kernel_rows(counted)), "steps": list(step_rows(counted))}


# ---------------------------------------------------------------- what is counted


def count() -> dict[str, dict[str, Variant]]:
    """Compile what is predicted for every target, and count what can be."""
    from . import tuning  # Triton only where something is compiled
    from .launch_keys import TARGETS

    names = dict.fromkeys((*(k.name for k in KERNELS), *(name for peer in PEERS for name, _ in launches_of(peer))))
    return {
        target: {
            name: _counted(tuning.variant(name, BLOCK, kernel_of(name).num_warps, TARGETS[target]))
            for name in names
            if _can_be_counted(name, target)
        }
        for target in dict.fromkeys(chip.target for chip in CHIPS if chip.target)
    }


def _can_be_counted(name: str, target: str) -> bool:
    """Whether instructions can: not of programs that walk over layers, and of the server's walk only Hopper's.

    Before, the assembler ends that loop with a call, over which a branch is taken for that over a slow division.
    """
    op = kernel_of(name).op
    return op not in PER_LAYER and (op != "server_reduce" or target == "sm_90")


def _counted(variant: Variant) -> Variant:
    """Return it with the elements and, as the audit has them, the bytes that belong to a program of its kernel."""
    elements = kernel_of(variant.kernel).elements
    return replace(variant, block=elements, bytes=audited()[variant.kernel] * elements)


def counted_in(record: Mapping[str, Any]) -> dict[str, dict[str, Variant]]:
    """Return the counts of a record."""
    return {
        target: {name: Variant(**each) for name, each in found.items()} for target, found in record["counted"].items()
    }


# ---------------------------------------------------------------- beside what an H100 has measured


def compared(record: Mapping[str, Any], measured: Rows) -> Iterator[dict[str, Any]]:
    """Each step that was measured on an H100, captured, and the kernels of its profile, beside what was predicted."""
    rows = {(row["step"], row["size"]): row for row in record["steps"] if row["chip"] == H100.name}
    for case in measured:
        size = case["case"].removeprefix("steps-")
        for row in (row for table in case["tables"] for row in table["rows"] if row.get("way") == "captured"):
            said = rows.get((row["optimizer"], size))
            if said is None:
                continue
            told = {"step": row["optimizer"], "size": size}
            if "kernel" not in row:
                yield told | {"kernel": None, "predicted": said["us"], "measured": 1e3 * row["ms"]}
            elif (op := row["kernel"].removesuffix("_kernel")) in said["kernels"]:
                yield told | {"kernel": op, "predicted": said["kernels"][op], "measured": row["us"]}


def deviation(rows: Rows) -> float:
    """Return the median of how far what was measured is from what was predicted."""
    return statistics.median(abs(_ratio(row) - 1) for row in rows)


def _ratio(row: Mapping[str, Any]) -> float:
    return row["measured"] / row["predicted"]


# ---------------------------------------------------------------- tables


def _shown(rows: Rows) -> str | None:
    found = next(row["instructions"] for row in rows if row["chip"] == H100.name)
    return None if found is None else f"{found:.0f}" if found >= 1 else f"{found:.1f}"


def tables(record: Mapping[str, Any], measured: Rows) -> str:
    """Return the page's tables, of steps, of what was measured, and of kernels."""
    found = list(compared(record, measured))
    every = (_steps(record, found), _verdict(found), _measured_kernels(found), _kernels(record))
    return "\n".join(map(markdown, every))


def _steps(record: Mapping[str, Any], found: Rows) -> Table:
    head = ("a step, ms", "B/parameter", "instructions/parameter", "launches")
    yield *head, *(chip.name for chip in CHIPS), "H100, measured", "measured / predicted"
    for size in SIZES:
        for peer in PEERS:
            rows = [row for row in record["steps"] if (row["step"], row["size"]) == (peer.name, size)]
            seen = next((r for r in found if (r["step"], r["size"], r["kernel"]) == (peer.name, size, None)), None)
            beside = (f"{seen['measured'] / 1e3:.3f}", f"{_ratio(seen):.3f}") if seen else (None, None)
            per = f"{rows[0]['bytes'] / numel_of(MODELS[size]):.2f}"
            head = (f"{peer.name}, {size}", per, _shown(rows), rows[0]["launches"])
            yield *head, *(f"{row['us'] / 1e3:.3f}" for row in rows), *beside


def _verdict(found: Rows) -> Table:
    yield "measured on an H100", "number", "median deviation", f"goal: at most {GOAL:.0%}", "measured / predicted"
    for size in (None, *SIZES):
        of_size = [row for row in found if size in (None, row["size"])]
        steps, kernels = ([row for row in of_size if bool(row["kernel"]) is which] for which in (False, True))
        for what, rows in (("whole steps", steps), ("kernels in them", kernels)):
            median = deviation(rows)
            told = "met" if median <= GOAL else "**missed**"
            yield what + (f", {size}" if size else ""), len(rows), f"{median:.1%}", told, _span(rows)


def _span(rows: Rows) -> str:
    ratios = [_ratio(row) for row in rows]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _measured_kernels(found: Rows) -> Table:
    yield "launches of it in steps, H100, measured / predicted", *SIZES
    for op in dict.fromkeys(row["kernel"] for row in found if row["kernel"]):
        yield op, *(_span([r for r in found if (r["kernel"], r["size"]) == (op, size)]) for size in SIZES)


def _kernels(record: Mapping[str, Any]) -> Table:
    yield "a kernel, us", "elements", "B/element", "instructions/element", *(chip.name for chip in CHIPS)
    for kernel in KERNELS:
        rows = [row for row in record["kernels"] if row["kernel"] == kernel.name]
        elements = rows[0]["elements"]
        per = re.sub(r"\.?0+$", "", f"{rows[0]['bytes'] / elements:.4f}")
        us = (f"{row['us']:,.0f}" + _MARKS.get(row["held by"], "") for row in rows)
        yield kernel.name, f"{elements:,}", per, _shown(rows), *us


_MARKS = {"issue": " i", "units": " u", "latency": " l", "begin": " b"}
"""What decides, if it is not memory."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Predict every kernel and whole steps on five GPUs.")
    parser.add_argument("--update", action="store_true", help="write the record and the page")
    parser.add_argument("--count", action="store_true", help="compile and count anew, which takes minutes")
    given = parser.parse_args(arguments)
    counted = count() if given.count else counted_in(read(RECORD))
    record = record_of(counted)
    text = tables(record, read(MEASURED))
    if given.update:
        keep(record, RECORD)
        write_tables(PAGE, text)
    print(text)


if __name__ == "__main__":
    main()
