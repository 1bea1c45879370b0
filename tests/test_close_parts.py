"""What ends a step in parts: all are skipped or none, and the guard judges all together; on all backends alike."""

from __future__ import annotations

import math

import pytest
import torch
from backends import assert_equal_backends
from parts_arguments import SOME, arguments_of

from fusedonebit.triton_kernels import Coef, close_parts, using
from fusedonebit.triton_kernels.headers import Flag
from fusedonebit.triton_kernels.parts import SPAN

LONG = ((SPAN + 70) * 128,)
BACKENDS = ("plain", "triton", pytest.param("native", marks=pytest.mark.needs_compiler))
UNIT = 2.3e-16  # see test_alone


@pytest.mark.kernels
@pytest.mark.parametrize("limit", [None, 1e9, 1e-9, math.nan])
@pytest.mark.parametrize("found", [(0,), (0, 0, 0), (0, 1, 0, 32), (16, 16)], ids=str)
@pytest.mark.parametrize("sizes", [SOME, LONG], ids=["some", "long"])
def test_close_parts_equals_eager(sizes, found, limit):
    assert_equal_backends("close_parts", lambda: arguments_of(found, limit, sizes), float64_rtol=UNIT)


@pytest.mark.kernels
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_parts_give_the_same_bits_again_and_a_ticket_of_zero(backend):
    runs = []
    for _ in range(2):
        arguments = arguments_of((0,) * 129 + (2,), 1e9)
        with using(backend):
            close_parts(*arguments)
        assert int(arguments.ticket) == 0
        assert int(arguments.flags) == 2
        runs.append([t.clone() for t in arguments[:4]])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_part_that_was_not_skipped_is_and_one_that_was_stays_as_it_is(backend):
    arguments = arguments_of((0, int(Flag.ABORT), 0))
    found, scale, kept, flags = arguments[:4]
    before = scale.clone(), kept.clone()
    with using(backend):
        close_parts(*arguments)
    assert found.tolist() == [int(Flag.ABORT)] * 3
    assert int(flags) == int(Flag.ABORT)
    for now, was in zip((scale, kept), before, strict=True):
        parts, others = now.view(3, -1), was.view(3, -1)
        assert not parts[[0, 2]].any()
        assert torch.equal(parts[1], others[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factor", [1.001, 0.999, math.nan])
def test_an_update_beyond_the_limit_or_that_is_no_number_is_refused_in_all_parts(factor, backend):
    arguments = arguments_of((0, 0), 1e9)
    found, scale, kept, flags = arguments[:4]
    coef, block_tensor, weight, limit, norm = arguments.limit
    expected = (scale.double() * coef[:, Coef.UNBIAS1].double()[block_tensor] * weight.double()).square().sum().sqrt()
    limit.copy_(expected * factor)
    with using(backend):
        close_parts(*arguments)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    refused = not factor > 1
    assert int(flags) == int(Flag.VETO) * refused
    assert found.tolist() == [int(Flag.VETO) * refused] * 2
    assert bool(scale.any()) == bool(kept.any()) == (not refused)
