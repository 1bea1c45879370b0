"""The ops of ``triton_kernels`` written down once more, in float64 NumPy, one array entry per element.

Nothing here knows blocks, tiles, tables or packed bits: ``Problem`` makes random arguments for the
ops and hands out the same numbers element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from op_arguments import arguments_of
from torch import Tensor

from fusedonebit.comm import Messages
from fusedonebit.triton_kernels import SCALE_NORMS, Coef, FlatLayout, Layer, LiveTable, live_table, rules, unpack
from fusedonebit.triton_kernels.finish import Segments
from fusedonebit.triton_kernels.headers import CHECKED, PARTLY, Word, folded
from fusedonebit.triton_kernels.nouns import (
    Arrived,
    Coefficients,
    Compensated,
    Digest,
    Divisor,
    Header,
    Limit,
    Moments,
    Places,
    Ratios,
    Sent,
    Side,
    Signs,
)
from fusedonebit.triton_kernels.receive import spans_of

# A GPU machine may lack NumPy; there only the arguments are needed, not the transcriptions.
with suppress(ModuleNotFoundError):
    import numpy as np
Array = Any  # float64 NDArray
EPS32 = 2.0**-24  # largest relative error of one float32 rounding
# Of calling lamb_ratio: (started, eps_inside_sqrt, preconditioned, deepspeed, blend)
RATIO_WAYS = [
    (*first, preconditioned, *last)
    for preconditioned in (False, True)
    for first, last in (
        ((0, False), (False, False)),
        ((1, False), (False, False)),
        ((0, False), (True, True)),
        ((1, False), (True, True)),
        ((1, True), (True, True)),
        ((1, True), (True, False)),
        ((1, False), (False, True)),
    )
]


def checksum_of(*values: Tensor | None) -> Tensor:
    """The word that tells all bits of ``values``, int32 []: of messages, of headers, and of a count."""
    total = torch.tensor(0)
    for each in values:
        total += 0 if each is None else each.view(torch.int64).sum()
    return folded(total)


class Problem:
    """Random arguments, by the names that the ops' schemas use.

    Attributes:
        live: bool [P], which elements count, as an array; ``live_mask``: as a tensor.
        worker, server: Index of all elements, and of those of chunk ``rank``.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        world_size: int = 1,
        block_size: int = 128,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        masks: dict[int, Tensor] | None = None,
        excluded: Sequence[int] = (),
        ternary: bool = False,
    ) -> None:
        self.ternary = ternary
        self.layout = FlatLayout(tuple(sizes), world_size, block_size)
        self._random = torch.Generator().manual_seed(seed)
        self.table: LiveTable = live_table(self.layout, masks, excluded)
        self.live_mask = unpack(self.table.bits[self.table.row.long()]) > 0
        blocks = self.layout.n_blocks
        self.coef = self._coefficients(len(sizes))
        self.places = Places.of(self.layout, self.layout.block_tensor().int(), self.table)
        self.grads = [self.normal(size).to(dtype) for size in sizes]
        self.params = [self.normal(size).to(dtype) for size in sizes]
        self.compensated = torch.where(self.live_mask, self.normal(self.layout.numel), 0.0)
        self.worker_scale = self.normal(blocks).abs()
        self.exp_avg_bits = self.bytes(world_size)
        self.exp_avg_scale = self.normal(blocks).abs()
        self.exp_avg_sq = self.normal(self.layout.numel).square() * 1e-2
        self.bits = self.bytes(world_size)
        self.partials = torch.full((3 if ternary else 2, blocks), torch.nan, dtype=torch.float64)
        self.found = torch.tensor([32], dtype=torch.int32)
        if ternary:  # half of all that is compressed are zeros of either sign; the bits have zeros of their own
            for x in (self.compensated, *self.grads):
                x[torch.rand(x.shape, generator=self._random) < 0.5] *= 0.0

    @property
    def exp_avg(self) -> Signs:
        return Signs(self.exp_avg_bits, self.exp_avg_scale)

    @property
    def live(self) -> Array:
        return self.live_mask.numpy()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)

    def bytes(self, rows: int) -> Tensor:
        shape = (rows, *[2] * self.ternary, self.layout.chunk_bytes)
        return torch.randint(256, shape, generator=self._random, dtype=torch.uint8)

    def _coefficients(self, tensors: int) -> Tensor:
        coef = torch.zeros(tensors, len(Coef))
        vary = 1 + torch.arange(tensors) / 10
        coef[:, Coef.BETA1], coef[:, Coef.ONE_MINUS_BETA1] = 1 - 0.1 / vary, 0.1 / vary
        coef[:, Coef.BETA2], coef[:, Coef.ONE_MINUS_BETA2] = 1 - 0.02 / vary, 0.02 / vary
        coef[:, Coef.STEP_SIZE], coef[:, Coef.DECAY] = 0.03 * vary, 1 - 0.01 * vary
        coef[:, Coef.RSQRT_BIAS2], coef[:, Coef.EPS], coef[:, Coef.UNIT] = 1.5 * vary, 1e-3 * vary, 2.5 / vary
        coef[:, Coef.LR], coef[:, Coef.UNBIAS1], coef[:, Coef.WEIGHT_DECAY] = 0.02 * vary, 1.2 * vary, 0.1 / vary
        coef[:, Coef.C_MIN], coef[:, Coef.C_MAX], coef[:, Coef.BETA3] = 0.5 / vary, 2.0 * vary, 1 - 0.1 / vary
        coef[:, Coef.GRAD_LIMIT] = 1e19 * vary
        coef[:, Coef.R_MIN], coef[:, Coef.R_MAX], coef[:, Coef.R_THRESHOLD] = 0.5 / vary, 4.0 * vary, 0.1 * vary
        return coef

    def column(self, which: Coef) -> Array:
        """A coefficient of each element."""
        return self.by_element(self.coef[self.places.block_tensor, which])

    def by_element(self, per_block: Tensor) -> Array:
        return np.repeat(wide(per_block), self.layout.block_size)

    def flat(self, tensors: Sequence[Tensor]) -> Array:
        """Tensors laid side by side, zeros between them; an empty one is zeros."""
        line = np.zeros(self.layout.numel)
        for i, tensor in enumerate(tensors):
            offset = self.layout.offset(i)
            line[offset : offset + tensor.numel()] = wide(tensor)
        return line

    def momentum_arguments(self, exp_avg_sq: Tensor | None = None, eps_inside_sqrt: bool = False, hold: int = 0) -> Any:
        return arguments_of(
            "momentum_compress",
            *(self.grads, self.places, Compensated(self.compensated, self.worker_scale)),
            *(self.exp_avg, self.coef, divisor(exp_avg_sq, eps_inside_sqrt)),
            *(self.bits, self.partials, self.found),
            torch.tensor([hold], dtype=torch.int32),
        )

    def apply_arguments(
        self,
        exp_avg_sq: Tensor | None = None,
        eps_inside_sqrt: bool = False,
        skip: int = 0,
        rounding: Tensor | None = None,
        digest: Tensor | None = None,
        x_squares: Tensor | None = None,
    ) -> Any:
        return arguments_of(
            "apply_momentum",
            *(self.params, self.places, self.exp_avg, divisor(exp_avg_sq, eps_inside_sqrt), self.coef),
            *(torch.tensor([skip], dtype=torch.int32), rounding, digest, x_squares),
        )

    def segments(self, scope: str) -> Segments:
        segment = self.layout.scale_segments(scope).int()
        live = torch.bincount(segment, self.table.numel.double())
        return Segments.of(segment, torch.full((len(live),), torch.nan))._replace(live=live)

    def finish_arguments(self, scope: str, norm: str, hold: int = 0, counter: int | None = None) -> Any:
        at = None if counter is None else torch.tensor(counter, dtype=torch.int32)
        pending, held = (torch.tensor([n], dtype=torch.int32) for n in (0, hold))
        return arguments_of(
            "finish",
            self.partials,
            self.segments(scope),
            SCALE_NORMS[norm],
            self.layout.scale_segments(scope).int(),
            torch.full((self.layout.world_size, self.layout.scale_slots(scope)[1]), torch.nan),
            self.headers()[0],
            Header(7, at, counter is not None, 2**31 - 1, 0, pending),
            torch.tensor([(7 << 32) + ((-12345 ^ 7) & 0xFFFFFFFF)]),  # halves that together are -12345
            held,
        )

    def limit(self, most: float | None, coef: Tensor | None) -> Limit | None:
        if most is None:
            return None
        numbers = (torch.tensor(most, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64))
        return Limit(coef, self.places.block_tensor, self.normal(self.layout.n_blocks).abs(), *numbers)

    def alone_arguments(
        self,
        scope: str,
        norm: str,
        flags: int = 0,
        hold: int = 0,
        limit: float | None = None,
        renewal: Coefficients | None = None,
        found: int = 0,
    ) -> Any:
        """Of ``finish_alone``."""
        counter, pending, held, written = (torch.tensor([n], dtype=torch.int32) for n in (4, found, hold, -1))
        return arguments_of(
            "finish_alone",
            self.partials,
            self.segments(scope),
            SCALE_NORMS[norm],
            *(torch.full((self.layout.n_blocks,), torch.nan) for _ in range(3)),
            self.headers()[0][:1],
            Header(7, counter, True, 2**31 - 1, flags, pending),
            held,
            written,
            self.limit(limit, None),
            renewal or Coefficients.of(self.coef),
        )

    def receive_arguments(
        self,
        scope: str,
        rank: int = 0,
        flags: int = 0,
        hold: int = 0,
        limit: float | None = None,
        parts: int = 1,
    ) -> Any:
        """Of a step in ``parts`` of the layout's chunks; layout words differ from part to part."""
        layout, (slot, slots) = self.layout, self.layout.scale_slots(scope)
        segment, by_chunk = layout.scale_segments(scope).int(), slot.view(parts, -1, layout.blocks_per_chunk)
        served = (by_chunk[:, rank] + slots * torch.arange(parts)[:, None]).view(-1).int()
        messages = Messages(layout.world_size, slots, layout, torch.device("cpu"), self.ternary)
        messages.payload.copy_(torch.randint(256, messages.payload.shape, generator=self._random, dtype=torch.uint8))
        messages.scales.copy_(self.normal(*messages.scales.shape).abs())
        words, own_words = self.headers(flags)
        words.view(parts, -1, len(Word))[..., Word.LAYOUT] += torch.arange(parts, dtype=torch.int32)[:, None]
        own_words = own_words.repeat(parts, 1)
        own_words[:, Word.LAYOUT] += torch.arange(parts, dtype=torch.int32)
        messages.words.copy_(words)
        sides = [
            Side(each, self.normal(int(each[-1]) + 1).abs(), *(torch.full((len(each),), torch.nan) for _ in range(2)))
            for each in (segment, served)
        ]
        held, found, ticket = (torch.tensor([n], dtype=torch.int32) for n in (hold, -1, 0))
        spans = layout.world_size * spans_of(layout.blocks_per_chunk)
        return arguments_of(
            "receive",
            Arrived(messages.words, own_words, messages.payload, messages.scales),
            *sides,
            rank,
            torch.full((len(segment),), torch.nan),
            held,
            found,
            Digest(torch.full((parts,), -1), torch.zeros(parts, dtype=torch.int64), torch.tensor(2**63 - 7)),
            ticket,
            self.limit(limit, self.coef),
            None if limit is None else torch.full((spans,), torch.nan, dtype=torch.float64),
        )

    def server_arguments(self, scope: str = "global", rank: int = 0, skip: int = 0, hold: int = 0) -> Any:
        own = slice(rank * self.layout.blocks_per_chunk, (rank + 1) * self.layout.blocks_per_chunk)
        slot, slots = self.layout.scale_slots(scope)
        elements = slice(rank * self.layout.chunk_numel, (rank + 1) * self.layout.chunk_numel)
        return arguments_of(
            "server_reduce",
            Sent(
                self.exp_avg_bits,
                self.normal(self.layout.world_size, slots).abs(),
                *self.headers(skip),
                slot[own].int(),
            ),
            *(self.places.at(own), Compensated(self.compensated[elements].clone(), self.worker_scale[own])),
            *(self.bits[:1], self.partials[:, own]),
            *(torch.tensor([hold], dtype=torch.int32), torch.tensor([-1], dtype=torch.int32)),
            torch.full((self.layout.world_size, len(Word)), -1, dtype=torch.int32),
        )

    def headers(self, flags: int = 0) -> tuple[Tensor, Tensor]:
        """Words of all ranks, as they lie in messages, the last with these flags; and this rank's own."""
        rows = torch.randint(-9, 9, (self.layout.world_size, 20), generator=self._random, dtype=torch.int32)
        words = rows[:, 4 : 4 + len(Word)]
        words[:, :CHECKED] = words[:1, :CHECKED].clone()
        words[:, Word.FLAGS] = 0
        words[-1, Word.FLAGS] = flags
        return words, words[0].clone()

    def update_arguments(self, skip: int = 0, sums: bool = True, rounding: Tensor | None = None) -> Any:
        return arguments_of(
            "adam_update",
            *(self.params, self.layout.cut(self.normal(self.layout.numel))),
            self.places,
            *(Moments(self.compensated, self.exp_avg_sq), self.coef),
            torch.tensor([skip], dtype=torch.int32),
            torch.full((self.layout.n_blocks,), torch.nan, dtype=torch.float64) if sums else None,
            rounding,
        )

    def lamb_update_arguments(self, eps_inside_sqrt: bool = False, skip: int = 0, sums: bool = True) -> Any:
        given = self.update_arguments(skip, sums)
        norms = torch.full((2, self.layout.n_blocks), torch.nan, dtype=torch.float64)
        rest = (given.coef, given.skip, given.exp_avg_sq_sums)
        return arguments_of("lamb_update", *given[:4], eps_inside_sqrt, *rest, norms)

    @staticmethod
    def flags_found() -> tuple[Tensor, Tensor]:
        """Flags of a step, and of the one before, in which there were some."""
        return torch.zeros(1, dtype=torch.int32), torch.full((1,), PARTLY, dtype=torch.int32)

    @property
    def layer_start(self) -> Tensor:
        return torch.tensor([*self.layout.first_block[:-1], self.layout.n_blocks])

    @property
    def layers(self) -> Tensor:
        """Averages and last ratios from 0.2 to 2."""
        return torch.rand(len(Layer), len(self.layout.sizes), generator=self._random) * 1.8 + 0.2

    def lamb_coefficient_arguments(self, deepspeed: bool = False, skip: int = 0) -> Any:
        norms = self.normal(2, self.layout.n_blocks).square().double()
        return arguments_of(
            "lamb_coefficient",
            norms,
            self.layer_start,
            torch.tensor([skip], dtype=torch.int32),
            deepspeed,
            self.coef,
            self.layers,
        )

    def lamb_move_arguments(self, eps_inside_sqrt: bool = False, skip: int = 0, rounding: Tensor | None = None) -> Any:
        return arguments_of(
            "lamb_move",
            *(self.params, self.places, Moments(self.compensated, self.exp_avg_sq), eps_inside_sqrt, self.coef),
            *(torch.tensor([skip], dtype=torch.int32), rounding),
        )

    def lamb_ratio_arguments(
        self,
        started: int = 1,
        eps_inside_sqrt: bool = False,
        preconditioned: bool = False,
        deepspeed: bool = False,
        blend: bool = False,
        skip: int = 0,
    ) -> Any:
        blocks = self.layout.n_blocks
        fresh = self.normal(self.layout.numel).square() * 1e-2 if started else self.compensated
        return arguments_of(
            "lamb_ratio",
            *(self.params, self.places, self.exp_avg),
            Signs(self.bytes(self.layout.world_size), self.normal(blocks).abs()),
            *(divisor(self.exp_avg_sq, eps_inside_sqrt), fresh),
            *(torch.tensor([started], dtype=torch.int32), preconditioned, deepspeed),
            *(self.coef, torch.tensor([skip], dtype=torch.int32)),
            Ratios(
                torch.full((blocks,), torch.nan),
                torch.full((2, blocks), torch.nan, dtype=torch.float64) if blend else None,
            ),
        )

    def freeze_arguments(
        self,
        eps_inside_sqrt: bool = False,
        precondition: bool = False,
        dead_value: Tensor | None = None,
        least: Tensor | None = None,
        bfloat16: bool = False,
    ) -> tuple:
        return (
            *(self.places, self.compensated, self.exp_avg_sq),
            *(eps_inside_sqrt, precondition, self.coef, dead_value, least, bfloat16),
        )

    def rewarm_arguments(self, eps_inside_sqrt: bool = False, precondition: bool = False) -> tuple:
        return self.freeze_arguments(eps_inside_sqrt, precondition)[:-3]

    def update_sums_arguments(self, x: Tensor | None, eps_inside_sqrt: bool = False) -> tuple:
        return (self.places, x, self.exp_avg_sq, eps_inside_sqrt, self.coef)

    def lamb_rescale_arguments(self, deepspeed: bool = False, blend: bool = False, skip: int = 0) -> Any:
        largest = self.normal(self.layout.n_blocks).abs() * 2
        norms = self.normal(2, self.layout.n_blocks).square().double() if blend else None
        started = torch.zeros(1, dtype=torch.int32)
        return arguments_of(
            "lamb_rescale",
            *(largest, norms, self.layer_start, torch.tensor([skip], dtype=torch.int32), deepspeed, started),
            *(self.coef, self.layers),
        )

    def lamb_follow_arguments(self, skip: int = 0) -> Any:
        x_squares, scale = self.normal(2, self.layout.n_blocks).abs()
        update_squares = torch.rand(len(self.layout.sizes), generator=self._random) * 50
        return arguments_of(
            "lamb_follow",
            *(x_squares * 100, scale, self.table.numel, self.layer_start, torch.tensor([skip], dtype=torch.int32)),
            *(self.coef, self.layers, update_squares),
        )


