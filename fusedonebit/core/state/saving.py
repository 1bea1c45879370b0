"""``state_dict``: exact, tensors and plain values only.

In full precision the ``state`` is AdamW's own (``step``, ``exp_avg``, ``exp_avg_sq`` per parameter), equal on all
ranks. With ``master_weights`` each parameter of 16 bits also has its ``master``, float32, in all stages: what it is the
rounded value of, also where only corrections are kept here. Loading takes that up exactly, whether the model is loaded
before or after; where by the next step a parameter is not the rounded value of its master, the parameter counts. Where
the checkpoint has none masters begin as their parameters.

What else there is the algorithms declare (``StateTensor``): with each parameter, or, along the flat index space, with
the first, as rows of each of W replicas and S shards (``Rows``) beside ``rank``, int64 [W, S, 1], which says whose row
it is. Of rows a rank has its own alone; they are DTensors, so that ``torch.distributed.checkpoint`` saves all of them
(``fusedonebit.dcp``). ``torch.save`` works as well: then each rank saves, and loads, its own file.

Momentum and residuals are in the unit in which they are compressed. The header, all that is no tensor, is JSON in the
first of the ``param_groups``; it has a checksum of each tensor, and of itself (``integrity``), which takes one pass
over the state on the host, and from a GPU the copy. Like torch's, the tensors are references to live state where they
can be: copy or save them before the next step. Saving settles the deferred residuals, which changes no later step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..frame import Frame
from ..header import FORMAT, KEY, is_compressed
from ..options import stated
from ..state_tensor import StateTensor
from . import entries, integrity
from .integrity import read_header
from .owner import Owner

State = Mapping[str, Any]


def call_hooks(optimizer: Owner, kind: str, *state_dict: Any) -> Any:
    """Call the hooks of ``register_<kind>_hook``; return ``state_dict`` as they leave or return it.

    Torch packs, then calls hooks, then loads, each within one method. Here what is packed must be completed before a
    hook sees it, and what is loaded must be restored before a hook may look; what users can tell is as in torch.
    """
    for hook in vars(optimizer)[f"_optimizer_{kind}_hooks"].values():
        returned = hook(optimizer, *state_dict)
        state_dict = (returned,) if state_dict and returned is not None else state_dict
    return state_dict[0] if state_dict else None


def save(optimizer: Owner) -> dict[str, Any]:
    """Return what torch's own ``state_dict`` would be, completed."""
    frame, algorithm, contents = optimizer.frame, optimizer.algorithm, optimizer.contents
    frame.steps.refuse_if_broken()
    algorithm.catch_up()
    contents.settle()
    packed = packed_of(optimizer.param_groups, optimizer.state)
    # Copies: torch's are the live ones.
    states = {key: dict(state) if isinstance(state, dict) else state for key, state in packed["state"].items()}
    own = [states[index] for index in frame.parameters.index_of]
    header = _header(frame, algorithm.phase, algorithm.compressed, contents.values())
    for state in own:
        for name in optimizer.published - {"step"}:
            state.pop(name, None)
        # A tensor of its own for each: AdamW counts each up, and a shared one many times.
        state["step"] = state["step"].clone()
    names = {"step"} if own else set()
    for spec, i in entries.of(frame, contents.kept()):
        if spec.is_in(header):
            own[i][spec.name] = entries.saved(frame, spec, i)
            names.add(spec.name)
    header["names"] = sorted(names)
    packed["state"] = states
    _seal(frame, contents.declared(), packed, header, own)
    return packed


