"""Masters of 16-bit parameters, float32 copies or what bfloat16 lacks in 8 or 16 bits: no small step is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from freeze_runs import gradient
from master_weight_runs import (
    BF16,
    COPIED,
    FREEZE,
    HALVES,
    KINDS,
    STEPS,
    build,
    load,
    make,
    overwrite,
    put,
    saved_of,
    set_gradients,
    train,
    values,
)
from observe import fingerprint, parameters, through_a_file
from optimizers import ADAM_AND_LAMB, MAKE, objects
from ranks import run_ranks, simulate
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import AdamW, Numerics, amp
from fusedonebit.comm import Transport
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.triton_kernels import using
from fusedonebit.triton_kernels.op import launches

ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance from 1 to the next number."""
EACH = pytest.mark.parametrize("name", KINDS)
EACH_HALF = pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
EACH_WAY = pytest.mark.parametrize("kept", ["16bit", "8bit"])
EITHER_FIRST = pytest.mark.parametrize("model_first", [True, False], ids=["model first", "optimizer first"])


def masters(optimizer: DistributedOptimizer) -> list[Tensor]:
    saved = optimizer.state_dict()["state"]
    return [saved[i]["master"].clone() for i in range(len(saved))]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def are_rounded_masters(optimizer: DistributedOptimizer) -> bool:
    pairs = [(p, optimizer.state[p]["master"]) for p in parameters(optimizer)]
    return all(m.dtype == torch.float32 and m.shape == p.shape and torch.equal(m.to(p.dtype), p) for p, m in pairs)


def off_by(optimizer: DistributedOptimizer, at: int, value: Tensor) -> float:
    """How far from ``value`` a parameter's master is, in units of the last place of bfloat16."""
    found = optimizer.frame.parameters.master(at)
    return float(((found.view(torch.int32) - value.float().view(torch.int32)).abs() / 2.0**16).max())


# ---------------------------------------------------------------- what they are


def beside_float32(rank: int, transport: Transport, name: str, dtype: torch.dtype) -> str:
    """Trains parameters of 16 bits with masters, and float32 ones from the same values with the same gradients."""
    halves = build(name, True, dtype=dtype, lr=1e-2, process_group=transport)
    wide = (KINDS | COPIED)[name](make(torch.float32, rounded_to=dtype), lr=1e-2, process_group=transport)
    for step in range(STEPS):
        for optimizer in (halves, wide):
            train(optimizer, rank, range(step, step + 1), dtype)
        assert are_rounded_masters(halves)
        assert equal(masters(halves), parameters(wide)), step
    assert halves.stats()["phase"] == ("uncompressed" if name == "Lamb" else "compression")
    return fingerprint([m.contiguous() for m in masters(halves)])


@pytest.mark.long(but=1)
@EACH_HALF
@pytest.mark.parametrize("name", ["OneBitAdam", *COPIED])
def test_masters_are_what_float32_parameters_would_be(name, dtype):
    assert len(set(simulate(beside_float32, 2, name, dtype))) == 1


def beside_copies(rank: int, transport: Transport, name: str, kept: str) -> tuple[list[bool], list[Tensor], str]:
    """Trains with corrections and with float32 copies, on the same gradients."""
    ours, copies = (build(name, each, process_group=transport) for each in (kept, True))
    same = []
    for step in range(STEPS):
        for optimizer in (ours, copies):
            train(optimizer, rank, range(step, step + 1))
        same.append(equal(masters(ours), masters(copies)))
        # Those at equal distance from two bfloat16 may go to either.
        assert max(off_by(ours, i, p.detach()) for i, p in enumerate(parameters(ours))) <= 0.5
    return same, [*masters(ours), *(p.detach() for p in parameters(ours))], ours.stats()["phase"]


@EACH
@EACH_WAY
def test_in_16_bits_they_are_the_copies_and_in_8_near_them(name, kept):
    ranks = simulate(beside_copies, 2, name, kept)
    for same, ends, phase in ranks:
        assert all(same) if kept == "16bit" else not any(same), same
        assert equal(ends, ranks[0][1])
        assert phase == {"A": "uncompressed", "O": "compression"}[name[0]] or name in ("OneBitLion", "OneBitMuon")


