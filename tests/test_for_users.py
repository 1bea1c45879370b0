"""What users count on, whichever optimizer it is; and what whoever had torch.optim.AdamW, or is careless, runs into."""

from __future__ import annotations

import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_runs import Sent
from observe import fingerprint, give_gradients, through_a_file, train
from observe import parameters as of
from optimizers import ADAM_AND_LAMB, EACH_ONEBIT, LAMBS, ONEBIT, PAPER, UNGUARDED, WAYS, construct
from ranks import run_ranks, simulate
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import fusedonebit
from fusedonebit import OneBitAdam, OneBitMuon, amp, ddp
from fusedonebit.comm import Transport


def parameters(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 5), (300,), (7,))]


EACH = pytest.mark.parametrize("name", WAYS)
STEPWISE = [name for name in WAYS if "rounds of" not in name and name != "ZeroOneAdam"]
"""Those whose rounds are of one step."""


# ---------------------------------------------------------------- every optimizer


def build(name: str, params: Any, transport: Transport | None = None, **options: Any) -> Any:
    return WAYS[name](params, lr=1e-2, process_group=transport, **options)


def end_round(optimizer: Any, rank: int, i: int) -> int:
    """Trains from step ``i`` on to the end of a round; returns the step after it."""
    while not optimizer.algorithm.synchronised:
        train(optimizer, rank, [i])
        i += 1
    return i


def kept(optimizer: Any) -> list[list[Tensor]]:
    """What this rank keeps of each parameter: its momentum, and what it has not sent."""
    if isinstance(optimizer, OneBitMuon):
        optimizer.state_dict()  # then all ranks have all momenta
    names = [name for name in ("momentum", "worker_error", "compensation") if hasattr(optimizer, name)]
    return [[getattr(optimizer, name)(p) for name in names] for p in of(optimizer)]


def of_all(optimizer: Any) -> str:
    states = [x for p in of(optimizer) for x in optimizer.state[p].values()]
    return fingerprint([*of(optimizer), *states, *(x for each in kept(optimizer) for x in each)])


def stays_masked(rank: int, transport: Transport, name: str) -> None:
    params, start = parameters(), parameters()
    masks = [torch.rand(p.shape, generator=torch.Generator().manual_seed(5)) > 0.4 for p in params]
    optimizer = build(name, params, transport, mask=dict(zip(params, masks, strict=True)), weight_decay=0.1)
    train(optimizer, rank, range(12))
    end_round(optimizer, rank, 12)
    for p, before, mask, own in zip(params, start, masks, kept(optimizer), strict=True):
        assert torch.equal(p[~mask], before[~mask])
        assert (p[mask] != before[mask]).all()
        assert not any(x[~mask].any() for x in own)


@pytest.mark.parametrize("name", [name for name in WAYS if name != "OneBitMuon"])
def test_where_a_mask_is_false_nothing_moves_and_nothing_is_kept(name):
    simulate(stays_masked, 2, name)


def in_groups(rank: int, transport: Transport, name: str, kind: str) -> list[str]:
    """Gradients of a group that ascends are negated."""
    params = parameters()
    other = {"momentum": 0.5} if name.startswith("MarsitSGD") else {"betas": (0.5, 0.8)}
    first, rest = {
        "same": ({}, {"lr": 1e-2}),
        "maximize": ({}, {"maximize": True}),
        "still": ({"lr": 0.0}, {"lr": 2e-2, "weight_decay": 0.1, **other}),
    }.get(kind, ({}, {}))
    groups = [{"params": params[:1], **first}, {"params": params[1:], **rest}]
    optimizer = build(name, params if kind == "plain" else groups, transport)
    step = 0
    while step < 12 or not optimizer.algorithm.synchronised:
        give_gradients(optimizer, rank, step)
        for p in params[1:] if kind == "maximize" else ():
            p.grad.neg_()
        optimizer.step()
        step += 1
    return [fingerprint([p]) for p in params]


@EACH
def test_groups_have_own_hyper_parameters_and_maximize_ascends(name):
    found = {}
    for kind in ("plain", "same", "maximize", "still"):
        found[kind], other = simulate(in_groups, 2, name, kind)
        assert other == found[kind]
    start = [fingerprint([p]) for p in parameters()]
    still, plain = found.pop("still"), found.pop("plain")
    assert all(each == plain for each in found.values())
    assert [p == before for p, before in zip(still, start, strict=True)] == [True, False, False]
    assert still[1:] != plain[1:]