def divisor(exp_avg_sq: Tensor | None, eps_inside_sqrt: bool) -> Divisor | None:
    return None if exp_avg_sq is None else Divisor(exp_avg_sq, None, eps_inside_sqrt)


def wide(tensor: Tensor) -> Array:
    """A copy in float64."""
    return tensor.detach().reshape(-1).double().numpy().copy()


def unpacked(bits: Tensor) -> Array:
    """+1 and -1 of packed bits, and 0 where there is a second plane that says so."""
    planes = bits.numpy()[:, None] if bits.dim() == 2 else bits.numpy()
    signs, *nonzero = (np.unpackbits(planes[:, k], bitorder="little") for k in range(planes.shape[1]))
    return (signs * 2.0 - 1.0) * (nonzero[0] if nonzero else 1.0)


def packed(values: Array, like: Tensor) -> Array:
    """What compression writes into ``like``: [W, bytes] or [W, 2, bytes]."""
    chunks = values.reshape(len(like), -1)
    planes = [chunks >= 0, chunks != 0] if like.dim() == 3 else [chunks >= 0]
    return np.packbits(np.stack(planes, 1), axis=-1, bitorder="little").reshape(like.shape)


def sign(x: Array, ternary: bool = False) -> Array:
    return np.sign(x) if ternary else np.where(x >= 0, 1.0, -1.0)


