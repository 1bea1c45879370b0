"""What ops compute of each element, once more in float64: compression, updates, votes, bits; see ``op_formulas``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from op_arguments import Array, wide
from op_formulas import (
    EPS32,
    FORMULAS,
    SMALLEST,
    SUMMED,
    Wide,
    agreed,
    close,
    fits,
    formula,
    narrowed,
    near,
    packed,
    same,
    sign,
    unpacked,
)
from step_formulas import taken
from torch import Tensor

from fusedonebit.triton_kernels import Coef
from fusedonebit.triton_kernels.headers import Flag, Word, folded


def compressed(w: Wide, after: Any, c: Array) -> None:
    """Bits and sums are those of c, as it is stored."""
    same(after.bits, packed(c, after.bits))
    rows = w.rows(c)
    sums = [np.abs(rows).sum(1), (rows * rows).sum(1), (rows != 0).sum(1)][: len(after.partials)]
    np.testing.assert_allclose(after.partials, sums, rtol=SUMMED)


@formula
def momentum_compress(w: Wide, after: Any) -> None:
    a, ternary = w.before, w.before.bits.dim() == 3
    old, s, m = w.of(a.compensated.numbers), w.each(a.compensated.scale), w.momentum(a.exp_avg)
    g, bad = w.gradient()
    v = None if a.exp_avg_sq is None else w.variance(a.exp_avg_sq)
    if a.worker_sq is not None:
        own = w.k(Coef.BETA2) * w.of(a.worker_sq) + w.k(Coef.ONE_MINUS_BETA2) * g * g
        own = np.where(w.live, np.where(bad | ~fits(own), w.of(a.worker_sq), own), 0.0)
        close(w.of(after.worker_sq), own, 8 * EPS32, SMALLEST)
        v = None if v is None else np.where(v > 0, v, w.of(after.worker_sq))
    unit = w.k(Coef.UNIT) / (1 if v is None else w.denom(v, a.exp_avg_sq.eps_inside_sqrt))
    kept = w.k(Coef.BETA1) * m + old - s * sign(old, ternary)
    fresh = w.k(Coef.ONE_MINUS_BETA1) * g * unit
    bad |= w.live & ~fits(kept + fresh)
    fresh = np.where(bad, 0.0, fresh)
    c = w.of(after.compensated.numbers)
    bound = 8 * EPS32 * (np.abs(old) + s + np.abs(m) + np.abs(fresh)) + SMALLEST * (1 + unit)
    near(c, np.where(w.live, kept + fresh, 0.0), np.where(w.live, bound, 0.0))
    compressed(w, after, c)
    assert int(after.found) == int(a.found) | bool(bad.any())


@formula
def server_reduce(w: Wide, after: Any) -> None:
    a, ternary = w.before, w.before.bits.dim() == 3
    found = agreed(a.arrived.words, a.arrived.own_words, a.hold)
    assert int(after.flags) == found
    same(after.kept_words, a.arrived.words)
    if a.words is not None:
        step = a.header.number if a.header.counter is None else int(a.header.counter)
        told = [step, int(a.arrived.own_words[Word.DIGEST]), a.header.tag, found, 0]
        assert after.words[0, [Word.STEP, Word.DIGEST, Word.TAG, Word.FLAGS, Word.SIGNAL]].tolist() == told
    scales = np.repeat(a.arrived.scales[:, a.arrived.slot.long()].double().numpy(), w.block, axis=1)
    average = (scales * unpacked(a.arrived.bits).reshape(len(scales), -1)).mean(0) * (not found)
    keeps = a.compensated.numbers.numel() > 0
    old, s = (w.of(a.compensated.numbers), w.each(a.compensated.scale)) if keeps else (0.0 * average,) * 2
    expected = np.where(w.live, average + (old - s * sign(old, ternary) if keeps else 0.0), 0.0)
    bound = np.where(w.live, 8 * EPS32 * (np.abs(scales).sum(0) + np.abs(old) + s), 0.0)
    if keeps:
        c = w.of(after.compensated.numbers)
        near(c, expected, bound)
        compressed(w, after, c)
    else:  # c is kept nowhere
        certain = np.abs(expected) > bound
        assert np.array_equal(unpacked(after.bits)[certain], np.sign(expected)[certain])
        near(after.partials[0], w.rows(np.abs(expected)).sum(1), w.rows(bound).sum(1) + SUMMED)


@formula
def apply_momentum(w: Wide, after: Any) -> None:
    a, x, skipped = w.before, w.flat(w.before.params), int(w.before.skip) != 0
    update = w.momentum(a.exp_avg) / w.k(Coef.UNIT)
    if a.exp_avg_sq is not None:
        update = update / w.denom(w.of(a.exp_avg_sq.numbers), a.exp_avg_sq.eps_inside_sqrt)
    expected = x if skipped else w.k(Coef.DECAY) * x - w.k(Coef.STEP_SIZE) * update
    w.moved(after, expected, 2 * np.abs(x) + np.abs(expected))
    if a.x_squares is not None:
        told = w.rows(np.where(w.live, expected, 0.0) ** 2).sum(1)
        written = w.used[:: w.block] & (not skipped)  # nor of blocks of which nothing counts
        close(after.x_squares, np.where(written, told, wide(a.x_squares)), 64 * EPS32)
    if a.count is not None:
        same(after.steps, a.steps.numpy() + taken(a.count, after.count, int(a.skip), len(a.steps)))
    if a.digest is not None:
        rows = np.ascontiguousarray(a.exp_avg.bits.numpy()).reshape(len(a.digest), -1).view(np.int64)
        same(after.digest, a.digest.numpy() + rows.sum(1))


def adam_moments(w: Wide, after: Any) -> tuple[Array, Array, Array, Array, Array]:
    """m and v as they must be, where gradients do not count, and sizes of m's terms and of v's."""
    a, found = w.before, w.before.found is not None
    g, bad = w.gradient() if found else (np.where(w.live, w.flat(a.grads), 0.0), np.zeros_like(w.live))
    old_m, old_v = w.of(a.moments.exp_avg), w.of(a.moments.exp_avg_sq)
    m = w.k(Coef.BETA1) * old_m + w.k(Coef.ONE_MINUS_BETA1) * g
    v = w.k(Coef.BETA2) * old_v + w.k(Coef.ONE_MINUS_BETA2) * g * g
    m, v = narrowed(np.where(bad, old_m, m)), narrowed(np.where(bad, old_v, v))
    size = np.abs(old_m) + np.abs(g)
    # What blocks without live elements have for moments is nobody's.
    for now, expected, bound in ((after.moments.exp_avg, m, size), (after.moments.exp_avg_sq, v, v)):
        near(w.of(now)[w.used], expected[w.used], (8 * EPS32 * bound + SMALLEST)[w.used])
    if a.exp_avg_sq_sums is not None:
        used = w.used[:: w.block]
        sums = w.rows(w.of(after.moments.exp_avg_sq)).sum(1)
        close(after.exp_avg_sq_sums.numpy()[used], sums[used], SUMMED)
    if found:
        assert int(after.found) == int(a.found) | 64 * bool(bad.any())
    if a.found_before is not None:
        assert int(after.found_before) == 0
    return m, v, bad, size, v


@formula
def adam_update(w: Wide, after: Any) -> None:
    m, v, bad, size, _ = adam_moments(w, after)
    x = w.flat(w.before.params)
    per = w.k(Coef.STEP_SIZE) / w.denom(v, False)
    w.moved(after, np.where(bad, x, w.k(Coef.DECAY) * x - per * m), np.abs(x) + per * size)


@formula
def lamb_move(w: Wide, after: Any) -> None:
    a, x = w.before, w.flat(w.before.params)
    m = w.of(a.moments.exp_avg)
    update = w.k(Coef.STEP_SIZE) * m / w.denom(w.of(a.moments.exp_avg_sq), a.eps_inside_sqrt)
    w.moved(after, w.k(Coef.DECAY) * x - update, np.abs(x) + np.abs(update))


def norms_are(w: Wide, found: Tensor, values: Array, bound: Array) -> None:
    """Sums of squares; ``bound``: largest errors of the values. Of padding nobody's."""
    expected, slack = w.rows(values**2).sum(1), w.rows(bound * (2 * np.abs(values) + bound)).sum(1)
    used = w.used[:: w.block]
    near(found.numpy()[used], expected[used], (slack + SUMMED * expected)[used])


