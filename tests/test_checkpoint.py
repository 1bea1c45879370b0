"""A checkpoint continues bit for bit, and a wrong one changes nothing."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from observe import fingerprint, observe, parameters
from optimizers import ADAM_AND_LAMB, EACH, EACH_ONEBIT, LAMBS, ONEBIT, construct
from ranks import run_ranks
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import FusedOneBitWarning

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


def through_a_file(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resume(
    rank: int, world_size: int, name: str, cut: int, dtype: torch.dtype, options: dict, bad: tuple[int, ...] = (2, 10)
) -> tuple[bool, bool, str]:
    """Trains straight through, and again from what was saved after ``cut`` steps."""
    straight = construct(name, make(dtype), lr=1e-2, **options)
    prints = []
    for step in range(STEPS):
        if step == cut:
            params = [p.detach().clone() for p in parameters(straight)]
            saved, phase = through_a_file({"optimizer": straight.state_dict(), "params": params}), straight.phase
        step_once(straight, rank, step, bad)
        prints.append(fingerprint(parameters(straight)))

    fresh = make(dtype)
    resumed = construct(name, fresh, lr=0.5, **options)
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
        for key in ("phase", "step", "skipped_steps", "freeze_step", "dead_tensors", "dead_coordinates")
    )
    return again == prints[cut:], same_state and same_counts, phase


CUTS = [(4, "warmup"), (7, "warmup"), (8, "compression"), (13, "compression")]
DTYPES = (torch.float32, torch.bfloat16)


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
    for result in run_ranks(resume, world_size, name, cut, dtype, {"freeze_step": 6}):
        same_parameters, same_state, phase_at_cut = result
        assert phase_at_cut == phase
        assert same_parameters
        assert same_state


@pytest.mark.parametrize("cut", [8, 9])
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in ONEBIT), *((name, {"precondition": True}) for name in ("onebit-adam", "onebit-lamb"))],
)
def test_resuming_right_after_skipped_first_steps_of_the_compression(name, options, cut):
    """Nothing but skips so far: what 1-bit LAMB rebuilds the first gradient from is still the warm-up's."""
    for result in run_ranks(resume, 2, name, cut, torch.float32, {"freeze_step": 6} | options, (2, 7, 8)):
        assert result == (True, True, "compression")


@ADAM_AND_LAMB
@pytest.mark.parametrize("scale_scope", ["layer", "block"])
def test_resuming_keeps_every_scale(name, scale_scope):
    options = {"freeze_step": 6, "scale_scope": scale_scope, "scale_norm": "l1", "block_size": 256}
    for same_parameters, same_state, _ in run_ranks(resume, 2, name, 12, torch.float32, options):
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
    assert resumed.stats(layers=True)["layers"] == straight.stats(layers=True)["layers"]


@pytest.mark.parametrize("cut", [7, 13])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("onebit-lamb", {"variant": "deepspeed"}),
        ("onebit-lamb", {"momentum_scaling": False}),
        ("onebit-adam", {"precondition": True}),
        ("onebit-lamb", {"precondition": True, "eps_inside_sqrt": True}),
    ],
    ids=str,
)
def test_resuming_keeps_other_variants(name, options, cut):
    for result in run_ranks(resume, 2, name, cut, torch.float32, {"freeze_step": 6} | options):
        assert result == (True, True, "warmup" if cut == 7 else "compression")


def auto_options() -> dict:
    return {"freeze_step": "auto", "betas": (0.5, 0.5)}


@pytest.mark.parametrize(
    ("name", "cut"),
    [*(("onebit-adam", cut) for cut in range(3, 14, 2)), *(("onebit-lamb", cut) for cut in (5, 9, 13))],
)
def test_resuming_keeps_an_automatic_freeze_that_is_pending(name, cut):
    for same_parameters, same_state, _ in run_ranks(resume, 2, name, cut, torch.float32, auto_options()):
        assert same_parameters
        assert same_state


