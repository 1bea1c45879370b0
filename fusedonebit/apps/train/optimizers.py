"""The optimizers that ``fusedonebit train`` knows by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ... import (
    Faults,
    Freeze,
    Lamb,
    Layerwise,
    MarsitAdam,
    Numerics,
    OneBitAdam,
    OneBitLamb,
    OneBitLion,
    Rounds,
    ZeroOneAdam,
    policies,
)
from ...comm import Topology, make_transport
from ..averaged import Averaged

Parameters = Iterable[tuple[str, Tensor]]

BETAS = (0.9, 0.99)
EPS = 1e-8
LAMB_EPS = 1e-6
WEIGHT_DECAY = 0.01
LION_WEIGHT_DECAY = 0.03
PAPER: dict[str, Any] = {
    "numerics": Numerics(scale_norm="l2", scale_scope="global", variance_floor=0.0),
    "faults": Faults(guard="off"),
}
"""1-bit LAMB's own numerics, with a variance that is frozen: what its figures are drawn with."""


@dataclass(frozen=True)
class Settings:
    """Holds what all optimizers of a run share."""

    lr: float
    freeze_step: int | Literal["auto"]
    lr_warmup_steps: int
    steps: int
    looked_at_every: int
    topology: Topology = "ring"
    full_precision_every: int = 100
    local_steps: int = 1
    seed: int = 0
    warmup: int | None = None


class AveragedAdamW(Averaged, torch.optim.AdamW):
    """The baseline: torch's fused AdamW after one fp32 all-reduce of all gradients."""

    def __init__(self, params: Parameters, lr: float) -> None:
        super().__init__(params, lr, BETAS, EPS, WEIGHT_DECAY, fused=True)
        self.transport = make_transport(None, self.param_groups[0]["params"][0].device)
        self._updates = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over the ranks, then update."""
        self._updates += 1
        return super().step(closure)

    def stats(self) -> dict[str, Any]:
        """Return the keys of ``OneBitAdam.stats`` that the display needs."""
        traffic = self.transport.traffic
        return {
            "phase": "uncompressed",
            "step": self._updates,
            "skipped_steps": 0,
            "freeze_step": None,
            "bytes_step": traffic.bytes_step,
            "bytes_total": traffic.bytes_total,
            "collectives_step": traffic.collectives_step,
            "bytes_fp32": traffic.bytes_step,
        }


def _freeze(settings: Settings) -> Freeze:
    """Say when the variance is frozen; a number knows the learning rate's warm-up by itself."""
    step = settings.freeze_step
    return Freeze(step=step, lr_warmup_steps=settings.lr_warmup_steps if step == "auto" else 0)


def _adamw(params: Parameters, settings: Settings) -> torch.optim.Optimizer:
    return AveragedAdamW(params, settings.lr)


def _onebit_adam(params: Parameters, settings: Settings) -> torch.optim.Optimizer:
    if settings.warmup is not None:
        return OneBitAdam(params, settings.lr, BETAS, EPS, WEIGHT_DECAY, warmup=settings.warmup)
    return OneBitAdam(params, settings.lr, BETAS, EPS, WEIGHT_DECAY, freeze_step=_freeze(settings))


def _zero_one_adam(params: Parameters, settings: Settings) -> torch.optim.Optimizer:
    """Renew the variance until 1-bit Adam would freeze it; rounds are long where the learning rate is small."""
    assert settings.freeze_step != "auto"  # refused with this one
    frozen, doubled = settings.freeze_step, max(1, settings.steps // 10)
    rounds = policies.DoublingRounds(after=2 * frozen, scaler=doubled, most=max(4, settings.local_steps))
    return ZeroOneAdam(
        params,
        settings.lr,
        BETAS,
        EPS,
        WEIGHT_DECAY,
        variance_policy=policies.DoublingVariance(scaler=max(16, 2 * frozen // 3), until=frozen),
        sync_policy=policies.AlignedRounds(rounds, settings.looked_at_every),
    )


def _onebit_lion(params: Parameters, settings: Settings) -> torch.optim.Optimizer:
    return OneBitLion(params, settings.lr, weight_decay=LION_WEIGHT_DECAY)


def _lamb(params: Parameters, settings: Settings) -> torch.optim.Optimizer:
    return Lamb(params, settings.lr, BETAS, LAMB_EPS, WEIGHT_DECAY)


def _onebit_lamb(params: Parameters, settings: Settings, adaptive: bool = True) -> torch.optim.Optimizer:
    how: dict[str, Any] = {"warmup": settings.warmup}
    if settings.warmup is None or not adaptive:
        how = PAPER | {"freeze_step": _freeze(settings), "layerwise": Layerwise(adaptive=adaptive)}
    return OneBitLamb(params, settings.lr, BETAS, LAMB_EPS, WEIGHT_DECAY, **how)


def _marsit(params: Parameters, settings: Settings) -> torch.optim.Optimizer:
    return MarsitAdam(
        params,
        settings.lr,
        BETAS,
        EPS,
        WEIGHT_DECAY,
        topology=settings.topology,
        rounds=Rounds(
            full_precision_every=settings.full_precision_every, local_steps=settings.local_steps, seed=settings.seed
        ),
    )


def _baseline(params: Parameters, settings: Settings, aggregation: str) -> torch.optim.Optimizer:
    from .baselines import BaselineAdam

    return BaselineAdam(
        params,
        settings.lr,
        BETAS,
        EPS,
        WEIGHT_DECAY,
        aggregation=aggregation,
        global_ratio=BASELINES[aggregation],
        topology=settings.topology,
        local_steps=settings.local_steps,
        seed=settings.seed,
    )


class Entry(NamedTuple):
    """How an optimizer is made from named parameters and ``Settings``, and its usual learning rate."""

    make: Callable[[Parameters, Settings], Any]
    lr: float


BASELINES = {"psgd": 1.0, "signsgd": 1.0, "ef-signsgd": 1.0, "ssdm": 10.0, "cascading": 1.0}
"""Global ratio of each optimizer that Marsit is measured against; they are the lab's."""

OPTIMIZERS = {
    "adamw": Entry(_adamw, 3e-3),
    "onebit-adam": Entry(_onebit_adam, 3e-3),
    "zero-one-adam": Entry(_zero_one_adam, 3e-3),
    "onebit-lion": Entry(_onebit_lion, 1e-3),
    "lamb": Entry(_lamb, 2e-2),
    "onebit-lamb": Entry(_onebit_lamb, 2e-2),
    "onebit-lamb-frozen": Entry(partial(_onebit_lamb, adaptive=False), 2e-2),
    "marsit": Entry(_marsit, 3e-3),
    **{name: Entry(partial(_baseline, aggregation=name), 3e-3) for name in BASELINES},
}
"""By name; each optimizer has ``stats()``."""

FREEZE = ("onebit-adam", "onebit-lamb", "onebit-lamb-frozen")
"""Those that send floats until they freeze."""

AGREE_IN_ROUNDS = ("marsit", *BASELINES)
"""Those of them that take a topology and local steps."""
