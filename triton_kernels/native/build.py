"""Builds the C kernels: the compiler, the library that is kept, and what tells one library from another.

As in ccache, a library is kept under a hash of everything that may change it or decide whether it loads: sources,
flags, the compiler and its arguments, the variables that compilers and loaders read, and the processor. What others
may have put into the cache is never used: no link is followed, and only what this user owns, and nobody else may
write, is opened. Every failure is an ``UnavailableError``, and nothing waits without a limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

EXACT = ("-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")  # bits as in eager torch
FLAGS = ("-O3", "-march=native", "-std=c11", "-fopenmp-simd", *EXACT)
SOURCES = ("advance.c", "scaling.c", "compress.c", "wire.c", "update.c", "marsit.c", "zero_one.c", "squares.c")
HERE = Path(__file__).parent

ANSWER_SECONDS, BUILD_SECONDS, LOCK_SECONDS = 20.0, 120.0, 120.0
"""How long the compiler may take to tell its version, and to build; and another process that builds."""

_VARIABLES = (
    *("CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX", "CCC_OVERRIDE_OPTIONS"),
    *("SDKROOT", "MACOSX_DEPLOYMENT_TARGET", "LD_PRELOAD", "LD_LIBRARY_PATH", "ASAN_OPTIONS"),
)
_NO_END = "it did not end within"
_TRIAL = """
import ctypes, sys
loaded = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    getattr(loaded, name)
"""
"""Loads a library in a process of its own, which a sanitizer's runtime, for one, may end."""


class UnavailableError(Exception):
    """There are no C kernels, and why."""


@cache
def compiler() -> str:
    """Returns the C compiler to use: $CC, with its arguments, or else cc, gcc or clang; empty where there is none."""
    given = os.environ.get("CC", "").strip()
    return given or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "")


def shared_library(names: Sequence[str], printed: Mapping[str, str]) -> Path:
    """Returns the shared library with these functions, from the cache or newly built of sources and ``printed`` files.

    Its file's name ends with its own hash, so that nobody ever loads half of one, or a damaged one.

    Raises:
        UnavailableError, OSError: where there is none.
    """
    if os.name != "posix" or platform.machine() not in ("x86_64", "aarch64", "arm64"):
        raise UnavailableError(f"they are for POSIX on x86-64 and AArch64, not {os.name} on {platform.machine()}")
    command = _command()
    name = f"kernels-{_fingerprint(command, printed)}"
    refused = []
    for folder in _candidates():
        try:
            _make_own(folder)
            if kept := _kept(folder, name):
                return kept
            with _locked(folder / "lock"):
                return _kept(folder, name) or _build(folder, name, command, names, printed)
        except OSError as error:
            refused.append(f"{folder} ({error.strerror or error})")
    raise UnavailableError(f"no folder can keep them: {', '.join(refused)}")


def _build(folder: Path, name: str, command: Sequence[str], names: Sequence[str], printed: Mapping[str, str]) -> Path:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "kernels.so"
        for file, text in printed.items():
            (Path(scratch) / file).write_text(text)
        sources = [*map(HERE.joinpath, SOURCES), *Path(scratch).glob("*.c")]
        _compile([*command, "-I", scratch, "-I", str(HERE)], sources, made)
        _try(made, names)
        return made.replace(folder / f"{name}-{_digest(made)}.so")


# ---------------------------------------------------------------- the compiler


