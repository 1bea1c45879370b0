"""The registry of benchmarks: every case runs, small and on the CPU, and records what it says."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks

from benchmarks import deepspeed_peer, optimizers, page, registry
from benchmarks.__main__ import RESULTS, main
from benchmarks.kernels import KERNELS
from benchmarks.pages import PERFORMANCE
from benchmarks.registry import CASES, DRY_RUN, Case, Report, Table
from benchmarks.timing import alternate, summary

TINY = ["--device", "cpu", "--numel", "20000", "--rounds", "2"]
SLOW = ("averaging", "compiled", "demo", "host", "ranks")  # they start processes or a compiler
DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture
def recorded(folder, monkeypatch) -> Callable[[str], dict]:
    """Runs a case, once for all tests; without DeepSpeed, whose import takes longer than all of them, and compilers."""
    monkeypatch.setattr(deepspeed_peer, "available", lambda: False)
    monkeypatch.setattr(optimizers, "backends", lambda device: ["triton" if device.type == "cuda" else "plain"])

    def run(name: str) -> dict:
        path = folder / f"{'dry-run-' if CASES[name].where == 'cuda' else ''}{name}.json"
        if not path.exists():
            assert main([*TINY, name, "--out", str(folder)]) == 0
        return json.loads(path.read_text())

    return run


@pytest.mark.long(but=1, full=True)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in SLOW else n for n in sorted(CASES)])
def test_every_case_runs_and_records_rows_and_facts(name, recorded):
    record = recorded(name)
    assert (record["case"], record["complete"]) == (name, True)
    assert all(table["rows"] for table in record["tables"])
    facts = record["about"]
    assert facts["torch"] == torch.__version__
    assert {"device", "cpu_cores", "triton", "backend", "commit", "date", "load"} <= facts.keys()
    assert facts["dry_run"] == (CASES[name].where == "cuda")
    assert all(table["title"].startswith(DRY_RUN) == facts["dry_run"] for table in record["tables"])
    for row in (row for table in record["tables"] for row in table["rows"] if "low" in row):
        assert row["low"] <= row["ms"] <= row["high"]


def test_records_name_no_machine_and_no_folder(recorded):
    text = json.dumps(recorded("kernels"))
    assert platform.node() not in text
    assert str(Path.cwd()) not in text


def test_the_list_says_where_each_case_runs_and_what_it_measures(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[case.name, case.where] for case in CASES.values()]
    assert all(case.about.endswith(".") for case in CASES.values())


def test_an_unknown_case_is_an_error_that_names_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["step", "speed"])
    told = capsys.readouterr().err
    assert "unknown case 'speed'" in told
    assert all(name in told for name in CASES)


def test_a_case_that_fails_says_so_and_keeps_what_it_measured(tmp_path, monkeypatch, capsys):
    def breaks(report: Report) -> None:
        report.table("half of it", {"n": ">4"}).add(n=1)
        raise OSError("on purpose")

    monkeypatch.setitem(CASES, "step-time", Case("step-time", "both", breaks))
    assert main([*TINY, "step-time", "kernels", "--out", str(tmp_path)]) == 1
    record = json.loads((tmp_path / "step-time.json").read_text())
    assert (record["complete"], record["tables"][0]["rows"]) == (False, [{"n": 1}])
    assert "FAILED: OSError" in record["notes"][0]
    assert "on purpose" in capsys.readouterr().err
    assert (tmp_path / "dry-run-kernels.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_its_cases_are_refused_but_for_dry_runs(capsys):
    for arguments in (["--device", "cuda"], ["kernels"], ["--device", "cpu", "kernels"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "--device cpu --numel 100000 is a dry run" in capsys.readouterr().err


def test_a_dry_run_is_not_written_to_the_results():
    with pytest.raises(SystemExit):
        main([*TINY, "kernels", "--out", str(RESULTS / "gpu")])


def test_every_kernel_of_the_table_is_measured(recorded):
    rows = recorded("kernels")["tables"][0]["rows"]
    assert [row["kernel"] for row in rows] == [kernel.name for kernel in KERNELS]
    assert {"server_reduce, W=2", "server_reduce, W=8", "server_reduce, W=64"} <= {row["kernel"] for row in rows}


@pytest.mark.long
def test_a_gpus_limits_are_listed_and_a_dry_run_judges_none(recorded):
    tables = recorded("steps-340M")["tables"]
    limits = next(table for table in tables if table["title"].endswith("Goals"))
    told = [row["limit"] for row in limits["rows"]]
    assert told == ["<= 0.9, not judged", "<= 0.85, not judged"]


def test_limits_say_pass_or_fail():
    report = Report(torch.device("cpu"))
    assert report.limit(3.9, at_most=4.0) == "<= 4: PASS"
    assert report.limit(4.1, at_most=4.0) == "<= 4: FAIL"
    assert report.limit(0.9, at_least=0.85) == ">= 0.85: PASS"
    assert report.limit(0.8, at_least=0.85) == ">= 0.85: FAIL"
    assert report.limit(0.8) is None
    assert Report(torch.device("cpu"), numel=100).limit(3.9, at_most=4.0) == "<= 4, not judged"


def test_a_table_prints_what_is_unknown_as_a_dash(capsys):
    Table("title", {"name": "<6", "n": ">6,", "x": ">6.2f"}).add(name="a", n=1234)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "name         n       x",
        "a        1,234       -",
    ]


def test_peers_take_turns():
    calls: list[str] = []
    alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=1)
    assert calls == ["a", "b"] * 4
    timing = summary([3.0, 1.0, 2.0])
    assert (timing.low, timing.median, timing.high) == (1.0, 2.0, 3.0)


def test_where_deepspeed_is_missing_a_line_says_how_to_get_it(recorded):
    assert recorded("step")["notes"] == [deepspeed_peer.MISSING]
    assert "make peers" in deepspeed_peer.MISSING
    assert deepspeed_peer.VERSION in (Path(__file__).parents[1] / "Makefile").read_text()


def test_the_stand_in_for_cupy_packs_as_numpy_does():
    bits = torch.randint(0, 2, (4096,), dtype=torch.uint8)
    cupy = deepspeed_peer._cupy(torch.device("cpu"))
    packed = cupy.packbits(deepspeed_peer._Array(bits))
    assert np.array_equal(packed.tensor.numpy(), np.packbits(bits.numpy()))
    assert torch.equal(cupy.unpackbits(packed).tensor, bits)


def replay(rank: int, world_size: int) -> float:
    recording = np.load(DATA / "deepspeed_adam_flat_w2_open.npz")
    config = json.loads(str(recording["config"]))
    p = torch.nn.Parameter(torch.from_numpy(recording["init"].copy()))
    options = {key: config[key] for key in ("lr", "betas", "eps", "weight_decay", "freeze_step")}
    optimizer = deepspeed_peer.construct("OnebitAdam", [p], **options)
    p.grad = torch.zeros_like(p)
    optimizer.step()  # its rehearsal, which its engine calls at the start
    error = 0.0
    for step in range(config["steps"]):
        p.grad = torch.from_numpy(recording["grads"][rank, step].copy())
        if optimizer.deepspeed.enable_backward_allreduce:  # its engine averages until it is told that it need not
            torch.distributed.all_reduce(p.grad)
            p.grad /= world_size
        optimizer.step()
        error = max(error, float(np.abs(p.detach().numpy() - recording["params"][step]).max()))
    return error


@pytest.mark.full
@pytest.mark.skipif(not deepspeed_peer.available(), reason=deepspeed_peer.MISSING)
def test_deepspeeds_own_step_on_gloo_is_what_was_recorded_of_it():
    assert max(run_ranks(replay, 2)) <= 1e-6


def test_the_page_of_performance_says_what_was_recorded():
    text = PERFORMANCE.read_text()
    found = {row["optimizer"]: row["x AdamW(fused)"] for row in page.records()["ranks"]["tables"][0]["rows"]}
    assert f"takes {found['OneBitAdam, native']:.2f} times fused AdamW's" in text
    assert f"(`OneBitLamb` {found['OneBitLamb, native']:.2f})" in text
    assert f"{found['OneBitAdam, plain']:.0f} and {found['OneBitLamb, plain']:.0f} times" in text


def test_recorded_results_are_of_cpu_cases_and_no_dry_runs():
    for record in page.records().values():
        assert not record["about"]["dry_run"]
        assert registry.CASES[record["case"]].where in ("cpu", "both")
