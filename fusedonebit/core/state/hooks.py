"""What torch's own ``Optimizer`` does around a checkpoint: hooks, groups by number, and entries that others keep.

Torch packs, then calls hooks, then loads, each within one method. Here what is packed must be completed before a
hook sees it, and what is loaded must be restored before a hook may look, so the methods are ours; what users can
tell of them is as in torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def packed(optimizer: Optimizer) -> dict[str, Any]:
    """State and groups with numbers instead of parameters, as ``torch.optim.Optimizer.state_dict`` gives them."""
    numbers: dict[int, int] = {}
    groups: list[dict[str, Any]] = []
    start = 0
    for group in optimizer.param_groups:
        for number, p in enumerate(group["params"], start):
            numbers.setdefault(id(p), number)
        start += len(group["params"])
        groups.append({**group, "params": [numbers[id(p)] for p in group["params"]]})
    state = {numbers[id(key)] if isinstance(key, Tensor) else key: value for key, value in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def take_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Replaces ``param_groups`` by a copy of saved ones, but for their parameters."""
    groups = []
    for own, theirs in zip(optimizer.param_groups, saved, strict=True):
        group = {**deepcopy({key: value for key, value in theirs.items() if key != "params"}), "params": own["params"]}
        if "param_names" in own:
            group.setdefault("param_names", own["param_names"])
        groups.append(group)
    optimizer.param_groups = groups


def restore_others(optimizer: Optimizer, state_dict: Mapping[str, Any], known: Collection[str]) -> None:
    """Puts into ``state`` what a checkpoint has of no parameter, and what of parameters is not ``known``."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    owner = dict(zip(names, params, strict=True))
    for key, value in state_dict["state"].items():
        if key not in owner:
            optimizer.state[key] = value
        elif isinstance(value, Mapping):
            p = owner[key]
            others = {name: _moved(entry, p) for name, entry in value.items() if name not in known}
            if others:
                optimizer.state[p] = {**optimizer.state.get(p, {}), **others}


def _moved(value: Any, param: Tensor) -> Any:
    # To the parameter's device as torch does, but of its own dtype.
    return value.to(param.device) if isinstance(value, Tensor) else deepcopy(value)


def before_saving(optimizer: Optimizer) -> None:
    """Calls the hooks of ``register_state_dict_pre_hook``."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def after_saving(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """``saved`` as the hooks of ``register_state_dict_post_hook`` leave or return it."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        returned = hook(optimizer, saved)
        saved = saved if returned is None else returned
    return saved


def has_before_loading(optimizer: Optimizer) -> bool:
    """Return whether a checkpoint may be changed before it is loaded."""
    return bool(optimizer._optimizer_load_state_dict_pre_hooks)


def before_loading(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """A shallow copy of ``state_dict``, as the hooks of ``register_load_state_dict_pre_hook`` leave or return it."""
    given = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        returned = hook(optimizer, given)
        given = given if returned is None else returned
    return given


def after_loading(optimizer: Optimizer) -> None:
    """Calls the hooks of ``register_load_state_dict_post_hook``."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
