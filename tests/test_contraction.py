"""Compression contracts, |x - C(x)| < |x| for every x but 0, with l1, contractive and relaxed scales; l2 may expand.

C is what the library does: ``CompressedAllReduce``, on a worker's side and on a server's, in float32.
Norms are taken in float64, per scale: the elements that share one are compressed by themselves.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusedonebit.comm import CompressedAllReduce, SimulatedGroup
from fusedonebit.triton_kernels import FlatLayout

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
    assert ratios([one_hot(1000, 5, 1.0)], "l2", *scope)[0] == 0
    assert ratios([x], "contractive", *scope)[0] < 1


@pytest.mark.parametrize("scope", SCOPES)
def test_contractive_scales_are_l2s_where_these_contract_well(scope):
    """Of a vector that is not peaked, |x|_2 / sqrt(d) is less than 1.9 times the mean of |x|."""
    x = [torch.randn(1000, generator=torch.Generator().manual_seed(1))]
    assert np.array_equal(*(compress(x, norm, scope, "worker", False)[1] for norm in ("l2", "contractive")))
