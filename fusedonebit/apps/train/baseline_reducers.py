"""Agrees as Marsit's baselines do (its table 2), on the same rings and with a real wire.

    MajorityVote   signSGD (Bernstein et al., 2018): the sign of the sum of the signs; a tie is +1, as sgn(0) is
    ErrorFeedback  EF-signSGD (Karimireddy et al., 2019): the mean of scaled signs; each worker keeps its error
    StochasticSign SSDM (Safaryan & Richtarik, 2021): the mean of random signs
    Cascading      random signs, recovered, added to and compressed again at every hop: one bit, and what fails

PSGD is ``MarsitAllReduce`` with ``full_precision_every=1``. The first three sum signs from hop to hop, so
that numbers grow: after j workers a sum has one of j + 1 values, which takes ceil(log2(j + 1)) bits
(at most ceil(log2 M) + 1), or, as in the paper's experiments, Elias' gamma code.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...comm.message import StepContext
from ...comm.rounds import Prepare, RoundAllReduce
from ...comm.transport import Transport
from ...ring_topology import Hop, Stage, Topology, stages
from ...triton_kernels import FlatLayout
from .elias import decode_fixed, decode_gamma, encode_fixed, encode_gamma, pack_bits, unpack_bits

Coding = Literal["elias", "fixed"]


class HopBaseline(RoundAllReduce):
    """Skeleton: a subclass makes the global update, and what a worker keeps, of all workers' vectors.

    Beside what ``RoundAllReduce`` takes (``where``: ``device`` and ``live``) it has a topology, "ring" or "torus", a
    coding of sums of signs on the wire, "elias" or "fixed" width, and a seed of random signs.
    """

    def __init__(
        self,
        layout: FlatLayout,
        transport: Transport | None = None,
        *,
        topology: Topology = "ring",
        coding: Coding = "elias",
        seed: int = 0,
        **where: Any,
    ) -> None:
        super().__init__(layout, transport, **where)
        self.coding, self.seed = coding, seed
        self._stages = stages(topology, layout.world_size, self.transport.rank)

    def _round(self, prepare: Prepare, context: StepContext) -> tuple[Tensor, Tensor]:
        prepare(self.everything)
        words, own = self._gather_headers()
        update, kept = self._aggregate(self.compensation.whole, self._step_of(context))
        self.values = update * self.part.live(self.live).mask()
        self.compensation.whole.copy_(torch.where(self._is_taken(words, own, context), kept, self.compensation.whole))
        return words, own

    def _aggregate(self, v: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return the global update and what this worker keeps, float32 [P] each, of v [P] and eta_s float32 [B]."""
        raise NotImplementedError

    def _generator(self) -> torch.Generator:
        """Return what this worker draws its random numbers of this round from."""
        seed = (self.seed * 1_000_003 + self.schedule.rounds) * 4099 + self.transport.rank
        return torch.Generator(self.device).manual_seed(seed % 2**63)

    # ---------------------------------------------------------------- sums of signs, from hop to hop

    def _sum_of_signs(self, positive: Tensor) -> Tensor:
        """Return the sum over the workers of +1 where ``positive`` bool [P], else -1: int64 [P], equal on all ranks."""
        counts, world_size = self._reduce_counts(positive), self.layout.world_size
        for stage in reversed(self._stages):
            for hop in stage.gather():
                self._pass_on(counts, hop, stage, world_size)
        return 2 * counts.view(-1) - world_size

    def _majority(self, positive: Tensor) -> Tensor:
        """Tell whether at least half of the workers have +1, bool [P], equal on all ranks; told in one bit."""
        most = 2 * self._reduce_counts(positive) >= self.layout.world_size
        for stage in reversed(self._stages):
            for hop in stage.gather():
                received = self._swap(pack_bits(most[hop.sent].view(-1)), stage)
                most[hop.received] = unpack_bits(received).view_as(most[hop.received])
        return most.view(-1)

    def _reduce_counts(self, positive: Tensor) -> Tensor:
        """Return how many workers have +1, int64 [M, P / M]; complete where this worker's reduction ends."""
        counts, workers = positive.to(torch.int64).view(self.layout.world_size, -1), 1
        for stage in self._stages:
            for position, hop in enumerate(stage.reduce()):
                own = counts[hop.received].clone()
                self._pass_on(counts, hop, stage, workers * (position + 1))
                counts[hop.received] += own
            workers *= stage.size
        return counts

    def _pass_on(self, counts: Tensor, hop: Hop, stage: Stage, workers: int) -> None:
        """Send how many of ``workers`` signs were +1, and write down what arrives."""
        sent, middle = counts[hop.sent].view(-1), workers // 2
        if self.coding == "fixed":
            width = workers.bit_length()
            arrived = decode_fixed(self._swap(encode_fixed(sent, width), stage), width, len(sent))
        else:  # sums lie around zero: 0, 1, -1, 2, ... become 1, 2, 3, 4, ...
            off = sent - middle
            code = encode_gamma(torch.where(off > 0, 2 * off, 1 - 2 * off))
            coming = self._swap(torch.tensor([code.numel()], device=self.device), stage)  # lengths go ahead
            numbers = decode_gamma(self._swap(code, stage, int(coming)), len(sent))
            arrived = middle + torch.where(numbers % 2 == 0, numbers // 2, -(numbers // 2))
        counts[hop.received] = arrived.view_as(counts[hop.received])

    def _swap(self, message: Tensor, stage: Stage, coming: int | None = None) -> Tensor:
        """Send a message to the next worker; return the previous one's, of the same length unless one is told."""
        arrived = torch.empty_like(message) if coming is None else message.new_empty(coming)
        self.transport.exchange(arrived, stage.previous, message, stage.next).wait()
        return arrived


class MajorityVote(HopBaseline):
    """signSGD with majority vote: eta_s times the sign that most workers have; nothing is kept."""

    def _aggregate(self, v: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        update = torch.where(self._majority(v >= 0), 1.0, -1.0) * step.repeat_interleave(self.layout.block_size)
        return update, torch.zeros_like(v)


class ErrorFeedback(HopBaseline):
    """EF-signSGD: the mean of s*sign(v), s the workers' mean of the mean of abs(v), one for each tensor.

    That all have one s, by an all-reduce of a number for each tensor, keeps sums of signs whole numbers.
    """

    def _aggregate(self, v: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        blocks = self.places.block_tensor.long()
        sums = torch.zeros(max(1, len(self.layout.sizes)), device=self.device)
        sums.index_add_(0, blocks, v.abs().view(self.layout.n_blocks, -1).sum(1))
        count = torch.zeros_like(sums).index_add_(0, blocks, self.live.numel.float())
        scale = sums / count.clamp(min=1)
        self.transport.all_reduce(scale)
        s = (scale / self.layout.world_size)[blocks].repeat_interleave(self.layout.block_size)
        positive = v >= 0
        mean = self._sum_of_signs(positive) / self.layout.world_size
        return s * mean, (v - torch.where(positive, s, -s)) * self.part.live(self.live).mask()


class StochasticSign(HopBaseline):
    """SSDM: eta_s times the mean of random signs, +1 with probability 1/2 + v/(2|v|) (appendix A); nothing is kept."""

    def _aggregate(self, v: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        mean = self._sum_of_signs(stochastic_sign(v, self._generator())) / self.layout.world_size
        return mean * step.repeat_interleave(self.layout.block_size), torch.zeros_like(v)


class Cascading(HopBaseline):
    """Cascading compression (section 3.2): Q(... Q(Q(v1) + v2) ... + vM) / M, Q(v) = |v| times random signs.

    One bit for each element and one norm for each segment, on every hop.
    """

    def _aggregate(self, v: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        values, draw = v.view(self.layout.world_size, -1).clone(), self._generator()
        counts = self.part.live(self.live).mask().view_as(values)  # padding must not swell the norms
        message = torch.empty(0, dtype=torch.uint8, device=self.device)
        for stage in self._stages:
            message = self._compress(values[stage.first], draw)
            for hop in stage.reduce():
                arrived = self._recover(self._swap(message, stage)).view_as(values[hop.received])
                message = self._compress(arrived * counts[hop.received] + values[hop.received], draw)
            finished = self._recover(message).view_as(values[stage.finished])
            values[stage.finished] = finished * counts[stage.finished]
        messages = message.expand(self.layout.world_size, -1).clone()  # only the finished chunk's is one yet
        for stage in reversed(self._stages):
            for hop in stage.gather():
                messages[hop.received] = self._swap(messages[hop.sent], stage)
        if self._stages:
            values = torch.stack([self._recover(one) for one in messages])
        return values.view(-1) / self.layout.world_size, torch.zeros_like(v)

    def _compress(self, v: Tensor, draw: torch.Generator) -> Tensor:
        norm = v.norm().reshape(1)
        return torch.cat([norm.view(torch.uint8), pack_bits(stochastic_sign(v.view(-1), draw))])

    def _recover(self, message: Tensor) -> Tensor:
        norm = message[:4].view(torch.float32)
        return torch.where(unpack_bits(message[4:]), norm, -norm)


def stochastic_sign(v: Tensor, draw: torch.Generator) -> Tensor:
    """Draw where random signs are +1: with probability 1/2 + v/(2|v|) (appendix A); bool of v's shape."""
    norm = v.norm().clamp(min=torch.finfo(v.dtype).tiny)
    return torch.rand(v.shape, generator=draw, device=v.device) < 0.5 + v / (2 * norm)
