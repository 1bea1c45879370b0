"""DeepSpeed 0.19.6's own 1-bit optimizers as peers, where ``make peers`` has put it (or pip has).

Their ``step()`` and ``NcclBackend.compressed_allreduce`` run as they are, on gloo or NCCL. What is put in
place of what they import:

- cupy, where there is none: ``packbits``, ``unpackbits`` and ``split`` of the same bits, on torch tensors.
  cupy's waits for its stream are left out, which flatters DeepSpeed.
- The engine: they ask it for ``mpu`` (None), ``local_rank``, and set ``enable_backward_allreduce``.
- The shared-memory all-reduce, a C++ extension that its CPU backend compiles: no 1-bit optimizer calls it.
- For one rank of many alone: the collectives of ``compressed_allreduce``, copied as ``Loopback`` does. On gloo,
  which takes no scalar where NCCL does, scales are sent as vectors of one.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import os
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

FOLDER = Path(__file__).with_name("peers")
VERSION = "0.19.6"
KINDS = {"OnebitAdam": "adam", "OnebitLamb": "lamb"}
"""Those that send in every step, and their modules."""
ZERO_ONE, ROUND = "ZeroOneAdam", 16
"""Sends once in a round of so many steps; its own longest."""
MODULES = KINDS | {ZERO_ONE: "zoadam"}
MISSING = f"DeepSpeed's own step is left out: no DeepSpeed here; `make peers` gets version {VERSION}"
BITS = range(8)
PACK = sum(1 << (63 - 9 * i) for i in BITS) - (1 << 64)
"""Times eight bytes of 0 or 1 in an int64, this has them in its top byte, the first one highest."""


def available() -> bool:
    """Whether DeepSpeed can be imported."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # last: it must not hide packages that are installed
    return importlib.util.find_spec("deepspeed") is not None


def make(kind: str, params: Sequence[Tensor], alone: int | None = None) -> torch.optim.Optimizer:
    """One of ``MODULES`` in its compression stage; ``ZERO_ONE`` where a round of ``ROUND`` steps begins.

    Args:
        kind: The class.
        params: With gradients.
        alone: This process is rank 0 of so many, and messages are copied on the device; None: the default group's.
    """
    params = list(params)
    zero_one = kind == ZERO_ONE
    options = {"freeze_step": 2}
    if zero_one:
        options = {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": ROUND}
    with group_of_one(params[0].device):
        optimizer = construct(kind, params, alone, lr=1e-6, **options)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it prints as it goes, and calls what torch has deprecated
            # The first is a rehearsal, the second warms up, the third allocates the errors; rounds grow step by step.
            for _ in range(ROUND if zero_one else 3):
                optimizer.step()
    assert getattr(optimizer, "freeze_key" if zero_one else f"{KINDS[kind]}_freeze_key")
    return optimizer


def construct(kind: str, params: Sequence[Tensor], alone: int | None = None, **options: Any) -> Any:
    """One of ``MODULES`` with the process group that there is, before its first step; see ``make``."""
    _import(params[0].device)
    module = importlib.import_module(f"deepspeed.runtime.fp16.onebit.{MODULES[kind]}")
    engine = types.SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
    optimizer = getattr(module, kind)(params, engine, **options)
    handle = optimizer.comm_backend_handle
    if alone is not None:
        _set_collectives(handle, _alone())
        handle.size = optimizer.size = alone
        optimizer.divider = 8 * alone // math.gcd(alone, 8)
    elif dist.get_backend() == "gloo":
        _set_collectives(handle, _on_gloo())
    return optimizer


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """A default process group, where there is none: DeepSpeed and DDP ask for one even where nothing travels."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _import(device: torch.device) -> None:
    """Imports what is needed, and hands it the process group."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    if not available():
        raise ImportError(MISSING)
    comm = importlib.import_module("deepspeed.comm")
    stands_in = "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None
    if stands_in:
        sys.modules["cupy"] = _cupy(device)
    importlib.import_module("deepspeed.runtime.comm.nccl")
    if stands_in:
        del sys.modules["cupy"]  # others who ask for it shall not find this one
    backend = importlib.import_module("deepspeed.comm.torch")
    with mock.patch.object(backend, "build_shm_op", return_value=None), contextlib.redirect_stdout(io.StringIO()):
        comm.init_distributed(dist.get_backend(), verbose=False)


class _Array:
    """What ``compressed_allreduce`` needs of a cupy array, on a torch tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.size, self.dtype, self.nbytes = tensor.numel(), tensor.dtype, tensor.nbytes

    def flatten(self) -> _Array:
        return _Array(self.tensor.flatten())

    def reshape(self, *shape: int) -> _Array:
        return _Array(self.tensor.reshape(*shape))

    def __getitem__(self, index: int) -> _Array:
        return _Array(self.tensor[index])

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def _cupy(device: torch.device) -> types.ModuleType:
    """A module with what DeepSpeed calls of cupy; bits as cupy and numpy pack them, most significant first."""
    spread = [sum((byte >> (7 - i) & 1) << 8 * i for i in BITS) for byte in range(256)]
    table = torch.tensor(spread, dtype=torch.int64, device=device)

    def packbits(array: _Array) -> _Array:
        return _Array((array.tensor.view(torch.int64) * PACK >> 56).to(torch.uint8))

    def unpackbits(array: _Array) -> _Array:
        return _Array(table.index_select(0, array.tensor.int()).view(torch.uint8))

    def split(array: _Array, parts: int) -> list[_Array]:
        return [_Array(part) for part in array.tensor.chunk(parts)]

    module = types.ModuleType("cupy")
    stream = types.SimpleNamespace(synchronize=lambda: None)
    vars(module).update(
        packbits=packbits,
        unpackbits=unpackbits,
        split=split,
        zeros=lambda shape, dtype: _Array(torch.zeros(shape, dtype=dtype, device=device)),
        from_dlpack=lambda capsule: _Array(torch.utils.dlpack.from_dlpack(capsule)),
        cuda=types.SimpleNamespace(
            Device=lambda index: types.SimpleNamespace(use=lambda: None), get_current_stream=lambda: stream
        ),
    )
    return module


def _alone() -> types.SimpleNamespace:
    """The collectives of a rank whose messages all come from itself."""

    def all_to_all_single(received: Tensor, sent: Tensor, group: Any) -> None:
        received.copy_(sent)

    def all_gather(received: Sequence[Tensor], sent: Tensor, group: Any) -> None:
        for row in received:
            row.copy_(sent)

    return types.SimpleNamespace(all_to_all_single=all_to_all_single, all_gather=all_gather)


def _on_gloo() -> types.SimpleNamespace:
    """DeepSpeed's own; gloo takes no scalar where elements of one are received, as NCCL does."""
    comm = importlib.import_module("deepspeed.comm")

    def all_gather(received: list[Tensor], sent: Tensor, group: Any) -> None:
        comm.all_gather(received, sent.view_as(received[0]), group=group)

    return types.SimpleNamespace(all_to_all_single=comm.all_to_all_single, all_gather=all_gather)


def _set_collectives(handle: Any, collectives: types.SimpleNamespace) -> None:
    """Gives one ``NcclBackend`` other collectives; others in the process keep theirs."""
    module = importlib.import_module("deepspeed.runtime.comm.nccl")
    theirs = handle.compressed_allreduce

    def compressed_allreduce(*arguments: Any) -> Tensor:
        with mock.patch.object(module, "dist", collectives):
            return theirs(*arguments)

    handle.compressed_allreduce = compressed_allreduce
