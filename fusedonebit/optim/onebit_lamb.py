"""1-bit LAMB (Li et al., 2021) as a plain ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import Transport
from ..comm.absent import Kept, absence
from ..core.options import VARIANCE_FLOOR, OneBitOptions, check_choice, check_flag
from ..core.state.header import FLAG, Field
from ..core.state.spec import Specs, StateSpec
from ..errors import warn
from ..integrations.deepspeed import onebit_lamb_arguments
from ..triton_kernels import Coef, Layer, ScaleScope, apply_momentum, lamb_ratio, lamb_rescale, live_variance
from .lamb import LambUpdate
from .two_stage import OneBitOptimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

QUIET = 0.03
"""A layer's root mean square of m over that of its gradients, below which it is quiet. Noise has 0.23 (beta1 = 0.9)."""

SETTLED = 0.8
"""Share of the coefficients that c_avg, which starts at 0, should have reached at the freeze."""


@dataclass(frozen=True)
class LambOptions(OneBitOptions):
    """Settings of a whole ``OneBitLamb``, equal on all ranks."""

    layerwise: str
    momentum_scaling: bool | None
    variant: str

    no_numerics: ClassVar = (*OneBitOptions.no_numerics, "layerwise", "momentum_scaling")

    @property
    def scales_momentum(self) -> bool:
        """Whether each layer has a unit of its own; preconditioned momentum has one per coordinate."""
        return not self.precondition if self.momentum_scaling is None else self.momentum_scaling

    def check(self) -> None:
        """Raises ValueError for the first setting that makes no sense."""
        super().check()
        check_choice("layerwise", self.layerwise, ("adaptive", "frozen"))
        if self.momentum_scaling is not None:
            check_flag("momentum_scaling", self.momentum_scaling)
        if self.precondition and self.momentum_scaling:
            raise ValueError(
                "momentum_scaling must be False or None with precondition=True, got True: "
                "each coordinate already has a unit of its own"
            )
        check_choice("variant", self.variant, ("paper", "deepspeed"))


_ADAPTIVE: dict[str, Any] = {"given": True, "stage": "compressed", "when": "_adaptive"}


