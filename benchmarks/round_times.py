"""One rank of Marsit's figure 5: where a round's time goes. Started by ``network.run_module``; rank 0 prints JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fusedonebit import MarsitSGD, Rounds
from fusedonebit.apps.train.baselines import AGGREGATIONS, BaselineSGD
from fusedonebit.comm import make_transport

from .timed import Timed

WIDTH, BATCH, ROUNDS, WARM_UP = 640, 16, 7, 2


class Peer:
    """A model and an optimizer, and the seconds of each of its rounds."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(WIDTH, 10))
        self.transport = Timed(make_transport(None, torch.device("cpu")))
        self.optimizer = make(self.model.parameters(), 0.01, process_group=self.transport)
        self.parts: list[tuple[float, float, float]] = []
        self.sent = 0

    def step(self) -> None:
        dist.barrier()
        x, y = torch.randn(BATCH, 256), torch.randint(10, (BATCH,))
        began = time.perf_counter()
        nn.functional.cross_entropy(self.model(x), y).backward()
        computed = time.perf_counter() - began
        self.transport.spans.clear()
        began = time.perf_counter()
        self.optimizer.step()
        step = time.perf_counter() - began
        self.optimizer.zero_grad()
        self.sent = self.transport.traffic.bytes_step
        self.parts.append((computed, step - self.transport.seconds, self.transport.seconds))


def peers(topology: str) -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """What is compared, by name."""

    def baseline(name: str, coding: Any) -> Callable[..., torch.optim.Optimizer]:
        return lambda params, lr, **o: BaselineSGD(
            params, lr, aggregation=name, topology=topology, coding=coding, global_ratio=0.01, **o
        )

    def marsit(topology: Any) -> Callable[..., torch.optim.Optimizer]:
        rounds = Rounds(full_precision_every=0)
        return lambda params, lr, **o: MarsitSGD(params, lr, topology=topology, rounds=rounds, **o)

    # The library's own all-reduce knows no torus.
    made = {name: baseline(name, "fixed") for name in AGGREGATIONS if name != "psgd" or topology == "ring"}
    made |= {f"{name}, Elias": baseline(name, "elias") for name in ("signsgd", "ef-signsgd", "ssdm")}
    made["marsit"] = marsit(topology)
    if topology == "ring":
        made["marsit, owner"] = marsit("owner")
    return made


def main(topology: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    all_peers = {name: Peer(make) for name, make in peers(topology).items()}
    for _ in range(WARM_UP + ROUNDS):
        for peer in all_peers.values():
            peer.step()
    elements = sum(p.numel() for p in next(iter(all_peers.values())).model.parameters())
    world_size = dist.get_world_size()
    for name, peer in all_peers.items():
        medians = [statistics.median(times) for times in zip(*peer.parts[WARM_UP:], strict=True)]
        each = torch.tensor(medians)
        dist.all_reduce(each)
        compute, compress, communicate = (each / world_size).tolist()
        record = {"method": name, "topology": topology, "workers": world_size, "elements": elements}
        record |= {"compute": compute, "compress": compress, "communicate": communicate, "bytes": peer.sent}
        if dist.get_rank() == 0:
            print(json.dumps(record), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
