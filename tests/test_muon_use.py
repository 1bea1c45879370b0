"""1-bit Muon in its users' hands: bad input, odd gradients, changes on the way, and many steps; see ``test_muon``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from muon_runs import LR, MATRICES, REST, SHAPES, gradients, made, parameters, train, values
from observe import fingerprint
from ranks import run_ranks
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import AbortedStepError, FusedOneBitWarning, Numerics, OneBitMuon, Wire
from fusedonebit.comm import SimulatedGroup


def test_momenta_of_owners_are_told_after_a_look_at_the_state():
    def run(rank: int, transport: Any) -> None:
        params = parameters()
        optimizer = made(params, transport)
        train(optimizer, params, rank, range(3))
        with pytest.raises(RuntimeError, match=r"first call state_dict\(\) on all ranks"):
            optimizer.momentum(params[MATRICES[0]])
        optimizer.momentum(params[REST[0]])
        optimizer.state_dict()
        assert all(optimizer.momentum(p).shape == p.shape for p in params)

    SimulatedGroup(2).run(run)


def test_a_bad_gradient_stops_all_and_an_absent_one_its_own():
    def run(rank: int, transport: Any) -> list[list[bool]]:
        params, moved = parameters(), []
        optimizer = made(params, transport)
        for step in range(6):
            for p, g in zip(params, gradients(rank, step), strict=True):
                p.grad = g
            if rank == 1 and step in (2, 3):
                grad = params[REST[0] if step == 3 else MATRICES[0]].grad
                assert grad is not None
                grad.view(-1)[0] = float("nan")
            if step == 4:
                params[REST[0]].grad = params[MATRICES[1]].grad = None
            before = values(params)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FusedOneBitWarning)
                optimizer.step()
            moved.append([not torch.equal(p, x) for p, x in zip(params, before, strict=True)])
        assert optimizer.stats()["skipped_steps"] == 2
        return moved

    for moved in SimulatedGroup(3).run(run):
        assert not any(moved[2] + moved[3])
        assert all(moved[5])
        assert [i for i, m in enumerate(moved[4]) if not m] == sorted((REST[0], MATRICES[1]))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"algorithm": "lion"}, "algorithm must be 'muon' or 'adamw', got 'lion'"),
        ({"momentum": 0.5, "ns_steps": 0}, "ns_steps must be an int from 1 to 99, got 0"),
        ({"ns_coefficients": 3.0}, "ns_coefficients must be three finite numbers, none above .*, got 3.0"),
        ({"ns_coefficients": (1e300, 1.0, 1.0)}, r"ns_coefficients must be .*, got \(1e\+300, 1.0, 1.0\)"),
        (
            {"wire": Wire(average_dtype=torch.float16)},
            "average_dtype must be torch.bfloat16 or torch.float32, got torch.float16",
        ),
        ({"ns_dtype": "bf16"}, "ns_dtype must be one of torch.bfloat16, .*, got 'bf16'"),
        ({"ns_dtype": torch.float8_e4m3fn}, "ns_dtype must be one of torch.bfloat16, .*, got torch.float8_e4m3fn"),
        ({"ns_dtype": torch.float16}, "ns_dtype must be one of torch.bfloat16, .*, got torch.float16"),
        ({"eps": 0.0}, "eps must be a finite number from 1e-37 to .*, got 0.0"),
        ({"eps": 1e300}, r"eps must be a finite number from .*, got 1e\+300"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn must be one of 'original', 'match_rms_adamw', got 'rms'"),
        ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\), got 1.0"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(wrong, told):
    with pytest.raises(ValueError, match=told):
        OneBitMuon([Parameter(torch.zeros(8, 8))], **wrong)


def test_momenta_of_groups_are_the_same():
    groups = [{"params": [Parameter(torch.zeros(8, 8))]}, {"params": [Parameter(torch.zeros(8, 8))], "momentum": 0.5}]
    with pytest.raises(ValueError, match=r"momentum must be the same in all groups, 0\.95, got 0\.5 in group 1"):
        OneBitMuon(groups)
    groups[1] = {"params": groups[1]["params"], "eps": 1e-3}
    with pytest.raises(ValueError, match=r"eps of matrices must be OneBitMuon's argument, got 0.001 in group 1: leave"):
        OneBitMuon(groups)


def test_vectors_need_a_group():
    told = r'got shape \(8,\), .* in group {}: put vectors.*algorithm="adamw"'
    with pytest.raises(ValueError, match=told.format(0)):
        OneBitMuon([Parameter(torch.zeros(8))])
    optimizer = OneBitMuon([Parameter(torch.zeros(8, 8))])
    with pytest.raises(ValueError, match=told.format(1)):
        optimizer.add_param_group({"params": [Parameter(torch.zeros(8))]})


def test_kernels_of_other_memory_formats_are_matrices_too():
    """Of outputs and all else, in whatever order that lies in memory; and so is a transpose."""
    draw = torch.Generator().manual_seed(0)
    kernel, matrix = torch.randn(8, 4, 3, 3, generator=draw), torch.randn(6, 10, generator=draw)
    given = [Parameter(kernel.to(memory_format=torch.channels_last)), Parameter(matrix.t().contiguous().t())]
    plain = [Parameter(kernel.clone()), Parameter(matrix.clone())]
    for params in (given, plain):
        optimizer = OneBitMuon(params, LR, ns_dtype=torch.float32)
        for p in params:
            p.grad = torch.sin(torch.arange(p.numel()).float()).view(p.shape)
        optimizer.step()
    for p, other in zip(given, plain, strict=True):
        torch.testing.assert_close(p.detach(), other.detach(), rtol=0.0, atol=1e-6)


def test_momentum_may_change_between_steps():
    def run(rank: int, transport: Any) -> None:
        one, other = parameters(), parameters()
        changes, stays = made(one, transport), made(other, transport)
        for optimizer, params in ((changes, one), (stays, other)):
            train(optimizer, params, rank, range(2))
        for group in changes.param_groups:
            group["momentum"] = 0.8
        train(changes, one, rank, range(2, 4))
        train(stays, other, rank, range(2, 4))
        assert [torch.equal(p, q) for p, q in zip(one, other, strict=True)] == [i in REST for i in range(len(SHAPES))]

    for ranks in (1, 2):
        SimulatedGroup(ranks).run(run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_momentum_that_was_scheduled_is_resumed(ranks):
    def run(rank: int, transport: Any) -> None:
        params, others = parameters(), parameters()
        optimizer = made(params, transport, momentum=0.85)
        for group in optimizer.param_groups:
            group["momentum"] = 0.95
        train(optimizer, params, rank, range(3))
        resumed = made(others, transport, momentum=0.85)
        resumed.load_state_dict(optimizer.state_dict())
        for p, q in zip(params, others, strict=True):
            q.data.copy_(p.data)
        train(optimizer, params, rank, range(3, 6))
        train(resumed, others, rank, range(3, 6))
        assert all(map(torch.equal, params, others))

    SimulatedGroup(ranks).run(run)


WRONG = {
    "momentum": (0.5, "momentum must be the same in all groups, 0.5, got 0.95 in group 1"),
    "stacks": (2, "stacks of group 0 must stay 1, got 2: construct a new optimizer"),
    "algorithm": ("adamw", "algorithm of group 0 must stay 'muon', got 'adamw': construct a new optimizer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_ranks_change_of_a_group_stops_all_ranks(name):
    value, told = WRONG[name]

    def run(rank: int, transport: Any) -> None:
        params = [Parameter(torch.ones(8, 8)) for _ in range(2)]
        optimizer = OneBitMuon([{"params": [p]} for p in params], LR, process_group=transport)
        for step in range(3):
            for p in params:
                p.grad = torch.eye(8)
            before, group = [p.detach().clone() for p in params], optimizer.param_groups[0]
            was, group[name] = group[name], value if rank == step == 1 else group[name]
            if step == 1:
                with pytest.raises(
                    (ValueError, RuntimeError) if rank else AbortedStepError, match=told if rank else None
                ):
                    optimizer.step()
            else:
                optimizer.step()
            assert all(map(torch.equal, params, before)) == (step == 1)
            group[name] = was

    SimulatedGroup(2, timeout=60).run(run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_maximises_as_it_minimises_minus_that(ranks):
    def run(rank: int, transport: Any) -> None:
        one, other = parameters(), parameters()
        up, down = made(one, transport, numerics=Numerics(maximize=True)), made(other, transport)
        for step in range(3):
            for p, q, g in zip(one, other, gradients(rank, step), strict=True):
                p.grad, q.grad = g, -g
            up.step()
            down.step()
        assert all(map(torch.equal, one, other))

    SimulatedGroup(ranks).run(run)


def alike(run: Any, ranks: int = 2) -> Any:
    """Return what all ranks return."""
    first, *others = SimulatedGroup(ranks, timeout=60).run(run)
    for each in others:
        assert all(map(torch.equal, each, first))
    return first


@pytest.mark.parametrize("clips", [None, 1.0])
def test_loss_scales_that_differ_between_ranks_weigh_nothing(clips):
    def run(rank: int, transport: Any, scales: tuple[float, ...] = (1024.0, 512.0)) -> list[Tensor]:
        params = parameters()
        optimizer = made(params, transport, max_grad_norm=clips)
        for step in range(4):
            for p, g in zip(params, gradients(rank, step), strict=True):
                p.grad = g * scales[rank]
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scales[rank]), torch.tensor(0.0)
            optimizer.step()
        return values(params)

    scaled, plain = alike(run), alike(lambda rank, transport: run(rank, transport, (1.0, 1.0)))
    for i in REST:
        torch.testing.assert_close(scaled[i], plain[i], rtol=0.0, atol=1e-6)


def test_what_has_no_gradient_goes_nowhere():
    """Its update is 0, of which a bit can't tell: signs turn from step to step."""

    def run(rank: int, transport: Any) -> list[Tensor]:
        params = parameters()
        optimizer = made(params, transport)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        for _ in range(10):
            for p in params:
                p.grad = torch.zeros_like(p)
            optimizer.step()
        return values(params)

    for moved, start in zip(alike(run), parameters(), strict=True):
        torch.testing.assert_close(moved, start.detach(), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(("first", "later"), [(8e18, 1.0), (1e-18, 1e3)])
def test_sizes_of_gradients_may_change_at_once(first, later):
    def run(rank: int, transport: Any) -> list[Tensor]:
        params = parameters()
        optimizer = made(params, transport)
        for step in range(70):
            for p, g in zip(params, gradients(rank, step), strict=True):
                p.grad = g * (first if step < 12 else later)
            optimizer.step()
        assert optimizer.stats()["skipped_steps"] <= 12
        optimizer.state_dict()
        assert all(optimizer.momentum(p).isfinite().all() for p in params)
        return values(params)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        alike(run)


def test_what_trains_a_group_stays():
    params = parameters()
    optimizer = made(params)
    train(optimizer, params, 0, range(1))
    optimizer.param_groups[1]["algorithm"] = "adamw"
    with pytest.raises(RuntimeError, match="algorithm of group 1 must stay 'muon', got 'adamw': construct a new"):
        train(optimizer, params, 0, range(1, 2))


def test_kernels_begin_with_their_outputs():
    across = torch.randn(6, 4, 5).permute(1, 2, 0)
    with pytest.raises(ValueError, match=r"got shape \(4, 5, 6\), strides .* the first dimension must be the slowest"):
        OneBitMuon([Parameter(across)])


def many(rank: int, world_size: int) -> list[str]:
    params, seen = parameters(), []
    optimizer = made(params)
    for step in range(0, 2000, 100):
        train(optimizer, params, rank, range(step, step + 100))
        seen.append(fingerprint(params))
    assert optimizer.stats()["skipped_steps"] == 0
    return seen


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_ranks_are_alike_after_two_thousand_steps():
    first, *others = run_ranks(many, 4, timeout=1100)
    print(f"4 ranks, 2000 steps: the same bits on all at each hundredth: {[each == first for each in others]}")
    assert all(each == first for each in others)
