"""60 steps of Lightning at once, and 50 + 10, with our callback; without it the checkpoint is refused."""

import sys

from steady import Steady

import fusedonebit


def train(folder: str, resume: str | None = None, attached: bool = True) -> str:
    student = Steady()
    digest = student.fit(folder, resume, *[fusedonebit.lightning.OneBit()] * attached)
    assert student.optimizers().optimizer.phase == "compression"
    return digest


folder = sys.argv[1]
whole = train(f"{folder}/whole")
resumed = train(f"{folder}/resumed", f"{folder}/whole/step=50.ckpt")
print(f"whole {whole} resumed {resumed}")
train(f"{folder}/plain", attached=False)
try:
    train(f"{folder}/again", f"{folder}/plain/step=50.ckpt", attached=False)
except (RuntimeError, ValueError) as error:  # torch's: Lightning's way of loading can't load DTensors
    print(f"refused: {error}")
