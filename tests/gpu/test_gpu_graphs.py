"""Compressed steps in CUDA graphs, and loss scaling on the device."""

from __future__ import annotations

import pytest
import torch
from gpu_runs import FREEZE, KINDS, Run, assert_equal, every_kind, without_waiting
from torch import Tensor

from fusedonebit import amp
from fusedonebit.comm import Transport

pytestmark = [pytest.mark.cuda_only, pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")]
STEPS = FREEZE + 30


class StaticRun(Run):
    """Gradients that stay where they are, and a learning rate that falls in place."""

    def __init__(self, device, shapes, kind: str, transport: Transport | None = None) -> None:
        super().__init__(device, shapes, transport=transport, capturable=True, max_grad_norm=100.0, **KINDS[kind])
        self.set_gradients(0)
        self.grads = [p.grad for p in self.params]

    def refill(self, step: int) -> None:
        self.set_gradients(step)
        for grad, p in zip(self.grads, self.params, strict=True):
            grad.copy_(p.grad)
            p.grad = grad
        for group in self.optimizer.param_groups:
            group["lr"].mul_(0.95)

    def train(self, captured: bool) -> list[Tensor]:
        for step in range(FREEZE + 3):
            self.refill(step)
            self.optimizer.step()
        take = self.optimizer.step
        if captured:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.optimizer.step()
            take = graph.replay
        for step in range(FREEZE + 3, STEPS - 3):
            self.refill(step)
            take()
        for step in range(STEPS - 3, STEPS):
            self.refill(step)
            self.optimizer.step()
        return [p.detach().clone() for p in self.params]


@every_kind
def test_replays_equal_steps(device, shapes, kind):
    replayed, stepped = StaticRun(device, shapes, kind), StaticRun(device, shapes, kind)
    assert_equal(replayed.train(captured=True), stepped.train(captured=False))
    for name in ("step", "skipped_steps", "phase", "vetoed_steps", "update_norm", "grad_norm"):
        assert replayed.optimizer.stats()[name] == stepped.optimizer.stats()[name]


@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_a_graph_holds_nccls_collectives(device, shapes, nccl, kind):
    replayed = StaticRun(device, shapes, kind, nccl())
    assert_equal(replayed.train(captured=True), StaticRun(device, shapes, kind).train(captured=False))


@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_loss_scaled_steps_never_wait_overflows_change_nothing(device, shapes, kind):
    run = Run(device, shapes, max_grad_norm=1.0, **KINDS[kind])
    scaler = amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=1000)
    scaler.scale(torch.ones(1, device=device))
    for step in range(FREEZE + 5):
        run.set_gradients(step)
        scaler.step(run.optimizer)
        scaler.update()
    run.set_gradients(99)
    with without_waiting():
        for _ in range(3):
            scaler.step(run.optimizer)
            scaler.update()
    before = [p.detach().clone() for p in run.params]
    momenta = [run.optimizer.momentum(p) for p in run.params]
    run.params[1].grad[0, 0] = torch.inf
    scaler.step(run.optimizer)
    scaler.update()
    assert_equal(before, [p.detach() for p in run.params])
    assert_equal(momenta, [run.optimizer.momentum(p) for p in run.params])
    assert run.optimizer.stats()["skipped_steps"] == 1
    assert scaler.get_scale() == 2.0**7


def test_a_compiled_step_has_the_bits_of_an_eager_one(device, shapes):
    pytest.importorskip("torch._inductor")
    results = []
    for compiled in (False, True):
        run = Run(device, shapes, lr=torch.tensor(1e-2, device=device))
        step = torch.compile(run.optimizer.step, fullgraph=True) if compiled else run.optimizer.step
        for i in range(FREEZE + 10):
            run.set_gradients(i)
            step()
        results.append([p.detach().clone() for p in run.params])
    assert_equal(*results)
