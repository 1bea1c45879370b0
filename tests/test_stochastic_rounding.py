"""bfloat16 parameters: rounded stochastically without bias; and what they lack of masters, parted and joined."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from observe import fingerprint
from op_arguments import Problem
from optimizers import EACH, UNGUARDED, construct, objects
from ranks import simulate, warned
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import DisagreementError, Lamb, Numerics, OneBitAdam, triton_kernels
from fusedonebit.comm import Transport
from fusedonebit.triton_kernels import Coef, bit_rules, block_io, using
from fusedonebit.triton_kernels.eager import Tile, join, part, random_bits, stochastic

OPS = ("adam_update", "apply_momentum", "lamb_move")
EACH_OP = pytest.mark.parametrize("op", OPS)
SEVERAL = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)
BFLOAT16 = (torch.bfloat16,)


def arguments(op: str, step: int | None, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = BFLOAT16) -> Any:
    """An op's arguments after ``step`` updates, or None to round to nearest; dtypes take turns."""
    p = Problem(sizes, 2)
    # What bfloat16 can represent, also where a test keeps it in float32 to see what would be rounded.
    p.params = [x.bfloat16().to(dtypes[i % len(dtypes)]) for i, x in enumerate(p.params)]
    return p.arguments(op, rounding=step, **{"exp_avg_sq": ...} if op == "apply_momentum" else {})


