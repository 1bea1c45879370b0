"""The optimizers by name, for tests of what holds for all of them; ranks are told a name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from fusedonebit import (
    AdamW,
    Faults,
    Freeze,
    Lamb,
    Layerwise,
    MarsitAdam,
    MarsitSGD,
    Numerics,
    OneBitAdam,
    OneBitLamb,
    OneBitLion,
    OneBitMuon,
    Rounds,
    Wire,
    ZeroOneAdam,
)
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.deepspeed.config import DeepSpeedLayerwise
from fusedonebit.optim.policies import DoublingRounds, DoublingVariance, EveryStep, FixedRounds

OBJECTS = {"numerics": Numerics, "wire": Wire, "faults": Faults, "layerwise": Layerwise, "rounds": Rounds}


def objects(**flat: Any) -> dict[str, Any]:
    """Sort settings, for tests that hand them around by name, into the option objects that have them."""
    if flat.pop("variant", "paper") == "deepspeed":
        names = [field.name for field in fields(Layerwise) if field.name in flat]
        flat["layerwise"] = DeepSpeedLayerwise(**{name: flat.pop(name) for name in names})
    sorted_in: dict[str, Any] = {}
    for argument, kind in OBJECTS.items():
        given = {field.name: flat.pop(field.name) for field in fields(kind) if field.name in flat}
        if given:
            sorted_in[argument] = kind(**given)
    freeze = {name: flat.pop(name) for name in ("lr_warmup_steps", "deadline", "warm_start") if name in flat}
    if freeze:
        sorted_in["freeze_step"] = Freeze(step=flat.pop("freeze_step", "auto"), **freeze)
    return flat | sorted_in


def by_name(kind: Callable[..., Any], **first: Any) -> Callable[..., Any]:
    """Make a constructor take settings by name, ``first`` among them, and ``refuse_every``; see ``refusing``."""

    def construct(params: Any, *args: Any, refuse_every: int = 0, **more: Any) -> Any:
        if not refuse_every:
            return kind(params, *args, **objects(**first | more))
        return refusing(kind(params, *args, **objects(**first | more | {"guard": "rewarm"})), refuse_every)

    return construct


def refusing(optimizer: DistributedOptimizer, every: int) -> DistributedOptimizer:
    """Let the guard ask for a re-warm-up after so many compressed updates, as if it had refused one, and else never."""

    def after_step(optimizer: Any, *_: Any) -> None:
        optimizer.algorithm.compression.guard._times = math.inf
        if (
            optimizer.phase == "compression"
            and optimizer.frame.steps.outcomes.updates >= optimizer.algorithm.warm_up.ended_at + every
        ):
            optimizer.frame.steps.outcomes.veto_at = 0

    optimizer.algorithm.compression.guard._times = math.inf
    optimizer.register_step_post_hook(after_step)
    return optimizer


ONEBIT: dict[str, Callable[..., DistributedOptimizer]] = {
    "onebit-adam": by_name(OneBitAdam),
    "onebit-adam-living": by_name(OneBitAdam, variance="shared"),
    "onebit-lamb": by_name(OneBitLamb),
    "onebit-lamb-frozen": by_name(OneBitLamb, variance="frozen", adaptive=False),
    "onebit-lamb-living": by_name(OneBitLamb, variance="shared"),
}
LIVING = ("onebit-adam-living", "onebit-lamb-living")
LAMBS = ("onebit-lamb", "onebit-lamb-frozen")

PAPER: dict[str, Any] = {"precondition": False, "scale_norm": "l2", "scale_scope": "global"}
PAPER |= {"variance_floor": 0.0, "guard": "off"}
"""The papers' algorithms: one scale for all of the momentum, which is what is compressed, and nobody watches."""

# After a warm-up of two or three steps v is a handful of squares: the first compressed updates may well be
# ten times the last uncompressed one, and the guard rightly refuses them. Tests of something else turn it off.
UNGUARDED: dict[str, Any] = {"guard": "off"}

EVERY = (AdamW, Lamb, MarsitAdam, MarsitSGD, OneBitAdam, OneBitLamb, OneBitLion, OneBitMuon, ZeroOneAdam)


def muon(params: Any, *args: Any, **options: Any) -> OneBitMuon:
    """Make one of parameters, or groups, whose vectors AdamW trains."""
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    made = []
    for group in groups:
        each = list(group["params"])
        for vectors in (False, True):
            chosen = [p for p in each if (p.dim() < 2) == vectors]
            if chosen:
                made.append({**group, "params": chosen, "algorithm": "adamw" if vectors else "muon"})
    return OneBitMuon(made, *args, **options)


