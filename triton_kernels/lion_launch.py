"""Launches the kernel of distributed Lion's worker; see ``launch``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .launch import block_starts, launch, pointer_table


def lion_compress(
    grads: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    exp_avg: Tensor,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    step: Tensor,
    hold: Tensor,
    bits: Tensor,
    flags: Tensor,
) -> None:
    """See ``lion_kernels.lion_compress``."""
    device, blocks = exp_avg.device, len(live_row)
    pointers = pointer_table(grads, device, sizes)
    launch(
        "lion_compress",
        blocks,
        pointers.table,
        len(grads),
        exp_avg,
        coef,
        block_tensor,
        block_starts(sizes, blocks, block_size, device),
        live,
        live_row,
        step,
        hold,
        bits,
        bits.stride(0),
        flags,
        blocks // len(bits),
        DTYPE=pointers.dtype,
        ALIGNED=pointers.aligned,
        BLOCK=block_size,
    )
