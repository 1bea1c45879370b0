"""0/1 Adam's Algorithm 1, line by line, in float64, beside the implementation from its first step to its last.

Line numbers are the paper's (Lu et al., 2022). Where ``ZeroOneAdam`` departs from the paper, as its docstring
says, so does this: updates m/denom are compressed, without the learning rate; a round goes by its mean
learning rate; decay is no part of u; a renewal is a step of AdamW. Signs must be equal, each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from observe import parameters
from rounds import RENEW, Script, make, set_gradients
from torch import Tensor
from torch.nn import Parameter
from zero_one_in_float64 import BETAS, DECAY, EPS, Reference

from fusedonebit import ZeroOneAdam
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.triton_kernels import unpack

LIMIT = 1e-5
ROUNDS = (0, 0, 1, 4, 1, 1, 0, 3, 2, 0, 1, 2)
SHAPES = [(23, 40), (7,), (), (300,)]


def start() -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape)) for shape in SHAPES]


# ---------------------------------------------------------------- side by side


def line(optimizer: ZeroOneAdam, tensors: list[Tensor]) -> np.ndarray:
    layout = optimizer.frame.layout
    flat = np.zeros(layout.numel)
    for i, t in enumerate(tensors):
        flat[layout.offset(i) : layout.offset(i) + t.numel()] = t.detach().double().reshape(-1).numpy()
    return flat


Change = Callable[[ZeroOneAdam, int], None]


def run(world_size: int, rounds: tuple[int, ...], steps: int, options: dict, change: Change | None = None) -> list:
    def train(rank: int, transport: Transport) -> tuple[ZeroOneAdam, list[dict[str, Any]]]:
        defaults = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY}
        optimizer = make(start(), rounds, **defaults | options, process_group=transport)
        params, seen = parameters(optimizer), []
        for step in range(steps):
            if change:
                change(optimizer, step)
            set_gradients(optimizer, rank, step)
            now: dict[str, Any] = {"lr": float(optimizer.param_groups[0]["lr"]), "g": grads(optimizer)}
            optimizer.step()
            now |= {"phase": optimizer.phase, "x": line(optimizer, params)}
            now["m"] = line(optimizer, [optimizer.momentum(p) for p in params])
            now["v"] = line(optimizer, [optimizer.state[p]["exp_avg_sq"] for p in params])
            reduce = optimizer.algorithm.exchange.reducer
            if optimizer.phase == "one-bit":
                now["signs"] = unpack(reduce.to_servers.bits).view(-1).numpy() > 0
                now["bits"] = unpack(reduce.bits).view(-1).numpy() > 0
            now["u"] = line(optimizer, [optimizer.worker_error(p) for p in params])
            now["served"] = reduce.of_rank.server.numbers.double().numpy().copy()
            seen.append(now)
        return optimizer, seen

    return SimulatedGroup(world_size).run(train)


def grads(optimizer: ZeroOneAdam) -> np.ndarray:
    found = [p.grad for p in parameters(optimizer)]
    assert all(g is not None for g in found)
    return line(optimizer, [g for g in found if g is not None])


def off(ours: np.ndarray, reference: np.ndarray, live: np.ndarray, least: float = 1e-30) -> float:
    """The largest error, relative to the largest of: the value, the root of the mean square, ``least``."""
    ours, reference = ours[live], reference[live]
    if not reference.size:
        return 0.0
    size = np.maximum(np.abs(reference), np.sqrt(np.mean(reference**2)))
    return float(np.max(np.abs(ours - reference) / np.maximum(size, least)))


def compare(ranks: list, rounds: tuple[int, ...], options: dict, what: str, masked: np.ndarray | None = None) -> None:
    optimizer, first = ranks[0]
    layout = optimizer.frame.layout
    live = line(optimizer, [torch.ones(p.shape) for p in parameters(optimizer)]) > 0
    if masked is not None:
        live &= masked
    reference = Reference(layout, line(optimizer, start()), live, {"precondition": True} | options)
    worst = dict.fromkeys(("x", "m", "v", "u", "served"), 0.0)
    signs, phases = 0, Script(rounds).places(len(first) + 1)
    for step, phase in enumerate(phases[:-1]):
        now = [seen[step] for _, seen in ranks]
        g, lr = np.stack([rank["g"] for rank in now]) * live, now[0]["lr"]
        assert {rank["phase"] for rank in now} == {phase}
        if phase == "uncompressed":
            reference.renew(g, lr)
        else:
            reference.move(g, lr)
        if phase == "one-bit":
            reference.synchronise()
            for rank, seen in enumerate(now):
                assert (seen["signs"] == reference.signs[rank])[live].all(), f"a worker's sign, step {step}"
                assert (seen["bits"] == reference.bits)[live].all(), f"a server's sign, step {step}"
                signs += 2 * int(live.sum())
        for rank, seen in enumerate(now):
            chunk = slice(rank * layout.chunk_numel, (rank + 1) * layout.chunk_numel)
            least = 0.01 * float(np.sqrt(np.mean(reference.u**2))) + 1e-30  # of one rank nothing but rounding is left
            served = seen["served"] if seen["served"].size else np.zeros(layout.chunk_numel)  # there may be no server
            worst["served"] = max(worst["served"], off(served, reference.served[chunk], live[chunk], least))
            worst["v"] = max(worst["v"], off(seen["v"], reference.v, live))
            for key in ("x", "m", "u"):
                ahead = reference.ahead() if phases[step : step + 2] == ["local", "one-bit"] else {}
                worst[key] = max(worst[key], off(seen[key], ahead.get(key, getattr(reference, key))[rank], live))
    errors = ", ".join(f"{key} {error:.1e}" for key, error in worst.items())
    print(f"{what}: {len(first)} steps, {signs} equal signs; off by {errors} (limit {LIMIT})")
    assert max(worst.values()) <= LIMIT


@pytest.mark.long(but=1)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("variance_floor", [0.0, 0.01])
@pytest.mark.parametrize("precondition", [True, False])
def test_every_line_of_algorithm_1_in_float64(precondition, variance_floor, world_size):
    options = {"precondition": precondition, "variance_floor": variance_floor}
    ranks = run(world_size, ROUNDS, 24, options)
    compare(ranks, ROUNDS, options, f"{world_size} ranks, precondition {precondition}, floor {variance_floor}")


@pytest.mark.long(but=1)
@pytest.mark.parametrize("block_size", [128, 1024])
@pytest.mark.parametrize(("scale_norm", "scale_scope"), [("l2", "global"), ("l1", "layer"), ("contractive", "block")])
def test_scales_of_any_norm_and_scope_and_blocks_of_any_size(scale_norm, scale_scope, block_size):
    options = {"scale_norm": scale_norm, "scale_scope": scale_scope, "block_size": block_size}
    ranks = run(3, ROUNDS, 17, options)
    padding = ranks[0][0].stats()["padding"]
    assert padding > 100
    compare(ranks, ROUNDS, options, f"{scale_norm}, {scale_scope}, blocks of {block_size}, padding {padding}")


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("precondition", "kind"), [(True, "tensor"), (False, "float")])
def test_the_learning_rate_may_change_in_every_step(precondition, kind):
    def change(optimizer: ZeroOneAdam, step: int) -> None:
        rate = 1e-2 * (0.85**step if step % 5 else 0.1)
        if kind == "tensor":
            optimizer.param_groups[0]["lr"].fill_(rate)
        else:
            optimizer.param_groups[0]["lr"] = rate

    options = {"precondition": precondition, "lr": torch.tensor(1e-2) if kind == "tensor" else 1e-2}
    ranks = run(2, ROUNDS, 24, options, change)
    del options["lr"]
    compare(ranks, ROUNDS, options, f"lr changes, as a {kind}, precondition {precondition}")


def test_renewals_alone_are_the_first_line_only():
    ranks = run(2, (RENEW,), 12, {})
    compare(ranks, (RENEW,), {}, "renewals alone")
