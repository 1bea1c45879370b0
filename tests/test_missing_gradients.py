"""A gradient that is None: as torch's optimizers do where no rank has one; zeros where only some have none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from missing_gradient_runs import OWN, SHAPES, Make, gradient, parameters
from optimizers import by_name
from ranks import run_ranks
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from warmup_runs import relative

from fusedonebit import Faults, Lamb, MarsitAdam, MarsitSGD, OneBitAdam, OneBitLamb, OneBitMuon, ZeroOneAdam, ddp
from fusedonebit.comm import SimulatedGroup
from fusedonebit.core.sharding import local
from fusedonebit.optim.policies import DoublingRounds, DoublingVariance, EveryStep, FixedRounds

FREEZE = 3

plain = {"precondition": False, "scale_norm": "l2", "scale_scope": "global"}
adam: Make = by_name(OneBitAdam, lr=1e-2, freeze_step=FREEZE, guard="off")
lamb: Make = by_name(OneBitLamb, lr=1e-2, freeze_step=FREEZE, guard="off")
AVERAGING: dict[str, Make] = {
    "adam": adam,
    "adam, as in the paper": partial(adam, **plain),
    "adam, ternary, guarded": partial(adam, ternary=True, guard="rewarm"),
    "adam, in buckets": partial(adam, buckets=3),
    "lamb": lamb,
    "lamb, as in DeepSpeed": partial(lamb, variant="deepspeed"),
    "lamb, frozen": partial(lamb, adaptive=False),
    "Lamb": by_name(Lamb, lr=1e-2),
}
zero_one: Make = by_name(ZeroOneAdam, lr=1e-2, variance_policy=DoublingVariance(2))
ZERO_ONE: dict[str, Make] = {"zero-one": partial(zero_one, sync_policy=EveryStep())}
IN_ROUNDS: dict[str, Make] = {
    "zero-one": partial(zero_one, sync_policy=DoublingRounds(1, 2, 2)),
    "marsit": by_name(MarsitSGD, lr=1e-2, full_precision_every=3, local_steps=2),
    "marsit adam": by_name(MarsitAdam, lr=1e-2, full_precision_every=3, local_steps=2),
    "zero-one, own": by_name(ZeroOneAdam, lr=1e-2, sync_policy=FixedRounds(2)),
}
OFTEN = ("adam", "adam, in buckets", "lamb", "Lamb", "lion, mean", "marsit", "zero-one", "zero-one, own")


def named(*families: dict[str, Make]) -> Any:
    """The names of all of a family; of those that are much like others only with ``make test-full``."""
    names = [name for family in families for name in family]
    return [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.full) for name in names]


def is_missing(rank: int, step: int, i: int) -> bool:
    return bool(torch.rand((), generator=torch.Generator().manual_seed(7 + rank + 10 * step + 1000 * i)) < 0.5)


def absent_in(step: int) -> set[int]:
    """Tensors that no rank has a gradient of; none in the step that freezes, which makes all state anew."""
    return set() if step in (0, FREEZE) else set(range(len(SHAPES))) if step == 7 else {step % 5, (step + 2) % 5}


def state_of(optimizer: Any, p: Tensor) -> dict[str, Tensor]:
    """What an optimizer has of a parameter, as users see it; and what a checkpoint has per tensor."""
    saved = optimizer.state_dict()["state"][[id(q) for q in optimizer.state].index(id(p))]  # and gathers momenta
    state = {"x": p, "m": optimizer.momentum(p), **optimizer.state[p]}
    for name in ("worker_error", "compensation"):
        if hasattr(optimizer, name):
            state[name] = getattr(optimizer, name)(p)
    state |= {name: saved[name] for name in ("layer", "exp_avg_sq_fresh") if name in saved}
    return {name: value.detach().clone() for name, value in state.items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor], turned: float = 0.0) -> list[str]:
    other = [name for name in before if not torch.equal(before[name], after[name])]
    return [name for name in other if name != "m" or not relative(after[name], before[name]) < turned]


def stays(optimizer: Any, params: list[Parameter], rank: int, step: int, lone: int | None) -> None:
    """Takes a step in which what no rank has a gradient of stays; rank ``lone`` has none of one tensor more."""
    absent = absent_in(step)
    for i, p in enumerate(params):
        p.grad = None if i in absent or (rank == lone and i == (step + 1) % 5) else gradient(rank, step, i)
    before, turned = {i: state_of(optimizer, params[i]) for i in absent}, 2e-5 * isinstance(optimizer, OneBitMuon)
    optimizer.step()  # 1-bit Muon brings momenta to another basis
    assert not {i: found for i in absent if (found := changed(before[i], state_of(optimizer, params[i]), turned))}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_warm_up_equals_adamw_whatever_gradients_are_none(world_size):
    def work(rank: int, transport: Any) -> float:
        params, copies = parameters(), parameters()
        ours = OneBitAdam(params, lr=1e-2, weight_decay=0.1, freeze_step=1000, process_group=transport)
        reference = torch.optim.AdamW(copies, lr=1e-2, weight_decay=0.1, foreach=False)
        worst = 0.0
        for step in range(25):
            for i, (p, q) in enumerate(zip(params, copies, strict=True)):
                all_ranks = [None if is_missing(r, step, i) else gradient(r, step, i) for r in range(world_size)]
                given = [g.double() for g in all_ranks if g is not None]
                p.grad, q.grad = all_ranks[rank], (sum(given) / world_size).float() if given else None
            ours.step()
            reference.step()
            worst = max([worst, *(relative(p, q) for p, q in zip(params, copies, strict=True))])
        for p, q in zip(params, copies, strict=True):
            assert ours.state[p]["step"] == reference.state[q]["step"] < 25
            worst = max(worst, *(relative(ours.state[p][k], reference.state[q][k]) for k in ("exp_avg", "exp_avg_sq")))
        return worst

    for worst in SimulatedGroup(world_size).run(work):
        print(f"W={world_size}: deviation from AdamW over 25 steps: {worst:.1e} (limit 1e-6)")
        assert worst <= 1e-6


@pytest.mark.long(but=1)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", named(AVERAGING, OWN))
def test_what_no_rank_has_a_gradient_of_stays_to_the_bit(name, world_size):
    def work(rank: int, transport: Any) -> list[Tensor]:
        params = parameters()
        optimizer = (AVERAGING | OWN)[name](params, weight_decay=0.1, process_group=transport)
        for step in range(10):
            stays(optimizer, params, rank, step, step % world_size if world_size > 1 else None)
        assert [int(optimizer.state[p]["step"]) for p in params] == [
            sum(i not in absent_in(step) for step in range(10)) for i in range(len(params))
        ]
        assert optimizer.stats()["step"] == 10
        return params

    first, *others = SimulatedGroup(world_size).run(work)
    assert all(torch.equal(p, q) for params in others for p, q in zip(first, params, strict=True))


def ends_of(make: Make, world_size: int, steps: int, given: Callable[[int, int, int], Tensor | None]) -> Any:
    """All ranks' parameters and momenta after some steps with ``given(rank, step, i)``."""

    def work(rank: int, transport: Any) -> list[Tensor]:
        optimizer = make(params := parameters(), process_group=transport)
        for step in range(steps):
            for i, p in enumerate(params):
                p.grad = given(rank, step, i)
            optimizer.step()
        optimizer.state_dict()  # gathers momenta that owners alone have
        return [*params, *(optimizer.momentum(p) for p in params)]

    return SimulatedGroup(world_size).run(work)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", named(AVERAGING, OWN, ZERO_ONE))
