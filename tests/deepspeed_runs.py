"""Checkpoints as DeepSpeed's optimizers write them: by DeepSpeed itself where it is there, and made by hand."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from benchmarks import deepspeed_peer

SHAPES = ((40, 32), (96,))

WHOLE = {"OnebitAdam": ((4096,),), "OnebitLamb": ((2048,), (32, 64))}
"""Of each kind, shapes whose servers' chunks are alike here and there: else a chunk's scale is of other elements."""

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}


def make(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter((0.5 * torch.randn(shape, generator=generator)).to(dtype)) for shape in shapes]


def gradient(rank: int, step: int, p: Tensor, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return (torch.randn(p.shape, generator=generator) + 0.3).to(p.dtype)


def fill(params: Sequence[Tensor], rank: int, step: int) -> None:
    for number, p in enumerate(params):
        p.grad = gradient(rank, step, p, number)


def theirs(kind: str, params: Sequence[Tensor], **options: Any) -> Any:
    """DeepSpeed's optimizer after its rehearsal, in the process group that there is."""
    with quiet():
        optimizer = deepspeed_peer.construct(kind, params, **OPTIONS, **options)
        fill(params, 0, 0)
        optimizer.step()
    return optimizer


def step(optimizer: Any, params: Sequence[Tensor], rank: int, number: int) -> None:
    """One of DeepSpeed's, with the averages that its engine makes until it is told that it need not."""
    fill(params, rank, number)
    if optimizer.deepspeed.enable_backward_allreduce:
        for p in params:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    with quiet():
        optimizer.step()


@contextlib.contextmanager
def quiet() -> Any:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def forget(optimizer: Any, kind: str) -> None:
    """What DeepSpeed's checkpoint does not have, as after loading it; and 1-bit LAMB's ratios, as at the freeze."""
    for state in optimizer.state.values():
        for name in ("worker_error", "server_error"):
            if name in state:
                state[name].zero_()
        if kind == "OnebitLamb" and optimizer.lamb_freeze_key:
            state["exp_avg_sq_fresh"].copy_(state["exp_avg_sq"])
            state["last_factor"] = 1.0
    for error in (*getattr(optimizer, "worker_errors", ()), *getattr(optimizer, "server_errors", ())):
        error.zero_()


def by_hand(steps: int, params: Sequence[Tensor], frozen: bool = False, **more: Any) -> dict[str, Any]:
    """A ``state_dict()`` in the form of DeepSpeed's OneBitAdam, of that many of its steps."""
    states = {}
    for i, p in enumerate(params):
        state = {"step": steps, "exp_avg": 0.1 * gradient(0, 1, p, i).float()}
        state["exp_avg_sq"] = 0.01 + gradient(0, 2, p, i).float().square()
        if frozen:  # rank 0's, in one piece with padding, as it lies in its memory
            state |= {"worker_error": torch.ones(1536), "server_error": torch.ones(768), "tensor_size": p.numel()}
        states[i] = state | more
    group = OPTIONS | {"bias_correction": True, "max_grad_norm": 0.0, "params": list(range(len(params)))}
    return {"state": states, "param_groups": [group]}


def fused(saved: dict[str, Any], masters: Sequence[Tensor], shuffle: bool = False) -> dict[str, Any]:
    """The same as DeepSpeed's 16-bit wrapper writes it: one flat buffer of each group."""

    def flat(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.detach().float().flatten() for t in tensors])

    states = [saved["state"][i] for i in range(len(saved["state"]))]
    together = {name: flat([s[name] for s in states]) for name in ("exp_avg", "exp_avg_sq")}
    inner = {"state": {0: {"step": states[0]["step"]} | together}}
    inner["param_groups"] = [saved["param_groups"][0] | {"params": [0]}]
    scaling = {"dynamic_loss_scale": True, "cur_scale": 4096.0, "cur_iter": 8, "last_overflow_iter": 2}
    scaling |= {"scale_factor": 2.0, "scale_window": 1000}
    weights = {"fp32_groups_flat": [flat(masters).requires_grad_()]}
    return scaling | weights | {"optimizer_state_dict": inner, "clip_grad": 1.0}


def engine(saved: Any, module: dict[str, Tensor] | None = None, freeze_step: int = 6) -> dict[str, Any]:
    """What DeepSpeed's engine puts around it, in ``mp_rank_00_model_states.pt``."""
    block = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": freeze_step}}
    return {
        "module": module or {},
        "buffer_names": [],
        "optimizer": saved,
        "param_shapes": None,
        "lr_scheduler": {"last_batch_iteration": 8},
        "skipped_steps": 0,
        "global_steps": 9,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"optimizer": block},
        "ds_version": "0.19.6",
    }
