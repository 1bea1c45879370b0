"""What handles an optimizer's state knows of it."""

from __future__ import annotations

from typing import Any, Protocol

from ..algorithm import Algorithm
from ..contents import Contents
from ..frame import Frame
from ..frame import Owner as Hooked


class Owner(Hooked, Protocol):
    """Is the optimizer; what is torch's of it, besides hooks, are ``state`` and ``param_groups``.

    Attributes:
        kind: Of its algorithm.
        published: Names of entries of ``state`` that are ours.
    """

    frame: Frame
    kind: type[Algorithm]
    algorithm: Algorithm
    contents: Contents
    defaults: dict[str, Any]
    state: Any
    param_groups: list[dict[str, Any]]
    published: set[str]

    def build(self) -> None:
        """Lay out the parameters and allocate all state."""

    def set_up(self) -> None:
        """Make all that follows from parameters, options and ranks."""

    def check_group(self, group: dict[str, Any], name: str = "") -> None:
        """Raise ValueError for the first hyper-parameter of a group that makes no sense."""
