"""Damaged checkpoints are refused on all ranks, and change nothing: flipped bits, and values that no run can have."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import everything, make_network, train_network, write_folder
from observe import change_header, fingerprint, named, parameters, train
from optimizers import by_name
from ranks import run_ranks
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import Freeze, Lamb, MarsitAdam, OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam, dcp
from fusedonebit.checkpoint import KEY, forget_checksums
from fusedonebit.comm import SimulatedGroup
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.optim.policies import DoublingRounds

RANKS = 2
OPTIMIZERS: dict[str, Callable[..., DistributedOptimizer]] = {
    "onebit-adam": by_name(OneBitAdam, lr=1e-2, freeze_step=3, guard="off"),
    "living": by_name(OneBitAdam, lr=1e-2, warmup=3, guard="off"),
    "onebit-lamb": by_name(OneBitLamb, lr=1e-2, freeze_step=3, guard="off"),
    "lamb": by_name(Lamb, lr=1e-2),
    "lion": by_name(OneBitLion, lr=1e-3),
    "marsit": by_name(MarsitAdam, lr=1e-3),
    "zero-one": by_name(ZeroOneAdam, lr=1e-3, sync_policy=DoublingRounds(after=3, scaler=2, most=4)),
}


def make(name: str, transport: Any) -> DistributedOptimizer:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in ((33, 40), (7,), (300,))]
    return OPTIMIZERS[name](params, process_group=transport)


def file_of(optimizer: DistributedOptimizer) -> bytes:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return file.getvalue()


def outcome(load: Callable[[], object]) -> str:
    return ": ".join(named(load)).removesuffix(": ")


def load_each(
    name: str, steps: int, damaged: Callable[[int, int, bytes], Any], count: int
) -> tuple[list[list[str]], list[bool]]:
    """Saves, and loads ``count`` damaged copies; returns what each rank raised, and whether each changed nothing."""

    def work(rank: int, transport: Any) -> tuple[list[str], bool]:
        optimizer = make(name, transport)
        train(optimizer, rank, range(steps))
        file = file_of(optimizer)
        train(optimizer, rank, range(2))
        before, raised = everything(optimizer), []
        for trial in range(count):
            state = damaged(trial, rank, file)
            raised.append(outcome(lambda state=state: optimizer.load_state_dict(state)))
        unchanged = everything(optimizer) == before
        optimizer.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
        return raised, unchanged

    told = SimulatedGroup(RANKS).run(work)
    return [raised for raised, _ in told], [unchanged for _, unchanged in told]


# ---------------------------------------------------------------- flipped bits


def flipped(data: bytes, start: int, length: int, generator: random.Random) -> bytes:
    at = start + generator.randrange(length)
    return data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :]


def records(data: bytes) -> list[tuple[int, int]]:
    """Where tensors' bytes lie in a file of ``torch.save``: starts and lengths, each as often as it is long."""
    found = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            if "/data/" in info.filename and info.file_size:
                at = info.header_offset
                names = int.from_bytes(data[at + 26 : at + 28], "little") + int.from_bytes(
                    data[at + 28 : at + 30], "little"
                )
                found.append((at + 30 + names, info.file_size))
    return found


def flip_in_a_file(trial: int, rank: int, data: bytes) -> Any:
    """On one rank a bit is another, on the other none is."""
    generator = random.Random(trial)
    if generator.randrange(RANKS) == rank:
        found = records(data)
        data = flipped(data, *generator.choices(found, [length for _, length in found])[0], generator)
    return torch.load(io.BytesIO(data), weights_only=True)


CASES = [(name, 5) for name in OPTIMIZERS] + [(name, 2) for name in ("onebit-adam", "living", "onebit-lamb")]


