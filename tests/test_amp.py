"""Loss scaling: gradients are unscaled before they are averaged, and an overflow on one rank skips the step on all."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from backends import bits_of
from freeze_runs import gradient
from observe import fingerprint, parameters
from optimizers import ADAM_AND_LAMB, MAKE, construct
from ranks import simulate, warned
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import FusedOneBitWarning, amp
from fusedonebit.checkpoint import header_of
from fusedonebit.comm import LocalTransport, Transport
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.sharding import local

STEPS, FREEZE = 200, 60
WARMUP_OVERFLOWS = (0, 5, 6, 20, 33, 47)
FIRST_COMPRESSED = FREEZE + len(WARMUP_OVERFLOWS)
NAN_AT, LOAD_AT = 110, 130
OVERFLOWS = (
    *WARMUP_OVERFLOWS,
    FIRST_COMPRESSED,
    *(75, 90, 91, 100, NAN_AT + 1, 120, LOAD_AT, 145, 160, 170, 180, 190, STEPS - 1),
)
COUNTERS = ("skipped", "steps", "bytes_total", "digest", "digests", "between")
"""Of a checkpoint's header, what counts attempts; the digest is of the last messages, whatever became of
them, and between tensors lie headers of messages."""


def make() -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in ((33, 40), (7,), (300,), (), (1,))]


def set_gradients(optimizer: DistributedOptimizer, rank: int, step: int, scaler: Any = None) -> None:
    for i, p in enumerate(parameters(optimizer)):
        g = gradient(rank, step, p, i)
        p.grad = g if scaler is None else scaler.scale(g)


def spoil(optimizer: DistributedOptimizer, step: int, value: float = float("inf")) -> None:
    grads = [p.grad for p in parameters(optimizer)]
    grads[step % len(grads)].view(-1)[-1] = value


def whole_state(optimizer: DistributedOptimizer) -> dict[str, Any]:
    """Copies of all that a step may change."""
    saved, params = optimizer.state_dict(), parameters(optimizer)
    state: dict[str, Any] = {f"x {i}": p.detach().clone() for i, p in enumerate(params)}
    for i, entries in saved["state"].items():
        state |= {f"{key} {i}": local(v).clone() for key, v in entries.items()}
    state |= {f"momentum {i}": optimizer.momentum(p) for i, p in enumerate(params)}
    if hasattr(optimizer, "worker_error"):
        state |= {f"worker_error in its unit {i}": optimizer.worker_error(p) for i, p in enumerate(params)}
    return state | {f"header {k}": v for k, v in header_of(saved).items() if k not in COUNTERS}


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    assert before.keys() == after.keys()

    def same(a: Any, b: Any) -> bool:
        return torch.equal(bits_of(a), bits_of(b)) if isinstance(a, Tensor) else a == b

    return [key for key in before if not same(before[key], after[key])]


def reloaded(optimizer: DistributedOptimizer, name: str, options: dict) -> DistributedOptimizer:
    params = [Parameter(p.detach().clone()) for p in parameters(optimizer)]
    fresh = construct(name, params, 1e-2, **options)
    fresh.load_state_dict(optimizer.state_dict())
    return fresh


def train(
    rank: int, transport: Transport, name: str, options: dict, steps: int, overflows: tuple[int, ...], scaled: bool
) -> dict[str, Any]:
    """Trains with overflows, each on one rank, the ranks in turn; or, unscaled, without those steps."""
    options = options | {"freeze_step": FREEZE, "process_group": transport}
    optimizer, scaler = construct(name, make(), 1e-2, **options), amp.GradScaler("cpu", 2.0**16, growth_interval=12)
    told: dict[str, Any] = {"scales": [], "prints": {}, "changed": [], "skipped at": [], "phases": []}
    with warned() as caught:
        for step in range(steps):
            overflowing = step in overflows
            if overflowing and not scaled:
                continue
            if step == LOAD_AT and scaled:
                optimizer = reloaded(optimizer, name, options)
            set_gradients(optimizer, rank, step, scaler if scaled and step != NAN_AT else None)
            if overflowing and rank == overflows.index(step) % transport.world_size:
                spoil(optimizer, step)
            if step == NAN_AT and rank == 0:
                spoil(optimizer, step, float("nan"))
            if overflowing:
                optimizer.begin_step()  # so that the freeze, if it is due, counts as before
            before = whole_state(optimizer) if overflowing else {}
            before.pop("header begun", None)
            skipped = optimizer.stats()["skipped_steps"]
            if scaled and step != NAN_AT:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if overflowing:
                told["changed"] += differing(before, whole_state(optimizer))
                told["phases"].append(optimizer.phase)
            else:
                told["prints"][step] = fingerprint(parameters(optimizer))
            if optimizer.stats()["skipped_steps"] > skipped:
                told["skipped at"].append(step)
            told["scales"].append(scaler.get_scale())
    ours = [str(w.message) for w in caught if issubclass(w.category, FusedOneBitWarning)]
    told["warnings"] = [text for text in ours if "coefficient has reached" not in text]
    told["stats"] = optimizer.stats()
    told["end"] = whole_state(optimizer)
    return told


def check_skips(world_size: int, name: str, options: dict, steps: int, overflows: tuple[int, ...]) -> None:
    ranks = simulate(train, world_size, name, options, steps, overflows, True)
    without = simulate(train, world_size, name, options, steps, overflows, False)
    bad = [NAN_AT] if steps > NAN_AT else []
    stats = ranks[0]["stats"]
    skipped = f"{len(overflows)} overflows, {stats['skipped_steps']} of {steps} steps skipped on each rank"
    print(f"{name} {options}, {world_size} ranks: {skipped}; loss scale at the end {ranks[0]['scales'][-1]:g}")
    for told, reference in zip(ranks, without, strict=True):
        assert told["skipped at"] == sorted([*overflows, *bad])
        assert told["stats"]["skipped_steps"] == len(overflows) + len(bad)
        assert told["changed"] == []
        assert told["scales"] == ranks[0]["scales"]
        assert told["prints"] == reference["prints"] == ranks[0]["prints"]
        assert differing(told["end"], reference["end"]) == []
        assert told["stats"]["vetoed_steps"] == 0
        assert told["phases"] == ["warmup" if step < FIRST_COMPRESSED else "compression" for step in overflows]
        assert len(told["warnings"]) == len(bad)  # of the NaN, not of overflows
    scales = ranks[0]["scales"]
    assert {a < b for a, b in pairwise(scales) if a != b} == {True, False}  # it has gone down and up


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"), [("onebit-adam", {}), ("onebit-adam", {"ternary": True}), ("onebit-lamb", {})]
)
def test_overflows_on_one_rank_skip_on_all_and_leave_no_trace(name, options):
    assert len(OVERFLOWS) == 20
    check_skips(2, name, options, STEPS, OVERFLOWS)


@pytest.mark.long(but=1)
@ADAM_AND_LAMB
def test_overflows_on_one_of_four_ranks(name):
    check_skips(4, name, {}, 80, tuple(step for step in OVERFLOWS if step < 80))


# ---------------------------------------------------------------- torch's own scaler


def unscaled_first(rank: int, transport: Transport, name: str, exponents: list[int] | None) -> list[str]:
    """Each rank with a loss scale of its own, 2**exponent; None: with no scaler."""
    optimizer = construct(name, make(), 1e-2, freeze_step=12, guard="off", process_group=transport)
    scaler = torch.amp.GradScaler("cpu", 2.0 ** exponents[rank] if exponents else 1.0, enabled=exponents is not None)
    prints = []
    for step in range(30):
        set_gradients(optimizer, rank, step, scaler)
        scaler.step(optimizer)
        scaler.update()
        prints.append(fingerprint(parameters(optimizer)))
    return prints


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb", "lamb"])
def test_differently_scaled_gradients_are_unscaled_then_averaged(name):
    plain, scaled = (simulate(unscaled_first, 2, name, exponents) for exponents in (None, [4, 15]))
    assert plain == scaled
    assert scaled[0] == scaled[1]


def drift(rank: int, transport: Transport, name: str, on: list[int], steps: tuple[int, ...], ours: bool) -> dict:
    optimizer = MAKE[name](make(), lr=1e-2, process_group=transport)
    scaler = (amp if ours else torch.amp).GradScaler("cpu", 2.0**10)
    prints, scales = [], []
    with warned() as caught:
        for step in range(10):
            set_gradients(optimizer, rank, step, scaler)
            if step in steps and rank in on:
                spoil(optimizer, step)
            scaler.step(optimizer)
            scaler.update()
            prints.append(fingerprint(parameters(optimizer)))
            scales.append(scaler.get_scale())
    texts = [str(w.message) for w in caught if issubclass(w.category, FusedOneBitWarning)]
    texts = [text for text in texts if "so few updates" not in text]
    skipped = optimizer.stats()["skipped_steps"]
    return {"warnings": texts, "scales": scales, "skipped": skipped, "prints": prints}


WARM_UP_OR_COMPRESSION = pytest.mark.parametrize("at", [(0, 1), (7, 8)], ids=["warm-up", "compression"])


def fallen(at: tuple[int, ...]) -> list[float]:
    """A scale that falls in these steps alone."""
    return [2.0 ** (10 - sum(each <= step for each in at)) for step in range(10)]


@WARM_UP_OR_COMPRESSION
def test_torchs_scaler_skips_together_and_warns_once_of_drift(at):
    ranks = simulate(drift, 2, "OneBitAdam", [1], at, False)
    for told in ranks:
        assert told["skipped"] == 2
        assert told["prints"] == ranks[0]["prints"]
        (text,) = told["warnings"]
        assert "fusedonebit.amp.GradScaler" in text
    assert [told["scales"] for told in ranks] == [fallen(()), fallen(at)]


@WARM_UP_OR_COMPRESSION
@pytest.mark.parametrize(
    ("name", "on", "ours"),
    [("OneBitAdam", [0, 1], False), *((name, [1], True) for name in MAKE if name != "ZeroOneAdam")],  # its rounds grow
    ids=str,
)
def test_nobody_is_warned_where_scales_stay_equal(name, on, ours, at):
    ranks = simulate(drift, 2, name, on, at, ours)
    for told in ranks:
        assert (told["skipped"], told["warnings"], told["scales"]) == (2, [], fallen(at))
        assert told["prints"] == ranks[0]["prints"]


@pytest.mark.parametrize("name", [name for name in MAKE if name != "ZeroOneAdam"])
def test_torchs_scaler_alone_skips_without_a_warning(name):
    told = drift(0, LocalTransport(), name, [0], (2, 3, 7), False)
    assert (told["skipped"], told["warnings"], told["scales"]) == (3, [], fallen((2, 3, 7)))


# ---------------------------------------------------------------- how scalers are used


def with_unscale(rank: int, transport: Transport, first: bool) -> tuple[list[str], list[float], list[bool]]:
    optimizer = construct("onebit-adam", make(), 1e-2, freeze_step=6, process_group=transport)
    scaler = amp.GradScaler("cpu", 2.0**10)
    was_none: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: was_none.append(optimizer.grad_scale is None))
    prints, scales = [], []
    for step in range(14):
        set_gradients(optimizer, rank, step, scaler)
        if step in (3, 9) and rank == 1:
            spoil(optimizer, step)
        if first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        prints.append(fingerprint(parameters(optimizer)))
        scales.append(scaler.get_scale())
    return prints, scales, was_none


def test_unscaling_first_is_the_same():
    first, later = (simulate(with_unscale, 2, first) for first in (True, False))
    for (prints, scales, was_none), (expected, _, had_one) in zip(first, later, strict=True):
        assert prints == expected
        assert scales == first[0][1]
        assert scales[-1] == 2.0**8
        assert all(was_none)
        assert not any(had_one)


def train_alone(scaler: torch.amp.GradScaler | None, steps: int = 12) -> str:
    optimizer = construct("onebit-adam", make(), 1e-2, freeze_step=6)
    for step in range(steps):
        set_gradients(optimizer, 0, step, scaler)
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
    assert not hasattr(optimizer, "grad_scale")
    return fingerprint(parameters(optimizer))


def test_a_disabled_scaler_does_nothing():
    assert train_alone(amp.GradScaler("cpu", enabled=False)) == train_alone(None)


def test_a_scalers_checkpoint_is_torchs():
    scaler = amp.GradScaler("cpu", 2.0**8, growth_interval=5)
    train_alone(scaler)
    for again in (amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        again.load_state_dict(scaler.state_dict())
        assert again.state_dict() == scaler.state_dict()
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (2.0**10, 2)


def test_other_optimizers_may_share_the_scaler():
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    ours, torchs = construct("lamb", [p], freeze_step=1), torch.optim.SGD([q], lr=1.0)
    scaler = amp.GradScaler("cpu", 4.0)
    p.grad, q.grad = scaler.scale(torch.ones(3)), torch.tensor([1.0, float("inf"), 1.0])
    for optimizer in (ours, torchs):
        scaler.step(optimizer)
    scaler.update()
    assert (ours.stats()["step"], q.tolist(), scaler.get_scale()) == (1, [1.0, 1.0, 1.0], 2.0)


def without_gradients(rank: int, transport: Transport) -> tuple[str, int, float]:
    optimizer = construct("onebit-adam", make(), freeze_step=3, guard="off", process_group=transport)
    scaler = amp.GradScaler("cpu", 2.0**10)
    for step in range(8):
        set_gradients(optimizer, rank, step, scaler)
        if rank == 1 and step in (1, 2, 5, 6):  # rank 0 overflows in 2 and 6
            optimizer.zero_grad()
        elif step in (2, 6):
            spoil(optimizer, step)
        scaler.step(optimizer)
        scaler.update()
    return fingerprint(parameters(optimizer)), optimizer.stats()["skipped_steps"], scaler.get_scale()


def test_a_rank_without_any_gradient_takes_part():
    one, other = simulate(without_gradients, 2)
    assert one == other
    assert one[1:] == (2, 2.0**8)


@pytest.mark.filterwarnings("ignore:step.. found no gradient")
def test_torchs_scaler_works_where_nothing_has_a_gradient():
    optimizer, scaler = construct("onebit-adam", make(), freeze_step=1), torch.amp.GradScaler("cpu", 4.0)
    set_gradients(optimizer, 0, 0, scaler)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.step(optimizer)
    assert (optimizer.phase, optimizer.stats()["skipped_steps"]) == ("compression", 0)


def test_a_step_that_fails_leaves_no_loss_scale_behind():
    p = Parameter(torch.ones(4))
    optimizer, scaler = construct("onebit-adam", [p], freeze_step=5), amp.GradScaler("cpu", 4.0)
    optimizer.param_groups[0]["lr"] = -1.0
    p.grad = scaler.scale(torch.ones(4))
    with pytest.raises(ValueError, match="lr must be"):
        scaler.step(optimizer)
    optimizer.param_groups[0]["lr"] = 1e-3
    scaler.step(optimizer)
    assert torch.equal(optimizer.momentum(p), torch.full((4,), 0.1))
