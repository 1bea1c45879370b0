"""Takes values out of a checkpoint that may be damaged, or of something else: each fits, or is named in an error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LARGEST = 2**53


def mapping(value: Any, what: str) -> Mapping[Any, Any]:
    """Return a dict."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} in the checkpoint must be a dict, got {type(value).__name__}")
    return value


def sequence(value: Any, what: str) -> Sequence[Any]:
    """Return a list or tuple."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{what} in the checkpoint must be a list, got {type(value).__name__}")
    return value


def number(value: Any, what: str) -> float:
    """Return a finite number >= 0, also in a tensor of one element."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "meta" and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} in the checkpoint must be a number, got {type(value).__name__}")
    if not (0 <= value <= LARGEST or (value >= 0 and isinstance(value, float) and math.isfinite(value))):
        raise ValueError(f"{what} in the checkpoint must be a finite number >= 0, got {str(value)[:20]}")
    return float(value)


def count(value: Any, what: str) -> int:
    """Return a whole number >= 0."""
    found = number(value, what)
    if found != int(found) or found > LARGEST:
        raise ValueError(f"{what} in the checkpoint must be a whole number, got {found}")
    return int(found)


def floats(value: Any, what: str, *, least: float = -math.inf) -> Tensor:
    """Return a dense tensor as float32, each element of it finite and at least ``least``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} in the checkpoint must be a tensor, got {type(value).__name__}")
    if not value.is_floating_point() or value.layout != torch.strided or value.device.type == "meta":
        got = f"{value.dtype}, {value.layout}, on {value.device.type}"
        raise TypeError(f"{what} in the checkpoint must be a dense tensor of floating-point numbers, got {got}")
    found: Tensor = value.detach().float()
    wrong = int((~(found.isfinite() & (found >= least))).sum())
    if wrong:
        expected = "finite" if least == -math.inf else f"finite and >= {least:g}"
        raise ValueError(
            f"{what} in the checkpoint must be {expected}, but {wrong} of {found.numel()} elements are not"
        )
    return found
