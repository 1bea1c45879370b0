"""Sequences of what may happen in a training run, and a rank that goes through one and looks whether promises hold.

A sequence is data: tuples, the same for all ranks, so that hypothesis can make it short and a failure can be copied
into a test. Only what users see is looked at.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from observe import fingerprint, through_a_file
from optimizers import by_name, muon
from ranks import run_ranks, simulate
from rounds import Script
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import Lamb, MarsitAdam, MarsitSGD, OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam

SHAPES = ((40, 5), (7,), (130,))
SCALE = 1024.0
TOO_LARGE = 1.8e19
"""What is larger is no number to an optimizer: its square is beyond float32."""

SCRIPT = Script((0, 0, 1, 3, 1, 0, 2))
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "onebit-adam": by_name(OneBitAdam, lr=1e-2, freeze_step=4, guard="off"),
    "onebit-adam, guarded": by_name(OneBitAdam, lr=1e-2, freeze_step=4),
    "onebit-lamb": by_name(OneBitLamb, lr=1e-2, freeze_step=4, guard="off"),
    "lamb": by_name(Lamb, lr=1e-2),
    "zero-one-adam": by_name(ZeroOneAdam, lr=1e-2, variance_policy=SCRIPT, sync_policy=SCRIPT),
    "marsit-sgd": by_name(MarsitSGD, lr=1e-2, full_precision_every=3),
    "marsit-adam": by_name(MarsitAdam, lr=1e-2, full_precision_every=3, local_steps=2, topology="owner"),
    "onebit-muon": by_name(muon, lr=1e-2),
    "onebit-lion": by_name(OneBitLion, lr=1e-3),
    "onebit-lion, mean": by_name(OneBitLion, lr=1e-3, aggregation="mean"),
}


# ---------------------------------------------------------------- what may happen

EVERYWHERE = -1
VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "denormal": 1e-41, "zero": 0.0}
VALUES |= {f"1e{e}": 10.0**e for e in (10, 18, 19, 20, 25, 38)}


def _one_in(numbers: st.SearchStrategy[int], value: st.SearchStrategy[str]) -> st.SearchStrategy[tuple]:
    return st.tuples(numbers, st.integers(0, len(SHAPES) - 1), value)


def commands(world_size: int) -> st.SearchStrategy[tuple]:
    """One thing that may happen; most are steps."""
    ranks, seeds = st.integers(EVERYWHERE, world_size - 1), st.integers(0, 99)
    plain = st.tuples(st.just("step"), seeds, st.just(()))
    nothing = st.lists(_one_in(ranks, st.just("none")), min_size=1, max_size=3)
    odd = st.lists(_one_in(ranks, st.sampled_from(sorted(VALUES))), min_size=1, max_size=2)
    return st.one_of(
        plain,
        plain,
        st.tuples(st.just("step"), seeds, nothing.map(tuple)),
        st.tuples(st.just("step"), seeds, odd.map(tuple)),
        st.tuples(st.just("scaled"), seeds, st.one_of(st.just(()), _one_in(ranks, st.just("inf")).map(lambda o: (o,)))),
        st.tuples(st.just("lr"), st.sampled_from((0.0, 1e-4, 3e-2))),
        st.tuples(st.just("betas"), st.sampled_from(((0.5, 0.9), (0.9, 0.99), (0.3, 0.999)))),
        st.tuples(st.just("weight_decay"), st.sampled_from((0.0, 0.1))),
        st.tuples(st.just("group"), seeds),
        st.tuples(st.just("resume"), st.booleans()),
    )


def sequences(world_size: int, length: int = 24) -> st.SearchStrategy[list[tuple]]:
    """Of ``commands``."""
    return st.lists(commands(world_size), min_size=6, max_size=length)


# ---------------------------------------------------------------- one rank


def gradients(shapes: list[torch.Size], command: tuple, rank: int) -> list[Tensor | None]:
    """What ``rank``'s backward pass leaves for a step."""
    _, seed, odd = command
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    made: list[Tensor | None] = [torch.randn(shape, generator=generator) for shape in shapes]
    if command[0] == "scaled":
        made = [g * SCALE for g in made if g is not None]
    for where, i, kind in odd:
        if where in (rank, EVERYWHERE):
            if kind == "none":
                made[i] = None
            elif (g := made[i]) is not None:
                g.view(-1)[seed % g.numel()] = VALUES[kind]
    return made


def is_refused(command: tuple, shapes: list[torch.Size], world_size: int) -> bool:
    """Whether a step must come to nothing: on some rank something is no number."""
    all_of = [g for rank in range(world_size) for g in gradients(shapes, command, rank) if g is not None]
    return any(not bool((g.abs() <= TOO_LARGE).all()) for g in all_of)


