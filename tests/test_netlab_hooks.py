"""The network lab's int8 hook: its arithmetic is the lab's rival's, over gloo, in many buckets, the same every time."""

# Annotations stay objects in this file: DDP looks at those of hooks.

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from benchmarks.lab.alike import AlikeTransport
from benchmarks.lab.rivals.blocks import Blocks
from benchmarks.lab.rivals.codes import CodedAllReduce, IntegerCode
from benchmarks.lab.rivals.collectives import StackedCollectives
from benchmarks.netlab.hooks import Bfloat16, Hook, Int8
from benchmarks.netlab.quantised import BLOCK, QuantisedLine, decode, encode

WIDTH, LAYERS, STEPS = 384, 8, 4
"""A bucket of 1 MB for two layers each."""


class Watched(Int8):
    """Keeps what each bucket had before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, Tensor, Tensor]] = []

    def call(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        before, index = bucket.buffer().clone(), bucket.index()

        def keep(done: torch.futures.Future[Tensor]) -> Tensor:
            self.seen.append((index, before, done.value().clone()))
            return done.value()

        return super().call(state, bucket).then(keep)


def train(hook: Hook, rank: int) -> nn.Module:
    """Some steps of SGD on batches of this rank's own."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))
    parallel = nn.parallel.DistributedDataParallel(model, **hook.buckets)
    parallel.register_comm_hook(hook.state, hook.call)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        parallel(torch.randn(8, WIDTH, generator=draw)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= p.grad
                p.grad = None
    return model


def watched(rank: int, world_size: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    hook = Watched()
    train(hook, rank)
    return [(index, before.numpy(), after.numpy()) for index, before, after in hook.seen]


def trained(rank: int, world_size: int, name: str) -> list[np.ndarray]:
    hook = {"int8": Int8, "bf16": Bfloat16}[name]()
    return [p.detach().numpy() for p in train(hook, rank).parameters()]


def by_the_lab(rows: list[Tensor]) -> list[Tensor]:
    """What the lab's rival makes of steps of lines [W, n], on lines that are filled up to whole blocks."""
    world_size, numel = rows[0].shape
    filled = -(-numel // (world_size * BLOCK)) * world_size * BLOCK
    wires = StackedCollectives(AlikeTransport(0, world_size))
    mean_of = CodedAllReduce(wires, IntegerCode(8, Blocks([filled], world_size, BLOCK)), rows[0])
    return [mean_of(nn.functional.pad(step, (0, filled - numel)))[:numel] for step in rows]


def test_integers_are_within_half_a_step_of_what_they_stand_for():
    values = torch.randn(3, 4 * BLOCK) * torch.logspace(-3, 3, 4 * BLOCK)
    values[1, :BLOCK] = 0.0
    told = encode(values)
    assert told.dtype == torch.uint8
    assert told.shape == (3, 4 * BLOCK + 16)
    step = values.view(3, -1, BLOCK).abs().amax(-1, keepdim=True) / 127
    assert bool(((decode(told) - values).view(3, -1, BLOCK).abs() <= 0.501 * step).all())


def test_what_a_rank_loses_it_keeps():
    line = QuantisedLine(1000, 2)
    given, sent = torch.randn(1000), torch.zeros(2 * line.chunk)
    for _ in range(3):
        sent += decode(line.compress(given)).view(-1)
    torch.testing.assert_close(
        sent + line.worker_error.view(-1), nn.functional.pad(3 * given, (0, 2 * line.chunk - 1000))
    )


def test_the_hook_computes_the_labs_rival_in_every_bucket():
    told = run_ranks(watched, 2)
    indices = [index for index, *_ in told[0]]
    assert len(set(indices)) >= 3, "one bucket says nothing of their order"
    for index in set(indices):
        # After the first step DDP cuts anew, and residuals start again.
        ranks = [[each for each in rank if each[0] == index][1 - STEPS :] for rank in told]
        rows = [torch.stack([torch.from_numpy(rank[step][1]) for rank in ranks]) for step in range(STEPS - 1)]
        for step, expected in enumerate(by_the_lab(rows)):
            for rank in ranks:
                torch.testing.assert_close(torch.from_numpy(rank[step][2]), expected, rtol=0, atol=0)


def test_hooks_in_many_buckets_give_all_ranks_the_same_bits():
    for name in ("int8", "bf16"):
        first, again = (run_ranks(trained, 4, name) for _ in range(2))
        for run in (first, again):
            for rank in run:
                assert all(np.array_equal(mine, theirs) for mine, theirs in zip(rank, first[0], strict=True)), name
