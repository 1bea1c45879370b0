"""Tables that kernels read: addresses of the users' tensors, and where each block of a layout lies."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .capture import capturing
from .layout import FlatLayout
from .live import LiveTable, live_table

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""How kernels are told the dtype of a tensor (``block_io.FP32``, ...)."""
_MIXED, _ALIGNED = 3, 4
_ALIGNMENT = 16  # bytes, for 128-bit loads


class Pointers(NamedTuple):
    """A list of tensors as kernels see it.

    Attributes:
        table: int64 [2, tensors]: address (0: zeros) and dtype of each.
        stored: The dtype of all, or 3 where they differ; 4 more where all are aligned.
        host: What the table was uploaded from.
    """

    table: Tensor
    stored: int
    host: Tensor


_MOST_TABLES = 256
_tables: OrderedDict[tuple[Any, ...], Pointers] = OrderedDict()
_tables_lock = threading.Lock()  # simulated ranks are threads
_captured: list[Pointers] = []  # CUDA graphs read these again whenever they are replayed


def pointer_table(tensors: Sequence[Tensor], device: torch.device, sizes: Sequence[int] | None = None) -> Pointers:
    """The table of addresses and dtypes; uploaded only when one has changed.

    ``sizes`` are checked where given: of gradients; parameters that have changed may be handed on in a step that
    is skipped, and are then not read.

    Raises:
        ValueError: for a tensor that is not of its size, nor empty: kernels would not notice.
    """
    cuda = device.type == "cuda"
    addresses = tuple(t.data_ptr() if t.numel() else 0 for t in tensors)
    kinds = tuple(KINDS[t.dtype] for t in tensors)
    numels = [t.numel() for t in tensors]
    if sizes is not None and (
        len(numels) != len(sizes) or not all(n in (0, size) for n, size in zip(numels, sizes, strict=True))
    ):
        raise ValueError(f"tensors must have {_few(sizes)} elements, or none, got {_few(numels)}")
    # By stream: a table that one stream uploads may not be there yet for another.
    stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
    what = (addresses, kinds, device)
    with _tables_lock:
        if capturing(device):
            # What was uploaded before a capture is there when its graph is replayed. What is uploaded in a capture is
            # there only after a replay of that graph, so that neither another graph nor an uncaptured step may read it.
            uploaded = next((pointers for known, pointers in _tables.items() if known[:-1] == what), None)
            pointers = uploaded or _make_pointers(addresses, kinds, device)
            _captured.append(pointers)
            return pointers
        key = (*what, stream)
        pointers = _tables.pop(key) if key in _tables else _make_pointers(addresses, kinds, device)
        _tables[key] = pointers
        if len(_tables) > _MOST_TABLES:
            _tables.popitem(last=False)
    return pointers


def _few(numbers: Sequence[int]) -> str:
    return f"{list(numbers[:8])}" if len(numbers) <= 8 else f"{list(numbers[:8])} and {len(numbers) - 8} more"


def _make_pointers(addresses: tuple[int, ...], kinds: tuple[int, ...], device: torch.device) -> Pointers:
    host = torch.tensor([addresses, kinds], dtype=torch.int64, pin_memory=device.type == "cuda")
    used = {kind for kind, address in zip(kinds, addresses, strict=True) if address}
    stored = used.pop() if len(used) == 1 else _MIXED if used else 0
    stored += _ALIGNED * all(address % _ALIGNMENT == 0 for address in addresses)
    return Pointers(host.to(device, non_blocking=True), stored, host)


class BlockTables:
    """Static tables of a layout on a device, made when they are first asked for.

    Args:
        sizes, blocks, block_size: Of the layout, as ops are told them.
        device: Where the tables lie.
    """

    def __init__(self, sizes: tuple[int, ...], blocks: int, block_size: int, device: torch.device) -> None:
        self._layout, self._device = FlatLayout(sizes, blocks, block_size), device

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and what is unpickled, are the shared one."""
        layout = self._layout
        return block_tables, (layout.sizes, layout.world_size, layout.block_size, self._device)

    @cached_property
    def tensor(self) -> Tensor:
        """Whose each block is: int32 [blocks]."""
        return self._layout.block_tensor().to(self._device, torch.int32)

    @cached_property
    def start(self) -> Tensor:
        """Where each block begins in its tensor: int64 [blocks]."""
        layout = self._layout
        first = torch.tensor(layout.first_block, dtype=torch.int64)
        start = (torch.arange(layout.n_blocks) - first[layout.block_tensor()]) * layout.block_size
        return start.to(self._device)

    @cached_property
    def live(self) -> LiveTable:
        """Which elements are no padding."""
        return live_table(self._layout).to(self._device)


_block_tables: WeakValueDictionary[tuple[Any, ...], BlockTables] = WeakValueDictionary()


def block_tables(sizes: Sequence[int], blocks: int, block_size: int, device: torch.device) -> BlockTables:
    """The tables of a layout, the same for all who ask while somebody keeps them.

    Whoever launches kernels on a layout again and again keeps its tables: they would be made anew for each launch, and
    a CUDA graph would read memory that is no longer theirs.
    """
    key = (tuple(sizes), blocks, block_size, device)
    with _tables_lock:
        tables = _block_tables.get(key)
        if tables is None:
            tables = _block_tables[key] = BlockTables(*key)
    return tables


def tables_of(layout: FlatLayout, device: torch.device) -> BlockTables:
    """Those of a whole layout, to keep."""
    return block_tables(layout.sizes, layout.n_blocks, layout.block_size, device)
