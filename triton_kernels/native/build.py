"""Builds the C kernels: the compiler, the library that is kept, and what tells one library from another.

As in ccache, a library is kept under a hash of everything that may change it or decide whether it loads: sources,
flags, the compiler and its arguments, the variables that compilers and loaders read, and the processor. What others
may have put into the cache is never used: a file counts if it is this user's, nobody else may write to it, and it ends
with the hash of its name and contents. What is loaded is a copy of the bytes that were checked. Every failure is an
``UnavailableError`` or an OSError, and nothing waits without a limit.
"""

from __future__ import annotations

import contextlib
import ctypes
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
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

EXACT = ("-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")  # bits as in eager torch
FLAGS = ("-O3", "-march=native", "-std=c11", "-fopenmp-simd", *EXACT)
SOURCES = (
    "advance.c",
    "gradient_scaling.c",
    "compress.c",
    "wire.c",
    "update.c",
    "local_update.c",
    "local_step.c",
    "squares.c",
    "quantise.c",
    "outer.c",
)
HERE = Path(__file__).parent

ANSWER_SECONDS, BUILD_SECONDS = 20.0, 300.0
"""How long the compiler may take to tell its version, and to build."""

_VARIABLES = (
    *("CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX", "CCC_OVERRIDE_OPTIONS"),
    *("SDKROOT", "MACOSX_DEPLOYMENT_TARGET", "LD_PRELOAD", "LD_LIBRARY_PATH", "ASAN_OPTIONS"),
)
_LARGEST, _DIGEST = 1 << 26, hashlib.sha256().digest_size  # in bytes: of a file that is read; of the hash at its end
_NO_END = "it did not end within"
_TRIAL = """
import ctypes, sys
loaded = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    getattr(loaded, name)
"""
"""Loads a library in a process of its own, which a sanitizer's runtime, for one, may end."""
_loaded = contextlib.ExitStack()


class UnavailableError(Exception):
    """There are no C kernels, and why."""


@cache
def compiler() -> str:
    """Return the C compiler to use: $CC, with its arguments, or else cc, gcc or clang; empty where there is none."""
    given = os.environ.get("CC", "").strip()
    return given or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "")


def shared_library(names: Sequence[str], printed: Mapping[str, str]) -> bytes:
    """Return the shared library with these functions, as it was kept or newly built of sources and ``printed`` files.

    Raises:
        UnavailableError, OSError: where there is none.
    """
    if os.name != "posix" or platform.machine() not in ("x86_64", "aarch64", "arm64"):
        raise UnavailableError(f"they are for POSIX on x86-64 and AArch64, not {os.name} on {platform.machine()}")
    command = _command()
    path = _folder() / f"kernels-{_fingerprint(command, printed)}"
    library = b""
    try:
        _make_own(path.parent)
        library = _kept(path)
        if not library:  # other processes may build the same meanwhile, which does no harm
            library = _build(command, names, printed)
            _keep(path, library)
    except OSError as error:
        library = library or _build(command, names, printed)
        warnings.warn(
            f"the C kernels can't be kept in {path.parent} ({error.strerror or error}), so that each process builds "
            "them; XDG_CACHE_HOME names another place for this folder",
            stacklevel=2,
        )
    return library


def load(library: bytes) -> ctypes.CDLL:
    """Load a shared library from a copy in memory: whoever truncates a file ends the processes that run it."""
    path, _ = _loaded.enter_context(_copied(library))
    return ctypes.CDLL(path)


@contextmanager
def _copied(library: bytes) -> Iterator[tuple[str, int]]:
    """Give the path and the descriptor of a copy in memory, or else of a temporary file that only this user reads.

    What is loaded must stay open, because the loader takes equal paths for the same library.
    """
    memory = _memory()
    with open(memory, "wb") if memory >= 0 else tempfile.NamedTemporaryFile(suffix=".so") as copy:
        copy.write(library)
        copy.flush()
        yield f"/proc/self/fd/{memory}" if memory >= 0 else str(copy.name), copy.fileno()


def _memory() -> int:
    """Return the descriptor of an empty file in memory; -1 on other systems than Linux, and where it is forbidden."""
    try:
        return os.memfd_create("kernels") if os.path.exists("/proc/self/fd") else -1
    except (AttributeError, OSError):
        return -1


def _build(command: Sequence[str], names: Sequence[str], printed: Mapping[str, str]) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "kernels.so"
        for file, text in printed.items():
            (Path(scratch) / file).write_text(text)
        sources = [*map(HERE.joinpath, SOURCES), *Path(scratch).glob("*.c")]
        _compile([*command, "-I", scratch, "-I", str(HERE)], sources, made)
        library = made.read_bytes()
    _try(library, names)
    return library


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


def _try(library: bytes, names: Sequence[str]) -> None:
    with _copied(library) as (path, file):
        failed, told = _run([sys.executable, "-I", "-S", "-c", _TRIAL, path, *names], BUILD_SECONDS, file)
    if failed:
        raise UnavailableError(f"what {compiler()} built does not load: {_wrong(told) or failed}")


def _wrong(told: str) -> str:
    """Return the line of a program's output that says what is wrong."""
    lines = told.strip().splitlines()
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


def _run(command: Sequence[str], seconds: float, *inherited: int) -> tuple[str, str]:
    """Run a program that may hang; return how it failed, "" if it has not, and what it wrote.

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
                pass_fds=inherited,
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
    """Hashe what may change the library: homes are shared between machines and between environments."""
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
    """Tell which file a word of the command names, if any: a compiler, one that it calls, a file of arguments."""
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


def _folder() -> Path:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path(os.environ.get("HOME", "")) / ".cache") / "fusedonebit"


def _make_own(folder: Path) -> None:
    """Make the folder, if need be, for this user alone, whatever the umask; raise OSError if it can't be trusted."""
    if not folder.is_absolute():
        raise FileNotFoundError("HOME names no folder")
    for made in (folder.parent, folder):
        made.mkdir(mode=0o700, exist_ok=True)
    if not _is_mine(folder.lstat(), stat.S_ISDIR):
        raise PermissionError("it is a link or another user's, or others may write to it (chmod go-w)")


def _is_mine(found: os.stat_result, kind: Callable[[int], bool]) -> bool:
    """Tell whether it is of this kind, this user's, and nobody else may write it: what is loaded runs."""
    return kind(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _kept(path: Path) -> bytes:
    """Return the library of this name, if it is whole and nobody else can have put it there; else nothing."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for its writer
    except OSError:
        return b""
    try:
        content = os.read(file, _LARGEST) if _is_mine(os.fstat(file), stat.S_ISREG) else b""
    finally:
        os.close(file)
    library = content[:-_DIGEST]
    return library if content == _with_hash(path.name, library) else b""


def _keep(path: Path, library: bytes) -> None:
    """Write a file that has its name only when it is complete."""
    file, unfinished = tempfile.mkstemp(dir=path.parent)  # for this user alone, whatever the umask
    try:
        with open(file, "wb") as kept:
            kept.write(_with_hash(path.name, library))
        os.replace(unfinished, path)
    except OSError:
        os.unlink(unfinished)
        raise


def _with_hash(name: str, library: bytes) -> bytes:
    return library + hashlib.sha256(name.encode() + library).digest()
