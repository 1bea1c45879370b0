"""The peers: torch's optimizers, ours on every backend there is, and DeepSpeed's own."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedonebit import Lamb, Layerwise, MarsitAdam, MarsitSGD, OneBitAdam, OneBitLamb, Rounds
from fusedonebit.comm import Messages
from fusedonebit.triton_kernels import using

from . import deepspeed_peer
from .loopback import Loopback
from .registry import Record, Report, Table, times
from .timing import Call, time_by_turns

LR = 1e-6  # so that parameters which several peers share stay what they are
OURS: dict[str, Callable[..., Any]] = {
    "OneBitAdam": partial(OneBitAdam, lr=LR, freeze_step=1),
    # beta3 = 0: one step of warm-up is no average of anything.
    "OneBitLamb": partial(OneBitLamb, lr=LR, freeze_step=1, layerwise=Layerwise(beta3=0.0)),
    "MarsitSGD": partial(MarsitSGD, lr=LR, rounds=Rounds(full_precision_every=0)),
    "MarsitAdam": partial(MarsitAdam, lr=LR, rounds=Rounds(full_precision_every=0)),
}
"""Ours, compressing from the second step on."""
ONEBIT = ("OneBitAdam", "OneBitLamb")
FUSED, FOREACH = "AdamW(fused=True)", "AdamW(foreach=True)"
THEIRS = {f"DeepSpeed {kind}": kind for kind in deepspeed_peer.KINDS}


def parameters(numel: int, tensors: int) -> list[Tensor]:
    """``tensors`` parameters of ``numel`` elements together, with gradients."""
    return of_shapes([(max(1, numel // tensors),)] * tensors)


def of_shapes(
    shapes: Sequence[tuple[int, ...]], device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Parameters of these shapes, with gradients of one size: of others the guard refuses what one step has frozen."""
    params: list[Tensor] = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p).sign()
    return params


def backends(device: torch.device) -> list[str]:
    """What our ops can run on there, besides Triton's interpreter."""
    found = []
    for name in ("triton",) if device.type == "cuda" else ("native", "plain"):
        try:
            with using(name):  # type: ignore[arg-type]
                found.append(name)
        except RuntimeError:  # this machine has no compiler
            continue
    return found


class Step:
    """One of our optimizers in its compression stage, on one backend; a call is a step.

    Args:
        name: One of ``OURS``.
        params: With gradients.
        backend: For ``using``; None is the device's own.
        steps: To take now: the first is the warm-up, the second allocates what the compression stage needs.
        options: Of the optimizer.
    """

    def __init__(
        self, name: str, params: Sequence[Tensor], backend: str | None = None, steps: int = 2, **options: Any
    ) -> None:
        self.backend = backend or backends(params[0].device)[0]
        with self._using():
            self.optimizer = OURS[name](params, **options)
            for _ in range(steps):
                self.optimizer.step()

    def _using(self) -> Any:
        return using(self.backend)  # type: ignore[arg-type]

    def __call__(self) -> None:
        with self._using():
            self.optimizer.step()

    def compiled(self) -> Call:
        """The same step of the same optimizer under ``torch.compile``; its first call compiles."""
        step = torch.compile(self.optimizer.step, fullgraph=True)

        def call() -> None:
            with self._using():
                step()

        return call

    def check(self) -> None:
        """That what was measured are compressed steps, none skipped."""
        with self._using():
            stats = self.optimizer.stats()
        assert stats["skipped_steps"] == 0
        assert stats["phase"] in ("compression", "one-bit"), stats["phase"]


def check(call: Call) -> None:
    """See ``Step.check``; the others have nothing to check."""
    if isinstance(call, Step):
        call.check()


def adamw(params: Sequence[Tensor], name: str = FUSED) -> Call:
    """torch's own, by one of the two names."""
    return torch.optim.AdamW(params, lr=LR, fused=name == FUSED, foreach=name == FOREACH).step


def lamb(params: Sequence[Tensor]) -> Call:
    """Ours, uncompressed."""
    return Lamb(params, lr=LR).step


def deepspeed(kind: str, alone: int | None = None) -> Callable[[Sequence[Tensor]], Call]:
    """A maker of DeepSpeed's own step."""
    return lambda params: deepspeed_peer.make(kind, params, alone).step


Maker = Callable[[Sequence[Tensor]], Call]


def makers(device: torch.device, world_size: int, names: Sequence[str] = tuple(OURS)) -> dict[str, Maker]:
    """A maker of each peer but fused AdamW, which all are compared with; messages are copied on the device."""
    made: dict[str, Maker] = {FOREACH: partial(adamw, name=FOREACH)}
    for name in names:
        for backend in backends(device):
            # A transport for each: it counts.
            made[f"{name}, {backend}"] = lambda params, n=name, b=backend: Step(
                n, params, b, process_group=Loopback(world_size)
            )
    if deepspeed_peer.available():
        made |= {label: deepspeed(kind, world_size) for label, kind in THEIRS.items()}
    return made


AGAINST_ADAMW: dict[str, str] = {"optimizer": "<32", "ms": ">9.2f", "10-90 %": ">19", "x AdamW(fused)": ">14.2f"}


def against_adamw(
    params: Sequence[Tensor], peers: Mapping[str, Maker], rounds: int, each: Callable[[Record], object]
) -> None:
    """Times one peer after the other, each by turns with fused AdamW on the same parameters, and tells of its row.

    So no more than two have state at a time: all of them at once would not fit on a GPU.
    """
    base = adamw(params)
    base()
    for name, make in peers.items():
        gc.collect()  # the last peer's state
        try:
            call = make(params)
            timed = time_by_turns({"base": base, "peer": call}, params[0].device, rounds, 2)
        except torch.cuda.OutOfMemoryError:
            each({"optimizer": name, "10-90 %": "out of memory"})
            continue
        check(call)
        ratio = timed["peer"].median / timed["base"].median
        each({"optimizer": name, **times(timed["peer"]), "x AdamW(fused)": ratio, "adamw_ms": timed["base"].median})
        del call


def all_by_turns(table: Table, peers: Mapping[str, Call], rounds: int) -> None:
    """Times all by turns, each on parameters of its own, and adds their rows; ratios are to the first."""
    timed = time_by_turns(peers, rounds=rounds, warmup=2)
    for call in peers.values():
        check(call)
    base = next(iter(timed.values())).median
    for name, timing in timed.items():
        table.add(**{"optimizer": name, **times(timing), "x AdamW(fused)": timing.median / base})


def extra_bytes(step: Step, allocated_before: int) -> int:
    """What a step on CUDA holds at its peak beyond the optimizer's state and the messages on the wire.

    Args:
        step: Whose optimizer is the only thing on the device that was made since
        allocated_before: bytes were allocated there.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - allocated_before
    return peak - step.optimizer.stats()["state_bytes"] - wire_bytes(step.optimizer)


def wire_bytes(optimizer: Any) -> int:
    """Messages that a rank sends in a step, as they lie in memory; what it receives is state."""
    layout = optimizer.frame.layout
    message = Messages.size(layout.scale_slots("block")[1], layout)
    return (layout.world_size + 1) * message


def numel_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of all."""
    return sum(math.prod(shape) for shape in shapes)


def note_deepspeed(report: Report) -> None:
    """Says how to get DeepSpeed where it is missing."""
    if not deepspeed_peer.available():
        report.note(deepspeed_peer.MISSING)
