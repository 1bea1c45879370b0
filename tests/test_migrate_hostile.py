"""``fusedonebit migrate``: whatever stands in a config, the script has only what a script may have."""

from __future__ import annotations

import ast
import copy
import io
import json
import math
import re
import tokenize
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedonebit
from fusedonebit.apps.cli import main

FOLDER = Path(__file__).parent / "data" / "deepspeed_configs"
CONFIGS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}

NODES = {
    *("Module", "Import", "ImportFrom", "alias", "FunctionDef", "arguments", "arg", "Return", "Continue"),
    *("Expr", "Assign", "If", "For", "With", "withitem", "IfExp", "Call", "keyword", "Attribute", "Name", "Constant"),
    *("Load", "Store", "Tuple", "Dict", "BinOp", "UnaryOp", "Compare", "USub", "Add", "Sub", "Mult", "Div"),
    *("FloorDiv", "Mod", "Pow", "Lt", "LtE", "GtE"),
}

TORCHS = (
    *("StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR"),
    *("CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR"),
)

CALLS = {
    *("OneBitAdam", "OneBitLamb", "ZeroOneAdam", "ZeroOneAdam.from_deepspeed", "DoublingVariance", "DoublingRounds"),
    *("MPITransport", "GradScaler", "dist.is_torchelastic_launched", "dist.init_process_group", "dist.is_initialized"),
    *("dist.get_world_size", "model.parameters", "model.half", "model.bfloat16", "next", "enumerate", "max", "min"),
    *("math.log", "math.cos", "math.floor", "torch.autocast", "torch.optim.lr_scheduler.LambdaLR", "loss_of"),
    *("(loss / ACCUMULATION_STEPS).backward", "scaler.scale(loss / ACCUMULATION_STEPS).backward", "scaler.scale"),
    *("optimizer.step", "optimizer.zero_grad", "scheduler.step", "scaler.step", "scaler.update", "scaler.get_scale"),
    *(f"torch.optim.lr_scheduler.{name}" for name in TORCHS),
}

NAMES = {
    *("torch", "dist", "math", "model", "batches", "loss_of", "optimizer", "scheduler", "scaler", "transport"),
    *("device", "number", "batch", "loss", "scale", "rate", "update", "step", "share", "progress"),
    *("enumerate", "max", "min", "next", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "DoublingVariance"),
    *("DoublingRounds", "MPITransport", "GradScaler", "RANKS", "MICRO_BATCH_SIZE", "ACCUMULATION_STEPS"),
    *("MAX_GRAD_NORM", "LR", "BETAS", "EPS", "WEIGHT_DECAY", "WARMUP_MIN_LR", "WARMUP_STEPS", "TOTAL_STEPS"),
}

ATTRIBUTES = {"float16", "bfloat16", "type", "device", "pi", "optim", "lr_scheduler", "world_size"}
ATTRIBUTES |= {call.rpartition(".")[2] for call in CALLS} | set(TORCHS)

KEYWORDS = {
    *("lr", "betas", "eps", "weight_decay", "freeze_step", "max_grad_norm", "master_weights", "process_group"),
    *("c_max", "c_min", "beta3", "r_max", "r_min", "r_threshold", "variance_policy", "sync_policy", "config"),
    *("scaler", "until", "after", "most", "start", "init_scale", "growth_interval", "variant", "scale_norm"),
    *("scale_scope", "precondition", "variance_floor", "guard", "bias_correction", "dead_coordinates"),
    *("step_size", "gamma", "milestones", "factor", "total_iters", "start_factor", "end_factor", "power", "T_max"),
    *("eta_min", "T_0", "T_mult", "base_lr", "max_lr", "step_size_up", "step_size_down", "mode", "scale_mode"),
    *("cycle_momentum", "base_momentum", "max_momentum", "total_steps", "epochs", "steps_per_epoch", "pct_start"),
    *("anneal_strategy", "div_factor", "final_div_factor", "three_phase"),
}

STRINGS = {
    *("l2", "global", "layer", "off", "keep", "deepspeed", "lr", "betas", "eps", "weight_decay", "var_freeze_step"),
    *("var_update_scaler", "local_step_scaler", "local_step_clipper", "triangular", "triangular2", "exp_range"),
    *("cycle", "iterations", "cos", "linear"),
}

