"""Marsit (Wu et al., DAC 2022): one bit per parameter on every hop of a ring or torus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import MarsitAllReduce, Part, Told, Topology, Transport
from ..comm.marsit import check_topology
from ..comm.rounds import RoundAllReduce
from ..core.arguments import explaining
from ..core.optimizer import DistributedOptimizer
from ..core.options import check_count, is_number
from ..core.scaling import Agreed
from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Options, Params, Ranks, Wire, names_of
from ..triton_kernels import Coef, add_values, apply_momentum
from ..triton_kernels.marsit import LocalUpdate
from ..triton_kernels.nouns import Signs
from .marsit_state import LocalOptions, MarsitState


@explaining
@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Length and precision of Marsit's rounds.

    Args:
        full_precision_every: K: rounds 0, K, 2K ... are averaged in float32; 0: none is.
        local_steps: Steps of a round. In all but the last a worker moves by itself and nothing is sent; costs 4 bytes
            per parameter where it is above 1. A GradScaler's scales may differ between ranks then: an overflow in such
            a step is that worker's own affair.
        global_ratio: eta_s / eta_l: how far each coordinate goes in a 1-bit round, in units of lr (times
            ``local_steps``), so that it follows lr's schedule. As large as updates usually are, or larger: what it
            can't carry away piles up in the compensation. Groups may set it. None: 0.3 with ``MarsitSGD``, 1 with
            ``MarsitAdam`` (docs/marsit.md).
        compensation_limit: Largest compensation of a coordinate, in units of eta_s; None: without limit, the paper's,
            which lets a backlog grow that full precision then applies at once.
        rows: Of a torus; None: the most that is not above the columns.
        seed: Of the random bits; equal on all ranks.
    """

    full_precision_every: int = 100
    local_steps: int = 1
    global_ratio: float | None = None
    compensation_limit: float | None = 1.0
    rows: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        check_count("full_precision_every", self.full_precision_every)
        check_count("seed", self.seed)
        limit = self.compensation_limit
        if limit is not None and not (is_number(limit) and limit >= 0):
            raise ValueError(f"compensation_limit must be a finite number >= 0 or None, got {limit!r}")


ROUNDS = Rounds()


@dataclass(frozen=True, kw_only=True)
class MarsitOptions(LocalOptions, Rounds):
    """Settings of ``MarsitSGD``."""

    topology: Topology
    global_ratio: float = 0.3

    objects: ClassVar[dict[str, Any]] = {**LocalOptions.objects, "rounds": Rounds}
    takes: ClassVar[frozenset[str]] = LocalOptions.takes | names_of(Rounds) | {"hierarchy", "hierarchy_dtype"}
    grouped: ClassVar[tuple[str, ...]] = ("global_ratio", *LocalOptions.grouped)
    told: ClassVar[tuple[str, ...]] = (
        *(*LocalOptions.told, "local_steps", "topology", "rows", "full_precision_every"),
        *("compensation_limit", "seed"),
    )

    def check_group(self, group: Mapping[str, Any], name: str, world_size: int) -> None:
        super().check_group(group, name, world_size)
        check_topology(self.topology, self.rows, world_size, self.full_precision_every, self.seed)


@dataclass(frozen=True, kw_only=True)
class MarsitAdamOptions(MarsitOptions):
    """Settings of ``MarsitAdam``."""

    bias_correction: bool = True
    global_ratio: float = 1.0
    takes: ClassVar[frozenset[str]] = MarsitOptions.takes | {"bias_correction"}


