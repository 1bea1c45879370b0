"""The message's bytes, what ranks agree on, and the transports."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from observe import named
from op_arguments import Problem
from op_draws import LONG
from ranks import run_ranks, simulate
from step_formulas import checksum_of

from benchmarks.shapes import MODELS, sizes
from fusedonebit import triton_kernels
from fusedonebit.comm import (
    CompressedAllReduce,
    DisagreementError,
    Flag,
    LocalTransport,
    Messages,
    Transport,
    Word,
    agree,
    checksum,
    describe_mismatch,
    make_transport,
)
from fusedonebit.comm.message import layout_word
from fusedonebit.triton_kernels import SCALE_NORMS, FlatLayout, choose_block_size
from fusedonebit.triton_kernels.finish import LANES, PIECE
from fusedonebit.triton_kernels.headers import agreed_flags

CPU = torch.device("cpu")
LAYOUT = FlatLayout((300, 5), 2, 128)

# ---------------------------------------------------------------- the message


@pytest.mark.parametrize(("slots", "scale_bytes"), [(1, 16), (4, 16), (5, 32), (8, 32), (9, 48)])
def test_a_message_has_its_parts_at_the_documented_offsets(slots, scale_bytes):
    messages = Messages(3, slots, LAYOUT, CPU)
    messages.scales[1] = torch.arange(slots) + 0.5
    messages.words[1, Word.SENDER] = -2
    messages.absent[1] = 2
    messages.bits[1] = torch.arange(32)
    raw = messages.buffer[1].numpy().tobytes()
    assert len(raw) == messages.nbytes == 32 + 16 + scale_bytes + 32
    assert len(raw) % 16 == 0
    assert raw[:4] == b"FO1\x04"
    assert struct.unpack("<8i", raw[:32]) == (0x04314F46, 0, layout_word(LAYOUT, len(raw), False), 0, 0, -2, 0, 0)
    assert raw[32:48] == bytes([2]) + bytes(15)
    scales = struct.unpack(f"<{scale_bytes // 4}f", raw[48 : 48 + scale_bytes])
    assert scales == tuple(i + 0.5 if i < slots else 0.0 for i in range(scale_bytes // 4))
    assert raw[48 + scale_bytes :] == bytes(range(32))
    assert not messages.bits[[0, 2]].any()


def test_a_ternary_message_has_two_planes_at_documented_offsets():
    messages = Messages(3, 5, LAYOUT, CPU, ternary=True)
    assert messages.bits.shape == (3, 2, 32)
    messages.bits[1] = torch.arange(64).view(2, 32)
    raw = messages.buffer[1].numpy().tobytes()
    assert len(raw) == messages.nbytes == Messages.size(5, LAYOUT, ternary=True) == 32 + 16 + 32 + 2 * 32
    assert raw[80:] == bytes(range(64))
    assert not messages.bits[[0, 2]].any()


@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_block_scales_cost_3_percent_and_ternary_twice_the_bytes(world_size):
    counts = sizes(MODELS["BERT-Large"]())
    layout = FlatLayout(counts, world_size, choose_block_size(counts, world_size))
    kinds = (("global", False), ("layer", False), ("block", False), ("block", True))
    one, *others = (Messages.size(layout.scale_slots(scope)[1], layout, ternary) for scope, ternary in kinds)
    layer, block, ternary = (other / one for other in others)
    print(f"BERT-Large, W={world_size}, of global scales: layer {layer:.4f}, block {block:.4f}, ternary {ternary:.4f}")
    assert layer <= block <= 1.03
    assert 1.99 <= ternary <= 2.02


def test_the_words_lie_in_the_documented_order():
    assert [word.name for word in Word] == ["MAGIC", "STEP", "LAYOUT", "DIGEST", "TAG", "SENDER", "FLAGS", "SIGNAL"]
    assert list(Word) == list(range(8))
    assert [int(flag) for flag in (Flag.NONFINITE, Flag.ABORT, Flag.MISMATCH)] == [1, 2, 4]


def test_messages_of_another_length_say_another_layout():
    kinds = [Messages(1, slots, LAYOUT, CPU, ternary) for slots in (1, 8) for ternary in (False, True)]
    assert len({kind.nbytes for kind in kinds}) == len({int(kind.words[0, Word.LAYOUT]) for kind in kinds}) == 4


def test_a_sent_message_says_step_digest_tag_and_sender():
    reduce = CompressedAllReduce(FlatLayout((200,), 1, 128))
    layout = layout_word(reduce.layout, reduce.to_servers.nbytes, False)
    for step in (1, 2):
        before = int(checksum_of(reduce.gathered.buffer)) if step > 1 else 0
        reduce([torch.randn(200, generator=torch.Generator().manual_seed(step))], tag=2**31 - 1)
        words, signal = reduce.arrived_words.split([7, 1], dim=1)
        assert words.tolist() == [[0x04314F46, step, layout, before, 2**31 - 1, 0, 0]]
        residual = float(signal.contiguous().view(torch.float32))
        reduce.settle()
        assert residual == pytest.approx(float(reduce.worker.compensated.norm()), rel=1e-6)
    assert before != 0


def random_messages(seed: int) -> Messages:
    messages = Messages(2, 1, LAYOUT, CPU)
    messages.payload.copy_(torch.randint(256, messages.payload.shape, generator=torch.Generator().manual_seed(seed)))
    return messages


def test_every_single_flipped_bit_changes_the_digest():
    messages = random_messages(0)
    intact = int(checksum_of(messages.buffer))
    for message, byte, bit in np.ndindex(2, messages.nbytes, 8):
        messages.buffer[message, byte] ^= 1 << bit
        assert int(checksum_of(messages.buffer)) != intact
        messages.buffer[message, byte] ^= 1 << bit
    assert int(checksum_of(messages.buffer)) == intact


@pytest.mark.parametrize(
    ("flags", "agreed"), [([0, 0, 0], 0), ([1, 0, 0], 1), ([0, 0, 2], 2), ([1, 2, 0], 3), ([0, 3, 1], 3)]
)
def test_flags_of_all_ranks_are_united(flags, agreed):
    words = Messages(3, 1, LAYOUT, CPU).words.clone()
    words[:, Word.FLAGS] = torch.tensor(flags)
    words[:, Word.SENDER] = torch.arange(3)
    for own in words:
        assert agreed_flags(words, own).tolist() == [agreed]


CHECKED = {
    Word.MAGIC: "message format",
    Word.STEP: "",
    Word.LAYOUT: "parameter layout",
    Word.DIGEST: "digest of the last synchronisation",
    Word.TAG: "hyper-parameters",
}


@pytest.mark.parametrize("word", CHECKED)
def test_each_checked_word_that_differs_is_a_mismatch_on_all(word):
    words = Messages(3, 1, LAYOUT, CPU).words.clone()
    words[2, word] += 1
    for own in words:
        assert agreed_flags(words, own).tolist() == [int(Flag.MISMATCH)]
    text = describe_mismatch(words)
    assert text.startswith(CHECKED[word])
    if word is Word.STEP:
        assert text.startswith("0 steps on rank 0, 1 on rank 2 (a rank has skipped or repeated a step(), or ")
    else:
        assert text.endswith(f": {int(words[0, word])} on rank 0, {int(words[2, word])} on rank 2")


def test_words_that_are_not_those_this_rank_sent_are_damage():
    words = Messages(3, 1, LAYOUT, CPU).words.clone()
    own = words[0].clone()
    own[Word.STEP] += 1
    assert agreed_flags(words, own).tolist() == [int(Flag.MISMATCH)]
    assert describe_mismatch(words) == "a message arrived damaged"


# ---------------------------------------------------------------- scales


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_order_of_sums_is_that_of_lanes_then_of_neighbours(scope):
    """The specification, number by number."""
    arguments = Problem(LONG, scope=scope).arguments("finish", norm=SCALE_NORMS["contractive"])
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


# ---------------------------------------------------------------- agree


class NoTextError(Exception):
    pass


CASES: dict[str, Callable[[int], tuple[list[tuple[str, str]], Exception | None]]] = {
    "same": lambda rank: ([("lr", "0.1"), ("eps", "1")], None),
    "value": lambda rank: ([("lr", "0.1"), ("eps", str(rank // 2))], None),
    "name": lambda rank: ([("lr" if rank < 2 else "beta", "0.1")], None),
    "fewer": lambda rank: ([("lr", "0.1"), ("eps", "1")][: 2 - rank // 2], None),
    "more": lambda rank: ([("lr", "0.1"), ("eps", "1")][: 1 + rank // 2], None),
    "error": lambda rank: ([], ValueError("lr must be > 0, got -1") if rank == 1 else None),
    "errors": lambda rank: ([], ValueError("bad") if rank else None),
    "same error": lambda rank: ([], ValueError("bad")),
    "no text": lambda rank: ([], NoTextError() if rank == 1 else None),
}


def agreeing(rank: int, world_size: int) -> dict[str, tuple[str, str, int]]:
    return {case: agreeing_on(rank, case) for case in CASES}


def agreeing_on(rank: int, case: str) -> tuple[str, str, int]:
    transport = make_transport(None, CPU)
    facts, error = CASES[case](rank)
    told = named(lambda: agree(transport, facts, CPU, error, hint="seed alike"))
    return *told, transport.traffic.collectives_total


def differ(message: str) -> tuple[str, str, int]:
    return ("DisagreementError", message + "; seed alike", 4)


def told_of(rank: int, own: tuple[str, str, int]) -> list[tuple[str, str, int]]:
    """Of one rank's error, which it raises itself."""
    others = differ(f"failed on rank {rank}: {own[1] or own[0]}")
    return [own if each == rank else others for each in range(3)]


