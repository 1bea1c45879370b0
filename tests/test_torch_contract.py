"""What torch asks of its own optimizers holds for ours, in both stages, in float32 and bfloat16; AdamW and SGD as well.

The machinery, ``OptimizerInfo`` and its inputs, is torch's; so are the promises. ``REFUSED`` lists what ours do not do.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch_infos import CONTROLS, NAMES, STAGES, constructors, info, machinery

from fusedonebit import Numerics

OURS = tuple(STAGES)

REFUSED: dict[str, tuple[str, type[Exception] | None, str]] = {
    "float64 parameters": ("state and arithmetic are float32", TypeError, "must be float32, bfloat16 or float16"),
    "complex parameters": ("a sign is one of two, a phase is not", TypeError, "must be float32, bfloat16 or float16"),
    "sparse gradients": ("every element is sent", TypeError, "must be dense, got layout torch.sparse_coo"),
    "foreach=": ("a step is one launch for all tensors anyhow", TypeError, "unexpected keyword argument 'foreach'"),
    "fused=": ("it is", TypeError, "unexpected keyword argument 'fused'"),
    "differentiable=": ("no gradient of a sign", TypeError, "unexpected keyword argument 'differentiable'"),
    "copy.copy": ("two optimizers would move the same parameters", TypeError, "use copy.deepcopy"),
    "parameters cast after construction": ("buffers fit what was given", RuntimeError, "construct the optimizer"),
    "parameters frozen after construction": ("ranks would part", RuntimeError, "no longer requires gradients"),
    "parameters on the meta device": ("they have no memory", ValueError, "materialise the model first"),
}
"""What torch's optimizers take and ours refuse: why, and with what error."""

NOT_STILL = {"MarsitSGD, bits", "MarsitAdam, bits", "OneBitLion, bits"}
"""Those that move a fresh parameter whose gradient is all zeros: a bit has no zero, its sign is a step all the same."""

ONLY_IN_THE_WARM_UP = {"OneBitAdam, bits", "OneBitLamb, bits", "ZeroOneAdam, bits", "OneBitLion, bits"}
"""Those that take no further group once they send bits: the layout is fixed, there is no variance of the new ones."""

QUICK = {"OneBitAdam, warm-up", "Lamb", "AdamW", *(name for name in OURS if name.endswith("bits"))}
PARAMS = {name: name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in NAMES}
EACH = pytest.mark.parametrize("name", PARAMS.values())
EACH_OF_OURS = pytest.mark.parametrize("name", [PARAMS[name] for name in OURS])
EACH_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=["float32", "bfloat16"]
)
pytestmark = pytest.mark.filterwarnings("ignore:after so few updates", "ignore:an average coefficient")

HELD: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _count() -> Iterator[None]:
    yield
    print(f"\nof torch's promises {HELD['held']} held, {HELD['refused']} refused as listed, in this process")


@pytest.fixture
def each(request: pytest.FixtureRequest) -> Callable[..., Iterator[Callable[..., Any]]]:
    """Ways to construct an optimizer: the first, or all of them where ``--full`` was asked for."""

    everything = request.config.getoption("--full")

    def ways(name: str, dtype: torch.dtype) -> Iterator[Callable[..., Any]]:
        for desc, kind, kwargs in constructors(name, dtype, everything):

            def make(params: Any, _kind: Any = kind, _kwargs: dict = kwargs, **more: Any) -> Any:
                return _kind(params, **{**copy.deepcopy(_kwargs), **more})

            ascends = kwargs.get("maximize", False) or kwargs.get("numerics", Numerics()).maximize
            make.desc, make.maximize = desc, ascends  # type: ignore[attr-defined]
            yield make
            HELD["held"] += 1

    return ways


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
def test_a_gradient_of_zeros_leaves_a_fresh_parameter_where_it_is(name, dtype, each):
    for make in each(name, dtype):
        p = Parameter(torch.randn(5, dtype=dtype))
        p.grad = torch.zeros_like(p)
        before = p.detach().clone()
        make([p], lr=0.1, weight_decay=0.0).step()
        assert torch.equal(p, before) is (name not in NOT_STILL)
        HELD["refused"] += name in NOT_STILL


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


# ---------------------------------------------------------------- hooks of the step, closures, looks


@EACH
def test_step_hooks_run_in_order_and_can_be_removed(name, each):
    for make in each(name, torch.float32):
        problem = Problem()
        optimizer = make(problem.params)
        calls: list[Any] = []

        def note(what: str, calls: list = calls) -> Callable[..., None]:
            return lambda opt, args, kwargs: calls.append((what, opt))

        handles = [
            register_optimizer_step_pre_hook(note("all before")),
            register_optimizer_step_post_hook(note("all after")),
            optimizer.register_step_pre_hook(note("before")),
            optimizer.register_step_post_hook(note("after")),
        ]
        try:
            problem.train(optimizer, 1)
        finally:
            for handle in handles:
                handle.remove()
        problem.train(optimizer, 3)
        assert calls == [(what, optimizer) for what in ("all before", "before", "after", "all after")]


