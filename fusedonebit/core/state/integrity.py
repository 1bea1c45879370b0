"""Checks that a checkpoint is what was saved: checksums, and values that no run can have had.

CRC-32 (zlib's, about 3 GB/s on one core) of each tensor that this rank saves, and of the header's own text. The
checksums are columns of the header, one entry per trainable parameter: ``{"exp_avg": [1871029461, ...], ...}``.
Most tensors are views of larger memory, all of which ``torch.save`` writes: what lies between them is summed up too.
"""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..frame import Frame
from ..sharding import is_dtensor, local
from ..state_tensor import StateTensor

CHECKSUMS, BETWEEN = "checksums", "between"
_SEAL = "crc32"
_WAY_OUT = "load another checkpoint"

State = Mapping[str, Any]
Declared = Mapping[str, StateTensor]
"""What an algorithm may keep, by name."""


def crc32(tensor: Tensor) -> int:
    """Return zlib's CRC-32 of the elements in row-major order; a tensor on a device is copied to the host once."""
    here = tensor.detach().cpu().contiguous()
    if not here.nbytes:
        return 0
    return zlib.crc32((ctypes.c_char * here.nbytes).from_address(here.data_ptr()))


# ---------------------------------------------------------------- the header's text


def sealed(header: Mapping[str, Any]) -> str:
    """Return the header as JSON, the checksum of all else as its last key."""
    body = json.dumps(header)
    return f'{body[:-1]}, "{_SEAL}": {zlib.crc32(body.encode())}}}'


