"""Options of 1-bit LAMB."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.resolved import names_of
from ..core.settings import LAYERWISE, VARIANCE_FLOOR, Layerwise
from .lamb import LambOptions
from .onebit_options import OneBitOptions

RATIOS = ("r_min", "r_max", "r_threshold")
"""What bounds r, by the names that groups may give it."""


@dataclass(frozen=True, kw_only=True)
class OneBitLambOptions(OneBitOptions):
    """Settings of ``OneBitLamb``; ``variant`` names the formulas of coefficients, for ranks and checkpoints."""

    layerwise: Layerwise
    variant: str

    objects: ClassVar[dict[str, Any]] = {**OneBitOptions.objects, "layerwise": Layerwise}
    usual: ClassVar[dict[str, Any]] = {"variance_floor": VARIANCE_FLOOR}
    takes: ClassVar[frozenset[str]] = (OneBitOptions.takes - {"state"}) | names_of(Layerwise)
    grouped: ClassVar[tuple[str, ...]] = (*LambOptions.grouped, *RATIOS)
    recorded: ClassVar[tuple[str, ...]] = (*(name for name in OneBitOptions.recorded if name != "state"), "variant")

    @classmethod
    def of(cls, optimizer: str, arguments: Mapping[str, Any]) -> OneBitLambOptions:
        """Settle the arguments; a subclass of ``Layerwise`` says its ``variant``, the papers' says none."""
        return super().of(optimizer, {**arguments, "variant": getattr(arguments["layerwise"], "variant", "paper")})

    @property
    def ratios(self) -> bool:
        """Tell whether c follows the ratio r of the frozen variance to a fresh one."""
        return self.layerwise.adaptive and not self.shares_variance

    @property
    def algorithm(self) -> str:
        """Name which of the paper's two it is, as checkpoints do."""
        return "adaptive" if self.layerwise.adaptive else "frozen"

    @property
    def scales_momentum(self) -> bool:
        """Tell whether each layer has a unit of its own; preconditioned momentum has one per coordinate."""
        scaling = self.layerwise.momentum_scaling
        return not self.numerics.precondition if scaling is None else scaling

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        super().check()
        self.check_ratios(vars(self.layerwise))
        precondition, of = self.numerics.precondition, f'variance="{self.variance}"'
        if self.shares_variance and not precondition:
            raise ValueError(
                f"precondition must be True or None with {of}, got False: coefficients are of updates; or pass "
                'variance="frozen"'
            )
        if self.shares_variance and self.variant != "paper":
            raise ValueError(
                f"layerwise must be a Layerwise with {of}, got {type(self.layerwise).__name__}, whose variance is "
                "frozen; or pass freeze_step"
            )
        if self.shares_variance and not self.layerwise.adaptive:
            raise ValueError(
                f'adaptive must be True with {of}, got False: coefficients follow updates; or pass variance="frozen"'
            )
        if precondition and self.layerwise.momentum_scaling:
            raise ValueError(
                "momentum_scaling must be False or None with Numerics(precondition=True), got True: "
                "each coordinate already has a unit of its own"
            )

    def check_group(self, group: Mapping[str, Any], name: str, world_size: int) -> None:
        super().check_group(group, name, world_size)
        self.check_ratios(group, f" in {name}" if name else "")

    def check_ratios(self, given: Mapping[str, Any], where: str = "") -> None:
        """Raise ValueError where a bound of r is given and no r is formed."""
        of = f'variance="{self.variance}"' if self.shares_variance else "Layerwise(adaptive=False)"
        for name in RATIOS:
            if not self.ratios and (got := given[name]) != (usual := getattr(LAYERWISE, name)):
                way_out = "; or pass freeze_step" if self.shares_variance else ""
                raise ValueError(f"{name} must be {usual} with {of}, got {got!r}{where}: no ratio is formed{way_out}")
