"""The byte audit: compiles every kernel ahead of time and counts what it does, without a GPU.

For each target it prints registers, spills and barriers, the narrowest load and store of a flat
float32 operand, and the exact bytes that one full block moves, per element. ``limits.json`` holds
the worst that is accepted; ``--check`` exits with 1 where a number got worse, ``--update`` writes
today's numbers.

Bytes are counted in Triton's own IR, where a load names the shape of what it loads: unmasked tensor
loads and stores (blocks that are padded or masked take other paths), and the scalars a block reads.
Widths, registers and spills come from PTX and from the assembler.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.audit_cases import CASES, PER_LAYER, VARIANTS, Case, Loops
from benchmarks.audit_steps import MERGE_LIMIT, PEERS, ROUNDS, STEPS, round_bytes, step_bytes
from fusedonebit.triton_kernels.op import OPS

LIMITS = Path(__file__).with_name("limits.json")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass
class Audit:
    """What one compiled kernel does."""

    registers: int
    spill_bytes: int
    barriers: int
    load_bits: int
    store_bits: int
    bytes_per_element: float
    narrow_indices: int
    scalar_accesses: int


def compile_case(case: Case, target: GPUTarget, multiples: Collection[str] = ()) -> Any:
    """Compiles a kernel as the launcher would specialise it for aligned operands, and ``multiples`` of 16."""
    kernel = OPS[case.kernel].kernel
    assert kernel is not None
    return compile_kernel(kernel.triton, *case.specialised(), case.num_warps, target, multiples)


def compile_kernel(
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int,
    target: GPUTarget,
    multiples: Collection[str] = (),
    aligned: bool = True,
) -> Any:
    """Compiles a function for arguments of such types; see ``compile_case``.

    Where not ``aligned``, only those pointers are that are among ``multiples``.
    """
    names = list(types)
    known = {n for n in names if n in multiples or (aligned and types[n][0] == "*")}
    # Of each number and address, as the launcher says it: it shall find in its cache what is compiled here.
    specialised = {n: i for i, n in enumerate(names) if types[n] != "constexpr" and not types[n].startswith("fp")}
    attributes = {(i,): [["tt.divisibility", 16]] if n in known else [] for n, i in specialised.items()}
    values = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=function, signature=dict(types), constexprs=values, attrs=attributes)
    return triton.compile(source, target=target, options={"num_warps": num_warps, "enable_fp_fusion": False})


def audit(case: Case, target: GPUTarget) -> Audit:
    """Compiles and counts."""
    compiled = compile_case(case, target)
    ttir = compiled.asm["ttir"]
    count = _bytes_per_scanned_block if case.kernel in PER_LAYER else bytes_per_block
    counted = (count(ttir, case.loops) - case.cached) / case.elements
    if target.backend == "hip":
        return _audit_amd(compiled.asm["amdgcn"], counted, _narrow_indices(ttir, case.halves))
    registers, spilled = resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Audit(
        registers,
        spilled,
        ptx.count("bar.sync"),
        _narrowest(ptx, "ld", case.packed),
        _narrowest(ptx, "st", case.packed),
        counted,
        _narrow_indices(ttir, case.halves),
        len(re.findall(r"(?:ld|st)\.global(?:\.\w+)*?\.b32\b", ptx)),
    )


# What the scalars that branches depend on are for a full block in the middle of a run.
_ASSUMED = {"row": 0, "skip": 0, "hold": 0, "base": 1, "bad": 0, "c0_i32": 0, "c0_i64": 0, "c1_i32": 1}


def bytes_per_block(ttir: str, loops: Loops) -> float:
    """Follows the branches that a full block takes, and adds up what is loaded and stored there."""
    total, values = 0.0, dict(_ASSUMED)
    regions: list[float] = []  # how often each enclosing region runs: 0 if its branch is not taken
    each = _each_loop(loops)
    for line in ttir.splitlines():
        times = min(regions, default=1) and max([*regions, 1])
        if match := re.search(r"%(\w+) = arith\.constant (-?\d+) : i\d", line):
            values[match.group(1)] = int(match.group(2))
        if match := re.search(r"%(\w+) = tt\.load %(\w+)", line):
            values[match.group(1)] = _assumed(match.group(2))
        if match := re.search(r"%(\w+) = arith\.cmpi (\w+), %(\w+), %(\w+) : i\d", line):
            values[match.group(1)] = _compare(match.group(2), *(values.get(n, _assumed(n)) for n in match.groups()[2:]))
        if match := re.search(r"%(\w+) = arith\.andi %(\w+), %(\w+) : i1", line):
            values[match.group(1)] = min(values.get(n, 1) for n in match.groups()[1:])
        if match := re.search(r"tt\.(load|store) (.*?) : (.*?) loc", line):
            total += times * _size(match.group(3))
        if "} else {" in line:
            regions[-1] = 1 - regions[-1]
        elif line.rstrip().endswith("}") or re.match(r"\s*}\)? (loc|:)", line):
            regions and regions.pop()
        elif match := re.search(r"scf\.if %(\w+)", line):
            regions.append(values[match.group(1)])
        elif "scf.for" in line:
            regions.append(next(each))
        elif re.search(r"\{( loc.*)?$", line):
            regions.append(1)
    return total


def _assumed(name: str) -> int:
    stem = re.sub(r"_\d+$", "", name)
    return _ASSUMED.get(name, _ASSUMED.get(stem, 1))


def _compare(predicate: str, left: int, right: int) -> int:
    return int({"eq": left == right, "ne": left != right}.get(predicate, True))


def _each_loop(loops: Loops) -> Iterator[int]:
    """How often each loop runs, in the order of the code."""
    return iter(loops) if isinstance(loops, tuple) else itertools.repeat(loops)


def _bytes_per_scanned_block(ttir: str, loops: Loops) -> float:
    """What ``PER_LAYER`` kernels move per block: they scan what blocks left, one block to a (masked) lane.

    Loops over anything else, which run 0 times for a block, are not counted, nor what a segment's lane loads at first.
    """
    each, counted, total = _each_loop(loops), 0, 0.0
    for line in ttir.splitlines():
        counted = next(each) if "scf.for" in line else counted
        if match := re.search(r"tt\.(?:load|store) [^:]*,[^:]*: tensor<\d+x!tt\.ptr<\w(\d+)>>", line):
            total += counted * int(match.group(1)) / 8
    return total


def _narrow_indices(ttir: str, halves: int) -> int:
    """Arithmetic on the program id that is not in 64 bits, and so would wrap past 2^31; ``halves`` may be cut."""
    ids = re.findall(r"%(\w+) = tt\.get_program_id", ttir)
    uses = [line for line in ttir.splitlines() for i in ids if re.search(rf"[ (,]%{i}\b(?! =)", line)]
    cut = len(re.findall(r"arith\.trunci .* i64 to i32", ttir))
    return abs(cut - halves) + sum("arith.extsi" not in line and "arith.cmpi" not in line for line in uses)


def _size(kind: str) -> float:
    match = re.search(r"(?:tensor<)?((?:\d+x)*)!tt\.ptr<(\w+)>", kind)
    assert match, kind
    elements = 1
    for n in filter(None, match.group(1).split("x")):
        elements *= int(n)
    bits = int(re.sub(r"\D", "", match.group(2)))
    return elements * bits / 8


def _narrowest(ptx: str, operation: str, predicated: bool) -> int:
    """Bits per thread of the narrowest vector access of 32-bit data, of unpredicated ones unless told; 0 if none."""
    widths, predicate = [], r"(?:@%p\d+ )?" if predicated else ""
    for line in ptx.splitlines():
        match = re.match(rf"\s*{predicate}{operation}\.global(?:\.\w+)*?\.(?:v(\d)\.)?b(32|64)\b", line)
        if match and match.group(1):
            widths.append(int(match.group(1)) * int(match.group(2)))
    return min(widths, default=0)


def resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def spilled(compiled: Any, target: GPUTarget) -> int:
    """Returns what a compiled kernel keeps outside of registers because they are too few: bytes, of AMD registers."""
    if target.backend == "hip":
        return _spilled_amd(compiled.asm["amdgcn"])
    return resources(compiled.asm["cubin"])[1]


def _directive(text: str, name: str) -> int:
    match = re.search(rf"\.{name}:?\s+(\d+)", text)
    return int(match.group(1)) if match else 0


def _spilled_amd(text: str) -> int:
    return sum(_directive(text, n) for n in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"))


def _audit_amd(text: str, counted: float, narrow: int) -> Audit:
    def widest(operation: str) -> int:
        widths = [int(n) * 32 for n in re.findall(rf"(?:global|buffer)_{operation}_dwordx(\d)", text)]
        return max(widths, default=0)

    widths = widest("load"), widest("store")
    scalar = len(re.findall(r"(?:global|buffer)_(?:load|store)_dword\b", text))
    return Audit(
        _directive(text, "vgpr_count"), _spilled_amd(text), text.count("s_barrier"), *widths, counted, narrow, scalar
    )


def hop_bytes(audits: dict[str, Audit]) -> float:
    """What Marsit's operator moves per element and hop, besides the read of the local value."""
    return audits["merge_signs"].bytes_per_element - 1 / 8


