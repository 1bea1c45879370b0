"""One rank of the overlap's benchmark: seconds of each part of a step. Started by ``network.run_module``."""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from fusedonebit import Faults, OneBitAdam, Wire

WARM_UP = 3


class Peer:
    """A model and its optimizer."""

    def __init__(self, width: int, layers: int, batch: int, wire: Wire) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())))
        # The guard's verdict on an untrained model is not what is measured.
        self.optimizer = OneBitAdam(
            self.model.parameters(), lr=1e-4, freeze_step=2, faults=Faults(guard="off"), wire=wire
        )
        self.x = torch.randn(batch, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(self) -> tuple[float, float]:
        """Seconds of the backward pass, and of the step after it; all ranks begin together."""
        loss = self.model(self.x).square().mean()
        dist.barrier()
        began = time.perf_counter()
        loss.backward()
        computed = time.perf_counter()
        self.optimizer.step()
        ended = time.perf_counter()
        self.optimizer.zero_grad()
        return computed - began, ended - computed


def main(width: int, layers: int, batch: int, buckets: int, rounds: int) -> None:
    """Rank 0 prints JSON: the medians of all ranks' seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    apart = Peer(width, layers, batch, Wire(buckets=buckets))
    together = Peer(width, layers, batch, Wire(buckets=buckets, overlap=True))
    seen: list[tuple[float, float, float]] = []
    for i in range(WARM_UP + rounds):
        backward, step = apart.step()
        overlapped = sum(together.step())
        if i >= WARM_UP:
            seen.append((backward, step, overlapped))
    # A step takes as long as its slowest rank.
    mine = torch.tensor(seen)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    medians = [statistics.median(column) for column in zip(*mine.tolist(), strict=True)]
    assert apart.optimizer.phase == together.optimizer.phase == "compression"
    pairs = zip(apart.model.parameters(), together.model.parameters(), strict=True)
    told = dict(zip(("backward", "communication", "overlapped"), medians, strict=True))
    told |= {"steps": rounds, "buckets": buckets, "batch": batch, "width": width, "layers": layers}
    told |= {"elements": sum(p.numel() for p in apart.model.parameters())}
    told |= {"bytes": together.optimizer.stats()["bytes_step"], "equal": all(torch.equal(a, b) for a, b in pairs)}
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
