"""Whole runs in the network lab: how long they must be for equal losses, what they take, and where they pay."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.netlab import curves, equal, goals, methods, model, muon, sweep, whole
from benchmarks.netlab.equal import Run
from benchmarks.netlab.parts import Parts
from benchmarks.netlab.task import QUICK
from fusedonebit import OneBitAdam, Wire
from fusedonebit.comm import SimulatedGroup

METHODS = (*whole.RIVALS, *whole.OURS, whole.ANY)
STEP = {"adamw": 4.0, "bf16": 2.0, "int8": 1.4, "powersgd": 0.45, "onebit-adam": 0.4, "onebit-adam-overlap": 0.3}
STEP |= {"compress-4": 1.0}
STEP |= {"zero-one-adam": 0.4, "telling": 0.5, "warm-up": 4.0, "renewal": 1.5, "renewal-overlap": 1.6}


def a_row(megabits, share=None, **faster):
    methods = {name: {"whole": seconds * faster.get(name.replace("-", "_"), 1.0)} for name, seconds in STEP.items()}
    return {"megabits": megabits, "share": share, "methods": methods}


def a_record(*rows, **losses):
    """Runs of 400 steps that end at 2.0, or with the ``losses`` by length of a method."""
    runs = {name: losses.get(name.replace("-", "_"), {1.0: 2.0}) for name in equal.TRAINED}
    told = {name: {"lengths": [{"length": x, "loss": loss} for x, loss in by.items()]} for name, by in runs.items()}
    return {"rates": list(rows), "loopback": a_row(None), "runs": {"steps": 400, "warmup": 0.05, "methods": told}}


# ---------------------------------------------------------------- equal losses


def test_the_length_for_a_loss_lies_between_runs_that_were_made():
    losses = {1.0: 2.1, 1.1: 2.0, 1.25: 1.9}
    assert equal.needed(losses, 2.0) == pytest.approx(1.1)
    assert equal.needed(losses, 2.05) == pytest.approx(math.sqrt(1.1))
    assert equal.needed(losses, 2.2) == 1.0  # nothing shorter was run
    assert equal.needed(losses, 1.8) is None
    assert equal.needed({1.0: math.inf, 1.1: 1.9}, 2.0) == 1.1


def test_runs_lengthen_to_the_loss_and_shorten_only_where_asked():
    assert equal.next_length({}, 2.0) == 1.0
    assert equal.next_length({1.0: 2.1}, 2.0) == 1.1
    assert equal.next_length({1.0: 2.1, 1.1: 2.0}, 2.0) is None
    assert equal.next_length({1.0: 2.1, 1.5: 2.05}, 2.0) is None  # none is longer
    assert equal.next_length({1.0: 1.9}, 2.0) is None
    assert equal.next_length({1.0: 1.9}, 2.0, shorter=True) == 0.75
    assert equal.next_length({1.0: 1.9, 0.75: 2.1}, 2.0, shorter=True) is None


def test_the_search_tunes_on_one_grid_and_lengthens_slow_methods():
    asked = []

    def train(runs):
        asked.extend(runs)
        worse = {"bf16": 0.0, "int8": 0.0, "compress-4": 0.0, "powersgd": 0.4, "onebit-adam": 0.05}
        worse |= {"zero-one-adam": -0.02}
        return [
            {"loss": None if r.lr > 0.003 else 2 + worse[r.method] + abs(r.lr - 2e-3) * 100 - math.log(r.steps / 400)}
            for r in runs
        ]

    told = equal.search(train, 400, (1e-3, 2e-3, 4e-3), lambda text: None)
    assert {(r.method, r.lr) for r in asked if r.steps == 400} == {
        (method, lr) for method in equal.TRAINED for lr in (1e-3, 2e-3, 4e-3)
    }
    assert {method: each["lr"] for method, each in told.items()} == dict.fromkeys(equal.TRAINED, 2e-3)
    assert set(equal.losses_of(told["bf16"])) == set(equal.losses_of(told["powersgd"])) == {1.0}
    record = {"runs": {"steps": 400, "warmup": 0.05, "methods": told}}
    assert whole.length(record, "onebit-adam") == pytest.approx(math.exp(0.05))
    assert whole.length(record, "onebit-adam-overlap") == whole.length(record, "onebit-adam")
    assert whole.length(record, "zero-one-adam") == 1.0  # not made shorter
    assert whole.length(record, "zero-one-adam", equal.AT_ITS_OWN) == pytest.approx(math.exp(-0.42), rel=0.01)


def test_what_was_measured_is_not_measured_again(tmp_path):
    parts = Parts(tmp_path / "parts.json")
    assert parts.get({"rate": 34.6}, lambda: [1]) == [1]
    again = Parts(tmp_path / "parts.json")
    assert again.get({"rate": 34.6}, lambda: [2]) == [1]
    assert again.get({"rate": 35.6}, lambda: [2]) == [2]
    assert Parts(tmp_path / "parts.json", afresh=True).get({"rate": 34.6}, lambda: [3]) == [3]
    parts.forget()
    assert not list(tmp_path.iterdir())


@pytest.mark.long(but=2)
@pytest.mark.parametrize("method", [*equal.TRAINED, *muon.MUONS.trained])
def test_simulated_hosts_learn_and_are_deterministic(method):
    torch.set_num_threads(1)
    given = {
        "task": QUICK.as_dict(),
        "hosts": 4,
        "warmup": 0.1,
        **Run(method, 1e-2 if "muon" in method else 3e-3, 12)._asdict(),
    }
    told = curves.train(given)
    print(f"{method}: {told['curve']}")
    assert told["loss"] < told["curve"][0][1] - 0.3
    assert [step for step, _ in told["curve"]] == [1, 3, 6, 9, 12]
    assert curves.train(given) == told


# ---------------------------------------------------------------- seconds


@pytest.mark.parametrize("method", METHODS)
def test_stages_make_up_the_run(method):
    for steps in (20, 400, 1000):
        counts = whole.stages(method, steps, 0.05)
        assert sum(counts.values()) == steps
        assert min(counts.values()) >= 0


def test_renewals_are_counted_as_the_optimizer_makes_them():
    seen = []

    def rank(number, transport):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(64))
        optimizer = OneBitAdam([p], 1e-3, (0.9, 0.99), warmup=2, process_group=transport)
        for step in range(142):
            p.grad = torch.randn(64, generator=torch.Generator().manual_seed(2 * step + number))
            optimizer.step()
            if number == 0 and step >= 2:
                seen.append(optimizer.algorithm.compression.variance.due)

    SimulatedGroup(2).run(rank)
    assert [whole.renewals(steps) for steps in range(1, 141)] == [sum(seen[:steps]) for steps in range(1, 141)]


def test_zero_one_adams_stages_are_those_its_workers_report():
    seen = []

    def rank(number, transport):
        p = torch.nn.Parameter(torch.ones(64))
        optimizer = methods.zero_one_adam([p], process_group=transport)
        tells = optimizer.algorithm.own.tells
        if number == 0:
            optimizer.algorithm.own.tells = lambda *done: seen.append(tells(*done)) or seen[-1]
        for _ in range(50):
            p.grad = torch.randn(64)
            optimizer.step()

    SimulatedGroup(2).run(rank)
    for steps in (5, 16, 17, 31, 50):
        assert whole.stages("zero-one-adam", steps, 0.0)["telling"] == sum(seen[:steps])


def test_buckets_change_when_bits_travel_hardly_what_they_are():
    def rank(number, transport, buckets):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(40, 50)) for _ in range(8)]
        optimizer = OneBitAdam(params, 1e-2, warmup=3, wire=Wire(buckets=buckets), process_group=transport)
        draw = torch.Generator().manual_seed(number)
        for _ in range(12):
            for p in params:
                p.grad = p.detach() + torch.randn(p.shape, generator=draw)
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in params])

    one, four = (SimulatedGroup(2).run(lambda *of, n=n: rank(*of, n))[0] for n in (1, 4))
    apart = float((one - four).norm() / one.norm())
    print(f"one bucket and four are {apart:.1e} apart")
    assert apart < 1e-2


def test_a_whole_run_is_the_sum_of_its_stages():
    row = a_row(34.6)
    warm, renewing = 20, whole.renewals(380)
    expected = 20 * 4.0 + renewing * 1.5 + (400 - warm - renewing) * 0.4
    assert whole.seconds_of(row, "onebit-adam", 400, 0.05) == pytest.approx(expected)
    assert whole.seconds_of(row, "powersgd", 400, 0.05) == pytest.approx(2 * 4.0 + 398 * 0.45)
    assert whole.seconds_of(row, "bf16", 400, 0.05) == pytest.approx(800.0)


def test_gains_are_at_equal_loss():
    row = a_row(34.6)
    record = a_record(row, zero_one_adam={1.0: 2.1, 1.1: 2.0}, powersgd={1.0: 2.1})
    seconds = whole.seconds_of(row, "zero-one-adam", 440, 0.05)
    assert whole.gain(record, row, "zero-one-adam", "bf16") == pytest.approx(800 / seconds)
    assert whole.gain(record, row, "zero-one-adam", "powersgd") == pytest.approx(
        whole.seconds_of(row, "powersgd", 400, 0.05) / whole.seconds_of(row, "zero-one-adam", 400, 0.05)
    )
    never = a_record(row, zero_one_adam={1.0: 2.2, 1.5: 2.1})
    assert whole.gain(never, row, "zero-one-adam", "bf16") == 0.0


def test_the_crossing_lies_where_the_gain_is_one():
    slow, fast = a_row(100.0), a_row(400.0, zero_one_adam=20.0, onebit_adam=20.0, onebit_adam_overlap=20.0)
    among = ("zero-one-adam",)
    record = a_record(slow, fast)
    low, high = (whole.gain(record, row, *among, "bf16") for row in (slow, fast))
    found = whole.crossing(record, "bf16", among)
    share = math.log(found / 100) / math.log(4)
    assert math.log(low) + share * (math.log(high) - math.log(low)) == pytest.approx(0.0)
    assert math.isinf(whole.crossing(a_record(slow), "bf16", among))
    assert whole.crossing(a_record(fast), "bf16", among) == 0.0


def test_goals_are_the_pages_and_overlap_is_taken_at_its_worst():
    rows = a_row(34.6, 0.94), a_row(goals.LITERAL, onebit_adam_overlap=1.5)
    found = {goal.name: goal for goal in goals.goals(a_record(*rows))}
    assert [goal.wanted for goal in found.values()] == [3.5, 2.5, 1.0, 1.2, 1.7, 1.15, 0.97, 0.97]
    assert found["compress-4-at-papers"].found == found["compress-4-at-worst"].found == pytest.approx(2.0)
    assert found["overlap"].found == pytest.approx(0.4 / 0.45)
    assert not found["overlap"].met
    assert found["bf16-at-papers"].found == pytest.approx(whole.best(a_record(*rows), rows[0], "bf16")[1])


@pytest.mark.parametrize("compute", [0.23, 0.3])
def test_rates_are_those_of_shares_reports_and_the_literal_one(compute):
    latencies = {"all_reduce": 4e-4, "all_gather": 2e-4, "all_to_all": 2e-4}
    record = {"loopback": {"methods": {"alone": {"whole": compute}}}, "parameters": 2_450_000, "latencies": latencies}
    found = dict(sweep._rates(sweep.Plan(), record))
    assert list(found) == sorted(found)
    assert {what["share"] for what in found.values()} - {None} == {*model.SHARES, *model.REPORTS.values()}
    literal = model.rate_for(0.5, compute, record["parameters"], latencies, sweep.HOSTS)
    # Where half of the step is messages at about that rate, it is measured once.
    assert found[goals.LITERAL]["share"] == (0.5 if abs(literal / goals.LITERAL - 1) < sweep.CLOSE else None)
    assert len(found) == (7 if compute == 0.23 else 8)