class OneBitLamb(LambUpdate, OneBitOptimizer):
    r"""LAMB whose communication shrinks to one bit per parameter once its variance is frozen.

    Warm-up: ``Lamb``, which also keeps a moving average :math:`c_{avg}` of each layer's coefficient.
    After ``freeze_step`` updates :math:`c_{avg}` and the variance, now :math:`v_{T_w}`, are frozen.
    From then on the momentum travels as in ``OneBitAdam``, each layer's scaled to the same size, and
    (1-bit LAMB, Algorithm 1, lines 15 to 21)

    .. math::
        g = \frac{m_t - \beta_1 m_{t-1}}{1 - \beta_1}, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g^2, \quad
        r_t = \left\| \frac{v_{T_w}}{v_t} \right\|_\infty \text{, clipped to } (1 \pm r_{threshold}) r_{t-1}
        \text{ and } [r_{min}, r_{max}], \\
        x \leftarrow x - \gamma \, r_t \, c_{avg} \left( \frac{m_t}{\sqrt{v_{T_w}} + \epsilon} + \lambda x \right)

    so that the layers' learning rates go on adapting although only bits are known. Seven kernels and
    two collectives a step, whatever the number of tensors.

    Args:
        params: Parameters or groups of them, as for ``torch.optim.AdamW``; float32, bfloat16 or
            float16; equal on all ranks. Groups may set lr, betas, eps, weight_decay, maximize, c_min,
            c_max, beta3, r_min, r_max, r_threshold.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay of the momentum and of the variance.
        eps: Added to the root of the variance.
        weight_decay: Part of u, in the compression stage too.
        freeze_step: Number of uncompressed updates, or ``"auto"``: until v is stable
            (``freezing.AutoFreeze``). 0 needs a loaded checkpoint of ``Lamb`` or ``OneBitLamb``. c_avg
            starts at 0: after F updates it has reached 1 - beta3^F of the coefficients.
        c_min, c_max: Bounds of the coefficient in the warm-up.
        beta3: Of the coefficient's moving average.
        r_min, r_max: Bounds of the ratio.
        r_threshold: By which share it may change in one step.
        layerwise: ``"adaptive"``: as above. ``"frozen"``: c = c_avg (section 3.4, "LAMB + basic
            1-bit"), five kernels, and a third less state.
        momentum_scaling: Scale each layer's momentum to the same size before it is compressed
            (section 4.3); None: unless it is preconditioned.
        variant: ``"deepspeed"``: a ratio of roots, blended with the share of the weight decay and
            clipped the other way round, and coefficients of 1 left out of the average: a layer that
            had no other stands still after the freeze.
        lr_warmup_steps: With ``"auto"``: updates before v is looked at.
        scale_norm: ``"l1"``: mean \|c\|. ``"l2"``: \|c\|_2/sqrt(d). ``"contractive"``: min(l2, 1.9 l1).
        scale_scope: One scale for everything (``"global"``), per tensor (``"layer"``) or
            per 4096 elements of a tensor (``"block"``), or per bucket.
        precondition: Compress m/denom instead of m; see ``OneBitAdam``. The layers' momentum scaling
            does better here (docs/numerics.md).
        ternary: Two bits per parameter, sign and zero; see ``OneBitAdam``.
        variance_floor: What frozen v has at least, as a share of its tensor's mean (0.01 unless told
            otherwise); None: as ``OneBitAdam``.
        warm_start: ``state_dict()`` of an earlier ``Lamb`` or ``OneBitLamb``, of any world size: its
            variance, average coefficients and momentum scales replace the warm-up. With ``freeze_step=0``
            compression starts at once.
        rewarm_every: After so many compressed updates warm up again for ``rewarm_steps`` uncompressed
            ones, which renew the variance; 0: never.
        rewarm_steps: Length of such a stretch, and of the variance's memory in it.
        guard: A compressed update whose norm is 300 times (10 with ``precondition``) that of the last
            uncompressed one, or of noise, is skipped on all ranks (``guard.DivergenceGuard``); then
            ``"rewarm"``: warm up again, without what goes beyond a step of Adam's. ``"warn"``: keep it as
            residual and warn; training may stand still. ``"off"``: no such check.
        bias_correction: Adam's; equation (2) has none. That of v is frozen with it.
        eps_inside_sqrt: sqrt(v + eps), as equation (2) is printed, instead of sqrt(v) + eps.
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
            nearest (Gupta et al., 2015; for bfloat16 Zamirai et al., 2020); see ``OneBitAdam``.
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
            ``fusedonebit.comm.Transport``.
        mesh: The same as a ``DeviceMesh`` of one dimension, that of the replicas. Parameters may then be sharded by
            ``fully_shard`` over another (docs/beyond-one-node.md).

    Raises:
        TypeError, ValueError: for bad arguments, on every rank, naming the first that differs.

    Example::

        optimizer = OneBitLamb(model.parameters(), lr=1e-2, freeze_step=1000)
        loss.backward()
        optimizer.step()
    """

    options: LambOptions
    columns: ClassVar = LambUpdate.columns | {
        Coef.R_MIN: "r_min",
        Coef.R_MAX: "r_max",
        Coef.R_THRESHOLD: "r_threshold",
    }

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int | Literal["auto"],
        c_min: float = 0.01,
        c_max: float = 10.0,
        beta3: float = 0.9,
        r_min: float = 0.5,
        r_max: float = 4.0,
        r_threshold: float = 0.1,
        layerwise: Literal["adaptive", "frozen"] = "adaptive",
        momentum_scaling: bool | None = None,
        variant: Literal["paper", "deepspeed"] = "paper",
        lr_warmup_steps: int = 0,
        scale_norm: Literal["l1", "l2", "contractive"] = "contractive",
        scale_scope: ScaleScope = "block",
        precondition: bool = False,
        ternary: bool = False,
        variance_floor: float | None = VARIANCE_FLOOR,
        warm_start: Mapping[str, Any] | None = None,
        rewarm_every: int = 0,
        rewarm_steps: int = 50,
        guard: Literal["rewarm", "warn", "off"] = "rewarm",
        bias_correction: bool = False,
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
        defaults |= {"c_min": c_min, "c_max": c_max, "beta3": beta3}
        defaults |= {"r_min": r_min, "r_max": r_max, "r_threshold": r_threshold}
        options = LambOptions(
            freeze_step=freeze_step,
            layerwise=layerwise,
            momentum_scaling=momentum_scaling,
            variant=variant,
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
    ) -> OneBitLamb:
        """Makes the optimizer that a DeepSpeed config describes, with DeepSpeed 0.19.6's numerics.

        Those are: ``variant="deepspeed"``, l2 scales, no bias correction, coordinates with v == 0
        left as they are, and F - 1 uncompressed updates for ``freeze_step`` F: DeepSpeed's first
        ``step()`` only sets up its buffers and drops the gradient, but is counted. Ours drops none.

        Args:
            params: As for the constructor; per-group settings override the config's.
            config: The optimizer block, ``{"type": "OneBitLamb", "params": {...}}``, or its params.
            process_group: As for the constructor.
            options: Further arguments of the constructor, such as ``master_weights``; they go before the config's.

        Raises:
            ValueError: for another optimizer, an unknown key, or a value with no counterpart.
        """
        return cls(params, **(onebit_lamb_arguments(config) | options), process_group=process_group)

    def build(self) -> None:
        super().build()
        layout, device = self.layout, self.device
        self._deepspeed = self.options.variant == "deepspeed"
        self._fresh = torch.empty(0, device=device)
        self._unit_is_known = False
        if self.options.scales_momentum:
            self._unit = torch.ones(len(layout.sizes), device=device)
        if self._adaptive:
            self._started = torch.zeros(1, dtype=torch.int32, device=device)
            self._last_bits = torch.zeros_like(self.reducer.bits, memory_format=torch.contiguous_format)
            self._last_scale = torch.zeros(layout.n_blocks, device=device)
            self._largest = torch.zeros(layout.n_blocks, device=device)

    def _before_compression(self) -> None:
        if not self._layers[Layer.AVERAGE].any():
            raise RuntimeError(
                "the freeze needs averages of LAMB's coefficients, but all are 0: no LAMB update was made, or "
                'variant="deepspeed" left all out because they were 1. Set freeze_step above '
                f"{self.outcomes.updates}, or load a checkpoint of Lamb or OneBitLamb"
            )
        if self.outcomes.updates > 0 and self._rewarms == 0:
            self._warn_of_averages()
        self._layers[Layer.COEFFICIENT] = self._layers[Layer.AVERAGE]
        self._layers[Layer.RATIO] = 1.0
        if self.options.scales_momentum and not self._unit_is_known:
            self._unit = self._momentum_scales()
        self._drop_norms()
        if self._adaptive:
            # The gradients' buffer becomes the fresh variance. That is the frozen one until the next
            # step, whose m_{t-1} is in full precision for the last time: keep it there.
            self._fresh = self._full_size() if self._grad is None else self._grad[: self.layout.numel]
            self._fresh.copy_(self.exp_avg)
            self._started.zero_()

    def _after_compression(self) -> None:
        self._layers[Layer.RATIO] = 1.0
        self._fresh = torch.empty(0, device=self.device)
        self._norms = torch.zeros(2, self.layout.n_blocks, dtype=torch.float64, device=self.device)
        self._unit_is_known = False

    def begin_warm(self, tables: Mapping[str, Tensor]) -> None:
        super().begin_warm(tables)
        self._layers.copy_(tables["layer"])
        if self._unit is not None and "unit" in tables:
            self._unit, self._unit_is_known = tables["unit"], True

    def _layer_factor(self) -> Tensor:
        return self._layers[Layer.AVERAGE]

    def _warn_of_averages(self) -> None:
        """Says where c_avg is not what the layers moved with until now."""
        live = (self._segments(self.live.numel.double(), "sum") > 0) & (self.own_steps > 0)
        still = [
            self.parameters.names[i] for i in (live & (self._layers[Layer.AVERAGE] == 0)).nonzero().flatten().tolist()
        ]
        if still:
            warn(
                f"{len(still)} tensor(s) have no average coefficient and will not move from now on: "
                f'{", ".join(still[:5])}; variant="deepspeed" leaves coefficients of 1 out of it'
            )
        moved = [
            (n, self.param_groups[g])
            for n, g in zip(self.own_steps.tolist(), self.parameters.group_of, strict=True)
            if n
        ]
        reached, fewest = min(((1 - float(group["beta3"]) ** n, int(n)) for n, group in moved), default=(1.0, 0))
        if reached < SETTLED and not self._is_corrected:  # a warm start does not begin with 0
            warn(
                f"after so few updates ({fewest}) the average coefficient has reached {reached:.0%} of the "
                "coefficients (it starts at 0, as in the paper), and so has the learning rate from now on; "
                "set a larger freeze_step or a smaller beta3"
            )

    def _drop_norms(self) -> None:
        if not self._deepspeed:
            self._norms = self._norms[:, :0].clone()

    def _full_size(self) -> Tensor:
        return torch.zeros(self.layout.numel, device=self.device)

    def _momentum_scales(self) -> Tensor:
        """What makes every layer's momentum of the mean layer's size: float32 [tensors] (section 4.3).

        A layer that is quiet at the freeze has a size from its variance, which remembers longer: with
        that of its vanishing momentum it would drown all others once it moves again. It takes no
        part in the mean. A layer without any variance keeps 1.
        """
        shards = self.shards
        live = shards.sum(self._segments(self.live.numel.double(), "sum")).clamp(min=1.0)
        sums = torch.zeros(2, self.layout.n_blocks, dtype=torch.float64, device=self.device)
        live_variance(self.layout.sizes, self.layout.block_size, self.exp_avg_sq, sums)
        variance = shards.sum(self._segments(sums[0], "sum")) / live
        squares = shards.sum(self._sum_of_squares(self.exp_avg))
        size, least = (squares / live).sqrt(), QUIET * variance.sqrt()
        moving = (size > 0) & (size >= least)
        size = torch.maximum(size, least)
        counted = torch.where(moving.any(), moving, size > 0)
        mean = (size * counted).sum() / counted.sum().clamp(min=1)
        return torch.where(size > 0, mean / size, 1.0).float()

    def _apply(self, coef: Tensor, skip: Tensor) -> None:
        params, layout, live, reduce = self.parameters.dense, self.layout, self.live, self.reducer
        eps_inside_sqrt, bits, scale = self.options.eps_inside_sqrt, reduce.bits, reduce.scale
        tables = (coef, self._block_tensor, live.bits, live.row, skip)
        kept = self._last_kept() if self._adaptive else None
        if self._adaptive:
            norms = self._norms if self._deepspeed else None
            lamb_ratio(
                params,
                layout.sizes,
                layout.block_size,
                bits,
                scale,
                self._last_bits,
                self._last_scale,
                self.exp_avg_sq,
                self._fresh,
                self._started,
                eps_inside_sqrt,
                self.options.precondition,
                self._deepspeed,
                *tables,
                self._largest,
                norms,
            )
            largest, start = self._by_layer(self._largest, "max")
            norms = None if norms is None else self._by_layer(norms)[0]
            with self._layers_kept():
                lamb_rescale(largest, norms, start, skip, self._deepspeed, self._started, coef, self._layers)
        else:
            average = self._layers[Layer.AVERAGE]
            coef[:, Coef.STEP_SIZE] *= average
            coef[:, Coef.DECAY] = 1 - coef[:, Coef.LR] * average * coef[:, Coef.WEIGHT_DECAY]
        v = None if self.options.precondition else self.exp_avg_sq
        moved = (params, layout.sizes, layout.block_size, bits, scale, v, eps_inside_sqrt)
        apply_momentum(*moved, *tables, self._rounding)
        if kept is not None and self._absent is not None:
            kept.restore(self._absent)

    def _last_kept(self) -> Kept | None:
        """The last momentum, to put back where there was no gradient; the fresh variance stays by its coefficients.

        In the first compressed step there is none in bits yet: the next gradient rebuilt is then too large, once.
        """
        if self._absent is None:
            return None
        rows = absence(self.layout, self._missing, self.device).rows
        return Kept(rows, self.reducer.block_tensor, bits=[self._last_bits], tables=[self._last_scale])

    # ---------------------------------------------------------------- checkpoints

    kept: ClassVar[Specs] = (
        *OneBitOptimizer.kept,
        StateSpec("layer", "tensor", "_layers", rows=len(Layer)),
        StateSpec("unit", "tensor", "_unit", given=True, when="options.scales_momentum", not_negative=True),
        # Before the first compressed step this is the warm-up's momentum.
        StateSpec("exp_avg_sq_fresh", "element", "_fresh", **_ADAPTIVE, not_negative="started"),
        StateSpec("exp_avg_last_bits", "bit", "_last_bits", **_ADAPTIVE),
        StateSpec("exp_avg_last_nonzero", "bit", "_last_bits", **_ADAPTIVE | {"when": "_keeps_last_nonzero"}, plane=1),
        StateSpec("exp_avg_last_scale", "block", "_last_scale", **_ADAPTIVE, not_negative=True),
    )
    scratch: ClassVar[tuple[str, ...]] = (*LambUpdate.scratch, "_largest")
    header_fields: ClassVar = {
        **OneBitOptimizer.header_fields,
        "unit_is_known": Field(FLAG, False),
        "started": Field(FLAG, False),
    }

    @property
    def _adaptive(self) -> bool:
        return self.options.layerwise == "adaptive"

    @property
    def _keeps_last_nonzero(self) -> bool:
        return self._adaptive and self.options.ternary

    def _settled(self) -> dict[str, Any]:
        options = self.options
        return super()._settled() | {"layerwise": options.layerwise, "momentum_scaling": options.scales_momentum}

    def plain_state(self) -> dict[str, Any]:
        # Until the first compressed step has succeeded, "exp_avg_sq_fresh" is the warm-up's momentum.
        started = {"started": bool(self._started)} if self._adaptive else {}
        return super().plain_state() | {"unit_is_known": self._unit_is_known} | started

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        super().check_plain_state(header)
        own = header["phase"] == "compression" and header["algorithm"] == type(self).__name__
        if own and self._adaptive and "started" not in header:
            raise ValueError("the checkpoint's header is damaged: it lacks started; load another checkpoint")

    def resume(self, header: Mapping[str, Any]) -> None:
        super().resume(header)
        self._unit_is_known = header.get("unit_is_known", False)
        if self._phase == "compression":
            self._drop_norms()
            if self._adaptive:
                self._fresh = self._full_size()
                self._started.fill_(header["started"])

    # ---------------------------------------------------------------- what users look at

    def _variance(self) -> Tensor:
        following = self._adaptive and self._phase == "compression" and bool(self._started)
        return self._fresh if following else self.exp_avg_sq

    def _described(self) -> list[str]:
        return [*super()._described(), f"layerwise: {self.options.layerwise}, as in {self.options.variant}"]
