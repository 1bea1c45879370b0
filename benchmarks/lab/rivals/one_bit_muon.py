"""Muon (Jordan, 2024) whose matrices travel at a bit each way: where compression may lie around Newton-Schulz.

EF21 (Richtarik et al., 2021) sends what a tracker lacks of a value, in place of the value and what was lost of it
before; around Muon arXiv 2607.29674 has it, up only, and both ways, down of the parameters (EF21-P). All else that is
trained is AdamW's, on exact means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from ..setting import Params, Setting, between
from .bits import packed_bytes
from .frame import Adam, Rival

MOMENTUM, COEFFICIENTS, STEPS, NS_EPS = 0.95, (3.4445, -4.7750, 2.0315), 5, 1e-7
"""torch.optim.Muon's."""
Way = Literal["exact", "feedback", "feedback-up", "ef21", "ef21-up", "ef21-p", "vote"]
Scale = Literal["tensor", "rows"]


class OneBitMuon(Rival):
    """Muon for matrices between the first and the last, as the lab's uncompressed one; signs are scaled.

    Args:
        way: "exact": nothing is compressed. "feedback": workers' Nesterov momenta and their mean with what was lost
            before, as 1-bit Adam; "-up": the mean exactly. "ef21": trackers of the momenta, and one of the update that
            their mean's orthogonalisation is; "-up": that exactly; "-p": that with what was lost of it before, which is
            a tracker of the parameters. "vote": signs of what each worker orthogonalises.
        scale: Of signs, the mean magnitude: one for a matrix, or of rows times columns.
        normalised: Whether each worker's momentum is divided by its norm before.
        lead: How much of the direction is the newest gradient, beside Nesterov momentum.
        trained: Which parameters are these matrices; None: those ``between``.
    """

    def __init__(
        self,
        params: Params,
        of: Setting,
        way: Way,
        scale: Scale = "tensor",
        normalised: bool = False,
        lead: float = 1 - MOMENTUM,
        trained: Sequence[int] | None = None,
    ) -> None:
        later = {} if lead == 1 - MOMENTUM else {"lead": lead}  # runs before had none to record
        super().__init__(params, of, way=way, scale=scale, normalised=normalised, **later)
        self.way, self.scale, self.normalised, self.lead = way, scale, normalised, lead
        own = between(self._models[0]) if trained is None else trained
        self.matrices = [(self.slices[i], self.shapes[i].numel() // self.shapes[i][0]) for i in own]
        self.rest = torch.ones_like(self.x, dtype=torch.bool)
        for part, _ in self.matrices:
            self.rest[part] = False
        self.adam = Adam(self.x[self.rest])
        # Of workers: momenta, and what was lost of them or trackers; of owners: the same of the mean, and of updates.
        self.momenta, self.workers_own = (self.x.new_zeros(self.workers, len(self.x)) for _ in range(2))
        self.mean, self.update = (torch.zeros_like(self.x) for _ in range(2))

    def move(self, gradients: Tensor) -> None:
        rest = self.x[self.rest]
        self.adam.step(rest, self.wires.all_reduce(gradients[:, self.rest]) / self.workers, self.lr, self.weight_decay)
        self.x[self.rest] = rest
        self.momenta.lerp_(gradients, 1 - MOMENTUM)
        nesterov = gradients.lerp(self.momenta, 1 - self.lead)
        for part, columns in self.matrices:
            momenta = nesterov[:, part].unflatten(1, (-1, columns))
            rows = momenta.shape[1]
            kept, rate = 1 - self.lr * self.weight_decay, self.lr * 0.2 * max(rows, columns) ** 0.5
            moved = rate * self._update(momenta, part)
            if self.way == "ef21-p":
                lost = self.update[part].view(rows, columns)
                lost.mul_(kept).add_(moved)
                moved = self._signs(lost)
                lost -= moved
            self.x[part].mul_(kept).sub_(moved.reshape(-1))
            self._count(rows, columns)

    def _update(self, nesterov: Tensor, part: slice) -> Tensor:
        """Return the direction in which a matrix moves, [rows, columns], of all workers' momenta [W, rows, columns]."""
        if self.normalised:
            nesterov = nesterov / nesterov.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-30)
        shape = nesterov.shape[1:]
        if self.way == "exact":
            return orthogonal(nesterov.mean(0))
        if self.way == "vote":
            votes = torch.stack([orthogonal(each).sign() for each in nesterov]).sum(0).sign()
            return votes / max(shape) ** 0.5
        own, mean = self.workers_own[:, part].view(nesterov.shape), self.mean[part].view(shape)
        if self.way.startswith("feedback"):
            own += nesterov
            sent = self._signs(own)
            own -= sent
            if self.way.endswith("up"):
                return orthogonal(sent.mean(0))
            mean += sent.mean(0)
            served = self._signs(mean)
            mean -= served
            return orthogonal(served)
        sent = self._signs(nesterov - own)
        own += sent
        mean += sent.mean(0)
        found = orthogonal(mean)
        if self.way != "ef21":
            return found
        update = self.update[part].view(shape)
        update += self._signs(found - update)
        return update

    def _signs(self, x: Tensor) -> Tensor:
        """Return signs times scales, of matrices [..., rows, columns]."""
        size = x.abs()
        if self.scale == "tensor":
            return x.sign() * size.mean((-2, -1), keepdim=True)
        rows, columns = size.mean(-1, keepdim=True), size.mean(-2, keepdim=True)
        return x.sign() * rows * (columns / columns.mean(-1, keepdim=True).clamp(min=1e-30))

    def _count(self, rows: int, columns: int) -> None:
        """Count what travels of a matrix, up to its owner and down to all: signs and scales, or floats.

        An update that was orthogonalised is in bfloat16.
        """
        scales = 4 * (1 if self.scale == "tensor" else rows + columns)
        signs, floats = packed_bytes(rows * columns, 1) + scales, 4 * rows * columns
        up = floats if self.way == "exact" else signs
        down = {"exact": floats, "feedback-up": floats, "ef21-up": floats // 2}.get(self.way, signs)
        for nbytes in (up, down):
            self.wires.all_gather(torch.empty(1, nbytes, dtype=torch.uint8))


class MuonOnHalves(OneBitMuon):
    """Muon on gradients that were averaged in bfloat16, as ``BFloat16`` does for AdamW."""

    def __init__(self, params: Params, of: Setting, trained: Sequence[int] | None = None) -> None:
        super().__init__(params, of, way="exact", trained=trained)

    def move(self, gradients: Tensor) -> None:
        mean = self.wires.all_reduce(gradients.to(torch.bfloat16).div_(self.workers)).to(gradients.dtype)
        super().move(mean.expand_as(gradients))


def orthogonal(x: Tensor) -> Tensor:
    """Return a matrix near the orthogonal one nearest to ``x`` [rows, columns], in torch's Newton-Schulz steps."""
    found: Any = _zeropower_via_newtonschulz(x, COEFFICIENTS, STEPS, NS_EPS)
    return found.to(x.dtype)
