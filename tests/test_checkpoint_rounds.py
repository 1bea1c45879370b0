"""0/1 Adam and Marsit resume where they were, also within a round, and refuse what is another run's; from AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dcp_runs import differing, everything, network
from dcp_runs import train as train_model
from observe import caught, change_header, fingerprint, parameters, through_a_file
from optimizers import objects
from ranks import run_ranks, simulate
from rounds import MARSIT, PLACES, Script, make, make_parameters, momenta, own_state, step_once, train, variances
from torch import Tensor, nn
from torch.nn import Parameter

from fusedonebit import (
    DisagreementError,
    Faults,
    FusedOneBitWarning,
    MarsitAdam,
    MarsitSGD,
    OneBitAdam,
    Rounds,
    ZeroOneAdam,
    dcp,
)
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.core.sharding import local

ROUNDS = (0, 0, 1, 3, 1, 0, 2, 1)
OWN_ROUNDS = (1, 2, 1, 3, 2)
COUNTS = ("phase", "step", "skipped_steps", "rounds", "renewals", "local_steps", "round_steps")
DEEPSPEED = {"lr": 1e-2, "weight_decay": 0.1, "var_freeze_step": 6, "var_update_scaler": 2}
DEEPSPEED |= {"local_step_scaler": 4, "local_step_clipper": 4}
BF16 = torch.bfloat16


def fresh(name: str, params: list[Parameter], transport: Any = None, **options: Any) -> Any:
    if name in MARSIT:
        return MARSIT[name](params, **{"lr": 1e-2, "weight_decay": 0.1} | options, process_group=transport)
    if name == "deepspeed":
        return ZeroOneAdam.from_deepspeed(params, DEEPSPEED, transport, **objects(**options))
    if name == "own":
        options |= {"variance_policy": None, "sync_policy": Script(OWN_ROUNDS)}
    return make(params, ROUNDS, weight_decay=0.1, process_group=transport, **options)


# ---------------------------------------------------------------- bit for bit


def resume(rank: int, transport: Transport | None, name: str, dtype: torch.dtype, options: dict, cuts: Any) -> None:
    """Trains straight through, with a NaN in some steps, and again from what was saved before some."""
    bad, steps = ((1, 7), 16) if name in MARSIT else ((1, 4, 8, 13), 18)  # 18 end within a round

    def take(optimizer: Any, step: int) -> str:
        step_once(optimizer, rank, step, bad)
        return optimizer.phase + fingerprint([*parameters(optimizer), *momenta(optimizer)])

    def told(optimizer: Any) -> dict:
        stats = optimizer.stats()
        return {key: stats[key] for key in (stats if name in MARSIT else COUNTS) if key != "bytes_total"}

    straight, prints, saved = fresh(name, make_parameters(dtype), transport, **options), [], {}
    for step in range(steps):
        if step in cuts:
            values = [p.detach().clone() for p in parameters(straight)]
            kept = through_a_file({"optimizer": straight.state_dict(), "params": values})
            saved[step] = kept, straight.phase
        prints.append(take(straight, step))
    counts, state = told(straight), own_state(straight)
    assert counts["skipped_steps"] in ((2,) if name in MARSIT else (3, 4))
    for cut, (kept, phase) in saved.items():
        other = {"lr": 0.5} if name in MARSIT else {}
        resumed = fresh(name, make_parameters(dtype), transport, **options | other)
        with torch.no_grad():
            for p, value in zip(parameters(resumed), kept["params"], strict=True):
                p.copy_(value)
        resumed.load_state_dict(kept["optimizer"])
        assert resumed.phase == phase
        for step in range(cut, steps):
            assert take(resumed, step) == prints[step], (cut, step)
        assert told(resumed) == counts, cut
        assert own_state(resumed) == state, cut


def resume_on_gloo(rank: int, world_size: int, *arguments: Any) -> None:
    resume(rank, None, *arguments)


WITHIN, MASTERS = {"full_precision_every": 2, "local_steps": 3}, {"master_weights": True, "max_grad_norm": 30.0}
CASES: list[tuple[str, torch.dtype, dict, Any, int]] = [
    *(
        (name, dtype, options, range(18), 2)
        for name, dtype, options in (
            ("ours", torch.float32, {}),
            ("ours", torch.float32, {"precondition": False, "variance_floor": 0.0, "scale_scope": "layer"}),
            ("ours", BF16, MASTERS),
            ("ours", BF16, {}),
            ("deepspeed", torch.float32, {}),
            ("own", torch.float32, {}),
            ("own", BF16, MASTERS),
            ("own", BF16, {}),
        )
    ),
    # Round 0 is one of full precision, round 1 is skipped.
    *(
        (name, torch.float32, {"topology": topology, "full_precision_every": 6}, (1, 3, 8), world_size)
        for name in MARSIT
        for topology, world_size in PLACES
    ),
    # Within a round; after 8 steps one rank already has the NaN for which all will skip it.
    *(
        ("sgd", dtype, WITHIN | more | {"topology": topology}, (3, 7, 8), world_size)
        for topology, world_size in PLACES
        for dtype, more in ((torch.float32, {}), (BF16, {"master_weights": True}))
    ),
    *(
        ("sgd", BF16, {"full_precision_every": 4} | more, (5,), 2)
        for more in ({"max_grad_norm": 0.5}, {"momentum": 0.0}, {"stochastic_rounding": True})
    ),
]


@pytest.mark.long(but=(0, 5, 8, 14), full=True)
@pytest.mark.parametrize(("name", "dtype", "options", "cuts", "world_size"), CASES, ids=map(str, range(len(CASES))))
def test_resuming_from_any_step_continues_bit_for_bit(name, dtype, options, cuts, world_size):
    if name == "ours":
        assert set(Script(ROUNDS).places(18)) == {"uncompressed", "local", "one-bit"}
    simulate(resume, world_size, name, dtype, options, cuts)


@pytest.mark.long
@pytest.mark.parametrize("case", [0, *(i for i, case in enumerate(CASES) if case[4] == 2 and case[3] == (1, 3, 8))])
def test_resuming_in_processes_continues_bit_for_bit(case):
    """What is a rank's own is a row of a DTensor there."""
    run_ranks(resume_on_gloo, 2, *CASES[case][:4])


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


