"""The planner's steps and verdict, and the command: how it reads numbers, what it prints, and what it refuses."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
from matplotlib import pyplot as plt

from benchmarks.pages import PERFORMANCE
from fusedonebit.apps.cli import main
from fusedonebit.apps.plan import METHODS, TYPICAL, Network, methods, plan_plot
from fusedonebit.apps.plan.costs import powersgd_bytes, transformer_width
from fusedonebit.apps.plan.hidden_messages import DDP_FIRST, DDP_OTHERS, ddp, ours, whole
from fusedonebit.apps.plan.plan_tables import advice
from fusedonebit.apps.plan.report import LEAST_SPEEDUP, Plan, calibrate, crossing, step
from fusedonebit.apps.units import duration, parse_bandwidth, parse_count, size

SLOW = Network(12.5e9 / 8, gpus_per_node=1)


# ---------------------------------------------------------------- overlap


def timeline(sizes: list[float], messages: float, backward: float) -> float:
    """Seconds after the backward pass until the last of some buckets has been sent, one event after the other."""
    total, filled, free = sum(sizes), 0.0, 0.0
    for each in sizes:
        filled += each / total
        free = max(free, filled * backward) + messages * each / total
    return free - backward


@pytest.mark.parametrize("messages", [0.01, 0.3, 0.99, 1.0, 1.5, 30.0])
def test_what_is_exposed_is_what_a_timeline_of_buckets_says(messages):
    assert whole(1e9).exposed(messages, 1.0) == pytest.approx(messages)
    assert ours(1e9).exposed(messages, 1.0) == pytest.approx(timeline([1, 1, 1, 1], messages, 1.0))
    for parameters in (1e5, 1e6, 5e6, 25e6, 1e9):
        sizes, rest = [], 4 * parameters
        for largest in [DDP_FIRST, *[DDP_OTHERS] * 200]:
            sizes.append(min(largest, rest))
            rest -= sizes[-1]
        sizes = [each for each in sizes if each]
        buckets = ddp(parameters)
        assert buckets.count == len(sizes)
        # The last bucket is taken for a full one, which the timeline's need not be.
        bucket = (messages + 1) * max(sizes) / sum(sizes) if len(sizes) > 2 else 1e-9
        assert buckets.exposed(messages, 1.0) == pytest.approx(timeline(sizes, messages, 1.0), abs=bucket)


def test_no_overlap_exposes_all_and_sends_each_message_once():
    for method in METHODS.values():
        told = step(method, 1e9, 16, SLOW, compute=1.0, overlap=False)
        assert told.exposed == told.messages == method.cost(1e9, 16, SLOW).seconds
        assert told.seconds == 1 + told.exposed


def test_only_ddps_hooks_and_our_overlap_hide_anything():
    plan = Plan(10**9, 16, SLOW, compute=1.0)
    hidden = {name for name, told in plan.steps().items() if told.exposed < 0.999 * told.messages}
    assert hidden == {"fp32", "bf16", "int8", "powersgd", "compress-8", "compress-4", "flat-overlap"}
    assert "flat-overlap" not in replace(plan, overlap=False).steps()


def test_every_bucket_pays_for_its_hops():
    hops = Network(1e30, inside=1e30, gpus_per_node=1, between_latency=1e-3)
    one, told = METHODS["bf16"].cost(1e9, 16, hops).seconds, step(METHODS["bf16"], 1e9, 16, hops)
    assert told.messages == pytest.approx(ddp(1e9).count * one)
    assert told.sent == pytest.approx(METHODS["bf16"].cost(1e9, 16, hops).sent)


# ---------------------------------------------------------------- those we are compared with


def test_powersgd_sends_two_factors_of_a_transformers_matrices():
    assert transformer_width(1.2e9) == pytest.approx(2154, abs=1)
    layers = transformer_width(1.2e9) / 100
    assert 12 * transformer_width(1.2e9) ** 2 * layers == pytest.approx(1.2e9)
    matrices = 12 * layers
    factors = matrices * 4 * (2 * 4 * transformer_width(1.2e9) + transformer_width(1.2e9))
    assert powersgd_bytes(1.2e9, 4) == pytest.approx(factors)
    assert powersgd_bytes(1.2e9, 10**6) == 4 * 1.2e9  # no more than it compresses
    assert methods(powersgd_rank=8)["powersgd"].payload(1e9) / methods()["powersgd"].payload(1e9) == 17 / 9


def test_diloco_averages_once_in_h_steps_zero_one_adam_in_two():
    fp32, flat = (METHODS[name].cost(1e9, 64, TYPICAL) for name in ("fp32", "flat"))
    diloco = methods(diloco_steps=500)["diloco"]
    assert "500" in diloco.label
    assert diloco.cost(1e9, 64, TYPICAL).seconds == pytest.approx(fp32.seconds / 500)
    assert METHODS["zero-one"].cost(1e9, 64, TYPICAL).sent == pytest.approx(flat.sent / 2)


# ---------------------------------------------------------------- calibration

PARAMETERS, GPUS, ONE_GPU, FP32_STEP, BF16_STEP = 1_200_000_000, 8, 1.4, 6.4, 3.6
"""Measured on one node without NVLink; the bf16 hook's step is predicted, and nothing was fitted to it."""


