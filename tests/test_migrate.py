"""``fusedonebit migrate`` explains every key of a DeepSpeed config."""

from __future__ import annotations

import copy
import io
import json
import re
import types
from typing import Any

import pytest
import torch
from deepspeed_configs import ADAM, CONFIGS, VALID
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from fusedonebit.apps.cli import main
from fusedonebit.deepspeed.migrate.calls import LAMB
from fusedonebit.deepspeed.migrate.deepspeed_config import Config, Fate
from fusedonebit.deepspeed.migrate.translate import translate

pytestmark = pytest.mark.filterwarnings("ignore:step.. found no gradient")  # of schedules alone

OURS = "# Our numerics, which hold where DeepSpeed's diverge:\n"
THEIRS = "# DeepSpeed's own formulas:\n"
AUTO = {"learning_rate": 1e-4, "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-8, "weight_decay": 0.1}
AUTO |= {"max_grad_norm": 1.0}


def pasted(printed: str, after: str) -> str:
    """What a user copies: the lines of one call."""
    return printed[printed.index(after) :].partition("\n\n")[0]


def check_refused(ended: tuple[int, str, str], says: str) -> None:
    """A command has said in one line what is wrong, and nothing else."""
    status, printed, error = ended
    assert (status, printed) == (2, "")
    assert re.fullmatch(rf"fusedonebit: .*{says}.*\n", error)


def call(printed: str, after: str) -> Any:
    """What a printed call makes."""
    names: dict[str, Any] = {"model": torch.nn.Linear(8, 4), "args": types.SimpleNamespace(**AUTO)}
    exec(pasted(printed, after), names)
    return names["optimizer"]


# ---------------------------------------------------------------- DeepSpeed's documented configs


@pytest.mark.parametrize("name", CONFIGS)
def test_documented_config_has_no_unexplained_key(name, migrate):
    status, printed, _ = migrate(CONFIGS[name])
    config = Config(CONFIGS[name], "ds_config.json")
    calls = translate(config)
    keys, fates = len(config.paths()), {fate: config.count(fate) for fate in Fate}
    print(f"{name}: {keys} keys, " + ", ".join(f"{fate.name.lower()} {count}" for fate, count in fates.items()))
    assert keys == sum(fates.values())
    assert fates[Fate.UNKNOWN] == 0
    assert status == 0
    assert all(entry.text for entry in config.entries)
    assert "\n".join(calls) in printed


def over_mpi(name: str) -> bool:
    return '"mpi"' in json.dumps(CONFIGS[name])


@pytest.mark.parametrize("name", [name for name in CONFIGS if not over_mpi(name)])
def test_both_calls_make_an_optimizer_with_the_configs_numbers(name, migrate):
    whole = CONFIGS[name] if "optimizer" in CONFIGS[name] else {"optimizer": CONFIGS[name]}
    params = whole["optimizer"]["params"]
    filled_in = {"lr": AUTO["learning_rate"], "betas": (AUTO["adam_beta1"], AUTO["adam_beta2"])} | AUTO
    expected = {"weight_decay": 0.0, "betas": (0.9, 0.999)} | params  # DeepSpeed's defaults, not ours
    expected |= {key: filled_in[key] for key, value in params.items() if value == "auto" and key in filled_in}
    clipping = whole.get("gradient_clipping") or params.get("max_grad_norm") or None
    _, printed, _ = migrate(CONFIGS[name])
    for optimizer in (call(printed, OURS), call(printed, THEIRS)):
        group = optimizer.param_groups[0]
        assert group["lr"] == expected["lr"]
        assert group["weight_decay"] == expected["weight_decay"]
        assert tuple(group["betas"]) == tuple(expected["betas"])
        assert optimizer.frame.options.max_grad_norm == (AUTO["max_grad_norm"] if clipping == "auto" else clipping)
        if "freeze_step" in params:
            assert optimizer.frame.options.freeze_step == params["freeze_step"] - 1
        for key, ours in LAMB.items():
            if key in params:
                assert group[ours] == params[key]
        assert type(optimizer).__name__.removeprefix("DeepSpeed") in printed


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", [name for name in CONFIGS if not over_mpi(name)])
def test_both_calls_run_as_pasted_in_a_fresh_process(name, migrate, torch_alone, tmp_path):
    _, printed, _ = migrate(CONFIGS[name])
    at_hand = f"import types, torch\nmodel, args = torch.nn.Linear(8, 4), types.SimpleNamespace(**{AUTO!r})\n"
    for marker in (OURS, THEIRS):
        torch_alone.run(at_hand + pasted(printed, marker), tmp_path)


@pytest.mark.parametrize("name", [name for name in CONFIGS if over_mpi(name)])
def test_calls_over_mpi_import_their_transport(name, migrate):
    _, printed, _ = migrate(CONFIGS[name])
    for marker in (OURS, THEIRS):
        lines = pasted(printed, marker)
        assert "from fusedonebit.comm.mpi import MPITransport\n" in lines
        here = lines.replace("fusedonebit.comm.mpi", "fusedonebit.comm").replace("MPITransport", "LocalTransport")
        exec(here, {"model": torch.nn.Linear(8, 4)})


# ---------------------------------------------------------------- what is told, and never dropped


@pytest.mark.parametrize(
    ("params", "schedule", "safe"),
    [
        ({"freeze_step": 2, "betas": [0.9, 0.95]}, {"type": "WarmupLR", "params": {"warmup_num_steps": 5000}}, 5020),
        ({"freeze_step": 1000}, {"type": "WarmupDecayLR", "params": {"total_num_steps": 10**5}}, 2000),
        ({"freeze_step": 600}, {"type": "OneCycleLR", "params": {"max_lr": 1.0, "total_steps": 2000}}, 1600),
        ({"freeze_step": 600}, {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}}, 3000),
        ({"freeze_step": 1001}, {"type": "WarmupLR", "params": {}}, None),
        ({"freeze_step": 2}, {"type": "StepLR", "params": {"step_size": 9}}, None),
        ({"freeze_step": 2}, None, None),
    ],
)
def test_freeze_within_the_rates_rise_is_told_with_a_safe_step(params, schedule, safe, migrate):
    block = {"type": "OneBitAdam", "params": {"lr": 1e-3} | params}
    status, printed, _ = migrate({"optimizer": block} | ({"scheduler": schedule} if schedule else {}))
    assert status == 0
    assert ("CAUTION: freeze_step is" in printed) == (safe is not None)
    if safe is not None:
        assert f"freeze_step >= {safe:,}:" in printed
        block["params"]["freeze_step"] = safe
        assert "CAUTION" not in migrate({"optimizer": block, "scheduler": schedule})[1]


