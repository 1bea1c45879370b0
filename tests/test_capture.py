"""``capturable=True``: a compressed step is ops on fixed memory, which can be replayed without the host."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from launch_keys import recording
from optimizers import MAKE, UNGUARDED, objects
from tape import capturing, in_a_capture
from whole_steps import BASES, LIVING, Rank

from fusedonebit import AdamW, Lamb, OneBitAdam
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.triton_kernels import tables

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


def made(steps: int = 0, kind: Any = OneBitAdam, **options: Any) -> tuple[torch.nn.Parameter, Any]:
    """A parameter whose gradient is ones, and an optimizer that has taken so many steps."""
    p = torch.nn.Parameter(torch.ones(64))
    p.grad = torch.ones(64)
    optimizer = kind([p], 1e-2, **objects(**options))
    for _ in range(steps):
        optimizer.step()
    return p, optimizer


CAPTURABLE: dict[str, Any] = {"freeze_step": 1, "capturable": True, **UNGUARDED}


@pytest.mark.parametrize(
    ("options", "steps", "message"),
    [
        ({"freeze_step": 2}, 3, r"with Wire\(capturable=True\)"),
        ({"freeze_step": 2, "capturable": True, "nonfinite": "raise"}, 3, 'nonfinite="skip"'),
        ({"freeze_step": 9, "capturable": True}, 3, "not in 'warmup'"),
    ],
)
def test_what_cannot_be_captured_says_so(options, steps, message):
    p, optimizer = made(steps, **options)
    before = p.detach().clone()
    with in_a_capture(), pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("kind", [AdamW, Lamb])
def test_a_step_of_ranks_that_average_cannot_be_captured(kind):
    def run(rank: int, transport: Transport) -> None:
        _, optimizer = made(0, kind, capturable=True, process_group=transport)
        with in_a_capture(), pytest.raises(RuntimeError, match="not in 'uncompressed'"):
            optimizer.step()

    SimulatedGroup(2).run(run)


@pytest.mark.parametrize("kind", [AdamW, Lamb])
def test_the_step_of_one_rank_that_averages_nothing_is_captured(kind):
    (p, captured), (q, plain) = (made(1, kind, capturable=True) for _ in range(2))
    for step in range(1, 4):
        p.grad, q.grad = torch.full((64,), 1.0 + step), torch.full((64,), 1.0 + step)
        plain.step()
        with in_a_capture():
            captured.step()
    assert torch.equal(p, q)
    assert captured.stats()["step"] == 4


def test_hyper_parameters_that_change_at_the_capture_say_so():
    _, optimizer = made(3, **CAPTURABLE)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with in_a_capture(), pytest.raises(RuntimeError, match="one uncaptured step"):
        optimizer.step()


def test_the_first_step_after_a_load_cannot_be_captured():
    """In it ranks compare their parameters."""
    _, optimizer = made(3, **CAPTURABLE)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with in_a_capture(), pytest.raises(RuntimeError, match="take an uncaptured step first"):
        optimizer.step()
    optimizer.step()
    with capturing() as tape:
        optimizer.step()
    tape.replay()
    assert optimizer.stats()["step"] == 5


def test_learning_rates_set_or_loaded_go_into_the_graphs_tensor():
    (_, optimizer), (_, floating) = made(**CAPTURABLE), made(**CAPTURABLE | {"capturable": False})
    group = optimizer.param_groups[0]
    lr = group["lr"]
    assert isinstance(lr, torch.Tensor)
    assert lr == torch.tensor(1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert group["lr"] is lr
    assert lr == torch.tensor(5e-3)
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


# ---------------------------------------------------------------- tables of addresses, and of layouts

# No CUDA graph is captured here: that a table is uploaded by the graph that reads it, or before, is seen by which
# memory each of them is given.

CPU = torch.device("cpu")


@pytest.fixture
def capture(monkeypatch):
    """Switches whether a graph is being captured."""
    now = [False]
    monkeypatch.setattr(tables, "capturing", lambda device: now[0])

    def switch(on: bool) -> None:
        now[0] = on

    return switch


def memory(tensors: list[torch.Tensor]) -> int:
    return tables.pointer_table(tensors, CPU).table.data_ptr()


def test_each_capture_uploads_a_table_unless_a_step_before_has(capture):
    tensors, others = ([torch.zeros(4), torch.zeros(5)] for _ in range(2))
    stepped = memory(others)
    capture(True)
    first, second = memory(tensors), memory(tensors)
    assert first != second
    assert memory(others) == memory(others) == stepped
    capture(False)
    later = memory(tensors)
    assert later not in (first, second)
    assert memory(tensors) == later


def test_a_captured_table_stays_when_many_others_are_made(capture):
    tensors = [torch.zeros(4), torch.zeros(5)]
    capture(True)
    addresses = [t.data_ptr() for t in tensors]
    table = tables.pointer_table(tensors, CPU).table
    where, kept = table.data_ptr(), table.clone()
    del table
    capture(False)
    others = [torch.zeros(1) for _ in range(600)]
    assert where not in [memory([t]) for t in others]
    assert kept[0].tolist() == addresses


# ---------------------------------------------------------------- static tables of layouts


@pytest.fixture
def tables_made(monkeypatch):
    """One entry for each table of a layout that is made."""
    entries: list[int] = []
    make = tables.BlockTables.__init__

    def making(self: Any, *arguments: Any) -> None:
        entries.append(0)
        make(self, *arguments)

    monkeypatch.setattr(tables.BlockTables, "__init__", making)
    return entries


@pytest.mark.long(but=1)
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("options", [{}, {"buckets": 20}], ids=["whole", "20 buckets"])
@pytest.mark.parametrize("name", MAKE)
def test_steps_make_no_table_of_a_layout(name, options, tables_made):
    if options and name not in ("OneBitAdam", "OneBitLamb"):
        pytest.skip("has no buckets")
    params = [torch.nn.Parameter(torch.randn(12_000)) for _ in range(24)]
    optimizer = MAKE[name](params, lr=1e-2, **options)
    at_construction = len(tables_made)
    for _ in range(8):
        for p in params:
            p.grad = torch.randn(p.shape)
        optimizer.step()
    assert len(tables_made) == at_construction >= options.get("buckets", 1)


def test_tables_are_freed_with_whoever_keeps_them():
    arguments = ((7, 9_001), 12, 1024, CPU)
    kept = tables.block_tables(*arguments)
    assert tables.block_tables(*arguments) is kept
    start = kept.start.data_ptr()
    assert tables.block_tables(*arguments).start.data_ptr() == start
    again = copy.deepcopy([kept, pickle.loads(pickle.dumps(kept))])
    assert again[0] is again[1] is kept
    gone = weakref.ref(kept)
    del kept, again
    gc.collect()
    assert gone() is None
