"""Predict bytes of real text with a transformer or an LSTM."""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fusedonebit.apps.corpus import Corpus, load_text

from .supervised import Learner, fixed

VOCABULARY = 128  # ASCII; all other bytes are one symbol
LENGTH = 16
LSTM_LENGTH, LSTM_WIDTH = 24, 32
WIDTH, HEADS, DEPTH = 32, 2, 2
SOURCE_BYTES = 2_000_000
HIDDEN_BYTES = 3  # of each sequence's 16, near BERT's 15 %
HELD_OUT = 512  # sequences
PARTS = 64  # of the text, any of which may be one worker's own


@lru_cache(maxsize=3)
def corpus(source: bool, length: int) -> Corpus:
    """Return Python's documentation, or its standard library: the same text where Python is the same."""
    if not source:
        return Corpus(load_text(()), length)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return Corpus(load_text([str(file) for file in files])[:SOURCE_BYTES], length)


def causal() -> Language:
    """Return a transformer that predicts each next byte of Python's documentation."""
    return Language(Transformer(causal=True), corpus(source=False, length=LENGTH))


def masked() -> Masked:
    """Return a transformer that predicts hidden bytes of Python's standard library."""
    return Masked(Transformer(causal=False), corpus(source=True, length=LENGTH))


def lstm() -> Language:
    """Return an LSTM that predicts each next byte of Python's documentation."""
    return Language(_Lstm(), corpus(source=False, length=LSTM_LENGTH))


class Language(Learner):
    """Predict the next byte at each position."""

    def __init__(self, model: nn.Module, corpus: Corpus) -> None:
        super().__init__(model, lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        self.corpus = corpus
        self.held_out = self._examples(corpus.held_out_batch(HELD_OUT, 0, 1), fixed())

    def pick(self, draw: torch.Generator, size: int) -> Tensor:
        """See ``Trial``: where sequences begin [size, 1], as ``Corpus.batch`` draws them."""
        seed = int(torch.randint(1 << 24, (), generator=draw))
        generator = torch.Generator().manual_seed(seed * 1_000_003 * 16_411)
        return torch.randint(len(self.corpus.train) - self.corpus.seq_len, (size, 1), generator=generator)

    def source(self, picked: Tensor) -> Tensor:
        """See ``Trial``: one of ``PARTS`` equal parts of the text, in which topics or files follow each other."""
        return picked.squeeze(1) * PARTS // len(self.corpus.train)

    def complete(self, picked: Tensor, draw: torch.Generator, share: float) -> tuple[Tensor, ...]:
        tokens = self.corpus.train[picked + torch.arange(self.corpus.seq_len + 1)].long()
        return self._examples(tokens, draw)

    def _examples(self, tokens: Tensor, draw: torch.Generator) -> tuple[Tensor, ...]:
        """Turn bytes int64 [size, length + 1] into inputs and targets."""
        tokens = tokens.clamp(max=VOCABULARY - 1)
        return tokens[:, :-1], tokens[:, 1:]


class Masked(Language):
    """Predict ``HIDDEN_BYTES`` of each sequence, a fixed number, so that all batches have one shape."""

    def _examples(self, tokens: Tensor, draw: torch.Generator) -> tuple[Tensor, ...]:
        tokens = tokens[:, 1:].clamp(max=VOCABULARY - 1)
        places = torch.rand(tokens.shape, generator=draw).argsort(1)[:, :HIDDEN_BYTES]
        return tokens.scatter(1, places, 0), places, tokens.gather(1, places)


class _Block(nn.Module):
    """Attention, written out since ``scaled_dot_product_attention`` has no rule for vmap, and feed-forward."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Float [batch, length, width] to the same."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Logits [batch, length, 128] of each next byte, or of the bytes at ``places``; embeddings are tied."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(_Block(causal) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # Residual branches start smaller, so that depth does not add up (GPT-2).
                shrink = (2 * DEPTH) ** -0.5 if name.endswith(("proj.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=WIDTH**-0.5 * shrink)

    def forward(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        if places is not None:
            x = x.gather(1, places[..., None].expand(-1, -1, WIDTH))
        return F.linear(self.norm(x), self.embed.weight)


class _Lstm(nn.Module):
    """Logits [batch, length, 128] of each next byte; the cell is written out, since torch's has no rule for vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, LSTM_WIDTH)
        self.from_input = nn.Linear(LSTM_WIDTH, 4 * LSTM_WIDTH)
        self.from_state = nn.Linear(LSTM_WIDTH, 4 * LSTM_WIDTH, bias=False)
        self.head = nn.Linear(LSTM_WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = cell = torch.zeros(len(tokens), LSTM_WIDTH)
        seen = []
        for inputs in self.from_input(self.embed(tokens)).unbind(1):
            gates = inputs + self.from_state(hidden)
            keep, write, show = gates[:, LSTM_WIDTH:].sigmoid().chunk(3, 1)
            cell = keep * cell + write * gates[:, :LSTM_WIDTH].tanh()
            hidden = show * cell.tanh()
            seen.append(hidden)
        return self.head(torch.stack(seen, 1))
