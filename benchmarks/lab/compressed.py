"""torch's own optimizers on averaged gradients: exactly, or at 8, 4 or 1 bits, as ``fusedonebit.compress`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedonebit.comm import Format, QuantisedAllReduce, QuantisedReduceScatter, Step, Transport
from fusedonebit.integrations.fsdp_groups import Rows
from fusedonebit.triton_kernels import FlatLayout

from .alike import AlikeTransport
from .setting import BETAS, EPS, Params, Setting, between


class Averages:
    """Puts the mean of all workers' gradients into a rank's parameters, all in one bucket.

    Args:
        params: The rank's.
        of: What the run is.
        form: How gradients travel.
    """

    def __init__(self, params: Params, of: Setting, form: Format) -> None:
        self.params, self.transport, self.number = params, of.transport, 0
        self.given: Sequence[Sequence[Tensor]] = ()
        ranks: list[Transport] = [of.transport]
        if isinstance(of.transport, AlikeTransport):  # this one stands for all
            ranks = [AlikeTransport(rank, of.transport.world_size) for rank in range(of.transport.world_size)]
        self.ranks: Sequence[Any] = [self.rank_of(each, form) for each in ranks]

    def rank_of(self, transport: Transport, form: Format) -> Any:
        """Return one rank's exchange."""
        layout = FlatLayout(tuple(p.numel() for p in self.params), transport.world_size, form.block_size)
        return QuantisedAllReduce(layout, transport, form, self.params[0].device)

    def give(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        """Take each worker's gradients by parameter, of the coming step."""
        self.given = [list(row.values()) for row in gradients]

    @torch.no_grad()
    def __call__(self) -> None:
        """Average."""
        self.number += 1
        self.transport.traffic.start_step()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.params]
        if len(self.ranks) == 1:
            self._average(grads, Step(self.number))
        else:
            self._average_all(grads, Step(self.number))
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad

    def _average(self, grads: Sequence[Tensor], step: Step) -> None:
        self.ranks[0](grads, step)

    def _sent(self, rows: Sequence[Sequence[Tensor]], step: Step) -> Tensor:
        """Return what all ranks send, uint8 [W, W, bytes], of what each has."""
        for rank, row in zip(self.ranks, rows, strict=True):
            rank.write(row, step)
        return torch.stack([rank.sent.buffer for rank in self.ranks])

    def _average_all(self, grads: Sequence[Tensor], step: Step) -> None:
        """Do what all ranks do, one after the other: bits are theirs."""
        first, sent = self.ranks[0], self._sent([[g.contiguous() for g in row] for row in self.given], step)
        for number, rank in enumerate(self.ranks):
            rank.arrived.buffer.copy_(sent[:, number])
            rank.serve(step)
        first.arrived.buffer.copy_(torch.cat([rank.served.buffer for rank in self.ranks]))
        first.receive(grads, step)
        for rank in self.ranks[1:]:
            rank.digest.copy_(first.digest)
        each = first.sent.buffer[0].nbytes + first.served.buffer.nbytes
        self.transport.traffic.add((len(self.ranks) - 1) * each)


