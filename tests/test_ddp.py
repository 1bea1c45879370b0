"""DistributedDataParallel with ``ddp.attach``: the same bits as without, sent once, or not at all; what is refused."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_runs import FREEZE, MICROS, STEPS, Net, Sent, loss_of, make
from observe import fingerprint, flat, named, parameters
from optimizers import ADAM_AND_LAMB, EACH_ONEBIT
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from fusedonebit import AbortedStepError, FusedOneBitWarning, OneBitAdam, OneBitLamb, ddp
from fusedonebit.triton_kernels import TAIL


def backward(
    model: nn.Module, rank: int, step: int, side: bool, micros: int, poison: bool, synced: bool
) -> list[list[tuple[str, int]]]:
    """Accumulates; returns what each micro-batch's backward pass has sent."""
    passes = []
    for micro in range(micros):
        local = isinstance(model, DistributedDataParallel) and (micro < micros - 1 or not synced)
        with model.no_sync() if local else contextlib.nullcontext():
            loss = loss_of(model, rank, step, micro, side) * (float("nan") if poison else 1.0)
            # DDP tells all ranks its buckets once: in a forward pass.
            with Sent() as sent:
                (loss / micros).backward()
        passes.append(sent.calls)
    return passes


def used(rank: int, step: int, sometimes: bool) -> bool:
    """Whether the side layer is: in turns on all ranks, on all but rank 1, on none."""
    return not sometimes or step % 3 == 0 or (step % 3 == 1 and rank != 1)


def side_by_side(
    rank: int,
    world_size: int,
    name: str,
    wrap: dict,
    options: dict | None = None,
    sometimes: bool = False,
    micros: int = 1,
    poison: tuple = (),
    spoil: tuple = (),
    unsynced: bool = False,
) -> dict[str, Any]:
    """Trains without DDP and with; returns what was equal, and what was sent with DDP, step by step.

    In the steps of ``poison`` one rank's loss is NaN, in those of ``spoil`` one of its gradients unusable;
    with ``unsynced`` every other step has no backward pass outside of ``no_sync``.
    """
    plain, attached = make(name, None, **options or {}), make(name, wrap, **options or {})
    start = [optimizer.stats()["bytes_total"] for _, optimizer in (plain, attached)]
    seen: dict[str, Any] = {"equal": 0, "phases": [], "early": [], "backward": [], "step": [], "counted": []}
    for step in range(STEPS):
        bad, side, synced = rank == step % world_size, used(rank, step, sometimes), not (unsynced and step % 2)
        for model, optimizer in (plain, attached):
            *early, last = backward(model, rank, step, side, micros, bad and step in poison, synced)
            if bad and step in spoil:
                parameters(optimizer)[0].grad = torch.eye(40, 12).to_sparse()
            with Sent() as in_step, refused(step in spoil):
                optimizer.step()
            optimizer.zero_grad()
        seen["equal"] += fingerprint(parameters(plain[1])) == fingerprint(parameters(attached[1]))
        seen["phases"].append(attached[1].phase)
        seen["early"] += [call for calls in early for call in calls]
        seen["backward"].append(last)
        seen["step"].append(in_step.calls)
        seen["counted"].append(attached[1].stats()["collectives_step"])
    seen["stats"] = [optimizer.stats() for _, optimizer in (plain, attached)]
    seen["bytes"] = [told["bytes_total"] - before for told, before in zip(seen["stats"], start, strict=True)]
    seen["bits"] = fingerprint(parameters(attached[1]))
    return seen


@contextlib.contextmanager
def refused(expected: bool) -> Iterator[None]:
    with pytest.raises((TypeError, AbortedStepError)) if expected else contextlib.nullcontext():
        yield


def check(ranks: list[dict], name: str, final: str = "compression") -> None:
    equal = [seen["equal"] for seen in ranks]
    print(f"{name}: steps after which all bits are those without DDP, by rank: {equal} (limit: all {STEPS})")
    assert equal == [STEPS] * len(ranks)
    assert len({seen["bits"] for seen in ranks}) == 1
    for seen in ranks:
        assert seen["phases"][-1] == final
        plain, attached = seen["stats"]
        same = ("phase", "step", "skipped_steps", "freeze_step")
        assert [plain[key] for key in same] == [attached[key] for key in same]


