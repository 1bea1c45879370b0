"""A Lightning module whose runs can be resumed within an epoch."""

import hashlib
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_module import Student
from torch import Tensor
from torch.utils.data import DataLoader


class Steady(Student):
    """Its batches depend on the step and the rank only: Lightning does not resume a loader within an epoch."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.global_rank + self.global_step)
        x = torch.randn(16, 64, generator=generator)
        return super().training_step([x, x[:, :10].argmax(1)], index)

    def fit(self, folder: str, resume: str | None, *callbacks: Callback, **options: Any) -> str:
        """Take 60 steps on two ranks, with a checkpoint after 50; return a hash of the parameters."""
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=50, save_top_k=-1)
        options |= {"accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(strategy="ddp", max_steps=60, callbacks=[saving, *callbacks], **options)
        trainer.fit(self, DataLoader(range(1000)), ckpt_path=resume)
        vector = torch.nn.utils.parameters_to_vector(self.parameters())
        return hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()
