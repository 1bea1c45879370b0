"""What the lab's rivals send: bits are unpacked to what was packed, bytes are those of each method's messages."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import ceil, log2

import pytest
import rivals_by_the_book as book
import torch
from rivals_runs import BOOK, NUMEL, SHAPES, STEPS, WORKERS, a_run, rival_of

from fusedonebit.apps.lab.rivals.bits import pack, packed_bytes, unpack


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("count", [1, 7, 8, 37])
def test_integers_are_unpacked_to_what_was_packed(bits, count):
    values = torch.randint(2**bits, (3, 2, count))
    packed = pack(values, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 2, packed_bytes(count, bits))
    assert packed_bytes(8 * count, bits) == bits * count
    assert torch.equal(unpack(packed, bits, count), values)


def two_sided_bytes(workers: int, bits: int) -> int:
    """What a rank sends: W - 1 messages to servers, its chunk's to W - 1 ranks."""
    blocks = ceil(NUMEL / workers / 512)
    size = ceil(NUMEL / workers / blocks)
    return 2 * (workers - 1) * (ceil(blocks * size * bits / 8) + 4 * blocks)


def powersgd_bytes(rank: int, workers: int) -> int:
    """In float32, as a ring sends them: ten times all, then what is not compressed, all left and all right factors."""
    matrices = [(shape[0], torch.Size(shape).numel() // shape[0]) for shape in SHAPES]
    ranks = [min(*shape, rank) for shape in matrices]
    is_compressed = [(n + m) * r * 2 < n * m for (n, m), r in zip(matrices, ranks, strict=True)]
    plain = sum(n * m for (n, m), small in zip(matrices, is_compressed, strict=True) if not small)
    left, right = (
        sum(shape[side] * r for shape, r, small in zip(matrices, ranks, is_compressed, strict=True) if small)
        for side in (0, 1)
    )
    ring = [2 * 4 * numel * (workers - 1) // workers for numel in (NUMEL, plain, left, right)]
    return 10 * ring[0] + (STEPS - 10) * sum(ring[1:])


def sparse_bytes(share: int, workers: int) -> int:
    """To each of the others: two bits of a value, its place, four means of each tensor in float32.

    Tensors of one length are packed together.
    """
    nbytes = 0
    for numel, tensors in Counter(torch.Size(shape).numel() for shape in SHAPES).items():
        chunks = ceil(numel / 4096)
        size = ceil(numel / chunks)
        values, width = tensors * chunks * max(1, round(share * size / 4096)), ceil(log2(size))
        nbytes += ceil(values * width / 8) + ceil(values / 4) + 16 * tensors
    return (workers - 1) * nbytes


def loco_bytes(workers: int) -> int:
    """Four bits to servers, bfloat16 of their parts back."""
    blocks = ceil(NUMEL / workers / 512)
    size = ceil(NUMEL / workers / blocks)
    return (workers - 1) * (ceil(blocks * size / 2) + 4 * blocks + 2 * blocks * size)


def lion_sum_bytes(workers: int) -> int:
    """One of W + 1 values for each element that a server has."""
    elements, bits = ceil(NUMEL / workers), ceil(log2(workers + 1))
    return ceil(elements * bits / 8)


def demo_bytes(share: int, workers: int) -> int:
    """To each of the others: a value in bfloat16 and its place in a tile; tiles of one shape are packed together."""
    tiles = Counter(
        at.shape for part, shape in zip(a_run().tensors(), SHAPES, strict=True) for at in book.demo_tiles(part, shape)
    )
    nbytes = 0
    for (height, width), count in tiles.items():
        values, bits = count * max(1, round(share * height * width / 4096)), max(1, ceil(log2(height * width)))
        nbytes += 2 * values + ceil(values * bits / 8)
    return (workers - 1) * nbytes


def ef_sgdm_bytes(workers: int) -> int:
    """Signs, and a scale for each block of the part that has most, to servers and back."""
    chunk, tensors = ceil(NUMEL / workers), a_run().tensors()
    starts = [range(0, NUMEL, chunk)[w] for w in range(workers)]
    blocks = [
        sum(part.start < start + chunk and part.stop > start for part in tensors) + (start + chunk > NUMEL)
        for start in starts
    ]
    return 2 * (workers - 1) * (ceil(chunk / 8) + 4 * max(blocks))


def rounds(length: int, steps: int = STEPS) -> int:
    return sum(book.round_ends(dataclasses.replace(a_run(steps)), length))


SENT: dict[str, Callable[[int], int]] = {
    "bf16": lambda w: STEPS * (2 * 2 * NUMEL * (w - 1) // w),
    "int8": lambda w: STEPS * two_sided_bytes(w, 8),
    "int4": lambda w: STEPS * two_sided_bytes(w, 4),
    "powersgd-1": partial(powersgd_bytes, 1),
    "powersgd-4": partial(powersgd_bytes, 4),
    "diloco": lambda w: rounds(4) * (2 * 4 * NUMEL * (w - 1) // w),
    "diloco-int8": lambda w: rounds(3) * two_sided_bytes(w, 8),
    "local-adamw": lambda w: rounds(4) * (2 * 4 * NUMEL * (w - 1) // w),
    "sparseloco": lambda w: rounds(3) * sparse_bytes(400, w),
    "sparseloco-few": lambda w: rounds(5) * sparse_bytes(20, w),
    "loco": lambda w: STEPS * loco_bytes(w),
    "loco-gradients": lambda w: STEPS * two_sided_bytes(w, 4),
    "dlion-mavo": lambda w: STEPS * (w - 1) * (ceil(ceil(NUMEL / w) / 8) + ceil(ceil(NUMEL / w) / 4)),
    "dlion-avg": lambda w: STEPS * (w - 1) * (ceil(ceil(NUMEL / w) / 8) + lion_sum_bytes(w)),
    "demo": lambda w: STEPS * demo_bytes(100, w),
    "ef-sgdm": lambda w: STEPS * ef_sgdm_bytes(w),
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
