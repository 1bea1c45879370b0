"""The network lab's arithmetic, what it says without rights, and a small run of all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import network
from benchmarks.netlab import model, split
from benchmarks.netlab.__main__ import main
from benchmarks.netlab.split import Turn
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
