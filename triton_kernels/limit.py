"""The guard's verdict on an update, of its norm: from scales alone, no element is read."""

from __future__ import annotations

from torch import Tensor

from . import headers, rules
from .jit import jit, tl
from .nouns import Limit
from .rules import COLUMNS, UNBIAS1

VETO = headers.VETO


@jit()
def squares_of(s, b, mask, limit):
    """Return what blocks add to the square of the update's norm, float64 [LANES]."""
    t = tl.load(limit.block_tensor + b, mask=mask, other=0).to(tl.int64)
    unbias = tl.load(limit.coef + t * COLUMNS + UNBIAS1, mask=mask, other=0.0).to(tl.float64)
    root = tl.load(limit.weight + b, mask=mask, other=0.0).to(tl.float64)
    return rules.update_square(s.to(tl.float64), unbias, root)


@jit()
def verdict(size, limit):
    """VETO where a size is beyond the limit, or no number, else 0; keeps it."""
    tl.store(limit.norm, size)
    refused = 0
    if not size <= tl.load(limit.largest):
        refused = VETO
    return refused


def squares_by_block(scale: Tensor, limit: Limit) -> Tensor:
    """Return what blocks add to the square of the update's norm, float64 [B]."""
    assert limit.coef is not None
    assert limit.block_tensor is not None
    assert limit.weight is not None
    unbias = limit.coef[:, UNBIAS1].double()[limit.block_tensor]
    return rules.update_square(scale.double(), unbias, limit.weight.double())


def judged(size: Tensor, limit: Limit) -> Tensor:
    """Return VETO where a size, float64 [], is beyond the limit, or no number, else 0: int32 []; keep it."""
    assert limit.norm is not None
    assert limit.largest is not None
    limit.norm.copy_(size)
    return (~(limit.norm <= limit.largest)).int() * int(VETO)
