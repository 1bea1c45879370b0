"""Options of optimizers with a compression stage: length of the warm-up, kind of variance, buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from ..core.options import check_count, is_int, is_share
from ..core.resolved import Options, names_of
from ..core.settings import NUMERICS, VARIANCE_FLOOR, Faults, Freeze, Numerics, Wire
from ..triton_kernels.renewal import UNSEEN

Variance = Literal["shared", "frozen"]

OVERLAPPED_BUCKETS = 4
"""Enough that three quarters can travel in the backward pass, few enough that messages stay large."""

SHARED_AFTER = 0.25
"""Memories of the variance, 1/(1 - beta2) updates each, that are its warm-up where it is shared."""

SETTLES_WITHIN = 10
"""The same after which ``Freeze`` waits no longer; see docs/design.md."""

_T = TypeVar("_T", bound="OneBitOptions")


def warmup_steps(beta2: float) -> int:
    """Return how many updates warm up a shared variance, where nobody says it."""
    return max(1, round(SHARED_AFTER / (1.0 - beta2)))


@dataclass(frozen=True, kw_only=True)
class OneBitOptions(Options):
    """Settings of an optimizer with a compression stage, resolved."""

    freeze_step: int | Literal["auto"]
    lr_warmup_steps: int
    deadline: int | None
    warm_started: bool
    variance: Variance = "frozen"
    warmup: int | float | None = None
    total_steps: int | None = None

    usual: ClassVar[dict[str, Any]] = {"precondition": True, "bias_correction": True}
    takes: ClassVar[frozenset[str]] = names_of(Numerics, Wire, Faults) - {"release_gradients"}
    recorded: ClassVar[tuple[str, ...]] = (*Options.recorded, "scale_norm", "scale_scope", "variance_floor", "state")

    @classmethod
    def of(cls: type[_T], optimizer: str, arguments: Mapping[str, Any]) -> _T:
        """Settle the arguments; ``freeze_step`` may be a ``Freeze``, of whose checkpoint nothing is kept here."""
        given = arguments["freeze_step"]
        freeze = given if isinstance(given, Freeze) else Freeze(step="auto" if given is None else given)
        said = {**arguments, "freeze_step": freeze.step, "warm_started": freeze.warm_start is not None}
        said |= {"lr_warmup_steps": freeze.lr_warmup_steps, "deadline": freeze.deadline}
        if arguments.get("variance") is None:
            said["variance"] = "shared" if given is None else "frozen"
        made, numerics = super().of(optimizer, said), arguments.get("numerics", NUMERICS)
        shared = {"scale_norm": "relaxed", "precondition": True, "bias_correction": True, "variance_floor": None}
        unsaid: dict[str, Any] = {name: usual for name, usual in shared.items() if getattr(numerics, name) is None}
        return replace(made, numerics=replace(made.numerics, **unsaid)) if made.shares_variance else made

    @property
    def bucket_count(self) -> int:
        """Return the number of buckets into which the flat index space is cut."""
        return self.wire.buckets or (OVERLAPPED_BUCKETS if self.wire.overlap else 1)

    @property
    def shares_variance(self) -> bool:
        """Tell whether the variance is renewed in the compression stage."""
        return self.variance != "frozen"

    @property
    def least_share(self) -> float:
        """Return the share of its tensor's mean that v has at least when the compression stage begins."""
        numerics = self.numerics
        preconditioned = 0.0 if not numerics.precondition else UNSEEN if self.shares_variance else VARIANCE_FLOOR
        return preconditioned if numerics.variance_floor is None else numerics.variance_floor

    def latest_freeze(self, beta2: float) -> int:
        """Return the number of updates after which v is frozen at the latest."""
        if self.freeze_step != "auto":
            return self.freeze_step
        if self.warmup is not None:
            return self.warmup if is_int(self.warmup) else max(1, round(self.warmup * (self.total_steps or 0)))
        if self.shares_variance:
            return warmup_steps(beta2)
        settled = self.lr_warmup_steps + round(SETTLES_WITHIN / (1.0 - beta2))
        return settled if self.deadline is None else self.deadline

    def check_levels(self) -> None:
        if self.bucket_count > 1 or self.wire.overlap:
            raise ValueError("hierarchy must be None with Wire(overlap=True) or several buckets; choose one of them")

    def check_group(self, group: Mapping[str, Any], name: str, world_size: int) -> None:
        if self.faults.guard == "rewarm" and float(group["betas"][0]) == 0.0:
            raise ValueError(
                f"betas[0] must be > 0 for a re-warm-up, which puts residuals back into the momentum, got 0 in "
                f'{name or "the defaults"}; or pass Faults(guard="warn")'
            )

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        if str(self.variance) == "own":
            raise ValueError(
                'variance must be one of "shared", "frozen", got "own": momentum that workers share would be divided '
                "by each one's own variance; for moments of their own, ZeroOneAdam(sync_policy=policies.EveryStep())"
            )
        super().check()
        self._check_freeze()
        self._check_warmup()
        self._check_buckets()
        numerics = self.numerics
        if numerics.state == "8bit" and not numerics.precondition:
            raise ValueError(
                'state must be "fp32" or "bf16" with Numerics(precondition=False), got "8bit": updates would be '
                "divided by a variance of three bits of mantissa, whose errors no residual makes good"
            )
        if numerics.frozen_dtype.itemsize == 2 and numerics.state == "fp32" and self.shares_variance:
            raise ValueError(
                'frozen_dtype must be torch.float32 (variance="shared" takes a byte), got torch.bfloat16; leave it out'
            )
        if numerics.dead_coordinates == "keep" and self.shares_variance:
            raise ValueError(
                f'dead_coordinates must be "mean" with variance="{self.variance}", got "keep": a renewal gives all '
                'coordinates a variance; or pass variance="frozen"'
            )
        if numerics.dead_coordinates == "keep" and (numerics.precondition or self.least_share > 0):
            way_out = "precondition=False" if numerics.precondition else "variance_floor=0"
            raise ValueError(
                f'dead_coordinates must be "mean" where v has a floor, got "keep"; or pass Numerics({way_out})'
            )

    def _check_freeze(self) -> None:
        if isinstance(self.freeze_step, type):
            raise TypeError(
                f'freeze_step must be an int >= 0, "auto" or fusedonebit.Freeze(...), got {self.freeze_step!r}'
            )
        check_count("freeze_step", self.freeze_step, alternative="auto")
        check_count("lr_warmup_steps", self.lr_warmup_steps)
        if self.deadline is not None and not (is_int(self.deadline) and self.deadline > self.lr_warmup_steps):
            raise ValueError(
                f"deadline must be an int > lr_warmup_steps={self.lr_warmup_steps}, or None, got {self.deadline!r}"
            )
        if self.lr_warmup_steps and self.freeze_step != "auto":
            raise ValueError(f'lr_warmup_steps must be 0 unless freeze_step is "auto", got {self.lr_warmup_steps!r}')
        if self.deadline is not None and self.freeze_step != "auto":
            raise ValueError(f'deadline must be None unless freeze_step is "auto", got {self.deadline!r}')
        if self.warm_started and self.watches:
            raise ValueError(
                'freeze_step must be an int with warm_start, got "auto": there is no warm-up to watch; try '
                "Freeze(step=0, warm_start=...)"
            )

    @property
    def watches(self) -> bool:
        """Tell whether the warm-up ends when v is stable."""
        return self.freeze_step == "auto" and self.warmup is None and not self.shares_variance

    def _check_warmup(self) -> None:
        share = is_share(self.warmup) and not is_int(self.warmup)
        if self.warmup is not None and not (share and self.warmup) and not (is_int(self.warmup) and self.warmup >= 1):
            raise ValueError(
                f"warmup must be an int >= 1, a share of total_steps between 0 and 1, or None, got {self.warmup!r}"
            )
        if self.total_steps is not None:
            check_count("total_steps", self.total_steps, least=1)
        if share != (self.total_steps is not None):
            raise ValueError(
                f"total_steps must be an int >= 1 where warmup is a share of them, and None elsewhere, got "
                f"{self.total_steps!r} with warmup={self.warmup!r}"
            )
        if self.warmup is not None and (self.freeze_step != "auto" or self.lr_warmup_steps or self.deadline):
            raise ValueError(
                f"warmup must be None where freeze_step says how long it is, got {self.warmup!r}; pass one of them"
            )
        if self.shares_variance and (self.lr_warmup_steps or self.deadline is not None):
            raise ValueError(
                f'lr_warmup_steps and deadline must be left out with variance="{self.variance}", got '
                f"{self.lr_warmup_steps!r} and {self.deadline!r}: nobody waits for it to be stable; pass warmup"
            )

    def _check_buckets(self) -> None:
        if self.bucket_count > 1 and self.numerics.scale_scope == "global":
            raise ValueError(
                f'scale_scope must be "bucket", "layer" or "block" with {self.bucket_count} buckets, got "global": one '
                "scale for all is known only when all gradients are"
            )
        if not self.wire.overlap:
            return
        if self.max_grad_norm is not None:
            raise ValueError(
                f"max_grad_norm must be None with Wire(overlap=True), got {self.max_grad_norm!r}: the norm is known "
                "only when all gradients are; the guard refuses outliers"
            )
        if self.wire.capturable:
            raise ValueError(
                "capturable must be False with Wire(overlap=True), got True: the backward pass sends buckets"
            )
