"""Marsit (Wu et al., DAC 2022): one bit per parameter on every hop of a ring or torus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import MarsitAllReduce, Topology, Transport
from ..comm.marsit import check_topology
from ..comm.ring_topology import TOPOLOGIES
from ..core.options import check_choice, check_count
from ..triton_kernels import FlatLayout, LiveTable
from .rounds import RoundOptimizer, RoundOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

GLOBAL_RATIO = {"sgd": 0.3, "adam": 1.0}
"""Defaults of eta_s / eta_l; see docs/marsit.md."""


@dataclass(frozen=True, kw_only=True)
class MarsitOptions(RoundOptions):
    """Settings of Marsit. See ``MarsitSGD`` for their meaning."""

    topology: Topology
    rows: int | None
    full_precision_every: int
    compensation_limit: float | None
    seed: int

    def check(self) -> None:
        """Raises ValueError for the first setting that makes no sense."""
        super().check()
        # Which torus there is depends on the world size, which is looked at when buffers are made.
        check_choice("topology", self.topology, TOPOLOGIES)
        check_count("full_precision_every", self.full_precision_every)
        check_count("seed", self.seed)
        limit = self.compensation_limit
        is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if limit is not None and not (is_number and 0 <= limit < inf):
            raise ValueError(f"compensation_limit must be a finite number >= 0 or None, got {limit!r}")


class MarsitOptimizer(RoundOptimizer):
    """What ``MarsitSGD`` and ``MarsitAdam`` share: all but the local update."""

    options: MarsitOptions

    def check_group(self, group: dict[str, Any], name: str = "") -> None:
        super().check_group(group, name)
        options, world_size = self.options, self.transport.world_size
        check_topology(options.topology, options.rows, world_size, options.full_precision_every, options.seed)

    def _make_reduce(self, layout: FlatLayout, transport: Transport, live: LiveTable) -> MarsitAllReduce:
        options = self.options
        return MarsitAllReduce(
            layout,
            transport,
            device=self.device,
            live=live,
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
        params: Parameters or groups of them, as for ``torch.optim.SGD``; float32, bfloat16 or float16;
            equal on all ranks. Groups may set lr, momentum, weight_decay, global_ratio, maximize.
        lr: eta_l, the local stepsize; a number or a tensor of one element.
        momentum: mu. 0 needs no buffer.
        weight_decay: lambda, added to the gradient as in ``torch.optim.SGD``.
        global_ratio: eta_s / eta_l: how far each coordinate goes in a 1-bit round, in units of lr (times
            ``local_steps``), so that it follows lr's schedule. As large as updates usually are, or
            larger: what it can't carry away piles up in the compensation.
        topology: "ring": 2(M - 1) hops. "torus": rows and columns, fewer hops. "owner": no hops and half the
            bytes: whose bit counts is drawn beforehand, alike on all ranks, and one all-gather
            brings those bits. ``fusedonebit.apps.plan.choose_topology`` estimates which is the fastest.
        rows: Of a torus; None: the most that is not above the columns.
        full_precision_every: K: rounds 0, K, 2K ... are averaged in float32; 0: none is.
        compensation_limit: Largest compensation of a coordinate, in units of eta_s; None: without limit, the
            paper's, which lets a backlog grow that full precision then applies at once.
        local_steps: Steps of a round. In all but the last a worker moves by itself and nothing is sent;
            costs 4 bytes per parameter where it is above 1. A GradScaler's scales may differ between ranks then:
            an overflow in such a step is that worker's own affair.
        seed: Of the random bits; equal on all ranks.
        maximize: Ascend instead of descend.
        mask: For some parameters a bool tensor of their shape; where False nothing ever moves.
        nonfinite: A NaN or Inf update on any rank: all ranks ``"skip"`` the round, or ``"raise"``. What workers
            have is kept as compensation, but for elements that are not finite.
        max_grad_norm: Clip gradients to this global norm; None: don't. With one local step one factor for all
            ranks, from the mean of their norms; in steps between rounds each worker by its own.
        master_weights: Keep float32 copies of 16-bit parameters that updates go to; see ``OneBitAdam``.
        broadcast_parameters: Start from rank 0's values instead of demanding equal ones.
        block_size: Elements per block of the layout; None chooses.
        stochastic_rounding: Of bfloat16 parameters; see ``OneBitAdam``. Not with several local steps.
        process_group: Ranks to agree with; None is the default group, or only this process. Or a
            ``fusedonebit.comm.Transport``.
        mesh: The same as a ``DeviceMesh`` of one dimension.
        hierarchy: A ``DeviceMesh`` of two dimensions, between nodes and inside one, or those two groups: gradients
            are averaged inside a node, and workers, of which ``topology`` speaks, are nodes (``comm.hierarchical``).
        hierarchy_dtype: In which gradients travel inside a node: ``torch.float32``, or ``torch.bfloat16``.

    Raises:
        TypeError, ValueError: for bad arguments, on every rank, naming the first that differs.

    Example::

        optimizer = MarsitSGD(model.parameters(), lr=0.1, topology="ring")
        loss.backward()
        optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        global_ratio: float = GLOBAL_RATIO["sgd"],
        topology: Topology = "ring",
        rows: int | None = None,
        full_precision_every: int = 100,
        compensation_limit: float | None = 1.0,
        local_steps: int = 1,
        seed: int = 0,
        maximize: bool = False,
        mask: Mapping[Tensor, Tensor] | None = None,
        nonfinite: Literal["skip", "raise"] = "skip",
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        broadcast_parameters: bool = False,
        block_size: int | None = None,
        stochastic_rounding: bool = False,
        process_group: dist.ProcessGroup | Transport | None = None,
        mesh: DeviceMesh | None = None,
        hierarchy: DeviceMesh | tuple[Any, Any] | None = None,
        hierarchy_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "global_ratio": global_ratio}
        options = MarsitOptions(
            bias_correction=False,
            eps_inside_sqrt=False,
            nonfinite=nonfinite,
            block_size=block_size,
            max_grad_norm=max_grad_norm,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            hierarchy_dtype=hierarchy_dtype,
            local_steps=local_steps,
            topology=topology,
            rows=rows,
            full_precision_every=full_precision_every,
            compensation_limit=compensation_limit,
            seed=seed,
        )
        super().__init__(
            params,
            defaults | {"maximize": maximize},
            options,
            process_group=process_group,
            mesh=mesh,
            hierarchy=hierarchy,
            mask=mask,
            broadcast_parameters=broadcast_parameters,
        )


class MarsitAdam(MarsitOptimizer):
    r"""AdamW whose workers agree at one bit per parameter on every hop; see ``MarsitSGD``.

    Moments are this worker's own, of its own gradients; what is agreed on is the update
    :math:`\eta_l (\hat m / (\sqrt{\hat v} + \epsilon) + \lambda x)` (Marsit's run on IMDb).

    Args:
        params: As for ``MarsitSGD``; groups may set lr, betas, eps, weight_decay, global_ratio, maximize.
        lr: eta_l.
        betas: Decay of the momentum and of the variance.
        eps: Added to the root of the variance; > 0.
        weight_decay: Decoupled, as in AdamW.
        global_ratio: eta_s / eta_l; see ``MarsitSGD``.
        bias_correction: Adam's.
        topology, rows, full_precision_every, compensation_limit, local_steps, seed: As for ``MarsitSGD``.
        maximize, mask, nonfinite, max_grad_norm, master_weights, broadcast_parameters: As for ``MarsitSGD``.
        block_size, stochastic_rounding, process_group, mesh, hierarchy, hierarchy_dtype: As for ``MarsitSGD``.

    Raises:
        TypeError, ValueError: for bad arguments, on every rank, naming the first that differs.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        global_ratio: float = GLOBAL_RATIO["adam"],
        topology: Topology = "ring",
        rows: int | None = None,
        full_precision_every: int = 100,
        compensation_limit: float | None = 1.0,
        local_steps: int = 1,
        seed: int = 0,
        bias_correction: bool = True,
        maximize: bool = False,
        mask: Mapping[Tensor, Tensor] | None = None,
        nonfinite: Literal["skip", "raise"] = "skip",
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        broadcast_parameters: bool = False,
        block_size: int | None = None,
        stochastic_rounding: bool = False,
        process_group: dist.ProcessGroup | Transport | None = None,
        mesh: DeviceMesh | None = None,
        hierarchy: DeviceMesh | tuple[Any, Any] | None = None,
        hierarchy_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "global_ratio": global_ratio}
        options = MarsitOptions(
            bias_correction=bias_correction,
            eps_inside_sqrt=False,
            nonfinite=nonfinite,
            block_size=block_size,
            max_grad_norm=max_grad_norm,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            hierarchy_dtype=hierarchy_dtype,
            local_steps=local_steps,
            topology=topology,
            rows=rows,
            full_precision_every=full_precision_every,
            compensation_limit=compensation_limit,
            seed=seed,
        )
        super().__init__(
            params,
            defaults | {"maximize": maximize},
            options,
            process_group=process_group,
            mesh=mesh,
            hierarchy=hierarchy,
            mask=mask,
            broadcast_parameters=broadcast_parameters,
        )
