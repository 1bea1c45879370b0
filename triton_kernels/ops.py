"""Every op of the package, registered once with ``torch.library`` as ``fusedonebit::<name>``.

An op has one schema, one fake implementation (none returns a tensor, all write into arguments) and
one implementation per backend. Callers use ``torch.ops.fusedonebit.<name>``; ``torch.compile`` sees
an opaque op that mutates what the schema marks.

Registered through ``torch.library.Library``: the decorator ``custom_op`` imports Dynamo at its
first call (over a second) and costs four times as much at every later one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import twins

_TABLES = "Tensor coef, Tensor block_tensor"
_LIVE = "Tensor live, Tensor live_row"
_SIZES = "SymInt[] sizes, int block_size"

SCHEMAS: dict[str, str] = {
    "pack": "(Tensor x, Tensor(a!) bits) -> ()",
    "unpack": "(Tensor bits, Tensor(a!) x) -> ()",
    "flatten": f"(Tensor[] tensors, {_SIZES}, float factor, Tensor(a!) out) -> ()",
    "momentum_compress": (
        f"(Tensor[] grads, {_SIZES}, Tensor(a!) compensated, Tensor worker_scale, "
        f"Tensor exp_avg_bits, Tensor exp_avg_scale, {_TABLES}, Tensor? exp_avg_sq, "
        f"bool eps_inside_sqrt, {_LIVE}, Tensor(b!) bits, Tensor(c!) partials) -> ()"
    ),
    "finish": (
        "(Tensor partials, Tensor segment, Tensor segment_start, Tensor count, int norm, Tensor(a!) scale, "
        "Tensor(b!) message_scales, Tensor(c!) message_flags) -> ()"
    ),
    "server_reduce": (
        "(Tensor arrived_bits, Tensor arrived_scales, Tensor slot, Tensor skip, int block_size, "
        f"Tensor(a!) compensated, Tensor server_scale, {_LIVE}, Tensor(b!) bits, Tensor(c!) partials) -> ()"
    ),
    "adam_apply": (
        f"(Tensor(a!)[] params, {_SIZES}, Tensor exp_avg_bits, Tensor exp_avg_scale, Tensor? exp_avg_sq, "
        f"bool eps_inside_sqrt, {_TABLES}, {_LIVE}, Tensor skip) -> ()"
    ),
    "adam_update": (
        f"(Tensor(a!)[] params, {_SIZES}, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
        f"{_TABLES}, {_LIVE}, Tensor skip, Tensor(d!)? exp_avg_sq_sums) -> ()"
    ),
    "freeze": f"({_SIZES}, Tensor(a!) exp_avg, Tensor(b!) exp_avg_sq, {_TABLES}, Tensor? dead_value) -> ()",
    "live_variance": f"({_SIZES}, Tensor exp_avg_sq, Tensor(a!) partials) -> ()",
    "settle": f"(Tensor(a!) compensated, Tensor(b!) scale, {_LIVE}) -> ()",
}
"""Schema of each op; what the arguments mean is in the docstring of its twin."""

_LIBRARY = torch.library.Library("fusedonebit", "DEF")


def _fake(*args: object) -> None:
    """Nothing is returned, so there is no shape to infer."""


def _register(name: str, twin: Callable[..., None]) -> None:
    _LIBRARY.define(name + SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, twin, device)
    torch.library.register_fake(f"fusedonebit::{name}", _fake, lib=_LIBRARY)


for _name in SCHEMAS:
    _register(_name, getattr(twins, _name))


def backend(device: torch.device) -> str:
    """Names what runs on a device, for ``repr`` and ``stats()``."""
    return f"plain torch, eager ({device.type})"
