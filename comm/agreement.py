"""Compares what all ranks state; where they differ, every rank raises with the first difference."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .transport import CollectiveError, Transport

MOST_BYTES = 1 << 30
"""More than facts are of any model."""

Fact = tuple[str, str]
"""A name, and its value on this rank."""


class DisagreementError(ValueError):
    """Ranks were given different things where all must be given the same."""


def agree(
    transport: Transport,
    facts: Sequence[Fact],
    device: torch.device,
    error: Exception | None = None,
    hint: str = "",
    member: str = "rank",
) -> None:
    """Return on all ranks if all state the same facts and none has an error; else raises on all.

    One collective of 32 bytes a rank. Only where digests differ each rank gets rank 0's facts, and tells what its own
    differ in first: all ranks' facts together might not fit into the memory of one.

    Args:
        transport: All its ranks must call this.
        facts: Named values, compared in order.
        device: Where the transport wants its tensors.
        error: What went wrong on this rank, to be raised here while the others name it.
        hint: The way out, appended to the message.
        member: What messages call one of the transport's ranks.

    Raises:
        DisagreementError: on every rank, naming the first difference from rank 0, or the ranks
            that failed.
        Exception: ``error`` itself on the rank that had it.
    """
    payload = json.dumps({"facts": list(facts), "error": _describe(error)}).encode()
    told = json.dumps(list(facts)).encode()
    # The length of what may have to be sent takes the digest's last quarter.
    own = hashlib.sha256(payload).digest()[:24] + len(told).to_bytes(8, "little")
    digests = _gather_rows(transport, own, 32, device)
    if error is None and bool((digests == digests[0]).all()):
        return
    length = int.from_bytes(bytes(digests[0, 24:].tolist()), "little")
    if length > MOST_BYTES:
        raise CollectiveError(f"what rank 0 states arrived damaged: it would be of {length} bytes")
    wanted = _bytes(told.ljust(length, b"\0")[:length], device)
    transport.broadcast(wanted)
    difference = _difference(json.loads(bytes(wanted.tolist())), facts)
    stated = _gather_objects(transport, {"error": _describe(error), "difference": difference}, device)
    if error is not None:
        raise error
    failed = ", ".join(f"{member} {rank}: {s['error']}" for rank, s in enumerate(stated) if s["error"])
    message = f"failed on {failed}" if failed else _first_difference(stated, member)
    # What another has failed with may end so already.
    raise DisagreementError(message + (f"; {hint}" if hint and hint not in message else ""))


def _describe(error: Exception | None) -> str | None:
    # Some errors carry no text, or nothing but a key: their name tells more.
    if isinstance(error, KeyError):
        return f"KeyError: {error}"
    return None if error is None else str(error) or type(error).__name__


def _bytes(payload: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)


def _gather_rows(transport: Transport, payload: bytes, width: int, device: torch.device) -> Tensor:
    """Gather every rank's payload, padded: uint8 [W, width]."""
    row = _bytes(payload.ljust(width, b"\0"), device).view(1, -1)
    rows = torch.empty(transport.world_size, width, dtype=torch.uint8, device=device)
    transport.all_gather(rows, row)
    return rows.cpu()


def _gather_objects(transport: Transport, own: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    payload = json.dumps(own).encode()
    lengths = torch.empty(transport.world_size, 1, dtype=torch.int64, device=device)
    transport.all_gather(lengths, torch.tensor([[len(payload)]], dtype=torch.int64, device=device))
    rows = _gather_rows(transport, payload, int(lengths.max()), device).numpy()
    return [json.loads(row[: int(n)].tobytes()) for row, n in zip(rows, lengths.cpu(), strict=True)]


def _difference(wanted: Sequence[Sequence[str]], facts: Sequence[Fact]) -> list[Any] | None:
    """Return the index of the first fact that differs from rank 0's, rank 0's, and this rank's; None: no such fact."""
    for index, (theirs, own) in enumerate(itertools.zip_longest(wanted, facts)):
        if theirs is None or own is None or tuple(own) != tuple(theirs):
            return [index, theirs, own]
    return None


def _first_difference(stated: Sequence[dict[str, Any]], member: str) -> str:
    """Name, of all ranks that differ from rank 0, the earliest fact, and there the lowest rank."""
    found = [(s["difference"][0], rank, *s["difference"][1:]) for rank, s in enumerate(stated) if s["difference"]]
    if not found:
        return f"{member}s differ"
    _, rank, wanted, own = min(found, key=lambda each: each[:2])
    if wanted is None:
        return f"{member}s differ: {own[0]} is {own[1]} on {member} {rank} but nothing on {member} 0"
    name, value = wanted
    other = ("nothing more", "") if own is None else own
    theirs = other[1] if other[0] == name else " ".join(other).strip()
    return f"{member}s differ: {name} is {value} on {member} 0 but {theirs} on {member} {rank}"


def sum_of_words(tensor: Tensor) -> Tensor:
    """Return the wrapping sum of the words of ``tensor``, rows of which are dense: int64 [], without waiting.

    It differs where a bit does. Words are of 8 bytes where rows are made of these: else a copy is made, in int64.
    """
    size = tensor.element_size()
    if tensor.dim() and all(
        n * size % 8 == 0 for n in (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    ):
        return tensor.view(torch.int64).sum()
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).sum()


def checksum(tensor: Tensor) -> int:
    """Return a 63-bit checksum of the bits of a dense ``tensor``, in memory order; equal only for equal bits."""
    size = tensor.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(integer)
    total, chunk = 0, 1 << 20
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk].to(torch.int64)
        weights = torch.arange(1, len(part) + 1, device=part.device)
        # The position weighs, so that swapped values show; int64 arithmetic wraps.
        total = total * 1_000_003 + int((part * (weights * 2 + 1)).sum()) + len(part)
    return total & 0x7FFF_FFFF_FFFF_FFFF
