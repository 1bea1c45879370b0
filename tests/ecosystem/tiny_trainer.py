"""transformers' Trainer of 60 steps that take a second."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def tiny(folder: str, arguments: dict[str, Any], **options: Any) -> Trainer:
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = (torch.arange(512)[:, None] + torch.arange(16)) % 64
    told = TrainingArguments(
        folder, use_cpu=True, max_steps=60, save_steps=40, report_to="none", disable_tqdm=True,
        per_device_train_batch_size=4, **arguments,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(GPT2LMHeadModel(config), told, train_dataset=data, **options)
