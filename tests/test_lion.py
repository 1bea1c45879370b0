"""Distributed Lion: it is Lion on one worker, and a vote on several; real ranks and simulated ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from optimizers import objects
from ranks import run_ranks

from fusedonebit import OneBitAdam, OneBitLion, dcp
from fusedonebit.comm import SimulatedGroup

SIZES = ((40, 20), (20,), (7, 3, 2))
LR, BETAS, DECAY = 1e-2, (0.9, 0.99), 0.1


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=draw).to(dtype)) for size in SIZES]


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(size, generator=draw) for size in SIZES]


def flat(tensors: list) -> np.ndarray:
    return torch.cat([t.detach().float().reshape(-1) for t in tensors]).numpy()


def train(rank: int, transport, steps: int = 12, params=None, **options) -> tuple[np.ndarray, OneBitLion]:
    params = parameters() if params is None else params
    optimizer = OneBitLion(params, LR, BETAS, DECAY, process_group=transport, **objects(**options))
    for step in range(steps):
        for p, g in zip(params, gradients(rank, step), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
    return flat(params), optimizer


def transcription(workers: int, steps: int) -> np.ndarray:
    """Distributed Lion, Algorithm 1, with majority vote, in float64; the tie breaker decides ties."""
    x = flat(parameters()).astype(np.float64)
    m = np.zeros((workers, len(x)))
    for step in range(steps):
        g = np.stack([flat(gradients(rank, step)) for rank in range(workers)]).astype(np.float64)
        sign = np.sign(BETAS[0] * m + (1 - BETAS[0]) * g)  # line 4
        m = BETAS[1] * m + (1 - BETAS[1]) * g  # line 5
        votes = sign.sum(0)  # line 8
        tie_breaker = sign[-step % workers]
        x = x - LR * (np.sign(np.where(votes == 0, tie_breaker, votes)) + DECAY * x)  # line 11
    return x


@pytest.mark.long(but=1)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_follows_the_paper_line_by_line(workers):
    for found, _ in SimulatedGroup(workers).run(train):
        error = np.abs(found - transcription(workers, 12)).max()
        print(f"{workers} workers: largest error after 12 steps {error:.1e}; a flipped vote would be {2 * LR:.0e}")
        assert error < 1e-5


def lion(params: list, grads: list[list], maximize: bool = False) -> list[torch.Tensor]:
    """Lion in plain torch (Chen et al., 2023, Algorithm 2), each operation rounded once; returns the momenta."""
    moments = [torch.zeros_like(p) for p in params]
    with torch.no_grad():
        for step in grads:
            for p, m, g in zip(params, moments, step, strict=True):
                g = -g if maximize else g
                update = (m * BETAS[0] + g * (1 - BETAS[0])).sign()
                p.mul_(1 - LR * DECAY).sub_(update * LR)
                m.mul_(BETAS[1]).add_(g * (1 - BETAS[1]))
    return moments


@pytest.mark.long(but=1)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("aggregation", ["majority", "mean"])
def test_one_worker_is_lion_bit_for_bit(aggregation, maximize):
    steps, params, expected = 300, parameters(), parameters()
    moments = lion(expected, [gradients(0, step) for step in range(steps)], maximize)
    found, optimizer = train(0, None, steps, params, aggregation=aggregation, maximize=maximize)
    assert np.array_equal(found, flat(expected))
    assert np.array_equal(flat([optimizer.momentum(p) for p in params]), flat(moments))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_majority_keeps_no_more_than_the_momentum(workers):
    def run(rank, transport):
        p = torch.nn.Parameter(torch.zeros(1 << 18))
        optimizer = OneBitLion([p], process_group=transport)
        p.grad = torch.full_like(p, rank + 1.0)
        optimizer.step()
        return optimizer.stats()["state_bytes"] / p.numel()

    for kept in SimulatedGroup(workers).run(run):
        assert 4 < kept < 4.4  # and the bits


def on_real_ranks(rank: int, world_size: int, aggregation: str) -> tuple[np.ndarray, dict]:
    found, optimizer = train(rank, None, aggregation=aggregation)
    return found, optimizer.stats()


@pytest.mark.long(but=1)
@pytest.mark.parametrize("aggregation", ["majority", "mean"])
def test_ranks_are_bit_identical_and_send_a_bit_each_way(aggregation):
    results = run_ranks(on_real_ranks, 3, aggregation)
    simulated = SimulatedGroup(3).run(lambda rank, transport: train(rank, transport, aggregation=aggregation)[0])
    for (found, stats), same in zip(results, simulated, strict=True):
        assert np.array_equal(found, results[0][0])
        assert np.array_equal(found, same)
        assert stats["collectives_step"] == 2
        assert stats["phase"] == "one-bit"
    if aggregation == "majority":
        assert np.abs(results[0][0] - transcription(3, 12)).max() < 1e-5


def test_the_mean_follows_the_mean_of_all_signs():
    """Error feedback on the servers' side: what is applied adds up to what was voted, but for one residual."""
    steps, workers = 60, 4
    found = SimulatedGroup(workers).run(lambda r, t: train(r, t, steps, aggregation="mean")[0])[0]
    x, m = flat(parameters()).astype(np.float64), np.zeros((workers, len(found)))
    for step in range(steps):
        g = np.stack([flat(gradients(rank, step)) for rank in range(workers)])
        mean = np.sign(BETAS[0] * m + (1 - BETAS[0]) * g).mean(0)
        m = BETAS[1] * m + (1 - BETAS[1]) * g
        x = x - LR * (mean + DECAY * x)
    apart = np.abs(found - x)
    print(f"mean of signs, {steps} steps: {apart.max() / LR:.2f} apart at most, {apart.mean() / LR:.2f} on average")
    assert apart.max() < 6 * LR


