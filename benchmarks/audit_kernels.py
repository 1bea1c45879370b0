"""The kernels that are audited, as whole steps launch them: ``limits.json`` has a line for each variant.

``tests/whole_steps.py`` records launch keys, and ``variants`` says which of them are one variant. A line begins with
what is not usual in its launch: types of arguments, with ``?`` where addresses are no multiples of 16, and constants.
A name may be changed there; a line without one is named by its beginning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

from fusedonebit.triton_kernels.op import OPS

LIMITS = Path(__file__).with_name("limits.json")
BLOCK = 1024
WORDS = 512  # a block of the kernels that work on packed words, 32 elements each
LISTS = ("PARAMS", "GRADS", "TENSORS", "DIRECTIONS")
USUAL = dict.fromkeys(LISTS, 4) | {"BLOCK_SIZE": BLOCK, "WORDS": WORDS, "AT_ONCE": 1024, "WIDTH": 64, "ROOM": 32}
"""Constants where a line does not say, False otherwise: tensors are float32 and aligned."""
WORLD_SIZES = (2, 8, 64)
PER_LAYER = ("finish", "finish_alone", "close_parts", "lamb_coefficient", "lamb_rescale", "lamb_follow", "renew_levels")
PER_LAYER += ("follow_level",)
"""Kernels that scan what blocks left, one block to a lane."""
WITH_OPTIONS = ("advance", "finish", "finish_alone", "scale_coefficients")
"""Kernels that move no element, and whose operands come in many combinations."""
HEADERS = 16 * 24 + 20  # six words of each, and what of this rank's own must be equal
SERVER_LOOPS = {2: (1, 0, 0, 2), 8: (1, 0, 1, 0), 64: (4, 0, 8, 0)}
LOOPS = {
    "gradient_squares": (0,),
    "finish": (0, 0, 1, 1, 0),
    "finish_alone": (0, 0, 1, 1, 0, 0, 1, 0),
    "receive": (1, 1, 0),
    "close_round": (1, 0, 1, 0),
    "close_parts": (0, 1, 0),
}
"""How often loops run per block, in the order of the code, the last for all behind it; of other kernels once."""
OF_LEVELS = {
    "quantise": (),
    "requantise": ("headers", 0, "ranks"),
    "take_back": ("headers",),
    "dequantise": ("headers", 0, "ranks"),
}
"""The same of those that send gradients in few bits: over headers, 16 at a time, and over ranks."""
WALKS = OF_LEVELS | {"outer_mean": ("headers", 0, "ranks")}
"""And of what an owner of matrices does."""
HALVES = dict.fromkeys(("server_reduce", "outer_mean", "finish", "local_update"), 1)
HALVES |= dict.fromkeys(("tell_squares", "tell_level", "lion_compress"), 2)


class Kernel(NamedTuple):
    """A variant of an op's kernel.

    Attributes:
        given: Types and constants that are not usual, as in its line; None of a tensor that usually is there.
        world_size: Of those that walk over the ranks.
    """

    op: str
    num_warps: int
    given: Mapping[str, Any]
    world_size: int = 1

    @property
    def key(self) -> str:
        """What its line begins with."""
        return ", ".join([self.op, f"{self.num_warps} warps", *(f"{n}={v}" for n, v in self.given.items())])

    @classmethod
    def of(cls, key: str) -> Kernel:
        """Return what a line begins with."""
        op, warps, *given = key.split(", ")
        pairs = (each.split("=") for each in given)
        constants = {"True": True, "None": None}
        values = {n: v if v[0] == "*" else constants[v] if v in constants else int(v) for n, v in pairs}
        return cls(op, int(warps.split()[0]), values)

    @property
    def walks(self) -> bool:
        """Whether its bytes depend on the number of ranks."""
        sums = self.op == "dequantise" and "SUMS" in self.given
        return sums or self.op in (
            "server_reduce",
            "pick_owned",
            "place_owned",
            "average_squares",
            "requantise",
            "outer_mean",
        )

    @property
    def packed(self) -> bool:
        """Whether a block is one of packed words. Those kernels mask all that they read and write."""
        return self.op in ("merge_signs", "pick_owned", "place_owned")

    @property
    def elements(self) -> int:
        """Of the whole index space, for one block: of all chunks where a program works on them at once."""
        share = {"receive": 128, "close_round": 128, "pick_owned": self.world_size}.get(self.op, 1)
        return share * (32 * WORDS if self.packed else self.given.get("BLOCK_SIZE", BLOCK))

    @property
    def loops(self) -> Iterable[int]:
        """How often each loop runs per block, in the order of the code."""
        counts: dict[Any, int] = {"headers": -(-self.world_size // 16), "ranks": self.world_size}
        if self.op in WALKS:
            return chain(
                (counts.get(times, 0) for times in WALKS[self.op]),
                repeat(counts["ranks"] * ("ranks" in WALKS[self.op])),
            )
        usual = LOOPS.get(self.op, (self.world_size,))
        found = SERVER_LOOPS[self.world_size] if self.op == "server_reduce" else usual
        return chain(found, repeat(found[-1]))

    @property
    def cached(self) -> int:
        """Bytes that every block reads and that stay in the cache: the headers of all ranks, 16 at a time."""
        compares = self.op == "server_reduce" or "headers" in WALKS.get(self.op, ())
        groups = -(-self.world_size // 16) if compares else self.op in ("receive", "close_round")
        return groups * HEADERS

    @property
    def halves(self) -> int:
        """Numbers that are cut to 32 bits on purpose: words that a hash makes random bits of, a digest."""
        draws = any(name.endswith("drawn") for name in self.given) and {"*bf16", "*u8"} & set(self.given.values())
        if self.op in OF_LEVELS:
            kept = self.given.get("residual_numbers", "*fp32" if self.op == "take_back" else None)
            draws = self.op != "dequantise" and (kept in ("*bf16", "*u8") or (kept is None and self.given["BITS"] > 1))
            return 2 * draws + (self.op != "take_back")  # and a digest, or the first header that is kept
        rounds = "rounding" in self.given or (bool(draws) and self.op != "lamb_move")  # which reads moments alone
        return 2 * rounds + (0 if "STEP_MOVES" in self.given else HALVES.get(self.op, 0))

    def specialised(self) -> tuple[dict[str, str], dict[str, Any], list[str]]:
        """Types of its arguments, as Triton's signatures have them, values of constants, and aligned addresses."""
        launched = _usual(self.op) | self.given
        types = {name: value.rstrip("?") if isinstance(value, str) else "constexpr" for name, value in launched.items()}
        constants = {name: value for name, value in launched.items() if types[name] == "constexpr"}
        return types, constants, [name for name, kind in types.items() if kind[0] == "*" and launched[name] == kind]


