"""Distributed Lion (Liu et al., 2024): Lion's updates are signs, so that one bit each is all there is to send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm.sign_vote import Aggregation, SignVote
from ..core.algorithm import Algorithm
from ..core.exchange import VoteExchange
from ..core.frame import Frame
from ..core.optimizer import DistributedOptimizer
from ..core.resolved import Options
from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Params, Ranks, Wire
from ..core.stage import Stage
from ..core.state_tensor import StateTensor
from ..core.traits import Traits
from ..triton_kernels import lion_compress


@dataclass(frozen=True, kw_only=True)
class LionOptions(Options):
    """Settings of Lion. See ``OneBitLion`` for their meaning."""

    aggregation: Aggregation
    takes: ClassVar[frozenset[str]] = Options.takes - {"bias_correction", "eps_inside_sqrt", "capturable"}
    recorded: ClassVar[tuple[str, ...]] = (*Options.recorded, "aggregation")


class Votes(Algorithm, Stage):
    """Distributed Lion: workers vote on each coordinate's direction, from momenta of their own."""

    traits: ClassVar = Traits(LionOptions, {"one-bit": True}, linear=True, continues=False, shards=False, corrects=True)
    options: LionOptions
    weighs, renews = 2, True
    exchange: VoteExchange

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self.exp_avg = torch.zeros(frame.layout.numel, device=frame.device)
        self.exchange = VoteExchange(frame, self.options.aggregation, self.exp_avg)
        self.parts = (self.exchange,)

    def check_growth(self) -> None:
        if self.frame.steps.outcomes.attempts:
            raise RuntimeError("add_param_group must be called before the first step; construct a new optimizer")

    def step(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Take a step of Algorithm 1: workers vote (lines 4 and 5), servers count (8), and all move alike (11)."""
        frame, exchange, agreed = self.frame, self.exchange, self.agree(grads, coef)

        def vote(part: SignVote) -> None:
            hold = part.verdict.hold + 1 if abort else part.verdict.hold  # without gradients m stays as well
            where = (frame.steps.updates, hold, part.to_servers.bits, part.weights, frame.ranks.transport.rank)
            lion_compress(grads, frame.places, self.exp_avg, agreed.coef, *where, part.verdict.found)

        exchange.apply(exchange.synchronise(vote, exchange.context(abort, agreed.hold), coef))
        return exchange.restore_absent()

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        return (StateTensor("exp_avg", "element", self.exp_avg, of_rank=True),)

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        if header.get("lines") and "exp_avg" not in header.get("names", ["exp_avg"]):
            but = "a version that saved momenta as worker_error has written it; resume with that version"
            raise ValueError(f"the checkpoint must have exp_avg of each parameter, but {but}")


class OneBitLion(DistributedOptimizer):
    r"""Lion whose workers vote on each coordinate's direction: one bit per parameter, from the first step on.

    .. math::
        s_i = \mathrm{sgn}(\beta_1 m_i + (1 - \beta_1) g_i), \quad
        m_i \leftarrow \beta_2 m_i + (1 - \beta_2) g_i, \quad
        x \leftarrow x - \gamma (A(s_1, \cdots, s_W) + \lambda x)

    where A is the majority or the mean (distributed Lion, Algorithm 1). Momenta are each worker's own, of its own
    gradients; each rank saves and loads its own checkpoint. There is no warm-up, no variance and no residual of
    workers; with one it is Lion. A bit has no zero: coordinates without a gradient move by lr, up or down at random,
    unless a ``mask`` keeps them still. Gradients are each rank's own, and DDP is attached, as for ``OneBitAdam``.

    Args:
        params, process_group, numerics, wire, faults: As for ``OneBitAdam``; groups have no eps.
        lr: How far each coordinate goes; a third to a tenth of AdamW's.
        betas: Weight of the momentum in the update, and its decay.
        weight_decay: Decoupled, as in AdamW; three to ten times AdamW's, as lr is smaller.
        aggregation: ``"majority"``: where votes tie, another worker's counts in each step. ``"mean"``: the mean of
            the signs, which the servers compress with error feedback; steps are smaller where workers disagree.
        max_grad_norm: Clip gradients by the mean of the ranks' norms; None: don't. The vote and the momentum see that.
    """

    kind = Votes

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        aggregation: Aggregation = "majority",
        max_grad_norm: float | None = None,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        super().__init__(params, defaults, **shared, aggregation=aggregation, max_grad_norm=max_grad_norm)
