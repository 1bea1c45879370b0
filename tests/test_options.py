"""The constructors' few arguments, and the objects that have the other options."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from freeze_runs import model_of, take_steps
from optimizers import EVERY, MAKE, objects

import fusedonebit
from fusedonebit import (
    AdamW,
    DisagreementError,
    Faults,
    Freeze,
    Lamb,
    Layerwise,
    MarsitAdam,
    MarsitSGD,
    Numerics,
    OneBitAdam,
    OneBitLamb,
    OneBitLion,
    OneBitMuon,
    Rounds,
    Wire,
    ZeroOneAdam,
)
from fusedonebit.comm import SimulatedGroup
from fusedonebit.core.formats import Format, Formats
from fusedonebit.core.state.saving import header_of
from fusedonebit.deepspeed.config import DeepSpeedLayerwise
from fusedonebit.optim.muon import COEFFICIENTS

OBJECTS = (Faults, Freeze, Layerwise, Numerics, Rounds, Wire)


@pytest.mark.parametrize("kind", EVERY)
def test_no_constructor_has_more_than_a_dozen_arguments(kind):
    """But for what becomes of the variance, which ``OneBitAdam`` alone can be told, and what torch's Muon is told."""
    arguments = set(inspect.signature(kind).parameters) - {"variance", "warmup", "total_steps"}
    arguments -= {"ns_coefficients", "ns_steps", "ns_dtype", "eps", "adjust_lr_fn"} if kind is OneBitMuon else set()
    print(f"{kind.__name__}: {len(arguments)} arguments (limit 12)")
    assert len(arguments) <= 12


@pytest.mark.parametrize("kind", OBJECTS)
def test_option_objects_are_frozen_keyword_only_and_documented(kind):
    first = fields(kind)[0].name
    with pytest.raises(TypeError):
        kind(None)
    with pytest.raises(AttributeError):
        setattr(kind(), first, None)
    assert getattr(fusedonebit, kind.__name__) is kind
    for field in fields(kind):
        assert f"        {field.name}: " in kind.__doc__, field.name


USUAL = {"freeze_step": 3, "variance": "frozen", "topology": "ring", "aggregation": "majority", "rounds": Rounds()}
USUAL |= {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "momentum": 0.9, "step": 3}
USUAL |= {"lr_warmup_steps": 3, "deadline": 500, "warm_start": None, "warmup": 3, "total_steps": None}
USUAL |= {"nesterov": True, "ns_coefficients": COEFFICIENTS, "ns_steps": 5, "ns_dtype": torch.bfloat16}
USUAL |= {"adjust_lr_fn": None, "algorithm": "muon"}
USUAL |= {"layerwise": Layerwise(), "numerics": Numerics(), "wire": Wire(), "faults": Faults(), "max_grad_norm": 1.0}
USUAL |= dict.fromkeys(("process_group", "sync_policy", "variance_policy"))
USUAL |= {field.name: field.default for kind in OBJECTS if kind is not Freeze for field in fields(kind)}
"""A value of each option of any optimizer, by name."""

LIKE = {MarsitSGD: (torch.optim.SGD,), OneBitMuon: (torch.optim.SGD, torch.optim.Muon)}
TORCHS = {
    kind: {k: v for like in LIKE.get(kind, (torch.optim.AdamW,)) for k, v in inspect.signature(like).parameters.items()}
    for kind in EVERY
}


def given(kind: Any) -> list[Any]:
    """Return parameters that it takes."""
    return [p for p in model_of().parameters() if p.dim() > 1 or kind is not OneBitMuon]


def unexpected(kind: type[Any], **options: Any) -> str:
    """What a constructor says of an argument that it lacks."""
    with pytest.raises(TypeError) as error:
        kind(given(kind), **options)
    (said,) = str(error.value).splitlines()
    (name,) = options
    before = f"{kind.__name__} got an unexpected keyword argument {name!r}: "
    assert said.startswith(before)
    return said.removeprefix(before)


