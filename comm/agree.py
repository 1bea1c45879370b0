"""Finds out whether all ranks mean the same, and if not, tells every rank the first difference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor

from .transport import Transport

Fact = tuple[str, str]
"""What a thing is called, and its value here."""


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
    """Returns on all ranks if all state the same facts and none has an error; else raises on all.

    One collective of 32 bytes a rank; only where digests differ are the facts themselves exchanged.

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
    digests = _gather_rows(transport, hashlib.sha256(payload).digest(), 32, device)
    if error is None and all(row == digests[0] for row in digests):
        return
    length = torch.tensor([[len(payload)]], dtype=torch.int64, device=device)
    lengths = torch.empty(transport.world_size, 1, dtype=torch.int64, device=device)
    transport.all_gather(lengths, length)
    longest = int(lengths.max())
    rows = _gather_rows(transport, payload, longest, device)
    stated = [json.loads(row[: int(n)]) for row, n in zip(rows, lengths, strict=True)]
    if error is not None:
        raise error
    message = _failures(stated, member) or _first_difference([s["facts"] for s in stated], member)
    # What another has failed with may end so already.
    raise DisagreementError(message + (f"; {hint}" if hint and hint not in message else ""))


def _describe(error: Exception | None) -> str | None:
    # Some errors carry no text; their name must do.
    return None if error is None else str(error) or type(error).__name__


def _gather_rows(transport: Transport, payload: bytes, width: int, device: torch.device) -> list[bytes]:
    row = torch.tensor([list(payload.ljust(width, b"\0"))], dtype=torch.uint8).to(device)
    rows = torch.empty(transport.world_size, width, dtype=torch.uint8, device=device)
    transport.all_gather(rows, row)
    return [bytes(r.tolist()) for r in rows.cpu()]


def _failures(stated: Sequence[dict], member: str) -> str:
    failed = [f"{member} {rank}: {s['error']}" for rank, s in enumerate(stated) if s["error"]]
    return "failed on " + ", ".join(failed) if failed else ""


def _first_difference(stated: Sequence[Sequence[Fact]], member: str) -> str:
    for index, (name, value) in enumerate(stated[0]):
        for rank, facts in enumerate(stated[1:], start=1):
            if index >= len(facts) or tuple(facts[index]) != (name, value):
                other = facts[index] if index < len(facts) else ("nothing more", "")
                theirs = other[1] if other[0] == name else " ".join(other).strip()
                return f"{member}s differ: {name} is {value} on {member} 0 but {theirs} on {member} {rank}"
    for rank, facts in enumerate(stated):
        if len(facts) > len(stated[0]):
            name, value = facts[len(stated[0])]
            return f"{member}s differ: {name} is {value} on {member} {rank} but nothing on {member} 0"
    return f"{member}s differ"


def checksum(tensor: Tensor) -> int:
    """A 63-bit checksum of a dense tensor's bits, in memory order; equal only for equal bits."""
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
