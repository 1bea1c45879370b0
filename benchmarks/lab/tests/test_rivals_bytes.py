"""What the lab's rivals send: bits are unpacked to what was packed, bytes are those of each method's messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import ceil, log2

import pytest
import rivals_by_the_book as book
import torch
from rivals_runs import BOOK, NUMEL, SHAPES, STEPS, WORKERS, a_run, rival_of

from benchmarks.lab.rivals.bits import pack, packed_bytes, unpack
from benchmarks.lab.rivals.diloco import SHORT


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("count", [1, 7, 8, 37])
def test_integers_are_unpacked_to_what_was_packed(bits, count):
    values = torch.randint(2**bits, (3, 2, count))
    packed = pack(values, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 2, packed_bytes(count, bits))
    assert packed_bytes(8 * count, bits) == bits * count
    assert torch.equal(unpack(packed, bits, count), values)


def message_bytes(workers: int, bits: int, largest: int = NUMEL) -> int:
    """What a rank sends where its messages to all servers, or all servers' to it, have a float32 for each block."""
    blocks = len(book.block_starts(a_run(), workers, largest))
    return (workers - 1) * (workers * ceil(ceil(NUMEL / workers) * bits / 8) + 4 * blocks) // workers


def powersgd_bytes(rank: int, start: int, workers: int) -> int:
    """In float32, as a ring sends them: at first all, then what is not compressed, all left and all right factors."""
    matrices = [(shape[0], torch.Size(shape).numel() // shape[0]) for shape in SHAPES]
    ranks = [min(*shape, rank) for shape in matrices]
    is_compressed = [(n + m) * r * 2 < n * m for (n, m), r in zip(matrices, ranks, strict=True)]
    plain = sum(n * m for (n, m), small in zip(matrices, is_compressed, strict=True) if not small)
    left, right = (
        sum(shape[side] * r for shape, r, small in zip(matrices, ranks, is_compressed, strict=True) if small)
        for side in (0, 1)
    )
    ring = [2 * 4 * numel * (workers - 1) // workers for numel in (NUMEL, plain, left, right)]
    return start * ring[0] + (STEPS - start) * sum(ring[1:])


def tiles(run: int) -> list[list[torch.Tensor]]:
    return [book.tiles(part, shape, run) for part, shape in zip(a_run().tensors(), SHAPES, strict=True)]


def sparse_bytes(share: int, workers: int) -> int:
    """To each of the others: two bits of a value, its place, four means of each tensor in float32.

    Tensors of as many chunks of as many elements are packed together.
    """
    nbytes = 0
    for (chunks, size), tensors in Counter((len(tensor), tensor[0].numel()) for tensor in tiles(4096)).items():
        values, width = tensors * chunks * max(1, round(share * size / 4096)), ceil(log2(size))
        nbytes += ceil(values * width / 8) + ceil(values / 4) + 16 * tensors
    return (workers - 1) * nbytes


def loco_bytes(workers: int) -> int:
    """Four bits to servers, bfloat16 of their parts back."""
    return message_bytes(workers, 4, 512) + (workers - 1) * 2 * ceil(NUMEL / workers)


def lion_sum_bytes(workers: int) -> int:
    """One of W + 1 values for each element that a server has."""
    elements, bits = ceil(NUMEL / workers), ceil(log2(workers + 1))
    return ceil(elements * bits / 8)


def demo_bytes(k: int, workers: int) -> int:
    """To each of the others: a value in bfloat16 and its place in a tile; tiles of one shape are packed together."""
    nbytes = 0
    for (height, width), count in Counter(tile.shape for tensor in tiles(64) for tile in tensor).items():
        values, bits = count * min(k, height * width), max(1, ceil(log2(height * width)))
        nbytes += 2 * values + ceil(values * bits / 8)
    return (workers - 1) * nbytes


SENT: dict[str, Callable[[int], int]] = {
    "bf16": lambda w: STEPS * (2 * 2 * NUMEL * (w - 1) // w),
    "int8": lambda w: STEPS * 2 * message_bytes(w, 8, 512),
    "int4": lambda w: STEPS * 2 * message_bytes(w, 4, 512),
    "powersgd-1": partial(powersgd_bytes, 1, 10),
    "powersgd-4": partial(powersgd_bytes, 4, 10),
    "powersgd-4-late": partial(powersgd_bytes, 4, 2),
    "diloco": lambda w: STEPS // 4 * (2 * 4 * NUMEL * (w - 1) // w),
    "diloco-int8": lambda w: STEPS // 3 * 2 * message_bytes(w, 8, 512),
    **{f"diloco-{name}": lambda w: STEPS // 4 * (2 * 4 * NUMEL * (w - 1) // w) for name in SHORT},
    "local-adamw": lambda w: STEPS // 4 * (2 * 4 * NUMEL * (w - 1) // w),
    "sparseloco": lambda w: STEPS // 3 * sparse_bytes(400, w),
    "sparseloco-few": lambda w: STEPS // 5 * sparse_bytes(20, w),
    "loco": lambda w: STEPS * loco_bytes(w),
    "loco-gradients": lambda w: STEPS * 2 * message_bytes(w, 4, 512),
    "dlion-mavo": lambda w: STEPS * (w - 1) * (ceil(ceil(NUMEL / w) / 8) + ceil(ceil(NUMEL / w) / 4)),
    "dlion-mavo-1": lambda w: STEPS * (w - 1) * 2 * ceil(ceil(NUMEL / w) / 8),
    "dlion-avg": lambda w: STEPS * (w - 1) * (ceil(ceil(NUMEL / w) / 8) + lion_sum_bytes(w)),
    "demo": lambda w: STEPS * demo_bytes(100, w),
    "demo-few": lambda w: STEPS * demo_bytes(2, w),
    "ef-sgdm": lambda w: STEPS * 2 * message_bytes(w, 1),
    "onebit-loco": lambda w: STEPS // 3 * 2 * message_bytes(w, 1, 512),
}
"""Bytes that a rank sends in ``STEPS`` steps, by the formula of its message."""


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize("name", BOOK)
def test_bytes_are_those_of_the_messages(name, workers):
    run = a_run()
    rival = rival_of(BOOK[name][0], run, workers, torch.float32)
    for step in range(STEPS):
        rival.give([dict(enumerate(rival.cut(run.gradients[step, w % WORKERS].float()))) for w in range(workers)])
        rival.step()
    assert rival.transport.traffic.bytes_total == rival.wires.received == SENT[name](workers)