def spoilt(rank: int, transport: Transport, name: str) -> tuple[str, int]:
    optimizer = build(name, parameters(), transport)
    train(optimizer, rank, range(5))
    i = end_round(optimizer, rank, 5)
    before = fingerprint(of(optimizer))
    give_gradients(optimizer, rank, i)
    if rank == 1:
        of(optimizer)[0].grad[0, 0] = torch.nan
    optimizer.step()
    i = end_round(optimizer, rank, i + 1)
    assert fingerprint(of(optimizer)) == before
    assert all(x.isfinite().all() for each in kept(optimizer) for x in each)
    train(optimizer, rank, range(i, i + 6))
    end_round(optimizer, rank, i + 6)
    return fingerprint(of(optimizer)), optimizer.stats()["skipped_steps"], fingerprint(of(optimizer)) != before


@EACH
def test_a_nonfinite_gradient_costs_one_step_on_all_ranks(name):
    """Of rounds of several steps a whole one."""
    first, second = simulate(spoilt, 2, name)
    assert first == second
    assert first[1:] == (1, True)


def moves(optimizer: Any) -> list[Tensor]:
    """What no skipped step changes: parameters, and momenta but for those of bits, which may become residuals."""
    if isinstance(optimizer, OneBitMuon):
        optimizer.state_dict()
    return [*of(optimizer), *([] if hasattr(optimizer, "worker_error") else map(optimizer.momentum, of(optimizer)))]


def scaled(rank: int, transport: Transport, name: str, overflows: tuple[int, ...] | None) -> list[str]:
    """Trains with these overflows, each on the last rank alone and then taken again; without a scaler if None."""
    optimizer = build(name, parameters(), transport)
    scaler = amp.GradScaler("cpu", 2.0**10, growth_interval=4, enabled=overflows is not None)
    seen = []
    for i in range(12):
        for overflowing in [True] * (i in (overflows or ())) + [False]:
            give_gradients(optimizer, rank, i)
            for p in of(optimizer):
                p.grad = scaler.scale(p.grad)
            if overflowing and rank == transport.world_size - 1:
                of(optimizer)[1].grad[0] = torch.inf
            before = fingerprint(moves(optimizer))
            scaler.step(optimizer)
            scaler.update()
            assert (fingerprint(moves(optimizer)) == before) == overflowing
        seen.append(of_all(optimizer))
    assert optimizer.stats()["skipped_steps"] == len(overflows or ())
    return seen


@pytest.mark.long(but=6)
@EACH
def test_scaled_losses_and_skipped_overflows_leave_no_trace(name):
    """But Marsit draws anew for a round that it takes again, and a living variance is renewed by its count of calls, as
    what whitens is."""
    plain = simulate(scaled, 3, name, None)
    assert simulate(scaled, 3, name, ()) == plain
    if name in STEPWISE and not name.startswith(("Marsit", "OneBitMuon")) and "living" not in name:
        assert simulate(scaled, 3, name, (3, 9)) == plain


def resumed(rank: int, transport: Transport, name: str, at: int) -> bool:
    optimizer, other = build(name, parameters(), transport), build(name, parameters(), transport)
    train(optimizer, rank, range(at))
    with torch.no_grad():
        for p, q in zip(of(other), of(optimizer), strict=True):
            p.copy_(q)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in (optimizer, other):
        train(each, rank, range(at, 9))
    return of_all(optimizer) == of_all(other)


@pytest.mark.long(but=6)
@pytest.mark.parametrize("at", [1, 5])
@EACH
def test_a_resumed_run_goes_on_bit_for_bit(name, at):
    assert simulate(resumed, 3, name, at) == [True] * 3


def looked_at(rank: int, transport: Transport, name: str, looks: bool) -> str:
    optimizer = build(name, parameters(), transport)
    for i in range(12):
        train(optimizer, rank, [i])
        if looks:
            optimizer.state_dict(), optimizer.stats(layers="Lamb" in name), repr(optimizer), kept(optimizer)
    optimizer.state_dict()  # a renewal that is due comes before it
    return of_all(optimizer)


