"""What DDP's gradient averaging costs, without a hook and with torch's own, against one bit per gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedonebit.comm import CompressedAllReduce, TorchTransport
from fusedonebit.triton_kernels import FlatLayout, using

from .netlab.hooks import Bfloat16, Hook, PowerSGD
from .optimizers import backends
from .ranks import WORLD_SIZE, on_ranks, times_of_all
from .registry import Record, Report, case
from .timing import Call

NUMEL, LAYERS, BATCH = 1 << 23, 8, 4
NO_SYNC = "no averaging"


HOOKS: dict[str, Callable[[], Hook] | None] = {
    "DDP, no hook": None,
    "DDP, bf16 hook": Bfloat16,
    "DDP, PowerSGD rank 1": partial(PowerSGD, rank=1),
}


class Peer:
    """A model and a backward pass that ends with averaged gradients."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
        self.x = torch.randn(BATCH, width)

    def backward(self, model: nn.Module) -> None:
        for p in model.parameters():
            p.grad = None
        model(self.x).square().mean().backward()


def hooked(width: int, make: Callable[[], Hook] | None) -> tuple[Call, Callable[[], int]]:
    """DDP's backward pass, and what one sends, as a ring does."""
    peer, hook = Peer(width), make() if make else None
    ddp = DistributedDataParallel(peer.model)
    if hook is not None:
        ddp.register_comm_hook(hook.state, hook.call)
    elements = LAYERS * width * width

    def sent() -> int:
        nbytes = 4 * elements if hook is None else hook.nbytes(elements)
        return 2 * nbytes * (WORLD_SIZE - 1) // WORLD_SIZE

    return lambda: peer.backward(ddp), sent


def compressed(width: int, backend: str) -> tuple[Call, Callable[[], int]]:
    """A backward pass, and the averages of all gradients at one bit each, in two collectives behind it."""
    peer = Peer(width)
    params = list(peer.model.parameters())
    transport = TorchTransport(None, torch.device("cpu"))
    reduce = CompressedAllReduce(FlatLayout(tuple(p.numel() for p in params), WORLD_SIZE), transport)

    def call() -> None:
        transport.traffic.start_step()
        peer.backward(peer.model)
        with using(backend):  # type: ignore[arg-type]
            reduce([p.grad for p in params if p.grad is not None])

    return call, lambda: transport.traffic.bytes_step


def _measure(width: int, rounds: int) -> dict[str, Record]:
    alone = Peer(width)
    made: dict[str, tuple[Call, Callable[[], int]]] = {
        NO_SYNC: (lambda: alone.backward(alone.model), lambda: 0),
        **{name: hooked(width, hook) for name, hook in HOOKS.items()},
    }
    for backend in backends(torch.device("cpu")):
        made[f"CompressedAllReduce, {backend}"] = compressed(width, backend)
    timed = times_of_all({name: call for name, (call, _) in made.items()}, rounds, warmup=4)
    return {name: row | {"bytes sent": made[name][1]()} for name, row in timed.items()}


@case("averaging", "cpu")
def averaging(report: Report) -> None:
    """A backward pass with DDP's averaging, its bf16 and PowerSGD hooks, and ours, on 2 gloo ranks: time and bytes."""
    width = max(8, int(((report.numel or NUMEL) / LAYERS) ** 0.5))
    timed = on_ranks(_measure, width, report.rounds or 15)
    columns = {"averaging": "<32", "ms": ">9.2f", "10-90 %": ">19", "of it averaging": ">15.2f", "bytes sent": ">12,"}
    title = f"{LAYERS * width * width:,} fp32 gradients in {LAYERS} tensors, one thread a rank, batch {BATCH}"
    table = report.table(title, columns | {"x fewer": ">8.1f"})
    fp32 = timed["DDP, no hook"]["bytes sent"]
    for name, row in timed.items():
        more = row["ms"] - timed[NO_SYNC]["ms"]
        fewer = fp32 / row["bytes sent"] if row["bytes sent"] else None
        table.add(averaging=name, **row, **{"of it averaging": more, "x fewer": fewer})
    report.note("bf16: the bytes and arithmetic of torch's own hook, which DDP admits with NCCL only")
    report.note("over the loopback interface, where bytes cost next to nothing; see benchmarks.overlap for a network")
