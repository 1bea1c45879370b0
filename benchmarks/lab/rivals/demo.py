"""DeMo (Peng et al., 2024, Algorithm 1): the largest cosine components of momentum travel, the rest stays in it.

As in the authors' ``demo.py`` a matrix is cut into tiles of sides that divide its own, 64 at most, a vector into
pieces; k components of each tile travel, all of one that has no more; those that several workers send are averaged over
these workers; parameters move by signs. Values travel in bfloat16 and places in as many bits as a tile needs, where the
authors' code sends 12 bytes for both: what rounding takes away stays in the momentum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from ..setting import Params, Setting
from .bits import as_bytes
from .chunks import SIDE, Chunks, Cut, tiles_of
from .frame import Rival

DECAY = 0.999


@dataclass
class Tiles(Chunks):
    """All tiles of one shape.

    Attributes:
        rows: Cosines of their columns, [height, height].
        columns: Of their rows, [width, width].
    """

    rows: Tensor
    columns: Tensor

    def components(self, tiles: Tensor) -> Tensor:
        """Return the cosine components [..., size] of tiles [..., size]."""
        shaped = tiles.unflatten(-1, (len(self.rows), len(self.columns)))
        return (self.rows @ shaped @ self.columns.T).flatten(-2)

    def back(self, components: Tensor) -> Tensor:
        """Return the tiles of components."""
        shaped = components.unflatten(-1, (len(self.rows), len(self.columns)))
        return (self.rows.T @ shaped @ self.columns).flatten(-2)

    def encode(self, components: Tensor) -> Tensor:
        """Code the largest of components [W, tensors, tiles, size]: uint8 [W, message_bytes]."""
        places = self.largest(components)
        values = components.gather(-1, places).flatten(1).to(torch.bfloat16)
        return torch.cat([self.pack_places(places), as_bytes(values)], -1)

    @property
    def message_bytes(self) -> int:
        """Bytes of a message: places, and two for each value."""
        return self.index_bytes + 2 * self.count

    def decode(self, message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return components [W, tensors, tiles, size] of messages, and where they have any, in the same dtype."""
        packed, values = message.split([self.index_bytes, 2 * self.count], -1)
        places = self.unpack_places(packed)
        values = values.contiguous().view(torch.bfloat16).to(dtype).view(places.shape)
        empty = values.new_zeros(len(message), *self.where.shape)
        return empty.scatter(-1, places, values), empty.scatter(-1, places, 1.0)


class DeMo(Rival):
    """Move by signs of the mean of the components that workers send.

    Args:
        k: Components of a tile that travel, of any size; all where it has fewer.
    """

    def __init__(self, params: Params, of: Setting, k: int) -> None:
        super().__init__(params, of, k=k, decay=DECAY)
        self.delta = self.x.new_zeros(self.workers, self.x.numel())
        alike: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for tensor in self.cut(torch.arange(self.x.numel())):
            tiles = tiles_of(tensor, SIDE)
            alike[tiles.shape[1], tiles.shape[2]].append(tiles.flatten(1)[:, None])
        self.tiles = [
            Tiles(torch.cat(where), min(k, height * width), cosines(height, self.x), cosines(width, self.x))
            for (height, width), where in alike.items()
        ]
        self.cuts = Cut(self.tiles)

    def move(self, gradients: Tensor) -> None:
        self.x.mul_(1 - self.lr * self.weight_decay)
        self.delta.mul_(DECAY).add_(gradients, alpha=self.lr)
        apart = zip(self.tiles, self.cuts.apart(self.delta), strict=True)
        messages = torch.cat([tiles.encode(tiles.components(values)) for tiles, values in apart], -1)
        parts = self.wires.all_gather(messages).split([tiles.message_bytes for tiles in self.tiles], -1)
        own, update = [], []
        for tiles, part in zip(self.tiles, parts, strict=True):
            sent, has = tiles.decode(part, self.x.dtype)
            own.append(tiles.back(sent))
            update.append(tiles.back(sent.sum(0) / has.sum(0).clamp(min=1)))
        self.delta -= self.cuts.together(own)
        self.x -= self.lr * self.cuts.together(update).sign()


def cosines(size: int, like: Tensor) -> Tensor:
    """Return the orthonormal matrix of the discrete cosine transform (DCT-II), [size, size]; what is 0 is exactly 0."""
    at = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (at + 0.5) * at[:, None]) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return torch.where(matrix.abs() > 1e-12, matrix, 0.0).to(like.dtype)
