"""Bytes on the wire: one rank, one compression-stage step, exactly as the messages are laid out."""

from __future__ import annotations

import itertools

import torch
from fusedonebit.comm import Messages
from fusedonebit.triton_kernels import FlatLayout, ScaleScope, choose_block_size

from .shapes import MODELS, sizes

NUMERICS: dict[str, tuple[ScaleScope, bool]] = {
    "global": ("global", False),
    "layer": ("layer", False),
    "block": ("block", False),
    "ternary": ("block", True),
}
"""Scale scopes, and the two bits of ``ternary=True``; "block" is the default."""


def run() -> None:
    print("Wire bytes of one rank and compression-stage step, all W messages of both collectives counted")
    columns = f"{'model':12} {'numerics':8} {'W':>3} {'tensors':>7} {'elements':>12} {'block':>5} {'bytes':>12}"
    print(f"{columns} {'/ (2 n/8)':>9} {'/ global':>8} {'saved':>7}")
    for name, shapes in MODELS.items():
        counts = sizes(shapes())
        for world_size, (label, (scope, ternary)) in itertools.product((2, 8, 64), NUMERICS.items()):
            layout = FlatLayout(counts, world_size, choose_block_size(counts, world_size))
            sent, bits = wire_bytes(layout, scope, ternary), 2 * layout.real_numel / 8
            print(
                f"{name:12} {label:8} {world_size:3} {len(counts):7} {layout.real_numel:12,} {layout.block_size:5} "
                f"{sent:12,} {sent / bits:9.4f} {sent / wire_bytes(layout, 'global'):8.4f} {32 * bits / sent:6.1f}x"
            )


def wire_bytes(layout: FlatLayout, scope: ScaleScope, ternary: bool = False) -> int:
    """Both collectives' messages, this rank's own included (what it keeps is 1/W of it)."""
    message = Messages.size(layout.scale_slots(scope)[1], layout, ternary)
    return 2 * layout.world_size * message


if __name__ == "__main__":
    torch.set_num_threads(1)
    run()
