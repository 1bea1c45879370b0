"""What a compiled kernel executes on its usual path: instructions counted in the assembler's output, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_BRANCH = re.compile(r"(?P<predicate>@!?U?P\w+ )?BRA.*?0x(?P<target>[0-9a-f]+)")
FP64 = ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX")
"""Instructions of the FP64 units."""


@dataclass
class Executed:
    """Instructions that one warp executes for one block.

    Attributes:
        total: All of them.
        by_name: By the first part of their names.
        loads: Bytes a thread loads or stores with one instruction, and how many such instructions there are.
    """

    total: int = 0
    by_name: Counter[str] = field(default_factory=Counter)
    loads: Counter[int] = field(default_factory=Counter)

    @property
    def fp64(self) -> int:
        """Of the FP64 units."""
        return sum(self.by_name[name] for name in FP64)

    @property
    def conversions(self) -> int:
        """From and to 64 bits, which have a quarter of the FP64 units' rate."""
        return self.by_name["F2F"]


def full_block(ttir: str) -> str:
    """Triton's IR of a full block in a step that is not skipped: its row of live elements is 0, and so are the flags.

    Blocks that are cut off, which mask all they load, are one per tensor.
    """
    lines = []
    for line in ttir.splitlines():
        match = re.match(
            r"(\s*%[\w]+) = tt\.load %(?:row|hold|skip|live_row)\w*\b.* : !tt\.ptr<i32>( loc\(.*\))?", line
        )
        if match:
            line = f"{match.group(1)} = arith.constant 0 : i32{match.group(2) or ''}"
        lines.append(line)
    return "\n".join(lines)


def compile_full_block(compiled: Any, target: Any, num_warps: int) -> Any:
    """The same kernel once more, of ``full_block``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttir"
        path.write_text(full_block(compiled.asm["ttir"]))
        return triton.compile(str(path), target=target, options={"num_warps": num_warps, "enable_fp_fusion": False})


def disassemble(cubin: bytes) -> list[tuple[int, str]]:
    """Address and text of each instruction."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True)
    return [(int(a, 16), text) for a, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", done.stdout)]


def executed(cubin: bytes, ranks: int = 0) -> Executed:
    """Counts the instructions of the usual path.

    Branches forward over a call are taken: they jump over the slow path of a division or a root. What lies
    behind the last exit is only reached by such calls. Loops walk over ``ranks``, and multiply one scale of each: a
    body runs as often as it fits into what those before it have left, one without a multiplication once.
    """
    lines = disassemble(cubin)
    last = max((i for i, (_, text) in enumerate(lines) if re.search(r"\bEXIT\b", text) and "@" not in text), default=0)
    lines = lines[: last + 1]
    times = [1] * len(lines)
    at = {address: i for i, (address, _) in enumerate(lines)}
    bodies = []
    for i, (_, text) in enumerate(lines):
        match = _BRANCH.search(text)
        target = at.get(int(match.group("target"), 16)) if match else None
        if target is None or match is None:
            continue
        if target < i:
            bodies.append((target, i + 1))
        elif match.group("predicate") and any("CALL" in skipped for _, skipped in lines[i + 1 : target]):
            times[i + 1 : target] = [0] * (target - i - 1)
    for begin, end in bodies:
        each = sum("FMUL" in text for _, text in lines[begin:end])
        count = ranks // each if each else 1
        ranks -= count * each
        times[begin:end] = [count * t for t in times[begin:end]]
    return _counted(lines, times)


def _counted(lines: list[tuple[int, str]], times: list[int]) -> Executed:
    result = Executed()
    for (_, text), count in zip(lines, times, strict=True):
        name = re.sub(r"^@!?U?P\w+ ", "", text).split()[0]
        if name == "NOP" or not count:
            continue
        result.total += count
        result.by_name[name.split(".")[0]] += count
        if name.startswith(("LDG", "STG")):
            width = re.search(r"\.(8|16|U8|S8|U16|64|128)\b", name)
            bits = int(re.sub(r"\D", "", width.group(1))) if width else 32
            result.loads[bits // 8] += count
    return result
