"""Every op's contract: its registration, and eager against float64 NumPy (``reference_ops``)."""

from __future__ import annotations

import level_arguments as level_ops
import numpy as np
import pytest
import reference_ops as reference
import torch
from advance_arguments import advance_arguments
from backends import tensors
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from marsit_arguments import (
    add_arguments,
    close_arguments,
    local_arguments,
    merge_arguments,
    owned_arguments,
    placed_arguments,
)
from op_arguments import flat
from parts_arguments import arguments_of as parts_arguments
from reference_ops import Problem, packed, wide
from renewal_arguments import average_arguments, level_arguments, renew_arguments, tell_arguments
from scaling_arguments import scaling_arguments, squares_arguments
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from zero_one_arguments import WAYS, lion_arguments, local_step_arguments, rebuild_arguments

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import SCALE_NORMS, TAIL, Coef, pack, unpack
from fusedonebit.triton_kernels.nouns import Compensated
from fusedonebit.triton_kernels.op import OPS

OURS = [name for name in OPS if hasattr(ops, name)]
"""Without those that other tests declare."""
SIZES = (1, 7, 1023, 1024, 1025, 100_000)
MIXED = (300, 0, 128, 1, 129)
WORLD_SIZES = (1, 2, 3, 4, 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
SCOPES = ("global", "layer", "block")
NORMS = tuple(SCALE_NORMS)
MASKS = {0: torch.arange(300) % 3 > 0, 4: torch.arange(129) < 128}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


def example(name: str) -> list[tuple]:
    """Realistic arguments of an op, one tuple per way of calling it."""
    p = Problem((5, 0, 200), world_size=2)
    sizes = (p.layout.sizes, p.layout.block_size)
    p.partials.fill_(1.0)
    t = Problem((5, 0, 200), world_size=2, ternary=True)
    t.partials.fill_(1.0)
    step = torch.tensor(3)
    return {
        "advance": [advance_arguments(3), advance_arguments(70, flags=0, absent=True, captured=True)],
        "pack": [(p.normal(16), torch.empty(2, dtype=torch.uint8))],
        "unpack": [(p.exp_avg_bits[0], torch.empty(p.layout.chunk_numel))],
        "flatten": [(p.grads, *sizes, 0.5, None, torch.empty(p.layout.numel + TAIL))],
        "gradient_squares": [squares_arguments(p), squares_arguments(p, 2.0, 1.0, 0.0)],
        "scale_coefficients": [
            scaling_arguments((1.0, 3.0), 2.0, True, 1, 3),
            scaling_arguments((0.0, 0.0, 1.0), None, False, 2, 3),
        ],
        "momentum_compress": [p.momentum_arguments(), p.momentum_arguments(p.exp_avg_sq, True), t.momentum_arguments()],
        "finish": [p.finish_arguments("layer", "contractive"), t.finish_arguments("layer", "l1", counter=3)],
        "finish_alone": [
            Problem((5, 0, 200), 1).alone_arguments("layer", "contractive", limit=1.0),
            Problem((5, 0, 200), 1, ternary=True).alone_arguments("global", "l1", flags=2),
        ],
        "close_parts": [parts_arguments((0, 1)), parts_arguments((0, 0), 1.0)],
        "receive": [
            p.receive_arguments("layer"),
            p.receive_arguments("layer", limit=1.0),
            t.receive_arguments("block", 1, flags=1),
        ],
        "server_reduce": [p.server_arguments(), p.server_arguments(skip=1), t.server_arguments()],
        "apply_momentum": [
            p.apply_arguments(p.exp_avg_sq, False, 0, step),
            p.apply_arguments(digest=torch.tensor([5]), x_squares=p.normal(p.layout.n_blocks)),
            t.apply_arguments(skip=1, digest=torch.tensor([5, -(2**63)])),
        ],
        "adam_update": [
            p.update_arguments(),
            p.update_arguments(0, False, step),
            (*p.update_arguments(skip=1), *p.flags_found()),
        ],
        "lamb_update": [p.lamb_update_arguments(), p.lamb_update_arguments(True, skip=1, sums=False)],
        "lamb_coefficient": [p.lamb_coefficient_arguments(deepspeed) for deepspeed in (False, True)],
        "lamb_move": [p.lamb_move_arguments(), p.lamb_move_arguments(True, 1), p.lamb_move_arguments(rounding=step)],
        "lamb_ratio": [q.lamb_ratio_arguments(*way) for q in (p, t) for way in ((0,), (1, True, True, True, True))],
        "lamb_rescale": [p.lamb_rescale_arguments(), p.lamb_rescale_arguments(deepspeed=True, blend=True)],
        "lamb_follow": [p.lamb_follow_arguments(), p.lamb_follow_arguments(skip=1)],
        "close_round": [close_arguments(p), close_arguments(p, signs=False, flags=1)],
        "local_update": [local_arguments(p, "sgd"), local_arguments(p, "adam", decays=True, moves=True)],
        "merge_signs": [merge_arguments(p.layout, 2, 1 << 31)],
        "pick_owned": [owned_arguments(p.layout, 1)],
        "place_owned": [placed_arguments(p.layout)],
        "add_values": [add_arguments(p, False), add_arguments(p, True, rounding=step)],
        "local_step": [local_step_arguments(p, way) for way in WAYS],
        "rebuild_momentum": [rebuild_arguments(p, False), rebuild_arguments(p, True, True)],
        "tell_squares": [tell_arguments(p), tell_arguments(p, 0.5, 9)],
        "average_squares": [average_arguments(p)],
        "renew_levels": [level_arguments(p), level_arguments(p, absent=True, wide=True)],
        "tell_level": [level_ops.tell_arguments(p), level_ops.tell_arguments(p, 0.5)],
        "follow_level": [level_ops.follow_arguments(p), level_ops.follow_arguments(p, absent=True)],
        "renew": [renew_arguments(p), renew_arguments(t, server=True), renew_arguments(p, divided=False)],
        "lion_compress": [lion_arguments(p), lion_arguments(p, hold=1)],
    }[name]


# ---------------------------------------------------------------- registration


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", OURS)
def test_op_is_registered_cleanly(name):
    for arguments in example(name):
        torch.library.opcheck(getattr(torch.ops.fusedonebit, name).default, flat(name, arguments))


@pytest.mark.long(but=15)
@pytest.mark.parametrize("name", OURS)
def test_fake_tensors_pass_through_an_op_untouched(name):
    with FakeTensorMode() as mode:
        for arguments in example_as_fake(mode, name):
            assert getattr(torch.ops.fusedonebit, name)(*arguments) is None


def example_as_fake(mode: FakeTensorMode, name: str) -> list[tuple]:
    def fake(value: object) -> object:
        if isinstance(value, Tensor):
            return mode.from_tensor(value)
        return [mode.from_tensor(t) for t in value] if isinstance(value, list) else value

    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        real = [flat(name, arguments) for arguments in example(name)]
    return [tuple(fake(value) for value in arguments) for arguments in real]


def test_compress_finish_and_apply_compile_into_one_graph_with_equal_bits():
    def step(p: Problem, finish: tuple) -> None:
        ops.momentum_compress(*p.momentum_arguments())
        ops.finish(*finish)
        ops.apply_momentum(*p.apply_arguments(p.exp_avg_sq))

    eager, compiled = Problem(MIXED, 2), Problem(MIXED, 2)
    outputs = [p.finish_arguments("layer", "l2") for p in (eager, compiled)]
    step(eager, outputs[0])
    torch.compile(step, backend="aot_eager", fullgraph=True)(compiled, outputs[1])
    for a, b in zip(*map(tensors, outputs), strict=True):
        assert same_bits(a, b)
    for a, b in zip(eager.params, compiled.params, strict=True):
        assert same_bits(a, b)
    assert same_bits(eager.compensated, compiled.compensated)
    assert same_bits(eager.bits, compiled.bits)


def test_writing_a_parameter_counts_as_a_change_of_it():
    p = Problem((5,))
    p.params = [torch.nn.Parameter(x) for x in p.params]
    versions = [x._version for x in p.params]
    with torch.no_grad():
        ops.apply_momentum(*p.apply_arguments())
    assert [x._version for x in p.params] != versions


# ---------------------------------------------------------------- pack, unpack


@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("n", [0, 8, 1024, 100_000])
def test_pack_equals_numpy_packbits_little(n, dtype):
    x = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 3).to(dtype)
    assert np.array_equal(pack(x).numpy(), np.packbits((x >= 0).numpy(), bitorder="little"))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_pack_takes_minus_zero_as_plus_and_nan_as_minus(dtype):
    tiny = torch.finfo(dtype).smallest_normal / 4
    x = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, tiny, -tiny, -1.0], dtype=dtype)
    assert x[5] > 0 > x[6]
    assert pack(x).tolist() == [0b00101011]


