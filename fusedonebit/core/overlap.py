"""The choice of the reducer; and the one that sends each bucket in the backward pass, as soon as it is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..comm import (
    BucketedAllReduce,
    CollectiveError,
    FeedbackReducer,
    HierarchicalAllReduce,
    StepContext,
    TorchTransport,
    Transport,
    make_all_reduce,
)
from ..comm.reducer import Compress
from .arrivals import Arrivals, after_backward, take_away
from .background import Background
from .frame import Frame, Owner
from .resolved import Options
from .step_count import as_word


class Sends(Protocol):
    """Is a stage that compresses momentum: ``optim.compressed.Compressed``."""

    frame: Frame
    running: bool

    @property
    def options(self) -> Options:
        """Return the optimizer's."""

    def compressing(self, grads: Sequence[Tensor], coef: Tensor) -> Compress:
        """Return what compresses this rank's momentum, with these gradients in it."""

    def context(self, abort: bool) -> StepContext:
        """Return what this rank tells the others."""

    def table(self) -> Tensor:
        """Return the coefficients of the coming step."""


def make_reducer(
    stage: Sends, compensated: Tensor, exponents: Tensor | None, squares: torch.dtype | None
) -> FeedbackReducer:
    """Make what averages momenta.

    Args:
        stage: What compresses them.
        compensated: Where the worker's compensated values are to be, [P].
        exponents: Of codes there, and of what else is stored so, uint8 [3, B]; None: there are no codes.
        squares: Of which dtype workers keep squares of their own gradients; None: they keep none.
    """
    frame, options = stage.frame, stage.frame.options
    numerics, wire = options.numerics, options.wire
    layout, ranks = frame.layout, frame.ranks
    shared: dict[str, Any] = {
        "device": frame.device,
        "scale_norm": numerics.scale_norm,
        "scale_scope": numerics.scale_scope,
        "compensated": compensated,
        "exponents": exponents,
        "live": frame.live,
        "ternary": numerics.ternary,
        "shards": ranks.shards,
    }
    if squares is not None:
        here = layout.numel if ranks.levels is None else layout.numel // ranks.levels[1].world_size
        shared["worker_sq"] = torch.zeros(here, dtype=squares, device=frame.device)
    if ranks.levels is not None:
        return HierarchicalAllReduce(layout, *ranks.levels, dtype=wire.hierarchy_dtype, **shared)
    shared["serve_alone"] = numerics.serve_alone
    if not wire.overlap and options.bucket_count == 1:
        return make_all_reduce(layout, ranks.transport, **shared)
    if not wire.overlap:
        return BucketedAllReduce(layout, options.bucket_count, ranks.transport, **shared)
    return OverlappedAllReduce(stage, ranks.apart, **shared)


@dataclass
class BackwardPass:
    """What is known of the gradients of one step."""

    waiting: list[int]
    """Of each bucket how many of its gradients are still to come."""
    next: int
    """Which bucket is sent next."""
    seen: set[int] = field(default_factory=set)
    """Whose gradients are there."""
    coef: Tensor | None = None
    """The coefficients of the step, once the first bucket has taken them."""
    left: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    """Gradients as the pass has left them, and their versions."""
    error: Exception | None = None
    """What has gone wrong on this rank."""