MODULES = {
    *("math", "torch", "torch.distributed", "fusedonebit", "fusedonebit.comm.mpi"),
    *("fusedonebit.integrations.amp", "fusedonebit.optim.policies"),
}


def check(script: str) -> None:
    """Fails for whatever a script may not have."""
    assert tokenize.detect_encoding(io.BytesIO(script.encode()).readline)[0] == "utf-8"
    assert script.isascii()
    assert all(line.isprintable() for line in script.split("\n"))
    for node in ast.walk(ast.parse(script)):
        assert type(node).__name__ in NODES, ast.dump(node)
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) in CALLS, ast.unparse(node)
        elif isinstance(node, ast.Name):
            assert node.id in NAMES, node.id
        elif isinstance(node, ast.Attribute):
            assert node.attr in ATTRIBUTES, node.attr
        elif isinstance(node, ast.keyword):
            assert node.arg in KEYWORDS, node.arg
        elif isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= MODULES
        elif isinstance(node, ast.ImportFrom):
            assert node.module in MODULES
            assert {alias.name for alias in node.names} <= NAMES
        elif isinstance(node, ast.FunctionDef):
            assert node.name == "rate"
        elif isinstance(node, ast.Constant):
            check_constant(node.value)


def check_constant(value: Any) -> None:
    if isinstance(value, str):
        assert value in STRINGS, value
    else:
        assert value is None or (isinstance(value, (bool, int, float)) and math.isfinite(value)), value


# ---------------------------------------------------------------- hostile and damaged configs

CODE = "__import__('os').system('false')"
EVIL = (
    *(CODE, f"1\n{CODE}", f"x\r{CODE}", f"\x0c{CODE}", f"\u2028{CODE}", f"1): {CODE} #", "'''", '"', "\\", "\x00"),
    *("__class__", "__builtins__", "Optimizer", "LambdaLR", "ReduceLROnPlateau", "optimizer", "lr=1, **{}"),
    *("coding: utf-7", "\ud800", "+AAo-import os", "", "auto", "nan", "mpi", "StepLR", "OneBitLamb", "ZeroOneAdam"),
)
ODD = (None, True, False, 0, 1, 2, -1, 0.5, -0.0, 1e-320, 1e308, 10**15, 10**400, math.nan, math.inf, -math.inf)
LEAVES = st.one_of(st.sampled_from(EVIL), st.sampled_from(ODD), st.text(max_size=8), st.floats(), st.integers())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(EVIL), inner, max_size=2),
    max_leaves=4,
)
VALID: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [2, 3], "gamma": 0.5},
    "ConstantLR": {"factor": 0.5, "total_iters": 2},
    "LinearLR": {"start_factor": 0.5, "end_factor": 1.0, "total_iters": 2},
    "ExponentialLR": {"gamma": 0.5},
    "PolynomialLR": {"total_iters": 4, "power": 2},
    "CosineAnnealingLR": {"T_max": 4, "eta_min": 1e-4},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "CyclicLR": {"base_lr": 1e-4, "max_lr": 1e-3, "step_size_up": 2, "mode": "triangular2", "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 1e-2, "total_steps": 9, "anneal_strategy": "linear", "cycle_momentum": False},
    "WarmupLR": {"warmup_num_steps": 0, "warmup_max_lr": 1e-3},
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_num_steps": 1, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3},
    "LRRangeTest": {"lr_range_test_staircase": True, "lr_range_test_step_size": 1},
}
SCHEDULES = st.sampled_from(sorted(VALID)).map(lambda name: {"type": name, "params": dict(VALID[name])})
KNOWN = st.sampled_from(sorted({key for config in CONFIGS.values() for key in config}))