@formula
def lamb_update(w: Wide, after: Any) -> None:
    a = w.before
    m, v, _, size, _ = adam_moments(w, after)
    x, per = np.where(w.live, w.flat(a.params), 0.0), w.k(Coef.UNBIAS1) / w.denom(v, a.eps_inside_sqrt)
    decay = w.k(Coef.WEIGHT_DECAY) * x
    norms_are(w, after.norms[0], x, 0.0 * x)
    off = 8 * EPS32 * (size * per + np.abs(decay)) + SMALLEST * (per + 1)  # m's products may fall below float32
    norms_are(w, after.norms[1], np.where(w.live, m * per + decay, 0.0), off * w.live)


@formula
def lamb_ratio(w: Wide, after: Any) -> None:
    a, (frozen, _, inside) = w.before, w.before.exp_avg_sq
    frozen, held = w.of(frozen), w.of(a.fresh)
    per = (w.denom(frozen, inside) if a.preconditioned else 1.0) / w.k(Coef.UNIT)
    m, rate = w.momentum(a.exp_avg) * per, w.k(Coef.ONE_MINUS_BETA1)
    last = w.momentum(a.last) * per if int(a.started) else held
    g = (m - w.k(Coef.BETA1) * last) / rate
    off = 8 * EPS32 * (np.abs(m) + np.abs(last)) / np.abs(rate)
    v = w.k(Coef.BETA2) * (held if int(a.started) else frozen) + w.k(Coef.ONE_MINUS_BETA2) * g * g
    bound = 8 * EPS32 * v + w.k(Coef.ONE_MINUS_BETA2) * off * (2 * np.abs(g) + off)
    found = w.of(after.fresh)
    near(found, np.where(w.live, v, 0.0), bound + SMALLEST)
    assert not found[~w.live].any()
    # Of the variance as it was written: its errors are bounded.
    ratio = w.denom(frozen, inside) / w.denom(found, inside) if a.of_denominators else frozen / found
    ratio = np.where(w.live & (frozen > 0 if not a.of_denominators else True), ratio, 0.0)
    largest = w.rows(ratio).max(1)
    close(after.ratios.largest, largest, 8 * EPS32)
    same(after.last.bits, a.exp_avg.bits)
    same(after.last.scale, a.exp_avg.scale)
    if a.ratios.norms is not None:
        x, unbiased = np.where(w.live, w.flat(a.params), 0.0), w.k(Coef.UNBIAS1) / w.denom(frozen, inside)
        adam, decay = np.where(w.live, m * unbiased, 0.0), w.k(Coef.WEIGHT_DECAY) * x
        off = 8 * EPS32 * (np.abs(adam) + np.abs(decay))
        for row, values in zip(after.ratios.norms, (adam, adam + decay), strict=True):
            near(row, w.rows(values**2).sum(1), (w.rows(off * (2 * np.abs(values) + off)).sum(1)) + SUMMED)


