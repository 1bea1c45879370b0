"""What 0/1 Adam's ops and distributed Lion's promise besides their formulas (``test_every_op``)."""

from __future__ import annotations

import numpy as np
import pytest
from backends import assert_equal_backends
from op_arguments import MASKS, MIXED, Problem, wide
from op_draws import WAYS
from op_formulas import EPS32, sign

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import Coef, unpack

STEP = ("step_moves", "step_last", "step_decay_in_update", "step_precondition", "step_follows")


@pytest.mark.parametrize("precondition", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_round_compresses_the_residual_and_all_its_updates(steps, precondition):
    """0/1 Adam, Algorithm 1, line 6: the buffer u of a round, and what the last synchronisation has left."""
    p = Problem(MIXED, 2, masks=MASKS)
    p.coef[:, Coef.UNIT] = 1.0
    d = p.denom(wide(p.exp_avg_sq), False) if precondition else 1.0
    arguments = p.arguments("rebuild_momentum", exp_avg_sq=... if precondition else None)
    ops.rebuild_momentum(*arguments)
    exp_avg = arguments.exp_avg
    m, old = wide(exp_avg), wide(p.compensated)
    expected = old - p.by_element(p.worker_scale) * sign(old)
    size = np.abs(old) + p.by_element(p.worker_scale)
    for step in range(steps):
        p.grads = [p.normal(n) for n in p.layout.sizes]
        m = p.column(Coef.BETA1) * m + p.column(Coef.ONE_MINUS_BETA1) * np.where(p.live, p.flat(p.grads), 0.0)
        expected, size = expected + m / d, size + np.abs(m / d) + np.abs(m).max()
        if step + 1 < steps:
            way = dict(zip(STEP, (True, step + 2 == steps, False, precondition, False), strict=True))
            ops.local_step(*p.arguments("local_step", exp_avg=exp_avg, **way))
            assert not p.worker_scale.any()  # the residual is formed
    if steps == 1:  # else beta1*m is in the buffer, and the bits stand for nothing
        p.exp_avg_scale.copy_(arguments.sent)
    ops.momentum_compress(*p.arguments("momentum_compress", exp_avg_sq=... if precondition else None))
    assert (np.abs(wide(p.compensated) - np.where(p.live, expected, 0.0)) <= 32 * steps * EPS32 * size).all()


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