def blocks_of(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The config and every block in it."""
    return [values, *(block for value in values.values() if isinstance(value, dict) for block in blocks_of(value))]


@st.composite
def hostile(draw: st.DrawFn) -> dict[str, Any]:
    """One of DeepSpeed's documented configs, with one to four things in it changed."""
    values = copy.deepcopy(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))])
    for _ in range(draw(st.integers(1, 4))):
        block = draw(st.sampled_from(blocks_of(values)))
        keys = sorted(block)
        match draw(st.sampled_from(("value", "key", "name", "less", "scheduler"))):
            case "value" if keys:
                block[draw(st.sampled_from(keys))] = draw(VALUES)
            case "key":
                block[draw(st.sampled_from(EVIL) | st.text(max_size=8) | KNOWN)] = draw(VALUES)
            case "name" if keys:
                block[draw(st.sampled_from(EVIL))] = block.pop(draw(st.sampled_from(keys)))
            case "less" if keys:
                del block[draw(st.sampled_from(keys))]
            case "scheduler":
                values["scheduler"] = draw(SCHEDULES)
                if draw(st.booleans()):
                    params = values["scheduler"]["params"]
                    params[draw(st.sampled_from([*params, *EVIL, "last_epoch"]))] = draw(VALUES)
    return values


def test_script_of_any_config_is_made_of_what_a_script_may_have(tmp_path, capsys):
    file, seen = tmp_path / "ds_config.json", {"script": 0, "error": 0, "torch's schedule": 0}

    @settings(max_examples=300, database=None)
    @given(hostile(), st.sampled_from(["recommended", "deepspeed"]))
    def whatever_it_is(values: dict[str, Any], numerics: str) -> None:
        file.write_text(json.dumps(values))
        status = main(["migrate", str(file), "--numerics", numerics])
        told = capsys.readouterr()
        if status == 2:
            assert told.out == ""
            assert told.err.startswith("fusedonebit: ")
            assert told.err.count("\n") == 1
            assert told.err[:-1].isprintable()
        else:
            check(told.out)
            construct(told.out)
        seen["error" if status == 2 else "script"] += 1
        seen["torch's schedule"] += any(f"lr_scheduler.{name}(" in told.out for name in TORCHS)

    whatever_it_is()
    with capsys.disabled():
        print(f"\n300 hostile configs: {seen}")
    assert min(seen["script"], seen["error"]) >= 80
    assert seen["torch's schedule"] >= 5


def construct(script: str) -> dict[str, Any]:
    """Runs a script on no batch: whatever does not fit together, migrate has said before."""
    if "MPITransport" in script:
        return {}
    names = {"model": torch.nn.Linear(8, 4), "batches": [], "loss_of": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(script, "script.py", "exec"), names)
    return names


# ---------------------------------------------------------------- each way in by itself

ADAM = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 9}}


def migrate(config: Any, folder: Path, capsys: pytest.CaptureFixture, *flags: str) -> tuple[int, str, str]:
    """Status, script and error for a config, or its text."""
    file = folder / "ds_config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    status = main(["migrate", str(file), *flags])
    told = capsys.readouterr()
    return status, told.out, told.err


@pytest.mark.parametrize("key", [f"gamma=0.5); {CODE}; dict(x", "a b", "optimizer", "lr_lambda", "__class__"])
def test_key_that_is_no_argument_of_the_schedule_is_left_out_and_named(key, tmp_path, capsys):
    scheduler = {"type": "StepLR", "params": {"step_size": 2, key: 1}}
    status, script, _ = migrate({"optimizer": ADAM, "scheduler": scheduler}, tmp_path, capsys)
    assert status == 1
    assert "StepLR(optimizer, step_size=2)\n" in script
    assert ", 1 unknown." in script
    check(script)


@pytest.mark.parametrize("name", ["__class__", "Optimizer", "partial", "LambdaLR", "ReduceLROnPlateau", "SequentialLR"])
def test_name_that_is_no_schedule_of_plain_values_is_refused(name, tmp_path, capsys):
    status, script, error = migrate({"optimizer": ADAM, "scheduler": {"type": name}}, tmp_path, capsys)
    assert (status, script) == (2, "")
    assert re.fullmatch(rf'fusedonebit: .*scheduler.type must be one of WarmupLR, .*StepLR.*, got "{name}"\n', error)


