"""Arguments of an op by name, and as torch's op takes them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from functools import cache
from typing import Any

from fusedonebit.triton_kernels.op import OPS


@cache
def _kind(name: str) -> Any:
    whole = OPS[name].signature.whole.parameters
    defaults = [parameter.default for parameter in whole.values() if parameter.default is not parameter.empty]
    return namedtuple(f"ArgumentsOf_{name}", whole, defaults=defaults)


def arguments_of(name: str, *values: Any, **named: Any) -> Any:
    """Return an op's arguments as a NamedTuple: nouns are whole."""
    return _kind(name)(*values, **named)


def flat(name: str, arguments: Sequence[Any]) -> Sequence[Any]:
    """Return arguments as ``torch.ops.fusedonebit`` takes them: nouns as their fields."""
    return tuple(OPS[name].signature.flat(arguments))