# ---------------------------------------------------------------- the same bits

MANY = 0.0005  # megabytes: several buckets


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb", "lamb"])
def test_bits_are_those_without_ddp_and_all_is_sent_once(name):
    ranks = run_ranks(side_by_side, 2, name, {})
    final = "uncompressed" if name == "lamb" else "compression"
    check(ranks, name, final)
    for seen in ranks:
        elements, padding = (seen["stats"][1][key] for key in ("parameters", "padding"))
        averaged = sum(phase != "compression" for phase in seen["phases"])
        assert averaged == (STEPS if name == "lamb" else FREEZE)
        for phase, in_backward, in_step in zip(seen["phases"], seen["backward"], seen["step"], strict=True):
            if phase == "compression":
                assert in_backward == []
                assert [call for call, _ in in_step] == ["alltoall_base_", "_allgather_base_"]
            else:
                assert {call for call, _ in in_backward} == {"allreduce_"}
                assert sum(n for _, n in in_backward) == elements
                assert in_step == [("allreduce_", TAIL + len(list(Net().parameters())))]
        told, extra = seen["bytes"][1], seen["bytes"][0] - seen["bytes"][1]
        expected = 4 * padding * averaged
        print(f"{name}: bytes with DDP: {told}, without: {extra} more (limit: the padding's {expected})")
        assert extra == expected


