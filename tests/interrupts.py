"""Interrupts steps at random moments, and judges what is left: counted if and only if it was taken, or closed.

A moment is a line of the package that a step executes, drawn with a seed: there a signal arrives, or any other
exception is raised. Real signals come at random times, from another thread.
"""

from __future__ import annotations

import linecache
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from optimizers import MAKE
from torch import Tensor
from torch.nn import Parameter

import fusedonebit
from fusedonebit.comm import CollectiveError

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a shell has started in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

PACKAGE = os.path.dirname(fusedonebit.__file__)
STEPS = 9
"""Of a run; the variance is frozen after two."""

NOTHING, WHOLE, CLOSED, HALF = "not counted", "counted", "closed", "half-counted"


class StopError(Exception):
    """What is raised at a moment."""


def model() -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(size, generator=generator)) for size in (600, 30, 7)]


def give_gradients(params: list[Parameter], step: int, rank: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def take_steps(optimizer: Any, params: list[Parameter], steps: range, rank: int = 0) -> None:
    for step in steps:
        give_gradients(params, step, rank)
        optimizer.step()
        optimizer.zero_grad()


def values(params: list[Parameter]) -> Tensor:
    return torch.cat([p.detach() for p in params])


Run = tuple[list[Tensor], list[int]]
"""The parameters before each step of a run, and after the last; and how many lines of ours each executes."""


def uninterrupted(name: str, rank: int = 0, **ranks: Any) -> Run:
    """Take a run as it is without interrupts."""
    params = model()
    optimizer = MAKE[name](params, **ranks)
    seen, lines = [values(params)], []
    for step in range(STEPS):
        give_gradients(params, step, rank)
        with at_line(-1, ctrl_c) as executed:
            optimizer.step()
        lines += executed
        optimizer.zero_grad()
        seen.append(values(params))
    return seen, lines


uninterrupted_alone = cache(uninterrupted)


@contextmanager
def at_line(number: int, what: Callable[[], object]) -> Iterator[list[int]]:
    """Call ``what`` before this thread's ``number``-th line of the package; yields how many there were, in a list."""
    lines = [0]

    def look(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        # Where a block of ``with`` ends tracers see its first line once more, at which Python raises nothing.
        if event == "line" and not line.startswith("with "):
            lines[0] += 1
            if lines[0] == number:
                sys.settrace(None)
                frame.f_trace = None
                what()
        return look

    sys.settrace(look)
    try:
        yield lines
    finally:
        sys.settrace(None)


def stop(error: type[BaseException]) -> Callable[[], None]:
    def what() -> None:
        raise error("at this moment")

    return what


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def judge(optimizer: Any, params: list[Parameter], step: int, run: list[Tensor], counted: int) -> str:
    """Say what an interrupt in ``step`` has left; ``counted`` updates were before; ``run`` is the uninterrupted one."""
    here = values(params)
    moved = not torch.equal(here, run[step])
    if optimizer.frame.steps.broken:
        for refused in (optimizer.step, optimizer.state_dict, lambda: pickle.dumps(optimizer)):
            with pytest.raises(CollectiveError, match=r"can't go on: .*interrupted"):
                refused()
        assert torch.equal(values(params), here)
        return CLOSED
    counts = optimizer.stats()["step"] - counted
    if counts != moved or (moved and not torch.equal(here, run[step + 1])):
        return HALF
    return WHOLE if moved else NOTHING


def trial(name: str, seed: int, what: Callable[[], object], rank: int = 0, strikes: bool = True, **ranks: Any) -> str:
    """Interrupt one step of a run, go on if that is possible, and say how it ended."""
    chosen = random.Random(f"{name} {seed}")
    step, share = chosen.randrange(STEPS - 2), chosen.random()
    run, lines = uninterrupted(name, rank, **ranks) if ranks else uninterrupted_alone(name)
    params = model()
    optimizer = MAKE[name](params, **ranks)
    take_steps(optimizer, params, range(step), rank)
    counted = optimizer.stats()["step"]
    give_gradients(params, step, rank)
    if not strikes:  # another rank is interrupted, and either takes this step later, or leaves
        try:
            optimizer.step()
            optimizer.zero_grad()
            take_steps(optimizer, params, range(step + 1, STEPS), rank)
        except CollectiveError:
            return CLOSED
        return WHOLE if torch.equal(values(params), run[-1]) else HALF
    try:
        with at_line(1 + int(share * lines[step]), what):
            optimizer.step()
    except (KeyboardInterrupt, StopError, SystemExit, MemoryError):
        pass
    except CollectiveError:
        assert optimizer.frame.steps.broken
    return go_on(name, optimizer, params, step, run, counted, rank, **ranks)


def go_on(
    name: str,
    optimizer: Any,
    params: list[Parameter],
    step: int,
    run: list[Tensor],
    counted: int,
    rank: int = 0,
    **ranks: Any,
) -> str:
    """Judge what is left; then take the other steps, also with what was saved now, if this rank is alone."""
    verdict = judge(optimizer, params, step, run, counted)
    if verdict in (CLOSED, HALF):
        return verdict
    rest = range(step + (verdict == WHOLE), STEPS)
    optimizer.zero_grad()
    if not ranks:
        copies = model()
        again = MAKE[name](copies)
        again.load_state_dict(optimizer.state_dict())
        with torch.no_grad():
            for copy, p in zip(copies, params, strict=True):
                copy.copy_(p)
        take_steps(again, copies, rest)
        if not torch.equal(values(copies), run[-1]):
            return HALF
    take_steps(optimizer, params, rest, rank)
    same = torch.equal(values(params), run[-1]) and optimizer.stats()["step"] == counted + STEPS - step
    return verdict if same else HALF


def at_random_times(name: str, count: int, seed: int) -> Counter[str]:
    """Let real signals arrive in steps at random times; say how these ended. In the main thread alone."""
    (run, _), seen = uninterrupted_alone(name), Counter[str]()
    chosen = random.Random(f"{name} {seed}")
    longest = _seconds_of_a_step(name)
    for _ in range(count):
        step = chosen.randrange(STEPS - 2)
        params = model()
        optimizer = MAKE[name](params)
        take_steps(optimizer, params, range(step))
        counted = optimizer.stats()["step"]
        give_gradients(params, step)
        arrive = time.perf_counter() + chosen.random() * longest
        sender = threading.Thread(target=_send, args=(arrive,))
        try:
            sender.start()
            optimizer.step()
            while True:  # it comes later
                time.sleep(0.001)
        except KeyboardInterrupt:
            pass
        sender.join()
        seen[go_on(name, optimizer, params, step, run, counted)] += 1
    return seen


def _send(when: float) -> None:
    while time.perf_counter() < when:
        time.sleep(1e-5)
    os.kill(os.getpid(), signal.SIGINT)


def _seconds_of_a_step(name: str) -> float:
    params = model()
    optimizer = MAKE[name](params)
    began = time.perf_counter()
    take_steps(optimizer, params, range(STEPS))
    return (time.perf_counter() - began) / STEPS


def show(title: str, seen: dict[str, Counter[str]]) -> None:
    """Print how many interrupts left what, by optimizer."""
    kinds = (NOTHING, WHOLE, CLOSED, HALF)
    print(f"\n{title:<24}{'interrupts':>12}" + "".join(f"{kind:>14}" for kind in kinds))
    total = sum(seen.values(), Counter[str]())
    for name, counts in {**seen, "all": total}.items():
        print(f"{name:<24}{sum(counts.values()):>12}" + "".join(f"{counts[kind]:>14}" for kind in kinds))
