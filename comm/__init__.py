"""The wire format and the collectives on packed uint8 buffers.

They know process groups and tensors, not optimizers.
"""

from __future__ import annotations

from .agree import DisagreementError, agree, checksum
from .allreduce import CompressedAllReduce
from .transport import CollectiveError, LocalTransport, TorchTransport, Traffic, Transport, make_transport
from .wire import Flag, Messages, Word, describe_mismatch

__all__ = [
    "CollectiveError",
    "CompressedAllReduce",
    "DisagreementError",
    "Flag",
    "LocalTransport",
    "Messages",
    "TorchTransport",
    "Traffic",
    "Transport",
    "Word",
    "agree",
    "checksum",
    "describe_mismatch",
    "make_transport",
]
