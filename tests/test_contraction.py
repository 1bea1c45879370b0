"""Compression contracts, |x - C(x)| < |x| for every x but 0, but for l2 scales; ternary in two bits: runs, the wire.

C is what the library does: ``CompressedAllReduce``, on a worker's side and on a server's, in float32.
Norms are taken in float64, per scale: the elements that share one are compressed by themselves. Of ternary
compression, sign and zero, see Tarasov & Ershov, section 4.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from observe import change_header
from optimizers import ADAM_AND_LAMB, PAPER, UNGUARDED, construct
from ranks import simulate
from torch import Tensor
from torch.nn import Parameter

from fusedonebit.checkpoint import header_of
from fusedonebit.comm import CompressedAllReduce, SimulatedGroup, Transport
from fusedonebit.triton_kernels import FlatLayout

# ---------------------------------------------------------------- one round, by hand


def test_a_round_of_five_numbers_is_what_one_works_out_by_hand():
    """Scales are means over what is not zero; a zero has no residual; -0.0 is a zero."""
    reduce = CompressedAllReduce(FlatLayout((5,), 1, 128), scale_norm="l1", ternary=True)
    reduce([torch.tensor([0.0, 3.0, -1.0, -0.0, 2.0])])
    # s = (3 + 1 + 2)/3 = 2, of the worker; what the server gets has three elements of size 2.
    assert reduce.result()[:5].tolist() == [0.0, 2.0, -2.0, 0.0, 2.0]
    assert not reduce.result()[5:].any()
    assert reduce.worker.norms() == pytest.approx((14**0.5, 2**0.5))
    assert reduce.server.norms() == pytest.approx((12**0.5, 0.0))
    assert reduce.gathered.bits[0, :, 0].tolist() == [0b11111011, 0b00010110]
    reduce.settle()
    assert reduce.worker.compensated[:5].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert reduce.worker.norms() == pytest.approx((14**0.5, 2**0.5))


def test_the_l2_scale_and_its_residual_count_what_is_not_zero():
    reduce = CompressedAllReduce(FlatLayout((5,), 1, 128), scale_norm="l2", ternary=True)
    reduce([torch.tensor([0.0, 3.0, -1.0, 0.0, 0.0])])
    s = 5**0.5  # of (9 + 1)/2
    assert reduce.worker.scale.tolist() == pytest.approx([s])
    assert reduce.worker.norms()[1] == pytest.approx(np.hypot(3 - s, 1 - s))


SHAPES = ((7,), (20, 10), (0,), (1,), (150,))
STILL = 5  # every fifth coordinate has no gradient, ever, on any rank


def train(rank: int, transport: Transport, name: str, options: dict) -> list[Tensor]:
    """Trains 4 steps uncompressed and 10 compressed, of which one is skipped; tells what moved."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in SHAPES]
    before = [p.detach().clone() for p in params]
    generator = torch.Generator().manual_seed(rank)
    options = UNGUARDED | options | {"process_group": transport}
    optimizer = construct(name, params, 1e-2, freeze_step=4, weight_decay=0.0, **options)
    for step in range(14):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
            p.grad.view(-1)[::STILL] *= 0.0
            p.grad.view(-1)[rank :: 7 + step] = 0.0
        if step == 8 and rank == transport.world_size - 1:
            params[1].grad[3, 3] = torch.nan
        optimizer.step()
    stats = optimizer.stats()
    assert (stats["phase"], stats["skipped_steps"]) == ("compression", 1)
    return [p.detach() != b for p, b in zip(params, before, strict=True)]


RUNS = [
    {},
    PAPER | {"scale_scope": "layer", "scale_norm": "contractive"},
    {"precondition": True, "scale_scope": "global", "scale_norm": "l1"},
]


