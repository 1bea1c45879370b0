"""What whole steps launch: recorded as launch keys, all of which compile, without a GPU."""

from __future__ import annotations

import pytest
from launch_keys import Noting

from fusedonebit.triton_kernels.op import OPS


@pytest.mark.parametrize("name", OPS)
def test_tritons_launcher_takes_the_arguments_of_each_kernel(name):
    # It has variables of its own in their scope: an argument called ``params`` has failed all launches on a GPU.
    keys = set()
    stand_in = Noting(OPS[name], keys)
    stand_in[(1,)](*[3] * len(OPS[name].parameters), num_warps=4, enable_fp_fusion=False)
    ((_, num_warps, arguments),) = keys
    assert num_warps == 4
    assert [argument for argument, _, _ in arguments] == [parameter.name for parameter in OPS[name].parameters]
    assert {(kind, value) for _, kind, value in arguments} <= {("i32", ""), ("constexpr", 3)}
