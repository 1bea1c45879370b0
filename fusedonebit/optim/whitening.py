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
from .orthogonal import Matrices

EVERY = 100
"""Steps from one renewal to the next; the first come after 1, 2, 4, ... of them. A float of n*n each is sent."""
LEAST = 1e-4
"""Of the mean square of singular values, what is added to each."""
FOLLOWS = 0.05
"""How much the newest momentum weighs in the mean of Gram matrices."""


class Whitening:
    """Whitens what one reducer sends.

    Args:
        matrices: All that are sent.
        reducer: Which sends them.

    Attributes:
        whole: Whether there is anything to whiten with.
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
        self._grams = [torch.zeros(count, n, n, device=reducer.device) for count, n in sides]

    def due(self, step: int) -> bool:
        """Tell whether a renewal comes before this step, counted from 0, alike on all ranks."""
        return step > 0 and (not self.whole or step % EVERY == 0 or (step < EVERY and step & (step - 1) == 0))

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
        for followed, momenta in zip(self._grams, self.back(self._momenta()), strict=True):
            followed.lerp_(gram(momenta), FOLLOWS)

    def _momenta(self) -> list[Tensor]:
        return [batch.of(self._reducer.momentum) for batch in self._batches]

    def renew(self) -> None:
        """Make anew what whitens, and bring to it momenta and residuals; all ranks call it."""
        if not self._followed:
            self.follow()  # of a checkpoint the momentum alone is there
        roots = [inverse_root(each) for each in self._grams]
        for m, raw, (white, _) in zip(self._momenta(), self.back(self._momenta()), roots, strict=True):
            m.copy_(times(raw, white))
        self._back = [back for _, back in roots]
        before, self._white, was = self._white, self._gathered([white for white, _ in roots]), self.whole
        self._reducer.settle()
        left = self._reducer.layout.cut(self._reducer.compensated)
        for k, own in enumerate(self._alike):
            e = torch.stack([left[i].view(self._shapes[i]) for i in own])
            e = times(e, torch.linalg.inv_ex(before[k])[0]) if was else e
            turned = times(e, self._white[k]).flatten(1)
            torch._foreach_copy_([left[i] for i in own], list(turned.unbind(0)))
        self.whole = True

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

    def end(self) -> None:
        """Let momenta and residuals be what they are without; the next step renews."""
        if not self.whole:
            return
        for m, raw in zip(self._momenta(), self.back(self._momenta()), strict=True):
            m.copy_(raw)
        left = self._reducer.layout.cut(self._reducer.compensated)
        for own, white in zip(self._alike, self._white, strict=True):
            e = torch.stack([left[i].view(self._shapes[i]) for i in own])
            raw = times(e, torch.linalg.inv_ex(white)[0]).flatten(1)
            torch._foreach_copy_([left[i] for i in own], list(raw.unbind(0)))
        self.whole, self._followed, self._white, self._back = False, False, [], []
        for followed in self._grams:
            followed.zero_()


def times(x: Tensor, side: Tensor) -> Tensor:
    """Multiply matrices [count, rows, columns] by ``side`` [count, n, n] of their smaller side."""
    return torch.bmm(x, side) if x.shape[1] >= x.shape[2] else torch.bmm(side, x)


def gram(x: Tensor) -> Tensor:
    """Return the Gram matrices of the smaller side of ``x`` [count, rows, columns]: [count, n, n]."""
    return torch.bmm(x.mT, x) if x.shape[1] >= x.shape[2] else torch.bmm(x, x.mT)


def inverse_root(square: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse roots and the roots of Gram matrices [count, n, n]; of nothing the identity."""
    values, q = torch.linalg.eigh(square)
    mean = values.mean(-1, keepdim=True)
    values = torch.where(mean > 0, values.clamp(min=0) + LEAST * mean, 1.0)
    root = values.sqrt()[:, None]
    return (q / root) @ q.mT, (q * root) @ q.mT
