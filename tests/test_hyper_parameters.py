"""Hyper-parameters of groups: every change is taken, in whatever form, and a bad one leaves the last good ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedonebit.core.hyper_parameters import HyperParameters
from fusedonebit.core.options import check_group

NAMES = ("lr", "betas", "maximize")


def taken_of(*values: dict[str, Any]) -> list[dict[str, Any]]:
    """Take a group that each of the ``values`` changes, twice each."""
    group: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "maximize": False}
    hyper, found = HyperParameters(NAMES, torch.device("cpu"), False), []
    for change in values:
        group |= change
        for _ in range(2):
            hyper.take([group], check_group)
        found.append({key: float(value) if key == "lr" else value for key, value in hyper.taken[0].items()})
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.2},
        {"lr": 1},
        {"lr": torch.tensor(0.5)},
        {"betas": (0.8, 0.99)},
        {"betas": [0.8, 0.99]},
        {"betas": (0.5, torch.tensor(0.25))},
        {"maximize": True},
    ],
    ids=str,
)
def test_a_change_is_taken_and_taken_back(change):
    before, changed, after = taken_of({}, change, {"lr": 0.1, "betas": (0.9, 0.99), "maximize": False})
    assert changed != before == after
    plain = {key: float(value) if key == "lr" else value for key, value in change.items()}
    plain |= {"betas": tuple(map(float, plain["betas"]))} if "betas" in plain else {}
    assert {key: tuple(v) if key == "betas" else v for key, v in changed.items()} == before | plain


@pytest.mark.parametrize("betas", [[0.9, 0.99], (0.9, torch.tensor(0.99))], ids=["a list", "a tuple with a tensor"])
def test_what_is_filled_in_place_is_seen(betas):
    group = {"lr": 0.1, "betas": betas, "maximize": False}
    hyper = HyperParameters(NAMES, torch.device("cpu"), False)
    hyper.take([group], check_group)
    if isinstance(betas, list):
        betas[1] = 0.5
    else:
        betas[1].fill_(0.5)
    hyper.take([group], check_group)
    assert tuple(hyper.taken[0]["betas"]) == (0.9, 0.5)


def test_a_bad_change_raises_each_time_and_keeps_the_last_good():
    group = {"lr": 0.1, "betas": (0.9, 0.99), "maximize": False}
    hyper = HyperParameters(NAMES, torch.device("cpu"), False)
    hyper.take([group], check_group)
    group["betas"] = (0.9, 1.5)
    for _ in range(2):
        with pytest.raises(ValueError, match="betas must be two numbers"):
            hyper.take([group], check_group)
        assert hyper.taken[0]["betas"] == (0.9, 0.99)
    group["betas"] = (0.9, 0.99)
    hyper.take([group], check_group)
    assert hyper.taken[0]["betas"] == (0.9, 0.99)
