"""What a rank imports at its first step, and where it is imported once for all that are forked afterwards."""

from __future__ import annotations

import fault_ranks
import torch

from fusedonebit.comm import LocalTransport

torch.set_num_threads(1)  # threads would not survive the fork
for name in ("onebit-adam", "ring", "owner"):
    optimizer, params = fault_ranks.make(name, LocalTransport())
    for step in range(5):
        fault_ranks.set_gradients(params, 0, step)
        optimizer.step()
    optimizer.state_dict()
