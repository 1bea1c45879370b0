"""What ops compute, written down once more in float64 NumPy, one array entry per element: no blocks, tiles or tables.

A formula gets an op's arguments as they were, and what the op has made of them, and asserts that it is that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from op_arguments import Array, wide
from op_rules import either
from torch import Tensor

from fusedonebit.triton_kernels import Coef, unpack
from fusedonebit.triton_kernels.codes import decode
from fusedonebit.triton_kernels.headers import CHECKED, Flag, Word

FORMULAS: dict[str, Callable[[Any, Any], None]] = {}
"""By op: of what was given, ``Wide`` where there is an index space, and of what was made of it."""
EPS32 = 2.0**-24  # largest relative error of one float32 rounding
SMALLEST = 2.0**-149  # of float32: what rounds to 0 is off by as much
ROUNDED = EPS32 * 1.001  # once, from float64
SUMMED = 1e-13  # relative error of a float64 sum


def formula(check: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Take it for that of the op of its name; NumPy does not warn in it."""
    FORMULAS[check.__name__] = quiet = np.errstate(all="ignore")(check)
    return quiet


def near(found: Any, expected: Any, bound: Any) -> None:
    """No number is off by more than its bound; what is infinite or NaN is the same."""
    found, expected = (x.double().numpy() if isinstance(x, Tensor) else x for x in (found, expected))
    finite = np.isfinite(found) & np.isfinite(expected)
    off = ~(
        (found == expected) | (np.isnan(found) & np.isnan(expected)) | (finite & (np.abs(found - expected) <= bound))
    )
    assert not off.any(), (
        f"{off.sum()} of {off.size}, at {np.argwhere(off)[:3]}: {found[off][:3]}, not {expected[off][:3]}"
    )


def close(found: Any, expected: Any, rtol: float, atol: float = 0.0) -> None:
    expected = expected.double().numpy() if isinstance(expected, Tensor) else np.asarray(expected, float)
    near(found, expected, rtol * np.abs(expected) + atol)


def same(found: Tensor, expected: Any) -> None:
    assert np.array_equal(found.numpy(), np.asarray(expected), equal_nan=found.is_floating_point())


