"""Chooses what averages momenta: in one piece, in buckets, in the backward pass, or in two levels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..comm import (
    BucketedAllReduce,
    CompressedAllReduce,
    FeedbackReducer,
    HierarchicalAllReduce,
    TorchTransport,
    Transport,
)
from .overlap import OverlappedAllReduce
from .sharding import levels

if TYPE_CHECKING:
    from ..optim.two_stage import OneBitOptimizer
    from .optimizer import DistributedOptimizer


def levels_of(optimizer: DistributedOptimizer, hierarchy: Any) -> tuple[Transport, Transport] | None:
    """Return the ranks between nodes and those inside one, or None.

    Raises:
        TypeError, ValueError: if ``hierarchy`` is not to be had.
    """
    if hierarchy is None:
        return None
    optimizer.check_levels()
    if optimizer.shards.count > 1:
        raise ValueError("hierarchy must be None where parameters are sharded: fully_shard is one already")
    return levels(hierarchy, optimizer.transport, optimizer.device)


def make_reducer(optimizer: OneBitOptimizer) -> FeedbackReducer:
    """Make what averages momenta, in the storage that the warm-up's momentum has; and ``_overlap`` anew."""
    options, layout = optimizer.options, optimizer.layout
    shared: dict[str, Any] = {
        "device": optimizer.device,
        "scale_norm": options.scale_norm,
        "scale_scope": options.scale_scope,
        "compensated": optimizer.exp_avg,
        "live": optimizer.live,
        "ternary": options.ternary,
        "shards": optimizer.shards,
    }
    if optimizer.levels is not None:
        return HierarchicalAllReduce(layout, *optimizer.levels, dtype=options.hierarchy_dtype, **shared)
    if not options.overlap and options.bucket_count == 1:
        return CompressedAllReduce(layout, optimizer.transport, **shared)
    if not options.overlap:
        return BucketedAllReduce(layout, options.bucket_count, optimizer.transport, **shared)
    if optimizer.overlap is not None:
        optimizer.overlap.close()
    if optimizer.transport_apart is None:  # so that nothing else comes between buckets
        own = optimizer.transport
        optimizer.transport_apart = own.apart() if isinstance(own, TorchTransport) else own
    optimizer.overlap = OverlappedAllReduce(optimizer, optimizer.transport_apart, **shared)
    return optimizer.overlap
