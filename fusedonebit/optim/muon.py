"""1-bit Muon: gradients travel to each matrix's owner, which orthogonalises their momentum; signs travel back.

``fusedonebit.reference`` has it line by line. Where EF21 (arXiv 2607.29674) keeps a tracker of each worker's momentum,
workers here add to gradients what was lost of earlier ones, before any momentum: that takes most of the noise away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..comm import StepContext
from ..comm.owned_signs import OwnedSigns
from ..comm.owners import Batch
from ..comm.reducer import Compress
from ..core.algorithm import Algorithm
from ..core.exchange import Exchange
from ..core.frame import Frame
from ..core.members import Members
from ..core.optimizer import DistributedOptimizer
from ..core.options import averaged
from ..core.resolved import Options
from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Params, Ranks, Wire
from ..core.stage import Stage
from ..core.state_tensor import StateTensor
from ..core.traits import Traits
from ..triton_kernels import apply_momentum
from ..triton_kernels.gradient_scaling import SQUARES
from ..triton_kernels.nouns import Divisor, Signs
from .averaging import Averaged, Update
from .orthogonal import Coefficients, Matrices, MuonUpdate, by_block, orthogonalised
from .rest import Rest
from .whitening import Whitening

COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
"""torch.optim.Muon's."""
LEAD = 0.1
"""How much of the direction is the newest gradient, where it arrives at a bit: twice as much as at momentum 0.95
otherwise, since error feedback delays gradients, which costs more than noise does."""


@dataclass(frozen=True, kw_only=True)
class MuonOptions(Options):
    """Settings of Muon. See ``OneBitMuon`` for their meaning."""

    nesterov: bool
    ns_coefficients: Coefficients
    ns_steps: int
    ns_dtype: torch.dtype
    ns_eps: float
    adjust_lr_fn: Literal["original", "match_rms_adamw"]
    takes: ClassVar[frozenset[str]] = Options.takes - {"bias_correction", "eps_inside_sqrt", "capturable"}
    usual: ClassVar[dict[str, Any]] = {"bias_correction": True}
    recorded: ClassVar[tuple[str, ...]] = (*Options.recorded, "nesterov", "ns_steps", "ns_dtype", "adjust_lr_fn")

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        super().check()


class Muon(Algorithm):
    """1-bit Muon: bits from the first step on; a rank alone has nobody to send them to, and is torch's Muon."""

    traits: ClassVar = Traits(MuonOptions, {"one-bit": True}, continues=False, shards=False, corrects=True)
    options: MuonOptions

    @classmethod
    def check(cls, frame: Frame) -> None:
        """Raise ValueError for parameters that are no matrices."""
        super().check(frame)
        plist = frame.parameters
        for p, name, group in zip(plist.params, plist.called, plist.group_of, strict=True):
            if not averaged(frame.groups[group]) and (p.dim() < 2 or p.numel() < 2):
                raise ValueError(
                    f"parameters of {frame.name} must be matrices, but {name} has shape {tuple(p.shape)}: put vectors, "
                    'and the first and the last layer, into a group with algorithm="adamw"'
                )

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        options, plist = self.options, frame.parameters
        count = sum(not averaged(frame.groups[group]) for group in plist.group_of)
        members = Members(frame, range(count))
        matrices = Matrices.of(members, frame, options.adjust_lr_fn)
        self.rest = Rest(frame, Members(frame, range(count, len(plist)))) if count < len(plist) else None
        how = {"coefficients": options.ns_coefficients, "steps": options.ns_steps, "eps": options.ns_eps}
        orthogonalise = partial(orthogonalised, **how, dtype=options.ns_dtype)
        momentum = self._momentum()
        newest = 1 - momentum if options.nesterov else 0.0
        rest = () if self.rest is None else (self.rest,)
        if frame.ranks.transport.world_size == 1:
            update = MuonUpdate(frame, matrices, (momentum, newest), orthogonalise)
            self._stage: Stage = Averaged(frame, Both((update, *rest)))
            self.parts = (update, *rest, self._stage)
        else:
            shares = momentum, max(LEAD, newest) if options.nesterov else 0.0
            self.exchange = OwnedExchange(frame, matrices, shares, orthogonalise)
            self._stage = OneBit(frame, self.exchange, self.rest)
            self.parts = (self.exchange, *rest, self._stage)

    def _momentum(self) -> float:
        """Return that of all groups of matrices."""
        return next((group["momentum"] for group in self.frame.groups if not averaged(group)), 0.0)

    @property
    def stage(self) -> Stage:
        return self._stage

    def check_group(self, group: Mapping[str, Any], where: str) -> None:
        """Raise ValueError if a group's momentum is not the others'."""
        if not averaged(group) and group["momentum"] != (first := self._momentum()):
            raise ValueError(f"momentum must be the same in all groups, {first}, got {group['momentum']}{where}")

    def check_growth(self) -> None:
        if self.frame.steps.outcomes.attempts:
            raise RuntimeError("add_param_group must be called before the first step; construct a new optimizer")

    def momentum(self, param: Tensor) -> Tensor:
        return self.value_of("momentum_buffer", self.frame.index(param)).to(torch.float32, copy=True)


