"""A small causal transformer over bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 256


class Size(NamedTuple):
    """Width, depth and heads."""

    width: int
    layers: int
    heads: int


SIZES = {"tiny": Size(64, 2, 2), "small": Size(128, 2, 4), "medium": Size(384, 6, 6), "large": Size(768, 12, 12)}


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm and around a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Float [batch, length, width] to the same."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class ByteTransformer(nn.Module):
    """Predicts each next byte of sequences of at most ``seq_len``; input and output embeddings are tied."""

    def __init__(self, size: Size, seq_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Parameter(torch.zeros(seq_len, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # Residual branches start smaller, so that depth does not add up (GPT-2).
                shrink = (2 * size.layers) ** -0.5 if name.endswith(("proj.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=size.width**-0.5 * shrink)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte, [], of ``tokens`` int64 [batch, length + 1]."""
        x = self.embed(tokens[:, :-1]) + self.position[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
