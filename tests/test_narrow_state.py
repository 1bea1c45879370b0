"""``Numerics(state=, frozen_dtype=)``: what the compression stage keeps in two bytes each, or in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from observe import resumed
from op_arguments import Problem
from optimizers import ADAM_AND_LAMB, ONEBIT, UNGUARDED, by_name, objects
from ranks import run_ranks, simulate
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fusedonebit import Lamb, Numerics, OneBitAdam, OneBitLamb, Wire, dcp, triton_kernels
from fusedonebit.comm import Transport
from fusedonebit.triton_kernels import Coef, settle, update_sums
from fusedonebit.triton_kernels.codes import in_float32, keep_nearest
from fusedonebit.triton_kernels.nouns import Compensated, Stored

pytestmark = pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
KINDS: dict[str, dict[str, Any]] = {
    "frozen": {"freeze_step": 4},
    "living": {"warmup": 4},
    "undivided": {"freeze_step": 4, "precondition": False},
    "ternary": {"freeze_step": 4, "ternary": True},
    "buckets": {"freeze_step": 4, "buckets": 2, "scale_scope": "layer"},
}
NARROW = [(kind, "bf16") for kind in KINDS] + [(kind, "8bit") for kind in KINDS if kind != "undivided"]
each_kind = pytest.mark.parametrize(("kind", "state"), NARROW)
each_state = pytest.mark.parametrize("state", ["bf16", "8bit"])


def params(n: int = 3) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(40, 33)) for _ in range(n)]


def train(optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.detach().clone() for p in optimizer.param_groups[0]["params"]]


def narrow(kind: str, state: str, **more: Any) -> OneBitAdam:
    return by_name(OneBitAdam)(params(), 1e-3, state=state, guard="off", **KINDS[kind], **more)


def kept(x: Tensor, state: str, signed: bool = True) -> Stored:
    """What x, float32 [P] in blocks of 128, is stored as."""
    if state == "bf16":
        return Stored(x.bfloat16())
    codes, exponents = torch.zeros(x.shape, dtype=torch.uint8), torch.zeros(len(x) // 128, dtype=torch.uint8)
    keep_nearest(x, codes, exponents, signed=signed)
    return Stored(codes, exponents)


def rows_of(*stored: Stored) -> Tensor | None:
    """The exponents of several in one table, uint8 [rows, B]; None where they are no codes."""
    found = [each.exponents for each in stored if each.exponents is not None]
    return torch.stack(found) if found else None


# ---------------------------------------------------------------- ops


def compressed(p: Problem, start: Tensor, state: str, updates: int) -> tuple[Tensor, Tensor, Tensor]:
    """c from ``start`` as it is kept, float32, its bits and its sums."""
    stored = Stored(start.clone()) if state == "fp32" else kept(start, state)
    arguments = p.arguments("momentum_compress", exp_avg_sq=... if p.exp_avg_sq is not None else None)
    compensated = Compensated(stored.numbers, p.worker_scale, rows_of(stored), torch.tensor(updates))
    triton_kernels.momentum_compress(*arguments._replace(compensated=compensated))
    return in_float32(*compensated.stored).clone(), p.bits.clone(), p.partials.clone()


UNIT = {"bf16": 2.0**-7, "8bit": 2.0**-3}
"""An upper bound of what lies between two neighbours, of the smaller."""


@each_state
def test_what_is_kept_is_next_to_float32_and_unbiased(state):
    p, draws = Problem((3072,)), 400
    start = in_float32(*kept(p.compensated, state))
    if state == "8bit":
        p.exp_avg_sq = None
    exact, _, _ = compressed(p, start, "fp32", 0)
    largest = exact.abs().view(-1, 128).amax(1).repeat_interleave(128).double()
    unit = torch.maximum(exact.abs().double(), largest * 2.0**-15) * UNIT[state]
    total = torch.zeros_like(exact, dtype=torch.float64)
    for draw in range(draws):
        c, _, _ = compressed(p, start, state, draw)
        assert ((c.double() - exact.double()).abs() <= unit).all()
        total += c.double()
    off = ((total / draws - exact.double()) / unit)[exact.abs() > largest * 2.0**-15]
    print(f"mean {float(off.mean()):+.5f} of a unit, at most {5 * 0.5 / (draws * len(off)) ** 0.5:.5f}")
    assert off.abs().max() < 6 * 0.5 / draws**0.5
    assert abs(float(off.mean())) < 5 * 0.5 / (draws * len(off)) ** 0.5


@each_state
def test_what_is_sent_and_kept_adds_up_to_what_was_compressed(state):
    p = Problem((3072,))
    start = in_float32(*kept(p.compensated, state))
    c, bits, partials = compressed(p, start, state, 7)
    rows = c.double().view(-1, 128)
    assert torch.equal(triton_kernels.unpack(bits).view_as(rows) > 0, rows >= 0)
    torch.testing.assert_close(partials, torch.stack([rows.abs().sum(1), rows.square().sum(1)]), rtol=1e-12, atol=0)
    again = kept(c, state)
    residual = Compensated(again.numbers, torch.full((len(rows),), 0.25), rows_of(again))
    settle(residual, False, p.places)
    sent = 0.25 * torch.where(rows >= 0, 1.0, -1.0)
    left = in_float32(*residual.stored).double().view_as(rows)
    most = torch.maximum((rows - sent).abs(), (rows - sent).abs().amax(1, keepdim=True) * 2.0**-15)
    assert ((left + sent - rows).abs() <= most * UNIT[state] / 2).all()


# ---------------------------------------------------------------- the optimizer

APART = {"bf16": 0.05, "8bit": 0.15}
"""How far apart from float32's way a short one may end, as a share of it; errors of the other sign double it."""


