"""Whitens matrices before they are compressed: what rounding to signs adds is then as large in all directions.

Newton-Schulz makes all singular values alike, small ones too, which are those of noise if that was the same everywhere.
So gradients are multiplied by the inverse root of the momentum's Gram matrix, of the smaller side, and directions by
the root before they are made orthogonal. From time to time owners make both anew, and send the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.owned_signs import OwnedSigns
from ..comm.owners import Shape
from .orthogonal import Matrices, inverse_root, pair, times

EVERY = 100
"""Steps from one renewal to the next; the first come after 1, 2, 4, ... of them. n(n + 1)/2 floats each are sent."""
FOLLOWS = 0.05
"""How much the newest momentum weighs in the mean of Gram matrices."""


def due(step: int) -> bool:
    """Tell whether there is a renewal before a step, counted from 0."""
    return step > 0 and (step % EVERY == 0 or (step < EVERY and step & (step - 1) == 0))


class Stack(NamedTuple):
    """Matrices of one shape, [count, rows, columns], and each: the same objects in every step."""

    whole: Tensor
    each: Sequence[Tensor]

    @classmethod
    def of(cls, count: int, shape: Shape, room: Tensor) -> Stack:
        """Take so many of a line of numbers."""
        whole = room[: count * math.prod(shape)].view(count, *shape)
        return cls(whole, whole.unbind(0))


class Whitening:
    """Whitens what one reducer sends.

    Args:
        matrices: All that are sent.
        reducer: Which sends them.
        dtype: In which gradients are multiplied by what whitens, ``torch.bfloat16`` or ``torch.float32``.

    Attributes:
        due: Tells when to renew.
        whole: Whether there is anything to whiten with, or will be from the next step on.
        grams: Of each batch that this rank owns its whitened momenta's mean Gram matrices, float32 [count, n, n].
        made_of: Of raw momenta, those that it whitens with.
    """

    def __init__(self, matrices: Matrices, reducer: OwnedSigns, dtype: torch.dtype) -> None:
        self._reducer, self._shapes, self.whole = reducer, list(matrices.shapes), False
        self.due = due
        self._alike = [
            [i for i, own in enumerate(self._shapes) if own == shape] for shape in dict.fromkeys(self._shapes)
        ]
        self._batches = reducer.owners.batches(reducer.transport.rank)
        # Of each of the shapes what whitens, in parts, [count, n, n] each; gradients, and those that are whitened.
        self._white = list[Sequence[Tensor]]()
        self._given, self._made = self._stacks(dtype)
        self._back: list[Tensor] = []  # of each of the batches, the inverses, float32 [count, n, n]
        self._followed = False
        sides = [(batch.number, min(batch.shape)) for batch in self._batches]
        self.grams, self.made_of = (
            [torch.zeros(count, n, n, device=reducer.device) for count, n in sides] for _ in range(2)
        )

    def _stacks(self, dtype: torch.dtype) -> tuple[list[Stack], list[Stack]]:
        """Make room; gradients are there for one product, so those of all shapes are in the same memory."""
        shapes = [(len(alike), self._shapes[alike[0]]) for alike in self._alike]
        sizes = [count * math.prod(shape) for count, shape in shapes]
        rooms = (torch.zeros(n, dtype=dtype, device=self._reducer.device) for n in (max(sizes), sum(sizes)))
        one, every = rooms
        given = [Stack.of(*each, one) for each in shapes]
        return given, [Stack.of(*each, x) for each, x in zip(shapes, every.split(sizes), strict=True)]

    def prepare(self, step: int) -> None:
        """Renew where that is due before this step, counted from 0, alike on all ranks; all of them call it."""
        if self.whole and not self._white:
            self._make()
        if step > 0 and (not self.whole or self.due(step)):
            self._renew()

    def whitened(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return gradients as they are compressed: from step to step where they were."""
        if not self.whole:
            return grads
        found = list(grads)
        for own, (white, *less), given, made in zip(self._alike, self._white, self._given, self._made, strict=True):
            there = [(grads[i], each) for i, each in zip(own, given.each, strict=True) if grads[i].numel()]
            if there:
                taken = [g.as_strided(each.shape, each.stride()) for g, each in there]
                torch._foreach_copy_([each for _, each in there], taken)
            times(given.whole, white, made.whole)  # what is absent is whatever was there, which nobody takes
            for part in less:
                made.whole.baddbmm_(*pair(given.whole, part))
            for i, each in zip(own, made.each, strict=True):
                found[i] = each if grads[i].numel() else grads[i]
        return found

    def back(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Return directions [count, rows, columns] of an owner's batches as they were before they were whitened."""
        if not self.whole:
            return list(directions)
        return [times(x, back) for x, back in zip(directions, self._back, strict=True)]

    def follow(self) -> None:
        """Follow the Gram matrices of the momenta that this rank owns."""
        self._followed = True
        for followed, m in zip(self.grams, self._momenta(), strict=True):
            a, b = (m.mT, m) if m.shape[1] >= m.shape[2] else (m, m.mT)
            followed.baddbmm_(a, b, beta=1 - FOLLOWS, alpha=FOLLOWS)

    def _momenta(self) -> list[Tensor]:
        return [batch.of(self._reducer.momentum) for batch in self._batches]

    def _renew(self) -> None:
        """Make anew what whitens, and bring to it what is whitened: momenta, their Gram matrices and residuals."""
        if not self._followed:
            self.follow()  # a checkpoint of one rank has a momentum and no Gram matrix
        # From the old basis to none ...
        raw, before = self.back(self._momenta()), list(map(joined, self._white))
        for made_of, gram in zip(self.made_of, self._raw_grams(), strict=True):
            counts = gram.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
            made_of.copy_(torch.where(counts, gram, 0.0))  # after a gradient that was too large they begin anew
        own = self._make()
        # ... and to the new one.
        for m, each, white in zip(self._momenta(), raw, own, strict=True):
            m.copy_(finite(times(each, white)))
        for gram, made_of, white in zip(self.grams, self.made_of, own, strict=True):
            gram.copy_(both_sides(made_of, white))
        self.turn(self._reducer, before)

    def turn(self, reducer: OwnedSigns, before: Sequence[Tensor]) -> None:
        """Bring what a reducer has left of gradients from the basis ``before`` to the new one."""
        reducer.settle()
        left = reducer.layout.cut(reducer.compensated)
        for k, alike in enumerate(self._alike):
            e = torch.stack([left[i].view(self._shapes[i]) for i in alike]).float()
            white = joined(self._white[k])
            if before:
                back = torch.linalg.inv_ex(before[k])[0]
                white = torch.bmm(back, white) if e.shape[1] >= e.shape[2] else torch.bmm(white, back)
            turned = finite(times(e, white)).flatten(1)
            torch._foreach_copy_([left[i] for i in alike], list(turned.unbind(0)))

    def _raw_grams(self) -> list[Tensor]:
        if not self._back:
            return list(self.grams)
        return [both_sides(gram, back) for gram, back in zip(self.grams, self._back, strict=True)]

    def _make(self) -> list[Tensor]:
        """Make what whitens, and send it to all; return what this rank's batches are whitened with."""
        roots = [inverse_root(each) for each in self.made_of]
        own, self._back = ([root[k] for root in roots] for k in range(2))
        dtype = self._made[0].whole.dtype
        own = [joined(split(symmetric(lower(white), white.shape[-1]), dtype)) for white in own]  # as all multiply by it
        self._white, self.whole = [split(white, dtype) for white in self.gather(own)], True
        return own

    def gather(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return what all owners have made, by shape; all ranks call it."""
        reducer, owners = self._reducer, self._reducer.owners
        at: dict[int, tuple[int, int]] = {}
        longest = 1
        for rank, owned in enumerate(owners.owned):
            ends = [0, *itertools.accumulate(triangle(min(self._shapes[i])) for i in owned)]
            at |= {i: (rank, first) for i, first in zip(owned, ends, strict=False)}
            longest = max(longest, ends[-1])
        sent = torch.zeros(1, longest, device=reducer.device)
        if own:
            line = torch.cat([lower(white).reshape(-1) for white in own])
            sent[0, : len(line)] = line
        rows = sent.new_empty(len(owners.owned), longest)
        reducer.transport.all_gather(rows, sent)
        found = []
        for indices in self._alike:
            n = min(self._shapes[indices[0]])
            each = [rows[at[i][0], at[i][1] : at[i][1] + triangle(n)] for i in indices]
            found.append(symmetric(torch.stack(each), n))
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

    def held(self) -> list[Tensor]:
        """Return what lives from step to step."""
        return [
            *self.grams,
            *self.made_of,
            *(part for parts in self._white for part in parts),
            *self._back,
            *(x.whole for x in (*self._given, *self._made)),
        ]

    def _places(self, line: Tensor) -> list[Tensor]:
        """View in this owner's elements those of its Gram matrices, [count, n*n]."""
        return [batch.of(line).flatten(1)[:, : min(batch.shape) ** 2] for batch in self._batches]


def both_sides(gram: Tensor, side: Tensor) -> Tensor:
    """Return the Gram matrices [count, n, n] of matrices that are multiplied by ``side``."""
    return torch.bmm(torch.bmm(side, gram), side)


def finite(x: Tensor) -> Tensor:
    """Return ``x`` with zeros for what is no number: gradients up to 1e19 are taken, and their products may be none."""
    return torch.nan_to_num(x, 0.0, 0.0, 0.0)


def split(x: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
    """Return numbers in ``dtype`` that add up to ``x``, float32: to 16 bits of it in bfloat16.

    One alone would lose small directions beside large ones, and be no inverse of what the owner multiplies by.
    """
    high = x.to(dtype)
    return (high,) if dtype is torch.float32 else (high, (x - high).to(dtype))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return what ``split`` was given, float32."""
    high, *less = parts
    return sum((part.float() for part in less), high.float())


def triangle(n: int) -> int:
    """Return of how many numbers a symmetric matrix [n, n] is made."""
    return n * (n + 1) // 2


def lower(square: Tensor) -> Tensor:
    """Return those of matrices [count, n, n], row by row: [count, ``triangle(n)``]."""
    i, j = torch.tril_indices(*square.shape[-2:], device=square.device)
    return square[:, i, j]


def symmetric(numbers: Tensor, n: int) -> Tensor:
    """Return the matrices [count, n, n] of which ``lower`` has returned these numbers."""
    i, j = torch.tril_indices(n, n, device=numbers.device)
    square = numbers.new_empty(len(numbers), n, n)
    square[:, i, j] = square[:, j, i] = numbers
    return square