def test_freeze_of_0_1_adam_within_the_rates_rise_is_told_too(migrate):
    _, printed, _ = migrate(CONFIGS["published_zero_one_early"])
    assert "CAUTION: var_freeze_step is 100, but the learning rate rises for 1,000 steps" in printed


def test_clipping_that_two_places_say_differently_is_refused(migrate):
    block = {"type": "OneBitAdam", "params": {"freeze_step": 9, "max_grad_norm": 1.0}}
    says = "optimizer.params.max_grad_norm must be gradient_clipping, 0.5, or left out, got 1.0"
    check_refused(migrate({"optimizer": block, "gradient_clipping": 0.5}), says)


def test_suggestion_is_a_key_of_the_same_optimizer(migrate):
    for kind, wrong, right in (
        ("ZeroOneAdam", "freeze_step", "var_freeze_step"),
        ("OneBitAdam", "var_freeze_step", "freeze_step"),
    ):
        status, printed, _ = migrate({"type": kind, "params": {wrong: 400}})
        assert status == 1
        assert f"optimizer.params.{wrong}: not a key of DeepSpeed that this knows: did you mean {right}?" in printed


def test_in_fp32_deepspeeds_numerics_have_scales_of_parameters(migrate):
    for name, scope in (("unit_test_onebit_adam_fp32", "layer"), ("unit_test_onebit_adam_fp16", "global")):
        _, printed, _ = migrate(CONFIGS[name])
        assert call(printed, THEIRS).frame.options.numerics.scale_scope == scope


