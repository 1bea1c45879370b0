"""A shared variance of which a byte is kept, and which is made of it wherever it is read, is the same to the bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from observe import parameters, resumed, variances
from ranks import simulate
from tape import in_a_capture
from torch.nn import Parameter

from fusedonebit import Faults, FusedOneBitWarning, Numerics, OneBitAdam, OneBitLamb, Wire
from fusedonebit.comm import Transport
from fusedonebit.optim.moments import MomentBuffers

SHAPES, LATE = ((300,), (20, 9), (40,)), 1  # index of the tensor that begins late
STEPS, LATE_FROM, LOUD, LOADED = 200, 90, 130, (5, 40, 163, 164)
CASES: dict[str, dict[str, Any]] = {
    "adam": {},
    "lamb": {"kind": OneBitLamb},
    "ternary, eps inside": {"numerics": Numerics(eps_inside_sqrt=True, ternary=True)},
    "buckets": {"wire": Wire(buckets=2)},
    "re-warm-up": {"faults": Faults(guard="rewarm", rewarm_steps=10), "betas": (0.9, 0.999)},
}


def make(transport: Transport | None = None, kind: Any = OneBitAdam, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"warmup": 5, "betas": (0.9, 0.99), "faults": Faults(guard="off")} | options
    return kind([Parameter(torch.randn(shape)) for shape in SHAPES], process_group=transport, **options)


def step(optimizer: Any, t: int, rank: int, loud: bool = False) -> None:
    """One tensor has no gradient at first, and none again for a while; ``loud``: one step has far too large ones."""
    for i, p in enumerate(parameters(optimizer)):
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + rank + 10 * t + 10_000 * i))
        quiet = i == LATE and (t < LATE_FROM or 100 < t < 120)
        p.grad = g * (0.0 if quiet else 1e5 if loud and t == LOUD else 10.0**i)
    optimizer.step()


def run(rank: int, transport: Transport, case: str) -> tuple[list[Any], list[bool], int]:
    """Trains and loads; returns all that there is now and then, whether v is a byte each time, and re-warm-ups."""
    optimizer, seen, bytes_each = make(transport, **CASES[case]), [], []
    for t in range(STEPS):
        step(optimizer, t, rank, case == "re-warm-up")
        if t in LOADED or t == STEPS - 1:
            saved = optimizer.state_dict()["state"]
            params = parameters(optimizer)
            seen += [x.detach().clone() for x in (*params, *variances(optimizer), *map(optimizer.momentum, params))]
            seen += [saved[i]["exp_avg_sq"].clone() for i in range(len(params))]
            bytes_each.append(optimizer.algorithm.moments.mean_sq is not None)
            optimizer = resumed(optimizer, make(transport, **CASES[case]))
    return seen, bytes_each, optimizer.stats()["rewarms"]


@pytest.mark.long(but=2)
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_whether_v_is_a_byte_or_a_float(case, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        in_bytes = simulate(lambda rank, transport: run(rank, transport, case), 2)
        monkeypatch.setattr(MomentBuffers, "room_for_means", lambda moments: None)
        in_floats = simulate(lambda rank, transport: run(rank, transport, case), 2)
    for (found, forms, rewarms), (expected, floats, _) in zip(in_bytes, in_floats, strict=True):
        assert forms == [True, True, True, False, True]  # where it was loaded a step before there is no renewal yet
        assert not any(floats)
        assert rewarms == (case == "re-warm-up")
        assert all(map(torch.equal, found, expected))


def until_renewed(optimizer: Any, t: int) -> int:
    """Steps on until v is another; returns the number of the next step."""
    before = optimizer.stats()["renewals"]
    while optimizer.stats()["renewals"] == before:
        step(optimizer, t, 0)
        t += 1
    return t


def test_what_a_graph_has_captured_stays_where_it_is():
    optimizer = make(wire=Wire(capturable=True))
    for t in range(STEPS):
        step(optimizer, t, 0)
    t = until_renewed(optimizer, STEPS)
    again = resumed(optimizer, make(wire=Wire(capturable=True)))  # whose v is in floats until it is renewed
    for each in (optimizer, again):
        step(each, t, 0)
        with in_a_capture():
            step(each, t + 1, 0)

    def places(each: Any) -> list[int]:
        moments = each.algorithm.moments
        v = moments.preconditioner(False)
        return [x.data_ptr() for x in (v.numbers, v.exponents, v.factors) if x is not None]

    before, v = [places(each) for each in (optimizer, again)], variances(again)[0].clone()
    assert list(map(len, before)) == [3, 1]
    for each in (optimizer, again):
        until_renewed(each, t + 2)
    assert [places(each) for each in (optimizer, again)] == before
    assert not torch.equal(variances(again)[0], v)
    assert all(map(torch.equal, variances(optimizer), variances(again)))
