"""``fusedonebit migrate``: what a DeepSpeed config becomes, and that no key of it goes unexplained."""

from __future__ import annotations

import copy
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedonebit
from benchmarks import deepspeed_peer
from fusedonebit.apps.cli import main
from fusedonebit.apps.migrate.config import Config, Fate, InputError
from fusedonebit.apps.migrate.script import translate

FOLDER = Path(__file__).parent / "data" / "deepspeed_configs"
CONFIGS = sorted(path.stem for path in FOLDER.glob("*.json"))
RUNNABLE = [pytest.param(c, marks=pytest.mark.needs_mpi if c == "onebit_adam_mpi" else ()) for c in CONFIGS]
BATCHES = 1100  # one of these configs accumulates 1024 for an update
SCHEDULES = json.loads((FOLDER.parent / "deepspeed_schedules.json").read_text())
COUNTS = re.compile(r"# All (\d+) keys of .*")


def given(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def converted(values: dict[str, Any], numerics: str = "recommended") -> tuple[str, Config]:
    config = Config(values, "ds_config.json")
    return translate(config, numerics), config


def run(script: str, batches: int = BATCHES) -> dict[str, Any]:
    """Runs a script on a toy model in this process alone; returns its names."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 8), torch.randn(2, 4)

    def loss_of(model: torch.nn.Module, batch: int) -> torch.Tensor:
        return (model(x.to(next(model.parameters()).dtype)).float() - y).square().mean()

    names = {"model": torch.nn.Linear(8, 4), "batches": range(batches), "loss_of": loss_of}
    exec(compile(script, "script.py", "exec"), names)
    return names


# ---------------------------------------------------------------- DeepSpeed's documented configs


@pytest.mark.parametrize("numerics", ["recommended", "deepspeed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_documented_config_has_no_unexplained_key_and_is_a_program(name, numerics, capsys):
    status = main(["migrate", str(FOLDER / f"{name}.json"), "--numerics", numerics])
    script = capsys.readouterr().out
    _, config = converted(given(name), numerics)
    keys, fates = len(config.paths()), {fate: config.count(fate) for fate in Fate}
    print(f"{name}: {keys} keys, " + ", ".join(f"{fate.name.lower()} {count}" for fate, count in fates.items()))
    assert keys == sum(fates.values())
    assert fates[Fate.UNKNOWN] == 0
    assert status == 0
    assert all(entry.text for entry in config.entries)
    compile(script, name, "exec")


@pytest.mark.long(but=1)
@pytest.mark.parametrize("numerics", ["recommended", "deepspeed"])
@pytest.mark.parametrize("name", RUNNABLE)
def test_script_of_a_documented_config_trains(name, numerics):
    script, _ = converted(given(name), numerics)
    optimizer = run(script)["optimizer"]
    stats = optimizer.stats()
    print(f"{name}, {numerics}: {stats['step']} updates, {stats['skipped_steps']} skipped")
    assert stats["step"] + stats["skipped_steps"] >= 1
    assert type(optimizer).__name__.removeprefix("DeepSpeed") in script


def test_every_key_that_the_documentation_names_is_carried_or_explained_not_merely_swallowed():
    _, config = converted(given("every_documented_key"))
    explained = {entry.path for entry in config.entries if entry.fate is Fate.EXPLAINED}
    carried = {entry.path for entry in config.entries if entry.fate is Fate.CARRIED}
    assert {"bf16.enabled", "gradient_clipping", "optimizer.params.freeze_step", "scheduler.type"} <= carried
    assert {"aio", "tensorboard", "checkpoint", "zero_optimization.stage", "data_types.grad_accum_dtype"} <= explained
    assert set(given("every_documented_key")) == {path.partition(".")[0] for path in carried | explained}


# ---------------------------------------------------------------- what is carried over


@pytest.mark.parametrize("name", ["onebit_adam_bert", "onebit_lamb_tutorial"])
def test_deepspeed_numerics_are_those_of_from_deepspeed(name):
    names = run(converted(given(name), "deepspeed")[0], batches=0)
    mine = names["optimizer"]
    block = given(name)["optimizer"]
    other = type(mine).from_deepspeed([torch.nn.Parameter(torch.zeros(8))], block)
    allowed = {"max_grad_norm": 1.0, "master_weights": True}
    assert asdict(mine.options) == asdict(other.options) | allowed
    values = [{k: v for k, v in o.param_groups[0].items() if k != "params"} for o in (mine, other)]
    assert values[0] == values[1]


def test_recommended_numerics_are_the_defaults_with_the_configs_numbers():
    optimizer = run(converted(given("onebit_adam_bert"))[0], batches=0)["optimizer"]
    ours = fusedonebit.OneBitAdam([torch.nn.Parameter(torch.zeros(8))], freeze_step=22_999, max_grad_norm=1.0)
    assert optimizer.options == ours.options
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (4e-4, (0.9, 0.999), 1e-8, 0.01)


def test_in_fp32_deepspeed_numerics_have_a_scale_for_each_parameter():
    for name, scope in (("unit_test_onebit_adam_fp32", "layer"), ("unit_test_onebit_adam_fp16", "global")):
        assert run(converted(given(name), "deepspeed")[0], batches=0)["optimizer"].options.scale_scope == scope


@pytest.mark.parametrize(
    ("blocks", "numerics", "contains", "lacks"),
    [
        (
            {"fp16": {"enabled": True}},
            "recommended",
            ["torch.autocast(device, torch.float16)", "GradScaler("],
            ["half()"],
        ),
        (
            {"fp16": {"enabled": True}},
            "deepspeed",
            ["model.half()", "master_weights=True", "GradScaler("],
            ["autocast"],
        ),
        (
            {"bf16": {"enabled": True}},
            "recommended",
            ["torch.autocast(device, torch.bfloat16)"],
            ["Scaler", "bfloat16()"],
        ),
        ({"bf16": {"enabled": True}}, "deepspeed", ["model.bfloat16()", "master_weights=True"], ["Scaler", "autocast"]),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "recommended", ["torch.float16)", "GradScaler(device)"], []),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float16"}},
            "recommended",
            ["torch.float16)", "GradScaler"],
            [],
        ),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "recommended", ["scaler.update(128.0)"], ["growth_interval"]),
        ({"fp16": {"enabled": False}}, "deepspeed", [], ["half()", "Scaler", "autocast", "master_weights"]),
        ({"gradient_clipping": 0.5}, "recommended", ["max_grad_norm=0.5,"], []),
        ({"gradient_clipping": 0}, "recommended", [], ["max_grad_norm"]),
        ({"gradient_accumulation_steps": 3}, "recommended", ["ACCUMULATION_STEPS = 3"], []),
        ({"zero_optimization": {"stage": 2}}, "recommended", ["zero_optimization.stage: state is not sharded"], []),
        ({"gradient_allreduce_op": "sum"}, "recommended", ["multiply the loss by the number of ranks"], []),
    ],
)
def test_block_becomes(blocks, numerics, contains, lacks):
    script, _ = converted({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 9}}} | blocks, numerics)
    code = "\n".join(line.partition("#")[0] for line in script.splitlines())
    for text in contains:
        assert text in script
    for text in lacks:
        assert text not in code
    assert run(script, batches=3)["optimizer"].stats()["step"] >= 1


def test_auto_becomes_a_constant_that_names_the_trainers_argument():
    script, config = converted(given("hugging_face_auto"))
    for line in (
        'LR = 5e-5  # "auto": what TrainingArguments had as learning_rate',
        "TOTAL_STEPS = 10000",
        "MICRO_BATCH_SIZE = 8",
    ):
        assert line in script
    assert config.count(Fate.FILL_IN) == 11
    assert 'fp16.enabled: "auto": an argument of Hugging Face\'s Trainer; taken as off' in script


def test_misspelt_key_is_unknown_and_the_status_says_so(tmp_path, capsys):
    """So it stands in a config of DeepSpeed's own tests."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(given("unit_test_onebit_adam_pipeline") | {"grandient_accumulation_steps": 1}))
    assert main(["migrate", str(file)]) == 1
    out = capsys.readouterr().out
    assert "1 unknown" in out
    assert "grandient_accumulation_steps: not a key of DeepSpeed that this knows: did you mean gradient_accu" in out
    file.write_text(json.dumps({"type": "OneBitAdam", "params": {"lr": 1e-3, "zzz": {"deep": 1}}}))
    assert main(["migrate", str(file)]) == 1
    assert "optimizer.params.zzz.deep: not a key" in capsys.readouterr().out


def test_standard_input_is_read(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(given("reference_onebit_adam"))))
    assert main(["migrate", "-"]) == 0
    assert "freeze_step=399," in capsys.readouterr().out


