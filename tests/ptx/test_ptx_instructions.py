"""Each instruction of the emulator's table computes what exact arithmetic does, on edges and on random operands."""

from __future__ import annotations

import itertools
import math
import operator
import random
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from ptx_instructions import COMPARISONS, INSTRUCTIONS
from ptx_machine import Range, compiler, execute
from ptx_program import Program, UnknownError

pytestmark = [
    pytest.mark.needs_compiler,
    pytest.mark.skipif(not compiler(), reason="no C++ compiler: for instance apt-get install g++"),
]

FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
"""Bits of the significand, and the least and the largest exponent."""
PACKED = {"f16": ("<e", "<H"), "f32": ("<f", "<I"), "f64": ("<d", "<Q")}
NAN, INF = float("nan"), float("inf")


def bits_of(kind: str) -> int:
    return {"pred": 1, "bf16": 16, "bf16x2": 32}.get(kind) or int(kind[1:])


def decode(kind: str, bits: int) -> Any:
    """The value of the lower bits: an int, or a float."""
    bits &= (1 << bits_of(kind)) - 1
    if kind == "bf16":
        return decode("f32", bits << 16)
    if kind in PACKED:
        number, word = PACKED[kind]
        return struct.unpack(number, struct.pack(word, bits))[0]
    return bits - (1 << bits_of(kind)) if kind[0] == "s" and bits >> (bits_of(kind) - 1) else bits


def encode(kind: str, value: Any) -> int:
    if kind in PACKED:
        number, word = PACKED[kind]
        return int(struct.unpack(word, struct.pack(number, value))[0])
    return int(value) & ((1 << bits_of(kind)) - 1)


def rounded(kind: str, exact: Fraction, sign_of_zero: float = 0.0) -> float:
    """The nearest number, of two the even one."""
    precision, least, largest = FORMATS[kind]
    if exact == 0:
        return sign_of_zero
    exponent = max(abs(exact.numerator).bit_length() - exact.denominator.bit_length(), least)
    while Fraction(2) ** (exponent + 1) <= abs(exact):
        exponent += 1
    while exponent > least and Fraction(2) ** exponent > abs(exact):
        exponent -= 1
    quantum = Fraction(2) ** (exponent - precision + 1)
    found = round(exact / quantum) * quantum
    if abs(found) >= Fraction(2) ** (largest + 1):
        return INF if exact > 0 else -INF
    return float(found) if found else (0.0 if exact > 0 else -0.0)


def arithmetic(kind: str, function: Callable[..., Any], *given: float) -> float:
    """A function of floats, rounded once; of what is not finite, and of which zero, as IEEE 754 says, and Python."""
    try:
        usual = function(*given)
    except ZeroDivisionError:
        a, b = given
        return NAN if a == 0 or math.isnan(a) else math.copysign(INF, a) * math.copysign(1.0, b)
    if not all(map(math.isfinite, given)):
        return usual
    return rounded(kind, function(*map(Fraction, given)), math.copysign(0.0, usual))


def root(kind: str, x: float) -> float:
    if x < 0 or math.isnan(x):
        return NAN
    if x in (0.0, INF):
        return x
    exact, (precision, least, _) = Fraction(x), FORMATS[kind]
    exponent = max(math.frexp(math.sqrt(x))[1] - 1, least)
    quantum = Fraction(2) ** (exponent - precision + 1)
    square = exact / quantum**2
    low = math.isqrt(math.floor(square))
    return float((low + (square > Fraction(2 * low + 1, 2) ** 2)) * quantum)


def lesser(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return a if (a, math.copysign(1.0, a)) < (b, math.copysign(1.0, b)) else b


def toward_zero(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(a: int, b: int, c: int, signed: bool) -> int:
    """PTX ISA 9.7.1.19, bit by bit."""
    start, length = b & 255, c & 255
    sign = signed and length > 0 and a >> min(start + length - 1, 31) & 1
    return sum(((a >> start + i & 1) if i < length and start + i <= 31 else sign) << i for i in range(32))


def permuted(a: int, b: int, c: int) -> int:
    given, found = (a | b << 32).to_bytes(8, "little"), []
    for i in range(4):
        which = c >> 4 * i & 15
        found.append((255 * (given[which & 7] >> 7)) if which & 8 else given[which & 7])
    return int.from_bytes(bytes(found), "little")


def halves(function: Callable[[int, int], int], a: int, b: int) -> int:
    return function(a & 0xFFFF, b & 0xFFFF) & 0xFFFF | (function(a >> 16, b >> 16) & 0xFFFF) << 16


OF_INTEGERS: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul.lo": operator.mul,
    "mul.wide": operator.mul,
    "mad.lo": lambda a, b, c: a * b + c,
    "mad.wide": lambda a, b, c: a * b + c,
    "neg": operator.neg,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "min": min,
    "max": max,
    "div": toward_zero,
    "popc": lambda a: a.bit_count(),
    "rem": lambda a, b: a if b == 0 else a - b * toward_zero(a, b),
    "shl": lambda a, b: a << min(b, 64),
    "shr": lambda a, b: a >> min(b, 64),
    "mul.hi": lambda a, b: a * b >> 64,
    "shf.r.wrap": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "prmt": permuted,
}
OF_FLOATS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
NAMED = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt}
NAMED |= {"ge": operator.ge}


