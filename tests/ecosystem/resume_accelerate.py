"""60 steps with accelerate at once, and 40 + 20, with our one call; without it the checkpoint is refused."""

import hashlib
import sys

import torch
from accelerate import Accelerator
from torch import nn

import fusedonebit


def train(folder: str, resume: bool, attached: bool = True) -> str:
    accelerator.free_memory()
    accelerator._save_model_state_pre_hook.clear()
    accelerator._load_model_state_pre_hook.clear()
    torch.manual_seed(accelerator.process_index)
    model = accelerator.prepare(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = fusedonebit.OneBitAdam(model.parameters(), lr=3e-3, freeze_step=15, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60 * accelerator.num_processes)
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    if attached:
        fusedonebit.accelerate.attach(accelerator, model, optimizer)
    else:
        fusedonebit.ddp.attach(model, optimizer.optimizer)
    batches = torch.randn(60, 32, 16).abs()
    if resume:
        accelerator.load_state(folder)
    for step in range(40 if resume else 0, 60):
        x = batches[step]
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)))
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
train(f"{folder}/plain", resume=False, attached=False)
try:
    train(f"{folder}/plain", resume=True, attached=False)
except ValueError as error:
    print(f"refused: {error}")
