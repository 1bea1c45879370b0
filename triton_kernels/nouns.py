"""What ops take: tensors, by what they must be (``checks``), and nouns, which are values that always travel together.

A noun is a NamedTuple. An op declares it as one argument, its kernel reads ``noun.field``, and callers hand over one
object. What torch, Triton's launcher and C get is flat (``flattening``): ``side.scale`` is ``side_scale`` to them.

A noun's ``derived`` is what kernels find in it besides its fields, lengths and strides: the types in Triton's notation,
and functions of fields, whose arguments are bound by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch import Tensor

from .columns import Factor, Layer
from .native.generate import Spec
from .rules import GROUP_COLUMNS

if TYPE_CHECKING:
    from .layout import FlatLayout
    from .tables import LiveTable

INTEGERS = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8

Floats = Annotated[Tensor, Spec(torch.float32)]
PerElement = Annotated[Floats, "P+"]
"""One for each element of the flat index space, or more."""
PerBlock = Annotated[Floats, "B"]
PerTensor = Annotated[Floats, "T"]
CoefTable = Annotated[Floats, "T COLUMNS"]
"""A row of ``Coef`` for each tensor."""
Layers = Annotated[Floats, f"{len(Layer)} T"]
"""A column of ``Layer`` for each tensor."""
Factors = Annotated[Floats, f"{len(Factor)} T"]
"""A column of ``Factor`` for each tensor."""
AnyFloats = Annotated[Tensor, Spec(None)]
"""float32 or bfloat16."""
AnyTensor = Annotated[Tensor, Spec(None, dense=False, others=(torch.float16, torch.float64, torch.bool, *INTEGERS))]
Variance = Annotated[AnyFloats, "P+"]
Residual = Annotated[AnyFloats, "P+"]
Moment = Annotated[Tensor, Spec(None, others=(torch.uint8,)), "P+"]
"""The same, or codes in uint8."""
Correction = Annotated[Tensor, Spec(torch.int8, others=(torch.int16,)), "P+"]
Doubles = Annotated[Tensor, Spec(torch.float64)]
FloatsOrDoubles = Annotated[Tensor, Spec(torch.float32, others=(torch.float64,))]
DoublePerBlock = Annotated[Doubles, "B"]
DoublePerTensor = Annotated[Doubles, "T"]
GroupRows = Annotated[Doubles, f"groups {GROUP_COLUMNS}"]
Partials = Annotated[Doubles, "2 B | 3 B"]
"""Sums of each block; the third, of what is not zero, where ternary."""
Table = Annotated[Tensor, Spec(torch.int32)]
Indices = Annotated[Table, "B"]
Flag = Annotated[Tensor, Spec(torch.int32, dense=False), "1"]
Headers = Annotated[Table, "_ WORDS"]
"""Rows of words (``headers.Word``)."""
Counters = Annotated[Tensor, Spec(torch.int64)]
Counter = Annotated[Counters, ""]
Starts = Annotated[Counters, "T+1"]
Bits = Annotated[Tensor, Spec(torch.uint8)]
OfTensors = Annotated[Bits, "T"]
Packed = Annotated[Bits, "W P/8/W+ | W 2 P/8/W+"]
"""A row for each chunk, LSB first; where ternary of two planes: signs, and which are not zero."""
Words = Annotated[Tensor, Spec(torch.uint32), "W stride"]
"""Bytes in rows of a multiple of 16, on which kernels work as on 32-bit words: a row for each chunk."""
Tensors = Sequence[Tensor]
"""The users' tensors, of any float dtype, dense; empty is zeros."""
Sizes = Sequence[int]

Derived = Mapping[str, tuple[str, Callable[..., Any]]]


def stride(tensor: Tensor | None) -> int:
    """Return the first stride, in elements; of words in quads of 16 bytes."""
    if tensor is None or not tensor.dim():
        return 0
    return tensor.stride(0) // 4 if tensor.dtype is torch.uint32 else tensor.stride(0)