def denom(p: Problem, v: Array, eps_inside_sqrt: bool) -> Array:
    corrected, eps = v * p.column(Coef.RSQRT_BIAS2) ** 2, p.column(Coef.EPS)
    return np.sqrt(corrected + eps) if eps_inside_sqrt else np.sqrt(corrected) + eps


def unit_of(p: Problem, v: Array | None, eps_inside_sqrt: bool) -> Array:
    """What momentum is multiplied with: the layer's unit, over the denominator where v is given."""
    return p.column(Coef.UNIT) / (1 if v is None else denom(p, v, eps_inside_sqrt))


def momentum_compress(p: Problem, exp_avg_sq: Tensor | None, eps_inside_sqrt: bool) -> tuple[Array, Array, Array]:
    """The new c, the elements whose gradient was dropped, and a bound on c's rounding errors."""
    old, scale = wide(p.compensated), p.by_element(p.worker_scale)
    residual = old - scale * sign(old, p.ternary)
    momentum = p.by_element(p.exp_avg_scale) * unpacked(p.exp_avg_bits)
    unit = unit_of(p, None if exp_avg_sq is None else wide(exp_avg_sq), eps_inside_sqrt)
    kept = p.column(Coef.BETA1) * momentum + residual
    fresh = p.column(Coef.ONE_MINUS_BETA1) * p.flat(p.grads) * unit
    with np.errstate(over="ignore", invalid="ignore"):
        too_large = ~(np.abs(p.flat(p.grads)) <= p.column(Coef.GRAD_LIMIT))
        dropped = p.live & (too_large | ~np.isfinite((kept + fresh).astype(np.float32)))
    fresh = np.where(p.live & ~dropped, fresh, 0.0)
    bound = 8 * EPS32 * (np.abs(old) + scale + np.abs(momentum) + np.abs(fresh))
    return np.where(p.live, kept + fresh, 0.0), dropped, bound