OUTCOMES = {
    "same": [("", "", 1)] * 3,
    "value": [differ("ranks differ: eps is 0 on rank 0 but 1 on rank 2")] * 3,
    "name": [differ("ranks differ: lr is 0.1 on rank 0 but beta 0.1 on rank 2")] * 3,
    "fewer": [differ("ranks differ: eps is 1 on rank 0 but nothing more on rank 2")] * 3,
    "more": [differ("ranks differ: eps is 1 on rank 2 but nothing on rank 0")] * 3,
    "error": told_of(1, ("ValueError", "lr must be > 0, got -1", 4)),
    "errors": [differ("failed on rank 1: bad, rank 2: bad"), *[("ValueError", "bad", 4)] * 2],
    "same error": [("ValueError", "bad", 4)] * 3,
    "no text": told_of(1, ("NoTextError", "", 4)),
}


def test_ranks_agree_or_every_rank_learns_the_first_difference():
    ranks = run_ranks(agreeing, 3)
    assert {case: [told[case] for told in ranks] for case in CASES} == OUTCOMES


def test_a_single_rank_agrees_with_itself_or_raises_its_error():
    agree(LocalTransport(), [("lr", "0.1")], CPU)
    with pytest.raises(KeyError, match="lr"):
        agree(LocalTransport(), [], CPU, KeyError("lr"))
    assert issubclass(DisagreementError, ValueError)