def test_every_option_of_any_optimizer_has_a_usual_value():
    arguments = {name for kind in EVERY for name in inspect.signature(kind).parameters} - {"params"}
    assert arguments | {field.name for kind in OBJECTS for field in fields(kind)} == USUAL.keys()


@functools.cache
def can_be_written(name: str, kind: type[Any], told: str) -> None:
    """Makes an optimizer with what a message about the option ``name`` says to write."""
    names = {"fusedonebit": fusedonebit, "torch": torch} | {
        name: getattr(fusedonebit, name) for name in fusedonebit.__all__
    }
    kind(given(kind), **eval(f"dict({told.replace('...', repr(USUAL[name]))})", names))


@pytest.mark.long(but=2)
@pytest.mark.parametrize("kind", EVERY)
def test_an_option_at_the_wrong_place_is_told_its_own(kind):
    told, elsewhere = 0, 0
    for name, value in USUAL.items():
        if name in inspect.signature(kind).parameters or (name in TORCHS[kind] and value == TORCHS[kind][name].default):
            continue
        said = unexpected(kind, **{name: value})
        if said.startswith("it has"):
            others, instead = re.fullmatch(r"it has no such option, but ([\w, ]*) ha(?:s|ve): (.*)", said).groups()
            for other in re.split(", | and ", others):
                assert other != kind.__name__
                can_be_written(name, getattr(fusedonebit, other), instead)
            elsewhere += 1
        elif said not in ("did you mean momentum=...?", "it is not supported"):  # instead of betas; of Nesterov's
            can_be_written(name, kind, re.fullmatch(r"(?:pass|did you mean) (.*?)\??", said)[1])
            told += 1
    print(f"{kind.__name__}: {told} options told their place, {elsewhere} are other optimizers'")
    assert told >= (5 if kind is OneBitMuon else 6)
    assert elsewhere >= 8


@pytest.mark.parametrize("kind", EVERY)
def test_torchs_arguments_are_taken_as_torch_has_them_by_default(kind):
    for name, parameter in TORCHS[kind].items():
        if name == "params":
            continue
        kind(given(kind), **{name: parameter.default})
        if name in ("fused", "foreach"):
            kind(given(kind), **{name: False})
        if name not in inspect.signature(kind).parameters:
            other = True if parameter.default in (None, False) else 0.5
            assert unexpected(kind, **{name: other})


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (OneBitAdam, "fused", "leave it out: all steps are"),
        (OneBitAdam, "maximize", "pass numerics=fusedonebit.Numerics(maximize=True)"),
        (OneBitAdam, "clip_grad_norm", "did you mean max_grad_norm=...?"),
        (OneBitAdam, "warmup_steps", "did you mean warmup=...?"),
        (OneBitAdam, "master_weight", "did you mean numerics=fusedonebit.Numerics(master_weights=...)?"),
        (ZeroOneAdam, "warmup_steps", "it has no such option, but OneBitAdam and OneBitLamb have: warmup=..."),
        (AdamW, "freeze_steps", "it has no such option, but OneBitAdam and OneBitLamb have: freeze_step=..."),
        (MarsitSGD, "nesterov", "it is not supported"),
        (AdamW, "eta", "did you mean lr=...?"),
        (OneBitAdam, "rewarm_every", "leave it out: with warmup= instead of freeze_step=, or with neither"),
        (OneBitAdam, "norm_group", "did you mean wire=fusedonebit.Wire(model_parallel=...)?"),
        (OneBitLion, "comm_backend_name", "it takes lr, betas, weight_decay, aggregation, max_grad_norm, process"),
        (Numerics, "scale_norms", "did you mean scale_norm=...?"),
        (Numerics, "hierarchy", "it has no such option, but "),
        (Wire, "max_grad_norm", "it has no such option, but AdamW, Lamb, "),
        (Freeze, "warmup", "it has no such option, but OneBitAdam and OneBitLamb have: warmup=..."),
        (Faults, "foreach", "leave it out: a step is a few launches for all tensors"),
        (Faults, "rewarm_every", "leave it out: with warmup= instead of freeze_step=, or with neither"),
        (Layerwise, "cmin", "did you mean c_min=...?"),
        (Rounds, "topology", "it has no such option, but MarsitAdam and MarsitSGD have: topology=..."),
    ],
    ids=str,
)
def test_an_argument_that_none_has_is_told_what_may_be_meant(kind, name, said):
    told = unexpected(kind, **{name: True})
    assert told.startswith(said)
    assert name != "hierarchy" or "OneBitLamb and ZeroOneAdam have: wire=fusedonebit.Wire(hierarchy=...)" in told