def make_model(name: str = "ours") -> tuple[nn.Module, ZeroOneAdam]:
    model = network(BF16 if name == "masters" else torch.float32)
    return model, fresh(name, list(model.parameters()), **{"master_weights": True} if name == "masters" else {})


def looked_at(optimizer: ZeroOneAdam) -> tuple[Tensor, list[str], dict]:
    """All residuals, which it takes out, and means of moments; what ranks have in common; and counts."""
    common = [parameters(optimizer)]
    if optimizer.algorithm.own is None:
        common += [momenta(optimizer), variances(optimizer)]
    else:
        common += [[optimizer.algorithm.own.levels, optimizer.algorithm.own.rho]]
    prints = list(map(fingerprint, common))
    moments = torch.stack([torch.cat([x.flatten() for x in each(optimizer)]) for each in (momenta, variances)]).double()
    optimizer.frame.ranks.transport.all_reduce(moments)
    layout = optimizer.frame.layout
    total = torch.zeros(layout.numel)
    optimizer.algorithm.exchange.reducer.take_residuals(total)
    left = torch.cat([total[layout.offset(i) :][:size] for i, size in enumerate(layout.sizes)]).double()
    stats = {key: optimizer.stats()[key] for key in ("step", "rounds", "renewals", "phase")}
    return torch.cat([left[None], moments / layout.world_size]), prints, stats


