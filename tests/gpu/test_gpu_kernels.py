"""Each Triton kernel on CUDA tensors against eager torch on the same tensors.

Everything must be equal in every bit, with one exception. Additions, products, quotients and roots
are rounded correctly on both sides (``div.rn``, ``sqrt.rn``, no contraction, no flushing of
denormals), in the same order. Only the float64 partial sums are added in another order: they may
differ by 1e-14, and the float32 scales made of them are equal again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from backends import DTYPES, SPECIAL, assert_equal_backends, assert_equal_functions, problem
from marsit_arguments import LIMITS, add_arguments, local_arguments, merge_arguments, owned_arguments, placed_arguments
from op_arguments import arguments_of, made
from scaling_arguments import TO_SCALE, TOLD, scaling_arguments, squares_arguments
from torch import Tensor
from zero_one_arguments import WAYS, lion_arguments, local_step_arguments, rebuild_arguments

from fusedonebit import triton_kernels
from fusedonebit.triton_kernels import TAIL, FlatLayout, using
from fusedonebit.triton_kernels.marsit_signs import threshold_of

SMALL = [(1,), (7,), (1023,), (1024,), (1025,), (300, 0, 5, 2048, 129)]
LARGE = [(100_000,), (3_000_001, 40, 1_000_000)]
SIZES = SMALL + LARGE
WORLD_SIZES = [1, 2, 3, 4, 5]
# (started, eps_inside_sqrt, preconditioned, deepspeed, blend, skip)
RATIO_WAYS = [
    (0, False, False, False, False, 0),
    (1, False, False, False, False, 0),
    (0, False, False, True, True, 0),
    (1, True, False, True, True, 0),
    (1, False, False, False, True, 0),
    (1, False, False, True, True, 1),
    (0, False, True, False, False, 0),
    (1, False, True, False, True, 0),
    (1, True, True, True, False, 0),
]


def to(device: torch.device, argument: Any) -> Any:
    if isinstance(argument, list):
        return [to(device, a) for a in argument]
    if hasattr(argument, "_fields"):
        return argument._make(to(device, a) for a in argument)
    return argument.to(device, copy=True) if isinstance(argument, Tensor) else argument


@pytest.fixture
def check(device: torch.device, small_only: bool) -> Callable[[str, tuple[int, ...], Callable[[], tuple]], None]:
    """Compares an op's backends on what ``make`` returns, moved to the device."""

    def check(name: str, sizes: tuple[int, ...], make: Callable[[], tuple]) -> None:
        if small_only and sizes not in SMALL:
            pytest.skip("dry run: too large for the interpreter")
        arguments = make()
        assert_equal_backends(name, lambda: tuple(to(device, a) for a in arguments))

    return check


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sizes", SIZES)
def test_momentum_compress_equals_eager(check, sizes, world_size, dtype):
    block = 1024 if world_size < 3 else 128
    for special in (False, True):
        check("momentum_compress", sizes, problem(sizes, world_size, block, dtype, special).momentum_arguments)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_preconditioned_momentum_compress_equals_eager(check, sizes, inside):
    p = problem(sizes, 2, 128, special=True)
    p.exp_avg_sq[::7] = 1e-42  # denormal
    check("momentum_compress", sizes, lambda: p.momentum_arguments(p.exp_avg_sq, inside))


def test_mixed_empty_and_unaligned_gradients_equal_eager(device):
    def make() -> tuple:
        p = problem((2048, 700, 300, 256), 2, 128)
        arguments = made("momentum_compress", [to(device, a) for a in p.momentum_arguments()])
        storage = torch.zeros(2049, device=device)
        storage[1:] = arguments.grads[0]
        second, third = arguments.grads[1:3]
        return arguments._replace(grads=[storage[1:], second.bfloat16(), third.half(), torch.empty(0, device=device)])

    assert_equal_backends("momentum_compress", make)