@given(arrays(np.float32, st.integers(0, 40).map(lambda n: 8 * n)))
def test_unpack_inverts_pack(x):
    signs = unpack(pack(torch.from_numpy(x)))
    assert signs.dtype is torch.float32
    assert np.array_equal(signs.numpy(), np.where(x >= 0, 1, -1))
    assert same_bits(pack(signs), pack(torch.from_numpy(x)))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.int8])
def test_unpack_writes_the_dtype_asked_for(dtype):
    signs = unpack(torch.tensor([0b00000001, 0b10000000], dtype=torch.uint8), dtype)
    assert signs.dtype is dtype
    assert signs.tolist() == [1, *[-1] * 14, 1]


def test_pack_takes_any_strides():
    x = torch.tensor([[1.0, -1.0]])
    assert pack(x.expand(8, 2).t()).tolist() == [255, 0]
    assert pack(x.repeat(1, 8)[0, ::2]).tolist() == [255]
    assert pack(torch.from_numpy(np.empty(0, np.float32))).tolist() == []


@pytest.mark.parametrize("n", [1, 7, 9])
def test_pack_refuses_what_does_not_fill_bytes(n):
    with pytest.raises(ValueError, match=f"x must have a multiple of 8 elements, got {n}"):
        pack(torch.zeros(n))


