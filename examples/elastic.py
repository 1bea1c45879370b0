"""A run that outlives its workers: each start goes on from the newest checkpoint, on as many ranks as are left.

torchrun --nproc-per-node 4 examples/elastic.py
torchrun --nproc-per-node 3 examples/elastic.py      # after one was lost
"""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fusedonebit import OneBitAdam, dcp

STEPS, SAVE_EVERY, BATCH = 300, 20, 240
FOLDER = Path(os.environ.get("ELASTIC_FOLDER", "runs/elastic"))


def newest() -> Path | None:
    """The newest complete checkpoint; ``.metadata`` is written last, and renamed into place."""
    complete = [p.parent for p in FOLDER.glob("*/.metadata")]
    return max(complete, key=lambda p: int(p.name), default=None)


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    teacher = nn.Linear(64, 10).to(device)
    optimizer = OneBitAdam(model.parameters(), lr=1e-3, warmup=0.05, total_steps=STEPS)

    found = [newest()]
    dist.broadcast_object_list(found)  # all ranks load the same
    first = dcp.load(model, optimizer, found[0], step=0)["step"] if found[0] else 0
    for step in range(first, STEPS):
        # The same global batch at each step, on however many ranks.
        x = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step)).to(device)
        mine = x.tensor_split(ranks)[rank]
        loss = nn.functional.cross_entropy(model(mine), teacher(mine).argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if rank == 0:
            print(f"step {step:3}  loss {loss.item() / ranks:.4f}  {ranks} ranks, {optimizer.phase}", flush=True)
        if (step + 1) % SAVE_EVERY == 0:
            dcp.save(model, optimizer, FOLDER / str(step + 1), step=step + 1)
            for old in sorted(FOLDER.iterdir(), key=lambda p: int(p.name))[:-2] if rank == 0 else ():
                shutil.rmtree(old)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