class Marsit(MarsitState):
    """Marsit, Algorithm 2, with the local updates of SGD or of Adam."""

    settings: ClassVar[type[Options]] = MarsitOptions
    options: MarsitOptions
    weighs: ClassVar = 0

    def _make_reducer(self, transport: Transport, part: Part) -> RoundAllReduce:
        frame = self.frame
        names = ("topology", "rows", "full_precision_every", "compensation_limit", "seed")
        how: dict[str, Any] = {name: getattr(self.options, name) for name in names}
        return MarsitAllReduce(part.layout, transport, device=frame.device, live=frame.live, part=part, **how)

    def _step_alone(self, grads: Sequence[Tensor], agreed: Agreed, coef: Tensor) -> None:
        """x = x - u, and u into what will be agreed on."""
        self._add(self.reducer, grads, self._leaving_out(agreed.coef), self.reducer.everything, agreed, True)
        self.phase = "local"

    def _compressed_step(self, grads: Sequence[Tensor], agreed: Agreed, told: Told, coef: Tensor) -> None:
        """Take the last step of a round: Algorithm 2, which calls Algorithm 1; lines as ``fusedonebit.reference``'s."""
        reducer, several = self.reducer, self.options.local_steps > 1
        own = self._leaving_out(agreed.coef) if several else agreed.coef
        moments = [flat for flat in (self.exp_avg, self.exp_avg_sq) if flat.numel()]
        told = told._replace(changed=moments, goes=coef, steps=self.options.local_steps)

        def add(part: RoundAllReduce, chunks: slice) -> None:
            # Algorithm 1, line 1: eta_l * g, or what SGD or Adam make of g, and the compensation.
            self._add(part, grads, own, chunks, agreed)

        # Algorithm 2, line 5. Algorithm 1, lines 2 to 9: on their way from worker to worker the signs of all become
        # one sign per coordinate; line 11: in rounds of full precision the mean of all is taken. That is g_t.
        self._synchronise(add, told, coef)
        if reducer.full_precision and self._may_rest:
            reducer.keep_back(coef[:, Coef.LR] == 0.0)
        # Algorithm 2, line 6: x = x - g_t; of several local steps from the x that all had before.
        self._apply()
        # Algorithm 1, line 10: c = v - g_t is formed when v is next read; line 12: after full precision c = 0.
        self.phase = "uncompressed" if reducer.full_precision else "one-bit"
        self._end_round(reducer.full_precision)

    def _add(
        self,
        part: RoundAllReduce,
        grads: Sequence[Tensor],
        coef: Tensor,
        chunks: slice,
        agreed: Agreed,
        moves: bool = False,
    ) -> None:
        frame = self.frame
        factor = self._one if agreed.factor is None else agreed.factor
        hold = self._no_flags if agreed.hold is None else agreed.hold
        exp_avg, exp_avg_sq = (flat if flat.numel() else None for flat in (self.exp_avg, self.exp_avg_sq))
        decays = any(group["weight_decay"] for group in frame.hyper.taken)
        step = LocalUpdate(factor, decays, moves, self._kept_now if moves else None)
        part.add(frame.parameters.dense, grads, chunks, coef, exp_avg, exp_avg_sq, step, hold)

    def _apply(self) -> None:
        """Move by g_t; where no count changes the table, that launch counts."""
        frame = self.frame
        layout, reducer, several = frame.layout, self.reducer, self.options.local_steps > 1
        target, places, rounding = frame.parameters.dense, frame.places, frame.rounding
        if several:
            target, places, rounding = [self._round_start], self._flat_places, None
        if reducer.values is not None:
            values = self._going(reducer.values.view(layout.n_blocks, -1)).view(-1)
            add_values(target, places, values, False, reducer.flags, rounding)
        else:
            update, coef = Signs(reducer.bits, self._going(reducer.scale)), self._as_it_is
            counts = not several and rounding is None and not frame.coefficients.bias_correction
            counting = frame.coefficients.count(*frame.counters()) if counts else ()
            how = (reducer.flags, rounding, reducer.digest, None, *counting)
            apply_momentum(target, places, update, None, coef, *how)
        if several:  # also where the round was skipped
            add_values(frame.parameters.dense, frame.places, self._round_start, True, self._no_flags, None)

    def _going(self, by_block: Tensor) -> Tensor:
        """Return a global update [B, ...] with 0 in tensors that no worker has a gradient of."""
        frame = self.frame
        if frame.absent is None:
            return by_block
        still = frame.absent[frame.places.block_tensor]
        return torch.where(still.view(-1, *[1] * (by_block.dim() - 1)), 0.0, by_block)

    def described(self) -> list[str]:
        options = self.options
        often = f"every {options.full_precision_every} rounds" if options.full_precision_every else "never"
        return [f"topology: {options.topology}, full precision {often}", f"local_steps: {options.local_steps}"]


class AdaptiveMarsit(Marsit):
    """Marsit, with the local updates of Adam."""

    settings: ClassVar[type[Options]] = MarsitAdamOptions


