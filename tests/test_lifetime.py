"""An optimizer that nobody holds is gone at once, with its state; copies and pickles do what they do for torch's."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from optimizers import ALIVE, MAKE, ONEBIT, by_name, objects
from ranks import run_ranks
from sharded import make_mesh, sharded_parameters
from torch import Tensor, nn
from torch.nn import Parameter

from fusedonebit import AdamW, Lamb, OneBitAdam, Wire
from fusedonebit.checkpoint import KEY, header_of
from fusedonebit.comm import LocalTransport, SimulatedGroup

CASES = ALIVE | {"OneBitAdam, master weights": by_name(OneBitAdam, freeze_step=2, guard="off", master_weights=True)}


@pytest.mark.long(but=20)
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("name", CASES)
def test_state_and_parameters_are_freed_with_the_optimizer(name, steps):
    torch.manual_seed(0)  # the guard lets through what follows two steps of warm-up, or not
    model = nn.Linear(3, 3).to(torch.bfloat16 if "master" in name else torch.float32)
    optimizer = CASES[name](model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, dtype=model.weight.dtype)).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    repr(optimizer)
    held = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    gone = [weakref.ref(x) for x in (optimizer, *model.parameters(), *held)]
    gc.disable()
    try:
        del optimizer, model, held
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()


def large_tensors(at_least: int) -> set[int]:
    """Return where all memory begins that anybody holds as a tensor, and that has so many bytes."""
    gc.collect()
    dense = [each for each in gc.get_objects() if type(each) in (Tensor, Parameter) and each.layout is torch.strided]
    storages = [each.untyped_storage() for each in dense]
    return {each.data_ptr() for each in storages if each.nbytes() >= at_least}


@pytest.mark.parametrize("name", [*ONEBIT, "AdamW, ours", "Lamb", "MarsitSGD", "MarsitAdam", "ZeroOneAdam"])
def test_a_closed_algorithm_frees_all_but_what_its_reducer_owes(name):
    p = Parameter(torch.zeros(50_000))
    before = large_tensors(p.numel())
    optimizer = MAKE[name]([p]) if name in MAKE else ONEBIT[name]([p], freeze_step=2, guard="off")
    for _ in range(5):
        p.grad = torch.randn(p.shape)
        optimizer.step()
    p.grad = None
    held = large_tensors(p.numel()) - before
    optimizer.state.clear()
    optimizer.algorithm.close()
    left = large_tensors(p.numel()) - before
    print(f"{name}: {len(held)} of the model's size before, {len(left)} afterwards")
    # Of a living variance squares, too, and what was told of them.
    of_reducer = 0 if optimizer.algorithm.exchange is None else 3 if "living" in name else 1
    assert len(left) == of_reducer < len(held)


# ---------------------------------------------------------------- whoever holds the optimizer, its frame or algorithm


def parameters(count: int = 2) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(24, generator=generator)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn(24, generator=generator)
    return params


@pytest.mark.parametrize("name", ["OneBitAdam", "AdamW, ours", "MarsitSGD"])
def test_groups_that_somebody_has_assigned_count(name):
    params = parameters(3)
    optimizer = MAKE[name](params[:2], lr=1e-2)
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.add_param_group({"params": params[2:]})
    before = params[2].detach().clone()
    optimizer.step()
    assert not torch.equal(params[2], before)


def test_a_loss_scale_counts_where_it_is_set_and_not_afterwards():
    params = parameters()
    optimizer = OneBitAdam(params, lr=1e-2)
    wrapper = object.__new__(OneBitAdam)
    vars(wrapper).update(vars(optimizer))  # as libraries do that wrap optimizers
    wrapper.grad_scale, wrapper.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    before = [p.detach().clone() for p in params]
    wrapper.step()
    assert all(map(torch.equal, params, before)), "an inf was found"
    optimizer.step()
    assert not any(map(torch.equal, params, before))


@pytest.mark.parametrize("name", MAKE)
def test_before_a_step_each_says_whether_it_averages_gradients(name):
    averages = {"OneBitMuon"}  # one rank alone
    averages |= {"OneBitAdam", "OneBitLamb", "AdamW, ours", "Lamb", "ZeroOneAdam"}
    assert MAKE[name](parameters(), lr=1e-2).averages_gradients == (name in averages)


@pytest.mark.parametrize(
    ("kind", "wire"),
    [(OneBitAdam, Wire(overlap=True)), (AdamW, Wire(release_gradients=True))],
    ids=["sent", "released"],
)
def test_hooks_end_with_the_optimizer_though_its_algorithm_lives(kind: Any, wire: Wire):
    params = parameters()
    optimizer = kind(params, lr=1e-2, wire=wire)
    algorithm, gone = optimizer.algorithm, weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    before = [p.detach().clone() for p in params]
    sum((p * p).sum() for p in params).backward()
    assert all(map(torch.equal, params, before))
    assert not any(p._post_accumulate_grad_hooks for p in params)
    assert algorithm.frame.owner() is None


def test_a_load_gives_back_the_memory_of_the_algorithm_before():
    optimizer = AdamW(parameters(), lr=1e-2)
    optimizer.step()
    saved, earlier = copy.deepcopy(optimizer.state_dict()), optimizer.algorithm
    moments = weakref.ref(earlier.moments.exp_avg)
    optimizer.load_state_dict(saved)
    assert moments() is None
    assert optimizer.algorithm is not earlier


# ---------------------------------------------------------------- copies and pickles


EACH = pytest.mark.parametrize("name", ALIVE)
STAGES = pytest.mark.parametrize("steps", [1, 5], ids=lambda n: f"after {n} steps")


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


WAYS = pytest.mark.parametrize("way", [copy.deepcopy, pickled], ids=lambda f: f.__name__)


def make(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(dtype)
    return model, ALIVE[name](model.parameters(), lr=1e-2, **options)


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator).to(dtype)).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.long(but=4)
@WAYS
@STAGES
@EACH
@pytest.mark.filterwarnings("ignore:after so few updates")
def test_a_model_and_its_optimizer_are_copied_together(name, steps, way):
    model, optimizer = make(name)
    before = train(model, optimizer, steps)
    other_model, other = way((model, optimizer))
    theirs = [p for group in other.param_groups for p in group["params"]]
    assert {id(p) for p in theirs} == {id(p) for p in other_model.parameters()}
    moved = train(other_model, other, 4, seed=1)
    assert equal([p.detach() for p in model.parameters()], before)
    assert not equal(moved, before)
    assert equal(train(model, optimizer, 4, seed=1), moved)


@pytest.mark.long(but=8)
@WAYS
@EACH
@pytest.mark.filterwarnings("ignore:after so few updates")
def test_a_copy_alone_has_its_own_parameters_and_the_same_state(name, way):
    model, optimizer = make(name)
    train(model, optimizer, 5)
    other = way(optimizer)
    assert type(other) is type(optimizer)
    theirs, ours = ([p for group in each.param_groups for p in group["params"]] for each in (other, optimizer))
    assert equal(theirs, ours)
    assert not {id(p) for p in theirs} & {id(p) for p in model.parameters()}
    mine, copied = optimizer.state_dict(), other.state_dict()
    assert without_header(copied) == without_header(mine)
    if name != "AdamW":
        # What lies between tensors, in buffers of which they are views, is nobody's.
        assert header_of(copied) | {"between": 0} == header_of(mine) | {"between": 0}
    for key, value in mine["state"].items():
        assert value.keys() == copied["state"][key].keys()
        assert all(torch.equal(entry, copied["state"][key][at]) for at, entry in value.items())


def without_header(saved: dict) -> list[dict]:
    return [{key: value for key, value in group.items() if key != KEY} for group in saved["param_groups"]]


@WAYS
def test_masters_masks_entries_of_others_and_schedules_go_along(way):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).bfloat16()
    mask = torch.arange(12).view(3, 4) % 2 == 0
    options: dict[str, Any] = {"freeze_step": 2, "guard": "off", "master_weights": True, "mask": {model.weight: mask}}
    optimizer = OneBitAdam(
        [{"params": [model.weight], "lr": 1e-3}, {"params": [model.bias]}], lr=1e-2, **objects(**options)
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    optimizer.state["note"] = 5
    for seed in range(5):
        train(model, optimizer, 1, seed)
        schedule.step()
    start = model.weight.detach().clone()
    other_model, other, other_schedule = way((model, optimizer, schedule))
    assert other.state["note"] == 5
    assert other_schedule.optimizer is other
    for m, o, s in ((model, optimizer, schedule), (other_model, other, other_schedule)):
        for seed in range(3):
            train(m, o, 1, seed)
            s.step()
    assert equal(list(model.parameters()), list(other_model.parameters()))
    assert torch.equal(other_model.weight != start, mask) or torch.equal(other_model.weight[~mask], start[~mask])
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize("name", ["OneBitAdam", "AdamW"])
def test_hooks_are_not_copied(name):
    model, optimizer = make(name)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    other_model, other = copy.deepcopy((model, optimizer))
    train(other_model, other, 1)
    other.state_dict()
    assert calls == []


@pytest.mark.long(but=4)
@pytest.mark.parametrize("name", MAKE)
def test_a_deep_copy_works_over_the_same_ranks(name):
    def program(rank: int, transport: Any) -> tuple[list[Tensor], ...]:
        model, optimizer = make(name, process_group=transport)
        train(model, optimizer, 4, seed=rank)
        other_model, other = copy.deepcopy((model, optimizer))
        sent = optimizer.stats()["bytes_total"]
        steps = 2 if name == "ZeroOneAdam, own" else 1  # to a round's end
        moved = train(other_model, other, steps, seed=10 + rank)
        assert optimizer.stats()["bytes_total"] == sent
        assert other.stats()["bytes_total"] > sent
        assert other.stats()["transport"] == optimizer.stats()["transport"]
        return moved, train(model, optimizer, steps, seed=10 + rank)

    (one, again), (two, _) = SimulatedGroup(2).run(program)
    assert equal(one, two)
    assert equal(one, again)


def test_a_pickle_over_ranks_that_can_not_be_made_again_says_so():
    def program(rank: int, transport: Any) -> str:
        model, optimizer = make("OneBitAdam", process_group=transport)
        train(model, optimizer, 1, seed=rank)
        with pytest.raises(TypeError, match="can't be pickled") as caught:
            pickle.dumps(optimizer)
        return str(caught.value)

    told = SimulatedGroup(2).run(program)
    assert "over simulated (rank 1 of 2) can't be pickled" in told[1]
    assert "pickle its state_dict(), and load that into a new optimizer" in told[1]


def test_a_pickle_makes_the_default_group_again_on_as_many_ranks():
    files = run_ranks(pickled_on_ranks, 2)
    with pytest.raises(ValueError, match="pickled on rank 1 of 2, but this is rank 0 of 1: unpickle it on as many"):
        pickle.loads(files[1])
    told = run_ranks(unpickled_elsewhere, 2, files)
    assert all("pickled on rank" in text for text in told)


def pickled_on_ranks(rank: int, world_size: int) -> bytes:
    model, optimizer = make("OneBitAdam")
    train(model, optimizer, 4, seed=rank)
    file = pickle.dumps((model, optimizer))
    other_model, other = pickle.loads(file)
    moved = train(other_model, other, 3, seed=10 + rank)
    assert other.stats()["world_size"] == world_size
    assert equal(moved, train(model, optimizer, 3, seed=10 + rank))
    return file


def unpickled_elsewhere(rank: int, world_size: int, files: list[bytes]) -> str:
    try:
        pickle.loads(files[1 - rank])
    except ValueError as error:
        return str(error)
    return "nothing"


def test_one_that_works_alone_beside_others_stays_alone(monkeypatch):
    model, optimizer = make("OneBitAdam", process_group=LocalTransport())
    usual = pickle.dumps(optimizer)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    other_model, other = pickled((model, optimizer))
    assert equal(train(model, optimizer, 4), train(other_model, other, 4))
    # One that nobody has told to work alone would do so on each of the ranks that there are now.
    with pytest.raises(RuntimeError, match=r"rank 1 of 4"):
        pickle.loads(usual)


@pytest.mark.full
def test_copying_sharded_parameters_says_what_to_do_instead():
    for told in run_ranks(copied_in_shards, 4):
        assert "OneBitAdam of sharded parameters can't be pickled or deep-copied: save it with fusedonebit.dcp" in told


def copied_in_shards(rank: int, world_size: int) -> str:
    mesh = make_mesh()
    params = sharded_parameters([torch.ones(8, 4)], mesh)
    with pytest.raises(TypeError) as caught:
        copy.deepcopy(OneBitAdam(params, freeze_step=1, process_group=mesh["replicate"]))
    return str(caught.value)


def test_a_pickle_is_no_larger_than_the_state():
    p = nn.ParameterList([nn.Parameter(torch.randn(1000)) for _ in range(20)])
    optimizer = OneBitAdam(p, freeze_step=100)
    for each in p:
        each.grad = torch.randn(1000)
    optimizer.step()
    assert len(pickle.dumps(optimizer)) < 20 * 3 * 4000 * 1.3


def test_a_shallow_copy_is_refused():
    _, optimizer = make("Lamb")
    assert isinstance(optimizer, Lamb)
    with pytest.raises(TypeError, match=r"Lamb can't be copied by copy.copy: .*; use copy.deepcopy"):
        copy.copy(optimizer)