# ---------------------------------------------------------------- schedules


def schedule(name: str) -> dict[str, Any]:
    kind, params = SCHEDULES[name]["config"]
    return {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.002}}, "scheduler": {"type": kind, "params": params}}


def rates(name: str, count: int) -> list[float]:
    names = run(converted(schedule(name))[0], batches=0)
    seen = []
    for _ in range(count):
        seen.append(names["optimizer"].param_groups[0]["lr"])
        names["optimizer"].step()
        names["scheduler"].step()
    return seen


@pytest.mark.long(but=8)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_has_deepspeeds_learning_rate_in_every_step(name):
    recorded = SCHEDULES[name]["rates"]
    mine = rates(name, len(recorded))
    worst = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(mine, recorded, strict=True))
    print(f"{name}: largest relative error of the learning rate over {len(recorded)} steps: {worst:.1e} (limit 1e-12)")
    assert worst <= 1e-12


@pytest.mark.skipif(not deepspeed_peer.available(), reason=deepspeed_peer.MISSING)
@pytest.mark.parametrize("name", SCHEDULES)
def test_recorded_learning_rates_are_deepspeeds(name):
    assert deepspeed_rates(*SCHEDULES[name]["config"], count=len(SCHEDULES[name]["rates"])) == SCHEDULES[name]["rates"]


