"""The kernels of fusedonebit by themselves: packing, compression, reduction and update.

They know tensors only: no process group, no optimizer. ``momentum_compress``, ``server_reduce``
and the others are the registered ops ``torch.ops.fusedonebit.*``; their docstrings are those of
their plain-torch twins in ``twins``, ``update_twins``, ``lamb_twins``, ``marsit_twins``, ``zero_one_twins`` and
``lion_twins``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops as _ops  # registers them  # noqa: F401
from .backends import backend, using
from .coefficients import LARGEST_GRADIENT, Coef, Layer
from .layout import BLOCK_SIZES, FlatLayout, ScaleScope, Span, block_table, choose_block_size
from .lion import lion_compress
from .live import LiveTable, live_table
from .twins import SCALE_NORMS, TAIL

flatten = torch.ops.fusedonebit.flatten
gradient_squares = torch.ops.fusedonebit.gradient_squares
momentum_compress = torch.ops.fusedonebit.momentum_compress
finish = torch.ops.fusedonebit.finish
server_reduce = torch.ops.fusedonebit.server_reduce
apply_momentum = torch.ops.fusedonebit.apply_momentum
adam_update = torch.ops.fusedonebit.adam_update
local_update = torch.ops.fusedonebit.local_update
merge_signs = torch.ops.fusedonebit.merge_signs
pick_owned = torch.ops.fusedonebit.pick_owned
place_owned = torch.ops.fusedonebit.place_owned
add_values = torch.ops.fusedonebit.add_values
lamb_update = torch.ops.fusedonebit.lamb_update
lamb_coefficient = torch.ops.fusedonebit.lamb_coefficient
lamb_move = torch.ops.fusedonebit.lamb_move
lamb_ratio = torch.ops.fusedonebit.lamb_ratio
lamb_rescale = torch.ops.fusedonebit.lamb_rescale
local_step = torch.ops.fusedonebit.local_step
rebuild_momentum = torch.ops.fusedonebit.rebuild_momentum
freeze = torch.ops.fusedonebit.freeze
exponents = torch.ops.fusedonebit.exponents
live_variance = torch.ops.fusedonebit.live_variance
square_sums = torch.ops.fusedonebit.square_sums
settle = torch.ops.fusedonebit.settle
thaw = torch.ops.fusedonebit.thaw
update_sums = torch.ops.fusedonebit.update_sums


def pack(x: Tensor) -> Tensor:
    """Packs the signs of ``x`` (a float dtype, n elements, n a multiple of 8) to uint8 [n / 8].

    Bit ``i % 8`` of byte ``i // 8``, least significant first, is 1 where ``x[i] >= 0``; so -0.0
    counts as +1, as 0.0 does, and a NaN as -1.

    Raises:
        ValueError: if the number of elements is not a multiple of 8.
    """
    if x.numel() % 8:
        raise ValueError(f"x must have a multiple of 8 elements, got {x.numel()}; pad it")
    bits = torch.empty(x.numel() // 8, dtype=torch.uint8, device=x.device)
    torch.ops.fusedonebit.pack(x.reshape(-1), bits)
    return bits


def unpack(bits: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The inverse of ``pack``: +1 and -1 in ``dtype`` [8 n] from uint8 ``bits`` of n bytes."""
    signs = torch.empty(bits.numel() * 8, dtype=dtype, device=bits.device)
    torch.ops.fusedonebit.unpack(bits.reshape(-1), signs)
    return signs


__all__ = [
    "BLOCK_SIZES",
    "LARGEST_GRADIENT",
    "SCALE_NORMS",
    "TAIL",
    "Coef",
    "FlatLayout",
    "Layer",
    "LiveTable",
    "ScaleScope",
    "Span",
    "adam_update",
    "add_values",
    "apply_momentum",
    "backend",
    "block_table",
    "choose_block_size",
    "exponents",
    "finish",
    "flatten",
    "freeze",
    "gradient_squares",
    "lamb_coefficient",
    "lamb_move",
    "lamb_ratio",
    "lamb_rescale",
    "lamb_update",
    "lion_compress",
    "live_table",
    "live_variance",
    "local_step",
    "local_update",
    "merge_signs",
    "momentum_compress",
    "pack",
    "pick_owned",
    "place_owned",
    "rebuild_momentum",
    "server_reduce",
    "settle",
    "square_sums",
    "thaw",
    "unpack",
    "update_sums",
    "using",
]
