"""Starting a run from an earlier run's frozen state, without a warm-up (1-bit Adam's open problem)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checkpoint import KEY
from .comm import agree, checksum

if TYPE_CHECKING:
    from .onebit import OneBitOptimizer


def warm_start(optimizer: OneBitOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Takes from an earlier run's checkpoint what a freeze needs; every rank calls it.

    That is the variance, corrected for its start at 0 with that run's own betas, and what is kept per
    tensor (``_tables``): coefficients and momentum scales of LAMB. Momentum and residuals are not taken.

    Raises:
        TypeError, ValueError: on every rank, if the checkpoint is of another model or optimizer.
    """
    variances: list[Tensor] = []
    tables: dict[str, list[Tensor]] = {}
    error: Exception | None = None
    try:
        _check(optimizer, state_dict)
        variances = [_variance(optimizer, state_dict, i) for i in range(len(optimizer._list.index_of))]
        if not any(bool(v.any()) for v in variances):
            raise ValueError("warm_start must be of a run that has made updates, but no parameter in it has a variance")
        tables = _tables(optimizer, state_dict)
    except Exception as caught:  # whatever it is: the other ranks must not wait
        error = caught if not isinstance(caught, KeyError) else ValueError(f"warm_start lacks the key {caught}")
    facts = [
        (f"{what} of {name} in warm_start", str(checksum(tensor)))
        for what, tensors in {"exp_avg_sq": variances, **tables}.items()
        for name, tensor in zip(optimizer._list.names, tensors, strict=False)
    ]
    agree(optimizer._transport, facts, optimizer.device, error, "give every rank the same earlier run's checkpoint")
    with torch.no_grad():
        for i, v in enumerate(variances):
            optimizer._list.shaped(optimizer._exp_avg_sq, i, optimizer.layout.offset(i)).copy_(v)
    optimizer._begin_warm({name: torch.stack(rows, dim=-1).to(optimizer.device) for name, rows in tables.items()})


def _check(optimizer: OneBitOptimizer, state_dict: Mapping[str, Any]) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"warm_start must be an earlier run's state_dict(), got {type(state_dict).__name__}; "
            "torch.load() it if it is a file"
        )
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != ours:
        raise ValueError(f"warm_start must be of the same model: its groups have {theirs} parameters, these {ours}")


def _variance(optimizer: OneBitOptimizer, state_dict: Mapping[str, Any], i: int) -> Tensor:
    """A parameter's variance, corrected if this optimizer corrects; zeros where it never had a gradient."""
    index, name = optimizer._list.index_of[i], optimizer._list.names[i]
    shape, state = tuple(optimizer._list.params[i].shape), state_dict["state"].get(index, {})
    if not state:
        return torch.zeros(shape)
    v = state["exp_avg_sq"]
    if not isinstance(v, Tensor) or tuple(v.shape) != shape:
        got = f"shape {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
        raise ValueError(f"warm_start must be of the same model: exp_avg_sq of {name} must have {shape}, got {got}")
    group = next(group for group in state_dict["param_groups"] if index in group["params"])
    entered = float(state_dict.get(KEY, {}).get("variance_step", state["step"])) - group.get("added_at", 0)
    if not optimizer.options.bias_correction or entered <= 0:
        return v.float().contiguous()
    return (v.float() / (1 - float(group["betas"][1]) ** entered)).contiguous()


def _tables(optimizer: OneBitOptimizer, state_dict: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """What the optimizer keeps per tensor, by name, one tensor each; an earlier warm-up has no momentum scales yet."""
    unsettled = {"unit"} if state_dict.get(KEY, {}).get("phase") != "compression" else set()
    tables = {}
    for name, table in optimizer._tables().items():
        rows = [state_dict["state"].get(index, {}).get(name) for index in optimizer._list.index_of]
        if name == "layer" and any(row is None for row in rows):
            raise ValueError(
                f"warm_start of {type(optimizer).__name__} must be the state_dict() of Lamb or OneBitLamb: "
                "only those have average coefficients"
            )
        if name not in unsettled and all(row is not None and row.shape == table.shape[:-1] for row in rows):
            tables[name] = [row.float().contiguous() for row in rows]
    return tables
