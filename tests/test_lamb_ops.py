"""The ops of LAMB's warm-up, and what all of LAMB's ops share, against float64 NumPy (``reference_ops``)."""

from __future__ import annotations

import numpy as np
import pytest
import reference_ops as reference
import torch
from backends import tensors
from op_arguments import flat
from reference_ops import EPS32, Problem, wide
from test_ops_reduce_and_update import check_moved, every_size, same_bits
from torch import Tensor

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import BLOCK_SIZES, Coef, Layer

MIXED = (300, 0, 128, 1, 129)
WORLD_SIZES = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASKS = {0: torch.arange(300) % 3 > 0, 4: torch.arange(129) < 128}
LIVE = [{}, {"masks": MASKS}, {"excluded": [2]}, {"masks": MASKS, "excluded": [1, 3]}]
OPS = ("lamb_update", "lamb_coefficient", "lamb_move", "lamb_ratio", "lamb_rescale", "lamb_follow")
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


# ---------------------------------------------------------------- all of them


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
        chosen = {} if name == "lamb_follow" else {"eps_inside_sqrt": bool(options)}
    if name == "lamb_ratio":
        chosen |= {"deepspeed": bool(options), "blend": bool(options), "started": options}
    arguments = getattr(p, f"{name}_arguments")(**chosen)
    if name == "lamb_update":
        found, found_before = p.flags_found()
        arguments = arguments._replace(found=found, found_before=found_before)
        arguments.grads[-1].fill_(torch.nan)
    arguments = flat(name, arguments)
    before = [copies((argument,)) for argument in arguments]
    getattr(torch.ops.fusedonebit, name)(*arguments)
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
    grad, v_sums, norms = p.flat(arguments.grads), arguments.exp_avg_sq_sums, arguments.norms
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
        arguments.grads[0][0] = value
        p.exp_avg_sq[~p.live_mask], p.compensated[~p.live_mask] = 0.0, value
        ops.lamb_update(*arguments)
        p.compensated[~p.live_mask] = 0.0
        outcomes.append((p.compensated, p.exp_avg_sq, arguments.exp_avg_sq_sums, arguments.norms))
    for other in outcomes[1:]:
        assert equal_copies(list(other), list(outcomes[0]))


def test_no_variance_yet_divides_by_eps():
    for inside in (False, True):
        p = Problem((5,))
        p.compensated.fill_(0.5), p.exp_avg_sq.zero_(), p.params[0].zero_()
        p.coef[:, Coef.BETA1], p.coef[:, Coef.UNBIAS1], p.coef[:, Coef.EPS] = 1.0, 1.0, 0.25
        arguments = p.lamb_update_arguments(inside)
        arguments.grads[0].zero_()
        ops.lamb_update(*arguments)
        assert arguments.norms[:, 0].tolist() == [0.0, 5 * (1.0 if inside else 2.0) ** 2]


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
        arguments.norms[0] *= 10.0 ** (seed - 1)  # both bounds are met
        check_lamb_coefficient(p, arguments)


@either_variant
@pytest.mark.parametrize("zero", ["x", "u", "both"])
def test_a_zero_norm_gives_a_coefficient_of_one_whatever_the_bounds(zero, deepspeed):
    for bounds in ((2.0, 3.0), (0.1, 0.5)):
        p = Problem(MIXED, 2)
        p.coef[:, Coef.C_MIN], p.coef[:, Coef.C_MAX] = bounds
        arguments = p.lamb_coefficient_arguments(deepspeed)
        arguments.norms[{"x": slice(0, 1), "u": slice(1, 2), "both": slice(0, 2)}[zero]] = 0.0
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
            arguments.norms[1] = 0.0
        elif cause == "bounds":
            p.coef[:, [Coef.C_MIN, Coef.C_MAX]] = 1.0
        else:
            arguments.norms[1] = arguments.norms[0]
        average = arguments.layers[Layer.AVERAGE].clone()
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
