"""The network lab: its arithmetic, what it says without rights, a small run of all of it, and what was recorded."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from benchmarks import network
from benchmarks.netlab import equal, goals, model, muon, split, tables, whole
from benchmarks.netlab.__main__ import OF_MUON, PAGE, main, recorded
from benchmarks.netlab.split import Turn
from benchmarks.pages import PERFORMANCE, read, tables_in
from fusedonebit.apps.plan.collectives import all_reduce

LATENCIES = {"all_reduce": 4e-4, "all_gather": 2e-4, "all_to_all": 2e-4, "exchange": 1e-4}
PARAMETERS, HOSTS = 2_400_000, 4


def turn(began, computed, ended, spans=()):
    return Turn(began, computed, ended, list(spans), 1.0)


# ---------------------------------------------------------------- parts of a step


def test_waiting_for_a_rank_that_computes_is_computing():
    fast = turn(0.0, 1.0, 5.0, [(1.0, 4.0)])
    slow = turn(0.0, 3.0, 5.0, [(3.0, 4.0)])
    assert split.parts([fast, slow]) == (3.0, 1.0, 1.0)


def test_parts_make_up_the_whole_step():
    ranks = [
        turn(0.0, 1.0, 7.0, [(1.5, 3.0), (4.0, 6.0)]),
        turn(0.1, 1.2, 7.5, [(2.0, 3.1), (3.5, 6.5)]),
    ]
    assert sum(split.parts(ranks)) == pytest.approx(split.whole(ranks))
    assert split.whole(ranks) == pytest.approx(7.4)


def test_ranks_with_different_collectives_are_an_error():
    with pytest.raises(ValueError, match="shorter"):
        split.parts([turn(0, 1, 3, [(1, 2)]), turn(0, 1, 3)])


def test_what_ddp_communicates_is_what_its_step_takes_longer():
    alone = [[turn(0.0, 0.9, 1.0)]] * 3
    half = [[turn(0.0, 0.9, 5.0, [(1.0, 1.25), (4.0, 4.25)])]] * 3
    told = split.summarise({"alone": alone, "bf16": half}, ["bf16"])["bf16"]
    assert (told["whole"], told["compute"], told["compress"], told["communicate"]) == (5.0, 1.0, 0.5, 3.5)


# ---------------------------------------------------------------- rates and predictions


@pytest.mark.parametrize("share", model.SHARES)
def test_at_the_rate_for_a_share_the_messages_take_it(share):
    megabits = model.rate_for(share, 0.2, PARAMETERS, LATENCIES, HOSTS)
    seconds = all_reduce(4 * PARAMETERS, HOSTS, model.network(megabits, LATENCIES, HOSTS)).seconds
    assert seconds / (0.2 + seconds) == pytest.approx(share, abs=0.002)


def test_payload_is_what_tcp_leaves_of_the_rate():
    net = model.network(100, LATENCIES, HOSTS)
    assert net.between == pytest.approx(12.5e6 * 1448 / 1547)


def test_a_prediction_is_own_work_and_the_planners_messages():
    seconds = {"whole": 0.5, "compute": 0.2, "compress": 0.05, "communicate": 0.25}
    record = {"latencies": LATENCIES, "hosts": HOSTS, "parameters": PARAMETERS, "congestion": 1.0}
    record["loopback"] = {"methods": {"onebit-adam": seconds, "alone": {"whole": 0.2}}}
    # 1.5 bits a parameter leave each of four hosts, and next to no latency.
    expected = 0.25 + 1.5 * PARAMETERS / 8 / (1e6 * model.PAYLOAD)
    assert model.predict(record, "onebit-adam", 8.0) == pytest.approx(expected, rel=0.01)
    # What a step computed in the same rounds counts.
    busy = {"methods": {"alone": {"whole": 0.3}}}
    assert model.predict(record, "onebit-adam", 8.0, busy) == pytest.approx(expected + 0.1, rel=0.01)
    # Half of it is an all-to-all.
    record["congestion"] = 1.5
    expected += 0.5 * 0.75 * PARAMETERS / 8 / (1e6 * model.PAYLOAD)
    assert model.predict(record, "onebit-adam", 8.0) == pytest.approx(expected, rel=0.01)


# ---------------------------------------------------------------- where it runs


def test_without_rights_one_line_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # in which there is neither ip nor tc
    monkeypatch.setattr(sys, "argv", ["benchmarks.netlab"])
    with pytest.raises(SystemExit) as ended:  # with this text, Python ends with status 1
        main()
    assert "iproute2's ip and iproute2's tc" in ended.value.code
    assert "\n" not in ended.value.code


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert network.lacking()[0] == "root's rights"
    assert not network.can_limit()


@pytest.mark.full
@pytest.mark.alone  # it takes all cores, and makes network interfaces that others' groups would find
@pytest.mark.timeout(900)
@pytest.mark.skipif(not network.can_limit(), reason="needs root, ip and tc")
def test_the_quick_lab_runs_and_leaves_no_namespace():
    command = [sys.executable, "-m", "benchmarks.netlab", "--quick"]
    lab = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    told, error = lab.communicate()
    assert lab.returncode == 0, error
    assert "| 1-bit Adam |" in told
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"{network.TAG}{lab.pid}-" not in spaces


# ---------------------------------------------------------------- what was recorded


AGAINST_FP32 = 8.0
MISSED: dict[str, float] = {"overlap": 0.87, "bf16-at-literal": 1.06, "compress-4-at-literal": 1.1}
"""Goals that the record misses, by name, and what it reaches at least: nothing else may be missed."""
MUON_MISSED: dict[str, float] = {"muon-at-53": 3.2, "muon-at-560": 1.2}
"""The same of 1-bit Muon's part."""
OF_ITS_STAGES = (0.9, 1.1)
"""Seconds of a run that was timed as a whole, over those of its stages."""
BETWEEN = 0.15
"""Where buckets travel in the backward pass: beyond what the planner says with all, and with nothing hidden."""


