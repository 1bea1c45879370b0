"""Imports what ranks and their tests import, takes some steps, which import more, and is what ranks are forked from."""

from __future__ import annotations

import fault_ranks
import hypothesis  # noqa: F401
import interpreter  # noqa: F401
import observe
import pytest  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp

from fusedonebit.comm import LocalTransport

torch.set_num_threads(1)  # threads would not survive the fork
for name in ("onebit-adam", "ring", "owner"):
    optimizer, _ = fault_ranks.make(name, LocalTransport())
    observe.train(optimizer, 0, range(5))
    optimizer.state_dict()
