"""A checkpoint continues bit for bit."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from observe import fingerprint, observe, parameters, through_a_file
from optimizers import ADAM_AND_LAMB, EACH, EACH_ONEBIT, LAMBS, ONEBIT, PAPER, construct
from ranks import run_ranks, simulate
from torch.nn import Parameter

from fusedonebit import FusedOneBitWarning
from fusedonebit.checkpoint import header_of
from fusedonebit.comm import Transport
from fusedonebit.core.sharding import local

SHAPES = [(33, 40), (7,), (1,), (), (0,), (1500,)]
STEPS = 16


def make(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    params.append(Parameter(torch.randn(6, 5, 4, 3).to(dtype, memory_format=torch.channels_last)))
    params.append(Parameter(torch.randn(21, 8)[::2, ::3].to(dtype)))
    params.append(Parameter(torch.randn(9).to(dtype)))  # never has a gradient
    return params


def step_once(optimizer: torch.optim.Optimizer, rank: int, step: int, bad: tuple[int, ...] = (2, 10)) -> None:
    for i, p in enumerate(parameters(optimizer)[:-1]):
        generator = torch.Generator().manual_seed(1 + rank + 10 * step + 100_000 * i)
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    if step in bad and rank == 0:
        parameters(optimizer)[0].grad[0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        optimizer.step()


def resume(
    rank: int,
    transport: Transport | None,
    name: str,
    cut: int,
    dtype: torch.dtype,
    options: dict,
    bad: tuple[int, ...] = (2, 10),
) -> tuple[bool, bool, str]:
    """Trains straight through, and again from what was saved after ``cut`` steps."""
    straight = construct(name, make(dtype), lr=1e-2, process_group=transport, **options)
    prints = []
    for step in range(STEPS):
        if step == cut:
            params = [p.detach().clone() for p in parameters(straight)]
            saved, phase = through_a_file({"optimizer": straight.state_dict(), "params": params}), straight.phase
        step_once(straight, rank, step, bad)
        prints.append(fingerprint(parameters(straight)))

    fresh = make(dtype)
    resumed = construct(name, fresh, lr=0.5, process_group=transport, **options)
    with torch.no_grad():
        for p, value in zip(fresh, saved["params"], strict=True):
            p.copy_(value)
    resumed.load_state_dict(saved["optimizer"])
    again = []
    for step in range(cut, STEPS):
        step_once(resumed, rank, step, bad)
        again.append(fingerprint(fresh))
    states = observe(straight), observe(resumed)
    same_state = all(np.array_equal(states[0][key], states[1][key]) for key in states[0])
    same_counts = all(
        straight.stats().get(key) == resumed.stats().get(key)
        for key in (
            "phase",
            "step",
            "skipped_steps",
            "freeze_step",
            "rewarms",
            "vetoed_steps",
            "dead_tensors",
            "dead_coordinates",
        )
    )
    return again == prints[cut:], same_state and same_counts, phase


def resume_on_gloo(rank: int, world_size: int, *arguments: Any) -> tuple[bool, bool, str]:
    return resume(rank, None, *arguments)


CUTS = [(4, "warmup"), (7, "warmup"), (8, "compression"), (13, "compression")]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "world_size", "cut", "phase", "dtype"),
    [
        *(("onebit-adam", w, cut, phase, dtype) for w in (1, 2, 4) for cut, phase in CUTS for dtype in DTYPES),
        *(("onebit-lamb", 2, cut, phase, torch.float32) for cut, phase in CUTS),
        *(("onebit-lamb", w, 13, "compression", torch.bfloat16) for w in (1, 4)),
        *(("onebit-lamb-frozen", 2, cut, phase, torch.bfloat16) for cut, phase in CUTS[1:3]),
        ("lamb", 2, 7, "uncompressed", torch.bfloat16),
    ],
)
def test_resuming_continues_bit_for_bit(name, world_size, cut, phase, dtype):
    # Step 2 is skipped: 6 updates are 7 steps, and step 7 is the first compressed one.
    for result in simulate(resume, world_size, name, cut, dtype, {"freeze_step": 6}):
        assert result == (True, True, phase)


@pytest.mark.long
@ADAM_AND_LAMB
def test_resuming_in_processes_continues_bit_for_bit(name):
    """What is a rank's own is a row of a DTensor there."""
    for result in run_ranks(resume_on_gloo, 2, name, 13, torch.float32, {"freeze_step": 6}):
        assert result == (True, True, "compression")


