"""Our optimizers, and two of torch's as controls, as the machinery has them by which torch tests its own; and problems.

Each of ours has an entry per stage: in "warm-up" nothing is compressed in any test, in "bits" from the third step on.
"""

from __future__ import annotations

import copy
import importlib
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from optimizers import objects
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

from fusedonebit import AdamW, Lamb, MarsitAdam, MarsitSGD, Numerics, OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam
from fusedonebit.optim.policies import DoublingVariance, EveryStep

LATE = {"freeze_step": 10_000}
EARLY = {"freeze_step": 2, "guard": "off"}
RENEWS = {"variance_policy": DoublingVariance(10_000), "sync_policy": EveryStep()}
SENDS = {"variance_policy": DoublingVariance(1), "sync_policy": EveryStep()}

STAGES: dict[str, tuple[type, dict[str, Any]]] = {
    "OneBitAdam, warm-up": (OneBitAdam, LATE),
    "OneBitAdam, bits": (OneBitAdam, EARLY),
    "OneBitLamb, warm-up": (OneBitLamb, LATE),
    "OneBitLamb, bits": (OneBitLamb, EARLY),
    "AdamW, ours": (AdamW, {}),
    "Lamb": (Lamb, {}),
    "ZeroOneAdam, warm-up": (ZeroOneAdam, RENEWS),
    "ZeroOneAdam, bits": (ZeroOneAdam, SENDS),
    "MarsitSGD, warm-up": (MarsitSGD, {"full_precision_every": 1}),
    "MarsitSGD, bits": (MarsitSGD, {"momentum": 0.9, "full_precision_every": 0}),
    "MarsitAdam, warm-up": (MarsitAdam, {"full_precision_every": 1}),
    "MarsitAdam, bits": (MarsitAdam, {"full_precision_every": 0}),
    "OneBitLion, bits": (OneBitLion, {"lr": 1e-3}),  # of its own 1e-4 bfloat16 loses most
}
CONTROLS = ("AdamW", "SGD")
NAMES = (*STAGES, *CONTROLS)

OWN_WORDS = {
    "params argument given to the optimizer should be an iterable of Tensors or dicts": "params must be an iterable of",
    "Tensor lr must be 1-element": "lr must be a number or a tensor of one element",
}
"""What ours say for what torch says of the same mistake; for all others it is torch's text."""


@cache
def machinery() -> Any:
    """``torch.testing._internal.common_optimizers``; skips the test where it is not installed or has changed."""
    name = "torch.testing._internal.common_optimizers"
    missing = "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None
    if missing:  # torch's test cases derive from its class; nothing that is used here does
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    try:
        found = importlib.import_module(name)
        _ = found.OptimizerInfo, found.OptimizerInput, found.ErrorOptimizerInput, found.get_error_inputs_for_all_optims
    except (ImportError, AttributeError) as error:
        pytest.skip(f"{name}, by which torch tests its optimizers, can't be had here: {error}")
    finally:
        if missing:
            del sys.modules["expecttest"]
        # Importing torch's test utilities forbids everybody to set flags of torch.backends.
        vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
    return found


def info(name: str) -> Any:
    """The ``OptimizerInfo`` of this name."""
    if name in CONTROLS:
        return next(each for each in machinery().optim_db if each.optim_cls.__name__ == name)
    kind, options = STAGES[name]
    return machinery().OptimizerInfo(
        kind,
        optim_inputs_func=lambda device, dtype=None: inputs(kind, options, dtype),
        optim_error_inputs_func=lambda device, dtype: error_inputs(kind, options, device, dtype),
        scheduler_inputs=machinery().OptimizerInfo.__init__.__kwdefaults__["scheduler_inputs"],
        supported_impls=(),
        not_og_supported_flags=("maximize",),
        supports_complex=False,
        supports_multiple_devices=False,
    )


def inputs(kind: type, options: dict[str, Any], dtype: torch.dtype | None) -> list[Any]:
    """Hyper-parameters to construct it with; a quick run takes the first."""
    momenta: dict[str, Any] = {"momentum": 0.5} if kind is MarsitSGD else {"betas": (0.8, 0.9)}
    as_tensors = {
        key: tuple(map(torch.tensor, value)) if isinstance(value, tuple) else torch.tensor(value)
        for key, value in momenta.items()
    }
    found: list[tuple[str, dict[str, Any]]] = [
        ("default", {}),
        (
            "tensors, weight decay, maximize",
            {"lr": torch.tensor(0.01), **as_tensors, "weight_decay": torch.tensor(0.1), "maximize": True},
        ),
        ("non-default lr", {"lr": 0.01}),
        ("nonzero weight decay", {"weight_decay": 0.1}),
        ("maximize", {"maximize": True}),
        ("betas or momentum", momenta),
        ("tensor lr", {"lr": torch.tensor(0.01)}),
        ("clipped", {"max_grad_norm": 1.0}),
        ("small blocks", {"block_size": 128}),
    ]
    if dtype is torch.bfloat16:
        found.append(("master weights", {"master_weights": True}))
        if kind is not ZeroOneAdam:
            found.append(("stochastic rounding", {"stochastic_rounding": True}))
    if kind in (OneBitAdam, OneBitLamb):
        found.append(("ternary", {"ternary": True}))
        plain = {"precondition": False, "scale_scope": "global", "scale_norm": "l1", "variance_floor": 0.0}
        found.append(("the paper's", plain))
    if kind in (OneBitAdam, OneBitLamb, ZeroOneAdam, MarsitAdam):
        found.append(("no bias correction", {"bias_correction": False}))
    if kind is OneBitAdam:
        found.append(("overlap", {"overlap": True}))
        found.append(("half a variance", {"freeze_step": 3, "frozen_dtype": torch.bfloat16}))
    if kind is OneBitLion:
        found.append(("mean", {"aggregation": "mean"}))
    made = machinery().OptimizerInput
    return [made(params=None, kwargs=objects(**{**options, **kwargs}), desc=desc) for desc, kwargs in found]


