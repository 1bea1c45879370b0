"""The ops of LAMB and 1-bit LAMB, against float64 NumPy (``reference_ops``), element by element."""

from __future__ import annotations

import numpy as np
import pytest
import reference_ops as reference
import torch
from backends import tensors
from reference_ops import EPS32, RATIO_WAYS, Problem, wide
from test_ops_reduce_and_update import check_moved, every_size, same_bits
from torch import Tensor

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import BLOCK_SIZES, Coef, Layer

MIXED = (300, 0, 128, 1, 129)
WORLD_SIZES = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASKS = {0: torch.arange(300) % 3 > 0, 4: torch.arange(129) < 128}
LIVE = [{}, {"masks": MASKS}, {"excluded": [2]}, {"masks": MASKS, "excluded": [1, 3]}]
OPS = ("lamb_update", "lamb_coefficient", "lamb_move", "lamb_ratio", "lamb_rescale")
ROUNDED = EPS32 * 1.001  # once, from float64
eps_inside = pytest.mark.parametrize("inside", [False, True], ids=["eps outside", "eps inside"])
either_variant = pytest.mark.parametrize("deepspeed", [False, True], ids=["paper", "deepspeed"])


def copies(arguments: tuple) -> list[Tensor]:
    return [t.clone() for t in tensors(arguments)]


def equal_copies(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(
        torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)) for x, y in zip(a, b, strict=True)
    )


def check_norm(found: Tensor, values: np.ndarray, bound: np.ndarray, block: int) -> None:
    """A row of sums of squares; ``bound``: largest errors of the values."""
    expected, slack = (
        (x.reshape(-1, block)[: len(found)]).sum(1) for x in (values**2, bound * (2 * abs(values) + bound))
    )
    assert (np.abs(found.numpy() - expected) <= slack + 1e-13 * expected).all()


def check_step_columns(p: Problem, before: Tensor, c: np.ndarray) -> None:
    """STEP_SIZE and DECAY follow from c; no other column was written."""
    k = before.double().numpy()
    np.testing.assert_allclose(wide(p.coef[:, Coef.STEP_SIZE]), k[:, Coef.LR] * c * k[:, Coef.UNBIAS1], rtol=ROUNDED)
    np.testing.assert_allclose(
        wide(p.coef[:, Coef.DECAY]), 1 - k[:, Coef.LR] * c * k[:, Coef.WEIGHT_DECAY], rtol=ROUNDED
    )
    rest = [column for column in Coef if column not in (Coef.STEP_SIZE, Coef.DECAY)]
    assert same_bits(p.coef[:, rest], before[:, rest])


# ---------------------------------------------------------------- all five


@pytest.mark.parametrize("live", LIVE[1:3])
@pytest.mark.parametrize("flag", [1, 2, 4, 7])
@pytest.mark.parametrize("name", OPS)
def test_a_skipped_step_changes_no_bit(name, flag, live):
    p = Problem(MIXED, 2, **live)
    for options in ({}, {"blend": True}) if name in ("lamb_ratio", "lamb_rescale") else ({},):
        arguments = getattr(p, f"{name}_arguments")(skip=flag, **options)
        before = copies(arguments)
        getattr(ops, name)(*arguments)
        assert equal_copies(copies(arguments), before)


@pytest.mark.parametrize("options", [0, 1])
@pytest.mark.parametrize("name", OPS)
def test_an_op_writes_all_that_its_schema_says_and_nothing_else(name, options):
    p = Problem(MIXED, 3, masks=MASKS)
    if name in ("lamb_coefficient", "lamb_rescale"):
        chosen = {"deepspeed": bool(options)} | ({"blend": bool(options)} if name == "lamb_rescale" else {})
    else:
        chosen = {"eps_inside_sqrt": bool(options)}
    if name == "lamb_ratio":
        chosen |= {"deepspeed": bool(options), "blend": bool(options), "started": options}
    arguments = getattr(p, f"{name}_arguments")(**chosen)
    before = [copies((argument,)) for argument in arguments]
    getattr(ops, name)(*arguments)
    for specified, old, argument in zip(
        getattr(torch.ops.fusedonebit, name).default._schema.arguments, before, arguments, strict=True
    ):
        if not old:
            continue
        written = specified.alias_info is not None and specified.alias_info.is_write
        assert equal_copies(copies((argument,)), old) != written, specified.name


