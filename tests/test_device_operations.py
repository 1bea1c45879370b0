"""How many device operations a step is: as many as recorded here, whatever the number of tensors; they may only fall.

Beside each number is the one that is aimed at. A test that fails prints what was counted.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from device_operations import counting, without_kernels

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
from fusedonebit.comm import Format, LocalTransport, QuantisedAllReduce, SimulatedGroup, Step
from fusedonebit.comm.simulated import SimulatedTransport
from fusedonebit.optim.policies import FixedRounds, Progress
from fusedonebit.triton_kernels import FlatLayout, using


@dataclass(frozen=True)
class Renewals:
    """Renews the variance in the first rounds alone."""

    most: int

    def renews(self, done: Progress) -> bool:
        return done.rounds < self.most


def own(length: int) -> dict[str, Any]:
    """Workers with variances of their own, in rounds of so many steps."""
    return {"sync_policy": FixedRounds(length)}


def zero_one(renewals: int, length: int) -> dict[str, Any]:
    return {"variance_policy": Renewals(renewals)} | own(length)


class Case(NamedTuple):
    """A kind of step: of which optimizer, after how many others, and device operations on 2 ranks and on one.

    As many are ``aimed_at``, unless that says otherwise.

    ``scaler``: whether a GradScaler hands over its scale and what it has found.
    """

    kind: Any
    options: dict[str, Any]
    before: int
    phase: str
    counted: tuple[int, int]
    aimed_at: tuple[int, int] | None = None
    scaler: bool = False


SEVERAL: dict[str, Any] = {"rounds": Rounds(local_steps=4)}
ADAM, LAMB = (OneBitAdam, {"freeze_step": 2}), (OneBitLamb, {"freeze_step": 2})
LIVING: tuple[Any, dict[str, Any]] = OneBitAdam, {"variance": "shared", "warmup": 2}
LIVING_LAMB: tuple[Any, dict[str, Any]] = OneBitLamb, LIVING[1]
"""Their 27th step is one between two renewals, on gradients that are not projected."""
CLIPS: dict[str, Any] = {"max_grad_norm": 1.0}
CLIPPING_ADAM = (OneBitAdam, {"freeze_step": 2, **CLIPS})
IN_BF16, IN_CODES = ({"numerics": Numerics(state=state)} for state in ("bf16", "8bit"))
CASES = {
    "OneBitAdam": Case(*ADAM, 4, "compression", (9, 4)),
    "OneBitAdam, living": Case(*LIVING, 26, "compression", (9, 4)),
    "OneBitAdam, living, clips, scaler": Case(LIVING[0], LIVING[1] | CLIPS, 26, "compression", (12, 6), scaler=True),
    "OneBitAdam, living, tells squares": Case(*LIVING, 18, "compression", (15, 8), (13, 8)),
    "OneBitAdam, living, renews": Case(*LIVING, 17, "compression", (14, 8), (13, 8)),
    "OneBitAdam, living, renews and tells squares": Case(*LIVING, 4, "compression", (20, 12), (13, 8)),
    "OneBitAdam, state in bf16": Case(OneBitAdam, ADAM[1] | IN_BF16, 4, "compression", (9, 4)),
    "OneBitAdam, state in codes": Case(OneBitAdam, ADAM[1] | IN_CODES, 4, "compression", (9, 4)),
    "OneBitAdam, living, state in codes": Case(OneBitAdam, LIVING[1] | IN_CODES, 26, "compression", (9, 4)),
    "OneBitAdam, living, state in codes, renews": Case(
        OneBitAdam, LIVING[1] | IN_CODES, 17, "compression", (14, 8), (13, 8)
    ),
    "OneBitAdam, clips": Case(*CLIPPING_ADAM, 4, "compression", (12, 6)),
    "OneBitAdam, scaler": Case(*ADAM, 4, "compression", (12, 6), scaler=True),
    "OneBitAdam, clips, scaler": Case(*CLIPPING_ADAM, 4, "compression", (12, 6), scaler=True),
    "OneBitLamb": Case(*LAMB, 4, "compression", (11, 6)),
    "OneBitLamb, living": Case(*LIVING_LAMB, 26, "compression", (10, 5), (11, 6)),
    "OneBitLamb, living, clips, scaler": Case(
        LIVING_LAMB[0], LIVING[1] | CLIPS, 26, "compression", (13, 7), (14, 8), scaler=True
    ),
    "OneBitLamb, living, tells squares": Case(*LIVING_LAMB, 18, "compression", (16, 9), (15, 10)),
    "OneBitLamb, living, renews": Case(*LIVING_LAMB, 17, "compression", (24, 18), (15, 10)),
    "OneBitAdam, 4 buckets": Case(OneBitAdam, {"freeze_step": 2, "wire": Wire(buckets=4)}, 4, "compression", (24, 11)),
    "OneBitLamb, clips, scaler": Case(OneBitLamb, {"freeze_step": 2, **CLIPS}, 4, "compression", (14, 8), scaler=True),
    "AdamW": Case(AdamW, {}, 3, "uncompressed", (19, 3)),
    "AdamW, clips, scaler": Case(AdamW, CLIPS, 3, "uncompressed", (49, 6), scaler=True),
    "Lamb": Case(Lamb, {}, 3, "uncompressed", (21, 5)),
    "Lamb, state in codes": Case(Lamb, IN_CODES, 3, "uncompressed", (21, 5)),
    "OneBitLion": Case(OneBitLion, {}, 3, "one-bit", (8, 8)),
    "OneBitLion, clips, scaler": Case(OneBitLion, CLIPS, 3, "one-bit", (11, 10), scaler=True),
    "ZeroOneAdam, renewal": Case(ZeroOneAdam, zero_one(99, 1), 3, "uncompressed", (27, 20), (9, 9)),
    "ZeroOneAdam, round of one": Case(ZeroOneAdam, zero_one(2, 1), 5, "one-bit", (9, 4)),
    "ZeroOneAdam, first local step": Case(ZeroOneAdam, zero_one(2, 4), 6, "local", (3, 3), (2, 2)),
    "ZeroOneAdam, local step": Case(ZeroOneAdam, zero_one(2, 4), 7, "local", (2, 2)),
    "ZeroOneAdam, last step": Case(ZeroOneAdam, zero_one(2, 4), 9, "one-bit", (10, 5)),
    "ZeroOneAdam, round of one, clips": Case(ZeroOneAdam, zero_one(2, 1) | CLIPS, 5, "one-bit", (12, 6)),
    "ZeroOneAdam, round of one, scaler": Case(ZeroOneAdam, zero_one(2, 1), 5, "one-bit", (14, 8), (12, 6), scaler=True),
    "ZeroOneAdam, local step, clips, scaler": Case(
        ZeroOneAdam, zero_one(2, 4) | CLIPS, 7, "local", (6, 6), (4, 4), scaler=True
    ),
    "ZeroOneAdam, own variances, local step": Case(ZeroOneAdam, own(4), 5, "local", (2, 2)),
    "ZeroOneAdam, own variances, last step": Case(ZeroOneAdam, own(4), 7, "one-bit", (23, 8), (21, 8)),
    "ZeroOneAdam, own variances, round of one": Case(ZeroOneAdam, own(1), 17, "one-bit", (12, 7)),
    "ZeroOneAdam, own variances, round of one that tells": Case(ZeroOneAdam, own(1), 19, "one-bit", (22, 7), (20, 7)),
    "ZeroOneAdam, own variances, clips, scaler": Case(
        ZeroOneAdam, own(4) | CLIPS, 7, "one-bit", (27, 11), (25, 11), scaler=True
    ),
    "MarsitSGD": Case(MarsitSGD, {}, 4, "one-bit", (8, 4)),
    "MarsitSGD, clips, scaler": Case(MarsitSGD, CLIPS, 4, "one-bit", (11, 6), scaler=True),
    "MarsitSGD, owner": Case(MarsitSGD, {"topology": "owner"}, 4, "one-bit", (7, 7)),
    "MarsitAdam": Case(MarsitAdam, {}, 4, "one-bit", (9, 5)),
    "MarsitSGD, full precision": Case(
        MarsitSGD, {"rounds": Rounds(full_precision_every=1)}, 4, "uncompressed", (7, 6), (7, 7)
    ),
    "MarsitSGD, first local step": Case(MarsitSGD, SEVERAL, 4, "local", (2, 2)),
    "MarsitSGD, local step": Case(MarsitSGD, SEVERAL, 5, "local", (2, 2)),
    "MarsitSGD, last step": Case(MarsitSGD, SEVERAL, 7, "one-bit", (10, 6), (9, 5)),
}
MADE_ANEW = ("ZeroOneAdam, renewal", "ZeroOneAdam, local step", "ZeroOneAdam, local step, clips, scaler")
MADE_ANEW += ("AdamW", "AdamW, clips, scaler", "Lamb", "Lamb, state in codes")
MADE_ANEW += tuple(name for name in CASES if "own variances" in name)
"""Where a learning rate has changed there is an upload; in these steps, and Marsit's, the table is made anew as well.

