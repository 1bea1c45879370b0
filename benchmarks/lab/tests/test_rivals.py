"""The lab's rivals: each is its paper's algorithm, and trains.

``rivals_by_the_book`` has the algorithms again, one worker at a time, in float64; a mutant of it parts from ours.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import rivals_by_the_book as book
import torch
import torch.distributed as dist
from ranks import run_ranks
from rivals_runs import BOOK, SHAPES, STEPS, a_run, ours, rival_of
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from benchmarks.lab import run as lab
from benchmarks.lab.contenders import CONTENDERS
from benchmarks.lab.rivals import RIVALS, loco
from benchmarks.lab.rivals.powersgd import PowerSGD
from benchmarks.lab.rivals.quantised import BFloat16
from benchmarks.lab.tasks import TASKS, Trial

LIMIT = 1e-6
"""Relative to how far parameters go on average; roundings are of float64, and no decision lies at a tie."""


def furthest(name: str, module: ModuleType = book) -> float:
    """By how much ours and the transcription part at most, relative to how far parameters go."""
    make, transcription, arguments = BOOK[name]
    run = a_run()
    theirs = list(getattr(module, transcription)(run, **arguments))
    apart = [float((mine - x).abs().max()) for mine, x in zip(ours(make, run), theirs, strict=True)]
    assert len(apart) == STEPS
    return max(apart) / float((theirs[-1] - run.x).abs().mean())


@pytest.mark.parametrize("name", BOOK)
def test_each_rival_is_its_papers_algorithm(name):
    apart = furthest(name)
    print(f"{name}: {apart:.1e} of the way apart after {STEPS} steps")
    assert apart < LIMIT


def test_locos_moving_average_starts_from_zero_again(monkeypatch):
    monkeypatch.setattr(loco, "RESET", 10)
    assert furthest("loco") > 10 * LIMIT
    monkeypatch.setitem(BOOK, "loco", (*BOOK["loco"][:2], {"down": "parameters", "reset": 10}))
    assert furthest("loco") < LIMIT


@pytest.mark.parametrize("name", ["dlion-mavo", "dlion-mavo-1", "dlion-avg"])
def test_distributed_lion_leaves_what_has_no_gradient_in_place(name):
    run = a_run(24)
    run.weight_decay, run.lrs, run.gradients[..., :20] = 0.0, [1e-2] * 24, 0.0
    *_, last = ours(BOOK[name][0], run)
    torch.testing.assert_close(last[:20], run.x[:20])
    assert (last[20:] - run.x[20:]).abs().mean() > 1e-2


MUTANTS = [
    ("bf16", "(g.bfloat16() / run.workers).float()).bfloat16()", "(g.bfloat16() / run.workers).float())"),
    ("int8", "self.e[w] = c - arrived[w]", "pass"),
    ("int4", "run.workers, 512)", "run.workers, 4096)"),
    ("powersgd-4", "e[part] = delta[part] - mean[part]", "pass"),
    ("powersgd-4-late", "t >= start", "t >= 10"),
    ("diloco", "(delta + mu * momentum)", "momentum"),
    ("diloco-int8", "two_sided(deltas) if two_sided else ", ""),
    ("sparseloco", "errors[w] = e - sent", "pass"),
    ("sparseloco", "width = 6 *", "width = 5 *"),
    ("loco", "0.8 * e + 0.2", "0.2 * e + 0.8"),
    ("loco-gradients", "mean, server_e = sent(mean, server_e, t)", "pass"),
    ("dlion-mavo", "torch.sign(total)", "total.clamp(min=-1) / run.workers"),
    ("dlion-mavo-1", "-1 if t % 2 else 1", "1"),
    ("dlion-avg", "BETA2 * m + (1 - BETA2) * g", "BETA1 * m + (1 - BETA1) * g"),
    ("demo", "delta[at] -= rows.T @ q.view(at.shape) @ columns", "pass"),
    ("demo", ".bfloat16()", ""),
    ("ef-sgdm", "+ (last / lr) * es[w]", "+ es[w]"),
    ("onebit-loco", "0.95 * es[w]", "es[w]"),
    ("local-adamw", "xs = [theta] * run.workers", "pass"),
]


@pytest.mark.parametrize(("name", "line", "instead"), MUTANTS)
def test_a_changed_line_of_a_paper_is_seen(name, line, instead):
    source = inspect.getsource(book)
    assert line in source
    mutant = ModuleType("mutant")
    mutant.__dict__["__name__"] = book.__name__  # where dataclasses look themselves up
    exec(compile(source.replace(line, instead), "mutant", "exec"), mutant.__dict__)
    assert furthest(name, mutant) > 10 * LIMIT


def of_torchs_hook(rank: int, world_size: int, approximation: int, start: int) -> list[Tensor]:
    """What ``powerSGD_hook`` makes of the ranks' gradients, step by step."""
    run = a_run()
    state = powerSGD_hook.PowerSGDState(None, approximation, start_powerSGD_iter=start)
    state.rng = SimpleNamespace(randint=lambda high: 0)  # the seed of the right factors
    seen = []
    for gs in run.gradients:
        buffer = gs[rank].clone()
        gradients = [buffer[part].view(shape) for part, shape in zip(run.tensors(), SHAPES, strict=True)]
        bucket = SimpleNamespace(
            buffer=lambda b=buffer: b, gradients=lambda g=gradients: g, index=lambda: 0, is_last=lambda: True
        )
        seen.append(powerSGD_hook.powerSGD_hook(state, bucket).wait().clone())
    dist.barrier()  # while no callback holds the group any more
    return seen


