"""Kernels as Triton compiles them leave, on an emulator, what plain torch does; what is wrong with one is found."""

from __future__ import annotations

import random
import re

import pytest
import whole_steps
from launch_keys import recording
from ptx_launches import Found
from ptx_machine import compiler
from ptx_program import UnknownError
from ptx_steps import REASONS, small, take, unexplained

pytestmark = [
    pytest.mark.needs_compiler,
    pytest.mark.skipif(not compiler(), reason="no C++ compiler: for instance apt-get install g++"),
]

ADAMW, ADAM, ROUNDED = "AdamW, W = 1", "OneBitAdam, defaults", "AdamW, stochastic rounding, W = 1"
SEED, SAMPLED = 0, 3


def wrong(found: list[Found]) -> list[str]:
    return [f"{each.op}: {text}" for each in found for text in each.wrong]


@pytest.mark.parametrize("name", random.Random(SEED).sample(sorted(whole_steps.runs()), SAMPLED))
def test_whole_steps_leave_what_plain_torch_does(name):
    found = take([name])
    assert wrong(found) == unexplained(found) == []
    assert all(each.launches == each.equal > 0 for each in found)
    print(f"{name}: {len(found)} launch keys, {sum(each.launches for each in found)} launches as PTX")


def test_what_several_warps_touch_needs_a_reason_for_that_kernel():
    note = "an unused load of what is stored by another warp, advance.py:59:30"
    assert unexplained([Found("advance", notes=[note])]) == []
    assert unexplained([Found("flatten", notes=[note])]) == [f"flatten: {note}"]
    assert all(REASONS.values())


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", whole_steps.BASES)
def test_small_steps_launch_what_large_ones_do(name):
    run = whole_steps.BASES[name]
    with recording() as keys:
        whole_steps.take(run)
    with recording() as of_small:
        whole_steps.take(small(run))
    print(f"{name}: {len(of_small & keys)} of {len(keys)} launch keys are the same")
    assert {key.op for key in of_small} == {key.op for key in keys}
    # A number may be a multiple of 16 in one and not in the other; of matrices, spans of ``receive``, on either rank.
    assert len(of_small & keys) >= len(keys) - (2 if name == "OneBitMuon" else 1)


# ---------------------------------------------------------------- faults


FAULTS: dict[str, tuple[str, str, str, str]] = {
    "a barrier removed": (ADAM, "momentum_compress", r"\tbar\.sync \t0;\n", ""),
    "a bound off by one": (ADAMW, "advance", r"setp\.lt\.s32", "setp.le.s32"),
    "a fused multiply-add": (ADAMW, "adam_update", r"mul\.rn\.f32 \t(.*, .*), (.*);", r"fma.rn.f32 \t\1, \2, 0;"),
    "an approximate division": (ADAMW, "adam_update", r"div\.rn\.f32", "div.full.f32"),
    "an approximate root": (ADAMW, "adam_update", r"sqrt\.rn\.f32", "sqrt.approx.f32"),
    "an unsigned shift made signed": (ROUNDED, "adam_update", r"shr\.u32( .*, 1[56];)", r"shr.s32\1"),
    "a missing mask": (ADAMW, "advance", r"@%p\d+ (st\.global)", r"\1"),
    "a store of one warp read by another": (ADAMW, "advance", r"\tbar\.sync \t0;\n", ""),
    "no order between blocks": (ADAM, "receive", r"acq_rel", "relaxed"),
    "another lane's value": (ADAM, "momentum_compress", r"(shfl\.sync\.bfly\.b32 .*), 16, 31", r"\1, 8, 31"),
    "a difference made a sum": (ADAM, "apply_momentum", r"sub\.rn\.f32", "add.rn.f32"),
    "a misaligned address": (ADAM, "adam_update", r"(ld\.global\.v4\.b32 .*) \+ 0 \]", r"\1 + 4 ]"),
    "shared memory that nobody has written": (ADAM, "momentum_compress", r"\n.*st\.shared[^\n]*", ""),
    "a constant instead": (ADAMW, "advance", r"cvt\.rn\.f32\.f64 \t(%r\d+), %rd\d+;", r"mov.b32 \t\1, 1065353217;"),
}
"""Of which steps, in which kernel, what is replaced, and by what."""
FIRST = ("a barrier removed", "shared memory that nobody has written", "a store of one warp read by another")
"""Those of which one place is enough."""
REFUSED = ("a fused multiply-add", "an approximate division", "an approximate root")
"""Those that the emulator doesn't execute; all others it must execute, and find."""


@pytest.mark.long(but=2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    name, kernel, pattern, instead = FAULTS[fault]

    def patch(ptx: str) -> str:
        if f".entry {kernel}_kernel(" not in ptx:
            return ptx
        changed, count = re.subn(pattern, instead, ptx, count=int(fault in FIRST))
        assert count, f"no {pattern} in {kernel}"
        return changed

    if fault in REFUSED:
        with pytest.raises(UnknownError, match=r"(fma\.rn|div\.full|sqrt\.approx)\.f32"):
            take([name], patch=patch)
        return
    found = take([name], patch=patch)
    told = [text for text in wrong(found) if text.startswith(f"{kernel}: ")]
    print(f"{fault}: {told[:2]}")
    assert told


@pytest.mark.long
@pytest.mark.parametrize("name", [ADAMW, ADAM, ROUNDED])
def test_nothing_is_found_where_there_is_no_fault(name):
    assert wrong(take([name])) == []