# ---------------------------------------------------------------- lamb_update


def check_lamb_update(p: Problem, inside: bool, sums: bool = True) -> None:
    arguments = p.lamb_update_arguments(inside, sums=sums)
    params = copies((p.params,))
    grad, v_sums, norms = wide(arguments[3])[: p.layout.numel], arguments[-2], arguments[-1]
    old_m = wide(p.compensated)
    m, v, x, u, bound = reference.lamb_update(p, grad, old_m, wide(p.exp_avg_sq), inside)
    ops.lamb_update(*arguments)
    block, blocks = p.layout.block_size, p.layout.first_block[-1]
    used = slice(0, blocks * block)
    assert (np.abs(wide(p.compensated) - m)[used] <= 8 * EPS32 * (np.abs(old_m) + np.abs(grad))[used]).all()
    np.testing.assert_allclose(wide(p.exp_avg_sq)[used], v[used], rtol=8 * EPS32)
    check_norm(norms[0, :blocks], x, np.zeros_like(x), block)
    check_norm(norms[1, :blocks], u, bound, block)
    padding = slice(max(blocks, 1), None)
    assert norms[:, padding].isnan().all()
    if sums:
        expected = wide(p.exp_avg_sq).reshape(-1, block).sum(1)
        np.testing.assert_allclose(v_sums.numpy()[:blocks], expected[:blocks], rtol=1e-13)
        assert v_sums[padding].isnan().all()
    assert equal_copies(copies((p.params,)), params)


@eps_inside
@pytest.mark.parametrize("dtype", DTYPES)
@every_size
def test_lamb_update_is_its_formula(sizes, block, dtype, inside):
    check_lamb_update(Problem(sizes, 2, block, dtype=dtype), inside)


@eps_inside
@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_lamb_update_leaves_masked_elements_out_of_both_norms(world_size, block, inside):
    for sums in (False, True):
        check_lamb_update(Problem(MIXED, world_size, block, masks=MASKS), inside, sums)


def test_masked_elements_of_any_value_enter_no_norm():
    outcomes = []
    for value in (0.0, 3.0, torch.nan, torch.inf):
        p = Problem(MIXED, masks=MASKS)
        p.params[0][0] = p.params[4][128] = value
        arguments = p.lamb_update_arguments()
        arguments[3][0] = value
        p.exp_avg_sq[~p.live_mask], p.compensated[~p.live_mask] = 0.0, value
        ops.lamb_update(*arguments)
        p.compensated[~p.live_mask] = 0.0
        outcomes.append((p.compensated, p.exp_avg_sq, arguments[-2], arguments[-1]))
    for other in outcomes[1:]:
        assert equal_copies(list(other), list(outcomes[0]))


def test_no_variance_yet_divides_by_eps():
    for inside in (False, True):
        p = Problem((5,))
        p.compensated.fill_(0.5), p.exp_avg_sq.zero_(), p.params[0].zero_()
        p.coef[:, Coef.BETA1], p.coef[:, Coef.UNBIAS1], p.coef[:, Coef.EPS] = 1.0, 1.0, 0.25
        arguments = p.lamb_update_arguments(inside)
        arguments[3].zero_()
        ops.lamb_update(*arguments)
        assert arguments[-1][:, 0].tolist() == [0.0, 5 * (1.0 if inside else 2.0) ** 2]


# ---------------------------------------------------------------- lamb_coefficient


def check_lamb_coefficient(p: Problem, arguments: tuple) -> Tensor:
    norms, *_, deepspeed, coef, layers = arguments
    before, old = coef.clone(), layers.clone()
    c, average = reference.lamb_coefficient(p, norms.numpy(), old.double().numpy(), deepspeed)
    ops.lamb_coefficient(*arguments)
    np.testing.assert_allclose(wide(layers[Layer.COEFFICIENT]), c, rtol=ROUNDED)
    np.testing.assert_allclose(wide(layers[Layer.AVERAGE]), average, rtol=ROUNDED)
    assert same_bits(layers[Layer.RATIO], old[Layer.RATIO])
    check_step_columns(p, before, c)
    return layers


