"""0/1 Adam resumes where it was, from any step; takes over AdamW's state; and refuses what is another run's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp_runs import differing, everything, network
from dcp_runs import train as train_model
from observe import change_header, fingerprint, parameters
from optimizers import objects
from ranks import run_ranks, simulate
from torch import Tensor
from torch.nn import Parameter
from zero_one_rounds import (
    Script,
    caught,
    make,
    make_parameters,
    momenta,
    own_state,
    set_gradients,
    through_a_file,
    train,
    variances,
)

from fusedonebit import DisagreementError, Faults, FusedOneBitWarning, MarsitSGD, OneBitAdam, ZeroOneAdam, dcp
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.core.sharding import local

ROUNDS = (0, 0, 1, 3, 1, 0, 2, 1)
OWN_ROUNDS = (1, 2, 1, 3, 2)
STEPS = 18  # ends within a round
COUNTS = ("phase", "step", "skipped_steps", "rounds", "renewals", "local_steps", "round_steps")
DEEPSPEED = {"lr": 1e-2, "weight_decay": 0.1, "var_freeze_step": 6, "var_update_scaler": 2}
DEEPSPEED |= {"local_step_scaler": 4, "local_step_clipper": 4}


def fresh(name: str, params: list[Parameter], transport: Any = None, **options: Any) -> ZeroOneAdam:
    if name == "deepspeed":
        return ZeroOneAdam.from_deepspeed(params, DEEPSPEED, transport, **objects(**options))
    if name == "own":
        options |= {"variance_policy": None, "sync_policy": Script(OWN_ROUNDS)}
    return make(params, ROUNDS, weight_decay=0.1, process_group=transport, **options)


# ---------------------------------------------------------------- bit for bit


def resume(
    rank: int, transport: Transport | None, name: str, dtype: torch.dtype, options: dict
) -> list[tuple[int, str]]:
    """Trains straight through, with a NaN in some steps, saving before each; and again from each."""
    bad = (1, 4, 8, 13)

    def take(optimizer: ZeroOneAdam, step: int) -> str:
        set_gradients(optimizer, rank, step)
        if step in bad and rank == 1:
            parameters(optimizer)[0].grad[0, 0] = float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedOneBitWarning)
            optimizer.step()
        return optimizer.phase + fingerprint([*parameters(optimizer), *momenta(optimizer)])

    straight, prints, saved = fresh(name, make_parameters(dtype), transport, **options), [], []
    for step in range(STEPS):
        values = [p.detach().clone() for p in parameters(straight)]
        saved.append(through_a_file({"optimizer": straight.state_dict(), "params": values}))
        prints.append(take(straight, step))
    told, state = straight.stats(), own_state(straight)
    told = {key: told[key] for key in COUNTS}
    wrong = []
    for cut in range(STEPS):
        resumed = fresh(name, make_parameters(dtype), transport, **options)
        with torch.no_grad():
            for p, value in zip(parameters(resumed), saved[cut]["params"], strict=True):
                p.copy_(value)
        resumed.load_state_dict(saved[cut]["optimizer"])
        for step in range(cut, STEPS):
            if take(resumed, step) != prints[step]:
                wrong.append((cut, f"step {step}"))
                break
        else:
            here = resumed.stats()
            wrong += [(cut, key) for key in told if here[key] != told[key]]
            wrong += [(cut, a.split(":")[0]) for a, b in zip(own_state(resumed), state, strict=True) if a != b]
    assert straight.stats()["skipped_steps"] in (3, 4)
    return wrong


def resume_on_gloo(rank: int, world_size: int) -> list[tuple[int, str]]:
    return resume(rank, None, *CASES[0])


CASES = [
    ("ours", torch.float32, {}),
    ("ours", torch.float32, {"precondition": False, "variance_floor": 0.0, "scale_scope": "layer"}),
    ("ours", torch.bfloat16, {"master_weights": True, "max_grad_norm": 30.0}),
    ("ours", torch.bfloat16, {}),
    ("deepspeed", torch.float32, {}),
    ("own", torch.float32, {}),
    ("own", torch.bfloat16, {"master_weights": True, "max_grad_norm": 30.0}),
    ("own", torch.bfloat16, {}),
]


@pytest.mark.long(but=(0, 5), full=True)
@pytest.mark.parametrize(("name", "dtype", "options"), CASES, ids=str)
def test_resuming_from_every_step_continues_bit_for_bit(name, dtype, options):
    if name == "ours":
        assert set(Script(ROUNDS).places(STEPS)) == {"uncompressed", "local", "one-bit"}
    assert simulate(resume, 2, name, dtype, options) == [[], []]


@pytest.mark.long
def test_resuming_in_processes_continues_bit_for_bit():
    """What is a rank's own is a row of a DTensor there."""
    assert run_ranks(resume_on_gloo, 2) == [[], []]