def scale_of(c: Array, norm: str, ternary: bool = False) -> float:
    """The scale of live elements ``c``; where ternary, that of those which are not zero."""
    if ternary:
        c = c[c != 0]
    if c.size == 0:
        return 0.0
    l1, l2 = np.abs(c).mean(), np.sqrt((c * c).mean())
    return {"l1": l1, "l2": l2, "contractive": min(l2, 1.9 * l1), "relaxed": min(1.3 * l2, 1.9 * l1)}[norm]


def apply_momentum(p: Problem, exp_avg_sq: Tensor | None, eps_inside_sqrt: bool) -> Array:
    """The moved parameters, by flat index."""
    x = p.flat(p.params)
    update = p.by_element(p.exp_avg_scale) * unpacked(p.exp_avg_bits) / p.column(Coef.UNIT)
    if exp_avg_sq is not None:
        update = update / denom(p, wide(exp_avg_sq), eps_inside_sqrt)
    moved = p.column(Coef.DECAY) * x - p.column(Coef.STEP_SIZE) * update
    return np.where(p.live, moved, x)


def adam_update(p: Problem, grad: Array, m: Array, v: Array) -> tuple[Array, Array, Array]:
    """The new m, v and parameters."""
    g = np.where(p.live, grad, 0.0)
    m = p.column(Coef.BETA1) * m + p.column(Coef.ONE_MINUS_BETA1) * g
    v = p.column(Coef.BETA2) * v + p.column(Coef.ONE_MINUS_BETA2) * g * g
    x = p.flat(p.params)
    moved = p.column(Coef.DECAY) * x - p.column(Coef.STEP_SIZE) * m / denom(p, v, False)
    return m, v, np.where(p.live, moved, x)


