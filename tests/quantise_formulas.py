"""Linear levels and signs of gradients, once more in float64; see ``op_formulas``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from op_arguments import Array, wide
from op_formulas import EPS32, Wide, agreed, formula, near, same

from fusedonebit.triton_kernels import LARGEST_GRADIENT
from fusedonebit.triton_kernels.codes import in_float32
from fusedonebit.triton_kernels.headers import Flag, Word
from fusedonebit.triton_kernels.level_io import Levels
from fusedonebit.triton_kernels.nouns import Stored

NONE = torch.zeros(1, dtype=torch.int32)
ABOVE = 1.0 + 2.0**-7 + 1e-6
"""A scale is rounded up to bfloat16."""


def scales(of: Levels) -> Array:
    return wide((of.scales.int() << 16).view(torch.float32)).reshape(of.scales.shape)


def levels(of: Levels, bits: int, block: int) -> Array:
    """Whole numbers, or signs: [rows, blocks, block]."""
    unpacked = np.unpackbits(of.codes.numpy(), axis=-1, bitorder="little").reshape(*of.scales.shape, block, bits)
    if bits == 1:
        return unpacked[..., 0] * 2.0 - 1.0
    code = (unpacked * (1 << np.arange(bits))).sum(-1)
    return np.where(code >= 1 << (bits - 1), code - (1 << bits), code).astype(float)


def absent(of: Levels, owner: Array) -> Array:
    """Of which blocks, by their tensors, no row has a gradient."""
    return np.unpackbits(of.absent.numpy(), axis=-1, bitorder="little")[:, owner].all(0)


def residual(of: Stored | None, a: Any, blocks: int) -> Array:
    """What was left, in the gradient's unit."""
    if of is None:
        return np.zeros((blocks, a.places.block_size))
    unit = 1.0 if a.unit is None else float(a.unit)
    return wide(in_float32(of.numbers, of.exponents)).reshape(blocks, -1) * unit


def sends(x: Array, taken: Array, live: Array, found: Levels, a: Any, before: Any, after: Any) -> None:
    """A message says x, as nearly as its bits can, and what it does not say is left; untaken blocks stay."""
    q, s = levels(found, a.bits, a.places.block_size).reshape(x.shape), scales(found).reshape(-1)
    assert not s[~taken].any()
    assert not found.codes.numpy().reshape(len(x), -1)[~taken].any()
    size, most = np.where(live, np.abs(x), 0.0), 2 ** (a.bits - 1) - 1
    wanted = size.sum(1) / np.maximum(live.sum(1), 1) if a.bits == 1 else size.max(1) / most
    fine = (wanted > 1e-35) & taken
    assert (s[fine] >= wanted[fine] * (1 - 1e-6)).all()
    assert (s[fine] <= wanted[fine] * ABOVE).all()
    if a.bits == 1:
        assert np.array_equal((q >= 0)[taken], (x >= 0)[taken])
    else:
        off = np.abs(x / np.where(s > 0, s, 1.0)[:, None] - q)
        assert off[fine].max(initial=0.0) <= (0.5 if before is not None else 1.0) + 1e-4
    if before is not None:
        e = np.where(live & taken[:, None], x - q * s[:, None], residual(before, a, len(x)))
        near(residual(after, a, len(x)), e, 4 * EPS32 * (np.abs(x) + s[:, None] * np.maximum(most, 1)) + 1e-38)


@formula
def quantise(w: Wide, after: Any) -> None:
    a, live = w.before, w.rows(w.live)
    g = w.rows(np.where(w.live, w.flat(a.tensors), 0.0))
    fine = (np.abs(g) <= LARGEST_GRADIENT).all(1)
    x = np.where(fine[:, None], g, 0.0) + residual(a.residual, a, len(g))
    taken = fine & ~absent(a.message._replace(absent=a.message.absent[:1]), w.owner.numpy())
    sends(x, taken, live, after.message, a, a.residual, after.residual)
    flags = int(a.header.pending) | a.header.flags | (0 if fine.all() else int(Flag.NONFINITE))
    total = int(a.digest)
    folded = np.int64(total ^ (total >> 32)).astype(np.int32)
    for row in after.message.words.tolist():
        named = Word.STEP, Word.DIGEST, Word.TAG, Word.FLAGS, Word.SIGNAL
        assert [row[word] for word in named] == [a.header.number, folded, a.header.tag, flags, 0]
    assert not after.header.pending.any()
    assert not after.digest.any()