def write(rank: int, world_size: int, folder: str, name: str, steps: int) -> tuple[Tensor, list[str], dict]:
    model, optimizer = make_model(name)
    train_model(model, optimizer, range(steps))
    dcp.save(model, optimizer, folder, step=steps)
    again, resumed = make_model(name)
    assert dcp.load(again, resumed, folder, step=0) == {"step": steps}
    train_model(model, optimizer, range(steps, steps + 9))
    train_model(again, resumed, range(steps, steps + 9))
    assert differing(everything(model, optimizer), everything(again, resumed)) == [], "it goes on bit for bit"
    again, resumed = make_model(name)
    dcp.load(again, resumed, folder)
    return looked_at(resumed)


def read(rank: int, world_size: int, folder: str, name: str) -> tuple[Tensor, list[str], dict, str]:
    model, optimizer = make_model(name)
    dcp.load(model, optimizer, folder)
    train_model(model, optimizer, range(20, 27))  # up to the end of a round
    again, reader = make_model(name)
    dcp.load(again, reader, folder)
    return *looked_at(reader), fingerprint(parameters(optimizer))


@pytest.mark.long(but=2)
@pytest.mark.parametrize(("wrote", "reads"), [(2, 4), (4, 1)])
@pytest.mark.parametrize(("name", "steps"), [("ours", 11), ("ours", 17), ("own", 9), ("masters", 11)])
def test_on_other_numbers_of_ranks_nothing_is_lost(tmp_path, wrote, reads, name, steps):
    total, shared, stats = run_ranks(write, wrote, str(tmp_path / "saved"), name, steps)[0]
    results = run_ranks(read, reads, str(tmp_path / "saved"), name)
    for found, here, told, prints in results:
        off = float(((found - total).abs().amax(1) / total.abs().amax(1)).max())
        print(f"{name}, {wrote} -> {reads} ranks, after {steps} steps: residuals, moments: {off:.1e} (limit 1e-6)")
        assert off <= 1e-6
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


def load_wrong(rank: int, world_size: int, name: str, case: str) -> tuple[type | None, str, bool]:
    savers = {
        "marsit": lambda: MarsitSGD(make_parameters()),
        "onebit": lambda: OneBitAdam(make_parameters(), freeze_step=2, faults=Faults(guard="off")),
        "deepspeed": lambda: fresh("deepspeed", make_parameters()),
    }
    usual = {
        "adam": lambda: MarsitAdam(make_parameters(), rounds=Rounds(local_steps=3)),
        "ours": lambda: fresh("ours", make_parameters()),
    }
    saver = savers.get(case, usual[name])()
    train(saver, rank, 4)
    saved = through_a_file(saver.state_dict())
    if case in ("rank", "one rank's"):
        local(saved["state"][0]["rank"]).fill_(1 - rank if case == "rank" else 0)
    elif case == "no rank":
        del saved["state"][0]["rank"]
    elif case in ("world_size", "within a round"):
        change_header(saved, lambda header: header.update(world_size=3, local=int(case == "within a round")))
    elif case == "moment" and rank == 1:
        change_header(saved, lambda header: header.update(updates=header["updates"] + 1))
    elif case == "place" and rank == 1:
        change_header(saved, lambda header: header.update(local=0))
    elif case == "momentum":
        for state in saved["state"].values():
            state.pop("exp_avg_sq", None)
    elif case == "torch":
        adamw = torch.optim.AdamW(make_parameters())
        train(adamw, rank, 1)
        saved = adamw.state_dict()
    optimizer = usual[name]()
    if case == "precondition":
        optimizer = fresh("ours", make_parameters(), precondition=False)
    elif case == "local steps":
        optimizer = MarsitAdam(make_parameters(), rounds=Rounds(local_steps=1))
    before = own_state(optimizer)
    outcome = caught(lambda: optimizer.load_state_dict(saved))
    still = own_state(optimizer) == before
    train(optimizer, rank, 3)
    return *outcome, still and optimizer.stats()["step"] == 3


