"""``Wire(release_gradients=True)``: the same steps, bit for bit, of which gradients live only while they are used."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from adamw_runs import gradients
from optimizers import MAKE, objects
from ranks import run_ranks
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fusedonebit import AdamW, FusedOneBitWarning, amp
from fusedonebit.triton_kernels.op import launches

BF16 = torch.bfloat16
SHAPES = ((7,), (33, 40), (), (1, 3), (6, 5, 4, 3), (5, 300), (0,), (70, 3), (2000,))
STEPS = 6


def parameters(dtype: torch.dtype = BF16, other: torch.dtype | None = None) -> list[nn.Parameter]:
    """Of two dtypes if there is an ``other``; one channels last, one a strided view."""
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=draw) for shape in SHAPES]
    made[4] = made[4].contiguous(memory_format=torch.channels_last)
    given = [p.to((dtype, other or dtype)[i % 2]) for i, p in enumerate(made)]
    given[7] = given[7].repeat_interleave(2, 1)[:, ::2]
    return [nn.Parameter(p) for p in given]


def some_gradients(params: list[nn.Parameter], step: int) -> list[Tensor | None]:
    gradients(params, step)
    found = [p.grad for p in params]
    for p in params:
        p.grad = None
    return found


def pull(params: list[nn.Parameter], grads: list[Tensor | None]) -> None:
    """A backward pass that makes these gradients."""
    sum((p * g).sum() for p, g in zip(params, grads, strict=True) if g is not None).backward()


def build(release: bool, params: list[nn.Parameter], **options: Any) -> AdamW:
    groups = [{"params": params[:2], "lr": 3e-2, "weight_decay": 0.1}, {"params": params[2:], "betas": (0.8, 0.99)}]
    return AdamW(groups, 1e-2, **objects(release_gradients=release, **options))


def state(optimizer: AdamW, params: list[nn.Parameter]) -> list[Tensor]:
    saved = optimizer.state_dict()["state"]
    return [*(p.detach().float() for p in params), *(saved[i][n] for i in saved for n in sorted(saved[i]))]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# ---------------------------------------------------------------- what it computes

EACH_KIND = pytest.mark.parametrize(
    ("dtypes", "options"),
    [
        ((torch.float32,), {}),
        ((BF16,), {}),
        ((BF16,), {"state": "bf16", "stochastic_rounding": True}),
        ((BF16, torch.float32), {"state": "8bit", "master_weights": "8bit"}),
        ((BF16,), {"state": "8bit", "master_weights": "16bit"}),
        ((BF16,), {"master_weights": True}),
    ],
    ids=["float32", "bf16", "few bits", "8bit, mixed", "16bit", "copies"],
)


@EACH_KIND
@pytest.mark.parametrize("masked", [False, True])
def test_a_step_is_the_same_bit_for_bit(dtypes, options, masked):
    ends, counted = [], []
    for release in (False, True):
        params = parameters(*dtypes)
        mask = {"mask": {params[1]: torch.arange(33 * 40).view(33, 40) % 3 > 0}} if masked else {}
        optimizer = build(release, params, **options, **mask)
        for step in range(STEPS):
            pull(params, some_gradients(parameters(*dtypes), step))
            released = [p.grad is None for p in params]
            assert all(released[:1] + released[2:]) if release else not all(released)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(state(optimizer, params))
        counted.append({k: v for k, v in optimizer.stats().items() if k not in ("state_bytes", "phase")})
    assert equal(*ends)
    assert counted[0] == counted[1]


def test_without_a_gradient_a_tensor_stays_and_its_bucket_moves():
    ends = []
    for release in (False, True):
        params = [nn.Parameter(p.detach().clone()) for p in parameters() for _ in range(9)]  # several to a bucket
        optimizer = AdamW(params, 1e-2, **objects(release_gradients=release, state="8bit"))
        for step in range(STEPS):
            grads = some_gradients(params, 5 * step)
            pull(params, [None if (i + step) % 7 == 0 else g for i, g in enumerate(grads)])
            optimizer.step()
            for p in params:
                p.grad = None
        optimizer.step()  # on none at all
        ends.append(state(optimizer, params))
    assert equal(*ends)


def test_gradients_accumulate_in_no_sync_until_the_last_backward():
    ends = []
    for release in (False, True):
        params = parameters()
        optimizer = build(release, params)
        for step in range(STEPS):
            with optimizer.no_sync():
                pull(params, some_gradients(parameters(), 10 * step))
            assert params[0].grad is not None
            pull(params, some_gradients(parameters(), 10 * step + 4))  # there is none of the second one
            optimizer.step()
            for p in params:
                p.grad = None
        ends.append(state(optimizer, params))
    assert equal(*ends)


def test_nonfinite_elements_are_left_out_and_warned_of_once():
    ends, told = [], []
    for release in (False, True):
        params = parameters(torch.float32)
        optimizer = build(release, params)
        for step in range(3):
            grads = some_gradients(parameters(torch.float32), step)
            if step == 1:
                grads[5][0, 3], grads[1][2, 2] = torch.inf, torch.nan
            with pytest.warns(FusedOneBitWarning) if step == 1 else torch.no_grad(), torch.enable_grad():
                pull(params, grads)
                optimizer.step()
            optimizer.zero_grad()
        ends.append(state(optimizer, params))
        told.append(optimizer.stats()["partial_steps"])
    assert equal(*ends)
    assert told == [1, 1]


def test_runs_go_on_from_a_checkpoint_a_copy_and_a_further_group():
    ends = []
    for cut in (None, "load", "copy", "group"):
        params = parameters()
        few = params[:8] if cut == "group" else params
        optimizer = AdamW(few, 1e-2, **objects(release_gradients=True, state="8bit", master_weights="8bit"))
        for step in range(STEPS):
            if step == 1 and cut == "group":
                optimizer.add_param_group({"params": params[8:]})
            if step == 3 and cut == "load":
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = AdamW(params, 1e-2, **objects(release_gradients=True, state="8bit", master_weights="8bit"))
                optimizer.load_state_dict(saved)
            if step == 3 and cut == "copy":
                params, optimizer = copy.deepcopy((params, optimizer))
            grads = some_gradients(parameters(), step)
            pull(params[:8], grads[:8]) if cut == "group" and not step else pull(params, grads)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(state(optimizer, params))
    assert equal(ends[0], ends[1])
    assert equal(ends[0], ends[2])
    assert all(map(torch.equal, ends[0][:8], ends[3][:8]))


def test_a_learning_rate_schedule_and_a_closure_do_as_ever():
    ends = []
    for release in (False, True):
        params = parameters()
        optimizer = build(release, params)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)

        def closure(step: int, params=params, optimizer=optimizer) -> float:
            optimizer.zero_grad()
            pull(params, some_gradients(parameters(), step))
            return 1.0

        for step in range(STEPS):
            assert optimizer.step(lambda step=step, again=closure: again(step)) == 1.0
            schedule.step()
        ends.append(state(optimizer, params))
    assert equal(*ends)


@pytest.mark.needs_compiler
def test_each_bucket_is_one_launch():
    params = [nn.Parameter(torch.randn(1024)) for _ in range(96)]
    optimizer = AdamW(params, **objects(release_gradients=True))
    for _ in range(2):
        launches.clear()
        pull(params, [torch.ones_like(p) for p in params])
        optimizer.step()
    assert launches == {"adam_update": 32, "advance": 1}


def test_an_optimizer_that_nobody_holds_goes_with_its_hooks():
    params = parameters()
    optimizer = build(True, params)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    pull(params, some_gradients(parameters(), 0))
    assert params[0].grad is not None


class Tied(nn.Module):
    """An embedding that is the output's weight too, around layers that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 32, dtype=BF16)
        self.layers = nn.ModuleList(nn.Linear(32, 32, dtype=BF16) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x.tanh(), use_reentrant=False)
        return nn.functional.cross_entropy((x @ self.embedding.weight.T).float(), tokens.roll(1))


