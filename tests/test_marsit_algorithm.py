"""Marsit's Algorithms 1 and 2 in float64 beside the implementation: ``marsit_in_float64``."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from marsit_in_float64 import LIMIT, MARSIT, SHAPES, compare, gradient, make, run
from torch import Tensor
from torch.nn import Parameter

from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.core.optimizer import DistributedOptimizer

EACH = pytest.mark.parametrize("name", MARSIT)

# ---------------------------------------------------------------- line by line

TORCH = {
    "sgd": {"momentum": 0.9, "weight_decay": 0.05},
    "adam": {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05},
}
PLACES = [("ring", 3), ("torus", 4), ("owner", 3), ("ring", 1)]


@pytest.mark.long(but=1)
@EACH
@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize(("topology", "world_size"), PLACES)
def test_every_line_of_the_algorithms_in_float64(name, topology, world_size, local_steps):
    options = TORCH[name] | {"topology": topology, "local_steps": local_steps, "full_precision_every": 4}
    options |= {"compensation_limit": None, "global_ratio": 0.7}
    ranks = run(world_size, name, 10 * local_steps, options)
    what = f"{name}, {topology} of {world_size}, {local_steps} local steps"
    found = compare(name, ranks, [TORCH[name]], ratio=0.7, k=4, local_steps=local_steps, what=what)
    if world_size > 1:
        assert min(found.agreeing, found.split) > 100


@pytest.mark.long(but=1)
@EACH
def test_without_full_precision_compensation_starts_in_round_one(name):
    options = TORCH[name] | {"full_precision_every": 0, "compensation_limit": None, "global_ratio": 0.7}
    ranks = run(3, name, 12, options)
    assert [m.phase for m in ranks[0][1:]] == ["one-bit"] * 12
    compare(name, ranks, [TORCH[name]], ratio=0.7, k=0, what=f"{name}, K=0")


@pytest.mark.long(but=1)
@pytest.mark.parametrize("limit", [0.0, 0.5, 1.0])
@EACH
def test_the_compensation_is_clipped_in_units_of_the_global_step(name, limit):
    options = TORCH[name] | {"full_precision_every": 5, "compensation_limit": limit, "global_ratio": 0.7}
    options |= {"local_steps": 2}
    ranks = run(3, name, 24, options)
    what = f"{name}, limit {limit}"
    compare(name, ranks, [TORCH[name]], ratio=0.7, k=5, local_steps=2, limit=limit, what=what)
    reached = limit * 0.7 * 1e-2 * 2
    kept = [np.abs(c) for moments in ranks for m in moments if m.phase == "one-bit" for c in m.c]
    clipped = sum(int((c >= 0.999 * reached).sum()) for c in kept)
    print(f"{what}: compensations at the limit: {clipped} of {sum(c.size for c in kept)}")
    assert clipped > 100


@pytest.mark.long(but=1)
@pytest.mark.parametrize("kind", ["float", "tensor"])
@EACH
def test_both_stepsizes_follow_a_schedule(name, kind):
    def schedule(optimizer: DistributedOptimizer, step: int) -> None:
        rate = 1e-2 * 0.8**step
        if kind == "tensor":
            optimizer.param_groups[0]["lr"].fill_(rate)
        else:
            optimizer.param_groups[0]["lr"] = rate

    options = TORCH[name] | {"full_precision_every": 6, "compensation_limit": None, "global_ratio": 0.7}
    options |= {"local_steps": 2, "lr": torch.tensor(1e-2) if kind == "tensor" else 1e-2}
    ranks = run(2, name, 12, options, schedule=schedule)
    assert len({m.lr[0] for m in ranks[0]}) == 12
    compare(name, ranks, [TORCH[name]], ratio=0.7, k=6, local_steps=2, what=f"{name}, lr as a {kind}")


@pytest.mark.long(but=1)
@EACH
def test_groups_have_their_own_hyper_parameters(name):
    other = {"momentum": 0.5} if name == "sgd" else {"betas": (0.6, 0.9), "eps": 1e-3}
    other |= {"weight_decay": 0.0, "maximize": True}

    def groups(params: list[Parameter]) -> list[dict]:
        return [{"params": params[:2]}, {"params": params[2:], "lr": 3e-2, **other}]

    options = TORCH[name] | {"full_precision_every": 5, "compensation_limit": None, "global_ratio": 0.7}
    ranks = run(3, name, 12, options, groups)
    kinds = [TORCH[name], other]
    compare(name, ranks, kinds, ratio=0.7, k=5, group_of=[0, 0, 1, 1], what=f"{name}, two groups")


@EACH
def test_a_group_has_its_own_global_ratio(name):
    def groups(params: list[Parameter]) -> list[dict]:
        return [{"params": params[:1], "global_ratio": 0.25}, {"params": params[1:]}]

    (moments,) = run(1, name, 3, {"full_precision_every": 0, "global_ratio": 4.0}, groups)
    for before, after in pairwise(moments):
        for i, ratio in enumerate((0.25, 4.0, 4.0, 4.0)):
            step = np.abs(after.x[i] - before.x[i])
            np.testing.assert_allclose(step, ratio * 1e-2, rtol=1e-6, atol=4e-7)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("local_steps", [1, 2])
@EACH
def test_where_a_mask_is_false_nothing_moves_and_nothing_is_kept(name, local_steps):
    masks = [torch.rand(p.shape, generator=torch.Generator().manual_seed(5)) > 0.4 for p in make()]

    def train(rank: int, transport: Transport) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        params = make()
        options: dict = {"mask": dict(zip(params, masks, strict=True)), "local_steps": local_steps}
        options |= {"full_precision_every": 4, "weight_decay": 0.1}
        optimizer = MARSIT[name](params, 1e-2, **options, process_group=transport)
        for step in range(10 * local_steps):
            for i, p in enumerate(params):
                p.grad = gradient(rank, step, i, p)
            optimizer.step()
        return params, [optimizer.compensation(p) for p in params], [optimizer.momentum(p) for p in params]

    for params, kept, momenta in SimulatedGroup(3).run(train):
        for p, start, c, m, mask in zip(params, make(), kept, momenta, masks, strict=True):
            assert torch.equal(p[~mask], start[~mask])
            assert (p[mask] != start[mask]).all()
            assert (c[~mask] == 0).all()
            assert c[mask].count_nonzero() > 0.5 * mask.sum()
            assert m[mask].all()


# ---------------------------------------------------------------- what is linear


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    "kind",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.05},
        {"momentum": 0.0, "weight_decay": 0.05},
        {"momentum": 0.9, "maximize": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 4])
def test_in_full_precision_marsit_sgd_is_sgd_on_mean_gradients(kind, world_size):
    """Momenta of one's own average to the momentum of the average."""
    steps = 60
    ranks = run(world_size, "sgd", steps, {"full_precision_every": 1} | kind)
    params = [Parameter(p.detach().double()) for p in make()]
    sgd = torch.optim.SGD(params, lr=1e-2, foreach=False, **kind)
    worst, largest = 0.0, [float(p.detach().abs().max()) for p in params]
    for step in range(steps):
        for i, p in enumerate(params):
            grads = [gradient(rank, step, i, start).double() for rank in range(world_size) for start in [make()[i]]]
            p.grad = torch.stack(grads).mean(0)
        sgd.step()
        for moments in ranks:
            for i, (ours, p) in enumerate(zip(moments[step + 1].x, params, strict=True)):
                reference = p.detach().numpy()
                # Every step rounds x once more, at random.
                largest[i] = max(largest[i], np.abs(reference).max())
                off = np.abs(ours - reference).max() / (largest[i] * np.sqrt(step + 1))
                worst = max(worst, float(off))
    print(f"{kind}, {world_size} ranks: from SGD, of max abs(x) and the root of the steps: {worst:.1e} (limit {LIMIT})")
    assert worst <= LIMIT