# ---------------------------------------------------------------- checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.int64])
def test_checksums_equal_for_equal_bits_change_with_any_element(dtype):
    x = (torch.randn(500, generator=torch.Generator().manual_seed(0)) > 0).to(dtype)
    assert checksum(x) == checksum(x.clone())
    assert 0 <= checksum(x) < 2**63
    for i in range(500):
        y = x.clone()
        y[i] = 1 - y[i].to(torch.uint8)
        assert checksum(y) != checksum(x)


def test_a_checksum_sees_order_length_and_the_sign_of_zero():
    x = torch.tensor([1.0, 2.0, 3.0])
    assert checksum(x) != checksum(x[[1, 0, 2]])
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor([torch.nan])) == checksum(torch.tensor([torch.nan]))
    long = torch.zeros(3 << 20, dtype=torch.uint8)
    swapped = long.clone()
    long[5], swapped[5 + (1 << 20)] = 1, 1
    assert checksum(long) != checksum(swapped)


def test_a_checksum_reads_memory_order_from_the_tensors_start():
    x = torch.arange(12.0)
    assert checksum(x.view(3, 4).t()) == checksum(x)
    assert checksum(x[4:8]) == checksum(x[4:8].clone()) != checksum(x[:4])


# ---------------------------------------------------------------- transports


