"""A step that is held back, as an overflow does it, writes nothing: ops, kernels and the compressed all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import assert_equal_backends, bits_of, problem, tensors

from fusedonebit import triton_kernels
from fusedonebit.comm import CompressedAllReduce, SimulatedGroup
from fusedonebit.triton_kernels import FlatLayout, using
from fusedonebit.triton_kernels.headers import Flag


@pytest.mark.long(but=1)
@pytest.mark.kernels
@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("op", ["momentum_compress", "server_reduce"])
def test_an_op_that_is_held_back_writes_nothing(op, ternary):
    def make_arguments(hold: int = int(Flag.OVERFLOW)) -> tuple:
        p = problem((300, 0, 5, 2048, 129), 2, 128, special=True, ternary=ternary)
        return p.momentum_arguments(hold=hold) if op == "momentum_compress" else p.server_arguments(hold=hold)

    assert_equal_backends(op, make_arguments)
    for hold, written in ((0, True), (1, False), (int(Flag.OVERFLOW), False)):
        arguments = make_arguments(hold)
        with using("triton"):
            getattr(triton_kernels, op)(*arguments)
        pairs = list(zip(tensors(arguments), tensors(make_arguments(hold)), strict=True))
        if op == "server_reduce":  # what headers say is kept in any case
            told, pairs = pairs[-2:], pairs[:-2]
            assert int(told[0][0]) == hold
            assert not any(torch.equal(bits_of(a), bits_of(b)) for a, b in told)
        assert any(not torch.equal(bits_of(a), bits_of(b)) for a, b in pairs) == written


def reduce_with_holds(rank: int, transport: Any) -> list[bool]:
    """Whether each of six calls, the first and the fourth held back, has changed nothing."""
    reduce, random = CompressedAllReduce(FlatLayout((700, 20), 2, 128), transport), torch.Generator().manual_seed(rank)
    same = []
    for step in range(6):
        sides = [(each.scale, each.settled, each.compensated) for each in (reduce.worker, reduce.server)]
        held = (reduce.scale, *sides[0], *sides[1])
        before = [reduce.result(), *(t.clone() for t in held)]
        flag = int(Flag.OVERFLOW) * (step in (0, 3))
        reduce([torch.randn(n, generator=random) for n in (700, 20)], hold=torch.tensor([flag], dtype=torch.int32))
        same.append(all(map(torch.equal, before, (reduce.result(), *held))))
        assert (int(reduce.flags), int(reduce.synchronisations)) == (flag, step + 1)
    return same


def test_an_all_reduce_held_back_changes_nothing_but_the_count():
    for same in SimulatedGroup(2).run(reduce_with_holds):
        assert same == [True, False, False, True, False, False]