def test_one_worker_in_full_precision_is_adamw():
    (moments,) = run(1, "adam", 60, {"full_precision_every": 1} | TORCH["adam"])
    params = [Parameter(p.detach().double()) for p in make()]
    adamw = torch.optim.AdamW(params, lr=1e-2, foreach=False, **TORCH["adam"])
    for step in range(60):
        for i, p in enumerate(params):
            p.grad = gradient(0, step, i, make()[i]).double()
        adamw.step()
        for ours, p in zip(moments[step + 1].x, params, strict=True):
            np.testing.assert_allclose(ours, p.detach().numpy(), rtol=2e-6, atol=2e-6)


# ---------------------------------------------------------------- 16 bits


@pytest.mark.long(but=1)
@pytest.mark.parametrize("local_steps", [1, 2])
@EACH
def test_bfloat16_without_masters_is_rounded_once_a_round(name, local_steps):
    options = {"full_precision_every": 0, "global_ratio": 0.3, "local_steps": local_steps}
    ranks = run(3, name, 8 * local_steps, options, make=lambda: make(dtype=torch.bfloat16))
    eta_s = torch.tensor(1e-2) * torch.tensor(0.3) * local_steps
    up = still = 0
    for first in range(0, 8 * local_steps, local_steps):
        for i in range(len(SHAPES)):
            x, after = ranks[0][first].x[i], [moments[first + local_steps].x[i] for moments in ranks]
            both = [(torch.tensor(x).float() - sign * eta_s).bfloat16().double().numpy() for sign in (1, -1)]
            for ours in after:
                assert ((ours == both[0]) | (ours == both[1])).all()
            up += int((after[0] > x).sum())
            still += int((after[0] == x).sum())
    assert up > 100
    assert still > 0, "rounding must show, or the test is no test"
