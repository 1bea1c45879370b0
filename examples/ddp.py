"""1-bit Adam under DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp.py
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
    optimizer = fusedonebit.OneBitAdam(model.parameters(), lr=1e-3, warmup=0.05, total_steps=STEPS)
    # DDP averages gradients in the warm-up, and leaves them alone once the optimizer compresses.
    fusedonebit.ddp.attach(model, optimizer)

    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(128, 64, device=device)
        loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step:3}  loss {loss.item():.3f}  {optimizer.stats()['bytes_step']:6,} bytes sent")
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f} after {STEPS} steps, {optimizer.stats()['bytes_step']:,} bytes in the last one")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
