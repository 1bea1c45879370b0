"""A step that is held back, as an overflow does it, writes nothing: ops, kernels and the compressed all-reduce."""

from __future__ import annotations

from typing import Any

import torch

from fusedonebit.comm import CompressedAllReduce, SimulatedGroup
from fusedonebit.triton_kernels import FlatLayout
from fusedonebit.triton_kernels.headers import Flag


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