@pytest.mark.long(but=1)
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("options", RUNS, ids=str)
@ADAM_AND_LAMB
def test_a_coordinate_without_gradients_stays_still_if_ternary(name, options):
    ternary, onebit = (simulate(train, 2, name, {"ternary": t} | options)[0] for t in (True, False))
    assert not any(moved.view(-1)[::STILL].any() for moved in ternary)
    assert any(moved.view(-1)[::STILL].any() for moved in onebit)
    for moved in ternary:
        assert moved.view(-1)[torch.arange(moved.numel()) % STILL != 0].all()


def bytes_of_a_step(rank: int, transport: Transport, name: str, ternary: bool, options: dict) -> tuple[dict, str]:
    param = Parameter(torch.ones(1024, 200))
    options = UNGUARDED | options | {"process_group": transport}
    optimizer = construct(name, [param], freeze_step=1, ternary=ternary, **options)
    for step in range(2):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.step()
    assert optimizer.phase == "compression"
    return optimizer.stats(), repr(optimizer)


@pytest.mark.long(but=2)
@ADAM_AND_LAMB
@pytest.mark.parametrize("options", [{}, {"scale_scope": "global"}], ids=["defaults", "global"])
def test_a_step_sends_two_bits_per_parameter(name, options):
    (one, said), (two, says) = (simulate(bytes_of_a_step, 2, name, ternary, options)[0] for ternary in (False, True))
    ratio = two["bytes_step"] / one["bytes_step"]
    bits = 8 * two["bytes_step"] / two["parameters"]
    print(f"{name}, {options}: {ratio:.4f} times the bytes of one bit, {bits:.4f} bits sent per parameter")
    assert two["bytes_step"] - one["bytes_step"] == two["parameters"] // 8, "only the bits travel twice"
    if options:
        assert 1.99 < ratio < 2.01
    assert two["wire_bytes"] > one["wire_bytes"]
    momenta = 2 if name == "onebit-lamb" else 1
    assert two["state_bytes"] - one["state_bytes"] == momenta * two["parameters"] // 8
    assert ", ternary" in says
    assert "ternary" not in said


def test_a_checkpoint_from_before_this_option_has_one_bit():
    params = [Parameter(torch.ones(300))]
    optimizer = construct("onebit-adam", params, freeze_step=1)
    for _ in range(2):
        params[0].grad = torch.ones(300)
        optimizer.step()
    saved = optimizer.state_dict()
    assert header_of(saved)["settled"]["ternary"] is False
    change_header(saved, lambda header: header["settled"].pop("ternary"))
    construct("onebit-adam", params, freeze_step=1).load_state_dict(saved)
    with pytest.raises(ValueError, match="written with ternary=False, but here it is True; it can only be changed"):
        construct("onebit-adam", params, freeze_step=1, ternary=True).load_state_dict(saved)


BLOCK = 128
ROUNDING = 3e-7
"""Of |x|: s and x - s*sign(x) are rounded once each, to 6e-8."""

CONTRACTING = ("l1", "contractive", "relaxed")
SCOPES = ("global", "layer", "block")
SIDES = ("worker", "server")


def compress(tensors: list[Tensor], norm: str, scope: str, side: str, ternary: bool) -> tuple[np.ndarray, ...]:
    """One side of a 1-bit all-reduce: x, what is left of it, which scale each element has; elements of each scale."""
    layout = FlatLayout(tuple(x.numel() for x in tensors), 1, BLOCK)
    reduce = CompressedAllReduce(layout, scale_norm=norm, scale_scope=scope, ternary=ternary)
    x = torch.zeros(layout.numel)
    for i, tensor in enumerate(tensors):
        x[layout.offset(i) : layout.offset(i) + tensor.numel()] = tensor
    if side == "server":
        reduce.server.compensated.copy_(x)  # its own residual; workers send zeros
        tensors = [torch.zeros_like(tensor) for tensor in tensors]
    reduce(tensors)
    reduce.settle()
    if side == "server":
        # The average is what a server has compressed, in full.
        left = reduce.server.compensated
        torch.testing.assert_close(x - reduce.result(), left, rtol=0.0, atol=ROUNDING * float(x.abs().max()))
    else:
        left = reduce.worker.compensated
    segment = getattr(reduce, side).segment.numpy()
    counts = np.bincount(segment, reduce.live.numel.numpy())
    return x.double().numpy(), left.double().numpy(), np.repeat(segment, BLOCK), counts


