"""60 steps of an AdamW that keeps its moments in 8 bits, of bitsandbytes or torchao, on gradients that came in 4."""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedonebit

if sys.argv[1] == "bitsandbytes":
    from bitsandbytes.optim import AdamW8bit
else:
    from torchao.optim import AdamW8bit

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
fusedonebit.compress(model, bits=4)
optimizer = AdamW8bit(model.parameters(), lr=3e-3)
teacher = torch.randn(64, 64) / 8
torch.manual_seed(1 + dist.get_rank())
losses = []
for _ in range(60):
    x = torch.randn(32, 64)
    loss = (model(x) - x @ teacher).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
kept = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
assert any(hasattr(x, "codes") or x.dtype is torch.uint8 for x in kept), "no moment is in 8 bits"
vector = torch.nn.utils.parameters_to_vector(model.parameters())
digest = hashlib.sha256(vector.detach().numpy().tobytes())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, parameters {digest.hexdigest()[:16]}")
dist.destroy_process_group()
