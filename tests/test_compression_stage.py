"""What the compression stage costs, what it keeps equal, and what it tells of each layer's error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference_adam
import torch
from collective_counter import CollectiveCounter
from observe import fingerprint, flat, observe, parameters, served
from optimizers import EACH_FROZEN, EACH_ONEBIT, LIVING, PAPER, UNGUARDED, construct, objects, skip_refused
from ranks import WORLD_SIZES, run_ranks, simulate
from torch import Tensor
from torch.nn import Parameter

from benchmarks.shapes import bert_large, sizes
from fusedonebit import OneBitAdam
from fusedonebit.comm import Messages, Transport
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.resolved import ResolvedNumerics
from fusedonebit.triton_kernels import FlatLayout, ScaleScope, choose_block_size


def gradient(rank: int, step: int, p: Tensor, i: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 10 * step + 100_000 * i)
    return (torch.randn(p.shape, generator=generator) + 0.3).to(p.dtype)


def train(optimizer: DistributedOptimizer, rank: int, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        for i, p in enumerate(parameters(optimizer)):
            p.grad = gradient(rank, step, p, i)
        optimizer.step()


def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def fingerprints(rank: int, transport: Transport, name: str, options: dict) -> list[str]:
    params = make((33, 40), (7,), (1,), ()) + make((1500,), (12, 5), dtype=torch.bfloat16)
    params.append(Parameter(torch.ones(8, 6).t()))
    optimizer = construct(name, params, lr=1e-2, freeze_step=60, **options, process_group=transport)
    prints = []
    for step in range(200):
        train(optimizer, rank, 1, start=step)
        prints.append(fingerprint(params))
        assert optimizer.phase == ("warmup" if step < 60 else "compression")
    return prints


LAYER = PAPER | {"scale_norm": "l1", "scale_scope": "layer"}


@pytest.mark.long(but=1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("onebit-adam", "onebit-lamb", "onebit-lamb-frozen")),
        ("onebit-adam", LAYER),
        ("onebit-lamb", PAPER),
    ],
    ids=["adam", "lamb", "frozen lamb", "adam, layer", "lamb, global"],
)
def test_parameters_stay_bit_identical_across_ranks(world_size, name, options):
    prints = simulate(fingerprints, world_size, name, options)
    equal = sum(len(set(of_step)) == 1 for of_step in zip(*prints, strict=True))
    print(f"{name}, W={world_size} {options}: steps after which all ranks' bits are equal: {equal} (limit: all 200)")
    assert equal == 200
    assert len(set(prints[0])) == 200


# ---------------------------------------------------------------- what travels


def message_bytes(layout: FlatLayout, scale_scope: ScaleScope) -> int:
    """The length of a message, from the layout."""
    _, slots = layout.scale_slots(scale_scope)
    return Messages.size(slots, layout)


def count_collectives(rank: int, world_size: int, name: str, tensors: int, options: dict) -> list[tuple[int, ...]]:
    shapes = [(3 + i % 50,) for i in range(tensors)]
    optimizer = construct(name, make(*shapes), freeze_step=2, **UNGUARDED | options)
    train(optimizer, rank, 2)
    counts = []
    for step in range(3):
        with CollectiveCounter() as counter:
            train(optimizer, rank, 1, start=2 + step)
        stats = optimizer.stats()
        message = message_bytes(optimizer.frame.layout, optimizer.frame.options.numerics.scale_scope)
        counts.append((len(counter.names), stats["collectives_step"], stats["bytes_step"], message))
    assert optimizer.phase == "compression"
    return counts


@pytest.mark.long(but=1)
@EACH_FROZEN
@pytest.mark.parametrize("tensors", [3, 300])
@pytest.mark.parametrize("options", [{}, PAPER], ids=["defaults", "paper"])
def test_a_step_calls_two_collectives_for_any_number_of_tensors(name, tensors, options):
    for counts in run_ranks(count_collectives, 2, name, tensors, options):
        for called, counted, sent, message in counts:
            print(f"{name}, {tensors} tensors: collectives in a step: {called} (limit 2), {sent} bytes to the other")
            assert called == counted == 2
            assert sent == 2 * message


DEFAULT_SCOPE: ScaleScope = ResolvedNumerics().scale_scope


def wire_bytes(counts: tuple[int, ...], world_size: int, scale_scope: ScaleScope) -> int:
    """All messages of both collectives, the rank's own included."""
    layout = FlatLayout(counts, world_size, choose_block_size(counts, world_size))
    return 2 * world_size * message_bytes(layout, scale_scope)


