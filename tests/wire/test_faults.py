"""A rank that dies, hangs, or sends what it should not: all others raise in time, nothing is half applied, and
training goes on from the last checkpoint as if nothing had happened."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from fault_ranks import DIED, GROUP_TIMEOUT, WORLD_SIZE, Fault, Ranks, make, train
from observe import fingerprint, give_gradients, named
from observe import train as take_steps

from fusedonebit import Lamb
from fusedonebit.comm import Flag, MarsitAllReduce, SimulatedGroup, Transport, Word
from fusedonebit.comm.failure_diagnosis import PATIENCE
from fusedonebit.triton_kernels import FlatLayout

SLACK = 2.0  # of a busy machine
LIMIT = GROUP_TIMEOUT + PATIENCE + SLACK
AT_ONCE = 5  # runs, which mostly wait

POINTS = {
    "onebit-adam": [
        Fault("before the step", 6),
        Fault("compressed, before the all_to_all", 6, "all_to_all"),
        Fault("between all_to_all and all_gather", 6, "all_gather"),
        Fault("after the all_gather, before the update", 6, "all_gather", when="after"),
        Fault("within the warm-up's all_reduce", 2, "all_reduce", when="within"),
    ],
    "ring": [
        Fault("before the step", 6),
        Fault("before the first hop", 6, "exchange"),
        Fault("within the second hop", 6, "exchange", 1, "within"),
        Fault("after the last hop, before the update", 6, "exchange", 5, "after"),
        Fault("within the all_reduce of a full-precision round", 4, "all_reduce", when="within"),
    ],
}
SAVING = Fault("half of a checkpoint written", 5, when="saving")


@cache
def undisturbed(name: str) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        return Ranks(train, name, Path(folder)).results(within=60)


def check_survivor(told: dict[str, Any], victim: int, word: str) -> None:
    """It has raised in time, names step and victim, has applied nothing, and refuses to go on."""
    assert told is not None, "hangs"
    assert told["kind"] == "CollectiveError"
    assert told["waited"] <= LIMIT
    assert f"after {told['step']} updates" in told["message"]
    assert f"Rank {victim} {word}" in told["message"]
    assert "Restart all ranks from the last checkpoint" in told["message"]
    assert told["still"]
    for again in told["later"]:
        assert again == f"CollectiveError: this optimizer can't go on: {told['message']}"


def kill_and_restart(name: str, fault: Fault, victim: int) -> float:
    """One rank is killed; all start again. Returns how long the slowest survivor waited."""
    with TemporaryDirectory() as folder:
        results = Ranks(train, name, Path(folder), fault, victim).results(LIMIT + 30, victim)
        survivors = [told for rank, told in enumerate(results) if rank != victim]
        for told in survivors:
            check_survivor(told, victim, "has died")
        again = Ranks(train, name, Path(folder)).results(within=60)
    assert results[victim] == DIED
    for told, expected in zip(again, undisturbed(name), strict=True):
        assert 0 < told["first"] <= fault.step
        assert told["params"] == again[0]["params"] == expected["params"]
        assert told["state"] == expected["state"]
    return max(told["waited"] for told in survivors)


def kill_each(name: str, faults: Sequence[Fault], victims: Sequence[int]) -> None:
    """Prints how many of the cases went well, and fails with the first that did not."""
    undisturbed(name)
    cases = [(fault, victim) for fault in faults for victim in victims]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        running = [(case, threads.submit(kill_and_restart, name, *case)) for case in cases]
    errors = [run.exception() for _, run in running]
    for ((fault, victim), run), error in zip(running, errors, strict=True):
        told = f"raised within {run.result():.1f} s (limit {LIMIT:g})" if error is None else f"FAILED: {error!r:.300}"
        print(f"{name}: rank {victim} killed {fault.name}: {told}")
    print(f"{name}: {errors.count(None)} of {len(cases)} kills survived, restarted and bit for bit as undisturbed")
    for error in errors:
        if error is not None:
            raise error


def test_a_killed_rank_costs_only_the_steps_since_the_checkpoint():
    kill_each("onebit-adam", [*POINTS["onebit-adam"], SAVING], [1])


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", POINTS)
def test_each_rank_killed_at_each_of_five_points(name):
    kill_each(name, POINTS[name], range(WORLD_SIZE))


@pytest.mark.full
def test_each_rank_killed_while_it_saves():
    kill_each("onebit-adam", [SAVING], range(WORLD_SIZE))


# ---------------------------------------------------------------- hanging ranks, dead stores


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_with(name: str, fault: Fault, victim: int, init: str = "") -> list[Any]:
    with TemporaryDirectory() as folder:
        return Ranks(train, name, Path(folder), fault, victim, init=init).results(
            LIMIT + 30, victim if isinstance(fault.how, str) else None
        )


def test_a_hanging_rank_is_named_by_all_within_the_timeout():
    cases = [
        ("onebit-adam", Fault("hang", 6, "all_gather", how="stop"), 2),
        ("onebit-adam", Fault("hang", 2, "all_reduce", how="stop"), 0),
        ("ring", Fault("hang", 6, "exchange", 1, how="stop"), 3),
    ]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        runs = list(threads.map(lambda case: run_with(*case), cases))
    for (name, fault, victim), results in zip(cases, runs, strict=True):
        for told in results[:victim] + results[victim + 1 :]:
            check_survivor(told, victim, "is stopped")
        waited = max(told["waited"] for rank, told in enumerate(results) if rank != victim)
        print(
            f"{name}: rank {victim} hangs before its {fault.method}; the others waited {waited:.1f} s (limit {LIMIT:g})"
        )


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.full)])
def test_a_store_that_dies_or_hangs_with_its_rank_hides_no_error(how):
    """Rank 0 hosts the store in which the group has met."""
    fault = Fault("store", 6, "all_gather", how=how)
    for told in run_with("onebit-adam", fault, 0, init=f"tcp://127.0.0.1:{free_port()}")[1:]:
        assert told["kind"] == "CollectiveError"
        assert told["waited"] <= LIMIT
        assert "failed (gloo): [" in told["message"]
        assert "the rank that hosts it (mostly 0) may be dead" in told["message"]
        assert told["still"]


# ---------------------------------------------------------------- wrong lengths

LENGTHS = [
    *(("onebit-adam", Fault("", 6, "all_to_all", how=how)) for how in (-16, 16)),
    *(("onebit-adam", Fault("", 6, "all_gather", how=how)) for how in (-16, 16)),
    *(("onebit-adam", Fault("", 2, "all_reduce", how=how)) for how in (-1, 1)),
    *(("ring", Fault("", 6, "exchange", call, how=how)) for call in (0, 4) for how in (-16, 16)),
    *(("ring", Fault("", 4, "all_reduce", how=how)) for how in (-1, 1)),
    *(("owner", Fault("", 6, "all_gather", how=how)) for how in (-16, 16)),
]


def check_lengths(name: str, fault: Fault, results: list[Any]) -> str:
    """No rank goes on: each raises, or is ended by gloo; and those that have come as far have the same parameters."""
    for told in results:
        assert told is not None, "hangs"
        assert told == DIED or told["kind"] in ("CollectiveError", "OutOfStepError"), told
    raised = [told for told in results if told != DIED]
    for told in raised:
        assert told["waited"] <= LIMIT
        assert told["still"]
        assert told["step"] in (fault.step, fault.step + 1)
        assert told["params"] == next(other["params"] for other in raised if other["step"] == told["step"])
    how = [told if told == DIED else f"{told['kind']} at {told['step'] - fault.step:+d}" for told in results]
    return f"{name}: {fault.method} {fault.call} {fault.how:+d}: {', '.join(how)}"


@pytest.mark.long
def test_a_message_of_another_length_is_never_taken_for_whole():
    with ThreadPoolExecutor(AT_ONCE) as threads:
        runs = list(threads.map(lambda case: run_with(*case, victim=1), LENGTHS))
    for (name, fault), results in zip(LENGTHS, runs, strict=True):
        print(check_lengths(name, fault, results))


# ---------------------------------------------------------------- wrong step, wrong layout


def spoil(optimizer: Any, what: str) -> None:
    """Makes this rank send another layout than the others."""
    if what == "layout":
        optimizer.frame.layout.__dict__["fingerprint"] = optimizer.frame.layout.fingerprint ^ 1
    reduce = optimizer.algorithm.exchange.reducer if optimizer.algorithm.exchange else None
    for messages in {getattr(reduce, key, None) for key in ("to_servers", "messages", "_sent")} - {None}:
        messages.words[:, Word.LAYOUT] ^= what == "layout"
    if what == "server's layout":
        reduce.served.words[:, Word.LAYOUT] ^= 1
    if what == "finished layout":
        gather, own = reduce._all_gather, reduce._stages[-1].finished.start

        def gather_spoilt() -> None:
            reduce.messages.words[own, Word.LAYOUT] ^= 1
            gather()

        reduce._all_gather = gather_spoilt


def disagree(rank: int, name: str, steps: int, what: str) -> tuple[str, str, bool]:
    optimizer, params = make("onebit-adam" if name == "lamb" else name, None)
    optimizer = Lamb(params) if name == "lamb" else optimizer
    take_steps(optimizer, rank, range(steps))
    before = fingerprint(params)
    if what != "step" or rank != WORLD_SIZE - 1:  # else it repeats one
        give_gradients(optimizer, rank, steps)
    if rank == WORLD_SIZE - 1:
        spoil(optimizer, what)
    return *named(optimizer.step), before == fingerprint(params)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "steps", "what", "text"),
    [
        ("onebit-adam", 1, "step", "number of steps"),
        ("onebit-adam", 2, "layout", "parameter layout"),
        ("onebit-adam", 6, "step", "7 steps on rank 0, 6 on rank 3 (a rank has skipped or repeated a step()"),
        ("onebit-adam", 6, "layout", "parameter layout"),
        ("onebit-adam", 6, "server's layout", "a message arrived damaged"),
        ("lamb", 2, "step", "number of steps"),
        ("lamb", 2, "layout", "parameter layout"),
        ("ring", 6, "layout", "parameter layout"),
        ("ring", 6, "finished layout", "a message arrived damaged"),
        ("owner", 6, "layout", "parameter layout"),
        ("ring", 4, "layout", "parameter layout"),
        *((topology, 3, "step", "a rank has skipped or repeated a step()") for topology in ("ring", "owner", "torus")),
    ],
)
def test_one_ranks_other_step_or_layout_raises_before_applying(name, steps, what, text):
    averages = name == "ring" and steps == 4
    for kind, message, still in Ranks(disagree, name, steps, what).results(within=60):
        assert kind == ("CollectiveError" if averages else "OutOfStepError")
        assert re.search(r"after \d+ updates", message)
        assert text in message
        assert still


@pytest.mark.parametrize(
    "options", [({"seed": 0}, {"seed": 1}), ({"topology": "ring"}, {"topology": "ring", "seed": 3})]
)
def test_marsit_alone_finds_another_seed_on_one_rank(options):
    def run(rank: int, transport: Transport) -> int:
        where: dict = {"topology": "owner", "full_precision_every": 0} | options[rank]
        reduce = MarsitAllReduce(FlatLayout((300,), 2, 128), transport, **where)
        reduce([torch.randn(300)], step=0.01)
        return int(reduce.flags)

    assert SimulatedGroup(2).run(run) == [Flag.MISMATCH] * 2


# ---------------------------------------------------------------- ranks that end as their scripts do


def count(*arguments: str, within: float) -> str:
    """What ``endings.py`` prints last."""
    script = Path(__file__).parents[1] / "endings.py"
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=within)
    assert "terminate called" not in done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.full
@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"), reason="needs a C compiler: install gcc or clang"
)
def test_ranks_whose_threads_are_late_end_without_an_abort():
    told = count("--late", "--runs", "2", "--ranks", "2", "--steps", "2", within=120)
    assert told == "2 runs of 2 ranks: 0 ended by a signal, 0 with an error"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_forty_runs_of_four_ranks_end_without_an_abort():
    told = count("--runs", "40", within=900)
    assert told == "40 runs of 4 ranks: 0 ended by a signal, 0 with an error"
