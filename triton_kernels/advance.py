"""The clock: counts steps, and makes the table of coefficients of the coming one.

``advance`` does both at once. Where a step has launches that can do it on the way, ``finish`` makes those columns anew
that a count or a learning rate changes (``renew_kernel``), and ``apply_momentum`` counts (``count_kernel``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import rules
from .jit import jit, tl
from .nouns import Coefficients, Count, DoublePerTensor, Flag, PerTensor
from .op import op
from .rules import (
    COLUMNS,
    CORRECTION1,
    CORRECTION2,
    DECAY,
    EPS,
    FLOOR,
    GROUP_COLUMNS,
    LR,
    MOST_STEPS,
    ONE_MINUS_BETA1,
    RSQRT_BIAS2,
    STEP_SIZE,
    UNBIAS1,
    UNIT,
    WEIGHT_DECAY,
)

WIDTH = 64
"""Tensors of a program, a lane to each."""
ROOM = 32  # columns that a program handles, a power of two


@jit()
def power(x, t):
    """beta^t, 0 where t is as good as infinite, float64 [WIDTH]."""
    few = t < MOST_STEPS
    n = tl.where(few, t, 0.0).to(tl.int64)
    y = x * 0.0 + 1.0
    while tl.max(n, axis=0) > 0:
        y = rules.squared(y, x, n)
        x = x * x
        n = n >> 1
    return tl.where(few, y, 0.0)


@jit()
def _count(seen, count):
    """Count a step with these flags, by one program."""
    tl.store(count.updates, tl.load(count.updates) + (seen == 0).to(tl.int64))
    if count.number is not None:
        tl.store(count.number, tl.load(count.number) + 1)
    if count.replays is not None:
        tl.store(count.replays, tl.load(count.replays) + 1)
        tl.store(count.replays + 1, tl.load(count.replays + 1) + (seen != 0).to(tl.int64))
        tl.store(count.replays + 2, tl.load(count.replays + 2) + ((seen & count.veto) != 0).to(tl.int64))
        tl.store(count.replays + 3, tl.load(count.replays + 3) + ((seen & count.bad) != 0).to(tl.int64))


@jit()
def count_kernel(p, flags, count, steps, tensors, WIDTH: tl.constexpr):
    """Count a step of WIDTH tensors; the first of programs, all else."""
    seen = tl.load(flags)
    t = p * WIDTH + tl.arange(0, WIDTH)
    counted = (t < tensors) & (seen == 0)
    if count.absent is not None:
        counted = counted & (tl.load(count.absent + t, mask=counted, other=1) == 0)
    tl.store(steps + t, tl.load(steps + t, mask=counted, other=0.0) + 1.0, mask=counted)
    if p == 0:
        _count(seen, count)


@jit()
def _add_up(moved, stride, t, inside, step_size, decay, BEGINS: tl.constexpr):
    """Add a step to those of a round; return how far all of them go, and how much they leave of the parameters."""
    total = tl.zeros([WIDTH], tl.float32)
    kept = total + 1.0
    if not BEGINS:
        total = tl.load(moved + t, mask=inside, other=0.0)
        kept = tl.load(moved + stride + t, mask=inside, other=1.0)
    total = total + step_size
    kept = kept * decay
    tl.store(moved + t, total, mask=inside)
    tl.store(moved + stride + t, kept, mask=inside)
    return total, kept


@jit()
def renew_kernel(p, coefficients, WIDTH: tl.constexpr):
    """Make LR, STEP_SIZE, DECAY and UNBIAS1 of WIDTH tensors anew; where ``moved``, for all steps of the round."""
    t = p * WIDTH + tl.arange(0, WIDTH)
    inside = t < coefficients.tensors
    group = tl.load(coefficients.group_of + t, mask=inside, other=0).to(tl.int64)
    row = coefficients.groups + group * GROUP_COLUMNS
    if coefficients.lr is None:
        rate = tl.load(row + LR, mask=inside, other=0.0)
    else:
        rate = tl.load(coefficients.lr + group, mask=inside, other=0.0).to(tl.float64)
    done = tl.load(coefficients.steps + t, mask=inside, other=0.0)
    power1 = power(tl.load(row + CORRECTION1, mask=inside, other=0.0), done + 1.0)
    decay = tl.load(row + WEIGHT_DECAY, mask=inside, other=0.0)
    step_size, kept, _, unbias = rules.coefficients(rate, decay, power1, power1 * 0.0)
    if coefficients.mean_sq is not None:
        step_size = rules.seen(step_size, tl.load(coefficients.mean_sq + t, mask=inside, other=0.0))
    far, left = step_size.to(tl.float32), kept.to(tl.float32)
    if coefficients.moved is not None:
        total, left = _add_up(coefficients.moved, coefficients.moved_stride, t, inside, far, left, False)
        far = tl.div_rn(total, coefficients.length.to(tl.float32))
    k = coefficients.table + t.to(tl.int64) * COLUMNS
    tl.store(k + LR, rate.to(tl.float32), mask=inside)
    tl.store(k + STEP_SIZE, far, mask=inside)
    tl.store(k + DECAY, left, mask=inside)
    tl.store(k + UNBIAS1, unbias.to(tl.float32), mask=inside)


def programs_of(tensors: Tensor | None) -> int:
    """Return how many programs ``count_kernel`` and ``renew_kernel`` are, of a number for each of ``tensors``."""
    return 0 if tensors is None else max(1, -(-len(tensors) // WIDTH))


def _add_up_plainly(moved: Tensor, coef: Tensor, begins: bool) -> None:
    """Add the step of ``coef`` to those of a round."""
    if begins:
        moved[0], moved[1] = 0.0, 1.0
    moved[0] += coef[:, STEP_SIZE]
    moved[1] *= coef[:, DECAY]


def renew_plainly(of: Coefficients | None) -> None:
    """Do what ``renew_kernel`` does, for all tensors; nothing where nothing is renewed."""
    if of is None or of.groups is None:
        return
    assert of.group_of is not None
    assert of.steps is not None
    values = of.groups.index_select(0, of.group_of)
    rate = values[:, LR] if of.lr is None else of.lr.double().index_select(0, of.group_of)
    power1 = plain_power(values[:, CORRECTION1], of.steps + 1)
    step_size, decay, _, unbias = rules.coefficients(rate, values[:, WEIGHT_DECAY], power1, power1 * 0.0)
    step_size = step_size if of.mean_sq is None else rules.seen(step_size, of.mean_sq)
    for column, each in ((LR, rate), (STEP_SIZE, step_size), (DECAY, decay), (UNBIAS1, unbias)):
        of.table[:, column] = each
    if of.moved is not None:
        _add_up_plainly(of.moved, of.table, False)
        # By a tensor: by a number torch would multiply with its reciprocal on a GPU.
        of.table[:, STEP_SIZE] = of.moved[0] / torch.full_like(of.moved[0], of.length)
        of.table[:, DECAY] = of.moved[1]


@jit()
def advance_kernel(
    coefficients, count, flags, entered, unit, rho, RENEWS: tl.constexpr, BEGINS: tl.constexpr, WIDTH: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """Count a step, and make the table for the coming one. Grid: ceil(tensors / WIDTH), at least 1.

    About 8 * ROOM + 32 bytes read and 4 * COLUMNS + 16 written per tensor.
    """
    p = tl.program_id(0)
    t = p * WIDTH + tl.arange(0, WIDTH)
    inside = t < coefficients.tensors
    group = tl.load(coefficients.group_of + t, mask=inside, other=0).to(tl.int64)
    row = coefficients.groups + group * GROUP_COLUMNS
    done = tl.load(coefficients.steps + t, mask=inside, other=0.0)
    made = done
    if entered is not None:
        made = tl.load(entered + t, mask=inside, other=0.0)
    if coefficients.moved is not None:
        ended = coefficients.table + t * COLUMNS
        far = tl.load(ended + STEP_SIZE, mask=inside, other=0.0)
        left = tl.load(ended + DECAY, mask=inside, other=1.0)
        _add_up(coefficients.moved, coefficients.moved_stride, t, inside, far, left, BEGINS)
    tl.debug_barrier()  # all warps, which share lanes, have read what is about to be written
    if flags is not None:
        seen = tl.load(flags)
        counted = inside & (seen == 0)
        if count.absent is not None:
            counted = counted & (tl.load(count.absent + t, mask=inside, other=1) == 0)
        done += counted.to(tl.float64)
        tl.store(coefficients.steps + t, done, mask=inside)
        if entered is None:
            made = done
        elif RENEWS:
            made += counted.to(tl.float64)
            tl.store(entered + t, made, mask=inside)
        if p == 0:
            _count(seen, count)
    if entered is None or RENEWS:
        made = made + 1.0
    made = tl.maximum(made, 1.0)
    if coefficients.lr is None:
        rate = tl.load(row + LR, mask=inside, other=0.0)
    else:
        rate = tl.load(coefficients.lr + group, mask=inside, other=0.0).to(tl.float64)
    power1 = power(tl.load(row + CORRECTION1, mask=inside, other=0.0), done + 1.0)
    power2 = power(tl.load(row + CORRECTION2, mask=inside, other=0.0), made)
    decay = tl.load(row + WEIGHT_DECAY, mask=inside, other=0.0)
    step_size, kept, root, unbias = rules.coefficients(rate, decay, power1, power2)
    if rho is not None:
        root = root * tl.sqrt(tl.load(rho + t, mask=inside, other=1.0).to(tl.float64))
    share = tl.load(row + ONE_MINUS_BETA1, mask=inside, other=0.0)
    eps = tl.load(row + EPS, mask=inside, other=0.0)
    if coefficients.mean_sq is not None:
        mean = tl.load(coefficients.mean_sq + t, mask=inside, other=0.0)
        step_size = rules.seen(step_size, mean)
        share = rules.seen(share, mean)
        eps = rules.floored(eps, tl.load(row + FLOOR, mask=inside, other=0.0), mean, root)
    of_group = tl.arange(0, ROOM)[None, :]
    here = inside[:, None] & (of_group < COLUMNS)
    values = tl.load(row[:, None] + of_group, mask=here, other=0.0)
    values = tl.where(of_group == LR, rate[:, None], values)
    values = tl.where(of_group == STEP_SIZE, step_size[:, None], values)
    values = tl.where(of_group == DECAY, kept[:, None], values)
    values = tl.where(of_group == RSQRT_BIAS2, root[:, None], values)
    values = tl.where(of_group == UNBIAS1, unbias[:, None], values)
    values = tl.where(of_group == ONE_MINUS_BETA1, share[:, None], values)
    values = tl.where(of_group == EPS, eps[:, None], values)
    if unit is not None:
        scale = tl.load(unit + t, mask=inside, other=1.0).to(tl.float64)
        values = tl.where(of_group == UNIT, scale[:, None], values)
    tl.store(coefficients.table + t[:, None] * COLUMNS + of_group, values.to(tl.float32), mask=here)


def count_plainly(flags: Tensor, count: Count) -> Tensor:
    """Count a step; return of which tensors, float64 [tensors] or []."""
    seen = flags[0]
    taken = seen == 0
    assert count.updates is not None
    count.updates.add_(taken)
    if count.number is not None:
        count.number.add_(1)
    if count.replays is not None:
        each = [torch.ones_like(seen), seen != 0, (seen & count.veto) != 0, (seen & count.bad) != 0]
        count.replays.add_(torch.stack([every.long() for every in each]))
    return (taken if count.absent is None else taken & (count.absent == 0)).double()


def plain_power(x: Tensor, t: Tensor) -> Tensor:
    """beta^t, 0 where t is as good as infinite, float64."""
    few = t < MOST_STEPS
    n = torch.where(few, t, 0.0).long()
    bits = 32 if n.device.type != "cpu" else int(n.max()).bit_length() if n.numel() else 0
    y = torch.ones_like(x)
    for _ in range(bits):
        y, x, n = rules.squared(y, x, n), x * x, n >> 1
    return torch.where(few, y, 0.0)


@op(
    advance_kernel,
    writes=(
        *("count.updates", "count.number", "count.replays", "entered"),
        *("coefficients.steps", "coefficients.moved", "coefficients.table"),
    ),
    derive={
        "programs": ("i32", lambda coefficients_tensors: max(1, -(-coefficients_tensors // WIDTH))),
        "num_warps": ("i32", lambda: 4),
        "WIDTH": ("constexpr", lambda: WIDTH),
        "ROOM": ("constexpr", lambda: ROOM),
    },
)
def advance(
    coefficients: Coefficients, count: Count, flags: Flag | None, entered: DoublePerTensor | None, renews: bool,
    unit: PerTensor | None, begins: bool, rho: PerTensor | None = None,
) -> None:  # fmt: skip
    """Count a step unless it was skipped, and make the table of coefficients for the coming one.

    Args:
        coefficients: All of the table is written, and updates of each tensor. Where ``moved``, the table of the step
            that ends is read, which is added, and ``length`` is not.
        count: What else is written where a step ends.
        flags: int32 [1] of the step that ends, not 0 where it was skipped; None: nothing is counted.
        entered: Written where ``renews``: updates that have entered each tensor's variance, infinite
            where it is corrected already; None: all.
        renews: Whether the step that ends has entered it, and the coming one will, too.
        unit: The column UNIT; None: that of groups.
        begins: Whether the step that ends is a round's first.
        rho: What v is multiplied with in denominators; None: nothing.
    """
    groups, lr, group_of, steps, mean_sq, table, moved, _ = coefficients
    assert groups is not None
    assert group_of is not None
    assert steps is not None
    if moved is not None:
        _add_up_plainly(moved, table, begins)
    if flags is not None:
        counted = count_plainly(flags, count)
        steps += counted
        if entered is not None and renews:
            entered += counted
    values = groups.index_select(0, group_of)
    made = steps + 1 if entered is None else (entered + int(renews)).clamp(min=1)
    rate = values[:, LR] if lr is None else lr.double().index_select(0, group_of)
    powers = plain_power(torch.stack([values[:, CORRECTION1], values[:, CORRECTION2]]), torch.stack([steps + 1, made]))
    step_size, decay, root, unbias = rules.coefficients(rate, values[:, WEIGHT_DECAY], *powers)
    root = root if rho is None else root * rho.double().sqrt()
    share, eps = values[:, ONE_MINUS_BETA1], values[:, EPS]
    if mean_sq is not None:
        eps = rules.floored(eps, values[:, FLOOR], mean_sq, root)
        step_size, share = rules.seen(step_size, mean_sq), rules.seen(share, mean_sq)
    made_here = {LR: rate, STEP_SIZE: step_size, DECAY: decay, RSQRT_BIAS2: root, UNBIAS1: unbias}
    made_here |= {ONE_MINUS_BETA1: share, EPS: eps}
    if unit is not None:
        made_here[UNIT] = unit.double()
    for column, each in made_here.items():
        values[:, column] = each
    table.copy_(values[:, :COLUMNS])
