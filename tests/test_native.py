"""The C kernels: their declarations, threads, what they refuse; and who builds them: whatever is odd, steps run.

That their bits are eager's is in ``assert_equal_backends``, which runs every op on all backends. Where the library
itself does not matter the compiler is a script that copies one: see ``pretend``.
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
from backends import bits_of, compared, tensors
from native_steps import STEPS, alone
from op_arguments import Problem
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedonebit import Faults, OneBitAdam, triton_kernels
from fusedonebit.triton_kernels import backend, native, using
from fusedonebit.triton_kernels.jit import newton_sqrt, tl
from fusedonebit.triton_kernels.op import OPS

CPU = torch.device("cpu")
PLAIN = "plain torch, eager (cpu): "
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")
Ask = Callable[..., str]
needs_compiler = pytest.mark.needs_compiler


def test_every_c_kernel_is_that_of_an_op_with_a_triton_kernel():
    assert len(native.KERNELS) >= 12
    assert set(OPS) >= native.KERNELS


@needs_compiler
@pytest.mark.parametrize(("device", "kernels"), [("cuda", ["triton"]), ("cpu", ["triton", "native"])])
def test_compared_kernels_run_on_the_tensors_device(device, kernels):
    """What ``assert_equal_backends`` compares, on a GPU too."""
    with FakeTensorMode():  # has tensors of devices that are not there
        assert compared([torch.empty(8, device=device)]) == kernels
    for name in kernels:
        with using(name):
            assert triton_kernels.backends.chosen(device) == name


@needs_compiler
def test_repr_stats_and_backend_name_the_compiler():
    assert backend(CPU) == f"C, {native.compiler()} (cpu)"
    with using("plain"):
        assert backend(CPU) == "plain torch, eager (cpu)"


@needs_compiler
def test_backend_and_repr_tell_where_kernels_have_one_thread(monkeypatch):
    monkeypatch.setattr(native, "_openmp", tuple)
    told = f"C, {native.compiler()} (cpu), on one thread: torch has no OpenMP whose threads they could share"
    assert backend(CPU) == told
    optimizer = OneBitAdam([torch.nn.Parameter(torch.zeros(3))], 1e-2, freeze_step=5)
    assert f"backend: {told}" in repr(optimizer)


@needs_compiler
def test_without_a_compiler_eager_says_why_and_has_the_same_bits(tmp_path):
    told, bits = alone()
    nothing = {"PATH": str(tmp_path), "CC": "", "XDG_CACHE_HOME": str(tmp_path)}
    assert told.startswith("C, ")
    assert alone(**nothing) == [
        "plain torch, eager (cpu): no C compiler was found ($CC, cc, gcc, clang)",
        bits,
    ]


@needs_compiler
def test_several_threads_give_the_bits_of_one():
    def run(threads: int) -> list[torch.Tensor]:
        problem = Problem((300_000, 1000, 77), 2)
        arguments = problem.arguments("momentum_compress", exp_avg_sq=...)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            triton_kernels.momentum_compress(*arguments)
        finally:
            torch.set_num_threads(before)
        return tensors(arguments)

    for one, many in zip(run(1), run(3), strict=True):
        assert torch.equal(bits_of(one), bits_of(many))


THREADS = """
import os, torch
from fusedonebit.triton_kernels import flatten
torch.set_num_threads(3)
x, out = torch.full((1 << 20,), 2.0), torch.zeros((1 << 20) + 1)
x.mul_(2.0)  # starts torch's threads
before = set(os.listdir("/proc/self/task"))
for _ in range(3):
    flatten([x], [1 << 20], 1024, 0.5, None, out)
print(len(before) > 2, sorted(set(os.listdir("/proc/self/task")) - before), float(out[: 1 << 19].mean()))
"""


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are told on Linux alone")
def test_c_kernels_start_no_threads_beside_those_of_torch():
    assert alone(THREADS) == ["True [] 2.0"]


@needs_compiler
def test_c_kernels_are_refused_for_other_devices_or_if_missing(monkeypatch):
    with using("native"), pytest.raises(RuntimeError, match="C kernels work on CPU tensors, got cuda"):
        triton_kernels.backends.chosen("cuda")
    monkeypatch.setattr(native, "_library", lambda: (None, "no C compiler was found"))
    with pytest.raises(RuntimeError, match="no C kernels here: no C compiler was found; use 'plain'"), using("native"):
        pass


@needs_compiler
def test_gradients_and_parameters_without_memory_are_refused():
    params = [torch.nn.Parameter(torch.randn(300)) for _ in range(2)]
    optimizer = OneBitAdam(params, freeze_step=1, faults=Faults(guard="off"))
    for i in (0, 1):
        for p in params:
            p.grad = torch.randn(300)
        if i:
            params[1].grad.untyped_storage().resize_(0)
            with pytest.raises(RuntimeError, match=r"the gradient of .* has no memory"):
                optimizer.step()
        else:
            optimizer.step()
    params[1].grad = torch.randn(300)
    params[1].data.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"has no memory: its storage was freed"):
        optimizer.step()


def test_eagers_root_is_correctly_rounded_with_and_without_numpy():
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.randint(-44, 38, (1 << 16,))
    x[:4] = torch.tensor([0.0, 1e-45, 3.4e38, torch.inf])
    exact = x.double().sqrt().float()
    assert torch.equal(tl.sqrt_rn(x), exact)
    assert torch.equal(newton_sqrt(x), exact)


def test_sources_travel_with_the_package():
    folder = Path(native.__file__).parent
    included = {"block_io.h", "clock.h", "codes.h", "headers.h", "moments.h", "sums.h", "vote.c"}
    assert {path.name for path in folder.glob("*.[ch]")} == {*included, *native.SOURCES}


# ---------------------------------------------------------------- who builds them


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
    told, bits = alone(CC=f"{COMPILER} -fsanitize=address", **places)
    assert told.startswith(PLAIN)
    assert f"{COMPILER} -fsanitize=address" in told
    assert alone(CC=COMPILER, **places) == [f"C, {COMPILER} (cpu)", bits]


@needs_compiler
@pytest.mark.full
def test_fast_math_arguments_do_not_switch_denormals_off(tmp_path: Path):
    program = STEPS + "print((torch.tensor([1e-40]) / 2).item())"
    told = alone(program, CC=f"{COMPILER} -ffast-math", XDG_CACHE_HOME=str(tmp_path))
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