def worse(name: str, now: Audit, limit: dict[str, float], same_compiler: bool) -> list[str]:
    """Says what got worse than the limit; registers and barriers are another compiler's own affair."""
    found = []
    for key, value in asdict(now).items():
        if key in ("registers", "barriers", "scalar_accesses") and not same_compiler:
            continue
        wider_is_better = key in ("load_bits", "store_bits")
        if key == "bytes_per_element" and abs(value - limit[key]) > 1e-9:
            # Fewer, too: either the kernel moves less, and the limit must follow, or the count misses some.
            found.append(f"{name}: {key} is {value:g}, was {limit[key]:g}")
        elif (value < limit[key]) if wider_is_better else (value > limit[key] + 1e-9):
            found.append(f"{name}: {key} is {value:g}, the limit is {limit[key]:g}")
    return found


def run(targets: Iterable[str] = TARGETS) -> dict[str, dict[str, Audit]]:
    """Audits all cases for some of ``TARGETS``, sm_90 among them, printing as it goes."""
    results: dict[str, dict[str, Audit]] = {}
    print(
        f"{'kernel':34} {'target':7} {'regs':>4} {'spill':>5} {'barriers':>8} {'load':>5} {'store':>5} {'B/element':>9}"
    )
    for target_name in targets:
        results[target_name], target = {}, TARGETS[target_name]
        for name, case in CASES.items():
            a = results[target_name][name] = audit(case, target)
            print(
                f"{name:34} {target_name:7} {a.registers:4} {a.spill_bytes:5} {a.barriers:8} "
                f"{a.load_bits:5} {a.store_bits:5} {a.bytes_per_element:9.3f}"
            )
        spilled = [name for name, case in VARIANTS.items() if audit(case, target).spill_bytes]
        assert not spilled, f"{target_name}: spills in {', '.join(spilled)}"
        print(f"{len(VARIANTS)} variants compiled for {target_name}, no spills")
    for name, world_size, counted, bound in whole_steps(results):
        print(f"{name}, whole step, fp32, W={world_size}: {counted:.3f} bytes per parameter (limit {bound:.3f})")
    audits = results["sm_90"]
    print(
        f"Marsit's operator, per element and hop: {hop_bytes(audits):.3f} bytes "
        f"besides the read of the local value (limit {MERGE_LIMIT})"
    )
    for name in ROUNDS:
        for world_size in (2, 8, 64):
            counted = round_bytes(_bytes_of(audits), name, world_size)
            print(f"{name}, whole 1-bit round, fp32, M={world_size}: {counted:.3f} bytes per parameter ({PEERS})")
    return results


