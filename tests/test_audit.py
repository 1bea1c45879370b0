"""The compiled kernels, without a GPU: ``benchmarks/audit.py`` against its limits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.audit_steps import STEPS, step_bytes

ROOT = Path(__file__).parent.parent
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
# Nothing is in Triton's cache of kernels where it has never run: then all targets take eight minutes of an idle core.
pytestmark = pytest.mark.timeout(2400)


def audited(*options: str) -> str:
    """Return what the audit prints; a process of its own, since here kernels may be interpreted."""
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.audit", "--check", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing got worse" in result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def printed() -> str:
    return audited("--quick")


@pytest.mark.full
def test_no_number_of_any_kernel_got_worse_on_any_target():
    told = audited()
    for target in TARGETS:
        assert f"variants compiled for {target}, no spills" in told


@pytest.mark.parametrize(
    ("dtypes", "moments", "limit"),
    [
        ("", "", 28.1),
        (", bf16", "", 22.1),
        ("", ", moments in bf16", 20.1),
        (", bf16", ", moments in bf16", 14.1),
        ("", ", moments in codes", 16.1),
        (", bf16", ", moments in codes", 10.2),
        (", bf16", ", moments in codes, 8-bit corrections", 12.2),
        (", bf16", ", moments in codes, 16-bit corrections", 14.2),
    ],
)
def test_adamw_alone_moves_few_bytes(dtypes: str, moments: str, limit: float):
    limits = json.loads((ROOT / "benchmarks" / "limits.json").read_text())
    for target in TARGETS:
        found = limits[target][f"adam_update, alone{dtypes}{moments}"]["bytes_per_element"]
        print(f"{target}, AdamW alone{dtypes or ', fp32'}{moments}: {found:.2f} bytes per parameter and step")
        assert found <= limit


@pytest.mark.long
@pytest.mark.parametrize("numerics", ["preconditioned", "plain"])
@pytest.mark.parametrize(("name", "limit"), [("1-bit Adam", 24.7), ("1-bit LAMB", 37.15), ("1-bit LAMB, frozen", 24.7)])
def test_a_whole_step_moves_fewer_bytes_than_promised(printed: str, name: str, limit: float, numerics: str):
    line = rf"^{name}, {numerics}, whole step, fp32, W=(\d+): ([\d.]+) bytes per parameter"
    steps = re.findall(line, printed, re.MULTILINE)
    assert [int(world_size) for world_size, _ in steps] == [2, 8, 64]
    for world_size, counted in steps:
        assert float(counted) <= limit + 8.2 / int(world_size)


@pytest.mark.long(full=True)
@pytest.mark.parametrize(
    ("name", "limit", "served"),
    [
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
def test_steps_of_zero_one_adam_and_lion_are_counted(printed: str, name: str, limit: float, served: float):
    steps = re.findall(rf"^{name}, whole step, fp32, W=(\d+): ([\d.]+) bytes per parameter", printed, re.MULTILINE)
    assert [int(world_size) for world_size, _ in steps] == [2, 8, 64]
    for world_size, counted in steps:
        assert limit - 1 <= float(counted) <= limit + served / int(world_size)


@pytest.mark.long
def test_marsits_operator_moves_less_than_promised_besides_the_read_of_the_local_value(printed: str):
    line = r"^Marsit's operator, per element and hop: ([\d.]+) bytes besides the read of the local value \(limit 0.4\)$"
    (counted,) = re.findall(line, printed, re.MULTILINE)
    assert 0.25 <= float(counted) <= 0.4  # what arrives is read and the result is written, a bit each


@pytest.mark.long
def test_whole_rounds_of_marsit_are_counted(printed: str):
    rounds = re.findall(r"^(Marsit\w+), whole 1-bit round, fp32, M=(\d+): ([\d.]+) bytes", printed, re.MULTILINE)
    assert [tuple(found[:2]) for found in rounds] == [
        (n, m) for n in ("MarsitSGD", "MarsitAdam") for m in ["2", "8", "64"]
    ]
    for name, world_size, counted in rounds:
        # Gradient, c, moments and parameter; Adam's weight decay reads it once more; and bits.
        floats = 4 + 8 + 8 + 8 if name == "MarsitSGD" else 4 + 8 + 16 + 8 + 4
        bits = 3 / 8 + 3 / 8 * (1 - 1 / int(world_size))
        assert floats + bits <= float(counted) <= floats + bits + 0.2


@pytest.mark.long
def test_an_unaligned_kernel_or_a_changed_byte_count_would_be_noticed():
    program = """
