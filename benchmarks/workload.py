"""Arguments of every kernel that is timed, at any size, made on the device, and calls that can be repeated for ever."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fusedonebit import triton_kernels as ops
from fusedonebit.comm.message import Messages
from fusedonebit.triton_kernels import LARGEST_GRADIENT, SCALE_NORMS, TAIL, Coef, FlatLayout, Layer, live_table, nouns
from fusedonebit.triton_kernels.finish import PIECE, Segments
from fusedonebit.triton_kernels.headers import Flag, Word
from fusedonebit.triton_kernels.local_step import LocalStep
from fusedonebit.triton_kernels.receive import spans_of
from fusedonebit.triton_kernels.rules import GROUP_COLUMNS
from fusedonebit.triton_kernels.tables import tables_of

INT32, INT64, DOUBLE = torch.int32, torch.int64, torch.float64
COEFFICIENTS = {Coef.BETA1: 0.9, Coef.ONE_MINUS_BETA1: 0.1, Coef.BETA2: 0.999, Coef.ONE_MINUS_BETA2: 0.001}
COEFFICIENTS |= {Coef.STEP_SIZE: 1e-6, Coef.LR: 1e-6, Coef.DECAY: 1 - 1e-5, Coef.WEIGHT_DECAY: 0.01, Coef.EPS: 1e-8}
COEFFICIENTS |= {Coef.RSQRT_BIAS2: 1.0, Coef.UNIT: 1.0, Coef.UNBIAS1: 1.0, Coef.C_MIN: 0.01, Coef.C_MAX: 10.0}
COEFFICIENTS |= {Coef.BETA3: 0.9, Coef.R_MIN: 0.5, Coef.R_MAX: 4.0, Coef.R_THRESHOLD: 0.1}
COEFFICIENTS |= {Coef.GRAD_LIMIT: LARGEST_GRADIENT}


class Workload:
    """The ops of one rank, a method for each, which makes its arguments; values stay finite however often it is called.

    Args:
        sizes: Elements of each tensor.
        device: Where all lies.
        world_size: Chunks; this rank serves the first.
        dtype: Of gradients and parameters.
        preconditioned: The optimizers' ``precondition``. Scales are those of their default, one per 4096 elements.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        world_size: int = 1,
        dtype: torch.dtype = torch.float32,
        preconditioned: bool = True,
    ) -> None:
        self.layout = layout = FlatLayout(tuple(sizes), world_size)
        self.preconditioned = preconditioned
        self._slot, self._slots = layout.scale_slots("block")
        self.device, self.dtype, self.world_size = device, dtype, world_size
        self.blocks, self.served = layout.n_blocks, layout.blocks_per_chunk
        self.table = live_table(layout).to(device)
        self.tables = tables_of(layout, device)  # which each launch would else make anew
        self.places = nouns.Places.of(layout, self.tables.tensor, self.table)
        self.skip = self._zeros(1, dtype=INT32)
        self.coef = self._zeros(len(sizes), len(Coef))
        for column, value in COEFFICIENTS.items():
            self.coef[:, column] = value
        self.partials, self.norms = (self._zeros(2, self.blocks, dtype=DOUBLE) + 1 for _ in range(2))
        self.layer_start = torch.tensor([*layout.first_block[:-1], self.blocks], device=device)
        self.layers, self.largest = self._zeros(len(Layer), len(sizes)) + 1, self._scale(1.0, self.blocks)

    def call(self, name: str) -> partial[None]:
        """A repeatable call of one op; its arguments are made now."""
        op = getattr(torch.ops.fusedonebit if name in ("pack", "unpack") else ops, name)
        return partial(op, *getattr(self, name)())

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _bytes(self, rows: int) -> Tensor:
        return torch.randint(256, (rows, self.layout.chunk_bytes), device=self.device, dtype=torch.uint8)

    def _scale(self, value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, device=self.device)

    def _random(self) -> list[Tensor]:
        return [torch.randn(n, device=self.device, dtype=self.dtype) for n in self.layout.sizes]

    grads, params = cached_property(_random), cached_property(_random)

    def _positive(self) -> Tensor:
        return torch.rand(self.layout.numel, device=self.device) + 0.5

    def _divisor(self) -> nouns.Divisor:
        return nouns.Divisor(self._positive(), None, False)

    def _moments(self) -> nouns.Moments:
        return nouns.Moments(self._zeros(self.layout.numel), self._positive())

    def _signs(self) -> nouns.Signs:
        return nouns.Signs(self._bytes(self.world_size), self._scale(0.1, self.blocks))

    def _side(self, segment: Tensor, measured: float) -> nouns.Side:
        scales = (self._scale(0.0, len(segment)) for _ in range(2))
        return nouns.Side(segment.to(self.device, INT32), self._scale(measured, int(segment[-1]) + 1), *scales)

    def _updates(self) -> list[Tensor]:
        return self.layout.cut(torch.randn(self.layout.numel, device=self.device))

    def _sum(self) -> Tensor:
        return self._zeros(1, dtype=INT64)

    def pack(self) -> tuple[Any, ...]:
        x = torch.randn(self.layout.numel, device=self.device, dtype=self.dtype)
        return x, torch.empty(len(x) // 8, device=self.device, dtype=torch.uint8)

    def unpack(self) -> tuple[Any, ...]:
        x = torch.empty(self.layout.numel, device=self.device, dtype=self.dtype)
        return self._bytes(self.world_size).view(-1), x

    def flatten(self) -> tuple[Any, ...]:
        layout = self.layout
        return self.grads, layout.sizes, layout.block_size, 1.0, None, self._zeros(layout.numel + TAIL)

    def gradient_squares(self) -> tuple[Any, ...]:
        where = (self.grads, self.layout.sizes, self.layout.block_size, LARGEST_GRADIENT, None)
        squares = self._zeros(self.blocks, dtype=DOUBLE)
        sums, total = torch.zeros_like(squares[::PIECE]).contiguous(), torch.zeros_like(squares[0])
        return *where, squares, sums, self._zeros(1 + len(sums), dtype=INT32), total, None, None, self._zeros(2)

    def momentum_compress(self) -> tuple[Any, ...]:
        v = nouns.Preconditioner(self._positive(), None, False) if self.preconditioned else None
        # |0.9 * momentum + 0.1 * g| stays below the scale on average, so that c does not run away.
        compensated = nouns.Compensated(self._zeros(self.layout.numel), self._scale(0.3, self.blocks))
        written = (self._bytes(self.world_size), self.partials, self.skip.clone(), self.skip)
        return self.grads, self.places, compensated, self._signs(), self.coef, v, *written

    def finish(self) -> tuple[Any, ...]:
        groups, group_of, steps, _ = self._clock()
        segment, messages = self.layout.scale_segments("block"), self.world_size
        lengths = torch.unique_consecutive(segment, return_counts=True)[1]
        segments = Segments.of(segment, self._scale(0.0, len(lengths)))
        segments.live.copy_(lengths * self.layout.block_size)
        return (
            *(self.partials, segments, SCALE_NORMS["contractive"], segment.to(self.device, INT32)),
            *(self._zeros(messages, self._slots), self._zeros(messages, len(Word), dtype=INT32)),
            *(nouns.Header(1, None, False, 1, 0, self.skip.clone()), self._sum(), self.skip),
            nouns.Coefficients(groups, None, group_of, steps, None, self.coef.clone()),
        )

    def receive(self) -> tuple[Any, ...]:
        messages = Messages(self.world_size, self._slots, self.layout, self.device)
        messages.payload.copy_(torch.randint(256, messages.payload.shape, device=self.device, dtype=torch.uint8))
        messages.scales.fill_(0.1)
        largest, norm = (torch.full((1,), 1e30, dtype=DOUBLE, device=self.device)[0] for _ in range(2))
        return (
            nouns.Arrived(messages.words, messages.words[:1].clone(), messages.front, messages.scales),
            *(self._side(self.layout.scale_segments("block"), 0.3), self._side(self._slot[: self.served], 0.2), 0),
            *(self._scale(0.0, self.blocks), self.skip, self.skip.clone()),
            *(nouns.Digest(self._sum(), self._sum(), self._sum()[0]), self.skip.clone()),
            nouns.Limit(self.coef, self.places.block_tensor, self._scale(1.0, self.blocks), largest, norm),
            self._zeros(self.world_size * spans_of(self.served), dtype=DOUBLE),
        )

    def server_reduce(self) -> tuple[Any, ...]:
        words, slot = self._zeros(self.world_size, len(Word), dtype=INT32), self._slot[: self.served]
        scales = self._scale(0.1, self.world_size, self._slots)
        return (
            nouns.Sent(self._bytes(self.world_size), scales, words, words[0].clone(), slot.to(self.device, INT32)),
            self.places.at(slice(0, self.served)),
            nouns.Compensated(self._zeros(self.layout.chunk_numel), self._scale(0.2, self.served)),
            *(self._bytes(1), self._zeros(2, self.served, dtype=DOUBLE), self.skip, self.skip.clone(), words.clone()),
        )

    def apply_momentum(self) -> tuple[Any, ...]:
        v = None if self.preconditioned else self._divisor()
        *_, steps, updates = self._clock()
        count = nouns.Count(None, updates, None, None, int(Flag.VETO), int(Flag.MISMATCH))
        moved = (self.params, self.places, self._signs(), v, self.coef, self.skip, None, self._sum())
        return *moved, None, count, steps

    def adam_update(self) -> tuple[Any, ...]:
        return self.params, self._updates(), self.places, self._moments(), self.coef, self.skip, None, None

    def lamb_update(self) -> tuple[Any, ...]:
        moved = (self.params, self._updates(), self.places, self._moments(), False, self.coef)
        return *moved, self.skip, None, self.norms

    def lamb_coefficient(self) -> tuple[Any, ...]:
        return self.norms, self.layer_start, self.skip, False, self.coef.clone(), self.layers

    def lamb_move(self) -> tuple[Any, ...]:
        return self.params, self.places, self._moments(), False, self.coef, self.skip, None

    def _started(self) -> Tensor:
        return self._zeros(1, dtype=INT32) + 1

    def lamb_ratio(self) -> tuple[Any, ...]:
        variances = (self._divisor(), self._positive(), self._started())
        how = (self.preconditioned, False, self.coef, self.skip, nouns.Ratios(self.largest, None))
        return self.params, self.places, self._signs(), self._signs(), *variances, *how

    def lamb_rescale(self) -> tuple[Any, ...]:
        ratios = (self.largest, None, self.layer_start, self.skip, False, self._started())
        return *ratios, self.coef.clone(), self.layers

    def lamb_follow(self) -> tuple[Any, ...]:
        squares, scale = (self._scale(size, self.blocks) for size in (0.5, 0.1))
        where = (self.table.numel, self.layer_start, self.skip)
        return squares, scale, *where, self.coef.clone(), self.layers, self.layers[0].clone()

    def local_step(self) -> tuple[Any, ...]:
        m, v, *_ = self._moments()
        # |m/denom| stays below the scale nearly everywhere, so that the buffer does not run away.
        buffer, scale = self._zeros(self.layout.numel), self._scale(5.0, self.blocks)
        how = LocalStep(False, self.preconditioned, True, False, False, False)
        flags = self._zeros(1, dtype=INT32)
        return self.params, self.grads, self.places, m, v, buffer, scale, self.coef, how, self.skip, None, flags

    def rebuild_momentum(self) -> tuple[Any, ...]:
        m, v, *_ = self._moments()
        sent = (self._bytes(self.world_size), self._scale(0.1, self.blocks), None, None)
        unit = (v if self.preconditioned else None, False, nouns.Coefficients.of(self.coef))
        return self.places, *sent, *unit, m, self._scale(0.0, self.blocks)

    def lion_compress(self) -> tuple[Any, ...]:
        taken = (self.grads, self.places, self._moments()[0], self.coef, self._zeros(dtype=INT64), self.skip)
        scales = self._scale(0.1, self.world_size, self._slots)
        return *taken, self._bytes(self.world_size), scales, 0, self._zeros(1, dtype=INT32)

    def _clock(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of one group: its row, each tensor's group and updates, and those of all."""
        groups = self._zeros(1, GROUP_COLUMNS, dtype=DOUBLE)
        groups[:, : len(Coef)] = self.coef[:1]
        steps = self._zeros(len(self.coef), dtype=DOUBLE)
        return groups, self._zeros(len(steps), dtype=INT32), steps, self._zeros(dtype=INT64)
