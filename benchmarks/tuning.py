"""Block sizes and warps of the kernels: what the compiler makes of each.

``python -m benchmarks.tuning`` compiles every variant ahead of time for sm_90 and prints registers, shared memory,
instructions, and which of four limits a Hopper GPU would meet first. No GPU is needed, and none is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from triton.backends.compiler import GPUTarget

from . import audit, pages, sass
from .audit_kernels import BLOCK, kernel_of
from .chips import H100, H200, Variant
from .pages import TABLES, keep, markdown, read, write_tables

RESULTS = pages.RESULTS / "tuning"
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
    usual = kernel_of(name)
    chosen = usual._replace(given=usual.given | {"BLOCK_SIZE": block}, num_warps=num_warps)
    compiled = audit.compile_variant(chosen, target, STRIDES)
    registers, spills = audit.resources(compiled.asm["cubin"])
    full = sass.compile_full_block(compiled, target, num_warps)
    counted = sass.executed(full.asm["cubin"], chosen.world_size * chosen.walks)
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
        audit.bytes_per_block(compiled.asm["ttir"], chosen.loops),
        H200.resident(registers, num_warps, compiled.metadata.shared),
        dict(sorted(counted.loads.items())),
    )


def chosen(name: str) -> tuple[int, int]:
    """Elements per block and warps per program, as the launcher has them."""
    return BLOCK, kernel_of(name).num_warps


HEADER = (
    *("kernel", "block", "warps", "registers", "spills", "shared", "programs", "instructions/element"),
    *("FP64/element", "memory", "issue", "units", "latency", "of H200", "of H100"),
)


def row(v: Variant) -> list[str]:
    """One line of the table."""
    limits = v.limits(H200)
    cells = [v.kernel, v.block, v.num_warps, v.registers, v.spills, v.shared, v.resident]
    cells += [f"{v.per_element:.1f}", f"{v.fp64 * v.num_warps * 32 / v.block:.1f}"]
    cells += [f"{limits[name]:.0f}" for name in ("memory", "issue", "units", "latency")]
    cells += [f"{v.share(H200):.0%}", f"{v.share(H100):.0%}"]
    bold = (v.block, v.num_warps) == chosen(v.kernel)
    return [f"**{c}**" if bold else str(c) for c in cells]


def table(variants: list[Variant]) -> str:
    """Markdown; cycles are per 1024 elements of a multiprocessor."""
    return markdown([HEADER, *map(row, variants)]).strip()


def sweep(kernels: tuple[str, ...] = KERNELS) -> Iterator[Variant]:
    """Compiles every variant."""
    for name in kernels:
        for block in BLOCKS:
            for num_warps in WARPS:
                if block // num_warps >= 128:  # fewer are less than four elements a thread
                    yield variant(name, block, num_warps)


def walk_table(rows: list[dict[str, Any]]) -> str:
    """Markdown of ways to walk over the ranks that were tried for ``server_reduce``, which has the last of them."""
    head = ("walk", "warps", "registers", "spills", "instructions/element/rank", "barriers/rank", "ranks under way")
    told = [
        [r["walk"], r["num_warps"], r["registers"], r["spills"], f"{r['instructions']:.2f}", f"{r['barriers']:.2f}"]
        for r in rows
    ]
    return markdown([head, *([*cells, r["ranks_under_way"]] for cells, r in zip(told, rows, strict=True))]).strip()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Sweep block sizes and warps.")
    parser.add_argument("--kernels", nargs="*", default=KERNELS, choices=KERNELS)
    given = tuple(parser.parse_args(arguments).kernels)
    variants = list(sweep(given))
    print(table(variants))
    if given == KERNELS:
        tried = read(RESULTS / "sm_90.json")["walks"]  # of kernels that are gone
        shown = [v for v in variants if v.block == BLOCK]
        write_tables(PAGE, f"{table(shown)}\n\n{walk_table(tried)}")
        report = {"triton": audit.triton.__version__, "variants": [asdict(v) for v in variants], "walks": tried}
        keep(report, RESULTS / "sm_90.json")


if __name__ == "__main__":
    main()
