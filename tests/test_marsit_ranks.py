"""Marsit on real ranks: what stays bit-identical, which collectives are called, and what goes over the sockets."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from observe import fingerprint, parameters
from optimizers import by_name, objects
from ranks import WORLD_SIZES, run_ranks, simulate
from torch.nn import Parameter

from fusedonebit import MarsitAdam, MarsitSGD
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.core.optimizer import DistributedOptimizer

MARSIT = {"sgd": by_name(MarsitSGD), "adam": by_name(MarsitAdam)}
EACH = pytest.mark.parametrize("name", MARSIT)
ROUNDS = 5


def make() -> list[Parameter]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in ((33, 40), (7,), (1,), ())]
    params += [Parameter(torch.randn(1500).bfloat16()), Parameter(torch.randn(8, 6).t())]
    return params


def step_once(optimizer: DistributedOptimizer, rank: int, step: int) -> None:
    for i, p in enumerate(parameters(optimizer)):
        generator = torch.Generator().manual_seed(1 + rank + 10 * step + 100_000 * i)
        p.grad = (torch.randn(p.shape, generator=generator) + 0.3).to(p.dtype)
    optimizer.step()


def compensations(optimizer: DistributedOptimizer) -> list[torch.Tensor]:
    return [optimizer.compensation(p) for p in parameters(optimizer)]


def train(
    rank: int, world_size: int, name: str, options: dict, group: Transport | None = None, rounds: int = ROUNDS
) -> dict[str, Any]:
    """What this rank has after each step."""
    optimizer = MARSIT[name](make(), 1e-2, weight_decay=0.1, process_group=group, **options)
    seen: dict[str, Any] = {"phases": [], "prints": [], "largest": [], "own": []}
    for step in range(rounds * optimizer.frame.options.rounds.local_steps):
        step_once(optimizer, rank, step)
        kept = compensations(optimizer)
        seen["phases"].append(optimizer.phase)
        seen["prints"].append(fingerprint(parameters(optimizer)))
        seen["largest"].append([float(c.abs().max()) for c in kept])
        seen["own"].append(fingerprint(kept + [optimizer.momentum(p) for p in parameters(optimizer)]))
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


# ---------------------------------------------------------------- collectives


def count_collectives(rank: int, world_size: int, name: str, options: dict, tensors: int) -> list[tuple[str, dict]]:
    params = [Parameter(torch.randn(3 + i % 50, generator=torch.Generator().manual_seed(i))) for i in range(tensors)]
    optimizer = MARSIT[name](params, 1e-2, full_precision_every=3, local_steps=2, **options)
    seen = []
    for step in range(8):
        with CollectiveCounter() as counter:
            step_once(optimizer, rank, step)
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


# ---------------------------------------------------------------- bytes, as the sockets count them

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
