"""Hyper-parameters of groups, and the table of coefficients made of them: only where it has changed, as if anew."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optimizers import MAKE, construct, objects

from fusedonebit import Lamb, OneBitAdam, OneBitLion
from fusedonebit.core.exchange import Exchange
from fusedonebit.core.hyper_parameters import HyperParameters
from fusedonebit.core.options import check_group
from fusedonebit.core.stage import Stage
from fusedonebit.triton_kernels import Coef
from fusedonebit.triton_kernels.op import launches

RENEWED = [Coef.LR, Coef.STEP_SIZE, Coef.DECAY, Coef.UNBIAS1]

# ---------------------------------------------------------------- the optimizer's table


def trained(name: str = "onebit-adam", steps: int = 4, **options: object) -> tuple:
    p = torch.nn.Parameter(torch.linspace(-1, 1, 40))
    optimizer = construct(name, [p], 1e-2, freeze_step=2, guard="off", **options)
    for i in range(steps):
        p.grad = torch.full_like(p, 1.0 + i)
        optimizer.step()
    return p, optimizer


def launched_in_a_step(p: torch.Tensor, optimizer: torch.optim.Optimizer) -> int:
    p.grad = p.detach().clone()
    launches.clear()
    optimizer.step()
    return launches["advance"]


@pytest.mark.needs_compiler
@pytest.mark.parametrize(("name", "usual"), [("onebit-adam", 0), ("onebit-lamb", 0), ("lamb", 1)])
def test_a_step_launches_it_once_more_where_something_changed(name, usual):
    p, optimizer = trained(name)
    group = optimizer.param_groups[0]
    assert launched_in_a_step(p, optimizer) == usual
    for more, change in (
        (usual, lambda: group.update(lr=2e-2)),  # 0: a compressed step renews what it changes on the way
        (1, lambda: group.update(betas=(0.8, group["betas"][1]))),
        (1, lambda: optimizer.frame.steps.of_each.add_(1)),
        (1, lambda: optimizer.state[p]["step"].add_(1)),
        (1, lambda: optimizer.load_state_dict(optimizer.state_dict())),
    ):
        change()
        assert launched_in_a_step(p, optimizer) >= usual + more
        assert launched_in_a_step(p, optimizer) == usual


@pytest.mark.needs_compiler
def test_a_rate_on_the_device_is_read_in_each_step():
    p, optimizer = trained(capturable=True)
    for rate in (1e-2, 0.0, 3e-2):
        optimizer.param_groups[0]["lr"].fill_(rate)
        before = p.detach().clone()
        assert launched_in_a_step(p, optimizer) == 0
        assert torch.equal(p, before) == (rate == 0.0)


@pytest.mark.needs_compiler
def test_with_stochastic_rounding_a_step_ends_by_counting_it():
    p = torch.nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    optimizer = OneBitAdam([p], 1e-2, **objects(freeze_step=2, stochastic_rounding=True))
    for _ in range(4):
        p.grad = torch.ones_like(p)
        optimizer.step()
    before = int(optimizer.frame.steps.updates)
    assert launched_in_a_step(p, optimizer) == 1
    assert int(optimizer.frame.steps.updates) == before + 1


@pytest.mark.parametrize("name", MAKE)
def test_a_steps_table_is_as_if_it_were_made_at_its_beginning(name):
    """Where the step renews it, when it has been exchanged; until then all columns but those that are renewed.

    In the last step of a longer round it is then that of the round: the mean step size, and the product of decays.
    """
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (40, 7)]
    optimizer = MAKE[name]([{"params": params[:1]}, {"params": params[1:], "lr": 1e-3}], 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    compared, renewed, of_round = [], [], []
    algorithm, received = optimizer.algorithm, Exchange.take_verdict
    stages = {part for part in algorithm.all_parts if isinstance(part, Stage)}
    tables = {type(stage): type(stage).table for stage in stages}

    def compare(kept, made, but=()):
        columns = [column for column in Coef if column not in but]
        compared.append((kept[:, columns].clone(), made[:, columns]))

    def begun(self):
        kept = tables[type(self)](self)
        coefficients = self.frame.coefficients
        made = coefficients.fresh(self.frame.hyper.taken, coefficients._made)
        compare(kept, made, RENEWED if coefficients.renews else ())
        if not getattr(getattr(self, "round", None), "local", 0):
            of_round.clear()
        of_round.append(made)
        return kept

    def exchanged(self, coef):
        result = received(self, coef)
        coefficients = self.frame.coefficients
        if coefficients.renews:
            made = coefficients.fresh(self.frame.hyper.taken, coefficients._made)
            if len(of_round) > 1:
                made[:, Coef.STEP_SIZE] = sum(each[:, Coef.STEP_SIZE] for each in of_round) / len(of_round)
                made[:, Coef.DECAY] = math.prod(each[:, Coef.DECAY] for each in of_round)
            compare(coef, made)
            renewed.append(len(of_round))
        return result

    with pytest.MonkeyPatch.context() as patch:
        for kind in tables:
            patch.setattr(kind, "table", begun)
        patch.setattr(Exchange, "take_verdict", exchanged)
        for i in range(9):
            for p in params[: 1 + (i % 4 > 0)]:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert len(compared) >= 9
    assert bool(renewed) == (name in ("OneBitAdam", "OneBitLamb", "OneBitLion", "ZeroOneAdam"))
    assert (max(renewed, default=1) > 1) == (name == "ZeroOneAdam")
    for kept, made in compared:
        assert torch.equal(kept, made)


def test_columns_that_the_step_has_written_are_gone_in_the_next():
    p = torch.nn.Parameter(torch.full((4,), 3.0))
    optimizer = Lamb([p], 0.5)
    p.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.stats(layers=True)["layers"]["coefficient"] != [1.0]
    assert optimizer.algorithm.stage.table()[0, Coef.STEP_SIZE] == 0.5


def test_lions_share_of_the_gradient_is_negative_if_it_maximises():
    p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = OneBitLion([{"params": [p]}, {"params": [q], "maximize": True}], betas=(0.9, 0.75))
    assert optimizer.algorithm.stage.table()[:, Coef.ONE_MINUS_BETA2].tolist() == [0.25, -0.25]
    adam = OneBitAdam([{"params": [q], "maximize": True}], betas=(0.5, 0.75), **objects())
    assert adam.algorithm.stage.table()[:, Coef.ONE_MINUS_BETA2].tolist() == [0.25]


NAMES = ("lr", "betas", "maximize")


def taken_of(*values: dict[str, Any]) -> list[dict[str, Any]]:
    """Take a group that each of the ``values`` changes, twice each."""
    group: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "maximize": False}
    hyper, found = HyperParameters(NAMES, torch.device("cpu"), False), []
    for change in values:
        group |= change
        for _ in range(2):
            hyper.take([group], check_group, None)
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
    hyper.take([group], check_group, None)
    if isinstance(betas, list):
        betas[1] = 0.5
    else:
        betas[1].fill_(0.5)
    hyper.take([group], check_group, None)
    assert tuple(hyper.taken[0]["betas"]) == (0.9, 0.5)


def test_a_bad_change_raises_each_time_and_keeps_the_last_good():
    group = {"lr": 0.1, "betas": (0.9, 0.99), "maximize": False}
    hyper = HyperParameters(NAMES, torch.device("cpu"), False)
    hyper.take([group], check_group, None)
    group["betas"] = (0.9, 1.5)
    for _ in range(2):
        with pytest.raises(ValueError, match="betas must be two numbers"):
            hyper.take([group], check_group, None)
        assert hyper.taken[0]["betas"] == (0.9, 0.99)
    group["betas"] = (0.9, 0.99)
    hyper.take([group], check_group, None)
    assert hyper.taken[0]["betas"] == (0.9, 0.99)
