"""Checkpoints through ``torch.distributed.checkpoint``: one, sharded, for any number of ranks.

    fusedonebit.dcp.save(model, optimizer, "checkpoints/1000")
    fusedonebit.dcp.load(model, optimizer, "checkpoints/1000")      # on as many ranks as there are now

Saving is torch's own: ``get_optimizer_state_dict`` returns DTensors where ranks differ. To load, room must
be made for what is in the checkpoint, which is of another stage than a new optimizer, and maybe of another
number of ranks: ``template`` does that, and the rest is torch's own again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module

from .checkpoint import KEY
from .distributed import DistributedOptimizer

_OPTIMIZER = "optimizer"


def state_of(model: Module, optimizer: DistributedOptimizer) -> dict[str, Any]:
    """What ``save`` saves: ``{"model": ..., "optimizer": ...}``, references to live state where they can be."""
    return {"model": get_model_state_dict(model), _OPTIMIZER: get_optimizer_state_dict(model, optimizer)}


def save(model: Module, optimizer: DistributedOptimizer, checkpoint_id: str | os.PathLike, **more: Any) -> None:
    """Saves model and optimizer; every rank calls it.

    Args:
        model: Bare, in DDP or in FSDP2.
        optimizer: Any of this package.
        checkpoint_id: The folder.
        more: Whatever else is to be saved with them, by name: a scheduler, the number of the step.
    """
    torch_dcp.save(state_of(model, optimizer) | more, checkpoint_id=checkpoint_id)


def async_save(model: Module, optimizer: DistributedOptimizer, checkpoint_id: str | os.PathLike, **more: Any) -> Any:
    """As ``save``, but returns a ``Future`` once everything is copied to the host: training may go on.

    Needs a process group with a CPU backend: ``init_process_group("cpu:gloo,cuda:nccl")``.
    """
    return torch_dcp.async_save(state_of(model, optimizer) | more, checkpoint_id=checkpoint_id)


def load(
    model: Module, optimizer: DistributedOptimizer, checkpoint_id: str | os.PathLike, **more: Any
) -> dict[str, Any]:
    """Loads what ``save`` has saved, on any number of ranks; every rank calls it.

    On as many ranks as saved it the run goes on bit for bit. On others each new worker takes the mean of
    the old workers' residuals, and servers theirs of the elements they serve now: what was compressed
    away stays the same, all of it. A checkpoint of ``torch.optim.AdamW``, saved under the same names, is
    a warm-up so far.

    Args:
        model: As for ``save``.
        optimizer: New, with the same groups of parameters.
        checkpoint_id: The folder.
        more: Room for what was saved besides; objects with ``load_state_dict`` are filled.

    Returns:
        ``more``, as loaded.

    Raises:
        ValueError: on every rank, if the checkpoint is of another model or optimizer.
    """
    state = {"model": get_model_state_dict(model), _OPTIMIZER: template(model, optimizer, checkpoint_id)} | more
    torch_dcp.load(state, checkpoint_id=checkpoint_id)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state[_OPTIMIZER])
    return {name: state[name] for name in more}


def template(
    model: Module,
    optimizer: DistributedOptimizer,
    checkpoint_id: str | os.PathLike | None = None,
    *,
    storage_reader: torch_dcp.StorageReader | None = None,
    prefix: str = _OPTIMIZER,
) -> dict[str, Any]:
    """Room for the optimizer's state in a checkpoint, as ``get_optimizer_state_dict`` would return it.

    For those who call torch's functions themselves::

        state = {"optimizer": template(model, optimizer, path)}
        torch.distributed.checkpoint.load(state, checkpoint_id=path)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    Args:
        model: As for ``save``.
        optimizer: New, with the same groups of parameters.
        checkpoint_id: The folder.
        storage_reader: Where else to read.
        prefix: Under which name the optimizer's state was saved.

    Raises:
        ValueError: if there is no state of an optimizer under that name.
    """
    reader = storage_reader or torch_dcp.FileSystemReader(os.fspath(checkpoint_id or ""))
    names = reader.read_metadata().state_dict_metadata.keys()
    if not any(name.startswith(f"{prefix}.") for name in names):
        known = sorted({name.split(".", 1)[0] for name in names})
        raise ValueError(f"prefix must be the name of an optimizer's state, got {prefix!r}; saved were {known}")
    header = _header(reader, f"{prefix}.param_groups.0.{KEY}", names)
    optimizer._expected = (header,)
    try:
        room = get_optimizer_state_dict(model, optimizer)
    finally:
        optimizer._expected = None
    saved = set(names)
    for name, state in room["state"].items():
        for key in [key for key in state if f"{prefix}.state.{name}.{key}" not in saved]:
            del state[key]
    room["state"] = {name: state for name, state in room["state"].items() if state}
    for i, group in enumerate(room["param_groups"]):
        for key in [key for key in group if f"{prefix}.param_groups.{i}.{key}" not in saved]:
            del group[key]
    return room


def _header(reader: torch_dcp.StorageReader, name: str, names: Any) -> Mapping[str, Any] | None:
    if name not in names:
        return None  # AdamW's
    entry: dict[str, Any] = {name: ""}
    torch_dcp.load(entry, storage_reader=reader, no_dist=True)
    return json.loads(entry[name])
