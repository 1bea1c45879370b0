"""Averages gradients at 8, 4 or 1 bits per element, for any optimizer: all-reduce, and reduce-scatter.

    per rank  1. quantise the local tensors into W messages, one per chunk                      (quantise)
              2. all_to_all: rank k gets every rank's chunk k
    server k  3. average the chunk, quantise the mean into one message                          (requantise)
              4. all_gather: every rank gets every chunk
    per rank  5. write the mean into the tensors; where a message has a flag, NaN       (take_back, dequantise)

A reduce-scatter ends behind 2: what arrives is added in float32, and quantised no more. What quantisation leaves is
carried by whoever has left it, a worker or a server, if ``Format.feedback`` says in what.

A message is one row of uint8: the header's eight words (``headers.Word``), a bit for each tensor of which the sender
has no gradient, a bfloat16 scale for each block, levels; each part but the last padded to a multiple of 16 bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout, dequantise, live_table, quantise, requantise, take_back
from ..triton_kernels.codes import in_float32, keep_nearest
from ..triton_kernels.headers import Flag, Word
from ..triton_kernels.level_io import Levels
from ..triton_kernels.nouns import Header, Places, Stored
from ..triton_kernels.tables import tables_of
from .absent import absence
from .message import HEADER_BYTES, MAGIC, aligned, describe_mismatch, layout_word
from .transport import Transport

BLOCK_SIZES = {8: 256, 4: 256, 1: 1024}
"""Elements that share a scale, by bits: scales are 0.8 %, 1.6 % and 1.6 % of a message."""
REFUSED = sum(Flag) & ~int(Flag.NONFINITE)
"""Flags of an exchange for which all ranks raise: all but that of a gradient that is not finite."""
FEEDBACK = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
"""What is left may be kept in."""


OUT_OF_PASS = "a rank has run more backward passes than another, or one that ended in an error"
"""How the numbers of exchanges come to differ."""


class Format(NamedTuple):
    """How gradients travel, and in what what is left of them is kept.

    Attributes:
        bits: 8, 4 or 1.
        feedback: "fp32", "bf16" or "8bit"; None: nothing is kept, and levels are drawn so that their mean is right.
    """

    bits: int
    feedback: str | None

    @property
    def block_size(self) -> int:
        """Return how many elements share a scale."""
        return BLOCK_SIZES[self.bits]

    def kept_bytes(self, numel: int) -> int:
        """Return the bytes of what is left of so many elements."""
        if self.feedback is None:
            return 0
        size = FEEDBACK[self.feedback].itemsize
        return numel * size + (numel // self.block_size if size == 1 else 0)

    def room(self, numel: int, device: torch.device) -> Stored | None:
        """Return room for what is left of so many elements, zeros; None without feedback."""
        if self.feedback is None:
            return None
        numbers = torch.zeros(numel, dtype=FEEDBACK[self.feedback], device=device)
        coded = numbers.dtype is torch.uint8
        return Stored(numbers, numbers.new_zeros(numel // self.block_size) if coded else None)


class Step(NamedTuple):
    """What a rank knows of one exchange.

    Attributes:
        number: Counted alike on all ranks, an int32.
        absent: Tensors of which this rank has no gradient.
        unit: What the loss was multiplied with, float32 []; None: nothing.
        aborted: Whether this rank's tensors are no gradients: it tells all others so.
    """

    number: int
    absent: tuple[int, ...] = ()
    unit: Tensor | None = None
    aborted: bool = False


class LevelMessages:
    """Equally long messages in one buffer, with views of their parts.

    Args:
        count: How many.
        layout: Of all that travels; a message has a chunk of it.
        bits: Of a level.
        device: Where they lie.
        nbytes: Of a message at least; what is more stays zero.

    Attributes:
        buffer: uint8 [count, bytes].
        levels: Its parts, as ops take them.
    """

    def __init__(self, count: int, layout: FlatLayout, bits: int, device: torch.device, nbytes: int = 0) -> None:
        blocks, absent = layout.blocks_per_chunk, -(-len(layout.sizes) // 8)
        head = HEADER_BYTES + aligned(absent)
        front = head + aligned(2 * blocks)
        end = front + layout.chunk_bytes * bits
        self.buffer = torch.zeros(count, max(end, nbytes), dtype=torch.uint8, device=device)
        words = self.buffer[:, :HEADER_BYTES].view(torch.int32)
        scales = self.buffer[:, head:front].view(torch.int16)[:, :blocks]
        absent_bits = self.buffer[:, HEADER_BYTES : HEADER_BYTES + absent]
        self.levels = Levels(self.buffer[:, front:end], scales, words, absent_bits)
        words[:, Word.MAGIC] = MAGIC
        words[:, Word.LAYOUT] = layout_word(layout, bits, self.buffer.shape[1])

    @staticmethod
    def size(layout: FlatLayout, bits: int) -> int:
        """Return the bytes of one message."""
        return LevelMessages(0, layout, bits, torch.device("cpu")).buffer.shape[1]


class Exchange:
    """What an all-reduce and a reduce-scatter have in common: a worker, which quantises and carries what is left.

    Args:
        layout: Of what travels; ``world_size`` is the transport's.
        transport: Over which.
        form: How.
        device: Where all lies.
        nbytes: Of a message at least.

    Attributes:
        salt: With which levels are drawn, besides the number of the step and the rank.
        worker: What is left here; None without feedback.
        flags: int32 [1], of the last exchange, equal on all ranks.
        sent, arrived: Messages to and from each rank.
        digest: int64 [1], of what arrived last.
    """

    salt = 0

    def __init__(
        self, layout: FlatLayout, transport: Transport, form: Format, device: torch.device, nbytes: int = 0
    ) -> None:
        self.layout, self.transport, self.form, self.device = layout, transport, form, device
        self._tables = tables_of(layout, device)  # kept: launches of others share it meanwhile
        self.places = Places.of(layout, self._tables.tensor, live_table(layout).to(device))
        self.worker = form.room(layout.numel, device)
        self.flags, self._found, self._ticket = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(3))
        self.digest = torch.zeros(1, dtype=torch.int64, device=device)
        self.sent, self.arrived = (
            LevelMessages(layout.world_size, layout, form.bits, device, nbytes) for _ in ("to each", "from each")
        )
        self._kept_words = torch.zeros(layout.world_size, len(Word), dtype=torch.int32, device=device)
        self._absent: tuple[int, ...] = ()

    def borrow(self, of: Exchange) -> None:
        """Use the messages of another, of the same layout and form, that is never in use at the same time."""
        self.sent, self.arrived = of.sent, of.arrived

    def write(self, tensors: Sequence[Tensor], step: Step) -> None:
        """Quantise what this rank has into ``sent``."""
        if step.absent != self._absent:
            self.sent.levels.absent.copy_(absence(self.layout, step.absent, self.device).bits)
            self._absent = step.absent
        header = self._header(step)
        seed, bits = self._seed(step), self.form.bits
        message = self.sent.levels
        quantise(tensors, self.places, self.worker, step.unit, message, header, self._ticket, self.digest, seed, bits)

    def _header(self, step: Step) -> Header:
        return Header(step.number, None, False, 0, step.aborted * Flag.ABORT, self._found)

    def _seed(self, step: Step, serves: bool = False) -> int:
        """Return what a worker or a server draws with, not as any other rank, nor in another step or with more salt."""
        return zlib.crc32(struct.pack("<4q", step.number, self.salt, self.transport.rank, serves)) & 0x7FFFFFFF

    def abort_where(self, flags: Tensor) -> None:
        """Let this rank abort the next call if flags of another, int32 [1], are such that ranks raise for them."""
        self._found |= ((flags & REFUSED) != 0) * int(Flag.ABORT)

    @property
    def _own_words(self) -> Tensor:
        return self.sent.levels.words[0]

    def _take_back(self, tensors: Sequence[Tensor], step: Step) -> None:
        """Undo what ``write`` has done to what is left, where a message has a flag."""
        if self.worker is not None:
            arrived, sent = self.arrived.levels, self.sent.levels
            seed, bits = self._seed(step), self.form.bits
            take_back(arrived, self._own_words, tensors, self.places, self.worker, step.unit, sent, seed, bits)

    def owe(self, pieces: Sequence[Tensor | None]) -> None:
        """Take over what was left of each tensor elsewhere, as this worker's; None: nothing."""
        if self.worker is None:
            return
        flat = in_float32(*self.worker).clone()
        for own, piece in zip(self.layout.cut(flat), pieces, strict=True):
            if piece is not None:
                own += piece
        keep_nearest(flat, *self.worker)

    def describe(self) -> str:
        """Say why the flags of the last exchange are what they are; reads from the device."""
        flags, words = int(self.flags), self._kept_words.cpu()
        if flags & Flag.MISMATCH:
            return f"ranks differ: {describe_mismatch(words, out_of_step=OUT_OF_PASS)}"
        if flags & Flag.ABORT:
            # Servers tell what any worker has told them.
            aborted = [str(rank) for rank, told in enumerate(words[:, Word.FLAGS].tolist()) if told & Flag.ABORT]
            return f"rank {' or '.join(aborted)} could not go on, and its own error says why"
        return f"a message has flags that nobody sets, {words[:, Word.FLAGS].tolist()}: it was damaged on its way"