def lamb_update(
    p: Problem, grad: Array, m: Array, v: Array, eps_inside_sqrt: bool
) -> tuple[Array, Array, Array, Array, Array]:
    """The new m and v, then x and u of live elements, and a bound on u's rounding errors."""
    g = np.where(p.live, grad, 0.0)
    size = np.abs(p.column(Coef.BETA1) * m) + np.abs(p.column(Coef.ONE_MINUS_BETA1) * g)
    m = p.column(Coef.BETA1) * m + p.column(Coef.ONE_MINUS_BETA1) * g
    v = p.column(Coef.BETA2) * v + p.column(Coef.ONE_MINUS_BETA2) * g * g
    return m, v, *lamb_direction(p, m, v, eps_inside_sqrt, size)


def lamb_direction(
    p: Problem, m: Array, v: Array, eps_inside_sqrt: bool, size: Array | None = None
) -> tuple[Array, Array, Array]:
    """x and u of live elements, and a bound on u's rounding errors; ``size``: magnitude of m's terms."""
    x = np.where(p.live, p.flat(p.params), 0.0)
    per_momentum = p.column(Coef.UNBIAS1) / denom(p, v, eps_inside_sqrt)
    decay = p.column(Coef.WEIGHT_DECAY) * x
    bound = 8 * EPS32 * ((np.abs(m) if size is None else size) * per_momentum + np.abs(decay))
    return x, np.where(p.live, m * per_momentum + decay, 0.0), np.where(p.live, bound, 0.0)


