"""A whole training step in one graph, optimizer included.

torchrun --nproc-per-node 2 examples/compiled.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedonebit import OneBitAdam

STEPS = 300


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    teacher = nn.Linear(64, 10).to(device)
    optimizer = OneBitAdam(model.parameters(), lr=1e-3, warmup=0.05, total_steps=STEPS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    torch._dynamo.config.trace_autograd_ops = True  # lets the compiler follow loss.backward()

    @torch.compile(fullgraph=True)
    def train(x: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        loss = train(torch.randn(128, 64, device=device))
        optimizer.zero_grad()  # outside: compilers skip it
        schedule.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step:3}  loss {loss.item():.3f}  {optimizer.stats()['bytes_step']:6,} bytes sent")
    if dist.get_rank() == 0:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        print(f"loss {loss.item():.3f} after {STEPS} steps in {graphs} graph")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
