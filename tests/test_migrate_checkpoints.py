"""``fusedonebit.deepspeed.load_deepspeed``: DeepSpeed's checkpoints are gone on from."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed_runs as ds
import pytest
import torch
import torch.distributed as dist
from optimizers import by_name, objects
from ranks import run_ranks

import fusedonebit
from benchmarks import deepspeed_peer
from fusedonebit import FusedOneBitWarning, Numerics, OneBitAdam, OneBitLamb
from fusedonebit.deepspeed import Taken, load_deepspeed
from fusedonebit.optim.policies import EveryStep

FREEZE = 6  # DeepSpeed's: five updates before it
RESIDUALS = "residuals of compression, which DeepSpeed itself drops"
OURS = {"OnebitAdam": by_name(OneBitAdam), "OnebitLamb": by_name(OneBitLamb)}
needs_deepspeed = pytest.mark.skipif(not deepspeed_peer.available(), reason=deepspeed_peer.MISSING)


def from_deepspeed(kind: str, params: list, **options: Any) -> Any:
    block = {k: v for k, v in ds.OPTIONS.items() if k != "betas"} | {"betas": list(ds.OPTIONS["betas"])}
    return OURS[kind].from_deepspeed(params, block | {"freeze_step": FREEZE}, **options)


def go_on(rank: int, world_size: int, kind: str, before: int, after: int) -> tuple[float, float, Taken, str]:
    """DeepSpeed makes ``before`` updates and ``after`` more; ours goes on from the file between. The largest errors."""
    params = ds.make(shapes=ds.WHOLE[kind])
    theirs = ds.theirs(kind, params, freeze_step=FREEZE)
    for number in range(before):
        ds.step(theirs, params, rank, number)
    saved = [copy.deepcopy(theirs.state_dict())]
    dist.broadcast_object_list(saved)  # rank 0 writes the file
    ds.forget(theirs, kind)
    mine = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = from_deepspeed(kind, mine)
    with ds.quiet():
        taken = load_deepspeed(optimizer, saved[0])
    errors, moved = [], 0.0
    for number in range(before, before + after):
        at = [p.detach().clone() for p in params]
        ds.step(theirs, params, rank, number)
        ds.fill(mine, rank, number)
        with ds.quiet():
            optimizer.step()
        errors.append(max(float((a - b).detach().abs().max()) for a, b in zip(params, mine, strict=True)))
        moved = max(moved, max(float((a - b).detach().abs().max()) for a, b in zip(params, at, strict=True)))
    return max(errors), moved, taken, optimizer.phase


@pytest.mark.full
@needs_deepspeed
@pytest.mark.parametrize("kind", ["OnebitAdam", "OnebitLamb"])
@pytest.mark.parametrize("before", [3, 9], ids=["from the warm-up", "from the compression stage"])
def test_goes_on_as_deepspeed_does_from_its_own_checkpoint(kind, before):
    for error, moved, taken, phase in run_ranks(go_on, 2, kind, before, 6):
        print(f"{kind} from update {before}: largest error in 6 updates {error:.1e} (limit 1e-5), moved {moved:.1e}")
        assert error <= 1e-5
        assert moved > 1e-3
        assert taken.updates == before
        assert phase == "compression"
        assert taken.phase == ("compression" if before >= FREEZE else "warmup")
        assert (RESIDUALS in taken.lost) is (before >= FREEZE)
    if before < FREEZE:
        assert str(taken) == "DeepSpeed's run goes on after 3 updates, in the warm-up; nothing is lost"


def real_wrapper(rank: int, world_size: int) -> tuple[dict, list, list]:
    """What DeepSpeed's 16-bit wrapper writes of a run in bfloat16, and the state of its inner optimizer."""
    params = ds.make(torch.bfloat16)
    deepspeed_peer._import(params[0].device)
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    with ds.quiet():
        inner = deepspeed_peer.construct("OnebitAdam", params, **ds.OPTIONS, freeze_step=FREEZE)
        inner.deepspeed.pipeline_parallelism = False
        wrapper = FP16_Optimizer(inner, deepspeed=inner.deepspeed, low_precision_dtype=torch.bfloat16)
        for number in range(4):
            ds.fill(params, 0, number)
            wrapper.step()
    masters = [p.detach().clone() for p in wrapper.fp32_groups_flat]
    return copy.deepcopy(wrapper.state_dict()), masters, [p.detach().clone() for p in params]