def _command() -> list[str]:
    if not compiler():
        raise UnavailableError("no C compiler was found ($CC, cc, gcc, clang)")
    try:
        command = shlex.split(compiler())
    except ValueError as error:
        raise UnavailableError(f"CC={compiler()} is no command: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise UnavailableError(f"CC={compiler()} was not found")
    return command


def _compile(command: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    made_of = map(str, sources)
    failed, told = _run([*command, *FLAGS, "-shared", "-fPIC", "-o", str(target), *made_of, "-lm"], BUILD_SECONDS)
    if failed:
        raise UnavailableError(f"{compiler()} could not build them: {_wrong(told) or failed}")
    if not target.exists():
        raise UnavailableError(f"{compiler()} could not build them: it wrote nothing")


def _try(made: Path, names: Sequence[str]) -> None:
    failed, told = _run([sys.executable, "-I", "-S", "-c", _TRIAL, str(made), *names], BUILD_SECONDS)
    if failed:
        raise UnavailableError(f"what {compiler()} built does not load: {_wrong(told) or failed}")


def _wrong(told: str) -> str:
    """Returns the line of a program's output that says what is wrong."""
    lines = told.strip().splitlines()
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


def _run(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Runs a program that may hang; returns how it failed, "" if it has not, and what it wrote.

    When the time is over it ends together with all that it has started, which a shell script's children outlive.
    """
    with tempfile.TemporaryFile() as output:  # a pipe would wait for all who hold its other end
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | {"LC_ALL": "C"},  # in whatever language its user reads
            )
        except OSError as error:
            return str(error), ""
        try:
            status = process.wait(seconds)
            failed = f"it ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            failed = f"{_NO_END} {seconds:g} s"
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return failed, output.read().decode(errors="replace")


# ---------------------------------------------------------------- what tells libraries apart


def _fingerprint(command: Sequence[str], printed: Mapping[str, str]) -> str:
    """Hashes what may change the library: homes are shared between machines and between environments."""
    failed, version = _run([*command, "--version"], ANSWER_SECONDS)
    if failed.startswith(_NO_END):
        raise UnavailableError(f"{compiler()} --version: {failed}")
    digest = hashlib.sha256()
    for part in (*FLAGS, *command, *map(_identity, command), version, *printed.values(), *_processor()):
        digest.update(part.encode(errors="surrogateescape") + b"\0")
    for variable in _VARIABLES:
        digest.update(f"{variable}={os.environ.get(variable, '')}".encode(errors="surrogateescape") + b"\0")
    for path in sorted(HERE.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _identity(word: str) -> str:
    """Tells which file a word of the command names, if any: a compiler, one that it calls, a file of arguments."""
    path = shutil.which(word) or word.removeprefix("@")
    try:
        found = Path(path).stat()
    except OSError:
        return ""
    return f"{Path(path).resolve()} {found.st_size} {found.st_mtime_ns}"


def _processor() -> Iterable[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return (platform.machine(), platform.processor())
    which = ("model name", "flags", "Features", "CPU ")
    return (platform.machine(), *sorted({line for line in lines if line.startswith(which)}))


# ---------------------------------------------------------------- where they are kept


def _candidates() -> Iterator[Path]:
    """Returns the user's cache, and one of this user's own among the temporary files."""
    cache, home = Path(os.environ.get("XDG_CACHE_HOME", "")), Path(os.environ.get("HOME", ""))
    if cache.is_absolute():
        yield cache / "fusedonebit"
    elif home.is_absolute() and home.is_dir():
        yield home / ".cache" / "fusedonebit"
    with contextlib.suppress(OSError):  # not even temporary files can be written
        yield Path(tempfile.gettempdir()) / f"fusedonebit-{os.getuid()}"


def _make_own(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_mine(folder.lstat(), stat.S_ISDIR):
        raise PermissionError("it is a link, or others may write to it")


def _is_mine(found: os.stat_result, kind: Callable[[int], bool]) -> bool:
    """Tells whether it is of this kind, this user's, and nobody else may write it: what is loaded runs."""
    return kind(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _kept(folder: Path, name: str) -> Path | None:
    """Returns the library of this name, if it is whole; what is not is removed."""
    for found in folder.glob(f"{name}-*.so"):
        if found.stem == f"{name}-{_digest(found)}":
            return found
        with contextlib.suppress(OSError):
            found.unlink()
    return None


def _digest(path: Path) -> str:
    """Hashes the contents of a file that is this user's own; empty for anything else."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for its writer
    except OSError:
        return ""
    with open(file, "rb") as content:
        mine = _is_mine(os.fstat(file), stat.S_ISREG)
        return hashlib.sha256(content.read()).hexdigest()[:16] if mine else ""


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process build; others of the machine wait for it, but not for ever.

    Without the lock two processes build the same, which only takes longer.
    """
    import fcntl

    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(file)
