"""What ranks have received they compare in the next step: every bit, every scale, also where it is skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import MAKE
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import Wire, ZeroOneAdam
from fusedonebit.comm import SimulatedGroup
from fusedonebit.comm.simulated import SimulatedTransport
from fusedonebit.errors import OutOfStepError
from fusedonebit.optim.policies import EveryStep
from fusedonebit.triton_kernels import using
from fusedonebit.triton_kernels.headers import folded

BACKENDS = ("plain", "triton", pytest.param("native", marks=pytest.mark.needs_compiler))
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "1-bit Adam": ("OneBitAdam", {}),
    "ternary": ("OneBitAdam", {"ternary": True, "scale_scope": "block"}),
    "buckets": ("OneBitAdam", {"buckets": 3}),
    "overlap": ("OneBitAdam", {"buckets": 2, "overlap": True}),
    "1-bit LAMB": ("OneBitLamb", {}),
    "0/1 Adam": ("ZeroOneAdam", {"sync_policy": EveryStep()}),
    "DeepSpeed's 0/1 Adam, whose variance lives": ("from_deepspeed", {"var_freeze_step": 100}),
    "DeepSpeed's 0/1 Adam": ("from_deepspeed", {"var_freeze_step": 3}),
    "a majority": ("OneBitLion", {}),
    "a mean": ("OneBitLion", {"aggregation": "mean"}),
    "MarsitSGD": ("MarsitSGD", {"full_precision_every": 0}),
    "MarsitSGD, floats": ("MarsitSGD", {"full_precision_every": 1}),
}


def from_deepspeed(
    params: list[Parameter], *, process_group: Any, lr: float, block_size: int, **given: int
) -> ZeroOneAdam:
    config = {"lr": lr, "var_update_scaler": 2, **given}
    return ZeroOneAdam.from_deepspeed(params, config, process_group=process_group, wire=Wire(block_size=block_size))


def steps(
    name: str, rank: int, transport: Any, count: int, spoil: Any = None, **more: Any
) -> tuple[Any, list[list[bool]]]:
    """Take steps; return the optimizer, and whether after each the digests were those of all that has been gathered."""
    kind, options = KINDS[name]
    generator = torch.Generator().manual_seed(7)
    params = [Parameter(torch.randn(n, generator=generator)) for n in (300, 0, 5, 700)]
    make = from_deepspeed if kind == "from_deepspeed" else MAKE[kind]
    optimizer = make(params, process_group=transport, lr=1e-3, block_size=128, **options | more)
    found = []
    for step in range(count):
        loss = sum((p * torch.randn(len(p), generator=generator)).sum() for p in params) * (1 + rank)
        if spoil is not None:
            loss = spoil(step, loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(as_told(optimizer))
    return optimizer, found


def as_told(optimizer: Any) -> list[bool]:
    """Whether the digests of the reducer's parts are those of all messages, and of updates done before."""
    reducer, skipped = optimizer.algorithm.exchange.reducer, bool(optimizer.algorithm.exchange.reducer.flags)
    updates = int(optimizer.frame.steps.updates) - (not skipped)
    if getattr(reducer, "values", None) is not None:  # floats, and headers that have travelled before
        received = [torch.cat([reducer.values.view(torch.int64), reducer.arrived.heads.view(torch.int64).view(-1)])]
    else:
        received = reducer.gathered.buffer.chunk(len(reducer.verdict.digest))
    return [
        int(folded(digest)) == int(folded(rows.view(torch.int64).sum() + updates))
        for digest, rows in zip(reducer.verdict.digest, received, strict=True)
    ]


LEVELS = "0/1 Adam", "DeepSpeed's 0/1 Adam, whose variance lives"
"""To whose digests a level is added, or a sum comes last."""


@pytest.mark.parametrize("name", [name for name in KINDS if name not in LEVELS])
def test_after_a_step_the_digest_is_of_all_that_was_received(name):
    def run(rank: int, transport: Any) -> list[list[bool]]:
        return steps(name, rank, transport, 6)[1]

    for found in SimulatedGroup(2).run(run):
        assert all(map(all, found[3:]))


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["1-bit Adam", "1-bit LAMB"])
def test_a_skipped_step_counts_as_well(name, backend):
    def run(rank: int, transport: Any) -> tuple[int, list[list[bool]]]:
        def spoil(step: int, loss: Tensor) -> Tensor:
            return loss * (torch.inf if (rank, step) == (1, 4) else 1.0)

        optimizer, found = steps(name, rank, transport, 5, spoil, nonfinite="skip")
        return optimizer.stats()["skipped_steps"], found

    with using(backend):
        for skipped, found in SimulatedGroup(2).run(run):
            assert skipped == 1
            assert all(map(all, found[3:]))


class Damaging(SimulatedTransport):
    """Changes a bit of what this rank gathers, when told which: a byte of the last message, from its end or start."""

    at: int | None = None

    def all_gather(self, gathered: Tensor, sent: Tensor) -> None:
        super().all_gather(gathered, sent)
        if self.at is not None and gathered.dtype == torch.uint8:
            gathered[-1, self.at] ^= 0x10
            self.at = None


@pytest.mark.parametrize("place", [28, 32, 48, -1], ids=["a norm", "an absent tensor", "a scale", "a sign"])
@pytest.mark.parametrize("name", [name for name in KINDS if "Marsit" not in name])
def test_one_ranks_flipped_bit_raises_on_all_in_the_next_step(name, place):
    def run(rank: int, _: Any) -> str:
        transport = Damaging(group, rank)

        def spoil(step: int, loss: Tensor) -> Tensor:
            if (rank, step) == (1, 4):
                transport.at = place
            return loss

        with pytest.raises(OutOfStepError) as error:
            steps(name, rank, transport, 9, spoil)
        return str(error.value)

    group = SimulatedGroup(2)
    for text in group.run(run):
        assert "digest of the last synchronisation" in text
