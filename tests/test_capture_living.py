"""Replays of captured steps have the bits of a run of steps; others between them renew a variance that lives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from optimizers import FROZEN, LIVING, ONEBIT, UNGUARDED
from ranks import run_ranks
from tape import capturing, in_a_capture
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from fusedonebit import FusedOneBitWarning

SHAPES = ((300,), (20, 9), (40,))
WARMUP, EASED, STEPS = 5, 25, 230
CAPTURED = WARMUP + EASED + 3
SCALED_BY, OVERFLOWS = 8.0, (CAPTURED + 7, CAPTURED + 20)
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without easing": {"scale_norm": "contractive"},
    "undivided": {"precondition": False},
    "layers": {"scale_scope": "layer", "precondition": False, **UNGUARDED},
    "ternary": {"ternary": True},
    "buckets": {"buckets": 2},
    "clipped": {"max_grad_norm": 0.5},
    "loss scaled": {},
    "a head without gradients": {},
    "state in bfloat16": {"state": "bf16"},
    "state in codes": {"state": "8bit"},
    "two levels": {},
}
OF_A_FROZEN = ("plain", "layers", "ternary", "clipped", "loss scaled")
OF_A_LIVING = [extra for extra in EXTRAS if extra not in ("layers", "ternary")]
REFUSED = ("undivided", "state in bfloat16", "state in codes", "two levels")
"""All but the last by a living LAMB; that has nothing of its own."""
CASES = [
    *((name, extra) for name in FROZEN for extra in OF_A_FROZEN),
    *((name, extra) for name in LIVING for extra in OF_A_LIVING if "lamb" not in name or extra not in REFUSED),
]


class Run:
    """A training run of one rank on random gradients, which stay where they are, at a rate that falls."""

    def __init__(self, rank: int, name: str, extra: str) -> None:
        torch.manual_seed(0)
        self.params = [Parameter(torch.randn(shape)) for shape in SHAPES]
        self.trained = self.params[: 2 if extra == "a head without gradients" else 3]
        for p in self.trained:
            p.grad = torch.zeros_like(p)
        options = {"lr": 2**-7, "betas": (0.9, 0.99), "capturable": True} | EXTRAS[extra]
        options |= {"warmup": WARMUP} if name in LIVING else {"freeze_step": WARMUP}
        if extra == "two levels":
            options["hierarchy"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "gpus"))
        self.optimizer: Any = ONEBIT[name](self.params, **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 2 * STEPS)
        self.rank, self.extra, self.scaled = rank, extra, extra == "loss scaled"
        if self.scaled:  # what a GradScaler sets for the time of a step
            self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(SCALED_BY), torch.tensor(0.0)

    def step(self, t: int, take: Callable[[], Any]) -> None:
        for i, p in enumerate(self.trained):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + self.rank + 10 * t + 10_000 * i))
            p.grad.copy_(g * 10.0**i * 0.97**t * (SCALED_BY if self.scaled else 1.0))
        if self.scaled:
            self.optimizer.found_inf.fill_(float(t in OVERFLOWS and self.rank == 1))
        take()
        self.scheduler.step()

    def captured(self) -> Callable[[], Any]:
        """Captures a step; returns what replays it."""
        if self.extra == "two levels":  # a tape can't: gloo's reduce-scatter ends in copies that are none of its ops
            return self.as_captured
        with capturing() as tape:
            self.optimizer.step()
        return tape.replay

    def as_captured(self) -> None:
        """Does what a replay does."""
        with in_a_capture():
            self.optimizer.step()

    def warm_up(self) -> None:
        for t in range(CAPTURED):
            self.step(t, self.optimizer.step)


def train(rank: int, world_size: int, name: str, extra: str, stepped: Collection[int] | None) -> tuple[Any, ...]:
    """Replays two graphs by turns, but for the steps that are ``stepped``, and the last; None: all are."""
    run = Run(rank, name, extra)
    optimizer, told = run.optimizer, []
    run.warm_up()
    replays = [] if stepped is None else [run.captured() for _ in range(2)]  # both before the first replay
    for t in range(CAPTURED, STEPS):
        plain = stepped is None or t in stepped or t == STEPS - 1
        run.step(t, optimizer.step if plain else replays[t % 2])
        told += [t] * (plain and name in LIVING and optimizer.algorithm.compression.variance.due)
    stats = optimizer.stats()
    counts = ("phase", "step", "skipped_steps", "vetoed_steps", "renewals", "grad_norm", "update_norm")
    errors = [optimizer.worker_error(p) for p in run.params]
    told = [told, *(stats.get(key) for key in counts)]
    return [p.detach() for p in run.params], [optimizer.momentum(p) for p in run.params], errors, told


@pytest.mark.long(but=3, full=True)
@pytest.mark.parametrize(("name", "extra"), CASES)
def test_replays_with_renewing_steps_have_an_eager_runs_bits(name, extra):
    ranks = 4 if extra == "two levels" else 2
    plain = run_ranks(train, ranks, name, extra, None)
    renews = plain[0][3][0]
    mixed = run_ranks(train, ranks, name, extra, renews)
    if name in LIVING:
        assert len(renews) >= 5
        assert len(renews) < (STEPS - CAPTURED) / 10, "nearly all are replayed"
    for rank in range(ranks):
        *tensors, told = mixed[rank]
        *expected, told_expected = plain[rank]
        assert told == told_expected
        skipped = 2 * (extra == "loss scaled")
        assert told[1:5] == ["compression", STEPS - skipped, skipped, 0 if name in LIVING else told[4]]
        for ours, theirs in zip(tensors, expected, strict=True):
            assert all(map(torch.equal, ours, theirs))
        assert all(map(torch.equal, tensors[0], mixed[0][0]))
    assert not torch.equal(mixed[0][2][0], mixed[1][2][0])


def test_a_step_is_captured_once_scales_are_measured_as_later():
    run = Run(0, "onebit-adam-living", "plain")
    for t in range(WARMUP + 10):
        run.step(t, run.optimizer.step)
    with in_a_capture(), pytest.raises(RuntimeError, match=r"first 25 after the warm-up.*take 16 more uncaptured"):
        run.optimizer.step()
    for t in range(16):
        run.step(WARMUP + 10 + t, run.optimizer.step)
    run.captured()


def test_who_replays_for_long_without_a_step_that_renews_is_told():
    run = Run(0, "onebit-adam-living", "plain")
    run.warm_up()
    replay, renewals = run.captured(), run.optimizer.stats()["renewals"]
    for t in range(CAPTURED, CAPTURED + 90):
        run.step(t, replay)
    run.step(CAPTURED + 90, run.optimizer.step)
    assert run.optimizer.stats()["renewals"] == renewals + 1, "however many steps were replayed before"
    for t in range(CAPTURED + 91, CAPTURED + 200):
        run.step(t, replay)
    with pytest.warns(FusedOneBitWarning, match=r"109 steps were replayed.*an uncaptured step in each 50"):
        run.step(CAPTURED + 200, run.optimizer.step)
    assert run.optimizer.stats()["renewals"] == renewals + 2


def test_after_a_load_replays_of_before_count_no_more():
    run = Run(0, "onebit-adam-living", "plain")
    run.warm_up()
    saved, replay = copy.deepcopy(run.optimizer.state_dict()), run.captured()
    for t in range(CAPTURED, CAPTURED + 30):
        run.step(t, replay)
    run.optimizer.load_state_dict(saved)
    since = run.optimizer.algorithm.compression.variance.since
    run.step(CAPTURED, run.optimizer.step)
    assert run.optimizer.algorithm.compression.variance.since in (0, since + 1)