@pytest.mark.parametrize(("kept", "dtype"), [*((True, dtype) for dtype in HALVES), ("16bit", BF16), ("8bit", BF16)])
def test_steps_far_below_half_a_unit_add_up(kept, dtype):
    """Steps of Adam's with a constant gradient are lr each, before the freeze and after it."""
    lr, steps, ends = ULP[dtype] / 100, 400, {}  # of bfloat16 in 8 bits 0.64 of what they can tell apart
    for how in (False, kept):
        p = Parameter(torch.full((4096,), 0.75, dtype=dtype))
        optimizer = KINDS["OneBitAdam"]([p], lr, weight_decay=0.0, freeze_step=200, master_weights=how)
        for _ in range(steps):
            p.grad = torch.full_like(p, -1.0)
            optimizer.step()
        assert optimizer.phase == "compression"
        ends[how] = float(p.detach().float().mean()) - 0.75
    print(f"{kept}, {dtype}: {steps} steps of {lr:.1e} moved {ends[kept]:.3e}; without masters {ends[False]:.1e}")
    assert ends[False] == 0.0
    assert abs(ends[kept] - steps * lr) < 0.02 * steps * lr


@pytest.mark.parametrize(
    ("name", "kept", "more", "dtype"),
    [
        *((name, True, 4, dtype) for name in ("OneBitAdam", "OneBitLamb") for dtype in HALVES),
        *(("AdamW, 8-bit state", f"{8 * n}bit", n, BF16) for n in (1, 2)),
    ],
)
def test_they_take_4_bytes_of_an_element_or_1_or_2(name, kept, more, dtype):
    told = {}
    for how in (False, kept):
        p = Parameter(torch.zeros(200, 1024, dtype=dtype))
        optimizer = (KINDS | COPIED)[name]([p], master_weights=how, **({"freeze_step": 2} if "OneBit" in name else {}))
        for steps in (range(1), range(1, 4)):
            train(optimizer, 0, steps, dtype)
            told[how, steps] = optimizer.stats()["state_bytes"]
    found = [told[kept, steps] - told[False, steps] for steps in (range(1), range(1, 4))]
    print(f"{name}: masters of {p.numel()} elements take {found} bytes (expected {more * p.numel()})")
    assert found == [more * p.numel()] * 2


@pytest.mark.needs_compiler
@pytest.mark.parametrize(("kept", "like"), [("16bit", {}), ("8bit", {"stochastic_rounding": True})])
@EACH
def test_nothing_is_launched_for_corrections(name, kept, like):
    counted = []
    for options in ({"kept": kept}, {"kept": False, **like}):
        optimizer = build(name, **options)
        train(optimizer, 0, range(FREEZE + 2))
        launches.clear()
        train(optimizer, 0, range(FREEZE + 2, FREEZE + 4))
        counted.append(dict(launches))
    assert counted[0] == counted[1]
    if kept == "8bit":  # what it is rounded by must not be counted up in the same launch
        assert counted[0]["advance"] == 2
    alone = {"OneBitMuon": "adam_update"}  # of vectors; matrices of one rank are torch's Muon's
    assert alone.get(name, {"A": "adam_update", "O": "apply_momentum"}[name[0]]) in counted[0]


@pytest.mark.needs_compiler
@EACH_WAY
@EACH
def test_steps_are_the_same_on_each_backend(name, kept):
    ends = []
    for backend in ("plain", "native"):
        with using(backend):
            optimizer = build(name, kept)
            train(optimizer, 0, range(STEPS))
            ends.append(masters(optimizer))
    assert equal(*ends)


