"""Block sizes and warps of the kernels: what the compiler makes of each, or what a GPU measures.

``python -m benchmarks.tuning`` compiles every variant ahead of time for sm_90 and prints registers, shared memory,
instructions, and which of four limits a Hopper GPU would meet first. No GPU is needed, and none is timed.
``python -m benchmarks.tuning --device cuda`` measures the same variants by turns with a device copy of as many
bytes and writes ``results/tuning/<device>.json``; ``--device cpu`` is a dry run of that code.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget

from . import audit, sass, tuning_kernels
from .audit_cases import BLOCK, CASES, Case
from .chips import H100, H200, Variant
from .pages import TABLES, write_tables

RESULTS = Path(__file__).parent / "results" / "tuning"
PAGE = TABLES / "tuning.md"
BLOCKS = (512, 1024, 2048, 4096)
WARPS = (1, 2, 4, 8)
KERNELS = (
    "momentum_compress",
    "momentum_compress, bf16",
    "momentum_compress, preconditioned",
    "server_reduce, W=2",
    "server_reduce, W=8",
    "server_reduce, W=64",
    "apply_momentum",
    "apply_momentum, bf16",
    "apply_momentum, preconditioned",
    "lamb_ratio",
    "adam_update",
)
STRIDES = ("arrived_bits_stride", "exp_avg_bits_stride", "bits_stride")
"""Messages are multiples of 16 bytes, which the launcher sees."""


def variant(name: str, block: int, num_warps: int, target: GPUTarget = audit.TARGETS["sm_90"]) -> Variant:
    """Compiles and counts."""
    case = _case(name, block, num_warps)
    compiled = audit.compile_case(case, target, STRIDES)
    registers, spills = audit.resources(compiled.asm["cubin"])
    usual = sass.compile_full_block(compiled, target, num_warps)
    match = re.search(r"W=(\d+)", name)
    counted = sass.executed(usual.asm["cubin"], int(match.group(1)) if match else 0)
    return Variant(
        name,
        block,
        num_warps,
        registers,
        spills,
        compiled.metadata.shared,
        counted.by_name["BAR"],
        counted.total,
        counted.fp64,
        counted.conversions,
        counted.by_name["SHFL"],
        counted.by_name["MUFU"],
        audit.bytes_per_block(compiled.asm["ttir"], case.loops),
        H200.resident(registers, num_warps, compiled.metadata.shared),
        dict(sorted(counted.loads.items())),
    )


def chosen(name: str) -> tuple[int, int]:
    """Elements per block and warps per program, as the launcher has them."""
    return BLOCK, CASES[name].num_warps


def _case(name: str, block: int, num_warps: int) -> Case:
    case = CASES[name]
    return replace(case, changes=case.changes | {"BLOCK_SIZE": block}, num_warps=num_warps)


HEADER = (
    *("kernel", "block", "warps", "registers", "spills", "shared", "programs", "instructions/element"),
    *("FP64/element", "memory", "issue", "units", "latency", "of H200", "of H100"),
)


def row(v: Variant) -> str:
    """One line of the table."""
    limits = v.limits(H200)
    cells = [v.kernel, v.block, v.num_warps, v.registers, v.spills, v.shared, v.resident]
    cells += [f"{v.per_element:.1f}", f"{v.fp64 * v.num_warps * 32 / v.block:.1f}"]
    cells += [f"{limits[name]:.0f}" for name in ("memory", "issue", "units", "latency")]
    cells += [f"{v.share(H200):.0%}", f"{v.share(H100):.0%}"]
    bold = (v.block, v.num_warps) == chosen(v.kernel)
    return "| " + " | ".join(f"**{c}**" if bold else str(c) for c in cells) + " |"


def table(variants: list[Variant]) -> str:
    """Markdown; cycles are per 1024 elements of a multiprocessor."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---|" + "--:|" * (len(HEADER) - 1)]
    return "\n".join([*lines, *map(row, variants)])


def sweep(kernels: tuple[str, ...] = KERNELS) -> Iterator[Variant]:
    """Compiles every variant."""
    for name in kernels:
        for block in BLOCKS:
            for num_warps in WARPS:
                if block // num_warps >= 128:  # fewer are less than four elements a thread
                    yield variant(name, block, num_warps)


# ---------------------------------------------------------------- the server's walk over the ranks


