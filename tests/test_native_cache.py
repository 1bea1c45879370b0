"""Where the built C kernels are kept: whatever stands there, and whatever the umask, nobody else's code runs, no
process ends, and steps have the bits of eager torch.

Each case is a process that has loaded nothing yet. It is forked from one that has imported the package, as importing
takes seconds. Its compiler is a script that copies a library; what others have planted is a library whose constructor
leaves a witness.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from native_steps import steps

from fusedonebit.triton_kernels import native, using

pytestmark = pytest.mark.needs_compiler

SERVER = """
import json, os, signal, sys, tempfile, traceback, warnings
from pathlib import Path
import torch
from native_steps import steps
from fusedonebit.triton_kernels import native
torch.set_num_threads(1)
steps()  # in plain torch; imports what the first step does

def child(asked):
    signal.alarm(60)
    out = os.open(asked["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1), os.dup2(out, 2)
    os.chdir(asked["folder"])
    os.umask(asked["umask"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    tempfile.tempdir = None
    native._library.cache_clear()
    native.compiler.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        told = steps()
        if asked["then"]:
            exec(asked["then"])
            assert steps() == told
    print(*told, *(warning.message for warning in warned), sep="\\n", flush=True)

for line in sys.stdin:
    pids = []
    for asked in json.loads(line):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                child(asked)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    print(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]), flush=True)
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
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    environment = os.environ | {"CC": "no-such-compiler"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


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

    def __init__(self, tmp_path: Path, server: subprocess.Popen[str], libraries: Libraries, bits: str) -> None:
        self.path, self._server, self._libraries, self._bits = tmp_path, server, libraries, bits
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
        asked = {
            "umask": umask,
            "then": then,
            "folder": str(self.path),
            "environment": {name: value for name, value in changed.items() if value is not None},
        }
        outs = [self.path / f"out-{number}" for number in range(at_once)]
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([asked | {"out": str(out)} for out in outs]) + "\n")
        self._server.stdin.flush()
        ended = json.loads(self._server.stdout.readline())
        warned = set()
        for status, out in zip(ended, outs, strict=True):
            told = out.read_text()
            assert status == 0, f"ended with {status}: {told}"
            backend, bits, *warnings = told.splitlines()
            assert backend == f"C, {self.compiler} (cpu)"
            assert bits == self._bits
            warned.add("\n".join(warnings))
            out.unlink()
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
def machine(tmp_path: Path, server: subprocess.Popen[str], libraries: Libraries, eager_bits: str) -> Machine:
    return Machine(tmp_path, server, libraries, eager_bits)


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


def to_planted(kept: Path) -> None:
    kept.rename(kept.with_name("elsewhere"))
    kept.symlink_to("elsewhere")


def to_a_folder(kept: Path) -> None:
    kept.unlink()
    kept.symlink_to(kept.parent)


def dangling(kept: Path) -> None:
    kept.unlink()
    kept.symlink_to("nothing")


def a_pipe(kept: Path) -> None:
    kept.unlink()
    os.mkfifo(kept)


def a_device(kept: Path) -> None:
    kept.unlink()
    os.mknod(kept, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero never ends


def a_huge_file(kept: Path) -> None:
    with open(kept, "r+b") as file:
        file.truncate(1 << 42)


def truncated(kept: Path) -> None:
    with open(kept, "r+b") as file:
        file.truncate(1000)


def emptied(kept: Path) -> None:
    kept.write_bytes(b"")


def one_bit_flipped(kept: Path) -> None:
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    kept.write_bytes(content)


def writable_by_the_group(kept: Path) -> None:
    kept.chmod(0o660)


def writable_by_all(kept: Path) -> None:
    kept.chmod(0o606)


def of_another(kept: Path) -> None:
    os.chown(kept, NOBODY, -1)


FILES = [
    *((change, []) for change in (to_planted, to_a_folder, dangling, a_pipe, a_huge_file, truncated, emptied)),
    *((change, []) for change in (one_bit_flipped, writable_by_the_group, writable_by_all)),
    *((change, [as_root]) for change in (a_device, of_another)),
]

GRID = [
    pytest.param(
        change, umask, id=f"{change.__name__}-{oct(umask)}", marks=[*marks, *[pytest.mark.full] * (i % 4 != j)]
    )
    for i, (change, marks) in enumerate(FILES)
    for j, umask in enumerate(UMASKS)
]
"""Each change with one umask, the others in `make test-full`."""


@pytest.mark.long(but=6)
@pytest.mark.parametrize(("change", "umask"), GRID)
def test_a_file_of_others_or_a_damaged_one_is_built_again(change: Callable[[Path], None], umask: int, machine: Machine):
    change(machine.plant(umask))
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


def folder_is_a_link(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to("elsewhere")


def folder_dangles(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("nothing")


def folder_is_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def folder_is_a_pipe(folder: Path) -> None:
    shutil.rmtree(folder)
    os.mkfifo(folder)


def folder_for_the_group(folder: Path) -> None:
    folder.chmod(0o770)


def folder_for_all(folder: Path) -> None:
    folder.chmod(0o1777)


def folder_of_another(folder: Path) -> None:
    os.chown(folder, NOBODY, -1)


FOLDERS = [
    *(folder_is_a_link, folder_dangles, folder_is_a_file, folder_is_a_pipe, folder_for_the_group, folder_for_all),
    pytest.param(folder_of_another, marks=as_root),
]


@pytest.mark.parametrize("change", FOLDERS)
def test_a_folder_others_may_write_to_is_unused_with_one_warning(change: Callable[[Path], None], machine: Machine):
    machine.plant()
    change(machine.cache)
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
