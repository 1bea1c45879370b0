"""When the variance is frozen, what becomes of coordinates without one, and that its bias correction stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from freeze_runs import gradient, make, model_of, step_once, take_steps, train
from observe import fingerprint, flat, observe, parameters, resumed
from optimizers import ADAM_AND_LAMB, EACH_FROZEN, EACH_ONEBIT, PAPER, construct, objects
from ranks import WORLD_SIZES, simulate, warned
from torch import nn
from torch.nn import Parameter

from fusedonebit import Faults, Freeze, FusedOneBitWarning, OneBitAdam, ZeroOneAdam, policies
from fusedonebit.comm import Transport

DELAY = 8


# ---------------------------------------------------------------- freeze_step


def phases_with_skips(rank: int, transport: Transport, name: str, freeze_step: int) -> tuple[list, list, dict]:
    optimizer = construct(name, make((50,)), freeze_step=freeze_step, process_group=transport)
    phases, updates = [], []
    for step in range(12):
        step_once(optimizer, rank, step, bad=step in (0, 2, 3) and rank == step % transport.world_size)
        phases.append(optimizer.phase)
        updates.append(optimizer.state[parameters(optimizer)[0]]["step"].item())
    return phases, updates, optimizer.stats()


@EACH_ONEBIT
def test_freeze_step_counts_updates_and_no_skipped_steps(name):
    for phases, updates, stats in simulate(phases_with_skips, 2, name, 4):
        # Steps 0, 2 and 3 change nothing: updates 1 to 4 are steps 1, 4, 5 and 6.
        assert phases == ["warmup"] * 7 + ["compression"] * 5
        assert updates == [0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert (stats["freeze_step"], stats["skipped_steps"], stats["step"]) == (4, 3, 9)


@ADAM_AND_LAMB
def test_freeze_step_0_without_a_checkpoint_says_what_to_do(name):
    optimizer = construct(name, make((5,)), freeze_step=0)
    with pytest.raises(RuntimeError, match=r"freeze_step=0 needs a variance .* load_state_dict"):
        step_once(optimizer, 0, 0)


# ---------------------------------------------------------------- auto


def auto_freeze(rank: int, transport: Transport, name: str, options: dict, bad: tuple[int, ...], steps: int) -> tuple:
    """Trains with gradients that are ten times as large from step 15 on."""
    options = {"betas": (0.9, 0.9), "freeze_step": "auto", "process_group": transport} | options
    optimizer = construct(name, make((400,), (30,)), **options)
    frozen_after, norms = None, [0.0]
    for step in range(steps):
        for i, p in enumerate(parameters(optimizer)):
            p.grad = gradient(rank, step, p, i) * (1.0 if step < 15 else 10.0)
        if step in bad and rank == transport.world_size - 1:
            p.grad[0] = float("inf")
        optimizer.step()
        if optimizer.phase == "compression" and frozen_after is None:
            frozen_after = step
        if step not in bad:
            norms.append(sum(float(s["exp_avg_sq"].double().sum()) for s in optimizer.state.values()))
    return frozen_after, optimizer.stats()["freeze_step"], norms


def first_stable(norms: list[float], beta2: float, lr_warmup_steps: int) -> int:
    """The paper's rule by its definition: the first update t whose ratio to t - D is 0.96, bias-corrected."""
    distance = round(1 / (1 - beta2))
    corrected = [0.0] + [norm / (1 - beta2**t) for t, norm in enumerate(norms) if t]
    for t in range(distance + max(1, lr_warmup_steps), len(norms)):
        a, b = corrected[t], corrected[t - distance]
        if min(a, b) / max(a, b) >= 0.96:
            return t
    raise AssertionError("never stable")


