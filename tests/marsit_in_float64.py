"""Marsit's Algorithms 1 and 2 in float64, from the state that an implementation has before each round.

Workers' updates are those of ``torch.optim.SGD`` and ``AdamW`` in float64. Which worker's bit counts
is drawn, so the signs of the global update are the implementation's; they must be some worker's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from observe import parameters
from optimizers import by_name
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import MarsitAdam, MarsitSGD
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.sharding import local
from fusedonebit.reference import marsit

MARSIT = {"sgd": by_name(MarsitSGD), "adam": by_name(MarsitAdam)}
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
