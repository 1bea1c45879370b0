"""Ops refuse tensors that are not as declared, naming the op and the argument, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from op_arguments import Problem
from op_draws import OURS, draws, faked
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import using
from fusedonebit.triton_kernels.checks import Checks, Slot
from fusedonebit.triton_kernels.flattening import Signature
from fusedonebit.triton_kernels.nouns import Bits, Doubles, Flag, Floats, PerBlock, PerElement, Sizes, Tensors
from fusedonebit.triton_kernels.op import OPS

DTYPES = (torch.float64, torch.float32, torch.int64, torch.complex64)
OF_VALUES = {
    "momentum_compress": {"compensated.exponents 0"},
    "flatten": {"out 0"},
    "apply_momentum": {"digest 0"},
    "tell_squares": {"projections 1"},
    "average_squares": {"arrived_projections 1"},
    "tell_level": {"projections 0"},
    "follow_level": {"told 0"},
    "finish": {"segments.sums 1", "message_scales 1", "coefficients.groups 0"},
    "finish_alone": {"segments.sums 1"},
    "lamb_coefficient": {"norms 1"},
    "lamb_rescale": {"largest 0"},
    "renew_levels": {"sums 0", "sums 2"},
    "receive": {"worker.measured 0", "server.measured 0", "limit.coef 0", "squares 0"},
    "close_parts": {"scale 0", "found 0", "squares 0", "limit.coef 0"},
    "close_round": {"received.words 0", "coef 0"},
    "dequantise": {"arrived.scales 1"},
    "outer_compress": {"outer.scales 1"},
    "outer_mean": {"outer.scales 1", "outer.table 1"},
    "outer_scales": {"outer.scales 0", "outer.scales 1", "tiles 0"},
    "gradient_squares": {"squares 0"},
    **dict.fromkeys(("advance", "rebuild_momentum"), frozenset({"coefficients.groups 0"})),
}
"""Lengths that no other argument's shape tells, but values, at which nobody looks."""


def overload(name: str) -> Any:
    return getattr(torch.ops.fusedonebit, name).default


