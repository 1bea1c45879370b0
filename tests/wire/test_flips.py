"""One bit is flipped in what one rank receives: all ranks say so in the next exchange, or have the same to the end.

Every optimizer is run to the end once for each flip, in each kind of message that it sends. A verdict is

    found    every rank has raised OutOfStepError, or what ranks raise where one can't go on
    equal    nobody has, and parameters and all state that ranks have in common are bit-identical on all
    parted   anything else: ranks differ, or some have raised and others have not
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from optimizers import by_name
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import (
    AbortedStepError,
    AdamW,
    CollectiveError,
    DisagreementError,
    Lamb,
    MarsitAdam,
    MarsitSGD,
    OneBitAdam,
    OneBitLamb,
    OneBitLion,
    OutOfStepError,
    ZeroOneAdam,
)
from fusedonebit.comm import SimulatedGroup
from fusedonebit.comm.simulated import SimulatedTransport
from fusedonebit.comm.transport import Pending, Waiting
from fusedonebit.optim.policies import DoublingRounds, DoublingVariance, EveryStep, FixedRounds

SIZES = (300, 5, 700, 40)
TOLD = (OutOfStepError, AbortedStepError, CollectiveError, DisagreementError)
OFTEN: dict[str, Any] = {"variance": "shared", "warmup": 3, "guard": "off"}
FROZEN: dict[str, Any] = {"freeze_step": 3, "guard": "off"}
UNDIVIDED: dict[str, Any] = {"precondition": False}


class Case(NamedTuple):
    """An optimizer with settings, on so many ranks; ``inside`` of a node, where there are two levels.

    Bits are flipped in all but the last steps, ``after`` which ranks have met again.
    """

    kind: Any
    settings: dict[str, Any]
    ranks: int = 2
    steps: int = 10
    inside: int = 1
    scaler: bool = False
    after: int = 2


CASES = {
    "AdamW": Case(AdamW, {}, 3, 6),
    "AdamW, clips": Case(AdamW, {"max_grad_norm": 1.0}, 4, 6),
    "Lamb": Case(Lamb, {}, 2, 6),
    "1-bit Adam": Case(OneBitAdam, OFTEN, 3),
    "1-bit Adam, undivided": Case(OneBitAdam, OFTEN | UNDIVIDED),
    "1-bit Adam, frozen": Case(OneBitAdam, FROZEN),
    "1-bit Adam, ternary": Case(OneBitAdam, OFTEN | {"ternary": True}),
    "1-bit Adam, buckets": Case(OneBitAdam, OFTEN | {"buckets": 3}),
    "1-bit Adam, overlap": Case(OneBitAdam, OFTEN | {"buckets": 2, "overlap": True}),
    "1-bit Adam, two levels": Case(OneBitAdam, OFTEN, 4, inside=2),
    "1-bit Adam, clips, scaler": Case(OneBitAdam, OFTEN | {"max_grad_norm": 1.0}, scaler=True),
    "1-bit Adam, state in codes": Case(OneBitAdam, OFTEN | {"state": "8bit"}),
    "1-bit Adam, warms up again": Case(OneBitAdam, OFTEN | {"refuse_every": 3, "rewarm_steps": 10}, steps=18),
    "1-bit LAMB": Case(OneBitLamb, {"freeze_step": 3, "guard": "off"}),
    "1-bit LAMB, not adaptive": Case(OneBitLamb, {"freeze_step": 3, "guard": "off", "adaptive": False}),
    "1-bit LAMB, living": Case(OneBitLamb, OFTEN),
    "0/1 Adam": Case(ZeroOneAdam, {"sync_policy": EveryStep()}),
    "0/1 Adam, rounds": Case(ZeroOneAdam, {"sync_policy": FixedRounds(2)}, steps=12, after=4),
    "0/1 Adam, shared": Case(
        ZeroOneAdam,
        {"variance_policy": DoublingVariance(2), "sync_policy": DoublingRounds(1, 4, most=2)},
        steps=15,
        after=4,
    ),
    "0/1 Adam, shared, scaler": Case(
        ZeroOneAdam, {"variance_policy": DoublingVariance(2), "sync_policy": EveryStep()}, scaler=True
    ),
    "MarsitSGD": Case(MarsitSGD, {"full_precision_every": 3}, 3),
    "MarsitSGD, torus": Case(MarsitSGD, {"full_precision_every": 4, "topology": "torus"}, 4),
    "MarsitSGD, two levels": Case(MarsitSGD, {"full_precision_every": 3}, 4, inside=2),
    "MarsitAdam, owner": Case(MarsitAdam, {"full_precision_every": 4, "topology": "owner"}, 3),
    "MarsitAdam, rounds": Case(MarsitAdam, {"full_precision_every": 2, "local_steps": 2}, steps=14, after=4),
    "MarsitAdam, clips, scaler": Case(MarsitAdam, {"full_precision_every": 3, "max_grad_norm": 1.0}, scaler=True),
    "Lion, majority": Case(OneBitLion, {}, 3, 6),
    "Lion, mean": Case(OneBitLion, {"aggregation": "mean"}, 3, 6),
}

KINDS = {
    ("averaging", "average"): "sum of gradients",
    ("allreduce", "send"): "messages",
    ("allreduce", "gather"): "messages",
    ("parted", "send"): "messages of buckets",
    ("parted", "gather"): "messages of buckets",
    ("parted", "receive"): "messages inside a node",
    ("partition", "_average"): "gradients inside a node",
    ("shared_squares", "exchange"): "squares",
    ("parted", "_gathered_sums"): "squares inside a node",
    ("own_variance", "follow"): "level",
    ("scaling", "agree"): "norms and infs",
    ("allreduce", "take_residuals"): "residuals",
    ("parted", "take_residuals"): "residuals",
    ("agreement", "_gather_rows"): "next rounds",
    ("multi_hop", "_reduce_scatter"): "signs, on hops",
    ("multi_hop", "_all_gather"): "signs, finished",
    ("multi_hop", "_gather_owned"): "signs, of owners",
    ("multi_hop", "_average"): "sum of updates",
    ("rounds", "_gather_headers"): "headers alone",
    ("rounds", "_gather_inside"): "round inside a node",
}
"""What is sent, by the file and the function that send it."""


@dataclass
class Flip:
    """Where a bit is flipped: in which message of a rank, in which byte, and which of that."""

    rank: int
    message: int
    byte: int
    bit: int


Kind = tuple[str, int, int]
"""What was received, its bytes, and how many messages these are."""


class Heard:
    """Follows what one rank receives, and flips a bit of it when told; numbers messages from the first step on."""

    def __init__(self, rank: int, flip: Flip | None) -> None:
        self.flip = flip if flip is not None and flip.rank == rank else None
        self.kinds: list[Kind] = []
        self.listens, self.before = False, 0

    def receive(self, received: Tensor) -> None:
        if not self.listens:
            return
        if self.flip is not None and self.flip.message == len(self.kinds):
            data = received.detach().view(torch.uint8).view(-1)
            data[self.flip.byte % len(data)] ^= 1 << self.flip.bit
        self.kinds.append((_kind(), received.nbytes, len(received) if received.dim() > 1 else 1))


def _kind() -> str:
    """Name the message that is being received by the function that has asked for it."""
    frame = sys._getframe(2)
    while True:
        place = Path(frame.f_code.co_filename).stem, frame.f_code.co_name
        if place in KINDS:
            return KINDS[place]
        assert frame.f_back is not None, "a message that this test does not know"
        frame = frame.f_back


class Flipping(SimulatedTransport):
    """A simulated rank, or its place among some ``members`` of the group, that may receive a wrong bit."""

    def __init__(self, group: SimulatedGroup, rank: int, heard: Heard, members: range | None = None) -> None:
        self._members = range(group.world_size) if members is None else members
        super().__init__(group, self._members.index(rank))
        self.world_size, self._place, self._heard = len(self._members), rank, heard

    def _offered(self, what: str, sent: Tensor, alike: bool = True) -> list[Tensor]:
        own, self.rank = self.rank, self._place
        try:
            offered = super()._offered(what, sent, alike and len(self._members) == self.group.world_size)
        finally:
            self.rank = own
        return [offered[member] for member in self._members]

    def _call(self, collective: str, nbytes: int, *tensors: Tensor) -> None:
        super()._call(collective, nbytes, *tensors)
        self._heard.receive(tensors[0])

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Pending:
        pending = super().exchange(received, source, sent, destination)

        def wait() -> None:
            pending.wait()
            self._heard.receive(received)

        return Waiting(wait)


class Ended(NamedTuple):
    """How a rank ended: what it has raised, what all ranks must have in common, and which messages it has received."""

    raised: list[str]
    state: dict[str, Tensor]
    kinds: list[Kind]


def in_common(optimizer: Any) -> dict[str, Tensor]:
    """Return parameters, counts and whatever else is no rank's own, in memory of its own."""
    kept = [each for each in optimizer.contents.kept() if each.wanted and not each.of_rank]
    told = {each.name: each.tensor for each in kept if each.name != "anchor"}
    told |= {f"parameter {i}": p for i, p in enumerate(optimizer.frame.parameters.dense)}
    told |= {"updates": optimizer.frame.steps.updates, "own_steps": optimizer.frame.steps.of_each}
    return {name: tensor.detach().clone() for name, tensor in told.items()}


