"""Accumulation over micro-batches is one larger batch, and costs one step's messages."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_runs import Sent
from observe import fingerprint, parameters
from optimizers import ADAM_AND_LAMB, UNGUARDED, construct
from ranks import run_ranks
from torch import Tensor, nn

from fusedonebit.core.optimizer import DistributedOptimizer

FREEZE, STEPS, MICROS, SIZE = 15, 60, 4, 4
ROUNDING = 4 * 2.0**-23
"""Limit of the parameters' relative difference: the bits in which sums of the same numbers in another order differ."""
EPS = 1e-4  # a gradient that all but cancels is rounding itself, which a smaller eps would make an update of full size


def make(name: str) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 120), nn.Tanh(), nn.Linear(120, 60), nn.Tanh(), nn.Linear(60, 4))
    return model, construct(name, model.parameters(), lr=1e-3, eps=EPS, freeze_step=FREEZE, **UNGUARDED)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank + 10 * step)
    x = torch.randn(MICROS * SIZE, 24, generator=generator)
    return x, x[:, :4].sin()


def accumulate(model: nn.Module, rank: int, step: int, micros: int) -> None:
    """The gradient of the whole batch's mean loss, in so many pieces."""
    for x, y in zip(*(part.chunk(micros) for part in batch(rank, step)), strict=True):
        ((model(x) - y).square().mean() / micros).backward()


def signs_sent(optimizer: DistributedOptimizer) -> Tensor:
    """Of the last step: this rank's to the servers, then all of the result's."""
    reduce = optimizer.algorithm.exchange.reducer
    return torch.cat([reduce.to_servers.bits.flatten(), reduce.gathered.bits.flatten()])


def flipped(a: Tensor, b: Tensor) -> int:
    return sum(int((((a ^ b) >> bit) & 1).sum()) for bit in range(8))


def relative(given: list[Tensor], reference: list[Tensor]) -> float:
    """The largest difference, over the largest element of the same tensor."""
    pairs = zip(given, reference, strict=True)
    return max(float((x.detach() - y.detach()).abs().max() / y.detach().abs().max()) for x, y in pairs)


def teacher_forced(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Both take each step from the same state: the one in micro-batches, the other, the teacher, in one batch."""
    (pieces, pupil), (whole, teacher) = make(name), make(name)
    seen: dict[str, Any] = {"signs": 0, "flips": 0, "compared": 0, "worst": 0.0, "least": math.inf, "bits": []}
    for step in range(STEPS):
        before = [p.detach().clone() for p in parameters(teacher)]
        pieces.load_state_dict(whole.state_dict())
        pupil.load_state_dict(copy.deepcopy(teacher.state_dict()))
        for model, optimizer, micros in ((pieces, pupil, MICROS), (whole, teacher, 1)):
            accumulate(model, rank, step, micros)
            optimizer.step()
            optimizer.zero_grad()
        flips = torch.tensor(0)
        if teacher.phase == "compression":
            flips += flipped(signs_sent(pupil), signs_sent(teacher))
            dist.all_reduce(flips)
            seen["signs"] += world_size * 2 * teacher.frame.layout.real_numel
            seen["flips"] += int(flips)
        if flips == 0:
            seen["compared"] += 1
            seen["worst"] = max(seen["worst"], relative(parameters(pupil), parameters(teacher)))
        seen["least"] = min(seen["least"], relative(before, parameters(teacher)))
        seen["bits"].append(fingerprint(parameters(pupil)) == fingerprint(parameters(teacher)))
    assert pupil.phase == teacher.phase == "compression"
    return seen


@pytest.mark.long
@ADAM_AND_LAMB
def test_four_micro_batches_are_one_batch_four_times_as_large(name):
    for seen in run_ranks(teacher_forced, 2, name):
        share = seen["flips"] / seen["signs"]
        print(
            f"{name}: parameters differ by at most {seen['worst']:.1e} of the largest (limit {ROUNDING:.1e}) in the "
            f"{seen['compared']} of {STEPS} steps without a flipped sign; a step changes them by {seen['least']:.1e} "
            f"at least; signs flipped: {seen['flips']} of {seen['signs']} (limit 1e-5)"
        )
        assert not all(seen["bits"]), "the sums must differ, or nothing was compared"
        assert share <= 1e-5
        assert seen["compared"] >= STEPS - seen["flips"]
        assert seen["worst"] <= ROUNDING
        assert seen["least"] > 50 * ROUNDING


# ---------------------------------------------------------------- messages


def sent_in(rank: int, world_size: int, name: str, micros: int) -> dict[str, tuple]:
    """What ``MICROS`` micro-batches send, ``micros`` of them to a step: by stage, before and in the steps."""
    model, optimizer = make(name)
    seen: dict[str, tuple] = {}
    for step in range(FREEZE + 3):
        early: list[tuple[str, int]] = []
        steps: list[tuple[str, int]] = []
        counted = 0
        for _ in range(MICROS // micros):
            with Sent() as sent:
                accumulate(model, rank, step, micros)
            early += sent.calls
            with Sent() as sent:
                optimizer.step()
            steps += sent.calls
            counted += optimizer.stats()["collectives_step"]
            optimizer.zero_grad()
        seen[optimizer.phase] = early, steps, counted
    return seen


@pytest.mark.long(but=1)
@ADAM_AND_LAMB
def test_accumulation_sends_a_quarter_and_only_at_the_boundary(name):
    pairs = zip(run_ranks(sent_in, 2, name, MICROS), run_ranks(sent_in, 2, name, 1), strict=True)
    for accumulated, each in pairs:
        for stage, collectives in (("warmup", 1), ("compression", 2)):
            (early, once, counted), (_, often, counted_often) = accumulated[stage], each[stage]
            print(f"{name}, {stage}: collectives in {MICROS} micro-batches: {len(once)}, not {len(often)}")
            assert early == []
            assert len(once) == counted == collectives
            assert once * MICROS == often
            assert counted_often == MICROS * counted