@pytest.mark.parametrize("world_size", [2, 4, 8, 64])
@pytest.mark.parametrize("scale_scope", [DEFAULT_SCOPE, "global"])
def test_wire_bytes_of_bert_large_are_two_bits_per_parameter(world_size, scale_scope):
    counts = sizes(bert_large())
    assert len(counts) == 302
    real = sum(counts)
    assert 335e6 < real < 337e6
    ratio = wire_bytes(counts, world_size, scale_scope) / (2 * real / 8)
    print(f"BERT-Large, {real:,} elements, W={world_size}, {scale_scope}: bytes / (2 n/8): {ratio:.5f} (limit 1.01)")
    assert 1.0 <= ratio <= 1.01


# ---------------------------------------------------------------- what is kept

MILLIONS = [(1024, 1024), (1024,), (1000, 777), (3,), (1536, 2048), (77, 77)]
STATE_BYTES = dict.fromkeys(LIVING, 7.2) | {"onebit-adam": 8.2, "onebit-lamb": 12.3, "onebit-lamb-frozen": 8.2}
"""Limits per parameter, besides the 4 / W of the servers' residuals."""


def kept_bytes(rank: int, world_size: int, name: str, options: dict) -> tuple[float, float, int, int]:
    """Bytes per parameter by ``stats``, and the largest allocations before and after the freeze."""
    optimizer = construct(name, make(*MILLIONS), freeze_step=2, **UNGUARDED | options)
    n = sum(math.prod(shape) for shape in MILLIONS)
    grads = [gradient(rank, 0, p, i) for i, p in enumerate(parameters(optimizer))]
    for p, g in zip(parameters(optimizer), grads, strict=True):
        p.grad = g
    first = largest_allocation(optimizer.step)
    optimizer.step()
    compressed = max(largest_allocation(optimizer.step) for _ in range(3))
    assert optimizer.phase == "compression"
    stats = optimizer.stats()
    assert stats["parameters"] == n
    return stats["state_bytes"] / n, stats["wire_bytes"] / n, first // n, compressed


def largest_allocation(call) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    return max(event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")


@pytest.mark.long(full=True)
@EACH_ONEBIT
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "options",
    [pytest.param({"guard": "rewarm"}, id="defaults"), pytest.param(PAPER, marks=pytest.mark.full, id="paper")],
)
def test_state_and_wire_stay_small_and_the_freeze_needs_little(name, world_size, options):
    skip_refused(name, options)
    for state, wire, warmup, compressed in run_ranks(kept_bytes, world_size, name, options):
        kept_in_floats = name in LIVING and options is PAPER  # v, which something else reads than preconditioning
        limit, n = STATE_BYTES[name] + 3 * kept_in_floats + 4 / world_size, sum(math.prod(shape) for shape in MILLIONS)
        print(f"{name}, W={world_size}: state bytes per parameter: {state:.3f} (limit {limit})")
        # A byte for what was told of each square, until the next step renews the variance with it.
        most = 1.4 if name in LIVING else 0.3
        print(f"{name}, W={world_size}: wire bytes per parameter: {wire:.3f} (limit {most})")
        print(f"{name}, W={world_size}: largest allocation from the freeze on: {compressed} (limit {1.1 * n / 8:.0f})")
        assert limit - 0.3 < state <= limit
        assert 0.12 < wire < most
        assert warmup == 4, "the warm-up's gradient buffer must show, or nothing would"
        # gloo's all-gather copies the message of one bit per element, a renewal logarithms of all; a tile's temporaries
        # are smaller.
        assert compressed < (2.2 * n if name in LIVING else 1.1 * n / 8)


@pytest.mark.long(but=1)
@EACH_ONEBIT
def test_stats_count_every_full_size_tensor_that_is_held(name):
    optimizer = construct(name, make(*MILLIONS), freeze_step=1)
    train(optimizer, 0, 2)
    storages: dict[int, int] = {}
    seen: set[int] = set()
    own = {p.data_ptr() for p in parameters(optimizer)} | {p.grad.data_ptr() for p in parameters(optimizer)}

    def collect(thing: object) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            if thing.data_ptr() not in own:
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            for value in thing.values():
                collect(value)
        elif isinstance(thing, (list, tuple)):
            for value in thing:
                collect(value)
        elif type(thing).__module__.startswith("fusedonebit"):
            collect(vars(thing) if hasattr(thing, "__dict__") else ())

    collect(optimizer)
    held, stats = sum(storages.values()), optimizer.stats()
    told = stats["state_bytes"] + stats["wire_bytes"]
    print(f"{name}: bytes held: {held}, told: {told} (limit: within 1 %)")
    assert told == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("serve_alone", [False, True])
