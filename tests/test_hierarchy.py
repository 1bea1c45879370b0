"""``hierarchy=``: the same bits as one worker per node, whose buckets are the parts that ranks of a node have."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from flat_state import by_flat_index, conserved, imbalance, whole_state
from observe import caught, fingerprint, give_gradients, train
from optimizers import construct, objects
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from fusedonebit import AbortedStepError, Faults, FusedOneBitWarning, Numerics, OneBitAdam, OutOfStepError, Wire
from fusedonebit.comm import SimulatedGroup

FREEZE, STEPS, RANKS = 4, 12, 4
SHAPES = ((700,), (9, 13), (1,), (33, 40))


def make(shapes: tuple = SHAPES, dtypes: tuple = (torch.float32,), masked: bool = False) -> tuple[list[Parameter], Any]:
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(s, generator=generator).to(dtypes[i % len(dtypes)])) for i, s in enumerate(shapes)]
    mask = {params[0]: torch.rand(params[0].shape, generator=generator) > 0.3} if masked else None
    return params, mask


def gradient(p: Parameter, i: int, rank: int, step: int) -> torch.Tensor:
    """Sums of a few of these are exact, in whatever order; some coordinates, and one tensor, wake up late."""
    g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + rank + 10 * step + 1000 * i))
    g = (g * 16).round().clamp(-64, 64) / 16
    if step <= FREEZE:
        g.view(-1)[1::11] = 0.0
        g *= i != 1
    return g


def mean_of(gradients: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Over one node, as it is summed inside."""
    parts = [(g / len(gradients)).to(dtype) for g in gradients]
    return sum(parts[1:], parts[0]).float()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "paper's, scope layer": {"precondition": False, "scale_norm": "l2", "scale_scope": "layer"},
    "one scale": {"precondition": False, "scale_scope": "bucket"},
    "bfloat16 inside": {"hierarchy_dtype": torch.bfloat16},
    "ternary, masks": {"ternary": True, "make": {"masked": True}},
    "mixed dtypes": {"make": {"dtypes": (torch.float32, torch.bfloat16)}},
    "fewer blocks than ranks": {"make": {"shapes": ((5,), (2, 3))}},
    "a NaN on rank 3": {"factors": {7: (3, float("nan")), 8: (0, float("inf"))}, "precondition": False},
    "guard": {"guard": "rewarm", "rewarm_steps": 10, "factors": {9: (1, 1e6)}, "steps": 22},
    "one node": {"nodes": 1, "serve_alone": True},  # where there are levels there are servers
    "four nodes": {"nodes": 4},
}


def factor_of(given: dict[str, Any], rank: int, step: int) -> float:
    bad, factor = given.get("factors", {}).get(step, (-1, 1.0))
    return factor if rank == bad else 1.0


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in given.items() if key not in ("make", "factors", "steps", "nodes")}
    return {"lr": 1e-2, "freeze_step": FREEZE, "guard": "off", "block_size": 128} | own


