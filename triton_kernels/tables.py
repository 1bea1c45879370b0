"""Tables that kernels read: addresses of the users' tensors, where each block of a layout lies, which elements count.

The active mask leaves out padding, masked coordinates and tensors without gradients. A row of ``live`` holds one bit
per element of a block. Row 0 is all ones, row 1 all zeros; blocks of those two kinds need no row of their own, so that
the table stays small unless masks are used. Kernels take the unmasked path where ``live_row`` is 0.
"""

from __future__ import annotations

import operator
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from .layout import FlatLayout

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""How kernels are told the dtype of a tensor (``user_tensors.FP32``, ...)."""
_MIXED, _ALIGNED, _UNREADABLE = 3, 4, 5
_ALIGNMENT = 16  # bytes, for 128-bit loads
_DTYPE = operator.attrgetter("dtype")

FULL_ROW = 0
EMPTY_ROW = 1
SPREAD = 0x0102040810204080  # multiplied by eight 0/1 bytes, its top byte is their bits, LSB first


def capturing(device: torch.device) -> bool:
    """Tell whether a ``device`` captures a CUDA graph: what runs now only runs when the graph is replayed."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # torch asks the current one, which need not be it
        return torch.cuda.is_current_stream_capturing()


class Pattern:
    """Tells in one call whether tensors are like others: of their types, dtypes, layouts, devices, shapes and strides.

    Where gradients are enabled, both times, also whether they require them. torch's compiler makes one of its guards of
    what this does. It keeps no tensor, and each may be given but once.
    """

    def __init__(self) -> None:
        self._guards: TensorGuards | None = None
        self._count = 0

    def fits(self, tensors: Sequence[Tensor], but: Tensor | None = None) -> bool:
        """Tell whether ``tensors``, all but one that may stand there often, are like those that ``take`` got last."""
        given = tensors if len(tensors) == self._count else [each for each in tensors if each is not but]
        return self._guards is not None and len(given) == self._count and self._guards.check(*given)

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Take what ``tensors`` are like."""
        self._guards, self._count = None, len(tensors)
        if tensors:
            self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


class Facts:
    """What kernels are told of a list of tensors; it keeps none. Sizes and dtypes are those of ``known``, if any.

    Attributes:
        numels: Of each.
        found: The address of each, as torch tells it.
        addresses: The same, 0 of those that are empty.
        kinds: The dtype of each, one of ``KINDS``.
        key: All of it, by which tables and plans are found again: bytes, whose hash Python keeps.
    """

    __slots__ = ("addresses", "found", "key", "kinds", "numels")

    def __init__(self, tensors: Sequence[Tensor], known: Facts | None = None) -> None:
        # ``map``, whose loop is not Python's: there may be thousands.
        self.numels: tuple[int, ...] = known.numels if known else tuple(map(Tensor.numel, tensors))
        self.found = self.addresses = tuple(map(Tensor.data_ptr, tensors))
        if not all(self.numels):
            self.addresses = tuple(address if n else 0 for address, n in zip(self.found, self.numels, strict=True))
        kinds = map(KINDS.get, map(_DTYPE, tensors), repeat(_UNREADABLE))
        self.kinds: tuple[int, ...] = known.kinds if known else tuple(kinds)
        self.key = array("Q", (*self.addresses, *self.numels, *self.kinds)).tobytes()


class Listed(list[Tensor]):
    """Tensors and their ``facts``: what whoever made it has found out need not be found out again by each op."""

    def __init__(self, tensors: Sequence[Tensor], facts: Facts) -> None:
        super().__init__(tensors)
        self.facts = facts

    @classmethod
    def of(cls, tensors: Sequence[Tensor], known: Facts | None = None) -> Listed:
        """Return ``tensors``; ``known`` are the facts of such as have these sizes and dtypes, wherever they lie."""
        if known is not None and tuple(map(Tensor.data_ptr, tensors)) == known.found:
            return cls(tensors, known)
        return cls(tensors, Facts(tensors, known))


class Pointers(NamedTuple):
    """A list of tensors as kernels see it."""

    table: Tensor  # int64 [2, tensors]: address (0: zeros) and dtype of each
    stored: int  # the dtype of all, or _MIXED; _ALIGNED more where all are aligned
    host: Tensor  # what the table was uploaded from


_MOST_TABLES = 256
_tables: OrderedDict[tuple[Any, ...], Pointers] = OrderedDict()
_tables_lock = threading.Lock()  # simulated ranks are threads
_captured: list[Pointers] = []  # CUDA graphs read these again whenever they are replayed


def pointer_table(tensors: Sequence[Tensor], device: torch.device) -> Pointers:
    """Return the table of addresses and dtypes; uploaded only when one has changed."""
    cuda = device.type == "cuda"
    facts = tensors.facts if isinstance(tensors, Listed) else Facts(tensors)
    # By stream: a table that one stream uploads may not be there yet for another.
    stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
    what = (facts.key, device)
    with _tables_lock:
        if capturing(device):
            # What was uploaded before a capture is there when its graph is replayed. What is uploaded in a capture is
            # there only after a replay of that graph, so that neither another graph nor an uncaptured step may read it.
            uploaded = next((pointers for known, pointers in _tables.items() if known[:-1] == what), None)
            pointers = uploaded or _make_pointers(facts, device)
            _captured.append(pointers)
            return pointers
        key = (*what, stream)
        found = _tables.get(key)
        if found is None:
            pointers = _tables[key] = _make_pointers(facts, device)
            if len(_tables) > _MOST_TABLES:
                _tables.popitem(last=False)
        else:
            pointers = found
            _tables.move_to_end(key)
    return pointers


def _make_pointers(facts: Facts, device: torch.device) -> Pointers:
    addresses, kinds = facts.addresses, facts.kinds
    host = torch.tensor([addresses, kinds], dtype=torch.int64, pin_memory=device.type == "cuda")
    used = {kind for kind, address in zip(kinds, addresses, strict=True) if address}
    stored = used.pop() if len(used) == 1 else _MIXED if used else 0
    stored += _ALIGNED * all(address % _ALIGNMENT == 0 for address in addresses)
    return Pointers(host.to(device, non_blocking=True), stored, host)


class LiveTable(NamedTuple):
    """The active mask of a layout.

    Attributes:
        bits: uint8 [rows, block_size / 8], LSB first.
        row: int32 [n_blocks], each block's row in ``bits``.
        numel: int32 [n_blocks], live elements of each block.
    """

    bits: Tensor
    row: Tensor
    numel: Tensor

    def to(self, device: torch.device) -> LiveTable:
        """Return a copy on ``device``."""
        return LiveTable(*(tensor.to(device) for tensor in self))

    def mask(self) -> Tensor:
        """Return which elements count: bool [P]; allocates."""
        places = torch.arange(8, dtype=torch.uint8, device=self.bits.device)
        return (self.bits[self.row.long()][..., None] >> places & 1).bool().view(-1)


def live_table(
    layout: FlatLayout, masks: Mapping[int, Tensor] | None = None, excluded: Collection[int] = ()
) -> LiveTable:
    """Build the active mask.

    Args:
        layout: The flat index space.
        masks: For some tensors, bool [size] in memory order; False keeps a coordinate still.
        excluded: Tensors that take no part at all.

    Raises:
        ValueError: if a mask's length is not that of its tensor.
    """
    block = layout.block_size
    patterns = [torch.ones(1, block, dtype=torch.bool), torch.zeros(1, block, dtype=torch.bool)]
    rows = len(patterns)
    row_of_tail: dict[int, int] = {0: FULL_ROW}
    row = torch.full((layout.n_blocks,), EMPTY_ROW, dtype=torch.int32)
    for tensor, size in enumerate(layout.sizes):
        first, end = layout.first_block[tensor : tensor + 2]
        if tensor in excluded or first == end:
            continue
        mask = (masks or {}).get(tensor)
        if mask is None:
            row[first:end] = FULL_ROW
            tail = size % block
            if tail not in row_of_tail:
                row_of_tail[tail] = rows
                patterns.append(torch.arange(block)[None] < tail)
                rows += 1
            row[end - 1] = row_of_tail[tail]
        else:
            if mask.numel() != size:
                raise ValueError(f"mask of tensor {tensor} must have {size} elements, got {mask.numel()}")
            row[first:end], pattern = _rows_of_mask(mask, end - first, block, rows)
            patterns.append(pattern)
            rows += len(pattern)
    numel = torch.cat([pattern.sum(1, dtype=torch.int32) for pattern in patterns])
    return LiveTable(torch.cat([_pack_rows(pattern) for pattern in patterns]), row, numel[row.long()])


def _rows_of_mask(mask: Tensor, blocks: int, block: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return each block's row, int32, where those from ``rows`` on are new; and the new ones, bool [new, block].

    No Python object per block: a mask may have as many elements as the largest tensor.
    """
    padded = torch.zeros(blocks * block, dtype=torch.bool)
    padded[: mask.numel()] = mask.reshape(-1).cpu()
    pattern = padded.view(blocks, block)
    empty = (~pattern.any(1)).nonzero().flatten()
    own = ~pattern.all(1)
    own[empty[1:]] = False  # they share the first one's; not EMPTY_ROW, where kernels leave everything as it was
    row = torch.full((blocks,), FULL_ROW, dtype=torch.int32)
    row[own] = torch.arange(rows, rows + int(own.sum()), dtype=torch.int32)
    row[empty] = row[empty[:1]]
    return row, pattern[own]


