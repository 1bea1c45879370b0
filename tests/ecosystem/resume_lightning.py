"""60 steps of Lightning at once, and 50 + 10, with our callback; without it the checkpoint is refused."""

import hashlib
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from steady import Steady
from torch.utils.data import DataLoader

import fusedonebit


def train(folder: str, resume: str | None = None, attached: bool = True) -> str:
    student = Steady()
    callbacks = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=50, save_top_k=-1)]
    callbacks += [fusedonebit.lightning.OneBit()] * attached
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=60, callbacks=callbacks, logger=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(student, DataLoader(range(1000)), ckpt_path=resume)
    assert student.optimizers().optimizer.phase == "compression"
    vector = torch.nn.utils.parameters_to_vector(student.parameters())
    return hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()


folder = sys.argv[1]
whole = train(f"{folder}/whole")
resumed = train(f"{folder}/resumed", f"{folder}/whole/step=50.ckpt")
print(f"whole {whole} resumed {resumed}")
train(f"{folder}/plain", attached=False)
try:
    train(f"{folder}/again", f"{folder}/plain/step=50.ckpt", attached=False)
except (RuntimeError, ValueError) as error:  # torch's: Lightning's way of loading can't load DTensors
    print(f"refused: {error}")
