"""``AdamW`` is torch's, in two launches; a rank alone reads gradients where they lie, and takes them as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adamw_runs import gradients
from optimizers import MAKE, objects
from torch import Tensor, nn

from fusedonebit import AdamW, Faults, FusedOneBitWarning, NonFiniteGradientError, Numerics
from fusedonebit.comm import SimulatedGroup
from fusedonebit.triton_kernels.codes import decode, encode
from fusedonebit.triton_kernels.headers import PARTLY
from fusedonebit.triton_kernels.op import launches

SHAPES = ((7,), (33, 40), (), (1, 3), (0,), (5, 300))
STEPS = 30


def parameters(dtype: torch.dtype = torch.float32, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 3e-2, "weight_decay": 0.1}, {"params": params[2:], "betas": (0.8, 0.99)}]


def furthest(one: list[nn.Parameter], other: list[nn.Parameter]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float((p.detach().double() - q.detach().double()).abs().max()) for p, q in pairs if p.numel())


def both(make: Callable[..., Any], reference: Callable[..., Any], before: Callable[..., None] | None = None) -> float:
    """Train both on the same gradients; return how far apart they end, as a share of the way."""
    mine, theirs, start = parameters(), parameters(), parameters()
    optimizer, other = make(groups(mine)), reference(groups(theirs))
    for step in range(STEPS):
        for params in (mine, theirs):
            gradients(params, step)
        if before is not None:
            before(theirs)
        optimizer.step()
        other.step()
    return furthest(mine, theirs) / furthest(mine, start)


@pytest.mark.parametrize(
    "options", [{}, {"eps": 1e-2}, {"maximize": True}, {"weight_decay": 0.0}, {"lr": torch.tensor(1e-2)}]
)
def test_it_is_torchs_adamw(options):
    options = {"lr": 1e-2} | options
    ours = lambda params: AdamW(params, **objects(**options))  # noqa: E731
    apart = both(ours, lambda params: torch.optim.AdamW(params, **options))
    print(f"{apart:.1e} of the way apart from torch's after {STEPS} steps")
    assert apart < 2e-6


def test_clipping_is_torchs():
    def clip(params: list[nn.Parameter]) -> None:
        torch.nn.utils.clip_grad_norm_(params, 0.7)

    apart = both(lambda params: AdamW(params, 1e-2, max_grad_norm=0.7), torch.optim.AdamW, clip)
    assert apart > 1e-2  # another lr
    assert both(lambda p: AdamW(p, 1e-2, max_grad_norm=0.7), lambda p: torch.optim.AdamW(p, 1e-2), clip) < 2e-6


def test_16_bit_parameters_are_torchs_to_a_rounding_each_step():
    mine, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, other = AdamW(mine, 1e-2), torch.optim.AdamW(theirs, 1e-2)
    for step in range(3):
        for params, each in ((mine, optimizer), (theirs, other)):
            gradients(params, step)
            each.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=4 * torch.finfo(torch.bfloat16).eps, atol=1e-2)


@pytest.mark.parametrize("norm", [None, 0.5])
def test_several_ranks_are_one_that_has_their_mean_gradient(norm):
    def run(rank: int, transport: Any) -> list[nn.Parameter]:
        params = parameters()
        optimizer = AdamW(groups(params), 1e-2, max_grad_norm=norm, process_group=transport)
        for step in range(STEPS):
            gradients(params, step, rank)
            optimizer.step()
        return params

    ranks = SimulatedGroup(2).run(run)
    alone = parameters()
    optimizer = AdamW(groups(alone), 1e-2, max_grad_norm=norm)
    for step in range(STEPS):
        each = []
        for rank in range(2):
            gradients(alone, step, rank)
            each.append([p.grad for p in alone])
        for p, *both_ranks in zip(alone, *each, strict=True):
            p.grad = None if both_ranks[0] is None else sum(both_ranks) / 2
        optimizer.step()
    assert furthest(*ranks) == 0.0
    assert furthest(ranks[0], alone) < 1e-5


@pytest.mark.needs_compiler
def test_a_step_takes_two_launches_and_four_with_clipping():
    for norm, further in ((None, ()), (1.0, ("gradient_squares", "scale_coefficients"))):
        params = parameters(shapes=((3, 5),) * 302)
        optimizer = AdamW(params, max_grad_norm=norm)
        for step in range(2):
            gradients(params, step)
            launches.clear()
            optimizer.step()
        assert launches == dict.fromkeys(("adam_update", "advance", *further), 1)


def spoilt(params: list[nn.Parameter]) -> Tensor:
    """Give gradients of which some elements do not count; return these of the last parameter."""
    gradients(params, 0)
    grad = params[-1].grad
    assert grad is not None
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf, 1e20)):
        grad[i, 7 * i] = value
    return ~(grad.abs() < 1e19)


@pytest.mark.parametrize("norm", [None, 1.0])
def test_elements_that_do_not_count_stay_and_all_others_move(norm):
    params, plain = parameters(), parameters()
    optimizer, other = (AdamW(each, 1e-2, max_grad_norm=norm) for each in (params, plain))
    for each, taking in ((params, optimizer), (plain, other)):
        gradients(each, 1)
        taking.step()
    before = [p.detach().clone() for p in params], {k: v.clone() for k, v in optimizer.state[params[-1]].items()}
    bad = spoilt(params)
    spoilt(plain)
    plain[-1].grad[bad] = 0.0
    with pytest.warns(
        FusedOneBitWarning,
        match="elements of a gradient were not finite, or too large, in update 2: they alone were left out",
    ):
        optimizer.step()
    other.step()
    for p, q, was in zip(params, plain, before[0], strict=True):
        stays = bad if p is params[-1] else torch.zeros_like(p, dtype=torch.bool)
        assert torch.equal(p[stays], was[stays])
        assert torch.equal(p[~stays], q[~stays])
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[params[-1]][name][bad], before[1][name][bad])
    told = optimizer.stats()
    assert (told["step"], told["skipped_steps"], told["partial_steps"]) == (2, 0, 1)
    gradients(params, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert optimizer.stats()["partial_steps"] == 1


def test_who_wants_an_error_gets_one_and_nothing_moves():
    params = parameters()
    optimizer = AdamW(params, faults=Faults(nonfinite="raise"))
    spoilt(params)
    before = [p.detach().clone() for p in params]
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    assert all(torch.equal(p, was) for p, was in zip(params, before, strict=True))
    assert optimizer.stats()["step"] == 0


def test_a_state_goes_to_torchs_adamw_and_back():
    ends = []
    for kinds in ((AdamW, AdamW), (AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)):
        params = parameters()
        optimizer = kinds[0](params, 1e-2)
        for step in range(6):
            if step == 3:
                saved = optimizer.state_dict()
                optimizer = kinds[1](params, 1e-2)
                optimizer.load_state_dict(saved)
            gradients(params, step)
            optimizer.step()
        ends.append(params)
    assert furthest(ends[0], ends[1]) < 1e-6
    assert furthest(ends[0], ends[2]) < 1e-6


# ---------------------------------------------------------------- moments in fewer bits

EACH_STATE = pytest.mark.parametrize("state", ["bf16", "8bit"])


@pytest.mark.parametrize(("state", "expected"), [("fp32", 8.0), ("bf16", 4.0), ("8bit", 2.0)])
def test_it_keeps_two_moments_in_as_many_bytes_and_no_gradient(state, expected):
    params = parameters(shapes=((1000, 1024),))
    optimizer = AdamW(params, numerics=Numerics(state=state))
    gradients(params, 0)
    optimizer.step()
    held = optimizer.stats()["state_bytes"] / params[0].numel()
    print(f"{state}: {held:.2f} bytes of state for each parameter")
    assert expected <= held < expected + 0.1
    assert optimizer.momentum(params[0]).dtype is torch.float32
    shown = {name: value.dtype for name, value in optimizer.state[params[0]].items() if name != "step"}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(state)
    assert shown == ({} if dtype is None else dict.fromkeys(("exp_avg", "exp_avg_sq"), dtype))


def moments(optimizer: Any) -> list[Tensor]:
    saved = optimizer.state_dict()["state"][0]
    return [saved[name].double() for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.long(but=1)
@EACH_STATE
def test_a_variance_in_fewer_bits_does_not_stand_still(state):
    p = nn.Parameter(torch.zeros(16384))
    optimizer = AdamW([p], 0.0, betas=(0.9, 0.999), numerics=Numerics(state=state))
    p.grad = torch.ones_like(p)
    for _ in range(2000):
        optimizer.step()
    m, v = moments(optimizer)
    expected = 1 - 0.999**2000
    print(f"{state}: v is on average {float(v.mean() / expected):.4f} times the exact one after 2000 steps")
    assert abs(float(v.mean()) / expected - 1) < 5e-3
    assert abs(float(m.mean()) - 1) < 5e-3


def test_codes_are_stable_and_no_variance_is_rounded_to_zero():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=draw) * 2.0 ** torch.randint(-30, 30, (64, 128), generator=draw)
    x[0], x[1, 1:] = 0.0, 0.0
    for signed in (True, False):
        values = x if signed else x.square()
        codes, exponents = torch.empty(64, 128, dtype=torch.uint8), torch.empty(64, dtype=torch.uint8)
        how = {"signed": signed, "nonzero": not signed}
        encode(values, codes, exponents, **how)
        found = decode(codes, exponents, signed=signed)
        again = torch.empty_like(codes), torch.empty_like(exponents)
        encode(found, *again, **how)
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], exponents)
        inside = values.abs() > values.abs().amax(1, keepdim=True) * 2.0 ** (-14 if signed else -30)
        assert ((found - values).abs() <= values.abs() * 2.0**-4 * 1.001)[inside].all()
        assert bool(((found != 0) >= (values != 0)).all()) == (not signed)


@EACH_STATE
def test_runs_go_on_from_our_torchs_and_float32_checkpoints(state):
    few, ends = Numerics(state=state), []
    for stop in (None, 3):
        params = parameters()
        optimizer = AdamW(params, 1e-2, numerics=few)
        for step in range(6):
            if step == stop:
                saved = optimizer.state_dict()
                optimizer = AdamW(params, 1e-2, numerics=few)
                optimizer.load_state_dict(saved)
            gradients(params, step)
            optimizer.step()
        ends.append(params)
    assert furthest(*ends) == 0.0
    for kind, options in ((torch.optim.AdamW, {}), (AdamW, {})):
        params, full = parameters(), parameters()
        other, exact = kind(params, 1e-2, **options), kind(full, 1e-2, **options)
        for step in range(6):
            if step == 3:
                optimizer = AdamW(params, 1e-2, numerics=few)
                optimizer.load_state_dict(other.state_dict())
                other = optimizer
            for each, taking in ((params, other), (full, exact)):
                gradients(each, step)
                taking.step()
        assert 0.0 < furthest(params, full) < {"bf16": 1e-3, "8bit": 1e-2}[state]


@EACH_STATE
def test_ranks_round_alike(state):
    def run(rank: int, transport: Any) -> tuple[list[nn.Parameter], list[Tensor]]:
        params = parameters()
        optimizer = AdamW(params, 1e-2, numerics=Numerics(state=state), process_group=transport)
        for step in range(5):
            gradients(params, step, rank)
            optimizer.step()
        return params, moments(optimizer)

    (one, v), (other, same) = SimulatedGroup(2).run(run)
    assert furthest(one, other) == 0.0
    assert all(torch.equal(a, b) for a, b in zip(v, same, strict=True))


def test_who_keeps_no_moments_so_refuses_it():
    with pytest.raises(ValueError, match=r"state must be .*fp32.*bf16.*8bit.*, got 'fp8'"):
        AdamW(parameters(), numerics=Numerics(state="fp8"))


@pytest.mark.parametrize("name", [name for name in MAKE if name not in ("AdamW, ours", "OneBitAdam", "Lamb")])
def test_no_other_optimizer_takes_codes(name):
    told = (
        r"state must be ('fp32' with .*, got '8bit': it has no such option|\"fp32\" or \"bf16\" with OneBitMuon, got)"
    )
    with pytest.raises(ValueError, match=told):
        MAKE[name](parameters(), state="8bit")


@EACH_STATE
def test_a_further_group_leaves_moments_as_they_are(state):
    params = parameters()
    optimizer = AdamW(params[:3], 1e-2, numerics=Numerics(state=state))
    for step in range(3):
        gradients(params, step)
        optimizer.step()
    before = [optimizer.momentum(p) for p in params[:3]]
    optimizer.add_param_group({"params": params[3:]})
    assert all(torch.equal(optimizer.momentum(p), m) for p, m in zip(params[:3], before, strict=True))


def test_failed_steps_and_replays_count_no_element_again():
    params = parameters()
    optimizer = AdamW(params, 1e-2)
    spoilt(params)
    with pytest.warns(FusedOneBitWarning, match="they alone were left out"):
        optimizer.step()
    still, params[0].data = params[0].data, params[0].data.double()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="but now is"):
            optimizer.step()
    params[0].data = still
    optimizer.algorithm.stage.elements.in_replays.fill_(PARTLY)  # as a replay on such gradients leaves it
    for step in range(2):
        gradients(params, step)
        optimizer.step()
    assert optimizer.stats()["partial_steps"] == 1