class Sharded(Averages):
    """The same by the reduce-scatter of FSDP2, all parameters in one group; it is bytes of gradients that count."""

    def __init__(self, params: Params, of: Setting, form: Format) -> None:
        self.rows = Rows([p.shape for p in params], of.transport.world_size)
        super().__init__(params, of, form)

    def rank_of(self, transport: Transport, form: Format) -> Any:
        layout = self.rows.layout(form.block_size)
        return QuantisedReduceScatter(layout, transport, form, self.params[0].device)

    def _average(self, grads: Sequence[Tensor], step: Step) -> None:
        ranks, traffic = self.transport.world_size, self.transport.traffic
        shard, whole = torch.empty(1, self.rows.length), torch.empty(ranks, self.rows.length)
        self.ranks[0](shard[0], self.rows.join(grads), step, 1 / ranks)
        before = traffic.bytes_total
        self.transport.all_gather(whole, shard)
        traffic.add(before - traffic.bytes_total)  # FSDP2 gathers parameters, whatever gradients are
        self._give(grads, whole)

    def _average_all(self, grads: Sequence[Tensor], step: Step) -> None:
        rows = [self.rows.join(row) for row in self.given]
        sent, whole = self._sent(rows, step), torch.empty(len(rows), self.rows.length)
        for number, (rank, shard) in enumerate(zip(self.ranks, whole, strict=True)):
            rank.arrived.buffer.copy_(sent[:, number])
            rank.receive(shard, rows[number], step, 1 / len(rows))
        self.transport.traffic.add((len(rows) - 1) * sent[0, 0].nbytes)
        self._give(grads, whole)

    def _give(self, grads: Sequence[Tensor], whole: Tensor) -> None:
        for grad, mean in zip(grads, self.rows.split(list(whole)), strict=True):
            grad.copy_(mean)


class Muon(torch.optim.Optimizer):
    """torch's Muon for matrices; its AdamW for vectors, and the first and last matrix, where embeddings and heads are.

    Kernels of convolutions are matrices of a row for each channel of the output. All have one learning rate: Muon's
    is adjusted to AdamW's.

    Args:
        params, of: What it and the run are.
        matrices: Which parameters Muon trains; None: those ``between``.
    """

    def __init__(self, params: Params, of: Setting, matrices: Sequence[int] | None = None) -> None:
        params, trained = list(params), set(between(params) if matrices is None else matrices)
        own: dict[str, Any] = {"lr": of.lr, "weight_decay": of.weight_decay}
        self._matrices = [(p, torch.nn.Parameter(p.detach().flatten(1))) for i, p in enumerate(params) if i in trained]
        rest = [p for i, p in enumerate(params) if i not in trained]
        views = [view for _, view in self._matrices]
        self._parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, betas=BETAS, eps=EPS, **own)]
        if views:
            self._parts.append(torch.optim.Muon(views, adjust_lr_fn="match_rms_adamw", **own))
        groups = [group for part in self._parts for group in part.param_groups]
        super().__init__(groups, own)
        self.param_groups = groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all."""
        for p, view in self._matrices:
            view.grad = None if p.grad is None else p.grad.flatten(1)
        for part in self._parts:
            part.step()
        return None


def _sgd(params: Params, of: Setting) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, of.lr, momentum=0.9, weight_decay=of.weight_decay)


def _adamw(params: Params, of: Setting) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, of.lr, BETAS, EPS, of.weight_decay)


class OnAverages(torch.optim.Optimizer):
    """One of torch's optimizers, which gets averages.

    Args:
        params, of: What it and the run are.
        base: "adamw", "sgd" or "muon".
        bits, feedback: As of ``fusedonebit.compress``; 32 bits are averaged exactly.
        sharded: Whether by FSDP2's reduce-scatter.

    Attributes:
        averages: What takes gradients to compress; None where they are averaged exactly.
    """

    def __init__(
        self, params: Params, of: Setting, base: str, bits: int = 32, feedback: str | None = None, sharded: bool = False
    ) -> None:
        self._params, self._transport = params, of.transport
        kind = Sharded if sharded else Averages
        self.averages = None if bits == 32 else kind(params, of, Format(bits, feedback))
        self._base = {"adamw": _adamw, "sgd": _sgd, "muon": Muon}[base](params, of)
        super().__init__(self._base.param_groups, self._base.defaults)
        self.param_groups = self._base.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average gradients, then update."""
        if self.averages is not None:
            self.averages()
        else:
            self._average()
        return self._base.step(closure)

    def _average(self) -> None:
        self._transport.traffic.start_step()
        for p in self._params:
            if p.grad is not None:
                p.grad = p.grad.clone()
                self._transport.all_reduce(p.grad)
                p.grad /= self._transport.world_size