def moved(op: str, *how: object) -> list[Tensor]:
    """The parameters after the op, as eager rounds them."""
    given = arguments(op, *how)
    with using("plain"):
        getattr(triton_kernels, op)(*given)
    return given[0]


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 at or next to float32 ``x`` towards zero, and the one at or next to it away from zero."""
    bits = x.view(torch.int32)
    return (bits & -65536).view(torch.float32), ((bits + 0xFFFF) & -65536).view(torch.float32)


def tile(start: int, numel: int) -> Tile:
    return Tile(0, slice(0), slice(0), numel, start, ())


def drawn(step: int, start: int, numel: int) -> Tensor:
    """The random bits of some elements."""
    return random_bits(torch.tensor(step), tile(start, numel), 128).view(-1)


elements, random_words, random_sixteen = (
    block_io.elements.triton,
    block_io.random_words.triton,
    bit_rules.random_bits.triton,
)


@triton.jit
def write_bits(rounding, block, out):
    i = elements(128)
    low, seed = random_words(rounding, tl.load(block), i, 128)
    tl.store(out + i, random_sixteen(low, seed).to(tl.int32))


@pytest.mark.parametrize("block", [0, 3, 2**25 - 1, 2**25, 2**26 + 5], ids=str)
def test_random_bits_go_on_past_2_to_the_32_elements(block):
    step, out = torch.tensor(9), torch.zeros(128, dtype=torch.int32)
    write_bits[(1,)](step, torch.tensor([block]), out)
    assert torch.equal(out, drawn(9, block * 128, 128))
    if block >= 2**25:
        assert not torch.equal(out, drawn(9, block * 128 % 2**32, 128))


@EACH_OP
def test_tensors_of_other_dtypes_are_rounded_to_nearest(op):
    sizes = (300, 200, 100, 50)
    nearest, found = (moved(op, step, sizes, SEVERAL) for step in (None, 3))
    assert [torch.equal(a, b) for a, b in zip(nearest, found, strict=True)] == [False, True, True, False]


# ---------------------------------------------------------------- what is rounded how


def test_over_all_random_bits_a_value_goes_up_by_its_remainder():
    x = torch.tensor([1.001, -1.001, 0.7, 3.3e38, -3e-39, 1e-45, 1 + 2**-9, 1 + 2**-23, 2 - 2**-23])
    for value, (low, high) in zip(x, zip(*neighbours(x), strict=True), strict=True):
        rounded = stochastic(value.expand(1 << 16).contiguous(), torch.arange(1 << 16, dtype=torch.int32))
        assert set(rounded.tolist()) == {low.item(), high.item()}
        remainder = int(value.view(torch.int32)) & 0xFFFF
        assert int((rounded == high).sum()) == remainder


def test_bfloat16_values_stay_and_only_above_the_largest_is_inf():
    largest = torch.finfo(torch.bfloat16).max
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, largest, -largest, 2.0**-133, torch.inf, -torch.inf])
    for bits in (0, 1, 0x7FFF, 0xFFFF):
        rounded = stochastic(exact, torch.full((len(exact),), bits, dtype=torch.int32))
        assert torch.equal(rounded.view(torch.int32), exact.view(torch.int32))
        # NaN of all payloads: a carry out of the largest would end in -0.0.
        payloads = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000], dtype=torch.int32)
        odd = stochastic(payloads.view(torch.float32), torch.full((5,), bits, dtype=torch.int32))
        assert odd.isnan().all()
        assert odd.bfloat16().isnan().all()
    above = torch.tensor([torch.finfo(torch.float32).max])
    assert stochastic(above, torch.tensor([0], dtype=torch.int32)).item() == largest
    assert stochastic(above, torch.tensor([1], dtype=torch.int32)).item() == torch.inf


@EACH_OP
def test_an_op_rounds_to_a_neighbour_of_its_float32_result(op):
    sizes = (5000, 129)
    exact = torch.cat(moved(op, None, sizes, (torch.float32,)))
    low, high = neighbours(exact)
    found = torch.cat(moved(op, 11, sizes)).float()
    assert ((found == low) | (found == high)).all()
    between = low != high
    assert 0.45 < (found == high)[between].float().mean() < 0.55
    nearest = torch.cat(moved(op, None, sizes)).float()
    assert (found != nearest).any()


@pytest.mark.long
@EACH_OP
def test_the_mean_over_many_steps_is_the_unrounded_value(op):
    steps, n = 1500, 64
    exact = moved(op, None, (n,), (torch.float32,))[0].double()
    found = torch.stack([moved(op, step, (n,))[0].double() for step in range(steps)])
    low, high = (x.double() for x in neighbours(exact.float()))
    share = (exact - low) / (high - low)
    error = (high - low).abs() * (share * (1 - share) / steps).sqrt()
    assert (error > 0).all()
    assert (((found.mean(0) - exact) / error).abs() < 4).all()
    # Rounding to nearest is off by a quarter of the gap on average, far outside.
    nearest = moved(op, None, (n,))[0].double()
    assert (((nearest - exact) / error).abs() > 4).double().mean() > 0.9


def test_steps_of_a_32nd_of_a_unit_move_every_32nd_element():
    p = Problem((4096,), 1, 1024, dtype=torch.bfloat16)
    p.params[0].fill_(1.0)
    p.coef[:, Coef.DECAY], p.coef[:, Coef.STEP_SIZE], p.coef[:, Coef.UNIT] = 1.0, 2.0**-12, 1.0
    p.exp_avg_scale.fill_(1.0)
    p.exp_avg_bits.zero_()  # minus signs: up by 2^-12, a 32nd of a unit
    with using("plain"):
        triton_kernels.apply_momentum(*p.arguments("apply_momentum", rounding=2))
    up = (p.params[0] == 1 + 2**-7).double().mean()
    assert ((p.params[0] == 1) | (p.params[0] == 1 + 2**-7)).all()
    assert abs(up - 1 / 32) < 4 * (31 / 32**2 / 4096) ** 0.5


# ---------------------------------------------------------------- the random bits


def test_bits_are_uniform_and_independent_of_steps_and_elements():
    n, steps = 8192, 12
    uniform = torch.stack([drawn(step, 0, n) for step in range(steps)]).double() / 65536 - 0.5
    bound = 5 * (1 / 12) / n**0.5  # five standard errors of a mean of products
    for a, b in combinations(uniform, 2):
        assert abs((a * b).mean()) < bound
    for row in uniform:
        assert abs(row.mean()) < 5 * (1 / 12) ** 0.5 / n**0.5
        assert abs((row * row).mean() - 1 / 12) < bound
        for lag in (1, 2, 7, 8, 64, 128, 1024):
            assert abs((row[lag:] * row[:-lag]).mean()) < 1.1 * bound
    bits = drawn(5, 0, n)
    for k in range(16):
        assert abs(((bits >> k) & 1).double().mean() - 0.5) < 5 * 0.5 / n**0.5


def test_one_elements_bits_over_the_steps_are_as_independent():
    steps = 4096
    uniform = torch.stack([drawn(step, 0, 128) for step in range(steps)]).double() / 65536 - 0.5
    bound = 5 * (1 / 12) / steps**0.5
    for lag in (1, 2, 3, 16, 256):
        assert ((uniform[lag:] * uniform[:-lag]).mean(0).abs() < 1.1 * bound).all()
    assert ((uniform[:, 1:] * uniform[:, :-1]).mean(0).abs() < bound).all()


def test_an_elements_bits_do_not_depend_on_its_tile():
    whole = drawn(3, 2**32 - 512, 1024)  # a tile across the boundary
    assert torch.equal(whole[:512], drawn(3, 2**32 - 512, 512))
    assert torch.equal(whole[512:], drawn(3, 2**32, 512))


# ---------------------------------------------------------------- training


SHAPES = [(60, 40), (7,), (1,), (1500,)]


def make(dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter((torch.rand(shape, generator=generator) + 1).bfloat16().to(dtype)) for shape in shapes]


def train(name: str, params: list[Parameter], steps: int, rank: int = 0, lr: float = 1e-3, **options: Any) -> list[str]:
    """Minimises |x - 1.5|^2 with noisy gradients; returns the parameters' fingerprints after each step."""
    optimizer = construct(name, params, lr=lr, weight_decay=0.0, freeze_step=10, **UNGUARDED, **options)
    generator, prints = torch.Generator().manual_seed(rank), []
    with warned():
        for _ in range(steps):
            for p in params:
                noise = torch.randn(p.shape, generator=generator) * 0.02
                p.grad = (p.detach().float() - 1.5 + noise).to(p.dtype)
            optimizer.step()
            prints.append(fingerprint(params))
    return prints


