"""What ops promise besides their formulas (``test_every_op``): compression contracts, rounding has no bias."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import assert_equal_backends, tensors
from element_formulas import momentum_compress
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from op_arguments import LIVE, MASKS, MIXED, Problem, wide
from op_formulas import EPS32, Wide, scale_of, sign
from torch import Tensor

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import SCALE_NORMS, Coef, pack, unpack
from fusedonebit.triton_kernels.headers import Word
from fusedonebit.triton_kernels.nouns import Compensated


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


# ---------------------------------------------------------------- torch's contract


def test_compress_finish_apply_compile_to_one_graph_bit_exact():
    def step(compress: tuple, finish: tuple, apply: tuple) -> None:
        ops.momentum_compress(*compress)
        ops.finish(*finish)
        ops.apply_momentum(*apply)

    def made() -> list[tuple]:
        p = Problem(MIXED, 2)
        finish = p.arguments("finish", partials=p.partials)
        return [tuple(each) for each in (p.arguments("momentum_compress"), finish, p.arguments("apply_momentum"))]

    eager, compiled = made(), made()
    step(*eager)
    torch.compile(step, backend="aot_eager", fullgraph=True)(*compiled)
    for a, b in zip(*map(tensors, (eager, compiled)), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("name", ["apply_momentum", "local_step"])
def test_writing_a_parameter_counts_as_a_change_of_it(name):
    p = Problem((5,))
    p.params = [torch.nn.Parameter(x) for x in p.params]
    versions = [x._version for x in p.params]
    with torch.no_grad():
        getattr(ops, name)(*p.arguments(name, **{"step_moves": True} if name == "local_step" else {}))
    assert [x._version for x in p.params] != versions


# ---------------------------------------------------------------- pack, unpack


@given(arrays(np.float32, st.integers(0, 40).map(lambda n: 8 * n)))
def test_pack_is_numpys_and_unpack_inverts_it(x):
    bits = pack(torch.from_numpy(x))
    assert np.array_equal(bits.numpy(), np.packbits(x >= 0, bitorder="little"))
    signs = unpack(bits, torch.float64)
    assert signs.dtype is torch.float64
    assert np.array_equal(signs.numpy(), np.where(x >= 0, 1, -1))


def test_pack_takes_any_strides_and_refuses_part_of_a_byte():
    x = torch.tensor([[1.0, -1.0]])
    assert pack(x.expand(8, 2).t()).tolist() == [255, 0]
    assert pack(x.repeat(1, 8)[0, ::2]).tolist() == [255]
    with pytest.raises(ValueError, match="x must have a multiple of 8 elements, got 9"):
        pack(torch.zeros(9))


# ---------------------------------------------------------------- compression


def check_momentum_compress(p: Problem, **asked: object) -> None:
    before, after = p.arguments("momentum_compress", **asked), None
    before = before._replace(compensated_numbers=p.compensated.clone(), found=p.found.clone())
    after = p.arguments("momentum_compress", **asked)
    ops.momentum_compress(*after)
    momentum_compress(Wide(before), after)


def test_an_overflow_to_infinity_is_dropped_as_well():
    p = Problem((200,))
    p.coef[:, Coef.UNIT] = 1e30
    p.grads[0][5] = 1e15
    check_momentum_compress(p)
    assert int(p.found) == 33


def test_a_gradient_is_read_in_memory_order():
    p, other = Problem((12, 20)), Problem((12, 20))
    p.grads[0] = p.grads[0].view(3, 4).t()
    for each in (p, other):
        ops.momentum_compress(*each.arguments("momentum_compress"))
    assert same_bits(p.compensated, other.compensated)


@pytest.mark.parametrize("norm", SCALE_NORMS)
@pytest.mark.parametrize("scope", ["global", "layer", "block"])
@pytest.mark.parametrize("ternary", [False, True])
def test_a_scale_is_the_norm_of_its_scopes_live_elements(scope, norm, ternary):
    p = Problem(MIXED, 3, masks=MASKS, excluded=[2], ternary=ternary, scope=scope)
    ops.momentum_compress(*p.arguments("momentum_compress"))
    arguments = p.arguments("finish", partials=p.partials, norm=SCALE_NORMS[norm])
    ops.finish(*arguments)
    segment = arguments.segment.long()
    c, owner, scale = wide(p.compensated), p.by_element(segment), arguments.segments.measured[segment]
    expected = [scale_of(c[(owner == s) & p.live], norm, ternary) for s in segment.tolist()]
    np.testing.assert_allclose(wide(scale), expected, rtol=EPS32 * 1.001)
    left = c - p.by_element(scale) * sign(c, ternary)
    signal = arguments.words[:, Word.SIGNAL].contiguous().view(torch.float32)
    np.testing.assert_allclose(signal, np.linalg.norm(left[p.live]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("live", LIVE)
def test_settling_leaves_the_residual_and_changes_no_later_bit(live, ternary):
    settled, deferred = (Problem(MIXED, 3, **live, ternary=ternary) for _ in range(2))
    c, s = settled.compensated.numpy().copy(), settled.by_element(settled.worker_scale).astype(np.float32)
    for _ in range(2):  # the second time nothing is left to settle
        ops.settle(Compensated(settled.compensated, settled.worker_scale), ternary, settled.places)
        expected = np.where(settled.live, c - s * sign(c, ternary).astype(np.float32), 0)
        assert np.array_equal(settled.compensated.numpy(), expected)
        assert not settled.worker_scale.any()
    for p in (settled, deferred):
        ops.momentum_compress(*p.arguments("momentum_compress"))
    assert same_bits(settled.compensated, deferred.compensated)
    assert same_bits(settled.partials, deferred.partials)
    assert same_bits(settled.bits, deferred.bits)


def residual_ratio(x: np.ndarray, norm: str) -> float:
    """|x - s*sign(x)|^2 / |x|^2."""
    p = Problem((x.size,), scope="global")
    p.grads = [torch.from_numpy(x)]
    p.compensated.zero_(), p.worker_scale.zero_(), p.exp_avg_scale.zero_()
    p.coef[:, Coef.ONE_MINUS_BETA1] = p.coef[:, Coef.UNIT] = 1.0
    ops.momentum_compress(*p.arguments("momentum_compress"))
    arguments = p.arguments("finish", partials=p.partials, norm=SCALE_NORMS[norm])
    ops.finish(*arguments)
    c, s = p.compensated[: x.size].double(), arguments.segments.measured[0].double()
    residual = c - torch.where(c >= 0, s, -s)
    return float(residual.square().sum() / c.square().sum())


vectors = arrays(np.float32, st.integers(1, 200), elements=st.floats(-1000, 1000, width=32)).filter(
    lambda x: np.abs(x).max() > 1e-3
)


@given(vectors)
def test_l1_and_contractive_scales_contract_every_vector(x):
    assert residual_ratio(x, "l1") <= (1 - 1 / x.size) + 1e-6
    assert residual_ratio(x, "contractive") <= (1 - 0.19 / x.size) + 1e-6


def test_an_l2_scale_expands_where_one_element_stands_out():
    x = np.zeros(100, np.float32)
    x[7] = 1.0
    # s = 1/10: one error of 0.9 and 99 of 0.1.
    assert residual_ratio(x, "l2") == pytest.approx(0.81 + 0.99, rel=1e-6)
    assert residual_ratio(x, "l1") == pytest.approx(0.99, rel=1e-6)
    assert residual_ratio(x, "contractive") == pytest.approx((1 - 0.019) ** 2 + 99 * 0.019**2, rel=1e-6)


# ---------------------------------------------------------------- rounding


def test_squares_in_bfloat16_are_rounded_without_bias():
    p, updates = Problem((4096,), 1, 1024), 400
    own, exact = torch.ones(p.layout.numel).bfloat16(), torch.ones(p.layout.numel).double()
    for t in range(updates):
        ops.momentum_compress(*p.arguments("momentum_compress", compensated_drawn=torch.tensor(t), worker_sq=own))
        square = p.flat(p.grads) ** 2
        exact = exact * p.column(Coef.BETA2)[0] + p.column(Coef.ONE_MINUS_BETA2)[0] * torch.from_numpy(square)
    off = (own.double() / exact - 1).numpy()
    error = off.std() / len(off) ** 0.5
    print(f"mean {off.mean():+.5f}, standard error {error:.5f} (limit 5), of one element {off.std():.3f} (limit 0.03)")
    assert abs(off.mean()) <= 5 * error
    assert off.std() <= 0.03


def test_moments_in_bfloat16_are_next_to_exact_and_unbiased():
    exact, halves = Problem(MIXED, 2), Problem(MIXED, 2)
    halves.compensated, halves.exp_avg_sq = halves.compensated.bfloat16(), halves.exp_avg_sq.bfloat16()
    exact.compensated.copy_(halves.compensated)
    exact.exp_avg_sq.copy_(halves.exp_avg_sq)
    start = halves.compensated.clone(), halves.exp_avg_sq.clone()
    ops.adam_update(*exact.arguments("adam_update"))
    totals, draws = [torch.zeros(exact.layout.numel, dtype=torch.float64) for _ in range(2)], 400
    for draw in range(draws):
        halves.compensated.copy_(start[0])
        halves.exp_avg_sq.copy_(start[1])
        ops.adam_update(*halves.arguments("adam_update", moments_drawn=torch.tensor(draw), found=...))
        for total, found in zip(totals, (halves.compensated, halves.exp_avg_sq), strict=True):
            total += found.double()
    for total, kept, wanted in zip(
        totals, (halves.compensated, halves.exp_avg_sq), (exact.compensated, exact.exp_avg_sq), strict=True
    ):
        unit = wanted.abs().double() * 2.0**-7  # an upper bound of what lies between two neighbours
        assert ((kept.double() - wanted.double()).abs() <= unit).all()
        live = torch.from_numpy(exact.live) & (wanted != 0)
        off = ((total / draws - wanted.double()) / unit)[live]
        assert off.abs().max() < 6 * 0.5 / draws**0.5  # of each element
        assert abs(float(off.mean())) < 5 * 0.5 / (draws * len(off)) ** 0.5


@pytest.mark.kernels
@pytest.mark.parametrize("coded", [False, True])
def test_a_part_of_the_index_space_is_updated_as_the_whole_is(coded):
    """Of three tensors the last two, by views: random bits are those of their places in the whole."""
    sizes, block = (300, 1100, 129), 128

    def make(whole: bool) -> tuple:
        p = Problem(sizes, 1, block, masks={1: torch.arange(1100) % 7 > 0}, dtype=torch.bfloat16)
        dtype = torch.uint8 if coded else torch.bfloat16
        given = p.arguments(
            "adam_update", moments_exp_avg=dtype, moments_exp_avg_sq=dtype, found=..., correction=torch.int8
        )
        if whole:
            return given
        at = p.layout.first_block[1]
        flat, these = slice(at * block, None), slice(at, None)
        places = p.places.at(these)._replace(sizes=sizes[1:], block_tensor=p.places.block_tensor[these] - 1)
        return given._replace(
            params=p.params[1:], grads=p.grads[1:], places=places, moments=given.moments.at(flat, these),
            coef=p.coef[1:], correction=given.correction[flat], first=torch.tensor([at], dtype=torch.int32),
        )  # fmt: skip

    assert_equal_backends("adam_update", lambda: make(False))
    whole, part = make(True), make(False)
    ops.adam_update(*whole)
    ops.adam_update(*part)
    after = int(part.first) * block
    assert all(map(torch.equal, whole.params[1:], part.params))
    for one, other in zip(whole.moments[:2], part.moments[:2], strict=True):
        assert torch.equal(one[after:], other)
    assert torch.equal(whole.correction[after:], part.correction)
