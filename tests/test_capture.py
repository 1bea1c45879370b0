"""``capturable=True``: a compressed step is ops on fixed memory, which can be replayed without the host."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from launch_keys import recording
from optimizers import FROZEN, UNGUARDED, construct, objects
from ranks import run_ranks
from tape import capturing, in_a_capture
from whole_steps import BASES, LIVING, Rank

from fusedonebit import AdamW, Lamb, OneBitAdam, Wire
from fusedonebit.comm import SimulatedGroup, Transport

SHAPES = ((7,), (33, 40), (1024,), (3, 5, 7))
FREEZE, STEPS = 12, 30
EXTRAS = {
    "plain": {},
    "unguarded layers": {**UNGUARDED, "scale_scope": "layer", "precondition": False},
    "ternary": {"ternary": True},
    "clipped": {"max_grad_norm": 0.5},
    "loss scaled": {},
}
OF_LAMB = ("plain", "unguarded layers")


class Run:
    """A training run on this rank's random gradients, which stay where they are."""

    def __init__(self, rank: int, name: str, extra: str) -> None:
        generator = torch.Generator().manual_seed(7)
        self.params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        for p in self.params:
            p.grad = torch.zeros_like(p)
        self.optimizer = construct(name, self.params, 1e-2, freeze_step=FREEZE, capturable=True, **EXTRAS[extra])
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.rank, self.scaled = rank, extra == "loss scaled"
        if self.scaled:  # what a GradScaler sets for the time of a step
            self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)

    def step(self, i: int, take) -> None:
        generator = torch.Generator().manual_seed(100 * i + self.rank)
        for p in self.params:
            p.grad.copy_(torch.randn(p.shape, generator=generator))
        if self.scaled:
            self.optimizer.found_inf.fill_(float(i in (FREEZE + 8, FREEZE + 11) and self.rank == 1))
            for p in self.params:
                p.grad.mul_(8.0)
        take()
        self.scheduler.step()

    def outcome(self) -> tuple:
        stats = self.optimizer.stats()
        momenta = [self.optimizer.momentum(p) for p in self.params]
        errors = [self.optimizer.worker_error(p) for p in self.params]
        told = [stats[key] for key in ("phase", "step", "skipped_steps", "grad_norm", "update_norm")]
        return [p.detach() for p in self.params], momenta, errors, told


def train(rank: int, world_size: int, name: str, extra: str, replayed: bool) -> tuple:
    run = Run(rank, name, extra)
    for i in range(FREEZE + 3):
        run.step(i, run.optimizer.step)
    takes = [run.optimizer.step]
    if replayed:
        tapes = []
        for _ in range(2):  # both before the first replay
            with capturing() as tape:
                run.optimizer.step()
            tapes.append(tape)
        takes = [tape.replay for tape in tapes]
    for i in range(FREEZE + 3, STEPS - 3):
        run.step(i, takes[i % len(takes)])
    for i in range(STEPS - 3, STEPS):  # and on, without the graph
        run.step(i, run.optimizer.step)
    return run.outcome()


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        pytest.param(name, extra, marks=() if name == "onebit-adam" or extra in OF_LAMB else pytest.mark.full)
        for name in FROZEN
        for extra in EXTRAS
    ],
)
def test_alternating_replays_equal_steps_at_a_changing_rate(name, extra):
    replayed, stepped = (run_ranks(train, 2, name, extra, way) for way in (True, False))
    for rank in range(2):
        *tensors, told = replayed[rank]
        *expected, told_expected = stepped[rank]
        for ours, theirs in zip(tensors, expected, strict=True):
            assert all(map(torch.equal, ours, theirs))
        assert told == told_expected
        assert told[:3] == ["compression", STEPS - 2 * (extra == "loss scaled"), 2 * (extra == "loss scaled")]
        assert all(map(torch.equal, tensors[0], replayed[0][0]))
    assert not torch.equal(replayed[0][2][1], replayed[1][2][1])


