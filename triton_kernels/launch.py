"""Launches the kernels, Triton's or those in C: grids, pointer tables, and a count of every launch.

Each function has the signature of its op, so that a backend is a table from names to functions.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from . import native
from .arithmetic import NONZERO
from .backends import chosen
from .capture import capturing
from .coefficients import LARGEST_GRADIENT
from .layout import FlatLayout
from .live import LiveTable, live_table
from .twins import TAIL

NUM_WARPS = 4
FINISH_WARPS, FINISH_LANES = 8, 2048
ONE_SCALE_WARPS, ONE_SCALE_LANES = 32, 8192  # a single program scans all blocks: give it a whole multiprocessor
SHORT_WARPS, SHORT_LANES = 4, 128
SHORT_SEGMENT = 32  # blocks, the most that 4096 elements are
FP32 = 0
KINDS = {torch.float32: FP32, torch.bfloat16: 1, torch.float16: 2}
_MIXED = 3
_POINTER_ALIGNMENT = 16  # bytes, for 128-bit loads


class LaunchCounter:
    """How many kernels have been launched, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, int] = {}

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_name.values())

    def reset(self) -> None:
        """Starts again at zero."""
        self.by_name.clear()


launches = LaunchCounter()
"""Counts every launch of this process."""


def launch(name: str, programs: int, *arguments: Any, num_warps: int = NUM_WARPS, **constants: Any) -> None:
    """Launches a kernel on that many programs, on the device of its first argument, and counts it."""
    launches.by_name[name] = launches.by_name.get(name, 0) + 1
    device = arguments[0].device
    functions = native.library() if chosen(device.type) == "native" else None
    if functions is not None:
        native.run(functions[name], programs, arguments, constants)
        return
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        # A fused multiply-add would round once where the twins round twice.
        _triton(name)[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)


def _triton(name: str) -> Any:
    # Imported late: importing triton takes time that CPU users need not spend.
    from . import (
        finish_kernels,
        kernels,
        lamb_kernels,
        lion_kernels,
        marsit_kernels,
        update_kernels,
        zero_one_kernels,
    )

    modules = (
        kernels,
        finish_kernels,
        update_kernels,
        lamb_kernels,
        marsit_kernels,
        zero_one_kernels,
        lion_kernels,
    )
    return next(getattr(module, name) for module in modules if hasattr(module, name))


class _Pointers(NamedTuple):
    table: Tensor
    dtype: int
    aligned: bool
    host: Tensor


_MOST_TABLES = 256
_tables: OrderedDict[tuple[Any, ...], _Pointers] = OrderedDict()
_tables_lock = threading.Lock()  # simulated ranks are threads
_captured: list[_Pointers] = []  # CUDA graphs read these again whenever they are replayed


def pointer_table(tensors: Sequence[Tensor], device: torch.device, sizes: Sequence[int] | None = None) -> _Pointers:
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


def _make_pointers(addresses: tuple[int, ...], kinds: tuple[int, ...], device: torch.device) -> _Pointers:
    host = torch.tensor([addresses, kinds], dtype=torch.int64, pin_memory=device.type == "cuda")
    used = {kind for kind, address in zip(kinds, addresses, strict=True) if address}
    dtype = used.pop() if len(used) == 1 else _MIXED if used else 0
    aligned = all(address % _POINTER_ALIGNMENT == 0 for address in addresses)
    return _Pointers(host.to(device, non_blocking=True), dtype, aligned, host)


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


def block_starts(sizes: Sequence[int], blocks: int, block_size: int, device: torch.device) -> Tensor:
    """Where each block begins in its tensor: int64 [blocks]."""
    return block_tables(sizes, blocks, block_size, device).start


