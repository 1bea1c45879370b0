"""Runs what sends buckets beside the backward pass: on a stream of its own, or in a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch


class Background:
    """Runs jobs one after the other: on CUDA on a stream, on a CPU in a thread, if there is one; else at once.

    Args:
        device: Where their tensors lie.
        threaded: Whether a CPU gets a thread: collectives of the transport may run in one.

    Attributes:
        thread: That; or None.
    """

    def __init__(self, device: torch.device, threaded: bool) -> None:
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        self.thread = ThreadPoolExecutor(1, "fusedonebit-overlap") if threaded and not cuda else None
        self._pending: list[Future[None]] = []
        self._in_use: list[object] = []

    def run(self, job: Callable[[], None], *uses: object) -> None:
        """Run a job, which ``uses`` what must be kept until ``join``: memory that the other stream may still read."""
        self._in_use += uses
        job = torch.no_grad()(job)  # of each thread
        if self.thread is not None:
            self._pending.append(self.thread.submit(job))
        elif self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                job()
        else:
            job()

    def wait(self) -> None:
        """Wait until the thread has done what it was given."""
        wait(self._pending)

    def join(self) -> list[BaseException]:
        """Wait for all jobs (on CUDA: what is launched next does); return what they have raised."""
        pending, self._pending = self._pending, []
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._in_use.clear()
        return [error for future in pending if (error := future.exception()) is not None]  # waits for all of them

    def close(self) -> None:
        """End the thread once it is done."""
        if self.thread is not None:
            self.thread.shutdown()