def test_none_on_some_ranks_is_zeros_there(name):
    def missing(rank: int, step: int, i: int) -> bool:
        return step > 0 and rank == (step + i) % 3

    def none(rank: int, step: int, i: int) -> Tensor | None:
        return None if missing(rank, step, i) else gradient(rank, step, i)

    def zeros(rank: int, step: int, i: int) -> Tensor:
        return gradient(rank, step, i) * (not missing(rank, step, i))

    make = (AVERAGING | OWN | ZERO_ONE)[name]
    for ours, reference in zip(*(ends_of(make, 3, 8, given) for given in (none, zeros)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))


@pytest.mark.parametrize("name", ZERO_ONE)
def test_between_renewals_zero_one_leaves_what_has_no_gradient(name):
    """Where the momentum turns from floats into bits it becomes residual; nothing of it is lost."""

    def work(rank: int, transport: Any) -> None:
        params = parameters()
        optimizer = ZERO_ONE[name](params, weight_decay=0.1, process_group=transport)
        exactly = 0
        for step in range(12):
            absent = absent_in(step)
            for i, p in enumerate(params):
                p.grad = None if i in absent else gradient(rank, step, i)
            phase, before = optimizer.phase, {i: state_of(optimizer, params[i]) for i in absent}
            optimizer.step()
            for i in absent:
                found = set(changed(before[i], state_of(optimizer, params[i])))
                assert found <= {"m", "worker_error"}
                if phase == optimizer.phase == "one-bit":
                    assert not found
                    exactly += 1
        assert exactly

    SimulatedGroup(2).run(work)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", IN_ROUNDS)