def deepspeed_rates(kind: str, params: dict[str, Any], count: int) -> list[float]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=0.002)
    theirs, seen = getattr(lr_schedules, kind)(optimizer, **params), []
    for _ in range(count):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        theirs.step()
    return seen


def test_torchs_own_schedules_go_through():
    config = schedule("WarmupLR") | {"scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}}
    names = run(converted(config)[0], batches=4)
    assert names["optimizer"].param_groups[0]["lr"] == pytest.approx(0.002 / 4)


def test_deepspeeds_numerics_of_0_1_adam_are_those_that_reproduce_the_recordings():
    params = {"lr": 1e-2, "weight_decay": 0.1, "var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 4}
    block = {"type": "ZeroOneAdam", "params": params | {"local_step_clipper": 4}}
    script, _ = converted({"optimizer": block}, "deepspeed")
    names = run(script, batches=14)
    torch.manual_seed(0)
    x, y = torch.randn(2, 8), torch.randn(2, 4)
    model = torch.nn.Linear(8, 4)
    theirs = fusedonebit.ZeroOneAdam.from_deepspeed(model.parameters(), block, scale_scope="layer")
    for _ in range(14):
        theirs.zero_grad()
        (model(x) - y).square().mean().backward()
        theirs.step()
    assert type(names["optimizer"]) is type(theirs)
    for p, q in zip(names["model"].parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
    ours, _ = converted({"optimizer": block})
    assert "DoublingRounds(after=6, scaler=4, most=4),  # in rounds; DeepSpeed counts steps" in ours


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"is not JSON: Expecting value in line 1, column 1; keys and strings need their quotes"),
        ('{"a": 1, "a": 2}', r'the key "a" stands twice'),
        ("[1]", "must hold a JSON object, DeepSpeed's config, got list"),
        ("[" * 100_000, "is not JSON that can be read"),
        ("{}", 'has no "optimizer" block'),
        ('{"optimizer": 3}', r"optimizer must be a block \{\.\.\.\}, got 3"),
        (
            '{"optimizer": {"type": "Adam", "params": {}}}',
            'must be one of OneBitAdam, OneBitLamb, ZeroOneAdam, got "Adam", which sends whole gradients',
        ),
        ('{"optimizer": {"params": {}}}', "optimizer.type must be one of .*, got null"),
    ],
)
def test_bad_file_gets_one_line_and_status_2(text, says, tmp_path, capsys):
    file = tmp_path / "ds_config.json"
    file.write_text(text)
    assert main(["migrate", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(rf"fusedonebit: .*{says}.*\n", captured.err)


def test_missing_file_and_binary_file_are_named(tmp_path, capsys):
    assert main(["migrate", str(tmp_path / "none.json")]) == 2
    assert "none.json can't be read: No such file" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert main(["migrate", str(tmp_path / "binary")]) == 2
    assert "it is not text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("optimizer.params.lr", "1e-3", r'lr must be a number > 0, got "1e-3"'),
        ("optimizer.params.lr", -1, "lr must be a number > 0, got -1"),
        ("optimizer.params.betas", [0.9], r"betas must be a list of two numbers in \[0, 1\), got \[0.9\]"),
        ("optimizer.params.freeze_step", 1, "freeze_step must be a whole number >= 2, got 1"),
        ("optimizer.params.freeze_step", "auto", r"freeze_step must be .*, got \"auto\" \(no argument of Hugging Face"),
        ("optimizer.params.amsgrad", True, "amsgrad must be false"),
        ("optimizer.params", [], r"optimizer.params must be a block"),
        ("gradient_clipping", True, "gradient_clipping must be a number >= 0, got true"),
        ("fp16", {"enabled": 1}, "fp16.enabled must be true, false"),
        ("fp16", {"enabled": True, "loss_scale": "x"}, "fp16.loss_scale must be a number in"),
        ("bf16", {"enabled": True}, "only one of fp16, bf16, .* can be enabled, got fp16 and bf16"),
        ("torch_autocast", {"enabled": True, "dtype": "int8"}, "(dtype must be|only one of)"),
        (
            "scheduler",
            {"type": "NoSuchLR"},
            "scheduler.type must be one of WarmupLR, .*, or of torch.optim.lr_scheduler StepLR",
        ),
        ("scheduler", {"type": "WarmupDecayLR", "params": {}}, "total_num_steps must be a whole number >= 1, got null"),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}}, "warmup_max_lr must be a number > 0"),
        ("zero_optimization", {"stage": "two"}, "zero_optimization.stage must be a whole number >= 0"),
        ("gradient_allreduce_op", "max", 'gradient_allreduce_op must be "mean" or "sum", got "max"'),
    ],
)
def test_bad_value_names_key_value_and_expectation(path, value, says):
    values = given("onebit_adam_bert")
    put(values, path, value)
    with pytest.raises(InputError, match=says):
        converted(values)


