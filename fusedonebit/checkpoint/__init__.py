"""Save and load through ``torch.distributed.checkpoint``, and look into checkpoints."""

from __future__ import annotations

from ..core.header import FORMAT, KEY
from ..core.state.saving import forget_checksums, header_of

__all__ = ["FORMAT", "KEY", "forget_checksums", "header_of"]
