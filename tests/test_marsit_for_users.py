"""Marsit as users meet it: alone, with further groups, and what it tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from observe import caught, fingerprint, parameters
from optimizers import objects
from ranks import run_ranks
from rounds import kept, make_parameters, set_gradients, train
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import DisagreementError, MarsitAdam, MarsitSGD, Rounds
from fusedonebit.comm import MarsitAllReduce, SimulatedGroup, SimulatedTransport, StepContext, Transport
from fusedonebit.triton_kernels import Coef, FlatLayout

# ---------------------------------------------------------------- one process, groups, and what is told


def grow(rank: int, world_size: int, local_steps: int) -> tuple[tuple, tuple, list[int], str, list[bool]]:
    params = make_parameters()
    optimizer = MarsitSGD(params[:3], 1e-2, rounds=Rounds(full_precision_every=4, local_steps=local_steps))
    train(optimizer, rank, 2 * local_steps)
    before = [*kept(optimizer), *(optimizer.momentum(p) for p in params[:3])]
    optimizer.add_param_group({"params": params[3:], "lr": 3e-2, "momentum": 0.5})
    after = [*(optimizer.compensation(p) for p in params[:3]), *(optimizer.momentum(p) for p in params[:3])]
    rounds = [optimizer.stats()["rounds"]]
    train(optimizer, rank, 2 * local_steps, 2 * local_steps)
    rounds.append(optimizer.stats()["rounds"])
    still = [bool(torch.equal(p, q)) for p, q in zip(params, make_parameters(), strict=True)]
    outcome: tuple = (None, "")
    if local_steps > 1:
        train(optimizer, rank, 1, 4 * local_steps)
        outcome = caught(lambda: optimizer.add_param_group({"params": [Parameter(torch.ones(3))]}))
        train(optimizer, rank, local_steps - 1, 4 * local_steps + 1)
    differ = caught(lambda: optimizer.add_param_group({"params": [Parameter(torch.ones(3 + rank))]}))
    train(optimizer, rank, local_steps, 5 * local_steps)
    assert len(optimizer.param_groups) == 2
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    return outcome, differ, rounds, fingerprint(params), [*same, not any(still)]


@pytest.mark.parametrize("local_steps", [1, 2])
def test_groups_can_be_added_between_rounds_and_workers_keep_all(local_steps):
    results = run_ranks(grow, 2, local_steps, group_timeout=10)
    for outcome, differ, rounds, bits, good in results:
        assert all(good)
        assert rounds == [2, 4]
        assert bits == results[0][3]
        assert differ[0] is DisagreementError
        if local_steps > 1:
            assert outcome[0] is RuntimeError
            assert "must be called between two rounds, not after 1 of 2 local steps" in outcome[1]


def test_a_group_that_was_added_counts_its_own_updates():
    """AdamW's bias correction begins with the group."""
    torch.manual_seed(0)
    p, q = Parameter(torch.randn(300)), Parameter(torch.randn(300))
    ours = MarsitAdam([p], 1e-2, rounds=Rounds(full_precision_every=1), weight_decay=0.0)
    a, b = Parameter(p.detach().clone()), Parameter(q.detach().clone())
    theirs = torch.optim.AdamW([a], 1e-2, weight_decay=0.0)
    for step in range(8):
        if step == 3:
            ours.add_param_group({"params": [q]})
            theirs.add_param_group({"params": [b]})
        for mine, other in ((p, a), (q, b)):
            mine.grad = torch.randn(300, generator=torch.Generator().manual_seed(step))
            other.grad = mine.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, a, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(q, b, rtol=1e-5, atol=2e-6)


def tell(rank: int, world_size: int) -> tuple[list[dict], str, float]:
    rounds = Rounds(full_precision_every=2, local_steps=2, compensation_limit=None)
    optimizer = MarsitSGD(make_parameters(), 1e-2, topology="torus", rounds=rounds)
    seen = []
    for step in range(8):
        train(optimizer, rank, 1, step)
        seen.append(optimizer.stats(compensation=True))
    norm = torch.linalg.vector_norm(torch.cat([c.reshape(-1) for c in kept(optimizer)]))
    return seen, repr(optimizer), float(norm)


