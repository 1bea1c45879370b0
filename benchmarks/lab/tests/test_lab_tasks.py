"""The lab's tasks: gradients of all workers at once, held-out losses, and what makes each task hard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from benchmarks.lab.tasks import TASKS, Trial
from benchmarks.lab.tasks.images import NOISE, digits

WORKERS, SIZE = 3, 2


def values(trial: Trial) -> list[dict[str, Tensor]]:
    return [{name: p.detach().clone() for name, p in model.named_parameters()} for model in trial.models]


def batch(trial: Trial, seed: int, share: float = 1.0, size: int = SIZE) -> tuple[Tensor, ...]:
    return trial.batch(torch.Generator().manual_seed(seed), size, share)


def flat(params: list[dict[str, Tensor]]) -> list[Tensor]:
    return [p for named in params for p in named.values()]


def rows(examples: Tensor) -> set[tuple[float, ...]]:
    return set(map(tuple, examples.flatten(1).tolist()))


def gradients(trial: Trial, player: int, params: list[dict[str, Tensor]], one: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Of one worker, with autograd alone."""
    leaves = [{name: p.clone().requires_grad_() for name, p in p.items()} for p in params]
    wanted = leaves[player]
    return dict(zip(wanted, torch.autograd.grad(trial.loss(player, leaves, one), [*wanted.values()]), strict=True))