@pytest.mark.long
def test_every_flipped_bit_in_a_file_is_refused_on_all_ranks():
    refused = trials = 0
    for name, steps in CASES:
        raised, unchanged = load_each(name, steps, flip_in_a_file, 200 // len(CASES))
        refused += sum(all(texts) for texts in zip(*raised, strict=True))
        trials += len(raised[0])
        assert all(unchanged)
        for texts in zip(*raised, strict=True):
            assert any(" is damaged: its checksum is " in text for text in texts)
    print(f"flipped bits in tensors of files: {refused} of {trials} refused on all ranks, nothing changed")
    assert refused == trials == 200


def load_folders(rank: int, world_size: int, folders: list[str]) -> tuple[list[str], bool]:
    model, optimizer = make_network()
    train_network(model, optimizer, rank, 3)
    before, prints = everything(optimizer), fingerprint(list(model.parameters()))
    raised = [outcome(lambda folder=folder: dcp.load(model, optimizer, folder)) for folder in folders]
    return raised, (everything(optimizer), fingerprint(list(model.parameters()))) == (before, prints)


def damaged_folders(good: Path, where: Path, count: int) -> list[str]:
    """Copies of a folder, with one bit flipped in the data of a tensor; those of .metadata: test_hostile_metadata."""
    from torch.distributed.checkpoint import FileSystemReader

    entries: list[tuple[str, int, int]] = []
    for index, entry in FileSystemReader(good).read_metadata().storage_data.items():
        data = (good / entry.relative_path).read_bytes()[entry.offset : entry.offset + entry.length]
        if index.offset is not None:  # a tensor
            entries += [(entry.relative_path, entry.offset + start, length) for start, length in records(data)]
    folders = []
    for trial in range(count):
        generator, folder = random.Random(trial), where / str(trial)
        folder.mkdir()
        for file in good.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        file, start, length = generator.choices(entries, [length for *_, length in entries])[0]
        (folder / file).write_bytes(flipped((folder / file).read_bytes(), start, length, generator))
        folders.append(str(folder))
    return folders


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("wrote", "reads", "count"),
    [(2, 2, 40), *(pytest.param(*ranks, 200, marks=pytest.mark.full) for ranks in ((2, 2), (3, 2), (2, 1)))],
)
def test_every_flipped_bit_of_a_folder_is_refused_on_all_ranks(tmp_path, wrote, reads, count):
    good, copies = tmp_path / "good", tmp_path / "copies"
    copies.mkdir()
    run_ranks(write_folder, wrote, str(good))
    results = run_ranks(load_folders, reads, damaged_folders(good, copies, count), timeout=600.0)
    refused = sum(all(texts) for texts in zip(*(raised for raised, _ in results), strict=True))
    print(f"flipped bits, {wrote} ranks wrote, {reads} read: {refused} of {count} refused on all, nothing changed")
    assert refused == count
    for raised, unchanged in results:
        assert unchanged
        assert all("damaged" in text for text in raised)


# ---------------------------------------------------------------- headers


EVIL = ["evil", -5, -1.0, None, [], {}, 1e400, "7", True, [None], 2**70, [[-1]]]


def changed_header(trial: int, rank: int, data: bytes) -> Any:
    """The text is changed somewhere, or one value is what it can't be, with a checksum that is right."""
    generator, state = random.Random(trial), torch.load(io.BytesIO(data), weights_only=True)
    if trial % 2:
        text = state["param_groups"][0][KEY]
        at = generator.randrange(len(text))
        state["param_groups"][0][KEY] = text[:at] + chr(ord(text[at]) ^ 1 << generator.randrange(7)) + text[at + 1 :]
        return state
    header = json.loads(state["param_groups"][0][KEY])
    key = generator.choice(sorted(set(header) - {"crc32", "masks", "options", "settled", "checksums", "between"}))
    bad = [value for value in EVIL if value != header[key] and not allowed(key, value)]
    change_header(state, lambda header: header.update({key: generator.choice(bad)}))
    return state