class Places(NamedTuple):
    """Where tensors lie in the flat index space, and which of its elements count.

    Every op that walks over it takes one, whose fields keep their names where they are flat.
    """

    sizes: Sizes
    """Elements of each tensor; empty of a part of the space, such as a server's chunk."""
    block_size: int
    """Elements of a block."""
    block_tensor: Indices
    """Each block's tensor."""
    live: Annotated[Bits, "_ block_size/8"]
    """The patterns of elements that count, LSB first (``tables.live_table``)."""
    live_row: Indices
    """Each block's pattern."""

    @classmethod
    def of(cls, layout: FlatLayout, block_tensor: Tensor, live: LiveTable) -> Places:
        """Return those of a layout, on the device of the tables."""
        return cls(layout.sizes, layout.block_size, block_tensor, live.bits, live.row)

    def at(self, blocks: slice) -> Places:
        """Return those of some of the blocks."""
        return self._replace(sizes=(), block_tensor=self.block_tensor[blocks], live_row=self.live_row[blocks])

    def rows(self, x: Tensor) -> Tensor:
        """View x [blocks * block_size] as [blocks, block_size]."""
        return x.view(-1, self.block_size)


class Signs(NamedTuple):
    """Numbers of one bit each: a scale of each block, times signs."""

    bits: Packed
    scale: PerBlock

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides; ``plane``: bytes between the planes of bits, where ternary."""
        return {
            "bits_stride": ("i32", lambda bits: stride(bits)),
            "plane": ("i32", lambda bits: 0 if bits is None else bits.stride(-2)),
        }


class Stored(NamedTuple):
    """A number of each element as it is stored: in float32, in bfloat16, or in codes (``codes.encode``).

    ``block_io.load`` and ``store`` are what kernels read and write it by, ``eager.load`` and ``store`` eager functions.
    """

    numbers: Moment
    exponents: Annotated[Bits, "B"] | None = None
    """Of codes the exponent of each block; None: there are no codes."""

    @classmethod
    def row(cls, numbers: Tensor, exponents: Tensor | None, row: int) -> Stored:
        """Return numbers with their row of a table of exponents, uint8 [rows, B]; None: they are no codes."""
        return cls(numbers, None if exponents is None else exponents[row])


class Moments(NamedTuple):
    """Adam's moments as they are stored, both in the same form.

    Their exponents lie in one table, which kernels reach from one address: of two they would keep both in registers.
    """

    exp_avg: Moment
    """m, as ``Stored.numbers``."""
    exp_avg_sq: Moment
    """v."""
    exponents: Annotated[Bits, "2+ B"] | None = None
    """Of codes the exponents of m, and of v; None: there are no codes."""
    drawn: Counter | None = None
    """The updates done, with which what is not in float32 is rounded stochastically: to nearest, v would
    stand still. None: both are in float32, or only read."""

    def at(self, elements: slice, blocks: slice) -> Moments:
        """Return those of some of the blocks."""
        exponents = None if self.exponents is None else self.exponents[:, blocks]
        return Moments(self.exp_avg[elements], self.exp_avg_sq[elements], exponents, self.drawn)

    @property
    def stored(self) -> tuple[Stored, Stored]:
        """Return m and v."""
        return Stored.row(self.exp_avg, self.exponents, 0), Stored.row(self.exp_avg_sq, self.exponents, 1)

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides."""
        return {"exponents_stride": ("i32", lambda exponents: stride(exponents))}


