"""The planner's costs: formulas by hand, what was held out from their fit, and the choice of a topology."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys

import pytest
import torch
from optimizers import objects
from torch.nn import Parameter

from benchmarks.pages import PERFORMANCE
from benchmarks.planner import (
    ETHERNET,
    GRADIENT_BYTES,
    INFINIBAND,
    SPLITS,
    TABLE_2,
    Fit,
    each_held_out,
    fit,
    held_out,
    ring_share,
    summarise,
    unfitted,
)
from fusedonebit import MarsitAdam, MarsitSGD
from fusedonebit.apps.cli import main
from fusedonebit.apps.plan import METHODS, TYPICAL, Network, choose_topology, methods
from fusedonebit.apps.plan.collectives import all_reduce, tree_share
from fusedonebit.apps.plan.costs import column_links, has_torus, possible, row_links
from fusedonebit.comm import SimulatedGroup
from fusedonebit.ring_topology import TOPOLOGIES, stages

LIMIT = 0.15
COUNTS = [2**k for k in range(1, 15)]
BARE = {"between_latency": 0.0, "inside_latency": 0.0, "peer": 0.0, "base": 0.0}
WIRE = Network(between=1e9, inside=10e9, gpus_per_node=4, **BARE)
"""No latencies: 8e8 parameters are 100 MB of bits, 100 ms at 1 GB/s."""
HOPS = Network(between=1e30, inside=1e30, gpus_per_node=4, between_latency=1.0, inside_latency=0.01, peer=1e-4, base=0)
"""No bytes: seconds count hops between nodes, hundredths those inside, ten-thousandths peers."""


def seconds_of(method: str, parameters: float, gpus: int, network: Network) -> float:
    return METHODS[method].cost(parameters, gpus, network).seconds


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    ("method", "milliseconds"),
    [
        ("fp32", 2 * 3200 * 15 / 16),  # ring: 3.2 GB there and back, one link out of each node
        ("bf16", 2 * 1600 * 15 / 16),
        ("int8", 8 * (1 + 4 / 512) * (4 * 100 * 12 / 16 + 100 * 15 / 16)),
        ("diloco", 2 * 3200 * 15 / 16 / 64),
        ("flat", 4 * 100 * 12 / 16 + 100 * 15 / 16),  # four GPUs share the card in the all-to-all only
        ("zero-one", (4 * 100 * 12 / 16 + 100 * 15 / 16) / 2),
        ("hierarchical", 320 * 3 / 4 + 2 * 100 * 3 / 4 + 10 * 3 / 4),
        ("hierarchical-bf16", 160 * 3 / 4 + 2 * 100 * 3 / 4 + 10 * 3 / 4),
        ("marsit-ring", 2 * 100 * 15 / 16),
        # 4 x 4: rows inside the nodes at 10 GB/s; then four columns of 25 MB share each node's card.
        ("marsit-torus", 2 * 10 * 3 / 4 + 4 * 2 * 25 * 3 / 4),
        ("marsit-owner", 100 * 15 / 16),
    ],
)
def test_bytes_of_16_gpus_on_4_nodes(method, milliseconds):
    assert seconds_of(method, 8e8, 16, WIRE) == pytest.approx(1e-3 * milliseconds)


@pytest.mark.parametrize(
    ("method", "seconds"),
    [
        ("fp32", 2 * (2 + 0.03)),  # the tree: two levels of nodes, chains of three hops; a ring has 6 + 0.24
        ("powersgd", 4 * (2 + 0.03)),
        ("diloco", 2 * (2 + 0.03) / 64),
        ("flat", 15e-4 + 3 + 0.12),
        ("hierarchical", 3 * 1.0001 + 0.06),
        ("marsit-ring", 30 * 1.0001),
        ("marsit-torus", 6 * 0.0101 + 6 * 1.0001),
        ("marsit-owner", 3 + 0.12),
    ],
)
def test_hops_of_16_gpus_on_4_nodes(method, seconds):
    assert seconds_of(method, 8e8, 16, HOPS) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("method", "node", "gpu"),
    [
        ("fp32", 2 * 3200 * 15 / 16, 2 * 3200 * 3 / 4),
        ("flat", 4 * 100 * 12 / 16 + 100 * 15 / 16, 2 * 100 * 3 / 4),  # four lanes leave the node in the all-to-all
        ("hierarchical", 2 * 100 * 3 / 4, (3200 + 100) * 3 / 4),
        ("hierarchical-bf16", 2 * 100 * 3 / 4, (1600 + 100) * 3 / 4),
        ("marsit-ring", 2 * 100 * 15 / 16, 2 * 100 * 3 / 4),
        ("marsit-torus", 4 * 2 * 25 * 3 / 4, 2 * 100 / 2 + 2 * 50 / 2),
        ("marsit-owner", 100 * 15 / 16, 100 * 3 / 4),
        ("diloco", 2 * 3200 * 15 / 16 / 64, 2 * 3200 * 3 / 4 / 64),
    ],
)
def test_bytes_are_a_nodes_and_of_a_single_node_a_gpus(method, node, gpu):
    assert METHODS[method].cost(8e8, 16, WIRE).sent == pytest.approx(1e6 * node)
    assert METHODS[method].cost(8e8, 4, WIRE).sent == pytest.approx(1e6 * gpu)


def test_eight_gpus_share_a_card_where_each_sends_for_itself():
    behind_one = Network(1e9, inside=1e15, gpus_per_node=8, **BARE)
    sent = {"flat": 8 * 8 / 16 + 15 / 16, "int8": 8 * (1 + 4 / 512) * (8 * 8 / 16 + 15 / 16)}
    sent |= {"hierarchical": 2 / 2, "marsit-owner": 15 / 16}  # one message a node
    for method, times in sent.items():
        cost = METHODS[method].cost(8e8, 16, behind_one)
        assert cost.sent == pytest.approx(1e8 * times), method
        assert cost.seconds == pytest.approx(0.1 * times, rel=1e-3), method


def test_one_gpu_sends_nothing_and_two_send_each_other_half():
    for method in METHODS:
        assert seconds_of(method, 1e9, 1, TYPICAL) == 0
    apart = Network(between=1e9, inside=1e12, gpus_per_node=1, **BARE)
    b = 0.1  # seconds of 8e8 bits
    expected = {"fp32": 32 * b, "bf16": 16 * b, "flat": b, "hierarchical": b, "marsit-ring": b, "marsit-owner": b / 2}
    for method, seconds in expected.items():
        assert seconds_of(method, 8e8, 2, apart) == pytest.approx(seconds), method
    assert "marsit-torus" not in possible(2)


def test_two_nodes_take_half_a_tree():
    assert [tree_share(n) for n in (1, 2, 3, 4, 64)] == [0, 1, 1.5, 2, 2]
    one = Network(between=1e9, inside=1e12, gpus_per_node=8, **BARE)
    assert all_reduce(1e9, 16, one).seconds == pytest.approx(1 / 0.92)  # a ring would take 15/8


def test_costs_grow_with_parameters_gpus_and_slowness():
    for method in METHODS:
        if method == "marsit-torus":  # its shape jumps, and with it who shares the card
            continue
        costs = [seconds_of(method, 340e6, n, TYPICAL) for n in [1, *COUNTS]]
        assert costs == sorted(costs), method
    slower = {"between": 1e9, "inside": 1e9, "between_latency": 1e-3, "inside_latency": 1e-3, "peer": 1e-3}
    for method in METHODS:
        now = seconds_of(method, 340e6, 256, TYPICAL)
        assert seconds_of(method, 680e6, 256, TYPICAL) > now
        for name, value in slower.items():
            slow = Network(**{"between": TYPICAL.between, name: value})
            assert seconds_of(method, 340e6, 256, slow) >= now, (method, name)
        # Between very many nodes only bytes that don't depend on their number are left.
        thousands = [seconds_of(method, 340e6, n, Network(1e9, **BARE)) for n in (1024, 16384)]
        assert thousands[1] < 1.2 * thousands[0]


def test_a_torus_shares_its_nodes_cards_as_its_rings_do():
    for per_node in (1, 2, 3, 4, 6, 8):
        for gpus in (per_node * k for k in (1, 2, 3, 4, 6, 8, 12)):
            if not has_torus(gpus):
                continue
            leaving = [[0] * (gpus // per_node), [0] * (gpus // per_node)]
            for rank in range(gpus):
                for stage, counts in zip(stages("torus", gpus, rank), leaving, strict=True):
                    counts[rank // per_node] += stage.next // per_node != rank // per_node
            width = len(stages("torus", gpus, 0)[0].segments)
            rows, columns = row_links(width, per_node, gpus), column_links(width, per_node, gpus)
            counted = tuple(map(max, leaving))
            assert columns == counted[1], (gpus, per_node)
            assert rows == counted[0] or (rows == 2 and per_node % width and width % per_node), (gpus, per_node)


def test_marsit_pays_for_its_full_precision_rounds():
    owner, fp32 = (seconds_of(m, 340e6, 64, TYPICAL) for m in ("marsit-owner", "fp32"))
    mixed = {name: method.cost(340e6, 64, TYPICAL).seconds for name, method in methods(100).items()}
    assert mixed["marsit-owner"] == pytest.approx(0.99 * owner + 0.01 * fp32)
    assert mixed["flat"] == seconds_of("flat", 340e6, 64, TYPICAL)


# ---------------------------------------------------------------- fitted to published times


def told(name: str, predictions) -> float:
    for p in predictions:
        r = p.reading
        print(f"  {r.cluster.name:10} {r.nodes:2} nodes, batch {r.batch:3}: {r.milliseconds:5g} ms", end="")
        print(f", predicted {p.milliseconds:5.0f} ({p.error:+.1%})")
    rows, counts, largest = summarise(predictions)
    print(
        f"{name}: median error {rows:.1%} over rows, {counts:.1%} over node counts (limit 15%), largest {largest:.1%}"
    )
    return max(rows, counts)


@pytest.mark.parametrize("split", SPLITS)
def test_held_out_node_counts_are_predicted_within_15_percent(split):
    predictions = held_out(SPLITS[split])
    seen = {(r.cluster.name, r.nodes) for r in TABLE_2 if SPLITS[split](r.nodes)}
    assert seen.isdisjoint((p.reading.cluster.name, p.reading.nodes) for p in predictions)
    assert len(predictions) + sum(SPLITS[split](r.nodes) for r in TABLE_2) == len(TABLE_2) == 18
    assert told(f"fitted on {split}", predictions) <= LIMIT


def test_each_node_count_is_predicted_within_15_percent():
    assert told("each node count from the others", each_held_out()) <= LIMIT


def test_worse_models_miss_that_limit():
    split = SPLITS["1, 2 and 4 nodes"]
    assert told("ring only", held_out(split, share=ring_share)) > LIMIT
    assert told("all cluster sizes alike", held_out(split, share=lambda r: float(r.nodes > 1))) > LIMIT
    assert told("nothing fitted", unfitted()) > LIMIT


def test_shuffled_times_miss_that_limit():
    times, medians = [r.milliseconds for r in TABLE_2], []
    for seed in range(20):
        random.Random(seed).shuffle(times)
        shuffled = [r._replace(milliseconds=t) for r, t in zip(TABLE_2, times, strict=True)]
        try:
            medians.append(summarise(held_out(SPLITS["1, 4 and 16 nodes"], shuffled)).by_node_count)
        except ValueError:  # constants below zero
            medians.append(math.inf)
    print(f"times shuffled over rows, 20 times: the least median error is {min(medians):.0%}")
    assert min(medians) > LIMIT


def test_the_page_of_performance_says_what_the_fits_say():
    text, found = PERFORMANCE.read_text(), [summarise(held_out(split)) for split in SPLITS.values()]
    one, other = ((100 * each.by_node_count, 100 * each.largest) for each in found)
    assert "a median error of {:.1f} % (at most {:.1f} %)".format(*one) in text
    assert "{:.1f} % ({:.1f} %)".format(*other) in text
    assert f"are {100 * summarise(unfitted()).by_node_count:.1f} % off" in text


def test_a_fit_finds_the_constants_that_made_its_times():
    for cluster in (ETHERNET, INFINIBAND):
        made = Fit(3e-10, Network(0.7e9, inside=math.inf, gpus_per_node=cluster.gpus_per_node))
        rows = [r for r in TABLE_2 if r.cluster is cluster]
        found = fit([r._replace(milliseconds=made.milliseconds(r)) for r in rows])
        assert (found.handling, found.network.between) == pytest.approx((3e-10, 0.7e9))
        for r in rows:  # the line that is fitted is the planner's own all-reduce
            planned = 1e3 * (3e-10 * GRADIENT_BYTES + all_reduce(GRADIENT_BYTES, r.gpus, made.network).seconds)
            assert made.milliseconds(r) == pytest.approx(planned, rel=0.005)
    with pytest.raises(ValueError, match="two node counts"):
        fit([r for r in TABLE_2 if r.cluster is ETHERNET and r.nodes == 64])


# ---------------------------------------------------------------- networks


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("between", 0, "between must be bytes per second > 0, got 0"),
        ("inside", math.nan, "inside must be bytes per second > 0, got nan"),
        ("peer", -1, "peer must be seconds >= 0, got -1"),
        ("gpus_per_node", 0, "gpus_per_node must be an int >= 1, got 0"),
    ],
)
def test_a_network_that_makes_no_sense_is_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        Network(**{"between": 1e9, name: value})


# ---------------------------------------------------------------- Marsit's topology

# Each wins somewhere: bytes, hops, and where nothing costs anything the first of them.
NETWORKS = {
    "owner": Network(0.5e9, gpus_per_node=2),
    "torus": Network(1e12, inside=1e12, gpus_per_node=1, between_latency=1e-3, base=1e-2),
    "ring": Network(math.inf, inside=math.inf, gpus_per_node=4, **BARE),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 64, 1024])
def test_the_chosen_topology_is_the_cheapest_of_the_three(world_size):
    for network in (TYPICAL, *NETWORKS.values()):
        if world_size > network.gpus_per_node and world_size % network.gpus_per_node:
            continue
        for parameters in (100, 10**6, 10**9):
            there = [t for t in TOPOLOGIES if f"marsit-{t}" in possible(world_size)]
            costs = {t: seconds_of(f"marsit-{t}", parameters, world_size, network) for t in there}
            assert costs[choose_topology(parameters, world_size, network)] == min(costs.values())
    assert choose_topology(10**6, world_size) in TOPOLOGIES


def make(numel: int = 100) -> list[Parameter]:
    return [Parameter(torch.ones(numel))]


@pytest.mark.parametrize(
    ("optimizer", "world_size", "topology"),
    [(MarsitSGD, 4, "owner"), (MarsitAdam, 4, "torus"), (MarsitSGD, 4, "ring"), (MarsitAdam, 1, "ring")],
)
def test_marsit_takes_the_chosen_topology(optimizer, world_size, topology):
    chosen = choose_topology(100, world_size, NETWORKS[topology])
    assert chosen == topology

    def build(rank, transport):
        return repr(
            optimizer(make(), 1e-2, process_group=transport, **objects(full_precision_every=0), topology=chosen)
        )

    for said in SimulatedGroup(world_size).run(build):
        assert f"topology: {topology}, full precision never" in said


def test_workers_that_do_not_fill_the_nodes_are_an_error():
    with pytest.raises(ValueError, match="multiple of the 2 GPUs per node"):
        choose_topology(100, 3, Network(1e9, gpus_per_node=2))


def test_train_takes_auto_for_marsit_alone_and_records_it(tmp_path, capsys):
    assert main(["train", "--compare", "marsit,ssdm", "--topology", "auto"]) == 2
    assert "--topology auto is marsit's alone, got it with ssdm" in capsys.readouterr().err
    tiny = ["--model", "tiny", "--steps", "2", "--batch-size", "1", "--seq-len", "8", "--out", str(tmp_path)]
    assert main(["train", "--optimizer", "marsit", "--topology", "auto", *tiny]) == 0
    assert json.loads((tmp_path / "starts.jsonl").read_text())["settings"]["topology"] == choose_topology(100, 1)


@pytest.mark.long
def test_the_planner_starts_without_what_takes_seconds_to_import():
    slow = {"torch", "matplotlib", "rich"}
    code = "import sys; from fusedonebit.apps import cli; from fusedonebit.apps.plan import plan_command"
    code += f"; print({slow} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "set()", result.stderr