def test_stats_and_repr_tell_where_training_stands():
    for seen, text, norm in run_ranks(tell, 4):
        assert [s["step"] for s in seen] == list(range(1, 9))
        assert [s["rounds"] for s in seen] == [0, 1, 1, 2, 2, 3, 3, 4]
        assert [s["local_steps"] for s in seen] == [1, 0] * 4
        assert [s["phase"] for s in seen] == ["local", "uncompressed", "local", "one-bit"] * 2
        assert [s["collectives_step"] for s in seen] == [0, 2, 0, 4] * 2
        assert [s["bytes_step"] == 0 for s in seen] == [True, False] * 4
        assert seen[-1]["compensation_norm"] == pytest.approx(norm, rel=1e-5)
        assert seen[1]["compensation_norm"] == 0
        assert seen[0]["parameters"] == sum(p.numel() for p in make_parameters())
        # Momentum, compensation and anchor, and one bit for each element.
        held = seen[-1]["state_bytes"] / (seen[-1]["parameters"] + seen[-1]["padding"])
        assert 12 < held < 14
        assert 0 < seen[-1]["wire_bytes"] < 0.3 * seen[-1]["parameters"]
        for line in ("MarsitSGD", "phase: one-bit, 8 updates", "topology: torus, full precision every 2 rounds"):
            assert line in text
        assert "local_steps: 2" in text
    never = MarsitSGD(make_parameters(), rounds=Rounds(full_precision_every=0))
    assert "topology: ring, full precision never\n" in repr(never)


def test_momentum_that_comes_later_is_refused_instead_of_ignored():
    optimizer = MarsitSGD(make_parameters(), 1e-2, momentum=0.0)
    train(optimizer, 0, 1)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="momentum must be 0 where no group had any at construction, got 0"):
        train(optimizer, 0, 1)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("every", [0, 1])
def test_stochastic_rounding_keeps_small_updates_in_all_rounds(every):
    param = Parameter(torch.full((1000,), 4.0, dtype=torch.bfloat16))
    options = {"momentum": 0.0, "global_ratio": 1.0, "full_precision_every": every, "stochastic_rounding": True}
    optimizer = MarsitSGD([param], 1e-3, **objects(**options))
    for _ in range(400):
        param.grad = torch.ones_like(param)
        optimizer.step()
    # Half a unit in the last place is 0.0156: rounding to nearest would move nothing.
    assert param.float().mean().item() == pytest.approx(3.6, abs=0.02)


def test_updates_whose_sum_would_overflow_are_averaged():
    def run(rank: int, transport: Transport) -> Tensor:
        param = Parameter(torch.zeros(10))
        rounds = Rounds(full_precision_every=1)
        optimizer = MarsitSGD([param], 2.0**64, momentum=0.0, rounds=rounds, process_group=transport)
        param.grad = torch.full((10,), (1.25, 1.5)[rank] * 2.0**63)
        optimizer.step()
        return param.detach()

    for param in SimulatedGroup(2).run(run):  # of updates 1.25 and 1.5 times 2^127; float32 ends at 2^128
        assert torch.equal(param, torch.full((10,), -1.375 * 2.0**127))


class Watched(SimulatedTransport):
    """Notes when an exchange begins and when it is waited for."""

    notes: list[str]

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Any:
        pending, wait = super().exchange(received, source, sent, destination), self.notes.append
        self.notes.append("send")

        class Waited:
            def wait(self) -> None:
                wait("wait")
                pending.wait()

        return Waited()


def test_a_segments_local_work_is_done_while_its_bits_travel():
    def run(rank: int, transport: SimulatedTransport) -> list[str]:
        watched = Watched(transport.group, rank)
        watched.notes = []
        reduce = MarsitAllReduce(FlatLayout((3000,), 3), watched, full_precision_every=0)
        told = StepContext(coef=torch.ones(1, len(Coef)))
        reduce.synchronise(lambda part, chunks: watched.notes.append("prepare"), told)
        return watched.notes

    for notes in SimulatedGroup(3).run(run):
        assert notes == ["prepare", *("send", "prepare", "wait") * 2, *("send", "wait") * 2]