@ADAM_AND_LAMB
def test_the_automatic_freeze_is_pending_at_some_of_these_cuts(name):
    optimizer = construct(name, make(), lr=1e-2, **auto_options())
    pending = []
    for step in range(STEPS):
        step_once(optimizer, 0, step)
        auto = optimizer.state_dict()["fusedonebit"]["auto"]
        pending.append(bool(auto["fired"]) and optimizer.phase == "warmup")
    assert any(pending[4:13:4])
    assert optimizer.phase == "compression"


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


@EACH_ONEBIT
def test_a_checkpoint_of_the_compression_stage_holds_exact_dtypes_and_no_padding(name):
    saved = run_ranks(saved_state, 2, name, torch.bfloat16)
    for i, p in enumerate(make()):
        served = sorted((s["state"][i]["server_error_start"], len(s["state"][i]["server_error"])) for s in saved)
        assert sum(length for _, length in served) == p.numel()
        assert all(0 <= start <= p.numel() for start, _ in served)
        bits = (torch.uint8, -(-p.numel() // 8))
        scale = (torch.float32, -(-p.numel() // saved[0]["fusedonebit"]["block_size"]))
        adaptive = {
            "exp_avg_sq_fresh": (torch.float32, p.numel()),
            "exp_avg_last_bits": bits,
            "exp_avg_last_scale": scale,
        }
        per_tensor = {"layer": (torch.float32, 3), "unit": (torch.float32, 1)}
        for state in (s["state"][i] for s in saved):
            assert {k: (v.dtype, v.numel()) for k, v in state.items() if k not in ("server_error_start",)} == {
                "step": (torch.float32, 1),
                "exp_avg_sq": (torch.float32, p.numel()),
                "worker_error": (torch.float32, p.numel()),
                "exp_avg_bits": bits,
                "exp_avg_scale": scale,
                "server_error": (torch.float32, state["server_error"].numel()),
            } | (adaptive if name == "onebit-lamb" else {}) | (per_tensor if "lamb" in name else {})
            assert state["worker_error"].shape == state["exp_avg_sq"].shape == p.shape


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


@pytest.mark.parametrize("name", LAMBS)
@pytest.mark.parametrize("saved_by", ["lamb", "onebit-lamb"])
def test_freeze_step_0_starts_compressed_from_a_checkpoint_of_lamb(name, saved_by):
    results = run_ranks(start_compressed, 2, name, saved_by)
    for prints, average, warmup_average, start in results:
        assert prints == results[0][0]
        assert len({start, *prints}) == 4
        assert average == warmup_average
        assert all(c > 0 for c in average)


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


@pytest.mark.parametrize("frozen_before", [1, 0], ids=["thawed", "frozen"])
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


# ---------------------------------------------------------------- errors


def load_wrong(
    rank: int, world_size: int, name: str, make_wrong: str, files: list[dict], options: dict | None = None
) -> tuple[str, str, bool]:
    """Loads; returns the error's type and text, and whether everything is as before and training goes on."""
    optimizer = construct(name, make(), lr=1e-2, freeze_step=3, **options or {})
    for step in range(6):
        step_once(optimizer, rank, step)
    before, groups = observe(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    try:
        optimizer.load_state_dict(globals()[make_wrong](rank, copy.deepcopy(files)))
        outcome = ("", "")
    except Exception as error:
        outcome = (type(error).__name__, str(error))
    after = observe(optimizer)
    unchanged = all(np.array_equal(before[key], after[key]) for key in before)
    unchanged &= optimizer.state_dict()["param_groups"] == groups and optimizer.stats()["step"] == 5
    step_once(optimizer, rank, 6)
    return *outcome, unchanged and optimizer.stats()["step"] == 6


def rank_0s_file(rank: int, files: list[dict]) -> dict:
    return files[0]


def fewer_parameters(rank: int, files: list[dict]) -> dict:
    files[rank]["param_groups"][0]["params"].pop()
    return files[rank]


def other_shape(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["exp_avg_sq"] = torch.zeros(40, 33)
    return files[rank]


def lacks_a_key(rank: int, files: list[dict]) -> dict:
    del files[rank]["state"][1]["worker_error"]
    return files[rank]


def lacks_a_key_on_rank_1(rank: int, files: list[dict]) -> dict:
    return lacks_a_key(rank, files) if rank == 1 else files[rank]


def other_moment_on_rank_1(rank: int, files: list[dict]) -> dict:
    files[rank]["fusedonebit"]["synchronisations"] += rank
    return files[rank]


def other_variance_on_rank_1(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["exp_avg_sq"][3, 4] += rank * 1e-3
    return files[rank]


def other_format(rank: int, files: list[dict]) -> dict:
    files[rank]["fusedonebit"]["format"] = 99
    return files[rank]


def bad_lr(rank: int, files: list[dict]) -> dict:
    files[rank]["param_groups"][0]["lr"] = -1.0
    return files[rank]


def lacks_bits(rank: int, files: list[dict]) -> dict:
    del files[rank]["state"][0]["exp_avg_bits"]
    return files[rank]


def short_bits(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["exp_avg_bits"] = files[rank]["state"][0]["exp_avg_bits"][:-1]
    return files[rank]


def not_a_checkpoint(rank: int, files: list[dict]) -> dict:
    return {"model": 1}


def own_file(rank: int, files: list[dict]) -> dict:
    return files[rank]


def lacks_the_fresh_variance(rank: int, files: list[dict]) -> dict:
    del files[rank]["state"][2]["exp_avg_sq_fresh"]
    return files[rank]


def other_fresh_variance_on_rank_1(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["exp_avg_sq_fresh"][3, 4] += rank * 1e-3
    return files[rank]


def short_last_bits(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["exp_avg_last_bits"] = files[rank]["state"][0]["exp_avg_last_bits"][:-1]
    return files[rank]


def long_last_scale_on_rank_1(rank: int, files: list[dict]) -> dict:
    scale = files[rank]["state"][5]["exp_avg_last_scale"]
    files[rank]["state"][5]["exp_avg_last_scale"] = torch.cat([scale, scale[: rank * 2]])
    return files[rank]


def other_layers_on_rank_1(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["layer"][0] *= 1 + rank
    return files[rank]


def layers_of_another_model(rank: int, files: list[dict]) -> dict:
    files[rank]["state"][0]["layer"] = torch.ones(4)
    return files[rank]


def lacks_layers(rank: int, files: list[dict]) -> dict:
    del files[rank]["state"][0]["layer"]
    return files[rank]


def bad_r_max(rank: int, files: list[dict]) -> dict:
    files[rank]["param_groups"][0]["r_max"] = 0.25
    return files[rank]


FOR_ANY = {
    "rank_0s_file": ["rank is 0, but here it is 1; each rank must load the file that it saved itself"],
    "lacks_a_key_on_rank_1": ["state_dict lacks the key 'worker_error'"],
    "other_moment_on_rank_1": ["synchronisations is 2 on rank 0 but 3 on rank 1", "of the same moment"],
    "other_variance_on_rank_1": ["checksum of exp_avg_sq of parameter 0", "of the same moment"],
}
FOR_ADAM = {
    "fewer_parameters": ["checkpoint of another model: its groups have [8] parameters", "[9]"],
    "other_shape": ["checkpoint of another model", "exp_avg_sq of parameter 0", "(33, 40), got (40, 33)"],
    "lacks_a_key": ["state_dict lacks the key 'worker_error'"],
    "lacks_bits": ["state_dict lacks the key 'exp_avg_bits'"],
    "short_bits": ["exp_avg_bits of parameter 0 must have shape (165,), got (164,)"],
    "other_format": ["checkpoint format must be 1, got 99"],
    "bad_lr": ["lr must be a finite number >= 0, got -1.0 in group 0 of the checkpoint"],
    "not_a_checkpoint": ["state_dict lacks the key 'param_groups'"],
}
FOR_LAMB = {
    "lacks_the_fresh_variance": ["state_dict lacks the key 'exp_avg_sq_fresh'"],
    "other_fresh_variance_on_rank_1": ["checksum of exp_avg_sq_fresh of parameter 0", "of the same moment"],
    "short_last_bits": ["exp_avg_last_bits of parameter 0 must have shape (165,), got (164,)"],
    "long_last_scale_on_rank_1": ["exp_avg_last_scale of parameter 5 must have shape"],
    "other_layers_on_rank_1": ["checksum of layer of parameter 0", "of the same moment"],
    "layers_of_another_model": ["layer of parameter 0 must have shape (3,), got (4,)"],
    "lacks_layers": ["state_dict lacks the key 'layer'"],
    "bad_r_max": ["r_min must be at most r_max, got 0.5 > 0.25 in group 0 of the checkpoint"],
}


@pytest.mark.parametrize(
    ("name", "make_wrong", "texts"),
    [("onebit-adam", *case) for case in (FOR_ANY | FOR_ADAM).items()]
    + [("onebit-lamb", *case) for case in (FOR_ANY | FOR_LAMB).items()],
)
def test_a_wrong_checkpoint_raises_on_every_rank_and_changes_nothing(name, make_wrong, texts):
    files = run_ranks(saved_state, 2, name, torch.float32)
    for kind, message, unchanged in run_ranks(load_wrong, 2, name, make_wrong, files, group_timeout=10):
        assert kind in ("ValueError", "DisagreementError")
        for text in texts:
            assert text in message
        assert unchanged


@pytest.mark.parametrize(
    ("saved_by", "name", "text"),
    [
        ("onebit-lamb", "lamb", "the checkpoint's algorithm is OneBitLamb, but here it is Lamb"),
        ("onebit-lamb", "onebit-adam", "the checkpoint's algorithm is OneBitLamb, but here it is OneBitAdam"),
        ("onebit-adam", "onebit-lamb", "the checkpoint's algorithm is OneBitAdam, but here it is OneBitLamb"),
        ("onebit-lamb-frozen", "onebit-lamb", "layerwise='frozen', but here it is 'adaptive'"),
    ],
)
def test_a_compressed_checkpoint_of_another_algorithm_raises_and_changes_nothing(saved_by, name, text):
    files = run_ranks(saved_state, 2, saved_by, torch.float32)
    for kind, message, unchanged in run_ranks(load_wrong, 2, name, "own_file", files, group_timeout=10):
        assert kind in ("ValueError", "DisagreementError")
        assert text in message
        assert unchanged


@ADAM_AND_LAMB
@pytest.mark.parametrize("precondition", [False, True])
def test_a_compressed_checkpoint_in_another_unit_raises_on_every_rank_and_changes_nothing(name, precondition):
    was, now = {"precondition": not precondition}, {"precondition": precondition}
    files = run_ranks(saved_state, 2, name, torch.float32, was)
    for kind, message, unchanged in run_ranks(load_wrong, 2, name, "own_file", files, now, group_timeout=10):
        assert kind == "ValueError"
        assert f"written with precondition={not precondition}, but here it is {precondition}" in message
        assert unchanged


def test_a_checkpoint_of_another_world_size_says_so():
    (saved,) = run_ranks(saved_state, 1, "onebit-adam", torch.float32)
    for kind, message, unchanged in run_ranks(load_wrong, 2, "onebit-adam", "rank_0s_file", [saved], group_timeout=10):
        assert kind in ("ValueError", "DisagreementError")
        assert "world_size is 1, but here it is 2; resume with as many ranks as wrote it" in message
        assert unchanged


def warmup_at_another_world_size(rank: int, world_size: int, name: str, saved: dict) -> tuple[str, Tensor, list]:
    optimizer = construct(name, make(), freeze_step=100)
    optimizer.load_state_dict(saved)
    assert optimizer.stats()["step"] == 2
    layers = observe(optimizer)["layer"].tolist()
    step_once(optimizer, 7, 5)
    return fingerprint(parameters(optimizer)), optimizer.state[parameters(optimizer)[0]]["exp_avg"].clone(), layers


@EACH
def test_a_checkpoint_of_the_warmup_loads_at_any_world_size(name):
    optimizer = construct(name, make(), freeze_step=100)
    for step in range(2):
        step_once(optimizer, 0, step)
    saved, layers = through_a_file(optimizer.state_dict()), observe(optimizer)["layer"].tolist()
    results = [run_ranks(warmup_at_another_world_size, world_size, name, saved)[0] for world_size in (1, 2)]
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert layers == results[0][2] == results[1][2]
    assert bool(layers) == ("lamb" in name)