def layers_of(p: Problem, per_block: Array) -> list[Array]:
    """What a table of blocks holds of each layer; the last has the padding as well."""
    start = p.layer_start.tolist()
    return [per_block[..., begin:end] for begin, end in pairwise(start)]


def lamb_coefficient(p: Problem, norms: Array, layers: Array, deepspeed: bool) -> tuple[Array, Array]:
    """c and its moving average, of each layer."""
    coefficients, averages = [], []
    for row, old, part in zip(p.coef.double().numpy(), layers[Layer.AVERAGE], layers_of(p, norms), strict=True):
        x, u = np.sqrt(part.sum(1))
        c = min(max(x / u, row[Coef.C_MIN]), row[Coef.C_MAX]) if x > 0 and u > 0 else 1.0
        coefficients.append(c)
        averages.append(old if deepspeed and c == 1 else row[Coef.BETA3] * old + (1 - row[Coef.BETA3]) * c)
    return np.array(coefficients), np.array(averages)


def lamb_move(p: Problem, m: Array, v: Array, eps_inside_sqrt: bool) -> Array:
    """The moved parameters, by flat index."""
    x = p.flat(p.params)
    moved = p.column(Coef.DECAY) * x - p.column(Coef.STEP_SIZE) * m / denom(p, v, eps_inside_sqrt)
    return np.where(p.live, moved, x)


