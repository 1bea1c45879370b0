"""The option objects that optimizers take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm import Transport
from ..triton_kernels import BLOCK_SIZES, ScaleScope
from .arguments import explaining
from .options import check_count, is_int, is_share

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
"""Parameters, groups of them, or named ones, as ``torch.optim.Optimizer`` takes them."""

Ranks = dist.ProcessGroup | Transport | DeviceMesh | None
"""What says which ranks an optimizer talks to; see ``OneBitAdam``."""

ScaleNorm = Literal["contractive", "relaxed", "l1", "l2"]
Guard = Literal["rewarm", "warn", "off"]
DeadCoordinates = Literal["mean", "keep"]
StateKind = Literal["fp32", "bf16", "8bit"]
MasterWeights = bool | Literal["8bit", "16bit"]

VARIANCE_FLOOR = 0.01
"""Default of ``variance_floor`` where momentum is preconditioned; see docs/numerics.md."""

LEAST_REWARM_STEPS = 10

MOST_BUCKETS = 1 << 16
"""Each has messages of its own."""


@explaining
@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What an optimizer compresses, how it treats the variance, and in which formats it stores state.

    Options come in the order compression, variance, storage format, others. Each ends with the optimizers that have it,
    if not all do; the others raise ValueError unless it has its default. ``ZeroOneAdam`` without policies has what
    ``OneBitAdam`` has, and stands here for that with policies. None stands for the optimizer's own default. Pass the
    same values on all ranks, or all raise ValueError. docs/numerics.md has measurements.

    m is the momentum, v the variance (``exp_avg_sq``), and the update is Adam's, m/(sqrt(v) + eps). ``OneBitAdam`` and
    ``OneBitLamb`` begin with an uncompressed *warm-up*; then the *compression stage* follows. In it v is *shared* by
    default: renewed from the gradients of all ranks, at least every 50 steps. With ``freeze_step`` or
    ``variance="frozen"`` it is *frozen*: constant. ``ZeroOneAdam`` has a shared v as well; with a ``sync_policy`` each
    rank has its own or, with a ``variance_policy``, uncompressed rounds renew a common one.

    Compression replaces a group of elements c by their signs and one magnitude, their *scale*. The *residual*, what
    this loses, is added before the next compression (error feedback).

    Args:
        scale_norm: Formula for the scale of c. ``"l1"``: l1 = mean |c|, to reproduce 1-bit Adam's paper. ``"l2"``: l2 =
            sqrt(mean c^2); the residual can be larger than c. ``"contractive"``: min(l2, 1.9 l1); the residual is
            always smaller than c. ``"relaxed"``: min(1.3 l2, 1.9 l1); also always smaller, and sent sooner, but steps
            are up to 1.3 times as long where ranks agree. With a shared v the first 0.25/(1-beta2) steps after the
            warm-up use ``"contractive"`` instead. None: ``"relaxed"`` with a shared v and for ``ZeroOneAdam`` without a
            ``variance_policy``, else ``"contractive"``. For ``OneBitAdam``, ``OneBitLamb``, ``ZeroOneAdam``.
        scale_scope: Which elements share a scale. ``"block"``: up to 4096 elements of a tensor; 0.8 % more bytes.
            ``"layer"``: a tensor. ``"bucket"``: one of ``Wire(buckets=...)``; not for ``ZeroOneAdam``. ``"global"``:
            all, to reproduce the papers; needs a single bucket. None: ``"block"``. For ``OneBitAdam``, ``OneBitLamb``,
            ``ZeroOneAdam``.
        precondition: Compress the update instead of m, so that all elements are of similar size. Error feedback stays
            exact, in these units. With a frozen v, sqrt(v) + eps is at least 1/1000 of its median. None: True, but
            False for ``OneBitLamb`` with a frozen v, which scales m by layer instead. Use False to reproduce the
            papers; it is refused for ``OneBitLamb`` with a shared v, and for ``ZeroOneAdam`` with a
            ``sync_policy`` alone. For ``OneBitAdam``, ``OneBitLamb``, ``ZeroOneAdam``.
        ternary: Send a second bit per element that marks zeros (Tarasov & Ershov, section 4). Elements that are 0 on
            all ranks stay 0, and scales count only the others. Default: False. Use it if many gradients are exactly
            zero; it doubles the bytes sent. For ``OneBitAdam``, ``OneBitLamb``.
        serve_alone: On a single rank, compress twice, with two residuals. Several ranks, or a ``hierarchy``, always do:
            the second time each rank compresses its part of the average, as a *server*. None: False. Use True to
            reproduce, bit for bit, runs of a program that does so on a single rank. It costs five device operations a
            step, and 4 bytes per parameter. For ``OneBitAdam``, ``OneBitLamb``, ``ZeroOneAdam``.
        variance_floor: Lower bound of v after the warm-up, as a fraction, in [0, 1), of its tensor's mean v. None: 0.01
            with a frozen v, 0 with ``precondition=False``. Of a shared v each renewal finds one, from how rare
            gradients are, of which this is a lower bound; None: 1/8 until the first. Raise it if updates become too
            long for elements whose gradients were small in the warm-up, or seldom come. ``ZeroOneAdam`` with a
            ``variance_policy`` adds it instead, in compressed rounds: sqrt(v + floor * mean v) + eps; None is 0.001.
            Rounds that renew v divide as Adam does; until a tensor has had a gradient in one, only weight decay moves
            it. With a ``sync_policy`` alone it must be 0 or None. For ``OneBitAdam``, ``OneBitLamb``, ``ZeroOneAdam``.
        dead_coordinates: What replaces v == 0 after the warm-up, in elements that had no gradient in it. ``"mean"``:
            the mean of their tensor's nonzero v. A tensor that has none is not trained in the compression stage or,
            with a shared v, waits for its first gradient. ``"keep"``: nothing; they move by lr * m/eps. None:
            ``"mean"``. Use ``"keep"`` only for comparisons, with a frozen v that has no floor, and
            ``precondition=False``. For ``OneBitAdam``, ``OneBitLamb``.
        bias_correction: Divide m by 1 - beta1^t and v by 1 - beta2^t after t updates, as Adam does. The divisor of a
            frozen v is frozen too; a shared v has none. In ``ZeroOneAdam`` with a ``variance_policy``, t of v counts
            its renewals. None: True, but False for ``Lamb`` and for ``OneBitLamb`` with a frozen v, as LAMB's equation
            (2) has none. For all but ``OneBitLion`` and ``MarsitSGD``.
        eps_inside_sqrt: Divide by sqrt(v + eps) instead of sqrt(v) + eps; in ``OneBitAdam`` only in the compression
            stage. Default: False. Use it to follow equation (2) of LAMB as printed, or of Tarasov & Ershov. For
            ``OneBitAdam``, ``OneBitLamb``, ``Lamb``.
        frozen_dtype: Dtype of v in the compression stage: ``torch.float32`` (default) or, of a frozen v,
            ``torch.bfloat16``. Use bfloat16 to save 2 bytes per parameter of memory, and of reads per step; sqrt(v) is
            off by up to 0.2 %. A ``state`` other than ``"fp32"`` overrides it. For ``OneBitAdam``, ``OneBitLamb``.
        master_weights: Add updates to float32 master weights, whose rounded values are the bfloat16 or float16
            parameters. Without them, updates below half a unit in the last place are lost. False (default): none. True:
            a float32 copy, 4 bytes per parameter. It follows what you write into parameters, unless through ``p.data``,
            which torch does not track. ``"16bit"``: only the bits that bfloat16 parameters lack, 2 bytes: the same
            masters, bit for bit (parameters round ties away from zero). ``"8bit"``: the upper 8 of these bits, 1 byte,
            rounded stochastically: masters of 24 bits. With these two, the stored bits, at most half a unit in the last
            place, are added to whatever you write into parameters. They refuse float16, and are for ``AdamW``,
            ``OneBitAdam``, ``OneBitLion`` only. Float32 parameters have no masters. Checkpoints have float32 masters.
        stochastic_rounding: Round updated bfloat16 parameters up or down at random, right on average, not to nearest
            (Gupta et al., 2015; Zamirai et al., 2020). Default: False. Use it instead of ``master_weights``, never with
            them: it takes no memory. Random bits depend only on the number of updates and the element, so all ranks and
            resumed runs agree. Float32 parameters are not rounded. Refused with float16 parameters, without bfloat16
            ones, and with several local steps. For all but ``ZeroOneAdam``.
        state: Format of moments, residuals and averages of squares: ``"fp32"`` (default), ``"bf16"`` or ``"8bit"``. Use
            ``"bf16"`` for half, ``"8bit"`` for a quarter of AdamW's memory, reads and writes (of ``OneBitAdam``'s
            default at 8 ranks 0.8 and 0.4). Both round stochastically, by the number of updates and the element alone.
            8-bit values are floats with three mantissa bits and an exponent shared by their block
            (``Wire(block_size=...)``): from its largest value down to 2^-32 of it, 2^-16 if signed. An element with
            gradients below 1e-4 of its block's largest then hardly moves, and an outlier 1e7 times the others stops its
            block: set ``max_grad_norm``. ``"8bit"`` needs ``precondition`` for ``OneBitAdam``. Checkpoints have
            float32; saving one rounds residuals once more. For ``AdamW``, ``Lamb``, ``OneBitAdam``; ``"bf16"`` for
            ``OneBitMuon`` too, whose momenta stay in float32, on their owners.
        maximize: Maximize the objective, as in torch. Default: False. Groups may set it.
        mask: Which elements may move: a mapping from parameters to bool tensors of their shape (of a DTensor's shard),
            equal on all ranks. Elements with False never move, and count in no norm. Default: None. Parameters left out
            are not masked. Other tensors raise TypeError or ValueError.
    """

    scale_norm: ScaleNorm | None = None
    scale_scope: ScaleScope | None = None
    precondition: bool | None = None
    ternary: bool = False
    variance_floor: float | None = None
    dead_coordinates: DeadCoordinates | None = None
    bias_correction: bool | None = None
    eps_inside_sqrt: bool = False
    serve_alone: bool | None = None
    frozen_dtype: torch.dtype = torch.float32
    master_weights: MasterWeights = False
    stochastic_rounding: bool = False
    state: StateKind = "fp32"
    maximize: bool = False
    mask: Mapping[Tensor, Tensor] | None = None

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        if not isinstance(self.master_weights, bool) and self.master_weights not in ("8bit", "16bit"):
            raise ValueError(f'master_weights must be True, False, "8bit" or "16bit", got {self.master_weights!r}')
        if self.stochastic_rounding and self.master_weights:
            raise ValueError(
                f"stochastic_rounding must be False with Numerics(master_weights={self.master_weights!r}), got True: "
                "masters keep what rounding loses"
            )
        if self.frozen_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"frozen_dtype must be torch.float32 or torch.bfloat16, got {self.frozen_dtype!r}")
        if self.variance_floor is not None and not is_share(self.variance_floor):
            raise ValueError(f"variance_floor must be a number in [0, 1), or None, got {self.variance_floor!r}")


