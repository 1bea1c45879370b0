"""Matrices and their owners: who has what, how much of the work, and that messages have each block once."""

from __future__ import annotations

import pytest
import torch

from fusedonebit.comm import Flag
from fusedonebit.comm.carried import Carried
from fusedonebit.comm.message import Messages
from fusedonebit.comm.owners import Kind, Matrix, Owners, divide
from fusedonebit.triton_kernels import FlatLayout

CPU = torch.device("cpu")
LAYER = [(3 * 64, 64), (64, 64), (4 * 64, 64), (64, 4 * 64)]


def owners_of(shapes: list[tuple[int, int]], layout: FlatLayout, world_size: int) -> Owners:
    return Owners(layout, [Matrix.of(shape) for shape in shapes], world_size, CPU)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 16])
def test_work_is_shared(world_size: int) -> None:
    """By a rank at most 1.1 of its share, or the costliest matrix."""
    shapes = LAYER * 24
    owners = owners_of(shapes, FlatLayout(tuple(m * n for m, n in shapes), 1, 128), world_size)
    each = [Kind(shape).work for shape in shapes]
    print(f"{world_size} ranks: {owners.share * world_size:.2f} of the equal share")
    assert owners.share <= max(1.1 / world_size, max(each) / sum(each))
    assert sorted(i for own in owners.owned for i in own) == list(range(len(shapes)))


def test_messages_have_each_block_once() -> None:
    shapes = [(5, 30), (40, 7), (16, 16), (5, 30), (1, 1), (16, 16), (5, 30)]
    layout = FlatLayout(tuple(m * n for m, n in shapes), 3, 128)
    owners = owners_of(shapes, layout, 3)
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
    owners = owners_of(shapes, FlatLayout(tuple(m * n for m, n in shapes), 2, 128), 2)
    width, taken = 10_000, set[int]()
    for (rows, columns), (m, n) in zip(owners.scales_at(width).T.tolist(), shapes, strict=True):
        mine = {*range(rows, rows + m), *range(columns, columns + n)}
        assert len(mine) == m + n
        assert not mine & taken
        assert all(0 < at % width < owners.slots for at in mine)
        taken |= mine


def test_few_matrices_leave_ranks_idle() -> None:
    assert [len(own) for own in divide([Kind((8, 8))], 3)] == [1, 0, 0]


# ---------------------------------------------------------------- what is carried beside


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_what_is_carried_is_averaged(world_size: int, dtype: torch.dtype) -> None:
    """Rounded before it is sent, added up in float32, and rounded again; one rank has no gradient of a tensor."""
    sizes, by = (7, 130, 300), torch.tensor(0.5)
    layout = FlatLayout(sizes, 1, 128)
    generator = torch.Generator().manual_seed(0)
    grads = [[torch.randn(n, generator=generator) for n in sizes] for _ in range(world_size)]
    grads[1][1] = torch.empty(0)
    carried = [Carried(layout, world_size, dtype, CPU) for _ in range(world_size)]
    bits = FlatLayout((128,), world_size, 128)
    sent = [Messages(world_size, 1, bits, CPU, carried=carried[0].nbytes) for _ in range(world_size)]
    found = [torch.zeros(1, dtype=torch.int32) for _ in range(world_size)]
    for rank, own in enumerate(grads):
        carried[rank].write(own, by, sent[rank], found[rank])
    gathered = Messages(world_size, 1, bits, CPU, carried=carried[0].nbytes)
    for rank in range(world_size):
        arrived, served = (Messages(n, 1, bits, CPU, carried=carried[0].nbytes) for n in (world_size, 1))
        arrived.buffer.copy_(torch.stack([each.buffer[rank] for each in sent]))
        carried[rank].serve(arrived, served)
        gathered.buffer[rank].copy_(served.buffer[0])
    for i, n in enumerate(sizes):
        each = [own[i] if len(own[i]) else torch.zeros(n) for own in grads]
        rounded = torch.stack([(g * (1 / world_size) * by).to(dtype).float() for g in each])
        expected = rounded.sum(0).to(dtype).float()
        for one in carried:
            one.receive(gathered)
            torch.testing.assert_close(one.averages[i], expected, rtol=1e-6, atol=1e-7)
    assert not any(map(bool, found))
    for wrong in (float("nan"), float("inf")):
        grads[0][2][5] = wrong
        carried[0].write(grads[0], None, sent[0], found[0])
        assert found[0] == Flag.NONFINITE
        found[0].zero_()
    grads[0][2][5] = 0.0
    carried[0].write(grads[0], None, sent[0], found[0])
    assert found[0] == 0
