"""What is checked when an optimizer is made: its masks, its device, and that all ranks mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .comm import checksum
from .parameters import ParameterList

if TYPE_CHECKING:
    from .distributed import DistributedOptimizer


def check_device(device: torch.device) -> None:
    """Raises RuntimeError if there are no kernels for ``device``."""
    if device.type == "cuda" and torch.version.hip is None:
        try:
            import triton  # noqa: F401
        except ImportError as missing:
            raise RuntimeError("params on cuda need triton, which is not installed: pip install triton") from missing


def check_masks(masks: Mapping[Tensor, Tensor], params: ParameterList) -> None:
    """Raises TypeError or ValueError for the first mask that fits no trainable parameter."""
    if not isinstance(masks, Mapping):
        raise TypeError(f"mask must map parameters to bool tensors, got {type(masks).__name__}")
    known = {id(p) for p in params.params}
    for p, mask in masks.items():
        if not isinstance(p, Tensor) or not isinstance(mask, Tensor):
            raise TypeError(f"mask must map parameters to bool tensors, got {type(p).__name__}: {type(mask).__name__}")
        if id(p) not in known:
            raise ValueError(f"mask names a tensor of shape {tuple(p.shape)} that is no trainable parameter")
        if mask.dtype is not torch.bool or mask.shape != p.shape:
            raise ValueError(
                f"a mask must be a bool tensor of its parameter's shape {tuple(p.shape)}, "
                f"got {mask.dtype} {tuple(mask.shape)}"
            )


def check_rounding(stochastic: bool, params: ParameterList) -> None:
    """Raises ValueError if stochastic rounding was asked for and can't be had for every 16-bit parameter."""
    if not stochastic:
        return
    for p, name in zip(params.params, params.names, strict=True):
        if p.dtype is torch.float16:
            raise ValueError(
                f"stochastic_rounding must be False where a parameter is float16, got True and {name} of float16; "
                "use bfloat16, or master_weights=True"
            )
    if all(p.dtype is not torch.bfloat16 for p in params.params):
        raise ValueError(
            "stochastic_rounding must be False without bfloat16 parameters, got True and parameters of float32 only: "
            "those are not rounded; cast the model to bfloat16, or leave the option out"
        )


def facts(optimizer: DistributedOptimizer, broadcast: bool) -> list[tuple[str, str]]:
    """Everything but values that must be equal on all ranks."""
    options, plist, masks = optimizer.options, optimizer._list, optimizer._masks
    groups = [
        (f"{key} of group {i}", repr(_plain(group[key])))
        for i, group in enumerate(optimizer.param_groups)
        for key in optimizer._hyper_parameters
    ]
    named = list(zip(plist.params, plist.names, strict=True))
    return [
        ("the optimizer", type(optimizer).__name__),
        *((f.name, repr(getattr(options, f.name))) for f in fields(options)),
        ("broadcast_parameters", repr(broadcast)),
        *plist.facts(),
        ("the number of groups", str(len(optimizer.param_groups))),
        *((f"the group of {name}", str(n)) for name, n in zip(plist.names, plist.group_of, strict=True)),
        *groups,
        *((f"the mask of {name}", _describe_mask(masks.get(p))) for p, name in named),
    ]


def _describe_mask(mask: Tensor | None) -> str:
    return "none" if mask is None else f"checksum {checksum(mask.contiguous())}"


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value
