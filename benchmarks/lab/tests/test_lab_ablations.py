"""The lab's Adam with a living variance and nothing compressed, beside the reference whose exchange is a mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import objects
from reference_runs import LAYERS, LIVING, SHAPES, SIZES, STEPS, WORKERS, follow_living, gradients, model
from torch import Tensor
from torch.nn import Parameter

from benchmarks.lab.ablations import ExactMomentum, LivingAdam
from benchmarks.lab.alike import AlikeTransport
from benchmarks.lab.workers import batch_workers
from fusedonebit import reference
from fusedonebit.core import formats


def average(s: Any, m: Tensor, g: Tensor, beta1: float) -> Tensor:
    return beta1 * m + (1 - beta1) * g.mean(0)


def test_uncompressed_adam_has_living_variance_and_full_momentum(monkeypatch):
    monkeypatch.setattr(reference, "exchange", average)
    monkeypatch.setattr(formats, "_SQUARES", formats.Format(torch.float32))
    params = [Parameter(part.view(shape)) for part, shape in zip(model().split(SIZES), SHAPES, strict=True)]
    options = objects(bias_correction=False, variance="shared", betas=(0.9, 0.95), eps=1e-8, **LIVING)
    optimizer = LivingAdam(params, lr=1e-2, process_group=AlikeTransport(0, WORKERS), **options)
    workers = batch_workers(optimizer)
    for t, paper in enumerate(follow_living(reference, "living")):
        x = torch.cat([p.detach().flatten() for p in params])
        of_workers = gradients(x, t).float()
        workers.give(
            [dict(enumerate(part.view(s) for part, s in zip(g.split(SIZES), SHAPES, strict=True))) for g in of_workers]
        )
        for p, part in zip(params, of_workers.mean(0).split(SIZES), strict=True):
            p.grad = part.view(p.shape)
        optimizer.step()
        if t == STEPS - 1:
            optimizer.contents.settle()
        x = torch.cat([p.detach().flatten() for p in params]).double()
        for layer in LAYERS:
            off = float((x - paper["x"])[layer].norm() / paper["x"][layer].norm())
            assert off <= 1e-5, (t, layer)
    renewed = optimizer.stats()["renewals"]
    print(f"{STEPS} steps, {renewed} renewals: off by {off:.1e} (limit 1e-5)")
    assert renewed >= 5
    assert torch.allclose(optimizer.algorithm.moments.written_out().double(), paper["v"], rtol=1e-4)


@pytest.mark.parametrize("off", ["momentum", "unit"])
def test_what_is_left_out_of_it_shows(monkeypatch, off):
    if off == "momentum":
        monkeypatch.setattr(ExactMomentum, "_flattened", lambda self, gradients: torch.zeros(1))
    else:
        plain = ExactMomentum._denominators
        monkeypatch.setattr(ExactMomentum, "_denominators", lambda self, v, coef: 1.02 * plain(self, v, coef))
    with pytest.raises(AssertionError):
        test_uncompressed_adam_has_living_variance_and_full_momentum(monkeypatch)
