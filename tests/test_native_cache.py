"""Where the built C kernels are kept: whatever stands there, and whatever the umask, nobody else's code runs, no
process ends, and steps have the bits of eager torch.

Each case is a process that has loaded nothing yet. It is forked from one that has imported the package, as importing
takes seconds. Its compiler is a script that copies a library; what others have planted is a library whose constructor
leaves a witness.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from fresh import Server
from native_steps import steps

from fusedonebit.triton_kernels import native, using

pytestmark = pytest.mark.needs_compiler

LOADED = """
import torch
from native_steps import steps
torch.set_num_threads(1)
steps()  # in plain torch; imports what the first step does
"""
TAKES_STEPS = """
import os, tempfile, warnings
from pathlib import Path
from native_steps import steps
from fusedonebit.triton_kernels import native
os.chdir({folder!r})
os.umask({umask})
os.environ.clear()
os.environ.update({environment!r})
tempfile.tempdir = None
native._library.cache_clear()
native.compiler.cache_clear()
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    told = steps()
    {then}
    assert not {then!r} or steps() == told
print(*told, *(warning.message for warning in warned), sep="\\n")
"""
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "pretend 1" && exit
echo built >> "$BUILDS"
sleep "${SLOW:-0}"
while [ "$1" != -o ]; do shift; done
cat "$LIBRARY" > "$2" && chmod +x "$2"  # with the modes that a linker gives
"""
PLANTED = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) void plant(void) { fclose(fopen(getenv("WITNESS"), "w")); }
"""
UMASKS = (0o000, 0o002, 0o022, 0o077)
NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="files of other owners: only root can make them")


@pytest.fixture(scope="module")
def eager_bits() -> str:
    with using("plain"):
        return steps()[1]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(LOADED, CC="no-such-compiler", PYTHONPATH=os.environ["PYTHONPATH"], PYTHONWARNINGS="ignore") as server:
        yield server


class Libraries(NamedTuple):
    """What the compiler copies: the kernels; and the same with a constructor, which others have planted."""

    good: Path
    planted: Path


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    folder = tmp_path_factory.mktemp("libraries")
    made = Libraries(folder / "good.so", folder / "planted.so")
    made.good.write_bytes(native.shared_library())
    (folder / "planted.c").write_text(PLANTED)
    linked = ["-Wl,--no-as-needed", made.good]
    subprocess.run(
        [native.compiler(), "-shared", "-fPIC", "-o", made.planted, folder / "planted.c", *linked], check=True
    )
    folder.chmod(0o755)
    return made


class Machine:
    """A user's cache, compiler and temporary files, and processes there."""

    def __init__(self, tmp_path: Path, programs: Path, server: Server, libraries: Libraries, bits: str) -> None:
        self.path, self._programs, self._server = tmp_path, programs, server
        self._libraries, self._bits = libraries, bits
        self.cache, self.temporary = tmp_path / "cache" / "fusedonebit", tmp_path / "temporary"
        self.compiler, self._builds, self._witness = tmp_path / "cc", tmp_path / "builds", tmp_path / "witness"
        self.compiler.write_text(COMPILER)
        self.compiler.chmod(0o755)
        self.temporary.mkdir()

    def run(self, *, umask: int = 0o022, at_once: int = 1, then: str = "", **environment: str | None) -> str:
        """Steps in ``at_once`` new processes, which run on C, rightly, and leave nothing; returns what they warn of."""
        changed = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ["PYTHONPATH"],
            "CC": str(self.compiler),
            "LIBRARY": str(self._libraries.good),
            "BUILDS": str(self._builds),
            "WITNESS": str(self._witness),
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(self.cache.parent),
        } | environment
        alone = {name: value for name, value in changed.items() if value is not None}
        program = TAKES_STEPS.format(folder=str(self.path), umask=umask, environment=alone, then=then)
        warned = set()
        for told in self._server.at_once(program, self._programs, [{}] * at_once, 60):
            backend, bits, *warnings = told.splitlines()
            assert backend == f"C, {self.compiler} (cpu)"
            assert bits == self._bits
            warned.add("\n".join(warnings))
        assert not list(self.temporary.iterdir())
        (warning,) = warned
        return warning

    def plant(self, umask: int = 0o022) -> Path:
        """Another's library, exactly as the cache would keep it under the name that the next process looks for."""
        self.run(umask=umask, LIBRARY=str(self._libraries.planted))
        assert self._witness.exists()
        self._witness.unlink()
        return self.kept()

    def kept(self) -> Path:
        (kept,) = self.cache.glob("kernels-*")
        return kept

    def builds(self) -> int:
        return len(self._builds.read_text().splitlines())

    def ran_what_was_planted(self) -> bool:
        return self._witness.exists()


@pytest.fixture
def machine(tmp_path: Path, tmp_path_factory, server: Server, libraries: Libraries, eager_bits: str) -> Machine:
    return Machine(tmp_path, tmp_path_factory.mktemp("programs"), server, libraries, eager_bits)


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_what_is_kept_is_its_users_alone_and_is_built_once(umask: int, machine: Machine):
    assert machine.run(umask=umask) == ""
    for path in (machine.cache.parent, machine.cache, *machine.cache.iterdir()):
        assert not path.stat().st_mode & 0o077, path
    before = machine.kept().read_bytes()
    assert machine.run(umask=umask) == ""
    assert machine.builds() == 1
    assert machine.kept().read_bytes() == before


