"""All W workers of a run in one optimizer: what ranks have in common is computed once, what each compresses per worker.

Ranks of a 1-bit all-reduce have the same parameters, moments and coefficients; only gradients, residuals and messages
are their own. So one optimizer stands for all of them, over a transport whose ranks are alike, and its reducer
compresses and serves for each rank in turn, with the library's own code. Bits are those of simulated ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedonebit.comm import CompressedAllReduce, StepContext
from fusedonebit.comm.reducer import Compress
from fusedonebit.comm.shared_squares import Unit
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.optim.bit_rounds import BitRounds
from fusedonebit.optim.local_adam import LocalAdam
from fusedonebit.optim.own_rounds import OwnRounds
from fusedonebit.optim.shared_rounds import SharedRounds
from fusedonebit.optim.two_stage import TwoStage
from fusedonebit.optim.zero_one import ZeroOneAdam
from fusedonebit.triton_kernels import LiveTable, local_step
from fusedonebit.triton_kernels.local_step import LocalStep
from fusedonebit.triton_kernels.nouns import Preconditioner

from .alike import AlikeTransport
from .batched_muon import BatchedExchange, BatchedMuon
from .compressed import OnAverages
from .rivals.frame import Rival


class TakesGradients(Protocol):
    """What stands for all workers."""

    def give(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        """Take each worker's gradients by parameter, of the coming step."""


class WorkerAllReduce(CompressedAllReduce):
    """One of the workers': where the optimizer gives any it compresses ``gradients``, one for each parameter."""

    gradients: Sequence[Tensor] = ()

    def compress(self, tensors: Sequence[Tensor], *how: Any, **more: Any) -> None:
        given = self.gradients if any(tensor.numel() for tensor in tensors) else tensors
        super().compress(given, *how, **more)


def _of_each(name: str) -> Any:
    """Return a method that calls ``CompressedAllReduce``'s for each rank."""

    def of_each(self: BatchedAllReduce, *given: Any) -> None:
        for rank in self.ranks:
            getattr(CompressedAllReduce, name)(rank, *given)

    return of_each