def mixed(rank: int, world_size: int) -> tuple[int, float, str]:
    """Float16 gradients of a scaled loss, of which torch's scaler refuses to unscale any."""
    params = [*make(torch.float16)[:1], *make(torch.bfloat16)[1:2], *make(torch.float32)[2:]]
    optimizer = KINDS["OneBitAdam"](params, master_weights=True)
    scaler = amp.GradScaler("cpu", 2.0**14)
    for step in range(STEPS):
        for i, p in enumerate(params):
            p.grad = scaler.scale(gradient(rank, step, p, i)).to(p.dtype)
        if rank == 1 and step in (4, 12):
            params[0].grad[0, 0] = 1e6  # inf
        before = [optimizer.state[p]["master"].clone() for p in params[:2]]
        scaler.step(optimizer)
        scaler.update()
        assert equal(before, [optimizer.state[p]["master"] for p in params[:2]]) == (step in (4, 12))
    assert ["master" in optimizer.state[p] for p in params] == [True, True, False, False]
    return optimizer.stats()["skipped_steps"], scaler.get_scale(), fingerprint(params[:1])


def test_mixed_dtypes_train_with_a_loss_scale():
    one, other = run_ranks(mixed, 2)
    assert one == other
    assert one[:2] == (2, 2.0**12)


@ADAM_AND_LAMB
def test_float32_parameters_have_none_and_nothing_changes(name):
    name = {"onebit-adam": "OneBitAdam", "onebit-lamb": "OneBitLamb"}[name]
    plain, asked = (build(name, m, dtype=torch.float32, freeze_step=4) for m in (False, True))
    assert train(plain, 0, range(8), torch.float32) == train(asked, 0, range(8), torch.float32)
    assert all("master" not in state for state in asked.state.values())
    assert plain.stats()["state_bytes"] == asked.stats()["state_bytes"]
    assert plain.state_dict()["state"][0].keys() == asked.state_dict()["state"][0].keys()


def test_float32_parameters_beside_are_masters_themselves():
    ends = []
    for kept in (True, "16bit"):
        half, whole = make(BF16), make(torch.float32)
        optimizer = AdamW([*half, *whole], 1e-2, numerics=Numerics(master_weights=kept))
        train(optimizer, 0, range(STEPS))
        saved = optimizer.state_dict()["state"]
        assert ["master" in saved[i] for i in range(8)] == [True] * 4 + [False] * 4
        ends.append([p.detach() for p in whole] + [saved[i]["master"] for i in range(4)])
    assert equal(*ends)


# ---------------------------------------------------------------- parameters that others write


def broadcast(rank: int, world_size: int) -> list[str]:
    optimizer = build("OneBitAdam", True, seed=rank, freeze_step=4, broadcast_parameters=True)
    assert equal([p.float() for p in parameters(optimizer)], values(BF16))
    assert are_rounded_masters(optimizer)
    return train(optimizer, rank, range(8))


def test_rank_0s_values_are_broadcast_into_masters_too():
    prints, others = run_ranks(broadcast, 2)
    assert prints == others


WRITES = ("in place", "in part", "other memory")


