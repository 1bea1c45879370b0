"""The compressed all-reduce on real gloo ranks: conservation, traffic, skips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from fusedonebit.comm import (
    CompressedAllReduce,
    Flag,
    LocalTransport,
    TorchTransport,
    describe_mismatch,
    make_transport,
)
from fusedonebit.comm.message import OUT_OF_STEP
from fusedonebit.triton_kernels import SCALE_NORMS, FlatLayout, live_table
from fusedonebit.triton_kernels.headers import Word

SIZES = (300, 0, 128, 1, 513)
MASK = torch.arange(300) % 3 > 0
SCOPES = ("global", "layer", "block")
NORMS = tuple(SCALE_NORMS)
WORLD_SIZES = (1, 2, 3, 4)
CPU = torch.device("cpu")
STEPS = 5
NO_FLAG = 0


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """World size 1 needs no process."""
    return run_ranks(function, world_size, *args) if world_size > 1 else [function(0, 1, *args)]


def make(world_size: int, sizes: Sequence[int] = SIZES, **options: Any) -> CompressedAllReduce:
    layout = FlatLayout(tuple(sizes), world_size, 128)
    return CompressedAllReduce(layout, make_transport(None, CPU), **options)


def tensors_of(rank: int, step: int, sizes: Sequence[int] = SIZES) -> list[Tensor]:
    """What a rank averages in a step; uneven between tensors, as gradients are."""
    random = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(size, generator=random) * 10.0**-i for i, size in enumerate(sizes)]


def line(layout: FlatLayout, tensors: Sequence[Tensor]) -> np.ndarray:
    out = torch.zeros(layout.numel)
    for i, tensor in enumerate(tensors):
        out[layout.offset(i) : layout.offset(i) + tensor.numel()] = tensor.nan_to_num(0.0, 0.0, 0.0)
    return out.numpy()


class Run:
    """What a rank saw: inputs and results by step, flags, and its residuals at the end.

    Args:
        spoil: Changes the tensors, or returns other keyword arguments for the call.
    """

    def __init__(self, rank: int, reduce: CompressedAllReduce, spoil: Callable[..., dict] | None = None) -> None:
        self.inputs, self.results, self.flags, self.texts = [], [], [], []
        for step in range(STEPS):
            tensors = tensors_of(rank, step, reduce.layout.sizes)
            keywords = spoil(rank, step, tensors, reduce) if spoil else {}
            reduce(tensors, **keywords)
            self.inputs.append(line(reduce.layout, tensors))
            self.results.append(reduce.result().numpy())
            self.flags.append(int(reduce.flags))
            self.texts.append(describe_mismatch(reduce.arrived_words))
        reduce.settle()
        self.worker_error = reduce.worker.compensated.numpy()
        self.server_error = reduce.server.compensated.numpy()


def assert_nothing_was_lost(runs: Sequence[Run]) -> None:
    """Sum of results + mean of worker residuals + server residuals == sum of means."""
    given = np.sum([np.mean([run.inputs[t] for run in runs], 0, dtype=np.float64) for t in range(STEPS)], 0)
    worker = np.mean([run.worker_error for run in runs], 0, dtype=np.float64)
    server = np.concatenate([run.server_error for run in runs])
    result = np.sum(runs[0].results, 0, dtype=np.float64)
    np.testing.assert_allclose(result + worker + server, given, rtol=0, atol=1e-5)
    # The check has something to check: residuals are no rounding errors.
    assert np.abs(worker + server).max() > 1e-2


def assert_ranks_are_equal(runs: Sequence[Run]) -> None:
    for run in runs[1:]:
        assert [r.tobytes() for r in run.results] == [r.tobytes() for r in runs[0].results]
        assert run.flags == runs[0].flags


# ---------------------------------------------------------------- the average


def with_zeros(rank: int, step: int, tensors: list[Tensor], reduce: CompressedAllReduce) -> dict:
    for tensor in tensors:
        tensor[::5] *= 0.0  # on all ranks, of either sign
        tensor[rank :: 7 + step] = 0.0
    return {}


def averages(rank: int, world_size: int, scope: str, norm: str, ternary: bool) -> Run:
    reduce = make(world_size, scale_scope=scope, scale_norm=norm, ternary=ternary)
    return Run(rank, reduce, with_zeros if ternary else None)


@pytest.mark.long(but=4)
@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_was_compressed_away_is_kept_and_ranks_stay_equal(world_size, scope, norm, ternary):
    runs = on_ranks(averages, world_size, scope, norm, ternary)
    assert_nothing_was_lost(runs)
    assert_ranks_are_equal(runs)
    assert runs[0].flags == [NO_FLAG] * STEPS


def masked(rank: int, world_size: int) -> Run:
    reduce = make(world_size, scale_scope="layer")
    reduce.set_live(live_table(reduce.layout, {0: MASK}, excluded=[3]))
    return Run(rank, reduce)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_masked_and_padding_elements_have_no_result_or_residual(world_size):
    runs = on_ranks(masked, world_size)
    assert_ranks_are_equal(runs)
    layout = FlatLayout(SIZES, world_size, 128)
    dead = np.ones(layout.numel, bool)
    for tensor in (0, 2, 4):
        dead[layout.offset(tensor) : layout.offset(tensor) + SIZES[tensor]] = False
    dead[:300] = ~MASK.numpy()
    server_error = np.concatenate([run.server_error for run in runs])
    for values in (*runs[0].results, *(run.worker_error for run in runs), server_error):
        assert not values[dead].any()
    assert all(result[~dead].all() for result in runs[0].results)
    assert all(run.worker_error[~dead].any() for run in runs)


def settling(rank: int, world_size: int) -> bool:
    settled, deferred = (make(world_size, scale_scope="layer") for _ in range(2))
    for step in range(STEPS):
        for reduce in (settled, deferred):
            reduce(tensors_of(rank, step))
        settled.settle()
        if not torch.equal(settled.gathered.payload, deferred.gathered.payload):
            return False
    return True


@pytest.mark.parametrize("world_size", [1, 3])
def test_settling_between_steps_changes_nothing_on_the_wire(world_size):
    assert on_ranks(settling, world_size) == [True] * world_size


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0)])
def test_nothing_at_all_can_be_averaged(sizes):
    reduce = make(1, sizes)
    for _ in range(2):
        reduce([torch.empty(0) for _ in sizes])
    assert not reduce.result().any()
    assert int(reduce.flags) == NO_FLAG


# ---------------------------------------------------------------- traffic


def traffic(rank: int, world_size: int, scope: str) -> list[tuple[int, ...]]:
    reduce = make(world_size, scale_scope=scope)
    counts = reduce.transport.traffic
    seen = []
    for step in range(2):
        counts.start_step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            reduce(tensors_of(rank, step))
        called = sum(event.name.startswith("c10d::") for event in profile.events())
        seen.append((called, counts.collectives_step, counts.bytes_step, counts.bytes_total))
    return seen


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("scope", "slots"), [("global", 1), ("layer", 3), ("block", 3)])
def test_a_call_is_two_collectives_with_a_message_to_each_rank(scope, slots):
    # The tensors of each chunk's blocks: 0 0 0 2 3 | 4 4 4 4 4.
    message = 32 + 16 + -(-4 * slots // 16) * 16 + 5 * 128 // 8
    for seen in run_ranks(traffic, 2, scope):
        assert seen == [(2, 2, 2 * message, 2 * message), (2, 2, 2 * message, 4 * message)]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("world_size", [3, 4])
def test_bytes_grow_with_the_ranks_and_shrink_with_the_chunks(world_size):
    message = 32 + 16 + 16 + -(-10 // world_size) * 128 // 8
    for seen in run_ranks(traffic, world_size, "global"):
        assert seen[0] == (2, 2, 2 * (world_size - 1) * message, 2 * (world_size - 1) * message)


# ---------------------------------------------------------------- skips


def spoiled(rank: int, world_size: int, how: str) -> Run:
    return Run(rank, make(world_size, scale_scope="layer"), SPOILERS[how])


def a_non_finite(rank: int, step: int, tensors: list[Tensor], reduce: CompressedAllReduce) -> dict:
    if (rank, step) == (1, 2):
        tensors[0][[0, 299]] = torch.tensor([torch.nan, -torch.inf])
    return {}


def an_abort(rank: int, step: int, tensors: list[Tensor], reduce: CompressedAllReduce) -> dict:
    if (rank, step) != (1, 2):
        return {}
    tensors[:] = [torch.empty(0)] * len(tensors)
    return {"abort": True}


def another_tag(rank: int, step: int, tensors: list[Tensor], reduce: CompressedAllReduce) -> dict:
    return {"tag": 8 if (rank, step) == (1, 2) else 7}


def a_missed_step(rank: int, step: int, tensors: list[Tensor], reduce: CompressedAllReduce) -> dict:
    if rank == 1:
        reduce.synchronisations += {2: 1, 3: -1}.get(step, 0)
    return {}


def a_corrupted_gather(rank: int, step: int, tensors: list[Tensor], reduce: CompressedAllReduce) -> dict:
    intact = TorchTransport.all_gather

    def corrupt(gathered: Tensor, sent: Tensor) -> None:
        intact(reduce.transport, gathered, sent)
        if (rank, step) == (1, 1):
            gathered[-1, -1] ^= 0x10

    reduce.transport.all_gather = corrupt
    return {}


def a_damaged_header(rank: int, step: int, tensors: list[Tensor], reduce: CompressedAllReduce) -> dict:
    """What rank 0 tells rank 1 of its layout is damaged on the way: the other servers average what has arrived."""
    intact = TorchTransport.all_to_all

    def damage(arrived: Tensor, sent: Tensor) -> None:
        intact(reduce.transport, arrived, sent)
        if (rank, step) == (1, 2):
            reduce.gathered.words[0, Word.LAYOUT] ^= 0x10

    reduce.transport.all_to_all = damage
    return {}


SPOILERS = {
    f.__name__: f for f in (a_non_finite, an_abort, another_tag, a_missed_step, a_damaged_header, a_corrupted_gather)
}
REASONS = [
    ("a_non_finite", Flag.NONFINITE, ""),
    ("an_abort", Flag.ABORT, ""),
    (
        "another_tag",
        Flag.MISMATCH,
        "hyper-parameters (learning rate and the like), as a hash: 7 on rank 0, 8 on rank 1",
    ),
    ("a_missed_step", Flag.MISMATCH, f"3 steps on rank 0, 4 on rank 1 ({OUT_OF_STEP})"),
    ("a_damaged_header", Flag.MISMATCH, ""),
]


@pytest.mark.long(but=3)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("how", "flag", "text"), REASONS, ids=[reason[0] for reason in REASONS])
def test_one_rank_makes_all_skip_the_step_and_nothing_is_lost(how, flag, text, world_size):
    runs = run_ranks(spoiled, world_size, how)
    assert runs[0].flags == [0, 0, int(flag), 0, 0]
    assert_ranks_are_equal(runs)
    assert_nothing_was_lost(runs)
    assert [result.any() for result in runs[0].results] == [True, True, False, True, True]
    for run in runs:
        assert np.isfinite(run.results).all()
        assert not text or run.texts[2] == text


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_corrupted_gather_is_found_on_all_at_the_next_call(world_size):
    for run in run_ranks(spoiled, world_size, "a_corrupted_gather"):
        assert run.flags == [0, 0, int(Flag.MISMATCH), 0, 0]
        assert run.texts[2].startswith("digest of the last synchronisation: ")
        assert run.texts[2].endswith(" on rank 1")


def test_bad_arguments_of_the_all_reduce_are_named():
    with pytest.raises(ValueError, match="world_size must be the transport's 1, got 2"):
        CompressedAllReduce(FlatLayout((5,), 2), LocalTransport())
    with pytest.raises(
        ValueError, match=r"scale_norm must be one of \['contractive', 'l1', 'l2', 'relaxed'\], got 'max'"
    ):
        CompressedAllReduce(FlatLayout((5,)), scale_norm="max")
    with pytest.raises(ValueError, match="scale_scope must be 'global', 'bucket', 'layer' or 'block', got 'row'"):
        CompressedAllReduce(FlatLayout((5,)), scale_scope="row")
