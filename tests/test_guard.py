"""The divergence guard: it knows the norm of a compressed update, and refuses one that is far too large."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from conservation import BETA2, SKIPPING, WARMUP, imbalance, look, set_gradients
from freeze_runs import gradient, make, step_once, train
from observe import change_header, fingerprint, flat, observe, parameters, resumed, served
from optimizers import ADAM_AND_LAMB, EACH_ONEBIT, LIVING, PAPER, construct, objects, skip_refused
from ranks import run_ranks

from fusedonebit import Faults, FusedOneBitWarning, OneBitAdam
from fusedonebit.comm import SimulatedGroup
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.telemetry import HostMirror

FREEZE, REWARM = 20, 10
SPIKE = 1e4


def guarded(name: str = "onebit-adam", guard: str = "rewarm", **options) -> DistributedOptimizer:
    rewarms = {"rewarm_steps": REWARM} if guard == "rewarm" else {}
    options = {"weight_decay": 0.0, "freeze_step": FREEZE} | rewarms | options
    return construct(name, make((300,), (7,)), guard=guard, **options)


# ---------------------------------------------------------------- the norm


def norms(rank: int, transport, name: str, options: dict) -> list[tuple[float, float]]:
    """What the guard says and what the parameters moved by, divided by the learning rate."""
    p, q, r = make((5000,), (40, 30), (11,))  # a scale of a block is that of 4096 elements at most
    mask = {q: torch.rand(q.shape, generator=torch.Generator().manual_seed(5)) > 0.4}
    groups = [{"params": [p, q]}, {"params": [r], "betas": (0.8, 0.99), "eps": 1e-3}]
    options = options | {"lr": 0.1, "weight_decay": 0.0, "freeze_step": FREEZE, "block_size": 128, "mask": mask}
    optimizer = construct(name, groups, process_group=transport, **options)
    train(optimizer, rank, 0, FREEZE)
    found = []
    for step in range(4):
        with torch.no_grad():
            for x in (p, q, r):
                x.zero_()  # so that what it moves by is not rounded away
        train(optimizer, rank, FREEZE + step, 1)
        moved = flat([p, q, r]).astype(float)
        assert optimizer.stats()["vetoed_steps"] == 0
        found.append((optimizer.stats()["update_norm"], float(np.linalg.norm(moved)) / 0.1))
    assert optimizer.phase == "compression"
    return found


@pytest.mark.long(but=2)
@pytest.mark.parametrize("scope", ["global", "layer", "block"])
@pytest.mark.parametrize("inside", [False, True], ids=["eps outside", "eps inside"])
@pytest.mark.parametrize("precondition", [False, True], ids=["momentum", "preconditioned"])
@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb-frozen"])
def test_the_guard_knows_an_updates_norm_from_scales_alone(name, precondition, inside, scope):
    options = {"precondition": precondition, "eps_inside_sqrt": inside, "scale_scope": scope}
    results = SimulatedGroup(2).run(lambda rank, transport: norms(rank, transport, name, options))
    assert results[0] == results[1]
    worst = max(abs(told / moved - 1) for told, moved in results[0])
    print(f"{name} {options}: |u|, relative: {worst:.1e} (limit 1e-6)")
    assert worst <= 1e-6


@pytest.mark.parametrize("precondition", [False, True])
def test_without_eps_the_norm_of_tiny_gradients_is_finite(precondition):
    optimizer = guarded(precondition=precondition, eps=0.0)
    train(optimizer, 0, 0, FREEZE + 5, factor=1e-20)
    stats = optimizer.stats()
    assert (stats["vetoed_steps"], stats["phase"]) == (0, "compression")
    assert 0 < stats["update_norm"] < stats["update_norm_limit"]


# ---------------------------------------------------------------- a veto


def follow_guarded(rank: int, world_size: int, name: str, schedule: list, options: dict, transport=None) -> dict:
    """Records what ``imbalance`` compares, before and after each step of the compression stage."""
    params = make((700,), (9, 13), (1,))
    options = options | {"guard": "warn", "process_group": transport}
    optimizer = construct(name, params, betas=(0.9, BETA2), freeze_step=WARMUP, **options)
    states, gradients, updates = [], [], []
    for step, events in enumerate([("fine",) * world_size] * WARMUP + schedule):
        gradients.append(set_gradients(params, rank, step, events[rank]))
        optimizer.step()
        states.append(look(optimizer))
        updates.append(optimizer.stats()["step"])
    states, gradients, updates = states[WARMUP - 1 :], gradients[WARMUP:], updates[WARMUP:]
    return {"states": states, "gradients": gradients, "updates": updates, "served": served(optimizer)}


def check_vetoes(runs: list[dict], schedule: list[tuple[str, ...]]) -> int:
    """Nothing moves or is lost in a vetoed step, and no rank differs; returns the number of vetoes."""
    vetoed, worst, updates = 0, 0.0, WARMUP
    for t, events in enumerate(schedule):
        states = [run["states"][t + 1] for run in runs]
        taken = runs[0]["updates"][t] > updates
        updates += taken
        assert {run["updates"][t] for run in runs} == {updates}
        if not taken:
            vetoed += not SKIPPING & set(events)
            np.testing.assert_array_equal(runs[0]["states"][t]["x"], states[0]["x"])
            assert not states[0]["m"].any()
        for key in ("x", "m", "v", "layer", "exp_avg_sq_fresh", "exp_avg_last_scale"):
            assert all(np.array_equal(states[0][key], other[key]) for other in states)
        worst = np.maximum(worst, imbalance(runs, t, 0.9))
    print(f"{vetoed} vetoes in {len(schedule)} steps; imbalance, of the terms: {worst:.1e} (limit 1e-5)")
    assert worst <= 1e-5
    return vetoed


@pytest.mark.long(but=1)
@pytest.mark.parametrize("options", [{}, {"ternary": True}, PAPER | {"scale_norm": "l1"}], ids=str)
@EACH_ONEBIT
def test_a_veto_changes_no_parameter_and_loses_nothing(name, options):
    skip_refused(name, options)
    schedule = [("fine",) * 3] * 2 + [("large", "fine", "fine"), ("nan", "fine", "fine"), ("fine",) * 3, ("large",) * 3]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        runs = SimulatedGroup(3).run(lambda rank, t: follow_guarded(rank, 3, name, schedule, options, t))
    # A living variance has seen the first of them, and lets the second pass.
    assert check_vetoes(runs, schedule) >= (1 if name in LIVING else 2)


def test_real_ranks_veto_alike():
    schedule = [("fine", "fine"), ("large", "fine"), ("fine", "fine"), ("fine", "nan"), ("fine", "large")]
    runs = run_ranks(follow_guarded, 2, "onebit-adam", schedule, {})
    assert check_vetoes(runs, schedule) >= 2


def test_a_step_with_a_gradient_that_is_not_finite_is_no_veto():
    optimizer = guarded()
    train(optimizer, 0, 0, FREEZE + 2)
    with pytest.warns(FusedOneBitWarning, match="a gradient on some rank was not finite"):
        step_once(optimizer, 0, 99, bad=True)
    assert train(optimizer, 0, FREEZE + 2, 3) == ["compression"] * 3
    stats = optimizer.stats()
    assert (stats["skipped_steps"], stats["vetoed_steps"], stats["rewarms"]) == (1, 0, 0)


# ---------------------------------------------------------------- what follows


@pytest.mark.long(but=1)
@pytest.mark.parametrize("world_size", [1, 3])
@EACH_ONEBIT
def test_rewarm_warms_up_again_for_rewarm_steps_updates(name, world_size):
    def each(rank, transport):
        optimizer = guarded(name, process_group=transport)
        phases = train(optimizer, rank, 0, FREEZE + 3)
        before = fingerprint(parameters(optimizer))
        phases += train(optimizer, rank, FREEZE + 3, 1, SPIKE * (rank == 0))
        assert fingerprint(parameters(optimizer)) == before
        counts = optimizer.stats()
        assert (counts["vetoed_steps"], counts["skipped_steps"], counts["step"]) == (1, 1, FREEZE + 3)
        phases += train(optimizer, rank, FREEZE + 4, REWARM + 5)
        counts = optimizer.stats()
        assert (counts["rewarms"], counts["vetoed_steps"]) == (1, 1)
        assert counts["freeze_step"] == FREEZE + 3 + REWARM
        return phases, fingerprint(parameters(optimizer))

    with pytest.warns(FusedOneBitWarning, match="10 uncompressed updates follow"):
        results = SimulatedGroup(world_size).run(each)
    assert results[0][0] == ["warmup"] * FREEZE + ["compression"] * 4 + ["warmup"] * REWARM + ["compression"] * 5
    assert all(result == results[0] for result in results)


@ADAM_AND_LAMB
def test_warn_stays_compressed_and_warns_at_doubling_veto_counts(name):
    optimizer = guarded(name, "warn")
    train(optimizer, 0, 0, FREEZE + 3)
    before, told = fingerprint(parameters(optimizer)), []
    for step in range(10):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert train(optimizer, 0, FREEZE + 3 + step, 1, SPIKE) == ["compression"]
        told.append(len(caught))
    assert told == [1, 1, 0, 1, 0, 0, 0, 1, 0, 0]
    stats = optimizer.stats()
    assert (stats["vetoed_steps"], stats["rewarms"], stats["step"]) == (10, 0, FREEZE + 3)
    assert fingerprint(parameters(optimizer)) == before


@ADAM_AND_LAMB
def test_off_applies_everything(name):
    optimizer = guarded(name, "off", lr=1e-3)
    train(optimizer, 0, 0, FREEZE + 3)
    before = flat(parameters(optimizer))
    assert train(optimizer, 0, FREEZE + 3, 1, SPIKE) == ["compression"]
    assert optimizer.stats()["vetoed_steps"] == 0
    assert np.linalg.norm(flat(parameters(optimizer)) - before) / 1e-3 > 1e3


@pytest.mark.parametrize(
    ("guard", "options", "most", "follows"),
    [
        ("rewarm", {}, "10", "10 uncompressed updates follow"),
        ("rewarm", {"precondition": False}, "10", "10 uncompressed updates follow"),
        ("rewarm", {"precondition": False, "scale_scope": "layer"}, "300", "10 uncompressed updates follow"),
        ("warn", {}, "10", 'nothing else follows (guard="warn"), so that training may stand still from now on'),
    ],
)
def test_the_warning_tells_the_norm_the_factor_and_what_to_do(guard, options, most, follows):
    optimizer = guarded(guard=guard, **options)
    train(optimizer, 0, 0, FREEZE + 3)
    with pytest.warns(FusedOneBitWarning) as caught:
        train(optimizer, 0, FREEZE + 3, 1, SPIKE)
    (text,), stats = [str(w.message) for w in caught], optimizer.stats()
    reference = stats["update_norm_limit"] / float(most)
    assert f"every rank skipped the step after {FREEZE + 3} updates" in text
    assert f"the norm of the compressed update, {stats['update_norm']:.3g}, was" in text
    assert f"was {stats['update_norm'] / reference:.3g} times that of the last uncompressed one" in text
    assert f"at most {most} is let through" in text
    assert follows in text
    assert 'use variance="shared" (no freeze_step), Numerics(precondition=True), a larger variance_floor' in text


def test_a_living_variances_warning_advises_no_freeze():
    text = guarded(freeze_step=None, warmup=3).algorithm.compression.guard.describe(rewarms=True, steps=9, shared=True)
    assert text.endswith("If this happens again, use a lower learning rate")


def test_verdicts_a_step_late_as_on_cuda_lead_to_one_rewarmup():
    """Two vetoes: the second is still under way when the first is acted on."""
    optimizer = guarded()
    optimizer.frame.steps.outcomes._mirror = HostMirror(optimizer.frame.device, depth=1)
    train(optimizer, 0, 0, FREEZE + 3)
    with pytest.warns(FusedOneBitWarning, match="the norm of the compressed update"):
        phases = train(optimizer, 0, FREEZE + 3, 2, SPIKE) + train(optimizer, 0, FREEZE + 5, REWARM + 6)
    assert phases == ["compression"] * 2 + ["warmup"] * REWARM + ["compression"] * 6
    stats = optimizer.stats()
    assert (stats["vetoed_steps"], stats["rewarms"]) == (2, 1)


@EACH_ONEBIT
def test_a_refused_spike_is_not_let_through_afterwards(name):
    optimizer = guarded(name, lr=1e-2)
    train(optimizer, 0, 0, FREEZE + 3)
    before = flat(parameters(optimizer)).astype(float)
    with pytest.warns(FusedOneBitWarning, match="the norm of the compressed update"):
        train(optimizer, 0, FREEZE + 3, 1, SPIKE)
    moved = []
    for step in range(REWARM):
        assert train(optimizer, 0, FREEZE + 4 + step, 1) == ["warmup"]
        after = flat(parameters(optimizer)).astype(float)
        moved.append(float(np.linalg.norm(after - before)) / 1e-2)
        before = after
    print(f"{name}: updates of norm {max(moved):.2f} at most after a spike of {SPIKE:g}: less than 1 per coordinate")
    assert max(moved) < math.sqrt(307)


def drift(rank: int, transport, spike: float) -> tuple[float, float]:
    """Speed of a parameter that is pulled one way, before a batch with huge gradients and 200 steps after it."""
    (p,) = make((1000,))
    optimizer = OneBitAdam(
        [p], lr=1.0, weight_decay=0.0, freeze_step=30, faults=Faults(rewarm_steps=20), process_group=transport
    )
    moved = []
    for step in range(300):
        before = p.detach().clone()
        p.grad = (0.3 + gradient(rank, step, p, 0)) * (spike if step == 60 else 1.0)
        optimizer.step()
        moved.append(float((p.detach() - before).mean()))
    assert optimizer.stats()["vetoed_steps"] == 1
    return sum(moved[40:60]) / 20, sum(moved[260:280]) / 20


@pytest.mark.long
@pytest.mark.parametrize("spike", [1e3, 1e5])
def test_one_bad_batch_does_not_slow_training_down_for_good(spike):
    with pytest.warns(FusedOneBitWarning, match="the norm of the compressed update"):
        results = SimulatedGroup(2).run(lambda rank, t: drift(rank, t, spike))
    before, after = results[0]
    print(f"mean update before a batch {spike:g} times too large {before:.3f}, 200 steps after it {after:.3f}")
    assert 0.5 < after / before < 2


def test_all_ranks_rewarm_at_one_step_though_one_looked_early():
    """On CUDA flags arrive a step late; ``stats()`` waits for them."""

    def run(rank: int, transport) -> list[str]:
        optimizer = guarded(process_group=transport)
        optimizer.frame.steps.outcomes._mirror = HostMirror(optimizer.frame.device, depth=1)
        train(optimizer, rank, 0, FREEZE + 3)
        phases = train(optimizer, rank, FREEZE + 3, 1, SPIKE)
        if rank == 0:
            optimizer.stats()
        return phases + train(optimizer, rank, FREEZE + 4, 4)

    with pytest.warns(FusedOneBitWarning, match="the norm of the compressed update"):
        runs = SimulatedGroup(2).run(run)
    assert runs[0] == runs[1] == ["compression"] * 2 + ["warmup"] * 3


def test_a_checkpoint_written_without_a_guard_gets_one():
    optimizer = guarded(guard="off")
    train(optimizer, 0, 0, FREEZE + 3)
    fresh = guarded()
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert fresh.stats()["update_norm_limit"] > 0
    assert train(fresh, 0, FREEZE + 3, 2) == ["compression"] * 2


# ---------------------------------------------------------------- what it is there for


def minimise(rank: int, transport, options: dict, steps: int = 120) -> tuple[int | None, dict, float]:
    """A noisy quadratic of which some coordinates have gradients a million times smaller than others.

    Returns the number of compressed steps before the first veto, the counts, and the largest |x|.
    """
    (p,) = make((1000,))
    h = torch.where(torch.arange(1000) % 10 == 0, 1e-6, 1.0)
    optimizer = OneBitAdam([p], 1e-2, weight_decay=0.0, process_group=transport, **objects(freeze_step=50, **options))
    compressed, first = 0, None
    for step in range(steps):
        p.grad = h * (p.detach() + 0.1 * gradient(rank, step, p, 0))
        optimizer.step()
        if optimizer.phase == "compression" and first is None:
            first = compressed if optimizer.stats()["vetoed_steps"] else None
            compressed += 1
    return first, optimizer.stats(), float(p.detach().abs().max())


def test_deepspeeds_numerics_are_vetoed_where_variances_are_tiny():
    deepspeed = PAPER | {"eps": 1e-8, "bias_correction": False, "dead_coordinates": "keep"}
    with pytest.warns(FusedOneBitWarning, match="at most 300 is let through"):
        results = SimulatedGroup(2).run(lambda rank, t: minimise(rank, t, deepspeed | {"guard": "rewarm"}))
    assert [first for first, _, _ in results] == [0, 0]
    assert results[0][1]["rewarms"] >= 1
    unguarded = SimulatedGroup(2).run(lambda rank, t: minimise(rank, t, deepspeed))
    print(f"largest |x|: {results[0][2]:.1f} with the guard, {unguarded[0][2]:.1e} without")
    assert unguarded[0][2] > 1e3 * results[0][2]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("ternary", [False, True])
def test_the_defaults_are_never_refused_there(ternary):
    for first, stats, largest in SimulatedGroup(2).run(lambda rank, t: minimise(rank, t, {"ternary": ternary})):
        assert first is None
        assert (stats["vetoed_steps"], stats["rewarms"]) == (0, 0)
        assert largest < 5


# ---------------------------------------------------------------- checkpoints


def straight_and_resumed(name: str, guard: str, cut: int) -> list[DistributedOptimizer]:
    """Two runs, equal after every step, of which one was saved and loaded after ``cut`` steps; one step is vetoed."""
    runs = [guarded(name, guard)]
    for step in range(FREEZE + REWARM + 10):
        if step == cut:
            runs.append(resumed(runs[0], guarded(name, guard)))
        for optimizer in runs:
            train(optimizer, 0, step, 1, SPIKE if step == FREEZE + 2 else 1.0)
        assert len({(o.phase, fingerprint(parameters(o))) for o in runs}) == 1
    return runs


@pytest.mark.long(but=1)
@pytest.mark.parametrize("guard", ["rewarm", "warn"])
@pytest.mark.parametrize("cut", [FREEZE + 2, FREEZE + 3, FREEZE + 4], ids=["before", "right after", "later"])
@EACH_ONEBIT
def test_a_resumed_run_comes_to_the_same_verdicts(name, cut, guard):
    with pytest.warns(FusedOneBitWarning, match="the norm of the compressed update"):
        runs = straight_and_resumed(name, guard, cut)
    states = [observe(optimizer) for optimizer in runs]
    assert all(np.array_equal(states[0][key], states[1][key]) for key in states[0])
    counted = ("vetoed_steps", "rewarms", "update_norm", "update_norm_limit", "step", "freeze_step")
    told = [{key: optimizer.stats()[key] for key in counted} for optimizer in runs]
    assert told[0] == told[1]
    assert told[0]["vetoed_steps"] >= 1
    assert told[0]["rewarms"] == (guard == "rewarm")


def test_a_checkpoint_older_than_the_guard_is_guarded():
    optimizer = guarded()
    train(optimizer, 0, 0, FREEZE + 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for key in ("guard", "rewarms", "vetoed", "freeze_due"):
        change_header(saved, lambda header, key=key: header.pop(key))
    fresh = guarded()
    fresh.load_state_dict(saved)
    noise = math.sqrt(307 * (1 - 0.9) / (1 + 0.9))
    assert fresh.stats()["update_norm_limit"] == pytest.approx(300 * noise, rel=1e-6)
    assert train(fresh, 0, FREEZE + 2, 2) == ["compression"] * 2
