"""Finds races between the warps of a program, in Triton's own IR of a compiled kernel, without a GPU.

A word that one warp loads and another stores, with no barrier between, is loaded as it was or as it will be. Warps
share words where a block has fewer elements than they have threads: Triton gives an element to several of them, all
load it, and the first stores it. They share scalars likewise. What the others have loaded does no harm while nothing
but that same store depends on it, or what each warp computes for itself of all of a block: the first stores that.
Programs of a grid are not compared with each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_OPERATION = re.compile(r"\s*(?:%([\w.]+)(?::\d+)? = )?\"?([a-z_]+\.[a-z_0-9.]+)\"?(.*)")
_LAYOUT = re.compile(r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[(.*?)\], threadsPerWarp = \[(.*?)\]", re.MULTILINE)
_TENSOR = re.compile(r"tensor<([\dx]+)x(?:!tt\.ptr<\w+>|\w+)(?:, (.*?))?>(?= |$|\)|,)")
_MOVES = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.bitcast", "ttg.convert_layout", "tt.reshape")
_WITHIN_A_WARP = ("arith.", "math.", "tt.splat", "tt.reduce", "tt.store")
_BARRIERS = ("gpu.barrier", "ttg.barrier", "ttg.local_barrier")


class _Address(NamedTuple):
    """What a pointer points at: an argument, distances that have names, and the sum of those that are constants."""

    argument: str
    names: frozenset[str] = frozenset()
    constant: int = 0

    def meets(self, other: _Address) -> bool:
        """Tells whether both may be the same word."""
        return self.argument == other.argument and (self.names != other.names or self.constant == other.constant)


class _Access(NamedTuple):
    line: int
    address: _Address
    kind: str
    within: tuple[tuple[int, int], ...]  # regions, and which of their branches


def races(text: str) -> list[str]:
    """Returns the lines of a kernel in Triton's GPU IR that load what another warp stores; [] if none does harm."""
    return _Kernel(text).races()


