"""What ``stats(layers=True)`` tells of each layer's compression error, against what can be looked at in full."""

from __future__ import annotations

import pytest
import torch
from optimizers import EACH_ONEBIT, PAPER, UNGUARDED, construct, skip_refused
from ranks import simulate
from torch.nn import Parameter

from fusedonebit.comm import Transport

SHAPES = ((40, 50), (300,), (7,))


def train(name: str, rank: int, steps: int = 6, **options):
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = construct(name, params, 1e-3, freeze_step=2, **options)
    own = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=own)
        optimizer.step()
    return optimizer, params


def told_and_looked_at(rank: int, transport: Transport, name: str, options: dict):
    optimizer, params = train(name, rank, process_group=transport, **options)
    told = optimizer.stats(layers=True)["layers"]
    ratios = [float(optimizer.worker_error(p).norm() / optimizer.momentum(p).norm()) for p in params]
    return told, ratios, optimizer.stats(layers=True)["layers"]


@pytest.mark.long(but=3)
@EACH_ONEBIT
@pytest.mark.parametrize("more", [{}, {"scale_scope": "layer"}, {"scale_scope": "layer", "buckets": 2}])
def test_a_layers_error_is_its_residuals_norm_over_its_momentums(name, more):
    options = UNGUARDED | {"precondition": False} | (PAPER if "scale_scope" not in more else {}) | more
    skip_refused(name, options)
    for told, ratios, after in simulate(told_and_looked_at, 2, name, options):
        assert told["residual_over_momentum"] == pytest.approx(ratios, rel=1e-4)
        assert min(ratios) > 0
        assert after == told  # looking, which settles the residuals, changes nothing


def in_units_of_compression(rank: int, transport: Transport):
    optimizer, _ = train("onebit-adam", rank, guard="off", process_group=transport)
    told = optimizer.stats(layers=True)
    optimizer.algorithm.exchange.reducer.settle()
    residual, result, layout = (
        optimizer.algorithm.exchange.reducer.of_rank.worker.numbers,
        optimizer.algorithm.exchange.reducer.result(),
        optimizer.frame.layout,
    )
    parts = [slice(layout.offset(i), layout.offset(i) + n) for i, n in enumerate(layout.sizes)]
    return told, [float(residual[part].norm() / result[part].norm()) for part in parts]


def test_preconditioned_layers_errors_are_in_the_wholes_unit():
    ranks = simulate(in_units_of_compression, 2)
    for told, ratios in ranks:
        assert told["layers"]["residual_over_momentum"] == pytest.approx(ratios, rel=1e-4)
    every = torch.tensor([ratios for _, ratios in ranks])
    assert every.min() < ranks[0][0]["residual_over_momentum"] < every.max()


@EACH_ONEBIT
def test_layers_have_no_error_in_the_warmup_or_unless_asked_for(name):
    optimizer, _ = train(name, 0, steps=1)
    assert optimizer.stats(layers=True)["layers"]["residual_over_momentum"] == [0.0, 0.0, 0.0]
    assert "layers" not in optimizer.stats()