@pytest.mark.parametrize(("rank", "late", "start"), [(1, False, 10), (4, False, 10), (4, True, 2)])
def test_powersgd_is_torchs_hook(rank, late, start):
    run = a_run()
    run.gradients = run.gradients[:, :2]
    rival = rival_of(partial(PowerSGD, rank=rank, late=late), run, 2)
    theirs = run_ranks(of_torchs_hook, 2, rank, start)[0]
    for gs, theirs_now in zip(run.gradients, theirs, strict=True):
        rival.done += 1
        torch.testing.assert_close(rival.mean(gs), theirs_now, rtol=0, atol=1e-9)


# ---------------------------------------------------------------- in the lab


def test_a_rival_says_that_it_takes_all_workers_gradients():
    rival = rival_of(BFloat16, a_run())
    with pytest.raises(RuntimeError, match=r"BFloat16 stands for all workers: call give\(gradients\) before each step"):
        rival.step()


@pytest.mark.long(but=["bf16"], full=True)
@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_trains(monkeypatch, name):
    monkeypatch.setitem(TASKS, "fit", dataclasses.replace(TASKS["fit"], steps=150))
    rate = TASKS["fit"].lr * CONTENDERS[name].rate
    runs = (lab.run(lab.Key("fit", name, 0, 4, rate * by)) for by in (1.0, 0.3, 3.0, 0.1))
    run = next(run for run in runs if not lab.diverged(run))
    print(f"{name}: {run['metric'] / run['initial']:.2g} of the first loss, {run['sent']:.3g} bytes")
    assert run["received"] == run["sent"]


def flat(params: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([p.flatten() for p in params.values()])


def looks(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[list[Tensor], list[Tensor], float]:
    """Workers' parameters [W, n] and those that are evaluated [n], wherever the lab looks; and bytes sent."""
    workers, evaluated, task, real = [], [], TASKS["mlp"], lab.Training.validate

    def watched(seed: int) -> Trial:
        trial = task.make(seed)
        validate = trial.validate
        trial.validate = lambda params: (evaluated.append(flat(params[0])), validate(params))[1]
        return trial

    def validate(self: lab.Training) -> float:
        workers.append(torch.stack([flat(models[0]) for models in self.params]))
        return real(self)

    monkeypatch.setitem(TASKS, "mlp", dataclasses.replace(task, steps=100, make=watched))
    monkeypatch.setattr(lab.Training, "validate", validate)
    sent = lab.run(lab.Key("mlp", name, 0, 4, 1e-3))["sent"]
    assert len(workers) == len(evaluated) == 6
    return workers, evaluated, sent


def test_evaluating_the_workers_mean_within_a_round_is_free(monkeypatch):
    workers, evaluated, sent = looks(monkeypatch, "diloco-64")
    for rows, mean in zip(workers, evaluated, strict=True):
        torch.testing.assert_close(mean, rows.double().mean(0).float(), rtol=1e-5, atol=1e-7)
    assert [torch.equal(*rows[:2]) for rows in workers] == [True] + 5 * [False]
    assert sent == pytest.approx(8.0 / 100)  # a round of 64 has ended, in float32 both ways


def test_ours_have_agreed_wherever_they_are_evaluated(monkeypatch):
    workers, evaluated, _ = looks(monkeypatch, "zero-one-adam-own-32")
    assert all(torch.equal(rows, x.expand_as(rows)) for rows, x in zip(workers, evaluated, strict=True))
