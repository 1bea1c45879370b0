"""What torch asks of its own optimizers holds for ours, in both stages, in float32 and bfloat16; AdamW and SGD as well.

The machinery, ``OptimizerInfo`` and its inputs, is torch's; so are the promises. ``REFUSED`` lists what ours do not do.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import lr_scheduler
from torch_problems import (
    CONTROLS,
    EACH,
    EACH_DTYPE,
    EACH_OF_OURS,
    NAMES,
    Problem,
    equal,
    goes_right,
    info,
    machinery,
    ways,
)

REFUSED: dict[str, tuple[str, type[Exception] | None, str]] = {
    "float64 parameters": ("state and arithmetic are float32", TypeError, "must be float32, bfloat16 or float16"),
    "complex parameters": ("a sign is one of two, a phase is not", TypeError, "must be float32, bfloat16 or float16"),
    "sparse gradients": ("every element is sent", TypeError, "must be dense, got layout torch.sparse_coo"),
    "foreach=": ("a step is one launch for all tensors anyhow", TypeError, "unexpected keyword argument 'foreach'"),
    "fused=": ("it is", TypeError, "unexpected keyword argument 'fused'"),
    "differentiable=": ("no gradient of a sign", TypeError, "unexpected keyword argument 'differentiable'"),
    "copy.copy": ("two optimizers would move the same parameters", TypeError, "use copy.deepcopy"),
    "parameters cast after construction": ("buffers fit what was given", RuntimeError, "construct the optimizer"),
    "parameters on the meta device": ("they have no memory", ValueError, "materialise the model first"),
}
"""What torch's optimizers take and ours refuse: why, and with what error."""

NOT_STILL = {"MarsitSGD, bits", "MarsitAdam, bits", "OneBitLion, bits"}
"""Those that move a fresh parameter whose gradient is all zeros: a bit has no zero, its sign is a step all the same."""

ONLY_IN_THE_WARM_UP = {"OneBitAdam, bits", "OneBitLamb, bits", "ZeroOneAdam, bits", "OneBitLion, bits"}
"""Those that take no further group once they send bits: the layout is fixed, there is no variance of the new ones."""

pytestmark = pytest.mark.filterwarnings(
    *("ignore:after so few updates", "ignore:an average coefficient", "ignore:step.. found no gradient")
)


@pytest.fixture
def each(request: pytest.FixtureRequest) -> Callable[..., Iterator[Callable[..., Any]]]:
    return partial(ways, everything=request.config.getoption("--full"))


# ---------------------------------------------------------------- training


@pytest.mark.long(but=6)
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@EACH_DTYPE
@EACH
def test_goes_in_the_right_direction(name, dtype, contiguous, each):
    for make in each(name, dtype):
        problem = Problem(dtype, contiguous)
        goes_right(problem, make(problem.params), make)


@pytest.mark.long(but=7)
@EACH_DTYPE
@EACH
def test_goes_in_the_right_direction_with_torchs_schedulers(name, dtype, each):
    for make in each(name, dtype):
        for chosen in info(name).scheduler_inputs:
            problem = Problem(dtype)
            optimizer = make(problem.params)
            goes_right(problem, optimizer, make, [schedule(optimizer) for schedule in chosen])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=30, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.02, step_size_up=5, cycle_momentum=False),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 6),
    "warm-up, then decay": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.LambdaLR(o, lambda n: 0.95**n)]
    ),
}


@pytest.mark.long(but=7)
@pytest.mark.parametrize(
    "schedule", ["cosine", *(pytest.param(s, marks=pytest.mark.full) for s in SCHEDULES if s != "cosine")]
)
@EACH
def test_schedules_set_the_learning_rate_of_each_step(name, schedule, each):
    for make in each(name, torch.float32):
        problem, other = Problem(), Problem()
        optimizer, plain = make(problem.params), make(other.params)
        scheduler = SCHEDULES[schedule](optimizer)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Detected call of")  # scheduler.step() before optimizer.step()
            for _ in range(12):
                for group in plain.param_groups:
                    group["lr"] = float(optimizer.param_groups[0]["lr"])
                optimizer.step(problem.closure)
                plain.step(other.closure)
                assert equal(problem.params, other.params)
                scheduler.step()