@EACH
def test_saving_and_looking_change_no_later_step(name):
    assert simulate(looked_at, 2, name, True) == simulate(looked_at, 2, name, False)


def in_16_bits(rank: int, transport: Transport, name: str, dtype: torch.dtype, options: dict[str, Any]) -> list[Any]:
    """Of each step the parameters, or masters; and whether it ended a round."""
    params = [Parameter(p.detach().bfloat16().to(dtype)) for p in parameters()]
    optimizer, seen = build(name, params, transport, **options), []
    for i in range(16):
        give_gradients(optimizer, rank, i)
        for p in params:
            p.grad = p.grad.bfloat16().to(dtype)
        optimizer.step()
        masters = [optimizer.state[p].get("master", p).detach().clone() for p in params]
        assert all(torch.equal(p, m.to(dtype)) for p, m in zip(params, masters, strict=True))
        seen.append((masters, optimizer.algorithm.synchronised))
    return seen


@pytest.mark.long(but=6)
@EACH
def test_masters_of_bfloat16_are_float32_parameters(name):
    half, full = (
        simulate(in_16_bits, 2, name, dtype, {"master_weights": True}) for dtype in (torch.bfloat16, torch.float32)
    )
    for ours, theirs in zip(half, full, strict=True):
        for (masters, _), (params, _) in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, masters, params))


@pytest.mark.long(but=6)
@pytest.mark.parametrize("stochastic", [False, True])
@EACH
def test_bfloat16_without_masters_is_equal_after_each_round(name, stochastic):
    if stochastic and (name.startswith("ZeroOneAdam") or "rounds of" in name):
        pytest.skip("workers' own steps are rounded to nearest")
    options = {"stochastic_rounding": True} if stochastic else {}
    half = simulate(in_16_bits, 2, name, torch.bfloat16, options)
    full = simulate(in_16_bits, 2, name, torch.float32, {})
    for (ours, ends), (theirs, _) in zip(*half, strict=True):
        assert (fingerprint(ours) == fingerprint(theirs)) == ends
    pairs = zip(half[0][-1][0], full[0][-1][0], strict=True)
    off = float(torch.cat([(p - q).abs().flatten() for p, q in pairs]).mean())
    print(f"{name}: off by {off:.4f} on average after 16 steps of 0.01")
    assert 0 < off < 0.04


@EACH
def test_alone_nothing_is_sent(name):
    optimizer = build(name, parameters())
    train(optimizer, 0, range(6))
    assert optimizer.stats()["bytes_total"] == 0


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def inputs(rank: int, i: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(rank + 10 * i))


def under_ddp(rank: int, world_size: int, name: str, wrapped: bool) -> list[str]:
    model: nn.Module = net()
    optimizer, seen = build(name, model.parameters()), []
    if wrapped:
        model = DistributedDataParallel(model)
        ddp.attach(model, optimizer)
    for i in range(12):
        optimizer.begin_step()
        loss, coming = model(inputs(rank, i)).square().mean(), optimizer.averages_gradients
        with Sent() as calls:
            loss.backward()
        assert any(call == "allreduce_" for call, _ in calls.calls) == (wrapped and coming)
        optimizer.step()
        assert coming == (optimizer.phase in ("warmup", "uncompressed") and not name.startswith("Marsit"))
        optimizer.zero_grad()
        seen.append(of_all(optimizer))
    return seen


