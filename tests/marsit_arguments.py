"""Random arguments for Marsit's ops, on top of ``Problem``'s; bits lie in messages, behind their headers."""

from __future__ import annotations

from typing import Any

import torch
from op_arguments import arguments_of
from reference_ops import Problem
from torch import Tensor

from fusedonebit.comm.message import Messages
from fusedonebit.triton_kernels import FlatLayout
from fusedonebit.triton_kernels.close_round import Left, Received
from fusedonebit.triton_kernels.headers import CHECKED, Flag, Word
from fusedonebit.triton_kernels.local_update import ChunkHeaders, Chunks, Compensation, LocalUpdate
from fusedonebit.triton_kernels.nouns import Digest

MERGED = (CHECKED, int(Word.FLAGS), int(Flag.MISMATCH))
LIMITS = (torch.inf, 0.5, 0.0)
HEADER = (2**31 - 5, 77, int(Flag.ABORT), torch.tensor([-12_345 << 17]))
"""Of ``local_update``: the number, the tag, flags, the digest."""


CPU = torch.device("cpu")


def rows_of(p: Problem, rows: int, device: torch.device = CPU) -> Messages:
    """Messages of random bits."""
    messages = Messages(rows, 0, p.layout, device)
    messages.bits.copy_(p.bytes(rows))
    return messages


def local_arguments(
    p: Problem,
    kind: str = "sgd",
    decays: bool = False,
    moves: bool = False,
    hold: int = 0,
    limit: float = torch.inf,
    chunks: slice | None = None,
    share: float = 1.0,
    begins: bool = False,
) -> Any:
    """``kind``: "plain" (no moments), "sgd" or "adam"."""
    first, last = (0, p.layout.world_size) if chunks is None else (chunks.start, chunks.stop)
    messages, blocks = rows_of(p, p.layout.world_size), p.layout.n_blocks
    exp_avg, exp_avg_sq = p.normal(p.layout.numel), p.exp_avg_sq
    anchor = torch.full((p.layout.numel,), torch.nan) if moves and begins else None
    return arguments_of(
        "local_update",
        *(p.params, p.grads, p.places, Chunks(first, last)),
        *(exp_avg if kind != "plain" else None, exp_avg_sq if kind == "adam" else None),
        *(Compensation(p.compensated, p.worker_scale, torch.full((blocks,), limit)), messages.bits, p.coef),
        LocalUpdate(torch.tensor([1.25]), decays, moves, anchor, share),
        *(torch.tensor([hold], dtype=torch.int32), ChunkHeaders(messages.words, *HEADER)),
    )


def close_arguments(p: Problem, signs: bool = True, flags: int = 0, hold: int = 0, most: float = 0.5) -> Any:
    """Of ``close_round``: the last header has ``flags``; the update is ``signs`` in messages, or floats."""
    words, own = p.headers(flags)
    rows, blocks = p.layout.world_size, p.layout.n_blocks
    payload = rows_of(p, rows).payload if signs else p.normal(p.layout.numel).view(rows, -1).view(torch.uint8)
    written = [torch.full((blocks,), torch.nan) for _ in range(3)]
    held, found, ticket = (torch.tensor([n], dtype=torch.int32) for n in (hold, -1, 0))
    return arguments_of(
        "close_round",
        Received(words, own, payload, None if signs else p.normal(rows, 24).view(torch.uint8)),
        *(p.coef, p.places.block_tensor, 3.0, most, signs, held, Left(*written)),
        *(Digest(torch.tensor([-1]), torch.tensor([0]), torch.tensor(2**63 - 7)), found, ticket),
    )


def merge_arguments(
    layout: FlatLayout, rows: int, threshold: int, seed: int = 12_345, offset: int = 1, device: torch.device = CPU
) -> tuple[Tensor | int, ...]:
    """``rows`` messages of a batch, from row ``offset`` on, and those that arrived; half of their words differ."""
    p = Problem(layout.sizes, layout.world_size, layout.block_size)
    own, arrived = rows_of(p, rows + offset, device), rows_of(p, rows, device)
    words = torch.randint(-(2**31), 2**31, own.words.shape, generator=p._random, dtype=torch.int32)
    own.words.copy_(words)
    changed = torch.randint(-(2**31), 2**31, arrived.words.shape, generator=p._random, dtype=torch.int32)
    arrived.words.copy_(torch.where(torch.rand(changed.shape, generator=p._random) < 0.5, words[offset:], changed))
    return own.bits[offset:], arrived.bits, threshold, seed, own.words[offset:], arrived.words, *MERGED


def owned_arguments(layout: FlatLayout, rank: int, seed: int = 12_345) -> tuple[Tensor | int, ...]:
    """Of ``pick_owned``."""
    p = Problem(layout.sizes, layout.world_size, layout.block_size)
    owners = torch.full((layout.world_size, layout.chunk_bytes), 0xAA, dtype=torch.uint8)
    return rows_of(p, layout.world_size).bits, rank, seed, owners, rows_of(p, 1).bits


def placed_arguments(layout: FlatLayout) -> tuple[Tensor, ...]:
    """Of ``place_owned``, for any planes."""
    p = Problem(layout.sizes, layout.world_size, layout.block_size)
    gathered, bits = rows_of(p, layout.world_size), rows_of(p, layout.world_size)
    return gathered.bits, p.bytes(layout.world_size), bits.bits


def add_arguments(p: Problem, replaces: bool, skip: int = 0, rounding: Tensor | None = None) -> Any:
    values = p.normal(p.layout.numel + 8)
    held = torch.tensor([skip], dtype=torch.int32)
    return arguments_of("add_values", p.params, p.places, values, replaces, held, rounding)
