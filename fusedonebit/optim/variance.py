"""The variance of a compression stage: frozen, or shared, that is renewed for some hundredths of a byte per step.

1-bit Adam freezes v because no rank knows the mean gradient any more, whose squares v averages. But each of the W
workers knows its own gradient g_w, and three numbers made of it are enough to renew v while momentum travels as bits
(docs/numerics.md, "A shared variance"):

    shape    s_w, the moving average of g_w^2, sent as logarithms of 8 bits. The workers' mean of s_w has the shape of
             v, but is up to W times as large, as it includes noise that averaging gradients removes.
    level    projections r.g_w on random signs r, which are the same on all workers. The workers' mean is
             r.(mean g), and E (r.(mean g))^2 = |mean g|^2.

By tensor, v = mean of s_w * level / sum(mean of s_w). A renewal computes this from what ranks have just shared: after
the warm-up often, later every ``LONGEST`` steps. Between renewals v is constant, and the same on all ranks. Where
updates are preconditioned, a renewal multiplies momentum and residuals by the old denominator over the new one, so that
error feedback stays exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm.shared_squares import Unit
from ..core.exchange import FeedbackExchange
from ..core.frame import Frame
from ..core.header import COUNT, Field, Fields, damaged, list_of, or_none
from ..core.part import Part
from ..core.state_tensor import StateTensor
from ..core.telemetry import HostMirror
from ..errors import warn
from ..triton_kernels import Coef, live_variance, renew_levels
from ..triton_kernels.columns import Factor
from ..triton_kernels.renewal import FOLLOWED, HELD, LEVEL, LEVELS, MEAN, WEIGHT
from .moments import MomentBuffers
from .onebit_options import OneBitOptions, warmup_steps
from .warm_up import WarmUp

LONGEST = 50
"""Steps between two renewals at most."""

SHARE_OF_AGE = 8
"""Before, a renewal follows after so much of what was done since the freeze, or since tensors came alive.

A quarter would save 36 bytes per parameter of a whole run, and costs GANs 4 % (docs/tried.md).
"""

MOST_REPLAYS = 2 * LONGEST
"""Replayed steps without a renewal of which nobody is told."""

NOTICED_AFTER = 2
"""Steps until the host knows which tensors have begun, with their first gradient."""

LOOKED_AFTER = 8
"""While tensors wait for their first gradient, steps between two looks whether one has had it."""

FIRST_GRADIENT = 1 << 30
"""What the host is told of such a tensor, instead of how many have begun."""

REPLAYED = (
    "{} steps were replayed by a CUDA graph since the variance was last renewed, which no graph can do: take an "
    f"uncaptured step in each {LONGEST}, on all ranks"
)

LEAST_COUNTS = 8
"""Of a state's plain values; behind them are those that are on their way to the host."""


class FrozenVariance(Part):
    """The variance as it was when the compression stage began: nobody renews it.

    Attributes:
        due: Whether ranks share squares in this step, so that the next step begins with a renewal.
        mean_sq: float64 [tensors], the mean of v in each tensor, 0 while it waits for its first gradient; None: none
            waits.
        renewals: How often it was renewed.
    """

    header_fields: ClassVar[Fields] = {"renewals": Field(or_none(list_of(COUNT)), False)}
    due: bool = False
    mean_sq: Tensor | None = None
    renewals: int = 0

    def begin(self, mean: Tensor, coef: Tensor) -> None:
        """Take over the warm-up's v; see ``SharedVariance.begin``."""

    def begin_step(self) -> bool:
        """Renew v if the last step shared squares; return whether it did. All ranks decide alike."""
        return False

    def share(self) -> None:
        """Exchange with all ranks what the next renewal needs."""

    def renew(self) -> bool:
        """Renew v from what ranks have shared since the last renewal; return whether they have."""
        return False

    def waiting(self) -> list[int] | None:
        """Return indices of tensors that wait for their first gradient; None: such tensors were left out."""
        return None

    def check_capture(self) -> None:
        """Raise RuntimeError if no CUDA graph can capture this step."""

    def plain_state(self) -> dict[str, Any]:
        return {"renewals": None}

    def stats(self) -> dict[str, Any]:
        return {"renewals": self.renewals}


