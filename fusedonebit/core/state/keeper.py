"""What code that saves, loads and copies must know of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...comm import ShardGroup, Transport
from ...triton_kernels import FlatLayout, LiveTable
from ..outcome import Outcomes
from ..params import ParameterList
from ..settings import Options
from ..step_count import StepCount
from .header import Fields
from .rank_local import Rows
from .spec import Specs, StateSpec

Phase = Literal["uncompressed", "warmup", "compression", "local", "one-bit"]


class Keeper(torch.optim.Optimizer):
    """An optimizer that declares what it keeps; see ``StateSpec``."""

    kept: ClassVar[Specs] = ()
    """What it keeps as tensors, besides the parameters' ``step`` and ``master``."""

    header_fields: ClassVar[Fields] = {}
    """What it keeps as plain values, in the header of its checkpoints."""

    phases: ClassVar[dict[Phase, bool]] = {"uncompressed": False}
    """The stages in which it can be, the first one first, and whether it keeps what is "compressed" then."""

    scratch: ClassVar[tuple[str, ...]] = ()
    """Names of its attributes that are tensors which only serve within a step."""

    takes_shards: ClassVar[bool] = True
    """Whether parameters may be shards of tensors."""

    masters_of_rank: ClassVar[bool] = False
    """Whether each rank has master weights of its own."""

    options: Options
    layout: FlatLayout
    device: torch.device
    parameters: ParameterList
    transport: Transport
    shards: ShardGroup
    rows: Rows
    live: LiveTable
    masks: dict[Tensor, Tensor]
    levels: tuple[Transport, Transport] | None
    inside: Transport
    lr_tensors: list[Tensor]
    outcomes: Outcomes
    step_count: StepCount
    updates: Tensor
    own_steps: Tensor
    given_block_size: int | None
    hyper_parameters: tuple[str, ...]
    published: set[str]
    broken: str
    just_loaded: bool
    sums_up: bool
    set_up: Callable[[int | None], None]
    build: Callable[[], None]
    catch_up: Callable[[], None]
    publish_state: Callable[[], None]
    put_lr_on_the_device: Callable[[], None]
    check_group: Callable[..., None]
    check_levels: Callable[[], None]

    @property
    def phase(self) -> Phase:
        """Return the stage of the last step taken."""
        raise NotImplementedError

    @property
    def compressed(self) -> bool:
        """Return whether it keeps what is declared for the "compressed" stage."""
        return self.phases.get(self.phase, False)

    def specs(self, compressed: bool | None = None) -> list[StateSpec]:
        """Return the declarations that apply, in this stage or in another."""
        compressed = self.compressed if compressed is None else compressed
        return [spec for spec in self.kept if spec.applies(self, compressed)]

    def allocate(self) -> None:
        """Make the tensors that are declared."""
        for spec in self.kept:
            spec.allocate(self, self.layout, self.device)

    @property
    def synchronised(self) -> bool:
        """Return whether all ranks have the same parameters now."""
        return True

    def cut(self) -> dict[str, int]:
        """Return by what the rows along the flat index space are ordered: ranks, buckets, ranks of a node."""
        inside = 1 if self.levels is None else self.levels[1].world_size
        return {"world_size": self.transport.world_size, "buckets": self.options.bucket_count, "inside": inside}

    def cut_alike(self, header: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint's rows are ordered by the same."""
        return all(header[key] == value for key, value in self.cut().items())

    def settle(self) -> None:
        """Bring what is kept into the form in which it is saved."""

    def plain_state(self) -> dict[str, Any]:
        """Return the values of ``header_fields``."""
        return {}

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        """Raise ValueError if a checkpoint's stage can't be taken up."""

    def resume(self, header: Mapping[str, Any]) -> None:
        """Take up a checkpoint's stage, with all buffers that it needs, still empty."""

    def resumed(self, header: Mapping[str, Any]) -> None:
        """Take note that the buffers are filled."""