def allowed(key: str, value: Any) -> bool:
    """What may be so in another run."""
    if key in ("guard", "auto", "veto_at", "freeze_step", "freeze_due"):
        return value is None or value == {}
    if key in ("flags", "tag", "digest", "pending", "lines", "started", "unit_is_known", "floats", "was_frozen"):
        return isinstance(value, (int, bool)) and value != 2**70
    if key == "variance_step":
        return value == 1e400
    if key == "algorithm":
        return isinstance(value, str)  # what it is says who can go on from it
    return key in ("dead_tensors", "strides") and value == []


def test_every_damaged_header_is_refused_on_all_ranks():
    refused = trials = 0
    for name, steps in CASES:
        raised, unchanged = load_each(name, steps, changed_header, 10)
        refused += sum(all(texts) for texts in zip(*raised, strict=True))
        trials += len(raised[0])
        assert all(unchanged)
    print(f"damaged headers: {refused} of {trials} refused on all ranks, nothing changed")
    assert refused == trials >= 50


# ---------------------------------------------------------------- values that no run can have


def set_value(key: str, value: float) -> Callable[[dict], object]:
    def change(saved: dict) -> None:
        state = next(state for state in saved["state"].values() if key in state)
        state[key] = state[key].clone()
        state[key].view(-1)[0] = value

    return change


def in_header(**values: Any) -> Callable[[dict], object]:
    return lambda saved: change_header(saved, lambda header: header.update(values))


NAN, INF = float("nan"), float("inf")
ADAM, OF_0 = ("onebit-adam", 5), "of parameter 0 in the checkpoint must"
IMPOSSIBLE: list[tuple[str, int, Callable[[dict], object], str]] = [
    (*ADAM, set_value("exp_avg_sq", -1.0), f"exp_avg_sq {OF_0} not be negative"),
    (*ADAM, set_value("exp_avg_sq", NAN), f"exp_avg_sq {OF_0} be finite"),
    (*ADAM, set_value("worker_error", INF), f"worker_error {OF_0} be finite"),
    (*ADAM, set_value("server_error", NAN), f"server_error {OF_0} be finite"),
    (*ADAM, set_value("exp_avg_scale", -1.0), f"exp_avg_scale {OF_0} not be"),
    ("living", 5, set_value("variance_level", -1.0), f"variance_level {OF_0} not be negative"),
    ("onebit-adam", 2, set_value("exp_avg", -INF), f"exp_avg {OF_0} be finite"),
    ("onebit-adam", 2, set_value("step", -5.0), f"step {OF_0} be a finite number >= 0"),
    ("onebit-lamb", 5, set_value("layer", NAN), f"layer {OF_0} be finite"),
    ("marsit", 5, set_value("compensation", NAN), f"compensation {OF_0} be finite"),
    ("lion", 5, set_value("exp_avg", NAN), f"exp_avg {OF_0} be finite"),
    ("zero-one", 5, set_value("exp_avg_sq", -1.0), f"exp_avg_sq {OF_0} not be negative"),
    (*ADAM, in_header(updates=-5), "updates must be an int >= 0, got -5"),
    (*ADAM, in_header(phase="evil"), "phase must be one of"),
    (*ADAM, in_header(phase="warmup"), "phase must be one of"),
    (*ADAM, in_header(skipped="3"), "skipped must be an int >= 0"),
    ("onebit-lamb", 5, lambda s: change_header(s, lambda h: h.pop("started")), "header is damaged: it lacks started"),
    ("zero-one", 5, in_header(done=["a", 1, 1, 1]), "done must be a list of 4"),
    (*ADAM, lambda s: s["param_groups"][0].update(lr="x"), "lr must be"),
    (*ADAM, lambda s: s["param_groups"][0].update(betas=None), "betas"),
    (*ADAM, lambda s: s["state"][0].update(exp_avg_sq="x"), "exp_avg_sq in the checkpoint must be a tensor"),
]


