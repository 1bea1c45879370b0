"""``torch.compile``: no graph breaks, one graph whatever changes, and the bits of an uncompiled step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from optimizers import EACH, LAMBS, construct
from ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters

FREEZE, STEPS = 30, 300
# Of the other two, LAMB's two kinds without ratios, test_300_... compiles the step.
ADAM_AND_ONEBIT_LAMB = pytest.mark.parametrize(
    "name",
    ["onebit-adam", "onebit-lamb", *(pytest.param(n, marks=pytest.mark.full) for n in ("onebit-lamb-frozen", "lamb"))],
)

pytestmark = pytest.mark.filterwarnings("ignore:.*had no gradient")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    # With trace_autograd_ops Dynamo follows loss.backward().
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def breaks() -> int:
    return sum(counters["graph_break"].values())


class Run:
    """A small network with a layer that is never used, and this rank's data."""

    def __init__(self, name: str, lr: float | Tensor = 1e-2, rank: int = 0, **options) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.unused = nn.Linear(4, 4)
        params = [*self.model.parameters(), *self.unused.parameters()]
        self.optimizer = construct(name, params, lr, freeze_step=FREEZE, **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.data = torch.Generator().manual_seed(rank)

    def step(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, steps: int, step) -> list[Tensor]:
        for _ in range(steps):
            self.optimizer.zero_grad()
            step(torch.randn(16, 8, generator=self.data))
            self.scheduler.step()
        return [p.detach().clone() for p in self.model.parameters()]

    def train_compiled_step(self, steps: int, backend: str = "aot_eager") -> list[Tensor]:
        update = torch.compile(self.optimizer.step, fullgraph=True, backend=backend)

        def step(x: Tensor) -> None:
            self.model(x).square().mean().backward()
            update()

        return self.train(steps, step)


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("onebit-adam", kind) for kind in ("tensor", "float", "capturable")),
        # How lr is given is the frame's; on two ranks test_for_users compiles the step of every optimizer.
        *(pytest.param(n, k, marks=pytest.mark.full) for n in (*LAMBS, "lamb") for k in ("float", "capturable")),
    ],
)
def test_compiled_steps_are_one_graph_and_the_bits_of_eager_ones(name, kind, capsys):
    options = {"capturable": True} if kind == "capturable" else {}

    def lr() -> float | Tensor:
        return torch.tensor(1e-2) if kind == "tensor" else 1e-2

    compiled = Run(name, lr(), **options)
    parameters = compiled.train_compiled_step(STEPS)
    with capsys.disabled():
        print(f"\n{name}, lr {kind}: {graphs()} graphs, {breaks()} breaks in {STEPS} steps (limits 4, 0)", end="")
    assert (graphs(), breaks()) == (1, 0)
    eager = Run(name, lr(), **options)
    assert_equal(parameters, eager.train(STEPS, eager.step))
    stats = compiled.optimizer.stats()
    assert stats == eager.optimizer.stats()
    assert (stats["step"], stats["phase"]) == (STEPS, "uncompressed" if name == "lamb" else "compression")
    last = float(compiled.optimizer.param_groups[0]["lr"])
    assert last < 1e-6


@pytest.mark.long(but=1)
@ADAM_AND_ONEBIT_LAMB
def test_a_whole_training_step_is_one_graph(name):
    compiled, eager = Run(name), Run(name)
    step = torch.compile(compiled.step, fullgraph=True, backend="aot_eager")
    assert_equal(compiled.train(FREEZE + 20, step), eager.train(FREEZE + 20, eager.step))
    assert (graphs(), breaks()) == (1, 0)


