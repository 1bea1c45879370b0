"""Rounds, between two synchronisations of which each worker moves by itself, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import StepContext
from ..core.frame import Frame
from ..core.header import COUNT, INT, Field, Fields, list_of
from ..core.part import Part
from ..core.resolved import Options
from ..core.telemetry import upload


@dataclass(frozen=True, kw_only=True)
class RoundOptions(Options):
    """Settings of an optimizer that works in rounds."""

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        super().check()
        if self.wire.capturable:
            raise ValueError("capturable must be False, got True: what a step does depends on its place in the round")


ANCHOR: dict[str, Any] = {"only": "local", "optional": True, "holds_parameters": True}
"""Of a ``StateTensor``: a copy of the parameters as all ranks had them, kept within a round alone."""


class RoundCount(Part):
    """The steps of a round: in all but the last each worker moves its own parameters.

    In the last they agree on what the round has made of the parameters that all had when it began, and have the same
    again.

    Args:
        frame: Of the optimizer.

    Attributes:
        local: Steps done in this round.
        tag: A hash of the hyper-parameters of all of them.
        missed: Tensors of which this rank has had no gradient in this round.
        unsettled: Rounds that may have been skipped: the attempt, and which it was.
    """

    header_fields: ClassVar[Fields] = {
        "local": Field(COUNT),
        "tag": Field(INT),
        "missed": Field(list_of(COUNT), False, "index"),
    }

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self.local = self.tag = 0
        self.missed: Sequence[int] = ()
        self.unsettled: list[tuple[int, Any]] = []
        self._held_error: Exception | None = None

    def begin_step(self) -> None:
        """Take note of the tensors of which this rank has no gradient."""
        self.missed = tuple(i for i in self._frame.missing if self.local == 0 or i in self.missed)

    def end_step(self) -> None:
        """Count a step alone."""
        self.tag = self._mixed_tag()
        self.local += 1

    def end(self, this: Any) -> None:
        """Begin the next round; whether ``this`` one was skipped ``settle_ended`` tells later."""
        self.unsettled.append((self._frame.steps.outcomes.attempts, this))
        self.local = self.tag = 0

    def settle_ended(self, settle: Callable[[Any, bool], None]) -> None:
        """Tell ``settle`` of each round, as soon as all ranks know, whether it was skipped."""
        steps = self._frame.steps
        while self.unsettled and (skipped := steps.outcomes.was_skipped(self.unsettled[0][0])) is not None:
            with steps.whole("the end of a round"):
                settle(self.unsettled.pop(0)[1], skipped)

    def of_round(self, context: StepContext) -> StepContext:
        """Return what a rank tells the others at the end of a round, instead of what it would of a step."""
        return context._replace(missing=() if context.abort else self.missed, tag=self._mixed_tag())

    def _mixed_tag(self) -> int:
        """Return a hash of the hyper-parameters of all steps of this round so far, the present one included."""
        return (1_000_003 * self.tag + self._frame.coefficients.tag) & 0x7FFFFFFF

    @property
    def failed(self) -> bool:
        """Tell whether this rank has had an error in the round, of which nobody has heard."""
        return self._held_error is not None

    def error_due(self, error: Exception | None, alone: bool) -> Exception | None:
        """Return this rank's error when all next meet: of a step ``alone`` nobody hears."""
        held = self._held_error or error
        self._held_error = held if alone else None
        return None if alone else held

    # ---------------------------------------------------------------- a part of an algorithm

    def plain_state(self) -> dict[str, Any]:
        return {"local": self.local, "tag": self.tag, "missed": self.missed}

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        world_size = self._frame.ranks.transport.world_size
        if header.get("local") and header["world_size"] != world_size:
            raise ValueError(
                f"the checkpoint's world_size is {header['world_size']}, but here it is {world_size}; "
                f"it was written after {header['local']} local steps of a round, whose parameters differ from rank to "
                "rank: save when stats()['local_steps'] is 0, or resume with as many ranks as wrote it"
            )

    def resume(self, header: Mapping[str, Any]) -> None:
        self.local, self.tag = header.get("local", 0), header.get("tag", 0)
        self.missed = header.get("missed", ())

    def stats(self) -> dict[str, Any]:
        return {"local_steps": self.local}


def may_rest(frame: Frame) -> bool:
    """Tell whether a round may move some tensors nowhere, by a learning rate of 0.

    One on another device may be: the host does not wait to know.
    """
    rates = [group["lr"] for group in frame.hyper.taken]
    return any((isinstance(lr, Tensor) and lr.device.type != "cpu") or float(lr) == 0.0 for lr in rates)


def leaving_out(frame: Frame, coef: Tensor) -> Tensor:
    """Return the table of a rank that moves alone, and leaves tensors without a gradient as they are."""
    if not frame.missing:
        return coef
    still = upload([i in frame.missing for i in range(len(frame.parameters))], torch.bool, frame.device)
    return frame.coefficients.still(coef, still)
