"""A step that any exception ends, at any moment, is counted if and only if parameters moved, or nobody goes on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import interrupts
import pytest
import torch
from interrupts import CLOSED, HALF, NOTHING, WHOLE, StopError, at_line, ctrl_c, give_gradients, model, stop, take_steps
from optimizers import MAKE, ONEBIT
from ranks import run_ranks, simulate

from fusedonebit import AdamW, Wire
from fusedonebit.comm import CollectiveError, LocalTransport
from fusedonebit.core.interrupts import SignalsWait

MOMENTS = {each.__name__: stop(each) for each in (KeyboardInterrupt, MemoryError, StopError)} | {"Ctrl-C": ctrl_c}
FEW = pytest.param(2, ("OneBitAdam", "AdamW, ours", "ZeroOneAdam"), id="few")
MANY = pytest.param(12, tuple(MAKE), id="many")
ALL = pytest.param(45, tuple(MAKE), id="all")
OF_RANKS = [pytest.param(2, ("OneBitLamb",), id="few"), pytest.param(4, tuple(MAKE), id="many")]


def total_of(title: str, seen: dict[str, Counter[str]]) -> Counter[str]:
    interrupts.show(title, seen)
    return sum(seen.values(), Counter[str]())


@pytest.mark.long(but=("few-KeyboardInterrupt", "few-MemoryError", "few-StopError", "few-Ctrl-C"))
@pytest.mark.parametrize("what", MOMENTS)
@pytest.mark.parametrize(("count", "names"), [FEW, MANY])
def test_what_stops_a_step_at_a_line_leaves_a_whole_one_or_none(count, names, what):
    trials = {name: (interrupts.trial(name, seed, MOMENTS[what]) for seed in range(count)) for name in names}
    total = total_of(f"{what} at a line", {name: Counter(verdicts) for name, verdicts in trials.items()})
    assert total[HALF] == 0
    assert total[WHOLE] + total[NOTHING] + total[CLOSED] * (what != "Ctrl-C") == count * len(names)


@pytest.mark.long(but=1, full=True)
@pytest.mark.parametrize(("count", "names"), [FEW, ALL])
def test_ctrl_c_at_any_time_leaves_no_half_step(count, names):
    total = total_of("Ctrl-C at a time", {name: interrupts.at_random_times(name, count, count) for name in names})
    assert total.total() == count * len(names)
    assert total[HALF] == 0
    assert total[CLOSED] <= 0.05 * total.total()


def _strike(rank: int, transport: Any, name: str, seed: int, what: str) -> str:
    return interrupts.trial(name, seed, MOMENTS[what], rank, rank == 0, process_group=transport)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("count", "names"), OF_RANKS)
def test_ranks_stay_equal_after_an_interrupt_or_none_goes_on(count, names):
    seen: dict[str, Counter[str]] = {}
    for name in names:
        pairs = [simulate(_strike, 2, name, seed, "KeyboardInterrupt") for seed in range(count)]
        assert all((one == CLOSED) == (other == CLOSED) for one, other in pairs), pairs
        seen[name] = Counter(verdict for pair in pairs for verdict in pair)
    assert total_of("one of two ranks", seen)[HALF] == 0


def _strike_by_signal(rank: int, world_size: int, count: int, name: str) -> Counter[str]:
    group = torch.distributed.group.WORLD
    return Counter(_strike(rank, group, name, seed, "Ctrl-C") for seed in range(count))


@pytest.mark.long(but=1, full=True)
@pytest.mark.parametrize(("count", "names"), OF_RANKS)
def test_ctrl_c_on_one_of_two_processes_stops_none(count, names):
    seen = {name: run_ranks(_strike_by_signal, 2, count, name)[0] for name in names}
    total = total_of("Ctrl-C, two processes", seen)
    assert total[WHOLE] + total[NOTHING] == count * len(names)


class _Hangs(LocalTransport):
    """A transport whose collectives press Ctrl-C so many times."""

    presses = 0

    def _call(self, collective: str, nbytes: int, *tensors: Any) -> None:
        for _ in range(self.presses):
            ctrl_c()
        super()._call(collective, nbytes, *tensors)


def test_a_second_ctrl_c_does_not_wait_and_closes_the_optimizer():
    params, transport = model(), _Hangs()
    optimizer = MAKE["OneBitAdam"](params, serve_alone=True, process_group=transport)
    take_steps(optimizer, params, range(2))
    give_gradients(params, 2)
    transport.presses = 2
    with pytest.raises(KeyboardInterrupt) as stopped:
        optimizer.step()
    if hasattr(stopped.value, "__notes__"):
        assert "can't go on" in stopped.value.__notes__[0]
    with pytest.raises(CollectiveError, match=r"interrupted.*Load a checkpoint"):
        optimizer.state_dict()
    transport.presses = 0
    optimizer.load_state_dict(AdamW(params).state_dict())
    optimizer.step()


def _wait_for(number: int, seconds: float) -> None:
    with SignalsWait():
        signal.raise_signal(number)
        time.sleep(seconds)


def test_who_has_pressed_ctrl_c_is_told_what_it_waits_for(capfd, monkeypatch):
    monkeypatch.setattr("fusedonebit.core.interrupts.TOLD_AFTER", 0.01)
    with pytest.raises(KeyboardInterrupt):
        _wait_for(signal.SIGINT, 0.1)
    assert "Ctrl-C again stops now" in capfd.readouterr().err


def test_an_alarm_ends_what_hangs(monkeypatch):
    monkeypatch.setattr("fusedonebit.core.interrupts.PATIENCE", 0.01)
    before = signal.signal(signal.SIGALRM, lambda *_: stop(StopError)())
    try:
        began = time.monotonic()
        with pytest.raises(StopError):
            _wait_for(signal.SIGALRM, 20)
        assert time.monotonic() - began < 15
    finally:
        signal.signal(signal.SIGALRM, before)


def test_handlers_are_the_users_again_after_a_step():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        params = model()
        optimizer = MAKE["AdamW, ours"](params)
        give_gradients(params, 0)
        with at_line(30, lambda: os.kill(os.getpid(), signal.SIGTERM)):
            optimizer.step()
        assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is before[0]
    finally:
        signal.signal(signal.SIGTERM, before[1])


def test_other_threads_handle_no_signals():
    params = model()
    optimizer = MAKE["AdamW, ours"](params)
    thread = threading.Thread(target=take_steps, args=(optimizer, params, range(3)))
    thread.start()
    thread.join()
    assert optimizer.stats()["step"] == 3


@pytest.mark.long(but=3)
@pytest.mark.parametrize("name", MAKE)
def test_a_checkpoint_is_loaded_wholly_or_not_at_all(name):
    params = model()
    optimizer = MAKE[name](params)
    take_steps(optimizer, params, range(4))
    saved, there = optimizer.state_dict(), interrupts.values(params)
    copies = model()
    again = MAKE[name](copies)
    take_steps(again, copies, range(1))
    with at_line(-1, ctrl_c) as lines:
        again.load_state_dict(saved)
    for share in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97):
        copies = model()
        again = MAKE[name](copies)
        take_steps(again, copies, range(1))
        with pytest.raises(KeyboardInterrupt), at_line(int(share * lines[0]), stop(KeyboardInterrupt)):
            again.load_state_dict(saved)
        if again.frame.steps.broken:
            with pytest.raises(CollectiveError, match=r"load_state_dict\(\) was interrupted"):
                again.step()
            again.load_state_dict(saved)
            with torch.no_grad():
                for copy, part in zip(copies, there.split([p.numel() for p in params]), strict=True):
                    copy.copy_(part)
            give_gradients(copies, 4)
            give_gradients(params, 4)
            again.step()
            assert again.stats()["step"] == 5
        else:
            assert again.stats()["step"] in (1, 4)
            take_steps(again, copies, range(1, 2))


def test_a_step_that_had_begun_when_it_was_saved_is_begun_once():
    def construct(params: list[Any]) -> Any:
        return ONEBIT["onebit-adam-living"](params, freeze_step=2, guard="off")

    params, copies = model(), model()
    optimizer, again = construct(params), construct(copies)
    take_steps(optimizer, params, range(15))
    optimizer.begin_step()  # as DDP's hook does, in a backward pass that is interrupted
    again.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for copy, p in zip(copies, params, strict=True):
            copy.copy_(p)
    take_steps(optimizer, params, range(15, 25))
    take_steps(again, copies, range(15, 25))
    assert torch.equal(interrupts.values(params), interrupts.values(copies))


@pytest.mark.long(but=2)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.9])
def test_saving_by_half_is_no_state(share):
    params = model()
    optimizer = MAKE["OneBitAdam"](params)
    take_steps(optimizer, params, range(4))
    run = interrupts.uninterrupted_alone("OneBitAdam")[0]
    with at_line(-1, ctrl_c) as lines:
        optimizer.state_dict()
    with pytest.raises(StopError), at_line(int(share * lines[0]), stop(StopError)):
        optimizer.state_dict()
    if optimizer.frame.steps.broken:
        with pytest.raises(CollectiveError, match="interrupted"):
            optimizer.state_dict()
        return
    take_steps(optimizer, params, range(4, interrupts.STEPS))
    assert torch.equal(interrupts.values(params), run[-1])


def test_released_gradients_update_whole_or_the_optimizer_closes():
    verdicts = Counter[str]()
    for share in (0.02, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95):
        params = [torch.nn.Parameter(torch.ones(600)) for _ in range(2)]
        optimizer = AdamW(params, wire=Wire(release_gradients=True))

        def backward(params: list[Any] = params) -> None:
            sum((p * p).sum() for p in params).backward()

        backward()
        optimizer.step()
        with at_line(-1, ctrl_c) as lines:
            backward()
        stopped = False
        while not stopped:  # some passes are shorter, as tensors lie where they have lain
            optimizer.step()
            went = [p.detach().clone() for p in params]
            try:
                with at_line(int(share * lines[0]), stop(StopError)) as lines:
                    backward()
            except StopError:
                stopped = True
        if optimizer.frame.steps.broken:
            with pytest.raises(CollectiveError, match="interrupted"):
                optimizer.step()
            verdicts[CLOSED] += 1
            continue
        moved = [not torch.equal(p, before) for p, before in zip(params, went, strict=True)]
        kept = [p.grad is not None for p in params]
        assert not any(m and k for m, k in zip(moved, kept, strict=True))
        verdicts[NOTHING] += 1
    print(verdicts)
    assert set(verdicts) == {NOTHING, CLOSED}


def test_ctrl_c_within_no_grad_switches_gradients_on_again():
    def interrupt(frame: Any, event: str, _: Any) -> Any:
        if event == "return" and frame.f_code.co_filename.endswith("grad_mode.py") and not torch.is_grad_enabled():
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return interrupt

    for name in MAKE:
        params = model()
        optimizer = MAKE[name](params)
        give_gradients(params, 0)
        sys.settrace(interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        sys.settrace(None)
        assert torch.is_grad_enabled()
        optimizer.step()


@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb"])
def test_a_renewal_that_fails_midway_closes_the_optimizer(name, monkeypatch):
    params = model()
    optimizer = ONEBIT[f"{name}-living"](params, freeze_step=2, guard="off")
    take_steps(optimizer, params, range(3))
    reducer, renew = optimizer.algorithm.exchange.reducer, type(optimizer.algorithm.exchange.reducer).renew

    def fail(*arguments: Any) -> None:
        renew(reducer, *arguments)
        raise StopError

    monkeypatch.setattr(reducer, "renew", fail)
    with pytest.raises(StopError):
        take_steps(optimizer, params, range(3, 9))
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="StopError"):
        take_steps(optimizer, params, range(9, 10))
