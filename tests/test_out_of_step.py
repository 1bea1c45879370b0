"""A rank that skips or repeats a step is found at the next exchange, by all ranks; other differences raise no alarm.

Where every step sends a message a rank that has left one out pairs its next step with the others'. What tells is the
number of sets of gradients that its user has made.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from observe import change_header, fingerprint, give_gradients, named, parameters, train
from ranks import run_ranks, simulate
from runs_after_a_load import MAKE, make
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedonebit
from fusedonebit import Faults, OneBitAdam, Wire, ddp
from fusedonebit.comm import Transport

EACH = pytest.mark.parametrize("name", [name for name in MAKE if "masters" not in name])
SKIPS = "a rank has skipped or repeated a step()"


def skip(optimizer: Any, rank: int, step: int) -> None:
    give_gradients(optimizer, rank, step)
    optimizer.zero_grad()


def repeat(optimizer: Any, rank: int, step: int) -> None:
    optimizer.step()


def find(optimizer: Any, rank: int, start: int) -> tuple[str, str, int, bool]:
    """Trains until a step raises: its error, how many steps that took, and whether parameters stayed still in it."""
    for step in range(start, start + 8):
        before = fingerprint(parameters(optimizer))
        give_gradients(optimizer, rank, step)
        kind, text = named(optimizer.step)
        if kind:
            return kind, text, step - start, fingerprint(parameters(optimizer)) == before
        optimizer.zero_grad()
    return "", "", 8, True


@pytest.mark.long(but=7)
@EACH
@pytest.mark.parametrize("wrong", [skip, repeat])
@pytest.mark.parametrize("steps", [1, 6])
def test_skipped_or_repeated_steps_raise_at_the_next_exchange(name, wrong, steps):
    """The rank that repeats one does so in place of the others' next, which is where they meet."""

    def run(rank: int, transport: Transport) -> tuple[str, str, int, bool]:
        _, optimizer = make(name, process_group=transport)
        train(optimizer, rank, range(steps))
        first = steps
        if rank == 1 and wrong is skip:
            optimizer.zero_grad()
            skip(optimizer, rank, steps)
        if rank == 1 and wrong is repeat:
            before, first = fingerprint(parameters(optimizer)), steps + 1
            kind, text = named(optimizer.step)
            if kind:
                return kind, text, 0, fingerprint(parameters(optimizer)) == before
        optimizer.zero_grad()
        return find(optimizer, rank, first)

    results = simulate(run, 2)
    within = {"zero-one-adam": 4, "marsit-adam": 2}.get(name, 1)
    for kind, text, after, still in results:
        assert kind == "OutOfStepError", (kind, text)
        assert SKIPS in text
        assert after < within
        assert still or within > 1
    steps_of = sorted(int(re.search(r"in its step (\d+)", text)[1]) for _, text, *_ in results)
    assert steps_of[1] - steps_of[0] == 1


# ---------------------------------------------------------------- what ranks may do differently


def accumulate_differently(optimizer: Any, rank: int, step: int) -> None:
    """Another number of backward passes on each rank."""
    for part in range(1 + (rank + step) % 3):
        loss_of(optimizer, 100 * step + 10 * part + rank).backward()


def none_here(optimizer: Any, rank: int, step: int) -> None:
    """In every other step one rank has no gradient at all."""
    if (rank + step) % 2:
        loss_of(optimizer, step + 50 * rank).backward()


def some_here(optimizer: Any, rank: int, step: int) -> None:
    """Each rank has gradients of other parameters."""
    loss_of(optimizer, step + 50 * rank, parameters(optimizer)[(rank + step) % 2 :: 2]).backward()


def the_same_again(optimizer: Any, rank: int, step: int) -> None:
    """Gradients lie where they lay, and are overwritten."""
    for p in parameters(optimizer):
        fresh = torch.randn(p.shape, generator=torch.Generator().manual_seed(step + 7 * rank))
        if p.grad is None or rank == 1:
            p.grad = fresh
        else:
            p.grad.copy_(fresh)