def expected(name: str, given: Sequence[int]) -> tuple[int, ...]:
    """The bits of what an instruction makes of bits, a word for each register; of a NaN -1."""
    made, (first, *_) = INSTRUCTIONS[name], name.split(".")
    kind = name.rpartition(".")[2]
    values = [decode(of, bits) for of, bits in zip(made.takes, given, strict=True)]
    if first in ("mov", "pack", "unpack", "selp") or kind == "pred":
        return moved(name, values)
    if name == "abs.bf16x2":
        return (sum((given[0] >> at & 0x7FFF) << at for at in (0, 16)),)  # both halves without their signs
    if kind == "bf16x2":
        low = [decode("bf16", bits) for bits in given]
        high = [decode("bf16", bits >> 16) for bits in given]
        return int(low[0] >= low[1]), int(high[0] >= high[1])
    if first == "setp":
        return (int(compared(name.split(".")[1], *values)),)
    if first == "cvt":
        return converted(name, made.result, values)
    if kind in ("f32", "f64", "bf16"):
        found = of_floats(first, kind, [decode(kind, bits) for bits in given])
        return (-1 if math.isnan(found) else encode("f32", found) >> 16 if kind == "bf16" else encode(kind, found),)
    if first == "bfe":
        return (field(given[0] & 0xFFFFFFFF, *values[1:], kind == "s32"),)
    if kind == "s16x2":
        return (halves(operator.add, *values),)
    of = OF_INTEGERS.get(name.rpartition(".")[0]) or OF_INTEGERS[first]
    return (encode(made.result, of(*values)),)