def momentum_of(p: Problem, bits: Tensor, scale: Tensor, per_unit: Array | None = None) -> Array:
    """In its own units; ``per_unit``: also times this, for each element."""
    m = p.by_element(scale) * unpacked(bits) / p.column(Coef.UNIT)
    return m if per_unit is None else m * per_unit


def freeze(
    p: Problem, m: Array, v: Array, inside: bool, precondition: bool, dead_value: Tensor | None, least: Tensor | None
) -> tuple[Array, Array]:
    """The compressed vector, as if nothing had been sent yet, and the frozen variance."""
    owner = p.places.block_tensor.long()
    if dead_value is not None:
        v = np.where(v == 0, p.by_element(dead_value[owner]), v)
    if least is not None:
        v = np.maximum(v, p.by_element(least[owner]))
    return p.column(Coef.BETA1) * m * unit_of(p, v if precondition else None, inside), v


def fresh_variance(p: Problem, m: Array, last: Array, old: Array) -> tuple[Array, Array]:
    """v_t from two momenta and v_{t-1}, and a bound on its rounding errors."""
    rate = p.column(Coef.ONE_MINUS_BETA1)
    g = (m - p.column(Coef.BETA1) * last) / rate
    off = 8 * EPS32 * (np.abs(m) + np.abs(last)) / np.abs(rate)
    v = p.column(Coef.BETA2) * old + p.column(Coef.ONE_MINUS_BETA2) * g * g
    bound = 8 * EPS32 * v + p.column(Coef.ONE_MINUS_BETA2) * off * (2 * np.abs(g) + off)
    return np.where(p.live, v, 0.0), bound


def ratios(p: Problem, frozen: Array, fresh: Array, eps_inside_sqrt: bool, deepspeed: bool) -> Array:
    """Of every element; 0 where it does not count."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if deepspeed:
            ratio = denom(p, frozen, eps_inside_sqrt) / denom(p, fresh, eps_inside_sqrt)
        else:
            ratio = np.where(frozen > 0, frozen / fresh, 0.0)
    return np.where(p.live, ratio, 0.0)


def lamb_follow(p: Problem, x_squares: Array, bits: Array, mean: Array) -> tuple[Array, Array, Array]:
    """The mean of |u|^2 of each layer, the coefficient that it moves with, and the next one."""
    result = []
    for row, x2, of_bits, last in zip(
        p.coef.double().numpy(), layers_of(p, x_squares), layers_of(p, bits), mean, strict=True
    ):
        x, unit = np.sqrt(x2.sum()), row[Coef.UNIT]
        now = (rules.SHARE_OF_NORM * row[Coef.UNBIAS1] / unit) ** 2 * of_bits.sum()
        following = last
        if now > 0:
            following = row[Coef.BETA3] * last + (1 - row[Coef.BETA3]) * now if last > 0 else now
        c = []
        for squares in (now, following):
            u = np.sqrt(squares + (row[Coef.WEIGHT_DECAY] * x) ** 2)
            c.append(min(max(x / u, row[Coef.C_MIN]), row[Coef.C_MAX]) if x > 0 and u > 0 else 1.0)
        result.append((following, min(unit, c[0]), c[1]))
    return tuple(np.array(column) for column in zip(*result, strict=True))


def lamb_rescale(p: Problem, largest: Array, norms: Array | None, layers: Array, deepspeed: bool) -> Array:
    """r of each layer."""
    result = []
    for t, (row, found) in enumerate(zip(p.coef.double().numpy(), layers_of(p, largest), strict=True)):
        last, r = layers[Layer.RATIO][t], found.max(initial=0.0)
        if r == 0:
            result.append(last)
            continue
        if norms is not None:
            adam, u = np.sqrt(layers_of(p, norms)[t].sum(1))
            share = min(adam / u, 1.0) if u > 0 else 1.0
            r = share * r + 1 - share
        change = (last * (1 - row[Coef.R_THRESHOLD]), last * (1 + row[Coef.R_THRESHOLD]))
        limits = (row[Coef.R_MIN], row[Coef.R_MAX])
        for low, high in (limits, change) if deepspeed else (change, limits):
            r = min(max(r, low), high)
        result.append(r)
    return np.array(result)
