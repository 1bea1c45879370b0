"""Parameter shapes of well-known models."""

from __future__ import annotations

import math

Shape = tuple[int, ...]


def bert_large() -> list[Shape]:
    """BERT-Large with its pre-training heads: 302 tensors, Q, K and V in one, the decoder tied."""
    width, inner = 1024, 4096
    norm: list[Shape] = [(width,), (width,)]
    square: list[Shape] = [(width, width), (width,)]
    qkv: list[Shape] = [(3 * width, width), (3 * width,)]
    layer = qkv + square + norm + [(inner, width), (inner,), (width, inner), (width,)] + norm
    embeddings: list[Shape] = [(30522, width), (512, width), (2, width), *norm]
    pooler, transform = square, square + norm
    heads: list[Shape] = [(30522,), *transform, (2, width), (2,)]
    return embeddings + 24 * layer + pooler + heads


def gpt(layers: int, width: int, vocabulary: int = 50257, context: int = 1024) -> list[Shape]:
    """A GPT of GPT-2's kind; input and output embeddings are tied."""
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    feed_forward: list[Shape] = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(vocabulary, width), (context, width)] + layers * (norm + attention + norm + feed_forward) + norm


def gpt2_small() -> list[Shape]:
    """GPT-2's 124M parameters."""
    return gpt(12, 768)


def resnet50() -> list[Shape]:
    """ResNet-50's convolutions, batch norms and classifier."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            for out, into, k in ((width, before, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, into, k, k), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, before, 1, 1), (4 * width,), (4 * width,)]
            before = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def small_mlp() -> list[Shape]:
    """Digits: 64 inputs, two hidden layers of 32, 10 classes."""
    return [(32, 64), (32,), (32, 32), (32,), (10, 32), (10,)]


MODELS = {"BERT-Large": bert_large, "GPT-2 small": gpt2_small, "ResNet-50": resnet50, "small MLP": small_mlp}


def sizes(shapes: list[Shape]) -> tuple[int, ...]:
    """Elements of each."""
    return tuple(math.prod(shape) for shape in shapes)
