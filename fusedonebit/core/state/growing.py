"""What parameters have between two steps: their views for users, and what becomes of it when a group is added."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..consensus import failure
from ..frame import Frame
from ..state_tensor import StateTensor
from .owner import Owner


def publish(state: Any, frame: Frame, kept: Sequence[StateTensor], before: Collection[str]) -> set[str]:
    """Put views of the flat buffers into ``state``, under torch's names; leave what others keep there.

    Args:
        state: An optimizer's.
        frame: Its frame.
        kept: What its algorithm keeps.
        before: Names of what was put there before.

    Returns:
        Names of what is there now.
    """
    plist, steps = frame.parameters, frame.steps
    visible = {each.name: each for each in kept if each.published and each.wanted}
    everybody = range(len(plist))
    for i, p in enumerate(plist.owners):
        parts = {name: each.part(frame, i) for name, each in visible.items() if i in each.of(everybody)}
        if i in plist.masters:
            parts["master"] = plist.dense[i]
        views = {name: plist.published(part, i) for name, part in parts.items()}
        others = {name: value for name, value in state.get(p, {}).items() if name not in before}
        state[p] = {**others, "step": steps.of_each[i], **views}
    return {"step", "master", *visible}


class _Kept:
    """What is kept of each parameter, as it was before a group was added; by parameter, since numbers change.

    Args:
        frame: Of an optimizer.
        kept: What its algorithm keeps.
        state: The optimizer's.
        published: Names of what is ours in it.
    """

    def __init__(self, frame: Frame, kept: Sequence[StateTensor], state: Any, published: Collection[str]) -> None:
        plist = frame.parameters
        plist.refresh_masters()
        coded = [each for each in kept if each.per == "element" and each.exponents is not None]
        tables = [each for each in kept if each.per == "tensor" and each.wanted]
        self._views = {p: {k: v.clone() for k, v in state[p].items() if k in published} for p in plist.owners}
        numbers = list(enumerate(plist.owners))
        self._codes = {id(p): {each.name: each.part(frame, i) for each in coded} for i, p in numbers}
        self._columns = {id(p): {each.name: each.tensor[..., i] for each in tables} for i, p in numbers}
        self._masters = {id(plist.owners[i]): plist.master(i) for i in plist.corrections.which}

    def put_back(self, frame: Frame, now: Sequence[StateTensor], state: Any) -> None:
        """Fill what is kept now, and the state, once all was laid out anew."""
        plist, kept = frame.parameters, {each.name: each for each in now if each.wanted}
        for i, p in enumerate(plist.owners):
            for name, column in self._columns.get(id(p), {}).items():
                kept[name].tensor[..., i] = column
            for name, part in self._codes.get(id(p), {}).items():
                kept[name].keep(frame, i, part)
            if id(p) in self._masters:
                plist.load_master(i, self._masters[id(p)])
        for p, views in self._views.items():
            for key, value in views.items():
                state[p][key].copy_(value)


def grow(optimizer: Owner, add: Callable[[], None]) -> None:
    """Add a group, on all ranks or on none; what is kept of the parameters that were there before stays."""
    frame, carried = optimizer.frame, optimizer.algorithm.carried()
    kept = _Kept(frame, optimizer.contents.kept(), optimizer.state, optimizer.published)
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
        kept.put_back(frame, optimizer.contents.kept(), optimizer.state)
        optimizer.algorithm.has_grown(carried)
