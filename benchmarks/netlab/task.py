"""What is trained: a byte-level transformer on the text of Python's own documentation topics."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fusedonebit.apps.corpus import Corpus, load_text
from fusedonebit.apps.transformer import ByteTransformer, Size

BETAS, LR, WEIGHT_DECAY = (0.9, 0.99), 1e-3, 0.01
HELD_OUT = 64
"""Sequences of a held-out batch."""


@dataclass(frozen=True)
class Task:
    """Sizes of the model and of what each host computes in a step."""

    width: int
    layers: int
    heads: int
    seq_len: int
    batch: int

    @property
    def parameters(self) -> int:
        """Of the model."""
        return sum(p.numel() for p in self.model().parameters())

    def model(self) -> ByteTransformer:
        """The same initial values on every host."""
        torch.manual_seed(0)
        return ByteTransformer(Size(self.width, self.layers, self.heads), self.seq_len)

    def corpus(self) -> Corpus:
        return Corpus(load_text([]), self.seq_len)

    def batch_of(self, corpus: Corpus, step: int, rank: int) -> Tensor:
        return corpus.batch(self.batch, seed=0, step=step, rank=rank)

    def held_out_loss(self, model: ByteTransformer, corpus: Corpus) -> float:
        """Nats per byte of about all text that is never trained on."""
        count = max(1, len(corpus.held_out) // (self.seq_len + 1) // HELD_OUT)
        with torch.no_grad():
            losses = [float(model(corpus.held_out_batch(HELD_OUT, i, count))) for i in range(count)]
        return sum(losses) / count

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def of_blocks(model: ByteTransformer) -> list[int]:
    """Return which of a model's parameters are matrices of its blocks, which Muon trains."""
    return [i for i, (name, p) in enumerate(model.named_parameters()) if name.startswith("blocks.") and p.dim() == 2]


FULL = Task(width=256, layers=3, heads=4, seq_len=64, batch=8)
QUICK = Task(width=64, layers=2, heads=2, seq_len=32, batch=4)
