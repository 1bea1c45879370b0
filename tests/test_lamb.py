"""LAMB by itself against equation (2) in float64, 1-bit LAMB's warm-up, and what both refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from observe import fingerprint, observe, parameters
from optimizers import LAMBS, construct
from ranks import WORLD_SIZES, run_ranks
from test_compression_stage import CollectiveCounter
from test_warmup import averaged, gradient, relative, ulps, with_odd_memory
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import AbortedStepError, FusedOneBitWarning, Lamb, OneBitLamb

STEPS = 20
DEFAULTS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2, "maximize": False}
DEFAULTS |= {"c_min": 0.01, "c_max": 10.0}
GROUPS = [
    ([(31, 17), (5,), (1000,)], {"weight_decay": 0.3}),
    (
        [(3, 4, 5), (1,), (0,), (), (1300,)],
        {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-4, "c_min": 0.9, "c_max": 1.2, "maximize": True},
    ),
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


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("eps_inside_sqrt", [False, True])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_lamb_is_equation_2(bias_correction, eps_inside_sqrt, tensor_lr):
    options = {"bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt}
    lamb = Lamb(make_groups(), torch.tensor(1e-2) if tensor_lr else 1e-2, **options)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_stay_within_one_ulp_of_equation_2_rounded_once(dtype):
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


def test_without_adaptation_it_is_adams_update_with_the_decay_inside_u():
    torch.manual_seed(0)
    p = Parameter(torch.randn(40, 30))
    lamb = Lamb([p], lr=1e-2, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, c_min=1.0, c_max=1.0)
    x = p.detach().double()
    m = v = torch.zeros_like(x)
    for step in range(STEPS):
        p.grad = gradient(0, step, p, 1)
        g = p.grad.double()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        x = x - 1e-2 * (m / (v.sqrt() + 1e-3) + 0.2 * x)
        lamb.step()
    assert relative(p.double(), x) <= 1e-6
    assert lamb.stats(layers=True)["layers"]["coefficient"] == [1.0]


def test_a_layer_without_a_norm_gets_1():
    """All parameters zero, or no update at all."""
    zero, still = Parameter(torch.zeros(50)), Parameter(torch.ones(50))
    lamb = Lamb([zero, still], lr=0.5, weight_decay=0.0)
    zero.grad = torch.ones(50)
    lamb.step()
    assert lamb.stats(layers=True)["layers"]["coefficient"] == [1.0, 1.0]
    assert torch.equal(still, torch.ones(50))
    expected = -0.5 * 0.1 / (0.001**0.5 + 1e-6)
    torch.testing.assert_close(zero.detach(), torch.full((50,), expected), rtol=1e-5, atol=0.0)


def test_parameters_of_any_strides_are_updated_where_they_lie():
    torch.manual_seed(0)
    lamb = Lamb(with_odd_memory(), lr=1e-2, weight_decay=0.1)
    reference = Reference(lamb)
    where = [(p.data_ptr(), p.stride()) for p in parameters(lamb)]
    assert not parameters(lamb)[2].is_contiguous()
    for step in range(STEPS):
        for i, p in enumerate(parameters(lamb)):
            p.grad = gradient(0, step, p, i)
        reference.step([p.grad for p in parameters(lamb)])
        lamb.step()
    print(f"deviation with odd strides: {deviation(lamb, reference):.1e} (limit 1e-6)")
    assert deviation(lamb, reference) <= 1e-6
    assert [(p.data_ptr(), p.stride()) for p in parameters(lamb)] == where


@pytest.mark.parametrize("transposed", [False, True])
def test_masked_coordinates_stay_exactly_still_and_enter_no_norm(transposed):
    mask = torch.rand(60, 40, generator=torch.Generator().manual_seed(1)) > 0.3
    torch.manual_seed(0)
    p = Parameter(torch.randn(40, 60).t() if transposed else torch.randn(60, 40))
    with torch.no_grad():
        p[~mask] *= 1e3
    alone = Parameter(p.detach()[mask].clone())
    masked, compact = Lamb([p], lr=1e-2, weight_decay=0.5, mask={p: mask}), Lamb([alone], lr=1e-2, weight_decay=0.5)
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


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_average_by_themselves_in_one_collective_and_stay_bit_identical(world_size):
    results = run_ranks(on_ranks, world_size)
    for prints, worst, collectives in results:
        print(f"W={world_size}: deviation from one process on the averages: {worst:.1e} (limit 1e-6)")
        assert prints == results[0][0]
        assert worst <= 1e-6
        assert collectives == {1}
    assert len(set(results[0][0])) == STEPS


def as_lamb(rank: int, world_size: int, name: str, options: dict) -> bool:
    """Whether the warm-up of ``name`` and ``Lamb`` agree to the bit, a skipped step included."""
    pair = [construct(n, make_groups(), freeze_step=100, **options) for n in ("lamb", name)]
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


@pytest.mark.parametrize("name", LAMBS)
@pytest.mark.parametrize("options", [{}, {"bias_correction": True, "eps_inside_sqrt": True}], ids=["", "other"])
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
def test_1_bit_lambs_warmup_is_lamb_to_the_bit(name, options):
    assert run_ranks(as_lamb, 2, name, options) == [True, True]


@pytest.mark.parametrize("name", ["lamb", "onebit-lamb"])
def test_a_group_added_later_leaves_the_other_layers_averages_alone(name):
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


# ---------------------------------------------------------------- bad input

NUMBER = "must be a finite number >= 0, got"
UNIT = r"must be a number in [0, 1), got"
OF_A_GROUP = [
    ({"c_min": 2.0, "c_max": 1.0}, "c_min must be at most c_max, got 2.0 > 1.0"),
    ({"c_min": -0.1}, f"c_min {NUMBER} -0.1"),
    ({"c_min": "small"}, f"c_min {NUMBER} 'small'"),
    ({"c_max": float("nan")}, "c_max must be a finite number > 0, got nan"),
    ({"c_max": float("inf")}, "c_max must be a finite number > 0, got inf"),
    ({"c_max": None}, "c_max must be a finite number > 0, got None"),
    ({"c_min": True}, f"c_min {NUMBER} True"),
    ({"beta3": 1.0}, f"beta3 {UNIT} 1.0"),
    ({"beta3": -0.1}, f"beta3 {UNIT} -0.1"),
    ({"beta3": float("nan")}, f"beta3 {UNIT} nan"),
    ({"lr": -1.0}, f"lr {NUMBER} -1.0"),
    ({"betas": (0.9, 1.0)}, "betas must be two numbers in [0, 1), got (0.9, 1.0)"),
]
OF_A_GROUP_IN_1_BIT_LAMB = [
    ({"r_min": 5.0}, "r_min must be at most r_max, got 5.0 > 4.0"),
    ({"r_max": float("nan")}, "r_max must be a finite number > 0, got nan"),
    ({"r_min": -1}, f"r_min {NUMBER} -1"),
    ({"r_threshold": 1.0}, f"r_threshold {UNIT} 1.0"),
    ({"r_threshold": -0.5}, f"r_threshold {UNIT} -0.5"),
    ({"r_threshold": "0.1"}, f"r_threshold {UNIT} '0.1'"),
]
OF_LAMB = [
    ({"bias_correction": 1}, "bias_correction must be True or False, got 1"),
    ({"eps_inside_sqrt": "no"}, "eps_inside_sqrt must be True or False, got 'no'"),
    ({"nonfinite": "ignore"}, "nonfinite must be one of 'skip', 'raise', got 'ignore'"),
    ({"block_size": 100}, "block_size must be one of (1024, 512, 256, 128) or None, got 100"),
]
OF_1_BIT_LAMB = [
    ({"layerwise": "none"}, "layerwise must be one of 'adaptive', 'frozen', got 'none'"),
    ({"layerwise": True}, "layerwise must be one of 'adaptive', 'frozen', got True"),
    ({"variant": "nvidia"}, "variant must be one of 'paper', 'deepspeed', got 'nvidia'"),
    ({"momentum_scaling": 1}, "momentum_scaling must be True or False, got 1"),
    ({"freeze_step": -1}, 'freeze_step must be an int >= 0 or "auto", got -1'),
]


def refuse(rank: int, world_size: int, name: str, cases: list, in_group: bool) -> list[str]:
    """The texts of all the errors at construction."""
    texts = []
    for options, _ in cases:
        params: Any = [Parameter(torch.ones(3)), Parameter(torch.ones(4))]
        if in_group:
            params, options = [{"params": params[:1]}, {"params": params[1:], **options}], {}
        with pytest.raises(ValueError, match="must be") as error:
            construct(name, params, **{"freeze_step": 5} | options)
        texts.append(str(error.value))
    return texts


@pytest.mark.parametrize(
    ("name", "cases", "in_group"),
    [
        ("lamb", OF_A_GROUP + OF_LAMB, False),
        ("lamb", OF_A_GROUP, True),
        ("onebit-lamb", OF_A_GROUP + OF_LAMB + OF_A_GROUP_IN_1_BIT_LAMB + OF_1_BIT_LAMB, False),
        ("onebit-lamb", OF_A_GROUP + OF_A_GROUP_IN_1_BIT_LAMB, True),
    ],
    ids=["Lamb", "Lamb, a group", "OneBitLamb", "OneBitLamb, a group"],
)
def test_bad_hyper_parameters_are_named_on_every_rank(name, cases, in_group):
    for texts in run_ranks(refuse, 2, name, cases, in_group, group_timeout=10):
        for text, (_, expected) in zip(texts, cases, strict=True):
            assert text == expected + (" in group 1" if in_group else "")


def test_lamb_has_no_arguments_of_the_compression_stage():
    for options in ({"freeze_step": 5}, {"r_min": 0.5}, {"layerwise": "frozen"}, {"scale_norm": "l1"}):
        with pytest.raises(TypeError, match=next(iter(options))):
            Lamb([Parameter(torch.ones(3))], **options)


# ---------------------------------------------------------------- DeepSpeed's configs


def from_deepspeed(config: dict) -> OneBitLamb:
    return OneBitLamb.from_deepspeed([Parameter(torch.ones(3))], config)


def test_all_of_a_deepspeed_config_is_carried_over():
    given = {
        "lr": 0.02,
        "betas": [0.8, 0.95],
        "eps": 1e-5,
        "weight_decay": 0.3,
        "freeze_step": 50,
        "max_coeff": 0.4,
        "min_coeff": 0.02,
        "coeff_beta": 0.7,
        "factor_max": 3.0,
        "factor_min": 0.25,
        "factor_threshold": 0.2,
        "bias_correction": True,
        "cuda_aware": False,
        "comm_backend_name": "nccl",
        "amsgrad": False,
        "eps_inside_sqrt": False,
        "max_grad_norm": 0.0,
    }
    expected = {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-5, "weight_decay": 0.3, "c_max": 0.4, "c_min": 0.02}
    expected |= {"beta3": 0.7, "r_max": 3.0, "r_min": 0.25, "r_threshold": 0.2}
    for config in (given, {"type": "OneBitLamb", "params": given}, {"type": "onebitlamb", "params": given}):
        optimizer = from_deepspeed(config)
        assert {key: optimizer.param_groups[0][key] for key in expected} == expected
        options = optimizer.options
        assert (options.freeze_step, options.variant, options.layerwise) == (49, "deepspeed", "adaptive")
        assert (options.scales_momentum, options.scale_norm, options.bias_correction) == (True, "l2", False)
        assert options.dead_coordinates == "keep"


def test_what_a_deepspeed_config_leaves_out_is_deepspeeds_own():
    group = from_deepspeed({"type": "OneBitLamb"}).param_groups[0]
    expected = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "c_max": 10.0, "c_min": 0.01}
    expected |= {"beta3": 0.9, "r_max": 4.0, "r_min": 0.5, "r_threshold": 0.1}
    assert {key: group[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lr": 1e-3, "max_coef": 1.0, "beta": 2}, "unknown keys in the DeepSpeed config: beta, max_coef"),
        ({"type": "OneBitAdam", "params": {}}, 'config["type"] must be "OneBitLamb", got \'OneBitAdam\''),
        ({"type": "Lamb", "params": {}}, 'config["type"] must be "OneBitLamb", got \'Lamb\''),
        ({"amsgrad": True}, "amsgrad must be False to be carried over, got True; see OneBitLamb's arguments"),
        ({"max_grad_norm": 1.0}, "max_grad_norm must be 0.0 to be carried over, got 1.0; see OneBitLamb's arguments"),
        ({"freeze_step": 1}, "freeze_step must be an int >= 2, got 1: DeepSpeed's first step changes nothing"),
        ({"max_coeff": -1.0}, "c_max must be a finite number > 0, got -1.0"),
        ({"factor_threshold": 1.5}, "r_threshold must be a number in [0, 1), got 1.5"),
    ],
)
def test_a_deepspeed_config_that_can_not_be_carried_over_says_why(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_deepspeed(config)


# ---------------------------------------------------------------- the freeze


def moves_beside_a_quiet_layer(quiet: int) -> tuple[float, float, int]:
    """How far a layer moves in the compression stage while another, quiet before the freeze, wakes up; skips."""
    torch.manual_seed(0)
    steady, other = Parameter(torch.randn(640)), Parameter(torch.randn(640))
    freeze_step = 25 + quiet
    optimizer = OneBitLamb([steady, other], lr=1e-3, freeze_step=freeze_step)
    draw = torch.Generator().manual_seed(1)
    for step in range(freeze_step + 60):
        if step == freeze_step:
            before = [steady.detach().clone(), other.detach().clone()]
        silent = 25 <= step < freeze_step + 10
        steady.grad = torch.randn(640, generator=draw)
        other.grad = torch.randn(640, generator=draw) * (not silent)
        optimizer.step()
    moved = [float((p - was).norm()) for p, was in zip((steady, other), before, strict=True)]
    return moved[0], moved[1], optimizer.stats()["skipped_steps"]


def test_a_layer_that_is_quiet_at_the_freeze_and_wakes_up_disturbs_nobody():
    usual, _, _ = moves_beside_a_quiet_layer(0)
    for quiet in (50, 100, 300, 1200):
        steady, woken, skipped = moves_beside_a_quiet_layer(quiet)
        print(f"quiet for {quiet}: the steady layer moves {steady:.3f}, usually {usual:.3f}; the other {woken:.3f}")
        assert skipped == 0
        assert 0.5 * usual < steady < 2 * usual
        assert 0 < woken < 40 * usual


def freeze_after(updates: int, **options: Any) -> None:
    p = Parameter(torch.randn(30))
    optimizer = OneBitLamb([p], freeze_step=updates, **options)
    for _ in range(updates + 1):
        p.grad = torch.randn(30)
        optimizer.step()


@pytest.mark.filterwarnings("error::fusedonebit.FusedOneBitWarning")
def test_a_warmup_too_short_for_the_average_is_warned_of():
    with pytest.warns(FusedOneBitWarning, match=r"after so few updates \(5\) .* 41% .* or a smaller"):
        freeze_after(5)
    freeze_after(16)
    freeze_after(5, beta3=0.5)


def test_layers_that_deepspeeds_average_leaves_out_are_named_and_all_of_them_refused():
    p, q = Parameter(torch.randn(30)), Parameter(torch.randn(30))
    groups = [{"params": [p]}, {"params": [q], "c_min": 1.0, "c_max": 1.0}]
    optimizer = OneBitLamb(groups, freeze_step=20, variant="deepspeed")
    for step in range(22):
        p.grad, q.grad = torch.randn(30), torch.randn(30)
        if step == 20:
            with pytest.warns(FusedOneBitWarning, match=r"1 tensor\(s\) have no average coefficient .*: parameter 1"):
                optimizer.step()
        else:
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"all are 0: .* Set freeze_step above 20"):
        freeze_after(20, variant="deepspeed", c_min=1.0, c_max=1.0)


# ---------------------------------------------------------------- hyper-parameters changed in mid-training


BAD_CHANGES = [
    ("lr", float("nan"), "lr must be a finite number >= 0, got nan in group 0"),
    ("lr", "x", "lr must be a finite number >= 0, got 'x' in group 0"),
    ("betas", (0.9,), "betas must be two numbers"),
    ("c_min", float("nan"), "c_min must be a finite number >= 0, got nan in group 0"),
    ("r_min", 5.0, "r_min must be at most r_max, got 5.0 > 4.0 in group 0"),
    ("r_threshold", -1.0, "r_threshold must be a number in [0, 1), got -1.0 in group 0"),
]


def change_on_rank_1(rank: int, world_size: int, key: str, value: object) -> list[str]:
    torch.manual_seed(0)
    p = Parameter(torch.randn(100))
    optimizer, seen = OneBitLamb([p], lr=1e-3, freeze_step=2), []
    for step in range(5):
        p.grad = torch.randn(100)
        good = optimizer.param_groups[0][key]
        if rank == 1 and step in (1, 4):
            optimizer.param_groups[0][key] = value
        before = p.detach().clone()
        try:
            optimizer.step()
        except (AbortedStepError, ValueError) as error:
            seen.append(f"{type(error).__name__}: {error}")
            assert torch.equal(p, before)
            optimizer.param_groups[0][key] = good
    optimizer.step()
    assert (optimizer.phase, optimizer.stats()["step"]) == ("compression", 4)
    return [*seen, fingerprint([p])]


@pytest.mark.parametrize(("key", "value", "text"), BAD_CHANGES)
def test_a_bad_value_set_in_mid_training_on_one_rank_is_named_there_and_stops_all(key, value, text):
    there, here = run_ranks(change_on_rank_1, 2, key, value, group_timeout=15)
    assert len(there) == len(here) == 3
    assert all(said.startswith("AbortedStepError") for said in there[:2])
    assert all(said.startswith("ValueError") and text in said for said in here[:2])
    assert there[2] == here[2]


@pytest.mark.parametrize("late", [False, True])
def test_a_group_with_a_hyper_parameter_of_another_optimizer_is_refused_and_changes_nothing(late):
    p, q = Parameter(torch.randn(10)), Parameter(torch.randn(10))
    optimizer = Lamb([p])

    def refused() -> None:
        if late:
            optimizer.add_param_group({"params": [q], "r_min": 0.5})
        Lamb([{"params": [p, q], "r_min": 0.5}])

    with pytest.raises(ValueError, match=r"r_min is no hyper-parameter of Lamb, got r_min=0.5 in group"):
        refused()
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [q]})
    p.grad, q.grad, before = torch.ones(10), torch.ones(10), q.detach().clone()
    optimizer.step()
    assert (q != before).all()
