"""Marsit with clipping and loss scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marsit_rounds import EACH, EACH_PLACE, MARSIT, make, set_gradients
from observe import fingerprint, parameters
from optimizers import objects
from ranks import run_ranks
from torch import Tensor

from fusedonebit import MarsitSGD, amp
from fusedonebit.comm import SimulatedGroup, Transport

# ---------------------------------------------------------------- clipping


def clipped(rank: int, transport: Transport, local_steps: int) -> list[tuple[float, list[Tensor]]]:
    options: dict = {"momentum": 0.0, "full_precision_every": 1, "local_steps": local_steps}
    optimizer = MarsitSGD(make(), 1e-2, max_grad_norm=0.5, process_group=transport, **objects(**options))
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


def test_with_one_local_step_the_mean_norm_clips_all_ranks():
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


def scale_losses(rank: int, world_size: int, name: str, topology: str, overflows: tuple[int, ...]) -> dict[str, Any]:
    """Trains with overflows, each on one rank."""
    optimizer = MARSIT[name](make(), 1e-2, full_precision_every=4, topology=topology)
    scaler, scales = amp.GradScaler("cpu", 2.0**12, growth_interval=5), []
    for step in range(20):
        set_gradients(optimizer, rank, step)
        for p in parameters(optimizer):
            p.grad = scaler.scale(p.grad)
        if step in overflows and rank == step % world_size:
            parameters(optimizer)[0].grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    stats = optimizer.stats()
    equal = fingerprint(parameters(optimizer))
    return {"scales": scales, "step": stats["step"], "skipped": stats["skipped_steps"], "bits": equal}


@pytest.mark.long(but=1)
@EACH_PLACE
@EACH
def test_one_ranks_overflow_skips_the_round_and_leaves_no_trace(name, topology, world_size):
    """Rounds count, so overflows do not come where they would shift those of full precision."""
    overflows = (6, 11)
    ranks = run_ranks(scale_losses, world_size, name, topology, overflows)
    for seen in ranks:
        assert (seen["step"], seen["skipped"]) == (18, 2)
        assert seen["scales"] == ranks[0]["scales"]
        assert seen["bits"] == ranks[0]["bits"]
    falls = [a > b for a, b in zip(ranks[0]["scales"], ranks[0]["scales"][1:], strict=False)]
    assert [step + 1 for step, fell in enumerate(falls) if fell] == list(overflows)
