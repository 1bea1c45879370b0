"""Flattens nouns: an op's arguments as torch, Triton's launcher and C have them (``nouns``).

Triton takes NamedTuples inside of kernels, but each version launches them in its own way, and slowly. So what is
launched is a function of flat arguments, printed here, that makes the nouns and calls the kernel, into which it is
inlined: what is compiled is what a kernel of flat arguments would be.
"""

from __future__ import annotations
import __future__

import inspect
import linecache
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

from torch import Tensor

from .checks import Names, Slot
from .jit import Deferred, tl
from .native.generate import Place
from .nouns import Derived, Places, Sizes, Tensors

_SCHEMAS = {int: "int", float: "float", bool: "bool", Tensors: "Tensor[]", Sizes: "SymInt[]"}
_NOTHING = {"int": 0, "float": 0.0, "bool": False}
REQUIRED = inspect.Parameter.empty
_UNPREFIXED = {Places: ("block_tensor", "block_start", "live", "live_row")}
"""Nouns of which no op has two, and whose fields keep their names where they are flat; what kernels find in them."""


class _Noun(NamedTuple):
    """An argument that is a noun, and where its fields lie among the slots."""

    kind: type[Any]
    optional: bool
    first: int
    slots: Sequence[Slot]
    absent: Sequence[Any]
    """The fields of one that is left out."""

    def of(self, flat: Sequence[Any]) -> Any:
        """Return the noun in an op's flat arguments; None where it was left out."""
        fields = flat[self.first : self.first + len(self.slots)]
        if self.optional and not any(isinstance(field, Tensor) for field in fields):
            return None
        return self.kind(*fields)


class Signature:
    """The arguments of an op's eager function.

    Attributes:
        slots: By flat names.
        derived: What kernels find in nouns besides: types, functions, and the flat names of these functions' arguments.
        flat: A function of its arguments, that returns them flat: nouns as their fields.
        places: Where a kernel finds fields, and what is derived, of the nouns that it takes, by their flat names. Of
            others it takes fields by these names.
    """

    def __init__(self, eager: Callable[..., None]) -> None:
        hints = get_type_hints(eager, include_extras=True)
        self.whole, self._name = inspect.signature(eager), eager.__name__
        self.slots: dict[str, Slot] = {}
        self.derived: dict[str, tuple[str, Callable[..., Any], list[str]]] = {}
        self.places: dict[str, Place] = {}
        self._nouns: dict[str, _Noun] = {}
        for name, parameter in self.whole.parameters.items():
            hint, optional = _given(hints[name])
            if hasattr(kind := getattr(hint, "__origin__", hint), "_fields"):
                self._add_noun(name, kind, optional, getattr(hint, "__metadata__", ()))
            else:
                self.slots[name] = _slot(hint, optional, parameter.default, name, Names())
        self._each = [(self._nouns.get(name), name) for name in self.whole.parameters]
        self.flat = self._flattening(eager)

    def _add_noun(self, name: str, kind: type[Any], optional: bool, beside: Sequence[str]) -> None:
        hints, first = get_type_hints(kind, include_extras=True), len(self.slots)
        names = Names("" if kind in _UNPREFIXED else name, beside)
        for field in kind._fields:
            hint, may_be_none = _given(hints[field])
            default = kind._field_defaults.get(field, REQUIRED)
            may_be_none |= optional and hint not in _SCHEMAS
            self.slots[_flat(name, kind, field)] = _slot(hint, may_be_none, default, f"{name}.{field}", names)
        slots = list(self.slots.values())[first:]
        self._nouns[name] = _Noun(kind, optional, first, slots, [_left_out(slot) for slot in slots])
        for derived, (triton, function) in _derived(kind).items():
            needed = [_flat(name, kind, each) for each in inspect.signature(function).parameters]
            self.derived[_flat(name, kind, derived)] = triton, function, needed

    def _flattening(self, eager: Callable[..., None]) -> Callable[..., tuple[Any, ...]]:
        """Return a function of the eager one's arguments that returns them flat: nouns as their fields."""
        defaults, taken, flat = {}, [], []
        for name, parameter in self.whole.parameters.items():
            if parameter.default is not REQUIRED:
                defaults[name] = parameter.default
            taken.append(f"{name}={name}" if name in defaults else name)
            noun = self._nouns.get(name)
            left_out = f"({tuple(noun.absent)} if {name} is None else {name})" if noun and noun.optional else name
            flat.append(f"*{left_out}" if noun else name)
        return _printed(eager, defaults, taken, f"return ({', '.join(flat)},)")

    def regrouped(self, eager: Callable[..., None]) -> Callable[..., None]:
        """Return the eager function with flat arguments."""
        if not self._nouns:
            return eager
        places = {name: i for i, name in enumerate(self.slots)}
        defaults = [slot.default for slot in self.slots.values()]

        def of_flat(*given: Any) -> None:
            flat = (*given, *defaults[len(given) :])  # the dispatcher leaves out defaults at the end
            eager(*[flat[places[name]] if noun is None else noun.of(flat) for noun, name in self._each])

        of_flat.__doc__, of_flat.__name__ = eager.__doc__, eager.__name__
        return of_flat

    def kernel(self, kernel: Deferred) -> Deferred:
        """Return the kernel with flat arguments."""
        declared = inspect.signature(kernel.function).parameters
        nouns = [name for name in declared if name in self._nouns]
        if not nouns:
            return kernel
        for name in nouns:
            for field, flat in self._fields_in_kernels(name).items():
                if self._nouns[name].kind not in _UNPREFIXED:
                    self.places[flat] = Place(name, self._nouns[name].kind.__name__, field)
        module = f"<{kernel.function.__module__}.{self._name}, flat>"  # each op's: several may share a kernel's text
        names: dict[str, Any] = {"tl": tl, "of_nouns": kernel, "__name__": module}
        flat_names, given = [], []
        for name, parameter in declared.items():
            if name not in self._nouns:
                annotated = "" if parameter.annotation is REQUIRED else f": {parameter.annotation}"
                flat_names.append(name + annotated)
                given.append(name)
                continue
            fields = self._fields_in_kernels(name)
            names[f"noun_{name}"] = namedtuple(self._nouns[name].kind.__name__, fields)
            flat_names += [f"{each}: tl.constexpr" if each.isupper() else each for each in fields.values()]
            given.append(f"noun_{name}({', '.join(fields.values())})")
        called = f"of_nouns({', '.join(given)})"
        return kernel.called_by(_printed(kernel.function, names, flat_names, called))

    def _fields_in_kernels(self, name: str) -> dict[str, str]:
        """Return what a kernel finds in a noun, and the flat name of each; constants in capitals."""
        noun = self._nouns[name]
        if noun.kind in _UNPREFIXED:
            return {each: each for each in _UNPREFIXED[noun.kind]}
        fields = {}
        for field, slot in zip(noun.kind._fields, noun.slots, strict=True):
            constant = slot.schema == "bool"
            fields[field.upper() if constant else field] = f"{name}_{field}".upper() if constant else f"{name}_{field}"
        return fields | {each: f"{name}_{each}" for each in _derived(noun.kind)}