def several_calls(optimizer: Any, rank: int, step: int) -> None:
    """Nobody counts calls of ``zero_grad()``."""
    for _ in range(rank + step % 2):
        optimizer.zero_grad(set_to_none=bool(step % 3))
    loss_of(optimizer, step + 50 * rank).backward()


def thrown_away_before_the_step(optimizer: Any, rank: int, step: int) -> None:
    """A rank clears its gradients, since they are bad or it has run out of data, and takes part without any."""
    loss_of(optimizer, step + 50 * rank).backward()
    if (rank + step) % 2:
        optimizer.zero_grad(set_to_none=bool(step % 3))


def thrown_away_by_the_model(optimizer: Any, rank: int, step: int) -> None:
    """As after an evaluation that needs gradients, on one rank."""
    if rank == 0:
        loss_of(optimizer, step).backward()
        for p in parameters(optimizer):
            p.grad = None
    loss_of(optimizer, step + 50 * rank).backward()


def cleared_now_and_then(optimizer: Any, rank: int, step: int) -> None:
    """Gradients are cleared before every other step, and one rank does not use the first parameter in between."""
    if step % 2 == 0:
        optimizer.zero_grad()
    loss_of(optimizer, step + 50 * rank, parameters(optimizer)[step % 2 * (rank == 0) :]).backward()


def loss_of(optimizer: Any, seed: int, params: list[Tensor] | None = None) -> Tensor:
    params = parameters(optimizer) if params is None else params
    generator = torch.Generator().manual_seed(seed)
    return sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params)


MAY_DIFFER = [
    accumulate_differently,
    none_here,
    some_here,
    the_same_again,
    several_calls,
    thrown_away_before_the_step,
    thrown_away_by_the_model,
    cleared_now_and_then,
]


@pytest.mark.filterwarnings("ignore:the second backward pass has added")
@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", ["onebit-adam", "marsit-adam"])
def test_what_ranks_may_do_differently_raises_no_alarm(name):
    def run(rank: int, transport: Transport) -> None:
        for differ in MAY_DIFFER:
            for dropped in ("optimizer", "to zeros", "model", "never"):
                if differ is none_here and dropped == "never":
                    continue  # a step on old gradients
                _, optimizer = make(name, process_group=transport)
                for step in range(5):
                    differ(optimizer, rank, step)
                    optimizer.step()
                    if dropped == "model":
                        for p in parameters(optimizer):
                            p.grad = None
                    elif dropped != "never":
                        optimizer.zero_grad(set_to_none=dropped == "optimizer")

    simulate(run, 2)


def test_closures_and_what_all_ranks_do_alike_raise_no_alarm():
    """All repeat steps, and throw gradients away, equally often."""

    def run(rank: int, transport: Transport) -> None:
        _, optimizer = make("onebit-adam", process_group=transport)
        for step in range(5):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(optimizer, step + 50 * rank)
                loss.backward()
                return loss

            optimizer.step(closure)
            skip(optimizer, rank, step)
            give_gradients(optimizer, rank, step)
            optimizer.step()
            repeat(optimizer, rank, step)
            optimizer.zero_grad()

    simulate(run, 2)


def test_a_gradscaler_that_skips_steps_raises_no_alarm():
    def run(rank: int, transport: Transport) -> float:
        _, optimizer = make("onebit-adam", process_group=transport)
        scaler = fusedonebit.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(loss_of(optimizer, step + 50 * rank)).backward()
            if step % 3 == 1 and rank == 0:
                parameters(optimizer)[0].grad[0, 0] = float("inf")
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    assert simulate(run, 2) == [4.0 / 2**3] * 2


def test_a_step_that_one_rank_could_not_take_may_be_repeated():
    def run(rank: int, transport: Transport) -> list[str]:
        _, optimizer = make("onebit-adam", process_group=transport)
        kinds = []
        for step in range(5):
            give_gradients(optimizer, rank, step)
            first = parameters(optimizer)[0]
            good = first.grad
            if rank == 1 and step in (1, 4):
                first.grad = good.to_sparse()
            kinds.append(named(optimizer.step)[0])
            first.grad = good
            if step in (1, 4):
                kinds.append(named(optimizer.step)[0])
        return kinds

    ours, theirs = simulate(run, 2)
    assert ours == ["", "AbortedStepError", "", "", "", "AbortedStepError", ""]
    assert theirs == ["", "TypeError", "", "", "", "TypeError", ""]


