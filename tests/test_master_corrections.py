"""Masters of which optimizers keep only what bfloat16 parameters lack: they are the float32 copies, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from master_weight_runs import FREEZE, load, make, overwrite, put, set_gradients, train
from observe import parameters, through_a_file
from optimizers import MAKE, objects
from ranks import simulate
from torch import Tensor

from fusedonebit import AdamW, Numerics, OneBitAdam, OneBitLion
from fusedonebit.comm import Transport
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.triton_kernels import using
from fusedonebit.triton_kernels.op import launches

BF16 = torch.bfloat16
STEPS = 16
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (AdamW, {}),
    "AdamW, 8-bit state": (AdamW, {"state": "8bit"}),
    "OneBitAdam": (OneBitAdam, {"freeze_step": FREEZE, "guard": "off"}),
    "OneBitAdam, m undivided": (OneBitAdam, {"freeze_step": FREEZE, "guard": "off", "precondition": False}),
    "OneBitLion": (OneBitLion, {}),
}
EACH = pytest.mark.parametrize("name", KINDS)
EACH_WAY = pytest.mark.parametrize("kept", ["16bit", "8bit"])


def build(name: str, kept: bool | str, seed: int = 0, **more: Any) -> DistributedOptimizer:
    kind, options = KINDS[name]
    options = {"lr": 1e-3, "master_weights": kept} | options | more
    return kind(make(BF16, seed), **objects(**options))


def masters(optimizer: DistributedOptimizer) -> list[Tensor]:
    saved = optimizer.state_dict()["state"]
    return [saved[i]["master"].clone() for i in range(len(saved))]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def off_by(optimizer: DistributedOptimizer, at: int, value: Tensor) -> float:
    """How far from ``value`` a parameter's master is, in units of the last place of bfloat16."""
    found = optimizer.frame.parameters.master(at)
    return float(((found.view(torch.int32) - value.float().view(torch.int32)).abs() / 2.0**16).max())


# ---------------------------------------------------------------- what they are


def beside_copies(rank: int, transport: Transport, name: str, kept: str) -> tuple[list[bool], list[bool], str]:
    """Trains with corrections and with float32 copies, on the same gradients."""
    ours, copies = (build(name, each, process_group=transport) for each in (kept, True))
    same, nearest = [], []
    for step in range(STEPS):
        for optimizer in (ours, copies):
            train(optimizer, rank, range(step, step + 1), BF16)
        found = masters(ours)
        same.append(equal(found, masters(copies)))
        # Those at equal distance from two bfloat16 may go to either.
        off = [off_by(ours, i, p.detach()) for i, p in enumerate(parameters(ours))]
        nearest.append(max(off) <= 0.5)
    return same, nearest, ours.stats()["phase"]


@EACH
def test_masters_in_16_bits_are_the_float32_copies_bit_by_bit(name):
    for same, nearest, phase in simulate(beside_copies, 2, name, "16bit"):
        assert all(same), same
        assert all(nearest)
        assert phase == {"A": "uncompressed", "O": "compression"}[name[0]] or name == "OneBitLion"


@EACH
def test_8_bit_masters_differ_and_parameters_are_their_nearest(name):
    for same, nearest, _ in simulate(beside_copies, 2, name, "8bit"):
        assert not any(same)
        assert all(nearest)


@EACH_WAY
def test_steps_far_below_half_a_unit_add_up(kept):
    lr, steps = 2.0**-8 / 100, 400  # a hundredth of half a unit below 1: in 8 bits 0.64 of what they can tell apart
    ends = {}
    for how in (False, True, kept):
        p = torch.nn.Parameter(torch.full((4096,), 0.75, dtype=BF16))
        optimizer = AdamW([p], lr, weight_decay=0.0, numerics=Numerics(master_weights=how))
        for _ in range(steps):
            p.grad = torch.full_like(p, -1.0)
            optimizer.step()
        ends[how] = float(p.detach().float().mean()) - 0.75
    print(f"{kept}: {steps} steps of {lr:.1e} moved {ends[kept]:.3e}; none {ends[False]:.1e}, copies {ends[True]:.3e}")
    assert ends[False] == 0.0
    assert abs(ends[kept] - steps * lr) < 0.02 * steps * lr


@EACH
@EACH_WAY
def test_ranks_have_the_same_masters(name, kept):
    def run(rank: int, transport: Transport) -> list[Tensor]:
        optimizer = build(name, kept, process_group=transport)
        train(optimizer, rank, range(STEPS), BF16)
        return [*masters(optimizer), *(p.detach() for p in parameters(optimizer))]

    one, other = simulate(run, 2)
    assert equal(one, other)


