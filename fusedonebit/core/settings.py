"""The option objects that all optimizers share, and what an optimizer makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm import Transport
from ..triton_kernels import BLOCK_SIZES, ScaleScope
from .arguments import explaining
from .options import check_choice, check_count, check_flag, is_int, is_number, is_share

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


@explaining
@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Numerics of an optimizer: how it compresses, what it divides by, and in which formats it keeps its state.

    All ranks must pass the same, else all raise ValueError. An option that only some optimizers have says which; the
    others raise ValueError for any value but its default. None stands for the optimizer's own default.

    m is the momentum, v the variance (the moving average of squared gradients), and m/denom Adam's update,
    m/(sqrt(v) + eps). v is *frozen* with a ``freeze_step`` or ``variance="frozen"``; else it is *shared*: renewed
    every few steps while updates travel as bits. docs/numerics.md measures what these options do.

    Args:
        scale_norm: How large the one magnitude is that stands for d compressed elements c. ``"l1"``: mean |c| (1-bit
            Adam's paper). ``"l2"``: |c|_2/sqrt(d) (DeepSpeed), whose residual can be larger than c. ``"contractive"``:
            min(l2, 1.9 l1), whose residual is always smaller than c. ``"relaxed"``: min(1.3 l2, 1.9 l1), also a
            contraction, whose residuals are sent sooner, but where workers agree steps are up to 1.3 times as long;
            with a shared v the first 0.25/(1 - beta2) steps after the warm-up are ``"contractive"`` instead. None:
            ``"relaxed"`` with a shared v and with ``ZeroOneAdam`` without a ``variance_policy``, else
            ``"contractive"``. For ``OneBitAdam``, ``OneBitLamb`` and ``ZeroOneAdam``.
        scale_scope: Which elements share a scale: all (``"global"``; only with one bucket), those of a tensor
            (``"layer"``), of a block of at most 4096 elements of a tensor (``"block"``; 0.8 % more bytes), or of a
            bucket (``"bucket"``; not with ``ZeroOneAdam``). None: ``"block"``. For the same optimizers.
        precondition: Compress m/denom instead of m, so that all coordinates are of one size; error feedback stays
            exact, in units of the update. Denominators of a frozen v are then at least a thousandth of their median.
            False is what the papers do. None: True, but False with ``OneBitLamb`` and a frozen v, which scales the
            momentum by layer instead. For the same optimizers; must be True with ``OneBitLamb`` and a shared v, and
            with ``ZeroOneAdam`` without a ``variance_policy``, where each worker has a v of its own.
        ternary: Send two bits per parameter, the second for "exactly zero" (Tarasov & Ershov, section 4): elements that
            are 0 on all ranks stay 0, and scales are means over the others. For gradients with many exact zeros;
            doubles the bytes on the wire. For ``OneBitAdam`` and ``OneBitLamb``.
        variance_floor: Lower bound of v after the warm-up, as a share in [0, 1) of its tensor's mean v. Raise it if
            updates become too long for coordinates that had small gradients in the warm-up. None: 0.1 with a shared v,
            0.01 with a frozen one; 0 with ``OneBitAdam`` and ``precondition=False``. With ``ZeroOneAdam`` and a
            ``variance_policy`` the share of the mean is added instead, to denominators of compressed rounds, sqrt(v +
            share * mean); rounds that renew v divide by Adam's own, and until a tensor has had a gradient in one, only
            weight decay moves it; None is 0.001 there, and 0, without a policy, is all that is allowed.
        dead_coordinates: What replaces v == 0 at the freeze, of coordinates that had no gradient in the warm-up.
            ``"mean"``: the mean of their tensor's v > 0; a tensor that has none is left out of the compression stage,
            or, with a shared v, waits for its first gradient. ``"keep"``: nothing, so that they move by lr * m/eps; for
            comparisons, only with a frozen v that has no floor, and ``precondition=False``. None: ``"mean"``. For
            ``OneBitAdam`` and ``OneBitLamb``.
        bias_correction: Whether m and v are divided by 1 - beta^t, as Adam does. The correction of v ends at the
            freeze, or when a shared v begins; in ``ZeroOneAdam`` with a ``variance_policy`` t counts v's renewals.
            None: True, but False with ``Lamb`` and with ``OneBitLamb`` and a frozen v, as LAMB's equation (2) has none.
            Not for ``OneBitLion`` and ``MarsitSGD``, which have no v.
        eps_inside_sqrt: Divide by sqrt(v + eps), as LAMB's equation (2) is printed, instead of sqrt(v) + eps. With
            ``OneBitAdam`` in the compression stage alone (Tarasov & Ershov, eq. 2). For ``OneBitAdam``, ``OneBitLamb``
            and ``Lamb``.
        serve_alone: With one rank, compress twice, as a worker and as a server with a residual of its own, as several
            ranks do. To reproduce DeepSpeed's runs to the bit; costs five more device operations a step, and 4 bytes
            per parameter. With several ranks, or a ``hierarchy``, there is always a server. None: False, but True with
            DeepSpeed's presets. For ``OneBitAdam``, ``OneBitLamb`` and ``ZeroOneAdam``.
        frozen_dtype: Dtype of v in the compression stage: ``torch.float32`` or ``torch.bfloat16``, which saves 2 bytes
            per parameter of memory, and of reading in each step, for denominators that are off by up to 0.2 %, alike on
            all ranks. With a shared v it saves 4, and 6 of reading and writing: each worker's moving average of its own
            squared gradients is bfloat16 as well, rounded stochastically. The stage allocates 2 bytes per parameter
            when it begins, and frees 4. For ``OneBitAdam`` and ``OneBitLamb``; a ``state`` of fewer bits overrides it.
        master_weights: Whether updates of bfloat16 and float16 parameters are added to float32 copies, of which
            parameters are the rounded values; without them an update below half a unit in the last place is lost. True:
            keep the copies, 4 bytes per parameter. They take over what you write into parameters, unless it goes
            through ``p.data.copy_`` or the like, of which torch keeps no trace. ``"16bit"``: keep what bfloat16
            parameters lack of the copies, 2 bytes per parameter: the same masters bit for bit (of two bfloat16 equally
            near, parameters take the one of larger magnitude). ``"8bit"``: keep only the upper 8 of these bits, 1 byte
            per parameter, rounded stochastically: masters of 24 bits. With the last two whatever you write into
            parameters counts, plus the correction that is there, half a unit in the last place at most; they are for
            ``AdamW``, ``OneBitAdam`` and ``OneBitLion``, and refuse float16. Float32 parameters beside have no masters.
            Checkpoints have float32 masters with any of the three.
        stochastic_rounding: Round updated bfloat16 parameters up or down at random, so that they are right on average,
            instead of to nearest (Gupta et al., 2015; for bfloat16 Zamirai et al., 2020). An alternative to
            ``master_weights`` that takes no memory, and excludes it. Random bits depend only on the number of updates
            and the element: they are the same on all ranks and after a resumption. Float32 parameters are not rounded;
            float16 ones, or none of bfloat16, are refused. Not with ``ZeroOneAdam``, nor with several local steps.
        state: Format of moments, residuals and squares, of ``AdamW``, ``Lamb`` and ``OneBitAdam``: ``"fp32"``,
            ``"bf16"``, which halves their bytes, or ``"8bit"``, which quarters them; each step also reads and writes as
            much less. Both are rounded stochastically, by the number of updates and the element alone. 8 bits are
            floats with three bits of mantissa and a shared exponent per block: values from the block's largest down to
            2^-32 of it where they can't be negative, 2^-16 where they can. An element whose gradients are below a
            ten-thousandth of its block's largest then hardly moves, and an outlier of 1e7 times the others stops its
            block: pass ``max_grad_norm``. ``"8bit"`` needs ``precondition`` with ``OneBitAdam``. Checkpoints have
            float32, and saving one rounds ``OneBitAdam``'s residuals once more.
        maximize: Ascend instead of descend, as in torch. Groups may set it.
        mask: Parameters mapped to bool tensors of their shape (a DTensor's shard), equal on all ranks: elements with
            False never move, and count in no norm. Parameters that are left out move everywhere. TypeError or
            ValueError for other tensors.
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
    """Layout of the parameters, and how and when ranks communicate.

    As with ``Numerics``, all ranks must pass the same, and optimizers refuse options that they do not have.

    Args:
        hierarchy: Two levels of ranks, the first between nodes, the second inside one: a ``DeviceMesh`` of two
            dimensions, or two groups. Gradients are averaged uncompressed inside a node, where bandwidth is cheap, and
            compressed between nodes (``comm.parted``); each rank compresses its part of the parameters, with scales of
            its own, and ``momentum()`` and ``worker_error()`` are of that part. Marsit's topology is then one of nodes.
            Not with ``overlap``, several ``buckets`` or ``fully_shard``. None: one level. For ``OneBitAdam``,
            ``OneBitLamb``, ``MarsitSGD`` and ``MarsitAdam``.
        hierarchy_dtype: Dtype of gradients on their way inside a node, ``torch.float32`` or ``torch.bfloat16``; the
            latter only with a ``hierarchy``.
        model_parallel: The ranks that hold the other parts of this rank's model, where ``process_group`` averages over
            its replicas. With tensor parallelism a group, or a ``DeviceMesh`` of one dimension; with pipeline stages,
            too, a mesh of two dimensions, or two groups, tensor parallelism last. All parts are clipped by one norm,
            and skip a step together. DTensors are shards or replicas as their placements say; a plain tensor is a shard
            if it has an attribute ``tensor_model_parallel`` that is True, as Megatron's layers set it, else a replica.
            Replicas count once in a norm, and ranks compare them in every 64th step. Pass it on all ranks: one that
            passes None leaves the others waiting. Not with ``overlap`` or several ``buckets``. None: this rank holds
            the whole model, or the shards of it that ``fully_shard`` has left it. For ``AdamW``, ``Lamb``,
            ``OneBitAdam`` and ``OneBitLamb``.
        overlap: Compress and send each bucket in the backward pass, as soon as its gradients are there, for
            ``OneBitAdam`` and ``OneBitLamb``. All but the last of several backward passes before a step belong in
            ``with optimizer.no_sync()``. The result is the same, bit for bit, as with as many ``buckets`` without it.
            On a fast network, or where hosts share cores, it takes longer. Not with ``max_grad_norm``, ``capturable``
            or one global scale.
        buckets: Number of equal ranges into which the parameters are cut, each compressed and sent by itself. None: 1,
            or 4 with ``overlap``. For ``OneBitAdam`` and ``OneBitLamb``.
        block_size: Elements per block of the flat layout, in which each tensor begins a new block: 1024, 512, 256 or
            128. None: the largest that adds less than 1 % of padding, else the one that adds least.
        broadcast_parameters: Begin with rank 0's parameters on all ranks. False: raise an error if they differ.
        capturable: Let CUDA graphs capture steps, which then need ``Faults(nonfinite="skip")``: those of the
            compression stage, and all of ``AdamW`` and ``Lamb`` on one rank alone. Learning rates become tensors on the
            device, which schedulers fill in place, and which ranks no longer compare. No replay can renew a shared
            variance: take one step in 50 outside the graph. For ``AdamW``, ``Lamb``, ``OneBitAdam`` and ``OneBitLamb``.
        release_gradients: Update parameters in the backward pass, a 32nd of them at a time, as soon as their gradients
            are there, and free those, so that about a 32nd of all gradients is in memory at once. For ``AdamW`` on one
            rank alone. ``step()`` then ends the update, whose result is the same, bit for bit. Set learning rates
            before the backward pass. All but the last of several backward passes before a step belong in ``with
            optimizer.no_sync()``, in which gradients accumulate. After the backward pass nothing is left to clip, scale
            or drop: not with ``max_grad_norm``, ``nonfinite="raise"`` or ``capturable``.
    """

    hierarchy: DeviceMesh | tuple[Any, Any] | None = None
    hierarchy_dtype: torch.dtype = torch.float32
    model_parallel: Ranks | tuple[Any, Any] = None
    overlap: bool = False
    buckets: int | None = None
    block_size: int | None = None
    broadcast_parameters: bool = False
    capturable: bool = False
    release_gradients: bool = False

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        if self.hierarchy_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"hierarchy_dtype must be torch.float32 or torch.bfloat16, got {self.hierarchy_dtype!r}")
        if self.block_size is not None and not (is_int(self.block_size) and self.block_size in BLOCK_SIZES):
            raise ValueError(f"block_size must be one of {BLOCK_SIZES} or None, got {self.block_size!r}")
        if self.buckets is not None and not (is_int(self.buckets) and self.buckets >= 1):
            raise ValueError(f"buckets must be an int >= 1 or None, got {self.buckets!r}")


@explaining
@dataclass(frozen=True, kw_only=True)
class Faults:
    """Responses to updates that would spoil a run.

    Args:
        nonfinite: What follows a gradient that is NaN, infinite, or larger than 1.8e19 (float32 can't hold its square)
            on any rank. ``"skip"``: all ranks leave their parameters as they are, count the step in
            ``stats()["skipped_steps"]``, and warn. ``"raise"``: all ranks raise NonFiniteGradientError; costs a wait
            for the device in each step. Optimizers that work in rounds do so at a round's end: what workers have added
            up is kept for the next round, but for elements that are not finite. ``AdamW`` and ``Lamb`` on one rank
            alone, with ``"skip"``, leave out only the elements, and take the step.
        guard: What follows a compressed update that is far too large, for ``OneBitAdam`` and ``OneBitLamb``: one whose
            norm is more than 10 times that of the last uncompressed update, or of pure noise where that is more; of
            ``OneBitLamb`` with a shared variance, that of an average step. (300 times where no uncompressed update came
            before, and where momentum is not preconditioned and scales are not by block.) See
            ``optim.guard.DivergenceGuard``; it costs no bytes. ``"rewarm"``: all ranks skip the update, drop what goes
            beyond a step of Adam's, and take ``rewarm_steps`` uncompressed steps; needs beta1 > 0. ``"warn"``: they
            skip it, keep it as residual, and warn; training may stand still, so this is for looking into a run.
            ``"off"``: there is no check. None: ``"rewarm"``.
        rewarm_steps: Uncompressed updates of such a warm-up, and the length of the variance's memory in it.
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
    """The time of the freeze of the variance, or the source of a frozen one, for ``freeze_step=Freeze(...)``.

    Args:
        step: Number of uncompressed updates before the freeze. 0 needs a ``warm_start``, or a checkpoint loaded before
            the first step. ``"auto"``: until v is stable, as 1-bit Adam's Algorithm 1 decides
            (``optim.freezing.AutoFreeze``); not with a ``warm_start``.
        lr_warmup_steps: With ``"auto"``: updates in which the learning rate rises, and v is not looked at yet.
        deadline: With ``"auto"``: number of updates after which v is frozen even if it is not stable, with a warning.
            None: ``lr_warmup_steps`` + 10/(1 - beta2), so 10,000 more with beta2 = 0.999.
        warm_start: ``state_dict()`` of an earlier run of this model, with any number of ranks, the same on all ranks.
            Its variance replaces that of the warm-up, as do LAMB's average coefficients and momentum scales;
            momentum and residuals are not taken. ``OneBitAdam`` also takes ``torch.optim.AdamW``'s. With ``step=0``
            compression begins at once.
    """

    step: int | Literal["auto"] = "auto"
    lr_warmup_steps: int = 0
    deadline: int | None = None
    warm_start: Mapping[str, Any] | None = None


@explaining
@dataclass(frozen=True, kw_only=True)
class Layerwise:
    """Layerwise coefficients of LAMB, and what becomes of them while 1-bit LAMB compresses.

    LAMB multiplies the update u of each tensor ("layer") by c = |x|/|u|, clipped. Groups may set c_min, c_max,
    beta3, r_min, r_max and r_threshold. A group with (1, 1) as c_min and c_max has no adaptation, as Adam (with
    ``OneBitLamb`` and a frozen variance it also needs beta3 = 0 and (1, 1) as r_min and r_max). ``Lamb`` has c_min,
    c_max and beta3 alone; what speaks of the ratio r is for ``OneBitLamb`` with a frozen variance.

    Args:
        c_min: Lower bound of c (1-bit LAMB, eq. 2), a number >= 0. With a frozen variance it acts in the warm-up alone.
        c_max: Upper bound of c, at least 1e-30 and c_min; likewise.
        beta3: Decay, in [0, 1), of the moving average c_avg of the coefficients, which is frozen with the variance.
            c_avg starts at 0, so that after F updates it has reached 1 - beta3^F of the coefficients: freeze later, or
            take a smaller beta3. With a shared variance it is the decay of the mean of |u|^2. ``Lamb`` only keeps c_avg
            for an ``OneBitLamb`` that continues from its checkpoint.
        r_min: Lower bound of r, the ratio of the frozen variance to a fresh one (1-bit LAMB, Algorithm 1, line 19).
        r_max: Upper bound of r.
        r_threshold: Share, in [0, 1), by which r may change in one step.
        adaptive: Let c follow after the freeze: c = r c_avg. False: c = c_avg, which stays (section 3.4, "LAMB + basic
            1-bit"); five kernels a step, and a third less state. Must be True with a shared variance.
        momentum_scaling: Scale the momentum of each layer to the same size before it is compressed (section 4.3). None:
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

_HANDED_ON = ("mask", "hierarchy", "model_parallel")
"""What goes to parameters and ranks, and is compared with those."""

_T = TypeVar("_T", bound="Options")


@dataclass(frozen=True, kw_only=True)
class Options(Numerics, Wire, Faults):
    """All settings of an optimizer, flat, equal on all ranks; its own default where an option object says None."""

    scale_norm: ScaleNorm = "contractive"
    scale_scope: ScaleScope = "block"
    precondition: bool = False
    dead_coordinates: DeadCoordinates = "mean"
    bias_correction: bool = False
    serve_alone: bool = False
    guard: Guard = "rewarm"
    max_grad_norm: float | None = None

    objects: ClassVar[dict[str, Any]] = {"numerics": Numerics, "wire": Wire, "faults": Faults}
    """Arguments of the optimizer that are option objects."""

    takes: ClassVar[frozenset[str]] = frozenset(
        [
            *("bias_correction", "eps_inside_sqrt", "master_weights", "stochastic_rounding", "maximize", "mask"),
            *("block_size", "broadcast_parameters", "capturable", "nonfinite", "model_parallel"),
        ]
    )
    """Their fields that the optimizer can do something with."""

    grouped: ClassVar[tuple[str, ...]] = ("maximize",)
    """Those that are defaults of groups, and are compared with these."""

    told: ClassVar[tuple[str, ...]] = ("bias_correction", "eps_inside_sqrt", "stochastic_rounding")
    """What changes what a step computes, and a checkpoint does not compare otherwise: it says them."""

    @property
    def moments_dtype(self) -> torch.dtype:
        """Return in which dtype moments are kept; in uint8 they are codes."""
        return {"bf16": torch.bfloat16, "8bit": torch.uint8}.get(self.state, torch.float32)

    @property
    def variance_dtype(self) -> torch.dtype:
        """Return in which dtype a variance is kept in the compression stage."""
        return self.frozen_dtype if self.state == "fp32" else self.moments_dtype

    @property
    def bucket_count(self) -> int:
        """Return into how many buckets the flat index space is cut."""
        return 1

    @property
    def coefficient_floor(self) -> float:
        """Return the share of the mean of v that coefficients add to it in denominators."""
        return 0.0

    def check_levels(self) -> None:
        """Raise ValueError if ranks can't average in two levels with these settings."""

    def check_group(self, group: Mapping[str, Any], name: str, world_size: int) -> None:
        """Raise ValueError for a hyper-parameter of the group of this ``name`` that makes no sense with them."""

    @classmethod
    def of(cls: type[_T], optimizer: str, arguments: Mapping[str, Any]) -> _T:
        """Settle an optimizer's arguments: option objects, and what stands beside them.

        Raises:
            TypeError, ValueError: for an object of another type, and for what the optimizer can't do.
        """
        said: dict[str, Any] = {}
        for argument, kind in cls.objects.items():
            value: Any = arguments.get(argument, kind())
            if not isinstance(value, kind):
                raise TypeError(
                    f"{argument} must be a fusedonebit.{kind.__name__}, got {type(value).__name__}; leave it out or "
                    f"pass fusedonebit.{kind.__name__}()"
                )
            for field in fields(value):
                given, usual = getattr(value, field.name), field.default
                same = given is usual or (type(given) is type(usual) and given == usual)
                if not same and field.name not in cls.takes:
                    raise ValueError(
                        f"{field.name} must be {usual!r} with {optimizer}, got {given!r}: it has no such option"
                    )
                if (given is not None or usual is not None) and field.name not in _HANDED_ON:
                    said[field.name] = given
        return cls(**said, **{name: value for name, value in arguments.items() if name not in cls.objects})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return what the optimizer takes, for all groups together, but for masks and groups of ranks."""
        others = names_of(*cls.objects.values()) - cls.takes | {*cls.grouped, *_HANDED_ON}
        return tuple(field.name for field in fields(cls) if field.name not in others)

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        if self.max_grad_norm is not None and not (is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise ValueError(f"max_grad_norm must be a finite number > 0 or None, got {self.max_grad_norm!r}")
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, hint = getattr(self, field.name), hints[field.name]
            if get_origin(hint) is Literal:
                check_choice(field.name, value, get_args(hint))
            elif hint is bool or (hint == bool | None and value is not None):
                check_flag(field.name, value)
        for kind in self.objects.values():
            if hasattr(kind, "check"):
                kind.check(self)


def values_of(options: Any) -> dict[str, Any]:
    """Return the fields of an option object, by name."""
    return {field.name: getattr(options, field.name) for field in fields(options)}


def names_of(*kinds: type) -> frozenset[str]:
    """Return the names of the fields of option objects."""
    return frozenset(field.name for kind in kinds for field in fields(kind))
