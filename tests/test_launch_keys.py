"""What whole steps launch: recorded as launch keys, all of which compile, without a GPU."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from launch_keys import Key, Noting, recording, write
from whole_steps import ADAM, BASES, SGD, Run, keys_of_all, take

from benchmarks.audit_kernels import named, variants
from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels.jit import Deferred
from fusedonebit.triton_kernels.op import OPS

ROOT = Path(__file__).parent.parent
IN_STEPS = {name for name in OPS if hasattr(ops, name)}
"""Without those that other tests, in the same process, declare."""
SPILLING = {"sm_80": ["local_step"], "sm_90": ["momentum_compress"], "sm_100": ["local_step"]}
"""Kernels with one key of which the assembler keeps one value of a thread, 4 or 8 bytes, in memory; may only get less.

It does so to stay at fewer registers than a thread may have.
"""
SMALL = (3000, 17)


def arguments_of(keys: set[Key], op: str) -> list[dict[str, tuple]]:
    return [{name: (kind, value) for name, kind, value in key.arguments} for key in keys if key.op == op]


def recorded(run: Run) -> set[Key]:
    with recording() as keys:
        take(replace(run, sizes=SMALL))
    return keys


@pytest.fixture(scope="module")
def all_keys() -> tuple[set[Key], dict[str, set[str]]]:
    return keys_of_all()


@pytest.fixture(scope="module")
def written(all_keys, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write(all_keys[0], path)
    return path


def compiling(path: Path, *arguments: str, program: tuple[str, ...] = ("-m", "benchmarks.launch_keys")) -> tuple:
    """Run a process of its own, since kernels are interpreted in this one; return its status and what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *program, str(path), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    return result.returncode, result.stdout + result.stderr


def compiled(path: Path, target: str, count: int | None, *arguments: str) -> list[str]:
    """Compile so many keys, None: one or two of each kernel; return the kernels of those that spill 8 bytes.

    Nothing else may be wrong.
    """
    status, printed = compiling(path, "--target", target, "--processes", "2", *arguments)
    print(printed)
    keys, told = re.findall(rf"^(\d+) keys for {target}: (\d+ wrong\n.*)", printed, re.MULTILINE | re.DOTALL)[-1]
    assert int(keys) == count if count is not None else len(IN_STEPS) <= int(keys) <= 2 * len(IN_STEPS)
    spilling = re.findall(rf"^{target}: spills 8 bytes\n  (\w+), ", told, re.MULTILINE)
    assert told.startswith(f"{len(spilling)} wrong\n"), printed
    assert status == (1 if spilling else 0), printed
    return spilling


# ---------------------------------------------------------------- the recorder


@pytest.mark.parametrize("name", OPS)
def test_tritons_launcher_takes_the_arguments_of_each_kernel(name):
    # It has variables of its own in their scope: an argument called ``params`` has failed all launches on a GPU.
    keys = set()
    stand_in = Noting(OPS[name], keys)
    stand_in[(1,)](*[3] * len(OPS[name].parameters), num_warps=4, enable_fp_fusion=False)
    ((_, num_warps, arguments),) = keys
    assert num_warps == 4
    assert [argument for argument, _, _ in arguments] == [parameter.name for parameter in OPS[name].parameters]
    assert {(kind, value) for _, kind, value in arguments} <= {("i32", ""), ("constexpr", 3), ("fp64", "")}


# What Triton's launcher asks before each launch but the first, of the constants that a kernel and its rules read.
LAUNCHED_AGAIN = """
from fusedonebit.triton_kernels.op import OPS

asked = 0
for name, op in OPS.items():
    kernel = op.kernel.triton
    assert kernel.cache_key
    for (constant, _), (value, names) in kernel.used_global_vals.items():
        asked += 1
        if names.get(constant) != value:
            print(f"{name} has another {constant} than it was compiled with: {value}")
print(f"{len(OPS)} kernels read {asked} constants")
"""


