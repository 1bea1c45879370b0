"""Float32 masters of 16-bit parameters: updates that rounding would swallow, and nothing else, come to count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from freeze_runs import gradient
from master_weight_runs import FREEZE, STEPS, load, make, overwrite, put, set_gradients, train, values
from observe import fingerprint, parameters, through_a_file
from optimizers import ADAM_AND_LAMB, construct, objects
from ranks import run_ranks, simulate
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import Faults, Numerics, OneBitAdam, amp
from fusedonebit.comm import Transport
from fusedonebit.core.optimizer import DistributedOptimizer

HALVES = (torch.bfloat16, torch.float16)
EACH_HALF = pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance from 1 to the next number."""


def masters(optimizer: DistributedOptimizer) -> list[Tensor]:
    return [optimizer.state[p]["master"] for p in parameters(optimizer)]


def are_rounded_masters(optimizer: DistributedOptimizer) -> bool:
    pairs = zip(parameters(optimizer), masters(optimizer), strict=True)
    return all(m.dtype == torch.float32 and m.shape == p.shape and torch.equal(m.to(p.dtype), p) for p, m in pairs)


# ---------------------------------------------------------------- what they are for


def beside_float32(rank: int, transport: Transport, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Trains parameters of 16 bits with masters, and float32 ones from the same values with the same gradients."""
    options = {"lr": 1e-2, "freeze_step": FREEZE, "guard": "off", "process_group": transport}
    halves = construct(name, make(dtype), master_weights=True, **options)
    wide = construct(name, make(torch.float32, rounded_to=dtype), **options)
    rounded, equal = [], []
    for step in range(STEPS):
        for optimizer in (halves, wide):
            prints = train(optimizer, rank, range(step, step + 1), dtype)[0]
        rounded.append(are_rounded_masters(halves))
        equal.append(all(torch.equal(m, p) for m, p in zip(masters(halves), parameters(wide), strict=True)))
    prints = fingerprint([m.contiguous() for m in masters(halves)])
    return {"rounded": rounded, "equal": equal, "prints": prints, "phase": halves.stats()["phase"]}


@pytest.mark.long(but=1)
@EACH_HALF
@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb", "lamb"])
def test_masters_are_what_float32_parameters_would_be(name, dtype):
    ranks = simulate(beside_float32, 2, name, dtype)
    for told in ranks:
        assert all(told["rounded"])
        assert all(told["equal"]), told["equal"]
        assert told["prints"] == ranks[0]["prints"]
        assert told["phase"] == ("uncompressed" if name == "lamb" else "compression")


@EACH_HALF
def test_steps_below_half_an_ulp_add_up(dtype):
    """Adam's first steps with a constant gradient are lr each: here a third of half an ulp, 30 times."""
    moved, lr = {}, ULP[dtype] / 2 / 3
    for master_weights in (False, True):
        p = Parameter(torch.ones(64, dtype=dtype))
        optimizer = OneBitAdam(
            [p],
            lr,
            weight_decay=0.0,
            freeze_step=15,
            faults=Faults(guard="off"),
            numerics=Numerics(master_weights=master_weights),
        )
        for _ in range(30):
            p.grad = torch.full_like(p, -1.0)
            optimizer.step()
        assert optimizer.phase == "compression"
        moved[master_weights] = float(p.detach()[0]) - 1.0
    print(f"{dtype}: 30 steps of {lr:.1e} moved {moved[False]:.1e} without masters, {moved[True]:.1e} with")
    assert moved[False] == 0.0
    assert abs(moved[True] - 30 * lr) <= ULP[dtype]


def mixed(rank: int, world_size: int) -> tuple[int, float, str]:
    """Float16 gradients of a scaled loss, of which torch's scaler refuses to unscale any."""
    params = [*make(torch.float16)[:1], *make(torch.bfloat16)[1:2], *make(torch.float32)[2:]]
    optimizer = construct("onebit-adam", params, freeze_step=FREEZE, master_weights=True, guard="off")
    scaler = amp.GradScaler("cpu", 2.0**14)
    for step in range(STEPS):
        for i, p in enumerate(params):
            p.grad = scaler.scale(gradient(rank, step, p, i)).to(p.dtype)
        if rank == 1 and step in (4, 12):
            params[0].grad[0, 0] = 1e6  # inf
        before = [m["master"].clone() for m in optimizer.state.values() if "master" in m]
        scaler.step(optimizer)
        scaler.update()
        after = [m["master"] for m in optimizer.state.values() if "master" in m]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == (step in (4, 12))
    has = ["master" in optimizer.state[p] for p in params]
    assert has == [True, True, False, False]
    return optimizer.stats()["skipped_steps"], scaler.get_scale(), fingerprint(params[:1])


def test_mixed_dtypes_train_with_a_loss_scale():
    one, other = run_ranks(mixed, 2)
    assert one == other
    assert one[:2] == (2, 2.0**12)


# ---------------------------------------------------------------- parameters that others write


def broadcast(rank: int, world_size: int) -> tuple[bool, list[str]]:
    optimizer = construct(
        "onebit-adam", make(torch.bfloat16, seed=rank), freeze_step=4, master_weights=True, broadcast_parameters=True
    )
    same = all(torch.equal(p.float(), v) for p, v in zip(parameters(optimizer), values(torch.bfloat16), strict=True))
    return same and are_rounded_masters(optimizer), train(optimizer, rank, range(8), torch.bfloat16)


def test_rank_0s_values_are_broadcast_into_masters_too():
    (same, prints), (also, others) = run_ranks(broadcast, 2)
    assert same
    assert also
    assert prints == others


@pytest.mark.long(but=2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("step", [2, 6], ids=["warm-up", "compression"])
@pytest.mark.parametrize("how", ["in place", "in part", "other memory"])
def test_what_is_written_into_a_parameter_its_master_takes_over(how, step, compiled):
    p, q = make(torch.bfloat16)[:2]
    optimizer = OneBitAdam(
        [p, q], 1e-4, freeze_step=4, numerics=Numerics(master_weights=True), faults=Faults(guard="off")
    )
    take_step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    for i in range(step + 1):
        set_gradients(optimizer, 0, i, torch.bfloat16)
        if i == step:
            kept, written = masters(optimizer)[0].clone(), masters(optimizer)[1].clone()
            overwrite(p, how)
        take_step()
    new = masters(optimizer)[0]
    untouched = torch.zeros_like(p, dtype=torch.bool)
    untouched.view(-1)[5:] = how == "in part"
    assert (new - torch.where(untouched, kept, 3.0)).abs().max() <= 1e-3
    assert (masters(optimizer)[1] - written).abs().max() <= 1e-3
    assert are_rounded_masters(optimizer)
    # What nobody has written keeps what rounding would have dropped.
    assert not torch.equal(masters(optimizer)[1], q.float())


@pytest.mark.parametrize("written", [False, True])
def test_a_group_added_later_has_masters_and_others_keep_theirs(written):
    p, *others = make(torch.bfloat16)
    optimizer = OneBitAdam([p], 1e-3, freeze_step=20, numerics=Numerics(master_weights=True))
    train(optimizer, 0, range(5), torch.bfloat16)
    before = masters(optimizer)[0].clone()
    if written:
        overwrite(p, "in place")
    optimizer.add_param_group({"params": others})
    assert torch.equal(masters(optimizer)[0], torch.full_like(before, 3.0) if written else before)
    assert are_rounded_masters(optimizer)
    train(optimizer, 0, range(5, 8), torch.bfloat16)
    assert are_rounded_masters(optimizer)


# ---------------------------------------------------------------- checkpoints


def resume(rank: int, transport: Transport, name: str, cut: int, model_first: bool, dtype: torch.dtype) -> bool:
    options: dict[str, Any] = {"process_group": transport}
    options |= {"lr": 1e-2, "freeze_step": FREEZE, "guard": "off", "master_weights": True}
    straight = construct(name, make(dtype), **options)
    train(straight, rank, range(cut), dtype)
    saved = through_a_file([straight.state_dict(), [p.detach() for p in parameters(straight)]])
    assert all(saved[0]["state"][i]["master"].dtype == torch.float32 for i in range(4))
    expected = train(straight, rank, range(cut, STEPS), dtype)

    again = construct(name, make(dtype, seed=1), **options)
    train(again, rank, range(2), dtype)
    load(again, saved, model_first)
    found = train(again, rank, range(cut, STEPS), dtype)
    return found == expected and all(map(torch.equal, masters(straight), masters(again)))


@pytest.mark.long(but=1)
@EACH_HALF
@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "optimizer first"])
@pytest.mark.parametrize(("name", "cut"), [("onebit-adam", 5), ("onebit-adam", 12), ("onebit-lamb", 12), ("lamb", 5)])
def test_resuming_is_exact_in_either_order(name, cut, model_first, dtype):
    assert simulate(resume, 2, name, cut, model_first, dtype) == [True, True]


