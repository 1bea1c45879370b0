"""Options of 0/1 Adam."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from ..core.options import check_choice
from ..core.resolved import Options
from ..core.settings import NUMERICS, ScaleNorm
from .local_steps import RoundOptions
from .policies import SyncPolicy, VariancePolicy, check_policies

_T = TypeVar("_T", bound="ZeroOneOptions")


@dataclass(frozen=True, kw_only=True)
class ZeroOneOptions(RoundOptions):
    """Settings of 0/1 Adam. See ``ZeroOneAdam`` for their meaning."""

    variance_policy: VariancePolicy | None
    sync_policy: SyncPolicy

    usual: ClassVar[dict[str, Any]] = {"precondition": True, "bias_correction": True, "variance_floor": 1e-3}
    takes: ClassVar[frozenset[str]] = (Options.takes - {"eps_inside_sqrt", "stochastic_rounding"}) | {
        *("scale_norm", "scale_scope", "precondition", "variance_floor", "serve_alone", "hierarchy")
    }
    recorded: ClassVar[tuple[str, ...]] = (
        *Options.recorded,
        "variance_policy",
        "sync_policy",
        "scale_norm",
        "scale_scope",
        "variance_floor",
    )

    @property
    def owns(self) -> bool:
        """Return whether each worker has a variance of its own, which nothing renews."""
        return self.variance_policy is None

    @classmethod
    def of(cls: type[_T], optimizer: str, arguments: Mapping[str, Any]) -> _T:
        """Settle the arguments; workers with variances of their own have other defaults.

        Raises:
            ValueError: for what only a shared variance has.
        """
        made, given = super().of(optimizer, arguments), arguments.get("numerics", NUMERICS)
        if not made.owns:
            return made
        for name, usual in (("precondition", True), ("variance_floor", 0.0)):
            value = getattr(given, name)
            if value is not None and (value != usual or isinstance(value, bool) is not isinstance(usual, bool)):
                raise ValueError(
                    f"{name} must be {usual!r} or None where workers have variances of their own, got "
                    f"{value!r}; pass a variance_policy, such as policies.DoublingVariance()"
                )
        norm: ScaleNorm = "relaxed" if given.scale_norm is None else given.scale_norm
        return replace(made, numerics=replace(made.numerics, scale_norm=norm, variance_floor=0.0))

    @property
    def coefficient_floor(self) -> float:
        """Return ``variance_floor``, which is part of denominators."""
        return self.numerics.variance_floor or 0.0

    def check_levels(self) -> None:
        raise ValueError("hierarchy must be None: between two synchronisations ranks of a node would move apart")

    def check(self) -> None:
        """Raise TypeError or ValueError for the first setting that makes no sense."""
        check_choice("scale_scope", self.numerics.scale_scope, ("global", "layer", "block"))
        super().check()
        check_policies(self.variance_policy, self.sync_policy)
