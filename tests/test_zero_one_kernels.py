"""0/1 Adam's kernels and distributed Lion's: every backend equals eager torch bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from advance_arguments import advance_arguments
from backends import DTYPES, assert_equal_backends, problem
from hypothesis import given, settings
from hypothesis import strategies as st
from marsit_arguments import local_arguments
from reference_ops import Problem
from zero_one_arguments import WAYS, lion_arguments, local_step_arguments, rebuild_arguments

from fusedonebit import triton_kernels
from fusedonebit.triton_kernels import BLOCK_SIZES, Coef, unpack

pytestmark = pytest.mark.kernels

SIZES = [([3000, 8, 1024], 1), ([5000, 1030, 7], 3), ([1], 1), ([130], 2)]


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("sizes", "world_size"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_local_step_equals_eager(sizes, world_size, dtype):
    for way, inside, special in itertools.product(WAYS, (False, True), (False, True)):

        def make(way=way, inside=inside, special=special):
            masks = {0: torch.arange(sizes[0]) % 5 != 0}
            p = problem(sizes, world_size, dtype=dtype, special=special, masks=masks)
            return local_step_arguments(p, way, inside, begins=inside != special)

        assert_equal_backends("local_step", make)


def test_a_held_local_step_moves_nothing_but_keeps_the_momentum_for_the_synchronisation():
    for way in (*WAYS[:4], WAYS[-1]):

        def make(way=way):
            return local_step_arguments(problem([5000, 100], special=True), way, hold=1)

        assert_equal_backends("local_step", make)
        arguments, before = make(), make()
        triton_kernels.local_step(*arguments)
        assert all(map(torch.equal, arguments.params, before.params))
        assert torch.equal(arguments.exp_avg, before.exp_avg)
        assert torch.equal(arguments.exp_avg_sq, before.exp_avg_sq)
        assert not arguments.flags.any()


def test_a_gradient_that_is_not_finite_is_dropped_and_told():
    for way in (*WAYS[:2], WAYS[-1]):
        arguments = local_step_arguments(problem([5000], special=True), way)
        triton_kernels.local_step(*arguments)
        assert arguments.flags.item() == 1
        assert all(x.isfinite().all() for x in (*arguments.params, arguments.exp_avg, arguments.exp_avg_sq))
        assert arguments.compensated.isfinite().all()


@pytest.mark.parametrize("way", [way for way in WAYS if way[1]])
def test_no_momentum_is_added_that_would_leave_the_buffer_not_finite_and_that_is_told(way):
    """beta1*m overflows on top of an update that does not; and without eps, m/denom is 0/0 where there is nothing."""

    def make() -> tuple:
        p = problem([600], 2, 128)
        p.coef[:, Coef.EPS] = p.grads[0][:50] = p.exp_avg_sq[:50] = 0.0
        p.compensated[100:300] = 3.0e38
        arguments = local_step_arguments(p, way)
        arguments.exp_avg[:50] = 0.0
        arguments.exp_avg[100:300] = 0.5e38
        return arguments

    assert_equal_backends("local_step", make)
    arguments = make()
    triton_kernels.local_step(*arguments)
    assert arguments.compensated.isfinite().all()
    assert arguments.flags.item() == 1


@pytest.mark.parametrize(("sizes", "world_size"), SIZES)
def test_rebuild_momentum_equals_eager(sizes, world_size):
    for way in itertools.product((False, True), (False, True), (False, True)):

        def make(way=way):
            masks = {0: torch.arange(sizes[0]) % 5 != 0}
            return rebuild_arguments(problem(sizes, world_size, masks=masks), *way)

        assert_equal_backends("rebuild_momentum", make)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("sizes", "world_size"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lion_compress_equals_eager(sizes, world_size, dtype):
    for hold, special in itertools.product((0, 1), (False, True)):

        def make(hold=hold, special=special):
            masks = {0: torch.arange(sizes[0]) % 5 != 0}
            return lion_arguments(problem(sizes, world_size, dtype=dtype, special=special, masks=masks), hold=hold)

        assert_equal_backends("lion_compress", make)


def test_what_does_not_count_is_never_told_whatever_its_moments_and_gradients_hold():
    def make(name):
        p = problem([256, 300, 128], 2, 128, masks={1: torch.arange(300) % 3 > 0}, excluded=[0])
        arguments = local_step_arguments(p, WAYS[1]) if name == "local_step" else lion_arguments(p)
        exp_avg = arguments.exp_avg
        for line in (exp_avg, p.compensated, p.exp_avg_sq):
            line[~p.live_mask] = torch.nan
        for i, tensor in enumerate((*p.params, *p.grads)):
            at = p.layout.offset(i % 3)
            tensor[~p.live_mask[at : at + tensor.numel()]] = torch.inf
        return arguments

    for name in ("local_step", "lion_compress"):
        assert_equal_backends(name, lambda name=name: make(name))
        arguments = make(name)
        getattr(triton_kernels, name)(*arguments)
        assert not arguments.flags.any()


def test_lion_tosses_a_coin_for_zeros_another_one_in_each_step():
    def ones(step):
        p = problem([80_000])
        arguments = lion_arguments(p, step)
        arguments.exp_avg.zero_()
        arguments.grads[0].zero_()
        triton_kernels.lion_compress(*arguments)
        return unpack(p.bits.view(-1))[:80_000]

    a, b = ones(3), ones(4)
    print(f"means of coins {a.mean():.4f} {b.mean():.4f}, of their product {(a * b).mean():.4f}")
    assert max(abs(a.mean()), abs(b.mean()), abs((a * b).mean())) < 0.015


# ---------------------------------------------------------------- layouts


def test_what_is_zero_has_the_same_sign_on_every_backend():
    """After a skipped step all scales are zero."""

    def zeros() -> Problem:
        p = problem((300, 50), 2, 128)
        for x in (p.exp_avg_scale, p.worker_scale, p.compensated, *p.grads, *p.params):
            x *= 0.0  # of either sign
        return p

    assert_equal_backends("rebuild_momentum", lambda: rebuild_arguments(zeros(), False))
    assert_equal_backends("momentum_compress", lambda: zeros().momentum_arguments())
    assert_equal_backends("server_reduce", lambda: zeros().server_arguments())
    assert_equal_backends("apply_momentum", lambda: zeros().apply_arguments())
    assert_equal_backends("local_step", lambda: local_step_arguments(zeros(), (False, True, False, False, False)))
    assert_equal_backends("local_update", lambda: local_arguments(zeros()))


@pytest.mark.parametrize("way", [{"tables": True}, {"captured": True, "flags": 0}], ids=str)
def test_a_launch_that_rebuilds_renews_coefficients_as_finish_does(way):
    sizes = (300, *[5] * 99)
    renewal = advance_arguments(len(sizes), **way).coefficients

    def make() -> Any:
        arguments = rebuild_arguments(problem(sizes, 2, 128), True, of_rounds=True)
        return arguments._replace(coefficients=renewal._replace(table=arguments.coefficients.table))

    assert_equal_backends("rebuild_momentum", make)
    rebuilt, plain, finished = make(), rebuild_arguments(problem(sizes, 2, 128), True, of_rounds=True), problem(sizes)
    table = renewal._replace(table=finished.coef)
    triton_kernels.finish(*finished.finish_arguments("layer", "l2")._replace(coefficients=table))
    triton_kernels.rebuild_momentum(*rebuilt)
    triton_kernels.rebuild_momentum(*plain)
    assert torch.equal(rebuilt.exp_avg, plain.exp_avg)
    renewed = [Coef.LR, Coef.STEP_SIZE, Coef.DECAY, Coef.UNBIAS1]
    table = rebuilt.coefficients.table
    assert torch.equal(table[:, renewed], finished.coef[:, renewed])
    assert not torch.equal(table[:, renewed], plain.coefficients.table[:, renewed])


def test_mixed_dtypes_empty_gradients_and_unaligned_tensors_equal_eager():
    def some() -> Problem:
        p = problem((1024, 300, 130, 256), 2, 128)
        for line in (p.params, p.grads):
            storage = torch.zeros(1025)
            storage[1:] = line[0]
            line[0] = storage[1:]
        p.params = [p.params[0], p.params[1].bfloat16(), p.params[2].half(), p.params[3]]
        p.grads = [p.grads[0], p.grads[1].half(), p.grads[2].bfloat16(), torch.empty(0)]
        return p

    for way, begins in itertools.product(WAYS, (False, True)):
        assert_equal_backends(
            "local_step", lambda way=way, begins=begins: local_step_arguments(some(), way, begins=begins)
        )
    assert_equal_backends("lion_compress", lambda: lion_arguments(some()))


@pytest.mark.full
def test_several_tiles_equal_eager():
    def some() -> Problem:
        return problem((70_000, 40, 30_000), 1, special=True, masks={2: torch.arange(30_000) % 7 > 0})

    for way in WAYS[1:3]:
        assert_equal_backends("local_step", lambda way=way: local_step_arguments(some(), way, begins=way[1]))
    assert_equal_backends("rebuild_momentum", lambda: rebuild_arguments(some(), True, of_rounds=True))
    assert_equal_backends("lion_compress", lambda: lion_arguments(some(), 12_345))


layouts = st.tuples(
    st.lists(st.integers(0, 400), min_size=1, max_size=5), st.integers(1, 5), st.sampled_from(BLOCK_SIZES)
)


@settings(max_examples=15)
@given(
    layouts, st.sampled_from(WAYS), st.booleans(), st.booleans(), st.integers(0, 1), st.randoms(use_true_random=False)
)
def test_any_layout_and_mask_equals_eager(layout, way, inside, begins, hold, random):
    sizes, world_size, block = layout
    masks = {i: torch.rand(n) < random.random() for i, n in enumerate(sizes) if n and random.random() < 0.4}
    excluded = [i for i in range(len(sizes)) if random.random() < 0.2 and i not in masks]
    dtypes, special = [random.choice(DTYPES) for _ in sizes], random.random() < 0.5

    def some() -> Problem:
        p = problem(sizes, world_size, block, special=special, masks=masks, excluded=excluded)
        p.params = [x.to(dtype) for x, dtype in zip(p.params, dtypes, strict=True)]
        p.grads = [g.to(dtype) for g, dtype in zip(p.grads, reversed(dtypes), strict=True)]
        p.exp_avg_sq[::7], p.exp_avg_sq[::11] = 1e-42, 0.0
        return p

    assert_equal_backends("local_step", lambda: local_step_arguments(some(), way, inside, hold, begins))
    assert_equal_backends("rebuild_momentum", lambda: rebuild_arguments(some(), way[3], inside, begins))
    assert_equal_backends("lion_compress", lambda: lion_arguments(some(), hold=hold))
