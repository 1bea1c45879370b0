"""What bfloat16 parameters lack of masters, in 8 or 16 bits: parted and joined, and moved alike on all backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_arguments import Problem
from torch import Tensor

from fusedonebit import triton_kernels
from fusedonebit.triton_kernels import using
from fusedonebit.triton_kernels.eager import join, part

INT16, INT8 = torch.int16, torch.int8
EACH_DTYPE = pytest.mark.parametrize("kept", [INT16, INT8], ids=["16bit", "8bit"])
EACH_OP = pytest.mark.parametrize("op", ["adam_update", "apply_momentum"])
SEVERAL = (torch.bfloat16, torch.float32)
SIZES = (300, 0, 5, 1100, 129)
MASKED = {"masks": {0: torch.arange(300) % 3 > 0, 4: torch.arange(129) < 128}, "excluded": [2]}
SIXTEEN = st.integers(0, 0xFFFF)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def number(word: int) -> Tensor:
    return torch.tensor([word - 2**32 if word >= 2**31 else word], dtype=torch.int32).view(torch.float32)


# ---------------------------------------------------------------- a number and its two parts


@given(FINITE)
def test_16_bits_are_all_that_the_nearest_bfloat16_lacks(value):
    x = torch.tensor([value], dtype=torch.float32)
    upper, low = part(x, INT16, None)
    assert torch.equal(upper, upper.bfloat16().float())
    assert torch.equal(bits(join(upper, low)), bits(x))
    # No bfloat16 is nearer: where two are as near it may be either.
    off, least = (abs(bits(each.float()) - bits(x)).item() for each in (upper, x.bfloat16()))
    assert off == least


@pytest.mark.parametrize("kept", [INT16, INT8])
def test_carries_infinity_and_nan(kept):
    exact = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x00008000, 0x3F808000, 0x3F818000, 0xBF808000, 0x3FFFFF00]
    exact += [0x7F7F7F00, 0x7F7F8000, 0x7F7FFF00, 0x00000100, 0x80000100]
    for word in exact:
        upper, low = part(number(word), kept, torch.tensor([0xFFFF], dtype=torch.int32))
        assert bits(join(upper, low)).item() == bits(number(word)).item(), hex(word)
    for word in (0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0x7FC00000):
        upper, low = part(number(word), kept, torch.tensor([0xFFFF], dtype=torch.int32))
        assert upper.isnan().all()
        assert upper.bfloat16().isnan().all()
        assert int(low) == 0


@given(FINITE, SIXTEEN)
def test_8_bits_keep_one_of_the_two_nearest_24_bit_numbers(value, random):
    x = torch.tensor([value], dtype=torch.float32)
    upper, low = part(x, INT8, torch.tensor([random], dtype=torch.int32))
    assert torch.equal(upper, upper.bfloat16().float())
    found, below = bits(join(upper, low)).item(), bits(x).item() & ~0xFF
    assert found == (below if (bits(x).item() & 0xFF) + (random >> 8) < 256 else below + 256)
    again = part(join(upper, low), INT8, torch.tensor([random ^ 0xFFFF], dtype=torch.int32))
    assert torch.equal(bits(again[0]), bits(upper))
    assert torch.equal(again[1], low)


def test_over_all_random_bits_8_bits_keep_the_mean():
    for word in (0x3F800001, 0x3F8080C3, 0xBF7FFFFF, 0x3F807FFF, 0x00000011):
        x = number(word)
        upper, low = part(x.repeat(1 << 16), INT8, torch.arange(1 << 16, dtype=torch.int32))
        assert bits(join(upper, low)).double().mean().item() == bits(x).item()


@given(FINITE, st.integers(-(2**15), 2**15 - 1))
def test_overwritten_parameters_are_off_by_half_a_unit_at_most(value, stale):
    written = torch.tensor([value], dtype=torch.float32).bfloat16().float()
    found = join(written, torch.tensor([stale], dtype=INT16))
    if written.isfinite():
        assert found.isfinite().all()
        assert abs(bits(found) - bits(written)).item() <= 0x8000


# ---------------------------------------------------------------- ops


def arguments(op: str, kept: torch.dtype) -> Any:
    """An op's arguments, with corrections of any size of all parameters, also of masked ones."""
    p = Problem(SIZES, 2, dtype=torch.bfloat16, **MASKED)
    how = {"exp_avg_sq": ...} if op == "apply_momentum" else {"found": ..., "found_before": ...}
    return p.arguments(op, correction=kept, **how)


@EACH_DTYPE
@EACH_OP
def test_masters_are_moved_by_the_rule_for_float32_parameters(op, kept):
    given = arguments(op, kept)
    layout = Problem(SIZES, 2, 128).layout
    parts = [given.correction[layout.offset(i) : layout.offset(i) + n] for i, n in enumerate(SIZES)]
    masters = [join(p.float(), low) for p, low in zip(given.params, parts, strict=True)]
    before = [m.clone() for m in masters]
    plain = arguments(op, kept)
    with using("plain"):
        getattr(triton_kernels, op)(*plain._replace(params=masters, correction=None))
        getattr(triton_kernels, op)(*given)
    moved = False
    for i, (p, low) in enumerate(zip(given.params, parts, strict=True)):
        off = bits(join(p.float(), low)) - bits(masters[i])
        assert (off.abs() < 256).all()
        assert kept is INT8 or not off.any()
        moved |= not torch.equal(before[i], masters[i])
    assert moved


@pytest.mark.parametrize("backend", ["plain", pytest.param("native", marks=pytest.mark.needs_compiler)])
@EACH_OP
def test_elements_that_no_mask_lets_move_keep_their_corrections(op, backend):
    given, before = (arguments(op, INT8) for _ in range(2))
    with using(backend):
        getattr(triton_kernels, op)(*given)
    live = Problem(SIZES, 2, 128, **MASKED).live_mask
    assert torch.equal(given.correction[~live], before.correction[~live])
    assert not torch.equal(given.correction[live], before.correction[live])
