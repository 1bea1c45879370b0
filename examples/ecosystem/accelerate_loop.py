"""1-bit Adam in a loop of Hugging Face's accelerate.

accelerate launch --multi_gpu --num_processes 2 examples/ecosystem/accelerate_loop.py

(Without GPUs as well: --multi_gpu then means several processes, and --cpu would mean one.)
"""

import hashlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusedonebit

STEPS = 200


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    teacher = nn.Linear(64, 10)
    x = torch.randn(STEPS * 2 * 32 * accelerator.num_processes, 64)
    loader = DataLoader(TensorDataset(x, teacher(x).argmax(1)), batch_size=32)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    # The model before the optimizer, which wants parameters on their device, and equal on all ranks as DDP makes them.
    model = accelerator.prepare(model)
    # max_grad_norm here instead of accelerator.clip_grad_norm_, which clips each rank by its own norm.
    ours = fusedonebit.OneBitAdam(model.parameters(), lr=3e-3, warmup=0.05, total_steps=STEPS, max_grad_norm=1.0)
    # A prepared scheduler takes as many steps at once as there are processes.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(ours, STEPS * accelerator.num_processes)
    optimizer, loader, schedule = accelerator.prepare(ours, loader, schedule)
    fusedonebit.accelerate.attach(accelerator, model, optimizer)

    losses = []
    for x, target in loader:
        with accelerator.accumulate(model):  # step() and zero_grad() do nothing in every other micro-batch
            loss = nn.functional.cross_entropy(model(x), target)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) % 80 == 2 and accelerator.is_main_process:
            print(f"step {len(losses) // 2:3}  loss {losses[-1]:.3f}  {ours.stats()['bytes_step']:6,} bytes sent")
    stats = ours.stats()
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
    print(
        f"rank {accelerator.process_index}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, phase {stats['phase']}, "
        f"sent {stats['bytes_total']:,} instead of {STEPS * stats['bytes_fp32']:,} bytes, "
        f"parameters {digest.hexdigest()[:16]}"
    )


if __name__ == "__main__":
    main()
