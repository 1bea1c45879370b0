"""A few small steps of each optimizer on the device: against eager torch on the CPU, without waits, in graphs."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedonebit import (
    AdamW,
    Lamb,
    MarsitAdam,
    MarsitSGD,
    Numerics,
    OneBitAdam,
    OneBitLamb,
    OneBitLion,
    OneBitMuon,
    Rounds,
    Wire,
    ZeroOneAdam,
)
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.optim.policies import DoublingRounds, DoublingVariance
from fusedonebit.optim.two_stage import TwoStage
from fusedonebit.triton_kernels import using

from ..loopback import Loopback
from ..registry import Report, Table, case
from ..timing import synchronise

SHAPES = ((7,), (33, 40), (1024,), (1,), (3, 5, 7), (130, 1000))
LR, WORLD_SIZE, FREEZE, STEPS = 1e-2, 2, 5, 14
CAPTURES_AT, REPLAYS = STEPS, 12
ROUNDS = Rounds(full_precision_every=5)
LIVING: dict[str, Any] = {"warmup": FREEZE, "betas": (0.9, 0.95)}
"""Steps can be captured 0.25 / (1 - beta2) steps after the warm-up."""


def _onebit_muon(params: Sequence[torch.nn.Parameter], **options: Any) -> OneBitMuon:
    matrices, rest = ([p for p in params if (p.dim() > 1) == are] for are in (True, False))
    groups: Any = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
    return OneBitMuon(groups, ns_dtype=torch.float32, **options)


OPTIMIZERS: dict[str, Callable[..., DistributedOptimizer]] = {
    "OneBitAdam": partial(OneBitAdam, **LIVING),
    "OneBitAdam-frozen": partial(OneBitAdam, freeze_step=FREEZE),
    "OneBitAdam-bf16": partial(OneBitAdam, **LIVING, numerics=Numerics(state="bf16")),
    "OneBitAdam-8bit": partial(OneBitAdam, **LIVING, numerics=Numerics(state="8bit")),
    "OneBitLamb": partial(OneBitLamb, **LIVING),
    "OneBitLamb-frozen": partial(OneBitLamb, freeze_step=FREEZE),
    "OneBitLion": OneBitLion,
    "OneBitMuon": _onebit_muon,
    "ZeroOneAdam": partial(
        ZeroOneAdam,
        variance_policy=DoublingVariance(until=FREEZE),
        sync_policy=DoublingRounds(FREEZE, 2),
        numerics=Numerics(variance_floor=0.0),
    ),
    "MarsitSGD": partial(MarsitSGD, momentum=0.9, rounds=ROUNDS),
    "MarsitAdam": partial(MarsitAdam, rounds=ROUNDS),
    "AdamW": AdamW,
    "AdamW-8bit": partial(AdamW, numerics=Numerics(state="8bit")),
    "Lamb": Lamb,
}
CAPTURABLE = tuple(name for name in OPTIMIZERS if name.startswith(("OneBitAdam", "OneBitLamb")))
FAR, FEW = 1e-5, 1e-3
"""What two devices may differ by, as a share of what a parameter has moved by at most, and how many may by more: a sign
of a value next to zero turns where a power or a root has rounded otherwise."""
COLUMNS = {"check": "<44", "result": "<24", "s": ">6.1f", "told": "<40"}


class Alike(Loopback):
    """Ranks that all send what this one does, each server what is of its chunk: chunks of squares differ in length."""

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        super().all_to_all(received, sent[:1].expand_as(sent))


class Run:
    """An optimizer on random gradients, of a rank the same ones on every device."""

    def __init__(self, name: str, device: torch.device, rank: int = 0, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device, self.rank = device, rank
        self.params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in SHAPES]
        for p in self.params:
            p.grad = torch.zeros_like(p)
        options = {"process_group": Alike(WORLD_SIZE)} | options
        self.optimizer = OPTIMIZERS[name](self.params, lr=LR, **options)

    def refill(self, step: int) -> None:
        """Put this step's gradients where those before were, cleared first: graphs read the same memory again."""
        generator = torch.Generator().manual_seed(1000 * self.rank + step + 1)
        for i, p in enumerate(self.params):
            assert p.grad is not None
            p.grad.zero_().copy_(torch.randn(p.shape, generator=generator) * 10.0 ** (i % 4 - 2))

    def train(self, first: int, last: int, take: Callable[[int], Any] | None = None) -> list[Tensor]:
        """Take the steps from ``first`` to ``last``; return copies of the parameters."""
        for step in range(first, last):
            self.refill(step)
            if take is None:
                self.optimizer.step()
            else:
                take(step)
        return [p.detach().clone() for p in self.params]


