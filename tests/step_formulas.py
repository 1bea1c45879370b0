"""What ops compute of numbers by block, by layer and by rank, once more in float64; see ``op_formulas``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from op_arguments import Array, wide
from op_formulas import EPS32, ROUNDED, agreed, close, formula, near, same
from torch import Tensor

from fusedonebit.triton_kernels import SCALE_NORMS, Coef, Group, Layer, rules
from fusedonebit.triton_kernels.headers import Flag, Word, folded

# ---------------------------------------------------------------- a step's scales, flags and digest


def scales(a: Any, after: Any) -> None:
    """Scales are norms of what counts, and so is what they leave; of what compressing leaves ``test_ops`` tells."""
    ternary, segments, norm, left = len(a.partials) == 3, a.segments, list(SCALE_NORMS)[a.norm], 0.0
    for j, (begin, end) in enumerate(pairwise(segments.start.tolist())):
        absolute, squares, *nonzero = a.partials[:, begin:end].sum(1).tolist()
        n = nonzero[0] if ternary else float(segments.live[j])
        l1, l2 = (absolute / n, (squares / n) ** 0.5) if n > 0 else (0.0, 0.0)
        s = {"l1": l1, "l2": l2, "contractive": min(l2, 1.9 * l1), "relaxed": min(1.3 * l2, 1.9 * l1)}[norm]
        close(after.segments.measured[j], s, ROUNDED)
        left += squares - 2 * s * absolute + n * s * s
    signal = after.words.view(-1, len(Word))[:, Word.SIGNAL].contiguous().view(torch.float32)
    close(signal, max(left, 0.0) ** 0.5, 1e-5, 1e-3)


def told(a: Any, words: Tensor, *flags: int) -> None:
    """The header says the number of the step, the tag and flags, and none is pending any more."""
    header = a.header
    number = header.number if header.counter is None else int(header.counter) + header.counts
    number = (number + 2**31) % 2**32 - 2**31
    assert (words[:, [Word.STEP, Word.TAG]] == torch.tensor([number, header.tag])).all()
    assert (words[:, Word.FLAGS] == header.flags | int(header.pending)).all()


def renewed(of: Any, table: Tensor) -> None:
    """LR, STEP_SIZE, DECAY and UNBIAS1 of the step that is taken; of the last of a round the mean, and the product."""
    if of is None or of.groups is None:
        return
    row = of.groups[of.group_of.long()].numpy()
    rate = row[:, Coef.LR] if of.lr is None else of.lr.double().numpy()[of.group_of.long()]
    bias1 = bias(row[:, Group.CORRECTION1], of.steps.numpy() + 1)
    step, decay = rate / bias1, 1 - rate * row[:, Coef.WEIGHT_DECAY]
    step = step * (1 if of.mean_sq is None else of.mean_sq.numpy() > 0)
    if of.moved is not None:
        step, decay = (of.moved[0].numpy() + step) / of.length, of.moved[1].numpy() * decay
    expected = {Coef.LR: rate, Coef.STEP_SIZE: step, Coef.DECAY: decay, Coef.UNBIAS1: 1 / bias1}
    for column, each in expected.items():
        near(table[:, column], each, 4 * EPS32 * np.maximum(np.abs(each), column == Coef.DECAY))


def bias(beta: Array, t: Array) -> Array:
    """1 - beta^t."""
    return -np.expm1(t * np.log(beta))


@formula
def finish(a: Any, after: Any) -> None:
    scales(a, after)
    told(a, after.words)
    assert (after.words[:, Word.DIGEST] == folded(a.digest)).all()
    assert not after.header.pending.any()
    renewed(a.coefficients, None if a.coefficients is None else after.coefficients.table)
    if len(a.segments.live):
        by_message = a.segment.view(len(after.words), -1)
        slot = (by_message - by_message[:, :1]).long()
        same(torch.gather(after.message_scales, 1, slot).view(-1), after.segments.measured[a.segment.long()])


def refused(a: Any, after: Any, scale: Tensor, coef: Tensor, nothing: bool = False) -> bool:
    """Whether there is a limit, and the update is beyond it; its norm is kept."""
    if a.limit is None:
        return False
    each = scale.double() * coef[:, Coef.UNBIAS1].double()[a.limit.block_tensor.long()] * a.limit.weight.double()
    norm = 0.0 if nothing else float(each.square().sum().sqrt())
    close(after.limit.norm, norm, 1e-12)
    return not norm <= float(a.limit.largest)


@formula
def finish_alone(a: Any, after: Any) -> None:
    scales(a, after)
    told(a, after.words)
    own, table = a.header.flags | int(a.header.pending), None if a.coefficients is None else after.coefficients.table
    renewed(a.coefficients, table)
    scale = torch.repeat_interleave(after.segments.measured, a.segments.start.diff())
    found = own | int(Flag.VETO) * refused(a, after, scale, table, own != 0)
    assert int(after.flags) == found
    for each in (after.scale, after.worker_scale):
        same(each, scale * (found == 0))
    assert not after.worker_settled.any()


def taken(count: Any, now: Any, flags: int, tensors: int) -> Array:
    """A step counts where it was taken and somebody had a gradient; a skipped one in messages and replays alone."""
    assert int(now.updates) == int(count.updates) + (flags == 0)
    if count.number is not None:
        assert int(now.number) == (int(count.number) + 1 + 2**31) % 2**32 - 2**31
    if count.replays is not None:
        each = [1, flags != 0, flags & count.veto != 0, flags & count.bad != 0]
        assert (now.replays - count.replays).tolist() == each
    absent = np.zeros(tensors) if count.absent is None else count.absent.numpy()
    return ((absent == 0) & (flags == 0)).astype(float)


def added(*values: Tensor | None) -> Tensor:
    """The wrapping sum of all 8-byte words, int64 []."""
    return torch.stack([x.contiguous().view(torch.int64).sum() for x in values if x is not None]).sum()


def checksum_of(*values: Tensor | None) -> Tensor:
    """The word that tells all bits of ``values``, int32 []: of messages, of headers, and of a count."""
    return folded(added(*values))


@formula
def receive(a: Any, after: Any) -> None:
    words, parts = a.arrived.words, len(a.arrived.own_words)
    each = zip(words.chunk(parts), a.arrived.own_words, strict=True)
    found = int(np.bitwise_or.reduce([agreed(*of_part, torch.tensor(0)) for of_part in each]))
    rows = a.arrived.summed.chunk(parts)
    same(after.digest.sums, [added(row, a.digest.updates) for row in rows])
    by_message = a.worker.segment.view(len(words), -1)
    scale = torch.gather(a.arrived.scales, 1, (by_message - by_message[:, :1]).long()).view(-1) * (found == 0)
    found |= int(Flag.VETO) * refused(a, after, scale, None if a.limit is None else a.limit.coef)
    assert int(after.flags) == found
    same(after.scale, scale * (found == 0))
    averaged = (words[:, Word.FLAGS] == 0).repeat_interleave(by_message.shape[1])
    same(after.worker.scale, a.worker.measured[a.worker.segment.long()] * averaged)
    same(after.server.scale, a.server.measured[a.server.segment.long()] * (found == 0))
    assert not after.worker.settled.any()
    assert not after.server.settled.any()


@formula
def close_parts(a: Any, after: Any) -> None:
    found = int(np.bitwise_or.reduce(a.found.numpy()))
    found |= int(Flag.VETO) * refused(a, after, a.scale, None if a.limit is None else a.limit.coef, found != 0)
    assert int(after.flags) == found
    assert after.found.tolist() == [found] * len(a.found)
    stays = (a.found != 0) | (found == 0)
    for before, now in ((a.scale, after.scale), (a.kept, after.kept)):
        same(now.view(len(stays), -1), before.view(len(stays), -1) * stays[:, None])


@formula
def close_round(a: Any, after: Any) -> None:
    found = agreed(a.received.words, a.received.own_words, a.hold)
    assert int(after.flags) == found
    same(after.digest.sums, [added(a.received.summed, a.received.heads, a.digest.updates)])
    cleared = a.received.words.clone()
    cleared[:, Word.FLAGS] = 0
    same(after.received.words, cleared)
    assert int(after.received.own_words[Word.FLAGS]) == 0
    k = a.coef[a.block_tensor.long()].double()
    eta_s = (k[:, Coef.LR] * k[:, Coef.GLOBAL_RATIO] * a.steps).numpy()
    goes = eta_s * (found == 0)
    close(after.left.scale, goes, 3 * EPS32)
    same(after.left.taken, after.left.scale * a.signs)
    most = np.where(eta_s > 0, eta_s * a.most, np.inf) if a.signs else np.full_like(eta_s, a.most)
    close(after.left.limit, most if found == 0 else np.full_like(most, np.inf), 4 * EPS32)


@formula
def scale_coefficients(a: Any, after: Any) -> None:
    """As torch clips the mean of ranks' norms; an inf found now holds the step, one found earlier is only told."""
    found, norm, *earlier = a.told.tolist()
    scale = np.float32(1.0 if a.loss_scale is None else float(a.loss_scale))
    mean = np.float32(norm) / np.float32(a.world_size) if a.clips else np.float32(0.0)
    factor = np.float32(1.0) / scale
    if a.clips:
        clip = np.float32(1.0) / (mean + np.float32(1e-6)) * np.float32(a.max_norm)
        factor = factor * (np.float32(1.0) if clip > 1 else clip)
    expected = a.coef.numpy().copy()
    for column in (Coef.ONE_MINUS_BETA1, Coef.ONE_MINUS_BETA2, Coef.ONE_MINUS_BETA2)[: a.weighs]:
        expected[:, column] *= factor
    expected[:, Coef.GRAD_LIMIT] *= scale
    ranks = found + sum(earlier)
    close(after.outcome, [factor, mean, ranks, ranks > 0], 4 * EPS32)
    close(after.scaled, expected, 8 * EPS32)
    held = int(Flag.OVERFLOW) * (found > 0) | int(Flag.LOCAL) * (0 < found < a.world_size)
    assert int(after.hold) == held
    if a.digest is not None:
        same(after.digest, [int(a.digest[0] + a.told.view(torch.int32).sum()), *a.digest.tolist()[1:]])