def test_a_checkpoint_holds_each_thing_once():
    """Bits or floats of the momentum; the parameters of all only where they are not the parameters."""
    optimizer, found = fresh("ours", make_parameters()), {}
    for step in range(8):
        train(optimizer, 0, 1, step)
        found[optimizer.phase] = set(optimizer.state_dict()["state"][1])
    assert found["uncompressed"] == {"step", "exp_avg", "exp_avg_sq", "moved"}
    assert found["one-bit"] == {"step", "exp_avg_sq", "moved"}
    assert found["local"] == {"step", "exp_avg", "exp_avg_sq", "moved", "anchor"}


# ---------------------------------------------------------------- what AdamW and 1-bit Adam's warm-up have left


@pytest.mark.parametrize("kind", [torch.optim.AdamW, OneBitAdam])
def test_it_goes_on_from_adamw_and_from_a_warm_up(kind):
    options: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    theirs = kind(make_parameters(), 1e-2, **options, **({"freeze_step": 50} if kind is OneBitAdam else {}))
    train(theirs, 0, 6)
    saved = through_a_file(theirs.state_dict())
    ours = make([Parameter(p.detach().clone()) for p in parameters(theirs)], (0, 1, 0, 1), **options)
    ours.load_state_dict(saved)
    stats = ours.stats()
    # Where the policies are after six steps: each second one would have renewed.
    assert (stats["step"], stats["rounds"], stats["renewals"], stats["phase"]) == (6, 6, 3, "uncompressed")
    # Round 6 of the list renews the variance, so that it is AdamW's next step; round 7 does not.
    train(ours, 0, 1, 6)
    train(theirs, 0, 1, 6)
    for p, q in zip(parameters(ours), parameters(theirs), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    train(ours, 0, 1, 7)
    assert (ours.phase, ours.stats()["step"]) == ("one-bit", 8)


def test_the_first_round_after_adamw_may_be_one_of_bits():
    def run(rank: int, transport: Transport) -> tuple[list[str], str, float]:
        theirs = torch.optim.AdamW(make_parameters(), 1e-2)
        train(theirs, 0, 6)
        params = [Parameter(p.detach().clone()) for p in parameters(theirs)]
        ours = make(params, (2, 1), process_group=transport)
        ours.load_state_dict(through_a_file(theirs.state_dict()))
        before, phases = [p.detach().clone() for p in params], []
        for step in range(3):
            train(ours, rank, 1, 6 + step)
            phases.append(ours.phase)
        moved = max(float((p.detach() - b).abs().max()) for p, b in zip(params, before, strict=True))
        return phases, fingerprint(params), moved

    ranks = SimulatedGroup(2).run(run)
    print(f"after AdamW, three steps move at most {ranks[0][2]:.3f}")
    for phases, prints, moved in ranks:
        assert phases == ["local", "one-bit", "one-bit"]
        assert prints == ranks[0][1]
        assert 1e-3 < moved < 1


# ---------------------------------------------------------------- other numbers of ranks, and torch's own format


def make_model(**options: Any) -> tuple[torch.nn.Module, ZeroOneAdam]:
    model = network()
    return model, make(model.parameters(), ROUNDS, **options)


def conserved(optimizer: ZeroOneAdam) -> Tensor:
    """All residuals; takes them out."""
    total = torch.zeros(optimizer.frame.layout.numel)
    optimizer.algorithm.exchange.reducer.take_residuals(total)
    layout = optimizer.frame.layout
    return torch.cat([total[layout.offset(i) :][:size] for i, size in enumerate(layout.sizes)]).double()


def write(rank: int, world_size: int, folder: str, steps: int) -> tuple[Tensor, list[str], list[str], dict]:
    model, optimizer = make_model()
    train_model(model, optimizer, range(steps))
    dcp.save(model, optimizer, folder, step=steps)
    shared = [fingerprint(momenta(optimizer)), fingerprint(variances(optimizer)), fingerprint(parameters(optimizer))]
    again, resumed = make_model()
    assert dcp.load(again, resumed, folder, step=0) == {"step": steps}
    train_model(model, optimizer, range(steps, steps + 9))
    train_model(again, resumed, range(steps, steps + 9))
    differ = differing(everything(model, optimizer), everything(again, resumed))
    again, resumed = make_model()
    dcp.load(again, resumed, folder)
    stats = {key: resumed.stats()[key] for key in ("step", "rounds", "renewals", "phase")}
    return conserved(resumed), shared, differ, stats


def read(rank: int, world_size: int, folder: str) -> tuple[Tensor, list[str], dict, str]:
    model, optimizer = make_model()
    dcp.load(model, optimizer, folder)
    shared = [fingerprint(momenta(optimizer)), fingerprint(variances(optimizer)), fingerprint(parameters(optimizer))]
    stats = {key: optimizer.stats()[key] for key in ("step", "rounds", "renewals", "phase")}
    train_model(model, optimizer, range(20, 27))  # up to the end of a round
    prints = fingerprint(parameters(optimizer))
    again, reader = make_model()
    dcp.load(again, reader, folder)
    return conserved(reader), shared, stats, prints


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("wrote", "reads"), [(2, 4), (4, 1)])
@pytest.mark.parametrize("steps", [11, 17], ids=["behind bits", "behind a renewal"])
def test_on_other_numbers_of_ranks_nothing_is_lost(tmp_path, wrote, reads, steps):
    total, shared, differ, stats = run_ranks(write, wrote, str(tmp_path / "saved"), steps)[0]
    assert differ == [], "on as many ranks it goes on bit for bit"
    results = run_ranks(read, reads, str(tmp_path / "saved"))
    lost = float((results[0][0] - total).abs().max() / total.abs().max())
    print(f"{wrote} -> {reads} ranks, after {steps} steps: of the residuals lost {lost:.1e} (limit 1e-6)")
    assert lost <= 1e-6
    for _, here, told, prints in results:
        assert here == shared
        assert told == stats
        assert prints == results[0][3]