def follow(rank: int, world_size: int, name: str, cases: list[str]) -> dict[str, Any]:
    """Trains with a hierarchy; the state after each step."""
    warnings.simplefilter("ignore", FusedOneBitWarning)
    meshes = {nodes: init_device_mesh("cpu", (nodes, world_size // nodes)) for nodes in (1, 2, 4)}
    found = {}
    for case in cases:
        given = CASES[case]
        params, mask = make(**given.get("make", {}))
        mesh = meshes[given.get("nodes", 2)]
        optimizer = construct(name, params, hierarchy=mesh, mask=mask, **options_of(given))
        xs, lost = [], []
        for step in range(given.get("steps", STEPS)):
            for i, p in enumerate(params):
                p.grad = (gradient(p, i, rank, step) * factor_of(given, rank, step)).to(p.dtype)
            optimizer.step()
            xs.append(torch.cat([p.detach().float().reshape(-1) for p in params]).numpy())
            # The second tensor has no variance at the freeze, and takes no part.
            counted = [torch.nan_to_num(p.grad, 0, 0, 0) * (i != 1) for i, p in enumerate(params)]
            told = {"gradient": by_flat_index(optimizer, counted)}
            told |= conserved(optimizer) if optimizer.phase == "compression" else {}
            lost.append(told if case == "a NaN on rank 3" else {})
        found[case] = (xs, whole_state(optimizer), optimizer.phase, optimizer.stats(), lost)
    return found


def one_worker_per_node(name: str, case: str) -> list[tuple[list[np.ndarray], dict[str, np.ndarray], int]]:
    """One simulated worker per node."""
    given = CASES[case]
    nodes = given.get("nodes", 2)
    inside, options = RANKS // nodes, options_of(given)
    dtype = options.pop("hierarchy_dtype", torch.float32)

    def work(node: int, transport: Any) -> tuple[list[np.ndarray], dict[str, np.ndarray], int]:
        params, mask = make(**given.get("make", {}))
        optimizer = construct(name, params, buckets=inside, mask=mask, process_group=transport, **options)
        xs = []
        for step in range(given.get("steps", STEPS)):
            for i, p in enumerate(params):
                ranks = range(node * inside, (node + 1) * inside)
                each = [(gradient(p, i, r, step) * factor_of(given, r, step)).to(p.dtype).float() for r in ranks]
                # Until the freeze nothing is averaged inside: all ranks add up in float32.
                p.grad = mean_of(each, dtype if step >= FREEZE else torch.float32).to(p.dtype)
            optimizer.step()
            xs.append(torch.cat([p.detach().float().reshape(-1) for p in params]).numpy())
        return xs, whole_state(optimizer), optimizer.stats()["skipped_steps"]

    return SimulatedGroup(nodes).run(work)


def check(name: str, cases: list[str]) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore", FusedOneBitWarning)
    runs = run_ranks(follow, RANKS, name, cases)
    for case in cases:
        nodes = CASES[case].get("nodes", 2)
        inside, expected = RANKS // nodes, one_worker_per_node(name, case)
        for rank, run in enumerate(runs):
            xs, state, _, stats, _ = run[case]
            node, part = divmod(rank, inside)
            for step, (x, y) in enumerate(zip(xs, expected[node][0], strict=True)):
                assert np.array_equal(x, y), f"{name}, {case}, step {step}, rank {rank}"
            theirs = expected[node][1]
            assert stats["skipped_steps"] == expected[node][2]
            own = np.split(theirs["c"], inside)[part]  # this rank's part of its node's residual
            compressed = run[case][2] == "compression"
            assert np.array_equal(
                np.split(state["c"], inside)[part] if compressed else state["c"], own if compressed else theirs["c"]
            )
            assert np.array_equal(state["server"][0], theirs["server"].reshape(inside, -1)[part])
            for key in state.keys() - {"c", "e", "server", "digests"}:
                assert np.array_equal(state[key], theirs[key]), f"{name}, {case}, {key}, rank {rank}"
    return runs


@pytest.mark.long(but=["plain", "guard"])
@pytest.mark.parametrize("case", CASES)
def test_nodes_are_workers_bit_for_bit(case):
    runs = check("onebit-adam", [case])
    stats = runs[0][case][3]
    assert stats["skipped_steps"] == {"a NaN on rank 3": 2, "guard": 1}.get(case, 0)
    assert (stats["rewarms"] >= 1) == (case == "guard")
    if case == "a NaN on rank 3":
        check_conserved([run[case][4] for run in runs])


FEW = ("plain", "bfloat16 inside", "a NaN on rank 3", "guard", "mixed dtypes")


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("onebit-lamb", FEW),
        *((name, FEW[:1]) for name in ("onebit-adam-living", "onebit-lamb-frozen", "onebit-lamb-living")),
        *(pytest.param(name, CASES, marks=pytest.mark.full) for name in ("onebit-lamb", "onebit-lamb-frozen")),
    ],
)
def test_nodes_are_workers_bit_for_bit_for_lamb_too(name, cases):
    check(name, list(cases))


def check_conserved(runs: list[list[dict[str, np.ndarray]]]) -> None:
    """Nothing is lost, in skipped steps neither; of a node's gradients the elements that are not finite don't count."""
    worst = 0.0
    for step in range(FREEZE + 1, 12):
        before, after = ([run[k] for run in runs] for k in (step - 1, step))
        # All of rank 3's gradient was bad, or of rank 0's: their nodes have none, and nobody takes the step.
        fine = {7: (0, 1), 8: (2, 3)}.get(step, range(RANKS))
        assert step not in (7, 8) or not after[0]["m"].any()
        gradient = np.sum([after[rank]["gradient"] for rank in fine], 0) / RANKS
        worst = max(worst, imbalance(before, after, gradient, 2, 0.9))
    print(f"imbalance, of the terms: {worst:.1e} (limit 3e-7)")
    assert worst <= 3e-7


# ---------------------------------------------------------------- what is sent


def count(rank: int, world_size: int) -> list[dict[str, Any]]:
    mesh, told = init_device_mesh("cpu", (2, 2)), []
    for options in ({}, {"hierarchy": mesh}, {"hierarchy": mesh, "hierarchy_dtype": torch.bfloat16}):
        p = Parameter(torch.zeros(1 << 17))
        optimizer = OneBitAdam([p], **objects(freeze_step=1, guard="off", **options))
        for step in range(3):
            p.grad = gradient(p, 0, rank, step + 9)
            optimizer.step()
        told.append(optimizer.stats())
    return told


def test_ranks_send_parts_between_nodes_and_gather_bits_inside():
    for run in run_ranks(count, RANKS):
        flat, ours, half = run
        bits = (1 << 17) / 8
        line = (
            f"flat {flat['bytes_step']:,} bytes; between nodes {ours['bytes_step']:,}, inside {ours['bytes_inside']:,}"
        )
        print(line + f", in bfloat16 {half['bytes_inside']:,}")
        assert flat["bytes_step"] == pytest.approx(2 * 3 / 4 * bits, rel=0.03)
        # To one other node, a half of the bits of this rank's half; and as much comes back.
        assert ours["bytes_step"] == half["bytes_step"] == pytest.approx(2 * 1 / 2 * bits / 2, rel=0.03)
        assert (ours["collectives_step"], ours["collectives_inside"]) == (2, 2)
        for told, size in ((ours, 4), (half, 2)):
            floats = size * (1 << 17) / 2
            assert told["bytes_inside"] - floats == pytest.approx(bits / 2, rel=0.03)


# ---------------------------------------------------------------- what goes wrong


def wrong(rank: int, world_size: int) -> dict[str, tuple[type | None, str]]:
    mesh = init_device_mesh("cpu", (2, 2))
    groups = {}
    for name, members in {"columns": [[0, 2], [1, 3]], "rows": [[0, 1], [2, 3]], "crossed": [[0, 3], [1, 2]]}.items():
        made = [dist.new_group(ranks) for ranks in members]
        groups[name] = made[rank in members[1]]
    row, column = groups["rows"], groups["columns"]
    given: dict[str, dict[str, Any]] = {
        "one dimension": {
            "hierarchy": mesh[mesh.mesh_dim_names[0]] if mesh.mesh_dim_names else init_device_mesh("cpu", (4,))
        },
        "other order": {"hierarchy": (row, column)},
        "other members": {"hierarchy": (groups["crossed"], row)},
        "too few": {"hierarchy": (row, row)},
        "no hierarchy": {"hierarchy": 3},
        "buckets": {"hierarchy": mesh, "buckets": 2},
        "overlap": {"hierarchy": mesh, "overlap": True},
        "dtype": {"hierarchy": mesh, "hierarchy_dtype": torch.float16},
        "on rank 2 none": {"hierarchy": None if rank == 2 else mesh},
        "on rank 2 other nodes": {"hierarchy": mesh, "hierarchy_dtype": torch.bfloat16 if rank == 2 else torch.float32},
    }
    told = {name: caught(lambda o=o: OneBitAdam(make()[0], **objects(freeze_step=2, **o))) for name, o in given.items()}
    told["fine"] = caught(lambda: OneBitAdam(make()[0], freeze_step=2, wire=Wire(hierarchy=(column, row))))
    return told


WRONG = {
    "one dimension": "hierarchy must have two dimensions, between nodes and inside one, got 1",
    "other order": "hierarchy must make up all 4 ranks, node by node, got 2 nodes of 2",
    "other members": "hierarchy must make up all 4 ranks, node by node",
    "too few": "hierarchy must make up all 4 ranks, node by node",
    "no hierarchy": "hierarchy must be a DeviceMesh of two dimensions, or the groups",
    "buckets": "hierarchy must be None with Wire(overlap=True) or several buckets",
    "overlap": "hierarchy must be None with Wire(overlap=True) or several buckets",
    "dtype": "hierarchy_dtype must be torch.float32 or torch.bfloat16, got torch.float16",
    "on rank 2 none": "the number of ranks of a node is 2 on rank 0 but 1 on rank 2",
    "on rank 2 other nodes": "hierarchy_dtype is torch.float32 on rank 0 but torch.bfloat16 on rank 2",
}


def test_a_wrong_hierarchy_is_one_clear_error_on_every_rank():
    runs = run_ranks(wrong, RANKS)
    for run in runs:
        assert run["fine"] == (None, "")
        for case in WRONG:
            kind, said = run[case]
            assert kind is not None, case
            assert issubclass(kind, (ValueError, TypeError)), (case, kind, said)
    for case, text in WRONG.items():
        assert any(re.search(re.escape(text), run[case][1]) for run in runs), (case, [run[case] for run in runs])


def part_ways(rank: int, world_size: int) -> dict[str, tuple[type | None, str]]:
    """What one rank has of its own, or the ranks with one place in their nodes."""
    warnings.simplefilter("ignore", FusedOneBitWarning)
    mesh, told = init_device_mesh("cpu", (2, 2)), {}
    for case in ("lr of one", "lr of a place", "gradient", "fine"):
        params, _ = make()
        optimizer = OneBitAdam(params, lr=1e-2, freeze_step=2, faults=Faults(guard="off"), wire=Wire(hierarchy=mesh))
        train(optimizer, rank, range(4))
        before = fingerprint(params)
        odd = {"lr of one": rank == 3, "lr of a place": rank % 2 == 1}.get(case, False)
        optimizer.param_groups[0]["lr"] *= 2 if odd else 1
        give_gradients(optimizer, rank, 4)
        if case == "gradient" and rank == 1:
            params[0].grad = params[0].grad.to_sparse()
        told[case] = caught(optimizer.step)
        assert case == "fine" or fingerprint(params) == before
        optimizer.param_groups[0]["lr"] /= 2 if odd else 1
        train(optimizer, rank, (5, 6))
        ends = [""] * world_size
        dist.all_gather_object(ends, fingerprint(params))
        assert len(set(ends)) == 1, case
    return told


def test_ranks_that_part_ways_are_found_and_go_on_together():
    for rank, run in enumerate(run_ranks(part_ways, RANKS)):
        for case in ("lr of one", "lr of a place"):
            assert run[case][0] is OutOfStepError, (case, run[case])
            assert "hyper-parameters" in run[case][1] or case == "lr of one"
        assert run["gradient"][0] is (TypeError if rank == 1 else AbortedStepError)
        assert run["fine"] == (None, "")


def resume(rank: int, world_size: int, how: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    params, _ = make()
    optimizer = OneBitAdam(params, lr=1e-2, **how, faults=Faults(guard="off"), wire=Wire(hierarchy=mesh))
    again = OneBitAdam(make()[0], lr=1e-2, **how, faults=Faults(guard="off"), wire=Wire(hierarchy=mesh))
    for step in range(9):
        if step == 5:
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            with torch.no_grad():
                for p, q in zip(again.param_groups[0]["params"], params, strict=True):
                    p.copy_(q)
        for o in (optimizer, again) if step >= 5 else (optimizer,):
            for i, p in enumerate(o.param_groups[0]["params"]):
                p.grad = gradient(p, i, rank, step)
            o.step()
    assert optimizer.phase == "compression"
    for p, q in zip(params, again.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)
    if optimizer.frame.options.shares_variance:
        assert optimizer.stats()["renewals"] > 1
        return  # on the way to its next v
    ours, theirs = whole_state(optimizer), whole_state(again)
    for key in ours.keys() - {"v", "exp_avg_sq"}:  # of padding only what is saved is loaded
        assert np.array_equal(ours[key], theirs[key]), key
    for p, q in zip(params, again.param_groups[0]["params"], strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], again.state[q]["exp_avg_sq"])


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"freeze_step": 2}, id="frozen"),
        pytest.param({"warmup": 3, "numerics": Numerics(state="bf16")}, id="shared, bf16"),
        pytest.param({"warmup": 3, "numerics": Numerics(state="8bit")}, id="shared, 8bit"),
    ],
)
def test_resuming_goes_on_bit_for_bit(how):
    run_ranks(resume, RANKS, how, group_timeout=10.0)