@pytest.mark.parametrize("overlap", [True, False])
def test_a_bf16_step_is_predicted_from_an_fp32_step_and_one_gpu(overlap):
    network = calibrate(ONE_GPU, {"fp32": FP32_STEP}, PARAMETERS, GPUS, Network(math.inf), overlap)
    fp32, bf16 = (step(METHODS[name], PARAMETERS, GPUS, network, ONE_GPU, overlap) for name in ("fp32", "bf16"))
    error = bf16.seconds / BF16_STEP - 1
    print(
        f"overlap {overlap}: a GPU sends {network.inside / 1e9:.2f} GB/s; bf16 hook predicted {bf16.seconds:.2f} s, "
        f"measured {BF16_STEP} s ({error:+.1%}, limit 10%)"
    )
    assert f"{bf16.seconds:.2f} s" in PERFORMANCE.read_text()
    assert fp32.seconds == pytest.approx(FP32_STEP)
    assert abs(error) <= 0.10


def test_calibration_finds_the_rate_that_made_the_steps():
    random.seed(0)
    for gpus in (4, 64):
        for overlap in (True, False):
            rate, compute = 10 ** random.uniform(8.5, 9.5), random.uniform(0.1, 0.3)
            made = Network(rate, 1e11, 8) if gpus > 8 else Network(math.inf, rate, 8)
            steps = {name: step(METHODS[name], 1e9, gpus, made, compute, overlap).seconds for name in ("fp32", "bf16")}
            for timed in (steps, {"fp32": steps["fp32"]}, {"bf16": steps["bf16"]}):
                start = Network(math.inf, 1e11 if gpus > 8 else 200e9, 8)
                found = calibrate(compute, timed, 10**9, gpus, start, overlap)
                assert (found.between if gpus > 8 else found.inside) == pytest.approx(rate, rel=1e-6)


def test_two_steps_that_disagree_are_missed_by_as_much_each():
    timed = {"fp32": FP32_STEP, "bf16": BF16_STEP}
    network = calibrate(ONE_GPU, timed, PARAMETERS, GPUS, Network(math.inf))
    ratios = [step(METHODS[n], PARAMETERS, GPUS, network, ONE_GPU).seconds / t for n, t in timed.items()]
    assert ratios[0] * ratios[1] == pytest.approx(1)
    assert ratios[0] > 1.001  # between the two rates that each alone would give


def test_steps_that_no_rate_explains_are_an_error():
    inside = Network(math.inf, inside=1e8)  # that alone takes longer
    with pytest.raises(ValueError, match="shorter than any rate explains"):
        calibrate(1.4, {"fp32": 1.5}, PARAMETERS, 64, inside)
    with pytest.raises(ValueError, match="longer than any rate explains"):
        calibrate(1e-9, {"fp32": 1e9}, 1000, GPUS, Network(math.inf))