class Compensated(NamedTuple):
    """What one side of error feedback keeps, a worker or a server: compensated values, and the scales they had.

    The residual c - s*sign(c) is deferred: it is formed when c is read again.
    """

    numbers: Moment
    """c, as ``Stored.numbers``."""
    scale: PerBlock
    """s of the last step."""
    exponents: Annotated[Bits, "1+ B"] | None = None
    """Of codes the exponents of c, and in further rows of what an op says."""
    drawn: Counter | None = None
    """The updates done, with which what is not in float32 is rounded stochastically: to nearest, small
    gradients would be lost. None: all is in float32."""

    @property
    def stored(self) -> Stored:
        """Return c."""
        return Stored.row(self.numbers, self.exponents, 0)

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides."""
        return {"exponents_stride": ("i32", lambda exponents: stride(exponents))}


class Divisor(NamedTuple):
    """A variance, stored in any form, by whose root something is divided."""

    numbers: Moment
    """v, as in ``Stored``."""
    exponents: Annotated[Bits, "B"] | None
    """As in ``Stored``."""
    eps_inside_sqrt: bool
    """Whether the denominator is sqrt(v + eps), v corrected for its start at 0, else sqrt(v) + eps."""


class Preconditioner(NamedTuple):
    """A ``Divisor`` of gradients, before they are compressed, which may be made of workers' mean squares."""

    numbers: Moment
    """v, as in ``Stored``; or codes of mean squares, of which ``rules.renewed`` makes it."""
    exponents: Annotated[Bits, "B"] | None
    """As in ``Stored``."""
    eps_inside_sqrt: bool
    """As in ``Divisor``."""
    factors: Factors | None = None
    """With which v is made of mean squares; None: ``numbers`` are v."""

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides."""
        return {"factors_stride": ("i32", lambda factors: stride(factors))}


class Codes(NamedTuple):
    """Numbers that are kept in codes alone, in rows of a chunk each."""

    numbers: Annotated[Bits, "chunks elements"]
    """See ``codes.encode``."""
    exponents: Annotated[Bits, "chunks blocks"]

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides."""
        return {
            "numbers_stride": ("i32", lambda numbers: stride(numbers)),
            "exponents_stride": ("i32", lambda exponents: stride(exponents)),
        }


class Header(NamedTuple):
    """What the headers of one step's messages have in common, besides their digest."""

    number: int
    """STEP, an int32."""
    counter: Annotated[Flag, " | 1"] | None
    """Where STEP lies instead."""
    counts: bool
    """Whether ``counter`` is one less, and to be counted up."""
    tag: int
    """TAG."""
    flags: int
    """FLAGS that the host knows."""
    pending: Flag
    """More of them, found on the device; 0 afterwards."""


class Count(NamedTuple):
    """What the end of a step counts by, and where: unless it was skipped, but for its number and replays."""

    absent: Annotated[Bits, "T"] | None
    """Not 0 where no rank had a gradient of a tensor, which is not counted; None: all had."""
    updates: Counter | None
    """Steps that were not skipped, written."""
    number: Annotated[Table, " | 1"] | None
    """The number that the coming step has in messages, modulo 2^32, written."""
    replays: Annotated[Counters, "4"] | None
    """Written: steps, those skipped, those with a flag of ``veto``, and of ``bad``."""
    veto: int = 0
    """A mask of flags."""
    bad: int = 0
    """Another one."""


NOT_COUNTED = Count(None, None, None, None)


class Coefficients(NamedTuple):
    """The table of coefficients, and what it is made of: anew for the coming step (``advance``), or on the way."""

    groups: GroupRows | None
    """What each group's tensors have in common; None: the table stays as it is."""
    lr: Annotated[Floats, "groups"] | None
    """Learning rates that are on the device, instead of those in ``groups``."""
    group_of: Annotated[Table, "T"] | None
    """Each tensor's group."""
    steps: DoublePerTensor | None
    """Updates of each."""
    mean_sq: DoublePerTensor | None
    """The mean of v, where tensors wait for a variance."""
    table: CoefTable
    """Written: on the way LR, STEP_SIZE, DECAY and UNBIAS1, for the step that
    is being taken (``renew_kernel``)."""
    moved: Annotated[Floats, "2 T"] | None = None
    """Sums of STEP_SIZE and products of DECAY over a round, to which this step is added. A table
    that is renewed on the way is then of the round: the mean STEP_SIZE of its ``length`` steps, and the product of
    their DECAY."""
    length: int = 1

    @classmethod
    def of(cls, table: Tensor) -> Coefficients:
        """Return a table that stays as it is."""
        return cls(None, None, None, None, None, table)

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides."""
        return {
            "tensors": ("i32", lambda group_of: 0 if group_of is None else len(group_of)),
            "moved_stride": ("i32", lambda moved: stride(moved)),
        }


class Limit(NamedTuple):
    """The guard's: an update is refused whose norm is beyond a limit, or no number.

    norm^2 = sum over blocks of (s * UNBIAS1 * weight)^2
    """

    coef: CoefTable | None
    """Of which UNBIAS1 is read; None where the op has the table anyway."""
    block_tensor: Indices | None
    """Each block's tensor."""
    weight: PerBlock | None
    """The root of the square of the update's norm per square of a block's scale."""
    largest: Annotated[Doubles, ""] | None
    """The largest norm that is let through."""
    norm: Annotated[Doubles, ""] | None
    """The update's, written."""

    def without(self, absent: Tensor | None) -> Limit:
        """Return one that does not count ``absent`` tensors, bool [tensors]."""
        if absent is None or self.weight is None:
            return self
        return self._replace(weight=self.weight * ~absent[self.block_tensor])


