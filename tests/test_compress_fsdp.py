"""Gradients at 8, 4 or 1 bits under FSDP2, with and without replicas of its shards, on real ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compress_runs import check_resuming, conserves, train, trains, whole, wrapped
from ddp_runs import Net, loss_of
from ranks import run_ranks
from torch import Tensor
from torch.distributed import _make_nccl_premul_sum
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.optim import SGD

import fusedonebit
from fusedonebit.integrations.fsdp_groups import Rows, factor_of

EXACT = 3e-7
KINDS = {"fsdp": (2, 3), "replicas": (4,)}
EACH = [(kind, n) for kind, numbers in KINDS.items() for n in numbers]


@pytest.mark.long(but=["4-fsdp-3", "1-replicas-4"])
@pytest.mark.parametrize(("kind", "world_size"), EACH)
@pytest.mark.parametrize("bits", [8, 4, 1])
def test_what_is_sent_and_what_is_left_are_all_there_was(bits, kind, world_size):
    for lost, _ in run_ranks(conserves, world_size, kind, bits, "fp32", "plain", {}):
        assert lost < EXACT


def unbiased(rank: int, world_size: int, bits: int) -> tuple[float, float]:
    """What the mean of 200 gradients of one batch lacks without feedback, beside what one lacks."""
    model, _ = wrapped("fsdp", bits, "default")
    torch.manual_seed(0)
    twin = Net()
    loss_of(twin, rank, 0).backward()
    total, one = 0.0, 0.0
    for step in range(200):
        model.zero_grad()
        loss_of(model, rank, 0).backward()
        found = torch.cat([whole(p.grad).flatten() for p in model.parameters()])
        total, one = total + found, found if step == 0 else one
    mean = torch.cat([p.grad.flatten() for p in twin.parameters()])
    dist.all_reduce(mean)
    mean /= world_size
    return float((total / 200 - mean).norm() / mean.norm()), float((one - mean).norm() / mean.norm())


@pytest.mark.parametrize("bits", [8, 4])
def test_without_feedback_gradients_are_right_on_average(bits):
    for mean, one in run_ranks(unbiased, 2, bits):
        assert mean < 0.12 * one


@pytest.mark.long(but=["4-fsdp-3-adamw"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize(("kind", "world_size"), EACH)
@pytest.mark.parametrize("bits", [8, 4, 1])
def test_any_optimizer_trains(bits, kind, world_size, name):
    found = run_ranks(trains, world_size, kind, name, bits, 60)
    for first, last, params, _ in found:
        assert last < 0.7 * first
        assert torch.equal(params, found[0][2])


@pytest.mark.long(but=["fsdp-form0-2-3"])
@pytest.mark.parametrize("form", [(4, "fp32"), (4, "8bit"), (1, "bf16")])
@pytest.mark.parametrize(
    ("kind", "before", "after"), [("fsdp", 2, 2), ("fsdp", 2, 3), ("replicas", 4, 4), ("replicas", 4, 2)]
)
def test_a_run_goes_on_from_a_checkpoint(kind, before, after, form, tmp_path):
    check_resuming(kind, form, before, after, tmp_path)


class Pair(torch.nn.Module):
    """Has a layer that it can do without, in a group with another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.first(x) + (self.second(x) if both else 0.0)


def policies(rank: int, world_size: int, reduce_in: torch.dtype) -> tuple[bool, torch.Tensor]:
    """Mixed precision and divided gradients, as FSDP2 has them; whether they are those of a twin in float32."""
    torch.manual_seed(0)
    model, twin = Pair(), Pair()
    twin.load_state_dict(model.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_in)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), mp_policy=policy)
    fusedonebit.compress(model, 8)
    model.set_gradient_divide_factor(2.0 * world_size)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    model(x, True).float().square().sum().backward()
    twin(x, True).square().sum().backward()
    near = True
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        dist.all_reduce(q.grad)
        near &= torch.allclose(
            whole(p.grad), q.grad / (2 * world_size), rtol=0.1, atol=0.05 * float(q.grad.abs().max())
        )
    return near, torch.cat([whole(p.grad).flatten() for p in model.parameters()])


