"""The warm-up is AdamW on averaged gradients, whatever the parameters look like."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from observe import parameters
from optimizers import objects
from ranks import simulate
from torch.nn import Parameter
from warmup_runs import averaged, gradient, relative, ulps, with_odd_memory

from fusedonebit import Numerics, OneBitAdam
from fusedonebit.comm import Transport

STEPS = 50
GROUPS = [
    ([(31, 17), (5,)], {"lr": 1e-2, "weight_decay": 0.1}),
    ([(1000,), (1,), (0,), ()], {"betas": (0.8, 0.99), "eps": 1e-4}),
    ([(3, 4, 5)], {"lr": 3e-3, "weight_decay": 0.0, "maximize": True}),
]


def make_groups(dtype: torch.dtype = torch.float32) -> list[dict]:
    torch.manual_seed(0)
    return [{"params": [Parameter(torch.randn(s).to(dtype)) for s in shapes], **options} for shapes, options in GROUPS]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [5])


def against_adamw(rank: int, transport: Transport, tensor_lr: bool) -> float:
    lr = torch.tensor(1e-3) if tensor_lr else 1e-3
    ours = OneBitAdam(make_groups(), lr=lr, freeze_step=STEPS + 1, process_group=transport)
    reference = torch.optim.AdamW(make_groups(), lr=1e-3, foreach=False)
    schedules, worst = [schedule(optimizer) for optimizer in (ours, reference)], 0.0
    for step in range(STEPS):
        for i, (p, q) in enumerate(zip(parameters(ours), parameters(reference), strict=True)):
            p.grad, q.grad = gradient(rank, step, p, i), averaged(transport.world_size, step, q, i)
        for optimizer, each in zip((ours, reference), schedules, strict=True):
            optimizer.step()
            each.step()
        pairs = zip(parameters(ours), parameters(reference), strict=True)
        worst = max([worst, *(relative(p, q) for p, q in pairs)])
    assert ours.phase == "warmup"
    for p, q in zip(parameters(ours), parameters(reference), strict=True):
        assert ours.state[p]["step"] == STEPS
        for key in ("exp_avg", "exp_avg_sq"):
            worst = max(worst, relative(ours.state[p][key], reference.state[q][key]))
    return worst


@pytest.mark.parametrize(("world_size", "tensor_lr"), [(1, False), (2, False), (1, True)])
def test_warmup_equals_adamw_on_the_averaged_gradient(world_size, tensor_lr):
    """Whatever the groups are, with rates that a scheduler changes in each step."""
    for worst in simulate(against_adamw, world_size, tensor_lr):
        print(f"W={world_size}: deviation from AdamW over {STEPS} steps: {worst:.1e} (limit 1e-6)")
        assert worst <= 1e-6


def against_rounded_adamw(rank: int, transport: Transport, dtype: torch.dtype) -> tuple[int, float]:
    """AdamW with float32 state whose parameters are rounded after each step."""
    ours = OneBitAdam(make_groups(dtype), lr=1e-3, freeze_step=STEPS + 1, process_group=transport)
    groups = make_groups(dtype)
    rounded = [p for group in groups for p in group["params"]]
    for group in groups:
        group["params"] = [Parameter(p.detach().float()) for p in group["params"]]
    reference = torch.optim.AdamW(groups, lr=1e-3, foreach=False)
    worst = 0
    start = [p.detach().float().clone() for p in parameters(ours)]
    for step in range(STEPS):
        for i, (p, q) in enumerate(zip(parameters(ours), parameters(reference), strict=True)):
            p.grad, q.grad = gradient(rank, step, p, i), averaged(transport.world_size, step, p, i)
        ours.step()
        reference.step()
        for p, q, r in zip(parameters(ours), parameters(reference), rounded, strict=True):
            with torch.no_grad():
                r.copy_(q)
                q.copy_(r)
            worst = max(worst, ulps(p, r))
    moved = max(relative(p.float(), x) for p, x in zip(parameters(ours), start, strict=True))
    assert all(s["exp_avg"].dtype == s["exp_avg_sq"].dtype == torch.float32 for s in ours.state.values())
    return worst, moved


@pytest.mark.long(but=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_stay_within_one_ulp_of_adamws(dtype):
    for worst, moved in simulate(against_rounded_adamw, 2, dtype):
        print(f"{dtype}: deviation over {STEPS} steps: {worst} ulp (limit 1)")
        assert worst <= 1
        assert moved > 0.05


def run_alone(ours: torch.optim.Optimizer, reference: torch.optim.Optimizer, steps: int = 20) -> float:
    """Gives both the same gradients in this one process; returns the largest deviation."""
    for step in range(steps):
        for i, (p, q) in enumerate(zip(parameters(ours), parameters(reference), strict=True)):
            if p.requires_grad:
                p.grad, q.grad = gradient(0, step, p, i), gradient(0, step, q, i)
        ours.step()
        reference.step()
    return max(relative(p, q) for p, q in zip(parameters(ours), parameters(reference), strict=True))


def make_pair(make: Callable[[], list], **options) -> tuple[OneBitAdam, torch.optim.AdamW]:
    torch.manual_seed(0)
    ours = OneBitAdam(make(), **objects(freeze_step=1000, **options))
    torch.manual_seed(0)
    return ours, torch.optim.AdamW(make(), foreach=False, **options)


def test_frozen_parameters_stay_and_have_no_state():
    def make() -> list[Parameter]:
        return [Parameter(torch.randn(20), requires_grad=i != 1) for i in range(3)]

    ours, reference = make_pair(make)
    before = parameters(ours)[1].clone()
    assert run_alone(ours, reference) <= 1e-6
    assert torch.equal(parameters(ours)[1], before)
    assert parameters(ours)[1] not in ours.state


def test_parameters_of_any_strides_are_updated_where_they_lie():
    ours, reference = make_pair(with_odd_memory, weight_decay=0.1)
    assert not parameters(ours)[2].is_contiguous()
    where = [(p.data_ptr(), p.stride()) for p in parameters(ours)]
    worst = run_alone(ours, reference)
    print(f"deviation with odd strides: {worst:.1e} (limit 1e-6)")
    assert worst <= 1e-6
    assert [(p.data_ptr(), p.stride()) for p in parameters(ours)] == where
    for p, q in zip(parameters(ours), parameters(reference), strict=True):
        assert ours.state[p]["exp_avg"].shape == p.shape
        assert relative(ours.state[p]["exp_avg"], reference.state[q]["exp_avg"]) <= 1e-6
        assert relative(ours.momentum(p), reference.state[q]["exp_avg"]) <= 1e-6


@pytest.mark.parametrize("freeze_step", [1000, 3])
def test_gradients_of_other_strides_are_not_misread(freeze_step):
    """The same numbers in other memory orders give the same bits, in both stages."""
    results = []
    for odd in (False, True):
        torch.manual_seed(0)
        params = [Parameter(torch.randn(6, 5, 4, 3)), Parameter(torch.randn(30, 20)), Parameter(torch.randn(8))]
        optimizer = OneBitAdam(params, freeze_step=freeze_step)
        for step in range(8):
            for i, p in enumerate(params):
                p.grad = gradient(0, step, p, i)
            params[2].grad = torch.full((8,), float(step - 3))
            if odd:
                params[0].grad = params[0].grad.to(memory_format=torch.channels_last)
                params[1].grad = params[1].grad.t().contiguous().t()
                params[2].grad = torch.tensor(float(step - 3)).expand(8)
            optimizer.step()
        results.append(params)
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)


def test_masked_coordinates_stay_still_and_others_follow_adamw():
    mask = torch.rand(30, 20, generator=torch.Generator().manual_seed(1)) > 0.3
    torch.manual_seed(0)
    p = Parameter(torch.randn(20, 30).t())
    q = Parameter(p.detach().clone())
    ours = OneBitAdam([p], weight_decay=0.5, freeze_step=1000, numerics=Numerics(mask={p: mask}))
    before = p.detach().clone()
    run_alone(ours, torch.optim.AdamW([q], weight_decay=0.5, foreach=False))
    assert torch.equal(p[~mask], before[~mask])
    assert relative(p[mask], q[mask]) <= 1e-6
    assert not torch.equal(p[mask], before[mask])


def test_a_group_added_before_the_freeze_trains_as_in_adamw():
    torch.manual_seed(0)
    first, second = torch.randn(1500), torch.randn(33)
    pair = make_pair(lambda: [Parameter(first.clone())])
    assert run_alone(*pair, 7) <= 1e-6
    for optimizer in pair:
        optimizer.add_param_group({"params": [Parameter(second.clone())], "lr": 1e-2, "weight_decay": 0.3})
    worst = run_alone(*pair)
    print(f"deviation with an added group: {worst:.1e} (limit 1e-6)")
    assert worst <= 1e-6
