"""Matrices and their owners: who has what, how much of the work, and that messages have each block once."""

from __future__ import annotations

import pytest
import torch

from fusedonebit.comm.owners import Owners, divide, work
from fusedonebit.triton_kernels import FlatLayout

CPU = torch.device("cpu")
LAYER = [(3 * 64, 64), (64, 64), (4 * 64, 64), (64, 4 * 64)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 16])
def test_work_is_shared(world_size: int) -> None:
    """By a rank at most 1.1 of its share, or the costliest matrix."""
    shapes = LAYER * 24
    owners = Owners(FlatLayout(tuple(m * n for m, n in shapes), 1, 128), shapes, world_size, CPU)
    whole = sum(map(work, shapes))
    print(f"{world_size} ranks: {owners.share * world_size:.2f} of the equal share")
    assert owners.share <= max(1.1 / world_size, max(map(work, shapes)) / whole)
    assert sorted(i for own in owners.owned for i in own) == list(range(len(shapes)))


def test_messages_have_each_block_once() -> None:
    shapes = [(5, 30), (40, 7), (16, 16), (5, 30), (1, 1), (16, 16), (5, 30)]
    layout = FlatLayout(tuple(m * n for m, n in shapes), 3, 128)
    owners = Owners(layout, shapes, 3, CPU)
    blocks = torch.arange(1, layout.n_blocks + 1)[:, None].expand(-1, 128).float()
    sent = owners.to_messages(torch.cat([blocks, torch.zeros(1, 128)]))
    back = sent.view(3, -1, 128)[owners.back]
    used = layout.first_block[-1]
    assert torch.equal(back[:used], blocks[:used])
    for rank, own in enumerate(owners.owned):
        chunk = sent.view(3, -1)[rank]
        found = [matrix for batch in owners.batches(rank) for matrix in batch.of(chunk).unbind(0)]
        for i, matrix in zip(own, found, strict=True):
            expected = blocks.reshape(-1)[layout.offset(i) :][: matrix.numel()]
            assert torch.equal(matrix.reshape(-1), expected)


def test_scales_lie_apart() -> None:
    shapes = LAYER * 3
    owners = Owners(FlatLayout(tuple(m * n for m, n in shapes), 2, 128), shapes, 2, CPU)
    width, taken = 10_000, set[int]()
    for (rows, columns), (m, n) in zip(owners.scales_at(width).T.tolist(), shapes, strict=True):
        mine = {*range(rows, rows + m), *range(columns, columns + n)}
        assert len(mine) == m + n
        assert not mine & taken
        assert all(0 < at % width < owners.slots for at in mine)
        taken |= mine


def test_few_matrices_leave_ranks_idle() -> None:
    assert [len(own) for own in divide([(8, 8)], 3)] == [1, 0, 0]
