"""Runs with state of any format, and around a re-warm-up, resume bit for bit, and ranks are alike in each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_runs import make, step_once
from observe import fingerprint, parameters, resumed
from optimizers import EACH, PAPER, UNGUARDED, construct
from ranks import simulate
from rounds import own_state

from fusedonebit.comm import Transport

BF16 = torch.bfloat16
COUNTS = ("phase", "step", "skipped_steps", "freeze_step", "rewarms", "dead_tensors", "dead_coordinates")


def go_on(rank: int, transport: Transport, name: str, dtype: torch.dtype, options: dict, cut: int, steps: int) -> list:
    """Train, and from ``cut`` on also what was saved then; steps 2 and 10 are skipped."""

    def new() -> Any:
        return construct(name, make(dtype), lr=1e-2, process_group=transport, **UNGUARDED | options)

    runs, prints = [new()], []
    for step in range(steps):
        if step == cut:
            runs.append(resumed(runs[0], new()))
        for optimizer in runs:
            step_once(optimizer, rank, step)
        assert len({(o.phase, fingerprint(parameters(o))) for o in runs}) == 1, step
        prints.append(fingerprint(parameters(runs[0])))
    one, other = map(own_state, runs)
    assert one == other
    one, other = ([optimizer.stats().get(key) for key in COUNTS] for optimizer in runs)
    assert one == other
    assert "rewarm_steps" not in options or one[COUNTS.index("rewarms")] >= 1
    return prints


def check(world_size: int, name: str, dtype: torch.dtype, options: dict, cut: int, steps: int = 16) -> None:
    ranks = simulate(go_on, world_size, name, dtype, options, cut, steps)
    assert all(prints == ranks[0] for prints in ranks)
    skipped = 0 if (name, world_size) == ("lamb", 1) else 2  # alone it leaves out elements, and skips no step
    assert len(set(ranks[0])) == steps - skipped


FORMATS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"freeze_step": 6, "frozen_dtype": BF16}) for name in ("onebit-adam", "onebit-lamb")),
    *(
        (name, options | {"state": state})
        for state in ("bf16", "8bit")
        for name, options in (
            ("onebit-adam", {"freeze_step": 6}),
            ("onebit-adam-living", {"warmup": 6}),
            ("onebit-adam", {"freeze_step": 6, "ternary": True}),
            ("onebit-adam", {"freeze_step": 6, "buckets": 2, "scale_scope": "layer"}),
            ("onebit-adam-living", {"warmup": 6, "buckets": 2, "scale_scope": "layer"}),
        )
    ),
    ("onebit-adam", {"freeze_step": 6, "precondition": False, "state": "bf16"}),
]


@pytest.mark.long(but=6)
@pytest.mark.parametrize("cut", [4, 13])
@pytest.mark.parametrize(("name", "options"), FORMATS, ids=str)
def test_state_in_fewer_bits_resumes_bit_for_bit(name, options, cut):
    check(2, name, torch.float32, options, cut)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("cut", [4, 13])
@EACH
def test_stochastic_rounding_resumes_bit_for_bit(name, cut, world_size):
    check(world_size, name, BF16, {"freeze_step": 6, "stochastic_rounding": True}, cut)


# A warm-up of 3 updates, 4 compressed ones, and then a re-warm-up of 10; one of the steps before is skipped.
REWARMS = {"freeze_step": 3, "betas": (0.9, 0.99), "refuse_every": 4, "rewarm_steps": 10}
CUTS = {"before the stretch": 8, "after its first step": 9, "in it": 13, "before the freeze": 19, "after it": 21}


@pytest.mark.long(but=1, full=True)
@pytest.mark.parametrize("where", CUTS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("onebit-adam", {"variance_floor": 0.5}),
        ("onebit-adam", {"freeze_step": "auto", "betas": (0.5, 0.5), "precondition": False}),
        ("onebit-lamb", {"ternary": True}),
        ("onebit-lamb", PAPER),
        ("onebit-lamb-frozen", {"precondition": False}),
    ],
    ids=str,
)
def test_resuming_around_a_re_warm_up_continues_bit_for_bit(name, options, where):
    cut = CUTS[where] + 8 * (options.get("freeze_step") == "auto")  # which freezes so much later
    check(2, name, torch.float32, REWARMS | options, cut, cut + 16)
