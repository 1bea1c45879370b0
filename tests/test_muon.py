"""1-bit Muon: torch's Muon on one rank, its reference on several; real ranks and simulated ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from muon_runs import DECAY, LR, MATRICES, REST, SEED, SHAPES, gradients, made, parameters, train, values
from ranks import run_ranks
from torch import Tensor
from torch.nn import Parameter
from torch.optim._muon import _zeropower_via_newtonschulz

from fusedonebit import Numerics, OneBitMuon, Wire, dcp, reference
from fusedonebit.comm import SimulatedGroup
from fusedonebit.comm.owners import Matrix, Owners
from fusedonebit.optim.muon import COEFFICIENTS
from fusedonebit.optim.orthogonal import inverse_root, orthogonalised, raw
from fusedonebit.optim.whitening import EVERY, joined, split, triangle
from fusedonebit.triton_kernels import FlatLayout

STEPS = 6


# ---------------------------------------------------------------- nothing is compressed


@pytest.mark.parametrize("shape", [(64, 64), (128, 32), (32, 128), (300, 100), (1, 7), (17, 5)])
def test_newton_schulz_is_torchs_bit_for_bit(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = _zeropower_via_newtonschulz(x.clone(), COEFFICIENTS, 5, 1e-7)
    assert torch.equal(orthogonalised(x[None], COEFFICIENTS, 5, 1e-7, torch.bfloat16)[0], expected)
    both = orthogonalised(torch.stack([x, -x]), COEFFICIENTS, 5, 1e-7, torch.bfloat16)
    torch.testing.assert_close(both[0], expected, rtol=0.0, atol=2.0**-7)


@pytest.mark.parametrize(
    "how", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}, {"momentum": 0.8}], ids=str
)
def test_one_rank_is_torchs_muon(how):
    params, theirs = parameters(), parameters()
    optimizer = made(params, **how)
    muon = torch.optim.Muon([theirs[i] for i in MATRICES], LR, DECAY, **how)
    adamw = torch.optim.AdamW([theirs[i] for i in REST], 3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(10):
        train(optimizer, params, 0, range(step, step + 1))
        for p, g in zip(theirs, gradients(0, step), strict=True):
            p.grad = g
        muon.step()
        adamw.step()
    for i in MATRICES:
        assert torch.equal(optimizer.momentum(params[i]), muon.state[theirs[i]]["momentum_buffer"])
    for p, other in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, other, rtol=0.0, atol=1e-6)


# ---------------------------------------------------------------- several ranks


def expected(workers: int, steps: int) -> list[Tensor]:
    """Return what the reference makes of the matrices in float64, and torch's AdamW of the rest."""
    params = [p.double() for p in values(parameters())]
    states = {i: reference.MuonState(params[i], workers) for i in MATRICES}
    rest = [Parameter(params[i]) for i in REST]
    adamw = torch.optim.AdamW(rest, 3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        each = [[g.double() for g in gradients(rank, step)] for rank in range(workers)]
        for i, s in states.items():
            if step and (step & (step - 1) == 0 or step % EVERY == 0):
                reference.whiten(s)
            size = max(1.0, SHAPES[i][0] / SHAPES[i][1]) ** 0.5
            reference.onebit_muon([s], torch.stack([g[i] for g in each]), gamma=LR * size, decay=DECAY / size)
        for p, i in zip(rest, REST, strict=True):
            p.grad = torch.stack([g[i] for g in each]).mean(0)
        adamw.step()
    found = {i: s.x for i, s in states.items()} | dict(zip(REST, rest, strict=True))
    return [found[i].detach() for i in range(len(SHAPES))]


def follow(rank: int, transport: Any, steps: int = STEPS) -> tuple[list[Tensor], dict[str, Any]]:
    params = parameters()
    optimizer = made(params, transport, ns_dtype=torch.float64, wire=Wire(average_dtype=torch.float32))
    train(optimizer, params, rank, range(steps))
    return values(params), optimizer.stats()


def on_real_ranks(rank: int, world_size: int) -> tuple[list[Tensor], dict[str, Any]]:
    return follow(rank, None)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_ranks_follow_the_reference(workers):
    """To rounding: with these gradients no sign hangs on that."""
    results = run_ranks(on_real_ranks, workers)
    wanted = expected(workers, STEPS)
    for found, stats in results:
        for p, first, x in zip(found, results[0][0], wanted, strict=True):
            assert torch.equal(p, first)
            torch.testing.assert_close(p.double(), x, rtol=0.0, atol=1e-6)
        assert stats["phase"] == "one-bit"
    largest = max(float((p.double() - x).abs().max()) for p, x in zip(results[0][0], wanted, strict=True))
    print(f"{workers} ranks, {STEPS} steps: largest difference {largest:.1e}; a sign would be {2 * LR / 50**0.5:.0e}")


@pytest.mark.parametrize("shape", [(60, 20), (24, 40)])
def test_stacks_are_orthogonalised_one_by_one(shape):
    """On one rank as torch's Muon does parameters that are cut, on two as the reference."""
    stacks, start = 3, torch.randn(shape, generator=torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(SEED)
    grads = [torch.randn(2, *shape, generator=draw) + 0.3 for _ in range(5)]

    def run(rank: int, transport: Any, dtype: torch.dtype = torch.float64) -> Tensor:
        p = Parameter(start.clone())
        groups = [{"params": [p], "stacks": stacks}]
        optimizer = OneBitMuon(groups, LR, DECAY, ns_dtype=dtype, process_group=transport)
        for g in grads:
            p.grad = g[rank].clone()
            optimizer.step()
        return p.detach()

    cut = [Parameter(part.clone()) for part in start.chunk(stacks)]
    muon = torch.optim.Muon(cut, LR, DECAY)
    size = max(1.0, cut[0].shape[0] / cut[0].shape[1]) ** 0.5
    state = reference.MuonState(start.double(), 2)
    for step, g in enumerate(grads):
        for p, part in zip(cut, g[0].chunk(stacks), strict=True):
            p.grad = part
        muon.step()
        if step and step & (step - 1) == 0:
            reference.whiten(state)
        reference.onebit_muon([state], g.double(), gamma=LR * size, decay=DECAY / size, stacks=stacks)
    (alone,), (one, other) = SimulatedGroup(1).run(run), SimulatedGroup(2).run(run)
    rounded, whole = run(0, None, torch.bfloat16), torch.cat(cut).detach()
    torch.testing.assert_close(rounded, whole, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(alone, whole, rtol=0.0, atol=LR / 10)
    assert torch.equal(one, other)
    torch.testing.assert_close(one.double(), state.x, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(("state", "rounding"), [("fp32", 2e-5), ("bf16", 0.03)])
def test_nothing_is_lost(state, rounding):
    """At momentum 0 the momentum is what has arrived: that and what is left, as gradients are, are all there was."""

    def run(rank: int, transport: Any) -> list[tuple[Tensor, Tensor]]:
        params, told = parameters(), []
        how = {"ns_dtype": torch.float64, "numerics": Numerics(state=state)}
        optimizer = made(params, transport, momentum=0.0, nesterov=False, **how)
        for step in range(6):
            train(optimizer, params, rank, range(step, step + 1))
            saved, shape = optimizer.state_dict()["state"][len(REST)], SHAPES[MATRICES[0]]
            left = saved["worker_error"].view(shape).float()
            if "whitened_by" in saved:
                left = raw(left, saved["whitened_by"], shape)
            told.append((left.clone(), optimizer.momentum(params[MATRICES[0]])))
        return told

    each = SimulatedGroup(3).run(run)
    before = torch.zeros(SHAPES[MATRICES[0]])
    for step in range(6):
        left = torch.stack([told[step][0].view(before.shape) for told in each]).mean(0)
        given = torch.stack([gradients(rank, step)[MATRICES[0]] for rank in range(3)]).mean(0)
        off = left + each[0][step][1] - before - given
        print(f"{state}, step {step}: off by {off.abs().max():.1e} at most, by {off.mean():.1e} on average")
        assert off.abs().max() <= rounding
        assert off.mean().abs() <= rounding / 20  # it is stochastic
        before = left


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_resumed_run_is_the_same(workers, state):
    numerics = Numerics(state=state)

    def run(rank: int, transport: Any) -> None:
        params = parameters()
        optimizer = made(params, transport, numerics=numerics)
        train(optimizer, params, rank, range(5))
        saved, at = copy.deepcopy(optimizer.state_dict()), values(params)
        train(optimizer, params, rank, range(5, 9))
        others = [Parameter(x) for x in at]
        resumed = made(others, transport, numerics=numerics)
        resumed.load_state_dict(saved)
        train(resumed, others, rank, range(5, 9))
        assert all(map(torch.equal, params, others))

    SimulatedGroup(workers).run(run)


def model_of(params: list[Parameter]) -> torch.nn.Module:
    model = torch.nn.Module()
    for i, p in enumerate(params):
        model.register_parameter(str(i), p)
    return model


def momenta_of(optimizer: OneBitMuon, params: list[Parameter]) -> list[Tensor]:
    optimizer.state_dict()
    return [optimizer.momentum(p) for p in params]


def write(rank: int, world_size: int, folder: str) -> list[Tensor]:
    params = parameters()
    optimizer = made(params)
    train(optimizer, params, rank, range(5))
    dcp.save(model_of(params), optimizer, folder)
    return momenta_of(optimizer, params)


def read(rank: int, world_size: int, folder: str) -> list[Tensor]:
    params = parameters()
    optimizer = made(params)
    dcp.load(model_of(params), optimizer, folder)
    momenta = momenta_of(optimizer, params)
    train(optimizer, params, rank, range(5, 9))
    return momenta


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (3, 2)])
def test_momenta_live_on_among_other_numbers_of_ranks(before, after, tmp_path):
    saved, *_ = run_ranks(write, before, str(tmp_path))
    for momenta in run_ranks(read, after, str(tmp_path)):
        for m, was in zip(momenta, saved, strict=True):
            torch.testing.assert_close(m, was, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("power", [0.5, 1.5])
def test_two_bfloat16_numbers_whiten_as_one_float32(power):
    """Whatever the directions' sizes, of which one bfloat16 number would lose the small ones."""
    n, draw = 64, torch.Generator().manual_seed(0)
    q, other = (torch.linalg.qr(torch.randn(m, n, generator=draw))[0] for m in (n, 4 * n))
    x = (other * torch.arange(1, n + 1) ** -power) @ q.T
    white, back = inverse_root((x.mT @ x)[None])
    high, low = split(white, torch.bfloat16)
    narrow = x[None].to(torch.bfloat16)
    one = torch.bmm(narrow, high)
    two = one.baddbmm(narrow, low)
    given = narrow[0].float() @ q
    worst = [((torch.bmm(y.float(), back)[0] @ q - given).norm(dim=0) / given.norm(dim=0)).max() for y in (one, two)]
    print(f"sizes i^-{power}: the worst direction comes back {worst[1]:.1%} off, of one number {worst[0]:.1%}")
    assert worst[1] <= 0.02
    assert worst[1] < worst[0]
    torch.testing.assert_close(joined((high, low)), white, rtol=0.0, atol=2.0**-16 * float(white.abs().max()))


# ---------------------------------------------------------------- what it costs


def layers(width: int, count: int) -> list[tuple[int, int]]:
    """Return the shapes of a transformer's matrices."""
    each = (3 * width, width), (width, width), (4 * width, width), (width, 4 * width)
    return [shape for _ in range(count) for shape in each]


def bytes_of(shapes: list[tuple[int, int]], workers: int) -> tuple[float, float, float, Owners]:
    """Return the bytes of signs, scales and whitening, for each parameter and step, W/(W - 1) of what a rank sends."""
    numel = sum(m * n for m, n in shapes)
    owners = Owners(
        FlatLayout(tuple(m * n for m, n in shapes), 1, 1024), [*map(Matrix.of, shapes)], workers, torch.device("cpu")
    )
    longest = max(sum(triangle(min(shapes[i])) for i in owned) for owned in owners.owned)
    each = owners.layout.numel / 4, 4 * workers * owners.slots, 4 * workers * longest / EVERY
    return (*(x / numel for x in each), owners)


def test_bytes_of_a_parameter_are_counted():
    """340M parameters, of which 302M are matrices, on 8 ranks."""
    signs, scales, whitening, owners = bytes_of(layers(1024, 24), 8)
    print(
        f"bytes per parameter of matrices and step: {signs:.3f} signs, {scales:.4f} scales, {whitening:.4f} whitening"
    )
    print(f"work of a rank, as a share of the equal one: {owners.share * 8:.2f}")
    assert signs + scales + whitening <= 0.27
    assert owners.share <= 1.1 / 8


@pytest.mark.parametrize(("state", "most"), [("fp32", 12), ("bf16", 10)])
def test_steps_send_what_is_counted_and_hold_what_is_said(state, most):
    workers, shapes = 4, layers(128, 4)
    numel = sum(m * n for m, n in shapes)

    def run(rank: int, transport: Any) -> list[dict[str, Any]]:
        params = [Parameter(torch.zeros(shape)) for shape in shapes]
        how = {"wire": Wire(block_size=1024), "numerics": Numerics(state=state)}
        optimizer = OneBitMuon(params, process_group=transport, **how)
        told = []
        for step in range(6):
            draw = torch.Generator().manual_seed(10 * step + rank)
            for p in params:
                p.grad = torch.randn(p.shape, generator=draw)
            optimizer.step()
            told.append(optimizer.stats())
        return told

    *_, renewing, plain = SimulatedGroup(workers).run(run)[0]
    signs, scales, whitening, _ = bytes_of(shapes, workers)
    sent = [stats["bytes_step"] / numel * workers / (workers - 1) for stats in (plain, renewing)]
    held = plain["state_bytes"] / numel
    print(f"a step sends {sent[0]:.4f} bytes per parameter ({signs + scales:.4f} counted), whitening {whitening:.4f}")
    print(f"{state}: a rank of {workers} holds {held:.2f} bytes per parameter (limit {most + 4 / workers:.2f})")
    assert sent[0] == pytest.approx(signs + scales, rel=0.01)
    assert sent[1] - sent[0] == pytest.approx(EVERY * whitening, rel=0.01)
    assert held <= most + 4 / workers
