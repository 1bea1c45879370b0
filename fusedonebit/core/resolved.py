"""What an optimizer makes of the option objects: its settings, in which its own defaults stand for each None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from ..triton_kernels import ScaleScope
from .formats import Formats, formats_of
from .options import check_choice, check_flag, is_number
from .settings import DeadCoordinates, Faults, Guard, Numerics, ScaleNorm, Wire

HANDED_ON = ("mask", "hierarchy", "model_parallel")
"""What goes to parameters and ranks, and is compared with those: None in resolved objects."""

_T = TypeVar("_T", bound="Options")


@dataclass(frozen=True, kw_only=True)
class ResolvedNumerics(Numerics):
    """``Numerics``, of which an optimizer has resolved what None stands for."""

    scale_norm: ScaleNorm = "contractive"
    scale_scope: ScaleScope = "block"
    precondition: bool = False
    dead_coordinates: DeadCoordinates = "mean"
    bias_correction: bool = False
    serve_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class ResolvedFaults(Faults):
    """``Faults``, of which the same holds."""

    guard: Guard = "rewarm"


@dataclass(frozen=True, kw_only=True)
class Options:
    """All settings of an optimizer, equal on all ranks: resolved option objects, and what is passed beside them."""

    numerics: ResolvedNumerics
    wire: Wire
    faults: ResolvedFaults
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

    usual: ClassVar[dict[str, Any]] = {}
    """Its own defaults, by name, where resolved objects have others."""

    recorded: ClassVar[tuple[str, ...]] = ("bias_correction", "eps_inside_sqrt", "stochastic_rounding")
    """What changes what a step computes, and a checkpoint does not compare otherwise: it says them."""

    @cached_property
    def formats(self) -> Formats:
        """Return in which formats numbers are stored, once settings are checked."""
        return formats_of(self.numerics)

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
        """Resolve an optimizer's arguments: option objects, and what stands beside them.

        Raises:
            TypeError, ValueError: for an object of another type, and for what the optimizer can't do.
        """
        kinds, resolved = get_type_hints(cls), dict[str, Any]()
        for argument, kind in cls.objects.items():
            value: Any = arguments.get(argument, kind())
            if not isinstance(value, kind):
                raise TypeError(
                    f"{argument} must be a fusedonebit.{kind.__name__}, got {type(value).__name__}; leave it out or "
                    f"pass fusedonebit.{kind.__name__}()"
                )
            said = dict(cls.usual)
            for field in fields(value):
                given, usual = getattr(value, field.name), field.default
                same = given is usual or (type(given) is type(usual) and given == usual)
                if not same and field.name not in cls.takes:
                    raise ValueError(
                        f"{field.name} must be {usual!r} with {optimizer}, got {given!r}: it has no such option"
                    )
                if (given is not None or usual is not None) and field.name not in HANDED_ON:
                    said[field.name] = given
            target = kinds[argument]
            target = type(value) if isinstance(value, target) else target  # one of a subclass stays one
            resolved[argument] = target(**{name: said[name] for name in names_of(target) & said.keys()})
        return cls(**{**arguments, **resolved})

    def values(self) -> dict[str, Any]:
        """Return each setting by its name alone, as ranks compare them and checkpoints tell them."""
        # In this order ranks name the first that differs, and records are hashed.
        objects = [getattr(self, argument) for argument in reversed(self.objects)]
        names = [(each, field.name) for each in (*objects, self) for field in fields(each)]
        return {name: getattr(each, name) for each, name in names if name not in self.objects}

    def names(self) -> tuple[str, ...]:
        """Return what the optimizer takes, for all groups together, but for masks and groups of ranks."""
        others = names_of(*self.objects.values()) - self.takes | {*self.grouped, *HANDED_ON}
        return tuple(name for name in self.values() if name not in others)

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        if self.max_grad_norm is not None and not (is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise ValueError(f"max_grad_norm must be a finite number > 0 or None, got {self.max_grad_norm!r}")
        objects = [getattr(self, argument) for argument in self.objects]
        for each in (*reversed(objects), self):
            hints = get_type_hints(type(each))
            for field in fields(each):
                value, hint = getattr(each, field.name), hints[field.name]
                if get_origin(hint) is Literal:
                    check_choice(field.name, value, get_args(hint))
                elif hint is bool or (hint == bool | None and value is not None):
                    check_flag(field.name, value)
        for each in objects:
            if hasattr(each, "check"):
                each.check()


def names_of(*kinds: type) -> frozenset[str]:
    """Return the names of the fields of option objects."""
    return frozenset(field.name for kind in kinds for field in fields(kind))