@either_variant
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@every_size
def test_lamb_coefficient_is_its_formula(sizes, block, world_size, deepspeed):
    for seed in range(3):
        p = Problem(sizes, world_size, block, seed=seed)
        arguments = p.lamb_coefficient_arguments(deepspeed)
        arguments[0][0] *= 10.0 ** (seed - 1)  # both bounds are met
        check_lamb_coefficient(p, arguments)


@either_variant
@pytest.mark.parametrize("zero", ["x", "u", "both"])
def test_a_zero_norm_gives_a_coefficient_of_one_whatever_the_bounds(zero, deepspeed):
    for bounds in ((2.0, 3.0), (0.1, 0.5)):
        p = Problem(MIXED, 2)
        p.coef[:, Coef.C_MIN], p.coef[:, Coef.C_MAX] = bounds
        arguments = p.lamb_coefficient_arguments(deepspeed)
        arguments[0][{"x": slice(0, 1), "u": slice(1, 2), "both": slice(0, 2)}[zero]] = 0.0
        layers = check_lamb_coefficient(p, arguments)
        assert layers[Layer.COEFFICIENT].tolist() == [1.0] * 5


def test_an_empty_tensor_has_no_norm_and_coefficient_one():
    p = Problem(MIXED)
    p.coef[:, Coef.C_MIN] = 1.5
    layers = check_lamb_coefficient(p, p.lamb_coefficient_arguments())
    assert [c == 1 for c in layers[Layer.COEFFICIENT].tolist()] == [False, True, False, False, False]


@pytest.mark.parametrize("cause", ["zero norm", "bounds", "equal norms"])
def test_only_deepspeed_leaves_a_coefficient_of_one_out_of_the_average(cause):
    for deepspeed in (False, True):
        p = Problem(MIXED)
        arguments = p.lamb_coefficient_arguments(deepspeed)
        if cause == "zero norm":
            arguments[0][1] = 0.0
        elif cause == "bounds":
            p.coef[:, [Coef.C_MIN, Coef.C_MAX]] = 1.0
        else:
            arguments[0][1] = arguments[0][0]
        average = arguments[-1][Layer.AVERAGE].clone()
        layers = check_lamb_coefficient(p, arguments)
        assert layers[Layer.COEFFICIENT].tolist() == [1.0] * 5
        assert torch.equal(layers[Layer.AVERAGE], average) == deepspeed


# ---------------------------------------------------------------- lamb_move


def check_lamb_move(inside: bool, *layout: object, **options: object) -> None:
    p, before = (Problem(*layout, **options) for _ in range(2))
    m, v = wide(p.compensated), wide(p.exp_avg_sq)
    expected = reference.lamb_move(p, m, v, inside)
    update = p.column(Coef.STEP_SIZE) * np.abs(m) / reference.denom(p, v, inside)
    ops.lamb_move(*p.lamb_move_arguments(inside))
    check_moved(p, before, expected, np.abs(before.flat(before.params)) + update)
    for name in ("compensated", "exp_avg_sq", "coef"):
        assert same_bits(getattr(p, name), getattr(before, name))


@eps_inside
@pytest.mark.parametrize("dtype", DTYPES)
@every_size
def test_lamb_move_is_its_formula_rounded_once(sizes, block, dtype, inside):
    check_lamb_move(inside, sizes, 2, block, dtype=dtype)


@pytest.mark.parametrize("live", LIVE[1:])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_lamb_move_moves_no_masked_or_excluded_element(block, dtype, live):
    check_lamb_move(False, MIXED, 3, block, dtype=dtype, **live)


# ---------------------------------------------------------------- lamb_ratio


