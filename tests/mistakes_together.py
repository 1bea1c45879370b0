"""What newcomers do wrong on two ranks, of which each makes its own mistake, and what each must be told; by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mistakes import STEPS, made, net, train
from torch import nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from fusedonebit import OneBitAdam, ddp

TOGETHER: dict[str, tuple[Callable[[int], Any], str, str]] = {}
"""By name: what a rank does, and a pattern of what rank 0 is told, and rank 1; "" where nothing."""


def together(first: str, second: str | None = None) -> Callable[[Callable[[int], Any]], Callable[[int], Any]]:
    """Register a mistake of two ranks; ``second`` None: both are told the same."""

    def register(make: Callable[[int], Any]) -> Callable[[int], Any]:
        TOGETHER[make.__name__] = make, first, first if second is None else second
        return make

    return register


def wrapped(**options: Any) -> tuple[DistributedDataParallel, OneBitAdam]:
    model = DistributedDataParallel(net())
    return model, OneBitAdam(model.parameters(), **options)


def steps_of(rank: int, model: nn.Module, optimizer: OneBitAdam, **how: Any) -> None:
    train(model, optimizer, seed=rank, **how)


@together(r"DistributedDataParallel averages the gradients already.*fusedonebit.ddp.attach\(model, optimizer\)", "")
def ddp_without_attach(rank: int) -> None:
    steps_of(rank, *wrapped())


@together(r"clipped.*max_grad_norm=", "")
def clipping_by_torch(rank: int) -> None:
    model, optimizer = made()
    steps_of(rank, model, optimizer, between=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05))


@together(r"clipped.*max_grad_norm=", "")
def clipping_by_torch_and_by_the_optimizer(rank: int) -> None:
    model, optimizer = wrapped(max_grad_norm=0.05)
    ddp.attach(model, optimizer)
    steps_of(rank, model, optimizer, between=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05))


@together(r"the checksum of parameter 0's values .* seed all ranks alike")
def another_seed_on_each_rank(rank: int) -> None:
    OneBitAdam(net(seed=rank).parameters())


@together(r"lr of group 0")
def another_learning_rate_on_each_rank(rank: int) -> None:
    made(lr=1e-3 * (1 + rank))


@together(r"ranks are out of step .* with equal hyper-parameters")
def a_scheduler_on_one_rank_alone(rank: int) -> None:
    model, optimizer = made()
    steps_of(rank, model, optimizer, steps=1)
    if rank == 0:
        optimizer.param_groups[0]["lr"] = 1e-5
    steps_of(rank, model, optimizer, steps=1)


@together(r"the number of trainable parameters")
def another_model_on_each_rank(rank: int) -> None:
    OneBitAdam([*net().parameters(), *([Parameter(torch.ones(2))] * rank)])


@together(r"another rank could not take the step|ranks are out of step|Another rank has died", "")
def fewer_batches_on_one_rank(rank: int) -> None:
    model, optimizer = made()
    steps_of(rank, model, optimizer, steps=2 - rank)


@together(r"a gradient on some rank was not finite after 0 updates; every rank skipped the step")
def a_loss_that_is_nan_on_one_rank(rank: int) -> None:
    model, optimizer = made()
    spoil = (lambda: model[0].weight.grad.fill_(float("nan"))) if rank else (lambda: None)
    steps_of(rank, model, optimizer, steps=1, between=spoil)


@together(r"another rank could not take the step", r"parameter 0 \(0.weight\) was .* but now is torch.bfloat16")
def a_model_cast_on_one_rank(rank: int) -> None:
    model, optimizer = made()
    steps_of(rank, model.bfloat16() if rank else model, optimizer)


@together(r"GradScaler found infinite gradients on some ranks only.*Use fusedonebit.amp.GradScaler")
def the_grad_scaler_of_torch(rank: int) -> None:
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 6)).square().mean()).backward()
        if rank:
            model[0].weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()


@together(r"process_group has this rank alone, of 2", "")
def a_group_of_each_rank_alone(rank: int) -> None:
    groups = [dist.new_group([r]) for r in range(2)]
    steps_of(rank, *made(process_group=groups[rank]))


@together(r"process_group has this rank alone, of 2", r"process_group must contain this process")
def a_group_without_this_rank(rank: int) -> None:
    made(process_group=dist.new_group([0]))


@together(r"each rank must load the file that it saved itself")
def the_checkpoint_of_rank_0_for_all(rank: int) -> None:
    model, optimizer = made(freeze_step=1)
    steps_of(rank, model, optimizer)
    box = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    made(freeze_step=1)[1].load_state_dict(box[0])


@together(r"model must be wrapped in DistributedDataParallel, got OptimizedModule; attach first, compile then")
def ddp_compiled_before_attach(rank: int) -> None:
    model, optimizer = wrapped()
    ddp.attach(torch.compile(model), optimizer)


@together(r"optimizer must be one of fusedonebit's, or a list with one, got DistributedDataParallel")
def attach_the_wrong_way_round(rank: int) -> None:
    model = DistributedDataParallel(net())
    ddp.attach(OneBitAdam(model.parameters()), model)


@together(r"optimizer and model must have the same parameters, but only one has .* of model")
def attached_with_a_part_of_the_parameters(rank: int) -> None:
    model, _ = wrapped()
    ddp.attach(model, OneBitAdam(model.module[0].parameters()))


@together(r"AdamW trains 2 of the parameters of a model of which OneBitAdam trains the others, .* ranks will part", "")
def the_rest_of_a_bare_model_left_to_adamw(rank: int) -> None:
    model = net()
    ours, rest = OneBitAdam(model[0].parameters()), torch.optim.AdamW(model[2].parameters())
    steps_of(rank, model, ours, between=rest.step)


@together(r"parameters must be frozen after attach\(\), .* but 0.weight was between")
def a_layer_frozen_before_attach(rank: int) -> None:
    model, optimizer = made()
    model[0].requires_grad_(False)
    ddp.attach(DistributedDataParallel(model), optimizer)


@together(r"parameter 0 \(0.weight\) requires gradients now but did not .*attach, then freeze")
def a_layer_unfrozen_that_ddp_and_the_optimizer_were_made_without(rank: int) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer, wrapped = OneBitAdam(model.parameters()), DistributedDataParallel(model)
    ddp.attach(wrapped, optimizer)
    train(wrapped, optimizer, steps=1)
    model[0].requires_grad_(True)
    train(wrapped, optimizer, steps=1)


@together(r"attached already")
def attached_twice(rank: int) -> None:
    model, optimizer = wrapped()
    ddp.attach(model, optimizer)
    ddp.attach(model, optimizer)
