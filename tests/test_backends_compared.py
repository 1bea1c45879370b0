"""The tests' own comparison of backends asks each device only for what runs on it, so that it runs on a GPU too."""

from __future__ import annotations

import pytest
import torch
from backends import compared
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedonebit.triton_kernels import using
from fusedonebit.triton_kernels.backends import chosen


@pytest.mark.needs_compiler
@pytest.mark.parametrize(("device", "kernels"), [("cuda", ["triton"]), ("cpu", ["triton", "native"])])
def test_compared_kernels_run_on_the_tensors_device(device, kernels):
    with FakeTensorMode():  # has tensors of devices that are not there
        tensors = [torch.empty(8, device=device), torch.empty((), dtype=torch.int64, device=device)]
    assert compared(tensors) == kernels
    for backend in compared(tensors):
        with using(backend):
            assert chosen(tensors[0].device.type) == backend