def check_lamb_ratio(
    p: Problem,
    started: int = 1,
    inside: bool = False,
    preconditioned: bool = False,
    deepspeed: bool = False,
    blend: bool = False,
) -> tuple:
    arguments = p.lamb_ratio_arguments(started, inside, preconditioned, deepspeed, blend)
    check_lamb_ratio_arguments(p, arguments)
    return arguments


def check_lamb_ratio_arguments(p: Problem, arguments: tuple) -> None:
    _, _, block, bits, scale, last_bits, last_scale, frozen, fresh, started, inside, *_ = arguments
    preconditioned, deepspeed = arguments[11:13]
    *_, largest, norms = arguments
    frozen64, held = wide(frozen), wide(fresh)
    per_unit = reference.denom(p, frozen64, inside) if preconditioned else None
    m = reference.momentum_of(p, bits, scale, per_unit)
    last = reference.momentum_of(p, last_bits, last_scale, per_unit) if started else held
    v, bound = reference.fresh_variance(p, m, last, held if started else frozen64)
    unchanged = copies((p.params, frozen, bits, scale, started, p.coef))
    ops.lamb_ratio(*arguments)
    found = wide(fresh)
    assert (np.abs(found - v) <= bound + 2.0**-149).all()
    assert not found[~p.live].any()
    # Of the variance as it was written: its own errors are bounded above.
    ratio = reference.ratios(p, frozen64, found, inside, deepspeed).reshape(-1, block).max(1)
    np.testing.assert_allclose(wide(largest), ratio, rtol=8 * EPS32)
    assert same_bits(last_bits, bits)
    assert same_bits(last_scale, scale)
    if norms is not None:
        x, u, off = reference.lamb_direction(p, m, frozen64, inside)
        decay = p.column(Coef.WEIGHT_DECAY) * x
        check_norm(norms[0], np.where(p.live, u - decay, 0.0), off, block)
        check_norm(norms[1], u, off, block)
    assert equal_copies(copies((p.params, frozen, bits, scale, started, p.coef)), unchanged)


@pytest.mark.long(but=26)
@either_variant
@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("started", [0, 1])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@every_size
def test_lamb_ratio_is_its_formula(sizes, block, world_size, started, ternary, deepspeed):
    check_lamb_ratio(Problem(sizes, world_size, block, ternary=ternary), started, deepspeed=deepspeed)


@pytest.mark.long(but=24)
@eps_inside
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deepspeed", [False, True])
@every_size
def test_lamb_ratio_finds_the_norms_for_the_blend(sizes, block, deepspeed, dtype, inside):
    check_lamb_ratio(Problem(sizes, 2, block, dtype=dtype), 1, inside, deepspeed=deepspeed, blend=True)


@pytest.mark.parametrize("way", [way for way in RATIO_WAYS if way[2]], ids=str)
@every_size
def test_preconditioned_lamb_ratio_is_its_formula(sizes, block, way):
    check_lamb_ratio(Problem(sizes, 2, block), *way)


def test_lamb_ratio_of_momentum_in_units_of_one_over_denom_is_that_of_the_momentum():
    outcomes = []
    for preconditioned in (False, True):
        p = Problem((128, 128))
        p.exp_avg_sq.fill_(0.25), p.coef[:, Coef.EPS].fill_(0.5), p.coef[:, Coef.RSQRT_BIAS2].fill_(3.0)  # denom = 2
        arguments = p.lamb_ratio_arguments(1, False, preconditioned, blend=True)
        if preconditioned:
            arguments[4].div_(2.0), arguments[6].div_(2.0)
        ops.lamb_ratio(*arguments)
        outcomes.append([arguments[8], *arguments[-2:]])
    assert equal_copies(*outcomes)


@pytest.mark.long(but=13)
@pytest.mark.parametrize("live", LIVE[1:])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_lamb_ratio_counts_no_masked_or_excluded_element(block, world_size, live):
    for started in (0, 1):
        for deepspeed in (False, True):
            p = Problem(MIXED, world_size, block, **live)
            arguments = check_lamb_ratio(p, started, deepspeed=deepspeed, blend=True)
            nothing = ~p.live.reshape(-1, block).any(1)
            assert not arguments[-2][torch.from_numpy(nothing)].any()
            assert not arguments[-1][:, torch.from_numpy(nothing)].any()


