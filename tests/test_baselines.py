"""What Marsit is measured against: each aggregation by its definition, and what its coding puts on the wire."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from observe import fingerprint, parameters
from ranks import WORLD_SIZES, run_ranks
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import MarsitSGD, Rounds
from fusedonebit.apps.train.baseline_reducers import Cascading, ErrorFeedback, HopBaseline, MajorityVote, StochasticSign
from fusedonebit.apps.train.baselines import AGGREGATIONS, BaselineAdam, BaselineSGD
from fusedonebit.comm import SimulatedGroup, TorchTransport, Transport
from fusedonebit.triton_kernels import FlatLayout

KINDS: dict[str, type[HopBaseline]] = {
    "signsgd": MajorityVote,
    "ef-signsgd": ErrorFeedback,
    "ssdm": StochasticSign,
    "cascading": Cascading,
}
SIZES = (700, 3, 300)
STEP = 0.25


# ---------------------------------------------------------------- each by its definition


def vectors(world_size: int, round_: int = 0) -> list[list[Tensor]]:
    """By worker; shares make signs agree here and there, and a zero is +1."""
    shared = torch.Generator().manual_seed(500 + round_)
    common = [torch.randn(n, generator=shared) for n in SIZES]
    of_all = []
    for rank in range(world_size):
        own = torch.Generator().manual_seed(rank + 100 * round_)
        of_all.append([c + (i + 1) * torch.randn(c.shape, generator=own) for i, c in enumerate(common)])
        of_all[-1][0][5] = 0.0
    return of_all


def aggregate(
    rank: int, transport: Transport | None, name: str, options: dict, rounds: int
) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    """In each round the global update and what this worker has kept, by tensor, in float64."""
    world_size = transport.world_size if transport else 1
    layout = FlatLayout(SIZES, world_size, 128)
    reduce = KINDS[name](layout, transport, **options)
    seen = []
    for t in range(rounds):
        update = reduce(vectors(world_size, t)[rank], STEP)
        seen.append((split(layout, update), split(layout, reduce.compensation.whole)))
    return seen


def split(layout: FlatLayout, flat: Tensor) -> list[np.ndarray]:
    return [flat[layout.offset(i) :][:n].double().numpy() for i, n in enumerate(SIZES)]


def simulate(world_size: int, name: str, options: dict | None = None, rounds: int = 1) -> list[list[tuple]]:
    return SimulatedGroup(world_size).run(lambda rank, t: aggregate(rank, t, name, options or {}, rounds))


def doubles(world_size: int, t: int) -> list[list[np.ndarray]]:
    return [[x.double().numpy() for x in of_rank] for of_rank in vectors(world_size, t)]


CODINGS = pytest.mark.parametrize("coding", ["elias", "fixed"])
PLACES = pytest.mark.parametrize(
    ("topology", "world_size"), [*(("ring", w) for w in (1, 2, 3, 4, 5)), ("torus", 4), ("torus", 6)]
)


@pytest.mark.long(but=4)
@CODINGS
@PLACES
def test_signsgd_takes_the_majority_of_the_signs_and_a_tie_is_up(topology, world_size, coding):
    ranks, ties = simulate(world_size, "signsgd", {"coding": coding, "topology": topology}, 3), 0
    for t in range(3):
        all_v = doubles(world_size, t)
        for i in range(len(SIZES)):
            votes = sum(np.where(v[i] >= 0, 1, -1) for v in all_v)
            ties += int((votes == 0).sum())
            for of_rank in ranks:
                update, kept = of_rank[t]
                assert (update[i] == np.where(votes >= 0, STEP, -STEP)).all()
                assert (kept[i] == 0).all()
    assert (ties > 0) == (world_size % 2 == 0)


@pytest.mark.long(but=3)
@CODINGS
@PLACES
def test_ef_signsgd_averages_scaled_signs_and_loses_nothing(topology, world_size, coding):
    """The scale is that of all: the mean of abs(v) over the tensor and the workers."""
    ranks = simulate(world_size, "ef-signsgd", {"coding": coding, "topology": topology}, 4)
    error, lost = 0.0, 0.0
    kept = [[np.zeros(n) for n in SIZES] for _ in ranks]
    for t in range(4):
        given_ = doubles(world_size, t)
        for i in range(len(SIZES)):
            all_v = [given_[rank][i] + kept[rank][i] for rank in range(world_size)]
            s = np.mean([np.abs(v).mean() for v in all_v])
            signs = [np.where(v >= 0, 1.0, -1.0) for v in all_v]
            update = s * np.mean(signs, axis=0)
            for rank, of_rank in enumerate(ranks):
                ours, left = of_rank[t][0][i], of_rank[t][1][i]
                error = max(error, float(np.abs(ours - update).max() / s))
                error = max(
                    error, float(np.abs(left - (all_v[rank] - s * signs[rank])).max() / (s + np.abs(left).max()))
                )
            # What all put in is what was applied and what all keep.
            applied = ranks[0][t][0][i] + np.mean([of_rank[t][1][i] for of_rank in ranks], axis=0)
            lost = max(lost, float(np.abs(applied - np.mean(all_v, axis=0)).max() / s))
        kept = [of_rank[t][1] for of_rank in ranks]  # from the implementation's own: signs near zero
    print(f"EF-signSGD, {topology} of {world_size}, {coding}: error {error:.1e}, lost {lost:.1e} (limits 1e-6)")
    assert error <= 1e-6
    assert lost <= 1e-6


def many_draws(
    name: str, world_size: int, rounds: int, elements: int, copies: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Global updates of the same vectors, [rounds * copies, elements], and the vectors, [workers, elements].

    Each copy is a tensor, so a block; as many of them as there are workers are a segment each.
    """
    layout = FlatLayout((elements,) * copies, world_size, 128)
    v = [torch.randn(elements, generator=torch.Generator().manual_seed(rank)) + 0.5 for rank in range(world_size)]

    def work(rank: int, transport: Transport) -> np.ndarray:
        reduce = KINDS[name](layout, transport, coding="fixed", seed=3)
        updates = [reduce([v[rank]] * copies, STEP).view(-1, 128)[:copies, :elements] for _ in range(rounds)]
        return torch.cat(updates).double().numpy()

    updates = SimulatedGroup(world_size).run(work)
    assert all((u == updates[0]).all() for u in updates)
    return updates[0], torch.stack(v).double().numpy()


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_ssdm_is_the_mean_of_signs_that_expect_each_direction(world_size):
    draws = 600
    updates, v = many_draws("ssdm", world_size, draws, 24)
    levels = np.arange(-world_size, world_size + 1, 2) / world_size * STEP
    assert np.isclose(updates[..., None], levels, rtol=1e-6, atol=1e-9).any(-1).all()
    p = 0.5 + v / (2 * np.linalg.norm(v, axis=1, keepdims=True))
    expected = STEP * (2 * p - 1).mean(0)
    deviation = STEP * np.sqrt((4 * p * (1 - p)).sum(0)) / world_size / math.sqrt(draws)
    off = np.abs(updates.mean(0) - expected) / deviation
    print(f"SSDM, {world_size} workers: expectation off by {off.max():.2f} standard errors at most (limit 4)")
    assert off.max() <= 4
    # All elements together tell a wrong scale sooner.
    size = (expected**2).sum()
    slope, error = (updates.mean(0) * expected).sum() / size, np.sqrt((deviation**2 * expected**2).sum()) / size
    print(f"SSDM, {world_size} workers: of the expectation {slope:.3f} (1 within 4 standard errors of {error:.3f})")
    assert abs(slope - 1) <= 4 * error < 0.15
    spread = updates.var(0) / (deviation**2 * draws)
    print(f"SSDM, {world_size} workers: variance over that of independent signs: {spread.mean():.3f} (0.95 ... 1.05)")
    assert 0.95 < spread.mean() < 1.05


