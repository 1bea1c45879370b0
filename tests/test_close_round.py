"""What ends a round of Marsit's: flags of all headers, the checksum, and how far it goes, on all backends alike."""

from __future__ import annotations

import pytest
import torch
from backends import assert_equal_backends, problem
from marsit_arguments import close_arguments
from reference_ops import checksum_of
from torch import Tensor

from fusedonebit.triton_kernels import Coef, close_round, using
from fusedonebit.triton_kernels.close_round import SPAN, Received
from fusedonebit.triton_kernels.headers import CHECKED, Flag, Word, agreed_flags, folded

SOME = (300, 0, 5, 2048, 129)
BACKENDS = ("plain", "triton", pytest.param("native", marks=pytest.mark.needs_compiler))


def arguments_of(*given: object, sizes: tuple[int, ...] = SOME, world_size: int = 3, **more: object) -> tuple:
    p = problem(sizes, world_size, 128)
    p.coef[0, Coef.LR] = 0.0
    p.coef[:, Coef.GLOBAL_RATIO] = torch.linspace(0.3, 0.7, len(sizes))
    return close_arguments(p, *given, **more)


def steps_of(arguments: tuple) -> Tensor:
    k = arguments.coef[arguments.block_tensor.long()]
    return k[:, Coef.LR] * k[:, Coef.GLOBAL_RATIO] * 3.0


def checksum_in(arguments: tuple) -> int:
    _, _, summed, heads = arguments.received
    return int(checksum_of(summed, arguments.digest_updates, heads))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("sizes", "world_size", "given"),
    [
        (SOME, 1, (True, 0, 0, torch.inf)),
        (SOME, 17, (True, int(Flag.NONFINITE), 0, 0.5)),
        (SOME, 2, (True, 0, int(Flag.OVERFLOW), 0.5)),
        ((5,), 130, (False, 0, 0, 0.0)),
        (SOME, 3, (False, int(Flag.ABORT), 0, 0.0)),
        ((SPAN * 66,), 1, (True, 0, 0, 0.5)),
    ],
)
def test_close_round_equals_eager(sizes, world_size, given):
    def make() -> tuple:
        (words, own, summed, heads), *rest = arguments_of(*given, sizes=sizes, world_size=world_size)
        # Where there are many ranks, some of the messages do.
        return Received(words, own, summed[:17], None if heads is None else heads[:17]), *rest

    assert_equal_backends("close_round", make)


@pytest.mark.kernels
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_gives_the_same_bits_again_and_leaves_its_scratch_at_zero(backend):
    arguments, runs = arguments_of(world_size=2), []
    for _ in range(3):
        with using(backend):
            close_round(*arguments)
        assert int(arguments.digest_running) == int(arguments.ticket) == 0
        runs.append([t.clone() for t in (*arguments.left, arguments.digest_sums, arguments.flags)])
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


@pytest.mark.parametrize("limit", [0.5, torch.inf])
def test_signs_go_eta_s_and_bound_what_is_left_where_anything_moves(limit):
    arguments = arguments_of(True, most=limit)
    (scale, taken, bound), (digest, *_), flags = arguments[7:10]
    close_round(*arguments)
    eta_s = steps_of(arguments)
    assert int(flags) == 0
    assert int(folded(digest)) == int(
        checksum_of(arguments.received_summed, arguments.digest_updates, arguments.received_heads)
    )
    assert torch.equal(scale, eta_s)
    assert torch.equal(taken, eta_s)
    assert torch.equal(bound, torch.where(eta_s > 0, eta_s * limit, torch.inf))
    assert not eta_s.all()
    assert eta_s.any()


@pytest.mark.parametrize("most", [0.0, torch.inf])
def test_of_floats_nothing_is_taken_but_all_that_exceeds_the_bound(most):
    arguments = arguments_of(False, most=most)
    (_, taken, bound), (digest, *_), _ = arguments[7:10]
    close_round(*arguments)
    assert int(folded(digest)) == int(
        checksum_of(arguments.received_summed, arguments.digest_updates, arguments.received_heads)
    )
    assert not taken.any()
    assert (bound == most).all()


@pytest.mark.parametrize("signs", [True, False])
@pytest.mark.parametrize("word", [*range(CHECKED), Word.FLAGS, "hold"])
def test_a_header_that_differs_or_has_a_flag_skips_the_round_and_flags_are_cleared(word, signs):
    flag = int(Flag.NONFINITE) * (word == Word.FLAGS)
    arguments = arguments_of(signs, flag, int(Flag.OVERFLOW) * (word == "hold"))
    words, own, *_ = arguments.received
    if word in range(CHECKED):
        words[1, word] += 1
    own[Word.FLAGS] = flag
    (scale, taken, bound), _, flags = arguments[7:10]
    expected, before = int(agreed_flags(words, own, arguments.hold)), words.clone()
    close_round(*arguments)
    assert int(flags) == expected != 0
    assert not scale.any()
    assert not taken.any()
    assert bound.isinf().all()
    assert not words[:, Word.FLAGS].any()
    assert int(own[Word.FLAGS]) == 0
    before[:, Word.FLAGS] = 0
    assert torch.equal(words, before)