def walks(num_warps: int = 4, ranks: int = 64) -> Iterator[dict[str, Any]]:
    """What was tried: per element and rank, instructions; per rank, barriers; loads before the first barrier waits."""
    target = audit.TARGETS["sm_90"]
    for number, name in enumerate(tuning_kernels.WALKS):
        constants = {"WALK": number, "BLOCK": 1024}
        types = tuning_kernels.TYPES | dict.fromkeys(constants, "constexpr")
        compiled = audit.compile_kernel(tuning_kernels.walk, types, constants, num_warps, target, STRIDES)
        registers, spills = audit.resources(compiled.asm["cubin"])
        many, few = (sass.executed(compiled.asm["cubin"], n) for n in (2 * ranks, ranks))
        yield {
            "walk": name,
            "num_warps": num_warps,
            "registers": registers,
            "spills": spills,
            "instructions": (many.total - few.total) / ranks * num_warps * 32 / 1024,
            "barriers": (many.by_name["BAR"] - few.by_name["BAR"]) / ranks,
            "ranks_under_way": sass.ranks_under_way(compiled.asm["cubin"]),
        }


def walk_table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| walk | warps | registers | spills | instructions/element/rank | barriers/rank | ranks under way |"]
    lines.append("|---|" + "--:|" * 6)
    for r in rows:
        cells = (r["walk"], r["num_warps"], r["registers"], r["spills"], f"{r['instructions']:.2f}")
        lines.append("| " + " | ".join(map(str, (*cells, f"{r['barriers']:.2f}", r["ranks_under_way"]))) + " |")
    return "\n".join(lines)


# ---------------------------------------------------------------- measured, where there is a GPU


@contextmanager
def built_with(block: int, num_warps: int) -> Iterator[None]:
    """Within it, layouts of a ``Workload`` have such blocks, and launches so many warps."""
    from fusedonebit.triton_kernels import FlatLayout, layout, op, using

    with (
        mock.patch.object(layout, "BLOCK_SIZES", (*BLOCKS, 256, 128)),
        mock.patch("benchmarks.workload.FlatLayout", partial(FlatLayout, block_size=block)),
        mock.patch.object(op, "NUM_WARPS", num_warps),
        # A dry run is eager's: C kernels know the package's own blocks only.
        nullcontext() if torch.cuda.is_available() else using("plain"),
    ):
        yield


def measure(device: torch.device, numel: int, rounds: int, kernels: tuple[str, ...] = KERNELS) -> Iterator[dict]:
    """Each variant by turns with a copy of as many bytes."""
    from .timing import copy_of, time_by_turns
    from .workload import Workload

    for name in kernels:
        case, match = CASES[name], re.search(r"W=(\d+)", name)
        ranks, dtype = int(match.group(1)) if match else 1, torch.bfloat16 if "bf16" in name else torch.float32
        per_element = json.loads(audit.LIMITS.read_text())["sm_90"][name]["bytes_per_element"]
        for block in BLOCKS:
            for num_warps in WARPS:
                with built_with(block, num_warps):
                    work = Workload((numel,), device, ranks, dtype, preconditioned="preconditioned" in name)
                    elements = work.layout.chunk_numel if match else work.layout.numel
                    peers = {"kernel": work.call(case.kernel), "copy": copy_of(per_element * elements, device)}
                    timed = time_by_turns(peers, device, rounds)
                kernel, copy = timed["kernel"], timed["copy"]
                yield {"kernel": name, "block": block, "num_warps": num_warps, "elements": elements} | {
                    "ms": asdict(kernel),
                    "copy_ms": asdict(copy),
                    "share_of_copy": copy.median / kernel.median,
                }
                del work, peers


def main(arguments: list[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Sweep block sizes and warps.")
    parser.add_argument("--device", help="cuda: measure; cpu: a dry run of that; none: compile only")
    parser.add_argument("--numel", type=int, default=340_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kernels", nargs="*", default=KERNELS, choices=KERNELS)
    given = parser.parse_args(arguments)
    if given.device is None:
        variants = list(sweep(tuple(given.kernels)))
        tried = [each for num_warps in (2, 4) for each in walks(num_warps)]
        print(table(variants), walk_table(tried), sep="\n\n")
        if tuple(given.kernels) == KERNELS:
            shown = [v for v in variants if v.block == BLOCK]
            write_tables(PAGE, f"{table(shown)}\n\n{walk_table(tried)}")
        report: dict[str, Any] = {"triton": audit.triton.__version__, "variants": [asdict(v) for v in variants]}
        report["walks"] = tried
        name = "sm_90"
    else:
        device = torch.device(given.device)
        rows = []
        for each in measure(device, given.numel, given.rounds, tuple(given.kernels)):
            print(f"{each['kernel']:36} {each['block']:5} {each['num_warps']} {each['share_of_copy']:6.3f} of a copy")
            rows.append(each)
        if device.type != "cuda":
            print("a dry run in eager torch: no result")
            return
        name = re.sub(r"\W+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
        report = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "measured": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
