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
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module

from .checkpoint import FORMAT, KEY, check_header, read_header
from .comm import agree
from .construction import failure
from .distributed import DistributedOptimizer

_OPTIMIZER = "optimizer"


def state_of(model: Module, optimizer: DistributedOptimizer) -> dict[str, Any]:
    """What ``save`` saves: ``{"model": ..., "optimizer": ...}``, references to live state where they can be."""
    _check_ranks(optimizer)
    _check_round(optimizer, optimizer._header())
    return {"model": _model(model), _OPTIMIZER: get_optimizer_state_dict(model, optimizer)}


def save(model: Module, optimizer: DistributedOptimizer, checkpoint_id: str | os.PathLike, **more: Any) -> None:
    """Saves model and optimizer; every rank calls it.

    Args:
        model: Bare, in DDP or in FSDP2.
        optimizer: Any of this package.
        checkpoint_id: The folder.
        more: Whatever else is to be saved with them, by name: a scheduler, the number of the step.

    Raises:
        ValueError: between local steps of a round, when parameters differ from rank to rank.
    """
    state = state_of(model, optimizer) | more
    torch_dcp.save(state, checkpoint_id=checkpoint_id, process_group=_group(optimizer))


def async_save(model: Module, optimizer: DistributedOptimizer, checkpoint_id: str | os.PathLike, **more: Any) -> Any:
    """As ``save``, but returns a ``Future`` once everything is copied to the host: training may go on.

    Ranks then talk while they train, and do so over gloo, in a group of their own. Wait for the ``Future``
    before the next save.
    """
    state = state_of(model, optimizer) | more
    if dist.is_initialized() and optimizer._saving is None:
        group = _group(optimizer)
        ranks = None if group is None else dist.get_process_group_ranks(group)
        optimizer._saving = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
    return torch_dcp.async_save(state, checkpoint_id=checkpoint_id, process_group=optimizer._saving)


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
        ValueError: on every rank, if there is no complete checkpoint, or one of another model or optimizer;
            model and optimizer are as they were (``more`` may have been read).
    """
    _check_ranks(optimizer)
    # Torch fills tensors in place: those of the model must not change if anything is wrong.
    room = {name: value.clone() if isinstance(value, Tensor) else value for name, value in _model(model).items()}
    state = {"model": room, _OPTIMIZER: template(model, optimizer, checkpoint_id)} | more
    try:
        torch_dcp.load(state, checkpoint_id=checkpoint_id, process_group=_group(optimizer))
    except torch_dcp.CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        raise ValueError(f"the checkpoint in {checkpoint_id} can't be loaded, on rank {rank}: {error}") from error
    set_optimizer_state_dict(model, optimizer, state[_OPTIMIZER])
    set_model_state_dict(model, room)
    return {name: state[name] for name in more}


def _model(model: Module) -> dict[str, Any]:
    return get_model_state_dict(model)


def template(
    model: Module,
    optimizer: DistributedOptimizer,
    checkpoint_id: str | os.PathLike | None = None,
    *,
    storage_reader: torch_dcp.StorageReader | None = None,
    prefix: str = _OPTIMIZER,
) -> dict[str, Any]:
    """Room for the optimizer's state in a checkpoint, as ``get_optimizer_state_dict`` would return it.

    For those who call torch's functions themselves, on every rank::

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
        ValueError: on every rank, if there is no complete checkpoint, or no optimizer's state under that name.
    """
    reader = storage_reader or torch_dcp.FileSystemReader(os.fspath(checkpoint_id or ""))
    saved: set[str] = set()
    header: Mapping[str, Any] | None = None
    error: Exception | None = None
    try:
        saved = set(_names(reader, checkpoint_id))
        if not any(name.startswith(f"{prefix}.") for name in saved):
            known = sorted({name.split(".", 1)[0] for name in saved})
            raise ValueError(f"prefix must be the name of an optimizer's state, got {prefix!r}; saved were {known}")
        if not any(name.startswith(f"{prefix}.param_groups.0.params") for name in saved):
            raise ValueError(
                "the optimizer's state must be nested, but was saved with flatten_optimizer_state_dict=True, of which "
                "torch loads only what a new optimizer has: save it without"
            )
        header = _header(reader, f"{prefix}.param_groups.0.{KEY}", saved)
        if header is not None and header["format"] != FORMAT:
            raise ValueError(f"checkpoint format must be {FORMAT}, got {header['format']}")
        _check_round(optimizer, header or {})
        if header is not None:
            check_header(optimizer, header)
        elif not any(name.startswith(f"{prefix}.state.") and name.endswith(".exp_avg") for name in saved):
            raise ValueError(
                f"the state under {prefix!r} must be of this package or of AdamW, by the names of parameters, as "
                "get_optimizer_state_dict() gives it; it has no header and no exp_avg"
            )
        elif any(name.startswith(f"{prefix}.state.0.") for name in saved) and not _has_parameter(model, "0"):
            raise ValueError(
                f"the state under {prefix!r} must have the names of parameters, as get_optimizer_state_dict() gives "
                "it, got numbers, as optimizer.state_dict() does"
            )
    except (ValueError, TypeError) as caught:
        error = caught
    except Exception as caught:  # whatever it is: the other ranks must not wait
        error = ValueError(f"the checkpoint in {checkpoint_id} can't be read: {type(caught).__name__}: {caught}")
    _agree(optimizer, [("the checkpoint's header", json.dumps(header))], error)
    optimizer._expected = (header,)
    try:
        room = cast("dict[str, Any]", get_optimizer_state_dict(model, optimizer))
    finally:
        optimizer._expected = None
    _check_names(model, prefix, saved)
    for name, state in room["state"].items():
        room["state"][name] = {k: v for k, v in state.items() if f"{prefix}.state.{name}.{k}" in saved}
    room["state"] = {name: state for name, state in room["state"].items() if state}
    for i, group in enumerate(room["param_groups"]):
        start = f"{prefix}.param_groups.{i}."
        room["param_groups"][i] = {k: v for k, v in group.items() if any(n.startswith(f"{start}{k}") for n in saved)}
    return room


def _check_names(model: Module, prefix: str, saved: Collection[str]) -> None:
    """Raises ValueError, on all ranks alike, if state was saved of a parameter that the model has not."""
    start, known = f"{prefix}.state.", tuple(f"{name}." for name in _model(model))
    for name in sorted(saved):
        if name.startswith(start) and not name.removeprefix(start).startswith(known):
            raise ValueError(
                f"checkpoint of another model: it has {name.removeprefix(start)}, of which this model has no parameter"
            )


def _has_parameter(model: Module, prefix: str) -> bool:
    return any(name.startswith(f"{prefix}.") for name, _ in model.named_parameters())


def _agree(optimizer: DistributedOptimizer, facts: list[tuple[str, str]], error: Exception | None) -> None:
    hint = "every rank must read the same checkpoint"
    first = failure(lambda: agree(optimizer._transport, facts, optimizer.device, error, hint))
    optimizer._shards.agree(facts, optimizer.device, first, hint)
    if first is not None:
        raise first


def _group(optimizer: DistributedOptimizer) -> dist.ProcessGroup | None:
    """Over which ranks a checkpoint is written: those of the optimizer; of shards, all."""
    return None if optimizer._shards.count > 1 else getattr(optimizer._transport, "group", None)


def _check_ranks(optimizer: DistributedOptimizer) -> None:
    if not isinstance(optimizer, DistributedOptimizer):
        raise TypeError(f"optimizer must be one of fusedonebit's, got {type(optimizer).__name__}")
    rows = optimizer._rows
    if rows.shape != (1, 1) and rows.mesh is None:
        raise RuntimeError(
            f"torch.distributed.checkpoint does not know the {rows.shape[0]} ranks of "
            f"{type(optimizer._transport).__name__}: torch.save() each rank's optimizer.state_dict() in its own file"
        )


def _check_round(optimizer: DistributedOptimizer, header: Mapping[str, Any]) -> None:
    if header.get("local") and header.get("world_size", optimizer._transport.world_size) > 1:
        raise ValueError(
            f"after {header['local']} local steps of a round each rank has parameters of its own, of which "
            "torch.distributed.checkpoint keeps one rank's: save at the end of a round"
        )


def _names(reader: torch_dcp.StorageReader, checkpoint_id: str | os.PathLike | None) -> Collection[str]:
    try:
        return reader.read_metadata().state_dict_metadata.keys()
    except FileNotFoundError as error:
        raise ValueError(
            f"{checkpoint_id} must be the folder of a complete checkpoint, but it has no .metadata, "
            "which is written last"
        ) from error


def _header(reader: torch_dcp.StorageReader, name: str, saved: Collection[str]) -> Mapping[str, Any] | None:
    if name not in saved:
        return None  # AdamW's
    entry: dict[str, Any] = {name: ""}
    torch_dcp.load(entry, storage_reader=reader, no_dist=True)
    return read_header(entry[name])
