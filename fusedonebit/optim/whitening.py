"""Whitens matrices before they are compressed: what rounding to signs adds is then as large in all directions.

Newton-Schulz makes all singular values alike, small ones too, which are those of noise if that was the same everywhere.
So gradients are multiplied by the inverse root of the momentum's Gram matrix, of the smaller side, and directions by
the root before they are made orthogonal. From time to time owners make both anew, and send the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.owned_signs import OwnedSigns
from .orthogonal import Matrices, gram, inverse_root, times

EVERY = 100
"""Steps from one renewal to the next; the first come after 1, 2, 4, ... of them. A float of n*n each is sent."""
FOLLOWS = 0.05
"""How much the newest momentum weighs in the mean of Gram matrices."""


class Whitening:
    """Whitens what one reducer sends.

    Args:
        matrices: All that are sent.
        reducer: Which sends them.

    Attributes:
        whole: Whether there is anything to whiten with, or will be from the next step on.
        grams: Of each batch that this rank owns the mean of its momenta's Gram matrices, float32 [count, n, n].
        made_of: Those that it whitens with.
    """

    def __init__(self, matrices: Matrices, reducer: OwnedSigns) -> None:
        self._reducer, self._shapes, self.whole = reducer, list(matrices.shapes), False
        self._alike = [
            [i for i, own in enumerate(self._shapes) if own == shape] for shape in dict.fromkeys(self._shapes)
        ]
        self._batches = reducer.owners.batches(reducer.transport.rank)
        self._white: list[Tensor] = []  # of each of the shapes, float32 [count, n, n]
        self._back: list[Tensor] = []  # of each of the batches, the inverses
        self._followed = False
        sides = [(batch.number, min(batch.shape)) for batch in self._batches]
        self.grams, self.made_of = (
            [torch.zeros(count, n, n, device=reducer.device) for count, n in sides] for _ in range(2)
        )

    def prepare(self, step: int) -> None:
        """Renew where that is due before this step, counted from 0, alike on all ranks; all of them call it."""
        if self.whole and not self._white:
            self._make()
        if step > 0 and (not self.whole or step % EVERY == 0 or (step < EVERY and step & (step - 1) == 0)):
            self._renew()

    def whitened(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return gradients, float32, as they are compressed."""
        if not self.whole:
            return grads
        found = list(grads)
        for own, white in zip(self._alike, self._white, strict=True):
            shape = self._shapes[own[0]]
            nothing = white.new_zeros(()).expand(shape)
            given = [grads[i].as_strided(shape, (shape[1], 1)) if grads[i].numel() else nothing for i in own]
            for i, made in zip(own, times(torch.stack(given).float(), white).unbind(0), strict=True):
                found[i] = made if grads[i].numel() else grads[i]
        return found

    def back(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Return directions [count, rows, columns] of an owner's batches as they were before they were whitened."""
        return (
            [times(x, back) for x, back in zip(directions, self._back, strict=True)] if self.whole else list(directions)
        )

    def follow(self) -> None:
        """Follow the Gram matrices of the momenta that this rank owns."""
        self._followed = True
        for followed, momenta in zip(self.grams, self.back(self._momenta()), strict=True):
            followed.lerp_(gram(momenta), FOLLOWS)

    def _momenta(self) -> list[Tensor]:
        return [batch.of(self._reducer.momentum) for batch in self._batches]

    def _renew(self) -> None:
        """Make anew what whitens, and bring to it momenta and residuals."""
        if not self._followed:
            self.follow()  # of a rank alone the momentum alone is there
        raw, before = self.back(self._momenta()), self._white
        for ours, newest in zip(self.made_of, self.grams, strict=True):
            ours.copy_(newest)
        own = self._make()
        for m, each, white in zip(self._momenta(), raw, own, strict=True):
            m.copy_(times(each, white))
        self._reducer.settle()
        left = self._reducer.layout.cut(self._reducer.compensated)
        for k, alike in enumerate(self._alike):
            e = torch.stack([left[i].view(self._shapes[i]) for i in alike])
            e = times(e, torch.linalg.inv_ex(before[k])[0]) if before else e
            turned = times(e, self._white[k]).flatten(1)
            torch._foreach_copy_([left[i] for i in alike], list(turned.unbind(0)))

    def _make(self) -> list[Tensor]:
        """Make what whitens, and send it to all; return what this rank's batches are whitened with."""
        roots = [inverse_root(each) for each in self.made_of]
        own, self._back = ([root[k] for root in roots] for k in range(2))
        self._white, self.whole = self._gathered(own), True
        return own

    def _gathered(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return what all owners have made, by shape; all ranks call it."""
        reducer, owners = self._reducer, self._reducer.owners
        at: dict[int, tuple[int, int]] = {}
        longest = 1
        for rank, owned in enumerate(owners.owned):
            ends = [0, *itertools.accumulate(min(self._shapes[i]) ** 2 for i in owned)]
            at |= {i: (rank, first) for i, first in zip(owned, ends, strict=False)}
            longest = max(longest, ends[-1])
        sent = torch.zeros(1, longest, device=reducer.device)
        if own:
            line = torch.cat([white.reshape(-1) for white in own])
            sent[0, : len(line)] = line
        rows = sent.new_empty(len(owners.owned), longest)
        reducer.transport.all_gather(rows, sent)
        found = []
        for indices in self._alike:
            n = min(self._shapes[indices[0]])
            each = [rows[at[i][0], at[i][1] : at[i][1] + n * n].view(n, n) for i in indices]
            found.append(torch.stack(each))
        return found

    def gathered(self, grams: Sequence[Tensor]) -> Tensor:
        """Return Gram matrices of all owners, n*n elements each at the first of its matrix's: float32 [P]."""
        line = torch.zeros_like(self._reducer.momentum)
        for place, each in zip(self._places(line), grams, strict=True):
            place.copy_(each.flatten(1))
        return self._reducer.of_all(line)

    def resume(self, grams: Tensor, made_of: Tensor) -> None:
        """Take this owner's part of what ``gathered`` returned; momenta and residuals are whitened with the second."""
        for ours, whole in ((self.grams, grams), (self.made_of, made_of)):
            for own, place in zip(ours, self._places(self._reducer.of_owner(whole)), strict=True):
                own.copy_(place.view(own.shape))
        self.whole, self._followed, self._white, self._back = True, True, [], []

    def _places(self, line: Tensor) -> list[Tensor]:
        """View in this owner's elements those of its Gram matrices, [count, n*n]."""
        return [batch.of(line).flatten(1)[:, : min(batch.shape) ** 2] for batch in self._batches]
