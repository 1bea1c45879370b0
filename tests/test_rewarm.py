"""Re-warm-up: the variance moves again, nothing is lost, and after so many uncompressed updates it is frozen anew."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from conservation import BETA2, WARMUP, look
from freeze_runs import gradient, make, step_once, train
from observe import fingerprint, flat, observe, parameters, served, through_a_file, variances, whole_server_error
from optimizers import ADAM_AND_LAMB, EACH_FROZEN, EACH_ONEBIT, UNGUARDED, construct
from ranks import run_ranks
from torch.nn import Parameter

from fusedonebit import FusedOneBitWarning
from fusedonebit.comm import CollectiveError, SimulatedGroup
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.triton_kernels import TAIL

STRETCH, EVERY = 10, 4
SHAPES = ((300,), (9, 13), (1,))
VARIANTS = pytest.mark.parametrize(
    ("name", "options"),
    [
        ("onebit-adam", {}),
        ("onebit-adam", {"precondition": False}),
        ("onebit-adam", {"ternary": True, "scale_scope": "layer"}),
        ("onebit-lamb", {}),
        ("onebit-lamb", {"precondition": False}),
        ("onebit-lamb-frozen", {"precondition": False, "ternary": True, "scale_norm": "l1"}),
    ],
    ids=str,
)


def rewarming(name: str, transport=None, params: list[Parameter] | None = None, **options) -> DistributedOptimizer:
    defaults = {"freeze_step": WARMUP, "betas": (0.9, BETA2), "refuse_every": EVERY, "rewarm_steps": STRETCH}
    options = UNGUARDED | defaults | options
    return construct(name, make(*SHAPES) if params is None else params, process_group=transport, **options)


# ---------------------------------------------------------------- stages


def stage(updates: int) -> str:
    """The stage of the step that follows so many updates."""
    in_cycle = (updates - WARMUP) % (EVERY + STRETCH)
    return "compression" if updates >= WARMUP and in_cycle < EVERY else "warmup"


def two_cycles(rank: int, world_size: int, name: str, options: dict, bad: tuple, transport=None) -> list[tuple]:
    """What is to be seen after each step: stage, updates, re-warm-ups, last freeze, parameters' bits."""
    optimizer, seen = rewarming(name, transport, **options), []
    for step in range(WARMUP + 2 * (EVERY + STRETCH) + 3 + len(bad)):
        step_once(optimizer, rank, step, bad=step in bad and rank == step % world_size)
        told = optimizer.stats()
        seen.append((optimizer.phase, told["step"], told["rewarms"], told["freeze_step"]))
        seen[-1] += (fingerprint(parameters(optimizer)),)
    return seen


def check_stages(results: list[list[tuple]], bad: tuple) -> None:
    assert all(result == results[0] for result in results)
    before = 0
    for step, (phase, updates, rewarms, frozen, _) in enumerate(results[0]):
        assert phase == stage(before)
        assert updates == before + (step not in bad)
        cycles = (before - WARMUP) // (EVERY + STRETCH)
        assert rewarms == (0 if before < WARMUP else cycles + (phase == "warmup"))
        assert frozen == (None if before < WARMUP else WARMUP + cycles * (EVERY + STRETCH))
        before = updates
    assert results[0][-1][2] == 2
    assert len({fingerprint(make(*SHAPES)), *(bits for *_, bits in results[0])}) == before + 1


