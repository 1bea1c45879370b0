"""Reads the flat state of an optimizer with buckets, or parts of a node's ranks, as NumPy vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from observe import flat, parameters

from fusedonebit.core.optimizer import DistributedOptimizer


def whole_state(optimizer: DistributedOptimizer) -> dict[str, np.ndarray]:
    """Everything that the next step reads, in the optimizer's own order and units; residuals formed."""
    reduce = optimizer.algorithm.exchange.reducer
    reduce.settle()
    tensors = {kept.name: kept.tensor for kept in optimizer.contents.kept() if kept.wanted and not kept.of_rank}
    tensors |= {
        "v": optimizer.algorithm.moments.written_out(),
        "step": optimizer.frame.steps.of_each,
        "scale": reduce.scale,
        "bits": reduce.bits,
    }
    tensors |= {
        "c": optimizer.algorithm.moments.exp_avg,
        "e": reduce.of_rank.worker.numbers,
        "server": reduce.of_rank.server.numbers,
    }
    state = {name: tensor.detach().clone().numpy() for name, tensor in tensors.items()}
    state["x"] = flat(parameters(optimizer))
    state["digests"] = np.array(reduce.digests)
    return state


def conserved(optimizer: DistributedOptimizer) -> dict[str, np.ndarray]:
    """m, this rank's e and its part of E, by flat index, in the unit in which they are compressed."""
    reduce, layout = optimizer.algorithm.exchange.reducer, optimizer.frame.layout
    state = whole_state(optimizer)
    ranks, inside = optimizer.frame.ranks.transport.world_size, 1
    if optimizer.frame.ranks.levels is not None:
        ranks, inside = optimizer.frame.ranks.levels[0].world_size, optimizer.frame.ranks.levels[1].world_size
    rank = optimizer.frame.ranks.transport.rank // inside
    here = (
        [optimizer.frame.ranks.transport.rank % inside] if inside > 1 else range(optimizer.frame.options.bucket_count)
    )
    servers = np.zeros(layout.numel)
    for part, served in zip(here, state["server"].reshape(len(here), -1), strict=True):
        chunk = part * ranks + rank
        servers[chunk * layout.chunk_numel : (chunk + 1) * layout.chunk_numel] = served
    return {"m": reduce.result().double().numpy(), "e": state["c"].astype(float), "server": servers}


def imbalance(before: Sequence[dict], after: Sequence[dict], gradient: np.ndarray, workers: int, beta1: float) -> float:
    """How far m + E + mean(e) is from what it should be after a step, over the largest terms of each element."""
    terms = [after[0]["m"], *(s["server"] for s in after), *(s["e"] / workers for s in after)]
    right = [beta1 * before[0]["m"], (1 - beta1) * gradient]
    right += [*(s["server"] for s in before), *(s["e"] / workers for s in before)]
    gap = np.abs(np.sum(terms, 0) - np.sum(right, 0))
    size = np.sum(np.abs([*terms, *right]), 0)
    return float(np.divide(gap, size, out=np.where(gap > 0, np.inf, 0.0), where=size > 0).max())


def by_flat_index(optimizer: DistributedOptimizer, gradients: Sequence[torch.Tensor]) -> np.ndarray:
    """Gradients by flat index."""
    vector = np.zeros(optimizer.frame.layout.numel)
    for i, gradient in enumerate(gradients):
        offset = optimizer.frame.layout.offset(i)
        vector[offset : offset + gradient.numel()] = gradient.double().reshape(-1).numpy()
    return vector