def test_ranks_compare_what_an_optimizer_takes_and_nothing_else():
    names = {name: set(make(model_of().parameters(), lr=1e-3).frame.options.names()) for name, make in MAKE.items()}
    for name, taken in names.items():
        assert {"nonfinite", "block_size", "broadcast_parameters", "master_weights", "max_grad_norm"} <= taken, name
        assert not taken & {"mask", "hierarchy", "maximize", "c_min", "global_ratio"}, name
    assert {"ternary", "guard", "freeze_step", "deadline", "overlap"} <= names["OneBitAdam"]
    assert "adaptive" in names["OneBitLamb"]
    assert not names["Lamb"] & {"ternary", "guard", "adaptive", "overlap", "r_min"}


@pytest.mark.parametrize("argument", ["numerics", "wire", "faults"])
def test_an_object_of_another_type_is_refused_on_every_rank(argument):
    def make(rank: int, transport: Any) -> str:
        options: dict[str, Any] = {argument: {"guard": "off"}} if rank else {}
        with pytest.raises((TypeError, DisagreementError)) as error:
            OneBitAdam(model_of().parameters(), process_group=transport, **objects(**options))
        return str(error.value)

    told = SimulatedGroup(2).run(make)
    assert f"{argument} must be a fusedonebit.{argument.capitalize()}, got dict; leave it out or pass" in told[1]
    assert f"{argument} must be a fusedonebit.{argument.capitalize()}" in told[0]


def test_an_optimizers_own_default_stands_where_objects_say_none():
    made = {name: make(model_of().parameters(), lr=1e-3).frame.options for name, make in MAKE.items()}
    assert {name: options.numerics.bias_correction for name, options in made.items()} == {
        **dict.fromkeys(
            ("AdamW, ours", "OneBitAdam", "OneBitMuon", "MarsitAdam", "ZeroOneAdam", "ZeroOneAdam, own"), True
        ),
        **dict.fromkeys(("Lamb", "OneBitLamb", "MarsitSGD", "OneBitLion"), False),
    }
    assert [made[name].numerics.precondition for name in ("OneBitAdam", "OneBitLamb")] == [True, False]
    assert [made[name].least_share for name in ("OneBitAdam", "OneBitLamb")] == [0.01, 0.01]
    assert [made[name].numerics.variance_floor for name in ("ZeroOneAdam", "ZeroOneAdam, own")] == [1e-3, 0.0]
    assert [made[name].numerics.scale_norm for name in ("ZeroOneAdam", "ZeroOneAdam, own")] == [
        "contractive",
        "relaxed",
    ]


@pytest.mark.parametrize("name", MAKE)
def test_settings_are_the_objects_that_users_pass_settled(name):
    options = MAKE[name](model_of().parameters(), lr=1e-3).frame.options
    for argument, kind in options.objects.items():
        assert isinstance(getattr(options, argument), kind)
        assert len(vars(getattr(options, argument))) <= 25
    assert len(vars(options)) <= 25
    assert {name for name, value in options.values().items() if value is None} <= {
        *("mask", "hierarchy", "model_parallel", "max_grad_norm", "buckets", "block_size"),
        *("variance_floor", "momentum_scaling", "deadline", "warmup", "total_steps", "variance_policy", "rows"),
    }


