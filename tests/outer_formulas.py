"""What the ops on matrices with scales of rows and columns compute, once more in float64; see ``op_formulas``."""

from __future__ import annotations

from typing import Any

import numpy as np
from op_arguments import Array, wide
from op_formulas import (
    EPS32,
    ROUNDED,
    SMALLEST,
    SUMMED,
    Wide,
    agreed,
    fits,
    formula,
    near,
    packed,
    same,
    sign,
    unpacked,
)

from fusedonebit.triton_kernels import Coef
from fusedonebit.triton_kernels.headers import Word


def scales(w: Wide, rows: Array) -> Array:
    """Scales of all elements: of each matrix the outer product of its slots in what its blocks have of ``rows``.

    ``rows``: float64 [blocks, slots], of each block.
    """
    outer, owner, n = w.before.outer, w.owner.numpy(), w.block
    rows_at, columns_at, columns = outer.table.numpy()[:, owner].repeat(n, 1)
    at = outer.start.numpy().repeat(n) + np.tile(np.arange(n), len(owner))
    i, j = np.divmod(at, columns)
    block = np.arange(len(owner)).repeat(n)
    here = [np.where(w.live, slot, 0) for slot in (rows_at + i, columns_at + j)]
    return np.where(w.live, rows[block, here[0]] * rows[block, here[1]], 0.0)


@formula
def outer_compress(w: Wide, after: Any) -> None:
    a, old, (g, bad) = w.before, w.of(w.before.compensated), w.gradient()
    chunk = np.arange(len(w.owner)) // (len(w.owner) // len(a.bits))
    s = 0.0 * old if int(a.skipped) else scales(w, a.outer.scales.double().numpy()[chunk])
    old, x = np.where(w.live, old, 0.0), w.k(Coef.ONE_MINUS_BETA1) * g * w.k(Coef.UNIT)
    e = old if int(a.skipped) else old - s * sign(old)
    bad |= w.live & ~fits(e + x)
    x = np.where(bad, 0.0, x)
    c = w.of(after.compensated)
    off = 6 * EPS32 * (np.abs(old) + s + np.abs(x)) + SMALLEST * (1 + w.k(Coef.UNIT))
    near(c, np.where(w.live, e + x, 0.0), np.where(w.live, off, 0.0))
    same(after.bits, packed(c, after.bits))
    np.testing.assert_allclose(after.partials, np.abs(w.rows(c)).sum(1), rtol=SUMMED)
    assert int(after.found) == int(a.found) | bool(bad.any())


@formula
def outer_scales(w: Wide, after: Any) -> None:
    a, c = w.before, np.abs(w.of(w.before.compensated))
    expected, per_chunk = a.outer.scales.double().numpy(), len(w.owner) // len(a.outer.scales)
    for t, size in enumerate(a.places.sizes):
        rows_at, columns_at, columns = a.outer.table[:, t].tolist()
        if size:
            blocks = slice(w.starts[t] // w.block, w.starts[t + 1] // w.block)
            matrix, total = c[w.starts[t] :][:size].reshape(-1, columns), a.partials[blocks].sum().item()
            row = expected[blocks.start // per_chunk]
            row[rows_at:columns_at] = matrix.sum(1)
            row[columns_at:][:columns] = matrix.sum(0) / total if total > 0 else 0.0
    near(after.outer.scales, expected, (ROUNDED + 2 * SUMMED) * np.abs(expected) + SMALLEST)


@formula
def outer_mean(w: Wide, after: Any) -> None:
    a, live = w.before, w.live
    found = agreed(a.arrived.words, a.arrived.own_words, a.hold)
    assert int(after.flags) == found
    same(after.kept_words, a.arrived.words)
    if a.words is not None:
        step = a.header.number if a.header.counter is None else int(a.header.counter)
        told = [step, int(a.arrived.own_words[Word.DIGEST]), a.header.tag, found, 0]
        assert after.words[0, [Word.STEP, Word.DIGEST, Word.TAG, Word.FLAGS, Word.SIGNAL]].tolist() == told
    if found:
        same(after.momentum, a.momentum)
        same(after.direction, a.direction)
        return
    each = [scales(w, np.tile(wide(row), (len(w.owner), 1))) for row in a.outer.scales]
    d = np.mean([s * unpacked(bits[None]) for s, bits in zip(each, a.arrived.bits, strict=True)], 0)
    old, size = np.where(live, w.of(a.momentum), 0.0), np.mean(each, 0)
    off = np.where(live, (8 + len(each)) * EPS32 * (np.abs(old) + size) + SMALLEST, 0.0)
    m = a.beta * old + (1 - a.beta) * d
    near(w.of(after.momentum), np.where(live, m, 0.0), off)
    x = a.lead * d + (1 - a.lead) * m
    near(w.of(after.direction), np.where(live, x, 0.0), 2 * off)
