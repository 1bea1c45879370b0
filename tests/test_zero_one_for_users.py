"""0/1 Adam as users meet it: odd gradients, further groups, a falling rate; what it tells, sends and refuses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from observe import caught, fingerprint
from ranks import run_ranks
from rounds import EveryRound, Script, everything, make, make_parameters, set_gradients, train
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import DisagreementError, Faults, OneBitAdam, Wire, ZeroOneAdam, policies
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.optim.zero_one_options import ZeroOneOptions

ROUNDS = (0, 0, 1, 3, 1, 0, 2, 2)
SCOPES = pytest.mark.parametrize("options", [{}, {"scale_scope": "global", "precondition": False}], ids=str)


# ---------------------------------------------------------------- coordinates and groups


@pytest.mark.long(but=1)
@SCOPES
@pytest.mark.parametrize("given", [None, 0.0], ids=["none", "zeros"])
def test_no_gradients_leave_a_parameter_and_zeros_only_decay_it(options, given):
    def run(rank: int, transport: Transport, decay: float) -> tuple[Tensor, Tensor, Tensor]:
        params = make_parameters()
        optimizer = make(params, ROUNDS, weight_decay=decay, process_group=transport, **options)
        for step in range(16):
            set_gradients(optimizer, rank, step)
            params[1].grad = None if given is None else torch.zeros_like(params[1])
            optimizer.step()
        return params[1].detach(), optimizer.momentum(params[0]), params[0].detach()

    start = make_parameters()[1].detach()
    for decay in (0.0, 0.1):
        for still, _, moving in SimulatedGroup(2).run(lambda r, t, decay=decay: run(r, t, decay)):
            decays = decay > 0 and given is not None
            expected = start * (1 - 1e-2 * decay) ** 16 if decays else start
            torch.testing.assert_close(still, expected, rtol=3e-6 * decays, atol=0)
            assert not torch.equal(moving, make_parameters()[0])


@pytest.mark.parametrize("variance_floor", [0.01, 0.0])
@pytest.mark.parametrize("precondition", [True, False])
def test_unseen_rows_take_no_giant_steps_at_a_renewal(precondition, variance_floor):
    """A bit has no zero: their rebuilt momentum is noise, which Adam's own denominator, eps, would blow up."""

    def run(rank: int, transport: Transport) -> tuple[float, float]:
        torch.manual_seed(0)
        p = Parameter(torch.randn(40, 25))
        options: dict[str, Any] = {"precondition": precondition, "variance_floor": variance_floor, "weight_decay": 0.0}
        optimizer = make([p], (0, 0, 1, 2, 0, 0, 1, 0), process_group=transport, **options)
        start = p.detach().clone()
        for step in range(24):
            set_gradients(optimizer, rank, step)
            p.grad[20:] = 0.0
            optimizer.step()
        moved = (p.detach() - start).abs()
        return float(moved[:20].max()), float(moved[20:].max())

    if not precondition and variance_floor == 0:
        pytest.skip("the paper's own: also its rounds of bits divide by eps there; a floor or a mask is the way out")
    for seen, unseen in SimulatedGroup(2).run(run):
        print(f"precondition {precondition}, floor {variance_floor}: rows move {seen:.2f}, unseen ones {unseen:.2f}")
        assert unseen < 0.5


def grow(rank: int, world_size: int) -> tuple[list[bool], tuple, tuple, list[float], str]:
    params = make_parameters()
    script = Script((0, 0, 0, 1, 2, 0, 1))
    optimizer = make(params[:3], variance_policy=script, sync_policy=script, weight_decay=0.0)
    train(optimizer, rank, 3)
    before = [t.clone() for t in (*everything(optimizer), *(optimizer.state[p]["exp_avg_sq"] for p in params[:3]))]
    differs = caught(lambda: optimizer.add_param_group({"params": [Parameter(torch.ones(3 + rank))]}))
    optimizer.add_param_group({"params": params[3:], "lr": 3e-2})
    after = [*(p.detach() for p in params[:3]), *map(optimizer.momentum, params[:3])]
    after += [*map(optimizer.worker_error, params[:3]), *(optimizer.state[p]["exp_avg_sq"] for p in params[:3])]
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    start = [p.detach().clone() for p in params]
    train(optimizer, rank, 3, 3)  # rounds of bits: the old go on, the new wait for a variance
    moved = [float((p.detach() - s).abs().max()) for p, s in zip(params, start, strict=True)]
    late = caught(lambda: optimizer.add_param_group({"params": [Parameter(torch.ones(3))]}))
    train(optimizer, rank, 2, 6)
    same += [not torch.equal(p, s) for p, s in zip(params, start, strict=True)]
    return same, differs, late, moved, fingerprint(params)


def test_groups_can_be_added_before_the_first_round_of_bits():
    results = run_ranks(grow, 2, group_timeout=10)
    for same, differs, late, moved, prints in results:
        assert all(same)
        assert differs[0] is DisagreementError
        assert late[0] is RuntimeError
        assert "add_param_group must be called before the first round that does not renew the variance" in late[1]
        print(f"three steps move the old ones {moved[:3]}, the new ones {moved[3:]}")
        assert all(1e-4 < m < 0.3 for m in moved[:3])
        assert moved[3:] == [0.0, 0.0]
        assert prints == results[0][4]


# ---------------------------------------------------------------- what is told


def tell(rank: int, world_size: int) -> tuple[list[dict], str]:
    optimizer, seen = make(make_parameters(), ROUNDS), []
    for step in range(16):
        train(optimizer, rank, 1, step)
        seen.append(optimizer.stats())
    return seen, repr(optimizer)


LAST = ("worker_error_norm", "compensated_norm", "residual_over_momentum")
"""What is told of the last synchronisation in bits."""


