"""Parameters of 16 bits whose optimizers keep masters, trained, overwritten, saved and loaded."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from freeze_runs import gradient
from observe import fingerprint, parameters, through_a_file
from optimizers import by_name, muon
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import AdamW, FusedOneBitWarning, Lamb, OneBitAdam, OneBitLamb, OneBitLion
from fusedonebit.core.optimizer import DistributedOptimizer

FREEZE, STEPS = 8, 16
BF16, HALVES = torch.bfloat16, (torch.bfloat16, torch.float16)
KINDS: dict[str, Any] = {
    "AdamW": by_name(AdamW),
    "AdamW, 8-bit state": by_name(AdamW, state="8bit"),
    "OneBitAdam": by_name(OneBitAdam, freeze_step=FREEZE, guard="off"),
    "OneBitAdam, m undivided": by_name(OneBitAdam, freeze_step=FREEZE, guard="off", precondition=False),
    "OneBitLion": by_name(OneBitLion),
    "OneBitMuon": by_name(muon),
}
COPIED: dict[str, Any] = {"OneBitLamb": by_name(OneBitLamb, freeze_step=FREEZE, guard="off"), "Lamb": by_name(Lamb)}


def values(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Values that ``dtype`` has, in float32: contiguous, channels last, strided, and a single one."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((33, 40), (6, 5, 4, 3), (21, 8), (1,))
    plain = [torch.randn(shape, generator=random).to(dtype).float() for shape in shapes]
    return [plain[0], plain[1].contiguous(memory_format=torch.channels_last), plain[2][::2, ::3], plain[3]]


def make(dtype: torch.dtype, seed: int = 0, rounded_to: torch.dtype | None = None) -> list[Parameter]:
    made = []
    for v in values(rounded_to or dtype, seed):
        storage = torch.empty(0, dtype=dtype).new_zeros(v.untyped_storage().size() // 4 + 8)
        made.append(Parameter(storage.as_strided(v.shape, v.stride()).copy_(v)))
    return made


def build(name: str, kept: bool | str, seed: int = 0, dtype: torch.dtype = BF16, **more: Any) -> DistributedOptimizer:
    return (KINDS | COPIED)[name](make(dtype, seed), **{"lr": 1e-3, "master_weights": kept} | more)


def set_gradients(optimizer: DistributedOptimizer, rank: int, step: int, dtype: torch.dtype = BF16) -> None:
    for i, p in enumerate(parameters(optimizer)):
        p.grad = gradient(rank, step, p, i).to(dtype).to(p.dtype)


def train(optimizer: DistributedOptimizer, rank: int, steps: range, dtype: torch.dtype = BF16) -> list[str]:
    prints = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        for step in steps:
            set_gradients(optimizer, rank, step, dtype)
            optimizer.step()
            prints.append(fingerprint([p.contiguous() for p in parameters(optimizer)]))
    return prints


def overwrite(p: Parameter, how: str) -> None:
    with torch.no_grad():
        if how == "in place":
            p.copy_(torch.full_like(p, 3.0))
        elif how == "in part":
            p.view(-1)[:5] = 3.0
        elif how == "data":
            p.data.fill_(3.0)
        else:
            p.data = torch.full_like(p, 3.0)


def put(params: list[Parameter], saved: list[Tensor]) -> None:
    with torch.no_grad():
        for p, v in zip(params, saved, strict=True):
            p.copy_(v)


def saved_of(optimizer: DistributedOptimizer) -> list[Any]:
    return through_a_file([optimizer.state_dict(), [p.detach() for p in parameters(optimizer)]])


def load(optimizer: DistributedOptimizer, saved: list, model_first: bool) -> None:
    steps = [partial(put, parameters(optimizer), saved[1]), partial(optimizer.load_state_dict, saved[0])]
    for take in steps if model_first else reversed(steps):
        take()
