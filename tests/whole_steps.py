"""Whole steps of every optimizer, for their launch keys: in each phase, each option that changes a launch by itself.

Beside the defaults each option is taken once, and some that meet in the same kernel together. Tensors are so large that
their layout has blocks of 1024, and numbers of blocks that are neither 1 nor multiples of 16, but in ``LAYOUTS``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import compressing
import torch
from launch_keys import Key, recording, write
from matrices import as_matrices
from optimizers import by_name, objects
from ranks import run_ranks
from sharded import like, make_mesh, sharded_parameters
from tape import in_a_capture
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fusedonebit import (
    AdamW,
    FusedOneBitWarning,
    Lamb,
    MarsitAdam,
    MarsitSGD,
    OneBitAdam,
    OneBitLamb,
    OneBitLion,
    ZeroOneAdam,
)
from fusedonebit.comm import LocalTransport, SimulatedGroup
from fusedonebit.optim.policies import Progress
from fusedonebit.triton_kernels import pack

USUAL = (200_000, 3072, 17)
LAYOUTS = {
    "one block": (5,),
    "tensors and blocks by sixteens": (1024,) * 32,
    "small blocks": (5,) * 43,
    "scales of long tensors": (300_000, 140_000),
}
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
Noting = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Run:
    """Steps of an optimizer.

    Attributes:
        kind: What makes it, of parameters and settings by name.
        options: Those settings.
        steps: How many.
        world_size: W.
        sizes: Of its tensors, half of which are in each of two groups.
        dtypes: Of them, in turn; gradients are of ``grad_dtypes``, or of their parameters'.
        special: What else is so, of "absent", "masked", "unaligned", "nonfinite", "scaled", "captured" and "warm".
    """

    kind: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    world_size: int = 2
    sizes: tuple[int, ...] = USUAL
    dtypes: tuple[torch.dtype, ...] = (FLOAT32,)
    grad_dtypes: tuple[torch.dtype, ...] = ()
    special: tuple[str, ...] = ()


@dataclass(frozen=True)
class Renews:
    """Renews the variance in these rounds."""

    rounds: tuple[int, ...] = (0, 1, 4)

    def renews(self, done: Progress) -> bool:
        return done.rounds in self.rounds


@dataclass(frozen=True)
class Lengths:
    """Rounds of so many steps, by number; the last one's length then stays."""

    lengths: tuple[int, ...] = (1, 1, 1, 4, 1, 1, 2)

    def steps(self, done: Progress) -> int:
        return self.lengths[min(done.rounds, len(self.lengths) - 1)]


ADAM = Run(by_name(OneBitAdam, freeze_step=3))
LAMB = Run(by_name(OneBitLamb, freeze_step=3))
PLAIN_LAMB = Run(by_name(Lamb), steps=3)
LION = Run(by_name(OneBitLion), steps=4)
ZERO_ONE = Run(by_name(ZeroOneAdam, variance_policy=Renews(), sync_policy=Lengths()), steps=12)
OWN_VARIANCES = Run(by_name(ZeroOneAdam, sync_policy=Lengths((1, 3, 2))), steps=8)
MUON = Run(by_name(as_matrices), steps=4)
SGD = Run(by_name(MarsitSGD, full_precision_every=3), steps=7)
MARSIT_ADAM = Run(by_name(MarsitAdam, full_precision_every=3), steps=7)
BASES = {
    "OneBitAdam": ADAM,
    "OneBitLamb": LAMB,
    "AdamW": Run(by_name(AdamW), steps=3),
    "Lamb": PLAIN_LAMB,
    "OneBitLion": LION,
    "OneBitMuon": MUON,
    "ZeroOneAdam": ZERO_ONE,
    "ZeroOneAdam with own variances": OWN_VARIANCES,
    "MarsitSGD": SGD,
    "MarsitAdam": MARSIT_ADAM,
}
ONEBIT, ROUNDS = ("OneBitAdam", "OneBitLamb"), ("MarsitSGD", "MarsitAdam")