def read_header(text: Any) -> dict[str, Any]:
    """Return the header from its JSON; ValueError if it is none, or not as it was written."""
    if not isinstance(text, str):
        raise ValueError(
            f"the checkpoint's header is damaged: it must be a string, got {type(text).__name__}; {_WAY_OUT}"
        )
    try:
        header = dict(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the checkpoint's header is damaged: {error}; {_WAY_OUT}") from error
    seal = header.pop(_SEAL, None)
    if seal is None and CHECKSUMS not in header:
        return header  # of a version that wrote none
    tail = f', "{_SEAL}": {seal}}}'
    if not text.endswith(tail) or zlib.crc32((text[: -len(tail)] + "}").encode()) != seal:
        raise ValueError(f"the checkpoint's header is damaged: its checksum is not that of its text; {_WAY_OUT}")
    return header


# ---------------------------------------------------------------- tensors


def checksums(frame: Frame, declared: Declared, states: Sequence[State]) -> dict[str, list[int | None]]:
    """Return the columns of checksums of what this rank saves."""
    whose = {"rank": int(frame.ranks.rows.rank()), "shards": frame.ranks.shards.count}
    columns: dict[str, list[int | None]] = {}
    for i, state in enumerate(states):
        for key, value in state.items():
            part = _part(frame, declared.get(key), value, whose) if isinstance(value, Tensor) else None
            if part is not None:
                columns.setdefault(key, [None] * len(states))[i] = crc32(part)
    return columns


def of_names(states: Sequence[State], names: Collection[str]) -> list[State]:
    """Return the entries that are the optimizer's own; what others keep beside them is theirs to change."""
    return [{key: value for key, value in state.items() if key in names} for state in states]


def between(states: Sequence[State]) -> list[list[Any]]:
    """Return, by memory, its first tensor's key and index, its bytes, those in no tensor, and their CRC-32."""
    found = []
    for key, i, memory, gaps in _memories(states):
        if gaps:
            rest = torch.cat([memory[start:end] for start, end in gaps])
            found.append([key, i, len(memory), len(rest), crc32(rest)])
    return found


def _memories(states: Sequence[State]) -> Iterator[tuple[str, int, Tensor, list[tuple[int, int]]]]:
    """Return the memory in which tensors lie, uint8, by its first tensor; and the ranges of it that belong to none."""
    memories: dict[int, tuple[str, int, Tensor, list[tuple[int, int]]]] = {}
    for i, state in enumerate(states):
        for key in sorted(k for k, value in state.items() if isinstance(value, Tensor)):
            part = local(state[key]).detach()
            storage = part.untyped_storage()
            memory = torch.empty(0, dtype=torch.uint8, device=part.device).set_(storage)
            taken = memories.setdefault(storage.data_ptr(), (key, i, memory, []))[-1]
            start, size = int(part.storage_offset()) * part.element_size(), part.element_size()
            span = 1 + sum((n - 1) * stride for n, stride in zip(part.shape, part.stride(), strict=True))
            if part.numel() and part.numel() == span:  # else there may be gaps within it
                taken.append((start, start + span * size))
    for key, i, memory, taken in memories.values():
        end, gaps = 0, []
        for start, stop in [*sorted(taken), (len(memory), len(memory))]:
            if start > end:
                gaps.append((end, start))
            end = max(end, stop)
        yield key, i, memory, gaps


def verify(frame: Frame, declared: Declared, states: Sequence[State], header: State) -> None:
    """Raise ValueError for the first tensor that is not as it was saved.

    What another rank has saved can't be told from this rank's header: ``fusedonebit.dcp`` checks that as it reads it.
    """
    here = frame.parameters.index_of
    trained = header.get("trained", here)
    columns_of = {index: column for column, index in enumerate(trained)}
    places = [columns_of.get(index) for index in here]  # others may have trained
    if trained == here:
        _verify_between(frame.parameters.names, states, header.get(BETWEEN, []))
    for key, column in header.get(CHECKSUMS, {}).items():
        if len(column) != len(trained):
            raise ValueError(
                f"the checkpoint's header is damaged: it has {len(column)} checksums of {key} for {len(trained)} "
                f"parameters; {_WAY_OUT}"
            )
        for i, (state, place) in enumerate(zip(states, places, strict=True)):
            saved = None if place is None else column[place]
            if saved is None or not isinstance(state.get(key), Tensor):
                continue
            part = _part(frame, declared.get(key), state[key], header)
            if part is not None and crc32(part) != saved:
                raise ValueError(
                    f"{key} of {frame.parameters.names[i]} in the checkpoint is damaged: its checksum is "
                    f"{crc32(part):08x}, that of what was saved {saved:08x}; {_WAY_OUT} (or, if it was changed on "
                    "purpose, call fusedonebit.checkpoint.forget_checksums(state_dict) first)"
                )


def _verify_between(names: Sequence[str], states: Sequence[State], saved: Sequence[Sequence[Any]]) -> None:
    if not saved:
        return
    now = {tuple(found[:4]): found[4] for found in between(states)}
    for key, i, *size, expected in saved:
        # Tensors that were copied one by one since then lie elsewhere.
        here = now.get((key, i, *size), expected)
        if here != expected:
            raise ValueError(
                f"the memory of {key} of {names[i]} in the checkpoint is damaged: its "
                f"checksum is {here:08x}, that of what was saved {expected:08x}; {_WAY_OUT}"
            )


def _part(frame: Frame, spec: StateTensor | None, value: Tensor, header: State) -> Tensor | None:
    """Return what the header's checksum is of; None if that is not here."""
    rows, shards = frame.ranks.rows, frame.ranks.shards.count
    mine = header["rank"] == int(rows.rank()) and header["shards"] == shards
    if spec is not None and spec.of_rank:
        return rows.own(value) if mine else None
    whole = header["shards"] == shards == 1
    if not mine and not whole:
        return None
    if spec is not None and not spec.by_parameter:
        return rows.own_of_shard(value)
    part = local(value)
    # Of a sharded parameter that another library has put together there is no checksum.
    return part if whole or is_dtensor(value) or part.dim() == 0 else None


def check_values(frame: Frame, declared: Declared, states: Sequence[State], header: State) -> None:
    """Raise ValueError for the first tensor with values that no run can have had."""
    signs = {name: kept.not_negative for name, kept in declared.items()} | {"exp_avg_sq": True}
    for state, name in zip(states, frame.parameters.names, strict=True):
        for key, value in state.items():
            if key == "step":
                _check_step(value, name)
            elif isinstance(value, Tensor) and key != "master" and value.is_floating_point():
                sign = signs.get(key, False)
                not_negative = bool(header.get(sign, True)) if isinstance(sign, str) else sign
                _check_finite(local(value), not_negative, f"{key} of {name}")


def _check_step(value: Any, name: str) -> None:
    step = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 <= step < float("inf"):
        raise ValueError(f"step of {name} in the checkpoint must be a finite number >= 0, got {step!r}; {_WAY_OUT}")


def _check_finite(part: Tensor, not_negative: bool, what: str) -> None:
    if not part.numel():
        return
    low, high = (float(edge) for edge in torch.aminmax(part.detach()))  # NaN if there is one
    if not (-float("inf") < low and high < float("inf")):
        raise ValueError(f"{what} in the checkpoint must be finite, got values from {low} to {high}; {_WAY_OUT}")
    if not_negative and low < 0:
        raise ValueError(f"{what} in the checkpoint must not be negative, got {low}; {_WAY_OUT}")
