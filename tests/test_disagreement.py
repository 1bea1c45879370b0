"""Ranks that construct, or add a group, otherwise than others: every rank says so, and none waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from observe import caught, fingerprint, parameters, train
from optimizers import MAKE, objects
from ranks import run_ranks, simulate
from torch.nn import Parameter

from fusedonebit import CollectiveError, DisagreementError, FusedOneBitWarning, MarsitSGD, OneBitAdam, Wire, ZeroOneAdam
from fusedonebit.comm import SimulatedGroup
from fusedonebit.optim.policies import EveryStep


def make(*shapes: tuple[int, ...]) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape)) for shape in shapes or ((40, 30), (7,))]


# ---------------------------------------------------------------- construction

PARAMETERS = {
    "count": "the number of trainable parameters is 3 on rank 0 but 2 on rank 1",
    "shape": "parameter 1 is float32 (5, 4)",
    "dtype": "but bfloat16 (5, 4)",
    "memory order": "in memory order (1, 5) on rank 1",
    "frozen": "the number of trainable parameters is 3 on rank 0 but 2 on rank 1",
    "value": "the checksum of parameter 1's values",
    "swapped values": "the checksum of parameter 0's values",
    "grouping": "the group of parameter 1 is 1 on rank 0 but 0 on rank 1",
    "group option": "weight_decay of group 1 is 0.1 on rank 0 but 0.2 on rank 1",
    "mask": "the mask of parameter 1",
    "mask of one rank": "the mask of parameter 1 is none on rank 0 but checksum",
}
ERRORS = {"betas": (ValueError, "betas must be"), "unusable": (TypeError, "parameter 1 must be float32, bfloat16")}
"""Of rank 1 alone."""
OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "OneBitAdam": {
        "broadcast_parameters": (False, True),
        "lr": (1e-3, 2e-3),
        "betas": ((0.9, 0.99), (0.9, 0.999)),
        "freeze_step": (5, 6),
        "scale_norm": ("l1", "l2"),
        "precondition": (True, False),
        "guard": ("rewarm", "off"),
        "variance_floor": (None, 0.1),
        "block_size": (128, 256),
        "nonfinite": ("skip", "raise"),
    },
    "Lamb": {"c_max": (10.0, 11.0), "eps_inside_sqrt": (False, True)},
    "OneBitLamb": {
        "r_threshold": (0.1, 0.2),
        "adaptive": (True, False),
        "momentum_scaling": (True, False),
        "variant": ("paper", "deepspeed"),
    },
    "MarsitSGD": {
        "topology": ("ring", "owner"),
        "seed": (0, 7),
        "full_precision_every": (100, 99),
        "local_steps": (1, 2),
        "compensation_limit": (1.0, None),
        "lr": (0.1, 0.2),
        "global_ratio": (0.3, 0.4),
        "momentum": (0.9, 0.0),
    },
}
OF_GROUPS = ("lr", "betas", "c_max", "r_threshold", "global_ratio", "momentum")
CLASSES = [("Lamb", "OneBitLamb"), ("MarsitSGD", "MarsitAdam")]


def with_parameters(case: str, odd: bool) -> Callable[[], object]:
    """Construct with parameters that are others on the odd rank."""
    a, b, c = make((5, 4), (5, 4), (6,))
    b.requires_grad_(not (case == "frozen" and odd))
    b.data[3, 2] += 1e-6 * (case == "value" and odd)
    second = {
        "shape": torch.zeros(4, 5) if odd else torch.zeros(5, 4),
        "dtype": torch.zeros(5, 4, dtype=torch.bfloat16 if odd else torch.float32),
        "memory order": torch.zeros(4, 5).t() if odd else torch.zeros(5, 4),
        "unusable": torch.zeros(5, 4, dtype=torch.float64 if odd else torch.float32),
    }
    split = 1 + odd
    params: list[Any] = {
        "count": [a, b, c][: 3 - odd],
        "swapped values": [b, a, c] if odd else [a, b, c],
        "grouping": [{"params": [a, b][:split], "lr": 1e-2}, {"params": [a, b, c][split:], "lr": 1e-4}],
        "group option": [{"params": [a]}, {"params": [b, c], "weight_decay": 0.1 + 0.1 * odd}],
    }.get(case, [a, Parameter(second[case]) if case in second else b, c])
    masked = case == "mask" or (case == "mask of one rank" and odd)
    more: dict[str, Any] = {"mask": {b: torch.arange(20).view(5, 4) != int(odd)}} if masked else {}
    more |= {"betas": (2.0 if odd else 0.9, 0.9)} if case == "betas" else {}
    return lambda: MAKE["OneBitAdam"](params, **more)


def build_differently(rank: int, world_size: int) -> dict[Any, tuple[type | None, str]]:
    told: dict[Any, Any] = {case: caught(with_parameters(case, rank == 1)) for case in (*PARAMETERS, *ERRORS)}
    for name, options in OPTIONS.items():
        for option, values in options.items():
            given = {option: values[rank]} | ({"precondition": False} if option == "momentum_scaling" else {})
            told[name, option] = caught(lambda name=name, given=given: MAKE[name](make(), **given))
    return told | {pair: caught(lambda pair=pair: MAKE[pair[rank]](make())) for pair in CLASSES}


def test_different_construction_is_named_by_its_first_difference():
    ours, theirs = run_ranks(build_differently, 2, group_timeout=20)
    texts: dict[Any, str] = dict(PARAMETERS)
    texts |= {(one, other): f"the optimizer is {one} on rank 0 but {other} on rank 1" for one, other in CLASSES}
    for name, options in OPTIONS.items():
        for option, (here, there) in options.items():
            said = option + " of group 0" * (option in OF_GROUPS)
            texts[name, option] = f"{said} is {here!r} on rank 0 but {there!r} on rank 1"
    for case, text in texts.items():
        assert ours[case] == theirs[case]
        kind, message = ours[case]
        assert kind is DisagreementError, case
        assert text in message, (case, message)
        assert "values" not in text or "pass Wire(broadcast_parameters=True) to use rank 0's" in message
    for case, (kind, text) in ERRORS.items():
        assert theirs[case][0] is kind, case
        assert text in theirs[case][1], case
        assert ours[case][0] is DisagreementError, case
        assert "failed on rank 1" in ours[case][1], case
        assert text in ours[case][1], case


def broadcast(rank: int, world_size: int, apart: int) -> str:
    torch.manual_seed(apart * rank)
    params = [Parameter(torch.randn(300)), Parameter(torch.randn(20, 30).t()), Parameter(torch.randn(40, 50)[::3, ::2])]
    train(OneBitAdam(params, freeze_step=5, wire=Wire(broadcast_parameters=True)), rank, range(8))
    return fingerprint(params)


def test_broadcast_parameters_starts_all_from_rank_0s_values():
    assert set(run_ranks(broadcast, 4, 1)) == {run_ranks(broadcast, 4, 0)[0]}


TOLD = {"shape": ("(9,)", "(8,)"), "error": ("eps must be a finite number >= 0, got -1.0",)}
ADDED = [("OneBitAdam", "shape"), ("OneBitAdam", "error"), ("OneBitLamb", "shape"), ("Lamb", "error")]


def add_differently(rank: int, world_size: int) -> list[tuple[type | None, str, int, str]]:
    seen = []
    for name, case in ADDED:
        optimizer = MAKE[name](make())
        train(optimizer, rank, range(2))
        odd = {"params": make((8,))} if case == "shape" else {"params": make((9,)), "eps": -1.0}
        group = odd if rank == 1 else {"params": make((9,))}
        outcome = caught(lambda optimizer=optimizer, group=group: optimizer.add_param_group(group))
        train(optimizer, rank, range(2, 7))
        seen.append((*outcome, len(optimizer.param_groups), fingerprint(parameters(optimizer))))
    return seen


def test_groups_added_differently_are_refused_on_every_rank():
    for case, *ranks in zip(ADDED, *run_ranks(add_differently, 2, group_timeout=10), strict=True):
        for kind, message, groups, bits in ranks:
            assert issubclass(kind, ValueError), case
            assert all(text in message for text in TOLD[case[1]]), message
            assert (groups, bits) == (1, ranks[0][3]), case


# ---------------------------------------------------------------- what all pass alike, and is wrong

NAN, INF = float("nan"), float("inf")
TORUS, MOST = {"topology": "torus"}, "compensation_limit must be a finite number >= 0 or None, got"
MARSITS: list[tuple[str, int, dict[str, Any], str]] = [
    ("MarsitSGD", 2, {"topology": "tree"}, "topology must be one of 'ring', 'torus', 'owner', got 'tree'"),
    ("MarsitSGD", 4, TORUS | {"rows": 3}, "rows must be one of [2] for a torus of 4 workers, or None, got 3"),
    ("MarsitSGD", 4, TORUS | {"rows": 2.0}, "rows must be an int or None, got 2.0"),
    ("MarsitSGD", 3, TORUS, "needs a world size that is a product of two numbers >= 2, got 3"),
    ("MarsitSGD", 1, TORUS, "needs a world size that is a product of two numbers >= 2, got 1"),
    ("MarsitSGD", 2, {"rows": 2}, 'rows must be None unless topology is "torus", got 2'),
    *(
        ("MarsitSGD", 2, {"full_precision_every": bad}, f"full_precision_every must be an int >= 0, got {bad}")
        for bad in (-1, 2.5)
    ),
    *(("MarsitSGD", 2, {"local_steps": bad}, f"local_steps must be an int >= 1, got {bad}") for bad in (0, True)),
    (
        "MarsitSGD",
        2,
        {"local_steps": 2, "stochastic_rounding": True},
        "stochastic_rounding must be False with local_steps=2, got True",
    ),
    ("MarsitSGD", 2, {"seed": -1}, "seed must be an int >= 0, got -1"),
    ("MarsitSGD", 2, {"momentum": 1.5}, "momentum must be a number in [0, 1), got 1.5"),
    ("MarsitSGD", 2, {"global_ratio": 0}, "global_ratio must be a finite number > 0, got 0"),
    ("MarsitAdam", 2, {"global_ratio": NAN}, "global_ratio must be a finite number > 0, got nan"),
    ("MarsitAdam", 2, {"eps": 0}, "eps must be > 0, got 0"),
    *(("MarsitSGD", 2, {"compensation_limit": bad}, f"{MOST} {bad}") for bad in (-1, INF)),
    ("MarsitSGD", 2, {"lr": -0.1}, "lr must be a finite number >= 0, got -0.1"),
    ("MarsitAdam", 2, {"betas": (0.9, 1.0)}, "betas must be two numbers in [0, 1), got (0.9, 1.0)"),
    ("MarsitAdam", 2, {"weight_decay": -1.0}, "weight_decay must be a finite number >= 0, got -1.0"),
    ("MarsitSGD", 2, {"nonfinite": "ignore"}, "nonfinite must be one of 'skip', 'raise', got 'ignore'"),
    *(
        (name, 2, {"capturable": True}, "capturable must be False, got True: what a step does depends on its place")
        for name in ("MarsitSGD", "MarsitAdam")
    ),
]


@pytest.mark.parametrize(("name", "world_size", "options", "message"), MARSITS, ids=str)
def test_marsits_bad_arguments_are_one_clear_error_on_all(name, world_size, options, message):
    def construct(rank: int, transport: Any) -> tuple[type | None, str]:
        return caught(lambda: MAKE[name](make(), process_group=transport, **options))

    first, *others = simulate(construct, world_size)
    assert others == [first] * (world_size - 1)
    assert first[0] in (TypeError, ValueError)
    assert message in first[1]


# ---------------------------------------------------------------- whatever one rank passes

ODD = [None, "abc", -1, float("nan"), [], {}, object(), 1e308, True, torch.ones(3)]
ARGUMENTS: dict[Callable[..., Any], tuple[dict[str, Any], str]] = {
    OneBitAdam: (
        {"freeze_step": 3},
        "params lr freeze_step betas eps weight_decay mask hierarchy overlap buckets guard warm_start rewarm_steps "
        "ternary frozen_dtype max_grad_norm nonfinite block_size scale_norm scale_scope master_weights capturable",
    ),
    ZeroOneAdam: ({"sync_policy": EveryStep()}, "params lr sync_policy variance_policy"),
    MarsitSGD: ({}, "params lr momentum local_steps topology full_precision_every global_ratio"),
}


def raised(calls: list[Callable[[Any], object]]) -> list[type | None]:
    """What each of two ranks raises, of which each makes its own call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        group = SimulatedGroup(2, timeout=10.0)
        return group.run(lambda rank, transport: caught(lambda: calls[rank](transport))[0])