@pytest.mark.long(but=3)
@pytest.mark.parametrize(("name", "steps", "change", "text"), IMPOSSIBLE)
def test_impossible_values_are_refused_also_without_checksums(name, steps, change, text):
    def damaged(trial: int, rank: int, data: bytes) -> Any:
        state = torch.load(io.BytesIO(data), weights_only=True)
        if rank == 1:
            change(state)
        forget_checksums(state)
        return state

    raised, unchanged = load_each(name, steps, damaged, 1)
    for (message,) in raised:
        assert message.split(":")[0] in ("ValueError", "TypeError", "DisagreementError")
        assert text in message
    assert all(unchanged)


@pytest.mark.parametrize("value", [-1.0, NAN, INF])
def test_adamws_impossible_values_are_refused_on_all_ranks(value):
    def work(rank: int, transport: Any) -> str:
        optimizer = make("onebit-adam", transport)
        adamw = torch.optim.AdamW([Parameter(p.detach().clone()) for p in parameters(optimizer)])
        for p in adamw.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        adamw.step()
        saved = adamw.state_dict()
        saved["state"][1]["exp_avg_sq"][3] = value if rank == 1 else saved["state"][1]["exp_avg_sq"][3]
        return outcome(lambda: optimizer.load_state_dict(saved))

    for message in SimulatedGroup(RANKS).run(work):
        assert "exp_avg_sq of parameter 1 in the checkpoint must" in message


@pytest.mark.long(but=2)
@pytest.mark.parametrize(("name", "steps"), CASES)
def test_an_earlier_checkpoint_without_checksums_loads(name, steps):
    def work(rank: int, transport: Any) -> tuple[bool, bool]:
        optimizer = make(name, transport)
        train(optimizer, rank, range(steps))
        saved = torch.load(io.BytesIO(file_of(optimizer)), weights_only=True)
        forget_checksums(saved)
        header = json.loads(saved["param_groups"][0][KEY])
        for key in ("crc32", "rank"):
            del header[key]
        saved["param_groups"][0][KEY] = json.dumps(header)
        other = make(name, transport)
        with torch.no_grad():
            for p, q in zip(parameters(other), parameters(optimizer), strict=True):
                p.copy_(q)
        other.load_state_dict(saved)
        same = everything(other) == everything(optimizer)
        for each in (optimizer, other):
            train(each, rank, range(3))
        return same, everything(other) == everything(optimizer)

    assert SimulatedGroup(RANKS).run(work) == [(True, True)] * RANKS


def test_a_state_dict_changed_on_purpose_says_how_to_load_it():
    optimizer = make("onebit-adam", None)
    train(optimizer, 0, range(5))
    saved = torch.load(io.BytesIO(file_of(optimizer)), weights_only=True)
    saved["state"][1]["exp_avg_sq"] *= 2
    with pytest.raises(ValueError, match=r"exp_avg_sq of parameter 1 .* damaged.*forget_checksums\(state_dict\) first"):
        optimizer.load_state_dict(saved)
    forget_checksums(saved)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[parameters(optimizer)[1]]["exp_avg_sq"], saved["state"][1]["exp_avg_sq"])


def test_a_warm_start_takes_no_damaged_or_impossible_variance():
    optimizer = make("onebit-adam", None)
    train(optimizer, 0, range(5))
    saved = torch.load(io.BytesIO(file_of(optimizer)), weights_only=True)
    params: list[Tensor] = [Parameter(p.detach().clone()) for p in parameters(optimizer)]
    saved["state"][1]["exp_avg_sq"][2] = -1.0
    with pytest.raises(ValueError, match=r"exp_avg_sq of parameter 1 .* damaged"):
        OneBitAdam(params, lr=1e-2, freeze_step=Freeze(step=0, warm_start=saved))
    forget_checksums(saved)
    with pytest.raises(ValueError, match=r"exp_avg_sq of parameter 1 .* must not be negative"):
        OneBitAdam(params, lr=1e-2, freeze_step=Freeze(step=0, warm_start=saved))