@explaining
@dataclass(frozen=True, kw_only=True)
class Wire:
    """How and when ranks communicate, and how parameters are laid out in memory.

    As in ``Numerics``, values must be equal on all ranks, and optimizers refuse options that they lack.

    Args:
        hierarchy: Average in two levels: uncompressed inside a node, then compressed between nodes. Pass a
            ``DeviceMesh`` of two dimensions, or two groups: first between nodes, second inside one. Default: None, one
            level. Use it if links are much faster inside nodes. Each rank compresses its part of the parameters, with
            scales of its own; ``momentum()`` and ``worker_error()`` return that part. Marsit's topology is then one of
            nodes. Not with ``overlap``, several ``buckets`` or ``fully_shard``. For ``OneBitAdam``, ``OneBitLamb``,
            ``MarsitSGD``, ``MarsitAdam``.
        hierarchy_dtype: Dtype in which gradients are sent inside a node: ``torch.float32`` (default) or, with a
            ``hierarchy``, ``torch.bfloat16``.
        model_parallel: Ranks that hold the other parts of this copy of the model; ``process_group`` then averages over
            the copies of this part. With tensor parallelism pass a group, or a ``DeviceMesh`` of one dimension; with
            pipeline stages too, a mesh of two dimensions, or two groups, tensor parallelism last. Default: None; this
            rank has the whole model, or shards of ``fully_shard``. Use it on all ranks: one that passes None leaves the
            others waiting. All parts are clipped by one norm, and skip a step together. DTensors are shards or replicas
            by their placements; a plain tensor is a shard if its attribute ``tensor_model_parallel`` is True, as
            Megatron sets it, else a replica. Replicas count once in a norm, and ranks compare them in every 64th step.
            Not with ``overlap`` or several ``buckets``. For ``AdamW``, ``Lamb``, ``OneBitAdam``, ``OneBitLamb``.
        overlap: Compress and send each bucket during the backward pass, as soon as its gradients are ready. Default:
            False. Use it on slow networks; on fast ones, or if processes share cores, steps take longer. Run all but
            the last of several backward passes per step in ``with optimizer.no_sync()``. The result is, bit for bit,
            that of as many ``buckets`` without it. Not with ``max_grad_norm``, ``capturable`` or one global scale. For
            ``OneBitAdam``, ``OneBitLamb``.
        buckets: Number of equal ranges of parameters, each compressed and sent by itself. None: 1, or 4 with
            ``overlap``. For ``OneBitAdam``, ``OneBitLamb``.
        block_size: Elements per block of the flat layout, in which each tensor begins a new block: 1024, 512, 256 or
            128. None: the largest that adds less than 1 % of padding, else the one that adds least.
        broadcast_parameters: Copy rank 0's parameters to all ranks first. Default: False; an error if any differ.
        capturable: Let CUDA graphs capture steps: those of the compression stage, and all of ``AdamW`` and ``Lamb`` on
            a single rank. Default: False. Use it for small models, whose steps wait for the host. Needs
            ``Faults(nonfinite="skip")``. Learning rates become tensors on the device, which schedulers fill in place,
            and which ranks do not compare. A replay cannot renew a shared variance: take one step in 50 outside the
            graph. For ``AdamW``, ``Lamb``, ``OneBitAdam``, ``OneBitLamb``.
        average_dtype: Dtype in which gradients that are not compressed travel beside those that are:
            ``torch.bfloat16`` (default), as by DDP's bf16_compress_hook, or ``torch.float32``. For ``OneBitMuon``.
        release_gradients: Update parameters during the backward pass, 1/32 of them at a time, and free their gradients,
            so that about 1/32 of all gradients is in memory at once. Default: False. ``step()`` then completes the
            update; the result is the same bit for bit. Set learning rates before the backward pass. Run all but the
            last of several backward passes per step in ``with optimizer.no_sync()``, which accumulates gradients.
            Afterwards no gradients are left to clip, scale or drop: not with ``max_grad_norm``, ``nonfinite="raise"``
            or ``capturable``. For ``AdamW`` on a single rank.
    """

    hierarchy: DeviceMesh | tuple[Any, Any] | None = None
    hierarchy_dtype: torch.dtype = torch.float32
    model_parallel: Ranks | tuple[Any, Any] = None
    overlap: bool = False
    buckets: int | None = None
    block_size: int | None = None
    broadcast_parameters: bool = False
    capturable: bool = False
    average_dtype: torch.dtype = torch.bfloat16
    release_gradients: bool = False

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        if self.hierarchy_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"hierarchy_dtype must be torch.float32 or torch.bfloat16, got {self.hierarchy_dtype!r}")
        if self.average_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"average_dtype must be torch.bfloat16 or torch.float32, got {self.average_dtype!r}")
        if self.block_size is not None and not (is_int(self.block_size) and self.block_size in BLOCK_SIZES):
            raise ValueError(f"block_size must be one of {BLOCK_SIZES} or None, got {self.block_size!r}")
        if self.buckets is not None and not (is_int(self.buckets) and 1 <= self.buckets <= MOST_BUCKETS):
            raise ValueError(f"buckets must be an int from 1 to {MOST_BUCKETS:,}, or None, got {self.buckets!r}")