@EACH_DTYPE
@EACH
def test_groups_have_learning_rates_of_their_own(name, dtype, each):
    for make in each(name, dtype):
        problem = Problem(dtype)
        optimizer = make([{"params": [problem.weight], "lr": 0.01}, {"params": [problem.bias], "lr": 0.0}])
        bias = problem.bias.detach().clone()
        goes_right(problem, optimizer, make)
        assert torch.equal(problem.bias, bias)


@EACH_DTYPE
@EACH
def test_groups_have_weight_decay_of_their_own(name, dtype, each):
    for make in each(name, dtype):
        ends = []
        for decay in (0.0, 5.0):
            problem = Problem(dtype)
            groups = [
                {"params": [problem.weight], "weight_decay": 0.0},
                {"params": [problem.bias], "weight_decay": decay},
            ]
            optimizer = make(groups, lr=0.01)
            for _ in range(6):
                problem.weight.grad = torch.ones_like(problem.weight)
                problem.bias.grad = torch.ones_like(problem.bias)
                optimizer.step()
            ends.append([problem.weight.detach().float(), problem.bias.detach().float().norm()])
        torch.testing.assert_close(ends[0][0], ends[1][0], rtol=0.05, atol=0.02)
        assert ends[1][1] < ends[0][1], make.desc


@EACH
def test_a_tensor_learning_rate_does_what_a_number_does(name, each):
    for make in each(name, torch.float32):
        number, tensor = Problem(), Problem()
        moved = number.train(make(number.params, lr=0.0625), 5)
        lr = torch.tensor(0.0625)
        limits = {"rtol": 1e-6, "atol": 1e-6} if name in CONTROLS else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(tensor.train(make(tensor.params, lr=lr), 5), moved, **limits)
        assert lr == 0.0625


@pytest.mark.long(but=7)
@EACH
def test_parameters_of_several_dtypes_train_together(name, each):
    for make in each(name, torch.bfloat16):
        problem = Problem(torch.bfloat16)
        problem.bias = Parameter(problem.bias.detach().float())
        problem.params = [problem.weight, problem.bias]
        goes_right(problem, make(problem.params), make)


@EACH
def test_named_parameters_keep_their_names(name, each):
    for make in each(name, torch.float32):
        problem, plain = Problem(), Problem()
        optimizer = make([("w", problem.weight), ("b", problem.bias)])
        assert optimizer.param_groups[0]["param_names"] == ["w", "b"]
        assert equal(problem.train(optimizer, 4), plain.train(make(plain.params), 4))
        saved = copy.deepcopy(optimizer.state_dict())
        assert saved["param_groups"][0]["param_names"] == ["w", "b"]
        other = make(Problem().params)
        other.load_state_dict(saved)
        assert other.param_groups[0]["param_names"] == ["w", "b"]
        optimizer.load_state_dict(plain_state(make, plain))
        assert optimizer.param_groups[0]["param_names"] == ["w", "b"]


def plain_state(make: Any, problem: Problem) -> dict:
    optimizer = make(problem.params)
    problem.train(optimizer, 3)
    return copy.deepcopy(optimizer.state_dict())


# ---------------------------------------------------------------- gradients that are none, or nothing


@EACH_DTYPE
@EACH
def test_a_step_without_gradients_does_nothing(name, dtype, each):
    for make in each(name, dtype):
        problem = Problem(dtype)
        before = [p.detach().clone() for p in problem.params]
        optimizer = make(problem.params, weight_decay=0.1)
        optimizer.step()
        assert equal(problem.params, before), make.desc
        before = problem.train(optimizer, 4)
        optimizer.zero_grad()
        optimizer.step()
        assert equal(problem.params, before), make.desc


@EACH_DTYPE
@EACH
def test_a_parameter_without_a_gradient_stays_while_others_move(name, dtype, each):
    for make in each(name, dtype):
        problem = Problem(dtype)
        optimizer = make(problem.params, weight_decay=0.1)
        before = problem.train(optimizer, 4)
        for _ in range(2):
            optimizer.zero_grad()
            problem.weight.float().mv(problem.given.float()).square().sum().backward()
            optimizer.step()
        assert torch.equal(problem.bias, before[1]), make.desc
        assert not torch.equal(problem.weight, before[0])


