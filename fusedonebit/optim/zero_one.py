"""0/1 Adam (Lu et al., 2022) as a plain ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ..comm import Transport
from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Wire
from ..integrations.deepspeed import zero_one_adam_arguments
from .policies import DoublingVariance, SyncPolicy, VariancePolicy
from .zero_one_rounds import ZeroOneOptimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        params: Parameters or groups of them, as for ``torch.optim.AdamW``; float32, bfloat16 or float16; equal on
            all ranks. Groups may set lr, betas, eps, weight_decay, maximize.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay of the momentum and of the variance.
        eps: Added to the root of the variance.
        weight_decay: Decoupled, as in AdamW.
        variance_policy: When the variance is renewed: ``policies.DoublingVariance()``, or any object with its method
            ``renews(done)``, a function of ``policies.Progress`` alone.
        sync_policy: How long rounds are: ``policies.DoublingRounds(after=..., scaler=..., most=16)``, where
            ``after`` counts the rounds of the learning-rate warm-up; or any object with its method ``steps(done)``.
        max_grad_norm: Clip gradients to this global norm; None: don't. Exact where the variance is renewed, by the
            mean of the ranks' norms where they synchronise, and each worker by its own norm in between.
        process_group: Ranks to agree with; as for ``OneBitAdam``.
        numerics: See ``Numerics``; ``master_weights`` are advised: workers' own steps are rounded else.
        wire, faults: See ``Wire`` and ``Faults``. Where a ``GradScaler`` finds a NaN or Inf between two
            synchronisations, that worker's step alone is none.

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
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        sync_policy: SyncPolicy,
        variance_policy: VariancePolicy | None = None,
        max_grad_norm: float | None = None,
        process_group: dist.ProcessGroup | Transport | DeviceMesh | None = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        objects: dict[str, Any] = {"numerics": numerics, "wire": wire, "faults": faults}
        renewals = DoublingVariance() if variance_policy is None else variance_policy
        settings: dict[str, Any] = {
            "variance_policy": renewals,
            "sync_policy": sync_policy,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, process_group=process_group, **objects, **settings)

    @classmethod
    def from_deepspeed(
        cls,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        config: Mapping[str, Any],
        process_group: dist.ProcessGroup | Transport | DeviceMesh | None = None,
        **options: Any,
    ) -> ZeroOneAdam:
        """Makes the optimizer that a DeepSpeed config describes, with DeepSpeed 0.19.6's numerics.

        Those are: intervals that count steps, l2 scales over everything, no bias correction; gradients are
        compressed until the variance is frozen, and weight decay is part of what is summed and of the rebuilt
        momentum (``zero_one_deepspeed``). Its first ``step()``, which only sets up its buffers, is counted here
        as there, but drops no gradient here. Where learning rates change the residuals follow them, as in
        ``OneBitAdam``; DeepSpeed's do not.

        Args:
            params: As for the constructor; per-group settings override the config's.
            config: The optimizer block, ``{"type": "ZeroOneAdam", "params": {...}}``, or its params.
            process_group: As for the constructor.
            options: Further arguments of the constructor; they go before the config's, and so does what ``numerics``
                says.

        Raises:
            ValueError: for another optimizer, an unknown key, or a value with no counterpart.
        """
        from ..integrations.deepspeed_zero_one import DeepSpeedZeroOneAdam

        return DeepSpeedZeroOneAdam(params, **zero_one_adam_arguments(config, **options), process_group=process_group)
