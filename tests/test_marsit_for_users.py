"""Marsit as users meet it: checkpoints, ranks that fail or differ, bad arguments, and torch's own tools around it."""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusedonebit.comm import SimulatedGroup, Transport
from observe import fingerprint, parameters
from ranks import run_ranks
from test_ddp import Sent
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from fusedonebit import (
    AbortedStepError,
    CollectiveError,
    DisagreementError,
    FusedOneBitWarning,
    MarsitAdam,
    MarsitSGD,
    NonFiniteGradientError,
    OutOfStepError,
    amp,
    ddp,
)
from fusedonebit.rounds import RoundOptimizer

MARSIT = {"sgd": MarsitSGD, "adam": MarsitAdam}
EACH = pytest.mark.parametrize("name", MARSIT)
PLACES = [("ring", 2), ("owner", 2), ("torus", 4)]
EACH_PLACE = pytest.mark.parametrize(("topology", "world_size"), PLACES)


def make(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).to(dtype)) for shape in ((40, 30), (7,), ())]
    return [*params, Parameter(torch.randn(8, 6).t().to(dtype)), Parameter(torch.randn(21, 8)[::2, ::3].to(dtype))]


def set_gradients(optimizer: RoundOptimizer, rank: int, step: int) -> None:
    for i, p in enumerate(parameters(optimizer)):
        generator = torch.Generator().manual_seed(1 + rank + 10 * step + 100_000 * i)
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer: RoundOptimizer, rank: int, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        set_gradients(optimizer, rank, step)
        optimizer.step()


def caught(call: Callable[[], object]) -> tuple[type | None, str]:
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None, ""


def kept(optimizer: RoundOptimizer) -> list[Tensor]:
    return [optimizer.compensation(p) for p in parameters(optimizer)]


def through_a_file(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---------------------------------------------------------------- checkpoints

STEPS = 16


def own_state(optimizer: RoundOptimizer) -> list[str]:
    saved = optimizer.state_dict()
    states = [saved["state"][i] for i in sorted(saved["state"])]
    return [f"{key} {i}: {fingerprint([v])}" for i, state in enumerate(states) for key, v in sorted(state.items())]


def resume(rank: int, world_size: int, name: str, cut: int, dtype: torch.dtype, options: dict) -> tuple[bool, ...]:
    """Trains straight through, with a NaN in steps 1 and 7, and again from what was saved after ``cut`` steps."""

    def take(optimizer: RoundOptimizer, step: int) -> None:
        set_gradients(optimizer, rank, step)
        if step in (1, 7) and rank == 1:
            parameters(optimizer)[0].grad[0, 0] = float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedOneBitWarning)
            optimizer.step()

    straight, prints = MARSIT[name](make(dtype), 1e-2, weight_decay=0.1, **options), []
    for step in range(STEPS):
        if step == cut:
            values = [p.detach().clone() for p in parameters(straight)]
            saved = through_a_file({"optimizer": straight.state_dict(), "params": values})
            phase = straight.phase
        take(straight, step)
        prints.append(fingerprint(parameters(straight)))

    resumed = MARSIT[name](make(dtype), 0.5, **options)
    with torch.no_grad():
        for p, value in zip(parameters(resumed), saved["params"], strict=True):
            p.copy_(value)
    resumed.load_state_dict(saved["optimizer"])
    same_phase, again = resumed.phase == phase, []
    for step in range(cut, STEPS):
        take(resumed, step)
        again.append(fingerprint(parameters(resumed)))
    told = [{k: v for k, v in o.stats().items() if k != "bytes_total"} for o in (straight, resumed)]
    assert told[0]["skipped_steps"] == 2
    return again == prints[cut:], own_state(straight) == own_state(resumed), told[0] == told[1], same_phase


@pytest.mark.parametrize("cut", [1, 3, 8])
@EACH_PLACE
@EACH
def test_resuming_continues_bit_for_bit(name, topology, world_size, cut):
    """Round 0 is one of full precision, round 1 is skipped."""
    options = {"topology": topology, "full_precision_every": 6}
    for result in run_ranks(resume, world_size, name, cut, torch.float32, options):
        assert result == (True, True, True, True)


@pytest.mark.parametrize("cut", [3, 7, 8])
@pytest.mark.parametrize("options", [{}, {"master_weights": True}], ids=["plain", "masters"])
@EACH_PLACE
def test_resuming_within_a_round_of_local_steps_continues_bit_for_bit(topology, world_size, options, cut):
    """After 8 steps one rank already has the NaN for which all will skip the round."""
    options = options | {"topology": topology, "full_precision_every": 2, "local_steps": 3}
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    for result in run_ranks(resume, world_size, "sgd", cut, dtype, options):
        assert result == (True, True, True, True)


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.5}, {"momentum": 0.0}, {"stochastic_rounding": True}], ids=str)
def test_resuming_keeps_other_options(options):
    for result in run_ranks(resume, 2, "sgd", 5, torch.bfloat16, {"full_precision_every": 4} | options):
        assert result == (True, True, True, True)


