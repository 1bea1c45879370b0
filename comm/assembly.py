"""Makes whole matrices of shards, each on one of the ranks that hold them, and shards of what becomes of them.

Where a model is sharded (FSDP2), each rank has some rows of every matrix, and Newton-Schulz needs all. So the ranks of
one replica send each other the rows of what they own, in the dtype in which that computes: one all-to-all there, and
one back. Rows are cut as ``Tensor.chunk`` cuts them: the last ranks may have fewer, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .owners import Kind, divide
from .transport import Transport


class _Cut(NamedTuple):
    """Matrices of one kind, and where messages have them."""

    rows: int
    """Of the largest shard; messages have as many of each."""
    columns: int
    rows_here: int
    """Of this rank's shards."""
    maker: Tensor
    """Which rank makes each whole, int64 [number]."""
    slot: Tensor
    """Which one it is of those there, int64 [number]."""
    made_here: int
    """How many this rank makes whole."""
    most: int
    """How many one does."""
    first: int
    """Where they begin in a message."""

    def of(self, messages: Tensor) -> Tensor:
        """View them in messages [S, n], [S, most, rows, columns]."""
        shape = (self.most, self.rows, self.columns)
        return messages[:, self.first :][:, : self.most * self.rows * self.columns].view(len(messages), *shape)


class Assembly:
    """Lets whole matrices be made of those of which each rank has a shard.

    Args:
        transport: Connects the S ranks that hold the shards.
        kinds: Of matrices, and how many there are of each; equal on all ranks.
        dtype: In which they travel.
        device: Where they lie.
    """

    def __init__(
        self, transport: Transport, kinds: Sequence[tuple[Kind, int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._transport, self._dtype, self._cuts = transport, dtype, list[_Cut]()
        ranks, rank = transport.world_size, transport.rank
        made_by = divide([kind for kind, number in kinds for _ in range(number)], ranks)
        earlier = length = 0
        for kind, number in kinds:
            matrices = range(earlier, earlier + number)
            of_kind = [[i for i in made if i in matrices] for made in made_by]
            place = {i: (maker, slot) for maker, made in enumerate(of_kind) for slot, i in enumerate(made)}
            maker, slot = torch.tensor([place[i] for i in matrices], device=device).reshape(-1, 2).unbind(1)
            whole, columns = kind.shape
            rows, most = -(-whole // ranks), max(map(len, of_kind))
            rows_here = min(rows, max(0, whole - rank * rows))
            self._cuts.append(_Cut(rows, columns, rows_here, maker, slot, len(of_kind[rank]), most, length))
            earlier, length = matrices.stop, length + most * rows * columns
        self._wholes = [kind.shape[0] for kind, _ in kinds]
        self._sent, self._received = (torch.zeros(ranks, length, dtype=dtype, device=device) for _ in range(2))

    def __call__(self, shards: Sequence[Tensor], make: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> list[Tensor]:
        """Return this rank's shards of what ``make`` makes of whole matrices; all ranks call it.

        Args:
            shards: Of each kind [number, own rows, columns].
            make: Takes whole matrices, of each kind [count, rows, columns], and returns as many of the same shape.

        Returns:
            As ``shards``, in the dtype in which matrices travel.
        """
        for cut, part in zip(self._cuts, shards, strict=True):
            cut.of(self._sent)[:, :, : cut.rows_here].index_put_((cut.maker, cut.slot), part.to(self._dtype))
        self._exchange()
        ranks, wholes = self._transport.world_size, list[Tensor]()
        for cut, rows in zip(self._cuts, self._wholes, strict=True):
            each = cut.of(self._received)[:, : cut.made_here].transpose(0, 1)
            wholes.append(each.reshape(cut.made_here, ranks * cut.rows, cut.columns)[:, :rows])
        for cut, rows, whole in zip(self._cuts, self._wholes, make(wholes), strict=True):
            padded = pad(whole, (0, 0, 0, ranks * cut.rows - rows)).view(cut.made_here, ranks, cut.rows, cut.columns)
            cut.of(self._sent)[:, : cut.made_here] = padded.transpose(0, 1)
        self._exchange()
        return [cut.of(self._received)[:, :, : cut.rows_here][cut.maker, cut.slot] for cut in self._cuts]

    def _exchange(self) -> None:
        if self._sent.numel():
            self._transport.all_to_all(self._received.view(torch.uint8), self._sent.view(torch.uint8))

    def held(self) -> list[Tensor]:
        """Return what lives from step to step."""
        return [self._sent, self._received]
