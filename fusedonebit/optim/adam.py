"""1-bit Adam (Tang et al., ICML 2021) as a plain ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Literal

from torch import Tensor

from ..core.optimizer import DistributedOptimizer
from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Freeze, Numerics, Params, Ranks, Wire
from .onebit_options import Variance
from .two_stage import TwoStage


class OneBitAdam(DistributedOptimizer):
    r"""Adam whose communication shrinks to one bit per parameter after a short warm-up.

    Warm-up: AdamW on gradients that the optimizer itself averages over the ranks, in float32; 250 updates with
    beta2 = 0.999. From then on (1-bit Adam, Algorithm 1)

    .. math::
        c_i = \beta_1 m + (1 - \beta_1) \frac{g_i}{\sqrt{\hat v} + \epsilon} + e_i, \quad
        m = C\left(\tfrac{1}{W} \sum_i C(c_i) + E\right), \quad
        x \leftarrow x - \gamma \left(\hat m + \lambda x\right)

    where C keeps the signs and one scale, and the residuals e (of each worker) and E (of each
    server) carry what it lost. The variance v is shared: every 50 steps, or sooner, it is made anew of what workers
    tell each other of their gradients' squares (docs/numerics.md). In the paper it is frozen, after a longer warm-up:
    ``freeze_step``; and m is divided instead, at the end, and compressed undivided:
    ``Numerics(precondition=False)``. Do not average gradients yourself: give the optimizer local ones; with
    DDP call ``fusedonebit.ddp.attach``. After every step parameters are bit-identical on
    all ranks.

    Args:
        params: Parameters or groups of them, as for ``torch.optim.AdamW``; float32, bfloat16 or
            float16; equal on all ranks. Groups may set lr, betas, eps, weight_decay, maximize.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay of the momentum and of the variance; these, eps and weight_decay may be tensors of one element.
        eps: Added to the root of the variance.
        weight_decay: Decoupled, as in AdamW.
        freeze_step: None: v is not frozen. Else the number of uncompressed updates before it is; ``"auto"``: until v is
            stable, 10/(1 - beta2) updates at most; or a ``Freeze``, which also takes the variance of an earlier run.
        warmup: Number of uncompressed updates, or their share of ``total_steps``, instead of ``freeze_step``. None:
            0.25/(1 - beta2), where v is shared.
        total_steps: Of the run; only where ``warmup`` is a share.
        variance: ``"shared"``: v is renewed as above. ``"frozen"``: it stays what it is after the warm-up. None: frozen
            where there is a ``freeze_step``.
        max_grad_norm: Clip gradients to this global norm; None: don't. Exact in the warm-up. In the compression
            stage nobody knows the averaged gradient: one factor for all ranks, from the mean of their norms,
            which bounds its norm from above. Costs a collective of 8 bytes and one read of the gradients.
        process_group: Ranks to average over: a process group, a ``DeviceMesh`` of one dimension, that of the replicas
            (parameters may then be sharded by ``fully_shard`` over another, docs/beyond-one-node.md), or a
            ``fusedonebit.comm.Transport``, such as ``SimulatedGroup(4).transport(rank)``. None: the default group, or
            only this process.
        numerics, wire, faults: See ``Numerics``, ``Wire`` and ``Faults``.

    Raises:
        TypeError, ValueError: for bad arguments, on every rank, naming the first that differs.

    Example::

        optimizer = OneBitAdam(model.parameters(), lr=1e-3)
        loss.backward()
        optimizer.step()
    """

    kind = TwoStage
    algorithm: TwoStage

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int | Literal["auto"] | Freeze | None = None,
        warmup: int | float | None = None,
        total_steps: int | None = None,
        variance: Variance | None = None,
        max_grad_norm: float | None = None,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        shared |= {"variance": variance, "warmup": warmup, "total_steps": total_steps}
        super().__init__(params, defaults, **shared, freeze_step=freeze_step, max_grad_norm=max_grad_norm)

    @classmethod
    def from_deepspeed(
        cls, params: Params, config: Mapping[str, Any], process_group: Ranks = None, **options: Any
    ) -> OneBitAdam:
        """Make the optimizer that a DeepSpeed config describes; see ``fusedonebit.deepspeed.from_config``."""
        make: Callable[..., OneBitAdam] = import_module("fusedonebit.deepspeed").from_config  # it imports this module
        return make(params, config, process_group, kind=cls, **options)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes in this context only accumulate, where ``overlap=True``; the one after it sends."""
        return self.algorithm.compression.exchange.reducer.paused()

    def worker_error(self, param: Tensor) -> Tensor:
        """Return this rank's residual e of one parameter, in units of the momentum; rounds a narrow ``state``."""
        return self.algorithm.worker_error(param)
