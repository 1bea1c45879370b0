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
    r"""What is computed, in which precision, and how it is compressed.

    Args:
        scale_norm: Of what is compressed, d elements c. ``"l1"``: mean \|c\| (1-bit Adam's paper). ``"l2"``:
            \|c\|_2/sqrt(d) (DeepSpeed). ``"contractive"``: min(l2, 1.9 l1), never larger than what it compresses.
            ``"relaxed"``: min(1.3 l2, 1.9 l1), with which residuals leave sooner, and servers' steps are up to 1.3
            times as long where workers agree; with a variance that lives only from
            0.25/(1 - beta2) steps after the warm-up on. None: ``"contractive"``, but ``"relaxed"`` with such a one, and
            with ``ZeroOneAdam`` without a ``variance_policy``.
        scale_scope: One scale for everything (``"global"``), per tensor (``"layer"``), per block of at most 4096
            elements of a tensor (``"block"``), or per bucket (``"bucket"``; not with ``ZeroOneAdam``). None:
            ``"block"``.
        precondition: Compress the update m/denom itself instead of m: a fixed scaling of each coordinate, so that the
            error feedback stays exact. Denominators of a frozen v are at least a thousandth of their median
            (``freezing.quantile_floor``). None: True, but False with ``OneBitLamb`` where v is frozen: its scaling of
            momenta by layer does better (docs/numerics.md).
        ternary: Two bits per parameter, sign and zero (Tarasov & Ershov, section 4): exact zeros stay zeros, and
            scales are means over what is not zero. For gradients with many exact zeros.
        variance_floor: What v has at least after the warm-up, as a share of its tensor's mean. None: 0.1 where v lives,
            0.01 with ``OneBitLamb``, or ``OneBitAdam`` where it preconditions; else 0. With ``ZeroOneAdam``
            denominators in rounds of bits are sqrt(v + share * mean), so that coordinates which renewals have hardly
            seen take no giant steps; a renewal divides by Adam's own, and a tensor that never had a gradient in one
            only decays until it has. None: 0.001; without a ``variance_policy`` there is no floor.
        dead_coordinates: What coordinates with v == 0 get at the freeze: ``"mean"`` of their tensor's other v; tensors
            without any take no further part, or, where v lives on, wait for one. ``"keep"``: 0. None: ``"mean"``.
        bias_correction: Adam's; that of v is frozen with it, done at the freeze where v lives on, or counts its
            renewals. None: True with Adam, False with LAMB, whose equation (2) has none, but True where v lives.
        eps_inside_sqrt: sqrt(v + eps), as LAMB's equation (2) is printed, instead of sqrt(v) + eps; with ``OneBitAdam``
            in the compression stage (Tarasov & Ershov, eq. 2).
        serve_alone: With world size 1 compress twice, as a worker and as a server, which keeps a residual, too; else
            once. With more ranks, or a ``hierarchy``, there are servers anyway. None: False, but True with DeepSpeed's
            presets.
        frozen_dtype: ``torch.bfloat16`` keeps the variance of the compression stage in 2 bytes instead of 4, and reads
            as many fewer in each step; denominators are then off by at most 0.2 %, alike on all ranks. Where v lives
            on, so are the worker's own squares kept, rounded stochastically. At its begin the stage allocates 2 bytes
            per parameter and frees 4.
        master_weights: Keep float32 copies of bfloat16 and float16 parameters, 4 bytes each, that updates go to;
            parameters are their rounded values. What you write into parameters, they take over, unless it goes through
            ``p.data.copy_`` or the like, of which torch keeps no trace. ``"16bit"``: of bfloat16 parameters keep what
            they lack of such a copy, instead of it: 2 bytes each, and the same masters bit for bit; where two bfloat16
            are as near, parameters take the one of larger magnitude. ``"8bit"``: keep the upper 8 of these bits, 1
            byte each, rounded stochastically: masters have 24 bits. Kernels read and write both where they move the
            parameter; float32 parameters beside have none. What you write into parameters counts, however you do it,
            but for the correction that is there: half a unit in the last place at most. Checkpoints have float32
            masters with any of the three. For ``AdamW``, ``OneBitAdam`` and ``OneBitLion``.
        stochastic_rounding: Round bfloat16 parameters up or down with odds that keep the mean, instead of to nearest,
            which loses updates below half a unit in the last place (Gupta et al., 2015; for bfloat16 Zamirai et al.,
            2020). Which way depends only on the number of updates and the element: it is the same on all ranks and
            after a resumption. float32 parameters are not rounded; float16 ones are refused.
        state: In what ``AdamW``, ``Lamb`` and ``OneBitAdam`` keep moments, residuals and squares: ``"bf16"`` is half
            the bytes, ``"8bit"`` a quarter: floats with three bits of mantissa, what is not negative in 32 octaves
            below its block's largest, what has a sign in 16. What is saved is moved less in each step as well, twice.
            They are rounded stochastically, with bits that depend on the number of updates and the element alone. With
            8 bits an element whose gradients are below a ten-thousandth of its block's largest hardly moves, and an
            outlier of 1e7 times the others holds up its block: pass ``max_grad_norm``. Checkpoints have float32; to
            save one rounds ``OneBitAdam``'s residuals once more.
        maximize: Ascend instead of descend. Groups may set it.
        mask: For some parameters a bool tensor of their shape; where False nothing ever moves, nor enters a norm.
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
    """How parameters are laid out, and how ranks send.

    Args:
        hierarchy: A ``DeviceMesh`` of two dimensions, between nodes and inside one, or those two groups: gradients are
            averaged inside a node, and compressed between nodes (``comm.parted``), each rank's part with scales
            of its own; ``momentum()`` and ``worker_error()`` tell of this rank's part. Marsit's workers, of which its
            topology speaks, are then nodes. None: no levels.
        hierarchy_dtype: In which gradients travel inside a node: ``torch.float32``, or ``torch.bfloat16``.
        model_parallel: The ranks that hold the other parts of this rank's model, where ``process_group`` averages over
            its replicas: a group, or a ``DeviceMesh`` of one dimension, of tensor parallelism; with pipeline stages a
            mesh of two dimensions, or two groups, that of the tensor parallelism last. All clip by one norm and skip a
            step together. Of DTensors placements say which are shards; of plain tensors those are with an attribute
            ``tensor_model_parallel`` that is True, as Megatron's layers set it. All others are replicas: they count
            once in a norm, and in every 64th step ranks compare them. All ranks pass theirs: one that passes None
            leaves the others waiting. None: this rank holds the whole model, or what
            ``fully_shard`` has left of it.
        overlap: Compress and send in the backward pass, each bucket as soon as its gradients are there; all but the
            last of several backward passes before a step belong in ``with optimizer.no_sync()``. The same result, bit
            for bit, as with as many ``buckets`` without it. On a fast network, or where hosts share cores, it takes
            longer.
        buckets: Into how many equal ranges the parameters are cut, each compressed by itself; None: 1, or 4 with
            ``overlap``.
        block_size: Elements per block of the layout; None chooses.
        broadcast_parameters: Start from rank 0's values instead of demanding equal ones.
        capturable: Steps can be captured in CUDA graphs in the compression stage, of one rank's ``AdamW`` and ``Lamb``
            always; learning rates become tensors on the device, which schedulers fill in place, and are no longer
            compared between ranks. A living variance is renewed in steps between replays: take one in each 50.
        release_gradients: For ``AdamW`` on one rank alone: update parameters in the backward pass, a 32nd of them at a
            time, as soon as their gradients are there, and free those. ``step()`` then ends the update; the result is
            the same, bit for bit. Set learning rates before the backward pass. All but the last of several backward
            passes before a step belong in ``with optimizer.no_sync()``, in which gradients accumulate. After the
            backward pass there is nothing left to clip, scale or drop.
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
    """What happens to updates that would spoil a run.

    Args:
        nonfinite: A NaN or Inf gradient on any rank: all ranks ``"skip"`` the step, or the round, or ``"raise"``, at a
            round's end. ``AdamW`` and ``Lamb`` on one rank alone leave such elements out, and take the step. Where
            workers move by themselves, what they have added up is kept for the next round, but for elements that are
            not finite.
        guard: A compressed update whose norm is 10 times (300 where momentum is not preconditioned, and its scales are
            not by block) that of the last uncompressed one, or of noise, is skipped on all ranks
            (``guard.DivergenceGuard``); then ``"rewarm"``: warm up again, without what goes beyond a step of Adam's.
            ``"warn"``: keep it as residual and warn; training may stand still. ``"off"``: no such check. None:
            ``"rewarm"``.
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
    """When the variance is frozen, where ``freeze_step`` is more than a number; or where it comes from.

    Args:
        step: Number of uncompressed updates, or ``"auto"``: until v is stable (``freezing.AutoFreeze``). 0 needs
            ``warm_start``, or a loaded checkpoint.
        lr_warmup_steps: With ``"auto"``: updates before v is looked at.
        deadline: With ``"auto"``: number of updates after which v is frozen, with a warning, even if it is not stable.
            None: ``lr_warmup_steps`` and 10/(1 - beta2) more, 10,000 with beta2 = 0.999.
        warm_start: ``state_dict()`` of an earlier run, of any world size: its variance replaces the warm-up, and of
            LAMB its average coefficients and momentum scales. ``OneBitAdam`` also takes ``torch.optim.AdamW``'s. With
            ``step=0`` compression starts at once.
    """

    step: int | Literal["auto"] = "auto"
    lr_warmup_steps: int = 0
    deadline: int | None = None
    warm_start: Mapping[str, Any] | None = None


@explaining
@dataclass(frozen=True, kw_only=True)
class Layerwise:
    """What LAMB scales each layer's update with, and how 1-bit LAMB goes on with it.

    Groups may set c_min, c_max, beta3, r_min, r_max and r_threshold. (1, 1) as c_min and c_max makes a group Adam's: no
    adaptation (with ``OneBitLamb`` and a frozen variance also beta3 = 0 and (1, 1) as r_min and r_max).

    Args:
        c_min: Least coefficient c (1-bit LAMB, eq. 2); of a frozen variance in the warm-up.
        c_max: Largest.
        beta3: Of the coefficients' moving average c_avg. It starts at 0: after F updates it has reached 1 - beta3^F of
            the coefficients. Only ``OneBitLamb`` uses it, also where it continues from a checkpoint of ``Lamb``; where
            the variance lives it is of the squares of updates' norms.
        r_min: Least ratio r (1-bit LAMB, Algorithm 1, line 19); this and what follows with ``OneBitLamb`` alone, and a
            frozen variance.
        r_max: Largest.
        r_threshold: By which share the ratio may change in one step.
        adaptive: After the freeze c = r c_avg; else c = c_avg (section 3.4, "LAMB + basic 1-bit"), five kernels, and a
            third less state.
        momentum_scaling: Scale each layer's momentum to the same size before it is compressed (section 4.3); None:
            unless it is preconditioned.
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
