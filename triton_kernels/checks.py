"""Checks what an op is given against its declaration: dtypes, shapes, rows without gaps, and that all is on one device.

A shape stands beside the kind of a tensor (``nouns``), as in ``Annotated[Doubles, "2 B | 3 B"]``: its sizes, or those
of another. ``+`` behind a size means: or more; ``_``: any. A size is a number, a name, or computed of them. What a name
stands for the first tensor says that has the name alone; for ``block_size``, or another number, the argument. Names in
capitals are the op's: B blocks, P = B * block_size elements, T tensors of a list, rows of W ranks or chunks, COLUMNS of
``Coef``, WORDS of a header. Others are a noun's own, but where an op says what they are in it:
``Annotated[Side, "blocks=B"]``. Beside a noun ``"empty"`` means: its tensors may be empty instead.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .columns import Coef
from .headers import Word
from .native.generate import Spec
from .tables import KINDS, Listed

_NAME = re.compile(r"[A-Za-z]\w*")
_MEANT = {"P": "(B*block_size)", "COLUMNS": f"{len(Coef)}", "WORDS": f"{len(Word)}"}
_DTYPE, _DEVICE = operator.attrgetter("dtype"), operator.attrgetter("device")
_NOTHING: dict[str, Any] = {"__builtins__": {}}


class Size(NamedTuple):
    """A size as it is declared: its name, if it is one, what computes it of others, and whether it may be more."""

    text: str
    name: str
    code: CodeType
    least: bool

    def of(self, known: Mapping[str, int]) -> int | None:
        """Return it; None where a name in it is not known, as ``_`` never is; -1 where there is none."""
        if self.name:
            return known.get(self.name)
        try:
            return eval(self.code, _NOTHING, known)
        except NameError:
            return None
        except ZeroDivisionError:  # of no rows
            return -1

    def told(self, known: Mapping[str, int]) -> str:
        """Return it in numbers."""
        wanted = self.of(known)
        return self.text if wanted is None else f"{wanted}{' or more' * self.least}"


class Slot(NamedTuple):
    """An argument of an op as torch has it: its type in a schema, what is known of a tensor, and its default."""

    schema: str
    spec: Spec | None
    default: Any
    label: str
    """What callers know it by: ``side.scale``."""
    shapes: Sequence[Sequence[Size]] = ()
    """Those that a tensor may have; none: any."""

    def given(self, x: Tensor) -> list[tuple[str, int]]:
        """Return the names of which a tensor says what they stand for, by its first shape of as many sizes."""
        sizes = x.shape
        for shape in self.shapes:
            if len(shape) == len(sizes):
                return [(size.name, n) for size, n in zip(shape, sizes, strict=True) if size.name not in ("", "_")]
        return []

    def fits(self, x: Tensor, known: Mapping[str, int]) -> bool:
        """Tell whether a tensor has one of the shapes."""
        sizes = x.shape
        for shape in self.shapes:
            if len(shape) == len(sizes):
                for size, n in zip(shape, sizes, strict=True):
                    wanted = size.of(known)
                    if wanted is not None and n != wanted and not (size.least and n > wanted >= 0):
                        break
                else:
                    return True
        return not self.shapes


class Names:
    """What names stand for in the shapes of one argument: a noun's, and what an op says beside it."""

    def __init__(self, noun: str = "", beside: Sequence[str] = ()) -> None:
        said = " ".join(beside).split()
        self._own, self._or_empty = f"{noun}_" if noun else "", " | 0" if "empty" in said else ""
        self._meant = {name: of for name, _, of in (text.partition("=") for text in said)}

    def shapes(self, text: str) -> Sequence[Sequence[Size]]:
        """Return what a text declares."""
        return [[self._size(size) for size in shape.split()] for shape in (text + self._or_empty).split("|")]

    def _size(self, text: str) -> Size:
        code, least = _NAME.sub(self._meaning, text.removesuffix("+")).replace("/", "//"), text.endswith("+")
        return Size(text, code if code.isidentifier() and not least else "", compile(code, text, "eval"), least)

    def _meaning(self, name: re.Match[str]) -> str:
        if of := self._meant.get(name[0]):
            return of if of.isalnum() and of not in _MEANT else f"({_NAME.sub(self._meaning, of)})"
        return _MEANT.get(name[0], name[0]) if name[0].isupper() else f"{self._own}{name[0]}"


