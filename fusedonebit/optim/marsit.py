"""Marsit (Wu et al., DAC 2022): one bit per parameter on every hop of a ring or torus."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..comm import Topology
from ..core.optimizer import DistributedOptimizer
from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Params, Ranks, Wire
from .marsit_algorithm import AdaptiveMarsit, Marsit
from .marsit_options import ROUNDS, Rounds


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
