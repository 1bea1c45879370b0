"""An error-compensated 1-bit all-reduce in parts: what the parts of one line of elements have in common.

A part is a range of the line, with a ``CompressedAllReduce`` of its own; its messages become rows of one
buffer, so that kernels find the signs of the whole result in one place, as if there were no parts.
``buckets`` cuts the line so that a part can travel while the next is not there yet, ``hierarchy`` so that
each rank of a node has one of them to send.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..triton_kernels import TAIL, FlatLayout, LiveTable, ScaleScope, Span, block_table, flatten, live_table
from ..triton_kernels.launch import tables_of
from .allreduce import CompressedAllReduce, result_of
from .message import CHECKED, Messages
from .transport import Transport


class PartedAllReduce:
    """Skeleton; has what an optimizer needs of a ``CompressedAllReduce``, under the same names.

    Args:
        layout: The whole line, with as many chunks as all parts have.
        count: Into how many parts it is cut.
        here: Which of them this rank takes part in.
        transport: Between the ranks that average a part.
        device, scale_norm, scale_scope, compensated, live, ternary: See ``CompressedAllReduce``.

    Attributes:
        parts: The ``CompressedAllReduce`` of each part that is here.
        gathered: The messages of all parts: their bits are the result's signs.
        scale: float32 [B], the result's magnitude per block.
        server_residual: float32, of the chunks that this rank serves.
    """

    shares_messages = True
    """Whether the messages of a part that is here are rows of ``gathered``."""

    def __init__(
        self,
        layout: FlatLayout,
        count: int,
        here: Sequence[int],
        transport: Transport,
        *,
        device: torch.device,
        scale_norm: str,
        scale_scope: ScaleScope,
        compensated: Tensor,
        live: LiveTable | None = None,
        ternary: bool = False,
    ) -> None:
        self.layout, self.device, self.count = layout, device, count
        self._here = list(here)
        layouts = [layout.part(i, count) for i in range(count)]
        slots = [part.scale_slots(scale_scope) for part in layouts]
        self._slot = torch.cat([slot for slot, _ in slots]).view(layout.world_size, -1).to(device)
        most = max(n for _, n in slots)
        self.gathered = Messages(layout.world_size, most, layout, device, ternary)
        self.block_tensor = block_table(layout, device)
        self.scale = torch.zeros(layout.n_blocks, device=device)
        self.server_residual = torch.zeros(len(self._here), layout.chunk_numel, device=device)
        self._compensated = compensated
        self.flags = torch.zeros(1, dtype=torch.int32, device=device)
        self.absent: Tensor | None = None
        self._spans = [list(layout.spans(*_ends(self._elements(i)))) for i in self._here]
        chunks = layout.world_size // count
        self.parts = [
            CompressedAllReduce(
                layouts[i],
                transport,
                device=device,
                scale_norm=scale_norm,
                scale_scope=scale_scope,
                compensated=compensated[self._elements(i)],
                ternary=ternary,
                gathered=self.gathered.rows(i * chunks, (i + 1) * chunks, layouts[i])
                if self.shares_messages
                else Messages(chunks, most, layouts[i], device, ternary),
                scale=self.scale[self._blocks(i)],
                served=served,
            )
            for i, served in zip(self._here, self.server_residual, strict=True)
        ]
        self.set_live(live_table(layout).to(device) if live is None else live)

    def _elements(self, i: int) -> slice:
        length = self.layout.numel // self.count
        return slice(i * length, (i + 1) * length)

    def _blocks(self, i: int) -> slice:
        length = self.layout.n_blocks // self.count
        return slice(i * length, (i + 1) * length)

    @property
    def bits(self) -> Tensor:
        """The result's signs: uint8 [chunks, bytes], or [chunks, 2, bytes] where ternary."""
        return self.gathered.bits

    @property
    def worker_residual(self) -> Tensor:
        """The workers' c, after ``settle`` e, of what is here: float32."""
        return self._compensated

    def set_live(self, live: LiveTable) -> None:
        """Says which elements count. No other may be non-zero in ``compensated``."""
        self.live = live
        for i, part in zip(self._here, self.parts, strict=True):
            blocks = self._blocks(i)
            part.set_live(LiveTable(live.bits, live.row[blocks], live.numel[blocks]))

    def refuse(self, flags: Tensor) -> None:
        """See ``CompressedAllReduce``: all parts are skipped, or none."""
        for part in self.parts:
            part.refuse(flags)
        self.scale *= ((self.flags != 0) | (flags == 0)).float()
        self.flags = self.flags | flags

    def restore(self, absent: Tensor) -> None:
        """See ``CompressedAllReduce``."""
        for part in self.parts:
            part.restore(absent)

    def settle(self) -> None:
        """See ``CompressedAllReduce``."""
        for part in self.parts:
            part.settle()

    def result(self) -> Tensor:
        """The last average, float32 [P], by flat index, zero where nothing is live; allocates."""
        return result_of(self.bits, self.scale, self.live)

    def norms(self) -> tuple[float, float, float]:
        """See ``CompressedAllReduce``."""
        squares = [[norm**2 for norm in part.norms()] for part in self.parts]
        compensated, worker, server = (sum(column) ** 0.5 for column in zip(*squares, strict=True))
        return compensated, worker, server

    def residual_ratio(self) -> float:
        """See ``CompressedAllReduce``: the mean over the parts that are here."""
        return sum(part.residual_ratio() for part in self.parts) / len(self.parts)

    def squares_by_block(self) -> Tensor:
        """See ``CompressedAllReduce``; 0 in blocks of parts that are not here."""
        squares = torch.zeros(2, self.layout.n_blocks, dtype=torch.float64, device=self.device)
        for i, part in zip(self._here, self.parts, strict=True):
            squares[:, self._blocks(i)] = part.squares_by_block()
        return squares

    @property
    def arrived_words(self) -> Tensor:
        """The headers of the part in which ranks differ; reads from the device."""
        differing = (
            p for p in self.parts if bool((p.arrived_words[:, :CHECKED] != p.arrived_words[:1, :CHECKED]).any())
        )
        return next(differing, self.parts[0]).arrived_words

    @property
    def digests(self) -> list[int]:
        """What each part's next messages tell of the last; waits for the device."""
        return [digest for part in self.parts for digest in part.digests]

    def resume(self, digests: Sequence[int]) -> None:
        """See ``CompressedAllReduce``."""
        for i, part in enumerate(self.parts):
            part.resume(digests[i : i + 1])

    def serve_again(self) -> None:
        """See ``CompressedAllReduce``."""
        for part in self.parts:
            part.serve_again()

    @property
    def wire_bytes(self) -> int:
        """Bytes of what only serves within a step."""
        return sum(part.wire_bytes for part in self.parts)

    def state(self) -> list[Tensor]:
        """All that the next step needs, tables included."""
        held = [v for v in vars(self).values() if isinstance(v, Tensor)]
        return [*held, *self.live, self.gathered.buffer, *(t for part in self.parts for t in part.state())]


