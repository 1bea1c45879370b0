"""Between compressing and applying there are three ops, alike on all backends, and nothing else on the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from backends import assert_equal_backends, problem
from reference_ops import checksum_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedonebit import triton_kernels
from fusedonebit.comm import CompressedAllReduce, SimulatedGroup, StepContext
from fusedonebit.triton_kernels import Coef, FlatLayout, using
from fusedonebit.triton_kernels.finish import LANES, PIECE
from fusedonebit.triton_kernels.headers import CHECKED, Flag, Word, agreed_flags, folded
from fusedonebit.triton_kernels.native import library
from fusedonebit.triton_kernels.nouns import Arrived, Digest, Side
from fusedonebit.triton_kernels.op import OPS

SOME = (300, 0, 5, 2048, 129)
LONG = (45 * 128, 5, (2 * PIECE + 70) * 128, *[3] * (LANES + 2))  # of every kind of segment more than one


def summed(sizes: tuple[int, ...], scope: str, world_size: int = 1, **how: Any) -> Any:
    """Arguments of ``finish``; sums whose order shows."""
    p = problem(sizes, world_size, 128)
    p.partials.copy_(torch.rand(p.partials.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    p.partials[1] *= 50.0
    return p.finish_arguments(scope, "contractive", **how)


@pytest.mark.kernels
@pytest.mark.parametrize("how", [{}, {"hold": 16}, {"counter": -3}], ids=str)
@pytest.mark.parametrize("scope", ["global", "layer", "block"])
def test_finish_adds_in_one_order_on_all_backends(scope, how):
    assert_equal_backends("finish", lambda: summed(LONG, scope, 3, **how), float64_rtol=0.0)


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_order_of_sums_is_that_of_lanes_then_of_neighbours(scope):
    """The specification, number by number."""
    arguments = summed(LONG, scope)
    partials, (start, _, _, live, scale, *_), *_ = arguments

    def ordered(values: list[float]) -> float:
        lanes = [0.0] * LANES
        for i, value in enumerate(values):
            lanes[i % LANES] += value
        while len(lanes) > 1:
            lanes = [a + b for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
        return lanes[0]

    def total(values: list[float]) -> float:
        pieces = [ordered(values[at : at + PIECE]) for at in range(0, len(values), PIECE)]
        return ordered(pieces)

    triton_kernels.finish(*arguments)
    longest = int(start.diff().argmax())
    absolute, squares = (total(row[start[longest] : start[longest + 1]].tolist()) for row in partials[:2])
    n = float(live[longest])
    assert float(scale[longest]) == torch.tensor(min((squares / n) ** 0.5, 1.9 * (absolute / n)), dtype=torch.float32)


@pytest.mark.kernels
@pytest.mark.parametrize("backend", ["plain", "triton", "native"])
def test_finish_and_receive_reset_tickets_and_repeat_their_bits(backend):
    if backend == "native" and library() is None:
        pytest.skip("no C compiler")
    runs = []
    finish, receive = summed(LONG, "layer", 2), problem(LONG, 2, 128).receive_arguments("layer", 1, limit=1e3)
    for _ in range(3):
        with using(backend):
            triton_kernels.finish(*finish)
            triton_kernels.receive(*receive)
        assert not finish.segments.tickets.any()
        assert int(receive.digest.running) == int(receive.ticket) == 0
        written = (finish.segments.measured, finish.message_scales, finish.words, receive.scale)
        written += (*receive.worker[2:], *receive.server[2:], receive.digest.sums, receive.limit.norm.view(1))
        bits = [t.view(torch.int32).clone() for t in written]  # slots without a scale are NaN
        runs.append(bits)
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


@pytest.mark.kernels
@pytest.mark.parametrize("limit", [None, 1e9, 1e-9])
@pytest.mark.parametrize(("flags", "hold"), [(0, 0), (1, 0), (0, 16), (2, 16)])
@pytest.mark.parametrize(
    ("sizes", "world_size", "parts", "ternary"),
    [(SOME, 1, 1, False), (SOME, 5, 1, True), ((3 * 2**17,), 2, 1, False), (SOME, 2, 3, False), (SOME, 1, 17, False)],
)
def test_receive_equals_eager(sizes, world_size, parts, ternary, flags, hold, limit):
    def make() -> Any:
        p = problem(sizes, parts * world_size, 128, ternary=ternary)
        return p.receive_arguments("block", world_size - 1, flags, hold, limit, parts)

    assert_equal_backends("receive", make, float64_rtol=0.0)


def test_receive_hands_out_scales_flags_and_the_digest():
    arguments = problem(SOME, 3, 128).receive_arguments("layer", 1)
    arrived, worker, server, digest = arguments.arrived, arguments.worker, arguments.server, arguments.digest
    triton_kernels.receive(*arguments)
    assert int(arguments.flags) == 0
    assert int(folded(digest.sums)) == int(checksum_of(arrived.summed, digest.updates))
    segment = worker.segment
    first = segment.view(3, -1)[:, :1].expand(3, len(segment) // 3).reshape(-1)
    message = torch.arange(3).repeat_interleave(len(segment) // 3)
    assert torch.equal(arguments.scale, arrived.scales[message, segment - first])
    for side in (worker, server):
        assert torch.equal(side.scale, side.measured[side.segment])
        assert not side.settled.any()


def of_part(arguments: Any, part: int) -> Any:
    """Arguments of ``receive`` of one of three parts of two messages, in memory of their own."""
    rows, digest = slice(2 * part, 2 * part + 2), arguments.digest
    words, own_words, summed, scales = arguments.arrived

    def side(of: Side) -> Side:
        cut = [each.view(3, -1)[part].clone() for each in (of.segment, of.scale, of.settled)]
        return Side(cut[0], of.measured, *cut[1:])

    return arguments._replace(
        arrived=Arrived(words[rows], own_words[part : part + 1], summed[rows], scales[rows]),
        worker=side(arguments.worker),
        server=side(arguments.server),
        scale=arguments.scale.view(3, -1)[part].clone(),
        flags=arguments.flags.clone(),
        ticket=arguments.ticket.clone(),
        digest=Digest(digest.sums[:1].clone(), digest.running[:1].clone(), digest.updates),
    )


def scales_of(arguments: Any) -> tuple[Tensor, ...]:
    return arguments.scale, *arguments.worker[2:], *arguments.server[2:]


@pytest.mark.kernels
@pytest.mark.parametrize("backend", ["plain", "triton", pytest.param("native", marks=pytest.mark.needs_compiler)])
@pytest.mark.parametrize("differs", [False, True])
def test_receive_takes_parts_as_if_alone_but_skips_all_or_none(differs, backend):
    together = problem(SOME, 6, 128).receive_arguments("block", 1, parts=3)
    together.arrived.words[5, Word.TAG] += differs
    alone = [of_part(together, part) for part in range(3)]
    with using("plain"):
        for one in alone:
            triton_kernels.receive(*one)
    with using(backend):
        triton_kernels.receive(*together)
    assert [int(one.flags) for one in alone] == [0, 0, int(Flag.MISMATCH) * differs]
    assert int(together.flags) == int(Flag.MISMATCH) * differs
    assert torch.equal(together.digest.sums, torch.cat([one.digest.sums for one in alone]))
    for found, *parts in zip(*map(scales_of, (together, *alone)), strict=True):
        expected = torch.cat(parts)
        skipped = differs and any(found is each for each in (together.scale, together.server.scale))
        assert torch.equal(found, torch.zeros_like(expected) if skipped else expected)


@pytest.mark.parametrize("factor", [1.001, 0.999, math.nan])
def test_receive_refuses_what_is_beyond_the_limit_or_no_number(factor):
    arguments = problem(SOME, 3, 128).receive_arguments("layer", 1, limit=0.0)
    scale, worker, server, flags = arguments.scale, arguments.worker, arguments.server, arguments.flags
    coef, block_tensor, weight, limit, norm = arguments.limit
    triton_kernels.receive(*arguments)  # refuses all
    messages, segment = arguments.arrived.scales, worker.segment.view(3, -1)
    each = torch.gather(messages, 1, (segment - segment[:, :1]).long()).view(-1).double()
    expected = (each * coef[:, Coef.UNBIAS1].double()[block_tensor] * weight.double()).square().sum().sqrt()
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    limit.copy_(norm * factor)
    triton_kernels.receive(*arguments)
    refused = not factor > 1
    assert int(flags) == int(Flag.VETO) * refused
    assert torch.equal(scale, torch.zeros_like(scale) if refused else each.float())
    assert bool(server.scale.any()) != refused
    assert torch.equal(worker.scale, worker.measured[worker.segment])  # servers have averaged what arrived


@pytest.mark.parametrize("word", [*range(CHECKED), Word.FLAGS])
def test_a_bad_header_zeroes_scales_but_for_content_servers(word):
    """One that differs or has a flag; what workers whose servers were content have sent keeps its scales."""
    p = problem(SOME, 3, 128)
    arguments = p.receive_arguments("layer", 0, flags=int(Flag.NONFINITE) * (word == Word.FLAGS))
    words, own, *_ = arguments.arrived
    worker = arguments.worker
    if word != Word.FLAGS:
        words[1, word] += 1
    expected = int(agreed_flags(words, own[0]))
    triton_kernels.receive(*arguments)
    assert int(arguments.flags) == expected != 0
    assert not arguments.scale.any()
    assert not arguments.server.scale.any()
    content = words[:, Word.FLAGS, None].eq(0).expand(3, len(worker.scale) // 3).reshape(-1)
    assert torch.equal(worker.scale, worker.measured[worker.segment] * content)


@pytest.mark.kernels
@pytest.mark.long(but=2)
@pytest.mark.parametrize("hold", [0, int(Flag.OVERFLOW)])
@pytest.mark.parametrize("world_size", [1, 2, 17, 33])
def test_a_server_hears_all_flags_that_any_rank_tells(world_size, hold):
    def make() -> tuple:
        arguments = problem((700,), world_size, 128).server_arguments("block", 0, 0, hold)
        flags = [(-1 << 6) | (1, 2, 32)[w % 3] for w in range(world_size)]
        arguments.arrived_words[:, Word.FLAGS] = torch.tensor(flags)
        arguments.arrived_words[-1, Word.TAG] += world_size == 33
        return arguments

    arguments = make()
    triton_kernels.server_reduce(*arguments)
    assert int(arguments.flags) == {1: 5, 2: 7, 17: 39, 33: 39}[world_size] | hold  # no flags are -1 << 6
    assert_equal_backends("server_reduce", make)


class Counted(TorchDispatchMode):
    """Notes every operation but views, those that our ops call as well."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("fusedonebit::"):
            self.names.append(name)
            inside = Counted()
            with inside:
                OPS[name.removeprefix("fusedonebit::")].run(*args)
            self.names += inside.names
            return None
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in args if isinstance(t, Tensor)]
        view = isinstance(result, Tensor) and any(
            result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in tensors
        )
        if not view or func._schema.is_mutable:
            self.names.append(name)
        return result


