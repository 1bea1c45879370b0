"""0/1 Adam whose workers have variances of their own: what they move, what all agree on, and what is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from observe import caught, fingerprint, flat, parameters, through_a_file
from rounds import Script, make, make_parameters, momenta, own_state, residuals, set_gradients, variances
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import AbortedStepError, Numerics, ZeroOneAdam, policies
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.optim.own_variance import OwnVariance

BETAS = (0.8, 0.9)
DECAY = 0.1


def own(params: Any, lengths: tuple[int, ...] = (2,), **options: Any) -> ZeroOneAdam:
    given = {"weight_decay": DECAY, "variance_policy": None, "sync_policy": Script(lengths)} | options
    return make(params, **given)


def train(optimizer: ZeroOneAdam, rank: int, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        set_gradients(optimizer, rank, step)
        optimizer.step()


def level(optimizer: ZeroOneAdam) -> OwnVariance:
    assert optimizer.algorithm.own is not None
    return optimizer.algorithm.own


def owed(optimizer: ZeroOneAdam) -> list[Tensor]:
    return [optimizer.worker_error(p).view_as(p) for p in parameters(optimizer)]


@pytest.mark.parametrize(
    ("rounds", "length", "phases"),
    [
        (policies.EveryStep(), 1, [("one-bit", 0)] * 4),
        (policies.FixedRounds(), 2, [("local", 1), ("one-bit", 0)] * 2),
    ],
)
def test_rounds_alone_have_it_from_the_first_step(rounds, length, phases):
    optimizer, seen = ZeroOneAdam(make_parameters(), sync_policy=rounds), []
    for step in range(4):
        set_gradients(optimizer, 0, step)
        assert not optimizer.averages_gradients
        optimizer.step()
        seen.append((optimizer.phase, optimizer.stats()["local_steps"]))
    assert seen == phases
    assert "variance: of each worker" in repr(optimizer)
    stats = optimizer.stats()
    assert (stats["rounds"], stats["renewals"], stats["round_steps"], stats["step"]) == (4 // length, 0, length, 4)


# ---------------------------------------------------------------- what it computes


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 3.0}, {"maximize": True}], ids=str)
def test_alone_it_is_adamw_but_for_what_is_still_owed(length, options):
    """Also where the learning rate changes within a round."""
    ours, copies = make_parameters(), make_parameters()
    how = {key: value for key, value in options.items() if key == "maximize"}
    optimizer = own(ours, (length,), eps=1e-8, **options)
    adamw = torch.optim.AdamW(copies, 1e-2, BETAS, 1e-8, DECAY, foreach=False, **how)
    start, decays, worst = [p.detach().clone() for p in ours], 1.0, 0.0
    for step in range(24):
        for each in (optimizer, adamw):
            each.param_groups[0]["lr"] = 1e-2 * (1 + step % 4)
        for line in (ours, copies):
            for i, p in enumerate(line):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
        if "max_grad_norm" in options:
            torch.nn.utils.clip_grad_norm_(copies, options["max_grad_norm"])
        if optimizer.algorithm.synchronised:
            start, decays = [p.detach().clone() for p in ours], 1.0
        decays *= 1 - optimizer.param_groups[0]["lr"] * DECAY
        optimizer.step()
        adamw.step()
        before = ours if optimizer.algorithm.synchronised else [decays * x for x in start]
        for x, c, q in zip(before, owed(optimizer), copies, strict=True):
            worst = max(worst, float((x.detach() - c - q.detach()).abs().max()))
    moved = max(float((p - q).detach().abs().max()) for p, q in zip(copies, make_parameters(), strict=True))
    print(f"rounds of {length}, {options}: off by {worst:.1e} of {moved:.1f} (limit 1e-5)")
    assert worst <= 1e-5


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_of_what_workers_want_to_move_is_lost(world_size):
    """x - mean(e) - E moves by the mean of the workers' own steps, also where steps are skipped, or a rank can't."""
    bad, broken = (3, 8), 13

    def work(rank: int, transport: Transport) -> list[dict[str, np.ndarray]]:
        optimizer = own(make_parameters()[:3], (2, 1, 3), weight_decay=0.0, eps=1e-8, process_group=transport)
        seen, raised = [], []
        for step in range(24):
            rho, before = level(optimizer).rho.clone(), [m.clone() for m in momenta(optimizer)]
            t = optimizer.state[parameters(optimizer)[0]]["step"].item() + 1
            set_gradients(optimizer, rank, step)
            if step in bad and rank == 1:
                parameters(optimizer)[0].grad[:2] = torch.nan
            if step == broken and rank == 1:
                parameters(optimizer)[1].grad = parameters(optimizer)[1].grad.to_sparse()
            if kind := caught(optimizer.step)[0]:
                raised.append(kind)
            steps = []
            for i, (m, v) in enumerate(zip(momenta(optimizer), variances(optimizer), strict=True)):
                d = (v.double() * float(rho[i]) / (1 - BETAS[1] ** t)).sqrt() + 1e-8
                moved = torch.where(m == before[i], 0.0, m.double())  # what is dropped keeps its momentum
                steps.append(1e-2 * moved / (1 - BETAS[0] ** t) / d)
            optimizer.algorithm.exchange.reducer.settle()
            seen.append(
                {
                    "x": flat(parameters(optimizer)).astype(np.float64),
                    "e": flat(owed(optimizer)).astype(np.float64),
                    "u": flat(steps).astype(np.float64),
                    "E": optimizer.algorithm.exchange.reducer.of_rank.server.numbers.double().numpy().copy(),
                    "ends": np.array(optimizer.algorithm.synchronised),
                }
            )
        assert raised == [TypeError if rank == 1 else AbortedStepError]
        assert optimizer.stats()["skipped_steps"] == 3
        layout = optimizer.frame.layout
        where = np.concatenate([layout.offset(i) + np.arange(size) for i, size in enumerate(layout.sizes)])
        return [{**each, "where": where} for each in seen]

    ranks = SimulatedGroup(world_size).run(work)
    expected, worst = flat(make_parameters()[:3]).astype(np.float64), 0.0
    for each in zip(*ranks, strict=True):
        expected = expected - np.mean([rank["u"] for rank in each], 0)
        if not each[0]["ends"]:
            continue
        served = np.concatenate([rank["E"] for rank in each])[each[0]["where"]]
        found = each[0]["x"] - np.mean([rank["e"] for rank in each], 0) - served
        worst = max(worst, np.abs(found - expected).max())
    print(f"W={world_size}: lost {worst:.1e} (limit 1e-5)")
    assert worst <= 1e-5


def test_ranks_have_equal_parameters_and_levels_but_own_moments():
    def work(rank: int, transport: Transport) -> tuple[str, ...]:
        optimizer = own(make_parameters(), (2, 3), process_group=transport)
        train(optimizer, rank, 20)
        of_all = parameters(optimizer), [level(optimizer).levels, level(optimizer).rho]
        return tuple(map(fingerprint, (*of_all, momenta(optimizer), variances(optimizer), residuals(optimizer))))

    first, *others = SimulatedGroup(3).run(work)
    for other in others:
        assert other[:2] == first[:2]
        assert all(a != b for a, b in zip(other[2:], first[2:], strict=True))


@pytest.mark.parametrize("common", [0.0, 0.5, 1.0])
def test_updates_are_the_mean_gradients_however_noisy_ranks_are(common):
    """With the same noise-free gradient rho is 1, with noise alone 1/W: then steps are not smaller than Adam's."""

    def work(rank: int, transport: Transport) -> list[float]:
        optimizer = own(make_parameters(), process_group=transport)
        for step in range(60):
            for i, p in enumerate(parameters(optimizer)):
                seeds = (step + 1000 * i, step + 1000 * i + 100_000 * (rank + 1))
                shared, noise = (torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds)
                p.grad = common**0.5 * shared + (1 - common) ** 0.5 * noise
            optimizer.step()
        return level(optimizer).rho.tolist()

    rho, expected = SimulatedGroup(4).run(work)[0], common + (1 - common) / 4
    print(f"{common}: rho {[f'{x:.2f}' for x in rho]}, expected {expected}")
    assert abs(rho[0] - expected) <= (0.06 if common in (0.0, 1.0) else 0.15 * expected)


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
def test_skipped_steps_and_missing_gradients_change_no_level():
    def work(rank: int, transport: Transport) -> None:
        optimizer = own(make_parameters(), (1,), process_group=transport)
        params = parameters(optimizer)
        train(optimizer, rank, 5)
        before = level(optimizer).levels.clone(), level(optimizer).rho.clone()
        set_gradients(optimizer, rank, 5)
        if rank == 0:
            params[0].grad[0, 0] = torch.nan
        optimizer.step()
        assert optimizer.stats()["skipped_steps"] == 1
        assert torch.equal(level(optimizer).levels, before[0])
        assert torch.equal(level(optimizer).rho, before[1])
        set_gradients(optimizer, rank, 6)
        params[1].grad = None
        optimizer.step()
        assert torch.equal(level(optimizer).levels[:, 1], before[0][:, 1])
        assert not torch.equal(level(optimizer).levels[:, 0], before[0][:, 0])

    SimulatedGroup(2).run(work)


