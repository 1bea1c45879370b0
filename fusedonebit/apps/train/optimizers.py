"""The optimizers that ``fusedonebit train`` knows by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

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
    OneBitMuon,
    Rounds,
    ZeroOneAdam,
    policies,
    recording,
)
from ...comm import Topology
from ..averaged import Averaged, averaged_adamw
from ..parsing import InputError

Parameters = Iterable[tuple[str, Tensor]]

ADAM: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
LAMB = ADAM | {"eps": 1e-6}
PAPER: dict[str, Any] = {
    "numerics": Numerics(scale_norm="l2", scale_scope="global", variance_floor=0.0),
    "faults": Faults(guard="off"),
}
"""1-bit LAMB's own numerics, with a variance that is frozen: what its figures are drawn with."""


@dataclass(frozen=True)
class Job:
    """Everything the command line says about a run; equal on all ranks.

    ``batch_size`` counts sequences per rank; ``optimizers`` are trained one after the other from
    the same initial values on the same batches. ``lr`` None is each optimizer's own. ``warmup`` are the uncompressed
    updates of one whose variance is shared; None: it is frozen, too.
    """

    optimizers: tuple[str, ...]
    text: tuple[str, ...]
    steps: int
    freeze_step: int | Literal["auto"]
    model: str
    batch_size: int
    seq_len: int
    lr: float | None
    lr_warmup_steps: int
    seed: int
    out: str
    resume: bool
    eval_every: int
    save_every: int
    topology: Topology | Literal["auto"] = "ring"
    full_precision_every: int = 100
    local_steps: int = 1
    warmup: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ddp: bool = False

    @property
    def metrics(self) -> Path:
        """One JSON object per line and measured step."""
        return Path(self.out) / recording.METRICS


def _freeze(job: Job) -> Freeze:
    """Say when the variance is frozen; a number knows the learning rate's warm-up by itself."""
    return Freeze(step=job.freeze_step, lr_warmup_steps=job.lr_warmup_steps if job.freeze_step == "auto" else 0)


def _onebit_adam(params: Parameters, lr: float, job: Job) -> torch.optim.Optimizer:
    when: dict[str, Any] = {"freeze_step": _freeze(job)} if job.warmup is None else {"warmup": job.warmup}
    return OneBitAdam(params, lr, **ADAM, **when)


def _zero_one_adam(params: Parameters, lr: float, job: Job) -> torch.optim.Optimizer:
    """Renew the variance until 1-bit Adam would freeze it; rounds are long where the learning rate is small."""
    assert job.freeze_step != "auto"  # refused with this one
    frozen, doubled = job.freeze_step, max(1, job.steps // 10)
    rounds = policies.DoublingRounds(after=2 * frozen, scaler=doubled, most=max(4, job.local_steps))
    variance = policies.DoublingVariance(scaler=max(16, 2 * frozen // 3), until=frozen)
    aligned = policies.AlignedRounds(rounds, math.gcd(job.steps, job.eval_every, job.save_every))
    return ZeroOneAdam(params, lr, **ADAM, variance_policy=variance, sync_policy=aligned)


def _onebit_lamb(params: Parameters, lr: float, job: Job, adaptive: bool = True) -> torch.optim.Optimizer:
    how: dict[str, Any] = {"warmup": job.warmup}
    if job.warmup is None or not adaptive:
        how = PAPER | {"freeze_step": _freeze(job), "layerwise": Layerwise(adaptive=adaptive)}
    return OneBitLamb(params, lr, **LAMB, **how)


def _marsit(params: Parameters, lr: float, job: Job) -> torch.optim.Optimizer:
    assert job.topology != "auto"  # chosen by now
    rounds = Rounds(full_precision_every=job.full_precision_every, local_steps=job.local_steps, seed=job.seed)
    return MarsitAdam(params, lr, **ADAM, topology=job.topology, rounds=rounds)


def _matrices(params: Parameters) -> tuple[list[Tensor], list[Tensor]]:
    """Return what Muon trains, and what it leaves to AdamW: vectors and embeddings."""
    named = list(params)
    matrices = [p for name, p in named if name.startswith("blocks.") and p.dim() == 2]
    return matrices, [p for name, p in named if not (name.startswith("blocks.") and p.dim() == 2)]


def _muon(params: Parameters, lr: float, job: Job) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise InputError(f"muon is torch's own, from 2.9 on, got torch {torch.__version__}; onebit-muon needs none")
    matrices, rest = _matrices(params)
    muon = torch.optim.Muon(matrices, lr, ADAM["weight_decay"], adjust_lr_fn="match_rms_adamw")
    return Averaged([muon, torch.optim.AdamW(rest, lr, **ADAM, fused=True)])


def _onebit_muon(params: Parameters, lr: float, job: Job) -> torch.optim.Optimizer:
    matrices, rest = _matrices(params)
    groups: Any = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
    return OneBitMuon(groups, lr, ADAM["weight_decay"], betas=ADAM["betas"], adjust_lr_fn="match_rms_adamw")


def _baseline(params: Parameters, lr: float, job: Job, name: str) -> torch.optim.Optimizer:
    from .baselines import BaselineAdam

    wire: dict[str, Any] = {"topology": job.topology, "local_steps": job.local_steps, "seed": job.seed}
    return BaselineAdam(params, lr, **ADAM, aggregation=name, global_ratio=BASELINES[name], **wire)


BASELINES = {"psgd": 1.0, "signsgd": 1.0, "ef-signsgd": 1.0, "ssdm": 10.0, "cascading": 1.0}
"""Global ratio of each optimizer that Marsit is measured against; they are the lab's."""

OPTIMIZERS: dict[str, tuple[Callable[[Parameters, float, Job], Any], float]] = {
    "adamw": (lambda params, lr, job: averaged_adamw(params, lr, **ADAM, fused=True), 3e-3),
    "onebit-adam": (_onebit_adam, 3e-3),
    "zero-one-adam": (_zero_one_adam, 3e-3),
    "onebit-lion": (lambda params, lr, job: OneBitLion(params, lr, weight_decay=0.03), 1e-3),
    "muon": (_muon, 3e-3),
    "onebit-muon": (_onebit_muon, 3e-3),
    "lamb": (lambda params, lr, job: Lamb(params, lr, **LAMB), 2e-2),
    "onebit-lamb": (_onebit_lamb, 2e-2),
    "onebit-lamb-frozen": (partial(_onebit_lamb, adaptive=False), 2e-2),
    "marsit": (_marsit, 3e-3),
    **{name: (partial(_baseline, name=name), 3e-3) for name in BASELINES},
}
"""How each is made from named parameters, a learning rate and a ``Job``, and its usual learning rate; all have
``stats()``."""

TORCHS = ("adamw", "muon")
"""Those that are torch's own, on averages."""

FREEZE = ("onebit-adam", "onebit-lamb", "onebit-lamb-frozen")
"""Those that send floats until they freeze."""

AGREE_IN_ROUNDS = ("marsit", *BASELINES)
"""Those of them that take a topology and local steps."""
