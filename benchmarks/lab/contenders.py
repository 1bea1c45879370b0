"""The lab's optimizers by name: ours, under each named numerics, and what they are measured against."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import product
from typing import Any, get_args

import torch

from fusedonebit import (
    AdamW,
    Faults,
    MarsitAdam,
    Numerics,
    OneBitAdam,
    OneBitLamb,
    OneBitLion,
    Rounds,
    ZeroOneAdam,
    policies,
)
from fusedonebit.apps.averaged import Averaged, averaged_adamw
from fusedonebit.apps.train.baselines import BaselineAdam
from fusedonebit.core.resolved import Options
from fusedonebit.core.settings import VARIANCE_FLOOR, StateKind
from fusedonebit.optim.muon import LEAD

from .ablations import AveragedAdam, FreezableLamb, LivingAdam, settled
from .alike import AlikeTransport
from .batched_muon import onebit_muon
from .compressed import OnAverages
from .rivals import RIVALS
from .rivals.frame import Rival
from .rivals.one_bit_muon import OneBitMuon as RivalMuon
from .rivals.one_bit_muon import Way
from .setting import BETAS, EPS, LAMB_EPS, WARM_UP, Contender, Params, Setting, between
from .workers import BatchedZeroOneAdam


def _torchs(params: Params, of: Setting) -> Averaged:
    return averaged_adamw(params, of.lr, of.transport, betas=BETAS, eps=EPS, weight_decay=of.weight_decay)


def _adam(params: Params, of: Setting, **frozen: Any) -> Any:
    defaults = {"lr": of.lr, "betas": BETAS, "eps": EPS, "weight_decay": of.weight_decay}
    return _frozen(AveragedAdam(params, defaults, of.transport), of, **frozen)


def _ours(params: Params, of: Setting, kind: Any = AdamW, **options: Any) -> Any:
    return kind(params, of.lr, BETAS, EPS, of.weight_decay, process_group=of.transport, **options)


def _lamb(params: Params, of: Setting, **frozen: Any) -> Any:
    lamb = FreezableLamb(params, of.lr, BETAS, LAMB_EPS, of.weight_decay, process_group=of.transport)
    return _frozen(lamb, of, **frozen)


def _frozen(
    optimizer: AveragedAdam | FreezableLamb, of: Setting, frozen: bool = False, floor: float = VARIANCE_FLOOR
) -> Any:
    optimizer.algorithm.stage.freeze_step, optimizer.algorithm.stage.floor = (of.freeze_step if frozen else None), floor
    return optimizer


def _onebit_adam(params: Params, of: Setting, **options: Any) -> Any:
    return OneBitAdam(params, of.lr, BETAS, EPS, of.weight_decay, **_two_stage(of, options))


def _living(params: Params, of: Setting, warmup: float, kind: Any = OneBitAdam, **options: Any) -> Any:
    options |= {"warmup": max(1, int(warmup * of.steps)), "process_group": of.transport}
    eps = LAMB_EPS if kind is OneBitLamb else EPS
    return kind(params, of.lr, BETAS, eps, of.weight_decay, **options)


def _onebit_lamb(params: Params, of: Setting, **options: Any) -> Any:
    return OneBitLamb(params, of.lr, BETAS, LAMB_EPS, of.weight_decay, **_two_stage(of, options))


def _two_stage(of: Setting, options: dict[str, Any]) -> dict[str, Any]:
    return {"freeze_step": of.freeze_step, "process_group": of.transport} | options


def _zero_one_adam(params: Params, of: Setting, most: int = 4) -> Any:
    """Space renewals and rounds as 0/1 Adam's paper, in proportion to the run's steps."""
    variance = policies.DoublingVariance(scaler=2 * of.freeze_step // 3, until=of.freeze_step)
    rounds = policies.DoublingRounds(2 * of.freeze_step, of.steps // 10, most)
    return _in_rounds(params, of, _aligned(of, rounds), variance)


def _own_variance(params: Params, of: Setting, length: int = 1) -> Any:
    return _in_rounds(params, of, _aligned(of, policies.FixedRounds(length)), None)


def _long_rounds(params: Params, of: Setting, length: int) -> Any:
    return _in_rounds(params, of, UntilEvaluated(length, tuple(of.evaluations)), None)


def _aligned(of: Setting, rounds: policies.SyncPolicy) -> policies.SyncPolicy:
    """Let all workers meet to be evaluated, and as often before."""
    return policies.AlignedRounds(rounds, math.gcd(*of.evaluations))


@dataclass(frozen=True)
class UntilEvaluated:
    """Rounds of ``length`` steps, cut where the run is evaluated and nowhere else."""

    length: int
    evaluations: tuple[int, ...]

    def steps(self, done: policies.Progress) -> int:
        now = done.steps + done.skipped
        return min([self.length, *(step - now for step in self.evaluations if step > now)])


def _in_rounds(
    params: Params, of: Setting, rounds: policies.SyncPolicy, variance: policies.VariancePolicy | None
) -> Any:
    kind = BatchedZeroOneAdam if isinstance(of.transport, AlikeTransport) else ZeroOneAdam
    given = (params, of.lr, BETAS, EPS, of.weight_decay)
    return kind(*given, variance_policy=variance, sync_policy=rounds, process_group=of.transport)


def _onebit_lion(params: Params, of: Setting) -> Any:
    return OneBitLion(params, of.lr, weight_decay=of.weight_decay, process_group=of.transport)


def _onebit_muon(params: Params, of: Setting) -> Any:
    """Compress matrices between the first and the last, as Muon's uncompressed contender orthogonalises them."""
    return onebit_muon(params, of, between(list(params)), betas=BETAS)


