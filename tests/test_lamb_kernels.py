"""LAMB's Triton kernels equal eager torch, run in Triton's interpreter (or on a GPU)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import DTYPES, SPECIAL, assert_equal_backends, problem
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import PAPER, by_name
from ranks import run_ranks
from reference_ops import RATIO_WAYS, Problem
from test_kernels import EACH_SIZE, SIZES, block_of, do_not_run_kernels
from torch import Tensor

from fusedonebit import Lamb, OneBitLamb
from fusedonebit.triton_kernels import BLOCK_SIZES, Coef, Layer, rules, using
from fusedonebit.triton_kernels.op import launches

pytestmark = pytest.mark.kernels

# Where a program is a layer, W only adds padding.
LAYER_SIZES = [(1,), pytest.param((100_000,), marks=pytest.mark.full), SIZES[-1], (3, 0), (0,)]
WAYS = [(deepspeed, blend) for deepspeed in (False, True) for blend in (False, True)]


def some(sizes: tuple[int, ...], *ways: tuple) -> tuple[tuple, ...]:
    """The first way alone where each takes the interpreter a second."""
    return ways[:1] if max(sizes) > 10_000 else ways


def put_special(tensors: list[Tensor], values: tuple[float, ...] = SPECIAL) -> None:
    """Puts values here and there; where a tensor has room for all, they are there."""
    for tensor in tensors:
        for i, value in enumerate(values[: tensor.numel()]):
            tensor.view(-1)[i * 37 % tensor.numel()] = value


@pytest.mark.long(but=2)
@pytest.mark.parametrize("dtype", DTYPES)
@EACH_SIZE
def test_lamb_update_equals_eager(sizes, dtype):
    for inside, sums, skip in some(sizes, (False, True, 0), (True, False, 0), (False, True, 1)):

        def make(inside=inside, sums=sums, skip=skip) -> tuple:
            p = problem(sizes, 2, block_of(sizes), dtype, masks={0: torch.arange(sizes[0]) % 3 > 0} if sums else None)
            return p.lamb_update_arguments(inside, skip, sums)

        assert_equal_backends("lamb_update", make)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lamb_update_and_move_of_special_numbers_equal_eager(dtype):
    def make(name: str) -> Callable[[], tuple]:
        def arguments() -> tuple:
            p = problem((300, 0, 5, 900, 129), 2, 128, dtype)
            p.exp_avg_sq[::7] = 1e-42
            p.exp_avg_sq[::11] = 0.0
            put_special([p.params[0], p.compensated[512:1024]])
            made = getattr(p, f"{name}_arguments")()
            if name == "lamb_update":
                put_special([made[1][3], made[1][4]])
            return made

        return arguments

    for name in ("lamb_update", "lamb_move"):
        assert_equal_backends(name, make(name))


@pytest.mark.long(but=4)
@pytest.mark.parametrize("deepspeed", [False, True])
@pytest.mark.parametrize("world_size", [1, 5])
@pytest.mark.parametrize("sizes", LAYER_SIZES)
def test_lamb_coefficient_equals_eager(sizes, world_size, deepspeed):
    for case in ("random", "small x", "zero", "skip"):

        def make(case=case) -> tuple:
            p = problem(sizes, world_size, 128)
            if case == "zero":
                p.coef[:, Coef.C_MIN] = 1.5
            arguments = p.lamb_coefficient_arguments(deepspeed, skip=int(case == "skip"))
            norms = arguments.norms
            norms[0] *= {"small x": 1e-3, "zero": 0.0}.get(case, 1.0)
            return arguments

        assert_equal_backends("lamb_coefficient", make)


@pytest.mark.long(but=3)
@pytest.mark.parametrize("dtype", DTYPES)
@EACH_SIZE
def test_lamb_move_equals_eager(sizes, dtype):
    for inside, skip in some(sizes, (True, 0), (False, 0), (False, 1)):

        def make(inside=inside, skip=skip) -> tuple:
            p = problem(sizes, 2, block_of(sizes), dtype, masks={0: torch.arange(sizes[0]) % 3 > 0} if inside else None)
            return p.lamb_move_arguments(inside, skip)

        assert_equal_backends("lamb_move", make)


@pytest.mark.long(but=2, full=True)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@EACH_SIZE
def test_lamb_ratio_equals_eager(sizes, world_size):
    for i, way in enumerate(RATIO_WAYS):
        if (max(sizes) > 1000 and i % 5 != world_size - 1) or (max(sizes) > 10_000 and way[2] and world_size > 2):
            continue  # the interpreter is slow: each way at a few world sizes, and few ways of the largest

        def make(way=way, i=i) -> tuple:
            p = problem(sizes, world_size, block_of(sizes), DTYPES[i % 3])
            return p.lamb_ratio_arguments(*way)

        assert_equal_backends("lamb_ratio", make)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("sizes", [sizes for sizes in SIZES if max(sizes) < 10_000])
def test_lamb_ratio_equals_eager_in_every_way_and_dtype(sizes, world_size, dtype):
    for way in RATIO_WAYS:
        for skip in (0, 1):
            assert_equal_backends(
                "lamb_ratio",
                lambda way=way, skip=skip: problem(sizes, world_size, 128, dtype).lamb_ratio_arguments(*way, skip),
            )


@pytest.mark.long(but=1)
@pytest.mark.parametrize("way", RATIO_WAYS)
def test_lamb_ratio_of_dead_tiny_and_special_numbers_equals_eager(way):
    def make() -> tuple:
        p = problem((300, 0, 5, 900, 129), 3, 128, masks={0: torch.arange(300) % 3 > 0}, excluded=[2])
        p.exp_avg_sq[::7] = 1e-45
        p.exp_avg_sq[::11] = 0.0
        p.exp_avg_scale[2:5] = 0.0  # and the last momentum: the gradient is zero there
        put_special([p.params[0], p.params[3]])
        arguments = p.lamb_ratio_arguments(*way)
        arguments.last.scale[2:5] = 0.0
        arguments.fresh[::3] = 0.0  # 1e-45/0 and 0/0
        arguments.fresh[1::3] *= 1e30
        return arguments

    assert_equal_backends("lamb_ratio", make)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("world_size", [1, 5])
@pytest.mark.parametrize("sizes", LAYER_SIZES)
def test_lamb_rescale_equals_eager(sizes, world_size):
    for deepspeed, blend in WAYS:
        for case in ("random", "free", "infinite", "none"):

            def make(deepspeed=deepspeed, blend=blend, case=case) -> tuple:
                p = problem(sizes, world_size, 128)
                if case == "free":
                    p.coef[:, Coef.R_THRESHOLD] = 100.0
                arguments = p.lamb_rescale_arguments(deepspeed, blend)
                if case in ("infinite", "none"):
                    arguments.largest[::2] = torch.inf if case == "infinite" else 0.0
                if blend and case == "none":
                    arguments.norms[1] = 0.0
                return arguments

            assert_equal_backends("lamb_rescale", make)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("world_size", [1, 5])
@pytest.mark.parametrize("sizes", LAYER_SIZES)
def test_lamb_follow_equals_eager(sizes, world_size):
    for size in (0.0, 1e-3, 1.0, 1e3):

        def make(size=size) -> tuple:
            arguments = problem(sizes, world_size, 128).lamb_follow_arguments()
            arguments.scale.mul_(size)
            arguments.x_squares[::3] = 0.0
            arguments.update_squares[::2] = 0.0
            return arguments

        assert_equal_backends("lamb_follow", make)


def test_a_skipped_lamb_follow_changes_no_bit():
    assert_equal_backends("lamb_follow", lambda: problem(SIZES[-1], 2, 128).lamb_follow_arguments(skip=4))


def test_a_skipped_lamb_rescale_changes_no_bit():
    assert_equal_backends("lamb_rescale", lambda: problem(SIZES[-1], 2, 128).lamb_rescale_arguments(skip=4))


def a_nan_norm(p: Problem) -> tuple:
    arguments = p.lamb_coefficient_arguments()
    arguments.norms[0, 0] = torch.nan
    return arguments


def a_nan_norm_to_blend(p: Problem) -> tuple:
    arguments = p.lamb_rescale_arguments(deepspeed=True, blend=True)
    arguments.norms[1, 0] = torch.nan
    return arguments


def an_infinite_scale(p: Problem) -> tuple:
    arguments = p.lamb_follow_arguments()
    arguments.scale[0] = torch.inf
    return arguments


def an_infinite_variance(p: Problem) -> tuple:
    p.exp_avg_sq[3] = torch.inf
    arguments = p.lamb_ratio_arguments()
    arguments.fresh[3] = torch.inf
    return arguments


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("lamb_coefficient", a_nan_norm),
        ("lamb_rescale", a_nan_norm_to_blend),
        ("lamb_ratio", an_infinite_variance),
        ("lamb_follow", an_infinite_scale),
    ],
)
def test_what_is_no_number_gives_the_same_in_both(name, make):
    assert_equal_backends(name, lambda: make(problem((300, 5), 1, 128)))


layouts = st.tuples(
    st.lists(st.integers(0, 400), min_size=1, max_size=5), st.integers(1, 5), st.sampled_from(BLOCK_SIZES)
)


@settings(max_examples=5)
@given(layouts, st.sampled_from(RATIO_WAYS), st.randoms(use_true_random=False))
def test_any_layout_and_mask_equals_eager(layout, way, random):
    sizes, world_size, block = layout
    masks = {i: torch.rand(n) < 0.7 for i, n in enumerate(sizes) if n and random.random() < 0.4}
    excluded = [i for i in range(len(sizes)) if random.random() < 0.2 and i not in masks]
    deepspeed, blend = way[3:]

    def every(excluded: list[int]) -> Problem:
        return Problem(sizes, world_size, block, masks=masks, excluded=excluded)

    assert_equal_backends("lamb_move", lambda: every(excluded).lamb_move_arguments(way[1]))
    assert_equal_backends("lamb_ratio", lambda: every(excluded).lamb_ratio_arguments(*way))
    assert_equal_backends("lamb_coefficient", lambda: every([]).lamb_coefficient_arguments(deepspeed))
    assert_equal_backends("lamb_rescale", lambda: every([]).lamb_rescale_arguments(deepspeed, blend))
    assert_equal_backends("lamb_follow", lambda: every(excluded).lamb_follow_arguments())
    squares = torch.zeros(every([]).layout.n_blocks)
    assert_equal_backends("apply_momentum", lambda: every(excluded).apply_arguments(x_squares=squares.clone()))

    def warmup() -> tuple:
        p = every([])  # nothing is excluded before the freeze
        p.exp_avg_sq.mul_(p.live_mask)
        arguments = p.lamb_update_arguments(way[1])
        for sums in arguments[-2:]:
            sums.zero_()  # blocks that are all padding are not written
        return arguments

    assert_equal_backends("lamb_update", warmup)


# ---------------------------------------------------------------- whole steps

KINDS: dict[str, tuple[type, dict[str, object]]] = {
    "uncompressed": (by_name(Lamb), {}),
    "adaptive": (by_name(OneBitLamb), PAPER | {"freeze_step": 10}),
    "frozen": (by_name(OneBitLamb), PAPER | {"freeze_step": 10, "adaptive": False, "scale_scope": "layer"}),
    "deepspeed": (by_name(OneBitLamb), PAPER | {"freeze_step": 10, "variant": "deepspeed", "scale_scope": "layer"}),
    "defaults": (by_name(OneBitLamb), {"freeze_step": 10}),
    "preconditioned": (by_name(OneBitLamb), {"freeze_step": 10, "precondition": True}),
}


def train(rank: int, world_size: int, backend: str, kind: str) -> tuple[list[Tensor], dict]:
    torch.manual_seed(0)
    shapes = ((7,), (10, 20), (0,), (1,))
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    generator = torch.Generator().manual_seed(rank)
    make, options = KINDS[kind]
    with using(backend):
        optimizer = make(params, 1e-2, **options)
        for step in range(30):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (i - 2)
            if step == 20 and rank == world_size - 1:
                params[1].grad[3, 3] = torch.nan
            optimizer.step()
        stats = optimizer.stats(layers=True)
    assert ("Triton" in stats["backend"]) == (backend == "triton")
    partly = kind == "uncompressed" and world_size == 1  # one element alone stays
    assert (stats["step"], stats["skipped_steps"], stats["partial_steps"]) == ((30, 0, 1) if partly else (29, 1, 0))
    assert stats["phase"] == ("uncompressed" if kind == "uncompressed" else "compression")
    return [p.detach() for p in params], stats["layers"]


OF_A_RANK = "residual_over_momentum"  # each rank's own, of two float64 sums, which each backend adds in its own order


def assert_same(layers: dict, others: dict, same_rank: bool = True) -> None:
    if same_rank:
        assert layers.get(OF_A_RANK, []) == pytest.approx(others.get(OF_A_RANK, []), rel=1e-14)
    assert {k: v for k, v in layers.items() if k != OF_A_RANK} == {k: v for k, v in others.items() if k != OF_A_RANK}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("defaults", "adaptive") else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS],
)
def test_30_steps_through_the_kernels_give_identical_parameters(kind):
    (plain, layers), (triton, same_layers) = train(0, 1, "plain", kind), train(0, 1, "triton", kind)
    assert all(torch.equal(a, b) for a, b in zip(plain, triton, strict=True))
    assert_same(layers, same_layers)
    if kind in ("adaptive", "deepspeed", "preconditioned"):
        assert any(r != 1 for r in layers["ratio"])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
def test_30_steps_through_the_kernels_on_two_ranks_give_identical_parameters():
    plain, triton = (run_ranks(train, 2, backend, "adaptive") for backend in ("plain", "triton"))
    for rank in range(2):
        for runs, same_rank in (((plain[rank], triton[rank]), True), ((triton[0], triton[rank]), rank == 0)):
            (params, layers), (others, other_layers) = runs
            assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
            assert_same(layers, other_layers, same_rank)


COMPRESSED = {"momentum_compress": 1, "finish_alone": 1, "apply_momentum": 1}
LAUNCHES = {
    "uncompressed": {"lamb_update": 1, "lamb_coefficient": 1, "lamb_move": 1, "advance": 1},
    "adaptive": COMPRESSED | {"lamb_ratio": 1, "lamb_rescale": 1},
    "deepspeed": COMPRESSED | {"lamb_ratio": 1, "lamb_rescale": 1},
    "defaults": COMPRESSED | {"lamb_ratio": 1, "lamb_rescale": 1},
    "preconditioned": COMPRESSED | {"lamb_ratio": 1, "lamb_rescale": 1},
    "frozen": COMPRESSED,
}


@pytest.mark.long(but=2)
@pytest.mark.parametrize("tensors", [3, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_launches_the_same_few_kernels_whatever_the_number_of_tensors(kind, tensors, monkeypatch):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(tensors)]
    make, options = KINDS[kind]
    optimizer = make(params, **(options | {"freeze_step": 1} if options else {}))
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    if tensors > 3:
        do_not_run_kernels(monkeypatch)
    with using("triton"):
        launches.clear()
        optimizer.step()
    assert optimizer.phase == ("compression" if options else "uncompressed")
    limit = sum(LAUNCHES[kind].values())
    print(f"launches of {kind} LAMB with {tensors} tensors: {launches.total()} (limit {limit})")
    assert launches == LAUNCHES[kind]


def test_the_kernels_read_rows_and_columns_where_the_host_writes_them():
    for names, constants in ((Coef, len(Coef)), (Layer, len(Layer))):
        for name in names:
            assert getattr(rules, name.name) == name < constants
    assert len(Coef) == rules.COLUMNS
