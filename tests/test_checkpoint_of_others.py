"""Checkpoints of AdamW, of LAMB and of other groups of parameters are taken up as far as they go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_runs import make, step_once
from observe import fingerprint, parameters, through_a_file
from optimizers import EACH, LAMBS, construct
from ranks import run_ranks
from torch.nn import Parameter

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


def start_compressed(rank: int, world_size: int, name: str, saved_by: str) -> tuple[list[str], list, list]:
    """Five updates by one optimizer; then another with ``freeze_step=0`` takes three steps."""
    by_torch = saved_by == "AdamW"
    first: Any = torch.optim.AdamW(make()) if by_torch else construct(saved_by, make(), lr=1e-2, freeze_step=100)
    for step in range(3, 8):
        step_once(first, 0 if by_torch else rank, step)
    saved, params = through_a_file(first.state_dict()), make()
    optimizer = construct(name, params, freeze_step=0)
    optimizer.load_state_dict(saved)
    prints = [fingerprint(params)]
    for step in range(3):
        step_once(optimizer, rank, step + 20)
        prints.append(fingerprint(params))
    assert optimizer.phase == "compression"
    assert (optimizer.stats()["freeze_step"], optimizer.stats()["step"]) == (5, 8)
    assert torch.equal(optimizer.state[params[0]]["exp_avg_sq"], saved["state"][0]["exp_avg_sq"])
    return prints, *([] if by_torch else each.stats(layers=True)["layers"]["average"] for each in (optimizer, first))


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    ("name", "saved_by"),
    [("onebit-adam", "AdamW"), *((name, saved_by) for name in LAMBS for saved_by in ("lamb", "onebit-lamb"))],
)
def test_freeze_step_0_starts_compressed_from_a_checkpoint(name, saved_by):
    results = run_ranks(start_compressed, 2, name, saved_by)
    for prints, average, warmup_average in results:
        assert prints == results[0][0]
        assert len(set(prints)) == 4
        assert average == warmup_average
        assert all(c > 0 for c in average[:-1])
        assert not average or average[-1] == 0  # it never had a gradient


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
def test_freeze_step_0_from_adamw_says_coefficients_are_missing(name):
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
def test_groups_keep_hyper_parameters_that_a_checkpoint_lacks(name, own):
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
def test_warmup_state_stays_with_its_parameters_if_others_train(name, frozen_before):
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
