"""Parameters of whole steps as matrices, for their launch keys; see ``whole_steps``."""

from __future__ import annotations

import math
from typing import Any

from optimizers import muon

from fusedonebit import OneBitMuon


def rows_of(numel: int) -> int:
    """Return the largest divisor that is at most the root."""
    return next((n for n in range(math.isqrt(numel), 1, -1) if numel % n == 0), 1)


def as_matrices(groups: list[dict[str, Any]], *args: Any, **options: Any) -> OneBitMuon:
    """Make one of vectors, which become matrices; those of 0 or a prime number of elements, unless all are, AdamW's."""
    params = [p for group in groups for p in group["params"]]
    for p in [p for p in params if rows_of(p.numel()) > 1] or params:
        grad, p.grad = p.grad, None
        p.data = p.data.view(rows_of(p.numel()), -1)
        p.grad = None if grad is None else grad.view(p.shape)
    return muon(groups, *args, **options)
