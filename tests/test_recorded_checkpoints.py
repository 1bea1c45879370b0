"""Checkpoints that earlier versions wrote (``recorded_checkpoints``): runs go on from them bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import simulate
from recorded_checkpoints import AFTER, Make, cases, parameters, read, step

from fusedonebit.comm import Transport

RECORDED = {"5b66f63": read(Path(__file__).parent / "data" / "checkpoints_5b66f63.pt.xz")}
CASES = {name: (make, steps, dtype) for name, make, steps, dtype in cases()}
LION = [name for name in CASES if name.startswith("Lion")]


def go_on(rank: int, transport: Transport, make: Make, steps: int, dtype: torch.dtype, saved: list[Any]) -> list[bool]:
    params = parameters(dtype)
    optimizer = make(params, transport)
    with torch.no_grad():
        for p, value in zip(params, saved[rank]["params"], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(saved[rank]["optimizer"])
    for number in range(steps, steps + AFTER):
        step(optimizer, params, rank, number)
    return [torch.equal(p, end) for p, end in zip(params, saved[rank]["end"], strict=True)]


@pytest.mark.parametrize("version", RECORDED)
def test_every_kind_and_stage_is_recorded(version: str):
    assert RECORDED[version].keys() == CASES.keys()


@pytest.mark.parametrize("name", [name for name in CASES if name not in LION])
@pytest.mark.parametrize("version", RECORDED)
def test_runs_go_on_bit_for_bit_from_earlier_checkpoints(version: str, name: str):
    assert simulate(go_on, 2, *CASES[name], RECORDED[version][name]) == [[True] * 3] * 2


@pytest.mark.parametrize("name", LION)
def test_lions_checkpoints_without_exp_avg_say_the_way_out(name: str):
    with pytest.raises(ValueError, match="saved momenta as worker_error has written it; resume with that version"):
        simulate(go_on, 2, *CASES[name], RECORDED["5b66f63"][name])