def summed(a: Any, blocks: int, factor: float) -> tuple[Array, Array]:
    """The sum of all rows, and of what is added the sizes."""
    each = levels(a.arrived, a.bits, a.places.block_size) * scales(a.arrived)[..., None] * factor
    each = each.reshape(-1, blocks, a.places.block_size)
    return each.sum(0), np.abs(each).sum(0)


@formula
def requantise(w: Wide, after: Any) -> None:
    a, live, blocks = w.before, w.rows(w.live), len(w.owner)
    flags = agreed(a.arrived.words, a.own_words, NONE)
    same(after.flags, [flags])
    same(after.kept_words, a.arrived.words)
    taken = ~absent(a.arrived, w.owner.numpy()) & (flags == 0)
    mean, _ = summed(a, blocks, 1 / len(a.arrived.scales))
    x = np.where(live, mean + residual(a.residual, a, blocks), 0.0)
    sends(x, taken, live, after.message, a, a.residual, after.residual)
    assert after.message.words[0, [Word.STEP, Word.DIGEST, Word.TAG, Word.FLAGS]].tolist() == [
        *(a.header.number, int(a.own_words[Word.DIGEST]), a.header.tag, flags)
    ]


SHARES = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.uint8: 0.25}
"""Of what a residual is stored in, below which what is taken back counts as rounding."""


@formula
def take_back(w: Wide, after: Any) -> None:
    a, live, blocks = w.before, w.rows(w.live), len(w.owner)
    e = residual(a.residual, a, blocks)
    g = w.rows(np.where(w.live, w.flat(a.tensors), 0.0))
    sent = (levels(a.sent, a.bits, w.block) * scales(a.sent)[..., None]).reshape(g.shape)
    taken = (np.abs(g) <= LARGEST_GRADIENT).all(1) & ~absent(a.sent._replace(absent=a.sent.absent[:1]), w.owner.numpy())
    taken &= agreed(a.arrived.words, a.own_words, NONE) != 0
    size = np.abs(e) + np.abs(sent) + np.where(np.isfinite(g), np.abs(g), 0.0)
    s = np.broadcast_to(scales(a.sent)[..., None], levels(a.sent, a.bits, w.block).shape).reshape(g.shape)
    share = SHARES[a.residual.numbers.dtype]
    lost = np.abs(e + sent - g) <= np.maximum(share * (np.abs(e) + s), 2.0**-22 * np.abs(g))
    expected = np.where(live & taken[:, None], np.where(lost, 0.0, e + sent - g), e)
    near(residual(after.residual, a, blocks), expected, 4 * EPS32 * size + 1e-38)


@formula
def dequantise(w: Wide, after: Any) -> None:
    a, blocks = w.before, len(w.owner)
    flags = agreed(a.arrived.words, a.own_words, NONE)
    same(after.flags, [flags])
    same(after.kept_words, a.arrived.words)
    x, size = summed(a, blocks, a.factor) if a.sums else (levels(a.arrived, a.bits, w.block), None)
    if not a.sums:
        x = (x * scales(a.arrived)[..., None] * a.factor).reshape(blocks, -1)
        size = np.abs(x)
        words = sum(int(row.view(torch.int64).sum()) for row in a.arrived.codes)
        total = int(a.digest) + words + int((a.arrived.scales.long() & 0xFFFF).sum())
        assert int(after.digest) == (total + 2**63) % 2**64 - 2**63
    else:
        same(after.digest, a.digest)
    before, found = w.flat(a.tensors), w.flat(after.tensors)
    expected = np.where(w.live, x.reshape(-1) if flags == 0 else np.nan, before)
    bound = w.rounding(after.tensors, expected) + (2 + len(a.arrived.scales)) * EPS32 * size.reshape(-1)
    near(found, expected, np.where(w.live, bound, 0.0))
