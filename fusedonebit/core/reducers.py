"""How the line of elements is cut: not, into buckets (``overlap``), or into parts of a node's ranks (``hierarchy``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..comm import BucketedAllReduce, CompressedAllReduce, HierarchicalAllReduce, Transport
from .overlap import Overlap, transport_of_its_own
from .sharding import levels

if TYPE_CHECKING:
    from ..optim.two_stage import OneBitOptimizer
    from .optimizer import DistributedOptimizer
    from .scaling import LossScale

Reduce = CompressedAllReduce | BucketedAllReduce | HierarchicalAllReduce


def levels_of(optimizer: DistributedOptimizer, hierarchy: Any) -> tuple[Transport, Transport] | None:
    """The ranks between nodes and those inside one, or None.

    Raises:
        TypeError, ValueError: if ``hierarchy`` is not to be had.
    """
    if hierarchy is None:
        return None
    optimizer._check_levels()
    if optimizer._shards.count > 1:
        raise ValueError("hierarchy must be None where parameters are sharded: fully_shard is one already")
    return levels(hierarchy, optimizer._transport, optimizer.device)


def make_reduce(optimizer: OneBitOptimizer) -> Reduce:
    """What averages momenta, in the storage that the warm-up's momentum has; makes ``_overlap`` anew."""
    options, layout = optimizer.options, optimizer.layout
    shared: dict[str, Any] = {
        "device": optimizer.device,
        "scale_norm": options.scale_norm,
        "scale_scope": options.scale_scope,
        "compensated": optimizer._exp_avg,
        "live": optimizer._live,
        "ternary": options.ternary,
    }
    if optimizer._levels is not None:
        return HierarchicalAllReduce(layout, *optimizer._levels, dtype=options.hierarchy_dtype, **shared)
    if not options.overlap and options.bucket_count == 1:
        return CompressedAllReduce(layout, optimizer._transport, **shared)
    if not options.overlap:
        return BucketedAllReduce(layout, options.bucket_count, optimizer._transport, **shared)
    if optimizer._overlap is not None:
        optimizer._overlap.close()
    if optimizer._apart is None:
        optimizer._apart = transport_of_its_own(optimizer._transport)
    reduce = BucketedAllReduce(layout, options.bucket_count, optimizer._apart, **shared)
    optimizer._overlap = Overlap(optimizer, reduce)
    return reduce


def cut_of(optimizer: OneBitOptimizer) -> dict[str, int]:
    """Ranks, buckets, and ranks of a node: by these a checkpoint's rows are put in order."""
    inside = 1 if optimizer._levels is None else optimizer._levels[1].world_size
    return {
        "world_size": optimizer._transport.world_size,
        "buckets": optimizer.options.bucket_count,
        "inside": inside,
    }


def check_digests(optimizer: OneBitOptimizer, header: Mapping[str, Any]) -> None:
    """Raises ValueError if a checkpoint that is cut alike has not a digest of each part."""
    alike = all(header[key] == value for key, value in cut_of(optimizer).items())
    if alike and len(header["digests"]) != (count := len(optimizer._reduce.digests)):
        raise ValueError(
            f"the checkpoint's header is damaged: it must have {count} digests, got {len(header['digests'])}; load "
            "another checkpoint"
        )


def catch_up_with_buckets(overlap: Overlap, loss_scale: LossScale) -> Exception | None:
    """Waits for what the backward pass has sent; the error, if this rank has seen there that it can't step."""
    overlap.check_gradients()
    error = overlap.error
    overlap.catch_up()
    if any(value is not None for value in loss_scale):
        return RuntimeError(
            "a GradScaler can't be used with overlap=True: gradients are sent before it has unscaled them; train in "
            "bfloat16 without one, or pass overlap=False"
        )
    return error
