"""Starting a run from an earlier run's frozen state, without a warm-up (1-bit Adam's open problem)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import checksum
from ..core.frame import Frame
from ..core.sharding import local
from ..core.state import integrity
from ..core.state.loading import ADAMW
from ..core.state.saving import by_parameter, header_of
from ..core.state_tensor import StateTensor


def warm_start(
    frame: Frame, kept: Sequence[StateTensor], declared: integrity.Declared, state_dict: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Take the variance from an earlier run's checkpoint, corrected for its start at 0 with that run's own betas.

    Return what that run has kept per tensor (``StateTensor``), by name: coefficients and momentum scales of LAMB.
    Momentum and residuals are not taken. Every rank calls it.

    Raises:
        TypeError, ValueError: on every rank, if the checkpoint is of another model or optimizer.
    """
    variances: list[Tensor] = []
    tables: dict[str, list[Tensor]] = {}
    error: Exception | None = None
    try:
        _check(frame, state_dict)
        states = by_parameter(frame, state_dict)
        header = header_of(state_dict) or {"names": ADAMW}
        ours = integrity.of_names(states, header.get("names", {name for state in states for name in state}))
        integrity.verify(frame, declared, ours, header)
        integrity.check_values(frame, declared, ours, header)
        variances = [_variance(frame, state_dict, states[i], i) for i in range(len(states))]
        if frame.ranks.shards.count == 1 and not any(bool(v.any()) for v in variances):
            raise ValueError("warm_start must be of a run that has made updates, but no parameter in it has a variance")
        tables = _tables(frame.name, kept, state_dict, states)
    except Exception as caught:  # whatever it is: the other ranks must not wait
        error = caught if not isinstance(caught, KeyError) else ValueError(f"warm_start lacks the key {caught}")
    facts = [
        (f"{what} of {name} in warm_start", str(checksum(tensor)))
        for what, tensors in {"exp_avg_sq": variances, **tables}.items()
        for name, tensor in zip(frame.parameters.names, tensors, strict=False)
    ]
    frame.ranks.agree(facts, error=error, hint="give every rank the same earlier run's checkpoint")
    (of_v,) = (each for each in kept if each.name == "exp_avg_sq")
    with torch.no_grad():
        for i, v in enumerate(variances):
            part = of_v.part(frame, i)
            part.copy_(v)
            of_v.keep(frame, i, part)
    return {name: torch.stack(rows, dim=-1).to(frame.device) for name, rows in tables.items()}


def _check(frame: Frame, state_dict: Mapping[str, Any]) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"warm_start must be an earlier run's state_dict(), got {type(state_dict).__name__}; "
            "torch.load() it if it is a file"
        )
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    ours = [len(group["params"]) for group in frame.groups]
    if theirs != ours:
        raise ValueError(f"warm_start must be of the same model: its groups have {theirs} parameters, these {ours}")


def _variance(frame: Frame, state_dict: Mapping[str, Any], state: Mapping[str, Any], i: int) -> Tensor:
    """Return a parameter's variance, corrected if this optimizer corrects; zeros where it never had a gradient."""
    name, shape = frame.parameters.names[i], tuple(frame.parameters.params[i].shape)
    if not state:
        return torch.zeros(shape)
    v = local(state["exp_avg_sq"]) if isinstance(state["exp_avg_sq"], Tensor) else state["exp_avg_sq"]
    if not isinstance(v, Tensor) or tuple(v.shape) != shape:
        writer = (header_of(state_dict) or {}).get("algorithm")
        if writer is not None and isinstance(v, Tensor) and tuple(v.shape[2:]) == shape:  # of each of its ranks
            raise ValueError(f"warm_start must be of a run whose ranks have one variance, but it is of {writer}")
        got = f"shape {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
        raise ValueError(f"warm_start must be of the same model: exp_avg_sq of {name} must have {shape}, got {got}")
    group = state_dict["param_groups"][frame.parameters.group_of[i]]
    header = header_of(state_dict) or {}
    told = header.get("variance_step", state["step"])
    entered = float(told[i] if isinstance(told, list) else told) - group.get("added_at", 0)
    if not frame.options.numerics.bias_correction or entered <= 0:
        return v.float().contiguous()
    frozen = header.get("variance_betas")  # betas[1] may have been changed since the freeze
    beta2: float = float(group["betas"][1]) if frozen is None else frozen[frame.parameters.group_of[i]]
    return torch.div(v.float(), 1 - beta2**entered).contiguous()


def _tables(
    taker: str, kept: Sequence[StateTensor], state_dict: Mapping[str, Any], states: Sequence[Mapping[str, Any]]
) -> dict[str, list[Tensor]]:
    """Return what the optimizer keeps per tensor, by name; an earlier warm-up has no momentum scales yet."""
    unsettled = {"unit"} if (header_of(state_dict) or {}).get("phase") != "compression" else set()
    tables = {}
    for each in kept:
        if each.per != "tensor" or not each.wanted:
            continue
        name, table = each.name, each.tensor
        rows = [state.get(name) for state in states]
        if name == "layer" and any(row is None for row in rows):
            raise ValueError(
                f"warm_start of {taker} must be the state_dict() of Lamb or OneBitLamb: "
                "only those have average coefficients"
            )
        fitting = [row.float().contiguous() for row in rows if row is not None and row.shape == table.shape[:-1]]
        if name not in unsettled and len(fitting) == len(rows):
            tables[name] = fitting
    return tables