@pytest.mark.long(but=1)
@pytest.mark.parametrize("cut", [8, 9])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ONEBIT),
        *((name, PAPER) for name in ("onebit-adam", "onebit-lamb")),
        ("onebit-lamb", {"precondition": True}),
    ],
)
def test_resuming_right_after_skipped_first_steps_of_the_compression(name, options, cut):
    """Nothing but skips so far: what 1-bit LAMB rebuilds the first gradient from is still the warm-up's."""
    for result in simulate(resume, 2, name, cut, torch.float32, {"freeze_step": 6} | options, (2, 7, 8)):
        assert result == (True, True, "compression")


@pytest.mark.long(but=1)
@ADAM_AND_LAMB
@pytest.mark.parametrize("scale_scope", ["layer", "block"])
def test_resuming_keeps_every_scale(name, scale_scope):
    options = {"freeze_step": 6, "scale_scope": scale_scope, "scale_norm": "l1", "block_size": 256}
    for same_parameters, same_state, _ in simulate(resume, 2, name, 12, torch.float32, options):
        assert same_parameters
        assert same_state


@pytest.mark.parametrize("name", LAMBS)
@pytest.mark.parametrize("steps", [5, 8, 9])
def test_what_is_told_of_the_layers_is_the_same_after_resuming(name, steps):
    """With ``steps`` 8 the first compressed step, the last one so far, was skipped."""
    straight = construct(name, make(), lr=1e-2, freeze_step=6)
    for step in range(steps):
        step_once(straight, 0, step, bad=(2, 7))
    resumed = construct(name, make(), freeze_step=6)
    resumed.load_state_dict(through_a_file(straight.state_dict()))
    told, before = (optimizer.stats(layers=True)["layers"] for optimizer in (resumed, straight))
    for layers in (told, before):
        layers.pop("residual_over_momentum", None)  # of the last step that this process has taken
    assert told == before


@pytest.mark.long(but=1)
@pytest.mark.parametrize("cut", [7, 13])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("onebit-lamb", PAPER | {"variant": "deepspeed"}),
        ("onebit-lamb", PAPER | {"momentum_scaling": False}),
        ("onebit-adam", PAPER),
        ("onebit-lamb", {"precondition": True, "eps_inside_sqrt": True}),
        ("onebit-adam", {"ternary": True}),
        ("onebit-lamb", PAPER | {"ternary": True, "scale_norm": "contractive"}),
    ],
    ids=str,
)
def test_resuming_keeps_other_variants(name, options, cut):
    for result in simulate(resume, 2, name, cut, torch.float32, {"freeze_step": 6} | options):
        assert result == (True, True, "warmup" if cut == 7 else "compression")


def auto_options() -> dict:
    return {"freeze_step": "auto", "betas": (0.5, 0.5)}


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "cut"),
    [*(("onebit-adam", cut) for cut in range(3, 14, 2)), *(("onebit-lamb", cut) for cut in (5, 9, 13))],
)
def test_resuming_keeps_an_automatic_freeze_that_is_pending(name, cut):
    for same_parameters, same_state, _ in simulate(resume, 2, name, cut, torch.float32, auto_options()):
        assert same_parameters
        assert same_state


@ADAM_AND_LAMB
def test_the_automatic_freeze_is_pending_at_some_of_these_cuts(name):
    optimizer = construct(name, make(), lr=1e-2, **auto_options())
    pending = []
    for step in range(STEPS):
        step_once(optimizer, 0, step)
        auto = header_of(optimizer.state_dict())["auto"]
        pending.append(bool(auto["fired"]) and optimizer.phase == "warmup")
    assert any(pending[4:13:4])
    assert optimizer.phase == "compression"


@pytest.mark.long(but=1)
@EACH
def test_saving_and_looking_change_no_later_step(name):
    results = []
    for look in (False, True):
        optimizer = construct(name, make(), freeze_step=3)
        for step in range(STEPS):
            step_once(optimizer, 0, step)
            if look:
                observe(optimizer)
                optimizer.stats(*([True] if "lamb" in name else []))
                repr(optimizer)
        results.append(fingerprint(parameters(optimizer)))
    assert results[0] == results[1]


# ---------------------------------------------------------------- what is in it