# ---------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("asked", "verdict"),
    [
        (Plan(340 * 10**6, 1, TYPICAL), "Don't compress: one GPU sends nothing"),
        (Plan(340 * 10**6, 8, TYPICAL, 10.0), "Don't compress: bf16 all-reduce (bf16_compress_hook) takes 10 s a step"),
        (Plan(10**9, 64, Network(400e9), 1.0), "Don't compress: bf16 all-reduce"),
        (Plan(340 * 10**6, 8, TYPICAL), "Compress where a step computes for less than 1"),
        (Plan(10, 16384, TYPICAL), "Don't compress: bf16 all-reduce (bf16_compress_hook) takes 364 us for messages"),
        (Plan(10**9, 64, Network(5e8), 1.0), "Compress: "),
    ],
)
def test_the_first_line_is_the_verdict(asked, verdict):
    assert advice(asked)[0].startswith(verdict), advice(asked)


def test_hiding_messages_can_turn_the_verdict():
    plan = Plan(10**9, 64, Network(12.5e9), 1.0)
    assert not plan.pays
    assert replace(plan, overlap=False).pays


@pytest.mark.parametrize("gpus", [4, 64])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_verdict_turns_at_the_rate_it_names(gpus, overlap):
    plan = Plan(10**9, gpus, Network(12.5e9), 1.0, overlap)
    rate = plan.pays_below()
    assert 1e7 < rate < 1e12
    for share, pays in ((0.99, True), (1.01, False)):
        assert replace(plan, network=plan.network.at_rate(gpus, share * rate)).pays is pays
    assert any(f"{rate / 1e9:,.4g} GB/s" in line for line in advice(plan))


def test_the_verdict_turns_at_the_compute_it_names():
    plan = Plan(340_000_000, 64, Network(12.5e9))
    enough = plan.pays_until()
    for share, pays in ((0.99, True), (1.01, False)):
        there = replace(plan, compute=share * enough)
        assert there.pays is pays is (there.speedup() >= LEAST_SPEEDUP)


def test_where_hops_are_all_no_rate_pays():
    plan = Plan(10, 16384, Network(400e9), 1e-6)
    assert plan.pays_below() == 0
    assert any("at no rate" in line for line in advice(plan))


def test_a_rival_that_is_faster_is_named():
    lines = advice(Plan(10**9, 64, Network(5e8), 1.0))
    assert any(line.startswith("Faster than all of ours: PowerSGD, rank 4 (powerSGD_hook)") for line in lines)
    assert not any("Faster" in line for line in advice(Plan(10**9, 64, Network(400e9), 1.0)))


def test_no_number_is_nan_or_negative_anywhere():
    for gpus in (1, 2, 3, 8, 64, 16384):
        for between in (1e3, 1e9, 1e13):
            for compute in (None, 1e-6, 1e3):
                plan = Plan(10**8, gpus, Network(between), compute)
                for told in plan.steps().values():
                    assert all(0 <= number < math.inf for number in told)
                assert 0 < plan.speedup() < math.inf
                assert not any(word in line for line in advice(plan) for word in ("nan", "inf"))


def test_a_crossing_that_is_not_there_is_0_or_inf():
    assert crossing(lambda value: value < 7, 1, 100) == pytest.approx(7)
    assert crossing(lambda value: False, 1, 100) == 0
    assert crossing(lambda value: True, 1, 100) == math.inf


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4.1Gbps", 4.1e9 / 8),
        ("25Gbit", 25e9 / 8),
        ("25 Gbit/s", 25e9 / 8),
        ("100Gb/s", 12.5e9),
        ("100gbps", 12.5e9),
        ("49GB/s", 49e9),
        ("12.5GBps", 12.5e9),
        ("1GiB/s", 2**30),
        ("500Mbit/s", 62.5e6),
        ("8x400Gbps", 400e9),
    ],
)
def test_bandwidths_know_bits_from_bytes(text, value):
    assert parse_bandwidth(text) == pytest.approx(value)