def test_without_a_group_nothing_travels_and_nothing_is_counted():
    transport = make_transport(None, CPU)
    assert isinstance(transport, LocalTransport)
    sent, received = torch.arange(4.0)[None], torch.zeros(1, 4)
    transport.all_to_all(received, sent)
    assert torch.equal(received, sent)
    transport.all_gather(received.zero_(), sent)
    assert torch.equal(received, sent)
    transport.all_reduce(received)
    transport.broadcast(received)
    assert torch.equal(received, sent)
    assert (transport.traffic.collectives_total, transport.traffic.bytes_total) == (0, 0)
    assert repr(transport) == "local (world size 1)"


def moving(rank: int, transport: Transport) -> tuple[list[tuple], bool]:
    world_size, counts, seen = transport.world_size, transport.traffic, []
    rows, one = torch.zeros(world_size, 4), torch.full((1, 4), float(rank))
    sent = torch.full((world_size, 4), float(rank)) + 10 * torch.arange(world_size)[:, None]
    for call, target, *given in (
        (transport.all_to_all, rows, sent),
        (transport.all_gather, rows, one),
        (transport.all_reduce, one.clone()),
        (transport.broadcast, one.clone()),
    ):
        counts.start_step()
        call(target, *given)
        seen.append((target[:, 0].tolist(), counts.collectives_step, counts.bytes_step))
    return seen, counts.bytes_total == sum(entry[2] for entry in seen)


def moving_on_gloo(rank: int, world_size: int) -> tuple[tuple[list[tuple], bool], str]:
    transport = make_transport(None, CPU)
    return moving(rank, transport), repr(transport)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_transport_moves_rows_and_counts_what_it_sends(world_size):
    ranks, simulated = range(world_size), simulate(moving, world_size)
    for rank, ((seen, total), text) in enumerate(run_ranks(moving_on_gloo, world_size)):
        assert simulated[rank] == (seen, total)
        assert total
        assert seen == [
            ([10.0 * rank + w for w in ranks], 1, 16 * (world_size - 1)),
            ([float(w) for w in ranks], 1, 16 * (world_size - 1)),
            ([float(sum(ranks))], 1, 32 * (world_size - 1) // world_size),
            ([0.0], 1, 0 if rank else 16),
        ]
        assert text == f"torch.distributed gloo (rank {rank} of {world_size})"


def refused(rank: int, world_size: int) -> list[str]:
    groups = [dist.new_group([0]), dist.new_group([1])]
    assert repr(make_transport(groups[rank], CPU)) == "local (world size 1)"
    other = named(lambda: make_transport(groups[1 - rank], CPU))
    return [*other, *named(lambda: make_transport(None, torch.device("meta")))]


def test_a_group_without_this_process_or_its_device_is_refused():
    for kind, text, other_kind, other in run_ranks(refused, 2):
        assert (kind, other_kind) == ("ValueError", "ValueError")
        assert text == "process_group must contain this process"
        assert other.startswith("process_group must have a backend for meta tensors, got ")
