"""The momentum of 0/1 Adam, which is floats, or the bits of the last synchronisation, of which floats can be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.exchange import FeedbackExchange
from ..core.frame import Frame
from ..core.header import AMOUNT_OF_EACH, FLAG, Field, Fields, each, one_or_each
from ..core.options import Made
from ..core.part import Part
from ..triton_kernels import Coef, rebuild_momentum
from ..triton_kernels.headers import Word
from ..triton_kernels.nouns import Coefficients
from .freezing import denominator
from .moments import MomentBuffers


class BitMomentum(Part):
    """Momentum between two steps: where all workers share a variance, bits and scales after a round of bits.

    Where each has its own it is floats.

    Args:
        frame: Of the optimizer.
        moments: In which momentum is floats.
        exchange: In which it is bits.

    Attributes:
        as_floats: Whether it is floats.
        entered: Updates that have entered each tensor's v: float64 [tensors].
        mean_sq: Each tensor's mean of v, float64 [tensors].
        waits: Whether tensors without a variance wait for one; else they would move.
        floored: Whether a share of ``mean_sq`` is added to v in denominators of rounds of bits.
        sent_scale: Scales of the bits that have become floats, float32 [B].
    """

    header_fields: ClassVar[Fields] = {
        "floats": Field(FLAG),
        "entered": Field(AMOUNT_OF_EACH, one_per="updates"),
        "summed": Field(AMOUNT_OF_EACH, one_per="tensor"),
    }

    def __init__(self, frame: Frame, moments: MomentBuffers, exchange: FeedbackExchange, waits: bool) -> None:
        self._frame, self._moments, self._exchange = frame, moments, exchange
        tensors, device = max(1, len(frame.layout.sizes)), frame.device
        self.as_floats, self.waits, self.floored = True, waits, frame.options.coefficient_floor > 0
        self.entered = torch.zeros_like(frame.steps.of_each)
        self.mean_sq = torch.zeros(tensors, dtype=torch.float64, device=device)
        self._summed = torch.ones(tensors, device=device)  # steps of the round whose bits the momentum is
        self._summed_alike: int | None = 1  # that of all tensors, where the host knows it
        self.sent_scale = torch.zeros(frame.layout.n_blocks, device=device)
        moments.watch()

    # ---------------------------------------------------------------- the variance that divides it

    @property
    def made(self) -> Made:
        """Return what coefficients are made of while v stays: with denominators sqrt(v + share*mean(v)).

        What has no variance yet does not move.
        """
        return Made(self._frame.steps.of_each, self.entered, renews=False, mean_sq=self.mean_sq)

    def table(self, renews: bool) -> Tensor:
        """Return the coefficients of the coming step; ``renews``: it renews v, else that of the last renewal stays."""
        frame = self._frame
        made = Made(frame.steps.of_each, self.entered, renews=True) if renews else self.made
        return frame.coefficients(frame.hyper.taken, made)

    def sum_variance(self) -> None:
        """Sum v up as renewals do while they go."""
        blocks = self._frame.layout.n_blocks
        self._moments.squares = self._moments.exp_avg_sq.view(blocks, -1).sum(1, dtype=torch.float64)
        self.note_means()

    def note_means(self) -> None:
        """Make ``mean_sq`` of the sums that a renewal has written, over each tensor's live elements."""
        frame, sums = self._frame, self._moments.squares
        assert sums is not None
        owner = frame.places.block_tensor.long()
        total = torch.zeros_like(self.mean_sq).index_add_(0, owner, sums)
        count = torch.zeros_like(total).index_add_(0, owner, frame.live.numel.double())
        self.mean_sq = total / count.clamp(min=1)

    # ---------------------------------------------------------------- bits and floats

    def make_floats(self, coef: Tensor, renews: bool) -> None:
        """Rebuild the momentum of the last synchronisation (line 9), in terms of what the coming step divides it by.

        Bits have no zero: where v is next to nothing, as in rows of an embedding that nobody has looked up, they leave
        noise as large as other coordinates' momentum. Before a round of bits it is that noise times the floored
        denominator, as ``coef`` has it; before a renewal, which divides by Adam's own, eps in the extreme, times that.
        """
        if self.as_floats:
            return
        frame, moments, precondition = self._frame, self._moments, self._frame.options.numerics.precondition
        layout, exp_avg = frame.layout, moments.exp_avg
        if renews:
            coef = frame.coefficients.fresh(frame.hyper.taken, Made(frame.steps.of_each, self.entered, renews=False))
        v, inside = moments.exp_avg_sq if precondition else None, self.floored and not renews
        awaited = self.mean_sq if self.waits else None
        self.rebuild(exp_avg, coef, self._summed, awaited, v, inside)
        if renews and self.floored and not precondition:  # too rare to have a kernel
            floored = frame.coefficients.fresh(frame.hyper.taken, self.made)
            for i, size in enumerate(layout.sizes):
                part = slice(layout.offset(i), layout.offset(i) + size)
                v = moments.exp_avg_sq[part]
                exp_avg[part] *= denominator(v, coef[i], False) / denominator(v, floored[i], True)
        self.as_floats = True

    def rebuild(
        self,
        out: Tensor,
        coef: Tensor,
        summed: Tensor | None = None,
        awaited: Tensor | None = None,
        exp_avg_sq: Tensor | None = None,
        inside: bool = False,
    ) -> None:
        """Turn bits into floats; of the bits only ``stats`` wants to know any further how large they were."""
        frame, reducer = self._frame, self._exchange.reducer
        table = (frame.coefficients.renewal() or Coefficients.of(coef))._replace(table=coef)
        more = (exp_avg_sq, inside, table, out, self.sent_scale)
        rebuild_momentum(frame.places, reducer.bits, reducer.scale, summed, awaited, *more)

    def shared(self, coef: Tensor) -> Tensor:
        """Return coefficients for momentum whose bits stand for a sum over several steps: beta1 over their number."""
        if self.as_floats or self._summed_alike == 1:
            return coef
        share = coef.clone()
        share[:, Coef.BETA1] /= self._summed
        return share

    def became_bits(self, steps: int, hold: Tensor | None) -> None:
        """Note that it is bits, a sum of so many steps, but for tensors without a gradient, and a step held back."""
        self.as_floats, absent = False, self._frame.absent
        if self._summed_alike == steps:
            return
        summed = torch.full_like(self._summed, steps)
        if absent is not None:
            summed = torch.where(absent, self._summed, summed)
        self._summed = summed if hold is None else torch.where(hold == 0, summed, self._summed)
        self._summed_alike = steps if absent is None and hold is None else None

    def of_parameter(self, i: int) -> Tensor:
        """Return that of parameter ``i``, float32 of its shape."""
        frame, moments = self._frame, self._moments
        at = frame.layout.offset(i)
        if self.as_floats:
            return frame.parameters.shaped(moments.exp_avg, i, at).clone()
        part = frame.parameters.shaped(self._exchange.reducer.result(), i, at) / self._summed[i]
        if self.waits:
            part = part * (self.mean_sq[i] > 0)
        if not frame.options.numerics.precondition:
            return part
        k = frame.coefficients.fresh(frame.hyper.taken, self.made)[i]
        return part * denominator(frame.parameters.shaped(moments.exp_avg_sq, i, at), k, self.floored)

    # ---------------------------------------------------------------- a part of an algorithm

    def held(self) -> Sequence[Tensor]:
        return self.entered, self.mean_sq, self._summed, self.sent_scale

    def plain_state(self) -> dict[str, Any]:
        return {"floats": self.as_floats, "entered": one_or_each(self.entered), "summed": one_or_each(self._summed)}

    def resume(self, header: Mapping[str, Any]) -> None:
        of_each = self._frame.steps.of_each
        if not header.get("lines"):  # AdamW's, or of a run in which nothing trained
            self.entered = of_each.clone()
            return
        self.as_floats = header["floats"]
        self.entered = torch.minimum(each(header["entered"], self.entered), of_each)
        self._summed, self._summed_alike = each(header["summed"], self._summed), None

    def residual_over(self, renewals_alone: bool) -> float:
        """Return the norm of the workers' residuals over that of the last update in bits; waits for the device.

        ``renewals_alone``: whether there was none in bits yet.
        """
        reducer = self._exchange.reducer
        sent = (self.sent_scale.double().square() * reducer.live.numel).sum().sqrt()
        if self.as_floats and sent > 0:
            errors = reducer.parts[0].arrived_words[:, Word.SIGNAL].view(torch.float32).double()
            return float(errors.square().mean().sqrt() / sent)
        return 0.0 if renewals_alone else reducer.residual_ratio()