class _Kernel:
    def __init__(self, text: str) -> None:
        self.lines = [re.sub(r"\s+loc\(.*", "", line) for line in text.splitlines()]
        self.warps = int((re.search(r'num-warps" = (\d+)', text) or [0, 1])[1])
        self.layouts = {
            name: [int(a) * int(b) for a, b in zip(each.split(", "), threads.split(", "), strict=True)]
            for name, each, threads in _LAYOUT.findall(text)
        }
        self.addresses = {name: _Address(name) for name in re.findall(r"%(\w+): !tt\.ptr", text)}
        self.constants: dict[str, int] = {}
        self.loads: list[_Access] = []
        self.stores: list[_Access] = []
        self.barriers: list[int] = []
        self._read()

    def _read(self) -> None:
        within: list[tuple[int, int]] = []
        for number, line in enumerate(self.lines):
            if match := _OPERATION.match(line):
                self._take(number, *match.groups(), tuple(within))
            if re.match(r"\s*\} (else|do) \{", line):
                within[-1] = (within[-1][0], int(" else " in line))
            elif line.rstrip().endswith("{"):
                within.append((number, 0))
            elif re.match(r"\s*\}", line) and within:
                within.pop()

    def _take(self, number: int, result: str | None, name: str, rest: str, within: tuple[tuple[int, int], ...]) -> None:
        operands = re.findall(r"%([\w.]+)", rest)
        if name == "arith.constant" and (match := re.search(r"(-?\d+)>? :", rest)) and "." not in rest:
            self.constants[str(result)] = int(match[1])
        elif name == "tt.addptr" and operands[0] in self.addresses:
            base, by = self.addresses[operands[0]], operands[1]
            known = self.constants.get(by)
            names = base.names if known is not None else base.names | {by}
            self.addresses[str(result)] = _Address(base.argument, names, base.constant + (known or 0))
        elif name in _MOVES and operands and operands[0] in self.addresses:
            self.addresses[str(result)] = self.addresses[operands[0]]
        elif name in ("tt.load", "tt.store") and operands[0] in self.addresses:
            access = _Access(number, self.addresses[operands[0]], rest.rpartition(" : ")[2].strip(), within)
            (self.loads if name == "tt.load" else self.stores).append(access)
        elif name in _BARRIERS or (name == "tt.reduce.return" and self._crosses(number)):
            self.barriers.append(number)

    def _crosses(self, number: int) -> bool:
        """Tells whether a reduction that ends here leaves one number, of what several warps have."""
        match = re.search(r"\}\) : \((tensor<.*>)\) -> (\w+)$", self.lines[number + 1])
        return match is not None and self._warps_of(match[1]) > 1

    def _warps_of(self, kind: str) -> int:
        """Returns how many warps have different elements of a tensor; 1 where that is not known."""
        match = _TENSOR.search(kind + " ")
        layout = None if match is None or match[2] is None else re.search(r"#\w+(?=>|$|\})", match[2])
        if match is None or layout is None or layout[0] not in self.layouts:
            return 1
        left_out = {int(dim) for dim in re.findall(r"dim = (\d)", match[2])}
        each = [n for dim, n in enumerate(self.layouts[layout[0]]) if dim not in left_out]
        warps = 1
        for size, of_a_warp in zip(map(int, match[1].split("x")), each, strict=True):
            warps *= max(1, size // of_a_warp)
        return warps

    def _of_one_warp(self, line: str) -> bool:
        """Tells whether each warp has the whole of all tensors of a line, which it computes for itself."""
        kinds = [match[0] for match in _TENSOR.finditer(line + " ")]
        known = [re.search(r", (#\w+)>", kind) for kind in kinds]
        return all(name is not None and name[1] in self.layouts for name in known) and all(
            self._warps_of(kind) == 1 for kind in kinds
        )

    def races(self) -> list[str]:
        found = []
        for load in self.loads if self.warps > 1 else ():
            if load.kind.startswith("tensor") and self._warps_of(load.kind) >= self.warps:
                continue  # each element is of one warp
            for store in self.stores:
                first, last = sorted((load.line, store.line))
                parted = any(first < barrier < last for barrier in self.barriers)
                if load.address.meets(store.address) and not parted and not _exclude(load.within, store.within):
                    why = self._harm(load, store)
                    if why:
                        found.append(f"{self.lines[load.line].strip()}; {self.lines[store.line].strip()}; {why}")
        return found

    def _harm(self, load: _Access, store: _Access) -> str:
        """Returns the first line to which a loaded value goes that other warps have a part in."""
        shape, alone = _shape_of(load.kind), self._of_one_warp(load.kind)
        tainted = {str(_OPERATION.match(self.lines[load.line])[1])}  # type: ignore[index]
        regions: list[str] = []
        for line in self.lines[load.line + 1 :]:
            match = _OPERATION.match(line)
            if match is not None:
                result, name, rest = match.groups()
                uses = tainted & set(re.findall(r"%([\w.]+)", rest))
                if not uses:
                    tainted -= {str(result)}
                elif name == "scf.yield" and regions:
                    tainted.add(regions[-1])
                elif alone and self._of_one_warp(line) and name.startswith(_WITHIN_A_WARP):
                    tainted.add(str(result))
                elif name == "tt.store" and rest.rpartition(" : ")[2].strip() == store.kind == load.kind:
                    pass
                elif name.startswith(("arith.", "math.")) and (name == "arith.cmpi" or shape in rest or not shape):
                    tainted.add(str(result))
                else:
                    return line.strip()
            if line.rstrip().endswith("{") and not re.match(r"\s*\} (else|do) \{", line):
                regions.append(match[1] if match is not None and match[1] else "")
            elif re.match(r"\s*\}", line) and not line.rstrip().endswith("{") and regions:
                regions.pop()
        return ""


def _shape_of(kind: str) -> str:
    """Returns the shape of a tensor and its layout, as types of other elements have them, or ""."""
    match = _TENSOR.search(kind + " ")
    return "" if match is None else str(match[2])


def _exclude(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    """Tells whether two places are in different branches of the same condition."""
    return any(a[0] == b[0] and a[1] != b[1] for a in one for b in other)
