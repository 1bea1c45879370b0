"""What all ranks must have in common they compare: what they received in the next step, the rest every 64 steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from observe import train
from optimizers import MAKE
from ranks import simulate
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import OutOfStepError, Wire, ZeroOneAdam
from fusedonebit.comm import SimulatedGroup
from fusedonebit.comm.simulated import SimulatedTransport
from fusedonebit.core.frame import COMPARED_EVERY
from fusedonebit.optim.policies import EveryStep, FixedRounds
from fusedonebit.triton_kernels import using

SIZES = (300, 5, 700)
Change = Callable[[Any], None]


def steps_until_told(name: str, change: Change | None, at: int, count: int) -> list[int]:
    """Change something on rank 1 before a step; return, of each rank, the step that has told of it, -1 if none has."""

    told: list[str] = []

    def run(rank: int, transport: Any) -> int:
        generator = torch.Generator().manual_seed(7)
        params = [Parameter(torch.randn(n, generator=generator)) for n in SIZES]
        rounds = {"sync_policy": FixedRounds(2)} if name == "ZeroOneAdam" else {}
        optimizer = MAKE[name](params, lr=1e-3, block_size=128, process_group=transport, **rounds)
        for step in range(1, count + 1):
            generator.manual_seed(10 * step + rank)
            for i, p in enumerate(params):
                p.grad = None if step % 5 == i else torch.randn(len(p), generator=generator)
            if step == at and rank == 1 and change is not None:
                change(optimizer)
            try:
                optimizer.step()
            except OutOfStepError as error:
                told.append(str(error))
                return step
        assert all(torch.isfinite(p).all() for p in params)
        return -1

    steps = simulate(run, 2)
    assert all("digest of the last synchronisation" in text for text in told)
    return steps


def count_once_more(optimizer: Any) -> None:
    optimizer.frame.steps.updates += 1


@pytest.mark.parametrize("name", MAKE)
def test_another_update_count_on_one_rank_raises_on_all_at_once(name):
    first, second = steps_until_told(name, count_once_more, 12, 20)
    assert first == second
    assert 12 <= first <= 12 + 3


def change_parameter(optimizer: Any) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["params"][2][17] *= 1 + 2**-22


def change_variance(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][2]]["exp_avg_sq"][17] *= 1.5


def change_steps(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][2]]["step"] += 1


CHANGES = {"a parameter": change_parameter, "its variance": change_variance, "its number of steps": change_steps}
NO_COMMON_VARIANCE = ("ZeroOneAdam, own", "MarsitSGD", "MarsitAdam", "OneBitLion")


@pytest.mark.long(but=4)
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("name", MAKE)
def test_a_change_on_one_rank_raises_on_all_within_64_steps(name, what):
    if what == "its variance" and name in NO_COMMON_VARIANCE:
        pytest.skip("each worker has a variance of its own, or none")
    at = COMPARED_EVERY - 5
    first, second = steps_until_told(name, CHANGES[what], at, COMPARED_EVERY + 6)
    assert first == second
    assert at <= first <= COMPARED_EVERY + 4


@pytest.mark.long(but=2)
@pytest.mark.parametrize("name", MAKE)
def test_nothing_is_told_where_nothing_was_changed(name):
    assert steps_until_told(name, None, 0, COMPARED_EVERY + 6) == [-1, -1]


@pytest.mark.parametrize("name", MAKE)
def test_new_and_stepped_ranks_load_one_checkpoint_and_go_on(name):
    def run(rank: int, transport: Any) -> None:
        params = [Parameter(torch.ones(n)) for n in SIZES]
        optimizer = MAKE[name](params, lr=1e-3, block_size=128, process_group=transport)
        train(optimizer, rank, range(2))
        saved, values = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
        train(optimizer, rank, range(2, 3))
        with torch.no_grad():
            torch._foreach_copy_(params, values)
        another = MAKE[name](params, lr=1e-3, block_size=128, process_group=transport)  # which all ranks make together
        optimizer = another if rank == 0 else optimizer
        optimizer.load_state_dict(saved)
        train(optimizer, rank, range(2, 5))

    simulate(run, 2)


# ---------------------------------------------------------------- what they have received


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
}


def from_deepspeed(
    params: list[Parameter], *, process_group: Any, lr: float, block_size: int, **given: int
) -> ZeroOneAdam:
    config = {"lr": lr, "var_update_scaler": 2, **given}
    return ZeroOneAdam.from_deepspeed(params, config, process_group=process_group, wire=Wire(block_size=block_size))


def take_steps(name: str, rank: int, transport: Any, count: int, spoil: Callable[[int, Tensor], Tensor]) -> None:
    kind, options = KINDS[name]
    generator = torch.Generator().manual_seed(7)
    params = [Parameter(torch.randn(n, generator=generator)) for n in (300, 0, 5, 700)]
    make = from_deepspeed if kind == "from_deepspeed" else MAKE[kind]
    optimizer = make(params, process_group=transport, lr=1e-3, block_size=128, **options)
    for step in range(count):
        loss = sum((p * torch.randn(len(p), generator=generator)).sum() for p in params) * (1 + rank)
        spoil(step, loss).backward()
        optimizer.step()
        optimizer.zero_grad()


class Damaging(SimulatedTransport):
    """Changes a bit of what this rank gathers, when told which: a byte of the last message, from its end or start."""

    at: int | None = None

    def all_gather(self, gathered: Tensor, sent: Tensor) -> None:
        super().all_gather(gathered, sent)
        if self.at is not None and gathered.dtype == torch.uint8:
            gathered[-1, self.at] ^= 0x10
            self.at = None


PLACES = pytest.mark.parametrize("place", [28, 32, 48, -1], ids=["a norm", "an absent tensor", "a scale", "a sign"])


def check_told(name: str, place: int, skips: bool) -> None:
    """Flip a bit of what one rank has gathered in its fifth step, which all skip or none."""

    def run(rank: int, _: Any) -> str:
        transport = Damaging(group, rank)

        def spoil(step: int, loss: Tensor) -> Tensor:
            if (rank, step) != (1, 4):
                return loss
            transport.at = place
            return loss * torch.inf if skips else loss

        with pytest.raises(OutOfStepError) as error:
            take_steps(name, rank, transport, 9, spoil)
        return str(error.value)

    group = SimulatedGroup(2)
    for text in group.run(run):
        assert "digest of the last synchronisation" in text


@PLACES
@pytest.mark.parametrize("name", KINDS)
def test_one_ranks_flipped_bit_raises_on_all_in_the_next_step(name, place):
    check_told(name, place, skips=False)


@PLACES
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["1-bit Adam", "1-bit LAMB"])
def test_so_it_does_if_the_step_was_skipped_on_each_backend(name, backend, place):
    with using(backend):
        check_told(name, place, skips=True)
