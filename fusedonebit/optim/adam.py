"""1-bit Adam (Tang et al., ICML 2021) as a plain ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import Transport
from ..core.options import OneBitOptions
from ..integrations.deepspeed import onebit_adam_arguments
from ..triton_kernels import ScaleScope, apply_momentum
from .averaging import AdamUpdate
from .two_stage import OneBitOptimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class OneBitAdam(AdamUpdate, OneBitOptimizer):
    r"""Adam whose communication shrinks to one bit per parameter once its variance is stable.

    Warm-up: AdamW on gradients that the optimizer itself averages over the ranks, in float32. After
    ``freeze_step`` updates the variance v is frozen, and from then on (1-bit Adam, Algorithm 1)

    .. math::
        c_i = \beta_1 m + (1 - \beta_1) g_i + e_i, \quad
        m = C\left(\tfrac{1}{W} \sum_i C(c_i) + E\right), \quad
        x \leftarrow x - \gamma \left(\frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda x\right)

    where C keeps the signs and one scale, and the residuals e (of each worker) and E (of each
    server) carry what it lost. Do not average gradients yourself: give the optimizer local ones; with
    DDP call ``fusedonebit.ddp.attach``. After every step parameters are bit-identical on
    all ranks.

    Args:
        params: Parameters or groups of them, as for ``torch.optim.AdamW``; float32, bfloat16 or
            float16; equal on all ranks. Groups may set lr, betas, eps, weight_decay, maximize.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay of the momentum and of the variance; these, eps and weight_decay may be tensors of one element.
        eps: Added to the root of the variance.
        weight_decay: Decoupled, as in AdamW.
        freeze_step: Number of uncompressed updates, or ``"auto"``: until v is stable
            (``freezing.AutoFreeze``). 0 needs ``warm_start``, or a loaded checkpoint.
        lr_warmup_steps: With ``"auto"``: updates before v is looked at.
        scale_norm: ``"l1"``: mean \|c\| (the paper). ``"l2"``: \|c\|_2/sqrt(d) (DeepSpeed).
            ``"contractive"``: min(l2, 1.9 l1), never larger than what it compresses.
        scale_scope: One scale for everything (``"global"``), per tensor (``"layer"``) or
            per 4096 elements of a tensor (``"block"``), or per bucket.
        precondition: Compress the update m/denom itself instead of m: a fixed scaling of each
            coordinate, so that the error feedback stays exact. Denominators are at least a thousandth
            of their median (``freezing.quantile_floor``).
        ternary: Two bits per parameter, sign and zero (Tarasov & Ershov, section 4): exact zeros stay
            zeros, and scales are means over what is not zero. For gradients with many exact zeros.
        variance_floor: What frozen v has at least, as a share of its tensor's mean; None: 0.01 with
            ``precondition``, else 0.
        warm_start: ``state_dict()`` of an earlier run, of any world size, or of ``torch.optim.AdamW``: its
            variance replaces the warm-up. With ``freeze_step=0`` compression starts at once.
        rewarm_every: After so many compressed updates warm up again for ``rewarm_steps`` uncompressed
            ones, which renew the variance; 0: never.
        rewarm_steps: Length of such a stretch, and of the variance's memory in it.
        guard: A compressed update whose norm is 10 times (300 without ``precondition``) that of the last
            uncompressed one, or of noise, is skipped on all ranks (``guard.DivergenceGuard``); then
            ``"rewarm"``: warm up again, without what goes beyond a step of Adam's. ``"warn"``: keep it as
            residual and warn; training may stand still. ``"off"``: no such check.
        bias_correction: Adam's; that of v is frozen with it.
        eps_inside_sqrt: In the compression stage use sqrt(v + eps) (Tarasov & Ershov, eq. 2).
        maximize: Ascend instead of descend.
        dead_coordinates: What coordinates with v == 0 get at the freeze: ``"mean"`` of their
            tensor's other v; tensors without any take no further part. ``"keep"``: 0.
        mask: For some parameters a bool tensor of their shape; where False nothing ever moves.
        nonfinite: A NaN or Inf gradient on any rank: all ranks ``"skip"`` the step, or ``"raise"``.
        max_grad_norm: Clip gradients to this global norm; None: don't. Exact in the warm-up. In the compression
            stage nobody knows the averaged gradient: one factor for all ranks, from the mean of their norms,
            which bounds its norm from above. Costs a collective of 8 bytes and one read of the gradients.
        master_weights: Keep float32 copies of bfloat16 and float16 parameters, 4 bytes each, that updates go to;
            parameters are their rounded values. What you write into parameters, they take over, unless it
            goes through ``p.data.copy_`` or the like, of which torch keeps no trace.
        capturable: Steps can be captured in CUDA graphs in the compression stage; learning rates become tensors on
            the device, which schedulers fill in place, and are no longer compared between ranks.
        broadcast_parameters: Start from rank 0's values instead of demanding equal ones.
        block_size: Elements per block of the layout; None chooses.
        stochastic_rounding: Round bfloat16 parameters up or down with odds that keep the mean, instead of to
            nearest, which loses updates below half a unit in the last place (Gupta et al., 2015; for
            bfloat16 Zamirai et al., 2020). Which way depends only on the number of updates and the
            element: it is the same on all ranks and after a resumption. float32 parameters are not
            rounded; float16 ones are refused.
        hierarchy: A ``DeviceMesh`` of two dimensions, between nodes and inside one, or those two groups: gradients
            are averaged inside a node, and compressed between nodes (``comm.hierarchical``), each rank's part with
            scales of its own; ``momentum()`` and ``worker_error()`` tell of this rank's part. None: no levels.
        hierarchy_dtype: In which gradients travel inside a node: ``torch.float32``, or ``torch.bfloat16``.
        frozen_dtype: ``torch.bfloat16`` keeps the frozen variance in 2 bytes instead of 4, and reads as many
            fewer in each step; denominators are then off by at most 0.2 %, alike on all ranks. The freeze
            allocates those 2 bytes per parameter and frees 4.
        overlap: Compress and send in the backward pass, each bucket as soon as its gradients are there; all but
            the last of several backward passes before a step belong in ``with optimizer.no_sync()``. The same
            result, bit for bit, as with as many ``buckets`` without it.
        buckets: Into how many equal ranges the parameters are cut, each compressed by itself; None: 1, or 4
            with ``overlap``.
        process_group: Ranks to average over; None is the default group, or only this process. Or a
            ``fusedonebit.comm.Transport``, such as ``SimulatedGroup(4).transport(rank)``.
        mesh: The same as a ``DeviceMesh`` of one dimension, that of the replicas. Parameters may then be sharded by
            ``fully_shard`` over another (docs/beyond-one-node.md).

    Raises:
        TypeError, ValueError: for bad arguments, on every rank, naming the first that differs.

    Example::

        optimizer = OneBitAdam(model.parameters(), lr=1e-3, freeze_step=1000)
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
        freeze_step: int | Literal["auto"],
        lr_warmup_steps: int = 0,
        scale_norm: Literal["l1", "l2", "contractive"] = "contractive",
        scale_scope: ScaleScope = "block",
        precondition: bool = True,
        ternary: bool = False,
        variance_floor: float | None = None,
        warm_start: Mapping[str, Any] | None = None,
        rewarm_every: int = 0,
        rewarm_steps: int = 50,
        guard: Literal["rewarm", "warn", "off"] = "rewarm",
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        maximize: bool = False,
        dead_coordinates: Literal["mean", "keep"] = "mean",
        mask: Mapping[Tensor, Tensor] | None = None,
        nonfinite: Literal["skip", "raise"] = "skip",
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        capturable: bool = False,
        broadcast_parameters: bool = False,
        block_size: int | None = None,
        stochastic_rounding: bool = False,
        hierarchy: DeviceMesh | tuple[Any, Any] | None = None,
        hierarchy_dtype: torch.dtype = torch.float32,
        overlap: bool = False,
        buckets: int | None = None,
        frozen_dtype: torch.dtype = torch.float32,
        process_group: dist.ProcessGroup | Transport | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        options = OneBitOptions(
            freeze_step=freeze_step,
            lr_warmup_steps=lr_warmup_steps,
            scale_norm=scale_norm,
            scale_scope=scale_scope,
            precondition=precondition,
            ternary=ternary,
            variance_floor=variance_floor,
            warm_started=warm_start is not None,
            rewarm_every=rewarm_every,
            rewarm_steps=rewarm_steps,
            guard=guard,
            bias_correction=bias_correction,
            eps_inside_sqrt=eps_inside_sqrt,
            dead_coordinates=dead_coordinates,
            nonfinite=nonfinite,
            max_grad_norm=max_grad_norm,
            master_weights=master_weights,
            capturable=capturable,
            block_size=block_size,
            stochastic_rounding=stochastic_rounding,
            hierarchy_dtype=hierarchy_dtype,
            overlap=overlap,
            buckets=buckets,
            frozen_dtype=frozen_dtype,
        )
        super().__init__(
            params,
            defaults,
            options,
            process_group=process_group,
            mesh=mesh,
            hierarchy=hierarchy,
            mask=mask,
            broadcast_parameters=broadcast_parameters,
            warm_start=warm_start,
        )

    @classmethod
    def from_deepspeed(
        cls,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        config: Mapping[str, Any],
        process_group: dist.ProcessGroup | Transport | None = None,
        **options: Any,
    ) -> OneBitAdam:
        """Makes the optimizer that a DeepSpeed config describes, with DeepSpeed 0.19.6's numerics.

        Those are: l2 scales, no bias correction, coordinates with v == 0 left as they are, and
        F - 1 uncompressed updates for ``freeze_step`` F: DeepSpeed's first ``step()`` only sets up
        its buffers and drops the gradient, but is counted. Ours drops none.

        Args:
            params: As for the constructor; per-group settings override the config's.
            config: The optimizer block, ``{"type": "OneBitAdam", "params": {...}}``, or its params.
            process_group: As for the constructor.
            options: Further arguments of the constructor, such as ``master_weights``; they go before the config's.

        Raises:
            ValueError: for another optimizer, an unknown key, or a value with no counterpart.
        """
        return cls(params, **(onebit_adam_arguments(config) | options), process_group=process_group)

    def _apply(self, coef: Tensor, skip: Tensor) -> None:
        layout, reduce = self.layout, self.reducer
        apply_momentum(
            self.parameters.dense,
            layout.sizes,
            layout.block_size,
            reduce.bits,
            reduce.scale,
            None if self.options.precondition else self.exp_avg_sq,
            self.options.eps_inside_sqrt,
            coef,
            self._block_tensor,
            self.live.bits,
            self.live.row,
            skip,
            self._rounding,
        )