def _usual(op: str) -> dict[str, Any]:
    """Return the type or constant of each argument where a line does not say it: optional tensors are left out."""
    optional = {name for name, argument in OPS[op].arguments.items() if argument.schema == "Tensor?"}
    return {
        name: USUAL.get(name, False) if kind == "constexpr" else None if name in optional else kind
        for name, kind, *_ in OPS[op].parameters
    }


# ---------------------------------------------------------------- which launch keys are one variant


def variants(keys: Iterable[Any]) -> list[Kernel]:
    """Return what is audited of launch keys: of each variant the one with most operands.

    Blocks have 1024 elements, tensors of lists are aligned, and all of float32 or all of bfloat16. Keys are one variant
    if they differ only in what is known of numbers, or in where eps is added. An address is aligned if it is in one of
    them. ``WITH_OPTIONS`` have one variant each.
    """
    unaligned: dict[str, set[str]] = {}
    for op, num_warps, arguments in keys:
        constants = {name: value for name, kind, value in arguments if kind == "constexpr"}
        stored = {value for name, value in constants.items() if name in LISTS}
        if stored in (set(), {4}, {5}) and (constants.get("BLOCK_SIZE", BLOCK) == BLOCK or op in OF_LEVELS):
            line = Kernel(op, num_warps, _given(op, arguments)).key
            found = {name for name, kind, value in arguments if kind[0] == "*" and value != "D"}
            unaligned[line] = unaligned.get(line, found) & found
    largest: dict[str, tuple[int, int]] = {}
    of: dict[str, Kernel] = {}
    for line in sorted(unaligned, key=lambda line: ("EPS_INSIDE_SQRT" in line, line)):
        kernel = Kernel.of(line)
        plain = {name: value for name, value in kernel.given.items() if not name.endswith("EPS_INSIDE_SQRT")}
        which = kernel.op if kernel.op in WITH_OPTIONS else kernel._replace(given=plain).key
        operands = sum(isinstance(value, str) for value in plain.values()), len(plain)
        if operands > largest.get(which, (-1, 0)):
            types = _usual(kernel.op) | kernel.given
            given = kernel.given | {name: f"{types[name]}?" for name in sorted(unaligned[line])}
            largest[which], of[which] = operands, kernel._replace(given=given)
    return sorted(of.values(), key=lambda kernel: kernel.key)


def _given(op: str, arguments: Iterable[Any]) -> dict[str, Any]:
    """Return what is not usual; of numbers nothing is known."""
    usual = _usual(op)
    found = {name: value if kind == "constexpr" else kind for name, kind, value in arguments}
    numbers = {name for name, kind in usual.items() if isinstance(kind, str) and kind[0] != "*"}
    return {name: value for name, value in found.items() if name not in numbers and value != usual[name]}


# ---------------------------------------------------------------- the record


@cache
def record() -> dict[str, Any]:
    """Return the limits: whose compiler they are of, columns, and of each kernel those of each target."""
    found: dict[str, Any] = json.loads(LIMITS.read_text())
    return found


@cache
def named() -> dict[str, Kernel]:
    """Return the recorded kernels by their names."""
    return {line.get("name", key): Kernel.of(key) for key, line in record()["kernels"].items()}


def kernel_of(name: str) -> Kernel:
    """Return a kernel by its name, behind which the number of ranks may stand that it walks over: ``, W=8``."""
    base, _, ranks = name.partition(", W=")
    return named()[base]._replace(world_size=int(ranks or 1))


def limits(target: str = "sm_90") -> dict[str, dict[str, Any]]:
    """Return the limits of a target, by name and column."""
    columns, found = record()["columns"], record()["kernels"].items()
    return {line.get("name", key): dict(zip(columns, line[target], strict=True)) for key, line in found}


def by_ranks(moved: Mapping[str, list[float]]) -> dict[str, float]:
    """Return bytes by name, of kernels that walk over the ranks with their number."""
    return {
        name + f", W={world_size}" * (len(found) > 1): each
        for name, found in moved.items()
        for world_size, each in zip(WORLD_SIZES, found, strict=False)
    }


def audited(target: str = "sm_90") -> dict[str, float]:
    """Bytes that each kernel moves per element, counted from the code compiled for a target."""
    return by_ranks({name: numbers["bytes_per_element"] for name, numbers in limits(target).items()})