def group_of(name: str, params: list[Any]) -> dict[str, Any]:
    """Return a group of vectors for an optimizer."""
    return {"params": params, **({"algorithm": "adamw"} if name == "OneBitMuon" else {})}


MAKE: dict[str, Callable[..., Any]] = {
    "OneBitAdam": by_name(OneBitAdam, freeze_step=2, guard="off"),
    "OneBitLamb": by_name(OneBitLamb, freeze_step=2, guard="off"),
    "AdamW, ours": by_name(AdamW),
    "Lamb": by_name(Lamb),
    "ZeroOneAdam": by_name(ZeroOneAdam, variance_policy=DoublingVariance(1), sync_policy=DoublingRounds(1, 2)),
    "ZeroOneAdam, own": by_name(ZeroOneAdam, sync_policy=EveryStep()),
    "MarsitSGD": by_name(MarsitSGD, momentum=0.9, full_precision_every=2),
    "MarsitAdam": by_name(MarsitAdam, full_precision_every=2),
    "OneBitLion": by_name(OneBitLion),
    "OneBitMuon": by_name(muon),
}
"""Every optimizer; two steps later what it sends is bits."""

WAYS: dict[str, Callable[..., Any]] = MAKE | {
    "ZeroOneAdam, living": by_name(ZeroOneAdam),
    "OneBitAdam, living": by_name(OneBitAdam, variance="shared", warmup=2, guard="off"),
    "OneBitLamb, living": by_name(OneBitLamb, variance="shared", warmup=2, guard="off"),
    "OneBitLion, mean": by_name(OneBitLion, aggregation="mean"),
    "ZeroOneAdam, one scale": by_name(
        ZeroOneAdam,
        variance_policy=DoublingVariance(1),
        sync_policy=EveryStep(),
        scale_scope="global",
        precondition=False,
    ),
    "ZeroOneAdam, rounds of 3": by_name(ZeroOneAdam, variance_policy=DoublingVariance(1), sync_policy=FixedRounds(3)),
    "ZeroOneAdam, own, rounds of 3": by_name(ZeroOneAdam, sync_policy=FixedRounds(3)),
    "MarsitSGD, rounds of 3": by_name(MarsitSGD, momentum=0.9, local_steps=3, full_precision_every=2),
    "MarsitAdam, owner, rounds of 2": by_name(MarsitAdam, topology="owner", local_steps=2, full_precision_every=3),
}
"""Every optimizer in each way that makes other steps of it: other variances, votes, scales, rounds of several steps."""

ALIVE: dict[str, Callable[..., Any]] = WAYS | {
    "OneBitAdam, auto": by_name(OneBitAdam, freeze_step="auto"),
    "OneBitAdam, guarded": by_name(OneBitAdam, freeze_step=2, max_grad_norm=1.0, ternary=True),
    "OneBitAdam, overlap": by_name(OneBitAdam, freeze_step=2, guard="off", overlap=True),
    "OneBitLamb, frozen": by_name(OneBitLamb, freeze_step=2, guard="off", adaptive=False),
    "AdamW": torch.optim.AdamW,
}
"""Those, others that hold on to other objects, and torch's, for what is no matter of a step: copies, memory."""

EACH_ONEBIT = pytest.mark.parametrize("name", ONEBIT)


def refuses(name: str, options: dict[str, Any]) -> bool:
    """Tell whether an optimizer refuses options."""
    return name == "onebit-lamb-living" and options.get("precondition") is False


def skip_refused(name: str, options: dict[str, Any]) -> None:
    """Skips options that this optimizer refuses."""
    if refuses(name, options):
        pytest.skip("its coefficients are of updates, so that it always divides by denominators")


FROZEN = [name for name in ONEBIT if name not in LIVING]
EACH_FROZEN = pytest.mark.parametrize("name", FROZEN)
"""Whose variance stays what it is at the freeze."""
EACH = pytest.mark.parametrize("name", [*ONEBIT, "lamb"])
ADAM_AND_LAMB = pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb"])


def construct(name: str, params: Any, *args: Any, **options: Any) -> Any:
    """Makes the optimizer of this name; ``Lamb``, which compresses nothing, has no ``freeze_step`` and no guard."""
    if name == "lamb":
        del options["freeze_step"]
        options.pop("guard", None)
        return Lamb(params, *args, **objects(**options))
    return ONEBIT[name](params, *args, **options)