@pytest.fixture(scope="module")
def record():
    return recorded()


@pytest.fixture(scope="module")
def slowest(record):
    return goals.papers(record)


def test_messages_take_what_they_take_on_the_papers_ethernet(record, slowest):
    share = model.fp32_share(slowest)
    print(f"fp32 messages take {share:.1%} of AdamW's step at {slowest['megabits']:g} Mbit/s (94 % aimed at)")
    assert record["rates"][0] is slowest
    assert 0.92 <= share <= 0.95


def test_rates_are_the_papers_those_of_reports_and_upwards(record):
    rates = [row["megabits"] for row in record["rates"]]
    assert rates == sorted(rates)
    assert {row["share"] for row in record["rates"]} - {None} == {*model.SHARES, *model.REPORTS.values()}
    assert goals.LITERAL in rates
    fastest = record["rates"][-1]
    told = {ours: model.speedup(fastest, ours, "bf16") for ours in whole.OURS}
    print(f"steps at {fastest['megabits']:g} Mbit/s, over bf16: {told}")


def test_the_compression_stage_is_as_fast_as_promised(slowest):
    found = model.speedup(slowest, "onebit-adam")
    print(f"1-bit Adam: {found:.2f}x fp32 (at least {AGAINST_FP32})")
    assert found >= AGAINST_FP32


def test_each_goal_is_met_or_known_to_be_missed(record):
    found = goals.goals(record)
    for goal in found:
        print(
            f"{goal.name}: {goal.found:.2f}x (at least {goal.wanted:g}x) {'met' if goal.met else 'MISSED'}: {goal.text}"
        )
    assert {goal.name for goal in found if not goal.met} == set(MISSED)
    for goal in found:
        assert goal.found >= MISSED.get(goal.name, goal.wanted), goal.name


def test_each_goal_of_muon_is_met_or_known_to_be_missed(record):
    of_muon = read(OF_MUON)
    found, shares = muon.found(of_muon), muon.instead(of_muon, record)
    for goal in found:
        print(f"{goal.name}: {goal.found:.2f}x (at least {goal.wanted:g}x) {'met' if goal.met else 'MISSED'}")
    print(f"1-bit Muon has Muon's held-out loss after {muon.length(of_muon):.3f} of its steps")
    assert {goal.name for goal in found if not goal.met} == set(MUON_MISSED)
    for goal in found:
        assert goal.found >= MUON_MISSED.get(goal.name, goal.wanted), goal.name
    ours, theirs = shares["onebit-muon"], shares["muon-bf16"]
    print(f"steps to the loss of 1-bit Adam, over its own: {ours:.3f}; Muon's to AdamW's: {theirs:.3f}")
    print(f"that is {ours / theirs:.3f} times as many (1.05 aimed at)")
    assert tables_in(PAGE, "MUON") == muon.tables(of_muon, record).strip()


def test_seconds_of_muon_are_of_its_stages():
    steps = {"muon-bf16": {"whole": 2.0}, "onebit-muon": {"whole": 1.0}, "whitening": {"whole": 3.0}}
    lengths = {"muon-bf16": {1.0: 2.0}, "onebit-muon": {1.0: 2.1, 1.1: 2.0}}
    told = {name: {"lengths": [{"length": x, "loss": y} for x, y in by.items()]} for name, by in lengths.items()}
    record = {"runs": {"steps": 100, "methods": told}}
    assert muon.length(record) == pytest.approx(1.1)
    # 110 steps, of which those behind 1, 2, 4, ..., 64 and 100 others are whitened anew.
    assert muon.seconds(record, {"methods": steps}, "onebit-muon") == pytest.approx(102 + 8 * 3)
    assert muon.gain(record, {"methods": steps}) == pytest.approx(200 / 126)


