"""The step of 1-bit Muon on several ranks, and what it exchanges with the owners of matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import StepContext
from ..comm.owned_signs import OwnedSigns
from ..comm.owners import Batch
from ..comm.reducer import Compress
from ..core.exchange import Exchange
from ..core.frame import Frame
from ..core.stage import Stage
from ..core.state_tensor import StateTensor
from ..triton_kernels import apply_momentum
from ..triton_kernels.gradient_scaling import SQUARES
from ..triton_kernels.nouns import Divisor, Signs
from .orthogonal import Matrices, by_block
from .rest import Rest
from .whitening import Whitening


class OneBit(Stage):
    """A step: workers compress, owners average and orthogonalise, and all move by signs; the rest by AdamW.

    Args:
        frame: Of the optimizer.
        exchange: With the owners.
        rest: What is averaged as it is; None: nothing.
    """

    weighs = SQUARES
    exchange: OwnedExchange

    def __init__(self, frame: Frame, exchange: OwnedExchange, rest: Rest | None) -> None:
        super().__init__(frame)
        self.exchange, self._rest = exchange, rest
        self.renews = rest is None

    def step(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        frame, exchange, agreed = self.frame, self.exchange, self.agree(grads, coef)
        members, context = exchange.members, exchange.context(abort, agreed.hold)
        missing = () if abort else members.missing
        if self._rest is not None:  # first, so that matrices stay too where its gradients don't count
            flags, exchange.absent_of_rest = self._rest.average(grads, exchange.reducer.verdict.digest, abort)
            context = context._replace(pending=flags.clone())

        if exchange.whitening.due(frame.steps.count.total - 1):
            exchange.whitening.renew()
        whitened = exchange.whitening.whitened(members.of(grads))

        def compress(part: OwnedSigns) -> None:
            part.compress(whitened, members.of(agreed.coef))

        still = exchange.synchronise(compress, context._replace(missing=missing), agreed.coef)
        exchange.apply(still)
        exchange.whitening.follow()
        if self._rest is not None:
            self._rest.update(self._rest.averages.of_tensors, still, exchange.reducer.flags)
        return exchange.restore_absent()


class OwnedExchange(Exchange):
    """Exchanges matrices with their owners.

    Args:
        frame: Of the optimizer.
        matrices: Its parameters.
        shares: As of ``OwnedSigns``.
        orthogonalise: As of ``MuonUpdate``.
    """

    reducer: OwnedSigns

    def __init__(
        self, frame: Frame, matrices: Matrices, shares: tuple[float, float], orthogonalise: Callable[[Tensor], Tensor]
    ) -> None:
        def update(batches: Sequence[tuple[Batch, Tensor]]) -> None:
            directions = [direction for _, direction in batches]
            for direction, raw in zip(directions, self.whitening.back(directions), strict=True):
                direction.copy_(orthogonalise(raw))

        self.members, layout = matrices.members, matrices.members.layout
        self.compensated = torch.zeros(layout.numel, device=frame.device)
        self.whole = frame.nothing  # the momentum of all owners, while somebody saves or loads it
        self.absent_of_rest: Tensor | None = None
        with_whom = layout, matrices.shapes, frame.ranks.transport
        super().__init__(frame, OwnedSigns(*with_whom, update, shares, self.compensated, self.members.live))
        sizes = [size / max(shape) ** 0.5 for size, shape in zip(matrices.sizes, matrices.shapes, strict=True)]
        self.reducer.scale.copy_(by_block(layout, sizes))
        self.whitening = Whitening(matrices, self.reducer)

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
        self.whole = self.frame.nothing
        self.reducer.synchronise(compress, self.completed(context))
        self.reducer.verdict.absent = self._absent()
        return self.take_verdict(coef)

    def _absent(self) -> Tensor | None:
        """Return of which of all tensors no rank has a gradient: bool [tensors]; None: there are none."""
        of_matrices, of_rest, members = self.reducer.verdict.absent, self.absent_of_rest, self.members
        if of_matrices is None and of_rest is None:
            return None
        found = torch.zeros(len(self.frame.parameters), dtype=torch.bool, device=self.frame.device)
        if of_matrices is not None:
            members.of(found).copy_(of_matrices)
        if of_rest is not None:
            found[len(members.which) :] = of_rest
        return found

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        """Return what is left of gradients, of which each rank has its own, and the momentum, once it is gathered."""
        which = self.members.which
        left = StateTensor("worker_error", "element", self.compensated, of_rank=True, members=which)
        return left, StateTensor("momentum_buffer", "element", self.whole, members=which)

    def settle(self, compressed: bool = True) -> None:
        """Form what is left, and gather the momentum from its owners; all ranks call it."""
        super().settle()
        self.whitening.end()
        with self.frame.steps.whole("a look at the momentum"):
            self.whole = self.reducer.gathered_momentum()

    def resume(self, header: Mapping[str, Any]) -> None:
        self.whole = torch.zeros_like(self.compensated)

    def resumed(self, header: Mapping[str, Any]) -> None:
        self.reducer.take_momentum(self.whole)
        self.reducer.keep_all()
        self.whole = self.frame.nothing
