"""Options of Marsit's optimizers, and of those that it is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..comm import Topology
from ..comm.multi_hop import check_topology
from ..core.arguments import explaining
from ..core.options import check_count, is_int, is_number
from ..core.resolved import Options, names_of
from .local_steps import RoundOptions


@dataclass(frozen=True, kw_only=True)
class LocalOptions(RoundOptions):
    """Settings of an optimizer whose rounds are all of as many steps."""

    takes: ClassVar[frozenset[str]] = Options.takes - {"bias_correction", "eps_inside_sqrt"}

    @property
    def round_steps(self) -> int:
        """Return how many, the ``local_steps`` that users say."""
        raise NotImplementedError

    def check_levels(self) -> None:
        if self.round_steps > 1:
            raise ValueError(
                f"hierarchy must be None with local_steps={self.round_steps}: ranks of a node move together"
            )

    def check_group(self, group: Mapping[str, Any], name: str, world_size: int) -> None:
        if group.get("eps") == 0:
            where = f" in {name}" if name else ""
            raise ValueError(f"eps must be > 0, got 0{where}: each worker divides by its own variance")

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        super().check()
        steps = self.round_steps
        if not is_int(steps) or steps < 1:
            raise ValueError(f"local_steps must be an int >= 1, got {steps!r}: 1 synchronises every step")
        if self.numerics.stochastic_rounding and steps > 1:
            raise ValueError(
                f"stochastic_rounding must be False with local_steps={steps}, got True: workers' own steps "
                "are rounded to nearest; use Numerics(master_weights=True)"
            )


@explaining
@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Length and precision of Marsit's rounds.

    Args:
        full_precision_every: K: rounds 0, K, 2K ... are averaged in float32; 0: none is.
        local_steps: Steps of a round. In all but the last a worker moves by itself and nothing is sent; costs 4 bytes
            per parameter where it is above 1. A GradScaler's scales may differ between ranks then: an overflow in such
            a step is that worker's own affair.
        global_ratio: eta_s / eta_l: how far each coordinate goes in a 1-bit round, in units of lr (times
            ``local_steps``), so that it follows lr's schedule. As large as updates usually are, or larger: what it
            can't carry away piles up in the compensation. Groups may set it. None: 0.3 with ``MarsitSGD``, 1 with
            ``MarsitAdam`` (docs/marsit.md).
        compensation_limit: Largest compensation of a coordinate, in units of eta_s; None: without limit, the paper's,
            which lets a backlog grow that full precision then applies at once.
        rows: Of a torus; None: the most that is not above the columns.
        seed: Of the random bits; equal on all ranks.
    """

    full_precision_every: int = 100
    local_steps: int = 1
    global_ratio: float | None = None
    compensation_limit: float | None = 1.0
    rows: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        check_count("full_precision_every", self.full_precision_every)
        check_count("seed", self.seed)
        limit = self.compensation_limit
        if limit is not None and not (is_number(limit) and limit >= 0):
            raise ValueError(f"compensation_limit must be a finite number >= 0 or None, got {limit!r}")


ROUNDS = Rounds()


@dataclass(frozen=True, kw_only=True)
class MarsitOptions(LocalOptions):
    """Settings of ``MarsitSGD``."""

    rounds: Rounds
    topology: Topology

    objects: ClassVar[dict[str, Any]] = {**LocalOptions.objects, "rounds": Rounds}
    takes: ClassVar[frozenset[str]] = LocalOptions.takes | names_of(Rounds) | {"hierarchy", "hierarchy_dtype"}
    usual: ClassVar[dict[str, Any]] = {"global_ratio": 0.3}
    grouped: ClassVar[tuple[str, ...]] = ("global_ratio", *LocalOptions.grouped)
    recorded: ClassVar[tuple[str, ...]] = (
        *(*LocalOptions.recorded, "local_steps", "topology", "rows", "full_precision_every"),
        *("compensation_limit", "seed"),
    )

    @property
    def round_steps(self) -> int:
        return self.rounds.local_steps

    def check_group(self, group: Mapping[str, Any], name: str, world_size: int) -> None:
        super().check_group(group, name, world_size)
        rounds = self.rounds
        check_topology(self.topology, rounds.rows, world_size, rounds.full_precision_every, rounds.seed)


@dataclass(frozen=True, kw_only=True)
class MarsitAdamOptions(MarsitOptions):
    """Settings of ``MarsitAdam``."""

    takes: ClassVar[frozenset[str]] = MarsitOptions.takes | {"bias_correction"}
    usual: ClassVar[dict[str, Any]] = {"bias_correction": True, "global_ratio": 1.0}