def test_saving_and_looking_change_no_later_step():
    def run(rank: int, transport: Transport, look: bool) -> str:
        optimizer = MarsitSGD(make(), 1e-2, local_steps=2, full_precision_every=3, process_group=transport)
        for step in range(12):
            train(optimizer, rank, 1, step)
            if look:
                optimizer.state_dict(), optimizer.stats(), repr(optimizer), kept(optimizer)
        return fingerprint(parameters(optimizer))

    group = SimulatedGroup(2)
    assert group.run(lambda r, t: run(r, t, True)) == group.run(lambda r, t: run(r, t, False))


def load_wrong(rank: int, world_size: int, case: str) -> tuple[type | None, str, bool]:
    saver = MarsitAdam(make(), local_steps=3) if case != "algorithm" else MarsitSGD(make())
    train(saver, rank, 4)
    saved = through_a_file(saver.state_dict())
    header = saved["fusedonebit"]
    if case == "rank":
        header["rank"] = 1 - rank
    elif case == "world_size":
        header["world_size"] = 3
    elif case == "one rank's":
        header["rank"] = 0
    elif case == "moment" and rank == 1:
        train(saver, rank, 0)
        header["updates"] += 1
    elif case == "torch":
        adamw = torch.optim.AdamW(make())
        for p in parameters(adamw):
            p.grad = torch.ones_like(p)
        adamw.step()
        saved = adamw.state_dict()
    optimizer = MarsitAdam(make(), local_steps=3 if case != "local steps" else 1)
    before = optimizer.state_dict()
    outcome = caught(lambda: optimizer.load_state_dict(saved))
    still = fingerprint(kept(optimizer)) == fingerprint([s["compensation"] for s in before["state"].values()])
    train(optimizer, rank, 3)
    return *outcome, still and optimizer.stats()["step"] == 3


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("rank", "the checkpoint's rank is 1, but here it is 0"),
        ("world_size", "the checkpoint's world_size is 3, but here it is 2; resume with as many ranks as wrote it"),
        ("one rank's", "the checkpoint's rank is 0, but here it is 1"),
        ("algorithm", "the checkpoint must be of MarsitAdam, got one of MarsitSGD"),
        ("torch", "the checkpoint must be of MarsitAdam, got one of torch.optim"),
        ("moment", "the checkpoint's updates is 4 on rank 0 but 5 on rank 1"),
        ("local steps", "written after 1 local steps of a round, but local_steps is 1"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_on_every_rank_and_changes_nothing(case, text):
    results = run_ranks(load_wrong, 2, case, group_timeout=10)
    assert any(text in message for _, message, _ in results)
    for kind, _, still in results:
        assert issubclass(kind, ValueError)
        assert still
    if case == "one rank's":
        assert results[0][0] is DisagreementError
        assert text in results[0][1]


# ---------------------------------------------------------------- what is not finite


def bad_number(
    rank: int, world_size: int, name: str, options: dict, steps: int, value: float, nonfinite: str, at: int
) -> dict[str, Any]:
    """A number that is not finite, on the last rank, ``at`` steps after a round has begun."""
    optimizer = MARSIT[name](make(), 1e-2, nonfinite=nonfinite, compensation_limit=None, **options)
    local_steps = optimizer.options.local_steps
    train(optimizer, rank, steps * local_steps)
    before, start, step = fingerprint(parameters(optimizer)), kept(optimizer), steps * local_steps
    momenta = [optimizer.momentum(p) for p in parameters(optimizer)]
    outcome, bad = (None, ""), rank == world_size - 1
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for position in range(local_steps):
            set_gradients(optimizer, rank, step + position)
            if bad and position == at:
                parameters(optimizer)[0].grad[3, 4] = value
            outcome = caught(optimizer.step)
            assert outcome[0] is None or position == local_steps - 1
    after, stats, still = kept(optimizer), optimizer.stats(), fingerprint(parameters(optimizer)) == before
    own = optimizer.momentum(parameters(optimizer)[0])
    train(optimizer, rank, 3 * local_steps, step + local_steps)
    return {
        "outcome": outcome,
        "still": still,
        "counts": (stats["step"], stats["skipped_steps"]),
        "warned": [str(w.message) for w in seen if issubclass(w.category, FusedOneBitWarning)],
        "gained": [b - a for a, b in zip(start, after, strict=True)],
        "kept moment": bool(local_steps > 1 or not bad or own[3, 4] == momenta[0][3, 4]),
        "prints": fingerprint(parameters(optimizer)),
        "finite": all(bool(c.isfinite().all()) for c in after),
    }


CASES = [
    ({"topology": "ring"}, 2, 2),
    ({"topology": "owner"}, 2, 2),
    ({"topology": "torus"}, 4, 2),
    ({"full_precision_every": 2}, 2, 2),
    ({"local_steps": 3}, 2, 2),
]


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize(("options", "world_size", "steps"), CASES, ids=str)
@EACH
def test_a_number_that_is_not_finite_on_one_rank_skips_the_round_on_all(name, options, world_size, steps, nonfinite):
    local_steps = options.get("local_steps", 1)
    for at in range(local_steps):
        value = float("nan" if at % 2 == 0 else "-inf")
        results = run_ranks(bad_number, world_size, name, options, steps, value, nonfinite, at, group_timeout=10)
        for seen in results:
            assert seen["still"]
            assert seen["counts"] == (steps * local_steps + local_steps - 1, 1)
            assert seen["finite"]
            assert seen["kept moment"]
            assert seen["prints"] == results[0]["prints"]
            if nonfinite == "raise":
                assert seen["outcome"][0] is NonFiniteGradientError
                assert seen["warned"] == []
            else:
                assert seen["outcome"][0] is None
                assert len(seen["warned"]) == 1
            assert "every rank skipped the step (1 so far)" in [*seen["warned"], seen["outcome"][1]][0]


def test_what_workers_have_in_a_skipped_round_is_kept_but_for_what_is_not_finite():
    """The mean over the ranks of the compensation gains the mean of the updates."""

    def run(rank: int, transport: Transport, steps: int) -> tuple[list[Tensor], list[Tensor]]:
        options: dict = {"momentum": 0.0, "compensation_limit": None, "full_precision_every": 2}
        optimizer = MarsitSGD(make(), 1e-2, process_group=transport, **options)
        train(optimizer, rank, steps)
        start = kept(optimizer)
        set_gradients(optimizer, rank, steps)
        grads = [p.grad.clone() for p in parameters(optimizer)]
        if rank == 1:
            parameters(optimizer)[0].grad[3, 4], grads[0][3, 4] = float("inf"), 0.0
        optimizer.step()
        gained = [b - a for a, b in zip(start, kept(optimizer), strict=True)]
        return gained, [1e-2 * g for g in grads]

    for steps, full in ((2, True), (3, False)):
        with pytest.warns(FusedOneBitWarning, match="not finite"):
            ranks = SimulatedGroup(3).run(lambda rank, t, steps=steps: run(rank, t, steps))
        for of_ranks in zip(*(zip(gained, updates, strict=True) for gained, updates in ranks), strict=True):
            gained, updates = (torch.stack([pair[i] for pair in of_ranks]) for i in (0, 1))
            off = float((gained.mean(0) - updates.mean(0)).abs().max())
            print(f"full precision {full}: mean of what is kept, off by {off:.1e} (limit 3e-8)")
            assert off <= 3e-8
            assert full or float((gained - updates).abs().max()) <= 3e-8


# ---------------------------------------------------------------- ranks that differ


def build_differently(rank: int, world_size: int, case: str, values: tuple) -> tuple[type | None, str]:
    params, options = make(), {} if case == "algorithm" else {case: values[rank]}
    kind = MARSIT[values[rank]] if case == "algorithm" else MarsitSGD
    return caught(lambda: kind(params, **options))


@pytest.mark.parametrize(
    ("case", "values", "text"),
    [
        ("topology", ("ring", "owner"), "topology is 'ring' on rank 0 but 'owner' on rank 1"),
        ("seed", (0, 7), "seed is 0 on rank 0 but 7 on rank 1"),
        ("full_precision_every", (100, 99), "full_precision_every is 100 on rank 0 but 99 on rank 1"),
        ("local_steps", (1, 2), "local_steps is 1 on rank 0 but 2 on rank 1"),
        ("compensation_limit", (1.0, None), "compensation_limit is 1.0 on rank 0 but None on rank 1"),
        ("lr", (0.1, 0.2), "lr of group 0 is 0.1 on rank 0 but 0.2 on rank 1"),
        ("global_ratio", (0.3, 0.4), "global_ratio of group 0 is 0.3 on rank 0 but 0.4 on rank 1"),
        ("momentum", (0.9, 0.0), "momentum of group 0 is 0.9 on rank 0 but 0.0 on rank 1"),
        ("algorithm", ("sgd", "adam"), "the optimizer is MarsitSGD on rank 0 but MarsitAdam on rank 1"),
    ],
)
def test_different_construction_is_the_same_error_on_every_rank(case, values, text):
    results = run_ranks(build_differently, 2, case, values, group_timeout=10)
    assert results[0] == results[1]
    assert results[0][0] is DisagreementError
    assert text in results[0][1]


def other_lr(rank: int, world_size: int, topology: str, steps: int, key: str) -> tuple[type | None, str, bool, str]:
    optimizer = MarsitSGD(make(), 1e-2, topology=topology, full_precision_every=3)
    train(optimizer, rank, steps)
    before, group = fingerprint(parameters(optimizer)), optimizer.param_groups[0]
    was = group[key]
    if rank == world_size - 1:
        group[key] = was * 1.01
    set_gradients(optimizer, rank, steps)
    outcome = caught(optimizer.step)
    still = fingerprint(parameters(optimizer)) == before and optimizer.stats()["step"] == steps
    group[key] = was
    train(optimizer, rank, 4, steps + 1)
    return *outcome, still, fingerprint(parameters(optimizer))


@pytest.mark.parametrize("steps", [2, 3], ids=["one-bit", "full precision"])
@EACH_PLACE
def test_another_hyper_parameter_on_one_rank_is_caught_on_all_and_training_can_go_on(topology, world_size, steps):
    for key in ("lr", "global_ratio"):
        results = run_ranks(other_lr, world_size, topology, steps, key, group_timeout=10)
        for kind, message, still, bits in results:
            assert kind is OutOfStepError
            assert f"ranks are out of step after {steps} updates" in message
            assert "hyper-parameters (learning rate and the like)" in message
            assert still
            assert bits == results[0][3]


def step_once_more(rank: int, world_size: int, topology: str) -> tuple[type | None, str, float, str]:
    optimizer = MarsitSGD(make(), 1e-2, topology=topology)
    train(optimizer, rank, 2)
    if rank == 1:
        time.sleep(4)  # alive, but with other things to do
        return None, "", 0.0, ""
    start = time.perf_counter()
    outcome = caught(optimizer.step)
    return *outcome, time.perf_counter() - start, caught(optimizer.step)[1]


@pytest.mark.parametrize("topology", ["ring", "owner"])
def test_a_rank_that_steps_once_more_gets_an_error_and_can_not_go_on(topology):
    kind, message, waited, repeated = run_ranks(step_once_more, 2, topology, group_timeout=2)[0]
    print(f"{topology}: waited {waited:.1f} s for the other rank (limit 10)")
    assert kind is CollectiveError
    assert "after 2 updates" in message
    assert "does not call step() as often as this one" in message
    assert "can't go on" in repeated
    assert waited < 10


def out_of_step(rank: int, world_size: int, topology: str) -> tuple[type | None, str, bool]:
    """The last rank believes that there was one round less."""
    optimizer = MarsitSGD(make(), 1e-2, topology=topology)
    train(optimizer, rank, 3)
    before = fingerprint(parameters(optimizer))
    if rank == world_size - 1:
        optimizer._reduce.rounds -= 1
    set_gradients(optimizer, rank, 3)
    return *caught(optimizer.step), fingerprint(parameters(optimizer)) == before


@EACH_PLACE
def test_a_rank_out_of_step_is_the_same_error_on_every_rank(topology, world_size):
    for kind, message, still in run_ranks(out_of_step, world_size, topology, group_timeout=10):
        assert kind is OutOfStepError
        assert "ranks are out of step after 3 updates" in message
        assert "steps" in message or "number of synchronisations" in message
        assert still


def fail_on_one_rank(rank: int, world_size: int, options: dict, at: int) -> tuple[list[type | None], str, str, int]:
    """Rank 1 has a gradient that can't be used ``at`` steps after a round has begun."""
    optimizer = MarsitSGD(make(), 1e-2, **options)
    local_steps = optimizer.options.local_steps
    train(optimizer, rank, 2 * local_steps)
    before, kinds, message = fingerprint(parameters(optimizer)), [], ""
    for position in range(local_steps):
        set_gradients(optimizer, rank, 2 * local_steps + position)
        if rank == 1 and position == at:
            parameters(optimizer)[0].grad = torch.eye(40, 30).to_sparse()
        kind, text = caught(optimizer.step)
        kinds.append(kind)
        message = text or message
    assert fingerprint(parameters(optimizer)) == before
    train(optimizer, rank, 2 * local_steps, 3 * local_steps)
    return kinds, message, fingerprint(parameters(optimizer)), optimizer.stats()["skipped_steps"]


@pytest.mark.parametrize(
    ("options", "world_size", "at"),
    [
        *(({"topology": topology}, world_size, 0) for topology, world_size in PLACES),
        ({"full_precision_every": 2}, 2, 0),
        *(({"local_steps": 3}, 2, at) for at in range(3)),
        ({"local_steps": 3, "topology": "owner"}, 2, 1),
    ],
    ids=str,
)
def test_an_error_on_one_rank_is_raised_on_all_at_the_next_round_and_nobody_hangs(options, world_size, at):
    results = run_ranks(fail_on_one_rank, world_size, options, at, group_timeout=10)
    for rank, (kinds, message, bits, skipped) in enumerate(results):
        assert kinds[:-1] == [None] * (len(kinds) - 1)
        if rank == 1:
            assert kinds[-1] is TypeError
            assert "gradient of parameter 0 must be dense" in message
        else:
            assert kinds[-1] is AbortedStepError
            assert "another rank could not take the step" in message
        assert bits == results[0][2]
        assert skipped == 1


# ---------------------------------------------------------------- arguments


def build_badly(rank: int, world_size: int, name: str, options: dict) -> tuple[type | None, str]:
    return caught(lambda: MARSIT[name](make(), **options))


@pytest.mark.parametrize(
    ("name", "world_size", "options", "message"),
    [
        ("sgd", 2, {"topology": "tree"}, "topology must be one of 'ring', 'torus', 'owner', got 'tree'"),
        (
            "sgd",
            4,
            {"topology": "torus", "rows": 3},
            "rows must be one of [2] for a torus of 4 workers, or None, got 3",
        ),
        ("sgd", 4, {"topology": "torus", "rows": 2.0}, "rows must be an int or None, got 2.0"),
        ("sgd", 3, {"topology": "torus"}, "needs a world size that is a product of two numbers >= 2, got 3"),
        ("sgd", 1, {"topology": "torus"}, "needs a world size that is a product of two numbers >= 2, got 1"),
        ("sgd", 2, {"rows": 2}, 'rows must be None unless topology is "torus", got 2'),
        ("sgd", 2, {"full_precision_every": -1}, "full_precision_every must be an int >= 0, got -1"),
        ("sgd", 2, {"full_precision_every": 2.5}, "full_precision_every must be an int >= 0, got 2.5"),
        ("sgd", 2, {"local_steps": 0}, "local_steps must be an int >= 1, got 0"),
        ("sgd", 2, {"local_steps": True}, "local_steps must be an int >= 0, got True"),
        ("sgd", 2, {"seed": -1}, "seed must be an int >= 0, got -1"),
        ("sgd", 2, {"momentum": 1.5}, "momentum must be a number in [0, 1), got 1.5"),
        ("sgd", 2, {"global_ratio": 0}, "global_ratio must be a finite number > 0, got 0"),
        ("adam", 2, {"global_ratio": float("nan")}, "global_ratio must be a finite number > 0, got nan"),
        ("adam", 2, {"eps": 0}, "eps must be > 0, got 0"),
        ("sgd", 2, {"compensation_limit": -1}, "compensation_limit must be a finite number >= 0 or None, got -1"),
        (
            "sgd",
            2,
            {"compensation_limit": float("inf")},
            "compensation_limit must be a finite number >= 0 or None, got inf",
        ),
        ("sgd", 2, {"lr": -0.1}, "lr must be a finite number >= 0, got -0.1"),
        ("adam", 2, {"betas": (0.9, 1.0)}, "betas must be two numbers in [0, 1), got (0.9, 1.0)"),
        ("adam", 2, {"weight_decay": -1.0}, "weight_decay must be a finite number >= 0, got -1.0"),
        ("sgd", 2, {"nonfinite": "ignore"}, "nonfinite must be one of 'skip', 'raise', got 'ignore'"),
        ("sgd", 2, {"capturable": True}, "unexpected keyword argument 'capturable'"),
        ("adam", 2, {"capturable": True}, "unexpected keyword argument 'capturable'"),
    ],
    ids=str,
)
def test_bad_arguments_are_one_clear_error_on_every_rank(name, world_size, options, message):
    results = run_ranks(build_badly, world_size, name, options, group_timeout=10)
    assert len(set(results)) == 1
    kind, text = results[0]
    assert kind in (TypeError, ValueError)
    assert message in text


# ---------------------------------------------------------------- clipping


def clipped(rank: int, transport: Transport, local_steps: int) -> list[tuple[float, list[Tensor]]]:
    options: dict = {"momentum": 0.0, "full_precision_every": 1, "local_steps": local_steps}
    optimizer = MarsitSGD(make(), 1e-2, max_grad_norm=0.5, process_group=transport, **options)
    seen = []
    for step in range(4 * local_steps):
        set_gradients(optimizer, rank, step)
        for p in parameters(optimizer):
            p.grad.mul_(1.0 if step % 4 == 3 else 1e-3 if step % 4 == 2 else 1.0 + rank)
        own = torch.linalg.vector_norm(torch.cat([p.grad.reshape(-1).double() for p in parameters(optimizer)]))
        grads = [p.grad.double() for p in parameters(optimizer)]
        before = [p.detach().double() for p in parameters(optimizer)]
        optimizer.step()
        moved = [b - p.detach().double() for p, b in zip(parameters(optimizer), before, strict=True)]
        seen.append((float(own), optimizer.stats()["grad_norm"], grads, moved))
    return seen


def test_with_one_local_step_one_factor_clips_all_ranks_by_the_mean_of_their_norms():
    for of_ranks in zip(*SimulatedGroup(3).run(lambda r, t: clipped(r, t, 1)), strict=True):
        mean = sum(own for own, *_ in of_ranks) / 3
        factor = min(1.0, 0.5 / mean)
        averages = [torch.stack(grads).mean(0) for grads in zip(*(seen[2] for seen in of_ranks), strict=True)]
        for _, told, _, moved in of_ranks:
            assert told == pytest.approx(mean, rel=1e-5)
            for g, m in zip(averages, moved, strict=True):
                torch.testing.assert_close(m, 1e-2 * factor * g, rtol=1e-4, atol=5e-7)


def test_in_local_steps_each_worker_clips_by_its_own_norm():
    for seen in SimulatedGroup(2).run(lambda r, t: clipped(r, t, 2)):
        for own, told, grads, moved in seen[::2]:
            assert told == pytest.approx(own, rel=1e-5)
            for g, m in zip(grads, moved, strict=True):
                torch.testing.assert_close(m, 1e-2 * min(1.0, 0.5 / own) * g, rtol=1e-4, atol=5e-7)


# ---------------------------------------------------------------- loss scaling


def scale_losses(
    rank: int, world_size: int, name: str, options: dict, overflows: tuple[int, ...], scaled: bool
) -> dict[str, Any]:
    """Trains with overflows, each on one rank; or, unscaled, without those steps."""
    optimizer = MARSIT[name](make(), 1e-2, full_precision_every=4, **options)
    scaler = amp.GradScaler("cpu", 2.0**12, growth_interval=5)
    scales, prints = [], []
    for step in range(20):
        if step in overflows and not scaled:
            continue
        set_gradients(optimizer, rank, step)
        if not scaled:
            optimizer.step()
        else:
            for p in parameters(optimizer):
                p.grad = scaler.scale(p.grad)
            if step in overflows and rank == step % world_size:
                parameters(optimizer)[0].grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        if step not in overflows:
            prints.append(fingerprint([*parameters(optimizer), *kept(optimizer)]))
    stats = optimizer.stats()
    equal = fingerprint(parameters(optimizer))
    return {"scales": scales, "prints": prints, "step": stats["step"], "skipped": stats["skipped_steps"], "bits": equal}


@EACH_PLACE
@EACH
def test_an_overflow_on_one_rank_skips_the_round_on_all_and_leaves_no_trace(name, topology, world_size):
    """Rounds count, so overflows do not come where they would shift those of full precision."""
    overflows = (6, 11)
    options = {"topology": topology}
    ranks = run_ranks(scale_losses, world_size, name, options, overflows, True)
    for seen in ranks:
        assert (seen["step"], seen["skipped"]) == (18, 2)
        assert seen["scales"] == ranks[0]["scales"]
        assert seen["bits"] == ranks[0]["bits"]
    falls = [a > b for a, b in zip(ranks[0]["scales"], ranks[0]["scales"][1:], strict=False)]
    assert [step + 1 for step, fell in enumerate(falls) if fell] == list(overflows)


def unscaled(rank: int, world_size: int, name: str) -> tuple[list[str], list[str]]:
    return tuple(scale_losses(rank, world_size, name, {}, (), scaled)["prints"] for scaled in (False, True))


@EACH
def test_gradients_are_unscaled_before_they_count(name):
    for plain, scaled in run_ranks(unscaled, 2, name):
        assert len(plain) == 20
        assert plain == scaled


def overflow_leaves(rank: int, world_size: int, name: str) -> tuple[bool, bool]:
    optimizer, scaler = MARSIT[name](make(), 1e-2, full_precision_every=4), amp.GradScaler("cpu", 2.0**12)
    same = []
    for step in range(8):
        set_gradients(optimizer, rank, step)
        for p in parameters(optimizer):
            p.grad = scaler.scale(p.grad)
        overflowing = step in (4, 6)
        if overflowing and rank == 1:
            parameters(optimizer)[0].grad[0, 0] = float("inf")
        before = [line for line in own_state(optimizer) if full_ignores(step, line)], fingerprint(parameters(optimizer))
        scaler.step(optimizer)
        scaler.update()
        after = [line for line in own_state(optimizer) if full_ignores(step, line)], fingerprint(parameters(optimizer))
        same.append(before == after)
    return [s for i, s in enumerate(same) if i in (4, 6)], any(s for i, s in enumerate(same) if i not in (4, 6))


def full_ignores(step: int, line: str) -> bool:
    """In a skipped round of full precision each worker keeps the mean of all compensations."""
    return step % 4 != 0 or "compensation" not in line


@EACH
def test_an_overflow_changes_neither_parameters_nor_moments_on_any_rank(name):
    for still, others in run_ranks(overflow_leaves, 2, name):
        assert still == [True, True]
        assert not others


# ---------------------------------------------------------------- DDP


def with_ddp(rank: int, world_size: int, name: str, options: dict, wrapped: bool) -> tuple[list[str], int]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = MARSIT[name](net.parameters(), 1e-2, full_precision_every=3, **options)
    model: nn.Module = net
    if wrapped:
        model = DistributedDataParallel(net)
        ddp.attach(model, optimizer)
    prints, sent_in_backward = [], 0
    for step in range(8):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank + 10 * step))
        loss = model(x).square().mean()
        with Sent() as sent:
            loss.backward()
        sent_in_backward += len(sent.calls)
        optimizer.step()
        optimizer.zero_grad()
        prints.append(fingerprint([*parameters(optimizer), *kept(optimizer)]))
    return prints, sent_in_backward