class Checks:
    """Those of an op's flat arguments; ``read``: the lists whose tensors must have their sizes, or no element."""

    def __init__(self, op: str, slots: Mapping[str, Slot], read: Sequence[str]) -> None:
        places = list(enumerate(slots.items()))
        self._op = op
        self._numbers = [(i, name) for i, (name, slot) in places if slot.schema == "int"]
        self._sizes = next((i for i, (_, slot) in places if slot.schema == "SymInt[]"), None)
        self._lists = [(i, slot.label, name in read) for i, (name, slot) in places if slot.schema == "Tensor[]"]
        self._tensors = [(i, slot, slot.spec) for i, (_, slot) in places if slot.spec is not None]

    def __call__(self, arguments: Sequence[Any]) -> None:
        """Raise ValueError, through ``torch._check_value``, for the first tensor that is not as declared."""
        known = {name: arguments[i] for i, name in self._numbers}
        sizes = tuple(arguments[self._sizes]) if self._sizes is not None else ()
        if count := next(filter(None, (len(sizes), *(len(arguments[i]) for i, _, _ in self._lists))), 0):
            known["T"] = count
        given = [(slot, spec, x) for i, slot, spec in self._tensors if (x := arguments[i]) is not None]
        device = given[0][2].device
        for slot, _, x in given:
            for name, n in slot.given(x):
                known.setdefault(name, n)
        wrong = [
            partial(self._told, slot, spec, x, known, given)
            for slot, spec, x in given
            if not (x.dtype in spec.dtypes and x.device == device and spec.is_dense(x) and slot.fits(x, known))
        ]
        for i, label, read in self._lists:
            x, wanted = arguments[i], sizes if read else ()
            numels = x.facts.numels if isinstance(x, Listed) else tuple(map(Tensor.numel, x))
            # Whoever has made a ``Listed`` knows where its tensors are.
            dtypes, devices = set(map(_DTYPE, x)), set() if isinstance(x, Listed) else set(map(_DEVICE, x))
            fits = len(x) == count and dtypes <= KINDS.keys() and devices <= {device}
            if not fits or (numels != wanted and any(map(lambda n, size: n not in (0, size), numels, wanted or ()))):
                wrong.append(partial(self._told_list, label, x, wanted, count, given[0]))
        torch._check_value(not wrong, lambda: wrong[0]())

    def _told_list(self, label: str, x: Sequence[Tensor], sizes: Sequence[int], count: int, first: Any) -> str:
        """Say what is wrong with a list of tensors."""
        dtypes, devices = _names({each.dtype for each in x}), {each.device for each in x}
        elements = f" with {_few(sizes)} elements, or none," * bool(sizes)
        wanted = f"{count} tensors of {_names(KINDS)}{elements} on {first[2].device}"
        got = f"{len(x)} of {dtypes} with {_few([each.numel() for each in x])} on {', '.join(map(str, devices))}"
        see = f"; see {first[0].label}" * (devices != {first[2].device})
        return f"{self._op}: {label} must be {wanted}, got {got}{see}"

    def _told(self, slot: Slot, spec: Spec, x: Tensor, known: Mapping[str, int], given: Sequence[Any]) -> str:
        """Say what is wrong with a tensor, and which others say what names stand for."""
        device, dense = given[0][2].device, spec.is_dense(x)
        texts = _shapes([[size.text for size in shape] for shape in slot.shapes])
        numbers = _shapes([[size.told(known) for size in shape] for shape in slot.shapes])
        wanted = _names(spec.dtypes) + f" {texts}" + f" = {numbers}" * (numbers != texts)
        wanted += "" if dense else ", dense along its last dimension,"
        got = f"{_names([x.dtype])} {list(x.shape)}" + ("" if dense else f" with strides {x.stride()}")
        used = {name for shape in slot.shapes for size in shape for name in size.code.co_names}
        sources = {name: other.label for other, _, y in reversed(given) for name, _ in other.given(y) if name in used}
        others = dict.fromkeys([*sources.values(), *[given[0][0].label] * (x.device != device)])
        see = ", ".join(label for label in others if label != slot.label)
        wrong = f"{slot.label} must be {wanted} on {device}, got {got} on {x.device}"
        return f"{self._op}: {wrong}" + f"; see {see}" * bool(see)


def _names(dtypes: Any) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _shapes(shapes: Sequence[Sequence[str]]) -> str:
    return " or ".join(f"[{', '.join(shape)}]" for shape in shapes)


def _few(numbers: Sequence[int]) -> str:
    return f"{list(numbers[:8])}" if len(numbers) <= 8 else f"{list(numbers[:8])} and {len(numbers) - 8} more"