@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "optimizer first"])
def test_what_is_written_before_saving_counts_after_loading(model_first):
    first, again = (
        OneBitAdam(make(torch.bfloat16, s), 1e-4, freeze_step=9, numerics=Numerics(master_weights=True)) for s in (0, 1)
    )
    train(first, 0, range(2), torch.bfloat16)
    overwrite(parameters(first)[0], "in place")
    load(again, through_a_file([first.state_dict(), [p.detach() for p in parameters(first)]]), model_first)
    train(again, 0, range(2, 3), torch.bfloat16)
    assert (masters(again)[0] - 3.0).abs().max() <= 1e-3


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("torch's AdamW", 3),
        *((kind, steps) for kind in ("ours without masters", "ours into one without") for steps in (3, 12)),
    ],
)
def test_checkpoints_with_masters_and_without(kind, steps):
    options = {"lr": 1e-2, "freeze_step": FREEZE, "guard": "off"}
    params = make(torch.bfloat16)
    source = torch.optim.AdamW(params) if kind == "torch's AdamW" else OneBitAdam(params, **objects(**options))
    if kind == "ours into one without":
        source = OneBitAdam(params, **objects(master_weights=True, **options))
    train(source, 0, range(steps), torch.bfloat16)
    target = OneBitAdam(make(torch.bfloat16), **objects(master_weights=kind != "ours into one without", **options))
    train(target, 0, range(2), torch.bfloat16)  # has masters of its own by now
    put(parameters(target), [p.detach() for p in params])
    target.load_state_dict(through_a_file(source.state_dict()))
    if kind == "ours into one without":
        assert all("master" not in state for state in target.state.values())
    else:
        assert all(torch.equal(m, p.float()) for m, p in zip(masters(target), params, strict=True))
    train(target, 0, range(steps, steps + 2), torch.bfloat16)
    assert target.stats()["step"] == steps + 2