def test_without_eps_what_never_had_a_gradient_stays():
    optimizer = own(make_parameters(), eps=0.0, weight_decay=0.0)
    for step in range(4):
        set_gradients(optimizer, 0, step)
        parameters(optimizer)[0].grad[:3] = 0.0
        optimizer.step()
    assert optimizer.stats()["skipped_steps"] == 0
    start, now = make_parameters()[0].detach(), parameters(optimizer)[0].detach()
    assert (now[3:] != start[3:]).all()
    assert now.isfinite().all()


# ---------------------------------------------------------------- what is sent


def test_it_sends_bits_few_numbers_and_nothing_between_rounds():
    def work(rank: int, transport: Transport) -> list[tuple[int, int]]:
        params = [Parameter(torch.randn(512, 512)) for _ in range(4)]
        with torch.no_grad():
            for p in params:
                p.copy_(torch.randn(512, 512, generator=torch.Generator().manual_seed(1)))
        policy = policies.FixedRounds(2)
        optimizer, sent = ZeroOneAdam(params, sync_policy=policy, process_group=transport), []
        for step in range(4):
            set_gradients(optimizer, rank, step)
            optimizer.step()
            stats = optimizer.stats()
            sent.append((stats["collectives_step"], stats["bytes_step"]))
        return sent

    for sent in SimulatedGroup(4).run(work):
        per_step = sum(nbytes for _, nbytes in sent) / 4 * 4 / 3 / (4 * 512 * 512)
        print(f"collectives and bytes {sent}, {per_step:.3f} bytes per parameter and step")
        assert [count for count, _ in sent if count > 1] == [3, 3]
        assert sent[2] == (0, 0)  # in the first step ranks agree on policies
        assert per_step < 0.15


