"""What algorithms are made of: parts, each of which keeps something from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from .header import Fields
from .state_tensor import StateTensor


class Part:
    """Skeleton of a part of an algorithm. It keeps nothing; a subclass declares what it keeps.

    Checkpoints have what all of an algorithm's parts keep.
    """

    header_fields: ClassVar[Fields] = {}
    """What it keeps as plain values, in the header of its checkpoints; ``plain_state`` returns them."""

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        """Return the tensors that it keeps in a compressed stage, or in another; until that begins they are empty."""
        return ()

    def held(self) -> Sequence[Tensor]:
        """Return other tensors that live from step to step, for ``stats()["state_bytes"]``."""
        return ()

    def scratch(self) -> Sequence[Tensor]:
        """Return what only serves within a step, besides a reducer's."""
        return ()

    def settle(self, compressed: bool) -> None:
        """Bring what it keeps in a compressed stage, or in another, into the form in which that is saved."""

    def plain_state(self) -> dict[str, Any]:
        """Return the values of ``header_fields``; may wait for the device."""
        return {}

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        """Raise ValueError if a checkpoint's can't be taken up."""

    def resume(self, header: Mapping[str, Any]) -> None:
        """Take up a checkpoint's plain values and make all buffers, before its tensors are loaded."""

    def resumed(self, header: Mapping[str, Any]) -> None:
        """Do what follows once the checkpoint's tensors are loaded."""

    def stats(self) -> dict[str, Any]:
        """Return what it adds to ``DistributedOptimizer.stats``."""
        return {}

    def layer_stats(self) -> dict[str, list[Any]]:
        """Return what it adds to ``stats(layers=True)``: one entry per tensor each."""
        return {}

    def close(self) -> None:
        """Remove hooks and free large buffers, before a successor allocates its own."""