def test_no_constant_differs_at_a_kernels_second_launch():
    status, printed = compiling(ROOT, program=("-c", LAUNCHED_AGAIN))
    assert status == 0, printed
    kernels, constants = map(int, re.fullmatch(r"(\d+) kernels read (\d+) constants\n", printed).groups())
    assert kernels >= len(IN_STEPS)
    assert constants > kernels


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, ("constexpr", 1)),
        (48, ("i32", "D")),
        (49, ("i32", "")),
        (2**31, ("i64", "D")),
        (2**31 + 1, ("i64", "")),
        (None, ("constexpr", None)),
        (0.5, ("fp32", "")),
        (torch.zeros(9), ("*fp32", "D")),
        (torch.zeros(9)[4:], ("*fp32", "D")),
        (torch.zeros(9)[5:], ("*fp32", "")),
        (torch.zeros(99, dtype=torch.uint8)[17:], ("*u8", "")),
        (torch.zeros(9, dtype=torch.bfloat16), ("*bf16", "D")),
        (torch.zeros(9, dtype=torch.float64)[2:], ("*fp64", "D")),
        (torch.frombuffer(bytearray(64), dtype=torch.uint8, offset=1), ("*u8", "D")),  # wherever Python has put it
    ],
    ids=str,
)
def test_an_argument_is_noted_as_tritons_launcher_takes_it(value, expected):
    keys = set()
    Noting(OPS["unpack"], keys)[(1,)](value, torch.zeros(1), 5, 128, num_warps=4, enable_fp_fusion=False)
    (bits,) = [each["bits"] for each in arguments_of(keys, "unpack")]
    assert bits == expected


def test_same_steps_make_the_same_keys_changed_options_new_ones():
    first = recorded(ADAM)
    assert {key.op for key in first} >= {"advance", "adam_update", "momentum_compress", "server_reduce", "finish"}
    assert recorded(ADAM) == first
    for options, changed in (
        ({"ternary": True}, {"momentum_compress", "server_reduce", "apply_momentum"}),
        ({"frozen_dtype": torch.bfloat16}, {"momentum_compress"}),
        ({"block_size": 512}, {"momentum_compress", "adam_update", "flatten"}),
    ):
        assert {key.op for key in recorded(replace(ADAM, options=options)) - first} >= changed
    unaligned = recorded(replace(ADAM, special=("unaligned",)))
    assert {each["GRADS"] for each in arguments_of(unaligned, "momentum_compress")} == {("constexpr", 0)}
    assert {each["GRADS"] for each in arguments_of(first, "momentum_compress")} == {("constexpr", 4)}


def test_a_recorded_step_computes_what_it_would_have():
    def trained(keeping: bool) -> tuple[torch.Tensor, set[Key]]:
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(300))
        optimizer = SGD.kind([p], 1e-2)
        keys: set[Key] = set()
        for step in range(4):
            p.grad = torch.randn(300, generator=torch.Generator().manual_seed(step))
            if keeping:
                with recording() as found:
                    optimizer.step()
                keys |= found
            else:
                optimizer.step()
        return p.detach(), keys

    (found, keys), (expected, nothing) = trained(True), trained(False)
    assert torch.equal(found, expected)
    assert keys
    assert not nothing


def test_a_tensor_in_a_storage_as_no_gpu_has_it_is_refused():
    memory = bytearray(4096)
    at = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    p = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.float32, count=300, offset=(4 - at) % 16))
    with recording(), pytest.raises(RuntimeError, match="which no GPU's allocator returns"):
        OPS["add_values"].launch(_arguments_of_add_values(p), "triton")