def off(params: list[Parameter]) -> float:
    return float(torch.cat([(p.detach().float() - 1.5).square().view(-1) for p in params]).mean())


@pytest.mark.long(but=1)
@EACH
def test_steps_below_half_a_unit_train_as_in_float32(name):
    # Half a unit in the last place of what is between 1 and 2 is 2^-8, four steps of lr; LAMB's are longer.
    lr = 1e-3 if "adam" in name else 5e-4
    options = {} if "adam" in name else {"c_max": 1.0} | ({"r_max": 1.0} if name == "onebit-lamb" else {})
    start, full, nearest, rounded = (make(t) for t in (torch.float32, torch.float32, *[torch.bfloat16] * 2))
    train(name, full, 150, lr=lr, **options)
    train(name, nearest, 150, lr=lr, **options)
    train(name, rounded, 150, lr=lr, stochastic_rounding=True, **options)
    assert off(full) < 0.75 * off(start)
    assert off(nearest) > 0.98 * off(start)
    assert abs(off(rounded) - off(full)) < 0.05 * off(start)


def test_a_skipped_step_draws_nothing():
    """The bits go with the updates done: a run with a skipped step continues as one without."""
    prints = []
    for bad in ((), (3,)):
        params = make(torch.bfloat16)
        optimizer = OneBitAdam(params, **objects(freeze_step=5, stochastic_rounding=True, **UNGUARDED))
        for step in range(5 + len(bad)):
            for p in params:
                p.grad = torch.full_like(p, torch.nan if step in bad else 0.1)
            with warned():
                optimizer.step()
        prints.append(fingerprint(params))
    assert prints[0] == prints[1]


# ---------------------------------------------------------------- what is refused


@EACH
@pytest.mark.parametrize(
    ("dtypes", "value", "message"),
    [
        ((torch.float16,), True, "stochastic_rounding must be False .* got True and parameter 0 of float16; use bfl"),
        ((torch.bfloat16, torch.float16), True, r"got True and parameter 1 of float16; .* or Numerics\(master"),
        ((torch.float32,), True, "stochastic_rounding must be False without bfloat16 parameters, got True and"),
        ((torch.bfloat16,), 1, "stochastic_rounding must be True or False, got 1"),
    ],
)
def test_what_makes_no_sense_is_refused(name, dtypes, value, message):
    params = [p for dtype in dtypes for p in make(dtype, [(3,)])]
    with pytest.raises(ValueError, match=message):
        construct(name, params, freeze_step=5, stochastic_rounding=value)


def test_float16_parameters_can_not_be_added_later():
    optimizer = Lamb(make(torch.bfloat16), numerics=Numerics(stochastic_rounding=True))
    with pytest.raises(ValueError, match=r"got True and parameter 4 of float16; use bfloat16"):
        optimizer.add_param_group({"params": make(torch.float16, [(3,)])})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": make(torch.float32, [(3,)])})


def disagree(rank: int, transport: Transport) -> None:
    Lamb(make(torch.bfloat16), numerics=Numerics(stochastic_rounding=rank == 0), process_group=transport)


def test_ranks_that_disagree_are_refused():
    with pytest.raises(DisagreementError, match="stochastic_rounding"):
        simulate(disagree, 2)


INT16, INT8 = torch.int16, torch.int8
EACH_DTYPE = pytest.mark.parametrize("kept", [INT16, INT8], ids=["16bit", "8bit"])
EACH_MOVE = pytest.mark.parametrize("op", OPS[:2])
LENGTHS = (300, 0, 5, 1100, 129)
MASKED = {"masks": {0: torch.arange(300) % 3 > 0, 4: torch.arange(129) < 128}, "excluded": [2]}
SIXTEEN = st.integers(0, 0xFFFF)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def number(word: int) -> Tensor:
    return torch.tensor([word - 2**32 if word >= 2**31 else word], dtype=torch.int32).view(torch.float32)


# ---------------------------------------------------------------- a number and its two parts