# ---------------------------------------------------------------- momentum_compress


def check_momentum_compress(p: Problem, exp_avg_sq: Tensor | None = None, eps_inside_sqrt: bool = False) -> None:
    expected, dropped, bound = reference.momentum_compress(p, exp_avg_sq, eps_inside_sqrt)
    ops.momentum_compress(*p.momentum_arguments(exp_avg_sq, eps_inside_sqrt))
    c = wide(p.compensated)
    assert (np.abs(c - expected) <= bound).all()
    assert not c[~p.live].any()
    assert np.array_equal(p.bits.numpy(), packed(c, p.bits))
    rows = c.reshape(p.layout.n_blocks, -1)
    np.testing.assert_allclose(p.partials[0], np.abs(rows).sum(1), rtol=1e-13)
    np.testing.assert_allclose(p.partials[1], (rows * rows).sum(1), rtol=1e-13)
    assert int(p.found) == 32 | bool(dropped.any())
    if p.ternary:
        assert np.array_equal(p.partials[2], (rows != 0).sum(1))
        assert (c[p.live] == 0).sum() > p.live.sum() / 20 - 5, "zeros must be there to be seen"


@pytest.mark.long(but=21)
@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("size", SIZES)
def test_momentum_compress_is_its_formula(size, world_size, dtype, ternary):
    check_momentum_compress(Problem((size,), world_size, 1024, dtype=dtype, ternary=ternary))


