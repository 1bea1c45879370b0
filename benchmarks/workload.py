"""Arguments of every kernel at any size, made on the device, and calls that can be repeated for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from fusedonebit import triton_kernels as ops
from fusedonebit.comm.message import Messages
from fusedonebit.triton_kernels import LARGEST_GRADIENT, SCALE_NORMS, TAIL, Coef, FlatLayout, Layer, live_table
from fusedonebit.triton_kernels.close_round import Left, Received
from fusedonebit.triton_kernels.finish import PIECE, Segments
from fusedonebit.triton_kernels.headers import CHECKED, Flag, Word
from fusedonebit.triton_kernels.local_step import LocalStep
from fusedonebit.triton_kernels.local_update import ChunkHeaders, Chunks, Compensation, LocalUpdate
from fusedonebit.triton_kernels.marsit_signs import threshold_of
from fusedonebit.triton_kernels.nouns import (
    Arrived,
    Coefficients,
    Compensated,
    Count,
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
from fusedonebit.triton_kernels.rules import GROUP_COLUMNS
from fusedonebit.triton_kernels.tables import tables_of

PRECONDITIONED = ("momentum_compress", "apply_momentum", "lamb_ratio", "local_step", "rebuild_momentum")
"""Ops that do something else where what is compressed is preconditioned."""
CALLS = (
    "pack",
    "unpack",
    "flatten",
    "gradient_squares",
    "momentum_compress",
    "finish",
    "server_reduce",
    "receive",
    "apply_momentum",
    "adam_update",
    "lamb_update",
    "lamb_coefficient",
    "lamb_move",
    "lamb_ratio",
    "lamb_rescale",
    "lamb_follow",
    "local_update",
    "merge_signs",
    "close_round",
    "pick_owned",
    "place_owned",
    "add_values",
    "local_step",
    "rebuild_momentum",
    "lion_compress",
    "advance",
)
OF_TWO_WORKERS = ("server_reduce", "pick_owned", "place_owned")
"""Ops that one worker alone has no use for."""


class Workload:
    """The ops of one rank; values stay finite and normal however often they are called.

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
        self.layout = FlatLayout(tuple(sizes), world_size)
        self.preconditioned = preconditioned
        self._slot, self._slots = self.layout.scale_slots("block")
        self.device, self.dtype, self.world_size = device, dtype, world_size
        self.table = live_table(self.layout).to(device)
        self.tables = tables_of(self.layout, device)  # which each launch would else make anew
        self.places = Places.of(self.layout, self.tables.tensor, self.table)
        self.skip = torch.zeros(1, dtype=torch.int32, device=device)
        self.coef = torch.zeros(len(sizes), len(Coef), device=device)
        for column, value in {
            Coef.BETA1: 0.9,
            Coef.ONE_MINUS_BETA1: 0.1,
            Coef.BETA2: 0.999,
            Coef.ONE_MINUS_BETA2: 0.001,
            Coef.STEP_SIZE: 1e-6,
            Coef.DECAY: 1 - 1e-5,
            Coef.RSQRT_BIAS2: 1.0,
            Coef.EPS: 1e-8,
            Coef.UNIT: 1.0,
            Coef.LR: 1e-6,
            Coef.UNBIAS1: 1.0,
            Coef.WEIGHT_DECAY: 0.01,
            Coef.C_MIN: 0.01,
            Coef.C_MAX: 10.0,
            Coef.BETA3: 0.9,
            Coef.R_MIN: 0.5,
            Coef.R_MAX: 4.0,
            Coef.R_THRESHOLD: 0.1,
            Coef.GRAD_LIMIT: LARGEST_GRADIENT,
        }.items():
            self.coef[:, column] = value

    def _random(self) -> list[Tensor]:
        return [torch.randn(n, device=self.device, dtype=self.dtype) for n in self.layout.sizes]

    def _bytes(self, rows: int) -> Tensor:
        return torch.randint(256, (rows, self.layout.chunk_bytes), device=self.device, dtype=torch.uint8)

    def _scale(self, value: float, blocks: int) -> Tensor:
        return torch.full((blocks,), value, device=self.device)

    @cached_property
    def grads(self) -> list[Tensor]:
        return self._random()

    @cached_property
    def params(self) -> list[Tensor]:
        return self._random()

    @cached_property
    def partials(self) -> Tensor:
        return torch.ones(2, self.layout.n_blocks, dtype=torch.float64, device=self.device)

    @cached_property
    def layer_start(self) -> Tensor:
        return torch.tensor([*self.layout.first_block[:-1], self.layout.n_blocks], device=self.device)

    @cached_property
    def layers(self) -> Tensor:
        return torch.ones(len(Layer), len(self.layout.sizes), device=self.device)

    @cached_property
    def norms(self) -> Tensor:
        return torch.ones(2, self.layout.n_blocks, dtype=torch.float64, device=self.device)

    @cached_property
    def largest(self) -> Tensor:
        return torch.ones(self.layout.n_blocks, device=self.device)

    @cached_property
    def started(self) -> Tensor:
        return torch.ones(1, dtype=torch.int32, device=self.device)

    def call(self, name: str) -> partial[None]:
        """A repeatable call of one op; its arguments are made now."""
        return getattr(self, name)()

    def pack(self) -> partial[None]:
        x = torch.randn(self.layout.numel, device=self.device, dtype=self.dtype)
        bits = torch.empty(len(x) // 8, device=self.device, dtype=torch.uint8)
        return partial(torch.ops.fusedonebit.pack, x, bits)

    def unpack(self) -> partial[None]:
        bits = self._bytes(self.world_size).view(-1)
        x = torch.empty(self.layout.numel, device=self.device, dtype=self.dtype)
        return partial(torch.ops.fusedonebit.unpack, bits, x)

    def flatten(self) -> partial[None]:
        out = torch.zeros(self.layout.numel + TAIL, device=self.device)
        arguments = (self.grads, self.layout.sizes, self.layout.block_size, 1.0, None, out)
        return partial(ops.flatten, *arguments)

    def gradient_squares(self) -> partial[None]:
        where = (self.grads, self.layout.sizes, self.layout.block_size, LARGEST_GRADIENT, None)
        squares = torch.zeros(self.layout.n_blocks, dtype=torch.float64, device=self.device)
        sums, total = torch.zeros_like(squares[::PIECE]).contiguous(), torch.zeros_like(squares[0])
        tickets = torch.zeros(1 + len(sums), dtype=torch.int32, device=self.device)
        told = torch.zeros(2, device=self.device)
        return partial(ops.gradient_squares, *where, squares, sums, tickets, total, None, None, told)

    def momentum_compress(self) -> partial[None]:
        layout, blocks = self.layout, self.layout.n_blocks
        v = self._divisor() if self.preconditioned else None
        # |0.9 * momentum + 0.1 * g| stays below the scale on average, so that c does not run away.
        arguments = (
            *(self.grads, self.places),
            Compensated(torch.zeros(layout.numel, device=self.device), self._scale(0.3, blocks)),
            *(self._signs(), self.coef, v, self._bytes(self.world_size)),
            *(self.partials, self.skip.clone(), self.skip),
        )
        return partial(ops.momentum_compress, *arguments)

    def finish(self) -> partial[None]:
        groups, group_of, steps, _ = self._clock()
        renewal = Coefficients(groups, None, group_of, steps, None, self.coef.clone())
        return self._finish(self.partials, self.layout.scale_segments("block"), self.world_size, renewal)

    def finish_server(self) -> partial[None]:
        served = self.layout.blocks_per_chunk
        return self._finish(self.partials[:, :served].contiguous(), self._slot[:served], 1)

    def _finish(
        self, partials: Tensor, segment: Tensor, messages: int, renewal: Coefficients | None = None
    ) -> partial[None]:
        lengths = torch.unique_consecutive(segment, return_counts=True)[1]
        segments = Segments.of(segment, self._scale(0.0, len(lengths)))
        segments.live.copy_(lengths * self.layout.block_size)
        return partial(
            ops.finish,
            partials,
            segments,
            SCALE_NORMS["contractive"],
            segment.to(self.device, torch.int32),
            torch.zeros(messages, self._slots, device=self.device),
            torch.zeros(messages, len(Word), dtype=torch.int32, device=self.device),
            Header(1, None, False, 1, 0, self.skip.clone()),
            self._sum(),
            self.skip,
            renewal,
        )

    def _sum(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self.device)

    def receive(self) -> partial[None]:
        layout, blocks, served = self.layout, self.layout.n_blocks, self.layout.blocks_per_chunk
        messages = Messages(self.world_size, self._slots, layout, self.device)
        messages.payload.copy_(torch.randint(256, messages.payload.shape, device=self.device, dtype=torch.uint8))
        messages.scales.fill_(0.1)
        segment = layout.scale_segments("block").to(self.device, torch.int32)
        largest, norm = (torch.full((1,), 1e30, dtype=torch.float64, device=self.device)[0] for _ in range(2))
        return partial(
            ops.receive,
            Arrived(messages.words, messages.words[:1].clone(), messages.front, messages.scales),
            self._side(segment, 0.3),
            self._side(self._slot[:served].to(self.device, torch.int32), 0.2),
            0,
            self._scale(0.0, blocks),
            self.skip,
            self.skip.clone(),
            Digest(self._sum(), self._sum(), self._sum()[0]),
            self.skip.clone(),
            Limit(self.coef, self.places.block_tensor, self._scale(1.0, blocks), largest, norm),
            torch.zeros(self.world_size * spans_of(served), dtype=torch.float64, device=self.device),
        )

    def _side(self, segment: Tensor, measured: float) -> Side:
        scales = (self._scale(0.0, len(segment)) for _ in range(2))
        return Side(segment, self._scale(measured, int(segment[-1]) + 1), *scales)

    def server_reduce(self) -> partial[None]:
        served = self.layout.blocks_per_chunk
        words = torch.zeros(self.world_size, len(Word), dtype=torch.int32, device=self.device)
        slot = self._slot[:served].to(self.device, torch.int32)
        arguments = (
            Sent(self._bytes(self.world_size), self._arrived_scales(), words, words[0].clone(), slot),
            self.places.at(slice(0, served)),
            Compensated(torch.zeros(self.layout.chunk_numel, device=self.device), self._scale(0.2, served)),
            self._bytes(1),
            *(torch.zeros(2, served, dtype=torch.float64, device=self.device), self.skip, self.skip.clone()),
            words.clone(),
        )
        return partial(ops.server_reduce, *arguments)

    def _divisor(self) -> Divisor:
        return Divisor(torch.rand(self.layout.numel, device=self.device) + 0.5, None, False)

    def _signs(self) -> Signs:
        return Signs(self._bytes(self.world_size), self._scale(0.1, self.layout.n_blocks))

    def _arrived_scales(self) -> Tensor:
        return torch.full((self.world_size, self._slots), 0.1, device=self.device)

    def apply_momentum(self) -> partial[None]:
        v = None if self.preconditioned else self._divisor()
        arguments = (self.params, self.places, self._signs(), v, self.coef, self.skip, None, self._sum())
        *_, steps, updates = self._clock()
        count = Count(None, updates, None, None, int(Flag.VETO), int(Flag.MISMATCH))
        return partial(ops.apply_momentum, *arguments, None, count, steps)

    def adam_update(self) -> partial[None]:
        layout = self.layout
        arguments = (
            *(self.params, layout.cut(torch.randn(layout.numel, device=self.device)), self.places),
            *(self._moments(), self.coef, self.skip, None, None),
        )
        return partial(ops.adam_update, *arguments)

    def _moments(self) -> Moments:
        zeros = torch.zeros(self.layout.numel, device=self.device)
        return Moments(zeros, torch.rand_like(zeros) + 0.5)

    def lamb_update(self) -> partial[None]:
        layout = self.layout
        arguments = (
            *(self.params, layout.cut(torch.randn(layout.numel, device=self.device)), self.places),
            *(self._moments(), False, self.coef),
            *(self.skip, None, self.norms),
        )
        return partial(ops.lamb_update, *arguments)

    def lamb_coefficient(self) -> partial[None]:
        return partial(
            ops.lamb_coefficient, self.norms, self.layer_start, self.skip, False, self.coef.clone(), self.layers
        )

    def lamb_move(self) -> partial[None]:
        return partial(ops.lamb_move, self.params, self.places, self._moments(), False, self.coef, self.skip, None)

    def lamb_ratio(self) -> partial[None]:
        fresh = torch.rand(self.layout.numel, device=self.device) + 0.5
        arguments = (
            *(self.params, self.places, self._signs(), self._signs(), self._divisor(), fresh, self.started),
            *(self.preconditioned, False, self.coef, self.skip, Ratios(self.largest, None)),
        )
        return partial(ops.lamb_ratio, *arguments)

    def lamb_rescale(self) -> partial[None]:
        arguments = (self.largest, None, self.layer_start, self.skip, False, self.started, self.coef.clone())
        return partial(ops.lamb_rescale, *arguments, self.layers)

    def lamb_follow(self) -> partial[None]:
        squares, scale = (self._scale(size, self.layout.n_blocks) for size in (0.5, 0.1))
        where = (self.table.numel, self.layer_start, self.skip)
        return partial(ops.lamb_follow, squares, scale, *where, self.coef.clone(), self.layers, self.layers[0].clone())

    def _messages(self, rows: int) -> Messages:
        messages = Messages(rows, 0, self.layout, self.device)
        messages.bits.copy_(self._bytes(rows))
        return messages

    def local_update(self) -> partial[None]:
        layout, blocks, messages = self.layout, self.layout.n_blocks, self._messages(self.world_size)
        m, c = (torch.zeros(layout.numel, device=self.device) for _ in range(2))
        arguments = (
            *(self.params, self.grads, self.places, Chunks(0, self.world_size), m, None),
            *(Compensation(c, self._scale(1e-6, blocks), self._scale(1.0, blocks)), messages.bits, self.coef),
            *(LocalUpdate(torch.ones(1, device=self.device), False), self.skip),
            ChunkHeaders(messages.words, 0, 0, 0, self._sum()),
        )
        return partial(ops.local_update, *arguments)

    def merge_signs(self) -> partial[None]:
        own, arrived = self._messages(self.world_size), self._messages(self.world_size)
        headers = (own.words, arrived.words, CHECKED, int(Word.FLAGS), int(Flag.MISMATCH))
        return partial(ops.merge_signs, own.bits, arrived.bits, threshold_of(3), 12_345, *headers)

    def close_round(self) -> partial[None]:
        messages = self._messages(self.world_size)
        written = [self._scale(0.0, self.layout.n_blocks) for _ in range(3)]
        arguments = (
            Received(messages.words, messages.words[0], messages.front),
            *(self.coef, self.places.block_tensor, 1.0, 1.0, True, self.skip, Left(*written)),
            *(Digest(self._sum(), self._sum(), self._sum()[0]), self.skip.clone(), self.skip.clone()),
        )
        return partial(ops.close_round, *arguments)

    def pick_owned(self) -> partial[None]:
        own = self._messages(self.world_size).bits
        return partial(ops.pick_owned, own, 0, 12_345, self._bytes(self.world_size), self._messages(1).bits)

    def place_owned(self) -> partial[None]:
        arrived, own = self._messages(self.world_size).bits, self._messages(self.world_size).bits
        return partial(ops.place_owned, arrived, self._bytes(self.world_size), own)

    def add_values(self) -> partial[None]:
        values = torch.zeros(self.layout.numel, device=self.device)
        return partial(ops.add_values, self.params, self.places, values, False, self.skip, None)

    def local_step(self) -> partial[None]:
        layout, flags = self.layout, torch.zeros(1, dtype=torch.int32, device=self.device)
        m, v, *_ = self._moments()
        # |m/denom| stays below the scale nearly everywhere, so that the buffer does not run away.
        arguments = (
            *(self.params, self.grads, self.places, m, v),
            *(torch.zeros(layout.numel, device=self.device), self._scale(5.0, layout.n_blocks), self.coef),
            LocalStep(False, self.preconditioned, True, False, False, False),
            *(self.skip, None, flags),
        )
        return partial(ops.local_step, *arguments)

    def rebuild_momentum(self) -> partial[None]:
        m, v, *_ = self._moments()
        arguments = (
            *(self.places, self._bytes(self.world_size)),
            *(self._scale(0.1, self.layout.n_blocks), None, None, v if self.preconditioned else None, False),
            *(Coefficients.of(self.coef), m, self._scale(0.0, self.layout.n_blocks)),
        )
        return partial(ops.rebuild_momentum, *arguments)

    def lion_compress(self) -> partial[None]:
        step = torch.zeros((), dtype=torch.int64, device=self.device)
        flags = torch.zeros(1, dtype=torch.int32, device=self.device)
        arguments = (
            *(self.grads, self.places, self._moments()[0], self.coef),
            *(step, self.skip, self._bytes(self.world_size)),
            *(self._arrived_scales(), 0, flags),
        )
        return partial(ops.lion_compress, *arguments)

    def _clock(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of one group: its row, each tensor's group and updates, and those of all."""
        groups = torch.zeros(1, GROUP_COLUMNS, dtype=torch.float64, device=self.device)
        groups[:, : len(Coef)] = self.coef[:1]
        steps = torch.zeros(len(self.coef), dtype=torch.float64, device=self.device)
        group_of = torch.zeros(len(steps), dtype=torch.int32, device=self.device)
        return groups, group_of, steps, torch.zeros((), dtype=torch.int64, device=self.device)

    def advance(self) -> partial[None]:
        groups, group_of, steps, updates = self._clock()
        entered = torch.full_like(steps, torch.inf)
        table = Coefficients(groups, None, group_of, steps, None, self.coef.clone())
        count = Count(None, updates, None, None, int(Flag.VETO), int(Flag.MISMATCH))
        return partial(ops.advance, table, count, self.skip, entered, False, None, False)

    def step(self, lamb: bool = False) -> Callable[[], None]:
        """All kernels of one rank's compression-stage step; nothing travels."""
        names = ["momentum_compress", "finish", "server_reduce", "finish_server", "receive"]
        names += ["lamb_ratio", "lamb_rescale"] if lamb else []
        names += ["apply_momentum"]
        calls = [self.call(name) for name in names]

        def run() -> None:
            for call in calls:
                call()

        return run