def error_inputs(kind: type, options: dict[str, Any], device: str, dtype: torch.dtype) -> list[Any]:
    """Torch's mistakes that hold for all optimizers, and hyper-parameters that make no sense."""
    found = machinery().get_error_inputs_for_all_optims(device, dtype)
    for each in found:
        each.error_regex = OWN_WORDS.get(each.error_regex, each.error_regex)
        each.optimizer_error_input.kwargs = objects(**{**options, **each.optimizer_error_input.kwargs})
    bad: list[tuple[dict[str, Any], str]] = [
        ({"lr": -1.0}, "lr must be a finite number >= 0, got -1"),
        ({"weight_decay": -1}, "weight_decay must be a finite number >= 0, got -1"),
        ({"maximize": None}, "maximize must be True or False, got None"),
    ]
    if kind is MarsitSGD:
        bad.append(({"momentum": 1.0}, r"momentum must be a number in \[0, 1\), got 1"))
    else:
        bad.append(({"betas": (1.0, 0.0)}, r"betas must be two numbers in \[0, 1\), got \(1.0, 0.0\)"))
    for kwargs, text in bad:
        given = machinery().OptimizerInput(params=None, kwargs=objects(**{**options, **kwargs}), desc=text)
        found.append(machinery().ErrorOptimizerInput(given, error_type=ValueError, error_regex=text))
    return found


def constructors(name: str, dtype: torch.dtype, everything: bool) -> list[tuple[str, Callable[..., Any], dict]]:
    """Of each way to construct the optimizer its description, the class, and its keywords."""
    entry = info(name)
    found = [(each.desc, entry.optim_cls, each.kwargs) for each in entry.optim_inputs_func("cpu", dtype)]
    return found if everything else found[:1]


OURS = tuple(STAGES)

QUICK = {"OneBitAdam, warm-up", "Lamb", "AdamW", *(name for name in OURS if name.endswith("bits"))}
PARAMS = {name: name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in NAMES}
EACH = pytest.mark.parametrize("name", PARAMS.values())
EACH_OF_OURS = pytest.mark.parametrize("name", [PARAMS[name] for name in OURS])
EACH_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=["float32", "bfloat16"]
)


def ways(name: str, dtype: torch.dtype, everything: bool) -> Iterator[Callable[..., Any]]:
    """Yield ways to construct an optimizer: the first, or all of them where ``everything``."""
    for desc, kind, kwargs in constructors(name, dtype, everything):

        def make(params: Any, _kind: Any = kind, _kwargs: dict = kwargs, **more: Any) -> Any:
            return _kind(params, **{**copy.deepcopy(_kwargs), **more})

        ascends = kwargs.get("maximize", False) or kwargs.get("numerics", Numerics()).maximize
        make.desc, make.maximize = desc, ascends  # type: ignore[attr-defined]
        yield make


class Problem:
    """A small regression: what torch's tests train."""

    def __init__(self, dtype: torch.dtype = torch.float32, contiguous: bool = True) -> None:
        torch.manual_seed(3)
        if contiguous:
            self.weight, self.bias = Parameter(torch.randn(10, 5, dtype=dtype)), Parameter(torch.randn(10, dtype=dtype))
        else:
            self.weight = Parameter(torch.randn(10, 5, 2, dtype=dtype)[..., 0])
            self.bias = Parameter(torch.randn(10, 2, dtype=dtype)[..., 0])
        self.given = torch.randn(5, dtype=dtype)
        self.params = [self.weight, self.bias]

    def loss(self) -> Tensor:
        return (self.weight.float().mv(self.given.float()) + self.bias.float()).square().sum()

    def closure(self) -> Tensor:
        for p in self.params:
            p.grad = None
        loss = self.loss()
        loss.backward()
        return loss

    def train(self, optimizer: Any, steps: int) -> list[Tensor]:
        for _ in range(steps):
            self.closure()
            optimizer.step()
        return [p.detach().clone() for p in self.params]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def goes_right(problem: Problem, optimizer: Any, make: Any, schedulers: Any = ()) -> None:
    first = problem.loss().item()
    for _ in range(20):
        optimizer.step(problem.closure)
        for scheduler in schedulers:
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(problem.loss().item())
            else:
                scheduler.step()
    last = problem.loss().item()
    assert (last > first) if make.maximize else (last < first), (make.desc, first, last)