import json
from benchmarks import audit
limits = json.loads(audit.LIMITS.read_text())
for target in audit.TARGETS:
    for kernel in ("momentum_compress", "apply_momentum"):
        limit = limits[target][kernel]
        bad = audit.audit(audit.VARIANTS[f"{kernel}, unaligned"], audit.TARGETS[target])
        assert any("scalar_accesses" in text for text in audit.worse(kernel, bad, limit, True)), (target, kernel)
        good = audit.audit(audit.CASES[kernel], audit.TARGETS[target])
        assert not audit.worse(kernel, good, limit, False)
        assert audit.worse(kernel, good, limit | {"bytes_per_element": limit["bytes_per_element"] + 4}, False)
print("noticed")
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.stdout == "noticed\n", result.stderr


@pytest.mark.parametrize("name", STEPS)
def test_the_numbers_that_limits_hold_keep_what_is_promised_of_a_whole_step(name: str):
    kernels = json.loads((ROOT / "benchmarks" / "limits.json").read_text())["sm_90"]
    bytes_of = {kernel: numbers["bytes_per_element"] for kernel, numbers in kernels.items()}
    for world_size in (2, 8, 64):
        assert step_bytes(bytes_of, STEPS[name], world_size) <= STEPS[name].limit_of(world_size)


NARROW = {
    "1-bit Adam, state in bf16": 19.3,
    "1-bit Adam, bf16, state in codes": 12.5,
    "1-bit Adam, bf16, state in codes, 8-bit corrections": 12.5,
    "1-bit Adam, bf16, state in codes, living, mean over 50 steps": 13.0,
}
"""Bytes per parameter of a whole step on 8 ranks that fewer bits must not exceed."""


@pytest.mark.parametrize("name", NARROW)
def test_a_step_on_fewer_bits_moves_no_more_than_promised(name: str):
    kernels = json.loads((ROOT / "benchmarks" / "limits.json").read_text())["sm_90"]
    moved = step_bytes({kernel: numbers["bytes_per_element"] for kernel, numbers in kernels.items()}, STEPS[name], 8)
    print(f"{name}: {moved:.2f} bytes per parameter and step on 8 ranks (at most {NARROW[name]})")
    assert moved <= NARROW[name]


def test_limits_allow_no_spill_no_32_bit_index_and_only_128_bit_access_to_flat_fp32_operands():
    limits = json.loads((ROOT / "benchmarks" / "limits.json").read_text())
    del limits["triton"]
    assert set(limits) == set(TARGETS)
    # 0: the kernel has no such access. A majority's server has bits on both sides, and copies headers, four words at a
    # time where that is known to be aligned. Of sums each block writes a float64: 64 bits, counted on AMD only.
    majority = [f"server_reduce, W={world_size}, majority" for world_size in (2, 8)]
    averages = [f"average_squares, W={world_size}" for world_size in (2, 8, 64)]  # bytes on both sides
    loads = dict.fromkeys(("unpack", "rebuild_momentum", *averages), (0,)) | dict.fromkeys(majority, (0, 128))
    tells = [f"tell_squares{which}" for which in ("", ", bf16", ", bf16 squares")]
    tells += ["tell_level", "tell_level, bf16"]
    stores = dict.fromkeys(("pack", *tells), (0,)) | {"gradient_squares": (0, 64)}
    stores |= dict.fromkeys(majority, (64, 128)) | dict.fromkeys(averages, (0, 64))
    named = {name for kernels in limits.values() for name in kernels if "in codes" in name}
    codes = dict.fromkeys(named, (32, 64, 128))  # a byte for each of a thread's elements
    loads, stores = loads | codes, stores | codes
    stores |= {
        name: (0, 64) for name in named if name.startswith("renew")
    }  # codes alone, of which none is counted on AMD
    for kernels in limits.values():
        for name, numbers in kernels.items():
            assert numbers["spill_bytes"] == 0
            assert numbers["narrow_indices"] == 0
            kernel = name.split(",")[0]
            small = (
                "finish",
                "finish_alone",
                "receive",
                "close_parts",
                "close_round",
                "lamb_coefficient",
                "lamb_rescale",
                "lamb_follow",
                "scale_coefficients",
            )
            if kernel not in small and "bf16" not in name:
                # Packed words: a thread of AMD's 256 has two.
                packed = (128, 64) if kernel in ("merge_signs", "pick_owned", "place_owned") else (128,)
                assert numbers["load_bits"] in loads.get(name, packed), name
                assert numbers["store_bits"] in stores.get(name, packed), name