@pytest.mark.parametrize("junk", [3.0, torch.nan, torch.inf])
def test_what_does_not_count_enters_no_ratio_and_no_norm(junk):
    for started in (0, 1):
        for deepspeed in (False, True):
            outcomes = []
            for value in (0.0, junk):
                p = Problem(MIXED, 3, masks=MASKS, excluded=[2])
                arguments = p.lamb_ratio_arguments(started, False, False, deepspeed, True)
                p.params[0][0] = p.params[2][5] = value
                arguments[7][~p.live_mask] = arguments[8][~p.live_mask] = value
                ops.lamb_ratio(*arguments)
                outcomes.append([arguments[8], *arguments[-2:]])
            assert equal_copies(*outcomes)


def test_a_coordinate_without_frozen_variance_has_ratio_zero_in_the_paper_and_one_over_eps_in_deepspeed():
    for deepspeed in (False, True):
        p = Problem((128, 128, 128))
        p.exp_avg_sq[:128] = 0.0  # of the first tensor all, of the second half, of the third none
        p.exp_avg_sq[128:192] = 0.0
        arguments = check_lamb_ratio(p, 1, deepspeed=deepspeed)
        assert (arguments[8] > 0).all()
        assert [x > 0 for x in arguments[-2].tolist()] == [deepspeed, True, True]


@pytest.mark.parametrize("frozen", [0.0, 1e-45])
def test_a_fresh_variance_of_zero_gives_an_infinite_ratio_that_is_clipped(frozen):
    p = Problem((100, 100))
    arguments = p.lamb_ratio_arguments(1)
    p.exp_avg_sq[:128] = frozen
    arguments[4].zero_(), arguments[6].zero_(), arguments[8][:128].zero_()
    check_lamb_ratio_arguments(p, arguments)
    largest = arguments[-2]
    assert not arguments[8][:128].any()
    assert largest[0] == (torch.inf if frozen else 0.0)
    _, norms, *rest, layers = p.lamb_rescale_arguments()
    layers[Layer.RATIO] = 1.0
    ops.lamb_rescale(largest, norms, *rest, layers)
    threshold = p.coef[0, Coef.R_THRESHOLD].double()
    assert layers[Layer.RATIO, 0] == (float((1 + threshold).float()) if frozen else 1.0)
    assert layers.isfinite().all()


def test_a_first_step_takes_the_momentum_in_full_precision_and_later_ones_the_bits():
    p = Problem(MIXED, 2)
    p.coef[:, Coef.UNIT] = 1.0
    first = p.lamb_ratio_arguments(0)
    check_lamb_ratio_arguments(p, first)
    second = (*first[:9], torch.ones(1, dtype=torch.int32), *first[10:])
    v = wide(second[8])
    # The same momentum once more: g = m.
    check_lamb_ratio_arguments(p, second)
    m = p.by_element(p.exp_avg_scale)
    expected = p.column(Coef.BETA2) * v + p.column(Coef.ONE_MINUS_BETA2) * m * m
    np.testing.assert_allclose(wide(second[8]), np.where(p.live, expected, 0.0), rtol=1e-4)


# ---------------------------------------------------------------- lamb_rescale


def check_lamb_rescale(p: Problem, arguments: tuple) -> Tensor:
    largest, norms, _, _, deepspeed, started, coef, layers = arguments
    before, old = coef.clone(), layers.clone()
    norms64 = None if norms is None else norms.numpy()
    r = reference.lamb_rescale(p, wide(largest), norms64, old.double().numpy(), deepspeed)
    ops.lamb_rescale(*arguments)
    np.testing.assert_allclose(wide(layers[Layer.RATIO]), r, rtol=ROUNDED)
    c = wide(layers[Layer.RATIO]) * wide(old[Layer.AVERAGE])
    np.testing.assert_allclose(wide(layers[Layer.COEFFICIENT]), c, rtol=ROUNDED)
    assert same_bits(layers[Layer.AVERAGE], old[Layer.AVERAGE])
    assert started.item() == 1
    check_step_columns(p, before, c)
    return layers


