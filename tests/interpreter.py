"""Spares Triton's interpreter a search in each call of a device function: it took half of the time of kernels' tests.

There it looks through all members of ``triton.language`` for those that are built in, to replace them by its own. Which
these are doesn't change: here it is found out once, before anything is replaced.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@cache
def built_in(namespace: Any) -> list[str]:
    """The names of what is built in."""
    return [name for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member)]


def patch_builtin(namespace: Any, builder: Any, scope: Any) -> None:
    """As ``interpreter._patch_builtin``, of Triton 3.6 and 3.7."""
    for name in built_in(namespace):
        member = getattr(namespace, name)
        if tl.core.is_builtin(member):  # else it is replaced already
            interpreter._patch_attr(namespace, name, member, builder, scope)


for _namespace in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
    assert built_in(_namespace) or _namespace is tl.core.tensor_descriptor_base
interpreter._patch_builtin = patch_builtin
