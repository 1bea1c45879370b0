"""What the recorded network lab says: throughput, whole runs, and the planner's errors."""

from __future__ import annotations

import pytest

from benchmarks.netlab import model, tables
from benchmarks.netlab.__main__ import recorded
from benchmarks.pages import PERFORMANCE

AGAINST_FP32, AGAINST_BF16, END_TO_END = 8.0, 4.5, 3.8


@pytest.fixture(scope="module")
def record():
    return recorded()


@pytest.fixture(scope="module")
def slowest(record):
    return record["rates"][0]


def test_messages_take_what_they_take_on_the_papers_ethernet(slowest):
    share = model.fp32_share(slowest)
    print(f"fp32 messages take {share:.1%} of AdamW's step at {slowest['megabits']:g} Mbit/s (94 % aimed at)")
    assert slowest["share"] == model.PAPERS_SHARE
    assert 0.92 <= share <= 0.95


def test_the_compression_stage_is_as_fast_as_promised(slowest):
    against_fp32, against_bf16 = (model.speedup(slowest, "onebit-adam", other) for other in ("adamw", "bf16"))
    print(f"1-bit Adam: {against_fp32:.2f}x fp32 (at least {AGAINST_FP32}), {against_bf16:.2f}x bf16 ({AGAINST_BF16})")
    assert against_fp32 >= AGAINST_FP32
    assert against_bf16 >= AGAINST_BF16


def test_a_whole_run_is_as_fast_as_promised(record):
    run = record["run"]
    print(f"{run['steps']} steps, {run['freeze_step']} of warm-up: {model.end_to_end(record):.2f}x ({END_TO_END})")
    assert run["megabits"] == record["rates"][0]["megabits"]
    assert run["freeze_step"] / run["steps"] == pytest.approx(0.15)
    assert model.end_to_end(record) >= END_TO_END


def test_the_planner_predicts_every_step(record):
    print(tables.predictions(record))
    assert [row["share"] for row in record["rates"]] == list(model.SHARES)
    for row in record["rates"]:
        for name in model.FAMILY:
            assert abs(model.error(record, name, row)) <= model.LARGEST_ERROR, (name, row["megabits"])


def test_the_overlap_that_the_planner_assumes_predicts_ddp_too(record):
    largest = {False: 0.0, True: 0.0}
    for name in ("adamw", "bf16"):
        for row in record["rates"]:
            errors = {overlap: model.error(record, name, row, overlap=overlap) for overlap in largest}
            largest = {overlap: max(largest[overlap], abs(errors[overlap])) for overlap in largest}
            print(
                f"{name:6} {row['megabits']:6g} Mbit/s: {errors[False]:+.1%} without overlap, {errors[True]:+.1%} with"
            )
    print(f"largest {largest[False]:.1%} and {largest[True]:.1%} (limit {model.LARGEST_ERROR:.0%})")
    assert max(largest.values()) <= model.LARGEST_ERROR
    assert f"{largest[False]:.1%} without it and {largest[True]:.1%} with it" in PERFORMANCE.read_text()


def test_messages_crossed_the_links(record):
    for row in [*record["rates"], *record["mpi"]]:
        for name, told in row["methods"].items():
            if row["megabits"] is not None and name != "alone":
                assert told["link_bytes"] >= 0.98 * told["bytes"], (name, row["megabits"])


def test_mpi_was_compared_with_gloo(record):
    assert [row["megabits"] is None for row in record["mpi"]] == [False, False, False, True]


def test_the_page_says_what_was_measured(record):
    assert tables.all_of(record) in PERFORMANCE.read_text()