@pytest.mark.parametrize("reduce_in", [torch.float32, torch.bfloat16])
def test_mixed_precision_is_as_fsdp2_has_it(reduce_in):
    found = run_ranks(policies, 2, reduce_in)
    assert all(near and torch.equal(grads, found[0][1]) for near, grads in found)


def missing(
    rank: int, world_size: int, feedback: Any, sends_zeros: bool, on: int | None = None, replicas: int = 1
) -> str:
    torch.manual_seed(0)
    model = Pair()
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    of = mesh["replicate"].get_group() if replicas > 1 else None
    fusedonebit.compress(model, 8, feedback=feedback, replicas=of)
    model.set_reduce_scatter_unused_params(sends_zeros)
    try:
        for all_of_it in (True, False, True):
            model.zero_grad()
            model(torch.ones(2, 8), all_of_it or on not in (None, rank)).sum().backward()
    except (RuntimeError, fusedonebit.DisagreementError) as error:
        return str(error)
    return f"{float(whole(model.first.weight.grad).mean()):.2f}"


@pytest.mark.parametrize(
    ("feedback", "sends_zeros", "told"),
    [
        (None, False, "2.00"),
        (None, True, "2.00"),
        ("fp32", True, "2.00"),
        ("fp32", False, "the gradients of first.weight's group are others than at compress()"),
    ],
)
def test_gradients_may_be_missing(feedback, sends_zeros, told):
    for said in run_ranks(missing, 2, feedback, sends_zeros):
        assert said.startswith(told)


@pytest.mark.parametrize(("ranks", "replicas", "of_group"), [(3, 1, 2), (4, 2, 1)])
def test_a_gradient_that_one_rank_alone_lacks_is_told_to_all(ranks, replicas, of_group):
    *others, own = run_ranks(missing, ranks, "8bit", False, ranks - 1, replicas, group_timeout=30)
    assert own.startswith("the gradients of first.weight's group are others than at compress()")
    assert all(f"{of_group} could not go on, and its own error says why" in said for said in others)