class BatchedAllReduce(WorkerAllReduce):
    """The 1-bit all-reduce of all W workers at once: rank 0's, which has the others', ``ranks``, beside it."""

    ranks: Sequence[WorkerAllReduce] = ()
    receive, set_norm, keep_back, follow, refuse = map(
        _of_each, ("receive", "set_norm", "keep_back", "follow", "refuse")
    )

    def __init__(self, of: CompressedAllReduce, **options: Any) -> None:
        """Take the place of ``of``, in its memory, before anything was compressed; ``options`` as it was made with."""
        world_size = of.layout.world_size
        squares = None if of.squares is None else of.squares.stored.numbers
        taken: dict[str, Any] = {"compensated": of.worker.compensated, "worker_sq": squares}
        taken["exponents"] = of.worker.exponents
        options["live"] = of.live
        super().__init__(of.layout, of.transport, **taken, **options)
        # The result, which all share, and its checksum.
        options |= {"gathered": self.gathered, "scale": self.scale, "digest": self.verdict.digest}
        others = [AlikeTransport(rank, world_size) for rank in range(1, world_size)]
        own: list[dict[str, Any]] = [
            {name: None if x is None else torch.zeros_like(x) for name, x in taken.items()} for _ in others
        ]
        pairs = zip(others, own, strict=True)
        self.ranks = [self, *(WorkerAllReduce(of.layout, each, **tensors, **options) for each, tensors in pairs)]

    def give(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        """Take each worker's gradients by parameter, of the coming step."""
        for rank, each in zip(self.ranks, gradients, strict=True):
            rank.gradients = list(each.values())

    def begin(self) -> None:
        """See ``FeedbackReducer``: all workers have had the same warm-up."""
        for rank in self.ranks[1:]:
            rank.worker.compensated.copy_(self.worker.compensated)
            rank.worker.scale.copy_(self.worker.scale)
            if rank.worker.exponents is not None and self.worker.exponents is not None:
                rank.worker.exponents.copy_(self.worker.exponents)

    def write(self, compress: Compress, context: StepContext) -> None:
        for rank in self.ranks:
            context_here = context if rank is self else context._replace(renewal=None)  # coefficients are all ranks'
            CompressedAllReduce.write(rank, compress, context_here)

    def send(self) -> None:
        """See ``FeedbackReducer``: ``serve`` lets messages go from rank to rank; they count as rank 0 has sent them."""
        self.transport.traffic.add((self.layout.world_size - 1) * self.to_servers.buffer[0].nbytes)

    def serve(self, context: StepContext) -> None:
        sent = torch.stack([rank.to_servers.buffer for rank in self.ranks])
        for number, rank in enumerate(self.ranks):
            self.gathered.buffer.copy_(sent[:, number])
            CompressedAllReduce.serve(rank, context)

    def gather(self) -> None:
        self.gathered.buffer.copy_(torch.cat([rank.served.buffer for rank in self.ranks]))
        self.transport.traffic.add((self.layout.world_size - 1) * self.served.buffer.nbytes)

    def share_part(self) -> None:
        all_of_them = [rank.squares for rank in self.ranks if rank.squares is not None]
        sent = torch.stack([squares.sent.buffer for squares in all_of_them])
        for number, squares in enumerate(all_of_them):
            squares.average(squares.sent.like(sent[:, number]))
        served = torch.cat([squares.served.buffer for squares in all_of_them])
        for squares in all_of_them:
            squares.hear(served)
            del squares.sent
        self.transport.traffic.add((self.layout.world_size - 1) * (sent[0, 0].nbytes + served[0].nbytes))

    def renew_part(self, unit: Unit, v: Preconditioner, writes: bool = True) -> None:
        scale = self.scale.clone()  # of the result, which all have
        for rank in reversed(self.ranks):
            self.scale.copy_(scale)
            CompressedAllReduce.renew_part(rank, unit, v, writes and rank is self)

    def set_live(self, live: LiveTable) -> None:
        super().set_live(live)
        for rank in self.ranks[1:]:
            rank.set_live(live)

    def take_residuals(self, out: Tensor) -> None:
        chunk, total = self.layout.chunk_numel, torch.zeros_like(out)
        for number, rank in enumerate(self.ranks):
            rank.settle()
            torch.mul(rank.worker.values(), 1.0 / self.layout.world_size, out=out)
            out[number * chunk : (number + 1) * chunk] += rank.server.values()
            total = total + out if number else out.clone()
            for side in (rank.worker, rank.server):
                side.forget()
        out.copy_(total)
        self.transport.traffic.add(2 * out.nbytes * (self.layout.world_size - 1) // self.layout.world_size)


class BatchedRounds(BitRounds):
    """All workers' rounds: in local steps each moves parameters, momentum and residual of its own.

    Attributes:
        others: Parameters, momentum and variance of each worker but this one, whose optimizer it is.
    """

    def stand_for(self, others: Sequence[Sequence[Tensor]]) -> None:
        """Move the ``others``' parameters as well, each worker's in this one's order."""
        self.others = []
        m, v = self.moments.exp_avg, self.moments.exp_avg_sq
        for params in others:
            self.others.append((list(params), torch.zeros_like(m), torch.zeros_like(v) if self.owns else v))

    @property
    def ranks(self) -> Sequence[WorkerAllReduce]:
        """Return all workers' reducers."""
        assert isinstance(self.exchange.reducer, BatchedAllReduce)
        return self.exchange.reducer.ranks

    def add(self, grads: Sequence[Tensor], coef: Tensor, hold: Tensor | None, moves: bool, last: bool) -> None:
        moments = self.moments
        mine = self.frame.parameters.dense, moments.exp_avg, moments.exp_avg_sq
        if self.round.local == 0 and not self.owns:  # all have the same when a round begins
            for _, exp_avg, _ in self.others:
                exp_avg.copy_(moments.exp_avg)
        anchor = self.keeps_in(moves, last)
        how = self.decay_in_update, self.owns
        step = LocalStep(self.bits.floored, self.options.numerics.precondition, moves, last, *how)
        hold = self.reducer.verdict.none if hold is None else hold
        for rank, (params, exp_avg, v) in zip(self.ranks, [mine, *self.others], strict=True):
            worker = rank.worker
            whose = (params, rank.gradients, self.frame.places, exp_avg, v, worker.compensated, worker.scale)
            kept = anchor if rank is self.exchange.reducer else None
            local_step(*whose, coef, step, hold, kept, self.pending)


class BatchedSharedRounds(BatchedRounds, SharedRounds):
    """The same where workers share a variance."""


class BatchedOwnRounds(BatchedRounds, OwnRounds):
    """The same where each worker has a variance of its own."""

    def follow(self, grads: Sequence[Tensor], factor: Tensor | None) -> None:
        variances = [self.moments.exp_avg_sq, *(exp_avg_sq for *_, exp_avg_sq in self.others)]
        told = torch.zeros(())
        for rank, exp_avg_sq in zip(self.ranks, variances, strict=True):
            told = told + self.own.tell(rank.gradients, factor, exp_avg_sq)
        mean = told / len(variances)  # an all-reduce multiplies it again
        self.own.follow(mean, self.exchange.reducer.flags, self.frame.absent)


class BatchedLocalAdam(LocalAdam):
    """All workers' 0/1 Adam."""

    rounds: BatchedRounds

    def make_rounds(self, of_rounds: dict[str, Any]) -> BatchedRounds:
        return BatchedSharedRounds(**of_rounds) if self.own is None else BatchedOwnRounds(self.own, **of_rounds)

    def after_step(self) -> None:
        """Give all workers the parameters that they have in common when a round has ended."""
        if self.round.local == 0:
            for params, *_ in self.rounds.others:
                torch._foreach_copy_(params, self.frame.parameters.dense)


class BatchedZeroOneAdam(ZeroOneAdam):
    """All workers' 0/1 Adam."""

    kind = BatchedLocalAdam
    algorithm: BatchedLocalAdam


def batch_workers(optimizer: torch.optim.Optimizer, others: Sequence[Sequence[Tensor]] = ()) -> TakesGradients | None:
    """Let an optimizer over an ``AlikeTransport`` stand for all of its workers.

    Args:
        optimizer: Rank 0's, just made.
        others: The other workers' parameters, which follow where workers have their own.

    Returns:
        What takes their gradients; None where the optimizer averages them: then their mean is all it needs.
    """
    if isinstance(optimizer, Rival):
        optimizer.stand_for(others)
        return optimizer
    if isinstance(optimizer, OnAverages):
        return optimizer.averages
    algorithm = optimizer.algorithm if isinstance(optimizer, DistributedOptimizer) else None
    if isinstance(algorithm, BatchedMuon):
        assert isinstance(algorithm.exchange, BatchedExchange)
        return algorithm.exchange.reducer
    if not isinstance(algorithm, (TwoStage, BatchedLocalAdam)):
        return None
    numerics = algorithm.options.numerics
    kinds: dict[str, Any] = {"scale_norm": numerics.scale_norm, "scale_scope": numerics.scale_scope}
    kinds |= {"ternary": numerics.ternary} if isinstance(algorithm, TwoStage) else {}
    exchange = algorithm.exchange
    assert exchange is not None
    assert isinstance(exchange.reducer, CompressedAllReduce)
    exchange.reducer = reducer = BatchedAllReduce(exchange.reducer, device=algorithm.frame.device, **kinds)
    if isinstance(algorithm, BatchedLocalAdam):
        algorithm.rounds.stand_for(others)
    return reducer
