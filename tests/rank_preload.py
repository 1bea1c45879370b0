"""Imports what ranks and their tests import, takes some steps, which import more, and is what ranks are forked from."""

from __future__ import annotations

import fault_ranks
import hypothesis  # noqa: F401
import interpreter  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp

from fusedonebit.comm import LocalTransport

torch.set_num_threads(1)  # threads would not survive the fork
for name in ("onebit-adam", "ring", "owner"):
    optimizer, params = fault_ranks.make(name, LocalTransport())
    for step in range(5):
        fault_ranks.set_gradients(params, 0, step)
        optimizer.step()
    optimizer.state_dict()
