"""One rank of many, alone: its share of the work, and its traffic counted, with nobody at the other end."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedonebit.comm import Traffic
from fusedonebit.comm.transport import Waiting


class Loopback:
    """A transport of rank 0 of W whose messages all come from itself, copied on the device.

    Checksums alone, which are int64, differ from rank to rank, as those of data do.
    """

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size, self.traffic = 0, world_size, Traffic()

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        received.copy_(sent)
        self.traffic.add(sent.nbytes - sent[0].nbytes)

    def all_gather(self, gathered: Tensor, sent: Tensor) -> None:
        gathered.copy_(sent.expand_as(gathered))
        if sent.dtype == torch.int64:
            gathered += torch.arange(self.world_size, device=sent.device)[:, None]
        self.traffic.add(sent.nbytes * (self.world_size - 1))

    def all_reduce(self, tensor: Tensor) -> None:
        tensor *= self.world_size
        self.traffic.add(2 * tensor.nbytes * (self.world_size - 1) // self.world_size)

    def reduce_scatter(self, received: Tensor, sent: Tensor) -> None:
        torch.mul(sent[: received.numel()], self.world_size, out=received)
        self.traffic.add(sent.nbytes - received.nbytes)

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Waiting:
        received.copy_(sent)
        self.traffic.add(sent.nbytes)
        return Waiting()

    def __repr__(self) -> str:
        return f"loopback (rank 0 of {self.world_size})"
