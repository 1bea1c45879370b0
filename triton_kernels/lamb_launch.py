"""Launches the Triton kernels of LAMB and 1-bit LAMB; see ``launch``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .launch import KINDS, block_starts, launch, pointer_table

LANES = 1024  # blocks that a layer's program reads at once


def lamb_update(
    params: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    eps_inside_sqrt: bool,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    skip: Tensor,
    exp_avg_sq_sums: Tensor | None,
    norms: Tensor,
) -> None:
    """See ``lamb_kernels.lamb_update``."""
    pointers = pointer_table(params, exp_avg.device)
    blocks = len(live_row)
    launch(
        "lamb_update",
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
        norms if exp_avg_sq_sums is None else exp_avg_sq_sums,
        norms,
        norms.stride(0),
        DTYPE=pointers.dtype,
        ALIGNED=pointers.aligned,
        EPS_INSIDE=eps_inside_sqrt,
        SUMS=exp_avg_sq_sums is not None,
        BLOCK=block_size,
    )


def lamb_coefficient(
    norms: Tensor, layer_start: Tensor, skip: Tensor, deepspeed: bool, coef: Tensor, layers: Tensor
) -> None:
    """See ``lamb_kernels.lamb_coefficient``."""
    launch(
        "lamb_coefficient",
        len(coef),
        norms,
        norms.stride(0),
        layer_start,
        skip,
        coef,
        layers,
        len(coef),
        DEEPSPEED=deepspeed,
        LANES=LANES,
    )


def lamb_move(
    params: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    eps_inside_sqrt: bool,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    skip: Tensor,
    rounding: Tensor | None,
) -> None:
    """See ``lamb_kernels.lamb_move``."""
    pointers = pointer_table(params, exp_avg.device)
    blocks = len(live_row)
    launch(
        "lamb_move",
        blocks,
        pointers.table,
        len(params),
        exp_avg,
        exp_avg_sq,
        coef,
        block_tensor,
        block_starts(sizes, blocks, block_size, exp_avg.device),
        live,
        live_row,
        skip,
        coef if rounding is None else rounding,
        DTYPE=pointers.dtype,
        ALIGNED=pointers.aligned,
        EPS_INSIDE=eps_inside_sqrt,
        ROUNDING=rounding is not None,
        BLOCK=block_size,
    )


def lamb_ratio(
    params: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    exp_avg_bits: Tensor,
    exp_avg_scale: Tensor,
    last_bits: Tensor,
    last_scale: Tensor,
    exp_avg_sq: Tensor,
    fresh: Tensor,
    started: Tensor,
    eps_inside_sqrt: bool,
    preconditioned: bool,
    deepspeed: bool,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    skip: Tensor,
    largest: Tensor,
    norms: Tensor | None,
) -> None:
    """See ``lamb_kernels.lamb_ratio``."""
    pointers = pointer_table(params, fresh.device)
    blocks = len(live_row)
    launch(
        "lamb_ratio",
        blocks,
        pointers.table,
        len(params),
        exp_avg_bits,
        exp_avg_bits.stride(0),
        exp_avg_bits.stride(-2),
        exp_avg_scale,
        last_bits,
        last_scale,
        exp_avg_sq,
        fresh,
        started,
        coef,
        block_tensor,
        block_starts(sizes, blocks, block_size, fresh.device),
        live,
        live_row,
        skip,
        largest,
        largest if norms is None else norms,
        0 if norms is None else norms.stride(0),
        blocks // len(exp_avg_bits),
        DTYPE=pointers.dtype,
        ALIGNED=pointers.aligned,
        VARIANCE=KINDS[exp_avg_sq.dtype],
        EPS_INSIDE=eps_inside_sqrt,
        PRECONDITIONED=preconditioned,
        DEEPSPEED=deepspeed,
        BLEND=norms is not None,
        TERNARY=exp_avg_bits.dim() == 3,
        BLOCK=block_size,
    )


def lamb_rescale(
    largest: Tensor,
    norms: Tensor | None,
    layer_start: Tensor,
    skip: Tensor,
    deepspeed: bool,
    started: Tensor,
    coef: Tensor,
    layers: Tensor,
) -> None:
    """See ``lamb_kernels.lamb_rescale``."""
    launch(
        "lamb_rescale",
        len(coef),
        largest,
        largest if norms is None else norms,
        0 if norms is None else norms.stride(0),
        layer_start,
        skip,
        started,
        coef,
        layers,
        len(coef),
        DEEPSPEED=deepspeed,
        BLEND=norms is not None,
        LANES=LANES,
    )