@pytest.mark.parametrize("kind", [pytest.param(OneBitAdam, marks=pytest.mark.full), ZeroOneAdam, MarsitSGD])
def test_no_rank_waits_for_one_that_constructs_oddly(kind):
    needed, names = ARGUMENTS[kind]

    def construct(transport: Any, **more: Any) -> object:
        given = {"params": make((30,), (5,)), "lr": 1e-3, "process_group": transport} | needed | more
        return kind(**objects(**given))

    for name in names.split():
        for odd in ODD:
            found = raised([construct, lambda transport, more={name: odd}: construct(transport, **more)])
            assert CollectiveError not in found, (name, odd)
            assert (found[0] is None) == (found[1] is None), (name, odd, found)


GROUPS = [None, 3, {}, {"params": None}, {"params": [1]}, {"params": torch.ones(2, dtype=torch.float64)}, [1]]
GROUPS += [{"params": Parameter(torch.ones(3)), key: value} for key, value in (("lr", "x"), ("betas", 3), ("eps", -1))]


def test_no_rank_waits_for_one_that_adds_an_odd_group():
    def add(transport: Any, group: Any) -> None:
        optimizer = OneBitAdam(make((30,), (5,)), lr=1e-3, freeze_step=3, process_group=transport)
        optimizer.add_param_group(group)

    for odd in GROUPS:
        usual = {"params": Parameter(torch.ones(3))}
        found = raised([lambda transport, group=group: add(transport, group) for group in (usual, odd)])
        assert CollectiveError not in found, odd
        assert None not in found, odd