@formula
def local_step(w: Wide, after: Any) -> None:
    """0/1 Adam, Algorithm 1, lines 4 to 6; and beta1*m, before the step that synchronises.

    Where it follows, v is made first, and c is what parameters lack; in the last step x stays.
    """
    a, step, held = w.before, w.before.step, int(w.before.hold) != 0
    v, (g, bad) = w.of(a.exp_avg_sq), w.gradient()
    squares = w.k(Coef.BETA2) * v + w.k(Coef.ONE_MINUS_BETA2) * g * g if step.follows else v
    beta1, d = w.k(Coef.BETA1), w.denom(squares, step.eps_inside_sqrt)
    old, s, m, x = w.of(a.compensated), w.each(a.worker_scale), w.of(a.exp_avg), w.flat(a.params)
    c, size, m_size, u_size = old - s * sign(old), np.abs(old) + s, np.abs(m), np.zeros_like(x)
    lost, unit, new = np.zeros_like(w.live), d if step.precondition else 1.0, m
    if step.moves:
        new, new_size = (
            beta1 * m + w.k(Coef.ONE_MINUS_BETA1) * g,
            np.abs(beta1 * m) + np.abs(w.k(Coef.ONE_MINUS_BETA1) * g),
        )
        decays = w.k(Coef.WEIGHT_DECAY) * x * d if step.decay_in_update else np.zeros_like(x)
        summed, u, u_size = c + new / unit + decays, new / d, w.k(Coef.STEP_SIZE) * new_size / d
        if step.follows:
            summed = w.k(Coef.DECAY) * c + w.k(Coef.STEP_SIZE) * u
        lost = bad | ~fits(summed, u, squares)
        good = w.live & ~lost & (not held)
        u_size = np.where(good, u_size, 0.0)
        went = good & (not (step.follows and step.last))
        x = np.where(went, w.k(Coef.DECAY) * x - w.k(Coef.STEP_SIZE) * np.where(good, u, 0.0), x)
        new, m_size = np.where(good, new, m), np.where(good, new_size, m_size)
        c, v = np.where(good, summed, c), np.where(good, squares, v)
        size = size + (u_size if step.follows else np.where(good, new_size / unit + np.abs(decays), 0.0))
    if step.last and not step.follows:
        total = c + beta1 * new / unit
        lost, c = lost | ~fits(total), np.where(fits(total), total, c)
        size, new = size + beta1 * m_size / unit, m
    w.moved(after, x, np.abs(x) + u_size)
    for now, expected, bound in (
        (after.exp_avg, new, m_size),
        (after.exp_avg_sq, v, v),
        (after.compensated, np.where(w.live, c, 0.0), size),
    ):
        near(w.of(now), expected, 8 * EPS32 * bound + SMALLEST)
    assert not w.of(after.compensated)[~w.live].any()
    assert not after.worker_scale.any()
    assert bool(after.flags) == (bool((lost & w.live).any()) and not held)
    if a.anchor is not None:
        same(after.anchor[: w.live.size], w.flat(a.params).astype(np.float32))