@needs_deepspeed
def test_flat_buffers_of_the_16_bit_wrapper_become_parameters():
    saved, (flat,), weights = run_ranks(real_wrapper, 2)[0]
    params = [torch.nn.Parameter(w) for w in weights]
    optimizer = OneBitAdam(params, freeze_step=FREEZE, numerics=Numerics(master_weights=True))
    taken = load_deepspeed(optimizer, saved)
    assert (taken.updates, taken.phase, taken.lost) == (4, "warmup", "")
    state = saved["optimizer_state_dict"]["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        together = torch.cat([optimizer.state[p][name].flatten() for p in params])
        assert torch.equal(together, state[name])
    masters = [optimizer.state_dict()["state"][i]["master"].flatten() for i in range(len(params))]
    assert torch.equal(torch.cat(masters), flat)
    assert not torch.equal(torch.cat(masters), torch.cat([p.detach().float().flatten() for p in params]))


# ---------------------------------------------------------------- made by hand


def adam(params: list, **options: Any) -> OneBitAdam:
    return OneBitAdam(params, **objects(**({"freeze_step": FREEZE - 1} | options)))


def test_warm_up_continues_where_it_was():
    params = ds.make()
    saved = ds.by_hand(4, params)
    optimizer = adam(params)
    taken = load_deepspeed(optimizer, saved)
    assert (taken.updates, taken.phase, taken.lost) == (3, "warmup", "")
    assert optimizer.stats()["step"] == 3
    for i, p in enumerate(params):
        assert torch.equal(optimizer.state[p]["exp_avg"], saved["state"][i]["exp_avg"])
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], saved["state"][i]["exp_avg_sq"])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    phases = []
    for number in range(4):
        ds.fill(params, 0, number)
        optimizer.step()
        phases.append(optimizer.phase)
    assert phases == ["warmup", "warmup", "compression", "compression"]


def test_compression_stage_goes_on_with_variance_and_momentum():
    params = ds.make()
    saved = ds.by_hand(40, params, frozen=True)
    optimizer = adam(params, bias_correction=False, precondition=False, variance_floor=0.0, dead_coordinates="keep")
    with pytest.warns(FusedOneBitWarning, match="goes on after 39 updates, in the compression stage; lost: the resid"):
        taken = load_deepspeed(optimizer, saved)
    assert (taken.updates, taken.phase) == (39, "compression")
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.phase == "compression"
    assert optimizer.stats()["freeze_step"] == 39
    for i, p in enumerate(params):
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], saved["state"][i]["exp_avg_sq"])
        kept = optimizer.momentum(p) + optimizer.worker_error(p)
        torch.testing.assert_close(kept, 0.9 * saved["state"][i]["exp_avg"], rtol=0, atol=2e-2)


def test_variance_is_corrected_for_the_updates_it_has_seen():
    """With bias correction the freeze divides v by 1 - beta2^5, not by 1 - beta2^39."""
    params = ds.make()
    saved = ds.by_hand(40, params, frozen=True)
    optimizer = adam(params, precondition=False, variance_floor=0.0, dead_coordinates="keep")
    with pytest.warns(FusedOneBitWarning, match=RESIDUALS):
        load_deepspeed(optimizer, saved)
    assert optimizer.contents.values()["variance_step"] == FREEZE - 1


def test_a_later_freeze_warms_up_on():
    params = ds.make()
    optimizer = adam(params, freeze_step=100)
    assert load_deepspeed(optimizer, ds.engine(ds.by_hand(40, params, frozen=True))).phase == "warmup"
    assert optimizer.contents.values()["variance_step"] == 5  # as its config says


@pytest.mark.filterwarnings("ignore:step.. found no gradient")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["engine", "file", "tag", "latest", "wrapper"])
def test_every_form_of_a_16_bit_checkpoint_loads(dtype, form, tmp_path):
    params = ds.make(dtype)
    masters = [p.detach().float() + 1e-4 for p in params]
    model = torch.nn.ParameterList(params)
    module = {str(i): m.to(torch.float16) for i, m in enumerate(masters)}
    wrapped = ds.fused(ds.by_hand(9, params, frozen=True), masters)
    whole, source = ds.engine(wrapped, module), None
    folder = tmp_path / "global_step9"
    if form in ("file", "tag", "latest"):
        folder.mkdir()
        torch.save(whole, folder / "mp_rank_00_model_states.pt")
        (tmp_path / "latest").write_text("global_step9\n")
        source = {"file": folder / "mp_rank_00_model_states.pt", "tag": folder, "latest": str(tmp_path)}[form]
    source = source or (whole if form == "engine" else wrapped)
    with torch.no_grad():
        for p in params:
            p.zero_()
    optimizer = adam(params, master_weights=dtype is torch.bfloat16)
    with pytest.warns(FusedOneBitWarning, match=RESIDUALS):
        taken = load_deepspeed(optimizer, source, None if form == "wrapper" else model)
    assert taken.loss_scale == 4096
    assert taken.schedule_steps == (None if form == "wrapper" else 9)
    for i, (p, master) in enumerate(zip(params, masters, strict=True)):
        assert torch.equal(p.detach(), master.to(dtype))
        if dtype is torch.bfloat16:
            assert torch.equal(optimizer.state_dict()["state"][i]["master"], master)
    optimizer.step()
    assert optimizer.phase == "compression"


