"""Marsit on a GPU: rounds through the kernels against eager, ranks that stay equal, without waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_runs import Run, assert_equal, without_waiting
from torch import Tensor

from fusedonebit import MarsitAdam, MarsitSGD
from fusedonebit.apps.train.baselines import BaselineSGD
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.triton_kernels import using

KINDS: dict[str, dict[str, Any]] = {
    "ring": {"make": MarsitSGD},
    "torus": {"make": MarsitSGD, "topology": "torus", "weight_decay": 0.1},
    "owner": {"make": MarsitSGD, "topology": "owner", "compensation_limit": None},
    "adam": {"make": MarsitAdam},
    "adam, torus, local steps": {"make": MarsitAdam, "topology": "torus", "local_steps": 3},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
pytestmark = pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")


class Rounds(Run):
    """A run whose optimizer has no freeze."""

    def __init__(self, *arguments: Any, make: Any, **options: Any) -> None:
        def without_freeze(params: list[Tensor], freeze_step: int, **rest: Any) -> torch.optim.Optimizer:
            return make(params, **rest)

        super().__init__(*arguments, make=without_freeze, full_precision_every=5, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_kind
def test_four_ranks_stay_equal_and_kernels_equal_eager(device, shapes, kind, dtype):
    def each(rank: int, transport: Transport) -> tuple[list[Tensor], dict]:
        run = Rounds(device, shapes, rank, transport, dtype, **KINDS[kind])
        return run.steps(0, 18, nan_at=7 if rank == 3 else None), run.optimizer.stats()

    outcomes = []
    for backend in ("plain",) if device.type == "cpu" else ("plain", "triton"):
        with using(backend):
            results = SimulatedGroup(4).run(each)
        for params, stats in results:
            assert_equal(params, results[0][0])
            assert stats["skipped_steps"] == 1
        outcomes.append(results[0][0])
    assert_equal(outcomes[0], outcomes[-1])


@pytest.mark.cuda_only
@every_kind
def test_no_step_of_a_round_waits_for_the_device(device, shapes, kind):
    run = Rounds(device, shapes, **{**KINDS[kind], "topology": "ring"})
    run.steps(0, 16)
    run.set_gradients(99)
    with without_waiting():
        for _ in range(6):
            run.optimizer.step()
    assert run.optimizer.stats()["step"] == 22


@pytest.mark.cuda_only
def test_rounds_over_nccl_on_one_rank_equal_those_without_it(device, shapes, nccl):
    expected = Rounds(device, shapes, make=MarsitSGD).steps(0, 12)
    assert_equal(Rounds(device, shapes, transport=nccl(), make=MarsitSGD).steps(0, 12), expected)


@pytest.mark.cuda_only
@pytest.mark.parametrize("aggregation", ["signsgd", "ef-signsgd", "ssdm"])
def test_the_baselines_run_on_cuda(device, shapes, aggregation):
    def each(rank: int, transport: Transport) -> list[Tensor]:
        run = Run(device, shapes, rank, transport)
        run.optimizer = BaselineSGD(run.params, 1e-2, aggregation=aggregation, process_group=transport)
        return run.steps(0, 5)

    results = SimulatedGroup(3).run(each)
    for params in results:
        assert_equal(params, results[0])
