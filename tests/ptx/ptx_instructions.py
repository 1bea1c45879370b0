"""What each PTX instruction computes that our kernels use, as C++: the emulator is generated from this table.

Of PTX ISA 8.7, chapter 9.7. An instruction that is not here is refused, so that whoever makes a kernel use another one
writes down, and tests, what it does: among them all that are approximate (``.approx``, ``.full``) or flush denormals
(``.ftz``), which no kernel of ours may have, and fused multiply-adds of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class Instruction(NamedTuple):
    """An instruction that computes in each lane by itself.

    Attributes:
        result: Its type, one of those at the begin of ``emulator.cpp``.
        takes: Types of operands, which the expression calls a, b, c.
        value: The expression.
    """

    result: str
    takes: tuple[str, ...]
    value: str


def _integers() -> Iterator[tuple[str, Instruction]]:
    for bits in (16, 32, 64):
        u, s, b = f"u{bits}", f"s{bits}", f"b{bits}"
        # In two's complement sums, and lower halves of products, are those of numbers without a sign.
        yield f"add.{s}", Instruction(u, (u, u), "a + b")
        yield f"sub.{s}", Instruction(u, (u, u), "a - b")
        product = "u32(a) * b" if bits == 16 else "a * b"  # C++ multiplies u16 as ints, which may overflow
        yield f"mul.lo.{s}", Instruction(u, (u, u), product)
        yield f"mad.lo.{s}", Instruction(u, (u, u, u), f"{product} + c")
        yield f"neg.{s}", Instruction(u, (u,), "-a")
        for name, operator in {"and": "&", "or": "|", "xor": "^"}.items():
            yield f"{name}.{b}", Instruction(u, (u, u), f"a {operator} b")
        yield f"not.{b}", Instruction(u, (u,), "~a")
        yield f"shl.{b}", Instruction(u, (u, "u32"), f"b < {bits} ? a << b : 0")
        for kind in (u, s):
            beyond = "0" if kind == u else "a < 0 ? -1 : 0"  # all bits are the sign's
            yield f"shr.{kind}", Instruction(kind, (kind, "u32"), f"b < {bits} ? a >> b : {beyond}")
            yield f"min.{kind}", Instruction(kind, (kind, kind), "a < b ? a : b")
            yield f"max.{kind}", Instruction(kind, (kind, kind), "a > b ? a : b")
            yield f"div.{kind}", Instruction(kind, (kind, kind), "quotient(a, b)")
            yield f"rem.{kind}", Instruction(kind, (kind, kind), "remainder(a, b)")
        for name, operator in COMPARISONS.items():
            for kind in (b,) if name in ("eq", "ne") else (u, s):
                of = u if kind == b else kind
                yield f"setp.{name}.{kind}", Instruction("pred", (of, of), f"a {operator} b")
    for kind, wide in (("u16", "u32"), ("u32", "u64"), ("s32", "s64")):
        yield f"mul.wide.{kind}", Instruction(wide, (kind, kind), f"{wide}(a) * {wide}(b)")
        sum_of = wide.replace("s", "u")
        yield f"mad.wide.{kind}", Instruction(sum_of, (kind, kind, sum_of), f"{sum_of}({wide}(a) * {wide}(b)) + c")
    yield "mul.hi.u64", Instruction("u64", ("u64", "u64"), "u64((unsigned __int128)a * b >> 64)")
    yield "add.s16x2", Instruction("u32", ("u32", "u32"), "((a + b) & 0xffff) | ((a >> 16) + (b >> 16)) << 16")
    yield "popc.b32", Instruction("u32", ("u32",), "std::popcount(a)")
    yield "bfe.u32", Instruction("u32", ("u32", "u32", "u32"), "field<u32>(a, b & 255, c & 255)")
    yield "bfe.s32", Instruction("s32", ("s32", "u32", "u32"), "field<s32>(a, b & 255, c & 255)")
    yield "shf.r.wrap.b32", Instruction("u32", ("u32", "u32", "u32"), "u32((u64(b) << 32 | a) >> (c & 31))")
    yield "prmt.b32", Instruction("u32", ("u32", "u32", "u32"), "bytes_of(u64(b) << 32 | a, c)")


def _floats() -> Iterator[tuple[str, Instruction]]:
    for kind in ("f32", "f64"):
        for name, operator in {"add": "+", "sub": "-", "mul": "*", "div": "/"}.items():
            yield f"{name}.rn.{kind}", Instruction(kind, (kind, kind), f"a {operator} b")
        yield f"sqrt.rn.{kind}", Instruction(kind, (kind,), "std::sqrt(a)")
        # Of a number and a NaN the number; -0 is below +0 (9.7.3.11).
        yield f"min.{kind}", Instruction(kind, (kind, kind), "smaller(a, b)")
        yield f"max.{kind}", Instruction(kind, (kind, kind), "-smaller(-a, -b)")
        yield f"neg.{kind}", Instruction(kind, (kind,), "-a")
    yield "fma.rn.f64", Instruction("f64", ("f64", "f64", "f64"), "std::fma(a, b, c)")
    for kind, bits in (("f32", "u32"), ("f64", "u64"), ("bf16", "u16")):
        yield f"abs.{kind}", Instruction(bits, (bits,), f"a & {bits}(~{bits}(0)) >> 1")
    for kind in ("f32", "f64", "bf16"):
        for name, operator in COMPARISONS.items():
            # What is ordered is false where one is a NaN; C++ says so but for !=. Names with a u are true there.
            ordered = f"a {operator} b" + (" && a == a && b == b" if name == "ne" else "")
            yield f"setp.{name}.{kind}", Instruction("pred", (kind, kind), ordered)
            yield f"setp.{name}u.{kind}", Instruction("pred", (kind, kind), f"a {operator} b || a != a || b != b")
        yield f"setp.num.{kind}", Instruction("pred", (kind, kind), "a == a && b == b")
        yield f"setp.nan.{kind}", Instruction("pred", (kind, kind), "a != a || b != b")
    yield "abs.bf16x2", Instruction("u32", ("u32",), "a & 0x7fff7fff")
    yield "setp.ge.bf16x2", Instruction("preds", ("bf16x2", "bf16x2"), "{a.low >= b.low, a.high >= b.high}")


def _moves() -> Iterator[tuple[str, Instruction]]:
    for name, operator in {"and": "&", "or": "|", "xor": "^"}.items():
        yield f"{name}.pred", Instruction("pred", ("pred", "pred"), f"a {operator} b")
    yield "not.pred", Instruction("pred", ("pred",), "!a")
    yield "mov.pred", Instruction("pred", ("pred",), "a")
    for bits in (16, 32, 64):
        of = f"u{bits}"
        for kind in (f"b{bits}", of, *([f"f{bits}"] if bits > 16 else [])):
            yield f"mov.{kind}", Instruction(of, (of,), "a")
            yield f"selp.{kind}", Instruction(of, (of, of, "pred"), "c ? a : b")
    for whole, part in ((64, 32), (32, 16)):  # mov.b64 {low, high}, x and mov.b64 x, {low, high}
        w, p = f"u{whole}", f"u{part}"
        yield f"unpack.b{whole}", Instruction(f"two_{p}", (w,), f"{{{p}(a), {p}(a >> {part})}}")
        yield f"pack.b{whole}", Instruction(w, (p, p), f"{w}(b) << {part} | a")


def _conversions() -> Iterator[tuple[str, Instruction]]:
    widths = [(to, of) for to in (16, 32, 64) for of in (8, 16, 32, 64)]
    for to, of in widths:
        for kind in "us":
            # The register may be wider than the type: s8 is extended in it.
            yield f"cvt.{kind}{to}.{kind}{of}", Instruction(f"{kind}{to}", (f"{kind}{of}",), "a")
    yield "cvt.s8.s32", Instruction("s32", ("s32",), "s8(a)")
    yield "cvt.s32.u16", Instruction("s32", ("u16",), "a")
    for kind in ("f32", "f64"):
        for of in ("s16", "u16", "s32", "u32", "s64"):
            yield f"cvt.rn.{kind}.{of}", Instruction(kind, (of,), f"{kind}(a)")
        for of in ("f16", "bf16"):
            yield f"cvt.{kind}.{of}", Instruction(kind, (of,), f"{kind}(a)")
    yield "cvt.f64.f32", Instruction("f64", ("f32",), "a")
    yield "cvt.rn.f32.f64", Instruction("f32", ("f64",), "f32(a)")
    yield "cvt.rn.f16.f32", Instruction("f16", ("f32",), "a")
    yield "cvt.rn.f16x2.f32", Instruction("u32", ("f32", "f32"), "u32(bits(f16(a))) << 16 | u32(bits(f16(b)))")
    yield "cvt.rzi.s64.f64", Instruction("s64", ("f64",), "to_s64(a)")


INSTRUCTIONS = dict([*_integers(), *_floats(), *_moves(), *_conversions()])


def cpp() -> str:
    """Returns the cases of the emulator's switch, by place in ``INSTRUCTIONS``."""
    lines = []
    for number, (name, made) in enumerate(INSTRUCTIONS.items()):
        given = ", ".join(f"{kind} {letter}" for kind, letter in zip(made.takes, "abc", strict=False))
        function = f"[]({given}) -> {made.result} {{ return {made.value}; }}"
        lines.append(f"case {number}: compute<{', '.join((made.result, *made.takes))}>({function}); break;  // {name}")
    return "\n".join(lines)
