"""``fusedonebit train`` as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from launched import Ended, fusedonebit
from report_pages import cells, pictures

from fusedonebit.core.sharding import local

COMMAND = [sys.executable, "-m", "fusedonebit", "train"]
SMALL = ["--model", "tiny", "--batch-size", "2", "--seq-len", "16", "--eval-every", "4", "--save-every", "4"]


def train(*arguments: str) -> Ended:
    return fusedonebit("train", *SMALL, *arguments)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def test_compare_trains_both_and_report_makes_a_page_of_them(tmp_path: Path, text: Path):
    out = tmp_path / "out"
    result = train(
        *("--nproc", "2", "--compare", "adamw,onebit-adam", "--steps", "12", "--freeze-step", "5"),
        *("--text", str(text), "--out", str(out)),
    )
    assert result.returncode == 0, result.stderr
    for word in ("adamw", "onebit-adam", "held-out loss", "bytes/step", "loss.png"):
        assert word in result.stdout
    records = metrics(out)
    assert [r["step"] for r in records] == [*range(1, 13), *range(1, 13)]
    onebit = [r for r in records if r["optimizer"] == "onebit-adam"]
    assert [r["phase"] for r in onebit] == ["warmup"] * 5 + ["compression"] * 7
    assert onebit[-1]["bytes_step"] * 20 < onebit[0]["bytes_step"]
    assert {r["step"] for r in onebit if "held_out_loss" in r} == {4, 8, 12}
    # Both are the same AdamW until the freeze: same data, same start.
    adamw = [r["loss"] for r in records if r["optimizer"] == "adamw"]
    assert [r["loss"] for r in onebit][:5] == pytest.approx(adamw[:5], rel=1e-5)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens/s" not in result.stdout  # one was trained after the other
    assert result.stdout.endswith(f"look at it: fusedonebit report {out}\n")
    assert fusedonebit("report", str(out)).returncode == 0
    page = (out / "report.html").read_text()
    assert re.findall("<th scope=col>(.*?)</th>", page)[:2] == ["adamw", "onebit-adam"]
    assert cells(page, "phase") == ["uncompressed", "compression"]
    curves = ["Loss", "Loss against bytes sent", "Bytes per step", "Compression error", "Tokens per second"]
    assert list(pictures(page)) == [*curves, "Learning rate", "Phases"]
    for word in ("run: seq_len", "option: freeze_step", "version: torch", "gloo", "run: lr", "embed.weight"):
        assert word in page


def test_a_model_in_ddp_trains_as_one_without(tmp_path: Path, text: Path):
    common = ("--nproc", "2", "--steps", "8", "--freeze-step", "3", "--text", str(text), "--device", "cpu")
    results = [train(*common, *more, "--out", str(tmp_path / name)) for name, more in (("a", ()), ("b", ("--ddp",)))]
    for result in results:
        assert result.returncode == 0, result.stderr
        assert "tokens/s" in result.stdout
        assert "Warning" not in result.stderr
    plain, wrapped = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert [r["phase"] for r in wrapped] == [r["phase"] for r in plain]
    assert [r["loss"] for r in wrapped] == pytest.approx([r["loss"] for r in plain], rel=1e-5)
    assert wrapped[-1]["bytes_step"] == plain[-1]["bytes_step"] > 0


@pytest.mark.full
def test_marsit_and_baselines_train_on_a_torus_with_local_steps(tmp_path: Path, text: Path):
    out = tmp_path / "out"
    names = ("marsit", "ssdm")
    where = ("--nproc", "4", "--topology", "torus", "--local-steps", "2", "--full-precision-every", "2")
    result = train("--compare", ",".join(names), "--steps", "8", *where, "--text", str(text), "--out", str(out))
    assert result.returncode == 0, result.stderr
    phases = [r["phase"] for r in metrics(out)]
    assert phases == [*("local", "uncompressed", "local", "one-bit") * 2, *("local", "one-bit") * 4]
    odd = train("--optimizer", "marsit", "--steps", "7", "--local-steps", "2", "--text", str(text), "--out", str(out))
    assert odd.returncode == 2
    assert "--steps must be a multiple of --local-steps 2, got 7" in odd.stderr


@pytest.mark.full
def test_lamb_records_and_draws_its_layers(tmp_path: Path, text: Path):
    out = tmp_path / "out"
    names = ("lamb", "onebit-lamb", "onebit-lamb-frozen")
    result = train(
        "--compare", ",".join(names), "--steps", "8", "--freeze-step", "4", "--text", str(text), "--out", str(out)
    )
    assert result.returncode == 0, result.stderr
    assert "against lamb" in " ".join(result.stdout.split())
    assert (out / "layers.png").read_bytes().startswith(b"\x89PNG")
    layers = {name: [r["layers"] for r in metrics(out) if r["optimizer"] == name] for name in names}
    for name, seen in layers.items():
        assert len(seen) == 8
        for key in ("coefficient", "variance_norm", "ratio"):
            assert all(len(one[key]) == len(one["name"]) for one in seen)
        assert "embed.weight" in seen[0]["name"]
        moved = any(r != 1.0 for one in seen for r in one["ratio"])
        assert moved == (name == "onebit-lamb")
    assert layers["lamb"][3]["coefficient"] == layers["onebit-lamb"][3]["coefficient"]
    frozen = layers["onebit-lamb-frozen"]
    assert frozen[4]["coefficient"] == frozen[7]["coefficient"] == pytest.approx(frozen[3]["average"])


@pytest.mark.full
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_resume_in_the_compression_stage_continues_bit_for_bit(tmp_path: Path, text: Path, nproc: str):
    common = ("--nproc", nproc, "--freeze-step", "3", "--text", str(text), "--steps", "12")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(*common, "--out", str(whole)).returncode == 0
    assert train(*common, "--out", str(parts)).returncode == 0
    # Back to step 8, as if the run had been cut short there.
    last = parts / "checkpoints" / "onebit-adam" / "step-00000012"
    for file in last.iterdir():
        file.unlink()
    result = train(*common, "--out", str(parts), "--resume")
    assert result.returncode == 0, result.stderr
    straight, resumed = metrics(whole), metrics(parts)
    for key in ("loss", "bytes_step", "phase"):
        assert [r[key] for r in resumed] == [r[key] for r in straight]
    # Before the first step after a load, ranks compare their parameters: 32 bytes to each other rank.
    compared = 32 * (int(nproc) - 1)
    more = [r["bytes_total"] - s["bytes_total"] for r, s in zip(resumed, straight, strict=True)]
    assert more == [0] * 8 + [compared] * 4
    for rank in range(int(nproc)):
        name = f"checkpoints/onebit-adam/step-00000012/rank-{rank}-of-{nproc}.pt"
        one, two = (torch.load(folder / name, weights_only=True) for folder in (whole, parts))
        assert all(torch.equal(one["model"][key], two["model"][key]) for key in one["model"])
        for i, kept in one["optimizer"]["state"].items():
            assert kept.keys() == two["optimizer"]["state"][i].keys()
            assert all(torch.equal(local(kept[key]), local(two["optimizer"]["state"][i][key])) for key in kept)


@pytest.fixture
def endless(text: Path) -> Iterator[Callable[[Path, int], subprocess.Popen[str]]]:
    """Starts a run on two ranks that would go on for hours, and waits until it has written so many records."""
    started: list[subprocess.Popen[str]] = []

    def start(out: Path, records: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *SMALL, "--nproc", "2", "--steps", "100000", "--text", str(text), "--out", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell's background jobs ignore Ctrl-C, and so would what they start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        deadline = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() or len(metrics(out)) < records:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.2)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and so have its ranks
            os.killpg(process.pid, signal.SIGKILL)


def running(group: int) -> list[str]:
    """Processes of a group that have not ended, as ``ps`` would tell, which not every machine has."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, of, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(of) == group and state != "Z":
                found.append((folder / "cmdline").read_text())
    return found


