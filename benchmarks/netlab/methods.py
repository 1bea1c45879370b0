"""Ways to take a step together: ``DistributedDataParallel`` and its hooks, and this project's optimizers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedonebit import Faults, MarsitAdam, OneBitAdam, OneBitLamb, Rounds, Wire, ZeroOneAdam
from fusedonebit.comm import Transport, make_transport

from ..timed import Timed
from .hooks import Bfloat16, Hook, Int8, PowerSGD
from .split import WARM_UP, Turn
from .task import BETAS, LR, WEIGHT_DECAY

CPU = torch.device("cpu")
FAR = 10**6
"""Updates that no timing reaches."""


class Replica:
    """A model that one method trains; a method's turn is one step of it.

    Attributes:
        overlaps: Whether messages travel in the backward pass: then only the whole step can be timed.
        settles: Steps before the first that is timed.
    """

    overlaps: ClassVar[bool] = False
    settles: ClassVar[int] = WARM_UP

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.compressed: list[tuple[float, float]] = []

    def turn(self, batch: Tensor) -> Turn:
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
    """AdamW behind ``DistributedDataParallel``, as it is or with a hook."""

    overlaps = True

    def __init__(self, model: nn.Module, hook: Hook | None = None) -> None:
        buckets = {} if hook is None else hook.buckets
        super().__init__(nn.parallel.DistributedDataParallel(model, **buckets))
        self.optimizer = adamw(model.parameters())
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


class OneBit(Replica):
    """One of this project's optimizers on a bare model."""

    def __init__(self, model: nn.Module, make: Callable[..., Any], transport: Transport | None = None) -> None:
        super().__init__(model)
        self.transport = Timed(transport or make_transport(None, CPU))
        self.optimizer = make(model.parameters(), process_group=self.transport)

    def start(self) -> None:
        self.transport.spans.clear()

    def spans(self) -> list[tuple[float, float]]:
        return list(self.transport.spans)

    def sent(self) -> int:
        return self.optimizer.stats()["bytes_step"]


class Overlapped(Replica):
    """The same with ``Wire(overlap=True)``, whose thread needs the process group itself: nobody times its calls."""

    overlaps = True

    def __init__(self, model: nn.Module, make: Callable[..., Any]) -> None:
        super().__init__(model)
        self.optimizer = make(model.parameters(), wire=Wire(overlap=True))

    def sent(self) -> int:
        return self.optimizer.stats()["bytes_step"]


class Between(OneBit):
    """Steps of the compression stage between two renewals of the variance."""

    def start(self) -> None:
        super().start()
        between_renewals(self.optimizer)


class BetweenOverlapped(Overlapped):
    """The same, overlapped."""

    def start(self) -> None:
        between_renewals(self.optimizer)


class Renewing(OneBit):
    """Steps each of which renews the variance, and shares squares for the next renewal."""

    def start(self) -> None:
        super().start()
        self.optimizer.algorithm.compression.variance.age = 0


class RenewingOverlapped(Overlapped):
    """The same, overlapped."""

    def start(self) -> None:
        self.optimizer.algorithm.compression.variance.age = 0


class Silent(OneBit):
    """Steps of 0/1 Adam in which workers tell each other nothing of their gradients' level: three of four."""

    tells: ClassVar[bool] = False

    def __init__(self, model: nn.Module, make: Callable[..., Any]) -> None:
        super().__init__(model, make)
        self.optimizer.algorithm.own.tells = lambda done, steps: self.tells


class Telling(Silent):
    """Steps in which they do."""

    tells = True


class Warming(OneBit):
    """Steps of a warm-up that does not end."""

    settles = 1


def between_renewals(optimizer: Any) -> None:
    """Make the next step one long after the warm-up, in which no renewal is due."""
    optimizer.algorithm.compression.variance.age, optimizer.algorithm.compression.variance.since = FAR, 0


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, LR, BETAS, weight_decay=WEIGHT_DECAY, fused=True)


# A warm-up of one step is for timing: what the guard thinks of it is not what is measured.
UNGUARDED = Faults(guard="off")


def onebit_adam(params: Iterable[Tensor], **options: Any) -> OneBitAdam:
    """The default, whose variance lives on."""
    return OneBitAdam(params, LR, BETAS, weight_decay=WEIGHT_DECAY, **options)


def onebit_lamb(params: Iterable[Tensor], **options: Any) -> OneBitLamb:
    return OneBitLamb(params, LR, BETAS, weight_decay=WEIGHT_DECAY, warmup=1, faults=UNGUARDED, **options)


def zero_one_adam(params: Iterable[Tensor], **options: Any) -> ZeroOneAdam:
    """The default: no warm-up, a synchronisation in every step."""
    return ZeroOneAdam(params, LR, BETAS, weight_decay=WEIGHT_DECAY, **options)


def marsit_adam(params: Iterable[Tensor], topology: str, **options: Any) -> MarsitAdam:
    # Only the rounds of one bit: the planner, too, is asked for those.
    rounds = Rounds(full_precision_every=0, global_ratio=1.0)
    return MarsitAdam(params, LR, BETAS, weight_decay=WEIGHT_DECAY, topology=topology, rounds=rounds, **options)


def _over_mpi(model: nn.Module) -> Between:
    from fusedonebit.comm.mpi import MPITransport

    return Between(model, onebit_lamb, MPITransport())


compressing = partial(onebit_adam, warmup=1, faults=UNGUARDED)

METHODS: dict[str, Callable[[nn.Module], Replica]] = {
    "alone": Alone,
    "adamw": Parallel,
    "bf16": lambda model: Parallel(model, Bfloat16()),
    "int8": lambda model: Parallel(model, Int8()),
    "powersgd": lambda model: Parallel(model, PowerSGD()),
    "onebit-adam": lambda model: Between(model, compressing),
    "onebit-adam-overlap": lambda model: BetweenOverlapped(model, compressing),
    "zero-one-adam": lambda model: Silent(model, zero_one_adam),
    "onebit-lamb": lambda model: Between(model, onebit_lamb),
    "marsit-ring": lambda model: OneBit(model, partial(marsit_adam, topology="ring")),
    "marsit-owner": lambda model: OneBit(model, partial(marsit_adam, topology="owner")),
    "onebit-lamb-mpi": _over_mpi,
    "warm-up": lambda model: Warming(model, partial(onebit_adam, warmup=FAR)),
    "renewal": lambda model: Renewing(model, compressing),
    "renewal-overlap": lambda model: RenewingOverlapped(model, compressing),
    "telling": lambda model: Telling(model, zero_one_adam),
}
"""By name; each makes a replica of a model. The last four are stages of whole runs of 1-bit Adam and 0/1 Adam."""

WHOLE: dict[str, Callable[[nn.Module, float, int], Replica]] = {
    "bf16": lambda model, share, steps: Parallel(model, Bfloat16()),
    "onebit-adam": lambda model, share, steps: OneBit(model, partial(onebit_adam, warmup=share, total_steps=steps)),
    "onebit-adam-overlap": lambda model, share, steps: Overlapped(
        model, partial(onebit_adam, warmup=share, total_steps=steps)
    ),
    "zero-one-adam": lambda model, share, steps: OneBit(model, zero_one_adam),
}
"""Of whole runs that are timed from their first step to their last: with the warm-up's share and the steps."""