@formula
def advance(a: Any, after: Any) -> None:
    of, now = a.coefficients, after.coefficients
    row = of.groups[of.group_of.long()].numpy()
    counted = np.zeros(len(row)) if a.flags is None else taken(a.count, after.count, int(a.flags), len(row))
    same(now.steps, of.steps.numpy() + counted)
    made = now.steps.numpy() + 1
    if a.entered is not None:
        same(after.entered, a.entered.numpy() + counted * a.renews)
        made = np.maximum(after.entered.numpy() + a.renews, 1)
    if of.moved is not None:
        begun = np.array([[0.0], [1.0]]) if a.begins else of.moved.double().numpy()
        sums = begun[0] + of.table[:, Coef.STEP_SIZE].numpy(), begun[1] * of.table[:, Coef.DECAY].numpy()
        close(now.moved, sums, 2 * EPS32)
    rate = row[:, Coef.LR] if of.lr is None else of.lr.double().numpy()[of.group_of.long()]
    bias1, bias2 = bias(row[:, Group.CORRECTION1], now.steps.numpy() + 1), bias(row[:, Group.CORRECTION2], made)
    root = bias2**-0.5 * (1 if a.rho is None else np.sqrt(a.rho.double().numpy()))
    expected = row[:, : len(Coef)].copy()
    expected[:, Coef.LR], expected[:, Coef.STEP_SIZE], expected[:, Coef.UNBIAS1] = rate, rate / bias1, 1 / bias1
    expected[:, Coef.DECAY], expected[:, Coef.RSQRT_BIAS2] = 1 - rate * row[:, Coef.WEIGHT_DECAY], root
    if of.mean_sq is not None:  # tensors without a variance wait, and others have a floor where there is one
        mean, floor = of.mean_sq.numpy(), row[:, Group.FLOOR]
        expected[mean <= 0, Coef.STEP_SIZE] = expected[mean <= 0, Coef.ONE_MINUS_BETA1] = 0.0
        floored = row[:, Coef.EPS] ** 2 + floor * mean * root**2
        expected[:, Coef.EPS] = np.where(floor > 0, floored, row[:, Coef.EPS])
    if a.unit is not None:
        expected[:, Coef.UNIT] = a.unit.numpy()
    near(now.table, expected, 1.2e-7 * np.abs(expected) + EPS32 * (np.arange(len(Coef)) == Coef.DECAY))


