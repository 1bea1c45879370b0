"""Checks of what an optimizer is made of, whose errors are raised where all ranks can."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..comm import CollectiveError
from .params import ParameterList
from .sharding import local


def check_device(device: torch.device) -> None:
    """Raise RuntimeError if there are no kernels for ``device``."""
    if device.type == "cuda" and torch.version.hip is None:
        try:
            import triton  # noqa: F401
        except ImportError as missing:
            raise RuntimeError("params on cuda need triton, which is not installed: pip install triton") from missing


def check_masks(masks: Mapping[Tensor, Tensor], params: ParameterList) -> None:
    """Raise TypeError or ValueError for the first mask that fits no trainable parameter."""
    if not isinstance(masks, Mapping):
        raise TypeError(f"mask must map parameters to bool tensors, got {type(masks).__name__}")
    known = {id(p) for p in params.owners}
    for p, mask in masks.items():
        if not isinstance(p, Tensor) or not isinstance(mask, Tensor):
            raise TypeError(f"mask must map parameters to bool tensors, got {type(p).__name__}: {type(mask).__name__}")
        if id(p) not in known:
            raise ValueError(f"mask names a tensor of shape {tuple(p.shape)} that is no trainable parameter")
        here, shard = local(mask), local(p)
        if mask.dtype is not torch.bool or here.shape != shard.shape:
            what = "parameter's" if shard is p else "parameter's shard's, as this rank holds it,"
            raise ValueError(
                f"a mask must be a bool tensor of its {what} shape {tuple(shard.shape)}, "
                f"got {mask.dtype} {tuple(here.shape)}"
            )


def check_rounding(stochastic: bool, params: ParameterList) -> None:
    """Raise ValueError if stochastic rounding was asked for and can't be had for every 16-bit parameter."""
    if not stochastic:
        return
    for p, name in zip(params.params, params.names, strict=True):
        if p.dtype is torch.float16:
            raise ValueError(
                f"stochastic_rounding must be False where a parameter is float16, got True and {name} of float16; "
                "use bfloat16, or Numerics(master_weights=True)"
            )
    if params.params and all(p.dtype is not torch.bfloat16 for p in params.params):
        raise ValueError(
            "stochastic_rounding must be False without bfloat16 parameters, got True and parameters of float32 only: "
            "those are not rounded; cast the model to bfloat16, or leave the option out"
        )


def check_corrections(kind: bool | str, optimizer: str, corrects: bool, params: ParameterList) -> None:
    """Raise ValueError if corrections were asked for in masters' stead, and can't be had."""
    if isinstance(kind, bool):
        return
    if not corrects:
        raise ValueError(
            f"master_weights must be True or False with {optimizer}, got {kind!r}: its kernels read parameters without "
            "corrections; use True, or AdamW, OneBitAdam or OneBitLion"
        )
    for p, name in zip(params.params, params.names, strict=True):
        if p.dtype is torch.float16:
            raise ValueError(
                f"master_weights must be True or False where a parameter is float16, got {kind!r} and {name} of "
                "float16: only bfloat16 is the upper half of a float32; use bfloat16, or "
                "Numerics(master_weights=True)"
            )
    if params.params and all(p.dtype is not torch.bfloat16 for p in params.params):
        raise ValueError(
            f"master_weights must be False without bfloat16 parameters, got {kind!r} and parameters of float32 only: "
            "those are masters themselves; cast the model to bfloat16, or leave the option out"
        )


def failure(call: Callable[[], object]) -> Exception | None:
    """Return the exception that a call raises, to be raised where all ranks can."""
    try:
        call()
    except CollectiveError:
        raise
    except Exception as error:
        return error
    return None
