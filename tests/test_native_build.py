"""Who builds the C kernels: whatever is odd there, steps run, and ``repr`` says on what.

Where the library itself does not matter the compiler is a script that copies one: see ``pretend``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from native_calls import ALONE, alone

from fusedonebit.triton_kernels import backend, native

CPU = torch.device("cpu")
PLAIN = "plain torch, eager (cpu): "
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")
needs_compiler = pytest.mark.needs_compiler
Ask = Callable[..., str]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """What ``backend`` tells in another environment, with empty caches, as in a process of its own; None unsets."""

    def tell(**environment: str | None) -> str:
        for name, value in environment.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(tempfile, "tempdir", None)
        native._library.cache_clear()
        native.compiler.cache_clear()
        return backend(CPU)

    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tell
    native._library.cache_clear()
    native.compiler.cache_clear()


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that this machine has already."""
    made = tmp_path_factory.mktemp("library") / "made.so"
    made.write_bytes(native.shared_library())
    return made


@pytest.fixture
def pretend(tmp_path: Path, library: Path) -> str:
    """A compiler that always makes this library, at once."""
    answer = '[ "$1" = --version ] && echo "pretend 1" && exit'
    return script(tmp_path / "pretend-cc", f'{answer}\nwhile [ "$1" != -o ]; do shift; done\ncp "{library}" "$2"')


def kept(tmp_path: Path, where: str = "cache/fusedonebit") -> set[Path]:
    return set((tmp_path / where).glob("kernels-*"))


# ---------------------------------------------------------------- compilers


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("cc 'unfinished", "CC=cc 'unfinished is no command: No closing quotation"),
        ("''", "CC='' was not found"),
        ("no-such-cc", "CC=no-such-cc was not found"),
        ("{folder}", "CC={folder} was not found"),
        ("{text}", "{text} could not build them: "),
        ("{silent}", "{silent} could not build them: it wrote nothing"),
        ("{failing}", "{failing} could not build them: fatal error: no such thing as -O3"),
        ("{garbled}", "{garbled} could not build them: error: \ufffd\ufffd"),
        ("{damaged}", "what {damaged} built does not load: OSError: "),
        ("{empty}", "what {empty} built does not load: "),
        ("{fatal}", "what {fatal} built does not load: it ended with status -6"),
    ],
)
@needs_compiler
def test_an_odd_compiler_is_named_and_plain_torch_runs(given: str, why: str, tmp_path: Path, ask: Ask):
    target = 'while [ "$1" != -o ]; do shift; done; '
    built = f'[ "$1" = --version ] || {{ {target} {COMPILER} -shared -fPIC -o "$2" -x c'
    odd = {
        "folder": str(tmp_path),
        "text": str(tmp_path / "text"),
        "silent": script(tmp_path / "silent", "exit 0"),
        "failing": script(tmp_path / "failing", "echo note; echo 'fatal error: no such thing as -O3' >&2; exit 1"),
        "garbled": script(tmp_path / "garbled", r"printf 'error: \377\376\n'; exit 1"),
        "damaged": script(tmp_path / "damaged", f'[ "$1" = --version ] || {{ {target} echo damaged > "$2"; }}'),
        "empty": script(tmp_path / "empty", f"{built} /dev/null; }}"),
        "fatal": script(tmp_path / "fatal", f'{built} "{tmp_path}/fatal.c"; }}'),
    }
    (tmp_path / "fatal.c").write_text("void abort(void); __attribute__((constructor)) void end(void) { abort(); }")
    (tmp_path / "text").write_text("this is no program")
    (tmp_path / "text").chmod(0o755)
    assert ask(CC=given.format(**odd)).startswith(PLAIN + why.format(**odd))


@pytest.mark.parametrize("at", ["--version", "anything"])
def test_a_compiler_that_hangs_is_ended_with_what_it_has_started(
    at: str, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
):
    limit = "ANSWER_SECONDS" if at == "--version" else "BUILD_SECONDS"
    monkeypatch.setattr(native.build, limit, 0.5)
    pid = tmp_path / "pid"
    answer = "" if at == "--version" else '[ "$1" = --version ] && exit\n'
    compiler = script(tmp_path / "hanging", f'{answer}sleep 300 &\necho $! > "{pid}"\nwait')
    began = time.monotonic()
    told = ask(CC=compiler)
    assert told.startswith(PLAIN + compiler)
    assert told.endswith("it did not end within 0.5 s")
    assert time.monotonic() - began < 60
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid.read_text().strip()}/cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # until its new parent has noticed
    assert not Path(f"/proc/{pid.read_text().strip()}/exe").exists()


@needs_compiler
@pytest.mark.full
def test_a_sanitizers_library_ends_no_process(tmp_path: Path):
    places = {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    told, bits = alone(ALONE, CC=f"{COMPILER} -fsanitize=address", **places)
    assert told.startswith(PLAIN)
    assert f"{COMPILER} -fsanitize=address" in told
    assert alone(ALONE, CC=COMPILER, **places) == [f"C, {COMPILER} (cpu)", bits]


@needs_compiler
@pytest.mark.full
def test_fast_math_arguments_do_not_switch_denormals_off(tmp_path: Path):
    told = alone(
        ALONE + "print((torch.tensor([1e-40]) / 2).item())", CC=f"{COMPILER} -ffast-math", XDG_CACHE_HOME=str(tmp_path)
    )
    assert told[0] == f"C, {COMPILER} -ffast-math (cpu)"
    assert float(told[2]) > 0


# ---------------------------------------------------------------- which library


@needs_compiler
def test_a_library_is_kept_by_command_compiler_and_environment(tmp_path: Path, ask: Ask, pretend: str):
    first = f"C, {pretend} (cpu)"
    assert ask(CC=pretend) == first
    assert len(kept(tmp_path)) == 1
    assert ask() == first
    assert len(kept(tmp_path)) == 1
    assert ask(CC=f"{pretend} -m64") == f"C, {pretend} -m64 (cpu)"
    assert len(kept(tmp_path)) == 2
    assert ask(CC=pretend, CPATH=str(tmp_path)) == first
    assert len(kept(tmp_path)) == 3
    with open(pretend, "a") as file:
        file.write("# another compiler, that says it is the same\n")
    assert ask(CPATH=None) == first
    assert len(kept(tmp_path)) == 4


@needs_compiler
def test_without_files_in_memory_a_temporary_one_is_loaded(ask: Ask, pretend: str, monkeypatch: pytest.MonkeyPatch):
    def forbidden(name: str) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", forbidden, raising=False)
    assert ask(CC=pretend) == f"C, {pretend} (cpu)"
    monkeypatch.delattr(os, "memfd_create")
    assert ask() == f"C, {pretend} (cpu)"
