"""A warm start from an earlier run's variance, and the floor under the frozen one; bad arguments."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from freeze_runs import gradient, make, train
from observe import fingerprint, flat, observe, parameters, resumed, through_a_file
from optimizers import ADAM_AND_LAMB, EACH_FROZEN, EACH_ONEBIT, LAMBS, UNGUARDED, construct
from ranks import run_ranks

from fusedonebit import FusedOneBitWarning
from fusedonebit.checkpoint import header_of
from fusedonebit.comm import SimulatedGroup

SHAPES = ((700,), (40, 30), (1,))
BETAS = (0.8, 0.99)
EARLIER = {"freeze_step": 10, "betas": BETAS, "lr": 1e-2} | UNGUARDED


def earlier_run(name: str, steps: int, rank: int = 0, transport: Any = None, **options: Any) -> dict:
    """The checkpoint of a run whose gradients differ in size by parameter."""
    if name == "adamw":
        optimizer = torch.optim.AdamW(make(*SHAPES), betas=BETAS)
    else:
        optimizer = construct(name, make(*SHAPES), process_group=transport, **(EARLIER | options))
    for step in range(steps):
        for i, p in enumerate(parameters(optimizer)):
            p.grad = 10.0 ** (i - 1) * gradient(rank, step, p, i)
        optimizer.step()
    return through_a_file(optimizer.state_dict())


def warm(name: str, saved: Any, transport: Any = None, **options: Any) -> Any:
    options = {"freeze_step": 0, "variance_floor": 0.0} | UNGUARDED | options
    return construct(name, make(*SHAPES), warm_start=saved, process_group=transport, **options)


def variance(optimizer: Any) -> np.ndarray:
    return flat([optimizer.state[p]["exp_avg_sq"] for p in parameters(optimizer)]).astype(float)


def corrected(saved: dict, updates: int) -> np.ndarray:
    v = np.concatenate([saved["state"][i]["exp_avg_sq"].double().numpy().reshape(-1) for i in range(len(SHAPES))])
    return v / (1 - BETAS[1] ** updates)


# ---------------------------------------------------------------- where it comes from


def check_start(name: str, saved: dict, updates: int, **options: Any) -> Any:
    """Momentum is zero, the variance that of the earlier run, corrected; returns the optimizer."""
    optimizer = warm(name, saved, **options)
    expected = corrected(saved, updates if optimizer.frame.options.numerics.bias_correction else 10**6)
    worst = float(np.max(np.abs(variance(optimizer) / expected - 1)))
    print(f"{name}: variance of a warm start, relative: {worst:.1e} (limit 2e-7)")
    assert worst <= 2e-7
    assert not any(optimizer.momentum(p).any() for p in parameters(optimizer))
    assert optimizer.stats()["step"] == 0
    assert optimizer.phase == "warmup"
    assert train(optimizer, 0, 0, 3) == ["compression"] * 3
    assert optimizer.stats()["freeze_step"] == 0
    return optimizer


@pytest.mark.parametrize("steps", [6, 14], ids=["warm-up", "compression stage"])
@pytest.mark.parametrize("precondition", [True, False])
def test_adam_starts_from_either_stage_of_an_earlier_run(steps, precondition):
    options = {"precondition": precondition}
    saved = earlier_run("onebit-adam", steps, **options)
    assert header_of(saved)["phase"] == ("warmup" if steps == 6 else "compression")
    check_start("onebit-adam", saved, min(steps, 10), **options)


@pytest.mark.parametrize("name", ["adamw", "lamb", "onebit-lamb"])
def test_adam_starts_from_the_variance_of_other_optimizers(name):
    check_start("onebit-adam", earlier_run(name, 7), 7)


def test_a_corrected_variance_is_not_corrected_again():
    """That of a run that was itself warm-started, or warmed up again."""
    rewarmed = {"refuse_every": 2, "rewarm_steps": 10, "freeze_step": 3}
    for options in ({"warm_start": earlier_run("adamw", 7), "freeze_step": 0}, rewarmed):
        check_start("onebit-adam", earlier_run("onebit-adam", 18, **options), 10**6)


def test_groups_are_corrected_by_own_betas_from_when_they_joined():
    p, q = make((300,), (40,))
    first = construct("onebit-adam", [{"params": [p], "betas": (0.9, 0.9)}], freeze_step=100)
    train(first, 0, 0, 3)
    first.add_param_group({"params": [q], "betas": (0.9, 0.5)})
    train(first, 0, 3, 2)
    groups = [{"params": [x], "betas": (0.9, 0.99)} for x in make((300,), (40,))]
    optimizer = construct("onebit-adam", groups, freeze_step=0, warm_start=through_a_file(first.state_dict()))
    for found, x, share in zip(parameters(optimizer), (p, q), (1 - 0.9**5, 1 - 0.5**2), strict=True):
        expected = first.state[x]["exp_avg_sq"].double() / share
        torch.testing.assert_close(optimizer.state[found]["exp_avg_sq"].double(), expected, rtol=2e-7, atol=0.0)


@pytest.mark.long(but=5)
@pytest.mark.parametrize("precondition", [True, False])
@pytest.mark.parametrize(("saved_by", "steps"), [("lamb", 14), ("onebit-lamb", 6), ("onebit-lamb", 14)])
@pytest.mark.parametrize("name", LAMBS)
def test_lamb_takes_averages_and_a_compressed_runs_scales_too(name, saved_by, steps, precondition):
    options = {} if saved_by == "lamb" else {"precondition": precondition}
    saved = earlier_run(saved_by, steps, **options)
    optimizer = check_start(name, saved, min(steps, 10), precondition=precondition)
    state = optimizer.state_dict()["state"]
    units = [float(state[i].get("unit", 1.0)) for i in range(len(SHAPES))]
    for i in range(len(SHAPES)):
        assert state[i]["layer"][0] == saved["state"][i]["layer"][0] > 0
        if not precondition and saved_by == "onebit-lamb" and steps == 14:
            assert units[i] == saved["state"][i]["unit"]
            assert units[i] != 1


def test_a_warm_start_of_lamb_does_not_warn_of_averages_at_0(recwarn):
    optimizer = warm("onebit-lamb", earlier_run("lamb", 40), freeze_step=5)
    recwarn.clear()
    assert train(optimizer, 0, 0, 7) == ["warmup"] * 5 + ["compression"] * 2
    assert [str(w.message) for w in recwarn if w.category is FusedOneBitWarning] == []


@EACH_ONEBIT
def test_freeze_step_5_first_updates_5_times_without_correction(name):
    saved = earlier_run("onebit-lamb", 10)
    optimizer = warm(name, saved, freeze_step=5, betas=BETAS, lr=1e-3, weight_decay=0.0)
    before, v = flat(parameters(optimizer)).astype(float), variance(optimizer)
    train(optimizer, 0, 0, 1)
    g = flat([p.grad for p in parameters(optimizer)]).astype(float)
    v = BETAS[1] * v + (1 - BETAS[1]) * g * g
    np.testing.assert_allclose(variance(optimizer), v, rtol=1e-6)
    if name == "onebit-adam":
        update = (before - flat(parameters(optimizer))) / 1e-3
        # m = 0.2 g, corrected by 1 - 0.8
        assert np.abs(update - g / (np.sqrt(v) + 1e-8)).max() <= 1e-3 * np.abs(update).max()
    assert train(optimizer, 0, 1, 6) == ["warmup"] * 4 + ["compression"] * 2
    assert optimizer.stats()["freeze_step"] == 5


# ---------------------------------------------------------------- ranks


def start_on_ranks(rank: int, world_size: int, name: str, saved: dict, freeze_step: int, transport=None) -> list:
    optimizer = warm(name, saved, transport, freeze_step=freeze_step)
    seen = []
    for step in range(8):
        phase = train(optimizer, rank, step, 1)
        kept = [kept.tensor for kept in optimizer.contents.kept() if kept.wanted and kept.per == "element"]
        seen.append((phase, fingerprint(parameters(optimizer)), fingerprint(kept)))
    return seen


@pytest.mark.long(but=1)
@pytest.mark.parametrize("freeze_step", [0, 5])
@EACH_ONEBIT
def test_ranks_warm_started_by_fewer_are_bit_identical(name, freeze_step):
    saved = SimulatedGroup(2).run(lambda rank, t: earlier_run(name, 14, rank, t))
    results = SimulatedGroup(3).run(lambda rank, t: start_on_ranks(rank, 3, name, saved[1], freeze_step, t))
    assert [phase for (phase,), *_ in results[0]] == ["warmup"] * freeze_step + ["compression"] * (8 - freeze_step)
    assert results == [results[0]] * 3
    other = SimulatedGroup(3).run(lambda rank, t: start_on_ranks(rank, 3, name, saved[0], freeze_step, t))
    assert other == results, "what is taken is the same on all ranks of the earlier run"


def test_real_ranks_start_bit_identical():
    results = run_ranks(start_on_ranks, 2, "onebit-lamb", earlier_run("lamb", 6), 0)
    assert results[0] == results[1]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("cut", [2, 7])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("onebit-adam", {}),
        ("onebit-adam", {"refuse_every": 3, "rewarm_steps": 10}),
        ("onebit-lamb", {"precondition": False}),
    ],
    ids=str,
)
def test_a_warm_started_run_is_resumed_bit_for_bit(name, options, cut):
    saved = earlier_run("onebit-lamb", 14, **({"precondition": False} if "lamb" in name else {}))
    runs = [warm(name, saved, freeze_step=5, **options)]
    for step in range(24):
        if step == cut:
            fresh = construct(name, make(*SHAPES), freeze_step=5, variance_floor=0.0, **UNGUARDED, **options)
            runs.append(resumed(runs[0], fresh))
        for optimizer in runs:
            train(optimizer, 0, step, 1)
        assert len({(optimizer.phase, fingerprint(parameters(optimizer))) for optimizer in runs}) == 1
    states = [observe(optimizer) for optimizer in runs]
    assert all(np.array_equal(states[0][key], states[1][key]) for key in states[0])


def test_no_group_can_be_added_after_a_warm_start():
    optimizer = warm("onebit-adam", earlier_run("adamw", 6), freeze_step=5)
    with pytest.raises(RuntimeError, match=r"add_param_group must be called .* and not after a warm start"):
        optimizer.add_param_group({"params": make((5,))})


# ---------------------------------------------------------------- what can't be used


def without(saved: dict, *keys: str) -> dict:
    return {key: value for key, value in saved.items() if key not in keys}


def reshaped(saved: dict) -> dict:
    saved["state"][1]["exp_avg_sq"] = saved["state"][1]["exp_avg_sq"].t().contiguous()
    return saved


def shorter(saved: dict) -> dict:
    saved["param_groups"][0]["params"].pop()
    return saved


BAD: dict[str, tuple[str, Callable[[dict], Any], str]] = {
    "shape": ("onebit-adam", reshaped, r"exp_avg_sq of parameter 1 must have \(40, 30\), got shape \(30, 40\)"),
    "number": ("onebit-adam", shorter, r"of the same model: its groups have \[2\] parameters, these \[3\]"),
    "no variance": ("onebit-adam", lambda s: s | {"state": {}}, "no parameter in it has a variance"),
    "adamw for lamb": ("onebit-lamb", lambda s: s, "must be the state_dict.. of Lamb or OneBitLamb"),
    "no dict": ("onebit-adam", lambda s: "run.pt", "must be an earlier run's state_dict.., got str"),
    "a list": ("onebit-adam", lambda s: list(s["state"]), "must be an earlier run's state_dict.., got list"),
    "no state": ("onebit-adam", lambda s: without(s, "state"), "warm_start lacks the key 'state'"),
    "no groups": ("onebit-adam", lambda s: without(s, "param_groups"), "warm_start lacks the key 'param_groups'"),
    "state is None": ("onebit-adam", lambda s: s | {"state": None}, "NoneType"),
    "no tensor": ("onebit-adam", lambda s: s | {"state": {0: {"step": 1, "exp_avg_sq": 0.5}}}, r"got float"),
    "sgd": ("onebit-adam", lambda s: s | {"state": {0: {"momentum_buffer": torch.ones(700)}}}, "'exp_avg_sq'"),
}


def errors_of(transport, make_one: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, ValueError, AttributeError)) as error:
        make_one()
    # All ranks have come here, and can still talk.
    transport.all_reduce(torch.ones(1))
    return str(error.value)


@pytest.mark.parametrize("bad_rank", [None, 1], ids=["on all ranks", "on one"])
@pytest.mark.parametrize("case", BAD)
def test_a_warm_start_that_cant_be_used_raises_on_every_rank(case, bad_rank):
    name, spoil, message = BAD[case]
    good = earlier_run("adamw" if name == "onebit-adam" else "lamb", 4)
    bad = spoil(copy.deepcopy(good) if case != "adamw for lamb" else earlier_run("adamw", 4))

    def each(rank, transport):
        return errors_of(transport, lambda: warm(name, bad if bad_rank in (None, rank) else good, transport))

    texts = SimulatedGroup(2, timeout=20).run(each)
    for rank, text in enumerate(texts):
        assert re.search(message, text)
        assert (f"failed on rank {bad_rank}" in text) == (bad_rank not in (None, rank))


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ((4, 5), "ranks differ: exp_avg_sq of parameter 0 in warm_start"),
        ((None, 4), "ranks differ: warm_started is False on rank 0 but True on rank 1"),
    ],
)
def test_warm_starts_that_differ_from_rank_to_rank_are_refused(steps, text):
    saved = [None if each is None else earlier_run("adamw", each) for each in steps]
    for said in SimulatedGroup(2).run(lambda rank, t: errors_of(t, lambda: warm("onebit-adam", saved[rank], t))):
        assert text in said
        assert steps[0] is None or "give every rank the same earlier run's checkpoint" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"variance_floor": x}, rf"variance_floor must be a number in \[0, 1\), or None, got {x!r}")
          for x in (-1, 1.5, 1.0, "x", True)),
        *(({"rewarm_steps": x}, f"rewarm_steps must be at least 10, got {x}: of so many") for x in (9, 0)),
        *(({"rewarm_steps": x}, f"rewarm_steps must be an int >= 0, got {x!r}") for x in (-1, 20.0)),
        ({"guard": "raise"}, "guard must be one of 'rewarm', 'warn', 'off', got 'raise'"),
        (
            {"variance_floor": 0.1, "dead_coordinates": "keep", "precondition": False},
            r'dead_coordinates must be "mean" where v has a floor, got "keep"; or pass Numerics\(variance_floor=0\)',
        ),
    ],
)  # fmt: skip
@ADAM_AND_LAMB
def test_bad_arguments_are_named_with_value_and_expectation(name, options, message):
    with pytest.raises(ValueError, match=message):
        construct(name, make((3,)), **({"freeze_step": 5} | options))


# ---------------------------------------------------------------- variance_floor


def floored(rank: int, transport, name: str, floor: float | None, precondition: bool) -> tuple[list, list, str]:
    """v before and after the freeze of tensors in which it differs by many orders, and has zeros."""
    params = make((700,), (40, 30), (1,))
    options = {"variance_floor": floor, "precondition": precondition, "freeze_step": 6, "block_size": 128}
    optimizer = construct(name, params, process_group=transport, **UNGUARDED, **options)
    v = []
    for step in range(7):
        v = [optimizer.state[p]["exp_avg_sq"].clone() for p in params]
        for i, p in enumerate(params):
            size = 10.0 ** -((torch.arange(p.numel()) % 5).float() / 2).view(p.shape)
            p.grad = size * gradient(rank, step, p, i)
            p.grad.view(-1)[1:-1:50] = 0.0
        optimizer.step()
    assert optimizer.phase == "compression"
    frozen = [optimizer.state[p]["exp_avg_sq"] for p in params]
    return v, frozen, fingerprint(frozen)


@pytest.mark.long(but=7)
@pytest.mark.parametrize("precondition", [False, True])
@pytest.mark.parametrize("floor", [0.0, 0.01, 0.5, None])
@EACH_FROZEN
def test_the_frozen_variance_is_at_least_its_floor_or_unchanged(name, floor, precondition):
    results = SimulatedGroup(2).run(lambda rank, t: floored(rank, t, name, floor, precondition))
    assert len({bits for *_, bits in results}) == 1
    share = (0.01 if precondition or name != "onebit-adam" else 0.0) if floor is None else floor
    raised = 0
    for before, after in zip(*results[0][:2], strict=True):
        mean = before[before > 0].double().mean()
        least = share * float(mean)
        dead, low = before == 0, (before > 0) & (before < least)
        assert torch.equal(after[~dead & ~low], before[~dead & ~low])
        torch.testing.assert_close(after[dead].double(), mean.expand(int(dead.sum())), rtol=1e-6, atol=0.0)
        torch.testing.assert_close(after[low], torch.full_like(after[low], least), rtol=1e-6, atol=0.0)
        raised += int(low.sum())
    assert (raised > 0) == (share > 0)


@pytest.mark.parametrize("precondition", [False, True])
@ADAM_AND_LAMB
def test_at_a_second_freeze_padding_and_masked_have_no_variance(name, precondition):
    """The first freeze raised all of v, there too: that must not count as a coordinate's."""
    params = make((1500,), (40, 30), (1,))
    mask = {params[1]: torch.rand(40, 30, generator=torch.Generator().manual_seed(5)) > 0.4}
    options = {"precondition": precondition, "mask": mask, "variance_floor": 0.5, "freeze_step": 3}
    optimizer = construct(name, params, refuse_every=2, rewarm_steps=10, **UNGUARDED, **options)
    train(optimizer, 0, 0, 3 + 2 + 10)
    v = [optimizer.state[p]["exp_avg_sq"].clone() for p in params]
    train(optimizer, 0, 50, 1)
    assert optimizer.phase == "compression"
    assert optimizer.stats()["dead_coordinates"] == 0
    for p, old in zip(params, v, strict=True):
        live = mask.get(p, torch.ones_like(p, dtype=torch.bool))
        least = 0.5 * old[live].double().mean()
        found = optimizer.state[p]["exp_avg_sq"][live].double()
        torch.testing.assert_close(found, old[live].double().clamp(min=float(least)), rtol=1e-6, atol=0.0)
