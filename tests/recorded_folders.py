"""Folders that ``fusedonebit.dcp`` writes, one for each Python and torch, and how their runs went on.

What ``data/folders`` has, these wrote, each with the torch that its name says::

    PYTHONPATH=tests:tests/wire python3.11 tests/recorded_folders.py    # python3.11.7-torch2.13.0.tar.xz

``python3.13.0.metadata.xz`` is ``.metadata`` of the folder of ``WHOLE``, pickled anew by a Python for which there was
no torch, by stand-ins of its classes (this file at 07289119): what else is in a folder depends on no Python. Initial
values and gradients are those of ``recorded_checkpoints``, the same on every machine.
"""

from __future__ import annotations

import platform
import tarfile
import tempfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "folders"
WHOLE = "python3.11.7-torch2.13.0.tar.xz"
STEPS, AFTER, RANKS = 5, 4, 2


def run(rank: int, world_size: int, folder: str, begin: int, end: int) -> list[Any]:
    """Goes on from a folder, unless it begins, to a step; saves there what it began, and returns parameters."""
    import torch
    from recorded_checkpoints import parameters, step

    from fusedonebit import Faults, OneBitAdam, dcp

    model = torch.nn.ParameterList(parameters(torch.float32))
    optimizer = OneBitAdam(model.parameters(), freeze_step=3, faults=Faults(guard="off"))
    if begin:
        dcp.load(model, optimizer, folder)
    for number in range(begin, end):
        step(optimizer, list(model), rank, number)
    if not begin:
        dcp.save(model, optimizer, folder)
    return [p.tolist() for p in model]


def record() -> None:
    """Save a folder of two ranks, with the parameters ``AFTER`` steps later beside it."""
    import torch
    from ranks import run_ranks, shut_down
    from recorded_folders import run  # by this name ranks import it

    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "saved")
        run_ranks(run, RANKS, str(folder), 0, STEPS)
        (end, _) = run_ranks(run, RANKS, str(folder), STEPS, STEPS + AFTER)
        shut_down()
        torch.save([torch.tensor(values) for values in end], Path(root, "end.pt"))
        name = f"python{platform.python_version()}-torch{torch.__version__.split('+')[0]}.tar.xz"
        with tarfile.open(DATA / name, "w:xz", preset=9) as archive:
            for path in sorted(Path(root).rglob("*")):
                archive.add(path, path.relative_to(root), recursive=False, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def unpack(name: str, folder: Path) -> None:
    """Unpack what ``record`` has packed."""
    with tarfile.open(DATA / name) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            if file is not None:
                path = folder / member.name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(file.read())


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    record()
