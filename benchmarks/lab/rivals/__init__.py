"""What others compress with: each a paper's or a library's method, in plain torch for all workers of a run at once."""

from __future__ import annotations

from functools import partial
from typing import get_args

from ..setting import Contender
from .demo import DeMo
from .diloco import AVERAGE, NESTEROV, SHORT, DiLoCo
from .ef_sgdm import ErrorFeedbackSGDM
from .lion import Aggregation, DistributedLion
from .loco import LoCo
from .onebit_loco import OneBitLoCo
from .powersgd import PowerSGD
from .quantised import BFloat16, Quantised
from .sparseloco import SparseLoCo

LENGTHS = (8, 16, 32, 64)
"""Steps of the rounds of methods that synchronise seldom."""
FREQUENT = (4, 8, 16, 32)
"""Of those that spend little on each."""
SPARSE = ((2, 128), (8, 1024), (8, 512), (8, 256), (8, 128), (15, 128), (30, 128), (30, 64))
"""SparseLoCo's steps of a round and elements of a chunk that travel."""
COMPONENTS = (1, 2, 4, 8, 16, 32, 128, 512)
"""DeMo's components of a tile that travel."""
BITS = {"": None, "-int8": 8, "-int4": 4}
"""What differences travel in, by the end of a name."""

of_adam = partial(Contender, parent="adamw", batched=True)


def _rounds(name: str, outer: tuple[float, float], rate: float = 1.0) -> dict[str, Contender]:
    makes = {
        f"{name}{kind}-{h}": partial(DiLoCo, length=h, outer=outer, bits=bits)
        for kind, bits in BITS.items()
        for h in LENGTHS
    }
    return {name: of_adam(make, local=True, rate=rate) for name, make in makes.items()}


RIVALS: dict[str, Contender] = {
    "bf16": of_adam(BFloat16),
    "int8": of_adam(partial(Quantised, bits=8)),
    "int4": of_adam(partial(Quantised, bits=4)),
    "loco": of_adam(partial(LoCo, down="parameters")),
    "loco-gradients": of_adam(partial(LoCo, down="gradients")),
    **{f"powersgd-{rank}": of_adam(partial(PowerSGD, rank=rank)) for rank in (1, 2, 4, 8)},
    **{f"powersgd-{rank}-late": of_adam(partial(PowerSGD, rank=rank, late=True)) for rank in (1, 4)},
    **{f"sparseloco-{h}-{k}": of_adam(partial(SparseLoCo, length=h, k=k), local=True) for h, k in SPARSE},
    **_rounds("diloco", NESTEROV, rate=0.3),
    **{
        f"diloco-{h}-{differs}": of_adam(partial(DiLoCo, length=h, outer=outer), local=True, rate=0.3)
        for h in (16, 32)
        for differs, outer in SHORT.items()
    },
    **_rounds("local-adamw", AVERAGE),
    **{
        f"dlion-{votes}": of_adam(partial(DistributedLion, aggregation=votes), rate=0.3)
        for votes in get_args(Aggregation)
    },
    **{f"demo-{k}": of_adam(partial(DeMo, k=k)) for k in COMPONENTS},
    **{f"onebit-loco-{h}": of_adam(partial(OneBitLoCo, length=h), local=True) for h in FREQUENT},
    "ef-sgdm": of_adam(ErrorFeedbackSGDM, rate=10.0),
}
"""By name; each a ``Rival``."""