def test_settings_keep_neither_masks_nor_a_checkpoint():
    earlier, model = model_of(), model_of()
    before = OneBitAdam(earlier.parameters(), freeze_step=2)
    take_steps(earlier, before, range(4))
    freeze, masked = Freeze(step=0, warm_start=before.state_dict()), {model[0].bias: torch.ones(16, dtype=torch.bool)}
    options = OneBitAdam(model.parameters(), freeze_step=freeze, numerics=Numerics(mask=masked)).frame.options
    assert (options.freeze_step, options.warm_started, options.numerics.mask) == (0, True, None)
    assert all(value is not freeze.warm_start for value in options.values().values())


WIDE, HALF = Format(torch.float32), Format(torch.bfloat16, random=True)
CODES = Format(torch.uint8, coded=True, random=True)


@pytest.mark.parametrize(
    ("numerics", "formats"),
    [
        (Numerics(), Formats(WIDE, WIDE, HALF, Format(None))),
        (Numerics(frozen_dtype=torch.bfloat16), Formats(WIDE, Format(torch.bfloat16), HALF, Format(None))),
        (Numerics(state="bf16"), Formats(HALF, Format(torch.bfloat16), HALF, Format(None))),
        (
            Numerics(state="8bit", frozen_dtype=torch.bfloat16),
            Formats(CODES, CODES._replace(random=False), CODES, Format(None)),
        ),
        (Numerics(stochastic_rounding=True), Formats(WIDE, WIDE, HALF, Format(None, random=True))),
        (Numerics(master_weights=True), Formats(WIDE, WIDE, HALF, WIDE)),
        (Numerics(master_weights="16bit"), Formats(WIDE, WIDE, HALF, Format(torch.int16))),
        (Numerics(master_weights="8bit"), Formats(WIDE, WIDE, HALF, Format(torch.int8, random=True))),
    ],
    ids=lambda value: "" if isinstance(value, Formats) else ",".join(k for k, v in vars(value).items() if v),
)
def test_four_options_say_which_format_each_role_has(numerics, formats):
    model = model_of().to(torch.bfloat16)
    optimizer = OneBitAdam(model.parameters(), freeze_step=3, numerics=numerics)
    assert optimizer.frame.options.formats == formats


TOLD = {"bias_correction", "eps_inside_sqrt", "stochastic_rounding"}
SCALES = {"scale_norm", "scale_scope", "variance_floor"}
AGREEMENT = {"local_steps", "topology", "rows", "full_precision_every", "compensation_limit", "seed"}


def test_checkpoints_say_by_name_what_changes_a_step():
    made = {name: make(model_of().parameters(), lr=1e-3) for name, make in MAKE.items()}
    said = {name: header_of(optimizer.state_dict()) or {} for name, optimizer in made.items()}
    assert {name: set(header["options"]) for name, header in said.items()} == {
        "OneBitAdam": TOLD | SCALES | {"state"},
        "OneBitLamb": TOLD | SCALES | {"variant"},
        "AdamW, ours": TOLD | {"state"},
        "Lamb": TOLD | {"state"},
        **dict.fromkeys(("ZeroOneAdam", "ZeroOneAdam, own"), TOLD | SCALES | {"variance_policy", "sync_policy"}),
        "MarsitSGD": TOLD | AGREEMENT,
        "MarsitAdam": TOLD | AGREEMENT,
        "OneBitLion": TOLD | {"aggregation"},
        "OneBitMuon": TOLD | {"nesterov", "ns_steps", "ns_dtype", "adjust_lr_fn"},
    }


def test_what_is_said_goes_before_deepspeeds_numerics():
    numerics = Numerics(scale_norm="contractive", master_weights=True)
    block = {"type": "OneBitLamb", "params": {"lr": 0.1, "freeze_step": 10}}
    made = OneBitLamb.from_deepspeed(
        model_of().parameters(), block, numerics=numerics, faults=Faults(guard="warn"), layerwise=Layerwise(c_max=2.0)
    )
    options, settled = made.frame.options, made.frame.options.numerics
    assert (settled.scale_norm, settled.scale_scope, settled.master_weights) == ("contractive", "global", True)
    assert (options.faults.guard, options.variant, made.param_groups[0]["c_max"]) == ("warn", "deepspeed", 2.0)
    block["params"]["max_coeff"] = 3.0
    with pytest.raises(ValueError, match="layerwise must be None where the config has max_coeff"):
        OneBitLamb.from_deepspeed(model_of().parameters(), block, layerwise=Layerwise(c_max=2.0))