class Side(NamedTuple):
    """Scales on one side of error feedback, a worker's or a server's."""

    segment: Annotated[Table, "blocks"]
    """The measured scale that each block shares; rising."""
    measured: Annotated[Floats, "segments"]
    """Scales as ``finish`` has measured them."""
    scale: Annotated[Floats, "blocks"]
    """Scales of blocks, with which the residual is formed."""
    settled: Annotated[Floats, "blocks"]
    """Those with which it has been formed since the last step."""


class Ratios(NamedTuple):
    """What blocks tell of a layer's ratio in 1-bit LAMB."""

    largest: PerBlock
    """The largest ratio of the frozen variance to the fresh one; 0 in blocks where nothing counts."""
    norms: Annotated[Doubles, "2 B"] | None
    """Sums of (m_t/denom)^2 and of u^2 = (m_t/denom + wd*x)^2, to blend r with weight decay's share; or None."""

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides."""
        return {"norms_stride": ("i32", lambda norms: stride(norms))}


class Sent(NamedTuple):
    """What workers have sent to a server of its chunk of P elements, and what this rank's own header says."""

    bits: Annotated[Bits, "W P/8 | W 2 P/8"]
    """As ``Packed``, a row of each worker's."""
    scales: Annotated[Floats, "W 1+"]
    words: Annotated[Headers, "W WORDS"]
    """The headers."""
    own_words: Annotated[Flag, "WORDS"]
    """This rank's."""
    slot: Indices
    """Each block's slot among the scales."""

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides; ``plane``: as in ``Signs``."""
        return {
            "bits_stride": ("i32", lambda bits: stride(bits)),
            "plane": ("i32", lambda bits: bits.stride(-2)),
            "scales_stride": ("i32", lambda scales: stride(scales)),
            "words_stride": ("i32", lambda words: stride(words)),
            "world_size": ("i32", lambda bits: len(bits)),
        }


class Arrived(NamedTuple):
    """The servers' messages, of several parts one behind the other, and what this rank's own headers say."""

    words: Annotated[Headers, "messages WORDS"]
    """The headers: W of each part."""
    own_words: Annotated[Headers, "parts WORDS"]
    """This rank's."""
    summed: Annotated[Bits, "messages _"]
    """What of the messages the digest is to have now; of what is left out, ``apply_momentum``
    adds the bits."""
    scales: Annotated[Floats, "messages 1+"]

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides."""
        return {
            "words_stride": ("i32", lambda words: stride(words)),
            "own_words_stride": ("i32", lambda own_words: stride(own_words)),
            "summed_stride": ("i32", lambda summed: stride(summed)),
            "scales_stride": ("i32", lambda scales: stride(scales)),
            "parts": ("i32", lambda own_words: len(own_words)),
            "world_size": ("i32", lambda words, parts: len(words) // parts),
            "length": ("i32", lambda summed: summed.shape[1] // 8),
        }


class Digest(NamedTuple):
    """The checksum of what a rank has received, which the next messages carry."""

    sums: Annotated[Counters, "parts"]
    """Written: the wrapping sum of the 8-byte words of each part."""
    running: Annotated[Counters, "parts"]
    """0; scratch."""
    updates: Counter | None
    """Updates done, added; None: nobody counts."""