Others renew it in launches that they have anyway.
"""


@dataclass
class Run:
    """A rank: tiny parameters in two groups, of two dtypes, with weight decay, and gradients that stay."""

    case: Case
    tensors: int
    transport: Any
    params: list[torch.nn.Parameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for i in range(self.tensors):
            p = torch.randn(5, generator=generator).to((torch.float32, torch.bfloat16)[i % 2])
            self.params.append(torch.nn.Parameter(p))
            self.params[-1].grad = torch.randn(5, generator=generator).to(p.dtype)
        groups = [{"params": self.params[::2]}, {"params": self.params[1::2], "lr": 1e-4, "weight_decay": 0.1}]
        self.optimizer = self.case.kind(groups, 1e-3, **self.case.options, process_group=self.transport)
        if self.case.scaler:
            self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.step()


def operations_of(case: Case, world_size: int, tensors: int, scheduled: bool) -> dict[str, int]:
    """What rank 0 does in the step, counted by name."""
    group = SimulatedGroup(world_size)
    alone = world_size == 1

    def prepared(rank: int, transport: Any) -> Run:
        run = Run(case, tensors, LocalTransport() if alone else transport)
        run.steps(case.before)
        if scheduled:
            for param_group in run.optimizer.param_groups:
                param_group["lr"] *= 0.5
        return run

    runs = group.run(prepared)

    def counted(rank: int, transport: Any) -> dict[str, int]:
        if rank:
            runs[rank].steps(1)
            return {}
        with counting() as operations:
            runs[rank].steps(1)
        return dict(operations)

    with using("triton"), nullcontext() if tensors == 3 else without_kernels():
        found = group.run(counted)[0]
    assert runs[0].optimizer.phase == case.phase
    assert runs[0].optimizer.frame.steps.outcomes.skipped == 0
    return found


@pytest.mark.long(
    but=(
        "OneBitAdam-3-2",
        "OneBitAdam, clips, scaler-3-2",
        "OneBitAdam-302-2",
        "OneBitLamb-3-1",
        "ZeroOneAdam, local step-3-2",
        "MarsitSGD-3-2",
    )
)
@pytest.mark.needs_compiler  # steps before it are C's, which make the tables that kernels keep; eager functions don't
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("world_size", [2, 1])
@pytest.mark.parametrize("tensors", [3, 302, pytest.param(3000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CASES)
def test_a_step_makes_as_many_device_operations_as_recorded(name, tensors, world_size):
    case = CASES[name]
    found = operations_of(case, world_size, tensors, scheduled=tensors == 302)
    for what, count in sorted(found.items()):
        print(f"{count:4d} {what}")
    total, recorded = sum(found.values()), case.counted[world_size == 1]
    aimed_at = (case.aimed_at or case.counted)[world_size == 1]
    print(f"{name}, {tensors} tensors, W = {world_size}: {total} device operations ({aimed_at} aimed at)")
    scheduled = 1 + (name in MADE_ANEW or name.startswith("Marsit")) if tensors == 302 else 0
    assert total == recorded + scheduled


def averaged(rank: int, transport: SimulatedTransport, tensors: int, form: Format) -> Counter[str]:
    """What the third exchange of a bucket does."""
    sizes, device = (300,) * tensors, torch.device("cpu")
    average = QuantisedAllReduce(FlatLayout(sizes, 2, form.block_size), transport, form, device)
    gradients = [torch.ones(n) for n in sizes]  # DDP's lie in its buckets, always at the same place
    for number in (1, 2):
        average(gradients, Step(number))
    with counting() as counted:
        average(gradients, Step(3))
    return Counter(counted)


@pytest.mark.parametrize(("bits", "feedback"), [(4, "bf16"), (8, None), (1, "8bit")])
@pytest.mark.parametrize("tensors", [3, 302])
def test_a_bucket_of_compressed_gradients_is_four_launches(tensors, bits, feedback):
    group = SimulatedGroup(2)
    with using("triton"), without_kernels():
        found = group.run(partial(averaged, tensors=tensors, form=Format(bits, feedback)))[0]
    print(f"{bits} bits, residuals in {feedback}, {tensors} tensors: {dict(found)}")
    kernels = ["quantise", "requantise", "dequantise"] + ["take_back"] * (feedback is not None)
    assert found == Counter([f"kernel {name}" for name in kernels] + ["collective all_to_all", "collective all_gather"])


NS_STEPS = 5
PRODUCTS = {"bmm", "baddbmm", "baddbmm_"}
OF_MUON = ("kernel", "collective", "index", "index_put_")


def step_of_muon(rank: int, transport: SimulatedTransport, tensors: int) -> Counter[str]:
    """What the seventh step does, between two renewals, on matrices of two shapes, by the first word of its name."""
    params = [torch.nn.Parameter(torch.ones((16, 8) if i % 2 else (8, 24))) for i in range(tensors)]
    optimizer = OneBitMuon(params, 1e-2, ns_steps=NS_STEPS, process_group=transport)
    for p in params:
        p.grad = torch.randn(p.shape)
    for _ in range(6):
        optimizer.step()
    with counting() as counted:
        optimizer.step()
    found: Counter[str] = Counter()
    for name, count in counted.items():
        found[name.split()[0]] += count
    return found


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("tensors", [4, 302])
def test_a_step_of_muon_beside_its_products_is_eleven_operations(tensors):
    shapes = 2
    with using("triton"), without_kernels():
        found = SimulatedGroup(2).run(partial(step_of_muon, tensors=tensors))[0]
    step = sum(found[name] for name in OF_MUON)
    whitening = sum(found[name] for name in PRODUCTS) - shapes * 3 * NS_STEPS
    others = {name: n for name, n in found.items() if name not in {*OF_MUON, *PRODUCTS, "_local_scalar_dense"}}
    print(
        f"OneBitMuon, {tensors} matrices of {shapes} shapes: {step} device operations whatever their number (limit 11)"
    )
    print(f"for each shape: {3 * NS_STEPS} products of Newton-Schulz, {whitening / shapes} of whitening, {others}")
    assert step <= 11
    assert whitening == 4 * shapes
    assert sum(others.values()) <= 6 * shapes
