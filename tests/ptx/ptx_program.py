"""Decodes the PTX of a kernel for ``emulator.cpp``."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from ptx_instructions import INSTRUCTIONS

FIELDS = ("op", "guard", "negated", "line", "kind", "is_signed", "bytes", "count", "shared", "target", "orders")
DTYPE = np.dtype([*((name, "i4") for name in FIELDS), ("to", "i4", 4), ("from", "i4", 5), ("offset", "i8")], align=True)
"""An instruction: ``Instruction`` of the emulator."""

OPS = ("ld", "st", "atom", "bra", "ret", "bar", "warp", "shfl", "redux", "stmatrix", "ldmatrix", "param", "special")
OP = {name: 1000 + i for i, name in enumerate(OPS)} | {name: i for i, name in enumerate(INSTRUCTIONS)}
COMBINES = ("add", "min", "max", "and", "or", "xor", "exch")
SPECIALS = ("%tid.x", "%ctaid.x", "%nctaid.x", "%ntid.x", "%laneid")
OPERAND = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^,\s][^,]*")
# What moves memory, and what lanes and warps do together; whatever else is written so is unknown.
MOVES = re.compile(
    r"ld\.param\.[bs](32|64)|(ld|st)\.(global|shared)(\.v[24])?\.[bs](8|16|32|64)"
    r"|atom\.global\.gpu\.(acq_rel|relaxed)\.(add|and|or|exch)\.[bu](32|64)"
    r"|(st|ld)matrix\.sync\.aligned\.m8n8\.x[14](\.trans)?\.shared\.b16"
)
TOGETHER = re.compile(r"ret|bra(\.uni)?|bar\.(warp\.)?sync|shfl\.sync\.(bfly|idx)\.b32|redux\.sync\.(add|max)\.s32")


class UnknownError(Exception):
    """The PTX has something that nobody has written down and tested."""


class Program:
    """A decoded kernel.

    Attributes:
        code: [instructions] of ``DTYPE``. Constants are registers behind the others.
        registers: How many there are besides.
        constants: uint64.
        params: Their names.
        threads: Of a block.
    """

    def __init__(self, ptx: str) -> None:
        head, _, body = ptx.partition("\n{\n")
        self.params = re.findall(r"\.param [^,\n]*?(\w+_param_\d+)", head)
        self.threads = int(re.search(r"\.reqntid (\d+)", head)[1])
        self._sources: dict[int, str] = {}
        self._places: dict[str, int] = {}
        self._constants: dict[int, int] = {}
        labels, statements = self._statements(body.partition("\n}\n")[0], head.count("\n") + 3)
        rows = []
        for line, text in statements:
            try:
                rows.append(self._decoded(line, text, labels))
            except (KeyError, ValueError, IndexError) as error:
                raise UnknownError(f"line {line}: {text}") from error
        self.code = np.array(rows, DTYPE)
        self.registers = len(self._places)
        constant = self.code["from"] < 0
        self.code["from"][constant] = self.registers - 1 - self.code["from"][constant]
        self.constants = np.array([*self._constants, 0], np.uint64)

    def where(self, line: int) -> str:
        """Returns of which line of which file a line of the PTX was made."""
        return f"{self._sources.get(line, '')} (line {line} of the PTX)"

    def _statements(self, body: str, first: int) -> tuple[dict[str, int], list[tuple[int, str]]]:
        """Returns at which statement each label stands, and statements with their lines."""
        labels: dict[str, int] = {}
        found: list[tuple[int, str]] = []
        source = ""
        for line, text in enumerate(body.split("\n"), first):
            code, _, said = (part.strip() for part in text.partition("//"))
            source = said.split("@")[0].strip() if code.startswith(".loc") else source
            self._sources[line] = source
            if code.endswith(":"):
                labels[code[:-1]] = len(found)
            elif not code.startswith("."):  # .reg, .loc
                found += [(line, each.strip()) for each in code.split(";") if each.strip()]
        return labels, found

    def _decoded(self, line: int, text: str, labels: dict[str, int]) -> tuple[Any, ...]:
        guard, negated, predicate, name, rest = re.fullmatch(r"(@(!?)(%p\d+)\s+)?(\S+)\s*(.*)", text).groups()
        operands = [operand.strip() for operand in OPERAND.findall(rest)]
        if MOVES.fullmatch(name):
            to, given, fields = self._move(name.split("."), operands)
        elif TOGETHER.fullmatch(name):
            to, given, fields = self._together(name.split("."), operands, labels)
        elif name.startswith("mov") and operands[1] in SPECIALS:
            to, given, fields = operands[:1], [], {"op": OP["special"], "kind": SPECIALS.index(operands[1])}
        else:
            to, given, fields = self._computation(name, *operands)
        row = dict.fromkeys(FIELDS, 0) | {"line": line, "guard": self._register(predicate) if guard else -1} | fields
        row["negated"] = bool(negated)
        places = [-1 if each == "_" else self._register(each) for each in to]
        sources = [self._source(each) for each in given]
        filled = (*places, *[-1] * (4 - len(places))), (*sources, *[0] * (5 - len(sources)))
        return (*(row[field] for field in FIELDS), *filled, row.get("offset", 0))

    def _computation(self, name: str, to: str, *given: str) -> tuple[list[str], list[str], dict[str, int]]:
        if name.startswith("mov") and "{" in to + given[0]:
            name = name.replace("mov", "unpack" if "{" in to else "pack")
        sources = _listed(given[0]) if name.startswith("pack") else list(given)
        if len(sources) != len(INSTRUCTIONS[name].takes):
            raise ValueError(name)
        return re.split(r"\|", to) if "|" in to else _listed(to), sources, {"op": OP[name]}

    def _together(
        self, words: list[str], operands: list[str], labels: dict[str, int]
    ) -> tuple[list[str], list[str], dict[str, int]]:
        fields = {"op": OP["warp" if "warp" in words else words[0]]}
        if words[0] in ("ret", "bar"):
            if operands not in ([], ["0"], ["-1"]):
                raise ValueError(operands)
            return [], [], fields
        if words[0] == "bra":
            return [], [], fields | {"target": labels[operands[0]]}
        fields["kind"] = words[2] == "idx" if words[0] == "shfl" else COMBINES.index(words[2])
        return operands[:1], operands[1:-1], fields

    def _move(self, words: list[str], operands: list[str]) -> tuple[list[str], list[str], dict[str, int]]:
        first, kind = words[0], words[-1]
        fields = {"op": OP[first], "bytes": int(kind[1:]) // 8, "is_signed": kind[0] == "s"}
        fields |= {"shared": "shared" in words, "kind": int("trans" in words)}
        fields["count"] = next((int(word[1:]) for word in words if re.fullmatch(r"[vx]\d", word)), 1)
        if words[1] == "param":
            return operands[:1], [], fields | {"op": OP["param"], "kind": self.params.index(operands[1].strip("[]"))}
        stores = first.startswith("st")
        base, _, offset = operands[0 if stores else 1].strip("[] ").partition("+")
        fields["offset"] = int(offset or 0)
        if first == "atom":
            fields |= {"orders": words[3] == "acq_rel", "kind": COMBINES.index(words[4])}
        values = _listed(operands[1 if stores else 0])
        return [] if stores else values, [base, *(values if stores else operands[2:])], fields

    def _register(self, name: str) -> int:
        return self._places.setdefault(name, len(self._places))

    def _source(self, text: str) -> int:
        """Returns a register's place, or of the nth constant -n - 1."""
        if re.fullmatch(r"%(p|rs|r|rd)\d+", text := text.strip()):
            return self._register(text)
        value = 0 if text == "global_smem" else None
        if value is None:
            value = int(text[2:], 16) if text[:2] in ("0f", "0d") else int(text.removesuffix("U"), 0)
        return -1 - self._constants.setdefault(value % 2**64, len(self._constants))


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.strip("{} ").split(",")]
