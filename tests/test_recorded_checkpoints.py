"""Checkpoints of earlier versions, and folders of each Python and torch (``recorded_*``): runs go on bit for bit."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks, simulate
from recorded_checkpoints import AFTER, Make, cases, parameters, read, step
from recorded_folders import DATA, RANKS, STEPS, WHOLE, run, unpack

from fusedonebit.comm import Transport

RECORDED = {"5b66f63": read(Path(__file__).parent / "data" / "checkpoints_5b66f63.pt.xz")}
CASES = {name: (make, steps, dtype) for name, make, steps, dtype in cases()}
LION = [name for name in CASES if name.startswith("Lion")]


def go_on(rank: int, transport: Transport, make: Make, steps: int, dtype: torch.dtype, saved: list[Any]) -> list[bool]:
    params = parameters(dtype)
    optimizer = make(params, transport)
    with torch.no_grad():
        for p, value in zip(params, saved[rank]["params"], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(saved[rank]["optimizer"])
    for number in range(steps, steps + AFTER):
        step(optimizer, params, rank, number)
    return [torch.equal(p, end) for p, end in zip(params, saved[rank]["end"], strict=True)]


@pytest.mark.parametrize("version", RECORDED)
def test_every_kind_and_stage_is_recorded(version: str):
    assert RECORDED[version].keys() == CASES.keys()


@pytest.mark.parametrize("name", [name for name in CASES if name not in LION])
@pytest.mark.parametrize("version", RECORDED)
def test_runs_go_on_bit_for_bit_from_earlier_checkpoints(version: str, name: str):
    assert simulate(go_on, 2, *CASES[name], RECORDED[version][name]) == [[True] * 3] * 2


@pytest.mark.parametrize("name", LION)
def test_lions_checkpoints_without_exp_avg_say_the_way_out(name: str):
    with pytest.raises(ValueError, match="saved momenta as worker_error has written it; resume with that version"):
        simulate(go_on, 2, *CASES[name], RECORDED["5b66f63"][name])


# ---------------------------------------------------------------- folders of each Python and torch

FOLDERS = sorted(path.name for path in DATA.glob("*.tar.xz"))
PICKLES = sorted(path.name for path in DATA.glob("*.metadata.xz"))


def written_by(name: str, root: Path) -> tuple[str, list[list]]:
    """The folder, and the parameters that its run had ``AFTER`` steps later."""
    unpack(WHOLE if name in PICKLES else name, root)
    if name in PICKLES:
        (root / "saved" / ".metadata").write_bytes(lzma.decompress((DATA / name).read_bytes()))
    return str(root / "saved"), [end.tolist() for end in torch.load(root / "end.pt")]


@pytest.mark.parametrize("name", [*FOLDERS, *PICKLES])
def test_a_run_goes_on_from_another_python_or_torchs_folder(tmp_path, name):
    folder, end = written_by(name, tmp_path)
    assert run_ranks(run, RANKS, folder, STEPS, STEPS + AFTER) == [end] * RANKS


def test_a_folder_is_kept_of_each_way_pythons_name_enumerations(tmp_path):
    """Its member is named by ``getattr`` from Python 3.11.0 to 3.11.3; paths have a module of their own in 3.13."""
    found = {name: Path(written_by(name, tmp_path)[0], ".metadata").read_bytes() for name in (*FOLDERS, *PICKLES)}
    assert [name for name, data in found.items() if b"getattr" in data] == ["python3.11.2-torch2.13.0.tar.xz"]
    assert [name for name, data in found.items() if b"pathlib._local" in data] == ["python3.13.0.metadata.xz"]
