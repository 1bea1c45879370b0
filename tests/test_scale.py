"""One rank's work as models and worlds grow: counted in bytes and operations, never timed."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks import scale_model as model
from benchmarks.scale import NETWORK, Operations, layout_of, made, plot, predict
from fusedonebit.comm import DisagreementError, SimulatedGroup, Transport, agree
from fusedonebit.triton_kernels import FlatLayout, live_table
from fusedonebit.triton_kernels.tables import EMPTY_ROW, FULL_ROW, block_tables

CPU = torch.device("cpu")
UNEVEN = (5000, 0, 300, 70000, 12)
HUGE = model.transformer(1e11)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.parametrize("ranks", [2, 64, 1024])
@pytest.mark.parametrize("sizes", [UNEVEN, model.transformer(3e5)], ids=["uneven", "transformer"])
@pytest.mark.filterwarnings("ignore:after so few updates", "ignore:the average")
def test_the_formulas_are_what_an_optimizer_holds(sizes, ranks, optimizer):
    rank = made(tuple(filter(None, sizes)), ranks, optimizer)
    memory, stats = model.memory(rank.frame.layout, optimizer), rank.stats()
    assert (stats["phase"], stats["skipped_steps"]) == ("compression", 0)
    assert memory.state == stats["state_bytes"]
    assert memory.scratch == stats["wire_bytes"]
    message = model.message_bytes(rank.frame.layout)
    assert stats["bytes_step"] == 2 * (ranks - 1) * message


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("block", [1024, 128])
def test_scales_counted_without_a_table_are_those_of_the_table(ranks, block):
    for sizes in (UNEVEN, (1,), (4096, 4097), model.transformer(1e6)):
        layout = FlatLayout(sizes, ranks, block)
        slots, most = layout.scale_slots("block")
        own = int(slots[: layout.blocks_per_chunk].max()) + 1
        assert model.segments(layout) == (int(layout.scale_segments("block")[-1]) + 1, own, most)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.filterwarnings("ignore:after so few updates", "ignore:the average")
def test_a_steps_operations_do_not_grow_with_the_number_of_ranks(optimizer):
    sizes, counts = (30000, 2000, 7), {}
    for ranks in (2, 32, 512):
        rank = made(sizes, ranks, optimizer)
        operations = Operations()
        with operations:
            rank.step()
        counts[ranks] = operations.count
        # Of W messages and of the tables; a table of W x W would have 262,144 elements.
        message = model.message_bytes(rank.frame.layout)
        assert operations.largest <= max(rank.frame.layout.numel, ranks * message)
    assert len(set(counts.values())) == 1, counts
    more = made((*sizes, *[500] * 60), 32, optimizer)
    operations = Operations()
    with operations:
        more.step()
    assert operations.count == counts[32]


def test_memory_and_bytes_grow_no_faster_than_model_and_ranks():
    by_size = [predict(model.transformer(10**n), 64, "lamb") for n in range(7, 12)]
    for before, after in itertools.pairwise(by_size):
        growth = after["parameters"] / before["parameters"]
        for name in ("state", "tables", "scratch"):
            assert after[name] <= 1.05 * growth * before[name], name
        assert after["kernels_s"]["memory"] <= 1.02 * growth * before["kernels_s"]["memory"]
        assert after["tensors"] <= growth * before["tensors"]
    for parameters in (1e6, 1e9):
        by_ranks = [predict(model.transformer(parameters), ranks, "adam") for ranks in (64, 1024, 16384)]
        for before, after in itertools.pairwise(by_ranks):
            # 16 times the ranks: the part that is theirs grows so, all others not at all, but for padding.
            assert after["of_ranks"] <= 16 * before["of_ranks"]
            assert after["state"] - after["of_ranks"] <= 1.01 * (1 + after["padding"]) * before["state"]


def test_state_per_parameter_is_the_readmes_for_large_blocks():
    blocks = set()
    for parameters in (1e8, 1e9, 1e11):
        for ranks in (2, 64, 16384):
            layout = layout_of(model.transformer(parameters), ranks)
            adam, lamb = (model.memory(layout, name).state / layout.numel for name in ("adam", "lamb"))
            # 4 B/4096 of a scale and 45 bytes of each block's tables: 0.05 a parameter, 0.4 in blocks of 128.
            tables = 45 * (1 / layout.block_size - 1 / 1024)
            assert adam <= 8.2 + 4 / ranks + tables
            assert lamb <= 12.3 + 4 / ranks + tables + 0.05
            blocks.add(layout.block_size)
    assert len(blocks) > 1


# ---------------------------------------------------------------- beyond 2^31


def test_a_layout_of_1e11_elements_on_16384_ranks_is_exact():
    layout = layout_of(HUGE, 16384)
    assert layout.real_numel == sum(HUGE) > 9e10
    assert layout.numel % (16384 * layout.block_size) == 0
    last = layout.offset(len(HUGE) - 1)
    assert last > 2**36
    assert list(layout.spans(last, last + 10)) == [(len(HUGE) - 1, 0, 10, last)]
    for chunk in (0, 1, 8191, 16383):
        start = chunk * layout.chunk_numel
        covered = sum(s.stop - s.start for s in layout.spans(start, start + layout.chunk_numel))
        assert 0 < covered <= layout.chunk_numel
    parts = [layout.part(i, 8) for i in range(8)]
    assert sum(part.real_numel for part in parts) == layout.real_numel
    assert [sum(sizes) for sizes in zip(*(part.sizes for part in parts), strict=True)] == list(HUGE)


def test_tables_of_more_than_2_31_elements_are_exact():
    sizes = (2**31 - 5, 2**31 + 1030, 3)
    layout = FlatLayout(sizes, 16384, 1024)
    owner, starts = layout.block_tensor(), block_tables(sizes, layout.n_blocks, 1024, CPU).start
    first, second = layout.first_block[1:3]
    assert owner[[0, first - 1, first, second - 1, second]].tolist() == [0, 0, 1, 1, 2]
    assert (1024 * starts.long())[[first - 1, first, second - 1, second]].tolist() == [2**31 - 1024, 0, 2**31 + 1024, 0]
    live = live_table(layout)
    assert int(live.numel.sum(dtype=torch.int64)) == sum(sizes)


def test_a_mask_has_rows_for_blocks_that_it_cuts_only():
    mask = torch.ones(10_000_000, dtype=torch.bool)
    mask[1024:4096] = False
    mask[5000] = False
    live = live_table(FlatLayout((len(mask), 700), 2, 1024), {0: mask})
    # All, none; three masked blocks' together, that of 5000 and the last one; the other tensor's tail.
    assert len(live.bits) == 2 + 3 + 1
    assert live.row[0] == FULL_ROW
    assert EMPTY_ROW not in live.row[: -(-len(mask) // 1024)]
    assert int(live.numel.sum()) == int(mask.sum()) + 700
    assert live.numel[:6].tolist() == [1024, 0, 0, 0, 1023, 1024]


# ---------------------------------------------------------------- disagreement


def test_ranks_that_disagree_get_one_line_of_each_other_rank():
    """Where the last of many has another shape among two thousand."""

    def body(rank: int, transport: Transport) -> int:
        facts = [(f"parameter {i}", f"float32 ({i}, 1024) in memory order (1024, 1)") for i in range(2000)]
        if rank == 15:
            facts[1234] = ("parameter 1234", "float32 (7,) in memory order (1,)")
        with pytest.raises(DisagreementError, match=r"parameter 1234 is .* on rank 0 but .*7.* on rank 15"):
            agree(transport, facts, CPU)
        return transport.traffic.bytes_total

    _, *sent = SimulatedGroup(16).run(body)  # rank 0 has told its own facts as well
    print(f"bytes that a rank sends: {max(sent)}")
    assert max(sent) <= 16 * 400


@pytest.mark.long
def test_the_picture_draws(tmp_path):
    predicted = [predict(model.transformer(p), w, "adam") for p in (1e6, 1e9) for w in (2, 64, 1024, 16384)]
    run = [{"optimizer": "adam", "parameters": 1e6, "state_bytes": 1e7}]
    plot({"predicted": predicted, "run": run}, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    assert NETWORK.gpus_per_node == 8