OF_ALL: dict[str, dict[str, Any]] = {
    "defaults": {},
    "W = 1": {"world_size": 1},
    "W = 8": {"world_size": 8},
    "bf16": {"dtypes": (BFLOAT16,)},
    "fp16": {"dtypes": (FLOAT16,)},
    "mixed dtypes": {"dtypes": (FLOAT32, BFLOAT16, FLOAT16)},
    "unaligned": {"special": ("unaligned",)},
    "unaligned bf16": {"dtypes": (BFLOAT16,), "special": ("unaligned",)},
    "masks": {"special": ("masked",)},
    "absent gradients": {"special": ("absent",)},
    "a NaN": {"special": ("nonfinite",)},
    "a GradScaler": {"special": ("scaled",)},
    "a GradScaler, clipped": {"special": ("scaled",), "options": {"max_grad_norm": 0.5}},
    "master weights": {"dtypes": (BFLOAT16,), "options": {"master_weights": True}},
    "stochastic rounding": {"dtypes": (BFLOAT16,), "options": {"stochastic_rounding": True}},
    "stochastic rounding, mixed": {"dtypes": (BFLOAT16, FLOAT32), "options": {"stochastic_rounding": True}},
    "no weight decay": {"options": {"weight_decay": 0.0}},
    "weight decay": {"options": {"weight_decay": 0.1}},
    "clipped": {"options": {"max_grad_norm": 0.5}},
    "maximize": {"options": {"maximize": True}},
    **{f"blocks of {size}": {"options": {"block_size": size}} for size in (512, 256, 128)},
    **{name: {"sizes": sizes} for name, sizes in LAYOUTS.items()},
    **{f"{name}, W = 1": {"sizes": sizes, "world_size": 1} for name, sizes in LAYOUTS.items()},
}
"""What is tried of every optimizer that has it."""

ALONE = {
    f"{what}, W = 1": OF_ALL[what] | {"world_size": 1}
    for what in (
        *("bf16", "fp16", "mixed dtypes", "unaligned", "masks", "absent gradients", "a NaN", "a GradScaler"),
        *("a GradScaler, clipped", "stochastic rounding", "clipped", "maximize"),
    )
}
"""Of those that read gradients where they lie."""
OF_STATE: dict[str, dict[str, Any]] = {
    "capturable": {"options": {"capturable": True}},
    "moments in bf16": {"options": {"state": "bf16"}},
    "moments in bf16, W = 1": {"options": {"state": "bf16"}, "world_size": 1},
    "moments in bf16, mixed dtypes": {"options": {"state": "bf16"}, "dtypes": (FLOAT32, BFLOAT16, FLOAT16)},
    "moments in codes": {"options": {"state": "8bit"}},
    "moments in codes, W = 1": {"options": {"state": "8bit"}, "world_size": 1},
    **{
        f"moments in {state}, {what}": {"options": {"state": state} | how, "dtypes": (BFLOAT16,), "world_size": 1}
        for state in ("bf16", "8bit")
        for what, how in {"bf16": {}, "stochastic rounding": {"stochastic_rounding": True}}.items()
    },
}

CORRECTED: dict[str, dict[str, Any]] = {
    f"{kept} corrections{where}": {"options": {"master_weights": kept}} | how
    for kept in ("8bit", "16bit")
    for where, how in (
        ("", {"dtypes": (BFLOAT16,)}),
        (", W = 1", {"dtypes": (BFLOAT16,), "world_size": 1}),
        (", mixed", {"dtypes": (BFLOAT16, FLOAT32)}),
    )
}