class QuantisedAllReduce(Exchange):
    """Averages tensors over all ranks, in place, with the same bits on all.

    Stand-alone use, on tensors that keep their sizes::

        average = QuantisedAllReduce(FlatLayout(sizes, world_size, form.block_size), transport, form, device)
        average(tensors, Step(number))

    Args:
        layout, transport, form, device, nbytes: As for any exchange: the flat index space with a chunk for each rank.

    Attributes:
        server: What is left of the chunk which this rank serves; None without feedback.
        served: The message to all.
    """

    def __init__(
        self, layout: FlatLayout, transport: Transport, form: Format, device: torch.device, nbytes: int = 0
    ) -> None:
        super().__init__(layout, transport, form, device, nbytes)
        self.server = form.room(layout.chunk_numel, device)
        rank = transport.rank
        self._chunk = self.places.at(slice(rank * layout.blocks_per_chunk, (rank + 1) * layout.blocks_per_chunk))
        self.served = LevelMessages(1, layout, form.bits, device, nbytes)
        self._agreed = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, tensors: Sequence[Tensor], step: Step) -> None:
        """Average; every rank calls it. Where one has a gradient that is not finite all tensors become NaN.

        Raises:
            CollectiveError: if a collective failed; what is left is then lost.
        """
        self.write(tensors, step)
        self.transport.all_to_all(self.arrived.buffer, self.sent.buffer)
        self.serve(step)
        self.transport.all_gather(self.arrived.buffer, self.served.buffer)
        self.receive(tensors, step)

    def serve(self, step: Step) -> None:
        """Average what has ``arrived``, and quantise the mean into ``served``."""
        requantise(
            *(self.arrived.levels, self._own_words, self._chunk, self.server, step.unit, self.served.levels),
            *(self._header(step), self._agreed, self._kept_words, self._seed(step, serves=True), self.form.bits),
        )

    def receive(self, tensors: Sequence[Tensor], step: Step) -> None:
        """Write what has ``arrived`` of all servers into the tensors."""
        self._take_back(tensors, step)
        dequantise(
            *(self.arrived.levels, self._own_words, tensors, self.places, 1.0),
            *(self.flags, self._kept_words, self.digest, False, self.form.bits),
        )

    def owed(self) -> list[Tensor]:
        """Return what is left of each tensor, by this rank and the server on it: float32 [size], a copy.

        The sum over ranks, over their number, is what the mean lacks. A server's counts as often as there are ranks.
        """
        return owed(self.layout, self.transport.rank, self.worker, self.server)