SKIPS = (1, 7, 12, 19, 20, 21)


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    ("name", "world_size", "lr_warmup_steps", "bad"),
    [
        *(("onebit-adam", w, n, bad) for w in (1, *WORLD_SIZES) for n in (0, 13, 40) for bad in ((), SKIPS)),
        *(("onebit-lamb", w, 13, bad) for w, bad in ((1, ()), (2, SKIPS), (4, SKIPS))),
    ],
)
def test_auto_freezes_all_ranks_at_once_at_a_stable_variance(name, world_size, lr_warmup_steps, bad):
    results = simulate(auto_freeze, world_size, name, {"lr_warmup_steps": lr_warmup_steps}, bad, 90)
    assert len({result[:2] for result in results}) == 1
    frozen_after, freeze_step, norms = results[0]
    decided = first_stable(norms[: freeze_step + 1], 0.9, lr_warmup_steps)
    skipped_while_pending = freeze_step - decided - DELAY
    print(f"W={world_size}: decided after {decided} updates, frozen after {freeze_step} (limit: {DELAY} steps later)")
    assert decided >= lr_warmup_steps + 10
    # The delay is counted in steps; those skipped during it are no updates.
    assert -len(bad) <= skipped_while_pending <= 0
    assert frozen_after == freeze_step + sum(step < frozen_after for step in bad)
    if not bad:
        assert freeze_step == decided + DELAY


@pytest.mark.long(but=1)
@ADAM_AND_LAMB
def test_auto_does_not_count_skipped_steps_as_a_stable_variance(name):
    # From update 16 on v is looked at; there it leaps, and then nothing but skips.
    for _, freeze_step, norms in simulate(auto_freeze, 2, name, {"lr_warmup_steps": 6}, tuple(range(17, 60)), 60):
        assert len(norms) == 1 + 17
        assert freeze_step is None


# ---------------------------------------------------------------- dead coordinates and tensors


def train_with_dead(rank: int, transport: Transport, name: str, options: dict) -> tuple[dict, dict, list[str]]:
    """An embedding of which only the first rows are seen before the freeze, and a tensor that never is."""
    torch.manual_seed(0)
    embedding, unused, used = Parameter(torch.randn(20, 8)), Parameter(torch.randn(37)), Parameter(torch.randn(6))
    params = [embedding, unused, used]
    optimizer = construct(name, params, lr=1e-2, freeze_step=5, weight_decay=0.1, **options, process_group=transport)
    with warned() as caught:
        for step in range(5):
            embedding.grad = torch.zeros(20, 8)
            embedding.grad[:15] = gradient(rank, step, embedding, 0)[:15]
            used.grad = gradient(rank, step, used, 2)
            optimizer.step()
        before = {"embedding": embedding.detach().clone(), "unused": unused.detach().clone()}
        variance = optimizer.state[embedding]["exp_avg_sq"].clone()
        for step in range(5, 8):
            embedding.grad, used.grad = gradient(rank, step, embedding, 0), gradient(rank, step, used, 2)
            unused.grad = None
            optimizer.step()
    texts = [str(w.message) for w in caught if issubclass(w.category, FusedOneBitWarning)]
    texts = [text for text in texts if "after so few updates" not in text]  # of LAMB's average
    after = {
        "moved": (embedding.detach() - before["embedding"]).abs(),
        "unused": torch.equal(unused, before["unused"]),
        "variance": optimizer.state[embedding]["exp_avg_sq"].clone(),
        "warmup_variance": variance,
        "unused_error": optimizer.worker_error(unused),
        "unused_momentum": optimizer.momentum(unused),
        "bits": fingerprint([embedding, unused, used]),
        "scale": float(optimizer.momentum(used).abs()[0]),
        "rest": flat([optimizer.momentum(embedding), optimizer.momentum(used)]),
    }
    return after, optimizer.stats(), texts


@pytest.mark.long(but=3)
@EACH_FROZEN
@pytest.mark.parametrize("options", [{}, PAPER], ids=["defaults", "paper"])
def test_coordinates_unseen_in_the_warmup_take_normal_steps(name, options):
    results = simulate(train_with_dead, 2, name, options)
    assert len({after["bits"] for after, _, _ in results}) == 1
    for after, stats, _ in results:
        seen = after["warmup_variance"][:15]
        torch.testing.assert_close(after["variance"][15:], seen.mean().expand(5, 8))
        assert torch.equal(after["variance"][:15], seen)
        largest = float(after["moved"][15:].max() / after["moved"][:15].median())
        print(f"largest step of an unseen coordinate, of the others' median: {largest:.1f} (limit 10)")
        assert after["moved"][15:].min() > 0
        assert largest < 10
        assert stats["dead_coordinates"] == 40