def test_every_documented_key_is_carried_or_explained():
    config = Config(CONFIGS["every_documented_key"], "ds_config.json")
    translate(config)
    explained = {entry.path for entry in config.entries if entry.fate is Fate.EXPLAINED}
    carried = {entry.path for entry in config.entries if entry.fate is Fate.CARRIED}
    assert {"bf16.enabled", "gradient_clipping", "optimizer.params.freeze_step", "scheduler.type"} <= carried
    assert {"aio", "tensorboard", "checkpoint", "zero_optimization.stage", "data_types.grad_accum_dtype"} <= explained
    assert set(CONFIGS["every_documented_key"]) == {path.partition(".")[0] for path in carried | explained}


@pytest.mark.parametrize(
    ("blocks", "contains"),
    [
        ({"fp16": {"enabled": True}}, ["torch.autocast(device, torch.float16)", "GradScaler(", "model.half()"]),
        ({"bf16": {"enabled": True}}, ["torch.autocast(device, torch.bfloat16)", "model.bfloat16()"]),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, ["torch.float16)", "GradScaler(device)", "amp.opt_level: "]),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, ["torch.float16)", "GradScaler(device)"]),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, ["scaler.update(128.0)", "init_scale=128.0"]),
        ({"fp16": {"enabled": False}}, ["fp16: nothing to do: it is off"]),
        ({"gradient_clipping": 0.5}, ["max_grad_norm=0.5)"]),
        ({"gradient_clipping": 0}, ["gradient_clipping: nothing to do: 0 is off"]),
        ({"gradient_accumulation_steps": 3}, ["loss / 3"]),
        ({"zero_optimization": {"stage": 2}}, ["zero_optimization.stage: state is not sharded"]),
        ({"gradient_allreduce_op": "sum"}, ["multiply the loss by the number of ranks"]),
    ],
)
def test_block_becomes(blocks, contains, migrate):
    status, printed, _ = migrate({"optimizer": ADAM} | blocks)
    assert status == 0
    for text in contains:
        assert text in printed


def test_over_mpi_the_optimizer_is_given_its_transport(migrate):
    _, printed, _ = migrate(CONFIGS["onebit_adam_mpi"])
    assert printed.count("process_group=MPITransport()") == 2
    assert "fusedonebit.comm.mpi.MPITransport(): needs mpi4py" in printed


def test_auto_names_the_trainers_argument(migrate):
    status, printed, _ = migrate(CONFIGS["hugging_face_auto"])
    assert status == 0
    auto = "lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon"
    assert f"OneBitAdam(model.parameters(), {auto}, weight_decay=args.weight_decay, freeze_step=399" in printed
    assert 'lr=...; write learning_rate of TrainingArguments instead of "auto"' in printed
    assert "total_num_steps: in the schedule; write max_steps of TrainingArguments" in printed
    assert ", 11 to fill in, " in printed
    assert 'fp16.enabled: "auto": an argument of Hugging Face\'s Trainer; taken as off' in printed


def test_misspelt_key_is_unknown_and_the_status_says_so(migrate):
    """So it stands in a config of DeepSpeed's own tests."""
    status, printed, _ = migrate(CONFIGS["unit_test_onebit_adam_pipeline"] | {"grandient_accumulation_steps": 1})
    assert status == 1
    assert "1 unknown" in printed
    assert "grandient_accumulation_steps: not a key of DeepSpeed that this knows: did you mean gradient_accu" in printed
    status, printed, _ = migrate({"type": "OneBitAdam", "params": {"lr": 1e-3, "zzz": {"deep": 1}}})
    assert status == 1
    assert "optimizer.params.zzz.deep: not a key" in printed


