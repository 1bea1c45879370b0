"""Marsit's Algorithms 1 and 2 in float64, from the state that an implementation has before each round.

Workers' updates are those of ``torch.optim.SGD`` and ``AdamW`` in float64. Which worker's bit counts
is drawn, so the signs of the global update are the implementation's; they must be some worker's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from observe import parameters
from rounds import EACH, MARSIT
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import MarsitAdam
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.sharding import local
from fusedonebit.reference import marsit

SHAPES = [(23, 40), (7,), (), (300,)]
LIMIT = 1e-6


def make(shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def gradient(rank: int, step: int, i: int, p: Tensor) -> Tensor:
    """What ranks share is about as large as what they don't: signs agree here and there."""
    shared, own = (torch.Generator().manual_seed(seed + 10 * step + 100_000 * i) for seed in (9, 1 + rank))
    return (torch.randn(p.shape, generator=shared) + torch.randn(p.shape, generator=own)).to(p.dtype)


def copied(tensors: list[Tensor]) -> list[np.ndarray]:
    return [t.detach().double().numpy().copy() for t in tensors]


@dataclass
class Moment:
    """One rank, between two steps: all float64."""

    x: list[np.ndarray]
    c: list[np.ndarray]
    state: list[dict[str, np.ndarray]]
    phase: str
    lr: list[float]
    g: list[np.ndarray] = field(default_factory=list)


def look(optimizer: DistributedOptimizer) -> Moment:
    params, saved = parameters(optimizer), optimizer.state_dict()["state"]
    names = ("exp_avg", "exp_avg_sq", "step") if isinstance(optimizer, MarsitAdam) else ("momentum_buffer",)
    states = [
        {
            k: local(v).double().reshape(p.shape if k != "step" else ()).numpy().copy()
            for k, v in saved[i].items()
            if k in names
        }
        for i, p in enumerate(params)
    ]
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    c = copied([optimizer.compensation(p) for p in params])
    return Moment(copied(params), c, states, optimizer.phase, rates)


Groups = Callable[[list[Parameter]], Any]
Schedule = Callable[[DistributedOptimizer, int], None]


def run(
    world_size: int,
    name: str,
    steps: int,
    options: dict,
    groups: Groups = list,
    schedule: Schedule | None = None,
    make: Callable[[], list[Parameter]] = make,
) -> list[list[Moment]]:
    """By rank, the moments before each step, and after the last."""

    def train(rank: int, transport: Transport) -> list[Moment]:
        params = make()
        lr = options.get("lr", 1e-2)
        lr = lr.clone() if isinstance(lr, torch.Tensor) else lr  # simulated ranks are threads: each fills its own
        optimizer = MARSIT[name](groups(params), **options | {"lr": lr}, process_group=transport)
        moments = []
        for step in range(steps):
            if schedule:
                schedule(optimizer, step)
            for i, p in enumerate(params):
                p.grad = gradient(rank, step, i, p)
            moments.append(look(optimizer))
            moments[-1].g = copied([p.grad for p in params])
            optimizer.step()
        return [*moments, look(optimizer)]

    return SimulatedGroup(world_size).run(train)


# ---------------------------------------------------------------- the reference


def local_update(
    name: str, before: Moment, x: list[np.ndarray], state: list[dict], lr: list[float], group_of: list[int], kinds: Any
) -> list[np.ndarray]:
    """u of one worker, by torch's own optimizer in float64; advances ``state``."""
    params = [Parameter(torch.from_numpy(np.array(value))) for value in x]
    groups = [
        {"params": [p for p, g in zip(params, group_of, strict=True) if g == number], "lr": lr[number], **kind}
        for number, kind in enumerate(kinds)
    ]
    theirs = torch.optim.SGD(groups, foreach=False) if name == "sgd" else torch.optim.AdamW(groups, foreach=False)
    for p, g, kept in zip(params, before.g, state, strict=True):
        p.grad = torch.from_numpy(g)
        if name == "adam":
            theirs.state[p] = {k: torch.from_numpy(np.array(v)) for k, v in kept.items()}
        elif "momentum_buffer" in kept:
            theirs.state[p] = {"momentum_buffer": torch.from_numpy(np.array(kept["momentum_buffer"]))}
    theirs.step()
    for p, kept in zip(params, state, strict=True):
        kept |= {k: v.detach().double().numpy() for k, v in theirs.state[p].items() if v is not None}
    return [old - p.detach().numpy() for old, p in zip(x, params, strict=True)]


