"""Gradients of all workers from a traced graph: those of the function itself, bit by bit, whatever the seed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.lab.gradients import Which, gradients, untraced
from benchmarks.lab.tasks import TASKS

WORKERS = 4


@pytest.mark.long(but=["policy-together", "recsys-apart"], full=True)
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("task", TASKS)
def test_a_traced_graph_has_its_functions_bits_on_another_seed(task: str, apart: bool) -> None:
    for seed, each in ((0, 1), (1, 1), (1, 2)):  # it is traced on the first, and for another batch anew
        trial, draw = TASKS[task].make(seed), torch.Generator().manual_seed(seed)
        drawn = [trial.batch(draw, each * TASKS[task].batch_size // WORKERS, 0.7) for _ in range(WORKERS)]
        batches = tuple(map(torch.stack, zip(*drawn, strict=True)))
        params = [{name: p.detach() for name, p in model.named_parameters()} for model in trial.models]
        if apart:
            params = [
                {name: torch.stack([p + w / 100 for w in range(WORKERS)]) for name, p in each.items()}
                for each in params
            ]
        for player in range(len(params)):
            which = Which(task, player, apart)
            found, losses = gradients(which, trial, params, batches)
            expected, expected_losses = untraced(which, trial)(params[player], params, batches)
            assert torch.equal(losses, expected_losses)
            assert found.keys() == expected.keys()
            for name, each in expected.items():
                torch.testing.assert_close(found[name], each, rtol=0.0, atol=0.0)
            assert losses.isfinite().all()
