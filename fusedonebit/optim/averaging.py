"""Optimizers that average gradients over the ranks by themselves.

``AveragingOptimizer`` is all of one but its update: a subclass says with ``_update`` what one update
from averaged gradients is. ``adamw.AdamW`` and ``lamb.Lamb`` are. A rank alone has nothing to average: its update
reads gradients where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..comm import Flag
from ..comm.absent import absence, absent_on_all
from ..comm.agreement import sum_of_words
from ..comm.message import OUT_OF_STEP, RECEIVED
from ..core.handshake import Handshake, HandshakeWord
from ..core.optimizer import DistributedOptimizer
from ..core.scaling import LossScale, clip_factor, gradient_norm, overflow_flags
from ..core.state.spec import Specs, StateSpec
from ..errors import OutOfStepError
from ..triton_kernels import TAIL, FlatLayout, flatten
from ..triton_kernels.scaling import SQUARES
from ..triton_kernels.tables import Listed, tables_of

DTYPE = "options.moments_dtype"


class AveragingOptimizer(DistributedOptimizer):
    """Skeleton of an optimizer on averaged gradients; see the module's docstring and ``Lamb``."""

    kept: ClassVar[Specs] = (
        StateSpec("exp_avg", "element", "exp_avg", published=True, kept_in=DTYPE),
        StateSpec("exp_avg_sq", "element", "exp_avg_sq", published=True, not_negative=True, kept_in=DTYPE),
    )
    exp_avg_sq: Tensor
    _found: Tensor
    _found_before: Tensor
    _found_in_replays: Tensor
    _no_flags: Tensor
    weighs: ClassVar = SQUARES
    reads_gradients: ClassVar[bool] = False
    """Whether a rank alone updates from gradients where they lie, and leaves out elements that do not count; else it
    flattens them first, and skips a step of which any does not count."""

    def build(self) -> None:
        self._grad: Tensor | None = None
        self._cut: tuple[Tensor, Listed] | None = None
        self._exp_avg_sq_sums: Tensor | None = None  # by block, where somebody watches v
        super().build()
        self._handshake_differs = torch.zeros(5, dtype=torch.bool, device=self.device)
        self._digest = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._flat = FlatLayout((self.layout.numel,), 1, self.layout.block_size)  # averaged gradients, as one tensor
        self._flat_tables = tables_of(self._flat, self.device)  # kept, because launches share what somebody keeps
        # Flags of this step's elements that did not count, and of the last one's; two of replays, which nobody reads;
        # and none. Each is aligned, so that kernels are compiled once for all of them, and in no capture anew.
        words = torch.zeros(5, 4, dtype=torch.int32, device=self.device)[:, :1]
        self._found, self._found_before, self._found_in_replays, self._unread, self._no_flags = words
        self._is_found = False  # whether this step's update has been made

    @property
    def digest(self) -> Tensor | None:
        return None if self.transport.world_size == 1 else self._digest

    @property
    def _is_alone(self) -> bool:
        """Tell whether this rank updates from gradients where they lie. Who wants errors looks at all of them first."""
        single = self.transport.world_size == self.model.count == 1
        return self.reads_gradients and single and self.options.nonfinite == "skip"

    def _exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        return (self._update_alone if self._is_alone else self._average)(grads, coef, abort)

    def _update_alone(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Update on a rank alone, as ``_exchange`` says: the update is the only launch that reads gradients.

        But for their norm, if they are clipped. Coefficients take up what they are multiplied with.
        """
        self._is_found = not abort
        if abort:
            return torch.full_like(self._no_flags, int(Flag.ABORT))
        agreed = self._agree(grads, coef, self.transport)
        hold = self._no_flags if agreed.hold is None else agreed.hold
        self._note_absent()
        if not self._captures:
            self._found, self._found_before = self._found_before, self._found
        found = (self._found_in_replays, self._unread) if self._captures else (self._found, self._found_before)
        self._update(grads, self.coefficients.still(agreed.coef, self._absent), hold, *found)
        return hold

    def _note_absent(self) -> None:
        """Take note of the tensors of which this rank, alone, has no gradient."""
        if self._missing:
            bits = absence(self.layout, self._missing, self.device).bits
            self._absent = absent_on_all(bits[None], len(self.layout.sizes), self._no_flags)

    def _known(self, flags: Tensor) -> Tensor | int:
        """Return the step's flags, with those that the update of a rank alone has found in gradients."""
        if not self._is_alone or not self._is_found:
            return flags
        return self._found if flags is self._no_flags else flags | self._found

    @property
    def _can_capture(self) -> bool:
        """Tell whether the coming step can be captured: averages are not, as the host divides and compares them."""
        return super()._can_capture or (self._is_alone and self._phase == "uncompressed")

    def _average(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Average, as ``_exchange`` says, by one all-reduce, or none where DDP has averaged; then update."""
        layout, loss_scale = self.layout, LossScale.of(self)
        if self._grad is None:
            self._grad = self._make_grad()
        values, tail = self._grad[: layout.numel], self._grad[layout.numel :]
        handshake = self._make_handshake()
        handshake.write(tail, abort, loss_scale.found_inf, None if self.digest is None else self.digest[0])
        # What DDP's hook has averaged is not divided again, and only the handshake behind it is summed.
        share = 1.0 if self.averaged else 1 / self.transport.world_size
        flatten(grads, layout.sizes, layout.block_size, share, loss_scale.factor(), self._grad[: layout.numel + TAIL])
        if self.averaged:  # somebody may have changed or dropped them since, or unscaled them otherwise, on one rank
            handshake.add_values(tail, values)
        summed = tail if self.averaged else self._grad
        self.transport.all_reduce(summed)
        flags, self._handshake_differs = handshake.read(tail)
        if loss_scale.found_inf is not None:
            flags = flags | overflow_flags(tail[HandshakeWord.OVERFLOW], self.transport.world_size)
        self._note_sum(summed, flags)
        told = flags, self._tag_of_shards, handshake.absent(tail), len(layout.sizes)
        flags, self._absent = self.shards.unite(*told)
        flags = self._united(flags)
        if loss_scale.found_inf is not None:
            self.overflowed = ((flags & int(Flag.OVERFLOW)) != 0).float()
        if self.options.max_grad_norm is not None:
            self._grad_norm = gradient_norm([values], self._flat, self.model, self._counted_here)
            values *= clip_factor(self._grad_norm, self.options.max_grad_norm)
        self._update(self._averages(self._grad), self.coefficients.still(coef, self._absent), flags)
        return flags

    def _note_sum(self, summed: Tensor, flags: Tensor) -> None:
        """Make the next digest of a sum over the ranks, which all have received, and of updates done.

        Of a sum that ``flags`` int32 [1] make all ranks throw away nothing counts: libraries may hand out NaNs of
        several kinds.
        """
        if self.digest is not None:
            words = sum_of_words(summed.as_strided((len(summed) + len(summed) % 2,), (1,)))
            torch.add(words * (flags == 0), self.updates, out=self.digest[:1])

    def _averages(self, grad: Tensor) -> Listed:
        """Return the averaged gradients in ``grad``, one of each tensor."""
        if self._cut is None or self._cut[0] is not grad:
            self._cut = grad, Listed.of(self.layout.cut(grad))
        return self._cut[1]

    def _make_handshake(self, skips: bool = False) -> Handshake:
        tag = self.coefficients.tag ^ self.layout.fingerprint
        return Handshake(
            self.transport.world_size, self.step_count.total + skips, tag, len(self.layout.sizes), self._missing, skips
        )

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero; averages that DDP has made are dropped on all ranks, or on none.

        Raises:
            OutOfStepError: if others take the step; no gradient was dropped.
        """
        if self.averaged:
            self._skip_together()
        super().zero_grad(set_to_none)

    def _skip_together(self) -> None:
        # Others may be in their step, in which they send their handshake: this is for them.
        tail = self._make_grad()[self.layout.numel :]
        handshake = self._make_handshake(skips=True)
        handshake.write(tail, False, None, None if self.digest is None else self.digest[0])
        with self.whole("zero_grad()"), self._breaking(begun=True):
            self.transport.all_reduce(tail)
            flags, _ = handshake.read(tail)
            self._note_sum(tail, flags)
            self.averaged = False
        if int(flags):
            raise OutOfStepError(
                f"ranks are out of step after {self.outcomes.updates} updates: this rank throws away by zero_grad() "
                "what DDP has averaged, but others use it in their step(). No parameter was changed; every rank must "
                "call step() equally often"
            )

    def _check_repeated(self, repeated: bool) -> None:
        if repeated and self.ddp_attached and not self.averaged and self.averages_gradients:
            raise RuntimeError(
                "step() was called again on gradients that DDP has averaged for the last one: other ranks may be in "
                "their next backward pass by now, and can't be asked. Nothing was sent or changed; call step() once "
                "after each backward pass"
            )

    def _make_grad(self) -> Tensor:
        """Make room for the gradients and the handshake behind them, float32 [P + TAIL + tensors]; and for one more."""
        length = self.layout.numel + TAIL + len(self.layout.sizes)
        return torch.zeros(length + length % 2, device=self.device)[:length]

    def _held(self) -> list[Tensor]:
        found = self._found if self._is_alone else None
        more = (self._grad, self._exp_avg_sq_sums, self._handshake_differs, self._digest, found)
        return [*super()._held(), *(tensor for tensor in more if tensor is not None)]

    def _describe(self, flag: Flag) -> str:
        return self._describe_handshake()

    def _describe_handshake(self) -> str:
        step, tag, steps, tags, _ = self._handshake_differs.tolist()
        what = "hyper-parameters (learning rate and the like) or the parameter layout"
        if not (step or tag or steps or tags):
            what = RECEIVED
        if self.ddp_attached:
            what += (
                ", or the gradients that DDP has averaged: change or drop them on all ranks alike, with one loss scale "
                "(fusedonebit.amp.GradScaler)"
            )
        return self._say_where(f"number of steps ({OUT_OF_STEP})" if step or steps else what)

    def _update(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        """Make one update from averaged gradients, one of each tensor; none where ``skip`` is set.

        ``found``: Flags of this update, for elements that do not count, and of the last one; else all do.
        """
        raise NotImplementedError