def test_counts_know_their_letters():
    given = {"340M": 340_000_000, "1.3B": 1_300_000_000, "1.3g": 1_300_000_000, "7k": 7000, "1_000": 1000, "2e6": 2e6}
    assert {text: parse_count(text) for text in given} == given


GIVEN = {"--params": "340M", "--gpus": "256", "--gpus-per-node": "4", "--network": "4.1Gbps", "--nvlink": "10GB/s"}
ONE_NODE = {"network": None, "nvlink": None, "gpus_per_node": "8", "gpus": "8"}


def plan(*more: str, **flags: str | None) -> int:
    """Runs the command as given above, with other flags; None leaves one out."""
    given = GIVEN | {"--" + k.replace("_", "-"): v for k, v in flags.items()}
    return main(
        ["plan", *(word for flag, value in given.items() if value is not None for word in (flag, value)), *more]
    )


def row(out: str, label: str) -> str:
    """The cells of a method's row in the first table, one blank between them."""
    line = next(line for line in out.splitlines() if line.strip().startswith(label))
    return " ".join(line.split(label)[1].split())


def test_the_command_says_first_whether_to_compress(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plan(step_ms="363") == 0
    first, rate, rival, empty, asked, *table, more = capsys.readouterr().out.splitlines()
    assert first.startswith('Compress: Marsit, owner (topology="owner"), 499 ms a step, 5.86 times as fast as bf16')
    assert rate == "It stops paying above 5.651 GB/s (45.21 Gbit/s) a node"
    assert rival.startswith("Faster than all of ours: PowerSGD, rank 4 (powerSGD_hook), 364 ms a step")
    assert empty == ""
    assert asked.startswith("340,000,000 parameters on 256 GPUs, 4 a node; a node sends 0.5125 GB/s (4.1 Gbit/s)")
    methods = ["bf16 all-reduce", "PowerSGD, rank 4", "4-bit gradients", "1-bit, bf16 inside"]
    methods += ["0/1 Adam, 2 steps", "1-bit Muon", "Marsit, owner"]
    assert [line[:18].rstrip() for line in table] == ["per node and step", *methods]
    assert "--all prints every method" in more
    assert not any(tmp_path.iterdir())


def test_all_methods_other_numbers_and_a_picture_are_asked_for(tmp_path, capsys):
    assert plan("--all", "--out", str(tmp_path), step_ms="363") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if re.search(r"\dx ", line)]) == 16
    scale = lines[lines.index("", 4) + 1 : -1]
    assert scale[0].split()[3:] == ["2", "32", "256", "512", "8,192", "16,384"]
    assert scale[15].split()[2:] == ["-", "620", "609", "596", "591", "594"]  # two GPUs make no torus
    assert scale[4].count("*") == 6  # PowerSGD is the fastest of all, everywhere
    assert len(scale) == 17
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert lines[-1] == f"picture: {tmp_path / 'plan.png'}"


def test_a_picture_names_the_best_of_each_family_in_order():
    figure, axis = plt.subplots()
    plan_plot.draw(axis, Plan(340_000_000, 256, Network(0.5e9, 10e9, 4), 0.363))
    told = [text.get_text() for text in axis.get_legend().get_texts()]
    methods = [
        "4-bit gradients",
        "bf16 all-reduce",
        "1-bit Muon",
        "1-bit, bf16 inside",
        "0/1 Adam, 2 steps",
        "Marsit, owner",
        "PowerSGD, rank 4",
    ]
    assert told == [*methods, "compute alone,\n363 ms"]
    assert [text.get_text() for text in axis.texts] == ["256 GPUs: 449 ms"]
    plt.close(figure)


