"""Any optimizer, on gradients that travel at 4 bits.

torchrun --nproc-per-node 2 examples/compress.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedonebit

STEPS = 300


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    teacher = nn.Linear(64, 10).to(device)
    model = DistributedDataParallel(model)
    compression = fusedonebit.compress(model, bits=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(128, 64, device=device)
        loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step:3}  loss {loss.item():.3f}")
    fusedonebit.dcp.save(model, optimizer, "runs/compress", compression=compression)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f} after {STEPS} steps; {compression}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
