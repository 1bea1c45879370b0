"""60 steps of torch's AdamW in Lightning at once, and 50 + 10, gradients in 4 bits; and without a rank's residuals."""

import hashlib
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from steady import Steady
from torch.utils.data import DataLoader

import fusedonebit


class AnyOptimizer(Steady):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(folder: str, resume: str | None = None) -> str:
    student = AnyOptimizer()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=50, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=60, logger=False, enable_progress_bar=False,
        callbacks=[saving, fusedonebit.lightning.Compress(bits=4)], gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(student, DataLoader(range(1000)), ckpt_path=resume)
    vector = torch.nn.utils.parameters_to_vector(student.parameters())
    return hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()


folder = sys.argv[1]
whole = train(f"{folder}/whole")
saved = f"{folder}/whole/step=50.ckpt"
resumed = train(f"{folder}/resumed", saved)
print(f"whole {whole} resumed {resumed}")
torch.distributed.barrier()
if torch.distributed.get_rank() == 0:
    checkpoint = torch.load(saved, weights_only=True)
    del checkpoint["residuals_of_ranks"][1]["1.0.worker.numbers"]
    torch.save(checkpoint, saved)
torch.distributed.barrier()
try:
    train(f"{folder}/again", saved)
except (ValueError, fusedonebit.DisagreementError) as error:
    print(f"refused: {error}")