@pytest.mark.long(but=2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("step", [2, 6], ids=["warm-up", "compression"])
@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_into_a_parameter_its_copy_takes_over(how, step, compiled):
    optimizer = build("OneBitAdam", True, lr=1e-4, freeze_step=4)
    p, q = parameters(optimizer)[:2]
    take_step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    train(optimizer, 0, range(step))
    set_gradients(optimizer, 0, step)
    kept, written = masters(optimizer)[:2]
    overwrite(p, how)
    take_step()
    new, untouched = masters(optimizer), torch.zeros_like(p, dtype=torch.bool)
    untouched.view(-1)[5:] = how == "in part"
    assert (new[0] - torch.where(untouched, kept, 3.0)).abs().max() <= 1e-3
    assert (new[1] - written).abs().max() <= 1e-3
    assert are_rounded_masters(optimizer)
    # What nobody has written keeps what rounding would have dropped.
    assert not torch.equal(new[1], q.float())


@EACH_WAY
@pytest.mark.parametrize("how", [*WRITES, "data"])
def test_what_is_written_counts_to_half_a_unit_with_corrections(how, kept):
    optimizer = build("AdamW", kept, lr=1e-4)
    train(optimizer, 0, range(4))
    p, before = parameters(optimizer)[0], masters(optimizer)
    overwrite(p, how)
    assert off_by(optimizer, 0, p.detach()) <= 0.5
    train(optimizer, 0, range(4, 5))
    found, written = masters(optimizer), torch.full_like(before[0], 3.0)
    if how == "in part":
        written.view(-1)[5:] = before[0].view(-1)[5:]
    assert (found[0] - written).abs().max() <= 1e-3 + 2.0**-7
    assert (found[1] - before[1]).abs().max() <= 1e-3
    assert off_by(optimizer, 0, parameters(optimizer)[0].detach()) <= 0.5


@EACH_WAY
def test_pruned_parameters_become_0_and_no_nan(kept):
    optimizer = build("AdamW", kept, weight_decay=0.0)
    train(optimizer, 0, range(4))
    p = parameters(optimizer)[0]
    p.data.zero_()
    p.grad = torch.zeros_like(p)
    assert all(m.isfinite().all() for m in masters(optimizer))
    assert masters(optimizer)[0].abs().max() < 1e-38


@pytest.mark.parametrize(("kept", "written"), [(True, False), (True, True), ("16bit", False)])
def test_a_group_added_later_leaves_the_others_their_masters(kept, written):
    p, *others = make(BF16)
    optimizer = AdamW([p], 1e-3, numerics=Numerics(master_weights=kept))
    train(optimizer, 0, range(5))
    before = masters(optimizer)[0]
    if written:
        overwrite(p, "in place")
    optimizer.add_param_group({"params": others})
    assert torch.equal(masters(optimizer)[0], torch.full_like(before, 3.0) if written else before)
    assert kept == "16bit" or are_rounded_masters(optimizer)
    train(optimizer, 0, range(5, 6))
    assert written or 0 < (masters(optimizer)[0] - before).abs().max() < 0.01
    assert kept == "16bit" or are_rounded_masters(optimizer)


# ---------------------------------------------------------------- checkpoints


def resume(rank: int, transport: Transport, name: str, cut: int, kept: Any, dtype: torch.dtype, first: bool) -> bool:
    straight = build(name, kept, dtype=dtype, lr=1e-2, process_group=transport)
    train(straight, rank, range(cut), dtype)
    saved = saved_of(straight)
    assert all(saved[0]["state"][i]["master"].dtype == torch.float32 for i in range(4))
    expected = train(straight, rank, range(cut, STEPS), dtype)
    again = build(name, kept, seed=1, dtype=dtype, lr=1e-2, process_group=transport)
    train(again, rank, range(2), dtype)
    load(again, saved, first)
    return train(again, rank, range(cut, STEPS), dtype) == expected and equal(masters(straight), masters(again))


CORRECTED = [("AdamW, 8-bit state", 5), ("OneBitAdam", 5), ("OneBitAdam", 12)]


@pytest.mark.long(but=8)
@EITHER_FIRST
@pytest.mark.parametrize(
    ("name", "cut", "kept", "dtype"),
    [
        *((name, cut, kept, BF16) for kept in ("16bit", "8bit") for name, cut in CORRECTED),
        *((name, cut, True, dtype) for name, cut in (*CORRECTED[1:], ("OneBitLamb", 12)) for dtype in HALVES),
        *(("Lamb", 5, True, dtype) for dtype in HALVES),
    ],
)
def test_resuming_is_exact_in_either_order(name, cut, kept, dtype, model_first):
    assert simulate(resume, 2, name, cut, kept, dtype, model_first) == [True, True]


@EITHER_FIRST
def test_what_is_written_before_saving_counts_after_loading(model_first):
    first, again = (build("OneBitAdam", True, seed, lr=1e-4, freeze_step=9) for seed in (0, 1))
    train(first, 0, range(2))
    overwrite(parameters(first)[0], "in place")
    load(again, saved_of(first), model_first)
    train(again, 0, range(2, 3))
    assert (masters(again)[0] - 3.0).abs().max() <= 1e-3


@EACH_WAY
def test_loaded_masters_stay_before_and_after_the_model_loads(kept):
    first, again = build("AdamW", kept), build("AdamW", kept, seed=1)
    train(first, 0, range(5))
    saved, expected = through_a_file(first.state_dict()), masters(first)
    again.load_state_dict(saved)
    assert equal(masters(again), expected)
    put(parameters(again), [p.detach() for p in parameters(first)])
    assert equal(masters(again), expected)


@EACH_WAY
def test_a_parameter_that_is_not_its_loaded_master_counts(kept):
    first, again = build("AdamW", kept), build("AdamW", kept, seed=1)
    train(first, 0, range(5))
    again.load_state_dict(through_a_file(first.state_dict()))
    put(parameters(again), [torch.full_like(p, 3.0) for p in parameters(first)])
    again.frame.parameters.refresh_masters()
    assert all((m == 3.0).all() for m in masters(again))


KEPT = (False, True, "16bit", "8bit")


@pytest.mark.parametrize(
    ("name", "steps", "source", "target"),
    [
        *(("AdamW", 5, source, target) for source in KEPT for target in KEPT),
        *(("OneBitAdam", steps, *ways) for steps in (3, 12) for ways in ((False, True), (True, False))),
        ("torch's AdamW", 3, False, True),
    ],
)
def test_checkpoints_go_from_each_kind_of_masters_to_each(name, steps, source, target):
    first = torch.optim.AdamW(make(BF16)) if name == "torch's AdamW" else build(name, source)
    again = build("OneBitAdam" if name == "torch's AdamW" else name, target, seed=1)
    train(first, 0, range(steps))
    train(again, 0, range(2))  # has masters of its own by now
    put(parameters(again), [p.detach() for p in parameters(first)])
    again.load_state_dict(through_a_file(first.state_dict()))
    if target:
        again.frame.parameters.refresh_masters()
        wanted = masters(first) if source else [p.detach().float() for p in parameters(first)]
        for found, master in zip(masters(again), wanted, strict=True):
            off = (found.view(torch.int32) - master.view(torch.int32)).abs().max()
            # A tie that was rounded down lacks half a unit: one more than is the largest number of 16 bits, or of 8.
            assert off <= {True: 0, "16bit": 1, "8bit": 0x100}[target]
    else:
        assert all("master" not in state for state in again.state.values())
    train(again, 0, range(steps, steps + 2))
    assert again.stats()["step"] == steps + 2


def test_a_master_of_another_shape_is_refused_unchanged():
    source, target = (build("OneBitAdam", True, seed) for seed in (0, 1))
    train(source, 0, range(2))
    saved, before = source.state_dict(), masters(target)
    saved["state"][1]["master"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"master of parameter 1 must have shape \(6, 5, 4, 3\), got \(3,\)"):
        target.load_state_dict(saved)
    assert equal(masters(target), before)


# ---------------------------------------------------------------- who refuses them


@EACH_WAY
@pytest.mark.parametrize(
    "name", [n for n in MAKE if n not in ("AdamW, ours", "OneBitAdam", "OneBitLion", "OneBitMuon")]
)
def test_whose_kernels_take_no_corrections_refuses_them(name, kept):
    said = f"master_weights must be True or False with .*, got '{kept}'.*use True, or AdamW"
    with pytest.raises(ValueError, match=said):
        MAKE[name](make(BF16), master_weights=kept)


@pytest.mark.parametrize(
    ("dtype", "options", "said"),
    [
        (torch.float16, {"master_weights": "8bit"}, "master_weights must be .*, got '8bit' and .*use bfloat16"),
        (torch.float32, {"master_weights": "8bit"}, "got '8bit' and .*cast the model to bfloat16"),
        *((BF16, {"master_weights": v}, 'must be True, False, "8bit" or "16bit", got') for v in ("4bit", 16, None)),
        (BF16, {"master_weights": "8bit", "stochastic_rounding": True}, r"stochastic_rounding must be False with Num"),
    ],
)
def test_other_dtypes_and_values_are_refused_with_a_way_out(dtype, options, said):
    with pytest.raises(ValueError, match=said):
        AdamW(make(dtype), **objects(**options))
