"""What ``stats()`` and ``repr`` tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..triton_kernels import backend
from .state.keeper import Keeper

if TYPE_CHECKING:
    from .optimizer import DistributedOptimizer

RUNNING = ("max_grad_norm", "master_weights", "stochastic_rounding", "capturable")
"""Options that ``repr`` only shows where they are on."""


def stats(optimizer: DistributedOptimizer) -> dict[str, Any]:
    """See ``DistributedOptimizer.stats``."""
    optimizer.catch_up()
    transport, layout = optimizer.transport, optimizer.layout
    return {
        "phase": optimizer.phase,
        "step": optimizer.outcomes.updates,
        "skipped_steps": optimizer.outcomes.skipped,
        "freeze_step": None,
        "backend": backend(optimizer.device),
        "transport": repr(transport),
        "world_size": transport.world_size,
        "parameters": layout.real_numel,
        "padding": layout.numel - layout.real_numel,
        "collectives_step": transport.traffic.collectives_step,
        "bytes_step": transport.traffic.bytes_step,
        "bytes_total": transport.traffic.bytes_total,
        "averaged_already": bool(optimizer.averaged_elsewhere),
        "collectives_inside": optimizer.inside.traffic.collectives_step,
        "bytes_inside": optimizer.inside.traffic.bytes_step,
        # Of a ring all-reduce of float32 gradients.
        "bytes_fp32": 2 * 4 * layout.real_numel * (transport.world_size - 1) // transport.world_size,
        "state_bytes": state_bytes(optimizer),
        "grad_norm": None if optimizer.options.max_grad_norm is None else float(optimizer.last_grad_norm),
    }


def state_bytes(optimizer: DistributedOptimizer) -> int:
    """Bytes of all that the next step needs, tables included; each piece of memory counts once."""
    own = vars(optimizer)
    tensors = [value for value in own.values() if isinstance(value, Tensor)]
    tensors += [optimizer.parameters.dense[i] for i in optimizer.parameters.masters] + list(optimizer.live)
    tensors += [t for part in own.values() if callable(state := getattr(part, "state", None)) for t in state()]
    scratch = {t.untyped_storage().data_ptr() for t in scratch_of(optimizer)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for pointer, nbytes in storages.items() if pointer not in scratch)


def scratch_of(optimizer: Keeper) -> list[Tensor]:
    """Return what only serves within a step."""
    return [vars(optimizer)[name] for name in optimizer.scratch if name in vars(optimizer)]


def describe(optimizer: DistributedOptimizer, groups: str, more: Sequence[str]) -> str:
    """See ``DistributedOptimizer.__repr__``; ``groups`` is torch's own text, ``more`` what a subclass adds."""
    lines = [
        f"phase: {optimizer.phase}, {optimizer.outcomes.updates} updates",
        *more,
        f"block_size: {optimizer.layout.block_size}",
        f"backend: {backend(optimizer.device)}",
        f"transport: {optimizer.transport!r}",
    ]
    lines += [f"{name}: {getattr(optimizer.options, name)!r}" for name in RUNNING if getattr(optimizer.options, name)]
    rest = groups.split("\n", 1)[1]
    return "\n".join([f"{type(optimizer).__name__} (", *lines, rest])
