"""What can't be used raises, and says which argument, its value and what was expected."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from observe import caught
from optimizers import ADAM_AND_LAMB, EACH_ONEBIT, MAKE, UNGUARDED, by_name, construct, group_of, objects
from ranks import simulate
from torch.nn import Parameter

from fusedonebit import DisagreementError, Faults, Freeze, Numerics, OneBitAdam, OneBitLamb
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.core import consensus


def make(*shapes: tuple[int, ...]) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape)) for shape in shapes]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr must be a finite number >= 0, got -0.1"),
        ({"lr": float("nan")}, "lr must be a finite number >= 0, got nan"),
        ({"lr": "fast"}, "lr must be a finite number >= 0, got 'fast'"),
        ({"lr": 10**400}, "lr must be a finite number >= 0, got 10+, which is infinite in float32"),
        ({"eps": 1e39}, r"eps must be a finite number >= 0, got 1e\+39, which is infinite in float32"),
        ({"lr": torch.ones(2)}, r"lr must be a number or a tensor of one element, got shape \(2,\)"),
        *(
            ({"lr": torch.tensor(lr)}, "lr must be a finite number >= 0, got")
            for lr in (-1.0, float("nan"), float("inf"))
        ),
        ({"betas": (1.0, 0.9)}, r"betas must be two numbers in \[0, 1\), got \(1.0, 0.9\)"),
        ({"betas": (0.9,)}, r"betas must be two numbers in \[0, 1\), got \(0.9,\)"),
        ({"betas": 0.9}, r"betas must be two numbers in \[0, 1\), got 0.9"),
        ({"eps": -1e-8}, "eps must be a finite number >= 0, got -1e-08"),
        ({"weight_decay": float("inf")}, "weight_decay must be a finite number >= 0, got inf"),
        ({"maximize": 1}, "maximize must be True or False, got 1"),
        ({"freeze_step": -1}, 'freeze_step must be an int >= 0 or "auto", got -1'),
        ({"freeze_step": 1.5}, 'freeze_step must be an int >= 0 or "auto", got 1.5'),
        ({"freeze_step": True}, 'freeze_step must be an int >= 0 or "auto", got True'),
        ({"freeze_step": "soon"}, "freeze_step must be an int >= 0 or \"auto\", got 'soon'"),
        ({"lr_warmup_steps": -3}, "lr_warmup_steps must be an int >= 0, got -3"),
        ({"scale_norm": "l3"}, "scale_norm must be one of 'contractive', 'relaxed', 'l1', 'l2', got 'l3'"),
        ({"scale_scope": "row"}, "scale_scope must be one of 'global', 'bucket', 'layer', 'block', got 'row'"),
        ({"dead_coordinates": "drop"}, "dead_coordinates must be one of 'mean', 'keep', got 'drop'"),
        ({"precondition": 1}, "precondition must be True or False, got 1"),
        ({"ternary": 1}, "ternary must be True or False, got 1"),
        (
            {"dead_coordinates": "keep"},
            r'dead_coordinates must be "mean" .*, got "keep"; or pass Numerics\(precondition=False\)',
        ),
        (
            {"precondition": False, "variance_floor": 0.1, "dead_coordinates": "keep"},
            r'dead_coordinates must be "mean" where v has a floor, got "keep"; or pass Numerics\(variance_floor=0\)',
        ),
        ({"frozen_dtype": torch.bfloat16, "variance": "shared"}, r"takes a byte\), got torch.bfloat16"),
        ({"variance_floor": 1.0}, r"variance_floor must be a number in \[0, 1\), or None, got 1.0"),
        ({"variance_floor": "low"}, r"variance_floor must be a number in \[0, 1\), or None, got 'low'"),
        ({"rewarm_steps": 2.5}, "rewarm_steps must be an int >= 0, got 2.5"),
        ({"rewarm_steps": 9}, "rewarm_steps must be at least 10, got 9"),
        ({"guard": True}, "guard must be one of 'rewarm', 'warn', 'off', got True"),
        ({"nonfinite": "ignore"}, "nonfinite must be one of 'skip', 'raise', got 'ignore'"),
        ({"bias_correction": "no"}, "bias_correction must be True or False, got 'no'"),
        ({"eps_inside_sqrt": "yes"}, "eps_inside_sqrt must be True or False, got 'yes'"),
        ({"block_size": 1000}, r"block_size must be one of \(1024, 512, 256, 128\) or None, got 1000"),
        ({"block_size": torch.tensor([1024, 512])}, r"block_size must be one of \(.*\) or None, got tensor\(\["),
        (
            {"scale_norm": np.array(["l1", "l2"])},
            r"scale_norm must be one of 'contractive', 'relaxed', 'l1', 'l2', got array\(",
        ),
        ({"freeze_step": np.array([1, 2])}, r'freeze_step must be an int >= 0 or "auto", got array\(\['),
        ({"mask": {"weight": torch.ones(3)}}, "mask must map parameters to bool tensors, got str: Tensor"),
        ({"mask": "weight"}, "mask must map parameters to bool tensors, got str"),
        ({"mask": False}, "mask must map parameters to bool tensors, got bool"),
        ({"mask": torch.ones(2)}, "mask must map parameters to bool tensors, got Tensor"),
        ({"model_parallel": []}, r"model_parallel must be a group of ranks, or None, got \[\]: leave it out"),
        ({"buckets": 2**70}, "buckets must be an int from 1 to 65,536, or None, got 1180591620717411303424"),
        ({"mask": {torch.zeros(7): torch.ones(7) > 0}}, r"tensor of shape \(7,\) that is no trainable parameter"),
    ],
)
def test_bad_hyper_parameters_are_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        OneBitAdam(make((3,)), **objects(**{"freeze_step": 5, **options}))


@pytest.mark.parametrize("lr", [1e308, torch.tensor(1e308, dtype=torch.float64)], ids=["a number", "a tensor"])
@pytest.mark.parametrize("name", MAKE)
def test_learning_rates_that_float32_cannot_hold_are_refused(name, lr):
    message = r"lr must be a finite number >= 0, got 1e\+308, which is infinite in float32"
    with pytest.raises(ValueError, match=message):
        MAKE[name](make((3,)), lr=lr)
    optimizer = MAKE[name](make((3,)))
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=message):
        optimizer.step()


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        ({"lr": 0.1}, ValueError, r"""must have a list of tensors under "params", got the keys \['lr'\]"""),
        ({"params": {torch.zeros(2)}}, TypeError, "params of a group must be ordered, .* got a set; pass a list"),
        ({"params": 3}, TypeError, "params of a group must be a tensor or an iterable of tensors, got int"),
        ([torch.zeros(2)], TypeError, "a parameter group must be a dict, got list"),
    ],
)
def test_groups_that_are_none_are_refused(group, error, message):
    first = {"params": make((3,))}
    if isinstance(group, dict):
        with pytest.raises(error, match=message):
            OneBitAdam([first, group], freeze_step=5)
    optimizer = OneBitAdam([first], freeze_step=5)
    with pytest.raises(error, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_a_class_given_for_an_object_says_how_to_make_one():
    with pytest.raises(TypeError, match=r'"auto" or fusedonebit.Freeze\(\.\.\.\), got <class'):
        OneBitAdam(make((3,)), freeze_step=Freeze)
    with pytest.raises(TypeError, match=r"got SimulatedGroup; pass its transport\(rank\)"):
        OneBitAdam(make((3,)), freeze_step=5, process_group=SimulatedGroup(2))


def test_the_way_out_without_momentum_can_be_taken_as_it_is_told():
    with pytest.raises(ValueError, match=r"betas\[0\] must be > 0 .*; or pass Faults\(") as caught:
        OneBitAdam(make((3,)), freeze_step=5, betas=(0.0, 0.999))
    faults = eval(str(caught.value).rpartition("or pass ")[2], {"Faults": Faults})
    OneBitAdam(make((3,)), freeze_step=5, betas=(0.0, 0.999), faults=faults)


def test_preconditioned_momentum_is_not_scaled_by_layer_as_well():
    kind = by_name(OneBitLamb, freeze_step=5, precondition=True)
    told = r"momentum_scaling must be False or None with Numerics\(precondition=True\), got True"
    with pytest.raises(ValueError, match=told):
        kind(make((3,)), momentum_scaling=True)
    for scaling in (False, None):
        kind(make((3,)), momentum_scaling=scaling)


def test_bad_hyper_parameters_are_named_with_their_group():
    p, q = make((3,), (4,))
    with pytest.raises(ValueError, match="eps must be a finite number >= 0, got -1 in group 1"):
        OneBitAdam([{"params": [p]}, {"params": [q], "eps": -1}], freeze_step=5)


def add_after_a_bad_change(rank: int, transport: Transport, name: str, spoilers: tuple[int, ...]) -> list:
    p, q = make((3,), (4,))
    optimizer, before = MAKE[name]([p], lr=1e-3, process_group=transport), p.detach().clone()
    if rank in spoilers:
        optimizer.param_groups[0]["lr"] = -1.0
    refused = caught(lambda: optimizer.add_param_group(group_of(name, [q])))
    unmoved = torch.equal(p, before) and len(optimizer.param_groups) == 1 and q not in optimizer.state
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.add_param_group(group_of(name, [q]))
    p.grad, q.grad = torch.ones(3), torch.ones(4)
    optimizer.step()
    return [*refused, unmoved, not torch.equal(p, before), optimizer.stats()["step"]]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("spoilers", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_a_group_added_after_a_bad_change_is_refused_whole(name, spoilers):
    for rank, (kind, text, *rest) in enumerate(simulate(add_after_a_bad_change, 2, name, spoilers)):
        assert kind is (ValueError if rank in spoilers else DisagreementError)
        assert "lr must be a finite number >= 0, got -1.0 in group 0" in text
        assert rest == [True, True, 1]


@EACH_ONEBIT
def test_freeze_step_is_auto_unless_told(name):
    assert construct(name, make((3,))).frame.options.freeze_step == "auto"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.ones(3).bool(),
            r"a mask must be a bool tensor of its parameter's shape \(2, 3\), got torch.bool \(3,\)",
        ),
        (
            torch.ones(2, 3),
            r"a mask must be a bool tensor of its parameter's shape \(2, 3\), got torch.float32 \(2, 3\)",
        ),
    ],
)
def test_a_mask_must_fit_its_parameter(value, message):
    (p,) = make((2, 3))
    with pytest.raises(ValueError, match=message):
        OneBitAdam([p], freeze_step=5, numerics=Numerics(mask={p: value}))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            lambda: torch.randn(3, requires_grad=True),
            "must be an iterable of tensors or of dicts, got Tensor; pass a list",
        ),
        (list, "empty parameter list"),
        (lambda: [Parameter(torch.eye(3).to_sparse())], "parameter 0 must be dense, got layout torch.sparse_coo"),
        (
            lambda: [Parameter(torch.randn(2, dtype=torch.cfloat))],
            "must be float32, bfloat16 or float16, got torch.comp",
        ),
        (lambda: [Parameter(torch.randn(2).double())], "must be float32, bfloat16 or float16, got torch.float64"),
        (lambda: [Parameter(torch.randn(2, device="meta"))], "parameter 0 must have memory, got a meta tensor"),
        (lambda: [Parameter(torch.randn(1, 3).expand(4, 3))], r"must not overlap itself, got strides \(0, 1\)"),
        (lambda: [*make((2,)), Parameter(torch.randn(2, device="meta"))], "parameter 1 must have memory"),
        (
            lambda: [Parameter(whole[part]) for whole in [torch.randn(10)] for part in (slice(6), slice(5, 10))],
            "params must not share memory, but parameter 0 and parameter 1 do; tie weights by",
        ),
        (lambda: [3], "optimizer can only optimize Tensors, but one of the params is int"),
    ],
)
def test_parameters_that_cannot_be_optimised_are_named(params, message):
    with pytest.raises((TypeError, ValueError), match=message):
        OneBitAdam(params(), freeze_step=5)


def give(p: Parameter, values: torch.Tensor) -> None:
    p.grad, p.data = None, values


SPOILED: dict[str, tuple[Callable[[torch.nn.Linear], object], str]] = {
    "sparse gradient": (
        lambda model: setattr(model.weight, "grad", torch.eye(4, 3).to_sparse()),
        r"gradient of parameter 0 \(weight\) must be dense, got .* use sparse=False in the embedding",
    ),
    "wrong shape": (
        lambda model: setattr(model.weight.grad, "data", torch.ones(5)),
        r"gradient of parameter 0 \(weight\) must be \(4, 3\) on cpu, got \(5,\) on cpu",
    ),
    "cast": (
        lambda model: model.bfloat16(),
        r"parameter 0 \(weight\) was torch.float32 \(4, 3\) on cpu .* but now is torch.bfloat16 \(4, 3\) on cpu",
    ),
    "reshaped": (
        lambda model: give(model.weight, torch.randn(5)),
        r"parameter 0 \(weight\) was torch.float32 \(4, 3\) on cpu .* but now is torch.float32 \(5,\) on cpu",
    ),
    "turned": (
        lambda model: give(model.weight, model.weight.data.t().contiguous().t()),
        r"parameter 0 \(weight\) was torch.float32 \(4, 3\) on cpu",
    ),
    "unfrozen": (
        lambda model: model.bias.requires_grad_(True),
        r"parameter 1 \(bias\) requires gradients now but did not when .*; make the optimizer first",
    ),
}


@pytest.mark.long(but=15)
@ADAM_AND_LAMB
@pytest.mark.parametrize("freeze_step", [100, 1], ids=["warmup", "compression"])
@pytest.mark.parametrize("how", SPOILED)
def test_what_changed_since_construction_is_named_before_a_step(name, how, freeze_step):
    spoil, message = SPOILED[how]
    model = torch.nn.Linear(3, 4)
    model.bias.requires_grad_(False)
    optimizer = construct(name, model.named_parameters(), freeze_step=freeze_step, **UNGUARDED)
    for _ in range(3):
        model.weight.grad = torch.randn(4, 3)
        optimizer.step()
    before = model.weight.detach().clone()
    spoil(model)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        optimizer.step()
    assert optimizer.stats()["step"] == 3
    if how in ("sparse gradient", "wrong shape", "unfrozen"):
        assert torch.equal(model.weight, before)


@EACH_ONEBIT
def test_a_group_can_not_be_added_after_the_freeze(name):
    p, q = make((3,), (4,))
    optimizer = construct(name, [p], freeze_step=1)
    for _ in range(2):
        p.grad = torch.ones(3)
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"add_param_group must be called in the warm-up.*construct a new"):
        optimizer.add_param_group({"params": [q]})
    assert len(optimizer.param_groups) == 1


def test_cuda_parameters_need_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(RuntimeError, match="params on cuda need triton, which is not installed: pip install triton"):
        consensus.check_device(torch.device("cuda"))
    consensus.check_device(torch.device("cpu"))


def test_looking_at_a_foreign_parameter_says_so():
    optimizer = OneBitAdam(make((3,)), freeze_step=5)
    for look in (optimizer.momentum, optimizer.worker_error):
        with pytest.raises(
            ValueError, match=r"param must be a trainable parameter of this optimizer, got shape \(4,\)"
        ):
            look(torch.zeros(4))


@pytest.mark.long
def test_importing_costs_less_than_a_second_beyond_torch():
    # Of the processor: on a busy machine the clock on the wall tells something else.
    code = "import time, torch; t = time.process_time(); import fusedonebit; print(time.process_time() - t)"
    best = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    )
    print(f"import fusedonebit after torch: {best:.3f} s (limit 1)")
    assert best < 1