@pytest.mark.long
@ADAM_AND_ONEBIT_LAMB
def test_inductor_takes_a_step_without_copying_parameters(name):
    pytest.importorskip("torch._inductor")
    compiled, eager = Run(name), Run(name)
    addresses = [p.data_ptr() for p in compiled.model.parameters()]
    written: list[list[int]] = []
    optimizer = compiled.optimizer
    take = optimizer.take_step

    def watched(grads, params, checked):
        assert checked
        written.append([p.data_ptr() for p in params[: len(addresses)]])
        take(grads, params, checked)

    optimizer.take_step = watched
    parameters = compiled.train_compiled_step(FREEZE + 5, "inductor")
    assert_equal(parameters, eager.train(FREEZE + 5, eager.step))
    assert written == [addresses] * (FREEZE + 5)


def train_ranks(rank: int, world_size: int, name: str, compiled: bool) -> list[Tensor]:
    torch._dynamo.reset()
    run = Run(name, torch.tensor(1e-2), rank)
    if not compiled:
        return run.train(FREEZE + 20, run.step)
    counters.clear()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        parameters = run.train(FREEZE + 20, torch.compile(run.step, fullgraph=True, backend="aot_eager"))
    assert (graphs(), breaks()) == (1, 0)
    return parameters


@pytest.mark.long
@ADAM_AND_ONEBIT_LAMB
def test_whole_compiled_steps_of_ranks_equal_eager_ones(name):
    compiled, eager = (run_ranks(train_ranks, 2, name, way) for way in (True, False))
    for ours, theirs in zip(compiled, eager, strict=True):
        assert_equal(ours, theirs)
    assert_equal(compiled[0], compiled[1])


@pytest.mark.long(but=1)
@EACH
def test_parameters_that_need_copies_are_updated_in_a_graph(name):
    def make() -> tuple[list[nn.Parameter], object]:
        torch.manual_seed(0)
        strided = nn.Parameter(torch.randn(6, 8)[:, ::2])
        half = nn.Parameter(torch.randn(5, 3, dtype=torch.bfloat16))
        params = [strided, half, nn.Parameter(torch.randn(9))]
        return params, construct(name, params, 1e-2, freeze_step=3, guard="off", master_weights=True)

    (ours, compiled), (theirs, eager) = make(), make()
    update = torch.compile(compiled.step, fullgraph=True, backend="aot_eager")
    for i in range(8):
        generator = torch.Generator().manual_seed(i)
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            q.grad = p.grad.clone()
        update()
        eager.step()
    assert_equal([p.detach() for p in ours], [p.detach() for p in theirs])
    assert not torch.equal(ours[0].detach(), make()[0][0].detach())


def test_errors_in_a_compiled_step_are_those_of_an_eager_one():
    run = Run("onebit-adam")
    update = torch.compile(run.optimizer.step, fullgraph=True, backend="aot_eager")
    run.model(torch.ones(2, 8)).sum().backward()
    update()
    run.optimizer.param_groups[0]["eps"] = -1.0
    with pytest.raises(ValueError, match="eps must be a finite number >= 0, got -1"):
        update()
    run.optimizer.param_groups[0]["eps"] = 1e-8
    update()
    assert run.optimizer.stats()["step"] == 2


def test_compiled_steps_raise_if_a_frozen_parameter_now_trains():
    run = Run("onebit-adam")
    still = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = construct("onebit-adam", [*run.model.parameters(), still], 1e-2, freeze_step=9)
    update = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    run.model(torch.ones(2, 8)).sum().backward()
    update()
    still.requires_grad_()
    with pytest.raises(RuntimeError, match="requires gradients now but did not"):
        update()


def test_a_closure_is_compiled_with_the_step():
    run = Run("onebit-adam")

    def closure() -> Tensor:
        loss = run.model(torch.ones(2, 8)).square().sum()
        loss.backward()
        return loss.detach()

    update = torch.compile(run.optimizer.step, fullgraph=True, backend="aot_eager")
    first = float(update(closure))
    for _ in range(10):
        run.optimizer.zero_grad()
        last = float(update(closure))
    assert last < first


@EACH
def test_schedulers_see_steps_that_they_have_not_wrapped(name):
    run = Run(name)
    assert "step" not in vars(run.optimizer)  # compilers refuse a scheduler's wrapper
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train(1, run.step)
    other = Run(name)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        other.scheduler.step()
