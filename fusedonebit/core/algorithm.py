"""What an optimizer does in a step, and what it carries to the next; ``Frame`` is what it does that with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .exchange import Exchange
from .frame import Frame
from .part import Part
from .resolved import Options
from .stage import Stage
from .traits import Phase, Traits


class Algorithm:
    """Skeleton of an algorithm: a subclass makes its parts, and says which stage takes the coming step.

    An algorithm of a single stage is that stage itself. It is made anew, and filled, where a checkpoint is loaded or a
    group is added.

    Args:
        frame: Of the optimizer.

    Attributes:
        phase: The name of the stage of the last step taken, or of the coming one once that was entered.
        parts: What else keeps something from step to step.
        exchange: What sends and receives what it compresses; None: it compresses nothing.
    """

    traits: ClassVar[Traits] = Traits()
    options: Options
    parts: Sequence[Part] = ()
    exchange: Exchange | None = None

    @classmethod
    def check(cls, frame: Frame) -> None:
        """Raise ValueError if it can't work with these parameters and ranks, or as the options say."""
        frame.check_shards(cls.traits.shards)
        frame.check_16_bits(cls.traits.corrects)

    def __init__(self, frame: Frame) -> None:
        self.frame, self.options = frame, frame.options
        self.phase: Phase = next(iter(self.traits.phases))

    @property
    def stage(self) -> Stage:
        """Return what takes the coming step, once ``enter_stage`` was called: itself, where there are no others."""
        assert isinstance(self, Stage)
        return self

    @property
    def all_parts(self) -> Sequence[Part]:
        """Return all that keeps something; an algorithm of one stage does so itself. The last one leads the others."""
        return (*self.parts, self) if isinstance(self, Stage) else self.parts

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Take up what the constructor's ``arguments`` have brought from an earlier run; every rank calls it."""

    def close(self) -> None:
        """Give back hooks, and memory that another is about to take up in its place; it may still be asked to load.

        Memory of the parameters' size that it has allocated itself, which is most of it.
        """
        for part in self.parts:
            part.close()

    # ---------------------------------------------------------------- groups

    def check_groups(self, groups: Sequence[Mapping[str, Any]], where: str = "") -> None:
        """Raise an error for what groups, all there are ``where``, can't be any more, or can't be together."""

    def check_growth(self) -> None:
        """Raise RuntimeError if no group can be added now."""

    def carried(self) -> Any:
        """Return what its successor's ``has_grown`` gets, besides what is kept of each parameter."""

    def has_grown(self, carried: Any) -> None:
        """Take over what the algorithm before has ``carried``, now that a group was added."""

    # ---------------------------------------------------------------- a step

    def check_step(self) -> None:
        """Raise RuntimeError, before anything is done, if no step can be taken now."""

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError if ``what`` must not come between the backward pass and the step."""

    def check_captured(self) -> None:
        """Raise RuntimeError if the coming step can't be captured in a CUDA graph."""
        if not self.options.wire.capturable or self.options.faults.nonfinite == "raise":
            raise RuntimeError(
                'a step can only be captured in a CUDA graph with Wire(capturable=True) and Faults(nonfinite="skip"): '
                "what changes from step to step must lie on the device; construct the optimizer so"
            )
        if not self.stage.can_capture:
            raise RuntimeError(
                f"a step can only be captured in the compression stage, not in {self.phase!r}: take uncaptured steps "
                'until optimizer.phase == "compression"; several ranks of AdamW and Lamb have no such stage'
            )
        self.stage.check_capture()

    def enter_stage(self) -> bool:
        """Change the stage if it is time, alike on all ranks; ``steps.changing`` says so before anything is changed.

        Returns:
            Whether tensors lie elsewhere now, or mean something else.
        """
        return False

    @property
    def coming_stage(self) -> Stage:
        """Return what takes the coming step, whether it was entered or not."""
        return self.stage

    def after_step(self) -> None:
        """Do what follows once a step was counted."""

    def error_due(self, error: Exception | None) -> Exception | None:
        """Return the error that this step raises on this rank, if any; by now every rank has skipped it."""
        late, self.frame.late_error = self.frame.late_error, None
        return error or late

    def catch_up(self) -> None:
        """Wait until the host knows how all steps so far have ended; raises as ``step`` does."""
        self.frame.steps.outcomes.catch_up(self.stage.describe)

    # ---------------------------------------------------------------- what ranks have in common

    @property
    def synchronised(self) -> bool:
        """Return whether all ranks have the same parameters now."""
        return True

    @property
    def round_steps(self) -> int:
        """Return how many steps lie between the last synchronisation and the one before."""
        return 1

    # ---------------------------------------------------------------- what users look at

    @property
    def compressed(self) -> bool:
        """Return whether it keeps what is declared for the "compressed" stage."""
        return self.traits.phases.get(self.phase, False)

    def owed(self) -> float:
        """Return the norm of what compression has left out so far, over that of the last update; waits for the device.

        0 where nothing is left out; infinite where there was no update to compare with, as after a skipped step.
        """
        return 0.0 if self.exchange is None else self.exchange.owed()

    def momentum(self, param: Tensor) -> Tensor:
        """Return the momentum of one parameter, float32 of its shape; see ``DistributedOptimizer.momentum``."""
        return self.value_of("exp_avg", self.frame.index(param)).to(torch.float32, copy=True)

    def value_of(self, name: str, i: int) -> Tensor:
        """Return what is kept of parameter ``i`` under a name, of its shape: a view, or a float32 copy of codes."""
        every = (kept for part in self.all_parts for kept in part.state(self.compressed))
        everybody = range(len(self.frame.parameters))
        found = next((kept for kept in every if kept.name == name and kept.wanted and i in kept.of(everybody)), None)
        if found is None:
            own = type(self).__name__
            raise NotImplementedError(f"{own} keeps no {name!r}: return it from state(), or override momentum()")
        return found.part(self.frame, i)

    def described(self) -> list[str]:
        """Return lines for ``repr``: what it alone can be told."""
        own, values = [name for name in self.options.recorded if name not in Options.recorded], self.options.values()
        return [f"{name}: {values[name]}" for name in own]
