"""Accumulation over micro-batches is one larger batch, and costs one step's messages."""

from __future__ import annotations

import pytest
import torch
from ddp_runs import Sent
from observe import fingerprint, parameters
from optimizers import ADAM_AND_LAMB, UNGUARDED, construct
from ranks import run_ranks
from torch import Tensor, nn

from fusedonebit.core.optimizer import DistributedOptimizer

FREEZE, MICROS, SIZE = 15, 4, 4


def make(name: str) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 120), nn.Tanh(), nn.Linear(120, 60), nn.Tanh(), nn.Linear(60, 4))
    return model, construct(name, model.parameters(), lr=1e-3, freeze_step=FREEZE, **UNGUARDED)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank + 10 * step)
    x = torch.randn(MICROS * SIZE, 24, generator=generator)
    return x, x[:, :4].sin()


def accumulate(model: nn.Module, rank: int, step: int, micros: int) -> None:
    """The gradient of the whole batch's mean loss, in so many pieces."""
    for x, y in zip(*(part.chunk(micros) for part in batch(rank, step)), strict=True):
        ((model(x) - y).square().mean() / micros).backward()


@ADAM_AND_LAMB
def test_a_step_takes_what_micro_batches_have_added_up(name):
    """In both stages, and nothing before; that this is the whole batch's gradient is torch's promise."""
    (model, optimizer), (other, given) = make(name), make(name)
    for step in range(FREEZE + 5):
        accumulate(model, 0, step, MICROS)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = p.grad.clone()
        for each in (optimizer, given):
            each.step()
            each.zero_grad()
        assert fingerprint(parameters(optimizer)) == fingerprint(parameters(given)), step
    assert optimizer.phase == "compression"


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