def test_standard_input_is_read(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(CONFIGS["reference_onebit_adam"])))
    assert main(["migrate", "-"]) == 0
    assert "freeze_step=399)" in capsys.readouterr().out


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
            'must be one of OneBitAdam, OneBitLamb, ZeroOneAdam, got "Adam", which sends whole gradients; OneBitAdam ',
        ),
        ('{"optimizer": {"type": "FusedLamb"}}', 'got "FusedLamb", which sends whole gradients; OneBitLamb is the'),
        ('{"optimizer": {"params": {}}}', "optimizer.type must be one of .*, got null"),
        ('{\n/* a\nb */ "optimizer": x}', "Expecting value in line 3, column 19"),
        ('{\n/* no end\n"optimizer": {}}', "the comment that begins in line 2 has no end"),
        ('{"optimizer": {}} /*/', "the comment that begins in line 1 has no end"),
        ('{optimizer: {"type": "OneBitAdam"}}', "keys and strings need their quotes"),
        ('{"a": 1,, "b": 2}', "is not JSON: "),
        ('{"optimizer": "// no comment}', "is not JSON: Unterminated string"),
        ('{"a\\nb": 1, "a\\nb": 2}', r'the key "a\\nb" stands twice'),
        ('{"\\' * 50_000, "is not JSON: "),
        ("/*" * 100_000, "the comment that begins in line 1 has no end"),
    ],
)
def test_bad_file_gets_one_line_and_status_2(text, says, migrate):
    check_refused(migrate(text), says)


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
def test_what_json_lets_through_and_no_config_has_is_one_line(text, says, migrate):
    config = json.dumps({"optimizer": ADAM, "steps_per_print": "here"}).replace('"here"', text)
    check_refused(migrate(config), says)


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


def test_comments_and_trailing_commas_are_read_as_deepspeed_does(migrate):
    status, printed, error = migrate(COMMENTED)
    assert (status, error) == (0, "")
    assert "betas=[0.8, 0.99]" in printed
    assert "freeze_step=8)" in printed
    assert "All 5 keys" in printed


def test_missing_binary_and_endless_files_are_named(tmp_path, capsys):
    assert main(["migrate", str(tmp_path / "none.json")]) == 2
    assert "none.json can't be read: No such file" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert main(["migrate", str(tmp_path / "binary")]) == 2
    assert "it is not text in UTF-8" in capsys.readouterr().err
    assert main(["migrate", "/dev/zero"]) == 2
    assert "/dev/zero must be a DeepSpeed config, got more than 1,048,576 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("optimizer.params.lr", "1e-3", "lr must be .*'1e-3'"),
        ("optimizer.params.lr", -1, "lr must be .*-1"),
        ("optimizer.params.betas", [0.9], r"betas must be .*\[?0.9"),
        ("optimizer.params.freeze_step", 1, "freeze_step must be an int >= 2, got 1"),
        ("optimizer.params.freeze_step", "auto", "freeze_step must be an int >= 2, got 'auto'"),
        ("optimizer.params.amsgrad", True, "amsgrad must be False to be carried over, got True"),
        ("optimizer.params", [], r"optimizer.params must be a block"),
        ("gradient_clipping", True, "max_grad_norm must be .*True"),
        ("fp16", {"enabled": 1}, "fp16.enabled must be true, false"),
        ("fp16", {"enabled": True, "loss_scale": "x"}, "fp16.loss_scale must be a number in"),
        ("fp16", {"enabled": True, "initial_scale_power": 5000}, "initial_scale_power must be a whole number in"),
        ("fp16", {"enabled": True, "loss_scale": 1e300}, "loss_scale must be a number in"),
        ("bf16", {"enabled": True}, "only one of fp16, bf16, .* can be enabled, got fp16 and bf16"),
        ("torch_autocast", {"enabled": True, "dtype": "int8"}, "(dtype must be|only one of)"),
        ("scheduler", {"type": "WarmupDecayLR", "params": {}}, "total_num_steps must be a whole number >= 0, but"),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}}, "warmup_max_lr must be a finite"),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_max_lr": 0}}, "learning rate must be > 0"),
        ("scheduler", {"type": "StepLR"}, "what torch's StepLR takes: "),
        ("scheduler", {"type": "OneCycleLR", "params": {"max_lr": 1.0}}, "what torch's OneCycleLR takes: "),
        (
            "scheduler",
            {"type": "CyclicLR", "params": {"base_lr": 1, "max_lr": 2, "mode": "x"}},
            "torch's CyclicLR takes",
        ),
        ("zero_optimization", {"stage": "two"}, "zero_optimization.stage must be a whole number in"),
        ("gradient_allreduce_op", "max", 'gradient_allreduce_op must be "mean" or "sum", got "max"'),
    ],
)
def test_bad_value_names_key_value_and_expectation(path, value, says, migrate):
    values = copy.deepcopy(CONFIGS["onebit_adam_bert"])
    *blocks, key = path.split(".")
    block = values
    for name in blocks:
        block = block[name]
    block[key] = value
    check_refused(migrate(values), says)


