"""The order of a step, alike for all optimizers: count, agree, exchange, advance, raise."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..triton_kernels.tables import capturing
from .algorithm import Algorithm
from .first_contact import NO_GRADIENT, FirstSteps, speaks
from .frame import Frame, Owner
from .stage import Stage
from .under_ddp import warn_of_averages


class Stepping:
    """Takes an optimizer's steps.

    Args:
        frame: Of the optimizer.

    Attributes:
        first_steps: What looks for mistakes in the first of them.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame, self.first_steps = frame, FirstSteps()

    def begin(self, owner: Owner, algorithm: Algorithm, captured: bool = False) -> None:
        """Enter the stage of the coming step, once: ``take`` does, or before it a hook of the backward pass."""
        steps, ranks = self.frame.steps, self.frame.ranks
        if steps.begun:
            return
        with steps.breaking():
            if not captured and steps.just_loaded:
                # Within a round each rank has parameters of its own, and will take those of the round's beginning, on
                # which all have agreed while they loaded.
                if algorithm.synchronised:
                    self.frame.agree_on_loaded()
                steps.just_loaded = False
            ranks.start_step()
            if not captured and algorithm.enter_stage():
                owner.publish_state()
            steps.begun, steps.changing = True, False

    def take(
        self,
        owner: Owner,
        algorithm: Algorithm,
        given: Sequence[Tensor],
        params: Sequence[Tensor] | None = None,
        checked: bool = False,
    ) -> None:
        """Take a step, or raise: on all ranks alike, but for errors of this rank's own, of which they hear.

        Args:
            owner: The optimizer.
            algorithm: Its.
            given: This rank's gradients, as ``ParameterList.gradients`` returns them.
            params: What is updated in the parameters' stead, as a compiler passes it; None: they are.
            checked: Whether the gradients are known to be usable.
        """
        frame = self.frame
        steps, ddp, plist = frame.steps, frame.under_ddp, frame.parameters
        if steps.broken:
            steps.refuse_if_broken()
        steps.captured = captured = capturing(frame.device) and self._can_be_captured(algorithm)
        if frame.options.capturable and not captured:
            steps.outcomes.absorb_replays()
        self.begin(owner, algorithm, captured)
        stage, traffic, noticed = algorithm.stage, frame.ranks.transport.traffic, {"elsewhere": ddp.elsewhere}
        steps.note((self.first_steps, vars(self.first_steps)), (ddp, noticed), (traffic, vars(traffic)))
        steps.number = self._take_number(stage, given, params is not None, captured)
        error: Exception | None = None
        try:
            owner.take_hyper_parameters()
            grads = given if checked else plist.usable(given, frame.nothing)
        except Exception as caught:
            error = caught
        if frame.ranks.model_parallel.groups and not captured:
            error = frame.compare_replicas(error)
        if error is not None:  # the others must not wait for this rank: it takes part, and says that it can't go on
            grads = [frame.nothing] * len(plist)
        looks = not captured and ddp.elsewhere is not False  # whether DDP averages; once it is known not to, no more
        saw_averages = looks and ddp.notice(plist.owners, grads, frame.ranks.transport, algorithm.compresses)
        looks = not (captured or self.first_steps.over or error is not None)
        said: list[str] = []
        if looks:
            said = self.first_steps.look(frame, grads, steps.count.added_up, bool(ddp.elsewhere))
        # A rank that can't take the step says that it has all gradients: so no tensor is left out because of it.
        frame.missing = () if error is not None else plist.missing(grads)
        with plist.standing_in(plist.params if params is None else params):
            coef = self._ready(algorithm, stage)
            steps.go_on()
            steps.outcomes.attempts += not captured
            with steps.breaking(begun=not captured):
                flags = stage.step(grads, coef, error is not None)
                plist.after_update()
        self._advance(algorithm, stage, flags)
        error = algorithm.error_due(error)
        # What replays count comes to the host when one asks.
        known = [] if captured else steps.outcomes.record(stage.known(flags), failed=error is not None)
        if error is not None:
            steps.count.fail()
        steps.end()
        ddp.averaged = False
        if error is not None:
            raise error
        steps.outcomes.act(known, stage.describe)
        if looks and len(frame.missing) == len(plist) and self._has_nobody():
            said.append(NO_GRADIENT)
        if said:
            self.first_steps.say(frame, said)
        if saw_averages and speaks(frame):
            warn_of_averages()

    def _has_nobody(self) -> bool:
        """Tell whether no rank has a gradient, where this one has none; False where ranks don't tell; waits."""
        absent = self.frame.absent
        return self.frame.ranks.transport.world_size == 1 if absent is None else bool(absent.all())

    def _take_number(self, stage: Stage, given: Sequence[Tensor], compiled: bool, captured: bool) -> int | Tensor:
        """Count a step on ``given`` gradients, which maybe a compiler passes; return its number in messages."""
        count = self.frame.steps.count
        if captured:
            return count.capture()
        if count.take(self.frame.parameters.owners, given, compiled):
            stage.check_repeated()
        return count.number

    def _can_be_captured(self, algorithm: Algorithm) -> bool:
        """Return True of a step that a CUDA graph captures; raise RuntimeError if it can't be."""
        algorithm.check_captured()
        if self.frame.steps.just_loaded:
            raise RuntimeError(
                "the first step after load_state_dict() can't be captured in a CUDA graph, since ranks compare their "
                "parameters in it: take an uncaptured step first"
            )
        return True

    def _ready(self, algorithm: Algorithm, stage: Stage) -> Tensor:
        """Return the coefficients of the step that is about to be taken."""
        frame = self.frame
        frame.absent = None
        frame.coefficients.begin(stage.renews and frame.rounding is None)
        coef = algorithm.table()
        frame.coefficients.lend()
        frame.parameters.before_update()
        return coef

    def _advance(self, algorithm: Algorithm, stage: Stage, flags: Tensor) -> None:
        """Count the update, unless it was skipped; of tensors only those of which some rank had a gradient."""
        frame, coefficients = self.frame, self.frame.coefficients
        if coefficients.counted:
            coefficients.end()
        else:
            coefficients.advance(flags, *frame.counters())
        if frame.ranks.transport.world_size > 1 and not frame.steps.captured:
            algorithm.compare_state(stage.digest)
        algorithm.after_step()
