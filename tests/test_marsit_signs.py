"""Marsit's operator on packed bits (``test_every_op`` has its formula): draws have exactly their probability."""

from __future__ import annotations

import math

import pytest
import torch
from op_arguments import Problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedonebit.triton_kernels import merge_signs, pick_owned
from fusedonebit.triton_kernels.marsit_signs import bernoulli, threshold_of


def test_differing_bits_are_taken_as_often_as_the_threshold_says():
    arguments = Problem((16_512,)).arguments("merge_signs", threshold=threshold_of(2))
    before = arguments.bits.clone()
    merge_signs(*arguments)
    taken, differ = (
        sum(((x >> k) & 1).sum() for k in range(8)) for x in (arguments.bits ^ before, before ^ arguments.arrived_bits)
    )
    assert 0.4 < taken / differ < 0.6


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_all_ranks_agree_on_owners_and_each_owns_as_many(world_size):
    planes = []
    for rank in range(world_size):
        arguments = Problem((world_size * 16_512,), world_size, rank=rank).arguments("pick_owned")
        pick_owned(*arguments)
        planes.append(arguments.owners)
    assert all(torch.equal(planes[0], other) for other in planes)
    owned = torch.tensor([sum(int(((plane >> k) & 1).sum()) for k in range(8)) for plane in planes[0]]) / 16_512
    assert ((owned * world_size - 1).abs() < 0.1).all()


@pytest.mark.long(but=1)
@pytest.mark.parametrize("threshold", [*map(threshold_of, range(2, 10)), 1, 1 << 20, 3 << 30, (1 << 32) - 1])
def test_a_draw_is_1_with_its_exact_probability_at_every_bit(threshold):
    words, part = 1_000_000, 4096
    ones = torch.zeros(32, dtype=torch.int64)
    for at in range(0, words, part):
        drawn = bernoulli(threshold, 77, torch.arange(at, min(at + part, words)))
        ones += torch.stack([((drawn >> k) & 1).sum() for k in range(32)])
    p = threshold / 2**32
    z = (ones - words * p) / math.sqrt(words * p * (1 - p))
    assert float(z.abs().max()) <= 4
    assert abs(float(z.sum()) / math.sqrt(32)) <= 4


class Operations(TorchDispatchMode):
    """Counts what torch is asked to compute, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements += result.numel() if isinstance(result, Tensor) and "bitwise" in func.__name__ else 0
        return result


def test_zeros_at_the_end_of_a_probability_cost_nothing():
    def cost(threshold: int) -> int:
        with Operations() as counted:
            bernoulli(threshold, 77, torch.arange(1 << 12))
        return counted.elements >> 12  # per word; what is done once per digit rounds to nothing

    one = cost(1 << 31)
    assert one > 0
    assert cost(0) == 0
    assert cost(1 << 29) == 3 * one
    assert cost(1) == cost((1 << 32) - 1) == 32 * one
