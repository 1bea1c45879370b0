"""Times calls of the version of this repository whose folder is the current one, for ``benchmarks.versions``.

It is read by ``python -c`` there, so that all it imports is that version's. Each line that it is given names a call,
and it answers with the milliseconds of CPU time that one took.
"""

import gc
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch

import fusedonebit
from benchmarks.loopback import Loopback
from benchmarks.optimizers import LR, OURS, Step, lamb, parameters
from benchmarks.timing import Call
from benchmarks.workload import Workload
from fusedonebit.triton_kernels import using

TENSORS, WARMUP = 64, 3
OURS["OneBitLion"] = partial(fusedonebit.OneBitLion, lr=LR)


def made(name: str, numel: int) -> Call:
    """The step of an optimizer, "step OneBitAdam, warm-up"; or an op, "kernel apply_momentum, preconditioned"."""
    kind, _, what = name.partition(" ")
    what, _, how = what.partition(", ")
    if kind == "kernel":
        workload = Workload(
            [numel // TENSORS] * TENSORS,
            torch.device("cpu"),
            2 if what == "server_reduce" else 1,
            preconditioned=how == "preconditioned",
        )
        return workload.call(what)
    params = parameters(numel, TENSORS)
    if what == "Lamb":
        return lamb(params)
    more = {"freeze_step": 1 << 30} if how == "warm-up" else {}
    return Step(what, params, "native", process_group=Loopback(2), **more)


def serve(numel: int) -> None:
    """Answers until its input ends."""
    assert Path(fusedonebit.__file__).is_relative_to(Path.cwd()), f"{fusedonebit.__file__} is another version"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    current, call = "", None
    with using("native"):
        for line in sys.stdin:
            if line != current:
                current, call = line, None
                gc.collect()  # what the last one held
                call = made(line.strip(), numel)
                for _ in range(WARMUP):
                    call()
            began = time.process_time()
            call()
            print(1e3 * (time.process_time() - began), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve(int(sys.argv[1]))
