"""Declarations of what an optimizer carries from step to step, which all that handles state follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout

Per = Literal["element", "tensor", "bit", "block", "part", "chunk", "rank"]
"""What a state has an entry for.

By parameter: "element", of the parameter's shape; "tensor", a column of a table [..., tensors]. Along the flat index
space of P elements (``FlatLayout``): "bit", uint8 [P / 8]; "block", float32 [P / block_size]; "part", float32, the
elements that this rank compresses; "chunk", float32, those that it serves. Neither: "rank", int64 [1].
"""


@dataclass(frozen=True)
class StateSpec:
    """Declare one thing that an optimizer keeps.

    Allocation, views in ``optimizer.state``, ``state_dict``, ``torch.distributed.checkpoint``, other numbers of ranks
    and checks of values are derived.

    Args:
        name: In checkpoints, and in ``optimizer.state`` where it is published.
        per: What it has an entry for.
        at: The algorithm's attribute; or one of a part of it ("reducer.scale"), which has allocated it.
        rows: Of a table, its rows; 0: it is [tensors].
        given: Whether the algorithm has allocated it.
        stage: In which stage it is kept: "full" precision, "compressed", or "both".
        of_rank: Whether each rank has its own. On other numbers of ranks each takes the mean; of chunks its share.
        plane: Which of two planes of bits [chunks, 2, bytes] it is.
        when: An attribute of the algorithm that must be true for it to be kept at all.
        only: A key of the checkpoint's header that must be true, or something else says what it would.
        published: Whether users see it in ``optimizer.state``, and in which stage.
        taken_by: What it is added to where only the checkpoint has it; where only the optimizer has, it is zero.
        optional: Whether the checkpoint of another optimizer may lack it.
        holds_parameters: Whether it is a copy of parameters, which a mask leaves as they are.
        not_negative: Whether its values are at least 0; or a key of the header that must be true for that.
        kept_in: The attribute that has its dtype, of elements; "": they are float32.
    """

    name: str
    per: Per
    at: str
    rows: int = 0
    given: bool = False
    stage: Literal["both", "full", "compressed"] = "both"
    of_rank: bool = False
    plane: int = 0
    when: str = ""
    only: str = ""
    published: bool | Literal["full"] = False
    taken_by: str = ""
    optional: bool = False
    holds_parameters: bool = False
    not_negative: bool | str = False
    kept_in: str = ""

    @property
    def by_parameter(self) -> bool:
        """Return whether it is saved with each parameter; else with the first, along the flat index space."""
        return self.per in ("element", "tensor")

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of what is saved."""
        return {"bit": torch.uint8, "rank": torch.int64}.get(self.per, torch.float32)

    def applies(self, owner: object, compressed: bool) -> bool:
        """Return whether ``owner`` keeps it in this stage."""
        return (self.stage == "both" or (self.stage == "compressed") == compressed) and self.wanted(owner)

    def wanted(self, owner: object) -> bool:
        """Return whether ``owner`` keeps it in any stage."""
        return not self.when or bool(attrgetter(self.when)(owner))

    def shown(self, compressed: bool) -> bool:
        """Return whether it is published in this stage."""
        return self.published is True or (self.published == "full" and not compressed)

    def tensor(self, owner: object) -> Tensor:
        """Return what ``owner`` has of it: float32 [P] of elements, else of the shape in which it is kept."""
        found: Tensor = attrgetter(self.at)(owner)
        return found[:, self.plane] if self.per == "bit" and found.dim() == 3 else found

    def allocate(self, owner: object, layout: FlatLayout, device: torch.device) -> None:
        """Make the tensor, zeros; an empty one where it is not wanted, unless another declaration wants it."""
        if self.given or "." in self.at or (self.at in vars(owner) and not self.wanted(owner)):
            return
        tensors = len(layout.sizes)
        shape = (layout.numel,) if self.per == "element" else (self.rows, tensors) if self.rows else (tensors,)
        dtype = attrgetter(self.kept_in)(owner) if self.kept_in else torch.float32
        setattr(owner, self.at, torch.zeros(shape if self.wanted(owner) else 0, dtype=dtype, device=device))

    @property
    def in_common(self) -> bool:
        """Return whether all ranks have it alike, to the bit, between two synchronisations; bits have digests."""
        return not self.of_rank and self.per in ("element", "tensor", "block")

    def is_in(self, header: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with this header has it."""
        return not self.only or bool(header[self.only])


Specs = tuple[StateSpec, ...]
