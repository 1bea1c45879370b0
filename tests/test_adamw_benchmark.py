"""``python -m benchmarks adamw``: peers are optional, and what is said of one that does not run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks import adamw
from benchmarks.adamw import OURS, PEERS, WITH_MASTERS, held, moved
from benchmarks.optimizers import FUSED
from benchmarks.registry import Report

STATE = {"torchao AdamW8bit": 2.03, "bitsandbytes AdamW8bit": 2.03, "FlashOptim FlashAdamW": 3.12}
"""Bytes of bfloat16 parameters' state, as the peers' code has it."""


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no kernel for this device")


def rows_of(monkeypatch: pytest.MonkeyPatch, torchao: object, bitsandbytes: object) -> list[dict[str, dict]]:
    """The rows of each table, by optimizer, where peers' modules are these; None: there is none."""
    monkeypatch.setitem(sys.modules, "torchao.optim", torchao)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", bitsandbytes)
    report = Report(torch.device("cpu"), numel=5000, rounds=1)
    adamw.adamw(report)
    return [{row["optimizer"]: row for row in table.rows} for table in report.tables]


def test_missing_or_failing_peers_are_named_and_ours_are_timed(monkeypatch):
    tables = rows_of(monkeypatch, None, SimpleNamespace(AdamW8bit=Failing))
    assert len(tables) == 4
    for i, rows in enumerate(tables):
        assert {FUSED, *OURS, *PEERS} | (set(WITH_MASTERS) if i >= 2 else set()) <= rows.keys()
        assert rows["torchao AdamW8bit"]["limit"] == "not installed"
        assert rows["bitsandbytes AdamW8bit"]["limit"] == "fails: RuntimeError"
        assert rows["FlashOptim FlashAdamW"]["limit"] == "cuda alone"
        assert all(rows[name]["x AdamW(fused)"] is None for name in PEERS)
        assert all(rows[name]["x AdamW(fused)"] > 0 for name in (FUSED, *OURS))
    for name, expected in STATE.items():
        assert tables[2][name]["state B"] == pytest.approx(expected, abs=0.01)
        assert tables[2][name]["held B"] == pytest.approx(expected + 4, abs=0.01)


def test_a_peer_that_runs_takes_turns_with_torchs(monkeypatch):
    def make(params: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=lr)

    (rows, *_) = rows_of(monkeypatch, SimpleNamespace(AdamW8bit=make), None)
    found = rows["torchao AdamW8bit"]
    assert found["x AdamW(fused)"] > 0
    assert found["state B"] == pytest.approx(8, abs=0.01)


def test_bytes_of_a_step_with_corrections_are_those_of_the_audit():
    found = {name: moved(name, torch.bfloat16) for name in ("AdamW, 8bit", *WITH_MASTERS, *PEERS)}
    print(found)
    assert found["AdamW, 8bit, 8-bit corrections"] <= 12.2
    assert found["FlashOptim FlashAdamW"] == 12.25
    assert found["AdamW, 8bit"] <= found["torchao AdamW8bit"] + 0.1


def test_state_of_a_tensor_subclass_is_counted_by_its_tensors():
    class Pair(torch.Tensor):
        @staticmethod
        def __new__(cls, one: Tensor, other: Tensor) -> Pair:
            made = torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=torch.float32)
            made.one, made.other = one, other
            return made

        def __tensor_flatten__(self):
            return ["one", "other"], None

        __torch_dispatch__ = None

    params = [torch.nn.Parameter(torch.zeros(64))]
    optimizer = torch.optim.SGD(params)
    shared = torch.zeros(64, dtype=torch.uint8)
    optimizer.state[params[0]] = {"m": Pair(shared, torch.zeros(64)), "v": Pair(shared, torch.zeros(64)), "step": 1}
    assert held(optimizer, 64) == 1 + 4 + 4