def pack(x: Tensor, bits: Tensor) -> None:
    """See ``kernels.pack``."""
    launch("pack", -(-x.numel() // 1024), x.contiguous(), bits, x.numel(), BLOCK=1024)


def unpack(bits: Tensor, x: Tensor) -> None:
    """See ``kernels.unpack``."""
    launch("unpack", -(-x.numel() // 1024), bits, x, x.numel(), BLOCK=1024)


def flatten(
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    factor: float,
    unscale: Tensor | None,
    out: Tensor,
) -> None:
    """See ``kernels.flatten``."""
    pointers = pointer_table(tensors, out.device, sizes)
    blocks = (out.numel() - TAIL) // block_size
    table = block_tables(sizes, blocks, block_size, out.device)
    launch(
        "flatten",
        blocks,
        pointers.table,
        len(tensors),
        table.tensor,
        table.start,
        table.live.row,
        table.live.bits,
        factor,
        out if unscale is None else unscale,
        LARGEST_GRADIENT * factor,
        out,
        out[-TAIL:],
        DTYPE=pointers.dtype,
        ALIGNED=pointers.aligned,
        SCALED=unscale is not None,
        BLOCK=block_size,
    )


def gradient_squares(
    tensors: Sequence[Tensor], sizes: Sequence[int], block_size: int, bound: Tensor, squares: Tensor
) -> None:
    """See ``kernels.gradient_squares``."""
    pointers = pointer_table(tensors, squares.device, sizes)
    table = block_tables(sizes, len(squares), block_size, squares.device)
    launch(
        "gradient_squares",
        len(squares),
        pointers.table,
        len(tensors),
        table.tensor,
        table.start,
        table.live.row,
        table.live.bits,
        bound,
        squares,
        DTYPE=pointers.dtype,
        ALIGNED=pointers.aligned,
        BLOCK=block_size,
    )


def momentum_compress(
    grads: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    compensated: Tensor,
    worker_scale: Tensor,
    exp_avg_bits: Tensor,
    exp_avg_scale: Tensor,
    coef: Tensor,
    block_tensor: Tensor,
    exp_avg_sq: Tensor | None,
    eps_inside_sqrt: bool,
    live: Tensor,
    live_row: Tensor,
    bits: Tensor,
    partials: Tensor,
    hold: Tensor,
) -> None:
    """See ``kernels.momentum_compress``."""
    pointers = pointer_table(grads, compensated.device, sizes)
    blocks = len(live_row)
    launch(
        "momentum_compress",
        blocks,
        pointers.table,
        len(grads),
        compensated,
        worker_scale,
        exp_avg_bits,
        exp_avg_bits.stride(0),
        exp_avg_scale,
        coef,
        block_tensor,
        block_starts(sizes, blocks, block_size, compensated.device),
        compensated if exp_avg_sq is None else exp_avg_sq,
        live,
        live_row,
        bits,
        bits.stride(0),
        bits.stride(-2),
        partials,
        partials.stride(0),
        hold,
        blocks // len(bits),
        DTYPE=pointers.dtype,
        ALIGNED=pointers.aligned,
        VARIANCE=FP32 if exp_avg_sq is None else KINDS[exp_avg_sq.dtype],
        EPS_INSIDE=eps_inside_sqrt,
        PRECONDITION=exp_avg_sq is not None,
        TERNARY=bits.dim() == 3,
        BLOCK=block_size,
    )


def finish(
    partials: Tensor,
    segment: Tensor,
    segment_start: Tensor,
    count: Tensor,
    norm: int,
    scale: Tensor,
    message_scales: Tensor,
    message_flags: Tensor,
) -> None:
    """See ``finish_kernels.finish``."""
    blocks, segments, messages = len(segment), len(count), len(message_flags)
    warps, lanes = (ONE_SCALE_WARPS, ONE_SCALE_LANES) if segments == 1 else (FINISH_WARPS, FINISH_LANES)
    short = segments > 1 and blocks <= SHORT_SEGMENT * segments
    if short:
        warps, lanes = SHORT_WARPS, SHORT_LANES
        message_flags.zero_()
    launch(
        "finish",
        -(-segments // lanes) if short else segments + 1,
        partials,
        partials.stride(0),
        blocks,
        segment,
        segment_start,
        segments,
        count,
        scale,
        message_scales,
        message_scales.stride(0),
        message_flags,
        message_flags.stride(0),
        messages,
        blocks // messages,
        num_warps=warps,
        NORM=norm,
        TERNARY=len(partials) > NONZERO,
        LANES=lanes,
        SHORT=SHORT_SEGMENT if short else 0,
    )


def server_reduce(
    arrived_bits: Tensor,
    arrived_scales: Tensor,
    slot: Tensor,
    skip: Tensor,
    block_size: int,
    compensated: Tensor,
    server_scale: Tensor,
    live: Tensor,
    live_row: Tensor,
    bits: Tensor,
    partials: Tensor,
    agreement: Tensor,
    hold: Tensor,
) -> None:
    """See ``kernels.server_reduce``."""
    blocks, world_size, keeps = len(live_row), len(arrived_bits), compensated.numel() > 0
    launch(
        "server_reduce",
        blocks,
        arrived_bits,
        arrived_bits.stride(0),
        arrived_bits.stride(-2),
        arrived_scales,
        arrived_scales.stride(0),
        slot,
        skip,
        compensated if keeps else arrived_scales,
        server_scale if keeps else arrived_scales,
        live,
        live_row,
        bits,
        partials,
        partials.stride(0),
        agreement,
        agreement.stride(0),
        hold,
        world_size,
        1.0 / world_size,
        TERNARY=arrived_bits.dim() == 3,
        KEEPS=keeps,
        BLOCK=block_size,
    )
