"""Bytes per parameter and step: what an optimizer moves in device memory, and what it sends.

In device memory: of torch and DeepSpeed every operation of their own ``step()`` is counted (``device_bytes``), with
cupy's packing as the one kernel that it is; ours are launches of compiled kernels, whose bytes the audit has counted
(``limits.json``, sm_90). What the transport itself moves there is left out of all: messages as they leave and
arrive, and the additions of a ring all-reduce. DDP's copies into its buckets and back are counted, and told apart.
Also left out, of ours: operations on tensors of a few numbers.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusedonebit import Numerics, OneBitLion, ZeroOneAdam
from fusedonebit.optim.policies import DoublingVariance, Progress
from fusedonebit.triton_kernels import using

from . import deepspeed_peer
from .audit_steps import ROUNDS, STEPS, round_bytes, step_bytes
from .bytes_plot import draw
from .device_bytes import DeviceBytes
from .kernels import audited
from .loopback import Loopback
from .optimizers import FOREACH, FUSED, LR, OURS, adamw, backends, note_deepspeed, parameters
from .registry import Report, case

WORLD_SIZE, NUMEL, TENSORS, ROUND = 8, 1 << 22, 32, deepspeed_peer.ROUND
FP32_SENT = 2 * 4 * (WORLD_SIZE - 1) / WORLD_SIZE
"""Of a ring all-reduce, per parameter."""
COLUMNS = {"algorithm": "<12", "optimizer": "<24", "device B": ">8.1f", "DDP's copies B": ">14.1f", "sent B": ">8.3f"}
COLUMNS |= {"x fewer sent": ">12.1f"}
ADAMW = "AdamW"


class LongestRounds:
    """Rounds of ``ROUND`` steps, from the first on."""

    def steps(self, done: Progress) -> int:
        """See ``SyncPolicy``."""
        return ROUND


MAKERS: dict[str, Callable[..., Any]] = OURS | {
    "ZeroOneAdam": partial(
        ZeroOneAdam,
        lr=LR,
        variance_policy=DoublingVariance(until=1),
        sync_policy=LongestRounds(),
        numerics=Numerics(variance_floor=0.0),
    ),
    "OneBitLion": partial(OneBitLion, lr=LR),
}
PEERS = {
    "1-bit Adam": ("OnebitAdam", "OneBitAdam", "1-bit Adam, preconditioned"),
    "1-bit LAMB": ("OnebitLamb", "OneBitLamb", "1-bit LAMB, preconditioned"),
    "0/1 Adam": (deepspeed_peer.ZERO_ONE, "ZeroOneAdam", f"ZeroOneAdam, mean over a round of {ROUND}"),
    "1-bit Lion": (None, "OneBitLion", "OneBitLion"),
    "Marsit": (None, "MarsitAdam", "MarsitAdam"),
}
"""Of each algorithm DeepSpeed's class, ours, and its step in the audit."""


# ---------------------------------------------------------------- counts, per parameter and step


def adamw_bytes(params: Sequence[Tensor], name: str) -> float:
    """What torch's step moves."""
    step = adamw(params, name)
    step()
    with DeviceBytes() as count:
        step()
    return count.moved / _numel(params)


def ddp_bytes(width: int = 512) -> float:
    """What DDP moves besides its all-reduce: a backward pass with it, less one without."""
    model = nn.Linear(width, width, bias=False)
    x = torch.randn(4, width)

    def backward(of: nn.Module) -> int:
        for _ in range(2):  # DDP settles its buckets in the first
            model.weight.grad = None
            loss = of(x).sum()
            with DeviceBytes() as count:
                loss.backward()
        return count.moved

    with deepspeed_peer.group_of_one(torch.device("cpu")):
        return (backward(DistributedDataParallel(model)) - backward(model)) / model.weight.numel()


