"""A checkpoint continues bit for bit, and a wrong one changes nothing."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from observe import fingerprint, observe, parameters
from ranks import run_ranks
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import FusedOneBitWarning, OneBitAdam

SHAPES = [(33, 40), (7,), (1,), (), (0,), (1500,)]
STEPS = 16


def make(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    params.append(Parameter(torch.randn(6, 5, 4, 3).to(dtype, memory_format=torch.channels_last)))
    params.append(Parameter(torch.randn(21, 8)[::2, ::3].to(dtype)))
    params.append(Parameter(torch.randn(9).to(dtype)))  # never has a gradient
    return params


def step_once(optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    for i, p in enumerate(parameters(optimizer)[:-1]):
        generator = torch.Generator().manual_seed(1 + rank + 10 * step + 100_000 * i)
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    if step in (2, 10) and rank == 0:
        parameters(optimizer)[0].grad[0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        optimizer.step()


def through_a_file(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resume(rank: int, world_size: int, cut: int, dtype: torch.dtype, options: dict) -> tuple[bool, bool, str]:
    """Trains straight through, and again from what was saved after ``cut`` steps."""
    straight = OneBitAdam(make(dtype), lr=1e-2, **options)
    prints = []
    for step in range(STEPS):
        if step == cut:
            params = [p.detach().clone() for p in parameters(straight)]
            saved, phase = through_a_file({"optimizer": straight.state_dict(), "params": params}), straight.phase
        step_once(straight, rank, step)
        prints.append(fingerprint(parameters(straight)))

    fresh = make(dtype)
    resumed = OneBitAdam(fresh, lr=0.5, **options)
    with torch.no_grad():
        for p, value in zip(fresh, saved["params"], strict=True):
            p.copy_(value)
    resumed.load_state_dict(saved["optimizer"])
    again = []
    for step in range(cut, STEPS):
        step_once(resumed, rank, step)
        again.append(fingerprint(fresh))
    same_state = all((observe(straight)[key] == observe(resumed)[key]).all() for key in observe(straight))
    same_counts = all(
        straight.stats()[key] == resumed.stats()[key]
        for key in ("phase", "step", "skipped_steps", "freeze_step", "dead_tensors", "dead_coordinates")
    )
    return again == prints[cut:], same_state and same_counts, phase


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("cut", "phase"), [(4, "warmup"), (7, "warmup"), (8, "compression"), (13, "compression")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_continues_bit_for_bit(world_size, cut, phase, dtype):
    # Step 2 is skipped: 6 updates are 7 steps, and step 7 is the first compressed one.
    for same_parameters, same_state, phase_at_cut in run_ranks(resume, world_size, cut, dtype, {"freeze_step": 6}):
        assert phase_at_cut == phase
        assert same_parameters
        assert same_state


@pytest.mark.parametrize("scale_scope", ["layer", "block"])
def test_resuming_keeps_every_scale(scale_scope):
    options = {"freeze_step": 6, "scale_scope": scale_scope, "scale_norm": "l1", "block_size": 256}
    for same_parameters, same_state, _ in run_ranks(resume, 2, 12, torch.float32, options):
        assert same_parameters
        assert same_state


def auto_options() -> dict:
    return {"freeze_step": "auto", "betas": (0.5, 0.5)}


@pytest.mark.parametrize("cut", range(3, 14, 2))
def test_resuming_keeps_an_automatic_freeze_that_is_pending(cut):
    for same_parameters, same_state, _ in run_ranks(resume, 2, cut, torch.float32, auto_options()):
        assert same_parameters
        assert same_state


def test_the_automatic_freeze_is_pending_at_some_of_these_cuts():
    optimizer = OneBitAdam(make(), lr=1e-2, **auto_options())
    pending = []
    for step in range(STEPS):
        step_once(optimizer, 0, step)
        auto = optimizer.state_dict()["fusedonebit"]["auto"]
        pending.append(bool(auto["fired"]) and optimizer.phase == "warmup")
    assert any(pending[2:13:2])
    assert optimizer.phase == "compression"


def test_saving_and_looking_change_no_later_step():
    results = []
    for look in (False, True):
        optimizer = OneBitAdam(make(), freeze_step=3)
        for step in range(STEPS):
            step_once(optimizer, 0, step)
            if look:
                optimizer.state_dict()
                optimizer.worker_error(parameters(optimizer)[0])
                optimizer.stats()
                repr(optimizer)
        results.append(fingerprint(parameters(optimizer)))
    assert results[0] == results[1]


# ---------------------------------------------------------------- what is in it


def saved_state(rank: int, world_size: int, dtype: torch.dtype) -> dict:
    optimizer = OneBitAdam(make(dtype), freeze_step=3)
    for step in range(6):
        step_once(optimizer, rank, step)
    return through_a_file(optimizer.state_dict())


def test_a_checkpoint_of_the_compression_stage_holds_exact_dtypes_and_no_padding():
    saved = run_ranks(saved_state, 2, torch.bfloat16)
    for i, p in enumerate(make()):
        served = sorted((s["state"][i]["server_error_start"], len(s["state"][i]["server_error"])) for s in saved)
        assert sum(length for _, length in served) == p.numel()
        assert all(0 <= start <= p.numel() for start, _ in served)
        for state in (s["state"][i] for s in saved):
            assert {k: (v.dtype, v.numel()) for k, v in state.items() if k not in ("server_error_start",)} == {
                "step": (torch.float32, 1),
                "exp_avg_sq": (torch.float32, p.numel()),
                "worker_error": (torch.float32, p.numel()),
                "exp_avg_bits": (torch.uint8, -(-p.numel() // 8)),
                "exp_avg_scale": (torch.float32, -(-p.numel() // saved[0]["fusedonebit"]["block_size"])),
                "server_error": (torch.float32, state["server_error"].numel()),
            }
            assert state["worker_error"].shape == state["exp_avg_sq"].shape == p.shape


def test_a_checkpoint_of_the_warmup_is_adamws_own():
    optimizer = OneBitAdam(make(), freeze_step=100)
    reference = torch.optim.AdamW(make())
    for step in range(6):
        step_once(optimizer, 1, step)
        step_once(reference, 1, step)
    saved = through_a_file(optimizer.state_dict())
    for i in range(len(SHAPES)):
        assert set(saved["state"][i]) == {"step", "exp_avg", "exp_avg_sq"}
    reference.load_state_dict(saved)
    assert reference.state[parameters(reference)[0]]["step"] == 6


def test_files_hold_little_but_the_state():
    """``torch.save`` writes whole storages; those of the flat buffers contain the padding between tensors."""
    p = Parameter(torch.randn(300_000))
    optimizer = OneBitAdam([p, Parameter(torch.randn(17))], freeze_step=1)
    for _ in range(3):
        p.grad = torch.randn(300_000)
        parameters(optimizer)[1].grad = torch.randn(17)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    ratio = file.tell() / (300_017 * (4 + 4 + 4 + 1 / 8))
    print(f"bytes of the file, of the state's: {ratio:.4f} (limit 1.02)")
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


def test_a_checkpoint_of_adamw_is_continued_as_adamw_would():
    params, saved, adamw = adamw_checkpoint(5)
    optimizer = OneBitAdam([Parameter(p.detach().clone()) for p in params], lr=0.7, freeze_step=100)
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
    optimizer = OneBitAdam(params, freeze_step=0)
    optimizer.load_state_dict(saved)
    variance = saved["state"][0]["exp_avg_sq"]
    step_once(optimizer, 0, 0)
    assert optimizer.phase == "compression"
    assert optimizer.stats()["freeze_step"] == 5
    assert optimizer.stats()["step"] == 6
    assert torch.equal(optimizer.state[params[0]]["exp_avg_sq"], variance)


# ---------------------------------------------------------------- errors


def load_wrong(rank: int, world_size: int, make_wrong: str, files: list[dict]) -> tuple[str, str, bool]:
    """Loads; returns the error's type and text, and whether everything is as before and training goes on."""
    optimizer = OneBitAdam(make(), lr=1e-2, freeze_step=3)
    for step in range(6):
        step_once(optimizer, rank, step)
    before, groups = observe(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    try:
        optimizer.load_state_dict(globals()[make_wrong](rank, copy.deepcopy(files)))
        outcome = ("", "")
    except Exception as error:
        outcome = (type(error).__name__, str(error))
    after = observe(optimizer)
    unchanged = all((before[key] == after[key]).all() for key in before)
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


@pytest.mark.parametrize(
    ("make_wrong", "texts"),
    [
        ("rank_0s_file", ["rank is 0, but here it is 1; each rank must load the file that it saved itself"]),
        ("fewer_parameters", ["checkpoint of another model: its groups have [8] parameters", "[9]"]),
        ("other_shape", ["checkpoint of another model", "exp_avg_sq of parameter 0", "(33, 40), got (40, 33)"]),
        ("lacks_a_key", ["state_dict lacks the key 'worker_error'"]),
        ("lacks_a_key_on_rank_1", ["state_dict lacks the key 'worker_error'"]),
        ("lacks_bits", ["state_dict lacks the key 'exp_avg_bits'"]),
        ("short_bits", ["exp_avg_bits of parameter 0 must have shape (165,), got (164,)"]),
        ("other_moment_on_rank_1", ["synchronisations is 2 on rank 0 but 3 on rank 1", "of the same moment"]),
        ("other_variance_on_rank_1", ["checksum of exp_avg_sq of parameter 0", "of the same moment"]),
        ("other_format", ["checkpoint format must be 1, got 99"]),
        ("bad_lr", ["lr must be a finite number >= 0, got -1.0 in group 0 of the checkpoint"]),
        ("not_a_checkpoint", ["state_dict lacks the key 'param_groups'"]),
    ],
)
def test_a_wrong_checkpoint_raises_on_every_rank_and_changes_nothing(make_wrong, texts):
    files = run_ranks(saved_state, 2, torch.float32)
    for kind, message, unchanged in run_ranks(load_wrong, 2, make_wrong, files, group_timeout=10):
        assert kind in ("ValueError", "DisagreementError")
        for text in texts:
            assert text in message
        assert unchanged


def test_a_checkpoint_of_another_world_size_says_so():
    (saved,) = run_ranks(saved_state, 1, torch.float32)
    for kind, message, unchanged in run_ranks(load_wrong, 2, "rank_0s_file", [saved], group_timeout=10):
        assert kind in ("ValueError", "DisagreementError")
        assert "world_size is 1, but here it is 2; resume with as many ranks as wrote it" in message
        assert unchanged


def warmup_at_another_world_size(rank: int, world_size: int, saved: dict) -> tuple[str, Tensor]:
    optimizer = OneBitAdam(make(), freeze_step=100)
    optimizer.load_state_dict(saved)
    assert optimizer.stats()["step"] == 2
    step_once(optimizer, 7, 5)
    return fingerprint(parameters(optimizer)), optimizer.state[parameters(optimizer)[0]]["exp_avg"].clone()


def test_a_checkpoint_of_the_warmup_loads_at_any_world_size():
    optimizer = OneBitAdam(make(), freeze_step=100)
    for step in range(2):
        step_once(optimizer, 0, step)
    saved = through_a_file(optimizer.state_dict())
    results = [run_ranks(warmup_at_another_world_size, world_size, saved)[0] for world_size in (1, 2)]
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
