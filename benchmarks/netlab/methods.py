"""Ways to take a step together: ``DistributedDataParallel`` and its hooks, and this project's optimizers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.lab.batched_muon import onebit_muon
from benchmarks.lab.compressed import Muon
from benchmarks.lab.setting import Setting
from fusedonebit import (
    Faults,
    MarsitAdam,
    OneBitAdam,
    OneBitLamb,
    OneBitMuon,
    Rounds,
    Wire,
    ZeroOneAdam,
    compress,
    policies,
)
from fusedonebit.apps.transformer import ByteTransformer
from fusedonebit.comm import Traffic, Transport, make_transport
from fusedonebit.comm.transport import Pending
from fusedonebit.optim import muon as algorithms

from .hooks import MEDIUM_BUCKETS, Bfloat16, Hook, Int8, PowerSGD
from .split import WARM_UP, Turn
from .task import BETAS, LR, WEIGHT_DECAY, of_blocks

CPU = torch.device("cpu")
FAR = 10**6
"""Updates that no timing reaches."""


class Timed:
    """Another transport, and from when until when this rank was in its calls.

    Args:
        transport: What the messages go by.

    Attributes:
        spans: Of each call, and of each wait for an exchange, ``time.perf_counter`` at its begin and end.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank, self.world_size = transport.rank, transport.world_size
        self.spans: list[tuple[float, float]] = []

    @property
    def traffic(self) -> Traffic:
        """The other transport's."""
        return self._transport.traffic

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        result = call(*arguments)
        self.spans.append((began, time.perf_counter()))
        return result

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Pending:
        return _TimedPending(self, self._call(self._transport.exchange, received, source, sent, destination))


def _timed(name: str) -> Callable[..., None]:
    return lambda self, *tensors: self._call(getattr(self._transport, name), *tensors)


for _name in ("all_to_all", "all_gather", "all_reduce", "reduce_scatter", "broadcast"):
    setattr(Timed, _name, _timed(_name))


class _TimedPending:
    def __init__(self, transport: Timed, pending: Pending) -> None:
        self._transport, self._pending = transport, pending

    def wait(self) -> None:
        self._transport._call(self._pending.wait)


class Replica:
    """A model that one method trains; a method's turn is one step of it.

    Attributes:
        overlaps: Whether messages travel in the backward pass: then only the whole step can be timed.
        settles: Steps before the first that is timed.
    """

    overlaps = False
    settles = WARM_UP

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def turn(self, batch: Any) -> Turn:
        """Takes a step, which all ranks begin together."""
        self.start()
        dist.barrier()
        began = time.perf_counter()
        loss = self.model(batch)
        loss.backward()
        computed = time.perf_counter()
        self.optimizer.step()
        ended = time.perf_counter()
        self.optimizer.zero_grad()
        return Turn(began, computed, ended, self.spans(), float(loss.detach()))

    optimizer: torch.optim.Optimizer

    def start(self) -> None:
        """Forgets the last step's times."""

    def spans(self) -> list[tuple[float, float]]:
        """From when until when this rank was in collectives; or, of DDP's hooks, compressed."""
        return []

    def sent(self) -> int:
        """Payload of one step."""
        return 0


class Alone(Replica):
    """AdamW without any synchronisation: what computing takes."""

    settles = 1

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.optimizer = adamw(model.parameters())


class Parallel(Replica):
    """AdamW, or what ``make`` makes, behind ``DistributedDataParallel``, as it is or with a hook."""

    overlaps = True

    def __init__(
        self, model: nn.Module, hook: Hook | None = None, make: Callable[..., Any] | None = None, **buckets: Any
    ) -> None:
        buckets = buckets if hook is None else hook.buckets
        super().__init__(nn.parallel.DistributedDataParallel(model, **buckets))
        self.optimizer = (make or adamw)(model.parameters())
        self._hook, self._elements = hook, sum(p.numel() for p in model.parameters())
        if hook is not None:
            self.model.register_comm_hook(hook.state, hook.call)

    def start(self) -> None:
        if self._hook is not None:
            self._hook.spans.clear()

    def spans(self) -> list[tuple[float, float]]:
        return [] if self._hook is None else list(self._hook.spans)

    def sent(self) -> int:
        world_size = dist.get_world_size()
        nbytes = 4 * self._elements if self._hook is None else self._hook.nbytes(self._elements)
        return 2 * nbytes * (world_size - 1) // world_size


class Compressed(Parallel):
    """AdamW behind ``DistributedDataParallel``, whose gradients ``fusedonebit.compress`` averages."""

    def __init__(self, model: nn.Module, bits: int) -> None:
        super().__init__(model, **MEDIUM_BUCKETS)
        self._traffic, self._before = compress(self.model, bits).ranks.traffic, 0

    def start(self) -> None:
        self._before = self._traffic.bytes_total

    def sent(self) -> int:
        return self._traffic.bytes_total - self._before