CAPTURED = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5},
    "undivided": {"precondition": False},
    "ternary": {"ternary": True},
    "living": LIVING,
    "in codes": {"state": "8bit"},
}
OF_WHICH = dict.fromkeys(("OneBitAdam", "OneBitLamb", "AdamW", "Lamb"), CAPTURED) | {
    "OneBitLamb": {what: options for what, options in CAPTURED.items() if what != "in codes"},
    **{name: {what: CAPTURED[what] for what in ("plain", "clipped", "in codes")} for name in ("AdamW", "Lamb")},
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", OF_WHICH)
def test_a_capture_launches_nothing_that_was_not_launched_before(name, world_size):
    # CUDA can't load a kernel while it captures, nor may Triton then compile one.
    if name in ("AdamW", "Lamb") and world_size > 1:
        pytest.skip("several ranks of it can't capture a step")
    for what, options in OF_WHICH[name].items():
        run = replace(BASES[name], sizes=(300, 17), options=options | {"capturable": True})
        group = SimulatedGroup(world_size)
        with recording() as keys:
            ranks = group.run(lambda rank, transport, run=run: Rank(run, rank, transport))
            group.run(lambda rank, _, ranks=ranks: ranks[rank].steps(range(9)))
            before = set(keys)
            with in_a_capture():
                group.run(lambda rank, _, ranks=ranks: ranks[rank].steps(range(9, 10)))
        assert keys <= before, f"{name}, {what}: {sorted({key.op for key in keys - before})}"
        print(f"{name}, {what}, W = {world_size}: {len(before)} kernels, and none is new in the capture")


def test_the_learning_rate_becomes_a_tensor_that_schedulers_fill():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = OneBitAdam([{"params": [p], "lr": 0.5}], freeze_step=1, wire=Wire(capturable=True))
    lr = optimizer.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor)
    assert lr == 0.5
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    p.grad = torch.ones(3)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.25


@pytest.mark.parametrize(
    ("options", "steps", "message"),
    [
        ({"freeze_step": 2}, 3, r"with Wire\(capturable=True\)"),
        ({"freeze_step": 2, "capturable": True, "nonfinite": "raise"}, 3, 'nonfinite="skip"'),
        ({"freeze_step": 9, "capturable": True}, 3, "not in 'warmup'"),
    ],
)
def test_what_cannot_be_captured_says_so(options, steps, message):
    p = torch.nn.Parameter(torch.ones(64))
    optimizer = OneBitAdam([p], 1e-2, **objects(**options))
    p.grad = torch.randn(64)
    for _ in range(steps):
        optimizer.step()
    before = p.detach().clone()
    with in_a_capture(), pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("kind", [AdamW, Lamb])
def test_a_step_of_ranks_that_average_cannot_be_captured(kind):
    def run(rank: int, transport: Transport) -> str:
        p = torch.nn.Parameter(torch.ones(64))
        p.grad = torch.ones(64)
        optimizer = kind([p], 1e-2, wire=Wire(capturable=True), process_group=transport)
        with in_a_capture(), pytest.raises(RuntimeError) as error:
            optimizer.step()
        return str(error.value)

    assert all("not in 'uncompressed'" in text for text in SimulatedGroup(2).run(run))


@pytest.mark.parametrize("kind", [AdamW, Lamb])
def test_the_step_of_one_rank_that_averages_nothing_is_captured(kind):
    params = [torch.nn.Parameter(torch.ones(64)) for _ in range(2)]
    captured, plain = (kind([p], 1e-2, wire=Wire(capturable=True)) for p in params)
    for step in range(4):
        for p in params:
            p.grad = torch.full((64,), 1.0 + step)
        plain.step()
        if step == 0:
            captured.step()
            continue
        with in_a_capture():
            captured.step()
    assert torch.equal(*params)
    assert captured.stats()["step"] == 4


def test_hyper_parameters_that_change_at_the_capture_say_so():
    p = torch.nn.Parameter(torch.ones(64))
    optimizer = OneBitAdam([p], 1e-2, **objects(freeze_step=1, capturable=True, **UNGUARDED))
    p.grad = torch.ones(64)
    for _ in range(3):
        optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with in_a_capture(), pytest.raises(RuntimeError, match="one uncaptured step"):
        optimizer.step()


def test_the_first_step_after_a_load_cannot_be_captured():
    """In it ranks compare their parameters."""
    p = torch.nn.Parameter(torch.ones(64))
    optimizer = OneBitAdam([p], 1e-2, **objects(freeze_step=1, capturable=True, **UNGUARDED))
    p.grad = torch.ones(64)
    for _ in range(3):
        optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with in_a_capture(), pytest.raises(RuntimeError, match="take an uncaptured step first"):
        optimizer.step()
    optimizer.step()
    with capturing() as tape:
        optimizer.step()
    tape.replay()
    assert optimizer.stats()["step"] == 5


def test_learning_rates_set_or_loaded_go_into_the_graphs_tensor():
    def make(**options) -> OneBitAdam:
        p = torch.nn.Parameter(torch.ones(64))
        p.grad = torch.ones(64)
        return OneBitAdam([p], 1e-2, **objects(freeze_step=1, **UNGUARDED, **options))

    optimizer, floating = make(capturable=True), make()
    lr = optimizer.param_groups[0]["lr"]
    optimizer.step()
    floating.param_groups[0]["lr"] = 0.5
    optimizer.load_state_dict(floating.state_dict())
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.5
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.25
    floating.load_state_dict(optimizer.state_dict())
    floating.step()
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr must be a finite number >= 0, got -1"):
        optimizer.step()