class QuantisedReduceScatter(Exchange):
    """Sums tensors over all ranks, of which each gets one.

    Args:
        layout: W tensors of one size each, with a chunk for each rank.
        transport, form, device, nbytes: As for any exchange.
    """

    def __init__(
        self, layout: FlatLayout, transport: Transport, form: Format, device: torch.device, nbytes: int = 0
    ) -> None:
        super().__init__(layout, transport, form, device, nbytes)
        self._own_layout = FlatLayout(layout.sizes[:1], 1, layout.block_size)
        self._own_tables = tables_of(self._own_layout, device)
        self._own = Places.of(self._own_layout, self._own_tables.tensor, live_table(self._own_layout).to(device))

    def __call__(self, received: Tensor, tensors: Sequence[Tensor], step: Step, factor: float) -> None:
        """Write the sum over ranks of ``tensors[rank]``, times a factor, to ``received``; every rank calls it.

        Raises:
            CollectiveError: if a collective failed; what is left is then lost.
        """
        self.write(tensors, step)
        self.transport.all_to_all(self.arrived.buffer, self.sent.buffer)
        self.receive(received, tensors, step, factor)

    def receive(self, received: Tensor, tensors: Sequence[Tensor], step: Step, factor: float) -> None:
        """Write the sum of what has ``arrived``, times a factor, to ``received``."""
        self._take_back(tensors, step)
        dequantise(
            *(self.arrived.levels, self._own_words, [received], self._own, factor),
            *(self.flags, self._kept_words, self.digest, True, self.form.bits),
        )


def owed(layout: FlatLayout, rank: int, worker: Stored | None, server: Stored | None) -> list[Tensor]:
    """Return what ``QuantisedAllReduce.owed`` does, of the state of any rank of a layout."""
    if worker is None:
        return []
    flat = in_float32(*worker).clone()
    if server is not None:
        flat[rank * layout.chunk_numel :][: layout.chunk_numel] += layout.world_size * in_float32(*server)
    return layout.cut(flat)
