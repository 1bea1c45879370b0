"""Runs with docs/ecosystem.md's OfAllRanks in front of it: 60 steps at once, and 40 + 20."""

import hashlib
import sys

import torch
from accelerate import Accelerator
from torch import nn

import fusedonebit


def train(folder: str, resume: bool, prepared: bool = False) -> str:
    accelerator.free_memory()
    accelerator._custom_objects.clear()
    torch.manual_seed(accelerator.process_index)
    model = accelerator.prepare(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = fusedonebit.OneBitAdam(model.parameters(), lr=3e-3, freeze_step=15, max_grad_norm=1.0)
    fusedonebit.ddp.attach(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60 * accelerator.num_processes)
    if prepared:
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
    else:
        accelerator.register_for_checkpointing(OfAllRanks(optimizer))  # noqa: F821
        schedule = accelerator.prepare(schedule)
    batches = torch.randn(60, 32, 16).abs()
    if resume:
        accelerator.load_state(folder)
    for step in range(40 if resume else 0, 60):
        x = batches[step]
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)))
            if accelerator.sync_gradients:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if step == 39:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    return hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()


accelerator = Accelerator(cpu=True)
folder = sys.argv[1]
whole = train(f"{folder}/ours", resume=False)
resumed = train(f"{folder}/ours", resume=True)
print(f"whole {whole} resumed {resumed}")
train(f"{folder}/prepared", resume=False, prepared=True)
try:
    train(f"{folder}/prepared", resume=True, prepared=True)
except ValueError as error:
    print(f"refused: {error}")
