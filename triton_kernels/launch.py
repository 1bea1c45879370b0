"""Launches the kernels, Triton's or those in C: grids, pointer tables, and a count of every launch.

Each function has the signature of its op, so that a backend is a table from names to functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from . import native
from .backends import chosen
from .coefficients import LARGEST_GRADIENT
from .eager import NONZERO
from .op import launches
from .tables import KINDS, block_tables, pointer_table
from .twins import TAIL

NUM_WARPS = 4
FINISH_WARPS, FINISH_LANES = 8, 2048
ONE_SCALE_WARPS, ONE_SCALE_LANES = 32, 8192  # a single program scans all blocks: give it a whole multiprocessor
SHORT_WARPS, SHORT_LANES = 4, 128
SHORT_SEGMENT = 32  # blocks, the most that 4096 elements are
FP32 = 0


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
    )
    return next(getattr(module, name) for module in modules if hasattr(module, name))


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
