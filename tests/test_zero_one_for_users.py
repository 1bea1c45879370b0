"""0/1 Adam as users meet it: groups, masks, 16 bits, schedules, DDP, ``torch.compile``, and what it tells."""

from __future__ import annotations

from typing import Any

import mpi_ranks
import pytest
import torch
from ddp_runs import Sent
from observe import fingerprint, parameters
from ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from zero_one_rounds import (
    Script,
    caught,
    everything,
    make,
    make_parameters,
    momenta,
    residuals,
    set_gradients,
    train,
)

from fusedonebit import DisagreementError, ddp
from fusedonebit.comm import SimulatedGroup, Transport

ROUNDS = (0, 0, 1, 3, 1, 0, 2, 2)
OWN: dict[str, Any] = {"variance_policy": None, "sync_policy": Script((1, 3, 2))}
EACH_VARIANCE = pytest.mark.parametrize("how", [{}, OWN], ids=["one variance", "each its own"])
SCOPES = pytest.mark.parametrize("options", [{}, {"scale_scope": "global", "precondition": False}], ids=str)


# ---------------------------------------------------------------- coordinates and groups


@SCOPES
def test_where_a_mask_is_false_nothing_moves_and_nothing_is_kept(options):
    masks = [torch.rand(p.shape, generator=torch.Generator().manual_seed(5)) > 0.4 for p in make_parameters()]

    def run(rank: int, transport: Transport) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[float]]:
        params = make_parameters()
        mask = dict(zip(params, masks, strict=True))
        optimizer = make(params, ROUNDS, weight_decay=0.1, mask=mask, process_group=transport, **options)
        train(optimizer, rank, 16)
        return params, momenta(optimizer), residuals(optimizer), optimizer.algorithm.bits.mean_sq.tolist()

    for params, m, e, means in SimulatedGroup(2).run(run):
        for p, start, here, residual, mask, mean in zip(params, make_parameters(), m, e, masks, means, strict=True):
            assert torch.equal(p[~mask], start[~mask])
            assert not here[~mask].any()
            assert not residual[~mask].any()
            assert (p[mask] != start[mask]).all()
            assert not mask.any() or mean > 0.01


@pytest.mark.long(but=1)
@SCOPES
@pytest.mark.parametrize("given", [None, 0.0], ids=["none", "zeros"])
def test_no_gradients_leave_a_parameter_and_zeros_only_decay_it(options, given):
    def run(rank: int, transport: Transport, decay: float) -> tuple[Tensor, Tensor, Tensor]:
        params = make_parameters()
        optimizer = make(params, ROUNDS, weight_decay=decay, process_group=transport, **options)
        for step in range(16):
            set_gradients(optimizer, rank, step)
            params[1].grad = None if given is None else torch.zeros_like(params[1])
            optimizer.step()
        return params[1].detach(), optimizer.momentum(params[0]), params[0].detach()

    start = make_parameters()[1].detach()
    for decay in (0.0, 0.1):
        for still, _, moving in SimulatedGroup(2).run(lambda r, t, decay=decay: run(r, t, decay)):
            decays = decay > 0 and given is not None
            expected = start * (1 - 1e-2 * decay) ** 16 if decays else start
            torch.testing.assert_close(still, expected, rtol=3e-6 * decays, atol=0)
            assert not torch.equal(moving, make_parameters()[0])


@pytest.mark.parametrize("variance_floor", [0.01, 0.0])
@pytest.mark.parametrize("precondition", [True, False])
def test_unseen_rows_take_no_giant_steps_at_a_renewal(precondition, variance_floor):
    """A bit has no zero: their rebuilt momentum is noise, which Adam's own denominator, eps, would blow up."""

    def run(rank: int, transport: Transport) -> tuple[float, float]:
        torch.manual_seed(0)
        p = Parameter(torch.randn(40, 25))
        options: dict[str, Any] = {"precondition": precondition, "variance_floor": variance_floor, "weight_decay": 0.0}
        optimizer = make([p], (0, 0, 1, 2, 0, 0, 1, 0), process_group=transport, **options)
        start = p.detach().clone()
        for step in range(24):
            set_gradients(optimizer, rank, step)
            p.grad[20:] = 0.0
            optimizer.step()
        moved = (p.detach() - start).abs()
        return float(moved[:20].max()), float(moved[20:].max())

    if not precondition and variance_floor == 0:
        pytest.skip("the paper's own: also its rounds of bits divide by eps there; a floor or a mask is the way out")
    for seen, unseen in SimulatedGroup(2).run(run):
        print(
            f"precondition {precondition}, floor {variance_floor}: rows move {seen:.2f}, rows never seen {unseen:.2f}"
        )
        assert unseen < 0.5