def compiled(rank: int, world_size: int, name: str, compiles: bool) -> tuple[list[str], tuple[int, int]]:
    """Returns what there is after each step at another rate, and how many graphs and breaks there were."""
    gc.collect()  # a model's end takes a hook away, on which there is a guard while something is compiled
    torch._dynamo.reset()
    counters.clear()
    model = net()
    optimizer = WAYS[name](model.parameters(), torch.tensor(1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 14)
    update = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager") if compiles else optimizer.step
    seen = []
    for i in range(14):
        optimizer.zero_grad()
        model(inputs(rank, i)).square().mean().backward()
        update()
        scheduler.step()
        seen.append(of_all(optimizer))
    return seen, (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def both_ways(rank: int, world_size: int, run: Callable[..., Any], name: str) -> list[Any]:
    return [run(rank, world_size, name, way) for way in (False, True)]


@pytest.mark.long(but=3)
@EACH
def test_bits_are_those_without_ddp_which_averages_when_asked(name):
    for plain, wrapped in run_ranks(both_ways, 2, under_ddp, name):
        assert wrapped == plain


@pytest.mark.long(but=2)
@EACH
def test_compiled_steps_are_one_graph_and_the_bits_of_eager_ones(name):
    for (eager, _), (in_a_graph, counts) in run_ranks(both_ways, 2, compiled, name):
        assert in_a_graph == eager
        assert counts == (1, 0)


# ---------------------------------------------------------------- from AdamW, and carelessly


def test_a_warmup_checkpoint_goes_on_in_torchs_adamw():
    theirs, again = parameters(), parameters()
    optimizer, adamw = OneBitAdam(parameters(), 1e-2, freeze_step=100), torch.optim.AdamW(theirs, 1e-2)
    for each in (optimizer, adamw):
        train(each, 0, range(5))
    resumed = torch.optim.AdamW(again, 1e-2)
    for a, b in zip(again, of(optimizer), strict=True):
        a.data.copy_(b)
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for each in (resumed, adamw):
        train(each, 0, range(5, 10))
    assert {int(s["step"]) for s in resumed.state.values()} == {10}
    for a, b in zip(again, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in ONEBIT if name != "onebit-lamb-living"])  # it has a unit in any case
def test_norms_in_stats_are_of_residuals_in_the_momentums_unit(name):
    options = PAPER if name not in LAMBS else PAPER | {"momentum_scaling": False}
    optimizer = construct(name, parameters(), freeze_step=1, **options)
    train(optimizer, 0, range(4))
    error = torch.cat([optimizer.worker_error(p).flatten() for p in of(optimizer)])
    assert 0 < optimizer.stats()["worker_error_norm"] == pytest.approx(float(error.norm()), rel=1e-5)


@EACH_ONEBIT
@pytest.mark.parametrize("held", [True, False])
def test_reading_state_does_not_change_what_stats_say(name, held):
    """Where a step leaves residuals as they are: all, if it is held back; else those of tensors without gradients."""
    told = []
    for looks in (False, True):
        params = parameters()
        optimizer = construct(name, params, freeze_step=1, **UNGUARDED)
        train(optimizer, 0, range(4))
        if looks:
            optimizer.state_dict()
        if held:
            optimizer.found_inf = torch.ones(())  # as a GradScaler does
            train(optimizer, 0, [4])
        else:
            for p in params[1:]:
                p.grad = None
            optimizer.step()
        stats = optimizer.stats(layers=True)
        told.append([stats[key] for key in ("worker_error_norm", "server_error_norm", "compensated_norm", "layers")])
    assert 0 < told[0][0] < told[0][2]
    assert told[1] == told[0]


def test_warnings_point_at_the_users_line():
    params = parameters()
    optimizer = OneBitAdam(params, freeze_step=5)
    params[0].grad = torch.full((3, 5), torch.nan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert [w.category for w in caught] == [fusedonebit.FusedOneBitWarning]
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("onebit-adam", {"scale_norm": "l1"}, "written with scale_norm='contractive'"),
        ("onebit-lamb", {"variant": "deepspeed"}, "written with variant='paper'"),
    ],
)
def test_other_numerics_than_the_checkpoints_are_pointed_out(name, change, text):
    params = parameters()
    optimizer = construct(name, params, freeze_step=1)
    train(optimizer, 0, range(3))
    other = construct(name, parameters(), freeze_step=1, **change)
    with pytest.warns(fusedonebit.FusedOneBitWarning, match=text):
        other.load_state_dict(optimizer.state_dict())


@ADAM_AND_LAMB
def test_another_beta2s_freeze_rule_is_refused_before_any_change(name):
    params = parameters()
    optimizer = construct(name, params, betas=(0.9, 0.9), freeze_step="auto")
    train(optimizer, 0, [0])
    other_params = parameters()
    other = construct(name, other_params, betas=(0.9, 0.99), freeze_step="auto")
    train(other, 0, [1])
    before = other.momentum(other_params[1])
    with pytest.raises(ValueError, match="use the same betas"):
        other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.momentum(other_params[1]), before)
