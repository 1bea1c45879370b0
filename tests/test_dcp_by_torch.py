"""Checkpoints by torch's own calls: with a template, by number, flattened, whole, and what torch leaves out of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dcp_runs import differing, everything, make, train
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedonebit import dcp


def by_torchs_calls(rank: int, world_size: int, name: str, folder: str) -> list[str]:
    model, optimizer = make(name)
    train(model, optimizer, range(20))
    torch_dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    values = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, range(20, 26))

    again, resumed = make(name)
    with torch.no_grad():
        for p, value in zip(again.parameters(), values, strict=True):
            p.copy_(value)
    state = {"optim": dcp.template(again, resumed, folder, prefix="optim")}
    torch_dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(again, resumed, state["optim"])
    train(again, resumed, range(20, 26))
    return differing(everything(model, optimizer), everything(again, resumed))


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", ["adam", "lamb", "marsit"])
def test_torchs_own_calls_do_with_a_template(tmp_path, name):
    assert run_ranks(by_torchs_calls, 2, name, str(tmp_path / "saved")) == [[], []]


def by_number(rank: int, world_size: int, name: str, steps: int, folder: str) -> tuple[str, list[str], list[str]]:
    """What torch says of a raw state_dict() in a new optimizer; and what differs after what we say instead."""
    model, optimizer = make(name)
    train(model, optimizer, range(steps))
    raw = {"model": get_model_state_dict(model), "optimizer": optimizer.state_dict()}
    torch_dcp.save(raw, checkpoint_id=folder)
    fresh, other = make(name)
    said = ""
    try:
        torch_dcp.load({"optimizer": other.state_dict()}, checkpoint_id=folder)
    except BaseException as error:  # a CheckpointException is none of Exception's
        said = str(error)
    dcp.load(fresh, other, folder)
    loaded = differing(everything(model, optimizer), everything(fresh, other))

    again, resumed = make(name)
    again.load_state_dict(model.state_dict())
    state = {"optimizer": dcp.template(again, resumed, folder)}
    torch_dcp.load(state, checkpoint_id=folder)
    resumed.load_state_dict(state["optimizer"])
    return said, loaded, differing(everything(model, optimizer), everything(again, resumed))


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("name", "steps"), [("adam", 20), ("adam", 2), ("lamb", 20), ("marsit", 20)])
def test_state_that_torch_saved_by_number_loads_as_the_page_says(tmp_path, name, steps):
    page = (Path(__file__).parent.parent / "docs" / "when.md").read_text()
    for said, loaded, by_template in run_ranks(by_number, 2, name, steps, str(tmp_path / "saved")):
        assert (loaded, by_template) == ([], [])
        if said:  # in the first stage a new optimizer has all that is there
            assert "Missing key in checkpoint state_dict: optimizer.state.0." in said
            assert "torch's `Missing key in checkpoint state_dict: optimizer.state...`" in page


def through_full_state(rank: int, world_size: int, name: str) -> tuple[list[str], list[tuple]]:
    model, optimizer = make(name)
    train(model, optimizer, range(20))
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    on_cpu = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    again, resumed = make(name)
    with torch.no_grad():
        for p, q in zip(again.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    set_optimizer_state_dict(again, resumed, full)
    train(model, optimizer, range(20, 26))
    train(again, resumed, range(20, 26))
    return differing(everything(model, optimizer), everything(again, resumed)), sorted(on_cpu)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", ["adam", "lamb", "marsit"])
def test_a_full_state_has_all_rows_and_loads_without_options(name):
    results = run_ranks(through_full_state, 2, name)
    assert [differ for differ, _ in results] == [[], []]
    # With cpu_offload torch gives it to rank 0 alone.
    assert [keys for _, keys in results] == [["param_groups", "state"], []]


def through_torch_alone(rank: int, world_size: int, broadcast: bool) -> tuple[str, list[str]]:
    """Hands a full state to torch, which rank 0 alone has or with a layer frozen; returns the error, what changed."""
    model, optimizer = make("adam")
    train(model, optimizer, range(20))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=broadcast)
    full = get_optimizer_state_dict(model, optimizer, options=whole)
    again, resumed = make("adam")
    before = everything(again, resumed)
    if not broadcast:
        again[2].requires_grad_(False)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True) if broadcast else None
    try:
        set_optimizer_state_dict(again, resumed, full, options=options)
    except ValueError as error:
        return str(error), differing(everything(again, resumed), before)
    return "", []


@pytest.mark.parametrize(
    ("broadcast", "text"),
    [
        (True, "and so does broadcast_from_rank0=True on all ranks but the first: leave it out and give every rank"),
        (False, "torch leaves out what requires no gradients, here parameter 2, parameter 3: load before it is frozen"),
    ],
)
def test_what_torch_leaves_out_is_named_with_its_option_or_layer(broadcast, text):
    errors = run_ranks(through_torch_alone, 2, broadcast, group_timeout=20)
    print([message for message, _ in errors])
    assert all(changed == [] for _, changed in errors)
    assert all(text in message for message, _ in errors)