# ---------------------------------------------------------------- files


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def instead(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return change


def one_bit_flipped(kept: Path) -> None:
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    kept.write_bytes(content)


def of_another(path: Path) -> None:
    os.chown(path, NOBODY, -1)


DEVICE = stat.S_IFCHR | 0o600, os.makedev(1, 5)  # /dev/zero never ends
FILES: dict[str, Callable[[Path], None]] = {
    "to_planted": linked,
    "to_a_folder": instead(lambda kept: kept.symlink_to(kept.parent)),
    "dangling": instead(lambda kept: kept.symlink_to("nothing")),
    "a_pipe": instead(os.mkfifo),
    "a_huge_file": lambda kept: os.truncate(kept, 1 << 42),
    "truncated": lambda kept: os.truncate(kept, 1000),
    "emptied": lambda kept: os.truncate(kept, 0),
    "one_bit_flipped": one_bit_flipped,
    "writable_by_the_group": lambda kept: kept.chmod(0o660),
    "writable_by_all": lambda kept: kept.chmod(0o606),
    "a_device": instead(lambda kept: os.mknod(kept, *DEVICE)),
    "of_another": of_another,
}
BY_ROOT = ("a_device", "of_another")
GRID = [
    pytest.param(name, umask, marks=[*[as_root] * (name in BY_ROOT), *[pytest.mark.full] * (i % 4 != j)])
    for i, name in enumerate(FILES)
    for j, umask in enumerate(UMASKS)
]
"""Each change with one umask, the others in `make test-full`."""


@pytest.mark.long(but=6)
@pytest.mark.parametrize(("change", "umask"), GRID)
def test_a_file_of_others_or_a_damaged_one_is_built_again(change: str, umask: int, machine: Machine):
    FILES[change](machine.plant(umask))
    for _ in range(2):
        assert machine.run(umask=umask) == ""
        assert not machine.ran_what_was_planted()
        assert machine.builds() == 2
        assert machine.kept().lstat().st_mode == stat.S_IFREG | 0o600


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_a_planted_library_of_that_name_is_not_run(umask: int, machine: Machine, libraries: Libraries):
    machine.run(umask=umask)
    kept = machine.kept()
    for place in (shutil.copy, lambda planted, kept: os.symlink(planted, kept)):
        kept.unlink(missing_ok=True)
        place(libraries.planted, kept)
        machine.run(umask=umask)
        assert not machine.ran_what_was_planted()
    assert machine.builds() == 3


def test_with_a_folder_in_the_librarys_place_each_process_builds(machine: Machine):
    machine.run()
    kept = machine.kept()
    kept.unlink()
    (kept / "full").mkdir(parents=True)
    for builds in (2, 3):
        assert "can't be kept" in machine.run()
        assert machine.builds() == builds


@pytest.mark.parametrize(
    "change",
    ["path.write_bytes(b'')", "path.write_bytes(b'x' * len(path.read_bytes()))", "path.unlink()"],
    ids=["truncated", "overwritten", "removed"],
)
def test_a_process_runs_on_when_its_loaded_file_is_changed(change: str, machine: Machine):
    of_each = f"for path in Path({str(machine.cache)!r}).glob('kernels-*'): {change}"
    machine.run()
    for builds in (1, 2):
        assert machine.run(then=of_each) == ""
        assert machine.builds() == builds


# ---------------------------------------------------------------- folders


FOLDERS: dict[str, Callable[[Path], None]] = {
    "is_a_link": linked,
    "dangles": instead(lambda folder: folder.symlink_to("nothing")),
    "is_a_file": instead(Path.touch),
    "is_a_pipe": instead(os.mkfifo),
    "for_the_group": lambda folder: folder.chmod(0o770),
    "for_all": lambda folder: folder.chmod(0o1777),
    "of_another": of_another,
}


@pytest.mark.parametrize("change", [pytest.param(n, marks=[as_root] * (n in BY_ROOT)) for n in FOLDERS])
def test_a_folder_others_may_write_to_is_unused_with_one_warning(change: str, machine: Machine):
    machine.plant()
    FOLDERS[change](machine.cache)
    before = sorted(machine.path.rglob("*"))
    warned = machine.run(umask=0o002)
    assert len(warned.splitlines()) == 1
    assert str(machine.cache) in warned
    assert "XDG_CACHE_HOME" in warned
    assert not machine.ran_what_was_planted()
    assert sorted(machine.path.rglob("*")) == before
    assert machine.builds() == 2


@pytest.mark.parametrize("home", [None, "", "relative", "/dev/null", "/proc/self", "{path}/nothing", "{path}/file"])
def test_without_a_writable_home_each_process_builds(home: str | None, machine: Machine):
    (machine.path / "file").write_text("")
    given = home and home.format(path=machine.path)
    before = sorted(machine.path.iterdir())
    warned = machine.run(XDG_CACHE_HOME=None, HOME=given)
    assert "XDG_CACHE_HOME" in warned
    assert len(warned.splitlines()) == 1
    (machine.path / "builds").unlink()
    assert sorted(machine.path.iterdir()) == before


@pytest.mark.skipif(os.getuid() == 0, reason="root may write to folders that are for reading alone")
def test_a_cache_for_reading_alone_is_read(machine: Machine):
    machine.run()
    machine.cache.chmod(0o500)
    assert machine.run() == ""
    assert machine.builds() == 1
    assert "can't be kept" in machine.run(CPATH="/another")


# ---------------------------------------------------------------- several at once


def test_processes_starting_at_once_get_and_keep_a_right_library(machine: Machine):
    assert machine.run(at_once=4, SLOW="0.1") == ""
    (kept,) = machine.cache.iterdir()
    assert kept == machine.kept()
    builds = machine.builds()
    assert machine.run() == ""
    assert machine.builds() == builds
