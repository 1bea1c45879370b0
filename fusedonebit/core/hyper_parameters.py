"""The groups' hyper-parameters, as steps take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .options import check_lr, numbers, read_once

Check = Callable[[dict[str, Any], str], None]
"""Raises ValueError for the first hyper-parameter of a group, which it names, that makes no sense."""
CheckAll = Callable[[Sequence[Mapping[str, Any]]], None]
"""And for those of all groups that don't go together."""


class HyperParameters:
    """The last good hyper-parameters of all groups.

    Args:
        names: Of those that a group has.
        device: Where learning rates are kept if steps are captured.
        capturable: Whether they may be: captured graphs read rates again, in tensors that stay.

    Attributes:
        taken: Of each group, as numbers.
        rates: Where capturable, the learning rates, of which those in groups are views: float32 [groups]; else None.
    """

    def __init__(self, names: Sequence[str], device: torch.device, capturable: bool) -> None:
        self.names = tuple(names)
        self.rates: Tensor | None = None
        self._device, self._capturable = device, capturable
        self._views: list[Tensor] = []
        self.forget()

    def forget(self) -> None:
        """Forget what was taken: groups may have others, in another order."""
        self.taken: list[dict[str, Any]] = []
        self._last: dict[int, tuple[list[Any], list[Any]]] = {}  # types and values, of groups that nobody can fill

    def keep_rates(self, groups: Sequence[dict[str, Any]]) -> None:
        """Put learning rates into ``rates``, and views of that into the groups, if steps may be captured."""
        if not self._capturable:
            return
        if len(self._views) < len(groups):
            self.rates = torch.zeros(len(groups), device=self._device)
            self._views = list(self.rates.unbind())
        for i, (group, view) in enumerate(zip(groups, self._views, strict=False)):
            if group["lr"] is not view:
                check_lr(group["lr"], f" in group {i}")
                view.fill_(group["lr"])
                group["lr"] = view

    def take(self, groups: Sequence[dict[str, Any]], check: Check, check_all: CheckAll | None) -> None:
        """Take those that were changed, once they are checked; a bad one leaves the last good ones."""
        fresh, last = list(self.taken), dict[int, tuple[list[Any], list[Any]] | None]()
        for i, group in enumerate(groups):
            given = [group.get(name) for name in self.names]
            kinds = [tuple(map(type, value)) if type(value) is tuple else type(value) for value in given]
            if self._last.get(i) == (kinds, given):  # types first: values of others may be tensors
                continue
            if lacking := [name for name in self.names if name not in group]:
                raise ValueError(f"group {i} lacks {', '.join(lacking)}; add groups by add_param_group() alone")
            read_once(group)
            # These alone: a scheduler keeps tensors of its own in a group, and reading one waits for the device.
            taken = numbers({name: group[name] for name in self.names})
            if isinstance(group["lr"], Tensor) and not self._capturable:
                check_lr(group["lr"], f" in group {i}")  # it may have been filled in place
            if i == len(fresh):
                fresh.append(taken)
            elif not _same(taken, fresh[i]):
                check({**group, **taken}, f"group {i}")
                fresh[i] = taken
            last[i] = (kinds, given) if all(map(_is_plain, given)) else None
        if last:
            if check_all is not None:
                check_all(fresh)
            self.taken = fresh
            self._last = {i: each for i, each in (self._last | last).items() if each is not None}


_PLAIN = {int, float, bool, str}


def _is_plain(value: Any) -> bool:
    """Tell whether a value is what it was as long as it is the same object, or equal to it."""
    return type(value) in _PLAIN or (type(value) is tuple and all(type(each) in _PLAIN for each in value))


def _same(taken: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    # Tensors are the same or not: comparing values would wait for the device.
    def same(a: Any, b: Any) -> bool:
        return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)

    return taken.keys() == before.keys() and all(same(taken[key], before[key]) for key in taken)
