"""Checks of what an optimizer is made of, whose errors are raised where all ranks can."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..comm import CollectiveError
from .params import ParameterList
from .settings import Numerics
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


def check_16_bits(numerics: Numerics, optimizer: str, corrects: bool, params: ParameterList) -> None:
    """Raise ValueError if bfloat16 parameters are to be rounded at random, or have corrections, and that can't be."""
    kind = numerics.master_weights
    if numerics.stochastic_rounding:
        option, usual, got, only, wide = "stochastic_rounding", "False", "True", "", "not rounded"
    elif isinstance(kind, bool):
        return
    else:
        option, usual, got, wide = "master_weights", "True or False", repr(kind), "masters themselves"
        only = ": only bfloat16 is the upper half of a float32"
        if not corrects:
            raise ValueError(
                f"master_weights must be True or False with {optimizer}, got {got}: its kernels read parameters "
                "without corrections; use True, or AdamW, OneBitAdam or OneBitLion"
            )
    for p, name in zip(params.params, params.names, strict=True):
        if p.dtype is torch.float16:
            raise ValueError(
                f"{option} must be {usual} where a parameter is float16, got {got} and {name} of float16{only}; "
                "use bfloat16, or Numerics(master_weights=True)"
            )
    if params.params and all(p.dtype is not torch.bfloat16 for p in params.params):
        raise ValueError(
            f"{option} must be False without bfloat16 parameters, got {got} and parameters of float32 only: those are "
            f"{wide}; cast the model to bfloat16, or leave the option out"
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
