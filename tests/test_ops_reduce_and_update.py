"""The ops behind the compression, against float64 NumPy: scales, server, updates, the freeze."""

from __future__ import annotations

import numpy as np
import pytest
import reference_ops as reference
import torch
from reference_ops import EPS32, Problem, packed, scale_of, sign, unpacked, wide
from scaling_arguments import MAX_NORM, scaling_arguments, squares_arguments
from torch import Tensor

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import SCALE_NORMS, TAIL, Coef
from fusedonebit.triton_kernels.headers import Flag, Word

SIZES = (1, 7, 1023, 1024, 1025, 100_000)
MIXED = (300, 0, 128, 1, 129)
WORLD_SIZES = (1, 2, 3, 4, 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCOPES = ("global", "layer", "block")
MASKS = {0: torch.arange(300) % 3 > 0, 4: torch.arange(129) < 128}
eps_inside = pytest.mark.parametrize("inside", [False, True], ids=["eps outside", "eps inside"])
every_size = pytest.mark.parametrize(
    ("sizes", "block"), [*(((size,), 1024) for size in SIZES), (MIXED, 128)], ids=[*map(str, SIZES), "mixed"]
)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


def rounding(expected: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Largest error of one rounding to ``dtype``."""
    info = torch.finfo(dtype)
    return info.eps / 2 * np.abs(expected) + info.smallest_normal * info.eps


# ---------------------------------------------------------------- finish


@pytest.mark.long(but=23)
@pytest.mark.parametrize("norm", SCALE_NORMS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("ternary", [False, True])
def test_a_scale_is_the_norm_of_its_scopes_live_elements(world_size, scope, norm, ternary):
    p = Problem(MIXED, world_size, masks=MASKS, excluded=[2], ternary=ternary)
    ops.momentum_compress(*p.momentum_arguments())
    arguments = p.finish_arguments(scope, norm)
    ops.finish(*arguments)
    segment, message_scales, words = arguments.segment, arguments.message_scales, arguments.words
    scale = arguments.segments.measured[segment]
    c, owner = wide(p.compensated), p.by_element(segment)
    expected = [scale_of(c[(owner == s) & p.live], norm, ternary) for s in segment.tolist()]
    np.testing.assert_allclose(wide(scale), expected, rtol=EPS32 * 1.001)
    slot, _ = p.layout.scale_slots(scope)
    message = torch.arange(len(segment)) // p.layout.blocks_per_chunk
    assert same_bits(message_scales[message, slot], scale)
    left = c - p.by_element(scale) * sign(c, ternary)
    signal = words[:, Word.SIGNAL].contiguous().view(torch.float32)
    np.testing.assert_allclose(signal, np.linalg.norm(left[p.live]), rtol=1e-6, atol=1e-6)
    fields = (Word.STEP, Word.DIGEST, Word.TAG, Word.FLAGS)
    assert words[:, fields].tolist() == [[7, -12345, 2**31 - 1, 0]] * world_size


@pytest.mark.parametrize("found", [0, 1, 33])
def test_every_message_is_flagged_with_what_compressing_has_found(found):
    p = Problem(MIXED, 4)
    p.partials.fill_(1.0)
    arguments = p.finish_arguments("layer", "l1")
    arguments.header.pending.fill_(found)
    ops.finish(*arguments)
    assert arguments.words[:, Word.FLAGS].tolist() == [found] * 4
    assert int(arguments.header.pending) == 0


@pytest.mark.parametrize("counts", [False, True])
def test_a_held_finish_writes_headers_alone(counts):
    p = Problem(MIXED, 2)
    p.partials.fill_(1.0)
    arguments = p.finish_arguments("layer", "l1", hold=16, counter=5)
    header = arguments.header._replace(counts=counts, flags=int(Flag.ABORT))
    header.pending.fill_(32)
    words, segments = arguments.words, arguments.segments
    kept = (p.partials, segments.sums, segments.tickets, segments.measured, arguments.message_scales)
    old, before = words.clone(), [each.clone() for each in kept]
    ops.finish(*arguments._replace(header=header))
    assert words[:, (Word.STEP, Word.FLAGS)].tolist() == [[5 + counts, 34]] * 2
    assert torch.equal(words[:, (Word.SIGNAL, Word.SENDER)], old[:, (Word.SIGNAL, Word.SENDER)])
    assert int(header.counter) == 5 + counts
    assert all(same_bits(now, was) for now, was in zip(kept, before, strict=True))


# ---------------------------------------------------------------- server_reduce


def check_server_reduce(p: Problem, scope: str, rank: int, skip: int) -> None:
    arguments = p.server_arguments(scope, rank, skip)
    (arrived_bits, arrived_scales, words, _, slot), places, (compensated, old_scale, *_), *_, flags, kept = arguments
    bits, partials, block = arguments.bits, arguments.partials, places.block_size
    own = slice(rank * p.layout.chunk_numel, (rank + 1) * p.layout.chunk_numel)
    live, old, s = p.live[own], wide(compensated), np.repeat(wide(old_scale), block)
    signs = unpacked(arrived_bits).reshape(p.layout.world_size, -1)
    scales = np.repeat(arrived_scales[:, slot].double().numpy(), block, axis=1)
    average = (scales * signs).mean(0) if not skip else np.zeros_like(old)
    expected = np.where(live, average + old - s * sign(old, p.ternary), 0.0)
    ops.server_reduce(*arguments)
    assert flags.tolist() == [skip]
    assert torch.equal(kept, words)
    c = wide(compensated)
    assert (np.abs(c - expected) <= 8 * EPS32 * (np.abs(scales).sum(0) + np.abs(old) + s)).all()
    assert not c[~live].any()
    assert np.array_equal(bits.numpy(), packed(c, bits))
    rows = c.reshape(-1, block)
    np.testing.assert_allclose(partials[0], np.abs(rows).sum(1), rtol=1e-13)
    np.testing.assert_allclose(partials[1], (rows * rows).sum(1), rtol=1e-13)
    if p.ternary:
        assert np.array_equal(partials[2], (rows != 0).sum(1))


@pytest.mark.long(but=16)
@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("skip", [0, 1, 6])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_server_averages_its_chunk_and_adds_its_residual(world_size, scope, skip, ternary):
    for rank in range(world_size):
        p = Problem(MIXED, world_size, masks=MASKS, excluded=[2], ternary=ternary)
        check_server_reduce(p, scope, rank, skip)


@pytest.mark.parametrize("world_size", [1, 2])
@every_size
def test_a_server_serves_chunks_of_any_size(sizes, block, world_size):
    check_server_reduce(Problem(sizes, world_size, block), "global", world_size - 1, 0)


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("junk", [3.0, torch.nan])
def test_padding_never_enters_a_servers_residual_or_sums(junk, skip):
    outcomes = []
    for value in (0.0, junk):
        p = Problem(MIXED, 2, masks=MASKS)
        p.compensated[torch.from_numpy(~p.live)] = value
        arguments = p.server_arguments("layer", 1, skip)
        ops.server_reduce(*arguments)
        outcomes.append((arguments.compensated_numbers, *arguments[3:]))
    assert all(same_bits(a, b) for a, b in zip(*outcomes, strict=True))


# ---------------------------------------------------------------- apply_momentum


def check_moved(p: Problem, before: Problem, expected: np.ndarray, terms: np.ndarray) -> None:
    """``terms``: magnitudes of what was added up."""
    moved = p.flat(p.params)
    assert (np.abs(moved - expected) <= rounding(expected, p.params[0].dtype) + 8 * EPS32 * terms).all()
    assert np.array_equal(moved[~p.live], before.flat(before.params)[~p.live])


@pytest.mark.long(but=11)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@every_size
def test_apply_momentum_is_its_formula_rounded_once(sizes, block, world_size, dtype):
    ways = (("frozen", False, False), ("frozen", True, False), (None, False, False), ("frozen", False, True))
    for variance, inside, ternary in ways:
        p, before = (Problem(sizes, world_size, block, dtype=dtype, ternary=ternary) for _ in range(2))
        exp_avg_sq = p.exp_avg_sq if variance else None
        expected = reference.apply_momentum(p, exp_avg_sq, inside)
        ops.apply_momentum(*p.apply_arguments(exp_avg_sq, inside))
        check_moved(p, before, expected, 2 * np.abs(before.flat(before.params)) + np.abs(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_momentum_moves_no_masked_or_excluded_element(dtype):
    p, before = (Problem(MIXED, 3, dtype=dtype, masks=MASKS, excluded=[2]) for _ in range(2))
    expected = reference.apply_momentum(p, p.exp_avg_sq, False)
    ops.apply_momentum(*p.apply_arguments(p.exp_avg_sq))
    check_moved(p, before, expected, 2 * np.abs(before.flat(before.params)) + np.abs(expected))
    assert same_bits(p.params[2].float(), before.params[2].float())


@pytest.mark.parametrize("live", [{}, {"masks": MASKS, "excluded": [2]}], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_momentum_tells_the_squares_of_where_parameters_go(dtype, live):
    p = Problem(MIXED, 3, dtype=dtype, **live)
    x = reference.apply_momentum(p, None, False)
    found = torch.full((p.layout.n_blocks,), -1.0)
    ops.apply_momentum(*p.apply_arguments(x_squares=found))
    blocks = p.layout.first_block[-1]
    expected = np.where(p.live, x * x, 0.0).reshape(-1, p.layout.block_size).sum(1)
    expected = np.where(p.table.row.numpy() == 1, -1.0, expected)  # blocks of which nothing counts
    np.testing.assert_allclose(found[:blocks].numpy(), expected[:blocks], rtol=8 * EPS32)
    every = ops.param_squares(p.params, p.places)
    written = found[:blocks] >= 0
    rounding = 2.0 ** {torch.float32: -20, torch.bfloat16: -7, torch.float16: -10}[dtype]
    torch.testing.assert_close(every[:blocks][written].float(), found[:blocks][written], rtol=rounding, atol=0.0)


@pytest.mark.parametrize("flag", [1, 2, 4, 7])
def test_a_skipped_step_moves_nothing(flag):
    p, before = Problem(MIXED, 2), Problem(MIXED, 2)
    ops.apply_momentum(*p.apply_arguments(p.exp_avg_sq, skip=flag))
    ops.adam_update(*p.update_arguments(skip=flag))
    for name in ("compensated", "exp_avg_sq"):
        assert same_bits(getattr(p, name), getattr(before, name))
    assert all(same_bits(a, b) for a, b in zip(p.params, before.params, strict=True))


# ---------------------------------------------------------------- flatten


@pytest.mark.long(but=26)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@every_size
def test_flatten_scales_every_element_and_clears_the_padding(sizes, block, world_size, dtype):
    p = Problem(sizes, world_size, block, dtype=dtype)
    out = torch.full((p.layout.numel + TAIL,), 7.0)
    ops.flatten(p.grads, p.layout.sizes, block, 1 / world_size, None, out)
    np.testing.assert_allclose(wide(out[:-TAIL]), p.flat(p.grads) / world_size, rtol=2 * EPS32)
    assert out[-TAIL:].tolist() == [7.0] * TAIL


def test_flatten_marks_non_finite_elements_and_takes_empty_ones_as_zeros():
    p = Problem((300, 70_000, 128), 2)
    p.grads[0] = torch.empty(0)
    p.grads[1][[0, 128, 69_999]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    out = torch.full((p.layout.numel + TAIL,), torch.nan)
    ops.flatten(p.grads, p.layout.sizes, p.layout.block_size, 0.5, None, out)
    assert out[-TAIL] == 1
    assert not out[:384].any()


@pytest.mark.parametrize("unscale", [None, 2.0**-40])
def test_flatten_marks_elements_whose_squares_would_overflow(unscale):
    scale = 1.0 if unscale is None else 1 / unscale
    for value, marked in ((1.79e19, 0), (1.81e19, 1), (3e19, 1), (-1.79e19, 0), (-1.81e19, 1)):
        out = torch.zeros(128 + TAIL)
        g = torch.zeros(128)
        g[77] = value * scale
        ops.flatten([g], (128,), 128, 0.25, None if unscale is None else torch.tensor(unscale), out)
        assert out[-TAIL] == marked, value
        assert out[77] == np.float32(value) / 4  # before a sum could overflow


@pytest.mark.parametrize("dtype", DTYPES)
@every_size
def test_gradient_squares_add_up_in_float64_and_leave_out_what_is_bad(sizes, block, dtype):
    p = Problem(sizes, 2, block, dtype=dtype)
    for g in p.grads:
        for i, value in enumerate((torch.nan, torch.inf, -1.9e19, 1.5e19)[: g.numel()]):
            g[i] = value
    arguments = squares_arguments(p, None, 1.0, 2.0)
    ops.gradient_squares(*arguments)
    squares, _, _, total, _, _, told = arguments[5:]
    line = p.flat(p.grads)
    with np.errstate(invalid="ignore"):
        expected = np.where(np.abs(line) <= np.float32(1.8e19), line, 0.0) ** 2
    np.testing.assert_allclose(squares.numpy(), expected.reshape(-1, block).sum(1), rtol=1e-12)
    np.testing.assert_allclose(total.item(), expected.sum(), rtol=1e-12)
    assert told.tolist() == [1.0, total.sqrt().float().item(), 2.0]


@every_size
def test_what_ranks_tell_of_a_scaled_loss_is_the_norm_of_the_unscaled_gradient(sizes, block):
    told = []
    for scale in (None, 2.0**-30, 2.0**30):
        p = Problem(sizes, 2, block)
        if scale is not None:
            p.grads = [g * scale for g in p.grads]
        arguments = squares_arguments(p, scale, 0.0)
        ops.gradient_squares(*arguments)
        told.append(arguments[-1].tolist())
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("norm", [0.0, 1e-30, 1.0, 3.0, 1e30, torch.inf])
@pytest.mark.parametrize("world_size", [1, 3])
def test_coefficients_are_scaled_as_torch_clips(norm, world_size):
    told = (0.0, norm * world_size)
    for loss_scale in (None, 1024.0):
        arguments = scaling_arguments(told, loss_scale, True, 2, 3, world_size)
        ops.scale_coefficients(*arguments)
        outcome, hold, coef, scaled = arguments[-4:]
        factor = (MAX_NORM / (torch.tensor(told[1]) / world_size + 1e-6)).clamp(max=1.0)
        scale = torch.tensor(1.0 if loss_scale is None else loss_scale)
        expected = coef.clone()
        for column in (Coef.ONE_MINUS_BETA1, Coef.ONE_MINUS_BETA2):
            expected[:, column] *= 1 / scale * factor
        expected[:, Coef.GRAD_LIMIT] *= scale
        assert torch.equal(scaled, expected)
        mean = (torch.tensor(told[1]) / world_size).item()
        assert outcome.tolist() == [(1 / scale * factor).item(), mean, 0.0, 0.0]
        assert hold.item() == 0


@pytest.mark.parametrize(
    ("told", "hold", "ranks"),
    [
        ((0.0, 5.0), 0, 0),
        ((1.0, 5.0), Flag.OVERFLOW | Flag.LOCAL, 1),
        ((3.0, 5.0), Flag.OVERFLOW, 3),
        ((0.0, 5.0, 2.0), 0, 2),
        ((1.0, 5.0, 2.0), Flag.OVERFLOW | Flag.LOCAL, 3),
    ],
)
def test_an_inf_found_now_holds_the_step_and_one_found_earlier_is_only_told(told, hold, ranks):
    arguments = scaling_arguments(told, None, False, 1, 2)
    ops.scale_coefficients(*arguments)
    outcome, held, coef, scaled = arguments[-4:]
    assert outcome.tolist() == [1.0, 0.0, ranks, float(ranks > 0)]
    assert held.item() == hold
    assert torch.equal(scaled, coef)


# ---------------------------------------------------------------- freeze


@pytest.mark.parametrize("replace", [True, False])
def test_freeze_scales_the_momentum_and_revives_only_dead_variances(replace):
    p, before = Problem(MIXED, 2), Problem(MIXED, 2)
    dead = torch.rand(p.layout.numel, generator=torch.Generator().manual_seed(1)) < 0.3
    p.exp_avg_sq[dead] = 0.0
    values = torch.arange(5) + 1.0
    ops.freeze(*p.freeze_arguments(dead_value=values if replace else None))
    expected = p.column(Coef.BETA1) * p.column(Coef.UNIT) * wide(before.compensated)
    np.testing.assert_allclose(wide(p.compensated), expected, rtol=3 * EPS32)
    own = torch.arange(p.layout.first_block[-1] * 128)
    revived = values.repeat_interleave(torch.tensor(p.layout.first_block).diff() * 128) * float(replace)
    assert torch.equal(p.exp_avg_sq[own], torch.where(dead[own], revived, before.exp_avg_sq[own]))


@eps_inside
@pytest.mark.parametrize("precondition", [False, True])
def test_the_first_compressed_momentum_continues_the_warm_ups(precondition, inside):
    p = Problem(MIXED, 2)
    m, g = wide(p.compensated), p.flat(p.grads)
    p.worker_scale.zero_(), p.exp_avg_scale.zero_()
    ops.freeze(*p.freeze_arguments(inside, precondition))
    ops.momentum_compress(*p.momentum_arguments(p.exp_avg_sq if precondition else None, inside))
    unit = reference.unit_of(p, wide(p.exp_avg_sq) if precondition else None, inside)
    expected = (p.column(Coef.BETA1) * m + p.column(Coef.ONE_MINUS_BETA1) * g) * unit
    assert (np.abs(wide(p.compensated) - expected) <= 16 * EPS32 * (np.abs(m) + np.abs(g)) * np.maximum(unit, 1)).all()


@eps_inside
@pytest.mark.parametrize("least", [None, torch.tensor([0.0, 1.0, 1e-2, 1e3, 1e-4])], ids=["any", "least"])
@pytest.mark.parametrize("dead_value", [None, torch.arange(5) * 0.01], ids=["dead stay", "dead revive"])
@pytest.mark.parametrize("precondition", [False, True])
def test_freeze_is_its_formula(precondition, dead_value, least, inside):
    p = Problem(MIXED, 3)
    p.exp_avg_sq[::4] = 0.0
    m, v = wide(p.compensated), wide(p.exp_avg_sq)
    expected, frozen = reference.freeze(p, m, v, inside, precondition, dead_value, least)
    ops.freeze(*p.freeze_arguments(inside, precondition, dead_value, least))
    own = slice(0, p.layout.first_block[-1] * 128)
    assert np.array_equal(wide(p.exp_avg_sq)[own], frozen[own])
    assert (frozen[own] != v[own]).any() == (dead_value is not None or least is not None)
    np.testing.assert_allclose(wide(p.compensated)[own], expected[own], rtol=8 * EPS32)


@eps_inside
@pytest.mark.parametrize("precondition", [False, True])
def test_rewarm_takes_away_the_unit_that_freeze_brought_in_corrects_v_and_clips_m(precondition, inside):
    p = Problem(MIXED, 3, masks=MASKS, excluded=[2])
    p.compensated *= 0.1
    m, v = wide(p.compensated), wide(p.exp_avg_sq)
    ops.freeze(*p.freeze_arguments(inside, precondition))
    ops.rewarm(*p.rewarm_arguments(inside, precondition))
    own = slice(0, p.layout.first_block[-1] * 128)
    decayed = p.column(Coef.BETA1) * m  # by freeze, for the step that follows
    corrected = np.where(p.live, v * p.column(Coef.RSQRT_BIAS2) ** 2, 0.0)
    most = np.sqrt(corrected) / p.column(Coef.UNBIAS1)
    np.testing.assert_allclose(wide(p.compensated)[own], np.clip(decayed, -most, most)[own], rtol=40 * EPS32)
    np.testing.assert_allclose(wide(p.exp_avg_sq)[own], corrected[own], rtol=40 * EPS32)
    clipped = (np.abs(decayed) > most)[p.live]
    assert clipped.any()
    assert not clipped.all()


@eps_inside
@pytest.mark.parametrize("ones", [False, True], ids=["of x", "of ones"])
@pytest.mark.parametrize(
    ("sizes", "block", "live"),
    [((1,), 1024, {}), ((100_000,), 1024, {}), (MIXED, 128, {"masks": MASKS, "excluded": [2]})],
)
def test_update_sums_square_each_live_element_over_its_denominator(sizes, block, live, ones, inside):
    p = Problem(sizes, 3, block, **live)
    x = None if ones else p.compensated * 3e20  # beyond float32, squared
    sums = ops.update_sums(*p.update_sums_arguments(x, inside))
    quotients = np.where(p.live, (1.0 if x is None else wide(x)) / reference.denom(p, wide(p.exp_avg_sq), inside), 0.0)
    used = p.layout.first_block[-1]
    expected = np.square(quotients).reshape(-1, block).sum(1)[:used]
    np.testing.assert_allclose(sums[:used].numpy(), expected, rtol=8 * EPS32)
    assert not sums[used:].any()
    assert expected.any()


@pytest.mark.parametrize(
    ("sizes", "block", "live"),
    [
        ((1,), 1024, {}),
        ((100_000,), 1024, {}),
        *((MIXED, 128, live) for live in ({}, {"masks": MASKS}, {"masks": MASKS, "excluded": [2]})),
    ],
)
def test_exponents_count_each_live_element_above_zero_once(sizes, block, live):
    p = Problem(sizes, 3, block, **live)
    x = p.exp_avg_sq * 10.0 ** torch.linspace(-30, 30, p.layout.numel)
    x[4::5], x[1::50], x[2::50] = 0.0, 1e-45, 3e38
    counts = ops.exponents(p.places, x)
    counted = x.numpy()[p.live & (x > 0).numpy()]
    assert counted.size > 0
    expected = np.bincount(counted.view(np.uint32) >> 16, minlength=1 << 15)
    assert np.array_equal(counts.numpy(), expected)


@every_size
def test_live_variance_sums_and_counts_each_block(sizes, block):
    p = Problem(sizes, 3, block)
    p.exp_avg_sq[::3] = 0.0
    sums = ops.live_variance(p.places, p.exp_avg_sq)
    rows = wide(p.exp_avg_sq).reshape(-1, block)[: p.layout.first_block[-1]]
    np.testing.assert_allclose(sums[0, : len(rows)], rows.sum(1), rtol=1e-13)
    assert np.array_equal(sums[1, : len(rows)], (rows > 0).sum(1))
    assert not sums[:, len(rows) :].any()
