"""Runs an op on all backends from equal arguments: each writes the same bits, what is declared as written alone, and
nothing outside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedonebit.triton_kernels import using
from fusedonebit.triton_kernels.native import KERNELS, library
from fusedonebit.triton_kernels.op import OPS, launches
from fusedonebit.triton_kernels.tables import EMPTY_ROW

ANY_ORDER = 1e-14
"""Float64 sums may differ by as much where each backend adds in an order of its own."""
TOLERANCES = {
    **dict.fromkeys(("adam_update", "lamb_update", "lamb_ratio", "gradient_squares"), ANY_ORDER),
    **dict.fromkeys(("momentum_compress", "outer_compress", "server_reduce"), ANY_ORDER),
    "finish_alone": 2.3e-16,  # torch's own root of a float64 may be a unit off on CPUs
}
"""Of float64 numbers; in all other ops they have one order, and equal bits."""
OF_ADAM = ("moments_exp_avg", "moments_exp_avg_sq", "moments_exponents", "exp_avg_sq_sums")
NOBODYS = {"adam_update": OF_ADAM, "lamb_update": (*OF_ADAM, "norms")}
"""What ops may leave as it is of blocks where nothing counts: nobody reads it."""


def tensors(arguments: Sequence[Any]) -> list[Tensor]:
    """All tensors among an op's arguments, in lists and nouns too, each with what lies around it in its memory."""
    found = []
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            found += tensors(argument)
        elif isinstance(argument, Tensor):
            found.append(argument if argument._base is None else argument._base)
    return found


def bits_of(tensor: Tensor) -> Tensor:
    """The bits, so that NaN equals NaN (whatever its payload) and -0.0 differs from 0.0."""
    if tensor.is_floating_point():
        tensor = torch.where(torch.isnan(tensor), torch.nan, tensor)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(integer)


def compared(found: Sequence[Tensor]) -> list[str]:
    """What is compared with plain torch for such tensors: C, if there is a compiler, for those of the CPU only."""
    on_cpu = all(t.device.type == "cpu" for t in found)
    return ["triton", "native"] if on_cpu and library() is not None else ["triton"]


def each(name: str, arguments: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield an op's tensors by their flat names, those of lists too."""
    signature = OPS[name].signature
    for flat, x in zip(signature.slots, signature.flat(*arguments), strict=False):
        for tensor in x if isinstance(x, (list, tuple)) else [x]:
            if isinstance(tensor, Tensor):
                yield flat, tensor


class Memory:
    """What lies in the memory of an op's tensors, those that it writes and all around them."""

    def __init__(self, name: str, arguments: Sequence[Any]) -> None:
        self._rooms: dict[int, tuple[str, Tensor, Tensor, Tensor]] = {}
        for flat, x in each(name, arguments):
            room = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.detach().untyped_storage())
            kept = self._rooms.setdefault(room.data_ptr(), (flat, room, room.clone(), torch.zeros_like(room)))
            if flat in OPS[name].writes and x.numel():
                item = x.element_size()
                places = kept[3][: len(room) // item * item].view(-1, item)[:, 0]
                strides = [stride * item for stride in x.stride()]
                kept[3].as_strided(x.shape, strides, x.storage_offset() * item).fill_(1)
                for byte in range(1, item):
                    kept[3][byte::item][: len(places)] |= places

    def assert_written_alone(self, where: str) -> None:
        """Nothing has changed but what is declared as written."""
        for flat, room, before, written in self._rooms.values():
            changed = ((room != before) & (written == 0)).nonzero().view(-1)
            assert not len(changed), f"{where} has written {len(changed)} bytes of or around {flat}, at {changed[:8]}"


def call(name: str, backend: str, arguments: Sequence[Any]) -> None:
    """Run an op on a backend; it launches one kernel, or none."""
    before, memory = launches.total(), Memory(name, arguments)
    with using(backend):
        getattr(torch.ops.fusedonebit, name)(*OPS[name].signature.flat(*arguments))
    launched = backend == "triton" or (backend == "native" and name in KERNELS)
    assert launches.total() == before + launched
    memory.assert_written_alone(f"{name} on {backend}")


def assert_equal_backends(name: str, make: Callable[[], Sequence[Any]], rtol: float | None = None) -> Any:
    """Run an op on all backends from equal arguments, and return what torch has made of them.

    Every argument must end with equal bits, but for float64 numbers, which may differ by ``TOLERANCES`` or ``rtol``.
    """
    plain, rtol = make(), TOLERANCES.get(name, 0.0) if rtol is None else rtol
    call(name, "plain", plain)
    for backend in compared([x for _, x in each(name, plain)]):
        arguments = make()
        call(name, backend, arguments)
        for (flat, expected), (_, found) in zip(each(name, plain), each(name, arguments), strict=True):
            if flat in NOBODYS.get(name, ()):
                expected, found = (of_somebody(x, plain) for x in (expected, found))
            told = f"{name}: {flat} on {backend}"
            if expected.dtype is torch.float64:
                torch.testing.assert_close(
                    found, expected, rtol=rtol, atol=0.0, equal_nan=True, msg=lambda text, told=told: f"{told}: {text}"
                )
            else:
                bad = (bits_of(expected) != bits_of(found)).nonzero()
                assert not len(bad), f"{told}: {len(bad)} numbers differ, {differing(bad[0].tolist(), expected, found)}"
    return plain


def of_somebody(x: Tensor, arguments: Any) -> Tensor:
    """Return what is there of blocks in which anything counts."""
    counts = arguments.places.live_row != EMPTY_ROW
    per_block = x.shape[-1] // len(counts)
    return x[..., : len(counts) * per_block].unflatten(-1, (len(counts), per_block))[..., counts, :]


def differing(at: Sequence[int], expected: Tensor, found: Tensor) -> str:
    index = tuple(at)
    return f"at {at} {found[index].item()} where torch has {expected[index].item()}"