def _left_out(slot: Slot) -> Any:
    """Return what a field is in a noun that is left out."""
    return _NOTHING.get(slot.schema) if slot.default is REQUIRED or slot.spec is not None else slot.default


def _flat(argument: str, noun: type[Any], field: str) -> str:
    """Return what a field is called where it is an argument by itself."""
    return field if noun in _UNPREFIXED else f"{argument}_{field}"


def _derived(noun: type[Any]) -> Derived:
    """Return what kernels find in a noun besides its fields."""
    return noun.derived() if hasattr(noun, "derived") else {}


def _given(hint: Any) -> tuple[Any, bool]:
    """Return a type, and whether it may be None."""
    if type(None) in get_args(hint):
        return next(other for other in get_args(hint) if other is not type(None)), True
    return hint, False


def _slot(hint: Any, optional: bool, default: Any, label: str, names: Names) -> Slot:
    if hint in _SCHEMAS:
        return Slot(_SCHEMAS[hint], None, default, label)
    spec, *shapes = hint.__metadata__
    return Slot("Tensor?" if optional else "Tensor", spec, default, label, names.shapes(shapes[-1]) if shapes else ())


def _printed(like: Callable[..., Any], names: dict[str, Any], taken: Sequence[str], line: str) -> Callable[..., Any]:
    """Return a function of one line, called like another; Triton reads its source where Python keeps lines."""
    called = like.__name__  # as profilers show it
    source = f"def {called}({', '.join(taken)}):\n    {line}\n"
    file = f"<{like.__module__}.{called}, flat>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec", flags=__future__.annotations.compiler_flag), names)
    function: Callable[..., Any] = names[called]
    function.__module__ = like.__module__
    return function