def cascading_statistics(world_size: int, draws: int) -> tuple[float, float]:
    """The expectation's distance from the mean in standard errors, at most; and the variance over the mean's square."""
    updates, v = many_draws("cascading", world_size, draws // world_size, 6, world_size)
    error = np.sqrt(updates.var(0, ddof=1) / len(updates))
    off = np.abs(updates.mean(0) - v.mean(0)) / error
    deviation = ((updates - v.mean(0)) ** 2).sum(1).mean() / (v.mean(0) ** 2).sum()
    return float(off.max()), float(deviation)


@pytest.mark.long
def test_cascading_is_unbiased_and_deviates_more_on_more_ranks():
    deviations = []
    for world_size in (2, 3, 4):
        off, deviation = cascading_statistics(world_size, 900)
        print(f"cascading, {world_size} workers: expectation off by {off:.2f} standard errors (limit 4)")
        print(f"cascading, {world_size} workers: |s3 - s1|^2 / |s1|^2: {deviation:.1f}")
        assert off <= 4
        deviations.append(deviation)
    assert deviations[0] * 2 < deviations[1]
    assert deviations[1] * 2 < deviations[2]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_cascaded_segment_is_one_number_with_signs(world_size):
    """What arrives at the end of the ring is one bit for each element, and one norm."""
    for update, kept in (of_rank[0] for of_rank in simulate(world_size, "cascading")):
        chunk = FlatLayout(SIZES, world_size, 128).chunk_numel
        magnitudes = [np.unique(np.abs(u)) for u in update]
        assert sum(map(len, magnitudes)) <= world_size + len(SIZES)
        assert len(magnitudes[0]) == -(-SIZES[0] // chunk)
        assert all((k == 0).all() for k in kept)


# ---------------------------------------------------------------- on ranks


def on_ranks(rank: int, transport: Transport, name: str, coding: str, kind: str, topology: str) -> list[str]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in ((33, 40), (7,), ())]
    make = {"sgd": BaselineSGD, "adam": BaselineAdam}[kind]
    how = {"aggregation": name, "coding": coding, "topology": topology, "local_steps": 2}
    optimizer = make(params, 1e-2, process_group=transport, **how)
    prints = []
    for step in range(10):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + rank + 10 * step + 1000 * i))
        optimizer.step()
        prints.append(fingerprint(params))
    assert optimizer.stats()["rounds"] == 5
    return prints


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("topology", "world_size"), [*(("ring", w) for w in (*WORLD_SIZES, 3)), ("torus", 4)])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_parameters_are_bit_identical_after_every_round(name, topology, world_size):
    """And the coding changes nothing but the bytes."""
    found = {}
    for coding, kind in (("elias", "sgd"), ("fixed", "sgd"), ("fixed", "adam")):
        prints = SimulatedGroup(world_size).run(lambda r, t, c=coding, k=kind: on_ranks(r, t, name, c, k, topology))
        for step, of_ranks in enumerate(zip(*prints, strict=True)):
            assert len(set(of_ranks)) == (1 if step % 2 else world_size)
        assert len(set(prints[0])) == 10
        found[coding, kind] = prints
    assert found["elias", "sgd"] == found["fixed", "sgd"] != found["fixed", "adam"]


