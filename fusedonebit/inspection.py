"""What ``stats()`` and ``repr`` tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .triton_kernels import backend

if TYPE_CHECKING:
    from .optimizer import OneBitOptimizer


def stats(optimizer: OneBitOptimizer) -> dict[str, Any]:
    """See ``OneBitOptimizer.stats``."""
    optimizer._outcomes.catch_up()
    transport, reduce, layout = optimizer._transport, optimizer._reduce, optimizer.layout
    compensated, worker_error = reduce.worker.norms()
    _, server_error = reduce.server.norms()
    warmup_grad = 0 if optimizer._grad is None else optimizer._grad.nbytes
    return {
        "phase": optimizer.phase,
        "step": optimizer._outcomes.updates,
        "skipped_steps": optimizer._outcomes.skipped,
        "freeze_step": optimizer._freeze_at,
        "backend": backend(optimizer.device),
        "transport": repr(transport),
        "world_size": transport.world_size,
        "parameters": layout.real_numel,
        "padding": layout.numel - layout.real_numel,
        "collectives_step": transport.traffic.collectives_step,
        "bytes_step": transport.traffic.bytes_step,
        "bytes_total": transport.traffic.bytes_total,
        "state_bytes": optimizer._exp_avg_sq.nbytes + reduce.state_bytes + warmup_grad,
        "wire_bytes": reduce.wire_bytes,
        "compensated_norm": compensated,
        "worker_error_norm": worker_error,
        "server_error_norm": server_error,
        "dead_tensors": [optimizer._list.names[i] for i in optimizer.dead_tensors],
        "dead_coordinates": optimizer.dead_coordinates,
    }


def describe(optimizer: OneBitOptimizer, groups: str) -> str:
    """See ``OneBitOptimizer.__repr__``; ``groups`` is torch's own text."""
    options = optimizer.options
    lines = [
        f"phase: {optimizer.phase}, {optimizer._outcomes.updates} updates, freeze_step={options.freeze_step!r}",
        f"scale: {options.scale_norm}, {options.scale_scope}; block_size: {optimizer.layout.block_size}",
        f"backend: {backend(optimizer.device)}",
        f"transport: {optimizer._transport!r}",
    ]
    rest = groups.split("\n", 1)[1]
    return "\n".join([f"{type(optimizer).__name__} (", *lines, rest])
