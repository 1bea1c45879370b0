"""The search for learning rates: the same for all, and its best is never at its edge."""

from __future__ import annotations

import math

import pytest

from benchmarks.lab import tuning


def searched(start: float, loss) -> tuple[float | None, dict[float, float]]:
    found: dict[float, float] = {}
    while rates := tuning.wanted(start, found):
        assert not set(rates) & set(found)
        found |= {lr: loss(lr) for lr in rates}
    return tuning.best(start, found), found


def valley(at: float, wall: float = math.inf):
    return lambda lr: math.inf if lr > wall else math.log(lr / at) ** 2


@pytest.mark.parametrize("at", [1e-5, 1e-4, 1e-3, 2e-3, 1e-2, 0.1])
def test_the_best_rate_is_found_anywhere_between_tried_ones(at):
    best, found = searched(1e-3, valley(at))
    print(f"best of {at:g} from 0.001: {best:g} in {len(found)} rates")
    assert abs(math.log(best / at)) <= math.log(1.8) / 1.6
    assert min(found) < best < max(found)
    assert len(found) <= len(tuning.GRID) + tuning.FURTHEST + len(tuning.REFINED)


def test_next_to_where_it_diverges_the_best_is_found_too():
    best, found = searched(1.0, valley(2.0, wall=1.5))
    assert 0.3 < best <= 1.5
    assert found[max(found)] == math.inf


def test_where_all_of_the_grid_diverges_smaller_rates_are_tried():
    best, _ = searched(1.0, valley(1e-3, wall=0.05))
    assert best is not None
    assert best < 0.05
    best, found = searched(1.0, lambda lr: math.inf)
    assert best == min(found)
    assert len(found) == len(tuning.GRID) + tuning.FURTHEST + len(tuning.REFINED)


def test_the_search_is_the_same_for_all_and_can_be_resumed():
    _, found = searched(1e-3, valley(2e-3))
    part = dict(list(found.items())[:3])
    assert tuning.wanted(1e-3, part) == list(found)[3:4]
    assert tuning.best(1e-3, part) is None