def saved_state(rank: int, world_size: int, name: str, dtype: torch.dtype, options: dict | None = None) -> dict:
    optimizer = construct(name, make(dtype), freeze_step=3, **options or {})
    for step in range(6):
        step_once(optimizer, rank, step)
    return through_a_file(optimizer.state_dict())


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    "options",
    [{}, *({"precondition": p, "ternary": t} for p, t in ((True, True), (False, True), (True, False)))],
    ids=str,
)
@EACH_ONEBIT
def test_a_checkpoint_of_the_compression_stage_holds_exact_dtypes_and_whole_lines(name, options):
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
    scalars = {"layer": (torch.float32, (3,))} | ({} if preconditioned else {"unit": (torch.float32, ())})
    for rank, file in enumerate(saved):
        for i, p in enumerate(make()):
            whole = (torch.float32, tuple(p.shape))
            expected = {"step": (torch.float64, ()), "exp_avg_sq": whole}
            expected |= {"exp_avg_sq_fresh": whole} if name == "onebit-lamb" else {}
            expected |= (scalars if "lamb" in name else {}) | (lines if i == 0 else {})
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
    ratio = file.tell() / (300_017 * (4 + 4 + 4 + 1 / 8 + (4 + 1 / 8) * (name == "onebit-lamb")))
    print(f"{name}: bytes of the file, of the state's: {ratio:.4f} (limit 1.02)")
    assert ratio <= 1.02


# ---------------------------------------------------------------- AdamW's


