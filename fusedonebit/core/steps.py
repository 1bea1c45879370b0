"""All that counts an optimizer's steps, and what becomes of one that an exception ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..comm import CollectiveError
from .interrupts import Whole
from .outcome import Outcomes
from .step_count import StepCount


class Steps:
    """Counts steps: as this rank's user takes them, as they end, and by tensor, on the device.

    A step that fails before it has begun to change anything is none: what it has counted is taken back. After that
    nobody goes on from what may be half done.

    Args:
        owner: What the optimizer is called.
        params: Its parameters.
        device: Where they lie.
        alone: Whether no other rank has a part in its steps.
        nonfinite: As of ``Outcomes``.
        capturable: Whether CUDA graphs may capture steps.

    Attributes:
        count: Of sets of gradients; the number that messages carry.
        outcomes: How steps have ended, as far as the host knows.
        updates: Of all steps, those that were not skipped: int64 [].
        of_each: Those of each tensor, in which some rank had a gradient of it: float64 [tensors], as torch's are.
        number: That of the step under way, in messages; int32 [] where it lies on the device.
        begun: Whether the stage of the coming step was entered.
        changing: Whether something is being changed that half done is no state to go on from.
        captured: Whether a CUDA graph captures the step under way.
        just_loaded: Whether a checkpoint was loaded, and no step was taken since.
        broken: Why nobody goes on from here; empty: it can.
    """

    def __init__(
        self, owner: str, params: Sequence[Tensor], device: torch.device, alone: bool, nonfinite: str, capturable: bool
    ) -> None:
        self._owner, self._device, self._alone = owner, device, alone
        self._how = nonfinite, capturable
        self.just_loaded = False
        self.count = StepCount(params, device if capturable else None)
        self.allocate(len(params))
        self.begin_anew()

    def allocate(self, tensors: int) -> None:
        """Count updates, of so many tensors, from 0."""
        self.updates = torch.zeros((), dtype=torch.int64, device=self._device)
        self.of_each = torch.zeros(tensors, dtype=torch.float64, device=self._device)  # exact up to 2^53

    def begin_anew(self) -> None:
        """Take note that no step was taken, and that nothing is half done."""
        nonfinite, capturable = self._how
        self.outcomes = Outcomes(self._device, nonfinite)
        self.outcomes.on_replays = self.count.replayed
        if capturable:
            self.outcomes.count_replays(self._device)
        self.number: int | Tensor = 0
        self.begun = self.changing = self.captured = False
        self.broken = ""
        self._attempts: int | None = None  # before the exchange that is under way
        self._before: list[Any] | None = None

    def counters(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return what the op that ends a step counts on: updates, the coming number, replays; once in a step."""
        _, capturable = self._how
        return self.updates, self.count.advance(), self.outcomes.counters(self.captured) if capturable else None

    # ---------------------------------------------------------------- a step that fails

    def note(self, *others: tuple[object, Mapping[str, Any]]) -> None:
        """Note all counts before a step, and attributes of others, as they are now; ``end_early`` goes back to them."""
        self._before = [dict(vars(self.count)), self.outcomes.attempts, [(each, dict(now)) for each, now in others]]

    def go_on(self) -> None:
        """Take note that nothing is taken back from here on: other ranks go on."""
        self.changing, self._before, self._attempts = not self.captured, None, self.outcomes.attempts

    def end(self) -> None:
        """Take note that the step under way ends well, or is skipped."""
        self.begun = self.changing = False
        self._attempts = None

    def end_early(self, error: BaseException) -> bool:
        """Take back what a step has counted that has not begun to move anything; close after one that has.

        Returns:
            Whether it was taken back.
        """
        before, self._before = self._before, None
        if before is not None:
            count, self.outcomes.attempts, others = before
            self.count.undo(count)
            for each, was in others:
                vars(each).update(was)
        elif self.changing:
            if self._attempts is not None:
                self.outcomes.attempts = self._attempts  # it was none
            self.close("a step", error)
        self.count.forget()  # the same gradients may well be given again
        return before is not None

    @contextmanager
    def breaking(self, begun: bool = False) -> Iterator[None]:
        """Refuse all further steps once a collective has failed, or was left: half an exchange may be done."""
        try:
            yield
        except CollectiveError as failure:
            self.outcomes.attempts -= begun  # it was none
            self.changing = False
            self.broken = f"after {self.outcomes.updates} updates, {failure}"
            raise CollectiveError(self.broken) from failure
        except BaseException as error:
            # Errors that all ranks raise change nothing.
            if not begun and (self.changing or not (self._alone or isinstance(error, Exception))):
                self.close("the beginning of a step", error)
            raise

    def whole(self, what: str) -> Whole:
        """Let signals wait while ``what`` is done; close after any exception."""
        return Whole(lambda error: self.close(what, error))

    def close(self, what: str, error: BaseException) -> None:
        """Refuse to go on: ``error`` has interrupted ``what``, of which half may be done."""
        if self.broken:
            return
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.broken = (
            f"after {self.outcomes.updates} updates {what} was interrupted ({cause}), half of which may be done. "
            "Load a checkpoint, on all ranks"
        )
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"{self._owner} can't go on: {self.broken}")

    def refuse_if_broken(self) -> None:
        """Raise CollectiveError if half of something may be done."""
        if self.broken:
            raise CollectiveError(f"this optimizer can't go on: {self.broken}")
