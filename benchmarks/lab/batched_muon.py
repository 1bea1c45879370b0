"""All W workers of 1-bit Muon in one optimizer: one owner has all matrices, and averages what each worker compresses.

What a matrix becomes does not depend on who owns it: bits are those of simulated ranks, and so are the bytes counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusedonebit import OneBitMuon
from fusedonebit.comm import StepContext, Transport
from fusedonebit.comm.carried import Carried
from fusedonebit.comm.owned_signs import OwnedSigns
from fusedonebit.comm.owners import Matrix
from fusedonebit.comm.reducer import Compress
from fusedonebit.optim.muon import Muon
from fusedonebit.optim.muon_exchange import OwnedExchange
from fusedonebit.optim.orthogonal import Matrices
from fusedonebit.optim.whitening import Whitening, triangle
from fusedonebit.triton_kernels import FlatLayout

from .alike import AlikeTransport
from .setting import Params, Setting


class Worker(OwnedSigns):
    """One of the workers: sends ``gradients``, of matrices, and ``others``, whatever the optimizer gives."""

    gradients: Sequence[Tensor] = ()
    others: Sequence[Tensor] = ()
    whitening: Whitening

    def compress(self, grads: Sequence[Tensor], coef: Tensor) -> None:
        super().compress(self.whitening.whitened(self.gradients), coef)

    def carry(self, grads: Sequence[Tensor], by: Tensor | None) -> None:
        super().carry(self.others, by)


class BatchedOwners(Worker):
    """The owner of all matrices, and the first worker; the others are beside it. Arguments as ``OwnedSigns``'s.

    Attributes:
        trained: Which of the model's parameters the matrices are.
    """

    trained: Sequence[int] = ()

    def __init__(
        self,
        layout: FlatLayout,
        matrices: Sequence[Matrix],
        transport: Transport,
        *others: Any,
    ) -> None:
        of_matrices, alone, count = (layout, matrices), AlikeTransport(0, 1), transport.world_size
        update, shares, compensated, live, carried, _ = others
        how = update, shares
        self.one_of_many = OwnedSigns(*of_matrices, transport, *how, compensated, live, carried)
        if carried is not None:
            carried = Carried(carried.layout, 1, carried.dtype, compensated.device, 1 / count)
        super().__init__(*of_matrices, alone, *how, compensated, live, carried, senders=count)
        left = [torch.zeros_like(compensated) for _ in range(1, count)]
        self.ranks = [self, *(Worker(*of_matrices, alone, *how, each, live, carried) for each in left)]
        for rank in self.ranks:
            rank.verdict.digest = self.verdict.digest

    def give(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        """Take each worker's gradients by parameter, of the coming step."""
        for rank, row in zip(self.ranks, gradients, strict=True):
            given = list(row.values())
            rank.gradients = [given[i] for i in self.trained]
            rank.others = [g for i, g in enumerate(given) if i not in self.trained]

    def synchronise(self, compress: Compress, context: StepContext) -> None:
        for rank in self.ranks:
            rank.write(compress, context if rank is self else context._replace(renewal=None))
        self.arrived.buffer.copy_(torch.cat([rank.to_owners.buffer for rank in self.ranks]))
        self.serve(context)
        self.gathered.buffer.copy_(self.served.buffer)
        self.receive(context)
        for rank in self.ranks:
            rank.skipped = self.skipped
        self.count(self.one_of_many.to_owners.buffer[0].nbytes)
        self.count(self.one_of_many.served.nbytes)

    def count(self, nbytes: int) -> None:
        """Count what a rank of W sends to the others, so much each."""
        transport = self.one_of_many.transport
        transport.traffic.add((transport.world_size - 1) * nbytes)


class BatchedWhitening(Whitening):
    """What whitens all workers' gradients."""

    def __init__(self, matrices: Matrices, reducer: BatchedOwners, dtype: torch.dtype) -> None:
        super().__init__(matrices, reducer, dtype)
        self.reducer = reducer
        for rank in reducer.ranks:
            rank.whitening = self

    def turn(self, reducer: OwnedSigns, before: Sequence[Tensor]) -> None:
        for rank in self.reducer.ranks:
            super().turn(rank, before)

    def gather(self, own: Sequence[Tensor]) -> list[Tensor]:
        owners = self.reducer.one_of_many.owners
        self.reducer.count(4 * max(1, *(sum(triangle(min(owners.shapes[i])) for i in each) for each in owners.owned)))
        return super().gather(own)


class BatchedExchange(OwnedExchange):
    """The same between these."""

    reducer: BatchedOwners
    reducer_kind: ClassVar = BatchedOwners
    whitening_kind: ClassVar = BatchedWhitening


class BatchedMuon(Muon):
    """The same of all workers."""

    exchange_kind: ClassVar = BatchedExchange


class BatchedOneBitMuon(OneBitMuon):
    """All workers' 1-bit Muon."""

    kind = BatchedMuon


def onebit_muon(params: Params, of: Setting, trained: Sequence[int], **how: Any) -> OneBitMuon:
    """Make 1-bit Muon of the ``trained`` ones of a model's parameters, AdamW of the others; all workers' or one's."""
    given, kind = list(params), BatchedOneBitMuon if isinstance(of.transport, AlikeTransport) else OneBitMuon
    rest = [p for i, p in enumerate(given) if i not in trained]
    groups: Any = [{"params": [given[i] for i in trained]}, {"params": rest, "algorithm": "adamw"}]
    how = {"adjust_lr_fn": "match_rms_adamw", "process_group": of.transport, **how}
    made = kind([group for group in groups if group["params"]], of.lr, of.weight_decay, **how)
    if isinstance(made.algorithm.exchange, BatchedExchange):
        made.algorithm.exchange.reducer.trained = trained
    return made