@pytest.mark.parametrize(
    "flags", [{"gpus": "1"}, {"gpus": "3", "gpus_per_node": "3"}, {"params": "1", "step_ms": "1e9"}]
)
def test_what_is_odd_has_a_picture_as_well(tmp_path, flags):
    assert plan("--out", str(tmp_path), **flags) == 0
    assert (tmp_path / "plan.png").exists()


def test_a_row_has_bytes_messages_what_is_exposed_and_the_step(capsys):
    plan("--all", step_ms="363")
    out = capsys.readouterr().out
    assert row(out, "bf16 all-reduce") == "1.35 GB 2.81 s 2.56 s 2.93 s 1x bf16_compress_hook"
    assert row(out, "1-bit, overlapped") == "210 MB 418 ms 236 ms 599 ms 4.88x Wire(overlap=True)"
    assert max(len(line) for line in out.splitlines()[5:] if not line.startswith("ZeroOneAdam")) <= 80


def test_without_overlap_all_is_exposed(capsys):
    assert plan("--no-overlap", "--all", step_ms="363") == 0
    out = capsys.readouterr().out
    assert row(out, "bf16 all-reduce") == "1.35 GB 2.65 s 2.65 s 3.01 s 1x bf16_compress_hook"
    assert "overlapped" not in out


def test_rank_and_steps_of_the_others_are_asked_for(capsys):
    assert plan("--all", powersgd_rank="16", diloco_steps="500") == 0
    out = capsys.readouterr().out
    assert row(out, "PowerSGD, rank 16").startswith("63.4 MB")
    assert row(out, "DiLoCo, H = 500").startswith("5.42 MB")


def test_the_command_says_where_not_to_compress_and_why(capsys):
    assert plan(gpus="4", nvlink="300GB/s", step_ms="900") == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Don't compress: bf16 all-reduce (bf16_compress_hook) takes 900 ms a step, and the fastest")
    assert second.startswith("It would pay below ")
    assert second.endswith(" a GPU")


def test_a_network_that_no_message_crosses_is_told_first(capsys):
    assert plan(gpus="8", nvlink=None, gpus_per_node=None) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("--network is not what decides here: 8 GPUs are taken for one node (--gpus-per-node 8)")
    assert "pass --gpus-per-node 1" in first
    assert plan(gpus="8", nvlink=None, gpus_per_node="1") == 0
    assert "--network is not" not in capsys.readouterr().out


def test_one_node_without_nvlink_needs_no_network(capsys):
    assert plan("--all", **ONE_NODE, pcie="12GB/s", step_ms="100") == 0
    out = capsys.readouterr().out
    assert "a GPU sends 12 GB/s (96 Gbit/s) within its node" in out
    assert "a node sends" not in out
    fp32 = 2 * 4 * 340e6 * 7 / 8 / 12e9
    assert float(row(out, "fp32 all-reduce").split()[2]) == pytest.approx(1e3 * fp32, rel=0.05)
    assert "16 " not in out.splitlines()[-16]  # more nodes are nowhere


@pytest.mark.parametrize(("link", "hop"), [("nvlink", 3.4), ("pcie", 5.7)])
def test_a_hop_over_pcie_takes_longer(capsys, link, hop):
    assert plan("--all", **ONE_NODE | {link: "1000GB/s"}, params="1") == 0
    assert float(row(capsys.readouterr().out, "fp32 all-reduce").split()[2]) == pytest.approx(8.4 + 14 * hop, rel=0.01)


def test_measured_steps_replace_the_network(capsys):
    assert plan("--all", **ONE_NODE, params="1.2B", calibrate="step_fp32=6.4,one_gpu=1.4") == 0
    out = capsys.readouterr().out
    assert "a GPU sends 1.418 GB/s (11.35 Gbit/s) within its node; a step computes for 1.4 s" in out
    assert " 6.4 s " in row(out, "fp32 all-reduce")
    assert plan("--all", network=None, params="1.2B", calibrate="one_gpu=1.4, step_bf16=3.6") == 0
    assert " 3.6 s 1x " in row(capsys.readouterr().out, "bf16 all-reduce")