def aggregate_on_ranks(rank: int, world_size: int, name: str) -> list[Any]:
    return aggregate(rank, TorchTransport(None, torch.device("cpu")), name, {}, 2)


@pytest.mark.long(but=3)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_gloo_ranks_and_simulated_ranks_get_the_same(name, world_size):
    for real, simulated in zip(
        run_ranks(aggregate_on_ranks, world_size, name), simulate(world_size, name, rounds=2), strict=True
    ):
        for ours, theirs in zip(real, simulated, strict=True):
            for a, b in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
                # EF-signSGD's scale is a sum that gloo may add in another order.
                np.testing.assert_allclose(a, b, rtol=1e-6 if name == "ef-signsgd" else 0, atol=1e-6 * (name[0] == "e"))


# ---------------------------------------------------------------- what travels

MANY = 128 * 3 * 5 * 7 * 8


def bytes_of_hops(name: str, world_size: int, coding: str, draw: Callable[[int], Tensor]) -> list[list[int]]:
    """Bytes of each exchange of a round, by rank; without the lengths that go ahead of Elias' codes."""

    def work(rank: int, transport: Transport) -> list[int]:
        hops: list[int] = []
        exchange = transport.exchange

        def watched(received: Tensor, source: int, sent: Tensor, destination: int) -> Any:
            before = transport.traffic.bytes_total
            pending = exchange(received, source, sent, destination)

            class Counted:
                def wait(self) -> None:
                    pending.wait()
                    hops.append(transport.traffic.bytes_total - before)

            return Counted()

        transport.exchange = watched  # type: ignore[method-assign]
        reduce = KINDS[name](FlatLayout((MANY,), world_size, 128), transport, coding=coding)
        reduce([draw(rank)], STEP)
        return hops if coding == "fixed" else hops[1::2]

    return SimulatedGroup(world_size).run(work)


def gaussian(rank: int) -> Tensor:
    return torch.randn(MANY, generator=torch.Generator().manual_seed(rank))


@pytest.mark.long(but=4)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", ["ef-signsgd", "ssdm", "signsgd"])
def test_sums_of_fixed_width_take_the_bits_their_values_need(name, world_size):
    chunk = FlatLayout((MANY,), world_size, 128).chunk_numel
    # A sum of j signs has one of j + 1 values; a majority is told in one bit.
    reduction = [math.ceil(math.log2(j + 1)) for j in range(1, world_size)]
    told = 1 if name == "signsgd" else math.ceil(math.log2(world_size + 1))
    expected = [*reduction, *[told] * (world_size - 1)]
    for hops in bytes_of_hops(name, world_size, "fixed", gaussian):
        assert [n * 8 / chunk for n in hops] == expected
    print(f"{name}, {world_size} workers: bits per element and hop: {expected}")
    assert max(expected) <= math.ceil(math.log2(world_size)) + 1


