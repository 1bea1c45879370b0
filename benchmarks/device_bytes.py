"""Bytes that torch's operations move in device memory, as kernels of their own would.

Counted where they are dispatched: each reads every tensor that it is given once (one that is given twice is read
once; of an expanded one only what lies in memory), and writes what it returns or changes. Views, and whatever
changes only what a tensor says of itself, move nothing; nor do collectives. Caches and allocations are not counted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

METADATA = {"set_", "resize_", "resize_as_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "detach_"}
OVERWRITES = {"copy_", "fill_", "zero_", "uniform_", "normal_", "_foreach_copy_", "_foreach_zero_"}
"""Whose first argument is written without having been read."""
SHAPED_LIKE = ("empty", "new_", "zeros", "ones", "full")
"""Ops that ask a tensor for its shape only."""
UNSCALED = {"_fused_adam_": "grads", "_fused_adamw_": "grads"}
"""What these change only where they are given a ``grad_scale``."""


class DeviceBytes(TorchDispatchMode):
    """Adds up ``read`` and ``written`` bytes of every operation inside; see the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0
        self._counts = True

    @property
    def moved(self) -> int:
        """Read and written."""
        return self.read + self.written

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is counted inside."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def add(self, read: int, written: int) -> None:
        """What a kernel moves that torch doesn't dispatch."""
        self.read += read
        self.written += written

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = function.name().split("::")
        name = name.partition(".")[0]
        if not self._counts or namespace == "c10d" or name in METADATA:
            return function(*args, **kwargs)
        given, read, changed = _arguments(function._schema, name, args, kwargs)
        before = _span(read)  # an operation may change it
        result = function(*args, **kwargs)
        storages = {_storage(t) for t in given}
        returned = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        fresh = [t for t in returned if _storage(t) not in storages]
        if changed or fresh or not returned:  # else a view
            self.add(before, _span([*changed, *fresh]) * (not name.startswith(("empty", "new_empty"))))
        return result


def _arguments(
    schema: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Tensors that an operation is given, those that it reads, and those that it changes."""
    given: list[Tensor] = []
    read: list[Tensor] = []
    changed: list[Tensor] = []
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name == UNSCALED.get(name) and kwargs.get("grad_scale") is None:
            writes = False
        given += tensors
        changed += tensors if writes else []
        if not (argument.is_out or (i == 0 and name in OVERWRITES) or name.startswith(SHAPED_LIKE)):
            read += tensors
    return given, read, changed


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _span(tensors: Iterable[Tensor]) -> int:
    """Bytes in memory of all, each counted once."""
    found = {(_storage(t), t.storage_offset(), t.shape, t.stride()): t for t in tensors if t.numel()}
    return sum(_distinct(t) * t.element_size() for t in found.values())


def _distinct(tensor: Tensor) -> int:
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
