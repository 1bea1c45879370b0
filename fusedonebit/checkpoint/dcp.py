"""Checkpoints through ``torch.distributed.checkpoint``: one, sharded, for any number of ranks.

    fusedonebit.dcp.save(model, optimizer, "checkpoints/1000")
    fusedonebit.dcp.load(model, optimizer, "checkpoints/1000")      # on as many ranks as there are now

Saving is torch's own: ``get_optimizer_state_dict`` returns DTensors where ranks differ. To load, room must
be made for what is in the checkpoint, which is of another stage than a new optimizer, and maybe of another
number of ranks: ``template`` does that, and the rest is torch's own again. ``storage`` adds a checksum to each
piece of the model and the optimizer that a rank writes, and checks it on the rank that reads it.

**Code in a checkpoint.** Torch's own ``load`` unpickles what lies in the folder, which can run any code: never call
it on a folder that you do not trust. ``load`` here does not: it takes tensors and plain values alone, unless told
``weights_only=False``.

With ``compression=fusedonebit.compress(...)`` residuals are saved and loaded as well, under any optimizer of torch's.

Where one rank fails, all raise: ``CheckpointError`` names it and its error, ``CollectiveError`` who has died.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ..comm import TorchTransport
from ..core.compression import Compression
from ..core.consensus import failure
from ..core.frame import Frame
from ..core.header import KEY
from ..core.optimizer import DistributedOptimizer, frame_of
from ..core.state.integrity import read_header
from ..core.state.saving import header_of
from ..core.world import World
from ..errors import CheckpointError
from .storage import CheckedReader, CheckedWriter, PlainValues

_OPTIMIZER = "optimizer"

_INCOMPLETE = "{} must be the folder of a complete checkpoint, but it has no .metadata, which is written last"

T = TypeVar("T")


def state_of(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return what ``save`` saves: ``{"model": ..., "optimizer": ...}``, references to live state where they can be."""
    of_model, of_optimizer = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    if frame_of(optimizer) is not None:
        _check_round(_frame(optimizer), header_of(of_optimizer) or {})
    return {"model": of_model, _OPTIMIZER: of_optimizer}


def save(model: Module, optimizer: Optimizer, checkpoint_id: str | os.PathLike[str], **more: Any) -> None:
    """Save model and optimizer; every rank calls it.

    Args:
        model: Bare, in DDP or in FSDP2.
        optimizer: Any of this package; beside what ``compress`` has returned any of torch's.
        checkpoint_id: The folder; a checkpoint that is in it is replaced.
        more: Whatever else, by name: a scheduler, the number of the step, what ``compress`` returned, other optimizers.

    Raises:
        ValueError: between local steps of a round, when parameters differ from rank to rank.
        CheckpointError: on every rank, if one could not write; the folder has no ``.metadata`` then, or the old one.
        CollectiveError: if a rank has died, on all others.
    """
    ranks = _ranks(optimizer, more)
    state, writer = _on_all(ranks, lambda: _to_save(model, optimizer, checkpoint_id, more))
    with _naming_rank(ranks, "saved", checkpoint_id), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # replacing it is what this promises
        torch_dcp.save(state, storage_writer=writer, process_group=_group(ranks))


def async_save(model: Module, optimizer: Optimizer, checkpoint_id: str | os.PathLike[str], **more: Any) -> Any:
    """Save as ``save`` does, but return a ``Future`` once everything is copied to the host: training may go on.

    Ranks then talk while they train, over gloo, in a group of their own. Wait for the ``Future`` before the next save:
    its ``result()`` raises what ``save`` would have raised.
    """
    ranks = _ranks(optimizer, more)
    state, writer = _on_all(ranks, lambda: _to_save(model, optimizer, checkpoint_id, more))
    if dist.is_initialized() and ranks.saving_group is None:
        group = _group(ranks)
        members = None if group is None else dist.get_process_group_ranks(group)
        how: dict[str, Any] = {"backend": "gloo", "use_local_synchronization": members is not None}
        with _naming_rank(ranks, "saved", checkpoint_id):
            ranks.saving_group = dist.new_group(members, **how)
    call: dict[str, Any] = {"storage_writer": writer, "process_group": ranks.saving_group}
    return _as_exception(ranks, _on_all(ranks, lambda: torch_dcp.async_save(state, **call)), checkpoint_id)


