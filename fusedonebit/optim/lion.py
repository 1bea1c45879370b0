"""Distributed Lion (Liu et al., 2024): Lion's updates are signs, so that one bit each is all there is to send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import Flag, SignVote
from ..comm.sign_vote import Aggregation
from ..core.optimizer import DistributedOptimizer
from ..core.options import check_choice
from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Options, Params, Ranks, Wire
from ..core.state.header import LINES
from ..core.state.spec import Specs, StateSpec
from ..triton_kernels import Coef, apply_momentum, lion_compress


@dataclass(frozen=True, kw_only=True)
class LionOptions(Options):
    """Settings of Lion. See ``OneBitLion`` for their meaning."""

    aggregation: Aggregation
    takes: ClassVar = Options.takes - {"bias_correction", "eps_inside_sqrt", "capturable"}
    told: ClassVar = (*Options.told, "aggregation")

    def check(self) -> None:
        """Raises ValueError for the first setting that makes no sense."""
        super().check()
        check_choice("aggregation", self.aggregation, ("majority", "mean"))


class OneBitLion(DistributedOptimizer):
    r"""Lion whose workers vote on each coordinate's direction: one bit per parameter, from the first step on.

    .. math::
        s_i = \mathrm{sgn}(\beta_1 m_i + (1 - \beta_1) g_i), \quad
        m_i \leftarrow \beta_2 m_i + (1 - \beta_2) g_i, \quad
        x \leftarrow x - \gamma (A(s_1, \cdots, s_W) + \lambda x)

    where A is the majority or the mean (distributed Lion, Algorithm 1). Momenta are each worker's own, of its own
    gradients. There is no warm-up, no variance and no residual; with one worker it is Lion. A bit has no zero:
    coordinates without a gradient toss a coin and tremble by lr, unless a ``mask`` keeps them still. Do not average
    gradients yourself: give the optimizer local ones; with DDP call ``fusedonebit.ddp.attach``. After every step
    parameters are bit-identical on all ranks. Each rank saves and loads its own checkpoint.

    Args:
        params, process_group, numerics, wire, faults: As for ``OneBitAdam``; groups have no eps.
        lr: How far each coordinate goes; a third to a tenth of AdamW's.
        betas: Weight of the momentum in the update, and its decay.
        weight_decay: Decoupled, as in AdamW; three to ten times AdamW's, as lr is smaller.
        aggregation: ``"majority"``: where votes tie, another worker's counts in each step. ``"mean"``: the mean of
            the signs, which the servers compress with error feedback; steps are smaller where workers disagree.
        max_grad_norm: Clip gradients by the mean of the ranks' norms; None: don't. Only the momentum sees that.

    Raises:
        TypeError, ValueError: for bad arguments, on every rank, naming the first that differs.
    """

    settings: ClassVar[type[Options]] = LionOptions
    options: LionOptions
    takes_shards: ClassVar = False
    kept: ClassVar[Specs] = (
        StateSpec("exp_avg", "element", "exp_avg", of_rank=True),
        StateSpec("server_error", "chunk", "reducer.server_residual", of_rank=True, when="_servers_keep"),
    )
    phases: ClassVar = {"one-bit": True}
    header_fields: ClassVar = LINES

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

    def build(self) -> None:
        super().build()
        where: dict[str, Any] = {"device": self.device, "live": self.live, "compensated": self.exp_avg}
        kind, norm, scope = self.options.aggregation, "contractive", "block"
        self.reducer = SignVote(
            self.layout, self.transport, aggregation=kind, scale_norm=norm, scale_scope=scope, **where
        )
        self._flags = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._aborted = torch.ones_like(self._flags)
        self._phase = "one-bit"

    @property
    def _servers_keep(self) -> bool:
        return self.options.aggregation == "mean"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, before the first step. Every rank must call it."""
        if self._built and self.outcomes.attempts:
            raise RuntimeError("add_param_group must be called before the first step; construct a new optimizer")
        super().add_param_group(param_group)

    @property
    def averages_gradients(self) -> bool:
        """False: workers vote with their own."""
        return False

    def _exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        layout, reducer, live = self.layout, self.reducer, self.live
        agreed = self._scaling(grads, reducer.largest_gradient)
        # Negative where the objective is maximised, as the other share of the gradient is.
        coef[:, Coef.ONE_MINUS_BETA2] *= coef[:, Coef.ONE_MINUS_BETA1].sign()
        coef = agreed.scaled(coef, Coef.ONE_MINUS_BETA2)
        where = layout.sizes, layout.block_size
        tables = self._block_tensor, live.bits, live.row

        def compress(part: SignVote) -> None:
            hold = self._aborted if abort else part.hold
            bits, flags = part.to_servers.bits, self._flags.zero_()
            lion_compress(grads, *where, self.exp_avg, coef, *tables, self.updates, hold, bits, flags)
            part.vote(self.updates)

        more = {"hold": agreed.hold, "pending": self._flags}
        reducer.synchronise(compress, self.told(abort, self._step_number, self._missing, **more))
        self._absent = reducer.absent
        self.parameters.before_update()
        update, coef = (reducer.bits, reducer.scale), self.coefficients.still(coef, self._absent)
        apply_momentum(
            self.parameters.dense, *where, *update, None, False, coef, *tables, reducer.flags, self._rounding
        )
        self.parameters.after_update()
        if self._absent is not None:
            reducer.restore(self._absent)
        return reducer.flags

    def _describe(self, flag: Flag) -> str:
        return self._say_where(self.reducer.describe())

    # ---------------------------------------------------------------- checkpoints

    def settle(self) -> None:
        self.reducer.settle()

    def plain_state(self) -> dict[str, Any]:
        return {"digests": self.reducer.digests}

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        if header.get("algorithm") != type(self).__name__:
            raise ValueError(
                f"the checkpoint must be of OneBitLion, got {header.get('algorithm', 'one of torch.optim')}"
            )
        if header.get("lines") and "exp_avg" not in header.get("names", ["exp_avg"]):
            raise ValueError(
                "the checkpoint must have exp_avg of each parameter, but a version that saved momenta as worker_error "
                "has written it; resume with that version"
            )

    def resume(self, header: Mapping[str, Any]) -> None:
        same = header["world_size"] == self.transport.world_size
        self.reducer.resume(header["digests"] if same else [0])

    def stats(self) -> dict[str, Any]:
        """What ``DistributedOptimizer.stats`` does, and wire_bytes (what only serves within a step)."""
        return super().stats() | {"wire_bytes": self.reducer.wire_bytes}

    def _described(self) -> list[str]:
        return [f"aggregation: {self.options.aggregation}"]
