"""What kernels and steps are predicted to take: the model, the record, the page, and what stands beside them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import predictions as model
from benchmarks import predictions as page
from benchmarks.chips import CHIPS, H100, MI300X, Variant, chain_of, chip_of
from benchmarks.gpu import report
from benchmarks.gpu.runner import Job, Stage
from benchmarks.gpu.steps import PEERS
from benchmarks.kernels import FULL, KERNELS
from benchmarks.pages import PERFORMANCE
from benchmarks.scale_model import LAUNCHES

RECORD = json.loads(model.RECORD.read_text())
COUNTED = model.counted_in(RECORD)
MEASURED = json.loads(model.MEASURED.read_text())
HALF = replace(H100, bandwidth=H100.bandwidth / 2)
FASTER = replace(H100, clock=2 * H100.clock, latency=2 * H100.latency)
"""As many seconds until a load is there."""


def took(kernel: str, elements: int = FULL, chip=H100) -> model.Times:
    return model.microseconds(chip, kernel, elements, elements, COUNTED)


def test_every_kernel_and_every_step_is_predicted_for_all_chips():
    chips = [chip.name for chip in CHIPS]
    assert chips == ["T4", "A100", "H100", "H200", "MI300X"]
    kernels = [(row["kernel"], row["chip"]) for row in RECORD["kernels"]]
    assert kernels == [(kernel.name, chip) for kernel in KERNELS for chip in chips]
    steps = [(row["size"], row["step"], row["chip"]) for row in RECORD["steps"]]
    assert steps == [(size, peer.name, chip) for size in ("340M", "10M") for peer in PEERS for chip in chips]
    for row in (*RECORD["kernels"], *RECORD["steps"]):
        assert row["bytes"] > 0
        assert row["us"] > 0
        assert row["launches"] > 0
        assert row["instructions"] is None or row["chip"] != MI300X.name


def test_the_record_is_what_the_model_makes_of_its_counts():
    assert json.loads(json.dumps(model.record_of(COUNTED))) == RECORD


def test_the_page_of_performance_says_what_the_records_say():
    found = [row for row in page.compared(RECORD, MEASURED) if row["kernel"] is None]
    for size, told in (("340M", "At 340M parameters whole steps"), ("10M", "At 10M they")):
        more = [100 * (row["measured"] / row["predicted"] - 1) for row in found if row["size"] == size]
        assert f"{told} take {min(more):.0f} to {max(more):.0f} % longer" in PERFORMANCE.read_text()


# ---------------------------------------------------------------- the model


def test_memory_bound_time_doubles_with_bytes_or_half_bandwidth():
    once, twice, on_half = took("adam_update"), took("adam_update", 2 * FULL), took("adam_update", chip=HALF)
    assert max(once, key=once.__getitem__) == "memory"
    for longer in (twice, on_half):
        assert model.total(longer) - longer["begin"] == pytest.approx(2 * (model.total(once) - once["begin"]))
    assert model.total(took("adam_update", chip=FASTER)) == pytest.approx(model.total(once))


def test_issue_bound_time_halves_at_twice_the_clock_alone():
    twice = replace(H100, bandwidth=2 * H100.bandwidth)
    once = took("gradient_squares", chip=twice)
    assert max(once, key=once.__getitem__) == "issue"
    more = replace(twice, bandwidth=2 * twice.bandwidth)
    assert model.total(took("gradient_squares", chip=more)) == model.total(once)
    fast = took("gradient_squares", chip=replace(twice, clock=2 * twice.clock))
    assert model.total(fast) == pytest.approx(model.total(once) / 2)


def test_a_tiny_launch_takes_what_its_loads_wait_for_each_other():
    none = took("finish", 1024)
    assert model.total(none) == pytest.approx(none["begin"], rel=0.01)
    assert none["begin"] == pytest.approx(1e6 * chain_of("finish") * H100.latency / H100.clock)
    # A layer's program reads a million elements' blocks at a time, one after the other.
    assert took("lamb_rescale", 2 * model.WALKED)["begin"] == pytest.approx(5 / 4 * took("lamb_rescale", 1)["begin"])


def test_a_chip_of_uncounted_instructions_waits_for_memory():
    assert set(took("momentum_compress", chip=MI300X)) == {"memory", "begin"}


def test_fewer_lanes_of_the_fp64_units_take_as_much_longer():
    variant: Variant = replace(COUNTED["sm_90"]["momentum_compress"], conversions=0, shuffles=0, roots=0)
    few = replace(H100, fp64=H100.fp64 / 32)
    assert variant.limits(few)["units"] == 32 * variant.limits(H100)["units"]


def test_a_step_has_the_launches_that_a_profile_has_counted():
    said = {(r["size"], r["step"]): r["launches"] for r in RECORD["steps"] if r["chip"] == H100.name}
    seen = {
        (case["case"].removeprefix("steps-"), row["optimizer"]): row["a step"]
        for case in MEASURED
        for table in case["tables"]
        for row in table["rows"]
        if (row.get("kernel"), row.get("way")) == ("all", "captured")
    }
    assert {key: seen[key] for key in said} == said
    assert {"adam": said["10M", "OneBitAdam, W=8"], "lamb": said["10M", "OneBitLamb, W=8"]} == LAUNCHES


# ---------------------------------------------------------------- measured over predicted


def test_the_median_is_of_measured_over_predicted(capsys):
    rows = [{"measured": m, "predicted": 100.0} for m in (90.0, 104.0, 130.0)]
    assert page.deviation(rows) == pytest.approx(0.1)
    found = list(page.compared(RECORD, MEASURED))
    assert len([row for row in found if row["kernel"] is None]) == 2 * len(PEERS)
    model.main([])
    printed = capsys.readouterr().out
    assert "measured / predicted" in printed
    assert f"| whole steps | 12 | {page.deviation([r for r in found if r['kernel'] is None]):.1%} |" in printed


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", "H200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_a_chip_is_known_by_what_torch_calls_it(device, name):
    chip = chip_of(device)
    assert (chip and chip.name) == name


def of_a_run(device: str, ms: object) -> list[Stage]:
    """A stage of one job that has measured a step."""
    job = Job("steps-10M", [], 1.0)
    rows = [{"optimizer": PEERS[0].name, "way": way, "ms": ms} for way in ("eager", "captured")]
    job.record = {"about": {"device": device}, "tables": [{"title": "a", "columns": ["ms"], "rows": rows}]}
    return [Stage([job])]


def test_a_run_on_a_known_chip_reports_measured_over_predicted():
    (row,) = (r for r in RECORD["steps"] if (r["chip"], r["size"], r["step"]) == (H100.name, "10M", PEERS[0].name))
    stages = of_a_run("NVIDIA H100 80GB HBM3", 2e-3 * row["us"])
    (line,) = report.predicted(stages)
    assert line == f"{PEERS[0].name}, 10M: {2 * row['us']:,.0f} us, measured over predicted 2.000"
    assert "## Measured over predicted" in report.markdown(stages[0].jobs, {})
    for unknown in (of_a_run("NVIDIA H100 PCIe", 1.0), of_a_run("NVIDIA H200", None)):
        assert report.predicted(unknown) == []
        assert "predicted" not in report.markdown(unknown[0].jobs, {})
