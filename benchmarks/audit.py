"""The audit: compiles what whole steps launch ahead of time, and counts what each kernel does, without a GPU.

It prints a table of kernels and targets: bytes per element, registers, spills and instructions. ``limits.json`` has a
line for each kernel with the worst that is accepted: these, barriers, and the narrowest load and store of a flat
float32 operand (in AMD's code the widest). ``--check`` exits with 1 where a number got worse. ``--update`` records what
whole steps launch, which takes minutes, and writes the kernels and today's numbers.

Bytes are those of one full block, counted in Triton's own IR, where a load names the shape of what it loads: unmasked
tensor loads and stores (blocks that are padded or masked take other paths), and the scalars a block reads. Widths,
registers and spills come from PTX and from the assembler.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.audit_kernels import LIMITS, PER_LAYER, WORLD_SIZES, Kernel, by_ranks, limits, named, record, variants
from benchmarks.audit_steps import HOOKS, MERGE_LIMIT, PEERS, ROUNDS, STEPS, round_bytes, step_bytes
from benchmarks.tritons import BUILD, recorded
from fusedonebit.triton_kernels.op import OPS

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass
class Audit:
    """What one compiled kernel does; bytes by ``WORLD_SIZES`` where they depend on the number of ranks."""

    registers: int
    spill_bytes: int
    barriers: int
    load_bits: int
    store_bits: int
    narrow_indices: int
    scalar_accesses: int
    instructions: int
    bytes_per_element: list[float]


def compile_variant(kernel: Kernel, target: GPUTarget, multiples: Collection[str] = ()) -> Any:
    """Compiles a kernel as the launcher would specialise it for its aligned operands, and ``multiples`` of 16."""
    function = OPS[kernel.op].kernel.triton
    types, constants, aligned = kernel.specialised()
    return compile_kernel(function, types, constants, kernel.num_warps, target, {*aligned, *multiples})


def compile_kernel(
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int,
    target: GPUTarget,
    multiples: Collection[str],
) -> Any:
    """Compiles a function for arguments of such types, of which addresses and numbers are known to be multiples."""
    names = list(types)
    # Of each number and address, as the launcher says it: it shall find in its cache what is compiled here.
    specialised = {n: i for i, n in enumerate(names) if types[n] != "constexpr" and not types[n].startswith("fp")}
    attributes = {(i,): [["tt.divisibility", 16]] if n in multiples else [] for n, i in specialised.items()}
    values = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=function, signature=dict(types), constexprs=values, attrs=attributes)
    return triton.compile(source, target=target, options={"num_warps": num_warps, "enable_fp_fusion": False})


def audit(kernel: Kernel, target: GPUTarget) -> Audit:
    """Compiles and counts."""
    compiled = compile_variant(kernel, target)
    ttir = compiled.asm["ttir"]
    moves = [moved(ttir, kernel._replace(world_size=n)) for n in (WORLD_SIZES if kernel.walks else (1,))]
    narrow = _narrow_indices(ttir, kernel.halves)
    if target.backend == "hip":
        return _audit_amd(compiled.asm["amdgcn"], narrow, moves)
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    return Audit(
        *resources(cubin),
        ptx.count("bar.sync"),
        _narrowest(ptx, "ld", kernel.packed),
        _narrowest(ptx, "st", kernel.packed),
        narrow,
        len(re.findall(r"(?:ld|st)\.global(?:\.\w+)*?\.b32\b", ptx)),
        instructions(cubin),
        moves,
    )


def moved(ttir: str, kernel: Kernel) -> float:
    """Bytes per element of a full block."""
    count = _bytes_per_scanned_block if kernel.op in PER_LAYER else bytes_per_block
    return (count(ttir, kernel.loops) - kernel.cached) / kernel.elements


# What the scalars that branches depend on are for a full block in the middle of a run.
_ASSUMED = {"row": 0, "skip": 0, "hold": 0, "base": 1, "bad": 0, "c0_i32": 0, "c0_i64": 0, "c1_i32": 1}


def bytes_per_block(ttir: str, loops: Iterable[int]) -> float:
    """Follows the branches that a full block takes, and adds up what is loaded and stored there."""
    total, values = 0.0, dict(_ASSUMED)
    regions: list[float] = []  # how often each enclosing region runs: 0 if its branch is not taken
    each = iter(loops)
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


def _bytes_per_scanned_block(ttir: str, loops: Iterable[int]) -> float:
    """What ``PER_LAYER`` kernels move per block: they scan what blocks left, one block to a (masked) lane.

    Loops over anything else, which run 0 times for a block, are not counted, nor what a segment's lane loads at first.
    """
    each, counted, total = iter(loops), 0, 0.0
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


def instructions(cubin: bytes) -> int:
    """Count those that the assembler has written, 16 bytes each, padding included."""
    offset, size, count, names = (*struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<3H", cubin, 58))
    sections = [struct.unpack_from("<2I4Q", cubin, offset + i * size) for i in range(count)]
    begin = sections[names][4]
    return sum(length for name, _, _, _, _, length in sections if cubin.startswith(b".text.", begin + name)) // 16


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


def _audit_amd(text: str, narrow: int, moves: list[float]) -> Audit:
    def widest(operation: str) -> int:
        widths = [int(n) * 32 for n in re.findall(rf"(?:global|buffer)_{operation}_dwordx(\d)", text)]
        return max(widths, default=0)

    scalar = len(re.findall(r"(?:global|buffer)_(?:load|store)_dword\b", text))
    written = len(re.findall(r"^\t(?:[vs]|global|buffer|ds|flat|scratch)_\w+", text, re.MULTILINE))
    widths = widest("load"), widest("store")
    used = _directive(text, "vgpr_count"), _spilled_amd(text), text.count("s_barrier")
    return Audit(*used, *widths, narrow, scalar, written, moves)


def hop_bytes(bytes_of: Mapping[str, float]) -> float:
    """What Marsit's operator moves per element and hop, besides the read of the local value."""
    return bytes_of["merge_signs"] - 1 / 8


