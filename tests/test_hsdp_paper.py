"""Sharded models on 2 x 2 ranks against a plain model in one process, each compressed step from the optimizer's state.

The plain run averages the gradients of each replica's two batches, splits them as FSDP2 does, and gives each column of
shards its own compression in float64: scales are those of a column's elements. What LAMB knows of a layer it computes
from the whole layer. See ``teacher_forced`` for what may differ.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import reference_adam
import reference_lamb
import torch
from observe import flat
from optimizers import PAPER, construct
from ranks import run_ranks
from sharded import REPLICAS, SHARDS, look, make_mesh, positions, shard
from teacher_forced import Deviation, LambDeviation, worst
from torch import Tensor, nn

WARM_UP, STEPS = 10, 30
ADAM = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.5}
LAMB = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-12, "weight_decay": 0.05, "eps_inside_sqrt": True, "beta3": 0.5}
BOUNDS = {"c_min": 0.01, "c_max": 10.0, "r_min": 0.5, "r_max": 4.0, "r_threshold": 0.1}
CASES = {
    "adam, paper": ("onebit-adam", ADAM | PAPER),
    "adam, defaults": ("onebit-adam", ADAM),
    "lamb, paper": ("onebit-lamb", LAMB | PAPER),
    "lamb, defaults": ("onebit-lamb", LAMB),
    "lamb, frozen": ("onebit-lamb-frozen", LAMB | PAPER),
}
FULL = ("adam, defaults", "lamb, paper", "lamb, frozen")


def make_model() -> nn.Sequential:
    """All kinds of shards: uneven ones, and of the last layer one rank has all and the other nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 65), nn.Tanh(), nn.Linear(65, 129), nn.Tanh(), nn.Linear(129, 1))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """On a batch of each rank's own."""
    x = torch.randn(16, 9, generator=torch.Generator().manual_seed(rank + 10 * step))
    return (model(x) - x.sum(1, keepdim=True).sin()).square().mean()


