"""In which formats an optimizer keeps what it keeps, by role."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .settings import MasterWeights, Numerics, StateKind


class Format(NamedTuple):
    """How numbers are stored."""

    dtype: torch.dtype | None
    coded: bool = False  # whether they are codes, with one exponent for all of a block
    random: bool = False  # whether a step rounds them stochastically


class Formats(NamedTuple):
    """The format of each role; corrections are what bfloat16 parameters lack of float32 masters."""

    moments: Format  # m and v that follow gradients; in the compression stage residuals, which lie where m was
    variance: Format  # v in the compression stage
    squares: Format  # of its own gradients that a worker follows, where v is shared
    parameters: Format  # float32 masters, corrections in int16 or int8, or with None the parameters themselves


_MOMENTS: dict[StateKind, Format] = {
    "fp32": Format(torch.float32),
    "bf16": Format(torch.bfloat16, random=True),
    "8bit": Format(torch.uint8, coded=True, random=True),
}
_SQUARES = Format(torch.bfloat16, random=True)  # what is told of them are logarithms, off by up to 1/16
_MASTERS: dict[MasterWeights, Format] = {
    True: Format(torch.float32),
    "16bit": Format(torch.int16),
    "8bit": Format(torch.int8, random=True),
}


def formats_of(numerics: Numerics) -> Formats:
    """Return the table for settings that were checked."""
    moments = _MOMENTS[numerics.state]
    # Renewals, which are rare, round to nearest; squares change so little in a step that most of it would vanish.
    variance = Format(numerics.frozen_dtype) if numerics.state == "fp32" else moments._replace(random=False)
    squares = _SQUARES if numerics.state == "fp32" else moments
    own = Format(None, random=numerics.stochastic_rounding)
    return Formats(moments, variance, squares, _MASTERS.get(numerics.master_weights, own))