@EACH_DTYPE
@EACH
def test_a_gradient_of_zeros_leaves_a_fresh_parameter_in_place(name, dtype, each):
    for make in each(name, dtype):
        p = Parameter(torch.randn(5, dtype=dtype))
        p.grad = torch.zeros_like(p)
        before = p.detach().clone()
        make([p], lr=0.1, weight_decay=0.0).step()
        assert torch.equal(p, before) is (name not in NOT_STILL)


@EACH
def test_zero_grad_forgets_or_zeroes(name, each):
    for make in each(name, torch.float32):
        problem = Problem()
        optimizer = make(problem.params)
        problem.closure()
        optimizer.zero_grad(set_to_none=False)
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in problem.params)
        optimizer.zero_grad()
        assert all(p.grad is None for p in problem.params)


@pytest.mark.long(but=5)
@EACH
def test_empty_tensors_train_along(name, each):
    for make in each(name, torch.float32):
        problem = Problem()
        empty = Parameter(torch.zeros(0, 3))
        empty.grad = torch.zeros_like(empty)
        goes_right(problem, make([*problem.params, empty]), make)


# ---------------------------------------------------------------- groups and mistakes


@pytest.mark.long(but=5)
@EACH
def test_groups_can_be_added(name, each):
    for make in each(name, torch.float32):
        problem = Problem()
        optimizer = make([problem.weight])
        optimizer.add_param_group({"params": problem.bias, "lr": 0.005})
        goes_right(problem, optimizer, make)
        if name in ONLY_IN_THE_WARM_UP:
            with pytest.raises(RuntimeError, match=r"add_param_group must be called (before|in the warm-up)"):
                optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})


@EACH_DTYPE
@EACH
def test_mistakes_are_errors(name, dtype):
    wrong = info(name).optim_error_inputs_func("cpu", dtype)
    assert len(wrong) >= 7
    for mistake in wrong:
        given, kind = mistake.optimizer_error_input, info(name).optim_cls
        params = [Parameter(torch.randn(1))] if given.params is None else given.params
        expects = pytest.warns if issubclass(mistake.error_type, Warning) else pytest.raises
        with expects(mistake.error_type, match=mistake.error_regex):
            kind(params, **given.kwargs)


@EACH_OF_OURS
def test_an_empty_list_is_an_error(name, each):
    for make in each(name, torch.float32):
        with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
            make([])


# ---------------------------------------------------------------- what is refused


def cast_after_construction(make: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    model.to(torch.bfloat16)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()


def sparse_gradients(make: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = make(table.parameters())
    table(torch.tensor([1])).sum().backward()
    optimizer.step()


REFUSALS: dict[str, Callable[[Any], Any]] = {
    "float64 parameters": lambda make: make([Parameter(torch.ones(2, dtype=torch.float64))]),
    "complex parameters": lambda make: make([Parameter(torch.ones(2, dtype=torch.complex64))]),
    "sparse gradients": sparse_gradients,
    "foreach=": lambda make: make(Problem().params, foreach=True),
    "fused=": lambda make: make(Problem().params, fused=True),
    "differentiable=": lambda make: make(Problem().params, differentiable=True),
    "copy.copy": lambda make: copy.copy(make(Problem().params)),
    "parameters cast after construction": cast_after_construction,
    "parameters on the meta device": lambda make: make([Parameter(torch.ones(2, device="meta"))]),
}


@pytest.mark.long(but=26)
@pytest.mark.parametrize("what", REFUSED)
@EACH_OF_OURS
def test_what_is_refused_says_so(name, what, each):
    _, error, text = REFUSED[what]
    for make in each(name, torch.float32):
        with pytest.raises(error, match=text):
            REFUSALS[what](make)


def test_the_list_of_refusals_is_complete():
    assert REFUSALS.keys() == REFUSED.keys()
    assert set(NAMES) >= NOT_STILL | ONLY_IN_THE_WARM_UP
    assert machinery().OptimizerInfo
