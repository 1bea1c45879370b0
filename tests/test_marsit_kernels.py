"""Marsit's kernels equal eager torch bit for bit; Bernoulli draws have exactly their probability."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from backends import DTYPES, assert_equal_backends, problem
from hypothesis import given, settings
from hypothesis import strategies as st
from marsit_arguments import LIMITS, add_arguments, local_arguments, merge_arguments, owned_arguments, placed_arguments
from optimizers import by_name
from reference_ops import Problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedonebit import MarsitAdam, MarsitSGD, triton_kernels
from fusedonebit.comm import SimulatedGroup, SimulatedTransport
from fusedonebit.triton_kernels import BLOCK_SIZES, FlatLayout, merge_signs, pick_owned, using
from fusedonebit.triton_kernels.block_io import NONFINITE
from fusedonebit.triton_kernels.headers import CHECKED, Flag, Word, folded
from fusedonebit.triton_kernels.marsit_signs import bernoulli, threshold_of

pytestmark = pytest.mark.kernels

KINDS = ("plain", "sgd", "adam")
SIZES = [(1,), (7,), (1023,), (1024,), (1025,), (20_000,), (300, 0, 5, 2048, 129)]
THRESHOLDS = [*map(threshold_of, range(2, 10)), 1, 3 << 30, (1 << 31) - 1, (1 << 31) + 1, (1 << 32) - 1]
BOTH = pytest.mark.parametrize("backend", ["plain", "triton"])


def block_of(sizes: tuple[int, ...]) -> int:
    """Small blocks make small tensors many blocks; the interpreter takes milliseconds for each."""
    return 1024 if max(sizes) > 10_000 else 128


# ---------------------------------------------------------------- the local update


@pytest.mark.long(but=1, full=True)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("sizes", SIZES)
def test_local_update_equals_eager(sizes, world_size):
    ways = itertools.product((False, True), (False, True), LIMITS)
    for i, (kind, (decays, moves, limit)) in enumerate(itertools.product(KINDS, ways)):
        if i % 15 != 3 * world_size - 1 - len(sizes) // 2:  # each world size has others, in each dtype
            continue

        def make(k=i // 15, way=(kind, decays, moves, 0, limit), begins=i % 2 == 1) -> tuple:
            p = problem(sizes, world_size, block_of(sizes), DTYPES[k % 3], k % 2 == 1)
            return local_arguments(p, *way, begins=begins)

        assert_equal_backends("local_update", make)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("kind", "dtype"), list(zip(KINDS, DTYPES, strict=True)))
def test_local_update_of_bad_gradients_equals_eager_and_tells_the_chunk(kind, dtype):
    for hold in (0, 1):

        def make(hold=hold) -> tuple:
            p = problem((300, 0, 5, 600, 129), 3, 128, dtype)
            p.grads[0][100], p.grads[0][101], p.grads[0][102] = torch.nan, torch.inf, -torch.inf
            return local_arguments(p, kind, decays=True, hold=hold)

        assert_equal_backends("local_update", make)
        arguments = make()
        with using("triton"):
            triton_kernels.local_update(*arguments)
        found = 0 if hold else NONFINITE
        assert arguments.header.words[:, Word.FLAGS].tolist() == [found | Flag.ABORT, *[Flag.ABORT] * 2]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("kind", KINDS)
def test_held_or_bad_elements_only_lose_what_the_last_round_has_taken_and_keep_their_moments(kind):
    p = problem((1000,), 1, 128)
    p.grads[0][::3] = torch.nan
    for hold in (0, 1):
        arguments = local_arguments(p, kind, hold=hold)
        kept = (arguments.exp_avg, arguments.exp_avg_sq, arguments.compensated.numbers)
        before = [None if t is None else t.clone() for t in kept]
        bits, scale = arguments.bits.clone(), arguments.compensated.scale.clone()
        with using("triton"):
            triton_kernels.local_update(*arguments)
        still = torch.arange(1000) % 3 == 0 if hold == 0 else torch.ones(1000, dtype=torch.bool)
        for old, new in zip(before[:2], (arguments.exp_avg, arguments.exp_avg_sq), strict=True):
            assert old is None or torch.equal(old[:1000][still], new[:1000][still])
        signs = torch.where((bits[0][:, None] >> torch.arange(8)) & 1 > 0, 1.0, -1.0).view(-1)
        kept = before[2] - signs * scale.repeat_interleave(128)
        assert torch.equal(arguments.compensated.numbers[:1000][still], kept[:1000][still])


@pytest.mark.long(but=1)
@pytest.mark.parametrize("kind", KINDS)
def test_local_update_of_some_chunks_equals_eager_and_leaves_the_others(kind):
    for first, last in ((0, 1), (1, 3), (3, 4), (2, 2)):

        def make(chunks=slice(first, last)) -> tuple:
            return local_arguments(problem((300, 0, 5, 2048, 129), 4, 128), kind, chunks=chunks)

        if first < last:
            assert_equal_backends("local_update", make)
        before, after = make(), make()
        triton_kernels.local_update(*after)
        changed = (before.compensated.numbers != after.compensated.numbers).view(4, -1).any(1)
        assert changed.tolist() == [first <= chunk < last for chunk in range(4)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("moves", [False, True])
def test_local_update_writes_the_headers_of_its_chunks_unless_it_moves(moves, shared):
    def make() -> tuple:
        p = problem((300, 0, 5, 2048, 129), 4, 128)
        p.grads[3][:] = torch.nan
        arguments = local_arguments(p, moves=moves, chunks=slice(1, 4), share=0.25)
        arguments.header.words[:, Word.SIGNAL] = 7
        return arguments._replace(header_words=arguments.header.words[:1].expand(4, -1)) if shared else arguments

    assert_equal_backends("local_update", make)
    before, arguments = make(), make()
    triton_kernels.local_update(*arguments)
    words, number, tag, told, digest = arguments.header
    expected = before.header.words.clone()
    if not moves:
        expected[slice(0 if shared else 1, None), [Word.STEP, Word.DIGEST, Word.TAG, Word.SIGNAL]] = torch.tensor(
            [number, int(folded(digest)), tag, 0], dtype=torch.int32
        )
    bad = torch.tensor([shared, True, True, True]) * NONFINITE  # the blocks of tensor 3 reach from chunk 0 to 3
    bad[0] = NONFINITE * shared
    sent = torch.tensor([shared, True, True, True]) * told * (not moves)
    expected[:, Word.FLAGS] = (bad | sent).int()
    assert torch.equal(words, expected)
    blocks = len(arguments.compensated.scale) // 4
    assert not arguments.compensated.scale[blocks:].any()
    assert arguments.compensated.limit[blocks:].isinf().all()
    assert torch.equal(arguments.compensated.scale[:blocks], before.compensated.scale[:blocks])


def test_mixed_dtypes_empty_gradients_and_unaligned_parameters_equal_eager():
    for kind, (moves, begins) in itertools.product(KINDS, ((False, False), (True, False), (True, True))):

        def make(kind=kind, moves=moves, begins=begins) -> tuple:
            p = problem((1024, 300, 130, 256), 2, 128)
            storage = torch.zeros(1025)
            storage[1:] = p.params[0]
            p.params = [storage[1:], p.params[1].bfloat16(), p.params[2].half(), p.params[3]]
            p.grads = [p.grads[0].half(), p.grads[1].bfloat16(), p.grads[2], torch.empty(0)]
            return local_arguments(p, kind, decays=True, moves=moves, begins=begins)

        assert_equal_backends("local_update", make)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_count_has_no_compensation_does_not_move_and_may_have_bad_gradients(kind, moves):
    mask = torch.arange(700) % 3 > 0
    p = Problem((700, 300), 2, 128, masks={0: mask})
    p.grads[0][~mask] = torch.nan
    before = [x.clone() for x in p.params]
    arguments = local_arguments(p, kind, decays=True, moves=moves, begins=True)
    for backend in ("plain", "triton"):
        now = [x.clone() for x in p.params]
        with using(backend):
            triton_kernels.local_update(*arguments)
        assert not p.compensated[~p.live_mask].any()
        assert torch.equal(p.params[0][~mask], before[0][~mask])
        assert not (arguments.header.words[:, Word.FLAGS] & NONFINITE).any()
        assert all(t is None or t.isfinite().all() for t in (arguments.exp_avg, arguments.exp_avg_sq))
    if moves:
        for i in range(len(before)):
            start = p.layout.offset(i)
            assert torch.equal(arguments.step.anchor[start : start + len(before[i])], now[i])
    assert p.compensated[p.live_mask].all()
    assert (not torch.equal(p.params[0], before[0])) == moves


@st.composite
def local_updates(draw: st.DrawFn) -> tuple:
    sizes = draw(st.lists(st.integers(0, 400), min_size=1, max_size=4))
    masked = [i for i, n in enumerate(sizes) if n and draw(st.booleans())]
    world_size, block = draw(st.integers(1, 5)), draw(st.sampled_from(BLOCK_SIZES))
    first = draw(st.integers(0, world_size - 1))
    chunks = slice(first, draw(st.integers(first + 1, world_size)))
    options = {"kind": draw(st.sampled_from(KINDS)), "limit": draw(st.sampled_from(LIMITS)), "chunks": chunks}
    options |= {name: draw(st.booleans()) for name in ("decays", "moves", "begins")} | {"hold": draw(st.integers(0, 1))}
    return sizes, world_size, block, masked, draw(st.sampled_from(DTYPES)), draw(st.booleans()), options


@settings(max_examples=8)
@given(local_updates())
def test_local_update_of_any_layout_and_mask_equals_eager(drawn):
    sizes, world_size, block, masked, dtype, special, options = drawn

    def make() -> tuple:
        masks = {i: torch.arange(sizes[i]) % 5 > 1 for i in masked}
        return local_arguments(problem(sizes, world_size, block, dtype, special, masks=masks), **options)

    assert_equal_backends("local_update", make)


# ---------------------------------------------------------------- the operator on packed bits

# Elements of a chunk: 4 words; 12; all of one program and 4 of a second; as many as two programs have; and
# more than eager works on at a time.
CHUNKS = [128, 384, 16_512, 32_768, 70_400]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_merge_signs_equals_eager_for_any_threshold(threshold):
    layout = FlatLayout((2 * 384,), 2, 128)
    for rows, seed in ((1, 0), (1, 1), (2, 2**31 - 1)):
        assert_equal_backends("merge_signs", lambda r=rows, s=seed: merge_arguments(layout, r, threshold, s))


@pytest.mark.long(but=1)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_merge_signs_equals_eager_at_any_length(chunk, rows):
    layout = FlatLayout((rows * chunk,), rows, 128)
    for offset in (0, 2):
        assert_equal_backends("merge_signs", lambda o=offset: merge_arguments(layout, rows, threshold_of(3), offset=o))


def test_headers_need_not_lie_in_messages():
    def make() -> tuple:
        own, arrived, threshold, seed, words, theirs, *rest = merge_arguments(FlatLayout((768,), 2, 128), 2, 1 << 31)
        return own, arrived, threshold, seed, words.clone(), theirs.clone(), *rest

    assert_equal_backends("merge_signs", make)


@BOTH
def test_bits_that_agree_stay_and_others_become_one_of_the_two(backend):
    own, arrived, *rest = merge_arguments(FlatLayout((16_512,), 1, 128), 1, threshold_of(2))
    before = own.clone()
    with using(backend):
        merge_signs(own, arrived, *rest)
    assert torch.equal((own ^ before) & ~(before ^ arrived), torch.zeros_like(own))
    taken, differ = (sum(((x >> k) & 1).sum() for k in range(8)) for x in (own ^ before, before ^ arrived))
    assert 0.4 < taken / differ < 0.6


@BOTH
def test_a_merge_unites_flags_and_notes_which_checked_word_differs(backend):
    layout = FlatLayout((768,), 2, 128)
    own, arrived, threshold, seed, words, theirs, *_ = merge_arguments(layout, 2, threshold_of(2), offset=0)
    for word in range(8):
        words[:] = theirs[:] = torch.arange(8, dtype=torch.int32) * 1000
        words[:, Word.FLAGS], theirs[:, Word.FLAGS] = int(Flag.ABORT), int(Flag.NONFINITE)
        words[:, Word.SIGNAL], theirs[:, Word.SIGNAL] = 0b100000, 0b1000000
        if word not in (Word.FLAGS, Word.SIGNAL):
            theirs[1, word] += 1
        sent, expected = theirs.clone(), words.clone()
        expected[:, Word.FLAGS] = int(Flag.ABORT | Flag.NONFINITE)
        expected[:, Word.SIGNAL] = 0b1100000
        if word < CHECKED:
            expected[1, Word.FLAGS] |= int(Flag.MISMATCH)
            expected[1, Word.SIGNAL] |= 1 << word
        with using(backend):
            merge_signs(own, arrived, threshold, seed, words, theirs, CHECKED, Word.FLAGS, Flag.MISMATCH)
        assert torch.equal(words, expected)
        assert torch.equal(theirs, sent)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("chunk", [384, 16_512])
def test_pick_owned_and_place_owned_equal_eager(chunk, world_size):
    layout = FlatLayout((world_size * chunk,), world_size, 128)
    rank, seed = (0, 5) if chunk == 384 else (world_size - 1, 2**31 - 1)
    assert_equal_backends("pick_owned", lambda: owned_arguments(layout, rank, seed))
    assert_equal_backends("place_owned", lambda: placed_arguments(layout))


@pytest.mark.long(but=1)
@BOTH
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_place_has_one_owner_whoever_asks(backend, world_size):
    layout = FlatLayout((world_size * 384,), world_size, 128)
    planes = []
    for rank in range(world_size):
        bits, *rest, owners, picked = owned_arguments(layout, rank)
        with using(backend):
            pick_owned(bits, *rest, owners, picked)
        planes.append(owners)
        parts = [bits[(rank - shift) % world_size] & owners[shift] for shift in range(world_size)]
        assert torch.equal(picked[0], torch.stack(parts).sum(0).to(torch.uint8))
    assert torch.equal(planes[0].int().sum(0), torch.full((layout.chunk_bytes,), 0xFF))
    assert all(torch.equal(planes[0], other) for other in planes)


@pytest.mark.long(but=2)
@pytest.mark.parametrize("dtype", [*DTYPES, None])
@pytest.mark.parametrize("sizes", SIZES)
def test_add_values_equals_eager(sizes, dtype):
    for replaces, skip in ((False, 0), (True, 0), (False, 1)):

        def make(replaces=replaces, skip=skip) -> tuple:
            p = problem(sizes, 2, block_of(sizes), masks={0: torch.arange(sizes[0]) % 3 > 0} if replaces else None)
            p.params = [x.to(dtype or DTYPES[i % 3]) for i, x in enumerate(p.params)]
            return add_arguments(p, replaces, skip)

        assert_equal_backends("add_values", make)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("sizes", SIZES[-2:])
def test_add_values_rounds_stochastically_as_eager(sizes):
    def make() -> tuple:
        p = problem(sizes, 2, block_of(sizes))
        p.params = [x.to((torch.bfloat16, torch.float32)[i % 2]) for i, x in enumerate(p.params)]
        return add_arguments(p, False, rounding=torch.tensor(7))

    assert_equal_backends("add_values", make)


# ---------------------------------------------------------------- Bernoulli draws


@pytest.mark.long(but=1)
@pytest.mark.parametrize("threshold", [*map(threshold_of, range(2, 10)), 1, 1 << 20, 3 << 30, (1 << 32) - 1])
def test_a_draw_is_1_with_exactly_its_probability_at_every_place_of_a_word(threshold):
    words, part = 1_000_000, 4096
    ones = torch.zeros(32, dtype=torch.int64)
    for at in range(0, words, part):
        drawn = bernoulli(threshold, 77, torch.arange(at, min(at + part, words)))
        ones += torch.stack([((drawn >> k) & 1).sum() for k in range(32)])
    p = threshold / 2**32
    z = (ones - words * p) / math.sqrt(words * p * (1 - p))
    assert float(z.abs().max()) <= 4
    assert abs(float(z.sum()) / math.sqrt(32)) <= 4


class Operations(TorchDispatchMode):
    """Counts what torch is asked to compute, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements += result.numel() if isinstance(result, Tensor) and "bitwise" in func.__name__ else 0
        return result


