"""Keeps what 0/1 Adam has between two steps: settings, buffers, the momentum in either form, and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..comm import CompressedAllReduce, make_all_reduce
from ..core.compressing import Feedback
from ..core.frame import Frame
from ..core.header import (
    AMOUNT,
    AMOUNT_OF_EACH,
    COMPRESSED,
    COUNT,
    FLAG,
    INT,
    POSITIVE,
    TABLE,
    Field,
    Fields,
    Rule,
    each,
    list_of,
    one_or_each,
    or_none,
)
from ..core.options import Made, check_choice, stated
from ..core.settings import NUMERICS, Options
from ..core.spec import Specs, StateSpec
from ..triton_kernels import TAIL, Coef, rebuild_momentum
from ..triton_kernels.headers import Word
from ..triton_kernels.levels import LEVELS
from ..triton_kernels.nouns import Coefficients
from ..triton_kernels.scaling import SQUARES
from .adam_update import AdamUpdate
from .freezing import denominator
from .own_variance import OwnVariance
from .policies import Progress, Round, SyncPolicy, VariancePolicy, check_policies, progress_after
from .rounds import ANCHOR, RoundAlgorithm, RoundOptions

STEP_SIZE, DECAY = 0, 1  # rows of ``_moved``

_T = TypeVar("_T", bound="ZeroOneOptions")


_ROUND = Rule(
    lambda v: isinstance(v, list) and len(v) == 2 and FLAG.holds(v[0]) and POSITIVE.holds(v[1]),
    "a list of true or false and an int >= 1",
)


@dataclass(frozen=True, kw_only=True)
class ZeroOneOptions(RoundOptions):
    """Settings of 0/1 Adam. See ``ZeroOneAdam`` for their meaning."""

    variance_policy: VariancePolicy | None
    sync_policy: SyncPolicy
    precondition: bool = True
    bias_correction: bool = True
    variance_floor: float = 1e-3

    takes: ClassVar[frozenset[str]] = (Options.takes - {"eps_inside_sqrt", "stochastic_rounding"}) | {
        *("scale_norm", "scale_scope", "precondition", "variance_floor", "serve_alone", "hierarchy")
    }
    told: ClassVar[tuple[str, ...]] = (
        *Options.told,
        "variance_policy",
        "sync_policy",
        "scale_norm",
        "scale_scope",
        "variance_floor",
    )

    @property
    def owns(self) -> bool:
        """Return whether each worker has a variance of its own, which nothing renews."""
        return self.variance_policy is None

    @classmethod
    def of(cls: type[_T], optimizer: str, arguments: Mapping[str, Any]) -> _T:
        """Settle the arguments; workers with variances of their own have other defaults.

        Raises:
            ValueError: for what only a shared variance has.
        """
        made, given = super().of(optimizer, arguments), arguments.get("numerics", NUMERICS)
        if not made.owns:
            return made
        for name, usual in (("precondition", True), ("variance_floor", 0.0)):
            if getattr(given, name) not in (None, usual):
                raise ValueError(
                    f"{name} must be {usual!r} or None where workers have variances of their own, got "
                    f"{getattr(given, name)!r}; pass a variance_policy, such as policies.DoublingVariance()"
                )
        norm = "relaxed" if given.scale_norm is None else made.scale_norm
        return replace(made, scale_norm=norm, variance_floor=0.0)

    @property
    def coefficient_floor(self) -> float:
        """Return ``variance_floor``, which is part of denominators."""
        return self.variance_floor

    def check_levels(self) -> None:
        raise ValueError("hierarchy must be None: between two synchronisations ranks of a node would move apart")

    def check(self) -> None:
        """Raise TypeError or ValueError for the first setting that makes no sense."""
        check_choice("scale_scope", self.scale_scope, ("global", "layer", "block"))
        super().check()
        check_policies(self.variance_policy, self.sync_policy)


_OWN: dict[str, Any] = {"when": "options.owns"}
"""Of ``StateSpec``: only where workers have variances of their own."""


class ZeroOneState(RoundAlgorithm, Feedback, AdamUpdate):
    """All of ``LocalAdam`` but the step."""

    settings: ClassVar[type[Options]] = ZeroOneOptions
    options: ZeroOneOptions
    kept: ClassVar[Specs] = (
        # The momentum is mostly bits: users don't see it here.
        StateSpec("exp_avg", "element", "exp_avg", of_rank=True, only="floats", optional=True),
        StateSpec("exp_avg_sq", "element", "exp_avg_sq", published=True, not_negative=True, when="shares_variance"),
        StateSpec("exp_avg_sq", "element", "exp_avg_sq", published=True, not_negative=True, **_OWN, of_rank=True),
        StateSpec("level", "tensor", "own.levels", LEVELS, **_OWN, not_negative=True, optional=True),
        StateSpec("rho", "tensor", "own.rho", **_OWN, not_negative=True, optional=True),
        StateSpec("anchor", "element", "_round_start", **ANCHOR, stage="compressed"),
        StateSpec("moved", "tensor", "_moved", rows=2, optional=True),
        *Feedback.kept,
    )
    phases: ClassVar = dict.fromkeys(("uncompressed", "one-bit", "local"), True)
    header_fields: ClassVar[Fields] = {
        **COMPRESSED,
        **RoundAlgorithm.header_fields,
        "settled": Field(TABLE),
        "done": Field(list_of(COUNT, 4)),
        "uncounted": Field(COUNT, False),
        "round": Field(_ROUND),
        "floats": Field(FLAG, at="_as_floats"),
        "entered": Field(AMOUNT_OF_EACH, one_per="updates"),
        "summed": Field(AMOUNT_OF_EACH, one_per="tensor"),
        "pending": Field(INT),
        "variance_betas": Field(or_none(list_of(AMOUNT)), False, "group", "frame.coefficients.variance_betas"),
    }
    _moved: Tensor
    _lost: Tensor
    reducer: CompressedAllReduce
    own: OwnVariance | None = None
    """The level of workers' own variances, where they have any."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        layout, options, device = frame.layout, self.options, frame.device
        # Serves as the parameters that all had when the round began, too: no round needs both.
        self._anchor = self.averages.make()[: layout.numel + TAIL]
        self._exp_avg_sq_sums = torch.zeros(layout.n_blocks, dtype=torch.float64, device=device)
        scale: dict[str, Any] = {"scale_norm": options.scale_norm, "scale_scope": options.scale_scope}
        scale |= {"serve_alone": options.serve_alone, "live": frame.live}
        self.reducer = make_all_reduce(layout, frame.ranks.transport, device=device, **scale)
        tensors = max(1, len(layout.sizes))
        self._round, self._plan = Round(renews=True, steps=1), list[Round]()
        self._confirmed = Progress(0, 0, 0, 0)  # what was done in rounds of which all ranks know how they ended
        self._as_floats = True
        self._entered = torch.zeros_like(frame.steps.of_each)  # updates of v
        self._mean_sq = torch.zeros(tensors, dtype=torch.float64, device=device)
        self._summed = torch.ones(tensors, device=device)  # steps of the round whose bits the momentum is
        self._summed_alike: int | None = 1  # that of all tensors, where the host knows it
        self._sent_scale = torch.zeros(layout.n_blocks, device=device)  # of the bits that have become floats
        self._pending = torch.zeros(1, dtype=torch.int32, device=device)
        self._lost = torch.zeros(1, device=device)  # steps of this round that were none, as the scaler found an inf
        self.own = OwnVariance(self) if options.owns else None
        # With these what workers have added up is compressed as it is, and applied.
        self._plain = self.reducer.plain_coefficients()
        self._plain[:, Coef.STEP_SIZE] = 1.0
        self._all_missing = [frame.nothing] * len(layout.sizes)

    def check_growth(self) -> None:
        if self.own is not None and (self._done.rounds or self._local):
            raise RuntimeError(
                "add_param_group must be called before the first step: residuals have their places from then on; "
                "construct a new optimizer"
            )
        if self._done.renewals < self._done.rounds or self._local:
            raise RuntimeError(
                "add_param_group must be called before the first round that does not renew the variance: the new "
                "parameters would have none; construct a new optimizer"
            )

    def carried(self) -> tuple[Progress, dict[Tensor, Tensor]]:
        return self._progress(), {p: self.momentum(p) for p in self.frame.parameters.owners}

    def has_grown(self, carried: Any) -> None:
        frame = self.frame
        self._confirmed, momenta = carried
        self._entered = frame.steps.of_each.clone()
        for p, m in momenta.items():
            i = frame.index(p)
            frame.parameters.shaped(self.exp_avg, i, frame.layout.offset(i)).copy_(m)
        self._sum_variance()

    def _settle_round(self, this: Round, skipped: bool) -> None:
        """Count a round that was not skipped; else policies are asked again without it."""
        self._confirmed = self._confirmed.without(this) if skipped else self._confirmed.after(this, this.steps)
        if skipped:
            self._plan = []

    @property
    def _done(self) -> Progress:
        """Return what was done before this round, as far as all ranks know: only that may decide which comes next."""
        done = self._confirmed
        for _, this in self._unsettled:
            done = done.after(this, this.steps)
        return done

    def _progress(self) -> Progress:
        """Return what was done, without the rounds that were skipped, as far as this rank knows."""
        done = self._confirmed
        for attempt, this in self._unsettled:
            skipped = self.frame.steps.outcomes.seems_skipped(attempt)
            done = done.without(this) if skipped else done.after(this, this.steps)
        return done._replace(steps=done.steps + self._local)

    @property
    def round_steps(self) -> int:
        return self._round.steps

    @property
    def shares_variance(self) -> bool:
        """Return whether all workers have the same variance, which rounds renew."""
        return not self.options.owns

    @property
    def weighs(self) -> int:  # type: ignore[override]
        """Return how many columns of coefficients weigh gradients; own variances weigh their squares, too."""
        return 1 if self.own is None else SQUARES

    @property
    def _policies(self) -> tuple[VariancePolicy | None, SyncPolicy]:
        return self.options.variance_policy, self.options.sync_policy

    @property
    def _eps_inside_sqrt(self) -> bool:
        return self.options.variance_floor > 0

    @property
    def _of_bits(self) -> Made:
        """Return what coefficients are made of while v stays: with denominators sqrt(v + share*mean(v)).

        What has no variance yet does not move.
        """
        return Made(self.frame.steps.of_each, self._entered, renews=False, mean_sq=self._mean_sq)

    def _sum_variance(self) -> None:
        """Sum v up as renewals do while they go."""
        sums = self.exp_avg_sq.view(self.frame.layout.n_blocks, -1).sum(1, dtype=torch.float64)
        self._exp_avg_sq_sums = sums
        self._mean_sq = self._means()

    def _means(self) -> Tensor:
        """Return each tensor's mean of v over its live elements, float64 [tensors]."""
        sums = self._exp_avg_sq_sums
        assert sums is not None
        owner = self.frame.places.block_tensor.long()
        total = torch.zeros_like(self._mean_sq).index_add_(0, owner, sums)
        count = torch.zeros_like(total).index_add_(0, owner, self.frame.live.numel.double())
        return total / count.clamp(min=1)

    @property
    def _awaited(self) -> Tensor | None:
        """Return the mean of v of each tensor, where those without wait for one, or would explode; or None."""
        return self._mean_sq if self.own is None else None

    def _make_floats(self, coef: Tensor, renews: bool) -> None:
        """Rebuild the momentum of the last synchronisation (line 9), in terms of what the coming step divides it by.

        Bits have no zero: where v is next to nothing, as in rows of an embedding that nobody has looked up, they leave
        noise as large as other coordinates' momentum. Before a round of bits it is that noise times the floored
        denominator, as ``coef`` has it; before a renewal, which divides by Adam's own, eps in the extreme, times that.
        """
        frame = self.frame
        if self._as_floats:
            return
        layout, options = frame.layout, self.options
        if renews:
            coef = frame.coefficients.fresh(frame.hyper.taken, Made(frame.steps.of_each, self._entered, renews=False))
        v, inside = self.exp_avg_sq if options.precondition else None, self._eps_inside_sqrt and not renews
        self._rebuild(self._summed, self._awaited, v, inside, coef, self.exp_avg)
        if renews and self._eps_inside_sqrt and not options.precondition:  # too rare to have a kernel
            floored = frame.coefficients.fresh(frame.hyper.taken, self._of_bits)
            for i, size in enumerate(layout.sizes):
                part = slice(layout.offset(i), layout.offset(i) + size)
                v = self.exp_avg_sq[part]
                self.exp_avg[part] *= denominator(v, coef[i], False) / denominator(v, floored[i], True)
        self._as_floats = True

    def _rebuild(
        self,
        summed: Tensor | None,
        awaited: Tensor | None,
        exp_avg_sq: Tensor | None,
        inside: bool,
        coef: Tensor,
        out: Tensor,
    ) -> None:
        """Turn bits into floats; of the bits only ``stats`` wants to know any further how large they were."""
        frame = self.frame
        bits, scale = self.reducer.bits, self.reducer.scale
        table = (frame.coefficients.renewal() or Coefficients.of(coef))._replace(table=coef)
        more = exp_avg_sq, inside, table, out, self._sent_scale
        rebuild_momentum(frame.places, bits, scale, summed, awaited, *more)

    # ---------------------------------------------------------------- checkpoints

    def held(self) -> list[Tensor]:
        counts = [self._entered, self._mean_sq, self._summed, self._sent_scale, self._pending, self._lost, self._plain]
        return [*super().held(), *counts, *([] if self.own is None else self.own.state())]

    def scratch(self) -> list[Tensor]:
        return [*super().scratch(), *([] if self.own is None else self.own.scratch())]

    def plain_state(self) -> dict[str, Any]:
        done = self._progress()
        return super().plain_state() | {
            "settled": {"precondition": self.options.precondition},
            "done": list(done[:4]),
            "uncounted": done.skipped,
            "round": list(self._round),
            "entered": one_or_each(self._entered),
            "summed": one_or_each(self._summed),
            "pending": int(self._pending),
        }

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        frame = self.frame
        if "rounds" in header:
            raise ValueError(
                f"the checkpoint's algorithm is {header['algorithm']}, which {frame.name} can't go on from: "
                "there each worker has a variance of its own"
            )
        if not header.get("lines") or header["algorithm"] != frame.name:
            return
        policy = header["options"].get("variance_policy")
        if (policy is None) != self.options.owns:
            raise ValueError(
                f"the checkpoint was written with variance_policy={policy!r}, but here it is "
                f"{self.options.variance_policy!r}: all workers have one variance with a policy, and without each its "
                "own; construct the optimizer as it was"
            )
        was, now = header["settled"]["precondition"], self.options.precondition
        if was != now:
            raise ValueError(
                f"the checkpoint was written with precondition={was!r}, but here it is {now!r}; it can't be changed "
                "between two steps"
            )
        world_size = frame.ranks.transport.world_size
        if header["local"] and header["world_size"] != world_size:
            raise ValueError(
                f"the checkpoint's world_size is {header['world_size']}, but here it is {world_size}; "
                f"it was written after {header['local']} steps of a round, between which parameters differ from rank "
                "to rank: save when stats()['local_steps'] is 0, or resume with as many ranks as wrote it"
            )

    def resume(self, header: Mapping[str, Any]) -> None:
        frame = self.frame
        if not header.get("lines"):  # AdamW's, or of a run in which nothing trained
            self._entered = frame.steps.of_each.clone()
            if self.own is None:
                frame.coefficients.freeze_variance(frame.hyper.taken)
            else:
                self.own.begin(frame.steps.of_each)
            if header["updates"]:  # else there is no variance yet
                self._confirmed = progress_after(*self._policies, header["updates"])
            return
        super().resume(header)
        done = Progress(*header["done"])._replace(skipped=header.get("uncounted", 0))
        self._confirmed = done._replace(steps=done.steps - self._local)
        self._round = Round(*header["round"])
        self._entered = torch.minimum(each(header["entered"], self._entered), frame.steps.of_each)
        self._summed, self._summed_alike = each(header["summed"], self._summed), None
        self._pending.fill_(header["pending"])

    def resumed(self, header: Mapping[str, Any]) -> None:
        if self.own is None:
            self._sum_variance()
        if header.get("lines"):
            self.reducer.serve_again()

    # ---------------------------------------------------------------- what users look at

    def momentum(self, param: Tensor) -> Tensor:
        """Return the momentum of one parameter, float32 of its shape; equal on all ranks but within a round.

        Before a round's last step it is that of the step before: what is left of the newer is in ``worker_error``.
        Where workers have variances of their own, so have they momenta.
        """
        frame = self.frame
        i, layout, options = frame.index(param), frame.layout, self.options
        if self._as_floats:
            return super().momentum(param)
        part = frame.parameters.shaped(self.reducer.result(), i, layout.offset(i)) / self._summed[i]
        if self._awaited is not None:
            part = part * (self._awaited[i] > 0)
        if not options.precondition:
            return part
        k = frame.coefficients.fresh(frame.hyper.taken, self._of_bits)[i]
        return part * denominator(
            frame.parameters.shaped(self.exp_avg_sq, i, layout.offset(i)), k, self._eps_inside_sqrt
        )

    def worker_error(self, param: Tensor) -> Tensor:
        """Return this rank's residual of one parameter, and its updates of this round; in units of the update, float32.

        Where not ``precondition`` in units of the momentum; where workers have variances of their own in units of
        parameters: what is still to be subtracted from them.
        """
        frame = self.frame
        i = frame.index(param)
        self.settle()
        return frame.parameters.shaped(self.reducer.worker.compensated, i, frame.layout.offset(i)).clone()

    def stats(self) -> dict[str, Any]:
        reduce, done = self.reducer, self._progress()
        compensated, _, server_error = reduce.norms()
        return super().stats() | {
            "rounds": done.rounds,
            "renewals": done.renewals,
            "round_steps": self._round.steps,
            "compensated_norm": compensated,
            "worker_error_norm": float(reduce.to_servers.signal[0]),  # within a round c has grown since
            "server_error_norm": server_error,
            "residual_over_momentum": self._residual_over_momentum(),
        }

    def _residual_over_momentum(self) -> float:
        reduce, done = self.reducer, self._progress()
        sent = (self._sent_scale.double().square() * reduce.live.numel).sum().sqrt()
        if self._as_floats and sent > 0:
            errors = reduce.arrived_words[:, Word.SIGNAL].view(torch.float32).double()
            return float(errors.square().mean().sqrt() / sent)
        return reduce.residual_ratio() if done.rounds > done.renewals else 0.0

    def owed(self) -> float:
        """Return the norm of the workers' residuals, root mean square over the ranks, over that of the last update."""
        return self._residual_over_momentum() or (math.inf if self.reducer.norms()[1] > 0 else 0.0)

    def described(self) -> list[str]:
        options = self.options
        return [
            f"variance: {'of each worker' if options.owns else stated(options.variance_policy)}",
            f"rounds: {stated(options.sync_policy)}",
            f"scale: {options.scale_norm}, {options.scale_scope}" + ", preconditioned" * options.precondition,
        ]