@pytest.mark.long(but=3)
@EACH_FROZEN
@pytest.mark.parametrize("options", [{}, PAPER], ids=["defaults", "paper"])
def test_a_tensor_unseen_in_the_warmup_is_left_out_and_named(name, options):
    for after, stats, texts in simulate(train_with_dead, 2, name, options):
        assert after["unused"], "no decay, no update"
        assert not after["unused_error"].any()
        assert not after["unused_momentum"].any()
        assert stats["dead_tensors"] == ["parameter 1"]
        assert [text for text in texts if "1 tensor(s) had no gradient" in text and "parameter 1" in text] == texts
        assert len(texts) == 1


@ADAM_AND_LAMB
def test_dead_coordinates_keep_leaves_the_variance_as_it_is(name):
    for after, stats, texts in simulate(train_with_dead, 2, name, PAPER | {"dead_coordinates": "keep"}):
        assert torch.equal(after["variance"], after["warmup_variance"])
        assert not after["variance"][15:].any()
        assert after["moved"][15:].min() > 1e3 * after["moved"][:15].max(), "m / eps explodes, as DeepSpeed's does"
        assert after["unused"], "as long as it has no gradient"
        assert stats["dead_tensors"] == []
        (text,) = texts
        assert "1 tensor(s) had no gradient during the whole warm-up and will move by lr * m/eps: parameter 1" in text


def scales_with_and_without(rank: int, transport: Transport, name: str, with_dead: bool) -> float:
    p, dead = make((900,), (900,))
    optimizer = construct(name, [p, dead] if with_dead else [p], freeze_step=3, **PAPER, process_group=transport)
    for step in range(5):
        p.grad = gradient(rank, step, p, 0)
        optimizer.step()
    return optimizer.stats()["compensated_norm"], optimizer.stats()["worker_error_norm"]


@ADAM_AND_LAMB
def test_a_dead_tensor_has_no_weight_in_a_scale(name):
    """Nor, in 1-bit LAMB, in the size that all momenta are brought to."""
    alone, beside = (simulate(scales_with_and_without, 1, name, with_dead)[0] for with_dead in (False, True))
    assert alone == pytest.approx(beside, rel=1e-6)


@EACH_ONEBIT
def test_a_mask_of_all_true_changes_no_bit(name):
    results = []
    for masked in (False, True):
        (p,) = make((500,))
        mask = {p: torch.ones(500, dtype=torch.bool)} if masked else None
        optimizer = construct(name, [p], freeze_step=3, mask=mask)
        for step in range(8):
            step_once(optimizer, 0, step)
        results.append(observe(optimizer))
    assert all((results[0][key] == results[1][key]).all() for key in results[0])


# ---------------------------------------------------------------- freezes by themselves


def test_three_words_train_and_compress():
    model = model_of()
    optimizer = OneBitAdam(model.parameters(), lr=1e-3)
    take_steps(model, optimizer, range(270))
    stats = optimizer.stats()
    assert optimizer.phase == "compression"
    assert stats["freeze_step"] == 250
    assert stats["renewals"] > 5
    assert "variance: shared, after 250 updates" in repr(optimizer)


@pytest.mark.long
def test_four_words_train_and_freeze():
    model = model_of()
    optimizer = OneBitAdam(model.parameters(), lr=1e-3, freeze_step="auto")
    take_steps(model, optimizer, range(2500))
    frozen = optimizer.stats()["freeze_step"]
    print(f"frozen after {frozen} updates (deadline 10,000)")
    assert optimizer.phase == "compression"
    assert 1000 < frozen < 10_000
    assert optimizer.stats()["renewals"] == 0


DEADLINES = {
    "of the memory": ({"betas": (0.9, 0.9)}, Freeze(), 100),
    "behind the warm-up": ({"betas": (0.9, 0.9)}, Freeze(lr_warmup_steps=20), 120),
    "told": ({"betas": (0.9, 0.9)}, Freeze(deadline=60), 60),
}


