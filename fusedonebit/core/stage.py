"""What is done in the steps of a stage; an algorithm has one, or several, of which one at a time takes the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..comm import Flag, LocalTransport
from .exchange import Exchange
from .frame import Frame
from .options import Made
from .part import Part
from .resolved import Options
from .scaling import NO_SCALE, Agreed


class Stage(Part):
    """Skeleton of a stage, whose ``step`` exchanges gradients, or what is made of them, and updates parameters.

    Args:
        frame: Of the optimizer.

    Attributes:
        options: The frame's.
        exchange: What sends and receives what it compresses; None: it compresses nothing.
        weighs: How many columns of coefficients weigh gradients, see ``scale_coefficients``.
        averages_gradients: Whether the coming step uses averages of the ranks' gradients; else DDP must leave them
            alone.
        can_capture: Whether the coming step could be captured in a CUDA graph.
        renews: Whether its own kernels renew the coefficients and count the step, so that no extra launch does.
    """

    options: Options
    exchange: Exchange | None = None
    weighs: int = 1
    averages_gradients: bool = False
    can_capture: bool = False
    renews: bool = False

    def __init__(self, frame: Frame) -> None:
        self.frame, self.options = frame, frame.options

    def table(self) -> Tensor:
        """Return the coefficients of the coming step, float32 [tensors, columns of ``Coef``]."""
        frame = self.frame
        return frame.coefficients(frame.hyper.taken, Made(frame.steps.of_each))

    def step(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Exchange with the other ranks and update the parameters.

        Args:
            grads: This rank's, one of each tensor; empty where there is none.
            coef: Coefficients, as ``table`` has returned them.
            abort: Whether this rank can't take the step: then none does.

        Returns:
            The step's flags, int32 [1]; where any is set nothing has moved.
        """
        raise NotImplementedError

    def agree(self, grads: Sequence[Tensor], coef: Tensor, alone: bool = False) -> Agreed:
        """Agree with all ranks on the factor of gradients and on skipping; ``alone``: this rank decides for itself."""
        frame, scale, most = self.frame, self.frame.loss_scale, self.options.max_grad_norm
        if scale is NO_SCALE and most is None:
            return Agreed(coef)
        exchange, how = self.exchange, dict[str, Any]()
        transport = LocalTransport() if alone else frame.ranks.transport
        if exchange is not None:
            how = {"largest": exchange.reducer.largest_gradient}
            how |= {} if alone else {"earlier": exchange.lost, "digest": exchange.reducer.verdict.digest}
        return frame.scaling.agree(grads, coef, scale, most, transport, frame.ranks.model, self.weighs, **how)

    @property
    def digest(self) -> Tensor | None:
        """Return checksums of what all ranks have received alike, which they compare when they next meet: int64 [n].

        None where nobody does.
        """
        return None if self.exchange is None else self.exchange.reducer.verdict.digest

    def known(self, flags: Tensor) -> Tensor | int:
        """Return the step's flags, or their value where the host knows it."""
        return flags

    def describe(self, flag: Flag) -> str:
        """Return details of why a step was skipped."""
        assert self.exchange is not None
        return self.exchange.describe()

    def check_repeated(self) -> None:
        """Raise RuntimeError if a step that this rank repeats can't tell the others of it."""

    def check_capture(self) -> None:
        """Raise RuntimeError if the coming step can't be captured in a CUDA graph, for a reason of this stage's own."""

    def drop_averages(self) -> None:
        """Throw away, on all ranks or on none, what DDP has averaged. ``zero_grad`` then drops the gradients."""