def run_groups(rank: int, transport: Transport, kind: str) -> list[Tensor]:
    params = make_parameters()
    groups: Any = params
    options: dict[str, Any] = {"process_group": transport}
    if kind == "groups":
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 1e-2}]
    elif kind == "maximize":
        options["maximize"] = True
    elif kind == "still":
        groups = [
            {"params": params[:1], "lr": 0.0},
            {"params": params[1:], "lr": 2e-2, "betas": (0.5, 0.8), "eps": 1e-3},
        ]
    optimizer = make(groups, ROUNDS, **options)
    for step in range(15):
        set_gradients(optimizer, rank, step)
        for p in parameters(optimizer):
            p.grad *= -1.0 if kind == "maximize" else 1.0
        optimizer.step()
    return params


def test_groups_have_own_hyper_parameters_and_maximize_ascends():
    found = {}
    for kind in ("plain", "groups", "maximize", "still"):
        found[kind] = SimulatedGroup(2).run(lambda r, t, kind=kind: run_groups(r, t, kind))
        assert fingerprint(found[kind][0]) == fingerprint(found[kind][1])
    prints = {kind: fingerprint(ranks[0]) for kind, ranks in found.items()}
    assert prints["plain"] == prints["groups"] == prints["maximize"]
    assert torch.equal(found["still"][0][0], make_parameters()[0])
    assert not any(torch.equal(p, q) for p, q in zip(found["still"][0][1:], make_parameters()[1:], strict=True))


def grow(rank: int, world_size: int) -> tuple[list[bool], tuple, tuple, list[float], str]:
    params = make_parameters()
    script = Script((0, 0, 0, 1, 2, 0, 1))
    optimizer = make(params[:3], variance_policy=script, sync_policy=script, weight_decay=0.0)
    train(optimizer, rank, 3)
    before = [t.clone() for t in (*everything(optimizer), *(optimizer.state[p]["exp_avg_sq"] for p in params[:3]))]
    differs = caught(lambda: optimizer.add_param_group({"params": [Parameter(torch.ones(3 + rank))]}))
    optimizer.add_param_group({"params": params[3:], "lr": 3e-2})
    after = [*(p.detach() for p in params[:3]), *map(optimizer.momentum, params[:3])]
    after += [*map(optimizer.worker_error, params[:3]), *(optimizer.state[p]["exp_avg_sq"] for p in params[:3])]
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    start = [p.detach().clone() for p in params]
    train(optimizer, rank, 3, 3)  # rounds of bits: the old go on, the new wait for a variance
    moved = [float((p.detach() - s).abs().max()) for p, s in zip(params, start, strict=True)]
    late = caught(lambda: optimizer.add_param_group({"params": [Parameter(torch.ones(3))]}))
    train(optimizer, rank, 2, 6)
    same += [not torch.equal(p, s) for p, s in zip(params, start, strict=True)]
    return same, differs, late, moved, fingerprint(params)


def test_groups_can_be_added_before_the_first_round_of_bits():
    results = run_ranks(grow, 2, group_timeout=10)
    for same, differs, late, moved, prints in results:
        assert all(same)
        assert differs[0] is DisagreementError
        assert late[0] is RuntimeError
        assert "add_param_group must be called before the first round that does not renew the variance" in late[1]
        print(f"three steps move the old ones {moved[:3]}, the new ones {moved[3:]}")
        assert all(1e-4 < m < 0.3 for m in moved[:3])
        assert moved[3:] == [0.0, 0.0]
        assert prints == results[0][4]


# ---------------------------------------------------------------- 16 bits


def test_masters_of_bfloat16_follow_the_algorithm_exactly():
    def run(rank: int, transport: Transport, dtype: torch.dtype) -> list[tuple[list[Tensor], list[Tensor]]]:
        params = [Parameter(p.detach().bfloat16().to(dtype)) for p in make_parameters()]
        optimizer, seen = make(params, ROUNDS, master_weights=True, process_group=transport), []
        for step in range(16):
            set_gradients(optimizer, rank, step)
            for p in params:
                p.grad = p.grad.bfloat16().to(dtype)
            optimizer.step()
            masters = [optimizer.state[p].get("master", p).detach().clone() for p in params]
            seen.append(([p.detach().clone() for p in params], masters))
        return seen

    half, full = (SimulatedGroup(2).run(lambda r, t, d=d: run(r, t, d)) for d in (torch.bfloat16, torch.float32))
    for ours, theirs in zip(half, full, strict=True):
        for (params, masters), (reference, _) in zip(ours, theirs, strict=True):
            for p, master, q in zip(params, masters, reference, strict=True):
                assert torch.equal(p, master.bfloat16())
                assert (master - q).abs().max() <= 1e-6 * q.abs().max()


