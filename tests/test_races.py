"""No warp loads a word that another one stores, unless a barrier parts them: seen in Triton's IR, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.races import races

ROOT = Path(__file__).parent.parent
COMPILING = """
from benchmarks.audit import TARGETS, compile_variant, named
from benchmarks.races import races
for kernel in named().values():
    if "count_updates" in kernel.given or kernel.op in ("renew_levels", "follow_level"):
        print(f"{kernel.op}: {races(compile_variant(kernel, TARGETS['sm_90']).asm['ttgir'])}")
"""
IR = """
#blocked = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>
module attributes {"ttg.num-warps" = 4 : i32} {
  tt.func public @kernel(%steps: !tt.ptr<f64>, %coef: !tt.ptr<f64>) {
    %one = arith.constant dense<1.000000e+00> : tensor<LANESxf64, #blocked>
    %i = tt.make_range {end = LANES : i32, start = 0 : i32} : tensor<LANESxi32, #blocked>
    %s = tt.splat %steps : !tt.ptr<f64> -> tensor<LANESx!tt.ptr<f64>, #blocked>
    %p = tt.addptr %s, %i : tensor<LANESx!tt.ptr<f64>, #blocked>, tensor<LANESxi32, #blocked>
    %c = tt.splat %coef : !tt.ptr<f64> -> tensor<LANESx!tt.ptr<f64>, #blocked>
    %q = tt.addptr %c, %i : tensor<LANESx!tt.ptr<f64>, #blocked>, tensor<LANESxi32, #blocked>
    %x = tt.load %p : tensor<LANESx!tt.ptr<f64>, #blocked>
    BARRIER
    %y = arith.addf %x, %one : tensor<LANESxf64, #blocked>
    tt.store %p, %y : tensor<LANESx!tt.ptr<f64>, #blocked>
    OTHER
    tt.return
  }
}
"""
USED = "%sum = ttg.convert_layout %y : tensor<LANESxf64, #blocked> -> tensor<LANESxf64, #other>"
"""Hands to others what every warp has computed of what it has loaded."""
SUMMED = """%sum = "tt.reduce"(%y) <{axis = 0 : i32}> ({
    ^bb0(%a: f64, %b: f64):
      %ab = arith.addf %a, %b : f64
      tt.reduce.return %ab : f64
    }) : (tensor<LANESxf64, #blocked>) -> f64
    tt.store %coef, %sum : !tt.ptr<f64>"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_kernels_that_count_have_no_race_between_warps():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILING]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    found = set(result.stdout.splitlines())
    counting = ("advance", "apply_momentum", "follow_level", "renew_levels")
    assert found == {f"{op}: []" for op in counting}, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("lanes", "barrier", "other", "harm"),
    [
        (64, "", USED, 1),
        (64, "ttg.barrier all", USED, 0),
        (64, "gpu.barrier", USED, 0),
        (64, "", "", 0),  # only the first warp's goes anywhere
        (8, "", SUMMED, 0),  # by each warp for itself
        (64, "", SUMMED, 1),
        (128, "", USED, 0),  # each word is of one thread
    ],
)
def test_a_race_is_a_word_that_warps_share_without_a_barrier(lanes, barrier, other, harm):
    text = IR.replace("BARRIER", barrier).replace("OTHER", other).replace("LANES", str(lanes))
    assert len(races(text)) == harm