def test_one_process_without_a_group_follows_algorithm_1(serve_alone):
    """With or without a server: what a worker has compressed with one scale, another compression leaves as it is."""
    (p,) = make((70, 30))
    options = PAPER | {"scale_norm": "l1", "serve_alone": serve_alone}
    optimizer = OneBitAdam([p], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, **objects(freeze_step=5, **options))
    train(optimizer, 0, 5)
    given: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    given, worst = given | {"frozen_at": 5, "norm": "l1"}, 0.0
    for step in range(5, 25):
        before = {k: a.astype(np.float64) for k, a in observe(optimizer).items()}
        server_error = before["server_error"] if before["server_error"].size else np.zeros(p.numel())
        state = reference_adam.State(before["x"], before["m"], before["v"], [before["worker_error"]], server_error)
        train(optimizer, 0, 1, start=step)
        spec = reference_adam.compressed_step(
            state, [flat([p.grad]).astype(np.float64)], [served(optimizer)], step=step + 1, **given
        )
        after = observe(optimizer)
        worst = max(worst, float(np.abs(after["m"] / spec.m - 1).max()), float(np.abs(after["x"] - spec.x).max()))
    assert optimizer.phase == "compression"
    assert optimizer.algorithm.exchange.reducer.serves == serve_alone
    stats = optimizer.stats()
    print(f"W=1: deviation from Algorithm 1 in 20 steps: {worst:.1e} (limit 1e-6)")
    assert worst <= 1e-6
    assert (stats["world_size"], stats["collectives_step"], stats["bytes_total"]) == (1, 0, 0)
    assert "local" in stats["transport"]
    assert stats["worker_error_norm"] > 0
    assert stats["server_error_norm"] == 0, "one worker's signs and scale survive the second compression"


# ---------------------------------------------------------------- what is told of each layer

SHAPES = ((40, 50), (300,), (7,))


def trained(name: str, rank: int, steps: int = 6, **options):
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = construct(name, params, 1e-3, freeze_step=2, **options)
    own = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=own)
        optimizer.step()
    return optimizer, params


def told_and_looked_at(rank: int, transport: Transport, name: str, options: dict):
    optimizer, params = trained(name, rank, process_group=transport, **options)
    told = optimizer.stats(layers=True)["layers"]
    ratios = [float(optimizer.worker_error(p).norm() / optimizer.momentum(p).norm()) for p in params]
    return told, ratios, optimizer.stats(layers=True)["layers"]


@pytest.mark.long(but=3)
@EACH_ONEBIT
@pytest.mark.parametrize("more", [{}, {"scale_scope": "layer"}, {"scale_scope": "layer", "buckets": 2}])
def test_a_layers_error_is_its_residuals_norm_over_its_momentums(name, more):
    options = UNGUARDED | {"precondition": False} | (PAPER if "scale_scope" not in more else {}) | more
    skip_refused(name, options)
    for told, ratios, after in simulate(told_and_looked_at, 2, name, options):
        assert told["residual_over_momentum"] == pytest.approx(ratios, rel=1e-4)
        assert min(ratios) > 0
        assert after == told  # looking, which settles the residuals, changes nothing


def in_units_of_compression(rank: int, transport: Transport):
    optimizer, _ = trained("onebit-adam", rank, guard="off", process_group=transport)
    told = optimizer.stats(layers=True)
    reducer, layout = optimizer.algorithm.exchange.reducer, optimizer.frame.layout
    reducer.settle()
    residual, result = reducer.of_rank.worker.numbers, reducer.result()
    parts = [slice(layout.offset(i), layout.offset(i) + n) for i, n in enumerate(layout.sizes)]
    return told, [float(residual[part].norm() / result[part].norm()) for part in parts]


def test_preconditioned_layers_errors_are_in_the_wholes_unit():
    ranks = simulate(in_units_of_compression, 2)
    for told, ratios in ranks:
        assert told["layers"]["residual_over_momentum"] == pytest.approx(ratios, rel=1e-4)
    every = torch.tensor([ratios for _, ratios in ranks])
    assert every.min() < ranks[0][0]["residual_over_momentum"] < every.max()


@EACH_ONEBIT
def test_layers_have_no_error_in_the_warmup_or_unless_asked_for(name):
    optimizer, _ = trained(name, 0, steps=1)
    assert optimizer.stats(layers=True)["layers"]["residual_over_momentum"] == [0.0, 0.0, 0.0]
    assert "layers" not in optimizer.stats()
