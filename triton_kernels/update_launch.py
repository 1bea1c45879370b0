"""Launches the Triton kernels that change parameters; see ``launch``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .launch import FP32, KINDS, block_starts, launch, pointer_table


def apply_momentum(
    params: Sequence[Tensor],
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
    skip: Tensor,
    rounding: Tensor | None,
) -> None:
    """See ``update_kernels.apply_momentum``."""
    pointers = pointer_table(params, exp_avg_scale.device)
    blocks = len(live_row)
    launch(
        "apply_momentum",
        blocks,
        pointers.table,
        len(params),
        exp_avg_bits,
        exp_avg_bits.stride(0),
        exp_avg_bits.stride(-2),
        exp_avg_scale,
        exp_avg_scale if exp_avg_sq is None else exp_avg_sq,
        coef,
        block_tensor,
        block_starts(sizes, blocks, block_size, exp_avg_scale.device),
        live,
        live_row,
        skip,
        coef if rounding is None else rounding,
        blocks // len(exp_avg_bits),
        DTYPE=pointers.dtype,
        ALIGNED=pointers.aligned,
        VARIANCE=FP32 if exp_avg_sq is None else KINDS[exp_avg_sq.dtype],
        EPS_INSIDE=eps_inside_sqrt,
        PRECONDITIONED=exp_avg_sq is None,
        TERNARY=exp_avg_bits.dim() == 3,
        ROUNDING=rounding is not None,
        BLOCK=block_size,
    )


def adam_update(
    params: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    skip: Tensor,
    exp_avg_sq_sums: Tensor | None,
    rounding: Tensor | None,
) -> None:
    """See ``update_kernels.adam_update``."""
    pointers = pointer_table(params, exp_avg.device)
    blocks = len(live_row)
    launch(
        "adam_update",
        blocks,
        pointers.table,
        len(params),
        grad,
        exp_avg,
        exp_avg_sq,
        coef,
        block_tensor,
        block_starts(sizes, blocks, block_size, exp_avg.device),
        live,
        live_row,
        skip,
        exp_avg if exp_avg_sq_sums is None else exp_avg_sq_sums,
        coef if rounding is None else rounding,
        DTYPE=pointers.dtype,
        ALIGNED=pointers.aligned,
        SUMS=exp_avg_sq_sums is not None,
        ROUNDING=rounding is not None,
        BLOCK=block_size,
    )