class Wide:
    """An op's arguments by element of the flat index space; ``live``: which count."""

    def __init__(self, before: Any) -> None:
        self.before, places = before, before.places
        self.block, self.owner = places.block_size, places.block_tensor.long()
        self.live = (unpack(places.live[places.live_row.long()].view(-1)) > 0).numpy()
        self.used = (places.live_row != 1).numpy().repeat(self.block)
        starts = np.concatenate([[0], np.cumsum([-(-n // self.block) for n in places.sizes])]) * self.block
        self.starts = starts.astype(int)

    def k(self, which: Coef) -> Array:
        """A coefficient of each element."""
        return self.each(self.before.coef[self.owner, which])

    def each(self, per_block: Tensor) -> Array:
        return np.repeat(wide(per_block), self.block)

    def of(self, x: Tensor) -> Array:
        return wide(x)[: self.live.size]

    def variance(self, of: Any) -> Array:
        """What a preconditioner has: as it is, or made of mean squares."""
        return self.of(of.numbers) if of.factors is None else self.renewed(of, of.factors)

    def renewed(self, mean_sq: Any, factors: Tensor) -> Array:
        """The variance that is made of codes, a row or several."""
        x = decode(mean_sq.numbers.reshape(-1, self.block), mean_sq.exponents.reshape(-1)).double().numpy().reshape(-1)
        factor, usual, least = (self.each(row[self.owner]) for row in factors)
        return np.maximum(np.where(x > 0, x * factor, usual), least)

    def flat(self, tensors: Sequence[Tensor]) -> Array:
        """Tensors laid side by side, zeros between them; an empty one is zeros."""
        line = np.zeros(self.live.size)
        for start, x in zip(self.starts, tensors, strict=False):
            line[start : start + x.numel()] = wide(x)
        return line

    def rounding(self, tensors: Sequence[Tensor], x: Array) -> Array:
        """Largest error of one rounding to each tensor's dtype."""
        bound = np.zeros_like(x)
        for start, end, tensor in zip(self.starts, self.starts[1:], tensors, strict=False):
            info = torch.finfo(tensor.dtype)
            bound[start:end] = info.eps / 2 * np.abs(x[start:end]) + info.smallest_normal * info.eps
        return bound

    def rows(self, x: Array) -> Array:
        return x.reshape(-1, self.block)

    def denom(self, v: Array, inside: bool) -> Array:
        corrected, eps = v * self.k(Coef.RSQRT_BIAS2) ** 2, self.k(Coef.EPS)
        return np.sqrt(corrected + eps) if inside else np.sqrt(corrected) + eps

    def momentum(self, signs: Any) -> Array:
        return self.each(signs.scale) * unpacked(signs.bits)

    def gradient(self) -> tuple[Array, Array]:
        """What counts of it, and where it does not."""
        g = self.flat(self.before.grads)
        bad = self.live & ~(np.abs(g) <= self.k(Coef.GRAD_LIMIT))
        return np.where(self.live & ~bad, g, 0.0), bad

    def moved(self, after: Any, expected: Array, terms: Array) -> None:
        """Parameters went there, rounded once; what does not count has stayed. ``terms``: sizes of what was added."""
        x, now = self.flat(self.before.params), self.flat(after.params)
        expected = np.where(self.live, expected, x)
        for start, end, tensor in zip(self.starts, self.starts[1:], after.params, strict=False):
            expected[start:end] = narrowed(expected[start:end], torch.finfo(tensor.dtype).max)
        near(now, expected, self.rounding(after.params, expected) + 8 * EPS32 * terms)
        assert np.array_equal(now[~self.live], x[~self.live], equal_nan=True)


def unpacked(bits: Tensor) -> Array:
    """+1 and -1 of packed bits, and 0 where there is a second plane that says so."""
    planes = bits.numpy()[:, None] if bits.dim() == 2 else bits.numpy()
    signs, *nonzero = (np.unpackbits(planes[:, k], axis=-1, bitorder="little") for k in range(planes.shape[1]))
    return ((signs * 2.0 - 1.0) * (nonzero[0] if nonzero else 1.0)).reshape(-1)


def packed(values: Array, like: Tensor) -> Array:
    """What compression writes into ``like``: [W, bytes] or [W, 2, bytes]."""
    chunks = values.reshape(len(like), -1)
    planes = [chunks >= 0, chunks != 0] if like.dim() == 3 else [chunks >= 0]
    return np.packbits(np.stack(planes, 1), axis=-1, bitorder="little").reshape(like.shape)


def sign(x: Array, ternary: bool = False) -> Array:
    return np.sign(x) if ternary else np.where(x >= 0, 1.0, -1.0)


def narrowed(x: Array, largest: float = float(np.finfo(np.float32).max)) -> Array:
    """Infinite where a narrower number would be."""
    return np.where(np.abs(x) > largest, np.sign(x) * np.inf, x)


def fits(*values: Array) -> Array:
    """Where all are finite in float32."""
    return np.all([np.isfinite(value.astype(np.float32)) for value in values], 0)


def scale_of(c: Array, norm: str, ternary: bool = False) -> float:
    """The scale of live elements ``c``; where ternary, that of those which are not zero."""
    c = c[c != 0] if ternary else c
    if c.size == 0:
        return 0.0
    l1, l2 = np.abs(c).mean(), np.sqrt((c * c).mean())
    return {"l1": l1, "l2": l2, "contractive": min(l2, 1.9 * l1), "relaxed": min(1.3 * l2, 1.9 * l1)}[norm]


def agreed(words: Tensor, own: Tensor, hold: Tensor) -> int:
    """What all headers say together."""
    found = int(hold) | (int(Flag.MISMATCH) if (words[:, :CHECKED] != own[:CHECKED]).any() else 0)
    for flags in words[:, Word.FLAGS].tolist():
        found |= (flags & 63) | (int(Flag.MISMATCH) if flags & ~63 else 0)
    return found


FIXED: dict[str, tuple[Any, ...]] = {
    **either(
        "compensated compensated_numbers exp_avg_sq_numbers moments_exp_avg worker_sq_numbers residual_numbers", (...,)
    ),
    **either("correction rounding", (None,)),
    **either("hold skip", (0,)),
    "edges": ("", "grads"),
}
"""Formulas are of what counts, in float32, and rounded to nearest."""
HELD = ("apply_momentum", "local_step", "local_update", "lion_compress")
"""Ops of which a formula also says what becomes of them where they are held back, or their step is skipped."""
