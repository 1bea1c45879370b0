"""Marsit (Wu et al., DAC 2022): one bit per parameter on every hop of a ring or torus."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from torch import Tensor

from ..comm import MarsitAllReduce, Part, Topology, Transport
from ..comm.marsit import check_topology
from ..comm.ring_topology import TOPOLOGIES
from ..core.options import check_choice, check_count
from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Options, Params, Ranks, Wire, names_of
from .rounds import RoundOptimizer, RoundOptions


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How Marsit's workers agree, besides the topology.

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
        is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if limit is not None and not (is_number and 0 <= limit < inf):
            raise ValueError(f"compensation_limit must be a finite number >= 0 or None, got {limit!r}")


ROUNDS = Rounds()


@dataclass(frozen=True, kw_only=True)
class MarsitOptions(RoundOptions, Rounds):
    """Settings of ``MarsitSGD``."""

    topology: Topology
    global_ratio: float = 0.3

    objects: ClassVar = {**RoundOptions.objects, "rounds": Rounds}
    takes: ClassVar = RoundOptions.takes | names_of(Rounds) | {"hierarchy", "hierarchy_dtype"}
    grouped: ClassVar = ("global_ratio", *RoundOptions.grouped)
    told: ClassVar = (
        *(*RoundOptions.told, "local_steps", "topology", "rows", "full_precision_every"),
        *("compensation_limit", "seed"),
    )

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        super().check()
        # Which torus there is depends on the world size, which is looked at when buffers are made.
        check_choice("topology", self.topology, TOPOLOGIES)


@dataclass(frozen=True, kw_only=True)
class MarsitAdamOptions(MarsitOptions):
    """Settings of ``MarsitAdam``."""

    bias_correction: bool = True
    global_ratio: float = 1.0
    takes: ClassVar = MarsitOptions.takes | {"bias_correction"}


class MarsitOptimizer(RoundOptimizer):
    """What ``MarsitSGD`` and ``MarsitAdam`` share: all but the local update."""

    settings: ClassVar[type[Options]] = MarsitOptions
    options: MarsitOptions

    def check_group(self, group: dict[str, Any], name: str = "") -> None:
        super().check_group(group, name)
        options, world_size = self.options, self.transport.world_size
        check_topology(options.topology, options.rows, world_size, options.full_precision_every, options.seed)

    def _make_reduce(self, transport: Transport, part: Part) -> MarsitAllReduce:
        options = self.options
        return MarsitAllReduce(
            part.layout,
            transport,
            device=self.device,
            live=self.live,
            part=part,
            topology=options.topology,
            rows=options.rows,
            full_precision_every=options.full_precision_every,
            compensation_limit=options.compensation_limit,
            seed=options.seed,
        )

    def _described(self) -> list[str]:
        options = self.options
        often = f"every {options.full_precision_every} rounds" if options.full_precision_every else "never"
        return [
            f"topology: {options.topology}, full precision {often}",
            f"local_steps: {options.local_steps}",
        ]


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
            brings those bits. ``fusedonebit.apps.plan.choose_topology`` estimates which is the fastest.
        rounds: How often they agree in full precision, how far a coordinate goes, local steps ...; see ``Rounds``.
        max_grad_norm: Clip gradients to this global norm; None: don't. With one local step one factor for all
            ranks, from the mean of their norms; in steps between rounds each worker by its own.

    Raises:
        TypeError, ValueError: for bad arguments, on every rank, naming the first that differs.

    Example::

        optimizer = MarsitSGD(model.parameters(), lr=0.1, topology="ring")
        loss.backward()
        optimizer.step()
    """

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

    Raises:
        TypeError, ValueError: for bad arguments, on every rank, naming the first that differs.
    """

    settings: ClassVar[type[Options]] = MarsitAdamOptions

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
