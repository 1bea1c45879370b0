"""The number of steps that this rank's user has taken, which messages carry to other ranks.

A count of ``step()`` calls would be equal by construction wherever each call sends a message: a rank that has left
one out pairs its next call with the others'. Sets of gradients are counted instead. A set counts once: in the step
that consumes it, or when ``zero_grad()`` throws it away and the next step consumes another, for then this rank has
skipped one. A step on gradients that an earlier step has consumed already does not count: this rank has repeated
that step.

Sets are told apart by their tensors and those tensors' version counters. A step looks at all of them: the first may be
an old one, of a parameter that was not used, beside new ones of others.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .sharding import is_dtensor, local

_Mark = tuple[weakref.ref[Tensor], int]
_GRAD, _VERSION = map(operator.attrgetter, ("grad", "_version"))


class StepCount:
    """Counts sets of gradients of ``owners``; on ``device`` where a CUDA graph may be captured."""

    def __init__(self, owners: Sequence[Tensor], device: torch.device | None) -> None:
        self.total = self._before = 0  # steps so far, those of this rank's user
        self._known: _Mark | None = _mark(_first(owners))  # of gradients that a step or zero_grad() has dealt with
        self._all = 0  # of the gradients that the last step has used
        self._consumed = False
        self._dropped = False
        self._unsure = False
        self.added_up = False  # whether this step's gradients were added to those that the last step has used
        self.replays = 0  # those of the steps that graphs have replayed
        # The number of the coming step, which a CUDA graph reads, and the op that ends a step counts on: int32 [].
        self.of_replays = None if device is None else torch.ones((), dtype=torch.int32, device=device)
        self._on_device = 1  # what the host knows to be there

    @property
    def coming(self) -> int:
        """Return what ``total`` will be in a step on the gradients that a backward pass is making."""
        return self.total + 1 + self._dropped

    @property
    def number(self) -> int | Tensor:
        """Return the number of the step that has begun, in messages: where it lies, int32 [], if on the device."""
        if self.of_replays is not None:
            return self.of_replays
        return self.total if self.total < 2**31 else as_word(self.total)

    def take(self, owners: Sequence[Tensor], given: Sequence[Tensor], compiled: bool = False) -> bool:
        """Count the step that begins; return whether it uses gradients that the last one has used.

        ``given`` are the gradients. Where ``compiled``, a compiler has passed them: they may not be ``owners``'.
        """
        first, known = _first(owners), self._all
        sharded = is_dtensor(first)
        looks = compiled or sharded  # what is given of a DTensor is another object in each step
        grads = [g for g in map(_GRAD, owners) if g is not None] if looks else given
        self._all = _signature(grads, sharded)
        mark = _mark(first, sharded)
        fresh = first is not None and not self._is_known(mark)
        repeats = self._consumed and not (self._unsure or first is None or fresh) and known == self._all
        # One write since then, and by a backward pass: whoever clears gradients in place has written twice.
        known_grad, version = (self._known if self._consumed and not looks else None) or (lambda: None, 0)
        self.added_up = first is not None and known_grad() is first and first._version == version + 1
        self._before = self.total
        # Who clears what is bad and takes part with nothing has skipped none.
        self.total += (not repeats) + (self._dropped and fresh)
        self._known, self._consumed, self._dropped = mark, True, False
        self._unsure = compiled and not _same_memory(owners, given)
        if self.of_replays is not None:
            self._tell_device(self.total)
        return repeats

    def advance(self) -> Tensor | None:
        """Take note that a step ends; return where the number lies that it counts on, int32 [], if anywhere."""
        self._on_device += 1
        return self.of_replays

    def clear(self, owners: Sequence[Tensor]) -> None:
        """Note that gradients are about to be thrown away; several times between two steps count once."""
        grad = _first(owners)
        if grad is not None and not self._unsure and not self._is_known(_mark(grad)):
            self._dropped = True

    def cleared(self, owners: Sequence[Tensor]) -> None:
        """Note that they were; gradients that are zeros now are nothing new."""
        self._known = _mark(_first(owners))
        self._consumed = self._unsure = False

    def forget(self) -> None:
        """Judge no gradients: a step has raised, or a graph may have written them."""
        self._unsure = True

    def fail(self) -> None:
        """Count the step that this rank could not take, of which all ranks have heard, as one."""
        self.total = self._before + 1
        self._tell_device(self.total + 1)

    def undo(self, before: dict[str, Any]) -> None:
        """Go back to what was ``before`` the last ``take``: its step was none, and nobody has heard of it."""
        vars(self).update({name: value for name, value in before.items() if name != "_on_device"})
        self._tell_device(self.total + 1)

    def capture(self) -> Tensor:
        """Return the number of the step that is being captured, in each replay another: int32 [], on the device."""
        assert self.of_replays is not None  # allocated before the capture, or each replay would fill it
        self.forget()
        self._on_device -= 1  # the end of a capture is none of a step
        return self.of_replays

    def replayed(self, steps: int) -> None:
        """Take over what replays have counted."""
        self.total += steps
        self.replays += steps
        self._on_device += steps
        self.forget()

    def resume(self, total: int) -> None:
        """Take up a checkpoint's count."""
        self.total, self._dropped = total, False
        self._tell_device(total + 1)

    def _tell_device(self, number: int) -> None:
        if self.of_replays is not None and number != self._on_device:
            self._on_device = -1  # until it is there
            self.of_replays.fill_(as_word(number))
        self._on_device = number

    def __getstate__(self) -> dict[str, Any]:
        """Leave out weak references, which can't be copied: of a copy's gradients nothing is known."""
        return vars(self) | {"_known": None, "_unsure": True}

    def _is_known(self, mark: _Mark | None) -> bool:
        if mark is None or self._known is None:
            return False
        return self._known[0]() is mark[0]() and self._known[1] == mark[1]


def as_word(number: int) -> int:
    """Return ``number`` modulo 2^32 as an int32."""
    return (number + 2**31) % 2**32 - 2**31


def _first(owners: Sequence[Tensor]) -> Tensor | None:
    return next((p.grad for p in owners if p.grad is not None), None)


def _mark(grad: Tensor | None, sharded: bool = True) -> _Mark | None:
    # Tensors made in inference mode have no version: each counts as new.
    if grad is None or grad.is_inference():
        return None
    return weakref.ref(grad), (local(grad) if sharded else grad)._version


def _signature(grads: Sequence[Tensor], sharded: bool) -> int:
    """Return a number that changes when any gradient does."""
    parts = [local(g) for g in grads] if sharded else grads
    try:
        versions = tuple(map(_VERSION, parts))
    except RuntimeError:  # tensors made in inference mode have none
        versions = ()
    return hash((tuple(map(id, grads)), versions))


def _same_memory(owners: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    for p, g in zip(owners, given, strict=True):
        if g.numel():
            return p.grad is not None and local(p.grad).data_ptr() == g.data_ptr()
    return True