COMPRESSING: dict[str, dict[str, Any]] = {
    "ternary": {"options": {"ternary": True}},
    "ternary, W = 8": {"options": {"ternary": True}, "world_size": 8},
    "no precondition": {"options": {"precondition": False}},
    "no precondition, ternary": {"options": {"precondition": False, "ternary": True}},
    "no precondition, bf16": {"options": {"precondition": False}, "dtypes": (BFLOAT16,)},
    "eps inside": {"options": {"eps_inside_sqrt": True}},
    "no precondition, eps inside": {"options": {"precondition": False, "eps_inside_sqrt": True}},
    **{f"a scale for each {scope}": {"options": {"scale_scope": scope}} for scope in ("global", "layer", "bucket")},
    **{f"norm {norm}": {"options": {"scale_norm": norm}} for norm in ("l1", "l2")},
    "paper": {"options": {"precondition": False, "scale_norm": "l2", "scale_scope": "global", "guard": "off"}},
    "layers of many sizes": {"sizes": (5,) * 43, "options": {"scale_scope": "layer"}},
    "scales of long tensors, ternary": {"sizes": (300_000, 140_000), "options": {"ternary": True}},
    "layers, ternary": {"options": {"ternary": True, "scale_scope": "layer"}},
    "no bias correction": {"options": {"bias_correction": False}},
    "variance floor": {"options": {"variance_floor": 0.1}},
}
TWO_STAGES: dict[str, dict[str, Any]] = {
    "re-warm-up": {"options": {"refuse_every": 2, "rewarm_steps": 10}, "steps": 19},
    "re-warm-up, plain": {"options": {"refuse_every": 2, "rewarm_steps": 10, "precondition": False}, "steps": 19},
    "automatic freeze": {"options": {"freeze_step": "auto", "deadline": 4, "betas": (0.9, 0.5)}, "steps": 8},
    "guard off": {"options": {"guard": "off"}},
    "guard warns": {"options": {"guard": "warn"}},
    "bf16 variance": {"options": {"frozen_dtype": BFLOAT16}},
    "bf16 variance, W = 1": {"options": {"frozen_dtype": BFLOAT16}, "world_size": 1},
    "bf16 variance, no precondition": {"options": {"frozen_dtype": BFLOAT16, "precondition": False}},
    "bf16 variance, mixed": {"options": {"frozen_dtype": BFLOAT16}, "dtypes": (FLOAT32, BFLOAT16)},
    "dead coordinates kept": {"options": {"dead_coordinates": "keep", "precondition": False, "variance_floor": 0.0}},
    "buckets": {"options": {"buckets": 3}},
    "buckets, W = 1": {"options": {"buckets": 3}, "world_size": 1},
    "buckets, ternary, no precondition": {"options": {"buckets": 3, "ternary": True, "precondition": False}},
    "captured": {"options": {"capturable": True}, "special": ("captured",)},
    "captured, W = 1": {"options": {"capturable": True}, "special": ("captured",), "world_size": 1},
    "captured, clipped": {"options": {"capturable": True, "max_grad_norm": 0.5}, "special": ("captured",)},
    "captured, no precondition": {"options": {"capturable": True, "precondition": False}, "special": ("captured",)},
    "warm start": {"options": {"freeze_step": 0}, "special": ("warm",)},
}
LIVING: dict[str, Any] = {"variance": "shared", "betas": (0.9, 0.9)}