def record_steps(rank: int, world_size: int, name: str, options: dict) -> dict:
    """Trains; returns losses, and the state before each step and after the last."""
    mesh = make_mesh()
    model = shard(make_model(), mesh)
    optimizer = construct(name, model.parameters(), freeze_step=WARM_UP, process_group=mesh["replicate"], **options)
    states, losses = [], []
    for step in range(WARM_UP + STEPS):
        states.append(look(optimizer))
        loss = loss_of(model, rank, step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    states.append(look(optimizer))
    stats = optimizer.stats()
    assert (stats["phase"], stats["step"], stats["collectives_step"]) == ("compression", WARM_UP + STEPS, 2)
    return {"states": states, "losses": losses}


class PlainRun:
    """A plain model, and the flat vector of its parameters."""

    def __init__(self) -> None:
        self.model = make_model()
        self.shapes = [p.shape for p in self.model.parameters()]
        ends = np.cumsum([p.numel() for p in self.model.parameters()])
        self.layers = [slice(int(a), int(b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        self.pieces = positions(self.shapes)
        self.columns = [np.concatenate(pieces) for pieces in self.pieces]

    def scopes(self, scope: str) -> list[tuple[int, np.ndarray]]:
        """Elements that share a worker's scale: a column's, or up to 4096 of a tensor's shard."""
        if scope == "global":
            return list(enumerate(self.columns))
        found = []
        for column, pieces in enumerate(self.pieces):
            for piece in pieces:
                found += [(column, piece[at : at + 4096]) for at in range(0, piece.size, 4096)]
        return found

    def gradients(self, x: np.ndarray, step: int) -> tuple[list[np.ndarray], list[float]]:
        """Of each replica the mean of its ranks' gradients; and all ranks' losses."""
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.from_numpy(x), self.model.parameters())
        gradients, losses = [], []
        for rank in range(REPLICAS * SHARDS):
            loss = loss_of(self.model, rank, step)
            gradients.append(flat(torch.autograd.grad(loss, list(self.model.parameters()))))
            losses.append(loss.item())
        replicas = [np.mean(gradients[i : i + SHARDS], axis=0) for i in range(0, len(gradients), SHARDS)]
        return [g.astype(np.float64) for g in replicas], losses


def whole(plain: PlainRun, runs: list[dict], t: int) -> SimpleNamespace:
    """The state of all ranks before step ``t``, by the flat index of whole tensors; equal in both replicas."""
    states = [run["states"][t] for run in runs]
    d = plain.layers[-1].stop

    def join(key: str, replica: int, dtype: type = np.float64) -> np.ndarray:
        line = np.zeros(d, dtype=dtype)
        for column, where in enumerate(plain.columns):
            line[where] = states[replica * SHARDS + column][key]
        return line

    for column in range(SHARDS):
        for key in set(states[column]) - {"worker_error", "server_error", "served"}:
            np.testing.assert_array_equal(states[column][key], states[column + SHARDS][key])
    for key in {"layers", "unit"} & set(states[0]):
        np.testing.assert_array_equal(states[0][key], states[1][key])
    keys = [key for key in ("x", "v", "m", "travelled", "fresh") if key in states[0]]
    found = SimpleNamespace(**{key: join(key, 0) for key in keys}, x32=join("x", 0, np.float32))
    found.layers = states[0].get("layers", np.zeros((3, len(plain.layers)))).astype(np.float64)
    found.unit = np.repeat(states[0]["unit"].astype(np.float64), [layer.stop - layer.start for layer in plain.layers])
    found.worker_error = [join("worker_error", i) for i in range(REPLICAS)]
    found.server_error = np.zeros(d)
    found.served = []
    for rank, state in enumerate(states):
        where = plain.columns[rank % SHARDS][state["served"]]
        found.server_error[where] = state["server_error"]
        found.served.append(where)
    return found


def compare_scopes(
    plain: PlainRun,
    deviation: Deviation,
    before: SimpleNamespace,
    after: SimpleNamespace,
    gradients: list[np.ndarray],
    options: dict,
) -> tuple[np.ndarray, np.ndarray]:
    """Each scope's exchange by itself; returns the momentum and where all signs are equal."""
    m, agreed = np.zeros_like(before.x), np.zeros(before.x.size, dtype=bool)
    for column, scope in plain.scopes(options.get("scale_scope", "block")):
        parts = [np.flatnonzero(np.isin(scope, after.served[column + i * SHARDS])) for i in range(REPLICAS)]
        parts = [part for part in parts if part.size]
        unit = before.unit[scope]
        here, there = (
            reference_adam.State(
                s.x[scope], s.m[scope], s.v[scope], [e[scope] for e in s.worker_error], s.server_error[scope]
            )
            for s in (before, after)
        )
        local = [g[scope] for g in gradients]
        norm = options.get("scale_norm", "contractive")
        spec = reference_adam.exchange(
            here.m, here.worker_error, here.server_error, local, parts, unit, options["betas"][0], norm
        )
        terms = [unit * (np.abs(here.m) + np.abs(g)) for g in local]
        # One element's scale is the element, and what it is the sum of may be much larger: then so is rounding.
        found = deviation if scope.size >= 32 else Deviation()
        agreed[scope] = found.compare_exchange(here, there, terms, parts, spec, after.travelled[scope])
        m[scope] = spec.m
    return m, agreed


def check_moments(plain: PlainRun, runs: list[dict], options: dict, after: SimpleNamespace) -> float:
    """The warm-up's m and v, of averaged gradients, and LAMB's coefficients c and c_avg, of whole layers."""
    beta1, beta2 = options["betas"]
    d, off = plain.layers[-1].stop, 0.0
    m, v, m_terms, v_terms = np.zeros((4, d))
    lamb = reference_lamb.WarmUp(whole(plain, runs, 0).x, m, v, *np.zeros((2, len(plain.layers))))
    for t in range(WARM_UP):
        gradients, losses = plain.gradients(whole(plain, runs, t).x32, t)
        off = worst(off, np.abs(np.array(losses) - [run["losses"][t] for run in runs]))
        g, size = np.mean(gradients, 0), np.mean(np.abs(gradients), 0)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        m_terms, v_terms = beta1 * m_terms + (1 - beta1) * size, beta2 * v_terms + (1 - beta2) * size**2
        if "beta3" in options:
            lamb = reference_lamb.warmup_step(lamb, g, plain.layers, settings(options), Counter())
    np.testing.assert_array_less(np.abs(after.m - m), 1e-6 * m_terms + 1e-30)
    np.testing.assert_array_less(np.abs(after.v - v), 1e-6 * v_terms + 1e-30)
    if "beta3" in options:
        np.testing.assert_allclose(after.layers[2], lamb.c, rtol=1e-5)
        np.testing.assert_allclose(after.layers[0], lamb.c_avg, rtol=1e-5)
        assert np.ptp(lamb.c_avg) > 0.1
    return off


def settings(options: dict) -> reference_lamb.Settings:
    beta1, beta2 = options["betas"]
    named = {key: options[key] for key in ("lr", "eps", "weight_decay", "beta3")}
    return reference_lamb.Settings(beta1=beta1, beta2=beta2, **named, **BOUNDS)


def floored(plain: PlainRun, v: np.ndarray, name: str, options: dict) -> np.ndarray:
    """What is frozen: v, by default at least a hundredth of its whole tensor's mean."""
    if "variance_floor" in options:
        return v
    return np.concatenate([np.maximum(v[layer], 0.01 * v[layer].mean()) for layer in plain.layers])


@pytest.mark.long(but=1)
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.full if case in FULL else ()) for case in CASES])
def test_compressed_steps_are_the_papers_with_shards_as_scopes(case):
    name, options = CASES[case]
    runs, plain = run_ranks(record_steps, REPLICAS * SHARDS, name, options), PlainRun()
    assert [min(piece.size for piece in pieces) for pieces in plain.pieces] == [1, 0]
    preconditioned = name == "onebit-adam" and "precondition" not in options
    states = [whole(plain, runs, t) for t in range(WARM_UP, WARM_UP + STEPS + 1)]
    deviation = Deviation() if name == "onebit-adam" else LambDeviation()
    loss = check_moments(plain, runs, options, states[0])
    np.testing.assert_allclose(states[1].v, floored(plain, states[0].v, name, options), rtol=2e-7)
    for t, (before, after) in enumerate(pairwise(states)):
        before.v, step = after.v, WARM_UP + t
        gradients, losses = plain.gradients(before.x32, step)
        loss = worst(loss, np.abs(np.array(losses) - [run["losses"][step] for run in runs]))
        denom = np.sqrt(before.v / (1 - options["betas"][1] ** WARM_UP)) + options["eps"]
        before.unit = 1 / denom if preconditioned else after.unit
        if t:
            before.m = before.travelled / before.unit
        after.m = after.travelled / before.unit
        m, agreed = compare_scopes(plain, deviation, before, after, gradients, options)
        if name == "onebit-adam":
            m_hat = m / (1 - options["betas"][0] ** (step + 1))
            x = before.x - options["lr"] * (m_hat / denom + options["weight_decay"] * before.x)
            deviation.compare_parameters(before, after, SimpleNamespace(x=x), agreed)
        else:
            compare_layers(plain, deviation, before, after, m, agreed, options, states[0], name == "onebit-lamb")
    deviation.check(case)
    print(f"{case}: losses: {loss:.1e} (limit 1e-5)")
    assert loss <= 1e-5
    assert (states[-1].x != states[0].x).all()