def ratios(tensors: list[Tensor], norm: str, scope: str, side: str, ternary: bool) -> tuple[np.ndarray, np.ndarray]:
    """|x - C(x)|^2 / |x|^2 of each scale and how many share it; of those with x = 0 nothing may be left."""
    x, left, segment, counts = compress(tensors, norm, scope, side, ternary)
    assert np.isfinite(left).all()
    # Squares of 1e-30 and 1e30 are fine in float64.
    before, after = np.bincount(segment, x * x), np.bincount(segment, left * left)
    assert not after[before == 0].any()
    return after[before > 0] / before[before > 0], counts[before > 0]


# ---------------------------------------------------------------- whatever x is

MAGNITUDES = st.floats(-30, 30).map(lambda e: 10.0**e)
SIGNS = st.sampled_from([-1.0, 1.0])


def spread(size: int, seed: int, low: float, high: float, share: float) -> Tensor:
    """Magnitudes from low to high, evenly in their logarithms; zeros but for a share."""
    generator = torch.Generator().manual_seed(seed)
    logs = math.log10(low) + (math.log10(high) - math.log10(low)) * torch.rand(size, generator=generator).double()
    signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
    kept = torch.rand(size, generator=generator) < share
    return (signs * 10.0**logs * kept).float()


def one_hot(size: int, at: int, value: float) -> Tensor:
    x = torch.zeros(size)
    x[at % size] = value
    return x


