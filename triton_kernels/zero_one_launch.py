"""Launches the kernels of 0/1 Adam; see ``launch``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .launch import block_starts, launch, pointer_table


def local_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    eps_inside_sqrt: bool,
    precondition: bool,
    compensated: Tensor,
    worker_scale: Tensor,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    hold: Tensor,
    moves: bool,
    last: bool,
    leaks: bool,
    flags: Tensor,
) -> None:
    """See ``zero_one_kernels.local_step``."""
    device, blocks = compensated.device, len(live_row)
    targets, sources = pointer_table(params, device), pointer_table(grads, device, sizes)
    launch(
        "local_step",
        blocks,
        targets.table,
        sources.table,
        len(params),
        exp_avg,
        exp_avg_sq,
        compensated,
        worker_scale,
        coef,
        block_tensor,
        block_starts(sizes, blocks, block_size, device),
        live,
        live_row,
        hold,
        flags,
        DTYPE=targets.dtype,
        ALIGNED=targets.aligned,
        GRAD_DTYPE=sources.dtype,
        GRAD_ALIGNED=sources.aligned,
        EPS_INSIDE=eps_inside_sqrt,
        PRECONDITION=precondition,
        MOVES=moves,
        LAST=last,
        LEAKS=leaks,
        BLOCK=block_size,
    )


def rebuild_momentum(
    sizes: Sequence[int],
    block_size: int,
    exp_avg_bits: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor | None,
    eps_inside_sqrt: bool,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    exp_avg: Tensor,
) -> None:
    """See ``zero_one_kernels.rebuild_momentum``."""
    blocks = len(live_row)
    launch(
        "rebuild_momentum",
        blocks,
        exp_avg_bits,
        exp_avg_bits.stride(0),
        exp_avg_scale,
        exp_avg if exp_avg_sq is None else exp_avg_sq,
        coef,
        block_tensor,
        live,
        live_row,
        exp_avg,
        blocks // len(exp_avg_bits),
        EPS_INSIDE=eps_inside_sqrt,
        PRECONDITION=exp_avg_sq is not None,
        BLOCK=block_size,
    )
