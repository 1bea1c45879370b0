"""The ops of 0/1 Adam and of distributed Lion once more in float64 NumPy, as ``reference_ops`` has the others."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from reference_ops import EPS32, Array, Problem, denom, sign, unpacked, wide
from torch import Tensor
from zero_one_arguments import Way

from fusedonebit.triton_kernels import Coef


class OwnStep(NamedTuple):
    """What ``local_step`` leaves, by flat index, and bounds on rounding errors."""

    x: Array
    m: Array
    v: Array
    c: Array
    x_off: Array
    m_off: Array
    v_off: Array
    c_off: Array
    told: bool


def blend(keep: Array, m: Array, take: Array, g: Array) -> tuple[Array, Array]:
    """keep*m + take*g, and the size of its terms."""
    return keep * m + take * g, np.abs(keep * m) + np.abs(take * g)


def fits(*values: Array) -> Array:
    """Where all are finite in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.all([np.isfinite(value.astype(np.float32)) for value in values], 0)


def local_step(p: Problem, exp_avg: Tensor, inside: bool, way: Way, hold: int) -> OwnStep:
    """0/1 Adam, Algorithm 1, lines 4 to 6; and beta1*m, before the step that synchronises.

    Where it follows, v is made first, and c is what parameters lack; in the last step x stays.
    """
    moves, last, decay_in_update, precondition, follows = way
    v, g = wide(p.exp_avg_sq), np.where(p.live, p.flat(p.grads), 0.0)
    squares = v
    if follows:
        with np.errstate(invalid="ignore", over="ignore"):
            squares = p.column(Coef.BETA2) * v + p.column(Coef.ONE_MINUS_BETA2) * g * g
    beta1, d = p.column(Coef.BETA1), denom(p, squares, inside)
    old, scale, m, x = wide(p.compensated), p.by_element(p.worker_scale), wide(exp_avg), p.flat(p.params)
    c, size, m_size, u_size = old - scale * sign(old), np.abs(old) + scale, np.abs(m), np.zeros_like(x)
    lost, unit = np.zeros_like(p.live), d if precondition else 1.0
    if moves:
        with np.errstate(invalid="ignore"):
            new, new_size = blend(beta1, m, p.column(Coef.ONE_MINUS_BETA1), g)
            decays = p.column(Coef.WEIGHT_DECAY) * x * d if decay_in_update else np.zeros_like(x)
            summed, u, u_size = c + new / unit + decays, new / d, p.column(Coef.STEP_SIZE) * new_size / d
            if follows:
                summed = p.column(Coef.DECAY) * c + p.column(Coef.STEP_SIZE) * u
        lost = ~fits(summed, u, squares) | ~(np.abs(p.flat(p.grads)) <= p.column(Coef.GRAD_LIMIT))
        good = p.live & ~lost & (hold == 0)
        u_size = np.where(good, u_size, 0.0)
        went = good & (not (follows and last))
        x = np.where(went, p.column(Coef.DECAY) * x - p.column(Coef.STEP_SIZE) * np.where(good, u, 0.0), x)
        m, m_size = np.where(good, new, m), np.where(good, new_size, m_size)
        c, v = np.where(good, summed, c), np.where(good, squares, v)
        size = size + (u_size if follows else np.where(good, new_size / unit + np.abs(decays), 0.0))
    if last and not follows:
        total = c + beta1 * m / unit
        lost, c = lost | ~fits(total), np.where(fits(total), total, c)
        size = size + beta1 * m_size / unit
    bounds = (8 * EPS32 * (np.abs(x) + u_size), 8 * EPS32 * m_size, 8 * EPS32 * v, 8 * EPS32 * size)
    told = bool((lost & p.live).any()) and not hold
    return OwnStep(x, wide(exp_avg) if last and not follows else m, v, np.where(p.live, c, 0.0), *bounds, told)


def rebuild_momentum(
    p: Problem, inside: bool, precondition: bool, summed: Tensor | None = None, mean_sq: Tensor | None = None
) -> Array:
    """0/1 Adam, Algorithm 1, line 9, of a buffer that sums several steps; what has no variance has no momentum."""
    m = p.by_element(p.exp_avg_scale) * unpacked(p.exp_avg_bits)
    owner = p.places.block_tensor.long()
    if summed is not None and mean_sq is not None:
        m = m * p.by_element((mean_sq[owner] > 0) / summed[owner])
    return np.where(p.live, m * denom(p, wide(p.exp_avg_sq), inside) if precondition else m, 0.0)


class Vote(NamedTuple):
    """What ``lion_compress`` leaves, by flat index: the update before its sign is taken, m, bounds, and the flag."""

    c: Array
    m: Array
    c_off: Array
    m_off: Array
    told: bool


def lion_compress(p: Problem, exp_avg: Tensor, hold: int) -> Vote:
    """Distributed Lion, Algorithm 1, a worker's lines."""
    m, g = wide(exp_avg), np.where(p.live, p.flat(p.grads), 0.0)
    with np.errstate(invalid="ignore"):
        c, c_size = blend(p.column(Coef.BETA1), m, p.column(Coef.ONE_MINUS_BETA1), g)
        new, new_size = blend(p.column(Coef.BETA2), m, p.column(Coef.ONE_MINUS_BETA2), g)
    good = fits(c, new) & (np.abs(g) <= p.column(Coef.GRAD_LIMIT))
    moved = good & p.live & (hold == 0)
    bounds = (8 * EPS32 * np.where(good, c_size, 0.0), 8 * EPS32 * np.where(moved, new_size, 0.0))
    told = bool((~good & p.live).any()) and not hold
    return Vote(np.where(good, c, m), np.where(moved, new, m), *bounds, told)


def mixed(word: int) -> int:
    """C. Wellons' hash of 32-bit words, in Python's integers."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
    word = (word ^ (word >> 15)) * 0x735A2D97 & 0xFFFFFFFF
    return word ^ (word >> 15)


def coin(index: int, step: int) -> bool:
    """What is tossed for a flat index where there is nothing to vote for."""
    return bool(mixed((index & 0xFFFFFFFF) ^ mixed(mixed((index >> 32) + 0x9E3779B9 & 0xFFFFFFFF) ^ step)) >> 16 & 1)
