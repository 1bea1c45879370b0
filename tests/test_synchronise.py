"""Between compressing and applying there are three ops, and nothing else on the device; sums have one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_arguments import Problem
from op_draws import LONG
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedonebit import triton_kernels
from fusedonebit.comm import CompressedAllReduce, SimulatedGroup, StepContext
from fusedonebit.triton_kernels import SCALE_NORMS, FlatLayout, using
from fusedonebit.triton_kernels.finish import LANES, PIECE
from fusedonebit.triton_kernels.native import library
from fusedonebit.triton_kernels.op import OPS


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_order_of_sums_is_that_of_lanes_then_of_neighbours(scope):
    """The specification, number by number."""
    arguments = Problem(LONG, scope=scope).arguments("finish", norm=SCALE_NORMS["contractive"])
    partials, (start, _, _, live, scale, *_), *_ = arguments

    def ordered(values: list[float]) -> float:
        lanes = [0.0] * LANES
        for i, value in enumerate(values):
            lanes[i % LANES] += value
        while len(lanes) > 1:
            lanes = [a + b for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
        return lanes[0]

    def total(values: list[float]) -> float:
        pieces = [ordered(values[at : at + PIECE]) for at in range(0, len(values), PIECE)]
        return ordered(pieces)

    triton_kernels.finish(*arguments)
    longest = int(start.diff().argmax())
    absolute, squares = (total(row[start[longest] : start[longest + 1]].tolist()) for row in partials[:2])
    n = float(live[longest])
    assert float(scale[longest]) == torch.tensor(min((squares / n) ** 0.5, 1.9 * (absolute / n)), dtype=torch.float32)


class Counted(TorchDispatchMode):
    """Notes every operation but views, those that our ops call as well."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("fusedonebit::"):
            self.names.append(name)
            inside = Counted()
            with inside:
                OPS[name.removeprefix("fusedonebit::")].run(*args)
            self.names += inside.names
            return None
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in args if isinstance(t, Tensor)]
        view = isinstance(result, Tensor) and any(
            result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in tensors
        )
        if not view or func._schema.is_mutable:
            self.names.append(name)
        return result


@pytest.mark.skipif(library() is None, reason="no C compiler: eager ops are made of torch's")
@pytest.mark.parametrize(
    "told", [StepContext(number=7), StepContext(), StepContext(hold=torch.zeros(1, dtype=torch.int32))], ids=str
)
@pytest.mark.parametrize("scope", ["global", "block"])
def test_nothing_but_five_ops_runs_in_a_synchronisation(scope, told):
    def run(rank: int, transport: Any) -> list[str]:
        reduce = CompressedAllReduce(FlatLayout((700, 20), 2, 128), transport, scale_scope=scope)
        tensors, coef = [torch.randn(700), torch.randn(20)], reduce.plain_coefficients()
        calls = [lambda part: part.compress(tensors, coef)]
        reduce.synchronise(calls[0], told)
        with Counted() as counted:
            reduce.write(calls[0], told)
        transport.all_to_all(reduce.gathered.buffer, reduce.to_servers.buffer)
        with counted:
            reduce.serve(told)
        transport.all_gather(reduce.gathered.buffer, reduce.served.buffer)
        with counted:
            reduce.receive(told)
        return counted.names

    ops = ("momentum_compress", "finish", "server_reduce", "finish", "receive")
    with using("native"):
        for names in SimulatedGroup(2).run(run):
            assert names == [f"fusedonebit::{op}" for op in ops]