def _to_save(
    model: Module, optimizer: Optimizer, checkpoint_id: str | os.PathLike[str], more: Mapping[str, Any]
) -> tuple[dict[str, Any], CheckedWriter]:
    """Return what is saved, and what writes it; that sums up what it writes, which need not be done twice."""
    if (frame := frame_of(optimizer)) is not None:
        frame.sums_up = False
    try:
        state = {**state_of(model, optimizer), **more}
    finally:
        if frame is not None:
            frame.sums_up = True
    return _plain(model, state), CheckedWriter(checkpoint_id)


def _plain(model: Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace what has a state by it, which torch would ask for where no other rank hears of an error."""
    others = {name: get_optimizer_state_dict(model, x) for name, x in state.items() if isinstance(x, Optimizer)}
    return {name: x.state_dict() if isinstance(x, Stateful) else x for name, x in state.items()} | others


def _as_exception(ranks: World, future: Any, checkpoint_id: str | os.PathLike[str]) -> Future[Any]:
    """Return a ``Future`` that ends as ``future`` does, but with an ``Exception``."""
    told: Future[Any] = Future()

    def end(done: Any) -> None:
        try:
            with _naming_rank(ranks, "saved", checkpoint_id):
                told.set_result(done.result())
        except BaseException as error:
            told.set_exception(error)

    future.add_done_callback(end)
    return told


def load(
    model: Module,
    optimizer: Optimizer,
    checkpoint_id: str | os.PathLike[str],
    *,
    weights_only: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Load what ``save`` has saved, on any number of ranks; every rank calls it.

    On as many ranks as saved it the run goes on bit for bit. On others each new worker takes the mean of
    the old workers' residuals, and servers theirs of the elements they serve now: what was compressed
    away stays the same, all of it. A checkpoint of ``torch.optim.AdamW``, saved under the same names, is
    a warm-up so far.

    Args:
        model: As for ``save``.
        optimizer: New, with the same groups of parameters.
        checkpoint_id: The folder.
        weights_only: As of ``torch.load``: False also takes objects that are unpickled by running what code the
            folder names; pass it only for folders that you trust.
        more: Room for what was saved besides; objects with ``load_state_dict`` are filled, residuals on any number of
            ranks: what quantisation had left of each gradient stays the same.

    Returns:
        ``more``, as loaded.

    Raises:
        ValueError: on every rank, if there is no complete checkpoint, one of another model or optimizer, or a damaged
            one (``CheckpointError``, a ``ValueError``); model and optimizer are as they were (``more`` may have been
            read).
        CollectiveError: if a rank has died, on all others.
    """
    ranks, frame = _ranks(optimizer, more), frame_of(optimizer)
    reader = _on_all(ranks, lambda: CheckedReader(checkpoint_id, weights_only))
    if isinstance(optimizer, DistributedOptimizer):
        of_optimizer = template(model, optimizer, checkpoint_id, storage_reader=reader)
    else:
        of_optimizer = _on_all(ranks, lambda: _copied(get_optimizer_state_dict(model, optimizer)))
    of_more = _on_all(ranks, lambda: _plain(model, {n: _sized(reader, n, value) for n, value in more.items()}))
    state = _on_all(ranks, lambda: {"model": _room(model), _OPTIMIZER: of_optimizer} | of_more)
    with _naming_rank(ranks, "loaded", checkpoint_id):
        planner = PlainValues() if weights_only else None
        torch_dcp.load(state, storage_reader=reader, planner=planner, process_group=_group(ranks))
    if any(isinstance(key, int) for key in of_optimizer["state"]):
        optimizer.load_state_dict(of_optimizer)
    else:
        with _all_training([] if frame is None else frame.parameters.owners):
            set_optimizer_state_dict(model, optimizer, of_optimizer)
    _on_all(ranks, lambda: _take(model, state, more))
    return {name: value if isinstance(value, Stateful) else state[name] for name, value in more.items()}


def _sized(reader: CheckedReader, name: str, value: Any) -> Any:
    """Return room for what was saved under a name, where that may be of other numbers of ranks; else ``value``."""
    if not isinstance(value, Compression):
        return value
    try:
        saved = reader.read_metadata().state_dict_metadata
    except FileNotFoundError:
        raise ValueError(_INCOMPLETE.format(reader.checkpoint_id)) from None
    if f"{name}.about" not in saved:
        raise ValueError(f"{name} must be left out of load(): it was not saved, and residuals begin at zero then")
    return value.template(_entry(reader, f"{name}.about"))


@contextmanager
def _all_training(params: Sequence[Tensor]) -> Iterator[None]:
    """Let torch see parameters as the optimizer was made with them: it leaves out the state of those frozen since."""
    frozen = [p for p in params if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def _room(model: Module) -> dict[str, Any]:
    """Torch fills tensors in place: those of the model must not change if anything is wrong."""
    return _copied(get_model_state_dict(model))


def _copied(state: T) -> T:
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)  # type: ignore[no-any-return]


def _take(model: Module, state: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    set_model_state_dict(model, state["model"])
    for name, value in more.items():
        if isinstance(value, Optimizer):
            set_optimizer_state_dict(model, value, state[name])
        elif isinstance(value, Stateful):
            value.load_state_dict(state[name])


def template(
    model: Module,
    optimizer: DistributedOptimizer,
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: torch_dcp.StorageReader | None = None,
    prefix: str = _OPTIMIZER,
) -> dict[str, Any]:
    """Return room for the optimizer's state in a checkpoint, as ``get_optimizer_state_dict`` would.

    Where the state was saved as ``optimizer.state_dict()`` gives it, by numbers instead of names, so is the room:
    ``optimizer.load_state_dict`` takes that.

    For those who call torch's functions themselves, on every rank::

        state = {"optimizer": template(model, optimizer, path)}
        torch.distributed.checkpoint.load(state, checkpoint_id=path)  # trusts the folder, as torch does
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    With ``storage_writer=storage.CheckedWriter(path)``, and to load ``storage_reader=storage.CheckedReader(path)`` and
    ``planner=storage.PlainValues()``, torch's functions write and check checksums, and trust nothing.

    Args:
        model: As for ``save``.
        optimizer: New, with the same groups of parameters.
        checkpoint_id: The folder.
        storage_reader: Where else to read.
        prefix: Under which name the optimizer's state was saved.

    Raises:
        ValueError: on every rank, if there is no complete checkpoint, or no optimizer's state under that name.
    """
    frame = optimizer.frame
    saved: set[str] = set()
    header: Mapping[str, Any] | None = None
    facts: list[tuple[str, str]] = []
    error: Exception | None = None
    try:
        reader = storage_reader or CheckedReader(os.fspath(checkpoint_id or ""))
        saved = set(reader.read_metadata().state_dict_metadata)
        if isinstance(reader, CheckedReader):
            facts.append(("the checksum of .metadata", f"{reader.metadata_crc32:08x}"))
        if not any(name.startswith(f"{prefix}.") for name in saved):
            known = sorted({name.split(".", 1)[0] for name in saved})
            raise ValueError(
                f"prefix must be the name of an optimizer's state, got {prefix!r}; saved were {known}: for another "
                "name than dcp.save's, make room by dcp.template(..., prefix=...), and call torch's functions"
            )
        if not any(name.startswith(f"{prefix}.param_groups.0.params") for name in saved):
            raise ValueError(
                "the optimizer's state must be nested, but was saved with flatten_optimizer_state_dict=True, of which "
                "torch loads only what a new optimizer has: save it without"
            )
        header = _header(reader, f"{prefix}.param_groups.0.{KEY}", saved)
        _check_round(frame, header or {})
        if header is not None:
            if optimizer.algorithm.traits.compresses:
                _check_left_out(model, frame.parameters.owners, prefix, saved)
            optimizer.contents.check_header(header)
        elif not any(name.startswith(f"{prefix}.state.") and name.endswith(".exp_avg") for name in saved):
            raise ValueError(
                f"the state under {prefix!r} must be of this package or of AdamW, as get_optimizer_state_dict() or "
                "optimizer.state_dict() gives it; it has no header and no exp_avg"
            )
    except (ValueError, TypeError) as caught:
        error = caught
    except FileNotFoundError:
        error = ValueError(_INCOMPLETE.format(checkpoint_id))
    except Exception as caught:  # whatever it is: the other ranks must not wait
        error = ValueError(f"the checkpoint in {checkpoint_id} can't be read: {type(caught).__name__}: {caught}")
    facts.append(("the checkpoint's header", json.dumps(header)))
    frame.ranks.agree(facts, facts, error, "every rank must read the same checkpoint")

    def make(numbered: bool) -> Mapping[str, Any]:
        frame.expected_header = (header,)
        try:
            return optimizer.state_dict() if numbered else get_optimizer_state_dict(model, optimizer)
        finally:
            frame.expected_header = None

    return _on_all(frame.ranks, lambda: _room_for(model, make, prefix, saved))


def _room_for(model: Module, make: Callable[[bool], Mapping[str, Any]], prefix: str, saved: set[str]) -> dict[str, Any]:
    numbered = _is_numbered(model, prefix, saved)
    room = dict(make(numbered))
    if not numbered:
        _check_names(model, prefix, saved)
    for name, state in room["state"].items():
        room["state"][name] = {k: v for k, v in state.items() if f"{prefix}.state.{name}.{k}" in saved}
    room["state"] = {name: state for name, state in room["state"].items() if state}
    for i, group in enumerate(room["param_groups"]):
        start = f"{prefix}.param_groups.{i}."
        room["param_groups"][i] = {k: v for k, v in group.items() if any(n.startswith(f"{start}{k}") for n in saved)}
    return room


def _is_numbered(model: Module, prefix: str, saved: Collection[str]) -> bool:
    """Return whether a state was saved by the numbers of parameters, as ``optimizer.state_dict()`` gives it."""
    by_number = any(re.fullmatch(rf"{re.escape(prefix)}\.state\.\d+\.step", name) for name in saved)
    return by_number and not any(name.isdigit() for name, _ in model.named_parameters())


def _check_names(model: Module, prefix: str, saved: Collection[str]) -> None:
    """Raise ValueError, on all ranks alike, if state was saved of a parameter that the model has not."""
    start, known = f"{prefix}.state.", tuple(f"{name}." for name in get_model_state_dict(model))
    for name in sorted(saved):
        if name.startswith(start) and not name.removeprefix(start).startswith(known):
            raise ValueError(
                f"checkpoint of another model: it has {name.removeprefix(start)}, of which this model has no parameter"
            )


def _check_left_out(model: Module, params: Sequence[Tensor], prefix: str, saved: Collection[str]) -> None:
    """Raise ValueError if the ``params`` of an optimizer, whose state is one row of all, lack one that has some."""
    owned = set(map(id, params))
    names = [name.replace("_orig_mod.", "") for name, p in model.named_parameters() if id(p) not in owned]
    starts = {name.removeprefix("module."): f"{prefix}.state.{name.removeprefix('module.')}." for name in names}
    lost = [name for name, start in starts.items() if any(key.startswith(start) for key in saved)]
    if lost:
        raise ValueError(
            f"the checkpoint has state of {', '.join(lost[:3])}{' ...' * (len(lost) > 3)}, which the optimizer was "
            "made without: parameters that require no gradient then are left out; make it of all that were trained, "
            "and freeze after that, before this load or after it"
        )


def _on_all(ranks: World, call: Callable[[], T]) -> T:
    """Return what ``call`` returns here; where it raises on one rank, all raise, and none waits for it."""
    results: list[T] = []
    ranks.agree([], error=failure(lambda: results.append(call())))
    return results[0]


@contextmanager
def _naming_rank(ranks: World, done: str, checkpoint_id: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what torch raises on all ranks, a ``BaseException``, into an error that says which rank has failed."""
    transport = ranks.transport if ranks.shards.count == 1 else TorchTransport(None, ranks.device)
    watched = transport.naming(f"dcp: {done}") if isinstance(transport, TorchTransport) else nullcontext()
    try:
        with watched:
            yield
    except torch_dcp.CheckpointException as failed:
        rank, what = _first(failed)
        raise CheckpointError(f"the checkpoint in {checkpoint_id} can't be {done}, on rank {rank}: {what}") from None


def _first(failed: torch_dcp.CheckpointException) -> tuple[int, str]:
    """Return the first rank that has failed, and its error."""
    rank, (error, _) = min(failed.failures.items())
    return rank, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _group(ranks: World) -> dist.ProcessGroup | None:
    """Return the ranks over which a checkpoint is written: those of the optimizer; of shards, all."""
    return None if ranks.shards.count > 1 else getattr(ranks.transport, "group", None)


def _ranks(optimizer: Optimizer, more: Mapping[str, Any]) -> World:
    """Return those over which a checkpoint is written: the optimizer's or, of another's, those that compress."""
    of_others = [value.world for value in more.values() if isinstance(value, Compression)]
    return of_others[0] if of_others and frame_of(optimizer) is None else _frame(optimizer).ranks


def _frame(optimizer: Optimizer) -> Frame:
    """Return what an optimizer works with; raise if it is none of ours, or has ranks that torch can't save from."""
    frame = frame_of(optimizer)
    if frame is None:
        raise TypeError(
            f"optimizer must be one of fusedonebit's, got {type(optimizer).__name__}; others' are saved beside "
            "compression=fusedonebit.compress(model)"
        )
    if frame.ranks.model_parallel.groups and frame.parameters.mesh is not None:
        raise RuntimeError(
            "torch.distributed.checkpoint wants all shards of DTensors at once, but process_group has one of "
            "Wire(model_parallel=...) alone: torch.save() each rank's optimizer.state_dict() in its own file"
        )
    rows = frame.ranks.rows
    if rows.shape != (1, 1) and rows.mesh is None:
        raise RuntimeError(
            f"torch.distributed.checkpoint does not know the {rows.shape[0]} ranks of "
            f"{type(frame.ranks.transport).__name__}: torch.save() each rank's optimizer.state_dict() in its own file"
        )
    return frame


def _check_round(frame: Frame, header: Mapping[str, Any]) -> None:
    if header.get("local") and header.get("world_size", frame.ranks.transport.world_size) > 1:
        raise ValueError(
            f"after {header['local']} local steps of a round each rank has parameters of its own, of which "
            "torch.distributed.checkpoint keeps one rank's: save at the end of a round"
        )


def _header(reader: torch_dcp.StorageReader, name: str, saved: Collection[str]) -> Mapping[str, Any] | None:
    return None if name not in saved else read_header(_entry(reader, name))  # None: it is AdamW's


def _entry(reader: torch_dcp.StorageReader, name: str) -> Any:
    """Return a plain value of a checkpoint; each rank reads it by itself."""
    entry: dict[str, Any] = {name: ""}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            torch_dcp.load(entry, storage_reader=reader, planner=PlainValues(), no_dist=True)
    except torch_dcp.CheckpointException as failed:
        raise CheckpointError(f"the checkpoint's {name} can't be read: {_first(failed)[1]}") from None
    return entry[name]
