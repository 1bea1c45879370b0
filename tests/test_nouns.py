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
from fusedonebit.triton_kernels.native.generate import Spec
from fusedonebit.triton_kernels.nouns import Flag, Floats
from fusedonebit.triton_kernels.op import OPS

ENDS = ("finish", "finish_alone", "receive", "close_parts")


class Pair(NamedTuple):
    first: Floats
    second: Floats | None
    counts: bool
    number: int = 7


def eager(x: Floats, pair: Pair, other: Pair | None, hold: Flag, last: Pair | None = None) -> None:
    found.append((x, pair, other, hold, last))


found: list[tuple] = []
A, B, C = torch.zeros(3), torch.ones(2), torch.zeros(1, dtype=torch.int32)


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