def train(case: Case, group: SimulatedGroup, rank: int, flip: Flip | None) -> Ended:
    """Take all steps, or as many as this rank can."""
    heard = Heard(rank, flip)
    settings = dict(case.settings)
    if case.inside > 1:
        nodes, node = case.ranks // case.inside, rank // case.inside
        across = range(rank % case.inside, case.ranks, case.inside)
        settings["hierarchy"] = [
            Flipping(group, rank, heard, members)
            for members in (across, range(node * case.inside, (node + 1) * case.inside))
        ]
        assert len(across) == nodes
    generator = torch.Generator().manual_seed(7)
    params = [Parameter(torch.randn(n, generator=generator)) for n in SIZES]
    how = {"lr": 1e-2, "block_size": 128, "process_group": Flipping(group, rank, heard)}
    optimizer = by_name(case.kind)(params, **how, **settings)
    heard.listens = True
    raised = []
    for step in range(case.steps):
        heard.before = len(heard.kinds) if step == case.steps - case.after else heard.before
        if case.scaler:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        generator.manual_seed(100 * step + rank)
        # The second tensor's gradient one rank lacks, the last one's in some steps all.
        used = [p for i, p in enumerate(params) if not (i == 1 and rank == 0) and not (i == 3 and step % 3 == 2)]
        loss = torch.stack([(p * torch.randn(len(p), generator=generator)).sum() for p in used]).sum()
        try:
            loss.backward()
            optimizer.step()
        except TOLD as error:
            raised.append(f"{type(error).__name__}: {error}")
            if optimizer.frame.steps.broken or isinstance(error, CollectiveError):
                break
        optimizer.zero_grad()
    return Ended(raised, in_common(optimizer), heard.kinds[: heard.before])


