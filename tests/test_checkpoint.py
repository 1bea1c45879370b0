"""A checkpoint continues bit for bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from checkpoint_runs import SHAPES, STEPS, make, resume, saved_state, step_once
from observe import parameters, through_a_file
from optimizers import ADAM_AND_LAMB, EACH, EACH_ONEBIT, LAMBS, LIVING, ONEBIT, PAPER, construct, skip_refused
from ranks import run_ranks, simulate
from torch.nn import Parameter

from fusedonebit.checkpoint import header_of
from fusedonebit.core.sharding import local


def resume_on_gloo(rank: int, world_size: int, *arguments: Any) -> tuple[bool, bool, str]:
    return resume(rank, None, *arguments)


DTYPES = (torch.float32, torch.bfloat16)
FREEZE = {"freeze_step": 6}
"""Step 2 is skipped: 6 updates are 7 steps, and step 7 is the first compressed one."""
CUTS = (4, 7, 8, 13)
ON_TWO = 2, torch.float32
AUTO = {"freeze_step": "auto", "betas": (0.5, 0.5)}
SCOPED = {"scale_norm": "l1", "block_size": 256}
VARIANTS = [
    ("onebit-lamb", PAPER | {"variant": "deepspeed"}),
    ("onebit-lamb", PAPER | {"momentum_scaling": False}),
    ("onebit-adam", PAPER),
    ("onebit-lamb", {"precondition": True, "eps_inside_sqrt": True}),
    ("onebit-adam", {"ternary": True}),
    ("onebit-lamb", PAPER | {"ternary": True, "scale_norm": "contractive"}),
]
SKIPPED_AT_FIRST = [*((name, {}) for name in ONEBIT), *((name, PAPER) for name in ("onebit-adam", "onebit-lamb"))]
SKIPPED_AT_FIRST += [("onebit-lamb", {"precondition": True})]
"""Nothing but skips so far: what 1-bit LAMB rebuilds the first gradient from is still the warm-up's."""
RESUMED: list[tuple[str, int, torch.dtype, int, dict, tuple[int, ...]]] = [
    *(("onebit-adam", w, dtype, cut, FREEZE, (2, 10)) for w in (1, 2, 4) for cut in CUTS for dtype in DTYPES),
    *(("onebit-lamb", *ON_TWO, cut, FREEZE, (2, 10)) for cut in CUTS),
    *(("onebit-lamb", w, torch.bfloat16, 13, FREEZE, (2, 10)) for w in (1, 4)),
    *(("onebit-lamb-frozen", 2, torch.bfloat16, cut, FREEZE, (2, 10)) for cut in CUTS[1:3]),
    ("lamb", 2, torch.bfloat16, 7, FREEZE, (2, 10)),
    *((name, *ON_TWO, cut, FREEZE | more, (2, 7, 8)) for name, more in SKIPPED_AT_FIRST for cut in (8, 9)),
    *(
        (name, *ON_TWO, 12, FREEZE | SCOPED | {"scale_scope": scope}, (2, 10))
        for name in ("onebit-adam", "onebit-lamb")
        for scope in ("layer", "block")
    ),
    *((name, *ON_TWO, cut, FREEZE | more, (2, 10)) for name, more in VARIANTS for cut in (7, 13)),
    *(("onebit-adam", *ON_TWO, cut, AUTO, (2, 10)) for cut in range(3, 14, 2)),
    *(("onebit-lamb", *ON_TWO, cut, AUTO, (2, 10)) for cut in (5, 9, 13)),
]


@pytest.mark.long(but=6)
@pytest.mark.parametrize(("name", "world_size", "dtype", "cut", "options", "bad"), RESUMED, ids=str)
def test_resuming_continues_bit_for_bit(name, world_size, dtype, cut, options, bad):
    for same_parameters, same_state, phase in simulate(resume, world_size, name, cut, dtype, options, bad):
        assert same_parameters
        assert same_state
        if options is not AUTO:
            assert phase == ("uncompressed" if name == "lamb" else "warmup" if cut < 8 else "compression")


@pytest.mark.long
@ADAM_AND_LAMB
def test_resuming_in_processes_continues_bit_for_bit(name):
    """What is a rank's own is a row of a DTensor there."""
    for result in run_ranks(resume_on_gloo, 2, name, 13, torch.float32, FREEZE):
        assert result == (True, True, "compression")


@pytest.mark.parametrize("name", LAMBS)
@pytest.mark.parametrize("steps", [5, 8, 9])
def test_what_is_told_of_the_layers_is_the_same_after_resuming(name, steps):
    """With ``steps`` 8 the first compressed step, the last one so far, was skipped."""
    straight = construct(name, make(), lr=1e-2, **FREEZE)
    for step in range(steps):
        step_once(straight, 0, step, bad=(2, 7))
    resumed = construct(name, make(), **FREEZE)
    resumed.load_state_dict(through_a_file(straight.state_dict()))
    told, before = (optimizer.stats(layers=True)["layers"] for optimizer in (resumed, straight))
    for layers in (told, before):
        layers.pop("residual_over_momentum", None)  # of the last step that this process has taken
    assert told == before


