"""What a run leaves behind: ``fusedonebit.Recorder``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from observe import train
from optimizers import by_name
from ranks import run_ranks, simulate
from torch.nn import Parameter

import fusedonebit
from fusedonebit import Faults, OneBitAdam, OneBitLamb
from fusedonebit.comm import Transport
from fusedonebit.integrations.recording import FORMAT, Recorder


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def small(kind: Any = OneBitAdam, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    named = [(name, Parameter(torch.randn(n, generator=generator))) for name, n in (("embed", 600), ("head.bias", 7))]
    return kind(named, lr=1e-3, **options)


def take_steps(optimizer: Any, steps: range, recorder: Recorder, rank: int = 0) -> None:
    for step in steps:
        train(optimizer, rank, [step])
        recorder.log(step, loss=torch.tensor(1.0 / step))


def record_a_run(rank: int, world_size: int, folder: str, name: str) -> bool:
    kind = {"adam": by_name(OneBitAdam), "lamb": by_name(OneBitLamb)}[name]
    optimizer = small(kind, freeze_step=3, guard="off")
    mine = Path(folder) / f"of-rank-{rank}"  # one folder would not show who wrote
    with Recorder(mine, optimizer, name=name, every=1, layers_every=2, settings={"batch": 4}) as recorder:
        take_steps(optimizer, range(1, 9), recorder, rank)
    return mine.exists()


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_rank_0_alone_writes_steps_signals_layers_and_the_start(tmp_path: Path, name: str):
    assert run_ranks(record_a_run, 2, str(tmp_path), name) == [True, False]
    records = lines(tmp_path / "of-rank-0")
    assert [r["step"] for r in records] == list(range(1, 9))
    assert [r["phase"] for r in records] == ["warmup"] * 3 + ["compression"] * 5
    assert all(r["loss"] == pytest.approx(1 / r["step"]) and r["lr"] == 1e-3 for r in records)
    sent = records[-1]["bytes_total"] - records[0]["bytes_total"]
    assert sent == sum(r["bytes_step"] for r in records[1:]) > 0
    for r in records:
        compressed = r["phase"] == "compression"
        assert ("residual_over_momentum" in r) == compressed
    assert 0 < records[-1]["residual_over_momentum"] < 100
    seen = {r["step"]: r["layers"] for r in records if "layers" in r}
    assert list(seen) == ([4, 6, 8] if name == "adam" else [2, 4, 6, 8])
    assert seen[8]["name"] == ["embed", "head.bias"]
    assert all(x > 0 for x in seen[8]["residual_over_momentum"])
    assert ("ratio" in seen[8]) == (name == "lamb")
    (start,) = lines(tmp_path / "of-rank-0", "starts.jsonl")
    assert (start["optimizer"], start["first_step"], start["world_size"], start["format"]) == (name, 1, 2, FORMAT)
    assert start["settings"] == {"batch": 4}
    assert start["options"]["freeze_step"] == 3
    assert start["groups"][0]["betas"] == [0.9, 0.999]
    assert start["parameters"] == 607
    assert set(start["versions"]) == {"python", "torch", "triton", "fusedonebit"}
    assert "freeze_step: 3" in start["repr"]
    assert start["date"].endswith("+00:00")


def test_of_ranks_without_a_process_group_rank_0_alone_writes(tmp_path: Path):
    def run(rank: int, transport: Transport) -> None:
        optimizer = small(freeze_step=2, process_group=transport)
        with Recorder(tmp_path / f"of-rank-{rank}", optimizer, every=1) as recorder:
            take_steps(optimizer, range(1, 3), recorder, rank)

    simulate(run, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["of-rank-0"]


def test_a_resumed_run_repeats_no_step_and_counts_bytes_on(tmp_path: Path):
    optimizer = small(freeze_step=2)
    other = Recorder(tmp_path, optimizer, name="other", every=1)
    other.log(1, loss=5.0)
    other.close()
    first = Recorder(tmp_path, optimizer, name="mine", every=1)
    take_steps(optimizer, range(1, 9), first)
    first.close()
    path = tmp_path / "metrics.jsonl"
    text = path.read_text().replace('"bytes_total": 0', '"bytes_total": 700')
    path.write_text(text + '{"optimizer": "mine", "step": 9, "lo')  # killed while it wrote
    again = small(freeze_step=2)
    with Recorder(tmp_path, again, name="mine", every=1) as second:
        take_steps(again, range(6, 11), second)
    mine = [r for r in lines(tmp_path) if r["optimizer"] == "mine"]
    assert [r["step"] for r in mine] == list(range(1, 11))
    assert {r["bytes_total"] for r in mine} == {700}  # alone nothing is sent
    assert [r["step"] for r in lines(tmp_path) if r["optimizer"] == "other"] == [1]
    assert [s["first_step"] for s in lines(tmp_path, "starts.jsonl") if s["optimizer"] == "mine"] == [1, 6]


def test_a_run_that_begins_anew_or_goes_back_replaces_records(tmp_path: Path):
    for loss, steps, starts in ((1.0, (1, 2, 3), [1]), (2.0, (1, 2, 3, 2, 3, 4), [1, 2]), (3.0, (1, 2), [1])):
        with Recorder(tmp_path, small(freeze_step=2), every=1) as recorder:
            for step in steps:
                recorder.log(step, loss=loss)
        assert [(r["step"], r["loss"]) for r in lines(tmp_path)] == [(n, loss) for n in range(1, steps[-1] + 1)]
        assert [s["first_step"] for s in lines(tmp_path, "starts.jsonl")] == starts


def test_every_nth_step_held_out_losses_and_the_last_are_kept(tmp_path: Path):
    optimizer = small(freeze_step=2)
    with Recorder(tmp_path, optimizer, every=10) as recorder:
        told = [recorder.log(i, loss=i, held_out_loss=0.5 if i == 14 else None, note="x") for i in range(1, 36)]
    assert [r["step"] for r in lines(tmp_path)] == [10, 14, 20, 30, 35]
    assert [r.get("held_out_loss") for r in lines(tmp_path)] == [None, 0.5, None, None, None]
    assert told[13] == lines(tmp_path)[1]
    assert told[12] is None


def test_layers_are_recorded_ever_more_rarely(tmp_path: Path):
    optimizer = small(OneBitLamb, freeze_step=2)
    recorder = Recorder(tmp_path, optimizer, every=1)
    seen = [step for step in range(1, 100_001) if recorder._looks_at_layers(step)]
    assert seen[:5] == [1, 2, 3, 4, 5]
    assert seen[-1] > 94_000
    assert 100 <= len(seen) <= 200


def test_nonfinite_losses_are_kept_and_lines_are_there_at_once(tmp_path: Path):
    optimizer = small(freeze_step=2)
    recorder = Recorder(tmp_path, optimizer, every=1)
    recorder.log(1, loss=torch.tensor(math.nan))
    recorder.log(2, loss=math.inf)
    assert [str(r["loss"]) for r in lines(tmp_path)] == ["nan", "inf"]  # not closed yet: a run may be killed
    recorder.close()


def test_any_optimizer_of_torch_can_be_recorded(tmp_path: Path):
    p = Parameter(torch.ones(3))
    with Recorder(tmp_path, torch.optim.AdamW([p], lr=0.5), every=1) as recorder:
        recorder.log(1, loss=2.0)
    assert lines(tmp_path) == [{"optimizer": "AdamW", "step": 1, "loss": 2.0, "lr": 0.5}]
    assert lines(tmp_path, "starts.jsonl")[0]["class"] == "AdamW"


def test_what_makes_no_sense_is_refused(tmp_path: Path):
    optimizer = small(freeze_step=2)
    for name, bad in (("every", 0), ("every", 2.5), ("layers_every", -1), ("every", True)):
        with pytest.raises(ValueError, match=f"{name} must be an int >= "):
            Recorder(tmp_path, optimizer, **{name: bad})
    recorder = Recorder(tmp_path, optimizer)
    with pytest.raises(ValueError, match=r"step must be an int >= 0, got 1\.5"):
        recorder.log(1.5)
    recorder.close()
    with pytest.raises(ValueError, match="is closed; make a new one"):
        recorder.log(2)


def test_after_an_error_the_optimizer_is_not_asked_again(tmp_path: Path):
    recorder = Recorder(tmp_path, small(freeze_step=2), every=10)
    recorder.log(1, loss=1.0)
    recorder.__exit__(KeyError, KeyError(), None)
    assert lines(tmp_path) == []


def test_stats_go_to_tensorboard_and_wandb_by_one_line():
    p = Parameter(torch.randn(300))
    optimizer = OneBitAdam([p], freeze_step=1, faults=Faults(guard="off"), max_grad_norm=1.0)
    told = []
    for _ in range(2):
        p.grad = torch.randn(300)
        optimizer.step()
        told.append(fusedonebit.recording.scalars(optimizer))
    stats = optimizer.stats()
    assert [numbers["fusedonebit/compressed"] for numbers in told] == [0.0, 1.0]
    assert told[1]["fusedonebit/step"] == 2.0
    assert told[1]["fusedonebit/grad_norm"] == stats["grad_norm"] > 0
    assert all(type(value) is float for value in told[1].values())
    left_out = {key for key in stats if f"fusedonebit/{key}" not in told[1]}
    assert left_out == {key for key, value in stats.items() if value is None or isinstance(value, (str, list))}
    with pytest.raises(TypeError, match=r"optimizer must have stats\(\), as this package's have, got SGD"):
        fusedonebit.recording.scalars(torch.optim.SGD([p], 1.0))