@pytest.mark.long(but=1)
@pytest.mark.parametrize("bad", [(), (0, 4, 7, 8, 9, 12, 20, 24)], ids=["no skips", "skips"])
@VARIANTS
def test_stages_have_exact_updates_and_ranks_stay_bit_identical(name, options, bad):
    """Among the steps skipped are the last of a compression stage and the one after it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        results = SimulatedGroup(3).run(lambda rank, t: two_cycles(rank, 3, name, options, bad, t))
    check_stages(results, bad)


@pytest.mark.long(but=1)
@ADAM_AND_LAMB
def test_real_ranks_go_through_two_cycles_as_simulated_ones_do(name):
    real = run_ranks(two_cycles, 2, name, {}, ())
    check_stages(real, ())
    assert real == SimulatedGroup(2).run(lambda rank, t: two_cycles(rank, 2, name, {}, (), t))


@EACH_FROZEN
def test_the_variance_is_another_after_each_stretch(name):
    optimizer, frozen = rewarming(name), {}
    for step in range(WARMUP + 2 * (EVERY + STRETCH) + 1):
        step_once(optimizer, 0, step)
        if optimizer.phase == "compression":
            v = flat(variances(optimizer))
            assert np.array_equal(frozen.setdefault(optimizer.stats()["freeze_step"], v), v)
    first, second, third = frozen.values()
    assert (first != second).all()
    assert (second != third).all()


# ---------------------------------------------------------------- its first step


def rewarm_once(rank: int, transport, name: str, options: dict) -> dict:
    """The state before a re-warm-up, and after the step with zero gradients that begins with it."""
    optimizer = rewarming(name, transport, **options)
    train(optimizer, rank, 0, WARMUP + EVERY)
    before, part = look(optimizer), served(optimizer)
    told = transport.traffic.collectives_total, transport.traffic.bytes_total
    train(optimizer, rank, WARMUP + EVERY, 1, factor=0.0)
    traffic = transport.traffic.collectives_total - told[0], transport.traffic.bytes_total - told[1]
    reducer = optimizer.algorithm.exchange.reducer
    residuals = reducer.worker.compensated, reducer.server.compensated
    assert not residuals[1].any()
    told = optimizer.stats()
    assert (told["worker_error_norm"], told["server_error_norm"], told["compensated_norm"]) == (0, 0, 0)
    assert not any(optimizer.worker_error(p).any() for p in parameters(optimizer))
    group, v = optimizer.param_groups[0], flat(variances(optimizer))
    unbias = 1 - group["betas"][0] ** (WARMUP + EVERY + 1) if optimizer.frame.options.numerics.bias_correction else 1.0
    # A step of Adam's, by the v with which the stretch begins, as the momentum is that it goes on with.
    most = group["betas"][0] * unbias * np.sqrt(v / min(BETA2, 1 - 1 / STRETCH))
    after = {"m": flat([optimizer.momentum(p) for p in parameters(optimizer)]), "most": most}
    return {"before": before, "served": part, "after": after, "traffic": traffic, "layout": optimizer.frame.layout}


@pytest.mark.long(but=2)
@pytest.mark.parametrize("beta1", [0.9, 0.3])
@VARIANTS
def test_a_re_warm_up_folds_all_residuals_into_the_momentum(name, options, beta1):
    """beta1 * M = beta1 * m + E + mean(e), at most a step of Adam's; it is m after a step with zero gradients."""
    options = options | {"betas": (beta1, BETA2)}
    runs = SimulatedGroup(3).run(lambda rank, t: rewarm_once(rank, t, name, options))
    before = [run["before"] for run in runs]
    server_error = whole_server_error(before, [run["served"] for run in runs])
    errors = [state["worker_error"].astype(float) for state in before]
    expected = beta1 * before[0]["m"] + server_error + np.mean(errors, 0)
    terms = beta1 * np.abs(before[0]["m"]) + np.abs(server_error) + np.mean(np.abs(errors), 0)
    assert np.abs(server_error).max() > 0
    assert np.abs(errors).max() > 0
    for run in runs:
        most = run["after"]["most"]
        assert 0 < np.mean(np.abs(expected) > most) < 1
        worst = np.max(np.abs(run["after"]["m"] - np.clip(expected, -most, most)) / terms)
        print(f"{name} {options}: momentum after the fold, of the terms: {worst:.1e} (limit 1e-6)")
        assert worst <= 1e-6


@ADAM_AND_LAMB
def test_without_momentum_a_rewarmup_is_refused(name):
    with pytest.raises(ValueError, match=r"betas\[0\] must be > 0 for a re-warm-up.*guard=\"warn\""):
        rewarming(name, betas=(0.0, BETA2))
    optimizer = rewarming(name, betas=(0.0, BETA2), guard="warn", refuse_every=0, rewarm_steps=50)
    train(optimizer, 0, 0, WARMUP + 5)
    assert all(bool(torch.isfinite(p).all()) for p in parameters(optimizer))