def algorithm_1(
    u: np.ndarray, c: np.ndarray, sign: np.ndarray, full: bool, eta_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """The global update of all workers' updates [W, ...], and what each keeps; ``sign`` is drawn where they differ."""
    drawn = torch.from_numpy(np.asarray(sign < 0)).double().reshape(1, -1).expand(len(u), -1)
    flat = (torch.from_numpy(values).reshape(len(u), -1) for values in (u, c))
    g, kept = marsit(*flat, drawn, t=0 if full else 1, K=2, eta_s=eta_s)
    return g.view(sign.shape).numpy(), kept.view(u.shape).numpy()


class Worst:
    """The largest relative errors, and how signs were distributed."""

    def __init__(self) -> None:
        self.errors = dict.fromkeys(("parameters", "compensations", "moments"), 0.0)
        self.agreeing = self.split = self.near_zero = 0

    def note(self, kind: str, ours: np.ndarray, reference: np.ndarray, terms: np.ndarray) -> None:
        off = np.abs(ours - reference) / np.maximum(terms, 1e-30)
        self.errors[kind] = float(np.max(off, initial=self.errors[kind]))

    def check(self, what: str) -> None:
        for kind, error in self.errors.items():
            print(f"{what}: {kind}, relative to the terms of their sum: {error:.1e} (limit {LIMIT})")
        print(f"{what}: coordinates where workers agree {self.agreeing}, not {self.split}, near 0 {self.near_zero}")
        assert all(error <= LIMIT for error in self.errors.values())


def compare(
    name: str,
    ranks: list[list[Moment]],
    kinds: list[dict],
    *,
    ratio: float,
    k: int,
    local_steps: int = 1,
    limit: float | None = None,
    group_of: list[int] | None = None,
    what: str = "",
) -> Worst:
    """Algorithm 2 from each round's first moment; ``kinds`` are torch's hyper-parameters, by group."""
    steps, found = len(ranks[0]) - 1, Worst()
    count = len(ranks[0][0].x)
    group_of = group_of or [0] * count
    for t, first in enumerate(range(0, steps, local_steps)):
        updates, terms, moments = [], [], []
        for moments_of_rank in ranks:
            start = moments_of_rank[first]
            state = [dict(s) for s in start.state]
            u = [np.zeros_like(x) for x in start.x]
            size = [np.abs(c) for c in start.c]
            for step in range(first, first + local_steps):
                here = moments_of_rank[step]
                x = [a - b for a, b in zip(start.x, u, strict=True)]
                more = local_update(name, here, x, state, here.lr, group_of, kinds)
                u = [a + b for a, b in zip(u, more, strict=True)]
                size = [a + np.abs(b) for a, b in zip(size, more, strict=True)]
            updates.append(u)
            terms.append(size)
            moments.append(state)
        last = ranks[0][first + local_steps - 1]
        full = k > 0 and t % k == 0
        for i in range(count):
            here = [moments_of_rank[first] for moments_of_rank in ranks]
            u, c, all_terms = (
                np.stack(values)
                for values in ([of_rank[i] for of_rank in updates], [m.c[i] for m in here], [t[i] for t in terms])
            )
            x, after = here[0].x[i], ranks[0][first + local_steps]
            eta_s = ratio * last.lr[group_of[i]] * local_steps
            sign = np.where(x - after.x[i] > 0, 1.0, -1.0)
            g, kept = algorithm_1(u, c, sign, full, eta_s)
            assert after.phase == ("uncompressed" if full else "one-bit")
            if not full:
                certain = (np.abs(u + c) > 1e-6 * all_terms).all(0)
                g = np.where(certain, g, eta_s * sign)
                kept = np.where(certain, kept, u + c - g)
                same = (np.sign(u + c) == np.sign(u[0] + c[0])).all(0)
                found.near_zero += int((~certain).sum())
                found.agreeing += int(same.sum())
                found.split += int((~same).sum())
                if limit is not None:
                    kept = np.clip(kept, -limit * eta_s, limit * eta_s)
            for rank, moments_of_rank in enumerate(ranks):
                after = moments_of_rank[first + local_steps]
                size = all_terms.mean(0) if full else np.abs(g)
                found.note("parameters", after.x[i], x - g, np.abs(x) + size)  # Algorithm 2, line 6
                if full:
                    assert (after.c[i] == 0).all()
                found.note("compensations", after.c[i], kept[rank], all_terms[rank] + np.abs(g))
                drawn = sum(np.abs(m.g[i]) for m in moments_of_rank[first : first + local_steps])
                for key, value in moments[rank][i].items():
                    cancelling = key in ("momentum_buffer", "exp_avg")
                    found.note("moments", after.state[i][key], value, np.abs(value) + cancelling * drawn)
    found.check(what)
    return found


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