@pytest.mark.parametrize("compiled", ["nothing", "the model", "the step"])
def test_tied_weights_recomputation_and_compilers_change_nothing(compiled):
    ends = []
    for release in (False, True):
        torch.compiler.reset()
        model = Tied()
        optimizer = AdamW(model.parameters(), 1e-2, **objects(release_gradients=release, state="8bit"))
        run = torch.compile(model, backend="aot_eager") if compiled == "the model" else model
        take_step = torch.compile(optimizer.step, backend="aot_eager") if compiled == "the step" else optimizer.step
        for step in range(4):
            run(torch.arange(20) * (step + 1) % 64).backward()
            assert all((p.grad is None) == release for p in model.parameters())
            take_step()
            optimizer.zero_grad()
        ends.append([p.detach() for p in model.parameters()])
        assert optimizer.stats()["step"] == 4
    assert equal(*ends)


# ---------------------------------------------------------------- what it holds


def layers(count: int, width: int) -> nn.Sequential:
    """Equal layers without activations that count, beside 2 bytes of a parameter."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=BF16) for _ in range(count)))


def most_held(release: bool, master_weights: Any, count: int = 24, width: int = 512) -> tuple[float, float]:
    """Bytes per parameter that torch has allocated at most within a step, and between two, as its profiler tells."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        model = layers(count, width)
        how = objects(state="8bit", master_weights=master_weights, release_gradients=release)
        optimizer = AdamW(model.parameters(), **how)
        x = torch.randn(1, width, dtype=BF16)
        for _ in range(2):
            with torch.profiler.record_function("a step begins"):
                pass
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    events = sorted(told.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held, most, between, steps = 0, 0, 0, 0
    for event in events:
        if event.name() == "a step begins":
            steps, between = steps + 1, held
        elif event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held) if steps == 2 else 0
    return most / (count * width * width), between / (count * width * width)