@pytest.mark.parametrize("case", DEADLINES)
def test_a_variance_that_never_settles_is_frozen_by_the_deadline(case):
    options, freeze, deadline = DEADLINES[case]
    model = model_of()
    optimizer = OneBitAdam(model.parameters(), lr=0.0, **objects(freeze_step=freeze, guard="off", **options))
    take_steps(model, optimizer, range(deadline), growth=1.05)
    assert optimizer.phase == "warmup"
    with pytest.warns(FusedOneBitWarning, match=f"not seen to settle by the deadline, {deadline} updates"):
        take_steps(model, optimizer, range(deadline, deadline + 1), growth=1.05)
    assert optimizer.stats()["freeze_step"] == deadline


def test_a_resumed_run_freezes_at_the_deadline_bit_for_bit():
    def new() -> tuple[nn.Module, OneBitAdam]:
        model, how = model_of(), {"freeze_step": Freeze(deadline=40), "faults": Faults(guard="off")}
        return model, OneBitAdam(model.parameters(), lr=1e-3, betas=(0.9, 0.9), **how)

    model, optimizer = new()
    take_steps(model, optimizer, range(30), growth=1.1)
    other, again = new()
    again = resumed(optimizer, again)
    for trained, by in ((model, optimizer), (other, again)):
        with pytest.warns(FusedOneBitWarning, match="deadline, 40 updates"):
            take_steps(trained, by, range(30, 50), growth=1.1)
        assert by.stats()["freeze_step"] == 40
    assert fingerprint(parameters(optimizer)) == fingerprint(parameters(again))


@pytest.mark.parametrize(
    ("freeze", "text"),
    [
        (Freeze(deadline=5, lr_warmup_steps=5), "deadline must be an int > lr_warmup_steps=5, or None, got 5"),
        (Freeze(deadline=math.inf), "deadline must be an int > lr_warmup_steps=0, or None, got inf"),
        (Freeze(step=5, deadline=9), 'deadline must be None unless freeze_step is "auto", got 9'),
    ],
    ids=str,
)
def test_bad_deadlines_are_named(freeze, text):
    with pytest.raises(ValueError, match="deadline") as error:
        OneBitAdam(model_of().parameters(), freeze_step=freeze)
    assert str(error.value) == text


# ---------------------------------------------------------------- the correction of what is frozen

FROZEN_AFTER, CHANGE = 6, 9
CASES: dict[str, Any] = {
    "onebit-adam": {},
    "onebit-adam, plain": PAPER,
    "onebit-lamb-frozen": {"bias_correction": True},
    "zero-one": {},
    "zero-one, local steps": {},
}


def corrected(case: str) -> Any:
    name, params = case.split(",")[0], make((300,), (9, 13))
    if name != "zero-one":
        return construct(name, params, 1e-2, freeze_step=FROZEN_AFTER, **CASES[case])
    rounds = policies.DoublingRounds(after=8, scaler=1, most=2) if "local" in case else policies.EveryStep()
    variance = policies.DoublingVariance(scaler=100, until=FROZEN_AFTER)
    return ZeroOneAdam(params, 1e-2, variance_policy=variance, sync_policy=rounds)


@pytest.mark.long(but=4)
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("onebit-adam", "as a warm start"),
        *((case, how) for how in ("straight on", "through a checkpoint") for case in CASES),
    ],
)
def test_betas_changed_after_the_freeze_keep_vs_correction(case, how):
    ends = []
    for changed in (False, True):
        optimizer = corrected(case)
        train(optimizer, 0, 0, CHANGE)
        if changed:
            optimizer.param_groups[0]["betas"] = (0.9, 0.99999)
        if how == "through a checkpoint":
            optimizer = resumed(optimizer, corrected(case))
        elif how == "as a warm start":
            saved = optimizer.state_dict()
            optimizer = construct(case, make((300,), (9, 13)), 1e-2, freeze_step=0, warm_start=saved)
        train(optimizer, 0, CHANGE, 6)
        ends.append(fingerprint(parameters(optimizer)))
    assert ends[0] == ends[1]
