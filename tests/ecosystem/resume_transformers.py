"""60 steps of Trainer at once, and 40 + 20, with our one call; without it the checkpoint is refused."""

import hashlib
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fusedonebit


def train(folder: str, resume: str | None = None, attached: bool = True) -> str:
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = (torch.arange(512)[:, None] + torch.arange(16)) % 64
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=60, save_steps=40, max_grad_norm=0, report_to="none", disable_tqdm=True,
        per_device_train_batch_size=4,
    )  # fmt: skip
    settings = {
        "lr": 3e-3,
        "freeze_step": 15,
        "max_grad_norm": 1.0,
        "wire": fusedonebit.Wire(broadcast_parameters=True),
    }
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizer_cls_and_kwargs=(fusedonebit.OneBitAdam, settings),
    )
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
