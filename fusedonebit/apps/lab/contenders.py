"""The lab's optimizers by name: ours, under each named numerics, and what they are measured against."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import (
    Faults,
    Freeze,
    Lamb,
    MarsitAdam,
    MarsitSGD,
    Numerics,
    OneBitAdam,
    OneBitLamb,
    Rounds,
    ZeroOneAdam,
    policies,
)
from ...comm import CompressedAllReduce, Topology, Transport
from ...core.settings import VARIANCE_FLOOR
from ...optim.averaging import AdamUpdate, AveragingOptimizer
from ...optim.freezing import DeadCoordinates
from ...triton_kernels import TAIL, Coef, freeze
from ..averaged import Averaged
from .baseline_reducers import Coding
from .baselines import BaselineAdam, BaselineSGD
from .tasks import Task

BETAS = (0.9, 0.99)
EPS, LAMB_EPS = 1e-8, 1e-6
EVALUATED = (0.92, 0.94, 0.96, 0.98, 1.0)
"""Shares of the steps after which the metric is taken; their mean counts."""


@dataclass(frozen=True)
class Key:
    """Which run."""

    task: str
    optimizer: str
    seed: int
    workers: int = 4


@dataclass
class Setting:
    """Holds what an optimizer is made of: a model's parameters, the task, and which run and model of it this is."""

    params: list[Tensor]
    task: Task
    freeze_step: int
    transport: Transport
    key: Key
    model: int
    earlier: Callable[[Key, str], list[dict[str, Any]]]
    """Returns each model's state at the freeze, in another seed's run with the optimizer that it names."""


Make = Callable[[Setting], torch.optim.Optimizer]


class FrozenVariance(AveragingOptimizer):
    """An optimizer whose variance stays after ``freeze_step`` updates, raised as ours; nothing is compressed."""

    freeze_step: int | None = None
    floor = VARIANCE_FLOOR

    def coefficient_table(self) -> Tensor:
        """See ``DistributedOptimizer``."""
        if self.freeze_step is None or self.outcomes.updates < self.freeze_step:
            return super().coefficient_table()
        if self.outcomes.updates == self.freeze_step:
            self._freeze()
        frozen_at = torch.full_like(self.own_steps, self.freeze_step)
        coef = self.coefficients(self.param_groups, self.own_steps, frozen_at)
        coef[:, Coef.BETA2], coef[:, Coef.ONE_MINUS_BETA2] = 1.0, 0.0
        return coef

    def _freeze(self) -> None:
        layout, block_tensor = self.layout, self._block_tensor
        dead = DeadCoordinates(layout, block_tensor, self.exp_avg_sq, self.live.numel, self.shards)
        as_it_is = torch.ones(len(layout.sizes), len(Coef), device=self.device)
        tables = (as_it_is, block_tensor, dead.mean, dead.mean * self.floor)
        freeze(layout.sizes, layout.block_size, self.exp_avg, self.exp_avg_sq, False, False, *tables)


