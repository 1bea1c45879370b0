"""What torch asks of its own optimizers' hooks, closures, ``state_dict`` and copies holds for ours."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch_problems import CONTROLS, EACH, EACH_DTYPE, Problem, equal, info, ways

pytestmark = pytest.mark.filterwarnings("ignore:after so few updates", "ignore:an average coefficient")


@pytest.fixture
def each(request: pytest.FixtureRequest) -> Callable[..., Iterator[Callable[..., Any]]]:
    return partial(ways, everything=request.config.getoption("--full"))


def started(make: Callable[..., Any], steps: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Problem, Any]:
    """Return a problem and its optimizer after so many steps."""
    problem = Problem(dtype)
    optimizer = make(problem.params)
    problem.train(optimizer, steps)
    return problem, optimizer


# ---------------------------------------------------------------- hooks of the step, closures, looks


@EACH
def test_step_hooks_run_in_order_and_can_be_removed(name, each):
    for make in each(name, torch.float32):
        problem, optimizer = started(make, 0)
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
        (problem, optimizer), plain = started(make, 0), Problem()
        closure = problem.closure
        optimizer.register_step_pre_hook(lambda o, args, kwargs, closure=closure: ((args[0], closure), kwargs))
        for _ in range(4):
            assert optimizer.step(lambda: None) is not None
        assert equal(problem.params, plain.train(make(plain.params), 4))


@pytest.mark.filterwarnings("ignore:step.. found no gradient")
@EACH
def test_a_closure_runs_with_gradients_and_its_loss_is_returned(name, each):
    for make in each(name, torch.float32):
        (problem, optimizer), plain = started(make, 0), Problem()
        for _ in range(4):
            with torch.no_grad():
                loss = optimizer.step(problem.closure)
            assert loss.requires_grad
        assert equal(problem.params, plain.train(make(plain.params), 4))
        assert make(Problem().params).step() is None


@EACH
def test_it_can_be_printed_and_has_state(name, each):
    for make in each(name, torch.float32):
        problem, optimizer = started(make, 3)
        assert re.search(rf"(?s){type(optimizer).__name__} \(.*Parameter Group 0.*lr: ", repr(optimizer))
        if name != "SGD":  # without momentum it has none
            assert all(optimizer.state[p] for p in problem.params)


@EACH
def test_profilers_see_the_step_by_its_name(name, each):
    for make in each(name, torch.float32):
        problem, optimizer = started(make, 0)
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
        problem, optimizer = started(make, 5, dtype)
        other = copy.deepcopy(problem)
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
        _, optimizer = started(make)
        saved, kept = (copy.deepcopy(optimizer.state_dict()) for _ in range(2))
        other, resumed = started(make, 0)
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
        problem, optimizer = started(make)
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
        problem, optimizer = started(make, 4, dtype)
        other, copied = way((problem, optimizer))
        public = [{key for key in vars(o) if not key.startswith("_")} for o in (optimizer, copied)]
        assert public[0] == public[1]
        assert equal(other.train(copied, 3), problem.train(optimizer, 3)), make.desc


@EACH
def test_nothing_holds_an_optimizer_that_is_given_up(name, each):
    for make in each(name, torch.float32):
        problem, optimizer = started(make)
        gc.disable()
        try:
            gone = weakref.ref(optimizer), weakref.ref(optimizer.state[problem.weight].get("step", problem.weight))
            del optimizer
            assert gone[0]() is None
            assert gone[1]() in (None, problem.weight)
        finally:
            gc.enable()