@pytest.mark.parametrize(("kept", "more"), [("8bit", 1), ("16bit", 2)])
def test_they_take_1_or_2_bytes_of_an_element(kept, more):
    held = {}
    for how in (False, kept):
        p = torch.nn.Parameter(torch.zeros(1000, 1024, dtype=BF16))
        optimizer = AdamW([p], numerics=Numerics(master_weights=how, state="8bit"))
        p.grad = torch.ones_like(p)
        optimizer.step()
        held[how] = optimizer.stats()["state_bytes"]
    print(f"{kept}: {held[kept] / p.numel():.2f} bytes of state for each parameter, else {held[False] / p.numel():.2f}")
    assert held[kept] - held[False] == more * p.numel()


@pytest.mark.needs_compiler
@pytest.mark.parametrize(
    ("kept", "like"), [("16bit", {}), ("8bit", {"stochastic_rounding": True})], ids=["16bit", "8bit"]
)
@EACH
def test_nothing_is_launched_for_them(name, kept, like):
    counted = []
    for options in ({"kept": kept}, {"kept": False, **like}):
        optimizer = build(name, **options)
        train(optimizer, 0, range(FREEZE + 2), BF16)
        launches.clear()
        train(optimizer, 0, range(FREEZE + 2, FREEZE + 4), BF16)
        counted.append(dict(launches))
    assert counted[0] == counted[1]
    if kept == "8bit":  # what it is rounded by must not be counted up in the same launch
        assert counted[0]["advance"] == 2
    assert {"A": "adam_update", "O": "apply_momentum"}[name[0]] in counted[0]


@pytest.mark.needs_compiler
@EACH_WAY
@EACH
def test_steps_are_the_same_on_each_backend(name, kept):
    ends = []
    for backend in ("plain", "native"):
        with using(backend):
            optimizer = build(name, kept)
            train(optimizer, 0, range(STEPS), BF16)
            ends.append(masters(optimizer))
    assert equal(*ends)


def test_float32_parameters_beside_are_masters_themselves():
    ends = []
    for kept in (True, "16bit"):
        half, whole = make(BF16), make(torch.float32)
        optimizer = AdamW([*half, *whole], 1e-2, numerics=Numerics(master_weights=kept))
        train(optimizer, 0, range(STEPS), BF16)
        saved = optimizer.state_dict()["state"]
        assert ["master" in saved[i] for i in range(8)] == [True] * 4 + [False] * 4
        ends.append([p.detach() for p in whole] + [saved[i]["master"] for i in range(4)])
    assert equal(*ends)


# ---------------------------------------------------------------- what others write


@EACH_WAY
@pytest.mark.parametrize("how", ["in place", "in part", "other memory", "data"])
def test_what_is_written_into_a_parameter_counts_to_half_a_unit(how, kept):
    optimizer = build("AdamW", kept, lr=1e-4)
    train(optimizer, 0, range(4), BF16)
    p, before = parameters(optimizer)[0], masters(optimizer)
    if how == "data":
        p.data.fill_(3.0)
    else:
        overwrite(p, how)
    assert off_by(optimizer, 0, p.detach()) <= 0.5
    train(optimizer, 0, range(4, 5), BF16)
    found = masters(optimizer)
    written = torch.full_like(before[0], 3.0)
    if how == "in part":
        written.view(-1)[5:] = before[0].view(-1)[5:]
    assert (found[0] - written).abs().max() <= 1e-3 + 2.0**-7
    assert (found[1] - before[1]).abs().max() <= 1e-3
    assert off_by(optimizer, 0, parameters(optimizer)[0].detach()) <= 0.5


@EACH_WAY
def test_pruned_parameters_become_0_and_no_nan(kept):
    optimizer = build("AdamW", kept, weight_decay=0.0)
    train(optimizer, 0, range(4), BF16)
    p = parameters(optimizer)[0]
    p.data.zero_()
    p.grad = torch.zeros_like(p)
    assert all(m.isfinite().all() for m in masters(optimizer))
    assert masters(optimizer)[0].abs().max() < 1e-38


def test_a_group_added_later_leaves_the_others_their_masters():
    p, *others = make(BF16)
    optimizer = AdamW([p], 1e-3, numerics=Numerics(master_weights="16bit"))
    train(optimizer, 0, range(5), BF16)
    before = masters(optimizer)[0]
    optimizer.add_param_group({"params": others})
    assert torch.equal(masters(optimizer)[0], before)
    set_gradients(optimizer, 0, 5, BF16)
    optimizer.step()
    assert 0 < (masters(optimizer)[0] - before).abs().max() < 0.01


