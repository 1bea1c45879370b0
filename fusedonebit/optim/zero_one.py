"""0/1 Adam (Lu et al., 2022) as a plain ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.optimizer import DistributedOptimizer
from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Params, Ranks, Wire
from .local_adam import LocalAdam
from .policies import EveryStep, SyncPolicy, VariancePolicy
from .two_stage import TwoStage

WARM_UP = 16
"""Updates from averaged gradients where all workers share a variance, whatever its memory is; see docs/tried.md."""


class ZeroOneAdam(DistributedOptimizer):
    r"""Adam whose workers talk in some steps only, and then mostly in one bit per parameter.

    By default it is ``OneBitAdam``, whose variance all workers share, with a warm-up of 16 updates from averaged
    gradients (``WARM_UP``) instead of 250. Policies make it another algorithm: it works in rounds.

    With a ``sync_policy`` alone a round begins with parameters :math:`x` that are equal on all ranks. In each of its K
    steps every worker w moves by itself, as AdamW does, with a momentum and a variance of its own gradients,

    .. math::
        u_w = \frac{\hat m_w}{\sqrt{\rho \hat v_w} + \epsilon}, \quad
        x_w \leftarrow (1 - \gamma \lambda) x_w - \gamma u_w, \quad
        c_w \leftarrow (1 - \gamma \lambda) c_w + \gamma u_w

    and at its end one synchronisation averages what workers have added up, with error feedback on both sides:
    :math:`x \leftarrow (1 - \gamma \lambda)^K x -` 1-bit-allreduce(c). Nothing is averaged in full precision. By
    tensor, :math:`\rho = |\mathrm{mean}\, g|^2 / \mathrm{mean}\, |g_w|^2` brings variances to the mean gradient's
    level: workers' own are larger by their noise. It follows from some 64 numbers of each tensor that workers tell
    each other where they synchronise (``optim.own_variance``).

    With a ``variance_policy`` it is 0/1 Adam (Lu et al., 2022, Algorithm 1), whose momentum and variance are equal on
    all ranks when a round begins. Either the round renews the variance: one step of AdamW on gradients averaged in
    float32. Or its steps are workers' own with the variance that is, and momentum is rebuilt from their average:

    .. math::
        \bar u = \textrm{1-bit-allreduce}\left(\sum \frac{m_w}{\sqrt{\hat v} + \epsilon}\right), \quad
        x \leftarrow (1 - \gamma \lambda)^K x - \gamma \bar u, \quad
        m = \frac{\bar u}{K} (\sqrt{\hat v} + \epsilon)

    Give it no ``sync_policy`` where workers' data differ: with variances of their own, and other classes on each
    worker, it ended up to 269 % worse than AdamW, or diverged (docs/choose.md).

    Do not average gradients yourself: give the optimizer local ones; with DDP call ``fusedonebit.ddp.attach``. After
    every round, when ``stats()["local_steps"]`` is 0, parameters are bit-identical on all ranks; within one they
    differ: evaluate and save models between rounds. Each rank saves and loads its own checkpoint.

    Args:
        params, lr, betas, eps, weight_decay, process_group, wire: As for ``OneBitAdam``.
        sync_policy: How long rounds are: ``policies.FixedRounds(2)``, ``policies.DoublingRounds(after=...,
            scaler=..., most=16)``, or any object with a method ``steps(done)``, a function of ``policies.Progress``
            alone. None: rounds of one step.
        variance_policy: When a variance that all workers share is renewed: ``policies.DoublingVariance()``, or any
            object with its method ``renews(done)``. None: with a ``sync_policy`` each worker has its own, which nothing
            renews; without, it is shared and renewed as ``OneBitAdam``'s.
        max_grad_norm: Clip gradients to this global norm; None: don't. Exact where the variance is renewed, by the
            mean of the ranks' norms where they synchronise, and each worker by its own norm in between.
        numerics: See ``Numerics``; ``master_weights`` are advised: workers' own steps are rounded else.
        faults: See ``Faults``. Where a ``GradScaler`` finds a NaN or Inf between two synchronisations, that worker's
            step alone is none.

    Example::

        optimizer = ZeroOneAdam(model.parameters(), lr=1e-3)
        loss.backward()
        optimizer.step()
    """

    kind: type[Algorithm] = LocalAdam
    algorithm: LocalAdam | TwoStage

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        sync_policy: SyncPolicy | None = None,
        variance_policy: VariancePolicy | None = None,
        max_grad_norm: float | None = None,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        if variance_policy is None and sync_policy is None:
            self.kind = TwoStage
            shared |= {"freeze_step": None, "warmup": WARM_UP, "total_steps": None, "variance": "shared"}
        else:
            sync_policy = EveryStep() if sync_policy is None else sync_policy
            shared |= {"variance_policy": variance_policy, "sync_policy": sync_policy}
        super().__init__(params, defaults, **shared, max_grad_norm=max_grad_norm)

    @property
    def title(self) -> str:
        """Return what it is called; without policies another algorithm is at work."""
        return super().title + " without policies" * (self.kind is TwoStage)

    @classmethod
    def from_deepspeed(
        cls, params: Params, config: Mapping[str, Any], process_group: Ranks = None, **options: Any
    ) -> ZeroOneAdam:
        """Make the optimizer that a DeepSpeed config describes; see ``fusedonebit.deepspeed.from_config``."""
        make: Callable[..., ZeroOneAdam] = import_module("fusedonebit.deepspeed").from_config  # it imports this module
        return make(params, config, process_group, kind=cls, **options)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes in this context only accumulate, where ``overlap=True``; the one after it sends."""
        return self.algorithm.exchange.reducer.paused()

    def worker_error(self, param: Tensor) -> Tensor:
        """Return this rank's residual of one parameter, and its updates of this round; in units of the update, float32.

        By default, and where not ``precondition``, in units of the momentum; where workers have variances of their own
        in units of parameters: what is still to be subtracted from them.
        """
        return self.algorithm.worker_error(param)