# ---------------------------------------------------------------- checkpoints, other loops


def test_the_count_goes_on_in_a_checkpoint_beyond_32_bits():
    """Whatever the number: what an older version has written says updates and skipped steps."""

    def run(rank: int, transport: Transport, steps: int | None) -> str:
        _, optimizer = make("onebit-adam", process_group=transport)
        train(optimizer, rank, range(5))
        state = copy.deepcopy(optimizer.state_dict())
        change_header(state, lambda header: header.pop("steps") if steps is None else header.update(steps=steps))
        _, optimizer = make("onebit-adam", process_group=transport)
        optimizer.load_state_dict(state)
        train(optimizer, rank, range(5, 7))
        if rank == 1:
            skip(optimizer, rank, 7)
        return find(optimizer, rank, 7)[1]

    for steps, first in ((None, 5), (2**31 - 3, 2**31 - 3), (2**32 - 3, 2**32 - 3)):
        for text in simulate(run, 2, steps):
            assert f"{(first + 3) % 2**32} steps on rank 0, {(first + 4) % 2**32} on rank 1 ({SKIPS}" in text
            assert text.startswith("ranks are out of step after ")
            assert "model.zero_grad()" in text


def repeat_with_overlap(rank: int, world_size: int) -> tuple[str, str, bool]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 30), nn.Linear(30, 1))
    optimizer = OneBitAdam(net.parameters(), freeze_step=2, faults=Faults(guard="off"), wire=Wire(overlap=True))
    for step in range(6):
        before = fingerprint(parameters(optimizer))
        if rank == 0 or step < 5:
            net(torch.randn(4, 6)).square().mean().backward()
        told = named(optimizer.step)
        if told[0]:
            break
        if rank == 0:
            optimizer.zero_grad()
    return *told, fingerprint(parameters(optimizer)) == before


def test_a_repeated_step_raises_if_backward_passes_send_buckets():
    for kind, text, still in run_ranks(repeat_with_overlap, 2):
        assert kind == "OutOfStepError"
        assert f"6 steps on rank 0, 5 on rank 1 ({SKIPS}" in text
        assert still


def under_ddp(rank: int, world_size: int) -> list[Any]:
    """What DDP has averaged in the warm-up is thrown away by all, by one, and used twice by one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    model, optimizer = DistributedDataParallel(net), OneBitAdam(net.parameters(), freeze_step=20)
    ddp.attach(model, optimizer)
    told = []
    for what in ("", "all skip", "", "one repeats", "", "one skips"):
        model(torch.randn(4, 6)).square().mean().backward()
        if what == "all skip":
            optimizer.zero_grad()
            continue
        before = fingerprint(parameters(optimizer))
        told.append(named(optimizer.zero_grad if what == "one skips" and rank == 1 else optimizer.step))
        if what == "one repeats" and rank == 1:
            before = fingerprint(parameters(optimizer))
            told.append(named(optimizer.step))
        if told[-1][0]:
            told.append(fingerprint(parameters(optimizer)) == before)
        optimizer.zero_grad()
    return told


def test_under_ddp_skipped_steps_are_found_repeated_ones_refused():
    fine = ("", "")
    ours, theirs = run_ranks(under_ddp, 2)
    assert ours[:3] == theirs[:3] == [fine] * 3
    (kind, text), *still = ours[4:]
    assert (kind, still) == ("OutOfStepError", [True])
    assert SKIPS in text
    (kind, text), still, after, (later, said), *end = theirs[3:]
    assert (kind, still, after) == ("RuntimeError", True, fine)
    assert "step() was called again on gradients that DDP has averaged" in text
    assert (later, end) == ("OutOfStepError", [True])
    assert "throws away by zero_grad() what DDP has averaged" in said
