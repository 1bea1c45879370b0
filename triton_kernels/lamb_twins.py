"""The plain-torch twins of LAMB and 1-bit LAMB (Li et al., 2021): equation (2) and Algorithm 1.

Names: ``c`` a layer's coefficient, ``c_avg`` its moving average, ``r`` its ratio, one per tensor, in
the table ``layers``. What moves the parameters in the end are the columns ``STEP_SIZE`` and ``DECAY``
of ``coef``, which the two ops that compute coefficients write.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .coefficients import Coef, Layer
from .cpu_tiles import gather, tiles
from .eager import column, denom, move, only_live, scaled, square_sum
from .update_twins import moments


def lamb_update(
    params: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    eps_inside_sqrt: bool,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    skip: Tensor,
    exp_avg_sq_sums: Tensor | None,
    norms: Tensor,
) -> None:
    """LAMB's moments, and what the norms of x and u need (1-bit LAMB, eq. 2, lines 1 to 3).

        m = beta1*m + (1 - beta1)*g;  v = beta2*v + (1 - beta2)*g^2;  u = m/denom + wd*x

    Moves no parameter: first every layer's coefficient must be known.

    Args:
        params: Parameters of any float dtype, dense.
        sizes: Elements of each.
        block_size: Elements per block.
        grad: Averaged gradients, float32 [>= P].
        exp_avg: m, float32 [P], read and written.
        exp_avg_sq: v, float32 [P], read and written.
        eps_inside_sqrt: denom = sqrt(v + eps), as eq. (2) prints it, or sqrt(v) + eps.
        coef: float32 [tensors, columns of ``Coef``].
        block_tensor: int32 [B].
        live, live_row: Elements that count.
        skip: int32 [1]; where set nothing changes.
        exp_avg_sq_sums: float64 [B], written: sum of v per block (for the freeze rule); or None.
        norms: float64 [2, B], written: sums of x^2 and of u^2; those of padding stay as they are.
    """
    if skip:
        return
    for tile in tiles(sizes, 1, block_size, exp_avg.device):
        k = coef[block_tensor[tile.blocks]]
        g = only_live(grad[tile.start : tile.start + tile.numel].view(-1, block_size), live, live_row, tile)
        m, v = moments(g, exp_avg, exp_avg_sq, exp_avg_sq_sums, tile, k)
        x = only_live(gather(params, tile, block_size), live, live_row, tile)
        u = (m * column(k, Coef.UNBIAS1)).div_(denom(v, k, eps_inside_sqrt))
        u.add_(x * column(k, Coef.WEIGHT_DECAY))
        for row, values in enumerate((x, only_live(u, live, live_row, tile))):
            norms[row, tile.blocks] = square_sum(values)


def lamb_coefficient(
    norms: Tensor, layer_start: Tensor, skip: Tensor, deepspeed: bool, coef: Tensor, layers: Tensor
) -> None:
    """Each layer's coefficient and its moving average (eq. 2, line 4; Algorithm 1, line 2).

        c = clip(|x|/|u|, c_min, c_max), 1 where a norm is zero;  c_avg = beta3*c_avg + (1 - beta3)*c

    Args:
        norms: float64 [2, B]: sums of x^2 and of u^2.
        layer_start: int64 [tensors + 1], first block of each tensor, and B.
        skip: int32 [1]; where set nothing changes.
        deepspeed: Leave c == 1 out of the average, as DeepSpeed does.
        coef: float32 [tensors, columns of ``Coef``]; STEP_SIZE and DECAY are written.
        layers: float32 [rows of ``Layer``, tensors], read and written.
    """
    if skip:
        return
    k = coef.double()
    x, u = (torch.segment_reduce(row, "sum", offsets=layer_start).sqrt() for row in norms)
    c = (x / u).clamp(k[:, Coef.C_MIN], k[:, Coef.C_MAX])
    c = torch.where((x > 0) & (u > 0), c, 1.0)
    average = layers[Layer.AVERAGE].double()
    moved = k[:, Coef.BETA3] * average + (1.0 - k[:, Coef.BETA3]) * c
    layers[Layer.AVERAGE] = torch.where(c == 1.0, average, moved) if deepspeed else moved
    layers[Layer.COEFFICIENT] = c
    _write_step(c, k, coef)


def lamb_move(
    params: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    eps_inside_sqrt: bool,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    skip: Tensor,
    rounding: Tensor | None,
) -> None:
    """x = x - lr*c*u, with the coefficients that ``lamb_coefficient`` left in ``coef`` (eq. 2, line 5).

    Arguments as for ``lamb_update``, ``rounding`` as for ``apply_momentum``; ``params`` are written, nothing else.
    """
    if skip:
        return
    for tile in tiles(sizes, 1, block_size, exp_avg.device):
        b = tile.blocks
        k = coef[block_tensor[b]]
        m, v = exp_avg.view(-1, block_size)[b], exp_avg_sq.view(-1, block_size)[b]
        move(params, tile, block_size, m / denom(v, k, eps_inside_sqrt), k, live, live_row, rounding)


def lamb_ratio(
    params: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    exp_avg_bits: Tensor,
    exp_avg_scale: Tensor,
    last_bits: Tensor,
    last_scale: Tensor,
    exp_avg_sq: Tensor,
    fresh: Tensor,
    started: Tensor,
    eps_inside_sqrt: bool,
    preconditioned: bool,
    deepspeed: bool,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    skip: Tensor,
    largest: Tensor,
    norms: Tensor | None,
) -> None:
    """Rebuilds the gradient, updates the fresh variance, finds its largest ratio (lines 15 to 17).

        g = (m_t - beta1*m_{t-1})/(1 - beta1);  v_t = beta2*v_{t-1} + (1 - beta2)*g^2
        largest = max over a block of v_{T_w}/v_t, 0 where v_{T_w} is 0 or both are infinite

    Both momenta are bits and scales. Only before the first step is m_{t-1} the warm-up's, in full
    precision: ``fresh`` then holds it, and v_{t-1} is v_{T_w}. Leaves m_t as the next m_{t-1}.

    Args:
        params: Parameters of any float dtype, dense; read only for ``norms``.
        sizes: Elements of each.
        block_size: Elements per block.
        exp_avg_bits: Signs of m_t, uint8 [W, P / 8W], or [W, 2, P / 8W] where ternary.
        exp_avg_scale: |m_t| times unit, float32 [B].
        last_bits: Signs of m_{t-1}, of the same shape, contiguous, read and written.
        last_scale: |m_{t-1}| times unit, float32 [B], read and written.
        exp_avg_sq: v_{T_w}, the frozen variance, float32 or bfloat16 [P].
        fresh: v_{t-1} or, before the first step, m_{T_w}, float32 [P]; v_t is written.
        started: int32 [1], 0 before the first step.
        eps_inside_sqrt: Which denom; see ``lamb_update``. Not read without one of the next two or ``norms``.
        preconditioned: The momenta were compressed in the unit 1/denom of each coordinate.
        deepspeed: The ratio is that of the denominators: of roots, plus eps.
        coef: float32 [tensors, columns of ``Coef``].
        block_tensor: int32 [B].
        live, live_row: Elements that count.
        skip: int32 [1]; where set nothing changes.
        largest: float32 [B], written; 0 in blocks without live elements.
        norms: float64 [2, B], written: sums of (m_t/denom)^2 and of u^2 = (m_t/denom + wd*x)^2, for
            DeepSpeed's blend; or None.
    """
    if skip:
        return
    for tile in tiles(sizes, len(exp_avg_bits), block_size, fresh.device, len(block_tensor)):
        b = tile.blocks
        k = coef[block_tensor[b]]
        frozen, held = exp_avg_sq.view(-1, block_size)[b].float(), fresh.view(-1, block_size)[b]
        packed, last_packed = (bits[tile.chunk, ..., tile.bytes] for bits in (exp_avg_bits, last_bits))
        m = scaled(packed, exp_avg_scale[b] / k[:, Coef.UNIT])
        last = scaled(last_packed, last_scale[b] / k[:, Coef.UNIT])
        if preconditioned:
            m, last = (x.mul_(denom(frozen, k, eps_inside_sqrt)) for x in (m, last))
        if not started:
            last = held
        g = (m - last * column(k, Coef.BETA1)).div_(column(k, Coef.ONE_MINUS_BETA1))
        decayed = (held if started else frozen) * column(k, Coef.BETA2)
        v = only_live(decayed.add_((g * column(k, Coef.ONE_MINUS_BETA2)).mul_(g)), live, live_row, tile)
        above, below = (denom(x, k, eps_inside_sqrt) if deepspeed else x for x in (frozen, v))
        ratio = above / below
        ratio = torch.where(ratio >= 0, ratio, 0.0)  # not where it is 0/0 or inf/inf
        largest[b] = only_live(ratio, live, live_row, tile).amax(1)
        held.copy_(v)
        last_packed.copy_(packed)
        last_scale[b] = exp_avg_scale[b]
        if norms is not None:
            adam = (m * column(k, Coef.UNBIAS1)).div_(denom(frozen, k, eps_inside_sqrt))
            u = adam + gather(params, tile, block_size) * column(k, Coef.WEIGHT_DECAY)
            for row, values in enumerate((adam, u)):
                norms[row, b] = square_sum(only_live(values, live, live_row, tile))


def lamb_rescale(
    largest: Tensor,
    norms: Tensor | None,
    layer_start: Tensor,
    skip: Tensor,
    deepspeed: bool,
    started: Tensor,
    coef: Tensor,
    layers: Tensor,
) -> None:
    """Each layer's ratio, clipped both ways, and its coefficient c = r*c_avg (lines 17 to 20).

    The paper first limits the change (line 18), then the range (line 19). DeepSpeed first blends in
    the share of the weight decay, r = R*r + 1 - R with R = min(1, |m/denom|/|u|), then limits the
    range, then the change. A layer that found no ratio keeps its own.

    Args:
        largest: float32 [B], from ``lamb_ratio``.
        norms: float64 [2, B], from ``lamb_ratio``: then r is blended; or None.
        layer_start: int64 [tensors + 1], first block of each tensor, and B.
        skip: int32 [1]; where set nothing changes.
        deepspeed: DeepSpeed's order.
        started: int32 [1], set to 1.
        coef: float32 [tensors, columns of ``Coef``]; STEP_SIZE and DECAY are written.
        layers: float32 [rows of ``Layer``, tensors], read and written.
    """
    if skip:
        return
    k = coef.double()
    found = torch.segment_reduce(largest, "max", offsets=layer_start, initial=0.0).double()
    last = layers[Layer.RATIO].double()
    r = found
    if norms is not None:
        adam, u = (torch.segment_reduce(row, "sum", offsets=layer_start).sqrt() for row in norms)
        share = torch.where(u > 0, (adam / u).clamp(max=1.0), 1.0)
        r = r * share + (1.0 - share)
    bounds = [
        (last * (1.0 - k[:, Coef.R_THRESHOLD]), last * (1.0 + k[:, Coef.R_THRESHOLD])),
        (k[:, Coef.R_MIN], k[:, Coef.R_MAX]),
    ]
    for low, high in reversed(bounds) if deepspeed else bounds:
        r = torch.minimum(torch.maximum(r, low), high)
    r = torch.where(found > 0, r, last).float()
    c = r.double() * layers[Layer.AVERAGE].double()
    layers[Layer.RATIO] = r
    layers[Layer.COEFFICIENT] = c
    started.fill_(1)
    _write_step(c, k, coef)


def _write_step(c: Tensor, k: Tensor, coef: Tensor) -> None:
    step = k[:, Coef.LR] * c
    coef[:, Coef.STEP_SIZE] = step * k[:, Coef.UNBIAS1]
    coef[:, Coef.DECAY] = 1.0 - step * k[:, Coef.WEIGHT_DECAY]