@pytest.mark.parametrize("options", [{}, {"local_steps": 2}], ids=str)
@EACH
def test_ddp_averages_nothing_and_the_bits_are_those_without_it(name, options):
    plain, wrapped = (run_ranks(with_ddp, 2, name, options, way) for way in (False, True))
    for (prints, _), (with_it, sent) in zip(plain, wrapped, strict=True):
        assert sent == 0
        assert prints == with_it
    assert plain[0][0] != plain[1][0], "compensations are each worker's own"


# ---------------------------------------------------------------- torch.compile


def compiled(rank: int, world_size: int, name: str, options: dict, compiles: bool) -> list[str]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = MARSIT[name](net.parameters(), torch.tensor(1e-2), full_precision_every=3, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    update = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager") if compiles else optimizer.step
    prints = []
    for step in range(12):
        optimizer.zero_grad()
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank + 10 * step))
        net(x).square().mean().backward()
        update()
        scheduler.step()
        prints.append(fingerprint([*parameters(optimizer), *kept(optimizer)]))
    if compiles:
        assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (1, 0)
    return prints


@pytest.mark.parametrize("options", [{}, {"local_steps": 2, "topology": "owner"}], ids=str)
@EACH
def test_compiled_steps_are_one_graph_and_the_bits_of_eager_ones(name, options):
    eager, in_a_graph = (run_ranks(compiled, 2, name, options, way) for way in (False, True))
    assert eager == in_a_graph