def test_coordinates_without_a_gradient_do_not_drift():
    def run(rank, transport):
        p = torch.nn.Parameter(torch.zeros(4096))
        optimizer = OneBitLion([p], LR, process_group=transport)
        for _ in range(100):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        return p.detach()

    for x in SimulatedGroup(2).run(run):
        print(f"after 100 steps: mean {x.mean() / LR:+.2f}, spread {x.std() / LR:.1f} steps")
        assert abs(x.mean()) < 0.6 * LR
        assert 8 * LR < x.std() < 12 * LR


def test_bad_input_is_told():
    with pytest.raises(ValueError, match="aggregation must be one of 'majority', 'mean', got 'median'"):
        OneBitLion(parameters(), aggregation="median")
    with pytest.raises(ValueError, match="betas must be two numbers"):
        OneBitLion(parameters(), betas=(0.9, 1.0))
    other = OneBitAdam(parameters(), freeze_step=1)
    with pytest.raises(ValueError, match="the checkpoint must be of OneBitLion"):
        OneBitLion(parameters()).load_state_dict(other.state_dict())
    optimizer = train(0, None, 1)[1]
    with pytest.raises(RuntimeError, match="before the first step"):
        optimizer.add_param_group({"params": parameters(1)})
    assert "aggregation: majority" in repr(optimizer)


def saved_by_dcp(rank: int, world_size: int, folder: str) -> tuple[np.ndarray, np.ndarray, bool]:
    params = parameters()
    model = torch.nn.ParameterList(params)
    _, optimizer = train(rank, None, 5, params, aggregation="mean")
    dcp.save(model, optimizer, folder)
    again = torch.nn.ParameterList(parameters(1))
    resumed = OneBitLion(again.parameters(), 0.5, aggregation="mean")
    dcp.load(again, resumed, folder)
    for step in range(5, 8):
        for own, other, g in zip(params, again, gradients(rank, step), strict=True):
            own.grad, other.grad = g, g.clone()
        optimizer.step()
        resumed.step()
    same = np.array_equal(flat(params), flat(list(again)))
    dcp.load(model, optimizer, folder)
    return flat(params), flat([optimizer.momentum(p) for p in params]), same


def loaded_by_dcp(rank: int, world_size: int, folder: str) -> tuple[np.ndarray, np.ndarray]:
    model = torch.nn.ParameterList(parameters(1))
    optimizer = OneBitLion(model.parameters(), LR, aggregation="mean")
    dcp.load(model, optimizer, folder)
    return flat(list(model)), flat([optimizer.momentum(p) for p in model])


def test_other_numbers_of_ranks_load_the_mean_of_the_momenta(tmp_path):
    wrote = run_ranks(saved_by_dcp, 2, str(tmp_path / "saved"))
    assert all(same for *_, same in wrote), "on as many ranks it goes on bit for bit"
    mean = (wrote[0][1] + wrote[1][1]) / 2
    for ranks in (1, 3):
        for weights, momentum in run_ranks(loaded_by_dcp, ranks, str(tmp_path / "saved")):
            assert np.array_equal(weights, wrote[0][0])
            assert np.abs(momentum - mean).max() < 1e-7
