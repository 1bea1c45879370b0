"""Averages DDP's buckets at 8, 4 or 1 bits while the backward pass goes on; what is left belongs to parameters.

A bucket's exchange runs in the background, as DDP's own would: on CUDA on a stream, on a CPU in a thread, over a
process group of its own. DDP puts parameters into other buckets after its first pass, and another run may have other
ones: then what exchanges have left moves to those that take their place, each server's to the worker beside it. A run
that goes on from a checkpoint has DDP's first buckets once more: that pass waits for all gradients, and averages in the
buckets that were saved if they have the same parameters.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..comm import CollectiveError, Format, QuantisedAllReduce, Step, TorchTransport
from ..comm.quantised import owed
from ..core.arrivals import Arrivals, after_backward, take_away
from ..core.background import Background
from ..core.compression import Compression, fill, named, pieces, plain, stored_in
from ..triton_kernels import FlatLayout
from .seat import Seat

Done = torch.futures.Future[Tensor]


def finished(buffer: Tensor) -> Done:
    """Return the future of a bucket that is left as it is."""
    done: Done = torch.futures.Future()
    done.set_result(buffer)
    return done


class Waiting(NamedTuple):
    """A bucket: its gradients by name, its buffer, what DDP waits for, and what has to be over before."""

    own: dict[str, Tensor]
    buffer: Tensor
    done: Done
    first: Done | None

    def end(self) -> None:
        """Let DDP go on; on CUDA what it does then follows the stream that has averaged, and what was to be before."""
        try:
            if self.first is not None:
                self.first.wait()
        except Exception as error:
            self.done.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is wrong
        else:
            self.done.set_result(self.buffer)


@dataclass
class Pass:
    """One backward pass that averages.

    Attributes:
        step: What this rank tells in it.
        exchanges: That ran in it.
        waiting: Of buckets that wait for the last.
    """

    step: Step
    exchanges: list[QuantisedAllReduce] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)


class BucketAverages(Arrivals, Compression):
    """Averages what DDP's buckets have of some parameters.

    Args:
        model: In DDP.
        params: Their names and themselves; what is not trained now DDP may have in a bucket all the same.
        form: How gradients travel.
        scaler: As of ``compress``.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        params: Iterable[tuple[str, nn.Parameter]],
        form: Format,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        known = {plain(name): p for name, p in params}
        trained = [(name, p) for name, p in known.items() if p.requires_grad]
        device = next(iter(known.values()), torch.empty(0)).device
        ranks = Seat.at(model).apart(device)
        super().__init__(form, ranks, device, scaler)
        self._background = Background(device, threaded=isinstance(ranks, TorchTransport))
        self._params, self._names = known, {id(p): name for name, p in known.items()}
        self._sizes = {name: p.numel() for name, p in known.items()}
        self._places = {name: i for i, name in enumerate(known)}
        self._trained = {name: i for i, (name, _) in enumerate(trained)}
        self._exchanges: dict[tuple[str, ...], QuantisedAllReduce] = {}
        self._left: dict[str, Tensor] = {}  # what moves to the next exchange of a parameter
        self._pass: Pass | None = None
        self._resumed, self._used = False, set[int]()
        self._finds_unused = bool(model.find_unused_parameters or model.static_graph)
        self._handles = self.watch(p for _, p in trained) if self._finds_unused else []

    def close(self) -> None:
        """Take the hooks away, and end the thread."""
        take_away(self._handles)
        self._background.close()

    # ------------------------------------------------------------ a pass

    def arrived(self, i: int) -> None:
        """Take note that a parameter was used."""
        self._used.add(i)

    def average(
        self, bucket: dist.GradBucket, chosen: Collection[int] | None = None, first: Done | None = None
    ) -> Done:
        """Start to average a bucket's gradients in place, or those that are ``chosen``.

        Args:
            bucket: The next.
            chosen: Places in it; None: all.
            first: What the future that is returned has to wait for besides.
        """
        if self.ranks.world_size == 1:
            return finished(bucket.buffer())
        this = self._begun()
        params, gradients = bucket.parameters(), bucket.gradients()
        places = range(len(params)) if chosen is None else sorted(chosen)
        own = {self._names[id(params[i])]: gradients[i] for i in places}
        done: Done = torch.futures.Future(devices=[self.device] if self.device.type == "cuda" else None)
        this.waiting.append(Waiting(own, bucket.buffer(), done, first))
        if not self._resumed:
            self._start([tuple(own)] if own else [])
        elif bucket.is_last():
            self._start(self._saved_groups(this))
        if bucket.is_last():
            self._resumed = False
            after_backward(weakref.WeakMethod(self._end))
        return done

    def _begun(self) -> Pass:
        """Return the pass that goes on; in its first bucket begin one."""
        if self._pass is None:
            self.raise_what_was_told()
            self.number = (self.number + 1) & 0x7FFFFFFF
            self._pass = Pass(Step(self.number, unit=self.unit))
        return self._pass

    def _saved_groups(self, this: Pass) -> list[tuple[str, ...]]:
        """Return what was averaged together before a load, if a pass has the same parameters; else its own buckets."""
        buckets = [tuple(each.own) for each in this.waiting if each.own]
        saved = list(self._exchanges)
        return saved if sorted(sum(saved, ())) == sorted(sum(buckets, ())) else buckets

    def _start(self, groups: Sequence[tuple[str, ...]]) -> None:
        """Let groups of parameters be averaged in the background, whose gradients wait; then what waits is done."""
        this = self._pass
        assert this is not None
        waiting, this.waiting = this.waiting, []
        gradients = {name: g for each in waiting for name, g in each.own.items()}
        jobs = []
        for group in groups:
            exchange = self._exchange(group)
            step = this.step._replace(absent=self._unused(group))
            jobs.append((exchange, [gradients[name] for name in group], step))
            this.exchanges.append(exchange)

        def run() -> None:
            try:
                for exchange, tensors, step in jobs:
                    exchange(tensors, step)
            finally:  # DDP waits, whatever has happened: ``_end`` raises
                for each in waiting:
                    each.end()

        self._background.run(run, gradients)

    def _exchange(self, group: tuple[str, ...]) -> QuantisedAllReduce:
        """Return what averages a group; where it is new it takes over what others have left of its parameters."""
        if group not in self._exchanges:
            for other in [other for other in self._exchanges if not set(other).isdisjoint(group)]:
                pieces(self._left, zip(other, self._exchanges.pop(other).owed(), strict=False))
            self._exchanges[group] = exchange = self._made(group)
            exchange.owe([self._left.pop(name, None) for name in group])
        return self._exchanges[group]

    def _unused(self, group: Sequence[str]) -> tuple[int, ...]:
        """Return the places of those that this rank has not used since gradients were averaged last, and has none of.

        What was frozen when this was made nobody watches: it counts as used.
        """
        if not self._finds_unused:
            return ()
        unused = self._trained.keys() - {name for name, i in self._trained.items() if i in self._used}
        return tuple(i for i, name in enumerate(group) if name in unused and self._params[name].grad is None)

    def _made(self, group: Sequence[str]) -> QuantisedAllReduce:
        layout = self._layout(group, self.ranks.world_size, self.form)
        made = QuantisedAllReduce(layout, self.ranks, self.form, self.device)
        made.salt = self._places[group[0]]
        return made

    def _layout(self, group: Sequence[str], world_size: int, form: Format) -> FlatLayout:
        return FlatLayout(tuple(self._sizes[name] for name in group), world_size, form.block_size)

    def _end(self) -> None:
        """End a pass: DDP has all buckets. Raise what has gone wrong in it, or, on CUDA, before the next."""
        this, self._pass = self._pass, None
        self._used.clear()
        if errors := self._background.join():
            self._exchanges.clear()
            first = errors[0]
            raise first if isinstance(first, CollectiveError) else CollectiveError(f"a bucket was lost: {first!r}")
        for exchange in [] if this is None else this.exchanges:
            self.note(exchange, [exchange])

    # ------------------------------------------------------------ checkpoints

    def facts(self) -> dict[str, Any]:
        """Return which parameters were averaged together, and of which something waits for that."""
        return {"groups": [list(group) for group in self._exchanges], "left": sorted(self._left)}

    def tensors(self) -> dict[str, Tensor]:
        self._background.wait()
        found = dict(self._left)
        for number, each in enumerate(self._exchanges.values()):
            found |= named(str(number), {"worker": each.worker, "server": each.server})
        return found

    def room_for(self, about: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
        wanted = {name for group in about["groups"] for name in group} | set(about["left"])
        if unknown := sorted(wanted - set(self._sizes)):
            raise ValueError(f"compression of another model: it has {unknown[0]}, of which this model has no parameter")
        form, found = (
            Format(*about["form"]),
            {n: torch.zeros(self._sizes[n], device=self.device) for n in about["left"]},
        )
        for number, group in enumerate(about["groups"]):
            layout = self._layout(group, about["world_size"], form)
            sizes = {"worker": layout.numel, "server": layout.chunk_numel}
            found |= named(str(number), {side: form.room(size, self.device) for side, size in sizes.items()})
        return found

    def take(self, about: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        self._resumed = bool(about["groups"])
        for number, group in enumerate(about["groups"]):
            each = self._exchanges[tuple(group)] = self._made(group)
            fill({"worker": each.worker, "server": each.server}, state, str(number))
        pieces(self._left, ((name, state[name]) for name in about["left"]))

    def add(self, about: Mapping[str, Any], rank: int, state: Mapping[str, Tensor]) -> None:
        share = self.ranks.world_size / about["world_size"]
        for number, group in enumerate(about["groups"]):
            layout = self._layout(group, about["world_size"], Format(*about["form"]))
            sides = (stored_in(state, f"{number}.{side}") for side in ("worker", "server"))
            pieces(self._left, zip(group, owed(layout, rank, *sides), strict=False), share)
        pieces(self._left, ((name, state[name]) for name in about["left"]), share)

    def forget(self) -> None:
        self._exchanges, self._left, self._resumed = {}, {}, False

    def bytes_kept(self) -> int:
        """Return the bytes of what is left, workers' and servers', of this rank."""
        block = self.form.block_size
        numel = sum(math.ceil(self._sizes[name] / block) * block for name in self._trained)
        return int(self.form.kept_bytes(numel) * (1 + 1 / self.ranks.world_size))
