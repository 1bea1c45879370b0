"""The optimizers by name, for tests of what holds for all of them; ranks are told a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from fusedonebit import Lamb, OneBitAdam, OneBitLamb, OneBitOptimizer

ONEBIT: dict[str, Callable[..., OneBitOptimizer]] = {
    "onebit-adam": OneBitAdam,
    "onebit-lamb": OneBitLamb,
    "onebit-lamb-frozen": partial(OneBitLamb, layerwise="frozen"),
}
LAMBS = ("onebit-lamb", "onebit-lamb-frozen")

EACH_ONEBIT = pytest.mark.parametrize("name", ONEBIT)
EACH = pytest.mark.parametrize("name", [*ONEBIT, "lamb"])
ADAM_AND_LAMB = pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb"])


def construct(name: str, params: Any, *args: Any, **options: Any) -> Any:
    """Makes the optimizer of this name; ``Lamb``, which compresses nothing, has no ``freeze_step``."""
    if name == "lamb":
        options.pop("freeze_step")
        return Lamb(params, *args, **options)
    return ONEBIT[name](params, *args, **options)
