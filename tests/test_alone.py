"""One rank alone compresses once: no server, three launches, the same algorithm with one side."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from advance_arguments import advance_arguments
from backends import assert_equal_backends, problem
from ranks import simulate
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import Numerics, OneBitAdam, OneBitLamb, Wire, ZeroOneAdam, triton_kernels
from fusedonebit.comm import CompressedAllReduce, LocalTransport, make_all_reduce
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.optim.policies import DoublingVariance, EveryStep
from fusedonebit.triton_kernels import Coef, FlatLayout, using
from fusedonebit.triton_kernels.finish import LANES, PIECE
from fusedonebit.triton_kernels.headers import Flag, Word
from fusedonebit.triton_kernels.native import library
from fusedonebit.triton_kernels.nouns import Coefficients

SOME = (300, 0, 5, 2048, 129)
UNIT = 2.3e-16  # torch's own root of a float64 may be a unit off on CPUs: MKL rounds it only almost always right
LONG = (45 * 128, 5, (2 * PIECE + 70) * 128, *[3] * (LANES + 2))  # of every kind of segment more than one


def summed(sizes: tuple[int, ...], scope: str, **how: Any) -> Any:
    """Arguments of ``finish_alone``; sums whose order shows."""
    p = problem(sizes, 1, 128, ternary=how.pop("ternary", False))
    p.partials.copy_(torch.rand(p.partials.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    p.partials[1] *= 50.0
    return p.alone_arguments(scope, "contractive", **how)


# ---------------------------------------------------------------- the op


@pytest.mark.kernels
@pytest.mark.parametrize(
    "how",
    [
        *({}, {"limit": 1e9}, {"limit": 1e-9}, {"flags": 2, "limit": 1e-9}, {"found": 1, "limit": 1e9}),
        *({"hold": 16}, {"hold": 16, "limit": 1e-9, "found": 1}, {"ternary": True, "limit": 1e9}),
    ],
    ids=str,
)
@pytest.mark.parametrize("scope", ["global", "layer", "block"])
@pytest.mark.parametrize("sizes", [SOME, LONG], ids=["some", "long"])
def test_finish_alone_equals_eager(sizes, scope, how):
    assert_equal_backends("finish_alone", lambda: summed(sizes, scope, **how), float64_rtol=UNIT)


@pytest.mark.kernels
@pytest.mark.parametrize("way", [{}, {"tables": True}, {"captured": True, "flags": 0}], ids=str)
def test_an_update_is_measured_with_coefficients_just_renewed(way):
    def make() -> Any:
        return summed(LONG, "layer", limit=1e9, renewal=advance_arguments(len(LONG), **way).coefficients)

    assert_equal_backends("finish_alone", make, float64_rtol=UNIT)
    arguments = make()
    triton_kernels.finish_alone(*arguments)
    scale, coef, (_, block_tensor, weight, _, norm) = arguments.scale, arguments.coefficients.table, arguments.limit
    expected = (scale.double() * coef[:, Coef.UNBIAS1].double()[block_tensor] * weight.double()).square().sum().sqrt()
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)


@pytest.mark.kernels
def test_it_renews_the_last_step_of_a_round_as_finish_does():
    def renewal() -> Coefficients:
        table = advance_arguments(len(LONG), moved=True).coefficients
        return table._replace(table=torch.full_like(table.table, math.nan), length=3)

    assert_equal_backends("finish_alone", lambda: summed(LONG, "layer", renewal=renewal()), float64_rtol=UNIT)
    alone, finish = summed(LONG, "layer", renewal=renewal()), problem(LONG).finish_arguments("layer", "l2")
    triton_kernels.finish_alone(*alone)
    triton_kernels.finish(*finish._replace(coefficients=(last := renewal())))
    assert torch.equal(alone.coefficients.moved, last.moved)
    assert torch.equal(alone.coefficients.table.nan_to_num(), last.table.nan_to_num())


@pytest.mark.kernels
@pytest.mark.parametrize("backend", ["plain", "triton", "native"])
def test_it_resets_its_tickets_and_repeats_its_bits(backend):
    if backend == "native" and library() is None:
        pytest.skip("no C compiler")
    arguments, runs = summed(LONG, "layer", limit=1e9), []
    for _ in range(3):
        with using(backend):
            triton_kernels.finish_alone(*arguments)
        assert not arguments.segments.tickets.any()
        written = (arguments.segments.measured, *arguments[3:6], arguments.flags, arguments.limit.norm)
        runs.append([each.clone() for each in written])
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


@pytest.mark.parametrize("factor", [1.001, 0.999, math.nan])
def test_what_is_beyond_the_limit_or_no_number_is_refused(factor):
    arguments = summed(SOME, "layer", limit=0.0)
    *_, limit, norm = arguments.limit
    triton_kernels.finish_alone(*arguments)  # refuses all
    limit.copy_(norm * factor)
    triton_kernels.finish_alone(*arguments)
    refused = not factor > 1
    assert int(arguments.flags) == int(Flag.VETO) * refused
    assert int(arguments.words[0, Word.FLAGS]) == 0
    assert bool(arguments.segments.measured.any())
    assert bool(arguments.scale.any()) == bool(arguments.worker_scale.any()) == (not refused)


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


def test_a_run_alone_resumes_bit_for_bit():
    params, _ = trained(OneBitAdam, 9, **ADAM)
    _, first = trained(OneBitAdam, 6, **ADAM)
    resumed = [Parameter(p.detach().clone()) for p in first.frame.parameters.owners]
    second = OneBitAdam(resumed, 1e-2, **ADAM)
    second.load_state_dict(first.state_dict())
    take(resumed, second, range(6, 9))
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))
    assert "server_error" not in str(second.state_dict().keys())


def test_deepspeeds_presets_serve_themselves():
    params = [Parameter(torch.zeros(5))]
    optimizer = OneBitAdam.from_deepspeed(params, {"type": "OneBitAdam", "params": {"freeze_step": 5}})
    assert optimizer.algorithm.exchange.reducer.serves
    with pytest.raises(ValueError, match="serve_alone must be True or False, got 1"):
        OneBitAdam(params, 1e-3, numerics=Numerics(serve_alone=1))  # type: ignore[arg-type]
