"""What bfloat16 parameters lack of masters, in 8 or 16 bits: parted and joined, and moved alike on all backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import assert_equal_backends
from hypothesis import given
from hypothesis import strategies as st
from reference_ops import Problem
from test_adam_update import in_fewer_bits, with_uncounted
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


# ---------------------------------------------------------------- kernels


def arguments(op: str, kept: torch.dtype, step: int, sizes=SIZES, dtypes=(torch.bfloat16,), skip=0, **how) -> Any:
    """An op's arguments, with corrections of any size of all bfloat16 parameters, also of masked ones."""
    p = Problem(sizes, 2, 128, **how)
    p.params = [x.to(dtypes[i % len(dtypes)]) for i, x in enumerate(p.params)]
    p.exp_avg_sq.mul_(p.live_mask)
    narrow = torch.iinfo(kept)
    correction = torch.randint(narrow.min, narrow.max + 1, (p.layout.numel,), dtype=kept, generator=p._random)
    for i, x in enumerate(p.params):
        if x.dtype is not torch.bfloat16:
            correction[p.layout.offset(i) : p.layout.offset(i) + x.numel()] = 0
    rounding = None if kept is INT16 else torch.tensor(step)
    if op == "apply_momentum":
        first = p.apply_arguments(p.exp_avg_sq, skip=skip, rounding=rounding)
        return first._replace(correction=correction)
    found, found_before = p.flags_found()
    return p.update_arguments(skip, False, rounding)._replace(
        found=found, found_before=found_before, correction=correction
    )


@pytest.mark.kernels
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), SEVERAL], ids=["bfloat16", "several"])
@EACH_DTYPE
@EACH_OP
def test_a_kernel_moves_masters_as_eager(op, kept, dtypes):
    for sizes, step, skip, how in (((1025,), 0, 0, {}), (SIZES, 2**32 + 7, 0, MASKED), (SIZES, 5, 1, {})):
        assert_equal_backends(op, lambda z=sizes, s=step, k=skip, h=how: arguments(op, kept, s, z, dtypes, k, **h))


@pytest.mark.kernels
@EACH_DTYPE
def test_kernels_move_masters_beside_codes_as_eager(kept):
    def make() -> tuple:
        p = Problem(SIZES, 2, 128, masks=MASKED["masks"], dtype=torch.bfloat16)
        p.exp_avg_sq.mul_(p.live_mask)
        rounding = None if kept is INT16 else torch.tensor(3)
        given = with_uncounted(p, p.update_arguments(0, False, rounding))
        correction = torch.full((p.layout.numel,), -77, dtype=kept)
        return given._replace(moments=in_fewer_bits(p, True), correction=correction)

    assert_equal_backends("adam_update", make)


@pytest.mark.kernels
@EACH_DTYPE
@EACH_OP
def test_a_kernel_parts_nan_infinity_and_the_largest_as_eager(op, kept):
    def make() -> tuple:
        given = arguments(op, kept, 4, (300,))
        given.params[0][:7] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 3.3895e38, 1e-40, 0.0]).bfloat16()
        given.correction[:300:3] = torch.iinfo(kept).min
        # The NaN that GPUs make: a carry would make -0.0 of it.
        held, at = (given.moments.exp_avg, 200) if op == "adam_update" else (given.exp_avg.scale, 1)
        held.view(torch.int32)[at] = 0x7FFFFFFF
        return given

    assert_equal_backends(op, make)


@EACH_DTYPE
@EACH_OP
def test_masters_are_moved_by_the_rule_for_float32_parameters(op, kept):
    given = arguments(op, kept, 9, **MASKED)
    layout = Problem(SIZES, 2, 128).layout
    parts = [given.correction[layout.offset(i) : layout.offset(i) + n] for i, n in enumerate(SIZES)]
    masters = [join(p.float(), low) for p, low in zip(given.params, parts, strict=True)]
    before = [m.clone() for m in masters]
    plain = arguments(op, kept, 9, **MASKED)
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
    given, before = (arguments(op, INT8, 9, **MASKED) for _ in range(2))
    with using(backend):
        getattr(triton_kernels, op)(*given)
    live = Problem(SIZES, 2, 128, **MASKED).live_mask
    assert torch.equal(given.correction[~live], before.correction[~live])
    assert not torch.equal(given.correction[live], before.correction[live])
