"""Marsit on real ranks: what stays bit-identical, collectives, bytes on the sockets; and in two levels."""

from __future__ import annotations

import os
import socket
import struct
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from observe import fingerprint, parameters
from optimizers import by_name, objects
from ranks import WORLD_SIZES, run_ranks, simulate
from rounds import EACH, MARSIT, kept
from rounds import train as take_steps
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from fusedonebit import MarsitAdam, MarsitSGD
from fusedonebit.comm import SimulatedGroup, Transport

ROUNDS = 5


def make() -> list[Parameter]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in ((33, 40), (7,), (1,), ())]
    params += [Parameter(torch.randn(1500).bfloat16()), Parameter(torch.randn(8, 6).t())]
    return params


def train(
    rank: int, world_size: int, name: str, options: dict, group: Transport | None = None, rounds: int = ROUNDS
) -> dict[str, Any]:
    """What this rank has after each step."""
    optimizer = MARSIT[name](make(), 1e-2, weight_decay=0.1, process_group=group, **options)
    seen: dict[str, Any] = {"phases": [], "prints": [], "largest": [], "own": []}
    for step in range(rounds * optimizer.frame.options.rounds.local_steps):
        take_steps(optimizer, rank, 1, step)
        own = kept(optimizer)
        seen["phases"].append(optimizer.phase)
        seen["prints"].append(fingerprint(parameters(optimizer)))
        seen["largest"].append([float(c.abs().max()) for c in own])
        seen["own"].append(fingerprint(own + [optimizer.momentum(p) for p in parameters(optimizer)]))
    seen["rounds"] = optimizer.stats()["rounds"]
    return seen


# ---------------------------------------------------------------- equal on all ranks

PLACES = [*((topology, w) for topology in ("ring", "owner") for w in WORLD_SIZES), ("torus", 4)]
SCHEDULES = [(1, 1), (3, 1), (0, 1), (1, 3), (3, 3)]


def train_all(rank: int, transport: Transport, name: str, topology: str) -> list[dict[str, Any]]:
    every = [{"full_precision_every": k, "local_steps": n, "topology": topology} for k, n in SCHEDULES]
    return [train(rank, transport.world_size, name, options, transport) for options in every]


def check(ranks: list[dict[str, Any]], k: int, local_steps: int, what: str) -> None:
    equal = apart = 0
    for step in range(len(ranks[0]["prints"])):
        number, ends = step // local_steps, (step + 1) % local_steps == 0
        phase = "local" if not ends else "uncompressed" if k and number % k == 0 else "one-bit"
        different = len({seen["prints"][step] for seen in ranks})
        assert {seen["phases"][step] for seen in ranks} == {phase}
        if not ends:
            apart += different == len(ranks)
            continue
        equal += different == 1
        for seen in ranks:
            zero = [largest == 0 for largest in seen["largest"][step]]
            assert all(zero) if phase == "uncompressed" else not any(zero), (what, step)
    rounds = ranks[0]["rounds"]
    print(f"{what}: rounds after which all ranks' bits are equal: {equal} (limit: all {rounds})")
    assert equal == rounds
    assert apart == rounds * (local_steps - 1), "in local steps workers move by themselves"
    assert len(set(ranks[0]["prints"])) == len(ranks[0]["prints"])
    assert len({seen["own"][0] for seen in ranks}) == len(ranks), "momentum is each worker's own"


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("topology", "world_size"), PLACES)
@EACH
def test_rounds_leave_equal_ranks_full_ones_no_compensation(name, topology, world_size):
    ranks = simulate(train_all, world_size, name, topology)
    for (k, local_steps), seen in zip(SCHEDULES, zip(*ranks, strict=True), strict=True):
        check(list(seen), k, local_steps, f"{name}, {topology} of {world_size}, K={k}, {local_steps} local steps")


@pytest.mark.full
@pytest.mark.parametrize(("topology", "rows"), [("ring", None), ("owner", None), ("torus", 2), ("torus", 4)], ids=str)
def test_eight_ranks_too(topology, rows):
    options = {"topology": topology, "rows": rows, "full_precision_every": 3, "local_steps": 2}
    ranks = run_ranks(train, 8, "sgd", options, None, 5)
    check(ranks, 3, 2, f"{topology} of 8, rows={rows}")


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("topology", "world_size"), PLACES)
@EACH
def test_gloo_ranks_and_simulated_ranks_get_the_same_bits(name, topology, world_size):
    """In rounds of signs; in those of full precision gloo may add in another order, but for two numbers."""
    options = {"topology": topology, "full_precision_every": 3 if world_size == 2 else 0, "local_steps": 2}
    real = run_ranks(train, world_size, name, options)
    simulated = SimulatedGroup(world_size).run(lambda rank, t: train(rank, world_size, name, options, t))
    assert real == simulated


def draws(rank: int, transport: Transport, topology: str, seeds: tuple[int, ...]) -> list[str]:
    prints = []
    for seed in seeds:
        options = {"topology": topology, "full_precision_every": 0, "seed": seed}
        prints.append(train(rank, transport.world_size, "sgd", options, transport)["prints"][-1])
    return prints