def within(rank: int, world_size: int, folder: str) -> tuple[type | None, str, type | None, str]:
    model, optimizer = make_model()
    train_model(model, optimizer, range(4))
    assert optimizer.phase == "local"
    by_dcp = caught(lambda: dcp.save(model, optimizer, folder))
    saved = through_a_file(optimizer.state_dict())
    change_header(saved, lambda header: header.update(world_size=3))
    _, reader = make_model()
    return *by_dcp, *caught(lambda: reader.load_state_dict(saved))


def test_within_a_round_a_checkpoint_is_for_as_many_ranks_only(tmp_path):
    for kind, text, other_kind, other in run_ranks(within, 2, str(tmp_path / "saved"), group_timeout=20):
        assert kind is ValueError
        assert "after 1 local steps of a round each rank has parameters of its own" in text
        assert other_kind is ValueError
        assert "the checkpoint's world_size is 3, but here it is 2; it was written after 1 local steps of a" in other
        assert "save when stats()['local_steps'] is 0, or resume with as many ranks as wrote it" in other


# ---------------------------------------------------------------- what is another run's


def load_wrong(rank: int, world_size: int, case: str) -> tuple[type | None, str, bool]:
    saver: Any = fresh("ours", make_parameters())
    if case == "marsit":
        saver = MarsitSGD(make_parameters())
    elif case == "onebit":
        saver = OneBitAdam(make_parameters(), freeze_step=2, faults=Faults(guard="off"))
    elif case == "deepspeed":
        saver = fresh("deepspeed", make_parameters())
    train(saver, rank, 4)
    saved = through_a_file(saver.state_dict())
    if case == "rank":
        local(saved["state"][0]["rank"]).fill_(1 - rank)
    elif case == "moment" and rank == 1:
        change_header(saved, lambda header: header.update(updates=header["updates"] + 1))
    elif case == "momentum":
        for state in saved["state"].values():
            state.pop("exp_avg_sq", None)
    elif case == "place" and rank == 1:
        change_header(saved, lambda header: header.update(local=0))
    optimizer = fresh("ours", make_parameters(), precondition=case != "precondition")
    before = own_state(optimizer)
    outcome = caught(lambda: optimizer.load_state_dict(saved))
    still = own_state(optimizer) == before
    train(optimizer, rank, 3)
    return *outcome, still and optimizer.stats()["step"] == 3


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("marsit", "the checkpoint's algorithm is MarsitSGD, which ZeroOneAdam can't go on from"),
        ("onebit", "the checkpoint's algorithm is OneBitAdam, but here it is ZeroOneAdam"),
        ("deepspeed", "the checkpoint's algorithm is DeepSpeedZeroOneAdam, but here it is ZeroOneAdam"),
        ("precondition", "the checkpoint was written with precondition=True, but here it is False"),
        ("rank", "the checkpoint's rank is 1, but here it is 0"),
        ("moment", "the checkpoint's updates is 4 on rank 0 but 5 on rank 1"),
        ("momentum", "state_dict lacks the key 'exp_avg_sq'"),
        ("place", "the checkpoint's local is 1 on rank 0 but 0 on rank 1"),
    ],
)
def test_another_runs_checkpoint_is_refused_and_changes_nothing(case, text):
    results = run_ranks(load_wrong, 2, case, group_timeout=10)
    assert any(text in message for _, message, _ in results), results
    for kind, _, still in results:
        assert issubclass(kind, ValueError)
        assert still
    if case in ("moment", "place"):
        assert results[0][0] is DisagreementError