def pieces_of(tensors: Sequence[Tensor], spans: Sequence[Span], sizes: Sequence[int]) -> list[Tensor]:
    """What of each tensor lies in the spans of one part, flat, in memory order; an empty one where nothing does."""
    pieces = [tensors[0].new_empty(0)] * len(sizes)
    for tensor, start, stop, _ in spans:
        given = tensors[tensor]
        if given.numel() and stop - start < sizes[tensor]:
            given = given.as_strided((stop - start,), (1,), given.storage_offset() + start)
        pieces[tensor] = given
    return pieces


def _ends(part: slice) -> tuple[int, int]:
    return part.start, part.stop


class NodeMean:
    """Averages tensors inside a node: each rank gets one part of the line, by a reduce-scatter.

    Args:
        layout: The whole line.
        inside: The ranks of this node.
        dtype: In which they travel: float32 or bfloat16.
        device: Where they lie.

    Attributes:
        own: Where this rank's part lies on the line.
        blocks: Which blocks it has.
    """

    def __init__(self, layout: FlatLayout, inside: Transport, dtype: torch.dtype, device: torch.device) -> None:
        self._layout, self._inside = layout, inside
        self._launch_tables = tables_of(layout, device)  # kept, because launches share what somebody keeps
        count, rank = inside.world_size, inside.rank
        length, blocks = layout.numel // count, layout.n_blocks // count
        self.own = slice(rank * length, (rank + 1) * length)
        self.blocks = slice(rank * blocks, (rank + 1) * blocks)
        self._spans = list(layout.spans(*_ends(self.own)))
        self._flat = torch.zeros(layout.numel + TAIL, device=device)
        self._sent = torch.zeros(layout.numel if dtype != torch.float32 else 0, dtype=dtype, device=device)
        self._arrived = torch.zeros(length, dtype=dtype, device=device)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What of each tensor's mean over the node lies in this rank's part; valid until the next call."""
        layout, sent = self._layout, self._flat[: self._layout.numel]
        flatten(tensors, layout.sizes, layout.block_size, 1.0 / self._inside.world_size, None, self._flat)
        if self._sent.numel():
            sent = self._sent.copy_(sent)
        self._inside.reduce_scatter(self._arrived, sent)
        means = [self._arrived[:0]] * len(layout.sizes)
        for tensor, start, stop, flat in self._spans:
            at = flat - self.own.start
            means[tensor] = self._arrived[at : at + stop - start]
        return means

    def pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What of each tensor lies in this rank's part, as views."""
        return pieces_of(tensors, self._spans, self._layout.sizes)

    @property
    def scratch(self) -> tuple[Tensor, ...]:
        """What only serves within a step."""
        return self._flat, self._sent, self._arrived