def worse(name: str, now: Audit, limit: Mapping[str, Any], same_compiler: bool) -> list[str]:
    """Says what got worse than the limit; registers and the like are another compiler's own affair."""
    found = []
    for key, value in asdict(now).items():
        if key in ("registers", "barriers", "scalar_accesses", "instructions") and not same_compiler:
            continue
        if key == "bytes_per_element":
            # Fewer, too: either the kernel moves less, and the limit must follow, or the count misses some.
            got_worse = value != limit[key]
        else:
            got_worse = value < limit[key] if key in ("load_bits", "store_bits") else value > limit[key]
        if got_worse:
            found.append(f"{name}: {key} is {value}, the limit is {limit[key]}")
    return found


def run(kernels: Mapping[str, Kernel], targets: Collection[str] = tuple(TARGETS)) -> dict[str, dict[str, Audit]]:
    """Audits kernels for some of ``TARGETS``, sm_90 among them, printing a table as it goes."""
    results: dict[str, dict[str, Audit]] = {target: {} for target in targets}
    print(f"{'B/element':>10}", *(f"{target:>15}" for target in targets), " kernel; registers, spills, instructions")
    for name, kernel in kernels.items():
        for target, audits in results.items():
            audits[name] = audit(kernel, TARGETS[target])
        found = [audits[name] for audits in results.values()]
        cells = [f"{each.registers:4} {each.spill_bytes:3} {each.instructions:6}" for each in found]
        print(f"{results['sm_90'][name].bytes_per_element[0]:10.3f}", *cells, f" {name}", flush=True)
    return results


def told(bytes_of: Mapping[str, float]) -> Iterator[str]:
    """Says what whole steps move."""
    for name, world_size, counted, bound in whole_steps(bytes_of):
        yield f"{name}, whole step, fp32, W={world_size}: {counted:.3f} bytes per parameter (limit {bound:.3f})"
    besides = f"besides the read of the local value (limit {MERGE_LIMIT})"
    yield f"Marsit's operator, per element and hop: {hop_bytes(bytes_of):.3f} bytes {besides}"
    for name in ROUNDS:
        for world_size in WORLD_SIZES:
            counted = round_bytes(bytes_of, name, world_size)
            yield f"{name}, whole 1-bit round, fp32, M={world_size}: {counted:.3f} bytes per parameter ({PEERS})"


def whole_steps(bytes_of: Mapping[str, float]) -> Iterator[tuple[str, int, float, float]]:
    """Optimizer, world size, bytes per parameter of a compression-stage step, and their limit."""
    for name, step in (STEPS | HOOKS).items():
        for world_size in WORLD_SIZES:
            yield name, world_size, step_bytes(bytes_of, step, world_size), step.limit_of(world_size)


def update(kernels: Mapping[str, Kernel], results: Mapping[str, Mapping[str, Audit]]) -> None:
    """Writes today's numbers, a line for each kernel."""
    lines = []
    for name, kernel in kernels.items():
        numbers = {target: list(asdict(audits[name]).values()) for target, audits in results.items()}
        line = ({} if name == kernel.key else {"name": name}) | numbers
        lines.append(f"  {json.dumps(kernel.key)}: {json.dumps(line)}")
    columns = json.dumps([field.name for field in fields(Audit)])
    head = f'{{\n "triton": "{triton.__version__}",\n "columns": {columns},\n "kernels": {{\n'
    LIMITS.write_text(head + ",\n".join(lines) + "\n }\n}\n")


def main() -> int:
    """Runs the audit; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Audit the compiled kernels.")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a number is worse than its limit")
    parser.add_argument("--update", action="store_true", help="record the kernels, and write today's numbers as limits")
    parser.add_argument("--quick", action="store_true", help="for sm_90 alone, whose bytes whole steps are counted in")
    parser.add_argument("--keys", type=Path, help="launch keys that were recorded before (benchmarks.tritons)")
    given = parser.parse_args()
    if given.update and given.quick:
        parser.error("--update writes the numbers of all targets: leave out --quick")
    kernels = named()
    if given.update:
        path = given.keys or BUILD / "launch_keys.json"
        given.keys or recorded(path)
        names = {kernel.key: name for name, kernel in kernels.items()}
        kernels = {names.get(each.key, each.key): each for each in variants(json.loads(path.read_text()))}
    results = run(kernels, ["sm_90"] if given.quick else tuple(TARGETS))
    bytes_of = by_ranks({name: each.bytes_per_element for name, each in results["sm_90"].items()})
    if given.update:
        update(kernels, results)
    print(*told(bytes_of), sep="\n")
    if not given.check:
        return 0
    same = record()["triton"] == triton.__version__
    found = [
        text
        for target, audits in results.items()
        for name, now in audits.items()
        for text in worse(f"{name} on {target}", now, limits(target)[name], same)
    ]
    found += [f"{name}, W={w}: {now:.3f} bytes" for name, w, now, limit in whole_steps(bytes_of) if now > limit]
    found += [f"Marsit's operator: {b:.3f} bytes" for b in [hop_bytes(bytes_of)] if b > MERGE_LIMIT]
    print("\n".join(found) or "nothing got worse")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
