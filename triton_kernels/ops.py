"""Every op of the package, registered once with ``torch.library`` as ``fusedonebit::<name>``.

An op has one schema, one fake implementation (none returns a tensor, all write into arguments) and
one implementation per backend. Callers use ``torch.ops.fusedonebit.<name>``; ``torch.compile`` sees
an opaque op that mutates what the schema marks.

Registered through ``torch.library.Library``: the decorator ``custom_op`` imports Dynamo at its
first call (over a second) and costs four times as much at every later one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import (
    lamb_launch,
    lamb_twins,
    launch,
    marsit_launch,
    marsit_twins,
    native,
    twins,
    update_launch,
    update_twins,
    zero_one_launch,
    zero_one_twins,
)
from .backends import chosen
from .op import _LIBRARY, OPS

_TABLES = "Tensor coef, Tensor block_tensor"
_LIVE = "Tensor live, Tensor live_row"
_SIZES = "SymInt[] sizes, int block_size"

SCHEMAS: dict[str, str] = {
    "pack": "(Tensor x, Tensor(a!) bits) -> ()",
    "unpack": "(Tensor bits, Tensor(a!) x) -> ()",
    "flatten": f"(Tensor[] tensors, {_SIZES}, float factor, Tensor? unscale, Tensor(a!) out) -> ()",
    "gradient_squares": f"(Tensor[] tensors, {_SIZES}, Tensor bound, Tensor(a!) squares) -> ()",
    "momentum_compress": (
        f"(Tensor[] grads, {_SIZES}, Tensor(a!) compensated, Tensor worker_scale, "
        f"Tensor exp_avg_bits, Tensor exp_avg_scale, {_TABLES}, Tensor? exp_avg_sq, "
        f"bool eps_inside_sqrt, {_LIVE}, Tensor(b!) bits, Tensor(c!) partials, Tensor hold) -> ()"
    ),
    "finish": (
        "(Tensor partials, Tensor segment, Tensor segment_start, Tensor count, int norm, Tensor(a!) scale, "
        "Tensor(b!) message_scales, Tensor(c!) message_flags) -> ()"
    ),
    "server_reduce": (
        "(Tensor arrived_bits, Tensor arrived_scales, Tensor slot, Tensor skip, int block_size, "
        f"Tensor(a!) compensated, Tensor server_scale, {_LIVE}, Tensor(b!) bits, Tensor(c!) partials, "
        "Tensor(d!) agreement, Tensor hold) -> ()"
    ),
    "apply_momentum": (
        f"(Tensor(a!)[] params, {_SIZES}, Tensor exp_avg_bits, Tensor exp_avg_scale, Tensor? exp_avg_sq, "
        f"bool eps_inside_sqrt, {_TABLES}, {_LIVE}, Tensor skip, Tensor? rounding) -> ()"
    ),
    "adam_update": (
        f"(Tensor(a!)[] params, {_SIZES}, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
        f"{_TABLES}, {_LIVE}, Tensor skip, Tensor(d!)? exp_avg_sq_sums, Tensor? rounding) -> ()"
    ),
    "lamb_update": (
        f"(Tensor[] params, {_SIZES}, Tensor grad, Tensor(a!) exp_avg, Tensor(b!) exp_avg_sq, bool eps_inside_sqrt, "
        f"{_TABLES}, {_LIVE}, Tensor skip, Tensor(c!)? exp_avg_sq_sums, Tensor(d!) norms) -> ()"
    ),
    "lamb_coefficient": (
        "(Tensor norms, Tensor layer_start, Tensor skip, bool deepspeed, Tensor(a!) coef, Tensor(b!) layers) -> ()"
    ),
    "lamb_move": (
        f"(Tensor(a!)[] params, {_SIZES}, Tensor exp_avg, Tensor exp_avg_sq, bool eps_inside_sqrt, "
        f"{_TABLES}, {_LIVE}, Tensor skip, Tensor? rounding) -> ()"
    ),
    "lamb_ratio": (
        f"(Tensor[] params, {_SIZES}, Tensor exp_avg_bits, Tensor exp_avg_scale, Tensor(a!) last_bits, "
        "Tensor(b!) last_scale, Tensor exp_avg_sq, Tensor(c!) fresh, Tensor started, bool eps_inside_sqrt, "
        f"bool preconditioned, bool deepspeed, {_TABLES}, {_LIVE}, Tensor skip, Tensor(d!) largest, "
        "Tensor(e!)? norms) -> ()"
    ),
    "lamb_rescale": (
        "(Tensor largest, Tensor? norms, Tensor layer_start, Tensor skip, bool deepspeed, Tensor(a!) started, "
        "Tensor(b!) coef, Tensor(c!) layers) -> ()"
    ),
    "freeze": (
        f"({_SIZES}, Tensor(a!) exp_avg, Tensor(b!) exp_avg_sq, bool eps_inside_sqrt, bool precondition, {_TABLES}, "
        "Tensor? dead_value, Tensor? least, bool bfloat16=False) -> ()"
    ),
    "thaw": (
        f"({_SIZES}, Tensor(a!) exp_avg, Tensor(b!) exp_avg_sq, bool eps_inside_sqrt, bool precondition, {_TABLES}, "
        f"{_LIVE}, bool clip) -> ()"
    ),
    "update_sums": (
        f"({_SIZES}, Tensor? x, Tensor exp_avg_sq, bool eps_inside_sqrt, {_TABLES}, {_LIVE}, Tensor(a!) partials) -> ()"
    ),
    "live_variance": f"({_SIZES}, Tensor exp_avg_sq, Tensor(a!) partials) -> ()",
    "exponents": f"({_SIZES}, Tensor x, {_LIVE}, Tensor(a!) counts) -> ()",
    "square_sums": f"({_SIZES}, Tensor x, {_LIVE}, Tensor(a!) partials) -> ()",
    "local_update": (
        f"(Tensor(a!)[] params, Tensor[] grads, {_SIZES}, int first, int last, Tensor(b!)? exp_avg, "
        "Tensor(c!)? exp_avg_sq, Tensor(d!) compensated, Tensor scale, Tensor limit, Tensor(e!) bits, "
        f"{_TABLES}, {_LIVE}, Tensor factor, Tensor hold, bool decays, bool moves, Tensor(f!) flags) -> ()"
    ),
    "merge_signs": (
        "(Tensor(a!) bits, Tensor arrived_bits, int threshold, int seed, Tensor(b!) words, Tensor arrived_words, "
        "int checked, int flags, int mismatch) -> ()"
    ),
    "pick_owned": "(Tensor bits, int rank, int seed, Tensor(a!) owners, Tensor(b!) picked) -> ()",
    "place_owned": "(Tensor gathered, Tensor owners, Tensor(a!) bits) -> ()",
    "add_values": (
        f"(Tensor(a!)[] params, {_SIZES}, Tensor values, bool replaces, {_LIVE}, Tensor skip, Tensor? rounding) -> ()"
    ),
    "local_step": (
        f"(Tensor(a!)[] params, Tensor[] grads, {_SIZES}, Tensor(b!) exp_avg, Tensor exp_avg_sq, bool eps_inside_sqrt, "
        f"bool precondition, Tensor(c!) compensated, Tensor worker_scale, {_TABLES}, {_LIVE}, Tensor hold, bool moves, "
        "bool last, bool leaks, Tensor(d!) flags) -> ()"
    ),
    "rebuild_momentum": (
        f"({_SIZES}, Tensor exp_avg_bits, Tensor exp_avg_scale, Tensor? exp_avg_sq, bool eps_inside_sqrt, {_TABLES}, "
        f"{_LIVE}, Tensor(a!) exp_avg) -> ()"
    ),
    "settle": f"(Tensor(a!) compensated, Tensor(b!) scale, bool ternary, {_LIVE}) -> ()",
}
"""Schema of each op; what the arguments mean is in the docstring of its twin."""

KERNELS = frozenset(SCHEMAS) - {
    *("exponents", "freeze", "live_variance", "settle", "square_sums", "thaw", "update_sums"),
}
"""Ops with a Triton kernel; the others run once, or when somebody asks."""


def twin(name: str) -> Callable[..., None]:
    """The plain-torch twin of an op: what it computes, and its documentation."""
    return (
        OPS[name].eager if name in OPS else _find(name, twins, update_twins, lamb_twins, marsit_twins, zero_one_twins)
    )


def _implementation(name: str, device_type: str) -> Callable[..., None]:
    plain = twin(name)
    if name not in KERNELS:
        return plain

    launchers = (launch, update_launch, lamb_launch, marsit_launch, zero_one_launch)
    in_c = name in native.declarations()
    writes_params = "(Tensor(a!)[] params" in SCHEMAS[name]

    def run(*arguments: Any) -> None:
        backend = chosen(device_type)
        if backend == "plain" or (backend == "native" and not in_c):
            plain(*arguments)
            return
        _find(name, *launchers)(*arguments)
        if writes_params:  # through their addresses, which autograd does not see
            torch.autograd.graph.increment_version(arguments[0])

    return run


def _find(name: str, *modules: ModuleType) -> Callable[..., None]:
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def _fake(*arguments: object) -> None:
    """Nothing is returned, so there is no shape to infer."""


def _register(name: str) -> None:
    _LIBRARY.define(name + SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):  # ROCm's tensors are CUDA tensors to torch
        _LIBRARY.impl(name, _implementation(name, key.lower()), key)
    torch.library.register_fake(f"fusedonebit::{name}", _fake, lib=_LIBRARY)


for _name in SCHEMAS:
    _register(_name)
SCHEMAS |= {name: op.schema for name, op in OPS.items()}
KERNELS |= {name for name, op in OPS.items() if op.kernel is not None}
