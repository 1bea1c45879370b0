"""1-bit Muon of sharded parameters (FSDP2): whole matrices are orthogonalised, shards of them travel; on real ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from muon_runs import DECAY, LR, SEED
from observe import named
from ranks import run_ranks
from sharded import Bag, cut, like, make_mesh, shard, sharded_parameters
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Parameter

import fusedonebit
from fusedonebit import OneBitMuon, Wire, dcp, reference
from fusedonebit.core.sharding import local
from fusedonebit.optim.orthogonal import raw

SHAPES = ((20,), (40, 20), (7, 6), (50, 10), (6,), (15, 16), (20, 40), (40, 20), (1, 9), (12, 3, 2))
REST, STACKED = (0, 3, 4), {2: 1, 9: 3}
"""Those that AdamW trains, and of how many matrices others are one."""
STEPS = 6


def initial() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [0.3 * torch.randn(shape, generator=draw) for shape in SHAPES]


def gradients(replica: int, step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(SEED + 1000 * step + replica)
    return [torch.randn(shape, generator=draw) + 0.3 for shape in SHAPES]


def stacks(i: int) -> int:
    return STACKED.get(i, 1)


def made(params: list[Parameter], group: Any, **options: Any) -> OneBitMuon:
    rest = {"params": [params[i] for i in REST], "algorithm": "adamw", "lr": 3e-3, "weight_decay": 0.01}
    matrices = [i for i in range(len(SHAPES)) if i not in REST]
    groups = [{"params": [params[i] for i in matrices if stacks(i) == n], "stacks": n} for n in (1, 3)]
    return OneBitMuon([rest, *groups], LR, DECAY, process_group=group, **options)


def of_shards(mesh: DeviceMesh, **options: Any) -> tuple[OneBitMuon, list[Parameter]]:
    params = sharded_parameters(initial(), mesh)
    return made(params, mesh["replicate"], **options), params


def train(optimizer: OneBitMuon, params: list[Parameter], replica: int, steps: range) -> None:
    for step in steps:
        for p, g in zip(params, gradients(replica, step), strict=True):
            p.grad = like(p, g) if isinstance(p, DTensor) else g
        optimizer.step()


def here(params: list[Parameter]) -> list[Tensor]:
    return [local(p).detach().clone() for p in params]


# ---------------------------------------------------------------- the rule


def alone(rank: int, world_size: int) -> list[Tensor]:
    """One replica, which compresses nothing."""
    optimizer, params = of_shards(make_mesh(1, world_size))
    train(optimizer, params, 0, range(STEPS))
    return here(params)


@pytest.mark.parametrize("shards", [2, 3])
def test_one_replica_is_muon_on_whole_matrices(shards):
    params = [Parameter(x) for x in initial()]
    optimizer = made(params, fusedonebit.comm.LocalTransport())
    train(optimizer, params, 0, range(STEPS))
    found = run_ranks(alone, shards)
    for i, p in enumerate(params):
        torch.testing.assert_close(torch.cat([own[i] for own in found]), p.detach(), rtol=0.0, atol=1e-6)


def expected(replicas: int, shards: int) -> list[Tensor]:
    """Return what the reference makes of it in float64, and torch's AdamW of the rest."""
    params = [x.double() for x in initial()]
    states = {
        i: [reference.MuonState(part, replicas) for part in params[i].flatten(1).chunk(shards)]
        for i in range(len(SHAPES))
        if i not in REST
    }
    rest = [Parameter(params[i]) for i in REST]
    adamw = torch.optim.AdamW(rest, 3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(STEPS):
        each = [[g.double() for g in gradients(replica, step)] for replica in range(replicas)]
        for i, of_matrix in states.items():
            if step and step & (step - 1) == 0:
                for s in of_matrix:
                    reference.whiten(s)
            size = max(1.0, SHAPES[i][0] / stacks(i) / (params[i].numel() / SHAPES[i][0])) ** 0.5
            g = torch.stack([g[i].flatten(1) for g in each])
            how: dict[str, Any] = {"gamma": LR * size, "decay": DECAY / size, "stacks": stacks(i)}
            reference.onebit_muon(of_matrix, g, **how)
        for p, i in zip(rest, REST, strict=True):
            p.grad = torch.stack([g[i] for g in each]).mean(0)
        adamw.step()
    found = {i: torch.cat([s.x for s in own]) for i, own in states.items()} | dict(zip(REST, rest, strict=True))
    return [found[i].detach().view(shape) for i, shape in enumerate(SHAPES)]


def follow(rank: int, world_size: int, shards: int) -> tuple[list[Tensor], dict[str, Any]]:
    how = {"ns_dtype": torch.float64, "wire": Wire(average_dtype=torch.float32)}
    optimizer, params = of_shards(make_mesh(world_size // shards, shards), **how)
    train(optimizer, params, rank // shards, range(STEPS))
    return here(params), optimizer.stats()


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), pytest.param(2, 3, marks=pytest.mark.long)])
def test_ranks_follow_the_reference(replicas, shards):
    """Rows that don't come out even, and one of which the last ranks have none."""
    results = run_ranks(follow, replicas * shards, shards)
    wanted, worst = expected(replicas, shards), 0.0
    for rank, (found, stats) in enumerate(results):
        assert stats["step"] == STEPS
        for p, same, x in zip(found, results[rank % shards][0], wanted, strict=True):
            assert torch.equal(p, same)
            worst = max([worst, *(p.double() - cut(x, rank % shards, shards)).abs().flatten().tolist()])
    print(f"{replicas} x {shards} ranks, {STEPS} steps: largest difference {worst:.1e}")
    assert worst <= 1e-6


# ---------------------------------------------------------------- skipped steps

EVENTS = ("", "", "", "nan", "", "raise", "found_inf", "inf", "")
"""At the last rank alone."""


def disturbed(rank: int, world_size: int, clips: bool) -> list[tuple[Any, ...]]:
    """At momentum 0, which then is what has arrived."""
    how = {"max_grad_norm": 1e9} if clips else {}
    optimizer, params = of_shards(make_mesh(), momentum=0.0, nesterov=False, ns_dtype=torch.float64, **how)
    scaler, seen = fusedonebit.amp.GradScaler("cpu", init_scale=1.0), list[tuple[Any, ...]]()
    for step, event in enumerate(EVENTS):
        before, given = here(params), [cut(g, rank % 2).clone() for g in gradients(rank // 2, step)]
        for p, g in zip(params, given, strict=True):
            p.grad = DTensor.from_local(g, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        if rank == world_size - 1 and event == "raise":
            params[1].grad = DTensor.from_local(gradients(0, 0)[1], params[1].device_mesh, [Replicate()])
            given[1] = torch.zeros_like(given[1])
        elif rank == world_size - 1 and event:
            given[1][1] = torch.nan if event == "nan" else torch.inf
        if event == "found_inf":
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        raised, said = ("", "") if event == "found_inf" else named(optimizer.step)
        stats, state = optimizer.stats(), optimizer.state_dict()["state"][len(REST)]
        left = local(state["worker_error"]).view(20, 20)
        if "whitened_by" in state:
            left = raw(left, local(state["whitened_by"]), left.shape)
        moved = {not torch.equal(x, local(p)) for x, p in zip(before, params, strict=True) if len(x)}
        g = torch.nan_to_num(given[1], 0.0, 0.0, 0.0) * (event != "found_inf")
        counts = raised, said, stats["step"], stats["skipped_steps"], moved
        seen.append((*counts, left.clone(), optimizer.momentum(params[1]), g))
    return seen


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("clips", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_one_shard_finds_skips_all_and_nothing_is_lost(clips):
    """What is left, and what has arrived, are all there was; but for rows that are no numbers."""
    updates, runs = 0, run_ranks(disturbed, 4, clips)
    left, arrived = [torch.zeros(20, 20) for _ in range(2)], [torch.zeros(20, 20) for _ in range(2)]
    for step, event in enumerate(EVENTS):
        updates += not event
        for rank, run in enumerate(runs):
            raised, said, taken, skipped, moved, *_ = run[step]
            expected = ("ValueError" if rank == 3 else "AbortedStepError") if event == "raise" else ""
            assert raised == expected, said
            assert (taken, skipped, moved) == (updates, step + 1 - updates, {not event})
        for column in range(2):
            (*_, e, m, g), (*_, other_e, other_m, other_g) = (run[step] for run in runs[column::2])
            assert torch.equal(m, other_m)
            before, given, left[column] = left[column], (g + other_g) / 2, (e + other_e) / 2
            if event:
                torch.testing.assert_close(m, arrived[column], rtol=0.0, atol=1e-5)
            sent, arrived[column] = torch.zeros_like(m) if event else m, m
            torch.testing.assert_close(left[column] + sent, before + given, rtol=0.0, atol=1e-4)


def partly_absent(rank: int, world_size: int, where: str) -> list[bool]:
    """Whether parameters moved, once gradients of two of them are None in the ``where`` column, or in all."""
    optimizer, params = of_shards(make_mesh())
    moved = list[bool]()
    for step in range(4):
        before = here(params)
        for i, (p, g) in enumerate(zip(params, gradients(rank // 2, step), strict=True)):
            absent = step > 1 and i in (1, 3) and where in ("all", str(rank % 2))
            p.grad = None if absent else like(p, g)
        optimizer.step()
        moved = [not torch.equal(x, y) for x, y in zip(before, here(params), strict=True) if len(x)]
    return moved


@pytest.mark.parametrize("where", ["all", "0", "1"])
def test_what_one_shard_lacks_counts_as_zeros(where):
    for moved in run_ranks(partly_absent, 4, where):
        assert moved == [where != "all" or i not in (1, 3) for i in range(len(moved))]


# ---------------------------------------------------------------- checkpoints, and training


def resumed(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """By a ``state_dict``, and by files of all ranks with the model; other numbers of shards refuse it."""
    mesh, found = make_mesh(), dict[str, Any]()

    def begin(mesh: DeviceMesh) -> tuple[nn.Module, OneBitMuon, list[Parameter]]:
        model = fully_shard(Bag(initial()), mesh=mesh["shard"])
        params = list(model.parameters())
        return model, made(params, mesh["replicate"]), params

    model, optimizer, params = begin(mesh)
    train(optimizer, params, rank // 2, range(5))
    saved, at = copy.deepcopy(optimizer.state_dict()), here(params)
    dcp.save(model, optimizer, folder)
    train(optimizer, params, rank // 2, range(5, 9))
    for how in ("state_dict", "dcp"):
        model, again, others = begin(mesh)
        if how == "dcp":
            dcp.load(model, again, folder)
        else:
            with torch.no_grad():
                for p, x in zip(others, at, strict=True):
                    local(p).copy_(x)
            again.load_state_dict(saved)
        train(again, others, rank // 2, range(5, 9))
        found[how] = all(torch.equal(local(p), local(x)) for p, x in zip(params, others, strict=True))
    model, wider, others = begin(make_mesh(1, 4))
    found["wider"] = named(lambda: dcp.load(model, wider, folder))
    train(wider, others, 0, range(2))
    return found


def test_a_resumed_run_is_the_same(tmp_path):
    for found in run_ranks(resumed, 4, str(tmp_path)):
        assert found["state_dict"]
        assert found["dcp"]
        assert found["wider"][0] == "ValueError"
        assert "the checkpoint's shards is 2, but here it is 4" in found["wider"][1]


def narrower(rank: int, world_size: int, folder: str, begun: bool) -> list[Tensor]:
    """As many shards, one replica instead of two, and two again."""
    mesh = make_mesh(world_size // 2, 2)
    model = fully_shard(Bag(initial()), mesh=mesh["shard"])
    params = list(model.parameters())
    optimizer = made(params, mesh["replicate"])
    if begun:
        dcp.load(model, optimizer, folder)
    train(optimizer, params, rank // 2, range(5))
    dcp.save(model, optimizer, folder)
    return [optimizer.momentum(p).abs().sum() for p in params] if world_size == 2 else here(params)


def test_replicas_come_and_go(tmp_path):
    for i, ranks in enumerate((4, 2, 4)):
        found = run_ranks(narrower, ranks, str(tmp_path / "checkpoint"), i > 0)
    for own in found[0]:
        assert own.isfinite().all()
    for rank in (0, 1):
        assert all(map(torch.equal, found[rank], found[rank + 2]))


def learn(rank: int, world_size: int, kind: str) -> list[float]:
    """A model, in one of the ways in which FSDP2 is used."""
    torch.manual_seed(0)
    mesh = make_mesh()
    dtype = torch.bfloat16 if kind == "16 bits" else torch.float32
    layers = nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 1)
    model = shard(nn.Sequential(*layers).to(dtype), mesh)
    params = list(model.parameters())
    groups = [{"params": [params[2]]}, {"params": [*params[:2], *params[3:]], "algorithm": "adamw", "lr": 3e-3}]
    numerics = fusedonebit.Numerics(master_weights=kind == "16 bits" and "16bit")
    optimizer = OneBitMuon(groups, 1e-2, process_group=mesh["replicate"], numerics=numerics)
    step_of = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True) if kind == "compiled" else None
    losses = []
    for step in range(40):
        draw = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(64, 9, generator=draw).to(dtype)
        loss = (model(x).float() - x.float().sum(1, keepdim=True).tanh()).square().mean()
        loss.backward()
        step_of() if step_of else optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", ["plain", "compiled", pytest.param("16 bits", marks=pytest.mark.long)])
def test_sharded_models_learn(kind):
    losses = torch.tensor(run_ranks(learn, 4, kind)).mean(0)
    print(f"{kind}: loss {losses[:4].mean():.3f} -> {losses[-4:].mean():.3f}")
    assert losses[-4:].mean() < 0.3 * losses[:4].mean()
    if kind == "compiled":
        assert torch.equal(losses, torch.tensor(run_ranks(learn, 4, "plain")).mean(0))


# ---------------------------------------------------------------- what is refused


def others(rank: int, world_size: int) -> tuple[str, str]:
    mesh = make_mesh()
    params = sharded_parameters([torch.ones(8, 4), torch.ones(8, 4 + 2 * (rank % 2))], mesh)
    return named(lambda: OneBitMuon(params, process_group=mesh["replicate"]))


def test_shards_of_other_matrices_are_refused():
    for kind, said in run_ranks(others, 4):
        assert kind == "DisagreementError"
        assert "the shape of parameter 1, all shards together" in said


def columns(rank: int, world_size: int) -> tuple[str, str]:
    mesh = make_mesh(1, 2)
    how = {"shard_placement_fn": lambda p: Shard(1)}
    params = sharded_parameters([torch.ones(8, 6)], mesh, **how)
    return named(lambda: OneBitMuon(params, process_group=mesh["replicate"]))


def test_shards_of_columns_are_refused():
    for kind, said in run_ranks(columns, 2):
        assert kind == "ValueError"
        assert "sharded by rows" in said
        assert "shard_placement_fn" in said
