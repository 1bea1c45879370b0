"""NCCL's collectives on packed bytes, of one rank: by themselves and inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusedonebit.comm import Transport

pytestmark = pytest.mark.cuda_only
BYTES = 48 * 1024 + 16
COLLECTIVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_to_all_single": dist.all_to_all_single,
    "all_gather_into_tensor": dist.all_gather_into_tensor,
    "reduce_scatter_tensor": lambda received, sent: dist.reduce_scatter_tensor(received, sent),
}
every_collective = pytest.mark.parametrize("name", COLLECTIVES)


def _buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    sent = torch.randint(256, (BYTES,), dtype=torch.uint8, device=device)
    return torch.zeros_like(sent), sent


@every_collective
def test_nccl_takes_packed_bytes_in_two_graphs(device: torch.device, nccl: Callable[[], Transport], name: str) -> None:
    nccl()
    received, sent = _buffers(device)
    COLLECTIVES[name](received, sent)  # a communicator is made at its first use, which no capture may hold
    assert torch.equal(received, sent)
    torch.cuda.synchronize()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            COLLECTIVES[name](received, sent)
        graphs.append(graph)
    for turn in range(4):
        sent.random_(256)
        received.zero_()
        graphs[turn % 2].replay()
        assert torch.equal(received, sent)


def test_nccl_sends_float32_in_a_graph_beside_bytes(device: torch.device, nccl: Callable[[], Transport]) -> None:
    transport = nccl()
    values, summed = torch.randn(1024, device=device), torch.zeros(1024, device=device)
    packed, sent = _buffers(device)

    def exchange() -> None:
        transport.all_to_all(packed.view(1, -1), sent.view(1, -1))
        transport.reduce_scatter(summed, values)

    exchange()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchange()
    summed.zero_()
    packed.zero_()
    graph.replay()
    assert torch.equal(packed, sent)
    assert torch.equal(summed, values)
