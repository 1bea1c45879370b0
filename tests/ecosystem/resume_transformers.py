"""60 steps of Trainer at once, and 40 + 20, with our one call; without it the checkpoint is refused."""

import hashlib
import sys

import torch
from tiny_trainer import tiny

import fusedonebit


def train(folder: str, resume: str | None = None, attached: bool = True) -> str:
    wire = fusedonebit.Wire(broadcast_parameters=True)
    settings = {"lr": 3e-3, "freeze_step": 15, "max_grad_norm": 1.0, "wire": wire}
    ours = fusedonebit.OneBitAdam, settings
    trainer = tiny(folder, {"max_grad_norm": 0}, optimizer_cls_and_kwargs=ours)
    if attached:
        fusedonebit.transformers.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.optimizer.optimizer.phase == "compression"
    vector = torch.nn.utils.parameters_to_vector(trainer.model.parameters())
    return hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()


folder = sys.argv[1]
whole = train(f"{folder}/whole")
resumed = train(f"{folder}/resumed", f"{folder}/whole/checkpoint-40")
print(f"whole {whole} resumed {resumed}")
try:
    train(f"{folder}/plain", f"{folder}/whole/checkpoint-40", attached=False)
except ValueError as error:
    print(f"refused: {error}")
