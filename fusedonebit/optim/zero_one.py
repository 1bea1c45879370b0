"""0/1 Adam (Lu et al., 2022) as a plain ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Params, Ranks, Wire
from ..integrations.deepspeed import zero_one_adam_arguments
from .policies import DoublingVariance, SyncPolicy, VariancePolicy
from .zero_one_rounds import ZeroOneOptimizer


class ZeroOneAdam(ZeroOneOptimizer):
    r"""Adam whose workers talk in some steps only, and then mostly in one bit per parameter.

    A round begins with parameters x, momentum m and variance v that are equal on all ranks. Either it renews the
    variance: one step of AdamW on gradients averaged in float32. Or each of its K steps is a worker's own,

    .. math::
        m_i = \beta_1 m_i + (1 - \beta_1) g_i, \quad
        x_i \leftarrow x_i - \gamma \left(\frac{\hat m_i}{\sqrt{\hat v} + \epsilon} + \lambda x_i\right), \quad
        u_i = u_i + \frac{m_i}{\sqrt{\hat v} + \epsilon}

    and at its end one synchronisation averages what workers have added up, with error feedback on both sides
    (0/1 Adam, Algorithm 1): :math:`\bar u` = 1-bit-allreduce(u), and on all ranks, bit for bit,

    .. math::
        x \leftarrow (1 - \gamma \lambda)^K x - \gamma \bar u, \quad
        m = \frac{\bar u}{K} (\sqrt{\hat v} + \epsilon)

    Weight decay is no part of u, so that it is none of the rebuilt momentum. Do not average gradients yourself:
    give the optimizer local ones; with DDP call ``fusedonebit.ddp.attach``. After every round, when
    ``stats()["local_steps"]`` is 0, parameters are bit-identical on all ranks; within one they differ: evaluate
    and save models between rounds. Each rank saves and loads its own checkpoint.

    Args:
        params, lr, betas, eps, weight_decay, process_group, wire: As for ``OneBitAdam``.
        variance_policy: When the variance is renewed: ``policies.DoublingVariance()``, or any object with its method
            ``renews(done)``, a function of ``policies.Progress`` alone.
        sync_policy: How long rounds are: ``policies.DoublingRounds(after=..., scaler=..., most=16)``, where
            ``after`` counts the rounds of the learning-rate warm-up; or any object with its method ``steps(done)``.
        max_grad_norm: Clip gradients to this global norm; None: don't. Exact where the variance is renewed, by the
            mean of the ranks' norms where they synchronise, and each worker by its own norm in between.
        numerics: See ``Numerics``; ``master_weights`` are advised: workers' own steps are rounded else.
        faults: See ``Faults``. Where a ``GradScaler`` finds a NaN or Inf between two synchronisations, that worker's
            step alone is none.

    Raises:
        TypeError, ValueError: for bad arguments, on every rank, naming the first that differs.

    Example::

        policy = policies.DoublingRounds(after=1000, scaler=500, most=16)
        optimizer = ZeroOneAdam(model.parameters(), lr=1e-3, sync_policy=policy)
        loss.backward()
        optimizer.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        sync_policy: SyncPolicy,
        variance_policy: VariancePolicy | None = None,
        max_grad_norm: float | None = None,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        shared |= {"variance_policy": DoublingVariance() if variance_policy is None else variance_policy}
        super().__init__(params, defaults, **shared, sync_policy=sync_policy, max_grad_norm=max_grad_norm)

    @classmethod
    def from_deepspeed(
        cls, params: Params, config: Mapping[str, Any], process_group: Ranks = None, **options: Any
    ) -> ZeroOneAdam:
        """Make the optimizer that a DeepSpeed config describes; see ``OneBitAdam.from_deepspeed``."""
        from ..integrations.deepspeed_zero_one import DeepSpeedZeroOneAdam

        return DeepSpeedZeroOneAdam(params, **zero_one_adam_arguments(config, **options), process_group=process_group)