@pytest.mark.long(but=1)
@pytest.mark.parametrize("topology", ["ring", "owner"])
def test_a_seed_repeats_its_run_and_another_does_not(topology):
    for prints in simulate(draws, 2, topology, (5, 5, 6)):
        assert prints[0] == prints[1] != prints[2]


def count_collectives(rank: int, world_size: int, name: str, options: dict, tensors: int) -> list[tuple[str, dict]]:
    params = [Parameter(torch.randn(3 + i % 50, generator=torch.Generator().manual_seed(i))) for i in range(tensors)]
    optimizer = MARSIT[name](params, 1e-2, full_precision_every=3, local_steps=2, **options)
    seen = []
    for step in range(8):
        with CollectiveCounter() as counter:
            take_steps(optimizer, rank, 1, step)
        names = {called: counter.names.count(called) for called in set(counter.names)}
        stats = optimizer.stats()
        called = names.get("send", 0) + sum(v for k, v in names.items() if k not in TALK)
        assert stats["collectives_step"] == called
        seen.append((optimizer.phase, names))
    return seen


TALK = ("send", "recv_")
FULL = {"_allgather_base_": 1, "allreduce_": 1}


@pytest.mark.long(but=1)
@EACH
@pytest.mark.parametrize(
    ("world_size", "options", "expected"),
    [
        (2, {"topology": "ring"}, {"send": 2, "recv_": 2}),
        (4, {"topology": "ring"}, {"send": 6, "recv_": 6}),
        (4, {"topology": "torus"}, {"send": 4, "recv_": 4}),
        (4, {"topology": "owner"}, {"_allgather_base_": 1}),
    ],
    ids=str,
)
def test_a_round_takes_one_exchange_a_hop_and_a_local_step_none(name, world_size, options, expected):
    for tensors in (1, 100):
        for seen in run_ranks(count_collectives, world_size, name, options, tensors):
            assert [phase for phase, _ in seen][1::2] == ["uncompressed", "one-bit", "one-bit", "uncompressed"]
            assert {phase for phase, _ in seen[::2]} == {"local"}
            for phase, called in seen:
                assert called == {"local": {}, "uncompressed": FULL, "one-bit": expected}[phase]


# Offsets in Linux' struct tcp_info.
ACKED, RECEIVED = 120, 128
ELEMENTS = 4_000_000


def tcp_sockets() -> Iterator[socket.socket]:
    """This process's connected ones, as duplicates."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    found.getpeername()
                    yield found
        except OSError:
            continue  # closed meanwhile, or only listening


def counted() -> dict[tuple, tuple[int, int]]:
    """By connection, bytes that the other end has acknowledged and bytes that have come, by the kernel's own counts."""
    found: dict[tuple, tuple[int, int]] = {}
    for _ in range(50):
        earlier, found = found, {}
        for each in tcp_sockets():
            info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            ends = (each.getsockname(), each.getpeername())
            found[ends] = tuple(struct.unpack_from("=Q", info, at)[0] for at in (ACKED, RECEIVED))
        if found == earlier:
            return found
        time.sleep(0.3)  # acknowledgements may be late
    raise AssertionError("the counts of a rank that does nothing keep changing")


def count_bytes(rank: int, world_size: int, options: dict, rounds: int) -> tuple[float, float, float]:
    """In a round: bytes sent and received by the sockets, and sent by the optimizer's own count."""
    p = Parameter(torch.zeros(ELEMENTS))
    p.grad = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank))
    optimizer = MarsitSGD([p], 1e-2, momentum=0, **objects(**options))
    optimizer.step()
    dist.barrier()
    before, told = counted(), optimizer.stats()["bytes_total"]
    dist.barrier()  # counted: a few bytes
    for _ in range(rounds):
        optimizer.step()
    dist.barrier()
    after, told = counted(), optimizer.stats()["bytes_total"] - told
    dist.barrier()
    # Not over connections that an earlier group may only now have closed.
    sent, received = (sum(now[i] - before.get(ends, (0, 0))[i] for ends, now in after.items()) for i in (0, 1))
    return sent / rounds, received / rounds, told / rounds


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads Linux' TCP_INFO")
@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"topology": "ring"}, 2),
        ({"topology": "torus"}, 2),
        ({"topology": "owner"}, 1),
        ({"topology": "ring", "full_precision_every": 1}, 64),
    ],
    ids=["ring", "torus", "owner", "full precision"],
)
def test_the_sockets_count_as_many_bytes_as_the_paper_says(options, bits):
    """Each worker sends 2 (M-1)/M of a bit per parameter; with owners half of it; in full precision 32 times it."""
    world_size, rounds = 4, 2
    expected = bits * (world_size - 1) / world_size * ELEMENTS / 8
    for rank, (sent, received, told) in enumerate(
        run_ranks(count_bytes, world_size, {"full_precision_every": 0} | options, rounds)
    ):
        ratios = [n / expected for n in (sent, received, told)]
        print(
            f"{options}, rank {rank}: bytes of a round / ({bits} (M-1)/M P/8): sent {ratios[0]:.4f}, "
            f"received {ratios[1]:.4f}, by stats() {ratios[2]:.4f} (limits 0.98 ... 1.02)"
        )
        assert all(0.98 <= ratio <= 1.02 for ratio in ratios)