GROUPS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "option object": (OneBitAdam, {"numerics": Numerics()}, "numerics holds for all groups, got numerics="),
    "option": (OneBitAdam, {"overlap": True}, "overlap holds for all groups, got overlap=True in group 1"),
    "beside": (MarsitSGD, {"local_steps": 2}, "local_steps holds for all groups, got local_steps=2 in group 1"),
    "momentum": (OneBitAdam, {"momentum": 0.9}, "momentum is no hyper-parameter of OneBitAdam, got momentum=0.9"),
    "ratio": (OneBitAdam, {"global_ratio": 0.3}, "global_ratio is no hyper-parameter of OneBitAdam"),
    "betas": (MarsitSGD, {"betas": (0.9, 0.99)}, "betas is no hyper-parameter of MarsitSGD"),
    "another's option": (OneBitAdam, {"topology": "ring"}, "topology is no hyper-parameter of OneBitAdam"),
    "freeze": (OneBitLamb, {"freeze_step": 2}, "freeze_step holds for all groups"),
    "misspelt": (OneBitAdam, {"weigth_decay": 0.0}, "weigth_decay is no .* in group 1; did you mean weight_decay[?]"),
    "beta": (OneBitLion, {"beta": 0.9}, "beta is no hyper-parameter of OneBitLion, .* did you mean betas[?]"),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", GROUPS)
def test_a_key_of_a_group_that_would_do_nothing_is_refused(name, late):
    kind, keys, told = GROUPS[name]
    make = functools.partial(kind, topology="ring") if kind is MarsitSGD else kind
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4))
    added = make([p]).add_param_group if late else lambda group: make([{"params": [p]}, group])
    with pytest.raises(ValueError, match=told):
        added({"params": [q], **keys})


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb, functools.partial(MarsitSGD, topology="ring"), OneBitLion])
def test_labels_of_users_and_keys_of_torch_pass_in_groups(kind):
    p = torch.nn.Parameter(torch.ones(3))
    labels = {"name": "head", "no_weight_decay": True, "weight_decay_mult": 1.0, "lr_scale": 0.5, "group_name": "a"}
    labels |= {"initial_lr": 0.1, "max_lr": 1.0, "min_lr": 0.0, "max_momentum": 0.9, "base_momentum": 0.8}
    labels |= dict.fromkeys(("foreach", "fused", "capturable", "differentiable", "amsgrad"), False)
    optimizer = kind([{"params": [("first", p)], **labels}])
    p.grad = torch.ones(3)
    optimizer.step()
    assert labels.items() <= optimizer.param_groups[0].items()
    again = kind([{"params": [("first", p)]}])
    again.load_state_dict(optimizer.state_dict())
    assert labels.items() <= again.param_groups[0].items()