def run(case: Case, flip: Flip | None = None) -> list[Ended]:
    """Train on all ranks."""
    group = SimulatedGroup(case.ranks, timeout=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return group.run(lambda rank, _: train(case, group, rank, flip))


def verdict(ends: list[Ended]) -> str:
    """Say how a run ended; of one that parted with what differs."""
    raised = [bool(end.raised) for end in ends]
    if all(raised):
        return "found"
    differ = [
        name
        for name, first in ends[0].state.items()
        if any(not torch.equal(_bits(first), _bits(end.state[name])) for end in ends[1:])
    ]
    if not any(raised) and not differ:
        return "equal"
    return f"parted: {', '.join(differ)}; raised on {[i for i, each in enumerate(raised) if each]}"


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.dim() else x.view(1).view(torch.uint8)


def flips_of(case: Case, ends: list[Ended], seed: str, count: int) -> dict[str, list[Flip]]:
    """Choose so many flips in each kind of message: by turns in the first 48 bytes of a message, last, and anywhere."""
    chosen = random.Random(seed)
    found: dict[str, list[Flip]] = defaultdict(list)
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank, end in enumerate(ends):
        for message, (kind, *_) in enumerate(end.kinds):
            places[kind].append((rank, message))
    for kind, where in places.items():
        for turn in range(count):
            rank, message = chosen.choice(where)
            _, nbytes, rows = ends[rank].kinds[message]
            byte = (
                nbytes // rows * chosen.randrange(rows) + chosen.randrange(min(48, nbytes // rows)),
                nbytes - 1 - chosen.randrange(min(48, nbytes)),
                chosen.randrange(nbytes),
            )[turn % 3]
            found[kind].append(Flip(rank, message, byte, chosen.randrange(8)))
    return found


def flip_all(names: Iterable[str], count: int) -> int:
    """Flip so many bits in each kind of message of each case; print what became of them, and return how many.

    AssertionError if any has parted ranks.
    """
    table: dict[str, Counter[str]] = defaultdict(Counter)
    parted = []
    for name in names:
        intact = run(CASES[name])
        assert verdict(intact) == "equal", f"{name}, of which no bit was flipped: {verdict(intact)} {intact[0].raised}"
        for kind, flips in flips_of(CASES[name], intact, name, count).items():
            for flip in flips:
                said = verdict(run(CASES[name], flip))
                table[kind][said.partition(":")[0]] += 1
                parted += [f"{name}, {kind}: {flip}: {said}"] * said.startswith("parted")
    print(f"{'kind of message':26}{'flips':>7}{'found':>7}{'equal':>7}{'parted':>8}")
    for kind, ends in [*table.items(), ("all", sum(table.values(), Counter()))]:
        print(f"{kind:26}{ends.total():7}{ends['found']:7}{ends['equal']:7}{ends['parted']:8}")
    assert not parted, "\n".join(parted)
    return sum(ends.total() for ends in table.values())


def test_a_flipped_bit_is_found_or_parts_no_ranks_in_a_sample():
    flip_all(("1-bit Adam", "0/1 Adam", "MarsitSGD, two levels"), 1)


@pytest.mark.long
@pytest.mark.timeout(1800)  # some minutes where nothing else runs
def test_no_flipped_bit_of_400_parts_ranks_unnoticed(capsys):
    with capsys.disabled():
        print()
        assert flip_all(CASES, 5) >= 400
