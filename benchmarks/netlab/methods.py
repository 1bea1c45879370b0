"""Ways to take a step together: ``DistributedDataParallel`` and its hooks, and this project's optimizers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedonebit import Faults, MarsitAdam, OneBitAdam, OneBitLamb, Rounds
from fusedonebit.comm import Transport, make_transport

from ..timed import Timed
from .hooks import Bfloat16, Hook, PowerSGD
from .split import Turn
from .task import BETAS, LR

CPU = torch.device("cpu")


class Replica:
    """A model that one method trains; a method's turn is one step of it."""

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

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.optimizer = adamw(model.parameters())


class Parallel(Replica):
    """AdamW behind ``DistributedDataParallel``, as it is or with a hook."""

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


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, LR, BETAS, weight_decay=0.01, fused=True)


# A freeze after one step is for timing: what the guard thinks of it is not what is measured.
UNGUARDED = Faults(guard="off")


def onebit_adam(
    params: Iterable[Tensor], freeze_step: int = 1, faults: Faults = UNGUARDED, **options: Any
) -> OneBitAdam:
    return OneBitAdam(params, LR, BETAS, weight_decay=0.01, freeze_step=freeze_step, faults=faults, **options)


def onebit_lamb(params: Iterable[Tensor], freeze_step: int = 1, **options: Any) -> OneBitLamb:
    return OneBitLamb(params, LR, BETAS, weight_decay=0.01, freeze_step=freeze_step, faults=UNGUARDED, **options)


def marsit_adam(params: Iterable[Tensor], topology: str, **options: Any) -> MarsitAdam:
    # Only the rounds of one bit: the planner, too, is asked for those.
    rounds = Rounds(full_precision_every=0, global_ratio=1.0)
    return MarsitAdam(params, LR, BETAS, weight_decay=0.01, topology=topology, rounds=rounds, **options)


def _over_mpi(model: nn.Module) -> OneBit:
    from fusedonebit.comm.mpi import MPITransport

    return OneBit(model, onebit_lamb, MPITransport())


METHODS: dict[str, Callable[[nn.Module], Replica]] = {
    "alone": Alone,
    "adamw": Parallel,
    "bf16": lambda model: Parallel(model, Bfloat16()),
    "powersgd": lambda model: Parallel(model, PowerSGD()),
    "onebit-adam": lambda model: OneBit(model, onebit_adam),
    "onebit-lamb": lambda model: OneBit(model, onebit_lamb),
    "marsit-ring": lambda model: OneBit(model, lambda p, **o: marsit_adam(p, "ring", **o)),
    "marsit-owner": lambda model: OneBit(model, lambda p, **o: marsit_adam(p, "owner", **o)),
    "onebit-lamb-mpi": _over_mpi,
}
"""By name; each makes a replica of a model."""
