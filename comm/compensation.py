"""Keeps what a worker's updates differ by from the global ones, and counts rounds (Marsit, Algorithm 1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..triton_kernels import rules
from ..triton_kernels.close_round import Left
from ..triton_kernels.local_update import Compensation
from ..triton_kernels.tables import tables_of
from .partition import Section


class WorkerCompensation:
    """The vector v of a worker: what it has kept, c of Algorithm 1, and its update.

    Of the global update g only how far it goes is known when a round ends: c = v - g is formed when v is next read.

    Args:
        part: What of the index space is here.
        device: Where everything lies.
        limit: Largest compensation of a coordinate after a 1-bit round, in steps (eta_s); None: the paper's, without.

    Attributes:
        whole: float32 [P], v; 0 where others have it.
        here: What of it is here.
        most: As given.
        block_tensor: int32 [B], each block's tensor, of the whole index space.
    """

    def __init__(self, part: Section, device: torch.device, limit: float | None) -> None:
        if limit is not None and not 0 <= limit < math.inf:
            raise ValueError(f"compensation_limit must be a finite number >= 0 or None, got {limit!r}")
        self.most, whole = limit, part.whole
        self.whole = torch.zeros(whole.numel, device=device)
        self.here = self.whole[part.elements]
        self.block_tensor = tables_of(whole, device).tensor
        # Of v, and its bound, until c is formed.
        self._taken = torch.zeros(whole.n_blocks, device=device)
        self._limit = torch.full_like(self._taken, torch.inf)
        self._blocks = part.blocks

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Return what the last round has taken of v here, and its bound: float32 [blocks] each."""
        return self._taken[self._blocks], self._limit[self._blocks]

    @property
    def read(self) -> Compensation:
        """Return c as ``local_update`` takes it."""
        return Compensation(self.here, *self.tables)

    def left(self, scale: Tensor) -> Left:
        """Return where ``close_round`` writes how far the global update goes: ``scale``, float32 [B], and of v."""
        return Left(scale, self._taken, self._limit)

    def keep(self, blocks: Tensor) -> None:
        """Bound nothing in ``blocks``, bool [B]: there the mean of full precision is kept."""
        self._limit.masked_fill_(blocks, torch.inf)

    def refuse(self, still: Tensor) -> None:
        """Take nothing of v unless ``still``, bool [1]."""
        self._taken *= still
        self._limit.masked_fill_(~still, torch.inf)

    def formed(self) -> None:
        """Note that c of the last round has been formed."""
        taken, limit = self.tables
        taken.zero_()
        limit.fill_(torch.inf)

    def form(self, signs: Tensor, live: Tensor) -> None:
        """Form c, in place, from ``signs`` of the last update, float32 [blocks, block_size]; where not ``live`` 0."""
        taken, limit = self.tables
        sent = signs.mul_(taken[:, None])
        left = rules.compensation(self.here.view_as(sent), sent, limit[:, None]).view(-1)
        self.here.copy_(torch.where(live, left, 0.0))
        self.formed()


class Schedule:
    """Counts rounds, and says which are of full precision: 0, K, 2K ... of those that were not taken back (line 3).

    Args:
        every: K; 0: none is (K infinite).

    Attributes:
        every: As given.
        rounds: How many there were, t of the next.
        counted: Those of them that were not taken back.
        full_precision: Whether the last round sent float32.
    """

    def __init__(self, every: int = 0) -> None:
        self.every, self.rounds, self.counted = every, 0, 0
        self.full_precision = False
        self._full_at = 0  # rounds counted before the next of full precision
        self._skipped: Tensor | int = 0  # 1-bit rounds that are counted still

    def begin(self) -> bool:
        """Begin a round; return whether it is of full precision."""
        if self.every > 0 and self.counted >= self._full_at:  # waits for the device if a round was skipped since
            self.counted, self._skipped = self.counted - int(self._skipped), 0
        self.full_precision = self.every > 0 and self.counted >= self._full_at
        if self.full_precision:
            self._full_at = (self.counted // self.every + 1) * self.every
        return self.full_precision

    def end(self) -> None:
        """Count a round."""
        self.rounds += 1
        self.counted += 1

    def skip(self, flags: Tensor) -> None:
        """Take the round just ended back if any of its ``flags``, int32 [1], is set; one of bits is looked at later."""
        if not self.full_precision:
            self._skipped = self._skipped + (flags != 0)  # read when it matters: no round waits for its flags
        elif bool(flags):
            self.take_back(full_precision=True)

    def take_back(self, full_precision: bool) -> None:
        """Take a round back, maybe one of full precision, that is known to have been skipped: it does not count."""
        self.counted -= 1
        if full_precision:
            self._full_at = min(self._full_at, self.counted)

    def resume(self, rounds: int, counted: int | None) -> None:
        """Take up a checkpoint's counts."""
        self.rounds, self._skipped = rounds, 0
        self.counted = rounds if counted is None else counted
        self._full_at = -(-self.counted // max(1, self.every)) * max(1, self.every)