# ---------------------------------------------------------------- two levels: nodes as workers

SIZES = (1024, 512, 512)  # of blocks of 128: the first tensor is one part, the others are the second
STEPS, INSIDE = 9, 2
KINDS: dict[str, Any] = {
    "ring": (by_name(MarsitSGD), {"momentum": 0.9, "topology": "ring"}),
    "owner": (by_name(MarsitSGD), {"momentum": 0.9, "topology": "owner", "weight_decay": 0.1}),
    "adam": (by_name(MarsitAdam), {"topology": "ring"}),
}


def build(kind: str, sizes: tuple[int, ...], values: list[torch.Tensor], **more: Any) -> tuple[list, Any]:
    cls, options = KINDS[kind]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    assert tuple(p.numel() for p in params) == sizes
    common = {"lr": 1e-2, "full_precision_every": 4, "block_size": 128}
    return params, cls(params, **common, **options, **more)


def values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, generator=generator) for n in SIZES]


def gradient(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(n, generator=generator) for n in SIZES]


def in_levels(rank: int, world_size: int, kind: str) -> list[list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", (world_size // INSIDE, INSIDE))
    params, optimizer = build(kind, SIZES, values(), hierarchy=mesh)
    seen = []
    for step in range(STEPS):
        for p, g in zip(params, gradient(rank, step), strict=True):
            p.grad = g
        optimizer.step()
        seen.append([p.detach().clone() for p in params])
    assert optimizer.stats()["bytes_inside"] > 0
    return seen


@pytest.mark.long(but=1)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_marsit_on_each_part_with_nodes_as_workers(kind):
    ranks = run_ranks(in_levels, 4, kind)

    def node(part: slice):
        def train(worker: int, transport: Any) -> list[list[torch.Tensor]]:
            params, optimizer = build(kind, SIZES[part], values()[part], process_group=transport)
            seen = []
            for step in range(STEPS):
                first, second = (gradient(INSIDE * worker + i, step)[part] for i in range(INSIDE))
                for p, a, b in zip(params, first, second, strict=True):
                    p.grad = 0.5 * a + 0.5 * b
                optimizer.step()
                seen.append([p.detach().clone() for p in params])
            return seen

        return train

    parts = [SimulatedGroup(2).run(node(part))[0] for part in (slice(0, 1), slice(1, 3))]
    for step in range(STEPS):
        expected = [*parts[0][step], *parts[1][step]]
        for seen in ranks:
            for here, there in zip(seen[step], expected, strict=True):
                assert torch.equal(here, there), f"{kind}, step {step}"


def with_faults(rank: int, world_size: int) -> list[Any]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world_size // INSIDE, INSIDE))
    params, optimizer = build("ring", SIZES, values(), hierarchy=mesh)
    told: list[Any] = []
    for step in range(8):
        for p, g in zip(params, gradient(rank, step), strict=True):
            p.grad = g
        if step in (2, 4) and rank == 3:  # a 1-bit round, and one of full precision
            params[0].grad[5] = float("nan")
        optimizer.step()
        told.append([p.detach().clone() for p in params])
    saved = optimizer.state_dict()
    again, resumed = build("ring", SIZES, told[-1], hierarchy=mesh)
    resumed.load_state_dict(saved)
    for p, q, g in zip(params, again, gradient(rank, 9), strict=True):
        p.grad, q.grad = g, g.clone()
    optimizer.step()
    resumed.step()
    assert all(torch.equal(p, q) for p, q in zip(params, again, strict=True))
    with pytest.raises(RuntimeError, match=r"add_param_group must be called without Wire\(hierarchy=\.\.\.\)"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})
    optimizer.param_groups[0]["lr"] = 1e-2 if rank != 2 else 2e-2
    before = [p.detach().clone() for p in params]
    try:
        optimizer.step()
        error = ""
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    still = all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    return [told, optimizer.stats()["skipped_steps"], error, still]


def test_one_ranks_fault_is_all_ranks_and_runs_can_be_resumed():
    runs = run_ranks(with_faults, 4)
    for told, skipped, error, still in runs:
        assert all(torch.equal(a, b) for x, y in zip(told, runs[0][0], strict=True) for a, b in zip(x, y, strict=True))
        assert all(torch.equal(a, b) for step in (2, 4) for a, b in zip(told[step], told[step - 1], strict=True))
        assert skipped == 3, "two NaNs, and the round in which learning rates differ"
        assert error.startswith("OutOfStepError: "), error
        assert "hyper-parameters" in error
        assert "damaged" not in error
        assert still