def test_digits_that_are_zero_at_the_end_cost_nothing_so_that_one_half_costs_one():
    def cost(threshold: int) -> int:
        with Operations() as counted:
            bernoulli(threshold, 77, torch.arange(1 << 12))
        return counted.elements >> 12  # per word; what is done once per digit rounds to nothing

    one = cost(1 << 31)
    assert one > 0
    assert cost(0) == 0
    assert cost(1 << 29) == 3 * one
    assert cost(1) == cost((1 << 32) - 1) == 32 * one


# ---------------------------------------------------------------- whole steps


def train(rank: int, transport: SimulatedTransport, name: str, options: dict[str, object]) -> list[Tensor]:
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float32)
    shapes = ((7,), (10, 20), (0,), (1,))
    params = [torch.nn.Parameter(torch.randn(s).to(d)) for s, d in zip(shapes, dtypes, strict=True)]
    generator = torch.Generator().manual_seed(rank)
    kinds = {"sgd": by_name(MarsitSGD), "adam": by_name(MarsitAdam)}
    optimizer = kinds[name](params, 1e-2, process_group=transport, **{"full_precision_every": 3} | options)
    phases = set()
    for step in range(5):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if step == 4 and rank == 1:
            params[1].grad[3, 3] = torch.nan
        optimizer.step()
        phases.add(optimizer.stats()["phase"])
    assert phases == {
        "one-bit",
        *["uncompressed"] * (options.get("full_precision_every", 3) > 0),
        *["local"] * (options.get("local_steps", 1) > 1),
    }
    return [optimizer.stats()["backend"], *(p.detach() for p in params), *(optimizer.compensation(p) for p in params)]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize(
    ("name", "topology", "options"),
    [
        ("adam", "ring", {"compensation_limit": None, "stochastic_rounding": True}),
        ("sgd", "owner", {"local_steps": 2}),
        pytest.param("sgd", "ring", {"weight_decay": 0.1}, marks=pytest.mark.full),
        pytest.param("adam", "ring", {"local_steps": 2}, marks=pytest.mark.full),
        pytest.param("sgd", "torus", {"momentum": 0.0, "full_precision_every": 0}, marks=pytest.mark.full),
        pytest.param("adam", "owner", {"compensation_limit": 0.5, "max_grad_norm": 1.0}, marks=pytest.mark.full),
    ],
)
def test_steps_through_the_kernels_give_the_bits_of_eager(name, topology, options):
    group = SimulatedGroup(4 if topology == "torus" else 2)
    results = {}
    for backend in ("plain", "triton"):
        with using(backend):
            results[backend] = group.run(
                lambda rank, transport: train(rank, transport, name, options | {"topology": topology})
            )
    for (plain, *expected), (triton, *found) in zip(results["plain"], results["triton"], strict=True):
        assert ("Triton" in plain, "Triton" in triton) == (False, True)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
