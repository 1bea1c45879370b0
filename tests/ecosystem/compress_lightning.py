"""60 steps of torch's AdamW in Lightning at once, and 50 + 10, gradients in 4 bits; and without a rank's residuals."""

import sys

import torch
from steady import Steady

import fusedonebit


class AnyOptimizer(Steady):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(folder: str, resume: str | None = None) -> str:
    compression = fusedonebit.lightning.Compress(bits=4)
    return AnyOptimizer().fit(folder, resume, compression, gradient_clip_val=1.0)


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