def test_one_gpu_sends_nothing(capsys):
    assert plan(**ONE_NODE | {"gpus": "1"}) == 0
    assert capsys.readouterr().out.startswith("Don't compress: one GPU sends nothing")


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("params", "many", "--params: must be a number of parameters >= 1, as 340M, 1.3B or 340000000, got 'many'"),
        ("params", "1e400", "--params: must be a number of parameters >= 1, as 340M, 1.3B or 340000000, got '1e400'"),
        ("network", "9" * 400 + "x1Gbps", "--network: must be a bandwidth > 0 with its unit"),
        ("network", "100G", "--network: must be a bandwidth > 0 with its unit, in bits as 4.1Gbps"),
        ("network", "0Gbps", "got '0Gbps'"),
        ("network", None, "--network is needed for --gpus 256 of --gpus-per-node 4: a node's rate, as 25Gbps"),
        ("nvlink", "300GB", "--nvlink: must be a bandwidth > 0"),
        ("pcie", "12GB/s", "--pcie: not allowed with argument --nvlink"),
        ("gpus", "254", "--gpus must be a multiple of --gpus-per-node 4, or at most that, got 254"),
        ("gpus", "-4", "--gpus: must be a whole number of 1 to 1,000,000, got '-4'"),
        ("step-ms", "nan", "--step-ms: must be a number of milliseconds > 0 and at most 1,000,000,000, got 'nan'"),
        ("latency-us", "x", "--latency-us: must be a number of microseconds > 0 and at most 1,000,000,000, got 'x'"),
        ("calibrate", "6.4", "--calibrate: must be seconds as one_gpu=1.4,step_fp32=6.4"),
        ("calibrate", "one_gpu=1.4", "--calibrate: must be seconds as one_gpu=1.4,step_fp32=6.4"),
        ("calibrate", "step_fp32=6.4", "--calibrate: must be seconds as one_gpu=1.4,step_fp32=6.4"),
        ("calibrate", "one_gpu=nan,step_fp32=6.4", "got 'one_gpu=nan,step_fp32=6.4'"),
        ("calibrate", "one_gpu=1,step_fp16=6.4,step_bf16=2", "must be seconds as one_gpu=1.4,step_fp32=6.4"),
        ("calibrate", "one_gpu=1.4,step_fp32=1.4", "must have steps longer than one_gpu=1.4, got 'one_gpu=1.4,step"),
        ("calibrate", "one_gpu=1.4,step_fp32=6.4", "--calibrate finds what --step-ms, --network tell: leave them out"),
        ("out", "/dev/null/x", "--out /dev/null/x can't be written"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(capsys, flag, value, message):
    assert message in refusal(capsys, **{flag: value})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (ONE_NODE | {"gpus": "1"}, "--calibrate needs --gpus of 2 or more, got 1"),
        (ONE_NODE | {"pcie": "12GB/s"}, "--calibrate finds what --step-ms, --nvlink and --pcie tell: leave them out"),
        (ONE_NODE | {"step_ms": "1400"}, "--calibrate finds what --step-ms, --nvlink and --pcie tell: leave them out"),
        ({"network": None, "nvlink": "100MB/s"}, "--calibrate: steps of fp32 6.4 s are shorter than any rate explains"),
    ],
)
def test_what_calibration_can_not_use_is_named(capsys, flags, message):
    assert message in refusal(capsys, **flags, calibrate="one_gpu=1.4,step_fp32=6.4")


def refusal(capsys, **flags: str | None) -> str:
    try:
        code = plan(**flags)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    return capsys.readouterr().err


def test_numbers_read_well():
    told = ["1,234 s", "1.4 s", "1 s", "12.3 ms", "3.4 us"]
    assert [duration(s) for s in (1234.5, 1.4, 0.99999, 0.0123, 3.4e-6)] == told
    assert [size(n) for n in (0, 1, 4200, 1.35e9, 8.1e13)] == ["0 B", "1 B", "4.2 kB", "1.35 GB", "81 TB"]