class MarsitOptimizer(DistributedOptimizer):
    """What ``MarsitSGD`` and ``MarsitAdam`` tell of their compensation."""

    algorithm: Marsit

    def stats(self, layers: bool = False, *, compensation: bool = False) -> dict[str, Any]:
        """Return what all optimizers tell; with ``compensation`` also compensation_norm, for one pass over it.

        If that grows and grows, ``global_ratio`` is too small.
        """
        told = super().stats(layers)
        return told | {"compensation_norm": self.algorithm.compensation_norm()} if compensation else told

    def compensation(self, param: Tensor) -> Tensor:
        """Return this rank's compensation c of one parameter, float32 of its shape; zeros after full precision."""
        return self.algorithm.compensation(param)


class MarsitSGD(MarsitOptimizer):
    r"""SGD with momentum whose workers agree at one bit per parameter on every hop (Marsit, Algorithm 2).

    Each worker makes its own update, adds what earlier rounds owe it, and sends the signs; on its way
    round the ring every bit stays one bit. All take the same step, and keep the difference:

    .. math::
        m = \mu m + g + \lambda x, \quad v = \eta_l m + c, \quad
        g_t = \eta_s \left(\mathrm{sgn}(v^{(1)}) \odot \cdots \odot \mathrm{sgn}(v^{(M)})\right), \quad
        x \leftarrow x - g_t, \quad c = v - g_t

    where each bit of the result is that of one worker, each with probability 1/M. Every
    ``full_precision_every`` rounds g_t is the mean of all v in float32 instead, and c = 0. Momentum and
    compensation are this worker's own: each rank saves and loads its own checkpoint. Do not average
    gradients yourself: give the optimizer local ones; with DDP call ``fusedonebit.ddp.attach``. After
    every round parameters are bit-identical on all ranks. A bit has no zero: coordinates without a
    gradient go forth and back by eta_s, unless a ``mask`` keeps them still.

    Args:
        params, process_group, numerics, wire, faults: As for ``OneBitAdam``; groups may set lr, momentum, weight_decay,
            global_ratio, maximize.
        lr: eta_l, the local stepsize; a number or a tensor of one element.
        momentum: mu. 0 needs no buffer.
        weight_decay: lambda, added to the gradient as in ``torch.optim.SGD``.
        topology: "ring": 2(M - 1) hops. "torus": rows and columns, fewer hops. "owner": no hops and half the
            bytes: whose bit counts is drawn beforehand, alike on all ranks, and one all-gather
            brings those bits. Which is the fastest depends on the network; docs/performance.md tells how to choose.
        rounds: How often they agree in full precision, how far a coordinate goes, local steps ...; see ``Rounds``.
        max_grad_norm: Clip gradients to this global norm; None: don't. With one local step one factor for all
            ranks, from the mean of their norms; in steps between rounds each worker by its own.

    Example::

        optimizer = MarsitSGD(model.parameters(), lr=0.1, topology="ring")
        loss.backward()
        optimizer.step()
    """

    kind = Marsit

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        topology: Topology = "ring",
        rounds: Rounds = ROUNDS,
        max_grad_norm: float | None = None,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        super().__init__(params, defaults, **shared, topology=topology, rounds=rounds, max_grad_norm=max_grad_norm)


class MarsitAdam(MarsitOptimizer):
    r"""AdamW whose workers agree at one bit per parameter on every hop; see ``MarsitSGD``.

    Moments are this worker's own, of its own gradients; what is agreed on is the update
    :math:`\eta_l (\hat m / (\sqrt{\hat v} + \epsilon) + \lambda x)` (Marsit's run on IMDb).

    Args:
        params, topology, rounds, max_grad_norm, process_group, numerics, wire, faults: As for ``MarsitSGD``.
        lr, betas, eps, weight_decay: As for ``OneBitAdam``, but eps > 0; groups may set them, global_ratio and
            maximize.
    """

    kind = AdaptiveMarsit

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        topology: Topology = "ring",
        rounds: Rounds = ROUNDS,
        max_grad_norm: float | None = None,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        super().__init__(params, defaults, **shared, topology=topology, rounds=rounds, max_grad_norm=max_grad_norm)