FROZEN: dict[str, Any] = {"freeze_step": 9}
Refused = dict[str, tuple[Callable[..., Any], dict[str, Any], str]]
LACKING: Refused = {
    "ternary": (OneBitLion, {"numerics": Numerics(ternary=True)}, "ternary must be False with OneBitLion, got True"),
    "levels": (OneBitLion, {"wire": Wire(hierarchy=(1, 2))}, r"hierarchy must be None with OneBitLion, got \(1, 2\)"),
    "a ratio": (Lamb, {"layerwise": Layerwise(r_max=3.0)}, "r_max must be 4.0 with Lamb, got 3.0"),
    "a guard": (Lamb, {"faults": Faults(guard="warn")}, "guard must be None with Lamb, got 'warn'"),
    "bias": (MarsitSGD, {"numerics": Numerics(bias_correction=True)}, "bias_correction must be None with MarsitSGD"),
    "units": (MarsitAdam, {"numerics": Numerics(precondition=False)}, "precondition must be None with MarsitAdam, got"),
}
IDLE: Refused = {
    "dtype": (OneBitAdam, {"wire": Wire(hierarchy_dtype=torch.bfloat16)}, "hierarchy_dtype must be torch.float32"),
    "ratio": (OneBitLamb, FROZEN | {"layerwise": Layerwise(adaptive=False, r_min=0.1)}, "r_min must be 0.5 with Layer"),
    "ratio of a living variance": (OneBitLamb, {"layerwise": Layerwise(r_max=3.0)}, "r_max must be 4.0 with variance="),
    "undivided": (OneBitLamb, {"numerics": Numerics(precondition=False)}, "precondition must be True or None with var"),
    "coefficients frozen": (OneBitLamb, {"layerwise": Layerwise(adaptive=False)}, "adaptive must be True with var"),
    "DeepSpeed's": (OneBitLamb, {"layerwise": DeepSpeedLayerwise()}, "layerwise must be a Layerwise with variance="),
    "rewarm": (OneBitAdam, {"faults": Faults(guard="warn", rewarm_steps=20)}, "rewarm_steps must be 50 with guard="),
    "warm-up": (OneBitAdam, {"freeze_step": Freeze(step=5, lr_warmup_steps=10)}, "lr_warmup_steps must be 0 unless"),
}


@pytest.mark.parametrize("name", LACKING | IDLE)
def test_an_option_that_would_do_nothing_is_refused(name):
    """The optimizer lacks it, or another option makes it idle."""
    kind, options, told = (LACKING | IDLE)[name]
    with pytest.raises(ValueError, match=told + ".*it has no such option" * (name in LACKING)):
        kind([torch.nn.Parameter(torch.ones(3))], **options)


def test_a_groups_bound_of_a_ratio_not_formed_is_refused():
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))]}, {"params": [torch.nn.Parameter(torch.ones(2))]}]
    with pytest.raises(ValueError, match=r'r_min must be 0.5 with variance="shared", got 0.1 in group 1: no ratio'):
        OneBitLamb([groups[0], groups[1] | {"r_min": 0.1}])
    optimizer = OneBitLamb(groups)
    for group in groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    optimizer.step()
    optimizer.param_groups[1]["r_max"] = 2.0
    with pytest.raises(ValueError, match=r"r_max must be 4.0 with .*, got 2.0 in group 1: .*; or pass freeze_step"):
        optimizer.step()
    OneBitLamb([groups[0], groups[1] | {"r_min": 0.1}], freeze_step=9)


def test_appended_groups_and_non_parameters_are_refused_by_name():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = OneBitAdam([p])
    with pytest.raises(ValueError, match="param must be a trainable parameter of this optimizer, got 3"):
        optimizer.worker_error(3)
    optimizer.param_groups.append({"params": [torch.nn.Parameter(torch.ones(4))]})
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"group 1 lacks lr, .*; add groups by add_param_group"):
        optimizer.step()


def test_a_checkpoint_with_rows_of_ranks_is_named_by_its_class():
    p = torch.nn.Parameter(torch.ones(3))
    marsit = MarsitAdam([p], topology="ring")
    p.grad = torch.ones(3)
    marsit.step()
    with pytest.raises(ValueError, match="the checkpoint is of MarsitAdam, from which OneBitAdam can't go on"):
        OneBitAdam([p]).load_state_dict(marsit.state_dict())
    with pytest.raises(ValueError, match="but it is of MarsitAdam"):
        OneBitAdam([p], freeze_step=Freeze(step=0, warm_start=marsit.state_dict()))
    damaged = OneBitAdam([p]).state_dict()
    damaged["param_groups"][0]["fusedonebit"] = 5
    with pytest.raises(ValueError, match="header is damaged: it must be a string, got int"):
        OneBitAdam([p]).load_state_dict(damaged)
