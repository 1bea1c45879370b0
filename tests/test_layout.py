"""The flat index space and the table of live elements, against definitions spelled out here."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedonebit.triton_kernels import BLOCK_SIZES, FlatLayout, choose_block_size, live_table
from fusedonebit.triton_kernels.tables import EMPTY_ROW, FULL_ROW

WORLD_SIZES = (1, 2, 3, 4, 5)
SIZES = [(), (0,), (0, 0, 0), (1,), (127, 128, 129), (1024,), (1025,), (1023, 1, 1024), (0, 5, 0, 0, 3000, 0)]
SIZES += [(5, 0, 5), (2049, 0)]
SCOPES = ("global", "layer", "block")
HUGE = 3 * 2**31

every_layout = pytest.mark.parametrize(
    "layouts",
    [[FlatLayout(sizes, w, block) for w in WORLD_SIZES for block in BLOCK_SIZES] for sizes in SIZES],
    ids=[str(sizes) for sizes in SIZES],
)
any_layout = st.builds(
    FlatLayout,
    sizes=st.lists(st.integers(0, 700), max_size=7).map(tuple),
    world_size=st.integers(1, 5),
    block_size=st.sampled_from(BLOCK_SIZES),
)


def owners(layout: FlatLayout) -> list[tuple[int, int] | None]:
    """(tensor, element) at each flat index, None for padding: the layout's definition, one by one."""
    table: list[tuple[int, int] | None] = []
    for tensor, size in enumerate(layout.sizes):
        table.extend((tensor, element) for element in range(size))
        while len(table) % layout.block_size:
            table.append(None)
    while len(table) < layout.numel:
        table.append(None)
    return table


def blocks_of(layout: FlatLayout) -> list[int | None]:
    """The tensor of each block, None for padding blocks."""
    return [entry and entry[0] for entry in owners(layout)[:: layout.block_size]]