class OverlappedAllReduce(Arrivals, BucketedAllReduce):
    """Watches gradients arrive, and starts buckets, the last first, while the backward pass goes on.

    On CUDA they are compressed and sent on a stream of their own, on a CPU by a thread of its own, over a
    process group of its own, so that whatever else is sent in the meantime comes not between them. The
    first bucket, which is complete when the backward pass is over, is left to the step. Hooks hold
    the stage weakly.
    """

    def __init__(self, stage: Sends, transport: Transport, **options: Any) -> None:
        super().__init__(stage.frame.layout, stage.options.bucket_count, transport, **options)
        self._stage, owner = weakref.ref(stage), stage.frame.owner()
        assert owner is not None  # which is making this
        self._buckets_of = [
            [bucket for bucket, each in enumerate(self.parts) if each.layout.sizes[i]]
            for i in range(len(self.layout.sizes))
        ]
        self._background = Background(self.device, isinstance(transport, TorchTransport))
        handles = self.watch(stage.frame.parameters.owners)
        handles.append(owner.register_load_state_dict_pre_hook(_idle_check(weakref.ref(self))))
        # Not of this object: a bucket that is under way keeps it alive.
        self._finalizer = weakref.finalize(owner, _take_away, handles, self._background.thread)
        self._forget()

    @property
    def together(self) -> bool:
        """Tell that each bucket travels by itself: a rank that has started none can't know what others have."""
        return False

    def write(self, compress: Compress, context: StepContext) -> None:
        """Wait for what the backward pass has sent, and average the rest; ``error`` is what went wrong there."""
        self._check_gradients()
        error = self._pass.error
        self._catch_up()
        stage = self._stage()
        if stage is not None and any(value is not None for value in stage.frame.loss_scale):
            error = RuntimeError(
                "a GradScaler can't be used with Wire(overlap=True): gradients are sent before it has unscaled them; "
                "train in bfloat16 without one, or pass Wire(overlap=False)"
            )
        if error is not None:
            # What was sent cannot be held back: all buckets are skipped.
            context = context._replace(abort=True, missing=(), hold=None)
        super().write(compress, context)
        self.error = error

    def wait(self) -> None:
        """Wait until the thread has sent what it was given."""
        self._background.wait()

    def close(self) -> None:
        """Take the hooks away, and end the thread once it is done."""
        self._finalizer()
        self._background.close()

    @property
    def broken(self) -> bool:
        """Tell whether nobody goes on from here."""
        stage = self._stage()
        return stage is None or bool(stage.frame.steps.broken)

    def rest(self, resting: bool) -> None:
        """Watch no backward pass, or watch them again; RuntimeError if one has sent what no step has taken up."""
        self.check_idle()
        self._forget()
        self._paused = resting

    def _forget(self) -> None:
        waiting = [sum(bucket in buckets for buckets in self._buckets_of) for bucket in range(self.count)]
        self._pass = BackwardPass(waiting, self.count - 1)

    def arrived(self, i: int) -> None:
        """Take note that the gradient of parameter ``i`` is there."""
        stage = self._stage()
        owner = None if stage is None else stage.frame.owner()
        if stage is None or owner is None or self._paused or stage.frame.steps.broken:
            return
        owner.begin_step()
        if not stage.running:
            return
        this = self._pass
        if i in this.seen:
            this.error = this.error or RuntimeError(
                f"the gradient of {stage.frame.parameters.called[i]} has changed in a second backward pass before "
                "step(): with Wire(overlap=True) the first has been sent by now; wrap all but the last in "
                "optimizer.no_sync()"
            )
            return
        if not this.seen:
            after_backward(weakref.WeakMethod(self._note_versions))
        this.seen.add(i)
        for bucket in self._buckets_of[i]:
            this.waiting[bucket] -= 1
        while this.next > 0 and this.waiting[this.next] == 0:
            with stage.frame.steps.whole("a backward pass that sends buckets"):
                self._start(stage, owner, this.next)
                this.next -= 1

    def _start(self, stage: Sends, owner: Owner, bucket: int) -> None:
        plist, nothing = stage.frame.parameters, stage.frame.nothing
        grads, this = [nothing] * len(self._buckets_of), self._pass
        try:
            if this.coef is None:
                owner.take_hyper_parameters()
                this.coef = stage.table()
            members = [i for i, buckets in enumerate(self._buckets_of) if bucket in buckets]
            for i in members:
                grads[i] = plist.gradient(i, nothing)
            grads = plist.usable(grads, nothing)
        except Exception as error:  # the others must not wait for this rank
            this.error = this.error or error
            grads = [nothing] * len(self._buckets_of)
        compress = stage.compressing(grads, this.coef if this.coef is not None else stage.table())
        # Now, not in the thread: until that comes to it somebody may have set another learning rate, and its tag.
        coming = as_word(stage.frame.steps.count.coming)
        context = stage.context(this.error is not None)._replace(number=coming, missing=())
        self.under_way.add(bucket)
        # Gradients are copies where their memory order is another than the parameter's: nobody else may have them.
        self._background.run(lambda: self.start(bucket, compress, context), compress, context)

    def _note_versions(self) -> None:
        if (stage := self._stage()) is not None:
            owners = stage.frame.parameters.owners
            self._pass.left = {i: (g, g._version) for i in self._pass.seen if (g := owners[i].grad) is not None}

    def _check_gradients(self) -> None:
        """Note an error if somebody has changed a gradient since the backward pass has left it behind, and sent it."""
        stage = self._stage()
        assert stage is not None
        plist = stage.frame.parameters
        for i, (grad, version) in self._pass.left.items():
            if plist.owners[i].grad is not grad or grad._version != version:
                self._pass.error = self._pass.error or RuntimeError(
                    f"the gradient of {plist.called[i]} was changed or dropped between the backward "
                    "pass and step(): with Wire(overlap=True) it has been sent by now. Clip, scale or drop gradients "
                    "with Wire(overlap=False) only; the guard refuses outliers"
                )
                return

    def _catch_up(self) -> None:
        """Wait for the buckets on their way (on CUDA: what is launched next does).

        Raises:
            CollectiveError: if one of them failed.
        """
        self._forget()
        errors = self._background.join()
        if errors:
            self.under_way.clear()
            first = errors[0]
            # Whatever it was, buckets of this step are lost: no further one may build on them.
            raise first if isinstance(first, CollectiveError) else CollectiveError(f"a bucket was lost: {first!r}")


def _idle_check(overlap: weakref.ref[OverlappedAllReduce]) -> Callable[..., None]:
    def check(*_: object) -> None:
        if (watching := overlap()) is not None and not watching.broken:
            watching.check_idle()

    return check


def _take_away(handles: list[RemovableHandle], thread: ThreadPoolExecutor | None) -> None:
    take_away(handles)
    if thread is not None:
        thread.shutdown(wait=False)  # the last reference may be dropped by the thread itself