def with_options(case: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return case | {"options": case.get("options", {}) | options}


OF_ADAM: dict[str, dict[str, Any]] = {
    "living": {"options": LIVING, "steps": 8},
    **{
        f"living, {what}": with_options((OF_ALL | COMPRESSING | TWO_STAGES)[what], LIVING)
        for what in (
            *("W = 1", "bf16", "fp16", "mixed dtypes", "unaligned", "clipped", "a GradScaler", "absent gradients"),
            *("no precondition", "ternary", "eps inside", "buckets", "blocks of 128"),
        )
    },
}
OF_RESIDUALS: dict[str, dict[str, Any]] = {
    f"state in {state}, {name}": with_options(case, {"state": state})
    for state in ("bf16", "8bit")
    for name, case in {
        "frozen": {},
        **{
            f"frozen, {what}": (OF_ALL | COMPRESSING | TWO_STAGES)[what]
            for what in ("W = 1", "bf16", "ternary", "eps inside", "blocks of 128", "buckets")
        },
        **{
            name: OF_ADAM[name]
            for name in ("living", "living, W = 1", "living, bf16", "living, ternary", "living, eps inside")
        },
    }.items()
}
OF_LAMB: dict[str, dict[str, Any]] = {
    **{name: case for name, case in OF_ADAM.items() if name != "living, no precondition"},
    "preconditioned": {"options": {"precondition": True}},
    "preconditioned, bf16 variance": {"options": {"precondition": True, "frozen_dtype": BFLOAT16}},
    "not adaptive": {"options": {"adaptive": False}},
    "not adaptive, no precondition": {"options": {"adaptive": False, "precondition": False}},
    "momentum scaled": {"options": {"precondition": False, "momentum_scaling": True}},
    "bf16 variance, ternary": {"options": {"frozen_dtype": BFLOAT16, "ternary": True}},
    "mixed, ternary": {"options": {"ternary": True, "precondition": False}, "dtypes": (FLOAT32, BFLOAT16)},
}
OF_ROUNDS: dict[str, dict[str, Any]] = {
    "rounds of 2": {"options": {"local_steps": 2}},
    "rounds of 2, mixed": {"options": {"local_steps": 2}, "dtypes": (FLOAT32, BFLOAT16)},
    "rounds of 2, no weight decay": {"options": {"local_steps": 2, "weight_decay": 0.0}},
    "torus": {"options": {"topology": "torus"}, "world_size": 4},
    "owner": {"options": {"topology": "owner"}},
    "owner, W = 8": {"options": {"topology": "owner"}, "world_size": 8},
    "owner, W = 1": {"options": {"topology": "owner"}, "world_size": 1},
    "compensation without a limit": {"options": {"compensation_limit": None}},
}
OF_ADAMW: dict[str, dict[str, Any]] = {
    f"bf16, W = 1, {n}-bit corrections, moments in codes": with_options(
        ALONE["bf16, W = 1"], {"state": "8bit", "master_weights": f"{n}bit"}
    )
    for n in (8, 16)
} | {"bf16, W = 1, clipped": with_options(ALONE["bf16, W = 1"], {"max_grad_norm": 0.5})}
EXTRA: dict[str, dict[str, dict[str, Any]]] = {
    "OneBitAdam": COMPRESSING | TWO_STAGES | OF_ADAM | OF_RESIDUALS | CORRECTED,
    "OneBitLamb": COMPRESSING | TWO_STAGES | OF_LAMB,
    "AdamW": ALONE | OF_STATE | OF_ADAMW | CORRECTED,
    "Lamb": ALONE | OF_STATE | {"eps inside": {"options": {"eps_inside_sqrt": True}}},
    "OneBitLion": CORRECTED | {f"mean, W = {w}": {"options": {"aggregation": "mean"}, "world_size": w} for w in (2, 8)},
    "OneBitMuon": CORRECTED | {what: case for what, case in OF_STATE.items() if what.startswith("moments in bf16")},
    "ZeroOneAdam": COMPRESSING,
    "ZeroOneAdam with own variances": {},
    "MarsitSGD": OF_ROUNDS | {"no momentum": {"options": {"momentum": 0.0}}},
    "MarsitAdam": OF_ROUNDS,
}


ROUNDED = ("stochastic rounding", "stochastic rounding, mixed")
REFUSED: dict[str, tuple[str, ...]] = {
    "ZeroOneAdam": (
        *(*ROUNDED, "eps inside", "no precondition, eps inside", "paper"),
        *(what for what in COMPRESSING if "ternary" in what),
        "a scale for each bucket",
    ),
    "ZeroOneAdam with own variances": ROUNDED,
    "OneBitMuon": ("masks",),
}
"""Options that an optimizer of these has not."""


def runs() -> dict[str, Run]:
    """Return all runs in this process, by name."""
    found = {}
    for name, base in BASES.items():
        for what, changes in (OF_ALL | EXTRA[name]).items():
            if what not in REFUSED.get(name, ()):
                found[f"{name}, {what}"] = replace(base, **changes)
    for kind in (OneBitAdam, OneBitLamb):
        found[f"{kind.__name__}, DeepSpeed's"] = Run(_like_deepspeed(kind, {"lr": 1e-3, "freeze_step": 3}))
    config = {"lr": 1e-3, "var_freeze_step": 4, "var_update_scaler": 2, "local_step_scaler": 3}
    found["ZeroOneAdam, DeepSpeed's"] = Run(_like_deepspeed(ZeroOneAdam, config), steps=16)
    return found | compressing.runs(Run)


def _like_deepspeed(kind: Any, config: dict[str, Any]) -> Callable[..., Any]:
    return lambda params, lr, **options: kind.from_deepspeed(params, config, **objects(**options))


# ---------------------------------------------------------------- taking steps


def gradient(p: Tensor, rank: int, step: int, i: int, dtype: torch.dtype, unaligned: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 10 * step + 1000 * i)
    return torch.randn(p.numel() + unaligned, generator=generator).to(dtype)[int(unaligned) :].view(p.shape)


class Rank:
    """One rank's part of a run."""

    def __init__(self, run: Run, rank: int, transport: Any) -> None:
        self.run, self.rank = run, rank
        generator = torch.Generator().manual_seed(3)
        self.unaligned = "unaligned" in run.special
        self.params = [
            torch.nn.Parameter(torch.randn(size + self.unaligned, generator=generator).to(dtype)[int(self.unaligned) :])
            for size, dtype in zip(run.sizes, run.dtypes * len(run.sizes), strict=False)
        ]
        options = dict(run.options)
        if "masked" in run.special:
            options["mask"] = {self.params[0]: torch.rand(run.sizes[0], generator=generator) > 0.3}
        if "warm" in run.special:
            earlier = Rank(replace(run, special=(), options={"freeze_step": 9}), rank, transport)
            earlier.steps(range(3))
            options["warm_start"] = earlier.optimizer.state_dict()
        groups = [{"params": self.params[::2]}, {"params": self.params[1::2], "lr": 1e-4}]
        self.optimizer = run.kind(groups[: len(self.params)], 1e-3, process_group=transport, **options)
        self.phases: set[str] = set()

    def steps(self, which: range) -> None:
        run = self.run
        for step in which:
            for i, p in enumerate(self.params):
                dtypes = run.grad_dtypes or (p.dtype,)
                p.grad = gradient(p, self.rank, step, i, dtypes[i % len(dtypes)], self.unaligned)
            if "absent" in run.special and step % 2:
                self.params[-1].grad = None
            if "nonfinite" in run.special and step in (1, run.steps - 2) and self.rank == 0:
                self.params[0].grad[0] = float("nan")
            if "scaled" in run.special:
                self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
            self.optimizer.step()
            self.phases.add(self.optimizer.phase)


def take(run: Run) -> set[str]:
    """Take a run's steps on simulated ranks; return the phases of its steps."""
    group = SimulatedGroup(run.world_size)
    captured, alone = "captured" in run.special, run.world_size == 1

    def begin(rank: int, transport: Any) -> Rank:
        each = Rank(run, rank, LocalTransport() if alone else transport)
        each.steps(range(run.steps - captured))
        return each

    def end(rank: int, transport: Any) -> None:
        ranks[rank].steps(range(run.steps - captured, run.steps))

    ranks = group.run(begin)
    if captured:
        with in_a_capture():
            group.run(end)
    return ranks[0].phases


# ---------------------------------------------------------------- on ranks that are processes


def hierarchy(rank: int, world_size: int, noting: Noting, change: Callable[[Run], Run] | None = None) -> Any:
    """Take steps with two levels, as ``change`` makes them; return what ``noting`` has noted of them."""
    mesh = init_device_mesh("cpu", (2, 2))
    with noting() as noted:
        for name, base in BASES.items():
            if name in (*ONEBIT, *ROUNDS):
                for dtype in (FLOAT32, BFLOAT16):
                    run = replace(base, options={"hierarchy": mesh, "hierarchy_dtype": dtype})
                    Rank(change(run) if change else run, rank, None).steps(range(run.steps))
    return noted


def shards(rank: int, world_size: int, noting: Noting) -> Any:
    """Take steps on DTensors; see ``hierarchy``."""
    mesh = make_mesh()
    with noting() as noted:
        for name in ONEBIT:
            generator = torch.Generator().manual_seed(0)
            tensors = [torch.randn(shape, generator=generator) for shape in ((400, 300), (7,), (1, 33))]
            optimizer = BASES[name].kind(sharded_parameters(tensors, mesh), 1e-3, process_group=mesh["replicate"])
            for _ in range(6):
                for p, whole in zip(optimizer.param_groups[0]["params"], tensors, strict=True):
                    p.grad = like(p, torch.randn(whole.shape, generator=generator))
                optimizer.step()
    return noted


def overlap(rank: int, world_size: int, noting: Noting) -> Any:
    """Take steps that overlap with the backward pass; see ``hierarchy``."""
    with noting() as noted:
        for name in ONEBIT:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Tanh(), torch.nn.Linear(200, 30))
            optimizer = BASES[name].kind(model.parameters(), 1e-3, overlap=True)
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 300)).square().mean().backward()
                optimizer.step()
    return noted


IN_PROCESSES = ((hierarchy, 4), (shards, 4), (overlap, 2))
"""Steps on ranks that are processes, and how many."""


def keys_of_all() -> tuple[set[Key], dict[str, set[str]]]:
    """Return the launch keys of all whole steps, and of ``pack``; and the phases that each optimizer was in."""
    warnings.simplefilter("ignore", FusedOneBitWarning)
    phases: dict[str, set[str]] = {}
    with recording() as keys:
        pack(torch.ones(1024))  # for users: steps pack in the kernels that compress
        for name, run in runs().items():
            try:
                phases.setdefault(name.split(",")[0], set()).update(take(run))
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
    each = [found for steps, ranks in IN_PROCESSES for found in run_ranks(steps, ranks, recording)]
    return keys.union(*each), phases


if __name__ == "__main__":  # a process of its own, for programs: TRITON_INTERPRET=1 python tests/whole_steps.py FILE
    write(keys_of_all()[0], Path(sys.argv[1]))