# ---------------------------------------------------------------- one process, groups, and what is told


@pytest.mark.parametrize("topology", ["ring", "owner"])
@EACH
def test_one_process_needs_no_process_group(name, topology):
    optimizer = MARSIT[name](make(), 1e-2, topology=topology, full_precision_every=0, global_ratio=0.5)
    start = [p.detach().clone() for p in parameters(optimizer)]
    set_gradients(optimizer, 0, 0)
    grads = [p.grad.clone() for p in parameters(optimizer)]
    optimizer.step()
    for p, x, g in zip(parameters(optimizer), start, grads, strict=True):
        decay = 0.01 * x if name == "adam" else 0.0
        update = (g.sign() if name == "adam" else g) + decay
        torch.testing.assert_close(p.detach(), x - 0.005 * update.sign(), rtol=0, atol=1e-6)
    assert optimizer.stats()["bytes_total"] == 0


def grow(rank: int, world_size: int, local_steps: int) -> tuple[tuple, tuple, list[int], str, list[bool]]:
    params = make()
    optimizer = MarsitSGD(params[:3], 1e-2, full_precision_every=4, local_steps=local_steps)
    train(optimizer, rank, 2 * local_steps)
    before = [*kept(optimizer), *(optimizer.momentum(p) for p in params[:3])]
    optimizer.add_param_group({"params": params[3:], "lr": 3e-2, "momentum": 0.5})
    after = [*(optimizer.compensation(p) for p in params[:3]), *(optimizer.momentum(p) for p in params[:3])]
    rounds = [optimizer.stats()["rounds"]]
    train(optimizer, rank, 2 * local_steps, 2 * local_steps)
    rounds.append(optimizer.stats()["rounds"])
    still = [bool(torch.equal(p, q)) for p, q in zip(params, make(), strict=True)]
    outcome: tuple = (None, "")
    if local_steps > 1:
        train(optimizer, rank, 1, 4 * local_steps)
        outcome = caught(lambda: optimizer.add_param_group({"params": [Parameter(torch.ones(3))]}))
        train(optimizer, rank, local_steps - 1, 4 * local_steps + 1)
    differ = caught(lambda: optimizer.add_param_group({"params": [Parameter(torch.ones(3 + rank))]}))
    train(optimizer, rank, local_steps, 5 * local_steps)
    assert len(optimizer.param_groups) == 2
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    return outcome, differ, rounds, fingerprint(params), [*same, not any(still)]