@explaining
@dataclass(frozen=True, kw_only=True)
class Faults:
    """What to do about updates that would ruin a run.

    Args:
        nonfinite: What to do if a gradient on any rank is NaN, infinite, or larger than 1.8e19, whose square overflows
            float32. ``"skip"`` (default): all ranks leave their parameters unchanged, count the step in
            ``stats()["skipped_steps"]``, and warn. ``"raise"``: all ranks raise NonFiniteGradientError; each step then
            waits for the device. ``ZeroOneAdam`` and Marsit act at the end of a round: what ranks have accumulated
            enters the next round, without its nonfinite elements. ``AdamW`` and ``Lamb`` on a single rank, with
            ``"skip"``, leave out only these elements, and take the step.
        guard: What to do if the norm of a compressed update is more than 10 times that of the last uncompressed one, or
            of pure noise if that is larger. (``OneBitLamb`` with a shared variance compares with an average step. The
            limit is 300 times if there was no uncompressed update, or if momentum is not preconditioned and scales are
            not by block.) ``"rewarm"``: all ranks skip the update, drop what exceeds an Adam step, and take
            ``rewarm_steps`` uncompressed steps; needs beta1 > 0. ``"warn"``: they skip it, add it to the residual, and
            warn. ``"off"``: no check. None: ``"rewarm"``. Use ``"warn"`` only to investigate: training may stand still.
            The check sends no bytes (``optim.guard.DivergenceGuard``). For ``OneBitAdam``, ``OneBitLamb``.
        rewarm_steps: Number of uncompressed updates that ``guard="rewarm"`` takes; the variance averages over as many.
            Default: 50; at least 10. For ``OneBitAdam``, ``OneBitLamb``.
    """

    nonfinite: Literal["skip", "raise"] = "skip"
    guard: Guard | None = None
    rewarm_steps: int = 50

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        check_count("rewarm_steps", self.rewarm_steps)
        if self.rewarm_steps < LEAST_REWARM_STEPS:
            raise ValueError(
                f"rewarm_steps must be at least {LEAST_REWARM_STEPS}, got {self.rewarm_steps}: "
                "of so many updates the variance is made anew"
            )
        if self.guard not in (None, "rewarm") and self.rewarm_steps != Faults.rewarm_steps:
            raise ValueError(
                f"rewarm_steps must be {Faults.rewarm_steps} with guard={self.guard!r}, got {self.rewarm_steps}: "
                "nothing warms up again"
            )