@pytest.mark.parametrize("stacked", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("task", TASKS)
def test_gradients_of_all_workers_at_once_are_those_of_each(task, stacked):
    trial = TASKS[task].make(0)
    batches = [batch(trial, seed) for seed in range(WORKERS)]
    # Workers' parameters differ where each has its own.
    each = [values(TASKS[task].make(seed if stacked else 0)) for seed in range(WORKERS)]
    together = [{name: torch.stack([params[i][name] for params in each]) for name in p} for i, p in enumerate(each[0])]
    params, dim = (together, 0) if stacked else (each[0], None)
    for player in range(len(trial.models)):

        def loss(own, params, one, player=player):
            return trial.loss(player, [own if i == player else p for i, p in enumerate(params)], one)

        stack = tuple(torch.stack(tensors) for tensors in zip(*batches, strict=True))
        grads, losses = vmap(grad_and_value(loss), in_dims=(dim, dim, 0))(params[player], params, stack)
        for worker in range(WORKERS):
            expected = gradients(trial, player, each[worker], batches[worker])
            assert losses[worker] == pytest.approx(float(trial.loss(player, each[worker], batches[worker])), rel=1e-5)
            whole = max(float(g.norm()) for g in expected.values())
            assert whole > 0
            for name, grad in grads.items():
                assert float((grad[worker] - expected[name]).norm()) <= 1e-5 * whole, name


@pytest.mark.parametrize("task", TASKS)
def test_a_trial_is_a_function_of_its_seed(task):
    before = torch.random.get_rng_state()
    first, again, other = (TASKS[task].make(seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    a, b, c = (torch.cat([p.flatten() for p in flat(values(trial))]) for trial in (first, again, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert all(torch.equal(x, y) for x, y in zip(batch(first, 0), batch(again, 0), strict=True))


@pytest.mark.parametrize("task", TASKS)
def test_shapes_of_batches_depend_on_their_size_only(task):
    trial = TASKS[task].make(0)
    for size in (1, 4):
        seen = [batch(trial, seed, share, size) for seed, share in ((0, 0.0), (1, 0.29), (2, 0.31), (3, 1.0))]
        assert len({tuple((t.shape, t.dtype) for t in one) for one in seen}) == 1
        assert all(len(t) == size for t in seen[0])


@pytest.mark.parametrize("task", TASKS)
def test_held_out_losses_ignore_the_seed_and_change_no_parameter(task):
    trial = TASKS[task].make(0)
    params = values(trial)
    first = trial.validate(params)
    torch.rand(1)
    batch(trial, 0)
    assert trial.validate(params) == first == TASKS[task].make(1).validate(params)
    assert 0 < first < float("inf")
    assert all(torch.equal(p, again) for p, again in zip(flat(params), flat(values(trial)), strict=True))


@pytest.mark.parametrize("task", ["vgg", "resnet", "mlp", "late"])
def test_held_out_digits_are_the_last_fifth_and_never_drawn(task):
    trial = TASKS[task].make(0)
    images, classes = digits()
    copies = len(trial.held_out[0]) // 360
    assert torch.equal(trial.held_out[-1], classes[-360:].repeat(copies))
    spread = (trial.held_out[0] - images[-360:].repeat(copies, 1, 1, 1)).std()
    assert float(spread) == pytest.approx(NOISE, rel=0.01)
    getattr(trial, "base", trial).noise = 0.0
    assert not rows(batch(trial, 0, size=5000)[0]) & rows(images[-360:])


@pytest.mark.parametrize("task", ["gan", "vae", "modadd"])
def test_no_held_out_example_is_drawn(task):
    trial = TASKS[task].make(0)
    held_out = rows(trial.held_out if task == "gan" else trial.held_out[0])
    drawn = rows(batch(trial, 0, size=20_000)[0])
    assert not drawn & held_out
    assert len(drawn) + len(held_out) == {"gan": 1797, "vae": 1797, "modadd": 31**2}[task]


def test_regression_holds_out_a_fifth():
    trial = TASKS["regression"].make(0)
    assert len(trial.inputs) == 353
    assert len(trial.held_out[1].unique()) <= 89
    assert not rows(trial.inputs) & rows(trial.held_out[0])


@pytest.mark.parametrize("task", ["causal", "masked", "lstm"])
def test_held_out_bytes_are_of_the_held_out_part_of_the_text(task):
    trial = TASKS[task].make(0)
    held_out = bytes(trial.corpus.held_out.clamp(max=127).tolist())
    *inputs, targets = trial.held_out
    if task == "masked":
        sequences = inputs[0].scatter(1, inputs[1], targets)
    else:
        assert torch.equal(inputs[0][:, 1:], targets[:, :-1])
        sequences = targets
    assert all(bytes(sequence.tolist()) in held_out for sequence in sequences)


def test_masked_bytes_are_hidden_from_the_model():
    inputs, places, targets = batch(TASKS["masked"].make(0), 0, size=64)
    assert int(inputs.gather(1, places).max()) == 0
    assert int(targets.min()) > 0
    assert all(len(set(row)) == 3 for row in places.tolist())


def test_a_module_that_is_used_late_has_no_gradient_before():
    trial = TASKS["late"].make(0)
    for share, used in ((0.0, False), (0.299, False), (0.3, True), (1.0, True)):
        grads = gradients(trial, 0, values(trial), batch(trial, 0, share, size=8))
        late = {name: bool(g.count_nonzero()) for name, g in grads.items() if name.startswith("right.")}
        assert len(late) == 4
        assert set(late.values()) == {used}
        assert all(bool(g.count_nonzero()) for name, g in grads.items() if name not in late)


def test_many_items_are_seen_after_a_sixth_of_the_steps_or_never():
    task = TASKS["recsys"]
    trial, draw = task.make(0), torch.Generator().manual_seed(0)
    seen: list[set[int]] = [set()]
    for step in range(task.steps):
        _, item, _ = trial.batch(draw, task.batch_size, step / task.steps)
        seen.append(seen[-1] | set(item.tolist()))
    early, all_steps = len(seen[int(0.15 * task.steps)]), len(seen[-1])
    assert early < all_steps - 300
    assert all_steps < trial.items.shape[0] - 50
    asked = set(trial.held_out[1].tolist())
    assert len(asked - seen[int(0.15 * task.steps)]) > 50


@pytest.mark.long(but=["mlp", "late"], full=True)
@pytest.mark.parametrize("task", [name for name in TASKS if name not in ("gan", "gans")])
def test_adamw_learns_every_task(task):
    settings, trial, draw = TASKS[task], TASKS[task].make(0), torch.Generator().manual_seed(0)
    (params,) = values(trial)
    before = trial.validate([params])
    options = {"lr": settings.lr, "betas": (0.9, 0.99), "weight_decay": settings.weight_decay}
    optimizer = torch.optim.AdamW([p.requires_grad_() for p in params.values()], **options)
    for step in range(settings.steps):
        optimizer.param_groups[0]["lr"] = settings.lr * (1 - step / settings.steps)
        optimizer.zero_grad()
        trial.loss(0, [params], trial.batch(draw, settings.batch_size, step / settings.steps)).backward()
        optimizer.step()
    # Most of what varies in the progress of diabetes is noise; adapters of a frozen network learn little.
    share = 0.01 if settings.noiseless else {"regression": 0.8, "adapters": 0.9}.get(task, 0.65)
    assert trial.validate([params]) < before * share