@pytest.mark.skipif(library() is None, reason="no C compiler: eager ops are made of torch's")
@pytest.mark.parametrize(
    "told", [StepContext(number=7), StepContext(), StepContext(hold=torch.zeros(1, dtype=torch.int32))], ids=str
)
@pytest.mark.parametrize("scope", ["global", "block"])
def test_nothing_but_five_ops_runs_in_a_synchronisation(scope, told):
    def run(rank: int, transport: Any) -> list[str]:
        reduce = CompressedAllReduce(FlatLayout((700, 20), 2, 128), transport, scale_scope=scope)
        tensors, coef = [torch.randn(700), torch.randn(20)], reduce.plain_coefficients()
        calls = [lambda part: part.compress(tensors, coef)]
        reduce.synchronise(calls[0], told)
        with Counted() as counted:
            reduce.write(calls[0], told)
        transport.all_to_all(reduce.gathered.buffer, reduce.to_servers.buffer)
        with counted:
            reduce.serve(told)
        transport.all_gather(reduce.gathered.buffer, reduce.served.buffer)
        with counted:
            reduce.receive(told)
        return counted.names

    ops = ("momentum_compress", "finish", "server_reduce", "finish", "receive")
    with using("native"):
        for names in SimulatedGroup(2).run(run):
            assert names == [f"fusedonebit::{op}" for op in ops]