def packed_of(param_groups: Sequence[dict[str, Any]], state_of: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what ``torch.optim.Optimizer.state_dict`` does, but call no hooks: numbers stand for parameters."""
    numbers: dict[int, int] = {}
    groups: list[dict[str, Any]] = []
    start = 0
    for group in param_groups:
        for number, p in enumerate(group["params"], start):
            numbers.setdefault(id(p), number)
        start += len(group["params"])
        groups.append({**group, "params": [numbers[id(p)] for p in group["params"]]})
    state = {numbers[id(key)] if isinstance(key, Tensor) else key: value for key, value in state_of.items()}
    return {"state": state, "param_groups": groups}


def _seal(
    frame: Frame, declared: integrity.Declared, packed: Mapping[str, Any], header: State, own: Sequence[State]
) -> None:
    """Write the header, with the checksums of what parameters have of the optimizer's own."""
    if frame.sums_up:
        summed = integrity.of_names(own, header["names"])
        header = {
            **header,
            integrity.CHECKSUMS: integrity.checksums(frame, declared, summed),
            integrity.BETWEEN: integrity.between(summed),
        }
    packed["param_groups"][0][KEY] = integrity.sealed(header)


def seal_again(frame: Frame, declared: integrity.Declared, saved: dict[str, Any]) -> dict[str, Any]:
    """Sum up what hooks have made of a ``state_dict``, unless that is none of ours any more."""
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
        return saved
    header = header_of(saved)
    if header is not None and integrity.CHECKSUMS in header:
        _seal(frame, declared, saved, header, by_parameter(frame, saved))
    return saved


def forget_checksums(state_dict: Mapping[str, Any]) -> None:
    """Remove a checkpoint's checksums, in place, so that tensors that were changed on purpose can be loaded."""
    header = header_of(state_dict)
    if header is not None and KEY not in state_dict:
        for key in (integrity.CHECKSUMS, integrity.BETWEEN):
            header.pop(key, None)
        state_dict["param_groups"][0][KEY] = integrity.sealed(header)


def header_of(state_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a checkpoint says of itself; None if it is not of this package."""
    if KEY in state_dict:  # beside the groups, as format 1 had it
        return dict(state_dict[KEY])
    text = state_dict["param_groups"][0].get(KEY) if state_dict["param_groups"] else None
    return None if text is None else read_header(text)


def by_parameter(frame: Frame, state_dict: Mapping[str, Any]) -> list[State]:
    """Return the state of each trainable parameter, which its group names by number, or by name."""
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    return [state_dict["state"].get(names[index], {}) for index in frame.parameters.index_of]


def template(
    frame: Frame, kept: Callable[[bool], Sequence[StateTensor]], packed: dict[str, Any], header: State | None
) -> dict[str, Any]:
    """Make room for a checkpoint with this header, None of AdamW's, for ``torch.distributed.checkpoint`` to fill.

    ``kept`` tells what there is in a compressed stage, or in another; ``packed`` is what ``packed_of`` has returned.
    """
    states = {index: {"step": torch.zeros((), dtype=torch.float64)} for index in frame.parameters.index_of}
    told = header or {}
    for spec, i in entries.of(frame, kept(bool(header) and is_compressed(told)), told.get("names", ())):
        states[frame.parameters.index_of[i]][spec.name] = entries.room(frame, spec, i, header)
    packed["state"] = states
    packed["param_groups"][0][KEY] = ""
    return packed


def numerics(frame: Frame) -> dict[str, Any]:
    """Return the options that change what a step computes, as plain values."""
    values = frame.options.values()
    return {name: _plain(values[name]) for name in frame.options.recorded}


def _header(frame: Frame, phase: str, compressed: bool, values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "algorithm": frame.name,
        "trained": list(frame.parameters.index_of),
        "phase": phase,
        "lines": compressed and bool(frame.parameters.owners),
        "updates": frame.steps.outcomes.updates,
        "steps": frame.steps.count.total,
        "skipped": frame.steps.outcomes.skipped,
        "rank": int(frame.ranks.rows.rank()),
        "shards": frame.ranks.shards.count,
        "block_size": frame.layout.block_size,
        "line": frame.layout.numel,
        "strides": frame.parameters.strides(),
        "masks": frame.sums_of_masks(),
        "options": numerics(frame),
        "bytes_total": frame.ranks.transport.traffic.bytes_total,
        **frame.cut(),
        **values,
    }


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (bool, int, float, str)) else stated(value)
