"""A group whose learning rate is 0 stands still from that step on, in every optimizer; what it is owed it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from observe import fingerprint, flat, parameters
from optimizers import MAKE, by_name
from ranks import simulate
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import MarsitAdam, MarsitSGD, OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam
from fusedonebit.comm import Transport
from fusedonebit.optim.policies import DoublingRounds, DoublingVariance, EveryStep, FixedRounds

LR = 1e-2
KINDS: dict[str, Callable[..., Any]] = MAKE | {
    "OneBitAdam, warm-up": by_name(OneBitAdam, freeze_step=1000),
    "OneBitAdam, capturable": by_name(OneBitAdam, freeze_step=2, guard="off", capturable=True),
    "OneBitAdam, living": by_name(OneBitAdam, variance="shared", guard="off"),
    "OneBitAdam, frozen, not preconditioned": by_name(OneBitAdam, freeze_step=2, guard="off", precondition=False),
    "OneBitLamb, living": by_name(OneBitLamb, variance="shared", guard="off"),
    "OneBitLion, mean": by_name(OneBitLion, aggregation="mean"),
    "ZeroOneAdam, own, one scale": by_name(ZeroOneAdam, sync_policy=EveryStep(), scale_scope="global"),
    "ZeroOneAdam, own, rounds of 3": by_name(ZeroOneAdam, sync_policy=FixedRounds(3)),
    "ZeroOneAdam, own, rounds of 1 to 4": by_name(ZeroOneAdam, sync_policy=DoublingRounds(2, 2, most=4)),
    "ZeroOneAdam, rounds of 3": by_name(ZeroOneAdam, variance_policy=DoublingVariance(1), sync_policy=FixedRounds(3)),
    "MarsitSGD, rounds of 3": by_name(MarsitSGD, local_steps=3, full_precision_every=2),
    "MarsitAdam, owner, all in full precision": by_name(MarsitAdam, topology="owner", full_precision_every=1),
}
MASTERS = ("OneBitAdam", "AdamW, ours", "ZeroOneAdam, own", "OneBitLion")
ROUNDS = [name for name in KINDS if "rounds of" in name]


STILL = "still"


def make(dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Two groups, of which the second will stand still."""
    generator = torch.Generator().manual_seed(0)
    params = [
        Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((40, 30), (7,), (20, 15), (50,))
    ]
    return [{"params": params[:2]}, {"params": params[2:], "name": STILL}]


def train(optimizer: Any, rank: int, steps: int, start: int, overflows: int = -1) -> list[str]:
    """Take some steps; return what the second group's parameters were after each."""
    seen = []
    for step in range(start, start + steps):
        if step == overflows:  # on one rank, as a GradScaler tells it
            optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.tensor(1.0 - rank)
        for i, p in enumerate(parameters(optimizer)):
            generator = torch.Generator().manual_seed(1000 * step + 10 * i + rank)
            p.grad = (1.0 + torch.randn(p.shape, generator=generator)).to(p.dtype)
        optimizer.step()
        optimizer.grad_scale = optimizer.found_inf = None
        still = [p for group in optimizer.param_groups if group.get("name") == STILL for p in group["params"]]
        seen.append(fingerprint(still))
    return seen


def rate(optimizer: Any, value: float) -> None:
    """Set the second group's, as a scheduler does: in place where it is a tensor."""
    for group in optimizer.param_groups:
        if group.get("name") == STILL and isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        elif group.get("name") == STILL:
            group["lr"] = value


