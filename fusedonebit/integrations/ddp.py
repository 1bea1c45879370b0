"""DistributedDataParallel with an optimizer that averages by itself."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..comm import BucketedAllReduce, Transport, agree, make_transport
from ..comm.reducer import Reducer
from ..comm.transport import in_flight
from ..core.arrivals import take_away
from ..core.consensus import failure
from ..core.first_contact import speaks
from ..core.frame import Frame
from ..core.optimizer import DistributedOptimizer, frame_of
from ..core.overlap import OverlappedAllReduce
from ..core.under_ddp import UnderDdp
from ..errors import warn

_JOIN = (
    "join() can't be used with a model to which an optimizer of fusedonebit is attached: ranks whose data has ended "
    "would have to compress as well; give all ranks equally many batches, or call detach() of the handle that "
    "fusedonebit.ddp.attach() has returned. Torch leaves a join on when its block ends: "
    "`with model.join(enable=False): pass` ends it"
)


def attach(model: DistributedDataParallel, optimizer: DistributedOptimizer) -> Handle:
    """Make DDP average gradients only while the optimizer wants averaged ones.

    In the warm-up DDP's buckets are averaged during the backward pass as ever (in float32; 16-bit
    gradients are rounded again afterwards), and the optimizer does not do it again. It only compares a
    checksum: all ranks must find the same averages in their gradients when they step. In the
    compression stage nothing is sent in the backward pass: the optimizer compresses the local
    gradients. The stage then changes in the backward pass before the step, and what the freeze warns
    of or raises comes from there. ``no_sync()``, ``find_unused_parameters`` and ``static_graph`` work
    as ever; ``join()`` is refused. Call it on every rank, before the first backward pass.

    While it is attached the ``step()`` of another optimizer on these parameters raises RuntimeError: it would train
    each rank by its own gradients.

    Args:
        model: Wrapped by DDP, over the optimizer's ranks, without ``mixed_precision`` or a communication hook.
        optimizer: Any of this package, over all trainable parameters of ``model`` and no others.

    Returns:
        The handle, whose ``detach()`` ends it; any optimizer may follow then.

    Raises:
        TypeError, ValueError: on every rank, if the two don't belong together; nothing was changed.
        RuntimeError: on every rank, if either is attached already, or DDP averages in another way; nothing was changed.
    """
    frame = frame_of(optimizer)
    error = failure(lambda: _check(model, optimizer, frame))
    if frame is not None:
        transport, device = frame.ranks.transport, frame.device
    else:  # then the others' optimizers most likely use the default group
        nccl = dist.is_initialized() and "nccl" in dist.get_backend()
        device = torch.device("cuda" if nccl else "cpu")
        transport = make_transport(None, device)
    agree(transport, [], device, error, "attach the same model on every rank")
    assert frame is not None  # or all have raised
    frame.parameters.name(model.module.named_parameters())
    return Handle(model, optimizer, frame)


class Handle:
    """Holds an optimizer attached to DDP; ``fusedonebit.ddp.attach`` makes it, ``detach`` ends it.

    The model keeps it. It ends with the model, too.

    Attributes:
        optimizer: Whose it is; None once it is detached.
    """

    def __init__(self, model: DistributedDataParallel, optimizer: DistributedOptimizer, frame: Frame) -> None:
        seat = _seat_of(model)
        if seat is None:
            seat = _Seat(model)
            # DDP refuses hooks whose annotations are text, as all of this file are; a lambda has none.
            model.register_comm_hook(seat, lambda seat, bucket: seat.average(bucket))
        self.optimizer: DistributedOptimizer | None = optimizer
        # The model holds this, in C++ as well, where no collector looks.
        self._model = itself = weakref.ref(model)
        self._owners = set(map(id, frame.parameters.owners))
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, bool]] = weakref.WeakKeyDictionary()
        this = weakref.ref(self)
        hooks = [
            register_optimizer_step_pre_hook(lambda stepping, _, __: _refuse_others(this, stepping)),
            model.register_forward_pre_hook(lambda module, _: _refuse_join(module, itself)),
        ]
        vars(model)["join_hook"] = lambda **_: _NoJoin()
        self._finalizer = weakref.finalize(model, _end, hooks, frame.under_ddp)
        frame.under_ddp.attached, frame.under_ddp.elsewhere = True, None
        self._let_overlap(True)
        seat.handle = self

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
        """Average a bucket of the warm-up, and leave others as they are."""
        optimizer, buffer = self.optimizer, bucket.buffer()
        assert optimizer is not None  # who else asks
        # The stage of the coming step must be known before its gradients are averaged.
        optimizer.begin_step()
        ranks = optimizer.frame.ranks.transport
        if not optimizer.averages_gradients or ranks.world_size == 1:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        optimizer.frame.under_ddp.averaged = True
        # As ``flatten`` does: divided before the sum, in float32.
        wide = buffer.float().mul_(1.0 / ranks.world_size)
        ranks.traffic.add(2 * wide.nbytes * (ranks.world_size - 1) // ranks.world_size)
        work = dist.all_reduce(in_flight(wide), group=_group(ranks), async_op=True)
        averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
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
        if model is not None and (seat := _seat_of(model)) is not None:
            seat.handle = None
            vars(model).pop("join_hook", None)
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


class _Seat:
    """The state of DDP's hook, which DDP keeps for good: who is attached, if anybody."""

    def __init__(self, model: DistributedDataParallel | None) -> None:
        self.handle: Handle | None = None
        self.model = None if model is None else weakref.ref(model)

    @property
    def averages_as_ddp(self) -> bool:
        """Return whether the hook does what DDP does without one."""
        return self.handle is None

    def __deepcopy__(self, _: dict[int, Any]) -> _Seat:
        """Return what a copy of the model has in its list: nobody is attached to it, and DDP has no hook there."""
        return _Seat(None)

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Do what the optimizer wants with a bucket, or what DDP does by itself."""
        if self.handle is not None and self.handle.optimizer is not None:
            return self.handle.average(bucket)
        model, buffer = None if self.model is None else self.model(), bucket.buffer()
        assert model is not None  # whose hook this is
        group = model.process_group
        # As DDP: multiplied before the sum, in the gradients' own dtype.
        work = dist.all_reduce(in_flight(buffer.mul_(1.0 / group.size())), group=group, async_op=True)
        averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return averaged


def _seat_of(model: DistributedDataParallel) -> _Seat | None:
    seats = (state for _, state in model._comm_hooks if isinstance(state, _Seat))
    return next((seat for seat in seats if seat.model is not None and seat.model() is model), None)


class _NoJoin(JoinHook):
    """Refuses ``join()`` on a rank that has no batch in it."""

    def main_hook(self) -> None:
        raise RuntimeError(_JOIN)


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


def _refuse_join(model: DistributedDataParallel, attached: weakref.ref[DistributedDataParallel]) -> None:
    if not model._join_config.enable or model is not attached():  # but a copy
        return
    # Ranks without a batch are waiting for this, and then hear of it from ``_NoJoin``.
    if (work := Join.notify_join_context(model)) is not None:
        work.wait()
    raise RuntimeError(_JOIN)


def _check(model: DistributedDataParallel, optimizer: DistributedOptimizer, frame: Frame | None) -> None:
    if frame is None:
        raise TypeError(f"optimizer must be one of fusedonebit's, got {type(optimizer).__name__}")
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model must be wrapped in DistributedDataParallel, got {type(model).__name__}; attach first, compile then"
        )
    if frame.under_ddp.attached:
        raise RuntimeError(
            f"this {type(optimizer).__name__} is attached already; call attach() once, before training, or first "
            "detach() of the handle that it has returned"
        )
    _check_ways_of_averaging(model)
    _check_parameters(model, dict(zip(map(id, frame.parameters.owners), frame.parameters.names, strict=True)))
    averaged, compressed = dist.get_process_group_ranks(model.process_group), _ranks(frame.ranks.transport)
    if averaged != compressed:
        raise ValueError(
            f"model and optimizer must average over the same ranks, got {averaged} and {compressed}; "
            "pass the same process_group to both"
        )


def _check_ways_of_averaging(model: DistributedDataParallel) -> None:
    seat = _seat_of(model)
    if seat is not None and seat.handle is not None:
        raise RuntimeError(
            f"{type(seat.handle.optimizer).__name__} is attached to this model already: one optimizer must have all of "
            "its parameters, in groups where they need different options; or first call detach() of the handle that "
            "attach() has returned"
        )
    if model.mixed_precision is not None:
        raise RuntimeError(
            f"mixed_precision must be None, got {model.mixed_precision}: DDP averages in a hook of its own then; use "
            "torch.autocast, or parameters of 16 bits"
        )
    # Built-in hooks are in no list.
    if seat is None and (named := model._get_ddp_logging_data().get("comm_hook")):
        raise RuntimeError(
            f"DDP must have no communication hook, got {named}: it keeps one for good, and the optimizer needs it; "
            "wrap the model in DistributedDataParallel again without"
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in model.module.parameters()):
        raise RuntimeError(
            "parameters must have no optimizers that step in the backward pass, as torch's "
            "_apply_optimizer_in_backward makes them: leave that out"
        )
    if model._join_config.enable:
        raise RuntimeError(_JOIN)


def _check_parameters(model: DistributedDataParallel, ours: Mapping[int, str]) -> None:
    """Raise ValueError unless a model has just the parameters with these ids, whose names are ``ours``."""
    named = list(model.module.named_parameters())
    theirs = {id(p): f"{name} of model" for name, p in named if p.requires_grad}
    if late := [name for name, p in named if id(p) in ours and not p.requires_grad]:
        raise ValueError(
            f"parameters must be frozen after attach(), or before the optimizer is made, but {late[0]} was between; "
            "DDP leaves out what is frozen when it is made, and ranks would train it apart once it is unfrozen. For "
            "layers that are unfrozen later: DDP(model, find_unused_parameters=True), attach(), then freeze"
        )
    for key in (key for key in [*ours, *theirs] if key not in ours or key not in theirs):
        raise ValueError(
            f"optimizer and model must have the same parameters, but only one has {ours.get(key) or theirs[key]}; "
            "make the optimizer from model.parameters(), in groups where parameters need different options: several "
            "optimizers on one DDP model are not supported"
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
