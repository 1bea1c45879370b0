"""What ops promise besides their formulas (``test_every_op``): scales of each scope, rounding without bias."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from backends import assert_equal_backends
from element_formulas import momentum_compress
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from op_arguments import LIVE, MASKS, MIXED, Problem, wide
from op_draws import WAYS
from op_formulas import EPS32, Wide, scale_of, sign
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedonebit import triton_kernels as ops
from fusedonebit.optim.own_variance import MOST, places
from fusedonebit.triton_kernels import SCALE_NORMS, Coef, FlatLayout, merge_signs, pack, pick_owned, unpack
from fusedonebit.triton_kernels.headers import Word
from fusedonebit.triton_kernels.marsit_signs import bernoulli, threshold_of
from fusedonebit.triton_kernels.nouns import Compensated


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


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


def test_projections_are_few_and_cover_each_block():
    sizes = (3, 70, 400, 5000, 300_000)
    layout = FlatLayout(sizes, 2, 1024)
    share, lengths, first = places(layout)
    counts = [b - a for a, b in itertools.pairwise(first)]
    print(f"projections of {sizes}: {counts}")
    assert all(min(size, MOST / 2) <= count <= MOST for size, count in zip(sizes, counts, strict=True))
    blocks = layout.first_block[-1]
    assert sum(lengths) == int((1024 // share[:blocks]).sum())


STEP = ("step_moves", "step_last", "step_decay_in_update", "step_precondition", "step_follows")


@pytest.mark.kernels
@pytest.mark.parametrize("way", [way for way in WAYS if way[1]])
def test_momentum_that_overflows_the_buffer_is_left_out_and_told(way):
    """beta1*m overflows on top of an update that does not; and without eps, m/denom is 0/0 where there is nothing."""

    def make() -> tuple:
        p = Problem([600], 2)
        p.coef[:, Coef.EPS] = p.grads[0][:50] = p.exp_avg_sq[:50] = 0.0
        p.compensated[100:300] = 3.0e38
        arguments = p.arguments("local_step", **dict(zip(STEP, way, strict=True)))
        arguments.exp_avg[:50] = 0.0
        arguments.exp_avg[100:300] = 0.5e38
        return arguments

    arguments = assert_equal_backends("local_step", make)
    assert arguments.compensated.isfinite().all()
    assert arguments.flags.item() == 1


def test_lion_tosses_a_coin_for_zeros_another_one_in_each_step():
    def ones(step):
        p = Problem([80_000], block_size=1024)
        arguments = p.arguments("lion_compress", step=step)
        arguments.exp_avg.zero_()
        arguments.grads[0].zero_()
        ops.lion_compress(*arguments)
        return unpack(p.bits.view(-1))[:80_000]

    a, b = ones(3), ones(4)
    print(f"means of coins {a.mean():.4f} {b.mean():.4f}, of their product {(a * b).mean():.4f}")
    assert max(abs(a.mean()), abs(b.mean()), abs((a * b).mean())) < 0.015


def test_differing_bits_are_taken_as_often_as_the_threshold_says():
    arguments = Problem((16_512,)).arguments("merge_signs", threshold=threshold_of(2))
    before = arguments.bits.clone()
    merge_signs(*arguments)
    taken, differ = (
        sum(((x >> k) & 1).sum() for k in range(8)) for x in (arguments.bits ^ before, before ^ arguments.arrived_bits)
    )
    assert 0.4 < taken / differ < 0.6


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_all_ranks_agree_on_owners_and_each_owns_as_many(world_size):
    planes = []
    for rank in range(world_size):
        arguments = Problem((world_size * 16_512,), world_size, rank=rank).arguments("pick_owned")
        pick_owned(*arguments)
        planes.append(arguments.owners)
    assert all(torch.equal(planes[0], other) for other in planes)
    owned = torch.tensor([sum(int(((plane >> k) & 1).sum()) for k in range(8)) for plane in planes[0]]) / 16_512
    assert ((owned * world_size - 1).abs() < 0.1).all()


@pytest.mark.long(but=1)
@pytest.mark.parametrize("threshold", [*map(threshold_of, range(2, 10)), 1, 1 << 20, 3 << 30, (1 << 32) - 1])
def test_a_draw_is_1_with_its_exact_probability_at_every_bit(threshold):
    words, part = 1_000_000, 4096
    ones = torch.zeros(32, dtype=torch.int64)
    for at in range(0, words, part):
        drawn = bernoulli(threshold, 77, torch.arange(at, min(at + part, words)))
        ones += torch.stack([((drawn >> k) & 1).sum() for k in range(32)])
    p = threshold / 2**32
    z = (ones - words * p) / math.sqrt(words * p * (1 - p))
    assert float(z.abs().max()) <= 4
    assert abs(float(z.sum()) / math.sqrt(32)) <= 4


class Operations(TorchDispatchMode):
    """Counts what torch is asked to compute, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements += result.numel() if isinstance(result, Tensor) and "bitwise" in func.__name__ else 0
        return result


def test_zeros_at_the_end_of_a_probability_cost_nothing():
    def cost(threshold: int) -> int:
        with Operations() as counted:
            bernoulli(threshold, 77, torch.arange(1 << 12))
        return counted.elements >> 12  # per word; what is done once per digit rounds to nothing

    one = cost(1 << 31)
    assert one > 0
    assert cost(0) == 0
    assert cost(1 << 29) == 3 * one
    assert cost(1) == cost((1 << 32) - 1) == 32 * one