@formula
def rebuild_momentum(w: Wide, after: Any) -> None:
    """0/1 Adam, Algorithm 1, line 9, of a buffer that sums several steps; what has no variance has no momentum."""
    a, owner = w.before, w.owner
    m = w.each(a.exp_avg_scale) * unpacked(a.exp_avg_bits)
    m = m / (1 if a.summed is None else w.each(a.summed[owner]))
    m = m * (1 if a.awaited is None else w.each(a.awaited[owner] > 0))
    coef = a.coefficients.table[owner]
    if a.exp_avg_sq is not None:
        root, eps = (w.each(coef[:, column]) for column in (Coef.RSQRT_BIAS2, Coef.EPS))
        v = w.of(a.exp_avg_sq) * root**2
        m = m * (np.sqrt(v + eps) if a.eps_inside_sqrt else np.sqrt(v) + eps)
    expected = np.where(w.live, m, 0.0)
    close(w.of(after.exp_avg), expected, 8 * EPS32)
    same(after.sent, a.exp_avg_scale)
    assert not after.exp_avg_scale.any()  # the bits stand for nothing any more


@formula
def lion_compress(w: Wide, after: Any) -> None:
    """Distributed Lion, Algorithm 1, a worker's lines."""
    a, m, (g, bad) = w.before, w.of(w.before.exp_avg), w.gradient()

    def blend(keep: Coef, take: Coef) -> tuple[Array, Array]:
        return w.k(keep) * m + w.k(take) * g, np.abs(w.k(keep) * m) + np.abs(w.k(take) * g)

    (c, c_size), (new, new_size) = blend(Coef.BETA1, Coef.ONE_MINUS_BETA1), blend(Coef.BETA2, Coef.ONE_MINUS_BETA2)
    bad |= ~fits(c, new)
    moves = ~bad & w.live & (int(a.hold) == 0)
    near(w.of(after.exp_avg), np.where(moves, new, m), 8 * EPS32 * np.where(moves, new_size, 0.0) + SMALLEST)
    assert bool(after.flags) == (bool((bad & w.live).any()) and not int(a.hold))
    if a.weights is not None:
        assert (after.weights == (1.0 if (int(a.step) + a.rank) % len(a.weights) else 1.5)).all()
    c, off = np.where(bad, m, c), 8 * EPS32 * np.where(bad, 0.0, c_size)
    bits, zero = unpacked(after.bits) > 0, (off == 0) & (c == 0) & w.live
    certain = (np.abs(c) > off) & w.live
    assert (bits[certain] == (c[certain] > 0)).all()
    assert bits[~w.live].all()
    some = np.flatnonzero(zero)[:50]
    assert [bool(bit) for bit in bits[some]] == [coin(int(i), int(a.step)) for i in some]