def test_a_whole_round_without_a_gradient_leaves_all_as_it_was(name):
    away = 3  # whose gradients are None in every round but the first three

    def work(rank: int, transport: Any) -> list[Tensor]:
        params = parameters()
        optimizer = IN_ROUNDS[name](params, weight_decay=0.1, process_group=transport)
        rounds, before, kept = 0, {}, ["x", "step", "exp_avg_sq", "compensation"]
        while rounds < 9:
            begins = optimizer.stats()["local_steps"] == 0
            if begins:
                before = state_of(optimizer, params[away])
                alone = int(optimizer.state[params[0]]["step"])
            step = int(optimizer.stats()["step"])
            for i, p in enumerate(params):
                p.grad = None if i == away and rounds > 2 else gradient(rank, step, i)
            optimizer.step()
            after = state_of(optimizer, params[away])
            if rounds > 2:
                assert torch.equal(after["x"], before["x"])
            if optimizer.stats()["local_steps"] == 0:
                rounds = optimizer.stats()["rounds"]
                assert alone < int(optimizer.state[params[0]]["step"])
                if rounds > 3:
                    assert not set(kept) & set(changed(before, after))
        return params

    first, second = SimulatedGroup(2).run(work)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:step.. found no gradient")
@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", ["adam", "lamb", "zero-one", pytest.param("marsit adam", marks=pytest.mark.full)])
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_been(name):
    make, steps = (AVERAGING | OWN | ZERO_ONE)[name], 11

    def given(rank: int, step: int, i: int) -> Tensor | None:
        absent = step > 0 and (i in absent_in(step) or is_missing(rank, step, i))
        return None if absent else gradient(rank, step, i)

    def work(rank: int, transport: Any) -> tuple[list[Tensor], list[float]]:
        params = parameters()
        optimizer = make(params, process_group=transport)
        for step in range(steps):
            if step in (2, 6, 9):
                saved, values = optimizer.state_dict(), [p.detach().clone() for p in params]
                params = [Parameter(value) for value in values]
                optimizer = make(params, process_group=transport)
                optimizer.load_state_dict(saved)
            for i, p in enumerate(params):
                p.grad = given(rank, step, i)
            optimizer.step()
        optimizer.state_dict()  # gathers momenta that owners alone have
        return [*params, *(optimizer.momentum(p) for p in params)]

    for ours, reference in zip(SimulatedGroup(2).run(work), ends_of(make, 2, steps, given), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))


