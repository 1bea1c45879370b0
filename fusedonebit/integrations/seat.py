"""DDP's one communication hook, which it keeps for good: whoever averages gradients takes it, and gives it back."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..comm import TorchTransport, Transport, make_transport
from ..comm.transport import in_flight
from ..core.arrivals import take_away

JOIN = (
    "join() can't be used with a model to which fusedonebit is attached: ranks whose data has ended would have to "
    "compress as well; give all ranks equally many batches, or call detach() of what fusedonebit.ddp.attach() or "
    "compress() has returned. Torch leaves a join on when its block ends: `with model.join(enable=False): pass` ends it"
)


class Averager(Protocol):
    """Decides what becomes of DDP's buckets."""

    name: str
    """What it is called in errors."""
    averages_as_ddp: bool
    """Whether gradients are averages afterwards, whatever the step."""

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to do it; return the future of the bucket's buffer."""


class Seat:
    """The state of DDP's hook: who has it, if anybody.

    Args:
        model: Whose; None in a copy of the model, where DDP has no hook.

    Attributes:
        taken_by: Who decides what is done with buckets; None: nobody, and they are averaged as DDP does.
        hooks: Of the model, while somebody has it.
    """

    def __init__(self, model: DistributedDataParallel | None) -> None:
        self.taken_by: Averager | None = None
        self.model = None if model is None else weakref.ref(model)
        self.hooks: list[RemovableHandle] = []
        self._apart: Transport | None = None

    @property
    def averages_as_ddp(self) -> bool:
        """Return whether the hook does what DDP does without one."""
        return self.taken_by is None or self.taken_by.averages_as_ddp

    def __reduce__(self) -> tuple[type[Seat], tuple[None]]:
        """Return what makes that of a copy of the model: nobody is attached to it, and DDP has no hook there."""
        return Seat, (None,)

    @staticmethod
    def of(model: DistributedDataParallel) -> Seat | None:
        """Return a model's; None if it has none yet."""
        seats = (state for _, state in model._comm_hooks if isinstance(state, Seat))
        return next((seat for seat in seats if seat.model is not None and seat.model() is model), None)

    @staticmethod
    def at(model: DistributedDataParallel) -> Seat:
        """Return a model's, made if it has none yet."""
        seat = Seat.of(model)
        if seat is None:
            seat = Seat(model)
            model.register_comm_hook(seat, _average)
        return seat

    def apart(self, device: torch.device) -> Transport:
        """Return the model's ranks over a process group that DDP does not use; all make it, once for all who come."""
        if self._apart is None:
            model = None if self.model is None else self.model()
            assert model is not None  # whose hook this is
            ranks = make_transport(model.process_group, device)
            self._apart = ranks.apart() if isinstance(ranks, TorchTransport) else ranks
        return self._apart

    @staticmethod
    def take(model: DistributedDataParallel, averager: Averager) -> None:
        """Let somebody have a model's, until ``leave``; ``join()`` raises meanwhile."""
        seat = Seat.at(model)
        seat.hooks = [model.register_forward_pre_hook(_refuse_join)]
        vars(model)["join_hook"] = _NoJoin
        seat.taken_by = averager

    @staticmethod
    def leave(model: DistributedDataParallel | None) -> None:
        """Let DDP average again as it does without a hook."""
        if model is not None and (seat := Seat.of(model)) is not None:
            take_away(seat.hooks)
            seat.taken_by = None
            vars(model).pop("join_hook", None)

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Do what is wanted with a bucket, or what DDP does by itself."""
        if self.taken_by is not None:
            return self.taken_by.average(bucket)
        model, buffer = None if self.model is None else self.model(), bucket.buffer()
        assert model is not None  # whose hook this is
        group = model.process_group
        # As DDP: multiplied before the sum, in the gradients' own dtype.
        work = dist.all_reduce(in_flight(buffer.mul_(1.0 / group.size())), group=group, async_op=True)
        averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return averaged


def check_free(model: object) -> None:
    """Raise TypeError unless a model is in DDP, RuntimeError if its gradients are averaged in another way already."""
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model must be wrapped in DistributedDataParallel, got {type(model).__name__}; attach first, compile then"
        )
    seat = Seat.of(model)
    if seat is not None and seat.taken_by is not None:
        raise RuntimeError(
            f"{seat.taken_by.name} is attached to this model already: first call detach() of what attach() or "
            "compress() has returned; several optimizers are attached by one attach(model, [ours, theirs])"
        )
    if model.mixed_precision is not None:
        raise RuntimeError(
            f"mixed_precision must be None, got {model.mixed_precision}: DDP averages in a hook of its own then; use "
            "torch.autocast, or parameters of 16 bits"
        )
    # Built-in hooks are in no list.
    if seat is None and (named := model._get_ddp_logging_data().get("comm_hook")):
        raise RuntimeError(
            f"DDP must have no communication hook, got {named}: it keeps one for good, and fusedonebit needs it; "
            "wrap the model in DistributedDataParallel again without"
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in model.module.parameters()):
        raise RuntimeError(
            "parameters must have no optimizers that step in the backward pass, as torch's "
            "_apply_optimizer_in_backward makes them: leave that out"
        )
    if model._use_python_reducer:
        raise RuntimeError(
            "torch._dynamo.config.optimize_ddp must not be 'python_reducer': DDP's hook then gets no buckets; leave it "
            "out before DistributedDataParallel is made"
        )
    if model._join_config.enable:
        raise RuntimeError(JOIN)


def _average(seat, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text, as all here are
    return seat.average(bucket)


class _NoJoin(JoinHook):
    """Refuses ``join()`` on a rank that has no batch in it."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def main_hook(self) -> None:
        raise RuntimeError(JOIN)


def _refuse_join(model: DistributedDataParallel, _: Any) -> None:
    if not model._join_config.enable or Seat.of(model) is None:  # a copy's
        return
    # Ranks without a batch are waiting for this, and then hear of it from ``_NoJoin``.
    if (work := Join.notify_join_context(model)) is not None:
        work.wait()
    raise RuntimeError(JOIN)