def _bytes_of(audits: dict[str, Audit]) -> dict[str, float]:
    return {name: a.bytes_per_element for name, a in audits.items()}


def whole_steps(results: dict[str, dict[str, Audit]]) -> Iterator[tuple[str, int, float, float]]:
    """Optimizer, world size, bytes per parameter of a compression-stage step on sm_90, and their limit."""
    bytes_of = _bytes_of(results["sm_90"])
    for name, step in STEPS.items():
        for world_size in (2, 8, 64):
            yield name, world_size, step_bytes(bytes_of, step, world_size), step.limit_of(world_size)


def main() -> int:
    """Runs the audit; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Audit the compiled kernels.")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a number is worse than its limit")
    parser.add_argument("--update", action="store_true", help="write today's numbers as limits")
    parser.add_argument("--quick", action="store_true", help="for sm_90 alone, whose bytes whole steps are counted in")
    arguments = parser.parse_args()
    if arguments.update and arguments.quick:
        parser.error("--update writes the numbers of all targets: leave out --quick")
    results = run(["sm_90"] if arguments.quick else TARGETS)
    if arguments.update:
        table: dict[str, Any] = {t: {n: asdict(a) for n, a in audits.items()} for t, audits in results.items()}
        table["triton"] = triton.__version__
        LIMITS.write_text(json.dumps(table, indent=1) + "\n")
    if not arguments.check:
        return 0
    limits = json.loads(LIMITS.read_text())
    same = limits["triton"] == triton.__version__
    found = [
        text
        for t, audits in results.items()
        for n, a in audits.items()
        for text in worse(f"{n} on {t}", a, limits[t][n], same)
    ]
    found += [f"{name}, W={w}: {now:.3f} bytes" for name, w, now, limit in whole_steps(results) if now > limit]
    found += [f"Marsit's operator: {b:.3f} bytes" for b in [hop_bytes(results["sm_90"])] if b > MERGE_LIMIT]
    print("\n".join(found) or "nothing got worse")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
