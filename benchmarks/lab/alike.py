"""What stands between workers of which one optimizer stands for all."""

from __future__ import annotations

from torch import Tensor

from fusedonebit.comm.transport import CountingTransport, Pending, Waiting


class AlikeTransport(CountingTransport):
    """Ranks that all hold the same, seen from one of them: what arrives follows from what it sends itself.

    A sum over W ranks is W times the value: exact, as a sum in rank order is, where W is a power of 2.
    """

    library = "alike"

    def _move(self, collective: str, *tensors: Tensor) -> None:
        received, sent = tensors[0], tensors[-1]
        if collective == "all_reduce":
            received.mul_(self.world_size)
        elif collective == "reduce_scatter":
            received.copy_(sent.view(self.world_size, -1)[self.rank]).mul_(self.world_size)
        elif collective == "all_to_all":
            received.copy_(sent[self.rank].expand_as(received))
        elif collective == "all_gather":
            received.copy_(sent.expand_as(received))

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Pending:
        self.traffic.add(sent.nbytes)
        received.copy_(sent)
        return Waiting()

    def __repr__(self) -> str:
        return f"alike (rank {self.rank} of {self.world_size})"