def test_cascading_takes_one_bit_for_each_element_on_every_hop():
    chunk = FlatLayout((MANY,), 4, 128).chunk_numel
    for hops in bytes_of_hops("cascading", 4, "fixed", gaussian):
        assert hops == [chunk // 8 + 4] * 6


def test_elias_codes_are_shorter_for_ssdm_with_8_workers():
    elias, fixed = (sum(map(sum, bytes_of_hops("ssdm", 8, coding, gaussian))) for coding in ("elias", "fixed"))
    per_element = 8 * elias / (8 * 14 * MANY / 8)
    print(f"SSDM, 8 workers: Elias {per_element:.2f} bits per element and hop; over fixed width: {elias / fixed:.3f}")
    assert elias < fixed


# ---------------------------------------------------------------- users


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "mean"}, "aggregation must be one of 'cascading', 'ef-signsgd', 'psgd', 'signsgd', 'ssdm'"),
        ({"aggregation": "ssdm", "coding": "huffman"}, "coding must be one of 'elias', 'fixed', got 'huffman'"),
        ({"aggregation": "ssdm", "seed": -1}, "seed must be an int >= 0, got -1"),
        ({"aggregation": "ssdm", "local_steps": 0}, "local_steps must be an int >= 1, got 0"),
        ({"aggregation": "ssdm", "topology": "owner"}, "topology must be"),
        ({}, "aggregation"),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [BaselineSGD, BaselineAdam])
def test_bad_arguments_are_named(make, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make([Parameter(torch.randn(3))], **options)


def test_a_large_seed_is_one_too():
    p = Parameter(torch.zeros(300))
    optimizer = BaselineSGD([p], aggregation="ssdm", seed=2**70)
    p.grad = torch.randn(300)
    optimizer.step()
    assert p.count_nonzero() == 300


def skip_a_round(rank: int, world_size: int, name: str) -> tuple[bool, int, str]:
    p = Parameter(torch.zeros(300))
    optimizer = BaselineSGD([p], aggregation=name)
    still = False
    for step in range(4):
        p.grad = torch.randn(300, generator=torch.Generator().manual_seed(rank + 10 * step))
        before = p.detach().clone()
        if step == 2 and rank == 1:
            p.grad[7] = float("nan")
        optimizer.step()
        still = still or (step == 2 and torch.equal(p, before))
    return still, optimizer.stats()["skipped_steps"], fingerprint(parameters(optimizer))


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_nonfinite_number_on_one_rank_skips_the_round_on_all(name):
    results = run_ranks(skip_a_round, 2, name)
    assert [seen[:2] for seen in results] == [(True, 1)] * 2
    assert results[0][2] == results[1][2]


def test_psgd_is_marsit_in_full_precision():
    """Which is SGD on averaged gradients, as ``test_marsit_algorithm`` says."""

    def train(rank: int, transport: Transport, name: str) -> Tensor:
        p = Parameter(torch.zeros(300))
        how: dict[str, Any] = {"aggregation": "psgd"} if name == "psgd" else {"rounds": Rounds(full_precision_every=1)}
        make = BaselineSGD if name == "psgd" else MarsitSGD
        optimizer = make([p], 0.1, process_group=transport, **how)
        for step in range(10):
            p.grad = torch.randn(300, generator=torch.Generator().manual_seed(rank + 10 * step))
            optimizer.step()
        return p.detach()

    ours, marsits = (SimulatedGroup(3).run(lambda *of, name=name: train(*of, name)) for name in ("psgd", "marsit"))
    assert all(map(torch.equal, ours, marsits))


@pytest.mark.long
def test_padding_does_not_swell_the_norms_of_cascading():
    # Theorem 3: E|s3 - s1|^2 <= (2D)^M G^2 / M, where padding would count as elements.
    size, world_size, draws = 6, 3, 200
    vectors = torch.randn(world_size, size, generator=torch.Generator().manual_seed(0))
    layout = FlatLayout((size,), world_size, 128)

    def run(rank: int, transport: Transport) -> list[Tensor]:
        reduce = Cascading(layout, transport)
        return [reduce([vectors[rank]], 1.0)[:size] for _ in range(draws)]

    results = torch.stack(SimulatedGroup(world_size).run(run)[0])
    error = (results - vectors.mean(0)).square().sum(1).mean()
    bound = (2 * size) ** world_size * vectors.square().sum(1).max() / world_size
    print(f"cascading, M = {world_size}, D = {size}: mean square error {error:.0f}, Theorem 3's bound {bound:.0f}")
    assert error < bound


def test_a_checkpoint_has_what_a_worker_keeps_now():
    def run(rank: int, transport: Transport) -> bool:
        param = Parameter(torch.zeros(300))
        optimizer = BaselineSGD([param], 1e-2, aggregation="ef-signsgd", process_group=transport)
        for step in range(3):
            param.grad = torch.randn(300, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.step()
        saved = optimizer.state_dict()["state"][0]["compensation"][0, 0]
        return bool(saved.any()) and torch.equal(saved, optimizer.compensation(param))

    assert all(SimulatedGroup(2).run(run))