def listed(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


SIZES = st.one_of(st.integers(1, 1000), st.integers(4000, 9000))  # blocks share a scale by 4096 elements
VECTORS = st.one_of(
    st.builds(spread, SIZES, st.integers(0, 10**6), MAGNITUDES, MAGNITUDES, st.sampled_from([1.0, 0.3, 0.01])),
    st.builds(one_hot, SIZES, st.integers(0, 8999), st.builds(lambda s, m: s * m, SIGNS, MAGNITUDES)),
    st.builds(lambda n, s, m: torch.full((n,), s * m), SIZES, SIGNS, MAGNITUDES),
    st.lists(st.builds(lambda s, m: s * m, st.sampled_from([-1.0, 0.0, 1.0]), MAGNITUDES), min_size=1).map(listed),
)
PROBLEMS = st.lists(VECTORS, min_size=1, max_size=4)


@pytest.mark.long(but=1, full=True)
@pytest.mark.parametrize("ternary", [False, True], ids=["binary", "ternary"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("norm", CONTRACTING)
def test_what_is_left_is_smaller_than_what_was_compressed(norm, scope, side, ternary):
    worst = [0.0]

    @settings(max_examples=40)
    @given(tensors=PROBLEMS)
    @example(tensors=[one_hot(1000, 3, 1e30), one_hot(1000, 3, 1e-30)])
    @example(tensors=[torch.full((1000,), 1e30), torch.full((7,), -1e-30)])
    @example(tensors=[torch.cat([one_hot(4096, 3, -1e30), one_hot(4096, 3, 1e-30)]), torch.zeros(300), listed([1.0])])
    @example(tensors=[listed([-0.0, 1e-30, -1e30])])
    @example(tensors=[torch.cat([listed([1.0]), torch.full((999,), 1e-6)])])
    def contracts(tensors: list[Tensor]) -> None:
        # With s = k |x|_1 / d it shrinks by (2k - k^2) |x|_1^2 / d, |x|_1 >= |x|, and k is 1, or from 1 to 1.9.
        least = 1.0 if norm == "l1" else 0.19
        for ratio, elements in zip(*ratios(tensors, norm, scope, side, ternary), strict=True):
            worst[0] = max(worst[0], ratio)
            assert ratio < 1
            assert ratio <= 1 - least / elements + ROUNDING

    contracts()
    print(f"{norm}, {scope}, {side}, ternary={ternary}: largest |x - C(x)|^2 / |x|^2: 1 - {1 - worst[0]:.1e} (limit 1)")
    assert worst[0] > 0.9, "nothing hard was tried"


@pytest.mark.parametrize("ternary", [False, True], ids=["binary", "ternary"])
@pytest.mark.parametrize("norm", CONTRACTING)
def test_so_it_is_where_a_server_compresses_what_ranks_have_sent(norm, ternary):
    """Three ranks: the server's x is the average of three compressed vectors and its residual."""
    sizes, steps = (700, 1, 250), 6

    def each(rank: int, transport) -> list[tuple[float, float]]:
        reduce = CompressedAllReduce(FlatLayout(sizes, 3, BLOCK), transport, scale_norm=norm, ternary=ternary)
        found, carried = [], torch.zeros_like(reduce.server.compensated)
        for step in range(steps):
            reduce([spread(n, 7 * step + rank, 1e-6, 1.0, 0.2) for n in sizes])
            # c is what was compressed until it is settled
            x = reduce.server.compensated.clone().double()
            reduce.settle()
            left = reduce.server.compensated.double()
            if x.any():
                found.append(float(left.square().sum() / x.square().sum()))
            carried.copy_(reduce.server.compensated)
        assert carried.any()
        return found

    worst = max(ratio for found in SimulatedGroup(3).run(each) for ratio in found)
    print(f"{norm}, ternary={ternary}: largest |x - C(x)|^2 / |x|^2 at a server: {worst:.4f} (limit 1)")
    assert worst < 1


# ---------------------------------------------------------------- l2

PEAKED = {
    "one-hot of 17": one_hot(17, 5, 1.0),
    "one-hot of 1000": one_hot(1000, 5, -1e-30),
    "few of many": torch.cat([torch.full((3,), 1e30), torch.zeros(997)]),
    "nearly one-hot": torch.cat([listed([1.0]), torch.full((999,), 1e-4)]),
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("case", PEAKED)
def test_l2_scales_expand_peaked_vectors_contractive_ones_do_not(case, side):
    x = PEAKED[case]
    wide = x.double()
    assert wide.abs().sum() < 0.5 * math.sqrt(len(x)) * wide.norm()
    expanded, contracted = (ratios([x], norm, "layer", side, False)[0].item() for norm in ("l2", "contractive"))
    # |x - C(x)|^2 = 2 |x|^2 - 2 |x|_1 |x|_2 / sqrt(d)
    expected = float(2 - 2 * wide.abs().sum() / wide.norm() / math.sqrt(len(x)))
    print(f"{case}, {side}: |x - C(x)|^2 / |x|^2: {expanded:.4f} with l2 (more than 1), {contracted:.6f} contractive")
    assert expanded > 1
    assert expanded == pytest.approx(expected, rel=1e-5)
    assert contracted < 1


def test_l2_expands_ternary_values_too_if_none_is_zero():
    x, scope = torch.cat([listed([1.0]), torch.full((999,), 1e-4)]), ("layer", "worker", True)
    assert ratios([x], "l2", *scope)[0] > 1
    for norm in ("l1", "l2", "contractive"):  # one element that stands out among zeros is sent exactly
        assert ratios([one_hot(1000, 5, 1.0)], norm, *scope)[0] == 0
    assert ratios([x], "contractive", *scope)[0] < 1


@pytest.mark.parametrize("scope", SCOPES)
def test_contractive_scales_are_l2s_where_these_contract_well(scope):
    """Of a vector that is not peaked, |x|_2 / sqrt(d) is less than 1.9 times the mean of |x|."""
    x = [torch.randn(1000, generator=torch.Generator().manual_seed(1))]
    assert np.array_equal(*(compress(x, norm, scope, "worker", False)[1] for norm in ("l2", "contractive")))
