"""Whole steps through Triton's kernels: the bits of eager steps, and few launches whatever the number of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import PAPER, by_name
from ranks import simulate
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import Lamb, MarsitAdam, MarsitSGD, OneBitAdam, OneBitLamb
from fusedonebit.triton_kernels import Coef, Layer, rules, using
from fusedonebit.triton_kernels.op import OPS, launches

FREEZE: dict[str, Any] = {"freeze_step": 10}
ADAM: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "adam, paper": (by_name(OneBitAdam), PAPER | FREEZE),
    "adam, layers": (by_name(OneBitAdam), PAPER | FREEZE | {"scale_scope": "layer"}),
    "adam": (by_name(OneBitAdam), FREEZE),
    "adam, ternary": (by_name(OneBitAdam), FREEZE | {"ternary": True}),
    "adam, ternary, one scale": (by_name(OneBitAdam), FREEZE | {"ternary": True, "scale_scope": "global"}),
    "adam, rounded": (by_name(OneBitAdam), FREEZE | {"stochastic_rounding": True}),
}
LAMB: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "uncompressed": (by_name(Lamb), {}),
    "adaptive": (by_name(OneBitLamb), PAPER | FREEZE),
    "frozen": (by_name(OneBitLamb), PAPER | FREEZE | {"adaptive": False, "scale_scope": "layer"}),
    "deepspeed": (by_name(OneBitLamb), PAPER | FREEZE | {"variant": "deepspeed", "scale_scope": "layer"}),
    "defaults": (by_name(OneBitLamb), FREEZE),
    "preconditioned": (by_name(OneBitLamb), FREEZE | {"precondition": True}),
    "ternary": (by_name(OneBitLamb), PAPER | FREEZE | {"ternary": True, "scale_scope": "layer"}),
    "frozen, ternary": (by_name(OneBitLamb), FREEZE | {"adaptive": False, "ternary": True}),
    "rounded": (by_name(OneBitLamb), FREEZE | {"stochastic_rounding": True}),
    "uncompressed, rounded": (by_name(Lamb), {"stochastic_rounding": True}),
}
EVERY = {"full_precision_every": 3}
MARSIT: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ring": (by_name(MarsitAdam), EVERY | {"compensation_limit": None, "stochastic_rounding": True}),
    "owner": (by_name(MarsitSGD), EVERY | {"topology": "owner", "local_steps": 2}),
    "decays": (by_name(MarsitSGD), EVERY | {"weight_decay": 0.1}),
    "rounds": (by_name(MarsitAdam), EVERY | {"local_steps": 2}),
    "torus": (by_name(MarsitSGD), {"topology": "torus", "momentum": 0.0, "full_precision_every": 0}),
    "clipped": (by_name(MarsitAdam), EVERY | {"topology": "owner", "compensation_limit": 0.5, "max_grad_norm": 1.0}),
}
KINDS = ADAM | LAMB | MARSIT
SECONDS = ("adam", "adam, ternary", "adam, rounded", "adaptive", "defaults", "ternary", "ring", "owner")
"""Those of ``make test-long``: others take minutes."""
OF_A_RANK = "residual_over_momentum"  # of two float64 sums, which each backend adds in its own order


def train(rank: int, transport: Any, kind: str) -> tuple[list[Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    make, options = KINDS[kind]
    marsit, steps = kind in MARSIT, 5 if kind in MARSIT else 30
    some = torch.bfloat16 if marsit or "rounded" in kind else torch.float32
    dtypes = [torch.float32, some, torch.float32, torch.float32]
    params = [Parameter(torch.randn(n).to(d)) for n, d in zip(((7,), (10, 20), (0,), (1,)), dtypes, strict=True)]
    optimizer = make(params, 1e-2, process_group=transport, **options)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = (torch.randn(p.shape, generator=generator) * 10.0 ** (i - 2)).to(p.dtype)
            if "ternary" in kind:
                p.grad.view(-1)[::5] = 0.0
        if step == 2 * steps // 3 and rank == transport.world_size - 1:
            params[1].grad[3, 3] = torch.nan
        optimizer.step()
    stats = optimizer.stats(layers=True) if kind in LAMB else optimizer.stats()
    outcomes = stats["step"], stats["skipped_steps"], stats["partial_steps"]
    partly = kind.startswith("uncompressed") and transport.world_size == 1  # one element alone stays
    assert outcomes == (steps, 0, 1) if partly else marsit or outcomes == (steps - 1, 1, 0)
    kept = [optimizer.compensation(p) for p in params] if marsit else []
    return [*(p.detach() for p in params), *kept], {"backend": stats["backend"], **stats.get("layers", {})}


def check_equal_steps(kind: str, world_size: int) -> None:
    runs = {}
    for backend in ("plain", "triton"):
        with using(backend):
            runs[backend] = simulate(train, world_size, kind)
    for (expected, layers), (found, others) in zip(runs["plain"], runs["triton"], strict=True):
        assert ("Triton" in layers.pop("backend"), "Triton" in others.pop("backend")) == (False, True)
        assert all(map(torch.equal, expected, found))
        assert layers.pop(OF_A_RANK, []) == pytest.approx(others.pop(OF_A_RANK, []), rel=1e-14)
        assert layers == others
        if kind in ("adaptive", "deepspeed", "preconditioned", "ternary", "rounded"):
            assert any(r != 1 for r in layers["ratio"])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("kind", [k if k in SECONDS else pytest.param(k, marks=pytest.mark.full) for k in KINDS])
def test_steps_through_the_kernels_give_the_bits_of_eager(kind):
    check_equal_steps(kind, {"torus": 4}.get(kind, 2) if kind in MARSIT else 1)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("kind", ["adam, paper", "adaptive", "adam, ternary", "ternary"])
def test_two_ranks_steps_through_kernels_give_the_bits_of_eager(kind):
    check_equal_steps(kind, 2)


# ---------------------------------------------------------------- launches


class NotRun:
    """Stands in for a kernel whose launch is counted, but which would run for minutes."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments, **constants: None