class SharedVariance(FrozenVariance):
    """The shared variance: when it is renewed, and from what.

    A renewal takes two steps. In a step that is ``due``, ranks exchange squares and projections after the momentum
    (``share``); the next step begins with the renewal. The first step is due, later ones after an eighth of ``age``, at
    most ``LONGEST`` steps. All ranks decide alike.

    Args:
        frame: Of the optimizer.
        moments: Which hold v.
        exchange: Of the compression stage.
        warm_up: Which says how many updates have entered v.

    Attributes:
        levels: float32 [5, tensors], each tensor's level, its weight and what else ``renew_levels`` carries over.
        steps: Steps since the warm-up.
        age: Steps since the warm-up, or since a tensor last had its first gradient.
        since: Steps since the last renewal.
        numels: float64 [tensors], elements of each tensor on all shards.
    """

    mean_sq: Tensor

    def __init__(self, frame: Frame, moments: MomentBuffers, exchange: FeedbackExchange, warm_up: WarmUp) -> None:
        self._frame, self._moments, self._exchange, self._warm_up = frame, moments, exchange, warm_up
        kept_in_full = frame.options.formats.variance.dtype is torch.float32
        moments.of_means = frame.options.numerics.precondition and kept_in_full  # else something else reads v
        tensors, device = max(1, len(frame.layout.sizes)), frame.device
        self.levels = torch.zeros(LEVELS, tensors, device=device)
        self.mean_sq = torch.zeros(tensors, dtype=torch.float64, device=device)
        self._factors, self._last = (torch.zeros(len(Factor), tensors, device=device) for _ in range(2))
        self.numels = torch.zeros_like(self.mean_sq)
        self._begun = torch.zeros(1, dtype=torch.int32, device=device)  # how many tensors have begun so far
        self._mirror, self._known, self._late = HostMirror(device, NOTICED_AFTER), 0, 0
        self._eases_after = self._replays = 0
        self._eased = True  # as the reducer is made
        self.steps = self.age = self.since = self.renewals = 0
        self.due = self._shared = self._renewed = False

    # ---------------------------------------------------------------- when

    def begin_step(self) -> bool:
        """Renew v if the last step shared squares, and decide whether this step does; return whether it was renewed."""
        self._frame.steps.changing = True  # what half a renewal leaves is no state to go on from
        renewed = self._shared and self.renew()
        if (replays := self._frame.steps.count.replays) != self._replays:
            self._count_replays(replays)
        asked = False
        all_begun = self._known >= self._late and not self._renewed
        for word in self._mirror.push(0 if all_begun else self._word()):
            asked |= word == FIRST_GRADIENT
            if FIRST_GRADIENT > word > self._known:
                self.age, self._known = 0, word
        self._renewed = False
        self.steps, self.age, self.since = self.steps + 1, self.age + 1, self.since + 1
        if self._eased is not (self.steps > self._eases_after):
            self._ease()
        self.due = asked or self.since >= min(LONGEST, max(1, self.age // SHARE_OF_AGE))
        return renewed

    def _count_replays(self, replays: int) -> None:
        """Count the steps that CUDA graphs have replayed since the last call; warn if they were too many."""
        since, self._replays = replays - self._replays, replays
        self.steps, self.age, self.since = self.steps + since, self.age + since, self.since + since
        if since > 0 and self.since > MOST_REPLAYS:
            warn(REPLAYED.format(self.since))

    def check_capture(self) -> None:
        """Raise RuntimeError in the steps after the warm-up in which ``"relaxed"`` scales are still contractive."""
        left = self._eases_after + 1 - self.steps
        if self._eases and left > 0:
            raise RuntimeError(
                f"a step can't be captured in a CUDA graph in the first {self._eases_after} after the warm-up, whose "
                f"scales are measured otherwise; take {left} more uncaptured, or pass "
                'Numerics(scale_norm="contractive")'
            )

    def _word(self) -> Tensor | int:
        """Return what the host should know of tensors that wait for their first gradient, int32 [1], or 0: nothing.

        After a renewal it is how many have had it so far, in other steps ``FIRST_GRADIENT`` if one has just had it.
        """
        frame = self._frame
        if self._renewed:
            return self._begun
        if self.steps % LOOKED_AFTER:
            return 0
        moves = (self._exchange.reducer.scale > 0) & (self.mean_sq == 0)[frame.places.block_tensor]
        return frame.ranks.shards.max(moves.any().reshape(1).int()) * FIRST_GRADIENT

    @property
    def _eases(self) -> bool:
        """Tell whether scales are contractive at first, and measured otherwise later."""
        return self._frame.options.numerics.scale_norm == "relaxed"

    def _ease(self) -> None:
        """Choose the ``scale_norm`` of this step, and of those that follow; the same on all ranks."""
        self._eased = self.steps > self._eases_after
        if self._eases:
            self._exchange.reducer.set_norm("relaxed" if self._eased else "contractive")

    # ---------------------------------------------------------------- what

    def begin(self, mean: Tensor, coef: Tensor) -> None:
        """Take over the warm-up's v, dividing it by Adam's bias correction.

        Args:
            mean: float32 [tensors], the mean of each tensor's v > 0, uncorrected, 0 where it has none; becomes the
                corrected mean.
            coef: The coefficients with which v is corrected, float32 [tensors, columns of ``Coef``].
        """
        frame = self._frame
        v, layout = self._moments.exp_avg_sq, frame.layout
        self._exchange.reducer.follow(v)
        root = coef[:, Coef.RSQRT_BIAS2].double().square()
        sums, _ = live_variance(frame.places, v)
        self.levels[LEVEL] = self._by_tensor(sums).clamp(max=torch.finfo(torch.float32).max)
        self.levels[WEIGHT] = 1.0 / root
        self.levels[HELD] = self.levels[LEVEL]
        self.levels[MEAN] = mean * root
        self.levels[FOLLOWED] = frame.steps.of_each
        self.mean_sq.copy_(self.levels[MEAN])
        v.view(layout.n_blocks, -1).mul_(root.float()[frame.places.block_tensor, None])
        self._warm_up.correct((mean == 0) & (frame.steps.of_each == 0))  # Adam corrects what is late
        self.steps = self.age = self.since = 0
        self._eases_after = warmup_steps(max(float(group["betas"][1]) for group in frame.groups))
        self.due = self._shared = self._renewed = False
        self._mirror.flush()
        self._count()
        mean.copy_(self.mean_sq)

    def share(self) -> None:
        """Exchange squares and projections of this step's gradients with all ranks; ``renew`` uses them."""
        reducer = self._exchange.reducer
        reducer.share_squares()
        absent = reducer.verdict.absent
        self._absent = None if absent is None else absent.view(torch.uint8)
        self._flags, self._shared = reducer.flags, True

    def renew(self) -> bool:
        """Renew v from what ranks have shared since the last renewal; return whether they have shared anything.

        Called early, as before a checkpoint is saved, it changes no later step: the next one would begin with it.
        """
        if not self._shared:
            return False
        self._shared, self._renewed = False, True
        frame, reducer, options = self._frame, self._exchange.reducer, self._frame.options
        assert isinstance(options, OneBitOptions)
        coef, entered = frame.coefficients.last, self._warm_up.entered
        floor = options.numerics.variance_floor or 0.0
        shared = *reducer.sums, coef, frame.steps.of_each, self._flags, self._absent, floor
        renew_levels(*shared, self.levels, self.mean_sq, entered, self._begun, self._factors, self._last)
        frame.coefficients.forget()
        v, kept = self._moments.preconditioner(options.numerics.eps_inside_sqrt), self._moments.room_for_means()
        v = v if v.factors is None else v._replace(factors=self._last)
        reducer.renew(Unit(coef, self._factors, options.numerics.precondition, kept), v)
        if kept is not None:
            self._moments.make_of(kept, self._factors)
        self.since = 0
        self.renewals += 1
        return True

    def _by_tensor(self, by_block: Tensor) -> Tensor:
        """Sum float64 [B] by tensor, in order: equal on all ranks."""
        blocks = torch.tensor(self._frame.layout.first_block, device=by_block.device)
        here = torch.segment_reduce(by_block, "sum", offsets=blocks, unsafe=True, initial=0.0)
        return self._frame.ranks.shards.sum(here)

    def _count(self) -> None:
        """Count elements of tensors, on all shards, and tensors that wait for a gradient; waits for the device."""
        self.numels = self._by_tensor(self._frame.live.numel.double())
        self._late = int(self._begun) + len(self.waiting())

    def waiting(self) -> list[int]:
        """Return indices of tensors that wait for their first gradient; reads from the device, asks no other rank."""
        return torch.nonzero((self.mean_sq == 0) & (self.numels > 0)).flatten().tolist()

    # ---------------------------------------------------------------- a part of an algorithm

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        return (StateTensor("variance_level", "tensor", self.levels, not_negative=True),) if compressed else ()

    def held(self) -> Sequence[Tensor]:
        return self.levels, self.mean_sq, self._begun, self._factors, self.numels

    def plain_state(self) -> dict[str, Any]:
        """Return counts to resume from; waits for the device."""
        on_its_way = self._mirror.flush_pending()
        counts = self.steps, self._eases_after, self.age, self.since, self.renewals
        return {"renewals": [*counts, int(self._renewed), self._known, int(self._begun), *on_its_way]}

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        own = header["phase"] == "compression" and header["algorithm"] == self._frame.name
        if own and len(header.get("renewals") or ()) < LEAST_COUNTS:
            damaged("renewals", f"have {LEAST_COUNTS} counts or more", repr(header.get("renewals")))

    def resumed(self, header: Mapping[str, Any]) -> None:
        """Take up what ``plain_state`` has returned, now that ``levels`` are filled; every rank calls it."""
        if header.get("renewals") is None:
            return
        self.steps, self._eases_after, self.age, self.since, self.renewals, *others = header["renewals"]
        renewed, self._known, count, *on_its_way = others
        self._renewed, self._shared, self._replays = bool(renewed), False, self._frame.steps.count.replays
        self._begun.fill_(count)
        self._mirror.refill(on_its_way)
        self.mean_sq.copy_(self.levels[MEAN])
        self._count()
        self._ease()  # what a step that has begun already has decided
        self.due = self.since >= min(LONGEST, max(1, self.age // SHARE_OF_AGE))