def _marsit(params: Params, of: Setting, every: int) -> Any:
    rounds = Rounds(full_precision_every=every, seed=of.seed)
    return MarsitAdam(params, of.lr, BETAS, EPS, of.weight_decay, rounds=rounds, process_group=of.transport)


def _psgd(params: Params, of: Setting) -> Any:
    """Make what Marsit is measured against without compression, whose updates ``benchmarks.marsit`` looks at."""
    options: dict[str, Any] = {"aggregation": "psgd", "seed": of.seed, "process_group": of.transport}
    return BaselineAdam(params, of.lr, BETAS, EPS, of.weight_decay, **options)


PAPER = Numerics(precondition=False, variance_floor=0.0, scale_scope="global", scale_norm="l2")
"""One scale for a worker's whole momentum, which is what is compressed."""

UNGUARDED = Faults(guard="off")


def _paper(**numerics: Any) -> Any:
    return partial(_onebit_adam, numerics=replace(PAPER, **numerics), faults=UNGUARDED)


of_adam = partial(Contender, parent="adamw", batched=True)
of_lamb = partial(Contender, parent="lamb", lamb=True, batched=True)
apart = partial(Contender, parent="adamw", rate=0.3)

STATES: tuple[StateKind, ...] = ("bf16", "8bit")
"""In which ours keep moments and residuals, besides float32."""
LENGTHS = (4, 8, 16, 32)
"""Of long rounds of 0/1 Adam."""

COMPRESSED: dict[str, dict[str, Any]] = {
    f"compress-{bits}{'' if feedback else '-none'}": {"bits": bits, "feedback": feedback}
    for bits, feedback in ((8, "bf16"), (4, "bf16"), (1, "bf16"), (8, None), (4, None))
}
COMPRESSED |= {
    f"compress-{bits}-fsdp{'-8bit' if feedback else ''}": {"bits": bits, "feedback": feedback, "sharded": True}
    for bits, feedback in product((8, 4), (None, "8bit"))
}
"""How ``fusedonebit.compress`` averages gradients; AdamW's plain by name, after "sgd-" and "muon-" the others'."""

MUONS: dict[str, dict[str, Any]] = {way: {"way": way} for way in get_args(Way)}
MUONS |= {"exact-lead": {"way": "exact", "lead": LEAD}}
MUONS |= {"ef21-rows": {"way": "ef21", "scale": "rows"}, "ef21-normalised": {"way": "ef21", "normalised": True}}
"""How a bit each way may lie around Muon's Newton-Schulz."""

