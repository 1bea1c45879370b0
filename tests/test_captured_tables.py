"""Tables of addresses under capture: what a graph reads is there at its replay, whichever graph is replayed first.

No CUDA graph is captured here: that a table is uploaded by the graph that reads it, or before, is seen by which memory
each of them is given.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from optimizers import MAKE

from fusedonebit.triton_kernels import tables

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


def test_two_captures_before_a_replay_upload_a_table_each(capture):
    tensors = [torch.zeros(4), torch.zeros(5)]
    capture(True)
    first, second = memory(tensors), memory(tensors)
    assert first != second


def test_uncaptured_steps_read_no_table_that_a_replay_uploads(capture):
    tensors = [torch.zeros(4), torch.zeros(5)]
    capture(True)
    captured = memory(tensors)
    capture(False)
    stepped = memory(tensors)
    assert stepped != captured
    assert memory(tensors) == stepped


def test_a_capture_reads_what_a_step_before_it_has_uploaded(capture):
    tensors = [torch.zeros(4), torch.zeros(5)]
    stepped = memory(tensors)
    capture(True)
    assert memory(tensors) == memory(tensors) == stepped


def test_a_captured_table_stays_when_many_others_are_made(capture):
    tensors = [torch.zeros(4), torch.zeros(5)]
    capture(True)
    addresses = [t.data_ptr() for t in tensors]
    table = tables.pointer_table(tensors, CPU).table
    where, kept = table.data_ptr(), table.clone()
    del table
    capture(False)
    others = [torch.zeros(1) for _ in range(600)]
    after = [memory([t]) for t in others]
    assert where not in after
    assert kept[0].tolist() == addresses


# ---------------------------------------------------------------- static tables of layouts


@pytest.fixture
def made(monkeypatch):
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
def test_steps_make_no_table_of_a_layout(name, options, made):
    if options and name not in ("OneBitAdam", "OneBitLamb"):
        pytest.skip("has no buckets")
    params = [torch.nn.Parameter(torch.randn(12_000)) for _ in range(24)]
    optimizer = MAKE[name](params, lr=1e-2, **options)
    at_construction = len(made)
    for _ in range(8):
        for p in params:
            p.grad = torch.randn(p.shape)
        optimizer.step()
    assert len(made) == at_construction >= options.get("buckets", 1)


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