def test_bfloat16_without_masters_is_equal_after_each_round():
    def run(rank: int, transport: Transport, dtype: torch.dtype) -> list[tuple[str, list[Tensor]]]:
        optimizer, seen = make(make_parameters(dtype), ROUNDS, process_group=transport), []
        for step in range(16):
            train(optimizer, rank, 1, step)
            seen.append((optimizer.phase, [p.detach().float() for p in parameters(optimizer)]))
        return seen

    half, full = (SimulatedGroup(2).run(lambda r, t, d=d: run(r, t, d)) for d in (torch.bfloat16, torch.float32))
    for (phase, ours), (_, theirs) in zip(*half, strict=True):
        assert (fingerprint(ours) == fingerprint(theirs)) == (phase != "local")
    off = max(float((a - b).abs().max()) for a, b in zip(half[0][-1][1], full[0][-1][1], strict=True))
    print(f"bfloat16 without masters: off by {off:.3f} after 16 steps")
    assert 0 < off < 0.2


# ---------------------------------------------------------------- learning rates


@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_a_rate_of_zero_loses_nothing_and_a_fall_takes_no_leap(kind):
    def run(rank: int, transport: Transport) -> list[float]:
        lr = torch.tensor(1e-2) if kind == "tensor" else 1e-2
        optimizer = make(make_parameters(), (0, 0, 0, *(2, 1) * 8), lr, weight_decay=0.0, process_group=transport)

        def set_rate(rate: float) -> None:
            if kind == "tensor":
                lr.fill_(rate)
            else:
                optimizer.param_groups[0]["lr"] = rate

        def moved(steps: int) -> float:
            before = [p.detach().clone() for p in parameters(optimizer)]
            train(optimizer, rank, steps, optimizer.stats()["step"])
            return max(float((p.detach() - b).abs().max()) for p, b in zip(parameters(optimizer), before, strict=True))

        train(optimizer, rank, 9)
        found = [moved(3)]
        set_rate(0.0)
        found.append(moved(3))
        set_rate(1e-5)
        found.append(moved(3))
        found.append(float(torch.stack([e.abs().max() for e in residuals(optimizer)]).max()))
        return found

    for before, still, after, residual in SimulatedGroup(2).run(run):
        print(f"three steps move {before:.1e}, at rate 0 {still}, at a rate 1000 times smaller {after:.1e}")
        assert still == 0
        assert after < 2e-3 * before
        assert residual > 0.1


def test_a_schedule_of_torch_drives_it():
    optimizer = make(make_parameters(), ROUNDS, 1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(8):
        train(optimizer, 0, 1, step)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5**8


# ---------------------------------------------------------------- DDP


def with_ddp(rank: int, world_size: int, wrapped: bool, how: dict) -> tuple[list[str], list[int], list[str]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer, model = make(net.parameters(), ROUNDS, **how), net
    if wrapped:
        model = DistributedDataParallel(net)
        ddp.attach(model, optimizer)
    prints, sent, phases = [], [], []
    for step in range(16):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank + 10 * step))
        coming = optimizer.averages_gradients
        loss = model(x).square().mean()
        with Sent() as calls:
            loss.backward()
        optimizer.step()
        assert coming == (optimizer.phase == "uncompressed")
        optimizer.zero_grad()
        prints.append(fingerprint([*parameters(optimizer), *momenta(optimizer)]))
        sent.append(sum(name == "allreduce_" for name, _ in calls.calls))
        phases.append(optimizer.phase)
    return prints, sent, phases


@EACH_VARIANCE
def test_ddp_averages_only_at_renewals_with_the_bits_without_it(how):
    plain, wrapped = (run_ranks(with_ddp, 2, way, how) for way in (False, True))
    for (prints, _, _), (with_it, sent, phases) in zip(plain, wrapped, strict=True):
        assert prints == with_it
        assert [bool(n) for n in sent] == [phase == "uncompressed" for phase in phases]


# ---------------------------------------------------------------- torch.compile


def compiled(rank: int, world_size: int, compiles: bool, how: dict) -> list[str]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = make(net.parameters(), ROUNDS, torch.tensor(1e-2), **how)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    update = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager") if compiles else optimizer.step
    prints = []
    for step in range(24):
        optimizer.zero_grad()
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank + 10 * step))
        net(x).square().mean().backward()
        update()
        scheduler.step()
        prints.append(fingerprint(everything(optimizer)))
    if compiles:
        assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (1, 0)
    return prints


@EACH_VARIANCE
def test_compiled_steps_are_one_graph_and_the_bits_of_eager_ones(how):
    eager, in_a_graph = (run_ranks(compiled, 2, way, how) for way in (False, True))
    assert eager == in_a_graph


# ---------------------------------------------------------------- MPI


def over_mpi(rank: int, transport: Transport | None) -> list[str]:
    optimizer = make(make_parameters(), ROUNDS, process_group=transport)
    prints = []
    for step in range(16):
        train(optimizer, rank, 1, step)
        prints.append(fingerprint(everything(optimizer)))
    return prints


def over_gloo(rank: int, world_size: int) -> list[str]:
    return over_mpi(rank, None)


@pytest.mark.full  # starting MPI takes most of it
@pytest.mark.needs_mpi
def test_over_mpi_the_bits_are_those_over_gloo():
    assert mpi_ranks.run_mpi(over_mpi, 2) == run_ranks(over_gloo, 2)
