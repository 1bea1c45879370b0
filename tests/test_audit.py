"""The compiled kernels, without a GPU: ``benchmarks/audit.py`` against its limits, and what these promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.audit_kernels import PER_LAYER, audited, limits, named
from benchmarks.audit_steps import HOOKS, MERGE_LIMIT, STEPS, round_bytes, step_bytes

ROOT = Path(__file__).parent.parent
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def run(*program: str) -> str:
    """Return what a program prints; a process of its own, since here kernels may be interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, *program], capture_output=True, text=True, cwd=ROOT, env=environment)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "targets", [pytest.param(TARGETS, marks=pytest.mark.full), pytest.param(("sm_90",), marks=pytest.mark.long)]
)
@pytest.mark.timeout(2400)  # where nothing is in Triton's cache, all targets take ten minutes of an idle core
def test_no_number_of_any_kernel_got_worse(targets: tuple[str, ...]):
    printed = run("-m", "benchmarks.audit", "--check", *["--quick"] * (targets != TARGETS))
    head, *rows = printed.splitlines()
    assert [target for target in TARGETS if target in head] == list(targets)
    assert {row.rpartition("  ")[2] for row in rows} >= named().keys()
    assert "nothing got worse" in rows


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("", 28.1),
        (", bf16", 22.1),
        (", moments in bf16", 20.1),
        (", bf16, moments in bf16", 14.1),
        (", moments in codes", 16.1),
        (", bf16, moments in codes", 10.2),
        (", bf16, moments in codes, 8-bit corrections", 12.2),
        (", bf16, moments in codes, 16-bit corrections", 14.2),
    ],
)
def test_adamw_alone_moves_few_bytes(kind: str, limit: float):
    for target in TARGETS:
        found = audited(target)[f"adam_update, alone{kind}"]
        print(f"{target}, AdamW alone{kind}: {found:.2f} bytes per parameter and step")
        assert found <= limit


@pytest.mark.parametrize(
    ("name", "limit", "served"),
    [
        *(
            (f"{name}, {how}", limit, 8.2)
            for how in ("preconditioned", "plain")
            for name, limit in (
                ("1-bit Adam", 24.7),
                ("1-bit LAMB", 37.15),
                ("1-bit LAMB, frozen", 24.7),
            )
        ),
        ("ZeroOneAdam, local step", 32.1, 0.0),
        ("ZeroOneAdam, synchronising step after a round of one", 24.7, 8.2),
        ("ZeroOneAdam, mean over a round of 2", 36.5, 4.1),
        ("ZeroOneAdam, mean over a round of 16", 32.65, 8.2 / 16),
        ("ZeroOneAdam, own variances, local step", 36.1, 0.0),
        ("ZeroOneAdam, own variances, mean over a round of 1", 51.8, 8.2),
        ("ZeroOneAdam, own variances, mean over a round of 2", 51.5, 4.1),
        ("OneBitLion", 20.55, 8.2),
    ],
)
def test_a_whole_step_moves_fewer_bytes_than_promised(name: str, limit: float, served: float):
    for world_size in (2, 8, 64):
        counted = step_bytes(audited(), STEPS[name], world_size)
        print(f"{name}, W={world_size}: {counted:.3f} bytes per parameter")
        assert limit - 1 <= counted <= limit + served / world_size


@pytest.mark.parametrize("name", STEPS)
def test_recorded_bytes_keep_what_is_promised_of_a_whole_step(name: str):
    for world_size in (2, 8, 64):
        assert step_bytes(audited(), STEPS[name], world_size) <= STEPS[name].limit_of(world_size)


NARROW = {
    "1-bit Adam, state in bf16": 19.3,
    "1-bit Adam, bf16, state in codes": 12.5,
    "1-bit Adam, bf16, state in codes, 8-bit corrections": 12.5,
    "1-bit Adam, bf16, state in codes, living, mean over 50 steps": 13.0,
    **dict.fromkeys(HOOKS, 11.0),
}
"""Bytes per parameter of a whole step on 8 ranks that fewer bits must not exceed."""


@pytest.mark.parametrize("name", NARROW)
def test_a_step_on_fewer_bits_moves_no_more_than_promised(name: str):
    moved = step_bytes(audited(), (STEPS | HOOKS)[name], 8)
    print(f"{name}: {moved:.2f} bytes per parameter and step on 8 ranks (at most {NARROW[name]})")
    assert moved <= NARROW[name]