def wrong(slot: Slot, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what a tensor might be instead, and what is wrong with it."""
    yield "dtype", x.to(next(dtype for dtype in DTYPES if dtype not in slot.spec.dtypes))
    yield "dimensions", x[None, None, None]
    yield "device", x.to("meta")
    for dim, n in enumerate(x.shape):
        if n > 1 and any(len(shape) == x.dim() and shape[dim].text != "_" for shape in slot.shapes):
            yield f"{dim}", x.narrow(dim, 0, n // 2)


def wrong_list(name: str, label: str, x: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    yield "dtype", [*x[:-1], x[-1].long()]
    yield "count", x[1:]
    yield "device", [*x[:-1], x[-1].to("meta")]
    if label not in (*OPS[name].writes, "params"):
        longest = max(range(len(x)), key=lambda i: x[i].numel())
        if x[longest].numel() > 1:  # or none is left, which is zeros
            yield "length", [each[1:] if i == longest else each for i, each in enumerate(x)]


def mistakes(name: str) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield arguments of an op, one of which is wrong: its label, what is wrong, and all of them.

    Of each tensor that any draw has there is every mistake.
    """
    seen: set[int] = set()
    slots = list(OPS[name].arguments.values())
    for given in (list(draw.make().flat) for draw in draws(name, 0, 8)):
        for at, (slot, x) in enumerate(zip(slots, given, strict=True)):
            if at not in seen and slot.schema.startswith("Tensor") and x is not None:
                seen.add(at)
                each = wrong_list(name, slot.label, x) if isinstance(x, list) else wrong(slot, x)
                for what, other in each:
                    if f"{slot.label} {what}" not in OF_VALUES.get(name, ()):
                        yield slot.label, what, [*given[:at], other, *given[at + 1 :]]


def check_refused(name: str, label: str, what: str, given: list[Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        OPS[name].fake(*given)  # else a tensor that is too short would be read
    with pytest.raises(ValueError, match=rf"^{name}: ") as error:
        overload(name)(*given)
    assert re.search(rf"[ ,]{re.escape(label)}(\b|$)", str(error.value)), f"{label}, {what}: {error.value}"
    assert "must be" in str(error.value)


@pytest.mark.parametrize("name", OURS)
def test_each_tensor_that_is_not_as_declared_is_named(name):
    tried = list(mistakes(name))
    for label, what, given in tried:
        check_refused(name, label, what, given)
    assert tried


@pytest.mark.parametrize("name", OURS)
def test_a_wrong_fake_tensor_is_named_as_well(name):
    mode = FakeTensorMode()
    for label, what, given in mistakes(name):
        with mode:
            check_refused(name, label, what, [faked(mode, value) for value in given])


def test_every_tensor_of_every_op_has_a_shape():
    slots = {f"{name}: {slot.label}": slot for name in OURS for slot in OPS[name].arguments.values()}
    tensors = {label: slot for label, slot in slots.items() if slot.spec is not None}
    print(f"{len(tensors)} tensors of {len(OURS)} ops")
    assert [label for label, slot in tensors.items() if not slot.shapes] == []


@pytest.mark.parametrize("backend", ["plain", None], ids=["plain", "usual"])
def test_a_message_says_what_was_declared_and_what_was_given(backend):
    given = Problem((300,), 2).arguments("momentum_compress")
    short = given._replace(compensated_scale=given.compensated_scale[:3].double())
    told = (
        r"^momentum_compress: compensated.scale must be float32 \[B\] = \[4\] on cpu, got float64 \[3\] on cpu; "
        r"see places.block_tensor$"
    )
    with using(backend) if backend else torch.no_grad(), pytest.raises(ValueError, match=told):
        ops.momentum_compress(*short)


def test_a_compiler_is_told_when_it_traces():
    given = Problem((300,), 2).arguments("momentum_compress")
    wrong = given._replace(compensated_scale=given.compensated_scale.double())
    with pytest.raises(Exception, match=r"momentum_compress: compensated.scale must be float32 \[B\] = \[4\]"):
        torch.compile(lambda: ops.momentum_compress(*wrong), backend="eager", fullgraph=True)()


# ---------------------------------------------------------------- declarations


class Pair(NamedTuple):
    whole: Annotated[Floats, "rows 2+"]
    sums: Annotated[Doubles, "rows | 1"]


def eager(
    tensors: Tensors, sizes: Sizes, block_size: int, scale: PerBlock, x: PerElement, pair: Pair,
    other: Annotated[Pair, "rows=B/2"] | None, left: Annotated[Pair, "empty"] | None, hold: Flag,
    some: Annotated[Bits, "T _ 3 | "] | None = None,
) -> None:  # fmt: skip
    """Nothing."""


SIGNATURE = Signature(eager)
CHECKS = Checks("eager", SIGNATURE.slots, ["tensors"])


def pair(rows: int, columns: int = 2) -> Pair:
    return Pair(torch.zeros(rows, columns), torch.zeros(rows, dtype=torch.float64))


TWO = "tensors must be 2 tensors of float32 or bfloat16 or float16 with [3, 9] elements, or none, on cpu"
NONE = Pair(torch.zeros(0), torch.zeros(0, dtype=torch.float64))
GIVEN = {
    "tensors": [torch.zeros(3), torch.zeros(0)],
    "sizes": (3, 9),
    "block_size": 8,
    "scale": torch.zeros(4),
    "x": torch.zeros(32),
    "pair": pair(7),
    "other": pair(2),
    "left": NONE,
    "hold": torch.zeros(2, 2, dtype=torch.int32)[:1, 0],
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"x": torch.zeros(99)},
        {"pair": pair(1, 9)},
        {"pair": pair(5)._replace(sums=torch.zeros(1, dtype=torch.float64))},
        {"other": None, "left": pair(3)},
        {"some": torch.zeros(2, 9, 3, dtype=torch.uint8)},
        {"some": torch.zeros((), dtype=torch.uint8)},
    ],
)
def test_what_is_as_declared_passes(change):
    CHECKS(SIGNATURE.flat(**GIVEN | {"some": None} | change))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x": torch.zeros(31)}, r"x must be float32 [P+] = [32 or more] on cpu, got float32 [31] on cpu; see scale"),
        ({"pair": pair(7, 1)}, "pair.whole must be float32 [rows, 2+] = [7, 2 or more] on cpu, got float32 [7, 1]"),
        (
            {"pair": pair(7)._replace(sums=torch.zeros(6, dtype=torch.float64))},
            "pair.sums must be float64 [rows] or [1] = [7] or [1] on cpu, got float64 [6] on cpu; see pair.whole",
        ),
        ({"other": pair(3)}, "other.whole must be float32 [rows, 2+] = [2, 2 or more] on cpu, got float32 [3, 2] on"),
        ({"left": pair(3)._replace(whole=torch.zeros(2))}, "left.whole must be float32 [rows, 2+] or [0] = "),
        ({"some": torch.zeros(3, 9, 3, dtype=torch.uint8)}, "some must be uint8 [T, _, 3] or [] = [2, _, 3] or [] on"),
        ({"tensors": [torch.zeros(3)]}, f"{TWO}, got 1 of float32 with [3]"),
        ({"tensors": [torch.zeros(4)] * 2}, f"{TWO}, got 2 of float32 with [4, 4]"),
        (
            {"x": torch.zeros(64)[::2]},
            "x must be float32 [P+] = [32 or more], dense along its last dimension, on cpu, got float32 [32] with",
        ),
        ({"hold": torch.zeros(1, dtype=torch.int32, device="meta")}, "hold must be int32 [1] on cpu, got int32 [1] on"),
    ],
)
def test_what_is_not_is_told(change, told):
    with pytest.raises(ValueError, match=re.escape(f"eager: {told}")):
        CHECKS(SIGNATURE.flat(**GIVEN | {"some": None} | change))
