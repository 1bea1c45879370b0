"""Whether a CUDA graph is being captured."""

from __future__ import annotations

import torch


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on a ``device``: what runs now only runs when the graph is replayed."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # torch asks the current one, which need not be it
        return torch.cuda.is_current_stream_capturing()
