"""What is true of an algorithm whatever its options: the same for all optimizers of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ..triton_kernels import Coef
from .resolved import Options

Phase = Literal["uncompressed", "warmup", "compression", "local", "one-bit"]


class Traits(NamedTuple):
    """What is true of an algorithm."""

    settings: type[Options] = Options
    """The dataclass of settled option objects; its other fields are arguments of constructors."""
    phases: Mapping[Phase, bool] = {"uncompressed": False}
    """The stages in which it can be, the first one first, and whether it keeps what is "compressed" then."""
    columns: Mapping[Coef, str] = {}
    """Hyper-parameters of a group that go into the coefficient table as they are."""
    linear: bool = False
    """Whether ONE_MINUS_BETA2 multiplies gradients, not their squares: it is negative then where one maximises."""
    compresses: bool = True
    """Whether less is sent than DDP would send."""
    continues: bool = True
    """Whether it can go on from checkpoints of other optimizers, torch's AdamW among them."""
    shards: bool = True
    """Whether parameters may be shards of tensors."""
    corrects: bool = False
    """Whether all its ops that read parameters also take corrections of them, so that no float32 masters are needed."""
    masters_of_rank: bool = False
    """Whether each rank has master weights of its own."""
