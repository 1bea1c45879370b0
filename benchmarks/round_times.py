"""One rank of Marsit's figure 5: where a round's time goes. Started by ``network.run_module``; rank 0 prints JSON."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedonebit import MarsitSGD, Rounds
from fusedonebit.apps.train.baselines import AGGREGATIONS, BaselineSGD

from .netlab.methods import OneBit
from .netlab.split import PARTS, Turn

WIDTH, BATCH, ROUNDS, WARM_UP = 640, 16, 7, 2


class Classifier(nn.Module):
    """Returns the loss of a batch, as replicas want it; the same initial values on every host."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Linear(WIDTH, 10))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def peers(topology: Any) -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """What is compared, by name."""
    baseline = partial(BaselineSGD, lr=0.01, topology=topology, global_ratio=0.01)
    marsit = partial(MarsitSGD, lr=0.01, rounds=Rounds(full_precision_every=0))
    # The library's own all-reduce knows no torus.
    names = [name for name in AGGREGATIONS if name != "psgd" or topology == "ring"]
    made: dict[str, Any] = {name: partial(baseline, aggregation=name, coding="fixed") for name in names}
    for name in ("signsgd", "ef-signsgd", "ssdm"):
        made[f"{name}, Elias"] = partial(baseline, aggregation=name, coding="elias")
    made["marsit"] = partial(marsit, topology=topology)
    return made | ({"marsit, owner": partial(marsit, topology="owner")} if topology == "ring" else {})


def parts(turn: Turn) -> tuple[float, float, float]:
    """Seconds of compute, compress and communicate of this rank."""
    communicate = sum(end - begin for begin, end in turn.spans)
    return turn.computed - turn.began, turn.ended - turn.computed - communicate, communicate


def main(topology: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    replicas = {name: OneBit(Classifier(), make) for name, make in peers(topology).items()}
    turns: dict[str, list[Turn]] = {name: [] for name in replicas}
    for _ in range(WARM_UP + ROUNDS):
        for name, replica in replicas.items():
            turns[name].append(replica.turn((torch.randn(BATCH, 256), torch.randint(10, (BATCH,)))))
    for name, replica in replicas.items():
        medians = [statistics.median(times) for times in zip(*map(parts, turns[name][WARM_UP:]), strict=True)]
        each = torch.tensor(medians)
        dist.all_reduce(each)
        seconds = dict(zip(PARTS, (each / dist.get_world_size()).tolist(), strict=True))
        record = {"method": name, "topology": topology, "workers": dist.get_world_size()}
        record |= {"elements": sum(p.numel() for p in replica.model.parameters()), **seconds, "bytes": replica.sent()}
        if dist.get_rank() == 0:
            print(json.dumps(record), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
