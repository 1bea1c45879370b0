"""What a newcomer does wrong is told before the third step, once, and no rank waits for ever: see ``mistakes*``."""

from __future__ import annotations

import logging
import math
import re

import pytest
import torch
from mistakes import ALONE, net, told_by, train
from mistakes_together import TOGETHER
from ranks import run_ranks, simulate
from torch.nn.parallel import DistributedDataParallel

from fusedonebit import OneBitAdam
from fusedonebit.comm import Transport
from fusedonebit.core.first_contact import clipped

NOVICES = 40


def test_there_are_as_many_mistakes_as_we_promise_to_answer():
    assert len(ALONE | TOGETHER) == len(ALONE) + len(TOGETHER) >= NOVICES


@pytest.mark.parametrize("name", ALONE)
def test_a_mistake_is_told_once(name: str):
    make, says = ALONE[name]
    told = told_by(make)
    print(f"{name}: {told}")
    assert len(told) == 1
    assert re.search(says, told[0], re.DOTALL)


@pytest.mark.long(but=2)
@pytest.mark.parametrize("name", TOGETHER)
def test_a_mistake_on_two_ranks_is_told_once_on_each(name: str):
    _, *says = TOGETHER[name]
    told_on = run_ranks(make_on_a_rank, 2, name, timeout=60, group_timeout=20)
    for rank, (told, pattern) in enumerate(zip(told_on, says, strict=True)):
        print(f"{name}, rank {rank}: {told}")
        assert len(told) == bool(pattern)
        assert re.search(pattern, "".join(told), re.DOTALL)


def make_on_a_rank(rank: int, world_size: int, name: str) -> list[str]:
    return told_by(TOGETHER[name][0], rank)


def introduced(rank: int, transport: Transport) -> None:
    OneBitAdam(net().parameters(), lr=1e-3, process_group=transport)


def test_whoever_listens_is_told_once_what_was_chosen(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture):
    simulate(introduced, 2)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    with caplog.at_level(logging.INFO, logger="fusedonebit"):
        simulate(introduced, 2)
    (record,) = caplog.records
    for part in (
        "OneBitAdam of 83 parameters: variance: shared, after 250 updates",
        "scale: relaxed, block",
        "backend",
    ):
        assert part in record.getMessage()


SQUARES = [(1.0, 0.25), (1.0, 0.5)]


@pytest.mark.parametrize(
    ("seen", "is_clipped"),
    [
        (SQUARES, True),
        (SQUARES[:1], False),
        ([(1.0, 0.25), (1.001, 0.5)], False),
        ([(0.7713526, 0.25), (0.7713526, 0.5)], False),  # no threshold that anybody chooses
        ([(1.0, 0.25), (1.0, 0.25)], False),  # the same gradients twice
        ([(0.0, 0.25), (0.0, 0.5)], False),
        ([(math.nan, 0.25), (math.nan, 0.5)], False),
        ([(math.inf, 0.25), (math.inf, 0.5)], False),
    ],
)
def test_only_gradients_of_one_round_norm_are_taken_for_clipped(seen: list[tuple[float, float]], is_clipped: bool):
    assert clipped(seen) == is_clipped


def one_optimizer_beside_another(rank: int, world_size: int, how: str) -> list[str]:
    """What is told where another optimizer trains nothing that nobody averages."""

    def run() -> None:
        model, other = net(), net(seed=1)
        rest = torch.optim.AdamW((other if how == "another model" else model)[2].parameters())
        ours = OneBitAdam((model if how == "another model" else model[0]).parameters())
        if how == "frozen":
            model[2].requires_grad_(False)
        wrapped = DistributedDataParallel(model) if how == "averaged by DDP" else model
        train(wrapped, ours, seed=rank, between=rest.step)

    return told_by(run)


@pytest.mark.parametrize("how", ["another model", "frozen", "averaged by DDP"])
def test_an_optimizer_apart_from_ours_is_not_warned_of(how: str):
    for told in run_ranks(one_optimizer_beside_another, 2, how, group_timeout=20):
        assert not [text for text in told if "ranks will part" in text]
