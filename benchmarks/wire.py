"""Bytes on the wire: one rank, one compression-stage step, exactly as the messages are laid out."""

from __future__ import annotations

import inspect
import itertools

import torch
from fusedonebit.comm import Messages
from fusedonebit.triton_kernels import FlatLayout, ScaleScope, choose_block_size

from fusedonebit import OneBitAdam

from .shapes import MODELS, sizes

DEFAULT = inspect.signature(OneBitAdam).parameters["scale_scope"].default


def run() -> None:
    print("Wire bytes of one rank and compression-stage step, all W messages of both collectives counted")
    columns = f"{'model':12} {'scales':7} {'W':>3} {'tensors':>7} {'elements':>12} {'block':>5} {'bytes':>12}"
    print(f"{columns} {'/ (2 n/8)':>9} {'saved':>7}")
    for name, shapes in MODELS.items():
        for scope, world_size in itertools.product((DEFAULT, "global"), (2, 8, 64)):
            counts = sizes(shapes())
            layout = FlatLayout(counts, world_size, choose_block_size(counts, world_size))
            sent, bits = wire_bytes(layout, scope), 2 * layout.real_numel / 8
            fp32 = 2 * 4 * layout.real_numel
            print(
                f"{name:12} {scope:7} {world_size:3} {len(counts):7} {layout.real_numel:12,} {layout.block_size:5} "
                f"{sent:12,} {sent / bits:9.4f} {fp32 / sent:6.1f}x"
            )


def wire_bytes(layout: FlatLayout, scope: ScaleScope) -> int:
    """Both collectives' messages, this rank's own included (what it keeps is 1/W of it)."""
    message = Messages.size(layout.scale_slots(scope)[1], layout)
    return 2 * layout.world_size * message


if __name__ == "__main__":
    torch.set_num_threads(1)
    run()
