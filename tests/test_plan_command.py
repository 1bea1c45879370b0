"""The command ``fusedonebit plan``: how it reads numbers, what it prints, and what it refuses."""

from __future__ import annotations

import re

import pytest
from matplotlib import pyplot as plt

from fusedonebit.apps.cli import main
from fusedonebit.apps.plan import Network, plan_plot
from fusedonebit.apps.plan.report import Plan
from fusedonebit.apps.units import duration, parse_bandwidth, parse_count, size


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
    methods = ("bf16 all-reduce", "PowerSGD, rank 4", "1-bit, bf16 inside", "0/1 Adam, 2 steps", "Marsit, owner")
    assert [line[:18].rstrip() for line in table] == ["per node and step", *methods]
    assert "--all prints every method" in more
    assert not any(tmp_path.iterdir())


def test_all_methods_other_numbers_and_a_picture_are_asked_for(tmp_path, capsys):
    assert plan("--all", "--out", str(tmp_path), step_ms="363") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if re.search(r"\dx ", line)]) == 13
    scale = lines[lines.index("", 4) + 1 : -1]
    assert scale[0].split()[3:] == ["2", "32", "256", "512", "8,192", "16,384"]
    assert scale[12].split()[2:] == ["-", "620", "609", "596", "591", "594"]  # two GPUs make no torus
    assert scale[4].count("*") == 6  # PowerSGD is the fastest of all, everywhere
    assert len(scale) == 14
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert lines[-1] == f"picture: {tmp_path / 'plan.png'}"


def test_a_picture_names_the_best_of_each_family_in_order():
    figure, axis = plt.subplots()
    plan_plot.draw(axis, Plan(340_000_000, 256, Network(0.5e9, 10e9, 4), 0.363))
    told = [text.get_text() for text in axis.get_legend().get_texts()]
    methods = ["bf16 all-reduce", "1-bit, bf16 inside", "0/1 Adam, 2 steps", "Marsit, owner", "PowerSGD, rank 4"]
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
    assert "16 " not in out.splitlines()[-14]  # more nodes are nowhere


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
        ("params", "0", "--params: must be a number of parameters >= 1"),
        ("network", "100G", "--network: must be a bandwidth > 0 with its unit, in bits as 4.1Gbps"),
        ("network", "0Gbps", "got '0Gbps'"),
        ("network", None, "--network is needed for --gpus 256 of --gpus-per-node 4: a node's rate, as 25Gbps"),
        ("nvlink", "300GB", "--nvlink: must be a bandwidth > 0"),
        ("pcie", "12GB/s", "--pcie: not allowed with argument --nvlink"),
        ("gpus", "254", "--gpus must be a multiple of --gpus-per-node 4, or at most that, got 254"),
        ("gpus", "-4", "--gpus: must be a whole number of 1 to 1,000,000, got '-4'"),
        ("gpus-per-node", "0", "--gpus-per-node: must be a whole number of 1 to 1,000,000, got '0'"),
        ("step-ms", "nan", "--step-ms: must be a number of milliseconds > 0 and at most 1,000,000,000, got 'nan'"),
        ("latency-us", "x", "--latency-us: must be a number of microseconds > 0 and at most 1,000,000,000, got 'x'"),
        ("powersgd-rank", "0", "--powersgd-rank: must be a whole number of 1 to 1,000,000, got '0'"),
        ("diloco-steps", "1.5", "--diloco-steps: must be a whole number of 1 to 1,000,000, got '1.5'"),
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
    assert [duration(s) for s in (1234.5, 1.4, 0.99999, 0.0123, 3.4e-6)] == [
        "1,234 s",
        "1.4 s",
        "1 s",
        "12.3 ms",
        "3.4 us",
    ]
    assert [size(n) for n in (0, 1, 4200, 1.35e9, 8.1e13)] == ["0 B", "1 B", "4.2 kB", "1.35 GB", "81 TB"]