@pytest.mark.parametrize("name", sorted(VALID))
def test_schedule_of_valid_arguments_is_carried_over_and_runs(name, tmp_path, capsys):
    config = {"optimizer": ADAM, "scheduler": {"type": name, "params": VALID[name]}}
    status, script, _ = migrate(config, tmp_path, capsys)
    assert status == 0
    check(script)
    names = construct(script)
    rates = set()
    for _ in range(5):
        rates.add(float(names["optimizer"].param_groups[0]["lr"]))
        names["optimizer"].step()
        names["scheduler"].step()
    assert len(rates) > 1, rates


@pytest.mark.parametrize("name", ["coding: utf-7 +AAo-import os", "a\nimport os", "a\rimport os", "\x1b[2J"])
def test_name_of_the_file_stays_in_its_comment(name, tmp_path, capsys):
    (tmp_path / name).write_text(json.dumps({"optimizer": ADAM}))
    assert main(["migrate", str(tmp_path / name)]) == 0
    check(capsys.readouterr().out)
    (tmp_path / name).write_text("{")
    assert main(["migrate", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error[:-1].isprintable()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("NaN", r"steps_per_print must be a finite number, got NaN"),
        ("-Infinity", r"steps_per_print must be a finite number, got -Infinity"),
        ("1e309", r"steps_per_print must be a finite number, got Infinity"),
        ('{"deep": [1, [1e999]]}', r"steps_per_print.deep must be a finite number, got Infinity"),
        ("[" * 40 + "]" * 40, "nested 33 deep"),
        ('{"a": ' * 4000 + "1" + "}" * 4000, "nested"),
        ("{" + ", ".join(f'"{i}": 1' for i in range(3000)) + "}", "more than 2,000 keys"),
        (" " * (1 << 20), "more than 1,048,576 bytes"),
        ("9" * 5000, "is not JSON that can be read"),
        ('"\x00"', "is not JSON: Invalid control character"),
    ],
)
def test_what_json_lets_through_and_no_config_has_is_one_line(text, says, tmp_path, capsys):
    config = json.dumps({"optimizer": ADAM, "steps_per_print": "here"}).replace('"here"', text)
    status, script, error = migrate(config, tmp_path, capsys)
    assert (status, script) == (2, "")
    assert re.fullmatch(rf"fusedonebit: .*{says}.*\n", error)


def test_a_device_without_an_end_is_not_read_to_it(capsys):
    assert main(["migrate", "/dev/zero"]) == 2
    assert "/dev/zero must be a DeepSpeed config, got more than 1,048,576 bytes" in capsys.readouterr().err


COMMENTED = """\ufeff// DeepSpeed's hjson takes all of this
{
    # a line
    "optimizer": {  /* a block
        comment, with "quotes" and // more */
        "type": "OneBitAdam",
        "params": {"lr": 1e-3, "freeze_step": 9, "betas": [0.8, 0.99,], /* last */ },
    },
    "tensorboard": {"output_path": "http://host/*no comment*/#nor here, ]"}, // last
}
"""


