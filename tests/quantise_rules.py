"""What may be in arguments of the ops that send gradients in 8, 4 or 1 bits; see ``op_rules``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedonebit.triton_kernels.level_io import Levels

OPS_OF_LEVELS = ("quantise", "requantise", "take_back", "dequantise")
ON_CHUNKS = ("requantise",)
"""Those that work on one rank's chunk."""


def levels(m: Any, rows: int, blocks: int, heard: Any = 0) -> Levels:
    """Return messages of any levels; of tensors of which not all have a gradient, some are absent in all."""
    bits, block = m.asked["bits"], m.known["block_size"]
    codes = m.p.integers(0, 256, (rows, blocks * block * bits // 8), torch.uint8)
    scales = m.p.normal(rows, blocks).abs().bfloat16().view(torch.int16)
    width = -(-m.known["T"] // 8)
    absent = m.p.integers(0, 256, (1, width), torch.uint8) & m.p.integers(0, 256, (1, width), torch.uint8)
    if m.op.name == "requantise":
        absent = absent | m.p.integers(0, 256, (rows, width), torch.uint8)
    return Levels(codes, scales, m.p.headers(rows, heard=heard)[0], absent.repeat(rows // len(absent), 1))


def of_chunks(m: Any) -> Levels:
    return levels(m, m.known["W"], m.known["B"] // m.known["W"])


def arrived(m: Any) -> Levels:
    """Return a row of each sender: of its chunk, or of all that is added."""
    whole = m.server or m.asked.get("sums")
    return levels(m, m.known["W"], m.known["B"] // (1 if whole else m.known["W"]), m.heard)


def residual(m: Any) -> Any:
    """Return what was left: nothing where no element counts."""
    e = torch.where(m.p.live_mask, 0.1 * m.p.normal(m.p.layout.numel), 0.0)
    return e[m.elements]


NOUNS: dict[str, Callable[[Any], Any]] = {
    **{f"{op}.arrived": arrived for op in OPS_OF_LEVELS},
    "quantise.message": of_chunks,
    "requantise.message": lambda m: levels(m, 1, m.known["B"]),
    "sent": of_chunks,
}
RULES: dict[str, Callable[[Any], Any]] = {
    "residual_numbers": residual,
    "residual_exponents": lambda m: m.exponents["residual_numbers"],
    **{f"{op}.own_words": lambda m: m.done["arrived_words"][0].clone() for op in OPS_OF_LEVELS},
    "quantise.digest": lambda m: torch.tensor([2**63 - 5]),
    "dequantise.digest": lambda m: torch.tensor([2**63 - 5]),
}
NUMBERS: dict[str, float] = {
    **{f"{op}.{name}": -1 for op in OPS_OF_LEVELS for name in ("flags", "kept_words")},
    **{f"{op}.unit": 1024.0 for op in OPS_OF_LEVELS},
    **{f"{op}.seed": 12_345 for op in OPS_OF_LEVELS},
    "dequantise.factor": 0.25,
}
CHOICES: dict[str, tuple[Any, ...]] = {
    **{f"{op}.bits": (8, 4, 1) for op in OPS_OF_LEVELS},
    **{
        f"{op}.header_{name}": (value,)
        for op in OPS_OF_LEVELS
        for name, value in (("counter", None), ("counts", False))
    },
    **{f"{op}.unit": (None, 1024.0, 3.0) for op in OPS_OF_LEVELS},
    **{f"{op}.seed": (12_345, 0, 1, 2**31 - 1) for op in OPS_OF_LEVELS},
}
HEARD = (0, 0, 1, 0, 0, (0,), 0, 34, 0, 0, (1,), 0, 0, 2, 0, 0, -64)
UNSAID: dict[str, dict[str, tuple[Any, ...]]] = {
    "requantise": {"heard": HEARD, "world_size": (1, 2, 3, 7)},
    "take_back": {"heard": (1, (0,), 34, 0, (1,), 2, -64)},
    "dequantise": {"heard": HEARD, "empty": (False,)},
}