@each_state
def test_lamb_keeps_its_moments_so(state):
    runs = {}
    for each in ("fp32", state):
        optimizer = Lamb(params(), 1e-2, numerics=Numerics(state=each))
        train(optimizer, range(30))
        runs[each] = torch.cat([x.flatten() for x in values(optimizer)])
        held = optimizer.stats()["state_bytes"] / optimizer.frame.layout.numel
        expected = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.0}[each]
        print(f"{each}: {held:.2f} bytes of state for each element")
        assert expected <= held < expected + 0.3  # what there is by block
    start = torch.cat([x.detach().flatten() for x in params()])
    apart = float((runs[state] - runs["fp32"]).norm() / (runs["fp32"] - start).norm())
    print(f"{state}: {apart:.3f} of the way apart")
    assert 0 < apart < APART[state]
    again = resumed(optimizer, Lamb(params(), 1e-2, numerics=Numerics(state=state)))
    for each in (optimizer, again):
        train(each, range(30, 36))
    assert all(map(torch.equal, values(optimizer), values(again)))


@each_kind
def test_it_holds_two_bytes_or_one_of_each_number(kind, state):
    held = {}
    for each in ("fp32", state):
        optimizer = narrow(kind, each)
        train(optimizer, range(8))
        assert optimizer.phase == "compression"
        held[each] = optimizer.stats()["state_bytes"] / optimizer.frame.layout.numel
    print(f"{kind}: {held[state]:.2f} bytes of state for each element, {held['fp32']:.2f} in float32")
    numbers = 3 if kind == "living" else 2
    others = held["fp32"] - (7 if kind == "living" else 8)  # bits, and what is by block; v is a byte, squares two
    assert held[state] <= numbers * {"bf16": 2, "8bit": 1}[state] + others + 0.03


@each_kind
def test_it_trains_as_float32_does(kind, state):
    wide, half = narrow(kind, "fp32"), narrow(kind, state)
    for optimizer in (wide, half):
        train(optimizer, range(60))
    a, b, start = (torch.cat([x.flatten() for x in each]) for each in (values(wide), values(half), params()))
    apart = float((a - b).norm() / (a - start.detach()).norm())
    print(f"{kind}: {apart:.3f} of the way apart")
    assert 0 < apart < APART[state]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("onebit-adam-living", {"warmup": 3, "state": state}) for state in ("bf16", "8bit")),
        *((name, {"freeze_step": 3, "frozen_dtype": torch.bfloat16}) for name in ("onebit-adam", "onebit-lamb")),
    ],
    ids=str,
)
def test_a_checkpoint_for_any_number_of_ranks_keeps_it(tmp_path, name, options):
    torch.manual_seed(0)
    models = [torch.nn.Linear(33, 40) for _ in range(2)]
    first, second = (ONEBIT[name](m.parameters(), 1e-3, **UNGUARDED | options) for m in models)
    train(first, range(8))
    dcp.save(models[0], first, tmp_path / "saved")
    dcp.load(models[1], second, tmp_path / "saved")
    if "frozen_dtype" in options:
        assert second.state_dict()["state"][0]["exp_avg_sq"].dtype is torch.bfloat16
    for optimizer in (first, second):
        train(optimizer, range(8, 12))
    assert all(map(torch.equal, values(first), values(second)))


