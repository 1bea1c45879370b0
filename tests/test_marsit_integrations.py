"""Marsit with clipping, loss scales, DistributedDataParallel and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_runs import Sent
from marsit_rounds import EACH, EACH_PLACE, MARSIT, kept, make, own_state, set_gradients
from observe import fingerprint, parameters
from optimizers import objects
from ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from fusedonebit import MarsitSGD, amp, ddp
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


@pytest.mark.long(but=1)
@EACH_PLACE
@EACH
def test_one_ranks_overflow_skips_the_round_and_leaves_no_trace(name, topology, world_size):
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


@pytest.mark.long(but=1)
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


@pytest.mark.long(but=1)
@EACH
def test_an_overflow_changes_no_parameter_and_no_moment(name):
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


@pytest.mark.long(but=1)
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


@pytest.mark.long(but=1)
@pytest.mark.parametrize("options", [{}, {"local_steps": 2, "topology": "owner"}], ids=str)
@EACH
def test_compiled_steps_are_one_graph_and_the_bits_of_eager_ones(name, options):
    eager, in_a_graph = (run_ranks(compiled, 2, name, options, way) for way in (False, True))
    assert eager == in_a_graph
