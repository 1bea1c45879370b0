"""What a newcomer does wrong is told before the third step, once, and no rank waits for ever: see ``mistakes``."""

from __future__ import annotations

import re

import pytest
from mistakes import ALONE, TOGETHER, told_by
from ranks import run_ranks

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


@pytest.mark.parametrize("name", TOGETHER)
def test_a_mistake_on_two_ranks_is_told_once_on_each_and_none_waits_for_ever(name: str):
    _, *says = TOGETHER[name]
    told_on = run_ranks(make_on_a_rank, 2, name, timeout=60, group_timeout=20)
    for rank, (told, pattern) in enumerate(zip(told_on, says, strict=True)):
        print(f"{name}, rank {rank}: {told}")
        assert len(told) == bool(pattern)
        assert re.search(pattern, "".join(told), re.DOTALL)


def make_on_a_rank(rank: int, world_size: int, name: str) -> list[str]:
    return told_by(TOGETHER[name][0], rank)
