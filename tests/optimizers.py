"""The optimizers by name, for tests of what holds for all of them; ranks are told a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from fusedonebit import Lamb, MarsitAdam, MarsitSGD, OneBitAdam, OneBitLamb, OneBitLion, OneBitOptimizer, ZeroOneAdam
from fusedonebit.optim.policies import DoublingRounds, DoublingVariance

ONEBIT: dict[str, Callable[..., OneBitOptimizer]] = {
    "onebit-adam": OneBitAdam,
    "onebit-lamb": OneBitLamb,
    "onebit-lamb-frozen": partial(OneBitLamb, layerwise="frozen"),
}
LAMBS = ("onebit-lamb", "onebit-lamb-frozen")

PAPER: dict[str, Any] = {"precondition": False, "scale_norm": "l2", "scale_scope": "global"}
PAPER |= {"variance_floor": 0.0, "guard": "off"}
"""The papers' algorithms: one scale for all of the momentum, which is what is compressed, and nobody watches."""

# After a warm-up of two or three steps v is a handful of squares: the first compressed updates may well be
# ten times the last uncompressed one, and the guard rightly refuses them. Tests of something else turn it off.
UNGUARDED: dict[str, Any] = {"guard": "off"}

MAKE: dict[str, Callable[..., Any]] = {
    "OneBitAdam": partial(OneBitAdam, freeze_step=2, guard="off"),
    "OneBitLamb": partial(OneBitLamb, freeze_step=2, guard="off"),
    "Lamb": Lamb,
    "ZeroOneAdam": partial(ZeroOneAdam, variance_policy=DoublingVariance(1), sync_policy=DoublingRounds(1, 2)),
    "MarsitSGD": partial(MarsitSGD, momentum=0.9, full_precision_every=2),
    "MarsitAdam": partial(MarsitAdam, full_precision_every=2),
    "OneBitLion": OneBitLion,
}
"""Every optimizer; two steps later what it sends is bits."""

EACH_ONEBIT = pytest.mark.parametrize("name", ONEBIT)
EACH = pytest.mark.parametrize("name", [*ONEBIT, "lamb"])
ADAM_AND_LAMB = pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb"])


def construct(name: str, params: Any, *args: Any, **options: Any) -> Any:
    """Makes the optimizer of this name; ``Lamb``, which compresses nothing, has no ``freeze_step`` and no guard."""
    if name == "lamb":
        del options["freeze_step"]
        options.pop("guard", None)
        return Lamb(params, *args, **options)
    return ONEBIT[name](params, *args, **options)