CONTENDERS: dict[str, Contender] = {
    "adamw": of_adam(_torchs),
    "onebit-adam": of_adam(_onebit_adam),
    "onebit-adam-living": of_adam(partial(_living, warmup=0.05)),
    "onebit-adam-living-0": of_adam(partial(_living, warmup=0.0)),
    "zero-one-adam": of_adam(_zero_one_adam, local=True),
    "zero-one-adam-shared": of_adam(lambda params, of: _ours(params, of, ZeroOneAdam)),
    "zero-one-adam-own": of_adam(_own_variance, local=True),
    "zero-one-adam-own-2": of_adam(partial(_own_variance, length=2), local=True),
    **{f"zero-one-adam-own-{h}": of_adam(partial(_long_rounds, length=h), local=True) for h in LENGTHS},
    **{f"adamw-{state}": of_adam(partial(_ours, numerics=Numerics(state=state))) for state in STATES},
    **{
        f"onebit-adam-state-{state}": of_adam(partial(_living, warmup=0.05, numerics=Numerics(state=state)))
        for state in STATES
    },
    "lamb": of_lamb(_lamb),
    "onebit-lamb": of_lamb(_onebit_lamb),
    "onebit-lamb-living": of_lamb(partial(_living, warmup=0.05, kind=OneBitLamb)),
    "onebit-lion": Contender(_onebit_lion, parent="adamw", rate=0.1),
    "onebit-muon": Contender(_onebit_muon, parent="muon", batched=True),
    "marsit-adam": apart(partial(_marsit, every=100)),
    "adam-living": of_adam(partial(_living, warmup=0.05, kind=LivingAdam, faults=UNGUARDED)),
    "adam-frozen": of_adam(partial(_adam, frozen=True)),
    "lamb-frozen": of_lamb(partial(_lamb, frozen=True)),
    "onebit-adam-ternary": of_adam(partial(_onebit_adam, numerics=Numerics(ternary=True))),
    "onebit-adam-global": of_adam(partial(_onebit_adam, numerics=Numerics(scale_scope="global"))),
    "onebit-adam-freeze-3": of_adam(partial(_onebit_adam, freeze_step=3)),
    "onebit-adam-l2": of_adam(_paper()),
    "onebit-adam-l1": of_adam(_paper(scale_norm="l1")),
    "onebit-adam-contractive": of_adam(_paper(scale_norm="contractive")),
    "onebit-adam-eps-inside": of_adam(_paper(eps_inside_sqrt=True)),
    "onebit-adam-deepspeed-guarded": of_adam(
        partial(_onebit_adam, numerics=replace(PAPER, bias_correction=False, dead_coordinates="keep"))
    ),
    "onebit-lamb-paper": of_lamb(partial(_onebit_lamb, numerics=PAPER, faults=UNGUARDED)),
    **{name: of_adam(partial(OnAverages, base="adamw", **how)) for name, how in COMPRESSED.items()},
    **{
        name: Contender(partial(OnAverages, base=base, **how), parent=base, rate=rate, batched=True)
        for base, rate in (("sgd", 10.0), ("muon", 1.0))
        for name, how in {base: {}, **{f"{base}-{k}": v for k, v in COMPRESSED.items()}}.items()
    },
    **{
        f"onebit-muon-{name}": Contender(partial(RivalMuon, **how), parent="muon", batched=True)
        for name, how in MUONS.items()
    },
    "adam-frozen-no-floor": of_adam(partial(_adam, frozen=True, floor=0.0)),
    "zero-one-adam-16": of_adam(partial(_zero_one_adam, most=16), local=True),
    "psgd": apart(_psgd),
    **RIVALS,
}
"""By name; the headline's come first. A plain "onebit-..." has our defaults."""

HEADLINE = ("adamw", "onebit-adam", "zero-one-adam-own", "lamb", "onebit-lamb-living")
"""Uncompressed and ours: what the headline table is about."""

CONSTANTS = (WARM_UP, VARIANCE_FLOOR)
"""What settings follow from besides."""


LATER = {"state": "fp32", "release_gradients": False, "model_parallel": None, "average_dtype": torch.bfloat16}
"""Options that came after the first recorded runs, and what those were made with."""

EARLIER = {"rewarm_steps": "rewarm_every=0, "}
"""Before which options recorded runs have others that are gone, and with what."""


@dataclass(frozen=True)
class Told:
    """Options as recorded runs have them."""

    options: Any

    def __repr__(self) -> str:
        """Tell them as their own ``repr`` would, but for later ones that change nothing, and those that are gone."""
        of = self.options
        told = of.values() if isinstance(of, Options) else {each.name: getattr(of, each.name) for each in fields(of)}
        said = [f"{EARLIER.get(k, '')}{k}={v!r}" for k, v in told.items() if k not in LATER or v != LATER[k]]
        return f"{type(of).__qualname__}({', '.join(said)})"


def settings(name: str, steps: int, weight_decay: float) -> tuple[Any, ...]:
    """Return what an optimizer was made with, and what it then has: the package's defaults among it."""
    make = CONTENDERS[name].make
    made = make([torch.nn.Parameter(torch.zeros(1))], Setting(1.0, steps, weight_decay, 0, AlikeTransport(0, 4)))
    given = {key: made.defaults[key] for key in ("betas", "eps", "global_ratio") if key in made.defaults}
    options, *frozen = settled(made)
    given_here = make.keywords if isinstance(make, partial) else {}
    told = {key: _told(value) for key, value in given_here.items()}
    return given, _told(made.options if isinstance(made, Rival) else options), frozen, told


@dataclass(frozen=True)
class Named:
    """A class as recorded runs name it: where the lab's were when they were made."""

    kind: type

    def __repr__(self) -> str:
        """Name it as its own ``repr`` would have."""
        return repr(self.kind).replace("'benchmarks.lab.", "'fusedonebit.apps.lab.")


def _told(value: Any) -> Any:
    if isinstance(value, type):
        return Named(value)
    return Told(value) if is_dataclass(value) else value
