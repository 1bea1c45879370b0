"""The ``params`` argument of an optimizer, as it is handed over: before anything of it is checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .sharding import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def materialise(params: Any) -> tuple[list[Any], Exception | None]:
    """Return the ``params`` argument with all iterators run out, groups copied; or what is wrong with it."""
    model = isinstance(params, torch.nn.Module) and not isinstance(params, torch.nn.ParameterList)
    if isinstance(params, Tensor) or model or not isinstance(params, Iterable):
        kind, way_out = type(params).__name__, "pass its parameters()" if model else "pass a list"
        return [], TypeError(f"params must be an iterable of tensors or of dicts, got {kind}; {way_out}")
    try:
        given = [materialise_group(entry) if isinstance(entry, dict) else entry for entry in params]
    except Exception as error:
        return [], error
    if not given:  # begins as torch's message does
        return [], ValueError(
            "optimizer got an empty parameter list; a generator such as model.parameters() can be read only once: "
            "call it again, or pass a list"
        )
    return given, None


def materialise_group(group: Any) -> dict[str, Any]:
    """Return a copy of one group, its ``params`` a list; TypeError or ValueError if it has none."""
    if not isinstance(group, dict):
        raise TypeError(f'a parameter group must be a dict, got {type(group).__name__}; pass {{"params": [...]}}')
    if "params" not in group:
        raise ValueError(f'a parameter group must have a list of tensors under "params", got the keys {list(group)}')
    given = group["params"]
    if isinstance(given, set):
        raise TypeError(
            "params of a group must be ordered, or ranks would mean different tensors by the same number, got a set; "
            "pass a list"
        )
    if not isinstance(given, Iterable):
        raise TypeError(f"params of a group must be a tensor or an iterable of tensors, got {type(given).__name__}")
    return {**group, "params": [given] if isinstance(given, Tensor) else list(given)}


def _tensors(params: Sequence[Any]) -> Iterator[Tensor]:
    """Return all tensors of the ``params`` argument, checked or not."""
    for entry in params:
        for p in entry.get("params", ()) if isinstance(entry, dict) else (entry,):
            tensor = p[1] if isinstance(p, tuple) and len(p) == 2 else p
            if isinstance(tensor, Tensor):
                yield tensor


def first_device(params: Sequence[Any]) -> torch.device:
    """Return the device of the first tensor with memory, CPU where there is none."""
    return next((p.device for p in _tensors(params) if p.device.type != "meta"), torch.device("cpu"))


def first_mesh(params: Sequence[Any]) -> DeviceMesh | None:
    """Return the mesh of one dimension over which the first sharded parameter is; known before any is checked.

    Ranks that find something wrong must tell those with other shards, so all must know of them by then.
    """
    meshes = (p.device_mesh for p in _tensors(params) if p.requires_grad and is_dtensor(p))
    return next((mesh for mesh in meshes if mesh.ndim == 1), None)
