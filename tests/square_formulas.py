"""What ops sum of gradients and tell of their squares, once more in float64; see ``op_formulas``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from op_arguments import Array, wide
from op_formulas import EPS32, SMALLEST, Wide, close, formula, near, same, sign
from torch import Tensor

from fusedonebit.triton_kernels import LARGEST_GRADIENT, TAIL, Coef
from fusedonebit.triton_kernels.codes import decode
from fusedonebit.triton_kernels.headers import Flag
from fusedonebit.triton_kernels.squares import random_signs


def laid(a: Any, numel: int) -> Array:
    """An op's tensors side by side, from block to block."""
    line, at = np.zeros(numel), 0
    for n, x in zip(a.sizes, a.tensors, strict=True):
        line[at : at + x.numel()] = wide(x)
        at += -(-n // a.block_size) * a.block_size
    return line


@formula
def flatten(a: Any, after: Any) -> None:
    """All times a factor, and a mark where squares would overflow."""
    line = laid(a, len(a.out) - TAIL) * (1.0 if a.unscale is None else float(a.unscale))
    close(after.out[:-TAIL], line * a.factor, 2 * EPS32, SMALLEST)
    marked = not (np.abs(line) <= LARGEST_GRADIENT).all()
    same(after.out[-TAIL:], [1.0 if marked else float(a.out[-TAIL]), *a.out[1 - TAIL :].tolist()])


@formula
def gradient_squares(a: Any, after: Any) -> None:
    """Sums in float64 of what is not bad; the norm is told of the gradient without the loss scale."""
    line, scale = laid(a, len(a.squares) * a.block_size), 1.0 if a.loss_scale is None else float(a.loss_scale)
    counted = np.where(np.abs(line) <= np.float32(np.float32(a.largest) * np.float32(scale)), line, 0.0)
    expected = (counted**2).reshape(-1, a.block_size).sum(1)
    close(after.squares, expected, 1e-12)
    close(after.total, expected.sum(), 1e-12)
    if a.told is not None:
        found = a.found_inf is not None and float(a.found_inf) > 0
        told = [float(found), np.sqrt(expected.sum()) / scale, *([] if a.earlier is None else a.earlier.tolist())]
        close(after.told, told, 2 * EPS32)


def decoded(codes: Any, block: int) -> Tensor:
    return decode(codes.numbers.reshape(-1, block), codes.exponents.reshape(-1))


def projected(w: Wide, after: Any, first: int, rows: int) -> None:
    """Sums of neighbours of the gradient, with random signs, the same on all ranks."""
    a = w.before
    g = np.where(w.live, w.flat(a.grads), 0.0) * (1.0 if a.factor is None else float(a.factor))
    signs = random_signs(a.updates, first, (len(w.owner), w.block)).numpy()
    line, told = w.rows(g) * signs, after.projections.view(rows, -1)
    for b, (share, place) in enumerate(zip(a.share.tolist(), a.place.tolist(), strict=True)):
        sums = line[b].reshape(-1, share).sum(1)
        found = told[b // (len(w.owner) // rows), place : place + len(sums)]
        near(found, sums, 1e-5 * np.abs(line[b]).reshape(-1, share).sum(1) + 1e-38)


@formula
def tell_squares(w: Wide, after: Any) -> None:
    a, own = w.before, w.rows(w.of(w.before.worker_sq.numbers))
    found, largest = decoded(after.logs, w.block).numpy(), own.max(1, keepdims=True)
    seen = own > largest * 2.0**-30
    close(found[seen], own[seen], 1 / 16 + 1e-6)
    assert not found[own < largest * 2.0**-33].any()
    projected(w, after, a.first_block, len(after.projections))
    g = np.where(w.live, w.flat(a.grads), 0.0) * (1.0 if a.factor is None else float(a.factor))
    square = w.rows(g.astype(np.float32).astype(np.float64)) ** 2  # a product below float32's least is 0
    weight = np.maximum(square.sum(1), 1e-300)
    for found, of in zip(after.peaks.transpose(0, 1).reshape(2, -1), (square, own), strict=True):
        mean = (square * of).sum(1) / weight
        close(found, np.where(mean <= np.finfo(np.float32).max, mean, np.finfo(np.float32).max), 1e-6, 1e-38)


@formula
def tell_level(w: Wide, after: Any) -> None:
    v = np.where(w.live, w.of(w.before.exp_avg_sq), 0.0)
    close(after.sums, w.rows(v).sum(1), 1e-6)
    projected(w, after, 0, 1)


@formula
def average_squares(w: Wide, after: Any) -> None:
    a = w.before
    each = [decode(n.view(-1, w.block), e) for n, e in zip(*a.arrived, strict=True)]
    mean, found = torch.stack(each).double().mean(0).numpy(), decoded(after.mean, w.block).double().numpy()
    seen = mean > mean.max(1, keepdims=True) * 2.0**-30
    close(found[seen], mean[seen], 1 / 16 + 1e-6, 2.0**-128)
    told, live = found * w.rows(w.live), w.rows(w.live)
    close(after.sums[0], np.minimum(told.sum(1), np.finfo(np.float32).max), 1e-6)
    same(after.sums[1], ((found > 0) & live).sum(1).astype(np.float32))
    for b, (share, place) in enumerate(zip(a.share.tolist(), a.place.tolist(), strict=True)):
        projection = a.arrived_projections[:, place : place + w.block // share].double().mean(0)
        square = float(projection.square().sum())  # infinite where that of any worker is
        close(after.sums[2, b], square, 1e-5)
    close(after.sums[3:], a.arrived_peaks.double().mean(0), 1e-6)


@formula
def renew(w: Wide, after: Any) -> None:
    """What was divided by the old denominator is then divided by the new one."""
    a, old = w.before, w.variance(w.before.exp_avg_sq)
    inside, signs = a.exp_avg_sq.eps_inside_sqrt, a.exp_avg
    new = np.where(w.live, w.renewed(a.means, a.factors), 0.0)
    if a.compensated is not None:
        c, s = w.of(a.compensated.numbers), w.each(a.scale)
        kept, size = c - s * sign(c, a.ternary), np.abs(c) + s
        if signs is not None:
            kept, size = w.k(Coef.BETA1) * w.momentum(signs) + kept, size + w.each(signs.scale)
            assert not after.exp_avg.scale.any()
        unit = np.where(old > 0, w.denom(old, inside) / w.denom(new, inside), 1.0)
        near(w.of(after.compensated.numbers), np.where(w.live, kept * unit, 0.0), 1e-5 * size * unit + 1e-38)
        close(after.settled, wide(a.settled) + wide(a.scale), 4 * EPS32)
        assert not after.scale.any()
    if a.exp_avg_sq.factors is None:
        close(w.of(after.exp_avg_sq.numbers), new if a.writes else old, 4 * EPS32)
    else:
        kept = a.means if a.writes else a.exp_avg_sq
        same(after.exp_avg_sq.numbers, kept.numbers.reshape(-1))
        same(after.exp_avg_sq.exponents, kept.exponents.reshape(-1))


def followed(levels: Tensor, kept: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """The EMA of a square, and of its weights."""
    return kept * levels[0] + (1 - kept) * square, kept * levels[1] + (1 - kept)


@formula
def follow_level(a: Any, after: Any) -> None:
    before, count, first = a.levels.double(), int(a.first[-1]), a.first.tolist()
    mean = a.told.double() / a.world_size
    square = torch.stack([mean[x:y].square().sum() for x, y in pairwise(first)])
    beta2, done = a.coef[:, Coef.BETA2].double(), a.steps + 1
    expected = torch.stack([*followed(before, beta2 ** (done - before[2]).clamp(min=1), square), done])
    share = expected[0] / expected[1] / (mean[count:] / (1 - beta2**done))
    share = torch.where(mean[count:] > 0, share.clamp(1 / a.world_size, 1.0), 1.0)
    counts = square.isfinite() & (square > 0) & (int(a.flags) == 0)
    if a.absent is not None:
        counts &= a.absent == 0
    close(after.levels, torch.where(counts, expected, before), 1e-5, 1e-30)
    close(after.rho, torch.where(counts, share, a.rho.double()), 0.0, 1e-5)


@formula
def renew_levels(a: Any, after: Any) -> None:
    by_block, before = a.sums.transpose(0, 1).reshape(5, -1).double(), a.levels.double()
    sums = [by_block[:, x:y].sum(1) for x, y in pairwise(a.first_block.tolist())]
    total, alive, square, peak, met = torch.stack(sums, 1)
    beta2 = a.coef[:, Coef.BETA2].double()
    kept = beta2 ** (a.steps - before[3]).clamp(min=1)
    level, weight = followed(before, kept, square)
    counts = square.isfinite() & (int(a.flags) & ~int(Flag.VETO) == 0)
    seen = counts & (met > 0) if a.absent is None else counts & (met > 0) & (a.absent == 0)
    counts &= (square != 0) | (level >= before[4] / 4)  # an idle tensor's level stays
    if a.absent is not None:
        counts &= a.absent == 0
    level, weight = torch.where(counts, level, before[0]), torch.where(counts, weight, before[1])
    share = torch.where(seen & (weight > 0), ((1 - beta2) * peak / met / weight).clamp(max=1.0), 1 / 8)
    share = share.clamp(min=a.floor)
    corrected = torch.where((total > 0) & (level > 0), level / weight.clamp(min=1e-30), 0.0)
    mean = corrected / alive.clamp(min=1e-30)
    lives = mean.nan_to_num() > 1e-38
    factors = torch.stack([corrected / total.clamp(min=1e-30), mean, mean * share]).nan_to_num()
    close(after.factors, torch.where(lives, factors, torch.stack([0 * mean, a.mean_sq, a.mean_sq])), 1e-6, 1e-38)
    mean_sq = after.factors[1].double()  # of a tensor without a level, or without squares, as it was
    same(after.mean_sq, mean_sq)
    same(after.last, a.factors)
    held = torch.where(counts & (square > 0), level, before[4])
    expected = torch.stack([level, weight, mean_sq, torch.where(counts, a.steps, before[3]), held])
    close(after.levels, expected, 1e-6)
    same(after.entered, torch.where(lives, torch.inf, a.entered))
    assert int(after.woken) == int(a.woken) + int((lives & (a.mean_sq == 0)).sum())