def stand(rank: int, transport: Transport, name: str, master_weights: bool, tensor: bool) -> None:
    more: dict[str, Any] = {"master_weights": True} if master_weights else {}
    groups = make(torch.bfloat16 if master_weights else torch.float32)
    for group in groups:
        group["lr"] = torch.tensor(LR) if tensor else LR
    optimizer = KINDS[name](groups, process_group=transport, **more)
    train(optimizer, rank, 6, 0)
    while not getattr(getattr(optimizer, "algorithm", None), "synchronised", True):
        train(optimizer, rank, 1, 6)
    before, moves = fingerprint(groups[1]["params"]), fingerprint(groups[0]["params"])
    rate(optimizer, 0.0)
    assert train(optimizer, rank, 12, 7) == [before] * 12
    assert fingerprint(groups[0]["params"]) != moves
    rate(optimizer, LR)
    train(optimizer, rank, 4, 19)
    assert fingerprint(groups[1]["params"]) != before


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize(
    ("name", "world_size"), [*((name, 2) for name in KINDS), ("ZeroOneAdam, own", 1), ("MarsitSGD", 1)]
)
def test_a_group_with_a_rate_of_0_stands_still_from_that_step_on(name, world_size):
    simulate(stand, world_size, name, False, False)


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("name", MASTERS)
def test_so_it_does_with_masters_and_a_rate_that_is_a_tensor(name):
    simulate(stand, 2, name, True, True)


def left(side: Any) -> Tensor:
    """What a worker or a server has not sent yet, formed as the next step does, which nothing anticipates here."""
    c = side.compensated.view(len(side.scale), -1)
    return (c - side.scale[:, None] * torch.where(c >= 0, 1.0, -1.0)).view(-1)


def owed(optimizer: Any, rank: int) -> Tensor:
    """What this rank still has to move, its part of mean(e) + E: float32 of all parameters of the second group."""
    layout = optimizer.frame.layout
    if hasattr(optimizer, "compensation"):
        parts = [optimizer.compensation(p).reshape(-1) for p in optimizer.param_groups[1]["params"]]
        return torch.cat(parts) / layout.world_size
    line = left(optimizer.algorithm.exchange.reducer.worker) / layout.world_size
    for server in optimizer.algorithm.exchange.reducer.sides[1:]:
        line.view(layout.world_size, -1)[rank] += left(server)
    return torch.cat([line[layout.offset(i) : layout.offset(i) + layout.sizes[i]] for i in (2, 3)])


def keep(rank: int, transport: Transport, name: str) -> tuple[Tensor, Tensor]:
    groups = make()
    optimizer = KINDS[name](groups, LR, weight_decay=0.0, process_group=transport)
    train(optimizer, rank, 6, 0)
    before = owed(optimizer, rank)
    rate(optimizer, 0.0)
    train(optimizer, rank, 12, 6, overflows=6)
    return before, owed(optimizer, rank)


@pytest.mark.parametrize(
    "name", ["ZeroOneAdam, own", "ZeroOneAdam, own, rounds of 3", "ZeroOneAdam, own, one scale", "MarsitSGD"]
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_not_sent_yet_is_kept_while_the_rate_is_0(name, world_size):
    """Of optimizers whose residuals are in units of parameters; also where the first such step is held back."""
    before, after = (torch.stack(each).double().sum(0) for each in zip(*simulate(keep, world_size, name), strict=True))
    worst = float((after - before).abs().max())
    print(f"{name}, W={world_size}: {worst:.1e} of {float(before.abs().max()):.1e} was lost (limit 1e-7)")
    assert float(before.abs().max()) > LR / 100
    assert worst <= 1e-7


def pause(rank: int, transport: Transport, name: str, after: int) -> tuple[list[str], list[float]]:
    groups = make()
    optimizer = KINDS[name](groups, LR, process_group=transport)
    train(optimizer, rank, 30, 0)
    while not optimizer.algorithm.synchronised:
        train(optimizer, rank, 1, 30)
    length = optimizer.stats().get("round_steps", 3)
    train(optimizer, rank, after, 31)
    assert not optimizer.algorithm.synchronised
    rate(optimizer, 0.0)
    train(optimizer, rank, length - after, 34)
    assert optimizer.algorithm.synchronised
    ended, values = fingerprint(groups[1]["params"]), flat(groups[1]["params"])
    assert train(optimizer, rank, 2 * length, 40) == [ended] * 2 * length
    return [ended], values.tolist()


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("name", ROUNDS)
def test_a_begun_round_ends_on_all_ranks_and_then_nothing_moves(name, after):
    (ended, values), *others = simulate(pause, 2, name, after)
    assert all(each == ended for each, _ in others)
    assert torch.tensor(values).isfinite().all()