def deepspeed_bytes(kind: str, params: Sequence[Tensor]) -> tuple[float, float]:
    """What DeepSpeed's step moves in memory, and what it sends."""
    count, steps, sent = DeviceBytes(), ROUND if kind == deepspeed_peer.ZERO_ONE else 1, [0]
    theirs = deepspeed_peer._alone()

    def all_to_all_single(received: Tensor, message: Tensor, group: Any) -> None:
        sent[0] += message.nbytes * (WORLD_SIZE - 1) // WORLD_SIZE
        with count.paused():
            theirs.all_to_all_single(received, message, group)

    def all_gather(received: Sequence[Tensor], message: Tensor, group: Any) -> None:
        sent[0] += message.nbytes * (WORLD_SIZE - 1)
        with count.paused():
            theirs.all_gather(received, message, group)

    theirs_counted = type(theirs)(all_to_all_single=all_to_all_single, all_gather=all_gather)
    with mock.patch.object(deepspeed_peer, "_alone", return_value=theirs_counted):
        optimizer = deepspeed_peer.make(kind, params, WORLD_SIZE)
    sent[0] = 0
    with _packing_as_kernels(count), count:
        for _ in range(steps):
            optimizer.step()
    return count.moved / steps / _numel(params), sent[0] / steps / _numel(params)


@contextlib.contextmanager
def _packing_as_kernels(count: DeviceBytes) -> Iterator[None]:
    """cupy's two kernels read their argument and write their result; what stands in for them is not counted."""
    cupy = importlib.import_module("deepspeed.runtime.comm.nccl").cupy

    def counted(kernel: Callable[[Any], Any], array: Any) -> Any:
        with count.paused():
            result = kernel(array)
        count.add(array.nbytes, result.nbytes)
        return result

    kernels: dict[str, Any] = {name: partial(counted, getattr(cupy, name)) for name in ("packbits", "unpackbits")}
    with mock.patch.multiple(cupy, **kernels):
        yield


def our_bytes(step: str) -> float | None:
    """What the kernels of our step move, by its name in the audit; None where that has none."""
    try:
        if step in ROUNDS:
            return round_bytes(audited(), step, WORLD_SIZE)
        return step_bytes(audited(), STEPS[step], WORLD_SIZE)
    except KeyError:
        return None


def our_sent(name: str, params: Sequence[Tensor]) -> float:
    """What our step sends."""
    steps = ROUND if name == "ZeroOneAdam" else 1
    with using(backends(params[0].device)[0]):  # type: ignore[arg-type]
        optimizer = MAKERS[name](params, process_group=Loopback(WORLD_SIZE))
        for _ in range(2 if steps == 1 else 1):  # of some the first is uncompressed
            optimizer.step()
        sent = 0
        for _ in range(steps):
            optimizer.step()
            sent += optimizer.stats()["bytes_step"]
        assert optimizer.stats()["skipped_steps"] == 0
    return sent / steps / _numel(params)


def _numel(params: Sequence[Tensor]) -> int:
    return sum(p.numel() for p in params)


# ---------------------------------------------------------------- the case


@case("bytes-moved", "cpu", draw)
def bytes_moved(report: Report) -> None:
    """Bytes per parameter and step in device memory and sent, one rank of 8: AdamW with DDP, DeepSpeed's, ours."""
    params = parameters(report.numel or NUMEL, TENSORS)
    title = f"bytes per fp32 parameter and step, one rank of {WORLD_SIZE}"
    table = report.table(title, COLUMNS)

    def add(algorithm: str, optimizer: str, device: float, sent: float, copies: float | None = None) -> None:
        row = {"algorithm": algorithm, "optimizer": optimizer, "device B": device, "DDP's copies B": copies}
        table.add(**row, **{"sent B": sent, "x fewer sent": FP32_SENT / sent})

    copies = ddp_bytes()
    for name in (FUSED, FOREACH):
        add(ADAMW, name, adamw_bytes(params, name), FP32_SENT, copies)
    for algorithm, (theirs, ours, step) in PEERS.items():
        if theirs is not None and deepspeed_peer.available():
            add(algorithm, f"DeepSpeed {theirs}", *deepspeed_bytes(theirs, params))
        device = our_bytes(step)
        if device is None:
            report.note(f"{ours} is left out: the audit has no {step!r}")
        else:
            add(algorithm, ours, device, our_sent(ours, params))
    report.note(f"0/1 Adam: the mean over a round of {ROUND} steps, of which the last sends; no renewal among them")
    report.note("what the transport itself moves in device memory is left out of all")
    note_deepspeed(report)