@pytest.mark.long(but=4)
@pytest.mark.parametrize(
    ("name", "case", "text"),
    [
        ("ours", "marsit", "the checkpoint's algorithm is MarsitSGD, which ZeroOneAdam can't go on from"),
        ("ours", "onebit", "the checkpoint's algorithm is OneBitAdam, but here it is ZeroOneAdam"),
        ("ours", "deepspeed", "the checkpoint's algorithm is DeepSpeedZeroOneAdam, but here it is ZeroOneAdam"),
        ("ours", "precondition", "the checkpoint was written with precondition=True, but here it is False"),
        ("ours", "momentum", "state_dict lacks the key 'exp_avg_sq'"),
        ("ours", "place", "the checkpoint's local is 1 on rank 0 but 0 on rank 1"),
        *((name, "rank", "the checkpoint's rank is 1, but here it is 0") for name in ("ours", "adam")),
        *((name, "moment", "the checkpoint's updates is 4 on rank 0 but 5 on rank 1") for name in ("ours", "adam")),
        ("adam", "no rank", "state_dict lacks the key 'rank'"),
        ("adam", "world_size", "world_size is 3, but here it is 2, and this is one rank's file; save and load"),
        ("adam", "within a round", "written after 1 local steps of a round, whose parameters differ from rank to rank"),
        ("adam", "one rank's", "the checkpoint's rank is 0, but here it is 1"),
        ("adam", "marsit", "the checkpoint must be of MarsitAdam, got MarsitSGD"),
        ("adam", "torch", "the checkpoint must be of MarsitAdam, got one of torch.optim"),
        ("adam", "local steps", "written after 1 local steps of a round, but local_steps is 1"),
    ],
)
def test_another_runs_checkpoint_is_refused_and_changes_nothing(name, case, text):
    results = run_ranks(load_wrong, 2, name, case, group_timeout=10)
    assert any(text in message for _, message, _ in results), results
    for kind, _, still in results:
        assert issubclass(kind, ValueError)
        assert still
    if case == "one rank's" or (name, case) in (("ours", "moment"), ("ours", "place")):
        assert results[0][0] is DisagreementError
        assert text in results[0][1]


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


# ---------------------------------------------------------------- what a checkpoint of Marsit has


def test_sgd_without_momentum_saves_none_and_loads_what_had_some():
    def made(momentum: float) -> MarsitSGD:
        return MarsitSGD(make_parameters(), 1e-2, momentum=momentum)

    def names(optimizer: MarsitSGD) -> list[str]:
        return sorted(optimizer.state_dict()["state"][0])

    with_momentum, later_without, without = made(0.9), made(0.9), made(0.0)
    for optimizer in (with_momentum, without):
        train(optimizer, 0, 3)
    assert "momentum_buffer" in names(with_momentum)
    for group in (*with_momentum.param_groups, *later_without.param_groups):
        group["momentum"] = 0.0
    later_without.load_state_dict(without.state_dict())
    assert names(later_without) == names(without) == ["compensation", "rank", "step"]
    train(with_momentum, 0, 4, 3)
    assert names(with_momentum) == ["compensation", "rank", "step"]


def change_local_steps(rank: int, world_size: int) -> tuple[bool, list[str], list[str]]:
    one = MarsitSGD(make_parameters(), 1e-2, rounds=Rounds(full_precision_every=0))
    train(one, rank, 3)
    saved = through_a_file(one.state_dict())
    names = sorted(saved["state"][0])
    three = MarsitSGD(parameters(one), 1e-2, rounds=Rounds(full_precision_every=0, local_steps=3))
    three.load_state_dict(saved)
    train(three, rank, 6, 3)
    between = sorted(three.state_dict()["state"][0])
    return names == between, names, fingerprint(parameters(three))


def test_between_rounds_a_checkpoint_fits_any_local_steps():
    results = run_ranks(change_local_steps, 2)
    assert all(same for same, _, _ in results)
    assert results[0][1] == ["compensation", "momentum_buffer", "rank", "step"]
    assert results[0][2] == results[1][2]
