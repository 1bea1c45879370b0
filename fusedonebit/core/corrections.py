"""Keeps what bfloat16 parameters lack of float32 masters, in 8 or 16 bits (docs/design.md, *Corrections*)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout
from ..triton_kernels.eager import join


class Corrections:
    """Corrections of some parameters, by flat index; ops read and write them with the parameters.

    Args:
        which: Indices of these parameters.
        dtype: int16 or int8; None: none has one.

    Attributes:
        which: As given.
        table: [P]; None until all is laid out, and where none has one.
        loaded: Masters of which the next update makes corrections: float32, by index.
    """

    def __init__(self, which: Sequence[int], dtype: torch.dtype | None) -> None:
        self.which, self._dtype = which, dtype
        self.table: Tensor | None = None
        self.loaded: dict[int, Tensor] = {}
        self._layout: FlatLayout | None = None

    def lay_out(self, layout: FlatLayout, device: torch.device) -> None:
        """Make room for one of each element of the flat index space: there are none as yet."""
        self._layout, self.table = layout, torch.zeros(layout.numel, dtype=self._dtype, device=device)

    def of(self, i: int, dense: Tensor) -> Tensor:
        """Return those of parameter ``i``, as a view of ``dense``'s shape and strides."""
        assert self.table is not None
        assert self._layout is not None
        start = self._layout.offset(i)
        return self.table[start : start + dense.numel()].as_strided(dense.shape, dense.stride())

    def master(self, i: int, p: Tensor, dense: Tensor) -> Tensor:
        """Return the float32 master of ``p``, parameter ``i``; where one was loaded, what it will be."""
        if self.table is None:
            return p.float()
        return join(p.float(), self._lacking(i, p) if i in self.loaded else self.of(i, dense))

    def _lacking(self, i: int, p: Tensor) -> Tensor:
        """Return what ``p`` lacks of the master that was loaded; 0 where it is not that master, rounded."""
        off, is_rounded = lacking(p, self.loaded[i])
        assert self._dtype is not None
        narrow = torch.iinfo(self._dtype)
        units = off if narrow.bits == 16 else (off + 0x80) >> 8
        return torch.where(is_rounded, units.clamp(narrow.min, narrow.max), 0).to(self._dtype)

    def take_up(self, params: Sequence[Tensor], dense: Sequence[Tensor]) -> None:
        """Make corrections of what was loaded; others stay, whatever was written into parameters.

        They are half a unit in its last place at most.
        """
        for i in self.loaded:
            self.of(i, dense[i]).copy_(self._lacking(i, params[i].detach()))
        self.loaded.clear()


def lacking(p: Tensor, master: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a bfloat16 parameter lacks of its master, in its last bits, and whether no bfloat16 is nearer."""
    wide = p.float()
    off = master.view(torch.int32).long() - wide.view(torch.int32)
    return off, (off.abs() <= 1 << 15) & ~(master.isnan() | wide.isnan())