class OneBit(Replica):
    """One of this project's optimizers on a bare model.

    Args:
        model: What it trains.
        make: Makes it.
        before: Is called with it before each step.
        overlap: Whether with ``Wire(overlap=True)``, whose thread needs the process group itself: nobody times its
            calls.
        settles: Steps before the first that is timed.
        transport: The default group's, if none is given.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[..., Any],
        before: Callable[[Any], None] = lambda optimizer: None,
        overlap: bool = False,
        settles: int = WARM_UP,
        transport: Transport | None = None,
    ) -> None:
        super().__init__(model)
        self.before, self.overlaps, self.settles = before, overlap, settles
        self.calls: list[tuple[float, float]] = []
        how: dict[str, Any] = {"wire": Wire(overlap=True)}
        if not overlap:
            timed = Timed(transport or make_transport(None, CPU))
            self.calls, how = timed.spans, {"process_group": timed}
        self.optimizer = make(model.parameters(), **how)

    def start(self) -> None:
        self.calls.clear()
        self.before(self.optimizer)

    def spans(self) -> list[tuple[float, float]]:
        return list(self.calls)

    def sent(self) -> int:
        return self.optimizer.stats()["bytes_step"]


def between_renewals(optimizer: Any) -> None:
    """Make the next step one long after the warm-up, in which no renewal is due."""
    optimizer.algorithm.compression.variance.age, optimizer.algorithm.compression.variance.since = FAR, 0


def renewing(optimizer: Any) -> None:
    """Make the next step one that renews the variance, and shares squares for the next renewal."""
    optimizer.algorithm.compression.variance.age = 0


def telling(optimizer: Any, tells: bool = True) -> None:
    """Let 0/1 Adam's workers tell each other of their gradients' level in each step or in none, not in one of four."""
    optimizer.algorithm.own.tells = lambda done, steps: tells


OPTIONS: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
adamw = partial(torch.optim.AdamW, **OPTIONS, fused=True)
# A warm-up of one step is for timing: what the guard thinks of it is not what is measured.
AT_ONCE: dict[str, Any] = {"warmup": 1, "faults": Faults(guard="off")}
# Only the rounds of one bit: the planner, too, is asked for those.
ROUNDS = Rounds(full_precision_every=0, global_ratio=1.0)
onebit_adam = partial(OneBitAdam, **OPTIONS)
compressing, onebit_lamb = partial(onebit_adam, **AT_ONCE), partial(OneBitLamb, **OPTIONS, **AT_ONCE)
zero_one_adam = partial(ZeroOneAdam, **OPTIONS, sync_policy=policies.EveryStep())  # bits from the first step on
marsit_adam = partial(MarsitAdam, **OPTIONS, rounds=ROUNDS)


def _muon_on_halves(model: ByteTransformer) -> Parallel:
    of = Setting(LR, FAR, WEIGHT_DECAY, 0, make_transport(None, CPU))
    return Parallel(model, Bfloat16(), lambda params: Muon(list(params), of, of_blocks(model)))


def _onebit_muon(model: ByteTransformer, renews: bool = False) -> OneBit:
    def make(params: Any, process_group: Transport) -> OneBitMuon:
        of = Setting(LR, FAR, WEIGHT_DECAY, 0, process_group)
        made = onebit_muon(list(params), of, of_blocks(model), betas=BETAS)
        assert isinstance(made.algorithm, algorithms.Muon)
        assert made.algorithm.exchange is not None
        made.algorithm.exchange.whitening.due = lambda step: renews  # but for the first time in its second step
        return made

    return OneBit(model, make)


def _over_mpi(model: nn.Module) -> OneBit:
    from fusedonebit.comm.mpi import MPITransport

    return OneBit(model, onebit_lamb, between_renewals, transport=MPITransport())


METHODS: dict[str, Callable[[ByteTransformer], Replica]] = {
    "alone": Alone,
    "adamw": Parallel,
    "bf16": lambda model: Parallel(model, Bfloat16()),
    "int8": lambda model: Parallel(model, Int8()),
    "powersgd": lambda model: Parallel(model, PowerSGD()),
    "compress-4": partial(Compressed, bits=4),
    "onebit-adam": partial(OneBit, make=compressing, before=between_renewals),
    "onebit-adam-overlap": partial(OneBit, make=compressing, before=between_renewals, overlap=True),
    "zero-one-adam": partial(OneBit, make=zero_one_adam, before=partial(telling, tells=False)),
    "onebit-lamb": partial(OneBit, make=onebit_lamb, before=between_renewals),
    "marsit-ring": partial(OneBit, make=partial(marsit_adam, topology="ring")),
    "marsit-owner": partial(OneBit, make=partial(marsit_adam, topology="owner")),
    "onebit-lamb-mpi": _over_mpi,
    "warm-up": partial(OneBit, make=partial(onebit_adam, warmup=FAR), settles=1),
    "renewal": partial(OneBit, make=compressing, before=renewing),
    "renewal-overlap": partial(OneBit, make=compressing, before=renewing, overlap=True),
    "telling": partial(OneBit, make=zero_one_adam, before=telling),
    "muon-bf16": _muon_on_halves,
    "onebit-muon": _onebit_muon,
    "whitening": partial(_onebit_muon, renews=True),
}
"""By name; each makes a replica of a model. Some are stages of whole runs: those of ``sweep.STAGES``, "whitening"."""


def _run_of(model: nn.Module, share: float, steps: int, overlap: bool = False) -> OneBit:
    return OneBit(model, partial(onebit_adam, warmup=share, total_steps=steps), overlap=overlap)


WHOLE: dict[str, Callable[[nn.Module, float, int], Replica]] = {
    "bf16": lambda model, share, steps: Parallel(model, Bfloat16()),
    "onebit-adam": _run_of,
    "onebit-adam-overlap": partial(_run_of, overlap=True),
    "zero-one-adam": lambda model, share, steps: OneBit(model, zero_one_adam),
}
"""Of whole runs that are timed from their first step to their last: with the warm-up's share and the steps."""
