"""What newcomers do wrong in one process, by name, and what they must be told before the third step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from fusedonebit import Numerics, OneBitAdam, dcp, ddp

STEPS = 2

ALONE: dict[str, tuple[Callable[[], Any], str]] = {}
"""By name: what is done, and a pattern of what is told."""


def alone(says: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a mistake of one process."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        ALONE[make.__name__] = make, says
        return make

    return register


def told_by(make: Callable[..., Any], *args: Any) -> list[str]:
    """Return what a mistake is told: its warnings and its error."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            make(*args)
        except Exception as error:
            return [*_texts(seen), f"{type(error).__name__}: {error}"]
    return _texts(seen)


def _texts(seen: list[warnings.WarningMessage]) -> list[str]:
    # gloo's and DDP's own are no answer to a mistake.
    return [f"{w.category.__name__}: {w.message}" for w in seen if w.category.__name__ in CATEGORIES]


CATEGORIES = ("FusedOneBitWarning", "UserWarning")


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int = 0,
    steps: int = STEPS,
    between: Callable[[], Any] = lambda: None,
) -> None:
    """Take steps, with ``between`` after each backward pass."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        dtype = next(model.parameters()).dtype
        model(torch.randn(16, 6, generator=generator).to(dtype)).square().mean().backward()
        between()
        optimizer.step()


def made(**options: Any) -> tuple[nn.Sequential, OneBitAdam]:
    model = net()
    return model, OneBitAdam(model.named_parameters(), **options)


# ---------------------------------------------------------------- arguments

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a_learning_rate_that_yaml_reads_as_text": ({"lr": "1e-3"}, r"lr must be a finite number >= 0, got '1e-3'"),
    "a_learning_rate_for_each_group": ({"lr": [1e-3, 1e-4]}, r"lr must be a finite number >= 0, got \[0.001, 0.0001\]"),
    "a_negative_learning_rate": ({"lr": -1e-3}, r"lr must be a finite number >= 0, got -0.001"),
    "betas_swapped": (
        {"betas": (0.999, 0.9)},
        r"betas\[0\], the momentum's, is larger than the variance's: got \(0.999, 0.9\).*\(0.9, 0.999\)",
    ),
    "one_beta": ({"betas": 0.9}, r"betas must be two numbers in \[0, 1\), got 0.9"),
    "a_negative_weight_decay": ({"weight_decay": -0.01}, r"weight_decay must be a finite number >= 0, got -0.01"),
    "freeze_step_and_warmup": (
        {"freeze_step": 100, "warmup": 50},
        r"warmup must be None where freeze_step says how long it is, got 50; pass one of them",
    ),
    "a_share_of_nothing": ({"warmup": 0.05}, r"total_steps must be an int >= 1 where warmup is a share of them"),
    "a_warmup_in_percent": (
        {"warmup": 5.0, "total_steps": 1000},
        r"warmup must be .* a share of total_steps between 0 and 1, or None, got 5.0",
    ),
    "a_warmup_in_steps_beside_the_length_of_the_run": (
        {"warmup": 250, "total_steps": 100},
        r"total_steps must be .* where warmup is a share of them, and None elsewhere, got 100 with warmup=250",
    ),
    "options_in_a_dict": ({"numerics": {"precondition": False}}, r"numerics must be a fusedonebit.Numerics, got dict"),
    "an_argument_of_deepspeeds": (
        {"freeze_step": 100, "comm_backend_name": "nccl"},
        r"unexpected keyword argument 'comm_backend_name'",
    ),
    "a_mask_by_name": (
        {"numerics": Numerics(mask={"0.weight": torch.ones(8, 6, dtype=torch.bool)})},
        r"a mask must be a bool tensor|mask must map parameters to bool tensors, got str: Tensor",
    ),
    "an_argument_of_torchs_optimizers": (
        {"lr": 1e-3, "fused": True},
        r"OneBitAdam got an unexpected keyword argument 'fused': leave it out",
    ),
}
"""What the constructor is given beside the parameters, and what it says."""
ALONE |= {
    name: (lambda options=options: OneBitAdam(net().parameters(), **options), says)
    for name, (options, says) in OPTIONS.items()
}


@alone(r"lr must be a finite number >= 0, got 'high' in group 0")
def a_learning_rate_set_to_text_between_steps() -> None:
    model, optimizer = made()
    train(model, optimizer, steps=1)
    optimizer.param_groups[0]["lr"] = "high"
    train(model, optimizer, steps=1)


@alone(r"freeze_step=0 needs a variance to freeze")
def compression_from_the_first_step() -> None:
    train(*made(freeze_step=0))


# ---------------------------------------------------------------- parameters

PARAMETERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a_model_instead_of_its_parameters": (
        lambda: nn.Linear(3, 2),
        r"params must be an iterable of tensors or of dicts, got Linear; pass its parameters\(\)",
    ),
    "a_model_that_is_iterable": (
        net,
        r"params must be an iterable of tensors or of dicts, got Sequential; pass its parameters\(\)",
    ),
    "a_generator_read_before": (
        lambda: (p for p in ()),
        r"empty parameter list.*a generator such as model.parameters\(\) can be read only once",
    ),
    "a_group_without_parameters": (
        lambda: [{"params": net().parameters()}, {"lr": 1e-4}],
        r"must have a list of tensors under \"params\", got the keys \['lr'\]",
    ),
    "a_group_with_the_names_of_another_library": (
        lambda: [{"params": net().parameters(), "learning_rate": 1e-4}],
        r"learning_rate is no hyper-parameter of OneBitAdam, .*; did you mean lr\?",
    ),
    "a_parameter_in_two_groups": (
        lambda: [{"params": part.parameters()} for model in [net()] for part in (model, model[0])],
        r"some parameters appear in more than one parameter group",
    ),
    "a_model_in_float64": (
        lambda: net().double().named_parameters(),
        r"parameter 0 \(0.weight\) must be float32, bfloat16 or float16, got torch.float64; .*float\(\)",
    ),
    "a_complex_parameter": (
        lambda: [Parameter(torch.randn(3, dtype=torch.cfloat))],
        r"parameter 0 must be float32, bfloat16 or float16, got torch.complex64; .*torch.view_as_complex",
    ),
    "a_model_on_the_meta_device": (
        lambda: net().to("meta").parameters(),
        r"parameter 0 must have memory, got a meta tensor; materialise the model first",
    ),
}
"""What the constructor is given as parameters, and what it says."""
ALONE |= {name: (lambda params=params: OneBitAdam(params()), says) for name, (params, says) in PARAMETERS.items()}


@alone(r"no parameter of this OneBitAdam requires gradients")
def values_of_a_state_dict_instead_of_parameters() -> None:
    model = net()
    train(model, OneBitAdam(list(model.state_dict().values())))


# ---------------------------------------------------------------- between construction and step


@alone(r"parameter 0 \(0.weight\) was torch.float32 .* but now is torch.bfloat16 .*; move or cast the model first")
def a_model_cast_after_the_optimizer_was_made() -> None:
    model, optimizer = made()
    train(model.bfloat16(), optimizer)


@alone(r"parameter 2 \(2.weight\) was torch.float32 \(8, 8\).*|parameter 2 \(2.weight\) was .* but now is")
def a_head_of_another_size_put_into_a_parameter() -> None:
    model, optimizer = made()
    model[2].weight.data = torch.randn(3, 9)
    model[2].weight.grad = torch.randn(3, 9)
    optimizer.step()


@alone(r"step\(\) found no gradient of any parameter.*loss.backward\(\)")
def no_backward_pass() -> None:
    model, optimizer = made()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).sum()
        optimizer.step()


@alone(r"step\(\) found no gradient of any parameter.*another model's")
def an_optimizer_of_a_copy_of_the_model() -> None:
    train(net(), made()[1])


@alone(r"step\(\) found no gradient of any parameter.*zero_grad\(\)")
def zero_grad_between_backward_and_step() -> None:
    model, optimizer = made()
    train(model, optimizer, between=optimizer.zero_grad)


@alone(r"the gradient of parameter 0 \(weight\) must be dense, .*; use sparse=False in the embedding")
def sparse_gradients() -> None:
    model = nn.Embedding(7, 3, sparse=True)
    optimizer = OneBitAdam(model.named_parameters())
    model(torch.arange(4)).sum().backward()
    optimizer.step()


@alone(r"parameter 0 \(0.weight\) requires gradients now but did not .*make the optimizer first, then freeze layers")
def a_layer_unfrozen_during_training() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = OneBitAdam(model.named_parameters())
    train(model, optimizer, steps=1)
    model[0].requires_grad_(True)
    train(model, optimizer, steps=1)


@alone(r"must be the folder of a complete checkpoint, but it does not exist")
def a_checkpoint_that_is_not_there() -> None:
    dcp.load(*made(), "nowhere")


@alone(r"add_param_group must be called in the warm-up")
def a_group_added_after_the_warmup() -> None:
    model = net()
    optimizer = OneBitAdam(model[0].parameters(), freeze_step=1)
    train(model, optimizer)
    optimizer.add_param_group({"params": list(model[2].parameters())})


@alone(r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`")
def a_scheduler_before_the_optimizer() -> None:
    model, optimizer = made()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, between=schedule.step)


@alone(r"a gradient on some rank was not finite after 0 updates")
def a_loss_that_is_nan() -> None:
    model, optimizer = made()
    train(model, optimizer, steps=1, between=lambda: model[0].weight.grad.fill_(float("nan")))


@alone(r"checkpoint")
def a_checkpoint_of_another_model() -> None:
    other = nn.Linear(6, 3)
    optimizer = OneBitAdam(other.parameters())
    train(other, optimizer)
    made()[1].load_state_dict(optimizer.state_dict())


@alone(r"model must be wrapped in DistributedDataParallel, got Sequential")
def attached_to_a_model_without_ddp() -> None:
    ddp.attach(*made())


@alone(r"the second backward pass has added its gradients to those of the first step: call optimizer.zero_grad\(\)")
def no_zero_grad() -> None:
    model, optimizer = made()
    for _ in range(STEPS):
        model(torch.randn(16, 6)).square().mean().backward()
        optimizer.step()
