"""Decides when 0/1 Adam renews its variance, and when its workers synchronise (Lu et al., 2022, sections 4 and 5).

Both are functions of what was done before a round, nothing else: then all ranks answer alike, and a resumed run
goes on as it would have. Any object with such a method will do. It is asked ahead, for ``PLANNED`` rounds or as
many as it has answers for, on which all ranks agree once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..core.options import check_count, is_int, stated

PLANNED = 64
"""Rounds on which ranks agree at a time."""


class Progress(NamedTuple):
    """Counts of what was done before the round that begins.

    Attributes:
        steps: Calls of ``step()``, without those that were skipped.
        rounds: Synchronisations, in full precision or in bits; skipped ones are made up for.
        renewals: Of those, in full precision: the variance was renewed.
        since_renewal: Rounds that have ended since the last renewal; 0 right after it, or where there was none.
    """

    steps: int
    rounds: int
    renewals: int
    since_renewal: int
    skipped: int = 0
    """Calls of ``step()`` that came to nothing."""

    def after(self, this: Round, steps: int) -> Progress:
        """Return what was done when a round, of which ``steps`` are still to be done, has ended."""
        since = 0 if this.renews else self.since_renewal + 1
        return Progress(self.steps + steps, self.rounds + 1, self.renewals + this.renews, since, self.skipped)

    def without(self, this: Round) -> Progress:
        """Return what was done when a round has been skipped."""
        return self._replace(skipped=self.skipped + this.steps)


class Round(NamedTuple):
    """A round: it ``renews`` the variance, in one step, or synchronises after ``steps``."""

    renews: bool
    steps: int

    def __str__(self) -> str:
        return "a renewal" if self.renews else f"a synchronisation after {self.steps} steps"


class VariancePolicy(Protocol):
    """Decides in which rounds gradients are averaged in full precision, to renew the variance.

    A first renewal that was skipped is made up for, whatever the policy says: without a variance nothing moves.
    """

    def renews(self, done: Progress) -> bool:
        """Tell whether the round that begins does; it is of one step then."""


class SyncPolicy(Protocol):
    """Decides how many steps workers take before they synchronise in bits."""

    def steps(self, done: Progress) -> int:
        """Return the length of the round that begins, at least 1."""


@dataclass(frozen=True)
class DoublingVariance:
    """Renewals further and further apart: each distance, in rounds, holds for ``scaler`` renewals, then doubles.

    The distance between renewal j and the next is 2^floor(j / scaler) rounds (0/1 Adam, section 6.1).

    Args:
        scaler: The paper's kappa.
        until: The last renewal is before so many rounds; None: there is no last one.
    """

    scaler: int = 16
    until: int | None = None

    def __post_init__(self) -> None:
        check_count("scaler", self.scaler, least=1)
        if self.until is not None:
            check_count("until", self.until, least=1)

    def renews(self, done: Progress) -> bool:
        """Return whether the coming round renews the variance."""
        if done.renewals == 0:
            return True
        distance = 2 ** ((done.renewals - 1) // self.scaler)
        return done.since_renewal + 1 >= distance and (self.until is None or done.rounds < self.until)


@dataclass(frozen=True)
class DoublingRounds:
    """Rounds of one step at first, then of 2, 4, ... up to ``most``: each length holds for ``scaler`` rounds.

    The paper's rule, for learning rates that fall by half every so many steps: workers may drift apart for
    twice as long when steps are half as large (0/1 Adam, section 6.1).

    Args:
        after: So many rounds are of one step: the learning-rate warm-up, in which no worker should be alone.
        scaler: Rounds of each length before it doubles.
        most: The longest round; a power of two.
    """

    after: int
    scaler: int
    most: int = 16

    def __post_init__(self) -> None:
        check_count("after", self.after)
        check_count("scaler", self.scaler, least=1)
        check_count("most", self.most, least=1)
        if self.most & (self.most - 1):
            raise ValueError(f"most must be a power of two, got {self.most!r}")

    def steps(self, done: Progress) -> int:
        """Return how many steps the coming round has."""
        if done.rounds < self.after:
            return 1
        doublings = 1 + (done.rounds - self.after) // self.scaler
        return min(self.most, 1 << min(doublings, self.most.bit_length()))


@dataclass(frozen=True)
class EveryStep:
    """Workers synchronise in every step."""

    def steps(self, done: Progress) -> int:
        """Return how many steps the coming round has."""
        return 1


@dataclass(frozen=True)
class FixedRounds:
    """Rounds of equal length.

    Args:
        length: Steps of each.
    """

    length: int = 2

    def __post_init__(self) -> None:
        check_count("length", self.length, least=1)

    def steps(self, done: Progress) -> int:
        """Return how many steps the coming round has."""
        return self.length


@dataclass(frozen=True)
class AlignedRounds:
    """Another policy's rounds, cut so that one ends at every multiple of ``every`` calls of ``step()``.

    That is where models are looked at, so skipped steps count here.

    Args:
        policy: The other one.
        every: After so many calls, and twice and thrice so many, all ranks have the same parameters.
    """

    policy: SyncPolicy
    every: int

    def __post_init__(self) -> None:
        check_count("every", self.every, least=1)
        if isinstance(self.policy, type) or not callable(getattr(self.policy, "steps", None)):
            raise TypeError(f"policy must have a method steps(done), as DoublingRounds(...) has, got {self.policy!r}")

    def steps(self, done: Progress) -> int:
        """Return how many steps the coming round has."""
        return min(self.policy.steps(done), self.every - (done.steps + done.skipped) % self.every)


def check_policies(variance: object, sync: object) -> None:
    """Raise TypeError for the first policy that lacks its method; there need be none for the variance."""
    wanted = {"variance_policy": (variance, "renews", DoublingVariance), "sync_policy": (sync, "steps", DoublingRounds)}
    if variance is None:
        del wanted["variance_policy"]
    for name, (policy, method, example) in wanted.items():
        if isinstance(policy, type) or not callable(getattr(policy, method, None)):
            raise TypeError(
                f"{name} must have a method {method}(done), as fusedonebit.policies.{example.__name__}(...) has, got "
                f"{policy!r}"
            )


def next_round(variance: VariancePolicy | None, sync: SyncPolicy, done: Progress) -> Round:
    """Ask both about the round that begins; without a policy for the variance nothing renews it.

    Raises:
        ValueError: for an answer that is none.
        RuntimeError: if there would be no variance.
    """
    if variance is None:
        return Round(renews=False, steps=_length(sync, done))
    renews = variance.renews(done)
    if not isinstance(renews, bool):
        raise ValueError(f"variance_policy must answer with True or False, got {renews!r} for {done}")
    if renews or (done.skipped and not done.renewals):
        # On CUDA another round may have gone by before it was known that there is no variance after the first.
        return Round(renews=True, steps=1)
    if done.renewals == 0:
        raise RuntimeError(
            f"variance_policy must renew the variance in the first round, but {stated(variance)} does not: there is "
            "none yet; let it, or load the state of an earlier run"
        )
    return Round(renews=False, steps=_length(sync, done))


def _length(sync: SyncPolicy, done: Progress) -> int:
    """Return how many steps the round has that begins; ValueError for an answer that is none."""
    steps = sync.steps(done)
    if not is_int(steps) or steps < 1:
        raise ValueError(f"sync_policy must answer with an int >= 1, got {steps!r} for {done}")
    return steps


def planned(variance: VariancePolicy | None, sync: SyncPolicy, done: Progress) -> list[Round]:
    """Return the rounds that begin with ``done``; fewer than ``PLANNED`` where later ones have no answer yet."""
    rounds: list[Round] = []
    while len(rounds) < PLANNED:
        try:
            rounds.append(next_round(variance, sync, done))
        except Exception:
            if not rounds:
                raise
            break  # it is asked again when it is time
        done = done.after(rounds[-1], rounds[-1].steps)
    return rounds


def progress_after(variance: VariancePolicy | None, sync: SyncPolicy, steps: int) -> Progress:
    """Return where the policies are after so many steps: a run that begins with another one's state goes on there."""
    done = Progress(0, 0, 0, 0)
    while done.steps < steps:
        renews = variance is not None and variance.renews(done)
        this = Round(renews, 1 if renews else sync.steps(done))
        done = done.after(this, min(this.steps, steps - done.steps))
    if variance is None:
        return done
    return done._replace(renewals=max(done.renewals, 1))  # there is a variance, whoever has made it
