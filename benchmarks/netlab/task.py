"""What is trained: a byte-level transformer on the text of Python's own documentation topics."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fusedonebit.apps.corpus import Corpus, load_text
from fusedonebit.apps.transformer import ByteTransformer, Size

BETAS, LR = (0.9, 0.99), 1e-3


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

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


FULL = Task(width=256, layers=3, heads=4, seq_len=64, batch=8)
QUICK = Task(width=64, layers=2, heads=2, seq_len=32, batch=4)
