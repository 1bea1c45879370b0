"""The order of a step, alike for all optimizers: count, agree, exchange, advance, raise."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..triton_kernels.tables import capturing
from .contents import Contents
from .first_contact import NO_GRADIENT, FirstSteps, speaks
from .frame import Frame, Owner
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

    def begin(self, owner: Owner, contents: Contents, captured: bool = False) -> None:
        """Enter the stage of the coming step, once; ``take`` does it, or a hook of the backward pass before it."""
        steps, ranks, algorithm = self.frame.steps, self.frame.ranks, contents.algorithm
        if steps.begun:
            return
        with steps.breaking():
            if not captured and steps.just_loaded:
                # Within a round parameters differ from rank to rank; those of its beginning the load has compared.
                if algorithm.synchronised:
                    self.frame.agree_on_loaded()
                steps.just_loaded = False
            for traffic in ranks.traffics:
                traffic.start_step()
            if not captured and algorithm.enter_stage():
                owner.publish_state()
            steps.begun, steps.changing = True, False

    def take(
        self,
        owner: Owner,
        contents: Contents,
        given: Sequence[Tensor],
        params: Sequence[Tensor] | None = None,
        checked: bool = False,
    ) -> None:
        """Take a step, or raise: on all ranks alike, but for errors of this rank's own, of which they hear.

        Args:
            owner: The optimizer.
            contents: The owner's.
            given: This rank's gradients, as ``ParameterList.gradients`` returns them.
            params: What a compiler passes to be updated in the parameters' stead; None: the parameters themselves.
            checked: Whether the gradients are known to be usable.
        """
        frame, algorithm = self.frame, contents.algorithm
        steps, plist = frame.steps, frame.parameters
        if steps.broken:
            steps.refuse_if_broken()
        steps.captured = captured = capturing(frame.device)
        if captured:
            algorithm.check_captured()
            self._check_loaded()
        elif frame.options.wire.capturable:
            steps.outcomes.absorb_replays()
        self.begin(owner, contents, captured)
        stage = algorithm.stage
        self._note()
        if captured:
            steps.number = steps.count.capture()
        else:
            if steps.count.take(plist.owners, given, compiled=params is not None):
                stage.check_repeated()
            steps.number = steps.count.number
        grads, error = self._gradients_or_error(owner, given, checked)
        looks = not (captured or self.first_steps.over or error is not None)
        if looks and algorithm.exchange is not None:  # at all objects
            algorithm.exchange.reducer.wait()
        noticed, unasked = (False, False) if captured else self._averaged_unasked(grads, algorithm.traits.compresses)
        said = self.first_steps.look(frame, grads, steps.count.added_up, unasked) if looks else []
        # A rank that can't take the step says that it has all gradients: so no tensor is left out because of it.
        frame.missing = () if error is not None else plist.missing(grads)
        with plist.standing_in(plist.params if params is None else params):
            frame.absent = None
            frame.coefficients.begin(stage.renews and frame.rounding is None)
            coef = stage.table()
            frame.coefficients.lend()
            plist.before_update()
            steps.go_on()
            steps.outcomes.attempts += not captured
            with steps.breaking(begun=not captured):
                flags = stage.step(grads, coef, error is not None)
                plist.after_update()
        self._advance(flags)
        if frame.ranks.transport.world_size > 1 and not captured:
            contents.compare()
        algorithm.after_step()
        error = algorithm.error_due(error)
        # Replays of CUDA graphs are counted on the device, and read when somebody asks.
        known = [] if captured else steps.outcomes.record(stage.known(flags), failed=error is not None)
        if error is not None:
            steps.count.fail()
        steps.end()
        frame.under_ddp.averaged = False
        if error is not None:
            raise error
        steps.outcomes.act(known, stage.describe)
        if looks and len(frame.missing) == len(plist) and self._no_rank_has_gradients():
            said.append(NO_GRADIENT)
        if said:
            self.first_steps.say(frame, said)
        if noticed and speaks(frame):
            warn_of_averages()

    def _note(self) -> None:
        """Note all counts, so that a step that fails before it changes anything is not counted."""
        ddp, traffic = self.frame.under_ddp, self.frame.ranks.transport.traffic
        noticed = {"elsewhere": ddp.elsewhere}
        self.frame.steps.note((self.first_steps, vars(self.first_steps)), (ddp, noticed), (traffic, vars(traffic)))

    def _gradients_or_error(
        self, owner: Owner, given: Sequence[Tensor], checked: bool
    ) -> tuple[Sequence[Tensor], Exception | None]:
        """Return this rank's gradients, and what is wrong with them: then there are none.

        The others must not wait for a rank that has an error: it takes part, and says that it can't go on.
        """
        frame = self.frame
        grads, error = given, None
        try:
            owner.take_hyper_parameters()
            grads = frame.parameters.usable(given, frame.nothing, checked)
        except Exception as caught:
            error = caught
        if frame.ranks.model_parallel.groups and not frame.steps.captured:
            error = frame.compare_replicas(error)
        return (grads if error is None else [frame.nothing] * len(frame.parameters)), error

    def _averaged_unasked(self, grads: Sequence[Tensor], compresses: bool) -> tuple[bool, bool]:
        """Count what DDP sends where it averages without our hook; tell whether that is new, and whether it does.

        The first step looks; then it is known.
        """
        frame, ddp = self.frame, self.frame.under_ddp
        if ddp.elsewhere is False:
            return False, False
        noticed = ddp.notice(frame.parameters.owners, grads, frame.ranks.transport, compresses)
        return noticed, bool(ddp.elsewhere)

    def _no_rank_has_gradients(self) -> bool:
        """Tell whether no rank has a gradient, where this one has none; False where ranks don't tell; waits."""
        absent = self.frame.absent
        return self.frame.ranks.transport.world_size == 1 if absent is None else bool(absent.all())

    def _check_loaded(self) -> None:
        """Raise RuntimeError if a step can't be captured because a checkpoint was just loaded."""
        if self.frame.steps.just_loaded:
            raise RuntimeError(
                "the first step after load_state_dict() can't be captured in a CUDA graph, since ranks compare their "
                "parameters in it: take an uncaptured step first"
            )

    def _advance(self, flags: Tensor) -> None:
        """Count the update, unless it was skipped; of tensors only those of which some rank had a gradient."""
        frame, coefficients = self.frame, self.frame.coefficients
        if coefficients.counted:
            coefficients.end()
        else:
            coefficients.advance(flags, *frame.counters())