def test_bounds_that_contradict_each_other_are_told(migrate):
    for params in ({"max_coeff": 0.1, "min_coeff": 0.5}, {"max_coeff": 0.001}, {"factor_min": 8}):
        check_refused(migrate({"optimizer": {"type": "OneBitLamb", "params": params}}), "optimizer: .*[cr]_m(ax|in)")


# ---------------------------------------------------------------- hostile and damaged configs

ODD = (None, True, False, 0, 1, 2, -1, 0.5, -0.0, 1e-320, 1e308, 10**15, 10**400, float("nan"), float("inf"))
ODD += ("__class__", "\x1b[2J", "a\nb", "\u2028", "\ud800", "", "auto", "mpi", "StepLR", "OneBitLamb", "ZeroOneAdam")
LEAVES = st.one_of(st.sampled_from(ODD), st.text(max_size=8), st.floats(), st.integers())
NAMES = st.text(max_size=8) | st.sampled_from(sorted({key for config in CONFIGS.values() for key in config}))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2), max_leaves=4
)


@st.composite
def hostile(draw: st.DrawFn) -> dict[str, Any]:
    """One of DeepSpeed's documented configs, with one to four things in it changed."""
    values = copy.deepcopy(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))])
    for _ in range(draw(st.integers(1, 4))):
        blocks = [values, *(v for v in values.values() if isinstance(v, dict))]
        blocks += [v for block in blocks[1:] for v in block.values() if isinstance(v, dict)]
        block = draw(st.sampled_from(blocks))
        match draw(st.sampled_from(("value", "key", "less", "scheduler"))):
            case "value" if block:
                block[draw(st.sampled_from(sorted(block)))] = draw(VALUES)
            case "key":
                block[draw(NAMES)] = draw(VALUES)
            case "less" if block:
                del block[draw(st.sampled_from(sorted(block)))]
            case "scheduler":
                kind = draw(st.sampled_from(sorted(VALID)))
                params = dict(VALID[kind])
                params[draw(st.sampled_from(sorted(params)))] = draw(VALUES)
                values["scheduler"] = {"type": kind, "params": params}
    return values


def test_any_config_is_one_line_of_error_or_an_account_of_keys(migrate, capsys):
    seen = {"account": 0, "error": 0}

    @settings(max_examples=300, database=None, deadline=None)
    @for_all(hostile())
    def whatever_it_is(values: dict[str, Any]) -> None:
        status, printed, error = migrate(values)
        if status == 2:
            assert printed == ""
            assert error.startswith("fusedonebit: ")
            assert error.count("\n") == 1
            assert error[:-1].isprintable()
        else:
            assert all(line.isprintable() for line in printed.split("\n"))
            config = Config(json.loads(json.dumps(values)), "ds_config.json")
            translate(config)
            assert sum(config.count(fate) for fate in Fate) == len(config.paths())
        seen["error" if status == 2 else "account"] += 1

    whatever_it_is()
    with capsys.disabled():
        print(f"\n300 hostile configs: {seen}")
    assert min(seen.values()) >= 60


@pytest.mark.parametrize("name", ["a\nimport os", "a\rimport os", "\x1b[2J"])
def test_name_of_the_file_stays_in_its_line(name, tmp_path, capsys):
    (tmp_path / name).write_text(json.dumps({"optimizer": ADAM}))
    assert main(["migrate", str(tmp_path / name)]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))
    (tmp_path / name).write_text("{")
    assert main(["migrate", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err[:-1].isprintable()