@pytest.mark.parametrize("kind", [OneBitAdam, MarsitSGD])
def test_others_refuse_its_checkpoints(kind):
    saver = fresh("ours", make_parameters())
    train(saver, 0, 4)
    options: dict[str, Any] = {"freeze_step": 3} if kind is OneBitAdam else {}
    optimizer = kind(make_parameters(), **options)
    found, text = caught(lambda: optimizer.load_state_dict(saver.state_dict()))
    assert found is ValueError
    assert "ZeroOneAdam" in text


def test_a_changed_policy_is_warned_of_and_holds_after_the_round():
    saver = make(make_parameters(), (0, 0, 1, 3, 1))
    train(saver, 0, 5)
    saved = through_a_file(saver.state_dict())
    script = Script((0, 0, 1, 2, 0, 2))
    optimizer = make(parameters(saver), variance_policy=script, sync_policy=script)
    with pytest.warns(FusedOneBitWarning) as seen:
        optimizer.load_state_dict(saved)
    assert sorted(str(w.message).split("=")[0] for w in seen) == [
        "the checkpoint was written with sync_policy",
        "the checkpoint was written with variance_policy",
    ]
    phases = []
    for step in range(5, 9):
        train(optimizer, 0, 1, step)
        phases.append(optimizer.phase)
    assert phases == ["one-bit", "uncompressed", "local", "one-bit"]


def through_dcp(rank: int, world_size: int, folder: str) -> tuple[list[str], bool]:
    """By torch's own calls: as many ranks, bfloat16 and masters."""
    assert dist.get_world_size() == world_size
    model = network(torch.bfloat16)
    optimizer = make(model.parameters(), ROUNDS, master_weights=True)
    train_model(model, optimizer, range(11))
    future = dcp.async_save(model, optimizer, folder)
    at_the_call = everything(model, optimizer)
    train_model(model, optimizer, range(11, 15))
    future.result()
    again = network(torch.bfloat16)
    resumed = make(again.parameters(), ROUNDS, master_weights=True)
    dcp.load(again, resumed, folder)
    same = differing(everything(again, resumed), at_the_call) == []
    train_model(again, resumed, range(11, 15))
    return differing(everything(model, optimizer), everything(again, resumed)), same


def test_masters_go_through_torchs_checkpoints_too(tmp_path):
    assert run_ranks(through_dcp, 2, str(tmp_path / "saved")) == [([], True)] * 2