@explaining
@dataclass(frozen=True, kw_only=True)
class Freeze:
    """When to freeze the variance v, or which frozen one to take: ``freeze_step=Freeze(...)``.

    For ``OneBitAdam`` and ``OneBitLamb``.

    Args:
        step: Number of uncompressed updates before the freeze. ``"auto"`` (default): until v is stable, by the rule of
            1-bit Adam's Algorithm 1 (``optim.freezing.AutoFreeze``); not with a ``warm_start``. 0 needs a
            ``warm_start``, or a checkpoint loaded before the first step.
        lr_warmup_steps: With ``"auto"``: number of updates in which the learning rate rises, and v is not examined.
            Default: 0.
        deadline: With ``"auto"``: number of updates after which v is frozen even if unstable, with a warning. None:
            ``lr_warmup_steps`` + 10/(1 - beta2), so 10,000 more with beta2 = 0.999. Raise it if training then suffers.
        warm_start: ``state_dict()`` of an earlier run of this model, on any number of ranks; the same on all ranks. Its
            variance replaces that of the warm-up, as do LAMB's average coefficients and momentum scales; momentum and
            residuals are not used. ``OneBitAdam`` also accepts one of ``torch.optim.AdamW``. Default: None. Use it with
            ``step=0`` to compress from the first step.
    """

    step: int | Literal["auto"] = "auto"
    lr_warmup_steps: int = 0
    deadline: int | None = None
    warm_start: Mapping[str, Any] | None = None