def covered(layout: FlatLayout, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(flat, tensor, element) of everything that ``spans`` yields."""
    return [
        (span.flat + i - span.start, span.tensor, i)
        for span in layout.spans(start, stop)
        for i in range(span.start, span.stop)
    ]


def wanted(layout: FlatLayout, start: int, stop: int) -> list[tuple[int, int, int]]:
    return [(flat, *entry) for flat, entry in enumerate(owners(layout)) if entry and start <= flat < stop]


@every_layout
def test_tensors_start_on_blocks_and_chunks_are_a_partition(layouts):
    for layout in layouts:
        blocks = [-(-size // layout.block_size) for size in layout.sizes]
        starts = [sum(blocks[:tensor]) * layout.block_size for tensor in range(len(blocks))]
        assert [layout.offset(tensor) for tensor in range(len(blocks))] == starts
        assert layout.chunk_numel == layout.blocks_per_chunk * layout.block_size > 0
        assert layout.chunk_numel * layout.world_size == layout.numel == layout.n_blocks * layout.block_size
        assert layout.chunk_bytes * 8 == layout.chunk_numel
        assert layout.chunk_bytes % 16 == 0
        # No more than what the tensors need, rounded up to whole chunks.
        assert layout.blocks_per_chunk == max(1, -(-sum(blocks) // layout.world_size))
        edges = range(0, layout.numel + 1, layout.chunk_numel)
        pieces = [element for start, stop in pairwise(edges) for element in covered(layout, start, stop)]
        assert pieces == covered(layout, 0, layout.numel) == wanted(layout, 0, layout.numel)
        assert layout.real_numel == len(pieces) == sum(layout.sizes)


@given(any_layout, st.integers(0, 12_000), st.integers(0, 12_000))
def test_spans_of_any_range_hold_its_elements_and_no_others(layout, start, stop):
    assert covered(layout, start, stop) == wanted(layout, start, stop)


@given(any_layout, st.integers(0, 40), st.integers(1, 40))
def test_tensors_in_names_each_tensor_with_a_block_in_the_range(layout, first, count):
    inside = layout.tensors_in(first * layout.block_size, (first + count) * layout.block_size)
    named = {tensor for tensor in blocks_of(layout)[first : first + count] if tensor is not None}
    # Tensors without elements have no block; a range of indices may pass over them.
    assert {tensor for tensor in inside if layout.sizes[tensor]} == named


def test_chunks_behind_the_last_tensor_are_empty_but_legal():
    layout = FlatLayout((10,), 5, 128)
    assert layout.n_blocks == 5
    assert [list(layout.spans(k * 128, (k + 1) * 128)) for k in range(1, 5)] == [[]] * 4
    assert list(layout.tensors_in(128, 640)) == []


def test_a_layout_without_tensors_is_one_padding_block_per_rank():
    layout = FlatLayout((), 3)
    assert (layout.n_blocks, layout.real_numel, layout.first_block) == (3, 0, (0,))
    assert list(layout.spans(0, layout.numel)) == []
    assert layout.block_tensor().tolist() == [0, 0, 0]
    assert live_table(layout).numel.tolist() == [0, 0, 0]


@every_layout
def test_block_tensor_names_owners_and_the_last_for_padding(layouts):
    for layout in layouts:
        last = max(len(layout.sizes) - 1, 0)
        assert layout.block_tensor().tolist() == [last if t is None else t for t in blocks_of(layout)]
        assert layout.block_tensor().dtype is torch.int64


@every_layout
def test_a_segment_is_all_or_one_tensor_or_4096_of_its_elements(layouts):
    for layout in layouts:
        assert layout.scale_segments("global").unique().tolist() == [0]
        begins = [
            first * layout.block_size % 4096 == 0
            for begin, end in zip(layout.first_block, [*layout.first_block[1:-1], layout.n_blocks], strict=False)
            for first in range(end - begin)
        ]
        expected = [sum(begins[: b + 1]) - 1 for b in range(layout.n_blocks)]
        assert layout.scale_segments("block").tolist() == expected
        by_layer, owner = layout.scale_segments("layer"), layout.block_tensor()
        assert torch.equal(by_layer[:, None] == by_layer, owner[:, None] == owner)


@pytest.mark.parametrize("scope", SCOPES)
@every_layout
def test_segments_rise_without_gaps_and_slots_in_each_chunk(layouts, scope):
    for layout in layouts:
        segments, (slots, needed) = layout.scale_segments(scope), layout.scale_slots(scope)
        assert segments.dtype is torch.int64
        assert len(segments) == layout.n_blocks
        assert segments[0] == 0
        assert set(segments.diff().tolist()) <= {0, 1}
        chunks = segments.view(layout.world_size, -1).tolist()
        expected = [[sorted(set(chunk)).index(segment) for segment in chunk] for chunk in chunks]
        assert slots.view(layout.world_size, -1).tolist() == expected
        assert needed == max(len(set(chunk)) for chunk in chunks)


def test_layer_segments_are_cut_at_chunk_boundaries():
    # Blocks: tensor 0 | 0 0 | 1 1 in two chunks of three.
    slots, needed = FlatLayout((300, 100, 200), 2, 128).scale_slots("layer")
    assert slots.tolist() == [0, 0, 0, 0, 1, 1]
    assert needed == 2


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_indices_beyond_two_to_the_31_are_exact(world_size):
    layout = FlatLayout((5, HUGE, 7), world_size)
    assert layout.offset(1) == 1024
    assert layout.offset(2) == 1024 + HUGE
    assert layout.real_numel == HUGE + 12
    assert layout.numel >= HUGE + 2048
    assert layout.numel % (world_size * 1024) == 0
    spans = [s for k in range(world_size) for s in layout.spans(k * layout.chunk_numel, (k + 1) * layout.chunk_numel)]
    assert sum(s.stop - s.start for s in spans) == HUGE + 12
    assert spans[-1] == (2, 0, 7, 1024 + HUGE)
    assert list(layout.spans(2**32, 2**32 + 10)) == [(1, 2**32 - 1024, 2**32 - 1014, 2**32)]
    assert list(layout.tensors_in(HUGE, HUGE + 4096)) == [1, 2]
    assert choose_block_size((HUGE,), 1) == 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1,), 0), "world_size must be an int >= 1, got 0"),
        (((1,), -3), "world_size must be an int >= 1, got -3"),
        (((1,), 1, 100), r"block_size must be one of \(1024, 512, 256, 128\), got 100"),
        (((1,), 1, 2048), "block_size must be one of .*, got 2048"),
        (((4, -1),), "sizes must be >= 0, got -1"),
    ],
)
def test_bad_arguments_are_named_with_their_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        FlatLayout(*arguments)
    with pytest.raises(ValueError, match="scale_scope must be 'global', 'bucket', 'layer' or 'block', got 'tensor'"):
        FlatLayout((1,)).scale_segments("tensor")


def test_fingerprints_differ_between_layouts_and_fit_31_bits():
    different = [FlatLayout(s, w, b) for s in [*SIZES, (1024, 1023, 1)] for w in WORLD_SIZES for b in BLOCK_SIZES]
    prints = {layout.fingerprint for layout in different}
    assert len(prints) == len(different)
    assert all(0 <= value < 2**31 for value in prints)
    assert FlatLayout((5, 6), 2).fingerprint == FlatLayout((5, 6), 2).fingerprint


@given(st.lists(st.integers(0, 200_000), max_size=6), st.integers(1, 5))
def test_the_chosen_block_is_the_largest_that_pads_1_percent(sizes, world_size):
    chosen = choose_block_size(sizes, world_size)
    padding = {b: FlatLayout(tuple(sizes), world_size, b).numel - sum(sizes) for b in BLOCK_SIZES}
    within = [b for b in BLOCK_SIZES if 100 * padding[b] <= sum(sizes)]
    if within:
        assert chosen == max(within)
    else:
        assert padding[chosen] == min(padding.values())
        assert chosen == max(b for b in BLOCK_SIZES if padding[b] == padding[chosen])


def test_one_percent_of_padding_is_the_limit():
    assert choose_block_size([], 2) == 128
    assert 101_387 + 101_387 // 100 == 100 * 1024
    assert choose_block_size([101_387], 1) == 1024
    assert choose_block_size([101_386], 1) == 512


def live_bits(layout: FlatLayout, **kwargs) -> list[bool]:
    table = live_table(layout, **kwargs)
    rows = (table.bits[:, :, None] >> torch.arange(8)) & 1
    flags = rows.flatten(1)[table.row.long()].bool()
    assert flags.sum(1).tolist() == table.numel.tolist()
    return flags.flatten().tolist()


@every_layout
def test_real_elements_are_live_full_or_empty_blocks_share_rows(layouts):
    for layout in layouts:
        assert live_bits(layout) == [entry is not None for entry in owners(layout)]
        table = live_table(layout)
        assert table.row.dtype is torch.int32
        assert set(table.row[table.numel == layout.block_size].tolist()) <= {FULL_ROW}
        assert set(table.row[table.numel == 0].tolist()) <= {EMPTY_ROW}
        tails = {size % layout.block_size for size in layout.sizes} - {0}
        assert table.bits.shape == (2 + len(tails), layout.block_size // 8)


@given(any_layout, st.data())
def test_masked_and_excluded_elements_are_not_live(layout, data):
    names = range(len(layout.sizes))
    excluded = data.draw(st.sets(st.sampled_from(names))) if layout.sizes else set()
    masked = data.draw(st.sets(st.sampled_from(names))) if layout.sizes else set()
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    masks = {i: torch.rand(layout.sizes[i], generator=seed) < 0.5 for i in masked}
    expected = [
        entry is not None and entry[0] not in excluded and (entry[0] not in masks or bool(masks[entry[0]][entry[1]]))
        for entry in owners(layout)
    ]
    assert live_bits(layout, masks=masks, excluded=excluded) == expected


@pytest.mark.parametrize("length", [0, 129, 131])
def test_a_mask_of_another_length_is_refused(length):
    with pytest.raises(ValueError, match=f"mask of tensor 1 must have 130 elements, got {length}"):
        live_table(FlatLayout((4, 130), 1, 128), masks={1: torch.ones(length, dtype=torch.bool)})


def test_a_table_moves_to_a_device_whole():
    moved = live_table(FlatLayout((5,), 1, 128)).to(torch.device("meta"))
    assert {tensor.device.type for tensor in moved} == {"meta"}