# ---------------------------------------------------------------- layers


def layers_of(a: Any, per_block: Tensor) -> list[Array]:
    """What a table of blocks holds of each layer; the last has the padding as well."""
    return [per_block[..., begin:end].double().numpy() for begin, end in pairwise(a.layer_start.tolist())]


def step_of(a: Any, after: Any, c: Array) -> None:
    """STEP_SIZE and DECAY follow from c; no other column was written."""
    lr, unbias, decay = (wide(a.coef[:, column]) for column in (Coef.LR, Coef.UNBIAS1, Coef.WEIGHT_DECAY))
    close(after.coef[:, Coef.STEP_SIZE], lr * c * unbias, ROUNDED)
    near(after.coef[:, Coef.DECAY], 1 - lr * c * decay, ROUNDED)
    rest = [column for column in Coef if column not in (Coef.STEP_SIZE, Coef.DECAY)]
    same(after.coef[:, rest], a.coef[:, rest])


def clipped(x: float, u: float, row: Array) -> float:
    return min(max(x / u, row[Coef.C_MIN]), row[Coef.C_MAX]) if x > 0 and u > 0 else 1.0


@formula
def lamb_coefficient(a: Any, after: Any) -> None:
    coef, layers = a.coef.double().numpy(), a.layers.double().numpy()
    each = zip(coef, layers[Layer.AVERAGE], layers_of(a, a.norms), strict=True)
    c, average = [], []
    for row, old, part in each:
        c.append(clipped(*np.sqrt(part.sum(1)), row))
        average.append(old if a.skips_ones and c[-1] == 1 else row[Coef.BETA3] * old + (1 - row[Coef.BETA3]) * c[-1])
    close(after.layers[Layer.COEFFICIENT], c, ROUNDED)
    close(after.layers[Layer.AVERAGE], average, ROUNDED)
    same(after.layers[Layer.RATIO], a.layers[Layer.RATIO])
    step_of(a, after, np.array(c))


