"""Error feedback without anybody else: what one worker compresses is the result.

    per rank  1. compress the local tensors  (momentum_compress)
              2. scales, whether the step is skipped, the guard's verdict  (finish_alone)

A server would change nothing: what has one magnitude per scale, a second compression leaves as it is, but for
rounding, and has nothing left to keep. Nothing is sent either: new bits go where those of the last step lie.
"""

from __future__ import annotations

from typing import Any

from ..triton_kernels import FlatLayout
from ..triton_kernels.headers import Flag
from ..triton_kernels.nouns import Coefficients
from .absent import absent_on_all
from .allreduce import CompressedAllReduce
from .message import StepContext
from .transport import Transport


class AloneAllReduce(CompressedAllReduce):
    """Compress once, as the worker that one rank is; arguments as of ``CompressedAllReduce``."""

    serves = False

    def send(self) -> None:
        """Send nothing: what was written is the result."""

    def serve(self, context: StepContext) -> None:
        """Serve nobody."""

    def gather(self) -> None:
        """Receive nothing."""

    def receive(self, context: StepContext) -> None:
        self._end(context)

    def _finish(self, context: StepContext) -> None:
        verdict = self.verdict
        verdict.absent = None
        if self.backups:  # no other rank has a gradient of what this one misses
            verdict.absent = absent_on_all(self.gathered.absent, len(self.layout.sizes), verdict.none)
        header = self._header(context, int(Flag.ABORT) * context.abort, verdict.found, counts=context.number is None)
        limit, table = self._limit(context), context.renewal
        if limit is not None:
            assert limit.coef is not None
            table, limit = table or Coefficients.of(limit.coef), limit._replace(coef=None)
        self.worker.finish_alone(self.scale, self.gathered.words, header, verdict.hold, verdict.of_all, limit, table)


def make_all_reduce(
    layout: FlatLayout, transport: Transport, *, serve_alone: bool = True, **options: Any
) -> CompressedAllReduce:
    """Return what averages in one piece.

    Args:
        layout, transport: See ``CompressedAllReduce``.
        serve_alone: Whether one rank alone has a server, too.
        options: See ``CompressedAllReduce``.
    """
    alone = transport.world_size == 1 and not serve_alone
    return (AloneAllReduce if alone else CompressedAllReduce)(layout, transport, **options)
