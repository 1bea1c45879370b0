"""A launcher such as torchrun has started several ranks, but nobody has called ``init_process_group()``."""

from __future__ import annotations

import pytest
import torch
from optimizers import objects
from torch.nn import Parameter

from fusedonebit import Lamb, MarsitSGD, OneBitAdam, OneBitLion
from fusedonebit.comm import LocalTransport, SimulatedGroup

MAKE = {
    "onebit-adam": lambda **more: OneBitAdam([Parameter(torch.ones(3))], **objects(freeze_step=2, **more)),
    "lamb": lambda **more: Lamb([Parameter(torch.ones(3))], **objects(**more)),
    "marsit": lambda **more: MarsitSGD([Parameter(torch.ones(3))], **objects(**more)),
    "lion": lambda **more: OneBitLion([Parameter(torch.ones(3))], **objects(**more)),
}


@pytest.fixture
def of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.mark.usefixtures("of_torchrun")
@pytest.mark.parametrize("name", MAKE)
def test_ranks_that_would_train_alone_are_told_what_to_write(name):
    with pytest.raises(RuntimeError, match="this is rank 1 of 4") as caught:
        MAKE[name]()
    assert "torch.distributed.init_process_group()" in str(caught.value)
    assert "process_group=fusedonebit.comm.LocalTransport()" in str(caught.value)


@pytest.mark.usefixtures("of_torchrun")
@pytest.mark.parametrize("name", MAKE)
def test_who_says_over_which_ranks_to_average_is_believed(name):
    assert MAKE[name](process_group=LocalTransport()).stats()["world_size"] == 1
    assert SimulatedGroup(1).run(lambda _, transport: MAKE[name](process_group=transport).stats()["world_size"]) == [1]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4"},
        {"RANK": "0"},
        {"RANK": "first", "WORLD_SIZE": "many"},
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMI_RANK": "1", "PMI_SIZE": "4"},
    ],
)
def test_one_process_needs_no_group(monkeypatch, environment):
    for key in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert MAKE["onebit-adam"]().stats()["world_size"] == 1