def on_two_levels(rank: int, world_size: int, state: str, folder: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "gpus"))
    models = [torch.nn.Linear(33, 40) for _ in range(3)]
    for model in models:
        for p in model.parameters():
            dist.broadcast(p.data, 0)
    wires = (Wire(hierarchy=mesh), Wire(hierarchy=mesh), Wire())
    first, second, flat = (
        OneBitAdam(m.parameters(), 1e-2, warmup=4, numerics=Numerics(state=state), wire=wire)
        for m, wire in zip(models, wires, strict=True)
    )
    train(first, range(10), rank)
    dcp.save(models[0], first, folder)
    dcp.load(models[1], second, folder)
    dcp.load(models[2], flat, folder)  # residuals of parts become those of workers
    for optimizer in (first, second, flat):
        train(optimizer, range(10, 14), rank)
    return values(first), values(second), torch.cat([x.flatten() for x in values(flat)])


@pytest.mark.long
@each_state
def test_two_levels_keep_it_and_hand_it_to_one(state, tmp_path):
    found = run_ranks(on_two_levels, 4, state, str(tmp_path / "saved"))
    for first, second, flat in found:
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert torch.equal(flat, found[0][2])


@each_state
def test_a_re_warm_up_goes_on_as_narrow(state):
    wide, half = (narrow("frozen", each, refuse_every=4, rewarm_steps=10) for each in ("fp32", state))
    for optimizer in (wide, half):
        train(optimizer, range(9))
        assert (optimizer.phase, optimizer.stats()["rewarms"]) == ("warmup", 1)
    assert (
        half.algorithm.moments.exp_avg.dtype
        is half.algorithm.moments.exp_avg_sq.dtype
        is {"bf16": torch.bfloat16, "8bit": torch.uint8}[state]
    )
    p, q = (optimizer.param_groups[0]["params"][0] for optimizer in (wide, half))
    apart = (half.momentum(q) - wide.momentum(p)).norm() / wide.momentum(p).norm()
    print(f"momenta {apart:.3f} apart")
    assert apart < 0.2


@each_state
def test_a_residual_can_be_looked_at_and_stays_as_it_is(state):
    norms = []
    for each in ("fp32", state):
        optimizer = narrow("frozen", each)
        train(optimizer, range(8))
        found = [optimizer.worker_error(p) for p in optimizer.param_groups[0]["params"]]
        norms.append(torch.cat([e.reshape(-1) for e in found]).norm())
    assert all(e.dtype is torch.float32 for e in found)
    print(f"residuals have the norm {norms[1] / norms[0]:.3f} times that in float32")
    assert 0.9 < norms[1] / norms[0] < 1.1
    before = [kept.clone() for kept in (optimizer.algorithm.moments.exp_avg, optimizer.algorithm.moments.exp_avg_sq)]
    again = [optimizer.worker_error(p) for p in optimizer.param_groups[0]["params"]]
    assert all(map(torch.equal, again, found))
    optimizer.momentum(optimizer.param_groups[0]["params"][0])
    assert all(map(torch.equal, (optimizer.algorithm.moments.exp_avg, optimizer.algorithm.moments.exp_avg_sq), before))


def test_what_can_not_be_kept_so_is_refused():
    with pytest.raises(ValueError, match=r'state must be "fp32" or "bf16" .*, got "8bit"'):
        narrow("undivided", "8bit")
    with pytest.raises(ValueError, match="state must be 'fp32' with OneBitLamb, got 'bf16'"):
        OneBitLamb(params(), numerics=Numerics(state="bf16"))


