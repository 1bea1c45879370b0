"""Says who sends what to whom: the rings of a multi-hop all-reduce.

A reduction goes through one stage after the other, a gather through the same stages backwards:

    ring    one stage of M workers, one chunk a segment
    torus   R x C workers: first rows of C workers, R chunks a segment; then, within the segment that
            a row has left on each worker, columns of R workers, one chunk a segment

What arrives at position h of a reduction has been through h + 1 workers of this stage (in a torus' second stage,
rows), whichever rank does the merge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Topology = Literal["ring", "torus", "owner"]
"""How workers are linked; see ``MarsitSGD``."""

TOPOLOGIES: tuple[Topology, ...] = ("ring", "torus", "owner")


class Hop(NamedTuple):
    """Names the chunks of one exchange with the two neighbours: those sent on, and those that arrive meanwhile."""

    sent: slice
    received: slice


@dataclass(frozen=True)
class Stage:
    """Describes one ring for one of its workers.

    Attributes:
        previous, next: Ranks of the neighbours.
        index: This worker's place in the ring.
        segments: One for each worker of the ring: slices of chunks.
        lane: Which of the rings that work on the same chunks at the same time this is.
    """

    previous: int
    next: int
    index: int
    segments: tuple[slice, ...]
    lane: int

    @property
    def size(self) -> int:
        """Workers in the ring."""
        return len(self.segments)

    @property
    def first(self) -> slice:
        """Return the segment that is sent before anything has arrived."""
        return self.segments[self.index]

    @property
    def finished(self) -> slice:
        """Return the segment that is complete here after the reduction."""
        return self.segments[(self.index + 1) % self.size]

    def reduce(self) -> Iterator[Hop]:
        """Yield the ``size`` - 1 hops of the reduction; that at position h comes h-th."""
        return self._hops(self.index)

    def gather(self) -> Iterator[Hop]:
        """Yield the ``size`` - 1 hops of the gather."""
        return self._hops(self.index + 1)

    def _hops(self, first: int) -> Iterator[Hop]:
        for at in range(first, first - self.size + 1, -1):
            yield Hop(self.segments[at % self.size], self.segments[(at - 1) % self.size])


def stages(topology: Topology, world_size: int, rank: int, rows: int | None = None) -> tuple[Stage, ...]:
    """Return the stages of a topology for one rank of M; none for a single worker, or where nothing hops ("owner").

    ``rows`` as for ``torus_rows``, which raises ValueError if there is no such torus.
    """
    if topology == "torus":
        height = torus_rows(world_size, rows)
        width = world_size // height
        row, column = divmod(rank, width)
        wide = tuple(slice(s * height, (s + 1) * height) for s in range(width))
        across = _stage([row * width + c for c in range(width)], column, wide, lane=row)
        begin = across.finished.start
        tall = tuple(slice(begin + k, begin + k + 1) for k in range(height))
        return across, _stage([r * width + column for r in range(height)], row, tall, lane=0)
    if topology == "ring" and world_size > 1:
        each = tuple(slice(k, k + 1) for k in range(world_size))
        return (_stage(list(range(world_size)), rank, each, lane=0),)
    return ()


def _stage(ranks: list[int], index: int, segments: tuple[slice, ...], lane: int) -> Stage:
    return Stage(ranks[index - 1], ranks[(index + 1) % len(ranks)], index, segments, lane)


def torus_rows(world_size: int, rows: int | None) -> int:
    """Find R of a torus of M workers, with C = M / R columns; both are at least 2.

    Args:
        world_size: M.
        rows: R, to be checked; None: the most that is not above the columns.

    Raises:
        ValueError: if there is no such torus.
    """
    possible = [r for r in range(2, world_size // 2 + 1) if world_size % r == 0]
    if not possible:
        raise ValueError(
            f'topology="torus" needs a world size that is a product of two numbers >= 2, got {world_size}; use "ring"'
        )
    if rows is None:
        return max(r for r in possible if r * r <= world_size)
    if rows not in possible:
        raise ValueError(f"rows must be one of {possible} for a torus of {world_size} workers, or None, got {rows!r}")
    return rows
