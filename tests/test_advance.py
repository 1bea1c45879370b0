"""The op that ends a step: counts, and the table of coefficients for the coming one, made only where it has changed."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from advance_arguments import advance_arguments
from backends import assert_equal_backends, problem
from optimizers import MAKE, construct, objects

from fusedonebit import Lamb, OneBitAdam, OneBitLion
from fusedonebit.core.exchange import Exchange
from fusedonebit.core.stage import Stage
from fusedonebit.triton_kernels import Coef, Group, advance, apply_momentum, finish
from fusedonebit.triton_kernels.nouns import NOT_COUNTED, Count
from fusedonebit.triton_kernels.op import launches

RENEWED = [Coef.LR, Coef.STEP_SIZE, Coef.DECAY, Coef.UNBIAS1]
WAYS = [
    {},
    {"entered": False},
    {"renews": True},
    {"flags": 0},
    {"flags": 0, "entered": False, "absent": True},
    {"flags": 0, "renews": True, "absent": True, "tables": True},
    {"flags": 8, "renews": True, "captured": True},
    {"flags": 3, "absent": True, "captured": True, "tables": True},
    {"flags": 0, "moved": True, "begins": True},
    {"flags": 8, "moved": True, "tables": True},
    {"flags": 0, "entered": False, "moved": True, "rho": True},
]


def run(tensors: int, **way: object) -> tuple[dict, dict]:
    """The op's arguments before and after."""
    arguments = advance_arguments(tensors, **way)
    before = by_name(copy.deepcopy(arguments))
    advance(*arguments)
    return before, by_name(arguments)


def by_name(arguments: Any) -> dict[str, Any]:
    return arguments._asdict() | arguments.coefficients._asdict() | arguments.count._asdict()


@pytest.mark.parametrize("tensors", [0, 1, 64, 130])
def test_all_backends_have_the_same_bits(tensors):
    for way in WAYS:
        assert_equal_backends("advance", lambda way=way: advance_arguments(tensors, **way))


def test_bias_corrections_are_powers_of_beta_to_within_a_rounding():
    before, after = run(200, entered=True)
    for t in range(200):
        row = before["groups"][before["group_of"][t]]
        k = after["table"][t].double()
        lr, beta1, beta2 = (float(row[column]) for column in (Coef.LR, Group.CORRECTION1, Group.CORRECTION2))
        updates, made = int(before["steps"][t]) + 1, float(before["entered"][t])
        bias1 = float(1 - Fraction(beta1) ** updates) if updates < 2000 else 1 - beta1**updates
        bias2 = 1.0 if math.isinf(made) else 1 - beta2 ** max(made, 1.0)
        expected = {Coef.STEP_SIZE: lr / bias1, Coef.UNBIAS1: 1 / bias1, Coef.RSQRT_BIAS2: bias2**-0.5}
        expected[Coef.DECAY] = 1 - lr * float(row[Coef.WEIGHT_DECAY])
        for column, value in expected.items():
            assert k[column] == pytest.approx(value, rel=1.2e-7)
        for column in set(Coef) - set(expected):
            assert k[column] == row[column].float()


def test_a_step_counts_where_it_was_taken_and_somebody_had_a_gradient():
    before, after = run(70, flags=0, absent=True, renews=True)
    counted = (before["absent"] == 0).double()
    assert 0 < counted.sum() < 70
    assert after["updates"] == before["updates"] + 1
    assert torch.equal(after["steps"], before["steps"] + counted)
    assert torch.equal(after["entered"], before["entered"] + counted)
    again, kept = run(70, flags=0, absent=True, renews=False)
    assert torch.equal(kept["entered"], again["entered"])
    assert torch.equal(kept["steps"], after["steps"])


def test_a_skipped_step_counts_as_one_in_messages_and_as_a_replay_alone():
    before, after = run(70, flags=8, captured=True, renews=True)
    for name in ("updates", "steps", "entered"):
        assert torch.equal(before[name], after[name])
    assert after["number"] == -(2**31)  # modulo 2^32
    assert (after["replays"] - before["replays"]).tolist() == [1, 1, 1, 0]
    before, after = run(70, flags=2, captured=True)
    assert (after["replays"] - before["replays"]).tolist() == [1, 1, 0, 1]


def test_tensors_without_a_variance_wait_and_others_have_a_floor_where_there_is_one():
    before, after = run(200, tables=True)
    mean, row = before["mean_sq"], before["groups"][before["group_of"].long()]
    k = after["table"].double()
    still = mean <= 0
    assert 0 < still.sum() < 200
    assert (k[still][:, Coef.STEP_SIZE] == 0).all()
    assert (k[still][:, Coef.ONE_MINUS_BETA1] == 0).all()
    assert (k[~still][:, Coef.STEP_SIZE] > 0).all()
    floored = row[:, Coef.EPS] ** 2 + row[:, Group.FLOOR] * mean * k[:, Coef.RSQRT_BIAS2] ** 2
    expected = torch.where(row[:, Group.FLOOR] > 0, floored, row[:, Coef.EPS])
    torch.testing.assert_close(k[:, Coef.EPS], expected, rtol=3e-7, atol=0)
    assert torch.equal(after["table"][:, Coef.UNIT], before["unit"])


