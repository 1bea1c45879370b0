"""Declarations of what an algorithm carries from step to step, which all that handles state follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..triton_kernels.codes import in_float32, keep_nearest
from ..triton_kernels.nouns import Preconditioner
from ..triton_kernels.renewal import variance
from .frame import Frame

Per = Literal["element", "tensor", "bit", "block", "part", "chunk", "rank"]
"""What a state has an entry for.

By parameter: "element", of the parameter's shape; "tensor", a column of a table [..., tensors]. Along the flat index
space of P elements (``FlatLayout``): "bit", uint8 [P / 8]; "block", float32 [P / block_size]; "part", float32, the
elements that this rank compresses; "chunk", float32, those that it serves. Neither: "rank", int64 [1].
"""


@dataclass(frozen=True, eq=False)
class StateTensor:
    """Declare one thing that is kept from step to step; it is asked for anew whenever somebody handles state.

    Views in ``optimizer.state``, ``state_dict``, ``torch.distributed.checkpoint``, other numbers of ranks and checks of
    values are derived.

    Args:
        name: In checkpoints, and in ``optimizer.state`` where it is published.
        per: What it has an entry for.
        tensor: Where it lies: [P] of elements, else of the shape in which it is kept.
        exponents: Of codes of a byte, those of each block, uint8; None: it is kept in floats.
        wanted: Whether it is kept; what is not is declared too, since checkpoints of others may have it.
        of_rank: Whether each rank has its own. On other numbers of ranks each takes the mean; of chunks its share.
        published: Whether users see it in ``optimizer.state``.
        only: A key of the checkpoint's header that must be true, or something else says what it would.
        taken_by: What it is added to where only the checkpoint has it; where only the optimizer has, it is zero.
        optional: Whether the checkpoint of another optimizer may lack it.
        holds_parameters: Whether it is a copy of parameters, which a mask leaves as they are.
        not_negative: Whether its values are at least 0; or a key of the header that must be true for that.
        factors: Where codes are the mean squares that a variance is made of, what it is made with; such a one is saved,
            not loaded.
        members: Parameters that have it, one behind the other, of which the first one's elements are the first that
            are kept; None: all.
    """

    name: str
    per: Per
    tensor: Tensor
    exponents: Tensor | None = None
    wanted: bool = True
    of_rank: bool = False
    published: bool = False
    only: str = ""
    taken_by: str = ""
    optional: bool = False
    holds_parameters: bool = False
    not_negative: bool | str = False
    factors: Tensor | None = None
    members: range | None = None

    def of(self, parameters: range) -> range:
        """Return which of the parameters have it."""
        return parameters if self.members is None else self.members

    @property
    def by_parameter(self) -> bool:
        """Return whether it is saved with each parameter; else with the first, along the flat index space."""
        return self.per in ("element", "tensor")

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of what is saved."""
        return {"bit": torch.uint8, "rank": torch.int64}.get(self.per, torch.float32)

    @property
    def in_common(self) -> bool:
        """Return whether all ranks have it alike, to the bit, between two synchronisations; bits have digests."""
        return self.wanted and not self.of_rank and self.per in ("element", "tensor", "block")

    def is_in(self, header: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with this header has it."""
        return not self.only or bool(header[self.only])

    # ---------------------------------------------------------------- numbers of elements

    def part(self, frame: Frame, i: int) -> Tensor:
        """Return what is kept of parameter ``i``'s elements, of its shape: where it lies, but of codes a float32 copy.

        Of a part or a chunk of the flat index space, all that is here.
        """
        if self.exponents is None:
            at = frame.layout.offset(i) - (frame.layout.offset(self.members[0]) if self.members else 0)
            return frame.parameters.shaped(self.tensor, i, at) if self.per == "element" else self.tensor
        if self.factors is not None:
            v = Preconditioner(*self._codes(frame, i), False, self.factors)
            x = variance(frame.places.at(self._blocks(frame, i)), v)
        else:
            x = in_float32(*self._codes(frame, i), signed=not self.not_negative)
        return frame.parameters.shaped(x, i, 0).clone() if self.per == "element" else x

    def keep(self, frame: Frame, i: int, part: Tensor) -> None:
        """Keep ``part``, which ``part`` has returned, and was filled; codes are rounded to nearest."""
        if self.exponents is None:
            return
        codes, exponents = self._codes(frame, i)
        x = torch.zeros(codes.shape, device=codes.device)
        (frame.parameters.shaped(x, i, 0) if self.per == "element" else x).copy_(part)
        keep_nearest(x, codes, exponents, signed=not self.not_negative)

    def _codes(self, frame: Frame, i: int) -> tuple[Tensor, Tensor]:
        """Return codes, uint8 [n], and their exponents: of the blocks of one parameter, or of all that there is."""
        assert self.exponents is not None
        codes = self.tensor.view(-1)
        if self.per != "element":
            return codes, self.exponents
        blocks = self._blocks(frame, i)
        return codes.view(frame.layout.n_blocks, -1)[blocks].view(-1), self.exponents[blocks]

    def _blocks(self, frame: Frame, i: int) -> slice:
        return slice(*frame.layout.first_block[i : i + 2])


RANK = StateTensor("rank", "rank", torch.empty(0, dtype=torch.int64), of_rank=True)
"""Whose file a file is; saved where ranks have rows of their own."""

MASTER = "master"
"""The name of master weights, which parameters keep."""
