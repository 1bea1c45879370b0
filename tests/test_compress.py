"""Gradients at 8, 4 or 1 bits under DDP, whatever optimizer follows, on real ranks: nothing is lost, all agree."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compress_runs import (
    BUCKETS_MB,
    OPTIMIZERS,
    check_resuming,
    conserves,
    flat,
    left,
    summed,
    train,
    trains,
    wrapped,
)
from ddp_runs import Net, loss_of
from ranks import RankError, run_ranks, shut_down
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import fusedonebit
from fusedonebit import CollectiveError, DisagreementError, OneBitAdam, ddp
from fusedonebit.comm import Format
from fusedonebit.comm.quantised import LevelMessages
from fusedonebit.integrations.fsdp_groups import Rows
from fusedonebit.triton_kernels import FlatLayout

EXACT = 3e-7
"""Of gradients below 1: what float32 rounds."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "no_sync": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "scaler": {},
}


@pytest.mark.long(but=["1-unused-2", "4-plain-3"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("bits", [8, 4, 1])
def test_what_is_sent_and_what_is_left_are_all_there_was(bits, how, world_size):
    for lost, same in run_ranks(conserves, world_size, "ddp", bits, "fp32", how, WAYS[how]):
        assert lost < EXACT
        assert same


def after_a_load(rank: int, world_size: int, buckets: float, freezes: bool) -> tuple[bool, torch.Tensor]:
    """The gradients of the pass after a load into DDP with other buckets, of which a parameter may be frozen since."""
    model, compression = wrapped("ddp", 4, "bf16", find_unused_parameters=True)
    train(model, SGD(model.parameters(), 0.0), rank, range(3))
    torch.manual_seed(0)
    other = DistributedDataParallel(Net(), bucket_cap_mb=buckets, find_unused_parameters=True)
    other.module.first.weight.requires_grad_(not freezes)
    again = fusedonebit.compress(other, 4)
    again.load_state_dict(compression.state_dict())
    loss_of(other, rank, 3).backward()
    frozen = other.module.first.weight.grad is None or not other.module.first.weight.grad.any()
    return frozen, torch.cat([p.grad.flatten() for p in other.parameters() if p.requires_grad])


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("buckets", [2 * BUCKETS_MB, 25.0])
def test_the_pass_after_a_load_averages_in_any_buckets(buckets, freezes):
    (frozen, of_0), (_, of_1) = run_ranks(after_a_load, 2, buckets, freezes)
    assert frozen == freezes
    assert torch.equal(of_0, of_1)


def nonfinite(rank: int, world_size: int) -> tuple[bool, bool, float]:
    """Whether one rank's infinity reached this one, in its bucket alone; and by how much that changed what is left."""
    model, compression = wrapped("ddp", 4, "fp32")
    train(model, SGD(model.parameters(), 0.0), rank, range(3))
    before = {name: summed(x) for name, x in left(compression).items()}
    model.zero_grad()
    handle = model.module.first.weight.register_hook(lambda g: g * (torch.inf if rank == 1 else 1.0))
    loss_of(model, rank, 3).backward()
    handle.remove()
    bucket = next(group for group in compression._exchanges if "first.weight" in group)
    bad = {name for name, p in model.module.named_parameters() if not p.grad.isfinite().all()}
    changed = max(
        float((summed(left(compression)[name]) - before[name]).abs().max()) for name in before if name in bucket
    )
    return (
        bad == set(bucket),
        all(p.grad.isnan().all() for n, p in model.module.named_parameters() if n in bad),
        changed,
    )


def test_an_infinite_gradient_is_nan_everywhere():
    for own_bucket, all_nan, changed in run_ranks(nonfinite, 2):
        assert own_bucket
        assert all_nan
        assert changed < EXACT


@pytest.mark.long(but=["4-adamw"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bits", [8, 4, 1])
def test_any_optimizer_trains(bits, name):
    found = run_ranks(trains, 2, "ddp", name, bits, 60)
    for first, last, params, _ in found:
        assert last < 0.7 * first
        assert torch.equal(params, found[0][2])


@pytest.mark.full
@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 4), ("fsdp", 3), ("replicas", 4)])
def test_ranks_are_the_same_after_two_thousand_steps(kind, world_size):
    found = run_ranks(trains, world_size, kind, "adamw", 4, 2000, timeout=280)
    for _, _, params, gradients in found:
        assert torch.equal(params, found[0][2])
        assert gradients == found[0][3] != 0


def compiled(rank: int, world_size: int, kind: str, backend: str) -> tuple[float, float, torch.Tensor]:
    """The same of a model that torch compiles, in buckets of the usual size."""
    if kind == "fsdp":
        model, _ = wrapped(kind, 4, None)
    else:
        torch.manual_seed(0)
        model = DistributedDataParallel(Net())
        fusedonebit.compress(model)
    fast, optimizer = torch.compile(model, backend=backend), SGD(model.parameters(), 0.1, momentum=0.9)
    first = train(fast, optimizer, rank, range(1))
    return first, train(fast, optimizer, rank, range(1, 40)), flat(model)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.needs_compiler)])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_compiled_model_trains(kind, backend):
    found = run_ranks(compiled, 2, kind, backend)
    for first, last, params in found:
        assert last < 0.9 * first
        assert torch.equal(params, found[0][2])


