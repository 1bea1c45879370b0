"""60 steps of torch's AdamW in Trainer at once, and 40 + 20, gradients in 4 bits; and without a rank's residuals."""

import hashlib
import sys
from pathlib import Path

import torch
from tiny_trainer import tiny

import fusedonebit


def train(folder: str, resume: str | None = None) -> str:
    trainer = tiny(folder, {"gradient_accumulation_steps": 2})
    fusedonebit.transformers.compress(trainer, bits=4)
    trainer.train(resume_from_checkpoint=resume)
    assert "compress(bits=4)" in repr(trainer.model_wrapped._comm_hooks[0][1].taken_by)
    vector = torch.nn.utils.parameters_to_vector(trainer.model.parameters())
    return hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()


folder = sys.argv[1]
whole = train(f"{folder}/whole")
resumed = train(f"{folder}/resumed", f"{folder}/whole/checkpoint-40")
print(f"whole {whole} resumed {resumed}")
torch.distributed.barrier()
if torch.distributed.get_rank() == 0:
    Path(folder, "whole/checkpoint-40/onebit-compression-rank-1-of-2.pt").unlink()
torch.distributed.barrier()
try:
    train(f"{folder}/again", f"{folder}/whole/checkpoint-40")
except (OSError, fusedonebit.DisagreementError) as error:
    print(f"refused: {error}")