@ADAM_AND_LAMB
def test_the_automatic_freeze_is_pending_at_some_of_these_cuts(name):
    optimizer = construct(name, make(), lr=1e-2, **AUTO)
    pending = []
    for step in range(STEPS):
        step_once(optimizer, 0, step)
        auto = header_of(optimizer.state_dict())["auto"]
        pending.append(bool(auto["fired"]) and optimizer.phase == "warmup")
    assert any(pending[4:13:4])
    assert optimizer.phase == "compression"


# ---------------------------------------------------------------- what is in it


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    "options",
    [{}, *({"precondition": p, "ternary": t} for p, t in ((True, True), (False, True), (True, False)))],
    ids=str,
)
@EACH_ONEBIT
def test_compressed_checkpoints_hold_exact_dtypes_and_flat_state(name, options):
    skip_refused(name, options)
    saved = run_ranks(saved_state, 2, name, torch.bfloat16, options)
    header = header_of(saved[0])
    ternary, preconditioned = (header["settled"][key] for key in ("ternary", "precondition"))
    numel, blocks = header["line"], header["line"] // header["block_size"]
    momenta = ["exp_avg", "exp_avg_last"] if name == "onebit-lamb" else ["exp_avg"]
    planes = [f"{momentum}_{kind}" for momentum in momenta for kind in ("bits", "nonzero")[: 1 + ternary]]
    lines = dict.fromkeys(planes, (torch.uint8, (1, numel // 8)))
    lines |= {f"{momentum}_scale": (torch.float32, (1, blocks)) for momentum in momenta}
    lines |= {"worker_error": (torch.float32, (2, 1, numel)), "server_error": (torch.float32, (2, 1, numel // 2))}
    lines |= {"rank": (torch.int64, (2, 1, 1))}
    scalars = {"variance_level": (torch.float32, (5,))} if name in LIVING else {}
    lines |= {"worker_sq": (torch.float32, (2, 1, numel))} if scalars else {}
    if name != "onebit-adam-living":
        scalars |= {"layer": (torch.float32, (3,))} | ({} if preconditioned else {"unit": (torch.float32, ())})
    if name == "onebit-lamb-living":
        scalars |= {"update_squares": (torch.float32, ())}
        lines |= {"param_squares": (torch.float32, (1, blocks))}
    for rank, file in enumerate(saved):
        for i, p in enumerate(make()):
            whole = (torch.float32, tuple(p.shape))
            expected = {"step": (torch.float64, ()), "exp_avg_sq": whole}
            expected |= {"exp_avg_sq_fresh": whole} if name == "onebit-lamb" else {}
            expected |= (scalars if name != "onebit-adam" else {}) | (lines if i == 0 else {})
            assert {k: (v.dtype, tuple(v.shape)) for k, v in file["state"][i].items()} == expected
        # Its own rows alone, and as rows they are other than what replicas share.
        own = {name: local(file["state"][0][name]) for name in ("worker_error", "server_error", "rank")}
        assert {len(rows) for rows in own.values()} == {1}
        assert int(own["rank"]) == rank


@EACH
def test_a_checkpoint_of_the_warmup_is_adamws_own(name):
    optimizer = construct(name, make(), freeze_step=100)
    reference = torch.optim.AdamW(make())
    for step in range(6):
        step_once(optimizer, 1, step)
        step_once(reference, 1, step)
    saved = through_a_file(optimizer.state_dict())
    for i in range(len(SHAPES)):
        # What LAMB adds, AdamW passes over.
        assert set(saved["state"][i]) - {"layer", "unit"} == {"step", "exp_avg", "exp_avg_sq"}
    reference.load_state_dict(saved)
    assert reference.state[parameters(reference)[0]]["step"] == 6


@EACH_ONEBIT
def test_files_hold_little_but_the_state(name):
    """``torch.save`` writes whole storages; those of the flat buffers contain the padding between tensors."""
    p = Parameter(torch.randn(300_000))
    optimizer = construct(name, [p, Parameter(torch.randn(17))], freeze_step=1)
    for _ in range(3):
        p.grad = torch.randn(300_000)
        parameters(optimizer)[1].grad = torch.randn(17)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    more = ({"onebit-lamb": 4 + 1 / 8} | dict.fromkeys(LIVING, 4)).get(name, 0)
    ratio = file.tell() / (300_017 * (4 + 4 + 4 + 1 / 8 + more))
    print(f"{name}: bytes of the file, of the state's: {ratio:.4f} (limit 1.02)")
    assert ratio <= 1.02
