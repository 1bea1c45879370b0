"""One rank alone compresses once: no server, three launches, the same algorithm with one side; and who is alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optimizers import MAKE
from ranks import simulate
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import Numerics, OneBitAdam, OneBitLamb, Wire, ZeroOneAdam
from fusedonebit.comm import CompressedAllReduce, LocalTransport, make_all_reduce
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.optim.policies import DoublingVariance, EveryStep
from fusedonebit.triton_kernels import Coef, FlatLayout

# ---------------------------------------------------------------- the all-reduce


@pytest.mark.parametrize("scope", ["global", "layer", "block"])
def test_residuals_are_those_of_the_algorithm_with_one_side(scope):
    layout, random = FlatLayout((700, 20), 1, 128), torch.Generator().manual_seed(3)
    reduce = make_all_reduce(layout, LocalTransport(), serve_alone=False, scale_scope=scope)
    live, error = layout_mask(layout), torch.zeros(layout.numel, dtype=torch.float64)
    for _ in range(4):
        gradients = [torch.randn(n, generator=random) for n in layout.sizes]
        reduce(gradients)
        c = flat(layout, gradients) + error
        m = reduce.result().double()
        assert ((m.sign() == torch.where(c >= 0, 1.0, -1.0)) | ~live).all()
        error = torch.where(live, c - m, 0.0)
        for segment in layout.scale_segments(scope).unique():
            of_it = live & (layout.scale_segments(scope) == segment).repeat_interleave(layout.block_size)
            if of_it.any():
                size = c[of_it].square().mean().sqrt()
                torch.testing.assert_close(m[of_it].abs(), size.expand(int(of_it.sum())), rtol=1e-6, atol=0)
    reduce.settle()
    torch.testing.assert_close(reduce.of_rank.worker.numbers.double(), error, rtol=1e-5, atol=1e-6)
    assert reduce.of_rank.server.numbers.numel() == 0
    assert reduce.norms()[2] == 0.0


def layout_mask(layout: FlatLayout) -> Tensor:
    return flat(layout, [torch.ones(n) for n in layout.sizes]) > 0


def flat(layout: FlatLayout, tensors: list[Tensor]) -> Tensor:
    line = torch.zeros(layout.numel, dtype=torch.float64)
    for i, tensor in enumerate(tensors):
        line[layout.offset(i) : layout.offset(i) + tensor.numel()] = tensor.double()
    return line


@pytest.mark.parametrize(("world_size", "serve_alone"), [(1, True), (2, False)])
def test_there_is_a_server_if_there_are_others_or_one_is_wanted(world_size, serve_alone):
    def kind(_: int, transport: Any) -> type:
        where = transport if world_size > 1 else LocalTransport()
        return type(make_all_reduce(FlatLayout((5,), world_size), where, serve_alone=serve_alone))

    assert set(simulate(kind, world_size)) == {CompressedAllReduce}


# ---------------------------------------------------------------- optimizers


def trained(
    kind: Any, steps: int = 6, seed: int = 0, state: dict | None = None, rank: int = 0, **options: Any
) -> tuple[list[Parameter], Any]:
    random = torch.Generator().manual_seed(seed)
    params = [Parameter(torch.randn(shape, generator=random)) for shape in ((50, 30), (300,))]
    optimizer = kind(params, 1e-2, **options)
    if state is not None:
        optimizer.load_state_dict(state)
    take(params, optimizer, range(steps), rank)
    return params, optimizer


def take(params: list[Parameter], optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> None:
    for step in steps:
        random = torch.Generator().manual_seed(1000 * rank + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=random)
        optimizer.step()


def whole(optimizer: DistributedOptimizer) -> Tensor:
    """m + e + E, all that is conserved, in float64."""
    reduce = optimizer.algorithm.exchange.reducer
    reduce.settle()
    server = reduce.of_rank.server.numbers.double().reshape(-1) if reduce.serves else 0.0
    return reduce.result().double() + reduce.of_rank.worker.numbers.double() + server


ADAM: dict[str, Any] = {"freeze_step": 3}
SERVED = Numerics(serve_alone=True)


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
@pytest.mark.parametrize("wire", [Wire(), Wire(buckets=2), Wire(overlap=True)], ids=["plain", "buckets", "overlap"])
def test_a_step_alone_conserves_what_it_does_not_send(kind, wire):
    params, optimizer = trained(kind, **ADAM, wire=wire, numerics=Numerics(precondition=False))
    assert not optimizer.algorithm.exchange.reducer.serves
    unit = optimizer.algorithm.stage.table()[:, Coef.UNIT].double()[
        optimizer.algorithm.exchange.reducer.places.block_tensor.long()
    ]
    for step in range(6, 9):
        before, m = whole(optimizer), optimizer.algorithm.exchange.reducer.result().double()
        take(params, optimizer, range(step, step + 1))
        random = torch.Generator().manual_seed(step)
        gradient = flat(optimizer.frame.layout, [torch.randn(p.shape, generator=random).view(-1) for p in params])
        gradient *= unit.repeat_interleave(optimizer.frame.layout.block_size)
        torch.testing.assert_close(whole(optimizer), before - 0.1 * m + 0.1 * gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [OneBitAdam, ZeroOneAdam])
def test_residuals_of_a_server_that_is_gone_go_to_the_worker(kind):
    options = ADAM if kind is OneBitAdam else rounds_of_one()
    _, served = trained(kind, numerics=SERVED, **options)
    assert bool(served.algorithm.exchange.reducer.of_rank.server.numbers.any())
    expected, state = whole(served), served.state_dict()
    _, alone = trained(kind, 0, state=copy.deepcopy(state), **options)
    torch.testing.assert_close(whole(alone), expected, rtol=1e-6, atol=1e-7)
    _, again = trained(kind, 0, state=alone.state_dict(), numerics=SERVED, **options)  # and back
    assert not again.algorithm.exchange.reducer.of_rank.server.numbers.any()
    torch.testing.assert_close(whole(again), expected, rtol=1e-6, atol=1e-7)
    _, used = trained(kind, 9, seed=4, numerics=SERVED, **options)
    used.load_state_dict(alone.state_dict())
    assert not used.algorithm.exchange.reducer.of_rank.server.numbers.any()


def rounds_of_one() -> dict[str, Any]:
    return {"variance_policy": DoublingVariance(until=2), "sync_policy": EveryStep()}


def test_deepspeeds_presets_serve_themselves():
    params = [Parameter(torch.zeros(5))]
    optimizer = OneBitAdam.from_deepspeed(params, {"type": "OneBitAdam", "params": {"freeze_step": 5}})
    assert optimizer.algorithm.exchange.reducer.serves
    with pytest.raises(ValueError, match="serve_alone must be True or False, got 1"):
        OneBitAdam(params, 1e-3, numerics=Numerics(serve_alone=1))  # type: ignore[arg-type]


# ---------------------------------------------------------------- alone unless told, where a launcher started several


def one() -> list[Parameter]:
    return [Parameter(torch.ones(3))]


@pytest.fixture
def of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.mark.usefixtures("of_torchrun")
@pytest.mark.parametrize("name", MAKE)
def test_ranks_that_would_train_alone_are_told_what_to_write(name):
    with pytest.raises(RuntimeError, match="this is rank 1 of 4") as caught:
        MAKE[name](one())
    assert "torch.distributed.init_process_group()" in str(caught.value)
    assert "process_group=fusedonebit.comm.LocalTransport()" in str(caught.value)


@pytest.mark.usefixtures("of_torchrun")
@pytest.mark.parametrize("name", MAKE)
def test_who_says_over_which_ranks_to_average_is_believed(name):
    assert MAKE[name](one(), process_group=LocalTransport()).stats()["world_size"] == 1
    assert simulate(lambda _, transport: MAKE[name](one(), process_group=transport).stats()["world_size"], 1) == [1]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4"},
        {"RANK": "0"},
        {"RANK": "first", "WORLD_SIZE": "many"},
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMI_RANK": "1", "PMI_SIZE": "4"},
    ],
)
def test_one_process_needs_no_group(monkeypatch, environment):
    for key in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert MAKE["OneBitAdam"](one()).stats()["world_size"] == 1