def test_the_rate_up_to_which_it_pays_is_found_or_beyond_all(record):
    fastest = record["rates"][-1]["megabits"]
    for rival in whole.RIVALS:
        megabits = whole.crossing(record, rival)
        upto = f"up to {fastest:,.0f}, the fastest" if math.isinf(megabits) else f"below {megabits:,.0f}"
        print(f"whole runs of the best of ours are faster than {rival} {upto} Mbit/s")
        assert megabits > 0
        assert math.isfinite(megabits) or fastest >= 10_000


def test_every_method_was_tuned_on_one_grid_and_all_losses_shown(record):
    page = PAGE.read_text()
    for name, told in record["runs"]["methods"].items():
        assert [lr for lr, _ in told["tuning"]] == record["runs"]["grid"]
        finite = {lr: loss for lr, loss in told["tuning"] if loss is not None}
        assert told["lr"] == min(finite, key=finite.__getitem__), name
        lengths = {at: whole.length(record, name, at) for at in (equal.BASE, equal.AT_ITS_OWN)}
        print(f"{name}: lr {told['lr']:g}, {equal.losses_of(told)}, lengths {lengths}")
        for run in told["lengths"]:
            assert run["loss"] is None or f"{run['loss']:.4f}" in page


def test_runs_timed_whole_take_what_their_stages_add_up_to(record, slowest):
    assert record["run"]["megabits"] == slowest["megabits"]
    for name in record["run"]["methods"]:
        found = whole.against_product(record, name)
        print(f"{name}: {found:.3f} of the sum of its stages")
        assert OF_ITS_STAGES[0] <= found <= OF_ITS_STAGES[1]


def test_the_planner_predicts_every_step(record):
    print(tables.predictions(record))
    rows = model.held_to(record)
    assert [row["share"] for row in rows] == list(model.SHARES)
    for row in rows:
        for name in model.FAMILY:
            errors = [model.error(record, name, row, overlap=overlap) for overlap in (True, False)]
            if name in model.BETWEEN:
                assert errors[0] <= BETWEEN, (name, row["megabits"])
                assert errors[1] >= -BETWEEN, (name, row["megabits"])
            else:
                assert abs(errors[1]) <= model.LARGEST_ERROR, (name, row["megabits"])


def test_messages_crossed_the_links(record):
    for row in [*record["rates"], *record["mpi"]]:
        for name, told in row["methods"].items():
            if row["megabits"] is not None and name != "alone":
                assert told["link_bytes"] >= 0.98 * told["bytes"], (name, row["megabits"])


def test_mpi_was_compared_with_gloo_where_there_was_one(record):
    assert [row["megabits"] is None for row in record["mpi"]] in ([], [False, False, False, True])


def test_the_page_of_performance_says_what_was_measured(record):
    assert tables_in(PERFORMANCE, "NETWORK LAB") == tables.headline(record).strip()
    text, last = PERFORMANCE.read_text(), record["rates"][-1]
    slow, fast = (whole.best(record, row, "bf16")[1] for row in (goals.at(record, goals.LITERAL), last))
    assert f"over overlapped bf16 {slow:.2f} times at 560 Mbit/s and {fast:.2f} at the fastest" in text
    least = min(whole.best(record, row, rival)[1] for row in model.rows(record) for rival in ("int8", "powersgd"))
    assert f"over int8 and PowerSGD at least {least:.2f} times" in text
    any_optimizer = {goal.name: goal.found for goal in goals.goals(record) if goal.name.startswith(whole.ANY)}
    told = "over overlapped bf16 {:.2f} times at the slowest rate, {:.2f} at 560 Mbit/s, {:.2f} at worst"
    assert told.format(*any_optimizer.values()) in text
    ends = {name: equal.loss_at_one(record["runs"]["methods"][name]) for name in ("bf16", whole.ANY, "powersgd")}
    assert "held-out losses are {:.3f}, {:.3f} and {:.3f}".format(*ends.values()) in text
    quarter = next(row for row in record["rates"] if row["share"] == 0.25)
    gains = [100 * (model.speedup(row, "onebit-adam") - 1) for row in (quarter, last)]
    assert f"gain {gains[0]:.0f} % at {quarter['megabits']:,.0f} Mbit/s and {gains[1]:.0f} % at" in text