COMPRESSED = {"momentum_compress": 1, "finish_alone": 1, "apply_momentum": 1}
RESCALED = {"lamb_ratio": 1, "lamb_rescale": 1}
LAUNCHES = {"uncompressed": {"lamb_update": 1, "lamb_coefficient": 1, "lamb_move": 1, "advance": 1}}
LAUNCHES |= dict.fromkeys((*ADAM, "frozen"), COMPRESSED)
LAUNCHES |= dict.fromkeys(("adaptive", "deepspeed", "defaults", "preconditioned"), COMPRESSED | RESCALED)


@pytest.mark.long(but=["adam-3", "adam-3000", "adaptive-100"])
@pytest.mark.parametrize(
    ("kind", "tensors"),
    [("adam", 3), ("adam", 302), ("adam", 3000), ("adam, paper", 302), *((k, 100) for k in LAUNCHES if k in LAMB)],
)
def test_a_step_launches_few_kernels_for_any_number_of_tensors(kind, tensors, monkeypatch):
    params = [Parameter(torch.ones(3)) for _ in range(tensors)]
    make, options = KINDS[kind]
    optimizer = make(params, **(options | {"freeze_step": 1} if options else {}))
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    if tensors > 3:
        for op in OPS.values():
            monkeypatch.setattr(op.kernel, "_compiled", NotRun())
    with using("triton"):
        launches.clear()
        optimizer.step()
    assert optimizer.phase == ("compression" if options else "uncompressed")
    print(f"launches of {kind} with {tensors} tensors: {launches.total()} (limit {sum(LAUNCHES[kind].values())})")
    assert launches == LAUNCHES[kind]


def test_kernels_read_rows_and_columns_where_the_host_writes():
    for names, constants in ((Coef, len(Coef)), (Layer, len(Layer))):
        for name in names:
            assert getattr(rules, name.name) == name < constants
    assert len(Coef) == rules.COLUMNS


def test_triton_on_the_cpu_is_refused_outside_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"), using("triton"):
        pass
    with pytest.raises(ValueError, match="must be 'triton', 'native' or 'plain', got 'cuda'"), using("cuda"):
        pass
