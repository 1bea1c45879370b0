"""What a CUDA graph does, without one: records the ops of a step with the memory they work on, and runs them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount")
UPLOADING = ("lift_fresh",)


class Tape(TorchDispatchMode):
    """Ops in order. Refuses those that wait for the device, and tensors made from the host's numbers.

    As in a CUDA graph, a replay runs no Python between the ops and leaves results in the memory where
    the first run did; until then memory is as it was, and what the tape has allocated holds nothing of use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self._before: dict[int, tuple[UntypedStorage, UntypedStorage | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITING, f"{func} waits for the device"
        assert name not in UPLOADING, f"{func} uploads what the host has made"
        self._meet((args, kwargs), lambda storage: storage.clone())
        result = func(*args, **(kwargs or {}))
        self._meet(result, lambda storage: None)
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def _meet(self, tensors: Any, kept: Callable[[UntypedStorage], UntypedStorage | None]) -> None:
        """Keep what lies in memory that is met for the first time; None of what an op has allocated."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self._before:
                self._before[storage.data_ptr()] = storage, kept(storage)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for storage, before in self._before.values():
            storage.fill_(0xFF) if before is None else storage.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if hasattr(new, "wait") and not isinstance(new, Tensor):
                    new.wait()  # a collective's handle
                elif isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class HostIndices(TorchFunctionMode):
    """Refuses an index that is, or has, a list: it becomes a tensor, uploaded by a copy that the host waits for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, list) for part in index), f"{args[1]} as an index uploads a list"
        return func(*args, **(kwargs or {}))


@contextmanager
def in_a_capture() -> Iterator[None]:
    """Makes optimizers believe that a CUDA graph is being captured."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("core.stepping", "core.options"):
            patch.setattr(f"fusedonebit.{module}.capturing", lambda device: True)
        yield


@contextmanager
def capturing() -> Iterator[Tape]:
    """Records the ops in it; they do run, unlike in the capture of a CUDA graph, but nothing stays of what they do."""
    with in_a_capture(), HostIndices(), Tape() as tape:
        yield tape
