"""State that differs from rank to rank, in a form that ``torch.distributed.checkpoint`` saves whole.

To it a plain tensor is the same on all ranks, so that it keeps one rank's. Hence what each rank has of its
own is a row of a DTensor [replicas, shards, ...], and what replicas share but shards do not is one of a
DTensor [shards, ...]. Where ``torch.distributed`` does not know the ranks (threads, MPI) rows are plain
tensors [1, 1, ...], and a checkpoint is one file per rank.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import ShardGroup, Transport
from .sharding import is_dtensor, local, with_own_storage


class Rows:
    """The grid of ranks, replicas by shards, and this rank's place in it."""

    def __init__(self, transport: Transport, shards: ShardGroup, device: torch.device) -> None:
        self._transport, self._shards, self._device = transport, shards, device
        self.shape = transport.world_size, shards.count  # replicas and shards
        self.place = transport.rank, shards.transport.rank  # this rank's
        if self._groups():
            import torch.distributed.tensor  # noqa: F401  # torch.load() asks for it where a file has DTensors

    def of_each(self, here: Tensor) -> Tensor:
        """Return what each rank has of its own, [...]: a row of [replicas, shards, ...]."""
        return self._distributed(here[None, None], (0, 1))

    def of_each_shard(self, here: Tensor) -> Tensor:
        """Return what all replicas have alike, [...]: a row of [shards, ...]."""
        return self._distributed(here[None], (None, 0))

    def spread(self, replicas: int, here: Tensor) -> Tensor:
        """Make room for ``of_each`` rows of another number of replicas, spread over these."""
        shape, placed = (replicas, 1, *here.shape), (0, 1)
        if self.mesh is None or self.shape[0] == 1 or replicas == 1:
            return self._distributed(here.new_zeros(shape), (None, 1))
        from torch.distributed.tensor import zeros

        placements = self._placements(placed)
        whole = (replicas, self.shape[1], *here.shape)
        return zeros(whole, dtype=here.dtype, device_mesh=self.mesh, placements=placements)

    def whole(self, replicas: int, here: Tensor) -> Tensor:
        """Make room for ``of_each`` rows of another number of replicas, all of them here."""
        return self._distributed(here.new_zeros((replicas, 1, *here.shape)), (None, 1))

    def own(self, rows: Tensor) -> Tensor | None:
        """Return this rank's row of ``of_each``, here or in an earlier run; None if that had other numbers."""
        part = local(rows)
        if part.shape[:2] == (1, 1) and (not is_dtensor(rows) or rows.shape[:2] == self.shape):
            return part[0, 0]
        return part[self.place] if part.shape[:2] == self.shape else None

    def own_of_shard(self, rows: Tensor) -> Tensor | None:
        """Return this rank's row of what ``of_each_shard`` has made; None if it has another number."""
        part = local(rows)
        if part.shape[0] == 1:
            return part[0]
        return part[self.place[1]] if part.shape[0] == self.shape[1] else None

    def rank(self) -> Tensor:
        """Return this rank's number among all, int64 [1]: saved as a row, it says whose file a file is."""
        replica, shard = self.place
        return torch.tensor([replica * self.shape[1] + shard], device=self._device)

    def check(self, rows: Tensor, rank: Tensor, replicas: int) -> None:
        """Raise ValueError if this rank can't go on from what it has of rows, and of the rows of ``rank``, of a run."""
        if replicas != self.shape[0]:
            if not self.has_all(rows, replicas):
                raise ValueError(
                    f"the checkpoint's world_size is {replicas}, but here it is {self.shape[0]}, and this is one "
                    "rank's file; save and load through torch.distributed.checkpoint (fusedonebit.dcp), or resume with "
                    "as many ranks as wrote it"
                )
            return
        mine, here = self.own(rank), int(self.rank())
        if mine is None or int(mine) != here or self.own(rows) is None:
            by = "one of another number of ranks" if mine is None else int(mine)
            raise ValueError(
                f"the checkpoint's rank is {by}, but here it is {here}; each rank must load the file that it saved "
                "itself; fusedonebit.dcp saves all ranks' in one folder"
            )

    def has_all(self, rows: Tensor, replicas: int) -> bool:
        """Return whether these ranks have between them the rows of all of another run's replicas."""
        if local(rows).shape[0] == replicas:
            return True
        mesh = rows.device_mesh if is_dtensor(rows) else None
        return mesh is not None and self.mesh is not None and mesh.size(0) == self.shape[0] and len(rows) == replicas

    def of_this_shard(self, rows: Tensor) -> Tensor:
        """Return those of the replicas' rows that are here, this rank's shard of each."""
        part = local(rows)
        return part[:, self.place[1] if part.shape[1] == self.shape[1] else 0]

    def mean(self, rows: Tensor, replicas: int, inside: int = 1) -> Tensor:
        """Return the mean over another run's replicas of what each had, [...]; every rank calls it.

        Of ``inside`` of them, one after the other, each had a part [n] of one vector: then it is [inside * n].
        """
        part = self.of_this_shard(rows)
        placements = rows.placements if is_dtensor(rows) else ()
        spread = any(placed.is_shard(0) for placed in placements)  # the same on every rank: not how many it has
        first = self.place[0] * -(-replicas // self.shape[0]) if spread else 0
        total = part.new_zeros(inside, *part.shape[1:])
        for j, row in enumerate(part):
            total[(first + j) % inside] += row
        if spread:
            self._transport.all_reduce(total)
        return (total / (replicas // inside)).flatten(0, 1) if inside > 1 else total[0] / replicas

    def _distributed(self, part: Tensor, dims: tuple[int | None, int]) -> Tensor:
        """Return ``part`` as a DTensor whose dimensions ``dims`` are spread over replicas and shards."""
        if self.mesh is None or (dims[0] is None and self.shape[1] == 1):
            return part
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(with_own_storage(part), self.mesh, self._placements(dims), run_check=False)

    def _placements(self, dims: tuple[int | None, int]) -> list[Any]:
        from torch.distributed.tensor import Replicate, Shard

        placed = [Replicate() if dim is None else Shard(dim) for dim in dims]
        return [p for p, count in zip(placed, self.shape, strict=True) if count > 1]

    def _groups(self) -> list[dist.ProcessGroup]:
        """Return those of the sides longer than 1; none where a side's ranks are not known to ``torch.distributed``."""
        sides = [side for side in (self._transport, self._shards.transport) if side.world_size > 1]
        groups: list[Any] = [getattr(side, "group", None) for side in sides]
        return groups if all(isinstance(group, dist.ProcessGroup) for group in groups) else []

    @cached_property
    def mesh(self) -> Any:
        """Return the ranks as a ``DeviceMesh`` of the dimensions longer than 1; None where there is none to be had."""
        groups = self._groups()
        if not groups:
            return None
        from torch.distributed.device_mesh import DeviceMesh

        kind = self._device.type
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], kind)
        replicas = torch.tensor([dist.get_process_group_ranks(groups[0])], device=self._device)
        columns = replicas.new_empty(self.shape[1], self.shape[0])
        self._shards.transport.all_gather(columns, replicas)
        names = ("replicate", "shard")
        return DeviceMesh.from_group(groups, kind, mesh=columns.T.contiguous().cpu(), mesh_dim_names=names)