def test_stats_and_repr_tell_where_training_stands():
    for seen, text in run_ranks(tell, 2):
        phases = Script(ROUNDS).places(16)
        assert [s["phase"] for s in seen] == phases
        assert [s["step"] for s in seen] == list(range(1, 17))
        assert [s["rounds"] for s in seen[:10]] == [1, 2, 3, 3, 3, 4, 5, 6, 6, 7]
        assert [s["renewals"] for s in seen[:10]] == [1, 2, 2, 2, 2, 2, 2, 3, 3, 3]
        assert [s["local_steps"] for s in seen[:10]] == [0, 0, 0, 1, 2, 0, 0, 0, 1, 0]
        assert [s["round_steps"] for s in seen[:10]] == [1, 1, 1, 3, 3, 3, 1, 1, 2, 2]
        assert [s["bytes_step"] == 0 for s in seen] == [phase == "local" for phase in phases]
        calls = {"uncompressed": 1, "one-bit": 2, "local": 0}
        assert [s["collectives_step"] for s in seen[1:]] == [calls[phase] for phase in phases[1:]]
        assert [s["collectives_step"] for s in seen[:1]] == [2]  # and ranks agree on the rounds to come
        for before, here in pairwise(seen[2:]):
            if here["phase"] != "one-bit":
                assert [here[key] for key in LAST] == [before[key] for key in LAST]
            assert 0 < here["worker_error_norm"] < here["compensated_norm"]
            assert here["residual_over_momentum"] > 0
        held = seen[-1]["state_bytes"] / (seen[-1]["parameters"] + seen[-1]["padding"])
        print(f"state: {held:.1f} bytes per element")
        assert 16 < held < 22  # m, v, residual, anchor, half a server's residual, bits
        for line in ("ZeroOneAdam", "phase: local, 16 updates", "variance: Script(rounds=(0, 0, 1,", "rounds: Script("):
            assert line in text
        assert "scale: contractive, block, preconditioned\n" in text


def count(rank: int, world_size: int, name: str) -> int:
    params = [Parameter(torch.zeros(64, 1000)), Parameter(torch.zeros(1000))]
    variance, rounds = policies.DoublingVariance(scaler=4), policies.DoublingRounds(after=20, scaler=10, most=16)
    if name == "zero-one":
        optimizer: Any = ZeroOneAdam(params, variance_policy=variance, sync_policy=rounds)
    elif name == "fp32":
        optimizer = ZeroOneAdam(params, variance_policy=EveryRound(), sync_policy=rounds)
    else:
        optimizer = OneBitAdam(params, freeze_step=20, faults=Faults(guard="off"))
    start = optimizer.stats()["bytes_total"]
    train(optimizer, rank, 200)
    return optimizer.stats()["bytes_total"] - start


@pytest.mark.long
def test_bytes_against_fp32_and_onebit_adam():
    sent = {name: run_ranks(count, 2, name)[0] for name in ("fp32", "onebit", "zero-one")}
    for name, total in sent.items():
        print(f"200 steps of 65,000 parameters, {name}: {total / 1e6:.3f} MB, 1/{sent['fp32'] / total:.1f}")
    assert sent["fp32"] == pytest.approx(200 * 4 * 65_000, rel=0.02)
    assert sent["zero-one"] < sent["onebit"] < sent["fp32"] / 5


# ---------------------------------------------------------------- what it is not made for


def build_differently(rank: int, world_size: int, case: str, values: tuple) -> tuple[type | None, str]:
    return caught(lambda: make(make_parameters(), **{case: values[rank]}))


@pytest.mark.parametrize(
    ("case", "values", "text"),
    [
        ("precondition", (True, False), "precondition is True on rank 0 but False on rank 1"),
        ("variance_floor", (0.0, 0.01), "variance_floor is 0.0 on rank 0 but 0.01 on rank 1"),
        ("lr", (0.1, 0.2), "lr of group 0 is 0.1 on rank 0 but 0.2 on rank 1"),
    ],
)
def test_different_construction_is_found_on_every_rank(case, values, text):
    for kind, said in run_ranks(build_differently, 2, case, values, group_timeout=10):
        assert kind is DisagreementError
        assert text in said


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"scale_norm": "max"}, ValueError, "must be one of 'contractive', 'relaxed', 'l1', 'l2', got 'max'"),
        ({"scale_scope": "bucket"}, ValueError, "scale_scope must be one of 'global', 'layer', 'block', got 'bucket'"),
        ({"variance_floor": 1.0}, ValueError, "variance_floor must be a number in [0, 1), or None, got 1.0"),
        ({"precondition": 1}, ValueError, "precondition must be True or False, got 1"),
        ({"capturable": True}, ValueError, "capturable must be False, got True: what a step does depends on"),
        ({"hierarchy": 2}, ValueError, "hierarchy must be None: between two synchronisations ranks of a node would"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options, kind, text):
    found, said = caught(lambda: make(make_parameters(), **options))
    assert found is kind
    assert text in said


def test_a_step_can_not_be_captured():
    script = Script((0,))
    arguments = {"variance_policy": script, "sync_policy": script, "wire": Wire(capturable=True)}
    with pytest.raises(ValueError, match="capturable must be False, got True: what a step does depends on its place"):
        ZeroOneOptions.of("ZeroOneAdam", arguments).check()


def shards(rank: int, world_size: int) -> tuple[tuple, tuple]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    p = Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    optimizer = caught(lambda: make([p]))
    return optimizer, caught(lambda: make(make_parameters(), process_group=mesh))


def test_shards_are_refused_and_a_mesh_is_a_group():
    for (kind, text), whole in run_ranks(shards, 2, group_timeout=10):
        assert kind is ValueError
        assert "parameters of ZeroOneAdam must be whole, but" in text
        assert whole == (None, "")
