"""Each Triton kernel equals eager torch, run in Triton's interpreter (or on a GPU)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import DTYPES, SPECIAL, assert_equal_backends, assert_equal_functions, problem, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from op_arguments import made
from optimizers import PAPER, objects
from ranks import run_ranks
from reference_ops import Problem
from scaling_arguments import TO_SCALE, TOLD, scaling_arguments, squares_arguments
from torch import Tensor

from fusedonebit import OneBitAdam, triton_kernels
from fusedonebit.triton_kernels import (
    BLOCK_SIZES,
    TAIL,
    Coef,
    using,
)
from fusedonebit.triton_kernels.finish import Segments
from fusedonebit.triton_kernels.headers import Word, unfolded
from fusedonebit.triton_kernels.nouns import Compensated, Header
from fusedonebit.triton_kernels.op import OPS, launches

pytestmark = pytest.mark.kernels

BFLOAT16 = torch.bfloat16
SIZES = [(1,), (7,), (1023,), (1024,), (1025,), (100_000,), (300, 0, 5, 2048, 129)]
EACH_SIZE = pytest.mark.parametrize(
    "sizes", [pytest.param(s, marks=pytest.mark.full) if max(s) > 10_000 else s for s in SIZES]
)


def block_of(sizes: tuple[int, ...]) -> int:
    """Small blocks make small tensors many blocks; the interpreter takes milliseconds for each."""
    return 1024 if max(sizes) > 10_000 else 128


@pytest.mark.long(but=7, full=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@EACH_SIZE
def test_momentum_compress_equals_eager(sizes, world_size, dtype):
    block = 1024 if world_size < 3 else block_of(sizes)
    for special in (False, True):

        def make(special=special) -> tuple:
            return problem(sizes, world_size, block, dtype, special).momentum_arguments()

        assert_equal_backends("momentum_compress", make)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("inside", [False, True])
def test_preconditioned_momentum_compress_equals_eager(inside):
    def make() -> tuple:
        p = problem(SIZES[-1], 2, 128, special=True)
        return p.momentum_arguments(p.exp_avg_sq, inside)

    assert_equal_backends("momentum_compress", make)


@pytest.mark.long(but=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("preconditioned", "kept"), [(False, torch.float32), (True, torch.float32), (True, BFLOAT16)])
def test_momentum_compress_that_follows_squares_equals_eager(dtype, preconditioned, kept):
    def make() -> tuple:
        p = problem(SIZES[-1], 2, 128, dtype, special=True)
        p.grads[-1].view(-1)[-1:] = 3e19  # too large to count, and its square too large for float32
        own = torch.randn(p.layout.numel, generator=torch.Generator().manual_seed(5)).square()
        own = torch.where(p.table.mask(), own, 0.0).to(kept)
        rounding = torch.tensor(2**33 + 5) if kept is BFLOAT16 else None
        arguments = p.momentum_arguments(p.exp_avg_sq if preconditioned else None)
        return arguments._replace(worker_sq=own, compensated_drawn=rounding)

    assert_equal_backends("momentum_compress", make)


def test_squares_that_are_followed_are_adams_variance_of_what_counts():
    p = problem((700, 300), 2, 128)
    own, g = torch.where(p.table.mask(), 4.0, 0.0), p.flat(p.grads)
    expected = p.column(Coef.BETA2) * own.numpy() + p.column(Coef.ONE_MINUS_BETA2) * g * g
    p.grads[0].view(-1)[5], p.grads[1].view(-1)[7] = float("nan"), 2e19
    expected[[5, p.layout.offset(1) + 7]] = 4.0
    triton_kernels.momentum_compress(*p.momentum_arguments(), own)
    torch.testing.assert_close(own.double(), torch.from_numpy(expected), rtol=3e-7, atol=0)


def test_squares_in_bfloat16_are_rounded_without_bias():
    p, updates = problem((4096,), 1, 1024), 400
    own, exact = torch.ones(p.layout.numel).bfloat16(), torch.ones(p.layout.numel).double()
    for t in range(updates):
        triton_kernels.momentum_compress(*p.momentum_arguments()._replace(compensated_drawn=torch.tensor(t)), own)
        square = p.flat(p.grads).astype(float) ** 2
        exact = exact * float(p.column(Coef.BETA2)[0]) + float(p.column(Coef.ONE_MINUS_BETA2)[0]) * square
    off = (own.double() / exact - 1).numpy()
    error = off.std() / len(off) ** 0.5
    print(f"mean {off.mean():+.5f}, standard error {error:.5f} (limit 5), of one element {off.std():.3f} (limit 0.03)")
    assert abs(off.mean()) <= 5 * error
    assert off.std() <= 0.03


def test_lists_of_several_dtypes_empty_gradients_and_unaligned_ones_equal_eager():
    def make() -> tuple:
        p = problem((2048, 700, 300, 256), 2, 128)
        storage = torch.zeros(2049)
        storage[1:] = p.grads[0]
        p.grads = [storage[1:], p.grads[1].bfloat16(), p.grads[2].half(), torch.empty(0)]
        return p.momentum_arguments()

    assert_equal_backends("momentum_compress", make)


@pytest.mark.long(but=6)
@pytest.mark.parametrize("norm", ["l1", "l2", "contractive"])
@pytest.mark.parametrize("scope", ["global", "layer", "block"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_finish_equals_eager(world_size, scope, norm):
    def make() -> tuple:
        p = problem(SIZES[-1], world_size, 128)
        triton_kernels.momentum_compress(*p.momentum_arguments())
        return p.finish_arguments(scope, norm)

    assert_equal_backends("finish", make)


def test_finish_flags_dropped_elements_as_eager_does():
    def make() -> tuple:
        p = problem(SIZES[-1], 4, 128, special=True)
        triton_kernels.momentum_compress(*p.momentum_arguments())
        assert int(p.found) == 33
        arguments = p.finish_arguments("layer", "l2")
        return arguments._replace(header=arguments.header._replace(pending=p.found))

    assert_equal_backends("finish", make)


@pytest.mark.long(but=6, full=True)
@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@EACH_SIZE
def test_server_reduce_equals_eager(sizes, world_size, skip):
    def make() -> tuple:
        p = problem(sizes, world_size, block_of(sizes), masks={0: torch.arange(sizes[0]) % 3 > 0})
        return p.server_arguments("layer", world_size - 1, skip)

    assert_equal_backends("server_reduce", make)


@pytest.mark.parametrize("counter", [None, 2**31 - 1])
@pytest.mark.parametrize(("flags", "hold"), [(0, 0), (2, 0), (0, 16)])
def test_a_server_whose_scales_are_no_measured_ones_writes_the_header_that_finish_would(flags, hold, counter):
    own = torch.randint(-9, 9, (1, len(Word)), dtype=torch.int32)
    own[0, Word.SIGNAL] = 0  # as it is from the start, and stays
    number, tag = -(2**31), 2**31 - 1
    step = None if counter is None else torch.tensor(counter, dtype=torch.int32)

    def make(*header) -> tuple:
        arguments = problem((3000, 70), 4, 128).server_arguments(skip=flags, hold=hold)
        return made("server_reduce", (*arguments._replace(compensated_numbers=torch.empty(0)), *header))

    def given() -> tuple:
        pending = torch.zeros(1, dtype=torch.int32)
        return own.clone(), Header(number, None if step is None else step.clone(), False, tag, 0, pending)

    assert_equal_backends("server_reduce", lambda: make(*given()))
    alone, together = make(), make(*given())
    triton_kernels.server_reduce(*alone)
    triton_kernels.server_reduce(*together)
    written, nothing = own.clone(), torch.zeros(0, dtype=torch.int64)
    digest = torch.tensor([unfolded(int(alone.arrived_own_words[Word.DIGEST]))])
    triton_kernels.finish(
        *(torch.zeros(2, 6, dtype=torch.float64), Segments.of(nothing, torch.ones(6)), 2),
        *(torch.zeros(6, dtype=torch.int32), torch.ones(1, 6), written),
        *(Header(number, step, False, tag, 0, alone.flags.clone()), digest, torch.tensor([hold]).int()),
    )
    assert torch.equal(together.words, written)
    for one, other in zip(tensors(alone), tensors(together), strict=False):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_server_that_keeps_nothing_equals_eager_and_one_without_residual(world_size):
    def make() -> tuple:
        return problem((3000, 70), world_size, 128).server_arguments()._replace(compensated_numbers=torch.empty(0))

    assert_equal_backends("server_reduce", make)
    without, scale = make(), make().compensated_scale
    kept = make()._replace(compensated=Compensated(torch.zeros(len(scale) * 128), torch.zeros_like(scale)))
    for arguments in (without, kept):
        triton_kernels.server_reduce(*arguments)
    assert torch.equal(without.bits, kept.bits)
    assert torch.equal(without.partials, kept.partials)


@pytest.mark.long(but=3)
@pytest.mark.parametrize("dtype", DTYPES)
@EACH_SIZE
def test_apply_momentum_equals_eager(sizes, dtype):
    for inside in (False, True):
        for skip in (0, 1):
            for preconditioned in (False, True):

                def make(inside=inside, skip=skip, preconditioned=preconditioned) -> tuple:
                    p = problem(sizes, 2, block_of(sizes), dtype)
                    return p.apply_arguments(None if preconditioned else p.exp_avg_sq, inside, skip)

                assert_equal_backends("apply_momentum", make)


@pytest.mark.long(but=2)
@pytest.mark.parametrize("dtype", DTYPES)
@EACH_SIZE
def test_flatten_equals_eager(sizes, dtype):
    for special, unscale in ((False, None), (True, None), (True, torch.tensor(1 / 3))):

        def make(special=special, unscale=unscale) -> tuple:
            p = problem(sizes, 3, block_of(sizes), dtype, special)
            return (p.grads, p.layout.sizes, p.layout.block_size, 1 / 3, unscale, torch.zeros(p.layout.numel + TAIL))

        assert_equal_backends("flatten", make)


@pytest.mark.long(but=2)
@pytest.mark.parametrize("dtype", DTYPES)
@EACH_SIZE
def test_gradient_squares_equal_eager(sizes, dtype):
    for special, *more in ((False,), (True,), *((True, *told) for told in TOLD)):

        def make(special=special, more=more) -> tuple:
            p = problem(sizes, 3, block_of(sizes), dtype, special)
            return squares_arguments(p, *more)

        assert_equal_backends("gradient_squares", make)


@pytest.mark.parametrize("blocks", [1024, 1025, 2500])
def test_gradient_squares_of_several_pieces_equal_eager(blocks):
    assert_equal_backends("gradient_squares", lambda: squares_arguments(problem((128 * blocks,), 1, 128), 4.0, 1.0))


@pytest.mark.parametrize("tensors", [1, 3, 200])
def test_scale_coefficients_equals_eager(tensors):
    for told in TO_SCALE:
        for loss_scale in (None, 1024.0, torch.inf, torch.nan):
            for clips, weighs in ((False, 1), (True, 0), (True, 2)):
                assert_equal_backends(
                    "scale_coefficients",
                    lambda told=told, scale=loss_scale, c=clips, w=weighs: scaling_arguments(
                        told, scale, c, w, tensors
                    ),
                )


@pytest.mark.long(but=["8", "1016"])
@pytest.mark.parametrize("n", [8, 1016, 1024, 1032, 100_000])
def test_pack_and_unpack_equal_eager(n):
    for dtype in DTYPES:
        x = torch.randn(n).to(dtype)
        x[: len(SPECIAL)] = torch.tensor(SPECIAL[:n]).to(dtype)
        assert_equal_functions(lambda x=x: triton_kernels.pack(x))
        bits = triton_kernels.pack(x)
        assert_equal_functions(lambda bits=bits, dtype=dtype: triton_kernels.unpack(bits, dtype))


layouts = st.tuples(
    st.lists(st.integers(0, 400), min_size=1, max_size=5), st.integers(1, 5), st.sampled_from(BLOCK_SIZES)
)


@settings(max_examples=10)
@given(layouts, st.randoms(use_true_random=False))
def test_any_layout_and_mask_equals_eager(layout, random):
    sizes, world_size, block = layout
    masks = {i: torch.rand(n) < 0.7 for i, n in enumerate(sizes) if n and random.random() < 0.4}
    excluded = [i for i in range(len(sizes)) if random.random() < 0.2 and i not in masks]
    ternary = random.random() < 0.5
    for name, arguments in (
        ("momentum_compress", lambda p: p.momentum_arguments()),
        ("server_reduce", lambda p: p.server_arguments("block", world_size - 1)),
        ("apply_momentum", lambda p: p.apply_arguments(p.exp_avg_sq)),
    ):
        assert_equal_backends(
            name,
            lambda a=arguments: a(Problem(sizes, world_size, block, masks=masks, excluded=excluded, ternary=ternary)),
        )

    def warmup() -> tuple:
        p = Problem(sizes, world_size, block, masks=masks)  # nothing is excluded before the freeze
        p.exp_avg_sq.mul_(p.live_mask)
        return p.update_arguments(sums=False)

    assert_equal_backends("adam_update", warmup)


# ---------------------------------------------------------------- whole steps


def train(
    rank: int, world_size: int, backend: str, options: dict[str, object], nan_at: int, small: bool = False
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((7,), (10, 20), (0,), (1,)) if small else ((7,), (33, 40), (1024,), (1,), (0,), (3, 5, 7))
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    generator = torch.Generator().manual_seed(rank)
    with using(backend):
        optimizer = OneBitAdam(params, 1e-2, **objects(freeze_step=10, **options))
        for step in range(30):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (i - 2)
            if step == nan_at and rank == world_size - 1:
                params[1].grad[3, 3] = torch.nan
            optimizer.step()
        stats = optimizer.stats()
        assert ("Triton" in stats["backend"]) == (backend == "triton")
        assert (stats["phase"], stats["skipped_steps"]) == ("compression", 1)
    return [p.detach() for p in params]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(PAPER, marks=pytest.mark.full, id="global"),
        pytest.param(PAPER | {"scale_scope": "layer"}, marks=pytest.mark.full, id="layer"),
        pytest.param({}, id="defaults"),
    ],
)
def test_30_steps_through_the_kernels_give_identical_parameters(options):
    plain, triton = (train(0, 1, backend, options, 20, small=not options) for backend in ("plain", "triton"))
    assert all(torch.equal(a, b) for a, b in zip(plain, triton, strict=True))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
def test_30_steps_through_the_kernels_on_two_ranks_give_identical_parameters():
    (plain, _), (triton, other) = (run_ranks(train, 2, backend, PAPER, 20) for backend in ("plain", "triton"))
    assert all(torch.equal(a, b) for a, b in zip(plain, triton, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(triton, other, strict=True))


class NotRun:
    """Stands in for a kernel whose launch is counted, but which would run for minutes."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments, **constants: None


def do_not_run_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in OPS.values():
        monkeypatch.setattr(op.kernel, "_compiled", NotRun())


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("tensors", "options"), [(3, {}), (302, {}), (3000, {}), (302, PAPER)], ids=["3", "302", "3000", "302, paper"]
)
def test_a_step_of_one_rank_launches_3_kernels_whatever_the_number_of_tensors(tensors, options, monkeypatch):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(tensors)]
    optimizer = OneBitAdam(params, **objects(freeze_step=1, **options))
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    if tensors > 3:
        do_not_run_kernels(monkeypatch)
    with using("triton"):
        launches.clear()
        optimizer.step()
    assert optimizer.phase == "compression"
    print(f"launches with {tensors} tensors: {launches.total()} (limit 3)")
    assert launches.total() == 3


def test_triton_on_cpu_tensors_outside_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"), using("triton"):
        pass
    with pytest.raises(ValueError, match="must be 'triton', 'native' or 'plain', got 'cuda'"), using("cuda"):
        pass
