"""60 steps of torch's AdamW in accelerate at once, and 40 + 20, gradients in 4 bits; and without a rank's residuals."""

import hashlib
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import fusedonebit


def train(folder: str, resume: bool) -> str:
    accelerator.free_memory()
    accelerator._save_model_state_pre_hook.clear()
    accelerator._load_model_state_pre_hook.clear()
    torch.manual_seed(accelerator.process_index)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    compression = fusedonebit.accelerate.compress(accelerator, model, bits=4)
    batches = torch.randn(60, 32, 16).abs()
    if resume:
        accelerator.load_state(folder)
    before = 0
    for step in range(40 if resume else 0, 60):
        x = batches[step]
        for half in x.chunk(2):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(half), half[:, :4].argmax(1)))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        before = before or compression.number
        if step == 39:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
    assert before == (41 if resume else 1)
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    return hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
folder = sys.argv[1]
whole = train(folder, resume=False)
resumed = train(folder, resume=True)
print(f"whole {whole} resumed {resumed}")
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    Path(folder, "onebit-compression-rank-1-of-2.pt").unlink()
accelerator.wait_for_everyone()
try:
    train(folder, resume=True)
except (OSError, fusedonebit.DisagreementError) as error:
    print(f"refused: {error}")