@given(FINITE)
def test_16_bits_are_all_that_the_nearest_bfloat16_lacks(value):
    x = torch.tensor([value], dtype=torch.float32)
    upper, low = part(x, INT16, None)
    assert torch.equal(upper, upper.bfloat16().float())
    assert torch.equal(bits(join(upper, low)), bits(x))
    # No bfloat16 is nearer: where two are as near it may be either.
    off, least = (abs(bits(each.float()) - bits(x)).item() for each in (upper, x.bfloat16()))
    assert off == least


@pytest.mark.parametrize("kept", [INT16, INT8])
def test_carries_infinity_and_nan(kept):
    exact = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x00008000, 0x3F808000, 0x3F818000, 0xBF808000, 0x3FFFFF00]
    exact += [0x7F7F7F00, 0x7F7F8000, 0x7F7FFF00, 0x00000100, 0x80000100]
    for word in exact:
        upper, low = part(number(word), kept, torch.tensor([0xFFFF], dtype=torch.int32))
        assert bits(join(upper, low)).item() == bits(number(word)).item(), hex(word)
    for word in (0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0x7FC00000):
        upper, low = part(number(word), kept, torch.tensor([0xFFFF], dtype=torch.int32))
        assert upper.isnan().all()
        assert upper.bfloat16().isnan().all()
        assert int(low) == 0


@given(FINITE, SIXTEEN)
def test_8_bits_keep_one_of_the_two_nearest_24_bit_numbers(value, random):
    x = torch.tensor([value], dtype=torch.float32)
    upper, low = part(x, INT8, torch.tensor([random], dtype=torch.int32))
    assert torch.equal(upper, upper.bfloat16().float())
    found, below = bits(join(upper, low)).item(), bits(x).item() & ~0xFF
    assert found == (below if (bits(x).item() & 0xFF) + (random >> 8) < 256 else below + 256)
    again = part(join(upper, low), INT8, torch.tensor([random ^ 0xFFFF], dtype=torch.int32))
    assert torch.equal(bits(again[0]), bits(upper))
    assert torch.equal(again[1], low)


def test_over_all_random_bits_8_bits_keep_the_mean():
    for word in (0x3F800001, 0x3F8080C3, 0xBF7FFFFF, 0x3F807FFF, 0x00000011):
        x = number(word)
        upper, low = part(x.repeat(1 << 16), INT8, torch.arange(1 << 16, dtype=torch.int32))
        assert bits(join(upper, low)).double().mean().item() == bits(x).item()


@given(FINITE, st.integers(-(2**15), 2**15 - 1))
def test_overwritten_parameters_are_off_by_half_a_unit_at_most(value, stale):
    written = torch.tensor([value], dtype=torch.float32).bfloat16().float()
    found = join(written, torch.tensor([stale], dtype=INT16))
    if written.isfinite():
        assert found.isfinite().all()
        assert abs(bits(found) - bits(written)).item() <= 0x8000


# ---------------------------------------------------------------- ops


def corrected(op: str, kept: torch.dtype) -> Any:
    """An op's arguments, with corrections of any size of all parameters, also of masked ones."""
    p = Problem(LENGTHS, 2, dtype=torch.bfloat16, **MASKED)
    how = {"exp_avg_sq": ...} if op == "apply_momentum" else {"found": ..., "found_before": ...}
    return p.arguments(op, correction=kept, **how)


@EACH_DTYPE
@EACH_MOVE
def test_masters_are_moved_by_the_rule_for_float32_parameters(op, kept):
    given = corrected(op, kept)
    layout = Problem(LENGTHS, 2, 128).layout
    parts = [given.correction[layout.offset(i) : layout.offset(i) + n] for i, n in enumerate(LENGTHS)]
    masters = [join(p.float(), low) for p, low in zip(given.params, parts, strict=True)]
    before = [m.clone() for m in masters]
    plain = corrected(op, kept)
    with using("plain"):
        getattr(triton_kernels, op)(*plain._replace(params=masters, correction=None))
        getattr(triton_kernels, op)(*given)
    moved = False
    for i, (p, low) in enumerate(zip(given.params, parts, strict=True)):
        off = bits(join(p.float(), low)) - bits(masters[i])
        assert (off.abs() < 256).all()
        assert kept is INT8 or not off.any()
        moved |= not torch.equal(before[i], masters[i])
    assert moved


@pytest.mark.parametrize("backend", ["plain", pytest.param("native", marks=pytest.mark.needs_compiler)])
@EACH_MOVE
def test_elements_that_no_mask_lets_move_keep_their_corrections(op, backend):
    given, before = (corrected(op, INT8) for _ in range(2))
    with using(backend):
        getattr(triton_kernels, op)(*given)
    live = Problem(LENGTHS, 2, 128, **MASKED).live_mask
    assert torch.equal(given.correction[~live], before.correction[~live])
    assert not torch.equal(given.correction[live], before.correction[live])
