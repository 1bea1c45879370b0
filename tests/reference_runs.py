"""Shares what tests of reference and others set up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from types import ModuleType

import numpy as np
import torch
from optimizers import PAPER
from torch import Tensor

from fusedonebit.triton_kernels import FlatLayout
from fusedonebit.triton_kernels.projections import Projections
from fusedonebit.triton_kernels.squares import random_signs

WORKERS, WARMUP, STEPS = 4, 10, 40

SHAPES = [(16, 8), (256,), (2, 8, 8)]  # whole blocks of 128 elements, of which each worker serves one

SIZES = [int(np.prod(shape)) for shape in SHAPES]

ENDS = np.cumsum(SIZES).tolist()

LAYERS = [slice(end - size, end) for end, size in zip(ENDS, SIZES, strict=True)]

Seen = dict[str, Tensor]  # by name; of what each worker has of its own [W, ...]


def normal(*seeds: int) -> Tensor:
    seed = sum(seed * by for seed, by in zip(seeds, (1, 101), strict=False))
    return torch.randn(ENDS[-1], generator=torch.Generator().manual_seed(seed))


def by_layer(*values: float) -> Tensor:
    return torch.cat([torch.full((size,), value) for size, value in zip(SIZES, values, strict=True)])


def gradient(x: Tensor, worker: int, t: int) -> Tensor:
    """Of a bowl whose middle is the worker's own, with noise; layers' gradients differ in magnitude, and change it."""
    magnitude = by_layer(1.0, 0.03, 20.0) * by_layer(1.1, 0.95, 1.0) ** max(0, t - WARMUP)
    return magnitude * (x - normal(worker) + normal(worker, t + 1)).float()


def gradients(x: Tensor, t: int) -> Tensor:
    return torch.stack([gradient(x, worker, t) for worker in range(WORKERS)]).double()


def model() -> Tensor:
    return by_layer(1.0, 2.0, 0.1) * (1 + 0.2 * normal(1000))


ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}

AS_PRINTED = PAPER | {"weight_decay": 0.0, "freeze_step": WARMUP, "block_size": 128}

LAYOUT = FlatLayout(tuple(SIZES), WORKERS, 128)

SHARES = Projections.of(LAYOUT).shares

LIVING = AS_PRINTED | {"precondition": True, "variance_floor": 0.05}


def follow_living(paper: ModuleType, name: str) -> Iterator[Seen]:
    s = paper.LivingState(model().double(), WORKERS, LAYERS)
    s.C, s.servers = partial(paper.compress, p=2), WORKERS
    (beta1, beta2), last = ADAM["betas"], WARMUP
    for t in range(STEPS):
        g = gradients(s.x, t)
        if t < WARMUP:
            paper.adam(s, g, gamma=1e-2, beta1=beta1, beta2=beta2, eta=1e-8)
            yield {"x": s.x, "m": s.m, "v": s.v}
            continue
        if t == WARMUP:  # no bias correction: as if the warm-up had been endless
            paper.live(s, math.inf, beta2=beta2, eta=1e-8, floor=0.05)
        paper.living_adam(s, g, gamma=1e-2, beta1=beta1, beta2=beta2, eta=1e-8)
        done, since = t + 1 - WARMUP, t + 1 - last
        if since >= max(1, done // 8):
            r = random_signs(torch.tensor(t), 0, (1, ENDS[-1]))[0].double()
            paper.renew(s, g, r, since, SHARES, beta2=beta2, eta=1e-8, floor=0.05, block=128)
            last = t + 1
        unit = s.v.sqrt() + 1e-8
        errors = {"worker_error": s.worker_error * unit, "server_error": s.server_error}
        yield {"x": s.x, "m": s.m * unit, "v": s.v} | errors