def test_comments_and_trailing_commas_are_read_as_deepspeed_does(tmp_path, capsys):
    status, script, error = migrate(COMMENTED, tmp_path, capsys)
    assert (status, error) == (0, "")
    assert "betas=(0.8, 0.99)," in script
    assert "freeze_step=8," in script
    assert "# All 5 keys" in script


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{\n/* a\nb */ "optimizer": x}', "Expecting value in line 3, column 19"),
        ('{\n/* no end\n"optimizer": {}}', "the comment that begins in line 2 has no end"),
        ('{"optimizer": {}} /*/', "the comment that begins in line 1 has no end"),
        ('{optimizer: {"type": "OneBitAdam"}}', "keys and strings need their quotes"),
        ('{"a": 1,, "b": 2}', "is not JSON: "),
        ('{"optimizer": "// no comment}', "is not JSON: Unterminated string"),
        ('{"a\\nb": 1, "a\\nb": 2}', r'the key "a\nb" stands twice'),
        ('{"\\' * 50_000, "is not JSON: "),
        ("/*" * 100_000, "the comment that begins in line 1 has no end"),
    ],
)
def test_what_is_no_json_even_without_comments_says_where(text, says, tmp_path, capsys):
    status, script, error = migrate(text, tmp_path, capsys)
    assert (status, script) == (2, "")
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("given_type", "ours"),
    [("AdamW", "OneBitAdam"), ("adam", "OneBitAdam"), ("Lamb", "OneBitLamb"), ("FusedLamb", "OneBitLamb")],
)
def test_uncompressed_optimizer_is_told_what_would_replace_it(given_type, ours, tmp_path, capsys):
    status, script, error = migrate({"optimizer": {"type": given_type, "params": {}}}, tmp_path, capsys)
    assert (status, script) == (2, "")
    assert "no migration" not in error
    assert f'got "{given_type}", which sends whole gradients; {ours} is the optimizer that sends bits instead' in error
    assert '"freeze_step"' in error


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"max_coeff": 0.1, "min_coeff": 0.5}, "max_coeff must be at least min_coeff (0.5), got 0.1"),
        (
            {"max_coeff": 0.001},
            "max_coeff must be at least min_coeff (0.01, which is DeepSpeed's default), got 0.001",
        ),
        ({"factor_min": 8}, "factor_max must be at least factor_min (8), got 4.0"),
        ({"factor_threshold": 1.5}, "factor_threshold must be a number in [0, 1), got 1.5"),
    ],
)
def test_bounds_that_contradict_each_other_are_told_by_migrate_not_by_the_script(params, says, tmp_path, capsys):
    status, script, error = migrate({"optimizer": {"type": "OneBitLamb", "params": params}}, tmp_path, capsys)
    assert (status, script) == (2, "")
    assert says in error


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, "initial_scale_power must be a whole number in"),
        ({"fp16": {"enabled": True, "loss_scale": 1e300}}, "loss_scale must be a number in [0, 2**127]"),
        ({"scheduler": {"type": "StepLR"}}, "what torch's StepLR takes: "),
        ({"scheduler": {"type": "OneCycleLR", "params": {"max_lr": 1.0}}}, "what torch's OneCycleLR takes: "),
        ({"scheduler": {"type": "CyclicLR", "params": {"mode": "x"}}}, "mode must be one of triangular, triangular2,"),
    ],
)
def test_values_that_the_script_would_fail_by_are_told_by_migrate(config, says, tmp_path, capsys):
    status, script, error = migrate({"optimizer": ADAM, **config}, tmp_path, capsys)
    assert (status, script) == (2, "")
    assert says in error


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupCosineLR"])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_warm_up_of_one_step_or_none_filled_in_for_auto_divides_by_nothing(kind, steps, tmp_path, capsys):
    params = {"warmup_num_steps": "auto", "total_num_steps": 9}
    _, script, _ = migrate({"optimizer": ADAM, "scheduler": {"type": kind, "params": params}}, tmp_path, capsys)
    assert "WARMUP_STEPS = 1000" in script
    names = construct(script.replace("WARMUP_STEPS = 1000", f"WARMUP_STEPS = {steps}"))
    expected = construct(script.replace("WARMUP_STEPS = 1000", "WARMUP_STEPS = 2"))  # DeepSpeed's least
    for _ in range(4):
        assert names["optimizer"].param_groups[0]["lr"] == expected["optimizer"].param_groups[0]["lr"]
        for each in (names, expected):
            each["optimizer"].step()
            each["scheduler"].step()


def test_0_1_adam_with_deepspeeds_numerics_takes_its_schedules_rate(tmp_path, capsys):
    optimizer = {"type": "ZeroOneAdam", "params": {"lr": 0.5, "var_freeze_step": 9}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_min_lr": 1e-3, "warmup_num_steps": 4}}
    config = {"optimizer": optimizer, "scheduler": scheduler}
    status, script, _ = migrate(config, tmp_path, capsys, "--numerics", "deepspeed")
    assert status == 0
    check(script)
    names = construct(script)
    group = names["optimizer"].param_groups[0]
    assert isinstance(names["optimizer"], fusedonebit.ZeroOneAdam)
    assert (group["initial_lr"], group["lr"]) == (2e-3, 1e-3)
    assert "'lr': 0.002,  # warmup_max_lr of the schedule, which replaces params.lr (0.5)" in script
