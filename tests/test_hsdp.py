"""Sharded parameters (FSDP2) on 2 x 2 ranks: what is decided of whole tensors is what unsharded ranks decide.

The numbers of a compressed step are in ``test_hsdp_paper``, bad input is in ``test_hsdp_disagreement``.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from conservation import BETA2, WARMUP, imbalance
from conservation import look as look_at_momentum
from observe import fingerprint, flat, named, parameters, served
from optimizers import UNGUARDED, construct, objects
from ranks import run_ranks
from sharded import SHARDS, Bag, cut, joined, like, make_mesh, shard, sharded_parameters
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

import fusedonebit
from fusedonebit.core.sharding import local

SHAPES = ((40, 30), (7,), (1, 33), (3, 5, 7), (129, 40), (6, 5))
DEAD, HALF_DEAD, SPARSE, TINY = 5, 3, 0, 1
EACH_NAME = pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb"])


def initial() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def gradients(replica: int, step: int) -> list[Tensor]:
    """Of a replica; one tensor has none, one only in its last shard, one in some rows of that."""
    generator = torch.Generator().manual_seed(1 + replica + 10 * step)
    found = [torch.randn(shape, generator=generator) * 10.0 ** (i - 2) for i, shape in enumerate(SHAPES)]
    found[DEAD].zero_()
    found[HALF_DEAD][:2] = 0.0
    found[SPARSE][25:30] = 0.0
    found[TINY] *= 1e-6
    return found


def make(name: str, is_sharded: bool, tensors: list[Tensor] | None = None, **options: object):
    """An optimizer of whole parameters, or of sharded ones."""
    tensors = initial() if tensors is None else tensors
    if not is_sharded:
        return construct(name, list(Bag(tensors).parameters()), **options)
    mesh = make_mesh()
    return construct(name, sharded_parameters(tensors, mesh), process_group=mesh["replicate"], **options)


def give(optimizer: torch.optim.Optimizer, whole: list[Tensor]) -> None:
    for p, g in zip(parameters(optimizer), whole, strict=True):
        p.grad = like(p, g) if local(p) is not p else g


# ---------------------------------------------------------------- decisions of whole tensors


def decide(rank: int, world_size: int, name: str, is_sharded: bool, options: dict) -> dict:
    """Warms up until the freeze decides itself; returns all that was decided."""
    optimizer = make(name, is_sharded, betas=(0.9, 0.9), freeze_step="auto", max_grad_norm=1e9, **options)
    replica, norms = rank // SHARDS if is_sharded else rank, []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        while optimizer.phase == "warmup":
            wholes = gradients(replica, len(norms))
            wholes[4][:65] *= 1 + 3 * 0.7 ** len(norms)  # in the first column alone v takes longer to settle
            give(optimizer, wholes)
            optimizer.step()
            norms.append(optimizer.stats()["grad_norm"])
    params, stats = parameters(optimizer), optimizer.stats()
    seen = {key: stats[key] for key in ("freeze_step", "dead_tensors", "dead_coordinates", "update_norm_limit", "step")}
    seen["warned"] = sorted(str(w.message) for w in told if "no gradient" in str(w.message))
    state = optimizer.state_dict()["state"]
    seen["v"] = [local(state[i]["exp_avg_sq"]) for i in range(len(params))]
    seen["x"] = [local(p).detach() for p in params]
    seen["unit"] = [float(state[i].get("unit", 0.0)) for i in range(len(params))]
    return seen | {"norms": norms}


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "options"),
    [("onebit-adam", {}), ("onebit-adam", {"eps": 1e-12, "variance_floor": 0.0}), ("onebit-lamb", {})],
)
def test_freeze_guard_floors_and_clipping_are_of_whole_tensors(name, options):
    sharded, whole = run_ranks(decide, 4, name, True, options), run_ranks(decide, 2, name, False, options)[0]
    assert 25 < whole["freeze_step"] < 100
    print(f"{name}: frozen after {[run['freeze_step'] for run in sharded]} updates, whole {whole['freeze_step']}")
    for run in sharded:
        for key in ("freeze_step", "step", "dead_tensors", "dead_coordinates", "warned"):
            assert run[key] == whole[key], key
        np.testing.assert_allclose(run["update_norm_limit"], whole["update_norm_limit"], rtol=1e-5)
        np.testing.assert_allclose(run["unit"], whole["unit"], rtol=1e-5)
        np.testing.assert_allclose(run["norms"], whole["norms"], rtol=1e-6)
    assert whole["dead_tensors"] == [f"parameter {DEAD}"]
    assert whole["dead_coordinates"] == 5 * 30 + 2 * 5 * 7
    if name == "onebit-adam":
        assert len(set(whole["v"][TINY].tolist())) == 1, "all at the floor that the median sets"
    for replica in (0, 2):
        for found, expected in zip(joined([sharded[replica + k]["v"] for k in range(SHARDS)]), whole["v"], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


def clip_in_the_warmup(rank: int, world_size: int) -> tuple[float, float]:
    """The norm that torch computes from the mean of both replicas' gradients, and ours."""
    optimizer = make("onebit-adam", True, freeze_step=100, max_grad_norm=1.0)
    give(optimizer, gradients(rank // SHARDS, 0))
    optimizer.step()
    params = parameters(optimizer)
    for p, a, b in zip(params, gradients(0, 0), gradients(1, 0), strict=True):
        p.grad = like(p, (a + b) / 2)
    return float(nn.utils.clip_grad_norm_(params, 1.0).full_tensor()), optimizer.stats()["grad_norm"]


def test_max_grad_norm_is_of_all_shards_as_torch_has_it():
    for expected, found in run_ranks(clip_in_the_warmup, 4):
        assert found == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------- skipped steps

EVENTS = ("", "nan", "raise", "found_inf", "", "", "", "nan", "", "inf", "raise", "", "found_inf", "")
"""At rank 3 alone; after three updates, so before the seventh of them, the variance is frozen."""


def spoil(p: Tensor, whole: Tensor, event: str) -> None:
    """One element of this rank's shard, or a gradient that is no shard at all."""
    if event == "raise":
        p.grad = DTensor.from_local(whole, p.device_mesh, [Replicate()])
    elif event:
        local(p.grad)[1, 2] = torch.nan if event == "nan" else torch.inf


def follow(rank: int, world_size: int, name: str, ternary: bool) -> dict:
    optimizer = make(name, True, betas=(0.9, BETA2), freeze_step=WARMUP, ternary=ternary, **UNGUARDED)
    scaler = fusedonebit.amp.GradScaler("cpu", init_scale=1.0)
    states, counted, log = [], [], []
    for step, event in enumerate(EVENTS):
        states.append(look_at_momentum(optimizer))
        whole = gradients(rank // SHARDS, step)
        give(optimizer, whole)
        mine = [cut(g, rank % SHARDS).double().clone() for g in whole]
        if rank == 3:
            spoil(parameters(optimizer)[4], whole[4], event)
            mine[4][1, 2] *= event not in ("nan", "inf")
        counted.append(torch.cat([g.reshape(-1) for g in mine]).numpy() * (event != "raise" or rank != 3))
        if event == "found_inf":
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        raised, said = ("", "") if event == "found_inf" else named(optimizer.step)
        if event == "raise":
            assert ("the gradient of parameter 4 must be" if rank == 3 else "another rank could not") in said
        stats = optimizer.stats()
        log.append((raised, stats["phase"], stats["step"], stats["skipped_steps"], scaler.get_scale()))
    states.append(look_at_momentum(optimizer))
    return {"states": states, "gradients": counted, "log": log, "served": served(optimizer)}


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize(
    ("name", "ternary"),
    [
        ("onebit-adam", False),
        pytest.param("onebit-adam", True, marks=pytest.mark.full),
        pytest.param("onebit-lamb", False, marks=pytest.mark.full),
    ],
)
def test_what_one_shard_finds_skips_all_and_nothing_is_lost(name, ternary):
    runs, worst, updates = run_ranks(follow, 4, name, ternary), 0.0, 0
    for step, event in enumerate(EVENTS):
        updates += not event
        raised = {"raise": ["AbortedStepError"] * 3 + ["ValueError"]}.get(event, [""] * 4)
        phase, scale = ("warmup", "compression")[step > 5], 0.5 ** EVENTS[: step + 1].count("found_inf")
        assert [run["log"][step] for run in runs] == [(r, phase, updates, step + 1 - updates, scale) for r in raised]
        for column in range(SHARDS):
            pair = runs[column::SHARDS]
            before, after = (pair[0]["states"][k] for k in (step, step + 1))
            assert (before["x"] == after["x"]).all() == bool(event)
            for key in ("x", "m", "v"):
                np.testing.assert_array_equal(after[key], pair[1]["states"][step + 1][key])
            if event == "found_inf" or (event and phase == "warmup"):
                for run in pair:
                    for key, value in run["states"][step].items():
                        np.testing.assert_array_equal(value, run["states"][step + 1][key])
            elif phase == "compression":
                worst = np.maximum(worst, imbalance(pair, step, 0.9))
    print(f"{name}, columns of shards: imbalance, of the terms: {worst:.1e} (limit 3e-7)")
    assert worst <= 3e-7


def explode(rank: int, world_size: int) -> list[tuple[int, int, str]]:
    """A gradient too large for the guard, in the shards of one column only."""
    optimizer = make("onebit-adam", True, freeze_step=WARMUP)
    found = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(8):
            whole = gradients(rank // SHARDS, step)
            whole[4][65:] *= 1e6 if step == 5 else 1.0
            give(optimizer, whole)
            optimizer.step()
            stats = optimizer.stats()
            found.append((stats["vetoed_steps"], stats["rewarms"], stats["phase"]))
    assert [str(w.message) for w in told if "norm of the compressed update" in str(w.message)]
    return found


def test_the_guard_refuses_on_all_what_one_column_has_too_large():
    runs = run_ranks(explode, 4)
    assert runs[0][4:] == [(0, 0, "compression"), (1, 0, "compression"), (1, 1, "warmup"), (1, 1, "warmup")]
    assert all(run == runs[0] for run in runs)


# ---------------------------------------------------------------- as FSDP2 is used


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 1)).to(dtype)


SAME = ("no reshard", "unscaled first", "broadcast")


def train(rank: int, world_size: int, kind: str) -> dict:
    """Some steps of a model, in one of the ways in which FSDP2 lets one."""
    mesh, dtype = make_mesh(), torch.bfloat16 if kind == "master weights" else torch.float32
    shards: dict = {"reshard_after_forward": kind != "no reshard"}
    if kind == "mixed precision":
        shards["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(model_of(dtype), mesh, **shards)
    options = {"master_weights": kind == "master weights", "broadcast_parameters": kind == "broadcast", **UNGUARDED}
    if kind == "broadcast" and rank >= SHARDS:
        torch.nn.init.zeros_(local(model[0].weight))
    scaler = fusedonebit.amp.GradScaler("cpu", 2.0**10, enabled=kind == "unscaled first")
    optimizer = fusedonebit.OneBitAdam(
        model.parameters(), lr=1e-3, **objects(freeze_step=5, process_group=mesh["replicate"], **options)
    )
    step_of = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True) if kind == "compiled" else None
    prints = []
    for step in range(12):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(16, 9, generator=generator).to(dtype)
        parts = x.chunk(2) if kind == "accumulated" else [x]
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i == len(parts) - 1)
            loss = (model(part).float() - part.float().sum(1, keepdim=True)).square().mean() / len(parts)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        step_of() if step_of else scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        prints.append(fingerprint(parameters(optimizer)))
    params, state = parameters(optimizer), optimizer.state_dict()["state"]
    assert optimizer.phase == "compression"
    if kind == "master weights":
        for i, p in enumerate(params):
            master = local(state[i]["master"])
            assert torch.equal(master.bfloat16(), local(p))
            assert not torch.equal(master, local(p).float()) or master.numel() < 2
    return {"prints": prints, "x": flat(params), "dtypes": {p.dtype for p in params}}


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("kind", "atol"),
    [*((kind, 0.0) for kind in SAME), ("accumulated", 1e-2), ("mixed precision", 5e-2), ("master weights", 5e-2)],
)
def test_fsdps_ways_of_training(kind, atol):
    plain, other = (run_ranks(train, 4, of) for of in ("plain", kind))
    for ranks in (plain, other):
        for column in range(SHARDS):
            assert ranks[column]["prints"] == ranks[column + SHARDS]["prints"]
    assert plain[0]["dtypes"] == {torch.float32}
    assert other[0]["dtypes"] == {torch.bfloat16 if kind == "master weights" else torch.float32}
    off = np.abs(other[0]["x"] - plain[0]["x"]).max()
    print(f"{kind}: parameters differ by {off:.1e} from plain training's (limit {atol})")
    assert off <= atol
    assert (off > 0) == (atol > 0)  # else it was not trained otherwise
    assert (plain[0]["prints"] == other[0]["prints"]) == (kind in SAME)


