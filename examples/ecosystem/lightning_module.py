"""1-bit Adam in a LightningModule.

python examples/ecosystem/lightning_module.py 2    (processes)
"""

import hashlib
import sys

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fusedonebit

STEPS = 200


class Student(lightning.LightningModule):
    """Learns what a linear teacher says."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> tuple[list, list]:
        # max_grad_norm here instead of Trainer(gradient_clip_val=...), which clips each rank by its own norm.
        ours = fusedonebit.OneBitAdam(self.parameters(), lr=3e-3, warmup=0.05, total_steps=STEPS, max_grad_norm=1.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(ours, STEPS)
        return [ours], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    devices = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    torch.manual_seed(0)
    student, teacher, x = Student(), nn.Linear(64, 10), torch.randn(STEPS * 64 * devices, 64)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = "ddp" if devices > 1 else "auto"
    ours = [fusedonebit.lightning.OneBit()]
    trainer = lightning.Trainer(devices=devices, strategy=strategy, max_steps=STEPS, callbacks=ours, **quiet)
    trainer.fit(student, DataLoader(TensorDataset(x, teacher(x).argmax(1)), batch_size=64))
    first, *_, last = student.losses
    stats = student.optimizers().optimizer.stats()
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in student.parameters()))
    sent = f"sent {stats['bytes_total']:,} instead of {STEPS * stats['bytes_fp32']:,} bytes"
    print(
        f"rank {trainer.global_rank}: loss {first:.3f} -> {last:.3f}, phase {stats['phase']}, {sent}, "
        f"parameters {digest.hexdigest()[:16]}"
    )


if __name__ == "__main__":
    main()
