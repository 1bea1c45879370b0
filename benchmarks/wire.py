"""Bytes on the wire: one rank, one compression-stage step, exactly as the messages are laid out."""

from __future__ import annotations

import itertools

from fusedonebit.comm import Messages
from fusedonebit.triton_kernels import FlatLayout, ScaleScope, choose_block_size

from .registry import Report, case
from .shapes import MODELS, sizes

NUMERICS: dict[str, tuple[ScaleScope, bool]] = {
    "global": ("global", False),
    "layer": ("layer", False),
    "block": ("block", False),
    "ternary": ("block", True),
}
"""Scale scopes, and the two bits of ``ternary=True``; "block" is the default."""
COLUMNS = {"model": "<12", "numerics": "<8", "W": ">3", "tensors": ">7", "elements": ">12,", "block": ">5"}
COLUMNS |= {"bytes": ">12,", "/ (2 n/8)": ">9.4f", "/ global": ">8.4f", "x fewer than fp32": ">17.1f"}


@case("wire", "both")
def wire(report: Report) -> None:
    """Bytes that a rank sends in a compression-stage step: known models, 2 to 64 ranks, each scale scope."""
    table = report.table("All W messages of both collectives counted", COLUMNS)
    for name, shapes in MODELS.items():
        counts = sizes(shapes())
        for world_size, (label, (scope, ternary)) in itertools.product((2, 8, 64), NUMERICS.items()):
            layout = FlatLayout(counts, world_size, choose_block_size(counts, world_size))
            sent, bits = wire_bytes(layout, scope, ternary), 2 * layout.real_numel / 8
            row = {"model": name, "numerics": label, "W": world_size, "tensors": len(counts)}
            row |= {"elements": layout.real_numel, "block": layout.block_size, "bytes": sent, "/ (2 n/8)": sent / bits}
            row |= {"/ global": sent / wire_bytes(layout, "global"), "x fewer than fp32": 32 * bits / sent}
            table.add(**row)


def wire_bytes(layout: FlatLayout, scope: ScaleScope, ternary: bool = False) -> int:
    """Both collectives' messages, this rank's own included (what it keeps is 1/W of it)."""
    message = Messages.size(layout.scale_slots(scope)[1], layout, ternary)
    return 2 * layout.world_size * message
