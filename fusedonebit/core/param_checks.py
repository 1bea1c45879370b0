"""What a parameter and a gradient must be; each error says which one is not, and the way out."""

from __future__ import annotations

import torch
from torch import Tensor

from .sharding import local

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one contiguous piece of memory, in any order, each once."""
    span = 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not tensor.numel() or (span == tensor.numel() and not _overlaps_itself(tensor))


def _overlaps_itself(tensor: Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def check_parameter(p: Tensor, name: str) -> None:
    """Raise TypeError or ValueError for a parameter that can't be optimised."""
    if not isinstance(p, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(p).__name__}")
    if local(p).layout is not torch.strided:
        raise TypeError(f"{name} must be dense, got layout {p.layout}; sparse parameters are not supported")
    if not p.requires_grad:
        return
    if p.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {p.dtype}; {_way_out(p.dtype)}")
    if p.device.type == "meta":
        raise ValueError(f"{name} must have memory, got a meta tensor; materialise the model first")
    if _overlaps_itself(local(p)):
        raise ValueError(f"{name} must not overlap itself, got strides {p.stride()}; pass p.contiguous()")


def _way_out(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "keep its parts in a float32 parameter, and call torch.view_as_complex() on it in forward()"
    return "call model.float() before the optimizer is made: state and arithmetic are float32"


def refuse_gradient(g: Tensor, p: Tensor, name: str) -> None:
    """Raise TypeError or ValueError, which says in what the gradient ``g`` does not fit its parameter ``p``."""
    if g.layout is not torch.strided:
        raise TypeError(
            f"the gradient of {name} must be dense, got layout {g.layout}; use sparse=False in the embedding"
        )
    if g.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"the gradient of {name} must be float32, bfloat16 or float16, got {g.dtype}")
    raise ValueError(
        f"the gradient of {name} must be {tuple(p.shape)} on {p.device}, got {tuple(g.shape)} on {g.device}"
    )