@pytest.mark.needs_compiler  # eager functions have temporaries of a tile in float32
def test_parameters_gradients_and_state_are_5_3_bytes_at_most():
    found = {}
    for master_weights in (False, "8bit"):
        for release in (False, True):
            most, between = found[master_weights, release] = most_held(release, master_weights)
            how = f"{master_weights or 'no'} masters, {'released' if release else 'kept'} gradients"
            print(f"AdamW, 8-bit state, {how}: at most {most:.2f} bytes a bf16 parameter, {between:.2f} between steps")
    assert found["8bit", True][0] <= 5.3
    assert found[False, True][0] <= 4.3
    for master_weights, held in ((False, 4.0), ("8bit", 5.0)):
        assert found[master_weights, False][0] >= held + 2  # what is measured has all gradients in it
        assert held <= found[master_weights, True][1] <= held + 0.05


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_grad_norm": 1.0}, r"max_grad_norm must be None with Wire\(release_gradients=True\), got 1.0"),
        ({"nonfinite": "raise"}, r"nonfinite must be 'skip' with Wire\(release_gradients=True\), got 'raise'"),
        ({"capturable": True}, r"capturable must be False with Wire\(release_gradients=True\), got True"),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        AdamW(parameters(), **objects(release_gradients=True, **options))


@pytest.mark.parametrize("name", [name for name in MAKE if name != "AdamW, ours"])
def test_no_other_optimizer_takes_it(name):
    with pytest.raises(ValueError, match=r"release_gradients must be False with .*, got True: it has no such option"):
        MAKE[name](parameters(torch.float32), release_gradients=True)


def on_two_ranks(rank: int, world_size: int) -> str:
    try:
        AdamW(parameters(), **objects(release_gradients=True))
    except ValueError as error:
        return str(error)
    return ""


def test_several_ranks_are_refused():
    for told in run_ranks(on_two_ranks, 2):
        assert "release_gradients must be False on several ranks, got True on 2" in told


def begun() -> tuple[list[nn.Parameter], AdamW]:
    params = parameters()
    optimizer = build(True, params)
    pull(params, some_gradients(parameters(), 0))
    return params, optimizer


def test_a_second_backward_pass_before_the_step_is_refused():
    params, optimizer = begun()
    with pytest.raises(RuntimeError, match=r"a second backward pass before step\(\).*no_sync\(\)"):
        pull(params, some_gradients(parameters(), 1))
    optimizer.step()


@pytest.mark.parametrize("what", ["zero_grad", "state_dict", "load_state_dict", "add_param_group"])
def test_nothing_else_comes_between_backward_and_step(what):
    saved = build(True, parameters()).state_dict()
    _, optimizer = begun()
    arguments = {"load_state_dict": [saved], "add_param_group": [{"params": [nn.Parameter(torch.ones(3))]}]}
    with pytest.raises(RuntimeError, match=rf"{what}\(\) must not come between the backward pass and step\(\)"):
        getattr(optimizer, what)(*arguments.get(what, []))
    optimizer.step()
    getattr(optimizer, what)(*arguments.get(what, []))


@pytest.mark.parametrize("scaler", [amp.GradScaler, torch.amp.GradScaler])
def test_a_scaler_is_refused(scaler):
    _, optimizer = begun()
    scaling = scaler("cpu")
    scaling.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"a GradScaler can't be used with Wire\(release_gradients=True\)"):
        scaling.step(optimizer)


def test_a_rate_changed_after_backward_raises_on_a_taken_step():
    params, optimizer = begun()
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(RuntimeError, match="hyper-parameters have changed between the backward pass and step"):
        optimizer.step()
    assert optimizer.stats()["step"] == 1
    pull(params, some_gradients(parameters(), 1))
    optimizer.step()


def test_an_unusable_gradient_raises_in_the_backward_pass():
    p = nn.Parameter(torch.randn(350, 4))
    optimizer = AdamW([p], **objects(release_gradients=True))
    with pytest.raises(TypeError, match="the gradient of parameter 0 must be dense"):
        nn.functional.embedding(torch.arange(350), p, sparse=True).sum().backward()
    assert optimizer.stats()["step"] == 0
