"""Folders that ``fusedonebit.dcp`` writes, one for each Python and torch, and how their runs went on.

What ``data/folders`` has, these wrote, each with the torch that its name says::

    PYTHONPATH=tests:tests/wire python3.11 tests/recorded_folders.py    # python3.11.7-torch2.13.0.tar.xz
    python3.13 tests/recorded_folders.py --pickle                       # without torch: python3.13.0.metadata.xz

The second writes only ``.metadata`` anew, that of the folder of ``WHOLE``, by stand-ins of torch's classes: what else
is in a folder depends on no Python. Initial values and gradients are those of ``recorded_checkpoints``, the same on
every machine.
"""

from __future__ import annotations

import enum
import io
import lzma
import pickle
import platform
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "folders"
WHOLE = "python3.11.7-torch2.13.0.tar.xz"
STEPS, AFTER, RANKS = 5, 4, 2
SEAL = len("\nfusedonebit crc32 01234567\n")


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


# ---------------------------------------------------------------- without torch


class StandIns(pickle.Unpickler):
    """Makes classes of the names that are asked for, which pickle as torch's do."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.made: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module in ("builtins", "pathlib"):
            return super().find_class(module, name)
        if name not in self.made:
            self.made[name] = self._make(module, name)
            sys.modules.setdefault(module, type(sys)(module))
            setattr(sys.modules[module], name, self.made[name])
        return self.made[name]

    def _make(self, module: str, name: str) -> Any:
        of: dict[str, Any] = {"__module__": module, "__qualname__": name}
        if name == "_MEM_FORMAT_ENCODING":
            return enum.Enum(name, ["TORCH_CONTIGUOUS_FORMAT"], start=0, module=module, qualname=name)
        if name == "_get_layout":
            return type(name, (), of | {"__reduce__": lambda made: (type(made), made.given)} | {"__new__": _given})
        if name == "Size":
            return type(name, (tuple,), of | {"__reduce__": lambda size: (type(size), (tuple(size),))})
        if module == "torch":
            return type("dtype", (), {"__reduce__": lambda _: name, "__module__": "torch"})()
        if name == "TensorProperties":
            of |= {
                "__getstate__": lambda made: made.state,
                "__setstate__": lambda made, state: _keep(made, state=state),
            }
        return type(name, (), of)


def _given(kind: type, *given: Any) -> Any:
    return _keep(object.__new__(kind), given=given)


def _keep(made: Any, **values: Any) -> Any:
    vars(made).update(values)
    return made


def pickle_again(data: bytes) -> bytes:
    """Return the pickle that this Python makes of metadata, without torch."""
    return pickle.dumps(StandIns(data).load())


def record_pickle() -> None:
    with tempfile.TemporaryDirectory() as root:
        unpack(WHOLE, Path(root))
        data = Path(root, "saved", ".metadata").read_bytes()[:-SEAL]
    (DATA / f"python{platform.python_version()}.metadata.xz").write_bytes(lzma.compress(pickle_again(data), preset=9))


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    record_pickle() if "--pickle" in sys.argv else record()
