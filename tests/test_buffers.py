"""Buffers part from rank to rank where nobody broadcasts them; ``broadcast_buffers`` makes them rank 0's."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks, simulate
from torch import Tensor, nn

import fusedonebit
from fusedonebit import DisagreementError, Faults, OneBitAdam
from fusedonebit.comm import Transport


class Net(nn.Module):
    """Buffers of many dtypes, one not saved, one without elements, one not contiguous, one shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.register_buffer("brief", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("odd", torch.zeros(5, dtype=torch.bool), persistent=False)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("turned", torch.zeros(3, 2, dtype=torch.float64).t())
        self.register_buffer("scalar", torch.zeros((), dtype=torch.float16))
        self.register_buffer("again", self.brief)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))).square().mean()


def make(rank: int) -> Net:
    torch.manual_seed(0)
    net = Net()
    generator = torch.Generator().manual_seed(rank)
    for buffer in net.buffers():
        buffer.copy_(torch.randint(0, 2 + 7 * (buffer.dtype != torch.bool), buffer.shape, generator=generator))
    return net


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(buffer, theirs[name]) for name, buffer in ours.items())


def test_buffers_of_all_dtypes_become_rank_0s_in_two_messages():
    def run(rank: int, transport: Transport) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        net = make(rank)
        before = values(net)
        assert fusedonebit.broadcast_buffers(net, process_group=transport) is None
        return before, values(net), transport.traffic.collectives_total

    ranks = simulate(run, 3)
    assert not equal(ranks[0][0], ranks[1][0])
    for _, after, collectives in ranks:
        assert equal(after, ranks[0][0])
        assert collectives == 2


def train(rank: int, transport: Transport | None, every: int | None) -> list[dict[str, Tensor]]:
    """BatchNorm's statistics after each of 6 steps, on data of this rank's own; what was asked for ends after 4."""
    torch.manual_seed(0)
    net, seen = Net(), []
    optimizer = OneBitAdam(net.parameters(), freeze_step=2, faults=Faults(guard="off"), process_group=transport)
    handle = fusedonebit.broadcast_buffers(net, optimizer, every=every)
    for step in range(6):
        if step == 4 and handle is not None:
            handle.remove()
        optimizer.zero_grad()
        net(torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
        optimizer.step()
        seen.append(values(net))
    return seen


@pytest.mark.parametrize(("every", "alike"), [(None, []), (1, [0, 1, 2, 3]), (2, [1, 3])])
def test_batch_norms_are_equal_at_each_nth_step_until_removal(every, alike):
    ranks = simulate(train, 2, every)
    assert [step for step, seen in enumerate(zip(*ranks, strict=True)) if equal(*seen)] == alike


def test_one_process_alone_keeps_its_buffers():
    net = make(0)
    before = values(net)
    fusedonebit.broadcast_buffers(net)
    fusedonebit.broadcast_buffers(nn.Linear(2, 2))
    assert equal(values(net), before)


def test_buffers_of_other_shapes_raise_alike_and_change_nothing():
    def run(rank: int, transport: Transport) -> tuple[str, bool]:
        net = make(rank)
        if rank == 1:
            net.norm.register_buffer("running_var", torch.ones(7))
        before = values(net)
        with pytest.raises(DisagreementError) as caught:
            fusedonebit.broadcast_buffers(net, process_group=transport)
        return str(caught.value), equal(values(net), before)

    for text, still in simulate(run, 2):
        assert "buffer norm.running_var is torch.float32 (6,) on rank 0 but torch.float32 (7,) on rank 1" in text
        assert "build the same model on every rank" in text
        assert still


def test_a_buffer_that_one_rank_cannot_send_raises_on_all():
    def run(rank: int, transport: Transport) -> str:
        net = make(rank)
        if rank == 1:
            net.register_buffer("scalar", torch.zeros((), dtype=torch.float16).to("meta"))
        with pytest.raises(ValueError, match="buffer scalar must be dense and have memory") as caught:
            fusedonebit.broadcast_buffers(net, process_group=transport)
        return caught.type.__name__

    assert simulate(run, 2) == ["DisagreementError", "ValueError"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every": 2}, "pass optimizer=, or leave it out, got every=2"),
        ({"optimizer": "adam"}, "optimizer must be one of fusedonebit's, got str"),
        ({"optimizer": None, "every": 0}, "every must be an int >= 1 or None, got 0"),
        ({"optimizer": None, "process_group": "world"}, "must be None where optimizer is given"),
    ],
)
def test_bad_arguments_are_refused(arguments, text):
    net = make(0)
    if "optimizer" in arguments and arguments["optimizer"] is None:
        arguments = arguments | {"optimizer": OneBitAdam(net.parameters(), freeze_step=2)}
    with pytest.raises((TypeError, ValueError), match=text):
        fusedonebit.broadcast_buffers(net, **arguments)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        fusedonebit.broadcast_buffers(5, **arguments)


def in_shards(rank: int, world_size: int) -> list[float]:
    from sharded import make_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = make_mesh()
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    fully_shard(net, mesh=mesh["shard"])
    optimizer = OneBitAdam(net.parameters(), freeze_step=2, process_group=mesh["replicate"])
    net[1].running_mean.fill_(rank)
    fusedonebit.broadcast_buffers(net, optimizer)
    return net[1].running_mean.tolist()


def test_ranks_with_other_shards_get_rank_0s_as_well():
    assert run_ranks(in_shards, 4) == [[0.0] * 6] * 4
