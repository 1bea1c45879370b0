"""A round that a GradScaler, or a bad gradient, has skipped is made up for: it uses up nothing that comes seldom."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from optimizers import by_name
from torch.nn import Parameter

from fusedonebit import MarsitAdam, MarsitSGD, Rounds, ZeroOneAdam, amp, policies
from fusedonebit.comm import SimulatedGroup
from fusedonebit.core.telemetry import HostMirror
from fusedonebit.deepspeed import DeepSpeedRounds, DeepSpeedVariance

SHAPES = ((30, 11), (77,))


def parameters() -> list[Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


class Run:
    """One rank's training, in which one rank's gradients are spoiled in some calls of ``step``."""

    def __init__(self, rank: int, make: Any, scaled: bool) -> None:
        self.rank, self.make, self.params = rank, make, parameters()
        self.optimizer = make(self.params)
        self.scaler = amp.GradScaler("cpu", 256.0, growth_interval=1000, enabled=scaled)
        self.phases: list[str] = []

    def resume(self) -> None:
        saved = self.optimizer.state_dict()
        self.optimizer = self.make(self.params)
        self.optimizer.load_state_dict(saved)

    def step(self, number: int, spoiled: bool) -> None:
        """``number`` says which gradients; ``spoiled`` whether rank 1 has an infinite one."""
        draw = torch.Generator().manual_seed(100 * self.rank + number)
        for p in self.params:
            p.grad = self.scaler.scale(torch.randn(p.shape, generator=draw))
        if spoiled and self.rank == 1:
            self.params[0].grad[0, 0] = torch.inf
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.phases.append(self.optimizer.phase)

    def values(self) -> np.ndarray:
        return torch.cat([p.detach().reshape(-1) for p in self.params]).numpy()


def simulate(job: Any) -> list[Any]:
    results = SimulatedGroup(2).run(job)
    assert all(result[0] == results[0][0] for result in results)
    return [result[0] for result in results]


SCALED = pytest.mark.parametrize("scaled", [True, False], ids=["by a scaler", "bad gradient"])
RESUMED = pytest.mark.parametrize("resumed", [False, True], ids=["", "through a checkpoint"])
QUIET = pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")


@pytest.mark.long(but=2)
@QUIET
@SCALED
@RESUMED
@pytest.mark.parametrize("skipped", [(0, 1, 4, 7), (1, 2, 3, 4), (2, 4, 5)], ids=str)
@pytest.mark.parametrize("make", [by_name(MarsitSGD), by_name(MarsitAdam)], ids=["sgd", "adam"])
def test_skipped_full_precision_rounds_are_made_up_for(make, skipped, scaled, resumed):
    """Other rounds that are skipped do not count."""

    def job(rank: int, transport: Any) -> tuple[list[str], bool]:
        run = Run(rank, lambda p: make(p, process_group=transport, full_precision_every=4), scaled)
        for number in range(13):
            run.step(number, number in skipped)
            if resumed:
                run.resume()
        return run.phases, True

    counted = [sum(before not in skipped for before in range(number)) for number in range(13)]
    assert simulate(job)[0] == ["one-bit" if count % 4 else "uncompressed" for count in counted]


@QUIET
def test_local_steps_count_with_their_round():
    def job(rank: int, transport: Any) -> tuple[list[str], bool]:
        rounds = Rounds(full_precision_every=2, local_steps=2)
        run = Run(rank, lambda p: MarsitSGD(p, process_group=transport, rounds=rounds), True)
        for number in range(10):
            run.step(number, number in (1, 5))
        return run.phases, True

    rounds = simulate(job)[0][1::2]
    assert rounds == ["uncompressed", "uncompressed", "one-bit", "one-bit", "uncompressed"]


POLICIES = {
    "steps": (policies.DoublingVariance(scaler=2, until=9), policies.EveryStep()),
    "rounds of several": (policies.DoublingVariance(scaler=1, until=5), policies.DoublingRounds(4, 1, 4)),
    "DeepSpeed's": (DeepSpeedVariance(12, 2), DeepSpeedRounds(8, 4, 4)),
}


@pytest.mark.long(but=1)
@QUIET
@SCALED
@RESUMED
@pytest.mark.parametrize("which", POLICIES)
def test_policies_of_zero_one_adam_do_not_count_what_was_skipped(which, scaled, resumed):
    """Each round that is skipped is the same round once more."""
    variance, sync = POLICIES[which]

    def follow(rank: int, transport: Any, spoil: tuple[int, ...]) -> tuple[list[str], list[int]]:
        """Rounds, by number, that end badly at first."""
        make = lambda p: ZeroOneAdam(p, variance_policy=variance, sync_policy=sync, process_group=transport)  # noqa: E731
        run, ended, bad, number = Run(rank, make, scaled), [], set(spoil), 0
        while len(ended) < 9:
            number += 1
            spoiling = len(ended) in bad
            run.step(number, spoiling)
            told = run.optimizer.stats()
            if told["local_steps"]:
                continue
            if spoiling:
                bad.discard(len(ended))
            else:
                ended.append(f"{run.phases[-1]} of {told['round_steps']}")
            assert told["rounds"] == len(ended)
            if resumed:
                run.resume()
        return ended, [number]

    plain = simulate(lambda rank, transport: follow(rank, transport, ()))
    again = simulate(lambda rank, transport: follow(rank, transport, (0, 1, 3, 6)))
    assert plain == again
    assert len(set(plain[0])) > 1


@QUIET
def test_rounds_aligned_to_calls_stay_aligned_after_skips():
    sync = policies.AlignedRounds(policies.DoublingRounds(0, 1, 4), 6)
    variance = policies.DoublingVariance(scaler=1, until=1)

    def job(rank: int, transport: Any) -> tuple[list[int], bool]:
        make = lambda p: ZeroOneAdam(p, variance_policy=variance, sync_policy=sync, process_group=transport)  # noqa: E731
        run, together = Run(rank, make, True), []
        for call in range(1, 25):
            run.step(call, call in (2, 3, 11))
            if run.optimizer.algorithm.synchronised:
                together.append(call)
        return together, True

    assert {6, 12, 18, 24} <= set(simulate(job)[0])


ZERO_ONE = {
    "variance_policy": policies.DoublingVariance(scaler=2),
    "sync_policy": policies.DoublingRounds(after=4, scaler=2, most=4),
}


@pytest.mark.long(but=1)
@QUIET
@pytest.mark.parametrize("make", [by_name(MarsitSGD, full_precision_every=4), by_name(ZeroOneAdam, **ZERO_ONE)])
def test_ranks_agree_on_rounds_though_one_has_looked_early(make):
    """On CUDA flags arrive a step late; ``stats()`` waits for them."""

    def job(rank: int, transport: Any, looking: bool) -> tuple[list[str], bool]:
        run = Run(rank, partial(make, process_group=transport), True)
        run.optimizer.frame.steps.outcomes._mirror = HostMirror(run.optimizer.frame.device, depth=1)
        for call in range(24):
            run.step(call, call in (0, 1, 2, 5, 6))
            if looking and rank == 0:
                run.optimizer.stats()
        return run.phases, True

    alone = simulate(lambda rank, transport: job(rank, transport, False))
    assert simulate(lambda rank, transport: job(rank, transport, True)) == alone
