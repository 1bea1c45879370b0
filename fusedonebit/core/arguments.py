"""Names of arguments: what is passed where, what torch and others call it, and what to write instead."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from .options import OF_GROUPS

_T = TypeVar("_T")

LIKE = 0.85
"""How alike, as ``difflib`` measures it, an unknown key of a group is to a hyper-parameter that was meant."""

LONGEST = 40
"""Characters of a value that a message repeats."""

ELSEWHERE = {
    "learning_rate": ("lr",),
    "eta": ("lr",),
    "wd": ("weight_decay",),
    "epsilon": ("eps",),
    "beta1": ("betas", "momentum"),
    "beta2": ("betas",),
    "betas": ("momentum",),
    "step": ("freeze_step",),
    "warmup_steps": ("warmup",),
    "num_warmup_steps": ("warmup",),
    "clip_grad_norm": ("max_grad_norm",),
    "gradient_clipping": ("max_grad_norm",),
    "norm_group": ("model_parallel",),
    "mpu": ("model_parallel",),
}
"""What other libraries call arguments, and ours."""

HAD_BY_NONE = {
    "fused": "leave it out: all steps are",
    "foreach": "leave it out: a step is a few launches for all tensors",
    "amsgrad": "it is not supported",
    "differentiable": "it is not supported",
    "decoupled_weight_decay": "leave it out: it always is",
    "dampening": "it is not supported",
    "nesterov": "it is not supported",
    "rewarm_every": "leave it out: with warmup= instead of freeze_step=, or with neither, the variance renews itself",
}
"""Arguments of torch's optimizers, and of earlier commits, which none has, and what to do instead."""


def settling(constructor: Callable[..., None]) -> Callable[..., None]:
    """Return an optimizer's ``__init__`` which also takes what ``taken`` leaves out; a base class's as it is."""
    if any(one.kind is one.VAR_KEYWORD for one in inspect.signature(constructor).parameters.values()):
        return constructor

    @functools.wraps(constructor)
    def construct(self: Any, *given: Any, **named: Any) -> None:
        constructor(self, *given, **taken(type(self), constructor, named))

    return construct


def explaining(kind: type[_T]) -> type[_T]:
    """Return a class of options which says where an argument belongs that Python would only call unexpected."""
    construct: Any = kind.__init__
    places = {field.name: f"{field.name}={{}}" for field in fields(kind)}  # type: ignore[arg-type]

    @functools.wraps(construct)
    def explained(self: Any, *given: Any, **named: Any) -> None:
        for name, value in named.items():
            if name not in places:
                raise TypeError(
                    f"{kind.__name__} got an unexpected keyword argument {name!r}: {_instead(name, value, places)}"
                )
        construct(self, *given, **named)

    kind.__init__ = explained  # type: ignore[method-assign]
    return kind


def taken(cls: type[Any], constructor: Callable[..., None], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of an optimizer without those that are as torch's optimizers have them by default.

    Raises:
        TypeError: for the first other one that the constructor lacks; it says what to write instead.
    """
    own = [name for name in inspect.signature(constructor).parameters if name != "self"]
    torchs = inspect.signature(torch.optim.SGD if "momentum" in own else torch.optim.AdamW).parameters
    kept = {}
    for name, value in named.items():
        if name in own:
            kept[name] = value
        elif name in ("fused", "foreach") and value is False:
            continue  # what torch would do is not done here anyway
        elif name not in torchs or type(value) is not type(torchs[name].default) or value != torchs[name].default:
            instead = _instead(name, value, _places(own, cls.kind.traits.settings))
            raise TypeError(f"{cls.__name__} got an unexpected keyword argument {name!r}: {instead}")
    return kept


def _instead(name: str, value: object, places: Mapping[str, str]) -> str:
    """Say what to write instead of an argument which an optimizer with these ``places`` does not have."""
    if name in HAD_BY_NONE:
        return HAD_BY_NONE[name]
    shown = repr(value) if len(repr(value)) <= LONGEST and not isinstance(value, Tensor) else "..."
    if name in places:
        return f"pass {places[name].format(shown)}"
    called = [name, *ELSEWHERE.get(name, ())]
    everywhere = list(dict.fromkeys(ours for theirs in _places_of_all().values() for ours in theirs))
    meant = [ours for ours in called if ours in places] or [ours for ours in called if ours in everywhere]
    meant = meant or difflib.get_close_matches(name, places, 1) or difflib.get_close_matches(name, everywhere, 1)
    if meant and meant[0] in places:
        return f"did you mean {places[meant[0]].format('...')}?"
    if meant:
        others = {other: theirs[meant[0]] for other, theirs in _places_of_all().items() if meant[0] in theirs}
        *most, last = others
        have = f"{', '.join(most)} and {last} have" if most else f"{last} has"
        return f"it has no such option, but {have}: {others[last].format('...')}"
    return f"it takes {', '.join(key for key, place in places.items() if place.startswith(f'{key}='))}"


def _places(own: Collection[str], settings: type[Any]) -> dict[str, str]:
    """Return how to pass each option of an optimizer: ``{"mask": "numerics=fusedonebit.Numerics(mask={})"}``."""
    from fusedonebit import Freeze

    places = {name: f"{name}={{}}" for name in own if name != "params"}
    objects = {argument: kind for argument, kind in settings.objects.items() if argument in own}
    for argument, kind in (objects | ({"freeze_step": Freeze} if "freeze_step" in own else {})).items():
        for name in (field.name for field in fields(kind)):
            if name in settings.takes or (kind is Freeze and name != "step"):
                places.setdefault(name, f"{argument}=fusedonebit.{kind.__name__}({name}={{}})")
    return places


@functools.cache
def _places_of_all() -> dict[str, dict[str, str]]:
    """Return ``_places`` of each optimizer that this package offers, whether anybody has imported it yet or not."""
    import fusedonebit

    places = {}
    for name in fusedonebit.__all__:
        optimizer = getattr(fusedonebit, name)
        own = inspect.signature(optimizer).parameters if hasattr(optimizer, "kind") else {}
        if "lr" in own:  # what is no base class
            places[name] = _places(own, optimizer.kind.traits.settings)
    return places


def check_keys(group: Mapping[str, Any], where: str, optimizer: str, own: Sequence[str], options: Any) -> None:
    """Raise ValueError for the first key of a new group that means something to us, but not here.

    Args:
        group: With its defaults.
        where: Which group it is.
        optimizer: Its class's name.
        own: The hyper-parameters that it has.
        options: Its settings.
    """
    for key in group:
        if key in own or key in ("params", "param_names", "capturable"):  # torch's optimizers have that one in groups
            continue
        got = f"got {key}={group[key]!r} in {where}"
        if key in options.values().keys() | options.objects.keys() and key not in OF_GROUPS:
            raise ValueError(f"{key} holds for all groups, {got}; pass it beside them")
        if key in OF_GROUPS or any(key in places for places in _places_of_all().values()):
            raise ValueError(f"{key} is no hyper-parameter of {optimizer}, {got}")
        meant = [name for name in ELSEWHERE.get(key, ()) if name in own]
        meant += difflib.get_close_matches(str(key), own, 1, LIKE)
        if meant and meant[0] not in key:  # "no_weight_decay" is a label
            raise ValueError(f"{key} is no hyper-parameter of {optimizer}, {got}; did you mean {meant[0]}?")