def equals_eager(name: str, device: torch.device) -> str:
    """Warm-up, freeze and compression, against the eager text on the CPU."""
    ours = Run(name, device)
    found = [p.cpu() for p in ours.train(0, STEPS)]
    with using("plain"):
        eager = Run(name, torch.device("cpu"))
        expected = eager.train(0, STEPS)
        told = eager.optimizer.stats()
    stats = ours.optimizer.stats()
    for key in ("step", "skipped_steps", "phase"):
        if stats[key] != told[key]:
            raise AssertionError(f"{key} is {stats[key]!r}, of eager torch on the CPU {told[key]!r}")
    if stats["skipped_steps"]:
        raise AssertionError(f"{stats['skipped_steps']} steps were skipped")
    elements = sum(p.numel() for p in found)
    unequal = sum(int((a != b).sum()) for a, b in zip(found, expected, strict=True))
    far = sum(int((~((a - b).abs() <= FAR * LR * STEPS)).sum()) for a, b in zip(found, expected, strict=True))
    if far > FEW * elements:
        raise AssertionError(f"{far} of {elements} elements differ by more than {FAR:g} of all steps")
    return f"{unequal} of {elements} elements have other bits; {stats['backend']}, {stats['phase']}"


def waits_for_nothing(name: str, device: torch.device) -> str:
    """Compressed steps under ``torch.cuda.set_sync_debug_mode("error")``."""
    run, steps = Run(name, device), 2 if name == "OneBitMuon" else 3  # before that whitens anew
    run.train(0, STEPS)
    run.refill(STEPS)
    synchronise(device)
    if device.type != "cuda":
        run.optimizer.step()
        return "nothing to wait for on a CPU"
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            run.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronise(device)
    return f"{steps} steps"


def replays_equal_steps(name: str, device: torch.device, **options: Any) -> str:
    """Two graphs, both captured before either is replayed, replayed by turns: the bits of steps without them."""
    stepped, replayed = (Run(name, device, wire=Wire(capturable=True), **options) for _ in range(2))
    for run in (stepped, replayed):
        run.train(0, CAPTURES_AT)
    renews: list[int] = []

    def step(t: int) -> None:
        stepped.optimizer.step()
        algorithm = stepped.optimizer.algorithm
        living = algorithm.compression.variance if isinstance(algorithm, TwoStage) else None
        renews.extend([t] * bool(living and living.due))

    expected = stepped.train(CAPTURES_AT, CAPTURES_AT + REPLAYS, step)
    if device.type != "cuda":
        return "graphs are captured on CUDA only"
    graphs = []
    for _ in range(2):
        synchronise(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed.optimizer.step()
        graphs.append(graph)

    def take(t: int) -> None:
        if t in renews:  # which no graph does
            replayed.optimizer.step()
        else:
            graphs[t % 2].replay()

    found = replayed.train(CAPTURES_AT, CAPTURES_AT + REPLAYS, take)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(a, b):
            raise AssertionError(f"{int((a != b).sum())} of {a.numel()} elements of tensor {i} have other bits")
    steps = [run.optimizer.stats()["step"] for run in (replayed, stepped)]
    if steps[0] != steps[1]:
        raise AssertionError(f"replays have counted {steps[0]} steps instead of {steps[1]}")
    return f"{REPLAYS - len(renews)} replays of 2 graphs, {len(renews)} steps that renew"


def attempt(table: Table, what: str, function: Callable[[], str]) -> bool:
    """Add a row with what a check has told; where it fails, say so, and let those behind it go on."""
    began = time.perf_counter()
    try:
        told, result = function(), "passed"
    except Exception as error:
        traceback.print_exc()
        told, result = str(error).strip().split("\n")[0][:200], f"FAILED: {type(error).__name__}"
    table.add(check=what, result=result, told=told, s=time.perf_counter() - began)
    return result == "passed"


def smoke(name: str, report: Report) -> None:
    """Make an optimizer's checks."""
    table = report.table(f"{name}, one rank of {WORLD_SIZE}, {len(SHAPES)} tensors", COLUMNS)
    checks = {"equals eager torch on the CPU": equals_eager, "waits for nothing": waits_for_nothing}
    if name in CAPTURABLE:
        checks["two graphs captured, then replayed"] = replays_equal_steps
    passed = [attempt(table, what, partial(check, name, report.device)) for what, check in checks.items()]
    if not all(passed):
        raise AssertionError(f"{passed.count(False)} of {len(passed)} checks failed")


for _name in OPTIMIZERS:
    _about = f"A few small steps of {_name}: against eager torch on the CPU, without waits, in graphs."
    case(f"smoke-{_name}", "cuda", about=_about)(partial(smoke, _name))
