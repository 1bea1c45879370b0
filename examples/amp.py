"""1-bit Adam with automatic mixed precision.

torchrun --nproc-per-node 2 examples/amp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import fusedonebit

STEPS = 300


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    teacher = nn.Linear(64, 10).to(device)
    optimizer = fusedonebit.OneBitAdam(model.parameters(), lr=1e-3, warmup=0.05, total_steps=STEPS)
    # torch's scaler, but all ranks skip the same steps and keep the same scale. (bfloat16 needs none.)
    scaler = fusedonebit.amp.GradScaler(device.type)

    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(128, 64, device=device)
        target = teacher(x).argmax(1)
        with torch.autocast(device.type, torch.float16):
            loss = nn.functional.cross_entropy(model(x), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step:3}  loss {loss.item():.3f}  loss scale {scaler.get_scale():g}")
    if dist.get_rank() == 0:
        stats = optimizer.stats()
        print(f"loss {loss.item():.3f} after {stats['step']} updates, {stats['skipped_steps']} steps skipped")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