def held_by_a_rank(rank: int, transport: Transport, options: dict[str, Any]) -> tuple[float, float]:
    p = torch.nn.Parameter(torch.zeros(1024, 1024, dtype=torch.bfloat16))
    optimizer = OneBitAdam([p], 1e-3, **objects(**options), process_group=transport)
    for step in range(6):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
        optimizer.step()
    assert optimizer.phase == "compression"
    stats = optimizer.stats()
    return (p.nbytes + p.grad.nbytes + stats["state_bytes"]) / p.numel(), stats["wire_bytes"] / p.numel()


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("kind", "most"), [("frozen", 7.4), ("living", 8.4)])
def test_what_one_of_eight_ranks_holds_in_codes(kind, most):
    options = KINDS[kind] | {"state": "8bit", "stochastic_rounding": True, "guard": "off"}
    (held, wire), *_ = simulate(held_by_a_rank, 8, options)
    print(f"{kind}: {held:.2f} bytes a parameter, its gradient and state ({most}); on the wire {wire:.2f} more")
    assert held <= most


# ---------------------------------------------------------------- the frozen variance alone

HALF: dict[str, Any] = {"frozen_dtype": torch.bfloat16}


@ADAM_AND_LAMB
@pytest.mark.parametrize("precondition", [False, True])
def test_it_saves_two_bytes_and_only_rounds_denominators(name, precondition):
    options = UNGUARDED | {"freeze_step": 4, "precondition": precondition}
    wide, half = (ONEBIT[name](params(), 1e-3, **options, **more) for more in ({}, HALF))
    for optimizer in (wide, half):
        train(optimizer, range(5))
    saved = wide.stats()["state_bytes"] - half.stats()["state_bytes"]
    print(f"{name}: {saved / half.frame.layout.numel:.3f} bytes per element less")
    assert saved == 2 * half.frame.layout.numel
    v, rounded = (o.state_dict()["state"][0]["exp_avg_sq"] for o in (wide, half))
    assert rounded.dtype is torch.bfloat16
    assert torch.equal(rounded, v.bfloat16())
    assert "frozen_dtype: bfloat16" in repr(half)
    # One compressed update from equal signs: as far apart as the roots of the two variances.
    for a, b, start in zip(values(wide), values(half), params(), strict=True):
        torch.testing.assert_close(b - start, a - start, rtol=0.02, atol=2e-6)


@ADAM_AND_LAMB
@pytest.mark.parametrize("precondition", [False, True])
def test_the_guard_reads_it_as_it_reads_float32(name, precondition):
    optimizer = ONEBIT[name](params(), 1e-3, freeze_step=4, precondition=precondition, **HALF)
    train(optimizer, range(8))
    assert optimizer.phase == "compression"
    places, coef = optimizer.frame.places, torch.rand(len(optimizer.frame.layout.sizes), len(Coef))
    v = optimizer.algorithm.moments.exp_avg_sq
    half, wide = (update_sums(places, None, each, False, coef) for each in (v, v.float()))
    assert torch.equal(half, wide)
    assert half.sum() > 0


def test_a_re_warm_up_goes_on_in_float32():
    optimizer = ONEBIT["onebit-adam"](params(), 1e-3, freeze_step=3, refuse_every=4, rewarm_steps=10, **HALF)
    train(optimizer, range(9))
    assert (optimizer.phase, optimizer.stats()["rewarms"]) == ("warmup", 1)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg_sq"].dtype is torch.float32


def test_another_dtypes_checkpoint_is_refused_bad_dtypes_named():
    optimizer = ONEBIT["onebit-adam"](params(), 1e-3, freeze_step=3, **HALF)
    train(optimizer, range(5))
    other = ONEBIT["onebit-adam"](params(), 1e-3, freeze_step=3)
    with pytest.raises(ValueError, match=r"frozen_dtype='torch.bfloat16', but here it is 'torch.float32'"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"frozen_dtype must be torch.float32 or torch.bfloat16, got torch.float16"):
        ONEBIT["onebit-adam"](params(), freeze_step=3, frozen_dtype=torch.float16)