def moved(name: str, values: Sequence[Any]) -> tuple[int, ...]:
    first, kind = name.split(".")[0], name.rpartition(".")[2]
    if first == "selp":
        return (values[0] if values[2] else values[1],)
    if first == "unpack":
        half = bits_of(kind) // 2
        return values[0] & ((1 << half) - 1), values[0] >> half
    if first == "pack":
        return (values[1] << bits_of(kind) // 2 | values[0],)
    if first == "not":
        return (1 - values[0],)
    return (values[0] if first == "mov" else OF_INTEGERS[first](*values),)


def compared(how: str, a: Any, b: Any) -> bool:
    unordered = math.isnan(a) or math.isnan(b)
    if how in ("num", "nan"):
        return unordered == (how == "nan")
    if how in COMPARISONS:
        return not unordered and NAMED[how](a, b)
    return unordered or NAMED[how.removesuffix("u")](a, b)


def converted(name: str, result: str, values: Sequence[Any]) -> tuple[int, ...]:
    (value, *more), to = values, name.replace("rn.", "").split(".")[1]
    if name == "cvt.rn.f16x2.f32":  # the first operand is the upper half
        return (converted("cvt.rn.f16.f32", "f16", [value])[0] << 16 | converted("cvt.rn.f16.f32", "f16", more)[0],)
    if to in FORMATS:
        if isinstance(value, float) and not math.isfinite(value):
            return (-1 if math.isnan(value) and to != "f16" else 0x7FFF if math.isnan(value) else encode(to, value),)
        return (encode(to, rounded(to, Fraction(value), value if isinstance(value, float) else 0.0)),)
    if name == "cvt.rzi.s64.f64":
        whole = -(2**63) if math.isnan(value) else 2**64 * math.copysign(1, value) if math.isinf(value) else value
        return (encode("s64", min(max(math.trunc(whole), -(2**63)), 2**63 - 1)),)
    return (encode(result, decode(to, encode("u64", value))),)


def of_floats(first: str, kind: str, values: Sequence[float]) -> float:
    if first in OF_FLOATS:
        return arithmetic(kind, OF_FLOATS[first], *values)
    if first == "fma":
        a, b, c = values
        if math.isfinite(a) and math.isfinite(b) and math.isinf(c):
            return c  # however large the product
        return arithmetic(kind, lambda a, b, c: a * b + c, *values)
    if first == "sqrt":
        return root(kind, *values)
    if first == "min":
        return lesser(*values)
    if first == "max":
        return -lesser(-values[0], -values[1])
    return -values[0] if first == "neg" else abs(values[0])


EDGES = {
    "f32": [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001, 0x34000000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000],
    "f64": [
        *(0, 1, 0x3FF0000000000000, 0x36A0000000000000, 0x36A0000000000001, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000),
        *(0x7FF8000000000000, 0x47EFFFFFF0000000, 0x380FFFFFFFFFFFFF, 0x3CA0000000000000, 0x43E0000000000000),
    ],
    "bf16": [0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC0],
    "f16": [0, 1, 0x3FF, 0x400, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7E00],
    "pred": [0, 1],
    "bf16x2": [0, 0x3F803F80, 0x3F80BF80, 0x7FC03F80, 0x3F807FC0, 0x80000000, 0x00008000],
}


def operands(kind: str, chosen: random.Random) -> list[int]:
    """Edges with both signs, small numbers, and random bits, with whatever lies above them in a register."""
    width = bits_of(kind)
    edges = EDGES.get(kind, [0, 1, 2, 7, 8, 15, 16, 31, 32, 33, 63, 64, 255, 256, 2 ** (width - 1) - 1])
    signed = [bits ^ sign << (width - 1) for bits in edges for sign in ((0, 1) if width > 1 else (0,))]
    if kind in FORMATS:  # beside 1, where rounding and ties are
        near = {"f32": 0x3F800000, "f64": 0x3FF0000000000000, "bf16": 0x3F80, "f16": 0x3C00}[kind]
        signed += [near + chosen.randrange(-(1 << width // 4), 1 << width // 4) for _ in range(6)]
    signed += [chosen.getrandbits(width) for _ in range(8)]
    return [bits % 2**width | chosen.getrandbits(64 - width) << width if width < 64 else bits for bits in signed]


def executed(statement: str, given: Sequence[Sequence[int]], results: int) -> list[tuple[int, ...]]:
    """Runs a statement of %rd10, %rd11 ... from %rd20, %rd21 ... in a lane for each row of operands."""
    lanes = -(-len(given) // 32) * 32
    memory = np.zeros((lanes, 8), np.uint64)
    memory[: len(given), : len(given[0])] = np.array(given, np.uint64)
    loads = "".join(f"\tld.global.b64 %rd2{i}, [%rd3+{8 * i}];\n" for i in range(len(given[0])))
    stores = "".join(f"\tst.global.b64 [%rd3+{32 + 8 * i}], {{ %rd1{i} }};\n" for i in range(results))
    body = "\tmov.u32 %r1, %tid.x;\n\tmov.u32 %r2, %ctaid.x;\n\tmad.lo.s32 %r3, %r2, 32, %r1;\n"
    body += "\tld.param.b64 %rd2, [k_param_0];\n\tmad.wide.u32 %rd3, %r3, 64, %rd2;\n"
    head = ".visible .entry k(\n\t.param .u64 .ptr .global .align 1 k_param_0\n)\n.reqntid 32\n{\n"
    program = Program(f"{head}{body}{loads}\t{statement};\n{stores}\tret;\n}}\n")
    start = memory.ctypes.data
    assert execute(program, [start], lanes // 32, [Range(start, start + memory.nbytes, True)]) == []
    return [tuple(int(word) for word in row[4 : 4 + results]) for row in memory[: len(given)]]


def written(name: str) -> tuple[str, int]:
    """An instruction as PTX writes it, and how many registers it sets."""
    made = INSTRUCTIONS[name]
    sources = [f"%rd2{i}" for i in range(len(made.takes))]
    if name.startswith("unpack"):
        return f"{name.replace('unpack', 'mov')} {{%rd10, %rd11}}, {sources[0]}", 2
    if name.startswith("pack"):
        return f"{name.replace('pack', 'mov')} %rd10, {{{', '.join(sources)}}}", 1
    if made.result == "preds":
        return f"{name} %rd10|%rd11, {', '.join(sources)}", 2
    return f"{name} %rd10, {', '.join(sources)}", 1


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_it_computes_what_exact_arithmetic_does(name):
    chosen = random.Random(name)
    each = [operands(kind, chosen) for kind in INSTRUCTIONS[name].takes]
    rows = list(itertools.product(*each))
    rows = chosen.sample(rows, min(len(rows), 1500))
    statement, results = written(name)
    kind = INSTRUCTIONS[name].result
    kind = kind if kind in FORMATS else name.rpartition(".")[2]
    for given, found in zip(rows, executed(statement, rows, results), strict=True):
        wanted = expected(name, given)
        if wanted[0] == -1:
            assert math.isnan(decode(kind, found[0])), (given, found)
        else:
            assert found == wanted, ([hex(x) for x in given], [hex(x) for x in found], [hex(x) for x in wanted])


@pytest.mark.parametrize(
    "name",
    ["add.rn.ftz.f32", "div.full.f32", "sqrt.approx.f32", "ex2.approx.ftz.f32", "fma.rn.f32", "rsqrt.approx.f32"],
)
def test_what_is_approximate_or_fused_or_flushes_is_refused(name):
    with pytest.raises(UnknownError, match=name.replace(".", r"\.")):
        executed(f"{name} %rd10, %rd20, %rd21", [[0, 0]], 1)