class Both(NamedTuple):
    """Updates matrices, then the rest."""

    updates: tuple[Update, ...]

    def __call__(self, *step: Any) -> None:
        """Make each update, as ``averaging.Update``."""
        for update in self.updates:
            update(*step)


class OneBit(Stage):
    """A step: workers compress, owners average and orthogonalise, and all move by signs; the rest by AdamW.

    Args:
        frame: Of the optimizer.
        exchange: With the owners.
        rest: What is averaged as it is; None: nothing.
    """

    weighs = SQUARES
    exchange: OwnedExchange

    def __init__(self, frame: Frame, exchange: OwnedExchange, rest: Rest | None) -> None:
        super().__init__(frame)
        self.exchange, self._rest = exchange, rest
        self.renews = rest is None

    def step(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        frame, exchange, agreed = self.frame, self.exchange, self.agree(grads, coef)
        members, context = exchange.members, exchange.context(abort, agreed.hold)
        missing = () if abort else members.missing
        if self._rest is not None:  # first, so that matrices stay too where its gradients don't count
            flags, exchange.absent_of_rest = self._rest.average(grads, exchange.reducer.verdict.digest, abort)
            context = context._replace(pending=flags.clone())

        if exchange.whitening.due(frame.steps.count.total - 1):
            exchange.whitening.renew()
        whitened = exchange.whitening.whitened(members.of(grads))

        def compress(part: OwnedSigns) -> None:
            part.compress(whitened, members.of(agreed.coef))

        still = exchange.synchronise(compress, context._replace(missing=missing), agreed.coef)
        exchange.apply(still)
        exchange.whitening.follow()
        if self._rest is not None:
            self._rest.update(self._rest.averages.of_tensors, still, exchange.reducer.flags)
        return exchange.restore_absent()


class OwnedExchange(Exchange):
    """Exchanges matrices with their owners.

    Args:
        frame: Of the optimizer.
        matrices: Its parameters.
        shares: As of ``OwnedSigns``.
        orthogonalise: As of ``MuonUpdate``.
    """

    reducer: OwnedSigns

    def __init__(
        self, frame: Frame, matrices: Matrices, shares: tuple[float, float], orthogonalise: Callable[[Tensor], Tensor]
    ) -> None:
        def update(batches: Sequence[tuple[Batch, Tensor]]) -> None:
            directions = [direction for _, direction in batches]
            for direction, raw in zip(directions, self.whitening.back(directions), strict=True):
                direction.copy_(orthogonalise(raw))

        self.members, layout = matrices.members, matrices.members.layout
        self.compensated = torch.zeros(layout.numel, device=frame.device)
        self.whole = frame.nothing  # the momentum of all owners, while somebody saves or loads it
        self.absent_of_rest: Tensor | None = None
        with_whom = layout, matrices.shapes, frame.ranks.transport
        super().__init__(frame, OwnedSigns(*with_whom, update, shares, self.compensated, self.members.live))
        sizes = [size / max(shape) ** 0.5 for size, shape in zip(matrices.sizes, matrices.shapes, strict=True)]
        self.reducer.scale.copy_(by_block(layout, sizes))
        self.whitening = Whitening(matrices, self.reducer)

    def take_verdict(self, coef: Tensor) -> Tensor:
        frame, own, of_rest = self.frame, self.reducer.verdict.absent, self.absent_of_rest
        frame.absent = None
        if own is not None or of_rest is not None:
            frame.absent = torch.zeros(len(frame.parameters), dtype=torch.bool, device=frame.device)
            count = len(self.members.which)
            for place, found in ((frame.absent[:count], own), (frame.absent[count:], of_rest)):
                place.copy_(place if found is None else found)
        frame.late_error = self.reducer.error
        return frame.coefficients.still(coef, frame.absent)

    def apply(self, coef: Tensor, divisor: Divisor | None = None, x_squares: Tensor | None = None) -> None:
        """Move matrices by the signs of their update."""
        frame, members, reducer = self.frame, self.members, self.reducer
        verdict = reducer.verdict
        counting = frame.coefficients.count(*frame.counters()) if frame.coefficients.renews else (None, None)
        how = verdict.flags, frame.rounding, verdict.digest, None, *counting, members.correction
        moved = members.dense, members.places, Signs(reducer.bits, reducer.scale), None, members.of(coef)
        apply_momentum(*moved, *how)

    def restore_absent(self) -> Tensor:
        if self.frame.absent is not None:
            self.reducer.restore(self.members.of(self.frame.absent))
        return self.reducer.flags

    def synchronise(self, compress: Compress, context: StepContext, coef: Tensor) -> Tensor:
        self.whole = self.frame.nothing
        return super().synchronise(compress, context, coef)

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        """Return what is left of gradients, of which each rank has its own, and the momentum, once it is gathered."""
        which = self.members.which
        left = StateTensor("worker_error", "element", self.compensated, of_rank=True, members=which)
        return left, StateTensor("momentum_buffer", "element", self.whole, members=which)

    def settle(self, compressed: bool = True) -> None:
        """Form what is left, and gather the momentum from its owners; all ranks call it."""
        super().settle()
        self.whitening.end()
        with self.frame.steps.whole("a look at the momentum"):
            self.whole = self.reducer.gathered_momentum()

    def resume(self, header: Mapping[str, Any]) -> None:
        self.whole = torch.zeros_like(self.compensated)

    def resumed(self, header: Mapping[str, Any]) -> None:
        self.reducer.take_momentum(self.whole)
        self.reducer.skipped.fill_(1)  # what is left was settled
        self.whole = self.frame.nothing


class OneBitMuon(DistributedOptimizer):
    r"""Muon at a bit each way, from the first step on.

    .. math::
        c_i \leftarrow e_i + g_i, \quad \hat c_i = C(c_i), \quad e_i \leftarrow c_i - \hat c_i, \quad
        m \leftarrow \mu m + (1 - \mu) \bar{\hat c}, \quad
        x \leftarrow x - \gamma (\mathrm{sgn}(NS(a \bar{\hat c} + (1 - a) m)) / \sqrt{\max(A, B)} + \lambda x)

    Args:
        params, process_group, numerics, wire, faults: As for ``OneBitAdam``.
        lr: As torch.optim.Muon's; so are the others of its names.
        ns_dtype: In which Newton-Schulz computes.
        max_grad_norm: Clip gradients by the mean of the ranks' norms; None: don't.
    """

    kind = Muon

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        algorithm: Literal["muon", "adamw"] = "muon",
        betas: tuple[float, float] = (0.9, 0.95),
        ns_dtype: torch.dtype = torch.bfloat16,
        max_grad_norm: float | None = None,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        defaults |= {"algorithm": algorithm, "betas": betas, "eps": 1e-8}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        own = {"nesterov": nesterov, "ns_coefficients": tuple(ns_coefficients), "ns_steps": ns_steps, "ns_eps": eps}
        own |= {"ns_dtype": ns_dtype, "adjust_lr_fn": "original" if adjust_lr_fn is None else adjust_lr_fn}
        super().__init__(params, defaults, **shared, **own, max_grad_norm=max_grad_norm)