@pytest.mark.long(but=23)
@either_variant
@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@every_size
def test_lamb_rescale_is_its_formula(sizes, block, world_size, blend, deepspeed):
    for seed in range(4):
        p = Problem(sizes, world_size, block, seed=seed)
        arguments = p.lamb_rescale_arguments(deepspeed, blend)
        if seed > 1:  # nothing limits the change: the range and the blend show
            p.coef[:, Coef.R_THRESHOLD] = 100.0
            arguments[0].mul_(10.0 ** (seed - 3))
        check_lamb_rescale(p, arguments)


@pytest.mark.parametrize(
    ("found", "last", "paper", "deepspeed"),
    [(3.0, 0.25, 0.5, 0.375), (3.0, 8.0, 4.0, 4.0), (100.0, 1.0, 1.5, 1.5), (0.1, 10.0, 4.0, 5.0)],
)
def test_the_order_of_the_two_limits(found, last, paper, deepspeed):
    for variant, expected in ((False, paper), (True, deepspeed)):
        p = Problem((128,))
        p.coef[:, Coef.R_MIN], p.coef[:, Coef.R_MAX], p.coef[:, Coef.R_THRESHOLD] = 0.5, 4.0, 0.5
        arguments = p.lamb_rescale_arguments(variant)
        arguments[0].fill_(found)
        arguments[-1][Layer.RATIO] = last
        assert check_lamb_rescale(p, arguments)[Layer.RATIO].item() == expected


def test_the_blend_replaces_the_share_of_the_weight_decay_by_one():
    for adam, u, expected in ((3.0, 4.0, 1.75), (0.0, 4.0, 1.0), (5.0, 4.0, 2.0), (0.0, 0.0, 2.0)):
        p = Problem((128,))
        p.coef[:, Coef.R_THRESHOLD], p.coef[:, Coef.R_MAX] = 100.0, 9.0
        arguments = p.lamb_rescale_arguments(deepspeed=True, blend=True)
        arguments[0].fill_(2.0)
        arguments[1][:, 0] = torch.tensor([adam**2, u**2])
        assert check_lamb_rescale(p, arguments)[Layer.RATIO].item() == expected


@either_variant
@pytest.mark.parametrize("blend", [False, True])
def test_a_layer_without_a_ratio_keeps_its_own(blend, deepspeed):
    p = Problem(MIXED, 2)  # the second tensor is empty
    arguments = p.lamb_rescale_arguments(deepspeed, blend)
    arguments[0][p.layout.first_block[2]] = 0.0
    last = arguments[-1][Layer.RATIO].fill_(0.01).clone()  # outside of its range: not even that is enforced
    layers = check_lamb_rescale(p, arguments)
    kept = layers[Layer.RATIO] == last
    assert [bool(kept[1]), bool(kept[2])] == [True, True]
    assert not kept[[0, 3, 4]].any()


@pytest.mark.parametrize("sizes", [(0,), (0, 0), (0, 5, 0)])
def test_tensors_without_elements_take_part_in_no_op(sizes):
    p = Problem(sizes, 2)
    check_lamb_update(p, False)
    check_lamb_move(False, sizes, 2)
    largest = check_lamb_ratio(p, 0, deepspeed=True, blend=True)[-2]
    assert (largest > 0).sum() == sizes.count(5)


# ---------------------------------------------------------------- square_sums


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@every_size
def test_square_sums_are_those_of_each_block(sizes, block, world_size):
    p = Problem(sizes, world_size, block)
    x = p.compensated.clone()
    x[~p.live_mask] = 7.0
    sums = ops.square_sums(p.layout.sizes, block, x, p.table.bits, p.table.row)
    blocks = p.layout.first_block[-1]
    expected = (wide(p.compensated) ** 2).reshape(-1, block).sum(1)
    np.testing.assert_allclose(sums[:blocks], expected[:blocks], rtol=1e-13)
    assert not sums[blocks:].any()
    assert same_bits(x[p.live_mask], p.compensated[p.live_mask])