def test_a_factor_is_what_a_sum_is_multiplied_with():
    assert factor_of(dist.ReduceOp.AVG, 4) == 0.25
    assert factor_of(dist.ReduceOp.SUM, 4) == 1.0
    assert factor_of(dist.ReduceOp(dist.ReduceOp.SUM), 4) == 1.0
    assert factor_of(_make_nccl_premul_sum(0.125), 4) == 0.125
    with pytest.raises(ValueError, match="op must be AVG, SUM or PREMUL_SUM"):
        factor_of(dist.ReduceOp.MAX, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_rows_of_a_flat_tensor_are_parts_of_parameters(ranks):
    shapes = [(7, 3), (2,), (1, 5), (9, 2, 2)]
    rows, params = Rows(shapes, ranks), [torch.randn(shape) for shape in shapes]
    joined = rows.join(params)
    assert len(joined) == ranks
    assert all(len(row) == rows.length for row in joined)
    assert all(torch.equal(x, y) for x, y in zip(rows.split(joined), params, strict=True))


def columns(p: torch.nn.Parameter) -> Shard | None:
    return Shard(1) if p.dim() == 2 else None


def mistakes(rank: int, world_size: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    said: dict[str, str] = {}

    def attempt(what: str, make: Any, **options: Any) -> None:
        net = Net()
        make(net)
        try:
            if what == "twice":
                fusedonebit.compress(net)
            fusedonebit.compress(net, **options)
        except Exception as error:
            said[what] = f"{type(error).__name__}: {error}"

    attempt("native HSDP", lambda net: fully_shard(net, mesh=mesh))
    attempt("twice", lambda net: fully_shard(net, mesh=mesh["shard"]))
    attempt("replicas", lambda net: fully_shard(net, mesh=mesh["shard"]), replicas=3)
    shards = mesh["shard"].get_group()
    attempt("shards", lambda net: fully_shard(net, mesh=mesh["shard"]), replicas=shards)
    attempt("columns", lambda net: fully_shard(net, mesh=mesh["shard"], shard_placement_fn=columns), bits=1)
    return said


def test_what_is_wrong_is_said_on_every_rank():
    for said in run_ranks(mistakes, 4):
        assert said["native HSDP"].startswith(
            "ValueError: model must be sharded over a mesh of one dimension, got one of"
        )
        assert "compress(model, replicas=mesh['replicate'].get_group())" in said["native HSDP"]
        assert said["twice"].startswith("RuntimeError: model is compressed already")
        assert said["replicas"].startswith("TypeError: replicas must be a torch.distributed group, got int")
        assert said["shards"].startswith("ValueError: replicas must be ranks that have the same shard as this one")
        assert said["columns"].startswith("ValueError: feedback must be None where parameters are sharded along")


def squares_of(net: Any) -> Tensor:
    """What a rank's own inputs make of a chain of layers: a sum of squares."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return net(torch.randn(8, net[0].in_features, generator=generator)).square().sum()


def off_exact(net: Any, twin: Any, loss: Callable[[Any], Tensor], *groups: Any) -> float:
    """How far a pass's gradients are from a twin's, averaged over a group each (None: all), relative to the largest."""
    off = 0.0
    for model in (net, twin):
        loss(model).backward()
    for p, q, group in zip_longest(net.parameters(), twin.parameters(), groups):
        dist.all_reduce(q.grad, group=group)
        exact = q.grad / dist.get_world_size(group)
        off = max(off, float((whole(p.grad) - exact).abs().max() / exact.abs().max()))
    return off


def begun(rank: int, world_size: int) -> tuple[float, bool]:
    """How far off a model is that was evaluated before, without a sharded root; and whether groups share messages."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    twin = copy.deepcopy(net)
    for layer in net:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)))
    net(torch.ones(2, 64))
    compression = fusedonebit.compress(net, 8)
    off = off_exact(net, twin, squares_of)
    shared = len({id(exchange.sent) for scatter in compression.scatters for exchange in scatter.sums.values()}) == 1
    return off, shared


def test_blocks_alone_may_be_sharded_and_share_their_messages():
    for off, shared in run_ranks(begun, 2):
        assert off < 2 / 127  # each rank draws levels within one step of its largest
        assert shared


def meshes(rank: int, world_size: int) -> float:
    """How far gradients are from exact where groups of one length are sharded by four ranks, and by two."""
    torch.manual_seed(0)
    wide, narrow = torch.nn.Linear(16, 64, bias=False), torch.nn.Linear(64, 8, bias=False)
    net = torch.nn.Sequential(wide, narrow)
    twin = copy.deepcopy(net)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(wide, mesh=init_device_mesh("cpu", (4,)))
    fully_shard(narrow, mesh=mesh["shard"])
    fusedonebit.compress(net, 8)
    return off_exact(net, twin, squares_of, None, mesh["shard"].get_group())


def test_groups_may_be_sharded_by_other_numbers_of_ranks():
    assert max(run_ranks(meshes, 4)) < 2 / 127


def detached(rank: int, world_size: int) -> tuple[str, float]:
    """What is printed; and how far FSDP2's averages are from exact ones afterwards."""
    model, compression = wrapped("fsdp", 4, "8bit")
    train(model, SGD(model.parameters(), 0.0), rank, range(2))
    said = repr(compression)
    compression.detach()
    model.zero_grad()
    torch.manual_seed(0)
    return said, off_exact(model, Net(), partial(loss_of, rank=rank, step=5))


def test_after_detaching_fsdp2_averages_as_ever():
    for said, off in run_ranks(detached, 2):
        assert said == "compress(bits=4): residuals in 8bit, 3,084 bytes on each rank"
        assert off < 1e-6
