"""Folders that each Python and torch wrote (``recorded_folders``) load on all others, and runs go on bit for bit."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from recorded_folders import AFTER, DATA, RANKS, STEPS, WHOLE, run, unpack

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