# ---------------------------------------------------------------- checkpoints


def resume(rank: int, transport: Transport, name: str, kept: str, cut: int, model_first: bool) -> bool:
    straight = build(name, kept, process_group=transport)
    train(straight, rank, range(cut), BF16)
    saved = through_a_file([straight.state_dict(), [p.detach() for p in parameters(straight)]])
    assert all(saved[0]["state"][i]["master"].dtype == torch.float32 for i in range(4))
    expected = train(straight, rank, range(cut, STEPS), BF16)
    again = build(name, kept, seed=1, process_group=transport)
    train(again, rank, range(2), BF16)
    load(again, saved, model_first)
    return train(again, rank, range(cut, STEPS), BF16) == expected and equal(masters(straight), masters(again))


@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "optimizer first"])
@pytest.mark.parametrize(("name", "cut"), [("AdamW, 8-bit state", 5), ("OneBitAdam", 5), ("OneBitAdam", 12)])
@EACH_WAY
def test_resuming_is_exact_in_either_order(name, cut, kept, model_first):
    assert simulate(resume, 2, name, kept, cut, model_first) == [True, True]


@EACH_WAY
def test_loaded_masters_stay_before_and_after_the_model_loads(kept):
    first, again = build("AdamW", kept), build("AdamW", kept, seed=1)
    train(first, 0, range(5), BF16)
    saved, expected = through_a_file(first.state_dict()), masters(first)
    again.load_state_dict(saved)
    assert equal(masters(again), expected)
    put(parameters(again), [p.detach() for p in parameters(first)])
    assert equal(masters(again), expected)


@pytest.mark.parametrize("source", [False, True, "16bit", "8bit"])
@pytest.mark.parametrize("target", [True, "16bit", "8bit"])
def test_checkpoints_go_from_each_kind_of_masters_to_each(source, target):
    first, again = build("AdamW", source), build("AdamW", target, seed=1)
    train(first, 0, range(5), BF16)
    train(again, 0, range(2), BF16)
    put(parameters(again), [p.detach() for p in parameters(first)])
    again.load_state_dict(through_a_file(first.state_dict()))
    again.frame.parameters.refresh_masters()
    wanted = masters(first) if source else [p.detach().float() for p in parameters(first)]
    for found, master in zip(masters(again), wanted, strict=True):
        off = (found.view(torch.int32) - master.view(torch.int32)).abs().max()
        # A tie that was rounded down lacks half a unit: one more than is the largest number of 16 bits, or of 8.
        assert off <= {True: 0, "16bit": 1, "8bit": 0x100}[target]
    train(again, 0, range(5, 7), BF16)


@EACH_WAY
def test_a_parameter_that_is_not_its_loaded_master_counts(kept):
    first, again = build("AdamW", kept), build("AdamW", kept, seed=1)
    train(first, 0, range(5), BF16)
    again.load_state_dict(through_a_file(first.state_dict()))
    put(parameters(again), [torch.full_like(p, 3.0) for p in parameters(first)])
    again.frame.parameters.refresh_masters()
    assert all((m == 3.0).all() for m in masters(again))


# ---------------------------------------------------------------- who refuses them


@EACH_WAY
@pytest.mark.parametrize("name", [n for n in MAKE if n not in ("AdamW, ours", "OneBitAdam", "OneBitLion")])
def test_whose_kernels_take_none_refuses_them(name, kept):
    said = f"master_weights must be True or False with .*, got '{kept}'.*use True, or AdamW"
    with pytest.raises(ValueError, match=said):
        MAKE[name](make(BF16), master_weights=kept)


def test_other_dtypes_and_values_are_refused_with_a_way_out():
    for dtype, said in ((torch.float16, "use bfloat16"), (torch.float32, "cast the model to bfloat16")):
        with pytest.raises(ValueError, match=f"master_weights must be .*, got '8bit' and .*{said}"):
            AdamW(make(dtype), numerics=Numerics(master_weights="8bit"))
    for value in ("4bit", 16, None):
        with pytest.raises(ValueError, match='master_weights must be True, False, "8bit" or "16bit", got'):
            AdamW(make(BF16), numerics=Numerics(master_weights=value))
    with pytest.raises(ValueError, match=r"stochastic_rounding must be False with Numerics\(master_weights='8bit'\)"):
        AdamW(make(BF16), numerics=Numerics(master_weights="8bit", stochastic_rounding=True))