def check_all_ended(group: int) -> None:
    deadline = time.monotonic() + 10
    while running(group):
        assert time.monotonic() < deadline, f"still running: {running(group)}"
        time.sleep(0.1)


@pytest.mark.long
def test_ctrl_c_ends_all_ranks_at_once_and_keeps_the_records(tmp_path: Path, endless):
    out = tmp_path / "out"
    process = endless(out, records=5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted" in errors
    assert len(metrics(out)) >= 5
    assert (out / "loss.png").exists()
    check_all_ended(process.pid)


@pytest.mark.long
def test_a_terminated_launcher_takes_its_ranks_along(tmp_path: Path, endless):
    process = endless(tmp_path / "out", records=1)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    check_all_ended(process.pid)


@pytest.mark.full
def test_a_rank_that_dies_ends_the_run_with_an_error(tmp_path: Path, endless):
    process = endless(tmp_path / "out", records=1)
    children = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "spawn_main"], capture_output=True, text=True)
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing.txt"], "missing.txt can't be read: No such file"),
        (["--text", "EMPTY"], "is empty"),
        (["--text", "SHORT"], "must hold at least"),
        (["--text", "/dev/null"], "can't be read"),
        (
            ["--optimizer", "sgd"],
            "--optimizer must be of adamw, onebit-adam, zero-one-adam, onebit-lion, muon, onebit-muon, lamb, "
            "onebit-lamb, onebit-lamb-frozen, marsit, psgd, signsgd, ef-signsgd, ssdm, cascading, got 'sgd'",
        ),
        (["--compare", "adamw,sgd"], "--compare must be of"),
        (["--model", "huge"], "--model must be one of tiny"),
        (["--nproc", "0"], "whole number of 1 to 1,024"),
        (["--resume"], "--resume found no checkpoint"),
        (["texts"], "train takes flags alone, got 'texts'; files or folders to learn: --text PATH"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], message: str):
    (tmp_path / "empty").write_text("")
    (tmp_path / "short").write_text("too short")
    names = {"EMPTY": str(tmp_path / "empty"), "SHORT": str(tmp_path / "short")}
    status, _, told = train(*(names.get(a, a) for a in arguments), "--out", str(tmp_path / "out"))
    assert status == 2
    assert "Traceback" not in told
    assert len([line for line in told.splitlines() if message in line]) == 1