@pytest.mark.parametrize("local_steps", [1, 2])
def test_a_group_can_be_added_between_rounds_and_what_workers_have_stays(local_steps):
    results = run_ranks(grow, 2, local_steps, group_timeout=10)
    for outcome, differ, rounds, bits, good in results:
        assert all(good)
        assert rounds == [2, 4]
        assert bits == results[0][3]
        assert differ[0] is DisagreementError
        if local_steps > 1:
            assert outcome[0] is RuntimeError
            assert "must be called between two rounds, not after 1 of 2 local steps" in outcome[1]


def test_a_group_that_was_added_counts_its_own_updates():
    """AdamW's bias correction begins with the group."""
    torch.manual_seed(0)
    p, q = Parameter(torch.randn(300)), Parameter(torch.randn(300))
    ours = MarsitAdam([p], 1e-2, full_precision_every=1, weight_decay=0.0)
    a, b = Parameter(p.detach().clone()), Parameter(q.detach().clone())
    theirs = torch.optim.AdamW([a], 1e-2, weight_decay=0.0)
    for step in range(8):
        if step == 3:
            ours.add_param_group({"params": [q]})
            theirs.add_param_group({"params": [b]})
        for mine, other in ((p, a), (q, b)):
            mine.grad = torch.randn(300, generator=torch.Generator().manual_seed(step))
            other.grad = mine.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, a, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(q, b, rtol=1e-5, atol=2e-6)