def adamw_checkpoint(steps: int) -> tuple[list[Parameter], dict, torch.optim.AdamW]:
    params = make()
    adamw = torch.optim.AdamW(params, lr=1e-2, foreach=False)
    for step in range(3, 3 + steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
        adamw.step()
    return params, through_a_file(adamw.state_dict()), adamw


@EACH
def test_a_checkpoint_of_adamw_is_continued_as_adamw_would(name):
    params, saved, adamw = adamw_checkpoint(5)
    # LAMB without adaptation and with bias correction is AdamW.
    options = {"c_min": 1.0, "c_max": 1.0, "bias_correction": True} if "lamb" in name else {}
    optimizer = construct(name, [Parameter(p.detach().clone()) for p in params], lr=0.7, freeze_step=100, **options)
    optimizer.load_state_dict(saved)
    assert optimizer.stats()["step"] == 5
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for step in range(3, 13):
        for p, q in zip(parameters(optimizer), params, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(99 + step))
            q.grad = p.grad.clone()
        optimizer.step()
        adamw.step()
    for p, q in zip(parameters(optimizer), params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_freeze_step_0_starts_compressed_from_a_loaded_variance():
    params, saved, _ = adamw_checkpoint(5)
    optimizer = construct("onebit-adam", params, freeze_step=0)
    optimizer.load_state_dict(saved)
    variance = saved["state"][0]["exp_avg_sq"]
    step_once(optimizer, 0, 0)
    assert optimizer.phase == "compression"
    assert optimizer.stats()["freeze_step"] == 5
    assert optimizer.stats()["step"] == 6
    assert torch.equal(optimizer.state[params[0]]["exp_avg_sq"], variance)


def start_compressed(rank: int, world_size: int, name: str, saved_by: str) -> tuple[str, np.ndarray, list, list]:
    """Five updates by one optimizer; then another with ``freeze_step=0`` takes three steps."""
    first = construct(saved_by, make(), lr=1e-2, freeze_step=100)
    for step in range(3, 8):
        step_once(first, rank, step)
    saved = through_a_file(first.state_dict())
    params = make()
    optimizer = construct(name, params, freeze_step=0)
    optimizer.load_state_dict(saved)
    variance = saved["state"][0]["exp_avg_sq"]
    prints = []
    for step in range(3):
        step_once(optimizer, rank, step + 20)
        prints.append(fingerprint(params))
    assert optimizer.phase == "compression"
    assert (optimizer.stats()["freeze_step"], optimizer.stats()["step"]) == (5, 8)
    assert torch.equal(optimizer.state[params[0]]["exp_avg_sq"], variance)
    average = optimizer.stats(layers=True)["layers"]["average"]
    return prints, average, first.stats(layers=True)["layers"]["average"], fingerprint(make())


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", LAMBS)
@pytest.mark.parametrize("saved_by", ["lamb", "onebit-lamb"])
def test_freeze_step_0_starts_compressed_from_a_checkpoint_of_lamb(name, saved_by):
    results = run_ranks(start_compressed, 2, name, saved_by)
    for prints, average, warmup_average, start in results:
        assert prints == results[0][0]
        assert len({start, *prints}) == 4
        assert average == warmup_average
        assert all(c > 0 for c in average[:-1])
        assert average[-1] == 0  # it never had a gradient


def freeze_without_coefficients(rank: int, world_size: int, name: str, saved: dict, of_lamb: dict) -> tuple:
    params = make()
    optimizer = construct(name, params, lr=0.5, freeze_step=0)
    optimizer.load_state_dict(saved)
    before, errors = fingerprint(params), []
    for step in range(2):
        with pytest.raises(RuntimeError) as error:
            step_once(optimizer, rank, step)
        errors.append(str(error.value))
    still = fingerprint(params) == before and optimizer.phase == "warmup" and optimizer.stats()["step"] == 5
    optimizer.load_state_dict(of_lamb)
    step_once(optimizer, rank, 4)
    return errors, still, optimizer.phase, fingerprint(params)


@pytest.mark.parametrize("name", LAMBS)
def test_freeze_step_0_with_a_checkpoint_of_adamw_says_that_coefficients_are_missing_on_every_rank(name):
    _, saved, _ = adamw_checkpoint(5)
    lamb = construct("lamb", make(), lr=1e-2, freeze_step=100)
    for step in range(3, 8):
        step_once(lamb, 0, step)
    results = run_ranks(freeze_without_coefficients, 2, name, saved, through_a_file(lamb.state_dict()))
    for errors, still, phase, _ in results:
        for text in errors:
            assert "the freeze needs averages of LAMB's coefficients" in text
            assert "load a checkpoint of Lamb or OneBitLamb" in text
        assert still
        assert phase == "compression"
    assert len({bits for *_, bits in results}) == 1


def two_groups(name: str, first: dict, second: dict, **options: Any) -> Any:
    torch.manual_seed(0)
    p, q = Parameter(torch.randn(30)), Parameter(torch.randn(40))
    return construct(name, [{"params": [p], **first}, {"params": [q], **second}], freeze_step=100, **options)


@pytest.mark.parametrize(("name", "own"), [("lamb", {"c_min": 1.0, "c_max": 1.0}), ("onebit-lamb", {"r_max": 1.5})])
def test_hyper_parameters_that_a_checkpoint_lacks_stay_as_each_group_has_them(name, own):
    saver = two_groups("lamb", {}, {"eps": 1e-3})
    if name == "lamb":
        saver = torch.optim.AdamW([{k: g[k] for k in ("params", "eps")} for g in saver.param_groups])
    for p in parameters(saver):
        p.grad = torch.ones_like(p)
    saver.step()
    optimizer = two_groups(name, {}, own)
    optimizer.load_state_dict(through_a_file(saver.state_dict()))
    assert {key: optimizer.param_groups[1][key] for key in own} == own
    assert optimizer.param_groups[1]["eps"] == saver.param_groups[1]["eps"]


@pytest.mark.parametrize("frozen_before", [1, 0], ids=["warming up again", "frozen"])
@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb", "lamb"])
def test_a_checkpoint_of_the_warmup_belongs_to_the_same_parameters_where_others_train(name, frozen_before):

    def some(frozen: int) -> list[Parameter]:
        torch.manual_seed(0)
        return [Parameter(torch.randn(n) * n, requires_grad=i >= frozen) for i, n in enumerate((30, 40, 50))]

    saver = construct(name, some(frozen_before), freeze_step=100)
    for step in range(3):
        for p in parameters(saver):
            p.grad = torch.full_like(p, step + 1.0) if p.requires_grad else None
        saver.step()
    optimizer = construct(name, some(1 - frozen_before), freeze_step=100)
    optimizer.load_state_dict(through_a_file(saver.state_dict()))
    for p, q in list(zip(parameters(saver), parameters(optimizer), strict=True))[1:]:
        assert torch.equal(saver.momentum(p), optimizer.momentum(q))
    if "lamb" in name:
        layers = saver.stats(layers=True)["layers"], optimizer.stats(layers=True)["layers"]
        averages = [dict(zip(told["name"], told["average"], strict=True)) for told in layers]
        for key in ("parameter 1", "parameter 2"):
            assert averages[0][key] == averages[1][key]