def _pack_rows(rows: Tensor) -> Tensor:
    """uint8 [n, block / 8] from bool [n, block], LSB first; a byte is the top one of a product."""
    return ((rows.contiguous().view(torch.int64) * SPREAD) >> 56).to(torch.uint8)


class BlockTables:
    """Static tables of a layout on a device, made when they are first asked for.

    Args:
        sizes, blocks, block_size: Of the layout, as ops are told them.
        device: Where the tables lie.
    """

    def __init__(self, sizes: tuple[int, ...], blocks: int, block_size: int, device: torch.device) -> None:
        self._layout, self._device = FlatLayout(sizes, blocks, block_size), device

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies, and what is unpickled, be the shared one."""
        layout = self._layout
        return block_tables, (layout.sizes, layout.world_size, layout.block_size, self._device)

    def made(self) -> list[Tensor]:
        """Return what there is of them so far."""
        found = (each if isinstance(each, tuple) else (each,) for each in vars(self).values())
        return [tensor for each in found for tensor in each if isinstance(tensor, Tensor)]

    @cached_property
    def tensor(self) -> Tensor:
        """Whose each block is: int32 [blocks]."""
        return self._layout.block_tensor().to(self._device, torch.int32)

    @cached_property
    def start(self) -> Tensor:
        """Tell which of its tensor's blocks each is, from 0 on: int32 [blocks]."""
        layout = self._layout
        first = torch.tensor(layout.first_block, dtype=torch.int64)
        return (torch.arange(layout.n_blocks) - first[layout.block_tensor()]).to(self._device, torch.int32)

    @cached_property
    def live(self) -> LiveTable:
        """Tell which elements are no padding."""
        return live_table(self._layout).to(self._device)

    @cached_property
    def first_block(self) -> Tensor:
        """Tell where each tensor's blocks begin, and behind the last where they end: int32 [tensors + 1]."""
        return torch.tensor(self._layout.first_block, dtype=torch.int32).to(self._device)


_block_tables: WeakValueDictionary[tuple[Any, ...], BlockTables] = WeakValueDictionary()


def block_tables(sizes: Sequence[int], blocks: int, block_size: int, device: torch.device) -> BlockTables:
    """Return the tables of a layout, the same for all who ask while somebody keeps them.

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
    """Return those of a whole layout, to keep."""
    return block_tables(layout.sizes, layout.n_blocks, layout.block_size, device)
