"""1-bit Adam on a model that FSDP2 shards: whole gradients inside a node, one bit per parameter between nodes.

torchrun --nproc-per-node 4 examples/hsdp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fusedonebit import OneBitAdam

STEPS = 300


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Two replicas here; on a cluster as many as there are nodes, each sharded over its GPUs.
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    teacher = nn.Linear(64, 10).to(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])  # not over the whole mesh: that would average everything
    optimizer = OneBitAdam(model.parameters(), lr=1e-3, warmup=0.05, total_steps=STEPS, process_group=mesh["replicate"])

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