def tell(rank: int, world_size: int) -> tuple[list[dict], str, float]:
    optimizer = MarsitSGD(
        make(), 1e-2, topology="torus", full_precision_every=2, local_steps=2, compensation_limit=None
    )
    seen = []
    for step in range(8):
        train(optimizer, rank, 1, step)
        seen.append(optimizer.stats(compensation=True))
    norm = torch.linalg.vector_norm(torch.cat([c.reshape(-1) for c in kept(optimizer)]))
    return seen, repr(optimizer), float(norm)


def test_stats_and_repr_tell_where_training_stands():
    for seen, text, norm in run_ranks(tell, 4):
        assert [s["step"] for s in seen] == list(range(1, 9))
        assert [s["rounds"] for s in seen] == [0, 1, 1, 2, 2, 3, 3, 4]
        assert [s["local_steps"] for s in seen] == [1, 0] * 4
        assert [s["phase"] for s in seen] == ["local", "uncompressed", "local", "one-bit"] * 2
        assert [s["collectives_step"] for s in seen] == [0, 2, 0, 4] * 2
        assert [s["bytes_step"] == 0 for s in seen] == [True, False] * 4
        assert seen[-1]["compensation_norm"] == pytest.approx(norm, rel=1e-5)
        assert seen[1]["compensation_norm"] == 0
        assert seen[0]["parameters"] == sum(p.numel() for p in make())
        # Momentum, compensation and anchor, and one bit for each element.
        held = seen[-1]["state_bytes"] / (seen[-1]["parameters"] + seen[-1]["padding"])
        assert 12 < held < 14
        assert 0 < seen[-1]["wire_bytes"] < 0.3 * seen[-1]["parameters"]
        for line in ("MarsitSGD", "phase: one-bit, 8 updates", "topology: torus, full precision every 2 rounds"):
            assert line in text
        assert "local_steps: 2" in text
    assert "topology: ring, full precision never\n" in repr(MarsitSGD(make(), full_precision_every=0))


def test_a_schedule_of_torch_drives_it_without_warnings():
    optimizer = MarsitSGD(make(), 1.0, full_precision_every=0, global_ratio=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5):
            before = parameters(optimizer)[0].detach().clone()
            train(optimizer, 0, 1, step)
            moved = (parameters(optimizer)[0].detach() - before).abs()
            torch.testing.assert_close(moved, torch.full_like(moved, 0.5 * 0.5**step), rtol=1e-4, atol=1e-6)
            scheduler.step()