class Trainee:
    """Parameters and their optimizer."""

    def __init__(self, name: str, groups: list[list[Parameter]], transport: Any) -> None:
        self.name, self.transport, self.groups = name, transport, groups
        self.optimizer = OPTIMIZERS[name]([{"params": group} for group in groups], process_group=transport)

    @property
    def params(self) -> list[Parameter]:
        return [p for group in self.groups for p in group]

    def resumed(self) -> Trainee:
        """A new one that has been given this one's checkpoint."""
        params = [p.detach() for p in self.params]
        saved = through_a_file({"params": params, "optimizer": self.optimizer.state_dict()})
        # Ranks may be within a round: then a new optimizer gets what they had in common at first.
        groups = [[Parameter(torch.zeros_like(p)) for p in group] for group in self.groups]
        other = Trainee(self.name, groups, self.transport)
        for p, values in zip(other.params, saved["params"], strict=True):
            p.data.copy_(values)
        other.optimizer.load_state_dict(saved["optimizer"])
        return other

    def do(self, command: tuple, rank: int) -> str:
        """Returns what was refused, by an error that is documented."""
        kind, *rest = command
        if kind in ("step", "scaled"):
            for p, g in zip(self.params, gradients([p.shape for p in self.params], command, rank), strict=True):
                p.grad = g
            if kind == "scaled":  # as GradScaler does with optimizers that take part in the scaling
                overflow = any(p.grad is not None and not bool(p.grad.isfinite().all()) for p in self.params)
                self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(SCALE), torch.tensor(float(overflow))
            self.optimizer.step()
            if kind == "scaled":
                del self.optimizer.grad_scale, self.optimizer.found_inf
        elif kind == "group":
            added = [Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(rest[0])))]
            try:
                self.optimizer.add_param_group({"params": added})
            except RuntimeError as error:
                if "add_param_group must be called" not in str(error):
                    raise
                return str(error)
            self.groups = [*self.groups, added]
        else:
            for group in self.optimizer.param_groups:
                if kind in group:
                    group[kind] = rest[0]
        return ""

    def look(self) -> dict[str, Any]:
        """What users see; ``local``: parameters may differ between ranks."""
        stats = self.optimizer.stats()
        return {
            "params": fingerprint(self.params),
            "phase": stats["phase"],
            "step": stats["step"],
            "skipped": stats["skipped_steps"],
            "local": bool(stats.get("local_steps", 0)),
            "guarded": self.name.endswith("guarded"),  # its compressed updates may be refused as too large
            "finite": all(bool(p.isfinite().all()) for p in self.params),
        }


def go_through(rank: int, world_size: int, name: str, sequence: list[tuple], transport: Any = None) -> list[dict]:
    """Does what ``sequence`` says; returns what was seen after each command, ``broken`` promises among it."""
    generator = torch.Generator().manual_seed(0)
    seen: list[dict[str, Any]] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first = [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
            trainee, resumed = Trainee(name, [first], transport), None
            before = trainee.look()
            for command in sequence:
                broken: list[str] = []
                if command[0] == "resume":
                    resumed = trainee.resumed()
                    if command[1]:
                        trainee, resumed = resumed, trainee
                    refused = ""
                else:
                    refused = trainee.do(command, rank)
                    if resumed is not None and resumed.do(command, rank) != refused:
                        broken.append("the copy refuses something else")
                after = trainee.look()
                if resumed is not None and resumed.look() != after:
                    broken.append(f"the copy is not the same: {resumed.look()}")
                broken += _check(command, before, after, [p.shape for p in trainee.params], world_size)
                seen.append({"command": command, "refused": refused, "broken": broken} | after)
                before = after
    except Exception:
        seen.append({"command": command, "broken": [traceback.format_exc()]})
    return seen


def _check(command: tuple, before: dict, after: dict, shapes: list[torch.Size], world_size: int) -> list[str]:
    broken = [] if after["finite"] else ["a parameter is no number"]
    if command[0] not in ("step", "scaled"):
        if after["step"] != before["step"] or after["skipped"] != before["skipped"]:
            broken.append(f"counted as a step, before: {before}")
        return broken
    # Within a round ranks do not hear of each other; what a round that is refused takes along is documented.
    if before["local"] or after["local"]:
        return broken
    counts = after["step"] - before["step"], after["skipped"] - before["skipped"]
    if is_refused(command, shapes, world_size):
        if after["params"] != before["params"]:
            broken.append("a skipped step has moved a parameter")
        if counts != (0, 1):
            broken.append(f"a skipped step is counted as {counts} steps and skips")
    elif counts != (1, 0) and not (after["guarded"] and counts == (0, 1)):
        broken.append(f"a step is counted as {counts} steps and skips")
    return broken


# ---------------------------------------------------------------- all ranks


def on_gloo(world_size: int, name: str, sequence: list[tuple]) -> list[list[dict]]:
    """What each rank has seen, on real ranks."""
    return run_ranks(go_through, world_size, name, sequence, group_timeout=30.0)


def simulated(world_size: int, name: str, sequence: list[tuple]) -> list[list[dict]]:
    """What each rank has seen, on simulated ranks."""
    return simulate(lambda rank, transport: go_through(rank, world_size, name, sequence, transport), world_size)


def check(ranks: list[list[dict]]) -> None:
    """That no promise is broken on any rank, and that all ranks have the same parameters where they must."""
    for number, seen in enumerate(zip(*ranks, strict=False)):
        for rank, here in enumerate(seen):
            assert not here["broken"], f"rank {rank}, command {number}, {here['command']}: {here['broken'][0]}"
        for rank, here in enumerate(seen):
            keys = ("phase", "step", "skipped", "local", "refused", *(() if here["local"] else ("params",)))
            told = {key: here[key] for key in keys}
            assert told == {key: seen[0][key] for key in keys}, f"rank {rank} differs after command {number}, {here}"
    assert len({len(seen) for seen in ranks}) == 1
