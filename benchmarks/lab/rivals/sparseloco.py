"""SparseLoCo (Sarfi et al., 2025, Algorithm 1): of what a worker has come in H steps the largest elements, in two bits.

Momentum is in what was not sent yet, which fades, and not in an outer optimizer. Chunks are the paper's: a matrix is
cut into tiles of 64 x 64, a vector into runs of 4096, and, where these do not fit, into smaller ones that do, as in the
authors' code. Two bits are as in that code too (``TopKCompressor``): a tensor's values fall into four bins around their
mean, and of each bin the mean of its values travels.

Where the paper and its code differ this is the paper's: what arrives is divided by the number R of workers, where the
code divides each element by the number of those that have sent it, and a vector's runs have up to 4096 elements, the
code's 64. Of a chunk that is smaller than 4096 the same share travels, one element at least, so that k says how dense
messages are; the code takes k of any chunk, which is most of a chunk of a model as small as the lab's.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from ..setting import Params, Setting
from .bits import as_bytes, pack, unpack
from .chunks import Chunks, Cut, tiles_of
from .frame import RoundRival

CHUNK = 4096
"""Elements of a full chunk, a matrix's or a vector's."""
ERROR_DECAY, OUTER_LR = 0.95, 1.0
BITS, RANGE_IN_SIGMAS = 2, 6
BINS = 2**BITS


class SparseLoCo(RoundRival):
    """Add up what workers have come, send the largest ``k`` of 4096, keep the rest, move by the mean.

    Args:
        length: H.
        k: Elements of a full chunk that travel.
    """

    def __init__(self, params: Params, of: Setting, length: int, k: int) -> None:
        super().__init__(params, of, length, k=k, error_decay=ERROR_DECAY, outer_lr=OUTER_LR)
        alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for tensor in self.cut(torch.arange(self.anchor.numel())):
            chunks = tiles_of(tensor, CHUNK).flatten(1)
            alike[chunks.shape].append(chunks)
        self.chunks = [Chunks(torch.stack(where), kept_of(k, size)) for (_, size), where in alike.items()]
        self.cuts = Cut(self.chunks)
        self.error = torch.zeros_like(self.x)

    def meet(self, deltas: Tensor) -> None:
        self.error.mul_(ERROR_DECAY).add_(deltas)  # e <- beta e + Delta
        apart = zip(self.chunks, self.cuts.apart(self.error), strict=True)
        messages = torch.cat([encode(chunks, values) for chunks, values in apart], -1)
        parts = self.wires.all_gather(messages).split([message_bytes(chunks) for chunks in self.chunks], -1)
        decoded = [decode(chunks, part, deltas.dtype) for chunks, part in zip(self.chunks, parts, strict=True)]
        sent = self.cuts.together(decoded)  # [W, n]
        self.error -= sent  # e <- e - Q(top-k(e))
        self.anchor -= OUTER_LR * sent.mean(0)  # theta <- theta - alpha mean(Q(top-k(e)))


def kept_of(k: int, size: int) -> int:
    """Return how many elements of a chunk of ``size`` travel, where ``k`` of ``CHUNK`` do; one at least."""
    return max(1, round(k * size / CHUNK))


def message_bytes(chunks: Chunks) -> int:
    """Return the bytes of a message: places, two bits for each value, a tensor's four means in float32."""
    return chunks.index_bytes + -(-chunks.count * BITS // 8) + len(chunks.where) * BINS * 4


def encode(chunks: Chunks, values: Tensor) -> Tensor:
    """Code the largest of chunks [W, tensors, chunks, size]: uint8 [W, message_bytes]."""
    places = chunks.largest(values)
    kept = values.gather(-1, places).flatten(2)  # [W, tensors, values of a tensor]
    mean = kept.mean(-1, keepdim=True)
    centred = kept - mean
    sigma = centred.norm(dim=-1, keepdim=True) / max(1, kept.shape[-1] - 1) ** 0.5
    width = RANGE_IN_SIGMAS * sigma / BINS
    bins = (centred / torch.where(width > 0, width, 1.0) + BINS // 2).round().clamp(0, BINS - 1).long()
    zeros = kept.new_zeros(*kept.shape[:2], BINS)
    counts = zeros.scatter_add(-1, bins, torch.ones_like(kept)).clamp(min=1)
    means = zeros.scatter_add(-1, bins, kept) / counts
    return torch.cat([chunks.pack_places(places), pack(bins.flatten(1), BITS), as_bytes(means.float().flatten(1))], -1)


def decode(chunks: Chunks, message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return chunks [W, tensors, chunks, size], zero but for what has arrived."""
    tensors, per_tensor, size = chunks.where.shape
    value_bytes = -(-chunks.count * BITS // 8)
    packed, bins, means = message.split([chunks.index_bytes, value_bytes, tensors * BINS * 4], -1)
    table = means.contiguous().view(torch.float32).to(dtype).unflatten(-1, (tensors, BINS))
    values = table.gather(-1, unpack(bins, BITS, chunks.count).unflatten(-1, (tensors, -1)))
    places = chunks.unpack_places(packed)
    empty = values.new_zeros(len(message), tensors, per_tensor, size)
    return empty.scatter(-1, places, values.unflatten(-1, (per_tensor, -1)))
