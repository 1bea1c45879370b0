"""1-bit Adam in Hugging Face's Trainer.

torchrun --nproc-per-node 2 examples/ecosystem/transformers_trainer.py
"""

import hashlib
import os

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is downloaded
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fusedonebit

STEPS = 120


def main() -> None:
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    counting = (torch.arange(512)[:, None] + torch.arange(32)) % 64
    # Trainer clips by default, and each rank by its own norm: off here, max_grad_norm of the optimizer instead.
    common = {"max_steps": STEPS, "logging_steps": STEPS // 6, "warmup_steps": STEPS // 12, "max_grad_norm": 0}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "ddp_find_unused_parameters": False}
    arguments = TrainingArguments("runs/trainer", use_cpu=not torch.cuda.is_available(), **common, **quiet)
    # DDP makes models equal that were made from different seeds, but comes after the optimizer: broadcast_parameters.
    wire = fusedonebit.Wire(broadcast_parameters=True)
    settings = {"lr": 3e-3, "warmup": 0.05, "total_steps": STEPS, "max_grad_norm": 1.0, "wire": wire}
    # Not optimizers=(...): an optimizer made here might miss the device and the process group, which Trainer sets up.
    ours = {"optimizer_cls_and_kwargs": (fusedonebit.OneBitAdam, settings)}
    data = [{"input_ids": row, "labels": row} for row in counting]
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, **ours)
    fusedonebit.transformers.attach(trainer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history[:-1]]
    stats = trainer.optimizer.optimizer.stats()
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in trainer.model.parameters()))
    print(
        f"rank {arguments.process_index}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, phase {stats['phase']}, "
        f"sent {stats['bytes_total']:,} instead of {STEPS * stats['bytes_fp32']:,} bytes, "
        f"parameters {digest.hexdigest()[:16]}"
    )


if __name__ == "__main__":
    main()