@pytest.mark.parametrize("norm", ["l1", "l2", "contractive"])
@pytest.mark.parametrize("scope", ["global", "layer", "block"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sizes", [SMALL[-1], *LARGE])
def test_finish_equals_eager(check, sizes, world_size, scope, norm):
    for special in (False, True):
        p = problem(sizes, world_size, 128, special=special)
        with using("plain"):
            triton_kernels.momentum_compress(*p.momentum_arguments())
        check("finish", sizes, lambda p=p: p.finish_arguments(scope, norm))


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sizes", SIZES)
def test_server_reduce_equals_eager(check, sizes, world_size, skip):
    p = problem(sizes, world_size, 128, masks={0: torch.arange(sizes[0]) % 3 > 0})
    check("server_reduce", sizes, lambda: p.server_arguments("layer", world_size - 1, skip))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sizes", SIZES)
def test_apply_momentum_equals_eager(check, sizes, world_size, dtype):
    p = problem(sizes, world_size, 128, dtype)
    p.exp_avg_sq[::7] = 1e-42
    for inside in (False, True):
        for skip in (0, 1):
            for v in (p.exp_avg_sq, None):
                check("apply_momentum", sizes, lambda v=v, i=inside, s=skip: p.apply_arguments(v, i, s))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("sizes", SIZES)
def test_ternary_kernels_equal_eager(check, sizes, world_size, dtype):
    for special in (False, True):
        masks = {0: torch.arange(sizes[0]) % 3 > 0} if special else None
        p = problem(sizes, world_size, 128, dtype, special, masks=masks, ternary=True)
        check("momentum_compress", sizes, p.momentum_arguments)
        check("server_reduce", sizes, lambda p=p: p.server_arguments("layer", world_size - 1))
        check("apply_momentum", sizes, lambda p=p: p.apply_arguments(p.exp_avg_sq))
        check("lamb_ratio", sizes, lambda p=p, blend=special: p.lamb_ratio_arguments(1, False, False, blend, blend))
        with using("plain"):
            triton_kernels.momentum_compress(*p.momentum_arguments())
        check("finish", sizes, lambda p=p: p.finish_arguments("layer", "contractive"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_adam_update_equals_eager(check, sizes, dtype):
    for skip in (0, 1):
        for sums in (False, True):
            arguments = problem(sizes, 2, 128, dtype).update_arguments(skip, sums)
            if sums:
                arguments.exp_avg_sq_sums.zero_()  # blocks that are all padding are not written
            check("adam_update", sizes, lambda a=arguments: a)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_lamb_update_and_move_equal_eager(check, sizes, dtype):
    for inside, skip, sums in ((False, 0, True), (True, 0, False), (True, 1, True)):
        p = problem(sizes, 2, 128, dtype, masks={0: torch.arange(sizes[0]) % 3 > 0} if inside else None)
        p.exp_avg_sq[::7] = 1e-42
        p.exp_avg_sq[::11] = 0.0
        arguments = p.lamb_update_arguments(inside, skip, sums)
        check("lamb_update", sizes, lambda a=arguments: a)  # norms of padding are not written: NaN on both sides
        check("lamb_move", sizes, lambda p=p, i=inside, s=skip: p.lamb_move_arguments(i, s))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_stochastic_rounding_equals_that_of_eager(check, sizes, mixed):
    step = torch.tensor(12_345)
    p = problem(sizes, 2, 128, torch.bfloat16, masks={0: torch.arange(sizes[0]) % 3 > 0})
    p.exp_avg_sq.mul_(p.live_mask)
    if mixed:
        p.params = [x.to(DTYPES[i % 3]) for i, x in enumerate(p.params)]
    check("apply_momentum", sizes, lambda: p.apply_arguments(p.exp_avg_sq, rounding=step))
    check("lamb_move", sizes, lambda: p.lamb_move_arguments(rounding=step))
    arguments = p.update_arguments(sums=False, rounding=step)
    check("adam_update", sizes, lambda: arguments)


@pytest.mark.parametrize("kept", [torch.int8, torch.int16])
@pytest.mark.parametrize("sizes", SIZES)
def test_masters_of_which_corrections_are_kept_move_as_in_eager(check, sizes, kept):
    step = torch.tensor(12_345) if kept is torch.int8 else None
    p = problem(sizes, 2, 128, torch.bfloat16, masks={0: torch.arange(sizes[0]) % 3 > 0})
    p.exp_avg_sq.mul_(p.live_mask)
    correction = torch.randint(-128, 128, (p.layout.numel,), dtype=kept)
    given = {
        "apply_momentum": p.apply_arguments(p.exp_avg_sq, rounding=step),
        "adam_update": p.update_arguments(sums=False, rounding=step),
    }
    for name, arguments in given.items():
        check(name, sizes, partial(arguments_of, name, *arguments, correction=correction))


@pytest.mark.parametrize("deepspeed", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sizes", [*SIZES, (0, 3), (3, 0)])
def test_lamb_coefficient_equals_eager(device, sizes, world_size, deepspeed):
    for zero in (False, True):
        for skip in (0, 1):
            arguments = problem(sizes, world_size, 128).lamb_coefficient_arguments(deepspeed, skip)
            if zero:
                arguments.norms[0, ::2] = 0.0
            assert_equal_backends("lamb_coefficient", lambda a=arguments: tuple(to(device, x) for x in a))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sizes", SIZES)
def test_lamb_ratio_equals_eager(check, sizes, world_size, dtype):
    for started, inside, preconditioned, deepspeed, blend, skip in RATIO_WAYS:
        p = problem(sizes, world_size, 128, dtype, masks={0: torch.arange(sizes[0]) % 3 > 0} if blend else None)
        p.exp_avg_sq[::7] = 1e-42
        p.exp_avg_sq[::11] = 0.0
        arguments = p.lamb_ratio_arguments(started, inside, preconditioned, deepspeed, blend, skip)
        arguments.exp_avg.scale[::3] = arguments.last.scale[::3] = 0.0  # no momentum, then none again: no gradient,
        arguments.fresh[::5] = 0.0  # so that some variances are 0, and some ratios infinite
        check("lamb_ratio", sizes, lambda a=arguments: a)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sizes", [*SIZES, (0, 3), (3, 0)])
def test_lamb_rescale_equals_eager(device, sizes, world_size):
    for deepspeed, blend, skip in (
        (False, False, 0),
        (True, True, 0),
        (True, False, 0),
        (False, True, 0),
        (True, True, 1),
    ):
        for found in (None, 0.0, torch.inf):
            arguments = problem(sizes, world_size, 128).lamb_rescale_arguments(deepspeed, blend, skip)
            if found is not None:
                arguments.largest[::2] = found
            assert_equal_backends("lamb_rescale", lambda a=arguments: tuple(to(device, x) for x in a))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sizes", SIZES)
def test_local_update_equals_eager(check, sizes, world_size, dtype):
    for kind in ("plain", "sgd", "adam"):
        for moves, limit in zip((False, True, False), LIMITS, strict=True):
            masks = {0: torch.arange(sizes[0]) % 3 > 0} if moves else None
            p = problem(sizes, world_size, 128, dtype, special=limit > 0, masks=masks)
            p.exp_avg_sq[::7] = 1e-42  # denormal
            check("local_update", sizes, lambda p=p, k=kind, m=moves, c=limit: local_arguments(p, k, m, m, limit=c))


@pytest.mark.parametrize("threshold", [*map(threshold_of, range(2, 10)), 1, (1 << 32) - 1])
@pytest.mark.parametrize("chunk", [128, 16_512, 5_000_064])
def test_merge_signs_equals_eager(device, small_only, chunk, threshold):
    if small_only and chunk > 100_000:
        pytest.skip("dry run: too large for the interpreter")
    for rows in (1, 3):
        layout = FlatLayout((rows * chunk,), rows, 128)
        assert_equal_backends("merge_signs", lambda n=rows, x=layout: merge_arguments(x, n, threshold, device=device))


@pytest.mark.parametrize("world_size", [*WORLD_SIZES, 8])
@pytest.mark.parametrize("sizes", [(1,), (100_000,), (5_000_000,)])
def test_owners_kernels_equal_eager(device, small_only, sizes, world_size):
    if small_only and sizes != (1,):
        pytest.skip("dry run: too large for the interpreter")
    layout = FlatLayout(sizes, world_size, 128)
    picked, placed = owned_arguments(layout, world_size - 1), placed_arguments(layout)
    assert_equal_backends("pick_owned", lambda: tuple(to(device, a) for a in picked))
    assert_equal_backends("place_owned", lambda: tuple(to(device, a) for a in placed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_add_values_equals_eager(check, sizes, dtype):
    for replaces, skip in ((False, 0), (True, 0), (False, 1)):
        p = problem(sizes, 2, 128, dtype, masks={0: torch.arange(sizes[0]) % 3 > 0} if replaces else None)
        check("add_values", sizes, lambda p=p, r=replaces, s=skip: add_arguments(p, r, s))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", SIZES)
def test_local_step_equals_eager(check, sizes, way, dtype):
    for hold, inside in ((0, False), (0, True), (1, False)):
        p = problem(sizes, 2, 128, dtype, special=True, masks={0: torch.arange(sizes[0]) % 3 > 0} if inside else None)
        p.exp_avg_sq[::7] = 1e-42  # denormal
        p.exp_avg_sq[::11] = 0.0
        check("local_step", sizes, lambda p=p, i=inside, h=hold: local_step_arguments(p, way, i, h))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sizes", SIZES)
def test_rebuild_momentum_equals_eager(check, sizes, world_size):
    for precondition, inside in ((False, False), (True, False), (True, True)):
        p = problem(sizes, world_size, 128, masks={0: torch.arange(sizes[0]) % 3 > 0} if inside else None)
        p.exp_avg_sq[::7] = 1e-42
        check("rebuild_momentum", sizes, lambda p=p, c=precondition, i=inside: rebuild_arguments(p, c, i))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sizes", SIZES)
def test_lion_compress_equals_eager(check, sizes, world_size, dtype):
    for special, hold in ((False, 0), (True, 0), (True, 1)):
        masks = {0: torch.arange(sizes[0]) % 3 > 0} if special else None
        p = problem(sizes, world_size, 128, dtype, special, masks=masks)
        check("lion_compress", sizes, lambda p=p, h=hold: lion_arguments(p, 12_345, h))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_flatten_equals_eager(check, sizes, dtype):
    for special in (False, True):
        p = problem(sizes, 3, 128, dtype, special)
        out = torch.zeros(p.layout.numel + TAIL)
        check("flatten", sizes, lambda p=p, out=out: (p.grads, p.layout.sizes, 128, 1 / 3, None, out))
        for told in ((), *TOLD):
            check("gradient_squares", sizes, lambda p=p, t=told: squares_arguments(p, *t))


@pytest.mark.parametrize("tensors", [1, 3, 200])
def test_scale_coefficients_equals_eager(check, tensors):
    for told in TO_SCALE:
        for loss_scale in (None, 1024.0):
            for clips, weighs in ((False, 1), (True, 0), (True, 2)):
                how = (told, loss_scale, clips, weighs, tensors)
                check("scale_coefficients", (tensors,), lambda how=how: scaling_arguments(*how))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [8, 1016, 1024, 1032, 100_000, 5_000_008])
def test_pack_and_unpack_equal_eager(device, small_only, n, dtype):
    if small_only and n > 100_000:
        pytest.skip("dry run: too large for the interpreter")
    x = torch.randn(n).to(dtype)
    x[: len(SPECIAL)] = torch.tensor(SPECIAL[:n]).to(dtype)
    x = x.to(device)
    assert_equal_functions(lambda: triton_kernels.pack(x))
    bits = triton_kernels.pack(x)
    assert torch.equal(triton_kernels.unpack(bits, dtype) > 0, x >= 0)
    assert_equal_functions(lambda: triton_kernels.unpack(bits, dtype))


@pytest.mark.parametrize(
    "name", ["momentum_compress", "server_reduce", "lamb_update", "lamb_ratio", "lamb_coefficient"]
)
def test_the_same_inputs_give_the_same_bits_every_time(device, small_only, name):
    sizes = SMALL[-1] if small_only else LARGE[-1]
    p = problem(sizes, 4, 128)
    made = {"momentum_compress": "momentum", "server_reduce": "server"}.get(name, name)
    arguments = getattr(p, f"{made}_arguments")()
    for t in arguments:
        if isinstance(t, Tensor) and t.dtype is torch.float64:
            t.nan_to_num_(1.0)  # what padding keeps must equal itself
    outcomes = []
    for _ in range(3):
        on_device = [to(device, a) for a in arguments]
        with using("triton"):
            getattr(triton_kernels, name)(*on_device)
        outcomes.append([t.cpu() for t in on_device if isinstance(t, Tensor)])
    for again in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], again, strict=True))