@pytest.mark.parametrize(("length", "later"), [(1, [2, 2, 2, 3] * 6), (3, [3, 3, 2, 3, 3, 3, 2]), (4, [3] * 6)])
def test_later_gradients_are_reported_once_in_four_steps(length, later):
    def work(rank: int, transport: Transport) -> list[int]:
        optimizer, counts = own(make_parameters(), (length,), process_group=transport), []
        for step in range(16 + 24):
            train(optimizer, rank, 1, step)
            counts.append(optimizer.stats()["collectives_step"])
        return counts[length - 1 :: length]

    early = -(-16 // length)
    for counts in SimulatedGroup(2).run(work):
        assert counts[1:early] == [3] * (early - 1)  # in the first ranks also agree on policies
        assert counts[early:] == later


def test_alone_it_has_a_level_of_one():
    optimizer = own(make_parameters())
    train(optimizer, 0, 6)
    assert (level(optimizer).rho == 1).all()


# ---------------------------------------------------------------- checkpoints


def test_it_goes_on_from_adamw_with_its_moments_on_all_ranks():
    def work(rank: int, transport: Transport) -> str:
        adamw = torch.optim.AdamW(make_parameters(), 1e-2, BETAS)
        for step in range(20):
            set_gradients(adamw, 0, step)
            adamw.step()
        params = [Parameter(p.detach().clone()) for p in parameters(adamw)]
        optimizer = own(params, process_group=transport)
        optimizer.load_state_dict(through_a_file(adamw.state_dict()))
        theirs = [adamw.state[p]["exp_avg"] for p in parameters(adamw)]
        assert all(map(torch.equal, momenta(optimizer), theirs))
        assert level(optimizer).levels[2].tolist() == [20.0] * len(params)
        before = [p.detach().clone() for p in params]
        train(optimizer, rank, 4, 20)
        assert optimizer.stats()["skipped_steps"] == 0
        moved = max(float((p.detach() - b).abs().max()) for p, b in zip(params, before, strict=True))
        assert 1e-3 < moved < 1
        return fingerprint(params)

    first, second = SimulatedGroup(2).run(work)
    assert first == second


@pytest.mark.parametrize("owns", [False, True])
def test_a_checkpoint_of_the_other_kind_of_variance_is_refused(owns):
    def of(owns: bool) -> ZeroOneAdam:
        return own(make_parameters()) if owns else make(make_parameters(), (0, 1))

    saver = of(not owns)
    train(saver, 0, 4)
    optimizer = of(owns)
    before = own_state(optimizer)
    kind, text = caught(lambda: optimizer.load_state_dict(through_a_file(saver.state_dict())))
    assert kind is ValueError
    assert "the checkpoint was written with variance_policy=" in text
    assert "all workers have one variance with a policy, and without each its own" in text
    assert own_state(optimizer) == before


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"numerics": Numerics(precondition=False)}, "precondition must be True or None where workers have variances"),
        ({"numerics": Numerics(variance_floor=0.1)}, "floor must be 0.0 or None where workers have variances"),
        ({"numerics": Numerics(variance_floor=False)}, "floor must be 0.0 or None where workers have variances"),
        ({"sync_policy": 2}, "sync_policy must have a method steps(done)"),
        ({"sync_policy": Script((0,))}, "sync_policy must answer with an int >= 1, got 0"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_one_clear_error(options, text):
    def begin() -> None:
        optimizer = ZeroOneAdam(make_parameters(), **{"sync_policy": policies.EveryStep()} | options)
        train(optimizer, 0, 1)

    kind, found = caught(begin)
    assert kind in (ValueError, TypeError)
    assert text in found


def test_groups_are_added_before_the_first_step_alone():
    optimizer = own(make_parameters())
    optimizer.add_param_group({"params": [Parameter(torch.randn(7))]})
    train(optimizer, 0, 1)
    kind, text = caught(lambda: optimizer.add_param_group({"params": [Parameter(torch.randn(7))]}))
    assert kind is RuntimeError
    assert "add_param_group must be called before the first step" in text


def test_fixed_rounds_have_their_length():
    done = policies.Progress(0, 0, 0, 0)
    assert policies.FixedRounds().steps(done) == 2
    assert policies.FixedRounds(5).steps(done) == 5
    with pytest.raises(ValueError, match="length must be an int >= 1, got 0"):
        policies.FixedRounds(0)
