"""The step of 1-bit Muon on several ranks, and what it exchanges with the owners of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..comm import StepContext
from ..comm.carried import Carried
from ..comm.owned_signs import OwnedSigns, Shares
from ..comm.owners import Batch, Kind, Shape
from ..comm.reducer import Compress
from ..core.exchange import Exchange
from ..core.frame import Frame
from ..core.header import Fields
from ..core.stage import Stage
from ..core.state_tensor import StateTensor
from ..triton_kernels import apply_momentum
from ..triton_kernels.gradient_scaling import SQUARES
from ..triton_kernels.nouns import Divisor, Signs
from .orthogonal import HEADER, OF_SEVERAL, WHITENED, Matrices, Orthogonaliser, by_block, raw
from .rest import Rest
from .whitening import Whitening


class OneBit(Stage):
    """A step: workers compress, owners average and orthogonalise, and all move by signs; the rest by AdamW.

    Args:
        frame: Of the optimizer.
        exchange: With the owners.
        rest: What trains by AdamW all that messages carry besides; None: nothing.
    """

    weighs = SQUARES
    exchange: OwnedExchange

    def __init__(self, frame: Frame, exchange: OwnedExchange, rest: Rest | None) -> None:
        super().__init__(frame)
        self.exchange, self._rest = exchange, rest
        self.renews = rest is None

    def step(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        frame, exchange, agreed = self.frame, self.exchange, self.agree(grads, coef)
        members, rest, carried, by = exchange.members, self._rest, exchange.reducer.carried, agreed.factor
        exchange.whitening.prepare(frame.steps.outcomes.attempts - 1)
        whitened = exchange.whitening.whitened(members.of(grads))

        def compress(part: OwnedSigns) -> None:
            part.compress(whitened, members.of(agreed.coef))
            if rest is not None:
                part.carry(rest.members.of(grads), None if by is None else by.reshape(()))

        still = exchange.synchronise(compress, exchange.context(abort, agreed.hold), agreed.coef)
        exchange.apply(still)
        exchange.whitening.follow()
        if rest is not None and carried is not None:
            still = frame.coefficients.still(coef, frame.absent)  # which averages are not multiplied by again
            rest.update(carried.averages, still, exchange.reducer.flags)
        return exchange.restore_absent()


NEARLY = 1e-30
"""Far below what an update has where it is not 0."""


class Whole(NamedTuple):
    """What owners have of all matrices, float32 [P] each; empty unless somebody saves, looks at or loads it."""

    momentum: Tensor
    gram: Tensor
    made_of: Tensor


def _signs(i: int, shape: Shape) -> Tensor:
    """Draw the signs of matrix ``i``, or shard, the same whoever owns it."""
    return torch.randint(2, shape, generator=torch.Generator().manual_seed(i), dtype=torch.int8) * 2 - 1


class OwnedExchange(Exchange):
    """Exchanges matrices with their owners.

    Args:
        frame: Of the optimizer.
        matrices: Its parameters.
        shares: As of ``OwnedSigns``.
        orthogonaliser: As of ``MuonUpdate``.
        carried: As of ``OwnedSigns``.
        dtype: As of ``Whitening``.
    """

    header_fields: ClassVar[Fields] = HEADER
    reducer_kind: ClassVar[type[OwnedSigns]] = OwnedSigns
    whitening_kind: ClassVar[type[Whitening]] = Whitening
    reducer: OwnedSigns

    def __init__(
        self,
        frame: Frame,
        matrices: Matrices,
        shares: Callable[[], Shares],
        orthogonaliser: Callable[[Sequence[tuple[Kind, int]]], Orthogonaliser],
        carried: Carried | None,
        dtype: torch.dtype,
    ) -> None:
        def update(batches: Sequence[tuple[Batch, Tensor]]) -> None:
            turn = 1 - 2 * (frame.steps.outcomes.attempts % 2)
            unwhitened = self.whitening.back([direction for _, direction in batches])
            made = self._orthogonalise(unwhitened)
            for (_, direction), update, nearly in zip(batches, made, self._nearly, strict=True):
                torch.add(update, nearly, alpha=turn, out=direction)

        self.members, layout = matrices.members, matrices.members.layout
        kept = frame.options.formats.moments
        self.compensated = torch.zeros(layout.numel, dtype=kept.dtype, device=frame.device)
        self._shapes = matrices.shapes
        self._nothing = Whole(*[frame.nothing] * 3)
        self.whole = self._nothing
        of_matrices = layout, matrices.each, frame.ranks.transport
        left, drawn = (self.compensated, self.members.live), frame.steps.updates if kept.random else None
        super().__init__(frame, self.reducer_kind(*of_matrices, update, shares, *left, carried, drawn))
        sizes = [size / root for size, root in zip(matrices.sizes, matrices.roots, strict=True)]
        self.reducer.scale.copy_(by_block(layout, sizes))
        self.whitening = self.whitening_kind(matrices, self.reducer, dtype)
        # Of each of its batches next to nothing: where an update is 0, its signs are others in each step, so that what
        # has no gradient goes nowhere.
        owners, rank = self.reducer.owners, self.reducer.transport.rank
        batches, shards = owners.batches(rank), frame.ranks.shards
        own = [i * shards.count + shards.transport.rank for i in owners.owned[rank]]
        stacks = [torch.stack([_signs(own.pop(0), batch.shape) for _ in range(batch.number)]) for batch in batches]
        self._nearly = [NEARLY * each.to(frame.device, torch.bfloat16) for each in stacks]
        self._orthogonalise = orthogonaliser([(batch.whole, batch.number) for batch in batches])

    def apply(self, coef: Tensor, divisor: Divisor | None = None, x_squares: Tensor | None = None) -> None:
        """Move matrices by the signs of their update."""
        frame, members, reducer = self.frame, self.members, self.reducer
        verdict = reducer.verdict
        counting = frame.coefficients.count(*frame.counters()) if frame.coefficients.renews else (None, None)
        m, own = Signs(reducer.bits, reducer.scale), members.of(coef)
        how = own, verdict.flags, frame.rounding, verdict.digest, None, *counting, members.correction
        apply_momentum(members.dense, members.places, m, None, *how)

    def restore_absent(self) -> Tensor:
        if self.frame.absent is not None:
            self.reducer.restore(self.members.of(self.frame.absent))
        return self.reducer.flags

    def synchronise(self, compress: Compress, context: StepContext, coef: Tensor) -> Tensor:
        self.whole = self._nothing
        return super().synchronise(compress, context, coef)

    def completed(self, context: StepContext) -> StepContext:
        context = super().completed(context)
        if self.frame.ranks.shards.count > 1:  # before messages are sent, so that no owner takes what others skip
            context = context._replace(unite=partial(self.unite, lambda flags: self._united(flags)[0], context.abort))
        return context

    def take_verdict(self, coef: Tensor) -> Tensor:
        if self.frame.ranks.shards.count > 1:
            verdict = self.reducer.verdict
            flags, verdict.absent = self._united(self.reducer.flags, verdict.absent)
            self.reducer.refuse(flags)
        return super().take_verdict(coef)

    def _united(self, flags: Tensor, absent: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the flags that any shard's ranks have, int32 [1], and what is ``absent`` from all."""
        tensors = len(self.reducer.owners.layout.sizes)
        return self.frame.ranks.shards.unite(flags, self.frame.tag_of_shards, absent, tensors)

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        """Return what is left of gradients, of which each rank has its own, and what owners have, once it is gathered.

        All are in the basis in which they are compressed: raw ones times (``whitened_by``)^(1/2).
        """
        which, whole = self.members.which, self.whole
        of_rank: dict[str, Any] = {"of_rank": True, "only": OF_SEVERAL, "members": which}
        left = StateTensor("worker_error", "element", self.compensated, **of_rank)
        m = StateTensor("momentum_buffer", "element", whole.momentum, members=which)
        of_grams: dict[str, Any] = {"members": which, "only": WHITENED}
        mean = StateTensor("gram", "element", whole.gram, **of_grams)
        return left, m, mean, StateTensor("whitened_by", "element", whole.made_of, **of_grams)

    def owed(self) -> float:
        """Return the norm of what is left of this rank's gradients, over that of what it has sent last."""
        before = self.compensated.float().clone()
        super().settle()
        left, sent = float(self.compensated.norm()), float((before - self.compensated).norm())
        return left / sent if sent else math.inf if left else 0.0

    def momentum(self, i: int) -> Tensor:
        """Return the momentum of matrix ``i``, raw, float32 of as many elements; raise RuntimeError if not gathered."""
        if not len(self.whole.momentum):
            raise RuntimeError(
                "momentum() of OneBitMuon: each matrix's is its owner's alone; first call state_dict() on all ranks, "
                "which gathers them until the next step"
            )
        m, _, made_of = (self.members.layout.cut(each)[i] if len(each) else None for each in self.whole)
        assert m is not None
        return m if made_of is None else raw(m, made_of, self._shapes[i])

    def plain_state(self) -> dict[str, Any]:
        return {WHITENED: self.whitening.whole, OF_SEVERAL: True}

    def held(self) -> Sequence[Tensor]:
        return [*super().held(), *self.whitening.held(), *self._nearly, *self._orthogonalise.held()]

    def settle(self, compressed: bool = True) -> None:
        """Form what is left, and gather what owners have; all ranks call it."""
        super().settle()
        white, reducer = self.whitening, self.reducer
        with self.frame.steps.whole("a look at the momentum"):
            momentum = reducer.of_all(reducer.momentum)
            if not white.whole:
                self.whole = self._nothing._replace(momentum=momentum)
            else:
                self.whole = Whole(momentum, white.gathered(white.grams), white.gathered(white.made_of))

    def resume(self, header: Mapping[str, Any]) -> None:
        self.whole = Whole(*(torch.zeros(len(self.compensated), device=self.frame.device) for _ in Whole._fields))

    def resumed(self, header: Mapping[str, Any]) -> None:
        momentum, *grams = self.whole
        self.reducer.momentum.copy_(self.reducer.of_owner(momentum))
        if header[WHITENED]:
            self.whitening.resume(*grams)
        self.reducer.keep_all()
        self.whole = self._nothing
