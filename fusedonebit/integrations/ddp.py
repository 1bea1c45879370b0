"""DistributedDataParallel with an optimizer that averages by itself, beside others that do not."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..comm import BucketedAllReduce, Format, Transport, agree, make_transport
from ..comm.reducer import Reducer
from ..comm.transport import in_flight
from ..core.arrivals import take_away
from ..core.compression import Feedback, check_form, form_of
from ..core.consensus import failure
from ..core.first_contact import speaks
from ..core.frame import Frame
from ..core.optimizer import DistributedOptimizer, frame_of
from ..core.overlap import OverlappedAllReduce
from ..core.under_ddp import UnderDdp
from ..errors import warn
from .bucket_averages import BucketAverages, finished
from .seat import Seat, check_free


def attach(
    model: DistributedDataParallel,
    optimizer: DistributedOptimizer | Sequence[torch.optim.Optimizer],
    *,
    bits: int | None = None,
    feedback: Feedback = "default",
    scaler: torch.amp.GradScaler | None = None,
) -> Handle:
    """Make DDP average gradients only while the optimizer wants averaged ones.

    In the warm-up DDP's buckets are averaged during the backward pass as ever (in float32; 16-bit
    gradients are rounded again afterwards), and the optimizer does not do it again. It only compares a
    checksum: all ranks must find the same averages in their gradients when they step. In the
    compression stage nothing is sent in the backward pass: the optimizer compresses the local
    gradients. The stage then changes in the backward pass before the step, and what the freeze warns
    of or raises comes from there. ``no_sync()``, ``find_unused_parameters`` and ``static_graph`` work
    as ever; ``join()`` is refused. Call it on every rank, before the first backward pass.

    Beside one of this package, others may train parameters of their own, on averages as DDP makes them::

        ddp.attach(model, [OneBitAdam(matrices), torch.optim.AdamW(rest)])

    While it is attached the ``step()`` of another optimizer on the parameters of this package's raises RuntimeError: it
    would train each rank by its own gradients.

    Args:
        model: Wrapped by DDP, over the optimizer's ranks, without ``mixed_precision`` or a communication hook.
        optimizer: Any of this package, over all trainable parameters of ``model`` and no others; or a list of one of
            them and others, each parameter in exactly one.
        bits: At how many bits the others' gradients are averaged, as by ``compress``; None: in float32.
        feedback, scaler: As of ``compress``, where there are ``bits``.

    Returns:
        The handle, whose ``detach()`` ends it; any optimizer may follow then.

    Raises:
        TypeError, ValueError: on every rank, if they don't belong together; nothing was changed.
        RuntimeError: on every rank, if one is attached already, or DDP averages in another way; nothing was changed.
    """
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    ours, theirs = _parted(optimizers)
    frame = None if ours is None else frame_of(ours)
    error = failure(lambda: _check(model, optimizers, ours, frame, bits, feedback, scaler))
    if frame is not None:
        transport, device = frame.ranks.transport, frame.device
    else:  # then the others' optimizers most likely use the default group
        nccl = dist.is_initialized() and "nccl" in dist.get_backend()
        device = torch.device("cuda" if nccl else "cpu")
        transport = make_transport(None, device)
    facts = [("bits and feedback of attach()", f"{bits} {feedback}")]
    facts += [("whether attach() has a scaler", str(scaler is not None))]
    agree(transport, facts, device, error, "attach the same model on every rank")
    assert frame is not None  # or all have raised
    assert ours is not None
    frame.parameters.name(model.module.named_parameters())
    return Handle(model, ours, frame, theirs, None if bits is None else (form_of(bits, feedback), scaler))


class Handle:
    """Holds an optimizer attached to DDP; ``fusedonebit.ddp.attach`` makes it, ``detach`` ends it.

    The model keeps it. It ends with the model, too.

    Attributes:
        optimizer: Whose it is; None once it is detached.
        others: What averages the gradients of others' parameters at some bits each; None where nothing does.
    """

    averages_as_ddp = False

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: DistributedOptimizer,
        frame: Frame,
        theirs: Sequence[torch.optim.Optimizer] = (),
        averaged: tuple[Format, torch.amp.GradScaler | None] | None = None,
    ) -> None:
        self.optimizer: DistributedOptimizer | None = optimizer
        self.name = type(optimizer).__name__
        self._theirs = {id(p) for each in theirs for group in each.param_groups for p in group["params"]}
        named = [(name, p) for name, p in model.module.named_parameters() if id(p) in self._theirs]
        self.others = None if averaged is None else BucketAverages(model, named, *averaged)
        # The model holds this, in C++ as well, where no collector looks.
        self._model = weakref.ref(model)
        self._owners = set(map(id, frame.parameters.owners))
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, bool]] = weakref.WeakKeyDictionary()
        this = weakref.ref(self)
        hooks = [register_optimizer_step_pre_hook(lambda stepping, _, __: _refuse_others(this, stepping))]
        self._finalizer = weakref.finalize(model, _end, hooks, frame.under_ddp)
        frame.under_ddp.attached, frame.under_ddp.elsewhere = True, None
        self._let_overlap(True)
        Seat.take(model, self)

    @property
    def _reducer(self) -> Reducer | None:
        """Return what sends gradients for the optimizer, where something does."""
        exchange = None if self.optimizer is None else self.optimizer.algorithm.exchange
        return None if exchange is None else exchange.reducer

    def _let_overlap(self, may: bool) -> None:
        """Let a reducer send in backward passes, or not: what DDP is about to average is not what it should send."""
        if isinstance(reducer := self._reducer, OverlappedAllReduce):
            reducer.rest(not may)

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average what a bucket has of the warm-up, and of others; leave the rest as it is."""
        optimizer, buffer = self.optimizer, bucket.buffer()
        assert optimizer is not None  # who else asks
        # The stage of the coming step must be known before its gradients are averaged.
        optimizer.begin_step()
        ranks, params = optimizer.frame.ranks.transport, bucket.parameters()
        if ranks.world_size == 1:
            return finished(buffer)
        averages = optimizer.averages_gradients
        optimizer.frame.under_ddp.averaged |= averages
        theirs = {i for i, p in enumerate(params) if id(p) in self._theirs}
        wide = set(range(len(params))) if averages else theirs
        wide = wide if self.others is None else wide - theirs
        future = (
            finished(buffer) if not wide else self._average_wide(bucket, None if len(wide) == len(params) else wide)
        )
        return future if self.others is None else self.others.average(bucket, theirs, future)

    def _average_wide(self, bucket: dist.GradBucket, chosen: Collection[int] | None) -> torch.futures.Future[Tensor]:
        """Average a bucket in float32, or of its gradients those that are chosen."""
        assert self.optimizer is not None
        ranks, buffer = self.optimizer.frame.ranks.transport, bucket.buffer()
        parts = [buffer] if chosen is None else [bucket.gradients()[i] for i in sorted(chosen)]
        flat = parts[0] if chosen is None else torch.cat([part.reshape(-1) for part in parts])
        # As ``flatten`` does: divided before the sum, in float32.
        wide = flat.float().mul_(1.0 / ranks.world_size)
        ranks.traffic.add(2 * wide.nbytes * (ranks.world_size - 1) // ranks.world_size)
        work = dist.all_reduce(in_flight(wide), group=_group(ranks), async_op=True)

        def write(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            for part, mean in zip(parts, done.value()[0].split([part.numel() for part in parts]), strict=True):
                part.copy_(mean.view_as(part))
            return buffer

        averaged: torch.futures.Future[Tensor] = work.get_future().then(write)
        return averaged

    def detach(self) -> None:
        """Let DDP average all gradients again, as it does without a hook, so that any optimizer may follow.

        Gradients that are there are averaged at once. What compression has not applied yet is said on rank 0 (a
        ``FusedOneBitWarning``), and stays in the optimizer, which may be attached again. Its own ``step()`` goes on,
        but on gradients that are averaged already: compression saves nothing. Call it on every rank, between the same
        two steps. A second call does nothing.

        Raises:
            RuntimeError: on every rank, within a round in which each rank moves its own parameters, or while buckets
                are under way; nothing was changed.
            DisagreementError: on every rank, if ranks are not between the same two steps.
        """
        optimizer, model = self.optimizer, self._model()
        if optimizer is None:
            return
        frame, hint = optimizer.frame, "call it on every rank, between the same two steps"
        error = failure(self._check_idle)
        facts = [("the number of updates before detach()", str(frame.steps.outcomes.updates))]
        agree(frame.ranks.transport, facts, frame.device, error, hint)
        _average_gradients(frame)
        self._let_overlap(False)
        frame.under_ddp.averaged, frame.under_ddp.elsewhere = False, None
        self._finalizer()
        self.optimizer = None
        Seat.leave(model)
        if self.others is not None:
            self.others.close()
        if speaks(frame):
            _say_what_is_owed(type(optimizer).__name__, optimizer.owed())

    def _check_idle(self) -> None:
        """Raise unless this is between two steps, all ranks alike, so that another optimizer could take over."""
        optimizer = self.optimizer
        assert optimizer is not None  # whom ``detach`` has found
        if broken := optimizer.frame.steps.broken:
            raise RuntimeError(f"this {type(optimizer).__name__} can't be detached, as it can't go on: {broken}")
        optimizer.algorithm.catch_up()
        if not optimizer.synchronised:
            told = optimizer.stats()
            raise RuntimeError(
                f"detach() must come between two rounds, but {told['local_steps']} steps of this one are done, and "
                "each rank has moved its own parameters: go on until stats()['local_steps'] is 0"
            )
        if isinstance(reducer := self._reducer, BucketedAllReduce):
            reducer.check_idle()

    def shares(self, other: torch.optim.Optimizer) -> bool:
        """Return whether another optimizer has parameters of this one; looks again once its groups have changed."""
        if torch.compiler.is_compiling():  # it can't follow weak references; what it finds is guarded
            return any(id(p) in self._owners for group in other.param_groups for p in group["params"])
        groups = [(id(group["params"]), len(group["params"])) for group in other.param_groups]
        known = self._known.get(other)
        if known is None or known[0] != groups:
            found = any(id(p) in self._owners for group in other.param_groups for p in group["params"])
            known = self._known[other] = groups, found
        return known[1]


def _end(hooks: list[RemovableHandle], under_ddp: UnderDdp) -> None:
    take_away(hooks)
    under_ddp.attached = False


def _refuse_others(handle: weakref.ref[Handle], stepping: torch.optim.Optimizer) -> None:
    found, ddp = handle(), getattr(getattr(stepping, "frame", None), "under_ddp", None)
    # One that is attached itself needs no closer look, into which no compiler could follow.
    if found is None or found.optimizer is None or (ddp is not None and ddp.attached) or not found.shares(stepping):
        return
    name = type(found.optimizer).__name__
    raise RuntimeError(
        f"{type(stepping).__name__} can't step while {name} is attached to DistributedDataParallel, with parameters "
        "that both have: gradients are each rank's own, and ranks would part. Nothing was changed; call detach() of "
        "the handle that fusedonebit.ddp.attach() has returned before another optimizer takes over"
    )


def _parted(
    optimizers: Sequence[Any],
) -> tuple[DistributedOptimizer | None, list[torch.optim.Optimizer]]:
    """Return the first of this package's, None if there is none, and all others."""
    ours = next((each for each in optimizers if frame_of(each) is not None), None)
    return ours, [each for each in optimizers if each is not ours]


def _check(
    model: DistributedDataParallel,
    optimizers: Sequence[Any],
    ours: DistributedOptimizer | None,
    frame: Frame | None,
    bits: int | None,
    feedback: Feedback,
    scaler: torch.amp.GradScaler | None,
) -> None:
    if frame is None or ours is None:
        got = ", ".join(type(each).__name__ for each in optimizers) or "none"
        raise TypeError(
            f"optimizer must be one of fusedonebit's, or a list with one, got {got}; "
            "for others alone: fusedonebit.compress(model)"
        )
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a list of optimizers, got {type(each).__name__} in it")
        if each is not ours and frame_of(each) is not None:
            raise TypeError(
                f"optimizer must have one of fusedonebit's, got {type(ours).__name__} and {type(each).__name__}; one "
                "must have all parameters that are to be compressed so, in groups where these need different options"
            )
    if frame.under_ddp.attached:
        raise RuntimeError(
            f"this {type(ours).__name__} is attached already; call attach() once, before training, or first "
            "detach() of the handle that it has returned"
        )
    check_free(model)
    if bits is not None:
        check_form(bits, feedback)
    if (bits is not None and len(optimizers) == 1) or (bits is None and (feedback != "default" or scaler is not None)):
        raise ValueError(
            f"bits, feedback and scaler must be left out where no other optimizer's gradients are averaged so, got "
            f"{bits} and {feedback!r}: they are those of others, attach(model, [ours, theirs], bits=...)"
        )
    owned = dict(zip(map(id, frame.parameters.owners), frame.parameters.names, strict=True))
    _check_parameters(model, owned, [each for each in optimizers if each is not ours])
    averaged, compressed = dist.get_process_group_ranks(model.process_group), _ranks(frame.ranks.transport)
    if averaged != compressed:
        raise ValueError(
            f"model and optimizer must average over the same ranks, got {averaged} and {compressed}; "
            "pass the same process_group to both"
        )


def _check_parameters(
    model: DistributedDataParallel, ours: Mapping[int, str], others: Sequence[torch.optim.Optimizer]
) -> None:
    """Raise ValueError unless a model has just the parameters with these ids, whose names are ``ours``, and others'."""
    named = list(model.module.named_parameters())
    known = {id(p): name for name, p in named}
    wanted = {id(p): f"{name} of model" for name, p in named if p.requires_grad}
    owned = dict(ours)
    for each in others:
        for p in (p for group in each.param_groups for p in group["params"]):
            name = known.get(id(p), f"one of shape {tuple(p.shape)} of {type(each).__name__}")
            if id(p) in owned:
                raise ValueError(f"each parameter must be in one optimizer, but {name} is in {type(each).__name__} too")
            if p.requires_grad:  # torch's own pass over those that have no gradient
                owned[id(p)] = name
    if late := [name for name, p in named if id(p) in ours and not p.requires_grad]:
        raise ValueError(
            f"parameters must be frozen after attach(), or before the optimizer is made, but {late[0]} was between; "
            "DDP leaves out what is frozen when it is made, and ranks would train it apart once it is unfrozen. For "
            "layers that are unfrozen later: DDP(model, find_unused_parameters=True), attach(), then freeze"
        )
    for key in (key for key in [*owned, *wanted] if key not in owned or key not in wanted):
        raise ValueError(
            f"optimizer and model must have the same parameters, but only one has {owned.get(key) or wanted[key]}; "
            "make the optimizer from model.parameters(), in groups where parameters need different options, or attach "
            "all that train some: attach(model, [ours, theirs])"
        )


def _average_gradients(frame: Frame) -> None:
    """Average the gradients that are there, as DDP does; those that were averaged, or used already, do no harm."""
    owners, transport = frame.parameters.owners, frame.ranks.transport
    if transport.world_size == 1:
        return
    present = torch.tensor([p.grad is not None for p in owners], dtype=torch.float32, device=frame.device)
    transport.all_reduce(present)
    for p, ranks in zip(owners, present.tolist(), strict=True):
        if ranks == 0:
            continue
        grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        wide = torch.empty_like(grad, dtype=torch.float32, memory_format=torch.contiguous_format).copy_(grad)
        transport.all_reduce(wide.div_(transport.world_size))
        p.grad = grad.copy_(wide)


def _say_what_is_owed(name: str, share: float) -> None:
    if share > 0:
        much = "all that its next step was to apply" if share == math.inf else f"{share:.2g} times its last update"
        warn(
            f"{name} was detached from DistributedDataParallel with {much} left out by compression "
            "so far; that stays in the optimizer, and is lost unless it takes further steps"
        )


def _group(transport: Transport) -> dist.ProcessGroup | None:
    return getattr(transport, "group", None)  # one of a single rank has none


def _ranks(transport: Transport) -> list[int]:
    group = _group(transport)
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