@EACH
def test_a_step_pre_hook_may_change_gradients_and_arguments(name, each):
    for make in each(name, torch.float32):
        problem, plain = Problem(), Problem()
        optimizer = make(problem.params)
        closure = problem.closure
        optimizer.register_step_pre_hook(lambda o, args, kwargs, closure=closure: ((args[0], closure), kwargs))
        for _ in range(4):
            assert optimizer.step(lambda: None) is not None
        assert equal(problem.params, plain.train(make(plain.params), 4))


@EACH
def test_a_closure_is_called_with_gradients_on_and_its_loss_returned(name, each):
    for make in each(name, torch.float32):
        problem, plain = Problem(), Problem()
        optimizer = make(problem.params)
        for _ in range(4):
            with torch.no_grad():
                loss = optimizer.step(problem.closure)
            assert loss.requires_grad
        assert equal(problem.params, plain.train(make(plain.params), 4))
        assert make(Problem().params).step() is None


@EACH
def test_it_can_be_printed_and_has_state(name, each):
    for make in each(name, torch.float32):
        problem = Problem()
        optimizer = make(problem.params)
        problem.train(optimizer, 3)
        assert re.search(rf"(?s){type(optimizer).__name__} \(.*Parameter Group 0.*lr: ", repr(optimizer))
        if name != "SGD":  # without momentum it has none
            assert all(optimizer.state[p] for p in problem.params)


@EACH
def test_profilers_see_the_step_by_its_name(name, each):
    for make in each(name, torch.float32):
        problem = Problem()
        optimizer = make(problem.params)
        problem.closure()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.step()
        kind = type(optimizer).__name__
        assert f"Optimizer.step#{kind}.step" in {event.name for event in profile.events()}


# ---------------------------------------------------------------- state_dict and copies


@pytest.mark.long(but=6)
@EACH_DTYPE
@EACH
def test_a_restored_run_goes_on_bit_for_bit(name, dtype, each):
    for make in each(name, dtype):
        problem, other = Problem(dtype), Problem(dtype)
        optimizer = make(problem.params)
        for p, now in zip(other.params, problem.train(optimizer, 5), strict=True):
            p.data.copy_(now)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        resumed = make(other.params)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert equal(other.train(resumed, 4), problem.train(optimizer, 4)), make.desc
        assert resumed.state_dict()["param_groups"][0].keys() == optimizer.state_dict()["param_groups"][0].keys()


@EACH
def test_loading_leaves_the_given_dict_as_it_is(name, each):
    for make in each(name, torch.float32):
        problem = Problem()
        optimizer = make(problem.params)
        problem.train(optimizer, 4)
        saved = copy.deepcopy(optimizer.state_dict())
        kept = copy.deepcopy(saved)
        other = Problem()
        resumed = make(other.params)
        resumed.load_state_dict(saved)
        other.train(resumed, 2)
        assert saved.keys() == kept.keys()
        for key, state in kept["state"].items():
            for at, value in state.items():
                same = torch.equal(saved["state"][key][at], value) if isinstance(value, Tensor) else True
                # torch's own steps, kept by reference, count on; ours are copies
                assert same or name in CONTROLS


@EACH
def test_older_and_foreign_forms_of_a_state_dict_load(name, each):
    for make in each(name, torch.float32):
        problem = Problem()
        optimizer = make(problem.params)
        problem.train(optimizer, 4)
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            if "step" in state:
                state["step"] = float(state["step"])
        for flag in info(name).not_og_supported_flags:
            for group in saved["param_groups"]:
                group.pop(flag, None)
        resumed = make(problem.params)
        resumed.load_state_dict(saved)
        problem.train(resumed, 2)


@pytest.mark.long(but=9)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@EACH_DTYPE
@EACH
def test_copies_have_all_public_attributes_and_go_on_alike(name, dtype, way, each):
    for make in each(name, dtype):
        problem = Problem(dtype)
        optimizer = make(problem.params)
        problem.train(optimizer, 4)
        other, copied = way((problem, optimizer))
        public = [{key for key in vars(o) if not key.startswith("_")} for o in (optimizer, copied)]
        assert public[0] == public[1]
        assert equal(other.train(copied, 3), problem.train(optimizer, 3)), make.desc


@EACH
def test_nothing_holds_an_optimizer_that_is_given_up(name, each):
    for make in each(name, torch.float32):
        problem = Problem()
        optimizer = make(problem.params)
        problem.train(optimizer, 4)
        gc.disable()
        try:
            gone = weakref.ref(optimizer), weakref.ref(optimizer.state[problem.weight].get("step", problem.weight))
            del optimizer
            assert gone[0]() is None
            assert gone[1]() in (None, problem.weight)
        finally:
            gc.enable()


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
            with pytest.raises(RuntimeError, match="add_param_group must be called before"):
                optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})
            HELD["refused"] += 1


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
        HELD["held"] += 1


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


def frozen_after_construction(make: Any) -> None:
    problem = Problem()
    optimizer = make(problem.params)
    problem.bias.requires_grad_(False)
    problem.closure()
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
    "parameters frozen after construction": frozen_after_construction,
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
        HELD["held"] -= 1
        HELD["refused"] += 1


def test_the_list_of_refusals_is_complete():
    assert REFUSALS.keys() == REFUSED.keys()
    assert set(NAMES) >= NOT_STILL | ONLY_IN_THE_WARM_UP
    assert machinery().OptimizerInfo