def mixed(word: int) -> int:
    """C. Wellons' hash of 32-bit words, in Python's integers."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
    word = (word ^ (word >> 15)) * 0x735A2D97 & 0xFFFFFFFF
    return word ^ (word >> 15)


def coin(index: int, step: int) -> bool:
    """What is tossed for a flat index where there is nothing to vote for."""
    seed = mixed(mixed((index >> 32) + 0x9E3779B9 & 0xFFFFFFFF) ^ (step & 0xFFFFFFFF))
    return bool(mixed((index & 0xFFFFFFFF) ^ seed) >> 16 & 1)


@formula
def add_values(w: Wide, after: Any) -> None:
    a, x = w.before, w.flat(w.before.params)
    values = w.of(a.values)
    w.moved(after, values if a.replaces else x - values, np.abs(x) + np.abs(values))


@formula
def pack(a: Any, after: Any) -> None:
    same(after.bits, np.packbits((a.x >= 0).numpy(), bitorder="little"))


def unpack_bits(a: Any, after: Any) -> None:
    assert torch.equal(after.x, torch.from_numpy(unpacked(a.bits[None])).to(after.x.dtype))


FORMULAS["unpack"] = unpack_bits


@formula
def merge_signs(a: Any, after: Any) -> None:
    """Bits that agree stay, others are one of the two; headers say all flags, and which checked word differs."""
    assert not ((after.bits ^ a.bits) & ~(a.bits ^ a.arrived_bits)).any()
    differ = (a.words != a.arrived_words)[:, : a.checked].int()
    note = (differ << torch.arange(a.checked)).sum(1).int()
    expected = a.words.clone()
    expected[:, a.flags] |= a.arrived_words[:, a.flags] | (note != 0).int() * a.mismatch
    expected[:, Word.SIGNAL] |= a.arrived_words[:, Word.SIGNAL] | note
    same(after.words, expected)


@formula
def pick_owned(a: Any, after: Any) -> None:
    """Each place has one owner."""
    assert (after.owners.int().sum(0) == 0xFF).all()
    own = torch.stack([a.bits[(a.rank - shift) % len(a.bits)] for shift in range(len(a.bits))])
    same(after.picked[0], (own & after.owners).sum(0).to(torch.uint8))


@formula
def place_owned(a: Any, after: Any) -> None:
    for chunk, found in enumerate(after.bits):
        theirs = torch.stack([a.gathered[(chunk + shift) % len(a.bits)] for shift in range(len(a.bits))])
        same(found, np.bitwise_or.reduce((theirs & a.owners).numpy()))


@formula
def local_update(w: Wide, after: Any) -> None:
    """Marsit, Algorithm 1, lines 1, 5 and 10; of AdamW where there is a variance, else of SGD."""
    a, step, (g, bad), held = w.before, w.before.step, w.gradient(), int(w.before.hold) != 0
    x = np.where(w.live, w.flat(a.params), 0.0)
    limit, old = w.each(a.compensated.limit), w.of(a.compensated.numbers)
    kept = np.where(w.live, np.clip(old - w.each(a.compensated.scale) * unpacked(a.bits), -limit, limit), 0.0)
    d = w.k(Coef.ONE_MINUS_BETA1) * g * float(step.factor)
    if step.decays and a.exp_avg_sq is None:
        d = d + w.k(Coef.WEIGHT_DECAY) * x
    m, v = d if a.exp_avg is None else w.k(Coef.BETA1) * w.of(a.exp_avg) + d, None
    u, size = w.k(Coef.STEP_SIZE) * m, np.abs(w.k(Coef.STEP_SIZE) * d)
    if a.exp_avg is not None:
        size += np.abs(w.k(Coef.STEP_SIZE) * w.of(a.exp_avg))
    if a.exp_avg_sq is not None:
        v = w.k(Coef.BETA2) * w.of(a.exp_avg_sq) + w.k(Coef.ONE_MINUS_BETA2) * (g * float(step.factor)) ** 2
        u, size = u / w.denom(v, False), size / w.denom(v, False)
        u = u + (w.k(Coef.LR) * w.k(Coef.WEIGHT_DECAY) * x if step.decays else 0.0)
    chunks = np.arange(w.live.size) // (w.live.size // len(a.bits))
    here = (chunks >= a.chunks.first) & (chunks < a.chunks.last)
    moves = here & w.live & ~bad & (not held)
    c = np.where(here, (kept + np.where(moves, u, 0.0)), 0.0)
    bound = 16 * EPS32 * (np.abs(old) + w.each(a.compensated.scale) + size + np.abs(u) + np.abs(x))
    near(w.of(after.compensated.numbers), np.where(here, c * step.share, old), bound)
    for before, now, expected, slack in (
        (a.exp_avg, after.exp_avg, m, size / w.k(Coef.STEP_SIZE) + np.abs(m)),
        (a.exp_avg_sq, after.exp_avg_sq, v, v),
    ):
        if before is not None:
            still = ~here | bad | held
            near(
                w.of(now), np.where(still, w.of(before), expected), 16 * EPS32 * np.where(still, 0.0, slack) + SMALLEST
            )
    if step.moves:
        w.moved(after, np.where(moves, x - u, w.flat(a.params)), bound / 8 / EPS32)
    else:
        found = unpacked(after.bits) > 0
        certain = here & (np.abs(c) > bound)
        assert (found[certain] == (c[certain] > 0)).all()
    own = slice(a.chunks.first, a.chunks.last)
    bad &= not held
    flags = [int(Flag.NONFINITE) * bool((bad & (chunks == k)).any()) for k in range(len(a.bits))]
    if a.header.words.stride(0):
        told = a.header.words.clone()
        if not step.moves:
            told[own, [Word.STEP, Word.DIGEST, Word.TAG, Word.SIGNAL]] = torch.tensor(
                [a.header.number, int(folded(a.header.digest)), a.header.tag, 0], dtype=torch.int32
            )
            told[own, Word.FLAGS] |= a.header.flags
        told[own, Word.FLAGS] |= torch.tensor(flags, dtype=torch.int32)[own]
        same(after.header.words, told)
    blocks = w.rows(here)[:, 0]
    assert not after.compensated.scale[blocks].any()
    assert after.compensated.limit[blocks].isinf().all()
