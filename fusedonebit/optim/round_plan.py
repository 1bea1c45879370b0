"""Which rounds 0/1 Adam takes: those that policies ask for, as all ranks have agreed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..comm import agree
from ..core.consensus import failure
from ..core.frame import Frame
from ..core.header import COUNT, FLAG, POSITIVE, Field, Fields, Rule, list_of
from ..core.part import Part
from .local_steps import RoundCount
from .policies import Progress, Round, SyncPolicy, VariancePolicy, next_round, planned, progress_after

_ROUND = Rule(
    lambda v: isinstance(v, list) and len(v) == 2 and FLAG.holds(v[0]) and POSITIVE.holds(v[1]),
    "a list of true or false and an int >= 1",
)


class RoundPlan(Part):
    """The present round, and those that are to follow.

    Args:
        frame: Of the optimizer.
        count: The steps of its rounds.
        policies: What says which rounds there are.

    Attributes:
        count: The steps of the present round.
        round: The present one.
        alone: Whether the step that was entered lies between two synchronisations: this rank takes it by itself.
        confirmed: What was done in rounds of which all ranks know how they ended.
    """

    header_fields: ClassVar[Fields] = {
        "done": Field(list_of(COUNT, 4)),
        "uncounted": Field(COUNT, False),
        "round": Field(_ROUND),
    }

    def __init__(self, frame: Frame, count: RoundCount, policies: tuple[VariancePolicy | None, SyncPolicy]) -> None:
        self._frame, self.count, self._policies = frame, count, policies
        self.round, self._coming = Round(renews=True, steps=1), list[Round]()
        self.confirmed, self.alone = Progress(0, 0, 0, 0), False

    @property
    def done(self) -> Progress:
        """Return what was done before this round, as far as all ranks know: only that may decide which comes next."""
        done = self.confirmed
        for _, this in self.count.unsettled:
            done = done.after(this, this.steps)
        return done

    def progress(self) -> Progress:
        """Return what was done, without the rounds that were skipped, as far as this rank knows."""
        done = self.confirmed
        for attempt, this in self.count.unsettled:
            skipped = self._frame.steps.outcomes.seems_skipped(attempt)
            done = done.without(this) if skipped else done.after(this, this.steps)
        return done._replace(steps=done.steps + self.count.local)

    @property
    def only_renewed(self) -> bool:
        """Tell whether no round of bits was done, as far as this rank knows."""
        done = self.progress()
        return done.rounds <= done.renewals

    @property
    def next(self) -> Round:
        """Return the round that begins next."""
        return self._coming[0] if self._coming else next_round(*self._policies, self.done)

    @property
    def averages_gradients(self) -> bool:
        """Tell whether the coming step averages gradients in full precision; else DDP must leave them alone."""
        if self._frame.steps.begun:
            return self.round.renews
        if self.count.local:
            return False
        self.settle_ended()
        return self.next.renews

    def enter_step(self) -> None:
        """Begin the next planned round if the last one has ended; alike on all ranks."""
        self.settle_ended()
        if self.count.local == 0:
            if not self._coming:
                self._plan_from(self.done)
            self._frame.steps.changing = True
            self.round = self._coming.pop(0)
            self.count.tag = self.round.steps
        last = self.count.local == self.round.steps - 1
        if last and not self._coming:
            # Now, as ranks meet anyway; what is wrong with later rounds is told where they begin.
            failure(lambda: self._plan_from(self.done.after(self.round, self.round.steps)))
        self.alone = not last

    def end_round(self) -> None:
        """Begin the next round; whether this one was skipped all ranks know later."""
        self.count.end(self.round)

    def settle_ended(self) -> None:
        """Count rounds that have ended and were not skipped; else policies are asked again without them."""
        self.count.settle_ended(self._settle)

    def _settle(self, this: Round, skipped: bool) -> None:
        self.confirmed = self.confirmed.without(this) if skipped else self.confirmed.after(this, this.steps)
        if skipped:
            self._coming = []

    def check_growth(self) -> None:
        """Raise RuntimeError if no group can be added now."""
        (variance, _), done, local = self._policies, self.done, self.count.local
        if variance is None and (done.rounds or local):
            raise RuntimeError(
                "add_param_group must be called before the first step: residuals have their places from then on; "
                "construct a new optimizer"
            )
        if done.renewals < done.rounds or local:
            raise RuntimeError(
                "add_param_group must be called before the first round that does not renew the variance: the new "
                "parameters would have none; construct a new optimizer"
            )

    def _plan_from(self, done: Progress) -> None:
        """Ask for the rounds to come, on which all ranks agree; else all raise, before anything has changed."""
        frame = self._frame
        plan: list[Round] = []
        error: Exception | None = None
        try:
            plan = planned(*self._policies, done)
        except Exception as caught:
            error = caught
        facts = [(f"round {done.rounds + i}", str(each)) for i, each in enumerate(plan)]
        hint = "policies must answer alike on all ranks, as functions of their argument alone"
        agree(frame.ranks.transport, facts, frame.device, error, hint)
        self._coming = plan

    # ---------------------------------------------------------------- a part of an algorithm

    def plain_state(self) -> dict[str, Any]:
        done = self.progress()
        return {"done": list(done[:4]), "uncounted": done.skipped, "round": list(self.round)}

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        frame = self._frame
        if "rounds" in header:
            raise ValueError(
                f"the checkpoint's algorithm is {header['algorithm']}, which {frame.name} can't go on from: "
                "there each worker has a variance of its own"
            )
        if not header.get("lines") or header["algorithm"] != frame.name:
            return
        was, (now, _) = header["options"].get("variance_policy"), self._policies
        if (was is None) != (now is None):
            raise ValueError(
                f"the checkpoint was written with variance_policy={was!r}, but here it is {now!r}: all workers have "
                "one variance with a policy, and without each its own; construct the optimizer as it was"
            )
        before, here = header["settled"]["precondition"], frame.options.numerics.precondition
        if before != here:
            raise ValueError(
                f"the checkpoint was written with precondition={before!r}, but here it is {here!r}; it can't be "
                "changed between two steps"
            )

    def resume(self, header: Mapping[str, Any]) -> None:
        self.alone = header["phase"] == "local"  # of a step that was entered before it was saved
        if not header.get("lines"):  # AdamW's, or of a run in which nothing trained
            if header["updates"]:  # else there is no variance yet
                self.confirmed = progress_after(*self._policies, header["updates"])
            return
        done = Progress(*header["done"])._replace(skipped=header.get("uncounted", 0))
        self.confirmed = done._replace(steps=done.steps - self.count.local)
        self.round = Round(*header["round"])

    def stats(self) -> dict[str, Any]:
        done = self.progress()
        return {"rounds": done.rounds, "renewals": done.renewals, "round_steps": self.round.steps}
