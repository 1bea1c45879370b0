"""Kernels whose work grows with the number of ranks, in Triton's interpreter against eager."""

from __future__ import annotations

import pytest
import torch
from backends import assert_equal_backends, problem

from fusedonebit import triton_kernels
from fusedonebit.triton_kernels.finish import LANES, SHORT
from fusedonebit.triton_kernels.headers import Word

pytestmark = pytest.mark.kernels


@pytest.mark.long(but=2)
@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("world_size", [7, 8, 9, 16, 21])
def test_server_reduce_adds_ranks_in_groups_and_in_order(world_size, ternary):
    def make() -> tuple:
        p = problem((300, 0, 5, 700), world_size, 128, ternary=ternary, masks={0: torch.arange(300) % 3 > 0})
        return p.server_arguments("block", world_size - 1)

    assert_equal_backends("server_reduce", make)


@pytest.mark.parametrize("world_size", [16, 40])
def test_programs_of_server_reduce_keep_all_headers_between_them(world_size):
    def make() -> tuple:  # a chunk of one block and of several: less work than programs, and more
        return problem((1000 if world_size == 40 else 5000,), world_size, 128).server_arguments()

    assert_equal_backends("server_reduce", make)


def test_server_reduce_of_zero_scales_has_eagers_zeros():
    def make() -> tuple:
        given = problem((3000,), 9, 128).server_arguments()
        given.arrived_bits[:, ::2] = 0  # nothing but minus signs
        given.arrived_scales.zero_()
        given.compensated_numbers.zero_()[::2] = -0.0
        given.compensated_scale.zero_()
        return given

    assert_equal_backends("server_reduce", make)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("norm", ["l1", "contractive"])
@pytest.mark.parametrize("world_size", [1, 3, 40])
def test_finish_takes_short_segments_by_lane_long_ones_together(world_size, norm):
    sizes = (*[5] * 60, 45 * 128, 1, 33 * 128, 32 * 128, *[3] * (LANES - 30))

    def make() -> tuple:
        p = problem(sizes, world_size, 128)
        p.partials.copy_(torch.rand(p.partials.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
        return p.finish_arguments("layer", norm)

    start, single, pieces, *_ = make().segments
    assert len(single) > LANES
    assert len(pieces) == 2
    assert start.diff().max() > SHORT
    assert_equal_backends("finish", make)


@pytest.mark.long(but=6)
@pytest.mark.parametrize("scope", ["global", "layer", "block"])
def test_finish_flags_each_of_hundreds_of_messages_at_a_drop(scope):
    sizes = (5, 7 * 128, 50 * 128, 3)

    def make() -> tuple:
        p = problem(sizes, 300, 128)
        p.partials.copy_(torch.rand(p.partials.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        arguments = p.finish_arguments(scope, "l2")
        arguments.header.pending.fill_(1)
        return arguments

    arguments = make()
    triton_kernels.finish(*arguments)
    flags = arguments.words[:, Word.FLAGS]
    assert len(flags) == 300
    assert flags.eq(1).all()
    assert_equal_backends("finish", make)
