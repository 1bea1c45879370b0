"""What a step asks of the host: 302 tensors so small that kernels take next to no time, against fused AdamW."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fusedonebit.comm import LocalTransport
from fusedonebit.triton_kernels import backends

from .optimizers import AGAINST_ADAMW, FUSED, ONEBIT, Step, adamw, parameters
from .ranks import on_ranks
from .registry import Record, Report, case, times
from .step import COMPILED, add_compiled
from .timing import Call, one_thread, time_by_turns

TENSORS, NUMEL = 302, 302 * 64
LIMIT, LIMIT_OF_COMPILED = 0.5, 1.3
"""Times AdamW(fused=True), and times an eager step."""


@case("host", "cpu")
def host(report: Report) -> None:
    """Host time of a step of 302 tiny tensors against AdamW's, and compiled against eager, world size 1, one thread."""
    numel, rounds = report.numel or NUMEL, report.rounds or 201
    with one_thread():
        peers: dict[str, Call] = {FUSED: adamw(parameters(numel, TENSORS))}
        peers |= {name: Step(name, parameters(numel, TENSORS)) for name in ONEBIT}
        first = peers[ONEBIT[0]]
        assert isinstance(first, Step)
        _add(report, f"kernels and all, {first.backend}", _timed(peers, rounds))
        # Triton must be imported without its interpreter, and have a driver of its own.
        with mock.patch.dict(os.environ):
            os.environ.pop("TRITON_INTERPRET", None)
            timed = on_ranks(_launched, numel, rounds, world_size=1)
        _add(report, "Triton's launcher, whose call of the driver does nothing; nor does AdamW's own kernel", timed)
        title = f"torch.compile(optimizer.step), {numel:,} parameters in {TENSORS} tensors"
        table = report.table(title, COMPILED | {"limit": "<14"})
        for name in ONEBIT:
            judged = partial(report.limit, at_most=LIMIT_OF_COMPILED)
            add_compiled(table, name, Step(name, parameters(numel, TENSORS)), rounds, judged)


def _timed(peers: Mapping[str, Call], rounds: int) -> dict[str, Record]:
    return {name: times(timing) for name, timing in time_by_turns(peers, rounds=rounds, warmup=10).items()}


def _add(report: Report, title: str, timed: Mapping[str, Record]) -> None:
    table = report.table(f"{title}; {TENSORS} tensors", AGAINST_ADAMW | {"ms": ">9.3f", "limit": "<14"})
    base = timed[FUSED]["ms"]
    for name, row in timed.items():
        ratio = row["ms"] / base
        limit = None if name == FUSED else report.limit(ratio, LIMIT)
        table.add(optimizer=name, **row, **{"x AdamW(fused)": ratio}, limit=limit)


def _launched(numel: int, rounds: int) -> dict[str, Record]:
    """Time steps whose kernels Triton's launcher is given; the tensors lie on the CPU."""
    alone: dict[str, Any] = {"process_group": LocalTransport()}
    # What a step finds is there: the steps before it have run.
    ours = {name: Step(name, parameters(numel, TENSORS), **alone) for name in ONEBIT}
    fused = adamw(parameters(numel, TENSORS))
    fused()
    with _no_driver(), mock.patch.object(torch, "_fused_adamw_", _nothing):
        for step in ours.values():
            step.backend = "triton"
        timed = _timed({FUSED: fused} | ours, rounds)
        for step in ours.values():
            step.check()
    return timed


def _nothing(*arguments: Any, **options: Any) -> None:
    pass


@contextmanager
def _no_driver() -> Iterator[None]:
    """Let Triton compile for an sm_90, specialise and look up kernels as ever, and start none."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver

    loaded = (object(), 0, 0, 0, 1024)  # the module, the function, its registers, spills and most threads
    utils = SimpleNamespace(
        launch=_nothing,  # the function that parses what a kernel is given, and calls the driver
        load_binary=lambda *arguments: loaded,
        get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
    )
    triton.runtime.driver.set_active(
        SimpleNamespace(
            utils=utils,
            launcher_cls=driver.CudaLauncher,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    # The latter are what that function is told of a kernel's arguments, in types that are made with the driver.
    made_with_it = mock.patch.multiple(driver, annotate_arguments=_nothing, make_kernel_signature=_nothing)
    # Or Triton would be refused on CPU tensors.
    with mock.patch.object(backends, "interpreting", return_value=True), made_with_it:
        yield