def test_a_master_of_another_shape_is_refused_unchanged():
    source, target = (
        OneBitAdam(make(torch.bfloat16, s), freeze_step=9, numerics=Numerics(master_weights=True)) for s in (0, 1)
    )
    train(source, 0, range(2), torch.bfloat16)
    saved, before = source.state_dict(), [m.clone() for m in masters(target)]
    saved["state"][1]["master"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"master of parameter 1 must have shape \(6, 5, 4, 3\), got \(3,\)"):
        target.load_state_dict(saved)
    assert all(map(torch.equal, masters(target), before))


# ---------------------------------------------------------------- what they cost


@ADAM_AND_LAMB
@EACH_HALF
def test_masters_cost_4_bytes_an_element(name, dtype):
    told = {}
    for master_weights in (False, True):
        optimizer = construct(name, make(dtype), freeze_step=2, guard="off", master_weights=master_weights)
        for steps in (range(1), range(1, 4)):
            train(optimizer, 0, steps, dtype)
            told[master_weights, optimizer.phase] = optimizer.stats()["state_bytes"]
    elements = optimizer.stats()["parameters"]
    more = [told[True, phase] - told[False, phase] for phase in ("warmup", "compression")]
    print(f"{name}: masters of {elements} elements take {more} bytes (expected {4 * elements})")
    assert more == [4 * elements] * 2


@ADAM_AND_LAMB
def test_float32_parameters_have_none_and_nothing_changes(name):
    plain, asked = (
        construct(name, make(torch.float32), freeze_step=4, guard="off", master_weights=m) for m in (False, True)
    )
    assert train(plain, 0, range(8), torch.float32) == train(asked, 0, range(8), torch.float32)
    assert all("master" not in state for state in asked.state.values())
    assert plain.stats()["state_bytes"] == asked.stats()["state_bytes"]
    saved = [optimizer.state_dict()["state"][0].keys() for optimizer in (plain, asked)]
    assert saved[0] == saved[1]