@formula
def lamb_rescale(a: Any, after: Any) -> None:
    norms, r = None if a.norms is None else layers_of(a, a.norms), []
    for t, (row, found) in enumerate(zip(a.coef.double().numpy(), layers_of(a, a.largest), strict=True)):
        last, ratio = float(a.layers[Layer.RATIO, t]), found.max(initial=0.0)
        if ratio == 0:
            r.append(last)
            continue
        if norms is not None:
            adam, u = np.sqrt(norms[t].sum(1))
            share = min(adam / u, 1.0) if u > 0 else 1.0
            ratio = share * ratio + 1 - share
        change = (last * (1 - row[Coef.R_THRESHOLD]), last * (1 + row[Coef.R_THRESHOLD]))
        limits = (row[Coef.R_MIN], row[Coef.R_MAX])
        for low, high in (limits, change) if a.range_first else (change, limits):
            ratio = min(max(ratio, low), high)
        r.append(ratio)
    close(after.layers[Layer.RATIO], r, ROUNDED)
    c = wide(after.layers[Layer.RATIO]) * wide(a.layers[Layer.AVERAGE])
    close(after.layers[Layer.COEFFICIENT], c, ROUNDED)
    same(after.layers[Layer.AVERAGE], a.layers[Layer.AVERAGE])
    assert int(after.started) == 1
    step_of(a, after, c)


@formula
def lamb_follow(a: Any, after: Any) -> None:
    bits = a.scale.double() ** 2 * a.numel
    result, k = [], a.coef.double().numpy()
    for row, x2, of_bits, last in zip(
        k, layers_of(a, a.x_squares), layers_of(a, bits), wide(a.update_squares), strict=True
    ):
        x, unit = np.sqrt(x2.sum()), row[Coef.UNIT]
        now = (rules.SHARE_OF_NORM * row[Coef.UNBIAS1] / unit) ** 2 * of_bits.sum()
        following = last
        if now > 0:
            following = row[Coef.BETA3] * last + (1 - row[Coef.BETA3]) * now if last > 0 else now
        following = np.float32(following).astype(float)  # as it is kept
        c = [clipped(x, np.sqrt(squares + (row[Coef.WEIGHT_DECAY] * x) ** 2), row) for squares in (now, following)]
        result.append((following, min(unit, c[0]), c[1]))
    following, moved, c = (np.array(column) for column in zip(*result, strict=True))
    close(after.update_squares, following, ROUNDED)
    close(after.layers[Layer.COEFFICIENT], c, ROUNDED)
    same(after.coef[:, Coef.UNIT], after.layers[Layer.COEFFICIENT])
    # Bits are in the unit c_t, but it is the table's new one by which they are divided when they are applied.
    per_bits = wide(after.coef[:, Coef.STEP_SIZE]) / wide(after.coef[:, Coef.UNIT])
    expected = k[:, Coef.LR] * moved * k[:, Coef.UNBIAS1] / k[:, Coef.UNIT]
    close(per_bits, expected, 3 * EPS32)
    near(after.coef[:, Coef.DECAY], 1 - k[:, Coef.LR] * moved * k[:, Coef.WEIGHT_DECAY], ROUNDED)
