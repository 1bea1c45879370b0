"""What parameters have between two steps: their views for users, and what becomes of it when a group is added."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ..algorithm import Algorithm
from ..consensus import failure
from .owner import Owner


def publish(state: Any, algorithm: Algorithm, before: Collection[str]) -> set[str]:
    """Put views of the flat buffers into ``state``, under torch's names; leave what others keep there.

    Args:
        state: An optimizer's.
        algorithm: Its algorithm.
        before: Names of what was put there before.

    Returns:
        Names of what is there now.
    """
    plist, layout, steps = algorithm.frame.parameters, algorithm.frame.layout, algorithm.frame.steps
    visible = {kept.name: kept.tensor for kept in algorithm.kept() if kept.published and kept.wanted}
    for i, p in enumerate(plist.owners):
        parts = {name: plist.shaped(flat, i, layout.offset(i)) for name, flat in visible.items()}
        if i in plist.masters:
            parts["master"] = plist.dense[i]
        views = {name: plist.published(part, i) for name, part in parts.items()}
        others = {name: value for name, value in state.get(p, {}).items() if name not in before}
        state[p] = {**others, "step": steps.of_each[i], **views}
    return {"step", "master", *visible}


class _Kept:
    """What is kept of each parameter, as it was before a group was added; by parameter, since numbers change.

    Args:
        optimizer: Whose state it is.
    """

    def __init__(self, optimizer: Owner) -> None:
        algorithm, plist, published = optimizer.algorithm, optimizer.frame.parameters, optimizer.published
        self.others = algorithm.carried()
        plist.refresh_masters()
        kept, state = algorithm.kept(), optimizer.state
        coded = [each for each in kept if each.per == "element" and each.exponents is not None]
        tables = [each for each in kept if each.per == "tensor" and each.wanted]
        self._views = {p: {k: v.clone() for k, v in state[p].items() if k in published} for p in plist.owners}
        numbers = list(enumerate(plist.owners))
        self._codes = {id(p): {each.name: each.part(optimizer.frame, i) for each in coded} for i, p in numbers}
        self._columns = {id(p): {each.name: each.tensor[..., i] for each in tables} for i, p in numbers}
        self._masters = {id(plist.owners[i]): plist.master(i) for i in plist.corrected}

    def put_back(self, optimizer: Owner) -> None:
        """Fill the state of an optimizer that was laid out anew."""
        algorithm, plist = optimizer.algorithm, optimizer.frame.parameters
        kept = {each.name: each for each in algorithm.kept() if each.wanted}
        for i, p in enumerate(plist.owners):
            for name, column in self._columns.get(id(p), {}).items():
                kept[name].tensor[..., i] = column
            for name, part in self._codes.get(id(p), {}).items():
                kept[name].keep(algorithm.frame, i, part)
            if id(p) in self._masters:
                plist.load_master(i, self._masters[id(p)])
        for p, views in self._views.items():
            for key, value in views.items():
                optimizer.state[p][key].copy_(value)


def grow(optimizer: Owner, add: Callable[[], None]) -> None:
    """Add a group, on all ranks or on none; what is kept of the parameters that were there before stays."""
    frame, kept = optimizer.frame, _Kept(optimizer)
    plist, groups = frame.parameters, list(optimizer.param_groups)
    outcomes, updates = frame.steps.outcomes, frame.steps.updates
    try:
        frame.agree_on_everything(failure(add))
    except BaseException:
        frame.parameters = plist
        optimizer.param_groups = groups
        raise
    with frame.steps.whole("add_param_group()"):
        frame.given_block_size = None  # a checkpoint's was for the old groups; who has loaded none chooses anew
        optimizer.build()
        frame.steps.outcomes, frame.steps.updates = outcomes, updates
        kept.put_back(optimizer)
        optimizer.algorithm.has_grown(kept.others)
