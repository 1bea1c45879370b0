"""The C kernels: their declarations, threads, what they refuse; that their bits are eager's is in
``assert_equal_backends``, which runs every op on all backends; who builds them is in ``test_native_build``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from backends import bits_of, tensors
from native_calls import alone
from op_arguments import Problem

from fusedonebit import Faults, OneBitAdam, triton_kernels
from fusedonebit.triton_kernels import backend, native, using
from fusedonebit.triton_kernels.jit import newton_sqrt, tl
from fusedonebit.triton_kernels.op import OPS

CPU = torch.device("cpu")
needs_compiler = pytest.mark.needs_compiler


def test_every_c_kernel_is_that_of_an_op_with_a_triton_kernel():
    assert len(native.KERNELS) >= 12
    assert set(OPS) >= native.KERNELS


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
def test_tensors_that_c_would_misread_are_named():
    with using("native"):
        given = Problem((300,)).arguments("momentum_compress")
        arguments = given._replace(compensated_numbers=given.compensated_numbers.double())
        with pytest.raises(ValueError, match=r"must be float32 or bfloat16 or uint8 .*, got float64"):
            triton_kernels.momentum_compress(*arguments)
        arguments = given._replace(compensated_scale=torch.zeros(6)[::2])
        told = r"compensated.scale must be .*, dense along its last dimension, on cpu, got .* with strides \(2,\)"
        with pytest.raises(ValueError, match=told):
            triton_kernels.momentum_compress(*arguments)


@needs_compiler
@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("momentum_compress", "compensated.numbers"),
        ("server_reduce", "compensated.numbers"),
        ("adam_update", "moments.exp_avg"),
        ("lamb_update", "norms"),
    ],
)
def test_a_tensor_in_the_place_of_one_left_out_is_checked_too(op, name):
    given, flat_name = Problem((300,)).arguments(op), name.replace(".", "_")
    tensor = getattr(given, flat_name)
    other = torch.float64 if tensor.dtype == torch.float32 else torch.float32
    arguments = given._replace(**{flat_name: tensor.to(other)})
    with using("native"), pytest.raises(ValueError, match=rf"^{op}: {name} must be "):
        getattr(triton_kernels, op)(*arguments)


@needs_compiler
def test_too_short_tensors_are_named_before_anything_is_read():
    given, one = Problem((300,), 4).arguments("momentum_compress", exp_avg_sq=...), torch.zeros(1, dtype=torch.int32)
    ways = [
        ({"places": given.places._replace(live_row=one)}, r"places.live_row must be int32 \[B\] = \[4\]"),
        (
            {"exp_avg_sq_numbers": torch.ones(7)},
            r"exp_avg_sq.numbers must be .* \[P\+\] = \[512 or more\] .*, got .* \[7\]",
        ),
        ({"places": given.places._replace(block_tensor=one)}, r"places.live_row must be int32 \[B\] = \[1\]"),
    ]
    for changes, told in ways:
        arguments = given._replace(**changes)
        with using("native"), pytest.raises(ValueError, match=told):
            triton_kernels.momentum_compress(*arguments)


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
    arguments = Problem((300,)).arguments("momentum_compress", grads=[torch.randn(299)])
    with (
        pytest.raises(ValueError, match=r"grads must be .* \[300\] elements, or none, .* with \[299\]"),
        using("native"),
    ):
        triton_kernels.momentum_compress(*arguments)


def test_eagers_root_is_correctly_rounded_with_and_without_numpy():
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.randint(-44, 38, (1 << 16,))
    x[:4] = torch.tensor([0.0, 1e-45, 3.4e38, torch.inf])
    exact = x.double().sqrt().float()
    assert torch.equal(tl.sqrt_rn(x), exact)
    assert torch.equal(newton_sqrt(x), exact)


def test_sources_travel_with_the_package():
    folder = Path(native.__file__).parent
    included = {"block_io.h", "clock.h", "codes.h", "moments.h", "sums.h", "vote.c"}
    assert {path.name for path in folder.glob("*.[ch]")} == {*included, *native.SOURCES}