@explaining
@dataclass(frozen=True, kw_only=True)
class Layerwise:
    """LAMB's coefficient of each layer, and what 1-bit LAMB makes of it while it compresses.

    LAMB multiplies the update u of each tensor x ("layer") by c = |x|/|u|, clipped (not after a freeze). Groups may set
    c_min, c_max, beta3, r_min, r_max and r_threshold. c_min = c_max = 1 turns this adaptation off, as in Adam;
    ``OneBitLamb`` with a frozen variance also needs beta3 = 0 and r_min = r_max = 1. ``Lamb`` has only c_min, c_max and
    beta3; the ratio r needs ``OneBitLamb`` and a frozen variance.

    Args:
        c_min: Lower bound of c (1-bit LAMB, eq. 2), at least 0. Default: 0.01.
        c_max: Upper bound of c, at least 1e-30 and c_min. Default: 10.
        beta3: Decay, in [0, 1), of the moving average c_avg of c, which is frozen with the variance. Default: 0.9. It
            starts at 0, and reaches 1 - beta3^F of c in F updates: if F is small, freeze later or lower beta3. With a
            shared variance beta3 is the decay of the mean of |u|^2. ``Lamb`` stores c_avg only for ``OneBitLamb`` to
            continue from its checkpoint.
        r_min: Lower bound of r, the ratio of the frozen variance to a fresh one (1-bit LAMB, Algorithm 1, line 19).
            Default: 0.5.
        r_max: Upper bound of r. Default: 4.
        r_threshold: Fraction, in [0, 1), by which r may change per step. Default: 0.1.
        adaptive: Adapt c after the freeze: c = r c_avg. Default: True. Use False for the constant c = c_avg (section
            3.4, "LAMB + basic 1-bit"), with a third less state; not with a shared variance.
        momentum_scaling: Scale the momentum of each layer to the same size before compression (section 4.3). None:
            True, but False with ``Numerics(precondition=True)``, where True is refused.
    """

    c_min: float = 0.01
    c_max: float = 10.0
    beta3: float = 0.9
    r_min: float = 0.5
    r_max: float = 4.0
    r_threshold: float = 0.1
    adaptive: bool = True
    momentum_scaling: bool | None = None


NUMERICS, WIRE, FAULTS, LAYERWISE = Numerics(), Wire(), Faults(), Layerwise()
"""The usual ones."""
