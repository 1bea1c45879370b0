"""LAMB by itself against equation (2) in float64, and 1-bit LAMB's warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collective_counter import CollectiveCounter
from observe import fingerprint, observe, parameters
from optimizers import LAMBS, construct, objects
from ranks import WORLD_SIZES, run_ranks, simulate
from torch import Tensor
from torch.nn import Parameter
from warmup_runs import averaged, gradient, relative, ulps, with_odd_memory

from fusedonebit import Lamb, Numerics
from fusedonebit.comm import Transport

STEPS = 20
DEFAULTS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2, "maximize": False}
DEFAULTS |= {"c_min": 0.01, "c_max": 10.0}
GROUPS = [
    ([(31, 17), (5,), (1000,)], {"weight_decay": 0.3}),
    (
        [(3, 4, 5), (1,), (0,), (), (1300,)],
        {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-4, "c_min": 0.9, "c_max": 1.2, "maximize": True},
    ),
    ([(40, 30)], {"betas": (0.8, 0.9), "eps": 1e-3, "c_min": 1.0, "c_max": 1.0}),  # Adam, with the decay inside u
]


def make_groups(dtype: torch.dtype = torch.float32) -> list[dict]:
    torch.manual_seed(0)
    return [{"params": [Parameter(torch.randn(s).to(dtype)) for s in shapes], **options} for shapes, options in GROUPS]


class Reference:
    """Equation (2) of 1-bit LAMB, tensor by tensor in float64."""

    def __init__(self, optimizer: Lamb, bias_correction: bool = False, eps_inside_sqrt: bool = False) -> None:
        self.groups, self.bias_correction, self.eps_inside = optimizer.param_groups, bias_correction, eps_inside_sqrt
        self.x = [p.detach().double().clone() for p in parameters(optimizer)]
        self.m, self.v = ([torch.zeros_like(x) for x in self.x] for _ in range(2))
        self.c = [1.0] * len(self.x)
        self.t = 0

    def step(self, gradients: list[Tensor]) -> None:
        self.t += 1
        i = 0
        for group in self.groups:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            for _ in group["params"]:
                g = gradients[i].double() * (-1.0 if group["maximize"] else 1.0)
                self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
                self.v[i] = beta2 * self.v[i] + (1 - beta2) * g * g
                m, v = self.m[i], self.v[i]
                if self.bias_correction:
                    m, v = m / (1 - beta1**self.t), v / (1 - beta2**self.t)
                denom = (v + group["eps"]).sqrt() if self.eps_inside else v.sqrt() + group["eps"]
                u = m / denom + group["weight_decay"] * self.x[i]
                self.c[i] = coefficient(self.x[i], u, group["c_min"], group["c_max"])
                self.x[i] = self.x[i] - lr * self.c[i] * u
                i += 1


def coefficient(x: Tensor, u: Tensor, c_min: float, c_max: float) -> float:
    """clip(|x| / |u|), 1 where a norm is zero."""
    norms = float(x.norm()), float(u.norm())
    return min(max(norms[0] / norms[1], c_min), c_max) if all(norms) else 1.0


def deviation(optimizer: Lamb, reference: Reference) -> float:
    return max(relative(p.double(), x) for p, x in zip(parameters(optimizer), reference.x, strict=True))


# ---------------------------------------------------------------- equation (2)


@pytest.mark.long(but=3)
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("eps_inside_sqrt", [False, True])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_lamb_is_equation_2(bias_correction, eps_inside_sqrt, tensor_lr):
    """Also of parameters of any strides, which are updated where they lie."""
    options = {"bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt}
    odd = with_odd_memory()
    where = [(p.data_ptr(), p.stride()) for p in odd]
    lamb = Lamb(
        [*make_groups(), {"params": odd, "weight_decay": 0.1}],
        torch.tensor(1e-2) if tensor_lr else 1e-2,
        **objects(**options),
    )
    reference = Reference(lamb, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(lamb, lambda step: 0.2 + 0.05 * step)
    worst, seen = 0.0, set()
    for step in range(STEPS):
        for i, p in enumerate(parameters(lamb)):
            p.grad = gradient(0, step, p, i)
        reference.step([p.grad for p in parameters(lamb)])
        lamb.step()
        scheduler.step()
        worst = max(worst, deviation(lamb, reference))
        told = lamb.stats(layers=True)["layers"]
        assert told["coefficient"] == pytest.approx(reference.c, rel=1e-5)
        seen |= set(reference.c)
    for p, m, v in zip(parameters(lamb), reference.m, reference.v, strict=True):
        worst = max(worst, relative(lamb.momentum(p).double(), m), relative(lamb.state[p]["exp_avg_sq"].double(), v))
    print(f"deviation from equation (2) in {STEPS} steps: {worst:.1e} (limit 1e-6)")
    assert worst <= 1e-6
    assert {0.9, 1.2} <= seen, "both bounds must have been met"
    assert len(seen) > 20
    assert [(p.data_ptr(), p.stride()) for p in odd] == where
    assert not odd[2].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_equation_2_rounded_to_one_ulp(dtype):
    lamb = Lamb(make_groups(dtype), lr=1e-2)
    reference, worst = Reference(lamb), 0
    start = [p.detach().clone() for p in parameters(lamb)]
    for step in range(STEPS):
        for i, p in enumerate(parameters(lamb)):
            p.grad = gradient(0, step, p, i)
        reference.step([p.grad for p in parameters(lamb)])
        lamb.step()
        worst = max(ulps(p, x.to(dtype)) for p, x in zip(parameters(lamb), reference.x, strict=True))
        reference.x = [p.detach().double() for p in parameters(lamb)]
        assert worst <= 1
    print(f"{dtype}: deviation from equation (2) in each of {STEPS} steps: {worst} ulp (limit 1)")
    assert all(not torch.equal(p, x) for p, x in zip(parameters(lamb), start, strict=True) if p.numel() > 1)


def test_a_layer_without_a_norm_gets_1():
    """All parameters zero, or no update at all."""
    zero, still = Parameter(torch.zeros(50)), Parameter(torch.ones(50))
    lamb = Lamb([zero, still], lr=0.5, weight_decay=0.0)
    zero.grad, still.grad = torch.ones(50), torch.zeros(50)
    lamb.step()
    assert lamb.stats(layers=True)["layers"]["coefficient"] == [1.0, 1.0]
    assert torch.equal(still, torch.ones(50))
    expected = -0.5 * 0.1 / (0.001**0.5 + 1e-6)
    torch.testing.assert_close(zero.detach(), torch.full((50,), expected), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("transposed", [False, True])
def test_masked_coordinates_stay_exactly_still_and_enter_no_norm(transposed):
    mask = torch.rand(60, 40, generator=torch.Generator().manual_seed(1)) > 0.3
    torch.manual_seed(0)
    p = Parameter(torch.randn(40, 60).t() if transposed else torch.randn(60, 40))
    with torch.no_grad():
        p[~mask] *= 1e3
    alone = Parameter(p.detach()[mask].clone())
    masked, compact = (
        Lamb([p], lr=1e-2, weight_decay=0.5, numerics=Numerics(mask={p: mask})),
        Lamb([alone], lr=1e-2, weight_decay=0.5),
    )
    before = p.detach().clone()
    for step in range(STEPS):
        p.grad = gradient(0, step, p, 2)
        alone.grad = p.grad[mask].clone()
        masked.step()
        compact.step()
    assert torch.equal(p[~mask], before[~mask])
    assert relative(p[mask], alone) <= 1e-6
    told = [o.stats(layers=True)["layers"] for o in (masked, compact)]
    assert told[0]["coefficient"] == pytest.approx(told[1]["coefficient"], rel=1e-6)
    assert told[0]["variance_norm"] == pytest.approx(told[1]["variance_norm"], rel=1e-6)


# ---------------------------------------------------------------- ranks


def on_ranks(rank: int, world_size: int) -> tuple[list[str], float, set[int]]:
    lamb, reference = Lamb(make_groups()), Lamb(make_groups(), process_group=None if world_size == 1 else alone())
    prints, worst, collectives = [], 0.0, set()
    for step in range(STEPS):
        for i, (p, q) in enumerate(zip(parameters(lamb), parameters(reference), strict=True)):
            p.grad, q.grad = gradient(rank, step, p, i), averaged(world_size, step, q, i)
        with CollectiveCounter() as counter:
            lamb.step()
        reference.step()
        collectives |= {len(counter.names), lamb.stats()["collectives_step"]}
        prints.append(fingerprint(parameters(lamb)))
        pairs = zip(parameters(lamb), parameters(reference), strict=True)
        worst = max([worst, *(relative(p, q) for p, q in pairs)])
    return prints, worst, collectives


def alone() -> Any:
    from fusedonebit.comm import LocalTransport

    return LocalTransport()


@pytest.mark.long(but=1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_average_in_one_collective_and_stay_bit_identical(world_size):
    results = run_ranks(on_ranks, world_size)
    for prints, worst, collectives in results:
        print(f"W={world_size}: deviation from one process on the averages: {worst:.1e} (limit 1e-6)")
        assert prints == results[0][0]
        assert worst <= 1e-6
        assert collectives == {1}
    assert len(set(results[0][0])) == STEPS


def as_lamb(rank: int, transport: Transport, name: str, options: dict) -> bool:
    """Whether the warm-up of ``name`` and ``Lamb`` agree to the bit, a skipped step included."""
    pair = [construct(n, make_groups(), freeze_step=100, **options, process_group=transport) for n in ("lamb", name)]
    same = True
    for step in range(STEPS):
        for optimizer in pair:
            for i, p in enumerate(parameters(optimizer)):
                p.grad = gradient(rank, step, p, i)
            if step == 3 and rank == 1:
                p.grad[7] = float("inf")
            optimizer.step()
        states = [observe(optimizer) for optimizer in pair]
        same &= all((states[0][key] == states[1][key]).all() for key in ("x", "m", "v", "layer"))
    assert pair[1].phase == "warmup"
    return same


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", LAMBS)
@pytest.mark.parametrize("options", [{}, {"bias_correction": True, "eps_inside_sqrt": True}], ids=["", "other"])
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
def test_1_bit_lambs_warmup_is_lamb_to_the_bit(name, options):
    assert simulate(as_lamb, 2, name, options) == [True, True]


@pytest.mark.parametrize("name", ["lamb", "onebit-lamb"])
def test_a_group_added_later_leaves_other_layers_averages_alone(name):
    """Layers know nothing of each other before the freeze: old ones go on as if none had been added."""
    runs = []
    for add in (False, True):
        torch.manual_seed(0)
        old, new = [Parameter(torch.randn(n)) for n in (700, 33)], Parameter(torch.randn(90))
        optimizer = construct(name, old, lr=1e-2, freeze_step=100, block_size=128)
        for step in range(12):
            if add and step == 5:
                optimizer.add_param_group({"params": [new], "c_max": 0.25})
            for i, p in enumerate(parameters(optimizer)):
                p.grad = gradient(0, step, p, i)
            optimizer.step()
        runs.append((fingerprint(old), optimizer.stats(layers=True)["layers"]))
    (bits, without), (bits_too, beside) = runs
    assert bits == bits_too
    for key in ("name", "average", "coefficient"):
        assert beside[key][:2] == without[key]
    assert beside["average"][2] == pytest.approx(0.25 * (1 - 0.9**7), rel=1e-5)


# ---------------------------------------------------------------- stats


@pytest.mark.parametrize("name", ["lamb", *LAMBS])
def test_stats_tell_of_the_layers_what_can_be_computed_by_hand(name):
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 7))
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "beta3": 0.8, "freeze_step": 5}
    optimizer = construct(name, model.named_parameters(), **options)
    params = parameters(optimizer)
    reference = Reference(optimizer)
    averages, ratios = [0.0] * 4, [1.0] * 4
    for step in range(12):
        for i, p in enumerate(params):
            p.grad = gradient(0, step, p, i)
        reference.step([p.grad for p in params])
        optimizer.step()
        told = optimizer.stats(layers=True)["layers"]
        saved = optimizer.state_dict()["state"]
        following = saved[0].get("exp_avg_sq_fresh") is not None
        variances = [s["exp_avg_sq_fresh" if following else "exp_avg_sq"].double() for s in saved.values()]
        coefficients = reference.c
        if optimizer.phase != "compression":
            averages = [0.8 * a + 0.2 * c for a, c in zip(averages, reference.c, strict=True)]
        elif name == "onebit-lamb":
            frozen = [s["exp_avg_sq"].double() for s in saved.values()]
            found = [float((f / v).max()) for f, v in zip(frozen, variances, strict=True)]
            limited = [min(max(r, 0.9 * last), 1.1 * last) for r, last in zip(found, ratios, strict=True)]
            ratios = [min(max(r, 0.5), 4.0) for r in limited]
        if optimizer.phase == "compression":
            coefficients = [r * a for r, a in zip(ratios, averages, strict=True)]
        assert told["name"] == [f"parameter {i} ({n})" for i, (n, _) in enumerate(model.named_parameters())]
        assert told["average"] == pytest.approx(averages, rel=1e-5)
        assert told["ratio"] == pytest.approx(ratios, rel=1e-5)
        assert told["coefficient"] == pytest.approx(coefficients, rel=1e-5)
        assert told["variance_norm"] == pytest.approx([float(v.norm()) for v in variances], rel=1e-5), optimizer.phase
    assert (optimizer.phase == "compression") == (name != "lamb")
    assert (ratios != [1.0] * 4) == (name == "onebit-lamb")
    assert "layers" not in optimizer.stats()


@pytest.mark.parametrize("name", ["lamb", *LAMBS])
def test_repr_says_what_it_is(name):
    text = repr(construct(name, [Parameter(torch.ones(3))], freeze_step=5))
    assert text.startswith("Lamb (" if name == "lamb" else "OneBitLamb (")
    assert ("layerwise: frozen, as in paper" in text) == (name == "onebit-lamb-frozen")
    assert "c_max: 10.0" in text