def test_marsits_operator_moves_few_bytes_beside_its_own_value():
    # What arrives is read and the result is written, a bit each.
    assert 0.25 <= audited()["merge_signs"] - 1 / 8 <= MERGE_LIMIT <= 0.4


@pytest.mark.parametrize("world_size", [2, 8, 64])
# Gradient, c, moments and parameter; Adam's weight decay reads it once more; and bits.
@pytest.mark.parametrize(("name", "floats"), [("MarsitSGD", 4 + 8 + 8 + 8), ("MarsitAdam", 4 + 8 + 16 + 8 + 4)])
def test_whole_rounds_of_marsit_are_counted(name: str, floats: int, world_size: int):
    bits = 3 / 8 + 3 / 8 * (1 - 1 / world_size)
    assert floats + bits <= round_bytes(audited(), name, world_size) <= floats + bits + 0.2


NOTICED = """
from benchmarks import audit
for target in audit.TARGETS:
    for kernel, tensors in (("momentum_compress", "GRADS"), ("apply_momentum", "PARAMS")):
        limit, usual = audit.limits(target)[kernel], audit.named()[kernel]
        bad = audit.audit(usual._replace(given=usual.given | {tensors: 0}), audit.TARGETS[target])
        assert any("scalar_accesses" in text for text in audit.worse(kernel, bad, limit, True)), (target, kernel)
        good = audit.audit(usual, audit.TARGETS[target])
        assert not audit.worse(kernel, good, limit, False)
        (moved,) = limit["bytes_per_element"]
        assert audit.worse(kernel, good, limit | {"bytes_per_element": [moved + 4]}, False)
print("noticed")
"""


@pytest.mark.long
def test_an_unaligned_kernel_or_a_changed_byte_count_is_noticed():
    assert run("-c", NOTICED) == "noticed\n"


SMALL = (*PER_LAYER, "advance", "close_round", "outer_scales", "receive", "scale_coefficients")
"""Kernels that work on headers, scales and sums, or along lines of matrices, which begin anywhere."""
# 0: the kernel has no such access. Of sums each block writes a float64: 64 bits, counted on AMD only.
WIDTHS = {
    "pack": ((128,), (0,)),
    "unpack": ((0,), (128,)),
    "rebuild_momentum": ((0, 64, 128), (128,)),  # of float64 one at a time, counted on AMD only
    "average_squares": ((0,), (0, 64)),  # bytes on both sides
    "gradient_squares": ((128,), (0, 64)),
    "renew": ((0, 128), (128,)),  # v alone is made of bytes
    **dict.fromkeys(("tell_squares", "tell_level"), ((128,), (0,))),
    "quantise": ((128,), (0, 64, 128)),  # levels are bytes, or words of eight of them
    "requantise": ((0, 128), (0, 64, 128)),  # and headers
    "dequantise": ((0, 128), (128,)),
    **dict.fromkeys(("merge_signs", "pick_owned", "place_owned"), ((64, 128), (64, 128))),  # AMD's 256 threads have two
}
"""Bits that a thread of a kernel may load and store at once, where not 128."""
STATE = ("compensated", "exp_avg_sq", "moments", "worker_sq", "residual", "PARAMS", "GRADS", "TENSORS")
"""What may be stored in fewer bits."""


def test_limits_allow_no_spill_and_only_128_bit_access():
    # The assembler keeps one value of a thread in memory to stay at fewer registers (test_launch_keys.SPILLING).
    spilling = {("sm_80", "local_step, preconditioned"): 8}
    for target in TARGETS:
        for name, numbers in limits(target).items():
            kernel = named()[name]
            assert numbers["spill_bytes"] <= spilling.get((target, name), 0)
            assert numbers["narrow_indices"] == (kernel.op == "advance"), name  # of tensors, of which there are fewer
            loads, stores = WIDTHS.get(kernel.op, ((128,), (128,)))
            if "words" in kernel.given:  # a majority's server has bits on both sides, and copies headers
                loads, stores = (0, 128), (64, 128)
            given = {value for argument, value in kernel.given.items() if argument.startswith(STATE)}
            if "*u8" in given:  # codes: a byte for each of a thread's elements
                loads, stores = (0, 32, 64, 128), (0, 32, 64, 128)
            if kernel.op not in SMALL and not {"*bf16", 5} & given:
                assert numbers["load_bits"] in loads, name
                assert numbers["store_bits"] in stores, name