def bad_tensors(rank: int, transport: Transport, case: str) -> tuple[type | None, str, bool]:
    reduce = MarsitAllReduce(FlatLayout((6, 2), 2), transport, full_precision_every=0)
    good, step = [torch.ones(6), torch.ones(2)], 0.1
    bad = {
        "strided": ([torch.ones(12)[::2], torch.ones(2)], step),
        "long": ([torch.ones(7), torch.ones(2)], step),
        "one more": ([*good, torch.ones(1)], step),
        "whole numbers": ([torch.ones(6).long(), torch.ones(2)], step),
        "step": (good, -1.0),
    }
    found: list[Tensor] = []
    tensors, size = bad[case] if rank == 1 else (good, step)
    kind, text = caught(lambda: found.append(reduce(tensors, size)))
    return kind, text, not found or not found[0].any()


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("strided", "tensor 0 must be contiguous, of 6 elements"),
        ("long", "tensor 0 must be contiguous, of 6 elements"),
        ("one more", "tensors must be 2, as the layout has, got 3"),
        ("whole numbers", "tensor 0 must be float32, bfloat16 or float16, got torch.int64"),
        ("step", "step must be a finite number >= 0, got -1.0"),
    ],
)
def test_one_ranks_bad_tensors_are_its_error_and_skip_the_round(case, text):
    (kind, _, skipped), (bad, said, _) = SimulatedGroup(2).run(lambda r, t: bad_tensors(r, t, case))
    assert kind is None
    assert skipped
    assert bad in (TypeError, ValueError)
    assert text in said


def test_a_transport_that_can_not_exchange_is_told_so():
    class Old:
        rank, world_size, traffic = 0, 2, None
        all_to_all = all_gather = all_reduce = reduce_scatter = broadcast = print

    with pytest.raises(TypeError, match="got Old, which lacks exchange"):
        MarsitSGD(make_parameters(), 1e-2, process_group=Old())


# ---------------------------------------------------------------- clipping


def clipped(rank: int, transport: Transport, local_steps: int) -> list[tuple[float, list[Tensor]]]:
    options: dict = {"momentum": 0.0, "full_precision_every": 1, "local_steps": local_steps}
    optimizer = MarsitSGD(make_parameters(), 1e-2, max_grad_norm=0.5, process_group=transport, **objects(**options))
    seen = []
    for step in range(4 * local_steps):
        set_gradients(optimizer, rank, step)
        for p in parameters(optimizer):
            p.grad.mul_(1.0 if step % 4 == 3 else 1e-3 if step % 4 == 2 else 1.0 + rank)
        own = torch.linalg.vector_norm(torch.cat([p.grad.reshape(-1).double() for p in parameters(optimizer)]))
        grads = [p.grad.double() for p in parameters(optimizer)]
        before = [p.detach().double() for p in parameters(optimizer)]
        optimizer.step()
        moved = [b - p.detach().double() for p, b in zip(parameters(optimizer), before, strict=True)]
        seen.append((float(own), optimizer.stats()["grad_norm"], grads, moved))
    return seen


def test_with_one_local_step_the_mean_norm_clips_all_ranks():
    for of_ranks in zip(*SimulatedGroup(3).run(lambda r, t: clipped(r, t, 1)), strict=True):
        mean = sum(own for own, *_ in of_ranks) / 3
        factor = min(1.0, 0.5 / mean)
        averages = [torch.stack(grads).mean(0) for grads in zip(*(seen[2] for seen in of_ranks), strict=True)]
        for _, told, _, moved in of_ranks:
            assert told == pytest.approx(mean, rel=1e-5)
            for g, m in zip(averages, moved, strict=True):
                torch.testing.assert_close(m, 1e-2 * factor * g, rtol=1e-4, atol=5e-7)


def test_in_local_steps_each_worker_clips_by_its_own_norm():
    for seen in SimulatedGroup(2).run(lambda r, t: clipped(r, t, 2)):
        for own, told, grads, moved in seen[::2]:
            assert told == pytest.approx(own, rel=1e-5)
            for g, m in zip(grads, moved, strict=True):
                torch.testing.assert_close(m, 1e-2 * min(1.0, 0.5 / own) * g, rtol=1e-4, atol=5e-7)
