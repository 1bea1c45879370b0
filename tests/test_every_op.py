"""Every op, on arguments that are drawn from its declaration (``op_draws``): all backends do the same, what is declared
alone, and what the op's formula says in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import element_formulas  # noqa: F401
import outer_formulas  # noqa: F401
import pytest
import quantise_formulas  # noqa: F401
import square_formulas  # noqa: F401
import step_formulas  # noqa: F401
import torch
from backends import assert_equal_backends, bits_of, call, each
from op_draws import OURS, Draw, draws, faked, options
from op_formulas import FIXED, FORMULAS, HELD, Wide
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedonebit.triton_kernels import eager
from fusedonebit.triton_kernels.op import OPS

WITH_FORMULA = [name for name in OURS if name in FORMULAS]
OTHERS = {"scale_coefficients", "close_round", "local_step", "local_update", "lion_compress"}
HELD_BACK = [name for name in OURS if {"hold", "skip"} & set(OPS[name].arguments) and name not in OTHERS]
"""Without those of which more is to be said than what they write; their formulas say it."""
LAPS = [0, 1, *(pytest.param(lap, marks=pytest.mark.full) for lap in (2, 3))]
each_op = pytest.mark.parametrize("name", OURS)
TOLD = {
    "finish": {"words", "header_counter", "header_pending", "coefficients_table", "coefficients_moved"},
    "finish_alone": {"words", "flags", "header_counter", "header_pending", "coefficients_table", "coefficients_moved"},
    "receive": {"flags", "digest_sums"},
    "server_reduce": {"flags", "kept_words", "words"},
    "outer_mean": {"flags", "kept_words", "words"},
    "apply_momentum": {"digest", "steps", "count_updates", "count_number", "count_replays"},
    "adam_update": {"found_before"},
    "lamb_update": {"found_before"},
}
"""What ops write where they are held back, or skip their step."""


def many(name: str) -> int:
    """Draws of a lap: an op of many choices has more."""
    return 12 + 2 * len(options(name))


def check_draws(name: str, lap: int, check: Callable[[Draw], None], **fixed: tuple[Any, ...]) -> None:
    """Check a lap of draws, of which some let eager cut what it works on into several tiles."""
    for draw in draws(name, lap * many(name), (lap + 1) * many(name), fixed):
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(eager.TILE_NUMEL, "cpu", 1024 if draw.how["tiles"] else 1 << 16)
                check(draw)
        except Exception as error:
            raise AssertionError(f"{draw}: {error}") from error


def written(before: Any, after: Any) -> set[str]:
    """The names of what has changed."""
    pairs = zip(each(before.op, before), each(after.op, after), strict=True)
    return {name for (name, x), (_, y) in pairs if not torch.equal(bits_of(x), bits_of(y))}


@pytest.mark.kernels
@pytest.mark.long(but=[f"{name}-0" for name in OURS])
@pytest.mark.parametrize("lap", LAPS)
@each_op
def test_backends_do_the_same_and_write_only_what_is_declared(name, lap):
    check_draws(name, lap, lambda draw: assert_equal_backends(name, draw.make))


@pytest.mark.long(but=[f"{name}-0" for name in WITH_FORMULA])
@pytest.mark.parametrize("lap", LAPS)
@pytest.mark.parametrize("name", WITH_FORMULA)
def test_an_op_is_its_formula(name, lap):
    def check(draw: Draw) -> None:
        before, after = draw.make(), draw.make()
        call(name, "plain", after)
        FORMULAS[name](Wide(before) if hasattr(before, "places") else before, after)

    held: dict[str, tuple[Any, ...]] = {"hold": (0, 16), "skip": (0, 0, 1)} if name in HELD else {}
    check_draws(name, lap, check, **FIXED | held)


@pytest.mark.parametrize("name", HELD_BACK)
def test_an_op_that_is_held_back_writes_only_what_it_tells(name):
    def check(draw: Draw) -> None:
        before, after = draw.make(), draw.make()
        call(name, "plain", after)
        assert written(before, after) <= TOLD.get(name, set())

    check_draws(name, 0, check, hold=(1, 16), skip=(1, 6))


@each_op
def test_draws_are_of_every_dtype_and_write_all_that_is_declared(name):
    seen, has_written = {flat: set() for flat in OPS[name].arguments}, set()
    for draw in draws(name, 0, max(24, many(name))):
        before, after = draw.make(), draw.make()
        call(name, "plain", after)
        has_written |= written(before, after)
        for flat, x in zip(seen, before.flat, strict=True):
            seen[flat].add(x.dtype if isinstance(x, Tensor) else None)
    assert set(OPS[name].writes) - has_written <= SCRATCH
    for flat, slot in OPS[name].arguments.items():
        if slot.spec is not None and (name, flat) not in NEVER:
            assert seen[flat] - {None} == set(slot.spec.dtypes), flat
            assert (None in seen[flat]) == (slot.schema == "Tensor?" and (name, flat) not in ALWAYS), flat


SCRATCH = {"segments_tickets", "tickets", "ticket", "digest_running"}
"""Zeros, and zeros again."""
NEVER = {("finish_alone", "limit_coef"), ("lamb_move", "moments_drawn")}
NEVER |= {("quantise", "header_counter"), ("requantise", "header_counter")}
"""What nouns have, and an op does not read."""
ALWAYS = {("advance", name) for name in ("coefficients_groups", "coefficients_group_of", "coefficients_steps")}
ALWAYS |= {("advance", "count_updates"), ("advance", "coefficients_table"), ("rebuild_momentum", "coefficients_table")}
"""What nouns may lack, and an op needs."""


# ---------------------------------------------------------------- registration


@pytest.mark.long(but=1)
@each_op
def test_op_is_registered_cleanly(name):
    for draw in draws(name, 0, 2):
        torch.library.opcheck(getattr(torch.ops.fusedonebit, name).default, draw.make().flat)


@each_op
def test_fake_tensors_pass_through_an_op_untouched(name):
    for draw in draws(name, 0, 4):
        given = draw.make().flat
        with FakeTensorMode() as mode:
            fake = [faked(mode, x) for x in given]
            assert getattr(torch.ops.fusedonebit, name)(*fake) is None