@pytest.mark.full
def test_a_compiled_step_has_the_same_bits():
    plain, compiled = (run_ranks(train, 4, kind) for kind in ("plain", "compiled"))
    assert [run["prints"] for run in plain] == [run["prints"] for run in compiled]


def one_dimension(rank: int, world_size: int, shards: int | None) -> dict:
    """Two ranks: 2 x 1, or not sharded at all; or with ``shards`` 2, 1 x 2: nobody to average with."""
    mesh = None if shards is None else make_mesh(2 // shards, shards)
    params = list(Bag(initial()).parameters()) if mesh is None else sharded_parameters(initial(), mesh)
    group = None if mesh is None else mesh["replicate"]
    optimizer = fusedonebit.OneBitLamb(params, lr=1e-3, **objects(freeze_step=WARMUP, process_group=group, **UNGUARDED))
    for step in range(8):
        give(optimizer, gradients(rank if shards != 2 else 0, step))
        optimizer.step()
    return {"print": fingerprint(params), "x": flat(params), "world_size": optimizer.stats()["world_size"]}


@pytest.mark.filterwarnings("ignore:1 tensor.s. had no gradient")
def test_one_shard_is_no_shards_and_one_replica_still_compresses():
    plain, one, two = (run_ranks(one_dimension, 2, shards) for shards in (None, 1, 2))
    assert {run["print"] for run in plain} == {run["print"] for run in one}
    assert [run["world_size"] for run in two] == [1, 1]
    assert all(np.isfinite(run["x"]).all() for run in two)
    assert two[0]["x"].size + two[1]["x"].size == plain[0]["x"].size


def nothing_here(rank: int, world_size: int, name: str) -> dict:
    """Ranks of the second column hold nothing of any parameter."""
    tensors = [torch.ones(1, 33), torch.ones(1)]
    optimizer = make(name, True, tensors, lr=1e-2, freeze_step=3, **UNGUARDED)
    for step in range(8):
        generator = torch.Generator().manual_seed(10 * step + rank // SHARDS)
        give(optimizer, [torch.randn(t.shape, generator=generator) for t in tensors])
        optimizer.step()
    return {"x": flat(parameters(optimizer)), "stats": optimizer.stats()}


@pytest.mark.long(but=1)
@EACH_NAME
def test_ranks_without_any_element_take_part(name):
    runs = run_ranks(nothing_here, 4, name)
    assert [run["x"].size for run in runs] == [34, 0, 34, 0]
    assert {(run["stats"]["step"], run["stats"]["phase"]) for run in runs} == {(8, "compression")}
    np.testing.assert_array_equal(runs[0]["x"], runs[2]["x"])
    assert (runs[0]["x"] != 1).all()


def stats_of_one(rank: int, world_size: int) -> dict | None:
    """Squares of the last tensor are waited for; only the first rank asks."""
    tensors = [torch.ones(300), torch.ones(20, 9)]
    optimizer = make("onebit-adam-living", True, tensors, lr=1e-2, freeze_step=3, **UNGUARDED)
    for step in range(8):
        generator = torch.Generator().manual_seed(10 * step + rank // SHARDS)
        give(optimizer, [torch.randn(300, generator=generator), torch.zeros(20, 9)])
        optimizer.step()
    return None if rank else optimizer.stats()


def test_one_rank_alone_may_look_at_what_shards_know_together():
    stats, *_ = run_ranks(stats_of_one, 4)
    assert stats["phase"] == "compression"
    assert len(stats["dead_tensors"]) == 1


def coefficients(rank: int, world_size: int, sharded: bool) -> list[list[float]]:
    """Each layer's, after each of ten steps in bits."""
    optimizer = make("onebit-lamb-living", sharded, lr=1e-2, freeze_step=WARMUP, betas=(0.9, BETA2), **UNGUARDED)
    found = []
    for step in range(WARMUP + 10):
        give(optimizer, gradients(rank // SHARDS if sharded else rank, step))
        optimizer.step()
        found.append(optimizer.stats(layers=True)["layers"]["coefficient"])
    return found[WARMUP:]


def test_coefficients_of_a_living_lamb_are_of_whole_tensors():
    sharded, whole = run_ranks(coefficients, 4, True), run_ranks(coefficients, 2, False)[0]
    assert all(run == sharded[0] for run in sharded)
    ratios = np.array(sharded[0]) / np.array(whole)
    # Blocks, and with them scales, are others; a shard's norms alone would make it 2 or 1/2 where c is in its range.
    print(f"coefficients of shards over whole tensors': {ratios.min():.2f} to {ratios.max():.2f} (limit 0.75, 1.33)")
    assert 0.75 < ratios.min() <= ratios.max() < 1.33
    assert len(set(np.array(whole)[-1].round(6).tolist())) > 2