def test_unfused_wrappers_weights_and_averages_are_taken_up():
    params = ds.make(torch.bfloat16)
    masters = [p.detach().float() + 1e-4 for p in params]
    saved = ds.by_hand(9, params, frozen=True, lamb_coeff_freeze=0.25, last_factor=1.5, scaling_coeff=0.75)
    for state in saved["state"].values():
        state["exp_avg_sq_fresh"] = state["exp_avg_sq"] + 1
    saved["param_groups"][0] |= {"max_coeff": 0.3, "min_coeff": 0.02}
    optimizer = OneBitLamb(params, freeze_step=FREEZE - 1, numerics=Numerics(master_weights=True))
    wrapped = {"cur_scale": 1.0, "optimizer_state_dict": saved, "fp32_groups": [masters]}
    with pytest.warns(FusedOneBitWarning, match="and the variance rebuilt since the freeze, with its ratios"):
        load_deepspeed(optimizer, wrapped)
    assert (optimizer.param_groups[0]["c_max"], optimizer.param_groups[0]["c_min"]) == (0.3, 0.02)
    ds.fill(params, 0, 0)
    optimizer.step()
    layers = optimizer.stats(layers=True)["layers"]
    assert optimizer.phase == "compression"
    assert layers["average"] == [0.25, 0.25]
    saved_again = optimizer.state_dict()["state"]
    assert [float(saved_again[i]["unit"]) for i in range(2)] == [0.75, 0.75]


@pytest.mark.parametrize("deepspeeds", [False, True])
def test_zero_one_adam_takes_up_its_moments(deepspeeds):
    params = ds.make()
    block = {"var_freeze_step": 50, "weight_decay": 0.01}
    ours = fusedonebit.ZeroOneAdam(params, sync_policy=EveryStep())
    optimizer = fusedonebit.ZeroOneAdam.from_deepspeed(params, block) if deepspeeds else ours
    counters = {"var_interval": 2, "var_counter": 1, "local_step_interval": 1, "local_step_counter": 0, "lrs": 0}
    with pytest.warns(FusedOneBitWarning, match="in rounds as its policies say; lost: the residuals"):
        taken = load_deepspeed(optimizer, ds.by_hand(9, params, **counters))
    assert taken.updates == 8
    for i, p in enumerate(params):
        saved = ds.by_hand(9, params)["state"][i]
        assert torch.equal(optimizer.momentum(p), saved["exp_avg"])
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], saved["exp_avg_sq"])


def test_frozen_parameters_are_matched_as_deepspeed_counts():
    params = ds.make(shapes=((8,), (6,), (4, 2)))
    params[1].requires_grad_(False)
    trained = [params[0], params[2]]
    optimizer = adam([{"params": params[:2]}, {"params": params[2:], "lr": 1e-4}])
    saved = ds.by_hand(4, trained)
    group = saved["param_groups"][0]
    saved["param_groups"] = [group | {"params": [0]}, group | {"params": [1], "lr": 5e-4}]
    load_deepspeed(optimizer, saved)
    assert [g["lr"] for g in optimizer.param_groups] == [1e-2, 5e-4]
    for i, p in enumerate(trained):
        assert torch.equal(optimizer.state[p]["exp_avg"], saved["state"][i]["exp_avg"])


# ---------------------------------------------------------------- what can't be loaded


class Opaque:
    """Not a tensor or a plain value."""


def test_files_that_cant_be_read_are_named(tmp_path):
    optimizer = adam(ds.make())
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_deepspeed(optimizer, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="has no mp_rank_00_model_states"):
        load_deepspeed(optimizer, tmp_path)
    for number in range(2):
        torch.save({"module": Opaque()}, tmp_path / f"mp_rank_0{number}_model_states.pt")
    with pytest.raises(ValueError, match="cut over 2 ranks; give each of them its own"):
        load_deepspeed(optimizer, tmp_path)
    with pytest.raises(ValueError, match=r"can't be read as plain tensors (?s:.*) weights_only=False"):
        load_deepspeed(optimizer, tmp_path / "mp_rank_00_model_states.pt")
