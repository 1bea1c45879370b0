"""Tests that need a CUDA device, and nothing but torch, triton and pytest.

Without one they are left out, and said to be. To see that their code runs at all, FUSEDONEBIT_DRY_RUN=1 takes them to
CPU tensors, the kernels interpreted, at the smallest sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_runs import LARGE_SHAPES, SHAPES

from fusedonebit.comm import TorchTransport, Transport

HERE = Path(__file__).parent
CUDA = torch.cuda.is_available()
DRY_RUN = not CUDA and os.environ.get("FUSEDONEBIT_DRY_RUN") == "1"
REASON = (
    "NO CUDA DEVICE: nothing of this was tested on a GPU; run `make gpu-check` on a machine that has one "
    "(FUSEDONEBIT_DRY_RUN=1 runs the code on the CPU, which proves nothing about a GPU)"
)


collect_ignore_glob = [] if CUDA or DRY_RUN else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda_only: has no meaning on a CPU, not even in a dry run")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not CUDA:
        terminalreporter.write_line(f"tests/gpu: {REASON}", yellow=True, bold=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not CUDA and item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if CUDA else "cpu")


@pytest.fixture
def small_only() -> bool:
    """Whether sizes above a few thousand elements would take minutes, in the interpreter."""
    return DRY_RUN


@pytest.fixture
def shapes(small_only: bool) -> tuple[tuple[int, ...], ...]:
    return SHAPES if small_only else LARGE_SHAPES


@pytest.fixture
def nccl(device: torch.device, tmp_path) -> Iterator[Callable[[], Transport]]:
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield lambda: TorchTransport(None, torch.device("cuda", 0))
    finally:
        dist.destroy_process_group()
