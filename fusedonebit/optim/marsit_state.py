"""Keeps what Marsit's optimizers have between two steps: buffers, settings of groups, and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import NodePart, Part, Transport
from ..comm.rounds import RoundAllReduce
from ..core.frame import Frame
from ..core.header import COUNT, INT, INT32, POSITIVE, Field, Fields
from ..core.options import is_int
from ..core.settings import Options
from ..core.spec import Specs, StateSpec
from ..triton_kernels import TAIL, Coef, FlatLayout
from ..triton_kernels.headers import folded
from ..triton_kernels.nouns import Places
from ..triton_kernels.tables import tables_of
from .rounds import ANCHOR, RoundAlgorithm, RoundOptions


@dataclass(frozen=True, kw_only=True)
class LocalOptions(RoundOptions):
    """Settings of an optimizer whose rounds are all of ``local_steps`` steps; see ``Rounds``."""

    local_steps: int = 1
    takes: ClassVar[frozenset[str]] = Options.takes - {"bias_correction", "eps_inside_sqrt"}

    def check_levels(self) -> None:
        if self.local_steps > 1:
            raise ValueError(
                f"hierarchy must be None with local_steps={self.local_steps}: ranks of a node move together"
            )

    def check_group(self, group: Mapping[str, Any], name: str, world_size: int) -> None:
        if group.get("eps") == 0:
            where = f" in {name}" if name else ""
            raise ValueError(f"eps must be > 0, got 0{where}: each worker divides by its own variance")

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        super().check()
        if not is_int(self.local_steps) or self.local_steps < 1:
            raise ValueError(f"local_steps must be an int >= 1, got {self.local_steps!r}: 1 synchronises every step")
        if self.stochastic_rounding and self.local_steps > 1:
            raise ValueError(
                f"stochastic_rounding must be False with local_steps={self.local_steps}, got True: workers' own steps "
                "are rounded to nearest; use Numerics(master_weights=True)"
            )


class MarsitState(RoundAlgorithm):
    """All of ``marsit.Marsit`` but the step; also of what it is measured against."""

    options: LocalOptions
    continues: ClassVar = False
    columns: ClassVar = {Coef.GLOBAL_RATIO: "global_ratio"}
    kept: ClassVar[Specs] = (
        StateSpec("momentum_buffer", "element", "exp_avg", of_rank=True, published=True, when="_is_sgd_with_momentum"),
        StateSpec("exp_avg", "element", "exp_avg", of_rank=True, published=True, when="_is_adam"),
        StateSpec(
            "exp_avg_sq", "element", "exp_avg_sq", of_rank=True, published=True, when="_is_adam", not_negative=True
        ),
        StateSpec("compensation", "element", "reducer.compensated", of_rank=True, published=True),
        StateSpec("anchor", "element", "_round_start", **ANCHOR, when="_has_local_steps", published=True),
    )
    phases: ClassVar = dict.fromkeys(("uncompressed", "one-bit", "local"), False)
    header_fields: ClassVar[Fields] = {
        **RoundAlgorithm.header_fields,
        "block_size": Field(POSITIVE),
        "line": Field(POSITIVE),
        "inside": Field(POSITIVE),
        "rounds": Field(COUNT),
        "counted": Field(COUNT, False),
        "digest": Field(INT32),
        "flags": Field(INT),
    }
    exp_avg_sq: Tensor
    reducer: RoundAllReduce

    def check_group(self, group: Mapping[str, Any], where: str) -> None:
        if not (self._is_adam or self._had_momentum) and group.get("momentum"):
            raise ValueError(
                f"momentum must be 0 where no group had any at construction, got {group['momentum']!r}{where}; "
                "construct the optimizer anew"
            )

    @property
    def _is_adam(self) -> bool:
        return "betas" in self.frame.groups[0]

    @property
    def _is_sgd_with_momentum(self) -> bool:
        return not self._is_adam and any(group["momentum"] for group in self.frame.groups)

    @property
    def _has_local_steps(self) -> bool:
        return self.options.local_steps > 1

    @property
    def round_steps(self) -> int:
        return self.options.local_steps

    def _make_reducer(self, transport: Transport, part: Part) -> RoundAllReduce:
        """Make what averages all workers' updates of a part."""
        raise NotImplementedError

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self._had_momentum = bool(self.exp_avg.numel())
        anchored = frame.layout.numel + TAIL if self._has_local_steps else 0
        self._anchor = torch.zeros(anchored, device=frame.device)
        between, part = frame.ranks.transport, Part(frame.layout)
        if frame.ranks.levels is not None:
            between, inside = frame.ranks.levels
            part = NodePart(frame.layout, inside, self.options.hierarchy_dtype, frame.device)
        self.reducer = self._make_reducer(between, part)
        layout, device = frame.layout, frame.device
        self._one = torch.ones(1, device=device)
        self._as_it_is = torch.ones(max(1, len(layout.sizes)), len(Coef), device=device)
        # One tensor of the same blocks: the parameters as all ranks had them when the round began.
        self._flat = FlatLayout((layout.numel,), layout.world_size, layout.block_size)
        self._flat_tables = tables_of(self._flat, device)  # kept, because launches share what somebody keeps
        self._flat_places = Places.of(self._flat, self._flat_tables.tensor, frame.live)

    def check_growth(self) -> None:
        if self.frame.ranks.levels is not None:
            raise RuntimeError(
                "add_param_group must be called without Wire(hierarchy=...): each rank has moments of its part of the "
                "flat index space only, which would lie elsewhere; construct a new optimizer"
            )
        if self._local:
            raise RuntimeError(
                f"add_param_group must be called between two rounds, not after {self._local} of "
                f"{self.options.local_steps} local steps; take the others first"
            )

    def carried(self) -> tuple[int, int, int, int]:
        self.settle()
        reducer = self.reducer
        return reducer.rounds, int(folded(reducer.digest)), reducer.pending, self._counted()

    def has_grown(self, carried: Any) -> None:
        self.reducer.resume(*carried)

    def enter_phase(self) -> bool:
        self._take_back_skipped()
        return False

    def _settle_round(self, this: bool, skipped: bool) -> None:
        if skipped:
            self.reducer.take_back(full_precision=this)

    def _counted(self) -> int:
        """Return how many rounds were not skipped, as far as this rank knows."""
        skipped = [attempt for attempt, _ in self._unsettled if self.frame.steps.outcomes.seems_skipped(attempt)]
        return self.reducer.counted - len(skipped)

    # ---------------------------------------------------------------- checkpoints

    def held(self) -> list[Tensor]:
        return [*super().held(), self._one, self._as_it_is]

    def plain_state(self) -> dict[str, Any]:
        reducer = self.reducer
        rounds = {"rounds": reducer.rounds, "counted": self._counted(), "digest": int(folded(reducer.digest))}
        return super().plain_state() | rounds | {"flags": reducer.pending}

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        frame = self.frame
        inside = frame.cut()["inside"]
        here = (frame.ranks.transport.world_size, frame.layout.block_size, frame.layout.numel)
        saved = (header["world_size"], header["block_size"], header["line"])
        if header["inside"] != inside or (inside > 1 and saved != here):
            raise ValueError(
                f"the checkpoint was written with {header['world_size']} ranks, {header['inside']} in a node, and "
                f"block_size={header['block_size']}, but here they are {here[0]}, {inside} in a node, and "
                f"block_size={here[1]}; construct the optimizer as it was"
            )
        world_size = frame.ranks.transport.world_size
        if header["local"] and header["world_size"] != world_size:
            raise ValueError(
                f"the checkpoint's world_size is {header['world_size']}, but here it is {world_size}; "
                f"it was written after {header['local']} local steps of a round, whose parameters differ from rank to "
                "rank: save at the end of a round, or resume with as many ranks as wrote it"
            )
        if header["local"] >= self.options.local_steps:
            raise ValueError(
                f"the checkpoint was written after {header['local']} local steps of a round, but local_steps is "
                f"{self.options.local_steps}; save at the end of a round, or keep local_steps"
            )

    def resume(self, header: Mapping[str, Any]) -> None:
        super().resume(header)
        self.reducer.resume(header["rounds"], header["digest"], header["flags"], header.get("counted"))

    # ---------------------------------------------------------------- what users look at

    def compensation(self, param: Tensor) -> Tensor:
        """Return this rank's compensation c of one parameter, float32 of its shape; zeros after full precision."""
        frame = self.frame
        i = frame.index(param)
        self.settle()
        return frame.parameters.shaped(self.reducer.compensated, i, frame.layout.offset(i)).clone()

    def owed(self) -> float:
        """Return the norm of this rank's compensation over that of the last update."""
        self.reducer.settle()
        norm, update = float(self.reducer.compensated.norm()), float(self.reducer.result().norm())
        return norm / update if update > 0 else math.inf if norm > 0 else 0.0

    def momentum(self, param: Tensor) -> Tensor:
        """Return this rank's own momentum of one parameter, float32 of its shape."""
        if self.exp_avg.numel():
            return super().momentum(param)
        self.frame.index(param)
        return torch.zeros_like(param, dtype=torch.float32)

    def stats(self) -> dict[str, Any]:
        return super().stats() | {"rounds": self.reducer.rounds}

    def compensation_norm(self) -> float:
        """Return the norm of this rank's compensation; reads and writes it once."""
        self.settle()
        return float(self.reducer.compensated.norm())
