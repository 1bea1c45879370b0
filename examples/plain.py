"""1-bit Adam in a plain training loop.

torchrun --nproc-per-node 2 examples/plain.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from fusedonebit import OneBitAdam

STEPS = 300


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    torch.manual_seed(0)  # the same model on every rank; no DistributedDataParallel
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    teacher = nn.Linear(64, 10).to(device)
    # Uncompressed for the first fifth, then one bit per parameter.
    optimizer = OneBitAdam(model.parameters(), lr=1e-3, warmup=0.05, total_steps=STEPS, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    for step in range(STEPS):
        # Four micro-batches: ranks only talk to each other in step().
        for _ in range(4):
            x = torch.randn(32, 64, device=device)
            loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
            (loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step:3}  loss {loss.item():.3f}  {optimizer.stats()['bytes_step']:6,} bytes sent")
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f} after {STEPS} steps, {optimizer.stats()['bytes_step']:,} bytes in the last one")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