# ---------------------------------------------------------------- several optimizers


def together(rank: int, world_size: int, other: str, bits: int | None) -> tuple[float, float, torch.Tensor, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=BUCKETS_MB)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    ours, theirs = OneBitAdam(matrices, 1e-2, warmup=5), OPTIMIZERS[other](rest)
    handle = ddp.attach(model, [ours, theirs], bits=bits)
    first = float(loss_of(model, 100 + rank, 0).detach())
    for step in range(60):
        ours.zero_grad()
        theirs.zero_grad()
        loss_of(model, rank, step).backward()
        ours.step()
        theirs.step()
    last, kept = float(loss_of(model, 100 + rank, 0).detach()), handle.others
    handle.detach()
    return first, last, flat(model), None if kept is None else sorted(kept._sizes)


@pytest.mark.long(but=["None-adamw", "4-sgd"])
@pytest.mark.parametrize("other", ["adamw", "sgd"])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_another_optimizer_trains_what_ours_does_not(other, bits):
    found = run_ranks(together, 2, other, bits)
    for first, last, params, kept in found:
        assert last < 0.7 * first
        assert torch.equal(params, found[0][2])
        assert kept == (None if bits is None else ["first.bias", "last.bias", "side.bias"])


# ---------------------------------------------------------------- checkpoints


