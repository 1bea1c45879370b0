"""The warm-up of a 1-bit optimizer: how long v follows averaged gradients, and what it leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.frame import Frame
from ..core.header import COUNT, STEPS_OF_EACH, TABLE, Field, Fields, check_each, each, list_of, one_or_each, or_none
from ..core.part import Part
from .freezing import AutoFreeze
from .onebit_options import OneBitOptions


class WarmUp(Part):
    """When the warm-up ends, and begins again.

    Args:
        frame: Of the optimizer.
        options: Its.

    Attributes:
        due: Updates after which it ends.
        ended_at: Those after which it has ended last; None: it has not.
        again: How often it has begun again.
        follows: Whether v follows the gradients.
        memory: How many steps it remembers at most; None: as many as its betas say.
        entered: Updates that have entered each tensor's v, infinite where it is corrected for its start at 0, as after
            a warm start or a re-warm-up: float64 [tensors].
        watch: Ends it sooner, once v is stable; None: nobody watches.
        dead_tensors: Indices of tensors that had no gradient in it.
        dead_coordinates: Number of coordinates that had none, in other tensors.
    """

    header_fields: ClassVar[Fields] = {
        "variance_step": Field(STEPS_OF_EACH, one_per="updates"),
        "freeze_step": Field(or_none(COUNT), False),
        "freeze_due": Field(or_none(COUNT), False),
        "rewarms": Field(COUNT, False),
        "dead_tensors": Field(list_of(COUNT), one_per="index"),
        "dead_coordinates": Field(COUNT),
        "auto": Field(or_none(TABLE), False),
    }

    def __init__(self, frame: Frame, options: OneBitOptions) -> None:
        self._frame, of_each = frame, frame.steps.of_each
        beta2 = max(float(group["betas"][1]) for group in frame.groups)
        self.due = options.latest_freeze(beta2)
        self.ended_at: int | None = None
        self.again = 0
        self.follows = True
        self.entered = torch.zeros_like(of_each)
        self.watch = AutoFreeze(beta2, options.lr_warmup_steps, of_each.device) if options.watches else None
        self.dead_tensors: list[int] = []
        self.dead_coordinates = 0
        self.memory: float | None = None

    def end(self) -> None:
        """Take note that v follows gradients no more."""
        self.follows, self.memory = False, None

    @property
    def any_corrected(self) -> bool:
        """Tell whether any v is corrected for its start at 0."""
        return bool(self.entered.isinf().any())

    def correct(self, but_for: Tensor | None = None) -> None:
        """Take note that every v is corrected for its start at 0, but for those of some tensors, bool [tensors]."""
        self.entered.fill_(math.inf)
        if but_for is not None:
            self.entered.masked_fill_(but_for, 0.0)

    def begin_again(self, updates: int) -> None:
        """Take note that it begins again after so many updates."""
        steps = self._frame.options.faults.rewarm_steps
        self.follows, self.due, self.memory = True, updates + steps, float(steps)
        self.again += 1

    # ---------------------------------------------------------------- a part of an algorithm

    def held(self) -> Sequence[Tensor]:
        return (self.entered,)

    def plain_state(self) -> dict[str, Any]:
        return {
            "variance_step": one_or_each(self.entered),
            "freeze_step": self.ended_at,
            "freeze_due": self.due,
            "rewarms": self.again,
            "dead_tensors": self.dead_tensors,
            "dead_coordinates": self.dead_coordinates,
            "auto": None if self.watch is None else self.watch.state_dict(),
        }

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        if header.get("rewarms") and not isinstance(header.get("freeze_due"), int):
            raise ValueError(
                f"the checkpoint's header is damaged: freeze_due must be an int after {header['rewarms']} re-warm-ups, "
                f"got {header.get('freeze_due')!r}; load another checkpoint"
            )
        if header.get("auto") is not None:
            check_each(header["auto"], AutoFreeze.fields, "auto.")
            if self.watch is not None:
                self.watch.check(header["auto"])

    def resume(self, header: Mapping[str, Any]) -> None:
        self.ended_at, self.again = header.get("freeze_step"), header.get("rewarms", 0)
        self.dead_tensors = header.get("dead_tensors", [])
        self.dead_coordinates = header.get("dead_coordinates", 0)
        if self.watch is not None and header.get("auto") is not None:
            self.watch.load_state_dict(header["auto"])
        entered = of_each = self._frame.steps.of_each
        if "variance_step" in header:
            entered = each(header["variance_step"], of_each)
            # One number for all tensors may be more than some have had.
            entered = torch.where(entered.isinf(), entered, torch.minimum(entered, of_each))
        self.entered.copy_(entered)
        if self.again:
            self.due, self.memory = header["freeze_due"], float(self._frame.options.faults.rewarm_steps)

    def stats(self) -> dict[str, Any]:
        return {"freeze_step": self.ended_at, "rewarms": self.again, "dead_coordinates": self.dead_coordinates}