@pytest.mark.long(but=2)
@pytest.mark.parametrize("world_size", [2, 3])
@ADAM_AND_LAMB
def test_a_re_warm_up_costs_one_all_reduce(name, world_size):
    for run in SimulatedGroup(world_size).run(lambda rank, t: rewarm_once(rank, t, name, {})):
        numel, tensors = run["layout"].numel, len(run["layout"].sizes)
        warmup_step = 2 * 4 * (numel + TAIL + tensors) * (world_size - 1) // world_size
        assert run["traffic"] == (2, warmup_step + 2 * 4 * numel * (world_size - 1) // world_size)


# ---------------------------------------------------------------- the stretch


def recorded(rank: int, transport, options: dict) -> dict:
    """A run of 1-bit Adam up to the end of its first stretch, and what a reference needs."""
    optimizer = rewarming("onebit-adam", transport, weight_decay=0.1, lr=1e-2, **options)
    train(optimizer, rank, 0, WARMUP + EVERY)
    start, steps = observe(optimizer), []
    for step in range(WARMUP + EVERY, WARMUP + EVERY + STRETCH):
        train(optimizer, rank, step, 1)
        gradients = flat([p.grad for p in parameters(optimizer)])
        state = observe(optimizer)
        steps.append((gradients, state["x"], state["m"], state["v"]))
    assert optimizer.phase == "warmup"
    return {"start": start, "steps": steps}


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


@pytest.mark.filterwarnings("ignore:betas.0., the momentum")
@pytest.mark.parametrize("beta2", [0.999, 0.5])
@pytest.mark.parametrize("options", [{}, {"precondition": False, "eps": 1e-3}], ids=str)
def test_a_rewarmup_is_adamw_with_a_variance_of_shorter_memory(options, beta2):
    runs = SimulatedGroup(2).run(lambda r, t: recorded(r, t, options | {"betas": (0.9, beta2), "block_size": 128}))
    before, eps, m = runs[0]["start"], options.get("eps", 1e-8), np.zeros(0)
    x, v = before["x"].astype(float), before["v"].astype(float) / (1 - beta2**WARMUP)
    memory = min(beta2, 1 - 1 / STRETCH)
    worst = dict.fromkeys("xmv", 0.0)
    for k in range(STRETCH):
        g = np.mean([run["steps"][k][0].astype(float) for run in runs], 0)
        # What the first momentum contains of the residuals, the test of the fold says.
        m = 0.9 * m + 0.1 * g if k else runs[0]["steps"][0][2].astype(float)
        v = memory * v + (1 - memory) * g * g
        t = WARMUP + EVERY + k + 1
        x = (1 - 1e-2 * 0.1) * x - 1e-2 * m / (1 - 0.9**t) / (np.sqrt(v) + eps)
        for run in runs:
            for key, found, expected in zip("xmv", run["steps"][k][1:], (x, m, v), strict=True):
                worst[key] = max(worst[key], relative(found, expected))
    print(f"{options}, beta2 = {beta2}: x, m, v over a stretch, relative: {worst} (limit 1e-5)")
    assert max(worst.values()) <= 1e-5


def layers_through_a_cycle(rank: int, transport, name: str, options: dict) -> list[dict]:
    """What is told of the layers before a re-warm-up, in the stretch, at its end, and after a compressed step.

    Gradients shrink in the compression stage, so that the ratio of the variances grows.
    """
    optimizer = rewarming(name, transport, freeze_step=20, betas=(0.9, 0.5), **options)
    train(optimizer, rank, 0, 20)
    train(optimizer, rank, 20, EVERY, 0.1)
    found = []
    for steps in (0, 1, STRETCH - 1, 1):
        train(optimizer, rank, 24 + len(found), steps)
        found.append(optimizer.stats(layers=True)["layers"] | {"phase": optimizer.phase})
        found[-1].pop("residual_over_momentum", None)  # each rank's own
        found[-1]["unit"] = [float(s.get("unit", 1.0)) for s in optimizer.state_dict()["state"].values()]
    return found


@pytest.mark.filterwarnings("ignore:betas.0., the momentum")
@pytest.mark.long(but=1)
@pytest.mark.parametrize("precondition", [False, True])
@pytest.mark.parametrize("name", ["onebit-lamb", "onebit-lamb-frozen"])
def test_in_a_rewarmup_lamb_forms_no_ratio_and_makes_new_units(name, precondition):
    options = {"precondition": precondition}
    results = SimulatedGroup(2).run(lambda rank, t: layers_through_a_cycle(rank, t, name, options))
    assert results[0] == results[1]
    before, first, last, after = results[0]
    assert [told["phase"] for told in results[0]] == ["compression", "warmup", "warmup", "compression"]
    if name == "onebit-lamb":
        assert max(before["ratio"]) > 1.3
        assert all(r != 1 for r in before["ratio"])
    assert first["ratio"] == last["ratio"] == [1.0] * len(SHAPES)
    assert all(0.899 < r < 1.101 for r in after["ratio"])
    averages = [told["average"] for told in results[0]]
    for i in range(len(SHAPES)):
        assert len({averages[k][i] for k in (0, 1, 2)}) == 3
        assert averages[3][i] == averages[2][i]
        # c_avg = 0.9 * c_avg + 0.1 * c
        assert averages[1][i] == pytest.approx(0.9 * averages[0][i] + 0.1 * first["coefficient"][i], rel=1e-6)
    assert (after["unit"] != before["unit"]) == (not precondition)


def dead_then_alive(rank: int, transport, name: str, precondition: bool) -> list[tuple]:
    """A tensor without gradients until the stretch; what is told of it, and whether it moved, step by step."""
    params, found = make(*SHAPES), []
    optimizer = rewarming(name, transport, params, precondition=precondition, block_size=128, weight_decay=0.0)
    late = params[1]
    for step in range(WARMUP + EVERY + STRETCH + 2):
        before = late.detach().clone()
        for i, p in enumerate(params):
            p.grad = gradient(rank, step, p, i) if p is not late or step >= WARMUP + EVERY else None
        optimizer.step()
        told = optimizer.stats()
        found.append((optimizer.phase, told["dead_tensors"], not torch.equal(late, before)))
        assert told["dead_coordinates"] == 0
    return found


@pytest.mark.long(but=1)
@pytest.mark.parametrize("precondition", [False, True])
@EACH_FROZEN
def test_tensors_that_were_left_out_are_back_in_the_stretch(name, precondition):
    with pytest.warns(FusedOneBitWarning, match="had no gradient during the whole warm-up"):
        results = SimulatedGroup(2).run(lambda rank, t: dead_then_alive(rank, t, name, precondition))
    out, back = ("compression", ["parameter 1"], False), [("warmup", [], True)] * STRETCH
    assert results[0] == [("warmup", [], False)] * WARMUP + [out] * EVERY + back + [("compression", [], True)] * 2
    assert results[1] == results[0]


@ADAM_AND_LAMB
def test_a_tensor_without_gradients_again_is_left_out_again(name):
    params = make(*SHAPES)
    optimizer = rewarming(name, None, params)
    for step in range(WARMUP + EVERY + STRETCH + 2):
        for i in (0, 2):
            params[i].grad = gradient(0, step, params[i], i)
        if step in (WARMUP, WARMUP + EVERY + STRETCH):
            with pytest.warns(FusedOneBitWarning, match=r"1 tensor\(s\) had no gradient during the whole warm-up"):
                optimizer.step()
        else:
            optimizer.step()
    assert optimizer.stats()["dead_tensors"] == ["parameter 1"]


FIRST = WARMUP + EVERY


def into_another_world_size(rank: int, transport, name: str, saved: dict, values: list) -> list[tuple]:
    optimizer = rewarming(name, transport, [Parameter(value.clone()) for value in values])
    optimizer.load_state_dict(copy.deepcopy(saved))
    seen = []
    for step in range(FIRST + 5, FIRST + 2 * STRETCH + EVERY):
        train(optimizer, 0, step, 1)  # the same gradients on all ranks
        seen.append((optimizer.phase, fingerprint(parameters(optimizer))))
    return seen


@EACH_ONEBIT
def test_a_rewarmups_checkpoint_resumes_on_other_ranks(name):
    alone = rewarming(name)
    train(alone, 0, 0, FIRST + 5)
    saved, values = through_a_file(alone.state_dict()), [p.detach().clone() for p in parameters(alone)]
    results = SimulatedGroup(2).run(lambda rank, t: into_another_world_size(rank, t, name, saved, values))
    assert results[0] == results[1]
    rest = []
    for step in range(FIRST + 5, FIRST + 2 * STRETCH + EVERY):
        train(alone, 0, step, 1)
        rest.append((alone.phase, fingerprint(parameters(alone))))
    assert [phase for phase, _ in results[0]] == [phase for phase, _ in rest]
    uncompressed = STRETCH - 5  # halves of equal gradients add up to the same bits
    assert results[0][:uncompressed] == rest[:uncompressed]


# ---------------------------------------------------------------- errors


@ADAM_AND_LAMB
def test_no_group_can_be_added_after_a_rewarm_up(name):
    optimizer = rewarming(name)
    train(optimizer, 0, 0, FIRST + 2)
    assert optimizer.phase == "warmup"
    with pytest.raises(RuntimeError, match="add_param_group must be called before the first freeze"):
        optimizer.add_param_group({"params": make((5,))})
    assert train(optimizer, 0, FIRST + 2, 1) == ["warmup"]


@pytest.mark.parametrize("name", ["onebit-adam"])
def test_after_a_failed_collective_in_a_rewarmup_none_goes_on(name):
    texts: list[str] = []

    def each(rank, transport):
        optimizer = rewarming(name, transport)
        train(optimizer, rank, 0, FIRST)
        if rank == 2:
            return
        before = fingerprint(parameters(optimizer))
        for _ in range(2):
            with pytest.raises(CollectiveError) as error:
                train(optimizer, rank, FIRST, 1)
            texts.append(str(error.value))
        assert fingerprint(parameters(optimizer)) == before

    SimulatedGroup(3, timeout=20).run(each)
    assert len(texts) == 4
    assert sum("all_reduce of 3 simulated ranks failed: another rank has left" in text for text in texts) == 4
    assert sum("this optimizer can't go on" in text for text in texts) == 2