@pytest.mark.filterwarnings("ignore:a gradient on some rank")
@pytest.mark.parametrize("name", ["adam", "lamb", "marsit", pytest.param("lion, mean", marks=pytest.mark.full)])
def test_a_skipped_step_changes_nothing_of_what_has_no_gradient(name):
    def work(rank: int, transport: Any) -> list[Tensor]:
        params = parameters()
        optimizer = (AVERAGING | OWN)[name](params, process_group=transport)
        for step in range(9):
            for i, p in enumerate(params):
                p.grad = None if step > 3 and i == 3 else gradient(rank, step, i)
            if step in (5, 7) and rank == 1:
                params[0].grad.view(-1)[3] = torch.nan
            before = state_of(optimizer, params[3])
            optimizer.step()
            if step > 3:
                assert not changed(before, state_of(optimizer, params[3]))
        assert optimizer.stats()["skipped_steps"] == 2
        return params

    first, second = SimulatedGroup(2).run(work)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


# ---------------------------------------------------------------- real ranks


class TwoHeads(Module):
    """Of which one head is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = Linear(8, 8), torch.nn.ModuleList([Linear(8, 4) for _ in range(2)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x)).square().mean()


def train_two_heads(rank: int, world_size: int) -> list[Tensor]:
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    optimizer = OneBitAdam(model.parameters(), 1e-2, weight_decay=0.1, freeze_step=FREEZE, faults=Faults(guard="off"))
    ddp.attach(model, optimizer)
    for step in range(8):
        head = step % 2 if step % 4 < 3 else rank  # all use one of them, or each rank its own
        optimizer.zero_grad()
        other = model.module.heads[1 - head]
        before = [state_of(optimizer, p) for p in other.parameters()]
        model(torch.randn(16, 8, generator=torch.Generator().manual_seed(step + 100 * rank)), head).backward()
        optimizer.step()
        if step % 4 < 3 and step not in (0, FREEZE):
            assert not any(changed(b, state_of(optimizer, p)) for b, p in zip(before, other.parameters(), strict=True))
    assert optimizer.phase == "compression"
    return [p.detach() for p in model.parameters()]


def test_heads_that_no_rank_uses_stay_under_ddp():
    first, second = run_ranks(train_two_heads, 2)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def train_in_nodes(rank: int, world_size: int, kind: str) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    params = parameters()
    optimizer = (AVERAGING | OWN)[kind](params, weight_decay=0.1, hierarchy=mesh)
    for step in range(9):
        stays(optimizer, params, rank, step, step % 4)
    return params


@pytest.mark.full
@pytest.mark.parametrize("kind", ["adam", "marsit adam"])
def test_what_no_rank_of_any_node_has_a_gradient_of_stays(kind):
    first, *others = run_ranks(train_in_nodes, 4, kind)
    assert all(torch.equal(p, q) for params in others for p, q in zip(first, params, strict=True))


def train_shards(rank: int, world_size: int, kind: str) -> list[Tensor]:
    import sharded

    mesh = sharded.make_mesh()
    torch.manual_seed(0)
    shapes = [(31, 17), (5,), (1,), (3000,), (70, 40)]  # of one element one shard is empty
    params = sharded.sharded_parameters([torch.randn(shape) for shape in shapes], mesh)
    optimizer = AVERAGING[kind](params, weight_decay=0.1, process_group=mesh["replicate"])
    replica = rank // 2
    for step in range(9):
        absent = absent_in(step)
        for i, p in enumerate(params):
            here = replica != step % 2 or i != (step + 1) % 5
            generator = torch.Generator().manual_seed(replica + 10 * step + 1000 * i)
            whole = torch.randn(shapes[i], generator=generator)
            p.grad = sharded.like(p, whole) if here and i not in absent else None
        before = {i: [local(params[i]).clone(), optimizer.momentum(params[i]).clone()] for i in absent}
        optimizer.step()
        for i, values in before.items():
            assert all(map(torch.equal, values, [local(params[i]), optimizer.momentum(params[i])]))
    assert optimizer.phase == "compression"
    steps = [int(optimizer.state[p]["step"]) for p in params]
    assert steps == [sum(i not in absent_in(step) for step in range(9)) for i in range(5)]
    return [local(p).detach().clone() for p in params]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_what_no_replica_has_a_gradient_of_stays_in_every_shard(kind):
    columns = run_ranks(train_shards, 4, kind)
    for shard in (0, 1):
        assert all(torch.equal(p, q) for p, q in zip(columns[shard], columns[shard + 2], strict=True))
