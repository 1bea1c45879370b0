"""0/1 Adam as users meet it: groups, masks, 16 bits, schedules, DDP, ``torch.compile``, and what it tells."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mpi_ranks
import pytest
import torch
from fusedonebit.comm import SimulatedGroup, Transport
from observe import fingerprint, parameters
from ranks import run_ranks
from test_ddp import Sent
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from zero_one_rounds import (
    EveryRound,
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

from fusedonebit import DisagreementError, OneBitAdam, ZeroOneAdam, ddp, policies
from fusedonebit.zero_one_state import ZeroOneOptions

ROUNDS = (0, 0, 1, 3, 1, 0, 2, 2)
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
        return params, momenta(optimizer), residuals(optimizer), optimizer._mean_sq.tolist()

    for params, m, e, means in SimulatedGroup(2).run(run):
        for p, start, here, residual, mask, mean in zip(params, make_parameters(), m, e, masks, means, strict=True):
            assert torch.equal(p[~mask], start[~mask])
            assert not here[~mask].any()
            assert not residual[~mask].any()
            assert (p[mask] != start[mask]).all()
            assert not mask.any() or mean > 0.01


@SCOPES
def test_a_parameter_that_never_has_a_gradient_stays_still_and_only_decays(options):
    def run(rank: int, transport: Transport, decay: float) -> tuple[Tensor, Tensor, Tensor]:
        params = make_parameters()
        optimizer = make(params, ROUNDS, weight_decay=decay, process_group=transport, **options)
        for step in range(16):
            set_gradients(optimizer, rank, step)
            params[1].grad = None
            optimizer.step()
        return params[1].detach(), optimizer.momentum(params[0]), params[0].detach()

    start = make_parameters()[1].detach()
    for decay in (0.0, 0.1):
        for still, _, moving in SimulatedGroup(2).run(lambda r, t, decay=decay: run(r, t, decay)):
            expected = start if decay == 0 else start * (1 - 1e-2 * decay) ** 16
            torch.testing.assert_close(still, expected, rtol=3e-6 * (decay > 0), atol=0)
            assert not torch.equal(moving, make_parameters()[0])


@pytest.mark.parametrize("variance_floor", [0.01, 0.0])
@pytest.mark.parametrize("precondition", [True, False])
def test_rows_that_are_never_seen_take_no_giant_steps_where_the_variance_is_renewed(precondition, variance_floor):
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


def test_groups_have_their_own_hyper_parameters_and_maximize_ascends():
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


def test_a_group_can_be_added_before_the_first_round_of_bits_and_what_was_stays():
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


def test_masters_of_bfloat16_parameters_follow_the_algorithm_exactly():
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


def test_bfloat16_parameters_without_masters_are_equal_after_each_round_and_close():
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
def test_a_rate_of_zero_moves_nothing_and_loses_nothing_and_a_fall_takes_no_leap(kind):
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


def with_ddp(rank: int, world_size: int, wrapped: bool) -> tuple[list[str], list[int], list[str]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer, model = make(net.parameters(), ROUNDS), net
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


def test_ddp_averages_where_the_variance_is_renewed_only_and_the_bits_are_those_without_it():
    plain, wrapped = (run_ranks(with_ddp, 2, way) for way in (False, True))
    for (prints, _, _), (with_it, sent, phases) in zip(plain, wrapped, strict=True):
        assert prints == with_it
        assert [bool(n) for n in sent] == [phase == "uncompressed" for phase in phases]


# ---------------------------------------------------------------- torch.compile


def compiled(rank: int, world_size: int, compiles: bool) -> list[str]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = make(net.parameters(), ROUNDS, torch.tensor(1e-2))
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


def test_compiled_steps_are_one_graph_and_the_bits_of_eager_ones():
    eager, in_a_graph = (run_ranks(compiled, 2, way) for way in (False, True))
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


@pytest.mark.skipif(bool(mpi_ranks.missing()), reason=mpi_ranks.missing())
def test_over_mpi_the_bits_are_those_over_gloo():
    assert mpi_ranks.run_mpi(over_mpi, 2) == run_ranks(over_gloo, 2)


# ---------------------------------------------------------------- what is told


def tell(rank: int, world_size: int) -> tuple[list[dict], str]:
    optimizer, seen = make(make_parameters(), ROUNDS), []
    for step in range(16):
        train(optimizer, rank, 1, step)
        seen.append(optimizer.stats())
    return seen, repr(optimizer)


LAST = ("worker_error_norm", "compensated_norm", "residual_over_momentum", "sign_agreement")
"""What is told of the last synchronisation in bits."""


def test_stats_and_repr_tell_where_training_stands():
    for seen, text in run_ranks(tell, 2):
        phases = Script(ROUNDS).places(16)
        assert [s["phase"] for s in seen] == phases
        assert [s["step"] for s in seen] == list(range(1, 17))
        assert [s["rounds"] for s in seen[:10]] == [1, 2, 3, 3, 3, 4, 5, 6, 6, 7]
        assert [s["renewals"] for s in seen[:10]] == [1, 2, 2, 2, 2, 2, 2, 3, 3, 3]
        assert [s["local_steps"] for s in seen[:10]] == [0, 0, 0, 1, 2, 0, 0, 0, 1, 0]
        assert [s["round_steps"] for s in seen[:10]] == [1, 1, 1, 3, 3, 3, 1, 1, 2, 2]
        assert [s["bytes_step"] == 0 for s in seen] == [phase == "local" for phase in phases]
        calls = {"uncompressed": 1, "one-bit": 2, "local": 0}
        assert [s["collectives_step"] for s in seen[1:]] == [calls[phase] for phase in phases[1:]]
        assert [s["collectives_step"] for s in seen[:1]] == [2]  # and ranks agree on the rounds to come
        for before, here in pairwise(seen[2:]):
            if here["phase"] != "one-bit":
                assert [here[key] for key in LAST] == [before[key] for key in LAST]
            assert 0 < here["worker_error_norm"] < here["compensated_norm"]
            assert here["residual_over_momentum"] > 0
        held = seen[-1]["state_bytes"] / (seen[-1]["parameters"] + seen[-1]["padding"])
        print(f"state: {held:.1f} bytes per element")
        assert 16 < held < 22  # m, v, residual, anchor, half a server's residual, bits
        for line in (
            "ZeroOneAdam (",
            "phase: local, 16 updates",
            "variance: Script(rounds=(0, 0, 1,",
            "rounds: Script(",
        ):
            assert line in text
        assert "scale: contractive, block, preconditioned\n" in text


def count(rank: int, world_size: int, name: str) -> int:
    params = [Parameter(torch.zeros(64, 1000)), Parameter(torch.zeros(1000))]
    variance, rounds = policies.DoublingVariance(scaler=4), policies.DoublingRounds(after=20, scaler=10, most=16)
    if name == "zero-one":
        optimizer: Any = ZeroOneAdam(params, variance_policy=variance, sync_policy=rounds)
    elif name == "fp32":
        optimizer = ZeroOneAdam(params, variance_policy=EveryRound(), sync_policy=rounds)
    else:
        optimizer = OneBitAdam(params, freeze_step=20, guard="off")
    start = optimizer.stats()["bytes_total"]
    train(optimizer, rank, 200)
    return optimizer.stats()["bytes_total"] - start


def test_bytes_against_fp32_and_onebit_adam():
    sent = {name: run_ranks(count, 2, name)[0] for name in ("fp32", "onebit", "zero-one")}
    for name, total in sent.items():
        print(f"200 steps of 65,000 parameters, {name}: {total / 1e6:.3f} MB, 1/{sent['fp32'] / total:.1f}")
    assert sent["fp32"] == pytest.approx(200 * 4 * 65_000, rel=0.02)
    assert sent["zero-one"] < sent["onebit"] < sent["fp32"] / 5


# ---------------------------------------------------------------- what it is not made for


def build_differently(rank: int, world_size: int, case: str, values: tuple) -> tuple[type | None, str]:
    return caught(lambda: make(make_parameters(), **{case: values[rank]}))


@pytest.mark.parametrize(
    ("case", "values", "text"),
    [
        ("precondition", (True, False), "precondition is True on rank 0 but False on rank 1"),
        ("variance_floor", (0.0, 0.01), "variance_floor is 0.0 on rank 0 but 0.01 on rank 1"),
        ("lr", (0.1, 0.2), "lr of group 0 is 0.1 on rank 0 but 0.2 on rank 1"),
    ],
)
def test_different_construction_is_found_on_every_rank(case, values, text):
    for kind, said in run_ranks(build_differently, 2, case, values, group_timeout=10):
        assert kind is DisagreementError
        assert text in said


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"scale_norm": "max"}, ValueError, "scale_norm must be one of 'contractive', 'l1', 'l2', got 'max'"),
        ({"scale_scope": "bucket"}, ValueError, "scale_scope must be one of 'global', 'layer', 'block', got 'bucket'"),
        ({"variance_floor": 1.0}, ValueError, "variance_floor must be a number in [0, 1), got 1.0"),
        ({"precondition": 1}, ValueError, "precondition must be True or False, got 1"),
        ({"capturable": True}, TypeError, "capturable"),
        ({"hierarchy": 2}, TypeError, "hierarchy"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options, kind, text):
    found, said = caught(lambda: make(make_parameters(), **options))
    assert found is kind
    assert text in said


def test_a_step_can_not_be_captured():
    fields: dict[str, Any] = {"scale_norm": "l2", "scale_scope": "block", "precondition": True, "variance_floor": 0.0}
    fields |= {"bias_correction": True, "eps_inside_sqrt": False, "nonfinite": "skip", "block_size": None}
    script = Script((0,))
    with pytest.raises(ValueError, match="capturable must be False, got True: what a step does depends on its place"):
        ZeroOneOptions(variance_policy=script, sync_policy=script, capturable=True, **fields).check()


def shards(rank: int, world_size: int) -> tuple[tuple, tuple]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    p = Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    optimizer = caught(lambda: make([p]))
    return optimizer, caught(lambda: make(make_parameters(), mesh=mesh))


def test_shards_are_refused_and_a_mesh_is_a_group():
    for (kind, text), whole in run_ranks(shards, 2, group_timeout=10):
        assert kind is ValueError
        assert "parameters of ZeroOneAdam must be whole, but" in text
        assert whole == (None, "")