@pytest.mark.long(but=23)
@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("variance", ["unit", "eps outside", "eps inside"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("live", [{}, {"masks": MASKS}, {"excluded": [2]}, {"masks": MASKS, "excluded": [0, 3]}])
def test_momentum_compress_takes_each_tensors_row_and_live_elements(live, world_size, variance, ternary):
    p = Problem(MIXED, world_size, **live, ternary=ternary)
    check_momentum_compress(p, None if variance == "unit" else p.exp_avg_sq, variance == "eps inside")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_gradient_is_dropped_alone_and_told(bad):
    p = Problem(MIXED, 3, masks=MASKS)
    p.grads[0][[0, 1, 299]] = bad  # element 0 is masked
    p.grads[4][127] = bad
    clean = Problem(MIXED, 3, masks=MASKS)
    clean.grads[0][[1, 299]] = clean.grads[4][127] = 0.0
    check_momentum_compress(p)
    ops.momentum_compress(*clean.momentum_arguments())
    assert int(p.found) == 33
    assert int(clean.found) == 32
    assert same_bits(p.compensated, clean.compensated)


def test_an_overflow_to_infinity_is_dropped_as_well():
    p = Problem((200,))
    p.coef[:, Coef.UNIT] = 1e30
    p.grads[0][5] = 1e30
    check_momentum_compress(p)
    assert int(p.found) == 33


def test_an_empty_gradient_stands_for_zeros():
    empty, zeros = Problem(MIXED, 2), Problem(MIXED, 2)
    empty.grads[0], zeros.grads[0] = torch.empty(0), torch.zeros(300)
    for p in (empty, zeros):
        ops.momentum_compress(*p.momentum_arguments())
    assert same_bits(empty.compensated, zeros.compensated)
    assert same_bits(empty.bits, zeros.bits)


def test_a_gradient_is_read_in_memory_order():
    p, other = Problem((12, 20)), Problem((12, 20))
    p.grads[0] = p.grads[0].view(3, 4).t()
    for problem in (p, other):
        ops.momentum_compress(*problem.momentum_arguments())
    assert same_bits(p.compensated, other.compensated)


@pytest.mark.parametrize("junk", [3.0, torch.nan, torch.inf])
def test_padding_never_enters_a_residual_or_a_sum(junk):
    clean, dirty = Problem(MIXED, 3, masks=MASKS), Problem(MIXED, 3, masks=MASKS)
    dirty.compensated[torch.from_numpy(~dirty.live)] = junk
    for p in (clean, dirty):
        ops.momentum_compress(*p.momentum_arguments())
    assert same_bits(clean.compensated, dirty.compensated)
    assert same_bits(clean.partials, dirty.partials)
    assert same_bits(clean.bits, dirty.bits)


@pytest.mark.parametrize("size", [1, 1025, 100_000])
def test_momentum_compress_repeats_its_bits(size):
    first, second = Problem((size,), 2, 1024), Problem((size,), 2, 1024)
    for p in (first, second):
        ops.momentum_compress(*p.momentum_arguments())
    assert same_bits(first.partials, second.partials)
    assert same_bits(first.compensated, second.compensated)


# ---------------------------------------------------------------- settle


@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("live", [{}, {"masks": MASKS, "excluded": [2]}])
def test_settling_changes_no_later_bit(live, ternary):
    settled, deferred = (Problem(MIXED, 3, **live, ternary=ternary) for _ in range(2))
    ops.settle(Compensated(settled.compensated, settled.worker_scale), ternary, settled.places)
    assert not same_bits(settled.compensated, deferred.compensated)
    for p in (settled, deferred):
        ops.momentum_compress(*p.momentum_arguments())
    assert same_bits(settled.compensated, deferred.compensated)
    assert same_bits(settled.partials, deferred.partials)
    assert same_bits(settled.bits, deferred.bits)


@pytest.mark.parametrize("ternary", [False, True])
def test_settle_leaves_the_residual_and_none_where_nothing_is_live(ternary):
    p = Problem(MIXED, 3, masks=MASKS)
    p.compensated[1], p.compensated[2] = 0.0, -0.0
    c, s = p.compensated.numpy().copy(), p.by_element(p.worker_scale).astype(np.float32)
    ops.settle(Compensated(p.compensated, p.worker_scale), ternary, p.places)
    expected = np.where(p.live, c - s * reference.sign(c, ternary).astype(np.float32), 0)
    assert np.array_equal(p.compensated.numpy(), expected)
    assert not p.worker_scale.any()
    again = p.compensated.clone()
    ops.settle(Compensated(p.compensated, p.worker_scale), ternary, p.places)
    assert same_bits(again, p.compensated)


# ---------------------------------------------------------------- contraction


def residual_ratio(x: np.ndarray, norm: str) -> float:
    """|x - s*sign(x)|^2 / |x|^2."""
    p = Problem((x.size,))
    p.grads = [torch.from_numpy(x)]
    p.compensated.zero_(), p.worker_scale.zero_(), p.exp_avg_scale.zero_()
    p.coef[:, Coef.ONE_MINUS_BETA1] = p.coef[:, Coef.UNIT] = 1.0
    ops.momentum_compress(*p.momentum_arguments())
    arguments = p.finish_arguments("global", norm)
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


def test_no_vector_at_all_has_scale_zero():
    p = Problem((0, 0), 2)
    ops.momentum_compress(*p.momentum_arguments())
    arguments = p.finish_arguments("layer", "l1")
    ops.finish(*arguments)
    assert arguments.segments.measured.tolist() == [0.0]