def compare_layers(
    plain: PlainRun,
    deviation: LambDeviation,
    before: SimpleNamespace,
    after: SimpleNamespace,
    m: np.ndarray,
    agreed: np.ndarray,
    options: dict,
    first: SimpleNamespace,
    adaptive: bool,
) -> None:
    """What follows from the momentum of whole layers."""
    scales = reference_lamb.momentum_scales(first.m, plain.layers)
    np.testing.assert_allclose([after.unit[layer.start] for layer in plain.layers], scales, rtol=1e-5)
    here, there = (
        reference_lamb.State(s.x, s.m, s.v, s.fresh, s.layers[1], s.layers[0], s.worker_error, s.server_error)
        for s in (before, after)
    )
    if before is first:
        here.v = here.v_frozen  # raised to its floor at the freeze
    spec = reference_lamb.update(here, m, plain.layers, settings(options), adaptive)
    complete = np.concatenate([np.full(layer.stop - layer.start, agreed[layer].all()) for layer in plain.layers])
    deviation.compare_parameters(here, there, spec, agreed & complete)
    if not adaptive:
        here.v = there.v = np.ones_like(m)  # no variance follows the gradients
        spec.v = np.ones_like(m)
    deviation.compare_layers(plain.layers, there, after.layers[2], spec, agreed)