CASES: dict[str, dict] = {
    "gradients are views": {"wrap": {"gradient_as_bucket_view": True}},
    "several buckets": {"wrap": {"bucket_cap_mb": MANY}},
    "static graph": {"wrap": {"static_graph": True}},
    "unused": {"wrap": {"find_unused_parameters": True}, "sometimes": True},
    "unused, views of several buckets": {
        "wrap": {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": MANY},
        "sometimes": True,
    },
}


@pytest.mark.long(but=1)
@ADAM_AND_LAMB
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_without_ddp_however_ddp_is_set_up(name, case):
    given = CASES[case]
    ranks = run_ranks(side_by_side, 2, name, given["wrap"], {}, given.get("sometimes", False))
    check(ranks, f"{name}, {case}")
    # Which parameters are unused is DDP's own to agree on, in either stage.
    own = [("allreduce_", 6)] * ("find_unused_parameters" in given["wrap"])
    for seen in ranks:
        assert seen["backward"][FREEZE:] == [own] * (STEPS - FREEZE)
        if "bucket_cap_mb" in given["wrap"]:
            assert seen["counted"][FREEZE - 1] > 3


@pytest.mark.long
@ADAM_AND_LAMB
@pytest.mark.parametrize("wrap", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"])
def test_accumulating_under_no_sync_sends_at_the_boundary_only(name, wrap):
    ranks = run_ranks(side_by_side, 2, name, wrap, {}, False, MICROS)
    check(ranks, f"{name}, {MICROS} micro-batches")
    for seen in ranks:
        assert seen["early"] == []
        assert all(seen["backward"][:FREEZE])
        assert not any(seen["backward"][FREEZE:])


@pytest.mark.long(but=1)
@ADAM_AND_LAMB
def test_the_step_averages_what_no_backward_pass_synchronised(name):
    ranks = run_ranks(side_by_side, 2, name, {}, {}, False, MICROS, (), (), True)
    check(ranks, name)
    for seen in ranks:
        assert [bool(calls) for calls in seen["backward"]] == [True, False] * (FREEZE // 2) + [False] * (STEPS - FREEZE)


@pytest.mark.long
@ADAM_AND_LAMB
def test_a_re_warm_up_has_the_bits_of_one_without_ddp(name):
    ranks = run_ranks(side_by_side, 2, name, {"bucket_cap_mb": MANY}, {"refuse_every": 10, "rewarm_steps": 10})
    check(ranks, name)
    for seen in ranks:
        assert seen["phases"] == ["warmup"] * FREEZE + ["compression"] * 10 + ["warmup"] * 10 + ["compression"] * 10
        assert seen["stats"][1]["rewarms"] == 1


@pytest.mark.long(but=1)
@EACH_ONEBIT
def test_a_bad_gradient_on_one_rank_makes_all_skip_alike(name):
    poison, spoil = (6, 35), (9, 40)
    ranks = run_ranks(side_by_side, 2, name, {"bucket_cap_mb": MANY}, {}, False, 1, poison, spoil)
    check(ranks, name)
    for seen in ranks:
        assert seen["stats"][1]["skipped_steps"] == len(poison) + len(spoil)
        assert seen["phases"].index("compression") == FREEZE + 2


# ---------------------------------------------------------------- 16 bits


def mixed(rank: int, world_size: int, name: str) -> tuple[list[str], str, float, float]:
    """The bits after each step; and how far from training without DDP, over the way, before and after the freeze."""
    plain, attached = (make(name, wrap, middle=torch.bfloat16) for wrap in (None, {}))
    start = flat(parameters(plain[1]))
    bits, apart = [], []
    for step in range(STEPS):
        for model, optimizer in (plain, attached):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        x, y = (flat(parameters(optimizer)) for _, optimizer in (plain, attached))
        apart.append(float(((x - y) ** 2).sum() ** 0.5 / ((x - start) ** 2).sum() ** 0.5))
        bits.append(fingerprint(parameters(attached[1])))
    return bits, attached[1].phase, max(apart[:FREEZE]), apart[-1]


@pytest.mark.long
@ADAM_AND_LAMB
def test_layers_of_16_bits_train_and_stay_equal_on_all_ranks(name):
    ranks = run_ranks(mixed, 2, name)
    bits, phases, before, after = zip(*ranks, strict=True)
    print(f"{name}: distance from training without DDP, over the way: {before[0]:.1e}, {after[0]:.1e} (limits below)")
    assert bits[0] == bits[1]
    assert len(set(bits[0])) == STEPS
    assert phases == ("compression",) * 2
    assert before[0] < 0.02
    assert after[0] < 0.2


def summed_in_16_bits(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    net = nn.Linear(1, 400, bias=False, dtype=torch.bfloat16)
    torch.nn.init.zeros_(net.weight)
    model = DistributedDataParallel(net)
    ddp.attach(model, OneBitAdam(net.parameters(), freeze_step=9))
    # Whole numbers of 8 bits: exact in bfloat16, their sums exact in float32, but not in bfloat16.
    numbers = [torch.randint(128, 256, (400,), generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    (model(torch.ones(1, 1, dtype=torch.bfloat16)) * numbers[rank].bfloat16()).sum().backward()
    mean = sum(n.float() for n in numbers) / world_size
    return net.weight.grad.flatten().tolist(), mean.bfloat16().tolist()


def test_16_bit_gradients_are_averaged_in_32_and_rounded_once():
    for averaged, mean in run_ranks(summed_in_16_bits, 4):
        assert averaged == mean


# ---------------------------------------------------------------- what does not belong together

NOT_WRAPPED = "TypeError: model must be wrapped in DistributedDataParallel, got Net"
OTHERS = "ValueError: optimizer and model must have the same parameters, but only one has"
RANKS = "ValueError: model and optimizer must average over the same ranks, got"
ERRORS = {
    "not wrapped": NOT_WRAPPED,
    "not wrapped on rank 1": NOT_WRAPPED,
    "not ours": "TypeError: optimizer must be one of fusedonebit's, or a list with one, got AdamW",
    "fewer": f"{OTHERS} first.weight of model; make the optimizer from model.parameters()",
    "more": f"{OTHERS} parameter 6; make the optimizer from model.parameters()",
    "the optimizer is alone": f"{RANKS} [0, 1] and [RANK]; pass the same process_group to both",
    "the model is alone": f"{RANKS} [RANK] and [0, 1]; pass the same process_group to both",
    "frozen between": "ValueError: parameters must be frozen after attach(), or before the optimizer is made, but "
    "first.weight was between",
    "twice": "RuntimeError: this OneBitAdam is attached already; call attach() once, before training, or first ",
    "another": "RuntimeError: OneBitLamb is attached to this model already: first call detach() of what attach() or ",
    "mixed precision": "RuntimeError: mixed_precision must be None, got _MixedPrecision(param_dtype=torch.bfloat16",
    "a hook": "RuntimeError: DDP must have no communication hook, got allreduce_hook: it keeps one for good",
    "a built-in hook": "RuntimeError: DDP must have no communication hook, got BuiltinCommHookType.ALLREDUCE: it keeps",
    "steps in the backward pass": "RuntimeError: parameters must have no optimizers that step in the backward pass",
    "in a join": "RuntimeError: join() can't be used with a model to which fusedonebit is attached",
}
WRAPPED = {"mixed precision": {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)}}
NOTHING_IS_CHANGED = ("another", "mixed precision", "a hook", "a built-in hook", "in a join")
FROM_RANK_1 = "DisagreementError: failed on rank 1: model must be wrapped in DistributedDataParallel, got Net; "


def ill_matched(rank: int, world_size: int, what: str) -> str:
    """The error that attaching raises."""
    torch.manual_seed(0)
    net, alone = Net(), [dist.new_group([r]) for r in range(world_size)][rank]
    params = [*net.parameters(), *([nn.Parameter(torch.ones(3))] if what == "more" else [])][what == "fewer" :]
    optimizer: Any = OneBitAdam(params, freeze_step=9, process_group=alone if "optimizer is alone" in what else None)
    net.first.requires_grad_(what != "frozen between")
    if what == "steps in the backward pass":
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    wrap = WRAPPED.get(what, {})
    model: Any = DistributedDataParallel(net, process_group=alone if "model is alone" in what else None, **wrap)
    if what == "twice":
        ddp.attach(model, optimizer)
    if what == "another":
        ddp.attach(model, OneBitLamb(params, freeze_step=9))
    if what == "a hook":
        model.register_comm_hook(None, allreduce_hook)
    if what == "a built-in hook":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    hooks = len(model._comm_hooks) if what in NOTHING_IS_CHANGED else 0
    if what == "not wrapped" or (what == "not wrapped on rank 1" and rank == 1):
        model = net
    if what == "not ours":
        optimizer = torch.optim.AdamW(params)

    def attach() -> None:
        with model.join() if what == "in a join" else contextlib.nullcontext():
            ddp.attach(model, optimizer)

    kind, text = named(attach)
    dist.barrier()  # nobody still waits for something else
    if what in NOTHING_IS_CHANGED:
        assert len(model._comm_hooks) == hooks
        ddp.attach(DistributedDataParallel(net), optimizer)
    return f"{kind}: {text}"


def all_ill_matched(rank: int, world_size: int) -> dict[str, str]:
    return {what: ill_matched(rank, world_size, what) for what in ERRORS}


def test_what_does_not_belong_together_is_refused_on_every_rank():
    for rank, texts in enumerate(run_ranks(all_ill_matched, 2, timeout=120, group_timeout=20)):
        for what, text in texts.items():
            expected = FROM_RANK_1 if "on rank 1" in what and rank == 0 else ERRORS[what].replace("RANK", str(rank))
            assert text.startswith(expected), f"{what}, rank {rank}: {text}"


# ---------------------------------------------------------------- uneven data

BATCHES = {
    "all have batches": (2, 3),
    "one has none": (0, 2),
    "nobody has any": (0, 0),
    "one has none, all stop": (0, 1),
}


def joined(rank: int, world_size: int, how: str) -> str:
    """The error of a join; then one that is not enabled, and one after ``detach``, work."""
    model, optimizer = make("onebit-adam", None)
    model = DistributedDataParallel(model)
    handle = ddp.attach(model, optimizer)

    def uneven() -> None:
        with Join([model], throw_on_early_termination="stop" in how):
            for step in range(BATCHES[how][rank]):
                loss_of(model, rank, step).backward()

    _, said = named(uneven)
    with Join([model], enable=False):  # as the sentence says
        pass
    loss_of(model, rank, 0).backward()
    optimizer.step()
    handle.detach()
    with model.join():
        for step in range(BATCHES[how][rank]):
            model.zero_grad()
            loss_of(model, rank, step).backward()
    return said


@pytest.mark.parametrize("how", BATCHES)
def test_join_is_refused_on_every_rank_and_nobody_waits(how):
    for rank, text in enumerate(run_ranks(joined, 2, how, timeout=30, group_timeout=20)):
        print(f"{how}, rank {rank}: {text}")
        if how == "nobody has any":
            assert text == ""
        elif "stop" in how and rank == 0:
            assert text == "Rank 0 exhausted all inputs."
        elif "stop" in how:
            assert text == "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        else:
            assert text.startswith("join() can't be used with a model to which fusedonebit is attached")


# ---------------------------------------------------------------- without attach

SEEDS = 5


def warned(rank: int, world_size: int, name: str, how: str) -> tuple[list[int], set[tuple[bool, bool]]]:
    """The steps, over some seeds, that warn of averaged gradients, and of what is told; all steps take other data."""
    steps, told = [], []
    for seed in range(SEEDS):
        model, optimizer = make(name, {} if how == "attached" else None, freeze_step=5)
        if how == "averaged by DDP":
            model = DistributedDataParallel(model)
        for step in range(8):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss_of(model, rank, step + 8 * seed).backward()
                optimizer.step()
            ours = [str(w.message) for w in caught if issubclass(w.category, FusedOneBitWarning)]
            steps += [step] * sum("fusedonebit.ddp.attach(model, optimizer)" in text for text in ours)
            optimizer.zero_grad()
        assert optimizer.phase == "compression"
        stats = optimizer.stats()
        told.append((stats["averaged_already"], stats["bytes_step"] >= stats["bytes_fp32"]))
    return steps, set(told)


@pytest.mark.long(but=1)
@EACH_ONEBIT
def test_ddp_averaged_gradients_are_noticed_at_the_first_step(name):
    told = {(True, True)}
    assert run_ranks(warned, 2, name, "averaged by DDP") == [([0] * SEEDS, told), ([], told)]


@pytest.mark.long(but=1, full=True)
@EACH_ONEBIT
@pytest.mark.parametrize(("world_size", "how"), [(2, "local"), (2, "attached"), (1, "averaged by DDP")])
def test_nobody_warns_of_other_gradients(name, world_size, how):
    nothing_is_sent = world_size == 1
    assert run_ranks(warned, world_size, name, how) == [([], {(False, nothing_is_sent)})] * world_size


# ---------------------------------------------------------------- averages that are not what was averaged


def dropped_or_changed(rank: int, world_size: int, what: str) -> tuple[str, list[torch.Tensor]]:
    """The error of the third step, if something happens to the averages before it, and the parameters then."""
    model, optimizer = make("onebit-adam", wrap={})
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step == 2:
            if what == "another backward pass":
                with model.no_sync():
                    loss_of(model, rank, 9).backward()
            elif what == "dropped" and rank == 1:
                model.zero_grad()
            elif what == "changed" and rank == 1:
                next(model.parameters()).grad[0] += 1e-3
        told = named(optimizer.step)
    return ": ".join(told), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("what", ["another backward pass", "dropped", "changed"])
def test_averages_that_differ_between_ranks_stop_all_of_them(what):
    (error, ours), (other, theirs) = run_ranks(dropped_or_changed, 2, what)
    for text in (error, other):
        assert text.startswith("OutOfStepError: ")
        assert "or the gradients that DDP has averaged: change or drop them on all ranks alike" in text
    assert all(map(torch.equal, ours, theirs))
