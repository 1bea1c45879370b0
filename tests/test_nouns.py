"""Nouns: one argument to callers and kernels, several to torch, Triton's launcher and C."""

from __future__ import annotations

import inspect
import sys
from typing import NamedTuple

import pytest
import torch

from fusedonebit.triton_kernels import nouns
from fusedonebit.triton_kernels.finish import Segments
from fusedonebit.triton_kernels.flattening import Signature
from fusedonebit.triton_kernels.jit import Deferred
from fusedonebit.triton_kernels.native.generate import Spec
from fusedonebit.triton_kernels.nouns import Derived, Flag, Floats
from fusedonebit.triton_kernels.op import OPS

ENDS = ("finish", "finish_alone", "receive", "close_parts")


class Pair(NamedTuple):
    first: Floats
    second: Floats | None
    counts: bool
    number: int = 7

    @staticmethod
    def derived() -> Derived:
        return {"length": ("i32", lambda first: 0 if first is None else len(first))}


def eager(x: Floats, pair: Pair, other: Pair | None, hold: Flag, last: Pair | None = None) -> None:
    found.append((x, pair, other, hold, last))


def kernel(x, pair, hold, other):
    found.append((x, pair.first, pair.COUNTS, pair.length, hold, other.number))


found: list[tuple] = []
A, B, C = torch.zeros(3), torch.ones(2), torch.zeros(1, dtype=torch.int32)


def test_fields_have_the_name_of_their_argument_before_their_own():
    slots = Signature(eager).slots
    kinds = {"first": "Tensor", "second": "Tensor?", "counts": "bool", "number": "int"}
    optional = kinds | {"first": "Tensor?"}
    expected = {"x": "Tensor", **{f"pair_{n}": kind for n, kind in kinds.items()}}
    expected |= {f"other_{n}": kind for n, kind in optional.items()} | {"hold": "Tensor"}
    expected |= {f"last_{n}": kind for n, kind in optional.items()}
    assert {name: slot.schema for name, slot in slots.items()} == expected


@pytest.mark.parametrize("other", [None, Pair(B, None, True), Pair(B, A, False, 3)], ids=["none", "some", "all"])
def test_what_was_flattened_comes_back_whole(other):
    signature = Signature(eager)
    flat = signature.flat(A, Pair(A, B, True), other, C)
    assert len(flat) == len(signature.slots)
    assert list(flat[-4:]) == [None, None, False, 7]
    found.clear()
    signature.regrouped(eager)(*flat[:-2])  # torch leaves out defaults at the end
    ((x, pair, given, hold, last),) = found
    assert x is A
    assert pair == Pair(A, B, True, 7)
    assert given == other
    assert hold is C
    assert last is None


def test_arguments_may_be_given_by_name():
    signature = Signature(eager)
    by_place = signature.flat(A, Pair(A, B, True), None, C)
    assert signature.flat(A, hold=C, other=None, pair=Pair(A, B, True)) == by_place
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'hold'"):
        signature.flat(A, Pair(A, B, True), None)
    for wrong in ((A,), (A, Pair(A, B, True), None, C, None, None)):
        with pytest.raises(TypeError, match="argument"):
            signature.flat(*wrong)


def test_a_kernel_of_nouns_is_launched_with_flat_arguments():
    flat = Signature(eager).kernel(Deferred(kernel, kernel, {}))
    parameters = inspect.signature(flat.function).parameters
    fields = ["pair_first", "pair_second", "PAIR_COUNTS", "pair_number", "pair_length"]
    others = [name.replace("pair", "other").replace("PAIR", "OTHER") for name in fields]
    assert list(parameters) == ["x", *fields, "hold", *others]
    assert parameters["PAIR_COUNTS"].annotation == "tl.constexpr"
    assert "def kernel(" in inspect.getsource(flat.function)
    found.clear()
    flat.function(A, B, None, True, 3, 2, C, B, None, False, 5, 2)
    assert found == [(A, B, True, 2, C, 5)]


def test_an_op_without_nouns_has_its_own_function_and_kernel():
    def plain(x: Floats, hold: Flag) -> None:
        pass

    signature, given = Signature(plain), Deferred(kernel, kernel, {})
    assert signature.regrouped(plain) is plain
    assert signature.kernel(given) is given
    assert signature.flat(A, C) == (A, C)


def test_ops_that_end_a_compression_take_few_arguments():
    for name in ENDS:
        op = OPS[name]
        module = sys.modules[op.kernel.function.__module__]
        written = inspect.signature(getattr(module, f"{name}_kernel").function).parameters
        whole = len(op.signature.whole.parameters)
        print(f"{name}: {whole} arguments, {len(op.arguments)} flat, {len(written)} of the kernel")
        assert whole <= 12
        assert len(written) <= 20


def test_no_noun_has_more_than_eight_fields():
    kinds = [each for each in vars(nouns).values() if inspect.isclass(each) and hasattr(each, "_fields")]
    fields = {kind.__name__: len(kind._fields) for kind in (*kinds, Segments) if kind is not Spec}
    print(fields)
    assert fields.keys() >= {"Header", "Coefficients", "Limit", "Side", "Arrived", "Digest", "Segments"}
    assert max(fields.values()) <= 8