MANY = (300, *[3] * 70)  # tensors of two programs


@pytest.mark.kernels
@pytest.mark.parametrize("way", [{}, {"tables": True}, {"captured": True, "flags": 0}], ids=str)
def test_finish_renews_what_a_count_or_a_rate_changes_as_it_would_be_made(way):
    made = advance_arguments(len(MANY), **way)

    def make() -> Any:
        p = problem(MANY, 2, 128)
        p.partials.zero_()
        return p.finish_arguments("layer", "l2")._replace(coefficients=advance_arguments(len(MANY), **way).coefficients)

    assert_equal_backends("finish", make)
    arguments = make()
    finish(*arguments)
    advance(made.coefficients, NOT_COUNTED, None, made.entered, False, made.unit, False)
    table = arguments.coefficients.table
    assert torch.equal(table[:, RENEWED], made.coefficients.table[:, RENEWED])
    others = [column for column in Coef if column not in RENEWED]
    assert table[:, others].isnan().all()


@pytest.mark.kernels
@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("length", [2, 3, 16])
def test_finish_renews_the_last_step_of_a_round_as_the_mean_of_all_its_steps(length, tables):
    """Steps before it are added up where they end, whether or not they are skipped."""
    begun = advance_arguments(len(MANY), flags=0, tables=tables, moved=True)
    moved, expected = torch.full((2, len(MANY)), math.nan), torch.tensor([[0.0], [1.0]]).expand(2, len(MANY)).clone()
    of, table = begun.coefficients._replace(moved=moved), begun.coefficients.table
    for i in range(length - 1):
        flags = torch.tensor([i % 2], dtype=torch.int32)
        expected[0] += table[:, Coef.STEP_SIZE]
        expected[1] *= table[:, Coef.DECAY]
        advance(of, Count(None, torch.tensor(0), None, None), flags, begun.entered, False, None, i == 0)
        assert torch.equal(moved, expected)

    def make() -> tuple:
        p = problem(MANY, 2, 128)
        p.partials.zero_()
        renewal = of._replace(table=torch.full_like(table, math.nan), moved=moved.clone(), length=length)
        return p.finish_arguments("layer", "l2")._replace(coefficients=renewal)

    assert_equal_backends("finish", make)
    arguments = make()
    coef, summed = arguments.coefficients.table, arguments.coefficients.moved
    finish(*arguments)
    expected[0] += table[:, Coef.STEP_SIZE]  # as the last step before it has made it for this one
    expected[1] *= table[:, Coef.DECAY]
    assert torch.equal(summed, expected)
    assert torch.equal(coef[:, Coef.STEP_SIZE], expected[0] / length)
    assert torch.equal(coef[:, Coef.DECAY], expected[1])
    assert torch.equal(coef[:, Coef.LR], table[:, Coef.LR])


@pytest.mark.kernels
@pytest.mark.parametrize("way", [{}, {"absent": True}, {"absent": True, "captured": True}], ids=str)
@pytest.mark.parametrize("flags", [0, 8, 3])
def test_the_apply_counts_as_the_op_that_ends_a_step_does(flags, way):
    def make() -> tuple:
        made = advance_arguments(len(MANY), flags=flags, **way)
        p = problem(MANY, 2, 128)
        return p.apply_arguments(skip=flags)._replace(count=made.count, steps=made.coefficients.steps)

    assert_equal_backends("apply_momentum", make)
    arguments = make()
    count, steps = arguments.count, arguments.steps
    apply_momentum(*arguments)
    _, after = run(len(MANY), flags=flags, **way)
    for ours, name in zip((*count[1:4], steps), ("updates", "number", "replays", "steps"), strict=True):
        assert (ours is None and after[name] is None) or torch.equal(ours, after[name])


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
def test_a_step_launches_it_once_if_at_all_and_once_more_where_something_has_changed(name, usual):
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
def test_with_stochastic_rounding_which_reads_the_count_the_step_ends_with_a_launch_that_counts():
    p = torch.nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    optimizer = OneBitAdam([p], 1e-2, **objects(freeze_step=2, stochastic_rounding=True))
    for _ in range(4):
        p.grad = torch.ones_like(p)
        optimizer.step()
    before = int(optimizer.frame.steps.updates)
    assert launched_in_a_step(p, optimizer) == 1
    assert int(optimizer.frame.steps.updates) == before + 1


@pytest.mark.parametrize("name", MAKE)
def test_the_table_of_a_step_is_what_it_would_be_if_it_were_made_at_its_beginning(name):
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


def test_lions_share_of_the_gradient_is_negative_where_it_maximises():
    p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = OneBitLion([{"params": [p]}, {"params": [q], "maximize": True}], betas=(0.9, 0.75))
    assert optimizer.algorithm.stage.table()[:, Coef.ONE_MINUS_BETA2].tolist() == [0.25, -0.25]
    adam = OneBitAdam([{"params": [q], "maximize": True}], betas=(0.5, 0.75), **objects())
    assert adam.algorithm.stage.table()[:, Coef.ONE_MINUS_BETA2].tolist() == [0.25]
