"""Updates parameters in the backward pass, and frees their gradients: never are all of them there at once.

torch's "optimizer step in the backward pass", but for a bucket of parameters at a time, and with a ``step`` that ends
it: there the update is counted, and parameters are updated of whose bucket not all have a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.arrivals import Arrivals, take_away
from ..core.frame import Frame
from ..triton_kernels import FlatLayout
from ..triton_kernels.tables import BlockTables, tables_of

BUCKETS = 32
"""Into how many buckets parameters are cut, at most: about a 32nd of all gradients is there at once."""


class Bucket(NamedTuple):
    """Parameters one behind the other, which one launch updates."""

    members: slice  # of all parameters
    blocks: slice  # of the flat index space
    elements: slice  # of the same
    tables: BlockTables  # of this part of it
    first: Tensor  # its first block, int32 [1]


def buckets_of(layout: FlatLayout, device: torch.device, count: int = BUCKETS) -> list[Bucket]:
    """Cut a layout of one chunk at tensors, from its end on, into buckets of at least a ``count``-th of its blocks."""
    first, size = layout.first_block, layout.block_size
    least, end, found = -(-first[-1] // count), len(layout.sizes), []
    for begin in range(end - 1, -1, -1):
        if begin == 0 or first[end] - first[begin] >= least:
            members, elements = slice(begin, end), slice(first[begin] * size, first[end] * size)
            tables = tables_of(FlatLayout(layout.sizes[members], 1, size), device)
            at = torch.tensor([first[begin]], dtype=torch.int32, device=device)
            found.append(Bucket(members, slice(first[begin], first[end]), elements, tables, at))
            end = begin
    return found


class Release(Arrivals):
    """Watches gradients arrive; once a bucket has all of them, updates it and frees them.

    Args:
        frame: Whose parameters.
        update: A method, held weakly, that updates the parameters of a bucket by the gradients that they have now, and
            has ``use_up`` free those.

    Attributes:
        buckets: All of them.
        done: Numbers of the parameters that were updated since the last step.
    """

    def __init__(self, frame: Frame, update: Callable[[Bucket], None]) -> None:
        owner = frame.owner()
        assert owner is not None  # which is making this
        self._frame, self._update = frame, weakref.WeakMethod(update)
        self.buckets = buckets_of(frame.layout, frame.device)
        self._bucket_of = {i: n for n, bucket in enumerate(self.buckets) for i in _each(bucket)}
        handles, this = self.watch(frame.parameters.owners), weakref.ref(self)
        handles.append(owner.register_state_dict_pre_hook(_idle_check(this, "state_dict()")))
        handles.append(owner.register_load_state_dict_pre_hook(_idle_check(this, "load_state_dict()")))
        self._finalizer = weakref.finalize(owner, take_away, handles)
        self.forget()

    def forget(self) -> None:
        """Take note that the step ends."""
        self._seen: set[int] = set()
        self._waiting = [bucket.members.stop - bucket.members.start for bucket in self.buckets]
        self.done: set[int] = set()

    def close(self) -> None:
        """Take the hooks away."""
        self._finalizer()

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError if a backward pass has begun a step which has not ended."""
        if self._seen:
            raise RuntimeError(
                f"{what} must not come between the backward pass and step() with Wire(release_gradients=True): "
                f"{len(self.done)} of {len(self._bucket_of)} parameters were updated by now; call step() first"
            )

    @torch.no_grad()
    def arrived(self, i: int) -> None:
        """Take note that the gradient of parameter ``i`` is there.

        Raises:
            RuntimeError: in a second backward pass before the step, and where DDP averages.
            TypeError, ValueError, RuntimeError: if a gradient, or a parameter, can't be used.
        """
        update, frame = self._update(), self._frame
        if update is None or frame.owner() is None or self._paused:
            return
        name = frame.parameters.called[i]
        if frame.under_ddp.attached:
            raise RuntimeError(
                "ddp.attach can't be used with Wire(release_gradients=True), which is for one rank alone: train the "
                "model without DDP, or construct the optimizer without the option"
            )
        if i in self._seen:
            raise RuntimeError(
                f"a second backward pass before step() has made a gradient of {name}: with "
                "Wire(release_gradients=True) the first was used up. Wrap all but the last in optimizer.no_sync(), in "
                "which gradients accumulate"
            )
        self._seen.add(i)
        number = self._bucket_of[i]
        self._waiting[number] -= 1
        if not self._waiting[number]:
            update(self.buckets[number])

    def use_up(self, owners: Sequence[Tensor], bucket: Bucket) -> None:
        """Take note that a bucket was updated, and free its gradients; ``owners`` are all parameters."""
        self.done.update(_each(bucket))
        for owner in owners[bucket.members]:
            owner.grad = None


def _each(bucket: Bucket) -> range:
    return range(bucket.members.start, bucket.members.stop)


def _idle_check(release: weakref.ref[Release], what: str) -> Callable[..., None]:
    def check(*_: object) -> None:
        if (watching := release()) is not None:
            watching.check_idle(what)

    return check