def _arguments_of_add_values(p: torch.Tensor) -> tuple:
    live, row = torch.full((1, 16), 255, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
    return ([p], [300], 128, torch.zeros(384), False, live, row, torch.zeros(1, dtype=torch.int32), None)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_whole_steps_launch_all_ops_in_all_phases(all_keys):
    keys, phases = all_keys
    assert {key.op for key in keys} == IN_STEPS
    two_stages, rounds = {"warmup", "compression"}, {"uncompressed", "one-bit", "local"}
    expected = dict.fromkeys(BASES, rounds) | dict.fromkeys(("OneBitAdam", "OneBitLamb"), two_stages)
    expected["ZeroOneAdam with own variances"] = {"one-bit", "local"}
    expected |= {
        "AdamW": {"uncompressed"},
        "Lamb": {"uncompressed"},
        "OneBitLion": {"one-bit"},
        "OneBitMuon": {"one-bit"},
        "compress": {"compressed"},
    }
    assert phases == expected
    print(f"{len(keys)} launch keys of {len(IN_STEPS)} kernels")
    audited = {kernel.key for kernel in named().values()}
    assert {kernel.key for kernel in variants(keys)} == audited, "python -m benchmarks.audit --update records them anew"


# ---------------------------------------------------------------- compiled


def test_no_function_for_triton_returns_none_by_name():
    for module in vars(ops).values():
        for name, deferred in vars(module).items() if inspect.ismodule(module) else ():
            if isinstance(deferred, Deferred):
                (written,) = ast.parse(dedent(inspect.getsource(deferred.function))).body
                returned = [node.value for node in ast.walk(written) if isinstance(node, ast.Return)]
                constants = [value.value for value in returned if isinstance(value, ast.Constant)]
                assert None not in constants, f"{name}: the oldest Triton that is claimed does not compile it"


@pytest.mark.full  # `make test-tritons` does so with the oldest Triton, too
@pytest.mark.timeout(1800)
def test_every_key_compiles_for_sm_90_every_kernel_elsewhere(all_keys, written):
    assert compiled(written, "sm_90", len(all_keys[0])) in ([], SPILLING["sm_90"])
    for target in ("sm_75", "sm_80", "sm_100", "gfx942"):
        spilling = compiled(written, target, None, "--once-per-kernel")
        assert set(spilling) <= set(SPILLING.get(target, []))


@pytest.fixture
def one_key(tmp_path) -> Path:
    keys = set()
    stand_in = Noting(OPS["unpack"], keys)
    stand_in[(1,)](torch.zeros(16, dtype=torch.uint8), torch.zeros(1), 5, 128, num_warps=4, enable_fp_fusion=False)
    write(keys, tmp_path / "keys.json")
    return tmp_path / "keys.json"


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_key_that_does_not_compile_is_named_and_fails(one_key, target):
    assert compiling(one_key, "--target", target)[0] == 0
    one_key.write_text(one_key.read_text().replace("128", "100"))  # no power of 2
    status, printed = compiling(one_key, "--target", target)
    assert status == 1
    assert "unpack, 4 warps: bits: *u8 of 16, x: *fp32 of 16, n: i32, BLOCK_SIZE=100" in printed


UNLINKED = """
import sys
from benchmarks import launch_keys
from triton import knobs
from triton.backends.amd import compiler
def missing(*arguments):
    raise RuntimeError("ld.lld not found")
compiler.amd.link_hsaco = missing
knobs.cache.dir = sys.argv.pop(1)
sys.exit(launch_keys.main())
"""


@pytest.mark.long
def test_gfx942_that_cannot_be_linked_becomes_assembly(one_key, tmp_path):
    program = ("-c", UNLINKED, str(tmp_path / "cache"))
    status, printed = compiling(one_key, "--target", "gfx942", program=program)
    assert status == 0, printed
    assert "gfx942 can't be linked here, and is compiled to assembly: RuntimeError: ld.lld not found" in printed
    assert "1 keys for gfx942: 0 wrong" in printed
    one_key.write_text(one_key.read_text().replace("128", "100"))
    status, printed = compiling(one_key, "--target", "gfx942", program=program)
    assert status == 1
    assert json.loads(one_key.read_text())[0][0] in printed
