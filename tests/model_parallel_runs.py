"""A model that is cut over 2 x 2 ranks: rank 2d + t is in replica d of the model and holds part t of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from observe import fingerprint
from optimizers import MAKE, WAYS, by_name
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from fusedonebit import AdamW, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam

LR, MOST = 1e-2, 0.5
WHOLE = {"up.weight": (24, 10), "up.bias": (24,), "down.weight": (10, 24), "down.bias": (10,), "norm.weight": (10,)}
CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
"""Along which dimension a tensor is cut; all parts have the others alike."""

KINDS: dict[str, Any] = {name: make for name, make in MAKE.items() if name != "OneBitMuon"} | {
    "OneBitAdam, auto": by_name(OneBitAdam, freeze_step="auto"),
    **{name: WAYS[name] for name in ("OneBitAdam, living", "OneBitLamb, living", "OneBitLion, mean")},
    "ZeroOneAdam, own, rounds of 3": WAYS["ZeroOneAdam, own, rounds of 3"],
}
EACH = pytest.mark.parametrize("name", KINDS)
QUIET = pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def numbers(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in WHOLE.items()}


def part(name: str, whole: Tensor, t: int) -> Tensor:
    return whole.chunk(2, CUT[name])[t].contiguous() if name in CUT else whole.clone()


def plain(t: int) -> dict[str, Parameter]:
    """This rank's part of the model, marked as Megatron's layers mark it."""
    params = {name: Parameter(part(name, whole, t)) for name, whole in numbers(0).items()}
    for name in CUT:
        params[name].tensor_model_parallel = True
    return params


def gradients(step: int, replica: int) -> dict[str, Tensor]:
    """Of the whole model, of very different norms from replica to replica and step to step."""
    size = 10.0 ** ((replica + step) % 3 - 1)
    return {name: size * whole for name, whole in numbers(1000 + 10 * step + replica).items()}


def norm_of(grads: dict[str, Tensor]) -> float:
    params = [Parameter(torch.zeros_like(g)) for g in grads.values()]
    for p, g in zip(params, grads.values(), strict=True):
        p.grad = g.clone()
    return float(clip_grad_norm_(params, MOST))


AVERAGE = (AdamW, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam)
"""These average gradients in their uncompressed steps; others their updates."""


def expected_norm(optimizer: Any, step: int, replica: int) -> float:
    """Of the averaged gradient, where there is one; else the mean of replicas', or between rounds a worker's own."""
    each = [gradients(step, d) for d in (0, 1)]
    if optimizer.phase == "local":
        return norm_of(each[replica])
    if isinstance(optimizer, AVERAGE) and optimizer.phase in ("uncompressed", "warmup"):
        return norm_of({name: (each[0][name] + each[1][name]) / 2 for name in WHOLE})
    return (norm_of(each[0]) + norm_of(each[1])) / 2


def give(params: dict[str, Parameter], step: int, replica: int, t: int) -> None:
    for name, whole in gradients(step, replica).items():
        params[name].grad = part(name, whole, t)


def train(params: dict[str, Parameter], optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        give(params, step, rank // 2, rank % 2)
        optimizer.step()


def alike(params: dict[str, Parameter]) -> str:
    return fingerprint([p for name, p in params.items() if name not in CUT])


def cut_optimizer(name: str, rank: int, **more: Any) -> tuple[dict[str, Parameter], Any]:
    mesh = make_mesh()
    params = plain(rank % 2)
    options = {"model_parallel": mesh["tensor"], "process_group": mesh["data"]} | more
    named = list(params.items()) if name != "OneBitLion" else list(params.values())
    return params, KINDS[name](named, LR, **options)
