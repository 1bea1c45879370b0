"""Communication hooks of ``DistributedDataParallel``, and what they leave to be reduced."""

# Annotations stay objects in this file: DDP looks at those of hooks.

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from .quantised import BLOCK, SCALE_BYTES, QuantisedLine

SMALL_BUCKETS = {"bucket_cap_mb": 1}
"""With DDP's 25 MB so small a model would have two buckets, and hide little behind its backward pass."""
MEDIUM_BUCKETS = {"bucket_cap_mb": 4}
"""For messages of a few bits, two collectives a bucket: of 1, 2, 4, 8 and 25 MB the fastest from 560 Mbit/s on.
bfloat16's fastest there, and below, is 1 MB."""

POWER_SGD_RANK = 4
POWER_SGD_START = 2
"""PowerSGD's first compressed step; its hook takes nothing earlier with its error feedback."""


class Hook:
    """A hook of DDP, and how many bytes of a gradient it leaves to be reduced."""

    spans: list[tuple[float, float]]
    state: Any = None
    buckets: dict[str, Any] = {}  # noqa: RUF012
    """How DDP shall cut gradients; as it does by itself."""

    def __init__(self) -> None:
        self.spans = []

    def call(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        raise NotImplementedError

    def nbytes(self, elements: int) -> int:
        raise NotImplementedError


class Bfloat16(Hook):
    """The same bytes and arithmetic as torch's ``bf16_compress_hook``, which DDP refuses without NCCL."""

    buckets = SMALL_BUCKETS

    def call(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        began = time.perf_counter()
        buffer = bucket.buffer()
        half = buffer.to(torch.bfloat16).div_(dist.get_world_size())
        self.spans.append((began, time.perf_counter()))

        def decompress(reduced: torch.futures.Future) -> Tensor:
            began = time.perf_counter()
            buffer.copy_(reduced.value()[0])
            self.spans.append((began, time.perf_counter()))
            return buffer

        return dist.all_reduce(half, async_op=True).get_future().then(decompress)

    def nbytes(self, elements: int) -> int:
        return 2 * elements


class Int8(Hook):
    """Quantised all-to-all, mean and all-gather of each bucket; a thread sends one after the other.

    gloo starts collectives in the order in which a rank calls them. If each bucket's all-gather were called as soon as
    its all-to-all has ended, that order would be another on each rank. So one thread makes all calls, in the order in
    which DDP hands out buckets, over a process group of its own; the backward pass goes on, and quantises.
    """

    buckets = SMALL_BUCKETS

    def __init__(self) -> None:
        super().__init__()
        self._group = dist.new_group()
        self._thread = ThreadPoolExecutor(1, "int8")
        self._lines: dict[tuple[int, ...], QuantisedLine] = {}

    def call(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        began = time.perf_counter()
        buffer = bucket.buffer()
        # After the first step DDP cuts its buckets anew: then residuals start again.
        which = tuple(parameter.data_ptr() for parameter in bucket.parameters())
        if which not in self._lines:
            self._lines[which] = QuantisedLine(buffer.numel(), dist.get_world_size())
        line = self._lines[which]
        sent = line.compress(buffer)
        self.spans.append((began, time.perf_counter()))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        self._thread.submit(self._average, line, sent, buffer, done)
        return done

    @torch.no_grad()
    def _average(self, line: QuantisedLine, sent: Tensor, buffer: Tensor, done: torch.futures.Future[Tensor]) -> None:
        try:
            dist.all_to_all_single(line.arrived, sent, group=self._group)
            began = time.perf_counter()
            served = line.serve()
            self.spans.append((began, time.perf_counter()))
            dist.all_gather_into_tensor(line.gathered, served, group=self._group)
            began = time.perf_counter()
            buffer.copy_(line.result())
            self.spans.append((began, time.perf_counter()))
            done.set_result(buffer)
        except Exception as error:
            done.set_exception(error)

    def nbytes(self, elements: int) -> int:
        return elements + SCALE_BYTES * elements // BLOCK


class PowerSGD(Hook):
    """torch's own hook; its compression and its messages alternate in futures, and are not told apart here."""

    # One bucket: several fail over gloo with messages of unequal length, which its threads seem to start in any order.
    buckets = {"bucket_cap_mb": 1000}  # noqa: RUF012

    def __init__(self, rank: int = POWER_SGD_RANK) -> None:
        super().__init__()
        self.state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=POWER_SGD_START)

    def call(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return powerSGD_hook.powerSGD_hook(state, bucket)

    def nbytes(self, elements: int) -> int:
        # Counted since its first compressed step, of all of which the share is the same.
        before, after = self.state.compression_stats()[1:]
        return 4 * elements * after // max(1, before)