class AveragedAdam(AdamUpdate, FrozenVariance):
    """Adam on averaged gradients."""

    def __init__(self, params: Iterable[Tensor], lr: float, process_group: Transport) -> None:
        defaults = {"lr": lr, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
        super().__init__(params, defaults, process_group=process_group, numerics=Numerics(bias_correction=True))


class NaiveOneBitAdam(AveragedAdam):
    """Adam on compressed gradients: no warm-up, nothing frozen. The variance sees the compression error squared."""

    def build(self) -> None:
        """See ``DistributedOptimizer``."""
        super().build()
        self._reducer = CompressedAllReduce(self.layout, self.transport, device=self.device)

    def _held(self) -> list[Tensor]:
        return [*super()._held(), *self._reducer.state()]

    def _exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        self._reducer(grads, abort=abort)
        grad = torch.nn.functional.pad(self._reducer.result(), (0, TAIL))
        self._update(grad, coef, self._reducer.flags)
        return self._reducer.flags


class FreezableLamb(FrozenVariance, Lamb):
    """LAMB whose variance may stay; its coefficients go on."""


class AveragedSGD(Averaged, torch.optim.SGD):
    """SGD with momentum on averaged gradients."""

    def __init__(self, params: Iterable[Tensor], lr: float, process_group: Transport) -> None:
        super().__init__(params, lr, momentum=0.9)
        self._transport = process_group


def _sgd(of: Setting) -> torch.optim.Optimizer:
    return AveragedSGD(of.params, of.task.lr * of.task.sgd, of.transport)


def _adam(of: Setting, kind: type[AveragedAdam] = AveragedAdam, frozen: bool = False, floor: float = 0.0) -> Any:
    optimizer = kind(of.params, of.task.lr, of.transport)
    optimizer.freeze_step, optimizer.floor = (of.freeze_step if frozen else None), floor
    return optimizer


def _lamb(of: Setting, frozen: bool = False) -> Any:
    lr = of.task.lr * of.task.lamb
    optimizer = FreezableLamb(of.params, lr, BETAS, LAMB_EPS, 0.0, process_group=of.transport)
    optimizer.freeze_step = of.freeze_step if frozen else None
    return optimizer


def _onebit_adam(of: Setting, **numerics: Any) -> Any:
    options: dict[str, Any] = {"freeze_step": of.freeze_step, "process_group": of.transport} | numerics
    return OneBitAdam(of.params, of.task.lr, BETAS, EPS, 0.0, **options)


def _zero_one_adam(of: Setting, most: int = 4, **numerics: Any) -> Any:
    """Renew the variance in five sixths of 1-bit Adam's warm-up; rounds are long where lr is small."""
    steps = of.task.steps
    rounds = policies.DoublingRounds(after=2 * of.freeze_step, scaler=steps // 10, most=most)
    options: dict[str, Any] = {
        "variance_policy": policies.DoublingVariance(scaler=2 * of.freeze_step // 3, until=of.freeze_step),
        "sync_policy": policies.AlignedRounds(rounds, math.gcd(*(int(share * steps) for share in EVALUATED))),
        "process_group": of.transport,
    } | numerics
    return ZeroOneAdam(of.params, of.task.lr, BETAS, EPS, 0.0, **options)


def _onebit_lamb(of: Setting, **numerics: Any) -> Any:
    lr = of.task.lr * of.task.lamb
    options: dict[str, Any] = {"freeze_step": of.freeze_step, "process_group": of.transport} | numerics
    return OneBitLamb(of.params, lr, BETAS, LAMB_EPS, 0.0, **options)


def _warm(of: Setting, make: Callable[..., Any] = _onebit_adam) -> Any:
    """Make ours without a warm-up: with the variance of another seed's run at its freeze."""
    with _EARLIER_LOCK:
        earlier = (make, of.task, of.key.seed, of.model)
        if earlier not in _EARLIER:
            for model, state in enumerate(of.earlier(of.key, of.key.optimizer.removesuffix("-warm-start"))):
                _EARLIER[make, of.task, of.key.seed, model] = state
    return make(of, freeze_step=Freeze(step=0, warm_start=_EARLIER[earlier]))


def _marsit(of: Setting, topology: Topology = "ring", **rounds: Any) -> Any:
    """Make Marsit, whose local update is SGD with momentum on images, Adam on text."""
    agreed = Rounds(**rounds, seed=of.key.seed)
    options: dict[str, Any] = {"topology": topology, "rounds": agreed, "process_group": of.transport}
    if of.task.images:
        return MarsitSGD(of.params, of.task.lr * of.task.sgd, 0.9, 0.0, **options)
    return MarsitAdam(of.params, of.task.lr, BETAS, EPS, 0.0, **options)


def _baseline(
    of: Setting, aggregation: str, images: float = 1.0, text: float = 1.0, lr: float = 1.0, coding: Coding = "fixed"
) -> Any:
    """Make one of those that Marsit is measured against, at ``lr`` times its rate.

    Steps of signs are in units of the task's ``lr``, Adam's.
    """
    options: dict[str, Any] = {"aggregation": aggregation, "coding": coding, "seed": of.key.seed}
    options["process_group"] = of.transport
    if of.task.images:
        ratio = images / of.task.sgd
        return BaselineSGD(of.params, lr * of.task.lr * of.task.sgd, 0.9, 0.0, global_ratio=ratio, **options)
    return BaselineAdam(of.params, lr * of.task.lr, BETAS, EPS, 0.0, global_ratio=text, **options)


_EARLIER: dict[tuple[Any, ...], dict[str, Any]] = {}
_EARLIER_LOCK = threading.Lock()

PAPER = Numerics(precondition=False, variance_floor=0.0, scale_scope="global", scale_norm="l2")
"""One scale for a worker's whole momentum, which is what is compressed."""

UNGUARDED = Faults(guard="off")

CONTENDERS: dict[str, Make] = {
    "adam": _adam,
    "adam-frozen": partial(_adam, frozen=True, floor=VARIANCE_FLOOR),
    "onebit-adam": _onebit_adam,
    "zero-one-adam": _zero_one_adam,
    "lamb": _lamb,
    "lamb-frozen": partial(_lamb, frozen=True),
    "onebit-lamb": _onebit_lamb,
    "onebit-adam-l2": partial(_onebit_adam, numerics=PAPER, faults=UNGUARDED),
    "onebit-adam-eps-inside": partial(_onebit_adam, numerics=replace(PAPER, eps_inside_sqrt=True), faults=UNGUARDED),
    "naive-onebit-adam": partial(_adam, kind=NaiveOneBitAdam),
    "onebit-lamb-paper": partial(_onebit_lamb, numerics=PAPER, faults=UNGUARDED),
    "onebit-adam-deepspeed-guarded": partial(
        _onebit_adam, numerics=replace(PAPER, bias_correction=False, dead_coordinates="keep")
    ),
    "zero-one-adam-16": partial(_zero_one_adam, most=16),
    "onebit-adam-global": partial(_onebit_adam, numerics=Numerics(scale_scope="global")),
    "onebit-adam-rewarm": partial(_onebit_adam, faults=Faults(rewarm_every=100, rewarm_steps=20)),
    "onebit-adam-warm-start": _warm,
    "onebit-lamb-warm-start": partial(_warm, make=_onebit_lamb),
    "onebit-adam-freeze-3": partial(_onebit_adam, freeze_step=3),
    "onebit-adam-ternary": partial(_onebit_adam, numerics=Numerics(ternary=True)),
    "adam-frozen-no-floor": partial(_adam, frozen=True),
    "onebit-adam-l1": partial(_onebit_adam, numerics=replace(PAPER, scale_norm="l1"), faults=UNGUARDED),
    "onebit-adam-contractive": partial(
        _onebit_adam, numerics=replace(PAPER, scale_norm="contractive"), faults=UNGUARDED
    ),
    "sgd": _sgd,
    "psgd": partial(_baseline, aggregation="psgd"),
    "marsit-100": partial(_marsit, full_precision_every=100),
    "marsit": partial(_marsit, full_precision_every=0),
    "marsit-50": partial(_marsit, full_precision_every=50),
    "marsit-200": partial(_marsit, full_precision_every=200),
    "marsit-torus": partial(_marsit, topology="torus"),
    "marsit-owner": partial(_marsit, topology="owner"),
    "marsit-100-unlimited": partial(_marsit, full_precision_every=100, compensation_limit=None),
    "marsit-unlimited": partial(_marsit, full_precision_every=0, compensation_limit=None),
    "signsgd": partial(_baseline, aggregation="signsgd", images=3.0),
    "ef-signsgd": partial(_baseline, aggregation="ef-signsgd"),
    "ssdm": partial(_baseline, aggregation="ssdm", images=30.0, text=10.0),
    "cascading": partial(_baseline, aggregation="cascading"),
    **{f"cascading-lr/{by}": partial(_baseline, aggregation="cascading", lr=1 / by) for by in (10, 100, 1000, 10000)},
    "ssdm-lr/3": partial(_baseline, aggregation="ssdm", images=30.0, text=10.0, lr=1 / 3),
    "ssdm-lr*3": partial(_baseline, aggregation="ssdm", images=30.0, text=10.0, lr=3.0),
    "signsgd-elias": partial(_baseline, aggregation="signsgd", images=3.0, coding="elias"),
    "ef-signsgd-elias": partial(_baseline, aggregation="ef-signsgd", coding="elias"),
    "ssdm-elias": partial(_baseline, aggregation="ssdm", images=30.0, text=10.0, coding="elias"),
}
"""By name; those that the claims are about come first. A plain "onebit-…" has our defaults."""