@pytest.mark.long(but=["form0-2-3"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("form", [(4, "fp32"), (4, "bf16"), (1, "8bit")])
def test_a_run_goes_on_from_a_checkpoint(form, before, after, tmp_path):
    check_resuming("ddp", form, before, after, tmp_path)


def both(rank: int, world_size: int, path: str, resumes: bool) -> torch.Tensor:
    """Parameters after six steps of two optimizers, of which the last three may follow a load."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=BUCKETS_MB)
    ours = OneBitAdam([p for p in model.parameters() if p.dim() == 2], 1e-2, warmup=2)
    theirs = AdamW([p for p in model.parameters() if p.dim() < 2], 1e-2)
    handle, done = ddp.attach(model, [ours, theirs], bits=4), 0
    if resumes:
        fusedonebit.dcp.load(model, ours, path, theirs=theirs, compression=handle.others)
        done = 3
    for step in range(done, 6):
        if step == 3 and not resumes:
            fusedonebit.dcp.save(model, ours, path, theirs=theirs, compression=handle.others)
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
    return flat(model)


def test_two_optimizers_go_on_from_one_checkpoint(tmp_path):
    whole, resumed = (run_ranks(both, 2, str(tmp_path), resumes) for resumes in (False, True))
    assert all(torch.equal(params, whole[0]) for params in [*whole, *resumed])


def begins(rank: int, world_size: int, path: str) -> torch.Tensor:
    """Save before the first pass, load, and take one: parameters afterwards."""
    model, compression = wrapped("ddp", 4, "fp32")
    optimizer = SGD(model.parameters(), 0.1)
    fusedonebit.dcp.save(model, optimizer, path, compression=compression)
    fusedonebit.dcp.load(model, optimizer, path, compression=compression)
    train(model, optimizer, rank, range(1))
    return flat(model)


def test_a_checkpoint_of_no_pass_is_averaged_after(tmp_path):
    first, second = run_ranks(begins, 2, str(tmp_path))
    assert torch.equal(first, second)


def checkpoint_errors(rank: int, world_size: int, path: str) -> list[str]:
    model, compression = wrapped("ddp", 4, "fp32")
    optimizer, said = AdamW(model.parameters(), 1e-2), []
    train(model, optimizer, rank, range(2))
    fusedonebit.dcp.save(model, optimizer, f"{path}/with", compression=compression)
    state = {"model": torch.distributed.checkpoint.state_dict.get_model_state_dict(model)}
    torch.distributed.checkpoint.load(state, checkpoint_id=f"{path}/with")  # torch's own stays valid
    ours = fusedonebit.AdamW(model.parameters(), 1e-2)
    fusedonebit.dcp.save(model, ours, f"{path}/without")
    calls = {
        "without": lambda: fusedonebit.dcp.load(model, ours, f"{path}/without", compression=compression),
        "foreign": lambda: fusedonebit.dcp.save(model, optimizer, f"{path}/x"),
        "nothing": lambda: fusedonebit.dcp.load(model, optimizer, f"{path}/nothing", compression=compression),
    }
    for call in calls.values():
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_checkpoints_that_do_not_fit_say_so(tmp_path):
    for without, foreign, nothing in run_ranks(checkpoint_errors, 2, str(tmp_path)):
        assert "compression must be left out of load()" in without
        assert "others' are saved beside compression=" in foreign
        assert "must be the folder of a complete checkpoint" in nothing


# ---------------------------------------------------------------- bad input

OPTIONS: dict[str, dict[str, Any]] = {"bits": {"bits": 2}, "true": {"bits": True}, "feedback": {"feedback": "fp16"}}
OPTIONS |= {"one bit": {"bits": 1, "feedback": None}, "scaler": {"scaler": 3}, "float": {"bits": 4.0}}
MISTAKES = {
    "bits": "ValueError: bits must be one of (8, 4, 1), got 2",
    "true": "ValueError: bits must be one of (8, 4, 1), got True",
    "float": "ValueError: bits must be one of (8, 4, 1), got 4.0",
    "feedback": "ValueError: feedback must be one of ('fp32', 'bf16', '8bit', None), got 'fp16'",
    "one bit": "ValueError: feedback must be 'fp32', 'bf16' or '8bit' at one bit",
    "scaler": "TypeError: scaler must be a torch.amp.GradScaler, got int",
    "bare": "TypeError: model must be in DistributedDataParallel or fully_shard()ed, got Net",
    "twice": "RuntimeError: compress() is attached to this model already: first call detach()",
    "python": "RuntimeError: torch._dynamo.config.optimize_ddp must not be 'python_reducer'",
    "trained": "DisagreementError: ranks differ: the shape of module.first.weight that is trained is (40, 12) on",
    "differs": "DisagreementError: ranks differ: bits of compress() is 4 on rank 0 but 8 on rank 1",
    "in a list": "ValueError: each parameter must be in one optimizer, but first.weight is in SGD too",
    "none of ours": "TypeError: optimizer must be one of fusedonebit's, or a list with one, got SGD, AdamW",
    "a stranger": "TypeError: optimizer must be a list of optimizers, got int in it",
    "idle": "ValueError: bits, feedback and scaler must be left out where no other optimizer's gradients are",
    "sparse": "ValueError: module.0 must be made with sparse=False, got sparse=True",
    "lacking": "ValueError: optimizer and model must have the same parameters, but only one has first.bias of model",
}


def mistaken(rank: int, world_size: int, what: str) -> str:
    options = {"bits": 4} | OPTIONS.get(what, {})
    net = Net()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer" if what == "python" else True):
        model: Any = net if what == "bare" else DistributedDataParallel(net)
    net.first.weight.requires_grad_(what != "trained" or rank == 0)
    matrices, rest = ([p for p in net.parameters() if (p.dim() == 2) == want] for want in (True, False))
    lists: dict[str, Any] = {
        "in a list": lambda: [OneBitAdam(matrices), SGD([*rest, matrices[0]], 0.1)],
        "none of ours": lambda: [SGD(matrices, 0.1), AdamW(rest)],
        "a stranger": lambda: [OneBitAdam(net.parameters()), 3],
        "lacking": lambda: [OneBitAdam(matrices), SGD(rest[1:], 0.1)],
    }
    if what == "twice":
        fusedonebit.compress(model)
    if what == "differs":
        options["bits"] = 8 if rank else 4
    try:
        if what == "idle":
            ddp.attach(model, OneBitAdam(net.parameters()), bits=4)
        elif what == "sparse":
            fusedonebit.compress(DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True))))
        elif what in lists:
            ddp.attach(model, lists[what]())
        else:
            fusedonebit.compress(model, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def all_mistakes(rank: int, world_size: int) -> dict[str, str]:
    return {what: mistaken(rank, world_size, what) for what in MISTAKES}


def test_what_is_wrong_is_said_on_every_rank():
    for said in run_ranks(all_mistakes, 2):
        for what, expected in MISTAKES.items():
            assert said[what].startswith(expected), what


def detached(rank: int, world_size: int) -> tuple[str, bool, str, int]:
    """What is printed; that DDP averages as ever afterwards, and in a pickle; that it may be compressed again, in the
    process group that it had."""
    model, compression = wrapped("ddp", 4, "bf16")
    train(model, SGD(model.parameters(), 0.0), rank, range(2))
    pickled = pickle.loads(pickle.dumps(model))
    compression.detach()
    compression.detach()
    torch.manual_seed(0)
    twin = DistributedDataParallel(Net())
    for each in (twin, model, pickled):
        each.zero_grad()
        loss_of(each, rank, 5).backward()
    grads = zip(twin.parameters(), model.parameters(), pickled.parameters(), strict=True)
    same = all(torch.allclose(q.grad, p.grad) for p, *others in grads for q in others)
    groups, again = len(dist.distributed_c10d._world.pg_map), fusedonebit.compress(model, 8, feedback=None)
    train(model, SGD(model.parameters(), 0.0), rank, range(2))
    return repr(compression), same, repr(again), len(dist.distributed_c10d._world.pg_map) - groups


def test_after_detaching_ddp_averages_as_ever():
    for said, same, again, made in run_ranks(detached, 2):
        assert said == "compress(bits=4): residuals in bf16, 9,984 bytes on each rank"
        assert same
        assert made == 0
        assert again == "compress(bits=8): stochastic rounding, no residuals"


# ---------------------------------------------------------------- what goes wrong


def parts(rank: int, world_size: int, how: str, told: str = "") -> str:
    """What a rank hears where another's message is damaged, or it takes another step, or dies."""
    model, compression = wrapped("ddp", 4, "fp32")
    optimizer = SGD(model.parameters(), 0.1)
    train(model, optimizer, rank, range(3))
    exchange = next(iter(compression._exchanges.values()))
    if how == "flip" and rank == 1:  # of what all have received, as far as this rank knows
        exchange.digest += 1
    if how == "steps" and rank == 1:
        compression.number += 1
    if how == "dies" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(model, optimizer, rank, range(3, 5))
    except (DisagreementError, CollectiveError) as error:
        said = f"{type(error).__name__}: {error}"
        if told:
            Path(told).write_text(said)
        return said
    return "nothing"


@pytest.mark.parametrize(
    ("how", "told"),
    [("flip", "digest of the last synchronisation"), ("steps", "4 steps on rank 0, 5 on rank 1")],
)
def test_ranks_that_differ_say_how(how, told):
    for said in run_ranks(parts, 2, how):
        assert said.startswith("DisagreementError: gradients can't be averaged: ranks differ: ")
        assert told in said


def test_a_rank_that_dies_ends_the_others_and_is_named(tmp_path):
    began, told = time.monotonic(), tmp_path / "told"
    try:
        with pytest.raises((RankError, EOFError, ConnectionError)):
            run_ranks(parts, 2, "dies", str(told), timeout=60, group_timeout=10)
    finally:
        shut_down()
    assert time.monotonic() - began < 60
    assert told.read_text().startswith("CollectiveError: ")
    assert "Rank 1 has died" in told.read_text()


# ---------------------------------------------------------------- bytes


def test_bytes_of_a_parameter_are_counted():
    """340M parameters on 8 ranks, as an all-reduce of float32 is 8: in DDP's default buckets; by FSDP2's layers.

    FSDP2 sends each gradient once, and rounds each parameter's part up to whole rows.
    """
    layer = [(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096)] + [(4096,)] + [(1024,)] * 9
    outside = [(30522, 1024), (512, 1024), (2, 1024), (1024, 1024), (1024,)]
    shapes = outside[:3] + layer * 24 + outside[3:]
    numels = [torch.Size(shape).numel() for shape in shapes]
    buckets, room = [[]], 1 << 20  # type: list[list[int]], int
    for numel in reversed(numels):
        buckets[-1].append(numel)
        if 4 * sum(buckets[-1]) >= room:
            buckets.append([])
            room = 25 << 20
    for bits, most in ((8, 2.05), (4, 1.05), (1, 0.26)):
        block = Format(bits, None).block_size
        layouts = [FlatLayout(tuple(bucket), 8, block) for bucket in buckets if bucket]
        # Each rank sends all but its own chunk, twice, and that counts as all of it.
        sent = sum(16 * LevelMessages.size(of, bits) for of in layouts) / sum(numels)
        scattered = [Rows(group, 8).layout(block) for group in (*[layer] * 24, outside)]
        once = sum(8 * LevelMessages.size(of, bits) for of in scattered) / sum(numels)
        print(f"{bits} bits: {sent:.4f} bytes a parameter and step, at most {most}; FSDP2's reduce-scatter {once:.4f}")
        assert sent <= most
        assert once <= most / 2