def put(values: dict[str, Any], path: str, value: Any) -> None:
    *blocks, key = path.split(".")
    for block in blocks:
        values = values[block]
    values[key] = value


def damaged() -> Iterator[dict[str, Any]]:
    """Every config, with every key, block and name in it replaced by something odd."""
    odd = [None, True, -1, 0, 1e308, 10**400, "", "auto", "a\nb", [], [None], {}, {"x": {"y": []}}]
    for name in ("onebit_adam_bert", "onebit_lamb_tutorial", "hugging_face_auto", "zero_one_adam_tutorial"):
        values = given(name)
        paths = {path for whole in Config(values, "").paths() for path in _with_blocks(whole)}
        for path in sorted(paths):
            for value in odd:
                changed = copy.deepcopy(values)
                put(changed, path, value)
                yield changed


def _with_blocks(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def test_whatever_stands_in_a_config_is_one_line_of_error_or_a_program():
    programs, errors = 0, []
    for values in damaged():
        try:
            script, config = converted(values)
        except InputError as error:
            errors.append(str(error))
            continue
        compile(script, "script.py", "exec")
        assert sum(config.count(fate) for fate in Fate) == len(config.paths())
        programs += 1
    print(f"{programs} programs, {len(errors)} errors of one line")
    assert not any("\n" in error for error in errors)
    assert programs > 300
    assert len(errors) > 300
