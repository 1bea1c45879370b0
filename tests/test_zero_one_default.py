"""0/1 Adam without policies: 1-bit Adam with a short warm-up, under a title of its own."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from observe import caught, fingerprint, parameters
from ranks import simulate
from rounds import make_parameters, train
from torch.nn import Parameter

from benchmarks.lab.alike import AlikeTransport
from benchmarks.netlab.whole import renewals
from fusedonebit import OneBitAdam, Wire, ZeroOneAdam
from fusedonebit.comm import Transport
from fusedonebit.optim.policies import DoublingVariance, EveryStep
from fusedonebit.optim.zero_one import WARM_UP

STEPS = WARM_UP + 24
ONEBIT = partial(OneBitAdam, warmup=WARM_UP)
IN_ROUNDS: dict[str, dict[str, Any]] = {
    "workers' own": {"sync_policy": EveryStep()},
    "as in the paper": {"variance_policy": DoublingVariance()},
}


def trained(rank: int, transport: Transport, make: Any) -> tuple[str, str, dict[str, Any]]:
    """Train on gradients that differ between workers; return prints of parameters and residuals, and what it tells."""
    optimizer = make(make_parameters(), betas=(0.8, 0.9), process_group=transport)
    train(optimizer, rank, STEPS)
    residuals = [optimizer.worker_error(p) for p in parameters(optimizer)]
    return fingerprint(parameters(optimizer)), fingerprint(residuals), optimizer.stats()


def test_it_is_onebit_adam_with_a_short_warm_up_to_the_bit():
    ours, theirs = (simulate(trained, 3, make) for make in (ZeroOneAdam, ONEBIT))
    assert [each[:2] for each in ours] == [each[:2] for each in theirs]
    assert len({parameters for parameters, *_ in ours}) == 1
    *_, stats = ours[0]
    assert (stats["phase"], stats["local_steps"], stats["freeze_step"]) == ("compression", 0, WARM_UP)
    assert stats["renewals"] > 4
    other = simulate(trained, 3, partial(ZeroOneAdam, **IN_ROUNDS["workers' own"]))
    assert other[0][0] != ours[0][0]


def test_what_it_sends_in_5000_steps_by_count():
    """Steps of each kind, of a large tensor; 0.31 B is what is wanted."""
    transport, numel, steps = AlikeTransport(0, 8), 1 << 20, 5000
    p = Parameter(torch.zeros(numel))
    optimizer, sent = ZeroOneAdam([p], process_group=transport), [0]
    for _ in range(40):
        p.grad = torch.ones(numel)
        optimizer.step()
        sent.append(transport.traffic.bytes_total)
    by_step = [(after - before) * 8 / 7 / numel for before, after in pairwise(sent)]
    warm, fewest, most = by_step[0], min(by_step), max(by_step[WARM_UP:])
    renewing = renewals(steps - WARM_UP)
    mean = (WARM_UP * warm + renewing * most + (steps - WARM_UP - renewing) * fewest) / steps
    print(f"{warm:.2f} in {WARM_UP} steps, {most:.2f} in {renewing}, else {fewest:.4f}: {mean:.3f} B (wanted: 0.31)")
    assert mean <= 0.335


@pytest.mark.parametrize("steps", [0, WARM_UP - 1, WARM_UP + 9])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_as_the_original_does(steps, copied):
    optimizer = ZeroOneAdam(make_parameters())
    train(optimizer, 0, steps)
    again = copied(optimizer)
    for each in (optimizer, again):
        train(each, 0, 20, start=steps)
    assert fingerprint(parameters(again)) == fingerprint(parameters(optimizer))


@pytest.mark.parametrize("rounds", IN_ROUNDS)
@pytest.mark.parametrize("to_rounds", [False, True])
def test_a_checkpoint_of_the_other_algorithm_is_refused(rounds, to_rounds):
    default, in_rounds = ZeroOneAdam(make_parameters()), ZeroOneAdam(make_parameters(), **IN_ROUNDS[rounds])
    for optimizer in (default, in_rounds):
        train(optimizer, 0, WARM_UP + 2)
    one, other = (default, in_rounds) if to_rounds else (in_rounds, default)
    before = fingerprint(parameters(other))
    kind, text = caught(lambda: other.load_state_dict(one.state_dict()))
    assert kind is ValueError
    assert f"the checkpoint's algorithm is {one.title}, but here it is {other.title}" in text
    assert "ZeroOneAdam(params) once had policies.EveryStep()" in text
    assert fingerprint(parameters(other)) == before


def unlike(rank: int, transport: Transport) -> None:
    ZeroOneAdam(make_parameters(), process_group=transport, **IN_ROUNDS["workers' own"] if rank else {})


def test_ranks_of_which_one_has_a_policy_are_told_so():
    kind, text = caught(lambda: simulate(unlike, 2))
    assert issubclass(kind, ValueError)
    assert "the optimizer is ZeroOneAdam without policies on rank 0 but ZeroOneAdam on rank 1" in text


def overlapped(rank: int, transport: Transport, make: Any) -> str:
    """Train on several backward passes a step, in which buckets travel."""
    torch.manual_seed(0)
    model = torch.nn.Linear(60, 50)
    optimizer = make(model.parameters(), process_group=transport, wire=Wire(overlap=True))
    draw = torch.Generator().manual_seed(rank)
    for _ in range(WARM_UP + 4):
        with optimizer.no_sync():
            model(torch.randn(4, 60, generator=draw)).square().sum().backward()
        model(torch.randn(4, 60, generator=draw)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return fingerprint(parameters(optimizer))


def test_it_overlaps_as_onebit_adam_does():
    ours, theirs = (simulate(overlapped, 2, make) for make in (ZeroOneAdam, ONEBIT))
    assert ours == theirs
    assert len(set(ours)) == 1


def test_no_warm_up_is_an_argument():
    kind, text = caught(lambda: ZeroOneAdam(make_parameters(), warmup=3))
    assert kind is TypeError
    assert "OneBitAdam and OneBitLamb have: warmup=" in text


def test_other_optimizers_states_are_taken_up():
    params = make_parameters()
    adamw = torch.optim.AdamW(params, lr=1e-3)
    for step in range(WARM_UP + 3):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step * 10 + i))
        adamw.step()
    optimizer = ZeroOneAdam(params)
    optimizer.load_state_dict(adamw.state_dict())
    train(optimizer, 0, 1)
    assert optimizer.phase == "compression"
